// SPDX-License-Identifier: GPL-2.0
/*
 * An RDMA device that does as it is told. See fake_device.h.
 */
#include <linux/completion.h>
#include <linux/dcache.h>
#include <linux/debugfs.h>
#include <linux/hrtimer.h>
#include <linux/interrupt.h>
#include <linux/kmemleak.h>
#include <linux/list.h>
#include <linux/netdevice.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>
#include <net/net_namespace.h>
#include <rdma/ib_verbs.h>

#include "fake_device.h"

struct fake_failure {
	u32 after;
	u32 times;
	int err;
};

/*
 * What a test knows the device by. It outlives the ib_device, which the RDMA core frees when it sees
 * fit.
 */
struct fake {
	struct fake_setup setup;
	struct fake_ib *ib;
	/* Protects all of the below, and the lists and states of queues and queue pairs. */
	spinlock_t lock;
	struct list_head pds;
	struct list_head cqs;
	struct list_head qps;
	struct fake_failure failure[FAKE_OPS];
	u32 calls[FAKE_OPS];
	enum fake_refusal refusal;
	enum fake_flush flush;
	/* Whether a request is complete as soon as it is posted. */
	bool echo;
	/* Whether it tells of sends, too, that ask for no completion. */
	bool talkative;
	/* Completes what is in flight, now and then. */
	struct delayed_work pump;
	u32 next_qp_num;
	u32 most_queued;
	u32 overruns;
	u32 bad_posts;
	u32 lost;
};

struct fake_ib {
	struct ib_device ibdev;
	struct fake *fake;
};

struct fake_pd {
	struct ib_pd ibpd;
	struct list_head node;
};

struct fake_cq {
	struct ib_cq ibcq;
	struct list_head node;
	struct list_head done;
	u32 queued;
	bool armed;
};

struct fake_qp {
	struct ib_qp ibqp;
	struct list_head node;
	enum ib_qp_state state;
	struct list_head pending[2];
	u32 num_pending[2];
	u32 depth[2];
};

/* A request: in flight at first, then in a completion queue. */
struct fake_wr {
	struct list_head node;
	struct fake_qp *qp;
	u64 addr;
	u32 len;
	bool silent;
	struct ib_wc wc;
};

static struct fake *to_fake(struct ib_device *ibdev)
{
	return container_of(ibdev, struct fake_ib, ibdev)->fake;
}

static struct fake_cq *to_cq(struct ib_cq *ibcq)
{
	return container_of(ibcq, struct fake_cq, ibcq);
}

static struct fake_qp *to_qp(struct ib_qp *ibqp)
{
	return container_of(ibqp, struct fake_qp, ibqp);
}

/* Counts the call of an op, and says which error it is to end in. */
static int called(struct fake *fake, enum fake_op op)
{
	struct fake_failure *failure = &fake->failure[op];
	int err = 0;

	guard(spinlock_irqsave)(&fake->lock);
	fake->calls[op]++;
	if (failure->after) {
		failure->after--;
	} else if (failure->times) {
		if (failure->times != U32_MAX)
			failure->times--;
		err = failure->err;
	}
	return err;
}

/* --- the device ------------------------------------------------------------------------------- */

static int fake_query_device(struct ib_device *ibdev, struct ib_device_attr *attr,
			     struct ib_udata *udata)
{
	struct fake *fake = to_fake(ibdev);

	/* No two of them are the same, so that a mix-up shows. */
	attr->sys_image_guid = cpu_to_be64(0x0002c90300abcdefULL);
	attr->vendor_id = 0x123456;
	attr->vendor_part_id = 4129;
	attr->hw_ver = 7;
	attr->max_qp = 65536;
	attr->max_qp_wr = fake->setup.max_qp_wr;
	attr->max_send_sge = 31;
	attr->max_recv_sge = 32;
	attr->max_sge_rd = 30;
	attr->max_qp_rd_atom = 16;
	attr->max_qp_init_rd_atom = 17;
	attr->max_cq = 65537;
	attr->max_cqe = fake->setup.max_cqe;
	attr->max_pd = 65538;
	attr->max_mr = 65539;
	attr->max_mr_size = 1ULL << 40;
	attr->page_size_cap = 0xfffffffffffff000ULL;
	attr->max_fast_reg_page_list_len = 511;
	attr->max_srq = 65540;
	attr->max_srq_wr = 32767;
	attr->max_srq_sge = 29;
	attr->max_pkeys = 1;
	attr->kernel_cap_flags = IBK_LOCAL_DMA_LKEY;
	return 0;
}

