// The blocks' own thread: it carries out orders, and unbacks whose fences have passed.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"

#define POLL_NS 500000    // time between two looks at a CUDA event that an unback waits for
#define IDLE_NS 100000000 // time without work after which memory that nothing uses returns to the system
#define RETRY_NS 10000000 // time before an unback or unmap that has failed is tried again

static void carry_out_order(vmem_blocks *b)
{
    struct block_call *c = b->orders;
    b->orders = c->next;
    if (!b->orders)
        b->orders_end = &b->orders;
    const uint64_t seq = c->seq;
    const int rc = vmem__blocks_back(b, c);
    if (b->board)
        __atomic_store_n(&b->board->answers[seq % VMEM_BLOCKS_ANSWERS], 2 * seq + (rc != 0), __ATOMIC_RELAXED);
    b->stats.refused += rc != 0;
    b->done = seq;
    vmem__blocks_end_call(b, c, rc);
    vmem__blocks_publish(b);
    pthread_cond_broadcast(&b->change);
}

static void return_memory(vmem_blocks *b)
{
    pthread_mutex_unlock(&b->lock);
    vmem__trim_unused(b->ctx, true);
    pthread_mutex_lock(&b->lock);
}

// Returns memory that nothing uses, and the pool's budget, when no call has named blocks for a while.
static void become_idle(vmem_blocks *b)
{
    return_memory(b);
    if (b->member && !b->idle) {
        b->idle = true;
        vmem__pool_wake(b->member);
    }
}

void *vmem__blocks_work(void *blocks)
{
    vmem_blocks *b = blocks;
    bool failed = false;   // an unback had no memory for its bookkeeping
    uint64_t unmapped = 0; // stats.unmapped_pages when memory last returned to the system
    pthread_mutex_lock(&b->lock);
    while (!b->stop) {
        if (vmem__blocks_needs_driver(b))
            vmem__blocks_poll_events(b);
        bool did = b->orders != NULL;
        if (did)
            carry_out_order(b);
        const bool due = b->unbacks && b->unbacks->fence <= b->passed;
        failed = due && !vmem__blocks_unback_due(b);
        if (due && !failed)
            vmem__blocks_publish(b);
        if (did || (due && !failed) || b->stop)
            continue;
        if (vmem__blocks_needs_driver(b)) {
            vmem__blocks_wait(b, &b->work, POLL_NS);
        } else if (failed || b->stuck) {
            vmem__blocks_wait(b, &b->work, RETRY_NS);
            vmem__blocks_retry_unmaps(b);
        } else if (b->stats.unmapped_pages != unmapped || (b->member && !b->idle)) {
            const uint64_t before = b->number;
            vmem__blocks_wait(b, &b->work, IDLE_NS);
            if (b->number == before && !b->stop) {
                unmapped = b->stats.unmapped_pages;
                become_idle(b);
            }
        } else {
            pthread_cond_wait(&b->work, &b->lock);
        }
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}
