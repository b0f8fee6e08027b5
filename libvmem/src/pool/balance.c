// Moves a pool's budget between its members. A member's call takes free budget at once; the pool's thread does the
// rest.
//
// A member's entry states its part of the pool's budget. The member's own budget never exceeds that part. A grant
// enters the entry before the member uses it. Budget that the member gives back leaves the entry only after its pages
// are unmapped and their memory is back on the device. So the members together never have more than the pool, even if a
// process dies at any moment.
//
// If another member of the same context waits, the memory need not go to the device and come back. It stays in the
// context, and in the giver's entry as `retained_bytes`, until update_table() moves it from entry to entry under the
// table's lock. Memory that nobody takes there goes back to the device at the next look, and only then leaves the
// entry.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

#include "pool/pool.h"

#define REAP_NS UINT64_C(100000000)  // interval between searches for members whose process has ended
#define ROUND_NS UINT64_C(250000000) // of the time between two rounds, so much counts as the thread's

_Atomic uint64_t vmem__pool_silent_ns = 2000000000;

// ---- the thread --------------------------------------------------------------------------------------------------

// The smallest budget that a member in this state can shrink to now.
static uint64_t least_pages(const struct vmem__member *m, const struct vmem__member_state *s)
{
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t min = ceil_pages(m->entry.min, m);
    pthread_mutex_unlock(&m->pool->lock);
    return MAX(min, s->min_pages + s->margin);
}

// Gives back what a member has beyond its maximum, except pages that it needs. Those follow when it no longer does.
void vmem__pool_keep_to_max(struct vmem__member *m)
{
    struct vmem__member_state s;
    m->ops->get_state(m->self, &s);
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t least = MAX(floor_pages(m->entry.max, m), s.min_pages);
    pthread_mutex_unlock(&m->pool->lock);
    if (s.target == s.budget && s.budget > least)
        m->ops->lower_budget(m->self, least);
}

// Bytes of device memory that the context retains for waiting members and that no entry has, at most `fall`, by which
// this member's entry is about to fall.
static uint64_t uncovered_bytes(const struct vmem__member *m, uint64_t fall)
{
    uint64_t entries = 0;
    for (const struct vmem__member *o = m->pool->members; o; o = o->next)
        entries += o->ctx == m->ctx ? o->entry.has : 0;
    uint64_t device_bytes;
    const uint64_t retained = vmem__retained(m->ctx, &device_bytes);
    return MIN(fall, MIN(retained, sat_sub(device_bytes, entries)));
}

// ---- a look at a member ---------------------------------------------------------------------------------------------
//
// The thread shrinks the member, returns the memory of released pages, and only then lowers the entry.

// With the member's lock held: continues to shrink it. Returns true if there is more to do.
static bool shrink_member(struct vmem__member *m, struct vmem__member_state *s)
{
    vmem__pool_keep_to_max(m);
    m->ops->get_state(m->self, s);
    const bool more = m->ops->continue_lowering && m->ops->continue_lowering(m->self, least_pages(m, s));
    m->ops->get_state(m->self, s);
    return more;
}

// With the member's lock held: true if unused memory of the context must go back before the entry falls to `pages`. It
// belongs to no particular member of the context, and this member's entry may be what accounts for it. *keep_retained:
// what members wait for may stay. It may not if nobody took it when it was retained, or if the table may say that it is
// free.
static bool must_trim(const struct vmem__member *m, uint64_t pages, bool *keep_retained)
{
    const bool unwanted = vmem__has_unwanted(m->ctx);
    pthread_mutex_lock(&m->pool->lock);
    const bool falls = (pages << m->page_shift) + m->granted < m->entry.has;
    *keep_retained = !m->retained_bytes && !m->unwritten;
    pthread_mutex_unlock(&m->pool->lock);
    return falls || unwanted || !*keep_retained;
}

// With the member's lock held: updates the entry. before_trim: the pages that the member had then. keep_retained: of
// must_trim. revision: of the last question when the look began.
static void write_entry(struct vmem__member *m, uint64_t before_trim, bool keep_retained, uint64_t revision)
{
    struct vmem__member_state s;
    m->ops->get_state(m->self, &s);
    const uint64_t least = least_pages(m, &s), has = MAX(s.budget, s.held);
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t min = ceil_pages(m->entry.min, m), before = m->entry.has;
    m->releasing = s.releasing;
    m->saw_revision = s.releasing ? m->saw_revision : revision;
    // A claim may have taken back part of the budget meanwhile.
    m->entry.has = MIN(m->entry.has, (MAX(has, before_trim) << m->page_shift) + m->granted);
    m->retained_bytes = keep_retained ? uncovered_bytes(m, before - m->entry.has) : 0;
    m->entry.has += m->retained_bytes;
    m->entry.held = s.held << m->page_shift;
    m->entry.could_give = sat_sub(has, MAX(least - MIN(least, s.evictable), min)) << m->page_shift;
    m->entry.giving = sat_sub(m->entry.has - m->granted, s.target << m->page_shift);
    pthread_mutex_unlock(&m->pool->lock);
}

