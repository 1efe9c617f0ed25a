// SPDX-License-Identifier: GPL-2.0

//! What a test stands on: a fake device, a client on it, and a handler that keeps books.
//!
//! [`with_device`] registers a device and a client, runs the test's function in the client's `add`,
//! takes the client off again, and then looks whether all is as it was: no object left on the
//! device, no entry of a pool leased, no request, tag or handler lost or seen twice.
//!
//! KUnit's own assertions end the thread where it stands. In `add` it holds locks of the RDMA core,
//! and a handler is no test's thread at all: so the tests use [`check!`] and its likes, which note
//! what is wrong and go on. The harness fails the test at its end.

use kernel::{
    fmt,
    global_lock,
    new_spinlock_irq,
    prelude::*,
    str::{
        CStr,
        CString, //
    },
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        SpinLockIrq, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    buffer::DmaBuffer,
    client::Client,
    completion::Completion,
    context::{
        Execution,
        MaySleep,
        MayWait,
        PollContext,
        Poolable, //
    },
    cq::Entries,
    device::Device,
    pd::ProtectionDomain,
    pool::PooledCq,
    qp::{
        Chain,
        ChainHandler,
        Depths,
        Handler,
        Poster,
        QueuePair,
        FLUSH_PATIENCE_MS, //
    },
    request::{
        PostError,
        WorkRequest, //
    }, //
};

use crate::fake::{
    join,
    Count,
    Fake,
    Plugged,
    Real,
    RealCount,
    Setup, //
};

/// How many checks of the running test have failed.
static FAILURES: Atomic<u32> = Atomic::new(0);

/// Notes that a check failed.
pub(crate) fn failure(file: &str, line: u32, what: fmt::Arguments<'_>) {
    FAILURES.fetch_add(1, Relaxed);
    pr_err!("    # check failed at {file}:{line}: {what}\n");
}

/// Checks that something is true.
macro_rules! check {
    ($condition:expr $(,)?) => {
        if !$condition {
            $crate::harness::failure(
                file!(),
                line!(),
                kernel::prelude::fmt!("{}", stringify!($condition)),
            );
        }
    };
}
pub(crate) use check;

/// Checks that two values are equal.
macro_rules! check_eq {
    ($left:expr, $right:expr $(,)?) => {
        match (&$left, &$right) {
            (left, right) => {
                if *left != *right {
                    $crate::harness::failure(
                        file!(),
                        line!(),
                        kernel::prelude::fmt!(
                            "{} is {:?}, not {:?}",
                            stringify!($left),
                            left,
                            right
                        ),
                    );
                }
            }
        }
    };
}
pub(crate) use check_eq;

/// Checks that a result is a certain error. What it is otherwise is dropped.
macro_rules! check_err {
    ($result:expr, $error:expr $(,)?) => {
        check_eq!($result.err().map(kernel::error::Error::from), Some($error))
    };
}
pub(crate) use check_err;

/// How a test without a device ends.
pub(crate) fn outcome() -> Result {
    if FAILURES.xchg(0, Relaxed) == 0 {
        Ok(())
    } else {
        Err(EIO)
    }
}

/// Waits for something that is bound to happen soon. Says whether it has.
pub(crate) fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    for _ in 0..5_000 {
        if condition() {
            return true;
        }
        fsleep(Delta::from_millis(1));
    }
    condition()
}

/// Waits for a while in which something must not happen.
pub(crate) fn a_while() {
    fsleep(Delta::from_millis(5));
}

/// Has the teardown of queue pairs lose its patience early, until this is dropped.
pub(crate) struct Impatient(u32);

impl Impatient {
    pub(crate) fn new() -> Self {
        Self(FLUSH_PATIENCE_MS.xchg(500, Relaxed))
    }
}

impl Drop for Impatient {
    fn drop(&mut self) {
        FLUSH_PATIENCE_MS.store(self.0, Relaxed);
    }
}

/// A number that anybody may add to.
pub(crate) struct Counter(Atomic<u32>);

impl Counter {
    pub(crate) const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// Adds one, and says what it was before.
    pub(crate) fn add(&self) -> u32 {
        self.0.fetch_add(1, Relaxed)
    }

