// Blocks as a member of a pool: the functions that member.h asks for, and the public calls that name both. Every page
// belongs to some block. So the member shrinks only as the engine unbacks blocks, which it does when it finds shrink_to
// on the board.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"

#define LAPSE_NS 100000000           // time after which a request of the pool to shrink lapses
#define AWAIT_NS UINT64_C(100000000) // time for which an order waits for other members of the pool to give
#define AWAIT_LOOK_NS 2000000        // time between its looks for fences that have passed

// ---- what the pool's thread calls -------------------------------------------------------------------------------

static void lock(void *blocks) { pthread_mutex_lock(&((vmem_blocks *)blocks)->lock); }
static void unlock(void *blocks) { pthread_mutex_unlock(&((vmem_blocks *)blocks)->lock); }

static void get_state(void *blocks, struct vmem__member_state *out)
{
    vmem_blocks *b = blocks;
    const uint64_t still_offered = sat_sub(b->held, b->keeps); // the engine may have unbacked some since its offer
    b->reported = b->held;
    *out = (struct vmem__member_state){
        .budget = b->budget,
        .held = b->held,
        .target = b->budget,
        .min_pages = b->held,
        .evictable = b->offer < still_offered ? b->offer : still_offered,
        .releasing = blocks_go(b),
    };
}

static void raise_budget(void *blocks, uint64_t pages)
{
    vmem_blocks *b = blocks;
    b->budget += pages;
    vmem__blocks_publish(b);
    pthread_cond_broadcast(&b->change); // an order may wait for budget
}

static void lower_budget(void *blocks, uint64_t pages)
{
    vmem_blocks *b = blocks;
    b->budget = pages;
    vmem__blocks_publish(b);
}

// An idle member keeps only the budget of its pages, or its minimum.
static bool continue_lowering(void *blocks, uint64_t least)
{
    vmem_blocks *b = blocks;
    if (b->idle && b->budget > least)
        lower_budget(b, least);
    return false;
}

static void trim(void *blocks, bool keep_retained) { vmem__trim_unused(((vmem_blocks *)blocks)->ctx, keep_retained); }

static void evict(void *blocks, uint64_t pages)
{
    vmem_blocks *b = blocks;
    pthread_mutex_lock(&b->lock);
    // The pool decided by what was last reported. If blocks have left since, fewer are still to go.
    const uint64_t to = sat_sub(b->reported, pages);
    b->shrink_to = to ? to : 1; // 0 on the board means that nobody asks
    b->shrink_until = vmem__now() + LAPSE_NS;
    vmem__blocks_publish(b);
    pthread_mutex_unlock(&b->lock);
}

static const struct vmem__member_ops ops = {
    .lock = lock,
    .unlock = unlock,
    .get_state = get_state,
    .raise_budget = raise_budget,
    .lower_budget = lower_budget,
    .continue_lowering = continue_lowering,
    .trim = trim,
    .evict = evict,
};

// ---- what the engine calls --------------------------------------------------------------------------------------

void vmem__blocks_lapse(vmem_blocks *b)
{
    if (b->shrink_to != UINT64_MAX && (!b->offer || vmem__now() > b->shrink_until)) {
        b->shrink_to = UINT64_MAX;
        vmem__blocks_publish(b);
    }
}

void vmem__blocks_claim(vmem_blocks *b, uint64_t least, uint64_t most)
{
    b->budget += vmem__pool_claim(b->member, b->budget, least, most);
}

bool vmem__blocks_await_budget(vmem_blocks *b, uint64_t pages, uint64_t *until)
{
    const uint64_t now = vmem__now();
    uint32_t why;
    *until = *until ? *until : now + AWAIT_NS;
    if (!pages || b->stop || now >= *until || !vmem__pool_ask(b->member, b->held, pages, &why))
        return false;
    vmem__blocks_wait(b, &b->change, AWAIT_LOOK_NS);
    if (vmem__blocks_needs_driver(b))
        vmem__blocks_poll_events(b);
    return true;
}

// Begins a public call of blocks that are in a pool.
static int enter_member(vmem_blocks *b)
{
    int rc = vmem__blocks_enter(b);
    return rc || b->member ? rc : vmem__blocks_leave(b, vmem__error(-EINVAL, "the blocks are in no pool"));
}

int vmem_blocks_join(vmem_blocks *b, vmem_kv_pool *pool, const char *name, uint64_t min, uint64_t max)
{
    if (!pool)
        return vmem__error(-EINVAL, "pool must not be NULL");
    int rc = vmem__blocks_enter(b);
    if (rc)
        return rc;
    if (b->member)
        return vmem__blocks_leave(b, vmem__error(-EINVAL, "the blocks are a member of a pool already"));
    const struct vmem__member_terms terms = {
        .ctx = b->ctx,
        .page_size = b->page_size,
        .held = b->held,
        .name = name ? name : "blocks",
        .min = min,
        .max = max,
    };
    uint64_t budget;
    rc = vmem__pool_join(pool, &ops, b, &terms, &b->member, &budget);
    if (!rc) {
        b->budget = budget;
        vmem__blocks_publish(b);
    }
    return vmem__blocks_leave(b, rc);
}

int vmem_blocks_set_share(vmem_blocks *b, uint64_t min, uint64_t max)
{
    int rc = enter_member(b);
    if (rc)
        return rc;
    rc = vmem__pool_set_share(b->member, min, max);
    if (!rc)
        vmem__pool_keep_to_max(b->member);
    return vmem__blocks_leave(b, rc);
}

int vmem_blocks_ask(vmem_blocks *b, uint64_t bytes, uint64_t *missing)
{
    int rc = enter_member(b);
    if (rc)
        return rc;
    vmem__blocks_lapse(b);
    const uint64_t want = (bytes >> b->page_shift) + (bytes & (b->page_size - 1) ? 1 : 0) + b->held;
    uint32_t why;
    if (want > b->budget)
        vmem__blocks_claim(b, want - b->budget, want - b->budget);
    const uint64_t short_pages = sat_sub(want, b->budget);
    // An idle member would give the claimed budget back, and its next question would be answered by it. So it is not
    // idle.
    if (bytes) {
        b->number++;
        b->idle = false;
        pthread_cond_signal(&b->work);
    }
    if (!short_pages)
        vmem__pool_unask(b->member);
    else if (!vmem__pool_ask(b->member, b->held, short_pages, &why))
        rc = vmem__error(-ENOMEM, "no member of the pool can give %" PRIu64 " pages now", short_pages);
    if (missing)
        *missing = short_pages << b->page_shift;
    vmem__blocks_publish(b);
    return vmem__blocks_leave(b, rc);
}

int vmem_blocks_offer(vmem_blocks *b, uint64_t bytes)
{
    int rc = enter_member(b);
    if (rc)
        return rc;
    const uint64_t before = b->offer;
    b->offer = bytes >> b->page_shift;
    b->keeps = sat_sub(b->held, b->offer);
    vmem__blocks_lapse(b);
    if (b->offer > before)
        vmem__pool_wake(b->member);
    return vmem__blocks_leave(b, 0);
}
