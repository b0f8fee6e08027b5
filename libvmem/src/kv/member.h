// Calls that are not public: torch/lease.c makes them for the cache that holds its segments, and pyvmem to end a cache.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM__KV_MEMBER_H
#define VMEM__KV_MEMBER_H

#include <stdint.h>

#include "vmem_kv.h"

// Begins requests in these slots, without pages, or ends them. All or none, in one call.
int vmem__kv_begin(vmem_kv *kv, const uint32_t *slots, uint64_t n);
int vmem__kv_end(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// Says how many bytes of its requests' pages the member's evict would release, beside those of prefixes, and how many it
// has released that will be wanted again (missed).
void vmem__kv_offer(vmem_kv *kv, uint64_t bytes, uint64_t missed);

// Leaves the pool and ends the background thread. No call may follow but vmem_kv_destroy: others return -EINVAL.
int vmem__kv_close(vmem_kv *kv);

#endif
