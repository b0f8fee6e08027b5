// A long random sequence of calls against a shadow. After each one the page tables of what it touched are walked, and
// the words that stand for the data are read through the TLB.
//
// OPS sets the length, SEED the sequence.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

enum { BLOCKS = 24, GRANULES = BLOCKS * 32, MAX_PAGES = 96, BATCH = 24 };

struct page {
    uint64_t handle, size; // 0: no page
    uint64_t phys;         // once it was seen in a table
    uint64_t content[32];  // the word at the start of each granule
};

enum { CLOSED, SPARSE, MAPPED };
struct spot {
    uint8_t state;
    uint8_t page; // index, when mapped
    uint8_t part; // granule of the page
};

struct model {
    struct page pages[MAX_PAGES];
    struct spot spots[GRANULES];
};

static struct uvm u;
static struct model now, next; // next: what a batch would make of it
static uint64_t rng, serial, ops_done;
static uint64_t stale[64], stales; // released handles

static uint64_t va_of(unsigned g) { return BASE + (uint64_t)g * GRANULE; }

static void bad(const char *what, unsigned g)
{
    struct simgpu_pte p = sim_pte(&u, va_of(g));

    FAIL("after %llu operations (SEED %ld): %s at granule %u: shadow state %u page %u part %u; "
         "table state %u phys 0x%llx size 0x%x",
         (unsigned long long)ops_done, env_long("SEED", 1), what, g, now.spots[g].state, now.spots[g].page,
         now.spots[g].part, p.state, (unsigned long long)p.phys, p.page_size);
}

// The tables of granules [from, to) against the shadow.
static void check_tables(unsigned from, unsigned to)
{
    static struct simgpu_pte ptes[GRANULES];

    sim_walk(&u, 0, va_of(from), GRANULE, ptes, to - from);
    for (unsigned g = from; g < to; g++) {
        struct simgpu_pte *p = &ptes[g - from];
        struct spot *s = &now.spots[g];

        switch (s->state) {
        case CLOSED:
            if (p->state != SIMGPU_PTE_INVALID)
                bad("an entry that should be invalid", g);
            break;
        case SPARSE:
            if (p->state != SIMGPU_PTE_SPARSE)
                bad("an entry that should be sparse", g);
            break;
        case MAPPED: {
            struct page *page = &now.pages[s->page];
            uint64_t phys = p->phys - (uint64_t)s->part * GRANULE;
            if (p->page_size == MB(2)) // the walk reports the 2 MiB entry, or the address in it
                phys = p->phys & ~(MB(2) - 1);
            if (p->state != SIMGPU_PTE_VALID || p->aperture || p->read_only)
                bad("an entry that should map a page", g);
            if (page->phys == ~0ull)
                page->phys = phys;
            if (phys != page->phys)
                bad("the wrong page", g);
            break;
        }
        }
    }
}

// The first word of some granules through the TLB.
static void check_words(unsigned from, unsigned to)
{
    for (unsigned g = from; g < to; g++) {
        struct spot *s = &now.spots[g];
        uint64_t got = 0x55;
        int rc = gpu_access(&u, 0, false, va_of(g), &got, 8);

        if (s->state == CLOSED) {
            if (!rc)
                bad("an access that should fault does not", g);
        } else if (rc) {
            bad("an access faults", g);
        } else if (got != (s->state == MAPPED ? now.pages[s->page].content[s->part] : 0)) {
            bad("wrong data", g);
        }
    }
}

// An overlay opens in the hole around the address, as far as the block goes.
static void open_overlay(struct model *m, unsigned g)
{
    unsigned first = g, last = g;

    if (m->spots[g].state != CLOSED)
        return;
    while (first % 32 && m->spots[first - 1].state == CLOSED)
        first--;
    while (last % 32 != 31 && m->spots[last + 1].state == CLOSED)
        last++;
    for (unsigned i = first; i <= last; i++)
        m->spots[i].state = SPARSE;
}

