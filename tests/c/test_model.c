// Random calls against a model that knows every byte.
//
// test_model [BACKEND [SEED [STEPS]]]. The model holds what is reserved, which pages exist with which contents, and
// what is mapped where. After every step some of it is compared with the real memory, at the end all of it. The backend
// is wrapped (checked.c), so that the core's calls are checked too.
//
// SPDX-License-Identifier: MIT
#include "checked.h"
#include "trouble.h"

enum { MAX_RANGES = 6, MAX_PAGES = 96, RANGE_UNITS = 160, BLOCK_64K = 32 };

// Every 64 KiB of memory holds one byte value, but for its first word, which has a value of its own.
struct page {
    vmem_page handle; // 0: free entry
    uint32_t granules;
    uint64_t frame;
    uint8_t fill[32];
    uint64_t word[32];
};
struct range {
    uint64_t addr; // 0: free entry
    uint32_t granules, flags;
    struct {
        struct page *page;
        uint32_t granule;
    } entry[RANGE_UNITS];
};

static vmem_context *ctx;
static uint64_t seed;
static struct page pages[MAX_PAGES];
static struct range ranges[MAX_RANGES];
static uint64_t created, mapped, reserved;

static uint32_t below(uint64_t n) { return (uint32_t)(rnd(&seed) % n); }

static struct range *any_range(void)
{
    for (int i = 0; i < 8; i++) {
        struct range *r = &ranges[below(MAX_RANGES)];
        if (r->addr)
            return r;
    }
    return NULL;
}
static struct page *any_page(void)
{
    for (int i = 0; i < 8; i++) {
        struct page *p = &pages[below(MAX_PAGES)];
        if (p->handle)
            return p;
    }
    return NULL;
}
// The page that follows p in physical memory and has its size, if there is one.
static struct page *page_after(const struct page *p)
{
    for (int i = 0; p && i < MAX_PAGES; i++) {
        if (pages[i].handle && pages[i].granules == p->granules && pages[i].frame == p->frame + p->granules)
            return &pages[i];
    }
    return NULL;
}
static uint64_t at(const struct range *r, uint32_t granule) { return r->addr + granule * GRANULE; }

static uint64_t expected(const struct page *p, uint32_t granule, uint32_t word)
{
    return word ? p->fill[granule] * UINT64_C(0x0101010101010101) : p->word[granule];
}

static void check_granule(const struct range *r, uint32_t u)
{
    static uint64_t buf[GRANULE / 8];
    const struct page *p = r->entry[u].page;
    vmem_page handle;
    uint64_t offset;
    OK(vmem_query(ctx, at(r, u) + 5, &handle, &offset));
    CHECK_EQ(handle, p ? p->handle : 0);
    CHECK_EQ(offset, p ? r->entry[u].granule * GRANULE + 5 : 0);
    if (!p && !(r->flags & VMEM_RESERVE_BACKDROP)) {
        ERR(vmem_fill(ctx, at(r, u), 1, 8), EFAULT, "nothing is mapped");
        return;
    }
    if (!p)
        OK(vmem_backdrop(ctx, at(r, u), GRANULE));
    OK(vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)buf, at(r, u), GRANULE}, 1));
    for (uint32_t w = 0; w < GRANULE / 8; w++) {
        uint64_t want = p ? expected(p, r->entry[u].granule, w) : 0;
        if (buf[w] != want)
            FAIL("0x%" PRIx64 " + %u words: 0x%" PRIx64 ", not 0x%" PRIx64, at(r, u), w, buf[w], want);
    }
}

static void write_granule(const struct range *r, uint32_t u)
{
    struct page *p = r->entry[u].page;
    const uint32_t granule = r->entry[u].granule;
    if (below(2)) {
        p->fill[granule] = (uint8_t)rnd(&seed);
        OK(vmem_fill(ctx, at(r, u), p->fill[granule], GRANULE));
        p->word[granule] = expected(p, granule, 1);
    } else {
        p->word[granule] = rnd(&seed);
        put_word(ctx, at(r, u), p->word[granule]);
    }
}

static uint64_t mappings_of(const struct page *p)
{
    uint64_t n = 0;
    for (int i = 0; i < MAX_RANGES; i++) {
        for (uint32_t u = 0; ranges[i].addr && u < ranges[i].granules; u++)
            n += ranges[i].entry[u].page == p && ranges[i].entry[u].granule == 0;
    }
    return n;
}

static void forget(struct range *r, uint32_t u, uint32_t n)
{
    for (uint32_t i = u; i < u + n; i++) {
        mapped -= r->entry[i].page ? GRANULE : 0;
        r->entry[i].page = NULL;
    }
}

// ---- steps --------------------------------------------------------------------------------------------------

