// SPDX-License-Identifier: GPL-2.0

//! The completion queues of a run: leased from the device's pool, or its own.

#![forbid(unsafe_code)]

use core::num::NonZero;
use kernel::{
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Release, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    context::{
        Direct,
        MaySleep,
        MayWait, //
    },
    cq::{
        CompletionQueue,
        Entries, //
    },
    device::Device,
    poll::PollSlot,
    pool::PooledCq,
    work::{
        ScopedWork,
        Task, //
    }, //
};

use crate::{
    config::Config,
    traffic::Promise, //
};

/// How many entries a queue of the run's own has at least, unless the device has no such queues.
const CAPACITY: u32 = 1024;

/// What queue pairs of a run stand on.
pub(crate) struct Queues<'bound, C: Promise> {
    private: bool,
    vector: Option<u32>,
    leases: u32,
    /// The numbers of the distinct queues that leases came from.
    leased: KVec<u32>,
    own: KVec<CompletionQueue<'bound, C>>,
    /// Of direct queues: what polls them, until this is dropped.
    pollers: KVec<ScopedWork<'bound, Poller<'bound>>>,
}

impl<'bound, C: Promise> Queues<'bound, C> {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            private: config.private,
            vector: config.vector,
            leases: 0,
            leased: KVec::new(),
            own: KVec::new(),
            pollers: KVec::new(),
        }
    }

    /// How many distinct queues there are.
    pub(crate) fn number(&self) -> usize {
        self.leased.len() + self.own.len()
    }

    /// How many leases were taken.
    pub(crate) fn leases(&self) -> u32 {
        self.leases
    }

    /// The completion vector to ask for.
    pub(crate) fn vector(&self) -> Option<u32> {
        self.vector
    }

    /// Room for `number` completions of a queue pair. Sleeps.
    pub(crate) fn entries(
        &mut self,
        dev: &'bound Device<'bound>,
        number: u32,
        may_sleep: MaySleep<'_>,
    ) -> Result<Entries<'bound, C>> {
        if self.private {
            return self.own(dev, number, may_sleep);
        }
        C::entries(self, dev, number, may_sleep)
    }

    /// A lease.
    pub(crate) fn leased(&mut self, lease: PooledCq<'bound, C>) -> Result<Entries<'bound, C>> {
        self.leases += 1;
        if !self.leased.contains(&lease.id()) {
            self.leased.push(lease.id(), GFP_KERNEL)?;
        }
        Ok(lease.into())
    }

    /// A queue of the run's own: a new one as long as there are fewer than completion vectors, then the one
    /// that has most room.
    pub(crate) fn own(
        &mut self,
        dev: &'bound Device<'bound>,
        number: u32,
        may_sleep: MaySleep<'_>,
    ) -> Result<Entries<'bound, C>> {
        if u32::try_from(self.own.len())? >= dev.num_comp_vectors() {
            let room = self
                .own
                .iter()
                .max_by_key(|cq| cq.available())
                .filter(|cq| cq.available() >= number);
            if let Some(cq) = room {
                return Ok(cq.into());
            }
        }
        let capacity = number.max(CAPACITY.min(dev.max_cqe()));
        // As for a lease, it is a hint.
        let vector = self
            .vector
            .and_then(|vector| vector.checked_rem(dev.num_comp_vectors()));
        let cq = CompletionQueue::create(dev, capacity, vector, may_sleep)?;
        C::poll(self, dev, &cq, may_sleep)?;
        let entries = (&cq).into();
        self.own.push(cq, GFP_KERNEL)?;
        Ok(entries)
    }
}

impl<'bound> Queues<'bound, Direct> {
    /// Has a worker poll a queue for as long as the run goes on.
    pub(crate) fn poll(
        &mut self,
        dev: &'bound Device<'bound>,
        cq: &CompletionQueue<'bound, Direct>,
        may_sleep: MaySleep<'_>,
    ) -> Result {
        let poller = Poller {
            cq: cq.clone(),
            stop: Atomic::new(false),
        };
        let work = ScopedWork::new(dev, Ok::<_, Error>(poller), may_sleep)?;
        work.enqueue();
        self.pollers.push(work, GFP_KERNEL)?;
        Ok(())
    }
}

/// Polls a direct queue.
struct Poller<'bound> {
    cq: CompletionQueue<'bound, Direct>,
    stop: Atomic<bool>,
}

/// How many completions are handled before others get the CPU.
const BUDGET: NonZero<u16> = NonZero::<u16>::MIN.saturating_add(255);
/// How long a poller sleeps when there is nothing to be done, and after a full budget.
const REST: Delta = Delta::from_micros(20);

impl<'bound> Task<'bound> for Poller<'bound> {
    /// Now by hand, now by handlers. What is polled by hand gets to the handlers as well, since nobody
    /// takes it.
    fn run(&self, _: MayWait<'_>) {
        let mut slots = [const { PollSlot::new() }; 16];
        while !self.stop.load(Acquire) {
            match self.cq.poll(&mut slots) {
                Ok(polled) => drop(polled),
                Err(e) => {
                    pr_err!("{}: poll: {:?}\n", self.cq.device().name(), e);
                    return;
                }
            }
            self.cq.process(BUDGET);
            fsleep(REST);
        }
    }

    fn stop(&self) {
        self.stop.store(true, Release);
    }
}
