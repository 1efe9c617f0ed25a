// SPDX-License-Identifier: GPL-2.0
/*
 * The operations that rust/bench/bench_rust.rs counts the instructions of, in C. Both do the same
 * things in the same order, on the device of bench_device.c.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/cpu.h>

#include "bench_device.h"
#include "twin.h"

#define WHO	"c"
#define SAMPLES	5
/* Full batches, and less than the RDMA core polls in one go. */
#define OPS	(15 * 16)
#define SIZE	64

/* --- leases ----------------------------------------------------------------------------------- */

struct lease {
	struct ib_cq *cq;
	u32 nr_cqe;
};

static bool may_sleep(void)
{
	return in_task() && !in_atomic() && !irqs_disabled() && !rcu_preempt_depth();
}

/* With the checks of PooledCq::lease. */
static noinline int lease_get(struct lease *lease, struct ib_device *dev, u32 nr_cqe, s64 vector,
			      enum ib_poll_context ctx)
{
	int hint = -1;

	if (!may_sleep()) {
		pr_err("called in a context that may not sleep: refused\n");
		return -EDEADLK;
	}
	if (nr_cqe < 1 || nr_cqe > dev->attrs.max_cqe || nr_cqe > INT_MAX) {
		pr_err("%s: nr_cqe=%u is out of range\n", dev_name(&dev->dev), nr_cqe);
		return -EINVAL;
	}
	if (dev->num_comp_vectors < 1) {
		pr_err("%s: no completion vectors: no pooled queues\n", dev_name(&dev->dev));
		return -EOPNOTSUPP;
	}
	if (vector >= 0)
		hint = vector % dev->num_comp_vectors;
	cpus_read_lock();
	lease->cq = ib_cq_pool_get(dev, nr_cqe, hint, ctx);
	cpus_read_unlock();
	if (IS_ERR(lease->cq))
		return PTR_ERR(lease->cq);
	lease->nr_cqe = nr_cqe;
	trace_rdma_cq_lease(lease->cq, nr_cqe);
	return 0;
}

static noinline void lease_put(struct lease *lease)
{
	trace_rdma_cq_put(lease->cq, lease->nr_cqe);
	ib_cq_pool_put(lease->cq, lease->nr_cqe);
}

static int leases(struct ib_device *dev)
{
	struct lease lease;
	int sample, i, err;

	/* The first makes the pool's queues. */
	for (sample = -1; sample < SAMPLES; sample++) {
		bench_begin();
		for (i = 0; i < OPS; i++) {
			err = lease_get(&lease, dev, 16, -1, IB_POLL_SOFTIRQ);
			if (err)
				return err;
			lease_put(&lease);
		}
		if (sample >= 0)
			bench_sample(WHO, "lease_put", BENCH_NOTHING, OPS, bench_end());
	}
	return 0;
}

#define LEASES		4096
#define LEASE_ROUNDS	3
/* What a queue of a pool has at least. */
#define POOLED_CQE	4096

static struct lease held[LEASES];

static int hold(struct ib_device *dev, u32 from, u32 to, u32 nr_cqe)
{
	u32 i;
	int err = 0;

	for (i = from; i < to && !err; i++)
		err = lease_get(&held[i], dev, nr_cqe, -1, IB_POLL_SOFTIRQ);
	return err;
}

static void let_go(u32 number)
{
	while (number)
		lease_put(&held[--number]);
}

/* What the n-th lease costs while all before it are held: the first, the second, the next two, the next four ... */
static int many_leases(struct ib_device *dev)
{
	const u32 queues = LEASES * 16 / POOLED_CQE;
	u32 round, from, to;
	char name[32];
	u64 insns;
	int err;

	/* The pool has all its queues before. */
	err = hold(dev, 0, queues, POOLED_CQE);
	if (err)
		return err;
	let_go(queues);

	bench_allocs_begin();
	err = hold(dev, 0, LEASES, 16);
	bench_sample(WHO, "bytes_lease", BENCH_NOTHING, LEASES, bench_live_bytes());
	bench_allocs_end();
	if (err)
		return err;
	let_go(LEASES);

	for (round = 0; round < LEASE_ROUNDS; round++) {
		for (from = 0, to = 1; to <= LEASES; from = to, to *= 2) {
			bench_begin();
			err = hold(dev, from, to, 16);
			insns = bench_end();
			if (err)
				return err;
			snprintf(name, sizeof(name), "lease_%u", to);
			bench_sample(WHO, name, BENCH_NOTHING, to - from, insns);
		}
		bench_begin();
		let_go(LEASES);
		bench_sample(WHO, "put_4096", BENCH_NOTHING, LEASES, bench_end());
	}
	return 0;
}

