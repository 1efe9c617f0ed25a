// SPDX-License-Identifier: GPL-2.0
/*
 * The exerciser in C: what rust/exerciser does, with the same parameters, checks and report. Both are
 * run in turns to compare how much gets through.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/delay.h>
#include <linux/math64.h>
#include <linux/moduleparam.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/workqueue.h>
#include <net/ipv6.h>

#include "twin.h"

/* Their ranges are those of the exerciser, which scripts/bench gives the same. */
static u32 qps = 8;
module_param(qps, uint, 0);
MODULE_PARM_DESC(qps, "Pairs of queue pairs a poll context");
static u32 depth = 32;
module_param(depth, uint, 0);
MODULE_PARM_DESC(depth, "Sends in flight a pair");
static u32 ops = 10000;
module_param(ops, uint, 0);
MODULE_PARM_DESC(ops, "Sends a pair");
static u32 size = 64;
module_param(size, uint, 0);
MODULE_PARM_DESC(size, "Bytes a send");
static u32 contexts = 7;
module_param(contexts, uint, 0);
MODULE_PARM_DESC(contexts, "Sum of the poll contexts: 1 softirq, 2 workqueue, 4 unbound workqueue, 8 direct");
static u32 private;
module_param(private, uint, 0);
MODULE_PARM_DESC(private, "1: completion queues of its own, which direct ones are in any case");
static u32 signal = 1;
module_param(signal, uint, 0);
MODULE_PARM_DESC(signal, "Sends that are posted together, with one completion");

/* As the exerciser has them. */
#define GLANCE_MS		1000
#define GLANCES			30
#define GLANCES_AFTER_FAILURE	5
#define CAPACITY		1024
#define BUDGET			256
#define REST_US			20

#define PART_BITS	5
#define PARTS		(1 << PART_BITS)
#define BUCKETS		((64 - PART_BITS + 1) * PARTS)

struct stats {
	atomic64_t begun;
	atomic64_t unposted;
	atomic64_t sent;
	atomic64_t received;
	atomic64_t corrupt;
	atomic64_t flushed;
	atomic64_t failed;
	atomic64_t wrong_ctx;
} ____cacheline_aligned;

/* A completion queue of the run's own. If it is a direct one, a worker polls it, one at a time. */
struct own_cq {
	struct ib_cq *cq;
	u32 claimed;
	struct work_struct work;
	unsigned long polled;
	bool stop;
};

struct traffic {
	struct ib_device *dev;
	enum ib_poll_context ctx;
	atomic_t unfinished;
	atomic_t failures_logged;
	atomic64_t *latency;
	struct completion over;
	struct end *ends;
	/* As many as there are ends, at most. */
	struct own_cq *own;
	u32 num_own;
	bool private;
};

/* One queue pair of a pair: the one sends, the other receives. */
struct end {
	struct twin_qp qp;
	struct traffic *traffic;
	u32 pair;
	bool open;
	struct stats stats;
	/* Of a receiver: the round that is next in each slot of the sender. */
	atomic64_t *rounds;
	struct twin_req **reqs;
	u32 num_reqs;
	/* Of a sender, if it posts them together. */
	struct twin_batch *batches;
	u32 num_batches;
};

struct run {
	struct ib_device *dev;
	struct work_struct work;
	bool stop;
};

/* In the order of their bits in the parameter. */
static const enum ib_poll_context all[] = {
	IB_POLL_SOFTIRQ, IB_POLL_WORKQUEUE, IB_POLL_UNBOUND_WORKQUEUE, IB_POLL_DIRECT,
};

static const char *const names[] = {
	[IB_POLL_DIRECT] = "direct",
	[IB_POLL_SOFTIRQ] = "softirq",
	[IB_POLL_WORKQUEUE] = "workqueue",
	[IB_POLL_UNBOUND_WORKQUEUE] = "unbound",
};

/* --- messages --------------------------------------------------------------------------------- */

struct id {
	u32 pair;
	u32 slot;
	u64 round;
};

