/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What bindgen reads to make the crate `rdma_bindings`: the interface of the RDMA core to kernel
 * users.
 */
#ifndef _RDMA_CQ_RDMA_BINDINGS_H
#define _RDMA_CQ_RDMA_BINDINGS_H

#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>

#endif
