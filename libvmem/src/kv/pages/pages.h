// Creates, maps, copies and releases pages: the only floor that makes system calls for a slot's memory.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_PAGES_H
#define VMEM_KV_PAGES_H

#include "kv/book/book.h"

// ---- grow.c

// Plans to back pages [from, to) of a span as far as they are not. What the span has must begin at `to` at the latest.
// 2 MiB entries may map the blocks that end up to coarse_hi.
int vmem__kv_grow_to(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                     uint32_t coarse_hi);
// Plans to map a row there that others hold; pages: of the first tensor, and `stride` further on of the next one. The
// caller adds the row to the span.
int vmem__kv_grow_share(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t row,
                        const vmem_page *pages, uint32_t stride);
// Creates and maps, all or nothing; needs no lock. Before it the caller adds l->total to kv->ledger.held.
int vmem__kv_grow_run(vmem_kv *kv, struct kv_grow *l);
// Adds the new pages to the spans.
void vmem__kv_grow_commit(vmem_kv *kv, struct kv_grow *l);
// Releases pages. If the driver refuses to unmap one, as it may where a freed slot still maps it, the context releases it
// once the driver has unmapped something else.
void vmem__kv_release(vmem_kv *kv, const vmem_page *pages, uint64_t n);
// Unmaps and releases what a run created.
void vmem__kv_grow_undo(vmem_kv *kv, struct kv_grow *l);
void vmem__kv_grow_reset(struct kv_grow *l);

// ---- cut.c

// Cuts a span down to [lo, hi): begin changes the span, run (no lock needed) the mapping, end the rest, or restores the
// span if run failed. begin returns -EBUSY if rows would go that others hold, too: no reference changes while the worker
// has dropped the lock.
int vmem__kv_cut_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi);
int vmem__kv_cut_run(vmem_kv *kv, struct kv_cut *c);
void vmem__kv_cut_end(vmem_kv *kv, struct kv_cut *c, int rc);
int vmem__kv_cut_now(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi); // any rows
// Everything of a slot, or of several, that no kernel accesses, in one call of the core: all or nothing.
int vmem__kv_cut_slot(vmem_kv *kv, uint32_t slot);
int vmem__kv_cut_slots(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// Releases shared pages that a window has passed, so that the number of available pages never depends on the worker.
// True: it left some to the worker, or to the next step.
bool vmem__kv_pass_windows(vmem_kv *kv, uint32_t slot);
// Ends a request: its own pages stay in the span, shared ones are released, and their mappings become stale. After
// vmem__kv_shared_tokens, so that the last row below shared_hi is shared.
int vmem__kv_park(vmem_kv *kv, uint32_t slot, uint32_t group);
// Unmaps what is stale in a slot: begin collects, vmem__kv_cut_run unmaps.
int vmem__kv_stale_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot);
void vmem__kv_stale_end(vmem_kv *kv, uint32_t slot);
int vmem__kv_stale_now(vmem_kv *kv, uint32_t slot);
// Releases the doomed pages. The worker is held, or there is none.
void vmem__kv_release_doomed(vmem_kv *kv);
void vmem__kv_release_soon(vmem_kv *kv); // the worker does, or if there is none, this call

// ---- copy.c

// Zeroes a slot's pages; needs no lock.
int vmem__kv_clear_slot(vmem_kv *kv, uint32_t slot);
// Copies the first `bytes` bytes of one page for each tensor of the group, from or to these pages, which need not be
// mapped anywhere.
int vmem__kv_copy_pages(vmem_kv *kv, const struct kv_group *g, const vmem_page *pages, uint64_t stride, bool to_scratch,
                        uint32_t slot, uint32_t page, uint64_t bytes);

#endif
