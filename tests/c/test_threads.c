// Threads on disjoint and on the same pages and addresses: -EBUSY only where two calls met, and nothing lost.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <stdatomic.h>

#include "checked.h"
#include "harness.h"

enum { THREADS = 4, ROUNDS = 300, N = 16 };

static vmem_context *ctx;
static uint64_t addr;
static vmem_page shared[N];

static void join(void *(*body)(void *))
{
    pthread_t t[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&t[i], NULL, body, (void *)i));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(t[i], NULL));
}

// Own pages at own addresses, of a reservation that all share: never an error of any kind.
static void *disjoint(void *arg)
{
    const uint64_t base = addr + (uint64_t)(uintptr_t)arg * N * test_page;
    uint64_t seed = (uintptr_t)arg + 1;
    vmem_page page[N];
    struct vmem_map_op ops[N];
    for (int round = 0; round < ROUNDS; round++) {
        const int n = 1 + (int)(rnd(&seed) % N);
        OK(vMemCreate(ctx, test_page, n, round % 2 ? VMEM_CREATE_ZERO : 0, page));
        for (int i = 0; i < n; i++)
            ops[i] = (struct vmem_map_op){base + (uint64_t)((i * 7 + round) % N) * test_page, page[i]};
        OK(vMemMapBatch(ctx, ops, n, 0, NULL));
        const uint64_t word = rnd(&seed);
        put_word(ctx, ops[n - 1].addr + 16, word);
        put_word(ctx, ops[0].addr, word + 1);
        CHECK_EQ(get_word(ctx, ops[n - 1].addr + 16), word);
        CHECK_EQ(get_word(ctx, ops[0].addr), word + 1);
        CHECK_EQ(page_at(ctx, ops[0].addr), page[0]);
        if (round % 3 == 0)
            OK(vMemUnmap(ctx, base, N * test_page));
        if (round % 3 == 1) {
            for (int i = 0; i < n; i++)
                OK(vMemRelease(ctx, page[i]));
        } else {
            OK(vMemReleaseBatch(ctx, page, n, NULL));
        }
        if (round % 50 == 7)
            OK(vmem_trim(ctx, NULL));
        if (round % 50 == 20)
            OK(vmem_prealloc(ctx, 4 * N * test_page));
    }
    return NULL;
}

// All stay within their shares of the budget together: none is refused, also while another makes or returns an arena.
static void *within_budget(void *arg)
{
    uint64_t seed = (uintptr_t)arg + 31;
    vmem_page page[N];
    for (int round = 0; round < 3 * ROUNDS; round++) {
        const size_t n = 1 + rnd(&seed) % N;
        OK(vMemCreate(ctx, test_page, n, 0, page));
        if (n < N && round % 2)
            OK(vMemCreate(ctx, test_page, N - n, 0, page + n));
        OK(vMemReleaseBatch(ctx, page, round % 2 ? N : n, NULL));
    }
    return NULL;
}

// Reservations come and go.
static void *reservations(void *arg)
{
    uint64_t seed = (uintptr_t)arg + 11;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t own;
        vmem_page page;
        OK(vMemReserve(ctx, (1 + rnd(&seed) % 64) * VMEM_PAGE_2M, 0, &own));
        OK(vMemCreate(ctx, test_page, 1, 0, &page));
        OK(vMemMap(ctx, own, page));
        CHECK_EQ(page_at(ctx, own), page);
        OK(vMemRelease(ctx, page));
        OK(vMemFree(ctx, own));
    }
    return NULL;
}

static atomic_ulong done, busy;

static void count(int rc, bool may_be_mapped)
{
    if (!rc)
        done++;
    else if (rc == -EBUSY)
        busy++;
    else if (!(rc == -EEXIST && may_be_mapped))
        FAIL("%d: %s", rc, vmem_last_error());
}

// The same pages and addresses for all.
static void *overlapping(void *arg)
{
    uint64_t seed = (uintptr_t)arg + 21;
    struct vmem_map_op ops[4];
    for (int round = 0; round < 3 * ROUNDS; round++) {
        const uint64_t at = addr + rnd(&seed) % N * test_page;
        vmem_page page;
        switch (rnd(&seed) % 5) {
        case 0: count(vMemMap(ctx, at, shared[rnd(&seed) % N]), true); break;
        case 1:
            for (uint64_t i = 0; i < 4; i++)
                ops[i] = (struct vmem_map_op){addr + (i * 4 + rnd(&seed) % 4) * test_page, shared[rnd(&seed) % N]};
            count(vMemMapBatch(ctx, ops, 4, VMEM_MAP_REPLACE, NULL), false);
            break;
        case 2: count(vMemUnmap(ctx, at, test_page), false); break;
        case 3: count(vMemUnmap(ctx, addr, N * test_page), false); break;
        default:
            OK(vmem_query(ctx, at, &page, NULL));
            if (page) {
                struct vmem_page_info info = {.size = sizeof info};
                OK(vmem_page_query(ctx, page, &info));
            }
        }
    }
    return NULL;
}

// All release the same pages, which are mapped: exactly one succeeds at each.
static atomic_ulong released;
static void *release_same(void *arg)
{
    (void)arg;
    for (int i = 0; i < N; i++) {
        int rc = vMemRelease(ctx, shared[i]);
        if (!rc)
            released++;
        else if (rc != -EBUSY && rc != -EINVAL)
            FAIL("%d: %s", rc, vmem_last_error());
    }
    return NULL;
}

static void settled(void)
{
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.created, 0);
    CHECK_EQ(s.mapped, 0);
}

static void all(bool whole_arenas)
{
    released = 0;
    OK(checked_context(test_backend, 0, whole_arenas, &ctx));
    OK(vMemReserve(ctx, THREADS * N * test_page, 0, &addr));
    join(disjoint);
    settled();
    join(reservations);
    settled();
    OK(vmem_trim(ctx, NULL)); // or arenas would stay
    OK(vmem_set_budget(ctx, THREADS * N * test_page));
    join(within_budget);
    settled();
    OK(vmem_set_budget(ctx, 0));

    OK(vMemCreate(ctx, test_page, N, 0, shared));
    join(overlapping);
    CHECK(done > 0);
    // The mappings that the pages count are the mappings that there are.
    uint64_t mapped = 0, mappings = 0;
    for (int i = 0; i < N; i++) {
        struct vmem_page_info info = {.size = sizeof info};
        mapped += page_at(ctx, addr + (uint64_t)i * test_page) != 0;
        OK(vmem_page_query(ctx, shared[i], &info));
        mappings += info.mappings;
    }
    CHECK_EQ(mapped, mappings);
    CHECK_EQ(test_stats(ctx).mapped, mapped * test_page);
    OK(vMemUnmap(ctx, addr, N * test_page));
    for (int i = 0; i < N; i++)
        OK(vMemMap(ctx, addr + (uint64_t)i * test_page, shared[i]));
    join(release_same);
    CHECK_EQ(released, N);
    settled();
    OK(vmem_trim(ctx, NULL));
    CHECK(!ctx->arenas);
    vmem_context_destroy(ctx);
    printf("%lu done, %lu busy\n", done, busy);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    all(false);
    if (test_cpu())
        all(true);
    return 0;
}
