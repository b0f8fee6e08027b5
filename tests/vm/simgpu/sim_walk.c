// Page tables of the "VER2" format (Pascal to Ada): five levels, 49 bits.
//
//   level 0 PDE3 48:47, 1 PDE2 46:38, 2 PDE1 37:29, 3 PDE0 28:21 (dual: 2M PTE, or 64K and 4K tables), then PTEs
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/mm.h>

#include "sim.h"

static const struct {
    u8 shift, bits;
} levels[] = { { 47, 2 }, { 38, 9 }, { 29, 9 }, { 21, 8 } };

#define PTE_VALID BIT_ULL(0)
#define PTE_VOL   BIT_ULL(3) // of an invalid entry: sparse
#define PTE_PRIV  BIT_ULL(5) // of an invalid 64K entry: the 4K entries below are ignored
#define PTE_RO    BIT_ULL(6)
#define APERTURE(e) (((e) >> 1) & 3)
#define APERTURE_PTE_VID  0
#define APERTURE_PTE_PEER 1
#define APERTURE_PDE_NONE 0
#define APERTURE_PDE_VID  1

// What a sparse address reads, and where writes to it go. One page each: no access is larger.
static u8 zero_page[PAGE_SIZE] __aligned(PAGE_SIZE);
static u8 sink_page[PAGE_SIZE] __aligned(PAGE_SIZE);

void *sim_phys_ptr(struct sim_gpu *g, u64 phys, u64 *contig)
{
    if (g)
        return sim_fb_ptr(g, phys, contig);
    if (!pfn_valid(phys >> PAGE_SHIFT))
        return NULL;
    *contig = PAGE_SIZE - offset_in_page(phys);
    return __va(phys);
}

static u64 pde_phys(u64 e, bool vid)
{
    return (vid ? (e >> 8) & 0x1ffffff : (e >> 8) & 0x3fffffffffffULL) << 12;
}

static bool read_entry(struct sim_vas *v, bool vid, u64 phys, u64 *e)
{
    u64 contig, *p = sim_phys_ptr(vid ? v->gpu : NULL, phys, &contig);

    if (!p)
        return false;
    *e = READ_ONCE(*p);
    return true;
}

// The last step: from a PDE0 (both halves) to the entry that decides.
static void walk_pde0(struct sim_vas *v, u64 va, u64 e0, u64 e1, struct sim_xlat *x)
{
    u64 pte;

    x->state = SIMGPU_PTE_INVALID;
    x->shift = 21;
    x->pte = e0;
    if (e0 & PTE_VALID) {
        x->state = SIMGPU_PTE_VALID;
        return;
    }
    if (APERTURE(e0) == APERTURE_PDE_NONE && APERTURE(e1) == APERTURE_PDE_NONE) {
        if (e0 & PTE_VOL)
            x->state = SIMGPU_PTE_SPARSE;
        return;
    }
    if (APERTURE(e0) != APERTURE_PDE_NONE) {
        bool vid = APERTURE(e0) == APERTURE_PDE_VID;
        u64 table = (vid ? (e0 >> 4) & 0x1fffffff : (e0 >> 4) & 0x3ffffffffffffULL) << 8;

        x->shift = 16;
        if (!read_entry(v, vid, table + ((va >> 16) & 31) * 8, &pte))
            return;
        x->pte = pte;
        if (pte & PTE_VALID)
            x->state = SIMGPU_PTE_VALID;
        else if (pte & PTE_VOL)
            x->state = SIMGPU_PTE_SPARSE;
        if (x->state != SIMGPU_PTE_INVALID || (pte & PTE_PRIV))
            return;
    }
    if (APERTURE(e1) != APERTURE_PDE_NONE) {
        bool vid = APERTURE(e1) == APERTURE_PDE_VID;

        x->shift = 12;
        if (!read_entry(v, vid, pde_phys(e1, vid) + ((va >> 12) & 511) * 8, &pte))
            return;
        x->pte = pte;
        if (pte & PTE_VALID)
            x->state = SIMGPU_PTE_VALID;
        else if (pte & PTE_VOL)
            x->state = SIMGPU_PTE_SPARSE;
    }
}

