// Unmapping and release.
//
// SPDX-License-Identifier: MIT
#include "core/batch.h"

#define FEW 8 // pieces kept on the stack

// ---- unmap --------------------------------------------------------------------------------------------------

// Marks a mapped page's first slot and adds its run.
static inline int mark_unmap(struct batch *b, struct vmem__space *s, uint64_t addr, uint64_t *slot,
                             struct vmem__arena_rec *a, struct vmem__page *p, size_t i)
{
    const uint64_t size = p->units * UNIT;
    int rc = batch_add(b, s, addr, size, a, (uint64_t)(p - a->pages) * UNIT, NULL, 0, size, true, i);
    if (rc)
        return rc;
    *slot |= SLOT_PENDING;
    p->token = b->token;
    return 0;
}

// Marks the pages in `length` bytes from a slot that continue the run of the page at it: of its size, next to each
// other, nobody's. They need no look-up. Returns their bytes.
static uint64_t continue_unmap(struct batch *b, uint64_t *slot, uint64_t length, struct vmem__arena_rec *a,
                               struct vmem__page *p)
{
    const uint32_t units = p->units;
    const struct vmem__page *const arena_end = a->pages + a->units;
    const uint64_t *const end = slot + length / UNIT;
    uint64_t frame = vmem__page_frame(a, p) + 1, bytes = 0;
    for (;; bytes += units * UNIT) {
        slot += units;
        frame += units;
        p += units;
        if (end - slot < units || *slot != frame || p == arena_end || p->state != UNIT_PAGE ||
            p->units != units || p->token)
            break;
        *slot |= SLOT_PENDING;
        p->token = b->token;
    }
    b->runs[b->n - 1].length += bytes;
    return bytes;
}

static int prepare_unmap(struct batch *b, const struct vmem_unmap_op *op, size_t i)
{
    vmem_context *ctx = b->ctx;
    struct vmem__space *s = vmem__space_find(ctx, op->addr);
    if (!s || op->length > s->b.addr + s->b.length - op->addr)
        return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 ") is not inside one reservation", op->addr,
                           op->length);
    if (op->addr % UNIT || op->length % UNIT || !op->length)
        return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 "): address and length must be multiples of 64 KiB, "
                           "the length not 0", op->addr, op->length);
    const uint64_t end = op->addr + op->length;
    for (uint64_t addr = op->addr, step; addr < end; addr += step) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        step = UNIT;
        if (!leaf) {
            step = leaf_end(s, addr, end) - addr;
            continue;
        }
        uint64_t *slot = vmem__slot_in(s, leaf, addr);
        if (!*slot)
            continue;
        if (*slot & SLOT_COMING)
            return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call maps there", addr);
        struct vmem__arena_rec *a;
        struct vmem__page *p = slot_page(ctx, slot, &a);
        step = p->units * UNIT;
        const bool cuts_start = vmem__page_frame(a, p) != vmem__slot_frame(*slot) - 1;
        if (cuts_start || step > end - addr)
            return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 ") cuts the page mapped at its %s", op->addr,
                               op->length, cuts_start ? "start" : "end");
        if (p->token && p->token != b->token)
            return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call works on the page mapped there", addr);
        if (*slot & SLOT_PENDING)
            continue; // an earlier element unmaps it
        int rc = mark_unmap(b, s, addr, slot, a, p, i);
        if (rc)
            return rc;
        step += continue_unmap(b, slot, leaf_end(s, addr, end) - addr, a, p);
    }
    return 0;
}

// Takes back the marks of an unmapping batch, or empties its slots. The runs name every page in it.
static void finish_unmap(struct batch *b, bool commit)
{
    vmem_context *ctx = b->ctx;
    for (size_t r = 0; r < b->n; r++) {
        const struct vmem__run *run = &b->runs[r];
        struct vmem__space *s = (struct vmem__space *)run->range;
        struct vmem__page *p = &((struct vmem__arena_rec *)run->arena)->pages[run->offset >> UNIT_SHIFT];
        uint64_t addr = run->addr;
        if (commit)
            count_mapped(ctx, s, -run->length);
        for (const uint64_t end = addr + run->length; addr < end;) {
            struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
            uint64_t *slot = vmem__slot_in(s, leaf, addr);
            const uint64_t first = addr, stop = leaf_end(s, addr, end);
            for (uint32_t units; addr < stop; addr += units * UNIT, slot += units, p += units) {
                units = p->units;
                p->token = 0;
                if (commit) {
                    unlink_page(ctx, addr, p);
                    ctx->unmap_ops++;
                } else {
                    *slot &= ~SLOT_PENDING;
                }
            }
            if (commit) {
                const uint32_t units = (uint32_t)((stop - first) / UNIT);
                memset(vmem__slot_in(s, leaf, first), 0, units * sizeof *slot);
                vmem__leaf_put(ctx, s, leaf, first, units);
            }
        }
    }
    if (commit)
        ctx->unmap_runs += b->n;
}

int vMemUnmapBatch(vmem_context *ctx, const struct vmem_unmap_op *ops, size_t n, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !ops)
        return vmem__error(-EINVAL, "ops is NULL");

    struct batch b;
    size_t at = 0;
    vmem__batch_begin(&b, ctx, 0);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare_unmap(&b, &ops[i], i);
        at = i;
    }
    if (!rc)
        rc = vmem__batch_run(&b, ctx->b.ops->unmap, &at);
    finish_unmap(&b, !rc);
    vmem__batch_end(&b);
    return rc ? vmem__batch_fail(rc, "ops", n, at, bad) : 0;
}

