// vmem_commit and vmem_decommit: pages that belong to the addresses they back.
//
// SPDX-License-Identifier: MIT
#include <sched.h>

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
    // Backed granules stay as they are: a row that grows commits its whole range again.
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

// Memory that was kept ready is zeroed for those who ask.
static void zeroed(vmem_context *ctx)
{
    const struct vmem_range r = {addr, 8 * test_page};
    OK(vmem_prealloc(ctx, r.length));
    for (int i = 0; i < 2; i++) {
        OK(vmem_commit(ctx, &r, 1, test_page, VMEM_CREATE_ZERO, NULL));
        CHECK(all_words(ctx, addr, r.length, 0));
        OK(vmem_fill(ctx, addr, 0x55, r.length));
        OK(vmem_decommit(ctx, &r, 1, NULL));
    }
    OK(vmem_trim(ctx, NULL));
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
    OK(vmem_decommit(ctx, &(struct vmem_range){addr + 2 * MIB, MIB}, 1, NULL)); // only the second half is backed
    ERR(vmem_commit(ctx, &(struct vmem_range){addr, 4 * MIB}, 1, VMEM_PAGE_2M, 0, NULL), EEXIST,
        "smaller than page_size");
    OK(vmem_commit(ctx, &(struct vmem_range){addr + 2 * MIB, MIB}, 1, VMEM_PAGE_64K, 0, NULL));
    ERR(vmem_decommit(ctx, &(struct vmem_range){addr + 64 * KIB, 64 * KIB}, 1, NULL), EINVAL, "cuts the page");
    ERR(vmem_decommit(ctx, &(struct vmem_range){addr, MIB}, 1, NULL), EINVAL, "cuts the page");
    CHECK_EQ(test_stats(ctx).mapped, 4 * MIB);
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 64 * MIB}, 1, &bytes));
    CHECK_EQ(bytes, 4 * MIB);
}

// The flags of every run that the backend is asked to map.
static const struct vmem__ops *real;
static uint32_t any_flags, all_flags;
static int watched_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    for (size_t i = 0; i < n; i++) {
        any_flags |= runs[i].flags;
        all_flags &= runs[i].flags;
    }
    return real->map(b, runs, n, bad);
}

// VMEM_MAP_FINE reaches the backend, for every run, and alone.
static void fine(void)
{
    for (const struct vmem__ops *const *b = vmem__backends; *b; b++) {
        if (!strcmp((*b)->name, test_backend))
            real = *b;
    }
    struct vmem__ops watched = *real;
    struct vmem_options opts = {.size = sizeof opts, .backend = test_backend};
    vmem_context *ctx;
    uint64_t at;
    watched.map = watched_map;
    OK(vmem__context_create_ops(&watched, &opts, &ctx));
    OK(vMemReserve(ctx, 64 * MIB, 0, &at));
    for (unsigned i = 0; i < 4; i++) {
        const uint32_t flags = (i & 1 ? VMEM_CREATE_ZERO : 0) | (i & 2 ? VMEM_MAP_FINE : 0);
        const struct vmem_range ranges[2] = {{at, 8 * MIB}, {at + 16 * MIB, 24 * test_page}};
        any_flags = 0;
        all_flags = UINT32_MAX;
        OK(vmem_commit(ctx, ranges, 2, test_page, flags, NULL));
        CHECK_EQ(any_flags, flags & VMEM_MAP_FINE);
        CHECK_EQ(all_flags, flags & VMEM_MAP_FINE);
        OK(vmem_decommit(ctx, ranges, 2, NULL));
    }
    vmem_context_destroy(ctx);
}

// From its start to its end a commit holds all of its ranges, whatever their size: the holes and what is backed between
// them. The interrupt function stands for a second thread.
static struct {
    vmem_context *ctx;
    struct vmem_range all;
    uint64_t backed; // an address
    vmem_page page, own;
    unsigned asked, stop_at;
} held;