static int pick_page(void)
{
    for (int tries = 0; tries < 8; tries++) {
        int i = rng_below(&rng, MAX_PAGES);
        if (now.pages[i].handle)
            return i;
    }
    return -1;
}

static void do_create(void)
{
    static const uint64_t sizes[] = {KB(64), KB(64), KB(64), KB(128), KB(256), MB(2)};
    uint64_t size = sizes[rng_below(&rng, COUNT(sizes))], first;
    unsigned want = 1 + rng_below(&rng, size == MB(2) ? 2 : 6), free_at[8], n = 0;
    NV_STATUS status;

    for (unsigned i = 0; i < MAX_PAGES && n < want; i++)
        if (!now.pages[i].handle)
            free_at[n++] = i;
    if (!n)
        return;
    status = vm_create(&u, size, n, &first);
    if (status == NV_ERR_NO_MEMORY)
        return;
    CHECK_EQ(status, NV_OK);
    for (unsigned i = 0; i < n; i++) {
        now.pages[free_at[i]] = (struct page){.handle = first + i, .size = size, .phys = ~0ull};
    }
}

static void do_release(void)
{
    uint64_t handles[8];
    unsigned n = 1 + rng_below(&rng, 4), got = 0;
    struct uvm_vmem_release r;
    bool wrong = rng_below(&rng, 8) == 0 && stales;
    NV_STATUS status;
    int which[8];

    for (unsigned i = 0; i < n; i++) {
        int p = pick_page();
        bool twice = p < 0;
        for (unsigned k = 0; k < got; k++)
            twice |= which[k] == p;
        if (!twice) {
            which[got] = p;
            handles[got++] = now.pages[p].handle;
        }
    }
    if (!got)
        return;
    if (wrong)
        handles[got] = stale[rng_below(&rng, stales < 64 ? stales : 64)];
    status = vm_release(&u, handles, got + wrong, &r);
    if (wrong) {
        CHECK_EQ(status, NV_ERR_INVALID_OBJECT_HANDLE);
        CHECK_EQ(r.out_failed, got);
        check_tables(0, GRANULES);
        return;
    }
    CHECK_EQ(status, NV_OK);
    for (unsigned i = 0; i < got; i++) {
        for (unsigned g = 0; g < GRANULES; g++)
            if (now.spots[g].state == MAPPED && now.spots[g].page == which[i])
                now.spots[g] = (struct spot){.state = SPARSE};
        stale[stales++ % 64] = handles[i];
        now.pages[which[i]].handle = 0;
    }
    check_tables(0, GRANULES);
}

