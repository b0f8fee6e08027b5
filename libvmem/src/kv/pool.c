// A pool of budget for several caches, and the thread that moves it between them.
//
// A member's row says what it has of the pool's budget. A cache's own budget never exceeds that: what it is granted
// enters the row first, and what it gives back leaves the row when its pages are unmapped and their memory has gone
// back to the device. So the members never have more than the pool together, whatever moment a process dies at.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "core/core.h"
#include "core/struct.h"
#include "kv/pool.h"

#define ASK_NS UINT64_C(1000000000)   // a question that is not repeated lapses
#define REFUSED_NS UINT64_C(20000000) // after a refusal the others are not asked again for so long
#define POLL_MS 100                 // how late others' files are seen without a notice, and ours are brought up to date
#define BURY_NS UINT64_C(100000000) // between looks for members whose process has ended
#define ARENA (UINT64_C(256) << 20) // device memory goes back in arenas: small ones

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void ring(const vmem_kv_pool *pool)
{
    const uint64_t one = 1;
    (void)!write(pool->bell, &one, sizeof one); // should it be full, the thread has not looked yet
}

void vmem__kv_pool_wake(const vmem_kv *kv)
{
    if (kv->member)
        ring(kv->member->pool);
}

static uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static uint64_t add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

// ---- the table. With the pool's lock held. -----------------------------------------------------------------------

// What the member (NULL: anybody new) may take: what nobody has, less what other members' minimums are still due.
static uint64_t free_for(const vmem_kv_pool *pool, const struct kv_member *m)
{
    uint64_t taken = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (r->number)
            taken = add(taken, m && m->place == i ? m->row.has : KV_MAX(r->has, r->min));
    }
    return less(pool->table.head.budget, taken);
}

static void note_free(vmem_kv_pool *pool) { pool->free = free_for(pool, NULL); }

static void answer(struct kv_member *m, uint32_t what, uint32_t why)
{
    if (m->row.answer != what)
        pthread_cond_broadcast(&m->pool->news);
    m->changed |= m->row.answer != what || m->row.reason != why;
    m->row.answer = what;
    m->row.reason = why;
}

static uint64_t floor_pages(uint64_t bytes, const vmem_kv *kv) { return bytes >> kv->page_shift; }

static uint64_t ceil_pages(uint64_t bytes, const vmem_kv *kv)
{
    return (bytes >> kv->page_shift) + (bytes & (kv->page_size - 1) ? 1 : 0);
}

// ---- what calls do, with api and state held ----------------------------------------------------------------------

// Raises the budget by up to `most` pages; `least` of them are worth a look into the table whatever is known of it.
static void claim(vmem_kv *kv, uint64_t least, uint64_t most)
{
    struct kv_member *m = kv->member;
    vmem_kv_pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    // What it was about to give back and still has comes first.
    const uint64_t had = add(kv->budget_pages << kv->page_shift, m->granted);
    uint64_t pages = KV_MIN(floor_pages(less(KV_MIN(m->row.has, m->row.max), had), kv), most);
    if (pages < most && (pool->free || pages < least) && !vmem__kv_share_begin(pool, false)) {
        const uint64_t room = KV_MIN(free_for(pool, m), less(m->row.max, m->row.has));
        const uint64_t more = KV_MIN(floor_pages(room, kv), most - pages);
        if (more) {
            pages += more;
            m->row.has += more << kv->page_shift;
            m->changed = true;
        }
        vmem__kv_share_end(pool, false);
        note_free(pool);
    }
    kv->budget_pages += pages;
    if (pages && m->row.needs) {
        m->row.needs = less(m->row.needs, pages << kv->page_shift);
        m->changed = true;
        if (!m->row.needs)
            answer(m, VMEM_KV_APPLIED, 0);
    }
    pthread_mutex_unlock(&pool->lock);
}

void vmem__kv_claim_for(vmem_kv *kv, uint64_t pages)
{
    if (kv->member && pages && kv->held + pages > kv->budget_pages)
        claim(kv, kv->held + pages - kv->budget_pages, kv->held + pages + kv->held / 2 - kv->budget_pages);
}

