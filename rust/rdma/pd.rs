// SPDX-License-Identifier: GPL-2.0

//! Protection domains.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_pd`)

use core::ptr::NonNull;
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::Arc, //
};
use rdma_bindings as bindings;

use crate::{
    context::MaySleep,
    device::{
        Device,
        Name, //
    },
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    }, //
};

/// A protection domain: what the memory and the queue pairs that belong together share.
///
/// A counted handle. Each queue pair has one of its own, so it doesn't matter in which order they
/// are dropped. C type: `struct ib_pd`.
#[derive(Clone)]
pub struct ProtectionDomain<'bound>(Arc<Owned<'bound, Pd>>);

/// # Invariants
///
/// `raw` is valid until `destroy` succeeds.
struct Pd {
    node: Node,
    raw: NonNull<bindings::ib_pd>,
}

// SAFETY: The RDMA core does its own locking.
unsafe impl Send for Pd {}
// SAFETY: As above.
unsafe impl Sync for Pd {}

// SAFETY: `node` is part of the object, and nothing else refers to it after the kernel let go.
unsafe impl Resource for Pd {
    const KIND: Kind = Kind::ProtectionDomain;
    const IMMEDIATE: bool = true;

    fn node(&self) -> &Node {
        &self.node
    }

    unsafe fn destroy(&self) -> Fate {
        // SAFETY: By the type invariant. Each queue pair holds a handle, so none is left.
        let result = to_result(unsafe {
            bindings::ib_dealloc_pd_user(self.raw.as_ptr(), core::ptr::null_mut())
        });
        if let Err(e) = result {
            // SAFETY: By the type invariant, and since it was not deallocated.
            let name = unsafe { Name::of((*self.raw.as_ptr()).device) };
            pr_err!(
                "{}: ib_dealloc_pd: {:?}: the protection domain is leaked\n",
                name,
                e
            );
        }
        Fate::Free
    }
}

impl<'bound> ProtectionDomain<'bound> {
    /// Allocates a protection domain. Sleeps.
    ///
    /// The keys that open all of memory to the remote side (`IB_PD_UNSAFE_GLOBAL_RKEY`) are not
    /// offered.
    ///
    /// C functions: `ib_alloc_pd()`, and `ib_dealloc_pd()` when the last handle is gone.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, those of the driver, `EDEADLK` where sleeping is not possible.
    pub fn new(dev: &'bound Device<'bound>, may_sleep: MaySleep<'_>) -> Result<Self> {
        may_sleep.check("ProtectionDomain::new")?;
        // SAFETY: The device is valid, and the owner's name outlives what is made.
        let raw = from_err_ptr(unsafe {
            bindings::__ib_alloc_pd(dev.as_raw(), 0, dev.owner().as_char_ptr())
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        let pd = KBox::new(
            Pd {
                node: Node::new::<Pd>(),
                raw,
            },
            GFP_KERNEL,
        )
        .inspect_err(|_| {
            // SAFETY: The protection domain is new, and nobody else knows it.
            unsafe { bindings::ib_dealloc_pd_user(raw.as_ptr(), core::ptr::null_mut()) };
        })?;
        // INVARIANT: `raw` is valid, and given back by `destroy` only.
        Ok(Self(Arc::new(
            Register::enroll(dev, KBox::into_pin(pd))?,
            GFP_KERNEL,
        )?))
    }

    /// The device of the protection domain.
    pub fn device(&self) -> &'bound Device<'bound> {
        self.0.device()
    }

    /// The kernel holds on to it: nobody takes it down any more.
    pub(crate) fn abandon(&self) {
        self.0.abandon();
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.0.raw.as_ptr()
    }

    /// The key by which the device reaches the memory that this kernel maps for it.
    pub(crate) fn local_dma_lkey(&self) -> u32 {
        // SAFETY: By the type invariant of `Pd`; the key doesn't change.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }
}
