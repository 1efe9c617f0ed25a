// SPDX-License-Identifier: GPL-2.0

//! Field reports, as tests named after their numbers, on devices of the kernel's own: `rxe0`, whose
//! queue pairs are connected directly, and `siw0`, whose are by the connection manager.
//!
//! Both suites have the same cases. They need their devices, so nobody runs them by accident: see
//! scripts/scenarios/kunit. The reports that take more than a client on a device are scenarios.

use core::net::SocketAddrV4;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    buffer::DmaBuffer,
    cm::{
        Connecting,
        Connection,
        Listener, //
    },
    completion::{
        Class,
        Opcode,
        Status, //
    },
    context::{
        MayWait,
        Poolable,
        Softirq,
        UnboundWorkqueue,
        Workqueue, //
    },
    cq::CompletionQueue,
    device::{
        Device,
        Port,
        PortState,
        Protocol, //
    },
    pd::ProtectionDomain,
    poll::PollSlot,
    pool::PooledCq,
    qp::{
        Chain,
        Depths,
        Handler,
        QueuePair, //
    },
    request::WorkRequest,
    work::{
        ScopedWork,
        Task, //
    }, //
};

use crate::{
    fake::RealCount,
    harness::*, //
};

type Qp<'bound, C> = QueuePair<'bound, Probe<'bound, C>>;

/// How long a step of connecting may take, in milliseconds.
const CONNECT_MS: u32 = 10_000;

/// Two queue pairs that are connected to each other.
struct Pair<'bound, C: Poolable> {
    a: Qp<'bound, C>,
    b: Qp<'bound, C>,
    /// What keeps them connected, if anything.
    links: [Option<Connection<'bound>>; 2],
}

/// Makes pairs on one protection domain.
struct Pairs<'bound> {
    port: Port<'bound>,
    pd: ProtectionDomain<'bound>,
    way: Way<'bound>,
}

/// How queue pairs are connected.
enum Way<'bound> {
    /// From an entry of the port's table of addresses.
    Direct(u8),
    Manager(Listener<'bound>),
}

impl<'bound> Pairs<'bound> {
    fn new(t: &Test<'bound>) -> Result<Self> {
        let port = t.dev.port(1)?;
        check!(eventually(|| {
            // The GIDs are filled in by a work item of the RDMA core.
            let address = is_iwarp(t.dev) || gid_index(&port).is_some();
            address && matches!(port.state(t.may_sleep()), Ok(PortState::Active))
        }));
        let way = if is_iwarp(t.dev) {
            let ip = port.ipv4(t.may_sleep())?.ok_or(EADDRNOTAVAIL)?;
            let at = SocketAddrV4::new(ip, 0);
            Way::Manager(Listener::new(t.dev, at, 1, t.may_sleep())?)
        } else {
            Way::Direct(gid_index(&port).ok_or(EADDRNOTAVAIL)?)
        };
        Ok(Self {
            port,
            pd: t.pd()?,
            way,
        })
    }

    fn make<C: Poolable>(
        &self,
        t: &Test<'bound>,
        depths: Depths,
        act: Act<'bound, C>,
    ) -> Result<Pair<'bound, C>> {
        let a = self.qp(t, depths, act)?;
        let b = self.qp(t, depths, act)?;
        let links = self.connect(t, &a, &b)?;
        Ok(Pair { a, b, links })
    }

    fn connect<H: Handler<'bound>>(
        &self,
        t: &Test<'bound>,
        a: &QueuePair<'bound, H>,
        b: &QueuePair<'bound, H>,
    ) -> Result<[Option<Connection<'bound>>; 2]> {
        Ok(match &self.way {
            Way::Direct(gid) => {
                let (of_a, of_b) = (
                    a.endpoint(*gid, t.may_sleep())?,
                    b.endpoint(*gid, t.may_sleep())?,
                );
                b.connect(&of_a, *gid, t.may_sleep())?;
                a.connect(&of_b, *gid, t.may_sleep())?;
                [None, None]
            }
            Way::Manager(listener) => {
                let to = listener.address()?;
                let connecting = Connecting::new(a, to, CONNECT_MS, t.may_wait)?;
                let request = listener.accept(CONNECT_MS, t.may_wait)?;
                let accepted = request.accept(b, t.may_wait)?;
                let connected = connecting.finish(CONNECT_MS, t.may_wait)?;
                let accepted = accepted.finish(CONNECT_MS, t.may_wait)?;
                [Some(connected), Some(accepted)]
            }
        })
    }

    fn qp<C: Poolable>(
        &self,
        t: &Test<'bound>,
        depths: Depths,
        act: Act<'bound, C>,
    ) -> Result<Qp<'bound, C>> {
        let lease = t.lease(depths.total(), None)?;
        let handler = Probe::new(&t.env, Some(t.dev), act);
        QueuePair::new(&self.pd, lease, self.port, depths, handler, t.may_sleep())
    }
}

