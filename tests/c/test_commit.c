// vmem_commit and vmem_decommit: pages that belong to the addresses they back.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "harness.h"

static uint64_t addr;

static void errors(vmem_context *ctx)
{
    const uint64_t P = test_page;
    uint64_t bytes = 77;
    const struct vmem_range good = {addr, P};
    ERR(vmem_commit(ctx, NULL, 1, P, 0, &bytes), EINVAL, "ranges is NULL");
    ERR(vmem_decommit(ctx, NULL, 1, &bytes), EINVAL, "ranges is NULL");
    ERR(vmem_commit(ctx, &good, 1, 12345, 0, &bytes), EINVAL, "page_size 12345");
    ERR(vmem_commit(ctx, &good, 1, P, 0x80, &bytes), EINVAL, "flags 0x80");
    ERR(vmem_commit(ctx, (struct vmem_range[]){good, {addr + 1, P}}, 2, P, 0, &bytes), EINVAL, "ranges[1]");
    ERR(vmem_commit(ctx, (struct vmem_range[]){good, {addr, 64 * MIB + P}}, 2, P, 0, &bytes), EINVAL, "ranges[1]: ");
    ERR(vmem_decommit(ctx, (struct vmem_range[]){good, {addr + 64 * MIB, P}}, 2, &bytes), EINVAL, "ranges[1]");
    CHECK_EQ(bytes, 77);
    CHECK_EQ(test_stats(ctx).created, 0);
    OK(vmem_commit(ctx, NULL, 0, P, 0, &bytes));
    CHECK_EQ(bytes, 0);
    // A budget too small leaves nothing half done.
    OK(vmem_set_budget(ctx, 4 * P));
    ERR(vmem_commit(ctx, (struct vmem_range[]){good, {addr + 8 * P, 4 * P}}, 2, P, 0, NULL), ENOMEM, "budget");
    CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
    OK(vmem_set_budget(ctx, 0));
}

static void grows_and_shrinks(vmem_context *ctx)
{
    const uint64_t P = test_page;
    uint64_t bytes;
    // What is backed already stays as it is: a row that grows asks for all of itself.
    for (uint64_t n = 1; n <= 16; n++) {
        OK(vmem_commit(ctx, &(struct vmem_range){addr, n * P}, 1, P, VMEM_CREATE_ZERO, &bytes));
        CHECK_EQ(bytes, P);
        put_word(ctx, addr + (n - 1) * P, n);
    }
    for (uint64_t n = 1; n <= 16; n++)
        CHECK_EQ(get_word(ctx, addr + (n - 1) * P), n);
    CHECK_EQ(test_stats(ctx).created, 16 * P);
    OK(vmem_decommit(ctx, (struct vmem_range[]){{addr + 2 * P, 3 * P}, {addr + 12 * P, 20 * P}}, 2, &bytes));
    CHECK_EQ(bytes, 7 * P);
    CHECK_EQ(test_stats(ctx).created, 9 * P);
    OK(vmem_commit(ctx, &(struct vmem_range){addr, 16 * P}, 1, P, VMEM_CREATE_ZERO, &bytes));
    CHECK_EQ(bytes, 7 * P);
    for (uint64_t n = 1; n <= 16; n++)
        CHECK_EQ(get_word(ctx, addr + (n - 1) * P), (n >= 3 && n <= 5) || n >= 13 ? 0 : n);
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 64 * MIB}, 1, &bytes));
    CHECK_EQ(bytes, 16 * P);
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 64 * MIB}, 1, &bytes));
    CHECK_EQ(bytes, 0);
    CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
}

static void page_sizes(vmem_context *ctx)
{
    if (test_page == VMEM_PAGE_2M)
        return;
    uint64_t bytes;
    OK(vmem_commit(ctx, &(struct vmem_range){addr, 2 * MIB}, 1, VMEM_PAGE_2M, 0, &bytes));
    CHECK_EQ(bytes, 2 * MIB);
    // A large page serves a commit in small ones, and not the other way round.
    OK(vmem_commit(ctx, &(struct vmem_range){addr + 64 * KIB, 4 * MIB - 64 * KIB}, 1, VMEM_PAGE_64K, 0, &bytes));
    CHECK_EQ(bytes, 2 * MIB);
    ERR(vmem_commit(ctx, &(struct vmem_range){addr, 4 * MIB}, 1, VMEM_PAGE_2M, 0, NULL), EEXIST,
        "smaller than page_size");
    ERR(vmem_decommit(ctx, &(struct vmem_range){addr + 64 * KIB, 64 * KIB}, 1, NULL), EINVAL, "cuts the page");
    ERR(vmem_decommit(ctx, &(struct vmem_range){addr, MIB}, 1, NULL), EINVAL, "cuts the page");
    CHECK_EQ(test_stats(ctx).mapped, 4 * MIB);
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 64 * MIB}, 1, &bytes));
    CHECK_EQ(bytes, 4 * MIB);
}

// What a commit has filled so far goes again if it fails: until it is over, another one must not build on it. The
// interrupt function stands for a second thread.
static struct vmem_range first_page;
static unsigned refusals, stop_at;

static int commit_beside(void *arg)
{
    vmem_context *ctx = arg;
    vmem_page page;
    OK(vmem_query(ctx, first_page.addr, &page, NULL));
    if (!page)
        return 0;
    ERR(vmem_commit(ctx, &first_page, 1, test_page, 0, NULL), EBUSY, "another call commits");
    return ++refusals == stop_at;
}

static void beside_another(vmem_context *ctx)
{
    if (test_page == VMEM_PAGE_2M)
        return; // it would take 8 GiB until a commit is done in parts
    uint64_t bytes, start;
    const uint64_t length = 4112 * test_page;
    OK(vMemReserve(ctx, length, 0, &start));
    const struct vmem_range all = {start, length};
    first_page = (struct vmem_range){start, test_page};
    OK(vmem_set_interrupt(ctx, commit_beside, ctx));
    for (stop_at = 1; stop_at <= 2; stop_at++) {
        refusals = 0;
        if (stop_at == 1)
            ERR(vmem_commit(ctx, &all, 1, test_page, 0, NULL), EINTR, "interrupted");
        else
            OK(vmem_commit(ctx, &all, 1, test_page, 0, &bytes));
        CHECK_EQ(refusals, 1);
        CHECK_EQ(test_stats(ctx).mapped, stop_at == 1 ? 0 : length);
        CHECK(!ctx->commits);
    }
    CHECK_EQ(bytes, length);
    OK(vmem_set_interrupt(ctx, NULL, NULL));
    // It is over: its pages count as backed, as any do.
    OK(vmem_commit(ctx, &all, 1, test_page, 0, &bytes));
    CHECK_EQ(bytes, 0);
    OK(vmem_unreserve(ctx, start));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    errors(ctx);
    grows_and_shrinks(ctx);
    page_sizes(ctx);
    beside_another(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
