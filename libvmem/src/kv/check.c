// The check of the books that VMEM_KV_CHECK enables.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// Returns from a check that finds this false of a slot or a run.
#define REQUIRE(condition, what, number)                                                                 \
    do {                                                                                                 \
        if (!(condition))                                                                                \
            return vmem__error(-EFAULT, "%s %" PRIu64 ": not %s", what, (uint64_t)(number), #condition); \
    } while (0)

// -EFAULT unless the number that was counted anew is the one that the books keep.
static int same(uint64_t counted, uint64_t kept, const char *what)
{
    return counted == kept ? 0 : vmem__error(-EFAULT, "%" PRIu64 " %s, not %" PRIu64, counted, what, kept);
}

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
            if (rc == -EINVAL)
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
    uint64_t spanned;                 // in spans
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
    if (l->pinned_pages > l->held)
        return vmem__error(-EFAULT, "%" PRIu64 " of %" PRIu64 " pages are pinned", l->pinned_pages, l->held);
    return l->disturbed ? vmem__error(-EFAULT, "the background thread changed how many pages are pinned") : 0;
}

// Checks the cached fields of a slot, and the lists that have it.
static int check_slot(const vmem_kv *kv, uint32_t slot)
{
    const struct kv_slot *s = &kv->slots[slot];
    REQUIRE(!s->same_pages_until || (!s->fresh && s->state == VMEM_KV_ACTIVE), "slot", slot);
    REQUIRE(s->list == kv_list_of(s), "slot", slot);
    REQUIRE(vmem__kv_set_next(kv, kv->lists[s->list], slot) == slot, "slot", slot);
    REQUIRE(s->stale == (vmem__kv_set_next(kv, kv->stale_slots, slot) == slot), "slot", slot);
    return 0;
}

static int check_span(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_group *g = &kv->groups[group];
    const struct kv_span *sp = kv_span(kv, slot, group);
    const struct kv_range part = vmem__kv_pinned_part(kv, slot, group), *stale = kv_stale(kv, slot, group);
    REQUIRE(sp->lo <= sp->in_flight.lo && sp->in_flight.lo <= sp->step.lo && sp->step.lo <= sp->step.hi, "slot", slot);
    REQUIRE(sp->step.hi <= sp->in_flight.hi && sp->in_flight.hi <= sp->hi && sp->hi <= g->slot_pages, "slot", slot);
    REQUIRE(sp->shared_hi <= sp->hi && sp->coarse_hi <= sp->hi, "slot", slot);
    if (s->same_pages_until) {
        REQUIRE(sp->in_flight.lo == sp->step.lo && sp->in_flight.hi == sp->step.hi, "slot", slot);
        REQUIRE(sp->step.hi == vmem__kv_need_hi(kv, g, s->tokens), "slot", slot);
        REQUIRE(sp->step.hi == vmem__kv_need_hi(kv, g, s->same_pages_until), "slot", slot);
    }
    REQUIRE(s->state != VMEM_KV_FREE || (!sp->shared_hi && sp->step.hi == sp->lo), "slot", slot);
    REQUIRE(part.hi - part.lo == sp->pinned.hi - sp->pinned.lo, "slot", slot);
    REQUIRE(part.lo == part.hi || part.lo == sp->pinned.lo, "slot", slot);
    REQUIRE(stale->lo >= stale->hi || (s->stale && (sp->lo == sp->hi || stale->hi <= sp->lo)), "slot", slot);
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
        REQUIRE(!ref || p < sp->shared_hi, "slot", slot);
        c->spanned += n;
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
        REQUIRE(r->runs || r->slots > 1, "page", r->page);
        REQUIRE(r->pinning_slots == kv_row_seen(kv, r), "page", r->page);
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
    uint64_t n = 0, listed = 0, can_go = 0;
    for (uint32_t i = 0; i < all->used; i++) {
        const struct kv_run *r = &all->list[i];
        n += r->id != 0;
        can_go += r->id && !r->pins && !r->keep;
        for (uint32_t j = 0; j < kv->n_groups && r->id; j++)
            for (uint32_t k = 0; k < r->rows[j].n; k++) {
                const struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, r->rows[j].pages[k]);
                REQUIRE(ref && ref->runs >= ref->evictable_runs + r->keep && (ref->evictable_runs || r->keep), "run",
                        i);
            }
    }
    for (uint32_t i = all->oldest; i != KV_NO_RUN; i = all->list[i].newer, listed++)
        REQUIRE(!all->list[i].keep && !all->list[i].pins, "run", i);
    const int rc = same(n, all->n, "runs");
    return rc ? rc : same(listed, can_go, "runs are listed");
}

static int compare(const vmem_kv *kv, const struct counts *c)
{
    int rc = same(c->pinned, kv->ledger.pinned_pages, "pages are pinned");
    if (!rc)
        rc = same(c->pages + kv->ledger.pending, kv->ledger.held, "pages are held");
    if (!rc)
        rc = same(c->spanned, kv->ledger.spanned, "pages are in spans");
    if (!rc)
        rc = same(c->slot_rows, c->holders, "slots hold shared rows");
    if (!rc)
        rc = same(c->runs_only, kv->shared.runs_only, "pages are held by runs alone");
    if (!rc)
        rc = same(c->shared_pages, kv->shared.shared, "pages are shared");
    if (!rc)
        rc = same(c->evictable, kv->shared.evictable, "pages can be evicted");
    for (uint32_t i = 0; i < KV_STATES && !rc; i++)
        rc = same(c->in_state[i], kv->in_state[i], vmem__kv_state_name((uint8_t)i));
    return rc;
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
