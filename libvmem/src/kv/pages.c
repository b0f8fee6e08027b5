// Pages: creates and maps them, all or nothing; unmaps them, and releases those without another holder. Copies single
// pages.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv.h"

int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size)
{
    if (n <= *cap)
        return 0;
    uint64_t want = MAX(n, *cap * 2);
    void *p = realloc(*(void **)array, want * size);
    if (!p)
        return vmem__error(-ENOMEM, "no memory for a list of %" PRIu64 " elements", want);
    *(void **)array = p;
    *cap = want;
    return 0;
}

// ---- backing ---------------------------------------------------------------------------------------------------------

// If at least so many 2 MiB blocks are consecutive, they are mapped by a call of their own, which can use 2 MiB
// entries. That call costs more than writing the small entries of two blocks, and about as much as those of three.
#define COARSE_BLOCKS 3

// VMEM_KV_CHECK: checks the kernel rule. -EFAULT: kernels may be using a mapping of pages [from, to) of the span.
static int check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (from >= to || s->state == VMEM_KV_FREE || s->state == VMEM_KV_SWAPPED || s->fresh)
        return 0;
    if (from < sp->pinned.hi && to > sp->pinned.lo)
        return vmem__error(-EFAULT, "slot %u, pages [%u, %u) change while kernels may touch [%u, %u)", slot, from, to,
                           sp->pinned.lo, sp->pinned.hi);
    if (from < sp->coarse_hi && from % kv->block_pages)
        return vmem__error(-EFAULT, "slot %u, page %u: a part of a 2 MiB entry changes beside kernels", slot, from);
    return 0;
}

static int room_for_parts(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    int rc = kv->flags & VMEM_KV_CHECK ? check_rule(kv, slot, group, from, to) : 0;
    return rc ? rc : vmem__kv_room_for(&l->parts, &l->cap_parts, l->n_parts + 3, sizeof(*l->parts));
}

// The list has room (room_for_parts).
static void add_part(struct kv_grow *l, struct kv_part part)
{
    if (part.from < part.to)
        l->parts[l->n_parts++] = part;
}

// Plans to back pages [from, to), which the span lacks. Whole blocks form one aligned part. The rest of a partly backed
// block is placed next to the pages that the block has.
static int add_parts(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                     uint32_t coarse_hi)
{
    const struct kv_group *g = &kv->groups[group];
    const struct kv_span *s = kv_span(kv, slot, group);
    if (from >= to)
        return 0;
    int rc = room_for_parts(kv, l, slot, group, from, to);
    if (rc)
        return rc;
    const uint32_t b = kv->block_pages, head = MIN((from + b - 1) / b * b, to), last = MIN(to, coarse_hi) / b * b;
    const bool pays = b > 1 && last >= head + COARSE_BLOCKS * b;
    const uint32_t tail = pays && !g->window ? last : head;
    const bool joins = from > s->lo && from == s->hi;
    add_part(l, (struct kv_part){.slot = slot, .group = group, .from = from, .to = head, .joins = joins});
    add_part(l, (struct kv_part){.slot = slot, .group = group, .from = head, .to = tail, .coarse = true});
    add_part(l, (struct kv_part){.slot = slot, .group = group, .from = tail, .to = to});
    l->total += (uint64_t)(to - from) * g->n;
    l->n_coarse += (uint64_t)(tail - head) * g->n;
    return 0;
}

int vmem__kv_grow_to(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                     uint32_t coarse_hi)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    if (s->lo == s->hi)
        return add_parts(kv, l, slot, group, from, to, coarse_hi);
    int rc = add_parts(kv, l, slot, group, from, s->lo, coarse_hi);
    return rc ? rc : add_parts(kv, l, slot, group, s->hi, to, coarse_hi);
}

int vmem__kv_grow_share(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t row,
                        const vmem_page *pages, uint32_t stride)
{
    const uint32_t n = kv->groups[group].n;
    struct kv_part *last = l->n_parts ? &l->parts[l->n_parts - 1] : NULL;
    l->others += n;
    if (last && last->others && last->group == group && last->to == row && last->stride == stride &&
        last->others + (row - last->from) == pages) {
        last->to++;
        return 0;
    }
    int rc = room_for_parts(kv, l, slot, group, row, row + 1);
    if (!rc)
        add_part(l, (struct kv_part){
                        .slot = slot, .group = group, .from = row, .to = row + 1, .others = pages, .stride = stride});
    return rc;
}

