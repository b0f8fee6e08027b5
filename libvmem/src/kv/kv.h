// Internal declarations of the KV-cache manager.
//
// Tensors of equal row size, length and window form a group: their mapped pages always cover the same part of a slot,
// so all decisions are made once per (slot, group) instead of per tensor. The unit of bookkeeping is the span: the
// mapped part [lo, hi) of a slot in the tensors of a group, in pages.
//
// Locks, in this order: api serialises the public calls; state protects every field below from the background worker.
// The worker drops state while it calls core, and marks the slot busy instead. A call that needs a busy slot waits for
// it (vmem__kv_wait_slot). A public call keeps state while it calls core. The statistics have their own lock.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_INTERNAL_H
#define VMEM_KV_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "core/error.h"
#include "vmem_kv.h"

#define KV_BLOCK VMEM_PAGE_2M // what a 2 MiB page-table entry maps
#define KV_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KV_MAX(a, b) ((a) > (b) ? (a) : (b))

struct kv_group {
    uint64_t row_bytes;
    uint32_t max_tokens, window;
    uint32_t n;     // tensors
    uint32_t first; // of them, in vmem_kv.addrs
    uint64_t slot_rows, slot_stride;
    uint32_t slot_pages;
    uint64_t table;  // index in vmem_kv.pages of (slot 0, first tensor, page 0)
    uint64_t joined; // index in vmem_kv.joined of (slot 0, page 0)
};

// Always lo <= keep_lo <= need_lo <= need_hi <= keep_hi <= hi.
struct kv_span {
    uint32_t lo, hi;
    uint32_t need_lo, need_hi;   // what the slot's last step needed; equal: nothing
    uint32_t keep_lo, keep_hi;   // what kernels in flight access, of the last steps and of the next
    uint32_t shared_hi;          // pages from here on have no other holder
    uint32_t coarse_hi;          // 2 MiB blocks that end above this are mapped page by page, pages behind it one by one
    uint32_t stale_lo, stale_hi; // before lo: mappings of shared pages that the slot released when it was freed
};

// Every step reads these structures of all slots, usually from memory that is no longer in the CPU's caches. They are
// therefore small, and fields that only concern slots without a running request are in struct kv_idle.
struct kv_slot {
    uint32_t tokens;
    uint32_t shared_tokens;
    uint32_t backed; // tokens up to which a step has nothing to map
    uint32_t steady; // a step to `tokens` or more, up to this, needs the same pages as the last; 0: not known
    uint32_t took;   // the last step that it took part in, or before which it was allocated
    uint8_t state;   // enum vmem_kv_slot_state
    bool fresh;      // no step since it was allocated or swapped in, so no kernel can access it
    bool skip;       // the worker failed here, and does not try again before the next step
    bool busy;       // the worker is changing it
    bool dirty;      // kept pages show an earlier request's rows (VMEM_KV_ZERO)
    bool stale;      // some span has stale mappings
};
struct kv_idle {
    uint32_t fit;    // tokens of the last request in this free slot
    uint32_t from;   // how many of these were shared; no page is in their place
    uint64_t parked; // when it was freed
    uint64_t ends;   // VMEM_KV_ENDING, VMEM_KV_SWAPPING: after the kernels of this step
    // VMEM_KV_SWAPPING: where the rows go, how many bytes of them have gone, and how many there are.
    void *host;
    uint64_t copied, size;
};

// What a slot's earlier step needed; equal: nothing.
struct kv_past {
    uint32_t lo, hi;
};

// What a step needs of the tensors of a group in a slot.
struct kv_want {
    uint32_t slot, group;
    uint32_t lo, hi;           // pages that its kernels access
    struct kv_past touched;    // the same, and what kernels of the steps in flight access
    uint32_t keep_lo, keep_hi; // the span's values while the plan protects pages
    bool extends;              // pages may be missing
};
// What a step needs, for the slots whose needs differ from the last step's.
struct kv_plan {
    struct kv_want *wants; // slot by slot, all groups of each
    uint64_t n, missing;   // missing: pages
    bool extends, protects;
};

