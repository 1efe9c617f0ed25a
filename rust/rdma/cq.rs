// SPDX-License-Identifier: GPL-2.0

//! Completion queues of one's own.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_alloc_cq()`)

use core::{
    marker::PhantomData,
    num::NonZero,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    fmt,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
    task::Task,
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma_bindings as bindings;

use crate::{
    atomic,
    context::{
        Direct,
        MaySleep,
        PollContext, //
    },
    device::Device,
    flight::Roll,
    latch::Latch,
    pool::PooledCq,
    raw_cq::RawCq,
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    },
};

/// A completion queue that isn't shared through the device's pool.
///
/// A counted handle: each queue pair on the queue has one of its own, and the queue goes with the last.
/// It may be dropped anywhere, and can't leave the window in which the device may be used:
///
/// ```compile_fail,E0521
/// use rdma::{context::Softirq, cq::CompletionQueue};
///
/// fn keep(_: CompletionQueue<'static, Softirq>) {}
///
/// fn escape<'bound>(cq: CompletionQueue<'bound, Softirq>) {
///     keep(cq)
/// }
/// ```
///
/// What the RDMA core polls, nobody else can:
///
/// ```compile_fail,E0599
/// use rdma::{context::Workqueue, cq::CompletionQueue};
///
/// fn poll(cq: &CompletionQueue<'_, Workqueue>) {
///     let _ = cq.poll(&mut []);
/// }
/// ```
///
/// C type: `struct ib_cq`.
pub struct CompletionQueue<'bound, C: PollContext> {
    cq: Arc<Owned<'bound, Cq<C>>>,
}

const _: () = {
    /// Handles may be used, and dropped, on any thread.
    const fn shared<T: Send + Sync>() {}
    shared::<CompletionQueue<'_, Direct>>();
};

impl<C: PollContext> Clone for CompletionQueue<'_, C> {
    fn clone(&self) -> Self {
        Self {
            cq: self.cq.clone(),
        }
    }
}

/// # Invariants
///
/// - `raw` is valid until `destroy` is called, and polled in the context `C`.
/// - Queue pairs have claimed `claimed` of its entries, and never more than there are.
/// - While `polled` is set, and `C` is [`Direct`], only who set it takes completions off the queue.
pub(crate) struct Cq<C> {
    node: Node,
    raw: RawCq,
    min_capacity: u32,
    claimed: Atomic<u32>,
    polled: Atomic<bool>,
    /// The task that has what it took off a direct queue by hand, if any.
    poller: Atomic<usize>,
    _context: PhantomData<C>,
}

// SAFETY: `node` is part of the object, and the RDMA core knows nothing of it.
unsafe impl<C: PollContext> Resource for Cq<C> {
    const KIND: Kind = Kind::CompletionQueue;

    fn node(&self) -> &Node {
        &self.node
    }

    unsafe fn destroy(&self) -> Fate {
        // SAFETY: By the type invariant; every queue pair on it had a handle, and is gone. The caller
        // may sleep. The RDMA core's softirq handler looks at the queue once more when it has handled
        // the last completion; it does so in an RCU read-side section.
        unsafe {
            if C::RAW == bindings::ib_poll_context_IB_POLL_SOFTIRQ {
                kernel::bindings::synchronize_rcu();
            }
            bindings::ib_free_cq(self.raw.as_raw());
        }
        Fate::Free
    }
}

