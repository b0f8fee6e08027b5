// Every fault point of every call, one after the other: a call that fails has changed nothing and can be repeated.
//
// The backend is wrapped (checked.c): its n-th fallible call, or the library's n-th allocation, fails.
//
// SPDX-License-Identifier: MIT
#include "checked.h"
#include "harness.h"

static vmem_context *ctx;
static bool whole_arenas;
static uint64_t addr, extra;
static vmem_page page[64], more[64];
static struct vmem_map_op ops[64];

// A batch of pages, half of them next to each other and half not.
static void spread(const vmem_page *p, int n, uint64_t at)
{
    for (int i = 0; i < n; i++)
        ops[i] = (struct vmem_map_op){at + (uint64_t)(i < n / 2 ? i : 2 * i) * test_page, p[i]};
}

static void nothing(void) {}
static void created(void) { OK(vMemCreate(ctx, test_page, 24, 0, page)); }
static void mapped(void)
{
    created();
    spread(page, 24, addr);
    OK(vMemMapBatch(ctx, ops, 24, 0, NULL));
    OK(vMemMap(ctx, addr + 60 * test_page, page[3])); // an alias
}
static void mapped_and_more(void)
{
    mapped();
    OK(vMemCreate(ctx, test_page, 24, 0, more));
    for (int i = 0; i < 24; i++)
        ops[i].page = more[(i * 5) % 24];
}
static void holes(void) // free memory in pieces
{
    OK(vmem_prealloc(ctx, 48 * test_page));
    OK(vMemCreate(ctx, test_page, 48, 0, more));
    for (int i = 0; i < 48; i += 2)
        OK(vMemRelease(ctx, more[i]));
}

static int do_reserve(void) { return vMemReserve(ctx, 64 * MIB, 0, &extra); }
static int do_create(void) { return vMemCreate(ctx, test_page, 24, 0, page); }
static int do_create_2m(void) { return vMemCreate(ctx, VMEM_PAGE_2M, 34, 0, page); }
static int do_create_zero(void) { return vMemCreate(ctx, test_page, 40, VMEM_CREATE_ZERO, page); }
static int do_prealloc(void) { return vmem_prealloc(ctx, 68 * MIB); }
static int do_map(void)
{
    spread(page, 24, addr);
    return vMemMapBatch(ctx, ops, 24, 0, NULL);
}
static int do_replace(void) { return vMemMapBatch(ctx, ops, 24, VMEM_MAP_REPLACE, NULL); }
static int do_unmap(void) { return vMemUnmap(ctx, addr, 64 * test_page); }
static struct vmem_range two[2];
static void committed(void)
{
    two[0] = (struct vmem_range){addr, 24 * test_page};
    two[1] = (struct vmem_range){addr + 32 * test_page, 2 * test_page};
    OK(vmem_commit(ctx, two, 2, test_page, 0, NULL));
    OK(vMemMap(ctx, addr + 60 * test_page, page_at(ctx, addr + 3 * test_page))); // an alias
}
static int do_commit(void)
{
    two[0] = (struct vmem_range){addr, 24 * test_page};
    two[1] = (struct vmem_range){addr + 32 * test_page, 24 * test_page};
    return vmem_commit(ctx, two, 2, test_page, 0, NULL);
}
// The memory is there, and so is that of the books: the mapping fails.
static void long_range(void)
{
    OK(vMemReserve(ctx, 320 * MIB, 0, &extra));
    OK(vmem_prealloc(ctx, 320 * MIB));
    OK(vmem_commit(ctx, &(struct vmem_range){extra, 320 * MIB}, 1, test_page, 0, NULL));
    OK(vmem_decommit(ctx, &(struct vmem_range){extra, 320 * MIB}, 1, NULL));
}
static int do_commit_long(void)
{
    return vmem_commit(ctx, &(struct vmem_range){extra, 320 * MIB}, 1, test_page, 0, NULL);
}
static int do_decommit(void) { return vmem_decommit(ctx, two, 2, NULL); }
static int do_unmap_committed(void) { return vMemUnmap(ctx, addr, 64 * test_page); }
static int do_release(void) { return vMemReleaseBatch(ctx, page, 24, NULL); }