// An announced request: rows up to `tokens`, the first of which a prefix will provide.
struct kv_expected {
    uint32_t tokens, prefix;
};

struct kv_prefix {
    uint64_t id;
    uint32_t tokens, min_tokens;
    uint64_t n_pages;
    uint32_t *lo, *hi; // per group: the pages it holds
    vmem_page *pages;  // group after group, tensor after tensor
};

// The holders of a row of pages (one page number in the tensors of a group). Exists for rows that a prefix holds or
// that several slots have mapped.
struct kv_ref {
    vmem_page page; // of the group's first tensor; 0: empty
    uint32_t slots, prefixes;
    uint32_t n;      // pages
    uint32_t cached; // of the prefixes, hashed blocks
    uint64_t mark;   // vmem_kv.mark of the call that saw it
};
struct kv_refs {
    struct kv_ref *entries;
    uint64_t size, used; // size: a power of two
    uint64_t pages;      // of all rows here
    uint64_t shared;     // of these, with several holders
    uint64_t only;       // of these, held by prefixes alone
    uint64_t evictable;  // of these, by hashed blocks alone
};

// Parts of spans to back, and the lists for that.
struct kv_part {
    uint32_t slot, group, from, to;
    bool joins;         // the page before also belongs to the slot
    uint32_t coarse_hi; // 2 MiB entries may map the blocks that end up to here
};
struct kv_grow {
    struct kv_part *parts;
    uint64_t n_parts, cap_parts, total; // total: pages
    vmem_page *pages;
    uint64_t n_pages, cap_pages;
    struct vmem__stretch *stretches;
    uint64_t cap_stretches;
    struct vmem_map_op *fine, *coarse;
    uint64_t n_fine, cap_fine, n_coarse, cap_coarse;
    enum { KV_GROW_LISTS, KV_GROW_CREATE, KV_GROW_MAP } at; // how far a failed run came
};
// A part of a span to release: the front, the tail, or both.
struct kv_cut {
    uint32_t slot, group;
    struct kv_span before;
    uint32_t lo, hi; // what remains; equal: nothing
    struct vmem_unmap_op *ops;
    uint64_t n_ops, cap_ops;
    vmem_page *pages; // those without another holder
    uint64_t n_pages, cap_pages;
};

struct vmem_kv {
    vmem_context *ctx;
    const unsigned char *owned; // reads 1; reads 0 in a forked child, and once the cache is being closed
    pid_t pid;
    uint32_t flags, n_tensors, n_groups, n_slots, max_tokens, tile_rows;
    uint32_t ahead_tokens, ahead_min, eager_tokens, reclaim_percent, steps_in_flight;
    struct kv_expected expected[VMEM_KV_EXPECT]; // the requests that come next
    uint32_t n_expected;
    uint64_t step, retired; // the last step; the last whose kernels have ended
    uint32_t n_ending;      // slots that are ENDING or SWAPPING
    uint64_t closes;        // vmem_kv_destroy_after: the step
    bool closing;
    struct kv_past *past;  // [slot][group][steps_in_flight - 1]: the steps before the last, the newest first
    uint32_t create_flags; // for vMemCreate
    uint64_t page_size;
    uint32_t page_shift, block; // block: pages in 2 MiB
    bool windows;               // some group has one

    uint64_t *addrs; // tensors, group after group
    uint32_t *order; // tensor as the caller counts -> index in addrs
    struct kv_group *groups;
    struct kv_span *spans; // [slot][group]
    struct kv_plan plan;   // of the public call in progress
    struct kv_slot *slots;
    struct kv_idle *idle; // [slot]
    vmem_page *pages;     // see kv_table(); address space, used where there are pages
    uint64_t pages_bytes;
    uint32_t whole; // most pages that are created, mapped and unmapped together; 0: each can go alone
    bool *joined;   // with `whole`, [group][slot][page]: it goes with the page before it
    uint64_t joined_bytes;
    uint64_t scratch; // a reservation with a page per tensor, to access pages that no slot has mapped

