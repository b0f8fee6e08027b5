// Allocates and frees slots.
//
// SPDX-License-Identifier: MIT
#include "core/struct.h"
#include "kv/kv.h"

// Whether kept pages for `fit` tokens suit a request of `tokens` tokens better than kept pages for `best` tokens. The
// best fit is the smallest that is large enough, or otherwise the largest.
bool vmem__kv_fits_better(uint32_t fit, uint32_t best, uint32_t tokens)
{
    return fit >= tokens ? best < tokens || fit < best : best < tokens && fit > best;
}

// The gain of using the slot for a request that begins with a prefix. It is the number of tokens behind the prefix that
// the slot has pages for, less the number of tokens whose pages the prefix would replace.
static int64_t gain_of(const struct kv_idle *s, uint32_t fit, uint32_t tokens, uint32_t prefix_tokens)
{
    int64_t used = (int64_t)KV_MIN(tokens, fit) - KV_MAX(prefix_tokens, s->from);
    int64_t lost = (int64_t)KV_MIN(prefix_tokens, fit) - s->from;
    return KV_MAX(used, 0) - KV_MAX(lost, 0);
}

// Whether a request must wait for the slot or for an unmap. This depends on the worker's progress.
static bool delays(const vmem_kv *kv, uint32_t slot)
{
    return !(kv->flags & VMEM_KV_SAME_SLOTS) && (kv->slots[slot].busy || kv->slots[slot].stale);
}

uint32_t vmem__kv_choose(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens)
{
    uint32_t best = UINT32_MAX, best_fit = 0;
    if (!tokens)
        tokens = kv->eager_tokens;
    int64_t best_gain = INT64_MIN;
    for (uint32_t i = 0; i < kv->n_slots; i++) {
        const struct kv_idle *s = &kv->idle[i];
        if (kv->slots[i].state != VMEM_KV_FREE)
            continue;
        uint32_t fit = kv->flags & VMEM_KV_SAME_SLOTS ? s->fit : kv->slots[i].backed;
        int64_t gain = prefix_tokens ? gain_of(s, fit, tokens, prefix_tokens) : 0;
        if (prefix_tokens)
            fit = 0;
        else if (s->from) // the pages begin after the first row: count the usable ones
            fit = s->from < KV_MIN(tokens, fit) ? KV_MIN(tokens, fit) - s->from : 0;
        const bool alike = best != UINT32_MAX && gain == best_gain && fit == best_fit;
        if (best == UINT32_MAX || gain > best_gain || vmem__kv_fits_better(fit, best_fit, tokens) ||
            (alike && (delays(kv, i) == delays(kv, best) ? s->from < kv->idle[best].from : delays(kv, best)))) {
            best = i;
            best_fit = fit;
            best_gain = gain;
        }
    }
    return best;
}

int vmem__kv_clear_slot(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *s = kv_span(kv, slot, i);
        for (uint32_t t = 0; t < g->n && s->lo < s->hi; t++) {
            uint64_t length = (uint64_t)(s->hi - s->lo) << kv->page_shift;
            int rc = vmem_fill(kv->ctx, kv_addr(kv, g, slot, t, s->lo), 0, length);
            if (rc)
                return rc;
            kv->zeroed_bytes += length;
        }
    }
    return 0;
}

