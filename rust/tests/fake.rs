// SPDX-License-Identifier: GPL-2.0

//! The fake RDMA device, as the tests see it. All of the tests' own `unsafe` is here.
//!
//! C header: `rust/tests/fake_device.h`

use core::ptr::NonNull;
use kernel::{
    error::to_result,
    prelude::*,
    str::CStr, //
};
use rdma::client::{
    Registered,
    Registration,
    Slot, //
};

use crate::harness::{
    TestClient,
    CURRENT, //
};

/// What the device is like. C type: `struct fake_setup`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) num_comp_vectors: u32,
    pub(crate) max_cqe: u32,
    pub(crate) max_qp_wr: u32,
    pub(crate) ports: u32,
    pub(crate) port_state: u32,
    pub(crate) iwarp: u32,
    pub(crate) netdev: u32,
    pub(crate) firmware: Firmware,
}

/// What the driver says of the device's firmware. C type: `enum fake_firmware`.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(crate) enum Firmware {
    None,
    Plain,
    /// As much as there is room for.
    Long,
    /// With a newline at its end.
    Line,
    Garbage,
}

impl Setup {
    /// A device as most tests want it.
    pub(crate) const fn new() -> Self {
        Self {
            num_comp_vectors: 1,
            max_cqe: 8192,
            max_qp_wr: 1024,
            ports: 1,
            port_state: PORT_ACTIVE,
            iwarp: 0,
            netdev: 0,
            firmware: Firmware::None,
        }
    }

    pub(crate) const fn vectors(mut self, num: u32) -> Self {
        self.num_comp_vectors = num;
        self
    }

    pub(crate) const fn max_cqe(mut self, max: u32) -> Self {
        self.max_cqe = max;
        self
    }

    pub(crate) const fn max_qp_wr(mut self, max: u32) -> Self {
        self.max_qp_wr = max;
        self
    }

    pub(crate) const fn ports(mut self, ports: u32) -> Self {
        self.ports = ports;
        self
    }

    pub(crate) const fn port_state(mut self, state: u32) -> Self {
        self.port_state = state;
        self
    }

    pub(crate) const fn iwarp(mut self) -> Self {
        self.iwarp = 1;
        self
    }

    pub(crate) const fn netdev(mut self) -> Self {
        self.netdev = 1;
        self
    }

    pub(crate) const fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = firmware;
        self
    }
}

/// C constant: `IB_PORT_ACTIVE`.
const PORT_ACTIVE: u32 = 4;

/// What the RDMA core asks of a driver. C type: `enum fake_op`.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    AllocPd,
    DeallocPd,
    CreateCq,
    DestroyCq,
    PollCq,
    ModifyCq,
    CreateQp,
    ModifyInit,
    ModifyRtr,
    ModifyRts,
    ModifyErr,
    DestroyQp,
    PostSend,
    PostRecv,
    QueryPort,
}

/// What a post that is refused does besides. C type: `enum fake_refusal`.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(crate) enum Refusal {
    /// Says which request it refused.
    Named,
    /// Does not say so.
    Unnamed,
    /// Does not say so, and has taken it.
    Taken,
}

/// When what is in flight comes back after a move to the error state. C type: `enum fake_flush`.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(crate) enum Flush {
    AtOnce,
    OnDemand,
    OnDestroy,
    /// At once, but the sends are forgotten.
    Receives,
}

/// Where a function is called. C type: `enum fake_context`.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Task,
    IrqsOff,
    Spinlock,
    PreemptOff,
    BhOff,
    Rcu,
    Softirq,
    Hardirq,
    Worker,
}

impl Place {
    /// All places.
    pub(crate) const ALL: [Place; 9] = [
        Place::Task,
        Place::IrqsOff,
        Place::Spinlock,
        Place::PreemptOff,
        Place::BhOff,
        Place::Rcu,
        Place::Softirq,
        Place::Hardirq,
        Place::Worker,
    ];

    /// Those in which a task finds itself that may not sleep.
    pub(crate) const ATOMIC: [Place; 5] = [
        Place::IrqsOff,
        Place::Spinlock,
        Place::PreemptOff,
        Place::BhOff,
        Place::Rcu,
    ];

