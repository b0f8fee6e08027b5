// Backing and unbacking: finds the pages of a call's blocks, and maps and unmaps them by calls of core.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"

// ---- the pages of a call ----------------------------------------------------------------------------------------

// Walks over the pages of a call's blocks, range by range and layer by layer, so that pages of consecutive blocks
// follow each other.
struct page_iter {
    const struct block_call *c;
    uint32_t range, layer, id;
    uint64_t page, end; // indices in vmem_blocks.pages: the rest of one block's part in one layer
    uint32_t looks;     // pages since the lock was last dropped
};

static bool next_part(const vmem_blocks *b, struct page_iter *w)
{
    if (w->id == w->c->n) {
        w->id = 0;
        w->layer++;
    }
    if (w->range < b->n_ranges && w->layer == b->ranges[w->range].at.layers) {
        w->layer = 0;
        w->range++;
    }
    if (w->range == b->n_ranges || !w->c->n)
        return false;
    const struct range *r = &b->ranges[w->range];
    const uint64_t block = w->c->ids[w->id++] & ~CALL_HOLDS;
    const uint64_t addr = r->at.addr + w->layer * r->at.layer_stride + block * r->at.block_stride;
    w->page = (addr >> b->page_shift) + r->shift;
    w->end = ((addr + r->at.bytes - 1) >> b->page_shift) + r->shift + 1;
    return true;
}

// Returns the next page's word; NULL after the last. Drops the lock for a moment every BLOCKS_LOOK pages.
static uint32_t *next_page(vmem_blocks *b, struct page_iter *w)
{
    if (w->page == w->end && !next_part(b, w))
        return NULL;
    if (++w->looks == BLOCKS_LOOK) {
        w->looks = 0;
        pthread_mutex_unlock(&b->lock);
        pthread_mutex_lock(&b->lock);
    }
    return &b->pages[w->page++];
}

// Makes a batch with room for every page of n blocks. Without the lock.
static int batch_new(const vmem_blocks *b, uint64_t n, struct page_batch **out)
{
    uint64_t cap = 0;
    for (uint32_t i = 0; i < b->n_ranges && cap < b->n_pages; i++) {
        const struct vmem_block_range *r = &b->ranges[i].at;
        const uint64_t parts = n * r->layers, most = (r->bytes >> b->page_shift) + 2;
        cap = parts > b->n_pages || most > b->n_pages ? b->n_pages : cap + parts * most;
    }
    cap = cap < b->n_pages ? cap : b->n_pages;
    struct page_batch *w = malloc(sizeof(*w) + cap * sizeof(w->pages[0]));
    if (!w)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %" PRIu64 " pages", cap);
    *w = (struct page_batch){.pages = (uint64_t *)(w + 1)};
    *out = w;
    return 0;
}

static void batch_add(const vmem_blocks *b, struct page_batch *w, uint32_t *page)
{
    *page |= PAGE_BUSY;
    w->pages[w->n++] = (uint64_t)(page - b->pages);
}

static int by_index(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void sort_batch(struct page_batch *w)
{
    for (uint64_t i = 1; i < w->n; i++)
        if (w->pages[i] < w->pages[i - 1]) {
            qsort(w->pages, w->n, sizeof(w->pages[0]), by_index);
            return;
        }
}

static uint64_t addr_of(const vmem_blocks *b, uint64_t page)
{
    uint32_t lo = 0, hi = b->n_spans;
    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;
        *(b->spans[mid].index <= page ? &lo : &hi) = mid;
    }
    return (b->spans[lo].first + page - b->spans[lo].index) << b->page_shift;
}

// ---- mapping and unmapping, without the lock --------------------------------------------------------------------

// Unmaps pages in order. *done: how many are unmapped.
static int unmap_pages(vmem_blocks *b, const uint64_t *pages, uint64_t n, uint64_t *done)
{
    struct vmem_range ops[256];
    uint64_t i = 0;
    int rc = 0;
    while (i < n && !rc) {
        uint32_t n_ops = 0;
        *done = i;
        for (; i < n; i++) {
            if (n_ops && pages[i] == pages[i - 1] + 1)
                ops[n_ops - 1].length += b->page_size;
            else if (n_ops == sizeof(ops) / sizeof(ops[0]))
                break;
            else
                ops[n_ops++] = (struct vmem_range){addr_of(b, pages[i]), b->page_size};
        }
        rc = vMemUnmapBatch(b->ctx, ops, n_ops, NULL);
    }
    *done = rc ? *done : n;
    return rc;
}

