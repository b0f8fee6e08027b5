// One budget for several caches of a process: it goes where it is needed.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <unistd.h>

#include "harness.h"
#include "kv/kv.h"

#define SLOTS 4
#define ROWS 4000 // of 1/32 page: 125 pages in each of two tensors

static vmem_context *ctx;

static vmem_kv *make(vmem_context *c, uint32_t flags, uint32_t idle_ms)
{
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    struct vmem_kv_config cfg = {.size = sizeof cfg,
                                 .flags = flags | VMEM_KV_DEFER | VMEM_KV_CHECK | VMEM_KV_LAZY,
                                 .tensors = tensors,
                                 .n_tensors = 2,
                                 .slots = SLOTS,
                                 .max_tokens = ROWS,
                                 .page_size = test_page,
                                 .budget = test_page,
                                 .idle_ms = idle_ms};
    vmem_kv *kv;
    OK(vmem_kv_create(c, &cfg, &kv));
    return kv;
}

static vmem_kv_pool *make_pool(uint64_t pages)
{
    struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = pages * test_page};
    vmem_kv_pool *pool;
    OK(vmem_kv_pool_create(&cfg, &pool));
    return pool;
}

static void join(vmem_kv_pool *pool, vmem_kv *kv, uint64_t min, uint64_t max, const char *name)
{
    struct vmem_kv_share share = {.size = sizeof share, .min = min * test_page, .max = max * test_page, .name = name};
    OK(vmem_kv_pool_join(pool, kv, &share));
}

static struct vmem_kv_stats stats(vmem_kv *kv)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    return st;
}

static uint32_t alloc(vmem_kv *kv, uint32_t tokens)
{
    uint32_t slot;
    OK(vmem_kv_alloc(kv, tokens, &slot));
    return slot;
}

static int step(vmem_kv *kv, uint32_t slot, int32_t tokens)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = tokens;
    return vmem_kv_step(kv, lengths, SLOTS, NULL);
}

static struct vmem_kv_shortage shortage(void)
{
    struct vmem_kv_shortage s = {.size = sizeof s};
    OK(vmem_kv_last_shortage(&s));
    return s;
}

static uint32_t wait_for(vmem_kv *kv)
{
    uint32_t answer;
    OK(vmem_kv_pool_wait(kv, 60000, &answer));
    return answer;
}

static struct vmem_kv_pool_info info(vmem_kv_pool *pool)
{
    struct vmem_kv_pool_info i = {.size = sizeof i};
    OK(vmem_kv_pool_query(pool, &i));
    return i;
}

static void test_free_budget_is_had_at_once(void)
{
    vmem_kv_pool *pool = make_pool(400);
    vmem_kv *a = make(ctx, 0, 0), *b = make(ctx, 0, 0);
    join(pool, a, 20, 0, "a");
    join(pool, b, 20, 0, "b");
    CHECK_EQ(info(pool).members, 2);
    CHECK_EQ(info(pool).free, 360 * test_page);
    uint32_t s = alloc(a, ROWS);
    OK(step(a, s, ROWS)); // 250 pages
    CHECK_EQ(stats(a).held_pages, 250);
    CHECK(stats(a).budget_pages >= 250 && stats(a).budget_pages <= 380);
    uint64_t missing;
    int32_t lengths[SLOTS] = {0};
    uint32_t t = alloc(b, ROWS);
    lengths[t] = ROWS;
    CHECK_EQ(vmem_kv_step(b, lengths, SLOTS, &missing), -ENOMEM);
    CHECK_EQ(stats(a).held_pages, 250);
    vmem_kv_destroy(a);
    vmem_kv_destroy(b);
    vmem_kv_pool_destroy(pool);
}

static void test_kept_pages_move(uint32_t flags)
{
    vmem_kv_pool *pool = make_pool(300);
    vmem_kv *a = make(ctx, flags, 0), *b = make(ctx, flags, 0);
    join(pool, a, 20, 0, "a");
    join(pool, b, 20, 0, "b");
    for (int turn = 0; turn < 6; turn++) {
        vmem_kv *to = turn % 2 ? b : a, *from = turn % 2 ? a : b;
        uint32_t s = alloc(to, ROWS);
        int tries = 0;
        while (step(to, s, ROWS)) {
            CHECK_EQ(shortage().reason, VMEM_KV_SHORT_OF_BUDGET);
            CHECK(shortage().coming_pages);
            CHECK_EQ(wait_for(to), VMEM_KV_APPLIED);
            CHECK(++tries < 10);
        }
        CHECK_EQ(stats(to).needed_pages, 250);
        CHECK(stats(from).budget_pages >= 20 && stats(from).budget_pages <= 50);
        OK(vmem_kv_free(to, s));
    }
    vmem_kv_destroy(a);
    vmem_kv_destroy(b);
    vmem_kv_pool_destroy(pool);
}

static void test_what_requests_hold_is_refused(void)
{
    vmem_kv_pool *pool = make_pool(300);
    vmem_kv *a = make(ctx, 0, 0), *b = make(ctx, 0, 0);
    join(pool, a, 20, 0, "a");
    join(pool, b, 20, 200, "b");
    uint32_t s = alloc(a, ROWS), t = alloc(b, ROWS);
    OK(step(a, s, ROWS));
    ERR(step(b, t, 2000), ENOMEM, "pages are missing"); // 125 and a little: there are 50
    CHECK_EQ(shortage().coming_pages, 76);
    CHECK_EQ(wait_for(b), VMEM_KV_REFUSED);
    ERR(step(b, t, 4000), ENOMEM, "pages are missing"); // over its maximum
    CHECK_EQ(shortage().coming_pages, 0);
    OK(vmem_kv_free(a, s));
    while (step(b, t, 2000))
        wait_for(b);
    vmem_kv_destroy(a);
    vmem_kv_destroy(b);
    vmem_kv_pool_destroy(pool);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_free_budget_is_had_at_once();
    test_kept_pages_move(0);
    test_kept_pages_move(VMEM_KV_OVERLAP);
    test_kept_pages_move(VMEM_KV_OVERLAP | VMEM_KV_GENEROUS | VMEM_KV_EAGER);
    test_what_requests_hold_is_refused();
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    return 0;
}
