// Page tables: the walk that every format has in common. From the top (PDE4 or PDE3) down to PDE0, then tables of
// pages. The formats' entries are in sim_ver2.c and sim_ver3.c.
//
// A directory is named by the number that the hardware's manuals give it. PDE0 covers 2M with each entry, and is dual
// (a page of 2M, or tables of 64K and of 4K pages). An entry of PDE1 or PDE2 may be a page on some architectures.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/mm.h>

#include "sim.h"

static const u8 shifts[] = {21, 29, 38, 47, 56};

#define PDE_APERTURE_NONE 0
#define PDE_APERTURE_VID 1

// The page that sparse addresses read, and the page that takes writes to them. No access is larger than a page.
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

static bool read_entry(struct sim_vas *v, bool vid, u64 phys, u64 *e)
{
    u64 contig, *p = sim_phys_ptr(vid ? v->gpu : NULL, phys, &contig);

    if (!p)
        return false;
    *e = READ_ONCE(*p);
    return true;
}

// Where an entry of a directory, or a half of one, leads. False: nowhere.
static bool follow(const struct sim_mmu_format *f, u64 e, bool big, u64 *table, bool *vid)
{
    if (SIM_APERTURE(e) == PDE_APERTURE_NONE)
        return false;
    *vid = SIM_APERTURE(e) == PDE_APERTURE_VID;
    *table = big ? f->big_table(e, *vid) : f->table(e, *vid);
    return true;
}

bool sim_pde_in_vidmem(struct sim_gpu *g, u64 e, bool big, u64 *table)
{
    bool vid;

    return follow(g->arch->mmu, e, big, table, &vid) && vid;
}

static u8 page_state(const struct sim_mmu_format *f, u64 e)
{
    if (e & SIM_ENTRY_VALID)
        return SIMGPU_PTE_VALID;
    return f->sparse_page(e) ? SIMGPU_PTE_SPARSE : SIMGPU_PTE_INVALID;
}

// An entry of a directory that is a page, or neither that nor a table. True: x is the answer.
static bool ends_here(struct sim_vas *v, u32 level, u64 e, bool leads_on, struct sim_xlat *x)
{
    const struct sim_arch *arch = v->gpu->arch;

    x->shift = shifts[level];
    x->pte = e;
    x->state = SIMGPU_PTE_INVALID;
    if (e & SIM_ENTRY_VALID) {
        if (arch->page_sizes & 1ULL << x->shift)
            x->state = SIMGPU_PTE_VALID;
        else
            sim_log("violation: PDE%u has a page, 0x%llx, which %s has not\n", level, e, arch->name);
        return true;
    }
    if (leads_on)
        return false;
    if (arch->mmu->sparse_table(e))
        x->state = SIMGPU_PTE_SPARSE;
    return true;
}

// The last step: from a PDE0 (both halves) to the entry that decides.
static void walk_pde0(struct sim_vas *v, u64 va, u64 e0, u64 e1, struct sim_xlat *x)
{
    const struct sim_mmu_format *f = v->gpu->arch->mmu;
    u64 big = 0, small = 0, pte;
    bool big_vid = false, small_vid = false;
    bool has_big = follow(f, e0, true, &big, &big_vid), has_small = follow(f, e1, false, &small, &small_vid);

    if (ends_here(v, 0, e0, has_big || has_small, x))
        return;
    if (has_big) {
        x->shift = 16;
        if (!read_entry(v, big_vid, big + ((va >> 16) & 31) * 8, &pte))
            return;
        x->pte = pte;
        x->state = page_state(f, pte);
        if (x->state != SIMGPU_PTE_INVALID || f->hides_small(pte))
            return;
    }
    if (has_small) {
        x->shift = 12;
        if (!read_entry(v, small_vid, small + ((va >> 12) & 511) * 8, &pte))
            return;
        x->pte = pte;
        x->state = page_state(f, pte);
    }
}

