// SPDX-License-Identifier: GPL-2.0

//! The parameters of the module, and what they may be.

#![forbid(unsafe_code)]

use core::ops::RangeInclusive;
use kernel::{
    fmt,
    prelude::*,
    str::{
        parse_int::ParseInt,
        BStr, //
    }, //
};

use rdma::qp::MAX_CHAIN;

use crate::payload;

/// What to do on each device.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    /// Pairs of queue pairs a poll context.
    pub(crate) qps: u32,
    /// Sends in flight a pair.
    pub(crate) depth: u32,
    /// Sends a pair.
    pub(crate) ops: u32,
    /// Bytes a send.
    pub(crate) size: usize,
    /// A hint at the completion vector, or any.
    pub(crate) vector: Option<u32>,
    /// The poll contexts, a bit each.
    contexts: u32,
    /// Whether queues are the run's own, rather than leased.
    pub(crate) private: bool,
    /// Of how many sends one asks for a completion.
    pub(crate) signal: usize,
}

/// A poll context that traffic can run in, and its bit in the parameter `contexts`.
#[derive(Clone, Copy)]
pub(crate) enum Context {
    Softirq = 1 << 0,
    Workqueue = 1 << 1,
    Unbound = 1 << 2,
    /// Polled by the run itself.
    Direct = 1 << 3,
}

impl Context {
    pub(crate) const ALL: [Context; 4] = [
        Context::Softirq,
        Context::Workqueue,
        Context::Unbound,
        Context::Direct,
    ];
}

const QPS: RangeInclusive<i64> = 1..=1024;
const DEPTH: RangeInclusive<i64> = 1..=4096;
const OPS: RangeInclusive<i64> = 1..=1_000_000_000;
const SIZE: RangeInclusive<i64> = payload::MIN_SIZE..=1 << 20;
const VECTOR: RangeInclusive<i64> = -1..=i32::MAX as i64;
const CONTEXTS: RangeInclusive<i64> = 1..=15;
const PRIVATE: RangeInclusive<i64> = 0..=1;
const SIGNAL: RangeInclusive<i64> = 1..=MAX_CHAIN as i64;

/// The most memory that the buffers of one run may take.
const MAX_MEMORY: u64 = 256 << 20;

/// The parameters as they were given.
pub(crate) struct Raw {
    pub(crate) qps: i64,
    pub(crate) depth: i64,
    pub(crate) ops: i64,
    pub(crate) size: i64,
    pub(crate) vector: i64,
    pub(crate) contexts: i64,
    pub(crate) private: i64,
    pub(crate) signal: i64,
}

impl Raw {
    const KEYS: &'static str = "qps, depth, ops, size, vector, contexts, private, signal";

    /// The parameter of that name, and what it may be.
    fn parameter(&mut self, key: &[u8]) -> Option<(&mut i64, RangeInclusive<i64>)> {
        Some(match key {
            b"qps" => (&mut self.qps, QPS),
            b"depth" => (&mut self.depth, DEPTH),
            b"ops" => (&mut self.ops, OPS),
            b"size" => (&mut self.size, SIZE),
            b"vector" => (&mut self.vector, VECTOR),
            b"contexts" => (&mut self.contexts, CONTEXTS),
            b"private" => (&mut self.private, PRIVATE),
            b"signal" => (&mut self.signal, SIGNAL),
            _ => return None,
        })
    }

    /// Takes over the parameters in `line`: words like `qps=8`, with blanks between them, and numbers
    /// as `insmod` takes them.
    ///
    /// # Errors
    ///
    /// `EINVAL`, with a line in the log that names the word, and what is allowed.
    pub(crate) fn read(&mut self, line: &[u8]) -> Result {
        let words = line.split(u8::is_ascii_whitespace);
        for word in words.filter(|word| !word.is_empty()) {
            let mut parts = word.splitn(2, |byte| *byte == b'=');
            let (Some(key), Some(value)) = (parts.next(), parts.next()) else {
                pr_err!(
                    "'{}' is not a key=value: the keys are {}\n",
                    BStr::from_bytes(word),
                    Self::KEYS
                );
                return Err(EINVAL);
            };
            let Some((parameter, range)) = self.parameter(key) else {
                pr_err!(
                    "{}: there is no such key: the keys are {}\n",
                    BStr::from_bytes(word),
                    Self::KEYS
                );
                return Err(EINVAL);
            };
            *parameter = i64::from_str(BStr::from_bytes(value)).map_err(|_| {
                pr_err!(
                    "{} is no number in the range {}..={}\n",
                    BStr::from_bytes(word),
                    range.start(),
                    range.end()
                );
                EINVAL
            })?;
        }
        Ok(())
    }
}

impl Config {
    /// Checks the parameters.
    ///
    /// # Errors
    ///
    /// `EINVAL`, with a line in the log that names the parameter, its value and its range.
    pub(crate) fn new(raw: Raw) -> Result<Self> {
        let config = Self {
            qps: number("qps", raw.qps, QPS)?,
            depth: number("depth", raw.depth, DEPTH)?,
            ops: number("ops", raw.ops, OPS)?,
            size: number("size", raw.size, SIZE)?,
            vector: match number::<i64>("vector", raw.vector, VECTOR)? {
                -1 => None,
                vector => Some(u32::try_from(vector)?),
            },
            contexts: number("contexts", raw.contexts, CONTEXTS)?,
            private: number::<i64>("private", raw.private, PRIVATE)? == 1,
            signal: number("signal", raw.signal, SIGNAL)?,
        };
        let requests_of_pair = u64::from(config.send_depth()) + u64::from(config.recv_depth());
        let requests = u64::from(config.qps).saturating_mul(requests_of_pair);
        let max = MAX_MEMORY.checked_div(requests).unwrap_or(MAX_MEMORY);
        if u64::try_from(config.size)? > max {
            pr_err!(
                "size={} is out of range {}..={} with qps={} depth={}: the buffers may take {} MiB\n",
                config.size,
                SIZE.start(),
                max,
                config.qps,
                config.depth,
                MAX_MEMORY >> 20
            );
            return Err(EINVAL);
        }
        Ok(config)
    }

    /// How many sends all pairs do together.
    pub(crate) fn total_ops(&self) -> u64 {
        u64::from(self.ops).saturating_mul(self.qps.into())
    }

    /// How many sends of a pair are in flight at most.
    pub(crate) fn send_depth(&self) -> u32 {
        self.depth.min(self.ops)
    }

    /// How many receives of a pair are posted at most: more than sends, so that one is there for the
    /// next send while the last one's is on its way back to the queue.
    pub(crate) fn recv_depth(&self) -> u32 {
        self.depth.saturating_mul(2).min(self.ops)
    }

    pub(crate) fn has(&self, context: Context) -> bool {
        self.contexts & context as u32 != 0
    }
}

/// As they can be given again.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!(
            "qps={} depth={} ops={} size={} vector={} contexts={} private={} signal={}",
            self.qps,
            self.depth,
            self.ops,
            self.size,
            self.vector.map_or(-1, i64::from),
            self.contexts,
            u32::from(self.private),
            self.signal
        ))
    }
}

fn number<T: TryFrom<i64>>(name: &str, value: i64, range: RangeInclusive<i64>) -> Result<T> {
    if range.contains(&value) {
        if let Ok(value) = T::try_from(value) {
            return Ok(value);
        }
    }
    pr_err!(
        "{}={} is out of range {}..={}\n",
        name,
        value,
        range.start(),
        range.end()
    );
    Err(EINVAL)
}
