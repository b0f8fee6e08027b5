// Prefixes by hash: blocks of rows, stored under the hashes that an engine computed for them.
//
// A block holds the pages that contain its rows, in all tensors of the slot that wrote them. Neighbouring blocks share
// the page between them. A block's hash covers its tokens and all tokens before them. So the rows that its pages
// contain before its own are valid, too, and a request can begin with pages of blocks that several slots wrote.
//
// Running requests pin the blocks that they began with or wrote. Unpinned blocks are listed in the order in which they
// were released, and the end of a sequence comes first. Memory is reclaimed in this order.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/struct.h"
#include "kv/run/hash.h"

static uint64_t bucket(const struct kv_hashes *h, const struct vmem_kv_hash *hash)
{
    uint64_t word[4];
    memcpy(word, hash->bytes, sizeof word);
    uint64_t x =
        word[0] ^ (word[1] << 7 | word[1] >> 57) ^ (word[2] << 17 | word[2] >> 47) ^ (word[3] << 31 | word[3] >> 33);
    return (x * UINT64_C(0x9e3779b97f4a7c15) >> 24) & (h->n_buckets - 1);
}

uint32_t vmem__kv_hash_find(const struct kv_hashes *h, const struct vmem_kv_hash *hash)
{
    uint32_t i = h->n_buckets ? h->buckets[bucket(h, hash)] : KV_NO_BLOCK;
    while (i != KV_NO_BLOCK && memcmp(&h->blocks[i].hash, hash, sizeof *hash))
        i = h->blocks[i].next;
    return i;
}

// ---- pinning ---------------------------------------------------------------------------------------------------------

static void let_go(struct kv_hashes *h, const struct kv_link *l)
{
    if (l->serial && h->blocks[l->block].serial == l->serial && !--h->blocks[l->block].pins)
        vmem__kv_hash_link_newest(h, l->block);
}

static int chain_room(struct kv_chain *c, uint32_t index)
{
    int rc = vmem__kv_room_for(&c->links, &c->cap, (uint64_t)index + 1, sizeof(*c->links));
    for (; !rc && c->n <= index; c->n++)
        c->links[c->n] = (struct kv_link){0};
    return rc;
}

int vmem__kv_hash_pin(vmem_kv *kv, uint32_t slot, uint32_t block)
{
    struct kv_hashes *h = kv->hashes;
    struct kv_chain *c = &h->chains[slot];
    const uint32_t index = h->blocks[block].index;
    int rc = chain_room(c, index);
    if (rc || c->links[index].serial == h->blocks[block].serial)
        return rc;
    if (!h->blocks[block].pins++)
        vmem__kv_hash_unlink(h, block);
    let_go(h, &c->links[index]);
    c->links[index] = (struct kv_link){h->blocks[block].serial, block};
    return 0;
}

void vmem__kv_hash_unpin(vmem_kv *kv, uint32_t slot)
{
    if (!kv->hashes)
        return;
    struct kv_hashes *h = kv->hashes;
    struct kv_chain *c = &h->chains[slot];
    const uint32_t ahead = 16; // blocks that are on their way into the CPU's cache
    while (c->n) {             // the end of a sequence becomes the oldest: fewer requests can use it
        if (--c->n >= ahead)
            __builtin_prefetch(&h->blocks[c->links[c->n - ahead].block].serial);
        let_go(h, &c->links[c->n]);
    }
}

// ---- a block's pages -------------------------------------------------------------------------------------------------

struct kv_past vmem__kv_hash_rows(const vmem_kv *kv, const struct kv_group *g, uint32_t index)
{
    const uint64_t from = KV_MIN((uint64_t)index * kv->hashes->block_tokens, g->max_tokens);
    const uint64_t to = KV_MIN(from + kv->hashes->block_tokens, g->max_tokens);
    if (from == to)
        return (struct kv_past){0};
    return (struct kv_past){(uint32_t)(from * g->row_bytes >> kv->page_shift),
                            (uint32_t)((to * g->row_bytes + kv->page_size - 1) >> kv->page_shift)};
}

vmem_page *vmem__kv_hash_pages(const vmem_kv *kv, const struct kv_hashed *b, uint32_t group)
{
    vmem_page *pages = b->pages;
    for (uint32_t i = 0; i < group; i++) {
        const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[i], b->index);
        pages += (uint64_t)(rows.hi - rows.lo) * kv->groups[i].n;
    }
    return pages;
}