    pthread_mutex_t api, state, stats_lock;
    pthread_cond_t work, done;
    pthread_t worker;
    bool has_worker, stop, work_due, working;
    uint32_t hold; // calls that want the worker to pause
    uint32_t idle_ms;
    uint64_t calls;       // public calls so far
    bool called;          // a public call is in progress, and may have dropped state to wait
    bool idle_once, gave; // the worker saw the cache idle; it gave back what an idle one gives

    vmem_kv *next;              // the context's next cache
    uint64_t budget_pages;      // the most pages that may exist
    uint64_t watermark_pages;   // of these, new requests leave so many, or
    uint32_t watermark_percent; // so large a part: the larger of both
    uint64_t promise;           // pages that need no memory from the device. Written with stats_lock, too
    uint64_t device_limit;      // pages that the device allowed when the statistics last asked
    uint64_t device_asked;      // when that was
    uint64_t held;              // existing pages, including pending ones
    uint64_t ceiling;           // VMEM_KV_CHECK: the budget, or the pages that existed when it shrank
    uint64_t pending; // pages of these that the worker is mapping or unmapping; they become unused or reclaimable
    uint64_t clock;
    struct kv_refs refs;
    struct kv_prefix **prefixes;
    uint64_t cap_prefixes;
    uint32_t n_prefixes, prefix_generation;
    vmem_page *named; // pages of block names, block_pages each, group after group, tensor after tensor; 0: not taken
    uint32_t n_blocks, block_tokens, block_pages, n_named; // n_named: names that are taken
    struct kv_hashes *hashes;                              // hash.h
    uint64_t mark;                                         // the number of the last call that marked what it saw
    struct vmem_copy_op *swap_ops; // of the portion that is being copied; from the first vmem_kv_swap_out_after on
    struct kv_grow grow, worker_grow;
    struct kv_cut cut, worker_cut;
    bool cutting;           // the worker is unmapping pages that others may hold or release
    int32_t *staged;        // vmem_kv_grow: lengths of the step to come
    uint64_t *staged_pages; // pages that each lacked when it was staged
    uint32_t n_staged;
    uint64_t staged_missing;       // their sum
    uint32_t *changed;             // slots that a plan examines
    struct vmem_kv_stats stats;    // counters; the rest is filled in by vmem__kv_summarise
    _Atomic uint64_t zeroed_bytes; // the counter that the background thread adds to as well
    struct vmem_kv_stats shown;    // under stats_lock
    bool stale;                    // shown is older than stats
    uint64_t summarised;           // when shown was last updated, in ns
    _Atomic bool long_call;        // a public call has state and may be calling core; shown is older
    struct vmem_kv_view *view;
    char *view_path;
    struct kv_member *member; // of a pool; NULL: of none
    struct kv_member *left;   // the same while the cache is destroyed
    uint64_t portion;         // pages that the worker gives back in one call while others wait for them
    bool giving;              // the pool lowered the budget; what is beyond it goes
};

static inline struct kv_span *kv_span(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return &kv->spans[(uint64_t)slot * kv->n_groups + group];
}

// The pages of one tensor of the group (index within it) in one slot.
static inline vmem_page *kv_table(const vmem_kv *kv, const struct kv_group *g, uint32_t slot, uint32_t tensor)
{
    return kv->pages + g->table + ((uint64_t)slot * g->n + tensor) * g->slot_pages;
}

static inline uint64_t kv_addr(const vmem_kv *kv, const struct kv_group *g, uint32_t slot, uint32_t tensor,
                               uint64_t page)
{
    return kv->addrs[g->first + tensor] + slot * g->slot_stride + (page << kv->page_shift);
}

// Whether a page of a span is joined to the page before it.
static inline bool kv_joined(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    const struct kv_group *g = &kv->groups[group];
    return kv->whole && page < g->slot_pages && kv->joined[g->joined + (uint64_t)slot * g->slot_pages + page];
}

