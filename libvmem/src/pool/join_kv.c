// KV caches as members of a pool: the calls of vmem_kv_pool.h that name both.
//
// SPDX-License-Identifier: MIT
#include "core/struct.h"
#include "kv/calls/calls.h"
#include "kv/calls/member.h"
#include "pool/pool.h"

int vmem_kv_pool_join(vmem_kv_pool *pool, vmem_kv *kv, const struct vmem_kv_pool_share *share)
{
    struct vmem_kv_pool_share s;
    if (!pool || !share)
        return vmem__error(-EINVAL, "pool and share must not be NULL");
    int rc = vmem__struct_take(&s, sizeof s, sizeof s, share, "share");
    if (!rc)
        rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (kv->lend.member)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "the cache is a member of a pool already"));
    if (kv->flags & VMEM_KV_SAME_SLOTS)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "a cache with equal slots on all ranks (VMEM_KV_SAME_SLOTS) "
                                                       "cannot be in a pool"));
    vmem__kv_worker_hold(kv);
    const struct vmem__member_terms terms = {
        .ctx = kv->ctx,
        .page_size = kv->page_size,
        .held = kv->ledger.held,
        .whole = kv->whole,
        .name = s.name ? s.name : "kv",
        .min = s.min,
        .max = s.max,
    };
    uint64_t budget;
    rc = vmem__pool_join(pool, &vmem__kv_member_ops, kv, &terms, &kv->lend.member, &budget);
    if (!rc) {
        kv->lend.lender = &vmem__pool_lender;
        kv->lend.evict = s.evict;
        kv->lend.evict_arg = s.arg;
        kv->flags |= VMEM_KV_LAZY;
        // A device unmaps a tensor's pages in one call, whatever their number; the system takes time for each.
        kv->lend.portion =
            kv->ctx->b.ops->populate ? UINT64_C(64) * kv->block : UINT64_C(16) * kv->block * kv->n_tensors;
        vmem__kv_shrink_budget(kv, budget);
    }
    vmem__kv_worker_release(kv);
    if (!rc)
        vmem__kv_give_ahead(kv, 0);
    return vmem__kv_leave(kv, rc);
}

// Finds a member and locks its pool.
static int member_of(vmem_kv *kv, struct vmem__member **m)
{
    int rc = vmem__kv_member_begin(kv, m);
    if (rc)
        return rc;
    pthread_mutex_lock(&(*m)->pool->lock);
    vmem__kv_member_end(kv);
    return 0;
}

int vmem_kv_pool_set_share(vmem_kv *kv, uint64_t min, uint64_t max)
{
    struct vmem__member *m;
    uint32_t why;
    int rc = member_of(kv, &m);
    if (rc)
        return rc;
    rc = vmem__pool_set_share(m, min, max, &why);
    pthread_mutex_unlock(&m->pool->lock);
    if (rc)
        return rc;
    m->ops->lock(kv);
    vmem__pool_keep_to_max(m);
    vmem__kv_give_now(kv);
    m->ops->unlock(kv);
    return 0;
}

int vmem_kv_pool_ask(vmem_kv *kv, uint64_t bytes)
{
    int rc = vmem__kv_enter_step(kv);
    if (rc)
        return rc;
    if (!kv->lend.member)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "the cache is in no pool"));
    vmem__kv_foresee(kv, vmem__kv_least(kv) + kv_ceil_pages(bytes, kv), false);
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_pool_wait(vmem_kv *kv, uint32_t ms, uint32_t *out)
{
    struct vmem__member *m;
    int rc = member_of(kv, &m);
    if (rc)
        return rc;
    const uint32_t answer = vmem__pool_wait(m, ms);
    if (out)
        *out = answer;
    pthread_mutex_unlock(&m->pool->lock);
    return 0;
}