    /// Calls `f` there, and waits for it.
    pub(crate) fn run<R: Send>(self, f: impl FnOnce() -> R + Send) -> Option<R> {
        // SAFETY: The function and its result may be sent to another thread.
        unsafe { self.call(f) }
    }

    /// Calls `f` there, where that is this very thread.
    pub(crate) fn run_here<R>(self, f: impl FnOnce() -> R) -> Option<R> {
        if !Self::ATOMIC.contains(&self) {
            return None;
        }
        // SAFETY: The C side calls the function straight away for these.
        unsafe { self.call(f) }
    }

    /// # Safety
    ///
    /// `f` and `R` are `Send`, or the place is one of [`Self::ATOMIC`].
    unsafe fn call<R>(self, f: impl FnOnce() -> R) -> Option<R> {
        struct Job<F, R> {
            f: Option<F>,
            result: Option<R>,
        }

        /// # Safety
        ///
        /// `data` points to a `Job<F, R>` that nobody else uses.
        unsafe extern "C" fn call<F: FnOnce() -> R, R>(data: *mut c_void) {
            // SAFETY: By the function's requirements.
            let job = unsafe { &mut *data.cast::<Job<F, R>>() };
            job.result = job.f.take().map(|f| f());
        }

        fn caller<F: FnOnce() -> R, R>(_: &Job<F, R>) -> unsafe extern "C" fn(*mut c_void) {
            call::<F, R>
        }

        let mut job = Job {
            f: Some(f),
            result: None,
        };
        let call = caller(&job);
        // SAFETY: `call` goes with the type of `job`, which lives until `fake_run` returns: by then
        // the function has. The thread is one that may run it, by the function's requirements.
        unsafe { fake_run(self as u32, call, (&raw mut job).cast()) };
        job.result
    }
}

/// What the device counts. C type: `enum fake_count`.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Count {
    LivePd,
    LiveCq,
    LiveQp,
    Leased,
    MostQueued,
    Overruns,
    BadPosts,
    Lost,
    PendingSends,
    PendingRecvs,
    Queued,
}

/// How a request ends. C type: `struct fake_wc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Wc {
    pub(crate) status: u32,
    pub(crate) byte_len: u32,
    pub(crate) vendor_err: u32,
    pub(crate) fill: u32,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    /// Immediate data are in the byte order of the wire.
    pub(crate) ex: u32,
}

/// What is in a completion where the kernel defines nothing. C constant: `FAKE_POISON`.
pub(crate) const POISON: u32 = 0xeeee_eeee;

impl Wc {
    /// C constants: `IB_WC_WITH_IMM`, `IB_WC_WITH_INVALIDATE`.
    pub(crate) const WITH_IMM: u32 = 1 << 1;
    pub(crate) const WITH_INVALIDATE: u32 = 1 << 2;

    /// C constant: `FAKE_OPCODE_POSTED`.
    const OPCODE_POSTED: u32 = u32::MAX;

    /// Success, of so many bytes.
    pub(crate) const fn ok(byte_len: u32) -> Self {
        Self {
            status: 0,
            byte_len,
            vendor_err: 0,
            fill: 0xa5,
            opcode: Self::OPCODE_POSTED,
            flags: 0,
            ex: 0,
        }
    }

    /// With flags, and what they say is there.
    pub(crate) const fn with(mut self, flags: u32, ex: u32) -> Self {
        self.flags = flags;
        self.ex = ex;
        self
    }

    pub(crate) const fn opcode(mut self, opcode: u32) -> Self {
        self.opcode = opcode;
        self
    }

    /// Failure.
    pub(crate) const fn failed(status: u32) -> Self {
        Self {
            status,
            byte_len: 0xdead_beef,
            vendor_err: 0x77,
            fill: 0,
            opcode: Self::OPCODE_POSTED,
            flags: 0,
            ex: 0,
        }
    }
}

/// A fake device.
///
/// # Invariants
///
/// The pointer is valid until `drop`.
pub(crate) struct Fake(NonNull<c_void>);