/// One pair.
fn pair<'bound, C: Poolable>(
    t: &Test<'bound>,
    send: u32,
    recv: u32,
    act: Act<'bound, C>,
) -> Result<Pair<'bound, C>> {
    Pairs::new(t)?.make(t, Depths { send, recv }, act)
}

impl<'bound, C: Poolable> Pair<'bound, C> {
    /// Posts receives on the one side, then sends on the other.
    fn start(&self, t: &Test<'bound>, recvs: u32, sends: u32) -> Result {
        for tag in 0..recvs {
            self.b.post_recv(t.request(tag, 64)?)?;
        }
        for tag in 0..sends {
            self.a.post_send(t.request(tag, 64)?)?;
        }
        Ok(())
    }
}

/// Whether the device speaks iWARP, which knows no receiver that isn't ready: a message that finds no
/// receive ends the connection, and a send is complete as soon as TCP has it.
fn is_iwarp<'bound>(dev: &'bound Device<'bound>) -> bool {
    dev.port(1)
        .is_ok_and(|port| port.protocol() == Protocol::IWarp)
}

/// The entry of the port's table of addresses to use.
fn gid_index(port: &Port<'_>) -> Option<u8> {
    (0..=u8::MAX).find(|index| port.gid(*index).is_ok_and(|gid| gid.is_ipv4_mapped()))
}

/// What is true at the end of each case anyway is checked by the harness: the device has as many
/// queue pairs, protection domains, connections and leased entries as before, and each request and
/// each handler was dropped once.
fn nothing_else(_: &Env) -> Result {
    Ok(())
}

/// C1: entries are leased and put, in the pools of all contexts.
fn get_and_put(t: &mut Test<'_>) -> Result {
    fn one<C: Poolable>(t: &mut Test<'_>) -> Result {
        let before = t.real(RealCount::Leased);
        let mut leases: KVec<PooledCq<'_, C>> = KVec::new();
        let mut sum = 0;
        for nr_cqe in [1, 128, 4096, 7, 4096] {
            leases.push(t.lease(nr_cqe, None)?, GFP_KERNEL)?;
            sum += nr_cqe;
            check_eq!(t.real(RealCount::Leased), before + sum);
        }
        check!(leases
            .iter()
            .all(|lease| lease.nr_cqe() <= lease.capacity()));
        drop(leases);
        check!(eventually(|| t.real(RealCount::Leased) == before));
        // What is kept goes back after `remove`, which the harness looks at.
        let lease = t.lease::<C>(9, None)?;
        t.keep(lease)
    }
    one::<Softirq>(t)?;
    one::<Workqueue>(t)?;
    one::<UnboundWorkqueue>(t)
}

/// Leases until it is told to stop, and once more.
struct Leaser<'bound> {
    dev: &'bound Device<'bound>,
    env: Arc<Env>,
    stop: Atomic<bool>,
}

impl Leaser<'_> {
    fn lease<C: Poolable>(&self, nr_cqe: u32, may_wait: MayWait<'_>) -> Result {
        drop(PooledCq::<C>::lease(
            self.dev,
            nr_cqe,
            None,
            may_wait.may_sleep(),
        )?);
        Ok(())
    }
}

