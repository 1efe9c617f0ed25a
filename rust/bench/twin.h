/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the crate rdma does for a queue pair, as one would write it in C: the twin that it is compared
 * with. Nothing is left out that the crate checks on the way of a request and of its completion, and
 * nothing is done that need not be:
 *
 * - One atomic word counts what is in flight. It bounds what is posted, and teardown waits for it.
 * - A handler may post in the place of the request that it was called for.
 * - A driver that fails a post without saying of which request leaves that one in doubt.
 * - Sends may be posted in batches with one completion, for as long as none has one of its own.
 * - After a failure nothing is posted any more.
 * - Trace events for posts and completions, DMA syncs.
 *
 * A request belongs to one queue pair and is of one kind for good, so what says so is written once.
 */
#ifndef _RDMA_BENCH_TWIN_H
#define _RDMA_BENCH_TWIN_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/ktime.h>
#include <linux/slab.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>
#include <trace/rdma_cq.h>

#define TWIN_BITS	20
#define TWIN_SEND	1LL
#define TWIN_RECV	(1LL << TWIN_BITS)
#define TWIN_HANDLER	(1LL << (2 * TWIN_BITS))
#define TWIN_CLOSING	(1LL << 62)

#define TWIN_MASK	((1 << TWIN_BITS) - 1)

struct twin_qp {
	struct ib_qp *qp;
	struct ib_device *dev;
	u32 num;
	u32 lkey;
	atomic64_t state;
	u32 send_limit;
	u32 recv_limit;
	bool failed;
	/* Whether a send has a completion of its own for which another was to speak. */
	bool silence_ended;
	/* Sends that nothing is going to be heard of. */
	atomic_t unheard;
	atomic_t doubtful;
	struct completion drained;

	struct ib_cq *cq;
	/* If it has a lease of that queue: of so many entries. */
	u32 leased;
	u32 send_depth;
	u32 recv_depth;
	u32 port;
};

struct twin_req {
	struct ib_cqe cqe;
	struct twin_qp *qp;
	u64 addr;
	u32 len;
	u32 size;
	void *data;
	/* Of a batch: how many are before it. */
	u32 nth;
	/* What the owner keeps with it. */
	u32 slot;
	u64 round;
	ktime_t posted_at;
};

/* Of the request that a handler was called for: its place is free until another has it. */
struct twin_place {
	bool taken;
};

static __cold __maybe_unused void twin_fail(struct twin_qp *qp)
{
	WRITE_ONCE(qp->failed, true);
	smp_store_release(&qp->send_limit, 0);
	smp_store_release(&qp->recv_limit, 0);
}

static __cold __maybe_unused int twin_refusal(struct twin_qp *qp, bool recv)
{
	bool closed = !recv && !smp_load_acquire(&qp->send_limit);

	if (atomic64_read(&qp->state) & TWIN_CLOSING || READ_ONCE(qp->failed))
		return -ESHUTDOWN;
	return closed && qp->send_depth ? -ENOTCONN : -ENOMEM;
}

static inline void twin_count_out(struct twin_qp *qp, s64 unit)
{
	if (unlikely(atomic64_fetch_sub_release(unit, &qp->state) == (TWIN_CLOSING | unit)))
		complete_all(&qp->drained);
}

