// SPDX-License-Identifier: GPL-2.0

//! Counts the instructions of what the crate `rdma` does on the way of a request, beside
//! `rust/bench/bench_c.c`: both do the same things in the same order, on the device of
//! `rust/bench/bench_device.c`.

use core::{
    marker::PhantomData,
    num::NonZero, //
};
use kernel::{
    fmt,
    prelude::*,
    str::{
        CStr,
        CString, //
    }, //
};
use rdma::{
    buffer::DmaBuffer,
    client::Client,
    completion::Completion,
    context::{
        Direct,
        MaySleep,
        MayWait,
        PollContext,
        Poolable,
        Softirq,
        UnboundWorkqueue,
        Workqueue, //
    },
    cq::{
        CompletionQueue,
        Entries, //
    },
    device::Device,
    pd::ProtectionDomain,
    poll::PollSlot,
    pool::PooledCq,
    qp::{
        Chain,
        Depths,
        Handler,
        Poster,
        QueuePair, //
    },
    request::WorkRequest, //
};

rdma::module_client! {
    type: Bench,
    name: "bench_rust",
    authors: ["The rdma-cq authors"],
    description: "Counts the instructions of work requests in Rust",
    license: "GPL",
}

/// Of `rust/bench/bench_device.h`.
mod ffi {
    use kernel::ffi::c_char;

    // C type: `enum bench_own`.
    pub(crate) const NOTHING: u32 = 0;
    pub(crate) const POST_SEND: u32 = 1;
    pub(crate) const POST_RECV: u32 = 2;
    pub(crate) const CHAIN: u32 = 3;
    pub(crate) const POLL: u32 = 4;
    pub(crate) const PROCESS: u32 = 5;

    // All but the last may be called by anybody who may sleep, one at a time: `Bench` is the only one.
    unsafe extern "C" {
        pub(crate) safe fn bench_begin();
        pub(crate) safe fn bench_end() -> u64;
        pub(crate) safe fn bench_raise();
        pub(crate) safe fn bench_settle();
        pub(crate) safe fn bench_allocs_begin();
        pub(crate) safe fn bench_live_bytes() -> u64;
        pub(crate) safe fn bench_allocs_end() -> u32;
        pub(crate) safe fn bench_done_insns() -> u64;
        pub(crate) fn bench_sample(
            who: *const c_char,
            name: *const c_char,
            own: u32,
            ops: u32,
            insns: u64,
        );
    }
}

use ffi::{
    bench_allocs_begin,
    bench_allocs_end,
    bench_begin,
    bench_done_insns,
    bench_end,
    bench_live_bytes,
    bench_raise,
    bench_settle, //
};

const SAMPLES: usize = 5;
/// Full batches, and less than the RDMA core polls in one go.
const OPS: u32 = 15 * 16;
const SIZE: usize = 64;

/// Of `OPS` operations.
fn sample(name: fmt::Arguments<'_>, own: u32, insns: u64) -> Result {
    sample_of(name, own, OPS, insns)
}

fn sample_of(name: fmt::Arguments<'_>, own: u32, ops: u32, insns: u64) -> Result {
    let name = CString::try_from_fmt(name)?;
    // SAFETY: Both are strings that live until the call returns.
    unsafe { ffi::bench_sample(c"rust".as_char_ptr(), name.as_char_ptr(), own, ops, insns) };
    Ok(())
}

/// A handler that does nothing with a request, and leaves it alone: its memory stays for ever.
struct Keep<C>(PhantomData<C>);

impl<'bound, C: PollContext> Handler<'bound> for Keep<C> {
    type Context = C;
    type Tag = ();

    fn sent(
        &self,
        _: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, ()>,
        _: &Completion<'_>,
        _: C,
    ) {
        core::mem::forget(request);
    }

    fn received(
        &self,
        _: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, ()>,
        _: &Completion<'_>,
        _: C,
    ) {
        core::mem::forget(request);
    }
}

/// A handler that posts the request again, as long as that makes sense.
struct Again<C>(PhantomData<C>);

impl<'bound, C: PollContext> Handler<'bound> for Again<C> {
    type Context = C;
    type Tag = ();

    fn sent(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, ()>,
        completion: &Completion<'_>,
        _: C,
    ) {
        if completion.result().is_ok() {
            let _ = qp.post_send(request);
        }
    }
}

