// The budget, memory taken ahead, and giving it back.
//
// SPDX-License-Identifier: MIT
#include "checked.h"
#include "harness.h"

static void budget(void)
{
    vmem_context *ctx = test_context(8 * VMEM_PAGE_2M);
    vmem_page page[9];
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, 9, 0, page), ENOMEM, "exceed the budget of 16777216: 0 bytes exist");
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 8, 0, page));
    ERR(vMemCreate(ctx, test_page, 1, 0, &page[8]), ENOMEM, "exceed the budget of 16777216: 16777216 bytes exist");
    CHECK_EQ(test_stats(ctx).created, 8 * VMEM_PAGE_2M);
    OK(vMemRelease(ctx, page[3]));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page[3]));
    // Lowered under what exists: nothing is lost, nothing more comes.
    OK(vmem_set_budget(ctx, 2 * VMEM_PAGE_2M));
    CHECK_EQ(test_stats(ctx).budget, 2 * VMEM_PAGE_2M);
    ERR(vMemCreate(ctx, test_page, 1, 0, &page[8]), ENOMEM, "budget");
    OK(vMemReleaseBatch(ctx, page, 6, NULL));
    ERR(vMemCreate(ctx, test_page, 1, 0, &page[8]), ENOMEM, "budget");
    OK(vMemRelease(ctx, page[6]));
    OK(vMemCreate(ctx, test_page, 1, 0, &page[8]));
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page[0]), ENOMEM, "budget");
    OK(vmem_set_budget(ctx, 0));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 7, 0, page));
    vmem_context_destroy(ctx);
}

// Device memory never exceeds the budget, rounded up to 2 MiB, however arenas like to grow.
static void budget_caps_arenas(bool whole_arenas)
{
    const uint64_t limit = 5 * VMEM_PAGE_2M;
    vmem_context *ctx;
    OK(checked_context(test_backend, limit - 64 * KIB, whole_arenas, &ctx));
    vmem_page page[160];
    size_t n = 0;
    while (n < COUNT(page) && !vMemCreate(ctx, test_page, 1, 0, &page[n]))
        n++;
    CHECK_EQ(n, (limit - 64 * KIB) / test_page);
    struct vmem_stats s = test_stats(ctx);
    CHECK(s.created + s.overhead <= limit + 128 * MIB); // overhead: the backend's scratch too
    if (!strcmp(test_backend, "host") || !strcmp(test_backend, "cuda"))
        CHECK(s.created + s.overhead <= limit);
    OK(vMemReleaseBatch(ctx, page, n, NULL));
    vmem_context_destroy(ctx);
}

// A commit of far more than there is fails at once: it would take 4 GiB of lists to describe.
static void commit_looks_first(void)
{
    vmem_context *ctx = test_context(4 * VMEM_PAGE_2M);
    uint64_t addr;
    OK(vMemReserve(ctx, 16 * TIB, 0, &addr));
    ERR(vmem_commit(ctx, &(struct vmem_range){addr, 16 * TIB}, 1, test_page, 0, NULL), ENOMEM, "exceed the budget of");
    OK(vmem_commit(ctx, &(struct vmem_range){addr + 8 * TIB, 2 * VMEM_PAGE_2M}, 1, test_page, 0, NULL));
    ERR(vmem_commit(ctx, &(struct vmem_range){addr, 16 * TIB}, 1, test_page, 0, NULL), ENOMEM, "exceed the budget of");
    OK(vmem_set_budget(ctx, 0));
    ERR(vmem_commit(ctx, &(struct vmem_range){addr, 16 * TIB}, 1, test_page, 0, NULL), ENOMEM, "bytes of memory");
    CHECK_EQ(test_stats(ctx).created, 2 * VMEM_PAGE_2M);
    OK(vmem_unreserve(ctx, addr));
    vmem_context_destroy(ctx);
}

// As a limit that never binds.
static void largest_budget(void)
{
    vmem_context *ctx;
    vmem_page page;
    OK(checked_context(test_backend, UINT64_MAX, true, &ctx));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));
    vmem_context_destroy(ctx);
}

// More than there is fails at once, and does not take all there is first.
static void prealloc_looks_first(void)
{
    vmem_context *ctx = test_context(0);
    const uint64_t calls = test_stats(ctx).syscalls;
    ctx->b.info.memory_total = 16 * MIB; // of so small a device
    ERR(vmem_prealloc(ctx, 16 * MIB + 1), ENOMEM, "bytes of memory");
    ERR(vmem_prealloc(ctx, 32 * TIB), ENOMEM, "bytes of memory");
    CHECK_EQ(test_stats(ctx).syscalls, calls);
    OK(vmem_prealloc(ctx, 16 * MIB));
    vmem_context_destroy(ctx);
}