/* The request is ours again, or nobody knows whose. */
static __cold __maybe_unused int twin_not_posted(struct twin_qp *qp, struct twin_req *req, int err,
						 bool named, s64 unit)
{
	if (!named) {
		atomic_inc(&qp->doubtful);
		twin_fail(qp);
		return err;
	}
	ib_dma_sync_single_for_cpu(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	twin_count_out(qp, unit);
	return err;
}

/* Gives a request that is counted, as `unit`, to the device. */
static __always_inline int twin_send(struct twin_qp *qp, struct twin_req *req, s64 unit)
{
	struct ib_sge sge = { .addr = req->addr, .length = req->len, .lkey = qp->lkey };
	struct ib_send_wr wr = {
		.wr_cqe = &req->cqe,
		.sg_list = &sge,
		.num_sge = !!req->len,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	const struct ib_send_wr *bad = NULL;
	int err;

	ib_dma_sync_single_for_device(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	trace_rdma_cq_post(qp->dev, qp->num, false, req->len);
	err = ib_post_send(qp->qp, &wr, &bad);
	if (unlikely(err))
		return twin_not_posted(qp, req, err, bad, unit);
	return 0;
}

static __always_inline int twin_recv(struct twin_qp *qp, struct twin_req *req, s64 unit)
{
	struct ib_sge sge = { .addr = req->addr, .length = req->len, .lkey = qp->lkey };
	struct ib_recv_wr wr = {
		.wr_cqe = &req->cqe,
		.sg_list = &sge,
		.num_sge = !!req->len,
	};
	const struct ib_recv_wr *bad = NULL;
	int err;

	ib_dma_sync_single_for_device(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	trace_rdma_cq_post(qp->dev, qp->num, true, req->len);
	err = ib_post_recv(qp->qp, &wr, &bad);
	if (unlikely(err))
		return twin_not_posted(qp, req, err, bad, unit);
	return 0;
}

static __always_inline int twin_post_send(struct twin_qp *qp, struct twin_req *req)
{
	s64 before = atomic64_fetch_add_relaxed(TWIN_SEND, &qp->state);

	if (unlikely((before & TWIN_MASK) >= READ_ONCE(qp->send_limit))) {
		twin_count_out(qp, TWIN_SEND);
		return twin_refusal(qp, false);
	}
	return twin_send(qp, req, TWIN_SEND);
}

static __always_inline int twin_post_recv(struct twin_qp *qp, struct twin_req *req)
{
	s64 before = atomic64_fetch_add_relaxed(TWIN_RECV, &qp->state);

	if (unlikely((before >> TWIN_BITS & TWIN_MASK) >= READ_ONCE(qp->recv_limit))) {
		twin_count_out(qp, TWIN_RECV);
		return twin_refusal(qp, true);
	}
	return twin_recv(qp, req, TWIN_RECV);
}

#define TWIN_CHAIN	16

/* Sends that are posted with one call of the driver: made ready for it when they are added. */
struct twin_chain {
	u32 len;
	bool as_one;
	struct twin_req *reqs[TWIN_CHAIN];
	struct ib_send_wr wrs[TWIN_CHAIN];
	struct ib_sge sges[TWIN_CHAIN];
};

/* Sends that are posted together and have one completion, the last's. */
struct twin_batch {
	struct ib_cqe cqe;
	struct twin_qp *qp;
	u32 len;
	struct twin_req *reqs[TWIN_CHAIN];
};

/* Adds a request. Says whether there was room for it. */
static __always_inline bool twin_chain_add(struct twin_chain *chain, struct twin_qp *qp,
					   struct twin_req *req, int flags)
{
	u32 i = chain->len;

	if (i == TWIN_CHAIN)
		return false;
	ib_dma_sync_single_for_device(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	trace_rdma_cq_post(qp->dev, qp->num, false, req->len);
	chain->sges[i] = (struct ib_sge) {
		.addr = req->addr,
		.length = req->len,
		.lkey = qp->lkey,
	};
	chain->wrs[i] = (struct ib_send_wr) {
		.next = &chain->wrs[i + 1],
		.wr_cqe = &req->cqe,
		.sg_list = &chain->sges[i],
		.num_sge = !!req->len,
		.opcode = IB_WR_SEND,
		.send_flags = flags,
	};
	chain->reqs[i] = req;
	chain->len = i + 1;
	return true;
}

/* Makes a chain of a batch that isn't empty. */
static __always_inline void twin_chain_batch(struct twin_chain *chain, struct twin_batch *batch)
{
	struct ib_send_wr *last;
	u32 i;

	chain->len = 0;
	chain->as_one = true;
	for (i = 0; i < batch->len; i++)
		twin_chain_add(chain, batch->qp, batch->reqs[i], 0);
	last = &chain->wrs[chain->len - 1];
	last->wr_cqe = &batch->cqe;
	last->send_flags = IB_SEND_SIGNALED;
}

/* Says how many of a chain the driver took, or may have taken. */
static __cold __maybe_unused u32 twin_chain_posted(struct twin_qp *qp, struct twin_chain *chain,
						   const struct ib_send_wr *bad)
{
	u32 posted, i;

	if (!bad) {
		atomic_inc(&qp->doubtful);
		twin_fail(qp);
		return chain->len;
	}
	posted = bad - chain->wrs;
	for (i = posted; i < chain->len; i++)
		ib_dma_sync_single_for_cpu(qp->dev, chain->reqs[i]->addr, chain->reqs[i]->size,
					   DMA_BIDIRECTIONAL);
	/* The one that was to speak for them was not taken. */
	if (chain->as_one && posted) {
		twin_fail(qp);
		atomic_add(posted, &qp->unheard);
	}
	return posted;
}

/* Gives a chain that is counted to the device. Says how many it took, or may have taken. */
static inline int twin_send_chain(struct twin_qp *qp, struct twin_chain *chain, u32 *posted)
{
	const struct ib_send_wr *bad = NULL;
	int err;

	chain->wrs[chain->len - 1].next = NULL;
	err = ib_post_send(qp->qp, chain->wrs, &bad);
	*posted = likely(!err) ? chain->len : twin_chain_posted(qp, chain, bad);
	return err;
}

/* Posts a chain that isn't empty, if there is room for all of it. */
static inline int twin_post_chain(struct twin_qp *qp, struct twin_chain *chain)
{
	s64 before = atomic64_fetch_add_relaxed(TWIN_SEND * chain->len, &qp->state);
	u32 posted;
	int err;

	if (unlikely((before & TWIN_MASK) + chain->len > READ_ONCE(qp->send_limit))) {
		twin_count_out(qp, TWIN_SEND * chain->len);
		return twin_refusal(qp, false);
	}
	err = twin_send_chain(qp, chain, &posted);
	if (unlikely(err))
		twin_count_out(qp, TWIN_SEND * (chain->len - posted));
	return err;
}

/* As the above, in places of the batch that the calling handler was called for: says how many it took. */
static inline int twin_repost_chain(struct twin_qp *qp, struct twin_chain *chain, u32 *taken)
{
	int err;

	if (unlikely(!READ_ONCE(qp->send_limit)))
		return twin_refusal(qp, false);
	atomic64_add(TWIN_HANDLER, &qp->state);
	err = twin_send_chain(qp, chain, taken);
	if (unlikely(!*taken))
		twin_count_out(qp, TWIN_HANDLER);
	return err;
}

/* As the above, in the place of the request that the calling handler was called for. */
static __always_inline int twin_repost_send(struct twin_qp *qp, struct twin_req *req,
					    struct twin_place *place)
{
	int err;

	if (place->taken)
		return twin_post_send(qp, req);
	if (unlikely(!READ_ONCE(qp->send_limit)))
		return twin_refusal(qp, false);
	atomic64_add(TWIN_HANDLER, &qp->state);
	err = twin_send(qp, req, TWIN_HANDLER);
	place->taken = !err;
	return err;
}

static __always_inline int twin_repost_recv(struct twin_qp *qp, struct twin_req *req,
					    struct twin_place *place)
{
	int err;

	if (place->taken)
		return twin_post_recv(qp, req);
	if (unlikely(!READ_ONCE(qp->recv_limit)))
		return twin_refusal(qp, true);
	atomic64_add(TWIN_HANDLER, &qp->state);
	err = twin_recv(qp, req, TWIN_HANDLER);
	place->taken = !err;
	return err;
}

/* What comes before and after whatever a handler does. */
static __always_inline struct twin_req *twin_complete(struct ib_wc *wc, bool recv)
{
	struct twin_req *req = container_of(wc->wr_cqe, struct twin_req, cqe);
	struct twin_qp *qp = req->qp;

	trace_rdma_cq_complete(qp->dev, qp->num, recv, wc->status);
	ib_dma_sync_single_for_cpu(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	if (unlikely(wc->status != IB_WC_SUCCESS))
		twin_fail(qp);
	return req;
}

static __always_inline void twin_handled(struct twin_qp *qp, const struct twin_place *place, s64 unit)
{
	twin_count_out(qp, place->taken ? TWIN_HANDLER : unit);
}

/* Notes that a send for which another was to speak, or which was to speak for others, completed by itself. */
static __cold __maybe_unused void twin_completed_alone(struct twin_req *req)
{
	struct twin_qp *qp = req->qp;

	/* If it is the first, those before it in its batch had succeeded. */
	if (!xchg(&qp->silence_ended, true))
		atomic_add(req->nth, &qp->unheard);
}

/*
 * What comes before whatever a handler does with a batch. Says whether it is complete as a whole: otherwise
 * the completion is that of its last send alone.
 */
static __always_inline bool twin_batch_complete(struct twin_batch *batch, struct ib_wc *wc)
{
	struct twin_qp *qp = batch->qp;
	u32 i;

	if (unlikely(wc->status != IB_WC_SUCCESS || READ_ONCE(qp->silence_ended)))
		return false;
	for (i = 0; i < batch->len; i++) {
		struct twin_req *req = batch->reqs[i];

		trace_rdma_cq_complete(qp->dev, qp->num, false, wc->status);
		ib_dma_sync_single_for_cpu(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	}
	return true;
}

/* And after it: a batch of so many, in whose places so many others were posted. */
static __always_inline void twin_batch_handled(struct twin_qp *qp, u32 len, u32 taken)
{
	twin_count_out(qp, TWIN_SEND * (len - taken) + (taken ? TWIN_HANDLER : 0));
}

/*
 * The entries of a completion queue that a queue pair needs: as in the crate, one more than it has
 * requests. There it is teardown's; C would need one to drain the queue pair.
 */
static inline u32 twin_entries(u32 send_depth, u32 recv_depth)
{
	return send_depth + recv_depth + 1;
}

struct twin_req *twin_req_new(struct twin_qp *qp, u32 size, void (*done)(struct ib_cq *, struct ib_wc *));
void twin_req_free(struct twin_qp *qp, struct twin_req *req);
int twin_qp_init(struct twin_qp *qp, struct ib_pd *pd, u32 port, enum ib_poll_context ctx,
		 int vector, u32 send_depth, u32 recv_depth);
int twin_qp_init_on(struct twin_qp *qp, struct ib_pd *pd, struct ib_cq *cq, u32 port, u32 send_depth,
		    u32 recv_depth);
int twin_qp_connect(struct twin_qp *qp, const struct twin_qp *peer, u8 gid_index);
void twin_qp_end(struct twin_qp *qp);
void twin_qp_close(struct twin_qp *qp);

#endif
