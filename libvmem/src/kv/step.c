// Before an iteration: every row up to the lengths gets a page.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

static int __attribute__((noinline)) check_length(const vmem_kv *kv, uint32_t i, int32_t tokens)
{
    const struct kv_slot *s = &kv->slots[i];
    if (tokens < 0 || (uint32_t)tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "lengths[%u] %d is not between 0 and max_tokens, %u", i, tokens, kv->max_tokens);
    if (s->state != VMEM_KV_ACTIVE)
        return vmem__error(-EINVAL, "lengths[%u] is %d, but the slot is %s", i, tokens,
                           s->state == VMEM_KV_FREE     ? "free"
                           : s->state == VMEM_KV_ENDING ? "being given up"
                                                        : "swapped out");
    if ((uint32_t)tokens < s->shared_tokens)
        return vmem__error(-EINVAL, "lengths[%u] %d: rows below %u are shared; truncate the slot first", i, tokens,
                           s->shared_tokens);
    if ((uint32_t)tokens < s->tokens && kv_others_read(kv, i, (uint32_t)tokens))
        return vmem__error(-EINVAL, "lengths[%u] %d: other requests have rows from there on; truncate the slot first",
                           i, tokens);
    return 0;
}

static int check_lengths(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    int rc = 0;
    if (!lengths)
        return vmem__error(-EINVAL, "lengths must not be NULL");
    if (n != kv->n_slots)
        return vmem__error(-EINVAL, "n %u: there are %u slots", n, kv->n_slots);
    for (uint32_t i = 0; i < n && !rc; i++) {
        const struct kv_slot *s = &kv->slots[i];
        const uint32_t tokens = (uint32_t)lengths[i]; // negative: more than any
        if (tokens && (tokens > kv->max_tokens || s->state != VMEM_KV_ACTIVE || tokens < s->tokens))
            rc = check_length(kv, i, lengths[i]);
        if (tokens > s->steady) // they lie apart, and nothing says early that the step will read them
            __builtin_prefetch(kv_span(kv, i, 0));
    }
    return rc;
}

// The pages that kernels of a step to `tokens` touch.
static void new_need(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t tokens, uint32_t *lo, uint32_t *hi)
{
    const struct kv_group *g = &kv->groups[group];
    *lo = g->window ? kv_need_lo(kv, g, KV_MIN(kv->slots[slot].tokens, tokens)) : 0;
    *hi = kv_need_hi(kv, g, tokens);
}

static int check_window(const vmem_kv *kv, uint32_t s, int32_t tokens)
{
    for (uint32_t i = 0; i < kv->n_groups && tokens && kv->slots[s].tokens; i++) {
        uint32_t lo, hi;
        new_need(kv, s, i, (uint32_t)tokens, &lo, &hi);
        if (lo < kv_span(kv, s, i)->lo)
            return vmem__error(-EINVAL, "lengths[%u] %d: the window has given up rows that it reads", s, tokens);
    }
    return 0;
}

static int check_windows(const vmem_kv *kv, const int32_t *lengths)
{
    int rc = 0;
    for (uint32_t s = 0; kv->windows && s < kv->n_slots && !rc; s++)
        rc = check_window(kv, s, lengths[s]);
    return rc;
}

// Finds the slots that have to be extended, and waits until the worker is at none of them.
static uint32_t find_todo(vmem_kv *kv, const int32_t *lengths, bool *waited)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        if (!lengths[s] || ((uint32_t)lengths[s] <= sl->backed && !sl->fresh))
            continue;
        if (sl->busy) {
            *waited = true;
            kv_wait_slot(kv, s);
            s = UINT32_MAX; // the lock was dropped meanwhile
            n = 0;
            continue;
        }
        kv->todo[n++] = s;
    }
    return n;
}

// Whether a step that needs pages up to hi can go on from what the span has. What an earlier request left further back,
// behind a prefix, is of no use.
static bool usable(const struct kv_span *sp, uint32_t hi) { return sp->lo < sp->hi && sp->lo <= hi; }

static uint64_t missing_in(const vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t lo, hi;
        new_need(kv, slot, i, tokens, &lo, &hi);
        uint32_t n = hi - lo;
        if (usable(sp, hi))
            n = (lo < sp->lo ? sp->lo - lo : 0) + (hi > sp->hi ? hi - sp->hi : 0);
        pages += (uint64_t)n * kv->groups[i].n;
    }
    return pages;
}

