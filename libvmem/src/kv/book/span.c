// Spans: what of a slot is mapped, what of that serves which steps, and which part no call could take back.
//
// SPDX-License-Identifier: MIT
#include "kv/book/book.h"

uint32_t vmem__kv_steady(const vmem_kv *kv, uint32_t slot)
{
    uint64_t steady = kv->windows ? 0 : kv->max_tokens;
    for (uint32_t i = 0; i < kv->n_groups && steady; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *s = kv_span(kv, slot, i);
        uint64_t rows = ((uint64_t)s->need_hi << kv->page_shift) / g->row_bytes;
        if (s->keep_lo != s->need_lo || s->keep_hi != s->need_hi)
            return 0;
        rows -= rows % kv->tile_rows;
        if (rows < g->max_tokens)
            steady = KV_MIN(steady, rows);
    }
    return (uint32_t)steady;
}

uint32_t vmem__kv_serves(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (!s->fresh || s->tokens || hi >= sp->hi || !kv_joined(kv, slot, group, hi))
        return sp->hi;
    while (kv_joined(kv, slot, group, hi))
        hi--;
    return hi;
}

void vmem__kv_set_backed(vmem_kv *kv, uint32_t slot)
{
    kv->slots[slot].steady = 0;
    uint64_t backed = kv->max_tokens;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *s = kv_span(kv, slot, i);
        uint64_t rows = s->lo < s->hi || !s->hi ? ((uint64_t)s->hi << kv->page_shift) / g->row_bytes : 0;
        rows -= rows % kv->tile_rows;
        if (rows < g->max_tokens)
            backed = KV_MIN(backed, rows);
    }
    kv->slots[slot].backed = (uint32_t)backed;
}

// `backed` cannot tell: a group may have pages while another has none, or less than a row.
bool vmem__kv_has_pages(const vmem_kv *kv, uint32_t slot)
{
    bool some = false;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        some |= kv_span(kv, slot, i)->lo < kv_span(kv, slot, i)->hi;
    return some;
}

// ---- the fixed part --------------------------------------------------------------------------------------------------

uint32_t vmem__kv_tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    from = KV_MAX(from, kv->slots[slot].fresh ? s->keep_hi : KV_MAX(s->keep_hi, s->coarse_hi));
    while (from < s->hi && kv_joined(kv, slot, group, from))
        from++;
    return KV_MIN(from, s->hi);
}

struct kv_past vmem__kv_fixed_part(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    if (!kv_accessed(kv, slot) || kv_swap_due(kv, slot))
        return (struct kv_past){s->lo, s->lo};
    return (struct kv_past){s->keep_lo, vmem__kv_tail(kv, slot, group, 0)};
}

// Pages [from, to) of a span enter the fixed part (by: 1), or leave it (-1). Those from shared_hi on have no other holder.
static void weigh(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to, uint32_t shared_hi, int by)
{
    uint32_t own = from < to ? to - from : 0;
    for (uint32_t p = from; p < KV_MIN(to, shared_hi); p++) {
        struct kv_ref *ref = kv_row(kv, slot, group, p);
        if (!ref)
            continue;
        vmem__kv_ref_use(kv, ref, by);
        own--;
    }
    kv->ledger.fixed += (uint64_t)((int64_t)own * kv->groups[group].n * by);
}

static void move_fixed(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_past to, uint32_t shared_hi)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    const struct kv_past from = {s->fix_lo, s->fix_hi};
    if (from.lo == to.lo && from.hi == to.hi)
        return;
    weigh(kv, slot, group, from.lo, KV_MIN(from.hi, to.lo), shared_hi, -1);
    weigh(kv, slot, group, KV_MAX(from.lo, to.hi), from.hi, shared_hi, -1);
    weigh(kv, slot, group, to.lo, KV_MIN(to.hi, from.lo), shared_hi, 1);
    weigh(kv, slot, group, KV_MAX(to.lo, from.hi), to.hi, shared_hi, 1);
}

void vmem__kv_fix(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    struct kv_span *s = kv_span(kv, slot, group);
    move_fixed(kv, slot, group, (struct kv_past){lo, hi}, s->shared_hi);
    s->fix_lo = lo;
    s->fix_hi = hi;
}

void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now)
{
    struct kv_span *s = kv_span(kv, slot, group);
    move_fixed(kv, slot, group, (struct kv_past){now->fix_lo, now->fix_hi}, KV_MAX(s->shared_hi, now->shared_hi));
    *s = *now;
}

void vmem__kv_book(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_past part = vmem__kv_fixed_part(kv, slot, i);
        vmem__kv_fix(kv, slot, i, part.lo, part.hi);
    }
}
