// SPDX-License-Identifier: GPL-2.0

//! The traffic of one poll context: what is posted, and what becomes of it.

#![forbid(unsafe_code)]

use core::marker::PhantomData;
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
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
        Execution,
        Poolable,
        Softirq,
        UnboundWorkqueue,
        Workqueue, //
    },
    device::Name,
    latch::Latch,
    qp::{
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
    stats::{
        Counter,
        Histogram,
        Stats, //
    },
};

/// A poll context, and what its handlers can expect.
pub(crate) trait Promise: Poolable {
    /// Where the handlers are to run.
    const EXECUTION: Execution;
}

impl Promise for Softirq {
    const EXECUTION: Execution = Execution::Softirq;
}

impl Promise for Workqueue {
    const EXECUTION: Execution = Execution::Worker;
}

impl Promise for UnboundWorkqueue {
    const EXECUTION: Execution = Execution::Worker;
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

    fn end_finished(&self) {
        if self.unfinished.fetch_sub(1u32, Relaxed) == 1 {
            self.over.open();
        }
    }

    /// A request failed: on a reliable connection that is the end of it.
    fn failed(&self, pair: u32, what: &str, failure: &Failure) {
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
        self.over.open();
    }
}

/// What is kept with each request.
pub(crate) struct Tag {
    slot: u32,
    round: u64,
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

/// One queue pair of a pair. The one sends, the other receives.
pub(crate) struct End<C> {
    traffic: Arc<Traffic>,
    pair: u32,
    pub(crate) stats: Arc<Stats>,
    /// Requests that were posted or are about to be.
    begun: Counter,
    /// Of a receiver: the round that is next in each slot of the sender.
    rounds: KVec<Counter>,
    _context: PhantomData<C>,
}

impl<C: Promise> End<C> {
    pub(crate) fn sender(traffic: Arc<Traffic>, pair: u32, stats: Arc<Stats>) -> Self {
        Self {
            traffic,
            pair,
            stats,
            begun: Counter::new(),
            rounds: KVec::new(),
            _context: PhantomData,
        }
    }

    pub(crate) fn receiver(traffic: Arc<Traffic>, pair: u32, stats: Arc<Stats>) -> Result<Self> {
        let mut end = Self::sender(traffic, pair, stats);
        for _ in 0..end.traffic.config.send_depth() {
            end.rounds.push(Counter::new(), GFP_KERNEL)?;
        }
        Ok(end)
    }

    /// Whether one more request is to be posted.
    fn begin_one(&self) -> bool {
        self.begun.add_one() < u64::from(self.traffic.config.ops)
    }

    /// Counts a request, then has it posted: it may come back at once.
    fn post<'bound>(
        &self,
        request: WorkRequest<'bound, Tag>,
        post: impl FnOnce(WorkRequest<'bound, Tag>) -> Result<(), PostError<'bound, Tag>>,
    ) -> Result {
        self.stats.posted.add_one();
        post(request).map_err(|e| {
            // Where the driver left it open whether it has the request, it still counts.
            if e.request.is_some() {
                self.stats.posted.sub_one();
            }
            e.error
        })
    }

    /// Fills a request with its slot's next message.
    fn prepare(&self, request: &mut WorkRequest<'_, Tag>) {
        let id = Id {
            pair: self.pair,
            slot: request.tag().slot,
            round: request.tag().round,
        };
        id.write(request.data_mut());
        request.tag_mut().posted_at = Instant::now();
    }

    /// Posts the first send of a slot.
    pub(crate) fn start_send<'bound>(
        qp: &QueuePair<'bound, Self>,
        mut request: WorkRequest<'bound, Tag>,
    ) -> Result
    where
        Self: Handler<'bound, Tag = Tag>,
    {
        let end = qp.handler();
        if !end.begin_one() {
            return Ok(());
        }
        end.prepare(&mut request);
        end.post(request, |request| qp.post_send(request))
    }

    /// Posts one of the first receives.
    pub(crate) fn start_recv<'bound>(
        qp: &QueuePair<'bound, Self>,
        request: WorkRequest<'bound, Tag>,
    ) -> Result
    where
        Self: Handler<'bound, Tag = Tag>,
    {
        let end = qp.handler();
        if !end.begin_one() {
            return Ok(());
        }
        end.post(request, |request| qp.post_recv(request))
    }

    /// Counts what every completion has in common. Says whether the request succeeded.
    fn count(&self, completion: &Completion<'_>, what: &str) -> Option<u32> {
        self.stats.completed.add_one();
        if Execution::current() != C::EXECUTION {
            self.stats.wrong_ctx.add_one();
        }
        match completion.result() {
            Ok(success) => Some(success.byte_len()),
            Err(failure) if failure.is_flush() => {
                self.stats.flushed.add_one();
                None
            }
            Err(failure) => {
                self.stats.failed.add_one();
                self.traffic.failed(self.pair, what, &failure);
                None
            }
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

impl<'bound, C: Promise> Handler<'bound> for End<C> {
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
        if self.begin_one() {
            request.tag_mut().round += 1;
            self.prepare(&mut request);
            // It is refused only when the run ends, which is seen elsewhere.
            let _ = self.post(request, |request| qp.post_send(request));
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
        if !self.accept(request.buffer(), byte_len) {
            self.stats.corrupt.add_one();
        }
        if self.stats.received.add_one() + 1 == u64::from(self.traffic.config.ops) {
            self.traffic.end_finished();
        }
        if self.begin_one() {
            // As above.
            let _ = self.post(request, |request| qp.post_recv(request));
        }
    }
}
