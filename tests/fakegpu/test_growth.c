// The cost of memory that an engine gets from nothing: the driver calls for a page of 2 MiB on the GPU's backends, where
// the driver clears what is freed ($FAKEGPU_SCRUB) and where it does not. And that pages are zero either way, when fresh
// and when they come again.
//
// SPDX-License-Identifier: MIT
#define FAKEGPU_USER
#include "fakegpu.h"

#include "../c/harness.h"
#include "core/memory.h"

#define PAGES 64
#define PAGE VMEM_PAGE_2M

static vmem_context *ctx;
static uint64_t space;
static vmem_page pages[PAGES];

static uint64_t calls(void) { return test_stats(ctx).syscalls; }

static void get(void)
{
    struct vmem_map_op ops[PAGES];

    OK(vMemCreate(ctx, PAGE, PAGES, VMEM_CREATE_ZERO, pages));
    for (int i = 0; i < PAGES; i++)
        ops[i] = (struct vmem_map_op){space + i * PAGE, pages[i]};
    OK(vMemMapBatch(ctx, ops, PAGES, VMEM_MAP_FINE, NULL));
    for (uint64_t at = 0; at < PAGES * PAGE; at += VMEM_PAGE_64K)
        CHECK_EQ(*(volatile uint64_t *)(space + at), 0);
}

static void give_back(void)
{
    for (uint64_t at = 0; at < PAGES * PAGE; at += VMEM_PAGE_64K)
        *(volatile uint64_t *)(space + at) = ~at;
    OK(vMemReleaseBatch(ctx, pages, PAGES, NULL));
}

int main(int argc, char **argv)
{
    const bool scrubs = getenv("FAKEGPU_SCRUB") != NULL;
    uint64_t before, got, used;

    test_start(argc, argv);
    if (!fakegpu_fail)
        SKIP("the fake driver is not preloaded");
    ctx = test_context(0);
    vmem__limit_arenas(ctx, PAGE, true); // as in an engine: a page goes back alone
    OK(vMemReserve(ctx, PAGES * PAGE, VMEM_RESERVE_BACKDROP, &space));
    OK(vmem_backdrop(ctx, space, PAGES * PAGE));
    get(); // makes what the first pages need
    give_back();
    OK(vmem_trim(ctx, NULL));

    before = calls();
    get();
    got = calls() - before;
    if (!strcmp(test_backend, "stock")) { // allocate, map, and map once more to clear
        CHECK_EQ(got, (scrubs ? 2 : 3) * PAGES);
        before = calls();
        give_back();
        OK(vmem_trim(ctx, NULL));
        CHECK(calls() - before <= (scrubs ? 1 : 2) * PAGES + 4);
    } else {
        give_back();
    }

    // Memory that stays in the context is not cleared by the driver.
    OK(vmem_prealloc(ctx, PAGES * PAGE));
    for (int turn = 0; turn < 2; turn++) {
        get();
        give_back();
    }
    used = fakegpu_used();
    get();
    CHECK_EQ(fakegpu_used(), used);
    give_back();
    OK(vMemFree(ctx, space));
    vmem_context_destroy(ctx);
    return 0;
}
