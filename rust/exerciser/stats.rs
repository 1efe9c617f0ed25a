// SPDX-License-Identifier: GPL-2.0

//! What is counted on a queue pair.

#![forbid(unsafe_code)]

use kernel::prelude::*;
use rdma::counter::Counter;

/// The counters of one queue pair. They have a cache line of their own: those of another queue pair may
/// be counted on another CPU at the same time.
#[repr(align(64))]
pub(crate) struct Stats {
    /// Requests that were to be posted, and attempts to have one more than all.
    begun: Counter,
    /// Requests that were begun and aren't posted: refused, or waiting until they may be.
    pub(crate) unposted: Counter,
    /// Sends that succeeded.
    pub(crate) sent: Counter,
    /// Messages that arrived.
    pub(crate) received: Counter,
    /// Messages that aren't what was sent, or came out of turn.
    pub(crate) corrupt: Counter,
    /// Requests that came back unused.
    pub(crate) flushed: Counter,
    /// Requests that failed otherwise.
    pub(crate) failed: Counter,
    /// Handlers that ran in another context than the queue's.
    pub(crate) wrong_ctx: Counter,
}

impl Stats {
    pub(crate) fn new() -> Self {
        Self {
            begun: Counter::new(),
            unposted: Counter::new(),
            sent: Counter::new(),
            received: Counter::new(),
            corrupt: Counter::new(),
            flushed: Counter::new(),
            failed: Counter::new(),
            wrong_ctx: Counter::new(),
        }
    }

    /// Whether one more request is to be posted, of `ops` in all.
    pub(crate) fn begin_one(&self, ops: u32) -> bool {
        self.begun.add_one() < u64::from(ops)
    }

    /// How many more requests are to be posted, of `ops` in all, if there are `number` to do so.
    pub(crate) fn begin(&self, number: usize, ops: u32) -> usize {
        let left = u64::from(ops).saturating_sub(self.begun.add(number as u64));
        // What doesn't fit is more than `number`.
        usize::try_from(left).unwrap_or(number).min(number)
    }

    /// Requests posted, of `ops` in all.
    pub(crate) fn posted(&self, ops: u32) -> u64 {
        self.begun
            .get()
            .min(ops.into())
            .saturating_sub(self.unposted.get())
    }

    /// Requests that came back, however they ended.
    pub(crate) fn completed(&self) -> u64 {
        self.sent.get() + self.received.get() + self.flushed.get() + self.failed.get()
    }
}

/// Each power of two is cut into 2^5 equal parts: what is read is 3 % off at most.
const PART_BITS: u32 = 5;
const PARTS: usize = 1 << PART_BITS;
const BUCKETS: usize = (64 - PART_BITS as usize + 1) * PARTS;

/// How many lengths a number of 64 bits can have, none among them.
const POWERS: usize = u64::BITS as usize + 1;

/// How long sends took, in nanoseconds.
pub(crate) struct Histogram {
    buckets: KVVec<Counter>,
}

impl Histogram {
    pub(crate) fn new() -> Result<Self> {
        let mut buckets = KVVec::with_capacity(BUCKETS, GFP_KERNEL)?;
        for _ in 0..BUCKETS {
            buckets.push(Counter::new(), GFP_KERNEL)?;
        }
        Ok(Self { buckets })
    }

    pub(crate) fn record(&self, nanos: u64) {
        if let Some(bucket) = self.buckets.get(bucket_of(nanos)) {
            bucket.add_one();
        }
    }

    /// How many sends took how long, by powers of two: entry `n` counts those whose time in
    /// nanoseconds has `n` bits.
    pub(crate) fn powers(&self) -> [u64; POWERS] {
        let mut powers = [0; POWERS];
        for (index, bucket) in self.buckets.iter().enumerate() {
            // No bucket has numbers of different lengths.
            let bits = u64::BITS - last_of(index).leading_zeros();
            if let Some(power) = powers.get_mut(bits as usize) {
                *power += bucket.get();
            }
        }
        powers
    }

    /// The least number of nanoseconds that `percent` of all sends didn't take longer than, as far
    /// as the buckets tell. Zero if there were none.
    pub(crate) fn percentile(&self, percent: u64) -> u64 {
        let total: u64 = self.buckets.iter().map(Counter::get).sum();
        let rank = total.saturating_mul(percent).div_ceil(100);
        let mut seen = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += bucket.get();
            if seen >= rank && seen > 0 {
                return last_of(index);
            }
        }
        0
    }
}

fn bucket_of(value: u64) -> usize {
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(PART_BITS + 1);
    // The shifted value is below 2 * PARTS, so nothing is lost.
    (shift as usize) * PARTS + (value >> shift) as usize
}

/// The largest value that falls into a bucket.
fn last_of(index: usize) -> u64 {
    let shift = (index / PARTS).saturating_sub(1);
    let next_part = (index - shift * PARTS + 1) as u64;
    // The last bucket ends where the numbers do.
    next_part.wrapping_shl(shift as u32).wrapping_sub(1)
}