static __always_inline u64 first_word(const struct id *id)
{
	return ((u64)id->pair << 32 | id->slot) * 0x9e3779b97f4a7c15 ^ rol64(id->round, 17);
}

static __always_inline u64 next_word(u64 *state)
{
	u64 x = max(*state, 1ULL);

	x ^= x >> 12;
	x ^= x << 25;
	x ^= x >> 27;
	*state = x;
	return x * 0x2545f4914f6cdd1d;
}

static __always_inline void write_message(const struct id *id, void *data, u32 len)
{
	u64 state = first_word(id), word;

	memcpy(data, id, sizeof(*id));
	data += sizeof(*id);
	len -= sizeof(*id);
	for (; len >= sizeof(word); len -= sizeof(word), data += sizeof(word)) {
		word = next_word(&state);
		memcpy(data, &word, sizeof(word));
	}
	if (len) {
		word = next_word(&state);
		memcpy(data, &word, len);
	}
}

static __always_inline bool read_message(struct id *id, const void *data, u32 len)
{
	u64 state, word;

	memcpy(id, data, sizeof(*id));
	data += sizeof(*id);
	len -= sizeof(*id);
	state = first_word(id);
	for (; len >= sizeof(word); len -= sizeof(word), data += sizeof(word)) {
		word = next_word(&state);
		if (memcmp(data, &word, sizeof(word)))
			return false;
	}
	if (!len)
		return true;
	word = next_word(&state);
	return !memcmp(data, &word, len);
}

/* --- how long sends took ---------------------------------------------------------------------- */

static __always_inline u32 bucket_of(u64 value)
{
	int bits = fls64(value);
	int shift = bits > PART_BITS + 1 ? bits - PART_BITS - 1 : 0;

	return shift * PARTS + (value >> shift);
}

static u64 last_of(u32 index)
{
	u32 shift = index / PARTS ? index / PARTS - 1 : 0;

	return ((u64)(index - shift * PARTS + 1) << shift) - 1;
}

static u64 percentile(const atomic64_t *buckets, u32 percent)
{
	u64 total = 0, seen = 0, rank;
	u32 i;

	for (i = 0; i < BUCKETS; i++)
		total += atomic64_read(&buckets[i]);
	rank = div_u64(total * percent + 99, 100);
	for (i = 0; i < BUCKETS; i++) {
		seen += atomic64_read(&buckets[i]);
		if (seen >= rank && seen > 0)
			return last_of(i);
	}
	return 0;
}

/* --- traffic ---------------------------------------------------------------------------------- */

/* Says how a request failed, if it is the first: that is the cause. */
static void name_failure(struct end *end, const char *what, struct ib_wc *wc)
{
	struct traffic *traffic = end->traffic;

	if (!atomic_xchg(&traffic->failures_logged, 1))
		pr_err("%s: pair=%u %s failed: %s (status %u, vendor error %#x)\n",
		       dev_name(&traffic->dev->dev), end->pair, what, ib_wc_status_msg(wc->status),
		       wc->status, wc->vendor_err);
}

static void end_finished(struct traffic *traffic)
{
	if (atomic_fetch_dec_relaxed(&traffic->unfinished) == 1)
		complete_all(&traffic->over);
}

static __always_inline bool begin_one(struct end *end)
{
	return atomic64_fetch_inc_relaxed(&end->stats.begun) < ops;
}

/* How many more requests are to be posted, if there are so many to do so. */
static __always_inline u32 begin(struct end *end, u32 number)
{
	u64 begun = atomic64_fetch_add_relaxed(number, &end->stats.begun);

	return begun < ops ? min_t(u64, ops - begun, number) : 0;
}

static __always_inline bool in_context(enum ib_poll_context ctx)
{
	if (in_serving_softirq() && !in_hardirq() && !in_nmi())
		return ctx == IB_POLL_SOFTIRQ;
	return ctx != IB_POLL_SOFTIRQ && in_task() && (current->flags & PF_WQ_WORKER) &&
	       !in_atomic() && !irqs_disabled() && !rcu_preempt_depth();
}

