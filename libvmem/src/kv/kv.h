// What the files of the KV-cache manager offer each other, file by file; what they work on is in state.h.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_INTERNAL_H
#define VMEM_KV_INTERNAL_H

#include <errno.h>
#include <time.h>

#include "core/error.h"
#include "kv/state.h"

static inline uint64_t kv_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// ---- kv.c

// The pages that an iteration accesses when it extends a slot from `before` tokens to `tokens`.
uint32_t vmem__kv_need_lo(const vmem_kv *kv, const struct kv_group *g, uint32_t before);
uint32_t vmem__kv_need_hi(const vmem_kv *kv, const struct kv_group *g, uint64_t tokens);
// The most tokens that a step of the slot can have with the same pages as now; 0 if steps to fewer may need others.
uint32_t vmem__kv_steady(const vmem_kv *kv, uint32_t slot);
// Sets slot->backed from its spans.
void vmem__kv_set_backed(vmem_kv *kv, uint32_t slot);
// Frees all memory of a cache that no call uses any more, but for the handle itself.
void vmem__kv_give_up(vmem_kv *kv);
// Grows an array so that it has room for n elements of `size` bytes.
int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size);

// The first page of a span that a call may count on. With SAME_SLOTS, no answer depends on what the background thread
// has unmapped behind a window.
static inline uint32_t vmem__kv_has_from(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    return kv->flags & VMEM_KV_SAME_SLOTS ? s->keep_lo : s->lo;
}
// Where the part of a span ends that serves a step up to page `hi`. In a slot without rows, pages that go together go
// if the step asks for some of them only: it gets others.
uint32_t vmem__kv_serves(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi);

// ---- plan.c

void vmem__kv_plan_reset(struct kv_plan *plan);
// Adds what a step to `tokens` needs of a slot. -EINVAL: its window has given up rows that it reads.
int vmem__kv_plan_slot(vmem_kv *kv, struct kv_plan *plan, uint32_t slot, uint32_t tokens);
// Plans a step to these lengths, or returns -EINVAL. If waited is not NULL, the call waits until the worker changes
// none of the slots that will be extended, and *waited receives whether it had to.
int vmem__kv_plan(vmem_kv *kv, struct kv_plan *plan, const int32_t *lengths, bool *waited);
// Pages that cannot be taken from the cache now: what requests need, and what the staged step needs, which was answered
// with yes. Call it from outside of any other call (kv_lock_cache): it plans anew.
uint64_t vmem__kv_fixed(vmem_kv *kv);
// Whether the step would find its memory.
int vmem__kv_plan_check(vmem_kv *kv, const int32_t *lengths, uint64_t *missing);
// The fewest pages that would exist with the plan's: those that cannot be reclaimed, and the missing ones.
uint64_t vmem__kv_plan_want(vmem_kv *kv, struct kv_plan *plan);
// Between these two calls, nothing reclaims what the step needs or what kernels in flight access.
void vmem__kv_plan_protect(vmem_kv *kv, struct kv_plan *plan);
void vmem__kv_plan_unprotect(vmem_kv *kv, struct kv_plan *plan);
int vmem__kv_check_length(const vmem_kv *kv, uint32_t slot, int32_t length);
int vmem__kv_check_lengths(vmem_kv *kv, const int32_t *lengths, uint32_t n);
// Whether a step that needs pages up to hi can continue from what the span has.
static inline bool kv_usable(const struct kv_span *sp, uint32_t hi) { return sp->lo < sp->hi && sp->lo <= hi; }

// ---- admit.c

// Pages that the watermark keeps back while requests run.
uint64_t vmem__kv_watermark(const vmem_kv *kv);

// ---- absent.c

// Steps since the slot took part in one, or was allocated.
static inline uint32_t kv_absent(const vmem_kv *kv, uint32_t slot) { return (uint32_t)kv->step - kv->slots[slot].took; }
// VMEM_KV_ZERO_ENDS: ends the requests of length 0, if a step to these lengths is possible.
int vmem__kv_end_absent(vmem_kv *kv, const int32_t *lengths);

// ---- calls.c