uint64_t vmem__kv_claimable(const vmem_kv *kv)
{
    struct kv_member *m = kv->member;
    if (!m)
        return 0;
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t due = less(m->row.min, m->row.has), room = less(m->row.max, m->row.has);
    const uint64_t own = less(KV_MIN(m->row.has, m->row.max), add(kv->budget_pages << kv->page_shift, m->granted));
    const uint64_t bytes = add(own, KV_MIN(add(m->pool->free, due), room));
    pthread_mutex_unlock(&m->pool->lock);
    return floor_pages(bytes, kv);
}

// With the pool's lock held. What may still come of it, in bytes.
static uint64_t ask(struct kv_member *m, uint64_t bytes)
{
    const uint64_t t = now(), room = less(m->row.max, m->row.has);
    if (bytes > room) {
        answer(m, VMEM_KV_REFUSED, VMEM_KV_AT_MAXIMUM);
        m->row.needs = 0;
        return 0;
    }
    const bool again = m->row.answer == VMEM_KV_REFUSED && m->row.needs && t - m->refused_at < REFUSED_NS;
    const bool fresh = m->row.needs < bytes || m->row.answer != VMEM_KV_DEFERRED;
    m->asked_at = t;
    m->row.needs = bytes;
    m->changed = true;
    if (again)
        return 0;
    if (fresh)
        m->row.asked = 0; // gets its revision from the thread
    answer(m, VMEM_KV_DEFERRED, 0);
    ring(m->pool);
    return bytes;
}

uint64_t vmem__kv_ask(vmem_kv *kv, uint64_t pages)
{
    struct kv_member *m = kv->member;
    if (!m)
        return 0;
    // A little more, so that a request that grows by a page does not ask at each.
    pthread_mutex_lock(&m->pool->lock);
    const uint64_t exact = pages << kv->page_shift, room = less(m->row.max, m->row.has);
    const uint64_t bytes = KV_MAX(exact, KV_MIN(exact + (kv->held / 64 << kv->page_shift), room));
    const uint64_t coming = ask(m, bytes);
    pthread_mutex_unlock(&m->pool->lock);
    return coming ? pages : 0;
}

void vmem__kv_claim_plenty(vmem_kv *kv)
{
    if (!kv->member || kv->giving || !kv->member->pool->free)
        return;
    const uint64_t want = kv->held + kv->held / 2;
    if (want > kv->budget_pages && kv_unused(kv) < 2 * kv_low(kv) + kv->held / 8)
        claim(kv, 0, want - kv->budget_pages);
}

// ---- the thread --------------------------------------------------------------------------------------------------

static void lock_cache(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->api);
    pthread_mutex_lock(&kv->state);
}

static void unlock_cache(vmem_kv *kv)
{
    vmem__kv_summarise(kv);
    pthread_mutex_unlock(&kv->state);
    pthread_mutex_unlock(&kv->api);
}

static bool has_requests(const vmem_kv *kv)
{
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv->slots[s].state != VMEM_KV_FREE)
            return true;
    return false;
}

// The smallest budget that the cache can go down to now.
static uint64_t least_pages(const vmem_kv *kv, const struct kv_member *m)
{
    const uint64_t spare = vmem__kv_spare(kv), fixed = kv->held - KV_MIN(spare, kv->held);
    const uint64_t margin = has_requests(kv) ? fixed / 32 : 0;
    return KV_MAX(ceil_pages(m->row.min, kv), fixed + margin);
}

// A cache without a background thread gives back here, a portion at a time.
static void give_portion(vmem_kv *kv)
{
    if (kv->held > kv->budget_pages && !kv->has_worker)
        vmem__kv_reclaim(kv, KV_MIN(kv->held - kv->budget_pages, kv->portion), true, NULL);
}

// What a cache that is idle or has been asked goes down to, as far as it is. True: there is more to do at once.
static bool go_on_giving(struct kv_member *m, uint64_t least)
{
    vmem_kv *kv = m->kv;
    if (kv->gave && kv->budget_pages > least) { // idle
        kv->budget_pages = least;
        kv->giving |= kv->held > kv->budget_pages;
    }
    if (!kv->giving)
        return false;
    give_portion(kv);
    const bool at_work = kv->has_worker && (kv->work_due || kv->working);
    if (kv->held <= kv->budget_pages) {
        kv->giving = false;
    } else if (!at_work && (kv->has_worker || !vmem__kv_spare(kv))) {
        kv->budget_pages = kv->held; // the rest cannot go now
        kv->giving = false;
    }
    return kv->giving && !kv->has_worker;
}

