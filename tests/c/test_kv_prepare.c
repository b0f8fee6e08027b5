// While requests that wait are asked for in a pool, its thread takes the device memory: steps wait in no driver for it.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <stdatomic.h>

#include "checked.h"
#include "kv.h"
#include "kv/kv.h"
#include "pool/pool.h"

#define SLOTS 6
#define UNIT (32 * MIB) // what the thread takes at a time

static vmem_context *ctx, *device; // the giver's, and the getter's, on which an arena is memory
static const struct vmem__ops *inner;
static struct vmem__ops ops;
static uint32_t tokens; // of a request of a unit

static pthread_t caller;
static _Atomic int by_caller; // arenas that a call made
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int64_t permits; // arenas that the pool's thread may make
static bool at_gate, fails;

static int arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    bool none;
    if (pthread_equal(pthread_self(), caller)) {
        by_caller++;
        return inner->arena_new(b, a);
    }
    pthread_mutex_lock(&gate);
    while (!permits && !fails) {
        at_gate = true;
        pthread_cond_broadcast(&changed);
        pthread_cond_wait(&changed, &gate);
    }
    at_gate = false;
    none = !permits;
    permits -= !none;
    pthread_mutex_unlock(&gate);
    return none ? vmem__error(-ENOMEM, "no memory for an arena") : inner->arena_new(b, a);
}

// So many units of memory.
static void allow(int64_t units, bool fail_then)
{
    pthread_mutex_lock(&gate);
    permits = units * (int64_t)(UNIT / device->b.arena_max);
    at_gate = false;
    fails = fail_then;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&gate);
}

// Until the thread is about to take memory that it may not have yet.
static void wait_at_gate(void)
{
    pthread_mutex_lock(&gate);
    while (!at_gate)
        pthread_cond_wait(&changed, &gate);
    pthread_mutex_unlock(&gate);
}

static vmem_kv *make(vmem_context *c)
{
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    struct vmem_kv_config cfg = {.size = sizeof cfg,
                                 .flags = VMEM_KV_DEFER | VMEM_KV_CHECK | VMEM_KV_LAZY,
                                 .tensors = tensors,
                                 .n_tensors = 2,
                                 .slots = SLOTS,
                                 .max_tokens = tokens,
                                 .page_size = test_page,
                                 .budget = test_page};
    vmem_kv *kv;
    OK(vmem_kv_create(c, &cfg, &kv));
    return kv;
}

static vmem_kv_pool *pool;
static vmem_kv *giver, *getter;

static void begin(void)
{
    struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = 4 * UNIT};
    struct vmem_kv_pool_share share = {.size = sizeof share, .max = 3 * UNIT, .name = "giver"};
    OK(vmem_kv_pool_create(&cfg, &pool));
    giver = make(ctx);
    getter = make(device);
    OK(vmem_kv_pool_join(pool, giver, &share));
    share.max = 0;
    share.name = "getter";
    OK(vmem_kv_pool_join(pool, getter, &share));
    if (device->b.arena_min < device->b.arena_max) { // otherwise an arena is a page, and cannot be mapped in parts
        device->b.arena_min = BLOCK;
        device->b.arena_max = UNIT;
    }
    OK(vmem_trim(device, NULL));
    by_caller = 0;
}

static void end(void)
{
    allow(1000, false);
    vmem_kv_destroy(giver, 0);
    vmem_kv_destroy(getter, 0);
    vmem_kv_pool_destroy(pool);
}

static uint32_t alloc(vmem_kv *kv)
{
    uint32_t slot;
    OK(k_alloc(kv, 0, &slot));
    return slot;
}

static int step(vmem_kv *kv, uint32_t slot, uint32_t length)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = (int32_t)length;
    return vmem_kv_step(kv, lengths, SLOTS, 0);
}

// The giver's requests, of a unit each. The first `ended` have ended, and their pages are kept.
static void load_giver(int requests, int ended)
{
    for (int i = 0; i < requests; i++)
        OK(step(giver, alloc(giver), tokens));
    for (int i = 0; i < ended; i++)
        OK(vmem_kv_free(giver, (uint32_t)i, 0));
}

// How many of four requests of a unit fit.
static size_t fit(void)
{
    const struct vmem_kv_request waiting[4] = {{.tokens = tokens},
                                               {.tokens = tokens},
                                               {.tokens = tokens},
                                               {.tokens = tokens}};
    size_t n;
    int rc = vmem_kv_fit(getter, waiting, 4, &n);
    CHECK(rc == (n < 4 ? -ENOMEM : 0));
    return n;
}

static uint64_t budget(void)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(getter, &st));
    return st.budget_pages * test_page;
}

// Asks for four requests. The thread stops before it takes any memory.
static void ask(void)
{
    bool there = false;
    allow(0, false);
    while (!there) {
        fit();
        usleep(100);
        pthread_mutex_lock(&gate);
        there = at_gate;
        pthread_mutex_unlock(&gate);
    }
}

static uint32_t answer(void)
{
    uint32_t given;
    OK(vmem_kv_pool_wait(getter, UINT32_MAX, &given));
    return given;
}

