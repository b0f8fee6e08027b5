// The order in which hashed blocks are evicted: by priority, and of one priority by use.
//
// Each priority has a list of the blocks that no running request pins, in the order in which they were released or
// given the priority. Blocks that are to be kept hold their pages as a prefix does, so that nothing counts them as
// free.
//
// SPDX-License-Identifier: MIT
#include "kv/run/hash.h"

void vmem__kv_hash_no_order(struct kv_hashes *h)
{
    for (uint32_t p = 0; p < KV_PRIORITIES; p++)
        h->order[p] = (struct kv_use){KV_NO_BLOCK, KV_NO_BLOCK};
}

void vmem__kv_hash_unlink(struct kv_hashes *h, uint32_t block)
{
    const struct kv_hashed *b = &h->blocks[block];
    struct kv_use *use = &h->order[b->priority];
    *(b->newer == KV_NO_BLOCK ? &use->newest : &h->blocks[b->newer].older) = b->older;
    *(b->older == KV_NO_BLOCK ? &use->oldest : &h->blocks[b->older].newer) = b->newer;
}

void vmem__kv_hash_link_newest(struct kv_hashes *h, uint32_t block)
{
    struct kv_hashed *b = &h->blocks[block];
    struct kv_use *use = &h->order[b->priority];
    b->newer = KV_NO_BLOCK;
    b->older = use->newest;
    *(use->newest == KV_NO_BLOCK ? &use->oldest : &h->blocks[use->newest].newer) = block;
    use->newest = block;
}

uint32_t vmem__kv_hash_victim(const struct kv_hashes *h)
{
    for (uint32_t p = 0; p < VMEM_KV_HASH_KEEP; p++)
        if (h->order[p].oldest != KV_NO_BLOCK)
            return h->order[p].oldest;
    return KV_NO_BLOCK;
}
