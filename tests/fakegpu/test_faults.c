// Random pages, maps, replacements, unmaps and releases on the GPU's backends over the fake driver, half of them with a
// driver call failing somewhere inside, or several in a row. A shadow knows what every 64 KiB must hold. A call that
// fails changes nothing, what its undo could not restore is absent until the driver maps again, and nobody else's pages
// move when page-table entries change their size. $SEED and $STEPS vary it.
//
// SPDX-License-Identifier: MIT
#define FAKEGPU_USER
#include "fakegpu.h"

#include "../c/harness.h"
#include "core/core.h"
#include "core/memory.h"

#define SPACE (320 * MIB) // five segments of the stock backend
#define ENTRIES (SPACE / GRANULE)
#define MAX_PAGES 3000

struct page {
    vmem_page handle;
    uint32_t granules;
    uint32_t stamp;
    uint32_t mapped_at[4]; // entry + 1, 0: unused
};

static vmem_context *ctx;
static uint64_t space;
static bool readable; // unbacked addresses are
static struct page pages[MAX_PAGES];
static struct page *shadow[ENTRIES];     // whose page is mapped there
static uint16_t shadow_granule[ENTRIES]; // and which granule of it
static uint32_t next_stamp = 1;
static uint64_t seed;
static unsigned failed, succeeded, steps;

static uint32_t pick(uint32_t n) { return (uint32_t)(rnd(&seed) % n); }

static void stamp(const struct page *p, uint64_t addr)
{
    for (uint32_t u = 0; u < p->granules; u++)
        *(volatile uint64_t *)(addr + u * GRANULE + GRANULE - 8) = (uint64_t)p->stamp << 32 | u | 0x80000000u;
}

static void check_entry(uint32_t entry)
{
    if (!shadow[entry] && !readable)
        return;
    uint64_t want = shadow[entry] ? (uint64_t)shadow[entry]->stamp << 32 | shadow_granule[entry] | 0x80000000u : 0;

    CHECK_EQ(*(volatile uint64_t *)(space + entry * GRANULE + GRANULE - 8), want);
    CHECK_EQ(*(volatile uint64_t *)(space + entry * GRANULE), 0); // never what was left in device memory
}

static void check_all(void)
{
    for (uint32_t i = 0; i < ENTRIES; i++)
        check_entry(i);
}

// Lets a driver call fail in the next call, mostly an early one, or some in a row, or none.
static void maybe_fail(uint32_t among)
{
    fakegpu_fail(0);
    if (pick(2))
        fakegpu_trouble(rnd(&seed), among);
}

// Ends that, and tells whether the call succeeded. What is absent is named; then it is there again.
static bool worked(int rc)
{
    char text[512];
    vmem_page page;

    snprintf(text, sizeof text, "%s", vmem_last_error());
    for (uint32_t i = 0; rc && i < 20; i++) {
        const uint32_t entry = pick(ENTRIES);

        if (!vmem_query(ctx, space + entry * GRANULE, &page, NULL))
            check_entry(entry);
        else
            CHECK(strstr(vmem_last_error(), "is absent") && test_stats(ctx).absent);
        if (!shadow[entry] || shadow[entry]->handle) // demotion() has no single page
            CHECK_EQ(page, shadow[entry] ? shadow[entry]->handle : 0);
    }
    fakegpu_fail(0);
    if (rc)
        OK(vmem_query(ctx, space, &page, NULL));
    CHECK_EQ(test_stats(ctx).absent, 0);
    if (rc && rc != -ENOMEM)
        FAIL("%d: %s", rc, text);
    rc ? failed++ : succeeded++;
    return rc == 0;
}

static struct page *free_page(void)
{
    for (uint32_t i = 0; i < MAX_PAGES; i++)
        if (!pages[i].handle)
            return &pages[i];
    return NULL;
}

static void forget_mapping(struct page *p, uint32_t entry)
{
    for (int k = 0; k < 4; k++)
        if (p->mapped_at[k] == entry + 1)
            p->mapped_at[k] = 0;
    for (uint32_t u = 0; u < p->granules; u++)
        shadow[entry + u] = NULL;
}

static bool add_mapping(struct page *p, uint32_t entry)
{
    for (int k = 0; k < 4; k++)
        if (!p->mapped_at[k]) {
            p->mapped_at[k] = entry + 1;
            for (uint32_t u = 0; u < p->granules; u++) {
                shadow[entry + u] = p;
                shadow_granule[entry + u] = (uint16_t)u;
            }
            return true;
        }
    return false;
}