static void prealloc_of_nothing(void)
{
    vmem_context *ctx = test_context(0);
    vmem_page page[100];
    const uint64_t base = test_stats(ctx).overhead;
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 100, 0, page));
    OK(vmem_prealloc(ctx, 0));
    OK(vMemReleaseBatch(ctx, page, 100, NULL));
    if (ctx->b.ops->populate)
        CHECK_EQ(test_stats(ctx).overhead, base);
    else
        CHECK(test_stats(ctx).overhead - base <= 64 * MIB); // an arena may stay
    OK(vmem_prealloc(ctx, 200 * MIB));
    CHECK(test_stats(ctx).overhead - base >= 200 * MIB);
    OK(vmem_prealloc(ctx, 0)); // ends that
    if (ctx->b.ops->populate)
        CHECK_EQ(test_stats(ctx).overhead, base);
    else
        CHECK(test_stats(ctx).overhead - base <= 64 * MIB); // an arena may stay
    vmem_context_destroy(ctx);
}

static void prealloc(void)
{
    vmem_context *ctx = test_context(0);
    const uint64_t bytes = 16 * VMEM_PAGE_2M, base = test_stats(ctx).overhead;
    ERR(vmem_prealloc(ctx, (UINT64_C(1) << 46) + 1), ENOMEM, "2^46");
    OK(vmem_prealloc(ctx, bytes));
    struct vmem_stats s = test_stats(ctx);
    CHECK(s.overhead - base >= bytes);
    CHECK_EQ(s.created, 0);
    OK(vmem_prealloc(ctx, bytes)); // it is there already
    CHECK_EQ(test_stats(ctx).overhead, s.overhead);

    // Creation and release take it and give it back, without a call into the driver.
    const uint64_t calls = test_stats(ctx).syscalls;
    vmem_page page[16];
    for (int round = 0; round < 3; round++) {
        OK(vMemCreate(ctx, VMEM_PAGE_2M, 16, 0, page));
        CHECK_EQ(test_stats(ctx).created, bytes);
        CHECK_EQ(test_stats(ctx).created + test_stats(ctx).overhead, s.overhead);
        OK(vMemReleaseBatch(ctx, page, 16, NULL));
        CHECK_EQ(test_stats(ctx).overhead, s.overhead);
    }
    CHECK_EQ(test_stats(ctx).syscalls, calls);

    uint64_t freed;
    OK(vmem_trim(ctx, &freed));
    CHECK(freed >= bytes);
    CHECK_EQ(test_stats(ctx).overhead, s.overhead - freed);
    OK(vmem_trim(ctx, &freed));
    CHECK_EQ(freed, 0);
    OK(vmem_trim(ctx, NULL));
    // Ahead of what exists, not including it.
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 4, 0, page));
    OK(vmem_prealloc(ctx, bytes));
    CHECK(test_stats(ctx).overhead - base >= bytes);
    // A budget limits it as it limits pages.
    OK(vmem_set_budget(ctx, 10 * VMEM_PAGE_2M));
    ERR(vmem_prealloc(ctx, 7 * VMEM_PAGE_2M), ENOMEM, "exceed the budget");
    OK(vmem_trim(ctx, NULL));
    OK(vmem_prealloc(ctx, 6 * VMEM_PAGE_2M));
    vmem_context_destroy(ctx);
}

// Memory that is used no more goes back: all of it on trim, most of it by itself.
static void shrinks(void)
{
    enum { N = 128 };
    vmem_context *ctx = test_context(0);
    const uint64_t base = test_stats(ctx).overhead;
    vmem_page page[N];
    OK(vMemCreate(ctx, VMEM_PAGE_2M, N, 0, page));
    OK(vMemReleaseBatch(ctx, page, N, NULL));
    if (!strcmp(test_backend, "host"))
        CHECK_EQ(test_stats(ctx).overhead, 0);
    CHECK(test_stats(ctx).overhead - base <= N * VMEM_PAGE_2M);
    OK(vmem_trim(ctx, NULL));
    CHECK_EQ(test_stats(ctx).overhead, base);
    // With one page alive its arena stays, and only that.
    OK(vMemCreate(ctx, test_page, 1, 0, page));
    OK(vmem_trim(ctx, NULL));
    CHECK(ctx->arenas && !ctx->arenas->next);
    OK(vMemRelease(ctx, page[0]));
    OK(vmem_trim(ctx, NULL));
    CHECK_EQ(test_stats(ctx).overhead, base);
    CHECK(!ctx->arenas);
    // Many arenas do not outlive their pages for long, even without it.
    for (int round = 0; round < 3; round++) {
        OK(vMemCreate(ctx, VMEM_PAGE_2M, 100, 0, page));
        OK(vMemCreate(ctx, VMEM_PAGE_2M, N - 100, 0, page + 100));
        // Frames of two arenas are never consecutive: no run may go from one into the other.
        for (struct vmem__arena_rec *a = ctx->arenas; a; a = a->next) {
            for (struct vmem__arena_rec *b = ctx->arenas; b; b = b->next)
                CHECK(a->base + a->granules != b->base);
        }
        OK(vMemReleaseBatch(ctx, page, N, NULL));
        CHECK(ctx->arena_bytes <= (ctx->b.arena_min > 32 * MIB ? ctx->b.arena_min : 32 * MIB));
    }
    vmem_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    budget();
    budget_caps_arenas(false);
    budget_caps_arenas(true);
    largest_budget();
    commit_looks_first();
    prealloc_looks_first();
    prealloc_of_nothing();
    prealloc();
    shrinks();
    return 0;
}
