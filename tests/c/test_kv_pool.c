// One budget for several caches of a process: it goes where it is needed.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "checked.h"
#include "kv.h"
#include "kv/kv.h"
#include "pool/pool.h"

#define SLOTS 4
#define ROWS 4000 // of 1/32 page: 125 pages in each of two tensors

static vmem_context *ctx;

static vmem_kv *make(vmem_context *c, uint32_t flags, uint32_t idle_ms)
{
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    return k_create(c, .flags = flags | VMEM_KV_DEFER | VMEM_KV_CHECK | VMEM_KV_LAZY, .tensors = tensors,
                    .n_tensors = 2, .slots = SLOTS, .max_tokens = ROWS, .budget = test_page, .idle_ms = idle_ms);
}

static void join(vmem_kv_pool *pool, vmem_kv *kv, uint64_t min, uint64_t max, const char *name)
{
    struct vmem_kv_pool_share share = {.size = sizeof share,
                                       .min = min * test_page,
                                       .max = max * test_page,
                                       .name = name};
    OK(vmem_kv_pool_join(pool, kv, &share));
}

// Two caches in a pool, with a minimum of so many pages each.
static vmem_kv_pool *make_pair(uint64_t pages, uint32_t flags, uint64_t min, vmem_kv **a, vmem_kv **b)
{
    vmem_kv_pool *pool = k_pool(pages);
    *a = make(ctx, flags, 0);
    *b = make(ctx, flags, 0);
    join(pool, *a, min, 0, "a");
    join(pool, *b, min, 0, "b");
    return pool;
}

static void end_pair(vmem_kv_pool *pool, vmem_kv *a, vmem_kv *b)
{
    vmem_kv_destroy(a);
    vmem_kv_destroy(b);
    vmem_kv_pool_destroy(pool);
}

static uint32_t alloc(vmem_kv *kv, uint32_t tokens)
{
    uint32_t slot;
    OK(k_alloc(kv, tokens, &slot));
    return slot;
}

static int step(vmem_kv *kv, uint32_t slot, int32_t tokens)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = tokens;
    return vmem_kv_step(kv, lengths, SLOTS, 0);
}

// Asks for so many pages for new requests, up to 250 for each slot that is free.
static void ask(vmem_kv *kv, uint32_t pages)
{
    int32_t lengths[SLOTS] = {0};
    uint32_t slots[SLOTS], n = 0;
    for (; pages; pages -= MIN(pages, 250u)) {
        slots[n] = alloc(kv, 0);
        lengths[slots[n++]] = (int32_t)MIN(pages, 250u) / 2 * 32;
    }
    const int rc = vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY);
    CHECK(!rc || rc == -ENOMEM);
    while (n)
        OK(vmem_kv_free(kv, slots[--n], 0));
}

static uint32_t wait_for(vmem_kv *kv)
{
    uint32_t answer;
    OK(vmem_kv_pool_wait(kv, 60000, &answer));
    return answer;
}

static void test_free_budget_is_had_at_once(void)
{
    vmem_kv *a, *b;
    vmem_kv_pool *pool = make_pair(400, 0, 20, &a, &b);
    CHECK_EQ(k_pool_info(pool).members, 2);
    CHECK_EQ(k_pool_info(pool).free, 360 * test_page);
    uint32_t s = alloc(a, ROWS);
    OK(step(a, s, ROWS)); // 250 pages
    CHECK_EQ(k_stats(a).held_pages, 250);
    CHECK(k_stats(a).budget_pages >= 250 && k_stats(a).budget_pages <= 380);
    uint64_t missing;
    int32_t lengths[SLOTS] = {0};
    uint32_t t = alloc(b, ROWS);
    lengths[t] = ROWS;
    CHECK_EQ(k_missing(vmem_kv_step(b, lengths, SLOTS, 0), &missing), -ENOMEM);
    CHECK_EQ(k_stats(a).held_pages, 250);
    end_pair(pool, a, b);
}

