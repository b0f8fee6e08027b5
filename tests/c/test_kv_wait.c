// A step waits for the background thread only where it needs the very pages that are being mapped.
//
// SPDX-License-Identifier: MIT
#include <dirent.h>
#include <sched.h>
#include <stdatomic.h>

#include "checked.h"
#include "kv.h"
#include "kv/kv.h"

static vmem_context *ctx;
static vmem_kv *kv;
static atomic_int returned;

static void step(int32_t a, int32_t b)
{
    int32_t lengths[2] = {a, b};
    OK(vmem_kv_step(kv, lengths, 2, 0));
}

static void *step_a(void *arg)
{
    (void)arg;
    step(65, 0);
    atomic_store(&returned, 1);
    return NULL;
}

static void may_not_wait(enum vmem__kv_point point)
{
    if (point == KV_CALL_WAITS)
        FAIL("a call that needs nothing of the background thread waits for it");
}

static atomic_int waiting;
static void waits(enum vmem__kv_point point)
{
    if (point == KV_CALL_WAITS)
        atomic_store(&waiting, 1);
}

static int batch_threads(void)
{
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));)
        n += atoi(task->d_name) > 0 && sched_getscheduler(atoi(task->d_name)) == SCHED_BATCH;
    closedir(tasks);
    return n;
}

// A step that wakes the background thread does not lose its core to it.
static void the_thread_leaves_the_core_to_a_step(struct vmem_kv_config cfg)
{
    const int before = batch_threads();
    if (sched_getscheduler(0) != SCHED_OTHER)
        return;
    cfg.flags = VMEM_KV_OVERLAP;
    OK(vmem_kv_create(ctx, &cfg, &kv));
    CHECK_EQ(batch_threads(), before + 1);
    CHECK_EQ(sched_getscheduler(0), SCHED_OTHER);
    vmem_kv_destroy(kv);
}

// Where the device may have less than the budget, missing pages are counted while the background thread pauses. Growth
// that lacks none counts nothing.
static void growth_waits_for_nothing(struct vmem_kv_config cfg)
{
    uint32_t a, b;
    cfg.flags = VMEM_KV_OVERLAP | VMEM_KV_LAZY;
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(k_alloc(kv, 0, &a));
    OK(k_alloc(kv, 0, &b));
    step(40, 100);
    OK(vmem_kv_wait(kv));
    OK(vmem_kv_truncate(kv, b, 10, 0));
    checked_hold();
    step(62, 0);
    checked_held();
    vmem__kv_hook = may_not_wait;
    for (int32_t n = 11; n <= 100; n++) {
        int32_t lengths[2] = {0};
        lengths[b] = n;
        OK(vmem_kv_step(kv, lengths, 2, VMEM_KV_DRY));
    }
    vmem__kv_hook = NULL;
    checked_resume();
    vmem_kv_destroy(kv);
}

// Runs are bookkeeping: they are made and dropped beside the background thread's maps and unmaps, which release the pages.
static void runs_wait_for_nothing(struct vmem_kv_config cfg)
{
    struct vmem_kv_run of_a = {.tokens = 60, .keep = 1};
    uint64_t runs[3], freed;
    uint32_t a, b;
    cfg.flags |= VMEM_KV_LAZY | VMEM_KV_DEFER;
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(k_alloc(kv, 0, &a));
    OK(k_alloc(kv, 0, &b));
    step(40, 96);
    OK(vmem_kv_wait(kv));
    checked_hold();
    step(62, 96);
    checked_held(); // at slot a
    vmem__kv_hook = may_not_wait;
    of_a.slot = a;
    OK(vmem_kv_share(kv, &of_a, 1, 0));
    vmem__kv_hook = NULL;
    checked_resume();
    for (uint32_t i = 0; i < 3; i++)
        OK(k_hold(kv, b, i * 32, 32, &runs[i]));
    OK(vmem_kv_wait(kv));
    const uint64_t held = k_stats(kv).held_pages;
    checked_hold();
    OK(vmem_kv_free(kv, b, 0));
    checked_held(); // unmapping what the slot shared
    vmem__kv_hook = may_not_wait;
    OK(vmem_kv_drop(kv, runs, 3, &freed));
    vmem__kv_hook = NULL;
    CHECK_EQ(freed, 3);
    CHECK_EQ(k_stats(kv).held_pages, held);
    CHECK_EQ(k_stats(kv).free_pages, 60 - 2); // a step may take them: they are released first
    checked_resume();
    OK(vmem_kv_wait(kv));
    CHECK_EQ(k_stats(kv).held_pages, held - 3);
    vmem_kv_destroy(kv);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vmem_context_info(ctx, &test_info));
    uint64_t page = test_info.page_sizes & -test_info.page_sizes;
    // 32 tokens to a page; the background thread maps the next page when 4 tokens are left.
    const struct vmem_kv_tensor tensor = {.row_bytes = page / 32};
    struct vmem_kv_config cfg = {.size = sizeof cfg,
                                 .flags = VMEM_KV_OVERLAP | VMEM_KV_CHECK,
                                 .tensors = &tensor,
                                 .n_tensors = 1,
                                 .slots = 2,
                                 .max_tokens = 1000,
                                 .page_size = page,
                                 .budget = 60 * page};
    the_thread_leaves_the_core_to_a_step(cfg);
    growth_waits_for_nothing(cfg);
    runs_wait_for_nothing(cfg);
    OK(vmem_kv_create(ctx, &cfg, &kv));
    uint32_t a, b;
    OK(k_alloc(kv, 0, &a));
    OK(k_alloc(kv, 0, &b));
    CHECK(a == 0 && b == 1);
    step(40, 10);
    OK(vmem_kv_wait(kv));
    CHECK_EQ(k_stats(kv).ahead_jobs, 0);

    checked_hold();
    step(62, 0); // two tokens are left to slot 0: its next page is mapped in the background, and stays at it
    checked_held();
    for (int32_t i = 11; i < 29; i++)
        step(i < 15 ? 63 : 64, i); // nothing is needed that is not there
    step(0, 200);                  // slot 1 needs pages of its own
    CHECK_EQ(k_stats(kv).step_waits, 0);
    CHECK_EQ(k_stats(kv).step_mapped_pages, 2 + 1 + 6);
    struct vmem_kv_stats st = k_stats(kv); // does not wait for the thread either
    CHECK_EQ(st.held_pages, 2 + 7 + 1);

    pthread_t thread;
    vmem__kv_hook = waits;
    CHECK(!pthread_create(&thread, NULL, step_a, NULL));
    while (!atomic_load(&waiting)) {
        sched_yield();
        CHECK(!atomic_load(&returned));
    }
    for (int i = 0; i < 50; i++) { // it has every chance to return
        sched_yield();
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        CHECK(!atomic_load(&returned));
    }
    checked_resume();
    CHECK(!pthread_join(thread, NULL));
    vmem__kv_hook = NULL;
    CHECK_EQ(k_stats(kv).step_waits, 1);
    CHECK_EQ(k_stats(kv).step_mapped_pages, 2 + 1 + 6); // the page came from the background
    CHECK(k_stats(kv).ahead_mapped_pages >= 1);

    // Freeing a slot that is being extended, and destroying the cache meanwhile, wait too.
    OK(vmem_kv_wait(kv));
    checked_hold();
    step(94, 0);
    checked_held();
    checked_resume();
    OK(vmem_kv_free(kv, 0, 0));
    OK(k_alloc(kv, 0, &a));
    step(94, 0);
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    return 0;
}