// Every public call begins and ends with these: enter takes api and state, and leave updates the statistics. A step
// enters by vmem__kv_enter_step and calls vmem__kv_may_take_long if there is something to do.
int vmem__kv_check_usable(const vmem_kv *kv); // -EPERM in a child of the process that made it; -EINVAL: being closed
int vmem__kv_enter(vmem_kv *kv);
int vmem__kv_enter_step(vmem_kv *kv);
int vmem__kv_leave(vmem_kv *kv, int rc);
int vmem__kv_check_sharing(const vmem_kv *kv); // -EOPNOTSUPP with VMEM_KV_UNSHARED
const char *vmem__kv_state_name(uint8_t state);
// Checks the number and state (a set of 1 << enum vmem_kv_slot_state) of a slot and waits until it is not busy.
int vmem__kv_get(vmem_kv *kv, uint32_t slot, uint32_t states);
// The same of a newly allocated slot, which can be attached to.
int vmem__kv_get_new(vmem_kv *kv, uint32_t slot);
// As vmem__kv_get, without waiting for the worker's work on the slot.
int vmem__kv_get_beside(const vmem_kv *kv, uint32_t slot, uint32_t states);

// ---- fence.c

// What kernels in flight access of a span when a step needs [lo, hi).
struct kv_past vmem__kv_in_flight(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi);
void vmem__kv_remember(vmem_kv *kv, uint32_t slot, uint32_t group); // before the span's need changes
// No kernel accesses the slot, so its earlier steps no longer count.
void vmem__kv_forget(vmem_kv *kv, uint32_t slot);
// Kernels up to this step have ended.
uint64_t vmem__kv_ended(const vmem_kv *kv);
int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step);
// Ends the requests whose kernels have ended, up to kv->retired, and has those copied that are to be swapped out.
int vmem__kv_end_requests(vmem_kv *kv);
// Ends all calls but vmem_kv_retire and vmem_kv_destroy, and the background thread. *quiet: the kernels up to the step
// have ended.
int vmem__kv_close(vmem_kv *kv, uint64_t step, bool *quiet);
// vmem_kv_retire, but a cache that is being closed is refused, not destroyed.
int vmem__kv_retire(vmem_kv *kv, uint64_t step);

// ---- step.c

// Removes a slot's staged growth.
void vmem__kv_unstage(vmem_kv *kv, uint32_t slot);

// ---- slots.c

// vmem_kv_free and vmem_kv_truncate, with the locks held and checked.
int vmem__kv_free(vmem_kv *kv, uint32_t slot);
// Gives up what a smaller budget left above itself. Callers that end requests call it, a step only after its plan.
void vmem__kv_keep_budget(vmem_kv *kv);
int vmem__kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens);
int vmem__kv_check_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens);
// vmem_kv_free_after, likewise, for a step that was made.
int vmem__kv_free_after(vmem_kv *kv, uint32_t slot, uint64_t step);
// The free slot for a request of that many tokens, of which so many come from a prefix, or UINT32_MAX.
uint32_t vmem__kv_choose(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens);
// Whether a slot backed for `fit` tokens suits a request of `tokens` better than one backed for `best`.
bool vmem__kv_fits_better(uint32_t fit, uint32_t best, uint32_t tokens);
// Zeroes a slot's pages; needs no lock.
int vmem__kv_clear_slot(vmem_kv *kv, uint32_t slot);

// ---- pages.c

// Plans to back pages [from, to) of a span, next to what it has. coarse_hi as in struct kv_part.
int vmem__kv_grow_add(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                      uint32_t coarse_hi);
// Plans to back pages [from, to) of a span as far as they are not. What the span has must begin at `to` at the latest.
int vmem__kv_grow_to(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                     uint32_t coarse_hi);
// Creates and maps, all or nothing; needs no lock. Before it the caller adds l->total to kv->held.
int vmem__kv_grow_run(vmem_kv *kv, struct kv_grow *l);
// Adds the new pages to the spans.
void vmem__kv_grow_commit(vmem_kv *kv, struct kv_grow *l);
// Releases pages, one by one if a batch fails. Returns how many.
uint64_t vmem__kv_release(vmem_kv *kv, const vmem_page *pages, uint64_t n);
// Unmaps and releases what a run created.
void vmem__kv_grow_undo(vmem_kv *kv, struct kv_grow *l);
void vmem__kv_grow_reset(struct kv_grow *l);

