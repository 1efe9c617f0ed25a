// SPDX-License-Identifier: GPL-2.0

//! Where completions are handled, and what may be done there.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`enum ib_poll_context`)

use core::marker::PhantomData;
use kernel::prelude::*;
use rdma_bindings as bindings;

mod private {
    pub trait Sealed {}
}

/// The context in which the RDMA core polls a completion queue and calls the handlers.
///
/// ```
/// use rdma::context::{PollContext, Softirq, UnboundWorkqueue};
///
/// assert_eq!(Softirq::NAME, "softirq");
/// assert_eq!(UnboundWorkqueue::NAME, "unbound");
/// ```
///
/// C type: `enum ib_poll_context`.
pub trait PollContext: private::Sealed + Copy + Send + Sync + 'static {
    /// The name of the context in logs and reports.
    const NAME: &'static str;

    #[doc(hidden)]
    const RAW: bindings::ib_poll_context;

    /// Makes the token that a handler of this context is given.
    #[doc(hidden)]
    fn token(_: Trampoline) -> Self;
}

/// A context that queues of the device's shared pool can be polled in.
///
/// A queue that is polled by its owner can't be shared:
///
/// ```compile_fail,E0599
/// use rdma::{context::Direct, device::Device, context::MaySleep, pool::PooledCq};
/// fn lease<'bound>(dev: &'bound Device<'bound>, may_sleep: MaySleep<'_>) {
///     let _ = PooledCq::<Direct>::lease(dev, 16, None, may_sleep);
/// }
/// ```
pub trait Poolable: PollContext {}

/// Only this crate's completion trampolines can make one.
#[doc(hidden)]
pub struct Trampoline(());

impl Trampoline {
    pub(crate) fn new() -> Self {
        Self(())
    }
}

macro_rules! poll_contexts {
    ($($(#[$doc:meta])* $name:ident = $raw:ident, $text:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name(());

        impl private::Sealed for $name {}

        impl PollContext for $name {
            const NAME: &'static str = $text;
            const RAW: bindings::ib_poll_context = bindings::$raw;

            fn token(_: Trampoline) -> Self {
                Self(())
            }
        }
    )*};
}

poll_contexts! {
    /// Handlers run in softirq context and may not sleep. C constant: `IB_POLL_SOFTIRQ`.
    Softirq = ib_poll_context_IB_POLL_SOFTIRQ, "softirq";
    /// Handlers run in a worker of `ib-comp-wq`, on the CPU of the interrupt, and may sleep.
    /// C constant: `IB_POLL_WORKQUEUE`.
    Workqueue = ib_poll_context_IB_POLL_WORKQUEUE, "workqueue";
    /// Handlers run in a worker of `ib-comp-unb-wq`, on any CPU, and may sleep.
    /// C constant: `IB_POLL_UNBOUND_WORKQUEUE`.
    UnboundWorkqueue = ib_poll_context_IB_POLL_UNBOUND_WORKQUEUE, "unbound";
    /// The owner polls. C constant: `IB_POLL_DIRECT`.
    Direct = ib_poll_context_IB_POLL_DIRECT, "direct";
}

impl Poolable for Softirq {}
impl Poolable for Workqueue {}
impl Poolable for UnboundWorkqueue {}

impl Workqueue {
    /// A handler of this context may sleep.
    pub fn may_sleep(&self) -> MaySleep<'_> {
        MaySleep::new()
    }
}

impl UnboundWorkqueue {
    /// A handler of this context may sleep.
    pub fn may_sleep(&self) -> MaySleep<'_> {
        MaySleep::new()
    }
}

/// Says that the caller runs in a context that may sleep.
///
/// It can't be sent to another thread nor shared with one, so a handler can't keep it for later. The
/// softirq context has none to give:
///
/// ```compile_fail,E0599
/// fn f(context: rdma::context::Softirq) {
///     let _ = context.may_sleep();
/// }
/// ```
#[derive(Clone, Copy)]
pub struct MaySleep<'a>(PhantomData<*mut &'a ()>);

impl MaySleep<'_> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }

    /// Refuses what the type can't: a caller who holds a spinlock, has interrupts disabled or is
    /// inside an RCU read-side section.
    ///
    /// # Errors
    ///
    /// `EDEADLK`, with a line in the log that names `what`.
    pub(crate) fn check(self, what: &str) -> Result {
        // SAFETY: Only looks at the state of the current CPU and task.
        if unsafe { bindings::rdma_may_sleep() } {
            return Ok(());
        }
        log_refusal!("{what}: called in a context that may not sleep: refused\n");
        Err(EDEADLK)
    }
}

/// Says that the caller may also wait for completions: it runs in a context that may sleep, and not
/// inside a completion handler.
#[derive(Clone, Copy)]
pub struct MayWait<'a>(MaySleep<'a>);

impl<'a> MayWait<'a> {
    pub(crate) fn new() -> Self {
        Self(MaySleep::new())
    }

    /// Whoever may wait may sleep.
    pub fn may_sleep(self) -> MaySleep<'a> {
        self.0
    }
}

/// The context that code is really running in, as the kernel sees it.
///
/// ```
/// use rdma::context::Execution;
///
/// // A thread of its own is neither of the places where handlers run.
/// assert_eq!(Execution::current(), Execution::Other);
/// ```
///
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Execution {
    /// A softirq handler.
    Softirq,
    /// A worker of a workqueue, free to sleep.
    Worker,
    /// Anything else.
    Other,
}

impl Execution {
    /// Looks at the current context. May be called from any.
    #[inline]
    pub fn current() -> Self {
        // SAFETY: Only looks at the state of the current CPU and task.
        match unsafe { bindings::rdma_execution() } {
            bindings::rdma_execution_context_RDMA_EXECUTION_SOFTIRQ => Self::Softirq,
            bindings::rdma_execution_context_RDMA_EXECUTION_WORKER => Self::Worker,
            _ => Self::Other,
        }
    }
}