// Creates pages and maps them, all or none; unmapping them releases them. *refused: the device has no memory for them.
static int map_pages(vmem_blocks *b, const uint64_t *pages, uint64_t n, bool *refused)
{
    const uint64_t most = n < BLOCKS_PART ? n : BLOCKS_PART;
    vmem_page *handles = malloc(n * sizeof(*handles));
    struct vmem_map_op *ops = malloc(most * sizeof(*ops));
    int rc = handles && ops ? 0 : vmem__error(-ENOMEM, "no memory for bookkeeping of %" PRIu64 " pages", n);
    if (!rc)
        rc = vmem__create_near(b->ctx, b->page_size, n, 0, VMEM__CREATE_BOUND | VMEM_CREATE_ZERO, handles);
    const bool created = !rc;
    *refused = rc == -ENOMEM && handles && ops;
    for (uint64_t at = 0, part; !rc && at < n; at += part) {
        part = n - at < most ? n - at : most;
        for (uint64_t i = 0; i < part; i++)
            ops[i] = (struct vmem_map_op){addr_of(b, pages[at + i]), handles[at + i]};
        rc = vMemMapBatch(b->ctx, ops, part, VMEM_MAP_FINE, NULL);
    }
    if (rc && created) {
        char why[VMEM__TEXT];
        vmem__keep_error(why);
        vmem_drop(b->ctx, handles, n);
        vmem__error(rc, "%s", why);
    }
    free(handles);
    free(ops);
    return rc;
}

// ---- with the lock ----------------------------------------------------------------------------------------------

// Marks pages as no longer busy.
static void end_busy(vmem_blocks *b, const uint64_t *pages, uint64_t n, bool mapped)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t *page = &b->pages[pages[i]];
        *page = (*page & PAGE_COUNT) | (mapped ? PAGE_MAPPED : 0);
        if (i % BLOCKS_LOOK == BLOCKS_LOOK - 1) {
            pthread_mutex_unlock(&b->lock);
            pthread_mutex_lock(&b->lock);
        }
    }
    b->held -= mapped ? 0 : n;
    pthread_cond_broadcast(&b->change);
}

// Unmaps the pages of a batch, which are busy. A batch of pages that cannot be unmapped now goes to b->stuck; otherwise
// it is freed.
static void unmap_batch(vmem_blocks *b, struct page_batch *w)
{
    uint64_t kept = 0;
    for (uint64_t at = 0, part, done; at < w->n; at += part) {
        part = w->n - at < BLOCKS_PART ? w->n - at : BLOCKS_PART;
        pthread_mutex_unlock(&b->lock);
        if (!at)
            sort_batch(w);
        const int rc = unmap_pages(b, w->pages + at, part, &done);
        pthread_mutex_lock(&b->lock);
        end_busy(b, w->pages + at, done, false);
        end_busy(b, w->pages + at + done, part - done, true);
        b->stats.unmapped_pages += done;
        b->stats.failed_unmaps += rc != 0;
        memmove(w->pages + kept, w->pages + at + done, (part - done) * sizeof(w->pages[0]));
        kept += part - done;
    }
    w->n = kept;
    w->next = b->stuck;
    if (kept)
        b->stuck = w;
    else
        free(w);
}

static bool unused(uint32_t page) { return page == PAGE_MAPPED; } // no count, and not busy

// Lowers the counts of the pages of a call's blocks, and unmaps pages that no block needs any more. Frees the batch.
static void drop_counts(vmem_blocks *b, const struct block_call *c, struct page_batch *work)
{
    struct page_iter w = {.c = c};
    work->n = 0;
    for (uint32_t *page; (page = next_page(b, &w));) {
        --*page;
        if (unused(*page))
            batch_add(b, work, page);
    }
    unmap_batch(b, work);
}

void vmem__blocks_retry_unmaps(vmem_blocks *b)
{
    struct page_batch *w = b->stuck, *next;
    for (b->stuck = NULL; w; w = next) {
        uint64_t n = 0;
        next = w->next;
        for (uint64_t i = 0; i < w->n; i++)
            if (unused(b->pages[w->pages[i]])) {
                b->pages[w->pages[i]] |= PAGE_BUSY;
                w->pages[n++] = w->pages[i];
            }
        w->n = n;
        unmap_batch(b, w);
    }
}