int vMemUnmap(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    return vMemUnmapBatch(ctx, &(struct vmem_unmap_op){addr, length}, 1, NULL);
}

// ---- release ------------------------------------------------------------------------------------------------

// Marks the pages after pages[0] that continue it: of its size, physically next to it, and either mapped nowhere, as it
// is, or at one address each, next to its slot. They need no look-up. Returns how many.
static size_t continue_release(struct batch *b, const vmem_page *pages, size_t n, struct vmem__space *s,
                               uint64_t *slot, struct vmem__arena_rec *a, struct vmem__page *p)
{
    const uint32_t units = p->units, mappings = p->mappings;
    const struct vmem__page *const arena_end = a->pages + a->units;
    uint64_t frame = vmem__page_frame(a, p), addr = p->mapping;
    const uint64_t stop = addr ? leaf_end(s, addr, s->b.addr + s->b.length) : 0;
    size_t i = 1;
    for (; i < n; i++) {
        frame += units;
        p += units;
        if (p == arena_end || p->state != UNIT_PAGE || p->units != units || p->token || p->mappings != mappings ||
            pages[i] != ((vmem_page)p->generation << FRAME_BITS | frame))
            break;
        if (mappings) {
            addr += units * UNIT;
            slot += units;
            if (p->mapping != addr || addr == stop)
                break;
            *slot |= SLOT_PENDING;
        }
        p->token = b->token;
    }
    if (mappings)
        b->runs[b->n - 1].length += (i - 1) * units * UNIT;
    return i - 1;
}

// Checks and marks pages[i], and those after it that continue it. *next is the first that remains.
static int prepare_release(struct batch *b, const vmem_page *pages, size_t n, size_t i, size_t *next)
{
    vmem_context *ctx = b->ctx;
    const vmem_page page = pages[i];
    struct vmem__arena_rec *a;
    *next = i + 1;
    struct vmem__page *p = vmem__page_get(ctx, page, &a);
    if (!p)
        return vmem__error(-EINVAL, "page 0x%" PRIx64 " is not a page of this context (any more)", page);
    if (p->token == b->token)
        return vmem__error(-EINVAL, "page 0x%" PRIx64 " is in the batch twice", page);
    if (p->token)
        return vmem__error(-EBUSY, "page 0x%" PRIx64 ": another call works on it", page);
    struct vmem__space *s = NULL;
    uint64_t *slot = NULL;
    for (uint64_t addr = p->mapping; addr; addr = next_mapping(ctx, addr, p)) {
        s = vmem__space_find(ctx, addr);
        slot = vmem__slot_in(s, vmem__leaf_get(s, addr), addr);
        int rc = mark_unmap(b, s, addr, slot, a, p, i);
        if (rc)
            return rc;
    }
    p->token = b->token;
    if (p->mappings <= 1)
        *next += continue_release(b, pages + i, n - i, s, slot, a, p);
    return 0;
}

// Ends the pages and collects their memory in pieces. Returns how many.
static size_t end_pages(vmem_context *ctx, const vmem_page *pages, size_t n, struct vmem__piece *pieces)
{
    size_t n_pieces = 0;
    for (size_t i = 0; i < n; i++) {
        struct vmem__arena_rec *a = NULL;
        struct vmem__page *p = vmem__page_get(ctx, pages[i], &a);
        uint32_t first = (uint32_t)(p - a->pages);
        p->generation++; // before the flags beside it: a word read after a byte's store waits for that
        p->state = UNIT_IDLE;
        for (uint32_t u = 0; u < p->units; u++)
            p[u].dirty = 1;
        ctx->created -= p->units * UNIT;
        struct vmem__piece *last = n_pieces ? &pieces[n_pieces - 1] : NULL;
        if (last && last->arena == a && last->first + last->units == first) {
            last->units += p->units;
        } else if (last && last->arena == a && first + p->units == last->first) {
            last->first = first;
            last->units += p->units;
        } else {
            pieces[n_pieces++] = (struct vmem__piece){.arena = a, .first = first, .units = p->units, .committed = true};
        }
    }
    return n_pieces;
}

int vMemReleaseBatch(vmem_context *ctx, const vmem_page *pages, size_t n, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !pages)
        return vmem__error(-EINVAL, "pages is NULL");

    struct vmem__piece few[FEW], *pieces = few;
    if (n > FEW && !(pieces = malloc(n * sizeof *pieces)))
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", n);
    struct batch b;
    size_t marked = 0, at = 0;
    vmem__batch_begin(&b, ctx, 0);
    for (size_t next; marked < n && !rc; marked = rc ? marked : next) {
        rc = prepare_release(&b, pages, n, marked, &next);
        at = marked;
    }
    if (!rc)
        rc = vmem__batch_run(&b, ctx->b.ops->unmap, &at);
    finish_unmap(&b, !rc);
    if (!rc) {
        vmem__give(ctx, pieces, end_pages(ctx, pages, n, pieces));
    } else {
        for (size_t i = 0; i < marked; i++) {
            struct vmem__arena_rec *a;
            vmem__page_get(ctx, pages[i], &a)->token = 0;
        }
    }
    vmem__batch_end(&b);
    if (pieces != few)
        free(pieces);
    return rc ? vmem__batch_fail(rc, "pages", n, at, bad) : 0;
}

int vMemRelease(vmem_context *ctx, vmem_page page)
{
    return vMemReleaseBatch(ctx, &page, 1, NULL);
}
