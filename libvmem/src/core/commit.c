// Committing: pages that belong to the addresses that they back.
//
// A commit is a batch. It first marks every part of its ranges: the holes as addresses where a call maps, and the pages
// between them as pages that a call works on. Then it creates pages for the holes, maps them and records the result. The
// marks stay until the end, so that no other call changes a part of the ranges meanwhile, and nothing is lost if it
// fails.
//
// SPDX-License-Identifier: MIT
#include "core/batch.h"

// Entries examined before the lock is dropped for other calls.
#define LOOK 65536

// Marked addresses of one range: all of them holes, or all of them backed.
struct stretch {
    struct vmem__reservation_rec *s;
    uint64_t addr, length;
    size_t range;
    bool hole;
};

struct commit {
    struct batch b;
    const struct vmem_range *ranges;
    size_t n;
    size_t held; // ranges whose reservations cannot be freed
    size_t at;   // the range at fault; n: none of them
    uint64_t page_size;
    struct stretch *stretches, few[16];
    size_t n_stretches, capacity;
    size_t looks;
    vmem_page *pages, few_pages[16]; // for the holes, in order
    size_t holes, created;           // pages: needed; created
};

// Gives other calls the lock now and then.
static void yield_lock(struct commit *c, size_t entries)
{
    c->looks += entries;
    if (c->looks >= LOOK) {
        c->looks = 0;
        vmem__unlock(c->b.ctx);
        vmem__lock(c->b.ctx);
    }
}

// ---- checks -------------------------------------------------------------------------------------------------

// Checks the ranges and keeps their reservations. *bytes: at most this much is missing.
static int hold_ranges(struct commit *c, uint64_t *bytes)
{
    *bytes = 0;
    for (; c->held < c->n; c->held++) {
        const struct vmem_range *range = &c->ranges[c->held];
        struct vmem__reservation_rec *s;
        c->at = c->held;
        int rc = vmem__check_range(c->b.ctx, range->addr, range->length, c->page_size, &s);
        if (rc)
            return rc;
        rc = vmem__present(c->b.ctx, range->addr, range->length);
        if (rc)
            return rc;
        s->inflight++;
        *bytes += range->length < UINT64_MAX - *bytes ? range->length : UINT64_MAX - *bytes;
    }
    return 0;
}

// True if nothing is missing and nobody works there: then no marks are needed, which take two passes. One range only,
// because ranges that overlap are an error.
static bool all_backed(struct commit *c)
{
    const struct vmem__reservation_rec *s = vmem__reservation_find(c->b.ctx, c->ranges[0].addr);
    const uint64_t end = c->ranges[0].addr + c->ranges[0].length;
    struct vmem__leaf *leaf = NULL;
    if (c->n > 1 || c->ranges[0].length / c->page_size > LOOK)
        return false;
    for (uint64_t addr = c->ranges[0].addr, next = 0; addr < end; addr += c->page_size) {
        if (addr >= next) {
            leaf = vmem__leaf_get(s, addr);
            next = leaf_end(s, addr, end);
        }
        const uint64_t entry = leaf ? *vmem__entry_in(s, leaf, addr) : 0;
        if (!entry || entry & ENTRY_COMING)
            return false;
        struct vmem__arena_rec *a;
        const struct vmem__page *p = entry_page(c->b.ctx, &entry, &a);
        if (p->doomed || p->opid || p->granules < c->page_size >> GRANULE_SHIFT)
            return false;
    }
    return true;
}