int vmem_kv_alloc_with(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot)
{
    struct vmem_kv_alloc_options o;
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (!options || !slot)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "options and slot must not be NULL"));
    rc = vmem__struct_take(&o, sizeof o, sizeof o, options, "options");
    if (rc)
        return vmem__kv_leave(kv, rc);
    bool wanted = o.flags & VMEM_KV_ALLOC_SLOT;
    if (o.flags & ~VMEM_KV_ALLOC_SLOT)
        rc = vmem__error(-EINVAL, "flags %#x has unknown bits", o.flags);
    else if (o.tokens > kv->max_tokens || o.prefix_tokens > kv->max_tokens)
        rc =
            vmem__error(-EINVAL, "%s %u is over max_tokens, %u", o.tokens > kv->max_tokens ? "tokens" : "prefix_tokens",
                        KV_MAX(o.tokens, o.prefix_tokens), kv->max_tokens);
    else if (wanted && o.slot >= kv->n_slots)
        rc = vmem__error(-EINVAL, "slot %u: there are %u", o.slot, kv->n_slots);
    else if (wanted && kv->slots[o.slot].state != VMEM_KV_FREE)
        rc = vmem__error(-EBUSY, "slot %u is taken", o.slot);
    if (rc)
        return vmem__kv_leave(kv, rc);
    uint32_t chosen = wanted ? o.slot : vmem__kv_choose(kv, o.tokens, o.prefix_tokens);
    if (chosen == UINT32_MAX) {
        kv->stats.short_slots++;
        return vmem__kv_leave(kv, vmem__kv_short_of_slots(kv));
    }
    vmem__kv_wait_slot(kv, chosen);
    struct kv_slot *s = &kv->slots[chosen];
    s->state = VMEM_KV_ACTIVE;
    s->tokens = s->shared_tokens = 0;
    s->fresh = true;
    s->skip = s->stuck = false;
    s->took = (uint32_t)kv->step;
    kv->stats.allocs++;
    kv->stats.adopted_slots += s->backed > 0;
    *slot = chosen;
    vmem__kv_worker_wake(kv); // it prepares the next slot
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_alloc(vmem_kv *kv, uint32_t tokens, uint32_t *slot)
{
    const struct vmem_kv_alloc_options o = {.size = sizeof o, .tokens = tokens};
    return vmem_kv_alloc_with(kv, &o, slot);
}

// `backed` cannot tell: a group may have pages while another has none, or less than a row.
static bool has_pages(const vmem_kv *kv, uint32_t slot)
{
    bool some = false;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        some |= kv_span(kv, slot, i)->lo < kv_span(kv, slot, i)->hi;
    return some;
}

void vmem__kv_keep_budget(vmem_kv *kv)
{
    if (kv->held <= kv->budget_pages || kv->giving)
        return;
    vmem__kv_worker_hold(kv);
    if (kv->held > kv->budget_pages) // the worker may have reclaimed pages meanwhile
        vmem__kv_reclaim(kv, kv->held - kv->budget_pages, true, NULL);
    vmem__kv_worker_release(kv);
}

int vmem__kv_free(vmem_kv *kv, uint32_t slot)
{
    int rc = 0;
    struct kv_slot *s = &kv->slots[slot];
    const bool fresh = s->fresh, due = kv_swap_due(kv, slot);
    const bool waits = s->state == VMEM_KV_ENDING || s->state == VMEM_KV_SWAPPING;
    s->fresh = true;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        rc = kv->flags & VMEM_KV_DEFER ? vmem__kv_park(kv, slot, i) : vmem__kv_cut_now(kv, slot, i, 0, 0);
    if (rc) {
        s->fresh = fresh;
        return rc;
    }
    vmem__kv_forget(kv, slot);
    vmem__kv_hash_unpin(kv, slot);
    s->dirty = kv->flags & VMEM_KV_ZERO && has_pages(kv, slot);
    struct kv_idle *idle = &kv->idle[slot];
    idle->fit = kv->flags & VMEM_KV_DEFER ? s->tokens : 0;
    // A slot that is due counts as swapped out, whether or not it has been copied. So it shares nothing.
    // With hashes, the rows that are really shared depend on what this manager has evicted.
    const bool named = kv->flags & VMEM_KV_SAME_SLOTS && kv->hashes;
    idle->from = kv->flags & VMEM_KV_DEFER && !due ? (named ? idle->named : s->shared_tokens) : 0;
    idle->named = 0;
    for (uint32_t i = 0; i < kv->n_groups && !(kv->flags & VMEM_KV_SAME_SLOTS); i++)
        idle->from = KV_MAX(idle->from, (uint32_t)(((uint64_t)kv_span(kv, slot, i)->lo << kv->page_shift) /
                                                   kv->groups[i].row_bytes));
    s->state = VMEM_KV_FREE;
    s->tokens = s->shared_tokens = 0;
    s->skip = s->stuck = false;
    idle->parked = ++kv->clock;
    kv->n_ending -= waits;
    vmem__kv_worker_wake(kv);
    return 0;
}

int vmem_kv_free(vmem_kv *kv, uint32_t slot)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED | 1u << VMEM_KV_SWAPPING);
    rc = rc ? rc : vmem__kv_free(kv, slot);
    if (!rc)
        vmem__kv_keep_budget(kv);
    return vmem__kv_leave(kv, rc);
}

