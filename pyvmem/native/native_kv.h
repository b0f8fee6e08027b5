// What pyvmem adds to libvmem's KV-cache manager in C: its owner, and the loop of its benchmark.
//
// SPDX-License-Identifier: MIT
#ifndef PYVMEM_NATIVE_KV_H
#define PYVMEM_NATIVE_KV_H

#include "native.h"
#include "vmem_kv.h"

// For an owner that owns nothing yet, whose parent is the context's owner. On failure: a negative errno, and nothing is
// owned.
int pv_own_kv(pv_owner *owner, vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **kv);

int pv_own_pool(pv_owner *owner, const struct vmem_kv_pool_config *cfg, vmem_kv_pool **pool);

// Calls that can be short of memory, with the answer in one number, so that threads share nothing: 0, the pages that are
// missing, or a negative errno.
int64_t pv_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n);
int64_t pv_kv_check(vmem_kv *kv, const int32_t *lengths, uint32_t n);
int64_t pv_kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens);
int64_t pv_kv_commit(vmem_kv *kv);
int64_t pv_kv_fit(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit);
int64_t pv_kv_hash_attach(vmem_kv *kv, uint32_t slot, const struct vmem_kv_hash *hashes, size_t n, uint32_t *tokens);
int64_t pv_kv_hash_check(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint32_t *tokens);
int64_t pv_kv_attach(vmem_kv *kv, uint64_t prefix, uint32_t slot, uint32_t tokens);
int64_t pv_kv_attach_check(vmem_kv *kv, uint64_t prefix, uint32_t tokens);
int64_t pv_kv_truncate_check(vmem_kv *kv, uint32_t slot, uint32_t tokens);
int64_t pv_kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes);
int64_t pv_kv_swap_check(vmem_kv *kv, uint32_t slot);

// No call may follow, and no host memory is written any more. 1: the kernels of all steps up to
// this one have ended; 0: they may be running; or a negative errno.
int pv_kv_close(vmem_kv *kv, uint64_t step);
// vmem_kv_retire that leaves destroying a closed cache to its owner.
int pv_kv_retire(vmem_kv *kv, uint64_t step);

// Lets this thread ask for events while another one captures a CUDA graph.
void pv_beside_captures(void);

// n decode iterations: every length above 0 grows by one, vmem_kv_step is called, and pause_us pass. samples:
// nanoseconds of each call. Ends early, with its error, at a step that fails.
int pv_bench_kv_steps(vmem_kv *kv, int32_t *lengths, uint32_t slots, uint64_t n, uint64_t pause_us, uint64_t *samples);

#endif