// -ENOMEM if the holes exceed what may exist. Looks before anything is built: marks take memory, too.
static int check_holes(struct commit *c)
{
    vmem_context *ctx = c->b.ctx;
    uint64_t holes = 0;
    for (c->at = 0; c->at < c->n; c->at++) {
        const struct vmem_range *range = &c->ranges[c->at];
        const struct vmem__reservation_rec *s = vmem__reservation_find(ctx, range->addr);
        const uint64_t end = range->addr + range->length;
        for (uint64_t addr = range->addr, next; addr < end; addr = next) {
            struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
            next = leaf ? addr + c->page_size : leaf_end(s, addr, end);
            if (!leaf || !*vmem__entry_in(s, leaf, addr)) // where another call maps, mark_ranges() finds it
                holes += (next - addr) / c->page_size;
            int rc = holes ? vmem__check_room(ctx, c->page_size, holes) : 0;
            if (rc)
                return rc;
            yield_lock(c, 1);
        }
    }
    return 0;
}

// ---- marks --------------------------------------------------------------------------------------------------

// Marks the page that is mapped at an address, of whose entries one at least is not empty.
static int mark_backed(struct commit *c, const uint64_t *entry, uint64_t addr)
{
    const uint32_t granules = (uint32_t)(c->page_size >> GRANULE_SHIFT);
    uint32_t u = 0;
    while (!entry[u])
        u++;
    const uint64_t at = addr + u * GRANULE;
    if (entry[u] & ENTRY_COMING)
        return (uint32_t)entry[u] == c->b.opid
                   ? vmem__error(-EINVAL, "addr 0x%" PRIx64 " is also in an earlier range", at)
                   : vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call commits or maps there", at);
    struct vmem__arena_rec *a;
    struct vmem__page *p = entry_page(c->b.ctx, &entry[u], &a);
    if (p->doomed || (p->opid && p->opid != c->b.opid))
        return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call commits or releases there", at);
    if (u || p->granules < granules)
        return vmem__error(-EEXIST, "addr 0x%" PRIx64 " is backed by pages smaller than page_size %" PRIu64, at,
                           c->page_size);
    p->opid = c->b.opid;
    return 0;
}

// Makes space for another stretch, before something is marked that needs it.
static int grow_stretches(struct commit *c)
{
    if (c->n_stretches < c->capacity)
        return 0;
    const size_t capacity = 8 * c->capacity;
    const bool few = c->stretches == c->few;
    struct stretch *grown = realloc(few ? NULL : c->stretches, capacity * sizeof *grown);
    if (!grown)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu stretches", capacity);
    if (few)
        memcpy(grown, c->few, sizeof c->few);
    c->stretches = grown;
    c->capacity = capacity;
    return 0;
}

static struct stretch *last_of(const struct commit *c) { return &c->stretches[c->n_stretches - 1]; }

// Marks the places of `range` from addr to the end of their leaf. *addr: the first place that is left.
static inline int mark_leaf(struct commit *c, struct vmem__reservation_rec *s, uint64_t *addr, uint64_t end)
{
    const uint32_t granules = (uint32_t)(c->page_size >> GRANULE_SHIFT);
    struct vmem__leaf *leaf = vmem__leaf_get(s, *addr);
    struct stretch *last = NULL;
    int rc = 0;
    end = leaf_end(s, *addr, end);
    if (!leaf && !(leaf = vmem__leaf_new(c->b.ctx, s, *addr)))
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    const uint64_t first = *addr;
    if (c->n_stretches && last_of(c)->range == c->at && last_of(c)->addr + last_of(c)->length == first)
        last = last_of(c);
    for (uint64_t *entry = vmem__entry_in(s, leaf, first); *addr < end; *addr += c->page_size, entry += granules) {
        const bool any = !all_empty(entry, granules);
        const bool next = !last || last->hole == any;
        if (next)
            rc = grow_stretches(c);
        if (!rc && any)
            rc = mark_backed(c, entry, *addr);
        if (VMEM__UNLIKELY(rc)) {
            vmem__leaf_put(c->b.ctx, s, leaf, first, 0); // the leaf may be new and empty
            return rc;
        }
        if (!any) {
            mark_empty(&c->b, leaf, entry, granules);
            c->holes++;
        }
        if (next) {
            last = &c->stretches[c->n_stretches++];
            *last = (struct stretch){.s = s, .addr = *addr, .range = c->at, .hole = !any};
        }
        last->length += c->page_size;
    }
    return 0;
}