// Brings the row of a member up to date: what is not the cache's any more is the pool's. True: there is more to do.
static bool look(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    vmem_kv_pool *pool = m->pool;
    lock_cache(kv);
    const bool more = go_on_giving(m, least_pages(kv, m));
    const uint64_t gone_to = KV_MAX(kv->budget_pages, kv->held);
    const bool trim = kv->held << kv->page_shift < m->row.held && gone_to << kv->page_shift < m->row.has;
    unlock_cache(kv);
    if (trim) // first the memory, then what the others know of
        vmem__kv_trim(kv);

    lock_cache(kv);
    const uint64_t least = least_pages(kv, m), has = KV_MAX(kv->budget_pages, kv->held);
    const uint64_t evictable = m->evict ? kv->refs.only : vmem__kv_evictable(kv), min = ceil_pages(m->row.min, kv);
    pthread_mutex_lock(&pool->lock);
    const struct kv_pool_row before = m->row;
    // A claim may have taken some of it again.
    m->row.has = KV_MIN(m->row.has, (KV_MAX(has, gone_to) << kv->page_shift) + m->granted);
    m->row.held = kv->held << kv->page_shift;
    m->row.could_give = less(has, KV_MAX(least - KV_MIN(least, evictable), min)) << kv->page_shift;
    m->row.giving = less(m->row.has - m->granted, kv->budget_pages << kv->page_shift);
    // Budget that is free is news. The rest may be some ms late.
    m->changed |= m->row.has != before.has || (!m->row.giving && before.giving);
    if (memcmp(&before, &m->row, sizeof before) && now() - pool->written_at > POLL_MS * UINT64_C(1000000))
        m->changed = true;
    pthread_mutex_unlock(&pool->lock);
    unlock_cache(kv);
    return more;
}

// Others' needs that nothing is on its way for.
static uint64_t unmet(const vmem_kv_pool *pool)
{
    uint64_t needs = 0, coming = free_for(pool, NULL);
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (!r->number)
            continue;
        needs = add(needs, r->needs);
        coming = add(coming, r->giving);
    }
    return less(needs, coming);
}

static void grant(vmem_kv_pool *pool, struct kv_member *m, bool *head)
{
    struct kv_pool_row *r = &m->row;
    if (m->leaving)
        r->needs = 0;
    else if (r->has < r->min && r->needs < r->min - r->has) { // a minimum is due whether it is asked for or not
        r->needs = r->min - r->has;
        m->asked_at = now();
        m->changed = true;
    }
    if (!r->needs)
        return;
    if (now() - m->asked_at > ASK_NS) {
        r->needs = 0;
        answer(m, VMEM_KV_UNASKED, 0);
        m->changed = true;
        return;
    }
    uint64_t room = KV_MIN(KV_MIN(free_for(pool, m), less(r->max, r->has)), r->needs);
    room = ceil_pages(room, m->kv) << m->kv->page_shift <= free_for(pool, m)
               ? ceil_pages(room, m->kv) << m->kv->page_shift
               : floor_pages(room, m->kv) << m->kv->page_shift;
    if (room) {
        r->has += room;
        m->granted += room;
        r->needs = less(r->needs, room);
        m->changed = true;
    }
    if (!r->needs) {
        m->changed = true; // the answer follows when the budget has risen
    } else if (!r->asked) {
        r->asked = ++pool->table.head.revision;
        *head = m->changed = true;
    }
    pool->table.rows[m->place] = *r;
}

// Decides what a member gives, and says so.
static void give(vmem_kv_pool *pool, struct kv_member *m)
{
    struct kv_pool_row *r = &m->row;
    const uint64_t wanted = r->needs || m->leaving ? 0 : unmet(pool), could = less(r->could_give, r->giving);
    const uint64_t bytes = KV_MIN(wanted, could);
    const bool asked = r->looked < pool->table.head.revision;
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
    r->looked = pool->table.head.revision;
    r->reply = reply;
    r->why = why;
    pool->table.rows[m->place] = *r;
}