// SAFETY: The functions do their own locking.
unsafe impl Send for Fake {}
// SAFETY: As above.
unsafe impl Sync for Fake {}

impl Fake {
    /// Makes a device, which isn't registered yet.
    pub(crate) fn new(setup: Setup) -> Result<Self> {
        // SAFETY: `setup` is valid for the call.
        let fake = unsafe { fake_new(&setup) };
        // INVARIANT: Just made, freed by `drop`.
        Ok(Self(NonNull::new(fake).ok_or(ENOMEM)?))
    }

    /// Registers the device with the RDMA core, until what is returned is dropped.
    pub(crate) fn plug(&self) -> Result<Plugged<'_>> {
        // SAFETY: By the type invariant. It isn't registered: the tests do this once for a device.
        to_result(unsafe { fake_register(self.0.as_ptr()) })?;
        Ok(Plugged(self))
    }

    /// Has the op fail `times` times with `error`, after `after` calls.
    pub(crate) fn fail_after(&self, op: Op, after: u32, times: u32, error: Error) {
        // SAFETY: By the type invariant.
        unsafe { fake_fail(self.0.as_ptr(), op as u32, after, times, error.to_errno()) };
    }

    /// Has the next call of the op fail with `error`.
    pub(crate) fn fail(&self, op: Op, error: Error) {
        self.fail_after(op, 0, 1, error);
    }

    /// Has all calls of the op fail with `error`.
    pub(crate) fn fail_always(&self, op: Op, error: Error) {
        self.fail_after(op, 0, u32::MAX, error);
    }

    /// Has no call of the op fail any more.
    pub(crate) fn heal(&self, op: Op) {
        self.fail_after(op, 0, 0, EIO);
    }

    pub(crate) fn refuse(&self, refusal: Refusal) {
        // SAFETY: By the type invariant.
        unsafe { fake_refuse(self.0.as_ptr(), refusal as u32) };
    }

    pub(crate) fn flush_when(&self, flush: Flush) {
        // SAFETY: By the type invariant.
        unsafe { fake_flush_when(self.0.as_ptr(), flush as u32) };
    }

    /// Has the device tell of each send, whether it was asked to or not.
    pub(crate) fn talk(&self, talkative: bool) {
        // SAFETY: By the type invariant.
        unsafe { fake_talk(self.0.as_ptr(), talkative) };
    }

    /// Has all requests complete as soon as they are posted.
    pub(crate) fn echo(&self, echo: bool) {
        // SAFETY: By the type invariant.
        unsafe { fake_echo(self.0.as_ptr(), echo) };
    }

    /// Has all requests complete soon after they were posted, until the device goes.
    pub(crate) fn pump(&self) {
        // SAFETY: By the type invariant.
        unsafe { fake_pump(self.0.as_ptr()) };
    }

    /// How often the op was called.
    pub(crate) fn calls(&self, op: Op) -> u32 {
        // SAFETY: By the type invariant.
        unsafe { fake_calls(self.0.as_ptr(), op as u32) }
    }

    pub(crate) fn count(&self, count: Count) -> u32 {
        // SAFETY: By the type invariant.
        unsafe { fake_count(self.0.as_ptr(), count as u32) }
    }

    /// How many sends of a queue pair are in flight, as the device sees it.
    pub(crate) fn sends(&self, qp: u32) -> u32 {
        // SAFETY: By the type invariant.
        unsafe { fake_pending(self.0.as_ptr(), qp, false) }
    }

    /// How many receives of a queue pair are in flight, as the device sees it.
    pub(crate) fn recvs(&self, qp: u32) -> u32 {
        // SAFETY: By the type invariant.
        unsafe { fake_pending(self.0.as_ptr(), qp, true) }
    }

    /// How many bytes the newest request of a queue pair has that is in flight.
    pub(crate) fn posted_len(&self, qp: u32, recv: bool) -> u32 {
        // SAFETY: By the type invariant.
        unsafe { fake_posted_len(self.0.as_ptr(), qp, recv) }
    }

    /// Completes the `index`-th oldest request of one side of a queue pair.
    pub(crate) fn complete_at(
        &self,
        qp: u32,
        recv: bool,
        index: u32,
        wc: Wc,
        place: Place,
    ) -> Result {
        // SAFETY: By the type invariant; `wc` is valid for the call.
        to_result(unsafe { fake_complete(self.0.as_ptr(), qp, recv, index, &wc, place as u32) })
    }

    /// Completes the oldest send of a queue pair.
    pub(crate) fn complete_send(&self, qp: u32, wc: Wc) -> Result {
        self.complete_at(qp, false, 0, wc, Place::Task)
    }

    /// Completes the oldest receive of a queue pair.
    pub(crate) fn complete_recv(&self, qp: u32, wc: Wc) -> Result {
        self.complete_at(qp, true, 0, wc, Place::Task)
    }

    /// Flushes all queue pairs, whatever their state.
    pub(crate) fn flush_all(&self) {
        // SAFETY: By the type invariant.
        unsafe { fake_flush_all(self.0.as_ptr(), Place::Task as u32) };
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // SAFETY: By the type invariant. It isn't registered: `Plugged` borrows it.
        unsafe { fake_free(self.0.as_ptr()) };
    }
}