static void step_reserve(void)
{
    struct range *r = &ranges[below(MAX_RANGES)];
    if (r->addr)
        return;
    r->granules = 1 + below(RANGE_UNITS);
    // Often a little more or less than whole blocks: the last pages of a run then stick out of the end.
    if (below(2))
        r->granules = BLOCK_64K * (1 + below(4)) + (below(2) ? 1 + below(3) : -1 - below(3));
    r->flags = test_info.caps & VMEM_CAP_BACKDROP ? below(2) : 0;
    OK(vMemReserve(ctx, r->granules * GRANULE, r->flags, &r->addr));
    reserved += r->granules * GRANULE;
    memset(r->entry, 0, sizeof r->entry);
}

static void step_free(void)
{
    struct range *r = any_range();
    if (!r)
        return;
    bool used = false;
    for (uint32_t u = 0; u < r->granules; u++)
        used = used || r->entry[u].page;
    if (used) {
        ERR(vMemFree(ctx, r->addr), EBUSY, "still mapped");
        return;
    }
    OK(vMemFree(ctx, r->addr));
    reserved -= r->granules * GRANULE;
    r->addr = 0;
}

static void step_create(void)
{
    vmem_page handles[8];
    const uint32_t n = 1 + below(8), zero = below(2);
    uint64_t size;
    do
        size = GRANULE << below(6);
    while (!(size & test_info.page_sizes));
    struct page *free_page[8];
    uint32_t found = 0;
    for (int i = 0; i < MAX_PAGES && found < n; i++) {
        if (!pages[i].handle)
            free_page[found++] = &pages[i];
    }
    if (found < n)
        return;
    const struct page *near = below(2) ? any_page() : NULL;
    const uint32_t flags = zero ? VMEM_CREATE_ZERO : 0;
    OK(TROUBLE(vmem__create_near(ctx, size, n, near ? near->handle : 0, flags, handles)));
    // Contents of a page that was not zeroed are unknown until it is mapped somewhere: read them then.
    uint64_t scratch;
    OK(vMemReserve(ctx, VMEM_PAGE_2M, 0, &scratch));
    for (uint32_t i = 0; i < n; i++) {
        struct page *p = free_page[i];
        p->handle = handles[i];
        p->granules = (uint32_t)(size / GRANULE);
        struct vmem_page_info info = {.size = sizeof info};
        OK(vmem_page_query(ctx, p->handle, &info));
        p->frame = info.frame;
        OK(vMemMap(ctx, scratch, p->handle));
        if (zero)
            CHECK(all_words(ctx, scratch, size, 0));
        else
            OK(vmem_fill(ctx, scratch, 0, size));
        OK(vMemUnmap(ctx, scratch, VMEM_PAGE_2M));
        memset(p->fill, 0, sizeof p->fill);
        memset(p->word, 0, sizeof p->word);
        created += size;
    }
    OK(vMemFree(ctx, scratch));
}

static void step_release(void)
{
    vmem_page handles[6], dead[6];
    uint32_t n = 1 + below(6), got = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct page *p = any_page();
        if (!p)
            break;
        for (int k = 0; k < MAX_RANGES; k++) {
            for (uint32_t u = 0; ranges[k].addr && u < ranges[k].granules; u++) {
                if (ranges[k].entry[u].page == p)
                    forget(&ranges[k], u, 1);
            }
        }
        created -= p->granules * GRANULE;
        handles[got++] = p->handle;
        p->handle = 0;
    }
    OK(vMemReleaseBatch(ctx, handles, got, NULL));
    memcpy(dead, handles, sizeof dead);
    for (uint32_t i = 0; i < got; i++)
        ERR(vMemRelease(ctx, dead[i]), EINVAL, "not a page");
}

