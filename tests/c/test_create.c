// Creating pages: errors, handles, physical order, fresh memory.
//
// SPDX-License-Identifier: MIT
#include "harness.h"
#include "core/core.h"

static struct vmem_page_info query(vmem_context *ctx, vmem_page page)
{
    struct vmem_page_info info = {.size = sizeof info};
    OK(vmem_page_query(ctx, page, &info));
    return info;
}

static void errors(vmem_context *ctx)
{
    vmem_page page = 42;
    struct vmem_page_info info = {.size = sizeof info};
    ERR(vMemCreate(ctx, 0, 1, 0, &page), EINVAL, "page_size 0");
    ERR(vMemCreate(ctx, 4096, 1, 0, &page), EINVAL, "page_size 4096");
    ERR(vMemCreate(ctx, VMEM_PAGE_64K | VMEM_PAGE_2M, 1, 0, &page), EINVAL, "page_size 2162688");
    ERR(vMemCreate(ctx, 512 * KIB, 1, 0, &page), EINVAL, "page_size 524288");
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, 1, 2, &page), EINVAL, "flags 0x2");
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, NULL), EINVAL, "pages is NULL");
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, SIZE_MAX, 0, &page), ENOMEM, "2^46");
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, (size_t)1 << 26, 0, &page), ENOMEM, "2^46");
    // More than the machine or the device has is refused, and nothing of it is kept.
    const size_t n = 4 * test_info.memory_total / VMEM_PAGE_2M;
    vmem_page *pages = malloc(n * sizeof *pages);
    const uint64_t overhead = test_stats(ctx).overhead;
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, n, 0, pages), ENOMEM, "");
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, n / 4 + 1, 0, pages), ENOMEM, test_cpu() ? "the machine has" : "");
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK(test_stats(ctx).overhead <= overhead);
    free(pages);
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 0, 0, NULL));
    CHECK_EQ(page, 42);
    ERR(vmem_page_query(ctx, 42, &info), EINVAL, "0x2a is not a page");
    ERR(vmem_page_query(ctx, 0, &info), EINVAL, "not a page");
    ERR(vmem_page_query(ctx, ~UINT64_C(0), &info), EINVAL, "not a page");
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));
    ERR(vmem_page_query(ctx, page, NULL), EINVAL, "out must not be NULL");
    ERR(vmem_page_query(ctx, page + 1, &info), EINVAL, "not a page"); // inside the page
    OK(vMemRelease(ctx, page));
    ERR(vmem_page_query(ctx, page, &info), EINVAL, "not a page");
    CHECK_EQ(test_stats(ctx).created, 0);
}

// Pages of a call are one stretch of memory in a fresh context, and no two pages share any.
static void physical_order(void)
{
    for (uint64_t size = VMEM_PAGE_64K; size <= VMEM_PAGE_2M; size *= 2) {
        if (!(test_info.page_sizes & size))
            continue;
        vmem_context *ctx = test_context(0);
        enum { N = 64 };
        vmem_page pages[N];
        OK(vMemCreate(ctx, size, N, 0, pages));
        CHECK_EQ(test_stats(ctx).created, N * size);
        uint64_t consecutive = 0;
        for (int i = 0; i < N; i++) {
            struct vmem_page_info info = query(ctx, pages[i]);
            CHECK_EQ(info.page_size, size);
            CHECK_EQ(info.mappings, 0);
            CHECK_EQ(info.frame % (size / VMEM_PAGE_64K), 0);
            consecutive += i && info.frame == query(ctx, pages[i - 1]).frame + size / VMEM_PAGE_64K;
            for (int k = 0; k < i; k++)
                CHECK(info.frame != query(ctx, pages[k]).frame);
        }
        // A backend of one memory object per page has no consecutive pages.
        CHECK(consecutive == N - 1 || (consecutive == 0 && size == test_page));
        OK(vMemReleaseBatch(ctx, pages, N, NULL));
        CHECK_EQ(test_stats(ctx).created, 0);
        vmem_context_destroy(ctx);
    }
}

static void handles_never_return(vmem_context *ctx)
{
    enum { N = 1000 };
    static vmem_page old[N];
    for (int i = 0; i < N; i++) {
        OK(vMemCreate(ctx, test_page, 1, 0, &old[i]));
        CHECK(old[i] != 0);
        OK(vMemRelease(ctx, old[i]));
        if (i % 100 == 99)
            OK(vmem_trim(ctx, NULL)); // memory goes and comes back; handles do not
    }
    for (int i = 0; i < N; i++) {
        ERR(vMemRelease(ctx, old[i]), EINVAL, "not a page");
        for (int k = 0; k < i; k++)
            CHECK(old[k] != old[i]);
    }
}

// When the generations of a frame are used up, its memory is not handed out again until it has a new number.
static void handles_wear_out(void)
{
    vmem_context *ctx = test_context(0);
    vmem_page first, page;
    OK(vMemCreate(ctx, test_page, 1, 0, &first));
    struct vmem__arena_rec *a;
    vmem__lock(ctx);
    struct vmem__page *p = vmem__page_get(ctx, first, &a);
    p->generation = GENERATION_MAX - 1;
    vmem__unlock(ctx);
    page = vmem__handle(ctx, p, (first ^ ctx->salt) & FRAME_MASK);
    uint64_t frame = query(ctx, page).frame;
    OK(vMemRelease(ctx, page));
    for (int i = 0; i < 3; i++) {
        vmem_page next[40];
        OK(vMemCreate(ctx, test_page, COUNT(next), 0, next));
        for (size_t k = 0; k < COUNT(next); k++)
            CHECK(query(ctx, next[k]).frame != frame);
        OK(vMemReleaseBatch(ctx, next, COUNT(next), NULL));
        OK(vmem_trim(ctx, NULL));
    }
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.created, 0);
    vmem_context_destroy(ctx);
}

