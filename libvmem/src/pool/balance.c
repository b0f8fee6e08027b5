// Moves a pool's budget between its members. A call takes budget that is free, and a thread does the rest.
//
// A member's row states its part of the pool's budget. The cache's own budget never exceeds that part. A grant enters
// the row before the cache uses it. Budget that the cache gives back leaves the row only after its pages are unmapped
// and their memory is back on the device. So the members together never have more than the pool, even if a process dies
// at any moment.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

#include "core/memory.h"
#include "pool/pool.h"

#define POLL_MS 100                 // longest delay of reading the others' rows without a notice, and of updating ours
#define BURY_NS UINT64_C(100000000) // interval between searches for members whose process has ended
#define SILENT_NS UINT64_C(2000000000) // a member that answers nothing for so long is not waited for

void vmem__kv_pool_wake(const vmem_kv *kv)
{
    if (kv->member)
        kv_ring(kv->member->pool);
}

// ---- the table, with the pool's lock held ------------------------------------------------------------------------

uint64_t vmem__kv_pool_free(const vmem_kv_pool *pool, const struct kv_member *m)
{
    uint64_t taken = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (r->number)
            taken = kv_add(taken, m && m->place == i ? m->row.has : KV_MAX(r->has, r->min));
    }
    return kv_less(pool->table.head.budget, taken);
}

void vmem__kv_pool_note(vmem_kv_pool *pool) { pool->free = vmem__kv_pool_free(pool, NULL); }

void vmem__kv_pool_answer(struct kv_member *m, uint32_t what, uint32_t why)
{
    if (m->row.answer != what)
        pthread_cond_broadcast(&m->pool->news);
    m->changed |= m->row.answer != what || m->row.reason != why;
    m->row.answer = what;
    m->row.reason = why;
    m->prepares &= what == VMEM_KV_DEFERRED;
}

// ---- calls, with api and state held ------------------------------------------------------------------------------

// What the budget may have of what the pool has granted.
static uint64_t acceptable(const struct kv_member *m)
{
    return m->prepares ? KV_MIN(m->granted, m->ready) : m->granted;
}

// The cache's budget grows by that. Whoever comes first does this: the pool's thread, or a call that is short.
static uint64_t accept(struct kv_member *m)
{
    const uint64_t pages = kv_floor_pages(acceptable(m), m->kv), bytes = pages << m->kv->page_shift;
    m->kv->budget_pages += pages;
    m->granted = m->prepares ? m->granted - bytes : 0;
    m->ready = kv_less(m->ready, bytes);
    if (!m->granted && !m->row.needs && m->row.answer == VMEM_KV_DEFERRED)
        vmem__kv_pool_answer(m, VMEM_KV_APPLIED, 0);
    return pages;
}

bool vmem__kv_claim(vmem_kv *kv, uint64_t least, uint64_t most)
{
    struct kv_member *m = kv->member;
    vmem_kv_pool *pool = m->pool;
    int rc = 0;
    kv->giving = false; // a cache that is short itself keeps what it has not given back yet
    pthread_mutex_lock(&pool->lock);
    const uint64_t granted = accept(m);
    least = kv_less(least, granted);
    most = kv_less(most, granted);
    // First take back the budget that the cache was about to give back and still has.
    const uint64_t had = (kv->budget_pages << kv->page_shift) + m->granted;
    uint64_t pages = KV_MIN(kv_floor_pages(kv_less(KV_MIN(m->row.has, m->row.max), had), kv), most);
    const bool worth = !m->prepares && pages < most && (pool->free || pages < least);
    if (worth && !(rc = vmem__kv_share_begin(pool))) {
        const uint64_t room = KV_MIN(vmem__kv_pool_free(pool, m), kv_less(m->row.max, m->row.has));
        // Budget to spare is what nobody waits for: it may be what another member has just given for a question.
        const uint64_t spare = KV_MIN(kv_floor_pages(kv_less(room, kv_needs_of_others(pool, m)), kv), most - pages);
        const uint64_t more = KV_MIN(kv_floor_pages(room, kv), KV_MAX(spare, kv_less(least, pages)));
        const uint64_t before = m->row.has;
        m->row.has += more << kv->page_shift;
        m->changed |= more != 0;
        vmem__kv_share_end(pool, false);
        pages += kv_floor_pages(kv_less(m->row.has, before), kv);
        vmem__kv_pool_note(pool);
    }
    kv->budget_pages += pages;
    if (pages && m->row.needs) {
        m->row.needs = kv_less(m->row.needs, pages << kv->page_shift);
        m->changed = true;
        if (!m->row.needs && !m->granted)
            vmem__kv_pool_answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&pool->lock);
    return !rc;
}