    /// Takes one off.
    pub(crate) fn sub(&self) {
        self.0.fetch_sub(1u32, Relaxed);
    }

    pub(crate) fn set(&self, value: u32) {
        self.0.store(value, Relaxed);
    }

    pub(crate) fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }
}

/// How many requests a test may tell from each other.
const TAGS: usize = 64;

/// What happened in a test.
pub(crate) struct Log {
    pub(crate) sent: Counter,
    pub(crate) received: Counter,
    pub(crate) succeeded: Counter,
    pub(crate) flushed: Counter,
    /// Requests that failed, but for those flushed.
    pub(crate) failed: Counter,
    pub(crate) last_status: Counter,
    pub(crate) last_vendor_err: Counter,
    pub(crate) last_byte_len: Counter,
    pub(crate) last_tag: Counter,
    /// Handlers that ran somewhere else than they should.
    pub(crate) misplaced: Counter,
    pub(crate) tags_made: Counter,
    pub(crate) tags_dropped: Counter,
    pub(crate) handlers_made: Counter,
    pub(crate) handlers_dropped: Counter,
    /// What a test leaks on purpose.
    pub(crate) tags_leaked: Counter,
    pub(crate) handlers_leaked: Counter,
    /// How often the request with each tag came back.
    pub(crate) returned: [Counter; TAGS],
    /// For a test's own use.
    pub(crate) a: Counter,
    pub(crate) b: Counter,
    pub(crate) c: Counter,
}

impl Log {
    fn new() -> Self {
        Self {
            sent: Counter::new(),
            received: Counter::new(),
            succeeded: Counter::new(),
            flushed: Counter::new(),
            failed: Counter::new(),
            last_status: Counter::new(),
            last_vendor_err: Counter::new(),
            last_byte_len: Counter::new(),
            last_tag: Counter::new(),
            misplaced: Counter::new(),
            tags_made: Counter::new(),
            tags_dropped: Counter::new(),
            handlers_made: Counter::new(),
            handlers_dropped: Counter::new(),
            tags_leaked: Counter::new(),
            handlers_leaked: Counter::new(),
            returned: [const { Counter::new() }; TAGS],
            a: Counter::new(),
            b: Counter::new(),
            c: Counter::new(),
        }
    }

    /// How many requests came back.
    pub(crate) fn completed(&self) -> u32 {
        self.sent.get() + self.received.get()
    }

    /// How often the request with a tag came back.
    pub(crate) fn returned(&self, tag: u32) -> u32 {
        usize::try_from(tag)
            .ok()
            .and_then(|tag| self.returned.get(tag))
            .map_or(0, Counter::get)
    }
}

/// A test under way.
pub(crate) struct Env {
    pub(crate) fake: Fake,
    /// The device of a test that wants a real one; the fake one is never registered then.
    real: Option<Real>,
    pub(crate) log: Log,
    body: Body,
    result: Atomic<i32>,
}

impl Env {
    /// Whether the test is to run on a device. There may be others: a client gets them all.
    fn wants(&self, dev: &Device<'_>) -> Result<bool> {
        let name = CString::try_from_fmt(fmt!("{}", dev.name()))?;
        Ok(match &self.real {
            Some(real) => *name == *real.name(),
            None => name.to_bytes().starts_with(b"fake"),
        })
    }
}

/// What a test does while its client is on the device.
pub(crate) type Body = for<'bound> fn(&mut Test<'bound>) -> Result;
/// What a test looks at when its client is off the device, which is still there.
pub(crate) type After = fn(&Env) -> Result;

global_lock! {
    /// The running test: a client's `add` gets nothing but the device.
    // SAFETY: Initialized in `fake::init`, before any test runs.
    pub(crate) unsafe(uninit) static CURRENT: Mutex<Option<Arc<Env>>> = None;
}

/// Something that a client keeps until its device goes.
pub(crate) trait Keep: Send {}
impl<T: Send> Keep for T {}

/// What a test has at hand while its client is on the device.
pub(crate) struct Test<'bound> {
    pub(crate) dev: &'bound Device<'bound>,
    pub(crate) may_wait: MayWait<'bound>,
    pub(crate) env: Arc<Env>,
    kept: KVec<KBox<dyn Keep + 'bound>>,
}