// Pages that could be added without reclaiming any.
static inline uint64_t kv_unused(const vmem_kv *kv)
{
    return kv->budget_pages > kv->held ? kv->budget_pages - kv->held : 0;
}

// Memory is scarce if fewer pages than this are unused, and plentiful if at least twice as many are.
static inline uint64_t kv_low(const vmem_kv *kv) { return kv->budget_pages * kv->reclaim_percent / 100; }

// ---- kv.c

// The pages that an iteration accesses when it extends a slot from `before` tokens to `tokens`.
uint32_t vmem__kv_need_lo(const vmem_kv *kv, const struct kv_group *g, uint32_t before);
uint32_t vmem__kv_need_hi(const vmem_kv *kv, const struct kv_group *g, uint64_t tokens);
// The most tokens that a step of the slot can have with the same pages as now; 0 if steps to fewer may need others.
uint32_t vmem__kv_steady(const vmem_kv *kv, uint32_t slot);
// Sets slot->backed from its spans.
void vmem__kv_set_backed(vmem_kv *kv, uint32_t slot);
// Grows an array so that it has room for n elements of `size` bytes.
int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size);

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

// ---- step.c

// Removes a slot's staged growth.
void vmem__kv_unstage(vmem_kv *kv, uint32_t slot);

// ---- slots.c

// vmem_kv_free and vmem_kv_truncate, with the locks held and checked.
int vmem__kv_free(vmem_kv *kv, uint32_t slot);
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

// ---- reclaim.c

// Pages that could be reclaimed from a slot: kept, ahead of need, or passed by a window.
uint64_t vmem__kv_reclaimable_in(const vmem_kv *kv, uint32_t slot);
uint64_t vmem__kv_reclaimable(const vmem_kv *kv);
// What can be taken back next, best first: of free slots, the one freed first; then what active slots have ahead of
// need. want: pages asked for. False: nothing.
struct kv_victim {
    uint32_t slot, group, lo, hi; // what the span is to be cut down to
};
bool vmem__kv_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, struct kv_victim *v);
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

// ---- expect.c

// The free slot that is to be backed next for a request that is expected, and which that is; UINT32_MAX: none.
uint32_t vmem__kv_expected_slot(const vmem_kv *kv, struct kv_expected *request);
void vmem__kv_wait_slot(vmem_kv *kv, uint32_t slot);
void vmem__kv_wait_idle(vmem_kv *kv); // until it has nothing left to do
// Until it unmaps nothing that others may hold: a call that maps, unmaps or releases such pages waits here first.
void vmem__kv_wait_cut(vmem_kv *kv);
// Between these two the worker does nothing. Both with state held; hold may drop it for a moment.
void vmem__kv_worker_hold(vmem_kv *kv);
void vmem__kv_worker_release(vmem_kv *kv);

// ---- refs.c

struct kv_ref *vmem__kv_ref_find(const struct kv_refs *r, vmem_page page);
static inline struct kv_ref *kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    return kv->refs.used ? vmem__kv_ref_find(&kv->refs, kv_table(kv, &kv->groups[group], slot, 0)[page]) : NULL;
}
// How many rows of [from, to) of a span others hold as well.
uint32_t vmem__kv_rows_shared(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);
// Whether another slot has a page of rows from `tokens` on, which must not be written then.
bool vmem__kv_others_read(const vmem_kv *kv, uint32_t slot, uint32_t tokens);
// The entry, made with slots = 1 if there was none; NULL: out of memory.
struct kv_ref *vmem__kv_ref_get(struct kv_refs *r, vmem_page page, uint32_t n);
int vmem__kv_ref_reserve(struct kv_refs *r, uint64_t more); // the next `more` vmem__kv_ref_get do not fail
// Adds holders. The entry goes when no prefix and at most one slot holds the row.
void vmem__kv_ref_hold(struct kv_refs *r, struct kv_ref *ref, int slots, int prefixes);
void vmem__kv_ref_cache(struct kv_refs *r, struct kv_ref *ref, int blocks); // hashed ones