static __always_inline void fill(struct end *end, struct twin_req *req)
{
	const struct id id = { .pair = end->pair, .slot = req->slot, .round = req->round };

	write_message(&id, req->data, req->size);
}

static __always_inline void prepare(struct end *end, struct twin_req *req)
{
	fill(end, req);
	req->posted_at = ktime_get();
}

/* Counts what every completion has in common. Says whether the request succeeded. */
static __always_inline bool count(struct end *end, struct ib_wc *wc, const char *what)
{
	if (!in_context(end->traffic->ctx))
		atomic64_inc(&end->stats.wrong_ctx);
	if (likely(wc->status == IB_WC_SUCCESS))
		return true;
	name_failure(end, what, wc);
	if (wc->status == IB_WC_WR_FLUSH_ERR) {
		atomic64_inc(&end->stats.flushed);
	} else {
		atomic64_inc(&end->stats.failed);
		complete_all(&end->traffic->over);
	}
	return false;
}

static __always_inline void sent(struct end *end, struct twin_req *req, struct ib_wc *wc,
				 struct twin_place *place)
{
	if (!count(end, wc, "send"))
		return;
	atomic64_inc(&end->traffic->latency[bucket_of(ktime_get() - req->posted_at)]);
	if (atomic64_fetch_inc_relaxed(&end->stats.sent) + 1 == ops)
		end_finished(end->traffic);
	if (!begin_one(end))
		return;
	req->round++;
	prepare(end, req);
	/* Refused only when the run ends. A request in doubt counts as posted. */
	if (unlikely(twin_repost_send(&end->qp, req, place)) && !atomic_read(&end->qp.doubtful))
		atomic64_inc(&end->stats.unposted);
}

static __always_inline void sent_as_one(struct end *end, struct twin_batch *batch, struct ib_wc *wc,
					u32 *taken)
{
	struct twin_chain chain;
	ktime_t now;
	u32 i;

	if (!count(end, wc, "send"))
		return;
	now = ktime_get();
	for (i = 0; i < batch->len; i++)
		atomic64_inc(&end->traffic->latency[bucket_of(now - batch->reqs[i]->posted_at)]);
	if (atomic64_fetch_add_relaxed(batch->len, &end->stats.sent) + batch->len == ops)
		end_finished(end->traffic);
	batch->len = begin(end, batch->len);
	if (!batch->len)
		return;
	for (i = 0; i < batch->len; i++) {
		batch->reqs[i]->round++;
		fill(end, batch->reqs[i]);
	}
	now = ktime_get();
	for (i = 0; i < batch->len; i++)
		batch->reqs[i]->posted_at = now;
	twin_chain_batch(&chain, batch);
	if (unlikely(twin_repost_chain(&end->qp, &chain, taken)))
		atomic64_add(batch->len - *taken, &end->stats.unposted);
}

static __always_inline bool accept(struct end *end, struct twin_req *req, u32 byte_len)
{
	struct id id;

	if (byte_len != req->size || !read_message(&id, req->data, byte_len) ||
	    id.slot >= min(depth, ops))
		return false;
	return atomic64_fetch_inc_relaxed(&end->rounds[id.slot]) == id.round && id.pair == end->pair;
}

static __always_inline void received(struct end *end, struct twin_req *req, struct ib_wc *wc,
				     struct twin_place *place)
{
	if (!count(end, wc, "receive"))
		return;
	if (!accept(end, req, wc->byte_len))
		atomic64_inc(&end->stats.corrupt);
	if (atomic64_fetch_inc_relaxed(&end->stats.received) + 1 == ops)
		end_finished(end->traffic);
	if (!begin_one(end))
		return;
	if (unlikely(twin_repost_recv(&end->qp, req, place)) && !atomic_read(&end->qp.doubtful))
		atomic64_inc(&end->stats.unposted);
}

static void sent_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct twin_req *req = twin_complete(wc, false);
	struct twin_qp *qp = req->qp;
	struct twin_place place = {};

	sent(container_of(qp, struct end, qp), req, wc, &place);
	twin_handled(qp, &place, TWIN_SEND);
}