// A closed cache is a member until its pages are gone.
static void test_a_closed_cache_leaves(void)
{
    vmem_kv_pool *pool = k_pool(400);
    vmem_kv *kv = make(ctx, 0, 0);
    join(pool, kv, 20, 0, "a");
    OK(step(kv, alloc(kv, 100), 100));
    OK(vmem_kv_close(kv));
    CHECK_EQ(k_pool_info(pool).members, 1);
    CHECK(k_pool_info(pool).free < 400 * test_page);
    vmem_kv_destroy(kv);
    CHECK_EQ(k_pool_info(pool).members, 0);
    CHECK_EQ(k_pool_info(pool).free, 400 * test_page);
    vmem_kv_pool_destroy(pool);
}

static void test_kept_pages_move(uint32_t flags)
{
    vmem_kv *a, *b;
    vmem_kv_pool *pool = make_pair(300, flags, 20, &a, &b);
    for (int turn = 0; turn < 6; turn++) {
        vmem_kv *to = turn % 2 ? b : a, *from = turn % 2 ? a : b;
        uint32_t s = alloc(to, ROWS);
        while (step(to, s, ROWS)) {
            CHECK_EQ(k_shortage().reason, VMEM_KV_SHORT_OF_BUDGET);
            CHECK(k_shortage().coming_pages);
            CHECK_EQ(wait_for(to), VMEM_KV_APPLIED);
        }
        CHECK_EQ(k_stats(to).needed_pages, 250);
        CHECK(k_stats(from).budget_pages >= 20 && k_stats(from).budget_pages <= 50);
        OK(vmem_kv_free(to, s, 0));
    }
    end_pair(pool, a, b);
}

// Memory outside the pool leaves the device less than the pool's budget. A request gets pages that others only keep, as if
// the budget were used up. The two contexts stand for two processes, of which one sees what the other leaves of the device.
static void test_a_device_with_less_than_the_budget(uint32_t flags)
{
    vmem_context *other;
    OK(checked_context(test_backend, 0, true, &other));
    vmem_kv_pool *pool = k_pool(1000);
    vmem_kv *a = make(ctx, flags, 0), *b = make(other, flags, 0);
    join(pool, a, 20, 0, "a");
    join(pool, b, 20, 0, "b");
    uint32_t s = alloc(a, ROWS), t = alloc(b, ROWS);
    OK(step(a, s, ROWS));
    checked_device_memory((300 - k_stats(a).held_pages) * test_page);
    while (step(b, t, ROWS) && k_shortage().coming_pages) // what requests hold is refused
        wait_for(b);
    CHECK_EQ(k_stats(a).held_pages, 250);
    OK(vmem_kv_free(a, s, 0));
    do { // the pool does not know how much the device has, and may refuse for a moment
        wait_for(b);
        checked_device_memory((300 - k_stats(a).held_pages) * test_page);
    } while (step(b, t, ROWS));
    CHECK_EQ(k_stats(b).needed_pages, 250);
    CHECK(k_stats(a).held_pages <= 50);
    checked_device_memory(UINT64_MAX);
    end_pair(pool, a, b);
    vmem_context_destroy(other);
}