void vmem__kv_claim_for(vmem_kv *kv, uint64_t pages)
{
    if (!kv->member || !pages || kv->held + pages <= kv->budget_pages)
        return;
    if (!kv->giving || kv->held - vmem__kv_reclaimable(kv) + pages > kv->budget_pages)
        vmem__kv_claim(kv, kv->held + pages - kv->budget_pages, kv->held + pages + kv->held / 2 - kv->budget_pages);
}

uint64_t vmem__kv_claimable(const vmem_kv *kv)
{
    struct kv_member *m = kv->member;
    if (!m)
        return 0;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t due = kv_less(m->row.min, m->row.has), room = kv_less(m->row.max, m->row.has);
    const uint64_t own =
        kv_less(KV_MIN(m->row.has, m->row.max), kv_add(kv->budget_pages << kv->page_shift, m->granted));
    const uint64_t more = m->prepares ? acceptable(m) : KV_MIN(kv_add(m->pool->free, due), room);
    const uint64_t bytes = kv_add(own, more);
    pthread_mutex_unlock(&m->pool->lock);
    return kv_floor_pages(bytes, kv);
}

void vmem__kv_claim_plenty(vmem_kv *kv)
{
    if (!kv->member || kv->giving || !kv->member->pool->free)
        return;
    const uint64_t want = kv->held + kv->held / 2;
    if (want > kv->budget_pages && kv_unused(kv) < 2 * kv_low(kv) + kv->held / 8)
        vmem__kv_claim(kv, 0, want - kv->budget_pages);
}

// ---- shares ------------------------------------------------------------------------------------------------------

// Whether the minimums of all members still fit if this one becomes `min`. Call it between begin and end.
static int check_minimums(const vmem_kv_pool *pool, uint32_t place, uint64_t min)
{
    uint64_t all = min;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        if (pool->table.rows[i].number && i != place)
            all = kv_add(all, pool->table.rows[i].min);
    if (all > pool->table.head.budget)
        return vmem__error(-ENOMEM,
                           "min %" PRIu64 ": the minimums of all members would be %" PRIu64 ", over the "
                           "pool's budget of %" PRIu64,
                           min, all, pool->table.head.budget);
    return 0;
}

int vmem__kv_pool_check(const vmem_kv_pool *pool, uint32_t place, uint64_t min, uint64_t *max)
{
    const uint64_t budget = pool->table.head.budget;
    if (!*max || *max > budget)
        *max = budget;
    if (min > *max)
        return vmem__error(-EINVAL, "min %" PRIu64 " is over max, %" PRIu64, min, *max);
    return check_minimums(pool, place, min);
}

int vmem__kv_pool_set_share(struct kv_member *m, uint64_t min, uint64_t max, uint32_t *why)
{
    vmem_kv_pool *pool = m->pool;
    int rc = vmem__kv_share_wait(pool, KV_POOL_CALL_US);
    if (rc)
        return rc;
    *why = VMEM_KV_AT_MINIMUM;
    const uint64_t min_before = m->row.min, max_before = m->row.max;
    rc = vmem__kv_pool_check(pool, m->place, min, &max);
    if (!rc) {
        m->row.min = min;
        m->row.max = max;
        m->changed = true;
    }
    vmem__kv_share_end(pool, false);
    if (!rc && m->changed) {
        m->row.min = min_before;
        m->row.max = max_before;
        rc = vmem__kv_share_unwritten(pool);
    }
    vmem__kv_pool_note(pool);
    kv_ring(pool);
    return rc;
}

// ---- the thread --------------------------------------------------------------------------------------------------

