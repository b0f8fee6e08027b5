// A long random sequence of calls, vMem's and UVM's own, against a shadow. After each one the page tables of what it
// touched are walked, and the words that stand for the data are read through the TLB. UVM's calls map RM's memory and
// sparse mappings between the overlays, which MAP takes over, runs into, or must leave alone.
//
// OPS sets the length, SEED the sequence.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

enum { BLOCKS = 24, GRANULES = BLOCKS * 32, MAX_PAGES = 96, BATCH = 24, MEMORY_PARTS = 64 };

struct page {
    uint64_t handle, size; // 0: no page
    uint64_t phys;         // once it was seen in a table
    uint64_t content[32];  // the word at the start of each granule
};

enum { CLOSED, SPARSE, MAPPED, FOREIGN };
struct spot {
    uint8_t state;
    uint8_t page;    // index, when mapped; what kind of mapping, when foreign
    uint8_t part;    // granule of the page, or of RM's memory
    uint32_t object; // the overlay or the mapping that it belongs to
    uint32_t origin; // the same in all parts of a mapping that was taken over in part; 0: it never was
};

struct model {
    struct page pages[MAX_PAGES];
    struct spot spots[GRANULES];
    uint32_t objects, origins;
};

// Mappings of UVM's own: RM's memory by entries of either size, or sparse
enum { OF_64K, OF_2M, OF_NOTHING, KINDS };
#define MEMORY(kind) (0x70 + (kind))
#define MIRROR(kind) (BASE + GB(1) + (kind) * GB(1)) // where the memory is mapped for good
static uint64_t memory_word(unsigned kind, unsigned part) { return 0xf0000000 + kind * 1000 + part; }

static struct uvm u;
static struct model now, next; // next: what a batch would make of it
static uint64_t rng, serial, ops_done;
static uint64_t stale[64], stales;          // released handles
static unsigned opened, followed, kept_off; // by MAP_AHEAD: holes, mappings taken over, mappings of others

static uint64_t va_of(unsigned g) { return BASE + (uint64_t)g * GRANULE; }

static void bad(const char *what, unsigned g)
{
    struct simgpu_pte p = sim_pte(&u, va_of(g));

    FAIL("after %llu operations (SEED %ld): %s at granule %u: shadow state %u page %u part %u; "
         "table state %u phys 0x%llx size 0x%x",
         (unsigned long long)ops_done, env_long("SEED", 1), what, g, now.spots[g].state, now.spots[g].page,
         now.spots[g].part, p.state, (unsigned long long)p.phys, p.page_size);
}

static bool is_sparse(const struct spot *s)
{
    return s->state == SPARSE || (s->state == FOREIGN && s->page == OF_NOTHING);
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
        case FOREIGN:
            if (p->state != (s->page == OF_NOTHING ? SIMGPU_PTE_SPARSE : SIMGPU_PTE_VALID) ||
                (s->page != OF_NOTHING && p->page_size != (s->page == OF_2M ? MB(2) : KB(64))))
                bad("an entry of UVM's own mapping", g);
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
            if (phys != page->phys || phys % page->size)
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
        } else if (got != (is_sparse(s)          ? 0
                           : s->state == FOREIGN ? memory_word(s->page, s->part)
                                                 : now.pages[s->page].content[s->part])) {
            bad("wrong data", g);
        }
    }
}

// RM's memory is as it was, whatever lay at its addresses meanwhile.
static void check_memory(void)
{
    for (unsigned kind = 0; kind < OF_NOTHING; kind++)
        for (unsigned i = 0; i < MEMORY_PARTS; i++)
            CHECK_EQ(gpu_word(&u, MIRROR(kind) + i * GRANULE), memory_word(kind, i));
}

// The overlay or the mapping at g.
static void extent(const struct model *m, unsigned g, unsigned *first, unsigned *last)
{
    for (*first = g; *first && m->spots[*first - 1].object == m->spots[g].object;)
        --*first;
    for (*last = g; *last + 1 < GRANULES && m->spots[*last + 1].object == m->spots[g].object;)
        ++*last;
}

// An overlay opens in the hole around the address, as far as the block goes.
static void open_overlay(struct model *m, unsigned g)
{
    unsigned first = g, last = g;

    while (first % 32 && m->spots[first - 1].state == CLOSED)
        first--;
    while (last % 32 != 31 && m->spots[last + 1].state == CLOSED)
        last++;
    m->objects++;
    for (unsigned i = first; i <= last; i++)
        m->spots[i] = (struct spot){.state = SPARSE, .object = m->objects};
}

