// Reservations, the shadow that records what is mapped at every 64 KiB of them, and queries of both.
//
// The shadow is a table of leaves, one per 16 MiB. A leaf exists only while something is mapped there. Until then the
// table is untouched zero memory, and so are the marks of absent addresses behind it: a reservation of 12 TiB takes
// 30 MiB of address space and no memory.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

// Empty leaves kept for the next mapping: 1.5 MiB.
#define SPARE_LEAVES 256
// The longest stretch of vmem_next_mapped, so that the lock is not held for long.
#define LONGEST (UINT64_C(4) << 30)

size_t vmem__reservation_after(const vmem_context *ctx, uint64_t addr)
{
    size_t lo = 0, hi = ctx->n_reservations;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        const struct vmem__reservation_rec *s = ctx->reservations[mid];
        if (s->b.addr + s->b.length <= addr)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct vmem__reservation_rec *vmem__reservation_find(vmem_context *ctx, uint64_t addr)
{
    struct vmem__reservation_rec *s = ctx->last_reservation;
    if (VMEM__LIKELY(s && addr - s->b.addr < s->b.length))
        return s;
    size_t i = vmem__reservation_after(ctx, addr);
    if (i == ctx->n_reservations || addr < ctx->reservations[i]->b.addr)
        return NULL;
    return ctx->last_reservation = ctx->reservations[i];
}

int vmem__reservation_of(vmem_context *ctx, uint64_t addr, uint64_t length, struct vmem__reservation_rec **out)
{
    struct vmem__reservation_rec *s = vmem__reservation_find(ctx, addr);
    if (!s || length > s->b.addr + s->b.length - addr)
        return vmem__error(-EINVAL, "addr 0x%" PRIx64 ", length %" PRIu64 ": the range is not inside one reservation",
                           addr, length);
    *out = s;
    return 0;
}

int vmem__check_reserved(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    struct vmem__reservation_rec *s;
    vmem__begin(ctx);
    const int rc = vmem__reservation_of(ctx, addr, length, &s);
    vmem__end(ctx);
    return rc;
}

int vmem__check_range(vmem_context *ctx, uint64_t addr, uint64_t length, uint64_t granule,
                      struct vmem__reservation_rec **out)
{
    int rc = vmem__reservation_of(ctx, addr, length, out);
    if (!rc && (addr | length) & (granule - 1))
        rc = vmem__error(-EINVAL, "addr 0x%" PRIx64 ", length %" PRIu64 ": both must be multiples of %" PRIu64 " KiB",
                         addr, length, granule >> 10);
    return rc;
}

static inline struct vmem__leaf **leaf_place(struct vmem__reservation_rec *s, uint64_t addr)
{
    return &s->leaves[(addr - s->b.addr) >> (GRANULE_SHIFT + LEAF_SHIFT)];
}

struct vmem__leaf *vmem__leaf_new(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t addr)
{
    struct vmem__leaf *leaf = ctx->spare;
    if (leaf) {
        ctx->spare = leaf->spare;
        ctx->n_spare--;
    } else if (!(leaf = calloc(1, sizeof *leaf))) {
        return NULL;
    }
    return *leaf_place(s, addr) = leaf;
}

void vmem__leaf_drop(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t addr)
{
    struct vmem__leaf **place = leaf_place(s, addr), *leaf = *place;
    *place = NULL;
    // The frames of an empty leaf are 0, and nothing reads the rest of an entry then, so the leaf can be reused as it
    // is.
    if (ctx->n_spare == SPARE_LEAVES) {
        free(leaf);
        return;
    }
    leaf->spare = ctx->spare;
    ctx->spare = leaf;
    ctx->n_spare++;
}

static size_t leaf_count(uint64_t length)
{
    const uint64_t leaf_bytes = GRANULE * LEAF_ENTRIES;
    return (length + leaf_bytes - 1) / leaf_bytes;
}

void vmem__reservation_free(struct vmem__reservation_rec *s, bool leaves)
{
    for (size_t i = 0; leaves && i < leaf_count(s->b.length); i++)
        free(s->leaves[i]);
    free(s);
}

int vMemReserve(vmem_context *ctx, uint64_t length, uint32_t flags, uint64_t *addr)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (!addr)
        return vmem__error(-EINVAL, "addr is NULL");
    if (!length || length % GRANULE || length > MAX_RESERVE)
        return vmem__error(-EINVAL, "length %" PRIu64 " is not a positive multiple of 64 KiB up to 2^46", length);
    if (flags & ~VMEM_RESERVE_BACKDROP)
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_RESERVE_BACKDROP is known", flags);
    if ((flags & VMEM_RESERVE_BACKDROP) && !(ctx->b.info.caps & VMEM_CAP_BACKDROP))
        return vmem__error(-EOPNOTSUPP, "flags: the %s backend has no backdrop", ctx->b.ops->name);

    const size_t leaves = leaf_count(length), words = leaves * LEAF_ENTRIES / 64;
    struct vmem__reservation_rec *s =
        calloc(1, sizeof *s + leaves * sizeof s->leaves[0] + words * sizeof s->b.absent[0]);
    if (!s)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of a reservation of %" PRIu64 " bytes", length);
    s->b.absent = (_Atomic uint64_t *)(s->leaves + leaves);
    s->b.length = length;
    s->b.flags = flags;
    vmem__begin(ctx);
    vmem__unlock(ctx);
    rc = ctx->b.ops->reserve(&ctx->b, &s->b);
    vmem__lock(ctx);
    if (rc) {
        vmem__end(ctx);
        vmem__reservation_free(s, false);
        return rc;
    }
    if (ctx->n_reservations == ctx->cap_reservations) {
        size_t cap = ctx->cap_reservations ? 2 * ctx->cap_reservations : 16;
        struct vmem__reservation_rec **grown = realloc(ctx->reservations, cap * sizeof *grown);
        if (!grown) {
            vmem__unlock(ctx);
            vmem__reservation_end(ctx, s);
            vmem__lock(ctx);
            vmem__end(ctx);
            return vmem__error(-ENOMEM, "no memory for bookkeeping");
        }
        ctx->reservations = grown;
        ctx->cap_reservations = cap;
    }
    size_t at = vmem__reservation_after(ctx, s->b.addr);
    memmove(&ctx->reservations[at + 1], &ctx->reservations[at],
            (ctx->n_reservations++ - at) * sizeof *ctx->reservations);
    ctx->reservations[at] = ctx->last_reservation = s;
    ctx->reserved += length;
    *addr = s->b.addr;
    vmem__end(ctx);
    return 0;
}

