// SPDX-License-Identifier: GPL-2.0

//! The traffic of one poll context: what is posted, and what becomes of it.

#![forbid(unsafe_code)]

use core::marker::PhantomData;
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        SpinLockIrq, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    completion::{
        Completion,
        Failure, //
    },
    context::{
        Direct,
        Execution,
        MaySleep,
        PollContext,
        Softirq,
        UnboundWorkqueue,
        Workqueue, //
    },
    counter::Counter,
    cq::{
        CompletionQueue,
        Entries, //
    },
    device::{
        Device,
        Name, //
    },
    latch::Latch,
    pool::PooledCq,
    qp::{
        Chain,
        ChainHandler,
        Handler,
        Poster,
        QueuePair, //
    },
    request::{
        PostError,
        WorkRequest, //
    }, //
};

use crate::{
    config::Config,
    payload::Id,
    queues::Queues,
    stats::{
        Histogram,
        Stats, //
    },
};

/// A poll context, and what its handlers can expect.
pub(crate) trait Promise: PollContext {
    /// Where the handlers are to run.
    const EXECUTION: Execution;

    /// Room for `number` completions, in the queue that is usual in this context. Sleeps.
    fn entries<'bound>(
        queues: &mut Queues<'bound, Self>,
        dev: &'bound Device<'bound>,
        number: u32,
        may_sleep: MaySleep<'_>,
    ) -> Result<Entries<'bound, Self>>;

    /// Has a queue of the run's own polled, if nobody else sees to that. Sleeps.
    fn poll<'bound>(
        queues: &mut Queues<'bound, Self>,
        dev: &'bound Device<'bound>,
        cq: &CompletionQueue<'bound, Self>,
        may_sleep: MaySleep<'_>,
    ) -> Result;
}

/// A context in which the RDMA core polls: queues are leased.
macro_rules! polled_by_the_core {
    ($($context:ident in $execution:ident;)*) => {$(
        impl Promise for $context {
            const EXECUTION: Execution = Execution::$execution;

            fn entries<'bound>(
                queues: &mut Queues<'bound, Self>,
                dev: &'bound Device<'bound>,
                number: u32,
                may_sleep: MaySleep<'_>,
            ) -> Result<Entries<'bound, Self>> {
                let lease = PooledCq::lease(dev, number, queues.vector(), may_sleep)?;
                queues.leased(lease)
            }

            fn poll<'bound>(
                _: &mut Queues<'bound, Self>,
                _: &'bound Device<'bound>,
                _: &CompletionQueue<'bound, Self>,
                _: MaySleep<'_>,
            ) -> Result {
                Ok(())
            }
        }
    )*};
}

polled_by_the_core! {
    Softirq in Softirq;
    Workqueue in Worker;
    UnboundWorkqueue in Worker;
}

impl Promise for Direct {
    const EXECUTION: Execution = Execution::Worker;

    fn entries<'bound>(
        queues: &mut Queues<'bound, Self>,
        dev: &'bound Device<'bound>,
        number: u32,
        may_sleep: MaySleep<'_>,
    ) -> Result<Entries<'bound, Self>> {
        queues.own(dev, number, may_sleep)
    }

    fn poll<'bound>(
        queues: &mut Queues<'bound, Self>,
        dev: &'bound Device<'bound>,
        cq: &CompletionQueue<'bound, Self>,
        may_sleep: MaySleep<'_>,
    ) -> Result {
        queues.poll(dev, cq, may_sleep)
    }
}

/// What all queue pairs of a run share.
#[pin_data]
pub(crate) struct Traffic {
    name: Name,
    config: Config,
    /// Ends of pairs that haven't sent, or received, all.
    unfinished: Atomic<u32>,
    failures_logged: Atomic<bool>,
    pub(crate) latency: Histogram,
    /// Opens when there is nothing more to be done, or no use in doing it.
    #[pin]
    pub(crate) over: Latch,
}

impl Traffic {
    pub(crate) fn new(name: Name, config: Config) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            name,
            config,
            unfinished: Atomic::new(2 * config.qps),
            failures_logged: Atomic::new(false),
            latency: Histogram::new()?,
            over <- Latch::new(),
        })
    }

    /// Ends the traffic early. What fails from now on does so for that reason.
    pub(crate) fn stop(&self) {
        self.failures_logged.store(true, Relaxed);
        self.over.open();
    }

    #[cold]
    fn end_finished(&self) {
        if self.unfinished.fetch_sub(1u32, Relaxed) == 1 {
            self.over.open();
        }
    }

    /// A request failed: on a reliable connection that is the end of it.
    fn failed(&self, pair: u32, what: &str, failure: &Failure) {
        self.name_failure(pair, what, failure);
        self.over.open();
    }

    /// Whether a request has failed, or the traffic was stopped.
    pub(crate) fn has_failed(&self) -> bool {
        self.failures_logged.load(Relaxed)
    }

    /// Says how a request failed, if it is the first.
    fn name_failure(&self, pair: u32, what: &str, failure: &Failure) {
        // The first is the cause, and the rest would fill the log.
        if !self.failures_logged.xchg(true, kernel::sync::atomic::Full) {
            pr_err!(
                "{}: pair={} {} failed: {}\n",
                self.name,
                pair,
                what,
                failure
            );
        }
    }
}

