// Prefixes by hash, inside.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_HASH_H
#define VMEM_KV_HASH_H

#include "kv/run/run.h"

#define KV_NO_BLOCK UINT32_MAX
#define KV_PRIORITIES (VMEM_KV_HASH_KEEP + 1)

struct kv_hashed {
    struct vmem_kv_hash hash;
    uint64_t serial;       // 0: not in use
    uint32_t index;        // of the block in its sequence
    uint32_t pins;         // running requests that began with it or wrote it
    uint32_t newer, older; // in the order of use of its priority, while nobody pins it
    uint32_t next;         // in its bucket, or of those not in use
    uint32_t priority;
    vmem_page *pages; // group after group, tensor after tensor; all 0 in a group whose window had passed it
    uint64_t n_pages;
};
// The blocks that a request pins, by their index.
struct kv_link {
    uint64_t serial; // 0: none
    uint32_t block;
};
struct kv_chain {
    struct kv_link *links;
    uint64_t n, cap;
};
struct kv_hashes {
    uint32_t flags, block_tokens;
    uint64_t max_blocks;
    struct kv_hashed *blocks;
    uint64_t cap, serial;
    uint32_t used, n; // entries of blocks that were ever in use, and that are
    uint32_t unused;  // the first of the others
    uint32_t *buckets;
    uint64_t n_buckets; // a power of two
    struct kv_use {
        uint32_t newest, oldest;
    } order[KV_PRIORITIES];
    struct kv_chain *chains;   // [slot]
    struct vmem_kv_hash *gone; // evicted, the oldest first
    uint64_t n_gone, cap_gone;
    uint32_t *found; // of the look-up that is at work
    uint64_t cap_found;
    bool unmark; // a page that was dropped is in a slot
};

// ---- order.c

void vmem__kv_hash_no_order(struct kv_hashes *h);
void vmem__kv_hash_link_newest(struct kv_hashes *h, uint32_t block);
void vmem__kv_hash_unlink(struct kv_hashes *h, uint32_t block);
// The block that is to be evicted next, which nobody pins; KV_NO_BLOCK: there is none.
uint32_t vmem__kv_hash_victim(const struct kv_hashes *h);
static inline bool kv_keeps(const struct kv_hashed *b) { return b->priority == VMEM_KV_HASH_KEEP; }

// ---- hash.c

uint32_t vmem__kv_hash_find(const struct kv_hashes *h, const struct vmem_kv_hash *hash);
// The slot has begun with the block, or has written it.
int vmem__kv_hash_pin(vmem_kv *kv, uint32_t slot, uint32_t block);
// The pages of a block in each tensor of a group: [lo, hi) of the slot.
struct kv_past vmem__kv_hash_rows(const vmem_kv *kv, const struct kv_group *g, uint32_t index);
vmem_page *vmem__kv_hash_pages(const vmem_kv *kv, const struct kv_hashed *b, uint32_t group);
// Whether the cache has hashes, and the caller's are not NULL.
int vmem__kv_hash_given(const vmem_kv *kv, const void *hashes, size_t n);
// The public calls, with the locks held.
int vmem__kv_hash_init(vmem_kv *kv, const struct vmem_kv_hash_config *config);
int vmem__kv_hash_add(vmem_kv *kv, uint32_t slot, uint32_t first, const struct vmem_kv_hash *hashes, size_t n,
                      size_t *added);
// unused: skips blocks of running requests and those to be kept, and counts the others as evicted.
int vmem__kv_hash_drop(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint64_t pages, bool unused,
                       uint64_t *freed);
int vmem__kv_hash_limit(vmem_kv *kv, uint64_t max_tokens);
int vmem__kv_hash_evicted(vmem_kv *kv, struct vmem_kv_hash *hashes, size_t n, size_t *got);
int vmem__kv_hash_prioritize(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint32_t priority);

// ---- found.c

uint32_t vmem__kv_hash_tokens(const vmem_kv *kv, uint32_t blocks);
// How many of the first of these blocks a request could begin with.
int vmem__kv_hash_known(vmem_kv *kv, const struct vmem_kv_hash *hashes, uint64_t n, uint32_t *blocks);
// Pages that a request which begins with the blocks found last takes from those that can be evicted. Marked ones do not
// count. *copied: of the page that it copies, which it takes for as long as that lasts.
uint64_t vmem__kv_hash_taken(vmem_kv *kv, uint32_t blocks, uint64_t *copied);
// Gathers the blocks found into a prefix of so many tokens, as if one slot had written them; NULL: no memory.
struct kv_prefix *vmem__kv_hash_gather(const vmem_kv *kv, uint32_t tokens);

#endif
