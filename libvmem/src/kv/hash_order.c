// The order in which hashed blocks are evicted: by priority, and of one priority by use.
//
// Each priority has a list of the blocks that no running request pins, in the order in which they were released or
// given the priority. Blocks that are to be kept hold their pages as a prefix does, so that nothing counts them as
// free.
//
// SPDX-License-Identifier: MIT
#include "kv/hash.h"

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

static void set_priority(vmem_kv *kv, uint32_t block, uint32_t priority)
{
    struct kv_hashes *h = kv->hashes;
    struct kv_hashed *b = &h->blocks[block];
    const int kept = (priority == VMEM_KV_HASH_KEEP) - kv_keeps(b);
    for (uint32_t j = 0; j < kv->n_groups && kept; j++) {
        const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[j], b->index);
        const vmem_page *pages = vmem__kv_hash_pages(kv, b, j);
        for (uint32_t k = 0; k < rows.hi - rows.lo && pages[k]; k++)
            vmem__kv_ref_keep(&kv->refs, vmem__kv_ref_find(&kv->refs, pages[k]), kept);
    }
    if (!b->pins)
        vmem__kv_hash_unlink(h, block);
    b->priority = priority;
    if (!b->pins)
        vmem__kv_hash_link_newest(h, block);
}

int vmem_kv_hash_prioritize(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint32_t priority)
{
    int rc = vmem__kv_enter_step(kv);
    if (rc)
        return rc;
    rc = vmem__kv_hash_given(kv, hashes, n);
    if (!rc && priority > VMEM_KV_HASH_KEEP)
        rc = vmem__error(-EINVAL, "priority %u is over %u", priority, VMEM_KV_HASH_KEEP);
    for (size_t k = n; k-- && !rc;) { // from the last: the end of a sequence becomes the oldest
        const uint32_t i = vmem__kv_hash_find(kv->hashes, &hashes[k]);
        if (i != KV_NO_BLOCK)
            set_priority(kv, i, priority);
    }
    return vmem__kv_leave(kv, rc);
}
