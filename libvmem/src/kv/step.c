// The step, which an engine makes before each iteration. It first plans, without changing anything, which pages each
// slot needs. Then it backs them: after a successful step, every row below the lengths has a page.
//
// SPDX-License-Identifier: MIT
#include <string.h>

#include "kv/kv.h"

// ---- the plan --------------------------------------------------------------------------------------------------------

static int check_length(const vmem_kv *kv, uint32_t slot, int32_t length)
{
    const struct kv_slot *s = &kv->slots[slot];
    const uint32_t tokens = (uint32_t)length; // negative: more than any
    if (tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "lengths[%u] %d is not between 0 and max_tokens, %u", slot, length, kv->max_tokens);
    if (tokens && s->state != VMEM_KV_ACTIVE)
        return vmem__error(-EINVAL, "lengths[%u] is %d, but the slot is %s", slot, length,
                           vmem__kv_state_name(s->state));
    if (tokens && tokens < s->tokens && tokens < vmem__kv_shared_tokens(kv, slot))
        return vmem__error(-EINVAL, "slot %u, %d tokens: rows below %u are shared; truncate the slot first", slot,
                           length, s->shared_tokens);
    return 0;
}

// True if a step that needs pages up to hi can continue from the pages of the span.
static bool is_usable(const struct kv_span *sp, uint32_t hi) { return sp->lo < sp->hi && sp->lo <= hi; }

// How many of pages [lo, hi) the span lacks. Pages that an earlier request left behind its prefix are of no use if they
// begin after `hi`.
static uint32_t missing_of(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (!is_usable(sp, hi))
        return hi - lo;
    return (uint32_t)(sat_sub(sp->lo, lo) + sat_sub(hi, sp->hi));
}

static bool extends(const struct kv_slot *s, uint32_t tokens) { return s->fresh || tokens > s->backed; }

// Adds the pages that a step to `tokens` needs of a slot to the plan. -EINVAL: its window has given up rows that the
// step reads.
static int plan_slot(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_plan *plan = &kv->plan;
    const struct kv_slot *s = &kv->slots[slot];
    int rc = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct kv_want *w = &plan->wants[plan->n++];
        w->slot = slot;
        w->group = i;
        w->step.lo = g->window ? vmem__kv_need_lo(kv, g, MIN(s->tokens, tokens)) : 0;
        w->step.hi = vmem__kv_need_hi(kv, g, tokens);
        w->touched = kv_in_flight(kv, slot, i, w->step);
        w->extends = extends(s, tokens);
        if (w->extends)
            plan->missing += (uint64_t)missing_of(kv, slot, i, w->step.lo, w->step.hi) * g->n;
        if (kv->windows && s->tokens && w->step.lo < kv_span(kv, slot, i)->in_flight.lo)
            rc = vmem__error(-EINVAL, "slot %u, %u tokens: the window has given up rows that it reads", slot, tokens);
    }
    plan->extends |= extends(s, tokens);
    return rc;
}

static void plan_nothing(vmem_kv *kv)
{
    kv->plan.n = kv->plan.missing = 0;
    kv->plan.extends = false;
}

// The span's pinned part after the step, without the pages that are missing now.
static inline struct kv_range pinned_after_step(const vmem_kv *kv, const struct kv_want *w)
{
    const struct kv_span *sp = kv_span(kv, w->slot, w->group);
    const uint32_t hi = MIN(MAX(w->touched.hi, sp->lo), sp->hi), lo = MIN(MAX(w->touched.lo, sp->lo), hi);
    return (struct kv_range){lo, kv_end_of(sp, hi, !kv->slots[w->slot].fresh)};
}

// By how many pages the step will raise kv_ledger.pinned_pages, the missing ones included.
static int64_t plan_delta(const vmem_kv *kv)
{
    int64_t delta = (int64_t)kv->plan.missing;
    const struct kv_want *end = kv->plan.wants + kv->plan.n;
    for (const struct kv_want *w = kv->plan.wants; w < end; w++)
        delta += vmem__kv_pinned_delta(kv, w->slot, w->group, pinned_after_step(kv, w));
    return delta;
}

#define MANY 32 // with more slots, those that take no part are passed over in parts
#define PART 16 // of so many

// The end of the next slots to look at, from *s on: *s passes over those that take no part.
static inline uint32_t next_part(const int32_t *lengths, uint32_t n, uint32_t *s)
{
    uint64_t w[PART / 2];
    for (; n - *s > PART; *s += PART) {
        memcpy(w, &lengths[*s], sizeof(w));
        if (w[0] | w[1] | w[2] | w[3] | w[4] | w[5] | w[6] | w[7])
            return *s + PART;
    }
    return n;
}

