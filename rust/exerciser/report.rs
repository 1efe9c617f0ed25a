// SPDX-License-Identifier: GPL-2.0

//! What a run found: lines for the log, and the latencies.

#![forbid(unsafe_code)]

use kernel::{
    fmt,
    prelude::*,
    sync::Arc, //
};
use rdma::{
    client::Client,
    device::Name, //
};

use crate::{
    config::{
        Config,
        Context, //
    },
    traffic::Traffic,
    Exerciser, //
};

/// How a run ended, or a part of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Pass,
    Stopped,
    Fail,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Pass => "pass",
            Status::Stopped => "stopped",
            Status::Fail => "fail",
        }
    }

    /// The status of two parts together.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Status::Fail, _) | (_, Status::Fail) => Status::Fail,
            (Status::Stopped, _) | (_, Status::Stopped) => Status::Stopped,
            (Status::Pass, Status::Pass) => Status::Pass,
        }
    }
}

/// What happened in one context.
pub(crate) struct Line {
    pub(crate) device: Name,
    pub(crate) context: &'static str,
    pub(crate) cqs: usize,
    pub(crate) leases: u32,
    pub(crate) config: Config,
    pub(crate) ops: u64,
    pub(crate) lost: u64,
    pub(crate) corrupt: u64,
    pub(crate) flushed: u64,
    pub(crate) wrong_ctx: u64,
    pub(crate) ops_per_s: u64,
    /// Which has the latencies; none if it never began.
    pub(crate) traffic: Option<Arc<Traffic>>,
    pub(crate) status: Status,
}

impl Line {
    fn latency(&self, percent: u64) -> u64 {
        self.traffic
            .as_ref()
            .map_or(0, |traffic| traffic.latency.percentile(percent))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!(
            "{}: ctx={} cqs={} leases={} qps={} depth={} size={} ops={} lost={} corrupt={} \
             flushed={} wrong_ctx={} ops_per_s={} lat_p50_ns={} lat_p99_ns={} status={}",
            self.device,
            self.context,
            self.cqs,
            self.leases,
            self.config.qps,
            self.config.depth,
            self.config.size,
            self.ops,
            self.lost,
            self.corrupt,
            self.flushed,
            self.wrong_ctx,
            self.ops_per_s,
            self.latency(50),
            self.latency(99),
            self.status.name()
        ))
    }
}

/// The last line: all contexts together.
#[derive(Clone, Copy)]
pub(crate) struct Done {
    pub(crate) device: Name,
    pub(crate) contexts: u32,
    pub(crate) status: Status,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!(
            "{}: done contexts={} status={}",
            self.device,
            self.contexts,
            self.status.name()
        ))
    }
}

/// All lines of a run. Before the first there are none.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) lines: [Option<Line>; Context::ALL.len()],
    pub(crate) done: Option<Done>,
}

/// How long the bar is of the power of two that most sends fall into.
const BAR: u64 = 40;

impl Report {
    /// Writes how many sends took how long, a line a context and power of two.
    pub(crate) fn histogram(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines.iter().flatten() {
            let Some(latency) = line.traffic.as_ref().map(|traffic| &traffic.latency) else {
                continue;
            };
            let powers = latency.powers();
            let most = powers.iter().fold(1, |most, ops| most.max(*ops));
            let first = powers.iter().position(|ops| *ops > 0).unwrap_or(0);
            let end = powers
                .iter()
                .rposition(|ops| *ops > 0)
                .map_or(0, |last| last + 1);
            // The largest number that has as many bits.
            let mut to = 0u64;
            for (bits, ops) in powers.into_iter().enumerate() {
                if (first..end).contains(&bits) {
                    f.write_fmt(fmt!(
                        "ctx={:<10} from_ns={:<12} to_ns={:<12} ops={}",
                        line.context,
                        to - to / 2,
                        to,
                        ops
                    ))?;
                    for i in 0..ops.saturating_mul(BAR).div_ceil(most) {
                        f.write_str(if i == 0 { "\t#" } else { "#" })?;
                    }
                    f.write_str("\n")?;
                }
                to = (to << 1) | 1;
            }
        }
        Ok(())
    }

    /// Writes the lines as they are in the log, with the name of the module in front.
    pub(crate) fn lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Exerciser::NAME;
        for line in self.lines.iter().flatten() {
            f.write_fmt(fmt!("{}: {}\n", name, line))?;
        }
        if let Some(done) = &self.done {
            f.write_fmt(fmt!("{}: {}\n", name, done))?;
        }
        Ok(())
    }
}