static void step_map(void)
{
    enum { MAX = 12 };
    struct vmem_map_op ops[MAX];
    struct {
        struct range *r;
        struct page *p;
        uint32_t u;
    } plan[MAX];
    struct range *r = any_range();
    uint32_t n = 1 + below(MAX), flags = below(4); // REPLACE and FINE in all combinations
    uint32_t next = r ? below(r->granules) : 0, at_fault = n;
    // Pages in a row, up to the end of the reservation and past it, as a batch for a tensor has them.
    const bool in_a_row = below(2);
    struct page *p = NULL;
    int err = 0;
    static bool taken[MAX_RANGES][RANGE_UNITS];
    memset(taken, 0, sizeof taken);
    for (uint32_t i = 0; i < n; i++) {
        if (!in_a_row || !(p = page_after(p)))
            p = any_page();
        if (below(in_a_row ? 24 : 6) == 0) {
            r = any_range();
            next = r ? below(r->granules) : 0;
        }
        if (!r || !p)
            return;
        uint32_t u = (next + p->granules - 1) / p->granules * p->granules;
        if (u >= r->granules)
            u = 0; // beyond the end another reservation may begin
        ops[i] = (struct vmem_map_op){at(r, u), p->handle};
        plan[i].r = r, plan[i].p = p, plan[i].u = u;
        next = u + p->granules;
        // The result that this element must have, if none before it fails.
        for (uint32_t k = u; k < u + p->granules && !err; k++) {
            if (u + p->granules > r->granules) {
                err = EINVAL;
            } else if (taken[r - ranges][k]) {
                err = EINVAL;
            } else if (r->entry[k].page) {
                uint32_t first = k - r->entry[k].granule, end = first + r->entry[k].page->granules;
                if (!(flags & VMEM_MAP_REPLACE))
                    err = EEXIST;
                else if (k - u < r->entry[k].granule || end > u + p->granules)
                    err = EINVAL;
            }
            if (err && at_fault == n)
                at_fault = i;
        }
        for (uint32_t k = u; !err && k < u + p->granules; k++)
            taken[r - ranges][k] = true;
    }
    size_t bad = ~(size_t)0;
    int rc = vMemMapBatch(ctx, ops, n, flags, &bad);
    if (err) {
        CHECK_EQ(rc, -err);
        CHECK_EQ(bad, at_fault);
        return;
    }
    OK(rc);
    for (uint32_t i = 0; i < n; i++) {
        forget(plan[i].r, plan[i].u, plan[i].p->granules);
        for (uint32_t k = 0; k < plan[i].p->granules; k++) {
            plan[i].r->entry[plan[i].u + k].page = plan[i].p;
            plan[i].r->entry[plan[i].u + k].granule = k;
        }
        mapped += plan[i].p->granules * GRANULE;
    }
}

static void step_unmap(void)
{
    struct range *r = any_range();
    if (!r)
        return;
    const uint32_t u = below(r->granules), n = 1 + below(r->granules - u);
    const bool cut = (r->entry[u].page && r->entry[u].granule) ||
                     (u + n < r->granules && r->entry[u + n].page && r->entry[u + n].granule);
    if (cut) {
        ERR(vMemUnmap(ctx, at(r, u), n * GRANULE), EINVAL, "cuts the page");
        return;
    }
    OK(vMemUnmap(ctx, at(r, u), n * GRANULE));
    forget(r, u, n);
}

static void step_write(void)
{
    struct range *r = any_range();
    if (!r)
        return;
    const uint32_t u = below(r->granules);
    if (r->entry[u].page)
        write_granule(r, u);
}

static void step_memory(void)
{
    switch (below(4)) {
    case 0: OK(vmem_trim(ctx, NULL)); break;
    case 1: OK(vmem_prealloc(ctx, below(64) * VMEM_PAGE_64K)); break;
    }
}

static void check_all(void)
{
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.created, created);
    CHECK_EQ(s.mapped, mapped);
    CHECK_EQ(s.reserved, reserved);
    for (int i = 0; i < MAX_RANGES; i++) {
        for (uint32_t u = 0; ranges[i].addr && u < ranges[i].granules; u++)
            check_granule(&ranges[i], u);
    }
    for (int i = 0; i < MAX_PAGES; i++) {
        struct vmem_page_info info = {.size = sizeof info};
        if (!pages[i].handle)
            continue;
        OK(vmem_page_query(ctx, pages[i].handle, &info));
        CHECK_EQ(info.page_size, pages[i].granules * GRANULE);
        CHECK_EQ(info.mappings, mappings_of(&pages[i]));
    }
}

static void play(long steps, bool whole_arenas)
{
    void (*const kinds[])(void) = {
        step_reserve, step_reserve, step_free,  step_create, step_create, step_release, step_map,    step_map,
        step_map,     step_map,     step_unmap, step_unmap,  step_write,  step_write,   step_memory, step_write,
    };
    OK(checked_context(test_backend, 0, whole_arenas, &ctx));
    trouble_start(seed);
    for (long i = 0; i < steps; i++) {
        kinds[below(COUNT(kinds))]();
        struct range *r = any_range();
        if (r)
            check_granule(r, below(r->granules));
        if (i % 500 == 499)
            check_all();
    }
    trouble_end();
    check_all();
    for (int i = 0; i < MAX_PAGES; i++) {
        if (pages[i].handle)
            OK(vMemRelease(ctx, pages[i].handle));
    }
    for (int i = 0; i < MAX_RANGES; i++) {
        if (ranges[i].addr)
            OK(vMemFree(ctx, ranges[i].addr));
    }
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.created + s.mapped + s.reserved, 0);
    OK(vmem_trim(ctx, NULL));
    CHECK(!ctx->arenas);
    vmem_context_destroy(ctx);
    memset(pages, 0, sizeof pages);
    memset(ranges, 0, sizeof ranges);
    created = mapped = reserved = 0;
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 20250401;
    const long steps = argc > 3 ? strtol(argv[3], NULL, 0) : 3000;
    play(steps, false);
    if (test_cpu())
        play(steps, true);
    printf("%" PRIu64 " calls were made again\n", trouble_calls);
    return 0;
}
