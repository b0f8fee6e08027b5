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
        for (uint32_t p = sp->lo ? sp->lo - 1 : 0; p < MIN(sp->hi + 1, g->slot_pages); p++) {
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

// The counts that the ledger and the shared rows keep, counted anew from the tables.
struct counts {
    uint64_t pages, pinned;           // that exist; that no call can take back
    uint64_t slot_rows, holders;      // shared rows as the slots have them, and as the rows count their slots
    uint64_t shared_pages, runs_only; // of rows with several holders; of rows that runs alone hold
    uint64_t evictable;               // of the latter, those that evictions can free
    uint32_t in_state[KV_STATES];     // slots
};

static int check_budget(vmem_kv *kv)
{
    struct kv_ledger *l = &kv->ledger;
    l->ceiling = MAX(l->ceiling, l->budget); // the budget may have grown
    if (l->held > l->ceiling)
        return vmem__error(-EFAULT, "%" PRIu64 " pages of a budget of %" PRIu64, l->held, l->budget);
    l->ceiling = MAX(l->held, l->budget);
    return l->disturbed ? vmem__error(-EFAULT, "the background thread changed how many pages are pinned") : 0;
}

// Checks the cached fields of a slot, and the lists that have it.
static int check_slot(const vmem_kv *kv, uint32_t slot)
{
    const struct kv_slot *s = &kv->slots[slot];
    if (s->same_pages_until && (s->fresh || s->state != VMEM_KV_ACTIVE))
        return vmem__error(-EFAULT, "slot %u: a step may pass it over, and no kernel accesses it", slot);
    if (vmem__kv_set_next(kv, kv->lists[s->list], slot) != slot ||
        s->stale != (vmem__kv_set_next(kv, kv->stale_slots, slot) == slot))
        return vmem__error(-EFAULT, "slot %u is not in list %u, or not listed as stale", slot, s->list);
    if (s->list != kv_list_of(s))
        return vmem__error(-EFAULT, "slot %u is in list %u: it is %s, and %u tokens are backed", slot, s->list,
                           vmem__kv_state_name(s->state), s->backed);
    return 0;
}

static int check_span(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_group *g = &kv->groups[group];
    const struct kv_span *sp = kv_span(kv, slot, group);
    const struct kv_range part = vmem__kv_pinned_part(kv, slot, group), *stale = kv_stale(kv, slot, group);
    if (sp->lo > sp->in_flight.lo || sp->in_flight.lo > sp->step.lo || sp->step.lo > sp->step.hi ||
        sp->step.hi > sp->in_flight.hi || sp->in_flight.hi > sp->hi || sp->hi > g->slot_pages ||
        sp->shared_hi > sp->hi || sp->coarse_hi > sp->hi)
        return vmem__error(-EFAULT,
                           "slot %u, group %u: pages [%u, %u), in flight [%u, %u), of the last step [%u, %u), shared "
                           "up to %u, coarse up to %u",
                           slot, group, sp->lo, sp->hi, sp->in_flight.lo, sp->in_flight.hi, sp->step.lo, sp->step.hi,
                           sp->shared_hi, sp->coarse_hi);
    if (s->same_pages_until && (sp->in_flight.lo != sp->step.lo || sp->in_flight.hi != sp->step.hi ||
                                sp->step.hi != vmem__kv_need_hi(kv, g, s->tokens) ||
                                sp->step.hi != vmem__kv_need_hi(kv, g, s->same_pages_until)))
        return vmem__error(-EFAULT, "slot %u, group %u: from %u to %u tokens it does not need the same pages", slot,
                           group, s->tokens, s->same_pages_until);
    if (s->state == VMEM_KV_FREE && (sp->shared_hi || sp->step.hi != sp->lo))
        return vmem__error(-EFAULT, "slot %u is free but not clean", slot);
    if (part.hi - part.lo != sp->pinned.hi - sp->pinned.lo || (part.lo < part.hi && part.lo != sp->pinned.lo))
        return vmem__error(-EFAULT, "slot %u, group %u: pages [%u, %u) are pinned, not [%u, %u)", slot, group, part.lo,
                           part.hi, sp->pinned.lo, sp->pinned.hi);
    if (stale->lo < stale->hi && (!s->stale || (sp->lo < sp->hi && stale->hi > sp->lo)))
        return vmem__error(-EFAULT, "slot %u, group %u: stale [%u, %u) beside lo %u", slot, group, stale->lo, stale->hi,
                           sp->lo);
    return s->busy ? 0 : check_mapped(kv, slot, group);
}

// Counts the rows of a span, and marks the shared ones that it pins as seen.
static int count_span(vmem_kv *kv, uint32_t slot, uint32_t group, struct counts *c)
{
    const struct kv_span *sp = kv_span(kv, slot, group);
    const uint32_t n = kv->groups[group].n;
    for (uint32_t p = sp->lo; p < sp->hi; p++) {
        struct kv_shared_row *ref = vmem__kv_row(kv, slot, group, p);
        const bool pinned = p >= sp->pinned.lo && p < sp->pinned.hi;
        if (ref && p >= sp->shared_hi)
            return vmem__error(-EFAULT, "slot %u, page %u is shared", slot, p);
        c->pages += ref ? 0 : n;
        c->slot_rows += ref != NULL;
        c->pinned += pinned && !ref ? n : 0;
        if (pinned && ref)
            kv_row_see(kv, ref);
    }
    return 0;
}

static int check_slots(vmem_kv *kv, struct counts *c)
{
    int rc = 0;
    for (uint32_t s = 0; s < kv->n_slots && !rc; s++) {
        c->in_state[kv->slots[s].state]++;
        rc = check_slot(kv, s);
        for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
            rc = check_span(kv, s, i);
            rc = rc ? rc : count_span(kv, s, i, c);
        }
    }
    return rc;
}

