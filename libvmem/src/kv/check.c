// The check of the books that VMEM_KV_CHECK enables.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

static int check_mapped(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_group *g = &kv->groups[group];
    const struct kv_span *sp = kv_span(kv, slot, group);
    for (uint32_t t = 0; t < g->n; t++)
        for (uint32_t p = sp->lo ? sp->lo - 1 : 0; p < KV_MIN(sp->hi + 1, g->slot_pages); p++) {
            vmem_page page, want = p >= sp->lo && p < sp->hi ? kv_table(kv, g, slot, t)[p] : 0;
            if (p >= kv_stale(kv, slot, group)->lo && p < kv_stale(kv, slot, group)->hi)
                continue;
            int rc = vmem_query(kv->ctx, kv_addr(kv, g, slot, t, p), &page, NULL);
            if (rc)
                return rc;
            if (page != want)
                return vmem__error(-EFAULT, "slot %u, tensor %u, page %u: %#" PRIx64 " is mapped, not %#" PRIx64, slot,
                                   g->first + t, p, page, want);
        }
    return 0;
}

int vmem__kv_check_books(vmem_kv *kv)
{
    uint64_t pages = kv->doomed.n, slots = 0, refs = 0, only = 0, shared = 0, pinned = 0;
    kv->mark++;
    kv->ledger.ceiling = KV_MAX(kv->ledger.ceiling, kv->ledger.budget); // the budget may have grown
    if (kv->ledger.held > kv->ledger.ceiling)
        return vmem__error(-EFAULT, "%" PRIu64 " pages of a budget of %" PRIu64, kv->ledger.held, kv->ledger.budget);
    kv->ledger.ceiling = KV_MAX(kv->ledger.held, kv->ledger.budget);
    if (kv->ledger.disturbed)
        return vmem__error(-EFAULT, "the background thread changed how many pages are pinned");
    uint32_t in_state[KV_STATES] = {0};
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        if (sl->same_pages_until && (sl->fresh || sl->state != VMEM_KV_ACTIVE))
            return vmem__error(-EFAULT, "slot %u: a step may pass it over, and no kernel accesses it", s);
        in_state[sl->state]++;
        if (vmem__kv_set_next(kv, &kv->lists[sl->list], s) != s ||
            sl->stale != (vmem__kv_set_next(kv, &kv->stale_slots, s) == s))
            return vmem__error(-EFAULT, "slot %u is not in list %u, or not listed as stale", s, sl->list);
        const uint32_t size = sl->backed ? 32 - (uint32_t)__builtin_clz(sl->backed) : 0;
        const uint32_t others = sl->state == VMEM_KV_ACTIVE ? KV_LIST_ACTIVE : KV_LIST_OTHERS;
        if (sl->list != (sl->state == VMEM_KV_FREE ? size : others))
            return vmem__error(-EFAULT, "slot %u is in list %u: it is %s, and %u tokens are backed", s, sl->list,
                               vmem__kv_state_name(sl->state), sl->backed);
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_group *g = &kv->groups[i];
            const struct kv_span *sp = kv_span(kv, s, i);
            bool ordered = sp->lo <= sp->in_flight.lo && sp->in_flight.lo <= sp->step.lo &&
                           sp->step.lo <= sp->step.hi && sp->step.hi <= sp->in_flight.hi &&
                           sp->in_flight.hi <= sp->hi && sp->hi <= g->slot_pages && sp->shared_hi <= sp->hi &&
                           sp->coarse_hi <= sp->hi;
            if (!ordered)
                return vmem__error(-EFAULT,
                                   "slot %u, group %u: lo %u keep_lo %u need_lo %u need_hi %u keep_hi %u hi "
                                   "%u shared %u coarse %u",
                                   s, i, sp->lo, sp->in_flight.lo, sp->step.lo, sp->step.hi, sp->in_flight.hi, sp->hi,
                                   sp->shared_hi, sp->coarse_hi);
            if (sl->same_pages_until && (sp->in_flight.lo != sp->step.lo || sp->in_flight.hi != sp->step.hi ||
                                         sp->step.hi != vmem__kv_need_hi(kv, g, sl->tokens) ||
                                         sp->step.hi != vmem__kv_need_hi(kv, g, sl->same_pages_until)))
                return vmem__error(-EFAULT, "slot %u, group %u: from %u to %u tokens it does not need the same pages",
                                   s, i, sl->tokens, sl->same_pages_until);
            if (sl->state == VMEM_KV_FREE && (sp->shared_hi || sp->step.hi != sp->lo))
                return vmem__error(-EFAULT, "slot %u is free but not clean", s);
            const struct kv_range part = vmem__kv_pinned_part(kv, s, i);
            if (part.hi - part.lo != sp->pinned.hi - sp->pinned.lo || (part.lo < part.hi && part.lo != sp->pinned.lo))
                return vmem__error(-EFAULT, "slot %u, group %u: pages [%u, %u) are pinned, not [%u, %u)", s, i, part.lo,
                                   part.hi, sp->pinned.lo, sp->pinned.hi);
            for (uint32_t p = sp->lo; p < sp->hi; p++) {
                struct kv_shared_row *ref = vmem__kv_row(kv, s, i, p);
                const bool needed = p >= part.lo && p < part.hi;
                if (ref && p >= sp->shared_hi)
                    return vmem__error(-EFAULT, "slot %u, page %u is shared", s, p);
                pages += ref ? 0 : g->n;
                slots += ref != NULL;
                pinned += needed && !ref ? g->n : 0;
                if (needed && ref)
                    kv_row_see(kv, ref);
            }
            const struct kv_range *stale = kv_stale(kv, s, i);
            if (stale->lo < stale->hi && (!sl->stale || (sp->lo < sp->hi && stale->hi > sp->lo)))
                return vmem__error(-EFAULT, "slot %u, group %u: stale [%u, %u) beside lo %u", s, i, stale->lo,
                                   stale->hi, sp->lo);
            int rc = sl->busy ? 0 : check_mapped(kv, s, i);
            if (rc)
                return rc;
        }
    }
    for (uint64_t i = 0; i < kv->shared.size; i++) {
        const struct kv_shared_row *ref = &kv->shared.entries[i];
        refs += ref->page ? ref->slots : 0;
        pages += ref->page ? ref->n : 0;
        only += ref->page && !ref->slots ? ref->n : 0;
        shared += ref->page && ref->slots + ref->runs > 1 ? ref->n : 0;
        if (ref->page && ref->slots + ref->runs < 2 && !ref->runs)
            return vmem__error(-EFAULT, "page %#" PRIx64 " is counted as shared", ref->page);
        if (ref->page && ref->pinning_slots != kv_row_seen(kv, ref))
            return vmem__error(-EFAULT, "page %#" PRIx64 ": %u slots need the row, not %u", ref->page,
                               kv_row_seen(kv, ref), ref->pinning_slots);
        pinned += ref->page && kv_row_pinned(ref) ? ref->n : 0;
    }
    if (pinned != kv->ledger.pinned_pages || pinned > kv->ledger.held)
        return vmem__error(-EFAULT, "%" PRIu64 " pages of %" PRIu64 " are pinned, not %" PRIu64, pinned,
                           kv->ledger.held, kv->ledger.pinned_pages);
    if (pages + kv->ledger.pending != kv->ledger.held || slots != refs || only != kv->shared.runs_only ||
        shared != kv->shared.shared)
        return vmem__error(-EFAULT,
                           "counted %" PRIu64 " pages, %" PRIu64 ", %" PRIu64 " and %" PRIu64 " shared, not %" PRIu64
                           ", %" PRIu64 ", %" PRIu64 " and %" PRIu64,
                           pages + kv->ledger.pending, slots, only, shared, kv->ledger.held, refs, kv->shared.runs_only,
                           kv->shared.shared);
    for (uint32_t i = 0; i < KV_STATES; i++)
        if (in_state[i] != kv->in_state[i])
            return vmem__error(-EFAULT, "%u slots are %s, not %u", in_state[i], vmem__kv_state_name((uint8_t)i),
                               kv->in_state[i]);
    return vmem__kv_check_runs(kv);
}
