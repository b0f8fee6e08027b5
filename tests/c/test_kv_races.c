// Calls that meet the background thread in the middle of its work, at the points where it has dropped the lock.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "backend/host/host.h"
#include "checked.h"
#include "kv.h"
#include "kv/kv.h"

static vmem_context *ctx;
static vmem_kv *kv;

// ---- stopping the thread --------------------------------------------------------------------------------------

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum { RUNNING, ASKED, STOPPED } thread;
static int waited;  // calls that had to wait for it
static bool greedy; // it stops again at the next point when one does

static void set(int to)
{
    pthread_mutex_lock(&gate);
    thread = to;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&gate);
}
static void stopped(void)
{
    pthread_mutex_lock(&gate);
    while (thread != STOPPED)
        pthread_cond_wait(&changed, &gate);
    pthread_mutex_unlock(&gate);
}

static void at(enum vmem__kv_point point)
{
    if (point == KV_CALL_WAITS) {
        waited++;
        set(greedy ? ASKED : RUNNING);
    }
    pthread_mutex_lock(&gate);
    if (point == KV_WORKER_UNLOCKED && thread == ASKED) {
        thread = STOPPED;
        pthread_cond_broadcast(&changed);
        while (thread == STOPPED)
            pthread_cond_wait(&changed, &gate);
    }
    pthread_mutex_unlock(&gate);
}

static void step(int32_t a, int32_t b)
{
    int32_t lengths[3] = {a, b, 0};
    OK(vmem_kv_step(kv, lengths, 3, 0)); // and the books are recounted
}

// A cache of one tensor, with a window of 64 rows, 32 of which are in a page.
static void create(uint32_t flags)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32, .window = 64};
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = &tensor, .n_tensors = 1, .slots = 3,
                  .max_tokens = 1000, .budget = 60 * test_page);
}

// Slot 0, of 225 tokens, has pages [0, 4) to give up, and the thread has begun to. A prefix holds the pages behind them.
// shared: slots 1 and 2 have a page in common, and no prefix has it.
static uint64_t cutting_with(uint32_t flags, bool shared)
{
    create(flags | VMEM_KV_OVERLAP);
    uint32_t a, b;
    uint64_t prefix;
    OK(k_alloc(kv, 0, &a));
    OK(k_alloc(kv, 0, &b));
    step(223, 40);
    OK(vmem_kv_wait(kv));
    if (shared) {
        OK(k_save(kv, 1, 40, &prefix));
        OK(k_alloc(kv, 0, &b));
        OK(k_attach(kv, prefix, b, 40, 0));
        OK(k_drop(kv, prefix));
    }
    set(ASKED);
    step(0, 62); // its next page is mapped in the background
    stopped();
    step(224, 0);
    step(225, 0);
    OK(k_save(kv, 0, 224, &prefix));
    set(ASKED); // it goes on, to the next point
    stopped();
    waited = 0;
    return prefix;
}

static uint64_t cutting(void) { return cutting_with(0, false); }

static void end_cut(void)
{
    set(RUNNING);
    OK(vmem_kv_wait(kv));
}

