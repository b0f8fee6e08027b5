// Queries of a reservation: how much is mapped, and where.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "core/struct.h"

// The longest stretch of one answer, so that the lock is not held for long.
#define LONGEST (UINT64_C(4) << 30)

int vmem_reservation_query(vmem_context *ctx, uint64_t addr, struct vmem_reservation_info *out)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (!out)
        return vmem__error(-EINVAL, "out is NULL");
    struct vmem_reservation_info info;
    vmem__begin(ctx);
    const struct vmem__reservation_rec *s = vmem__reservation_find(ctx, addr);
    if (s)
        info = (struct vmem_reservation_info){.flags = s->b.flags,
                                              .addr = s->b.addr,
                                              .length = s->b.length,
                                              .mapped = s->mapped};
    vmem__end(ctx);
    return s ? vmem__struct_give(out, &info, sizeof info, "out")
             : vmem__error(-EINVAL, "no reservation contains addr 0x%" PRIx64, addr);
}

int vmem_next_mapped(vmem_context *ctx, uint64_t addr, uint64_t length, struct vmem_range *out)
{
    const uint64_t span = GRANULE * LEAF_ENTRIES;
    struct vmem__reservation_rec *s;
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (!out)
        return vmem__error(-EINVAL, "out is NULL");
    vmem__begin(ctx);
    rc = vmem__reservation_of(ctx, addr, length, &s);
    if (rc) {
        vmem__end(ctx);
        return rc;
    }
    const uint64_t end = addr + length;
    uint64_t first = end, at = addr - addr % GRANULE;
    while (at < end) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, at);
        const bool backed = leaf && vmem__entry_frame(*vmem__entry_in(s, leaf, at));
        if (backed && first == end)
            first = at < addr ? addr : at;
        else if (first != end && (!backed || at - first >= LONGEST))
            break;
        at += leaf ? GRANULE : span - (at - s->b.addr) % span;
    }
    vmem__end(ctx);
    *out = (struct vmem_range){first, first == end ? 0 : (at < end ? at : end) - first};
    return 0;
}
