// SPDX-License-Identifier: GPL-2.0

//! Posting several requests with one call of the driver: one lock of its, one doorbell.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_send_wr.next`)

use core::ptr::NonNull;
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
pub struct Chain<'bound, T, const N: usize> {
    /// The first `len` are there.
    requests: [Option<WorkRequest<'bound, T>>; N],
    len: usize,
}

impl<'bound, T, const N: usize> Chain<'bound, T, N> {
    /// Makes an empty chain.
    pub fn new() -> Self {
        const { assert!(N > 0 && N <= MAX) }
        Self {
            requests: [const { None }; N],
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
        match self.requests.get_mut(self.len) {
            Some(slot) => {
                *slot = Some(request);
                self.len += 1;
                Ok(())
            }
            None => Err(request),
        }
    }

    /// Takes the last request off the chain.
    #[inline]
    pub fn pop(&mut self) -> Option<WorkRequest<'bound, T>> {
        self.len = self.len.checked_sub(1)?;
        self.requests.get_mut(self.len)?.take()
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

    /// # Safety
    ///
    /// All is valid, and what the requests refer to stays until they are complete.
    unsafe fn post(qp: *mut bindings::ib_qp, first: *const Self, bad: *mut *const Self) -> c_int;
}

impl Raw for bindings::ib_send_wr {
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
            __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 { wr_cqe },
            sg_list: sge,
            num_sge,
            opcode: bindings::ib_wr_opcode_IB_WR_SEND,
            send_flags: SIGNALED,
            ex: bindings::ib_send_wr__bindgen_ty_2 { imm_data: 0 },
        }
    }

    #[inline(always)]
    unsafe fn post(qp: *mut bindings::ib_qp, first: *const Self, bad: *mut *const Self) -> c_int {
        // SAFETY: By the function's requirements. A device without this function is none that clients are
        // told of, see `ib_device_check_mandatory()`.
        unsafe {
            let post = (*(*qp).device).ops.post_send.unwrap_unchecked();
            post(qp, first, bad)
        }
    }
}

impl Raw for bindings::ib_recv_wr {
    #[inline(always)]
    unsafe fn new(
        wr_cqe: *mut bindings::ib_cqe,
        sge: *mut bindings::ib_sge,
        num_sge: c_int,
        next: *mut Self,
    ) -> Self {
        Self {
            next,
            __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 { wr_cqe },
            sg_list: sge,
            num_sge,
        }
    }

    #[inline(always)]
    unsafe fn post(qp: *mut bindings::ib_qp, first: *const Self, bad: *mut *const Self) -> c_int {
        // SAFETY: As for sends.
        unsafe {
            let post = (*(*qp).device).ops.post_recv.unwrap_unchecked();
            post(qp, first, bad)
        }
    }
}

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
        let mut entries = [bindings::ib_sge::default(); N];
        let mut inners = [const { None }; N];
        for ((slot, entry), inner) in chain.requests.iter_mut().zip(&mut entries).zip(&mut inners) {
            let Some(request) = slot.take() else { break };
            *inner = Some(self.prepare(side, request, entry));
        }
        chain.len = 0;
        let mut raws: [Option<R>; N] = [const { None }; N];
        let mut next = core::ptr::null_mut();
        for ((raw, entry), inner) in raws.iter_mut().zip(&mut entries).zip(&inners).rev() {
            let Some(inner) = inner else { continue };
            // SAFETY: The request is ours until it is posted; the entry goes with it.
            next = unsafe {
                let wr_cqe = &raw mut (*inner.as_ptr()).header.cqe;
                let num_sge = c_int::from(entry.length != 0);
                raw.insert(R::new(wr_cqe, entry, num_sge, next))
            };
        }

        let mut bad: *const R = core::ptr::null();
        // SAFETY: The queue pair is valid. The requests, which the completions are found by, and their
        // buffers stay where they are until they come back. The rest is copied by the call.
        let ret = unsafe { R::post(self.raw.as_raw(), next, &mut bad) };
        if ret == 0 {
            return Ok(());
        }
        let taken = raws
            .iter()
            .position(|raw| raw.as_ref().is_some_and(|raw| core::ptr::eq(raw, bad)));
        self.chain_not_posted(side, taken, inners, chain);
        Err(Error::from_errno(ret))
    }

    /// What to make of a driver's error. From the one that it names on, the requests are ours again. If it
    /// names none, nobody knows which it has, so all stay counted.
    #[cold]
    fn chain_not_posted<const N: usize>(
        &self,
        side: Side,
        taken: Option<usize>,
        inners: [Option<NonNull<Inner<'bound, H::Tag>>>; N],
        chain: &mut Chain<'bound, H::Tag, N>,
    ) {
        let Some(taken) = taken else {
            self.doubt();
            return;
        };
        for inner in inners.into_iter().skip(taken).flatten() {
            // SAFETY: The driver says that it didn't take the request.
            let _ = chain.push(unsafe { self.not_taken(inner) });
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
