// What a member of a pool asks of the others, and what it prepares for requests to come.
//
// Requests that wait tell how much they will need in all, long before their steps do. If the whole is asked for at
// once, the other members give it back while the first of these requests is being backed, and the pool's thread takes
// the device memory for it meanwhile.
//
// The driver may let an allocation wait, as for memory that it clears first. So while such a question is open, the
// member's budget grows only by what the thread has taken memory for: a step finds too little budget, and does not wait
// in the driver. (Where memory is populated, not allocated, no driver lets anybody wait, and the budget grows at once.)
//
// SPDX-License-Identifier: MIT
#include "core/memory.h"
#include "pool/pool.h"

#define TOLD_NS UINT64_C(2000000)    // after it was told of a refusal, the member does not ask the others again so long
#define PREPARE (UINT64_C(2) << 30)  // bytes of device memory that the pool's thread takes at a time,
#define PORTION (UINT64_C(32) << 20) // so many in a call, or a larger arena; the budget can grow after each

_Atomic uint64_t vmem__pool_ask_ns = 250000000;

// With the pool's lock held: asks the other members. What may still come, in bytes; if nothing, *why.
//
// A refusal that the member has not been told of yet is the answer, once, and for a moment after it was told. Then the
// others are asked again, and at once if something has become free here since.
static uint64_t ask(struct vmem__member *m, uint64_t bytes, uint32_t *why)
{
    struct vmem_kv_pool_member *r = &m->row;
    const uint64_t room = pool_less(r->max, r->has);
    *why = 0;
    if (bytes > room) {
        vmem__pool_answer(m, VMEM_KV_REFUSED, *why = VMEM_KV_AT_MAXIMUM);
        r->needs = 0;
        return 0;
    }
    if (m->kept_out == -EBADMSG || m->unwritten) { // no other member can read the question
        vmem__pool_answer(m, VMEM_KV_REFUSED, *why = VMEM_KV_FILE_DAMAGED);
        r->needs = 0;
        return 0;
    }
    const uint64_t t = vmem__now();
    const bool refused = r->answer == VMEM_KV_REFUSED && r->needs && r->needs <= bytes && m->freed == m->pool->freed;
    if (refused && (!m->told || t - m->told_at < TOLD_NS)) {
        m->told_at = m->told ? m->told_at : t;
        m->told = true;
        m->asked_at = t;
        *why = r->reason;
        return 0;
    }
    if (r->needs < bytes || r->answer != VMEM_KV_DEFERRED)
        r->asked = 0; // the thread assigns the revision
    m->asked_at = t;
    r->needs = m->foreseen ? MAX(bytes, MIN(r->needs, room)) : bytes;
    vmem__pool_answer(m, VMEM_KV_DEFERRED, 0);
    m->pool->needed = true;
    pool_ring(m->pool);
    return bytes;
}

uint64_t vmem__pool_ask(struct vmem__member *m, uint64_t held, uint64_t pages, uint32_t *refusal)
{
    if (!m)
        return 0;
    // Ask for a little more, so that a request that grows page by page does not ask for each page.
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t coming_already = m->prepares ? m->granted : 0, room = pool_less(m->row.max, m->row.has);
    const uint64_t exact = pool_less(pages << m->page_shift, coming_already);
    if (!exact && coming_already) {
        m->asked_at = vmem__now();
        *refusal = 0;
        pthread_mutex_unlock(&m->pool->lock);
        return pages;
    }
    const uint64_t bytes = MAX(exact, MIN(exact + (held / 64 << m->page_shift), room));
    const uint64_t coming = ask(m, bytes, refusal);
    if (coming) // and what it has been granted meanwhile
        vmem__pool_want(m, pool_less(pool_add(m->row.has, bytes), held << m->page_shift));
    pthread_mutex_unlock(&m->pool->lock);
    return coming ? pages : 0;
}

void vmem__pool_unask(struct vmem__member *m)
{
    if (!m)
        return;
    pthread_mutex_lock(&m->pool->lock);
    if (!m->foreseen)
        vmem__pool_want(m, 0);
    if (m->row.needs && !m->foreseen) {
        m->row.needs = 0;
        vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&m->pool->lock);
}

