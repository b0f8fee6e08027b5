// Prefixes: pages that several requests share.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/struct.h"
#include "kv/kv.h"

static int find(const vmem_kv *kv, uint64_t id, struct kv_prefix **out)
{
    uint64_t i = (id & UINT32_MAX) - 1;
    if (i >= kv->cap_prefixes || !kv->prefixes[i] || kv->prefixes[i]->id != id)
        return vmem__error(-EINVAL, "prefix %#" PRIx64 " is none of this cache (any more)", id);
    *out = kv->prefixes[i];
    return 0;
}

vmem_page *vmem__kv_prefix_pages(const vmem_kv *kv, const struct kv_prefix *p, uint32_t group)
{
    vmem_page *pages = p->pages;
    for (uint32_t i = 0; i < group; i++)
        pages += (uint64_t)(p->hi[i] - p->lo[i]) * kv->groups[i].n;
    return pages;
}

// The smallest number of tokens for which the prefix has all rows that the next token reads.
static uint32_t least_tokens(const vmem_kv *kv, const struct kv_prefix *p)
{
    uint32_t least = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        uint32_t lo = least, hi = p->tokens + 1;
        while (lo < hi) {
            uint32_t middle = lo + (hi - lo) / 2;
            if (vmem__kv_need_lo(kv, &kv->groups[i], middle) >= p->lo[i])
                hi = middle;
            else
                lo = middle + 1;
        }
        least = lo;
    }
    return least;
}

static int new_entry(vmem_kv *kv, uint64_t *index)
{
    for (*index = 0; *index < kv->cap_prefixes; ++*index)
        if (!kv->prefixes[*index])
            return 0;
    uint64_t cap = kv->cap_prefixes;
    int rc = vmem__kv_room_for(&kv->prefixes, &kv->cap_prefixes, cap + 16, sizeof(*kv->prefixes));
    if (!rc)
        memset(kv->prefixes + cap, 0, (kv->cap_prefixes - cap) * sizeof(*kv->prefixes));
    return rc;
}

struct kv_prefix *vmem__kv_prefix_new(const vmem_kv *kv, uint32_t tokens, const struct kv_past *rows)
{
    uint64_t n_pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        n_pages += (uint64_t)(rows[i].hi - rows[i].lo) * kv->groups[i].n;
    struct kv_prefix *p = calloc(1, sizeof(*p) + n_pages * sizeof(*p->pages) + 2 * kv->n_groups * sizeof(*p->lo));
    if (!p) {
        vmem__error(-ENOMEM, "no memory for a prefix of %" PRIu64 " pages", n_pages);
        return NULL;
    }
    p->pages = (vmem_page *)(p + 1);
    p->lo = (uint32_t *)(p->pages + n_pages);
    p->hi = p->lo + kv->n_groups;
    p->n_pages = n_pages;
    p->tokens = tokens;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        p->lo[i] = rows[i].lo;
        p->hi[i] = rows[i].hi;
    }
    return p;
}

static int save(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *id)
{
    uint64_t index;
    int rc = new_entry(kv, &index);
    if (rc)
        return rc;
    struct kv_past *rows = calloc(kv->n_groups, sizeof(*rows));
    for (uint32_t i = 0; i < kv->n_groups && rows; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint64_t hi = (KV_MIN(tokens, g->max_tokens) * g->row_bytes + kv->page_size - 1) >> kv->page_shift;
        rows[i].lo =
            kv_span(kv, slot, i)->keep_lo; // rows in front may be cut at any time: the answer must not depend on it
        rows[i].hi = (uint32_t)KV_MAX(hi, rows[i].lo);
    }
    struct kv_prefix *p = rows ? vmem__kv_prefix_new(kv, tokens, rows) : NULL;
    free(rows);
    if (!p)
        return vmem__error(-ENOMEM, "no memory for a prefix of %u tokens", tokens);
    rc = vmem__kv_ref_reserve(&kv->refs, p->n_pages);
    p->min_tokens = least_tokens(kv, p);
    if (!rc && p->min_tokens > tokens)
        rc = vmem__error(-ENODATA, "tokens %u: the window has given up rows that the next one reads", tokens);
    if (rc) {
        free(p);
        return rc;
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t n = p->hi[i] - p->lo[i];
        vmem_page *pages = vmem__kv_prefix_pages(kv, p, i);
        for (uint32_t t = 0; t < kv->groups[i].n; t++)
            memcpy(pages + (uint64_t)t * n, kv_table(kv, &kv->groups[i], slot, t) + p->lo[i], n * sizeof(*pages));
        for (uint32_t k = 0; k < n; k++)
            vmem__kv_ref_get(&kv->refs, pages[k], kv->groups[i].n);
        if (n)
            sp->shared_hi = KV_MAX(sp->shared_hi, p->hi[i]);
    }
    vmem__kv_prefix_hold(kv, p);
    kv->slots[slot].shared_tokens = KV_MAX(kv->slots[slot].shared_tokens, tokens);
    kv->idle[slot].named = KV_MAX(kv->idle[slot].named, tokens);
    p->id = (uint64_t)++kv->prefix_generation << 32 | (index + 1);
    kv->prefixes[index] = p;
    kv->n_prefixes++;
    *id = p->id;
    return 0;
}

