// Spans: the mapped, usable and pinned page ranges of a slot.
//
// SPDX-License-Identifier: MIT
#include "kv/kv.h"

uint32_t vmem__kv_usable_end(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (!s->fresh || s->tokens || hi >= sp->hi || !kv_joined(kv, slot, group, hi))
        return sp->hi;
    while (kv_joined(kv, slot, group, hi))
        hi--;
    return hi;
}

// ---- the pinned part --------------------------------------------------------------------------------------------------

struct kv_range vmem__kv_pinned_part(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    if (!kv_accessed(kv, slot))
        return (struct kv_range){s->lo, s->lo};
    return kv_in_use(kv, slot, group, !kv->slots[slot].fresh);
}

uint32_t vmem__kv_tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from)
{
    return kv_end_of(kv, slot, group, MAX(from, kv_span(kv, slot, group)->pinned.hi), false);
}

// Pages [lo, hi) that enter (by 1) or leave (-1) the pinned part.
struct change {
    uint32_t lo, hi;
    int by;
};

static void changes_of(const struct kv_span *s, struct kv_range to, struct change out[4])
{
    out[0] = (struct change){s->pinned.lo, MIN(s->pinned.hi, to.lo), -1};
    out[1] = (struct change){MAX(s->pinned.lo, to.hi), s->pinned.hi, -1};
    out[2] = (struct change){to.lo, MIN(to.hi, s->pinned.lo), 1};
    out[3] = (struct change){MAX(to.lo, s->pinned.hi), to.hi, 1};
}

// Counts the change of the pinned part to `to` in the ledger and in the shared rows. Pages from shared_hi on have no
// other holder.
static void account_change(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to, uint32_t shared_hi)
{
    struct change changes[4];
    changes_of(kv_span(kv, slot, group), to, changes);
    for (const struct change *c = changes; c < changes + 4; c++) {
        int64_t own = c->lo < c->hi ? c->hi - c->lo : 0;
        for (uint32_t p = c->lo; p < MIN(c->hi, shared_hi); p++) {
            struct kv_shared_row *ref = vmem__kv_row(kv, slot, group, p);
            if (!ref)
                continue;
            vmem__kv_change_holders(kv, ref, (struct kv_holders){.pinning_slots = c->by});
            own--;
        }
        kv->ledger.pinned_pages += (uint64_t)(own * c->by * kv->groups[group].n);
    }
}

int64_t vmem__kv_pinned_delta(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    struct change changes[4];
    int64_t delta = 0;
    if (kv_at_own_end(s, to))
        return ((int64_t)to.hi - s->pinned.hi) * kv->groups[group].n;
    changes_of(s, to, changes);
    for (const struct change *c = changes; c < changes + 4; c++) {
        delta += c->lo < c->hi ? ((int64_t)c->hi - c->lo) * c->by : 0;
        for (uint32_t p = c->lo; p < MIN(c->hi, s->shared_hi); p++) {
            const struct kv_shared_row *ref = vmem__kv_row(kv, slot, group, p);
            if (ref && (c->by < 0 || kv_row_pinned(ref)))
                delta -= c->by;
        }
    }
    return delta * kv->groups[group].n;
}

void vmem__kv_set_pinned(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (s->pinned.lo == to.lo && s->pinned.hi == to.hi)
        return;
    account_change(kv, slot, group, to, s->shared_hi);
    s->pinned = to;
}

static void set_backed(vmem_kv *kv, uint32_t slot)
{
    kv->slots[slot].same_pages_until = 0;
    uint32_t backed = kv->max_tokens;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *s = kv_span(kv, slot, i);
        const uint32_t rows = s->lo < s->hi ? kv_rows_before(kv, &kv->groups[i], s->hi) : 0;
        backed = MIN(backed, rows);
    }
    kv->slots[slot].backed = backed;
    kv_list(kv, slot);
}

void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (s->pinned.lo != now->pinned.lo || s->pinned.hi != now->pinned.hi)
        account_change(kv, slot, group, now->pinned, MAX(s->shared_hi, now->shared_hi));
    *s = *now;
    set_backed(kv, slot);
}

void vmem__kv_update_pinned(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        vmem__kv_set_pinned(kv, slot, i, vmem__kv_pinned_part(kv, slot, i));
}

// ---- the kernel rule -------------------------------------------------------------------------------------------------

int vmem__kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (from >= to || s->state == VMEM_KV_FREE || s->state == VMEM_KV_SWAPPED || s->fresh)
        return 0;
    if (from < sp->pinned.hi && to > sp->pinned.lo)
        return vmem__error(-EFAULT, "slot %u, pages [%u, %u) change while kernels may touch [%u, %u)", slot, from, to,
                           sp->pinned.lo, sp->pinned.hi);
    if (from < sp->coarse_hi && from % kv->block_pages)
        return vmem__error(-EFAULT, "slot %u, page %u: a part of a 2 MiB entry changes beside kernels", slot, from);
    return 0;
}