// ---- dropping --------------------------------------------------------------------------------------------------------

// Whether dropping the block, and the blocks that share a page with it, frees a page.
static bool frees(const vmem_kv *kv, const struct kv_hashed *b)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[i], b->index);
        const vmem_page *pages = vmem__kv_hash_pages(kv, b, i);
        for (uint32_t k = 0; k < rows.hi - rows.lo && pages[k]; k++) {
            const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, pages[k]);
            if (!ref->slots && ref->prefixes == ref->cached)
                return true;
        }
    }
    return false;
}

// Removes the block, and appends pages without another holder to the list. Changes nothing on -ENOMEM.
static int drop(vmem_kv *kv, struct kv_cut *c, uint32_t i)
{
    struct kv_hashes *h = kv->hashes;
    struct kv_hashed *b = &h->blocks[i];
    int rc = vmem__kv_room_for(&c->pages, &c->cap_pages, c->n_pages + b->n_pages, sizeof(*c->pages));
    if (rc)
        return rc;
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[j], b->index);
        const vmem_page *pages = vmem__kv_hash_pages(kv, b, j);
        const uint32_t n = rows.hi - rows.lo;
        for (uint32_t k = 0; k < n && pages[k]; k++) {
            struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, pages[k]);
            h->unmark |= ref->slots != 0;
            for (uint32_t t = 0; t < kv->groups[j].n && !ref->slots && ref->prefixes == 1; t++)
                c->pages[c->n_pages++] = pages[(uint64_t)t * n + k];
            if (kv_keeps(b))
                vmem__kv_ref_hold(kv, ref, 0, -1);
            else
                vmem__kv_ref_cache(kv, ref, -1);
        }
    }
    if (!b->pins)
        vmem__kv_hash_unlink(h, i);
    uint32_t *at = &h->buckets[bucket(h, &b->hash)];
    while (*at != i)
        at = &h->blocks[*at].next;
    *at = b->next;
    free(b->pages);
    *b = (struct kv_hashed){.next = h->unused};
    h->unused = i;
    h->n--;
    return 0;
}

static void begin_drop(vmem_kv *kv)
{
    vmem__kv_wait_cut(kv);
    kv->cut.n_pages = 0;
    kv->hashes->unmark = false;
}

static void unmark(vmem_kv *kv)
{
    for (uint32_t s = 0; s < kv->n_slots && kv->hashes->unmark; s++)
        vmem__kv_unmark_shared(kv, s);
}

static uint64_t end_drop(vmem_kv *kv)
{
    uint64_t freed = vmem__kv_release(kv, kv->cut.pages, kv->cut.n_pages);
    kv->ledger.held -= freed;
    unmark(kv);
    return freed;
}

uint64_t vmem__kv_hash_count(const vmem_kv *kv) { return kv->hashes ? kv->hashes->n : 0; }

uint64_t vmem__kv_evictable(const vmem_kv *kv)
{
    return kv->hashes && !(kv->hashes->flags & VMEM_KV_HASH_MANUAL) ? kv->refs.evictable : 0;
}

static int evict_one(vmem_kv *kv, struct kv_cut *c, uint32_t i)
{
    struct kv_hashes *h = kv->hashes;
    const struct vmem_kv_hash hash = h->blocks[i].hash;
    int rc = drop(kv, c, i);
    if (rc)
        return rc;
    kv->stats.evicted_blocks++;
    if (h->flags & VMEM_KV_HASH_EVENTS)
        h->gone[h->n_gone++] = hash; // add_block() made room for it
    return 0;
}

uint64_t vmem__kv_hash_evict(vmem_kv *kv, uint64_t pages)
{
    struct kv_hashes *h = kv->hashes;
    int rc = 0;
    begin_drop(kv);
    const bool all = pages == UINT64_MAX;
    uint32_t victim;
    while (!rc && kv->cut.n_pages < pages && (kv->refs.evictable || all) &&
           (victim = vmem__kv_hash_victim(h)) != KV_NO_BLOCK)
        rc = evict_one(kv, &kv->cut, victim);
    // A block that a running request pins can hold pages that the request no longer has or never had.
    for (uint32_t i = 0; i < h->used && !rc && kv->cut.n_pages < pages && (kv->refs.evictable || all); i++)
        if (h->blocks[i].serial && (all || frees(kv, &h->blocks[i])))
            rc = evict_one(kv, &kv->cut, i);
    return end_drop(kv);
}

