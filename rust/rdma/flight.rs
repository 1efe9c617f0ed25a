// SPDX-License-Identifier: GPL-2.0

//! What is in flight, and how it comes back when the device forgot it.
//!
//! A completion leads to its request by itself, so that nobody has to know the requests of a queue
//! pair, as long as each has a completion. Not all drivers see to that: siw of Linux 7.3 forgets the
//! sends of a queue pair whose other side closed first, and a driver that fails a post without saying
//! whether it took the request leaves it open whether there will be one.
//!
//! So each queue pair has a [`Roll`]: a request enters it when it is posted there for the first time,
//! and stays for as long as it lives and isn't posted elsewhere, or until the queue pair goes. In steady
//! state, posting and completing cost two comparisons and a flag. What is still in flight when the queue
//! pair is destroyed is handed back as flushed: by a handler of the completion queue, behind all
//! completions that are in the queue, so that none of them can be for a request that was handed back
//! before. Such a handler is called for a [`Marker`].

use core::{
    cell::UnsafeCell,
    marker::PhantomPinned,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    new_spinlock_irq,
    prelude::*,
    sync::{
        Arc,
        SpinLockIrq, //
    },
};
use rdma_bindings as bindings;

use crate::{
    latch::Latch,
    pd::ProtectionDomain,
    qp::Depths,
    raw_qp::RawQp, //
};

/// What a request was posted as.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Way {
    Send,
    Recv,
    /// A send that has no completion of its own, unless it fails.
    Silent,
    /// The last of a chain that was posted as one, whose completion is that of all.
    Last,
}

/// The part of a request that the RDMA core and the queue pair know it by. The request begins with it.
///
/// # Invariants
///
/// While `listed_as` is set, the request is on the roll of the queue pair `qp`, stays where it is, and
/// `cqe.done` is what goes with that way.
#[repr(C)]
pub(crate) struct Header {
    /// Passed to the RDMA core, which calls `cqe.done` with a pointer to it.
    pub(crate) cqe: bindings::ib_cqe,
    /// The queue pair that the request is posted to, or was last. It may be gone.
    pub(crate) qp: *const c_void,
    /// Belongs to who has the request and posts to `qp`. Else to who has the lock of the roll.
    listed_as: UnsafeCell<Option<Way>>,
    /// Whether the device has the request, or may have it. Belongs to who has the request; the device
    /// has its own ways of telling that it is posted, and that it is complete.
    in_flight: UnsafeCell<bool>,
    /// Of a chain that was posted as one: how many are before it.
    pub(crate) nth: u8,
    /// How many bytes are sent, or may be received.
    pub(crate) len: u32,
    _pin: PhantomPinned,
}

/// What the RDMA core calls for a completion.
pub(crate) type Done = unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc);

impl Header {
    pub(crate) fn new(len: u32) -> Self {
        // INVARIANT: It is on no roll.
        Self {
            cqe: bindings::ib_cqe { done: None },
            qp: core::ptr::null(),
            listed_as: UnsafeCell::new(None),
            in_flight: UnsafeCell::new(false),
            nth: 0,
            len,
            _pin: PhantomPinned,
        }
    }

    /// Whether the request is on the roll of the queue pair `qp`, which it is posted to, as one that goes this
    /// way.
    #[inline]
    pub(crate) fn is_listed(&mut self, qp: *const c_void, way: Way) -> bool {
        // That it is listed where `qp` is says that it is on the roll of this very queue pair: of one that
        // was there before, `Roll::dismiss` has taken off all. Nor does anybody take it off this one, as
        // long as it is posted to.
        self.qp == qp && *self.listed_as.get_mut() == Some(way)
    }

    /// Puts the request on the roll of the queue pair `qp`, and notes what is to be done when it is complete.
    /// `entry` is the request's.
    ///
    /// # Safety
    ///
    /// The caller has the request, which stays where it is until [`Entry::leave`] is called.
    #[cold]
    pub(crate) unsafe fn list(
        &mut self,
        entry: &Entry,
        qp: *const c_void,
        roll: &Arc<Roll>,
        way: Way,
        done: Done,
    ) {
        let again = self.qp == qp && self.listed_as.get_mut().is_some();
        if !again {
            // What is noted of another queue pair may be looked at until then.
            entry.leave();
        }
        self.cqe.done = Some(done);
        self.qp = qp;
        *self.listed_as.get_mut() = Some(way);
        if !again {
            entry.enter(self, roll);
        }
    }

    /// Notes that the request is about to be posted.
    #[inline]
    pub(crate) fn take_off(&mut self) {
        *self.in_flight.get_mut() = true;
    }

