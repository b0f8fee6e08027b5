// Every fault point of the KV cache's calls, one after the other. A call that fails for want of memory, or because the
// device refuses, has changed no row and no length. The books balance, and the call works when it is repeated.
//
// SPDX-License-Identifier: MIT
#include <sched.h>

#include "checked.h"
#include "kv.h"
#include "kv/kv.h"

#define SLOTS 4
#define TOKENS 300

static vmem_context *ctx;
static vmem_kv *kv;
static struct vmem_kv_layout layouts[3];
static uint32_t tokens[SLOTS]; // whose rows are written
static uint64_t prefix;

// 8 tokens to a page, whatever its size; in the third tensor, which has a window, 16.
static struct vmem_kv_tensor tensors[3] = {{.row_bytes = 0}, {.row_bytes = 0}, {.row_bytes = 0, .window = 32}};
static bool back; // slot 0 was swapped in, and its rows have not been written yet

static uint64_t word(uint32_t slot, uint32_t tensor, uint32_t row)
{
    return slot * 1000000ull + tensor * 10000 + row + 1;
}

// On a GPU each row is a copy: there it is the first of every 8, one of each page.
static uint32_t every(void) { return test_cpu() ? 1 : 8; }

static void write_rows(uint32_t slot, uint32_t as, uint32_t from, uint32_t to)
{
    for (uint32_t r = (from + every() - 1) / every() * every(); r < to; r += every())
        for (uint32_t t = 0; t < 3; t++)
            put_word(ctx, layouts[t].addr + slot * layouts[t].slot_stride + r * layouts[t].row_bytes, word(as, t, r));
    tokens[slot] = to;
}

// The first of n rows that a tensor has: what its window has passed is gone.
static uint32_t first(uint32_t t, uint32_t n)
{
    return t == 2 && n > 32 ? (n - 32 + every() - 1) / every() * every() : 0;
}

static void verify(uint32_t slot, uint32_t as, uint32_t n)
{
    for (uint32_t t = 0; t < 3; t++)
        for (uint32_t r = first(t, n); r < n; r += every())
            CHECK_EQ(get_word(ctx, layouts[t].addr + slot * layouts[t].slot_stride + r * layouts[t].row_bytes),
                     word(as, t, r));
}

static int step(uint32_t slot, uint32_t n)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = (int32_t)n;
    return vmem_kv_step(kv, lengths, SLOTS, 0);
}

static void start(uint32_t n)
{
    uint32_t slot;
    OK(k_alloc(kv, n, &slot));
    OK(step(slot, n));
    write_rows(slot, slot, 0, n);
}

// Slot 0 runs, slot 1 is newly allocated, slot 2 runs.
static void running(void)
{
    uint32_t slot;
    start(100);
    OK(k_alloc(kv, 0, &slot));
    start(60);
    CHECK(slot == 1 && tokens[2] == 60);
}
static void kept(void) // and slot 3 has kept pages
{
    running();
    start(150);
    OK(vmem_kv_free(kv, 3, 0));
}
static void saved(void)
{
    running();
    OK(k_save(kv, 0, 100, &prefix));
}
static void shared(void) // by ended requests, and no memory but what can be evicted
{
    struct vmem_kv_run runs[] = {{.slot = 0, .tokens = 100}, {.slot = 3, .tokens = 150}};
    running();
    start(150);
    OK(vmem_kv_share(kv, runs, 2, 0));
    prefix = runs[0].id;
    OK(vmem_kv_free(kv, 0, 0)); // first: it is the next to be evicted
    OK(vmem_kv_free(kv, 3, 0));
    OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, NULL));
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    OK(vmem_kv_set_budget(kv, st.held_pages * test_page));
}
static int do_out(void)
{
    uint64_t step;
    OK(vmem_kv_last_step(kv, &step));
    return vmem_kv_swap_out(kv, 0, tokens[0], step);
}
static void swapped(void)
{
    running();
    OK(do_out());
}
static void tight(void) // no memory but the pages of a request that has ended, which its slot keeps or has given up
{
    struct vmem_kv_stats st = {.size = sizeof st};
    running();
    start(150);
    OK(vmem_kv_get_stats(kv, &st));
    OK(vmem_kv_free(kv, 3, 0));
    OK(vmem_kv_set_budget(kv, st.held_pages * test_page));
}

