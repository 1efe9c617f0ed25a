// SPDX-License-Identifier: GPL-2.0

//! Work within a client's window.
//!
//! C header: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h)

use core::marker::PhantomData;
use kernel::{
    prelude::*,
    types::Opaque, //
};
use rdma_bindings as bindings;

use crate::{
    context::{
        MaySleep,
        MayWait, //
    },
    device::Device,
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    }, //
};

/// Work to be done on what lives in the window, in process context.
pub trait Task<'bound>: Send + Sync + Sized + 'bound {
    /// Does the work. Runs in a worker of `system_dfl_wq`, never twice at the same time.
    ///
    /// C field: `work_struct.func`.
    fn run(&self, may_wait: MayWait<'_>);

    /// The work is being taken down: [`Self::run`], if it is running, has to come to its end.
    ///
    /// Runs in process context, beside `run`, which is waited for afterwards
    /// (C function: `disable_work_sync()`).
    fn stop(&self);
}

/// A work item that may use all that lives in the window.
///
/// Dropping it never waits: the task is stopped, and waited for, before the window ends.
///
/// ```
/// # use kernel::prelude::*;
/// use kernel::sync::atomic::{Atomic, Relaxed};
/// use rdma::{context::*, device::Device, pool::PooledCq, work::{ScopedWork, Task}};
///
/// /// Leases and gives back, until it is told to stop.
/// struct Churn<'bound>(&'bound Device<'bound>, Atomic<bool>);
///
/// impl<'bound> Task<'bound> for Churn<'bound> {
///     fn run(&self, may_wait: MayWait<'_>) {
///         while !self.1.load(Relaxed) {
///             let may_sleep = may_wait.may_sleep();
///             let _ = PooledCq::<Softirq>::lease(self.0, 16, None, may_sleep);
///         }
///     }
///
///     fn stop(&self) {
///         self.1.store(true, Relaxed);
///     }
/// }
///
/// fn churn<'bound>(
///     dev: &'bound Device<'bound>,
///     may_sleep: MaySleep<'_>,
/// ) -> Result<ScopedWork<'bound, Churn<'bound>>> {
///     let task = Churn(dev, Atomic::new(false));
///     let work = ScopedWork::new::<Error>(dev, Ok::<_, Error>(task), may_sleep)?;
///     work.enqueue();
///     Ok(work)
/// }
/// ```
///
/// C type: `struct work_struct`.
pub struct ScopedWork<'bound, T: Task<'bound>>(Owned<'bound, Item<'bound, T>>);

/// # Invariants
///
/// `work` is initialized, with `Item::run` as its function.
#[pin_data]
struct Item<'bound, T: Task<'bound>> {
    node: Node,
    #[pin]
    work: Opaque<kernel::bindings::work_struct>,
    #[pin]
    task: T,
    _bound: PhantomData<&'bound ()>,
}

// SAFETY: A work item may be used from any thread, and the task is `Send` and `Sync`.
unsafe impl<'bound, T: Task<'bound>> Send for Item<'bound, T> {}
// SAFETY: As above.
unsafe impl<'bound, T: Task<'bound>> Sync for Item<'bound, T> {}

// SAFETY: `node` is part of the object. After `destroy` the kernel neither runs nor queues the work.
unsafe impl<'bound, T: Task<'bound>> Resource for Item<'bound, T> {
    const KIND: Kind = Kind::Work;

    fn node(&self) -> &Node {
        &self.node
    }

    fn begin(&self) {
        self.task.stop();
    }

    unsafe fn destroy(&self) -> Fate {
        // SAFETY: By the type invariant.
        unsafe { kernel::bindings::disable_work_sync(self.work.get()) };
        Fate::Free
    }
}

impl<'bound, T: Task<'bound>> Item<'bound, T> {
    /// # Safety
    ///
    /// `work` is the field of a live `Self`.
    unsafe extern "C" fn run(work: *mut kernel::bindings::work_struct) {
        // SAFETY: By the function's requirements.
        let this = unsafe { &*kernel::container_of!(Opaque::cast_from(work), Self, work) };
        this.task.run(MayWait::new());
    }
}

impl<'bound, T: Task<'bound>> ScopedWork<'bound, T> {
    /// Makes a work item, which isn't queued yet. Sleeps.
    ///
    /// C function: `INIT_WORK()`.
    ///
    /// # Errors
    ///
    /// That of `task`; `ENOMEM`; `EDEADLK` where sleeping is not possible.
    pub fn new<E>(
        dev: &'bound Device<'bound>,
        task: impl PinInit<T, E>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        may_sleep.check("ScopedWork::new")?;
        let item = KBox::pin_init::<Error>(
            try_pin_init!(Item {
                node: Node::new::<Item<'bound, T>>(),
                // INVARIANT: Initialized here.
                work <- Opaque::ffi_init(|slot| {
                    // SAFETY: `slot` is valid for writes and stays where it is; the lock class is
                    // static.
                    unsafe {
                        kernel::bindings::init_work_with_key(
                            slot,
                            Some(Item::<'bound, T>::run),
                            false,
                            c"rdma::ScopedWork".as_char_ptr(),
                            kernel::static_lock_class!().as_ptr(),
                        )
                    }
                }),
                task <- task,
                _bound: PhantomData,
            }? Error),
            GFP_KERNEL,
        )?;
        Ok(Self(Register::enroll(dev, item)?))
    }

    /// Queues the work. Says whether it was idle, and not yet taken down. May be called from any
    /// context.
    ///
    /// C function: `queue_work()`.
    pub fn enqueue(&self) -> bool {
        // SAFETY: By the type invariant of `Item`, which lives until the work is disabled.
        unsafe { bindings::rdma_queue_work(self.0.work.get()) }
    }

    /// The task.
    pub fn task(&self) -> &T {
        &self.0.task
    }
}
