// Giving up: unmaps pages, and releases those without another holder.
//
// SPDX-License-Identifier: MIT
#include <string.h>

#include "kv/kv.h"

static uint32_t clamp(uint32_t x, uint32_t lo, uint32_t hi) { return MIN(MAX(x, lo), hi); }

static struct kv_range within(struct kv_range r, uint32_t lo, uint32_t hi)
{
    return (struct kv_range){clamp(r.lo, lo, hi), clamp(r.hi, lo, hi)};
}

// Lists pages [from, to) of a span, which are to be cut off: all their mappings, and the pages without another holder.
static int list_pages(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    const struct kv_group *g = &kv->groups[group];
    if (from >= to)
        return 0;
    int rc = vmem__kv_room_for(&c->ops, &c->cap_ops, c->n_ops + g->n, sizeof(*c->ops));
    if (!rc)
        rc = vmem__kv_room_for(&c->pages, &c->cap_pages, c->n_pages + (uint64_t)(to - from) * g->n, sizeof(*c->pages));
    if (rc)
        return rc;
    const uint32_t shared = clamp(kv_span(kv, slot, group)->shared_hi, from, to);
    for (uint32_t i = from; i < shared; i++) {
        const bool others = vmem__kv_row(kv, slot, group, i);
        c->shared |= others;
        for (uint32_t t = 0; t < g->n && !others; t++)
            c->pages[c->n_pages++] = kv_table(kv, g, slot, t)[i];
    }
    for (uint32_t t = 0; t < g->n; t++) {
        c->ops[c->n_ops++] = (struct vmem_unmap_op){.addr = kv_addr(kv, g, slot, t, from),
                                                    .length = (uint64_t)(to - from) << kv->page_shift};
        const vmem_page *pages = kv_table(kv, g, slot, t);
        memcpy(c->pages + c->n_pages, pages + shared, (to - shared) * sizeof(*pages));
        c->n_pages += to - shared;
    }
    return 0;
}

// Lists the pages to cut off so that [lo, hi) of the span remain.
static int list_ends(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    c->slot = slot;
    c->group = group;
    c->before = *s;
    c->lo = clamp(lo, s->lo, s->hi);
    c->hi = kv_end_of(kv, slot, group, clamp(hi, c->lo, s->hi), false);
    c->n_ops = c->n_pages = 0;
    c->shared = false;
    int rc = kv->flags & VMEM_KV_CHECK ? vmem__kv_check_rule(kv, slot, group, s->lo, c->lo) : 0;
    if (!rc && kv->flags & VMEM_KV_CHECK)
        rc = vmem__kv_check_rule(kv, slot, group, c->hi, s->hi);
    if (!rc)
        rc = list_pages(kv, c, slot, group, s->lo, c->lo);
    return rc ? rc : list_pages(kv, c, slot, group, c->hi, s->hi);
}

// Cuts the span down to [lo, hi) in the books: the slot no longer holds the other rows.
static void shrink_span(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    const struct kv_span s = *kv_span(kv, slot, group);
    const uint32_t shared = s.shared_hi;
    struct kv_span now = kv_span_at(0);
    if (lo < hi)
        now = (struct kv_span){.lo = lo,
                               .hi = hi,
                               .step = within(s.step, lo, hi),
                               .in_flight = within(s.in_flight, lo, hi),
                               .pinned = within(s.pinned, lo, hi),
                               .shared_hi = shared > lo ? MIN(shared, hi) : 0,
                               .coarse_hi = MIN(s.coarse_hi, hi)};
    vmem__kv_span_set(kv, slot, group, &now);
    vmem__kv_rows_leave(kv, slot, group, s.lo, MIN(lo, shared));
    vmem__kv_rows_leave(kv, slot, group, MIN(hi, shared), MIN(s.hi, shared));
}

int vmem__kv_cut_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    int rc = list_ends(kv, c, slot, group, lo, hi);
    rc = !rc && c->shared ? -EBUSY : rc;
    if (!rc)
        shrink_span(kv, slot, group, c->lo, c->hi);
    return rc;
}

int vmem__kv_cut_unmap(vmem_kv *kv, struct kv_cut *c)
{
    if (!c->n_ops)
        return 0;
    int rc = vMemUnmapBatch(kv->ctx, c->ops, c->n_ops, NULL);
    if (!rc)
        vmem__kv_release(kv, c->pages, c->n_pages);
    return rc;
}

void vmem__kv_cut_end(vmem_kv *kv, struct kv_cut *c, int rc)
{
    if (!rc) {
        kv->ledger.held -= c->n_pages;
        return;
    }
    // While the worker had dropped the lock, steps may have changed `step` and `in_flight`, and runs may have come to
    // hold more rows. All of these lie in the part that was to remain, so they stay valid.
    struct kv_span s = *kv_span(kv, c->slot, c->group);
    if (c->lo == c->hi)
        s = c->before;
    s.lo = c->before.lo;
    s.hi = c->before.hi;
    s.coarse_hi = c->before.coarse_hi;
    vmem__kv_span_set(kv, c->slot, c->group, &s);
}

int vmem__kv_cut_now(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    struct kv_cut *c = &kv->cut;
    vmem__kv_wait_unmapping(kv);
    int rc = list_ends(kv, c, slot, group, lo, hi);
    if (!rc)
        rc = vmem__kv_cut_unmap(kv, c);
    if (rc)
        return rc;
    shrink_span(kv, slot, group, c->lo, c->hi);
    kv->ledger.held -= c->n_pages;
    return 0;
}

