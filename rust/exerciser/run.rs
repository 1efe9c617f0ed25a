// SPDX-License-Identifier: GPL-2.0

//! A run on one device: traffic in each poll context, one after the other, and what it found.

#![forbid(unsafe_code)]

use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Release, //
        },
        Arc,
        Mutex,
        MutexGuard, //
    },
    time::{
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    buffer::DmaBuffer,
    cm::Connection,
    context::{
        Direct,
        MaySleep,
        MayWait,
        Softirq,
        UnboundWorkqueue,
        Workqueue, //
    },
    device::{
        Device,
        Name, //
    },
    latch::Latch,
    pd::ProtectionDomain,
    qp::{
        Depths,
        QueuePair, //
    },
    request::WorkRequest,
    trace,
    work::Task, //
};

use crate::{
    config::{
        Config,
        Context, //
    },
    connect::{
        Connector,
        Path, //
    },
    queues::Queues,
    report::{
        Done,
        Line,
        Report,
        Status, //
    },
    stats::Stats,
    traffic::{
        End,
        Flow,
        Promise,
        Tag,
        Traffic, //
    },
};

/// How often a run without an end is looked at.
const GLANCE_MS: u32 = 1_000;
/// After how long without a completion a run has stalled.
const PATIENCE_MS: u32 = 30_000;
/// The same once a request has failed, which on some devices is all that is heard of an error.
const PATIENCE_AFTER_FAILURE_MS: u32 = 5_000;

/// How often senders are looked at that wait for receives.
const PUMP_MS: u32 = 5;

/// How far a run is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It begins as soon as traffic can flow.
    Waiting,
    Running,
    /// It is over.
    Idle,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Phase::Waiting => "waiting",
            Phase::Running => "running",
            Phase::Idle => "idle",
        }
    }
}

/// What there is to know of the runs on a device.
pub(crate) struct State {
    /// Of the run that is on its way, or else of the last.
    pub(crate) config: Config,
    pub(crate) phase: Phase,
    /// What the last run found that is over.
    pub(crate) report: Report,
}

/// The runs on one device, one after the other.
#[pin_data]
pub(crate) struct Run<'bound> {
    dev: &'bound Device<'bound>,
    /// Set when the device is going.
    stop: Atomic<bool>,
    #[pin]
    state: Mutex<State>,
    /// The traffic that has to be told of it.
    #[pin]
    traffic: Mutex<Option<Arc<Traffic>>>,
}

impl<'bound> Task<'bound> for Run<'bound> {
    /// Does the run that is waiting, if there is one and traffic can flow.
    fn run(&self, may_wait: MayWait<'_>) {
        let State { config, phase, .. } = *self.state.lock();
        if phase != Phase::Waiting || self.stopped() {
            return;
        }
        let mut report = Report::default();
        let done = match Path::find(self.dev, may_wait.may_sleep()) {
            Ok(Some(path)) => {
                self.state.lock().phase = Phase::Running;
                self.run_all(path, config, &mut report, may_wait)
            }
            // An event tells when to look again.
            Ok(None) => return,
            Err(e) => {
                pr_err!("{}: no usable port: {:?}\n", self.dev.name(), e);
                Done {
                    device: self.dev.name(),
                    contexts: 0,
                    status: Status::Fail,
                }
            }
        };
        report.done = Some(done);
        let mut state = self.state.lock();
        state.phase = Phase::Idle;
        // What it replaces goes without the lock.
        core::mem::swap(&mut state.report, &mut report);
        drop(state);
        // Who has read this may start another.
        pr_info!("{}\n", done);
    }

    fn stop(&self) {
        self.stop.store(true, Release);
        if let Some(traffic) = self.traffic.lock().as_ref() {
            traffic.stop();
        }
    }
}