/// What is kept with each request.
pub(crate) struct Tag {
    slot: u32,
    /// No more than there are sends.
    round: u32,
    posted_at: Instant<Monotonic>,
}

impl Tag {
    pub(crate) fn new(slot: u32) -> Self {
        Self {
            slot,
            round: 0,
            posted_at: Instant::now(),
        }
    }
}

/// Keeps a sender from running ahead of its receiver where a message has to find a receive.
#[pin_data]
pub(crate) struct Flow<'bound> {
    #[pin]
    window: SpinLockIrq<Window<'bound>>,
}

struct Window<'bound> {
    /// Receives that are posted, and for which no send is.
    receives: u32,
    /// Sends that wait for one.
    waiting: KVec<WorkRequest<'bound, Tag>>,
}

impl<'bound> Flow<'bound> {
    pub(crate) fn new(config: &Config) -> Result<Arc<Self>> {
        let window = Window {
            receives: 0,
            waiting: KVec::with_capacity(config.send_depth() as usize, GFP_KERNEL)?,
        };
        Arc::pin_init(
            pin_init!(Self {
                window <- new_spinlock_irq!(window, "cq_exerciser::Flow::window"),
            }),
            GFP_KERNEL,
        )
    }

    fn receive_posted(&self) {
        self.window.lock().receives += 1;
    }

    /// Gives the request back if it may be posted now. Otherwise it waits.
    fn admit(&self, request: WorkRequest<'bound, Tag>) -> Option<WorkRequest<'bound, Tag>> {
        let mut window = self.window.lock();
        if window.receives > 0 {
            window.receives -= 1;
            return Some(request);
        }
        // There is room for all that the sender has.
        let _ = window.waiting.push_within_capacity(request);
        None
    }

    /// Takes back a request that was let go, and was not posted.
    fn put_back(&self, request: WorkRequest<'bound, Tag>) {
        let mut window = self.window.lock();
        window.receives += 1;
        // As above.
        let _ = window.waiting.push_within_capacity(request);
    }

    /// A request that waited, and may be posted now.
    fn next(&self) -> Option<WorkRequest<'bound, Tag>> {
        let mut window = self.window.lock();
        if window.receives == 0 {
            return None;
        }
        let request = window.waiting.pop()?;
        window.receives -= 1;
        Some(request)
    }
}

/// Requests that have been posted for the last time. They are freed when their queue pair is gone: handlers
/// have others wait for them.
#[pin_data]
struct Spent<'bound> {
    #[pin]
    requests: SpinLockIrq<KVec<WorkRequest<'bound, Tag>>>,
}

impl<'bound> Spent<'bound> {
    fn new(config: &Config) -> Result<Arc<Self>> {
        // A receiver has more than a sender.
        let requests = KVec::with_capacity(config.recv_depth() as usize, GFP_KERNEL)?;
        Arc::pin_init(
            pin_init!(Self {
                requests <- new_spinlock_irq!(requests, "cq_exerciser::Spent::requests"),
            }),
            GFP_KERNEL,
        )
    }

    #[cold]
    fn keep(&self, request: WorkRequest<'bound, Tag>) {
        // There is room for all that the queue pair has.
        let _ = self.requests.lock().push_within_capacity(request);
    }
}

/// One queue pair of a pair. The one sends, the other receives.
pub(crate) struct End<'bound, C> {
    traffic: Arc<Traffic>,
    pair: u32,
    pub(crate) stats: Arc<Stats>,
    /// Of a receiver: the round that is next in each slot of the sender.
    rounds: KVec<Counter>,
    spent: Arc<Spent<'bound>>,
    flow: Option<Arc<Flow<'bound>>>,
    _context: PhantomData<C>,
}