// Cuts a span down to [lo, hi): begin changes the span, run (no lock needed) the mapping, end the rest, or restores the
// span if run failed.
int vmem__kv_cut_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi);
int vmem__kv_cut_run(vmem_kv *kv, struct kv_cut *c);
void vmem__kv_cut_end(vmem_kv *kv, struct kv_cut *c, int rc);
int vmem__kv_cut_now(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi); // all three
int vmem__kv_cut_slot(vmem_kv *kv, uint32_t slot);                                          // everything
// Ends a request: its own pages stay in the span, shared ones are released, and their mappings become stale.
int vmem__kv_park(vmem_kv *kv, uint32_t slot, uint32_t group);
// Unmaps what is stale in a slot: begin collects, run needs no lock.
int vmem__kv_stale_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot);
int vmem__kv_stale_run(vmem_kv *kv, struct kv_cut *c);
void vmem__kv_stale_end(vmem_kv *kv, uint32_t slot);
int vmem__kv_stale_now(vmem_kv *kv, uint32_t slot);
bool vmem__kv_any_stale(const vmem_kv *kv);
// Releases the doomed pages. The worker is held, or there is none.
void vmem__kv_release_doomed(vmem_kv *kv);

// ---- reclaim.c

// Pages that could be reclaimed from a slot: kept, ahead of need, or passed by a window.
uint64_t vmem__kv_reclaimable_in(const vmem_kv *kv, uint32_t slot);
uint64_t vmem__kv_reclaimable(const vmem_kv *kv);
// What can be taken back next, best first: of free slots, the one freed first; then what active slots have ahead of
// need. want: pages asked for. stuck: also where the worker has failed to unmap. False: nothing.
struct kv_victim {
    uint32_t slot, group, lo, hi; // what the span is to be cut down to
};
bool vmem__kv_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, bool stuck, struct kv_victim *v);
// Of these, those of slots that would not be mapped again at once.
uint64_t vmem__kv_spare(const vmem_kv *kv);
// Takes back want pages if there are so many; evict: hashed blocks, too.
int vmem__kv_reclaim(vmem_kv *kv, uint64_t want, bool evict, uint64_t *got);
// Whether there is room for `pages` more without reclaiming any.
bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages);
// Makes room for `pages` more: 0, or -ENOMEM with what is missing.
int vmem__kv_make_room(vmem_kv *kv, uint64_t pages, uint64_t *missing);
// The device has refused pages: reclaims as many as it lacks, if there are that many.
int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages, uint64_t *missing);
// The system has refused mappings: gives up the kept pages of free slots.
int vmem__kv_make_mappings(vmem_kv *kv, uint64_t pages, uint64_t *missing);
// vmem__kv_grow_run and vmem__kv_grow_commit.
int vmem__kv_grow_try(vmem_kv *kv, struct kv_grow *l);
// The same after vmem__kv_make_room, taking back more where the device has less than the budget says, or no mappings.
int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l, uint64_t *missing);
// That without vmem__kv_grow_commit. The pages are in kv->held.
int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l, uint64_t *missing);

// ---- worker.c

// For tests, which delay the worker: called where it has dropped the lock and goes to the library below, before and
// after a call waits for it, and where the worker has looked whether the cache is idle. NULL outside of them.
enum vmem__kv_point { KV_WORKER_UNLOCKED, KV_CALL_WAITS, KV_CALL_WAITED, KV_WORKER_IDLE };
extern void (*vmem__kv_hook)(enum vmem__kv_point point);
int vmem__kv_worker_start(vmem_kv *kv);
void vmem__kv_worker_stop(vmem_kv *kv);
void vmem__kv_worker_wake(vmem_kv *kv);
void vmem__kv_wait_slot(vmem_kv *kv, uint32_t slot);
void vmem__kv_wait_idle(vmem_kv *kv); // until it has nothing left to do
// Until it unmaps nothing that others may hold: a call that maps, unmaps or releases such pages waits here first.
void vmem__kv_wait_cut(vmem_kv *kv);
// Between these two the worker does nothing. Both with state held; hold may drop it for a moment.
void vmem__kv_worker_hold(vmem_kv *kv);
void vmem__kv_worker_release(vmem_kv *kv);