static void near_hint(void)
{
    vmem_context *ctx = test_context(0);
    vmem_page a, b[8], c[4];
    OK(vMemCreate(ctx, test_page, 1, 0, &a));
    OK(vmem__create_near(ctx, test_page, 8, a, 0, b));
    if (query(ctx, b[0]).frame != query(ctx, a).frame + test_page / GRANULE)
        CHECK_EQ(test_page, VMEM_PAGE_2M); // one memory object per page
    else {
        // Room after a again: near takes what fits there, and the rest elsewhere.
        OK(vMemReleaseBatch(ctx, b, 2, NULL));
        OK(vmem__create_near(ctx, test_page, 4, a, 0, c));
        CHECK_EQ(query(ctx, c[0]).frame, query(ctx, a).frame + test_page / GRANULE);
        CHECK_EQ(query(ctx, c[1]).frame, query(ctx, a).frame + 2 * test_page / GRANULE);
        CHECK(query(ctx, c[2]).frame > query(ctx, b[7]).frame);
    }
    // A page that is gone is no hint, and no error.
    vMemRelease(ctx, a);
    vmem_page d;
    OK(vmem__create_near(ctx, test_page, 1, a, 0, &d));
    vmem_context_destroy(ctx);
}

// The rest of a stretch that does not fill whole blocks goes on behind them. If there is free memory, none is committed.
static void goes_on_behind(void)
{
    enum { FILL = 256, GAP = 40, N = 38 };
    vmem_context *ctx = test_context(0);
    vmem_page pages[FILL], more;
    if (!(test_info.page_sizes & VMEM_PAGE_64K)) {
        vmem_context_destroy(ctx);
        return;
    }
    OK(vmem_prealloc(ctx, FILL * VMEM_PAGE_64K));
    OK(vMemCreate(ctx, VMEM_PAGE_64K, FILL, 0, pages));
    while (ctx->free[true].nonempty)
        OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &more));
    CHECK_EQ(query(ctx, pages[BLOCK_GRANULES]).frame % BLOCK_GRANULES, 0);
    OK(vMemReleaseBatch(ctx, pages + BLOCK_GRANULES, GAP, NULL));
    OK(vMemReleaseBatch(ctx, pages + 2 * GAP, N - BLOCK_GRANULES, NULL)); // would hold the rest of them
    const uint64_t overhead = test_stats(ctx).overhead, first = query(ctx, pages[0]).frame + BLOCK_GRANULES;
    OK(vMemCreate(ctx, VMEM_PAGE_64K, N, 0, pages + BLOCK_GRANULES));
    for (uint64_t i = 0; i < N; i++)
        CHECK_EQ(query(ctx, pages[BLOCK_GRANULES + i]).frame, first + i);
    // Behind the last page of all nothing is committed yet on the host, but there is memory elsewhere.
    OK(vmem__create_near(ctx, VMEM_PAGE_64K, GAP - BLOCK_GRANULES, pages[FILL - 1], 0, pages));
    CHECK_EQ(test_stats(ctx).overhead, overhead - (N + GAP - BLOCK_GRANULES) * VMEM_PAGE_64K);
    vmem_context_destroy(ctx);
}

// Memory that comes from the system shows nothing of its last owner, whether pages are made at once or one by one, of
// small arenas or of one, and where an arena was used in part before.
static void fresh_memory(void)
{
    enum { N = 70 };
    for (int small = 0; small < 2; small++) {
        vmem_context *ctx = test_context(0);
        uint64_t addr, at = 0;
        vmem_page pages[N];
        if (small)
            vmem__limit_arenas(ctx, VMEM_PAGE_2M, true);
        OK(vMemReserve(ctx, N * VMEM_PAGE_2M, 0, &addr));
        for (int n = 1; at + n <= N; at += n, n *= 2) {
            OK(vMemCreate(ctx, test_page, n, n == 4 ? VMEM_CREATE_ZERO : 0, pages + at));
            for (int i = 0; i < n; i++)
                OK(vMemMap(ctx, addr + (at + i) * test_page, pages[at + i]));
            CHECK(all_words(ctx, addr, (at + n) * test_page, 0));
        }
        OK(vmem_fill(ctx, addr, 0xee, at * test_page));
        OK(vMemReleaseBatch(ctx, pages, at, NULL));
        OK(vmem_trim(ctx, NULL));
        CHECK(!ctx->arenas);
        OK(vMemCreate(ctx, test_page, at, 0, pages));
        for (uint64_t i = 0; i < at; i++)
            OK(vMemMap(ctx, addr + i * test_page, pages[i]));
        CHECK(all_words(ctx, addr, at * test_page, 0));
        vmem_context_destroy(ctx);
    }
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    errors(ctx);
    handles_never_return(ctx);
    vmem_context_destroy(ctx);
    physical_order();
    handles_wear_out();
    near_hint();
    goes_on_behind();
    fresh_memory();
    return 0;
}
