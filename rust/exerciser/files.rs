// SPDX-License-Identifier: GPL-2.0

//! The files in debugfs: what the last run found, and a way to start another.

#![forbid(unsafe_code)]

use kernel::{
    fmt,
    prelude::*,
    sync::Arc, //
};
use rdma::{
    context::MaySleep,
    debugfs::{
        Directory,
        File, //
    },
    device::Device,
    work::ScopedWork, //
};

use crate::{
    config::Config,
    run::Run, //
};

/// The files of a device.
pub(crate) struct Files<'bound>(Arc<ScopedWork<'bound, Run<'bound>>>);

impl<'bound> Files<'bound> {
    /// Makes the files. Sleeps.
    pub(crate) fn new(
        dev: &'bound Device<'bound>,
        work: Arc<ScopedWork<'bound, Run<'bound>>>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Directory<'bound, Self>> {
        let files = [
            File::new(c"report", Self::report),
            File::new(c"histogram", Self::histogram),
            File::new(c"run", Self::state).writable(Self::start),
        ];
        Directory::new(dev, Self(work), files, may_sleep)
    }

    /// The lines of the last run, as they are in the log.
    fn report(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.task().state().report.lines(f)
    }

    /// How long the sends of the last run took.
    fn histogram(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.task().state().report.histogram(f)
    }

    /// The parameters of the run that is on its way, or else of the last, and how far it is.
    fn state(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.task().state();
        f.write_fmt(fmt!("{}\nstate={}\n", state.config, state.phase.name()))
    }

    /// Starts a run, with the module's parameters where `line` has no others.
    fn start(&self, line: &[u8], _: MaySleep<'_>) -> Result {
        let mut parameters = crate::parameters();
        parameters.read(line)?;
        self.0.task().prepare(Config::new(parameters)?)?;
        self.0.enqueue();
        Ok(())
    }
}
