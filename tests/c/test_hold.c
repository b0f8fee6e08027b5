// Holds: members of a pool that stand for memory of others. What one gives up, another gets.
//
// SPDX-License-Identifier: MIT
#include <sys/wait.h>
#include <unistd.h>

#include "kv.h"

#define BUDGET (64 * MIB)

static vmem_context *ctx;

static vmem_kv_hold *new_hold(vmem_kv_pool *pool, const char *name)
{
    const struct vmem_kv_hold_config cfg = {.size = sizeof cfg, .name = name};
    vmem_kv_hold *hold;
    OK(vmem_kv_hold_create(ctx, pool, &cfg, &hold));
    return hold;
}

static uint64_t missing(vmem_kv_hold *hold, uint64_t bytes)
{
    uint64_t lacks;
    OK(vmem_kv_hold_set(hold, bytes, &lacks));
    return lacks;
}

static uint64_t wanted(vmem_kv_hold *hold, uint64_t offered)
{
    uint64_t bytes;
    OK(vmem_kv_hold_offer(hold, offered, &bytes));
    return bytes;
}

static void test_what_is_held_counts(void)
{
    vmem_kv_pool *pool = k_pool(BUDGET / test_page);
    vmem_kv_hold *a = new_hold(pool, "a"), *b = new_hold(pool, "b");
    CHECK_EQ(missing(a, 48 * MIB), 0);
    CHECK_EQ(k_pool_info(pool).free, 16 * MIB);
    CHECK_EQ(missing(b, 32 * MIB), 16 * MIB);
    CHECK_EQ(wanted(a, 0), 0); // nothing is offered
    CHECK_EQ(missing(a, 48 * MIB), 0);
    vmem_kv_hold_destroy(a);
    while (missing(b, BUDGET))
        usleep(1000);
    CHECK_EQ(k_pool_info(pool).free, 0);
    vmem_kv_hold_destroy(b);
    vmem_kv_pool_destroy(pool);
}

static void test_what_is_offered_is_asked_for(void)
{
    vmem_kv_pool *pool = k_pool(BUDGET / test_page);
    vmem_kv_hold *a = new_hold(pool, "a"), *b = new_hold(pool, "b");
    uint64_t held = BUDGET;
    CHECK_EQ(missing(a, held), 0);
    while (missing(b, 24 * MIB)) { // in parts of 8 MiB, as their memory goes
        if (wanted(a, held) >= 2 * MIB) {
            held -= 8 * MIB;
            CHECK_EQ(missing(a, held), 0);
        }
        usleep(1000);
    }
    CHECK(held <= 40 * MIB && held >= 32 * MIB);
    vmem_kv_hold_destroy(b);
    while (missing(a, BUDGET)) // and comes back
        usleep(1000);
    vmem_kv_hold_destroy(a);
    vmem_kv_pool_destroy(pool);
}

static void test_errors(void)
{
    vmem_kv_pool *pool = k_pool(BUDGET / test_page);
    struct vmem_kv_hold_config cfg = {.size = sizeof cfg, .gpu = 2};
    vmem_kv_hold *hold, *gpu;
    ERR(vmem_kv_hold_create(ctx, pool, &cfg, &hold), EINVAL, "gpu");
    ERR(vmem_kv_hold_create(NULL, pool, &cfg, &hold), EINVAL, "ctx");
    ERR(vmem_kv_hold_create(ctx, NULL, &cfg, &hold), EINVAL, "pool");
    cfg.gpu = 1;
    memcpy(cfg.device, "a-GPU-elsewhere", 16);
    OK(vmem_kv_hold_create(ctx, pool, &cfg, &gpu)); // without a context on it
    cfg.gpu = 0;
    ERR(vmem_kv_hold_create(ctx, pool, &cfg, &hold), EINVAL, "another device");
    vmem_kv_hold_destroy(gpu);
    hold = new_hold(pool, NULL);
    ERR(vmem_kv_hold_set(hold, MIB, NULL), EINVAL, "bytes");
    ERR(vmem_kv_hold_set(NULL, 0, NULL), EINVAL, "hold");
    ERR(vmem_kv_hold_offer(NULL, 0, NULL), EINVAL, "hold");
    CHECK_EQ(missing(hold, 2 * BUDGET), BUDGET); // never
    CHECK_EQ(missing(hold, 2 * MIB), 0);
    const pid_t pid = fork();
    if (!pid) {
        const bool refused = vmem_kv_hold_set(hold, 0, NULL) == -EPERM;
        vmem_kv_hold_destroy(hold);
        _exit(refused ? 0 : 1);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    vmem_kv_hold_destroy(hold);
    vmem_kv_hold_destroy(NULL);
    vmem_kv_pool_destroy(pool);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    test_backend = "host";
    ctx = test_context(0);
    test_what_is_held_counts();
    test_what_is_offered_is_asked_for();
    test_errors();
    vmem_context_destroy(ctx);
    return 0;
}