// What nobody may take back while the step runs: what kernels of the last step touch, and what this one asks for.
// was: receives what was protected before.
static void protect(vmem_kv *kv, const int32_t *lengths, struct kv_span *was)
{
    for (uint32_t s = 0; s < kv->n_slots; s++)
        for (uint32_t i = 0; i < kv->n_groups && lengths[s]; i++) {
            struct kv_span *sp = kv_span(kv, s, i);
            uint32_t lo, hi;
            was[(uint64_t)s * kv->n_groups + i] = *sp;
            new_need(kv, s, i, (uint32_t)lengths[s], &lo, &hi);
            hi = KV_MIN(KV_MAX(hi, sp->lo), sp->hi);
            lo = KV_MIN(KV_MAX(lo, sp->lo), hi);
            struct kv_past all = kv_in_flight(kv, s, i, lo, hi);
            sp->keep_lo = KV_MAX(all.lo, sp->lo);
            sp->keep_hi = KV_MIN(all.hi, sp->hi);
        }
}

static void unprotect(vmem_kv *kv, const int32_t *lengths, const struct kv_span *was)
{
    for (uint32_t s = 0; s < kv->n_slots; s++)
        for (uint32_t i = 0; i < kv->n_groups && lengths[s]; i++) {
            struct kv_span *sp = kv_span(kv, s, i);
            const struct kv_span *w = &was[(uint64_t)s * kv->n_groups + i];
            // Within what the span has now: the front and the tail may have been given up meanwhile.
            sp->keep_hi = KV_MAX(KV_MIN(w->keep_hi, sp->hi), sp->need_hi);
            sp->keep_lo = KV_MIN(KV_MAX(w->keep_lo, sp->lo), sp->need_lo);
        }
}

// A request's first step: the slot's kept pages stay as far as they can be given up again in small pieces later.
static int adopt(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *s = &kv->slots[slot];
    int failed = kv_stale_now(kv, slot);
    if (failed)
        return failed;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t hi = kv_need_hi(kv, &kv->groups[i], tokens);
        if (sp->coarse_hi > hi || !usable(sp, hi)) {
            int rc = kv_cut_now(kv, slot, i, sp->lo, hi);
            if (rc)
                return rc;
        }
        if (!s->tokens && usable(sp, hi))
            kv->stats.adopted_pages += (uint64_t)(KV_MIN(hi, sp->hi) - sp->lo) * kv->groups[i].n;
    }
    if (s->dirty) {
        int rc = kv_clear_slot(kv, slot);
        if (rc)
            return rc;
        s->dirty = false;
    }
    return 0;
}

// What may be mapped beyond the missing pages: while memory is plentiful, whole 2 MiB blocks, for a call that maps many
// pages costs what a call for one costs.
static uint64_t spare_for(const vmem_kv *kv, uint64_t missing)
{
    uint64_t unused = kv_unused(kv), reserve = 2 * kv_low(kv) + missing;
    uint64_t spare = kv->flags & VMEM_KV_GENEROUS && unused > reserve ? unused - reserve : 0;
    return spare && kv_leaves_others(kv, missing + spare) ? spare : 0;
}

static int plan(vmem_kv *kv, const int32_t *lengths, uint32_t n_todo, uint64_t spare)
{
    kv_grow_reset(&kv->grow);
    for (uint32_t k = 0; k < n_todo; k++)
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            uint32_t s = kv->todo[k], lo, hi;
            const struct kv_group *g = &kv->groups[i];
            const struct kv_span *sp = kv_span(kv, s, i);
            new_need(kv, s, i, (uint32_t)lengths[s], &lo, &hi);
            if (sp->lo < sp->hi && sp->lo <= lo && hi <= sp->hi)
                continue;
            uint32_t to = KV_MIN((hi + kv->block - 1) / kv->block * kv->block, g->slot_pages);
            uint64_t extra = (uint64_t)(to - hi) * g->n;
            if (extra > spare || hi <= sp->hi)
                to = hi;
            else
                spare -= extra;
            int rc = kv_grow_to(kv, &kv->grow, s, i, lo, to, hi);
            if (rc)
                return rc;
        }
    return 0;
}

