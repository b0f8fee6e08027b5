// KV caches as members of a pool: the calls of vmem_kv.h that name both.
//
// SPDX-License-Identifier: MIT
#include "core/struct.h"
#include "kv/calls/member.h"
#include "pool/pool.h"

int vmem_kv_pool_join(vmem_kv_pool *pool, vmem_kv *kv, const struct vmem_kv_pool_share *share)
{
    struct vmem_kv_pool_share s;
    if (!pool || !share)
        return vmem__error(-EINVAL, "pool and share must not be NULL");
    int rc = vmem__struct_take(&s, sizeof s, sizeof s, share, "share");
    if (rc)
        return rc;
    struct vmem__member_terms terms = {.name = s.name ? s.name : "kv", .min = s.min, .max = s.max};
    struct kv_joined joined = {.lender = &vmem__pool_lender, .evict = s.evict, .arg = s.arg};
    rc = vmem__kv_join_begin(kv, &terms);
    if (rc)
        return rc;
    rc = vmem__pool_join(pool, &vmem__kv_member_ops, kv, &terms, &joined.member, &joined.budget);
    return vmem__kv_join_end(kv, rc, &joined);
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