impl<'bound, C: PollContext> CompletionQueue<'bound, C> {
    /// Creates a queue of at least `min_capacity` entries, polled in the context `C`. Sleeps.
    ///
    /// `vector` is the completion vector whose interrupts it is served by; with `None` the kernel takes
    /// them in turns. `rdma resource show cq` names the client as its owner.
    ///
    /// ```
    /// # use kernel::prelude::*;
    /// use rdma::{context::{MaySleep, Workqueue}, cq::CompletionQueue, device::Device};
    ///
    /// fn on_every_vector<'bound>(
    ///     dev: &'bound Device<'bound>,
    ///     may_sleep: MaySleep<'_>,
    /// ) -> Result<KVec<CompletionQueue<'bound, Workqueue>>> {
    ///     let mut queues = KVec::new();
    ///     for vector in 0..dev.num_comp_vectors() {
    ///         let queue = CompletionQueue::create(dev, 256, Some(vector), may_sleep)?;
    ///         queues.push(queue, GFP_KERNEL)?;
    ///     }
    ///     Ok(queues)
    /// }
    /// ```
    ///
    /// C functions: `__ib_alloc_cq()`, `__ib_alloc_cq_any()`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`, with a line in the log, if `min_capacity` isn't within 1 and [`Device::max_cqe`], or
    ///   `vector` isn't below [`Device::num_comp_vectors`].
    /// - `ENOMEM`, and those of the driver.
    /// - `EDEADLK` where sleeping is not possible.
    pub fn create(
        dev: &'bound Device<'bound>,
        min_capacity: u32,
        vector: Option<u32>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Self> {
        may_sleep.check("CompletionQueue::create")?;
        let nr_cqe = check_capacity(dev, "min_capacity", min_capacity)?;
        if let Some(vector) = vector {
            if vector >= dev.num_comp_vectors() {
                log_refusal!(
                    "{}: vector={} is out of range: the device has {}, counted from 0\n",
                    dev.name(),
                    vector,
                    dev.num_comp_vectors()
                );
                return Err(EINVAL);
            }
        }

        let owner = dev.owner().as_char_ptr();
        let private = core::ptr::null_mut();
        // SAFETY: The device is valid, we may sleep, the numbers were checked above, and the owner's
        // name outlives what is made.
        let raw = from_err_ptr(unsafe {
            match vector {
                Some(vector) => bindings::__ib_alloc_cq(
                    dev.as_raw(),
                    private,
                    nr_cqe,
                    c_int::try_from(vector)?,
                    C::RAW,
                    owner,
                ),
                None => bindings::__ib_alloc_cq_any(dev.as_raw(), private, nr_cqe, C::RAW, owner),
            }
        })?;
        // SAFETY: It was just made, and is given back by `destroy` only.
        let raw = unsafe { RawCq::new(NonNull::new(raw).ok_or(ENOMEM)?) };

        let cq = KBox::new(
            Cq {
                node: Node::new::<Cq<C>>(),
                raw,
                min_capacity,
                claimed: Atomic::new(0),
                polled: Atomic::new(false),
                poller: Atomic::new(0),
                _context: PhantomData,
            },
            GFP_KERNEL,
        )
        .inspect_err(|_| {
            // SAFETY: The queue is new, and nobody else knows it.
            unsafe { bindings::ib_free_cq(raw.as_raw()) };
        })?;
        // INVARIANT: `raw` is valid, and nothing is claimed.
        let cq = Register::enroll(dev, KBox::into_pin(cq))?;
        Ok(Self {
            cq: Arc::new(cq, GFP_KERNEL)?,
        })
    }

    /// The device of the queue.
    pub fn device(&self) -> &'bound Device<'bound> {
        self.cq.device()
    }

    /// How many entries were asked for.
    pub fn min_capacity(&self) -> u32 {
        self.cq.min_capacity
    }

    /// How many entries the queue has: as many as were asked for, or more. C field: `ib_cq.cqe`.
    pub fn capacity(&self) -> u32 {
        self.cq.raw.capacity()
    }

    /// How many entries no queue pair has claimed yet.
    pub fn available(&self) -> u32 {
        self.capacity()
            .saturating_sub(self.cq.claimed.load(Relaxed))
    }

    /// The completion vector of the queue.
    pub fn vector(&self) -> u32 {
        self.cq.raw.vector()
    }

    /// The name of the context that the queue is polled in.
    pub fn context(&self) -> &'static str {
        C::NAME
    }

    /// The number by which `rdma resource show cq` and the trace events know the queue.
    pub fn id(&self) -> u32 {
        self.cq.raw.id()
    }

    /// Has the device wait for `count` completions, or for `period` microseconds from the first of
    /// them, before it interrupts. Sleeps.
    ///
    /// C function: `rdma_set_cq_moderation()`.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device can't, those of the driver, `EDEADLK` where sleeping is not possible.
    pub fn set_moderation(&self, count: u16, period: u16, may_sleep: MaySleep<'_>) -> Result {
        may_sleep.check("CompletionQueue::set_moderation")?;
        // SAFETY: By the type invariant of `Cq`.
        to_result(unsafe { bindings::rdma_set_cq_moderation(self.cq.raw.as_raw(), count, period) })
    }

    /// Whether the kernel adapts the moderation to the load by itself. C field: `ib_cq.dim`.
    pub fn is_moderation_adaptive(&self) -> bool {
        // SAFETY: By the type invariant of `Cq`; the field doesn't change.
        unsafe { !(*self.cq.raw.as_raw()).dim.is_null() }
    }
}

impl CompletionQueue<'_, Direct> {
    /// Calls the handlers of as many completions as there are, `budget` at most, here and now. Says how
    /// many. May be called from any context, which is the one that the handlers run in, and never waits.
    ///
    /// One at a time takes completions off a queue: while somebody else does, or if called in a handler
    /// of this queue, there are none.
    ///
    /// C function: `ib_process_cq_direct()`.
    pub fn process(&self, budget: NonZero<u16>) -> u32 {
        self.cq.try_turn().map_or(0, |turn| turn.process(budget))
    }

    pub(crate) fn try_turn(&self) -> Option<Turn<'_, Direct>> {
        self.cq.try_turn()
    }
}