static int beside(void *arg)
{
    vmem_context *ctx = arg;
    const uint64_t P = test_page, start = held.all.addr, last = start + held.all.length - P, backed = held.backed;
    if (!held.all.length)
        return 0; // not a commit of this test
    const struct vmem_range parts[] = {held.all, {start, P}, {last, P}, {backed, P}, {backed - P, 2 * P}};
    vmem_page page;
    for (size_t i = 0; i < COUNT(parts); i++) {
        ERR(vmem_commit(ctx, &parts[i], 1, P, 0, NULL), EBUSY, "another call");
        ERR(vmem_decommit(ctx, &parts[i], 1, NULL), EBUSY, "another call");
        ERR(vMemUnmap(ctx, parts[i].addr, parts[i].length), EBUSY, "another call");
    }
    for (uint32_t flags = 0; flags <= VMEM_MAP_REPLACE; flags += VMEM_MAP_REPLACE) {
        for (size_t i = 1; i <= 3; i++) {
            const struct vmem_map_op op = {parts[i].addr, held.own};
            ERR(vMemMapBatch(ctx, &op, 1, flags, NULL), EBUSY, "another call");
        }
    }
    ERR(vMemRelease(ctx, held.page), EBUSY, "another call");
    OK(vmem_set_budget(ctx, P)); // that it is exhausted does not matter here
    ERR(vmem_commit(ctx, &parts[1], 1, P, 0, NULL), EBUSY, "another call");
    OK(vmem_set_budget(ctx, 0));
    ERR(vMemFree(ctx, start), EBUSY, "");
    ERR(vmem_fill(ctx, last, 1, P), EBUSY, "another call");
    put_word(ctx, backed + 8, 42 + held.asked); // the data of what is backed is not the commit's
    OK(vmem_query(ctx, start, &page, NULL));
    CHECK_EQ(page, 0);
    OK(vmem_query(ctx, last, &page, NULL));
    CHECK_EQ(page, 0);
    CHECK_EQ(page_at(ctx, backed), held.page);
    return ++held.asked == held.stop_at;
}

// The memory of an interrupted call goes back behind it.
static void settle(vmem_context *ctx)
{
    for (bool on = true; on; sched_yield()) {
        vmem__lock(ctx);
        on = ctx->shrinking;
        vmem__unlock(ctx);
    }
    OK(vmem_trim(ctx, NULL));
}

static void beside_another(vmem_context *ctx)
{
    const uint64_t P = test_page, length = 576 * MIB; // of which a part is 64 MiB on the host
    uint64_t bytes, start;
    OK(vMemReserve(ctx, length, 0, &start));
    held.ctx = ctx;
    held.backed = start + 100 * P;
    OK(vmem_commit(ctx, &(struct vmem_range){held.backed, P}, 1, P, 0, NULL));
    held.page = page_at(ctx, held.backed);
    put_word(ctx, held.backed, 7);
    OK(vMemCreate(ctx, P, 1, 0, &held.own));
    held.all = (struct vmem_range){start, length};
    OK(vmem_set_interrupt(ctx, beside, ctx));
    held.stop_at = held.asked = 0;
    OK(vmem_commit(ctx, &held.all, 1, P, 0, &bytes));
    CHECK_EQ(bytes, length - P);
    const unsigned asks = held.asked;
    CHECK(asks >= 2);
    // Where the memory is there already, it asks between two parts.
    OK(vmem_set_interrupt(ctx, NULL, NULL));
    OK(vmem_prealloc(ctx, length));
    OK(vmem_decommit(ctx, (struct vmem_range[]){{start, 100 * P}, {held.backed + P, length - 101 * P}}, 2, NULL));
    OK(vmem_set_interrupt(ctx, beside, ctx));
    held.asked = 0;
    OK(vmem_commit(ctx, &held.all, 1, P, 0, &bytes));
    CHECK_EQ(held.asked, 8);
    for (unsigned i = 0, at[] = {1, asks / 2, asks - 1, asks}; i < COUNT(at); i++) {
        OK(vmem_set_interrupt(ctx, NULL, NULL));
        OK(vmem_decommit(ctx, (struct vmem_range[]){{start, 100 * P}, {held.backed + P, length - 101 * P}}, 2, &bytes));
        CHECK_EQ(bytes, length - P);
        settle(ctx);
        OK(vmem_set_interrupt(ctx, beside, ctx));
        const struct vmem_stats before = test_stats(ctx);
        held.asked = 0;
        held.stop_at = at[i];
        ERR(vmem_commit(ctx, &held.all, 1, P, 0, &bytes), EINTR, "interrupted");
        const struct vmem_stats after = test_stats(ctx);
        CHECK_EQ(after.created, before.created);
        CHECK_EQ(after.mapped, P);
        CHECK_EQ(bytes, length - P); // untouched
        CHECK_EQ(page_at(ctx, held.backed), held.page);
        held.stop_at = held.asked = 0;
        OK(vmem_commit(ctx, &held.all, 1, P, 0, &bytes));
        CHECK_EQ(bytes, length - P);
    }
    CHECK_EQ(get_word(ctx, held.backed), 7);
    CHECK_EQ(get_word(ctx, held.backed + 8), 42 + held.asked - 1);
    CHECK_EQ(test_stats(ctx).mapped, length);
    // It is over: no mark is left, on its pages or on those that were there.
    held.all.length = 0;
    OK(vmem_commit(ctx, &(struct vmem_range){start, length}, 1, P, 0, &bytes));
    CHECK_EQ(bytes, 0);
    OK(vMemMapBatch(ctx, &(struct vmem_map_op){held.backed, held.own}, 1, VMEM_MAP_REPLACE, NULL));
    OK(vmem_set_interrupt(ctx, NULL, NULL));
    OK(vmem_decommit(ctx, &(struct vmem_range){start, length}, 1, &bytes));
    CHECK_EQ(bytes, length);
    OK(vMemFree(ctx, start));
    CHECK_EQ(test_stats(ctx).created, 0);
}