int vmem__kv_check_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && tokens > kv->slots[slot].tokens)
        rc = vmem__error(-EINVAL, "tokens %u: slot %u has %u", tokens, slot, kv->slots[slot].tokens);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        if (vmem__kv_need_lo(kv, &kv->groups[i], tokens) < vmem__kv_has_from(kv, slot, i))
            rc = vmem__error(-ENODATA, "tokens %u: the window has given up rows that the next one reads", tokens);
    return rc;
}

// Between these two calls, nothing reclaims rows that the slot reads when it is truncated to `tokens`, though the window
// of the longer request has passed them. The plan of the call stores what the spans said.
static void keep_rows(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        kv->plan.wants[i].keep_lo = sp->keep_lo;
        sp->keep_lo = KV_MIN(sp->keep_lo, KV_MAX(vmem__kv_need_lo(kv, &kv->groups[i], tokens), sp->lo));
    }
}

static void restore_kept(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->keep_lo = KV_MIN(kv->plan.wants[i].keep_lo, sp->need_lo);
    }
}

int vmem_kv_truncate_check(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *missing)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    const bool held = vmem__kv_hold_to_count(kv); // from here on, no other thread sees the slot as the truncation would
    rc = vmem__kv_check_truncate(kv, slot, tokens);
    if (!rc) {
        const bool fresh = kv->slots[slot].fresh;
        kv->slots[slot].fresh = true;
        keep_rows(kv, slot, tokens);
        rc = vmem__kv_would_fit(kv, vmem__kv_unshare_pages(kv, slot, tokens), missing);
        restore_kept(kv, slot);
        kv->slots[slot].fresh = fresh;
    }
    if (held)
        vmem__kv_worker_release(kv);
    return vmem__kv_leave(kv, rc);
}

int vmem__kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *s = &kv->slots[slot];
    s->fresh = true; // the caller guarantees that no kernel accesses the slot
    vmem__kv_enough();
    keep_rows(kv, slot, tokens);
    int rc = vmem__kv_unshare(kv, slot, tokens);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    if (rc) {
        restore_kept(kv, slot);
        return rc;
    }
    vmem__kv_forget(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t hi = KV_MIN(vmem__kv_need_hi(kv, &kv->groups[i], tokens), sp->hi);
        sp->need_lo = sp->keep_lo = KV_MIN(vmem__kv_need_lo(kv, &kv->groups[i], tokens), hi);
        sp->need_hi = sp->keep_hi = hi;
    }
    s->tokens = tokens;
    s->steady = 0;
    s->shared_tokens = KV_MIN(s->shared_tokens, tokens);
    kv->idle[slot].named = KV_MIN(kv->idle[slot].named, tokens);
    return 0;
}

int vmem_kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_check_truncate(kv, slot, tokens);
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_truncate(kv, slot, tokens));
}

int vmem_kv_get_slot(vmem_kv *kv, uint32_t slot, struct vmem_kv_slot_info *out)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = out ? vmem__kv_get(kv, slot, ~0u) : vmem__error(-EINVAL, "out must not be NULL");
    if (rc)
        return vmem__kv_leave(kv, rc);
    const struct kv_slot *s = &kv->slots[slot];
    struct vmem_kv_slot_info info = {.state = s->state, .tokens = s->tokens, .shared_tokens = s->shared_tokens};
    info.absent_steps = s->state == VMEM_KV_ACTIVE ? kv_absent(kv, slot) : 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *sp = kv_span(kv, slot, i);
        info.pages += (uint64_t)(sp->hi - sp->lo) * g->n;
        info.needed_pages += (uint64_t)(sp->need_hi - sp->need_lo) * g->n;
        info.shared_pages += (uint64_t)vmem__kv_rows_shared(kv, slot, i, sp->lo, KV_MIN(sp->shared_hi, sp->hi)) * g->n;
    }
    return vmem__kv_leave(kv, vmem__struct_give(out, &info, sizeof info, "out"));
}

int vmem_kv_wait(vmem_kv *kv)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_wait_idle(kv);
    return vmem__kv_leave(kv, 0);
}
