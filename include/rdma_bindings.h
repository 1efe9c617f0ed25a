/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What bindgen reads to make the crate `rdma_bindings`: the interface of the RDMA core to kernel
 * users.
 */
#ifndef _RDMA_CQ_RDMA_BINDINGS_H
#define _RDMA_CQ_RDMA_BINDINGS_H

#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>
#include <trace/rdma_cq.h>

/* Where code may be running. */
enum rdma_execution_context {
	RDMA_EXECUTION_OTHER,
	RDMA_EXECUTION_SOFTIRQ,
	/* Of a workqueue, and free to sleep. */
	RDMA_EXECUTION_WORKER,
};

/* As define_trace.h has them for CREATE_RUST_TRACE_POINTS. */
void rust_do_trace_rdma_cq_lease(const struct ib_cq *cq, u32 nr_cqe);
void rust_do_trace_rdma_cq_put(const struct ib_cq *cq, u32 nr_cqe);
void rust_do_trace_rdma_cq_post(const struct ib_device *dev, u32 qpn, bool recv, u32 len);
void rust_do_trace_rdma_cq_complete(const struct ib_device *dev, u32 qpn, bool recv, u32 status);
void rust_do_trace_rdma_cq_run_start(const struct ib_device *dev, u32 poll_ctx, u64 ops);
void rust_do_trace_rdma_cq_run_end(const struct ib_device *dev, u32 poll_ctx, u64 ops);

#endif
