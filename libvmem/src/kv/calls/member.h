// What torch/lease.c uses of the manager, for a cache that holds its segments.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_MEMBER_H
#define VMEM_KV_MEMBER_H

#include <stdint.h>

#include "vmem_kv.h"

// Begins requests in these slots, without pages, or ends them. All or none, in one call.
int vmem__kv_begin(vmem_kv *kv, const uint32_t *slots, uint64_t n);
int vmem__kv_end(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// So many bytes of its requests' pages would be released if the member's evict asked, beside those of prefixes; and so
// many have been, and will be wanted again.
void vmem__kv_offer(vmem_kv *kv, uint64_t bytes, uint64_t missed);

#endif