// Adds those of slots [s, end) for which the step needs other pages than the last one did.
static inline int find_changed_of(vmem_kv *kv, const int32_t *lengths, uint32_t s, uint32_t end, uint32_t *n)
{
    const struct kv_slot *sl = &kv->slots[s];
    for (; s < end; s++, sl++) {
        const uint32_t tokens = (uint32_t)lengths[s];
        if (!tokens || (tokens >= sl->tokens && tokens <= sl->same_pages_until))
            continue;
        int rc = check_length(kv, s, lengths[s]);
        if (rc)
            return rc;
        kv->plan.changed[(*n)++] = s;
    }
    return 0;
}

static __attribute__((noinline)) int find_changed_of_many(vmem_kv *kv, const int32_t *lengths, uint32_t *n)
{
    int rc = 0;
    for (uint32_t s = 0, end; s < kv->n_slots && !rc; s = end) {
        end = next_part(lengths, kv->n_slots, &s);
        rc = find_changed_of(kv, lengths, s, end, n);
    }
    return rc;
}

static int find_changed(vmem_kv *kv, const int32_t *lengths, uint32_t *n)
{
    *n = 0;
    return kv->n_slots > MANY ? find_changed_of_many(kv, lengths, n) : find_changed_of(kv, lengths, 0, kv->n_slots, n);
}

// Waits for one slot that is to be extended and that the worker is changing. True if there was one: the lock was
// dropped, so the caller looks again.
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

// Plans a step to these lengths, or returns -EINVAL. If waited is not NULL, the call waits until the worker changes
// none of the slots that will be extended, and sets *waited if it had to.
static int plan_step(vmem_kv *kv, const int32_t *lengths, bool *waited)
{
    uint32_t n;
    plan_nothing(kv);
    int rc = find_changed(kv, lengths, &n);
    while (!rc && waited && wait_for_changed(kv, lengths, n)) {
        *waited = true;
        rc = find_changed(kv, lengths, &n);
    }
    for (uint32_t k = 0; k < n && !rc; k++)
        rc = plan_slot(kv, kv->plan.changed[k], (uint32_t)lengths[kv->plan.changed[k]]);
    return rc;
}

// Between these two calls, nothing takes back pages that the step needs or that kernels in flight access. Other pages
// of the slots can be taken.
static void plan_pin(vmem_kv *kv)
{
    for (const struct kv_want *w = kv->plan.wants; w < kv->plan.wants + kv->plan.n; w++)
        vmem__kv_set_pinned(kv, w->slot, w->group, pinned_after_step(kv, w));
}

static void plan_unpin(vmem_kv *kv)
{
    for (uint64_t k = 0; k < kv->plan.n; k += kv->n_groups)
        vmem__kv_update_pinned(kv, kv->plan.wants[k].slot);
}

static int check_lengths(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    if (!lengths)
        return vmem__error(-EINVAL, "lengths must not be NULL");
    if (n != kv->n_slots)
        return vmem__error(-EINVAL, "n %u is out of range: the cache has %u slots", n, kv->n_slots);
    return 0;
}

// A dry step (VMEM_KV_DRY): returns what the step would return, and changes nothing.
static int would_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint32_t flags)
{
    int rc = vmem__check_flags(flags, VMEM_KV_DRY);
    if (rc)
        return rc;
    rc = check_lengths(kv, lengths, n);
    if (!rc)
        rc = plan_step(kv, lengths, NULL);
    return rc ? rc : vmem__kv_claim_memory(kv, plan_delta(kv), kv->plan.missing);
}

// ---- the step --------------------------------------------------------------------------------------------------------

// Reuses the pages that a slot kept, in its request's first step. Those under a 2 MiB entry that extends past the
// request are not reused, as they could not be released in small pieces later.
static int reuse_kept_of_slot(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = vmem__kv_stale_now(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        const uint32_t hi = vmem__kv_need_hi(kv, &kv->groups[i], tokens);
        if (sp->coarse_hi > hi || !is_usable(sp, hi))
            rc = vmem__kv_cut_now(kv, slot, i, sp->lo, MIN(hi, sp->hi));
    }
    return rc;
}

// How many pages the step may map beyond the missing ones. While memory is plentiful, they complete 2 MiB blocks,
// because a call that maps many pages takes as long as a call for one.
static uint64_t spare_for(const vmem_kv *kv, uint64_t missing)
{
    const bool generous = kv->flags & VMEM_KV_GENEROUS && !kv->membership.lowering;
    const uint64_t spare = generous ? sat_sub(kv_unused(kv), 2 * kv_low(kv) + missing) : 0;
    return spare && vmem__kv_leaves_others(kv, missing + spare) ? spare : 0;
}

