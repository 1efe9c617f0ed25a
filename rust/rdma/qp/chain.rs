// SPDX-License-Identifier: GPL-2.0

//! Posting several requests with one call of the driver: one lock of its, one doorbell.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_send_wr.next`)

use core::{
    mem::MaybeUninit,
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed, //
};
use rdma_bindings as bindings;

use super::{
    state,
    ChainHandler,
    Handler,
    Poster,
    Qp,
    QueuePair,
    Side,
    SIGNALED, //
};
use crate::{
    atomic,
    completion::Completion,
    context::{
        PollContext,
        Trampoline, //
    },
    flight::{
        Done,
        Header,
        Way, //
    },
    request::{
        Inner,
        WorkRequest,
        BEFORE, //
    }, //
};

/// The most requests of a chain: what the driver gets of them is on the stack.
pub const MAX_CHAIN: usize = 16;

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
/// The first `len` slots are filled.
pub struct Chain<'bound, T, const N: usize = MAX_CHAIN> {
    slots: [MaybeUninit<WorkRequest<'bound, T>>; N],
    len: usize,
}

impl<'bound, T, const N: usize> Chain<'bound, T, N> {
    /// Makes an empty chain.
    pub fn new() -> Self {
        const { assert!(N > 0 && N <= MAX_CHAIN) }
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
        slot.write(request);
        self.len = self.len.wrapping_add(1);
        Ok(())
    }

    /// Takes the last request off the chain.
    #[inline]
    pub fn pop(&mut self) -> Option<WorkRequest<'bound, T>> {
        self.len = self.len.checked_sub(1)?;
        let slot = self.slots.get(self.len)?;
        // SAFETY: By the type invariant it was filled, and it counts no more.
        Some(unsafe { slot.assume_init_read() })
    }

    /// The requests, from the first to the last.
    #[inline]
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut WorkRequest<'bound, T>> {
        let slots = self.slots.iter_mut().take(self.len);
        // SAFETY: By the type invariant it was filled.
        slots.map(|slot| unsafe { slot.assume_init_mut() })
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

/// The requests, from the first to the last.
impl<'bound, T, const N: usize> IntoIterator for Chain<'bound, T, N> {
    type Item = WorkRequest<'bound, T>;
    type IntoIter = IntoIter<'bound, T, N>;

    #[inline]
    fn into_iter(mut self) -> Self::IntoIter {
        if let Some(filled) = self.slots.get_mut(..self.len) {
            filled.reverse();
        }
        IntoIter(self)
    }
}

/// An iterator over the requests of a chain, which are taken off its end.
pub struct IntoIter<'bound, T, const N: usize>(Chain<'bound, T, N>);

impl<'bound, T, const N: usize> Iterator for IntoIter<'bound, T, N> {
    type Item = WorkRequest<'bound, T>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.0.pop()
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

