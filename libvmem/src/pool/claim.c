// A member's part of the pool's budget: it claims free budget, asks the other members for more, and has a share (a
// minimum and a maximum).
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <string.h>

#include "core/memory.h"
#include "pool/pool.h"

#define AGAIN_NS UINT64_C(500000000) // another refusal within this time counts as the same one
#define TOLD_NS UINT64_C(2000000)    // a member that has learned of a refusal does not ask again within this time

_Atomic uint64_t vmem__pool_ask_ns = 250000000;

void vmem__pool_ring(const vmem_kv_pool *pool)
{
    const uint64_t one = 1;
    (void)!write(pool->bell, &one, sizeof one); // should it be full, the thread has not looked yet
}

// ---- the table, with the pool's lock held ----------------------------------------------------------------------------

void vmem__pool_retain(struct vmem__member *m, uint64_t bytes)
{
    if (bytes == m->waits_for)
        return;
    vmem__expect(m->ctx, (int64_t)(bytes - m->waits_for), 0);
    m->waits_for = bytes;
}

void vmem__pool_answer(struct vmem__member *m, uint32_t what, uint32_t why)
{
    if (what == VMEM_KV_REFUSED)
        vmem__pool_retain(m, 0);
    if (m->entry.answer != what)
        pthread_cond_broadcast(&m->pool->news);
    m->entry.answer = what;
    m->entry.reason = why;
}

// ---- claims, with the member's lock held -----------------------------------------------------------------------------

uint64_t vmem__pool_accept(struct vmem__member *m)
{
    const uint64_t pages = floor_pages(m->granted, m);
    m->granted = 0;
    if (!m->entry.needs && m->entry.answer == VMEM_KV_DEFERRED)
        vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    return pages;
}

// The bytes that other members wait for. Call it between begin and end.
static uint64_t bytes_others_need(const vmem_kv_pool *pool, const struct vmem__member *m)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *e = &pool->table.entries[i];
        if (e->size && i != m->place && e->answer == VMEM_KV_DEFERRED)
            bytes = sat_add(bytes, e->needs);
    }
    return bytes;
}

uint64_t vmem__pool_claim(struct vmem__member *m, uint64_t budget, uint64_t least, uint64_t most)
{
    vmem_kv_pool *pool = m->pool;
    int rc = 0;
    pthread_mutex_lock(&pool->lock);
    const uint64_t granted = vmem__pool_accept(m);
    least = sat_sub(least, granted);
    most = sat_sub(most, granted);
    // First take back budget that the member was about to give back and its entry still has. own: bytes of the entry
    // that the member's budget already contains.
    const uint64_t own = (budget + granted) << m->page_shift;
    uint64_t pages = MIN(floor_pages(sat_sub(MIN(m->entry.has, m->entry.max), own), m), most);
    m->retained_bytes = MIN(m->retained_bytes, sat_sub(m->entry.has, own + (pages << m->page_shift)));
    const bool may_find_more = pages < most && (pool->free || pages < least);
    if (may_find_more && !(rc = vmem__table_begin(pool, 0))) {
        const uint64_t room = MIN(vmem__pool_free_bytes(pool, m), sat_sub(m->entry.max, m->entry.has));
        // spare: budget that no member waits for. The rest may have just been given for another member's question.
        const uint64_t spare = MIN(floor_pages(sat_sub(room, bytes_others_need(pool, m)), m), most - pages);
        const uint64_t more = MIN(floor_pages(room, m), MAX(spare, sat_sub(least, pages)));
        const uint64_t before = m->entry.has;
        m->entry.has += more << m->page_shift;
        vmem__table_end(pool);
        pages += floor_pages(sat_sub(m->entry.has, before), m);
    }
    if (pages && m->entry.needs) {
        m->entry.needs = sat_sub(m->entry.needs, pages << m->page_shift);
        if (!m->entry.needs)
            vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&pool->lock);
    m->table_error = rc;
    return granted + pages;
}

uint64_t vmem__pool_claimable(const struct vmem__member *m, uint64_t budget)
{
    if (!m)
        return 0;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t due = sat_sub(m->entry.min, m->entry.has), room = sat_sub(m->entry.max, m->entry.has);
    const uint64_t own = sat_sub(MIN(m->entry.has, m->entry.max), budget << m->page_shift);
    const uint64_t bytes = sat_add(own, MIN(sat_add(m->pool->free, due), room));
    pthread_mutex_unlock(&m->pool->lock);
    return floor_pages(bytes, m);
}

// ---- a device with less memory than the budget --------------------------------------------------------------------------

