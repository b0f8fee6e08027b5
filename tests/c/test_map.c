// Mapping: errors with the element at fault, all-or-nothing, runs, and the ends of reservations and tables.
//
// SPDX-License-Identifier: MIT
#include "harness.h"
#include "core/core.h"

static uint64_t addr;
static vmem_page page[8];

static void errors(vmem_context *ctx)
{
    const uint64_t P = test_page;
    size_t bad;
    struct vmem_map_op ops[4];
    const struct vmem_map_op good = {addr, page[0]};

    OK(vMemMapBatch(ctx, NULL, 0, 0, &bad));
    ERR(vMemMapBatch(ctx, NULL, 1, 0, &bad), EINVAL, "ops is NULL");
    ERR(vMemMapBatch(ctx, &good, 1, 0x8, &bad), EINVAL, "flags 0x8");
    ERR(vMemMap(ctx, addr, 0), EINVAL, "page 0x0 is not a page");
    ERR(vMemMap(ctx, addr, ~UINT64_C(0)), EINVAL, "is not a page");
    ERR(vMemMap(ctx, 0, page[0]), EINVAL, "not inside one reservation");
    ERR(vMemMap(ctx, addr + 1, page[0]), EINVAL, "not a multiple of the page's size");
    ERR(vMemMap(ctx, addr + 4096, page[0]), EINVAL, "not a multiple of the page's size");
    ERR(vMemMap(ctx, addr - P, page[0]), EINVAL, "not inside one reservation");
    ERR(vMemMap(ctx, addr + 64 * MIB, page[0]), EINVAL, "not inside one reservation");
    ERR(vMemMap(ctx, UINT64_MAX - P + 1, page[0]), EINVAL, "not inside one reservation");

    // Whatever is wrong with element 2 of 4, it is named, and the others are not mapped.
    const struct {
        struct vmem_map_op op;
        int err;
        const char *text;
    } wrong[] = {
        {{addr + 2 * P, 0}, EINVAL, "ops[2]: page 0x0 is not a page"},
        {{addr + 2 * P + 1, page[2]}, EINVAL, "ops[2]: addr"},
        {{addr + 64 * MIB, page[2]}, EINVAL, "not inside one reservation"},
        {{addr + P, page[2]}, EINVAL, "overlaps an earlier element"},
        {{addr + 7 * P, page[2]}, EEXIST, "VMEM_MAP_REPLACE is not set"},
    };
    OK(vMemMap(ctx, addr + 7 * P, page[7]));
    for (size_t w = 0; w < COUNT(wrong); w++) {
        for (int i = 0; i < 4; i++)
            ops[i] = (struct vmem_map_op){addr + i * P, page[i]};
        ops[2] = wrong[w].op;
        ERR_AT(vMemMapBatch(ctx, ops, 4, 0, &bad), bad, 2, wrong[w].err, wrong[w].text);
        CHECK_EQ(test_stats(ctx).mapped, P);
        for (int i = 0; i < 4; i++)
            CHECK_EQ(page_at(ctx, addr + i * P), 0);
        ERR(vMemMapBatch(ctx, ops, 4, 0, NULL), wrong[w].err, wrong[w].text);
    }
    // Nothing is left marked: the corrected batch goes through.
    ops[2] = (struct vmem_map_op){addr + 2 * P, page[2]};
    OK(vMemMapBatch(ctx, ops, 4, 0, &bad));
    OK(vMemUnmap(ctx, addr, 64 * MIB));
    ERR(vmem_query(ctx, addr, NULL, NULL), EINVAL, "page is NULL");
    vmem_page none;
    ERR(vmem_query(ctx, addr - 1, &none, NULL), EINVAL, "no reservation contains addr");
    ERR(vmem_query(ctx, addr + 64 * MIB, &none, NULL), EINVAL, "no reservation contains addr");
}

// Pages that follow one another, to the end of a reservation and beyond.
static void past_the_end(vmem_context *ctx)
{
    const uint64_t P = test_page;
    struct vmem_map_op ops[4];
    uint64_t own;
    size_t bad;
    OK(vMemReserve(ctx, 3 * P, 0, &own));
    for (int i = 0; i < 4; i++)
        ops[i] = (struct vmem_map_op){own + i * P, page[i]};
    ERR_AT(vMemMapBatch(ctx, ops, 4, 0, &bad), bad, 3, EINVAL, "not inside one reservation");
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemMapBatch(ctx, ops, 3, 0, &bad));
    CHECK_EQ(page_at(ctx, own + 2 * P), page[2]);
    OK(vMemUnmap(ctx, own, 3 * P));
    OK(vMemFree(ctx, own));
}