static int extend(vmem_kv *kv, const int32_t *lengths, uint32_t n_todo, uint64_t *missing)
{
    uint64_t pages = 0;
    int rc = 0;
    kv_enough();
    for (uint32_t k = 0; k < n_todo; k++)
        pages += missing_in(kv, kv->todo[k], (uint32_t)lengths[kv->todo[k]]);
    bool protected = !kv_has_room(kv, pages);
    if (protected)
        protect(kv, lengths, kv->saved);
    rc = kv_make_room(kv, pages, missing);
    for (uint32_t k = 0; k < n_todo && !rc; k++)
        if (kv->slots[kv->todo[k]].fresh)
            rc = adopt(kv, kv->todo[k], (uint32_t)lengths[kv->todo[k]]);
    if (!rc)
        rc = plan(kv, lengths, n_todo, spare_for(kv, pages));
    uint64_t total = rc ? 0 : kv->grow.total;
    if (!rc && total)
        rc = kv_grow_try(kv, &kv->grow);
    if (rc == -ENOMEM && total) { // the device has less than the budget says: then what is needed, and no more
        if (!protected)
            protect(kv, lengths, kv->saved);
        protected = true;
        rc = plan(kv, lengths, n_todo, 0);
        total = kv->grow.total;
        if (!rc)
            rc = kv_grow_all(kv, &kv->grow, missing);
    }
    if (rc) {
        kv_grow_reset(&kv->grow);
        if (protected)
            unprotect(kv, lengths, kv->saved);
        return rc;
    }
    kv->stats.step_maps += total != 0;
    kv->stats.step_mapped_pages += total;
    return 0;
}

static bool passed(const vmem_kv *kv, const struct kv_span *sp)
{
    return sp->lo < sp->keep_lo && (!kv->has_worker || sp->lo < sp->shared_hi);
}

// Gives up shared pages that a window has passed, so that how many pages are to be had never depends on the worker.
static int pass_windows(vmem_kv *kv, uint32_t slot)
{
    int rc = 0;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        if (!passed(kv, sp))
            continue;
        kv_wait_slot(kv, slot); // the worker may be cutting this very span
        if (!passed(kv, sp))
            continue;
        rc = kv_cut_now(kv, slot, i, sp->keep_lo, sp->hi);
        kv->stats.window_pages += rc ? 0 : kv->cut.n_pages;
    }
    return rc;
}

// What kernels of the step touch, and what they may still touch of the steps before it.
static void set_need(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t lo, hi;
        new_need(kv, slot, i, tokens, &lo, &hi);
        struct kv_past all = kv_in_flight(kv, slot, i, lo, hi);
        uint32_t keep_lo = KV_MAX(all.lo, sp->lo), keep_hi = KV_MIN(all.hi, sp->hi);
        // Unchanged, the line stays shared with the core that the worker runs on.
        if (sp->need_lo == lo && sp->need_hi == hi && lo == keep_lo && hi == keep_hi && sp->keep_lo == keep_lo &&
            sp->keep_hi == keep_hi)
            continue;
        kv_remember(kv, slot, i);
        sp->keep_lo = keep_lo;
        sp->keep_hi = keep_hi;
        sp->need_lo = lo;
        sp->need_hi = hi;
    }
    kv->slots[slot].steady = kv_steady(kv, slot);
}

static void commit(vmem_kv *kv, const int32_t *lengths)
{
    bool due = false;
    bool plenty = kv->flags & VMEM_KV_GENEROUS && kv_unused(kv) >= 2 * kv_low(kv);
    uint32_t ahead = plenty ? kv->ahead_tokens : kv->ahead_min;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        struct kv_slot *sl = &kv->slots[s];
        uint32_t tokens = (uint32_t)lengths[s];
        if (!tokens)
            continue;
        if (tokens < sl->tokens || tokens > sl->steady)
            set_need(kv, s, tokens);
        sl->tokens = tokens;
        sl->fresh = sl->skip = false;
        due |= sl->backed < kv->max_tokens && sl->backed < (uint64_t)tokens + ahead;
        if (kv->windows) {
            pass_windows(kv, s); // if it fails now, it is done at the next step
            for (uint32_t i = 0; i < kv->n_groups; i++)
                due |= kv_span(kv, s, i)->lo < kv_span(kv, s, i)->keep_lo;
        }
    }
    if (due)
        kv_worker_wake(kv);
}