impl<'bound> Run<'bound> {
    /// Prepares a first run.
    pub(crate) fn new(
        dev: &'bound Device<'bound>,
        config: Config,
    ) -> impl PinInit<Self, Error> + 'bound {
        let state = State {
            config,
            phase: Phase::Waiting,
            report: Report::default(),
        };
        try_pin_init!(Self {
            dev,
            stop: Atomic::new(false),
            state <- new_mutex!(state, "cq_exerciser::Run::state"),
            traffic <- new_mutex!(None, "cq_exerciser::Run::traffic"),
        })
    }

    /// Prepares another run.
    ///
    /// # Errors
    ///
    /// `EBUSY` if one is on its way, `ENODEV` if the device is going.
    pub(crate) fn prepare(&self, config: Config) -> Result {
        let mut state = self.state.lock();
        if self.stopped() {
            return Err(ENODEV);
        }
        if state.phase != Phase::Idle {
            return Err(EBUSY);
        }
        state.phase = Phase::Waiting;
        state.config = config;
        Ok(())
    }

    /// How it stands with the runs.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn stopped(&self) -> bool {
        self.stop.load(Acquire)
    }

    /// Runs in each context. Prints a line for each, and keeps it in `report`.
    fn run_all(
        &self,
        path: Path<'bound>,
        config: Config,
        report: &mut Report,
        may_wait: MayWait<'_>,
    ) -> Done {
        let mut contexts = 0;
        let mut status = Status::Pass;
        for (context, slot) in Context::ALL.into_iter().zip(&mut report.lines) {
            if !config.has(context) {
                continue;
            }
            if self.stopped() {
                status = status.and(Status::Stopped);
                break;
            }
            let line = match context {
                Context::Softirq => self.run_context::<Softirq>(path, config, may_wait),
                Context::Workqueue => self.run_context::<Workqueue>(path, config, may_wait),
                Context::Unbound => self.run_context::<UnboundWorkqueue>(path, config, may_wait),
                Context::Direct => self.run_context::<Direct>(path, config, may_wait),
            };
            pr_info!("{}\n", line);
            contexts += 1;
            status = status.and(line.status);
            *slot = Some(line);
        }
        Done {
            device: self.dev.name(),
            contexts,
            status,
        }
    }

    fn run_context<C: Promise>(
        &self,
        path: Path<'bound>,
        config: Config,
        may_wait: MayWait<'_>,
    ) -> Line {
        let mut parts = Parts::<C>::new(config);
        trace::run_start::<C>(self.dev, config.total_ops());
        let result = self.drive(&mut parts, path, may_wait);
        parts.elapsed_ns = parts.started.map_or(0, |start| start.elapsed().as_nanos());
        if let Some(traffic) = &parts.traffic {
            traffic.stop();
        }
        // Whatever happened, all that was posted has to come back before it is counted.
        parts.close(self.dev, may_wait);
        trace::run_end::<C>(self.dev, parts.sum(|stats| stats.sent.get()));

        // What fails since the device is going is no failure of the run.
        let stopped = self.stopped();
        if let (Err(e), false) = (result, stopped) {
            pr_err!("{}: ctx={}: {:?}\n", self.dev.name(), C::NAME, e);
        }
        parts.line(self.dev.name(), result.is_ok(), stopped)
    }

    /// Sets up the queue pairs, and waits until they have sent and received all.
    fn drive<C: Promise>(
        &self,
        parts: &mut Parts<'bound, C>,
        path: Path<'bound>,
        may_wait: MayWait<'_>,
    ) -> Result {
        let config = parts.config;
        let traffic = Arc::pin_init(Traffic::new(self.dev.name(), config), GFP_KERNEL)?;
        *self.traffic.lock() = Some(traffic.clone());
        parts.traffic = Some(traffic.clone());

        let pd = ProtectionDomain::new(self.dev, may_wait.may_sleep())?;
        let connector = Connector::new(path, may_wait.may_sleep())?;
        for pair in 0..config.qps {
            if self.stopped() {
                return Ok(());
            }
            let (sender, receiver) =
                self.make_pair(parts, &pd, &traffic, pair, path, may_wait.may_sleep())?;
            parts.connections.reserve(2, GFP_KERNEL)?;
            for connection in connector.connect(&sender, &receiver, may_wait)? {
                parts.connections.push(connection, GFP_KERNEL)?;
            }
            parts.qps.push((sender, receiver), GFP_KERNEL)?;
        }

        let receives = self.requests(parts, config.recv_depth(), may_wait)?;
        let sends = self.requests(parts, config.send_depth(), may_wait)?;
        for ((_, receiver), requests) in parts.qps.iter().zip(receives) {
            for request in requests {
                End::start_recv(receiver, request)?;
            }
        }
        parts.started = Some(Instant::now());
        for ((sender, _), requests) in parts.qps.iter().zip(sends) {
            if self.stopped() {
                return Ok(());
            }
            End::start_sends(sender, requests)?;
        }
        self.wait(parts, &traffic, may_wait)
    }

    /// Waits until the traffic is over.
    fn wait<C: Promise>(
        &self,
        parts: &Parts<'bound, C>,
        traffic: &Traffic,
        may_wait: MayWait<'_>,
    ) -> Result {
        let mut before = 0;
        let mut since = Instant::<Monotonic>::now();
        while !self.stopped() && !parts.pump_until(&traffic.over, GLANCE_MS, may_wait) {
            // All sends may have succeeded as far as the device knows: then no completion says so.
            if let Some(pair) = parts.disconnected().filter(|_| !self.stopped()) {
                pr_err!(
                    "{}: ctx={}: pair={} has lost its connection\n",
                    self.dev.name(),
                    C::NAME,
                    pair
                );
                return Err(ENOTCONN);
            }
            let completed = parts.sum(Stats::completed);
            if completed != before {
                before = completed;
                since = Instant::now();
                continue;
            }
            let patience = if traffic.has_failed() {
                PATIENCE_AFTER_FAILURE_MS
            } else {
                PATIENCE_MS
            };
            let idle = since.elapsed();
            if idle >= Delta::from_millis(patience.into()) {
                pr_err!(
                    "{}: ctx={}: no completion for {} ms\n",
                    self.dev.name(),
                    C::NAME,
                    idle.as_millis()
                );
                return Err(ETIMEDOUT);
            }
        }
        Ok(())
    }

    /// Makes two queue pairs, each on a queue of its own.
    fn make_pair<C: Promise>(
        &self,
        parts: &mut Parts<'bound, C>,
        pd: &ProtectionDomain<'bound>,
        traffic: &Arc<Traffic>,
        pair: u32,
        path: Path<'bound>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Pair<'bound, C>> {
        let send = Depths {
            send: parts.config.send_depth(),
            recv: 0,
        };
        let recv = Depths {
            send: 0,
            recv: parts.config.recv_depth(),
        };
        let flow = if path.waits_for_receives() {
            None
        } else {
            let flow = Flow::new(&parts.config)?;
            parts.flows.push(flow.clone(), GFP_KERNEL)?;
            Some(flow)
        };
        let mut make = |end: End<'bound, C>, depths: Depths| {
            let entries = parts.queues.entries(self.dev, depths.total(), may_sleep)?;
            parts.stats.push(end.stats.clone(), GFP_KERNEL)?;
            QueuePair::new(pd, entries, path.port, depths, end, may_sleep)
        };

        let stats = || Arc::new(Stats::new(), GFP_KERNEL);
        let sender = End::sender(traffic.clone(), pair, stats()?, flow.clone())?;
        let receiver = End::receiver(traffic.clone(), pair, stats()?, flow)?;
        Ok((make(sender, send)?, make(receiver, recv)?))
    }

    /// Makes `depth` requests for each pair.
    fn requests<C: Promise>(
        &self,
        parts: &Parts<'bound, C>,
        depth: u32,
        may_wait: MayWait<'_>,
    ) -> Result<KVec<KVec<WorkRequest<'bound, Tag>>>> {
        let pairs = parts.qps.len();
        let mut all = KVec::with_capacity(pairs, GFP_KERNEL)?;
        for _ in 0..pairs {
            let mut requests = KVec::new();
            for slot in 0..depth {
                let buffer = DmaBuffer::new(self.dev, parts.config.size, may_wait.may_sleep())?;
                let request = WorkRequest::new(buffer, Tag::new(slot), GFP_KERNEL)?;
                requests.push(request, GFP_KERNEL)?;
            }
            all.push(requests, GFP_KERNEL)?;
        }
        Ok(all)
    }
}