void vmem__kv_hash_evict_begin(vmem_kv *kv, struct kv_cut *c, uint64_t pages)
{
    struct kv_hashes *h = kv->hashes;
    int rc = 0;
    c->n_pages = c->n_ops = 0;
    c->before = (struct kv_span){0}; // no span is cut
    h->unmark = false;
    uint32_t victim;
    while (!rc && c->n_pages < pages && kv->refs.evictable && (victim = vmem__kv_hash_victim(h)) != KV_NO_BLOCK)
        rc = evict_one(kv, c, victim);
    unmark(kv);
}

int vmem__kv_hash_drop(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint64_t pages, bool unused,
                       uint64_t *freed)
{
    int rc = 0;
    begin_drop(kv);
    for (size_t k = 0; k < n && !rc && kv->cut.n_pages < pages; k++) {
        const uint32_t i = vmem__kv_hash_find(kv->hashes, &hashes[k]);
        if (i == KV_NO_BLOCK)
            continue;
        const struct kv_hashed *b = &kv->hashes->blocks[i];
        if (!unused)
            rc = drop(kv, &kv->cut, i);
        else if (!b->pins && !kv_keeps(b))
            rc = evict_one(kv, &kv->cut, i);
    }
    *freed = end_drop(kv);
    return rc;
}

// ---- adding ----------------------------------------------------------------------------------------------------------

static int more_buckets(struct kv_hashes *h)
{
    if (h->n < h->n_buckets)
        return 0;
    const uint64_t n = h->n_buckets ? 2 * h->n_buckets : 256;
    uint32_t *buckets = realloc(h->buckets, n * sizeof(*buckets));
    if (!buckets)
        return vmem__error(-ENOMEM, "no memory for a table of %" PRIu64 " hashes", n);
    h->buckets = buckets;
    h->n_buckets = n;
    memset(buckets, 0xff, n * sizeof(*buckets));
    for (uint32_t i = 0; i < h->used; i++)
        if (h->blocks[i].serial) {
            uint32_t *at = &buckets[bucket(h, &h->blocks[i].hash)];
            h->blocks[i].next = *at;
            *at = i;
        }
    return 0;
}

// Whether a slot is sure to have these rows. Those in front of keep_lo may be cut at any time, by the background thread
// or by a step, so what is shared would depend on the time, and on the rank.
static bool has_now(const struct kv_span *sp, struct kv_past rows)
{
    return rows.lo < rows.hi && rows.lo >= sp->keep_lo;
}

static bool has_rows(const vmem_kv *kv, uint32_t slot, uint32_t index, uint64_t *n_pages)
{
    bool some = false;
    *n_pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[i], index);
        *n_pages += (uint64_t)(rows.hi - rows.lo) * kv->groups[i].n;
        some |= has_now(kv_span(kv, slot, i), rows);
    }
    return some;
}

