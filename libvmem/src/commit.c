// Committing: pages that belong to the addresses they back. Built on the public calls alone.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdlib.h>

#include "backend.h"

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

static int check_range(const struct vmem_range *range, size_t i, uint64_t unit)
{
    if (range->addr % unit || range->length % unit || range->addr + range->length < range->addr)
        return vmem__error(-EINVAL, "ranges[%zu]: addr %#llx and length %#llx must be multiples of %llu", i,
                           (unsigned long long)range->addr, (unsigned long long)range->length,
                           (unsigned long long)unit);
    return 0;
}

// Appends what is unbacked in the range.
static int find_holes(vmem_context *ctx, const struct vmem_range *range, uint64_t page_size, struct list *ops)
{
    for (uint64_t addr = range->addr; addr < range->addr + range->length; addr += page_size) {
        vmem_page page;
        int rc = vmem_query(ctx, addr, &page, NULL);
        if (rc)
            return rc;
        if (!page) {
            struct vmem_map_op *op = append(ops, sizeof(*op));
            if (!op)
                return vmem__error(-ENOMEM, "no memory for a list of %zu pages", ops->n + 1);
            op->addr = addr;
            continue;
        }
        struct vmem_page_info info;
        rc = vmem_page_query(ctx, page, &info);
        if (rc)
            return rc;
        if (info.page_size < page_size)
            return vmem__error(-EEXIST, "address %#llx is backed by pages smaller than page_size %llu",
                               (unsigned long long)addr, (unsigned long long)page_size);
    }
    return 0;
}

static int commit(vmem_context *ctx, struct list *list, uint64_t page_size, uint32_t create_flags)
{
    struct vmem_map_op *ops = list->items;
    vmem_page *pages = malloc(list->n * sizeof(*pages));
    if (!pages)
        return vmem__error(-ENOMEM, "no memory for a list of %zu pages", list->n);
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
    if (!page_size)
        return vmem__error(-EINVAL, "page_size must not be 0");
    struct list ops = {0};
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = check_range(&ranges[i], i, page_size);
        if (!rc)
            rc = find_holes(ctx, &ranges[i], page_size, &ops);
    }
    if (!rc && ops.n)
        rc = commit(ctx, &ops, page_size, create_flags);
    if (!rc && bytes)
        *bytes = ops.n * page_size;
    free(ops.items);
    return rc;
}

// Appends the pages mapped in the range.
static int find_pages(vmem_context *ctx, const struct vmem_range *range, struct list *pages, uint64_t *bytes)
{
    uint64_t step;
    for (uint64_t addr = range->addr, end = addr + range->length; addr < end; addr += step) {
        vmem_page page;
        uint64_t offset;
        int rc = vmem_query(ctx, addr, &page, &offset);
        if (rc)
            return rc;
        step = VMEM_PAGE_64K;
        if (!page)
            continue;
        struct vmem_page_info info;
        rc = vmem_page_query(ctx, page, &info);
        if (rc)
            return rc;
        step = info.page_size;
        if (offset || step > end - addr)
            return vmem__error(-EINVAL, "the range cuts the page of %llu bytes at address %#llx",
                               (unsigned long long)step, (unsigned long long)(addr - offset));
        vmem_page *item = append(pages, sizeof(*item));
        if (!item)
            return vmem__error(-ENOMEM, "no memory for a list of %zu pages", pages->n + 1);
        *item = page;
        *bytes += step;
    }
    return 0;
}

int vmem_decommit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t *bytes)
{
    struct list pages = {0};
    uint64_t found = 0;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = check_range(&ranges[i], i, VMEM_PAGE_64K);
        if (!rc)
            rc = find_pages(ctx, &ranges[i], &pages, &found);
    }
    if (!rc && pages.n)
        rc = vMemReleaseBatch(ctx, pages.items, pages.n, NULL);
    if (!rc && bytes)
        *bytes = found;
    free(pages.items);
    return rc;
}
