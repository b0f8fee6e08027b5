// For whoever moves what pages contain to new pages, in an arena of their own, so that the arenas that they leave can
// return to the system.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

int vmem__create_apart(vmem_context *ctx, uint64_t page_size, size_t n, vmem_page *out)
{
    const uint64_t granules = n * (page_size >> GRANULE_SHIFT);
    struct vmem__piece piece;
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (ctx->b.ops->populate || granules * GRANULE > ctx->b.arena_max)
        return vmem__error(-ENOMEM, "the %s backend cannot allocate %" PRIu64 " bytes in one piece", ctx->b.ops->name,
                           granules * GRANULE);
    vmem__begin(ctx);
    rc = vmem__check_room(ctx, page_size, n);
    if (!rc) {
        ctx->created += n * page_size; // before the lock is dropped: other calls must see it
        rc = vmem__grow_exactly(ctx, granules);
        if (!rc && !vmem__take_piece_at(ctx, ctx->arenas, 0, granules, (uint32_t)(page_size >> GRANULE_SHIFT), &piece))
            rc = vmem__error(-ENOMEM, "the memory just allocated has no room for %zu pages of %" PRIu64 " bytes", n,
                             page_size);
        if (rc)
            ctx->created -= n * page_size;
        else
            vmem__make_pages(ctx, &piece, (uint32_t)(page_size >> GRANULE_SHIFT), 0, out);
    }
    vmem__end(ctx);
    return rc;
}

uint32_t vmem__arena_used(vmem_context *ctx, vmem_page page)
{
    struct vmem__arena_rec *a;
    uint32_t used = UINT32_MAX;
    vmem__lock(ctx);
    if (vmem__page_get(ctx, page, &a) && a->used + BLOCK_GRANULES <= a->granules)
        used = a->used;
    vmem__unlock(ctx);
    return used;
}