// unit < 0: read memory only. Otherwise start at the deepest directory entry that the unit has cached, and cache what
// is read on the way.
static void walk(struct sim_vas *v, int unit, u64 va, struct sim_xlat *x)
{
    bool vid = v->pdb_vid;
    u64 table = v->pdb, e0, e1;
    int level = 0;

    memset(x, 0, sizeof(*x));
    x->shift = 47;
    if (!v->has_pdb || va >> 49)
        return;
    if (unit >= 0) {
        for (level = 3; level >= 0; level--) {
            struct sim_tlbe *t = sim_tlb_find(v, unit, level, levels[level].shift, va);

            if (!t)
                continue;
            if (level == 3) {
                walk_pde0(v, va, t->e0, t->e1, x);
                return;
            }
            vid = APERTURE(t->e0) == APERTURE_PDE_VID;
            table = pde_phys(t->e0, vid);
            break;
        }
        level++;
    }
    for (; level < 3; level++) {
        u64 index = (va >> levels[level].shift) & ((1 << levels[level].bits) - 1);

        x->shift = levels[level].shift;
        if (!read_entry(v, vid, table + index * 8, &e0) || APERTURE(e0) == APERTURE_PDE_NONE)
            return;
        if (unit >= 0)
            sim_tlb_add(v, unit, level, levels[level].shift, va, e0, 0, SIMGPU_PTE_VALID);
        vid = APERTURE(e0) == APERTURE_PDE_VID;
        table = pde_phys(e0, vid);
    }
    table += ((va >> 21) & 0xff) * 16;
    x->shift = 21;
    if (!read_entry(v, vid, table, &e0) || !read_entry(v, vid, table + 8, &e1))
        return;
    if (unit >= 0 && !(e0 & PTE_VALID) &&
        (APERTURE(e0) != APERTURE_PDE_NONE || APERTURE(e1) != APERTURE_PDE_NONE))
        sim_tlb_add(v, unit, 3, 21, va, e0, e1, SIMGPU_PTE_VALID);
    walk_pde0(v, va, e0, e1, x);
}

void sim_walk(struct sim_vas *v, u64 va, struct sim_xlat *x)
{
    walk(v, -1, va, x);
}

void sim_translate(struct sim_vas *v, u32 unit, u64 va, struct sim_xlat *x)
{
    struct sim_gpu *g = v->gpu;

    if (!(g->mode & SIMGPU_MODE_TLB)) {
        walk(v, -1, va, x);
        return;
    }
    if (sim_tlb_find_pte(v, unit, va, x)) {
        g->c.tlb_hits++;
        return;
    }
    g->c.tlb_misses++;
    walk(v, unit, va, x);
    if (x->state != SIMGPU_PTE_INVALID)
        sim_tlb_add(v, unit, SIM_LEVEL_PTE, x->shift, va, x->pte, 0, x->state);
    else if ((g->mode & SIMGPU_MODE_NEGATIVE) && v->has_pdb)
        sim_tlb_add(v, unit, SIM_LEVEL_PTE, min_t(u32, x->shift, 16), va, 0, 0, SIMGPU_PTE_INVALID);
}

static u64 pte_phys(u64 pte)
{
    if (APERTURE(pte) <= APERTURE_PTE_PEER)
        return ((pte >> 8) & 0x1ffffff) << 12;
    return ((pte >> 8) & 0x3fffffffffffULL) << 12;
}

void *sim_xlat_ptr(struct sim_vas *v, const struct sim_xlat *x, u64 va, u64 *contig, struct sim_gpu **target,
                   u64 *phys)
{
    u64 size = 1ULL << x->shift, off = va & (size - 1), len;
    void *p;

    *target = NULL;
    if (APERTURE(x->pte) == APERTURE_PTE_VID)
        *target = v->gpu;
    else if (APERTURE(x->pte) == APERTURE_PTE_PEER) {
        *target = sim_peer(v->gpu, (x->pte >> 33) & 7);
        if (!*target)
            return NULL;
    }
    *phys = pte_phys(x->pte) + off;
    p = sim_phys_ptr(*target, *phys, &len);
    if (!p)
        return NULL;
    *contig = min(len, size - off);
    if (*target && sim_pma_is_free(*target, *phys))
        v->gpu->c.bad_use_after_free++;
    return p;
}

void sim_pte_decode(const struct sim_xlat *x, struct simgpu_pte *out)
{
    memset(out, 0, sizeof(*out));
    out->bits = x->pte;
    out->page_size = x->shift < 32 ? 1U << x->shift : 0;
    out->state = x->state;
    if (x->state != SIMGPU_PTE_VALID)
        return;
    out->phys = pte_phys(x->pte);
    out->aperture = APERTURE(x->pte);
    out->read_only = !!(x->pte & PTE_RO);
    if (out->aperture == APERTURE_PTE_PEER)
        out->peer = (x->pte >> 33) & 7;
}

void *sim_va_ptr(struct sim_vas *v, u32 unit, u64 va, bool write, u64 *contig)
{
    struct sim_gpu *target;
    struct sim_xlat x;
    u64 phys;
    void *p = sim_vas_rm_ptr(v, va, contig);

    if (p)
        return p;
    sim_translate(v, unit, va, &x);
    if (x.state == SIMGPU_PTE_SPARSE) {
        *contig = PAGE_SIZE - offset_in_page(va);
        return (write ? sink_page : zero_page) + offset_in_page(va);
    }
    if (x.state != SIMGPU_PTE_VALID || (write && (x.pte & PTE_RO)))
        return NULL;
    return sim_xlat_ptr(v, &x, va, contig, &target, &phys);
}