impl<'bound> Task<'bound> for Leaser<'bound> {
    fn run(&self, may_wait: MayWait<'_>) {
        let log = &self.env.log;
        log.c.add();
        loop {
            let last = self.stop.load(Relaxed);
            check_eq!(self.lease::<Softirq>(16, may_wait), Ok(()));
            check_eq!(self.lease::<Workqueue>(300, may_wait), Ok(()));
            log.a.add();
            if last {
                break;
            }
        }
        log.b.add();
    }

    fn stop(&self) {
        self.stop.store(true, Relaxed);
    }
}

/// C3: the window waits for threads that lease, so that none does when the device goes.
fn lease_against_teardown(t: &mut Test<'_>) -> Result {
    for _ in 0..4 {
        let task = Leaser {
            dev: t.dev,
            env: t.env.clone(),
            stop: Atomic::new(false),
        };
        let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
        check!(work.enqueue());
        t.keep(work)?;
    }
    // What has yet to begin when the window ends never does.
    check!(eventually(|| t.log().c.get() == 4));
    check!(eventually(|| t.log().a.get() > 20));
    check_eq!(t.log().b.get(), 0);
    Ok(())
}

fn all_leasers_ended(env: &Env) -> Result {
    check_eq!(env.log.b.get(), 4);
    let leases = env.log.a.get();
    a_while();
    check_eq!(env.log.a.get(), leases);
    Ok(())
}

/// C7: a handler posts again. It isn't called inside of itself.
fn post_in_handler<C: Poolable>(t: &mut Test<'_>) -> Result {
    // As many receives as there may be sends: see `is_iwarp`.
    let pair = pair::<C>(t, 1, 200, |call, request| {
        let log = call.log();
        if call.recv {
            let _ = call.repost(request);
            return;
        }
        // All completions of sends are in one queue, which is polled by one at a time.
        if log.a.add() > 0 {
            log.b.add();
        }
        if log.sent.get() < 150 {
            let _ = call.repost(request);
        } else {
            log.c.add();
        }
        log.a.sub();
    })?;
    pair.start(t, 200, 1)?;
    check!(eventually(|| t.log().c.get() > 0));
    check_eq!(t.log().c.get(), 1);
    check_eq!(t.log().b.get(), 0);
    check_eq!(t.log().failed.get(), 0);
    Ok(())
}

/// C10: all receives come back before the queue pair is gone, and no handler runs afterwards.
fn queued_receives<C: Poolable>(t: &mut Test<'_>) -> Result {
    let Pair { a, b, links } = pair::<C>(t, 4, 32, drop_it)?;
    for tag in 0..32 {
        b.post_recv(t.request(tag, 64)?)?;
    }
    for tag in 0..2 {
        a.post_send(t.request(tag, 64)?)?;
    }
    check!(t.completed(4));
    b.close(t.may_wait)?;
    check_eq!(t.log().received.get(), 32);
    check_eq!(t.log().handlers_dropped.get(), 1);
    let completed = t.log().completed();
    a_while();
    check_eq!(t.log().completed(), completed);
    for tag in 2..32 {
        check_eq!(t.log().returned(tag), 1);
    }
    drop(links);
    a.close(t.may_wait)?;
    check_eq!(t.log().handlers_dropped.get(), 2);
    Ok(())
}

/// C12: the send queue is full, and nobody receives.
fn full_send_queue<C: Poolable>(t: &mut Test<'_>) -> Result {
    let pair = pair::<C>(t, 64, 1, drop_it)?;
    let mut posted = 0;
    for tag in 0..64 {
        match pair.a.post_send(t.request(tag, 16384)?) {
            Ok(()) => posted += 1,
            // The other side has ended the connection.
            Err(e) if is_iwarp(t.dev) => {
                check!(e.request.is_some());
                break;
            }
            Err(e) => return Err(e.into()),
        }
    }
    if is_iwarp(t.dev) {
        check!(posted > 0);
    } else {
        check_eq!(posted, 64);
        check_err!(pair.a.post_send(t.request(0, 8)?), ENOMEM);
        check_eq!(t.log().completed(), 0);
    }
    let start = Instant::<Monotonic>::now();
    pair.a.close(t.may_wait)?;
    check!(start.elapsed().as_millis() < 8_000);
    check_eq!(t.log().sent.get(), posted);
    for tag in 0..posted {
        check_eq!(t.log().returned(tag), 1);
    }
    Ok(())
}

