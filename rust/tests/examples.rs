// SPDX-License-Identifier: GPL-2.0

//! What scripts/examples makes of the examples in the documentation of the crate `rdma`.

include!(concat!(env!("RDMA_TESTS_DIR"), "/examples_generated.rs"));