impl<'bound> Test<'bound> {
    pub(crate) fn fake(&self) -> &Fake {
        &self.env.fake
    }

    pub(crate) fn log(&self) -> &Log {
        &self.env.log
    }

    pub(crate) fn count(&self, count: Count) -> u32 {
        self.fake().count(count)
    }

    /// What is counted on a real device.
    pub(crate) fn real(&self, count: RealCount) -> u32 {
        self.env.real.as_ref().map_or(0, |real| real.count(count))
    }

    pub(crate) fn may_sleep(&self) -> MaySleep<'bound> {
        self.may_wait.may_sleep()
    }

    /// Has the client keep something until `remove`. What is kept first is dropped first.
    pub(crate) fn keep(&mut self, object: impl Send + 'bound) -> Result {
        let object: KBox<dyn Keep + 'bound> = KBox::new(object, GFP_KERNEL)?;
        self.kept.push(object, GFP_KERNEL)?;
        Ok(())
    }

    /// Leaks something, as `mem::forget` would, but so that kmemleak knows.
    pub(crate) fn leak(&self, object: impl Send + 'bound) -> Result {
        crate::fake::known_leak(KBox::leak(KBox::new(object, GFP_KERNEL)?));
        Ok(())
    }

    pub(crate) fn pd(&self) -> Result<ProtectionDomain<'bound>> {
        ProtectionDomain::new(self.dev, self.may_sleep())
    }

    pub(crate) fn lease<C: Poolable>(
        &self,
        nr_cqe: u32,
        vector: Option<u32>,
    ) -> Result<PooledCq<'bound, C>> {
        PooledCq::lease(self.dev, nr_cqe, vector, self.may_sleep())
    }

    /// A queue pair on a protection domain and a lease of its own, that isn't connected.
    pub(crate) fn qp<C: Poolable>(
        &self,
        send: u32,
        recv: u32,
        act: Act<'bound, C>,
    ) -> Result<QueuePair<'bound, Probe<'bound, C>>> {
        let lease = self.lease(Depths { send, recv }.total(), None)?;
        self.qp_on(&self.pd()?, lease, send, recv, act)
    }

    pub(crate) fn qp_on<C: PollContext>(
        &self,
        pd: &ProtectionDomain<'bound>,
        cq: impl Into<Entries<'bound, C>>,
        send: u32,
        recv: u32,
        act: Act<'bound, C>,
    ) -> Result<QueuePair<'bound, Probe<'bound, C>>> {
        QueuePair::new(
            pd,
            cq,
            self.dev.port(1)?,
            Depths { send, recv },
            Probe::new(&self.env, Some(self.dev), act),
            self.may_sleep(),
        )
    }

    /// A queue pair that is connected, to itself.
    pub(crate) fn connected<C: Poolable>(
        &self,
        send: u32,
        recv: u32,
        act: Act<'bound, C>,
    ) -> Result<QueuePair<'bound, Probe<'bound, C>>> {
        let qp = self.qp(send, recv, act)?;
        self.connect(&qp)?;
        Ok(qp)
    }

    pub(crate) fn connect<H: Handler<'bound>>(&self, qp: &QueuePair<'bound, H>) -> Result {
        let peer = qp.endpoint(0, self.may_sleep())?;
        qp.connect(&peer, 0, self.may_sleep())
    }

    /// A request of so many bytes.
    pub(crate) fn request(&self, tag: u32, len: usize) -> Result<WorkRequest<'bound, Tag>> {
        let buffer = DmaBuffer::new(self.dev, len, self.may_sleep())?;
        WorkRequest::new(buffer, Tag::new(&self.env, tag), GFP_KERNEL)
    }

    /// A chain of requests with these tags.
    pub(crate) fn requests<const N: usize>(
        &self,
        tags: core::ops::Range<u32>,
    ) -> Result<Chain<'bound, Tag, N>> {
        let mut chain = Chain::new();
        for tag in tags {
            chain.push(self.request(tag, 8)?).map_err(|_| ENOSPC)?;
        }
        Ok(chain)
    }

    /// Posts a request as soon as there is room for it.
    pub(crate) fn post_soon(
        &self,
        tag: u32,
        post: impl Fn(WorkRequest<'bound, Tag>) -> Result<(), PostError<'bound, Tag>>,
    ) -> Result {
        self.post_soon_with(self.request(tag, 8)?, post)
    }

    /// As [`Self::post_soon`], with a request that is there already.
    pub(crate) fn post_soon_with(
        &self,
        mut request: WorkRequest<'bound, Tag>,
        post: impl Fn(WorkRequest<'bound, Tag>) -> Result<(), PostError<'bound, Tag>>,
    ) -> Result {
        for _ in 0..1_000 {
            match post(request) {
                Ok(()) => return Ok(()),
                Err(e) if e.error == ENOMEM => request = e.request.ok_or(EIO)?,
                Err(e) => return Err(e.into()),
            }
            fsleep(Delta::from_millis(1));
        }
        Err(ETIMEDOUT)
    }

    /// Waits until so many requests came back.
    pub(crate) fn completed(&self, requests: u32) -> bool {
        eventually(|| self.log().completed() >= requests)
    }
}

/// What a request carries, to be told from others.
pub(crate) struct Tag {
    pub(crate) id: u32,
    env: Arc<Env>,
}

impl Tag {
    pub(crate) fn new(env: &Arc<Env>, id: u32) -> Self {
        env.log.tags_made.add();
        Self {
            id,
            env: env.clone(),
        }
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        self.env.log.tags_dropped.add();
    }
}

/// A completion, in the handler.
pub(crate) struct Call<'a, 'bound, C: PollContext> {
    pub(crate) probe: &'a Probe<'bound, C>,
    pub(crate) qp: &'a Poster<'a, 'bound, Probe<'bound, C>>,
    pub(crate) completion: &'a Completion<'a>,
    pub(crate) context: C,
    pub(crate) recv: bool,
}

impl<'bound, C: PollContext> Call<'_, 'bound, C> {
    pub(crate) fn log(&self) -> &Log {
        &self.probe.env.log
    }

    /// Posts the request again, as what it was.
    pub(crate) fn repost(&self, request: WorkRequest<'bound, Tag>) -> Result {
        if self.recv {
            self.qp.post_recv(request)?;
        } else {
            self.qp.post_send(request)?;
        }
        Ok(())
    }
}