    /// As what it is in flight.
    ///
    /// # Safety
    ///
    /// It is in flight, its queue pair exists, and nobody sweeps the roll.
    #[inline]
    pub(crate) unsafe fn way(&self) -> Way {
        // SAFETY: By the function's requirements it is on the roll, and nobody changes that.
        unsafe { (*self.listed_as.get()).unwrap_unchecked() }
    }

    /// Notes that the request is back.
    #[inline]
    pub(crate) fn land(&mut self) {
        *self.in_flight.get_mut() = false;
    }
}

/// What a request is found by on a roll. It is not used on the way of a request that was posted before.
pub(crate) struct Entry {
    /// The roll that the request last entered. Belongs to who has the request.
    roll: UnsafeCell<Option<Arc<Roll>>>,
    /// Belongs to who has the lock of `roll`.
    links: UnsafeCell<Links>,
    _pin: PhantomPinned,
}

/// # Invariants
///
/// While `header` is set the entry is on a list. It is that of the same request.
struct Links {
    header: *const Header,
    prev: *const Entry,
    next: *const Entry,
}

impl Entry {
    pub(crate) fn new() -> Self {
        // INVARIANT: It is on no list.
        Self {
            roll: UnsafeCell::new(None),
            links: UnsafeCell::new(Links {
                header: core::ptr::null(),
                prev: core::ptr::null(),
                next: core::ptr::null(),
            }),
            _pin: PhantomPinned,
        }
    }

    fn enter(&self, header: &Header, roll: &Arc<Roll>) {
        // SAFETY: Only called by who has the request, after it has left another.
        unsafe { *self.roll.get() = Some(roll.clone()) };
        let mut list = roll.list.lock();
        // SAFETY: With the lock of the roll the links are ours, and those of the first.
        // INVARIANT: Both stay where they are until it leaves.
        unsafe {
            *self.links.get() = Links {
                header,
                prev: core::ptr::null(),
                next: list.first,
            };
            if let Some(next) = list.first.as_ref() {
                (*next.links.get()).prev = self;
            }
        }
        list.first = self;
    }

    /// Takes the request off the roll that it is on, if any. Called by who has it, before it is moved or
    /// freed. May be called from any context.
    pub(crate) fn leave(&self) {
        // SAFETY: By the function's requirements nobody else uses the field.
        let Some(roll) = (unsafe { (*self.roll.get()).take() }) else {
            return;
        };
        roll.list.lock().unlink(self);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.leave();
    }
}

/// # Invariants
///
/// Leads to all entries of this roll with a `header`, by their `links`.
struct List {
    first: *const Entry,
}

// SAFETY: The pointers are only followed with the lock held.
unsafe impl Send for List {}

impl List {
    /// Takes an entry off the list, unless that was done before. Says whose it is.
    fn unlink(&mut self, entry: &Entry) -> Option<NonNull<Header>> {
        // SAFETY: `self` is only reached with the lock of the roll, so the links are ours; by the type
        // invariant they lead to entries that are there. Nobody posts the request to its queue pair: who
        // calls this has it, or that queue pair is about to go.
        unsafe {
            let links = &mut *entry.links.get();
            let header =
                NonNull::new(core::mem::replace(&mut links.header, core::ptr::null()).cast_mut())?;
            *(*header.as_ptr()).listed_as.get() = None;
            match links.prev.as_ref() {
                Some(prev) => (*prev.links.get()).next = links.next,
                None => self.first = links.next,
            }
            if let Some(next) = links.next.as_ref() {
                (*next.links.get()).prev = links.prev;
            }
            Some(header)
        }
    }

    /// Takes the first entry off the list. Says whose it is.
    fn pop(&mut self) -> Option<NonNull<Header>> {
        // SAFETY: By the type invariant.
        let first = unsafe { self.first.as_ref() }?;
        self.unlink(first)
    }
}

/// The requests that were posted to a queue pair and still exist.
#[pin_data]
pub(crate) struct Roll {
    #[pin]
    list: SpinLockIrq<List>,
}