void vmem__kv_grow_reset(struct kv_grow *l) { l->n_parts = l->total = l->others = l->n_pages = l->n_coarse = 0; }

void vmem__kv_grow_undo(vmem_kv *kv, struct kv_grow *l)
{
    vmem_drop(kv->ctx, l->pages, l->n_pages);
    l->n_pages = 0;
}

// Creates all pages in one call. The pages of one tensor are physically consecutive where possible.
static int create_pages(vmem_kv *kv, struct kv_grow *l)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < l->n_parts; i++) {
        const struct kv_part *p = &l->parts[i];
        const struct kv_group *g = &kv->groups[p->group];
        const uint64_t pages = p->to - p->from;
        if (p->others)
            continue;
        int rc = vmem__kv_room_for(&l->stretches, &l->cap_stretches, n + g->n, sizeof(*l->stretches));
        if (rc)
            return rc;
        if (!p->coarse && !p->joins) {
            l->stretches[n++] = (struct vmem__stretch){.n = pages * g->n};
            continue;
        }
        // Blocks are placed tensor by tensor. If one tensor gets scattered pages, those of the next are aligned again,
        // so that 2 MiB entries can map them.
        for (uint32_t t = 0; t < g->n; t++) {
            if (p->coarse)
                l->stretches[n++] = (struct vmem__stretch){.n = pages, .blocks = true, .more = pages * (g->n - 1 - t)};
            else
                l->stretches[n++] =
                    (struct vmem__stretch){.n = pages, .near = kv_table(kv, g, p->slot, t)[p->from - 1]};
        }
    }
    int rc = vmem__create_stretches(kv->ctx, kv->page_size, l->stretches, l->total, kv->create_flags, l->pages);
    l->n_pages = rc ? 0 : l->total;
    return rc;
}

// Lists the address of each page. The pages are in l->pages in the order in which create_pages() requested them.
static void list_addresses(vmem_kv *kv, struct kv_grow *l)
{
    const vmem_page *pages = l->pages;
    struct vmem_map_op *coarse = l->maps, *fine = l->maps + l->n_coarse;
    for (const struct kv_part *p = l->parts; p < l->parts + l->n_parts; p++) {
        const struct kv_group *g = &kv->groups[p->group];
        const uint32_t n = p->to - p->from;
        struct vmem_map_op **next = p->coarse ? &coarse : &fine, *op = *next;
        for (uint32_t t = 0; t < g->n; t++) {
            uint64_t addr = kv_addr(kv, g, p->slot, t, p->from);
            const vmem_page *now = p->others ? p->others + (uint64_t)t * p->stride : pages;
            pages += p->others ? 0 : n;
            memcpy(kv_table(kv, g, p->slot, t) + p->from, now, n * sizeof(*now));
            for (uint32_t c = 0; c < n; c++, addr += kv->page_size)
                *op++ = (struct vmem_map_op){.addr = addr, .page = now[c]};
        }
        *next = op;
    }
}

int vmem__kv_grow_map(vmem_kv *kv, struct kv_grow *l)
{
    const uint64_t n = l->total + l->others;
    int rc = vmem__kv_room_for(&l->pages, &l->cap_pages, l->total, sizeof(*l->pages));
    if (!rc)
        rc = vmem__kv_room_for(&l->maps, &l->cap_maps, n, sizeof(*l->maps));
    l->n_pages = 0;
    l->at = rc ? KV_GROW_LISTS : KV_GROW_CREATE;
    if (!rc && l->total)
        rc = create_pages(kv, l);
    if (!rc)
        list_addresses(kv, l);
    l->at = rc ? l->at : KV_GROW_MAP;
    if (!rc && l->n_coarse)
        rc = vMemMapBatch(kv->ctx, l->maps, l->n_coarse, 0, NULL);
    if (!rc && n > l->n_coarse)
        rc = vMemMapBatch(kv->ctx, l->maps + l->n_coarse, n - l->n_coarse, VMEM_MAP_FINE, NULL);
    if (rc)
        vmem__kv_grow_undo(kv, l);
    return rc;
}