/// In a function of its own, as in a driver that sends from more than one place.
#[inline(never)]
fn post_send<'bound, H: Handler<'bound>>(
    qp: &QueuePair<'bound, H>,
    request: WorkRequest<'bound, H::Tag>,
) -> Result {
    Ok(qp.post_send(request)?)
}

#[inline(never)]
fn post_recv<'bound, H: Handler<'bound>>(
    qp: &QueuePair<'bound, H>,
    request: WorkRequest<'bound, H::Tag>,
) -> Result {
    Ok(qp.post_recv(request)?)
}

/// As many of the requests as a chain takes.
#[inline(never)]
fn post_chain<'bound, H: Handler<'bound>>(
    qp: &QueuePair<'bound, H>,
    requests: &mut KVec<WorkRequest<'bound, H::Tag>>,
) -> Result {
    let mut chain = Chain::<_, 16>::new();
    while !chain.is_full() {
        let Some(request) = requests.pop() else { break };
        if chain.push(request).is_err() {
            return Err(ENOMEM);
        }
    }
    qp.post_sends(&mut chain)
}

struct Bench;

impl Client for Bench {
    type Data<'bound> = ();

    const NAME: &'static CStr = c"bench_rust";

    fn add<'bound>(
        dev: &'bound Device<'bound>,
        may_wait: MayWait<'bound>,
    ) -> impl PinInit<(), Error> + 'bound {
        let result = leases(dev, may_wait.may_sleep())
            .and_then(|()| queues(dev, may_wait.may_sleep()))
            .and_then(|()| requests(dev, may_wait))
            .and_then(|()| many_leases(dev, may_wait.may_sleep()));
        match result {
            Ok(()) => pr_info!("{}: done err=0\n", dev.name()),
            Err(e) => pr_info!("{}: done err={}\n", dev.name(), e.to_errno()),
        }
        result
    }
}

#[inline(never)]
fn lease<'bound>(
    dev: &'bound Device<'bound>,
    nr_cqe: u32,
    may_sleep: MaySleep<'_>,
) -> Result<PooledCq<'bound, Softirq>> {
    PooledCq::lease(dev, nr_cqe, None, may_sleep)
}

fn leases<'bound>(dev: &'bound Device<'bound>, may_sleep: MaySleep<'_>) -> Result {
    // The first makes the pool's queues.
    drop(lease(dev, 16, may_sleep)?);
    for _ in 0..SAMPLES {
        bench_begin();
        for _ in 0..OPS {
            drop(lease(dev, 16, may_sleep)?);
        }
        sample(fmt!("lease_put"), ffi::NOTHING, bench_end())?;
    }
    Ok(())
}

const LEASES: u32 = 4096;
const LEASE_ROUNDS: u32 = 3;
/// What a queue of a pool has at least.
const POOLED_CQE: u32 = 4096;

/// What the n-th lease costs while all before it are held: the first, the second, the next two, the next
/// four ...
fn many_leases<'bound>(dev: &'bound Device<'bound>, may_sleep: MaySleep<'_>) -> Result {
    let mut held = KVec::with_capacity(LEASES as usize, GFP_KERNEL)?;
    let hold = |held: &mut KVec<_>, number: u32, nr_cqe: u32| -> Result {
        for _ in 0..number {
            held.push_within_capacity(lease(dev, nr_cqe, may_sleep)?)
                .map_err(|_| ENOMEM)?;
        }
        Ok(())
    };

    // The pool has all its queues before.
    hold(&mut held, LEASES * 16 / POOLED_CQE, POOLED_CQE)?;
    held.clear();

    bench_allocs_begin();
    let result = hold(&mut held, LEASES, 16);
    let bytes = bench_live_bytes();
    bench_allocs_end();
    result?;
    sample_of(fmt!("bytes_lease"), ffi::NOTHING, LEASES, bytes)?;
    held.clear();

    for _ in 0..LEASE_ROUNDS {
        let mut from = 0;
        let mut to = 1;
        while to <= LEASES {
            bench_begin();
            hold(&mut held, to - from, 16)?;
            let insns = bench_end();
            sample_of(fmt!("lease_{}", to), ffi::NOTHING, to - from, insns)?;
            from = to;
            to *= 2;
        }
        bench_begin();
        held.clear();
        sample_of(fmt!("put_{}", LEASES), ffi::NOTHING, LEASES, bench_end())?;
    }
    Ok(())
}