static uint64_t some_size(void)
{
    uint64_t size = GRANULE << (pick(3) ? pick(3) : 5);

    return size & test_info.page_sizes ? size : test_page;
}

// Creates some pages and maps them in a row or apart; what fails leaves nothing behind.
static void create_and_map(void)
{
    const uint64_t size = some_size();
    const uint32_t granules = (uint32_t)(size / GRANULE), n = 1 + pick(pick(3) ? 8 : 4 * 32 * 10 / granules);
    struct vmem_map_op ops[2048];
    vmem_page handles[2048];
    struct page *made[2048];
    uint32_t at = pick(ENTRIES / granules), step = pick(3) ? 1 : 2, count = 0;
    uint32_t flags = (pick(3) ? 0 : VMEM_MAP_FINE) | (pick(3) ? 0 : VMEM_MAP_REPLACE);
    uint64_t created = test_stats(ctx).created;

    if (pick(2)) { // whole blocks, which large entries can map
        at -= at % (32 / granules);
        step = 1;
    }
    maybe_fail(6);
    if (!worked(vMemCreate(ctx, size, n, pick(2) ? VMEM_CREATE_ZERO : 0, handles))) {
        CHECK_EQ(test_stats(ctx).created, created);
        return;
    }
    for (; count < n && (made[count] = free_page()); count++)
        *made[count] = (struct page){.handle = handles[count], .granules = granules, .stamp = next_stamp++};
    for (uint32_t i = count; i < n; i++)
        OK(vMemRelease(ctx, handles[i]));
    // Where they fit: free entries, or with REPLACE entries whose pages do not stick out.
    uint32_t ready = 0;
    for (uint32_t i = 0; i < count; i++, at += step) {
        uint32_t entry = at * granules % ENTRIES;
        bool fits = true;

        for (uint32_t u = 0; u < granules && fits; u++) {
            struct page *old = shadow[entry + u];
            fits = !old || ((flags & VMEM_MAP_REPLACE) && shadow_granule[entry + u] <= u &&
                            u - shadow_granule[entry + u] + old->granules <= granules);
        }
        if (fits)
            ops[ready++] = (struct vmem_map_op){space + entry * GRANULE, made[i]->handle};
    }
    for (uint32_t i = 1; i < ready; i++)
        if (ops[i].addr <= ops[i - 1].addr)
            ready = i; // came round
    maybe_fail(12);
    if (ready && worked(vMemMapBatch(ctx, ops, ready, flags, NULL)))
        for (uint32_t i = 0, k = 0; i < ready; i++, k++) {
            while (made[k]->handle != ops[i].page)
                k++;
            uint32_t entry = (uint32_t)((ops[i].addr - space) / GRANULE);
            for (uint32_t u = 0; u < granules; u++)
                if (shadow[entry + u])
                    forget_mapping(shadow[entry + u], entry + u - shadow_granule[entry + u]);
            add_mapping(made[k], entry);
            stamp(made[k], ops[i].addr);
        }
}

static struct page *some_page(bool mapped)
{
    for (int tries = 0; tries < 200; tries++) {
        struct page *p = &pages[pick(MAX_PAGES)];
        bool is = p->mapped_at[0] || p->mapped_at[1] || p->mapped_at[2] || p->mapped_at[3];
        if (p->handle && is == mapped)
            return p;
    }
    return NULL;
}

static void alias(void)
{
    struct page *p = some_page(true);
    uint32_t entry = p ? pick(ENTRIES / p->granules) * p->granules : 0;

    if (!p || (p->mapped_at[0] && p->mapped_at[1] && p->mapped_at[2] && p->mapped_at[3]))
        return;
    for (uint32_t u = 0; u < p->granules; u++)
        if (shadow[entry + u])
            return;
    maybe_fail(5);
    if (worked(vMemMap(ctx, space + entry * GRANULE, p->handle)))
        add_mapping(p, entry);
}

// Unmaps from one mapped page to another, whatever lies between.
static void unmap(void)
{
    struct page *p = some_page(true);
    uint32_t entry = 0, end;

    for (int k = 0; p && k < 4; k++)
        if (p->mapped_at[k])
            entry = p->mapped_at[k] - 1;
    if (!p)
        return;
    end = entry + p->granules;
    for (uint32_t more = pick(3) ? pick(40) : pick(ENTRIES / 4); more && end < ENTRIES; more--)
        end += shadow[end] ? shadow[end]->granules : 1;
    maybe_fail(12);
    if (worked(vMemUnmap(ctx, space + entry * GRANULE, (end - entry) * GRANULE)))
        for (uint32_t i = entry; i < end; i++)
            if (shadow[i])
                forget_mapping(shadow[i], i);
}