static void test_what_requests_hold_is_refused(void)
{
    vmem_kv_pool *pool = k_pool(300);
    vmem_kv *a = make(ctx, 0, 0), *b = make(ctx, 0, 0);
    join(pool, a, 20, 0, "a");
    join(pool, b, 20, 200, "b");
    uint32_t s = alloc(a, ROWS), t = alloc(b, ROWS);
    OK(step(a, s, ROWS));
    ERR(step(b, t, 2000), ENOMEM, "pages are missing"); // 125 and a little: there are 50
    CHECK_EQ(k_shortage().coming_pages, 76);
    CHECK_EQ(wait_for(b), VMEM_KV_REFUSED);
    ERR(step(b, t, 4000), ENOMEM, "pages are missing"); // over its maximum
    CHECK_EQ(k_shortage().coming_pages, 0);
    for (int told = 0; told < 2; told++) { // of the refusal, before the memory becomes free
        ERR(step(b, t, 2000), ENOMEM, "pages are missing");
        while (told ? wait_for(b) != VMEM_KV_REFUSED : k_pool_row(pool, "b").answer != VMEM_KV_REFUSED)
            usleep(100);
        OK(vmem_kv_free(a, s, 0));
        if (step(b, t, 2000)) { // from here on, there is some
            CHECK(k_shortage().coming_pages);
            CHECK_EQ(wait_for(b), VMEM_KV_APPLIED);
            OK(step(b, t, 2000));
        }
        OK(vmem_kv_free(b, t, 0));
        s = alloc(a, ROWS);
        while (step(a, s, ROWS))
            wait_for(a);
        t = alloc(b, ROWS);
    }
    end_pair(pool, a, b);
}

static void test_shares_hold(void)
{
    const struct vmem_kv_pool_share share = {.size = sizeof share};
    for (int i = 0; i < 10; i++) {
        vmem_kv_pool *pool = k_pool(300);
        vmem_kv *a = make(ctx, 0, 0), *b = make(ctx, 0, 0);
        join(pool, a, 0, 120, "a");
        join(pool, b, 0, 0, "b");
        ERR(vmem_kv_pool_join(pool, a, &share), EINVAL, "already");
        // A minimum is not for others, whether the pool's thread has granted it or not.
        OK(vmem_kv_pool_set_share(a, 100 * test_page, 120 * test_page));
        ERR(step(b, alloc(b, ROWS), ROWS), ENOMEM, "pages are missing");
        ERR(step(a, alloc(a, ROWS), ROWS), ENOMEM, "pages are missing"); // 250 pages are over its maximum
        CHECK(k_stats(a).budget_pages <= 120);
        end_pair(pool, a, b);
    }
}

// A member that neighbours without a minimum keep from nothing: not at first, when the pool's thread may have granted
// nothing yet, and not when it asks again beside one that always asks.
static void test_a_minimum_never_waits(void)
{
    for (int i = 0; i < 20; i++) {
        vmem_kv_pool *pool = k_pool(300);
        vmem_kv *a = make(ctx, 0, 0), *b = make(ctx, 0, 0);
        join(pool, b, 0, 0, "b");
        join(pool, a, 0, 0, "a");
        const uint32_t hungry = alloc(b, ROWS);
        OK(step(b, hungry, 3200)); // 200 pages
        OK(vmem_kv_pool_set_share(a, 100 * test_page, 0));
        for (int turn = 0; turn < 3; turn++) {
            const uint32_t slot = alloc(a, ROWS);
            OK(step(a, slot, 1600));
            ERR(step(b, hungry, ROWS), ENOMEM, "pages are missing");
            OK(vmem_kv_free(a, slot, 0));
        }
        end_pair(pool, a, b);
    }
}

// Even where the pool has more, and nobody else wants it.
static void test_a_maximum_holds(void)
{
    vmem_kv_pool *pool = k_pool(300);
    vmem_kv *a = make(ctx, 0, 0);
    join(pool, a, 0, 120, "a");
    const uint32_t slot = alloc(a, ROWS);
    ERR(step(a, slot, ROWS), ENOMEM, "pages are missing"); // 250 pages
    CHECK(k_stats(a).budget_pages <= 120);
    OK(step(a, slot, 1920)); // 120
    vmem_kv_destroy(a);
    vmem_kv_pool_destroy(pool);
}