static int do_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint64_t *missing)
{
    if (missing)
        *missing = 0;
    if (kv->n_ending) {
        kv_may_take_long(kv);
        // The kernels of so many steps may be running now. Should it fail, it is done at the next step.
        kv->retired = KV_MAX(kv->retired, kv->step > kv->steps_in_flight ? kv->step - kv->steps_in_flight : 0);
        kv_end_requests(kv);
    }
    int rc = check_lengths(kv, lengths, n);
    bool waited = false;
    uint32_t n_todo = rc ? 0 : find_todo(kv, lengths, &waited);
    if (!rc)
        rc = check_windows(kv, lengths);
    if (rc || n_todo || kv->windows)
        kv_may_take_long(kv);
    if (!rc && n_todo)
        rc = extend(kv, lengths, n_todo, missing);
    kv->stats.steps++;
    kv->stats.step_waits += waited;
    if (rc) {
        kv->stats.step_failures++;
        if (rc == -ENOMEM)
            kv_count_shortage(kv);
    } else {
        commit(kv, lengths);
        kv->step++;
    }
    // After the step, so that it answers what a check before it did: managers that agree by checks must not part here.
    if (kv->view && kv->view->wanted_budget)
        kv_take_wanted(kv);
    return rc;
}

int vmem_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint64_t *missing)
{
    int rc = kv_enter_step(kv);
    return rc ? rc : kv_leave(kv, do_step(kv, lengths, n, missing));
}

static int do_check(vmem_kv *kv, const int32_t *lengths, uint64_t *missing)
{
    bool held = kv_hold_to_count(kv);
    int rc = check_windows(kv, lengths);
    uint64_t pages = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (lengths[s] && ((uint32_t)lengths[s] > kv->slots[s].backed || kv->slots[s].fresh))
            pages += missing_in(kv, s, (uint32_t)lengths[s]);
    uint64_t limit = pages ? kv_limit(kv, pages) : 0;
    kv_enough();
    if (!rc && pages && kv->held + pages > limit) {
        protect(kv, lengths, kv->saved);
        // What the worker is mapping now either counts as missing here or can be taken back.
        uint64_t want = kv->held - kv->pending - kv_reclaimable(kv) + pages;
        unprotect(kv, lengths, kv->saved);
        if (want > limit)
            rc = want > kv->budget_pages ? kv_short_of_budget(kv, want, missing)
                                         : kv_short_of_device(kv, want - limit, missing);
    }
    if (held)
        kv_worker_release(kv);
    return rc;
}

