// SPDX-License-Identifier: GPL-2.0

//! How a work request ended.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_wc`)

use kernel::{
    fmt,
    prelude::*,
    str::CStr, //
};
use rdma_bindings as bindings;

/// How a work request ended: what its entry in the completion queue says.
///
/// C type: `struct ib_wc`.
pub struct Completion<'a>(&'a bindings::ib_wc);

impl<'a> Completion<'a> {
    pub(crate) fn new(wc: &'a bindings::ib_wc) -> Self {
        Self(wc)
    }

    /// Success, or why not.
    ///
    /// Of a failed request only the status and the vendor's code are defined, and only these are
    /// read.
    #[inline]
    pub fn result(&self) -> Result<Success, Failure> {
        if self.0.status == bindings::ib_wc_status_IB_WC_SUCCESS {
            Ok(Success {
                byte_len: self.0.byte_len,
            })
        } else {
            Err(Failure {
                status: self.0.status,
                vendor_err: self.0.vendor_err,
            })
        }
    }
}

/// The details of a request that succeeded.
#[derive(Clone, Copy, Debug)]
pub struct Success {
    byte_len: u32,
}

impl Success {
    /// How many bytes were received. Of a send, nothing is defined.
    #[inline]
    pub fn byte_len(&self) -> u32 {
        self.byte_len
    }
}

/// Why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    status: bindings::ib_wc_status,
    vendor_err: u32,
}

impl Failure {
    /// Whether the request was only given back, since the queue pair ended before its turn came.
    #[inline]
    pub fn is_flush(&self) -> bool {
        self.status == bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR
    }

    /// The status, as the driver reported it. C type: `enum ib_wc_status`.
    pub fn status(&self) -> u32 {
        self.status
    }

    /// The vendor's own code.
    pub fn vendor_err(&self) -> u32 {
        self.vendor_err
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: Takes any number and returns a static string.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_wc_status_msg(self.status)) };
        write!(
            f,
            "{} (status {}, vendor error {:#x})",
            text.to_str().unwrap_or("?"),
            self.status,
            self.vendor_err
        )
    }
}
