// The step before an iteration: executes a plan (plan.c), so that every row up to the lengths has a page.
//
// SPDX-License-Identifier: MIT
#include <string.h>

#include "kv/request/request.h"

// A request's first step: keeps the slot's pages as far as they can later be released in small pieces.
static int adopt(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *s = &kv->slots[slot];
    int failed = vmem__kv_stale_now(kv, slot);
    if (failed)
        return failed;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t hi = vmem__kv_need_hi(kv, &kv->groups[i], tokens);
        if (sp->coarse_hi > hi || !kv_usable(sp, hi)) {
            int rc = vmem__kv_cut_now(kv, slot, i, sp->lo, KV_MIN(hi, vmem__kv_serves(kv, slot, i, hi)));
            if (rc)
                return rc;
        }
        if (!s->tokens && kv_usable(sp, hi))
            kv->stats.adopted_pages += (uint64_t)(KV_MIN(hi, sp->hi) - sp->lo) * kv->groups[i].n;
    }
    if (s->dirty) {
        int rc = vmem__kv_clear_slot(kv, slot);
        if (rc)
            return rc;
        s->dirty = false;
    }
    return 0;
}

// Pages that may be mapped beyond the missing ones. While memory is plentiful, these complete 2 MiB blocks, because a
// call that maps many pages takes as long as a call for one.
static uint64_t spare_for(const vmem_kv *kv, uint64_t missing)
{
    uint64_t unused = kv_unused(kv), reserve = 2 * kv_low(kv) + missing;
    uint64_t spare = kv->flags & VMEM_KV_GENEROUS && !kv->lend.giving && unused > reserve ? unused - reserve : 0;
    return spare && vmem__kv_leaves_others(kv, missing + spare) ? spare : 0;
}

// Lists the parts of spans to back, with up to `spare` pages beyond the missing ones.
static int list_parts(vmem_kv *kv, const struct kv_plan *plan, uint64_t spare)
{
    vmem__kv_grow_reset(&kv->grow);
    for (uint64_t k = 0; k < plan->n; k++) {
        const struct kv_want *w = &plan->wants[k];
        const struct kv_group *g = &kv->groups[w->group];
        const struct kv_span *sp = kv_span(kv, w->slot, w->group);
        if (!w->extends || (sp->lo < sp->hi && sp->lo <= w->lo && w->hi <= sp->hi))
            continue;
        uint32_t to = KV_MIN((w->hi + kv->block - 1) / kv->block * kv->block, g->slot_pages);
        uint64_t extra = (uint64_t)(to - w->hi) * g->n;
        if (extra > spare || w->hi <= sp->hi)
            to = w->hi;
        else
            spare -= extra;
        int rc = vmem__kv_grow_to(kv, &kv->grow, w->slot, w->group, w->lo, to, w->hi);
        if (rc)
            return rc;
    }
    return 0;
}

// Whether the budget has room for what the step fixes. Where it has room for every page, nothing need be counted.
static int lacks(vmem_kv *kv, const struct kv_plan *plan)
{
    if (kv->ledger.held + plan->missing <= kv->ledger.budget)
        return 0;
    const int64_t delta = vmem__kv_plan_delta(kv, plan);
    return plan->extends || delta > 0 ? vmem__kv_lacks(kv, delta, plan->missing) : 0;
}

static int back(vmem_kv *kv, struct kv_plan *plan, const int32_t *lengths)
{
    vmem__kv_enough();
    int rc = lacks(kv, plan);
    if (!rc && !vmem__kv_has_room(kv, plan->missing)) { // take pages back, but not those that the step needs
        vmem__kv_plan_enter(kv, plan);
        rc = vmem__kv_take_room(kv, plan->missing);
    }
    for (uint64_t k = 0; k < plan->n && !rc; k += kv->n_groups) {
        const uint32_t slot = plan->wants[k].slot;
        if (kv->slots[slot].fresh)
            rc = adopt(kv, slot, (uint32_t)lengths[slot]);
    }
    if (!rc)
        rc = list_parts(kv, plan, spare_for(kv, plan->missing));
    uint64_t total = rc ? 0 : kv->grow.total;
    if (total)
        rc = vmem__kv_grow_try(kv, &kv->grow);
    if (rc == -ENOMEM && total) { // the device has less than the budget: back only what is needed
        vmem__kv_plan_enter(kv, plan);
        rc = list_parts(kv, plan, 0);
        total = kv->grow.total;
        if (!rc)
            rc = vmem__kv_grow_all(kv, &kv->grow);
    }
    if (rc) {
        vmem__kv_grow_reset(&kv->grow);
        vmem__kv_plan_leave(kv, plan);
        return rc;
    }
    vmem__kv_unask(kv);
    kv->stats.step_maps += total != 0;
    kv->stats.step_mapped_pages += total;
    return 0;
}