// A maximum that is lowered holds when the call returns: for kept pages, for free budget, and for what the pool has granted.
static void test_a_lower_maximum_holds_at_once(uint32_t flags, bool kept, bool granted)
{
    for (int i = 0; i < 10; i++) {
        vmem_kv_pool *pool = k_pool(300);
        vmem_context *own = test_context(0);
        vmem_kv *a = make(ctx, flags, 0), *b = make(own, flags, 0), *first = granted ? b : a;
        join(pool, a, 0, 0, "a");
        join(pool, b, 0, 0, "b");
        const uint32_t slot = alloc(first, ROWS);
        OK(step(first, slot, ROWS)); // 250 pages
        OK(vmem_kv_free(first, slot, 0));
        while (granted && k_pool_row(pool, "a").has < 250 * test_page)
            ask(a, 250);
        if (!kept && !granted)
            OK(vmem_kv_reclaim(a, UINT64_MAX, 0, NULL));
        OK(vmem_kv_pool_set_share(a, 0, 120 * test_page));
        CHECK(k_stats(a).held_pages <= 120);
        const uint32_t next = alloc(a, ROWS);
        ERR(step(a, next, ROWS), ENOMEM, "pages are missing");
        CHECK(k_stats(a).budget_pages <= 120);
        while (step(a, next, 1920)) // 120 pages: what was granted beyond them goes back first
            wait_for(a);
        vmem_kv_destroy(a);
        vmem_kv_destroy(b);
        vmem_context_destroy(own);
        vmem_kv_pool_destroy(pool);
    }
}

// Budget that another process has just given back counts, whether or not this one has heard of it.
static void test_a_dry_step_knows_what_a_step_would_get(void)
{
    vmem_kv_pool *pool = k_pool(300);
    vmem_kv *a = make(ctx, 0, 0);
    join(pool, a, 20, 0, "a");
    const uint32_t slot = alloc(a, ROWS);
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = ROWS; // 250 pages
    pthread_mutex_lock(&pool->lock);
    pool->free = 0;
    pthread_mutex_unlock(&pool->lock);
    OK(vmem_kv_step(a, lengths, SLOTS, VMEM_KV_DRY));
    OK(step(a, slot, ROWS));
    vmem_kv_destroy(a);
    vmem_kv_pool_destroy(pool);
}

// A step that is short asks for what it lacks, and one that is not ends that question.
static void test_a_step_ends_the_question(void)
{
    vmem_kv *a, *b;
    vmem_kv_pool *pool = make_pair(300, 0, 20, &a, &b);
    uint32_t s = alloc(a, ROWS), t = alloc(b, 0);
    OK(step(a, s, ROWS)); // 250 pages, which a request holds
    ERR(step(b, t, 1000), ENOMEM, "pages are missing");
    CHECK(k_pool_row(pool, "b").needs);
    OK(step(b, t, 200));
    CHECK_EQ(k_pool_row(pool, "b").needs, 0);
    end_pair(pool, a, b);
}

// A cache that no longer asks holds nobody up.
static void test_a_question_lapses(void)
{
    vmem_kv *a, *b;
    vmem_kv_pool *pool = make_pair(300, 0, 20, &a, &b);
    OK(step(a, alloc(a, ROWS), ROWS)); // 250 pages, which a request holds
    ask(b, 200);
    CHECK_EQ(wait_for(b), VMEM_KV_REFUSED);
    CHECK(k_pool_row(pool, "b").needs);
    vmem__pool_ask_ns = 0;
    while (k_pool_row(pool, "b").needs)
        usleep(100);
    CHECK_EQ(k_pool_row(pool, "b").answer, VMEM_KV_UNASKED);
    vmem__pool_ask_ns = UINT64_MAX;
    end_pair(pool, a, b);
}