/* --- requests --------------------------------------------------------------------------------- */

/* Handlers that do nothing with the request: the test keeps it. */
static void keep_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct twin_req *req = twin_complete(wc, false);
	struct twin_place place = {};

	twin_handled(req->qp, &place, TWIN_SEND);
}

static void keep_received(struct ib_cq *cq, struct ib_wc *wc)
{
	struct twin_req *req = twin_complete(wc, true);
	struct twin_place place = {};

	twin_handled(req->qp, &place, TWIN_RECV);
}

/* A handler that posts the request again, as long as that makes sense. */
static void again_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct twin_req *req = twin_complete(wc, false);
	struct twin_qp *qp = req->qp;
	struct twin_place place = {};

	if (wc->status == IB_WC_SUCCESS)
		twin_repost_send(qp, req, &place);
	twin_handled(qp, &place, TWIN_SEND);
}

/* In a function of its own, as in a driver that sends from more than one place. */
static noinline int post_send(struct twin_qp *qp, struct twin_req *req)
{
	return twin_post_send(qp, req);
}

static noinline int post_recv(struct twin_qp *qp, struct twin_req *req)
{
	return twin_post_recv(qp, req);
}

struct context {
	enum ib_poll_context raw;
	const char *name;
};

static const struct context contexts[] = {
	{ IB_POLL_SOFTIRQ, "softirq" },
	{ IB_POLL_WORKQUEUE, "workqueue" },
	{ IB_POLL_UNBOUND_WORKQUEUE, "unbound" },
};

static void sample_in(const struct context *ctx, const char *what, enum bench_own own, u32 ops,
		      u64 insns)
{
	char name[32];

	snprintf(name, sizeof(name), "%s_%s", what, ctx->name);
	bench_sample(WHO, name, own, ops, insns);
}

static struct twin_req *sends[OPS], *recvs[OPS];

static int make(struct twin_req **reqs, struct twin_qp *qp, u32 number,
		void (*done)(struct ib_cq *, struct ib_wc *))
{
	u32 i;

	for (i = 0; i < number; i++) {
		reqs[i] = twin_req_new(qp, SIZE, done);
		/* What was made stays then: the guest ends. */
		if (!reqs[i])
			return -ENOMEM;
	}
	return 0;
}

static int post_sends(struct twin_qp *qp)
{
	int i, err = 0;

	for (i = 0; i < OPS && !err; i++)
		err = post_send(qp, sends[i]);
	return err;
}

/* As many of the requests as a chain takes, from the last. */
static noinline int post_chain(struct twin_qp *qp, struct twin_req **reqs, u32 *number)
{
	struct twin_chain chain;

	chain.len = 0;
	chain.as_one = false;
	while (*number && twin_chain_add(&chain, qp, reqs[*number - 1], IB_SEND_SIGNALED))
		--*number;
	return twin_post_chain(qp, &chain);
}

static int post_chains(struct twin_qp *qp)
{
	u32 waiting = OPS;
	int err = 0;

	while (waiting && !err)
		err = post_chain(qp, sends, &waiting);
	return err;
}

static int post_recvs(struct twin_qp *qp)
{
	int i, err = 0;

	for (i = 0; i < OPS && !err; i++)
		err = post_recv(qp, recvs[i]);
	return err;
}

static void free_all(struct twin_req **reqs, struct twin_qp *qp, u32 number)
{
	u32 i;

	for (i = 0; i < number; i++)
		twin_req_free(qp, reqs[i]);
}

/* A queue that is polled by its owner, which one at a time may do. */
struct direct {
	struct ib_cq *cq;
	unsigned long polled;
};

