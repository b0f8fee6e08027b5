// Spans: what of a slot is mapped, what of that serves which steps.
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