/// What a handler does with a request that came back.
pub(crate) type Act<'bound, C> = for<'a, 'b> fn(&'b Call<'a, 'bound, C>, WorkRequest<'bound, Tag>);

/// A handler that writes down what it sees, and then acts.
#[pin_data(PinnedDrop)]
pub(crate) struct Probe<'bound, C: PollContext> {
    pub(crate) env: Arc<Env>,
    act: Act<'bound, C>,
    dev: Option<&'bound Device<'bound>>,
    /// Something that a test wants to be held here.
    #[pin]
    held: SpinLockIrq<Option<KBox<dyn Keep + 'bound>>>,
}

impl<'bound, C: PollContext> Probe<'bound, C> {
    pub(crate) fn new<'a>(
        env: &'a Arc<Env>,
        dev: Option<&'bound Device<'bound>>,
        act: Act<'bound, C>,
    ) -> impl PinInit<Self, Error> + use<'a, 'bound, C> {
        try_pin_init!(Self {
            env: {
                env.log.handlers_made.add();
                env.clone()
            },
            act,
            dev,
            held <- new_spinlock_irq!(None, "rdma_kunit::Probe::held"),
        })
    }

    /// The device, for what the handler may make on it.
    pub(crate) fn dev(&self) -> Option<&'bound Device<'bound>> {
        self.dev
    }

    /// Holds something until the queue pair goes.
    pub(crate) fn hold(&self, object: impl Send + 'bound) -> Result {
        let object: KBox<dyn Keep + 'bound> = KBox::new(object, GFP_ATOMIC)?;
        // What was held is dropped without the lock.
        let before = self.held.lock().replace(object);
        drop(before);
        Ok(())
    }

    /// Takes what is held.
    pub(crate) fn release(&self) -> Option<KBox<dyn Keep + 'bound>> {
        self.held.lock().take()
    }

    fn note(&self, request: &WorkRequest<'bound, Tag>, completion: &Completion<'_>) {
        let log = &self.env.log;
        match completion.result() {
            Ok(success) => {
                log.last_status.set(0);
                log.last_byte_len.set(success.byte_len());
                log.succeeded.add();
            }
            Err(failure) => {
                log.last_status.set(failure.raw_status());
                log.last_vendor_err.set(failure.vendor_err());
                if failure.is_flush() {
                    log.flushed.add();
                } else {
                    log.failed.add();
                }
            }
        }
        log.last_tag.set(request.tag().id);
        if let Some(returned) = usize::try_from(request.tag().id)
            .ok()
            .and_then(|id| log.returned.get(id))
        {
            returned.add();
        }
        let expected = match C::NAME {
            "softirq" => Execution::Softirq,
            "direct" => return,
            _ => Execution::Worker,
        };
        if Execution::current() != expected {
            log.misplaced.add();
        }
    }
}

