// What members may have of a pool's budget: what is free, what they claim, and their shares.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "pool/pool.h"

// ---- the table, with the pool's lock held ----------------------------------------------------------------------------

void vmem__pool_want(struct vmem__member *m, uint64_t bytes)
{
    if (bytes == m->wants)
        return;
    vmem__expect(m->ctx, (int64_t)(bytes - m->wants), 0);
    m->wanted_less |= !bytes;
    m->wants = bytes;
}

void vmem__pool_answer(struct vmem__member *m, uint32_t what, uint32_t why)
{
    if (what == VMEM_KV_REFUSED)
        vmem__pool_want(m, 0);
    if (m->row.answer != what)
        pthread_cond_broadcast(&m->pool->news);
    m->row.answer = what;
    m->row.reason = why;
    m->prepares &= what == VMEM_KV_DEFERRED;
}

// ---- claims, with the member's lock held -----------------------------------------------------------------------------

uint64_t vmem__pool_acceptable(const struct vmem__member *m)
{
    return m->prepares ? MIN(m->granted, m->ready) : m->granted;
}

uint64_t vmem__pool_accept(struct vmem__member *m)
{
    const uint64_t pages = floor_pages(vmem__pool_acceptable(m), m), bytes = pages << m->page_shift;
    m->granted = m->prepares ? m->granted - bytes : 0;
    m->ready = pool_less(m->ready, bytes);
    if (!m->granted && !m->row.needs && m->row.answer == VMEM_KV_DEFERRED)
        vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    return pages;
}

// What other members wait for, in bytes. Call it between begin and end.
static uint64_t needs_of_others(const vmem_kv_pool *pool, const struct vmem__member *m)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *r = &pool->table.rows[i];
        if (r->size && i != m->place && r->answer == VMEM_KV_DEFERRED)
            bytes = pool_add(bytes, r->needs);
    }
    return bytes;
}

uint64_t vmem__pool_claim(struct vmem__member *m, uint64_t budget, uint64_t least, uint64_t most)
{
    vmem_kv_pool *pool = m->pool;
    int rc = 0;
    pthread_mutex_lock(&pool->lock);
    const uint64_t granted = vmem__pool_accept(m);
    least = pool_less(least, granted);
    most = pool_less(most, granted);
    // First take back the budget that the member was about to give back and still has.
    const uint64_t had = ((budget + granted) << m->page_shift) + m->granted;
    uint64_t pages = MIN(floor_pages(pool_less(MIN(m->row.has, m->row.max), had), m), most);
    m->spare = MIN(m->spare, pool_less(m->row.has, had + (pages << m->page_shift)));
    const bool worth = !m->prepares && pages < most && (pool->free || pages < least);
    if (worth && !(rc = vmem__table_begin(pool))) {
        const uint64_t room = MIN(vmem__pool_free(pool, m), pool_less(m->row.max, m->row.has));
        // Budget to spare is what nobody waits for: it may be what another member has just given for a question.
        const uint64_t spare = MIN(floor_pages(pool_less(room, needs_of_others(pool, m)), m), most - pages);
        const uint64_t more = MIN(floor_pages(room, m), MAX(spare, pool_less(least, pages)));
        const uint64_t before = m->row.has;
        m->row.has += more << m->page_shift;
        vmem__table_end(pool);
        pages += floor_pages(pool_less(m->row.has, before), m);
    }
    if (pages && m->row.needs) {
        m->row.needs = pool_less(m->row.needs, pages << m->page_shift);
        if (!m->row.needs && !m->granted)
            vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&pool->lock);
    m->kept_out = rc;
    return granted + pages;
}

uint64_t vmem__pool_claimable(const struct vmem__member *m, uint64_t budget)
{
    if (!m)
        return 0;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t due = pool_less(m->row.min, m->row.has), room = pool_less(m->row.max, m->row.has);
    const uint64_t own = pool_less(MIN(m->row.has, m->row.max), pool_add(budget << m->page_shift, m->granted));
    const uint64_t more = m->prepares ? vmem__pool_acceptable(m) : MIN(pool_add(m->pool->free, due), room);
    const uint64_t bytes = pool_add(own, more);
    pthread_mutex_unlock(&m->pool->lock);
    return floor_pages(bytes, m);
}

// ---- shares ----------------------------------------------------------------------------------------------------------

int vmem__pool_check(const vmem_kv_pool *pool, uint32_t place, uint64_t min, uint64_t *max)
{
    const uint64_t budget = pool->table.head.budget;
    uint64_t all = min;
    if (!*max || *max > budget)
        *max = budget;
    if (min > *max)
        return vmem__error(-EINVAL, "min %" PRIu64 " is over max, %" PRIu64, min, *max);
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        if (pool->table.rows[i].size && i != place)
            all = pool_add(all, pool->table.rows[i].min);
    if (all > budget)
        return vmem__error(-ENOMEM,
                           "min %" PRIu64 ": the minimums of all members would be %" PRIu64 ", over the "
                           "pool's budget of %" PRIu64,
                           min, all, budget);
    return 0;
}

int vmem__pool_set_share(struct vmem__member *m, uint64_t min, uint64_t max, uint32_t *why)
{
    vmem_kv_pool *pool = m->pool;
    int rc = vmem__table_wait(pool, POOL_CALL_US);
    if (rc)
        return rc;
    *why = VMEM_KV_AT_MINIMUM;
    const uint64_t min_before = m->row.min, max_before = m->row.max;
    rc = vmem__pool_check(pool, m->place, min, &max);
    if (!rc) {
        m->row.min = min;
        m->row.max = max;
    }
    vmem__table_end(pool);
    if (!rc && m->unwritten) {
        m->row.min = min_before;
        m->row.max = max_before;
        rc = vmem__table_unwritten(pool);
    }
    if (!rc) { // what the thread has granted and the member does not have yet: the row follows when the memory is back
        m->granted = MIN(m->granted, pool_less(max, pool_less(m->row.has, m->granted)));
        m->ready = MIN(m->ready, m->granted);
    }
    pool_ring(pool);
    return rc;
}
