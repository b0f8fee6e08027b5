// Committing: pages that belong to the addresses they back. Finds what to do in the shadow, and does it by the public
// calls, which check again: a call that got in between makes them fail, and nothing is lost.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

// A vector that grows. Of map ops in a commit, of pages in a decommit.
struct list {
    void *items;
    size_t n, room;
};

static void *append(struct list *list, size_t item_size)
{
    if (list->n == list->room) {
        size_t room = list->room ? 2 * list->room : 64;
        void *items = realloc(list->items, room * item_size);
        if (!items)
            return NULL;
        list->items = items;
        list->room = room;
    }
    return (char *)list->items + item_size * list->n++;
}

// With the lock held.
static int check_range(vmem_context *ctx, const struct vmem_range *range, size_t i, uint64_t unit)
{
    const struct vmem__space *s = vmem__space_find(ctx, range->addr);
    if (!s || range->length > s->b.addr + s->b.length - range->addr)
        return vmem__error(-EINVAL, "ranges[%zu]: [0x%" PRIx64 ", +%" PRIu64 ") is not inside one reservation", i,
                           range->addr, range->length);
    if (range->addr % unit || range->length % unit)
        return vmem__error(-EINVAL, "ranges[%zu]: [0x%" PRIx64 ", +%" PRIu64 "): address and length must be multiples "
                           "of %" PRIu64, i, range->addr, range->length, unit);
    return 0;
}

// Appends what is unbacked in the range. With the lock held.
static int find_holes(vmem_context *ctx, const struct vmem_range *range, uint64_t page_size, struct list *ops)
{
    const struct vmem__space *s = vmem__space_find(ctx, range->addr);
    for (uint64_t addr = range->addr; addr < range->addr + range->length; addr += page_size) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        uint64_t frame = leaf ? vmem__slot_frame(*vmem__slot_in(s, leaf, addr)) : 0;
        if (!frame) {
            struct vmem_map_op *op = append(ops, sizeof(*op));
            if (!op)
                return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", ops->n + 1);
            op->addr = addr;
        } else if (vmem__frame_page(vmem__frame_arena(ctx, frame - 1), frame - 1)->units * UNIT < page_size) {
            return vmem__error(-EEXIST, "addr 0x%" PRIx64 " is backed by pages smaller than page_size %" PRIu64, addr,
                               page_size);
        }
    }
    return 0;
}

static int commit(vmem_context *ctx, struct list *list, uint64_t page_size, uint32_t create_flags)
{
    struct vmem_map_op *ops = list->items;
    vmem_page *pages = malloc(list->n * sizeof(*pages));
    if (!pages)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", list->n);
    int rc = vMemCreate(ctx, page_size, list->n, create_flags, pages);
    if (!rc) {
        for (size_t i = 0; i < list->n; i++)
            ops[i].page = pages[i];
        rc = vMemMapBatch(ctx, ops, list->n, 0, NULL);
        if (rc)
            vMemReleaseBatch(ctx, pages, list->n, NULL);
    }
    free(pages);
    return rc;
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
    struct list ops = {0};
    vmem__lock(ctx);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = check_range(ctx, &ranges[i], i, page_size);
        if (!rc)
            rc = find_holes(ctx, &ranges[i], page_size, &ops);
    }
    vmem__unlock(ctx);
    if (!rc && ops.n)
        rc = commit(ctx, &ops, page_size, create_flags);
    if (!rc && bytes)
        *bytes = ops.n * page_size;
    free(ops.items);
    return rc;
}

// Appends the pages mapped in the range. With the lock held.
static int find_pages(vmem_context *ctx, const struct vmem_range *range, struct list *pages, uint64_t *bytes)
{
    const struct vmem__space *s = vmem__space_find(ctx, range->addr);
    uint64_t step;
    for (uint64_t addr = range->addr, end = addr + range->length; addr < end; addr += step) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        uint64_t frame = leaf ? vmem__slot_frame(*vmem__slot_in(s, leaf, addr)) : 0;
        step = leaf ? UNIT : UNIT * LEAF_SLOTS - (addr - s->b.addr) % (UNIT * LEAF_SLOTS);
        if (!frame)
            continue;
        const struct vmem__arena_rec *arena = vmem__frame_arena(ctx, frame - 1);
        const struct vmem__page *page = vmem__frame_page(arena, frame - 1);
        step = page->units * UNIT;
        if (vmem__page_frame(arena, page) != frame - 1 || step > end - addr)
            return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 ") cuts the page of %" PRIu64 " bytes at 0x%"
                               PRIx64, range->addr, range->length, step, addr);
        vmem_page *item = append(pages, sizeof(*item));
        if (!item)
            return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", pages->n + 1);
        *item = (uint64_t)page->generation << FRAME_BITS | (frame - 1);
        *bytes += step;
    }
    return 0;
}

int vmem_decommit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t *bytes)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !ranges)
        return vmem__error(-EINVAL, "ranges is NULL");
    struct list pages = {0};
    uint64_t found = 0;
    vmem__lock(ctx);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = check_range(ctx, &ranges[i], i, UNIT);
        if (!rc)
            rc = find_pages(ctx, &ranges[i], &pages, &found);
    }
    vmem__unlock(ctx);
    if (!rc && pages.n)
        rc = vMemReleaseBatch(ctx, pages.items, pages.n, NULL);
    if (!rc && bytes)
        *bytes = found;
    free(pages.items);
    return rc;
}
