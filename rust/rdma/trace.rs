// SPDX-License-Identifier: GPL-2.0

//! Trace events, in the group `rdma_cq`.
//!
//! Header: `include/trace/rdma_cq.h`. An event that is off costs a jump that is patched out.

use rdma_bindings as bindings;

use crate::{
    context::PollContext,
    device::Device, //
};

/// Declares the function that emits an event, as the kernel's `declare_trace!` does for the events
/// that its own bindings know.
macro_rules! declare_events {
    ($(unsafe fn $name:ident($($arg:ident: $type:ty),*) = $tracepoint:ident, $do_trace:ident;)*) => {$(
        /// What the event says is only asked for if it is on.
        ///
        /// # Safety
        ///
        /// The pointers are valid.
        #[inline(always)]
        pub(crate) unsafe fn $name(args: impl FnOnce() -> ($($type,)*)) {
            // Where jumps can't be patched. The kernel's macro does the same, by a call of a helper in C.
            #[cfg(not(CONFIG_JUMP_LABEL))]
            // SAFETY: The key of a tracepoint may always be looked at. A volatile read of a word is a relaxed
            // atomic load.
            let on = unsafe {
                let key = &raw const bindings::$tracepoint.key.key;
                (&raw const (*key).enabled.counter).read_volatile() > 0
            };
            #[cfg(CONFIG_JUMP_LABEL)]
            // SAFETY: The key of a tracepoint may always be looked at.
            let on = unsafe {
                kernel::jump_label::static_branch_unlikely!(
                    bindings::$tracepoint,
                    kernel::bindings::tracepoint,
                    key
                )
            };
            if on {
                crate::seldom();
                let ($($arg,)*) = args();
                // SAFETY: By the function's requirements.
                unsafe { bindings::$do_trace($($arg),*) };
            }
        }
    )*};
}

declare_events! {
    unsafe fn lease(cq: *const bindings::ib_cq, nr_cqe: u32)
        = __tracepoint_rdma_cq_lease, rust_do_trace_rdma_cq_lease;
    unsafe fn put(cq: *const bindings::ib_cq, nr_cqe: u32)
        = __tracepoint_rdma_cq_put, rust_do_trace_rdma_cq_put;
    unsafe fn post(dev: *const bindings::ib_device, qpn: u32, recv: bool, len: u32)
        = __tracepoint_rdma_cq_post, rust_do_trace_rdma_cq_post;
    unsafe fn complete(dev: *const bindings::ib_device, qpn: u32, recv: bool, status: u32)
        = __tracepoint_rdma_cq_complete, rust_do_trace_rdma_cq_complete;
    unsafe fn start(dev: *const bindings::ib_device, poll_ctx: u32, ops: u64)
        = __tracepoint_rdma_cq_run_start, rust_do_trace_rdma_cq_run_start;
    unsafe fn end(dev: *const bindings::ib_device, poll_ctx: u32, ops: u64)
        = __tracepoint_rdma_cq_run_end, rust_do_trace_rdma_cq_run_end;
}

/// Says that traffic begins on a device: `ops` operations, handled in the context `C`. May be called
/// from any context.
///
/// Trace event: `rdma_cq:rdma_cq_run_start`.
pub fn run_start<C: PollContext>(dev: &Device<'_>, ops: u64) {
    // SAFETY: The device is valid.
    unsafe { start(|| (dev.as_raw(), C::RAW, ops)) };
}

/// Says that traffic ended on a device, after `ops` operations. May be called from any context.
///
/// Trace event: `rdma_cq:rdma_cq_run_end`.
pub fn run_end<C: PollContext>(dev: &Device<'_>, ops: u64) {
    // SAFETY: The device is valid.
    unsafe { end(|| (dev.as_raw(), C::RAW, ops)) };
}