impl<'bound, C: Promise> End<'bound, C> {
    pub(crate) fn sender(
        traffic: Arc<Traffic>,
        pair: u32,
        stats: Arc<Stats>,
        flow: Option<Arc<Flow<'bound>>>,
    ) -> Result<Self> {
        let spent = Spent::new(&traffic.config)?;
        Ok(Self {
            traffic,
            pair,
            stats,
            rounds: KVec::new(),
            spent,
            flow,
            _context: PhantomData,
        })
    }

    pub(crate) fn receiver(
        traffic: Arc<Traffic>,
        pair: u32,
        stats: Arc<Stats>,
        flow: Option<Arc<Flow<'bound>>>,
    ) -> Result<Self> {
        let mut end = Self::sender(traffic, pair, stats, flow)?;
        for _ in 0..end.traffic.config.send_depth() {
            end.rounds.push(Counter::new(), GFP_KERNEL)?;
        }
        Ok(end)
    }

    /// Whether one more request is to be posted.
    fn begin_one(&self) -> bool {
        self.stats.begin_one(self.traffic.config.ops)
    }

    /// Lets a send go, unless it has to wait for a receive.
    #[inline]
    fn admit(&self, request: WorkRequest<'bound, Tag>) -> Option<WorkRequest<'bound, Tag>> {
        let Some(flow) = &self.flow else {
            return Some(request);
        };
        self.stats.unposted.add_one();
        let request = flow.admit(request)?;
        self.stats.unposted.sub_one();
        Some(request)
    }

    /// As the above, of all in a chain.
    #[cold]
    fn admit_some(&self, chain: Chain<'bound, Tag>) -> Chain<'bound, Tag> {
        let mut admitted = Chain::new();
        for request in chain.into_iter().filter_map(|request| self.admit(request)) {
            // It came from one of the same length.
            let _ = admitted.push(request);
        }
        admitted
    }

    /// Counts what was to be posted and isn't.
    #[inline]
    fn send_posted(&self, result: Result<(), PostError<'bound, Tag>>) -> Result {
        result.map_err(|e| {
            // Where the driver left it open whether it has the request, it counts as posted.
            if e.request.is_some() {
                self.stats.unposted.add_one();
            }
            e.error
        })
    }

    /// As the above, of a receive, for which a send may go.
    #[inline]
    fn recv_posted(&self, result: Result<(), PostError<'bound, Tag>>) -> Result {
        self.send_posted(result)?;
        if let Some(flow) = &self.flow {
            flow.receive_posted();
        }
        Ok(())
    }

    /// Posts sends that had to wait for a receive, as long as there are some that may go.
    pub(crate) fn go_on(qp: &QueuePair<'bound, Self>, flow: &Flow<'bound>) {
        let end = qp.handler();
        while let Some(request) = flow.next() {
            end.stats.unposted.sub_one();
            let result = match qp.post_send(request) {
                Err(PostError {
                    error,
                    request: Some(request),
                }) if error == ENOMEM => {
                    // The handler that had it wait may not have returned yet, and has its place until then.
                    end.stats.unposted.add_one();
                    return flow.put_back(request);
                }
                result => result,
            };
            // Else it is refused only when the run ends, which is seen elsewhere.
            if end.send_posted(result).is_err() {
                return;
            }
        }
    }

    /// As [`Self::send_posted`], of sends that were to be posted as one: those that weren't are still in the
    /// chain.
    #[inline]
    fn chain_posted(&self, result: Result, chain: &Chain<'bound, Tag>) -> Result {
        result.inspect_err(|_| {
            self.stats.unposted.add(chain.len() as u64);
        })
    }

    /// Fills a request with its slot's next message.
    #[inline(always)]
    fn fill(&self, request: &mut WorkRequest<'_, Tag>) {
        let id = Id {
            pair: self.pair,
            slot: request.tag().slot,
            round: request.tag().round.into(),
        };
        id.write(request.data_mut());
    }

    /// Has a request ready to be posted at once.
    #[inline(always)]
    fn prepare(&self, request: &mut WorkRequest<'_, Tag>) {
        self.fill(request);
        request.tag_mut().posted_at = Instant::now();
    }

    /// Posts the first send of each slot.
    pub(crate) fn start_sends(
        qp: &QueuePair<'bound, Self>,
        requests: KVec<WorkRequest<'bound, Tag>>,
    ) -> Result {
        let end = qp.handler();
        let signal = end.traffic.config.signal;
        let mut chain = Chain::new();
        for mut request in requests {
            if !end.begin_one() {
                break;
            }
            end.prepare(&mut request);
            let Some(request) = end.admit(request) else {
                continue;
            };
            if signal == 1 {
                end.send_posted(qp.post_send(request))?;
                continue;
            }
            // It is posted before it is full.
            let _ = chain.push(request);
            if chain.len() >= signal {
                end.chain_posted(qp.post_sends_as_one(&mut chain), &chain)?;
            }
        }
        end.chain_posted(qp.post_sends_as_one(&mut chain), &chain)
    }

    /// Posts one of the first receives.
    pub(crate) fn start_recv(
        qp: &QueuePair<'bound, Self>,
        request: WorkRequest<'bound, Tag>,
    ) -> Result {
        let end = qp.handler();
        if !end.begin_one() {
            return Ok(());
        }
        end.recv_posted(qp.post_recv(request))
    }

    /// Counts what every completion has in common. Says whether the request succeeded.
    #[inline(always)]
    fn count(&self, completion: &Completion<'_>, what: &str) -> Option<u32> {
        if Execution::current() != C::EXECUTION {
            self.stats.wrong_ctx.add_one();
        }
        match completion.result() {
            Ok(success) => Some(success.byte_len()),
            Err(failure) => {
                self.count_failure(&failure, what);
                None
            }
        }
    }

    #[cold]
    fn count_failure(&self, failure: &Failure, what: &str) {
        if failure.is_flush() {
            self.stats.flushed.add_one();
            // In mid-run this is all that some devices say of an error. The run isn't ended: the device
            // may be going.
            self.traffic.name_failure(self.pair, what, failure);
        } else {
            self.stats.failed.add_one();
            self.traffic.failed(self.pair, what, failure);
        }
    }

    /// Whether `data` is the message that is next in its slot.
    fn accept(&self, data: &[u8], byte_len: u32) -> bool {
        if u64::from(byte_len) != data.len() as u64 {
            return false;
        }
        let Some(id) = Id::read(data) else {
            return false;
        };
        let expected = self.rounds.get(id.slot as usize).map(Counter::add_one);
        id.pair == self.pair && expected == Some(id.round)
    }
}

impl<'bound, C: Promise> Handler<'bound> for End<'bound, C> {
    type Context = C;
    type Tag = Tag;

    fn sent(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        mut request: WorkRequest<'bound, Tag>,
        completion: &Completion<'_>,
        _: C,
    ) {
        if self.count(completion, "send").is_none() {
            return;
        }
        let nanos = request.tag().posted_at.elapsed().as_nanos();
        self.traffic.latency.record(nanos.unsigned_abs());

        if self.stats.sent.add_one() + 1 == u64::from(self.traffic.config.ops) {
            self.traffic.end_finished();
        }
        if !self.begin_one() {
            return self.spent.keep(request);
        }
        request.tag_mut().round += 1;
        self.prepare(&mut request);
        if let Some(request) = self.admit(request) {
            // It is refused only when the run ends, which is seen elsewhere.
            let _ = self.send_posted(qp.post_send(request));
        }
    }

    fn received(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, Tag>,
        completion: &Completion<'_>,
        _: C,
    ) {
        let Some(byte_len) = self.count(completion, "receive") else {
            return;
        };
        if !self.accept(request.data(), byte_len) {
            self.stats.corrupt.add_one();
        }
        if self.stats.received.add_one() + 1 == u64::from(self.traffic.config.ops) {
            self.traffic.end_finished();
        }
        if !self.begin_one() {
            return self.spent.keep(request);
        }
        // As above.
        let _ = self.recv_posted(qp.post_recv(request));
    }
}

impl<'bound, C: Promise> ChainHandler<'bound> for End<'bound, C> {
    fn sent_as_one(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        mut chain: Chain<'bound, Tag>,
        completion: &Completion<'_>,
        _: C,
    ) {
        if self.count(completion, "send").is_none() {
            return;
        }
        let now = Instant::<Monotonic>::now();
        for request in chain.iter_mut() {
            let nanos = (now - request.tag().posted_at).as_nanos();
            self.traffic.latency.record(nanos.unsigned_abs());
        }

        let (number, ops) = (chain.len(), self.traffic.config.ops);
        if self.stats.sent.add(number as u64) + number as u64 == u64::from(ops) {
            self.traffic.end_finished();
        }
        let again = self.stats.begin(number, ops);
        while chain.len() > again {
            if let Some(request) = chain.pop() {
                self.spent.keep(request);
            }
        }
        for request in chain.iter_mut() {
            request.tag_mut().round += 1;
            self.fill(request);
        }
        let now = Instant::now();
        for request in chain.iter_mut() {
            request.tag_mut().posted_at = now;
        }
        if self.flow.is_some() {
            chain = self.admit_some(chain);
        }
        // It is refused only when the run ends, which is seen elsewhere.
        let _ = self.chain_posted(qp.post_sends_as_one(&mut chain), &chain);
    }
}