// Looks at a member. Returns true if there is more to do.
static bool refresh_member(struct vmem__member *m)
{
    struct vmem__member_state s;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t revision = m->pool->table.head.revision;
    // A member that neither asks nor waits any more does not want retained memory.
    if (!m->waiting && vmem__now() - m->asked_at > vmem__pool_ask_ns)
        vmem__pool_retain(m, 0);
    pthread_mutex_unlock(&m->pool->lock);
    m->ops->lock(m->self);
    const bool more = shrink_member(m, &s);
    const uint64_t before_trim = MAX(s.budget, s.held);
    bool keep_retained;
    if (must_trim(m, before_trim, &keep_retained)) {
        m->ops->unlock(m->self);
        m->ops->trim(m->self, keep_retained);
        m->ops->lock(m->self);
    }
    write_entry(m, before_trim, keep_retained, revision);
    m->ops->unlock(m->self);
    return more;
}

// ---- decisions ------------------------------------------------------------------------------------------------------

// Notes when each member last answered. A member that owes the others pages or an answer, and whose entry has not
// changed, keeps its old time.
static void note_replies(vmem_kv_pool *pool)
{
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *e = &pool->table.entries[i];
        struct pool_seen *seen = &pool->seen[i];
        const bool owes = e->giving || e->looked < pool->table.head.revision;
        if (owes && !pool_owns(pool, i) && !memcmp(e, &seen->entry, sizeof(*e)))
            continue;
        seen->entry = *e;
        seen->at = pool->ran;
    }
}

// True if a member has owed something for too long. Its process may be stopped, or wait in the driver for ever.
static bool has_timed_out(const vmem_kv_pool *pool, uint32_t place)
{
    return pool->ran - pool->seen[place].at > vmem__pool_silent_ns;
}

// The bytes that members need and that neither free budget nor budget being given back covers. first: what counts as
// being given is what members give that give first, as the others take longer and may hold what is dear.
static uint64_t unmet_bytes(const vmem_kv_pool *pool, bool first)
{
    uint64_t needs = 0, coming = vmem__pool_free_bytes(pool, NULL);
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *e = &pool->table.entries[i];
        if (!e->size || has_timed_out(pool, i))
            continue;
        needs = sat_add(needs, e->needs);
        coming = sat_add(coming, !first || e->gives_first ? e->giving : 0);
    }
    return sat_sub(needs, coming);
}

// Grants a member free budget for what it needs, at least its minimum. A question that nobody repeats lapses here.
static void grant_free_budget(vmem_kv_pool *pool, struct vmem__member *m)
{
    struct vmem_kv_pool_member *e = &m->entry;
    if (m->leaving)
        e->needs = 0;
    else if (e->has < e->min && e->needs < e->min - e->has) { // a member gets its minimum without asking
        e->needs = e->min - e->has;
        m->asked_at = vmem__now();
    }
    if (!e->needs)
        return;
    if (!m->waiting && vmem__now() - m->asked_at > vmem__pool_ask_ns) {
        e->needs = 0;
        vmem__pool_answer(m, VMEM_KV_UNASKED, 0);
        return;
    }
    const uint64_t unused = vmem__pool_free_bytes(pool, m);
    uint64_t grant = MIN(MIN(unused, sat_sub(e->max, e->has)), e->needs);
    const uint64_t whole = ceil_pages(grant, m) << m->page_shift;
    grant = whole <= unused ? whole : floor_pages(grant, m) << m->page_shift;
    if (grant) {
        e->has += grant;
        m->granted += grant;
        e->needs = sat_sub(e->needs, grant); // at 0, the answer follows once the budget has grown
    }
    if (e->needs && !e->asked)
        e->asked = ++pool->table.head.revision;
    pool->table.entries[m->place] = *e;
}