static int mark_ranges(struct commit *c)
{
    for (c->at = 0; c->at < c->n; c->at++) {
        const struct vmem_range *range = &c->ranges[c->at];
        struct vmem__reservation_rec *s = vmem__reservation_find(c->b.ctx, range->addr);
        for (uint64_t addr = range->addr, end = addr + range->length; addr < end;) {
            int rc = mark_leaf(c, s, &addr, end);
            if (rc)
                return rc;
            yield_lock(c, LEAF_ENTRIES);
        }
    }
    return 0;
}

// Removes the marks. Holes that were filled have none any more: with `filled`, none of them has.
static void unmark(struct commit *c, bool filled)
{
    vmem_context *ctx = c->b.ctx;
    const uint32_t granules = (uint32_t)(c->page_size >> GRANULE_SHIFT);
    for (size_t i = 0; i < c->n_stretches; i++) {
        const struct stretch *t = &c->stretches[i];
        for (uint64_t addr = t->addr; !(t->hole && filled) && addr < t->addr + t->length; addr += c->page_size) {
            struct vmem__leaf *leaf = vmem__leaf_get(t->s, addr);
            uint64_t *entry = vmem__entry_in(t->s, leaf, addr);
            struct vmem__arena_rec *a;
            if (!t->hole) {
                entry_page(ctx, entry, &a)->opid = 0;
            } else if (*entry & ENTRY_COMING) {
                memset(entry, 0, granules * sizeof *entry);
                vmem__leaf_put(ctx, t->s, leaf, addr, granules);
            }
        }
    }
    for (size_t i = 0; i < c->held; i++)
        vmem__reservation_find(ctx, c->ranges[i].addr)->inflight--;
}

// ---- pages --------------------------------------------------------------------------------------------------

// Creates the pages. The caller holds the lock, which this drops.
static int create_pages(struct commit *c, uint32_t flags)
{
    vmem_context *ctx = c->b.ctx;
    vmem__unlock(ctx);
    int rc = 0;
    flags = (flags & VMEM_CREATE_ZERO) | VMEM__CREATE_BOUND;
    if (c->holes > sizeof c->few_pages / sizeof c->few_pages[0]) {
        c->pages = malloc(c->holes * sizeof *c->pages);
        if (!c->pages)
            rc = vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", c->holes);
    }
    if (!rc)
        rc = vmem__create_near(ctx, c->page_size, c->holes, 0, flags, c->pages);
    vmem__lock(ctx);
    c->created = rc ? 0 : c->holes;
    return rc;
}

// Adds the pages after p that continue its run, at most n: created behind it in the same arena, as most are.
static inline size_t continue_build(struct commit *c, const vmem_page *pages, size_t n, const struct vmem__arena_rec *a,
                                    struct vmem__page *p)
{
    const struct vmem__page *const arena_end = a->pages + a->granules;
    const uint32_t granules = p->granules;
    uint64_t frame = vmem__page_frame(a, p);
    size_t i = 0;
    for (; i < n; i++) {
        frame += granules;
        p += granules;
        if (p == arena_end || p->state != GRANULE_PAGE || p->opid || pages[i] != vmem__handle(c->b.ctx, p, frame))
            break;
        p->opid = c->b.opid;
    }
    c->b.runs[c->b.n - 1].length += i * c->page_size;
    return i;
}

