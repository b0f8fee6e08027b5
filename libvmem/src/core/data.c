// Copying and filling, with the check that no access of ours can fault: a fault costs a GPU process its context.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

// Every part of [addr, addr + length) that lies in a reservation must be backed, or readable through a backdrop.
// Addresses outside all reservations are the caller's own. With the lock held.
static int check_access(vmem_context *ctx, const char *what, uint64_t addr, uint64_t length, bool write)
{
    if (length > UINT64_MAX - addr)
        return vmem__error(-EINVAL, "%s 0x%" PRIx64 " + %" PRIu64 " is beyond the end of addresses", what, addr,
                           length);
    const uint64_t end = addr + length;
    for (size_t i = vmem__space_after(ctx, addr); i < ctx->n_spaces && ctx->spaces[i]->b.addr < end; i++) {
        const struct vmem__space *s = ctx->spaces[i];
        if (!write && (s->b.flags & VMEM_RESERVE_BACKDROP))
            continue;
        uint64_t at = addr > s->b.addr ? addr : s->b.addr;
        uint64_t stop = end < s->b.addr + s->b.length ? end : s->b.addr + s->b.length;
        for (at -= at % UNIT; at < stop; at += UNIT) {
            struct vmem__leaf *leaf = vmem__leaf_get(s, at);
            if (!leaf || !vmem__slot_frame(*vmem__slot_in(s, leaf, at)))
                return vmem__error(-EFAULT, "%s 0x%" PRIx64 " + %" PRIu64 ": nothing is mapped at 0x%" PRIx64, what,
                                   addr, length, at);
        }
    }
    return 0;
}

int vmem_copy_batch(vmem_context *ctx, const struct vmem_copy_op *ops, size_t n)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !ops)
        return vmem__error(-EINVAL, "ops is NULL");
    vmem__lock(ctx);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = check_access(ctx, "dst", ops[i].dst, ops[i].length, true);
        if (!rc)
            rc = check_access(ctx, "src", ops[i].src, ops[i].length, false);
        if (rc)
            rc = vmem__error(rc, "ops[%zu]: %s", i, vmem_last_error());
    }
    vmem__unlock(ctx);
    return rc || !n ? rc : ctx->b.ops->copy(&ctx->b, ops, n);
}

int vmem_fill(vmem_context *ctx, uint64_t addr, uint8_t value, uint64_t length)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    vmem__lock(ctx);
    rc = check_access(ctx, "addr", addr, length, true);
    vmem__unlock(ctx);
    return rc || !length ? rc : ctx->b.ops->fill(&ctx->b, addr, value, length);
}
