// Spans: what of a slot is mapped, what of that serves which steps, and which part no call could take back.
//
// SPDX-License-Identifier: MIT
#include "kv/kv.h"

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

bool vmem__kv_has_pages(const vmem_kv *kv, uint32_t slot)
{
    bool some = false;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        some |= kv_span(kv, slot, i)->lo < kv_span(kv, slot, i)->hi;
    return some;
}

// ---- the fixed part --------------------------------------------------------------------------------------------------

struct kv_range vmem__kv_fixed_part(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    if (!kv_accessed(kv, slot))
        return (struct kv_range){s->lo, s->lo};
    return kv_in_use(kv, slot, group, !kv->slots[slot].fresh);
}

uint32_t vmem__kv_tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from)
{
    return kv_end_of(kv, slot, group, KV_MAX(from, kv_span(kv, slot, group)->fix.hi), false);
}

// What leaves the fixed part, in front and behind, and what enters it.
struct change {
    uint32_t lo, hi;
    int by;
};

static void changes_of(const struct kv_span *s, struct kv_range to, struct change out[4])
{
    out[0] = (struct change){s->fix.lo, KV_MIN(s->fix.hi, to.lo), -1};
    out[1] = (struct change){KV_MAX(s->fix.lo, to.hi), s->fix.hi, -1};
    out[2] = (struct change){to.lo, KV_MIN(to.hi, s->fix.lo), 1};
    out[3] = (struct change){KV_MAX(to.lo, s->fix.hi), to.hi, 1};
}

// Pages from shared_hi on have no other holder.
static void weigh(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to, uint32_t shared_hi)
{
    struct change changes[4];
    changes_of(kv_span(kv, slot, group), to, changes);
    for (const struct change *c = changes; c < changes + 4; c++) {
        int64_t own = c->lo < c->hi ? c->hi - c->lo : 0;
        for (uint32_t p = c->lo; p < KV_MIN(c->hi, shared_hi); p++) {
            struct kv_ref *ref = vmem__kv_row(kv, slot, group, p);
            if (!ref)
                continue;
            vmem__kv_ref_hold(kv, ref, (struct kv_holders){.users = c->by});
            own--;
        }
        kv->ledger.fixed += (uint64_t)(own * c->by * kv->groups[group].n);
    }
}

int64_t vmem__kv_fix_delta(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    struct change changes[4];
    int64_t delta = 0;
    changes_of(s, to, changes);
    for (const struct change *c = changes; c < changes + 4; c++) {
        delta += c->lo < c->hi ? ((int64_t)c->hi - c->lo) * c->by : 0;
        for (uint32_t p = c->lo; p < KV_MIN(c->hi, s->shared_hi); p++) {
            const struct kv_ref *ref = vmem__kv_row(kv, slot, group, p);
            if (ref && (c->by < 0 || kv_row_fixed(ref)))
                delta -= c->by;
        }
    }
    return delta * kv->groups[group].n;
}

void vmem__kv_fix(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (s->fix.lo == to.lo && s->fix.hi == to.hi)
        return;
    weigh(kv, slot, group, to, s->shared_hi);
    s->fix = to;
}

static void set_backed(vmem_kv *kv, uint32_t slot)
{
    kv->slots[slot].steady = 0;
    uint32_t backed = kv->max_tokens;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *s = kv_span(kv, slot, i);
        const uint32_t rows = s->lo < s->hi ? kv_rows_before(kv, &kv->groups[i], s->hi) : 0;
        backed = KV_MIN(backed, rows);
    }
    kv->slots[slot].backed = backed;
    kv_list(kv, slot);
}

void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (s->fix.lo != now->fix.lo || s->fix.hi != now->fix.hi)
        weigh(kv, slot, group, now->fix, KV_MAX(s->shared_hi, now->shared_hi));
    *s = *now;
    set_backed(kv, slot);
}

void vmem__kv_book(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        vmem__kv_fix(kv, slot, i, vmem__kv_fixed_part(kv, slot, i));
}

// ---- the rule --------------------------------------------------------------------------------------------------------

int vmem__kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (from >= to || s->state == VMEM_KV_FREE || s->state == VMEM_KV_SWAPPED || s->fresh)
        return 0;
    if (from < sp->fix.hi && to > sp->fix.lo)
        return vmem__error(-EFAULT, "slot %u, pages [%u, %u) change while kernels may touch [%u, %u)", slot, from, to,
                           sp->fix.lo, sp->fix.hi);
    if (from < sp->coarse_hi && from % kv->block)
        return vmem__error(-EFAULT, "slot %u, page %u: a part of a 2 MiB entry changes beside kernels", slot, from);
    return 0;
}