// Maps the pages of a batch, which are busy, all or none. They are no longer busy afterwards.
static int map_batch(vmem_blocks *b, struct block_call *c, struct page_batch *w)
{
    if (!w->n)
        return 0;
    b->held += w->n;
    int rc = 0;
    bool refused = false;
    const bool over = c->flags & VMEM_BLOCKS_OVER;
    if (b->member && b->held > b->budget)
        vmem__blocks_claim(b, over ? b->held - b->budget : 0, b->held - b->budget);
    if (b->held > b->shrink_to)
        vmem__blocks_lapse(b);
    c->missing_pages = b->held > b->budget && b->held <= b->shrink_to ? b->held - b->budget : 0;
    if (b->held > (b->budget < b->shrink_to ? b->budget : b->shrink_to) && !over)
        rc = vmem__error(-ENOMEM, "%" PRIu64 " pages more exceed the budget of %" PRIu64 ": %" PRIu64 " are held", w->n,
                         b->budget, b->held - w->n);
    if (!rc) {
        pthread_mutex_unlock(&b->lock);
        sort_batch(w);
        rc = map_pages(b, w->pages, w->n, &refused);
        pthread_mutex_lock(&b->lock);
    }
    end_busy(b, w->pages, w->n, !rc);
    if (refused && b->member && !over) {
        char why[VMEM__TEXT];
        vmem__keep_error(why);
        b->budget = vmem__pool_refused(b->member, b->budget, b->held);
        c->missing_pages = sat_sub(b->held + w->n, b->budget);
        vmem__error(rc, "%s", why);
    }
    b->stats.most_held = !rc && b->held > b->stats.most_held ? b->held : b->stats.most_held;
    w->n = 0;
    return rc;
}

// Maps the pages of the call's blocks that are still not mapped; their counts are raised already. A page that another
// call keeps busy may turn out mapped or unmapped, so this looks until it finds none of these. It waits for another
// call only while it keeps no page busy itself.
static int map_rest(vmem_blocks *b, struct block_call *c, struct page_batch *work)
{
    for (;;) {
        struct page_iter w = {.c = c};
        uint32_t *page;
        while ((page = next_page(b, &w))) {
            while (*page & PAGE_BUSY && !work->n)
                pthread_cond_wait(&b->change, &b->lock);
            if (*page & PAGE_BUSY)
                break;
            if (!(*page & PAGE_MAPPED))
                batch_add(b, work, page);
        }
        if (!work->n)
            return 0;
        const int rc = map_batch(b, c, work);
        if (rc)
            return rc;
    }
}

// An error if kernels could access blocks that a failed unmap left without their pages. Without the lock.
static int check_pages(const vmem_blocks *b)
{
    int rc = 0;
    for (const struct page_span *s = b->spans; s < b->spans + b->n_spans && !rc && *b->absent; s++)
        rc = vmem__check_present(b->ctx, s->first << b->page_shift, s->pages << b->page_shift);
    return rc;
}

static bool wanted(const vmem_blocks *b, const struct block_call *c, uint32_t id)
{
    return b->blocks[id].state == BLOCK_UNBACKED && b->blocks[id].last_unback < c->number;
}

static bool any_backing(const vmem_blocks *b, const struct block_call *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (b->blocks[c->ids[i] & ~CALL_HOLDS].state == BLOCK_BACKING)
            return true;
    return false;
}

static void wait_for_backing(vmem_blocks *b, const struct block_call *c)
{
    while (any_backing(b, c))
        pthread_cond_wait(&b->change, &b->lock);
}

// Attempts once to back the call's blocks. todo: a call with room for the ids of those that are not backed.
static int back_missing(vmem_blocks *b, const struct block_call *c, struct block_call *todo, struct page_batch **work)
{
    wait_for_backing(b, c);
    todo->n = 0;
    todo->missing_pages = 0;
    todo->seq = c->seq;
    todo->flags = c->flags;
    for (uint32_t i = 0; i < c->n; i++) {
        const uint32_t id = c->ids[i] & ~CALL_HOLDS;
        if (wanted(b, c, id)) {
            b->blocks[id].state = BLOCK_BACKING;
            todo->ids[todo->n++] = id;
        }
    }
    if (!todo->n)
        return 0;
    bool others = false;
    struct page_iter w = {.c = todo};
    for (uint32_t *page; (page = next_page(b, &w));) {
        ++*page;
        if (*page & PAGE_BUSY)
            others = true; // another call keeps the page busy, or this one does for another block
        else if (!(*page & PAGE_MAPPED))
            batch_add(b, *work, page);
    }
    int rc = map_batch(b, todo, *work);
    if (!rc && others)
        rc = map_rest(b, todo, *work);
    if (!rc && *b->absent) { // an unmap of these pages may have failed since they were checked, before they had counts
        pthread_mutex_unlock(&b->lock);
        rc = check_pages(b);
        pthread_mutex_lock(&b->lock);
    }
    for (uint32_t i = 0; i < todo->n; i++) {
        struct block *block = &b->blocks[todo->ids[i]];
        block->state = rc ? BLOCK_UNBACKED : BLOCK_BACKED;
        b->stats.backed += !rc;
        b->stats.leaving -= rc && block->pending_unback;
        block->pending_unback = rc ? 0 : block->pending_unback;
        block->fence_passed &= !rc;
    }
    pthread_cond_broadcast(&b->change);
    if (rc) {
        drop_counts(b, todo, *work);
        *work = NULL;
    }
    return rc;
}