static void fake_get_dev_fw_str(struct ib_device *ibdev, char *str)
{
	static const char *const text[] = {
		[FAKE_FIRMWARE_NONE] = "",
		[FAKE_FIRMWARE_PLAIN] = "22.36.1010",
		[FAKE_FIRMWARE_LONG] = "0123456789012345678901234567890123456789",
		[FAKE_FIRMWARE_LINE] = "1.2.3\n",
		[FAKE_FIRMWARE_GARBAGE] = "1.\xff",
	};

	snprintf(str, IB_FW_VERSION_NAME_MAX, "%s", text[to_fake(ibdev)->setup.firmware]);
}

static int fake_query_port(struct ib_device *ibdev, u32 port, struct ib_port_attr *attr)
{
	struct fake *fake = to_fake(ibdev);
	int err = called(fake, FAKE_QUERY_PORT);

	if (err)
		return err;
	attr->state = fake->setup.port_state;
	attr->phys_state = IB_PORT_PHYS_STATE_LINK_UP;
	attr->max_mtu = IB_MTU_4096;
	attr->active_mtu = IB_MTU_4096;
	attr->gid_tbl_len = 3;
	attr->pkey_tbl_len = 1;
	attr->max_msg_sz = SZ_1G;
	attr->lid = port;
	return 0;
}

static int fake_get_port_immutable(struct ib_device *ibdev, u32 port,
				   struct ib_port_immutable *immutable)
{
	/* Of an InfiniBand port without any management: no agent starts on it. */
	immutable->core_cap_flags = to_fake(ibdev)->setup.iwarp ? RDMA_CORE_CAP_PROT_IWARP :
								  RDMA_CORE_CAP_PROT_IB;
	immutable->gid_tbl_len = 3;
	immutable->pkey_tbl_len = 1;
	return 0;
}

/* The first is a link-local address, the second looks like an IPv4 address, the third is empty. */
static int fake_query_gid(struct ib_device *ibdev, u32 port, int index, union ib_gid *gid)
{
	memset(gid, 0, sizeof(*gid));
	if (index == 0) {
		gid->raw[0] = 0xfe;
		gid->raw[1] = 0x80;
		gid->raw[15] = port;
	} else if (index == 1) {
		gid->raw[10] = 0xff;
		gid->raw[11] = 0xff;
		gid->raw[12] = 10;
		gid->raw[15] = port;
	}
	return 0;
}

static int fake_query_pkey(struct ib_device *ibdev, u32 port, u16 index, u16 *pkey)
{
	*pkey = 0xffff;
	return 0;
}

static int fake_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct fake_pd *pd = container_of(ibpd, struct fake_pd, ibpd);
	struct fake *fake = to_fake(ibpd->device);
	int err = called(fake, FAKE_ALLOC_PD);

	if (err)
		return err;
	guard(spinlock_irqsave)(&fake->lock);
	list_add_tail(&pd->node, &fake->pds);
	return 0;
}

static int fake_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct fake_pd *pd = container_of(ibpd, struct fake_pd, ibpd);
	struct fake *fake = to_fake(ibpd->device);
	int err = called(fake, FAKE_DEALLOC_PD);

	if (err)
		return err;
	guard(spinlock_irqsave)(&fake->lock);
	list_del(&pd->node);
	return 0;
}

static struct ib_mr *fake_get_dma_mr(struct ib_pd *ibpd, int access)
{
	return ERR_PTR(-EOPNOTSUPP);
}

static struct ib_mr *fake_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 virt_addr,
				      int access, struct ib_dmah *dmah, struct ib_udata *udata)
{
	return ERR_PTR(-EOPNOTSUPP);
}

static int fake_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata)
{
	return -EOPNOTSUPP;
}

/* --- completion queues ------------------------------------------------------------------------ */

static int fake_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
			  struct uverbs_attr_bundle *attrs)
{
	struct fake_cq *cq = to_cq(ibcq);
	struct fake *fake = to_fake(ibcq->device);
	int err = called(fake, FAKE_CREATE_CQ);

	if (err)
		return err;
	if (attr->cqe < 1 || attr->cqe > fake->setup.max_cqe)
		return -EINVAL;
	ibcq->cqe = attr->cqe;
	INIT_LIST_HEAD(&cq->done);
	guard(spinlock_irqsave)(&fake->lock);
	list_add_tail(&cq->node, &fake->cqs);
	return 0;
}

static int fake_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct fake_cq *cq = to_cq(ibcq);
	struct fake *fake = to_fake(ibcq->device);
	struct fake_wr *wr, *next;
	int err = called(fake, FAKE_DESTROY_CQ);

	if (err)
		return err;
	scoped_guard(spinlock_irqsave, &fake->lock) {
		list_del(&cq->node);
		fake->lost += cq->queued;
	}
	list_for_each_entry_safe(wr, next, &cq->done, node)
		kfree(wr);
	return 0;
}

