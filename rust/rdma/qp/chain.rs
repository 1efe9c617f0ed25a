// SPDX-License-Identifier: GPL-2.0

//! Posting several requests with one call of the driver: one lock of its, one doorbell.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_send_wr.next`)

use core::{
    mem::MaybeUninit,
    ptr::NonNull, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

use super::{
    state,
    Handler,
    Poster,
    Qp,
    QueuePair,
    Side,
    SIGNALED, //
};
use crate::{
    atomic,
    request::{
        Inner,
        WorkRequest, //
    }, //
};

/// The most requests of a chain: what the driver gets of them is on the stack.
const MAX: usize = 16;

/// Up to `N` requests that are posted together, 16 at most.
///
/// ```
/// use kernel::prelude::*;
/// use rdma::{qp::*, request::WorkRequest};
///
/// fn send_all<'bound, H: Handler<'bound>>(
///     qp: &QueuePair<'bound, H>,
///     requests: KVec<WorkRequest<'bound, H::Tag>>,
/// ) -> Result {
///     let mut chain = Chain::<_, 16>::new();
///     for request in requests {
///         if chain.is_full() {
///             qp.post_sends(&mut chain)?;
///         }
///         let _ = chain.push(request);
///     }
///     qp.post_sends(&mut chain)
/// }
/// ```
///
/// # Invariants
///
/// The first `len` slots are filled, each with what a request was turned into.
pub struct Chain<'bound, T, const N: usize> {
    slots: [MaybeUninit<NonNull<Inner<'bound, T>>>; N],
    len: usize,
}

// SAFETY: It owns requests.
unsafe impl<T: Send, const N: usize> Send for Chain<'_, T, N> {}
// SAFETY: A shared reference only leads to how many there are.
unsafe impl<T, const N: usize> Sync for Chain<'_, T, N> {}

impl<'bound, T, const N: usize> Chain<'bound, T, N> {
    /// Makes an empty chain.
    pub fn new() -> Self {
        const { assert!(N > 0 && N <= MAX) }
        Self {
            slots: [const { MaybeUninit::uninit() }; N],
            len: 0,
        }
    }

    /// Appends a request.
    ///
    /// # Errors
    ///
    /// The request, if there is no room for it.
    #[inline]
    pub fn push(&mut self, request: WorkRequest<'bound, T>) -> Result<(), WorkRequest<'bound, T>> {
        let Some(slot) = self.slots.get_mut(self.len) else {
            return Err(request);
        };
        // INVARIANT: Filled here.
        slot.write(request.into_raw());
        self.len = self.len.wrapping_add(1);
        Ok(())
    }

    /// Takes the last request off the chain.
    #[inline]
    pub fn pop(&mut self) -> Option<WorkRequest<'bound, T>> {
        self.len = self.len.checked_sub(1)?;
        let slot = self.slots.get(self.len)?;
        // SAFETY: By the type invariant it was filled, and it counts no more.
        Some(unsafe { WorkRequest::from_raw(slot.assume_init_read()) })
    }

    /// How many requests there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether there are `N`.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == N
    }
}

impl<T, const N: usize> Drop for Chain<'_, T, N> {
    fn drop(&mut self) {
        while let Some(request) = self.pop() {
            drop(request);
        }
    }
}

impl<T, const N: usize> Default for Chain<'_, T, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// A request as the driver gets it.
pub(super) trait Raw: Sized {
    /// # Safety
    ///
    /// `wr_cqe` is part of a request, `sge` its one scatter list entry, if `num_sge` is not zero.
    unsafe fn new(
        wr_cqe: *mut bindings::ib_cqe,
        sge: *mut bindings::ib_sge,
        num_sge: c_int,
        next: *mut Self,
    ) -> Self;

    /// Has it be the last.
    fn end(&mut self);

    /// The one that it is linked to.
    fn next(&self) -> *const Self;

    /// The start of the request.
    fn wr_cqe(&self) -> *mut bindings::ib_cqe;

