/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An RDMA device that costs next to nothing, and the counting of instructions: what the benchmark in
 * Rust and its twin in C share.
 */
#ifndef _RDMA_BENCH_DEVICE_H
#define _RDMA_BENCH_DEVICE_H

#include <linux/types.h>

/* What is subtracted from what was counted, since it isn't the layer's. */
enum bench_own {
	BENCH_NOTHING,
	/* The device's own function, called as ib_post_send() does. */
	BENCH_POST_SEND,
	BENCH_POST_RECV,
	/* Of a request: a sixteenth of posting a chain of 16. */
	BENCH_CHAIN,
	/* Of a completion: a sixteenth of polling 16; and what ib_process_cq_direct() takes without handlers. */
	BENCH_POLL,
	BENCH_PROCESS,
	BENCH_OWNS,
};

void bench_begin(void);
u64 bench_end(void);
void bench_raise(void);
void bench_settle(void);
u64 bench_done_insns(void);
void bench_allocs_begin(void);
u64 bench_live_bytes(void);
u32 bench_allocs_end(void);
void bench_sample(const char *who, const char *name, enum bench_own own, u32 ops, u64 insns);

#endif
