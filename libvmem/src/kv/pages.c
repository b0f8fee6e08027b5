// Backing parts of spans with pages, and giving them up.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "kv/kv.h"

// A run of at least this many 2 MiB blocks is mapped apart from the small pages around it, so that it can have 2 MiB
// entries: writing the small entries of two blocks costs less than the call more, of three about as much.
#define COARSE_BLOCKS 3

int kv_grow_add(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                uint32_t coarse_hi)
{
    const struct kv_group *g = &kv->groups[group];
    if (from >= to)
        return 0;
    int rc = kv->flags & VMEM_KV_CHECK ? kv_check_rule(kv, slot, group, from, to) : 0;
    if (!rc)
        rc = kv_room_for(&l->parts, &l->cap_parts, l->n_parts + 1, sizeof(*l->parts));
    if (rc)
        return rc;
    uint32_t b = kv->block, first = (from + b - 1) / b * b, last = KV_MIN(to, coarse_hi) / b * b;
    bool coarse = b > 1 && !g->window && last >= first + COARSE_BLOCKS * b;
    l->parts[l->n_parts++] = (struct kv_part){
        .slot = slot, .group = group, .from = from, .to = to, .coarse_hi = coarse ? last : 0,
        .joins = from > kv_span(kv, slot, group)->lo && from == kv_span(kv, slot, group)->hi};
    l->total += (uint64_t)(to - from) * g->n;
    return 0;
}

void kv_grow_reset(struct kv_grow *l)
{
    l->n_parts = l->total = l->n_pages = l->n_fine = l->n_coarse = 0;
}

uint64_t kv_release(vmem_kv *kv, const vmem_page *pages, uint64_t n)
{
    uint64_t done = 0;
    if (!n || !vMemReleaseBatch(kv->ctx, pages, n, NULL))
        return n;
    for (uint64_t i = 0; i < n; i++) // which takes no memory
        done += !vMemRelease(kv->ctx, pages[i]);
    return done;
}

void kv_grow_undo(vmem_kv *kv, struct kv_grow *l)
{
    kv_release(kv, l->pages, l->n_pages);
    l->n_pages = 0;
}

// Creates pages [from, to) of the part in every tensor: of one tensor physically consecutive where possible.
static int create(vmem_kv *kv, struct kv_grow *l, const struct kv_part *p, uint32_t from, uint32_t to, bool coarse)
{
    const struct kv_group *g = &kv->groups[p->group];
    uint64_t n = to - from, total = n * g->n;
    vmem_page *pages = l->pages + l->n_pages;
    int rc;
    if (!n)
        return 0;
    if (from % kv->block && p->joins && from == p->from) { // the rest of a block: next to the block's other pages
        for (uint32_t t = 0; t < g->n; t++) {
            vmem_page before = kv_table(kv, g, p->slot, t)[from - 1];
            rc = vmem__create_near(kv->ctx, kv->page_size, n, before, kv->create_flags, l->pages + l->n_pages);
            if (rc)
                return rc;
            l->n_pages += n;
        }
    } else {
        rc = vMemCreate(kv->ctx, kv->page_size, total, kv->create_flags, pages);
        if (rc)
            return rc;
        l->n_pages += total;
    }
    for (uint32_t t = 0; t < g->n; t++) {
        struct vmem_map_op *op = coarse ? l->coarse + l->n_coarse : l->fine + l->n_fine;
        uint64_t addr = kv_addr(kv, g, p->slot, t, from);
        memcpy(kv_table(kv, g, p->slot, t) + from, pages + t * n, n * sizeof(*pages));
        for (uint64_t i = 0; i < n; i++)
            op[i] = (struct vmem_map_op){.addr = addr + (i << kv->page_shift), .page = pages[t * n + i]};
        *(coarse ? &l->n_coarse : &l->n_fine) += n;
    }
    return 0;
}

