// Prefixes: pages that several requests share.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/struct.h"
#include "kv/run/run.h"

int vmem__kv_prefix_find(const vmem_kv *kv, uint64_t id, struct kv_prefix **out)
{
    uint64_t i = (id & UINT32_MAX) - 1;
    if (i >= kv->prefixes.cap || !kv->prefixes.list[i] || kv->prefixes.list[i]->id != id)
        return vmem__error(-EINVAL, "this cache has no prefix %#" PRIx64 ": it was dropped, or is another's", id);
    *out = kv->prefixes.list[i];
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
    for (*index = 0; *index < kv->prefixes.cap; ++*index)
        if (!kv->prefixes.list[*index])
            return 0;
    uint64_t cap = kv->prefixes.cap;
    int rc = vmem__kv_room_for(&kv->prefixes.list, &kv->prefixes.cap, cap + 16, sizeof(*kv->prefixes.list));
    if (!rc)
        memset(kv->prefixes.list + cap, 0, (kv->prefixes.cap - cap) * sizeof(*kv->prefixes.list));
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
            vmem__kv_row_get(kv, slot, i, p->lo[i] + k);
        if (n)
            sp->shared_hi = KV_MAX(sp->shared_hi, p->hi[i]);
    }
    vmem__kv_prefix_hold(kv, p);
    kv->slots[slot].shared_tokens = KV_MAX(kv->slots[slot].shared_tokens, tokens);
    kv->idle[slot].named = KV_MAX(kv->idle[slot].named, tokens);
    p->id = (uint64_t)++kv->prefixes.generation << 32 | (index + 1);
    kv->prefixes.list[index] = p;
    kv->prefixes.n++;
    *id = p->id;
    return 0;
}

int vmem__kv_prefix_save(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *prefix)
{
    int rc = prefix ? vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE) : vmem__error(-EINVAL, "prefix must not be NULL");
    if (!rc)
        rc = vmem__kv_check_sharing(kv);
    if (!rc && (!tokens || tokens > kv->slots[slot].tokens))
        rc = vmem__error(-EINVAL, "tokens %u is not between 1 and the slot's %u", tokens, kv->slots[slot].tokens);
    return rc ? rc : save(kv, slot, tokens, prefix);
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
            vmem__kv_ref_hold(kv, vmem__kv_ref_find(&kv->refs, vmem__kv_prefix_pages(kv, p, i)[k]), 0, 1);
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
    kv->ledger.held -= n;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < p->hi[i] - p->lo[i]; k++)
            vmem__kv_ref_hold(kv, vmem__kv_ref_find(&kv->refs, vmem__kv_prefix_pages(kv, p, i)[k]), 0, -1);
    return 0;
}

int vmem__kv_prefix_drop(vmem_kv *kv, struct kv_prefix *p)
{
    int rc = vmem__kv_prefix_let_go(kv, p);
    if (rc)
        return rc;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        vmem__kv_unmark_shared(kv, s);
    kv->prefixes.list[(p->id & UINT32_MAX) - 1] = NULL;
    kv->prefixes.n--;
    free(p);
    return 0;
}

int vmem__kv_prefix_query(vmem_kv *kv, uint64_t prefix, struct vmem_kv_prefix_info *out)
{
    int rc = 0;
    struct kv_prefix *p = NULL;
    rc = out ? vmem__kv_prefix_find(kv, prefix, &p) : vmem__error(-EINVAL, "out must not be NULL");
    if (rc)
        return rc;
    struct vmem_kv_prefix_info info = {.tokens = p->tokens, .min_tokens = p->min_tokens, .pages = p->n_pages};
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < p->hi[i] - p->lo[i]; k++)
            info.own_pages += nobody_else(kv, vmem__kv_prefix_pages(kv, p, i)[k]) ? kv->groups[i].n : 0;
    return vmem__struct_give(out, &info, sizeof info, "out");
}
