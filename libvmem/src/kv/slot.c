// Slots: the sets that list them, their states, and the mapped and pinned page ranges of each (spans). Chooses a free
// slot for a request.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/kv.h"

// ---- sets ------------------------------------------------------------------------------------------------------------

int vmem__kv_make_sets(vmem_kv *kv)
{
    const uint64_t words = (kv->n_slots + 63) / 64;
    uint64_t *bits = calloc((KV_LISTS + 1) * words, sizeof(*bits));
    if (!bits)
        return vmem__error(-ENOMEM, "no memory for %u slots", kv->n_slots);
    for (uint32_t i = 0; i < KV_LISTS; i++, bits += words)
        kv->lists[i] = bits;
    kv->stale_slots = bits;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        vmem__kv_set_add(kv->lists[0], s);
    return 0;
}

void vmem__kv_set_add(uint64_t *set, uint32_t slot) { set[slot / 64] |= UINT64_C(1) << slot % 64; }

void vmem__kv_set_remove(uint64_t *set, uint32_t slot) { set[slot / 64] &= ~(UINT64_C(1) << slot % 64); }

uint32_t vmem__kv_set_next(const vmem_kv *kv, const uint64_t *set, uint32_t from)
{
    uint64_t before = ~(UINT64_MAX << from % 64); // bits of the first word
    for (uint32_t i = from / 64; i * 64 < kv->n_slots; i++, before = 0)
        if (set[i] & ~before)
            return i * 64 + (uint32_t)__builtin_ctzll(set[i] & ~before);
    return KV_NO_SLOT;
}

// Moves a slot to its list after a change of its state or of `backed`.
static inline void update_list(vmem_kv *kv, uint32_t slot)
{
    const uint8_t list = kv_list_of(&kv->slots[slot]);
    if (list == kv->slots[slot].list)
        return;
    vmem__kv_set_remove(kv->lists[kv->slots[slot].list], slot);
    vmem__kv_set_add(kv->lists[list], slot);
    kv->slots[slot].list = list;
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
    const struct kv_span *s = kv_span(kv, slot, group);
    return MIN(MAX(from, s->pinned.hi), s->hi);
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
    update_list(kv, slot);
}

void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (s->pinned.lo != now->pinned.lo || s->pinned.hi != now->pinned.hi)
        account_change(kv, slot, group, now->pinned, MAX(s->shared_hi, now->shared_hi));
    kv->ledger.spanned += ((uint64_t)(now->hi - now->lo) - (s->hi - s->lo)) * kv->groups[group].n;
    *s = *now;
    set_backed(kv, slot);
}

void vmem__kv_update_pinned(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        vmem__kv_set_pinned(kv, slot, i, vmem__kv_pinned_part(kv, slot, i));
}

// ---- states, and the choice of a free slot ------------------------------------------------------------------------------

// The row at which a free slot's pages begin; the rows before it were a prefix's.
static uint32_t first_kept_row(const vmem_kv *kv, uint32_t slot)
{
    uint64_t row = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        row = MAX(row, ((uint64_t)kv_span(kv, slot, i)->lo << kv->page_shift) / kv->groups[i].row_bytes);
    return (uint32_t)row;
}

// How badly a free slot fits a request: the slot with the smallest numbers, the first of them first, fits best.
struct misfit {
    int64_t by[5];
};

static struct misfit misfit_of(const vmem_kv *kv, uint32_t slot, uint32_t tokens, uint32_t prefix_tokens)
{
    const struct kv_slot *s = &kv->slots[slot];
    const int64_t has = s->backed, from = first_kept_row(kv, slot), prefix = prefix_tokens;
    const int64_t used = MIN((int64_t)tokens, has) - MAX(prefix, from), lost = MIN(prefix, has) - from;
    return (struct misfit){{
        MAX(lost, 0) -
            MAX(used, 0),    // kept rows that the prefix would replace, minus those that the request could reuse
        prefix ? 0 : has,    // rows that the slot has kept; a prefix replaces them
        s->busy || s->stale, // the request would wait for the worker, or for an unmap
        from,
        slot,
    }};
}

static bool is_better(const struct misfit *a, const struct misfit *b)
{
    int i = 0;
    while (i < 4 && a->by[i] == b->by[i])
        i++;
    return a->by[i] < b->by[i];
}

#define LOOKS 16 // slots examined in each list: those of one list have about equally many pages
uint32_t vmem__kv_choose_slot(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens)
{
    uint32_t best = KV_NO_SLOT;
    struct misfit least = {{0}};
    if (!tokens)
        tokens = kv->eager_tokens;
    for (uint32_t list = 0; list < KV_FREE_LISTS; list++) {
        uint32_t looks = 0;
        for (uint32_t s = 0; (s = vmem__kv_set_next(kv, kv->lists[list], s)) != KV_NO_SLOT && looks < LOOKS; s++) {
            const struct misfit one = misfit_of(kv, s, tokens, prefix_tokens);
            if (best == KV_NO_SLOT || is_better(&one, &least)) {
                best = s;
                least = one;
            }
            looks++;
        }
    }
    return best;
}

const char *vmem__kv_state_name(uint8_t state)
{
    static const char *const names[] = {"free", "active", "swapped out", "being given up"};
    return names[state];
}

void vmem__kv_set_state(vmem_kv *kv, uint32_t slot, uint8_t state)
{
    struct kv_slot *s = &kv->slots[slot];
    kv->in_state[s->state]--;
    kv->in_state[state]++;
    s->state = state;
    s->same_pages_until = 0;
    update_list(kv, slot);
    vmem__kv_update_pinned(kv, slot);
}

int vmem__kv_check_slot(const vmem_kv *kv, uint32_t slot, uint32_t states)
{
    if (slot >= kv->n_slots)
        return vmem__error(-EINVAL, "slot %u is out of range: the cache has %u slots", slot, kv->n_slots);
    if (!(states >> kv->slots[slot].state & 1))
        return vmem__error(-EINVAL, "slot %u is %s", slot, vmem__kv_state_name(kv->slots[slot].state));
    return 0;
}

int vmem__kv_use_slot(vmem_kv *kv, uint32_t slot, uint32_t states)
{
    int rc = vmem__kv_check_slot(kv, slot, states);
    if (!rc)
        vmem__kv_wait_slot(kv, slot);
    return rc;
}