// The device has no memory for what the background thread would back ahead. The pages that the request already has ahead
// can still be given.
static void test_a_giver_that_gets_no_more_pages(void)
{
    vmem_context *device = test_context(70 * test_page);
    vmem_kv_pool *pool = k_pool(1000);
    vmem_kv *giver = make(device, VMEM_KV_OVERLAP | VMEM_KV_GENEROUS, 0), *other = make(ctx, 0, 0);
    join(pool, giver, 0, 0, "giver");
    join(pool, other, 0, 0, "other");
    ask(giver, 500);
    const uint32_t slot = alloc(giver, 0);
    vmem__pool_ask_ns = 0;
    while (!k_stats(giver).worker_errors) {
        OK(step(giver, slot, 900));
        usleep(100);
    }
    vmem__pool_ask_ns = UINT64_MAX;
    ask(other, 1000);
    CHECK_EQ(wait_for(other), VMEM_KV_REFUSED);
    CHECK_EQ(k_stats(giver).held_pages, 58);
    end_pair(pool, giver, other);
    vmem_context_destroy(device);
}

static _Atomic int failures;

static void fail(enum vmem__kv_point point)
{
    if (point == KV_WORKER_UNLOCKED && failures > 0 && failures-- > 0)
        checked_fail(1); // in the background thread
}

// The system refuses to unmap a free slot's pages for a moment. The others' pages are given, and then these, too.
static void test_a_giver_that_fails_to_unmap(void)
{
    vmem_context *device;
    OK(checked_context(test_backend, 0, false, &device));
    vmem_kv_pool *pool = k_pool(600);
    vmem_kv *a = make(device, VMEM_KV_OVERLAP, 0), *b = make(ctx, 0, 0);
    join(pool, a, 0, 0, "a");
    join(pool, b, 0, 0, "b");
    const uint32_t s = alloc(a, 0), t = alloc(a, 0);
    OK(step(a, s, ROWS));
    OK(step(a, t, 100));
    OK(vmem_kv_free(a, s, 0)); // its pages go first
    OK(vmem_kv_free(a, t, 0));
    OK(vmem_kv_wait(a));
    failures = 1;
    vmem__kv_hook = fail;
    ask(b, 600);
    CHECK_EQ(wait_for(b), VMEM_KV_APPLIED);
    vmem__kv_hook = NULL;
    CHECK_EQ(failures, 0);
    CHECK_EQ(k_stats(a).worker_errors, 1);
    CHECK_EQ(k_stats(a).held_pages, 0);
    end_pair(pool, a, b);
    vmem_context_destroy(device);
}

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum { OPEN, SHUT, HOLDING } at_gate;

// Holds the background thread up in the middle of its next unmap.
static void hold(enum vmem__kv_point point)
{
    pthread_mutex_lock(&gate);
    if (point == KV_CALL_WAITS)
        at_gate = OPEN; // for a test that would wait for ever
    if (point == KV_WORKER_UNLOCKED && at_gate == SHUT)
        at_gate = HOLDING;
    pthread_cond_broadcast(&changed);
    while (point == KV_WORKER_UNLOCKED && at_gate == HOLDING)
        pthread_cond_wait(&changed, &gate);
    pthread_mutex_unlock(&gate);
}

// Member a has a request of 2 pages, and 250 pages that another has left. It is giving these to b, and its background thread
// is held up in the middle of the first unmap. Returns the request's slot.
static uint32_t begin_to_give(vmem_kv_pool *pool, vmem_kv *a, vmem_kv *b)
{
    join(pool, a, 20, 0, "a");
    join(pool, b, 20, 0, "b");
    uint32_t s = alloc(a, ROWS), t = alloc(a, 0);
    int32_t lengths[SLOTS] = {0};
    lengths[s] = ROWS;
    lengths[t] = 32; // 2 pages
    OK(k_missing(vmem_kv_step(a, lengths, SLOTS, 0), 0));
    OK(vmem_kv_wait(a));
    OK(vmem_kv_free(a, s, 0));
    pthread_mutex_lock(&gate);
    at_gate = SHUT;
    pthread_mutex_unlock(&gate);
    vmem__kv_hook = hold;
    ask(b, 500);
    pthread_mutex_lock(&gate);
    while (at_gate != HOLDING)
        pthread_cond_wait(&changed, &gate);
    pthread_mutex_unlock(&gate);
    while (k_pool_row(pool, "a").has > 260 * test_page) // what it has beside its pages and a little goes first
        usleep(100);
    return t;
}

