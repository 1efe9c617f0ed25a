// SPDX-License-Identifier: GPL-2.0
/*
 * An RDMA device that costs next to nothing: requests are complete when bench_raise() says so, in
 * the order in which they were posted, and no data moves. So what is counted on it is the layers above.
 *
 * It counts instructions as well, for a guest whose clock advances by one for each (scripts/guest
 * --icount): of whatever lies between bench_begin() and bench_end(), and of completion handlers, which
 * are what happens from one call of the device's poll function to the next.
 *
 * One CPU only: nothing here is locked.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/interrupt.h>
#include <linux/module.h>
#include <linux/mm.h>
#include <linux/workqueue.h>
#include <asm/tsc.h>
#include <rdma/ib_verbs.h>
#include <trace/events/kmem.h>

#include "bench_device.h"

struct bench_ib {
	struct ib_device ibdev;
};

struct bench_entry {
	struct ib_cqe *cqe;
	struct ib_qp *qp;
	u32 len;
	enum ib_wc_opcode opcode;
};

/* All indices run on for ever; the ring has a power of two of entries. */
struct bench_cq {
	struct ib_cq ibcq;
	struct list_head node;
	struct bench_entry *ring;
	u32 mask;
	/* Where the next is posted, up to where they are complete, and polled. */
	u32 posted;
	u32 complete;
	u32 polled;
};

struct bench_pd {
	struct ib_pd ibpd;
};

struct bench_qp {
	struct ib_qp ibqp;
	bool failed;
};

static LIST_HEAD(cqs);
static struct ib_device *bench;

/* --- the counting ----------------------------------------------------------------------------- */

static u64 begun;
/* Of an empty bench_begin() and bench_end(). */
static u64 own_pair;
/* What is not the layer's of an operation, in hundredths. */
static u64 own[BENCH_OWNS];
/* Of the RDMA core and the device for one completion whose handler does nothing, in hundredths. */
static u64 own_done;

static u64 done_insns;
static u32 done_ops;
/* When the poll function returned something for the last time, and how much. */
static u64 returned;
static u32 in_hand;

void bench_begin(void)
{
	begun = rdtsc();
}
EXPORT_SYMBOL_GPL(bench_begin);

u64 bench_end(void)
{
	return rdtsc() - begun - own_pair;
}
EXPORT_SYMBOL_GPL(bench_end);

/* A line of the log that scripts/bench reads: the instructions of so many operations. */
void bench_sample(const char *who, const char *name, enum bench_own which, u32 ops, u64 insns)
{
	u64 subtract = which < BENCH_OWNS ? div_u64(own[which] * ops, 100) : 0;

	pr_info("who=%s name=%s ops=%u insns=%llu\n", who, name, ops, insns - subtract);
}
EXPORT_SYMBOL_GPL(bench_sample);

/* Instructions spent in handlers since the last call, without what calling them takes. */
u64 bench_done_insns(void)
{
	u64 insns = done_insns - div_u64(own_done * done_ops, 100);

	done_insns = 0;
	done_ops = 0;
	return insns;
}
EXPORT_SYMBOL_GPL(bench_done_insns);

static u32 allocs;
/* What was allocated by kmalloc() and not freed. */
static s64 live;

static void count_kmalloc(void *data, unsigned long call_site, const void *ptr, size_t bytes_req,
			  size_t bytes_alloc, gfp_t gfp_flags, int node)
{
	allocs++;
	live += ksize(ptr);
}

static void count_kfree(void *data, unsigned long call_site, const void *ptr)
{
	live -= ksize(ptr);
}

static void count_cache_alloc(void *data, unsigned long call_site, const void *ptr,
			      struct kmem_cache *s, gfp_t gfp_flags, int node)
{
	allocs++;
}

/* Counts what the whole kernel allocates from the heap. */
void bench_allocs_begin(void)
{
	void *ptr;
	s64 before;

	allocs = 0;
	live = 0;
	WARN_ON(register_trace_kmalloc(count_kmalloc, NULL));
	WARN_ON(register_trace_kfree(count_kfree, NULL));
	WARN_ON(register_trace_kmem_cache_alloc(count_cache_alloc, NULL));
	/* That the probes are called is seen here, or the counts of nothing would say nothing. */
	ptr = kmalloc(64, GFP_KERNEL);
	before = live;
	WARN_ON(!allocs || before < 64);
	kfree(ptr);
	WARN_ON(live >= before);
	allocs = 0;
	live = 0;
}
EXPORT_SYMBOL_GPL(bench_allocs_begin);

