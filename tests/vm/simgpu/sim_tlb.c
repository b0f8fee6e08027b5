// TLBs and page-directory caches.
//
// Every address space has, per unit (GPC for the SMs, HUB for copy engines and host), a cache of translations and of
// directory entries. Nothing is ever evicted. An entry goes only with an invalidate whose scope covers it, so that an
// invalidate that is missing, aims at the wrong address, leaves out the GPCs or does not reach the right level of the
// tables leaves a stale entry that the next access uses. What an invalidate drops is fetched again at once, since work
// in flight may do just that. So tables that were not yet written (or not yet flushed to memory) are caught too.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

#define MAX_ENTRIES (64 << 10)
#define MAX_REFILL 64

static u32 key(u64 va, u32 shift, int level)
{
    return hash_64((va >> shift) ^ (u64)level << 58 ^ (u64)shift << 48, 32);
}

struct sim_tlbe *sim_tlb_find(struct sim_vas *v, u32 unit, int level, u32 shift, u64 va)
{
    u64 base = va & ~((1ULL << shift) - 1);
    struct sim_tlbe *t;

    hash_for_each_possible(v->tlb, t, node, key(va, shift, level)) {
        if (t->va == base && t->unit == unit && t->level == level && t->shift == shift)
            return t;
    }
    return NULL;
}

static const u8 pte_shifts[] = {38, 29, 21, 16, 12};

bool sim_tlb_find_pte(struct sim_vas *v, u32 unit, u64 va, struct sim_xlat *x)
{
    struct sim_tlbe *t;
    int i;

    for (i = 0; i < ARRAY_SIZE(pte_shifts); i++) {
        if (!(v->gpu->arch->page_sizes & 1ULL << pte_shifts[i]))
            continue;
        t = sim_tlb_find(v, unit, SIM_LEVEL_PTE, pte_shifts[i], va);
        if (t) {
            x->pte = t->e0;
            x->shift = t->shift;
            x->state = t->state;
            x->hit = true;
            return true;
        }
    }
    return false;
}

static void trace(const char *what, const struct sim_tlbe *t)
{
    if (sim_trace & 2)
        sim_log("TLB %s unit %u level %d shift %u state %u 0x%llx: 0x%llx\n", what, t->unit, t->level, t->shift,
                t->state, t->va, t->e0);
}

void sim_tlb_add(struct sim_vas *v, u32 unit, int level, u32 shift, u64 va, u64 e0, u64 e1, u8 state)
{
    struct sim_tlbe *t;

    if (v->gpu->c.tlb_entries >= MAX_ENTRIES || sim_tlb_find(v, unit, level, shift, va))
        return;
    // No reclaim: it could wait for UVM, which waits for the engine
    t = kmalloc(sizeof(*t), GFP_NOWAIT | __GFP_NOWARN);
    if (!t)
        return;
    t->va = va & ~((1ULL << shift) - 1);
    t->e0 = e0;
    t->e1 = e1;
    t->shift = shift;
    t->unit = unit;
    t->state = state;
    t->level = level;
    hash_add(v->tlb, &t->node, key(va, shift, level));
    v->tlb_count++;
    v->gpu->c.tlb_entries++;
    trace("add", t);
}

static void drop(struct sim_vas *v, struct sim_tlbe *t)
{
    trace("drop", t);
    hash_del(&t->node);
    kfree(t);
    v->tlb_count--;
    v->gpu->c.tlb_entries--;
}

void sim_tlb_drop_all(struct sim_vas *v)
{
    struct hlist_node *next;
    struct sim_tlbe *t;
    int i;

    hash_for_each_safe(v->tlb, i, next, t, node)
        drop(v, t);
}

struct scope {
    bool targeted, gpc;
    u64 va, size;
    u32 level; // PAGE_TABLE_LEVEL: 0 all, 1 PTEs only, 2 up to PDE0, ... 6 up to PDE4
};

// The number of the directory that an entry is in, -1 for a table of pages below PDE0.
static int directory(const struct sim_tlbe *t)
{
    if (t->level != SIM_LEVEL_PTE)
        return t->level;
    return t->shift < 21 ? -1 : t->shift < 29 ? 0 : t->shift < 38 ? 1 : 2;
}

static bool covered(const struct scope *s, const struct sim_tlbe *t)
{
    if (t->unit == SIMGPU_UNIT_GPC && !s->gpc)
        return false;
    if (s->level && directory(t) > (int)s->level - 2)
        return false;
    return !s->targeted || (t->va < s->va + s->size && s->va < t->va + (1ULL << t->shift));
}

// An address must not turn from an entry of one size into one of another while a TLB still holds the first. A TLB could
// then hold both, and accesses to it would lose their order. Between the two lies a moment without an entry.
static void check_size(struct sim_vas *v, const struct sim_tlbe *t)
{
    struct sim_xlat now;

    if (t->level != SIM_LEVEL_PTE || t->state != SIMGPU_PTE_VALID)
        return;
    sim_walk(v, t->va, &now);
    if (now.state == SIMGPU_PTE_INVALID || now.shift == t->shift)
        return;
    v->gpu->c.bad_mixed_sizes++;
    if (sim_trace & 2)
        sim_log("TLB holds 0x%llx by an entry of shift %u, the tables have one of shift %u\n", t->va, t->shift,
                now.shift);
}