/// Posts until it is refused.
#[pin_data]
struct PostLoop<'bound> {
    dev: &'bound Device<'bound>,
    env: Arc<Env>,
    #[pin]
    qp: Mutex<Option<Arc<Qp<'bound, Softirq>>>>,
}

impl<'bound> PostLoop<'bound> {
    fn post(&self, qp: &Qp<'bound, Softirq>, may_wait: MayWait<'_>) -> Result {
        let log = &self.env.log;
        let buffer = DmaBuffer::new(self.dev, 64, may_wait.may_sleep())?;
        let mut request = WorkRequest::new(buffer, Tag::new(&self.env, 1), GFP_KERNEL)?;
        loop {
            match qp.post_send(request) {
                Ok(()) => {
                    log.a.add();
                    return Ok(());
                }
                // The queue is full; or, with siw, the state of the queue pair is about to change,
                // which it takes for a reason to refuse the post.
                Err(e) if e.error == ENOMEM || e.error == ENOTCONN => {
                    request = e.request.ok_or(EIO)?;
                    fsleep(Delta::from_micros(50));
                }
                Err(e) => return Err(e.error),
            }
        }
    }
}

impl<'bound> Task<'bound> for PostLoop<'bound> {
    fn run(&self, may_wait: MayWait<'_>) {
        let Some(qp) = self.qp.lock().take() else {
            return;
        };
        let refused = loop {
            if let Err(e) = self.post(&qp, may_wait) {
                break e;
            }
        };
        check_eq!(refused, ESHUTDOWN);
        self.env.log.c.add();
    }

    fn stop(&self) {}
}

/// C14: posts of two threads race the end of the queue pair. Each is refused, or comes back.
fn post_against_end(t: &mut Test<'_>) -> Result {
    let Pair { a, b, links } = pair::<Softirq>(t, 8, 32, |call, request| {
        if call.recv {
            let _ = call.repost(request);
        }
    })?;
    for tag in 0..32 {
        b.post_recv(t.request(tag, 64)?)?;
    }
    let a = Arc::new(a, GFP_KERNEL)?;
    for _ in 0..2 {
        let (dev, env, qp) = (t.dev, t.env.clone(), a.clone());
        let task = try_pin_init!(PostLoop {
            dev,
            env,
            qp <- new_mutex!(Some(qp), "rdma_kunit::cases::PostLoop::qp"),
        });
        let work = ScopedWork::new(t.dev, task, t.may_sleep())?;
        check!(work.enqueue());
        t.keep(work)?;
    }
    check!(eventually(|| t.log().sent.get() > 50));
    a.end(t.may_sleep())?;
    check!(eventually(|| t.log().c.get() == 2));
    check_err!(a.post_send(t.request(0, 8)?), ESHUTDOWN);
    drop(a);
    check!(eventually(|| t.log().sent.get() == t.log().a.get()));
    t.keep((b, links))
}

/// C16: handlers on both sides post for ever, until the client goes. All stands on one protection
/// domain, which has to go last: the RDMA core warns otherwise.
fn post_for_ever<C: Poolable>(t: &mut Test<'_>) -> Result {
    let pair = pair::<C>(t, 4, 16, post_again)?;
    match pair.start(t, 16, 4) {
        // A send has run ahead of the receives, and the connection has ended before all were posted.
        Err(e) if e == ESHUTDOWN && is_iwarp(t.dev) => {}
        result => result?,
    }
    check!(t.completed(60) || is_iwarp(t.dev));
    check!(t.log().failed.get() == 0 || is_iwarp(t.dev));
    t.keep(pair.links)?;
    t.keep(pair.a)?;
    t.keep(pair.b)
}

