// SPDX-License-Identifier: GPL-2.0

//! Reliable connected queue pairs.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_qp`)

use core::{
    cell::{
        Cell,
        UnsafeCell, //
    },
    marker::PhantomData,
    mem::MaybeUninit,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Full,
        Relaxed,
        Release, //
    },
    time::Instant,
    time::Monotonic, //
};
use rdma_bindings as bindings;

use crate::{
    atomic,
    completion::Completion,
    context::{
        Direct,
        MaySleep,
        MayWait,
        PollContext,
        Trampoline, //
    },
    cq::{
        Claim,
        Entries, //
    },
    device::{
        Device,
        Gid,
        Port,
        Protocol, //
    },
    flight::{
        Done,
        Header,
        Marker,
        Way, //
    },
    latch::Latch,
    pd::ProtectionDomain,
    raw_qp::RawQp,
    request::{
        Inner,
        PostError,
        WorkRequest, //
    },
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    },
    trace, //
};

mod chain;
use chain::Raw;
pub use chain::{
    Chain,
    MAX_CHAIN, //
};

/// What becomes of the requests of a queue pair that are complete.
///
/// Completions of one queue pair may be handled on several CPUs at once, and before
/// [`QueuePair::new`] has returned to its caller. A handler that isn't implemented drops the request.
///
/// Of a direct queue they run where its owner asks for them, and in process context when the queue pair
/// is taken down.
///
/// What handlers share has to bear that:
///
/// ```compile_fail,E0277
/// use core::cell::Cell;
/// use rdma::{context::Softirq, qp::Handler};
///
/// struct Count(Cell<u64>); // An atomic would do.
///
/// impl<'bound> Handler<'bound> for Count {
///     type Context = Softirq;
///     type Tag = ();
/// }
/// ```
///
/// Nor can they keep for themselves what says that its holder may sleep:
///
/// ```compile_fail,E0277
/// use rdma::{context::{MaySleep, Softirq}, qp::Handler};
///
/// struct Sleeper(MaySleep<'static>);
///
/// impl<'bound> Handler<'bound> for Sleeper {
///     type Context = Softirq;
///     type Tag = ();
/// }
/// ```
pub trait Handler<'bound>: Send + Sync + Sized + 'bound {
    /// The context in which the handlers run: that of the completion queue.
    type Context: PollContext;

    /// What the owner keeps with each request.
    type Tag: Send + 'bound;

    /// A send is complete: the other side has the data, or `completion` says why not.
    fn sent(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, Self::Tag>,
        completion: &Completion<'_>,
        context: Self::Context,
    ) {
        let _ = (qp, request, completion, context);
    }

    /// A receive is complete: a message has arrived, or `completion` says why not.
    fn received(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, Self::Tag>,
        completion: &Completion<'_>,
        context: Self::Context,
    ) {
        let _ = (qp, request, completion, context);
    }
}

/// What becomes of sends that complete together.
///
/// ```
/// use rdma::{completion::Completion, context::Softirq, qp::*};
///
/// struct Zeroes;
///
/// impl<'bound> Handler<'bound> for Zeroes {
///     type Context = Softirq;
///     type Tag = ();
/// }
///
/// impl<'bound> ChainHandler<'bound> for Zeroes {
///     fn sent_as_one(
///         &self,
///         qp: &Poster<'_, 'bound, Self>,
///         mut chain: Chain<'bound, ()>,
///         _: &Completion<'_>,
///         _: Softirq,
///     ) {
///         for request in chain.iter_mut() {
///             request.data_mut().fill(0);
///         }
///         let _ = qp.post_sends_as_one(&mut chain);
///     }
/// }
/// ```
///
/// Who posts them so has one:
///
/// ```compile_fail,E0599
/// use kernel::prelude::*;
/// use rdma::qp::*;
///
/// fn f<'bound, H: Handler<'bound>>(
///     qp: &QueuePair<'bound, H>,
///     chain: &mut Chain<'bound, H::Tag>,
/// ) -> Result {
///     qp.post_sends_as_one(chain)
/// }
/// ```
pub trait ChainHandler<'bound>: Handler<'bound> {
    /// Sends that were posted by [`QueuePair::post_sends_as_one`] are complete: the other side has the data of
    /// all of them. Those that failed, or were flushed, go to [`Handler::sent`].
    fn sent_as_one(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        chain: Chain<'bound, Self::Tag>,
        completion: &Completion<'_>,
        context: Self::Context,
    );
}

/// The two queues of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Send,
    Recv,
}

/// What keeps a queue pair from being taken down, in one word.
///
/// Bits 0 to 19 count sends in flight, bits 20 to 39 receives, and bits 40 to 59 handlers whose
/// request's place was taken by another. The counts of requests include those who are about to find
/// out that they may not post; there are far fewer CPUs than would make a count run over.
mod state {
    use super::Side;

    const BITS: u32 = 20;
    pub(super) const MAX_DEPTH: u32 = (1 << (BITS - 1)) - 1;
    pub(super) const HANDLER: u64 = 1 << (2 * BITS);
    pub(super) const CLOSING: u64 = 1 << 63;

    #[inline(always)]
    pub(super) const fn unit(side: Side) -> u64 {
        match side {
            Side::Send => 1,
            Side::Recv => 1 << BITS,
        }
    }

    #[inline(always)]
    pub(super) const fn count(state: u64, side: Side) -> u64 {
        (state / unit(side)) & ((1 << BITS) - 1)
    }

    #[inline(always)]
    pub(super) const fn is_idle(state: u64) -> bool {
        state & !CLOSING == 0
    }