// A member's question is refused when nobody is left who may still give.
static void judge(const vmem_kv_pool *pool, struct kv_member *m)
{
    uint32_t why = VMEM_KV_AT_MINIMUM;
    if (!m->row.needs || m->granted || m->row.answer != VMEM_KV_DEFERRED)
        return;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (!r->number || i == m->place)
            continue;
        if (r->looked < m->row.asked || r->giving)
            return;
        if (r->why == VMEM_KV_IN_USE || r->needs)
            why = VMEM_KV_IN_USE;
    }
    m->refused_at = now();
    answer(m, VMEM_KV_REFUSED, why);
}

static void decide(vmem_kv_pool *pool)
{
    bool head = false, some = false;
    for (struct kv_member *m = pool->members; m; m = m->next)
        some |= m->changed;
    const uint64_t t = now();
    if (vmem__kv_share_begin(pool, true))
        return;
    if (t - pool->buried_at > BURY_NS) {
        pool->buried_at = t;
        vmem__kv_share_bury(pool);
    }
    for (struct kv_member *m = pool->members; m; m = m->next)
        grant(pool, m, &head);
    for (struct kv_member *m = pool->members; m; m = m->next)
        give(pool, m);
    for (struct kv_member *m = pool->members; m; m = m->next)
        judge(pool, m);
    for (struct kv_member *m = pool->members; m; m = m->next)
        some |= m->changed;
    pool->written_at = some ? t : pool->written_at;
    vmem__kv_share_end(pool, head);
    note_free(pool);
}

// What was decided, at the cache. True: there is more to do at once.
static bool apply(struct kv_member *m)
{
    vmem_kv *kv = m->kv;
    vmem_kv_pool *pool = m->pool;
    uint64_t evict = 0;
    pthread_mutex_lock(&pool->lock);
    const bool any = m->granted || m->to_give;
    pthread_mutex_unlock(&pool->lock);
    if (!any)
        return false;
    lock_cache(kv);
    pthread_mutex_lock(&pool->lock);
    kv->budget_pages += floor_pages(m->granted, kv);
    const uint64_t bytes = m->to_give;
    m->granted = m->to_give = 0;
    if (!m->row.needs && m->row.answer == VMEM_KV_DEFERRED)
        answer(m, VMEM_KV_APPLIED, 0);
    pthread_mutex_unlock(&pool->lock);
    if (bytes) {
        const uint64_t least = least_pages(kv, m), want = ceil_pages(bytes, kv);
        const uint64_t pages = KV_MIN(want, less(kv->budget_pages, least));
        kv->budget_pages -= pages;
        if (want > pages && m->evict) {
            evict = KV_MIN(want - pages, kv->refs.only);
        } else if (want > pages && vmem__kv_evictable(kv)) { // hashed blocks: a portion now, the rest in the next round
            vmem__kv_worker_hold(kv);
            vmem__kv_hash_evict(kv, KV_MIN(want - pages, KV_MAX(kv->portion, kv->block)));
            vmem__kv_worker_release(kv);
        }
        if (kv->held > kv->budget_pages) {
            kv->giving = true;
            vmem__kv_worker_wake(kv);
        }
    }
    unlock_cache(kv);
    if (evict && m->evict(m->arg, evict)) // what it dropped is unused budget now, and goes in the next round
        return true;
    return bytes != 0;
}

// Once around all members of this process. True: again at once.
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
            pthread_mutex_lock(&pool->lock);
            m->busy = false;
            pthread_cond_broadcast(&pool->news);
        }
        if (!pass)
            decide(pool);
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

