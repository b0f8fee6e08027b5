// What the tests of the KV-cache manager use beside its calls.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TEST_KV_H
#define VMEM_TEST_KV_H

#include "harness.h"
#include "vmem_kv_pool.h"

// A slot for a request whose first step has about `tokens` tokens.
__attribute__((unused)) static int k_alloc(vmem_kv *kv, uint32_t tokens, uint32_t *slot)
{
    return vmem_kv_alloc(kv,
                         &(struct vmem_kv_alloc_options){.size = sizeof(struct vmem_kv_alloc_options),
                                                         .tokens = tokens},
                         slot);
}

// Passes on what a call returned, and stores how many pages it lacked (NULL: nowhere).
__attribute__((unused)) static int k_missing(int rc, uint64_t *missing)
{
    struct vmem_kv_shortage s = {.size = sizeof s};
    OK(vmem_kv_last_shortage(&s));
    if (missing)
        *missing = rc == -ENOMEM ? s.missing_pages : 0;
    return rc;
}

// Host memory that the slot's rows need.
__attribute__((unused)) static int k_swap_bytes(vmem_kv *kv, uint32_t slot, uint64_t *bytes)
{
    struct vmem_kv_slot_info info = {.size = sizeof info};
    int rc = vmem_kv_get_slot(kv, slot, &info);
    *bytes = info.swap_bytes;
    return rc;
}

// The i-th member of a pool. -ENOENT: it has not so many.
__attribute__((unused)) static int k_member(vmem_kv_pool *pool, uint32_t i, struct vmem_kv_pool_member *out)
{
    struct vmem_kv_pool_member rows[VMEM_KV_POOL_MEMBERS], *at[VMEM_KV_POOL_MEMBERS];
    uint32_t n;
    for (uint32_t k = 0; k < VMEM_KV_POOL_MEMBERS; k++) {
        rows[k].size = sizeof(rows[k]);
        at[k] = &rows[k];
    }
    int rc = vmem_kv_pool_get_members(pool, at, &n);
    if (!rc && i >= n)
        return -ENOENT;
    *out = rows[i];
    return rc;
}

#endif
