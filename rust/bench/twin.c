// SPDX-License-Identifier: GPL-2.0
/*
 * What of the twin is not on the way of a request. See twin.h.
 */
#include "twin.h"

/* As the crate rdma has them, in rust/rdma/qp.rs. */
#define MIN_RNR_TIMER	1
#define ACK_TIMEOUT	18
#define RETRIES		6
#define RNR_RETRIES	7
#define HOP_LIMIT	64
#define FLUSH_MS	60000
#define LISTEN_MS	10

struct twin_req *twin_req_new(struct twin_qp *qp, u32 size, void (*done)(struct ib_cq *, struct ib_wc *))
{
	struct twin_req *req = kzalloc_obj(*req);

	if (!req)
		return NULL;
	req->data = kzalloc(size, GFP_KERNEL);
	if (!req->data)
		goto free_req;
	req->addr = ib_dma_map_single(qp->dev, req->data, size, DMA_BIDIRECTIONAL);
	if (ib_dma_mapping_error(qp->dev, req->addr))
		goto free_data;
	req->cqe.done = done;
	req->qp = qp;
	req->len = size;
	req->size = size;
	return req;

free_data:
	kfree(req->data);
free_req:
	kfree(req);
	return NULL;
}

void twin_req_free(struct twin_qp *qp, struct twin_req *req)
{
	ib_dma_unmap_single(qp->dev, req->addr, req->size, DMA_BIDIRECTIONAL);
	kfree(req->data);
	kfree(req);
}

int twin_qp_init_on(struct twin_qp *qp, struct ib_pd *pd, struct ib_cq *cq, u32 port, u32 send_depth,
		    u32 recv_depth)
{
	struct ib_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = {
			.max_send_wr = max(send_depth, 1),
			.max_recv_wr = max(recv_depth, 1),
			.max_send_sge = 1,
			.max_recv_sge = 1,
		},
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
	};
	struct ib_qp_attr attr = { .qp_state = IB_QPS_INIT, .port_num = port };
	int err;

	qp->dev = pd->device;
	qp->cq = cq;
	qp->lkey = pd->local_dma_lkey;
	qp->send_depth = send_depth;
	qp->recv_depth = recv_depth;
	qp->recv_limit = recv_depth;
	qp->port = port;
	init_completion(&qp->drained);
	qp->qp = ib_create_qp(pd, &init);
	if (IS_ERR(qp->qp))
		return PTR_ERR(qp->qp);
	qp->num = qp->qp->qp_num;
	err = ib_modify_qp(qp->qp, &attr,
			   IB_QP_STATE | IB_QP_PKEY_INDEX | IB_QP_PORT | IB_QP_ACCESS_FLAGS);
	if (err)
		ib_destroy_qp(qp->qp);
	return err;
}

int twin_qp_init(struct twin_qp *qp, struct ib_pd *pd, u32 port, enum ib_poll_context ctx,
		 int vector, u32 send_depth, u32 recv_depth)
{
	u32 entries = twin_entries(send_depth, recv_depth);
	struct ib_cq *cq = ib_cq_pool_get(pd->device, entries, vector, ctx);
	int err;

	if (IS_ERR(cq))
		return PTR_ERR(cq);
	err = twin_qp_init_on(qp, pd, cq, port, send_depth, recv_depth);
	if (err) {
		ib_cq_pool_put(cq, entries);
		return err;
	}
	qp->leased = entries;
	return 0;
}

/* Has to be done to both. The numbers of the first packets are those of the queue pairs. */
int twin_qp_connect(struct twin_qp *qp, const struct twin_qp *peer, u8 gid_index)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.dest_qp_num = peer->num,
		.rq_psn = peer->num & 0xffffff,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = MIN_RNR_TIMER,
	};
	const struct ib_gid_attr *gid;
	struct ib_port_attr port;
	int err;

	err = ib_query_port(qp->dev, qp->port, &port);
	if (err)
		return err;
	attr.path_mtu = port.active_mtu;
	attr.ah_attr.type = rdma_ah_find_type(qp->dev, qp->port);
	attr.ah_attr.port_num = qp->port;
	if (rdma_protocol_roce(qp->dev, qp->port)) {
		attr.ah_attr.ah_flags = IB_AH_GRH;
		attr.ah_attr.grh.sgid_index = gid_index;
		attr.ah_attr.grh.hop_limit = HOP_LIMIT;
		gid = rdma_get_gid_attr(qp->dev, qp->port, gid_index);
		if (IS_ERR(gid))
			return PTR_ERR(gid);
		attr.ah_attr.grh.dgid = gid->gid;
		err = rdma_read_gid_l2_fields(gid, NULL, attr.ah_attr.roce.dmac);
		rdma_put_gid_attr(gid);
		if (err)
			return err;
	} else {
		rdma_ah_set_dlid(&attr.ah_attr, port.lid);
	}
	err = ib_modify_qp(qp->qp, &attr,
			   IB_QP_STATE | IB_QP_AV | IB_QP_PATH_MTU | IB_QP_DEST_QPN | IB_QP_RQ_PSN |
				   IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER);
	if (err)
		return err;

	attr.qp_state = IB_QPS_RTS;
	attr.sq_psn = qp->num & 0xffffff;
	attr.max_rd_atomic = 1;
	attr.timeout = ACK_TIMEOUT;
	attr.retry_cnt = RETRIES;
	attr.rnr_retry = RNR_RETRIES;
	err = ib_modify_qp(qp->qp, &attr,
			   IB_QP_STATE | IB_QP_SQ_PSN | IB_QP_MAX_QP_RD_ATOMIC | IB_QP_TIMEOUT |
				   IB_QP_RETRY_CNT | IB_QP_RNR_RETRY);
	if (!err)
		WRITE_ONCE(qp->send_limit, qp->send_depth);
	return err;
}

/* Makes the device give back all that is in flight, without waiting for it. */
void twin_qp_end(struct twin_qp *qp)
{
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };

	twin_fail(qp);
	if (ib_modify_qp(qp->qp, &attr, IB_QP_STATE))
		pr_err("%s: qp=%u: can't be moved to the error state\n", dev_name(&qp->dev->dev),
		       qp->num);
}

/* Waits until nothing is in flight, but for sends that nothing is going to be heard of. */
static bool drained(struct twin_qp *qp)
{
	u32 waited, unheard;

	for (waited = 0; waited < FLUSH_MS; waited += LISTEN_MS) {
		if (wait_for_completion_timeout(&qp->drained, msecs_to_jiffies(LISTEN_MS)))
			return true;
		unheard = atomic_read(&qp->unheard);
		if (unheard && (atomic64_read(&qp->state) & ~TWIN_CLOSING) <= unheard)
			return true;
	}
	return false;
}

/* Waits until all came back and the handlers have returned, then gives everything back. */
void twin_qp_close(struct twin_qp *qp)
{
	twin_qp_end(qp);
	if (atomic64_fetch_add(TWIN_CLOSING, &qp->state) && !drained(qp))
		pr_err("%s: qp=%u: requests never came back\n", dev_name(&qp->dev->dev), qp->num);
	ib_destroy_qp(qp->qp);
	if (qp->leased)
		ib_cq_pool_put(qp->cq, qp->leased);
}