// Requests that are swapped out count: they come back.
static bool has_taken_slots(const vmem_kv *kv)
{
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv->slots[s].state != VMEM_KV_FREE)
            return true;
    return false;
}

// The smallest budget that the cache can shrink to now.
static uint64_t least_pages(vmem_kv *kv, const struct kv_member *m)
{
    const uint64_t fixed = vmem__kv_fixed(kv);
    const uint64_t margin = has_taken_slots(kv) ? fixed / 32 : 0;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t min = kv_ceil_pages(m->row.min, kv);
    pthread_mutex_unlock(&m->pool->lock);
    return KV_MAX(min, fixed + margin);
}

// The pages that the cache has after what it is giving back has gone.
static uint64_t pages_after(const vmem_kv *kv) { return kv->giving ? kv->give_to : kv->budget_pages; }

// From now on, the background thread gives back what the cache holds beyond `pages`. The budget falls as the pages go,
// so that a step that needs pages meanwhile does not wait for all of them.
static void give_down_to(vmem_kv *kv, uint64_t pages)
{
    kv->give_to = pages;
    kv->giving = kv->held > pages;
    if (kv->giving)
        vmem__kv_worker_wake(kv);
    else
        kv_shrink_budget(kv, pages);
}

// The pages that a step may need next: requests grow by a page in each tensor at a time.
static uint64_t next_pages(const vmem_kv *kv)
{
    uint64_t pages = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        pages += kv->slots[s].state == VMEM_KV_ACTIVE ? kv->n_tensors : 0;
    return pages;
}

// A cache without a background thread gives pages back here, one portion at a time.
static void give_portion(vmem_kv *kv)
{
    if (kv->held > kv->give_to && !kv->has_worker)
        vmem__kv_reclaim(kv, KV_MIN(kv->held - kv->give_to, kv->portion), true, NULL);
}

// Continues to shrink a cache that is idle or was asked to give. Returns true if there is more to do at once.
static bool go_on_giving(struct kv_member *m, uint64_t least)
{
    vmem_kv *kv = m->kv;
    if (kv->gave && pages_after(kv) > least) // idle
        give_down_to(kv, least);
    if (!kv->giving)
        return false;
    give_portion(kv);
    const bool at_work = kv->has_worker && (kv->work_due || kv->working);
    kv_shrink_budget(kv, KV_MIN(kv->budget_pages, KV_MAX(kv->give_to, kv->held + next_pages(kv))));
    if (kv->held <= kv->give_to || (!at_work && (kv->has_worker || !vmem__kv_spare(kv)))) {
        kv_shrink_budget(kv, KV_MAX(kv->give_to, kv->held)); // if pages are left, they cannot be given back now
        kv->giving = false;
    }
    return kv->giving && !kv->has_worker;
}

// Applies a limit that another process wants.
static void take_wanted(struct kv_member *m, uint64_t bytes)
{
    uint32_t why = VMEM_KV_NO_MEMORY;
    pthread_mutex_lock(&m->pool->lock);
    int rc = vmem__kv_pool_set_share(m, m->row.min, bytes, &why);
    if (rc == -EBADMSG)
        why = VMEM_KV_FILE_DAMAGED;
    pthread_mutex_unlock(&m->pool->lock);
    if (rc == -EAGAIN) { // another process holds the lock: try again, with this limit or a newer one
        vmem__kv_keep_wanted(m->kv, bytes);
        return;
    }
    kv_lock_cache(m->kv);
    vmem__kv_summarise(m->kv); // whoever reads the answer finds the new maximum
    vmem__kv_answer_wanted(m->kv, bytes, rc ? VMEM_KV_REFUSED : VMEM_KV_APPLIED, rc ? why : 0);
    kv_unlock_cache(m->kv);
}

// Gives back what a member has beyond its maximum, except pages that requests need. Those follow when the requests end.
static void keep_to_max(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t most = kv_floor_pages(m->row.max, kv);
    pthread_mutex_unlock(&m->pool->lock);
    const uint64_t least = KV_MAX(most, vmem__kv_fixed(kv));
    if (!kv->giving && kv->budget_pages > least)
        give_down_to(kv, least);
}