// ---- expect.c

// The free slot that is to be backed next for a request that is expected, and which that is; UINT32_MAX: none.
uint32_t vmem__kv_expected_slot(const vmem_kv *kv, struct kv_expected *request);

// ---- refs.c

struct kv_ref *vmem__kv_ref_find(const struct kv_refs *r, vmem_page page);
// Loads what finding the page will read, and does not wait for it: a large table is in no cache of the CPU.
void vmem__kv_ref_expect(const struct kv_refs *r, vmem_page page);
static inline struct kv_ref *kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    return kv->refs.used ? vmem__kv_ref_find(&kv->refs, kv_table(kv, &kv->groups[group], slot, 0)[page]) : NULL;
}
// How many rows of [from, to) of a span others hold as well.
uint32_t vmem__kv_rows_shared(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);
// How many shared rows of a span nobody else needs. Slots looked at since vmem_kv.mark was raised count as gone.
uint64_t vmem__kv_rows_left(vmem_kv *kv, uint32_t slot, uint32_t group, bool evictable);
// Whether another slot has a page of rows from `tokens` on, which must not be written then.
bool vmem__kv_others_read(const vmem_kv *kv, uint32_t slot, uint32_t tokens);
// The entry, made with slots = 1 if there was none; NULL: out of memory.
struct kv_ref *vmem__kv_ref_get(struct kv_refs *r, vmem_page page, uint32_t n);
int vmem__kv_ref_reserve(struct kv_refs *r, uint64_t more); // the next `more` vmem__kv_ref_get do not fail
// Adds holders. The entry goes when no prefix and at most one slot holds the row.
void vmem__kv_ref_hold(struct kv_refs *r, struct kv_ref *ref, int slots, int prefixes);
void vmem__kv_ref_cache(struct kv_refs *r, struct kv_ref *ref, int blocks); // hashed ones, which can be evicted
void vmem__kv_ref_keep(struct kv_refs *r, struct kv_ref *ref, int blocks);  // of these, so many no longer can

// ---- prefix.c

int vmem__kv_prefix_drop(vmem_kv *kv, struct kv_prefix *p);
// A prefix of the pages [lo, hi) of each group that begins at (lo, hi), without pages and in no list; NULL: no memory.
struct kv_prefix *vmem__kv_prefix_new(const vmem_kv *kv, uint32_t tokens, const struct kv_past *rows);
// The prefix's pages of the group's first tensor; the others follow, hi - lo pages each.
vmem_page *vmem__kv_prefix_pages(const vmem_kv *kv, const struct kv_prefix *p, uint32_t group);
// Holds its pages, which others hold, or lets go of them, releasing those without another holder.
void vmem__kv_prefix_hold(vmem_kv *kv, const struct kv_prefix *p);
int vmem__kv_prefix_let_go(vmem_kv *kv, const struct kv_prefix *p);
// The pages that a slot which begins with so many rows of a prefix has for itself, as copies.
uint64_t vmem__kv_prefix_copies(const vmem_kv *kv, uint32_t tokens);
// Starts a newly allocated slot with the first rows of the prefix.
int vmem__kv_prefix_attach(vmem_kv *kv, const struct kv_prefix *p, uint32_t slot, uint32_t tokens, uint64_t *missing);
// Makes rows at the end of the shared ones the slot's own if they have no other holder now.
void vmem__kv_unmark_shared(vmem_kv *kv, uint32_t slot);
// A newly allocated slot is about to begin with the full pages of `tokens` shared rows: what it has behind them stays
// as far as it is of use, the rest goes. gap: also where pages between them are still to be backed.
int vmem__kv_keep_tail(vmem_kv *kv, uint32_t slot, uint32_t tokens, bool gap);
// Called before rows from `tokens` on are written again: the slot releases shared pages there, and keeps a copy of the
// rows before them.
int vmem__kv_unshare(vmem_kv *kv, uint32_t slot, uint32_t tokens);
uint64_t vmem__kv_unshare_pages(const vmem_kv *kv, uint32_t slot, uint32_t tokens); // that it has to make

