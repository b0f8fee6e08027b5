// Rows that are held beyond the slot that wrote them: prefixes, named blocks, and blocks by hash (hash.h).
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_RUN_H
#define VMEM_KV_RUN_H

#include "kv/pages/pages.h"

// ---- prefix.c

int vmem__kv_prefix_find(const vmem_kv *kv, uint64_t id, struct kv_prefix **out);
int vmem__kv_prefix_save(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *prefix);
int vmem__kv_prefix_query(vmem_kv *kv, uint64_t prefix, struct vmem_kv_prefix_info *out);
int vmem__kv_prefix_drop(vmem_kv *kv, struct kv_prefix *p);
// A prefix of the pages [lo, hi) of each group that begins at (lo, hi), without pages and in no list; NULL: no memory.
struct kv_prefix *vmem__kv_prefix_new(const vmem_kv *kv, uint32_t tokens, const struct kv_past *rows);
// The prefix's pages of the group's first tensor; the others follow, hi - lo pages each.
vmem_page *vmem__kv_prefix_pages(const vmem_kv *kv, const struct kv_prefix *p, uint32_t group);
// Holds its pages, which others hold, or lets go of them, releasing those without another holder.
void vmem__kv_prefix_hold(vmem_kv *kv, const struct kv_prefix *p);
int vmem__kv_prefix_let_go(vmem_kv *kv, const struct kv_prefix *p);
// Makes rows at the end of the shared ones the slot's own if they have no other holder now.
void vmem__kv_unmark_shared(vmem_kv *kv, uint32_t slot);

// ---- block.c

// Pages of a block in each tensor of the group.
static inline uint32_t kv_block_pages(const vmem_kv *kv, const struct kv_group *g)
{
    return (uint32_t)((kv->blocks.tokens * g->row_bytes) >> kv->page_shift);
}
vmem_page *vmem__kv_block_named(const vmem_kv *kv, uint32_t id); // its entries in the table
int vmem__kv_block_check(const vmem_kv *kv, uint32_t id);
int vmem__kv_blocks_init(vmem_kv *kv, uint32_t n_blocks, uint32_t block_tokens);
int vmem__kv_block_bind(vmem_kv *kv, const uint32_t *slots, const uint32_t *index, const uint32_t *ids, size_t n,
                        size_t *bad);
int vmem__kv_block_drop(vmem_kv *kv, const uint32_t *ids, size_t n);
void vmem__kv_blocks_destroy(vmem_kv *kv); // drops all names
int vmem__kv_check_blocks(const vmem_kv *kv);

// ---- hash.c

void vmem__kv_hash_unpin(vmem_kv *kv, uint32_t slot); // the slot's request has ended, or has given up its pages
// Evicts blocks, the least recently used first, until that many pages were freed or no more can be: how many were.
uint64_t vmem__kv_hash_evict(vmem_kv *kv, uint64_t pages);
// For the worker: forgets blocks until the list has that many pages, which are to be released.
void vmem__kv_hash_evict_begin(vmem_kv *kv, struct kv_cut *c, uint64_t pages);
uint64_t vmem__kv_hash_count(const vmem_kv *kv); // blocks
// Pages that eviction can free when memory is short.
uint64_t vmem__kv_evictable(const vmem_kv *kv);
void vmem__kv_hash_destroy(vmem_kv *kv);
int vmem__kv_check_hashes(const vmem_kv *kv);

#endif