// Updates a member's row: budget that the cache no longer has returns to the pool. Returns true if there is more to do.
static bool look(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    vmem_kv_pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    m->saw = pool->table.head.revision;
    pthread_mutex_unlock(&pool->lock);
    kv_lock_cache(kv);
    const uint64_t wanted = vmem__kv_wanted_budget(kv);
    if (wanted) {
        kv_unlock_cache(kv);
        take_wanted(m, wanted);
        kv_lock_cache(kv);
    }
    vmem__kv_look_ahead(m);
    keep_to_max(m);
    const bool more = go_on_giving(m, least_pages(kv, m));
    const uint64_t gone_to = KV_MAX(kv->budget_pages, kv->held);
    const bool less = m->taken_ahead || kv->held << kv->page_shift < m->row.held;
    pthread_mutex_lock(&pool->lock);
    const bool trim = less && (gone_to << kv->page_shift) + m->granted < m->row.has;
    pthread_mutex_unlock(&pool->lock);
    m->taken_ahead &= !trim;
    kv_unlock_cache(kv);
    if (trim) // free the memory before the row offers it to the other members
        vmem__kv_trim(kv);

    kv_lock_cache(kv);
    const uint64_t least = least_pages(kv, m), has = KV_MAX(kv->budget_pages, kv->held);
    const uint64_t evictable = m->evict ? kv->refs.only : vmem__kv_evictable(kv);
    pthread_mutex_lock(&pool->lock);
    const uint64_t min = kv_ceil_pages(m->row.min, kv);
    const struct kv_pool_row before = m->row;
    // A claim may have taken back part of the budget meanwhile.
    m->row.has = KV_MIN(m->row.has, (KV_MAX(has, gone_to) << kv->page_shift) + m->granted);
    m->row.held = kv->held << kv->page_shift;
    m->row.could_give = kv_less(has, KV_MAX(least - KV_MIN(least, evictable), min)) << kv->page_shift;
    m->row.giving = kv_less(m->row.has - m->granted, pages_after(kv) << kv->page_shift);
    // Publish free budget at once. Other changes may be published some milliseconds late, but are not forgotten.
    m->changed |= m->row.has != before.has || (!m->row.giving && before.giving);
    if (memcmp(&m->written, &m->row, sizeof m->row) && kv_now() - m->written_at > POLL_MS * UINT64_C(1000000))
        m->changed = true;
    pthread_mutex_unlock(&pool->lock);
    kv_unlock_cache(kv);
    return more;
}

// Notes which members owe the others something and do nothing about it: their row does not change.
static void listen(vmem_kv_pool *pool, uint64_t t)
{
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        struct kv_pool_seen *seen = &pool->seen[i];
        const bool owes = r->giving || r->looked < pool->table.head.revision;
        if (owes && !kv_own(pool, i) && !memcmp(r, &seen->row, sizeof(*r)))
            continue;
        seen->row = *r;
        seen->at = t;
    }
}

// A process may be stopped, or wait in its driver for ever. Nobody else must wait for it.
static bool silent(const vmem_kv_pool *pool, uint32_t place) { return kv_now() - pool->seen[place].at > SILENT_NS; }

// The needs that neither free budget nor budget being given back covers.
static uint64_t unmet(const vmem_kv_pool *pool)
{
    uint64_t needs = 0, coming = vmem__kv_pool_free(pool, NULL);
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (!r->number || silent(pool, i))
            continue;
        needs = kv_add(needs, r->needs);
        coming = kv_add(coming, r->giving);
    }
    return kv_less(needs, coming);
}