    #[inline(always)]
    pub(super) const fn is_closing(state: u64) -> bool {
        state & CLOSING != 0
    }
}

/// How often teardown looks whether anything is to come back but sends that nothing is going to be heard of.
const LISTEN_MS: u32 = 10;

/// How many milliseconds the flush of a queue pair may take before the queue pair is destroyed anyway.
/// The tests shorten it.
#[doc(hidden)]
pub static FLUSH_PATIENCE_MS: Atomic<u32> = Atomic::new(10_000);

/// # Invariants
///
/// - `raw` is valid until `destroy` succeeds.
/// - `marker.roll()` has all requests in flight.
/// - `state` counts the requests in flight and the handlers that run: one whose request's place is
///   free by that request, any other by itself. While it counts any, `self` stays.
/// - At most `send_depth` sends and `recv_depth` receives are in flight, and both together are less
///   than the entries claimed in `stands_on`.
#[pin_data]
pub(crate) struct Qp<'bound, H: Handler<'bound>> {
    node: Node,
    raw: RawQp,
    num: u32,
    device: &'bound Device<'bound>,
    /// Of the device.
    needs_sync: bool,
    lkey: u32,
    state: Atomic<u64>,
    /// How many sends may be in flight: zero until the queue pair is connected, `send_depth` then,
    /// and zero again after a request failed or teardown began.
    send_limit: Atomic<u32>,
    /// How many receives may be in flight: `recv_depth`, and zero as above.
    recv_limit: Atomic<u32>,
    /// Whether a request failed: the queue pair is of no use any more.
    failed: Atomic<bool>,
    /// Whether there are requests of which the driver didn't say whether it took them, and which may never
    /// come back.
    doubtful: Atomic<bool>,
    /// Whether the success of a send says that the device is done with those before it.
    speaks_for_others: bool,
    /// Whether a send has a completion for which another was to speak: none speaks for others any more.
    silence_ended: Atomic<bool>,
    /// How many sends succeeded, or may do so, for which none is going to speak.
    unheard: Atomic<u32>,
    send_depth: u32,
    port: Port<'bound>,
    /// When teardown began. Written by `begin`, read by `destroy`.
    begun: UnsafeCell<Option<Instant<Monotonic>>>,
    /// Opens when teardown began and nothing is in flight.
    #[pin]
    drained: Latch,
    #[pin]
    marker: Marker,
    /// What has to outlive `raw`. Taken by `destroy`.
    stands_on: UnsafeCell<Option<StandsOn<'bound, H::Context>>>,
    #[pin]
    handler: H,
}

struct StandsOn<'bound, C: PollContext> {
    cq: Claim<'bound, C>,
    pd: ProtectionDomain<'bound>,
}

impl<C: PollContext> StandsOn<'_, C> {
    /// The queue pair stays for ever, and this in it: nobody takes down what it stands on.
    fn abandon(&self) {
        self.cq.abandon();
        self.pd.abandon();
    }
}

// SAFETY: The RDMA core does its own locking, the handler is `Send` and `Sync`, tags are `Send`, and
// `stands_on` is only touched by `destroy`.
unsafe impl<'bound, H: Handler<'bound>> Send for Qp<'bound, H> {}
// SAFETY: As above.
unsafe impl<'bound, H: Handler<'bound>> Sync for Qp<'bound, H> {}

// SAFETY: `node` is part of the object. `destroy` returns `Fate::Free` only when the queue pair is
// destroyed, all its requests came back and the handlers returned.
unsafe impl<'bound, H: Handler<'bound>> Resource for Qp<'bound, H> {
    const KIND: Kind = Kind::QueuePair;

    fn node(&self) -> &Node {
        &self.node
    }

    /// Refuses further posts and lets the device give back what it has.
    fn begin(&self) {
        // SAFETY: Called once, before `destroy`, and nobody else touches the field.
        unsafe { *self.begun.get() = Some(Instant::now()) };
        self.send_limit.store(0, Relaxed);
        self.recv_limit.store(0, Relaxed);
        // Full: orders the limits before it for who posts, and the handlers' work before what
        // teardown does next.
        let state = self.state.fetch_add(state::CLOSING, Full);
        if state::is_idle(state) {
            self.drained.open();
            return;
        }
        if let Err(e) = self.raw.flush() {
            pr_err!(
                "{}: qp={}: can't be moved to the error state: {:?}\n",
                self.device.name(),
                self.num,
                e
            );
        }
    }

    unsafe fn destroy(&self) -> Fate {
        let mut drained;
        loop {
            drained = self.wait_drained();
            // SAFETY: Once it has succeeded this is left, and nobody uses the queue pair: who held a
            // handle or was called with a `Poster` is gone, or has been waited for.
            let destroyed = unsafe { self.raw.destroy() };
            let Err(e) = destroyed else { break };
            pr_err!(
                "{}: qp={}: can't be destroyed: {:?}{}\n",
                self.device.name(),
                self.num,
                e,
                if drained {
                    ": it is leaked with all it stands on"
                } else {
                    ", and has requests in flight: trying again"
                }
            );
            if drained {
                // SAFETY: `destroy` is called once, and nobody else touches the field.
                if let Some(stands_on) = unsafe { &*self.stands_on.get() } {
                    stands_on.abandon();
                }
                return Fate::Keep;
            }
            // The device has the queue pair and may call back yet, into a module that may be about
            // to go: there is no way on from here but to wait.
        }
        // SAFETY: As above.
        let Some(stands_on) = (unsafe { (*self.stands_on.get()).take() }) else {
            return Fate::Free;
        };
        drained = drained || self.sweep(&stands_on);
        // A worker that has handled the last completion may still be on its way out.
        stands_on.cq.flush();
        drop(stands_on);
        if drained {
            Fate::Free
        } else {
            Fate::Keep
        }
    }
}