static const struct {
    const char *name;
    void (*before)(void);
    int (*call)(void);
    int least; // fault points it must have
} calls[] = {
    {"reserve", nothing, do_reserve, 2},
    {"create", nothing, do_create, 2},
    {"create 2 MiB", nothing, do_create_2m, 3},
    {"create in holes", holes, do_create, 1},
    {"create zeroed", holes, do_create_zero, 1}, // in the end the zeroing itself
    {"prealloc", nothing, do_prealloc, 2},
    {"map", created, do_map, 2},
    {"replace", mapped_and_more, do_replace, 2},
    {"unmap", mapped, do_unmap, 1},
    {"release", mapped, do_release, 2},
    {"commit", nothing, do_commit, 4},
    {"long commit", long_range, do_commit_long, 3},
    {"decommit", committed, do_decommit, 1},
    {"unmap what was committed", committed, do_unmap_committed, 1},
};

// All that can be seen from outside.
struct view {
    struct vmem_stats stats;
    vmem_page at[64];
    uint64_t mappings[64];
};
static struct view look(void)
{
    struct view v = {.stats = test_stats(ctx)};
    v.stats.syscalls = v.stats.overhead = 0;
    for (int i = 0; i < 64; i++) {
        v.at[i] = page_at(ctx, addr + (uint64_t)i * test_page);
        struct vmem_page_info info = {.size = sizeof info};
        if (page[i] && !vmem_page_query(ctx, page[i], &info))
            v.mappings[i] = info.mappings;
    }
    return v;
}

static void start(void)
{
    memset(page, 0, sizeof page);
    OK(checked_context(test_backend, 0, whole_arenas, &ctx));
    OK(vMemReserve(ctx, 64 * test_page, 0, &addr));
}

static void sweep(size_t c)
{
    unsigned long n = 0;
    for (bool reached = true; reached;) {
        start();
        calls[c].before();
        vmem_page old[64];
        memcpy(old, page, sizeof old);
        const struct view before = look();
        const uint64_t overhead = test_stats(ctx).overhead;
        checked_fail(++n);
        int rc = calls[c].call();
        reached = checked_failed();
        checked_fail(0);
        if (reached && rc) {
            if (rc != -ENOMEM)
                FAIL("%s, fault %lu: returned %d", calls[c].name, n, rc);
            memcpy(page, old, sizeof old);
            const struct view after = look();
            if (memcmp(&before, &after, sizeof before))
                FAIL("%s, fault %lu: something changed", calls[c].name, n);
            if (calls[c].call != do_create_zero) // which returns its memory when the zeroing fails, holes with it
                CHECK(test_stats(ctx).overhead <= overhead + 64 * MIB);
            rc = calls[c].call(); // as if nothing had happened
        }
        if (rc)
            FAIL("%s, fault %lu: %s", calls[c].name, n, vmem_last_error());
        vmem_context_destroy(ctx); // the wrapper sees what is left behind
    }
    if (n <= (unsigned long)calls[c].least)
        FAIL("%s has %lu fault points", calls[c].name, n - 1);
}

// The element that the backend names is the caller's.
static void element_at_fault(void)
{
    size_t bad;
    start();
    created();
    OK(vmem_prealloc(ctx, test_page)); // whatever the map needs besides is there
    for (int i = 0; i < 24; i++)
        ops[i] = (struct vmem_map_op){addr + 2 * (uint64_t)i * test_page, page[i]};
    OK(vMemMapBatch(ctx, ops, 5, 0, NULL));
    OK(vMemUnmap(ctx, addr, 64 * test_page));
    checked_fail(1);
    ERR_AT(vMemMapBatch(ctx, ops, 5, 0, &bad), bad, 4, ENOMEM, "ops[4]: injected failure");
    checked_fail(0);
    OK(vMemMapBatch(ctx, ops, 24, 0, NULL));
    checked_fail(1);
    ERR_AT(vMemUnmapBatch(ctx,
                          (struct vmem_range[]){{addr, 4 * test_page},
                                                {addr + 4 * test_page, 8 * test_page},
                                                {addr + 30 * test_page, test_page}},
                          3, &bad),
           bad, 2, ENOMEM, "ops[2]: injected failure");
    checked_fail(1);
    ERR_AT(vMemReleaseBatch(ctx, page, 4, &bad), bad, 3, ENOMEM, "pages[3]: injected failure");
    checked_fail(0);
    vmem_context_destroy(ctx);
}