fn all_came_back(env: &Env) -> Result {
    check!(env.log.tags_made.get() > 16);
    check_eq!(env.log.tags_dropped.get(), env.log.tags_made.get());
    check_eq!(env.log.handlers_dropped.get(), 2);
    Ok(())
}

/// How many pairs C21 has: hundreds of queue pairs.
const MANY: usize = 100;

/// C21: many busy queue pairs are dropped at once, and are gone within 50 s.
fn many_busy_ones(t: &mut Test<'_>) -> Result {
    let pairs = Pairs::new(t)?;
    let qps = t.real(RealCount::Qp);
    let mut all = KVec::with_capacity(MANY, GFP_KERNEL)?;
    for _ in 0..MANY {
        let depths = Depths { send: 2, recv: 4 };
        all.push(pairs.make::<Softirq>(t, depths, post_again)?, GFP_KERNEL)?;
    }
    for pair in &all {
        pair.start(t, 4, 2)?;
    }
    check!(t.completed(600));
    check_eq!(t.log().failed.get(), 0);

    let start = Instant::<Monotonic>::now();
    drop(all);
    let gone = || t.real(RealCount::Qp) == qps;
    // Each of these waits for 5 s.
    check!((0..10).any(|_| eventually(gone)));
    let ms = start.elapsed().as_millis();
    check!(ms < 50_000);
    pr_info!(
        "    # {} busy queue pairs were gone after {} ms\n",
        2 * MANY,
        ms
    );
    Ok(())
}

/// C23: the owner drops the queue pair right after the post. It lives until the completion.
fn dropped_after_post<C: Poolable>(t: &mut Test<'_>) -> Result {
    let pairs = Pairs::new(t)?;
    for i in 1..=8 {
        let Pair { a, b, links } = pairs.make::<C>(t, Depths { send: 4, recv: 4 }, drop_it)?;
        for tag in 0..4 {
            b.post_recv(t.request(tag, 64)?)?;
        }
        for tag in 0..4 {
            a.post_send(t.request(tag, 64)?)?;
        }
        drop(a);
        drop(b);
        drop(links);
        check!(eventually(|| t.log().handlers_dropped.get() == 2 * i));
        check_eq!(t.log().completed(), 8 * i);
    }
    Ok(())
}

/// C24: a send waits for a receiver that isn't ready, and its queue pair is dropped, then leases of the
/// same queue.
fn dropped_while_not_ready<C: Poolable>(t: &mut Test<'_>) -> Result {
    let Pair { a, b, links } = pair::<C>(t, 4, 4, drop_it)?;
    let mut others = KVec::new();
    for _ in 0..t.dev.num_comp_vectors() {
        others.push(t.lease::<C>(3, None)?, GFP_KERNEL)?;
    }
    a.post_send(t.request(5, 64)?)?;
    a_while();
    a_while();
    if !is_iwarp(t.dev) {
        check_eq!(t.log().completed(), 0);
    }
    drop(a);
    drop(others);
    check!(eventually(|| t.log().handlers_dropped.get() == 1));
    check_eq!(t.log().sent.get(), 1);
    check_eq!(t.log().returned(5), 1);
    drop((b, links));
    check!(eventually(|| t.log().handlers_dropped.get() == 2));
    Ok(())
}

/// C27: any hint at a completion vector is taken, and wraps.
fn any_hint(t: &mut Test<'_>) -> Result {
    fn one<C: Poolable>(t: &mut Test<'_>) -> Result {
        let vectors = t.dev.num_comp_vectors();
        check!(vectors > 0);
        check!(t.lease::<C>(1, None)?.vector() < vectors);
        for hint in [0, vectors - 1, vectors, i32::MAX.unsigned_abs(), u32::MAX] {
            // There are as many CPUs as vectors with these devices, so the kernel doesn't wrap it
            // once more.
            check_eq!(t.lease::<C>(1, Some(hint))?.vector(), hint % vectors);
        }
        Ok(())
    }
    one::<Softirq>(t)?;
    one::<Workqueue>(t)?;
    one::<UnboundWorkqueue>(t)
}

