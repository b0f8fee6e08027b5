// Unmapping: errors with the element at fault, and cuts of every size. What is unmapped of what is test_model's.
//
// SPDX-License-Identifier: MIT
#include "harness.h"

static uint64_t addr;

static void errors(vmem_context *ctx)
{
    const uint64_t P = test_page;
    size_t bad;
    vmem_page big;
    OK(vMemUnmapBatch(ctx, NULL, 0, &bad));
    ERR(vMemUnmapBatch(ctx, NULL, 1, &bad), EINVAL, "ops is NULL");
    ERR(vMemUnmap(ctx, addr, 0), EINVAL, "length 0 must be at least 64 KiB");
    ERR(vMemUnmap(ctx, addr + 1, P), EINVAL, ": both must be multiples of 64 KiB");
    ERR(vMemUnmap(ctx, addr, P + 1), EINVAL, "multiples of 64 KiB");
    ERR(vMemUnmap(ctx, addr, 64 * MIB + P), EINVAL, ": the range is not inside one reservation");
    ERR(vMemUnmap(ctx, addr + 64 * MIB, P), EINVAL, "not inside one reservation");
    ERR(vMemUnmap(ctx, addr, UINT64_MAX & ~(VMEM_PAGE_64K - 1)), EINVAL, "not inside one reservation");
    ERR(vMemUnmap(ctx, 0, P), EINVAL, "not inside one reservation");

    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &big));
    OK(vMemMap(ctx, addr + 4 * MIB, big));
    ERR(vMemUnmap(ctx, addr + 4 * MIB, 64 * KIB), EINVAL, "cuts the page mapped at its end");
    ERR(vMemUnmap(ctx, addr + 6 * MIB - 64 * KIB, 64 * KIB), EINVAL, "cuts the page mapped at its start");
    ERR(vMemUnmap(ctx, addr, 5 * MIB), EINVAL, "cuts the page mapped at its end");
    ERR(vMemUnmap(ctx, addr + 5 * MIB, 20 * MIB), EINVAL, "cuts the page mapped at its start");

    // Element 1 of 3 is wrong: the other two stay mapped.
    vmem_page page[2];
    OK(vMemCreate(ctx, P, 2, 0, page));
    OK(vMemMap(ctx, addr, page[0]));
    OK(vMemMap(ctx, addr + 8 * MIB, page[1]));
    struct vmem_range ops[] = {{addr, 2 * MIB}, {addr + 5 * MIB, 2 * MIB}, {addr + 8 * MIB, P}};
    ERR_AT(vMemUnmapBatch(ctx, ops, 3, &bad), bad, 1, EINVAL, "ops[1]");
    CHECK_EQ(page_at(ctx, addr), page[0]);
    CHECK_EQ(page_at(ctx, addr + 4 * MIB), big);
    CHECK_EQ(page_at(ctx, addr + 8 * MIB), page[1]);
    CHECK_EQ(test_stats(ctx).unmap_ops, 0);
    ops[1].addr = addr + 4 * MIB;
    OK(vMemUnmapBatch(ctx, ops, 3, &bad));
    CHECK_EQ(test_stats(ctx).unmap_ops, 3);
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemReleaseBatch(ctx, page, 2, NULL));
    OK(vMemRelease(ctx, big));
}

// A cut far into consecutive pages, at whose end every size of page can stick out.
static void cut_at_the_end(vmem_context *ctx)
{
    for (uint64_t size = VMEM_PAGE_128K; size <= VMEM_PAGE_2M; size *= 2) {
        vmem_page page[4];
        if (!(size & test_info.page_sizes))
            continue;
        OK(vMemCreate(ctx, size, 4, 0, page));
        for (uint64_t i = 0; i < 4; i++)
            OK(vMemMap(ctx, addr + i * size, page[i]));
        ERR(vMemUnmap(ctx, addr, 4 * size - VMEM_PAGE_64K), EINVAL, "cuts the page mapped at its end");
        CHECK_EQ(test_stats(ctx).mapped, 4 * size);
        OK(vMemUnmap(ctx, addr, 3 * size));
        CHECK_EQ(test_stats(ctx).mapped, size);
        CHECK_EQ(page_at(ctx, addr + 3 * size), page[3]);
        OK(vMemReleaseBatch(ctx, page, 4, NULL));
    }
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    errors(ctx);
    cut_at_the_end(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
