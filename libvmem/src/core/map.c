// Mapping, and queries of what is mapped.
//
// SPDX-License-Identifier: MIT
#include "core/batch.h"

// An error unless the pages mapped in [addr, addr + granules) may be replaced: they lie inside it, and no other call works on
// them. Those that are doomed may always be.
static int check_entries(struct batch *b, const uint64_t *entry, uint32_t granules, uint64_t addr)
{
    for (uint32_t u = 0; u < granules; u++) {
        const uint64_t at = addr + u * GRANULE, frame = vmem__entry_frame(entry[u]);
        if (!entry[u])
            continue;
        uint32_t owner = (uint32_t)entry[u];
        if (frame) {
            struct vmem__arena_rec *a = vmem__frame_arena(b->ctx, frame - 1);
            const struct vmem__page *granule = &a->pages[frame - 1 - a->base], *old = vmem__frame_page(a, frame - 1);
            owner = old->opid;
            if (!(entry[u] & ENTRY_PENDING) && (!owner || owner == b->opid)) {
                if (!(b->flags & VMEM_MAP_REPLACE) && !old->doomed)
                    return vmem__error(-EEXIST,
                                       "addr 0x%" PRIx64 ": a page is mapped at 0x%" PRIx64
                                       " already, and VMEM_MAP_REPLACE is not set",
                                       addr, at);
                if (granule != old ? u == 0 : u + old->granules > granules)
                    return vmem__error(-EINVAL,
                                       "addr 0x%" PRIx64 ": the page of %" PRIu64 " bytes that is mapped at 0x%" PRIx64
                                       " extends past the new one",
                                       addr, old->granules * GRANULE, at);
                continue;
            }
        }
        if (owner == b->opid)
            return vmem__error(-EINVAL, "addr 0x%" PRIx64 " overlaps an earlier element of the batch", addr);
        return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call works on 0x%" PRIx64, addr, at);
    }
    return 0;
}

// The largest page size that divides x.
static uint64_t page_size_of(uint64_t x)
{
    return x % VMEM_PAGE_2M == 0     ? VMEM_PAGE_2M
           : x % VMEM_PAGE_256K == 0 ? VMEM_PAGE_256K
           : x % VMEM_PAGE_128K == 0 ? VMEM_PAGE_128K
                                     : VMEM_PAGE_64K;
}

// Adds the runs of one page that replaces others: one run for each stretch of consecutive old memory.
static int add_replacing(struct batch *b, struct vmem__reservation_rec *s, uint64_t addr, struct vmem__arena_rec *a,
                         uint64_t offset, const uint64_t *entry, uint32_t granules, size_t i)
{
    int rc = 0;
    for (uint32_t u = 0, end; u < granules && !rc; u = end) {
        const uint64_t frame = vmem__entry_frame(entry[u]);
        struct vmem__arena_rec *old = frame ? vmem__frame_arena(b->ctx, frame - 1) : NULL;
        // Frames of different arenas are never consecutive, so comparing frames is enough.
        for (end = u + 1; end < granules; end++) {
            if (vmem__entry_frame(entry[end]) != (frame ? frame + (end - u) : 0))
                break;
        }
        const uint64_t shift = u * GRANULE, length = (end - u) * GRANULE;
        const uint64_t page_size = page_size_of((granules * GRANULE) | (addr + shift) | length | (offset + shift));
        rc = batch_add(b, s, addr + shift, length, a, offset + shift, old, old ? (frame - 1 - old->base) * GRANULE : 0,
                       page_size, false, i);
    }
    return rc;
}

// Marks the elements after ops[0] that continue its run: same leaf, adjacent pages of the same size, nothing mapped
// yet. They need no look-up, which is most of an element's cost. Returns their number.
static size_t continue_map(struct batch *b, const struct vmem_map_op *ops, size_t n, struct vmem__reservation_rec *s,
                           struct vmem__leaf *leaf, uint64_t *entry, struct vmem__arena_rec *a, struct vmem__page *p)
{
    const uint32_t granules = p->granules;
    const uint64_t size = granules * GRANULE, end = leaf_end(s, ops[0].addr, s->b.addr + s->b.length);
    const uint64_t places = (end - ops[0].addr) / GRANULE, pages = a->granules - (uint64_t)(p - a->pages);
    const size_t most = (places < pages ? places : pages) >> __builtin_ctz(granules);
    uint64_t addr = ops[0].addr, frame = vmem__page_frame(a, p);
    size_t i = 1;
    for (; i < n && i < most; i++) {
        addr += size;
        frame += granules;
        p += granules;
        if (ops[i].addr != addr || ops[i].page != vmem__handle(b->ctx, p, frame) || p->state != GRANULE_PAGE ||
            p->granules != granules || p->opid || !all_empty(entry + i * granules, granules))
            break;
        p->opid = b->opid;
    }
    mark_empty(b, leaf, entry + granules, (uint32_t)(i - 1) * granules);
    b->runs[b->n - 1].length += (i - 1) * size;
    return i - 1;
}