// A batch of MAP elements, mostly good; the model says what must become of it.
static void do_map(void)
{
    struct uvm_vmem_op ops[BATCH];
    struct uvm_vmem_batch b;
    unsigned n = 1 + rng_below(&rng, BATCH), lo = GRANULES, hi = 0;
    int fails = -1;
    NV_STATUS want = NV_OK, status;

    next = now;
    for (unsigned i = 0; i < n; i++) {
        int p = pick_page();
        unsigned parts, part, g;
        uint32_t flags = rng_below(&rng, 3) ? UVM_VMEM_MAP_REPLACE : 0;

        if (p < 0)
            return;
        parts = now.pages[p].size / GRANULE;
        part = rng_below(&rng, 2) ? 0 : rng_below(&rng, parts);
        parts -= part;
        if (rng_below(&rng, 2))
            parts = 1 + rng_below(&rng, parts);
        g = rng_below(&rng, GRANULES);
        if (parts == 32 && rng_below(&rng, 2))
            g &= ~31u;
        if (g + parts > GRANULES)
            g = GRANULES - parts;
        if (!rng_below(&rng, 4))
            flags |= UVM_VMEM_MAP_64K;
        ops[i] = vm_op(va_of(g), parts * GRANULE, now.pages[p].handle, part * GRANULE, flags);
        if (fails < 0 && rng_below(&rng, 200) == 0) { // spoil it
            switch (rng_below(&rng, 4)) {
            case 0:
                ops[i].handle += 1ull << 40;
                want = NV_ERR_INVALID_OBJECT_HANDLE;
                break;
            case 1:
                ops[i].offset += now.pages[p].size;
                want = NV_ERR_INVALID_OFFSET;
                break;
            case 2:
                ops[i].va += 4096;
                want = NV_ERR_INVALID_ADDRESS;
                break;
            case 3:
                ops[i].flags |= 0x4000;
                want = NV_ERR_INVALID_ARGUMENT;
                break;
            }
            fails = i;
            continue;
        }
        for (unsigned k = 0; k < parts; k++) {
            struct spot *s = &next.spots[g + k];
            if (s->state == MAPPED && !(flags & UVM_VMEM_MAP_REPLACE) && fails < 0) {
                fails = i;
                want = NV_ERR_UVM_ADDRESS_IN_USE;
            }
            open_overlay(&next, g + k);
            *s = (struct spot){.state = MAPPED, .page = p, .part = part + k};
        }
        if (g < lo)
            lo = g;
        if (g + parts > hi)
            hi = g + parts;
    }
    status = vm_map_ops(&u, 0, ops, n, &b);
    if (status == NV_ERR_NO_MEMORY) {
        fails = 0;
    } else if (fails >= 0) {
        CHECK_MSG(status != NV_OK, "after %llu operations: element %d should have failed with 0x%x",
                  (unsigned long long)ops_done, fails, want);
        // checks of one kind may run over all elements before the next kind: only one element is bad of its own,
        // but an address in use may be found later or earlier than that one
        CHECK(status == want || status == NV_ERR_UVM_ADDRESS_IN_USE || want == NV_ERR_UVM_ADDRESS_IN_USE);
    } else {
        CHECK_MSG(status == NV_OK, "after %llu operations: map failed with 0x%x at element %u",
                  (unsigned long long)ops_done, status, b.out_failed);
    }
    if (fails < 0) {
        now = next;
    } else {
        // overlays opened for it may stay
        struct simgpu_pte p;
        for (unsigned g = 0; g < GRANULES; g++) {
            if (now.spots[g].state != CLOSED)
                continue;
            p = sim_pte(&u, va_of(g));
            if (p.state == SIMGPU_PTE_SPARSE)
                open_overlay(&now, g);
        }
    }
    if (lo < hi) {
        lo &= ~31u;
        hi = (hi + 31) & ~31u;
        check_tables(lo, hi);
        lo += rng_below(&rng, hi - lo);
        check_words(lo, lo + 8 < hi ? lo + 8 : hi);
    }
}

static void do_unmap(void)
{
    struct uvm_vmem_op ops[BATCH];
    struct uvm_vmem_batch b;
    unsigned n = 1 + rng_below(&rng, BATCH / 2), lo = GRANULES, hi = 0;
    NV_STATUS status;

    next = now;
    for (unsigned i = 0; i < n; i++) {
        unsigned g = rng_below(&rng, GRANULES), parts = 1 + rng_below(&rng, rng_below(&rng, 4) ? 8 : 80);

        if (g + parts > GRANULES)
            g = GRANULES - parts;
        ops[i] = vm_op(va_of(g), parts * GRANULE, 0, 0, 0);
        for (unsigned k = g; k < g + parts; k++) {
            if (next.spots[k].state != CLOSED)
                next.spots[k] = (struct spot){.state = SPARSE};
        }
        if (g < lo)
            lo = g;
        if (g + parts > hi)
            hi = g + parts;
    }
    status = vm_unmap_ops(&u, 0, ops, n, &b);
    if (status == NV_ERR_NO_MEMORY)
        return;
    CHECK_MSG(status == NV_OK, "after %llu operations: unmap failed with 0x%x at element %u",
              (unsigned long long)ops_done, status, b.out_failed);
    now = next;
    lo &= ~31u;
    hi = (hi + 31) & ~31u;
    check_tables(lo, hi);
    lo += rng_below(&rng, hi - lo);
    check_words(lo, lo + 8 < hi ? lo + 8 : hi);
}

