// SPDX-License-Identifier: GPL-2.0

//! KUnit tests of the crate `rdma`, on a fake RDMA device that does as it is told. Those of [`cases`]
//! run on devices of the kernel's own, which have to be there.
//!
//! Loading the module runs them; the kernel's log has the results, as KTAP.

use kernel::prelude::*;

mod as_one;
mod buffer;
mod cases;
mod chain;
mod client;
mod completion;
mod cq;
mod debugfs;
mod device;
mod event;
mod examples;
mod fake;
mod flight;
mod harness;
mod latch;
mod leak;
mod lease;
mod post;
mod qp;
mod teardown;
mod work;

module! {
    type: Tests,
    name: "rdma_kunit",
    authors: ["The rdma-cq authors"],
    description: "KUnit tests of the Rust abstractions of the RDMA core",
    license: "GPL",
}

struct Tests;

impl kernel::Module for Tests {
    fn init(_: &'static ThisModule) -> Result<Self> {
        fake::init();
        Ok(Self)
    }
}
