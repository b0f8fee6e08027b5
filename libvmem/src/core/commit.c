// Committing creates pages that belong to the addresses that they back. A commit first checks that so many pages may
// exist. Then it finds holes in the shadow, a part at a time, and fills them with the public calls. These check again:
// if another call came first, they fail, and the commit undoes everything. Until then, another commit must not treat
// the filled addresses as backed.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

#define PART 4096 // pages per part
// Entries examined before the lock is dropped for other calls.
#define LOOK 65536

// A vector that grows.
struct pages {
    vmem_page *items;
    size_t n, room;
};

// The next place to examine.
struct place {
    size_t range;
    uint64_t done; // bytes of the range before this place
};

static int make_room(struct pages *pages, size_t n)
{
    if (pages->n + n > pages->room) {
        const size_t room = 2 * pages->room > pages->n + n ? 2 * pages->room : pages->n + n;
        vmem_page *items = realloc(pages->items, room * sizeof(*items));
        if (!items)
            return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", room);
        pages->items = items;
        pages->room = room;
    }
    return 0;
}

int vmem__check_range(vmem_context *ctx, const struct vmem_range *range, uint64_t granule)
{
    struct vmem__reservation_rec *s;
    int rc = vmem__reservation_of(ctx, range->addr, range->length, &s);
    if (!rc && (range->addr % granule || range->length % granule))
        rc = vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 "): address and length must be multiples of %" PRIu64,
                         range->addr, range->length, granule);
    return rc;
}

static void enlist(vmem_context *ctx, struct vmem__commit *self)
{
    if (self->listed)
        return;
    self->listed = true;
    self->next = ctx->commits;
    ctx->commits = self;
}

static void delist(vmem_context *ctx, const struct vmem__commit *self)
{
    struct vmem__commit **link = &ctx->commits;
    while (self->listed && *link != self)
        link = &(*link)->next;
    if (self->listed)
        *link = self->next;
}

// Whether another, unfinished commit may have filled the address and may still undo that.
static bool may_go(const vmem_context *ctx, const struct vmem__commit *self, uint64_t addr)
{
    for (const struct vmem__commit *c = ctx->commits; VMEM__UNLIKELY(c); c = c->next) {
        for (size_t i = 0; c != self && i < c->n; i++) {
            if (addr - c->ranges[i].addr < c->ranges[i].length)
                return true;
        }
    }
    return false;
}

// Finds up to `most` unbacked places from *at on. If ops is NULL, they are only counted. Also returns after LOOK
// entries, with *at after the last one. The caller holds the lock.
static int find_holes(vmem_context *ctx, const struct vmem__commit *self, uint64_t page_size, struct place *at,
                      size_t most, size_t *found, struct vmem_map_op *ops)
{
    const size_t n = self->n;
    size_t looks = 0;
    for (; at->range < n; *at = (struct place){.range = at->range + 1}) {
        const struct vmem_range *range = &self->ranges[at->range];
        int rc = vmem__check_range(ctx, range, page_size);
        if (rc)
            return n > 1 ? vmem__error(rc, "ranges[%zu]: %s", at->range, vmem_last_error()) : rc;
        const struct vmem__reservation_rec *s = vmem__reservation_find(ctx, range->addr);
        const uint64_t end = range->addr + range->length;
        for (uint64_t addr = range->addr + at->done; addr < end; addr += page_size, at->done += page_size) {
            if (*found >= most || looks++ == LOOK)
                return 0;
            struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
            uint64_t frame = leaf ? vmem__entry_frame(*vmem__entry_in(s, leaf, addr)) : 0;
            if (!frame) {
                if (ops)
                    ops[*found].addr = addr;
                ++*found;
                continue;
            }
            const struct vmem__page *p = vmem__frame_page(vmem__frame_arena(ctx, frame - 1), frame - 1);
            if (p->doomed || may_go(ctx, self, addr))
                return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call commits or releases there", addr);
            if (p->granules * GRANULE < page_size)
                return vmem__error(-EEXIST, "addr 0x%" PRIx64 " is backed by pages smaller than page_size %" PRIu64,
                                   addr, page_size);
        }
    }
    return 0;
}

