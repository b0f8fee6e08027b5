// Copying and filling. Checks that no access can fault, because a fault destroys a GPU process's context.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

// The first reservation that overlaps [addr, addr + length), or NULL if the addresses are the caller's own memory.
static struct vmem__reservation_rec *reservation_at(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    const size_t i = vmem__reservation_after(ctx, addr);
    return i < ctx->n_reservations && ctx->reservations[i]->b.addr < addr + length ? ctx->reservations[i] : NULL;
}

// Addresses that overlap a reservation must lie inside it and be backed, or be readable through its backdrop. No other
// call may be mapping or unmapping them. The caller holds the lock.
static int check_access(vmem_context *ctx, const char *what, uint64_t addr, uint64_t length, bool write)
{
    if (length > UINT64_MAX - addr)
        return vmem__error(-EINVAL, "%s 0x%" PRIx64 " + %" PRIu64 " is beyond the end of addresses", what, addr,
                           length);
    const struct vmem__reservation_rec *s = reservation_at(ctx, addr, length);
    if (!s || !length)
        return 0;
    const uint64_t end = addr + length, last = s->b.addr + s->b.length;
    if (addr < s->b.addr || end > last)
        return vmem__error(-EFAULT,
                           "%s 0x%" PRIx64 " + %" PRIu64 " reaches %s the reservation of [0x%" PRIx64 ", 0x%" PRIx64
                           ")",
                           what, addr, length, addr < s->b.addr ? "into" : "past the end of", s->b.addr, last);
    const int rc = vmem__present(ctx, addr, length);
    if (rc)
        return rc;
    const bool unbacked = !write && (s->b.flags & VMEM_RESERVE_BACKDROP);
    uint64_t step;
    for (uint64_t at = addr - addr % GRANULE; at < end; at += step) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, at);
        const uint64_t entry = leaf ? *vmem__entry_in(s, leaf, at) : 0;
        step = leaf ? GRANULE : LEAF_ENTRIES * GRANULE - (at - s->b.addr) % (LEAF_ENTRIES * GRANULE);
        if (entry & ENTRY_PENDING)
            return vmem__error(-EBUSY, "%s 0x%" PRIx64 " + %" PRIu64 ": another call works on 0x%" PRIx64, what, addr,
                               length, at);
        if (!entry && !unbacked)
            return vmem__error(-EFAULT, "%s 0x%" PRIx64 " + %" PRIu64 ": nothing is mapped at 0x%" PRIx64, what, addr,
                               length, at);
    }
    return 0;
}

static bool meets(const struct vmem__run *run, uint64_t addr, uint64_t length)
{
    return addr < run->addr + run->length && run->addr < addr + length;
}

int vmem__check_accesses(const vmem_context *ctx, const struct vmem__run *runs, size_t n, size_t *bad)
{
    for (const struct vmem__access *a = ctx->accesses; a; a = a->next) {
        for (size_t i = 0; i < a->n; i++) {
            const struct vmem_copy_op *op = &a->ops[i];
            for (size_t r = 0; r < n; r++) {
                if (meets(&runs[r], op->dst, op->length) || (!a->fill && meets(&runs[r], op->src, op->length))) {
                    *bad = r;
                    return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call copies or fills there", runs[r].addr);
                }
            }
        }
    }
    return 0;
}

static void hold_reservation(vmem_context *ctx, uint64_t addr, uint64_t length, int by)
{
    struct vmem__reservation_rec *s = length ? reservation_at(ctx, addr, length) : NULL;
    if (s)
        s->inflight += (uint64_t)by;
}

// Holds the reservations that the calls access, or lets go of them (by -1).
static void hold_accessed(vmem_context *ctx, const struct vmem__access *a, int by)
{
    for (size_t i = 0; i < a->n; i++) {
        hold_reservation(ctx, a->ops[i].dst, a->ops[i].length, by);
        if (!a->fill)
            hold_reservation(ctx, a->ops[i].src, a->ops[i].length, by);
    }
}

// Marks the addresses, so that no page is unmapped there and no reservation freed. The caller holds the lock.
static void access_begin(vmem_context *ctx, struct vmem__access *a)
{
    a->next = ctx->accesses;
    ctx->accesses = a;
    hold_accessed(ctx, a, 1);
}

static void access_end(vmem_context *ctx, struct vmem__access *a)
{
    struct vmem__access **link = &ctx->accesses;
    while (*link != a)
        link = &(*link)->next;
    *link = a->next;
    hold_accessed(ctx, a, -1);
}

// If the backdrop is lazy, maps it at the sources before they are read. The caller holds the lock, which this drops.
static int map_backdrop(vmem_context *ctx, const struct vmem_copy_op *ops, size_t n)
{
    int rc = 0;
    for (size_t i = 0; i < n && !rc && ctx->b.ops->backdrop; i++) {
        struct vmem__reservation_rec *s = ops[i].length ? reservation_at(ctx, ops[i].src, ops[i].length) : NULL;
        if (!s || !(s->b.flags & VMEM_RESERVE_BACKDROP))
            continue;
        vmem__unlock(ctx);
        rc = ctx->b.ops->backdrop(&ctx->b, &s->b, ops[i].src, ops[i].length);
        vmem__lock(ctx);
    }
    return rc;
}

int vmem_copy_batch(vmem_context *ctx, const struct vmem_copy_op *ops, size_t n)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !ops)
        return vmem__error(-EINVAL, "ops is NULL");
    struct vmem__access access = {.ops = ops, .n = n};
    vmem__begin(ctx);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = check_access(ctx, "dst", ops[i].dst, ops[i].length, true);
        if (!rc)
            rc = check_access(ctx, "src", ops[i].src, ops[i].length, false);
        if (rc)
            rc = vmem__error(rc, "ops[%zu]: %s", i, vmem_last_error());
    }
    if (!rc && n) {
        access_begin(ctx, &access);
        rc = map_backdrop(ctx, ops, n);
        vmem__unlock(ctx);
        if (!rc)
            rc = ctx->b.ops->copy(&ctx->b, ops, n);
        vmem__lock(ctx);
        access_end(ctx, &access);
    }
    vmem__end(ctx);
    return rc;
}

int vmem_fill(vmem_context *ctx, uint64_t addr, uint8_t value, uint64_t length)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    const struct vmem_copy_op op = {.dst = addr, .length = length};
    struct vmem__access access = {.ops = &op, .n = 1, .fill = true};
    vmem__begin(ctx);
    rc = check_access(ctx, "addr", addr, length, true);
    if (!rc && length) {
        access_begin(ctx, &access);
        vmem__unlock(ctx);
        rc = ctx->b.ops->fill(&ctx->b, addr, value, length);
        vmem__lock(ctx);
        access_end(ctx, &access);
    }
    vmem__end(ctx);
    return rc;
}
