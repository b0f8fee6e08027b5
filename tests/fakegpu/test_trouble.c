// A driver in trouble, on the GPU's backends over the fake driver: several calls in a row fail, among them those that
// undo what came before. No page that the books call mapped is lost: it is there, or the calls that would use it say that
// it is absent; and it is there again as soon as the driver maps. What stands on pages is in trouble in ../c/trouble.h.
//
// SPDX-License-Identifier: MIT
#define FAKEGPU_USER
#include "fakegpu.h"

#include <setjmp.h>
#include <signal.h>

#include "../c/harness.h"

static const long lengths[] = {1, 2, 3, 5, 8, 40};

static vmem_context *ctx;

// ---- pages ------------------------------------------------------------------------------------------------------

static sigjmp_buf back;
static void on_fault(int s)
{
    (void)s;
    siglongjmp(back, 1);
}
static bool read_word(uint64_t addr, uint64_t *word)
{
    if (sigsetjmp(back, 1))
        return false;
    *word = *(volatile uint64_t *)addr;
    return true;
}

// One page, by what the books say.
static void check_page(uint64_t addr, vmem_page page, uint64_t word)
{
    uint64_t value = 0;
    vmem_page found;
    int rc = vmem_query(ctx, addr, &found, NULL);

    CHECK_EQ(found, page);
    if (rc) {
        CHECK(strstr(vmem_last_error(), "is absent") && test_stats(ctx).absent);
        rc = page ? vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)&value, addr, 8}, 1) : 0;
        CHECK(rc ? rc == -ENOMEM && strstr(vmem_last_error(), "is absent") : !page || value == word); // it may be over
    } else if (page) {
        CHECK(read_word(addr, &value));
        CHECK_EQ(value, word);
    }
}

#define N 40 // pages: a block of 2 MiB and a quarter; fewer where each is a block
static uint32_t n_pages;
enum kind { UNMAP, RELEASE, MAP, REPLACE, DECOMMIT, COMMIT, KINDS };

// The call of that kind, of pages [from, to) of N at base. `old` are mapped, `more` are not.
static int call(enum kind kind, uint64_t base, uint32_t gap, const vmem_page *old, const vmem_page *more, uint32_t from,
                uint32_t to, uint32_t flags)
{
    struct vmem_range cuts[N];
    struct vmem_map_op maps[N];
    struct vmem_range ranges[N];

    for (uint32_t i = from; i < to; i++) {
        const uint64_t addr = base + (uint64_t)i * gap * test_page;
        cuts[i] = (struct vmem_range){addr, test_page};
        maps[i] = (struct vmem_map_op){addr, more[i]};
        ranges[i] = (struct vmem_range){addr, test_page};
    }
    switch (kind) {
    case UNMAP: return vMemUnmapBatch(ctx, cuts + from, to - from, NULL);
    case RELEASE: return vMemReleaseBatch(ctx, old + from, to - from, NULL);
    case MAP: return vMemMapBatch(ctx, maps + from, to - from, flags, NULL);
    case REPLACE: return vMemMapBatch(ctx, maps + from, to - from, flags | VMEM_MAP_REPLACE, NULL);
    case DECOMMIT: return vmem_decommit(ctx, ranges + from, to - from, NULL);
    default: return vmem_commit(ctx, ranges + from, to - from, test_page, flags, NULL);
    }
}

static bool one_call(enum kind kind, uint32_t gap, bool backdrop, uint32_t flags, uint32_t from, uint32_t to, long at,
                     long k)
{
    const bool fresh = kind == MAP || kind == COMMIT;
    vmem_page old[N], more[N];
    const uint32_t n = n_pages;
    struct vmem_map_op maps[N];
    uint64_t base;

    OK(vMemReserve(ctx, (uint64_t)n * gap * test_page, backdrop ? VMEM_RESERVE_BACKDROP : 0, &base));
    OK(vMemCreate(ctx, test_page, n, 0, old));
    OK(vMemCreate(ctx, test_page, n, 0, more));
    for (uint32_t i = 0; i < n; i++)
        maps[i] = (struct vmem_map_op){base + (uint64_t)i * gap * test_page, old[i]};
    OK(vMemMapBatch(ctx, maps, n, flags, NULL));
    for (uint32_t i = 0; i < n; i++)
        *(uint64_t *)maps[i].addr = 100 + i;
    if (fresh)
        OK(vMemUnmap(ctx, maps[from].addr, maps[to - 1].addr + test_page - maps[from].addr));
    fakegpu_fail_many(at, k);
    const int rc = call(kind, base, gap, old, more, from, to, flags);
    CHECK(!rc || rc == -ENOMEM);
    for (int trouble = 1; trouble >= 0; trouble--) {
        if (!trouble)
            fakegpu_fail(0);
        for (uint32_t i = 0; rc && i < n; i++) {
            const bool there = i < from || i >= to || !fresh;
            check_page(maps[i].addr, there ? old[i] : 0, 100 + i);
        }
    }
    CHECK_EQ(test_stats(ctx).absent, 0);
    for (uint32_t i = from; i < to && backdrop && fresh && rc && test_page < VMEM_PAGE_2M; i++) {
        uint64_t word; // of the backdrop; on cuda it is not everywhere
        CHECK(read_word(maps[i].addr, &word) && !word);
    }
    if (rc) // nothing is left of the failure
        OK(call(kind, base, gap, old, more, from, to, flags));
    OK(vMemUnmap(ctx, base, (uint64_t)n * gap * test_page));
    OK(vmem_drop(ctx, old, n));
    OK(vmem_drop(ctx, more, n));
    OK(vMemFree(ctx, base));
    CHECK_EQ(test_stats(ctx).created, 0);
    return rc;
}

