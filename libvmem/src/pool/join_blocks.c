// Blocks as members of a pool: the calls of vmem_blocks.h that name both.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"
#include "pool/pool.h"

int vmem_blocks_join(vmem_blocks *b, vmem_kv_pool *pool, const char *name, uint64_t min, uint64_t max)
{
    if (!pool)
        return vmem__error(-EINVAL, "pool must not be NULL");
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    if (b->lender)
        return vmem__blocks_leave(b, vmem__error(-EINVAL, "the blocks are a member of a pool already"));
    const struct vmem__member_terms terms = {
        .ctx = b->ctx,
        .page_size = b->page_size,
        .held = b->held,
        .name = name ? name : "blocks",
        .min = min,
        .max = max,
    };
    uint64_t budget;
    rc = vmem__pool_join(pool, &vmem__blocks_member_ops, b, &terms, &b->member, &budget);
    if (!rc) {
        b->budget = budget;
        b->lender = &vmem__pool_lender;
        vmem__blocks_show(b);
    }
    return vmem__blocks_leave(b, rc);
}

int vmem_blocks_set_share(vmem_blocks *b, uint64_t min, uint64_t max)
{
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    if (!b->lender)
        return vmem__blocks_leave(b, vmem__error(-EINVAL, "the blocks are in no pool"));
    uint32_t why;
    pthread_mutex_lock(&b->member->pool->lock);
    rc = vmem__pool_set_share(b->member, min, max, &why);
    pthread_mutex_unlock(&b->member->pool->lock);
    if (!rc)
        vmem__pool_keep_to_max(b->member);
    return vmem__blocks_leave(b, rc);
}