static int do_step(void) { return step(0, 280); }
static int do_shorter_step(void) { return step(0, 230); }
static int do_first_step(void) { return step(1, 90); }
static int do_free(void) { return vmem_kv_free(kv, 0, 0); }
static int do_save(void) { return k_save(kv, 0, 90, &prefix); }
static int do_attach(void) { return k_attach(kv, prefix, 1, 99, 0); }
static int do_drop(void) { return k_drop(kv, prefix); }
static int do_truncate(void) { return vmem_kv_truncate(kv, 0, 91, 0); }
static int do_in(void)
{
    int rc = vmem_kv_swap_in(kv, 0);
    back = !rc;
    return rc;
}
static int do_smaller_budget(void)
{
    struct vmem_kv_stats before = {.size = sizeof before}, after = before;
    OK(vmem_kv_get_stats(kv, &before));
    const int rc = vmem_kv_set_budget(kv, test_page); // takes back all but what requests need
    OK(vmem_kv_get_stats(kv, &after));
    CHECK_EQ(after.budget_pages, rc ? before.budget_pages : 1);
    CHECK(rc || after.held_pages == after.needed_pages);
    if (!rc)
        OK(vmem_kv_set_budget(kv, 300 * test_page));
    return rc;
}
static int do_reclaim(void) { return vmem_kv_reclaim(kv, 1000 * MIB, 0, NULL); }

static const struct {
    const char *name;
    void (*before)(void);
    int (*call)(void);
    int32_t now[SLOTS]; // tokens to be found afterwards; -1: as before, -2: not looked at, -3: not even after a failure
    int least;          // fault points there must be
} calls[] = {
    {"step", running, do_step, {-1, -1, -1, -1}, 3},
    {"first step", running, do_first_step, {-1, -2, -1, -1}, 2},
    {"step with little memory", tight, do_shorter_step, {-1, -1, -1, -1}, 4},
    {"first step with little memory", tight, do_first_step, {-1, -2, -1, -1}, 4},
    {"free", saved, do_free, {-3, -1, -1, -1}, 0},
    {"prefix_save", running, do_save, {-1, -1, -1, -1}, 2},
    {"prefix_attach", saved, do_attach, {-1, 99, -1, -1}, 5},
    {"attach with little memory", shared, do_attach, {-1, 99, -1, -1}, 5},
    {"prefix_drop", saved, do_drop, {-1, -1, -1, -1}, 0},
    {"truncate", saved, do_truncate, {91, -1, -1, -1}, 4},
    {"swap_out", running, do_out, {-2, -1, -1, -1}, 1},
    {"swap_in", swapped, do_in, {100, -1, -1, -1}, 2},
    {"smaller budget", kept, do_smaller_budget, {-1, -1, -1, -1}, 1},
    {"reclaim", kept, do_reclaim, {-1, -1, -1, -1}, 1},
};

static void make(uint32_t flags)
{
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK | VMEM_KV_LAZY, .tensors = tensors, .n_tensors = 3,
                  .slots = SLOTS, .max_tokens = TOKENS, .budget = 300 * test_page);
    for (uint32_t t = 0; t < 3; t++) {
        layouts[t].size = sizeof layouts[t];
        OK(vmem_kv_get_layout(kv, t, &layouts[t]));
    }
    memset(tokens, 0, sizeof tokens);
    prefix = 0;
}