// Consecutive in both reservations is one run; a gap in either ends it.
static void runs(vmem_context *ctx)
{
    enum { N = 16 };
    const uint64_t P = test_page;
    vmem_page many[N];
    struct vmem_map_op ops[N];
    struct vmem_page_info info[2] = {{.size = sizeof info[0]}, {.size = sizeof info[0]}};
    OK(vMemCreate(ctx, P, N, 0, many));
    OK(vmem_page_query(ctx, many[0], &info[0]));
    OK(vmem_page_query(ctx, many[1], &info[1]));
    const bool consecutive = info[1].frame == info[0].frame + P / VMEM_PAGE_64K;
    const struct {
        int stride, first, step; // of addresses; of pages
        uint64_t runs;
    } shape[] = {{1, 0, 1, 1}, {2, 0, 1, 8}, {1, 7, -1, 8}};
    for (size_t s = 0; s < COUNT(shape); s++) {
        for (int i = 0; i < 8; i++)
            ops[i] = (struct vmem_map_op){addr + i * shape[s].stride * P, many[shape[s].first + i * shape[s].step]};
        struct vmem_stats before = test_stats(ctx);
        OK(vMemMapBatch(ctx, ops, 8, VMEM_MAP_FINE, NULL));
        struct vmem_stats after = test_stats(ctx);
        CHECK_EQ(after.map_ops - before.map_ops, 8);
        CHECK_EQ(after.map_runs - before.map_runs, consecutive ? shape[s].runs : 8);
        OK(vMemUnmap(ctx, addr, 64 * MIB));
        before = after;
        after = test_stats(ctx);
        CHECK_EQ(after.unmap_ops - before.unmap_ops, 8);
        CHECK_EQ(after.unmap_runs - before.unmap_runs, consecutive ? shape[s].runs : 8);
    }
    OK(vMemReleaseBatch(ctx, many, N, NULL));
    if (!(test_info.page_sizes & VMEM_PAGE_128K) || test_page != VMEM_PAGE_64K || !consecutive)
        return;
    // Pages of two sizes are two runs, even next to each other: each keeps its own page table entries.
    const uint64_t ops_before = test_stats(ctx).map_runs;
    OK(vMemCreate(ctx, VMEM_PAGE_64K, 2, 0, many));
    OK(vmem__create_near(ctx, VMEM_PAGE_128K, 1, many[1], 0, &many[2]));
    OK(vmem_page_query(ctx, many[1], &info[0]));
    OK(vmem_page_query(ctx, many[2], &info[1]));
    CHECK_EQ(info[1].frame, info[0].frame + 1);
    for (int i = 0; i < 3; i++)
        ops[i] = (struct vmem_map_op){addr + i * P, many[i]};
    OK(vMemMapBatch(ctx, ops, 3, 0, NULL));
    CHECK_EQ(test_stats(ctx).map_runs - ops_before, 2);
    OK(vMemReleaseBatch(ctx, many, 3, NULL));
}

// The end of a reservation that is no multiple of 2 MiB.
static void odd_end(vmem_context *ctx)
{
    uint64_t odd;
    vmem_page p;
    if (!(test_info.page_sizes & VMEM_PAGE_64K))
        return;
    OK(vMemReserve(ctx, 2 * MIB + 192 * KIB, 0, &odd));
    OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &p));
    OK(vMemMap(ctx, odd + 2 * MIB + 128 * KIB, p));
    ERR(vMemMap(ctx, odd + 2 * MIB + 192 * KIB, p), EINVAL, "not inside one reservation");
    put_word(ctx, odd + 2 * MIB + 192 * KIB - 8, 5);
    CHECK_EQ(get_word(ctx, odd + 2 * MIB + 192 * KIB - 8), 5);
    OK(vMemRelease(ctx, p));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &p));
    ERR(vMemMap(ctx, odd + 2 * MIB, p), EINVAL, "not inside one reservation");
    OK(vMemMap(ctx, odd, p));
    OK(vMemRelease(ctx, p));
    OK(vMemFree(ctx, odd));
}

// A page that starts inside a reservation and ends outside, behind one that it continues.
static void last_sticks_out(vmem_context *ctx)
{
    for (uint64_t size = 2 * test_page; size <= VMEM_PAGE_2M; size *= 2) {
        uint64_t odd;
        vmem_page two[2];
        size_t bad;
        if (!(size & test_info.page_sizes))
            continue;
        OK(vMemReserve(ctx, size + test_page, 0, &odd));
        OK(vMemCreate(ctx, size, 2, 0, two));
        ERR_AT(vMemMapBatch(ctx, (struct vmem_map_op[]){{odd, two[0]}, {odd + size, two[1]}}, 2, 0, &bad), bad, 1,
               EINVAL, "not inside one reservation");
        CHECK_EQ(test_stats(ctx).mapped, 0);
        OK(vMemReleaseBatch(ctx, two, 2, NULL));
        OK(vMemFree(ctx, odd));
    }
}