// ---- block.c

// Pages of a block in each tensor of the group.
static inline uint32_t kv_block_pages(const vmem_kv *kv, const struct kv_group *g)
{
    return (uint32_t)((kv->block_tokens * g->row_bytes) >> kv->page_shift);
}
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

// ---- hash_attach.c

uint32_t vmem__kv_hash_tokens(const vmem_kv *kv, uint32_t blocks);
// Whether the cache has hashes, and the caller's are not NULL.
int vmem__kv_hash_given(const vmem_kv *kv, const void *hashes, size_t n);
// How many of the first of these blocks a request could begin with.
int vmem__kv_hash_known(vmem_kv *kv, const struct vmem_kv_hash *hashes, uint64_t n, uint32_t *blocks);
// Pages that a request which begins with the blocks found last takes from those that can be evicted. Marked ones do not
// count. *copied: of the page that it copies, which it takes for as long as that lasts.
uint64_t vmem__kv_hash_taken(vmem_kv *kv, uint32_t blocks, uint64_t *copied);

// ---- stats.c

#define KV_VIEW_NS 5000000     // how far the published view may be behind
#define KV_DEVICE_NS 100000000 // and what it says of the device's memory
// Whether the driver should be asked again for the device's free memory; and what it said. Only callers that hold no
// lock ask: the driver may take long.
bool vmem__kv_device_due(const vmem_kv *kv);
void vmem__kv_ask_device(vmem_kv *kv, uint64_t pages);
uint64_t vmem__kv_coarse_now(void);       // ns, to a few ms
void vmem__kv_summarise(vmem_kv *kv);     // stats -> shown, and the published view
void vmem__kv_may_take_long(vmem_kv *kv); // before a public call goes to the library below

// ---- view.c

void vmem__kv_publish_stats(vmem_kv *kv); // what is shown, as it is now
void vmem__kv_unpublish(vmem_kv *kv);
// The budget that another process wrote into the view, once; 0: none.
uint64_t vmem__kv_wanted_budget(vmem_kv *kv);
void vmem__kv_keep_wanted(vmem_kv *kv, uint64_t bytes); // unless there is a newer one
void vmem__kv_answer_wanted(vmem_kv *kv, uint64_t bytes, uint32_t answer, uint32_t reason);

// ---- lender.c. With api and state held; without effect on a cache of no pool.

// Before a budget is found too small for so many pages more: takes what is free in the pool, and some to spare.
void vmem__kv_claim_for(vmem_kv *kv, uint64_t pages);
// Pages that a claim would find.
uint64_t vmem__kv_claimable(const vmem_kv *kv);
// The budget lacks so many pages: asks the other members. How many of them may still come.
// *refusal: enum vmem_kv_refusal, if none may.
uint64_t vmem__kv_ask(vmem_kv *kv, uint64_t pages, uint32_t *refusal);
void vmem__kv_unask(vmem_kv *kv); // a step found what it needs
// With the requests that wait, the cache will have `want` pages: claims and asks for them, and lets the pool's thread
// take the device memory. part: if the member may not have so many, as many as it may.
void vmem__kv_foresee(vmem_kv *kv, uint64_t want, bool part);
// For the worker: keeps memory plentiful from what is free in the pool, and tells the pool that pages are gone.
void vmem__kv_claim_plenty(vmem_kv *kv);
void vmem__kv_pool_wake(const vmem_kv *kv);
// With no lock held: before a cache is taken apart, and when its memory is gone.
void vmem__kv_pool_leave(vmem_kv *kv);
void vmem__kv_pool_left(vmem_kv *kv);
// What others see of the member; zero of a cache of no pool.
void vmem__kv_show_member(const vmem_kv *kv, struct vmem_kv_pool_member *out, char path[256]);

// ---- swap.c

// Lists the copies that move bytes [from, to) of a slot's rows, tensor after tensor, out to host or back in; returns
// how many bytes there are in all.
uint64_t vmem__kv_swap_ops(const vmem_kv *kv, uint32_t slot, uint64_t host, bool out, uint64_t from, uint64_t to,
                           struct vmem_copy_op *ops, uint64_t *n);
// Checks the arguments of a call that swaps a slot out.
int vmem__kv_swap_check(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes);