int vmem__reservation_start(vmem_context *ctx, uint64_t addr, struct vmem__reservation_rec **out)
{
    struct vmem__reservation_rec *s = vmem__reservation_find(ctx, addr);
    if (!s || s->b.addr != addr || s->doomed)
        return vmem__error(-EINVAL, "addr 0x%" PRIx64 " is not the start of a reservation", addr);
    *out = s;
    return 0;
}

void vmem__reservation_remove(vmem_context *ctx, struct vmem__reservation_rec *s)
{
    size_t at = vmem__reservation_after(ctx, s->b.addr);
    memmove(&ctx->reservations[at], &ctx->reservations[at + 1],
            (--ctx->n_reservations - at) * sizeof *ctx->reservations);
    if (ctx->last_reservation == s)
        ctx->last_reservation = NULL;
    ctx->reserved -= s->b.length;
    ctx->n_doomed -= s->doomed;
}

void vmem__unreserve(vmem_context *ctx, struct vmem__reservation_rec *s)
{
    ctx->b.ops->unreserve(&ctx->b, &s->b);
    ctx->b.n_absent -= s->b.n_absent;
}

void vmem__reservation_end(vmem_context *ctx, struct vmem__reservation_rec *s)
{
    vmem__unreserve(ctx, s);
    vmem__reservation_free(s, false);
}

int vMemFree(vmem_context *ctx, uint64_t addr)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    struct vmem__reservation_rec *s = NULL;
    vmem__begin(ctx);
    rc = vmem__reservation_start(ctx, addr, &s);
    if (!rc && s->mapped)
        rc = vmem__error(-EBUSY, "addr 0x%" PRIx64 ": %" PRIu64 " bytes are still mapped there", addr, s->mapped);
    if (!rc && s->inflight)
        rc = vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call works on this reservation", addr);
    if (!rc) {
        vmem__reservation_remove(ctx, s);
        vmem__unlock(ctx);
        vmem__reservation_end(ctx, s);
        vmem__lock(ctx);
        ctx->stuck = false;
    }
    vmem__end(ctx);
    return rc;
}

int vmem_backdrop(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    struct vmem__reservation_rec *s = NULL;
    vmem__begin(ctx);
    rc = vmem__reservation_of(ctx, addr, length, &s);
    if (!rc && !(s->b.flags & VMEM_RESERVE_BACKDROP))
        rc = vmem__error(-EINVAL, "addr 0x%" PRIx64 " was reserved without VMEM_RESERVE_BACKDROP", addr);
    if (!rc && length && ctx->b.ops->backdrop) {
        s->inflight++;
        vmem__unlock(ctx);
        rc = ctx->b.ops->backdrop(&ctx->b, &s->b, addr, length);
        vmem__lock(ctx);
        s->inflight--;
    }
    vmem__end(ctx);
    return rc;
}

void vmem__reservations_destroy(vmem_context *ctx)
{
    while (ctx->n_reservations) {
        struct vmem__reservation_rec *s = ctx->reservations[--ctx->n_reservations];
        vmem__unreserve(ctx, s);
        vmem__reservation_free(s, s->mapped != 0); // what could not be unmapped is freed with the reservation
    }
    free(ctx->reservations);
    for (struct vmem__leaf *leaf; (leaf = ctx->spare); free(leaf))
        ctx->spare = leaf->spare;
}

// ---- queries ------------------------------------------------------------------------------------------------

int vmem_reservation_query(vmem_context *ctx, uint64_t addr, struct vmem_reservation_info *out)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
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
    const uint64_t leaf_bytes = GRANULE * LEAF_ENTRIES;
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
        at += leaf ? GRANULE : leaf_bytes - (at - s->b.addr) % leaf_bytes;
    }
    vmem__end(ctx);
    *out = (struct vmem_range){first, first == end ? 0 : (at < end ? at : end) - first};
    return 0;
}