static void release(void)
{
    vmem_page handles[64];
    struct page *gone[64];
    uint32_t n = 0;

    for (uint32_t want = 1 + pick(64); n < want;) {
        struct page *p = some_page(pick(4) != 0);
        if (!p)
            break;
        for (uint32_t i = 0; p && i < n; i++)
            if (gone[i] == p)
                p = NULL;
        if (!p)
            break;
        gone[n] = p;
        handles[n++] = p->handle;
    }
    maybe_fail(30);
    if (n && worked(vMemReleaseBatch(ctx, handles, n, NULL)))
        for (uint32_t i = 0; i < n; i++) {
            for (int k = 0; k < 4; k++)
                if (gone[i]->mapped_at[k])
                    forget_mapping(gone[i], gone[i]->mapped_at[k] - 1);
            *gone[i] = (struct page){0};
        }
}

// Unmapping a page out of a 2 MiB entry takes several driver calls. Whichever fails, the entry's other pages are there.
static void demotion(void)
{
    struct vmem_map_op ops[32];
    vmem_page handles[32];
    struct page p = {.granules = 32, .stamp = next_stamp++};

    if (test_page == VMEM_PAGE_2M)
        return;
    OK(vMemCreate(ctx, GRANULE, 32, 0, handles));
    for (uint32_t i = 0; i < 32; i++)
        ops[i] = (struct vmem_map_op){space + i * GRANULE, handles[i]};
    for (long n = 1;; n++) {
        OK(vMemMapBatch(ctx, ops, 32, 0, NULL));
        stamp(&p, space);
        add_mapping(&p, 0);
        fakegpu_fail(n);
        bool done = worked(vMemUnmap(ctx, space + 5 * GRANULE, GRANULE));
        if (done)
            shadow[5] = NULL;
        check_all();
        OK(vMemUnmap(ctx, space, 2 * MIB));
        forget_mapping(&p, 0);
        if (done)
            break;
    }
    // stock: the block emptied, the pages before and after brought back, the page emptied. uvm: one call for all.
    CHECK_EQ(failed, strcmp(test_backend, "uvm") == 0 ? 1 : 4);
    OK(vMemReleaseBatch(ctx, handles, 32, NULL));
}

// small: device memory comes and goes 2 MiB at a time.
static void model(bool backdrop, bool small)
{
    ctx = test_context(2 * GIB);
    if (small)
        vmem__limit_arenas(ctx, VMEM_PAGE_2M, true);
    readable = backdrop;
    failed = succeeded = 0;
    memset(pages, 0, sizeof pages);
    memset(shadow, 0, sizeof shadow);
    OK(vMemReserve(ctx, SPACE, backdrop ? VMEM_RESERVE_BACKDROP : 0, &space));
    if (backdrop)
        OK(vmem_backdrop(ctx, space, SPACE));
    demotion();
    for (unsigned i = 0; i < steps; i++) {
        uint32_t what = pick(10);
        if (what < 4)
            create_and_map();
        else if (what < 5)
            alias();
        else if (what < 8)
            unmap();
        else
            release();
        if (i % 4 == 0)
            check_all();
        if (small && i % 16 == 0) {
            maybe_fail(10);
            worked(vmem_trim(ctx, NULL));
        }
    }
    fakegpu_fail(0);
    check_all();
    printf("%u calls failed, %u succeeded\n", failed, succeeded);
    CHECK(failed > steps / 40 && succeeded > steps / 4);
    vmem_context_destroy(ctx);
}