impl Roll {
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                // INVARIANT: There are none.
                list <- new_spinlock_irq!(List { first: core::ptr::null() }, "rdma::Roll::list"),
            }),
            GFP_KERNEL,
        )
    }

    /// Takes a request that is in flight off the list, and all others that are found before it.
    fn next_in_flight(&self) -> Option<NonNull<Header>> {
        let mut list = self.list.lock();
        loop {
            let header = list.pop()?;
            // SAFETY: Nothing is posted or completed here any more. To post it elsewhere its owner first
            // takes it off this list.
            if unsafe { *(*header.as_ptr()).in_flight.get() } {
                return Some(header);
            }
        }
    }

    /// Takes all requests off the list, since the queue pair is gone: what they note of it would be taken
    /// for another's that has its place.
    fn dismiss(&self) {
        // One at a time: there may be many.
        while self.list.lock().pop().is_some() {}
    }

    /// Hands back all that is in flight, as the RDMA core would, had the device flushed it.
    ///
    /// # Safety
    ///
    /// The queue pair is destroyed, nobody posts to it, and no completion of its requests is left in
    /// `cq`, in whose context this is called.
    pub(crate) unsafe fn hand_back(&self, cq: *mut bindings::ib_cq) {
        while let Some(header) = self.next_in_flight() {
            // SAFETY: By the function's requirements nobody but us knows a request that is in flight.
            let wr_cqe = unsafe { &raw mut (*header.as_ptr()).cqe };
            let mut wc = bindings::ib_wc {
                __bindgen_anon_1: bindings::ib_wc__bindgen_ty_1 { wr_cqe },
                status: bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
                ..Default::default()
            };
            // SAFETY: As above; this is its one completion.
            unsafe {
                if let Some(done) = (*wr_cqe).done {
                    done(cq, &mut wc);
                }
            }
        }
    }
}

/// What brings back the requests on a roll that the device forgot: a receive on a queue pair of its own,
/// whose completion comes behind all others of a completion queue. Part of the queue pair, and gone with it.
#[pin_data(PinnedDrop)]
pub(crate) struct Marker {
    cqe: bindings::ib_cqe,
    roll: Arc<Roll>,
    #[pin]
    seen: Latch,
}

// SAFETY: `cqe` doesn't change.
unsafe impl Sync for Marker {}
// SAFETY: As above.
unsafe impl Send for Marker {}

#[pinned_drop]
impl PinnedDrop for Marker {
    fn drop(self: Pin<&mut Self>) {
        self.roll.dismiss();
    }
}

impl Marker {
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            cqe: bindings::ib_cqe {
                done: Some(Self::done),
            },
            roll: Roll::new()?,
            seen <- Latch::new(),
        })
    }

    pub(crate) fn roll(&self) -> &Arc<Roll> {
        &self.roll
    }

    /// Hands back all that is in flight, in a handler of `cq`. Sleeps, and waits for that handler, for a
    /// little more than `patience` milliseconds at most.
    ///
    /// # Errors
    ///
    /// Those of making a queue pair; `ETIMEDOUT` if the handler was not called.
    ///
    /// # Safety
    ///
    /// - Called once. The queue pair that this is part of is destroyed in the kernel, and nobody posts to
    ///   it. If this fails, its memory stays.
    /// - `cq` was its completion queue, is of the device of `pd`, which has a port `port`, and has room
    ///   for one more completion.
    pub(crate) unsafe fn sweep(
        &self,
        pd: &ProtectionDomain<'_>,
        cq: *mut bindings::ib_cq,
        port: u32,
        patience: u32,
    ) -> Result {
        // SAFETY: By the function's requirements.
        let qp = unsafe { RawQp::new(pd, cq, Depths { send: 0, recv: 1 }) }?;
        let posted = qp.init(port).and_then(|()| self.post(&qp));
        let seen = posted.is_ok() && {
            // If the driver flushes only when the queue pair goes, the error is of no consequence.
            let _ = qp.flush();
            self.seen.wait_unchecked(patience / 10)
        };
        // SAFETY: Nobody else knows the queue pair.
        let destroyed = unsafe { qp.destroy() };
        posted.and(destroyed)?;
        if seen || self.seen.wait_unchecked(patience) {
            Ok(())
        } else {
            Err(ETIMEDOUT)
        }
    }

    /// Posts an empty receive.
    fn post(&self, qp: &RawQp) -> Result {
        let wr = bindings::ib_recv_wr {
            __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 {
                wr_cqe: (&raw const self.cqe).cast_mut(),
            },
            ..Default::default()
        };
        let mut bad: *const bindings::ib_recv_wr = core::ptr::null();
        // SAFETY: The queue pair is valid, and the marker stays until its completion was seen.
        unsafe {
            let post = (*(*qp.as_raw()).device).ops.post_recv.ok_or(EOPNOTSUPP)?;
            to_result(post(qp.as_raw(), &wr, &mut bad))
        }
    }

    /// # Safety
    ///
    /// For the RDMA core only, as `ib_cqe.done` of a marker.
    unsafe extern "C" fn done(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: `wc` is valid for the call, and by the requirements of `sweep` the marker stays.
        let marker = unsafe {
            let cqe = (*wc).__bindgen_anon_1.wr_cqe;
            &*kernel::container_of!(cqe, Self, cqe)
        };
        // SAFETY: By the requirements of `sweep`. A completion queue is in order, so that what was in it
        // when the queue pair was destroyed has been handled.
        unsafe { marker.roll.hand_back(cq) };
        // The marker may be gone after this.
        marker.seen.open();
    }
}
