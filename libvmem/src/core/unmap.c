// Unmapping, release and decommit.
//
// SPDX-License-Identifier: MIT
#include "core/batch.h"

// ---- unmap --------------------------------------------------------------------------------------------------

// Marks a mapped page's first entry and adds its run.
static inline int mark_unmap(struct batch *b, struct vmem__reservation_rec *s, uint64_t addr, uint64_t *entry,
                             struct vmem__arena_rec *a, struct vmem__page *p, size_t i)
{
    const uint64_t size = p->granules * GRANULE;
    int rc = batch_add(b, s, addr, size, a, (uint64_t)(p - a->pages) * GRANULE, NULL, 0, size, true, i);
    if (rc)
        return rc;
    *entry |= ENTRY_PENDING;
    p->opid = b->opid;
    return 0;
}

// Marks the pages in `length` bytes from an entry that continue its page's run: adjacent pages of the same size on
// which no call works and that, with `single`, are mapped nowhere else. They need no look-up. Returns their bytes.
static inline uint64_t continue_unmap(struct batch *b, uint64_t *entry, uint64_t length, struct vmem__arena_rec *a,
                                      struct vmem__page *p, bool single)
{
    const uint32_t granules = p->granules;
    const struct vmem__page *const arena_end = a->pages + a->granules;
    const uint64_t *const end = entry + length / GRANULE;
    uint64_t frame = vmem__page_frame(a, p) + 1, bytes = 0;
    for (;; bytes += granules * GRANULE) {
        entry += granules;
        frame += granules;
        p += granules;
        if (end - entry < granules || *entry != frame || p == arena_end || p->state != GRANULE_PAGE ||
            p->granules != granules || p->opid || (single && p->mappings != 1))
            break;
        *entry |= ENTRY_PENDING;
        p->opid = b->opid;
    }
    b->runs[b->n - 1].length += bytes;
    return bytes;
}

// Marks a page and all its addresses. *s and *entry are those of the last one.
static int mark_page(struct batch *b, struct vmem__arena_rec *a, struct vmem__page *p, size_t i,
                     struct vmem__reservation_rec **s, uint64_t **entry)
{
    for (uint64_t addr = p->mapping; addr; addr = next_mapping(b->ctx, addr, p)) {
        *s = vmem__reservation_find(b->ctx, addr);
        *entry = vmem__entry_in(*s, vmem__leaf_get(*s, addr), addr);
        int rc = mark_unmap(b, *s, addr, *entry, a, p, i);
        if (rc)
            return rc;
    }
    p->opid = b->opid;
    return 0;
}

// Marks the pages mapped in a range and, with `whole`, all their other addresses. Adds their bytes in the range to
// *bytes.
static int prepare_range(struct batch *b, uint64_t addr, uint64_t length, size_t i, bool whole, uint64_t *bytes)
{
    vmem_context *ctx = b->ctx;
    const uint64_t start = addr, end = addr + length;
    struct vmem__reservation_rec *s;
    int rc = vmem__check_range(ctx, addr, length, GRANULE, &s);
    if (rc)
        return rc;
    for (uint64_t step; addr < end; addr += step) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        step = GRANULE;
        if (!leaf) {
            step = leaf_end(s, addr, end) - addr;
            continue;
        }
        uint64_t *entry = vmem__entry_in(s, leaf, addr);
        if (!*entry)
            continue;
        if (*entry & ENTRY_COMING)
            return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call maps there", addr);
        struct vmem__arena_rec *a;
        struct vmem__page *p = entry_page(ctx, entry, &a);
        step = p->granules * GRANULE;
        const bool cuts_start = vmem__page_frame(a, p) != vmem__entry_frame(*entry) - 1;
        if (cuts_start || step > end - addr)
            return vmem__error(-EINVAL,
                               "addr 0x%" PRIx64 ", length %" PRIu64 ": the range cuts the page mapped at its %s",
                               start, length, cuts_start ? "start" : "end");
        if (p->opid && p->opid != b->opid)
            return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call works on the page mapped there", addr);
        if (*entry & ENTRY_PENDING) {
            *bytes += step; // already marked by an earlier element, or as another address of its page
            continue;
        }
        const bool only = p->mappings == 1;
        struct vmem__reservation_rec *s2;
        uint64_t *entry2;
        rc = whole && !only ? mark_page(b, a, p, i, &s2, &entry2) : mark_unmap(b, s, addr, entry, a, p, i);
        if (rc)
            return rc;
        if (!whole)
            step += continue_unmap(b, entry, leaf_end(s, addr, end) - addr, a, p, false);
        else if (only)
            step += continue_unmap(b, entry, leaf_end(s, addr, end) - addr, a, p, true);
        *bytes += step;
    }
    return 0;
}