/// A sender and a receiver.
type Pair<'bound, C> = (
    QueuePair<'bound, End<'bound, C>>,
    QueuePair<'bound, End<'bound, C>>,
);

/// What a run in one context is made of.
struct Parts<'bound, C: Promise> {
    config: Config,
    traffic: Option<Arc<Traffic>>,
    qps: KVec<Pair<'bound, C>>,
    connections: KVec<Connection<'bound>>,
    stats: KVec<Arc<Stats>>,
    /// What keeps each sender from running ahead, if it has to be kept.
    flows: KVec<Arc<Flow<'bound>>>,
    queues: Queues<'bound, C>,
    started: Option<Instant<Monotonic>>,
    elapsed_ns: i64,
}

impl<'bound, C: Promise> Parts<'bound, C> {
    fn new(config: Config) -> Self {
        Self {
            config,
            traffic: None,
            qps: KVec::new(),
            connections: KVec::new(),
            stats: KVec::new(),
            flows: KVec::new(),
            queues: Queues::new(&config),
            started: None,
            elapsed_ns: 0,
        }
    }

    /// Waits for the latch to open, for `limit` milliseconds at most, while senders that had to wait for
    /// receives go on. Says whether it is open.
    fn pump_until(&self, latch: &Latch, limit: u32, may_wait: MayWait<'_>) -> bool {
        if self.flows.is_empty() {
            return latch.wait(limit, may_wait);
        }
        let began = Instant::<Monotonic>::now();
        while began.elapsed() < Delta::from_millis(limit.into()) {
            if latch.wait(PUMP_MS, may_wait) {
                return true;
            }
            for ((sender, _), flow) in self.qps.iter().zip(&self.flows) {
                End::go_on(sender, flow);
            }
        }
        false
    }

