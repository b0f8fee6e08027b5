// A member's part of the pool's budget: it claims free budget, asks the other members for more, announces what its
// waiting requests will need, and has a share (a minimum and a maximum).
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "core/memory.h"
#include "pool/pool.h"

#define REFUSED_NS UINT64_C(2000000000) // budget that the device has refused memory for is tried again after this time
#define AGAIN_NS UINT64_C(500000000)    // another refusal within this time counts as the same one
#define TOLD_NS UINT64_C(2000000)       // a member that has learned of a refusal does not ask again within this time
#define ROUND_BYTES (UINT64_C(2) << 30) // device memory that the pool's thread takes for a member in one round
#define PORTION (UINT64_C(32) << 20) // bytes of it in one call, or a larger arena; the budget can grow after each call

_Atomic uint64_t vmem__pool_ask_ns = 250000000;

// ---- the table, with the pool's lock held ----------------------------------------------------------------------------

void vmem__pool_retain(struct vmem__member *m, uint64_t bytes)
{
    if (bytes == m->wants)
        return;
    vmem__expect(m->ctx, (int64_t)(bytes - m->wants), 0);
    m->trim = MAX(m->trim, bytes ? TRIM_NOTHING : TRIM_UNWANTED);
    m->wants = bytes;
}

void vmem__pool_answer(struct vmem__member *m, uint32_t what, uint32_t why)
{
    if (what == VMEM_KV_REFUSED)
        vmem__pool_retain(m, 0);
    if (m->row.answer != what)
        pthread_cond_broadcast(&m->pool->news);
    m->row.answer = what;
    m->row.reason = why;
    m->reserving &= what == VMEM_KV_DEFERRED;
}

// ---- claims, with the member's lock held -----------------------------------------------------------------------------

uint64_t vmem__pool_acceptable_bytes(const struct vmem__member *m)
{
    return m->reserving ? MIN(m->granted, m->ready_bytes) : m->granted;
}

uint64_t vmem__pool_accept(struct vmem__member *m)
{
    const uint64_t pages = floor_pages(vmem__pool_acceptable_bytes(m), m), bytes = pages << m->page_shift;
    m->granted = m->reserving ? m->granted - bytes : 0;
    m->ready_bytes = sat_sub(m->ready_bytes, bytes);
    if (!m->granted && !m->row.needs && m->row.answer == VMEM_KV_DEFERRED)
        vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    return pages;
}

// The bytes that other members wait for. Call it between begin and end.
static uint64_t bytes_others_need(const vmem_kv_pool *pool, const struct vmem__member *m)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *r = &pool->table.rows[i];
        if (r->size && i != m->place && r->answer == VMEM_KV_DEFERRED)
            bytes = sat_add(bytes, r->needs);
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
    // First take back budget that the member was about to give back and its row still has. own: bytes of the row that
    // the member's budget already contains, or has been granted.
    const uint64_t own = ((budget + granted) << m->page_shift) + m->granted;
    uint64_t pages = MIN(floor_pages(sat_sub(MIN(m->row.has, m->row.max), own), m), most);
    m->retained_bytes = MIN(m->retained_bytes, sat_sub(m->row.has, own + (pages << m->page_shift)));
    const bool may_find_more = !m->reserving && pages < most && (pool->free || pages < least);
    if (may_find_more && !(rc = vmem__table_begin(pool))) {
        const uint64_t room = MIN(vmem__pool_free_bytes(pool, m), sat_sub(m->row.max, m->row.has));
        // spare: budget that no member waits for. The rest may have just been given for another member's question.
        const uint64_t spare = MIN(floor_pages(sat_sub(room, bytes_others_need(pool, m)), m), most - pages);
        const uint64_t more = MIN(floor_pages(room, m), MAX(spare, sat_sub(least, pages)));
        const uint64_t before = m->row.has;
        m->row.has += more << m->page_shift;
        vmem__table_end(pool);
        pages += floor_pages(sat_sub(m->row.has, before), m);
    }
    if (pages && m->row.needs) {
        m->row.needs = sat_sub(m->row.needs, pages << m->page_shift);
        if (!m->row.needs && !m->granted)
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
    const uint64_t due = sat_sub(m->row.min, m->row.has), room = sat_sub(m->row.max, m->row.has);
    const uint64_t own = sat_sub(MIN(m->row.has, m->row.max), sat_add(budget << m->page_shift, m->granted));
    const uint64_t more = m->reserving ? vmem__pool_acceptable_bytes(m) : MIN(sat_add(m->pool->free, due), room);
    const uint64_t bytes = sat_add(own, more);
    pthread_mutex_unlock(&m->pool->lock);
    return floor_pages(bytes, m);
}

// ---- a device with less memory than the budget --------------------------------------------------------------------------