// Adds the slot's block to the table.
static int add_block(vmem_kv *kv, uint32_t slot, uint32_t index, const struct vmem_kv_hash *hash)
{
    struct kv_hashes *h = kv->hashes;
    uint64_t n_pages;
    if (!has_rows(kv, slot, index, &n_pages)) // windows have passed all its rows
        return 0;
    uint64_t n_gone = h->n_gone + h->n + 1;
    int rc = more_buckets(h);
    if (!rc && h->unused == KV_NO_BLOCK)
        rc = vmem__kv_room_for(&h->blocks, &h->cap, (uint64_t)h->used + 1, sizeof(*h->blocks));
    if (!rc && h->flags & VMEM_KV_HASH_EVENTS)
        rc = vmem__kv_room_for(&h->gone, &h->cap_gone, n_gone, sizeof(*h->gone));
    if (!rc)
        rc = chain_room(&h->chains[slot], index);
    if (!rc)
        rc = vmem__kv_ref_reserve(&kv->refs, n_pages);
    vmem_page *pages = rc ? NULL : calloc(n_pages, sizeof(*pages));
    if (!rc && !pages)
        rc = vmem__error(-ENOMEM, "no memory for a block of %" PRIu64 " pages", n_pages);
    if (rc)
        return rc;
    uint32_t i = h->unused;
    if (i == KV_NO_BLOCK)
        i = h->used++;
    else
        h->unused = h->blocks[i].next;
    struct kv_hashed *b = &h->blocks[i];
    uint32_t *at = &h->buckets[bucket(h, hash)];
    *b = (struct kv_hashed){.hash = *hash,
                            .serial = ++h->serial,
                            .index = index,
                            .next = *at,
                            .priority = VMEM_KV_HASH_PRIORITY,
                            .pages = pages,
                            .n_pages = n_pages};
    *at = i;
    h->n++;
    vmem__kv_hash_link_newest(h, i);
    vmem__kv_hash_pin(kv, slot, i); // cannot fail: there is room
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_group *g = &kv->groups[j];
        const struct kv_past rows = vmem__kv_hash_rows(kv, g, index);
        struct kv_span *sp = kv_span(kv, slot, j);
        const uint32_t n = rows.hi - rows.lo;
        const bool some = has_now(sp, rows);
        for (uint32_t t = 0; t < g->n && some; t++)
            memcpy(pages + (uint64_t)t * n, kv_table(kv, g, slot, t) + rows.lo, n * sizeof(*pages));
        for (uint32_t k = 0; k < n && some; k++)
            vmem__kv_ref_cache(kv, vmem__kv_row_get(kv, slot, j, rows.lo + k), 1);
        if (some)
            sp->shared_hi = KV_MAX(sp->shared_hi, rows.hi);
        pages += (uint64_t)n * g->n;
    }
    kv->slots[slot].shared_tokens = KV_MAX(kv->slots[slot].shared_tokens, (index + 1) * h->block_tokens);
    return 0;
}

static int add(vmem_kv *kv, uint32_t slot, uint32_t first, const struct vmem_kv_hash *hashes, size_t n, size_t *added)
{
    struct kv_hashes *h = kv->hashes;
    for (size_t k = 0; k < n; k++) {
        const uint32_t i = vmem__kv_hash_find(h, &hashes[k]);
        if (i != KV_NO_BLOCK && h->blocks[i].index != first + k)
            return vmem__error(-EINVAL, "hashes[%zu] is that of block %u: a hash covers all tokens before it", k,
                               h->blocks[i].index);
    }
    for (size_t k = 0; k < n; k++) {
        const uint32_t i = vmem__kv_hash_find(h, &hashes[k]);
        if (i != KV_NO_BLOCK) {
            int rc = vmem__kv_hash_pin(kv, slot, i);
            if (rc)
                return rc;
            continue;
        }
        if (h->n >= h->max_blocks) { // at the limit: evict a block, unless running requests pin all
            const uint32_t victim = vmem__kv_hash_victim(h);
            if (victim == KV_NO_BLOCK)
                return 0;
            begin_drop(kv);
            int rc = evict_one(kv, &kv->cut, victim);
            end_drop(kv);
            if (rc)
                return rc;
        }
        const uint32_t before = h->n;
        int rc = add_block(kv, slot, first + (uint32_t)k, &hashes[k]);
        if (rc)
            return rc;
        *added += h->n - before;
    }
    return 0;
}

// ---- what calls ask for ----------------------------------------------------------------------------------------------

int vmem__kv_hash_given(const vmem_kv *kv, const void *hashes, size_t n)
{
    if (!kv->hashes)
        return vmem__error(-EINVAL, "the cache has no hashes yet: create them first");
    return n && !hashes ? vmem__error(-EINVAL, "hashes must not be NULL") : 0;
}

static uint64_t blocks_in(uint64_t tokens, uint32_t block_tokens)
{
    return tokens ? tokens / block_tokens : UINT64_MAX;
}