static int fake_poll_cq(struct ib_cq *ibcq, int num, struct ib_wc *wc)
{
	struct fake_cq *cq = to_cq(ibcq);
	struct fake *fake = to_fake(ibcq->device);
	int n = called(fake, FAKE_POLL_CQ);
	struct fake_wr *wr;

	if (n)
		return n;
	guard(spinlock_irqsave)(&fake->lock);
	while (n < num) {
		wr = list_first_entry_or_null(&cq->done, struct fake_wr, node);
		if (!wr)
			break;
		list_del(&wr->node);
		cq->queued--;
		wc[n++] = wr->wc;
		kfree(wr);
	}
	return n;
}

static int fake_modify_cq(struct ib_cq *ibcq, u16 count, u16 period)
{
	return called(to_fake(ibcq->device), FAKE_MODIFY_CQ);
}

static int fake_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags flags)
{
	struct fake_cq *cq = to_cq(ibcq);
	struct fake *fake = to_fake(ibcq->device);

	guard(spinlock_irqsave)(&fake->lock);
	cq->armed = true;
	return (flags & IB_CQ_REPORT_MISSED_EVENTS) && cq->queued;
}

/*
 * Puts a request into its completion queue, unless it asks for none. As in rxe, the interrupt comes under
 * the lock.
 */
static void finish(struct fake *fake, struct fake_wr *wr, bool recv, const struct fake_wc *wc)
{
	struct fake_qp *qp = wr->qp;
	struct ib_cq *ibcq = recv ? qp->ibqp.recv_cq : qp->ibqp.send_cq;
	struct fake_cq *cq = to_cq(ibcq);
	struct ib_cqe *cqe = wr->wc.wr_cqe;

	lockdep_assert_held(&fake->lock);
	list_del(&wr->node);
	qp->num_pending[recv]--;
	if (recv && wc->status == IB_WC_SUCCESS)
		memset((void *)(uintptr_t)wr->addr, wc->fill, min(wr->len, wc->byte_len));
	if (wr->silent && wc->status == IB_WC_SUCCESS && !fake->talkative) {
		kfree(wr);
		return;
	}
	/* Of a failed request, nothing else is defined than what follows; of a send, no length either. */
	memset(&wr->wc, FAKE_POISON, sizeof(wr->wc));
	wr->wc.wr_cqe = cqe;
	wr->wc.status = wc->status;
	wr->wc.qp = &qp->ibqp;
	if (wc->status == IB_WC_SUCCESS) {
		wr->wc.opcode = wc->opcode != FAKE_OPCODE_POSTED ? wc->opcode :
				recv				 ? IB_WC_RECV :
								   IB_WC_SEND;
		wr->wc.wc_flags = wc->flags;
		if (wr->wc.opcode & IB_WC_RECV) {
			wr->wc.byte_len = wc->byte_len;
			if (wc->flags & (IB_WC_WITH_IMM | IB_WC_WITH_INVALIDATE))
				wr->wc.ex.invalidate_rkey = wc->ex;
		}
	} else {
		wr->wc.vendor_err = wc->vendor_err;
	}
	list_add_tail(&wr->node, &cq->done);
	cq->queued++;
	fake->most_queued = max(fake->most_queued, cq->queued);
	if (cq->queued > ibcq->cqe)
		fake->overruns++;
	if (cq->armed) {
		cq->armed = false;
		ibcq->comp_handler(ibcq, ibcq->cq_context);
	}
}

static void finish_queue(struct fake *fake, struct fake_qp *qp, bool recv, const struct fake_wc *wc)
{
	struct fake_wr *wr, *next;

	list_for_each_entry_safe(wr, next, &qp->pending[recv], node)
		finish(fake, wr, recv, wc);
}

static void finish_qp(struct fake *fake, struct fake_qp *qp, const struct fake_wc *wc)
{
	finish_queue(fake, qp, false, wc);
	finish_queue(fake, qp, true, wc);
}

static bool flushes_at_once(const struct fake *fake)
{
	return fake->flush == FAKE_FLUSH_AT_ONCE || fake->flush == FAKE_FLUSH_RECEIVES;
}

static void flush_qp(struct fake *fake, struct fake_qp *qp)
{
	static const struct fake_wc wc = { .status = IB_WC_WR_FLUSH_ERR, .vendor_err = 0xf1 };

	if (fake->flush != FAKE_FLUSH_RECEIVES)
		finish_queue(fake, qp, false, &wc);
	finish_queue(fake, qp, true, &wc);
}