// While a cache gives pages back, its requests still grow into what it has: they neither wait nor reclaim.
static void test_a_giver_steps_on(void)
{
    vmem_kv_pool *pool = k_pool(600);
    vmem_kv *a = make(ctx, VMEM_KV_OVERLAP, 0), *b = make(ctx, 0, 0);
    const uint32_t t = begin_to_give(pool, a, b);
    const struct vmem_kv_stats before = k_stats(a);
    OK(step(a, t, 96)); // a page more in each tensor than the background thread has backed
    CHECK_EQ(k_stats(a).reclaimed_pages, before.reclaimed_pages);
    pthread_mutex_lock(&gate);
    CHECK_EQ(at_gate, HOLDING); // nothing waited
    at_gate = OPEN;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&gate);
    wait_for(b);
    CHECK(k_pool_row(pool, "a").has >= 20 * test_page);
    CHECK_EQ(k_stats(a).needed_pages, 6);
    vmem__kv_hook = NULL;
    end_pair(pool, a, b);
}

// ---- threads ------------------------------------------------------------------------------------------------------

static _Atomic bool over;

// Slows the background threads down where they hold no lock, and lets calls overtake them.
static void slowly(enum vmem__kv_point point)
{
    static _Atomic uint64_t seed;
    uint64_t s = ++seed;
    if (point == KV_WORKER_UNLOCKED && rnd(&s) % 4 == 0)
        usleep((useconds_t)(rnd(&s) % 500));
}

struct server {
    vmem_kv *kv;
    uint64_t seed, served;
};

static uint64_t first_word(vmem_kv *kv, uint32_t slot)
{
    struct vmem_kv_layout l = {.size = sizeof l};
    OK(vmem_kv_get_layout(kv, 0, &l));
    return l.addr + slot * l.slot_stride;
}

// Requests of any size, one or two at a time, which wait for memory as an engine would. Where the other cache's thread
// has lost its core with all of the memory in its hands, none is served for a while.
static void *serve(void *arg)
{
    struct server *s = arg;
    for (int i = 0; i < 150 || s->served <= 20; i++) {
        int32_t lengths[SLOTS] = {0};
        uint32_t slots[2], n = 0;
        for (uint32_t k = 0; k < 1 + rnd(&s->seed) % 2; k++) {
            slots[n] = alloc(s->kv, 0);
            lengths[slots[n]] = 1 + (int32_t)(rnd(&s->seed) % ROWS);
            n++;
        }
        const int would = rnd(&s->seed) % 2 ? vmem_kv_step(s->kv, lengths, SLOTS, VMEM_KV_DRY) : 0;
        CHECK(!would || would == -ENOMEM);
        int rc = vmem_kv_step(s->kv, lengths, SLOTS, 0);
        for (int tries = 0; rc == -ENOMEM && tries < 20; tries++) {
            uint32_t answer;
            OK(vmem_kv_pool_wait(s->kv, 20, &answer));
            rc = vmem_kv_step(s->kv, lengths, SLOTS, 0);
        }
        CHECK(!rc || rc == -ENOMEM);
        for (uint32_t k = 0; k < n; k++) {
            if (!rc)
                put_word(ctx, first_word(s->kv, slots[k]), s->seed + k);
            s->served += !rc;
        }
        for (uint32_t k = 0; k < n; k++) {
            if (!rc)
                CHECK_EQ(get_word(ctx, first_word(s->kv, slots[k])), s->seed + k);
            OK(vmem_kv_free(s->kv, slots[k], 0));
        }
    }
    return NULL;
}

struct meddler {
    vmem_kv_pool *pool;
    vmem_kv *caches[2];
};