impl<C: PollContext> fmt::Debug for CompletionQueue<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &fmt!("{}", self.device().name()))
            .field("context", &self.context())
            .field("vector", &self.vector())
            .field("min_capacity", &self.min_capacity())
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// Checks how many entries a queue is to have, or a lease.
pub(crate) fn check_capacity(dev: &Device<'_>, what: &str, nr_cqe: u32) -> Result<c_int> {
    let max = dev.max_cqe().min(i32::MAX.unsigned_abs());
    match c_int::try_from(nr_cqe) {
        Ok(number) if (1..=max).contains(&nr_cqe) => Ok(number),
        _ => {
            log_refusal!(
                "{}: {}={} is out of range 1..={}\n",
                dev.name(),
                what,
                nr_cqe,
                max
            );
            Err(EINVAL)
        }
    }
}

/// Where the completions of a queue pair are to go: to entries leased from the device's pool, or to a
/// queue of one's own, which several queue pairs may share.
pub enum Entries<'bound, C: PollContext> {
    /// A lease, which the queue pair takes.
    Pooled(PooledCq<'bound, C>),
    /// A queue, in which the queue pair claims as many entries as it may have requests in flight.
    Private(CompletionQueue<'bound, C>),
}

impl<'bound, C: PollContext> From<PooledCq<'bound, C>> for Entries<'bound, C> {
    fn from(cq: PooledCq<'bound, C>) -> Self {
        Self::Pooled(cq)
    }
}

impl<'bound, C: PollContext> From<CompletionQueue<'bound, C>> for Entries<'bound, C> {
    fn from(cq: CompletionQueue<'bound, C>) -> Self {
        Self::Private(cq)
    }
}

impl<'bound, C: PollContext> From<&CompletionQueue<'bound, C>> for Entries<'bound, C> {
    fn from(cq: &CompletionQueue<'bound, C>) -> Self {
        Self::Private(cq.clone())
    }
}

impl<'bound, C: PollContext> Entries<'bound, C> {
    fn device(&self) -> &'bound Device<'bound> {
        match self {
            Self::Pooled(cq) => cq.device(),
            Self::Private(cq) => cq.device(),
        }
    }

    /// Claims `number` entries for a queue pair.
    pub(crate) fn claim(self, number: u32) -> Result<Claim<'bound, C>> {
        let available = match &self {
            Self::Pooled(cq) => cq.nr_cqe(),
            Self::Private(cq) => cq.available(),
        };
        let claimed = match &self {
            Self::Pooled(_) => number <= available,
            Self::Private(cq) => cq.cq.claim(number),
        };
        if !claimed {
            log_refusal!(
                "{}: a queue pair needs {} entries of its completion queue, one more than requests: \
                 {} are left\n",
                self.device().name(),
                number,
                available
            );
            return Err(match self {
                Self::Private(cq) if number <= cq.capacity() => ENOSPC,
                _ => EINVAL,
            });
        }
        // INVARIANT: Claimed above.
        Ok(Claim {
            entries: self,
            number,
        })
    }
}

/// Entries of a completion queue that are one queue pair's.
///
/// # Invariants
///
/// `number` entries of a private queue are claimed for this, and a lease has as many.
pub(crate) struct Claim<'bound, C: PollContext> {
    entries: Entries<'bound, C>,
    number: u32,
}

impl<C: PollContext> Drop for Claim<'_, C> {
    fn drop(&mut self) {
        if let Entries::Private(cq) = &self.entries {
            cq.cq.claimed.fetch_sub(self.number, Relaxed);
        }
    }
}