int vmem_kv_prefix_save(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *prefix)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = prefix ? vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE) : vmem__error(-EINVAL, "prefix must not be NULL");
    if (!rc)
        rc = vmem__kv_check_sharing(kv);
    if (!rc && (!tokens || tokens > kv->slots[slot].tokens))
        rc = vmem__error(-EINVAL, "tokens %u is not between 1 and the slot's %u", tokens, kv->slots[slot].tokens);
    return vmem__kv_leave(kv, rc ? rc : save(kv, slot, tokens, prefix));
}

static bool nobody_else(const vmem_kv *kv, vmem_page page)
{
    const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, page);
    return !ref->slots && ref->prefixes == 1;
}

void vmem__kv_unmark_shared(vmem_kv *kv, uint32_t slot)
{
    bool some = false;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        if (!sp->shared_hi)
            continue;
        while (sp->shared_hi > sp->lo && !kv_row(kv, slot, i, sp->shared_hi - 1))
            sp->shared_hi--;
        sp->shared_hi = sp->shared_hi > sp->lo ? sp->shared_hi : 0;
        some |= sp->shared_hi;
    }
    kv->slots[slot].shared_tokens *= some;
}

void vmem__kv_prefix_hold(vmem_kv *kv, const struct kv_prefix *p)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < p->hi[i] - p->lo[i]; k++)
            vmem__kv_ref_hold(&kv->refs, vmem__kv_ref_find(&kv->refs, vmem__kv_prefix_pages(kv, p, i)[k]), 0, 1);
}

int vmem__kv_prefix_let_go(vmem_kv *kv, const struct kv_prefix *p)
{
    vmem__kv_wait_cut(kv);
    struct kv_grow *l = &kv->grow; // only its page list is used
    int rc = vmem__kv_room_for(&l->pages, &l->cap_pages, p->n_pages, sizeof(*l->pages));
    if (rc)
        return rc;
    uint64_t n = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const vmem_page *pages = vmem__kv_prefix_pages(kv, p, i);
        uint32_t rows = p->hi[i] - p->lo[i];
        for (uint32_t t = 0; t < kv->groups[i].n; t++)
            for (uint32_t k = 0; k < rows; k++)
                if (nobody_else(kv, pages[k]))
                    l->pages[n++] = pages[(uint64_t)t * rows + k];
    }
    rc = n ? vMemReleaseBatch(kv->ctx, l->pages, n, NULL) : 0;
    if (rc)
        return rc;
    kv->held -= n;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < p->hi[i] - p->lo[i]; k++)
            vmem__kv_ref_hold(&kv->refs, vmem__kv_ref_find(&kv->refs, vmem__kv_prefix_pages(kv, p, i)[k]), 0, -1);
    return 0;
}

int vmem__kv_prefix_drop(vmem_kv *kv, struct kv_prefix *p)
{
    int rc = vmem__kv_prefix_let_go(kv, p);
    if (rc)
        return rc;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        vmem__kv_unmark_shared(kv, s);
    kv->prefixes[(p->id & UINT32_MAX) - 1] = NULL;
    kv->n_prefixes--;
    free(p);
    return 0;
}

int vmem_kv_prefix_drop(vmem_kv *kv, uint64_t prefix)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    struct kv_prefix *p = NULL;
    rc = find(kv, prefix, &p);
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_prefix_drop(kv, p));
}

