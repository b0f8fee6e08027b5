// The creation and end of a vmem_blocks, the begin and end of its calls, and the board that other processes read.
//
// SPDX-License-Identifier: MIT
#include <stdatomic.h>

#include "blocks/blocks.h"

// ---- creation --------------------------------------------------------------------------------------------------

// Each object's fences are numbered from a start of its own, so that a fence of another object is refused, and not
// taken for one that has passed.
#define FENCE_BITS 40
#define FENCE_OBJECTS ((UINT64_C(1) << (64 - FENCE_BITS)) - 1)
static _Atomic uint64_t objects;

// The last byte of a range's blocks; UINT64_MAX if that is no address.
static uint64_t last_byte(const struct vmem_block_range *r, uint32_t blocks)
{
    uint64_t layers, ids, end;
    if (__builtin_mul_overflow(r->layer_stride, r->layers - 1, &layers) ||
        __builtin_mul_overflow(r->block_stride, blocks - 1, &ids) || __builtin_add_overflow(r->addr, layers, &end) ||
        __builtin_add_overflow(end, ids, &end) || __builtin_add_overflow(end, r->bytes - 1, &end))
        return UINT64_MAX;
    return end;
}

// True if n parts of `bytes`, `stride` apart, overlap; *all: the bytes that they extend over.
static bool parts_overlap(uint64_t bytes, uint64_t stride, uint32_t n, uint64_t *all)
{
    return (n > 1 && stride < bytes) || __builtin_mul_overflow(stride, n - 1, all) ||
           __builtin_add_overflow(*all, bytes, all);
}

// True if the parts of blocks overlap. They do not if each block contains its layers, or each layer its blocks.
static bool overlap(const struct vmem_block_range *r, uint32_t blocks)
{
    uint64_t all;
    return (parts_overlap(r->bytes, r->layer_stride, r->layers, &all) ||
            parts_overlap(all, r->block_stride, blocks, &all)) &&
           (parts_overlap(r->bytes, r->block_stride, blocks, &all) ||
            parts_overlap(all, r->layer_stride, r->layers, &all));
}

// The parts of all blocks in one layer of a range.
struct piece {
    uint64_t addr, stride, bytes;
};

// Whether part i of one row shares bytes with a part of the other that is not its i-th; *k: which.
static bool meets_another(const struct piece *a, uint32_t i, const struct piece *b, uint32_t blocks, uint32_t *k)
{
    const uint64_t start = a->addr + i * a->stride, end = start + a->bytes; // of the other row, [lo, hi] reach into it
    if (end <= b->addr)
        return false;
    const uint64_t past = start - b->addr, before = end - 1 - b->addr, stride = b->stride ? b->stride : 1;
    const uint64_t hi = before / stride < blocks - 1 ? before / stride : blocks - 1;
    const uint64_t lo = start < b->addr + b->bytes ? 0 : (past - b->bytes) / stride + 1;
    if (lo > hi)
        return false;
    *k = (uint32_t)(lo == i ? hi : lo);
    return *k != i;
}

// True if two blocks own the same bytes, one by the range r and the other by s. Rows of one stride meet everywhere as they
// do at their ends.
static bool share_bytes(const struct vmem_block_range *r, const struct vmem_block_range *s, uint32_t blocks,
                        uint32_t *one, uint32_t *other)
{
    for (uint32_t i = 0; i < r->layers; i++)
        for (uint32_t k = 0; k < s->layers; k++) {
            const struct piece a = {r->addr + i * r->layer_stride, r->block_stride, r->bytes};
            const struct piece b = {s->addr + k * s->layer_stride, s->block_stride, s->bytes};
            const uint32_t step = a.stride == b.stride && blocks > 1 ? blocks - 1 : 1;
            if (a.addr + (blocks - 1) * a.stride + a.bytes <= b.addr ||
                b.addr + (blocks - 1) * b.stride + b.bytes <= a.addr)
                continue;
            for (uint64_t n = 0; n < blocks; n += step)
                if (meets_another(&a, *one = (uint32_t)n, &b, blocks, other))
                    return true;
        }
    return false;
}