int kv_grow_run(vmem_kv *kv, struct kv_grow *l)
{
    int rc = kv_room_for(&l->pages, &l->cap_pages, l->total, sizeof(*l->pages));
    if (!rc)
        rc = kv_room_for(&l->fine, &l->cap_fine, l->total, sizeof(*l->fine));
    if (!rc)
        rc = kv_room_for(&l->coarse, &l->cap_coarse, l->total, sizeof(*l->coarse));
    l->n_pages = l->n_fine = l->n_coarse = 0;
    for (uint64_t i = 0; i < l->n_parts && !rc; i++) {
        const struct kv_part *p = &l->parts[i];
        uint32_t b = kv->block, head = KV_MIN((p->from + b - 1) / b * b, p->to), tail = p->to / b * b;
        uint32_t coarse = p->coarse_hi;
        tail = KV_MAX(tail, head);
        // Whole blocks are created together and aligned; a block's rest next to the pages it has.
        rc = create(kv, l, p, p->from, head, false);
        if (!rc && coarse > head)
            rc = create(kv, l, p, head, coarse, true);
        if (!rc)
            rc = create(kv, l, p, KV_MAX(head, coarse), p->to, false);
    }
    if (!rc && l->n_coarse)
        rc = vMemMapBatch(kv->ctx, l->coarse, l->n_coarse, 0, NULL);
    if (!rc && l->n_fine)
        rc = vMemMapBatch(kv->ctx, l->fine, l->n_fine, VMEM_MAP_FINE, NULL);
    if (rc)
        kv_grow_undo(kv, l);
    return rc;
}

void kv_grow_commit(vmem_kv *kv, struct kv_grow *l)
{
    for (uint64_t i = 0; i < l->n_parts; i++) {
        const struct kv_part *p = &l->parts[i];
        struct kv_span *s = kv_span(kv, p->slot, p->group);
        if (s->lo == s->hi) // begins here
            *s = (struct kv_span){.lo = p->from, .need_lo = p->from, .need_hi = p->from, .keep_lo = p->from,
                                  .keep_hi = p->from, .shared_hi = 0, .coarse_hi = 0};
        s->hi = p->to;
        s->coarse_hi = KV_MAX(s->coarse_hi, p->coarse_hi);
        kv_set_backed(kv, p->slot);
    }
    kv_grow_reset(l);
}

// ---- giving up ----------------------------------------------------------------------------------------------

static int cut_part(vmem_kv *kv, struct kv_cut *c, uint32_t from, uint32_t to)
{
    const struct kv_group *g = &kv->groups[c->group];
    if (from >= to)
        return 0;
    int rc = kv->flags & VMEM_KV_CHECK ? kv_check_rule(kv, c->slot, c->group, from, to) : 0;
    if (!rc)
        rc = kv_room_for(&c->ops, &c->cap_ops, c->n_ops + g->n, sizeof(*c->ops));
    if (!rc)
        rc = kv_room_for(&c->pages, &c->cap_pages, c->n_pages + (uint64_t)(to - from) * g->n, sizeof(*c->pages));
    if (rc)
        return rc;
    uint32_t shared = KV_MIN(KV_MAX(c->before.shared_hi, from), to);
    for (uint32_t t = 0; t < g->n; t++) {
        c->ops[c->n_ops++] = (struct vmem_unmap_op){
            .addr = kv_addr(kv, g, c->slot, t, from), .length = (uint64_t)(to - from) << kv->page_shift};
        const vmem_page *pages = kv_table(kv, g, c->slot, t);
        for (uint32_t i = from; i < shared; i++) {
            const struct kv_ref *ref = kv_ref_find(&kv->refs, pages[i]);
            if (!ref || ref->slots + ref->prefixes == 1)
                c->pages[c->n_pages++] = pages[i];
        }
        memcpy(c->pages + c->n_pages, pages + shared, (to - shared) * sizeof(*pages));
        c->n_pages += to - shared;
    }
    return 0;
}