int vmem_kv_prefix_query(vmem_kv *kv, uint64_t prefix, struct vmem_kv_prefix_info *out)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    struct kv_prefix *p = NULL;
    rc = out ? find(kv, prefix, &p) : vmem__error(-EINVAL, "out must not be NULL");
    if (rc)
        return vmem__kv_leave(kv, rc);
    struct vmem_kv_prefix_info info = {.tokens = p->tokens, .min_tokens = p->min_tokens, .pages = p->n_pages};
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < p->hi[i] - p->lo[i]; k++)
            info.own_pages += nobody_else(kv, vmem__kv_prefix_pages(kv, p, i)[k]) ? kv->groups[i].n : 0;
    return vmem__kv_leave(kv, vmem__struct_give(out, &info, sizeof info, "out"));
}

// ---- attaching ----------------------------------------------------------------------------------------------

// How the pages of a group are divided. Pages [lo, full) are shared, and pages [full, hi) are the slot's own. The first
// own page begins with `part` bytes of the prefix.
struct split {
    uint32_t lo, full, hi;
    uint64_t part;
};

static struct split split(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens)
{
    uint64_t bytes = KV_MIN(tokens, g->max_tokens) * g->row_bytes;
    struct split s = {.lo = vmem__kv_need_lo(kv, g, tokens),
                      .full = (uint32_t)(bytes >> kv->page_shift),
                      .hi = vmem__kv_need_hi(kv, g, tokens),
                      .part = bytes & (kv->page_size - 1)};
    s.full = KV_MAX(s.full, s.lo);
    return s;
}

// Copies the first `bytes` bytes of one page for each tensor of the group. These pages need not be mapped anywhere.
static int copy_pages(vmem_kv *kv, const struct kv_group *g, const vmem_page *pages, uint64_t stride, bool to_scratch,
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

static int map_shared(vmem_kv *kv, const struct kv_prefix *p, uint32_t slot, uint32_t tokens, uint64_t *n_ops)
{
    struct kv_grow *l = &kv->grow;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct split s = split(kv, g, tokens);
        int rc = vmem__kv_room_for(&l->fine, &l->cap_fine, *n_ops + (uint64_t)(s.full - s.lo) * g->n, sizeof(*l->fine));
        if (rc)
            return rc;
        for (uint32_t t = 0; t < g->n; t++) {
            const vmem_page *from = vmem__kv_prefix_pages(kv, p, i) + (uint64_t)t * (p->hi[i] - p->lo[i]);
            for (uint32_t k = s.lo; k < s.full; k++)
                l->fine[(*n_ops)++] =
                    (struct vmem_map_op){.addr = kv_addr(kv, g, slot, t, k), .page = from[k - p->lo[i]]};
        }
    }
    return *n_ops ? vMemMapBatch(kv->ctx, l->fine, *n_ops, VMEM_MAP_FINE, NULL) : 0;
}

static void unmap_shared(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct split s = split(kv, g, tokens);
        for (uint32_t t = 0; t < g->n && s.full > s.lo; t++)
            vMemUnmap(kv->ctx, kv_addr(kv, g, slot, t, s.lo), (uint64_t)(s.full - s.lo) << kv->page_shift);
    }
}

static void commit_attach(vmem_kv *kv, const struct kv_prefix *p, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *sl = &kv->slots[slot];
    vmem__kv_grow_commit(kv, &kv->grow);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct split s = split(kv, g, tokens);
        if (s.lo == s.hi)
            continue;
        struct kv_span *sp = kv_span(kv, slot, i);
        *sp = (struct kv_span){.lo = s.lo,
                               .hi = KV_MAX(s.hi, sp->hi),
                               .need_lo = s.lo,
                               .need_hi = s.hi,
                               .keep_lo = s.lo,
                               .keep_hi = s.hi,
                               .shared_hi = s.full > s.lo ? s.full : 0,
                               .coarse_hi = sp->coarse_hi};
        for (uint32_t t = 0; t < g->n; t++)
            memcpy(kv_table(kv, g, slot, t) + s.lo,
                   vmem__kv_prefix_pages(kv, p, i) + (uint64_t)t * (p->hi[i] - p->lo[i]) + (s.lo - p->lo[i]),
                   (s.full - s.lo) * sizeof(vmem_page));
        for (uint32_t k = s.lo; k < s.full; k++)
            vmem__kv_ref_hold(&kv->refs, kv_row(kv, slot, i, k), 1, 0);
        kv->stats.attached_pages += (uint64_t)(s.full - s.lo) * g->n;
        if (s.full > s.lo)
            sl->shared_tokens = kv->idle[slot].named = tokens;
    }
    sl->tokens = tokens;
    vmem__kv_set_backed(kv, slot);
}