/* The bytes from kmalloc() that the whole kernel has more than at bench_allocs_begin(). */
u64 bench_live_bytes(void)
{
	return max(live, 0);
}
EXPORT_SYMBOL_GPL(bench_live_bytes);

u32 bench_allocs_end(void)
{
	u32 count = allocs;

	unregister_trace_kmem_cache_alloc(count_cache_alloc, NULL);
	unregister_trace_kfree(count_kfree, NULL);
	unregister_trace_kmalloc(count_kmalloc, NULL);
	tracepoint_synchronize_unregister();
	return count;
}
EXPORT_SYMBOL_GPL(bench_allocs_end);

/*
 * Completes all that was posted so far, and returns when the handlers have. What they post waits for
 * the next time.
 */
void bench_raise(void)
{
	struct bench_cq *cq;

	list_for_each_entry(cq, &cqs, node) {
		if (cq->complete == cq->posted)
			continue;
		WRITE_ONCE(cq->complete, cq->posted);
		if (cq->ibcq.poll_ctx == IB_POLL_SOFTIRQ) {
			/* It runs when they are enabled again. */
			local_bh_disable();
			cq->ibcq.comp_handler(&cq->ibcq, cq->ibcq.cq_context);
			local_bh_enable();
		} else if (cq->ibcq.poll_ctx != IB_POLL_DIRECT) {
			cq->ibcq.comp_handler(&cq->ibcq, cq->ibcq.cq_context);
			flush_work(&cq->ibcq.work);
		}
	}
}
EXPORT_SYMBOL_GPL(bench_raise);

/* Returns when what was left to a worker is done: first to begin with it, then to end it. */
void bench_settle(void)
{
	__flush_workqueue(system_dfl_wq);
	__flush_workqueue(system_dfl_wq);
}
EXPORT_SYMBOL_GPL(bench_settle);

/* --- the device ------------------------------------------------------------------------------- */

static int bench_query_device(struct ib_device *ibdev, struct ib_device_attr *attr,
			      struct ib_udata *udata)
{
	attr->max_qp = 65536;
	attr->max_qp_wr = 65536;
	attr->max_send_sge = 1;
	attr->max_recv_sge = 1;
	attr->max_cq = 65536;
	attr->max_cqe = 65536;
	attr->max_pd = 65536;
	attr->max_pkeys = 1;
	attr->kernel_cap_flags = IBK_LOCAL_DMA_LKEY;
	return 0;
}

static int bench_query_port(struct ib_device *ibdev, u32 port, struct ib_port_attr *attr)
{
	attr->state = IB_PORT_ACTIVE;
	attr->phys_state = IB_PORT_PHYS_STATE_LINK_UP;
	attr->max_mtu = IB_MTU_4096;
	attr->active_mtu = IB_MTU_4096;
	attr->gid_tbl_len = 1;
	attr->pkey_tbl_len = 1;
	attr->max_msg_sz = SZ_1G;
	attr->lid = port;
	return 0;
}

static int bench_get_port_immutable(struct ib_device *ibdev, u32 port,
				    struct ib_port_immutable *immutable)
{
	/* Of an InfiniBand port without any management: no agent starts on it. */
	immutable->core_cap_flags = RDMA_CORE_CAP_PROT_IB;
	immutable->gid_tbl_len = 1;
	immutable->pkey_tbl_len = 1;
	return 0;
}

static int bench_query_gid(struct ib_device *ibdev, u32 port, int index, union ib_gid *gid)
{
	memset(gid, 0, sizeof(*gid));
	gid->raw[0] = 0xfe;
	gid->raw[1] = 0x80;
	gid->raw[15] = port;
	return 0;
}

static int bench_query_pkey(struct ib_device *ibdev, u32 port, u16 index, u16 *pkey)
{
	*pkey = 0xffff;
	return 0;
}