static int init(vmem_kv *kv, const struct vmem_kv_hash_config *c)
{
    if (kv->hashes)
        return vmem__error(-EINVAL, "this cache has hashes already, of %u tokens each", kv->hashes->block_tokens);
    int rc = vmem__kv_check_sharing(kv);
    if (rc)
        return rc;
    if (c->flags & ~(VMEM_KV_HASH_EVENTS | VMEM_KV_HASH_MANUAL))
        return vmem__error(-EINVAL, "flags %#x has unknown bits", c->flags);
    if (!c->block_tokens || c->block_tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "block_tokens %u is not between 1 and max_tokens, %u", c->block_tokens,
                           kv->max_tokens);
    if (c->pad)
        return vmem__error(-EINVAL, "pad is not 0");
    if (c->max_tokens && c->max_tokens < c->block_tokens)
        return vmem__error(-EINVAL, "max_tokens %" PRIu64 " is less than a block, %u", c->max_tokens, c->block_tokens);
    struct kv_hashes *h = calloc(1, sizeof(*h));
    struct kv_chain *chains = calloc(kv->n_slots, sizeof(*chains));
    if (!h || !chains) {
        free(h);
        free(chains);
        return vmem__error(-ENOMEM, "no memory for the chains of %u slots", kv->n_slots);
    }
    *h = (struct kv_hashes){.flags = c->flags,
                            .block_tokens = c->block_tokens,
                            .max_blocks = blocks_in(c->max_tokens, c->block_tokens),
                            .unused = KV_NO_BLOCK,
                            .chains = chains};
    vmem__kv_hash_no_order(h);
    kv->hashes = h;
    kv->refs.keeps = c->flags & VMEM_KV_HASH_MANUAL;
    return 0;
}

int vmem__kv_hash_init(vmem_kv *kv, const struct vmem_kv_hash_config *config)
{
    struct vmem_kv_hash_config c;
    int rc = 0;
    if (!config)
        return vmem__error(-EINVAL, "config must not be NULL");
    rc = vmem__struct_take(&c, sizeof c, sizeof c, config, "config");
    return rc ? rc : init(kv, &c);
}

void vmem__kv_hash_destroy(vmem_kv *kv)
{
    struct kv_hashes *h = kv->hashes;
    if (!h)
        return;
    begin_drop(kv);
    for (uint32_t i = 0; i < h->used; i++)
        if (h->blocks[i].serial)
            drop(kv, &kv->cut, i);
    end_drop(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        free(h->chains[s].links);
    free(h->chains);
    free(h->blocks);
    free(h->buckets);
    free(h->gone);
    free(h->found);
    free(h);
    kv->hashes = NULL;
}

int vmem__kv_hash_add(vmem_kv *kv, uint32_t slot, uint32_t first, const struct vmem_kv_hash *hashes, size_t n,
                      size_t *added)
{
    size_t count = 0;
    int rc = vmem__kv_hash_given(kv, hashes, n);
    if (!rc)
        rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && (n > UINT32_MAX || (first + (uint64_t)n) * kv->hashes->block_tokens > kv->slots[slot].tokens))
        rc = vmem__error(-EINVAL, "first %u, n %zu: slot %u has %u tokens, %u to a block", first, n, slot,
                         kv->slots[slot].tokens, kv->hashes->block_tokens);
    if (!rc)
        rc = add(kv, slot, first, hashes, n, &count);
    if (!rc && n)
        kv->idle[slot].named = KV_MAX(kv->idle[slot].named, (first + (uint32_t)n) * kv->hashes->block_tokens);
    if (added)
        *added = count;
    return rc;
}

int vmem__kv_hash_limit(vmem_kv *kv, uint64_t max_tokens)
{
    int rc = vmem__kv_hash_given(kv, NULL, 0);
    struct kv_hashes *h = kv->hashes;
    if (!rc && max_tokens && max_tokens < h->block_tokens)
        rc = vmem__error(-EINVAL, "max_tokens %" PRIu64 " is less than a block, %u", max_tokens, h->block_tokens);
    if (rc)
        return rc;
    h->max_blocks = blocks_in(max_tokens, h->block_tokens);
    begin_drop(kv);
    uint32_t victim;
    while (!rc && h->n > h->max_blocks && (victim = vmem__kv_hash_victim(h)) != KV_NO_BLOCK)
        rc = evict_one(kv, &kv->cut, victim);
    end_drop(kv);
    return rc;
}