// ---- swap_after.c

// Whether the slot is being swapped out and its kernels have ended: its pages count as free.
static inline bool kv_swap_due(const vmem_kv *kv, uint32_t slot)
{
    return kv->slots[slot].state == VMEM_KV_SWAPPING && kv->idle[slot].ends <= kv->retired;
}
// Whether the slot keeps what kernels access until they have ended.
static inline bool kv_waits(const vmem_kv *kv, uint32_t slot)
{
    const uint8_t state = kv->slots[slot].state;
    return state == VMEM_KV_ENDING || (state == VMEM_KV_SWAPPING && !kv_swap_due(kv, slot));
}
uint32_t vmem__kv_swap_next(const vmem_kv *kv); // a slot that is due, or UINT32_MAX
// Copies a portion; needs no lock. Then swap_portion_end with it: the last portion makes the slot VMEM_KV_SWAPPED,
// whose pages can be taken back.
int vmem__kv_swap_portion(vmem_kv *kv, uint32_t slot);
void vmem__kv_swap_portion_end(vmem_kv *kv, uint32_t slot);
int vmem__kv_swap_rest(vmem_kv *kv, uint32_t slot); // all of it, while the worker is at none

// ---- check.c: VMEM_KV_CHECK

int vmem__kv_check_books(vmem_kv *kv); // recounts everything
// Whether pages [from, to) of a span may be mapped or unmapped now.
int vmem__kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);

// ---- memory.c. With the locks held.

int vmem__kv_set_budget(vmem_kv *kv, uint64_t bytes);
// A context's caches, linked. Parting gives back what the cache took ahead.
void vmem__kv_join(vmem_kv *kv);
void vmem__kv_part(vmem_kv *kv);
// Takes device memory for that many pages in all, or gives back what is more.
int vmem__kv_take_ahead(vmem_kv *kv, uint64_t pages);
void vmem__kv_give_ahead(vmem_kv *kv, uint64_t pages);
// Returns device memory that nobody uses or took ahead. With no lock held.
void vmem__kv_trim(vmem_kv *kv);
// Pages whose memory the device has given and no page uses.
uint64_t vmem__kv_spare_memory(vmem_kv *kv);
// For the worker, which drops state meanwhile: gives back all that was taken ahead.
void vmem__kv_give_all_ahead(vmem_kv *kv);
// Pages that the device could make now.
uint64_t vmem__kv_device_pages(const vmem_kv *kv);
// Most pages that there can be: the budget, or less where the device has not as much. pages: how many more are wanted,
// so that the device is not asked where they are at hand. The device's last word is believed for 100 ms where it says yes,
// never where it says no. Exact while the worker makes and releases nothing.
uint64_t vmem__kv_limit(const vmem_kv *kv, uint64_t pages);
// The same, of a pool's member with what is free in the pool.
uint64_t vmem__kv_reach(const vmem_kv *kv);
// Whether so many pages more leave the context's other caches what they took ahead: pages come from there, too.
bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages);
// Pauses the worker where the device counts; true: to be released.
bool vmem__kv_hold_to_count(vmem_kv *kv);
// Takes over the budget that another process asked for, if one did.
void vmem__kv_take_wanted(vmem_kv *kv);
// Whether so many pages more could be had, taking back what can be.
int vmem__kv_would_fit(vmem_kv *kv, uint64_t pages, uint64_t *missing);
// Records shortages for vmem_kv_last_shortage.
void vmem__kv_enough(void);
int vmem__kv_short_of_budget(vmem_kv *kv, uint64_t want, uint64_t *missing); // want: pages there would be
int vmem__kv_short_of_device(vmem_kv *kv, uint64_t pages, uint64_t *missing);
int vmem__kv_short_of_mappings(vmem_kv *kv, uint64_t pages, uint64_t *missing);
// A new request would make it `want` pages, and must leave `back` of the limit.
int vmem__kv_short_beside(vmem_kv *kv, uint64_t want, uint64_t limit, uint64_t back, uint64_t *missing);
int vmem__kv_short_of_slots(vmem_kv *kv);
void vmem__kv_count_shortage(vmem_kv *kv); // in the statistics, of a call that really needed them

#endif
