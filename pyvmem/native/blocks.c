// SPDX-License-Identifier: MIT
#include "native_blocks.h"

static void destroy_blocks(void *blocks) { vmem_blocks_destroy(blocks); }

int pv_own_blocks(pv_owner *owner, vmem_context *ctx, const struct vmem_blocks_config *cfg, vmem_blocks **blocks)
{
    int rc = vmem_blocks_create(ctx, cfg, blocks);
    if (!rc)
        pv_owner_set(owner, destroy_blocks, *blocks);
    return rc;
}