int vmem__blocks_back(vmem_blocks *b, struct block_call *c)
{
    struct block_call *todo = NULL;
    uint64_t until = 0;
    int rc;
    for (;;) {
        struct page_batch *work = NULL;
        pthread_mutex_unlock(&b->lock);
        rc = check_pages(b);
        if (!rc && !todo && !(todo = calloc(1, sizeof(*todo) + c->n * sizeof(todo->ids[0]))))
            rc = vmem__error(-ENOMEM, "no memory for bookkeeping of %u blocks", c->n);
        if (!rc)
            rc = batch_new(b, c->n, &work);
        pthread_mutex_lock(&b->lock);
        if (!rc)
            rc = back_missing(b, c, todo, &work);
        free(work);
        if (rc != -ENOMEM)
            break;
        // Retry after pending unbacks: they may free enough pages.
        if (b->unbacking)
            while (b->unbacking)
                pthread_cond_wait(&b->change, &b->lock);
        else if (!vmem__blocks_unback_due(b) &&
                 !(c->seq && vmem__blocks_await_budget(b, todo ? todo->missing_pages : 0, &until)))
            break;
    }
    free(todo);
    return rc;
}

bool vmem__blocks_unback_due(vmem_blocks *b)
{
    struct block_call *c = b->unbacks;
    struct page_batch *work;
    if (!c || c->fence > b->passed)
        return false;
    b->unbacks = c->next;
    b->unbacking++;
    pthread_mutex_unlock(&b->lock);
    int rc = batch_new(b, c->n, &work);
    pthread_mutex_lock(&b->lock);
    if (rc) {
        vmem__blocks_queue_unback(b, c);
    } else {
        uint32_t n = 0;
        wait_for_backing(b, c);
        for (uint32_t i = 0; i < c->n; i++) {
            struct block *block = &b->blocks[c->ids[i]];
            if (block->pending_unback != c->number)
                continue;
            if (block->num_holders) {
                block->fence_passed = true;
                continue;
            }
            block->state = BLOCK_UNBACKED;
            block->pending_unback = 0;
            c->ids[n++] = c->ids[i];
        }
        c->n = n;
        b->stats.backed -= n;
        b->stats.leaving -= n;
        drop_counts(b, c, work);
        free(c);
    }
    b->unbacking--;
    pthread_cond_broadcast(&b->change);
    vmem__pool_wake(b->member);
    return !rc;
}

// Unmaps pages, which releases them. What the driver refuses, the context unmaps once the driver has unmapped something
// else.
static void unmap_or_drop(vmem_blocks *b, const struct vmem_range *op)
{
    if (!op->length || !vMemUnmap(b->ctx, op->addr, op->length))
        return;
    for (uint64_t addr = op->addr; addr < op->addr + op->length; addr += b->page_size) {
        vmem_page page = 0;
        vmem_query(b->ctx, addr, &page, NULL); // an error: it is absent, and mapped all the same
        if (page)
            vmem_drop(b->ctx, &page, 1);
    }
}

void vmem__blocks_unmap_all(vmem_blocks *b)
{
    struct vmem_range op = {0};
    for (uint64_t i = 0, last = 0; i < b->n_pages; i++) {
        if (!(b->pages[i] & PAGE_MAPPED))
            continue;
        if (op.length && i == last + 1 && op.length < BLOCKS_PART * b->page_size) {
            op.length += b->page_size;
        } else {
            unmap_or_drop(b, &op);
            op = (struct vmem_range){addr_of(b, i), b->page_size};
        }
        last = i;
    }
    unmap_or_drop(b, &op);
}
