// Releasing pages: errors, runs and their ends, all or none. Pages that are mapped anywhere are test_model's.
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
    an_alias_in_a_run(ctx);
    long_run(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