// The part of UVM's mapping in g's block becomes an overlay. What is before and behind the block is a mapping of its own.
static void take_over(struct model *m, unsigned g)
{
    unsigned first, last, block = g & ~31u;

    extent(m, g, &first, &last);
    if (!m->spots[g].origin) {
        m->origins++;
        for (unsigned i = first; i <= last; i++)
            m->spots[i].origin = m->origins;
    }
    m->objects += 2;
    for (unsigned i = first > block ? first : block; i <= last; i++) {
        m->spots[i].object = m->objects - (i / 32 == g / 32);
        if (i / 32 == g / 32)
            m->spots[i].state = SPARSE;
    }
}

// MAP_AHEAD of an element that ends at g
static void open_ahead(struct model *m, unsigned g, bool take)
{
    unsigned first, last;
    struct spot *s;

    extent(m, g, &first, &last);
    for (unsigned i = first; i <= last; i++)
        if (now.spots[i].state == MAPPED)
            return;
    s = &m->spots[last + 1];
    if ((last + 1) % 32 || last + 1 == GRANULES)
        return;
    if (s->state == CLOSED) {
        open_overlay(m, last + 1);
        opened++;
    } else if (s->state == FOREIGN && take) {
        if (s->page == OF_NOTHING || (s->origin && s->origin == s[-1].origin)) {
            take_over(m, last + 1);
            followed++;
        } else {
            kept_off++;
        }
    }
}

// One element of MAP, and what it is answered with.
static NV_STATUS apply(struct model *m, const struct uvm_vmem_op *op, const struct page *page)
{
    unsigned first = (op->va - BASE) / GRANULE, end = first + op->length / GRANULE;
    bool take = op->flags & UVM_VMEM_TAKEOVER;

    if (page && op->handle != page->handle)
        return NV_ERR_INVALID_OBJECT_HANDLE;
    if (page && op->offset + op->length > page->size)
        return NV_ERR_INVALID_OFFSET;
    for (unsigned g = first; g < end; g++) {
        struct spot *s = &m->spots[g];

        if (s->state == FOREIGN && !take)
            return NV_ERR_UVM_ADDRESS_IN_USE;
        if (s->state == FOREIGN)
            take_over(m, g);
        else if (s->state == CLOSED)
            open_overlay(m, g);
        if (!page)
            continue;
        if (s->state == MAPPED && !(op->flags & UVM_VMEM_MAP_REPLACE))
            return NV_ERR_UVM_ADDRESS_IN_USE;
        s->state = MAPPED;
        s->page = page - now.pages;
        s->part = op->offset / GRANULE + (g - first);
    }
    if (op->flags & UVM_VMEM_MAP_AHEAD)
        open_ahead(m, end - 1, take);
    return NV_OK;
}

// UVM cuts what lies at g in two. It does not know which mapping it was cut from before.
static bool uvm_cuts(struct model *m, unsigned g)
{
    uint32_t object = m->spots[g].object;

    if (m->spots[g].state != FOREIGN || (m->spots[g].page == OF_2M && g % 32))
        return false;
    m->objects++;
    for (; g < GRANULES && m->spots[g].object == object; g++) {
        m->spots[g].object = m->objects;
        m->spots[g].origin = 0;
    }
    return true;
}

// UVM closes what lies in [from, to), in order, until it meets what it would have to cut and cannot.
static bool uvm_closes(struct model *m, unsigned from, unsigned to)
{
    for (unsigned g = from, first, last; g < to; g = last + 1) {
        extent(m, g, &first, &last);
        if (m->spots[g].state == CLOSED) {
            last = g;
            continue;
        }
        if (first < g && !uvm_cuts(m, g))
            return false;
        if (last >= to && !uvm_cuts(m, to))
            return false;
        for (last = last < to ? last : to - 1; g <= last; g++)
            m->spots[g] = (struct spot){.state = CLOSED};
    }
    return true;
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
                now.spots[g].state = SPARSE;
        stale[stales++ % 64] = handles[i];
        now.pages[which[i]].handle = 0;
    }
    check_tables(0, GRANULES);
}