impl<C: PollContext> Claim<'_, C> {
    fn raw(&self) -> RawCq {
        match &self.entries {
            Entries::Pooled(cq) => cq.raw(),
            Entries::Private(cq) => cq.cq.raw,
        }
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.raw().as_raw()
    }

    /// Waits until no handler runs that a worker has begun. Sleeps.
    pub(crate) fn flush(&self) {
        self.raw().flush::<C>();
    }

    /// Waits until no handler runs that runs now. Sleeps. Of a direct queue, somebody may have forgotten
    /// to end a turn, in which no handler runs: that is waited for `patience` milliseconds at most.
    pub(crate) fn fence(&self, patience: u32) {
        self.flush();
        // SAFETY: The caller may sleep.
        unsafe { kernel::bindings::synchronize_rcu() };
        if let Some(cq) = self.direct() {
            drop(cq.turn(patience));
        }
    }

    /// The kernel holds on to the queue: nobody takes it down any more.
    pub(crate) fn abandon(&self) {
        match &self.entries {
            Entries::Pooled(cq) => cq.abandon(),
            Entries::Private(cq) => cq.cq.abandon(),
        }
    }

    /// Whether the caller has completions that it took off the queue by hand.
    pub(crate) fn is_polled_by_caller(&self) -> bool {
        self.direct()
            .is_some_and(|cq| cq.poller.load(Relaxed) == current_task())
    }

    /// Waits for the latch to open, which a handler does, for `limit` milliseconds at most. Says whether
    /// it is open. Sleeps.
    ///
    /// Of a direct queue somebody has to call the handlers, and its owner may not come back.
    pub(crate) fn wait_for(&self, latch: &Latch, limit: u32) -> bool {
        let Some(cq) = self.direct() else {
            return latch.wait_unchecked(limit);
        };
        let start = Instant::<Monotonic>::now();
        loop {
            if let Some(turn) = cq.try_turn() {
                turn.process(NonZero::<u16>::MAX);
            }
            if latch.wait_unchecked(1) {
                return true;
            }
            if start.elapsed().as_millis() >= i64::from(limit) {
                return false;
            }
        }
    }

    /// Of a direct queue: handles all that is in it, then hands back what is in flight. Takes `patience`
    /// milliseconds at most to wait for others who take completions off it. Sleeps.
    ///
    /// # Errors
    ///
    /// `EBUSY` if these did not come to an end: nothing was handed back then.
    ///
    /// # Safety
    ///
    /// Those of [`Roll::hand_back`]. `C` is [`Direct`].
    pub(crate) unsafe fn sweep(&self, roll: &Roll, patience: u32) -> Result {
        let Some(cq) = self.direct() else {
            return Err(EINVAL);
        };
        let turn = cq.turn(patience).ok_or(EBUSY)?;
        while turn.process(NonZero::<u16>::MAX) > 0 {}
        // SAFETY: By the function's requirements. The queue was empty just now, and nobody else takes
        // anything off it.
        unsafe { roll.hand_back(cq.raw.as_raw()) };
        Ok(())
    }

    /// The queue, if it is one that its owner polls.
    fn direct(&self) -> Option<&Cq<C>> {
        match &self.entries {
            Entries::Private(cq) if C::RAW == Direct::RAW => Some(&cq.cq),
            _ => None,
        }
    }
}

impl<C: PollContext> Cq<C> {
    /// Claims entries, if so many are left.
    fn claim(&self, number: u32) -> bool {
        let mut claimed = self.claimed.load(Relaxed);
        loop {
            let Some(sum) = claimed
                .checked_add(number)
                .filter(|sum| *sum <= self.raw.capacity())
            else {
                return false;
            };
            match self.claimed.cmpxchg(claimed, sum, Relaxed) {
                Ok(_) => return true,
                Err(now) => claimed = now,
            }
        }
    }

    /// The right to take completions off a direct queue, unless somebody else has it.
    #[inline]
    fn try_turn(&self) -> Option<Turn<'_, C>> {
        // Acquire: pairs with the end of the turn before.
        let taken = atomic::set_acquire(&self.polled);
        // INVARIANT: Set by us.
        (!taken).then(|| Turn(self))
    }

    /// As [`Self::try_turn`], but waits for it, for `limit` milliseconds at most. Sleeps.
    fn turn(&self, limit: u32) -> Option<Turn<'_, C>> {
        let start = Instant::<Monotonic>::now();
        loop {
            let turn = self.try_turn();
            if turn.is_some() || start.elapsed().as_millis() >= i64::from(limit) {
                return turn;
            }
            fsleep(Delta::from_millis(1));
        }
    }
}

/// A turn at taking completions off a direct queue.
///
/// # Invariants
///
/// `polled` is set for this.
pub(crate) struct Turn<'a, C>(&'a Cq<C>);

impl<C> Turn<'_, C> {
    pub(crate) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.0.raw.as_raw()
    }

    /// Has the handlers called of as many completions as there are, `budget` at most. Says how many.
    fn process(&self, budget: NonZero<u16>) -> u32 {
        // SAFETY: By the type invariant of `Cq`. The requests of completions have handlers.
        let number = unsafe {
            bindings::ib_process_cq_direct(self.0.raw.as_raw(), c_int::from(budget.get()))
        };
        u32::try_from(number).unwrap_or(0)
    }

    /// Notes that the caller takes completions by hand, or no longer does.
    pub(crate) fn by_hand(&self, begins: bool) {
        let poller = if begins { current_task() } else { 0 };
        self.0.poller.store(poller, Relaxed);
    }
}

/// What the current task can be told from others by.
fn current_task() -> usize {
    Task::current_raw().addr()
}

impl<C> Drop for Turn<'_, C> {
    #[inline]
    fn drop(&mut self) {
        // Release: who has the next turn sees all that was done in this one.
        atomic::clear_release(&self.0.polled);
    }
}