/// Not a report: what a device and its port say of themselves. It is on the network device that the
/// scenario made for it.
fn what_it_is(t: &mut Test<'_>) -> Result {
    let (dev, port) = (t.dev, Pairs::new(t)?.port);
    let protocol = if dev.name().as_str().starts_with("siw") {
        Protocol::IWarp
    } else {
        Protocol::RoCE
    };
    check_eq!(port.protocol(), protocol);
    check_eq!(dev.num_ports(), 1);
    check_err!(dev.port(2), EINVAL);
    let netdev = port.netdev_name(t.may_sleep())?;
    check_eq!(netdev.as_ref().map(|name| name.as_str()), Some("dummy0"));
    check_eq!(
        port.ipv4(t.may_sleep())?.map(|ip| ip.octets()),
        Some([10, 0, 0, 1])
    );
    check!(port.num_gids() > 0);
    check_err!(
        port.gid(u8::MAX),
        if port.num_gids() > 255 {
            ENOENT
        } else {
            EINVAL
        }
    );
    check!(!dev.node_guid().is_zero());
    check!(!dev.sys_image_guid().is_zero());
    check!(dev.vendor_id() != 0);
    // Neither has any.
    check!(dev.firmware(t.may_sleep())?.is_empty());
    let limits = [
        dev.max_qp(),
        dev.max_qp_wr(),
        dev.max_cq(),
        dev.max_cqe(),
        dev.max_pd(),
        dev.max_mr(),
        dev.max_send_sge(),
        dev.max_recv_sge(),
        dev.max_fast_reg_page_list_len(),
    ];
    check!(limits.iter().all(|limit| *limit > 0));
    check!(dev.max_mr_size() >= 4096);
    check!(dev.page_size_cap() & 4096 != 0);
    Ok(())
}

/// Not a report: what completions of sends and receives say, and of those that were flushed.
fn what_was_done<C: Poolable>(t: &mut Test<'_>) -> Result {
    let Pair { a, b, links } = pair::<C>(t, 4, 8, |call, request| {
        drop(request);
        let log = call.log();
        match call.completion.result() {
            Ok(success) => {
                let (opcode, len) = if call.recv {
                    (Opcode::Recv, 64)
                } else {
                    (Opcode::Send, 0)
                };
                check_eq!(success.opcode(), opcode);
                check_eq!(success.byte_len(), len);
                check_eq!(success.immediate(), None);
                check_eq!(success.invalidated_rkey(), None);
                log.a.add();
            }
            Err(failure) => {
                check_eq!(failure.status(), Status::Flushed);
                check_eq!(failure.class(), Class::Flush);
                log.b.add();
            }
        }
    })?;
    for tag in 0..8 {
        b.post_recv(t.request(tag, 64)?)?;
    }
    for tag in 0..4 {
        a.post_send(t.request(tag, 64)?)?;
    }
    check!(t.completed(8));
    b.close(t.may_wait)?;
    check_eq!((t.log().a.get(), t.log().b.get()), (8, 4));
    drop((a, links));
    Ok(())
}