/* --- queue pairs ------------------------------------------------------------------------------ */

static int fake_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *attr, struct ib_udata *udata)
{
	struct fake_qp *qp = to_qp(ibqp);
	struct fake *fake = to_fake(ibqp->device);
	int err = called(fake, FAKE_CREATE_QP);

	if (err)
		return err;
	if (attr->cap.max_send_wr > fake->setup.max_qp_wr ||
	    attr->cap.max_recv_wr > fake->setup.max_qp_wr)
		return -EINVAL;
	qp->state = IB_QPS_RESET;
	qp->depth[0] = attr->cap.max_send_wr;
	qp->depth[1] = attr->cap.max_recv_wr;
	INIT_LIST_HEAD(&qp->pending[0]);
	INIT_LIST_HEAD(&qp->pending[1]);
	guard(spinlock_irqsave)(&fake->lock);
	ibqp->qp_num = fake->next_qp_num++;
	list_add_tail(&qp->node, &fake->qps);
	return 0;
}

static int fake_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
			  struct ib_udata *udata)
{
	static const enum fake_op ops[] = {
		[IB_QPS_INIT] = FAKE_MODIFY_INIT,
		[IB_QPS_RTR] = FAKE_MODIFY_RTR,
		[IB_QPS_RTS] = FAKE_MODIFY_RTS,
		[IB_QPS_ERR] = FAKE_MODIFY_ERR,
	};
	struct fake_qp *qp = to_qp(ibqp);
	struct fake *fake = to_fake(ibqp->device);
	int err;

	if (!(mask & IB_QP_STATE) || attr->qp_state >= ARRAY_SIZE(ops) || !attr->qp_state)
		return -EINVAL;
	err = called(fake, ops[attr->qp_state]);
	if (err)
		return err;

	guard(spinlock_irqsave)(&fake->lock);
	if (!ib_modify_qp_is_ok(qp->state, attr->qp_state, ibqp->qp_type, mask))
		return -EINVAL;
	qp->state = attr->qp_state;
	if (qp->state == IB_QPS_ERR && flushes_at_once(fake))
		flush_qp(fake, qp);
	return 0;
}

static int fake_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct fake_qp *qp = to_qp(ibqp);
	struct fake *fake = to_fake(ibqp->device);
	struct fake_wr *wr, *next;
	int err = called(fake, FAKE_DESTROY_QP);
	LIST_HEAD(forgotten);

	if (err)
		return err;
	scoped_guard(spinlock_irqsave, &fake->lock) {
		if (fake->flush == FAKE_FLUSH_ON_DESTROY)
			flush_qp(fake, qp);
		list_splice_init(&qp->pending[0], &forgotten);
		list_splice_init(&qp->pending[1], &forgotten);
		list_del(&qp->node);
	}
	list_for_each_entry_safe(wr, next, &forgotten, node)
		kfree(wr);
	return 0;
}

static bool may_post(struct fake_qp *qp, bool recv)
{
	if (qp->num_pending[recv] >= qp->depth[recv])
		return false;
	if (recv)
		return qp->state != IB_QPS_RESET;
	return qp->state == IB_QPS_RTS || qp->state == IB_QPS_ERR;
}

/* Posts a request. Says by *named whether the error is the caller's to handle, as bad_wr would. */
static int post(struct ib_qp *ibqp, bool recv, struct ib_cqe *cqe, const struct ib_sge *sge,
		int num_sge, bool silent, bool *named)
{
	struct fake_qp *qp = to_qp(ibqp);
	struct fake *fake = to_fake(ibqp->device);
	int err = called(fake, recv ? FAKE_POST_RECV : FAKE_POST_SEND);
	struct fake_wr *wr;

	*named = true;
	wr = kzalloc_obj(*wr, GFP_ATOMIC);
	if (!wr)
		return -ENOMEM;
	wr->qp = qp;
	wr->wc.wr_cqe = cqe;
	wr->addr = num_sge ? sge->addr : 0;
	wr->len = num_sge ? sge->length : 0;
	wr->silent = silent;

	guard(spinlock_irqsave)(&fake->lock);
	if (err && fake->refusal != FAKE_REFUSE_TAKEN) {
		*named = fake->refusal == FAKE_REFUSE_NAMED;
		kfree(wr);
		return err;
	}
	if (!may_post(qp, recv)) {
		fake->bad_posts++;
		kfree(wr);
		return -EINVAL;
	}
	list_add_tail(&wr->node, &qp->pending[recv]);
	qp->num_pending[recv]++;
	if (qp->state == IB_QPS_ERR && flushes_at_once(fake))
		flush_qp(fake, qp);
	else if (fake->echo)
		finish(fake, wr, recv,
		       &(struct fake_wc){ .byte_len = wr->len, .opcode = FAKE_OPCODE_POSTED });
	*named = false;
	return err;
}