enum end {
    TAKE_BACK, // remove the marks
    UNMAPPED,  // clear the entries; end bound pages that are mapped nowhere now
    RELEASED,  // clear the entries; end all pages
};

// The runs contain every mapped page of the batch.
static inline __attribute__((always_inline)) void finish_runs(struct batch *b, const enum end end)
{
    vmem_context *ctx = b->ctx;
    for (size_t r = 0; r < b->n; r++) {
        const struct vmem__run *run = &b->runs[r];
        struct vmem__reservation_rec *s = (struct vmem__reservation_rec *)run->reservation;
        struct vmem__arena_rec *a = (struct vmem__arena_rec *)run->arena;
        struct vmem__page *p = &a->pages[run->offset >> GRANULE_SHIFT];
        uint64_t addr = run->addr;
        if (end != TAKE_BACK)
            count_mapped(ctx, s, -run->length);
        for (const uint64_t stop = addr + run->length; addr < stop;) {
            struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
            uint64_t *entry = vmem__entry_in(s, leaf, addr);
            const uint64_t first = addr, leaf_stop = leaf_end(s, addr, stop);
            for (uint32_t granules; addr < leaf_stop; addr += granules * GRANULE, entry += granules, p += granules) {
                granules = p->granules;
                if (end == TAKE_BACK) {
                    p->opid = 0;
                    *entry &= ~ENTRY_PENDING;
                    continue;
                }
                unlink_page(ctx, addr, p);
                ctx->unmap_ops++;
                if (end == RELEASED) { // keeps its operation id while it is mapped elsewhere
                    if (VMEM__LIKELY(!p->mappings))
                        batch_end_page(b, a, p);
                } else if (VMEM__UNLIKELY(p->bound && !p->mappings)) {
                    batch_end_page(b, a, p);
                } else {
                    p->opid = 0;
                }
            }
            if (end != TAKE_BACK) {
                const uint32_t granules = (uint32_t)((leaf_stop - first) / GRANULE);
                memset(vmem__entry_in(s, leaf, first), 0, granules * sizeof *entry);
                vmem__leaf_put(ctx, s, leaf, first, granules);
            }
        }
    }
    if (end != TAKE_BACK && b->n) {
        ctx->unmap_runs += b->n;
        ctx->stuck = false;
    }
}

// Ends an unmapping batch. Each case has its own loop without branches.
static void finish_unmap(struct batch *b, enum end end)
{
    if (end == TAKE_BACK)
        finish_runs(b, TAKE_BACK);
    else if (end == UNMAPPED)
        finish_runs(b, UNMAPPED);
    else
        finish_runs(b, RELEASED);
}

// Unmaps ranges. released: also ends the pages that are mapped there, and receives their bytes; NULL: they stay.
static int unmap_ranges(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t *released, size_t *bad)
{
    const char *name = released ? "ranges" : "ops";
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !ranges)
        return vmem__error(-EINVAL, "%s is NULL", name);

    struct batch b;
    uint64_t found = 0;
    size_t at = 0;
    vmem__batch_begin(&b, ctx, 0);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare_range(&b, ranges[i].addr, ranges[i].length, i, released, &found);
        if (!rc && !released && !ranges[i].length)
            rc = vmem__error(-EINVAL, "addr 0x%" PRIx64 ": length 0 must be at least 64 KiB", ranges[i].addr);
        at = i;
    }
    if (!rc)
        rc = vmem__batch_run(&b, ctx->b.ops->unmap, &at);
    finish_unmap(&b, rc ? TAKE_BACK : released ? RELEASED : UNMAPPED);
    vmem__batch_free_ended(&b);
    vmem__batch_end(&b);
    if (released)
        *released = found;
    return rc ? vmem__batch_fail(rc, name, n, at, bad) : 0;
}

int vMemUnmapBatch(vmem_context *ctx, const struct vmem_range *ops, size_t n, size_t *bad)
{
    return unmap_ranges(ctx, ops, n, NULL, bad);
}

int vmem_decommit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t *bytes)
{
    uint64_t released;
    int rc = unmap_ranges(ctx, ranges, n, &released, NULL);
    if (!rc && bytes)
        *bytes = released;
    return rc;
}