// Lists the parts of spans to back, with up to `spare` pages beyond the missing ones.
static int list_parts(vmem_kv *kv, uint64_t spare)
{
    const struct kv_plan *plan = &kv->plan;
    vmem__kv_grow_reset(&kv->grow);
    for (uint64_t k = 0; k < plan->n; k++) {
        const struct kv_want *w = &plan->wants[k];
        const struct kv_group *g = &kv->groups[w->group];
        const struct kv_span *sp = kv_span(kv, w->slot, w->group);
        if (!w->extends || (sp->lo < sp->hi && sp->lo <= w->step.lo && w->step.hi <= sp->hi))
            continue;
        uint32_t to = MIN((w->step.hi + kv->block_pages - 1) / kv->block_pages * kv->block_pages, g->slot_pages);
        uint64_t extra = (uint64_t)(to - w->step.hi) * g->n;
        if (extra > spare || w->step.hi <= sp->hi)
            to = w->step.hi;
        else
            spare -= extra;
        int rc = vmem__kv_grow_to(kv, &kv->grow, w->slot, w->group, w->step.lo, to, w->step.hi);
        if (rc)
            return rc;
    }
    return 0;
}

// Claims budget for the pages that the step pins. If the budget has room for all missing pages, nothing need be
// counted.
static int claim_budget(vmem_kv *kv)
{
    const struct kv_plan *plan = &kv->plan;
    if (kv->ledger.held + plan->missing <= kv->ledger.budget)
        return 0;
    const int64_t delta = plan_delta(kv);
    return plan->extends || delta > 0 ? vmem__kv_claim_budget(kv, delta, plan->missing) : 0;
}

static int reuse_kept_pages(vmem_kv *kv, const int32_t *lengths)
{
    int rc = 0;
    for (uint64_t k = 0; k < kv->plan.n && !rc; k += kv->n_groups) {
        const uint32_t slot = kv->plan.wants[k].slot;
        if (kv->slots[slot].fresh)
            rc = reuse_kept_of_slot(kv, slot, (uint32_t)lengths[slot]);
    }
    return rc;
}

// Maps the pages that the step lacks, and up to `spare` more; *total receives their number. tries: as for
// vmem__kv_grow_all.
static int map_missing(vmem_kv *kv, uint64_t spare, int tries, uint64_t *total)
{
    int rc = list_parts(kv, spare);
    *total = rc ? 0 : kv->grow.total;
    return *total ? vmem__kv_grow_all(kv, &kv->grow, tries) : rc;
}

// Backs the pages that the planned step lacks, all or none. After a failure, no mapping and no count has changed.
static int back_step(vmem_kv *kv, const int32_t *lengths)
{
    const uint64_t missing = kv->plan.missing;
    uint64_t total = 0;
    vmem__kv_clear_shortage();
    int rc = claim_budget(kv);
    if (!rc && !vmem__kv_has_room(kv, missing)) { // take pages back, but not those that the step needs
        plan_pin(kv);
        rc = vmem__kv_make_room(kv, missing);
    }
    if (!rc)
        rc = reuse_kept_pages(kv, lengths);
    if (!rc)
        rc = map_missing(kv, spare_for(kv, missing), 0, &total);
    if (rc == -ENOMEM && total) { // the device has less than the budget: back only what is needed
        plan_pin(kv);
        rc = map_missing(kv, 0, KV_TRIES, &total);
    }
    if (rc) {
        vmem__kv_grow_reset(&kv->grow);
        plan_unpin(kv);
        return rc;
    }
    vmem__pool_unask(kv->membership.member);
    kv->stats.step_maps += total != 0;
    kv->stats.step_mapped_pages += total;
    return 0;
}

// Adds the pages of the last step to the history of steps in flight, before record_needs replaces them.
static void push_history(vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    struct kv_range *past = kv_past_of(kv, slot, group);
    for (uint32_t i = kv->steps_in_flight - 1; i-- > 1;)
        past[i] = past[i - 1];
    if (kv->steps_in_flight > 1)
        past[0] = s->step;
}

// Records in the spans the pages that kernels of the step access, and those that kernels of earlier steps may still
// access.
static void record_needs(vmem_kv *kv)
{
    uint32_t same_pages_until = 0;
    const struct kv_want *end = kv->plan.wants + kv->plan.n;
    for (const struct kv_want *w = kv->plan.wants; w < end; w++) {
        struct kv_span *sp = kv_span(kv, w->slot, w->group);
        struct kv_slot *s = &kv->slots[w->slot];
        const uint32_t rows = kv_rows_before(kv, &kv->groups[w->group], w->step.hi);
        push_history(kv, w->slot, w->group);
        sp->in_flight = (struct kv_range){MAX(w->touched.lo, sp->lo), MIN(w->touched.hi, sp->hi)};
        sp->step = w->step;
        vmem__kv_set_pinned(kv, w->slot, w->group, kv_in_use(kv, w->slot, w->group, true));
        if (!w->group)
            same_pages_until = kv->windows ? 0 : kv->max_tokens;
        same_pages_until =
            sp->in_flight.lo == w->step.lo && sp->in_flight.hi == w->step.hi ? MIN(same_pages_until, rows) : 0;
        s->same_pages_until = same_pages_until;
        s->fresh = false; // kernels access the slot from now on
    }
}