// An element that maps a part of a page, which it returns, or opens addresses (NULL).
static const struct page *random_op(struct uvm_vmem_op *op, uint32_t flags)
{
    unsigned parts, part, g;
    struct page *page;
    int p = pick_page();

    if (p < 0 || !rng_below(&rng, 10)) {
        g = rng_below(&rng, GRANULES - 40);
        *op =
            vm_op(va_of(g), (1 + rng_below(&rng, 40)) * GRANULE, 0, 0, UVM_VMEM_MAP_OPEN | (flags & UVM_VMEM_TAKEOVER));
        return NULL;
    }
    page = &now.pages[p];
    parts = page->size / GRANULE;
    part = rng_below(&rng, 2) ? 0 : rng_below(&rng, parts);
    parts -= part;
    if (rng_below(&rng, 2))
        parts = 1 + rng_below(&rng, parts);
    g = rng_below(&rng, GRANULES);
    if (parts == 32 && rng_below(&rng, 2))
        g &= ~31u;
    if (g + parts > GRANULES)
        g = GRANULES - parts;
    flags |= rng_below(&rng, 3) ? UVM_VMEM_MAP_REPLACE : 0;
    flags |= rng_below(&rng, 4) ? 0 : UVM_VMEM_MAP_64K;
    flags |= rng_below(&rng, 4) ? 0 : UVM_VMEM_MAP_AHEAD;
    *op = vm_op(va_of(g), parts * GRANULE, page->handle, part * GRANULE, flags);
    return page;
}

static void spoil(struct uvm_vmem_op *op)
{
    switch (rng_below(&rng, 4)) {
    case 0: op->handle += 1ull << 40; break;
    case 1: op->offset += MB(rng_below(&rng, 3)); break;
    case 2: op->va += 4096; break;
    case 3: op->flags |= 0x4000; break;
    }
}

// What the module answers before it looks at the state
static NV_STATUS check(const struct uvm_vmem_op *op)
{
    if (op->flags & 0x4000)
        return NV_ERR_INVALID_ARGUMENT;
    if ((op->flags & UVM_VMEM_MAP_OPEN) && (op->handle || op->offset))
        return NV_ERR_INVALID_ARGUMENT;
    if (op->va % GRANULE)
        return NV_ERR_INVALID_ADDRESS;
    if (op->handle && op->offset + op->length > BLOCK)
        return NV_ERR_INVALID_OFFSET;
    return NV_OK;
}

static void check_around(unsigned lo, unsigned hi)
{
    lo &= ~31u;
    hi = (hi + 31) & ~31u;
    check_tables(lo, hi);
    lo += rng_below(&rng, hi - lo);
    check_words(lo, lo + 8 < hi ? lo + 8 : hi);
}

// A batch of MAP elements, mostly good; the model says what must become of it.
static void do_map(void)
{
    const struct page *page[BATCH];
    struct uvm_vmem_op ops[BATCH];
    struct uvm_vmem_batch b;
    unsigned n = 1 + rng_below(&rng, rng_below(&rng, 3) ? 4 : BATCH), failed = UVM_VMEM_NO_OP;
    uint32_t flags = rng_below(&rng, 4) ? UVM_VMEM_TAKEOVER : 0;
    NV_STATUS want = NV_OK, status;

    for (unsigned i = 0; i < n; i++) {
        page[i] = random_op(&ops[i], flags);
        if (!rng_below(&rng, 200))
            spoil(&ops[i]);
    }
    next = now;
    for (unsigned i = 0; i < n && want == NV_OK; i++) {
        want = check(&ops[i]);
        failed = i;
    }
    if (want == NV_OK) {
        for (unsigned i = 0; i < n && want == NV_OK; i++) {
            want = apply(&next, &ops[i], page[i]);
            failed = i;
        }
    }
    status = vm_map_ops(&u, 0, ops, n, &b);
    CHECK_MSG(status == want && b.out_failed == (want == NV_OK ? UVM_VMEM_NO_OP : failed),
              "after %llu operations (SEED %ld): MAP answers 0x%x at element %u, not 0x%x at %u",
              (unsigned long long)ops_done, env_long("SEED", 1), status, b.out_failed, want, failed);
    if (want == NV_OK) {
        now = next;
    } else { // mappings that were taken over are their owners' again, in more parts
        now.objects = next.objects;
        now.origins = next.origins;
        for (unsigned g = 0; g < GRANULES; g++) {
            if (now.spots[g].state == FOREIGN) {
                now.spots[g].object = next.spots[g].object;
                now.spots[g].origin = next.spots[g].origin;
            }
        }
    }
    check_around(0, GRANULES);
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
            if (next.spots[k].state == MAPPED)
                next.spots[k].state = SPARSE;
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
    check_around(lo, hi);
}

// Addresses of a call of UVM's own: often whole blocks
static unsigned random_range(unsigned *parts)
{
    unsigned g = rng_below(&rng, GRANULES - 64);

    *parts = 1 + rng_below(&rng, 64);
    if (rng_below(&rng, 2)) {
        *parts = 32 + rng_below(&rng, 2) * 32;
        return g & ~31u;
    }
    return g;
}