// Grants the memory that a member's entry retains to waiting members of its context. Returns true if some is left,
// which the next look at the member returns to the device.
static bool grant_within_context(vmem_kv_pool *pool, struct vmem__member *m)
{
    uint64_t left = m->retained_bytes;
    struct vmem_kv_pool_member *e = &m->entry;
    if (!left)
        return false;
    e->has -= left;
    pool->table.entries[m->place] = *e;
    for (struct vmem__member *o = pool->members; o; o = o->next) {
        const uint64_t before = o->entry.has;
        if (o == m || o->ctx != m->ctx)
            continue;
        grant_free_budget(pool, o);
        left = sat_sub(left, o->entry.has - before);
    }
    e->has += left;
    e->giving = sat_sub(e->giving, m->retained_bytes - left);
    pool->table.entries[m->place] = *e;
    m->retained_bytes = left;
    return left;
}

// The bytes that members of other processes which give first could give, and may still: they have not answered yet.
// *giving: one of them gives now. A member that others have waited for too long does not count.
static uint64_t due_first(const vmem_kv_pool *pool, bool *giving)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *e = &pool->table.entries[i];
        if (!e->size || !e->gives_first || pool_owns(pool, i) || has_timed_out(pool, i))
            continue;
        *giving |= e->giving != 0;
        if (!e->needs && e->looked < pool->table.head.revision)
            bytes = sat_add(bytes, sat_sub(e->could_give, e->giving));
    }
    return bytes;
}

// Decides how much a member gives, and records its reply; apply_decisions() carries it out. A member that gives nothing
// answers only questions that are older than the thread's look at it, because requests may have begun or ended since: it
// refuses them, or its entry says what it could give. Nor does it answer one that it leaves to members which give first:
// should they give less, the rest is still its own to give. Returns true if a younger question waits for another look.
static bool answer_questions(vmem_kv_pool *pool, struct vmem__member *m)
{
    struct vmem_kv_pool_member *e = &m->entry;
    const uint64_t unmet = sat_sub(unmet_bytes(pool, e->gives_first), e->needs);
    // A member that waits for memory itself gives none. A refused member gives: it may have stopped trying.
    const bool waits = e->needs && e->answer != VMEM_KV_REFUSED;
    const uint64_t could = waits || m->leaving ? 0 : sat_sub(e->could_give, e->giving);
    const uint64_t revision = pool->table.head.revision;
    bool first_gives = false;
    const uint64_t first = e->gives_first || e->looked == revision ? 0 : due_first(pool, &first_gives);
    const uint64_t bytes = MIN(sat_sub(unmet, first), could);
    const bool holds_back = bytes < could && (first_gives || (unmet && first));
    const bool waits_for_look = !m->leaving && (m->releasing || !bytes);
    uint64_t looked = waits_for_look ? MAX(m->saw_revision, e->looked) : revision;
    looked = holds_back ? e->looked : looked;
    const bool asked = e->looked < looked;
    uint32_t reply = e->reply, why = 0;
    if (bytes) {
        m->to_give += bytes;
        e->giving += bytes;
    }
    if (e->giving)
        reply = VMEM_KV_DEFERRED;
    else if (asked && unmet && !bytes)
        reply = VMEM_KV_REFUSED;
    else if (asked || reply == VMEM_KV_DEFERRED)
        reply = VMEM_KV_APPLIED;
    if (reply == VMEM_KV_REFUSED)
        why = e->has <= e->min ? VMEM_KV_AT_MINIMUM : VMEM_KV_IN_USE;
    e->looked = looked;
    e->holds_back += holds_back; // so that the others see that the process runs
    e->reply = reply;
    e->why = why;
    pool->table.entries[m->place] = *e;
    return looked < revision && !m->releasing && !holds_back; // it rings when its pages have gone
}

static void refuse_question(struct vmem__member *m, uint32_t why)
{
    m->told_at = 0;
    m->freed_at_refusal = m->pool->freed_before;
    vmem__pool_answer(m, VMEM_KV_REFUSED, why);
}

// Refuses a member's request for budget when no other member can still give.
static void refuse_unsatisfiable(const vmem_kv_pool *pool, struct vmem__member *m)
{
    uint32_t why = VMEM_KV_AT_MINIMUM;
    if (!m->entry.needs || m->granted || m->entry.answer != VMEM_KV_DEFERRED)
        return;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *e = &pool->table.entries[i];
        if (!e->size || i == m->place)
            continue;
        const bool owes = e->looked < m->entry.asked || e->giving;
        if (owes && !has_timed_out(pool, i))
            return;
        if (owes)
            why = VMEM_KV_NO_ANSWER;
        else if (why == VMEM_KV_AT_MINIMUM && (e->has > e->min || e->needs))
            why = VMEM_KV_IN_USE;
    }
    refuse_question(m, why);
}

