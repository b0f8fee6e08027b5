// VMEM_MAP_REPLACE: what may be replaced, what becomes of the replaced pages, and that a reader never sees a gap.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <stdatomic.h>

#include "harness.h"

static uint64_t addr;

static int replace(vmem_context *ctx, uint64_t at, vmem_page page)
{
    return vMemMapBatch(ctx, &(struct vmem_map_op){at, page}, 1, VMEM_MAP_REPLACE, NULL);
}

static void one_for_one(vmem_context *ctx)
{
    const uint64_t P = test_page;
    vmem_page page[3];
    struct vmem_page_info info = {.size = sizeof info};
    OK(vMemCreate(ctx, P, 3, 0, page));
    for (int i = 0; i < 3; i++) {
        OK(vMemMap(ctx, addr + (8 + i) * P, page[i]));
        put_word(ctx, addr + (8 + i) * P, 50 + i);
    }
    OK(replace(ctx, addr, page[0])); // over nothing
    CHECK_EQ(get_word(ctx, addr), 50);
    OK(replace(ctx, addr, page[1]));
    CHECK_EQ(get_word(ctx, addr), 51);
    CHECK_EQ(page_at(ctx, addr), page[1]);
    OK(vmem_page_query(ctx, page[0], &info));
    CHECK_EQ(info.mappings, 1);
    OK(replace(ctx, addr, page[1])); // by itself
    CHECK_EQ(get_word(ctx, addr), 51);
    OK(vmem_page_query(ctx, page[1], &info));
    CHECK_EQ(info.mappings, 2);
    CHECK_EQ(get_word(ctx, addr + 8 * P), 50); // the replaced page is as it was elsewhere
    CHECK_EQ(test_stats(ctx).mapped, 4 * P);
    // A rotation in one batch: every page is both new and old.
    struct vmem_map_op ops[3];
    for (int i = 0; i < 3; i++)
        ops[i] = (struct vmem_map_op){addr + (8 + i) * P, page[(i + 1) % 3]};
    OK(vMemMapBatch(ctx, ops, 3, VMEM_MAP_REPLACE, NULL));
    for (int i = 0; i < 3; i++)
        CHECK_EQ(get_word(ctx, addr + (8 + i) * P), 50 + (i + 1) % 3);
    size_t bad;
    ops[2].addr = ops[1].addr;
    ERR_AT(vMemMapBatch(ctx, ops, 3, VMEM_MAP_REPLACE, &bad), bad, 2, EINVAL, "overlaps an earlier element");
    OK(vMemReleaseBatch(ctx, page, 3, NULL));
    CHECK_EQ(test_stats(ctx).mapped, 0);
}

// A 2 MiB page over small ones: consecutive, scattered, with gaps.
static void large_for_small(vmem_context *ctx)
{
    enum { SMALL = 32 };
    vmem_page small[SMALL], big;
    struct vmem_page_info info = {.size = sizeof info};
    if (test_page != VMEM_PAGE_64K)
        return;
    for (int shape = 0; shape < 4; shape++) {
        OK(vMemCreate(ctx, VMEM_PAGE_64K, SMALL, 0, small));
        OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &big));
        OK(vMemMap(ctx, addr + 8 * MIB, big));
        put_word(ctx, addr + 8 * MIB + 77 * 64, 1234);
        struct vmem_map_op ops[SMALL];
        int n = 0;
        for (int i = 0; i < SMALL; i++) {
            int from = shape == 0 ? i : shape == 1 ? i * 5 % SMALL : shape == 2 ? i : SMALL - 1 - i;
            if (shape >= 2 && i % 5 == 0)
                continue;
            ops[n++] = (struct vmem_map_op){addr + (uint64_t)i * VMEM_PAGE_64K, small[from]};
        }
        OK(vMemMapBatch(ctx, ops, n, 0, NULL));
        for (int i = 0; i < n; i++)
            put_word(ctx, ops[i].addr + 8, i);
        OK(replace(ctx, addr, big));
        CHECK_EQ(get_word(ctx, addr + 77 * 64), 1234);
        for (uint64_t at = addr; at < addr + VMEM_PAGE_2M; at += VMEM_PAGE_64K)
            CHECK_EQ(page_at(ctx, at), big);
        CHECK_EQ(test_stats(ctx).mapped, 2 * VMEM_PAGE_2M);
        // The small pages live on, unmapped, with their contents.
        for (int i = 0; i < n; i++) {
            OK(vmem_page_query(ctx, ops[i].page, &info));
            CHECK_EQ(info.mappings, 0);
            OK(vMemMap(ctx, addr + 4 * MIB, ops[i].page));
            CHECK_EQ(get_word(ctx, addr + 4 * MIB + 8), i);
            OK(vMemUnmap(ctx, addr + 4 * MIB, VMEM_PAGE_64K));
        }
        // The other way a page would stick out.
        ERR(replace(ctx, addr, small[0]), EINVAL, "extends past the new one");
        ERR(replace(ctx, addr + 31 * VMEM_PAGE_64K, small[0]), EINVAL, "extends past the new one");
        OK(vMemReleaseBatch(ctx, small, SMALL, NULL));
        OK(vMemRelease(ctx, big));
        CHECK_EQ(test_stats(ctx).mapped, 0);
    }
}

static atomic_bool stop;
static atomic_int reading; // threads that have read once
static void *reader(void *arg)
{
    (void)arg;
    uint64_t reads = 0;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        uint64_t word = *(volatile uint64_t *)(uintptr_t)(addr + reads % (test_page / 8) * 8);
        if (word != UINT64_C(0x1111111111111111) && word != UINT64_C(0x2222222222222222))
            FAIL("read 0x%" PRIx64 " during a replacement", word);
        if (!reads++)
            reading++;
    }
    CHECK(reads > 0);
    return NULL;
}

// Beside a thread that reads all the time; it would die of SIGSEGV in a gap, or read neither page.
static void live(vmem_context *ctx)
{
    if (!(test_info.caps & VMEM_CAP_LIVE_REMAP) || !test_cpu())
        return;
    vmem_page page[2];
    pthread_t t[2];
    OK(vMemCreate(ctx, test_page, 2, 0, page));
    for (int i = 0; i < 2; i++) {
        OK(replace(ctx, addr, page[i]));
        OK(vmem_fill(ctx, addr, i ? 0x22 : 0x11, test_page));
    }
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&t[i], NULL, reader, NULL));
    while (reading < 2) // a busy machine may let a thread wait until all replacements are over
        sched_yield();
    for (int i = 0; i < 20000; i++)
        OK(replace(ctx, addr, page[i % 2]));
    stop = true;
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_join(t[i], NULL));
    OK(vMemReleaseBatch(ctx, page, 2, NULL));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    one_for_one(ctx);
    large_for_small(ctx);
    live(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
