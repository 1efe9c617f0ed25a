// SPDX-License-Identifier: GPL-2.0
/*
 * The trace events, defined; and the functions by which Rust emits them.
 */
#define CREATE_TRACE_POINTS
#define CREATE_RUST_TRACE_POINTS
#include <trace/rdma_cq.h>
