// Unmapping: errors with the element at fault, gaps, overlaps, sizes.
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

// Unbacked parts are skipped, wherever they are; a second mention of a part finds it unbacked.
static void gaps_and_overlaps(vmem_context *ctx)
{
    enum { N = 12 };
    const uint64_t P = test_page;
    vmem_page page[N];
    struct vmem_map_op ops[N];
    OK(vMemUnmap(ctx, addr, 64 * MIB));
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemCreate(ctx, P, N, 0, page));
    for (int i = 0; i < N; i++)
        ops[i] = (struct vmem_map_op){addr + (uint64_t)(i * 5 / 2) * P, page[i]};
    OK(vMemMapBatch(ctx, ops, N, 0, NULL));
    for (int i = 0; i < N; i++)
        put_word(ctx, ops[i].addr, 70 + i);
    const uint64_t before = test_stats(ctx).unmap_ops;
    OK(vMemUnmapBatch(ctx, (struct vmem_range[]){{addr, 20 * P}, {addr, 10 * P}, {addr + 5 * P, 5 * P}}, 3, NULL));
    CHECK_EQ(test_stats(ctx).unmap_ops - before, 8);
    CHECK_EQ(test_stats(ctx).mapped, 4 * P);
    for (int i = 0; i < N; i++) {
        CHECK_EQ(page_at(ctx, ops[i].addr), i < 8 ? 0 : page[i]);
        if (i >= 8)
            CHECK_EQ(get_word(ctx, ops[i].addr), 70 + i);
    }
    // Both addresses of one page in one batch.
    OK(vMemMap(ctx, addr + 24 * P, page[0]));
    OK(vMemMap(ctx, addr, page[0]));
    OK(vMemUnmapBatch(ctx, (struct vmem_range[]){{addr + 24 * P, P}, {addr, P}}, 2, NULL));
    OK(vMemUnmap(ctx, addr, 64 * MIB));
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemReleaseBatch(ctx, page, N, NULL));
}

// One page of a long run in the middle of others, out and in again, the neighbours untouched.
static void middle_of_a_run(vmem_context *ctx)
{
    enum { N = 64 };
    const uint64_t P = test_page;
    const int n = 64 * MIB / P < N ? (int)(64 * MIB / P) : N;
    vmem_page page[N];
    struct vmem_map_op ops[N];
    OK(vMemCreate(ctx, P, n, 0, page));
    for (int i = 0; i < n; i++)
        ops[i] = (struct vmem_map_op){addr + i * P, page[i]};
    OK(vMemMapBatch(ctx, ops, n, 0, NULL));
    for (int i = 0; i < n; i++)
        OK(vmem_fill(ctx, ops[i].addr, (uint8_t)i, P));
    for (int i = 3; i < n; i += 7) {
        OK(vMemUnmap(ctx, ops[i].addr, P));
        CHECK_EQ(page_at(ctx, ops[i].addr), 0);
        for (int k = i - 1; k <= i + 1; k += 2) {
            if (k < n)
                CHECK(all_words(ctx, ops[k].addr, P, (unsigned)k * UINT64_C(0x0101010101010101)));
        }
        OK(vMemMap(ctx, ops[i].addr, page[i]));
        CHECK(all_words(ctx, ops[i].addr, P, (unsigned)i * UINT64_C(0x0101010101010101)));
    }
    OK(vMemReleaseBatch(ctx, page, n, NULL));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    errors(ctx);
    cut_at_the_end(ctx);
    gaps_and_overlaps(ctx);
    middle_of_a_run(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