impl<'bound, H: Handler<'bound>> Qp<'bound, H> {
    /// Waits until nothing is in flight, or until there is no hope of it. Then no handler of this queue
    /// pair posts any more.
    ///
    /// The time counts from when teardown began: of many that have to be waited for, each has had its
    /// time when its turn comes.
    fn wait_drained(&self) -> bool {
        // SAFETY: Written by `begin` only, which was called before.
        let begun = unsafe { *self.begun.get() }.unwrap_or_else(Instant::now);
        // Of what the device never took nothing will be heard.
        let hopeless = self.doubtful.load(Relaxed);
        let patience = FLUSH_PATIENCE_MS.load(Relaxed) / if hopeless { 10 } else { 1 };
        // SAFETY: Taken by `destroy` only, which has called this.
        let Some(stands_on) = (unsafe { &*self.stands_on.get() }) else {
            return true;
        };
        loop {
            let elapsed = u32::try_from(begun.elapsed().as_millis()).unwrap_or(patience);
            let left = patience.saturating_sub(elapsed);
            if stands_on.cq.wait_for(&self.drained, left.min(LISTEN_MS)) {
                return true;
            }
            let state = self.state.load(Relaxed);
            let unheard = u64::from(self.unheard.load(Relaxed));
            if unheard > 0 && state & !state::CLOSING <= unheard {
                break;
            }
            if left <= LISTEN_MS {
                pr_warn!(
                    "{}: qp={}: sends={} recvs={} not given back after {} ms: destroying it first\n",
                    self.device.name(),
                    self.num,
                    state::count(state, Side::Send),
                    state::count(state, Side::Recv),
                    begun.elapsed().as_millis()
                );
                break;
            }
        }
        stands_on.cq.fence(patience);
        self.drained.wait_unchecked(0)
    }

    /// Has what the device forgot handed back, now that the queue pair is destroyed. Says whether all is
    /// back.
    fn sweep(&self, stands_on: &StandsOn<'bound, H::Context>) -> bool {
        let patience = FLUSH_PATIENCE_MS.load(Relaxed);
        // SAFETY: Called once, when the queue pair is destroyed; if this fails, so that not all is
        // back, `destroy` keeps `self`. By the type invariant a completion more has room.
        let swept = unsafe {
            if H::Context::RAW == Direct::RAW {
                stands_on.cq.sweep(self.marker.roll(), patience)
            } else {
                self.marker.sweep(
                    &stands_on.pd,
                    stands_on.cq.as_raw(),
                    self.port.number(),
                    patience,
                )
            }
        };
        if swept.is_ok() && self.drained.wait_unchecked(patience) {
            return true;
        }
        let state = self.state.load(Relaxed);
        pr_err!(
            "{}: qp={}: sends={} recvs={} never came back ({:?}): their memory is leaked\n",
            self.device.name(),
            self.num,
            state::count(state, Side::Send),
            state::count(state, Side::Recv),
            swept.err()
        );
        false
    }

    fn limit(&self, side: Side) -> &Atomic<u32> {
        match side {
            Side::Send => &self.send_limit,
            Side::Recv => &self.recv_limit,
        }
    }

    /// Counts one less of `unit`. `self` may be gone when this returns, unless the caller has a handle
    /// or is counted otherwise.
    #[inline(always)]
    fn count_out(&self, unit: u64) {
        // Release: teardown sees all that the handler did.
        let before = atomic::fetch_sub_release(&self.state, unit);
        if state::is_closing(before) && state::is_idle(before.wrapping_sub(unit)) {
            // Teardown waits for this, so `self` is still there.
            self.drained.open();
        }
    }

    #[cold]
    fn refusal(&self, side: Side) -> Error {
        // Acquire: pairs with `fail`, so that who sees what it closed sees that it failed.
        let closed = side == Side::Send && self.send_limit.load(Acquire) == 0;
        if state::is_closing(self.state.load(Relaxed)) || self.failed.load(Relaxed) {
            ESHUTDOWN
        } else if closed && self.send_depth != 0 {
            ENOTCONN
        } else {
            ENOMEM
        }
    }

    /// Makes an end of posting: a reliable connection never recovers from a failed request, and a
    /// handler that posts again after each failure would do so for ever.
    #[cold]
    fn fail(&self) {
        self.failed.store(true, Relaxed);
        // Release: pairs with `open_sends`.
        self.send_limit.store(0, Release);
        self.recv_limit.store(0, Release);
    }

    /// Allows sends, unless a request has failed meanwhile.
    fn open_sends(&self) {
        // Full: either this sees that a request failed, or `fail` closes what this opened.
        self.send_limit.xchg(self.send_depth, Full);
        if self.failed.load(Acquire) {
            self.send_limit.store(0, Relaxed);
        }
    }

    /// Posts a request, if there is room for one more.
    #[inline(always)]
    fn post(
        &self,
        side: Side,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        let unit = state::unit(side);
        let before = atomic::fetch_add_relaxed(&self.state, unit);
        if state::count(before, side) >= u64::from(atomic::load_relaxed(self.limit(side))) {
            return Err(self.refuse(side, unit, request));
        }
        self.hand_over(side, unit, request)
    }

    /// Whether a request may be posted in the place of one that the calling handler was called for.
    #[inline(always)]
    fn may_post_in_place(&self, side: Side) -> Result {
        if atomic::load_relaxed(self.limit(side)) == 0 {
            return Err(self.refusal(side));
        }
        Ok(())
    }

    /// Gives a request to the device, which is counted as `unit` while the device has it.
    #[inline(always)]
    fn hand_over(
        &self,
        side: Side,
        unit: u64,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        let mut sge = MaybeUninit::uninit();
        let (way, done) = Self::alone(side);
        let (inner, sge) = self.prepare(way, done, request, &mut sge);
        // SAFETY: The queue pair is valid. The request, which the completion is found by, and the
        // buffer stay where they are until it comes back. The rest is copied by the call.
        let (ret, untouched) = unsafe {
            let wr_cqe = &raw mut (*inner.as_ptr()).header.cqe;
            let num_sge = c_int::from(sge.length != 0);
            match side {
                Side::Send => post_one::<bindings::ib_send_wr>(&self.raw, wr_cqe, sge, num_sge),
                Side::Recv => post_one::<bindings::ib_recv_wr>(&self.raw, wr_cqe, sge, num_sge),
            }
        };
        if ret == 0 {
            return Ok(());
        }
        Err(self.not_posted(ret, unit, untouched.then_some(inner)))
    }

    /// As what a request is posted that completes alone, and what the RDMA core calls then.
    #[inline(always)]
    fn alone(side: Side) -> (Way, Done) {
        match side {
            Side::Send => (Way::Send, Self::send_done),
            Side::Recv => (Way::Recv, Self::recv_done),
        }
    }

    /// Makes a request what is in flight, and says where its bytes are.
    #[inline(always)]
    fn prepare<'a>(
        &self,
        way: Way,
        done: Done,
        request: WorkRequest<'bound, H::Tag>,
        sge: &'a mut MaybeUninit<bindings::ib_sge>,
    ) -> (NonNull<Inner<'bound, H::Tag>>, &'a mut bindings::ib_sge) {
        if self.needs_sync {
            request.sync_for_device(self.device);
        }
        let sge = sge.write(bindings::ib_sge {
            addr: request.dma_addr(),
            length: request.len(),
            lkey: self.lkey,
        });
        // SAFETY: The device is valid.
        unsafe {
            trace::post(|| {
                let recv = way == Way::Recv;
                (self.device.as_raw(), self.num, recv, request.len())
            })
        };
        let inner = request.into_raw();
        // SAFETY: The request is ours until it is posted.
        unsafe {
            (*inner.as_ptr()).take_off(self.identity(), self.marker.roll(), way, done);
        };
        (inner, sge)
    }

    /// Gives a request back that was counted, but for which there is no room.
    #[cold]
    fn refuse(
        &self,
        side: Side,
        unit: u64,
        request: WorkRequest<'bound, H::Tag>,
    ) -> PostError<'bound, H::Tag> {
        let error = self.refusal(side);
        self.count_out(unit);
        PostError::new(error, request)
    }

    /// What to make of a driver's error. With `bad_wr` set, the request is ours again. With an error
    /// and no `bad_wr` nobody knows whether the device has it, so it stays counted.
    #[cold]
    fn not_posted(
        &self,
        ret: c_int,
        unit: u64,
        untouched: Option<NonNull<Inner<'bound, H::Tag>>>,
    ) -> PostError<'bound, H::Tag> {
        let error = Error::from_errno(ret);
        let Some(inner) = untouched else {
            self.doubt();
            return PostError {
                error,
                request: None,
            };
        };
        // SAFETY: The driver says that it didn't take the request.
        let request = unsafe { self.reclaim(inner) };
        self.count_out(unit);
        PostError::new(error, request)
    }

    /// Nobody knows whether the device has what was posted.
    fn doubt(&self) {
        self.doubtful.store(true, Relaxed);
        self.fail();
    }

    /// Makes what was to be in flight, or was, the request again.
    ///
    /// # Safety
    ///
    /// It comes from [`Self::prepare`]. The driver didn't take it, or the device is done with it.
    #[inline(always)]
    unsafe fn reclaim(&self, inner: NonNull<Inner<'bound, H::Tag>>) -> WorkRequest<'bound, H::Tag> {
        // SAFETY: By the function's requirements.
        let mut request = unsafe { WorkRequest::from_raw(inner) };
        request.land();
        if self.needs_sync {
            request.sync_for_cpu(self.device);
        }
        request
    }

    /// # Safety
    ///
    /// For the RDMA core only, as `ib_cqe.done` of what [`Self::post`] posted as a send.
    // There is to be one copy of it, with the handler in it.
    #[inline(never)]
    unsafe extern "C" fn send_done(_: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: By the function's requirements.
        unsafe { Self::done(Side::Send, wc) };
    }

    /// # Safety
    ///
    /// As above, of what was posted as a receive.
    unsafe extern "C" fn recv_done(_: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: By the function's requirements.
        unsafe { Self::done(Side::Recv, wc) };
    }

    /// Notes that a send which was posted as one with others has a completion of its own.
    ///
    /// # Safety
    ///
    /// `wc` is that completion.
    #[cold]
    unsafe fn completed_alone(&self, wc: &bindings::ib_wc) {
        // SAFETY: By the function's requirements it leads to the request.
        let before = unsafe { (*wc.__bindgen_anon_1.wr_cqe.cast::<Header>()).nth };
        // No send speaks for others from now on: this one failed, or the device tells of each. If it is the
        // first, those before it in its chain had succeeded.
        if !self.silence_ended.xchg(true, Full) {
            self.unheard.fetch_add(before.into(), Relaxed);
        }
    }

    /// Makes what was in flight the request again.
    ///
    /// # Safety
    ///
    /// `wc` is the one completion of a request that was posted here, on this side.
    #[inline(always)]
    unsafe fn take_back(&self, side: Side, wc: &bindings::ib_wc) -> WorkRequest<'bound, H::Tag> {
        // SAFETY: By the function's requirements `wr_cqe` is the start of the request, which nobody else
        // has.
        let request = unsafe {
            let inner = wc.__bindgen_anon_1.wr_cqe.cast::<Inner<'bound, H::Tag>>();
            self.land(side, NonNull::new_unchecked(inner), wc)
        };
        if wc.status != bindings::ib_wc_status_IB_WC_SUCCESS {
            self.fail();
        }
        request
    }

    /// As the above, of a request that `wc` may speak for.
    ///
    /// # Safety
    ///
    /// The request was posted here, on this side, and the device is done with it.
    #[inline(always)]
    unsafe fn land(
        &self,
        side: Side,
        inner: NonNull<Inner<'bound, H::Tag>>,
        wc: &bindings::ib_wc,
    ) -> WorkRequest<'bound, H::Tag> {
        // SAFETY: The device is valid.
        unsafe {
            trace::complete(|| {
                let recv = side == Side::Recv;
                (self.device.as_raw(), self.num, recv, wc.status)
            })
        };
        // SAFETY: By the function's requirements.
        unsafe { self.reclaim(inner) }
    }

    /// What requests know this queue pair by.
    fn identity(&self) -> *const c_void {
        core::ptr::from_ref(self).cast()
    }

    /// # Safety
    ///
    /// `wc` is the completion of a request that `post` of this type posted on this side.
    #[inline(always)]
    unsafe fn done(side: Side, wc: *mut bindings::ib_wc) {
        // SAFETY: `wc` is valid for the call, and leads to the request, which leads to its queue pair:
        // that stays for as long as it counts the request.
        let (wc, this) = unsafe {
            let wc = &*wc;
            let header = wc.__bindgen_anon_1.wr_cqe.cast::<Header>();
            (wc, &*(*header).qp.cast::<Self>())
        };
        // SAFETY: By the function's requirements.
        let request = unsafe { this.take_back(side, wc) };
        let completion = Completion::new(wc);

        let poster = Poster::new(this, side, 1);
        let context = H::Context::token(Trampoline::new());
        match side {
            Side::Send => this.handler.sent(&poster, request, &completion, context),
            Side::Recv => this
                .handler
                .received(&poster, request, &completion, context),
        }
        // Each with a number that is known when this is compiled.
        if poster.free.get() != 0 {
            this.count_out(state::unit(side));
        } else {
            this.count_out(state::HANDLER);
        }
    }
}