// Builds the runs that map the pages at the holes.
static int build_runs(struct commit *c)
{
    size_t next = 0;
    for (size_t i = 0; i < c->n_stretches; i++) {
        const struct stretch *t = &c->stretches[i];
        for (uint64_t done = 0, added; t->hole && done < t->length; done += added) {
            struct vmem__arena_rec *a;
            struct vmem__page *p = vmem__page_get(c->b.ctx, c->pages[next++], &a);
            c->at = t->range;
            if (!p || p->opid) // nobody has the handle, but somebody may have guessed it
                return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call released the page made for it",
                                   t->addr + done);
            int rc = batch_add(&c->b, t->s, t->addr + done, c->page_size, a, (uint64_t)(p - a->pages) * GRANULE, NULL,
                               0, c->page_size, false, t->range);
            if (rc)
                return rc;
            p->opid = c->b.opid;
            const size_t left = (t->length - done) / c->page_size - 1;
            const size_t more = continue_build(c, c->pages + next, left, a, p);
            next += more;
            added = (more + 1) * c->page_size;
            yield_lock(c, more + 1);
        }
    }
    return 0;
}

// ---- ends ---------------------------------------------------------------------------------------------------

// Ends the pages of a commit that has mapped none. The caller holds the lock, which this drops.
static void undo_commit(struct commit *c, int rc)
{
    vmem_context *ctx = c->b.ctx;
    struct vmem__arena_rec *a;
    char text[VMEM__TEXT];
    vmem__keep_error(text);
    unmark(c, false);
    for (size_t i = 0; i < c->created; i++) {
        struct vmem__page *p = vmem__page_get(ctx, c->pages[i], &a);
        if (p && !p->mappings && (!p->opid || p->opid == c->b.opid))
            batch_end_page(&c->b, a, p);
    }
    ctx->undoing += rc == -EINTR;
    vmem__batch_free_ended(&c->b);
    ctx->undoing -= rc == -EINTR;
    if (rc == -EINTR)
        vmem__shrink_later(ctx);
    vmem__error(0, "%s", text);
}

static void finish_commit(struct commit *c)
{
    for (size_t r = 0; r < c->b.n; r++)
        vmem__commit_run(c->b.ctx, &c->b.runs[r]);
    c->b.ctx->map_ops += c->holes;
    c->b.ctx->map_runs += c->b.n;
    unmark(c, true);
}

int vmem_commit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t page_size, uint32_t flags,
                uint64_t *bytes)
{
    if (flags & ~(VMEM_CREATE_ZERO | VMEM_MAP_FINE))
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_CREATE_ZERO and VMEM_MAP_FINE are known", flags);
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    rc = vmem__check_page_size(ctx, page_size);
    if (rc)
        return rc;
    if (n && !ranges)
        return vmem__error(-EINVAL, "ranges is NULL");
    struct commit c;
    uint64_t most;
    c.ranges = ranges;
    c.n = n;
    c.page_size = page_size;
    c.stretches = c.few;
    c.capacity = sizeof c.few / sizeof c.few[0];
    c.pages = c.few_pages;
    c.n_stretches = c.held = c.looks = c.holes = c.created = 0;
    vmem__batch_begin(&c.b, ctx, flags & VMEM_MAP_FINE);
    rc = hold_ranges(&c, &most);
    const bool marks = !rc && n && !all_backed(&c);
    if (marks && (most > MAX_RESERVE || ctx->created + most > ctx->limit))
        rc = check_holes(&c);
    if (marks && !rc)
        rc = mark_ranges(&c);
    if (!rc && c.holes) {
        rc = create_pages(&c, flags);
        if (!rc)
            rc = build_runs(&c);
        if (!rc)
            rc = vmem__batch_run(&c.b, ctx->b.ops->map, &c.at);
    }
    if (rc)
        undo_commit(&c, rc);
    else
        finish_commit(&c);
    vmem__batch_end(&c.b);
    if (rc && c.at < n)
        vmem__batch_fail(rc, "ranges", n, c.at, NULL);
    if (!rc && bytes)
        *bytes = c.holes * page_size;
    if (c.stretches != c.few)
        free(c.stretches);
    if (c.pages != c.few_pages)
        free(c.pages);
    return rc;
}