// Memory outside the pool, such as contexts and activations, may leave the device less than the pool's budget. The
// table then has free budget without memory behind it, and no member asks the others. So bytes that the device has
// refused do not count as free for a while, and a member that lacks memory asks as in a pool whose budget is used up.
uint64_t vmem__pool_refused(struct vmem__member *m, uint64_t budget, uint64_t held)
{
    if (!m)
        return budget;
    vmem_kv_pool *pool = m->pool;
    struct pool_head *h = &pool->table.head;
    pthread_mutex_lock(&pool->lock);
    if (!vmem__table_begin(pool)) {
        const uint64_t t = vmem__now();
        // A call that is refused again before the others have given anything does not extend the time.
        if (t + REFUSED_NS - AGAIN_NS >= h->refused_until) {
            h->refused_until = 0;
            h->refused =
                sat_add(vmem__pool_free_bytes(pool, NULL), sat_sub(m->row.has, (held << m->page_shift) + m->granted));
            h->refused_until = t + REFUSED_NS;
        }
        vmem__table_end(pool);
        budget = MIN(budget, held); // the row follows
        pool_ring(pool);
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
    struct vmem_kv_pool_member *r = &m->row;
    const uint64_t room = sat_sub(r->max, r->has);
    *why = 0;
    if (bytes > room) {
        vmem__pool_answer(m, VMEM_KV_REFUSED, *why = VMEM_KV_AT_MAXIMUM);
        r->needs = 0;
        return 0;
    }
    if (m->table_error == -EBADMSG || m->unwritten) { // no other member can read the question
        vmem__pool_answer(m, VMEM_KV_REFUSED, *why = VMEM_KV_FILE_DAMAGED);
        r->needs = 0;
        return 0;
    }
    const uint64_t t = vmem__now();
    const bool refused =
        r->answer == VMEM_KV_REFUSED && r->needs && r->needs <= bytes && m->freed_at_refusal == m->pool->freed;
    if (refused && (!m->told_at || t - m->told_at < TOLD_NS)) {
        m->told_at = m->told_at ? m->told_at : t;
        m->asked_at = t;
        *why = r->reason;
        return 0;
    }
    if (r->needs < bytes || r->answer != VMEM_KV_DEFERRED)
        r->asked = 0; // the thread assigns the revision
    m->asked_at = t;
    r->needs = m->announced_pages ? MAX(bytes, MIN(r->needs, room)) : bytes;
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
    const uint64_t coming_already = m->reserving ? m->granted : 0, room = sat_sub(m->row.max, m->row.has);
    const uint64_t exact = sat_sub(pages << m->page_shift, coming_already);
    if (!exact && coming_already) {
        m->asked_at = vmem__now();
        *refusal = 0;
        pthread_mutex_unlock(&m->pool->lock);
        return pages;
    }
    const uint64_t bytes = MAX(exact, MIN(exact + (held / 64 << m->page_shift), room));
    const uint64_t coming = ask_others(m, bytes, refusal);
    if (coming) // row.has: what the member has been granted meanwhile is to be retained, too
        vmem__pool_retain(m, sat_sub(sat_add(m->row.has, bytes), held << m->page_shift));
    pthread_mutex_unlock(&m->pool->lock);
    return coming ? pages : 0;
}

void vmem__pool_unask(struct vmem__member *m)
{
    if (!m)
        return;
    pthread_mutex_lock(&m->pool->lock);
    if (!m->announced_pages)
        vmem__pool_retain(m, 0);
    if (m->row.needs && !m->announced_pages) {
        m->row.needs = 0;
        vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&m->pool->lock);
}

// ---- announced needs --------------------------------------------------------------------------------------------------

// A member knows how much its waiting requests will need in all, long before their steps do. If it asks for the whole
// at once, the other members give it back while the first of these requests is being backed, and the pool's thread
// takes the device memory for it meanwhile.
//
// The driver may let an allocation wait, as for memory that it clears first. So while such a question is open, the
// member's budget grows only by what the thread has taken memory for: a step finds too little budget, and does not wait
// in the driver. (Where memory is populated, not allocated, no driver lets anybody wait, and the budget grows at once.)

uint64_t vmem__pool_announce(struct vmem__member *m, uint64_t budget, uint64_t want, bool part)
{
    // From here on, the budget promised by an earlier answer is the member's own.
    const uint64_t grown = want > budget ? vmem__pool_claim(m, budget, want - budget, want - budget) : 0;
    budget += grown;
    pthread_mutex_lock(&m->pool->lock);
    m->announced_pages = 0; // the new question replaces the last one
    const uint64_t has = budget + floor_pages(m->granted, m);
    uint32_t why;
    if (part)
        want = MIN(want, has + floor_pages(sat_sub(m->row.max, m->row.has), m));
    if (want > has) {
        if (ask_others(m, (want - has) << m->page_shift, &why))
            vmem__pool_retain(m, sat_sub(want << m->page_shift, m->row.held));
        if (!m->reserving) {
            m->reserving = m->row.answer == VMEM_KV_DEFERRED && !m->table_error && m->ops->ready_pages && !m->whole &&
                           !m->ctx->b.ops->populate;
            m->ready_bytes = 0;
        }
    } else {
        m->row.needs = 0;
        if (!m->reserving || want <= budget)
            vmem__pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    m->announced_pages = want;
    m->announced_at = vmem__now();
    pool_ring(m->pool);
    pthread_mutex_unlock(&m->pool->lock);
    return grown;
}

// With the member's lock held.
static void end_announced(struct vmem__member *m)
{
    pthread_mutex_lock(&m->pool->lock);
    m->announced_pages = 0;
    m->reserving = false;
    vmem__pool_retain(m, 0);
    pthread_mutex_unlock(&m->pool->lock);
    if (m->ops->announced_ended)
        m->ops->announced_ended(m->self);
}

void vmem__pool_expire_announced(struct vmem__member *m, uint64_t used)
{
    pthread_mutex_lock(&m->pool->lock);
    const bool asked = m->waiting || vmem__now() - m->announced_at < vmem__pool_ask_ns;
    const bool waits = m->announced_pages && (!asked || used >= m->announced_pages);
    pthread_mutex_unlock(&m->pool->lock);
    if (waits)
        end_announced(m);
}

// Takes device memory until the context has that many bytes of it.
static int take_memory(vmem_context *ctx, uint64_t bytes)
{
    vmem__lock(ctx);
    const uint64_t created = ctx->created;
    vmem__unlock(ctx);
    // Make no call for zero bytes: vmem_prealloc would give up the memory that other members took ahead.
    return bytes > created ? vmem__prealloc(ctx, bytes - created, false) : 0;
}

// The device memory that the pool's thread is to take for a member.
struct ahead {
    uint64_t pages;   // pages to take device memory for
    uint64_t bare;    // pages of the budget without device memory
    uint64_t memory;  // bytes of device memory that the context has
    uint64_t granted; // granted pages that the budget does not have yet
};

// Updates ready_bytes, and counts the memory that the thread is to take.
static struct ahead plan_prealloc(struct vmem__member *m)
{
    struct vmem__member_state s;
    struct ahead a;
    m->ops->lock(m->self);
    m->ops->get_state(m->self, &s);
    const uint64_t there = m->ops->ready_pages(m->self);
    vmem__lock(m->ctx);
    a.memory = m->ctx->committed;
    vmem__unlock(m->ctx);
    pthread_mutex_lock(&m->pool->lock);
    a.granted = m->reserving ? floor_pages(m->granted, m) : 0;
    a.pages = s.target < s.budget ? 0 : sat_sub(MIN(m->announced_pages, s.budget + a.granted), there);
    a.bare = sat_sub(s.budget, there);
    const uint64_t ready = a.pages ? sat_sub(there, s.budget) << m->page_shift : m->granted;
    m->ready_bytes = MIN(m->granted, MAX(m->ready_bytes, ready)); // never less than a call was told
    pthread_mutex_unlock(&m->pool->lock);
    m->ops->unlock(m->self);
    return a;
}

bool vmem__pool_prealloc(struct vmem__member *m)
{
    // Pages that go together get allocations of their own, in the sizes that a request turns out to need.
    if (!m->ops->ready_pages || m->whole)
        return false;
    pthread_mutex_lock(&m->pool->lock);
    const bool waits = m->announced_pages;
    pthread_mutex_unlock(&m->pool->lock);
    if (!waits)
        return false;
    struct ahead a = plan_prealloc(m);
    if (!a.pages)
        return a.granted;
    const uint64_t portion = MAX(PORTION, m->ctx->b.arena_max) >> m->page_shift;
    for (uint64_t left = MAX(ROUND_BYTES >> m->page_shift, portion); a.pages && left >= portion; left -= portion) {
        const uint64_t n = MIN(a.pages, portion), covers = MIN(a.bare, n);
        a.memory += n << m->page_shift;
        if (take_memory(m->ctx, a.memory)) { // the device has too little: steps take what they need
            m->ops->lock(m->self);
            end_announced(m);
            m->ops->unlock(m->self);
            return a.granted;
        }
        pthread_mutex_lock(&m->pool->lock);
        m->ready_bytes = MIN(m->granted, m->ready_bytes + ((n - covers) << m->page_shift));
        pthread_mutex_unlock(&m->pool->lock);
        a.pages -= n;
        a.bare -= covers;
    }
    return true;
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
            all = sat_add(all, pool->table.rows[i].min);
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
    if (!rc) { // take back grants beyond the new maximum; the row falls once their memory is back on the device
        m->granted = MIN(m->granted, sat_sub(max, sat_sub(m->row.has, m->granted)));
        m->ready_bytes = MIN(m->ready_bytes, m->granted);
    }
    pool_ring(pool);
    return rc;
}