// Changes shares, looks, and comes and goes with a cache of its own.
static void *meddle(void *arg)
{
    struct meddler *m = arg;
    uint64_t seed = 7;
    while (!over) {
        vmem_kv *kv = m->caches[rnd(&seed) % 2];
        const uint64_t max = (260 + rnd(&seed) % 140) * test_page;
        int rc = vmem_kv_pool_set_share(kv, rnd(&seed) % 20 * test_page, max);
        CHECK(!rc || rc == -ENOMEM);
        struct vmem_kv_pool_info i = k_pool_info(m->pool);
        CHECK(i.members >= 2 && i.free <= i.budget);
        struct vmem_kv_pool_member row = {.size = sizeof row};
        for (uint32_t k = 0; k < VMEM_KV_POOL_MEMBERS; k++)
            if (!k_member(m->pool, k, &row))
                CHECK(row.has <= i.budget);
        vmem_kv *guest = make(ctx, VMEM_KV_OVERLAP, 0);
        join(m->pool, guest, 1, 0, "guest");
        vmem_kv_destroy(guest);
    }
    return NULL;
}

// In two directions at once, with slow background threads: no step waits for ever, and no row is lost. Both caches get
// memory, however long that takes.
static void test_threads(uint32_t flags)
{
    vmem_kv_pool *pool = k_pool(400);
    struct server servers[2] = {{make(ctx, flags, 0), 1, 0}, {make(ctx, flags, 0), 2, 0}};
    struct meddler m = {pool, {servers[0].kv, servers[1].kv}};
    pthread_t threads[3];
    join(pool, servers[0].kv, 10, 0, "a");
    join(pool, servers[1].kv, 10, 0, "b");
    over = false;
    vmem__kv_hook = slowly;
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&threads[i], NULL, serve, &servers[i]));
    CHECK(!pthread_create(&threads[2], NULL, meddle, &m));
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    over = true;
    pthread_join(threads[2], NULL);
    for (int i = 0; i < 2; i++)
        vmem_kv_destroy(servers[i].kv);
    vmem__kv_hook = NULL;
    CHECK_EQ(k_pool_info(pool).free, k_pool_info(pool).budget);
    vmem_kv_pool_destroy(pool);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    vmem__pool_ask_ns = UINT64_MAX; // no question lapses, however slow the machine is
    test_free_budget_is_had_at_once();
    test_a_closed_cache_leaves();
    test_kept_pages_move(0);
    test_kept_pages_move(VMEM_KV_OVERLAP);
    test_kept_pages_move(VMEM_KV_OVERLAP | VMEM_KV_GENEROUS | VMEM_KV_EAGER);
    test_what_requests_hold_is_refused();
    test_a_device_with_less_than_the_budget(0);
    test_a_device_with_less_than_the_budget(VMEM_KV_OVERLAP);
    test_shares_hold();
    for (int overlap = 0; overlap < 2; overlap++) {
        test_a_lower_maximum_holds_at_once(overlap ? VMEM_KV_OVERLAP : 0, true, false);
        test_a_lower_maximum_holds_at_once(overlap ? VMEM_KV_OVERLAP : 0, false, false);
        test_a_lower_maximum_holds_at_once(overlap ? VMEM_KV_OVERLAP : 0, false, true);
    }
    test_a_minimum_never_waits();
    test_a_maximum_holds();
    test_a_dry_step_knows_what_a_step_would_get();
    test_a_step_ends_the_question();
    test_a_question_lapses();
    test_a_giver_that_gets_no_more_pages();
    test_a_giver_that_fails_to_unmap();
    test_a_giver_steps_on();
    vmem__pool_ask_ns = 250000000; // as outside of tests
    test_threads(0);
    test_threads(VMEM_KV_OVERLAP | VMEM_KV_GENEROUS | VMEM_KV_EAGER);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    return 0;
}