/// Not a report: a chain each way, on a direct queue that is polled by hand.
fn polled_by_hand(t: &mut Test<'_>) -> Result {
    let cq = CompletionQueue::create(t.dev, 64, Some(0), t.may_sleep())?;
    // Neither device can do that.
    check_err!(cq.set_moderation(16, 10, t.may_sleep()), EOPNOTSUPP);
    check!(!cq.is_moderation_adaptive());

    let pairs = Pairs::new(t)?;
    let a = t.qp_on(&pairs.pd, &cq, 16, 0, drop_it)?;
    let b = t.qp_on(&pairs.pd, &cq, 0, 16, drop_it)?;
    let _links = pairs.connect(t, &a, &b)?;
    let (mut sends, mut recvs) = (Chain::<_, 16>::new(), Chain::<_, 16>::new());
    for tag in 0..16 {
        let _ = recvs.push(t.request(tag, 64)?);
        let mut send = t.request(tag, 64)?;
        send.data_mut().fill(tag as u8);
        let _ = sends.push(send);
    }
    b.post_recvs(&mut recvs)?;
    a.post_sends(&mut sends)?;

    let mut slots = [const { PollSlot::new() }; 5];
    let (mut sent, mut received) = (0, 0);
    for _ in 0..5_000 {
        for completion in &cq.poll(&mut slots)? {
            check!(completion.result().is_ok());
            match completion.into_request(&a) {
                Ok(_) => sent += 1,
                Err(completion) => {
                    let Ok(request) = completion.into_request(&b) else {
                        return Err(EINVAL);
                    };
                    check_eq!(request.tag().id, received);
                    check!(request
                        .buffer()
                        .iter()
                        .all(|byte| u32::from(*byte) == received));
                    received += 1;
                }
            }
        }
        if sent == 16 && received == 16 {
            break;
        }
        fsleep(Delta::from_millis(1));
    }
    check_eq!((sent, received), (16, 16));
    check_eq!(t.log().completed(), 0);
    Ok(())
}

/// Not a report: who keeps a connection learns that the other side has gone.
fn end_is_told(t: &mut Test<'_>) -> Result {
    let mut pairs = Pairs::new(t)?;
    let ip = pairs.port.ipv4(t.may_sleep())?.ok_or(EADDRNOTAVAIL)?;
    let at = SocketAddrV4::new(ip, 0);
    pairs.way = Way::Manager(Listener::new(t.dev, at, 1, t.may_sleep())?);
    let depths = Depths { send: 1, recv: 1 };
    let Pair { a, b, links } = pairs.make::<Workqueue>(t, depths, drop_it)?;
    let [Some(of_a), of_b] = links else {
        return Err(EINVAL);
    };
    a_while();
    check!(!of_a.is_disconnected());
    drop((b, of_b));
    check!(eventually(|| of_a.is_disconnected()));
    a.close(t.may_wait)
}

/// Not a report: a message that is longer than the receive it finds. The typed error arrives on both
/// sides, and what is posted behind it comes back as flushed.
fn too_long_a_message(t: &mut Test<'_>) -> Result {
    let Pair { a, b, links } = pair::<Workqueue>(t, 4, 4, |call, request| {
        drop(request);
        if let Some(failure) = call.completion.result().err().filter(|f| !f.is_flush()) {
            // The first is the one to expect, the second what rxe of Linux 7.3 makes of it. On siw a send
            // may be under way when the connection ends.
            let (statuses, side): (&[_], _) = if call.recv {
                (
                    &[Status::LocalLength, Status::LocalQpOperation],
                    &call.log().b,
                )
            } else {
                (
                    &[
                        Status::RemoteInvalidRequest,
                        Status::RemoteOperation,
                        Status::LocalQpOperation,
                    ],
                    &call.log().a,
                )
            };
            check!(statuses.contains(&failure.status()));
            side.add();
        }
    })?;
    b.post_recv(t.request(0, 16)?)?;
    b.post_recv(t.request(1, 64)?)?;
    a.post_send(t.request(2, 64)?)?;
    check!(t.completed(3));
    let log = t.log();
    check_eq!(log.b.get(), 1);
    // On iWARP a send is done as soon as TCP has it.
    if !is_iwarp(t.dev) {
        check_eq!(log.a.get(), 1);
        check_eq!(log.returned(2), 1);
    }
    check_eq!(log.returned(1), 1);
    check_eq!(log.flushed.get(), 1);
    drop((a, b, links));
    Ok(())
}