static void end(uint64_t prefix)
{
    end_cut();
    OK(vmem_kv_free(kv, 0, 0));
    OK(k_drop(kv, prefix));
    OK(vmem_kv_free(kv, 1, 0));
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// A step whose window passes more shared pages of the span that is being cut.
static void test_a_window_moves_on(void)
{
    uint64_t prefix = cutting();
    step(226, 0);
    CHECK(waited);
    CHECK_EQ(k_slot(kv, 0).pages, 3);
    end(prefix);
}

// Pages that a step makes meanwhile are not taken off what the window gave up.
static void test_a_step_grows_beside_a_cut(void)
{
    uint64_t prefix = cutting();
    step(0, 400);
    end_cut();
    const struct vmem_kv_stats st = k_stats(kv);
    CHECK(st.window_pages < 100);
    end(prefix);
}

// A truncation that waits until the thread has unmapped what a freed slot shared: the thread begins nothing in this one
// meanwhile.
static void test_the_thread_begins_nothing_while_a_call_waits(void)
{
    uint32_t s;
    uint64_t prefix;
    create(VMEM_KV_DEFER | VMEM_KV_OVERLAP);
    for (int i = 0; i < 3; i++)
        OK(k_alloc(kv, 0, &s));
    step(64, 62);
    OK(k_save(kv, 0, 64, &prefix));
    OK(k_attach(kv, prefix, 2, 64, 0));
    OK(vmem_kv_wait(kv));
    set(ASKED);
    OK(vmem_kv_free(kv, 2, 0));
    stopped();
    for (int32_t n = 150; n < 153; n++)
        step(0, n); // pages [0, 2) of slot 1 are due, too
    waited = 0;
    greedy = true;
    OK(vmem_kv_truncate(kv, 1, 130, 0)); // cuts these itself
    greedy = false;
    CHECK(waited);
    end(prefix);
}

// A request ends beside the cut, and waits for nothing. Where no prefix holds the pages that it shared, they become another
// slot's own.
static void test_a_request_ends_beside_a_cut(bool shared)
{
    uint64_t prefix = cutting_with(VMEM_KV_DEFER, shared), other;
    if (!shared)
        OK(k_save(kv, 1, 60, &other));
    OK(vmem_kv_free(kv, 1, 0));
    CHECK_EQ(waited, 0);
    end_cut();
    if (shared)
        OK(vmem_kv_free(kv, 2, 0));
    else
        OK(k_drop(kv, other));
    OK(vmem_kv_free(kv, 0, 0));
    OK(k_drop(kv, prefix));
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// A window has passed a page that a request had begun with, too, and that request has ended. The page is its writer's alone
// again, and the thread gives it up, but the freed slot still has it mapped: a request that begins there waits.
static void test_a_request_begins_where_a_page_going_away_is_mapped(bool attaches)
{
    uint32_t s, begun;
    uint64_t prefix, own;
    create(VMEM_KV_DEFER | VMEM_KV_OVERLAP);
    for (int i = 0; i < 3; i++)
        OK(k_alloc(kv, 0, &s));
    step(62, 64);
    OK(k_hold(kv, 1, 0, 64, &own));
    OK(k_save(kv, 0, 62, &prefix));
    OK(k_attach(kv, prefix, 2, 62, 0));
    OK(vmem_kv_wait(kv));
    set(ASKED);
    step(63, 94); // slot 1's next page is mapped in the background
    stopped();
    OK(vmem_kv_free(kv, 2, 0));
    OK(k_drop(kv, prefix));
    CHECK_EQ(k_slot(kv, 0).shared_tokens, 0);
    for (int32_t n = 125; n < 128; n++) // page 0 of slot 0 is due
        step(n, 0);
    while (!kv_span(kv, 0, 0)->lo) { // until the thread has begun to give it up
        set(ASKED);
        stopped();
    }
    CHECK(kv->slots[0].busy && kv->slots[2].stale);
    waited = 0;
    OK(k_alloc(kv, 0, &s));
    CHECK_EQ(s, 2);
    if (attaches) {
        OK(vmem_kv_attach(kv, s, &own, 1, UINT32_MAX, 0, &begun));
        CHECK_EQ(begun, 64);
    } else {
        int32_t lengths[3] = {0, 0, 40};
        OK(vmem_kv_step(kv, lengths, 3, 0));
    }
    CHECK(waited);
    end_cut();
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// The same where the cut fails: what steps asked for meanwhile still stands, and the pages go at last.
static void test_a_cut_fails(void)
{
    create(0);
    uint32_t a;
    OK(k_alloc(kv, 0, &a));
    step(223, 0);
    pthread_mutex_lock(&kv->gate.state);
    struct kv_cut cut = {0};
    OK(vmem__kv_cut_begin(kv, &cut, 0, 0, 0, 7));
    pthread_mutex_unlock(&kv->gate.state);
    step(224, 0);
    struct kv_span before = *kv_span(kv, 0, 0);
    pthread_mutex_lock(&kv->gate.state);
    vmem__kv_cut_end(kv, &cut, -ENOMEM);
    pthread_mutex_unlock(&kv->gate.state);
    CHECK_EQ(kv_span(kv, 0, 0)->step.lo, before.step.lo);
    CHECK_EQ(kv_span(kv, 0, 0)->in_flight.hi, before.in_flight.hi);
    free(cut.ops);
    free(cut.pages);
    step(226, 0);
    OK(vmem_kv_free(kv, 0, 0));
    vmem_kv_destroy(kv);
}

// A step cuts rows that a window has passed and that a prefix holds, too. If that fails, the next step tries again. The
// thread does not, because holders would change while it has dropped the lock.
static void test_the_thread_leaves_what_others_hold(void)
{
    vmem_context *device = ctx, *failing;
    uint32_t a, b;
    uint64_t prefix;
    OK(checked_context(test_backend, 0, false, &failing));
    ctx = failing;
    create(VMEM_KV_DEFER | VMEM_KV_OVERLAP);
    OK(k_alloc(kv, 0, &a));
    OK(k_alloc(kv, 0, &b));
    step(224, 222);
    OK(k_save(kv, a, 224, &prefix));
    step(225, 224);
    OK(vmem_kv_wait(kv));
    checked_fail_always(true);
    step(226, 226);
    CHECK(checked_failed());
    checked_fail_always(false);
    const uint32_t lo = kv_span(kv, a, 0)->lo;
    OK(vmem_kv_wait(kv));
    CHECK_EQ(kv_span(kv, a, 0)->lo, lo);
    CHECK_EQ(kv_span(kv, b, 0)->lo, kv_span(kv, b, 0)->in_flight.lo); // it goes on with other slots
    step(227, 227);
    CHECK(kv_span(kv, a, 0)->lo > lo);
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    ctx = device;
}

// While the driver is asked for the device's memory, the thread makes its pages.
static int asked(struct vmem__host_memory *m)
{
    const uint64_t created = test_stats(ctx).created;
    checked_host_memory = NULL; // the thread asks, too
    set(RUNNING);
    while (test_stats(ctx).created == created)
        sched_yield();
    *m = (struct vmem__host_memory){.total = 1024 * MIB, .available = 1024 * MIB};
    return 0;
}

// What a dry step answers in which a new request begins with so many pages.
static int would_begin(uint32_t pages)
{
    int32_t lengths[3] = {0};
    uint32_t s;
    OK(k_alloc(kv, 0, &s));
    lengths[s] = (int32_t)(32 * pages);
    const int rc = vmem_kv_step(kv, lengths, 3, VMEM_KV_DRY);
    OK(vmem_kv_free(kv, s, 0));
    return rc;
}

// A budget of the context that the thread's pages are part of: those that it makes meanwhile are not lost.
static void test_a_dry_step_beside_growth(void)
{
    uint32_t s;
    create(VMEM_KV_LAZY | VMEM_KV_OVERLAP);
    OK(vmem_kv_set_budget(kv, 16 * test_page));
    OK(vmem_set_budget(ctx, 8 * test_page));
    OK(k_alloc(kv, 0, &s));
    set(ASKED);
    step(31, 0);
    stopped();               // before it maps the next pages
    ctx->device_free.at = 1; // long ago
    checked_host_memory = asked;
    OK(would_begin(7)); // of 8, one is in use
    end_cut();
    OK(would_begin(7));
    CHECK_EQ(would_begin(8), -ENOMEM);
    vmem_kv_destroy(kv);
    OK(vmem_set_budget(ctx, 0));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    vmem__kv_hook = at;
    test_a_window_moves_on();
    test_a_step_grows_beside_a_cut();
    test_the_thread_begins_nothing_while_a_call_waits();
    test_a_request_ends_beside_a_cut(false);
    test_a_request_ends_beside_a_cut(true);
    test_a_request_begins_where_a_page_going_away_is_mapped(true);
    test_a_request_begins_where_a_page_going_away_is_mapped(false);
    test_a_cut_fails();
    test_the_thread_leaves_what_others_hold();
    if (!strcmp(test_backend, "host"))
        test_a_dry_step_beside_growth();
    vmem_context_destroy(ctx);
    return 0;
}