static int fake_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr,
			  const struct ib_send_wr **bad_wr)
{
	bool named;
	int err = 0;

	for (; wr && !err; wr = err ? wr : wr->next)
		err = post(ibqp, false, wr->wr_cqe, wr->sg_list, wr->num_sge,
			   !(wr->send_flags & IB_SEND_SIGNALED), &named);
	if (err && named)
		*bad_wr = wr;
	return err;
}

static int fake_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
			  const struct ib_recv_wr **bad_wr)
{
	bool named;
	int err = 0;

	for (; wr && !err; wr = err ? wr : wr->next)
		err = post(ibqp, true, wr->wr_cqe, wr->sg_list, wr->num_sge, false, &named);
	if (err && named)
		*bad_wr = wr;
	return err;
}

static const struct ib_device_ops fake_firmware_ops = {
	.get_dev_fw_str = fake_get_dev_fw_str,
};

static const struct ib_device_ops fake_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_UNKNOWN,

	.alloc_pd = fake_alloc_pd,
	.create_cq = fake_create_cq,
	.create_qp = fake_create_qp,
	.dealloc_pd = fake_dealloc_pd,
	.dereg_mr = fake_dereg_mr,
	.destroy_cq = fake_destroy_cq,
	.destroy_qp = fake_destroy_qp,
	.get_dma_mr = fake_get_dma_mr,
	.get_port_immutable = fake_get_port_immutable,
	.modify_cq = fake_modify_cq,
	.modify_qp = fake_modify_qp,
	.poll_cq = fake_poll_cq,
	.post_recv = fake_post_recv,
	.post_send = fake_post_send,
	.query_device = fake_query_device,
	.query_gid = fake_query_gid,
	.query_pkey = fake_query_pkey,
	.query_port = fake_query_port,
	.reg_user_mr = fake_reg_user_mr,
	.req_notify_cq = fake_req_notify_cq,

	INIT_RDMA_OBJ_SIZE(ib_pd, fake_pd, ibpd),
	INIT_RDMA_OBJ_SIZE(ib_cq, fake_cq, ibcq),
	INIT_RDMA_OBJ_SIZE(ib_qp, fake_qp, ibqp),
};

/* --- what the tests call ---------------------------------------------------------------------- */

static void pump(struct work_struct *work)
{
	struct fake *fake = container_of(to_delayed_work(work), struct fake, pump);
	static const struct fake_wc wc = { .byte_len = 1, .opcode = FAKE_OPCODE_POSTED };
	struct fake_qp *qp;

	scoped_guard(spinlock_irqsave, &fake->lock)
		list_for_each_entry(qp, &fake->qps, node)
			if (qp->state != IB_QPS_ERR)
				finish_qp(fake, qp, &wc);
	queue_delayed_work(system_dfl_wq, &fake->pump, 1);
}

struct fake *fake_new(const struct fake_setup *setup)
{
	struct fake *fake = kzalloc_obj(*fake);

	if (!fake)
		return NULL;
	fake->setup = *setup;
	spin_lock_init(&fake->lock);
	INIT_LIST_HEAD(&fake->pds);
	INIT_LIST_HEAD(&fake->cqs);
	INIT_LIST_HEAD(&fake->qps);
	INIT_DELAYED_WORK(&fake->pump, pump);
	fake->next_qp_num = 0x11;
	return fake;
}

int fake_register(struct fake *fake)
{
	struct fake_ib *ib;
	int err;

	ib = ib_alloc_device(fake_ib, ibdev);
	if (!ib)
		return -ENOMEM;
	ib->fake = fake;
	ib->ibdev.node_type = fake->setup.iwarp ? RDMA_NODE_RNIC : RDMA_NODE_IB_CA;
	ib->ibdev.node_guid = cpu_to_be64(0x0002c90300123456ULL);
	ib->ibdev.phys_port_cnt = fake->setup.ports;
	ib->ibdev.num_comp_vectors = fake->setup.num_comp_vectors;
	ib->ibdev.local_dma_lkey = 0x600d;
	ib_set_device_ops(&ib->ibdev, &fake_ops);
	if (fake->setup.firmware != FAKE_FIRMWARE_NONE)
		ib_set_device_ops(&ib->ibdev, &fake_firmware_ops);
	fake->ib = ib;
	/* An iWARP port has the state of its network device. */
	err = fake->setup.iwarp || fake->setup.netdev ?
		      ib_device_set_netdev(&ib->ibdev, init_net.loopback_dev, 1) :
		      0;
	if (!err)
		err = ib_register_device(&ib->ibdev, "fake%d", NULL);
	if (err) {
		fake->ib = NULL;
		ib_dealloc_device(&ib->ibdev);
	}
	return err;
}