int vmem__kv_hash_evicted(vmem_kv *kv, struct vmem_kv_hash *hashes, size_t n, size_t *got)
{
    int rc = got ? vmem__kv_hash_given(kv, hashes, n) : vmem__error(-EINVAL, "got must not be NULL");
    if (!rc && !(kv->hashes->flags & VMEM_KV_HASH_EVENTS))
        rc = vmem__error(-EINVAL, "the hashes were created without VMEM_KV_HASH_EVENTS");
    if (rc)
        return rc;
    struct kv_hashes *h = kv->hashes;
    *got = KV_MIN(n, h->n_gone);
    if (*got)
        memcpy(hashes, h->gone, *got * sizeof(*hashes));
    h->n_gone -= *got;
    if (h->n_gone)
        memmove(h->gone, h->gone + *got, h->n_gone * sizeof(*hashes));
    return 0;
}

static void set_priority(vmem_kv *kv, uint32_t block, uint32_t priority)
{
    struct kv_hashes *h = kv->hashes;
    struct kv_hashed *b = &h->blocks[block];
    const int kept = (priority == VMEM_KV_HASH_KEEP) - kv_keeps(b);
    for (uint32_t j = 0; j < kv->n_groups && kept; j++) {
        const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[j], b->index);
        const vmem_page *pages = vmem__kv_hash_pages(kv, b, j);
        for (uint32_t k = 0; k < rows.hi - rows.lo && pages[k]; k++)
            vmem__kv_ref_keep(kv, vmem__kv_ref_find(&kv->refs, pages[k]), kept);
    }
    if (!b->pins)
        vmem__kv_hash_unlink(h, block);
    b->priority = priority;
    if (!b->pins)
        vmem__kv_hash_link_newest(h, block);
}

int vmem__kv_hash_prioritize(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint32_t priority)
{
    int rc = vmem__kv_hash_given(kv, hashes, n);
    if (!rc && priority > VMEM_KV_HASH_KEEP)
        rc = vmem__error(-EINVAL, "priority %u is over %u", priority, VMEM_KV_HASH_KEEP);
    for (size_t k = n; k-- && !rc;) { // from the last: the end of a sequence becomes the oldest
        const uint32_t i = vmem__kv_hash_find(kv->hashes, &hashes[k]);
        if (i != KV_NO_BLOCK)
            set_priority(kv, i, priority);
    }
    return rc;
}

int vmem__kv_check_hashes(const vmem_kv *kv)
{
    const struct kv_hashes *h = kv->hashes;
    uint64_t n = 0, listed = 0, pinned = 0, evictable = 0;
    for (uint32_t i = 0; h && i < h->used; i++) {
        const struct kv_hashed *b = &h->blocks[i];
        n += b->serial != 0;
        pinned += b->serial && b->pins;
        for (uint32_t j = 0; j < kv->n_groups && b->serial; j++) {
            const struct kv_past rows = vmem__kv_hash_rows(kv, &kv->groups[j], b->index);
            const vmem_page *pages = vmem__kv_hash_pages(kv, b, j);
            for (uint32_t k = 0; k < rows.hi - rows.lo && pages[k]; k++) {
                const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, pages[k]);
                if (!ref || ref->prefixes < ref->cached + kv_keeps(b) || !(ref->cached || kv_keeps(b)))
                    return vmem__error(-EFAULT, "hashed block %u, page %#" PRIx64 " is not held", i, pages[k]);
            }
        }
    }
    for (uint32_t p = 0; h && p < KV_PRIORITIES; p++)
        for (uint32_t i = h->order[p].oldest; i != KV_NO_BLOCK; i = h->blocks[i].newer, listed++)
            if (h->blocks[i].priority != p)
                return vmem__error(-EFAULT, "hashed block %u has priority %u, and is listed with %u", i,
                                   h->blocks[i].priority, p);
    for (uint64_t i = 0; i < kv->refs.size; i++) {
        const struct kv_ref *ref = &kv->refs.entries[i];
        evictable += ref->page && !ref->slots && ref->cached && ref->cached == ref->prefixes ? ref->n : 0;
    }
    if (h && (n != h->n || listed + pinned != n))
        return vmem__error(-EFAULT, "%" PRIu64 " blocks, %" PRIu64 " listed, %" PRIu64 " pinned, not %u", n, listed,
                           pinned, h->n);
    if (evictable != kv->refs.evictable)
        return vmem__error(-EFAULT, "%" PRIu64 " pages can be evicted, not %" PRIu64, evictable, kv->refs.evictable);
    return 0;
}
