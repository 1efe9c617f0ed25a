// SPDX-License-Identifier: GPL-2.0

//! Completion queues as the kernel knows them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cq`)

use core::ptr::NonNull;
use rdma_bindings as bindings;

use crate::context::PollContext;

/// A completion queue of the kernel. Dropping it does nothing.
///
/// # Invariants
///
/// The pointer is valid for as long as the lease or the queue that this is part of.
#[derive(Clone, Copy)]
pub(crate) struct RawCq(NonNull<bindings::ib_cq>);

// SAFETY: The RDMA core does its own locking.
unsafe impl Send for RawCq {}
// SAFETY: As above.
unsafe impl Sync for RawCq {}

impl RawCq {
    /// # Safety
    ///
    /// The pointer is valid for as long as what this becomes a part of.
    pub(crate) unsafe fn new(cq: NonNull<bindings::ib_cq>) -> Self {
        // INVARIANT: By the function's requirements.
        Self(cq)
    }

    pub(crate) fn as_raw(self) -> *mut bindings::ib_cq {
        self.0.as_ptr()
    }

    /// C field: `ib_cq.cqe`.
    pub(crate) fn capacity(self) -> u32 {
        // SAFETY: By the type invariant; the field doesn't change.
        u32::try_from(unsafe { (*self.as_raw()).cqe }).unwrap_or(0)
    }

    pub(crate) fn vector(self) -> u32 {
        // SAFETY: As in `capacity`.
        unsafe { (*self.as_raw()).comp_vector }
    }

    pub(crate) fn id(self) -> u32 {
        // SAFETY: As in `capacity`.
        unsafe { (*self.as_raw()).res.id }
    }

    /// Waits until no handler runs that a worker has begun. Sleeps.
    pub(crate) fn flush<C: PollContext>(self) {
        if C::RAW == bindings::ib_poll_context_IB_POLL_WORKQUEUE
            || C::RAW == bindings::ib_poll_context_IB_POLL_UNBOUND_WORKQUEUE
        {
            // SAFETY: By the type invariant, and in these contexts the union holds a work item.
            unsafe {
                kernel::bindings::flush_work((&raw mut (*self.as_raw()).__bindgen_anon_1).cast())
            };
        }
    }
}