// Records the step in those of slots [s, end) that take part. True if the worker should back more rows of one.
static inline bool commit_slots(vmem_kv *kv, const int32_t *lengths, uint32_t s, uint32_t end, uint32_t ahead)
{
    const uint32_t step = (uint32_t)kv->fence.step, most = kv->max_tokens;
    struct kv_slot *sl = &kv->slots[s];
    bool wake_worker = false;
    for (; s < end; s++, sl++) {
        const uint32_t tokens = (uint32_t)lengths[s];
        if (!tokens)
            continue;
        sl->tokens = tokens;
        sl->last_step = step;
        sl->skip = sl->stuck = false;
        wake_worker |= sl->backed < most && sl->backed < (uint64_t)tokens + ahead;
    }
    return wake_worker;
}

static __attribute__((noinline)) bool commit_many_slots(vmem_kv *kv, const int32_t *lengths, uint32_t ahead)
{
    bool wake_worker = false;
    for (uint32_t s = 0, end; s < kv->n_slots; s = end) {
        end = next_part(lengths, kv->n_slots, &s);
        wake_worker |= commit_slots(kv, lengths, s, end, ahead);
    }
    return wake_worker;
}

static void commit_step(vmem_kv *kv, const int32_t *lengths)
{
    bool wake_worker = false;
    bool plenty = kv->flags & VMEM_KV_GENEROUS && kv_plentiful(kv);
    uint32_t ahead = plenty ? kv->ahead_tokens : kv->ahead_min;
    kv->fence.step++;
    record_needs(kv);
    wake_worker |=
        kv->n_slots > MANY ? commit_many_slots(kv, lengths, ahead) : commit_slots(kv, lengths, 0, kv->n_slots, ahead);
    for (uint32_t s = 0; kv->windows && (s = kv_next_active(kv, s)) != KV_NO_SLOT; s++)
        wake_worker |= lengths[s] && vmem__kv_pass_windows(kv, s);
    if (wake_worker)
        vmem__kv_worker_wake(kv);
}

// Frees the slots whose last kernels have ended. All lengths are checked first, so that a bad call changes nothing.
static int free_ended_slots(vmem_kv *kv, const int32_t *lengths)
{
    for (uint32_t s = 0, end; s < kv->n_slots;)
        for (end = next_part(lengths, kv->n_slots, &s); s < end; s++) {
            int rc = check_length(kv, s, lengths[s]);
            if (rc)
                return rc;
        }
    // Kernels of the last steps_in_flight steps may be running. If this fails, the next step does it.
    vmem__kv_end_requests(kv, sat_sub(kv->fence.step, kv->steps_in_flight));
    return 0;
}

static int do_step(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    const struct kv_plan *plan = &kv->plan;
    bool waited = false;
    int rc = check_lengths(kv, lengths, n);
    const bool has_ending = kv->in_state[KV_ENDING];
    if (has_ending && !rc)
        rc = free_ended_slots(kv, lengths);
    if (!rc)
        rc = plan_step(kv, lengths, &waited);
    kv->view.may_lag = !has_ending && !plan->extends;
    if (!rc && plan->extends)
        rc = back_step(kv, lengths);
    else if (!rc) // its pages are mapped, but they could be taken back
        rc = claim_budget(kv);
    kv->stats.step_waits += waited;
    if (!rc) {
        kv->stats.steps++;
        commit_step(kv, lengths);
    } else if (rc == -ENOMEM) {
        kv->stats.step_failures++;
        vmem__kv_count_shortage(kv);
    }
    // It comes after the plan, because a dry step has counted on the pages that ended requests left.
    if (has_ending)
        vmem__kv_shrink_to_budget(kv);
    return rc;
}

// An error if kernels of the step could access rows that a failed unmap left without their pages.
static int check_rows(vmem_kv *kv)
{
    int rc = 0;
    for (const struct kv_group *g = kv->groups; g < kv->groups + kv->n_groups; g++)
        for (uint32_t t = g->first; t < g->first + g->n && !rc; t++)
            rc = vmem__check_present(kv->ctx, kv->addrs[t], g->slot_stride * kv->n_slots);
    return rc;
}

int vmem_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint32_t flags)
{
    int rc = flags ? vmem__kv_enter(kv) : vmem__kv_enter_step(kv);
    if (!rc && *kv->absent) {
        rc = check_rows(kv);
        if (rc)
            return vmem__kv_leave(kv, rc);
    }
    return rc ? rc : vmem__kv_leave(kv, flags ? would_step(kv, lengths, n, flags) : do_step(kv, lengths, n));
}