static int bench_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	return 0;
}

static int bench_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	return 0;
}

static struct ib_mr *bench_get_dma_mr(struct ib_pd *ibpd, int access)
{
	return ERR_PTR(-EOPNOTSUPP);
}

static struct ib_mr *bench_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 virt_addr,
				       int access, struct ib_dmah *dmah, struct ib_udata *udata)
{
	return ERR_PTR(-EOPNOTSUPP);
}

static int bench_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata)
{
	return -EOPNOTSUPP;
}

static int bench_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
			   struct uverbs_attr_bundle *attrs)
{
	struct bench_cq *cq = container_of(ibcq, struct bench_cq, ibcq);
	u32 size = roundup_pow_of_two(attr->cqe);

	cq->ring = kvcalloc(size, sizeof(*cq->ring), GFP_KERNEL);
	if (!cq->ring)
		return -ENOMEM;
	cq->mask = size - 1;
	ibcq->cqe = attr->cqe;
	list_add_tail(&cq->node, &cqs);
	return 0;
}

static int bench_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct bench_cq *cq = container_of(ibcq, struct bench_cq, ibcq);

	list_del(&cq->node);
	kvfree(cq->ring);
	return 0;
}

static int bench_poll_cq(struct ib_cq *ibcq, int num, struct ib_wc *wc)
{
	struct bench_cq *cq = container_of(ibcq, struct bench_cq, ibcq);
	int n = 0;

	if (in_hand) {
		done_insns += rdtsc() - returned;
		done_ops += in_hand;
	}
	while (n < num && cq->polled != cq->complete) {
		struct bench_entry *entry = &cq->ring[cq->polled++ & cq->mask];
		struct bench_qp *qp = container_of(entry->qp, struct bench_qp, ibqp);

		wc[n++] = (struct ib_wc) {
			.wr_cqe = entry->cqe,
			.status = qp->failed ? IB_WC_WR_FLUSH_ERR : IB_WC_SUCCESS,
			.opcode = entry->opcode,
			.byte_len = entry->len,
			.qp = &qp->ibqp,
		};
	}
	in_hand = n;
	returned = rdtsc();
	return n;
}

static int bench_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags notify)
{
	struct bench_cq *cq = container_of(ibcq, struct bench_cq, ibcq);

	/* After less than a full batch the RDMA core doesn't poll once more: what it does then is no handler. */
	in_hand = 0;
	return (notify & IB_CQ_REPORT_MISSED_EVENTS) && cq->polled != cq->complete;
}

static int bench_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *attr, struct ib_udata *udata)
{
	static u32 next = 0x11;

	ibqp->qp_num = next++;
	return 0;
}

static int bench_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
			   struct ib_udata *udata)
{
	struct bench_qp *qp = container_of(ibqp, struct bench_qp, ibqp);

	if ((mask & IB_QP_STATE) && attr->qp_state == IB_QPS_ERR) {
		qp->failed = true;
		bench_raise();
	}
	return 0;
}

static int bench_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	return 0;
}

static void push(struct ib_cq *ibcq, struct ib_qp *qp, struct ib_cqe *cqe, u32 len,
		 enum ib_wc_opcode opcode)
{
	struct bench_cq *cq = container_of(ibcq, struct bench_cq, ibcq);
	struct bench_entry *entry = &cq->ring[cq->posted++ & cq->mask];

	entry->cqe = cqe;
	entry->qp = qp;
	entry->len = len;
	entry->opcode = opcode;
}

static int bench_post_send(struct ib_qp *qp, const struct ib_send_wr *wr,
			   const struct ib_send_wr **bad_wr)
{
	for (; wr; wr = wr->next)
		push(qp->send_cq, qp, wr->wr_cqe, wr->sg_list->length, IB_WC_SEND);
	return 0;
}

static int bench_post_recv(struct ib_qp *qp, const struct ib_recv_wr *wr,
			   const struct ib_recv_wr **bad_wr)
{
	for (; wr; wr = wr->next)
		push(qp->recv_cq, qp, wr->wr_cqe, wr->sg_list->length, IB_WC_RECV);
	return 0;
}