static void test_calls(void)
{
    static const struct {
        uint32_t from, to;
    } parts[] = {{0, N}, {0, 32}, {5, 6}, {31, 33}, {3, 37}}, large[] = {{0, 6}, {2, 3}, {1, 5}};
    unsigned failed = 0;

    ctx = test_context(0);
    const bool small = test_page < VMEM_PAGE_2M;
    n_pages = small ? N : 6;
    for (enum kind kind = 0; kind < KINDS; kind++)
        for (uint32_t variant = 0; variant < 8; variant++)
            for (size_t p = 0; p < (small ? COUNT(parts) : COUNT(large)); p++)
                for (size_t k = 0; k < COUNT(lengths); k++)
                    for (long at = 1; at < 30; at += 1 + at / 3) {
                        const uint32_t from = small ? parts[p].from : large[p].from;
                        const uint32_t to = small ? parts[p].to : large[p].to;
                        if (!one_call(kind, 1 + variant % 2, variant & 2, variant & 4 ? VMEM_MAP_FINE : 0, from, to, at,
                                      lengths[k]))
                            break;
                        failed++;
                    }
    printf("%u calls failed\n", failed);
    CHECK(failed > 500);
    vmem_context_destroy(ctx);
}

// What is absent can be unmapped, replaced and released as if it were there.
static void test_absent(void)
{
    vmem_page p[32], q;
    struct vmem_map_op maps[32];
    uint64_t base;

    ctx = test_context(0);
    for (int what = 0; what < 4; what++) {
        OK(vMemReserve(ctx, 32 * test_page, 0, &base));
        OK(vMemCreate(ctx, test_page, 32, 0, p));
        OK(vMemCreate(ctx, test_page, 1, 0, &q));
        for (uint32_t i = 0; i < 32; i++)
            maps[i] = (struct vmem_map_op){base + i * test_page, p[i]};
        OK(vMemMapBatch(ctx, maps, 32, 0, NULL));
        for (uint32_t i = 0; i < 32; i++)
            *(uint64_t *)maps[i].addr = 100 + i;
        fakegpu_fail_many(1, 1000);
        CHECK_EQ(vMemMapBatch(ctx, &(struct vmem_map_op){base + 4 * test_page, q}, 1, VMEM_MAP_REPLACE, NULL), -ENOMEM);
        if (strcmp(test_backend, "uvm"))
            CHECK(test_stats(ctx).absent >= test_page);
        fakegpu_fail_many(2, 0);
        if (what == 0)
            OK(vMemUnmap(ctx, base + 4 * test_page, test_page));
        else if (what == 1)
            OK(vMemMapBatch(ctx, &(struct vmem_map_op){base + 4 * test_page, q}, 1, VMEM_MAP_REPLACE, NULL));
        else if (what == 2)
            OK(vMemRelease(ctx, p[4]));
        else
            OK(vmem_unreserve(ctx, base));
        CHECK_EQ(test_stats(ctx).absent, 0);
        for (uint32_t i = 0; i < 32 && what < 3; i++)
            if (i != 4)
                check_page(maps[i].addr, p[i], 100 + i);
        OK(vmem_drop(ctx, p, 32));
        OK(vmem_drop(ctx, &q, 1));
        if (what < 3)
            OK(vMemFree(ctx, base));
    }
    vmem_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (!fakegpu_fail_many)
        SKIP("the fake driver is not preloaded");
    signal(SIGSEGV, on_fault);
    signal(SIGBUS, on_fault);
    test_calls();
    test_absent();
    return 0;
}