// Records in the spans what kernels of the step access, and what kernels of earlier steps may still access.
static void set_needs(vmem_kv *kv, const struct kv_plan *plan)
{
    uint32_t steady = 0;
    const struct kv_want *end = plan->wants + plan->n;
    for (const struct kv_want *w = plan->wants; w < end; w++) {
        struct kv_span *sp = kv_span(kv, w->slot, w->group);
        struct kv_slot *s = &kv->slots[w->slot];
        const uint32_t keep_lo = KV_MAX(w->touched.lo, sp->lo), keep_hi = KV_MIN(w->touched.hi, sp->hi);
        const uint32_t rows = kv_rows_before(kv, &kv->groups[w->group], w->hi);
        vmem__kv_remember(kv, w->slot, w->group);
        sp->keep_lo = keep_lo;
        sp->keep_hi = keep_hi;
        sp->need_lo = w->lo;
        sp->need_hi = w->hi;
        kv_fix(kv, w->slot, w->group, (struct kv_past){keep_lo, kv_end_of(kv, w->slot, w->group, keep_hi, true)});
        if (!w->group)
            steady = kv->windows ? 0 : kv->max_tokens;
        steady = keep_lo == w->lo && keep_hi == w->hi ? KV_MIN(steady, rows) : 0;
        s->steady = steady;
        s->fresh = false; // kernels access the slot from now on
    }
}

static void commit(vmem_kv *kv, const struct kv_plan *plan, const int32_t *lengths)
{
    bool due = false;
    bool plenty = kv->flags & VMEM_KV_GENEROUS && kv_plentiful(kv);
    uint32_t ahead = plenty ? kv->ahead_tokens : kv->ahead_min;
    const uint32_t step = (uint32_t)++kv->fence.step, most = kv->max_tokens;
    const bool windows = kv->windows;
    set_needs(kv, plan);
    struct kv_slot *sl = kv->slots;
    for (uint32_t s = 0, n = kv->n_slots; s < n; s++, sl++) {
        const uint32_t tokens = (uint32_t)lengths[s];
        if (!tokens)
            continue;
        sl->tokens = tokens;
        sl->took = step;
        sl->skip = sl->stuck = false;
        due |= sl->backed < most && sl->backed < (uint64_t)tokens + ahead;
        if (windows) {
            vmem__kv_pass_windows(kv, s); // if it fails, the next step does it
            for (uint32_t i = 0; i < kv->n_groups; i++)
                due |= kv_span(kv, s, i)->lo < kv_span(kv, s, i)->keep_lo;
        }
    }
    if (due)
        vmem__kv_worker_wake(kv);
}

// What the kernels that have ended kept waiting. A step that is none ends nothing: -EINVAL.
static int __attribute__((noinline)) end_before(vmem_kv *kv, const int32_t *lengths)
{
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        int rc = kv_check_length(kv, s, lengths[s]);
        if (rc)
            return rc;
    }
    vmem__kv_may_take_long(kv);
    // The kernels of so many steps may be running now. Should it fail, it is done at the next step.
    vmem__kv_retired(kv, KV_MAX(kv->fence.retired, kv_less(kv->fence.step, kv->steps_in_flight)));
    vmem__kv_end_requests(kv);
    return 0;
}

