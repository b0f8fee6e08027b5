// Ranges that follow each other without gaps, with memory of others behind some, which the fake driver checks
// (fakeguard.h). Nothing that is done at the end of a range reaches past it, and nothing is done across two ranges.
//
// SPDX-License-Identifier: MIT
#define FAKEGPU_USER
#include "fakegpu.h"

#include "../c/harness.h"
#include "vmem_blocks.h"

#define RANGES 6
#define LENGTH (64 * MIB) // the driver's own unit of reservations: no backend has anything behind it
static vmem_context *ctx;
static uint64_t addr[RANGES];

static int by_addr(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

// Returns how many of the ranges follow another one exactly.
static uint32_t reserve(uint32_t flags)
{
    uint32_t adjacent = 0;
    for (uint32_t i = 0; i < RANGES; i++)
        OK(vMemReserve(ctx, LENGTH, flags, &addr[i]));
    qsort(addr, RANGES, sizeof addr[0], by_addr);
    for (uint32_t i = 1; i < RANGES; i++)
        adjacent += addr[i] == addr[i - 1] + LENGTH;
    return adjacent;
}

static void end(void)
{
    for (uint32_t i = 0; i < RANGES; i++)
        OK(vMemFree(ctx, addr[i]));
    CHECK_EQ(test_stats(ctx).created, 0);
}

// Pages of each size at the very end: mapped, replaced, unmapped, and mapped again beside what remains.
static void last_pages(uint32_t flags)
{
    CHECK(reserve(flags) >= 2);
    for (uint64_t size = test_page; size <= VMEM_PAGE_2M; size *= 2) {
        vmem_page page[2][RANGES];
        struct vmem_map_op ops[RANGES];
        if (!(size & test_info.page_sizes))
            continue;
        for (uint32_t k = 0; k < 2; k++)
            OK(vMemCreate(ctx, size, RANGES, 0, page[k]));
        for (uint32_t k = 0; k < 2; k++) {
            for (uint32_t i = 0; i < RANGES; i++)
                ops[i] = (struct vmem_map_op){addr[i] + LENGTH - size, page[k][i]};
            OK(vMemMapBatch(ctx, ops, RANGES, VMEM_MAP_REPLACE, NULL));
            for (uint32_t i = 0; i < RANGES; i++)
                OK(vmem_fill(ctx, ops[i].addr, (uint8_t)(i + 1), size));
        }
        for (uint32_t i = 0; i < RANGES; i++)
            CHECK_EQ(get_word(ctx, addr[i] + LENGTH - 8), (i + 1) * UINT64_C(0x0101010101010101));
        for (uint32_t i = 0; i < RANGES; i += 2)
            OK(vMemUnmap(ctx, addr[i], LENGTH));
        for (uint32_t i = 1; i < RANGES; i += 2)
            CHECK_EQ(get_word(ctx, addr[i] + LENGTH - 8), (i + 1) * UINT64_C(0x0101010101010101));
        for (uint32_t k = 0; k < 2; k++)
            OK(vMemReleaseBatch(ctx, page[k], RANGES, NULL));
    }
    end();
}

// Blocks whose ranges end where others begin. Their pages are mapped and unmapped together, but by range. Those of one
// range come and go by their arenas.
static void blocks_across(uint32_t n)
{
    enum { N = 8 };
    struct vmem_block_range r[RANGES];
    uint32_t ids[N];
    vmem_blocks *b;
    CHECK(reserve(0) >= 2);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = i;
    for (uint32_t i = 0; i < RANGES; i++)
        r[i] = (struct vmem_block_range){.addr = addr[i], .block_stride = LENGTH / N, .bytes = LENGTH / N, .layers = 1};
    const struct vmem_blocks_config cfg = {.size = sizeof cfg,
                                           .ranges = r,
                                           .n_ranges = n,
                                           .blocks = N,
                                           .page_size = VMEM_PAGE_2M};
    OK(vmem_blocks_create(ctx, &cfg, &b));
    OK(vmem_blocks_back(b, ids, N, 0, NULL));
    OK(vmem_blocks_unback(b, ids, N, 0));
    OK(vmem_blocks_flush(b));
    struct vmem_blocks_stats s = {.size = sizeof s};
    OK(vmem_blocks_get_stats(b, &s));
    CHECK_EQ(s.failed_unmaps, 0);
    CHECK_EQ(s.held, 0);
    OK(vmem_blocks_back(b, ids, N, 0, NULL));
    vmem_blocks_destroy(b);
    end();
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (!fakegpu_fail)
        SKIP("the fake driver is not preloaded");
    ctx = test_context(0);
    last_pages(0);
    last_pages(VMEM_RESERVE_BACKDROP);
    blocks_across(1); // first: a context's limit of arenas only falls
    blocks_across(RANGES);
    vmem_context_destroy(ctx);
    return 0;
}
