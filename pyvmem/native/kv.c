// The owner of a KV-cache manager, and its end as Python needs it.
//
// SPDX-License-Identifier: MIT
#include "kv/member.h"
#include "native_kv.h"

static void destroy(void *kv) { vmem_kv_destroy(kv, 0); }

int pv_own_kv(pv_owner *owner, vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **kv)
{
    int rc = vmem_kv_create(ctx, cfg, kv);
    if (!rc)
        pv_owner_set(owner, destroy, *kv);
    return rc;
}

static void destroy_pool(void *pool) { vmem_kv_pool_destroy(pool); }

int pv_own_pool(pv_owner *owner, const struct vmem_kv_pool_config *cfg, vmem_kv_pool **pool)
{
    int rc = vmem_kv_pool_create(cfg, pool);
    if (!rc)
        pv_owner_set(owner, destroy_pool, *pool);
    return rc;
}

int pv_kv_close(vmem_kv *kv)
{
    bool quiet;
    return vmem__kv_close(kv, 0, &quiet);
}

int pv_kv_retire(vmem_kv *kv, uint64_t step) { return vmem__kv_retire(kv, step); }