// Batches that go over the border of the shadow's tables, every 16 MiB, into tables that do not exist yet.
static void across_tables(vmem_context *ctx)
{
    enum { N = 700 };
    const uint64_t P = test_page, n = P < VMEM_PAGE_2M ? N : 40, start = 16 * MIB - P, total = n * P;
    static struct vmem_map_op ops[N];
    static vmem_page pages[N];
    uint64_t at;
    OK(vMemReserve(ctx, total + 32 * MIB, 0, &at));
    OK(vMemCreate(ctx, P, n, 0, pages));
    for (int round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < n; i++)
            ops[i] = (struct vmem_map_op){at + start + i * P, pages[i]};
        OK(vMemMapBatch(ctx, ops, n, 0, NULL));
        for (uint64_t i = 0; i < n; i++) {
            put_word(ctx, ops[i].addr, i);
            CHECK_EQ(page_at(ctx, ops[i].addr), pages[i]);
        }
        CHECK_EQ(page_at(ctx, at + start - P) + page_at(ctx, at + start + n * P), 0);
        for (uint64_t i = 0; i < n; i++)
            CHECK_EQ(get_word(ctx, ops[i].addr), i);
        if (round == 0)
            OK(vMemUnmap(ctx, at + start, n * P));
        else if (round == 1)
            OK(vmem_decommit(ctx, &(struct vmem_range){at, total + 32 * MIB}, 1, NULL));
        else
            OK(vMemReleaseBatch(ctx, pages, n, NULL));
        for (uint64_t i = 0; i < n; i++)
            CHECK_EQ(page_at(ctx, ops[i].addr), 0);
        if (round == 1)
            OK(vMemCreate(ctx, P, n, 0, pages));
    }
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemFree(ctx, at));
}

// The cost of a backdrop grows with the number of runs, not with the bytes around them.
static void calls_beside_a_backdrop(vmem_context *ctx)
{
    enum { N = 16, BESIDE = 6 };
    struct vmem_map_op ops[N];
    vmem_page pages[N];
    uint64_t at, before;
    if (!(test_info.caps & VMEM_CAP_BACKDROP) || !(test_info.page_sizes & VMEM_PAGE_2M))
        return;
    OK(vMemReserve(ctx, 256 * MIB, VMEM_RESERVE_BACKDROP, &at));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, N, 0, pages));
    OK(vmem_backdrop(ctx, at + 128 * MIB, 4 * MIB));
    for (int round = 0; round < 3; round++) { // at the start, behind a gap, over what was made readable
        const uint64_t first = at + (uint64_t)round * 64 * MIB;
        for (uint64_t i = 0; i < N; i++)
            ops[i] = (struct vmem_map_op){first + i * VMEM_PAGE_2M, pages[i]};
        before = test_stats(ctx).syscalls;
        OK(vMemMapBatch(ctx, ops, N, 0, NULL));
        CHECK(test_stats(ctx).syscalls - before <= N + BESIDE);
        put_word(ctx, ops[N - 1].addr, 7);
        before = test_stats(ctx).syscalls;
        OK(vMemUnmap(ctx, first, 32 * MIB));
        CHECK(test_stats(ctx).syscalls - before <= BESIDE + 2);
    }
    if (!strcmp(test_info.backend, "stock")) { // pages that do not follow each other in memory go together, too
        for (uint64_t i = 0; i < N; i++)
            ops[i] = (struct vmem_map_op){at + i * VMEM_PAGE_2M, pages[N - 1 - i]};
        OK(vMemMapBatch(ctx, ops, N, 0, NULL));
        before = test_stats(ctx).syscalls;
        OK(vMemUnmap(ctx, at, 32 * MIB));
        CHECK(test_stats(ctx).syscalls - before <= 2);
    }
    for (uint64_t k = 0; k < 2; k++) // asked for, and there again
        CHECK_EQ(get_word(ctx, at + 128 * MIB + k * VMEM_PAGE_2M), 0);
    OK(vMemReleaseBatch(ctx, pages, N, NULL));
    OK(vMemFree(ctx, at));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    OK(vMemCreate(ctx, test_page, 8, 0, page));
    errors(ctx);
    OK(vMemUnmap(ctx, addr, 64 * MIB));
    past_the_end(ctx);
    runs(ctx);
    odd_end(ctx);
    last_sticks_out(ctx);
    across_tables(ctx);
    calls_beside_a_backdrop(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