// ---- prefix.c

int vmem__kv_prefix_drop(vmem_kv *kv, struct kv_prefix *p);
// A prefix of the pages [lo, hi) of each group that begins at (lo, hi), without pages and in no list; NULL: no memory.
struct kv_prefix *vmem__kv_prefix_new(const vmem_kv *kv, uint32_t tokens, const struct kv_past *rows);
// The prefix's pages of the group's first tensor; the others follow, hi - lo pages each.
vmem_page *vmem__kv_prefix_pages(const vmem_kv *kv, const struct kv_prefix *p, uint32_t group);
// Holds its pages, which others hold, or lets go of them, releasing those without another holder.
void vmem__kv_prefix_hold(vmem_kv *kv, const struct kv_prefix *p);
int vmem__kv_prefix_let_go(vmem_kv *kv, const struct kv_prefix *p);
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
int vmem__kv_hash_check(const vmem_kv *kv, const void *hashes, size_t n);
// How many of the first of these blocks a request could begin with.
int vmem__kv_hash_known(vmem_kv *kv, const struct vmem_kv_hash *hashes, uint64_t n, uint32_t *blocks);
// Pages that a request which begins with the blocks found last takes from those that can be evicted. Marked ones do not
// count. *copied: of the page that it copies, which it takes for as long as that lasts.
uint64_t vmem__kv_hash_taken(vmem_kv *kv, uint32_t blocks, uint64_t *copied);

// ---- stats.c

#define KV_VIEW_NS 5000000                // how far the published view may be behind
#define KV_DEVICE_NS 100000000            // and what it says of the device's memory
uint64_t vmem__kv_now(void);              // ns, to a few ms
void vmem__kv_summarise(vmem_kv *kv);     // stats -> shown, and the published view
void vmem__kv_may_take_long(vmem_kv *kv); // before a public call goes to the library below

// ---- view.c

void vmem__kv_publish_stats(vmem_kv *kv); // what is shown, as it is now
void vmem__kv_unpublish(vmem_kv *kv);
// The budget that another process wrote into the view, once; 0: none.
uint64_t vmem__kv_wanted_budget(vmem_kv *kv);
void vmem__kv_answer_wanted(vmem_kv *kv, uint64_t bytes, uint32_t answer, uint32_t reason);

// ---- pool.c. With api and state held; without effect on a cache of no pool.

// Before a budget is found too small for so many pages more: takes what is free in the pool, and some to spare.
void vmem__kv_claim_for(vmem_kv *kv, uint64_t pages);
// Pages that a claim would find.
uint64_t vmem__kv_claimable(const vmem_kv *kv);
// The budget lacks so many pages: asks the other members. How many of them may still come.
uint64_t vmem__kv_ask(vmem_kv *kv, uint64_t pages);
void vmem__kv_unask(vmem_kv *kv); // a step found what it needs
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
int vmem__kv_swap_check(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes); // of a slot to be swapped out

// ---- swap_after.c

// Whether the slot is being swapped out and its kernels have ended: its pages count as free.
static inline bool kv_swap_due(const vmem_kv *kv, uint32_t slot)
{
    return kv->slots[slot].state == VMEM_KV_SWAPPING && kv->idle[slot].ends <= kv->retired;
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
// For the worker, which drops state meanwhile: gives back all that was taken ahead.
void vmem__kv_give_all_ahead(vmem_kv *kv);
// Pages that the device could make now.
uint64_t vmem__kv_device_pages(const vmem_kv *kv);
// Most pages that there can be: the budget, or less where the device has not as much. pages: how many more are wanted,
// so that the device is not asked where they are at hand; 0: it is. Exact while the worker makes and releases nothing.
uint64_t vmem__kv_limit(const vmem_kv *kv, uint64_t pages);
// The same of a pool's member, with what is free in the pool.
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