/* Of a send for which another was to speak. */
static void silent_done(struct ib_cq *cq, struct ib_wc *wc)
{
	twin_completed_alone(container_of(wc->wr_cqe, struct twin_req, cqe));
	sent_done(cq, wc);
}

static void batch_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct twin_batch *batch = container_of(wc->wr_cqe, struct twin_batch, cqe);
	struct twin_qp *qp = batch->qp;
	u32 len = batch->len, taken = 0;

	if (!twin_batch_complete(batch, wc)) {
		wc->wr_cqe = &batch->reqs[len - 1]->cqe;
		silent_done(cq, wc);
		return;
	}
	sent_as_one(container_of(qp, struct end, qp), batch, wc, &taken);
	twin_batch_handled(qp, len, taken);
}

static void received_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct twin_req *req = twin_complete(wc, true);
	struct twin_qp *qp = req->qp;
	struct twin_place place = {};

	received(container_of(qp, struct end, qp), req, wc, &place);
	twin_handled(qp, &place, TWIN_RECV);
}

/* --- queues of its own ------------------------------------------------------------------------ */

/* Now by hand, now by ib_process_cq_direct(), as the exerciser's worker. */
static void poll_own(struct work_struct *work)
{
	struct own_cq *own = container_of(work, struct own_cq, work);
	struct ib_wc wc[16];
	int n, i;

	while (!smp_load_acquire(&own->stop)) {
		n = 0;
		if (!test_and_set_bit_lock(0, &own->polled)) {
			n = ib_poll_cq(own->cq, ARRAY_SIZE(wc), wc);
			for (i = 0; i < n; i++)
				wc[i].wr_cqe->done(own->cq, &wc[i]);
			clear_bit_unlock(0, &own->polled);
		}
		if (n < 0) {
			pr_err("%s: poll: %d\n", dev_name(&own->cq->device->dev), n);
			return;
		}
		if (!test_and_set_bit_lock(0, &own->polled)) {
			ib_process_cq_direct(own->cq, BUDGET);
			clear_bit_unlock(0, &own->polled);
		}
		fsleep(REST_US);
	}
}

static u32 room(const struct own_cq *own)
{
	return own->cq->cqe - own->claimed;
}

/*
 * Claims entries of a queue of the run's own: of a new one as long as there are fewer than completion
 * vectors, then of the one that has most room.
 */
static struct ib_cq *claim_own(struct traffic *traffic, u32 number)
{
	struct ib_device *dev = traffic->dev;
	struct own_cq *own = NULL;
	u32 i;

	if (traffic->num_own >= dev->num_comp_vectors) {
		own = traffic->own;
		for (i = 1; i < traffic->num_own; i++)
			if (room(&traffic->own[i]) >= room(own))
				own = &traffic->own[i];
		if (room(own) < number)
			own = NULL;
	}
	if (!own) {
		own = &traffic->own[traffic->num_own];
		own->cq = ib_alloc_cq_any(dev, NULL,
					  max(number, min_t(u32, CAPACITY, dev->attrs.max_cqe)),
					  traffic->ctx);
		if (IS_ERR(own->cq))
			return own->cq;
		traffic->num_own++;
		INIT_WORK(&own->work, poll_own);
		if (traffic->ctx == IB_POLL_DIRECT)
			queue_work(system_dfl_wq, &own->work);
	}
	own->claimed += number;
	return own->cq;
}

static void free_own(struct traffic *traffic)
{
	u32 i;

	for (i = 0; i < traffic->num_own; i++) {
		smp_store_release(&traffic->own[i].stop, true);
		cancel_work_sync(&traffic->own[i].work);
	}
	/* After the last completion the RDMA core's softirq handler looks at its queue once more. */
	if (traffic->num_own && traffic->ctx == IB_POLL_SOFTIRQ)
		synchronize_rcu();
	for (i = 0; i < traffic->num_own; i++)
		ib_free_cq(traffic->own[i].cq);
	kvfree(traffic->own);
}

/* --- the run ---------------------------------------------------------------------------------- */