    /// Asks for no completion, unless it fails.
    fn silence(&mut self);

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
    ($wr:ident, $id:ident, $post:ident $(, $silent:ident)? { $($field:ident: $value:expr,)* }) => {
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

            #[inline(always)]
            fn silence(&mut self) {
                $(self.$silent = 0;)?
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
    post_send,
    send_flags {
        opcode: bindings::ib_wr_opcode_IB_WR_SEND,
        send_flags: SIGNALED,
        ex: bindings::ib_send_wr__bindgen_ty_2 { imm_data: 0 },
    }
);
raw!(ib_recv_wr, ib_recv_wr__bindgen_ty_1, post_recv {});

/// What the RDMA core calls for sends that were posted as one: for the last of them, and for any other that
/// fails.
#[derive(Clone, Copy)]
struct AsOne {
    last: Done,
    other: Done,
}

impl<'bound, H: Handler<'bound>> Qp<'bound, H> {
    /// Posts the requests of a chain, if there is room for all of them.
    #[inline]
    fn post_chain<R: Raw, const N: usize>(
        &self,
        side: Side,
        chain: &mut Chain<'bound, H::Tag, N>,
        as_one: Option<AsOne>,
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
        let result = self.hand_over_chain::<R, N>(side, chain, as_one);
        if result.is_err() {
            self.count_out(units(chain.len));
        }
        result
    }

    /// Gives the requests of a chain to the device. They are counted. What the device doesn't take stays in
    /// the chain.
    #[inline]
    fn hand_over_chain<R: Raw, const N: usize>(
        &self,
        side: Side,
        chain: &mut Chain<'bound, H::Tag, N>,
        as_one: Option<AsOne>,
    ) -> Result {
        let as_one = as_one.filter(|_| self.speaks_for_others);
        // What the driver gets: linked from the first to the last, each with its own scatter list.
        let mut entries = [const { MaybeUninit::<bindings::ib_sge>::uninit() }; N];
        // SAFETY: An array of what may be uninitialized may be so itself. Written as a list of these, it
        // would be zeroed first.
        let mut raws: [MaybeUninit<R>; N] = unsafe { MaybeUninit::uninit().assume_init() };
        let first = raws.as_mut_ptr().cast::<R>();
        let mut last = first;
        let mut before = [core::ptr::null_mut(); BEFORE];
        // From here on they are nobody's but the device's.
        let len = core::mem::take(&mut chain.len);
        let slots = chain.slots.iter().take(len);
        let mut nth = 0u8;
        for ((slot, entry), raw) in slots.zip(&mut entries).zip(&mut raws) {
            // SAFETY: By the type invariant it was filled, and it counts no more.
            let mut request = unsafe { slot.assume_init_read() };
            let (way, done) = match as_one {
                None => Self::alone(side),
                Some(as_one) => {
                    request.set_nth(nth);
                    // There are 16 at most.
                    nth = nth.wrapping_add(1);
                    let after = len.wrapping_sub(nth.into());
                    if after % BEFORE == 0 {
                        request.link(before);
                    }
                    if after > 0 {
                        (Way::Silent, as_one.other)
                    } else {
                        (Way::Last, as_one.last)
                    }
                }
            };
            let (inner, entry) = self.prepare(way, done, request, entry);
            before = [inner.as_ptr(), before[0], before[1]];
            last = raw.as_mut_ptr();
            // SAFETY: The request is ours until it is posted, and the entry goes with it. What comes after
            // the last is linked to no more, see below.
            unsafe {
                let wr_cqe = &raw mut (*inner.as_ptr()).header.cqe;
                let num_sge = c_int::from(entry.length != 0);
                let raw = raw.write(R::new(wr_cqe, entry, num_sge, last.wrapping_add(1)));
                if way == Way::Silent {
                    raw.silence();
                }
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
        let taken = (0u8..)
            .take(len)
            .find(|i| core::ptr::eq(first.wrapping_add(usize::from(*i)), bad));
        match taken {
            // SAFETY: It is one of those that were linked above.
            Some(_) => unsafe { self.take_rest(bad, chain) },
            None => self.doubt(),
        }
        if let (Some(_), Some(taken @ 1..)) = (as_one, taken) {
            // The one that was to speak for them was not taken. Others still speak for those before them.
            self.fail();
            self.unheard.fetch_add(taken.into(), Relaxed);
        }
        Err(Error::from_errno(ret))
    }

    /// From the request that the driver names on, they are ours again.
    ///
    /// # Safety
    ///
    /// `bad` is one of those that `hand_over_chain` has linked, with the chain's requests in them.
    #[cold]
    unsafe fn take_rest<R: Raw, const N: usize>(
        &self,
        mut bad: *const R,
        chain: &mut Chain<'bound, H::Tag, N>,
    ) {
        // SAFETY: By the function's requirements; the last has no successor.
        while let Some(raw) = unsafe { bad.as_ref() } {
            // SAFETY: The driver says that it didn't take the request, whose start this is.
            let request = unsafe {
                let inner = raw.wr_cqe().cast::<Inner<'bound, H::Tag>>();
                self.reclaim(NonNull::new_unchecked(inner))
            };
            // There was room for it before.
            let _ = chain.push(request);
            bad = raw.next();
        }
    }

    /// Makes what was in flight the chain again that was posted as one.
    ///
    /// # Safety
    ///
    /// `last` is the last request of a chain that was posted so here, all of which succeeded. None of them
    /// had a completion before.
    #[inline]
    unsafe fn take_back_chain(
        &self,
        last: NonNull<Inner<'bound, H::Tag>>,
        wc: &bindings::ib_wc,
    ) -> Chain<'bound, H::Tag> {
        let mut chain = Chain::new();
        // SAFETY: By the function's requirements the request is there, and nobody else uses it.
        let len = usize::from(unsafe { (*last.as_ptr()).header.nth }) + 1;
        let mut slots = chain.slots.iter_mut().take(len).rev();
        let mut next = last.as_ptr();
        while let Some(slot) = slots.next() {
            // SAFETY: By the function's requirements, as it is the last, or the third before one of which that
            // holds. There are as many requests as slots.
            unsafe {
                let [first, second, third] = (*next).rest.before;
                slot.write(self.land(Side::Send, NonNull::new_unchecked(next), wc));
                for (inner, slot) in [first, second].into_iter().zip(slots.by_ref()) {
                    slot.write(self.land(Side::Send, NonNull::new_unchecked(inner), wc));
                }
                next = third;
            }
        }
        // INVARIANT: So many were filled: a chain has no more than there are slots.
        chain.len = len;
        chain
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
            .post_chain::<bindings::ib_send_wr, N>(Side::Send, chain, None)
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
            .post_chain::<bindings::ib_recv_wr, N>(Side::Recv, chain, None)
    }
}

impl<'bound, H: Handler<'bound>> Poster<'_, 'bound, H> {
    /// As [`QueuePair::post_sends`]. In the handler of sends, it can't be refused for want of room if there
    /// are no more of them.
    #[inline]
    pub fn post_sends<const N: usize>(&self, chain: &mut Chain<'bound, H::Tag, N>) -> Result {
        self.post_chain::<bindings::ib_send_wr, N>(Side::Send, chain, None)
    }

    /// As [`QueuePair::post_recvs`]. In the handler of a receive, a chain of one can't be refused for want
    /// of room.
    #[inline]
    pub fn post_recvs<const N: usize>(&self, chain: &mut Chain<'bound, H::Tag, N>) -> Result {
        self.post_chain::<bindings::ib_recv_wr, N>(Side::Recv, chain, None)
    }

    #[inline]
    fn post_chain<R: Raw, const N: usize>(
        &self,
        side: Side,
        chain: &mut Chain<'bound, H::Tag, N>,
        as_one: Option<AsOne>,
    ) -> Result {
        let len = chain.len;
        if side != self.side || len == 0 || len > self.free.get() {
            return self.qp.post_chain::<R, N>(side, chain, as_one);
        }
        self.qp.may_post_in_place(side)?;
        let handler = self.count_handler();
        let result = self.qp.hand_over_chain::<R, N>(side, chain, as_one);
        // INVARIANT: The places are those of the new requests, and the handler counted, or neither.
        if chain.len == len {
            self.qp.count_out(handler);
        } else {
            self.take_places(len - chain.len);
        }
        result
    }
}

impl<'bound, H: ChainHandler<'bound>> QueuePair<'bound, H> {
    /// As [`Self::post_sends`], and asks for one completion for all of them: the last's. They come back
    /// together, to [`ChainHandler::sent_as_one`].
    ///
    /// That saves the device a completion for each of the others, the queue an interrupt perhaps, and the
    /// handler a call. The price is that all wait for the last.
    ///
    /// Sends that don't succeed come back one by one, to [`Handler::sent`], as flushed if it is another one
    /// of them that failed. Of those that nothing is heard of, since they had succeeded before another
    /// failed, that is when the queue pair goes. If the driver takes some and refuses the rest, which stays
    /// in the chain, nobody is there to speak for those: the queue pair has failed then.
    ///
    /// An iWARP device has a send's buffer for longer than until it is complete, unless it has a completion
    /// of its own. There, this is [`Self::post_sends`].
    ///
    /// C flag: `IB_SEND_SIGNALED`, which only the last has.
    ///
    /// # Errors
    ///
    /// As for [`Self::post_sends`].
    #[inline]
    pub fn post_sends_as_one<const N: usize>(
        &self,
        chain: &mut Chain<'bound, H::Tag, N>,
    ) -> Result {
        self.0
            .post_chain::<bindings::ib_send_wr, N>(Side::Send, chain, Some(Qp::<H>::AS_ONE))
    }
}

impl<'bound, H: ChainHandler<'bound>> Poster<'_, 'bound, H> {
    /// As [`QueuePair::post_sends_as_one`]. In the handler of sends, it can't be refused for want of room if
    /// there are no more of them.
    #[inline]
    pub fn post_sends_as_one<const N: usize>(
        &self,
        chain: &mut Chain<'bound, H::Tag, N>,
    ) -> Result {
        self.post_chain::<bindings::ib_send_wr, N>(Side::Send, chain, Some(Qp::<H>::AS_ONE))
    }
}

impl<'bound, H: Handler<'bound>> Qp<'bound, H> {
    /// # Safety
    ///
    /// For the RDMA core only, as `ib_cqe.done` of one that was posted in a chain as one, and is not the last.
    unsafe extern "C" fn other_done(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: By the function's requirements, the completion leads to the request, which leads to its
        // queue pair: that stays for as long as it counts the request.
        unsafe {
            let header = (*wc).__bindgen_anon_1.wr_cqe.cast::<Header>();
            (*(*header).qp.cast::<Self>()).completed_alone(&*wc);
            Self::send_done(cq, wc);
        }
    }
}