/// Posts a single request. Says whether the driver named it as the one that it didn't take.
///
/// # Safety
///
/// Those of [`Raw::new`] and [`Raw::post`].
#[inline(always)]
unsafe fn post_one<R: Raw>(
    qp: &RawQp,
    wr_cqe: *mut bindings::ib_cqe,
    sge: *mut bindings::ib_sge,
    num_sge: c_int,
) -> (c_int, bool) {
    let mut bad: *const R = core::ptr::null();
    // SAFETY: By the function's requirements.
    let ret = unsafe {
        let wr = R::new(wr_cqe, sge, num_sge, core::ptr::null_mut());
        R::post(qp.as_raw(), &wr, &mut bad)
    };
    (ret, !bad.is_null())
}

const SIGNALED: c_int = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;

/// A queue pair, as its handlers see it: they may post to it.
///
/// Each request that was just completed left a place for one of its kind, which nobody else can take.
///
/// # Invariants
///
/// `free` of the `places` are counted in the queue pair's state. If others are not, a handler is.
pub struct Poster<'a, 'bound, H: Handler<'bound>> {
    qp: &'a Qp<'bound, H>,
    side: Side,
    /// How many requests were completed, and how many of their places are still free.
    places: usize,
    free: Cell<usize>,
    _bound: PhantomData<&'bound ()>,
}