void fake_unregister(struct fake *fake)
{
	ib_unregister_device(&fake->ib->ibdev);
	ib_dealloc_device(&fake->ib->ibdev);
	fake->ib = NULL;
	cancel_delayed_work_sync(&fake->pump);
}

void fake_free(struct fake *fake)
{
	kfree(fake);
}

/* Has the op fail `times` times (U32_MAX for ever) with `err`, after `after` calls. */
void fake_fail(struct fake *fake, enum fake_op op, u32 after, u32 times, int err)
{
	guard(spinlock_irqsave)(&fake->lock);
	fake->failure[op] = (struct fake_failure){ .after = after, .times = times, .err = err };
}

/* Says what posts that are refused do besides. */
void fake_refuse(struct fake *fake, enum fake_refusal refusal)
{
	guard(spinlock_irqsave)(&fake->lock);
	fake->refusal = refusal;
}

void fake_flush_when(struct fake *fake, enum fake_flush flush)
{
	guard(spinlock_irqsave)(&fake->lock);
	fake->flush = flush;
}

/* Has it tell of each send, whether asked to or not. */
void fake_talk(struct fake *fake, bool talkative)
{
	guard(spinlock_irqsave)(&fake->lock);
	fake->talkative = talkative;
}

/* Has all requests complete as soon as they are posted, while the post is still under way. */
void fake_echo(struct fake *fake, bool echo)
{
	guard(spinlock_irqsave)(&fake->lock);
	fake->echo = echo;
}

/*
 * Has all requests complete soon after they were posted, until the device goes. What is posted again by
 * a handler takes its time as well, so that a softirq which does nothing else comes to an end.
 */
void fake_pump(struct fake *fake)
{
	queue_delayed_work(system_dfl_wq, &fake->pump, 0);
}

u32 fake_calls(struct fake *fake, enum fake_op op)
{
	guard(spinlock_irqsave)(&fake->lock);
	return fake->calls[op];
}

u32 fake_count(struct fake *fake, enum fake_count count)
{
	struct fake_cq *cq;
	struct fake_qp *qp;
	u32 n = 0;

	guard(spinlock_irqsave)(&fake->lock);
	switch (count) {
	case FAKE_LIVE_PD:
		return list_count_nodes(&fake->pds);
	case FAKE_LIVE_CQ:
		return list_count_nodes(&fake->cqs);
	case FAKE_LIVE_QP:
		return list_count_nodes(&fake->qps);
	case FAKE_LEASED:
		list_for_each_entry(cq, &fake->cqs, node)
			n += READ_ONCE(cq->ibcq.cqe_used);
		return n;
	case FAKE_MOST_QUEUED:
		return fake->most_queued;
	case FAKE_OVERRUNS:
		return fake->overruns;
	case FAKE_BAD_POSTS:
		return fake->bad_posts;
	case FAKE_LOST:
		return fake->lost;
	case FAKE_PENDING_SENDS:
	case FAKE_PENDING_RECVS:
		list_for_each_entry(qp, &fake->qps, node)
			n += qp->num_pending[count == FAKE_PENDING_RECVS];
		return n;
	case FAKE_QUEUED:
		list_for_each_entry(cq, &fake->cqs, node)
			n += cq->queued;
		return n;
	case FAKE_COUNTS:
		break;
	}
	return 0;
}

static struct fake_qp *find_qp(struct fake *fake, u32 qp_num)
{
	struct fake_qp *qp;

	list_for_each_entry(qp, &fake->qps, node)
		if (qp->ibqp.qp_num == qp_num)
			return qp;
	return NULL;
}

/* How many requests are in flight on one side of a queue pair. */
u32 fake_pending(struct fake *fake, u32 qp_num, bool recv)
{
	struct fake_qp *qp;

	guard(spinlock_irqsave)(&fake->lock);
	qp = find_qp(fake, qp_num);
	return qp ? qp->num_pending[recv] : 0;
}

/* How many bytes the newest request on one side of a queue pair has; U32_MAX if there is none. */
u32 fake_posted_len(struct fake *fake, u32 qp_num, bool recv)
{
	struct fake_qp *qp;

	guard(spinlock_irqsave)(&fake->lock);
	qp = find_qp(fake, qp_num);
	if (!qp || list_empty(&qp->pending[recv]))
		return U32_MAX;
	return list_last_entry(&qp->pending[recv], struct fake_wr, node)->len;
}

