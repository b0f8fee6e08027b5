// A KV cache as a member of a pool: what pool/join_kv.c and torch/lease.c use of the manager.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_MEMBER_H
#define VMEM_KV_MEMBER_H

#include "lend.h"

extern const struct vmem__member_ops vmem__kv_member_ops; // self: the vmem_kv

// Finds the membership. If begin succeeds, the cache does not leave its pool before end.
int vmem__kv_member_begin(vmem_kv *kv, struct vmem__member **m);
void vmem__kv_member_end(vmem_kv *kv);
// Lowers the budget. A check of the books must not take pages that were created under the old one for too many.
void vmem__kv_shrink_budget(vmem_kv *kv, uint64_t pages);
// With the member's lock held: gives back now what the cache is about to give back.
void vmem__kv_give_now(vmem_kv *kv);

// For a lease: begins requests in these slots, without pages, or ends them. All or none, in one call.
int vmem__kv_begin(vmem_kv *kv, const uint32_t *slots, uint64_t n);
int vmem__kv_end(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// For a lease: so many bytes of its requests' pages would be released if the member's evict asked, beside those of
// prefixes; and so many have been, and will be wanted again.
void vmem__kv_offer(vmem_kv *kv, uint64_t bytes, uint64_t missed);

#endif
