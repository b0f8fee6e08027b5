// Plans a step before anything changes: examines each slot's pages once, and counts the missing ones.
//
// SPDX-License-Identifier: MIT
#include "kv/request/request.h"

int vmem__kv_look_at_length(const vmem_kv *kv, uint32_t slot, int32_t tokens)
{
    const struct kv_slot *s = &kv->slots[slot];
    if (tokens < 0 || (uint32_t)tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "lengths[%u] %d is not between 0 and max_tokens, %u", slot, tokens, kv->max_tokens);
    if (s->state != VMEM_KV_ACTIVE)
        return vmem__error(-EINVAL, "lengths[%u] is %d, but the slot is %s", slot, tokens,
                           vmem__kv_state_name(s->state));
    if ((uint32_t)tokens < vmem__kv_shared_tokens(kv, slot))
        return vmem__error(-EINVAL, "lengths[%u] %d: rows below %u are shared; truncate the slot first", slot, tokens,
                           s->shared_tokens);
    return 0;
}

// Pages that the span lacks of [lo, hi). Pages that an earlier request left after a prefix do not help.
static uint32_t lacks(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (!kv_usable(sp, hi))
        return hi - lo;
    const uint32_t serves = vmem__kv_serves(kv, slot, group, hi);
    return (lo < sp->lo ? sp->lo - lo : 0) + (hi > serves ? hi - serves : 0);
}

static bool extends(const struct kv_slot *s, uint32_t tokens) { return s->fresh || tokens > s->backed; }

int vmem__kv_plan_slot(vmem_kv *kv, struct kv_plan *plan, uint32_t slot, uint32_t tokens)
{
    const struct kv_slot *s = &kv->slots[slot];
    int rc = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct kv_want *w = &plan->wants[plan->n++];
        w->slot = slot;
        w->group = i;
        w->lo = g->window ? vmem__kv_need_lo(kv, g, KV_MIN(s->tokens, tokens)) : 0;
        w->hi = vmem__kv_need_hi(kv, g, tokens);
        w->touched = kv_in_flight(kv, slot, i, (struct kv_past){w->lo, w->hi});
        w->extends = extends(s, tokens);
        if (w->extends)
            plan->missing += (uint64_t)lacks(kv, slot, i, w->lo, w->hi) * g->n;
        if (kv->windows && s->tokens && w->lo < kv_span(kv, slot, i)->keep_lo)
            rc = vmem__error(-EINVAL, "lengths[%u] %u: the window has given up rows that it reads", slot, tokens);
    }
    plan->extends |= extends(s, tokens);
    return rc;
}

void vmem__kv_plan_reset(struct kv_plan *plan)
{
    plan->n = plan->missing = 0;
    plan->extends = false;
}

// The fixed part after the step, as far as the span has pages for it now.
static inline struct kv_past part_of(const vmem_kv *kv, const struct kv_want *w)
{
    const struct kv_span *sp = kv_span(kv, w->slot, w->group);
    const bool fresh = kv->slots[w->slot].fresh;
    const uint32_t serves = fresh ? vmem__kv_serves(kv, w->slot, w->group, w->hi) : sp->hi;
    const uint32_t hi = KV_MIN(KV_MAX(w->touched.hi, sp->lo), serves), lo = KV_MIN(KV_MAX(w->touched.lo, sp->lo), hi);
    return (struct kv_past){lo, kv_end_of(kv, w->slot, w->group, hi, !fresh)};
}

int64_t vmem__kv_plan_delta(const vmem_kv *kv, const struct kv_plan *plan)
{
    int64_t delta = (int64_t)plan->missing;
    const struct kv_want *end = plan->wants + plan->n;
    for (const struct kv_want *w = plan->wants; w < end; w++)
        delta += kv_fix_delta(kv, w->slot, w->group, part_of(kv, w));
    return delta;
}