/// Queues of one's own, made, dropped, and taken down by a worker.
fn queues<'bound>(dev: &'bound Device<'bound>, may_sleep: MaySleep<'_>) -> Result {
    for round in 0..=SAMPLES {
        bench_begin();
        for _ in 0..OPS {
            drop(CompletionQueue::<Direct>::create(dev, 16, None, may_sleep)?);
        }
        bench_settle();
        let insns = bench_end();
        // Of the first time much is the allocator's.
        if round > 0 {
            sample(fmt!("private_cq"), ffi::NOTHING, insns)?;
        }
    }
    Ok(())
}

fn requests<'bound>(dev: &'bound Device<'bound>, may_wait: MayWait<'_>) -> Result {
    let pd = ProtectionDomain::new(dev, may_wait.may_sleep())?;
    polled(&pd, may_wait)?;
    handled::<Softirq>(&pd, may_wait)?;
    handled::<Workqueue>(&pd, may_wait)?;
    handled::<UnboundWorkqueue>(&pd, may_wait)
}

/// A queue pair that is connected to itself.
fn queue_pair<'bound, H: Handler<'bound>>(
    pd: &ProtectionDomain<'bound>,
    entries: impl Into<Entries<'bound, H::Context>>,
    depths: Depths,
    handler: H,
    may_sleep: MaySleep<'_>,
) -> Result<QueuePair<'bound, H>> {
    let port = pd.device().port(1)?;
    let qp = QueuePair::new(pd, entries, port, depths, handler, may_sleep)?;
    qp.connect(&qp.endpoint(0, may_sleep)?, 0, may_sleep)?;
    Ok(qp)
}

fn make<'bound>(
    dev: &'bound Device<'bound>,
    may_sleep: MaySleep<'_>,
) -> Result<KVec<WorkRequest<'bound, ()>>> {
    let mut requests = KVec::new();
    for _ in 0..OPS {
        let buffer = DmaBuffer::new(dev, SIZE, may_sleep)?;
        requests.push(WorkRequest::new(buffer, (), GFP_KERNEL)?, GFP_KERNEL)?;
    }
    Ok(requests)
}

/// Takes all requests back from a queue, 16 at a time.
#[inline(never)]
fn poll_all<'bound, H: Handler<'bound, Context = Direct>>(
    cq: &CompletionQueue<'bound, Direct>,
    qp: &QueuePair<'bound, H>,
    requests: &mut KVec<WorkRequest<'bound, H::Tag>>,
) -> Result {
    let mut slots = [const { PollSlot::new() }; 16];
    loop {
        let completions = cq.poll(&mut slots)?;
        if completions.is_empty() {
            return Ok(());
        }
        for completion in &completions {
            if completion.result().is_err() {
                return Err(EIO);
            }
            // What is of another queue pair gets to its handler.
            let Ok(request) = completion.into_request(qp) else {
                continue;
            };
            if requests.push_within_capacity(request).is_err() {
                return Err(ENOMEM);
            }
        }
    }
}

