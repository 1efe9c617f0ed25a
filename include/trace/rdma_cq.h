/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace events of the crate rdma, which rust/rdma/trace.rs emits. Queues have the numbers that the
 * events of rdma_core and `rdma resource show` give them.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM rdma_cq

#if !defined(_RDMA_CQ_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _RDMA_CQ_TRACE_H

#include <linux/tracepoint.h>
#include <rdma/ib_verbs.h>

TRACE_EVENT(rdma_cq_lease,
	TP_PROTO(const struct ib_cq *cq, u32 nr_cqe),
	TP_ARGS(cq, nr_cqe),
	TP_STRUCT__entry(
		__string(dev, cq->device->name)
		__field(u32, id)
		__field(u32, nr_cqe)
		__field(u32, vector)
		__field(u32, poll_ctx)
	),
	TP_fast_assign(
		__assign_str(dev);
		__entry->id = cq->res.id;
		__entry->nr_cqe = nr_cqe;
		__entry->vector = cq->comp_vector;
		__entry->poll_ctx = cq->poll_ctx;
	),
	TP_printk("dev=%s cq.id=%u nr_cqe=%u comp_vector=%u poll_ctx=%s",
		  __get_str(dev), __entry->id, __entry->nr_cqe, __entry->vector,
		  __print_symbolic(__entry->poll_ctx,
				   { IB_POLL_SOFTIRQ, "softirq" },
				   { IB_POLL_WORKQUEUE, "workqueue" },
				   { IB_POLL_UNBOUND_WORKQUEUE, "unbound" },
				   { IB_POLL_DIRECT, "direct" }))
);

TRACE_EVENT(rdma_cq_put,
	TP_PROTO(const struct ib_cq *cq, u32 nr_cqe),
	TP_ARGS(cq, nr_cqe),
	TP_STRUCT__entry(
		__string(dev, cq->device->name)
		__field(u32, id)
		__field(u32, nr_cqe)
	),
	TP_fast_assign(
		__assign_str(dev);
		__entry->id = cq->res.id;
		__entry->nr_cqe = nr_cqe;
	),
	TP_printk("dev=%s cq.id=%u nr_cqe=%u", __get_str(dev), __entry->id, __entry->nr_cqe)
);

TRACE_EVENT(rdma_cq_post,
	TP_PROTO(const struct ib_device *dev, u32 qpn, bool recv, u32 len),
	TP_ARGS(dev, qpn, recv, len),
	TP_STRUCT__entry(
		__string(dev, dev->name)
		__field(u32, qpn)
		__field(u32, len)
		__field(bool, recv)
	),
	TP_fast_assign(
		__assign_str(dev);
		__entry->qpn = qpn;
		__entry->len = len;
		__entry->recv = recv;
	),
	TP_printk("dev=%s qp=%u %s len=%u", __get_str(dev), __entry->qpn,
		  __entry->recv ? "recv" : "send", __entry->len)
);

TRACE_EVENT(rdma_cq_complete,
	TP_PROTO(const struct ib_device *dev, u32 qpn, bool recv, u32 status),
	TP_ARGS(dev, qpn, recv, status),
	TP_STRUCT__entry(
		__string(dev, dev->name)
		__field(u32, qpn)
		__field(u32, status)
		__field(bool, recv)
	),
	TP_fast_assign(
		__assign_str(dev);
		__entry->qpn = qpn;
		__entry->status = status;
		__entry->recv = recv;
	),
	TP_printk("dev=%s qp=%u %s status=%u", __get_str(dev), __entry->qpn,
		  __entry->recv ? "recv" : "send", __entry->status)
);

DECLARE_EVENT_CLASS(rdma_cq_run,
	TP_PROTO(const struct ib_device *dev, u32 poll_ctx, u64 ops),
	TP_ARGS(dev, poll_ctx, ops),
	TP_STRUCT__entry(
		__string(dev, dev->name)
		__field(u32, poll_ctx)
		__field(u64, ops)
	),
	TP_fast_assign(
		__assign_str(dev);
		__entry->poll_ctx = poll_ctx;
		__entry->ops = ops;
	),
	TP_printk("dev=%s poll_ctx=%s ops=%llu", __get_str(dev),
		  __print_symbolic(__entry->poll_ctx,
				   { IB_POLL_SOFTIRQ, "softirq" },
				   { IB_POLL_WORKQUEUE, "workqueue" },
				   { IB_POLL_UNBOUND_WORKQUEUE, "unbound" },
				   { IB_POLL_DIRECT, "direct" }),
		  __entry->ops)
);

/* ops: those that are wanted. */
DEFINE_EVENT(rdma_cq_run, rdma_cq_run_start,
	TP_PROTO(const struct ib_device *dev, u32 poll_ctx, u64 ops),
	TP_ARGS(dev, poll_ctx, ops)
);

/* ops: those that were done. */
DEFINE_EVENT(rdma_cq_run, rdma_cq_run_end,
	TP_PROTO(const struct ib_device *dev, u32 poll_ctx, u64 ops),
	TP_ARGS(dev, poll_ctx, ops)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH trace
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE rdma_cq
#include <trace/define_trace.h>