    /// # Safety
    ///
    /// All is valid, and what the requests refer to stays until they are complete.
    unsafe fn post(qp: *mut bindings::ib_qp, first: *const Self, bad: *mut *const Self) -> c_int;
}

/// The two kinds have the same beginning, and what else a send has.
macro_rules! raw {
    ($wr:ident, $id:ident, $post:ident { $($field:ident: $value:expr,)* }) => {
        impl Raw for bindings::$wr {
            #[inline(always)]
            unsafe fn new(
                wr_cqe: *mut bindings::ib_cqe,
                sge: *mut bindings::ib_sge,
                num_sge: c_int,
                next: *mut Self,
            ) -> Self {
                // All fields are written here: the default values come from a function that is called.
                Self {
                    next,
                    __bindgen_anon_1: bindings::$id { wr_cqe },
                    sg_list: sge,
                    num_sge,
                    $($field: $value,)*
                }
            }

            #[inline(always)]
            fn end(&mut self) {
                self.next = core::ptr::null_mut();
            }

            fn next(&self) -> *const Self {
                self.next
            }

            fn wr_cqe(&self) -> *mut bindings::ib_cqe {
                // SAFETY: The member of the union that is set by `new`.
                unsafe { self.__bindgen_anon_1.wr_cqe }
            }

            #[inline(always)]
            unsafe fn post(
                qp: *mut bindings::ib_qp,
                first: *const Self,
                bad: *mut *const Self,
            ) -> c_int {
                // SAFETY: By the function's requirements. A device without this function is none that
                // clients are told of, see `ib_device_check_mandatory()`.
                unsafe {
                    let post = (*(*qp).device).ops.$post.unwrap_unchecked();
                    post(qp, first, bad)
                }
            }
        }
    };
}

raw!(
    ib_send_wr,
    ib_send_wr__bindgen_ty_1,
    post_send {
        opcode: bindings::ib_wr_opcode_IB_WR_SEND,
        send_flags: SIGNALED,
        ex: bindings::ib_send_wr__bindgen_ty_2 { imm_data: 0 },
    }
);
raw!(ib_recv_wr, ib_recv_wr__bindgen_ty_1, post_recv {});