int vMemUnmap(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    return vMemUnmapBatch(ctx, &(struct vmem_range){addr, length}, 1, NULL);
}

// ---- release ------------------------------------------------------------------------------------------------

// Marks the pages after pages[0] that continue it: physically adjacent pages of the same size. Either none of them is
// mapped, or each is mapped at one address and these are adjacent too. They need no look-up. Returns their number.
static size_t continue_release(struct batch *b, const vmem_page *pages, size_t n, struct vmem__reservation_rec *s,
                               uint64_t *entry, struct vmem__arena_rec *a, struct vmem__page *p)
{
    const uint32_t granules = p->granules, mappings = p->mappings;
    const struct vmem__page *const arena_end = a->pages + a->granules;
    uint64_t frame = vmem__page_frame(a, p), addr = p->mapping;
    const uint64_t stop = addr ? leaf_end(s, addr, s->b.addr + s->b.length) : 0;
    size_t i = 1;
    for (; i < n; i++) {
        frame += granules;
        p += granules;
        if (p == arena_end || p->state != GRANULE_PAGE || p->granules != granules || p->opid ||
            p->mappings != mappings || pages[i] != vmem__handle(b->ctx, p, frame))
            break;
        if (mappings) {
            addr += granules * GRANULE;
            entry += granules;
            if (p->mapping != addr || addr == stop)
                break;
            *entry |= ENTRY_PENDING;
        }
        p->opid = b->opid;
    }
    if (mappings)
        b->runs[b->n - 1].length += (i - 1) * granules * GRANULE;
    return i - 1;
}

// Checks and marks pages[i] and the following pages that continue it. *next is the first one left. *loose becomes true
// if they are mapped nowhere, so that no run contains them.
static int prepare_release(struct batch *b, const vmem_page *pages, size_t n, size_t i, size_t *next, bool *loose)
{
    vmem_context *ctx = b->ctx;
    const vmem_page page = pages[i];
    struct vmem__arena_rec *a;
    *next = i + 1;
    struct vmem__page *p = vmem__page_get(ctx, page, &a);
    if (!p)
        return vmem__error(-EINVAL,
                           "page 0x%" PRIx64 " is not a page of this context: it was released, or is another's", page);
    if (p->opid == b->opid)
        return vmem__error(-EINVAL, "page 0x%" PRIx64 " is in the batch twice", page);
    if (p->opid)
        return vmem__error(-EBUSY, "page 0x%" PRIx64 ": another call works on it", page);
    struct vmem__reservation_rec *s = NULL;
    uint64_t *entry = NULL;
    int rc = mark_page(b, a, p, i, &s, &entry);
    if (rc)
        return rc;
    *loose |= !p->mappings;
    if (p->mappings <= 1)
        *next += continue_release(b, pages + i, n - i, s, entry, a, p);
    return 0;
}

// Ends the pages of a batch that were mapped nowhere, or removes their marks. The other pages are already done.
static void finish_loose(struct batch *b, const vmem_page *pages, size_t n, bool release)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t frame = vmem__handle_frame(b->ctx, pages[i]);
        struct vmem__arena_rec *a = vmem__frame_arena(b->ctx, frame);
        struct vmem__page *p = &a->pages[frame - a->base];
        if (p->state != GRANULE_PAGE || p->opid != b->opid)
            continue;
        if (release)
            batch_end_page(b, a, p);
        else
            p->opid = 0;
    }
}

int vMemReleaseBatch(vmem_context *ctx, const vmem_page *pages, size_t n, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !pages)
        return vmem__error(-EINVAL, "pages is NULL");

    struct batch b;
    size_t marked = 0, at = 0;
    bool loose = false;
    vmem__batch_begin(&b, ctx, 0);
    for (size_t next; marked < n && !rc; marked = rc ? marked : next) {
        rc = prepare_release(&b, pages, n, marked, &next, &loose);
        at = marked;
    }
    if (!rc)
        rc = vmem__batch_run(&b, ctx->b.ops->unmap, &at);
    if (b.n)
        finish_unmap(&b, rc ? TAKE_BACK : RELEASED);
    if (loose)
        finish_loose(&b, pages, marked, !rc);
    vmem__batch_free_ended(&b);
    vmem__batch_end(&b);
    return rc ? vmem__batch_fail(rc, "pages", n, at, bad) : 0;
}

int vMemRelease(vmem_context *ctx, vmem_page page) { return vMemReleaseBatch(ctx, &page, 1, NULL); }