#[pinned_drop]
impl<C: PollContext> PinnedDrop for Probe<'_, C> {
    fn drop(self: Pin<&mut Self>) {
        self.env.log.handlers_dropped.add();
    }
}

impl<'bound, C: PollContext> Handler<'bound> for Probe<'bound, C> {
    type Context = C;
    type Tag = Tag;

    fn sent(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, Tag>,
        completion: &Completion<'_>,
        context: C,
    ) {
        self.note(&request, completion);
        (self.act)(
            &Call {
                probe: self,
                qp,
                completion,
                context,
                recv: false,
            },
            request,
        );
        // Last, so that a test which waits for it finds all that the handler did.
        self.env.log.sent.add();
    }

    fn received(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        request: WorkRequest<'bound, Tag>,
        completion: &Completion<'_>,
        context: C,
    ) {
        self.note(&request, completion);
        (self.act)(
            &Call {
                probe: self,
                qp,
                completion,
                context,
                recv: true,
            },
            request,
        );
        self.env.log.received.add();
    }
}

/// One after the other.
impl<'bound, C: PollContext> ChainHandler<'bound> for Probe<'bound, C> {
    fn sent_as_one(
        &self,
        qp: &Poster<'_, 'bound, Self>,
        chain: Chain<'bound, Tag>,
        completion: &Completion<'_>,
        context: C,
    ) {
        for request in chain {
            self.sent(qp, request, completion, context);
        }
    }
}

/// The act of a handler that only keeps books.
pub(crate) fn drop_it<'bound, C: PollContext>(
    _: &Call<'_, 'bound, C>,
    request: WorkRequest<'bound, Tag>,
) {
    drop(request);
}

/// The act of a handler that posts again whatever comes back, for ever.
pub(crate) fn post_again<'bound, C: PollContext>(
    call: &Call<'_, 'bound, C>,
    request: WorkRequest<'bound, Tag>,
) {
    // Refused once the queue pair ended; the request is dropped then.
    let _ = call.repost(request);
}

/// The client that the tests run in.
pub(crate) struct TestClient;

/// What the client keeps.
pub(crate) struct Kept<'bound>(
    #[expect(dead_code, reason = "held for its drop")] KVec<KBox<dyn Keep + 'bound>>,
);

impl Client for TestClient {
    type Data<'bound> = Kept<'bound>;

    const NAME: &'static CStr = c"rdma_kunit";

    fn add<'bound>(
        dev: &'bound Device<'bound>,
        may_wait: MayWait<'bound>,
    ) -> impl PinInit<Kept<'bound>, Error> + 'bound {
        run_body(dev, may_wait)
    }
}

fn run_body<'bound>(
    dev: &'bound Device<'bound>,
    may_wait: MayWait<'bound>,
) -> Result<Kept<'bound>> {
    let env = CURRENT.lock().clone().ok_or(ENODEV)?;
    if !env.wants(dev)? {
        return Ok(Kept(KVec::new()));
    }
    let mut test = Test {
        dev,
        may_wait,
        env: env.clone(),
        kept: KVec::new(),
    };
    let result = (env.body)(&mut test);
    env.result
        .store(result.err().map_or(0, |e| e.to_errno()), Relaxed);
    result?;
    Ok(Kept(test.kept))
}

/// A test in parts, for those that want to do the steps themselves.
pub(crate) struct Stage {
    pub(crate) env: Arc<Env>,
}