static void *work(void *arg)
{
    vmem_kv_pool *pool = arg;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        const bool again = round_of(pool), soon = restless(pool);
        pthread_mutex_unlock(&pool->lock);
        if (!again) {
            const int poll_ms = pool->fd >= 0 && pool->watch < 0 ? 5 : POLL_MS;
            wait_for_news(pool, soon ? 5 : pool->fd >= 0 ? poll_ms : -1);
        }
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

// ---- pools -------------------------------------------------------------------------------------------------------

// All pools of the process, for a forked child: it must not hold the locks that say who lives.
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static vmem_kv_pool *pools;

static void before_fork(void) { pthread_mutex_lock(&list_lock); }

static void after_fork(void) { pthread_mutex_unlock(&list_lock); }

static void in_child(void)
{
    for (vmem_kv_pool *p = pools; p; p = p->next) {
        if (p->fd >= 0)
            close(p->fd);
        p->fd = -1;
    }
    pthread_mutex_unlock(&list_lock);
}

static void handle_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

static void list_pool(vmem_kv_pool *pool, bool listed)
{
    pthread_once(&once, handle_forks);
    pthread_mutex_lock(&list_lock);
    if (listed) {
        pool->next = pools;
        pools = pool;
    }
    for (vmem_kv_pool **at = &pools; !listed && *at; at = &(*at)->next)
        if (*at == pool) {
            *at = pool->next;
            break;
        }
    pthread_mutex_unlock(&list_lock);
}

static void end_pool(vmem_kv_pool *pool)
{
    const bool ours = pool->pid == getpid();
    if (pool->has_thread && ours) {
        pthread_mutex_lock(&pool->lock);
        pool->stop = true;
        pthread_mutex_unlock(&pool->lock);
        ring(pool);
        pthread_join(pool->thread, NULL);
    }
    list_pool(pool, false);
    if (pool->fd >= 0 && ours) {
        if (!vmem__kv_share_begin(pool, true)) {
            vmem__kv_share_remove(pool);
            vmem__kv_share_end(pool, false);
        }
    }
    vmem__kv_share_close(pool);
    if (pool->bell >= 0)
        close(pool->bell);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->news);
    free(pool);
}

static void drop(vmem_kv_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    const bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last)
        end_pool(pool);
}

static int start(vmem_kv_pool *pool)
{
    sigset_t all, old;
    pool->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->bell < 0)
        return vmem__error(-errno, "no eventfd: %s", strerror(errno));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); // signals are for the program's own threads
    int rc = pthread_create(&pool->thread, NULL, work, pool);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pool->has_thread = !rc;
    return rc ? vmem__error(-rc, "no thread for the pool: %s", strerror(rc)) : 0;
}

int vmem_kv_pool_create(const struct vmem_kv_pool_config *cfg, vmem_kv_pool **out)
{
    struct vmem_kv_pool_config c;
    if (!cfg || !out)
        return vmem__error(-EINVAL, "cfg and out must not be NULL");
    int rc = vmem__struct_take(&c, sizeof c, sizeof c, cfg, "cfg");
    if (!rc && c.flags)
        rc = vmem__error(-EINVAL, "flags %#x has unknown bits", c.flags);
    if (!rc && !c.budget && !c.path)
        rc = vmem__error(-EINVAL, "budget 0: only a pool with a path may have one already");
    if (!rc && c.budget > MAX_RESERVE)
        rc = vmem__error(-EINVAL, "budget %" PRIu64 " is over 2^46", c.budget);
    if (rc)
        return rc;
    vmem_kv_pool *pool = calloc(1, sizeof(*pool));
    if (!pool)
        return vmem__error(-ENOMEM, "no memory for a pool");
    pool->fd = pool->bell = pool->watch = -1;
    pool->refs = 1;
    pool->pid = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->news, &steady);
    pthread_condattr_destroy(&steady);
    pool->table.head.budget = c.budget;
    list_pool(pool, true);
    if (c.path)
        rc = vmem__kv_share_open(pool, c.path, c.budget);
    if (!rc)
        rc = start(pool);
    if (rc) {
        drop(pool);
        return rc;
    }
    *out = pool;
    return 0;
}

void vmem_kv_pool_destroy(vmem_kv_pool *pool)
{
    if (pool)
        drop(pool);
}

// ---- members -----------------------------------------------------------------------------------------------------

static int check_share(const vmem_kv_pool *pool, uint64_t min, uint64_t *max)
{
    const uint64_t budget = pool->table.head.budget;
    if (!*max || *max > budget)
        *max = budget;
    if (min > *max)
        return vmem__error(-EINVAL, "min %" PRIu64 " is over max, %" PRIu64, min, *max);
    return 0;
}