// unit < 0: read memory only. Otherwise start at the deepest directory entry that the unit has cached, and cache what
// is read on the way.
static void walk(struct sim_vas *v, int unit, u64 va, struct sim_xlat *x)
{
    const struct sim_mmu_format *f = v->gpu->arch->mmu;
    bool vid = v->pdb_vid, leads_on;
    u64 table = v->pdb, e0, e1;
    int level = f->top;

    memset(x, 0, sizeof(*x));
    x->shift = shifts[level];
    if (!v->has_pdb || va >> f->va_bits)
        return;
    if (unit >= 0) {
        struct sim_tlbe *t = NULL;

        for (level = 0; level <= f->top && !t; level++)
            t = sim_tlb_find(v, unit, level, shifts[level], va);
        if (t && t->level == 0) {
            walk_pde0(v, va, t->e0, t->e1, x);
            return;
        }
        level = t ? t->level - 1 : f->top;
        if (t)
            follow(f, t->e0, false, &table, &vid);
    }
    for (; level > 0; level--) {
        u64 next = level == f->top ? f->va_bits : shifts[level + 1];

        x->shift = shifts[level];
        if (!read_entry(v, vid, table + ((va >> shifts[level]) & ((1ULL << (next - shifts[level])) - 1)) * 8, &e0))
            return;
        leads_on = follow(f, e0, false, &table, &vid);
        if (ends_here(v, level, e0, leads_on, x))
            return;
        if (unit >= 0)
            sim_tlb_add(v, unit, level, shifts[level], va, e0, 0, SIMGPU_PTE_VALID);
    }
    table += ((va >> 21) & 0xff) * 16;
    x->shift = 21;
    if (!read_entry(v, vid, table, &e0) || !read_entry(v, vid, table + 8, &e1))
        return;
    if (unit >= 0 && !(e0 & SIM_ENTRY_VALID) &&
        (SIM_APERTURE(e0) != PDE_APERTURE_NONE || SIM_APERTURE(e1) != PDE_APERTURE_NONE))
        sim_tlb_add(v, unit, 0, 21, va, e0, e1, SIMGPU_PTE_VALID);
    walk_pde0(v, va, e0, e1, x);
}

void sim_walk(struct sim_vas *v, u64 va, struct sim_xlat *x) { walk(v, -1, va, x); }

void sim_translate(struct sim_vas *v, u32 unit, u64 va, struct sim_xlat *x)
{
    if (sim_tlb_find_pte(v, unit, va, x))
        return;
    walk(v, unit, va, x);
    if (x->state != SIMGPU_PTE_INVALID)
        sim_tlb_add(v, unit, SIM_LEVEL_PTE, x->shift, va, x->pte, 0, x->state);
    else if (v->has_pdb)
        sim_tlb_add(v, unit, SIM_LEVEL_PTE, min_t(u32, x->shift, 16), va, 0, 0, SIMGPU_PTE_INVALID);
}

void *sim_xlat_ptr(struct sim_vas *v, const struct sim_xlat *x, u64 va, u64 *contig, struct sim_gpu **target, u64 *phys)
{
    u64 size = 1ULL << x->shift, off = va & (size - 1), len;
    struct simgpu_pte pte;
    void *p;

    sim_pte_decode(v->gpu, x, &pte);
    *target = pte.aperture == SIM_PTE_VID ? v->gpu : NULL;
    *phys = pte.phys + off;
    p = sim_phys_ptr(*target, *phys, &len);
    if (!p)
        return NULL;
    *contig = min(len, size - off);
    if (*target && sim_pma_is_free(*target, *phys))
        v->gpu->c.bad_use_after_free++;
    return p;
}

void sim_pte_decode(struct sim_gpu *g, const struct sim_xlat *x, struct simgpu_pte *out)
{
    const struct sim_mmu_format *f = g->arch->mmu;

    memset(out, 0, sizeof(*out));
    out->bits = x->pte;
    out->page_size = x->shift < 32 ? 1U << x->shift : 0;
    out->state = x->state;
    if (x->state != SIMGPU_PTE_VALID)
        return;
    out->aperture = SIM_APERTURE(x->pte);
    // The bits below the page's size are ignored
    out->phys = f->page(x->pte, out->aperture == SIM_PTE_VID) & -(1ULL << x->shift);
    out->read_only = f->read_only(x->pte);
}

bool sim_xlat_allows(struct sim_gpu *g, const struct sim_xlat *x, bool write)
{
    if (x->state != SIMGPU_PTE_VALID)
        return x->state == SIMGPU_PTE_SPARSE;
    return !write || !g->arch->mmu->read_only(x->pte);
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
    if (!sim_xlat_allows(v->gpu, &x, write))
        return NULL;
    return sim_xlat_ptr(v, &x, va, contig, &target, &phys);
}
