// Additions of pyvmem to libvmem's KV-cache manager in C: its owner, its end as Python needs it, and the loop of
// its benchmark.
//
// SPDX-License-Identifier: MIT
#ifndef PYVMEM_NATIVE_KV_H
#define PYVMEM_NATIVE_KV_H

#include "native.h"
#include "vmem_kv_pool.h"

// Create a manager, or a pool, for an owner of nothing. The parent of a manager's owner is its context's. On failure they
// return a negative errno, and the owner owns nothing.
int pv_own_kv(pv_owner *owner, vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **kv);
int pv_own_pool(pv_owner *owner, const struct vmem_kv_pool_config *cfg, vmem_kv_pool **pool);

// Closes the manager, which no kernel uses: it leaves its pool, and writes no host memory any more. No call may follow.
int pv_kv_close(vmem_kv *kv);
// As vmem_kv_retire, but a cache that another thread closes is left to its owner.
int pv_kv_retire(vmem_kv *kv, uint64_t step);

// n decode iterations: in each, every length above 0 grows by one, and vmem_kv_step is called. samples: nanoseconds of
// each call. Stops at the first step that fails, and returns its error.
int pv_bench_kv_steps(vmem_kv *kv, int32_t *lengths, uint32_t slots, uint64_t n, uint64_t *samples);

#endif