// Between begin and end: whether the minimums still fit with this one.
static int check_minimums(const vmem_kv_pool *pool, uint32_t place, uint64_t min)
{
    uint64_t all = min;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        if (pool->table.rows[i].number && i != place)
            all = add(all, pool->table.rows[i].min);
    if (all > pool->table.head.budget)
        return vmem__error(-ENOMEM,
                           "min %" PRIu64 ": the minimums of all members would be %" PRIu64 ", over the "
                           "pool's budget of %" PRIu64,
                           min, all, pool->table.head.budget);
    return 0;
}

static int check_device(vmem_kv_pool *pool, const struct vmem_info *info, bool *head)
{
    const char *where = strcmp(info->backend, "host") ? "gpu" : "host";
    struct kv_pool_head *h = &pool->table.head;
    bool alone = true;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        alone &= !pool->table.rows[i].number;
    if (alone) {
        memcpy(h->device, info->device_uuid, sizeof(h->device));
        memset(h->backend, 0, sizeof(h->backend));
        memcpy(h->backend, where, strlen(where));
        *head = true;
        return 0;
    }
    if (strcmp(h->backend, where) || memcmp(h->device, info->device_uuid, sizeof(h->device)))
        return vmem__error(-EINVAL, "the pool's members are on another device (%s) than this cache (%s)", h->backend,
                           info->backend);
    return 0;
}

static int find_place(vmem_kv_pool *pool, uint32_t *place)
{
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        if (!pool->table.rows[i].number && !kv_own(pool, i) && !vmem__kv_share_take(pool, i)) {
            *place = i;
            return 0;
        }
    return vmem__error(-ENOSPC, "the pool has %u members, the most that it can have", VMEM_KV_POOL_MEMBERS);
}

// Between begin and end, with all locks: the cache's budget becomes what it gets.
static int enter_table(vmem_kv_pool *pool, struct kv_member *m, bool *head)
{
    vmem_kv *kv = m->kv;
    struct vmem_info info = {.size = sizeof info};
    const uint64_t held = kv->held << kv->page_shift;
    int rc = vmem_context_info(kv->ctx, &info);
    if (!rc)
        rc = check_device(pool, &info, head);
    if (!rc)
        rc = check_share(pool, m->row.min, &m->row.max);
    if (!rc)
        rc = check_minimums(pool, VMEM_KV_POOL_MEMBERS, m->row.min);
    if (!rc && held > free_for(pool, NULL))
        rc = vmem__error(-ENOMEM, "the cache holds %" PRIu64 " bytes, and the pool has %" PRIu64 " free", held,
                         free_for(pool, NULL));
    if (!rc)
        rc = find_place(pool, &m->place);
    if (rc)
        return rc;
    m->row.number = ++pool->table.head.joins;
    m->row.pid = (uint32_t)kv->pid;
    // The minimum as far as it is free; the rest of it is due.
    uint64_t has = KV_MAX(KV_MIN(m->row.min, free_for(pool, NULL)), held);
    has = KV_MAX(floor_pages(has, kv) << kv->page_shift, held);
    m->row.has = has;
    m->row.held = held;
    m->row.looked = pool->table.head.revision;
    if (has < m->row.min) {
        m->row.needs = m->row.min - has;
        m->row.answer = VMEM_KV_DEFERRED;
        m->asked_at = now();
    }
    m->changed = *head = true;
    m->next = pool->members;
    pool->members = m;
    return 0;
}