// Finds the slots for which the step needs other pages than the last one did.
static int find_changed(vmem_kv *kv, const int32_t *lengths, uint32_t *n)
{
    const struct kv_slot *sl = kv->slots;
    *n = 0;
    for (uint32_t s = 0, all = kv->n_slots; s < all; s++, sl++) {
        const uint32_t tokens = (uint32_t)lengths[s];
        if (!tokens || (tokens >= sl->tokens && tokens <= sl->steady))
            continue;
        int rc = kv_check_length(kv, s, lengths[s]);
        if (rc)
            return rc;
        kv->plan.changed[(*n)++] = s;
        __builtin_prefetch(kv_span(kv, s, 0)); // the spans are far apart, and the CPU cannot predict the access
    }
    return 0;
}

// Waits until the worker is at none of the slots that are to be extended; whether it had to: the lock was dropped then.
static bool wait_for_changed(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++) {
        const uint32_t s = kv->plan.changed[k];
        if (kv->slots[s].busy && extends(&kv->slots[s], (uint32_t)lengths[s])) {
            vmem__kv_wait_slot(kv, s);
            return true;
        }
    }
    return false;
}

int vmem__kv_plan(vmem_kv *kv, struct kv_plan *plan, const int32_t *lengths, bool *waited)
{
    uint32_t n;
    vmem__kv_plan_reset(plan);
    int rc = find_changed(kv, lengths, &n);
    while (!rc && waited && wait_for_changed(kv, lengths, n)) {
        *waited = true;
        rc = find_changed(kv, lengths, &n);
    }
    for (uint32_t k = 0; k < n && !rc; k++)
        rc = vmem__kv_plan_slot(kv, plan, kv->plan.changed[k], (uint32_t)lengths[kv->plan.changed[k]]);
    return rc;
}

void vmem__kv_plan_enter(vmem_kv *kv, const struct kv_plan *plan)
{
    for (const struct kv_want *w = plan->wants; w < plan->wants + plan->n; w++)
        vmem__kv_fix(kv, w->slot, w->group, part_of(kv, w));
}

void vmem__kv_plan_leave(vmem_kv *kv, const struct kv_plan *plan)
{
    for (uint64_t k = 0; k < plan->n; k += kv->n_groups)
        vmem__kv_book(kv, plan->wants[k].slot);
}

int vmem__kv_plan_check(vmem_kv *kv, const int32_t *lengths)
{
    struct kv_plan *plan = &kv->plan;
    int rc = vmem__kv_plan(kv, plan, lengths, NULL);
    return rc ? rc : vmem__kv_would_fit(kv, vmem__kv_plan_delta(kv, plan), plan->missing);
}

void vmem__kv_restage(vmem_kv *kv, uint32_t slot)
{
    const int32_t tokens = kv->staged.lengths[slot];
    vmem__kv_plan_reset(&kv->plan);
    if (tokens && !vmem__kv_plan_slot(kv, &kv->plan, slot, (uint32_t)tokens))
        kv_stage(kv, slot, tokens, vmem__kv_plan_delta(kv, &kv->plan));
}

int vmem__kv_check_dry(uint32_t flags)
{
    return flags & ~VMEM_KV_DRY ? vmem__error(-EINVAL, "flags %#x has unknown bits", flags) : 0;
}

int vmem__kv_check_lengths(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    if (!lengths)
        return vmem__error(-EINVAL, "lengths must not be NULL");
    if (n != kv->n_slots)
        return vmem__error(-EINVAL, "n %u is out of range: the cache has %u slots", n, kv->n_slots);
    return 0;
}

int vmem__kv_would_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint32_t flags)
{
    if (flags & ~(VMEM_KV_DRY | VMEM_KV_ASSURED))
        return vmem__error(-EINVAL, "flags %#x has unknown bits", flags);
    if (!(flags & VMEM_KV_ASSURED))
        vmem__kv_take_wanted(kv);
    int rc = vmem__kv_check_lengths(kv, lengths, n);
    if (!rc && flags & VMEM_KV_ASSURED && kv->ledger.promise < kv->ledger.budget)
        rc = vmem__error(-ENOMEM, "the cache takes memory when it is needed");
    return rc ? rc : vmem__kv_plan_check(kv, lengths);
}
