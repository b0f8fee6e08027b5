// Queues: calls that name the same blocks take effect in order, and unbacks wait for their fences.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"

// ---- calls ------------------------------------------------------------------------------------------------------

static int by_id(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

void vmem__blocks_sort(struct block_call *c)
{
    uint32_t n = 0;
    bool sorted = true;
    for (uint32_t i = 1; i < c->n && sorted; i++)
        sorted = c->ids[i - 1] < c->ids[i];
    if (sorted)
        return;
    qsort(c->ids, c->n, sizeof(c->ids[0]), by_id);
    for (uint32_t i = 0; i < c->n; i++)
        if (!n || c->ids[n - 1] != c->ids[i])
            c->ids[n++] = c->ids[i];
    c->n = n;
}

// Pages that are about to go are another member's if its question is open, or was refused just now.
static void wake_if_due(vmem_blocks *b)
{
    pthread_cond_signal(&b->work);
    if (blocks_go(b))
        vmem__pool_wake(b->member);
}

void vmem__blocks_queue_unback(vmem_blocks *b, struct block_call *c)
{
    struct block_call **at = &b->unbacks;
    while (*at && (*at)->fence <= c->fence)
        at = &(*at)->next;
    c->next = *at;
    *at = c;
    wake_if_due(b);
}

void vmem__blocks_end_call(vmem_blocks *b, struct block_call *c, int rc)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n; i++) {
        const uint32_t id = c->ids[i] & ~CALL_HOLDS;
        struct block *block = &b->blocks[id];
        if (!(c->ids[i] & CALL_HOLDS) || c->number < block->last_unback)
            continue;
        block->num_holders--;
        if (!rc && block->pending_unback) {
            block->pending_unback = 0;
            block->fence_passed = false;
            b->stats.leaving--;
        } else if (rc && block->fence_passed) { // if another call holds the block, the unback waits for that call, too
            block->pending_unback = c->number;
            block->fence_passed = false;
            c->ids[n++] = id;
        }
    }
    c->n = n;
    c->fence = 0; // the fence of these blocks' unback has passed
    if (n)
        vmem__blocks_queue_unback(b, c);
    else
        free(c);
}

// ---- fences -----------------------------------------------------------------------------------------------------

void vmem__blocks_advance_fences(vmem_blocks *b)
{
    struct fence *f;
    while ((f = b->fences) && f->passed) {
        b->passed = f->number;
        b->fences = f->next;
        if (!b->fences)
            b->fences_end = &b->fences;
        f->next = b->spare;
        b->spare = f;
    }
    if (!b->fences)
        b->passed = b->fence;
    if (b->unbacks && b->unbacks->fence <= b->passed)
        wake_if_due(b);
}

bool vmem__blocks_needs_driver(const vmem_blocks *b)
{
    return b->unbacks && b->unbacks->fence > b->passed && b->fences && !b->fences->by_hand;
}

void vmem__blocks_poll_events(vmem_blocks *b)
{
    while (b->asking)
        pthread_cond_wait(&b->change, &b->lock);
    b->asking = true;
    while (vmem__blocks_needs_driver(b)) {
        struct fence *f = b->fences; // stays first while the lock is dropped: no other call lets it pass
        pthread_mutex_unlock(&b->lock);
        const bool passed = vmem__event_passed(b->ctx, f->event);
        pthread_mutex_lock(&b->lock);
        if (!passed)
            break;
        f->passed = true;
        vmem__blocks_advance_fences(b);
    }
    b->asking = false;
    pthread_cond_broadcast(&b->change);
}

void vmem__blocks_wait(vmem_blocks *b, pthread_cond_t *on, uint64_t ns)
{
    const struct timespec until = vmem__in_ns(ns);
    pthread_cond_timedwait(on, &b->lock, &until);
}