static const struct ib_device_ops bench_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_UNKNOWN,

	.alloc_pd = bench_alloc_pd,
	.create_cq = bench_create_cq,
	.create_qp = bench_create_qp,
	.dealloc_pd = bench_dealloc_pd,
	.dereg_mr = bench_dereg_mr,
	.destroy_cq = bench_destroy_cq,
	.destroy_qp = bench_destroy_qp,
	.get_dma_mr = bench_get_dma_mr,
	.get_port_immutable = bench_get_port_immutable,
	.modify_qp = bench_modify_qp,
	.poll_cq = bench_poll_cq,
	.post_recv = bench_post_recv,
	.post_send = bench_post_send,
	.query_device = bench_query_device,
	.query_gid = bench_query_gid,
	.query_pkey = bench_query_pkey,
	.query_port = bench_query_port,
	.reg_user_mr = bench_reg_user_mr,
	.req_notify_cq = bench_req_notify_cq,

	INIT_RDMA_OBJ_SIZE(ib_cq, bench_cq, ibcq),
	INIT_RDMA_OBJ_SIZE(ib_pd, bench_pd, ibpd),
	INIT_RDMA_OBJ_SIZE(ib_qp, bench_qp, ibqp),
};

/* --- what it costs itself --------------------------------------------------------------------- */

/* Full batches, and less than the RDMA core polls in one go: it ends with a poll that finds nothing. */
#define OWN_OPS (15 * 16)

static int nothing_send(struct ib_qp *qp, const struct ib_send_wr *wr, const struct ib_send_wr **bad_wr)
{
	return 0;
}

static int nothing_recv(struct ib_qp *qp, const struct ib_recv_wr *wr, const struct ib_recv_wr **bad_wr)
{
	return 0;
}

static void nothing_done(struct ib_cq *cq, struct ib_wc *wc)
{
}

static struct ib_cqe nothing_cqe = { .done = nothing_done };

/* Returns what so many calls take. */
static u64 call_sends(typeof(&bench_post_send) post, struct ib_qp *qp)
{
	struct ib_sge sge = {};
	const struct ib_send_wr wr = { .wr_cqe = &nothing_cqe, .sg_list = &sge, .num_sge = 1 }, *bad;
	int i;

	/* For the call to be as indirect as the real one. */
	OPTIMIZER_HIDE_VAR(post);
	bench_begin();
	for (i = 0; i < OWN_OPS; i++)
		post(qp, &wr, &bad);
	return bench_end();
}

static u64 call_chains(typeof(&bench_post_send) post, struct ib_qp *qp)
{
	static struct ib_sge sge;
	static struct ib_send_wr wrs[16];
	const struct ib_send_wr *bad;
	int i;

	for (i = 0; i < ARRAY_SIZE(wrs); i++)
		wrs[i] = (struct ib_send_wr) {
			.next = i + 1 < ARRAY_SIZE(wrs) ? &wrs[i + 1] : NULL,
			.wr_cqe = &nothing_cqe,
			.sg_list = &sge,
			.num_sge = 1,
		};
	OPTIMIZER_HIDE_VAR(post);
	bench_begin();
	for (i = 0; i < OWN_OPS / ARRAY_SIZE(wrs); i++)
		post(qp, wrs, &bad);
	return bench_end();
}

static u64 call_recvs(typeof(&bench_post_recv) post, struct ib_qp *qp)
{
	struct ib_sge sge = {};
	const struct ib_recv_wr wr = { .wr_cqe = &nothing_cqe, .sg_list = &sge, .num_sge = 1 }, *bad;
	int i;

	/* For the call to be as indirect as the real one. */
	OPTIMIZER_HIDE_VAR(post);
	bench_begin();
	for (i = 0; i < OWN_OPS; i++)
		post(qp, &wr, &bad);
	return bench_end();
}

static int nothing_poll(struct ib_cq *cq, int num, struct ib_wc *wc)
{
	return num;
}

static u64 call_polls(typeof(&bench_poll_cq) poll, struct ib_cq *cq)
{
	static struct ib_wc wc[16];
	int i;

	OPTIMIZER_HIDE_VAR(poll);
	bench_begin();
	for (i = 0; i < OWN_OPS / ARRAY_SIZE(wc); i++)
		poll(cq, ARRAY_SIZE(wc), wc);
	return bench_end();
}

