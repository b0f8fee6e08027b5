// VMEM_MAP_REPLACE: a reader never sees a gap. What may be replaced, and what becomes of it, is test_model's.
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
    live(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