impl<'bound, H: ChainHandler<'bound>> Qp<'bound, H> {
    const AS_ONE: AsOne = AsOne {
        last: Self::last_done,
        other: Self::other_done,
    };

    /// # Safety
    ///
    /// As above, of the last.
    unsafe extern "C" fn last_done(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: As above.
        let (completed, this, last) = unsafe {
            let last = (*wc)
                .__bindgen_anon_1
                .wr_cqe
                .cast::<Inner<'bound, H::Tag>>();
            (&*wc, &*(*last).header.qp.cast::<Self>(), last)
        };
        let failed = completed.status != bindings::ib_wc_status_IB_WC_SUCCESS;
        if failed || this.silence_ended.load(Relaxed) {
            // SAFETY: By the function's requirements.
            unsafe { Self::other_done(cq, wc) };
            return;
        }
        // SAFETY: A reliable connection works off its sends in order, so those before it succeeded. They had
        // no completions, or the silence would have ended.
        let chain = unsafe { this.take_back_chain(NonNull::new_unchecked(last), completed) };
        let poster = Poster::new(this, Side::Send, chain.len());
        let context = H::Context::token(Trampoline::new());
        this.handler
            .sent_as_one(&poster, chain, &Completion::new(completed), context);
        this.count_out(poster.counted());
    }
}