static int do_step(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    struct kv_plan *plan = &kv->plan;
    bool waited = false;
    int rc = vmem__kv_check_lengths(kv, lengths, n);
    const bool ends = kv_waiting(kv);
    if (ends && !rc)
        rc = end_before(kv, lengths);
    if (!rc)
        rc = vmem__kv_plan(kv, plan, lengths, &waited);
    if (rc || plan->extends || kv->windows)
        vmem__kv_may_take_long(kv);
    if (!rc && plan->extends)
        rc = back(kv, plan, lengths);
    else if (!rc) // its pages are mapped, but they could be taken back
        rc = lacks(kv, plan);
    kv->stats.steps++;
    kv->stats.step_waits += waited;
    if (rc) {
        kv->stats.step_failures++;
        if (rc == -ENOMEM)
            vmem__kv_count_shortage(kv);
    } else {
        commit(kv, plan, lengths);
    }
    if (ends) // now, since a check counts on the pages that ended requests left for this step
        vmem__kv_keep_budget(kv);
    // After the step, so that it answers what a check before it did: managers that agree by checks must not part here.
    // Ranks take no budget over in a step at all: between two checks, each may rely on what the others can do.
    if (kv->view.map && __atomic_load_n(&kv->view.map->wanted_budget, __ATOMIC_RELAXED) &&
        !(kv->flags & VMEM_KV_SAME_SLOTS))
        vmem__kv_take_wanted(kv);
    return rc;
}

int vmem__kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    int rc = do_step(kv, lengths, n);
    for (uint32_t s = 0; s < kv->n_slots && kv->staged.n && !rc; s++)
        if (lengths[s])
            vmem__kv_unstage(kv, s);
    return rc;
}

// ---- staged ----------------------------------------------------------------------------------------------------------

// Whether nothing must be asked for what is staged: neither the device, nor a pool.
static bool staged_at_hand(const vmem_kv *kv)
{
    const struct kv_ledger *l = &kv->ledger;
    const uint64_t want = l->fixed + (uint64_t)l->reserved;
    return want <= l->budget && !(kv->lend.giving && want > kv->lend.give_to) &&
           (l->promise >= l->budget || vmem__kv_at_hand(kv, want));
}

int vmem__kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = 0;
    if (slot >= kv->n_slots)
        rc = vmem__error(-EINVAL, "slot %u is out of range: the cache has %u slots", slot, kv->n_slots);
    else if (tokens > kv->max_tokens)
        rc = vmem__error(-EINVAL, "tokens %u is over max_tokens, %u", tokens, kv->max_tokens);
    else if (tokens && kv->slots[slot].state != VMEM_KV_ACTIVE)
        rc = vmem__error(-EINVAL, "slot %u is %s", slot, vmem__kv_state_name(kv->slots[slot].state));
    if (!rc && tokens)
        rc = kv_check_length(kv, slot, (int32_t)tokens);
    vmem__kv_plan_reset(&kv->plan);
    if (!rc && tokens)
        rc = vmem__kv_plan_slot(kv, &kv->plan, slot, tokens);
    if (rc)
        return rc;
    const int32_t before = kv->staged.lengths[slot];
    const int64_t reserve = kv->staged.reserve[slot];
    kv_stage(kv, slot, (int32_t)tokens, vmem__kv_plan_delta(kv, &kv->plan));
    if (!tokens || staged_at_hand(kv))
        return 0;
    vmem__kv_may_take_long(kv);
    if (vmem__kv_keeps_staged(kv))
        return 0;
    rc = vmem__kv_plan_check(kv, kv->staged.lengths); // no page may be missing, and it says what is
    if (rc)
        kv_stage(kv, slot, before, reserve);
    return rc;
}

int vmem__kv_commit(vmem_kv *kv)
{
    int rc = 0;
    if (!kv->staged.n)
        return vmem__error(-EINVAL, "no growth is staged");
    rc = do_step(kv, kv->staged.lengths, kv->n_slots);
    if (!rc) {
        memset(kv->staged.lengths, 0, kv->n_slots * sizeof(*kv->staged.lengths));
        memset(kv->staged.reserve, 0, kv->n_slots * sizeof(*kv->staged.reserve));
        kv->staged.n = 0;
        kv->ledger.reserved = 0;
    }
    return rc;
}