static int usable_gid(struct ib_device *dev)
{
	union ib_gid gid;
	int i, first = -ENOENT;

	for (i = 0; i < 256; i++) {
		if (rdma_query_gid(dev, 1, i, &gid))
			continue;
		if (ipv6_addr_v4mapped((struct in6_addr *)&gid))
			return i;
		if (first < 0 && memchr_inv(&gid, 0, sizeof(gid)))
			first = i;
	}
	return first;
}

/* Puts the requests of a sender together, so many at a time. */
static int make_batches(struct end *end)
{
	struct twin_batch *batch = NULL;
	u32 i;

	end->batches = kvcalloc(DIV_ROUND_UP(end->num_reqs, signal), sizeof(*end->batches), GFP_KERNEL);
	if (!end->batches)
		return -ENOMEM;
	for (i = 0; i < end->num_reqs; i++) {
		if (i % signal == 0) {
			batch = &end->batches[end->num_batches++];
			batch->cqe.done = batch_done;
			batch->qp = &end->qp;
		}
		end->reqs[i]->cqe.done = silent_done;
		end->reqs[i]->nth = batch->len;
		batch->reqs[batch->len++] = end->reqs[i];
	}
	return 0;
}

static int end_open(struct end *end, struct ib_pd *pd, u32 pair, bool sender)
{
	u32 number = sender ? min(depth, ops) : min(2 * depth, ops), i;
	u32 sends = sender ? number : 0, recvs = sender ? 0 : number;
	struct ib_cq *cq;
	int err;

	end->pair = pair;
	if (end->traffic->private) {
		cq = claim_own(end->traffic, twin_entries(sends, recvs));
		if (IS_ERR(cq))
			return PTR_ERR(cq);
		err = twin_qp_init_on(&end->qp, pd, cq, 1, sends, recvs);
	} else {
		err = twin_qp_init(&end->qp, pd, 1, end->traffic->ctx, -1, sends, recvs);
	}
	if (err)
		return err;
	end->open = true;
	if (!sender) {
		end->rounds = kvcalloc(min(depth, ops), sizeof(*end->rounds), GFP_KERNEL);
		if (!end->rounds)
			return -ENOMEM;
	}
	end->reqs = kvcalloc(number, sizeof(*end->reqs), GFP_KERNEL);
	if (!end->reqs)
		return -ENOMEM;
	for (i = 0; i < number; i++) {
		end->reqs[i] = twin_req_new(&end->qp, size, sender ? sent_done : received_done);
		if (!end->reqs[i])
			return -ENOMEM;
		end->reqs[i]->slot = i;
		end->num_reqs++;
	}
	return sender && signal > 1 ? make_batches(end) : 0;
}

static void end_free(struct end *end)
{
	u32 i;

	for (i = 0; i < end->num_reqs; i++)
		twin_req_free(&end->qp, end->reqs[i]);
	kvfree(end->batches);
	kvfree(end->reqs);
	kvfree(end->rounds);
}

/* Posts the first sends, those of a batch together. */
static int start_batches(struct end *end)
{
	struct twin_chain chain;
	u32 i, j;
	int err;

	for (i = 0; i < end->num_batches; i++) {
		struct twin_batch *batch = &end->batches[i];

		batch->len = begin(end, batch->len);
		if (!batch->len)
			return 0;
		for (j = 0; j < batch->len; j++)
			prepare(end, batch->reqs[j]);
		twin_chain_batch(&chain, batch);
		err = twin_post_chain(&end->qp, &chain);
		if (err) {
			atomic64_add(batch->len, &end->stats.unposted);
			return err;
		}
	}
	return 0;
}

static int start(struct end *end, bool sender)
{
	u32 i;
	int err;

	if (end->num_batches)
		return start_batches(end);
	for (i = 0; i < end->num_reqs; i++) {
		if (!begin_one(end))
			return 0;
		if (sender)
			prepare(end, end->reqs[i]);
		err = sender ? twin_post_send(&end->qp, end->reqs[i]) :
			       twin_post_recv(&end->qp, end->reqs[i]);
		if (err) {
			atomic64_inc(&end->stats.unposted);
			return err;
		}
	}
	return 0;
}

