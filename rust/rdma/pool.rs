// SPDX-License-Identifier: GPL-2.0

//! Leases of the completion queues that a device's users share.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_cq_pool_get()`)

use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::from_err_ptr,
    prelude::*, //
};
use rdma_bindings as bindings;

use crate::{
    context::{
        MaySleep,
        PollContext,
        Poolable, //
    },
    cq::check_capacity,
    device::Device,
    raw_cq::RawCq,
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    },
    trace, //
};

/// A number of entries, claimed in a completion queue that is shared through the device's pool.
///
/// The RDMA core polls the queue, and its owner can't:
///
/// ```compile_fail,E0599
/// fn poll(cq: rdma::pool::PooledCq<'_, rdma::context::Softirq>) {
///     cq.poll(&mut []);
/// }
/// ```
///
/// The entries go back to the pool exactly once, when the lease or the queue pair that took it is
/// gone. A lease can't leave the window in which the device may be used:
///
/// ```compile_fail,E0521
/// use rdma::{context::Softirq, pool::PooledCq};
///
/// fn keep(_: PooledCq<'static, Softirq>) {}
///
/// fn escape<'bound>(cq: PooledCq<'bound, Softirq>) {
///     keep(cq)
/// }
/// ```
///
/// C functions: `ib_cq_pool_get()`, `ib_cq_pool_put()`.
pub struct PooledCq<'bound, C: PollContext> {
    lease: Owned<'bound, Lease>,
    _context: PhantomData<C>,
}

/// # Invariants
///
/// `cq` is a pooled queue of a device whose clients haven't all been removed, in which `nr_cqe`
/// entries are claimed for this lease until `destroy` is called.
struct Lease {
    node: Node,
    cq: RawCq,
    nr_cqe: u32,
}

// SAFETY: `node` is part of the object, and the pool doesn't know the lease.
unsafe impl Resource for Lease {
    const KIND: Kind = Kind::Lease;
    const IMMEDIATE: bool = true;

    fn node(&self) -> &Node {
        &self.node
    }

    unsafe fn destroy(&self) -> Fate {
        // SAFETY: By the type invariant. The caller may sleep, so interrupts are enabled.
        unsafe {
            trace::put(|| (self.cq.as_raw(), self.nr_cqe));
            bindings::ib_cq_pool_put(self.cq.as_raw(), self.nr_cqe);
        }
        Fate::Free
    }
}

impl<'bound, C: Poolable> PooledCq<'bound, C> {
    /// Leases `nr_cqe` entries of a pooled completion queue. Sleeps.
    ///
    /// `vector` is a hint at the completion vector, any number, and is taken modulo
    /// [`Device::num_comp_vectors`], and by the kernel modulo the number of CPUs that are online; with
    /// `None` the kernel takes them in turns. If no queue of the pool has room
    /// the kernel allocates one for each vector, with 4096 entries or `nr_cqe`, whichever is more.
    ///
    /// C function: `ib_cq_pool_get()`.
    ///
    /// # Errors
    ///
    /// - `EINVAL` if `nr_cqe` isn't within 1 and [`Device::max_cqe`]: the kernel would allocate
    ///   queues until memory is gone.
    /// - `EOPNOTSUPP` if the device has no completion vectors.
    /// - `ENOMEM`, or the driver's error, if the pool has to grow and can't.
    /// - `EDEADLK` where sleeping is not possible.
    pub fn lease(
        dev: &'bound Device<'bound>,
        nr_cqe: u32,
        vector: Option<u32>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Self> {
        may_sleep.check("PooledCq::lease")?;
        check_capacity(dev, "nr_cqe", nr_cqe)?;
        if dev.num_comp_vectors() == 0 {
            log_refusal!("{}: no completion vectors: no pooled queues\n", dev.name());
            return Err(EOPNOTSUPP);
        }
        // The kernel takes any negative number for "none".
        let hint = vector
            .and_then(|vector| vector.checked_rem(dev.num_comp_vectors()))
            .map_or(Ok(-1), c_int::try_from)?;

        // If a CPU went offline meanwhile, the kernel could look for a vector for which it allocates
        // no queue any more, and go on allocating.
        //
        // SAFETY: We may sleep, and the lock is released below.
        unsafe { bindings::rdma_cpus_read_lock() };
        // SAFETY: The device is valid, we may sleep, and the arguments were checked above.
        let cq = unsafe { bindings::ib_cq_pool_get(dev.as_raw(), nr_cqe, hint, C::RAW) };
        // SAFETY: Taken above.
        unsafe { bindings::rdma_cpus_read_unlock() };
        let cq = NonNull::new(from_err_ptr(cq)?).ok_or(ENOMEM)?;

        let lease = KBox::new(
            Lease {
                node: Node::new::<Lease>(),
                // SAFETY: The entries were just claimed, so the queue stays.
                cq: unsafe { RawCq::new(cq) },
                nr_cqe,
            },
            GFP_KERNEL,
        )
        .inspect_err(|_| {
            // SAFETY: The entries were just claimed.
            unsafe { bindings::ib_cq_pool_put(cq.as_ptr(), nr_cqe) };
        })?;
        // SAFETY: The queue is valid.
        unsafe { trace::lease(|| (cq.as_ptr(), nr_cqe)) };
        // INVARIANT: The entries were claimed above. The window, and so the lease, ends before the
        // device's last client is removed.
        Ok(Self {
            lease: Register::enroll(dev, KBox::into_pin(lease))?,
            _context: PhantomData,
        })
    }
}

impl<'bound, C: PollContext> PooledCq<'bound, C> {
    /// The device of the queue.
    pub fn device(&self) -> &'bound Device<'bound> {
        self.lease.device()
    }

    /// How many entries are leased.
    pub fn nr_cqe(&self) -> u32 {
        self.lease.nr_cqe
    }

    /// How many entries the queue has, for all who share it.
    ///
    /// C field: `ib_cq.cqe`.
    pub fn capacity(&self) -> u32 {
        self.raw().capacity()
    }

    /// The completion vector of the queue.
    pub fn vector(&self) -> u32 {
        self.raw().vector()
    }

    /// The number by which `rdma resource show cq` and the trace events know the queue.
    pub fn id(&self) -> u32 {
        self.raw().id()
    }

    pub(crate) fn raw(&self) -> RawCq {
        self.lease.cq
    }

    /// The kernel holds on to the queue: the entries are never given back.
    pub(crate) fn abandon(&self) {
        self.lease.abandon();
    }
}