uint64_t vmem__pool_foresee(struct vmem__member *m, uint64_t budget, uint64_t want, bool part)
{
    // Whoever was told before that there is free budget finds it in the member's own from here on.
    const uint64_t grown = want > budget ? vmem__pool_claim(m, budget, want - budget, want - budget) : 0;
    budget += grown;
    pthread_mutex_lock(&m->pool->lock);
    m->foreseen = 0; // the new question replaces the last one
    const uint64_t has = budget + floor_pages(m->granted, m);
    uint32_t why;
    if (part)
        want = MIN(want, has + floor_pages(pool_less(m->row.max, m->row.has), m));
    if (want > has) {
        if (ask(m, (want - has) << m->page_shift, &why))
            vmem__pool_want(m, pool_less(want << m->page_shift, m->row.held));
        if (!m->prepares) {
            m->prepares = m->row.answer == VMEM_KV_DEFERRED && !m->kept_out && m->ops->ready && !m->whole &&
                          !m->ctx->b.ops->populate;
            m->ready = 0;
        }
    } else {
        m->row.needs = 0;
        if (!m->prepares || want <= budget)
            vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    m->foreseen = want;
    m->foreseen_at = vmem__now();
    pool_ring(m->pool);
    pthread_mutex_unlock(&m->pool->lock);
    return grown;
}

// With the member's lock held.
static void forget(struct vmem__member *m)
{
    pthread_mutex_lock(&m->pool->lock);
    m->foreseen = 0;
    m->prepares = false;
    vmem__pool_want(m, 0);
    pthread_mutex_unlock(&m->pool->lock);
    if (m->ops->forget)
        m->ops->forget(m->self);
}

void vmem__pool_look_ahead(struct vmem__member *m, uint64_t used)
{
    pthread_mutex_lock(&m->pool->lock);
    const bool asked = m->waiting || vmem__now() - m->foreseen_at < vmem__pool_ask_ns;
    const bool waits = m->foreseen && (!asked || used >= m->foreseen);
    pthread_mutex_unlock(&m->pool->lock);
    if (waits)
        forget(m);
}

// Takes more until there are so many.
static int take_memory(vmem_context *ctx, uint64_t bytes)
{
    vmem__lock(ctx);
    const uint64_t created = ctx->created;
    vmem__unlock(ctx);
    // Make no call for zero bytes: vmem_prealloc would give up the memory that other members took ahead.
    return bytes > created ? vmem__prealloc(ctx, bytes - created, false) : 0;
}

bool vmem__pool_prepare(struct vmem__member *m)
{
    // Where pages go together, the memory of each is allocated apart, in the size that a request turns out to need.
    if (!m->ops->ready || m->whole)
        return false;
    pthread_mutex_lock(&m->pool->lock);
    const bool waits = m->foreseen;
    pthread_mutex_unlock(&m->pool->lock);
    if (!waits)
        return false;
    struct vmem__lend_state s;
    m->ops->lock(m->self);
    m->ops->state(m->self, &s);
    const uint64_t there = m->ops->ready(m->self);
    vmem__lock(m->ctx);
    uint64_t memory = m->ctx->committed;
    vmem__unlock(m->ctx);
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t granted = m->prepares ? floor_pages(m->granted, m) : 0;
    uint64_t pages = s.after < s.budget ? 0 : pool_less(MIN(m->foreseen, s.budget + granted), there);
    uint64_t bare = pool_less(s.budget, there); // of the budget, pages without memory
    const uint64_t ready = pages ? pool_less(there, s.budget) << m->page_shift : m->granted;
    m->ready = MIN(m->granted, MAX(m->ready, ready)); // what a call was told is ready stays so
    pthread_mutex_unlock(&m->pool->lock);
    m->ops->unlock(m->self);
    if (!pages)
        return granted;
    const uint64_t portion = MAX(PORTION, m->ctx->b.arena_max) >> m->page_shift;
    for (uint64_t left = MAX(PREPARE >> m->page_shift, portion); pages && left >= portion; left -= portion) {
        const uint64_t n = MIN(pages, portion), covers = MIN(bare, n);
        memory += n << m->page_shift;
        if (take_memory(m->ctx, memory)) { // the device has too little: steps take what they need
            m->ops->lock(m->self);
            forget(m);
            m->ops->unlock(m->self);
            return granted;
        }
        pthread_mutex_lock(&m->pool->lock);
        m->ready = MIN(m->granted, m->ready + ((n - covers) << m->page_shift));
        pthread_mutex_unlock(&m->pool->lock);
        pages -= n;
        bare -= covers;
    }
    return true;
}