static void test_a_step_does_not_wait_for_memory(void)
{
    begin();
    load_giver(3, 3);
    ask();
    CHECK_EQ(budget(), UNIT);
    allow(2, false); // for the free budget, and one portion of what the giver gives
    wait_at_gate();
    struct vmem_kv_pool_member row = {.size = sizeof row};
    OK(k_member(pool, 1, &row));
    CHECK(row.has >= 3 * UNIT);
    // There is memory for two requests. That is what can be had, as long as the thread waits.
    uint32_t room;
    uint32_t slots[3] = {alloc(getter), alloc(getter), alloc(getter)};
    OK(step(getter, slots[0], tokens));
    OK(vmem_kv_room(getter, (int32_t)slots[1], &room));
    CHECK_EQ(room, tokens);
    OK(step(getter, slots[1], tokens));
    CHECK_EQ(budget(), 2 * UNIT);
    OK(vmem_kv_room(getter, (int32_t)slots[2], &room));
    CHECK_EQ(room, 0);
    ERR(step(getter, slots[2], tokens), ENOMEM, "pages are missing");
    struct vmem_kv_shortage s = {.size = sizeof s};
    OK(vmem_kv_last_shortage(&s));
    CHECK_EQ(s.coming_pages, UNIT / test_page);
    OK(k_member(pool, 1, &row));
    CHECK_EQ(row.needs, 4 * UNIT - row.has); // what is on its way is not asked for again
    CHECK_EQ(fit(), 0);
    CHECK_EQ(budget(), 2 * UNIT);
    allow(1000, false);
    CHECK_EQ(answer(), VMEM_KV_APPLIED);
    OK(step(getter, slots[2], tokens));
    OK(step(getter, alloc(getter), tokens));
    CHECK_EQ(budget(), 4 * UNIT);
    CHECK_EQ(by_caller, 0);
    end();
}

// The device has no memory for the rest: the budget is the getter's all the same, and steps take what they can get.
static void test_a_device_with_too_little(void)
{
    begin();
    load_giver(3, 3);
    ask();
    allow(2, true);
    CHECK_EQ(answer(), VMEM_KV_APPLIED);
    CHECK_EQ(budget(), 4 * UNIT);
    for (int i = 0; i < 4; i++)
        OK(step(getter, alloc(getter), tokens));
    CHECK(by_caller);
    end();
}

// What others cannot give is refused when what they gave has arrived.
static void test_a_part_is_refused(void)
{
    begin();
    load_giver(3, 2);
    ask();
    allow(1000, false);
    CHECK_EQ(answer(), VMEM_KV_REFUSED);
    CHECK(budget() >= 3 * UNIT - UNIT / 16); // the giver keeps some pages for its request to grow
    CHECK(fit() >= 2);
    end();
}

// A step that nobody announced takes free budget at once, and the memory for it.
static void test_an_unannounced_step_waits_for_nobody(void)
{
    begin();
    allow(0, false);
    OK(step(getter, alloc(getter), tokens));
    CHECK(by_caller);
    end();
}

// A cache that leaves while the thread takes memory for it leaves nothing behind.
static void test_leaving_before_the_memory_comes(void)
{
    begin();
    load_giver(3, 3);
    ask();
    allow(2, false);
    wait_at_gate();
    OK(vmem_kv_pool_ask(getter, 0));
    CHECK_EQ(answer(), VMEM_KV_APPLIED);
    allow(1000, false);
    vmem_kv_destroy(getter, 0);
    struct vmem_kv_pool_info info = {.size = sizeof info};
    OK(vmem_kv_pool_query(pool, &info));
    CHECK_EQ(info.members, 1);
    struct vmem_kv_pool_member row = {.size = sizeof row};
    OK(k_member(pool, 0, &row));
    CHECK(info.free + row.has >= 4 * UNIT);
    load_giver(3, 0);
    getter = make(device);
    end();
}

// What fit counts can be allocated and stepped, whatever has arrived meanwhile.
static void test_fit_is_exact(void)
{
    uint64_t seed = 1;
    begin();
    allow(1 << 30, false);
    for (int turn = 0; turn < 5; turn++) {
        uint32_t slots[SLOTS], n = 0, given[3];
        for (int i = 0; i < 3; i++) {
            given[i] = alloc(giver);
            while (step(giver, given[i], tokens - (uint32_t)(rnd(&seed) % (tokens / 2)))) {
                uint32_t answer;
                OK(vmem_kv_pool_wait(giver, 1000, &answer));
            }
        }
        for (int i = 0; i < 3; i++)
            OK(vmem_kv_free(giver, given[i], 0));
        OK(vmem_kv_pool_ask(giver, 0));
        struct vmem_kv_request waiting[4];
        for (int i = 0; i < 4; i++)
            waiting[i] = (struct vmem_kv_request){.tokens = 1 + (uint32_t)(rnd(&seed) % (tokens - tokens / 8))};
        while (n < 4) {
            size_t fits;
            usleep(100);
            vmem_kv_fit(getter, waiting + n, 4 - n, &fits);
            for (; fits; fits--, n++) {
                slots[n] = alloc(getter);
                OK(step(getter, slots[n], waiting[n].tokens));
            }
        }
        while (n)
            OK(vmem_kv_free(getter, slots[--n], 0));
        OK(vmem_kv_pool_ask(getter, 0));
    }
    end();
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    if (ctx->b.ops->populate)
        OK(checked_context(test_backend, 0, true, &device));
    else
        device = test_context(0);
    vmem__pool_ask_ns = UINT64_MAX; // no question lapses, however slow the machine is
    tokens = (uint32_t)(UNIT / test_page * 16);
    caller = pthread_self();
    inner = device->b.ops;
    ops = *inner;
    ops.arena_new = arena_new;
    device->b.ops = &ops;
    test_a_step_does_not_wait_for_memory();
    test_a_device_with_too_little();
    test_a_part_is_refused();
    test_an_unannounced_step_waits_for_nobody();
    test_leaving_before_the_memory_comes();
    test_fit_is_exact();
    device->b.ops = inner;
    vmem_context_destroy(device);
    vmem_context_destroy(ctx);
    return 0;
}
