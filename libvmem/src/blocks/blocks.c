// The public calls of vmem_blocks.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"

// ---- life ------------------------------------------------------------------------------------------------------

#define LARGEST_ARENA (UINT64_C(32) << 20)

// Bytes of an arena. Device memory goes back an arena at a time, and blocks are unbacked in no order of their addresses. So
// arenas are small: 2 MiB, or what a block that shares no page takes, by fewer calls of the driver, as it goes back whole.
static uint64_t arena_of(const struct vmem_blocks_config *c)
{
    const struct vmem_block_range *r = c->ranges;
    const bool dense = r->bytes * r->layers == r->block_stride && (r->layers == 1 || r->layer_stride == r->bytes);
    const bool alone = c->n_ranges == 1 && dense && (r->addr | r->block_stride) % VMEM_PAGE_2M == 0;
    const uint64_t size = r->block_stride | LARGEST_ARENA;
    return alone ? size & -size : VMEM_PAGE_2M; // a power of two, so that blocks of 6 MiB get arenas of 2
}

int vmem_blocks_create(vmem_context *ctx, const struct vmem_blocks_config *config, vmem_blocks **out)
{
    vmem_blocks *b;
    int rc = vmem__blocks_new(ctx, config, out ? &b : NULL);
    if (rc)
        return rc;
    rc = vmem__thread_start(&b->thread, vmem__blocks_work, b);
    if (rc) {
        vmem__blocks_free(b);
        return vmem__error(-rc, "no thread for the blocks: %s", strerror(rc));
    }
    vmem__limit_arenas(ctx, arena_of(config), true);
    vmem__blocks_publish(b);
    *out = b;
    return 0;
}

void vmem_blocks_destroy(vmem_blocks *b)
{
    if (!b || !*b->owned)
        return;
    char text[VMEM__TEXT];
    vmem__keep_error(text);
    pthread_mutex_lock(&b->lock);
    while (b->calls)
        pthread_cond_wait(&b->change, &b->lock);
    b->stop = true;
    pthread_cond_signal(&b->work);
    pthread_mutex_unlock(&b->lock);
    pthread_join(b->thread, NULL);
    vmem__pool_leave(b->member, b->held);
    vmem__blocks_unmap_all(b);
    if (b->member)
        vmem__trim_unused(b->ctx, false);
    vmem__pool_left(b->member);
    b->held = b->stats.backed = b->stats.leaving = 0;
    vmem__blocks_publish(b);
    vmem__blocks_free(b);
    vmem__error(0, "%s", text);
}

// ---- calls ------------------------------------------------------------------------------------------------------

static int check_ids(const vmem_blocks *b, const uint32_t *ids, uint32_t n)
{
    if (n && !ids)
        return vmem__error(-EINVAL, "ids is NULL");
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] >= b->n_blocks)
            return vmem__error(-EINVAL, "ids[%u]: block %u is out of range: there are %u blocks", i, ids[i],
                               b->n_blocks);
    return 0;
}

// Makes a call that names these blocks.
static int call_new(const vmem_blocks *b, const uint32_t *ids, uint32_t n, struct block_call **out)
{
    int rc = check_ids(b, ids, n);
    if (rc)
        return rc;
    struct block_call *c = malloc(sizeof(*c) + n * sizeof(ids[0]));
    if (!c)
        return vmem__error(-ENOMEM, "no memory for a call that names %u blocks", n);
    *c = (struct block_call){.n = n};
    if (n)
        memcpy(c->ids, ids, n * sizeof(ids[0]));
    vmem__blocks_sort(c);
    *out = c;
    return 0;
}

// Numbers a call that backs blocks. Returns how many of them are not backed.
static uint32_t number_call(vmem_blocks *b, struct block_call *c)
{
    uint32_t missing = 0;
    c->number = ++b->number;
    b->idle = false;
    for (uint32_t i = 0; i < c->n; i++) {
        struct block *block = &b->blocks[c->ids[i]];
        missing += block->state != BLOCK_BACKED;
        if (!block->pending_unback)
            continue;
        block->num_holders++;
        c->ids[i] |= CALL_HOLDS;
    }
    return missing;
}

// Begins a public call with a list of blocks.
static int enter_with(vmem_blocks *b, const uint32_t *ids, uint32_t n, struct block_call **c)
{
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    pthread_mutex_unlock(&b->lock); // `calls` keeps the object
    rc = call_new(b, ids, n, c);
    pthread_mutex_lock(&b->lock);
    return rc ? vmem__blocks_leave(b, rc) : 0;
}

int vmem_blocks_back(vmem_blocks *b, const uint32_t *ids, uint32_t n, uint32_t flags, uint32_t *fresh)
{
    struct block_call *c;
    if (flags & ~VMEM_BLOCKS_OVER)
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_BLOCKS_OVER is known", flags);
    int rc = enter_with(b, ids, n, &c);
    if (rc)
        return rc;
    c->flags = flags;
    const uint32_t missing = number_call(b, c);
    if (missing || *b->absent)
        rc = vmem__blocks_back(b, c);
    vmem__blocks_end_call(b, c, rc);
    if (!rc && fresh)
        *fresh = missing;
    vmem__blocks_publish(b);
    return vmem__blocks_leave(b, rc);
}

int vmem_blocks_order(vmem_blocks *b, const uint32_t *ids, uint32_t n, uint64_t *seq)
{
    struct block_call *c;
    if (!seq)
        return vmem__error(-EINVAL, "seq is NULL");
    int rc = enter_with(b, ids, n, &c);
    if (rc)
        return rc;
    *seq = c->seq = ++b->seq;
    number_call(b, c);
    *b->orders_end = c;
    b->orders_end = &c->next;
    pthread_cond_signal(&b->work);
    return vmem__blocks_leave(b, 0);
}