static int check_range(vmem_context *ctx, const struct vmem_blocks_config *cfg, const struct vmem_block_range *r)
{
    if (!r->bytes || !r->layers || r->reserved)
        return vmem__error(-EINVAL, "bytes %" PRIu64 " and layers %u must be at least 1, and reserved must be 0",
                           r->bytes, r->layers);
    const uint64_t last = last_byte(r, cfg->blocks), first = r->addr / cfg->page_size * cfg->page_size;
    if (last == UINT64_MAX)
        return vmem__error(-EINVAL, "its last block ends past the last address");
    if (overlap(r, cfg->blocks))
        return vmem__error(-EINVAL,
                           "block_stride %" PRIu64 " and layer_stride %" PRIu64 ": %u blocks of %u layers, %" PRIu64
                           " bytes each, would overlap",
                           r->block_stride, r->layer_stride, cfg->blocks, r->layers, r->bytes);
    return vmem__check_reserved(ctx, first, last / cfg->page_size * cfg->page_size + cfg->page_size - first);
}

static int check_config(vmem_context *ctx, const struct vmem_blocks_config *cfg)
{
    if (!cfg->ranges || !cfg->n_ranges)
        return vmem__error(-EINVAL, "cfg->ranges must have at least one element");
    if (!cfg->blocks || cfg->blocks & CALL_HOLDS)
        return vmem__error(-EINVAL, "cfg->blocks %u is not between 1 and 2^31 - 1", cfg->blocks);
    int rc = vmem__check_flags(cfg->flags, 0);
    if (!rc)
        rc = vmem__usable_page_size(ctx, cfg->page_size);
    if (!rc && cfg->budget && cfg->budget < cfg->page_size)
        rc = vmem__error(-EINVAL, "cfg->budget %" PRIu64 " is less than a page, %" PRIu64, cfg->budget, cfg->page_size);
    for (uint32_t i = 0; i < cfg->n_ranges && !rc; i++) {
        rc = check_range(ctx, cfg, &cfg->ranges[i]);
        if (rc)
            vmem__error(rc, "cfg->ranges[%u]: %s", i, vmem_last_error());
    }
    for (uint32_t i = 0; i < cfg->n_ranges && !rc; i++)
        for (uint32_t k = 0; k < i && !rc; k++) {
            uint32_t one, other;
            if (last_byte(&cfg->ranges[i], cfg->blocks) < cfg->ranges[k].addr ||
                last_byte(&cfg->ranges[k], cfg->blocks) < cfg->ranges[i].addr)
                continue;
            if (share_bytes(&cfg->ranges[k], &cfg->ranges[i], cfg->blocks, &one, &other))
                rc =
                    vmem__error(-EINVAL, "cfg->ranges[%u]: its block %u would own bytes of block %u in cfg->ranges[%u]",
                                i, other, one, k);
        }
    return rc;
}