// Counts the pages that the call needs. -ENOMEM as soon as they exceed what may exist.
static int count_holes(vmem_context *ctx, const struct vmem__commit *self, uint64_t page_size, size_t *found)
{
    struct place at = {0};
    int rc = 0;
    for (*found = 0; !rc && at.range < self->n;) {
        rc = find_holes(ctx, self, page_size, &at, SIZE_MAX, found, NULL);
        if (!rc && *found)
            rc = vmem__check_room(ctx, page_size, *found);
        if (at.range < self->n) { // give other calls the lock
            vmem__unlock(ctx);
            vmem__lock(ctx);
        }
    }
    return rc;
}

// Fills up to `most` of the next holes. *filled is their number.
static int fill(vmem_context *ctx, struct vmem__commit *self, uint64_t page_size, uint32_t create_flags,
                struct place *at, struct vmem_map_op *ops, size_t most, struct pages *pages, size_t *filled)
{
    *filled = 0;
    vmem__lock(ctx);
    int rc = find_holes(ctx, self, page_size, at, most, filled, ops);
    if (!rc && *filled && at->range < self->n)
        enlist(ctx, self);
    vmem__unlock(ctx);
    if (!rc && *filled)
        rc = make_room(pages, *filled);
    if (rc || !*filled)
        return rc;
    vmem_page *part = pages->items + pages->n;
    const uint32_t flags = create_flags | VMEM__CREATE_BOUND;
    rc = vmem__create_near(ctx, page_size, *filled, pages->n ? part[-1] : 0, flags, part);
    if (rc)
        return rc;
    pages->n += *filled;
    for (size_t i = 0; i < *filled; i++)
        ops[i].page = part[i];
    return vMemMapBatch(ctx, ops, *filled, 0, NULL);
}

static void undo(vmem_context *ctx, const struct pages *pages, int rc)
{
    vmem__lock(ctx);
    ctx->undoing += rc == -EINTR;
    vmem__unlock(ctx);
    vmem_drop(ctx, pages->items, pages->n);
    vmem__lock(ctx);
    ctx->undoing -= rc == -EINTR;
    if (rc == -EINTR)
        vmem__shrink_later(ctx);
    vmem__unlock(ctx);
}

int vmem_commit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t page_size, uint32_t create_flags,
                uint64_t *bytes)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    rc = vmem__check_page_size(ctx, page_size);
    if (rc)
        return rc;
    if (n && !ranges)
        return vmem__error(-EINVAL, "ranges is NULL");
    if (create_flags & ~VMEM_CREATE_ZERO)
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_CREATE_ZERO is known", create_flags);

    struct vmem_map_op few[16], *ops = few;
    size_t most = sizeof(few) / sizeof(few[0]);
    struct pages pages = {0};
    struct place at = {0};
    size_t holes, filled, since = 0;
    struct vmem__commit self = {.ranges = ranges, .n = n};
    vmem__begin(ctx);
    rc = count_holes(ctx, &self, page_size, &holes);
    vmem__unlock(ctx);
    if (!rc && holes > most) {
        most = PART;
        ops = malloc(most * sizeof(*ops));
        rc = ops ? 0 : vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", holes);
    }
    while (!rc && holes && at.range < n) {
        rc = fill(ctx, &self, page_size, create_flags, &at, ops, most, &pages, &filled);
        since += filled * page_size;
        if (!rc && since >= VMEM__PORTION && at.range < n) {
            rc = vmem__interrupted(&ctx->b);
            since = 0;
        }
    }
    if (rc && pages.n)
        undo(ctx, &pages, rc);
    vmem__lock(ctx);
    delist(ctx, &self);
    vmem__end(ctx);
    if (!rc && bytes)
        *bytes = pages.n * page_size;
    if (ops != few)
        free(ops);
    free(pages.items);
    return rc;
}