/* A tick of the clock can fall into any: the least of a few has none. */
#define ROUNDS 5

static void least(u64 *least, u64 insns)
{
	*least = min(*least, insns * 100 / OWN_OPS);
}

static int calibrate_polls(struct bench_qp *qp)
{
	struct ib_cq *cq = ib_alloc_cq(bench, NULL, 2 * OWN_OPS, 0, IB_POLL_DIRECT);
	int i;

	if (IS_ERR(cq))
		return PTR_ERR(cq);
	qp->ibqp.send_cq = cq;
	for (i = 0; i < ROUNDS; i++) {
		call_sends(bench_post_send, &qp->ibqp);
		bench_raise();
		least(&own[BENCH_POLL], call_polls(bench_poll_cq, cq) - call_polls(nothing_poll, cq));
		call_sends(bench_post_send, &qp->ibqp);
		bench_raise();
		bench_begin();
		ib_process_cq_direct(cq, -1);
		least(&own[BENCH_PROCESS], bench_end());
	}
	ib_free_cq(cq);
	return 0;
}

static int calibrate(void)
{
	struct bench_qp *qp __free(kfree) = kzalloc_obj(*qp);
	struct ib_cq *cq;
	int i, err;

	if (!qp)
		return -ENOMEM;
	cq = ib_alloc_cq(bench, NULL, 2 * OWN_OPS, 0, IB_POLL_SOFTIRQ);
	if (IS_ERR(cq))
		return PTR_ERR(cq);
	qp->ibqp.send_cq = cq;
	qp->ibqp.recv_cq = cq;
	for (i = BENCH_POST_SEND; i < BENCH_OWNS; i++)
		own[i] = U64_MAX;
	own_done = U64_MAX;

	bench_begin();
	own_pair = bench_end();
	for (i = 0; i < ROUNDS; i++) {
		least(&own[BENCH_POST_SEND], call_sends(bench_post_send, &qp->ibqp) -
						     call_sends(nothing_send, &qp->ibqp));
		done_insns = 0;
		bench_raise();
		least(&own_done, done_insns);
		least(&own[BENCH_CHAIN], call_chains(bench_post_send, &qp->ibqp) -
						 call_chains(nothing_send, &qp->ibqp));
		bench_raise();
		least(&own[BENCH_POST_RECV], call_recvs(bench_post_recv, &qp->ibqp) -
						     call_recvs(nothing_recv, &qp->ibqp));
		bench_raise();
	}
	ib_free_cq(cq);
	err = calibrate_polls(qp);
	done_insns = 0;
	done_ops = 0;
	pr_info("subtracted, in hundredths: post_send=%llu post_recv=%llu chain=%llu poll=%llu process=%llu done=%llu\n",
		own[BENCH_POST_SEND], own[BENCH_POST_RECV], own[BENCH_CHAIN], own[BENCH_POLL],
		own[BENCH_PROCESS], own_done);
	return err;
}

static int __init bench_init(void)
{
	struct bench_ib *ib = ib_alloc_device(bench_ib, ibdev);
	int err;

	if (!ib)
		return -ENOMEM;
	bench = &ib->ibdev;
	bench->node_type = RDMA_NODE_IB_CA;
	bench->phys_port_cnt = 1;
	bench->num_comp_vectors = 1;
	bench->local_dma_lkey = 0x600d;
	ib_set_device_ops(bench, &bench_ops);
	err = ib_register_device(bench, "bench%d", NULL);
	if (err) {
		ib_dealloc_device(bench);
		return err;
	}
	err = calibrate();
	if (err) {
		ib_unregister_device(bench);
		ib_dealloc_device(bench);
	}
	return err;
}
module_init(bench_init);

static void __exit bench_exit(void)
{
	ib_unregister_device(bench);
	ib_dealloc_device(bench);
}
module_exit(bench_exit);

MODULE_AUTHOR("The rdma-cq authors");
MODULE_DESCRIPTION("An RDMA device that costs next to nothing, to count what the layers above cost");
MODULE_LICENSE("GPL");