impl Stage {
    /// Makes a device, which isn't registered, and makes `body` what the client does on it.
    pub(crate) fn new(setup: Setup, body: Body) -> Result<Self> {
        Self::on(setup, None, body)
    }

    fn on(setup: Setup, real: Option<Real>, body: Body) -> Result<Self> {
        let env = Arc::new(
            Env {
                fake: Fake::new(setup)?,
                real,
                log: Log::new(),
                body,
                result: Atomic::new(1),
            },
            GFP_KERNEL,
        )?;
        *CURRENT.lock() = Some(env.clone());
        Ok(Self { env })
    }

    /// What `body` returned, or that it wasn't called.
    pub(crate) fn result(&self) -> Result {
        match self.env.result.load(Relaxed) {
            0 => Ok(()),
            e if e < 0 => Err(Error::from_errno(e)),
            _ => Err(ENODEV),
        }
    }

    /// Checks that the client left nothing on the device.
    pub(crate) fn check_clean(&self) {
        let (fake, log) = (&self.env.fake, &self.env.log);
        check_eq!(fake.count(Count::LiveQp), 0);
        check_eq!(fake.count(Count::LivePd), 0);
        check_eq!(fake.count(Count::Leased), 0);
        check_eq!(fake.count(Count::Queued), 0);
        check_eq!(
            log.tags_made.get() - log.tags_dropped.get(),
            log.tags_leaked.get()
        );
        check_eq!(
            log.handlers_made.get() - log.handlers_dropped.get(),
            log.handlers_leaked.get()
        );
    }

    /// Checks what has to be true of every test.
    fn check_always(&self) {
        let (fake, log) = (&self.env.fake, &self.env.log);
        check_eq!(fake.count(Count::Overruns), 0);
        check_eq!(fake.count(Count::BadPosts), 0);
        check_eq!(fake.count(Count::Lost), 0);
        check_eq!(log.misplaced.get(), 0);
    }

    /// Checks that nothing at all is left, once the device is gone, and says how the test ended.
    pub(crate) fn end(self) -> Result {
        *CURRENT.lock() = None;
        self.check_always();
        check_eq!(self.env.fake.count(Count::LiveCq), 0);
        outcome()
    }

    fn on_device(&self, after: impl FnOnce(&Plugged<'_>) -> Result) -> Result {
        let device = self.env.fake.plug()?;
        let client = join()?;
        check_eq!(self.result(), Ok(()));
        drop(client);
        after(&device)
    }
}

/// Runs a test on a device.
pub(crate) fn with_device(setup: Setup, body: Body) -> Result {
    with_device_then(setup, body, |_| Ok(()))
}

/// Runs a test on a device, and `after` once its client is off it.
pub(crate) fn with_device_then(setup: Setup, body: Body, after: After) -> Result {
    let stage = Stage::new(setup, body)?;
    let result = stage.on_device(|_| {
        let result = after(&stage.env);
        stage.check_clean();
        result
    });
    check_eq!(result, Ok(()));
    stage.end()
}

/// Runs a test that leaves something behind: `after` says what. It is taken off the device then,
/// which otherwise the RDMA core warns of.
pub(crate) fn with_device_leaving(setup: Setup, body: Body, after: After) -> Result {
    let stage = Stage::new(setup, body)?;
    let result = stage.on_device(|device| {
        let result = after(&stage.env);
        device.scavenge();
        result
    });
    check_eq!(result, Ok(()));
    stage.end()
}

/// Runs a test on a real device, and `after` once its client is off it. The device has to be there.
///
/// What is counted on the device has to be the same before and afterwards.
pub(crate) fn with_real_device(name: &'static CStr, body: Body, after: After) -> Result {
    let real = Real::get(name).inspect_err(|e| {
        failure(file!(), line!(), fmt!("{}: {:?}", name, e));
    });
    let Ok(real) = real else { return outcome() };
    let before = RealCount::ALL.map(|count| real.count(count));
    let stage = Stage::on(Setup::new(), Some(real), body)?;
    let client = join()?;
    check_eq!(stage.result(), Ok(()));
    drop(client);
    check_eq!(after(&stage.env), Ok(()));
    stage.check_clean();
    if let Some(real) = &stage.env.real {
        check_eq!(RealCount::ALL.map(|count| real.count(count)), before);
    }
    stage.end()
}