/// Not a report: a send to a queue pair that has gone. On RoCE nobody answers, until the retries are
/// used up; on iWARP the connection has ended.
fn other_side_gone(t: &mut Test<'_>) -> Result {
    let Pair { a, b, links } = pair::<Workqueue>(t, 4, 4, |call, request| {
        drop(request);
        if let Err(failure) = call.completion.result() {
            if failure.status() == Status::RetryExceeded && failure.class() == Class::Transport {
                call.log().a.add();
            }
        }
    })?;
    let [of_a, of_b] = links;
    b.close(t.may_wait)?;
    drop(of_b);
    let started = Instant::<Monotonic>::now();
    if is_iwarp(t.dev) {
        check!(eventually(|| of_a
            .as_ref()
            .is_some_and(Connection::is_disconnected)));
        // Refused, or flushed if the device knows first.
        match a.post_send(t.request(0, 64)?) {
            Ok(()) => check!(eventually(|| t.log().flushed.get() == 1)),
            Err(refused) => check_eq!(refused.error, ESHUTDOWN),
        }
    } else {
        a.post_send(t.request(0, 64)?)?;
        a.post_send(t.request(1, 64)?)?;
        // Some times as long as a queue pair waits for an answer, and asks again.
        while t.log().completed() < 2 && started.elapsed() < Delta::from_secs(60) {
            a_while();
        }
        check_eq!((t.log().returned(0), t.log().returned(1)), (1, 1));
        check_eq!((t.log().a.get(), t.log().flushed.get()), (1, 1));
    }
    drop((a, of_a));
    Ok(())
}

/// The cases, on a device.
macro_rules! suite {
    (@after) => { nothing_else };
    (@after $after:expr) => { $after };
    ($module:ident, $suite:ident, $device:literal, {
        $($name:ident: $body:expr $(, then $after:expr)?;)*
    }) => {
        #[kunit_tests($suite)]
        mod $module {
            use super::*;

            $(
                #[test]
                fn $name() -> Result {
                    with_real_device($device, $body, suite!(@after $($after)?))
                }
            )*
        }
    };
}

macro_rules! suites {
    ($cases:tt) => {
        suite!(rxe, cases_rxe, c"rxe0", $cases);
        suite!(siw, cases_siw, c"siw0", $cases);
    };
}

suites!({
    c01_get_and_put: get_and_put;
    c03_lease_against_teardown: lease_against_teardown, then all_leasers_ended;
    c07_post_in_a_softirq_handler: post_in_handler::<Softirq>;
    c07_post_in_a_workqueue_handler: post_in_handler::<Workqueue>;
    c07_post_in_an_unbound_handler: post_in_handler::<UnboundWorkqueue>;
    c10_receives_queued_softirq: queued_receives::<Softirq>;
    c10_receives_queued_workqueue: queued_receives::<Workqueue>;
    c10_receives_queued_unbound: queued_receives::<UnboundWorkqueue>;
    c12_close_with_the_send_queue_full_softirq: full_send_queue::<Softirq>;
    c12_close_with_the_send_queue_full_workqueue: full_send_queue::<Workqueue>;
    c14_post_against_the_end: post_against_end;
    c16_post_for_ever_softirq: post_for_ever::<Softirq>, then all_came_back;
    c16_post_for_ever_workqueue: post_for_ever::<Workqueue>, then all_came_back;
    c16_post_for_ever_unbound: post_for_ever::<UnboundWorkqueue>, then all_came_back;
    c21_hundreds_of_busy_ones_dropped: many_busy_ones;
    c23_dropped_right_after_the_post_softirq: dropped_after_post::<Softirq>;
    c23_dropped_right_after_the_post_workqueue: dropped_after_post::<Workqueue>;
    c24_dropped_while_the_receiver_is_not_ready_softirq: dropped_while_not_ready::<Softirq>;
    c24_dropped_while_the_receiver_is_not_ready_workqueue: dropped_while_not_ready::<Workqueue>;
    c27_any_hint_at_a_vector: any_hint;
    a_device_says_what_it_is: what_it_is;
    completions_in_softirq_say_what_was_done: what_was_done::<Softirq>;
    completions_in_a_worker_say_what_was_done: what_was_done::<Workqueue>;
    a_direct_queue_is_polled_by_hand: polled_by_hand;
    the_other_side_s_end_is_told: end_is_told;
    a_message_longer_than_its_receive_is_an_error_on_both_sides: too_long_a_message;
    a_send_to_who_has_gone_is_an_error: other_side_gone;
});