// Memory outside the pool, such as contexts and activations, may leave the device less than the pool's budget. The
// table then has free budget without memory behind it, and no member asks the others. So bytes that the device has
// refused do not count as free for a while. A member that lacks memory then asks as in a pool whose budget is used up.
uint64_t vmem__pool_refused(struct vmem__member *m, uint64_t budget, uint64_t held)
{
    if (!m)
        return budget;
    vmem_kv_pool *pool = m->pool;
    struct pool_head *h = &pool->table.head;
    pthread_mutex_lock(&pool->lock);
    if (!vmem__table_begin(pool, 0)) {
        const uint64_t t = vmem__now();
        // A call that is refused again before the others have given anything does not extend the time.
        if (t - pool->refused_at >= AGAIN_NS) {
            pool->refused_at = 0;
            h->refused =
                sat_add(vmem__pool_free_bytes(pool, NULL), sat_sub(m->entry.has, (held << m->page_shift) + m->granted));
            pool->refusals = ++h->refusals;
            pool->refused_at = t;
        }
        vmem__table_end(pool);
        budget = MIN(budget, held); // the entry follows
        vmem__pool_ring(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return budget;
}

// ---- questions, with the member's lock held -------------------------------------------------------------------------

// With the pool's lock held: asks the other members. Returns how many bytes may still come; if none, *why says why.
//
// If the last question was refused and no call has learned of it, this call returns the refusal, and so do calls within
// TOLD_NS after it. Later calls ask the others again, and so does one before which a member here has freed something.
static uint64_t ask_others(struct vmem__member *m, uint64_t bytes, uint32_t *why)
{
    struct vmem_kv_pool_member *e = &m->entry;
    const uint64_t room = sat_sub(e->max, e->has);
    *why = 0;
    if (bytes > room) {
        vmem__pool_answer(m, VMEM_KV_REFUSED, *why = VMEM_KV_AT_MAXIMUM);
        e->needs = 0;
        return 0;
    }
    if (m->table_error == -EBADMSG || m->unwritten) { // no other member can read the question
        vmem__pool_answer(m, VMEM_KV_REFUSED, *why = VMEM_KV_FILE_DAMAGED);
        e->needs = 0;
        return 0;
    }
    const uint64_t t = vmem__now();
    const bool refused =
        e->answer == VMEM_KV_REFUSED && e->needs && e->needs <= bytes && m->freed_at_refusal == m->pool->freed;
    if (refused && (!m->told_at || t - m->told_at < TOLD_NS)) {
        m->told_at = m->told_at ? m->told_at : t;
        m->asked_at = t;
        *why = e->reason;
        return 0;
    }
    if (e->needs < bytes || e->answer != VMEM_KV_DEFERRED)
        e->asked = 0; // the thread assigns the revision
    m->asked_at = t;
    e->needs = bytes;
    vmem__pool_answer(m, VMEM_KV_DEFERRED, 0);
    m->pool->needed = true;
    vmem__pool_ring(m->pool);
    return bytes;
}

uint64_t vmem__pool_ask(struct vmem__member *m, uint64_t held, uint64_t pages, uint32_t *refusal)
{
    if (!m)
        return 0;
    // Ask for a little more, so that a request that grows page by page does not ask for each page.
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t room = sat_sub(m->entry.max, m->entry.has), exact = pages << m->page_shift;
    const uint64_t bytes = MAX(exact, MIN(exact + (held / 64 << m->page_shift), room));
    const uint64_t coming = ask_others(m, bytes, refusal);
    if (coming) // entry.has: what the member has been granted meanwhile is to be retained, too
        vmem__pool_retain(m, sat_sub(sat_add(m->entry.has, bytes), held << m->page_shift));
    pthread_mutex_unlock(&m->pool->lock);
    return coming ? pages : 0;
}

void vmem__pool_unask(struct vmem__member *m)
{
    if (!m)
        return;
    pthread_mutex_lock(&m->pool->lock);
    vmem__pool_retain(m, 0);
    m->entry.needs = 0;
    vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    pthread_mutex_unlock(&m->pool->lock);
}

void vmem__pool_wake(const struct vmem__member *m)
{
    if (!m)
        return;
    m->pool->freed++;
    if (m->pool->needed)
        vmem__pool_ring(m->pool);
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
        if (pool->table.entries[i].size && i != place)
            all = sat_add(all, pool->table.entries[i].min);
    if (all > budget)
        return vmem__error(-ENOMEM,
                           "min %" PRIu64 ": the minimums of all members would be %" PRIu64 ", over the "
                           "pool's budget of %" PRIu64,
                           min, all, budget);
    return 0;
}

static int change_share(struct vmem__member *m, uint64_t min, uint64_t max)
{
    vmem_kv_pool *pool = m->pool;
    int rc = vmem__table_begin(pool, POOL_CALL_US);
    if (rc)
        return rc;
    if (m->leaving) {
        vmem__table_end(pool);
        return vmem__error(-EINVAL, "the member has left its pool");
    }
    const uint64_t min_before = m->entry.min, max_before = m->entry.max;
    rc = vmem__pool_check(pool, m->place, min, &max);
    if (!rc) {
        m->entry.min = min;
        m->entry.max = max;
        if (min < min_before && m->entry.answer != VMEM_KV_DEFERRED) // only the minimum asked: see grant_free_budget
            m->entry.needs = 0;
    }
    vmem__table_end(pool);
    if (!rc && m->unwritten) {
        m->entry.min = min_before;
        m->entry.max = max_before;
        rc = vmem__table_unwritten(pool);
    }
    if (!rc) // take back grants beyond the new maximum; the entry falls once their memory is back on the device
        m->granted = MIN(m->granted, sat_sub(max, sat_sub(m->entry.has, m->granted)));
    vmem__pool_ring(pool);
    return rc;
}

int vmem__pool_set_share(struct vmem__member *m, uint64_t min, uint64_t max)
{
    pthread_mutex_lock(&m->pool->lock);
    const int rc = change_share(m, min, max);
    pthread_mutex_unlock(&m->pool->lock);
    return rc;
}

// ---- the member as others see it -------------------------------------------------------------------------------------

void vmem__pool_show(struct vmem__member *m, struct vmem_kv_pool_member *out, char path[256])
{
    out->size = 0;
    if (!m)
        return;
    pthread_mutex_lock(&m->pool->lock);
    *out = m->entry;
    pthread_mutex_unlock(&m->pool->lock);
    if (path[0] || !m->pool->path)
        return;
    const size_t length = strlen(m->pool->path), from = length > 255 ? length - 255 : 0;
    memcpy(path, m->pool->path + from, length - from);
}