// Finds what an element names, and checks that its page can be mapped there.
static inline int check_map(const struct batch *b, const struct vmem_map_op *op, struct vmem__page **page,
                            struct vmem__arena_rec **a, struct vmem__reservation_rec **s)
{
    struct vmem__page *p = *page = vmem__page_get(b->ctx, op->page, a);
    if (VMEM__UNLIKELY(!p))
        return vmem__error(-EINVAL,
                           "page 0x%" PRIx64 " is not a page of this context: it was released, or is another's",
                           op->page);
    const uint64_t addr = op->addr, size = p->granules * GRANULE;
    *s = vmem__reservation_find(b->ctx, addr);
    if (VMEM__UNLIKELY(!*s || size > (*s)->b.addr + (*s)->b.length - addr))
        return vmem__error(-EINVAL,
                           "addr 0x%" PRIx64 ": a page of %" PRIu64 " bytes there is not inside one reservation", addr,
                           size);
    if (VMEM__UNLIKELY(addr & (size - 1)))
        return vmem__error(-EINVAL, "addr 0x%" PRIx64 " is not a multiple of the page's size, %" PRIu64, addr, size);
    if (VMEM__UNLIKELY(p->opid && p->opid != b->opid))
        return vmem__error(-EBUSY, "page 0x%" PRIx64 ": another call works on it", op->page);
    return 0;
}

// Marks what a page replaces, and where it comes.
static void mark_replaced(struct batch *b, struct vmem__leaf *leaf, uint64_t *entry, uint32_t granules)
{
    for (uint32_t u = 0; u < granules; u++) {
        if (entry[u]) {
            struct vmem__arena_rec *old = vmem__frame_arena(b->ctx, entry[u] - 1);
            vmem__frame_page(old, entry[u] - 1)->opid = b->opid;
            entry[u] |= ENTRY_PENDING;
        } else {
            mark_empty(b, leaf, &entry[u], 1);
        }
    }
}

// Checks and marks ops[i] and the following elements that continue its run. *next is the first one left.
static int prepare_map(struct batch *b, const struct vmem_map_op *ops, size_t n, size_t i, size_t *next)
{
    vmem_context *ctx = b->ctx;
    const uint64_t addr = ops[i].addr;
    struct vmem__reservation_rec *s = NULL;
    struct vmem__arena_rec *a = NULL;
    struct vmem__page *p;
    *next = i + 1;
    int rc = check_map(b, &ops[i], &p, &a, &s);
    if (VMEM__UNLIKELY(rc))
        return rc;
    const uint32_t granules = p->granules;
    const uint64_t size = granules * GRANULE, offset = (uint64_t)(p - a->pages) * GRANULE;

    struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
    if (VMEM__UNLIKELY(!leaf) && !(leaf = vmem__leaf_new(ctx, s, addr)))
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    uint64_t *entry = vmem__entry_in(s, leaf, addr);
    const bool any = !all_empty(entry, granules);
    rc = any ? check_entries(b, entry, granules, addr) : 0;
    if (!rc)
        rc = any ? add_replacing(b, s, addr, a, offset, entry, granules, i)
                 : batch_add(b, s, addr, size, a, offset, NULL, 0, size, false, i);
    if (VMEM__UNLIKELY(rc)) {
        vmem__leaf_put(ctx, s, leaf, addr, 0); // the leaf may be new and empty
        return rc;
    }

    p->opid = b->opid;
    if (VMEM__UNLIKELY(any)) {
        mark_replaced(b, leaf, entry, granules);
        return 0;
    }
    mark_empty(b, leaf, entry, granules);
    *next += continue_map(b, ops + i, n - i, s, leaf, entry, a, p);
    return 0;
}

// Unlinks the pages that a run replaces.
static void unlink_old(vmem_context *ctx, const struct vmem__run *run)
{
    struct vmem__reservation_rec *s = (struct vmem__reservation_rec *)run->reservation;
    struct vmem__page *old = &((struct vmem__arena_rec *)run->old_arena)->pages[run->old_offset >> GRANULE_SHIFT];
    uint64_t addr = run->addr;

    for (const uint64_t end = addr + run->length; addr < end; addr += old->granules * GRANULE, old += old->granules) {
        old->opid = 0;
        unlink_page(ctx, addr, old);
        ctx->stuck = ctx->stuck && !old->doomed; // it may be mapped nowhere now
    }
    count_mapped(ctx, s, -run->length);
}

// Ends the bound pages that a run replaced and that are mapped nowhere now. Done after all runs, because a batch may
// have moved a page to another address.
static void end_old(struct batch *b, const struct vmem__run *run)
{
    struct vmem__arena_rec *a = (struct vmem__arena_rec *)run->old_arena;
    struct vmem__page *p = &a->pages[run->old_offset >> GRANULE_SHIFT], *const end = p + (run->length >> GRANULE_SHIFT);
    for (uint32_t granules; p < end; p += granules) {
        granules = p->state == GRANULE_PAGE ? p->granules : 1; // an earlier run may have ended it
        if (p->state == GRANULE_PAGE && p->bound && !p->mappings)
            batch_end_page(b, a, p);
    }
}