// UVM's own calls close overlays whole, and never cut one.
static void do_unmap_external(void)
{
    unsigned g = rng_below(&rng, BLOCKS) * 32, parts = 32;
    bool open = false;
    NV_STATUS status;

    if (rng_below(&rng, 2)) {
        g += rng_below(&rng, 32);
        parts = 1 + rng_below(&rng, 32 - g % 32);
    }
    for (unsigned i = g & ~31u; i < (g & ~31u) + 32; i++)
        open |= now.spots[i].state != CLOSED;
    status = uvm_unmap_external(&u, 0, va_of(g), parts * GRANULE);
    if (status == NV_OK) {
        CHECK(parts == 32 || !open);
        for (unsigned i = g; i < g + parts; i++)
            now.spots[i] = (struct spot){.state = CLOSED};
    } else {
        CHECK_EQ(status, NV_ERR_INVALID_ADDRESS);
        CHECK(parts != 32 && open);
    }
    check_tables(g & ~31u, (g & ~31u) + 32);
    check_words(g, g + parts < (g & ~31u) + 32 ? g + parts : (g & ~31u) + 32);
}

static void do_write(void)
{
    unsigned g = rng_below(&rng, GRANULES);
    struct spot *s = &now.spots[g];
    uint64_t value = ++serial;

    if (s->state == MAPPED || s->state == SPARSE) {
        CHECK_EQ(gpu_access(&u, 0, true, va_of(g), &value, 8), 0);
        if (s->state == MAPPED)
            now.pages[s->page].content[s->part] = value;
    }
}

static void check_query(void)
{
    struct uvm_vmem_query q = vm_query(&u, 0);
    uint64_t created = 0, mapped = 0;

    for (unsigned i = 0; i < MAX_PAGES; i++)
        created += now.pages[i].handle ? now.pages[i].size : 0;
    for (unsigned g = 0; g < GRANULES; g++)
        mapped += now.spots[g].state == MAPPED ? GRANULE : 0;
    CHECK_EQ(q.out_bytes_created, created);
    CHECK(q.out_bytes_held >= created);
    // at most: what UVM's own calls took away is counted until the next call looks there
    CHECK(q.out_bytes_mapped >= mapped);
}

TEST(test_random_operations_against_a_shadow)
{
    uint64_t total = env_long("OPS", 3000);
    double t0 = seconds();

    rng = env_long("SEED", 1);
    vm_start(&u, BLOCKS * BLOCK);
    for (ops_done = 0; ops_done < total; ops_done++) {
        switch (rng_below(&rng, 32)) {
        case 0 ... 3: do_create(); break;
        case 4 ... 6: do_release(); break;
        case 7 ... 17: do_map(); break;
        case 18 ... 22: do_unmap(); break;
        case 23: do_unmap_external(); break;
        default: do_write(); break;
        }
        if (ops_done % 64 == 63) {
            check_query();
            check_tables(0, GRANULES);
        }
        if (ops_done % 512 == 511) {
            check_words(0, GRANULES);
            sim_check(0);
        }
    }
    check_tables(0, GRANULES);
    check_words(0, GRANULES);
    for (unsigned i = 0; i < MAX_PAGES; i++)
        if (now.pages[i].handle)
            CHECK_EQ(vm_release_one(&u, now.pages[i].handle), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    CHECK_EQ(uvm_free_range(&u, BASE, BLOCKS * BLOCK), NV_OK);
    sim_check(0);
    vmtest_figure("random_operations", total, "operations");
    vmtest_figure("random_seconds", seconds() - t0, "s");
}