// UVM's own calls close overlays whole, and never cut one.
static void do_unmap_external(void)
{
    unsigned parts, g = random_range(&parts);
    NV_STATUS status = uvm_unmap_external(&u, 0, va_of(g), parts * GRANULE);

    CHECK_EQ(status, uvm_closes(&now, g, g + parts) ? NV_OK : NV_ERR_INVALID_ADDRESS);
    check_around(g, g + parts);
}

// UVM maps something of its own, over whatever it can close.
static void do_map_external(void)
{
    unsigned kind = rng_below(&rng, KINDS), parts, g = random_range(&parts), part;
    NV_STATUS status;

    if (kind == OF_2M) {
        g &= ~31u;
        parts = parts <= 32 ? 32 : 64;
    }
    part = kind == OF_NOTHING ? 0 : rng_below(&rng, MEMORY_PARTS - parts + 1);
    if (kind == OF_2M)
        part &= ~31u;
    if (kind == OF_NOTHING)
        status = uvm_map_sparse(&u, 0, va_of(g), parts * GRANULE);
    else
        status = uvm_map_external(&u, 0, va_of(g), parts * GRANULE, part * GRANULE, MEMORY(kind));
    if (uvm_closes(&now, g, g + parts)) {
        CHECK_EQ(status, NV_OK);
        now.objects++;
        for (unsigned i = 0; i < parts; i++)
            now.spots[g + i] = (struct spot){.state = FOREIGN, .page = kind, .part = part + i, .object = now.objects};
    } else {
        CHECK_EQ(status, NV_ERR_INVALID_ADDRESS);
    }
    check_around(g, g + parts);
}

static void do_write(void)
{
    unsigned g = rng_below(&rng, GRANULES);
    struct spot *s = &now.spots[g];
    uint64_t value = ++serial;

    if (s->state == MAPPED || is_sparse(s)) {
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
    CHECK_EQ(q.out_bytes_mapped, mapped);
}

TEST(test_random_operations_against_a_shadow)
{
    uint64_t total = env_long("OPS", 3000);

    rng = env_long("SEED", 1);
    vm_start(&u, BLOCKS * BLOCK);
    for (unsigned kind = 0; kind < OF_NOTHING; kind++) {
        sim_mem(&u, 0, MEMORY(kind), kind == OF_2M ? MB(2) : KB(64), MEMORY_PARTS * GRANULE);
        CHECK_EQ(uvm_create_external(&u, MIRROR(kind), MEMORY_PARTS * GRANULE), NV_OK);
        CHECK_EQ(uvm_map_external(&u, 0, MIRROR(kind), MEMORY_PARTS * GRANULE, 0, MEMORY(kind)), NV_OK);
        for (unsigned i = 0; i < MEMORY_PARTS; i++) {
            uint64_t word = memory_word(kind, i);

            CHECK_EQ(gpu_access(&u, 0, true, MIRROR(kind) + i * GRANULE, &word, 8), 0);
        }
    }
    for (ops_done = 0; ops_done < total; ops_done++) {
        switch (rng_below(&rng, 32)) {
        case 0 ... 3: do_create(); break;
        case 4 ... 6: do_release(); break;
        case 7 ... 17: do_map(); break;
        case 18 ... 22: do_unmap(); break;
        case 23 ... 24: do_unmap_external(); break;
        case 25 ... 27: do_map_external(); break;
        default: do_write(); break;
        }
        if (ops_done % 64 == 63) {
            check_query();
            check_tables(0, GRANULES);
        }
        if (ops_done % 512 == 511) {
            check_words(0, GRANULES);
            check_memory();
            sim_check(0);
        }
    }
    check_memory();
    check_tables(0, GRANULES);
    check_words(0, GRANULES);
    for (unsigned i = 0; i < MAX_PAGES; i++)
        if (now.pages[i].handle)
            CHECK_EQ(vm_release_one(&u, now.pages[i].handle), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    CHECK_EQ(uvm_free_range(&u, BASE, BLOCKS * BLOCK), NV_OK);
    check_memory();
    for (unsigned kind = 0; kind < OF_NOTHING; kind++)
        sim_mem(&u, 0, MEMORY(kind), 0, 0);
    uvm_close(&u);
    sim_check(0);
    printf("MAP_AHEAD: %u holes, %u taken over, %u left alone\n", opened, followed, kept_off);
    CHECK(total < 2000 || (opened && followed && kept_off));
}