int vmem_kv_pool_join(vmem_kv_pool *pool, vmem_kv *kv, const struct vmem_kv_share *share)
{
    struct vmem_kv_share s;
    if (!pool || !share)
        return vmem__error(-EINVAL, "pool and share must not be NULL");
    int rc = vmem__struct_take(&s, sizeof s, sizeof s, share, "share");
    if (!rc)
        rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (pool->pid != kv->pid)
        rc = vmem__error(-EPERM, "this pool belongs to process %d, which forked", (int)pool->pid);
    else if (kv->member)
        rc = vmem__error(-EINVAL, "the cache is a member of a pool already");
    else if (kv->flags & VMEM_KV_SAME_SLOTS)
        rc = vmem__error(-EINVAL, "a cache with equal slots on all ranks (VMEM_KV_SAME_SLOTS) cannot be in a pool");
    struct kv_member *m = rc ? NULL : calloc(1, sizeof(*m));
    if (!rc && !m)
        rc = vmem__error(-ENOMEM, "no memory for a member");
    if (rc)
        return vmem__kv_leave(kv, rc);
    m->pool = pool;
    m->kv = kv;
    m->evict = s.evict;
    m->arg = s.arg;
    m->row.min = s.min;
    m->row.max = s.max;
    strncpy(m->row.name, s.name ? s.name : "kv", sizeof(m->row.name) - 1);
    vmem__kv_worker_hold(kv);
    pthread_mutex_lock(&pool->lock);
    bool head = false;
    rc = vmem__kv_share_begin(pool, true);
    if (!rc) {
        vmem__kv_share_bury(pool);
        rc = enter_table(pool, m, &head);
        vmem__kv_share_end(pool, head && !rc);
        note_free(pool);
    }
    if (!rc) {
        pool->refs++;
        kv->member = m;
        kv->flags |= VMEM_KV_LAZY;
        kv->portion = UINT64_C(64) * kv->block;
        kv->ceiling = KV_MAX(kv->ceiling, kv->held);
        kv->budget_pages = floor_pages(m->row.has, kv);
        ring(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    vmem__kv_worker_release(kv);
    if (rc) {
        free(m);
        return vmem__kv_leave(kv, rc);
    }
    vmem__kv_give_ahead(kv, 0);
    vmem__limit_arenas(kv->ctx, ARENA);
    return vmem__kv_leave(kv, 0);
}

void vmem__kv_pool_leave(vmem_kv *kv)
{
    lock_cache(kv);
    struct kv_member *m = kv->member;
    kv->member = NULL;
    kv->giving = false;
    pthread_mutex_unlock(&kv->state);
    pthread_mutex_unlock(&kv->api);
    if (!m)
        return;
    vmem_kv_pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    while (m->busy)
        pthread_cond_wait(&pool->news, &pool->lock);
    m->leaving = true; // the cache is being destroyed: what it has is free when its memory is
    pthread_mutex_unlock(&pool->lock);
    kv->left = m;
}

void vmem__kv_pool_left(vmem_kv *kv)
{
    struct kv_member *m = kv->left, **at;
    if (!m)
        return;
    vmem_kv_pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    while (m->busy)
        pthread_cond_wait(&pool->news, &pool->lock);
    for (at = &pool->members; *at != m; at = &(*at)->next)
        ;
    const bool begun = !vmem__kv_share_begin(pool, true);
    *at = m->next;
    vmem__kv_share_give(pool, m->place); // should the table not be to be had: whoever looks finds nobody alive there
    if (begun)
        vmem__kv_share_end(pool, false);
    note_free(pool);
    pthread_cond_broadcast(&pool->news);
    ring(pool);
    pthread_mutex_unlock(&pool->lock);
    free(m);
    drop(pool);
}

// ---- the rest of the interface -----------------------------------------------------------------------------------

static int not_a_member(void) { return vmem__error(-EINVAL, "the cache is in no pool"); }

static int set_share(vmem_kv *kv, uint64_t min, uint64_t max)
{
    struct kv_member *m = kv->member;
    if (!m)
        return not_a_member();
    vmem_kv_pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    int rc = vmem__kv_share_begin(pool, true);
    if (!rc) {
        rc = check_share(pool, min, &max);
        if (!rc)
            rc = check_minimums(pool, m->place, min);
        if (!rc) {
            m->row.min = min;
            m->row.max = max;
            m->changed = true;
        }
        vmem__kv_share_end(pool, false);
        note_free(pool);
    }
    const uint64_t pages = floor_pages(m->row.max, kv);
    pthread_mutex_unlock(&pool->lock);
    if (!rc && kv->budget_pages > pages) { // what is beyond goes in the background, as far as it can
        kv->budget_pages = pages;
        kv->giving |= kv->held > pages;
        vmem__kv_worker_wake(kv);
    }
    ring(pool);
    return rc;
}

int vmem__kv_set_max(vmem_kv *kv, uint64_t max)
{
    pthread_mutex_lock(&kv->member->pool->lock);
    const uint64_t min = kv->member->row.min;
    pthread_mutex_unlock(&kv->member->pool->lock);
    return set_share(kv, min, max);
}

int vmem_kv_pool_set_share(vmem_kv *kv, uint64_t min, uint64_t max)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, set_share(kv, min, max));
}