/* Takes all requests back from a queue, 16 at a time. */
static noinline int poll_all(struct direct *direct, struct twin_qp *qp, struct twin_req **reqs, u32 max)
{
	struct ib_wc wc[16];
	u32 back = 0;
	int n, i, err = 0;

	do {
		if (test_and_set_bit_lock(0, &direct->polled))
			return 0;
		n = ib_poll_cq(direct->cq, ARRAY_SIZE(wc), wc);
		for (i = 0; i < n; i++) {
			struct twin_req *req = container_of(wc[i].wr_cqe, struct twin_req, cqe);

			if (wc[i].status != IB_WC_SUCCESS)
				err = -EIO;
			/* Of another queue pair, or more than there is room for. */
			if (req->qp != qp || back == max) {
				wc[i].wr_cqe->done(direct->cq, &wc[i]);
				continue;
			}
			twin_complete(&wc[i], req->cqe.done == keep_received);
			twin_count_out(qp, req->cqe.done == keep_received ? TWIN_RECV : TWIN_SEND);
			reqs[back++] = req;
		}
		clear_bit_unlock(0, &direct->polled);
	} while (n > 0 && !err);
	return n < 0 ? n : err;
}

static noinline int process(struct direct *direct, int budget)
{
	int n;

	if (test_and_set_bit_lock(0, &direct->polled))
		return 0;
	n = ib_process_cq_direct(direct->cq, budget);
	clear_bit_unlock(0, &direct->polled);
	return n;
}

/* With the checks of CompletionQueue::create. */
static noinline struct ib_cq *cq_create(struct ib_device *dev, u32 nr_cqe, enum ib_poll_context ctx)
{
	if (!may_sleep()) {
		pr_err("called in a context that may not sleep: refused\n");
		return ERR_PTR(-EDEADLK);
	}
	if (nr_cqe < 1 || nr_cqe > dev->attrs.max_cqe || nr_cqe > INT_MAX) {
		pr_err("%s: nr_cqe=%u is out of range\n", dev_name(&dev->dev), nr_cqe);
		return ERR_PTR(-EINVAL);
	}
	return ib_alloc_cq_any(dev, NULL, nr_cqe, ctx);
}

static int queues(struct ib_device *dev)
{
	struct ib_cq *cq;
	int round, i;
	u64 insns;

	/* Of the first time much is the allocator's. */
	for (round = 0; round <= SAMPLES; round++) {
		bench_begin();
		for (i = 0; i < OPS; i++) {
			cq = cq_create(dev, 16, IB_POLL_DIRECT);
			if (IS_ERR(cq))
				return PTR_ERR(cq);
			ib_free_cq(cq);
		}
		bench_settle();
		insns = bench_end();
		if (round > 0)
			bench_sample(WHO, "private_cq", BENCH_NOTHING, OPS, insns);
	}
	return 0;
}

/* Posting, and polling for oneself. */
static int polled(struct ib_pd *pd)
{
	struct direct direct = { .cq = cq_create(pd->device, 2 * OPS + 1, IB_POLL_DIRECT) };
	struct twin_qp qp = {};
	u64 post, poll;
	int round, err;

	if (IS_ERR(direct.cq))
		return PTR_ERR(direct.cq);
	err = twin_qp_init_on(&qp, pd, direct.cq, 1, OPS, OPS) ?: twin_qp_connect(&qp, &qp, 0) ?:
	      make(sends, &qp, OPS, keep_sent) ?: make(recvs, &qp, OPS, keep_received);
	if (err)
		return err;

	for (round = 0; round <= SAMPLES; round++) {
		bench_begin();
		err = post_sends(&qp);
		post = bench_end();
		if (err)
			return err;
		bench_raise();
		bench_begin();
		err = poll_all(&direct, &qp, sends, OPS);
		poll = bench_end();
		if (err)
			return err;
		if (round > 0) {
			bench_sample(WHO, "post_send", BENCH_POST_SEND, OPS, post);
			bench_sample(WHO, "poll_16", BENCH_POLL, OPS, poll);
		}
	}
	for (round = 0; round < SAMPLES; round++) {
		bench_begin();
		err = post_chains(&qp);
		post = bench_end();
		bench_raise();
		err = err ?: poll_all(&direct, &qp, sends, OPS);
		if (err)
			return err;
		bench_sample(WHO, "chain_16", BENCH_CHAIN, OPS, post);
	}
	for (round = 0; round <= SAMPLES; round++) {
		bench_begin();
		err = post_recvs(&qp);
		post = bench_end();
		bench_raise();
		err = err ?: poll_all(&direct, &qp, recvs, OPS);
		if (err)
			return err;
		if (round > 0)
			bench_sample(WHO, "post_recv", BENCH_POST_RECV, OPS, post);
	}
	for (round = 0; round < SAMPLES; round++) {
		/* The twin has nothing to note of requests that were never posted yet. */
		bench_begin();
		err = post_sends(&qp);
		post = bench_end();
		if (err)
			return err;
		bench_sample(WHO, "first_post", BENCH_POST_SEND, OPS, post);
		bench_raise();
		bench_begin();
		while (process(&direct, U16_MAX) > 0)
			;
		bench_sample(WHO, "process", BENCH_PROCESS, OPS, bench_end());
		bench_done_insns();
	}

	free_all(sends, &qp, OPS);
	free_all(recvs, &qp, OPS);
	twin_qp_close(&qp);
	ib_free_cq(direct.cq);
	return 0;
}