static int by_first(const void *a, const void *b)
{
    const struct page_span *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

// Lists the pages of all ranges, each once, and sets each range's `shift`.
static void lay_out(vmem_blocks *b, const struct vmem_blocks_config *cfg)
{
    for (uint32_t i = 0; i < cfg->n_ranges; i++) {
        const uint64_t first = cfg->ranges[i].addr >> b->page_shift;
        b->ranges[i].at = cfg->ranges[i];
        b->spans[i] =
            (struct page_span){first, (last_byte(&cfg->ranges[i], cfg->blocks) >> b->page_shift) - first + 1, 0};
    }
    qsort(b->spans, cfg->n_ranges, sizeof(b->spans[0]), by_first);
    for (uint32_t i = 0; i < cfg->n_ranges; i++) {
        struct page_span *last = b->n_spans ? &b->spans[b->n_spans - 1] : NULL, next = b->spans[i];
        if (last && next.first < last->first + last->pages) {
            const uint64_t end = next.first + next.pages, old = last->first + last->pages;
            last->pages += end > old ? end - old : 0;
        } else {
            b->spans[b->n_spans++] = next;
        }
    }
    for (uint32_t i = 0; i < b->n_spans; i++) {
        b->spans[i].index = b->n_pages;
        b->n_pages += b->spans[i].pages + 1; // a word between, as the next span may begin another reservation
    }
    for (uint32_t i = 0; i < cfg->n_ranges; i++) {
        const uint64_t first = cfg->ranges[i].addr >> b->page_shift;
        uint32_t k = b->n_spans - 1;
        while (b->spans[k].first > first)
            k--;
        b->ranges[i].shift = b->spans[k].index - b->spans[k].first;
    }
}

void vmem__blocks_free(vmem_blocks *b)
{
    for (struct block_call *c; (c = b->orders);) {
        b->orders = c->next;
        free(c);
    }
    for (struct block_call *c; (c = b->unbacks);) {
        b->unbacks = c->next;
        free(c);
    }
    for (struct page_batch *w; (w = b->stuck);) {
        b->stuck = w->next;
        free(w);
    }
    while (b->fences || b->spare) {
        struct fence **at = b->fences ? &b->fences : &b->spare, *f = *at;
        *at = f->next;
        if (f->event)
            vmem__event_free(b->ctx, f->event);
        free(f);
    }
    pthread_cond_destroy(&b->work);
    pthread_cond_destroy(&b->change);
    pthread_mutex_destroy(&b->lock);
    free(b->ranges);
    free(b->spans);
    free(b->blocks);
    free(b->pages);
    free(b);
}

int vmem__blocks_new(vmem_context *ctx, const struct vmem_blocks_config *config, vmem_blocks **out)
{
    struct vmem_blocks_config cfg;
    const unsigned char *owned;
    int rc = vmem__usable(ctx, &owned);
    if (rc)
        return rc;
    if (!config || !out)
        return vmem__error(-EINVAL, "cfg and out must not be NULL");
    rc = vmem__struct_take(&cfg, sizeof cfg, offsetof(struct vmem_blocks_config, board), config, "cfg");
    if (!rc)
        rc = check_config(ctx, &cfg);
    if (rc)
        return rc;
    vmem_blocks *b = calloc(1, sizeof(*b));
    if (!b)
        return vmem__error(-ENOMEM, "no memory for %u blocks", cfg.blocks);
    b->ctx = ctx;
    b->owned = owned;
    b->absent = vmem__absent(ctx);
    b->page_size = cfg.page_size;
    b->page_shift = (uint32_t)__builtin_ctzll(cfg.page_size);
    b->n_blocks = cfg.blocks;
    b->n_ranges = cfg.n_ranges;
    b->budget = cfg.budget ? cfg.budget >> b->page_shift : UINT64_MAX;
    b->shrink_to = UINT64_MAX;
    b->board = cfg.board;
    b->orders_end = &b->orders;
    b->fences_end = &b->fences;
    b->no_fence = b->fence = b->passed = (1 + atomic_fetch_add(&objects, 1) % FENCE_OBJECTS) << FENCE_BITS;
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->work, &steady);
    pthread_cond_init(&b->change, &steady);
    pthread_condattr_destroy(&steady);
    b->ranges = calloc(cfg.n_ranges, sizeof(b->ranges[0]));
    b->spans = calloc(cfg.n_ranges, sizeof(b->spans[0]));
    b->blocks = calloc(cfg.blocks, sizeof(b->blocks[0]));
    if (b->ranges && b->spans) {
        lay_out(b, &cfg);
        b->pages = calloc(b->n_pages, sizeof(b->pages[0]));
    }
    if (!b->blocks || !b->pages)
        rc = vmem__error(-ENOMEM, "no memory for the bookkeeping of %u blocks and %" PRIu64 " pages", cfg.blocks,
                         b->n_pages);
    if (rc)
        vmem__blocks_free(b);
    else
        *out = b;
    return rc;
}

// ---- calls -----------------------------------------------------------------------------------------------------

// Writes the board for other processes. A reader finds each word whole, but not all words of the same moment.
void vmem__blocks_publish(vmem_blocks *b)
{
    struct vmem_blocks_board *board = b->board;
    if (!board)
        return;
    __atomic_store_n(&board->held, b->held << b->page_shift, __ATOMIC_RELAXED);
    __atomic_store_n(&board->most_held, b->stats.most_held << b->page_shift, __ATOMIC_RELAXED);
    __atomic_store_n(&board->backed, b->stats.backed, __ATOMIC_RELAXED);
    __atomic_store_n(&board->leaving, b->stats.leaving, __ATOMIC_RELAXED);
    __atomic_store_n(&board->budget, b->budget == UINT64_MAX ? 0 : b->budget << b->page_shift, __ATOMIC_RELAXED);
    __atomic_store_n(&board->shrink_to, b->shrink_to == UINT64_MAX ? 0 : b->shrink_to << b->page_shift,
                     __ATOMIC_RELAXED);
    __atomic_store_n(&board->refused, b->stats.refused, __ATOMIC_RELAXED);
    __atomic_store_n(&board->done, b->done, __ATOMIC_RELEASE);
}

int vmem__blocks_enter(vmem_blocks *b)
{
    if (!b)
        return vmem__error(-EINVAL, "blocks is NULL");
    if (!*b->owned)
        return vmem__error(-EPERM, "the blocks belong to the process that forked this one");
    pthread_mutex_lock(&b->lock);
    b->calls++;
    return 0;
}

int vmem__blocks_leave(vmem_blocks *b, int rc)
{
    if (!--b->calls)
        pthread_cond_broadcast(&b->change);
    pthread_mutex_unlock(&b->lock);
    return rc;
}