// A reservation given up during a commit goes when the commit is over, with all that it made.
static int gives_up(void *arg)
{
    OK(vmem_unreserve(arg, held.all.addr));
    OK(vmem_set_interrupt(arg, NULL, NULL));
    return 0;
}
static void memory_freed(vmem_context *ctx)
{
    const struct vmem_stats before = test_stats(ctx);
    held.all.length = 576 * MIB;
    OK(vMemReserve(ctx, held.all.length, 0, &held.all.addr));
    OK(vmem_set_interrupt(ctx, gives_up, ctx));
    OK(vmem_commit(ctx, &held.all, 1, test_page, 0, NULL));
    CHECK_EQ(test_stats(ctx).reserved, before.reserved);
    CHECK_EQ(test_stats(ctx).created, before.created);
    CHECK_EQ(test_stats(ctx).mapped, before.mapped);
}

// Ranges that overlap are refused where they would be backed twice, whatever their size.
static void overlapping(vmem_context *ctx)
{
    const uint64_t P = test_page, length = 320 * MIB;
    uint64_t start;
    OK(vMemReserve(ctx, length + 2 * P, 0, &start));
    for (uint64_t size = 2 * P; size <= length; size += length - 2 * P) {
        const struct vmem_range ranges[] = {{start, size}, {start + size - P, 2 * P}};
        ERR(vmem_commit(ctx, ranges, 2, P, 0, NULL), EINVAL, "ranges[1]: addr");
        CHECK_EQ(test_stats(ctx).created + test_stats(ctx).mapped, 0);
    }
    OK(vMemFree(ctx, start));
}

// A commit of many holes: more than are kept on the stack, in ranges that are backed here and there.
static void many_holes(vmem_context *ctx)
{
    enum { N = 300 };
    const uint64_t P = test_page;
    static struct vmem_range every_third[N], all[3];
    uint64_t bytes, start;
    OK(vMemReserve(ctx, 3 * N * P, 0, &start));
    for (uint64_t i = 0; i < N; i++)
        every_third[i] = (struct vmem_range){start + 3 * i * P, P};
    OK(vmem_commit(ctx, every_third, N, P, 0, &bytes));
    CHECK_EQ(bytes, N * P);
    for (uint64_t i = 0; i < N; i++)
        put_word(ctx, every_third[i].addr, i);
    for (uint64_t i = 0; i < 3; i++)
        all[i] = (struct vmem_range){start + i * N * P, N * P};
    OK(vmem_set_budget(ctx, 3 * N * P - P));
    ERR(vmem_commit(ctx, all, 3, P, 0, &bytes), ENOMEM, "budget");
    CHECK_EQ(test_stats(ctx).mapped, N * P);
    OK(vmem_set_budget(ctx, 3 * N * P)); // exactly what is needed
    OK(vmem_commit(ctx, all, 3, P, 0, &bytes));
    CHECK_EQ(bytes, 2 * N * P);
    OK(vmem_set_budget(ctx, 0));
    for (uint64_t i = 0; i < N; i++)
        CHECK_EQ(get_word(ctx, every_third[i].addr), i);
    for (uint64_t i = 0; i < 3 * N; i++)
        CHECK(page_at(ctx, start + i * P));
    OK(vmem_set_budget(ctx, P)); // nothing is missing, so nothing is short
    OK(vmem_commit(ctx, all, 3, P, 0, &bytes));
    CHECK_EQ(bytes, 0);
    OK(vmem_set_budget(ctx, 0));
    OK(vmem_decommit(ctx, all, 3, &bytes));
    CHECK_EQ(bytes, 3 * N * P);
    OK(vMemFree(ctx, start));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    errors(ctx);
    grows_and_shrinks(ctx);
    zeroed(ctx);
    page_sizes(ctx);
    many_holes(ctx);
    overlapping(ctx);
    if (test_cpu()) { // a part of such a commit is 1 GiB elsewhere, and no interrupt function is called
        beside_another(ctx);
        memory_freed(ctx);
    }
    vmem_context_destroy(ctx);
    fine();
    return 0;
}