static void look(const char *name, bool done, const int32_t *now)
{
    struct vmem_kv_slot_info info = {.size = sizeof info};
    uint32_t before[SLOTS];
    memcpy(before, tokens, sizeof before);
    for (uint32_t t = 0; back && t < 3; t++)
        for (uint32_t r = first(t, tokens[0]); r < tokens[0]; r += every())
            put_word(ctx, layouts[t].addr + r * layouts[t].row_bytes, word(0, t, r));
    back = false;
    for (uint32_t s = 0; s < SLOTS; s++) {
        OK(vmem_kv_get_slot(kv, s, &info)); // checks the books, too
        if (info.state != VMEM_KV_ACTIVE || now[s] == -3 || (done && now[s] == -2))
            continue;
        uint32_t n = done && now[s] >= 0 ? (uint32_t)now[s] : before[s];
        bool grown = done && now[s] == -1 && info.tokens > n; // by a step: its new rows are not written yet
        if (info.tokens != n && !grown)
            FAIL("%s: slot %u has %u tokens, not %u", name, s, info.tokens, n);
        // A truncation may have lost what it was to forget.
        verify(s, s == 1 ? 0 : s, now[s] >= 0 && (uint32_t)now[s] < n ? (uint32_t)now[s] : n);
    }
}

// The next fault point. On a GPU with a handle a page there are hundreds, one as the other: every 2nd, 3rd and so on, the
// later they are.
static unsigned long next(unsigned long n) { return n + (test_cpu() ? 1 : 1 + n / 4); }

// lasting: every fault point from the nth on fails, among them those that undo what came before.
static void sweep(size_t i, uint32_t flags, bool lasting)
{
    int points = 0;
    for (unsigned long n = 1;; n = next(n)) {
        make(flags);
        calls[i].before();
        if (lasting)
            checked_fail_from(n);
        else
            checked_fail(n);
        int rc = calls[i].call();
        bool reached = checked_failed();
        checked_fail(0);
        checked_fail_always(false);
        if (rc && !reached)
            FAIL("%s: %s, and nothing was made to fail", calls[i].name, vmem_last_error());
        look(calls[i].name, !rc, calls[i].now);
        if (rc) {
            int again = calls[i].call();
            if (again)
                FAIL("%s: fault %lu gave %d; repeated: %s", calls[i].name, n, rc, vmem_last_error());
            look(calls[i].name, true, calls[i].now);
        }
        if (reached && !rc)
            OK(step(2, 70)); // it coped; so must what follows
        vmem_kv_destroy(kv);
        CHECK_EQ(test_stats(ctx).created, 0);
        CHECK_EQ(test_stats(ctx).reserved, 0);
        if (!reached)
            break;
        points++;
    }
    if (!(flags & VMEM_KV_GENEROUS) && points < calls[i].least)
        FAIL("%s has %d fault points, expected at least %d", calls[i].name, points, calls[i].least);
    printf("%s: %d fault points%s\n", calls[i].name, points, lasting ? ", lasting" : "");
}

// A freed slot still maps pages that only a run holds; without the background thread, nothing has unmapped them yet.
static void stale(void)
{
    saved();
    OK(vmem_kv_free(kv, 0, 0));
}

// A destruction has no second chance: whatever is refused meanwhile, once or for as long as it lasts, no page is lost.
static void sweep_destroy(void (*before)(void), bool lasting)
{
    bool reached = true;
    for (unsigned long n = 1; reached; n = next(n)) {
        make(VMEM_KV_DEFER);
        before();
        if (lasting)
            checked_fail_from(n);
        else
            checked_fail(n);
        vmem_kv_destroy(kv);
        reached = checked_failed();
        checked_fail(0);
        checked_fail_always(false);
        if (lasting) // the context frees what the driver did not let go, once it lets something go
            OK(vmem_trim(ctx, NULL));
        CHECK_EQ(test_stats(ctx).created, 0);
        CHECK_EQ(test_stats(ctx).mapped, 0);
        CHECK_EQ(test_stats(ctx).reserved, 0);
    }
}

