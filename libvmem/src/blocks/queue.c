// What waits: orders for the thread, unbacks for their fences, and the thread that carries them out.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"

#define POLL_NS 500000                // between two looks at a CUDA event that an unback waits for
#define IDLE_NS 100000000             // without work, after which memory that nothing uses returns to the system
#define RETRY_NS 10000000             // until what failed for lack of memory is tried again
#define BORROW_NS UINT64_C(100000000) // that an order waits for other members of the pool,
#define BORROW_LOOK_NS 2000000        // which looks for fences meanwhile

// ---- calls ------------------------------------------------------------------------------------------------------

static int by_id(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

void vmem__blocks_sort(struct call *c)
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

void vmem__blocks_wait_fence(vmem_blocks *b, struct call *c)
{
    struct call **at = &b->unbacks;
    while (*at && (*at)->fence <= c->fence)
        at = &(*at)->next;
    c->next = *at;
    *at = c;
    pthread_cond_signal(&b->work);
}

void vmem__blocks_end(vmem_blocks *b, struct call *c, int rc)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n; i++) {
        const uint32_t id = c->ids[i] & ~CALL_HOLDS;
        struct block *block = &b->blocks[id];
        if (!(c->ids[i] & CALL_HOLDS) || c->number < block->cut)
            continue;
        block->holds--;
        if (!rc && block->leave) {
            block->leave = 0;
            block->due = false;
            b->stats.leaving--;
            b->stats.cancelled++;
        } else if (rc && block->due) { // if another call holds it, taking it waits for that call's end, too
            block->leave = c->number;
            block->due = false;
            c->ids[n++] = id;
        }
    }
    c->n = n;
    c->fence = 0; // it has passed
    if (n)
        vmem__blocks_wait_fence(b, c);
    else
        free(c);
}

// ---- fences -----------------------------------------------------------------------------------------------------

void vmem__blocks_advance(vmem_blocks *b)
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
        pthread_cond_signal(&b->work);
}

// Whether an unback waits for a fence that only the driver knows.
static bool must_ask(const vmem_blocks *b)
{
    return b->unbacks && b->unbacks->fence > b->passed && b->fences && !b->fences->by_hand;
}

void vmem__blocks_ask(vmem_blocks *b)
{
    while (b->asking)
        pthread_cond_wait(&b->change, &b->lock);
    b->asking = true;
    while (must_ask(b)) {
        struct fence *f = b->fences; // it stays: nobody else lets it pass
        pthread_mutex_unlock(&b->lock);
        const bool passed = b->ctx->b.ops->passed(&b->ctx->b, f->event) > 0;
        pthread_mutex_lock(&b->lock);
        if (!passed)
            break;
        f->passed = true;
        vmem__blocks_advance(b);
    }
    b->asking = false;
    pthread_cond_broadcast(&b->change);
}

// ---- the thread -------------------------------------------------------------------------------------------------

// For other processes. Each word is whole; between two of them anything may happen.
void vmem__blocks_show(vmem_blocks *b)
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

static void carry_out(vmem_blocks *b)
{
    struct call *c = b->orders;
    b->orders = c->next;
    if (!b->orders)
        b->orders_end = &b->orders;
    const uint64_t seq = c->seq;
    const int rc = vmem__blocks_back(b, c);
    b->answers[seq % VMEM_BLOCKS_ANSWERS] = rc;
    if (b->board)
        __atomic_store_n(&b->board->answers[seq % VMEM_BLOCKS_ANSWERS], 2 * seq + (rc != 0), __ATOMIC_RELAXED);
    b->stats.refused += rc != 0;
    b->done = seq;
    vmem__blocks_end(b, c, rc);
    vmem__blocks_show(b);
    pthread_cond_broadcast(&b->change);
}

static void give_memory(vmem_blocks *b)
{
    pthread_mutex_unlock(&b->lock);
    vmem__begin(b->ctx);
    vmem__shrink(b->ctx, true);
    vmem__end(b->ctx);
    pthread_mutex_lock(&b->lock);
}

static void wait_ns(vmem_blocks *b, pthread_cond_t *on, uint64_t ns)
{
    const struct timespec until = vmem__in_ns(ns);
    pthread_cond_timedwait(on, &b->lock, &until);
}

bool vmem__blocks_borrow(vmem_blocks *b, uint64_t pages, uint64_t *until)
{
    const uint64_t now = vmem__now();
    uint32_t why;
    *until = *until ? *until : now + BORROW_NS;
    if (!pages || b->stop || now >= *until || !vmem__pool_ask(b->member, b->held, pages, &why))
        return false;
    wait_ns(b, &b->change, BORROW_LOOK_NS);
    if (must_ask(b))
        vmem__blocks_ask(b);
    return true;
}

// Nothing was asked of the blocks for a while: memory that nothing uses goes back, and so does the pool's budget.
static void become_idle(vmem_blocks *b)
{
    give_memory(b);
    if (b->member && !b->idle) {
        b->idle = true;
        vmem__pool_wake(b->member);
    }
}

void *vmem__blocks_work(void *blocks)
{
    vmem_blocks *b = blocks;
    bool failed = false;   // to take an unback
    uint64_t unmapped = 0; // pages, when memory last returned to the system
    pthread_mutex_lock(&b->lock);
    while (!b->stop) {
        if (must_ask(b))
            vmem__blocks_ask(b);
        bool did = b->orders != NULL;
        if (did)
            carry_out(b);
        const bool due = b->unbacks && b->unbacks->fence <= b->passed;
        failed = due && !vmem__blocks_take(b);
        if (due && !failed)
            vmem__blocks_show(b);
        if (did || (due && !failed) || b->stop)
            continue;
        if (must_ask(b)) {
            wait_ns(b, &b->work, POLL_NS);
        } else if (failed || b->stuck) {
            wait_ns(b, &b->work, RETRY_NS);
            vmem__blocks_retry(b);
        } else if (b->stats.unmapped_pages != unmapped || (b->member && !b->idle)) {
            const uint64_t before = b->number;
            wait_ns(b, &b->work, IDLE_NS);
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