int vmem__kv_cut_slots(vmem_kv *kv, const uint32_t *slots, uint64_t n)
{
    struct kv_cut *c = &kv->cut;
    int rc = 0;
    vmem__kv_wait_unmapping(kv);
    c->n_ops = c->n_pages = 0;
    for (uint64_t k = 0; k < n * kv->n_groups && !rc; k++) {
        const uint32_t slot = slots[k / kv->n_groups], group = (uint32_t)(k % kv->n_groups);
        rc = list_pages(kv, c, slot, group, kv_span(kv, slot, group)->lo, kv_span(kv, slot, group)->hi);
    }
    rc = rc ? rc : vmem__kv_cut_unmap(kv, c);
    for (uint64_t k = 0; k < n * kv->n_groups && !rc; k++) {
        const uint32_t slot = slots[k / kv->n_groups], group = (uint32_t)(k % kv->n_groups);
        const uint32_t lo = kv_span(kv, slot, group)->lo;
        shrink_span(kv, slot, group, lo, lo);
    }
    kv->ledger.held -= rc ? 0 : c->n_pages;
    return rc;
}

int vmem__kv_cut_slot(vmem_kv *kv, uint32_t slot) { return vmem__kv_cut_slots(kv, &slot, 1); }

static bool window_passed(const vmem_kv *kv, const struct kv_span *sp)
{
    return sp->lo < sp->in_flight.lo && (!kv->turn.has_worker || sp->lo < sp->shared_hi);
}

bool vmem__kv_pass_windows(vmem_kv *kv, uint32_t slot)
{
    bool left = false;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        if (window_passed(kv, sp))
            vmem__kv_wait_slot(kv, slot); // the worker may be cutting this very span
        if (window_passed(kv, sp) && !vmem__kv_cut_now(kv, slot, i, sp->in_flight.lo, sp->hi))
            kv->stats.window_pages += kv->cut.n_pages;
        left |= sp->lo < sp->in_flight.lo;
    }
    return left;
}

// ---- freed slots ----------------------------------------------------------------------------------------------

int vmem__kv_park(vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_group *g = &kv->groups[group];
    const struct kv_span *s = kv_span(kv, slot, group);
    struct kv_doomed *d = &kv->doomed;
    const uint32_t end = MAX(s->shared_hi, s->lo);
    const uint64_t own = end - s->lo - vmem__kv_span_shared(kv, slot, group); // rare: left by dropped prefixes
    // Runs may doom all of their pages: keep room for them.
    int rc = vmem__kv_room_for(&d->pages, &d->cap, d->n + own * g->n + kv->runs.pages, sizeof(*d->pages));
    if (rc)
        return rc;
    for (uint32_t p = s->lo; p < end && own; p++)
        for (uint32_t t = 0; t < g->n && !vmem__kv_row(kv, slot, group, p); t++)
            d->pages[d->n++] = kv_table(kv, g, slot, t)[p];
    vmem__kv_rows_leave(kv, slot, group, s->lo, end);
    struct kv_span now = kv_span_at(end == s->hi ? 0 : end);
    if (end < s->hi) {
        now.hi = s->hi;
        now.coarse_hi = s->coarse_hi;
    }
    if (end > s->lo) // else the request perhaps never began, and what is stale stays so
        *kv_stale(kv, slot, group) = (struct kv_range){s->lo, end};
    if (kv_stale(kv, slot, group)->lo < kv_stale(kv, slot, group)->hi) {
        kv->slots[slot].stale = true;
        vmem__kv_set_add(&kv->stale_slots, slot);
    }
    vmem__kv_span_set(kv, slot, group, &now);
    return 0;
}

int vmem__kv_stale_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot)
{
    int rc = vmem__kv_room_for(&c->ops, &c->cap_ops, kv->n_tensors, sizeof(*c->ops));
    c->n_ops = c->n_pages = 0;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_range *s = kv_stale(kv, slot, i);
        for (uint32_t t = 0; t < g->n && s->lo < s->hi; t++)
            c->ops[c->n_ops++] = (struct vmem_unmap_op){.addr = kv_addr(kv, g, slot, t, s->lo),
                                                        .length = (uint64_t)(s->hi - s->lo) << kv->page_shift};
    }
    return rc;
}

void vmem__kv_stale_end(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        *kv_stale(kv, slot, i) = (struct kv_range){0};
    kv->slots[slot].stale = false;
    vmem__kv_set_remove(&kv->stale_slots, slot);
}

void vmem__kv_release_doomed(vmem_kv *kv)
{
    vmem__kv_release(kv, kv->doomed.pages, kv->doomed.n);
    kv->ledger.held -= kv->doomed.n;
    kv->doomed.n = 0;
}

void vmem__kv_release_soon(vmem_kv *kv)
{
    if (kv->turn.has_worker)
        vmem__kv_worker_wake(kv);
    else
        vmem__kv_release_doomed(kv);
}

int vmem__kv_stale_now(vmem_kv *kv, uint32_t slot)
{
    if (!kv->slots[slot].stale)
        return 0;
    vmem__kv_wait_cutting(kv);
    int rc = vmem__kv_stale_begin(kv, &kv->cut, slot);
    if (!rc)
        rc = vmem__kv_cut_unmap(kv, &kv->cut);
    if (!rc)
        vmem__kv_stale_end(kv, slot);
    return rc;
}