static u64 sum(struct traffic *traffic, size_t counter)
{
	u64 sum = 0;
	u32 i;

	for (i = 0; i < 2 * qps; i++)
		sum += atomic64_read((void *)&traffic->ends[i].stats + counter);
	return sum;
}
#define SUM(counter) sum(traffic, offsetof(struct stats, counter))

static u64 sum_posted(struct traffic *traffic)
{
	u64 posted = 0;
	u32 i;

	for (i = 0; i < 2 * qps; i++)
		posted += min_t(u64, atomic64_read(&traffic->ends[i].stats.begun), ops);
	return posted - SUM(unposted);
}

static u64 sum_completed(struct traffic *traffic)
{
	return SUM(sent) + SUM(received) + SUM(flushed) + SUM(failed);
}

static int drive(struct run *run, struct traffic *traffic, struct ib_pd *pd, ktime_t *started)
{
	int gid = usable_gid(run->dev), err;
	u64 before = 0, now;
	u32 i, idle = 0, patience;

	if (gid < 0)
		return gid;
	for (i = 0; i < qps; i++) {
		struct end *sender = &traffic->ends[2 * i], *receiver = sender + 1;

		err = end_open(sender, pd, i, true) ?: end_open(receiver, pd, i, false) ?:
		      twin_qp_connect(&receiver->qp, &sender->qp, gid) ?:
		      twin_qp_connect(&sender->qp, &receiver->qp, gid);
		if (err)
			return err;
	}
	for (i = 0; i < qps; i++) {
		err = start(&traffic->ends[2 * i + 1], false);
		if (err)
			return err;
	}
	*started = ktime_get();
	for (i = 0; i < qps; i++) {
		err = start(&traffic->ends[2 * i], true);
		if (err)
			return err;
	}
	while (!READ_ONCE(run->stop) &&
	       !wait_for_completion_timeout(&traffic->over, msecs_to_jiffies(GLANCE_MS))) {
		now = sum_completed(traffic);
		idle = now == before ? idle + 1 : 0;
		before = now;
		patience = atomic_read(&traffic->failures_logged) ? GLANCES_AFTER_FAILURE : GLANCES;
		if (idle >= patience) {
			pr_err("%s: ctx=%s: no completion for %u ms\n", dev_name(&run->dev->dev),
			       names[traffic->ctx], idle * GLANCE_MS);
			return -ETIMEDOUT;
		}
	}
	return 0;
}

/* How many distinct queues the ends are on. */
static u32 num_cqs(struct traffic *traffic)
{
	u32 number = 0, i, j;

	for (i = 0; i < 2 * qps; i++) {
		for (j = 0; j < i && traffic->ends[j].qp.cq != traffic->ends[i].qp.cq; j++)
			;
		number += i == j && traffic->ends[i].open;
	}
	return number;
}

static void report(struct run *run, struct traffic *traffic, int err, u64 nanos)
{
	u64 wanted = (u64)qps * ops, posted = sum_posted(traffic);
	u64 completed = sum_completed(traffic);
	bool pass = !err && posted == completed && !SUM(corrupt) && !SUM(wrong_ctx) &&
		    SUM(sent) == wanted && SUM(received) == wanted && !SUM(flushed) && !SUM(failed);

	pr_info("%s: ctx=%s cqs=%u leases=%u qps=%u depth=%u size=%u ops=%llu lost=%lld corrupt=%llu flushed=%llu wrong_ctx=%llu ops_per_s=%llu lat_p50_ns=%llu lat_p99_ns=%llu status=%s\n",
		dev_name(&run->dev->dev), names[traffic->ctx], num_cqs(traffic),
		traffic->private ? 0 : 2 * qps, qps, depth, size, SUM(sent),
		posted - completed, SUM(corrupt), SUM(flushed), SUM(wrong_ctx),
		div64_u64(SUM(sent) * 1000000, max(nanos / 1000, 1ULL)),
		percentile(traffic->latency, 50), percentile(traffic->latency, 99),
		pass ? "pass" : "fail");
}

