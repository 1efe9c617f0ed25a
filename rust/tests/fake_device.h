/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An RDMA device that does as it is told: the provider under the KUnit tests.
 *
 * It registers with the RDMA core as any driver does, keeps what is posted on lists, and completes,
 * flushes, refuses or forgets it when a test says so. rust/tests/fake.rs is its only user, and has
 * the same declarations in Rust: the static assertions below are there to notice when they part.
 */
#ifndef _RDMA_CQ_FAKE_DEVICE_H
#define _RDMA_CQ_FAKE_DEVICE_H

#include <linux/build_bug.h>
#include <linux/types.h>

struct fake;
struct ib_device;

/* What the driver says of the device's firmware. */
enum fake_firmware {
	FAKE_FIRMWARE_NONE,
	FAKE_FIRMWARE_PLAIN,
	/* As much as there is room for. */
	FAKE_FIRMWARE_LONG,
	/* With a newline at its end, as pvrdma has it. */
	FAKE_FIRMWARE_LINE,
	FAKE_FIRMWARE_GARBAGE,
};

/* What the device is like. */
struct fake_setup {
	u32 num_comp_vectors;
	u32 max_cqe;
	u32 max_qp_wr;
	u32 ports;
	/* enum ib_port_state */
	u32 port_state;
	/* Whether the ports speak iWARP rather than InfiniBand. */
	u32 iwarp;
	/* Whether the first port is on a network device: the loopback. An iWARP port always is. */
	u32 netdev;
	enum fake_firmware firmware;
};

static_assert(sizeof(struct fake_setup) == 8 * sizeof(u32));

/* What the core asks of a driver, and a test may have refused. */
enum fake_op {
	FAKE_ALLOC_PD,
	FAKE_DEALLOC_PD,
	FAKE_CREATE_CQ,
	FAKE_DESTROY_CQ,
	FAKE_POLL_CQ,
	FAKE_MODIFY_CQ,
	FAKE_CREATE_QP,
	FAKE_MODIFY_INIT,
	FAKE_MODIFY_RTR,
	FAKE_MODIFY_RTS,
	FAKE_MODIFY_ERR,
	FAKE_DESTROY_QP,
	FAKE_POST_SEND,
	FAKE_POST_RECV,
	FAKE_QUERY_PORT,
	FAKE_OPS,
};

/* What a post that is refused does besides. */
enum fake_refusal {
	/* Says which request it refused, as it should. */
	FAKE_REFUSE_NAMED,
	/* Does not say so. */
	FAKE_REFUSE_UNNAMED,
	/* Does not say so, and has taken the request all the same. */
	FAKE_REFUSE_TAKEN,
};

/* When what is in flight comes back after a move to the error state. */
enum fake_flush {
	FAKE_FLUSH_AT_ONCE,
	FAKE_FLUSH_ON_DEMAND,
	FAKE_FLUSH_ON_DESTROY,
	FAKE_FLUSH_RECEIVES,
};

/* Where a function is called. */
enum fake_context {
	FAKE_TASK,
	FAKE_IRQS_OFF,
	FAKE_SPINLOCK,
	FAKE_PREEMPT_OFF,
	FAKE_BH_OFF,
	FAKE_RCU,
	FAKE_SOFTIRQ,
	FAKE_HARDIRQ,
	FAKE_WORKER,
	FAKE_CONTEXTS,
};

/* What is counted. */
enum fake_count {
	FAKE_LIVE_PD,
	FAKE_LIVE_CQ,
	FAKE_LIVE_QP,
	/* Entries of pooled queues that are leased. */
	FAKE_LEASED,
	/* The most entries that were ever in one queue. */
	FAKE_MOST_QUEUED,
	/* Completions for which a queue had no room. */
	FAKE_OVERRUNS,
	/* Posts without room for them, or in the wrong state: the user's mistakes. */
	FAKE_BAD_POSTS,
	/* Completions that were still in a queue that was destroyed. */
	FAKE_LOST,
	/* Requests in flight, on all queue pairs. */
	FAKE_PENDING_SENDS,
	FAKE_PENDING_RECVS,
	/* Completions in the queues that nobody polled yet. */
	FAKE_QUEUED,
	FAKE_COUNTS,
};

/* How a request ends. */
struct fake_wc {
	/* enum ib_wc_status, or anything else */
	u32 status;
	u32 byte_len;
	u32 vendor_err;
	/* What a receive finds in its buffer. */
	u32 fill;
	/* enum ib_wc_opcode, or anything else; FAKE_OPCODE_POSTED for that of what was posted */
	u32 opcode;
	/* enum ib_wc_flags */
	u32 flags;
	/* The immediate data, in the byte order of the wire, or the key that was invalidated. */
	u32 ex;
};

static_assert(sizeof(struct fake_wc) == 7 * sizeof(u32));

#define FAKE_OPCODE_POSTED U32_MAX
/* What is in a completion where the kernel defines nothing, byte for byte. */
#define FAKE_POISON 0xee

struct fake *fake_new(const struct fake_setup *setup);
int fake_register(struct fake *fake);
void fake_unregister(struct fake *fake);
void fake_free(struct fake *fake);

void fake_fail(struct fake *fake, enum fake_op op, u32 after, u32 times, int err);
void fake_refuse(struct fake *fake, enum fake_refusal refusal);
void fake_flush_when(struct fake *fake, enum fake_flush flush);
void fake_talk(struct fake *fake, bool talkative);
void fake_echo(struct fake *fake, bool echo);
void fake_pump(struct fake *fake);
u32 fake_calls(struct fake *fake, enum fake_op op);
u32 fake_count(struct fake *fake, enum fake_count count);
u32 fake_pending(struct fake *fake, u32 qp_num, bool recv);
u32 fake_posted_len(struct fake *fake, u32 qp_num, bool recv);
int fake_complete(struct fake *fake, u32 qp_num, bool recv, u32 index, const struct fake_wc *wc,
		  enum fake_context context);
void fake_flush_all(struct fake *fake, enum fake_context context);
void fake_switch(struct fake *fake, bool is_switch);
void fake_event(struct fake *fake, u32 event, u32 port);
void fake_event_straight(struct fake *fake, u32 event, u32 port);
void fake_settle(void);
void fake_scavenge(struct fake *fake);

void fake_run(enum fake_context context, void (*fn)(void *data), void *data);
void fake_known_leak(const void *p);
bool fake_in_debugfs(const char *client, const char *device, const char *file);

/* What is counted on a real device. */
enum real_count {
	REAL_PD,
	REAL_QP,
	REAL_CM_ID,
	/* Entries of pooled queues that are leased. */
	REAL_LEASED,
	REAL_COUNTS,
};

struct ib_device *real_get(const char *name);
void real_put(struct ib_device *device);
u32 real_count(struct ib_device *device, enum real_count count);

#endif
