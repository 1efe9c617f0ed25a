// SPDX-License-Identifier: GPL-2.0

//! Queue pairs as the kernel knows them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_qp`)

use core::ptr::NonNull;
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*, //
};
use rdma_bindings as bindings;

use crate::{
    pd::ProtectionDomain,
    qp::Depths, //
};

/// A queue pair of the kernel. Dropping it does nothing.
///
/// # Invariants
///
/// `raw` is valid until [`Self::destroy`] succeeds.
#[derive(Clone, Copy)]
pub(crate) struct RawQp {
    raw: NonNull<bindings::ib_qp>,
}

// SAFETY: The RDMA core does its own locking.
unsafe impl Send for RawQp {}
// SAFETY: As above.
unsafe impl Sync for RawQp {}

impl RawQp {
    /// Creates a reliable connected queue pair, in RESET. Sleeps. C function: `ib_create_qp()`.
    ///
    /// # Safety
    ///
    /// `cq` is a completion queue of the device of `pd`. Both outlive the queue pair.
    pub(crate) unsafe fn new(
        pd: &ProtectionDomain<'_>,
        cq: *mut bindings::ib_cq,
        depths: Depths,
    ) -> Result<Self> {
        let mut attr = bindings::ib_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: bindings::ib_qp_cap {
                // Drivers differ in what they make of an empty queue.
                max_send_wr: depths.send.max(1),
                max_recv_wr: depths.recv.max(1),
                max_send_sge: 1,
                max_recv_sge: 1,
                ..Default::default()
            },
            sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
            qp_type: bindings::ib_qp_type_IB_QPT_RC,
            ..Default::default()
        };
        // SAFETY: All is of one device, and valid, by the function's requirements; the owner's name
        // outlives what is made.
        let raw = from_err_ptr(unsafe {
            bindings::ib_create_qp_kernel(pd.as_raw(), &mut attr, pd.device().owner().as_char_ptr())
        })?;
        // INVARIANT: It was just made.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
        })
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_qp {
        self.raw.as_ptr()
    }

    pub(crate) fn num(&self) -> u32 {
        // SAFETY: By the type invariant; the number doesn't change.
        unsafe { (*self.as_raw()).qp_num }
    }

    /// Sleeps. C function: `ib_modify_qp()`.
    pub(crate) fn modify(
        &self,
        attr: &mut bindings::ib_qp_attr,
        mask: bindings::ib_qp_attr_mask,
    ) -> Result {
        let mask = c_int::try_from(mask)?;
        // SAFETY: By the type invariant; the caller may sleep.
        to_result(unsafe { bindings::ib_modify_qp(self.as_raw(), attr, mask) })
    }

    /// From RESET, in which some drivers take receives and forget them, to INIT.
    pub(crate) fn init(&self, port: u32) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_INIT,
            port_num: port,
            qp_access_flags: 0,
            ..Default::default()
        };
        self.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE
                | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
                | bindings::ib_qp_attr_mask_IB_QP_PORT
                | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS,
        )
    }

    /// Has the device give back all that is in flight.
    pub(crate) fn flush(&self) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_ERR,
            ..Default::default()
        };
        self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE)
    }

    /// Sleeps. C function: `ib_destroy_qp()`.
    ///
    /// # Safety
    ///
    /// Not called again once it has succeeded, and nobody uses the queue pair then.
    pub(crate) unsafe fn destroy(&self) -> Result {
        // SAFETY: By the type invariant and the function's requirements; the caller may sleep.
        to_result(unsafe { bindings::ib_destroy_qp_user(self.as_raw(), core::ptr::null_mut()) })
    }
}