impl<'bound, H: Handler<'bound>> Qp<'bound, H> {
    /// Posts the requests of a chain, if there is room for all of them.
    #[inline]
    fn post_chain<R: Raw, const N: usize>(
        &self,
        side: Side,
        chain: &mut Chain<'bound, H::Tag, N>,
    ) -> Result {
        let len = chain.len;
        if len == 0 {
            return Ok(());
        }
        let units = |number: usize| state::unit(side) * number as u64;
        let before = atomic::fetch_add_relaxed(&self.state, units(len));
        let limit = u64::from(atomic::load_relaxed(self.limit(side)));
        if state::count(before, side) + len as u64 > limit {
            let error = self.refusal(side);
            self.count_out(units(len));
            return Err(error);
        }

        // What the driver gets: linked from the first to the last, each with its own scatter list.
        let mut entries = [const { MaybeUninit::<bindings::ib_sge>::uninit() }; N];
        // SAFETY: An array of what may be uninitialized may be so itself. Written as a list of these, it
        // would be zeroed first.
        let mut raws: [MaybeUninit<R>; N] = unsafe { MaybeUninit::uninit().assume_init() };
        let first = raws.as_mut_ptr().cast::<R>();
        let mut last = first;
        // From here on they are nobody's but the device's.
        let slots = chain.slots.iter().take(core::mem::take(&mut chain.len));
        for ((slot, entry), raw) in slots.zip(&mut entries).zip(&mut raws) {
            // SAFETY: By the type invariant it was filled, and it counts no more.
            let request = unsafe { WorkRequest::from_raw(slot.assume_init_read()) };
            let (inner, entry) = self.prepare(side, request, entry);
            last = raw.as_mut_ptr();
            // SAFETY: The request is ours until it is posted, and the entry goes with it. What comes after
            // the last is linked to no more, see below.
            unsafe {
                let wr_cqe = &raw mut (*inner.as_ptr()).header.cqe;
                let num_sge = c_int::from(entry.length != 0);
                raw.write(R::new(wr_cqe, entry, num_sge, last.wrapping_add(1)));
            }
        }

        let mut bad: *const R = core::ptr::null();
        // SAFETY: There is at least one, so the last was written. The queue pair is valid. The requests,
        // which the completions are found by, and their buffers stay where they are until they come back.
        // The rest is copied by the call.
        let ret = unsafe {
            (*last).end();
            R::post(self.raw.as_raw(), first, &mut bad)
        };
        if ret == 0 {
            return Ok(());
        }
        // One that isn't ours says nothing.
        let ours = (0..len).any(|i| core::ptr::eq(first.wrapping_add(i), bad));
        let bad = if ours { bad } else { core::ptr::null() };
        // SAFETY: It is one of those that were linked above, or null.
        unsafe { self.chain_not_posted(side, bad, chain) };
        Err(Error::from_errno(ret))
    }

    /// What to make of a driver's error. From the one that it names on, the requests are ours again. If it
    /// names none, nobody knows which it has, so all stay counted.
    ///
    /// # Safety
    ///
    /// `bad` is null, or one of those that `post_chain` has linked, with the chain's requests in them.
    #[cold]
    unsafe fn chain_not_posted<R: Raw, const N: usize>(
        &self,
        side: Side,
        mut bad: *const R,
        chain: &mut Chain<'bound, H::Tag, N>,
    ) {
        if bad.is_null() {
            self.doubt();
            return;
        }
        // SAFETY: By the function's requirements; the last has no successor.
        while let Some(raw) = unsafe { bad.as_ref() } {
            // SAFETY: The driver says that it didn't take the request, whose start this is.
            let request = unsafe {
                let inner = raw.wr_cqe().cast::<Inner<'bound, H::Tag>>();
                self.not_taken(NonNull::new_unchecked(inner))
            };
            // There was room for it before.
            let _ = chain.push(request);
            bad = raw.next();
        }
        self.count_out(state::unit(side) * chain.len as u64);
    }
}

impl<'bound, H: Handler<'bound>> QueuePair<'bound, H> {
    /// Posts the sends of a chain, all with one call of the driver. May be called from any context.
    ///
    /// What the driver takes leaves the chain; what it doesn't stays in it, in order.
    ///
    /// C function: `ib_post_send()`.
    ///
    /// # Errors
    ///
    /// As for [`Self::post_send`]; `ENOMEM` if there isn't room for all. If the driver reports an error
    /// and doesn't say which requests it had taken, they leave the chain as well, and come back by their
    /// completions, or when the queue pair goes.
    #[inline]
    pub fn post_sends<const N: usize>(&self, chain: &mut Chain<'bound, H::Tag, N>) -> Result {
        self.0
            .post_chain::<bindings::ib_send_wr, N>(Side::Send, chain)
    }

    /// Posts the receives of a chain, all with one call of the driver. May be called from any context.
    ///
    /// C function: `ib_post_recv()`.
    ///
    /// # Errors
    ///
    /// As for [`Self::post_sends`].
    #[inline]
    pub fn post_recvs<const N: usize>(&self, chain: &mut Chain<'bound, H::Tag, N>) -> Result {
        self.0
            .post_chain::<bindings::ib_recv_wr, N>(Side::Recv, chain)
    }
}

impl<'bound, H: Handler<'bound>> Poster<'_, 'bound, H> {
    /// As [`QueuePair::post_sends`]. The place of the completed request isn't for a chain.
    #[inline]
    pub fn post_sends<const N: usize>(&self, chain: &mut Chain<'bound, H::Tag, N>) -> Result {
        self.qp
            .post_chain::<bindings::ib_send_wr, N>(Side::Send, chain)
    }

    /// As [`QueuePair::post_recvs`]. The place of the completed request isn't for a chain.
    #[inline]
    pub fn post_recvs<const N: usize>(&self, chain: &mut Chain<'bound, H::Tag, N>) -> Result {
        self.qp
            .post_chain::<bindings::ib_recv_wr, N>(Side::Recv, chain)
    }
}