/* What is left to the RDMA core to poll, in one of its contexts. */
static int handled(struct ib_pd *pd, const struct context *ctx)
{
	struct twin_qp qp = {}, steady = {}, single = {};
	int round, i, err;

	err = twin_qp_init(&qp, pd, 1, ctx->raw, -1, OPS, OPS) ?: twin_qp_connect(&qp, &qp, 0) ?:
	      make(sends, &qp, OPS, keep_sent) ?: make(recvs, &qp, OPS, keep_received);
	if (err)
		return err;
	for (round = 0; round < SAMPLES; round++) {
		err = post_sends(&qp);
		if (err)
			return err;
		bench_raise();
		sample_in(ctx, "complete_send", BENCH_NOTHING, OPS, bench_done_insns());
		err = post_recvs(&qp);
		if (err)
			return err;
		bench_raise();
		sample_in(ctx, "complete_recv", BENCH_NOTHING, OPS, bench_done_insns());
	}
	free_all(sends, &qp, OPS);
	free_all(recvs, &qp, OPS);
	twin_qp_close(&qp);

	err = twin_qp_init(&steady, pd, 1, ctx->raw, -1, OPS, 0) ?:
	      twin_qp_connect(&steady, &steady, 0) ?: make(sends, &steady, OPS, again_sent) ?:
	      post_sends(&steady);
	if (err)
		return err;
	for (round = 0; round < SAMPLES; round++) {
		bench_done_insns();
		bench_raise();
		sample_in(ctx, "steady_send", BENCH_POST_SEND, OPS, bench_done_insns());
	}
	bench_allocs_begin();
	bench_raise();
	sample_in(ctx, "allocs_steady_send", BENCH_NOTHING, OPS, bench_allocs_end());
	twin_qp_close(&steady);
	free_all(sends, &steady, OPS);

	/* What it takes to wake a worker is thousands, and varies. */
	if (ctx->raw != IB_POLL_SOFTIRQ)
		return 0;
	err = twin_qp_init(&single, pd, 1, ctx->raw, -1, 1, 0) ?:
	      twin_qp_connect(&single, &single, 0) ?: make(sends, &single, 1, again_sent) ?:
	      post_send(&single, sends[0]);
	if (err)
		return err;
	for (round = 0; round < SAMPLES; round++) {
		bench_begin();
		for (i = 0; i < OPS; i++)
			bench_raise();
		sample_in(ctx, "whole_way", BENCH_POST_SEND, OPS, bench_end());
	}
	bench_done_insns();
	twin_qp_close(&single);
	free_all(sends, &single, 1);
	return 0;
}

/* Where something fails, what was made stays: the guest has failed. */
static int requests(struct ib_device *dev)
{
	struct ib_pd *pd = ib_alloc_pd(dev, 0);
	int i, err;

	if (IS_ERR(pd))
		return PTR_ERR(pd);
	err = polled(pd);
	for (i = 0; !err && i < ARRAY_SIZE(contexts); i++)
		err = handled(pd, &contexts[i]);
	if (!err)
		ib_dealloc_pd(pd);
	return err;
}

static int bench_add(struct ib_device *dev)
{
	int err = leases(dev) ?: queues(dev) ?: requests(dev) ?: many_leases(dev);

	pr_info("%s: done err=%d\n", dev_name(&dev->dev), err);
	return err;
}

static struct ib_client bench_client = { .name = "bench_c", .add = bench_add };

static int __init bench_init(void)
{
	return ib_register_client(&bench_client);
}
module_init(bench_init);

static void __exit bench_exit(void)
{
	ib_unregister_client(&bench_client);
}
module_exit(bench_exit);

MODULE_AUTHOR("The rdma-cq authors");
MODULE_DESCRIPTION("Counts the instructions of work requests in C");
MODULE_LICENSE("GPL");