struct complete_args {
	struct fake *fake;
	u32 qp_num;
	bool recv;
	u32 index;
	const struct fake_wc *wc;
	int err;
};

static void complete_one(void *data)
{
	struct complete_args *args = data;
	struct fake_wr *wr;
	struct fake_qp *qp;
	u32 i = 0;

	guard(spinlock_irqsave)(&args->fake->lock);
	args->err = -ENOENT;
	qp = find_qp(args->fake, args->qp_num);
	if (!qp)
		return;
	list_for_each_entry(wr, &qp->pending[args->recv], node) {
		if (i++ < args->index)
			continue;
		finish(args->fake, wr, args->recv, args->wc);
		args->err = 0;
		return;
	}
}

/* Completes the index-th oldest request of one side of a queue pair, from a context. */
int fake_complete(struct fake *fake, u32 qp_num, bool recv, u32 index, const struct fake_wc *wc,
		  enum fake_context context)
{
	struct complete_args args = {
		.fake = fake,
		.qp_num = qp_num,
		.recv = recv,
		.index = index,
		.wc = wc,
	};

	fake_run(context, complete_one, &args);
	return args.err;
}

static void flush_all(void *data)
{
	struct fake *fake = data;
	struct fake_qp *qp;

	guard(spinlock_irqsave)(&fake->lock);
	list_for_each_entry(qp, &fake->qps, node)
		flush_qp(fake, qp);
}

/* Flushes all queue pairs, whatever their state. */
void fake_flush_all(struct fake *fake, enum fake_context context)
{
	fake_run(context, flush_all, fake);
}

/*
 * Makes a switch of the device, for a moment: it can't be registered as one. The RDMA core looks at a
 * port 1 then that isn't there.
 */
void fake_switch(struct fake *fake, bool is_switch)
{
	fake->ib->ibdev.is_switch = is_switch;
}

void fake_event(struct fake *fake, u32 type, u32 port)
{
	struct ib_event event = {
		.device = &fake->ib->ibdev,
		.element.port_num = port,
		.event = type,
	};

	ib_dispatch_event(&event);
}

/* Tells of an event as the core does of an address that changed: drivers can't. */
void fake_event_straight(struct fake *fake, u32 type, u32 port)
{
	struct ib_device *ibdev = &fake->ib->ibdev;
	struct ib_event_handler *handler;
	struct ib_event event = {
		.device = ibdev,
		.element.port_num = port,
		.event = type,
	};

	down_read(&ibdev->event_handler_rwsem);
	list_for_each_entry(handler, &ibdev->event_handler_list, list)
		handler->handler(handler, &event);
	up_read(&ibdev->event_handler_rwsem);
}

/* Waits until all events were delivered. */
void fake_settle(void)
{
	flush_workqueue(ib_wq);
}

/*
 * Takes down what a client has left: the RDMA core warns when a device goes that still has objects,
 * or a pool with entries leased. Only for what was left on purpose.
 */
void fake_scavenge(struct fake *fake)
{
	struct fake_qp *qp, *next_qp;
	struct fake_pd *pd, *next_pd;
	struct fake_cq *cq, *next_cq;

	/* Nobody else is at work on the device any more. */
	memset(fake->failure, 0, sizeof(fake->failure));
	list_for_each_entry_safe(qp, next_qp, &fake->qps, node)
		ib_destroy_qp_user(&qp->ibqp, NULL);
	list_for_each_entry_safe(cq, next_cq, &fake->cqs, node) {
		if (cq->ibcq.shared)
			ib_cq_pool_put(&cq->ibcq, cq->ibcq.cqe_used);
		else
			ib_free_cq(&cq->ibcq);
	}
	list_for_each_entry_safe(pd, next_pd, &fake->pds, node)
		ib_dealloc_pd_user(&pd->ibpd, NULL);
}

/* --- contexts --------------------------------------------------------------------------------- */

struct run {
	void (*fn)(void *data);
	void *data;
	struct hrtimer timer;
	struct tasklet_struct tasklet;
	struct work_struct work;
	struct completion done;
};

static enum hrtimer_restart run_timer(struct hrtimer *timer)
{
	struct run *run = container_of(timer, struct run, timer);

	run->fn(run->data);
	complete(&run->done);
	return HRTIMER_NORESTART;
}

static void run_tasklet(struct tasklet_struct *tasklet)
{
	struct run *run = container_of(tasklet, struct run, tasklet);

	run->fn(run->data);
	complete(&run->done);
}

static void run_work(struct work_struct *work)
{
	struct run *run = container_of(work, struct run, work);

	run->fn(run->data);
}