/// A device that is registered with the RDMA core.
pub(crate) struct Plugged<'a>(&'a Fake);

impl Plugged<'_> {
    /// Has the device report an event, and waits until it was delivered.
    pub(crate) fn event(&self, event: u32, port: u32) {
        self.0.event(event, port);
        // SAFETY: The caller may sleep: nothing in the tests that can't has this.
        unsafe { fake_settle() };
    }

    /// Takes down what was left on the device on purpose.
    pub(crate) fn scavenge(&self) {
        // SAFETY: By the type invariant of `Fake`; the device is registered.
        unsafe { fake_scavenge(self.0 .0.as_ptr()) };
    }
}

impl Fake {
    /// Makes a switch of the device, for a moment. Only while it is registered.
    pub(crate) fn switch(&self, is_switch: bool) {
        // SAFETY: By the type invariant.
        unsafe { fake_switch(self.0.as_ptr(), is_switch) };
    }

    /// Has the device report an event. Only while it is registered; otherwise nothing happens.
    pub(crate) fn event(&self, event: u32, port: u32) {
        // SAFETY: By the type invariant.
        unsafe { fake_event(self.0.as_ptr(), event, port) };
    }

    /// Has the listeners told of an event at once, as the RDMA core does it of an address that
    /// changed. Only while the device is registered.
    pub(crate) fn event_straight(&self, event: u32, port: u32) {
        // SAFETY: By the type invariant.
        unsafe { fake_event_straight(self.0.as_ptr(), event, port) };
    }
}

impl Drop for Plugged<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant of `Fake`; it was registered, and is unregistered once.
        unsafe { fake_unregister(self.0 .0.as_ptr()) };
    }
}

/// What is counted on a real device. C type: `enum real_count`.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(crate) enum RealCount {
    Pd,
    Qp,
    CmId,
    /// Entries of pooled queues that are leased.
    Leased,
}

impl RealCount {
    pub(crate) const ALL: [RealCount; 4] = [
        RealCount::Pd,
        RealCount::Qp,
        RealCount::CmId,
        RealCount::Leased,
    ];
}

/// A device of a driver of the kernel's own. It can't go as long as this is there.
///
/// # Invariants
///
/// `device` points to a registered `struct ib_device`, of which we have a reference.
pub(crate) struct Real {
    device: NonNull<c_void>,
    name: &'static CStr,
}

// SAFETY: The functions do their own locking.
unsafe impl Send for Real {}
// SAFETY: As above.
unsafe impl Sync for Real {}

impl Real {
    /// Finds the device of that name, or fails with `ENODEV`. The tests themselves do this, never what
    /// is called back.
    pub(crate) fn get(name: &'static CStr) -> Result<Self> {
        // SAFETY: The name is valid. Registering a client, which this does, is fine outside of
        // callbacks.
        let device = unsafe { real_get(name.as_char_ptr()) };
        // INVARIANT: It comes with a reference, which `drop` gives back.
        Ok(Self {
            device: NonNull::new(device).ok_or(ENODEV)?,
            name,
        })
    }