// With VMEM_KV_ZERO: an attach that fails leaves none of the prefix's rows in the pages that the slot was prepared with.
static void sweep_attach_with_zero(void)
{
    bool reached = true;
    for (unsigned long n = 1; reached; n++) {
        uint32_t slot;
        make((VMEM_KV_DEFAULT & ~VMEM_KV_GENEROUS) | VMEM_KV_ZERO);
        start(100);
        CHECK_EQ(tokens[0], 100);
        OK(k_save(kv, 0, 100, &prefix));
        OK(vmem_kv_wait(kv));
        OK(k_alloc(kv, 150, &slot));
        CHECK_EQ(slot, 1);
        OK(vmem_kv_wait(kv));
        const struct vmem_kv_slot_info info = k_slot(kv, slot);
        CHECK(info.pages);
        checked_fail(n);
        int rc = do_attach();
        reached = checked_failed();
        checked_fail(0);
        if (rc)
            OK(step(1, 100));
        for (uint32_t t = 0; rc && t < 3; t++)
            for (uint32_t r = 0; r < 100; r++)
                CHECK_EQ(get_word(ctx, layouts[t].addr + layouts[t].slot_stride + r * layouts[t].row_bytes), 0);
        vmem_kv_destroy(kv);
    }
}

// The background thread has begun to work, but with no slot yet, when a step plans; it goes on when the step waits for it.
static _Atomic enum { GOES, STOPS, STOPPED } worker;
static void stop_worker(enum vmem__kv_point point)
{
    if (point == KV_WORKER_ASKED && worker == STOPS)
        for (worker = STOPPED; worker == STOPPED;)
            sched_yield();
    else if (point == KV_CALL_WAITS)
        worker = GOES;
}
static void sweep_step_beside_worker(unsigned long k)
{
    bool reached = true;
    vmem__kv_hook = stop_worker;
    for (unsigned long n = 1; reached; n++) {
        make(VMEM_KV_DEFER | VMEM_KV_OVERLAP);
        kept();
        OK(vmem_kv_wait(kv));
        OK(vmem_kv_set_budget(kv, 200 * test_page)); // gives up what is there beyond pages: it is asked for again
        worker = STOPS;
        OK(step(0, 200)); // the thread is to back what follows
        write_rows(0, 0, 100, 200);
        while (worker != STOPPED)
            sched_yield();
        checked_fail_many(n, k);
        const int rc = step(0, 300);
        reached = checked_failed();
        checked_fail(0);
        worker = GOES;
        if (rc != -ENOMEM)
            OK(rc);
        OK(step(0, 300));
        verify(0, 0, 200);
        verify(2, 2, 60);
        vmem_kv_destroy(kv);
    }
    vmem__kv_hook = NULL;
}

// Creation, with the background thread as well.
static void sweep_create(void)
{
    for (unsigned long n = 1;; n++) {
        struct vmem_kv_config cfg = {.size = sizeof cfg,
                                     .flags = VMEM_KV_DEFAULT,
                                     .tensors = tensors,
                                     .n_tensors = 3,
                                     .slots = SLOTS,
                                     .max_tokens = TOKENS,
                                     .page_size = test_page,
                                     .budget = 300 * test_page};
        checked_fail(n);
        int rc = vmem_kv_create(ctx, &cfg, &kv);
        bool reached = checked_failed();
        checked_fail(0);
        if (!rc)
            vmem_kv_destroy(kv);
        CHECK(!rc || reached);
        CHECK_EQ(test_stats(ctx).reserved, 0);
        if (!reached)
            break;
    }
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vmem_context_info(ctx, &test_info));
    test_page = test_info.page_sizes & -test_info.page_sizes;
    tensors[0].row_bytes = tensors[1].row_bytes = test_page / 8;
    tensors[2].row_bytes = test_page / 16;
    sweep_create();
    for (size_t i = 0; i < COUNT(calls); i++) {
        for (int lasting = 0; lasting < 2; lasting++) {
            sweep(i, VMEM_KV_DEFER, lasting);
            sweep(i, VMEM_KV_DEFER | VMEM_KV_GENEROUS | VMEM_KV_ZERO, lasting);
        }
    }
    sweep_attach_with_zero();
    for (unsigned long k = 1; k < 4; k++)
        sweep_step_beside_worker(k);
    void (*const states[])(void) = {kept, saved, shared, swapped, stale};
    for (size_t i = 0; i < COUNT(states); i++) {
        sweep_destroy(states[i], false);
        sweep_destroy(states[i], true);
    }
    vmem_context_destroy(ctx);
    return 0;
}