static void grant(vmem_kv_pool *pool, struct kv_member *m, bool *head)
{
    struct kv_pool_row *r = &m->row;
    if (m->leaving)
        r->needs = 0;
    else if (r->has < r->min && r->needs < r->min - r->has) { // a member gets its minimum without asking
        r->needs = r->min - r->has;
        m->asked_at = kv_now();
        m->changed = true;
    }
    if (!r->needs)
        return;
    if (!m->waiting && kv_now() - m->asked_at > vmem__kv_ask_ns) {
        r->needs = 0;
        vmem__kv_pool_answer(m, VMEM_KV_UNASKED, 0);
        m->changed = true;
        return;
    }
    const uint64_t unused = vmem__kv_pool_free(pool, m);
    uint64_t room = KV_MIN(KV_MIN(unused, kv_less(r->max, r->has)), r->needs);
    const uint64_t whole = kv_ceil_pages(room, m->kv) << m->kv->page_shift;
    room = whole <= unused ? whole : kv_floor_pages(room, m->kv) << m->kv->page_shift;
    if (room) {
        r->has += room;
        m->granted += room;
        r->needs = kv_less(r->needs, room);
        m->changed = true;
    }
    if (!r->needs) {
        m->changed = true; // the answer follows once the budget has grown
    } else if (!r->asked) {
        r->asked = ++pool->table.head.revision;
        *head = m->changed = true;
    }
    pool->table.rows[m->place] = *r;
}

// Decides how much a member gives, and records its reply. It refuses only questions that are older than the look at its
// cache, because requests may have begun or ended since. Returns true if a younger one waits for another look.
static bool give(vmem_kv_pool *pool, struct kv_member *m)
{
    struct kv_pool_row *r = &m->row;
    const uint64_t wanted = kv_less(unmet(pool), r->needs);
    // A member that waits for memory itself gives none. A refused member gives: it may have stopped trying.
    const bool waits = r->needs && r->answer != VMEM_KV_REFUSED;
    const uint64_t could = waits || m->leaving ? 0 : kv_less(r->could_give, r->giving);
    const uint64_t bytes = KV_MIN(wanted, could);
    const uint64_t revision = pool->table.head.revision;
    const uint64_t looked = wanted && !bytes && !m->leaving ? KV_MAX(m->saw, r->looked) : revision;
    const bool asked = r->looked < looked;
    uint32_t reply = r->reply, why = 0;
    if (bytes) {
        m->to_give += bytes;
        r->giving += bytes;
        m->changed = true;
    }
    if (r->giving)
        reply = VMEM_KV_DEFERRED;
    else if (asked && wanted && !bytes)
        reply = VMEM_KV_REFUSED;
    else if (asked || reply == VMEM_KV_DEFERRED)
        reply = VMEM_KV_APPLIED;
    if (reply == VMEM_KV_REFUSED)
        why = r->has <= r->min ? VMEM_KV_AT_MINIMUM : VMEM_KV_IN_USE;
    m->changed |= asked || reply != r->reply || why != r->why;
    r->looked = looked;
    r->reply = reply;
    r->why = why;
    pool->table.rows[m->place] = *r;
    return looked < revision;
}

static void refuse(struct kv_member *m, uint32_t why)
{
    m->refused_at = kv_now();
    vmem__kv_pool_answer(m, VMEM_KV_REFUSED, why);
}

// Refuses a member's request for budget when no other member can still give.
static void judge(const vmem_kv_pool *pool, struct kv_member *m)
{
    uint32_t why = VMEM_KV_AT_MINIMUM;
    if (!m->row.needs || m->granted || m->row.answer != VMEM_KV_DEFERRED)
        return;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (!r->number || i == m->place)
            continue;
        const bool owes = r->looked < m->row.asked || r->giving;
        if (owes && !silent(pool, i))
            return;
        if (owes)
            why = VMEM_KV_NO_ANSWER;
        else if (why == VMEM_KV_AT_MINIMUM && (r->why == VMEM_KV_IN_USE || r->needs))
            why = VMEM_KV_IN_USE;
    }
    refuse(m, why);
}

