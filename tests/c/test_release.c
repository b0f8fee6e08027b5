// Releasing pages: wherever they are mapped, in any order, all or none.
//
// SPDX-License-Identifier: MIT
#include "harness.h"

static void errors(vmem_context *ctx)
{
    size_t bad;
    vmem_page page[4];
    uint64_t addr;
    OK(vMemReserve(ctx, 8 * MIB, 0, &addr));
    OK(vMemReleaseBatch(ctx, NULL, 0, &bad));
    ERR(vMemReleaseBatch(ctx, NULL, 1, &bad), EINVAL, "pages is NULL");
    ERR(vMemRelease(ctx, 0), EINVAL, "page 0x0 is not a page");
    OK(vMemCreate(ctx, test_page, 4, 0, page));
    OK(vMemMap(ctx, addr, page[0]));
    ERR_AT(vMemReleaseBatch(ctx, (vmem_page[]){page[0], page[1], 77, page[2]}, 4, &bad), bad, 2, EINVAL, "pages[2]");
    ERR_AT(vMemReleaseBatch(ctx, (vmem_page[]){page[0], page[1], page[2], page[0]}, 4, &bad), bad, 3, EINVAL,
           "in the batch twice");
    ERR_AT(vMemReleaseBatch(ctx, (vmem_page[]){page[1], page[1]}, 2, &bad), bad, 1, EINVAL, "in the batch twice");
    CHECK_EQ(page_at(ctx, addr), page[0]);
    CHECK_EQ(test_stats(ctx).created, 4 * test_page);
    CHECK_EQ(test_stats(ctx).mapped, test_page);
    OK(vMemReleaseBatch(ctx, page, 4, &bad));
    ERR_AT(vMemReleaseBatch(ctx, page, 4, &bad), bad, 0, EINVAL, "not a page");
    CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
    OK(vMemFree(ctx, addr));
}

// A page mapped at hundreds of addresses, in several reservations, beside others that stay.
static void everywhere(vmem_context *ctx)
{
    enum { RANGES = 3, N = 100 };
    uint64_t addr[RANGES];
    vmem_page page, other;
    OK(vMemCreate(ctx, test_page, 1, 0, &page));
    OK(vMemCreate(ctx, test_page, 1, 0, &other));
    for (int r = 0; r < RANGES; r++) {
        OK(vMemReserve(ctx, 2 * N * test_page, 0, &addr[r]));
        for (uint64_t i = 0; i < N; i++) {
            OK(vMemMap(ctx, addr[r] + 2 * i * test_page, page));
            OK(vMemMap(ctx, addr[r] + (2 * i + 1) * test_page, other));
        }
    }
    put_word(ctx, addr[0] + test_page, 11);
    struct vmem_page_info info = {.size = sizeof info};
    OK(vmem_page_query(ctx, page, &info));
    CHECK_EQ(info.mappings, RANGES * N);
    // Some addresses go one by one before, so that the list of the rest has been through removals.
    for (uint64_t i = 0; i < N; i += 3)
        OK(vMemUnmap(ctx, addr[i % RANGES] + 2 * i * test_page, test_page));
    OK(vMemRelease(ctx, page));
    CHECK_EQ(test_stats(ctx).mapped, RANGES * N * test_page);
    for (int r = 0; r < RANGES; r++) {
        for (uint64_t i = 0; i < N; i++) {
            CHECK_EQ(page_at(ctx, addr[r] + 2 * i * test_page), 0);
            CHECK_EQ(page_at(ctx, addr[r] + (2 * i + 1) * test_page), other);
        }
    }
    CHECK_EQ(get_word(ctx, addr[2] + (2 * N - 1) * test_page), 11);
    OK(vMemRelease(ctx, other));
    for (int r = 0; r < RANGES; r++)
        OK(vMemFree(ctx, addr[r]));
    CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped + test_stats(ctx).reserved, 0);
}