static int run_context(struct run *run, enum ib_poll_context ctx)
{
	struct traffic *traffic = kzalloc_obj(*traffic);
	struct ib_pd *pd = ib_alloc_pd(run->dev, 0);
	ktime_t started = 0, nanos;
	int err = -ENOMEM;
	u32 i;

	if (!traffic || IS_ERR(pd))
		goto free;
	traffic->dev = run->dev;
	traffic->ctx = ctx;
	traffic->private = private || ctx == IB_POLL_DIRECT;
	atomic_set(&traffic->unfinished, 2 * qps);
	init_completion(&traffic->over);
	traffic->latency = kvcalloc(BUCKETS, sizeof(*traffic->latency), GFP_KERNEL);
	traffic->ends = kvcalloc(2 * qps, sizeof(*traffic->ends), GFP_KERNEL);
	traffic->own = kvcalloc(2 * qps, sizeof(*traffic->own), GFP_KERNEL);
	if (!traffic->latency || !traffic->ends || !traffic->own)
		goto free;
	for (i = 0; i < 2 * qps; i++)
		traffic->ends[i].traffic = traffic;

	err = drive(run, traffic, pd, &started);
	nanos = started ? ktime_get() - started : 0;
	if (err)
		pr_err("%s: ctx=%s: error %d\n", dev_name(&run->dev->dev), names[ctx], err);
	/* What is flushed now is no failure. All end before the first is waited for: they flush side by side. */
	atomic_set(&traffic->failures_logged, 1);
	for (i = 0; i < 2 * qps; i++)
		if (traffic->ends[i].open)
			twin_qp_end(&traffic->ends[i].qp);
	for (i = 0; i < 2 * qps; i++)
		if (traffic->ends[i].open)
			twin_qp_close(&traffic->ends[i].qp);
	report(run, traffic, err, nanos);
	for (i = 0; i < 2 * qps; i++)
		end_free(&traffic->ends[i]);

free:
	if (traffic) {
		free_own(traffic);
		kvfree(traffic->ends);
		kvfree(traffic->latency);
	}
	kfree(traffic);
	if (!IS_ERR(pd))
		ib_dealloc_pd(pd);
	return err;
}

static void run_all(struct work_struct *work)
{
	struct run *run = container_of(work, struct run, work);
	int i, done = 0, err = 0;

	for (i = 0; i < ARRAY_SIZE(all); i++) {
		if (!(contexts & BIT(i)) || READ_ONCE(run->stop))
			continue;
		err = run_context(run, all[i]) ?: err;
		done++;
	}
	pr_info("%s: done contexts=%d err=%d\n", dev_name(&run->dev->dev), done, err);
}

static struct ib_client twin_client;

static int twin_add(struct ib_device *dev)
{
	struct run *run = kzalloc_obj(*run);

	if (!run)
		return -ENOMEM;
	run->dev = dev;
	INIT_WORK(&run->work, run_all);
	ib_set_client_data(dev, &twin_client, run);
	queue_work(system_dfl_wq, &run->work);
	return 0;
}

static void twin_remove(struct ib_device *dev, void *data)
{
	struct run *run = data;

	/* A run ends within a glance. */
	WRITE_ONCE(run->stop, true);
	cancel_work_sync(&run->work);
	kfree(run);
}

static struct ib_client twin_client = {
	.name = "bench_twin",
	.add = twin_add,
	.remove = twin_remove,
};

static int __init twin_init(void)
{
	if (!qps || qps > 1024 || !depth || depth > 4096 || !ops || size < sizeof(struct id) ||
	    size > SZ_1M || !contexts || contexts > 15 || private > 1 || !signal || signal > TWIN_CHAIN) {
		pr_err("a parameter is out of range\n");
		return -EINVAL;
	}
	return ib_register_client(&twin_client);
}
module_init(twin_init);

static void __exit twin_exit(void)
{
	ib_unregister_client(&twin_client);
}
module_exit(twin_exit);

MODULE_AUTHOR("The rdma-cq authors");
MODULE_DESCRIPTION("The exerciser in C, to compare with");
MODULE_LICENSE("GPL");