impl<'a, 'bound, H: Handler<'bound>> Poster<'a, 'bound, H> {
    /// As [`QueuePair::post_send`]. In the handler of a send, the first can't be refused for want of
    /// room.
    #[inline(always)]
    pub fn post_send(
        &self,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        self.post(Side::Send, request)
    }

    /// As [`QueuePair::post_recv`]. In the handler of a receive, the first can't be refused for want
    /// of room.
    #[inline(always)]
    pub fn post_recv(
        &self,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        self.post(Side::Recv, request)
    }

    #[inline(always)]
    fn post(
        &self,
        side: Side,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        if side != self.side || self.free.get() == 0 {
            return self.qp.post(side, request);
        }
        if let Err(e) = self.qp.may_post_in_place(side) {
            return Err(PostError::new(e, request));
        }
        let handler = self.count_handler();
        let result = self.qp.hand_over(side, handler, request);
        // INVARIANT: The place is the new request's, and the handler counted, or neither.
        if result.as_ref().err().is_none_or(|e| e.request.is_none()) {
            self.take_places(1);
        }
        result
    }

    #[inline(always)]
    fn new(qp: &'a Qp<'bound, H>, side: Side, places: usize) -> Self {
        // INVARIANT: The requests are counted until the handler returns.
        Self {
            qp,
            side,
            places,
            free: Cell::new(places),
            _bound: PhantomData,
        }
    }

    /// Has the handler count for itself, if it doesn't yet: a place counts for a new request from now on, and
    /// that may be complete before the handler returns. Says what the count grew by.
    #[inline(always)]
    fn count_handler(&self) -> u64 {
        if self.free.get() != self.places {
            return 0;
        }
        atomic::fetch_add_relaxed(&self.qp.state, state::HANDLER);
        state::HANDLER
    }

    #[inline(always)]
    fn take_places(&self, number: usize) {
        self.free.set(self.free.get().wrapping_sub(number));
    }

    /// For what the queue pair's state counts when the handler has returned.
    #[inline]
    fn counted(&self) -> u64 {
        let free = state::unit(self.side) * self.free.get() as u64;
        if self.free.get() == self.places {
            free
        } else {
            free + state::HANDLER
        }
    }
}

