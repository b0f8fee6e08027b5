// Moving what pages contain: to new pages, in an arena of their own, so that the arenas that they leave can return to the
// system.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

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

static bool locate(vmem_context *ctx, vmem_page page, uint64_t page_size, struct vmem__run *run)
{
    struct vmem__arena_rec *a;
    const struct vmem__page *p = vmem__page_get(ctx, page, &a);
    if (p)
        *run = (struct vmem__run){.arena = &a->b,
                                  .offset = (uint64_t)(p - a->pages) * GRANULE,
                                  .length = page_size,
                                  .page_size = page_size};
    return p;
}

int vmem__copy_pages(vmem_context *ctx, const vmem_page *from, const vmem_page *to, size_t n, uint64_t page_size)
{
    int rc = vmem__enter(ctx);
    if (rc || !n)
        return rc;
    if (!ctx->b.ops->move)
        return -EOPNOTSUPP;
    struct vmem__run *runs = malloc(2 * n * sizeof(*runs)), *into = runs + n;
    if (!runs)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu runs", 2 * n);
    vmem__begin(ctx);
    for (size_t i = 0; i < n && !rc; i++)
        if (!locate(ctx, from[i], page_size, &runs[i]) || !locate(ctx, to[i], page_size, &into[i]))
            rc = vmem__error(-EINVAL, "page 0x%" PRIx64 " or 0x%" PRIx64 " does not exist", from[i], to[i]);
    vmem__unlock(ctx);
    if (!rc)
        rc = ctx->b.ops->move(&ctx->b, runs, into, n);
    vmem__lock(ctx);
    vmem__end(ctx);
    free(runs);
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
