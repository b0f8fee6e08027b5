// The owner of a lease for PyTorch.
//
// SPDX-License-Identifier: MIT
#include "native_torch.h"

static void drop_context(void *context) { pv_owner_drop(context); }

static void close_lease(void *place) { vmem_torch_close((uint32_t)(uintptr_t)place); }

int pv_own_torch(pv_owner *owner, pv_owner *context, vmem_context *ctx, vmem_kv_pool *pool,
                 const struct vmem_torch_config *cfg, uint32_t *place)
{
    struct vmem_torch_config c = *cfg;
    c.ended = drop_context;
    c.arg = context;
    pv_owner_keep(context); // for the lease, which may outlive its owner: until PyTorch has freed its last segment
    int rc = vmem_torch_open(ctx, pool, &c, place);
    if (rc)
        pv_owner_drop(context);
    else
        pv_owner_set(owner, close_lease, (void *)(uintptr_t)*place);
    return rc;
}