// Few pages are zeroed without a kernel, which would disturb those of an engine, and beside an engine, many are, too.
// Without pinned memory, it takes kernels.
static void zeroing(uint64_t length, bool engine, bool pinned, bool kernels)
{
    struct vmem_range all = {.length = length};
    fakegpu_no_pinned(!pinned);
    ctx = test_context(0);
    if (engine)
        vmem__limit_arenas(ctx, BLOCK, true);
    OK(vMemReserve(ctx, length, 0, &all.addr));
    const long before = fakegpu_fills();
    for (int again = 0; again < 2; again++) {
        OK(vmem_commit(ctx, &all, 1, VMEM_PAGE_2M, VMEM_CREATE_ZERO, NULL));
        for (uint64_t at = all.addr; at < all.addr + length; at += 8)
            CHECK_EQ(*(volatile uint64_t *)at, 0);
        memset((void *)all.addr, 0xff, length);
        OK(vmem_fill(ctx, all.addr, 0, length));
        for (uint64_t at = all.addr; at < all.addr + length; at += 8)
            CHECK_EQ(*(volatile uint64_t *)at, 0);
        memset((void *)all.addr, 0xff, length);
        OK(vmem_decommit(ctx, &all, 1, NULL));
    }
    CHECK_EQ(fakegpu_fills() > before, kernels);
    OK(vMemFree(ctx, all.addr));
    vmem_context_destroy(ctx);
    fakegpu_no_pinned(0);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (!fakegpu_fail)
        SKIP("the fake driver is not preloaded");
    seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 0) : 1;
    steps = getenv("STEPS") ? (unsigned)atoi(getenv("STEPS")) : 1500;
    uint64_t used = fakegpu_used();
    for (int backdrop = 0; backdrop < 2; backdrop++)
        model(backdrop, false);
    model(true, true);
    zeroing(6 * MIB, false, true, false);
    zeroing(32 * MIB, true, true, false);
    zeroing(32 * MIB, false, true, true);
    zeroing(6 * MIB, true, false, true);
    CHECK_EQ(fakegpu_used(), used);
    // A signal loses nothing.
    fakegpu_interrupt(2);
    ctx = test_context(0);
    // Instances of one MIG GPU are told apart: by their own UUID, not by the GPU's.
    struct vmem_info info = {.size = sizeof info};
    OK(vmem_context_info(ctx, &info));
    CHECK(!memcmp(info.device_uuid, "fake-gpu-number-", sizeof(info.device_uuid)));
    fakegpu_interrupt(2);
    vmem_page page;
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));
    OK(vMemRelease(ctx, page));
    uint64_t idle = fakegpu_used();
    fakegpu_interrupt(2);
    OK(vmem_trim(ctx, NULL));
    CHECK(fakegpu_used() < idle || strcmp(test_backend, "stock"));
    fakegpu_interrupt(0);
    vmem_context_destroy(ctx);
    CHECK_EQ(fakegpu_used(), used);
    // Nor does a driver that is suspended for a while, in any call.
    fakegpu_suspend(5);
    ctx = test_context(0);
    uint64_t range;
    OK(vMemReserve(ctx, VMEM_PAGE_2M, 0, &range));
    fakegpu_suspend(2);
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));
    fakegpu_suspend(2);
    OK(vMemMap(ctx, range, page));
    fakegpu_suspend(2);
    OK(vMemUnmap(ctx, range, VMEM_PAGE_2M));
    fakegpu_suspend(2);
    OK(vMemRelease(ctx, page));
    OK(vMemFree(ctx, range));
    fakegpu_suspend(0);
    vmem_context_destroy(ctx);
    CHECK_EQ(fakegpu_used(), used);
    // Memory that the driver does not take back stays in the accounts, and goes with the context.
    ctx = test_context(0);
    const uint64_t own = test_stats(ctx).overhead;
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));
    OK(vMemRelease(ctx, page));
    idle = fakegpu_used();
    fakegpu_keep(1);
    OK(vmem_trim(ctx, NULL));
    fakegpu_keep(0);
    CHECK(test_stats(ctx).overhead > own || fakegpu_used() < idle || strcmp(test_backend, "stock"));
    vmem_context_destroy(ctx);
    CHECK_EQ(fakegpu_used(), used);
    // Opening, with each driver call in it failing in turn, leaves nothing behind either.
    for (long n = 1;; n++) {
        long calls = fakegpu_calls();
        struct vmem_options opts = {.size = sizeof opts, .backend = test_backend};
        fakegpu_fail(n);
        int rc = vmem_context_create(&opts, &ctx);
        fakegpu_fail(0);
        if (!rc) {
            vmem_context_destroy(ctx);
            CHECK_EQ(fakegpu_used(), used);
            CHECK(fakegpu_calls() - calls < n + 20);
            break;
        }
        if (rc != -ENOMEM)
            FAIL("call %ld failed: %s", n, vmem_last_error());
        CHECK_EQ(fakegpu_used(), used);
        CHECK(n < 100);
    }
    return 0;
}