int vmem_kv_check(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint64_t *missing)
{
    int rc = kv_enter(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    kv_take_wanted(kv);
    rc = check_lengths(kv, lengths, n);
    return kv_leave(kv, rc ? rc : do_check(kv, lengths, missing));
}

// ---- staged ---------------------------------------------------------------------------------------------------

static void stage(vmem_kv *kv, uint32_t slot, int32_t tokens, uint64_t pages)
{
    kv->n_staged += (tokens != 0) - (kv->staged[slot] != 0);
    kv->staged_missing += pages - kv->staged_pages[slot];
    kv->staged[slot] = tokens;
    kv->staged_pages[slot] = pages;
}

void kv_unstage(vmem_kv *kv, uint32_t slot)
{
    if (kv->n_staged)
        stage(kv, slot, 0, 0);
}

int vmem_kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *missing)
{
    int rc = kv_enter_step(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    if (slot >= kv->n_slots)
        rc = vmem__error(-EINVAL, "slot %u: there are %u", slot, kv->n_slots);
    if (!rc && tokens)
        rc = check_length(kv, slot, tokens > INT32_MAX ? -1 : (int32_t)tokens);
    if (!rc && kv->windows)
        rc = check_window(kv, slot, (int32_t)tokens);
    if (rc)
        return kv_leave(kv, rc);
    const struct kv_slot *s = &kv->slots[slot];
    int32_t before = kv->staged[slot];
    uint64_t pages_before = kv->staged_pages[slot];
    stage(kv, slot, (int32_t)tokens, tokens && (tokens > s->backed || s->fresh) ? missing_in(kv, slot, tokens) : 0);
    if (tokens && (kv->staged_missing > kv_unused(kv) || kv->promise < kv->budget_pages)) {
        kv_may_take_long(kv);
        rc = do_check(kv, kv->staged, missing);
        if (rc)
            stage(kv, slot, before, pages_before);
    }
    return kv_leave(kv, rc);
}

int vmem_kv_commit(vmem_kv *kv, uint64_t *missing)
{
    int rc = kv_enter_step(kv);
    if (rc)
        return rc;
    if (!kv->n_staged)
        return kv_leave(kv, vmem__error(-EINVAL, "no growth is staged"));
    rc = do_step(kv, kv->staged, kv->n_slots, missing);
    for (uint32_t s = 0; s < kv->n_slots && !rc; s++)
        stage(kv, s, 0, 0);
    return kv_leave(kv, rc);
}

// Whether what a new request's slot has begins behind its first row.
static bool lacks_front(const vmem_kv *kv, uint32_t slot)
{
    bool lacks = false;
    for (uint32_t i = 0; i < kv->n_groups && !kv->slots[slot].tokens; i++)
        lacks |= kv_span(kv, slot, i)->lo > 0;
    return lacks;
}

int vmem_kv_room(vmem_kv *kv, int32_t slot, uint32_t *tokens)
{
    int rc = kv_enter(kv);
    if (rc)
        return rc;
    if (!tokens)
        rc = vmem__error(-EINVAL, "tokens must not be NULL");
    else if (slot >= 0)
        rc = kv_get(kv, (uint32_t)slot, 1u << VMEM_KV_ACTIVE);
    if (rc)
        return kv_leave(kv, rc);
    *tokens = 0;
    if (slot < 0 && kv_choose(kv, 0, 0) == UINT32_MAX)
        return kv_leave(kv, 0);
    bool held = kv_hold_to_count(kv);
    // Pages that a length asks for grow with it: the largest that fits, by bisection.
    uint64_t fixed = kv->held - kv->pending - kv_reclaimable(kv);
    if (slot >= 0) // less what this slot has and cannot give back; what its new length keeps is counted below
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, (uint32_t)slot, i);
            fixed += kv_reclaimable_in(kv, (uint32_t)slot) * (i == 0);
            fixed -= (uint64_t)(sp->hi - sp->lo) * kv->groups[i].n;
        }
    uint64_t limit = kv_limit(kv, 0);
    uint32_t least = slot < 0 ? 0 : kv->slots[slot].tokens, most = kv->max_tokens;
    if (slot >= 0 && !lacks_front(kv, (uint32_t)slot)) // what is mapped needs nothing, be the budget exceeded
        least = KV_MAX(least, kv->slots[slot].backed);
    while (least < most) {
        uint32_t middle = least + (most - least + 1) / 2;
        uint64_t pages = fixed;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_group *g = &kv->groups[i];
            uint32_t lo = 0, hi = kv_need_hi(kv, g, middle);
            if (slot >= 0) {
                const struct kv_span *sp = kv_span(kv, (uint32_t)slot, i);
                uint32_t from;
                new_need(kv, (uint32_t)slot, i, middle, &from, &hi);
                struct kv_past all = kv_in_flight(kv, (uint32_t)slot, i, from, hi);
                from = all.lo;
                hi = all.hi;
                lo = from;
                hi = KV_MAX(hi, kv->slots[slot].fresh ? 0 : sp->coarse_hi);
                // Shared pages that a window has passed free nothing when they are let go of.
                if (from > sp->lo)
                    pages +=
                        (uint64_t)kv_rows_shared(kv, (uint32_t)slot, i, sp->lo, KV_MIN(sp->shared_hi, from)) * g->n;
            }
            pages += (uint64_t)(hi - KV_MIN(lo, hi)) * g->n;
        }
        if (pages <= limit)
            least = middle;
        else
            most = middle - 1;
    }
    *tokens = least;
    if (held)
        kv_worker_release(kv);
    return kv_leave(kv, 0);
}
