// Rows that are held beyond the slot that wrote them.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_RUN_H
#define VMEM_KV_RUN_H

#include "kv/pages/pages.h"

#define KV_NO_RUN UINT32_MAX

// A run's number: 7 bits for the cache, so that a run of another one is told from one that has gone; a generation of 32;
// and its place in the list + 1. It is a positive int64_t, too.
#define KV_RUN_TAGS 127u
#define KV_RUN_GENERATION 24u // the first bit
#define KV_RUN_TAG 56u
#define KV_RUNS_MAX ((1u << KV_RUN_GENERATION) - 2)
static inline uint64_t kv_run_id(uint64_t tag, uint32_t generation, uint32_t run)
{
    return tag << KV_RUN_TAG | (uint64_t)generation << KV_RUN_GENERATION | (run + 1);
}
static inline uint32_t kv_run_place(uint64_t id) { return (uint32_t)(id & ((1u << KV_RUN_GENERATION) - 1)) - 1; }

// How the pages of a group are divided if a slot shares its first `tokens` rows. It has pages [lo, full) with others, and
// pages [full, hi) for itself. The first of these begins with `part` bytes of shared rows.
struct kv_split {
    uint32_t lo, full, hi;
    uint64_t part;
};

static inline struct kv_split kv_split(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens)
{
    uint64_t bytes = KV_MIN(tokens, g->max_tokens) * g->row_bytes;
    struct kv_split s = {.lo = vmem__kv_need_lo(kv, g, tokens),
                         .full = (uint32_t)(bytes >> kv->page_shift),
                         .hi = vmem__kv_need_hi(kv, g, tokens),
                         .part = bytes & (kv->page_size - 1)};
    s.full = KV_MAX(s.full, s.lo);
    return s;
}

// ---- order.c

// -EINVAL: the run is of another cache, whether or not it is still there. 0 is no run, and of every cache. name: of the
// argument, runs[i].
int vmem__kv_run_owned(const struct kv_runs *runs, uint64_t id, const char *name, size_t i);
uint32_t vmem__kv_run_find(const struct kv_runs *runs, uint64_t id); // KV_NO_RUN: there is none (any more)
void vmem__kv_run_link(struct kv_runs *runs, uint32_t run);          // as the newest of those like it
void vmem__kv_run_unlink(struct kv_runs *runs, uint32_t run);
// The run that is to be evicted next, which nobody pins; KV_NO_RUN: there is none.
uint32_t vmem__kv_run_victim(const struct kv_runs *runs);
// The slot's request uses the run until it ends. Fails only without room in its list (vmem__kv_pin_room).
int vmem__kv_pin(vmem_kv *kv, uint32_t slot, uint32_t run);
int vmem__kv_pin_room(vmem_kv *kv, uint32_t slot, uint64_t n);
void vmem__kv_unpin(vmem_kv *kv, uint32_t slot); // the slot's request has ended, or has given up its pages

// ---- run.c

uint64_t vmem__kv_rows_pages(const vmem_kv *kv, const struct kv_rows *rows); // how many they are, of all groups
int vmem__kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags);
int vmem__kv_order(vmem_kv *kv, const uint64_t *runs, size_t n, uint32_t keep);
int vmem__kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got);
int vmem__kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out);
void vmem__kv_runs_free(vmem_kv *kv); // the lists, which no call uses any more
int vmem__kv_check_runs(const vmem_kv *kv);

// ---- evict.c

int vmem__kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t most_pages, uint32_t flags, uint64_t *freed);
// Evicts runs in their order until that many pages are freed or no more can be: how many were.
uint64_t vmem__kv_evict(vmem_kv *kv, uint64_t pages);
// For the worker: dooms the pages.
void vmem__kv_evict_later(vmem_kv *kv, uint64_t pages);
void vmem__kv_drop_all_runs(vmem_kv *kv); // and releases what is doomed, while there is no worker

// ---- found.c

// How many tokens a request could begin with, at most `most`, and leaves the runs in runs.found.
int vmem__kv_known(vmem_kv *kv, const uint64_t *runs, uint64_t n, uint32_t most, uint32_t *tokens);
// Of the runs found, those whose pages the request begins with stay found and are not evicted. The others may be: windows
// have passed their rows, or a later run has the same ones.
void vmem__kv_hold_found(vmem_kv *kv, uint32_t tokens);
void vmem__kv_let_found(vmem_kv *kv); // these can be evicted again
// Marks the pages of the runs held as seen more often than slots can: they do not become free with the slots that have them.
void vmem__kv_see_found(vmem_kv *kv);
// Of the runs held, pages that a request which begins with them takes from those that can be evicted. Marked ones do not
// count. *beside: the others that cannot be evicted until it has begun.
uint64_t vmem__kv_taken(vmem_kv *kv, uint32_t tokens, uint64_t *beside);
// That page of the group's first tensor, of a request that begins with so many tokens of the runs found; `stride`
// further on, that of the next tensor.
const vmem_page *vmem__kv_found_page(const vmem_kv *kv, uint32_t group, uint32_t tokens, uint32_t page,
                                     uint32_t *stride);
#endif