// Giving up does not fail, whatever else does: the nth call below, or every call (n == 0), a second try's too.
static void giving_up(void)
{
    for (unsigned long n = 0, reached = true; reached; n++) {
        uint64_t other;
        vmem_page own[3];
        start();
        committed();
        OK(vMemReserve(ctx, 8 * test_page, 0, &other));
        OK(vMemCreate(ctx, test_page, 3, 0, own));
        OK(vMemMap(ctx, addr + 40 * test_page, own[0]));
        OK(vMemMap(ctx, addr + 41 * test_page, own[0]));
        OK(vMemMap(ctx, addr + 42 * test_page, own[1]));
        OK(vMemMap(ctx, other, own[1]));
        OK(vMemMap(ctx, other + test_page, page_at(ctx, addr)));
        OK(vmem_fill(ctx, other, 0x33, 2 * test_page));
        checked_fail(n);
        checked_fail_always(!n);
        OK(vmem_unreserve(ctx, addr));
        reached = !n || checked_failed();
        checked_fail_always(false);
        checked_fail(0);
        CHECK_EQ(test_stats(ctx).reserved, 8 * test_page);
        CHECK_EQ(test_stats(ctx).created, 4 * test_page);
        CHECK_EQ(test_stats(ctx).mapped, 2 * test_page);
        for (uint64_t i = 0; i < 2 * test_page; i += 64 * KIB)
            CHECK_EQ(get_word(ctx, other + i), UINT64_C(0x3333333333333333));
        OK(vMemMap(ctx, other + 2 * test_page, own[0])); // no mark is left
        OK(vMemReleaseBatch(ctx, own, 3, NULL));
        OK(vMemUnmap(ctx, other, 8 * test_page));
        CHECK_EQ(test_stats(ctx).created, 0);
        vmem_context_destroy(ctx);
        if (n == 1)
            CHECK(reached);
    }
}

// A page that cannot be unmapped goes as soon as something else could be, or when the memory is asked back. Its address
// is free for another page.
static void dropping(bool trim)
{
    start();
    mapped();
    OK(vMemCreate(ctx, test_page, 1, 0, more));
    OK(vMemMap(ctx, addr + 50 * test_page, more[0]));
    for (unsigned long n = 1; n < 4; n++) {
        checked_fail(1);
        ERR(vMemReleaseBatch(ctx, page, 24, NULL), ENOMEM, "");
        checked_fail(1);
        ERR(vMemRelease(ctx, page[0]), ENOMEM, "injected failure");
        checked_fail_always(true);
        OK(vmem_drop(ctx, page, 24));
        test_stats(ctx); // does not even try
        checked_fail_always(false);
    }
    CHECK_EQ(test_stats(ctx).created, 25 * test_page);
    CHECK_EQ(page_at(ctx, addr), 0);
    checked_refuse_unmaps(true);
    OK(vMemCreate(ctx, test_page, 1, 0, more + 1));
    OK(vMemMap(ctx, addr, more[1])); // without VMEM_MAP_REPLACE
    OK(vmem_fill(ctx, addr, 7, test_page));
    ERR(vMemMap(ctx, addr, more[0]), EEXIST, "a page is mapped at");
    checked_refuse_unmaps(false);
    CHECK_EQ(page_at(ctx, addr), more[1]);
    if (trim)
        OK(vmem_trim(ctx, NULL));
    else
        OK(vMemUnmap(ctx, addr + 50 * test_page, test_page));
    CHECK_EQ(test_stats(ctx).created, 2 * test_page);
    CHECK_EQ(test_stats(ctx).mapped, trim ? 2 * test_page : test_page);
    CHECK_EQ(get_word(ctx, addr), UINT64_C(0x0707070707070707));
    OK(vMemRelease(ctx, more[1]));
    ERR(vMemRelease(ctx, page[0]), EINVAL, "is not a page");
    OK(vMemRelease(ctx, more[0]));
    vmem_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    for (int mode = 0; mode < (test_cpu() ? 2 : 1); mode++) {
        whole_arenas = mode;
        for (size_t c = 0; c < COUNT(calls); c++)
            sweep(c);
        element_at_fault();
        giving_up();
        dropping(false);
        dropping(true);
    }
    return 0;
}