/* Calls a function in a context, and waits until it returned. */
void fake_run(enum fake_context context, void (*fn)(void *data), void *data)
{
	static DEFINE_SPINLOCK(lock);
	struct run run = { .fn = fn, .data = data };
	unsigned long flags;

	switch (context) {
	case FAKE_TASK:
		fn(data);
		break;
	case FAKE_IRQS_OFF:
		local_irq_save(flags);
		fn(data);
		local_irq_restore(flags);
		break;
	case FAKE_SPINLOCK:
		spin_lock(&lock);
		fn(data);
		spin_unlock(&lock);
		break;
	case FAKE_PREEMPT_OFF:
		preempt_disable();
		fn(data);
		preempt_enable();
		break;
	case FAKE_BH_OFF:
		local_bh_disable();
		fn(data);
		local_bh_enable();
		break;
	case FAKE_RCU:
		rcu_read_lock();
		fn(data);
		rcu_read_unlock();
		break;
	case FAKE_SOFTIRQ:
		init_completion(&run.done);
		tasklet_setup(&run.tasklet, run_tasklet);
		tasklet_schedule(&run.tasklet);
		wait_for_completion(&run.done);
		tasklet_kill(&run.tasklet);
		break;
	case FAKE_HARDIRQ:
		init_completion(&run.done);
		hrtimer_setup_on_stack(&run.timer, run_timer, CLOCK_MONOTONIC,
				       HRTIMER_MODE_REL_HARD);
		hrtimer_start(&run.timer, 0, HRTIMER_MODE_REL_HARD);
		wait_for_completion(&run.done);
		hrtimer_cancel(&run.timer);
		destroy_hrtimer_on_stack(&run.timer);
		break;
	case FAKE_WORKER:
		INIT_WORK_ONSTACK(&run.work, run_work);
		queue_work(system_dfl_wq, &run.work);
		flush_work(&run.work);
		destroy_work_on_stack(&run.work);
		break;
	case FAKE_CONTEXTS:
		break;
	}
}

/* --- leaks ------------------------------------------------------------------------------------ */

struct known_leak {
	struct known_leak *next;
	const void *p;
};

/*
 * Tells kmemleak of memory that a test leaks on purpose: by something that is never reported, nor
 * freed, and is looked through for pointers. `p` may point into the middle of the memory; what that
 * refers to is then known as well.
 */
void fake_known_leak(const void *p)
{
	struct known_leak *leak = kzalloc_obj(*leak);

	if (!leak)
		return;
	kmemleak_not_leak(leak);
	leak->p = p;
}

/* Whether a client has a directory in debugfs; or one for that device; or that file in it. */
bool fake_in_debugfs(const char *client, const char *device, const char *file)
{
	const char *names[] = { client, device, file };
	struct dentry *here = NULL;
	int i;

	for (i = 0; i < ARRAY_SIZE(names) && names[i]; i++) {
		struct dentry *there = debugfs_lookup(names[i], here);

		dput(here);
		if (!there)
			return false;
		here = there;
	}
	dput(here);
	return true;
}

/* --- real devices ----------------------------------------------------------------------------- */

static const char *wanted;
static struct ib_device *found;

static int find_real(struct ib_device *device)
{
	if (!strcmp(dev_name(&device->dev), wanted) && ib_device_try_get(device))
		found = device;
	return 0;
}

/* The device of that name, which then can't go until it is put. One caller at a time. */
struct ib_device *real_get(const char *name)
{
	/* Only clients are told of devices. */
	static struct ib_client finder = { .name = "rdma_kunit_finder", .add = find_real };

	wanted = name;
	found = NULL;
	if (ib_register_client(&finder))
		return NULL;
	ib_unregister_client(&finder);
	return found;
}

void real_put(struct ib_device *device)
{
	ib_device_put(device);
}

u32 real_count(struct ib_device *device, enum real_count count)
{
	struct ib_cq *cq;
	u32 n = 0;
	int i;

	switch (count) {
	case REAL_PD:
		return rdma_restrack_count(device, RDMA_RESTRACK_PD, true);
	case REAL_QP:
		return rdma_restrack_count(device, RDMA_RESTRACK_QP, true);
	case REAL_CM_ID:
		return rdma_restrack_count(device, RDMA_RESTRACK_CM_ID, true);
	case REAL_LEASED: {
		guard(spinlock_irq)(&device->cq_pools_lock);
		for (i = 0; i < ARRAY_SIZE(device->cq_pools); i++)
			list_for_each_entry(cq, &device->cq_pools[i], pool_entry)
				n += cq->cqe_used;
		return n;
	}
	default:
		return 0;
	}
}