// Returns true if another round is due at once.
static bool decide(vmem_kv_pool *pool)
{
    bool head = false, again = false;
    const int rc = vmem__kv_share_wait(pool, KV_POOL_WAIT_US);
    const uint64_t t = kv_now();
    pool->locked_at = rc != -EAGAIN || !pool->locked_at ? t : pool->locked_at;
    const bool locked = t - pool->locked_at > SILENT_NS;
    for (struct kv_member *m = pool->members; m && (rc == -EBADMSG || locked); m = m->next)
        if (m->row.needs) // no other member will read the question
            refuse(m, locked ? VMEM_KV_NO_ANSWER : VMEM_KV_FILE_DAMAGED);
    if (rc)
        return false;
    if (t - pool->buried_at > BURY_NS) {
        pool->buried_at = t;
        vmem__kv_share_bury(pool);
    }
    listen(pool, t);
    for (struct kv_member *m = pool->members; m; m = m->next)
        grant(pool, m, &head);
    for (struct kv_member *m = pool->members; m; m = m->next)
        again |= give(pool, m);
    for (struct kv_member *m = pool->members; m; m = m->next)
        judge(pool, m);
    vmem__kv_share_end(pool, head);
    for (struct kv_member *m = pool->members; m; m = m->next)
        if (m->changed && m->row.needs) // no other member can read the question
            refuse(m, VMEM_KV_FILE_DAMAGED);
    vmem__kv_pool_note(pool);
    return again;
}

// Applies the decisions to the cache. Returns true if there is more to do at once.
static bool apply(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    vmem_kv_pool *pool = m->pool;
    uint64_t evict = 0;
    pthread_mutex_lock(&pool->lock);
    const bool any = acceptable(m) >> kv->page_shift || m->to_give;
    pthread_mutex_unlock(&pool->lock);
    if (!any)
        return false;
    kv_lock_cache(kv);
    pthread_mutex_lock(&pool->lock);
    accept(m);
    const uint64_t bytes = m->to_give;
    m->to_give = 0;
    pthread_mutex_unlock(&pool->lock);
    if (bytes) {
        const uint64_t least = least_pages(kv, m), want = kv_ceil_pages(bytes, kv);
        const uint64_t pages = KV_MIN(want, kv_less(pages_after(kv), least));
        if (pages)
            give_down_to(kv, pages_after(kv) - pages);
        if (want > pages && m->evict) {
            evict = KV_MIN(want - pages, kv->refs.only);
        } else if (want > pages && vmem__kv_evictable(kv)) { // evict one portion of hashed blocks per round
            vmem__kv_worker_hold(kv);
            vmem__kv_hash_evict(kv, KV_MIN(want - pages, KV_MAX(kv->portion, kv->block)));
            vmem__kv_worker_release(kv);
        }
    }
    kv_unlock_cache(kv);
    if (evict && m->evict(m->arg, evict)) // the next round gives the budget that this freed
        return true;
    return bytes != 0;
}

// Serves every member of this process once. Returns true if another round is due at once.
static bool round_of(vmem_kv_pool *pool)
{
    bool again = false;
    for (int pass = 0; pass < 2; pass++) {
        for (struct kv_member *m = pool->members; m; m = m->next) {
            if (m->leaving)
                continue;
            m->busy = true;
            pthread_mutex_unlock(&pool->lock);
            again |= pass ? apply(m) : look(m);
            again |= pass && vmem__kv_prepare(m);
            pthread_mutex_lock(&pool->lock);
            m->busy = false;
            pthread_cond_broadcast(&pool->news);
        }
        if (!pass)
            again |= decide(pool);
    }
    return again;
}

static bool restless(const vmem_kv_pool *pool)
{
    for (const struct kv_member *m = pool->members; m; m = m->next)
        if ((m->row.needs && m->row.answer == VMEM_KV_DEFERRED) || m->row.giving)
            return true;
    return false;
}

static void wait_for_news(vmem_kv_pool *pool, int ms)
{
    struct pollfd fds[2] = {{.fd = pool->bell, .events = POLLIN}, {.fd = pool->watch, .events = POLLIN}};
    char notes[1024] __attribute__((aligned(8)));
    uint64_t rings;
    if (poll(fds, 2, ms) <= 0)
        return;
    if (fds[0].revents)
        (void)!read(pool->bell, &rings, sizeof rings);
    while (fds[1].revents & POLLIN && read(pool->watch, notes, sizeof notes) > 0)
        ;
}

void *vmem__kv_pool_work(void *arg)
{
    vmem_kv_pool *pool = arg;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        const bool again = round_of(pool), soon = restless(pool);
        pthread_mutex_unlock(&pool->lock);
        if (!again) {
            const int poll_ms = pool->fd >= 0 && pool->watch < 0 ? 5 : POLL_MS;
            wait_for_news(pool, soon ? 5 : poll_ms);
        }
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}