// Mapped and unmapped pages, aliases of each other's addresses, in a shuffled batch.
static void shuffled_batch(vmem_context *ctx)
{
    enum { N = 120 };
    vmem_page page[N];
    uint64_t addr, seed = 3;
    OK(vMemReserve(ctx, 3 * N * test_page, 0, &addr));
    OK(vMemCreate(ctx, test_page, N, 0, page));
    for (uint64_t i = 0; i < 3 * N; i++) {
        if (i % 3)
            OK(vMemMap(ctx, addr + i * test_page, page[i / 3 * 7 % N]));
    }
    for (int i = N - 1; i > 0; i--) {
        int k = (int)(rnd(&seed) % (uint64_t)(i + 1));
        vmem_page t = page[i];
        page[i] = page[k];
        page[k] = t;
    }
    OK(vMemReleaseBatch(ctx, page, N / 2, NULL));
    uint64_t mapped = 0;
    for (uint64_t i = 0; i < 3 * N; i++) {
        vmem_page at = page_at(ctx, addr + i * test_page);
        for (int k = 0; k < N / 2; k++)
            CHECK(at != page[k]);
        mapped += at != 0;
    }
    CHECK_EQ(mapped, N);
    OK(vMemReleaseBatch(ctx, page + N / 2, N / 2, NULL));
    CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
    OK(vMemFree(ctx, addr));
}

// Two pages that are adjacent in memory and in addresses, the second of them mapped elsewhere too, before or after; or
// only one of them mapped.
static void an_alias_in_a_run(vmem_context *ctx)
{
    vmem_page page[2];
    uint64_t addr;
    OK(vMemReserve(ctx, 4 * test_page, 0, &addr));
    for (int way = 0; way < 4; way++) {
        OK(vMemCreate(ctx, test_page, 2, 0, page));
        if (way == 0)
            OK(vMemMap(ctx, addr + 3 * test_page, page[1]));
        if (way != 2)
            OK(vMemMap(ctx, addr, page[0]));
        if (way != 3)
            OK(vMemMap(ctx, addr + test_page, page[1]));
        if (way == 1)
            OK(vMemMap(ctx, addr + 3 * test_page, page[1]));
        OK(vMemReleaseBatch(ctx, page, 2, NULL));
        for (uint64_t i = 0; i < 4; i++)
            CHECK_EQ(page_at(ctx, addr + i * test_page), 0);
        CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
    }
    OK(vMemFree(ctx, addr));
}

// Pages side by side through several leaves of the shadow, in one batch; and nothing stays marked.
static void long_run(vmem_context *ctx)
{
    enum { MOST = 768 };
    const uint64_t n = 48 * MIB / test_page;
    static vmem_page page[MOST];
    static struct vmem_map_op ops[MOST];
    uint64_t addr;
    OK(vMemReserve(ctx, (n + 1) * test_page, 0, &addr));
    for (int round = 0; round < 3; round++) {
        OK(vMemCreate(ctx, test_page, n, 0, page));
        for (uint64_t i = 0; i < n; i++)
            ops[i] = (struct vmem_map_op){addr + (i + 1) * test_page, page[i]};
        OK(vMemMapBatch(ctx, ops, n, 0, NULL));
        for (uint64_t i = 0; i < n; i++)
            CHECK_EQ(page_at(ctx, addr + (i + 1) * test_page), page[i]);
        CHECK_EQ(test_stats(ctx).mapped, n * test_page);
        put_word(ctx, addr + n * test_page, 1);
        if (round == 1)
            OK(vMemUnmap(ctx, addr, (n + 1) * test_page));
        OK(vMemReleaseBatch(ctx, page, n, NULL));
        CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
        for (uint64_t i = 0; i <= n; i++)
            CHECK_EQ(page_at(ctx, addr + i * test_page), 0);
    }
    OK(vMemFree(ctx, addr));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    errors(ctx);
    everywhere(ctx);
    shuffled_batch(ctx);
    an_alias_in_a_run(ctx);
    long_run(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