    /// A pair whose connection has ended, as far as the connection manager knows. There are two
    /// connections a pair.
    fn disconnected(&self) -> Option<usize> {
        self.connections
            .iter()
            .position(Connection::is_disconnected)
            .map(|index| index / 2)
    }

    fn sum(&self, count: impl Fn(&Stats) -> u64) -> u64 {
        self.stats.iter().map(|stats| count(stats)).sum()
    }

    /// What was counted, and what to think of it.
    fn line(self, device: Name, ran: bool, stopped: bool) -> Line {
        let ops = self.sum(|stats| stats.sent.get());
        let received = self.sum(|stats| stats.received.get());
        let posted = self.sum(|stats| stats.posted(self.config.ops));
        let lost = posted.abs_diff(self.sum(Stats::completed));
        let corrupt = self.sum(|stats| stats.corrupt.get());
        let flushed = self.sum(|stats| stats.flushed.get());
        let failed = self.sum(|stats| stats.failed.get());
        let wrong_ctx = self.sum(|stats| stats.wrong_ctx.get());
        let wanted = self.config.total_ops();

        let sound = lost == 0 && corrupt == 0 && wrong_ctx == 0;
        let all = ops == wanted && received == wanted;
        let complete = ran && all && flushed == 0 && failed == 0;
        Line {
            device,
            context: C::NAME,
            cqs: self.queues.number(),
            leases: self.queues.leases(),
            config: self.config,
            ops,
            lost,
            corrupt,
            flushed,
            wrong_ctx,
            ops_per_s: per_second(ops, self.elapsed_ns.unsigned_abs().max(1)),
            traffic: self.traffic,
            status: match (sound, complete) {
                (true, true) => Status::Pass,
                (true, false) if stopped => Status::Stopped,
                _ => Status::Fail,
            },
        }
    }

    /// Ends the traffic, and waits until all that was posted came back.
    fn close(&mut self, dev: &Device<'_>, may_wait: MayWait<'_>) {
        for (sender, receiver) in &self.qps {
            for qp in [sender, receiver] {
                if let Err(e) = qp.end(may_wait.may_sleep()) {
                    pr_err!("{}: qp={}: can't be ended: {:?}\n", dev.name(), qp.num(), e);
                }
            }
        }
        for (sender, receiver) in core::mem::take(&mut self.qps) {
            for qp in [sender, receiver] {
                if let Err(e) = qp.close(may_wait) {
                    pr_err!("{}: a queue pair can't be closed: {:?}\n", dev.name(), e);
                }
            }
        }
    }
}

/// How many a second, if it was `count` in `nanos`.
fn per_second(count: u64, nanos: u64) -> u64 {
    // In microseconds: a count of 2^44 fits, and no run is so short that the rounding matters.
    count
        .saturating_mul(1_000_000)
        .checked_div(nanos / 1_000)
        .unwrap_or(0)
}