int vmem__kv_keep_tail(vmem_kv *kv, uint32_t slot, uint32_t tokens, bool gap)
{
    int rc = vmem__kv_stale_now(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        struct split s = split(kv, &kv->groups[i], tokens);
        uint32_t hi = sp->lo > (gap ? s.hi : s.full) ? sp->lo : sp->coarse_hi > s.full ? s.hi : sp->hi;
        rc = vmem__kv_cut_now(kv, slot, i, s.full, hi);
    }
    if (!rc && kv->slots[slot].dirty)
        rc = vmem__kv_clear_slot(kv, slot);
    kv->slots[slot].dirty &= rc != 0;
    return rc;
}

// Protects the slot's pages that will contain the prefix's rows from being reclaimed during the attach.
static void hold_tail(vmem_kv *kv, uint32_t slot, uint32_t tokens, bool on)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->keep_hi = on ? KV_MIN(KV_MAX(split(kv, &kv->groups[i], tokens).hi, sp->lo), sp->hi) : sp->need_hi;
    }
}

uint64_t vmem__kv_prefix_copies(const vmem_kv *kv, uint32_t tokens)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct split s = split(kv, &kv->groups[i], tokens);
        pages += (uint64_t)(s.hi - s.full) * kv->groups[i].n;
    }
    return pages;
}

int vmem__kv_prefix_attach(vmem_kv *kv, const struct kv_prefix *p, uint32_t slot, uint32_t tokens, uint64_t *missing)
{
    struct kv_grow *l = &kv->grow;
    vmem__kv_wait_cut(kv);
    int rc = vmem__kv_keep_tail(kv, slot, tokens, true);
    if (rc)
        return rc;
    hold_tail(kv, slot, tokens, true);
    vmem__kv_grow_reset(l);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        struct split s = split(kv, &kv->groups[i], tokens);
        rc = vmem__kv_grow_to(kv, l, slot, i, s.full, s.hi, 0);
    }
    uint64_t total = l->total, n_shared = 0;
    if (!rc && total)
        rc = vmem__kv_grow_make(kv, l, missing);
    if (!rc) {
        rc = map_shared(kv, p, slot, tokens, &n_shared);
        if (rc == -ENOMEM && !(rc = vmem__kv_make_mappings(kv, n_shared, missing))) {
            n_shared = 0;
            rc = map_shared(kv, p, slot, tokens, &n_shared);
            rc = rc == -ENOMEM ? vmem__kv_short_of_mappings(kv, n_shared, missing) : rc;
        }
        bool mapped = !rc;
        for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
            struct split s = split(kv, &kv->groups[i], tokens);
            uint32_t n = p->hi[i] - p->lo[i];
            if (s.part && s.full < s.hi)
                rc = copy_pages(kv, &kv->groups[i], vmem__kv_prefix_pages(kv, p, i) + (s.full - p->lo[i]), n, false,
                                slot, s.full, s.part);
        }
        if (rc && mapped)
            unmap_shared(kv, slot, tokens);
        if (rc && total) {
            vmem__kv_grow_undo(kv, l);
            kv->held -= total;
        }
    }
    if (rc) {
        kv->slots[slot].dirty |= (kv->flags & VMEM_KV_ZERO) != 0; // a kept page may already contain rows of the prefix
        hold_tail(kv, slot, tokens, false);
        vmem__kv_grow_reset(l);
        return rc;
    }
    commit_attach(kv, p, slot, tokens);
    return 0;
}

// Finds the prefix, and checks that `tokens` rows of it can be attached.
static int find_rows(const vmem_kv *kv, uint64_t id, uint32_t tokens, struct kv_prefix **out)
{
    int rc = find(kv, id, out);
    if (!rc && (!tokens || tokens > (*out)->tokens))
        rc = vmem__error(-EINVAL, "tokens %u is not between 1 and the prefix's %u", tokens, (*out)->tokens);
    if (!rc && tokens < (*out)->min_tokens)
        rc = vmem__error(-ENODATA, "tokens %u: the prefix's window tensors begin too late; %u or more", tokens,
                         (*out)->min_tokens);
    return rc;
}

