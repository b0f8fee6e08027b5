// What happens to requests: they are admitted, begin, make steps, shrink, leave and come back. Called with api and
// state held.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_REQUEST_H
#define VMEM_KV_REQUEST_H

#include "kv/memory/memory.h"

// The pages that a request of `tokens` tokens needs, in addition to those of prefix_tokens rows that it shares.
static inline uint64_t kv_pages_beside(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens)
{
    uint64_t pages = 0;
    for (const struct kv_group *g = kv->groups; g < kv->groups + kv->n_groups; g++)
        pages += (uint64_t)(vmem__kv_need_hi(kv, g, tokens) - kv_split(kv, g, prefix_tokens).full) * g->n;
    return pages;
}

// ---- step.c

// Plans a step in which this slot alone takes part: -EINVAL, if its window has given up rows that it reads. *delta: by how
// many pages the step would raise kv_ledger.fixed, the missing ones included.
int vmem__kv_plan_one(vmem_kv *kv, uint32_t slot, uint32_t tokens, int64_t *delta);

// ---- release.c

// All or none of the slots, which no kernel accesses, in one call of the core. As vmem__kv_cut_slots, for a lease's
// cache.
int vmem__kv_free_slots(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// The kernels up to this step have ended: requests that end after them end.
int vmem__kv_end_requests(vmem_kv *kv, uint64_t step);
int vmem__kv_retire_to(vmem_kv *kv, uint64_t step);

// ---- admit.c

int vmem__kv_alloc(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot);

// ---- compact.c

// Compacts a portion. *moved is how many pages.
int vmem__kv_compact(vmem_kv *kv, uint64_t *moved);
// Bytes of device memory that the context has, and how many of these no page uses.
int vmem__kv_device_bytes(vmem_kv *kv, uint64_t *all, uint64_t *overhead);

#endif