int kv_cut_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    struct kv_span *s = kv_span(kv, slot, group);
    lo = KV_MIN(KV_MAX(lo, s->lo), s->hi);
    hi = KV_MAX(KV_MIN(hi, s->hi), lo);
    c->slot = slot;
    c->group = group;
    c->before = *s;
    c->n_ops = c->n_pages = 0;
    int rc = cut_part(kv, c, s->lo, lo);
    if (!rc)
        rc = cut_part(kv, c, hi, s->hi);
    if (rc)
        return rc;
    if (lo == hi)
        lo = hi = 0;
    c->lo = lo;
    c->hi = hi;
    s->lo = lo;
    s->hi = hi;
    s->need_lo = KV_MIN(KV_MAX(s->need_lo, lo), hi);
    s->need_hi = KV_MIN(KV_MAX(s->need_hi, lo), hi);
    s->keep_lo = KV_MIN(KV_MAX(s->keep_lo, lo), hi);
    s->keep_hi = KV_MIN(KV_MAX(s->keep_hi, lo), hi);
    s->shared_hi = s->shared_hi > lo ? KV_MIN(s->shared_hi, hi) : 0;
    s->coarse_hi = KV_MIN(s->coarse_hi, hi);
    kv_set_backed(kv, slot);
    return 0;
}

int kv_cut_run(vmem_kv *kv, struct kv_cut *c)
{
    if (!c->n_ops)
        return 0;
    int rc = vMemUnmapBatch(kv->ctx, c->ops, c->n_ops, NULL);
    if (!rc)
        c->n_pages = kv_release(kv, c->pages, c->n_pages);
    return rc;
}

static void let_go(vmem_kv *kv, const struct kv_cut *c, uint32_t from, uint32_t to)
{
    const struct kv_group *g = &kv->groups[c->group];
    for (uint32_t t = 0; t < g->n; t++) {
        const vmem_page *pages = kv_table(kv, g, c->slot, t);
        for (uint32_t i = from; i < to; i++) {
            struct kv_ref *ref = kv_ref_find(&kv->refs, pages[i]);
            if (!ref)
                continue;
            ref->slots--;
            if (!ref->slots && ref->prefixes)
                kv->prefix_only++;
            else if (ref->slots + ref->prefixes == 0 || (ref->slots == 1 && !ref->prefixes))
                kv_ref_remove(&kv->refs, ref);
        }
    }
}

void kv_cut_end(vmem_kv *kv, struct kv_cut *c, int rc)
{
    const struct kv_span *b = &c->before;
    if (rc) {
        // What steps asked for meanwhile, beside the worker, lies in what was to stay, and holds.
        struct kv_span *s = kv_span(kv, c->slot, c->group), now = *s;
        *s = *b;
        if (c->lo != c->hi) {
            s->need_lo = now.need_lo;
            s->need_hi = now.need_hi;
            s->keep_lo = now.keep_lo;
            s->keep_hi = now.keep_hi;
        }
        kv_set_backed(kv, c->slot);
        return;
    }
    if (b->shared_hi) {
        // An empty span was cut as a whole.
        uint32_t lo = c->lo == c->hi ? b->hi : c->lo, hi = c->lo == c->hi ? b->hi : c->hi;
        let_go(kv, c, b->lo, KV_MIN(lo, b->shared_hi));
        let_go(kv, c, KV_MIN(hi, b->shared_hi), KV_MIN(b->hi, b->shared_hi));
    }
    kv->held -= c->n_pages;
}

int kv_cut_now(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    int rc = kv_cut_begin(kv, &kv->cut, slot, group, lo, hi);
    if (rc)
        return rc;
    rc = kv_cut_run(kv, &kv->cut);
    kv_cut_end(kv, &kv->cut, rc);
    if (rc)
        *kv_span(kv, slot, group) = kv->cut.before; // nobody else was at it, and what it clipped is as it was
    return rc;
}

int kv_cut_slot(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        int rc = kv_cut_now(kv, slot, i, 0, 0);
        if (rc)
            return rc;
    }
    return 0;
}