void vmem__commit_run(vmem_context *ctx, const struct vmem__run *run)
{
    struct vmem__reservation_rec *s = (struct vmem__reservation_rec *)run->reservation;
    struct vmem__arena_rec *a = (struct vmem__arena_rec *)run->arena;
    struct vmem__page *p = &a->pages[run->offset >> GRANULE_SHIFT];
    uint64_t frame = vmem__page_frame(a, p);
    const uint64_t end = run->addr + run->length, size = run->page_size;
    const uint32_t granules = (uint32_t)(size >> GRANULE_SHIFT);

    if (run->old_arena)
        unlink_old(ctx, run);
    count_mapped(ctx, s, run->length);
    for (uint64_t addr = run->addr, stop; addr < end; addr = stop) {
        uint64_t *entry = vmem__entry_in(s, vmem__leaf_get(s, addr), addr);
        stop = leaf_end(s, addr, end);
        for (const uint64_t *last = entry + (stop - addr) / GRANULE; entry < last;)
            *entry++ = ++frame;
        // Pages start at multiples of the run's page size. The other granules' records stay untouched, because those of
        // a batch of 2 MiB pages would fill a cache.
        for (; addr < stop; addr += size, p += granules) {
            if (p->state == GRANULE_PAGE) {
                p->opid = 0;
                link_page(ctx, addr, p);
            }
        }
    }
}

// Removes the marks of a run, as far as they were set.
static void undo_map(vmem_context *ctx, const struct vmem__run *run)
{
    struct vmem__reservation_rec *s = (struct vmem__reservation_rec *)run->reservation;
    struct vmem__page *p = &((struct vmem__arena_rec *)run->arena)->pages[run->offset >> GRANULE_SHIFT];
    for (uint64_t addr = run->addr; addr < run->addr + run->length; addr += GRANULE, p++) {
        if (p->state == GRANULE_PAGE)
            p->opid = 0;
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        uint64_t *entry = leaf ? vmem__entry_in(s, leaf, addr) : NULL;
        if (!entry || !(*entry & ENTRY_PENDING))
            continue;
        *entry = vmem__entry_frame(*entry);
        if (*entry) {
            struct vmem__arena_rec *old = vmem__frame_arena(ctx, *entry - 1);
            vmem__frame_page(old, *entry - 1)->opid = 0;
        } else {
            vmem__leaf_put(ctx, s, leaf, addr, 1);
        }
    }
}

int vMemMapBatch(vmem_context *ctx, const struct vmem_map_op *ops, size_t n, uint32_t flags, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (flags & ~(VMEM_MAP_REPLACE | VMEM_MAP_FINE))
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_MAP_REPLACE and VMEM_MAP_FINE are known", flags);
    if (n && !ops)
        return vmem__error(-EINVAL, "ops is NULL");

    struct batch b;
    size_t at = 0;
    vmem__batch_begin(&b, ctx, flags);
    for (size_t i = 0, next; i < n && !rc; i = next) {
        rc = prepare_map(&b, ops, n, i, &next);
        at = i;
    }
    if (!rc)
        rc = vmem__batch_run(&b, ctx->b.ops->map, &at);
    for (size_t r = 0; r < b.n; r++)
        rc ? undo_map(ctx, &b.runs[r]) : vmem__commit_run(ctx, &b.runs[r]);
    for (size_t r = 0; r < b.n && !rc; r++) {
        if (b.runs[r].old_arena)
            end_old(&b, &b.runs[r]);
    }
    if (!rc) {
        ctx->map_ops += n;
        ctx->map_runs += b.n;
    }
    vmem__batch_free_ended(&b);
    vmem__batch_end(&b);
    return rc ? vmem__batch_fail(rc, "ops", n, at, bad) : 0;
}

int vMemMap(vmem_context *ctx, uint64_t addr, vmem_page page)
{
    return vMemMapBatch(ctx, &(struct vmem_map_op){addr, page}, 1, 0, NULL);
}

// ---- query --------------------------------------------------------------------------------------------------

int vmem_query(vmem_context *ctx, uint64_t addr, vmem_page *page, uint64_t *offset)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (!page)
        return vmem__error(-EINVAL, "page is NULL");
    vmem__begin(ctx);
    struct vmem__reservation_rec *s = vmem__reservation_find(ctx, addr);
    rc = s ? vmem__present(ctx, addr, 1) : vmem__error(-EINVAL, "no reservation contains addr 0x%" PRIx64, addr);
    if (s) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        const uint64_t *entry = leaf ? vmem__entry_in(s, leaf, addr) : NULL;
        *page = 0;
        if (offset)
            *offset = 0;
        if (entry && vmem__entry_frame(*entry)) {
            struct vmem__arena_rec *a;
            const struct vmem__page *p = entry_page(ctx, entry, &a);
            uint64_t frame = vmem__page_frame(a, p);
            *page = p->doomed ? 0 : vmem__handle(ctx, p, frame);
            if (offset && *page)
                *offset = (vmem__entry_frame(*entry) - 1 - frame) * GRANULE + addr % GRANULE;
        }
    }
    vmem__end(ctx);
    return rc;
}