void vmem__kv_grow_commit(vmem_kv *kv, struct kv_grow *l)
{
    for (uint64_t i = 0; i < l->n_parts; i++) {
        const struct kv_part *p = &l->parts[i];
        struct kv_span s = *kv_span(kv, p->slot, p->group);
        if (p->others)
            continue;
        if (s.lo == s.hi) // the span begins with this part
            s = kv_span_at(p->from);
        if (p->from < s.lo)
            s.lo = s.step.lo = s.step.hi = s.in_flight.lo = s.in_flight.hi = p->from; // no step has asked for rows yet
        s.hi = MAX(s.hi, p->to);
        s.coarse_hi = p->coarse ? MAX(s.coarse_hi, p->to) : s.coarse_hi;
        vmem__kv_span_set(kv, p->slot, p->group, &s);
    }
    vmem__kv_grow_reset(l);
}

// ---- contents -------------------------------------------------------------------------------------------------------

int vmem__kv_copy_pages(vmem_kv *kv, const struct kv_group *g, const vmem_page *pages, uint64_t stride, bool to_scratch,
                        uint32_t slot, uint32_t page, uint64_t bytes)
{
    struct vmem_map_op *maps = calloc(g->n, sizeof(*maps) + sizeof(struct vmem_copy_op));
    if (!maps)
        return vmem__error(-ENOMEM, "no memory to copy %u pages", g->n);
    struct vmem_copy_op *copies = (struct vmem_copy_op *)(maps + g->n);
    for (uint32_t t = 0; t < g->n; t++) {
        uint64_t window = kv->scratch + t * kv->page_size, addr = kv_addr(kv, g, slot, t, page);
        maps[t] = (struct vmem_map_op){.addr = window, .page = pages[t * stride]};
        copies[t] = (struct vmem_copy_op){.dst = to_scratch ? window : addr,
                                          .src = to_scratch ? addr : window,
                                          .length = bytes};
    }
    // A page may still be mapped here if the last unmap failed. It does no harm: this call replaces it, or its release
    // unmaps it.
    int rc = vMemMapBatch(kv->ctx, maps, g->n, VMEM_MAP_FINE | VMEM_MAP_REPLACE, NULL);
    if (!rc) {
        rc = vmem_copy_batch(kv->ctx, copies, g->n);
        vMemUnmap(kv->ctx, kv->scratch, g->n * kv->page_size);
        kv->stats.copied_pages += rc ? 0 : g->n;
    }
    free(maps);
    return rc;
}

// ---- giving up -------------------------------------------------------------------------------------------------------

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
        c->ops[c->n_ops++] = (struct vmem_range){.addr = kv_addr(kv, g, slot, t, from),
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
    c->hi = clamp(hi, c->lo, s->hi);
    c->n_ops = c->n_pages = 0;
    c->shared = false;
    int rc = kv->flags & VMEM_KV_CHECK ? check_rule(kv, slot, group, s->lo, c->lo) : 0;
    if (!rc && kv->flags & VMEM_KV_CHECK)
        rc = check_rule(kv, slot, group, c->hi, s->hi);
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
        vmem_drop(kv->ctx, c->pages, c->n_pages);
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

int vmem__kv_cut_slot(vmem_kv *kv, uint32_t slot)
{
    struct kv_cut *c = &kv->cut;
    int rc = 0;
    vmem__kv_wait_unmapping(kv);
    c->n_ops = c->n_pages = 0;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        rc = list_pages(kv, c, slot, i, kv_span(kv, slot, i)->lo, kv_span(kv, slot, i)->hi);
    rc = rc ? rc : vmem__kv_cut_unmap(kv, c);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        shrink_span(kv, slot, i, kv_span(kv, slot, i)->lo, kv_span(kv, slot, i)->lo);
    kv->ledger.held -= rc ? 0 : c->n_pages;
    return rc;
}

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

// ---- freed slots -----------------------------------------------------------------------------------------------------

void vmem__kv_stale_set(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    *kv_stale(kv, slot, group) = (struct kv_range){lo, hi};
    kv->slots[slot].stale = true;
    vmem__kv_set_add(kv->stale_slots, slot);
}

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
        vmem__kv_stale_set(kv, slot, group, s->lo, end);
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
            c->ops[c->n_ops++] = (struct vmem_range){.addr = kv_addr(kv, g, slot, t, s->lo),
                                                     .length = (uint64_t)(s->hi - s->lo) << kv->page_shift};
    }
    return rc;
}

void vmem__kv_stale_end(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        *kv_stale(kv, slot, i) = (struct kv_range){0};
    kv->slots[slot].stale = false;
    vmem__kv_set_remove(kv->stale_slots, slot);
}

void vmem__kv_release_doomed(vmem_kv *kv)
{
    vmem_drop(kv->ctx, kv->doomed.pages, kv->doomed.n);
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
