// SPDX-License-Identifier: GPL-2.0

//! Completion queues of the RDMA core, and what stands around them, for kernel code in Rust.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)
//!
//! # The window
//!
//! A [`client::Client`] is told of each RDMA device by `add` and loses it by `remove`. Everything
//! made in between carries the lifetime `'bound` of that window, so that nothing of it can be kept
//! beyond. What is dropped is taken down by the window itself, in the order the hardware needs and
//! in a context that may sleep; so *dropping never sleeps and never waits*, wherever it happens,
//! and `remove` returns once all is gone. What a client leaks it names in the log and takes down
//! as well; should that still be running, it can make nothing more: that is `ENODEV`.
//!
//! # The way of a work request
//!
//! 1. A [`request::WorkRequest`] owns a [`buffer::DmaBuffer`]. [`qp::QueuePair::post_send`] or
//!    [`qp::QueuePair::post_recv`] takes it.
//! 2. While it is in flight nobody holds it: the device may read and write the buffer.
//! 3. The RDMA core polls the completion queue, leased ([`pool::PooledCq`]) or one's own
//!    ([`cq::CompletionQueue`]), in the context that the type of the queue names, see
//!    [`context::PollContext`], and calls straight back into the request. A direct queue is polled by its
//!    owner, who may also take the completions off it without any handler, see [`poll`].
//! 4. [`qp::Handler::sent`] or [`qp::Handler::received`] gets the request back, by value, with the
//!    [`completion::Completion`]. It may look at the data, post the request again, or drop it.
//!
//! Every request that was posted comes back exactly once, whatever happens to the connection, the
//! queue pair or the device; also if the device forgets it.
//!
//! What could go wrong, and why it doesn't, is in [`hazards`]. What other interfaces to completion
//! queues have, and where it is here, is in [`api`].

// As the kernel's makefiles have it for its own crates, whatever builds this one.
#![warn(missing_docs)]
// What Kbuild passes by `-Zcrate-attr`, which rustdoc doesn't heed.
#![cfg_attr(doc, no_std, feature(asm_goto))]

/// Logs why a call was refused, but not every time if that goes on and on.
macro_rules! log_refusal {
    ($($args:tt)*) => {
        // SAFETY: May be called from any context.
        if unsafe { rdma_bindings::rdma_may_log() } {
            kernel::pr_err!($($args)*);
        }
    };
}

/// Says that what comes next is not on the way of most requests: its code is kept away from theirs, so that
/// theirs takes fewer cache lines.
#[cold]
#[inline(never)]
fn seldom() {}

#[macro_use]
mod numbers;

#[cfg(doc)]
pub mod api;
mod atomic;
pub mod buffer;
pub mod client;
pub mod cm;
pub mod completion;
pub mod context;
pub mod counter;
pub mod cq;
pub mod debugfs;
pub mod device;
pub mod event;
mod flight;
#[cfg(doc)]
pub mod hazards;
pub mod latch;
pub mod pd;
pub mod poll;
pub mod pool;
pub mod qp;
mod raw_cq;
mod raw_qp;
pub mod request;
mod teardown;
pub mod trace;
pub mod work;

/// The example of README.md, to be compiled with all others.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// Begins each line that this crate logs; the name of the device follows.
const __LOG_PREFIX: &[u8] = b"rdma\0";
