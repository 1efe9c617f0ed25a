// SPDX-License-Identifier: GPL-2.0

//! Counting on the way of a request.
//!
//! C header: [`include/linux/atomic.h`](srctree/include/linux/atomic.h)

use kernel::sync::atomic::{
    Atomic,
    Relaxed, //
};

use crate::atomic;

/// A number that handlers on several CPUs may count with, each at the cost of one instruction.
///
/// It orders nothing but itself. Counting past 2^64 - 1 begins again with 0. All of it may be done in
/// any context.
///
/// ```
/// use rdma::counter::Counter;
///
/// let completions = Counter::new();
/// assert_eq!(completions.add_one(), 0);
/// assert_eq!(completions.add_one(), 1);
/// completions.sub_one();
/// assert_eq!(completions.add(16), 1);
/// assert_eq!(completions.get(), 17);
/// ```
///
/// C type: `atomic64_t`.
pub struct Counter(Atomic<u64>);

impl Counter {
    /// Makes one that begins with 0.
    pub const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// Adds one. Returns what it was before.
    ///
    /// C function: `atomic64_fetch_inc_relaxed()`.
    #[inline]
    pub fn add_one(&self) -> u64 {
        self.add(1)
    }

    /// Adds so many. Returns what it was before.
    ///
    /// C function: `atomic64_fetch_add_relaxed()`.
    #[inline]
    pub fn add(&self, number: u64) -> u64 {
        atomic::fetch_add_relaxed(&self.0, number)
    }

    /// Takes one away.
    ///
    /// C function: `atomic64_dec()`.
    #[inline]
    pub fn sub_one(&self) {
        atomic::fetch_add_relaxed(&self.0, u64::MAX);
    }

    /// What it is now.
    ///
    /// C function: `atomic64_read()`.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Default for Counter {
    fn default() -> Self {
        Self::new()
    }
}