int vmem_kv_pool_ask(vmem_kv *kv, uint64_t bytes)
{
    int rc = vmem__kv_enter_step(kv);
    if (rc)
        return rc;
    if (!kv->member)
        return vmem__kv_leave(kv, not_a_member());
    const uint64_t want = kv->held - KV_MIN(vmem__kv_spare(kv), kv->held) + ceil_pages(bytes, kv);
    if (want > kv->budget_pages)
        claim(kv, want - kv->budget_pages, want - kv->budget_pages);
    pthread_mutex_lock(&kv->member->pool->lock);
    if (want > kv->budget_pages)
        ask(kv->member, (want - kv->budget_pages) << kv->page_shift);
    else
        answer(kv->member, VMEM_KV_APPLIED, 0);
    pthread_mutex_unlock(&kv->member->pool->lock);
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_pool_wait(vmem_kv *kv, uint32_t ms, uint32_t *out)
{
    if (!kv)
        return vmem__error(-EINVAL, "kv is NULL");
    int rc = vmem__kv_check_process(kv);
    if (rc)
        return rc;
    pthread_mutex_lock(&kv->state);
    struct kv_member *m = kv->member;
    if (m)
        pthread_mutex_lock(&m->pool->lock);
    pthread_mutex_unlock(&kv->state);
    if (!m)
        return not_a_member();
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (m->row.answer == VMEM_KV_DEFERRED)
        if (pthread_cond_timedwait(&m->pool->news, &m->pool->lock, &until) == ETIMEDOUT)
            break;
    if (out)
        *out = m->row.answer;
    pthread_mutex_unlock(&m->pool->lock);
    return 0;
}

static int refresh(vmem_kv_pool *pool)
{
    if (!pool)
        return vmem__error(-EINVAL, "pool is NULL");
    if (pool->pid != getpid())
        return vmem__error(-EPERM, "this pool belongs to process %d, which forked", (int)pool->pid);
    pthread_mutex_lock(&pool->lock);
    int rc = vmem__kv_share_begin(pool, true);
    if (!rc) {
        vmem__kv_share_bury(pool);
        vmem__kv_share_end(pool, false);
        note_free(pool);
    } else {
        pthread_mutex_unlock(&pool->lock);
    }
    return rc;
}

int vmem_kv_pool_query(vmem_kv_pool *pool, struct vmem_kv_pool_info *out)
{
    struct vmem_kv_pool_info info = {0};
    if (!out)
        return vmem__error(-EINVAL, "out must not be NULL");
    int rc = refresh(pool);
    if (rc)
        return rc;
    uint64_t taken = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        info.members += pool->table.rows[i].number != 0;
        taken = add(taken, pool->table.rows[i].number ? pool->table.rows[i].has : 0);
    }
    info.budget = pool->table.head.budget;
    info.free = less(info.budget, taken);
    info.revision = pool->table.head.revision;
    pthread_mutex_unlock(&pool->lock);
    return vmem__struct_give(out, &info, sizeof info, "out");
}

int vmem_kv_pool_get_member(vmem_kv_pool *pool, uint32_t place, struct vmem_kv_pool_member *out)
{
    if (!out)
        return vmem__error(-EINVAL, "out must not be NULL");
    if (place >= VMEM_KV_POOL_MEMBERS)
        return vmem__error(-EINVAL, "place %u: a pool has %u", place, VMEM_KV_POOL_MEMBERS);
    int rc = refresh(pool);
    if (rc)
        return rc;
    const struct kv_pool_row r = pool->table.rows[place];
    pthread_mutex_unlock(&pool->lock);
    if (!r.number)
        return vmem__error(-ENOENT, "place %u: there is no member", place);
    struct vmem_kv_pool_member m = {.pid = r.pid,
                                    .min = r.min,
                                    .max = r.max,
                                    .has = r.has,
                                    .held = r.held,
                                    .needs = r.needs,
                                    .could_give = r.could_give,
                                    .giving = r.giving,
                                    .asked = r.asked,
                                    .looked = r.looked,
                                    .answer = r.answer,
                                    .reason = r.reason,
                                    .reply = r.reply,
                                    .why = r.why};
    memcpy(m.name, r.name, sizeof m.name);
    return vmem__struct_give(out, &m, sizeof m, "out");
}
