// SPDX-License-Identifier: GPL-2.0

//! Drives RDMA traffic through completion queues, in every poll context, on every device.
//!
//! For each device: once a port is active, and for each poll context, pairs of queue pairs are
//! connected to each other and send each other messages, which are verified on arrival. A line a
//! context says what was counted; `status=pass` says that all of it is as it should be. Files in
//! debugfs show it again, and start further runs.

use kernel::{
    prelude::*,
    str::CStr,
    sync::Arc, //
};
use rdma::{
    client::Client,
    context::{
        MaySleep,
        MayWait, //
    },
    debugfs::Directory,
    device::Device,
    event::{
        Event,
        EventHandler,
        Listener, //
    },
    work::ScopedWork, //
};

mod config;
mod connect;
mod files;
mod payload;
mod queues;
mod report;
mod run;
mod stats;
mod traffic;

use config::{
    Config,
    Raw, //
};
use files::Files;
use run::Run;

rdma::module_client! {
    type: Exerciser,
    name: "cq_exerciser",
    authors: ["The rdma-cq authors"],
    description: "Drives RDMA traffic through completion queues in every poll context",
    license: "GPL",
    params: {
        qps: i64 {
            default: 8,
            description: "Pairs of queue pairs a poll context, 1 to 1024",
        },
        depth: i64 {
            default: 32,
            description: "Sends in flight a pair, 1 to 4096",
        },
        ops: i64 {
            default: 10000,
            description: "Sends a pair, 1 to 1000000000",
        },
        size: i64 {
            default: 64,
            description: "Bytes a send, 16 to 1048576",
        },
        vector: i64 {
            default: -1,
            description: "Completion vector to ask for, or -1 for any",
        },
        contexts: i64 {
            default: 7,
            description: "Sum of the poll contexts: 1 softirq, 2 workqueue, 4 unbound workqueue, 8 direct",
        },
        private: i64 {
            default: 0,
            description: "1: completion queues of its own, rather than leased from the device's pool",
        },
        signal: i64 {
            default: 1,
            description: "Of so many sends one asks for a completion, 1 to 16",
        },
    },
}

/// The module's parameters.
fn parameters() -> Raw {
    Raw {
        qps: module_parameters::qps.value(),
        depth: module_parameters::depth.value(),
        ops: module_parameters::ops.value(),
        size: module_parameters::size.value(),
        vector: module_parameters::vector.value(),
        contexts: module_parameters::contexts.value(),
        private: module_parameters::private.value(),
        signal: module_parameters::signal.value(),
    }
}

/// The client of the RDMA core that the module is.
struct Exerciser;

impl Client for Exerciser {
    type Data<'bound> = Exercised<'bound>;

    const NAME: &'static CStr = c"cq_exerciser";

    fn load() -> Result {
        Config::new(parameters()).map(drop)
    }

    fn add<'bound>(
        dev: &'bound Device<'bound>,
        may_wait: MayWait<'bound>,
    ) -> impl PinInit<Exercised<'bound>, Error> + 'bound {
        Exercised::start(dev, may_wait)
    }
}

/// What runs on one device.
struct Exercised<'bound> {
    _files: Option<Directory<'bound, Files<'bound>>>,
    _work: Arc<ScopedWork<'bound, Run<'bound>>>,
    _events: EventHandler<'bound, Wake<'bound>>,
}

impl<'bound> Exercised<'bound> {
    fn start(dev: &'bound Device<'bound>, may_wait: MayWait<'_>) -> Result<Self> {
        let run = Run::new(dev, Config::new(parameters())?);
        let work = Arc::new(ScopedWork::new(dev, run, may_wait.may_sleep())?, GFP_KERNEL)?;
        let events = EventHandler::new(dev, Wake(work.clone()), may_wait)?;
        let files = Files::new(dev, work.clone(), may_wait.may_sleep())
            // Traffic can do without.
            .inspect_err(|e| pr_warn!("{}: no files in debugfs: {:?}\n", dev.name(), e))
            .ok();
        // The port may be active already. If not, an event says when it is.
        work.enqueue();
        Ok(Self {
            _files: files,
            _work: work,
            _events: events,
        })
    }
}

/// Has the run look at the port again.
struct Wake<'bound>(Arc<ScopedWork<'bound, Run<'bound>>>);

impl<'bound> Listener<'bound> for Wake<'bound> {
    fn event(&self, event: Event<'_>, _: MaySleep<'_>) {
        if matches!(event, Event::PortActive(_) | Event::GidChange(_)) {
            self.0.enqueue();
        }
    }
}