struct refill {
    u64 va;
    u32 unit;
};

static void invalidate_vas(struct sim_vas *v, const struct scope *s)
{
    struct refill refill[MAX_REFILL];
    u32 n = 0, i;
    struct hlist_node *next;
    struct sim_tlbe *t;
    int bucket;

    if (!v->tlb_count)
        return;
    hash_for_each_safe(v->tlb, bucket, next, t, node) {
        if (!covered(s, t))
            continue;
        if (t->level == SIM_LEVEL_PTE && t->state != SIMGPU_PTE_INVALID && n < MAX_REFILL) {
            refill[n].va = t->va;
            refill[n++].unit = t->unit;
        }
        check_size(v, t);
        drop(v, t);
    }
    for (i = 0; i < n; i++) {
        struct sim_xlat x;

        sim_translate(v, refill[i].unit, refill[i].va, &x);
    }
}

// MEM_OP_A..D of an MMU_TLB_INVALIDATE or MMU_TLB_INVALIDATE_TARGETED
void sim_tlb_invalidate(struct sim_gpu *g, u32 a, u32 b, u32 c, u32 d)
{
    struct scope s = {
        .targeted = d >> 27 == 0xa,
        .gpc = !(c & BIT(1)),
        .size = 4096ULL << min(a & 0x3f, 51u), // to which the hardware aligns the address down
        .level = (c >> 7) & 7,
    };
    u64 pdb = ((u64)(d & 0x7ffffff) << 20 | c >> 12) << 12;
    bool all_pdbs = c & 1, vid = ((c >> 10) & 3) == 0, ack = ((c >> 5) & 3) != 0;
    struct sim_vas *v;

    bool links_only = g->arch->link_tlbs && ((a >> 6) & 3) == 1;

    s.va = ((u64)b << 32 | (a & ~0xfffu)) & ~(s.size - 1);
    if (s.targeted)
        g->c.inval_targeted++;
    else
        g->c.inval_all++;
    g->c.inval_ack += ack;
    if (sim_trace & 2)
        sim_log("TLB invalidate, targeted %d va 0x%llx size 0x%llx level %u gpc %d pdb 0x%llx ack %d\n", s.targeted,
                s.va, s.size, s.level, s.gpc, pdb, ack);
    if ((g->mode & SIMGPU_MODE_BREAK_INVALIDATE) || links_only)
        return;
    list_for_each_entry(v, &sim_vas_list, node) {
        if (v->gpu != g || !v->has_pdb || (!all_pdbs && (v->pdb != pdb || v->pdb_vid != vid)))
            continue;
        invalidate_vas(v, &s);
        // An invalidate that is acknowledged globally has pushed what is in flight to where a membar catches it. One
        // that leaves the GPCs out says nothing about the SMs' writes
        if (ack && s.gpc)
            sim_post_ack(g, v);
    }
}

void sim_tlb_check_free(struct sim_gpu *g, u64 phys, u64 len)
{
    struct sim_tlbe *t;
    struct sim_vas *v;
    int bucket;

    list_for_each_entry(v, &sim_vas_list, node) {
        if (!v->tlb_count)
            continue;
        hash_for_each(v->tlb, bucket, t, node) {
            if (t->level == SIM_LEVEL_PTE) {
                struct sim_xlat x = {.pte = t->e0, .shift = t->shift, .state = t->state};
                struct simgpu_pte pte;

                sim_pte_decode(v->gpu, &x, &pte);
                if (pte.state != SIMGPU_PTE_VALID || pte.aperture != SIM_PTE_VID || v->gpu != g)
                    continue;
                if (pte.phys < phys + len && phys < pte.phys + (1ULL << t->shift)) {
                    g->c.bad_tlb_at_free++;
                    sim_walk(v, t->va, &x);
                    sim_log("free of 0x%llx while the TLB of unit %u maps 0x%llx (%u) to 0x%llx; now %u, 0x%llx (%u)\n",
                            phys, t->unit, t->va, t->shift, pte.phys, x.state, x.pte, x.shift);
                }
            } else if (v->gpu == g) {
                // The table that it points to, of PDE0 in either half
                u64 big, small;
                bool hit = t->level == 0 && sim_pde_in_vidmem(g, t->e0, true, &big) && big - phys < len;

                hit |= sim_pde_in_vidmem(g, t->level ? t->e0 : t->e1, false, &small) && small - phys < len;
                if (hit) {
                    g->c.bad_pde_at_free++;
                    sim_log("free of 0x%llx while a cache of PDE%d holds it for 0x%llx\n", phys, t->level, t->va);
                }
            }
        }
    }
}