// The shared rows, after the slots have marked those that they pin.
static int check_shared_rows(const vmem_kv *kv, struct counts *c)
{
    for (const struct kv_shared_row *r = kv->shared.entries; r < kv->shared.entries + kv->shared.size; r++) {
        if (!r->page)
            continue;
        if (r->slots + r->runs < 2 && !r->runs)
            return vmem__error(-EFAULT, "page %#" PRIx64 " is counted as shared", r->page);
        if (r->pinning_slots != kv_row_seen(kv, r))
            return vmem__error(-EFAULT, "page %#" PRIx64 ": %u slots need the row, not %u", r->page, kv_row_seen(kv, r),
                               r->pinning_slots);
        c->holders += r->slots;
        c->pages += r->n;
        c->runs_only += r->slots ? 0 : r->n;
        c->evictable += kv_row_evictable(r) ? r->n : 0;
        c->shared_pages += r->slots + r->runs > 1 ? r->n : 0;
        c->pinned += kv_row_pinned(r) ? r->n : 0;
    }
    return 0;
}

static int check_runs(const vmem_kv *kv)
{
    const struct kv_runs *all = &kv->runs;
    uint64_t n = 0, listed = 0, pinned = 0;
    for (uint32_t i = 0; i < all->used; i++) {
        const struct kv_run *r = &all->list[i];
        n += r->id != 0;
        pinned += r->id && r->pins;
        for (uint32_t j = 0; j < kv->n_groups && r->id; j++)
            for (uint32_t k = 0; k < r->rows[j].n; k++) {
                const struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, r->rows[j].pages[k]);
                if (!ref || ref->runs < ref->evictable_runs + r->keep || !(ref->evictable_runs || r->keep))
                    return vmem__error(-EFAULT, "run %u, page %#" PRIx64 " is not held", i, r->rows[j].pages[k]);
            }
    }
    for (uint32_t p = 0; p < 2; p++)
        for (uint32_t i = all->order[p].oldest; i != KV_NO_RUN; i = all->list[i].newer, listed++)
            if (all->list[i].keep != p)
                return vmem__error(-EFAULT, "run %u, keep %d, is listed with %u", i, all->list[i].keep, p);
    if (n != all->n || listed + pinned != n)
        return vmem__error(-EFAULT, "%" PRIu64 " runs, %" PRIu64 " listed, %" PRIu64 " pinned, not %u", n, listed,
                           pinned, all->n);
    return 0;
}

static int compare(const vmem_kv *kv, const struct counts *c)
{
    const struct kv_ledger *l = &kv->ledger;
    if (c->pinned != l->pinned_pages || c->pinned > l->held)
        return vmem__error(-EFAULT, "%" PRIu64 " pages of %" PRIu64 " are pinned, not %" PRIu64, c->pinned, l->held,
                           l->pinned_pages);
    if (c->pages + l->pending != l->held || c->slot_rows != c->holders || c->runs_only != kv->shared.runs_only ||
        c->shared_pages != kv->shared.shared)
        return vmem__error(-EFAULT,
                           "counted %" PRIu64 " pages, %" PRIu64 ", %" PRIu64 " and %" PRIu64 " shared, not %" PRIu64
                           ", %" PRIu64 ", %" PRIu64 " and %" PRIu64,
                           c->pages + l->pending, c->slot_rows, c->runs_only, c->shared_pages, l->held, c->holders,
                           kv->shared.runs_only, kv->shared.shared);
    if (c->evictable != kv->shared.evictable)
        return vmem__error(-EFAULT, "%" PRIu64 " pages can be evicted, not %" PRIu64, c->evictable,
                           kv->shared.evictable);
    for (uint32_t i = 0; i < KV_STATES; i++)
        if (c->in_state[i] != kv->in_state[i])
            return vmem__error(-EFAULT, "%u slots are %s, not %u", c->in_state[i], vmem__kv_state_name((uint8_t)i),
                               kv->in_state[i]);
    return 0;
}

int vmem__kv_check_books(vmem_kv *kv)
{
    struct counts c = {.pages = kv->doomed.n};
    kv->mark++;
    int rc = check_budget(kv);
    if (!rc)
        rc = check_slots(kv, &c);
    if (!rc)
        rc = check_shared_rows(kv, &c);
    if (!rc)
        rc = compare(kv, &c);
    return rc ? rc : check_runs(kv);
}