// Returns true if another round is due at once.
static bool update_table(vmem_kv_pool *pool)
{
    bool again = false;
    const int rc = vmem__table_begin(pool, POOL_WAIT_US);
    const uint64_t t = vmem__now();
    pool->ran += MIN(t - pool->round_at, ROUND_NS);
    pool->round_at = t;
    pool->locked_at = rc != -EAGAIN ? pool->ran : pool->locked_at;
    const bool locked = pool->ran - pool->locked_at > vmem__pool_silent_ns;
    for (struct vmem__member *m = pool->members; m && (rc == -EBADMSG || locked); m = m->next)
        if (m->entry.needs) // no other member will read the question
            refuse_question(m, locked ? VMEM_KV_NO_ANSWER : VMEM_KV_FILE_DAMAGED);
    if (rc)
        return false;
    if (t - pool->reaped_at > REAP_NS) {
        pool->reaped_at = t;
        vmem__table_reap(pool);
    }
    note_replies(pool);
    for (struct vmem__member *m = pool->members; m; m = m->next)
        again |= grant_within_context(pool, m);
    for (struct vmem__member *m = pool->members; m; m = m->next)
        grant_free_budget(pool, m);
    for (struct vmem__member *m = pool->members; m; m = m->next) // the first of them give first
        again |= answer_questions(pool, m);
    for (struct vmem__member *m = pool->members; m; m = m->next)
        refuse_unsatisfiable(pool, m);
    vmem__table_end(pool);
    for (struct vmem__member *m = pool->members; m; m = m->next)
        if (m->unwritten && m->entry.needs) // no other member can read the question
            refuse_question(m, VMEM_KV_FILE_DAMAGED);
    return again;
}

// Applies the decisions to the member. Returns true if there is more to do at once.
static bool apply_decisions(struct vmem__member *m)
{
    const struct vmem__member_ops *ops = m->ops;
    vmem_kv_pool *pool = m->pool;
    struct vmem__member_state s;
    uint64_t evict = 0;
    pthread_mutex_lock(&pool->lock);
    const bool any = m->granted >> m->page_shift || m->to_give;
    pthread_mutex_unlock(&pool->lock);
    if (!any)
        return false;
    ops->lock(m->self);
    pthread_mutex_lock(&pool->lock);
    const uint64_t accepted = vmem__pool_accept(m), bytes = m->to_give;
    m->to_give = 0;
    pthread_mutex_unlock(&pool->lock);
    ops->raise_budget(m->self, accepted);
    if (bytes) {
        ops->get_state(m->self, &s);
        const uint64_t want = ceil_pages(bytes, m), pages = MIN(want, sat_sub(s.target, least_pages(m, &s)));
        if (pages)
            ops->lower_budget(m->self, s.target - pages);
        evict = MIN(want - pages, s.evictable);
    }
    ops->unlock(m->self);
    if (!evict)
        return bytes != 0;
    ops->evict(m->self, evict); // the next round gives the budget that this frees, which may take an engine a while
    const uint64_t before = s.min_pages;
    ops->lock(m->self);
    ops->get_state(m->self, &s);
    ops->unlock(m->self);
    return s.min_pages < before; // something was evicted: another round gives it
}

// Serves every member of this process once. Returns true if another round is due at once.
static bool serve_members(vmem_kv_pool *pool)
{
    bool again = false;
    pool->freed_before = pool->freed;
    for (int pass = 0; pass < 2; pass++) {
        for (struct vmem__member *m = pool->members; m; m = m->next) {
            if (m->leaving)
                continue;
            m->busy = true;
            pthread_mutex_unlock(&pool->lock);
            again |= pass ? apply_decisions(m) : refresh_member(m);
            pthread_mutex_lock(&pool->lock);
            m->busy = false;
            pthread_cond_broadcast(&pool->news);
        }
        if (!pass)
            again |= update_table(pool);
    }
    return again;
}

static bool needs_poll(const vmem_kv_pool *pool)
{
    for (const struct vmem__member *m = pool->members; m; m = m->next)
        if ((m->entry.needs && m->entry.answer == VMEM_KV_DEFERRED) || m->entry.giving)
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

void *vmem__pool_work(void *arg)
{
    vmem_kv_pool *pool = arg;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        const bool again = serve_members(pool), soon = needs_poll(pool);
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
