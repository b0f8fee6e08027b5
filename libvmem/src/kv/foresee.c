// What a member of a pool asks of the others, and what it prepares for requests to come.
//
// Requests that wait tell how much they will need in all, long before their steps do. If the whole is asked for at once,
// the other members give it back while the first of these requests is being backed, and the pool's thread takes the
// device memory for it meanwhile.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "kv/pool.h"

#define REFUSED_NS UINT64_C(2000000) // after a refusal, the member does not ask the others again for this time
#define PREPARE (UINT64_C(2) << 30)  // bytes of device memory that the pool's thread takes at a time

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
    const uint64_t exact = pages << kv->page_shift, room = kv_less(m->row.max, m->row.has);
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
    if (want > kv->budget_pages)
        vmem__kv_claim(kv, want - kv->budget_pages, want - kv->budget_pages);
    pthread_mutex_lock(&m->pool->lock);
    kv->foreseen = 0; // the new question replaces the last one
    if (part)
        want = KV_MIN(want, kv->budget_pages + kv_floor_pages(kv_less(m->row.max, m->row.has), kv));
    if (want > kv->budget_pages) {
        vmem__kv_pool_ask(m, (want - kv->budget_pages) << kv->page_shift);
    } else {
        m->changed |= m->row.needs != 0;
        m->row.needs = 0;
        vmem__kv_pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    kv->foreseen = want;
    kv->foreseen_at = kv_now();
    kv_ring(m->pool);
    pthread_mutex_unlock(&m->pool->lock);
}

void vmem__kv_look_ahead(vmem_kv *kv)
{
    if (!kv->foreseen || (kv_now() - kv->foreseen_at < KV_ASK_NS && kv->held < kv->foreseen + vmem__kv_reclaimable(kv)))
        return;
    kv->foreseen = 0;
    vmem__kv_worker_wake(kv);
}

bool vmem__kv_prepare(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    // Where pages go together, the memory of each is allocated apart, in the size that a request turns out to need.
    if (kv->whole)
        return false;
    pthread_mutex_lock(&kv->state);
    const uint64_t all = KV_MIN(kv->foreseen, kv->budget_pages);
    uint64_t pages = kv->giving ? 0 : all - KV_MIN(kv->held, all);
    pthread_mutex_unlock(&kv->state);
    const uint64_t there = pages ? vmem__kv_spare_memory(kv) : 0;
    if (there >= pages)
        return false;
    pages = KV_MIN(pages, there + (PREPARE >> kv->page_shift));
    m->taken_ahead = true;
    if (!vmem__kv_take_more(kv, pages))
        return true;
    pthread_mutex_lock(&kv->state);
    kv->foreseen = 0; // the device has too little: steps take what they need
    pthread_mutex_unlock(&kv->state);
    return false;
}