int vmem_kv_prefix_attach(vmem_kv *kv, uint64_t prefix, uint32_t slot, uint32_t tokens, uint64_t *missing)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    struct kv_prefix *p = NULL;
    vmem__kv_enough();
    rc = find_rows(kv, prefix, tokens, &p);
    if (!rc)
        rc = vmem__kv_get_new(kv, slot);
    if (!rc && (rc = vmem__kv_prefix_attach(kv, p, slot, tokens, missing)) == -ENOMEM)
        vmem__kv_count_shortage(kv);
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_prefix_check(vmem_kv *kv, uint64_t prefix, uint32_t tokens, uint64_t *missing)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    struct kv_prefix *p = NULL;
    rc = find_rows(kv, prefix, tokens, &p);
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_would_fit(kv, vmem__kv_prefix_copies(kv, tokens), missing));
}

// ---- copy before write --------------------------------------------------------------------------------------

// Replaces page `page` of every tensor with a copy.
static int replace(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    const struct kv_group *g = &kv->groups[group];
    struct kv_grow *l = &kv->grow;
    int rc = vmem__kv_room_for(&l->pages, &l->cap_pages, g->n, sizeof(*l->pages));
    if (!rc)
        rc = vmem__kv_room_for(&l->fine, &l->cap_fine, g->n, sizeof(*l->fine));
    if (rc)
        return rc;
    rc = vMemCreate(kv->ctx, kv->page_size, g->n, kv->create_flags, l->pages);
    if (rc == -ENOMEM && !vmem__kv_make_device_room(kv, g->n, NULL))
        rc = vMemCreate(kv->ctx, kv->page_size, g->n, kv->create_flags, l->pages);
    if (rc)
        return rc;
    struct kv_ref *row = kv_row(kv, slot, group, page);
    if (!row) { // making room evicted the other holder
        vmem__kv_release(kv, l->pages, g->n);
        return 0;
    }
    rc = copy_pages(kv, g, l->pages, 1, true, slot, page, kv->page_size);
    for (uint32_t t = 0; t < g->n; t++)
        l->fine[t] = (struct vmem_map_op){.addr = kv_addr(kv, g, slot, t, page), .page = l->pages[t]};
    if (!rc)
        rc = vMemMapBatch(kv->ctx, l->fine, g->n, VMEM_MAP_REPLACE | VMEM_MAP_FINE, NULL);
    if (rc) {
        vmem__kv_release(kv, l->pages, g->n);
        return rc;
    }
    kv->held += g->n;
    vmem__kv_ref_hold(&kv->refs, row, -1, 0);
    for (uint32_t t = 0; t < g->n; t++)
        kv_table(kv, g, slot, t)[page] = l->pages[t];
    return 0;
}

// Whether the group's page that contains row `tokens` is shared and must be copied.
static bool cuts_shared(const vmem_kv *kv, uint32_t slot, uint32_t group, struct split s)
{
    return s.part && s.full < kv_span(kv, slot, group)->shared_hi && kv_row(kv, slot, group, s.full);
}

uint64_t vmem__kv_unshare_pages(const vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        pages += cuts_shared(kv, slot, i, split(kv, &kv->groups[i], tokens)) ? kv->groups[i].n : 0;
    return pages;
}

int vmem__kv_unshare(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    vmem__kv_wait_cut(kv);
    // First do the work that can fail for want of memory. It copies whole pages, so a failure loses no data. All groups
    // find room or none, as vmem_kv_truncate_check says.
    const int room = vmem__kv_make_room(kv, vmem__kv_unshare_pages(kv, slot, tokens), NULL);
    if (room)
        return room;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct split s = split(kv, &kv->groups[i], tokens);
        int rc = cuts_shared(kv, slot, i, s) ? replace(kv, slot, i, s.full) : 0;
        if (rc)
            return rc;
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct split s = split(kv, &kv->groups[i], tokens);
        struct kv_span *sp = kv_span(kv, slot, i);
        if (s.full >= sp->shared_hi)
            continue;
        int rc = vmem__kv_cut_now(kv, slot, i, sp->lo, s.full + (s.part != 0));
        if (rc)
            return rc;
        sp->shared_hi = KV_MIN(sp->shared_hi, s.full);
    }
    return 0;
}