static bool is_fence(const vmem_blocks *b, uint64_t fence) { return fence > b->no_fence && fence <= b->fence; }

static int no_such_fence(const vmem_blocks *b, uint64_t fence)
{
    if (b->fence == b->no_fence)
        return vmem__error(-EINVAL, "fence %" PRIu64 ": these blocks have made none", fence);
    return vmem__error(-EINVAL, "fence %" PRIu64 ": these blocks have made %" PRIu64 " to %" PRIu64, fence,
                       b->no_fence + 1, b->fence);
}

int vmem_blocks_unback(vmem_blocks *b, const uint32_t *ids, uint32_t n, uint64_t fence)
{
    struct block_call *c;
    int rc = enter_with(b, ids, n, &c);
    if (rc)
        return rc;
    if (fence && !is_fence(b, fence)) {
        free(c);
        return vmem__blocks_leave(b, no_such_fence(b, fence));
    }
    n = 0;
    c->fence = fence;
    c->number = ++b->number;
    for (uint32_t i = 0; i < c->n; i++) {
        struct block *block = &b->blocks[c->ids[i]];
        block->last_unback = c->number;
        block->num_holders = 0;
        // A block unbacked twice goes after the later of the two fences. The first unback may still be pending, because
        // a call that would have cancelled it has not run yet.
        if (block->state == BLOCK_UNBACKED || (block->pending_unback && !block->fence_passed && fence <= block->fence))
            continue;
        b->stats.leaving += !block->pending_unback;
        block->pending_unback = c->number;
        block->fence = fence;
        block->fence_passed = false;
        c->ids[n++] = c->ids[i];
    }
    c->n = n;
    if (n)
        vmem__blocks_queue_unback(b, c);
    else
        free(c);
    vmem__blocks_publish(b);
    return vmem__blocks_leave(b, 0);
}

// ---- fences -----------------------------------------------------------------------------------------------------

// Makes a fence that passes by hand, or with an event of the stream: at once where there are none.
static int make_fence(vmem_blocks *b, bool by_hand, void *stream, uint64_t *fence)
{
    if (!fence)
        return vmem__blocks_leave(b, vmem__error(-EINVAL, "fence is NULL"));
    struct fence *f = b->spare;
    int rc = 0;
    if (f)
        b->spare = f->next;
    pthread_mutex_unlock(&b->lock);
    if (!f && !(f = calloc(1, sizeof(*f))))
        rc = vmem__error(-ENOMEM, "no memory for a fence");
    if (!rc && !by_hand)
        rc = vmem__event_record(b->ctx, stream, &f->event);
    pthread_mutex_lock(&b->lock);
    if (rc && f) {
        f->next = b->spare;
        b->spare = f;
    }
    if (rc)
        return vmem__blocks_leave(b, rc);
    f->by_hand = by_hand;
    f->passed = !by_hand && !f->event;
    f->next = NULL;
    *fence = f->number = ++b->fence;
    *b->fences_end = f;
    b->fences_end = &f->next;
    vmem__blocks_advance_fences(b);
    return vmem__blocks_leave(b, 0);
}

int vmem_blocks_record(vmem_blocks *b, void *stream, uint64_t *fence)
{
    int rc = vmem__blocks_enter(b);
    return rc ? rc : make_fence(b, false, stream, fence);
}

int vmem_blocks_fence(vmem_blocks *b, uint64_t *fence)
{
    int rc = vmem__blocks_enter(b);
    return rc ? rc : make_fence(b, true, NULL, fence);
}

int vmem_blocks_pass(vmem_blocks *b, uint64_t fence)
{
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    if (!is_fence(b, fence))
        return vmem__blocks_leave(b, no_such_fence(b, fence));
    for (struct fence *f = b->fences; f && f->number <= fence; f = f->next)
        f->passed |= f->by_hand;
    vmem__blocks_advance_fences(b);
    return vmem__blocks_leave(b, 0);
}

// ---- what is there ----------------------------------------------------------------------------------------------------

int vmem_blocks_flush(vmem_blocks *b)
{
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    const uint64_t seq = b->seq;
    while (b->done < seq)
        pthread_cond_wait(&b->change, &b->lock);
    for (vmem__blocks_poll_events(b); blocks_go(b); vmem__blocks_poll_events(b))
        pthread_cond_wait(&b->change, &b->lock); // the fence of the next unback may have passed, too
    return vmem__blocks_leave(b, 0);
}

int vmem_blocks_query(vmem_blocks *b, const uint32_t *ids, uint32_t n, uint8_t *states)
{
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    rc = n && !states ? vmem__error(-EINVAL, "states is NULL") : check_ids(b, ids, n);
    for (uint32_t i = 0; i < n && !rc; i++)
        states[i] = b->blocks[ids[i]].state != BLOCK_BACKED ? 0 : b->blocks[ids[i]].pending_unback ? 2 : 1;
    return vmem__blocks_leave(b, rc);
}

int vmem_blocks_get_stats(vmem_blocks *b, struct vmem_blocks_stats *out)
{
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    struct vmem_blocks_stats s = b->stats;
    s.page_size = b->page_size;
    s.budget = b->budget == UINT64_MAX ? 0 : b->budget << b->page_shift;
    s.held = b->held << b->page_shift;
    s.most_held <<= b->page_shift;
    s.blocks = b->n_blocks;
    s.orders = b->seq;
    s.waiting = b->seq - b->done;
    return vmem__blocks_leave(b, vmem__struct_give(out, &s, sizeof s, "out"));
}