    pub(crate) fn name(&self) -> &'static CStr {
        self.name
    }

    pub(crate) fn count(&self, count: RealCount) -> u32 {
        // SAFETY: By the type invariant.
        unsafe { real_count(self.device.as_ptr(), count as u32) }
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { real_put(self.device.as_ptr()) };
    }
}

// SAFETY: Always the same slot, and nobody else's.
unsafe impl Registered for TestClient {
    fn slot() -> &'static Slot {
        static SLOT: Slot = Slot::new();
        &SLOT
    }
}

/// The registration of the tests' client.
pub(crate) type Joined = Pin<KBox<Registration<TestClient>>>;

/// Registers the tests' client. The tests themselves do this, never what is called back.
pub(crate) fn join() -> Result<Joined> {
    // SAFETY: Not called in a callback, nor is it dropped there, as said above.
    KBox::pin_init(unsafe { Registration::new() }, GFP_KERNEL)
}

/// Tells kmemleak that the memory at `p`, and all that it leads to, is leaked on purpose.
pub(crate) fn known_leak<T: ?Sized>(p: &T) {
    // SAFETY: The pointer is only remembered.
    unsafe { fake_known_leak(core::ptr::from_ref(p).cast()) };
}

/// Whether a client has a directory in debugfs; or one for that device; or that file in it.
pub(crate) fn in_debugfs(client: &CStr, device: Option<&CStr>, file: Option<&CStr>) -> bool {
    let raw = |name: Option<&CStr>| name.map_or(core::ptr::null(), CStr::as_char_ptr);
    // SAFETY: They are null, or C strings.
    unsafe { fake_in_debugfs(client.as_char_ptr(), raw(device), raw(file)) }
}

/// Makes the device's globals ready. To be called before anything else here, when the module loads.
pub(crate) fn init() {
    // SAFETY: Called once, before the tests run.
    unsafe { CURRENT.init() };
}

extern "C" {
    fn fake_new(setup: *const Setup) -> *mut c_void;
    fn fake_register(fake: *mut c_void) -> c_int;
    fn fake_unregister(fake: *mut c_void);
    fn fake_free(fake: *mut c_void);
    fn fake_fail(fake: *mut c_void, op: u32, after: u32, times: u32, err: c_int);
    fn fake_refuse(fake: *mut c_void, refusal: u32);
    fn fake_flush_when(fake: *mut c_void, flush: u32);
    fn fake_talk(fake: *mut c_void, talkative: bool);
    fn fake_echo(fake: *mut c_void, echo: bool);
    fn fake_pump(fake: *mut c_void);
    fn fake_calls(fake: *mut c_void, op: u32) -> u32;
    fn fake_count(fake: *mut c_void, count: u32) -> u32;
    fn fake_pending(fake: *mut c_void, qp_num: u32, recv: bool) -> u32;
    fn fake_posted_len(fake: *mut c_void, qp_num: u32, recv: bool) -> u32;
    fn fake_complete(
        fake: *mut c_void,
        qp_num: u32,
        recv: bool,
        index: u32,
        wc: *const Wc,
        context: u32,
    ) -> c_int;
    fn fake_flush_all(fake: *mut c_void, context: u32);
    fn fake_switch(fake: *mut c_void, is_switch: bool);
    fn fake_event(fake: *mut c_void, event: u32, port: u32);
    fn fake_event_straight(fake: *mut c_void, event: u32, port: u32);
    fn fake_settle();
    fn fake_scavenge(fake: *mut c_void);
    fn fake_run(context: u32, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void);
    fn fake_known_leak(p: *const c_void);
    fn fake_in_debugfs(client: *const c_char, device: *const c_char, file: *const c_char) -> bool;
    fn real_get(name: *const c_char) -> *mut c_void;
    fn real_put(device: *mut c_void);
    fn real_count(device: *mut c_void, count: u32) -> u32;
}
