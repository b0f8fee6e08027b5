// What a member of a pool asks of the others, and what it prepares for requests to come.
//
// Requests that wait tell how much they will need in all, long before their steps do. If the whole is asked for at once,
// the other members give it back while the first of these requests is being backed, and the pool's thread takes the
// device memory for it meanwhile.
//
// The driver may let an allocation wait, as for memory that it clears first. So while such a question is open, the
// cache's budget grows only by what the thread has taken memory for: a step finds too little budget, and does not wait
// in the driver. (Where memory is populated, not allocated, no driver lets anybody wait, and the budget grows at once.)
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "pool/pool.h"

#define REFUSED_NS UINT64_C(2000000) // after a refusal, the member does not ask the others again for this time
#define PREPARE (UINT64_C(2) << 30)  // bytes of device memory that the pool's thread takes at a time,
#define PORTION (UINT64_C(32) << 20) // so many in a call, or a larger arena; the budget can grow after each

_Atomic uint64_t vmem__kv_ask_ns = 250000000;

uint64_t vmem__kv_pool_ask(struct kv_member *m, uint64_t bytes)
{
    const uint64_t t = kv_now(), room = kv_less(m->row.max, m->row.has);
    if (bytes > room) {
        vmem__kv_pool_answer(m, VMEM_KV_REFUSED, VMEM_KV_AT_MAXIMUM);
        m->row.needs = 0;
        return 0;
    }
    const bool again = m->row.answer == VMEM_KV_REFUSED && m->row.needs && t - m->refused_at < REFUSED_NS;
    const bool fresh = m->row.needs < bytes || m->row.answer != VMEM_KV_DEFERRED;
    m->asked_at = t;
    m->row.needs = m->kv->foreseen ? KV_MAX(bytes, KV_MIN(m->row.needs, room)) : bytes;
    m->changed = true;
    if (again)
        return 0;
    if (fresh)
        m->row.asked = 0; // the thread assigns the revision
    vmem__kv_pool_answer(m, VMEM_KV_DEFERRED, 0);
    kv_ring(m->pool);
    return bytes;
}

uint64_t vmem__kv_ask(vmem_kv *kv, uint64_t pages, uint32_t *refusal)
{
    struct kv_member *m = kv->member;
    if (!m)
        return 0;
    // Ask for a little more, so that a request that grows page by page does not ask for each page.
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t coming_already = m->prepares ? m->granted : 0, room = kv_less(m->row.max, m->row.has);
    const uint64_t exact = kv_less(pages << kv->page_shift, coming_already);
    if (!exact && coming_already) {
        m->asked_at = kv_now();
        *refusal = 0;
        pthread_mutex_unlock(&m->pool->lock);
        return pages;
    }
    const uint64_t bytes = KV_MAX(exact, KV_MIN(exact + (kv->held / 64 << kv->page_shift), room));
    const uint64_t coming = vmem__kv_pool_ask(m, bytes);
    *refusal = coming ? 0 : m->row.reason;
    pthread_mutex_unlock(&m->pool->lock);
    return coming ? pages : 0;
}

void vmem__kv_unask(vmem_kv *kv)
{
    struct kv_member *m = kv->member;
    if (!m)
        return;
    pthread_mutex_lock(&m->pool->lock);
    if (m->row.needs && !kv->foreseen) {
        m->row.needs = 0;
        m->changed = true;
        vmem__kv_pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&m->pool->lock);
}

void vmem__kv_foresee(vmem_kv *kv, uint64_t want, bool part)
{
    struct kv_member *m = kv->member;
    if (!m)
        return;
    // Whoever was told before that there is free budget finds it in the cache's own from here on.
    const bool claimed =
        want <= kv->budget_pages || vmem__kv_claim(kv, want - kv->budget_pages, want - kv->budget_pages);
    pthread_mutex_lock(&m->pool->lock);
    kv->foreseen = 0; // the new question replaces the last one
    const uint64_t has = kv->budget_pages + kv_floor_pages(m->granted, kv);
    if (part)
        want = KV_MIN(want, has + kv_floor_pages(kv_less(m->row.max, m->row.has), kv));
    if (want > has) {
        vmem__kv_pool_ask(m, (want - has) << kv->page_shift);
        if (!m->prepares) {
            m->prepares = m->row.answer == VMEM_KV_DEFERRED && claimed && !kv->whole && !kv->ctx->b.ops->populate;
            m->ready = 0;
        }
    } else {
        m->changed |= m->row.needs != 0;
        m->row.needs = 0;
        if (!m->prepares || want <= kv->budget_pages)
            vmem__kv_pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    kv->foreseen = want;
    kv->foreseen_at = kv_now();
    kv_ring(m->pool);
    pthread_mutex_unlock(&m->pool->lock);
}

// With the cache's state held.
static void forget(struct kv_member *m)
{
    pthread_mutex_lock(&m->pool->lock);
    m->kv->foreseen = 0;
    m->prepares = false;
    pthread_mutex_unlock(&m->pool->lock);
}

void vmem__kv_look_ahead(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    pthread_mutex_lock(&m->pool->lock);
    const bool asked = m->waiting || kv_now() - kv->foreseen_at < vmem__kv_ask_ns;
    pthread_mutex_unlock(&m->pool->lock);
    if (!kv->foreseen || (asked && kv->held < kv->foreseen + vmem__kv_reclaimable(kv)))
        return;
    forget(m);
    vmem__kv_worker_wake(kv);
}

bool vmem__kv_prepare(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    // Where pages go together, the memory of each is allocated apart, in the size that a request turns out to need.
    if (kv->whole)
        return false;
    pthread_mutex_lock(&kv->state);
    const uint64_t foreseen = kv->giving ? 0 : kv->foreseen;
    const uint64_t there = kv->held + (foreseen ? vmem__kv_spare_memory(kv) : 0);
    uint64_t memory = foreseen ? vmem__kv_memory(kv) : 0;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t granted = m->prepares ? kv_floor_pages(m->granted, kv) : 0;
    uint64_t pages = kv_less(KV_MIN(foreseen, kv->budget_pages + granted), there);
    uint64_t bare = kv_less(kv->budget_pages, there); // of the budget, pages without memory
    const uint64_t ready = pages ? kv_less(there, kv->budget_pages) << kv->page_shift : m->granted;
    m->ready = KV_MIN(m->granted, KV_MAX(m->ready, ready)); // what a call was told is ready stays so
    pthread_mutex_unlock(&m->pool->lock);
    pthread_mutex_unlock(&kv->state);
    if (!pages)
        return granted;
    const uint64_t portion = KV_MAX(PORTION, kv->ctx->b.arena_max) >> kv->page_shift;
    for (uint64_t left = KV_MAX(PREPARE >> kv->page_shift, portion); pages && left >= portion; left -= portion) {
        const uint64_t n = KV_MIN(pages, portion), covers = KV_MIN(bare, n);
        memory += n << kv->page_shift;
        m->taken_ahead = true;
        if (vmem__kv_take_to(kv, memory)) { // the device has too little: steps take what they need
            pthread_mutex_lock(&kv->state);
            forget(m);
            pthread_mutex_unlock(&kv->state);
            return granted;
        }
        pthread_mutex_lock(&m->pool->lock);
        m->ready = KV_MIN(m->granted, m->ready + ((n - covers) << kv->page_shift));
        pthread_mutex_unlock(&m->pool->lock);
        pages -= n;
        bare -= covers;
    }
    return true;
}