/// How much may be in flight on a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Depths {
    /// Sends, from 0.
    pub send: u32,
    /// Receives, from 0.
    pub recv: u32,
}

impl Depths {
    /// The entries that a completion queue needs: one for each, and one more by which teardown finds out
    /// that it has seen all completions there are.
    pub fn total(self) -> u32 {
        self.send.saturating_add(self.recv).saturating_add(1)
    }
}

/// What one side of a connection has to know of the other.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    qp_num: u32,
    psn: u32,
    lid: u32,
    gid: Gid,
    mac: [u8; 6],
}

/// A reliable connected queue pair, with all its completions in one queue.
///
/// Dropping it never waits. The requests in flight come back to the handler, which is dropped with
/// the queue pair when the last one has; this happens before the window of the client ends. It can't
/// leave the window:
///
/// ```compile_fail,E0521
/// use rdma::qp::{Handler, QueuePair};
///
/// fn keep<H: for<'a> Handler<'a>>(_: QueuePair<'static, H>) {}
///
/// fn escape<'bound, H: for<'a> Handler<'a>>(qp: QueuePair<'bound, H>) {
///     keep(qp)
/// }
/// ```
///
/// C type: `struct ib_qp`.
pub struct QueuePair<'bound, H: Handler<'bound>>(Owned<'bound, Qp<'bound, H>>);