/// Posting, and polling for oneself. The same requests go round.
fn polled(pd: &ProtectionDomain<'_>, may_wait: MayWait<'_>) -> Result {
    let dev = pd.device();
    let may_sleep = may_wait.may_sleep();
    let depths = Depths {
        send: OPS,
        recv: OPS,
    };
    let cq = CompletionQueue::<Direct>::create(dev, depths.total(), None, may_sleep)?;
    let qp = queue_pair(pd, &cq, depths, Keep::<Direct>(PhantomData), may_sleep)?;
    let mut requests = make(dev, may_sleep)?;
    // Where they wait to be posted.
    let mut waiting = KVec::with_capacity(requests.len(), GFP_KERNEL)?;

    for round in 0..=SAMPLES {
        core::mem::swap(&mut requests, &mut waiting);
        bench_begin();
        while let Some(request) = waiting.pop() {
            post_send(&qp, request)?;
        }
        let post = bench_end();
        bench_raise();
        bench_begin();
        poll_all(&cq, &qp, &mut requests)?;
        let poll = bench_end();
        // The first time is another matter, see below.
        if round > 0 {
            sample(fmt!("post_send"), ffi::POST_SEND, post)?;
            sample(fmt!("poll_16"), ffi::POLL, poll)?;
        }
    }
    for _ in 0..SAMPLES {
        core::mem::swap(&mut requests, &mut waiting);
        bench_begin();
        while !waiting.is_empty() {
            post_chain(&qp, &mut waiting)?;
        }
        let post = bench_end();
        bench_raise();
        poll_all(&cq, &qp, &mut requests)?;
        sample(fmt!("chain_16"), ffi::CHAIN, post)?;
    }
    for round in 0..=SAMPLES {
        core::mem::swap(&mut requests, &mut waiting);
        bench_begin();
        while let Some(request) = waiting.pop() {
            post_recv(&qp, request)?;
        }
        let post = bench_end();
        bench_raise();
        poll_all(&cq, &qp, &mut requests)?;
        // The first time they change sides.
        if round > 0 {
            sample(fmt!("post_recv"), ffi::POST_RECV, post)?;
        }
    }
    for _ in 0..SAMPLES {
        // Requests that were never posted yet: their queue pair notes them, once.
        let mut requests = make(dev, may_sleep)?.into_iter();
        bench_begin();
        for request in requests.by_ref() {
            post_send(&qp, request)?;
        }
        sample(fmt!("first_post"), ffi::POST_SEND, bench_end())?;
        bench_raise();
        bench_begin();
        while cq.process(NonZero::<u16>::MAX) > 0 {}
        sample(fmt!("process"), ffi::PROCESS, bench_end())?;
        bench_done_insns();
    }
    qp.close(may_wait)
}

/// What is left to the RDMA core to poll, in one of its contexts.
fn handled<C: Poolable>(pd: &ProtectionDomain<'_>, may_wait: MayWait<'_>) -> Result {
    let dev = pd.device();
    let may_sleep = may_wait.may_sleep();
    let both = Depths {
        send: OPS,
        recv: OPS,
    };
    let sends = Depths { send: OPS, recv: 0 };
    let one = Depths { send: 1, recv: 0 };
    let lease = |depths: Depths| PooledCq::<C>::lease(dev, depths.total(), None, may_sleep);
    let qp = queue_pair(pd, lease(both)?, both, Keep(PhantomData), may_sleep)?;

    for _ in 0..SAMPLES {
        for request in make(dev, may_sleep)? {
            post_send(&qp, request)?;
        }
        bench_raise();
        let insns = bench_done_insns();
        sample(fmt!("complete_send_{}", C::NAME), ffi::NOTHING, insns)?;

        for request in make(dev, may_sleep)? {
            post_recv(&qp, request)?;
        }
        bench_raise();
        let insns = bench_done_insns();
        sample(fmt!("complete_recv_{}", C::NAME), ffi::NOTHING, insns)?;
    }
    qp.close(may_wait)?;

    let steady = queue_pair(pd, lease(sends)?, sends, Again(PhantomData), may_sleep)?;
    for request in make(dev, may_sleep)? {
        post_send(&steady, request)?;
    }
    for _ in 0..SAMPLES {
        bench_done_insns();
        bench_raise();
        let insns = bench_done_insns();
        sample(fmt!("steady_send_{}", C::NAME), ffi::POST_SEND, insns)?;
    }
    bench_allocs_begin();
    bench_raise();
    let allocs = u64::from(bench_allocs_end());
    sample(fmt!("allocs_steady_send_{}", C::NAME), ffi::NOTHING, allocs)?;
    steady.close(may_wait)?;

    // What it takes to wake a worker is thousands, and varies.
    if C::NAME == Softirq::NAME {
        let single = queue_pair(pd, lease(one)?, one, Again(PhantomData), may_sleep)?;
        let buffer = DmaBuffer::new(dev, SIZE, may_sleep)?;
        post_send(&single, WorkRequest::new(buffer, (), GFP_KERNEL)?)?;
        for _ in 0..SAMPLES {
            bench_begin();
            for _ in 0..OPS {
                bench_raise();
            }
            sample(fmt!("whole_way_{}", C::NAME), ffi::POST_SEND, bench_end())?;
        }
        bench_done_insns();
        single.close(may_wait)?;
    }
    Ok(())
}
