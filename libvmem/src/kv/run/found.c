// Looking blocks up by hash, for requests that begin with them.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/run/hash.h"

// The pages of a group that contain the rows that the next token of a request of `tokens` tokens reads.
static struct kv_past rows_read(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens)
{
    const uint64_t bytes = KV_MIN(tokens, g->max_tokens) * g->row_bytes;
    const uint32_t lo = vmem__kv_need_lo(kv, g, tokens), hi = (uint32_t)((bytes + kv->page_size - 1) >> kv->page_shift);
    return (struct kv_past){lo, KV_MAX(lo, hi)};
}

// The block, in a sequence of `tokens` tokens, that has the page with all rows that begin in it. This is the last block
// that has the page.
static uint32_t block_of(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens, uint32_t page)
{
    const uint64_t behind = (((uint64_t)page + 1) << kv->page_shift) + g->row_bytes - 1;
    return (uint32_t)((KV_MIN(behind / g->row_bytes, KV_MIN(tokens, g->max_tokens)) - 1) / kv->hashes->block_tokens);
}

// Whether a request that begins with the first `n` of the blocks found has all rows that its next token reads. Windows
// may have passed some of them.
static bool windows_allow(const vmem_kv *kv, uint32_t n)
{
    const struct kv_hashes *h = kv->hashes;
    const uint32_t tokens = n * h->block_tokens;
    for (uint32_t i = 0; i < kv->n_groups && kv->windows; i++) {
        const struct kv_past rows = rows_read(kv, &kv->groups[i], tokens);
        if (!kv->groups[i].window || rows.lo == rows.hi)
            continue;
        const uint32_t last = block_of(kv, &kv->groups[i], tokens, rows.hi - 1);
        for (uint32_t k = block_of(kv, &kv->groups[i], tokens, rows.lo); k <= last; k++)
            if (!*vmem__kv_hash_pages(kv, &h->blocks[h->found[k]], i))
                return false;
    }
    return true;
}

uint32_t vmem__kv_hash_tokens(const vmem_kv *kv, uint32_t blocks)
{
    return blocks ? blocks * kv->hashes->block_tokens : 0; // if there are blocks, kv->hashes is set
}

int vmem__kv_hash_known(vmem_kv *kv, const struct vmem_kv_hash *hashes, uint64_t n, uint32_t *blocks)
{
    struct kv_hashes *h = kv->hashes;
    n = KV_MIN(n, kv->max_tokens / h->block_tokens);
    int rc = vmem__kv_room_for(&h->found, &h->cap_found, n, sizeof(*h->found));
    for (*blocks = 0; !rc && *blocks < n; ++*blocks) {
        const uint32_t i = vmem__kv_hash_find(h, &hashes[*blocks]);
        if (i == KV_NO_BLOCK || h->blocks[i].index != *blocks)
            break;
        h->found[*blocks] = i;
    }
    while (*blocks && !windows_allow(kv, *blocks))
        --*blocks;
    return rc;
}

static const vmem_page *page_of(const vmem_kv *kv, uint32_t group, uint32_t tokens, uint32_t page, uint32_t *stride)
{
    const struct kv_hashes *h = kv->hashes;
    const struct kv_group *g = &kv->groups[group];
    const struct kv_hashed *b = &h->blocks[h->found[block_of(kv, g, tokens, page)]];
    const struct kv_past rows = vmem__kv_hash_rows(kv, g, b->index);
    *stride = rows.hi - rows.lo;
    return vmem__kv_hash_pages(kv, b, group) + (page - rows.lo);
}

uint64_t vmem__kv_hash_taken(vmem_kv *kv, uint32_t blocks, uint64_t *copied)
{
    const uint32_t tokens = blocks * kv->hashes->block_tokens;
    uint64_t pages = 0;
    *copied = 0;
    for (uint32_t i = 0; i < kv->n_groups && !(kv->hashes->flags & VMEM_KV_HASH_MANUAL); i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_past rows = rows_read(kv, g, tokens);
        const uint64_t full = KV_MIN(tokens, g->max_tokens) * g->row_bytes >> kv->page_shift;
        uint32_t stride;
        for (uint32_t p = rows.lo; p < rows.hi; p++) {
            struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, *page_of(kv, i, tokens, p, &stride));
            if (ref->slots || ref->cached != ref->prefixes || ref->mark == kv->mark)
                continue;
            *(p < full ? &pages : copied) += g->n;
            if (p < full)
                ref->mark = kv->mark;
        }
    }
    return pages;
}

// Gathers the blocks found into a prefix, as if one slot had written them.
struct kv_prefix *vmem__kv_hash_gather(const vmem_kv *kv, uint32_t tokens)
{
    struct kv_past *rows = calloc(kv->n_groups, sizeof(*rows));
    for (uint32_t i = 0; i < kv->n_groups && rows; i++)
        rows[i] = rows_read(kv, &kv->groups[i], tokens);
    struct kv_prefix *p = rows ? vmem__kv_prefix_new(kv, tokens, rows) : NULL;
    for (uint32_t i = 0; i < kv->n_groups && p; i++) {
        vmem_page *pages = vmem__kv_prefix_pages(kv, p, i);
        const uint32_t n = rows[i].hi - rows[i].lo;
        for (uint32_t k = 0; k < n; k++) {
            uint32_t stride;
            const vmem_page *from = page_of(kv, i, tokens, rows[i].lo + k, &stride);
            for (uint32_t t = 0; t < kv->groups[i].n; t++)
                pages[(uint64_t)t * n + k] = from[(uint64_t)t * stride];
        }
    }
    free(rows);
    return p;
}