impl<'bound, H: Handler<'bound>> QueuePair<'bound, H> {
    /// Creates a queue pair that is ready to receive, and to be connected. Sleeps.
    ///
    /// The queue is polled in the context that the handler is for:
    ///
    /// ```compile_fail,E0271
    /// # use kernel::prelude::*;
    /// # use rdma::{context::*, device::Port, pd::ProtectionDomain, pool::PooledCq, qp::*};
    /// fn mix<'bound, H: Handler<'bound, Context = Workqueue>>(
    ///     pd: &ProtectionDomain<'bound>,
    ///     cq: PooledCq<'bound, Softirq>,
    ///     port: Port<'bound>,
    ///     handler: H,
    ///     may_sleep: MaySleep<'_>,
    /// ) -> Result<QueuePair<'bound, H>> {
    ///     QueuePair::new(pd, cq, port, Depths { send: 1, recv: 1 }, handler, may_sleep)
    /// }
    /// ```
    ///
    /// All that a queue pair stands on is of one device, since each window has a lifetime of its own
    /// (rustc has no code for this error):
    ///
    /// ```compile_fail
    /// # use kernel::prelude::*;
    /// # use rdma::{context::*, device::Port, pd::ProtectionDomain, pool::PooledCq, qp::*};
    /// fn mix<'one, 'other, H: for<'a> Handler<'a, Context = Softirq>>(
    ///     pd: &ProtectionDomain<'one>,
    ///     cq: PooledCq<'other, Softirq>,
    ///     port: Port<'one>,
    ///     handler: H,
    ///     may_sleep: MaySleep<'_>,
    /// ) -> Result<QueuePair<'one, H>> {
    ///     QueuePair::new(pd, cq, port, Depths { send: 1, recv: 1 }, handler, may_sleep)
    /// }
    /// ```
    ///
    /// C functions: `ib_create_qp()`, `ib_modify_qp()`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`, with a line in the log, if a depth is over [`Device::max_qp_wr`], if both are zero, or
    ///   if the lease or the queue has fewer entries than [`Depths::total`].
    /// - `ENOSPC`, with a line in the log, if other queue pairs have claimed too many entries of the queue.
    /// - Those of the driver; `ENOMEM`; `EDEADLK` where sleeping is not possible.
    pub fn new<E>(
        pd: &ProtectionDomain<'bound>,
        cq: impl Into<Entries<'bound, H::Context>>,
        port: Port<'bound>,
        depths: Depths,
        handler: impl PinInit<H, E>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        may_sleep.check("QueuePair::new")?;
        let dev = pd.device();
        let max = dev.max_qp_wr().min(state::MAX_DEPTH);
        if depths.send > max || depths.recv > max {
            log_refusal!(
                "{}: send depth {} or receive depth {} is out of range 0..={}\n",
                dev.name(),
                depths.send,
                depths.recv,
                max
            );
            return Err(EINVAL);
        }
        if depths.send == 0 && depths.recv == 0 {
            log_refusal!(
                "{}: both depths are 0: there is nothing to post\n",
                dev.name()
            );
            return Err(EINVAL);
        }
        let cq = cq.into().claim(depths.total())?;

        // SAFETY: Both are of one device, since their lifetime is that of its window, and `stands_on`
        // keeps both.
        let raw = unsafe { RawQp::new(pd, cq.as_raw(), depths) }?;
        let num = raw.num();
        let qp = KBox::pin_init::<Error>(
            try_pin_init!(Qp {
                node: Node::new::<Qp<'bound, H>>(),
                raw,
                num,
                device: dev,
                needs_sync: dev.needs_sync(),
                lkey: pd.local_dma_lkey(),
                state: Atomic::new(0),
                send_limit: Atomic::new(0),
                recv_limit: Atomic::new(depths.recv),
                failed: Atomic::new(false),
                doubtful: Atomic::new(false),
                speaks_for_others: port.protocol() != Protocol::IWarp,
                silence_ended: Atomic::new(false),
                unheard: Atomic::new(0),
                send_depth: depths.send,
                port,
                begun: UnsafeCell::new(None),
                drained <- Latch::new(),
                marker <- Marker::new(),
                stands_on: UnsafeCell::new(Some(StandsOn {
                    cq,
                    pd: pd.clone(),
                })),
                handler <- handler,
            }? Error),
            GFP_KERNEL,
        )
        .inspect_err(|_| {
            // SAFETY: The queue pair is new, and nothing was posted to it.
            let _ = unsafe { raw.destroy() };
        })?;
        // INVARIANT: `raw` is valid, nothing is in flight, and the depths were checked above.
        let this = Self(Register::enroll(dev, qp)?);
        this.0.raw.init(port.number())?;
        Ok(this)
    }

    /// What the other side has to know to connect to this one, reached by entry `gid_index` of the
    /// port's table. Sleeps.
    ///
    /// # Errors
    ///
    /// Those of [`Port::gid`] and [`Port::state`].
    pub fn endpoint(&self, gid_index: u8, may_sleep: MaySleep<'_>) -> Result<Endpoint> {
        let port = self.0.port;
        Ok(Endpoint {
            qp_num: self.num(),
            psn: self.psn(),
            lid: port.query(may_sleep)?.lid,
            gid: port.gid(gid_index)?,
            mac: match port.protocol() {
                Protocol::RoCE => port.mac(gid_index)?,
                _ => [0; 6],
            },
        })
    }

    /// The number of the first packet. It only has to differ from that of an earlier connection
    /// between the same numbers.
    fn psn(&self) -> u32 {
        self.num() & 0xff_ffff
    }

    /// Goes through the states to the one that is ready to send, with the attributes that the
    /// connection manager has for each.
    pub(crate) fn follow(&self, id: *mut bindings::rdma_cm_id) -> Result {
        for state in [
            bindings::ib_qp_state_IB_QPS_INIT,
            bindings::ib_qp_state_IB_QPS_RTR,
            bindings::ib_qp_state_IB_QPS_RTS,
        ] {
            let mut attr = bindings::ib_qp_attr {
                qp_state: state,
                ..Default::default()
            };
            let mut mask = 0;
            // SAFETY: The id is valid, and the connection is under way.
            to_result(unsafe { bindings::rdma_init_qp_attr(id, &mut attr, &mut mask) })?;
            attr.max_rd_atomic = 1;
            attr.max_dest_rd_atomic = 1;
            self.0.raw.modify(&mut attr, mask.unsigned_abs())?;
        }
        Ok(())
    }

    /// What requests know this queue pair by.
    pub(crate) fn identity(&self) -> *const c_void {
        self.0.identity()
    }

    /// Makes what was in flight, as `way`, the request again, without a handler.
    ///
    /// # Safety
    ///
    /// `wc` is the one completion of a request that was posted here so, and speaks for no other.
    #[inline]
    pub(crate) unsafe fn take_back(
        &self,
        way: Way,
        wc: &bindings::ib_wc,
    ) -> WorkRequest<'bound, H::Tag> {
        let side = match way {
            Way::Send => Side::Send,
            Way::Recv => Side::Recv,
            Way::Silent | Way::Last => {
                // SAFETY: By the function's requirements.
                unsafe { self.0.completed_alone(wc) };
                Side::Send
            }
        };
        // SAFETY: By the function's requirements.
        let request = unsafe { self.0.take_back(side, wc) };
        self.0.count_out(state::unit(side));
        request
    }

    /// Allows sends: the queue pair is connected.
    pub(crate) fn open_sends(&self) {
        self.0.open_sends();
    }

    pub(crate) fn is_iwarp(&self) -> bool {
        self.0.port.protocol() == Protocol::IWarp
    }

    /// The device of the queue pair.
    pub fn device(&self) -> &'bound Device<'bound> {
        self.0.device
    }

    /// The number of the queue pair.
    pub fn num(&self) -> u32 {
        self.0.num
    }

    /// Connects to `peer` from the port's address at `gid_index`. The other side has to do the same.
    /// Sleeps.
    ///
    /// Both sides have to be in one subnet, or on one Ethernet segment: nobody resolves routes here.
    ///
    /// Sends can be posted from then on. A message for which the other side has posted no receive is
    /// sent again until it has. C function: `ib_modify_qp()`.
    ///
    /// # Errors
    ///
    /// - `EOPNOTSUPP` on an iWARP port, whose queue pairs are connected by the connection manager.
    /// - `EINVAL` if the queue pair is connected already, or its peer can't be reached.
    /// - Those of the driver; `EDEADLK` where sleeping is not possible.
    pub fn connect(&self, peer: &Endpoint, gid_index: u8, may_sleep: MaySleep<'_>) -> Result {
        may_sleep.check("QueuePair::connect")?;
        let port = self.0.port;
        let dev = port.device();
        if port.protocol() == Protocol::IWarp {
            log_refusal!(
                "{}: port {} is iWARP: only the connection manager can connect it\n",
                dev.name(),
                port.number()
            );
            return Err(EOPNOTSUPP);
        }

        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_RTR,
            path_mtu: port.query(may_sleep)?.active_mtu,
            dest_qp_num: peer.qp_num,
            rq_psn: peer.psn,
            max_dest_rd_atomic: 1,
            min_rnr_timer: MIN_RNR_TIMER,
            ..Default::default()
        };
        let ah = &mut attr.ah_attr;
        // SAFETY: The device and the port are valid.
        ah.type_ = unsafe { bindings::rdma_ah_find_type(dev.as_raw(), port.number()) };
        ah.port_num = port.number();
        match port.protocol() {
            Protocol::RoCE => {
                ah.ah_flags = AH_GRH;
                ah.grh.dgid = peer.gid.into_raw();
                ah.grh.sgid_index = gid_index;
                ah.grh.hop_limit = HOP_LIMIT;
                let roce = (&raw mut ah.__bindgen_anon_1).cast::<bindings::roce_ah_attr>();
                // SAFETY: The member of the union that goes with the protocol.
                unsafe { (*roce).dmac = peer.mac };
            }
            // SAFETY: The kind of address was set above.
            _ => unsafe { bindings::rdma_ah_set_dlid(ah, peer.lid) },
        }
        self.0.raw.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE
                | bindings::ib_qp_attr_mask_IB_QP_AV
                | bindings::ib_qp_attr_mask_IB_QP_PATH_MTU
                | bindings::ib_qp_attr_mask_IB_QP_DEST_QPN
                | bindings::ib_qp_attr_mask_IB_QP_RQ_PSN
                | bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC
                | bindings::ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER,
        )?;

        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_RTS,
            sq_psn: self.psn(),
            max_rd_atomic: 1,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_RETRIES,
            ..Default::default()
        };
        self.0.raw.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE
                | bindings::ib_qp_attr_mask_IB_QP_SQ_PSN
                | bindings::ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC
                | bindings::ib_qp_attr_mask_IB_QP_TIMEOUT
                | bindings::ib_qp_attr_mask_IB_QP_RETRY_CNT
                | bindings::ib_qp_attr_mask_IB_QP_RNR_RETRY,
        )?;
        self.open_sends();
        Ok(())
    }

    /// Posts a send of the request's bytes. May be called from any context.
    ///
    /// C function: `ib_post_send()`.
    ///
    /// # Errors
    ///
    /// The request comes back with the error, see [`PostError::request`].
    ///
    /// - `ENOMEM` if as many sends are in flight as the queue pair was made for.
    /// - `ENOTCONN` if the queue pair isn't connected.
    /// - `ESHUTDOWN` if a request has failed, or teardown began.
    /// - Those of the driver.
    #[inline(always)]
    pub fn post_send(
        &self,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        self.0.post(Side::Send, request)
    }

    /// Posts a receive into the request's bytes. May be called from any context.
    ///
    /// C function: `ib_post_recv()`.
    ///
    /// # Errors
    ///
    /// As for [`Self::post_send`].
    #[inline(always)]
    pub fn post_recv(
        &self,
        request: WorkRequest<'bound, H::Tag>,
    ) -> Result<(), PostError<'bound, H::Tag>> {
        self.0.post(Side::Recv, request)
    }

    /// The handler.
    pub fn handler(&self) -> &H {
        &self.0.handler
    }

    /// Makes the device give back all that is in flight, without waiting for it. Sleeps.
    ///
    /// Nothing can be posted any more. Of many queue pairs that have to go, end them all before the
    /// first is closed: they flush side by side then.
    pub fn end(&self, may_sleep: MaySleep<'_>) -> Result {
        may_sleep.check("QueuePair::end")?;
        self.0.fail();
        self.0.raw.flush()
    }

    /// Takes the queue pair down, and waits until all requests came back, their handlers have
    /// returned, the entries of the queue are given back and the handler is dropped. Sleeps.
    ///
    /// Not for handlers, which have no [`MayWait`]:
    ///
    /// ```compile_fail,E0308
    /// use rdma::{context::Workqueue, qp::{Handler, QueuePair}};
    /// fn f<'bound, H: Handler<'bound>>(qp: QueuePair<'bound, H>, context: Workqueue) {
    ///     let _ = qp.close(context.may_sleep());
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// `EDEADLK` where sleeping is not possible, and if the caller has completions that it polled from the
    /// queue pair's own queue: its requests may be among them. The queue pair is dropped then.
    pub fn close(self, may_wait: MayWait<'_>) -> Result {
        may_wait.may_sleep().check("QueuePair::close")?;
        // SAFETY: Taken by `destroy` only, which nobody calls as long as there is a handle.
        let stands_on = unsafe { &*self.0.stands_on.get() };
        if stands_on
            .as_ref()
            .is_some_and(|on| on.cq.is_polled_by_caller())
        {
            log_refusal!(
                "{}: qp={}: closed by who has completions polled from its queue: refused\n",
                self.0.device.name(),
                self.num()
            );
            return Err(EDEADLK);
        }
        self.0.take_down();
        Ok(())
    }
}

// Those that matter to how fast it is are in rust/bench/twin.c as well, to be compared with.

/// Code of `min_rnr_timer`: 0.01 ms, the shortest.
const MIN_RNR_TIMER: u8 = 1;
/// Code of `timeout`: 4.096 us * 2^18 = 1.1 s.
const ACK_TIMEOUT: u8 = 18;
/// How often a packet is sent again: as often as the field can say, less one, since rxe takes 7 for any number.
const RETRIES: u8 = 6;
/// How often the receiver may be found not ready: 7 stands for any number of times.
const RNR_RETRIES: u8 = 7;
/// Of RoCE packets: as many as an IP router would use.
const HOP_LIMIT: u8 = 64;
const AH_GRH: u8 = bindings::ib_ah_flags_IB_AH_GRH as u8;
