// Backing: creates pages and maps them, all or nothing. Copies single pages.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>
#include <string.h>

#include "kv/kv.h"

// If at least so many 2 MiB blocks are consecutive, they are mapped by a call of their own, which can use 2 MiB
// entries. That call costs more than writing the small entries of two blocks, and about as much as those of three.
#define COARSE_BLOCKS 3

static int room_for_parts(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    int rc = kv->flags & VMEM_KV_CHECK ? vmem__kv_check_rule(kv, slot, group, from, to) : 0;
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
    const bool pays = kv->whole ? last >= head + 2 : b > 1 && last >= head + COARSE_BLOCKS * b;
    const uint32_t tail = pays && !g->window ? last : head;
    const bool joins = from > s->lo && from == s->hi;
    add_part(l, (struct kv_part){.slot = slot, .group = group, .from = from, .to = head, .joins = joins});
    add_part(l, (struct kv_part){.slot = slot, .group = group, .from = head, .to = tail, .coarse = true});
    add_part(l, (struct kv_part){.slot = slot, .group = group, .from = tail, .to = to});
    l->total += (uint64_t)(to - from) * g->n;
    l->n_coarse += kv->whole ? 0 : (uint64_t)(tail - head) * g->n;
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

void vmem__kv_release(vmem_kv *kv, const vmem_page *pages, uint64_t n)
{
    if (n)
        vmem_drop(kv->ctx, pages, n);
}

void vmem__kv_grow_undo(vmem_kv *kv, struct kv_grow *l)
{
    vmem__kv_release(kv, l->pages, l->n_pages);
    l->n_pages = 0;
}

// The length of the next stretch of pages that go together: the largest power of two that n pages allow.
static uint32_t next_whole(const vmem_kv *kv, uint32_t n)
{
    return n >= kv->whole ? kv->whole : 1u << (31 - __builtin_clz(n));
}

// Divides a tensor's n pages into as few stretches of pages that go together as possible.
static uint64_t list_whole(const vmem_kv *kv, uint32_t n, struct vmem__stretch *out)
{
    uint64_t listed = 0;
    for (uint32_t part; n; n -= part) {
        part = next_whole(kv, n);
        out[listed++] = (struct vmem__stretch){.n = part, .whole = part > 1};
    }
    return listed;
}

// Marks which of the part's pages go together.
static void set_joined(vmem_kv *kv, const struct kv_part *p)
{
    const struct kv_group *g = &kv->groups[p->group];
    bool *joined = kv->joined + g->joined + (uint64_t)p->slot * g->slot_pages;
    memset(joined + p->from, 0, p->to - p->from);
    for (uint32_t at = p->from, n; p->coarse && at < p->to; at += n) {
        n = next_whole(kv, p->to - at);
        memset(joined + at + 1, 1, n - 1);
    }
}

// Creates all pages in one call. The pages of one tensor are physically consecutive where possible.
static int create_pages(vmem_kv *kv, struct kv_grow *l)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < l->n_parts; i++) {
        const struct kv_part *p = &l->parts[i];
        const struct kv_group *g = &kv->groups[p->group];
        const uint64_t pages = p->to - p->from, most = p->coarse && kv->whole ? pages / kv->whole + 32 : 1;
        if (p->others)
            continue;
        int rc = vmem__kv_room_for(&l->stretches, &l->cap_stretches, n + most * g->n, sizeof(*l->stretches));
        if (rc)
            return rc;
        if (!p->coarse && !p->joins) {
            l->stretches[n++] = (struct vmem__stretch){.n = pages * g->n};
            continue;
        }
        // Blocks are placed tensor by tensor. If one tensor gets scattered pages, those of the next are aligned again,
        // so that 2 MiB entries can map them.
        for (uint32_t t = 0; t < g->n; t++) {
            if (p->coarse && kv->whole)
                n += list_whole(kv, (uint32_t)pages, l->stretches + n);
            else if (p->coarse)
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
        // With `whole`, there is one call, so that a failure leaves nothing mapped.
        struct vmem_map_op **next = p->coarse && !kv->whole ? &coarse : &fine, *op = *next;
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
        if (kv->whole)
            set_joined(kv, p);
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
        uint64_t window = kv->copy.scratch + t * kv->page_size, addr = kv_addr(kv, g, slot, t, page);
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
        vMemUnmap(kv->ctx, kv->copy.scratch, g->n * kv->page_size);
        kv->stats.copied_pages += rc ? 0 : g->n;
    }
    free(maps);
    return rc;
}
