// The KV-cache manager: the state of a cache, and what its files offer each other. A file calls those above it in this
// header alone; `make lint` follows the calls.
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
#ifndef VMEM__KV_H
#define VMEM__KV_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "core/clock.h"
#include "core/memory.h"
#include "pool/member.h"
#include "vmem_kv.h"

#define KV_BLOCK VMEM_PAGE_2M // bytes that one large page-table entry maps

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

// A state beside those of enum vmem_kv_slot_state. For callers, such slots are free: see struct vmem_kv_slot_info, after.
enum { KV_ENDING = VMEM_KV_SWAPPED + 1, KV_STATES };

// Pages [lo, hi) of a slot; equal: none.
struct kv_range {
    uint32_t lo, hi;
};

// The pages of a slot in the tensors of a group. Always lo <= in_flight.lo <= step.lo <= step.hi <= in_flight.hi <= hi.
//
//  page  0     lo    in_flight.lo  step.lo      step.hi  in_flight.hi   hi
//        |.....|#####|=============|************|========|##############|.....
//         none  passed   in flight   last step   in flight     ahead      none
//               by windows
//                    |<- pinned: no call can take them back ->|
//
// The pinned part begins at in_flight.lo, and ends at in_flight.hi or behind it, where pages go together.
//
// Functions that give an end of pages:
//   vmem__kv_need_hi     of those that rows up to a length lie in, whether or not they are mapped
//   vmem__kv_usable_end  of those that are mapped and that a step to there can use
//   kv_end_of            of those that are unmapped with the page before a given one
//   vmem__kv_tail        the first page that may be cut off the end of the span
struct kv_span {
    uint32_t lo, hi;           // pages that are mapped
    struct kv_range step;      // pages that the slot's last step needs
    struct kv_range in_flight; // pages that kernels in flight access: those of the last steps and of the next
    struct kv_range pinned;    // cached: vmem__kv_pinned_part, which kv_ledger.pinned_pages counts
    uint32_t shared_hi;        // no other slot or run holds pages from here on
    uint32_t coarse_hi;        // below it, 2 MiB entries may map whole blocks; other pages have their own entries
};

// Every step reads these structures of all slots, usually from memory that is no longer in the CPU's caches. They are
// therefore small, and fields that only concern slots without a running request are in struct kv_idle.
struct kv_slot {
    uint32_t tokens;        // the request's length
    uint32_t shared_tokens; // rows below this are, at least partly, in shared pages
    uint32_t backed;        // cached, from the spans: tokens up to which a step has nothing to map
    uint32_t
        same_pages_until; // a step to any length in [tokens, same_pages_until] needs the last step's pages; 0: unknown
    uint32_t last_step;   // in which the slot took part; of a new slot, the step before its allocation
    uint8_t state;        // enum vmem_kv_slot_state or KV_ENDING; written by vmem__kv_set_state alone
    bool fresh;           // no step since it was allocated or swapped in: no kernel accesses it
    // Both until the slot's next step:
    bool skip;    // the worker failed to back pages here, and does not try again
    bool stuck;   // the worker failed to unmap pages here, and tries again only when it is otherwise idle
    bool busy;    // the worker is changing it
    bool stale;   // some span has stale mappings
    uint8_t list; // cached, from state and backed: the list in vmem_kv.lists that has it
};

// A set of slots. Any number of them is put in, taken out and found in their order without a look at the others.
struct kv_set {
    uint64_t *slots; // a bit for each
    uint64_t *words; // a bit for each word of slots that has one
};
// Each slot is in one list: of free slots by the bits of `backed`, of active ones, or of all others.
enum { KV_FREE_LISTS = 32, KV_LIST_ACTIVE = KV_FREE_LISTS, KV_LIST_OTHERS, KV_LISTS };
struct kv_idle {
    uint32_t first_private_row; // a free slot has no pages of the rows before it: a prefix had them
    uint64_t freed_seq;         // vmem_kv.clock when it was freed; 0: its pages are the first to be taken back
    uint64_t ends;              // KV_ENDING: the step whose kernels must end
};

// The pages that a step needs in the tensors of a group of a slot.
struct kv_want {
    uint32_t slot, group;
    struct kv_range step;    // pages that its kernels access
    struct kv_range touched; // these, and those that kernels in flight access
    bool extends;            // pages may be missing
};
// The pages that a step needs, of the slots that need other pages than in the last step.
struct kv_plan {
    struct kv_want *wants; // slot by slot, all groups of each
    uint64_t n;            // wants
    uint64_t missing;      // pages
    uint32_t *changed;     // slots that the step examines
    bool extends;          // some want does
};

// An announced request: rows up to `tokens`, the first of which a prefix will provide.
struct kv_expected {
    uint32_t tokens, prefix;
};

// Rows of pages in the tensors of a group: page numbers [lo, lo + n).
struct kv_rows {
    uint32_t lo, n;
    vmem_page *pages; // tensor after tensor, n of each
};
// Rows [first, first + tokens) of a request, held beyond its slot.
//
//                  the last request that           memory is short,
//  share           pins it ends                    and keep is not set
//  -----> PINNED ------------------------> LISTED --------------------> evicted, and reported if asked for
//                <------------------------
//                  a request begins with it
//
// pins is above 0 while it is pinned. Listed runs are in kv_runs.order[keep], the oldest first. A run can be dropped in
// either state: requests that pin it keep their pages. Where listed runs do not suffice, one that is pinned is evicted if
// that frees pages which its requests no longer have. Once it is evicted or dropped, its number names nothing.
struct kv_run {
    uint64_t id; // see kv_run_id(); 0: not in use
    uint32_t first, tokens;
    uint32_t pins;         // running requests that began with it or wrote it
    uint32_t newer, older; // in the order of use, while nobody pins it
    uint32_t next;         // of those not in use
    bool keep;             // not evicted
    bool report;           // vmem_kv_evicted names it
    bool is_protected;     // not evicted: it is being attached
    struct kv_rows *rows;  // [group]
};

// A shared row: the pages with one page number in the tensors of a group, and who holds them. Exists for rows that a run
// holds or that several slots have mapped.
struct kv_shared_row {
    vmem_page page;          // of the group's first tensor; 0: empty
    uint32_t slots, runs;    // that hold it
    uint32_t n;              // pages
    uint32_t pinning_slots;  // of the slots, those with the row in the pinned part of their span
    uint32_t evictable_runs; // of the runs, those that can be evicted
    uint32_t seen;           // how often the call of `mark` saw it
    uint64_t mark;           // vmem_kv.mark of the last call that saw it
};
struct kv_shared_rows {
    struct kv_shared_row *entries;
    uint64_t size, used; // size: a power of two
    uint64_t shared;     // cached: pages of rows with several holders
    uint64_t runs_only;  // cached: pages of rows that runs alone hold
    uint64_t evictable;  // cached: of these, pages of rows that only runs which can be evicted hold
};

// Parts of spans to back: kv_grow lists them, grow_map creates and maps their pages, all or none, and grow_commit enters
// them in the spans. The pages of a part are created and mapped alike.
struct kv_part {
    uint32_t slot, group, from, to;
    bool joins;              // the page before also belongs to the slot
    bool coarse;             // whole blocks, which 2 MiB entries may map
    const vmem_page *others; // pages that exist, of the first tensor; NULL: they are to be created
    uint32_t stride;         // of these, from one tensor to the next
};
struct kv_grow {
    uint64_t total, others; // pages to be created, and that exist
    uint64_t n_parts, n_pages;
    uint64_t n_coarse; // of the maps, which come first: in a call of their own, so that 2 MiB entries may be used
    uint64_t cap_parts, cap_pages, cap_maps, cap_stretches;
    struct kv_part *parts;
    vmem_page *pages;
    struct vmem_map_op *maps;
    struct vmem__stretch *stretches;
    enum { KV_GROW_LISTS, KV_GROW_CREATE, KV_GROW_MAP } at; // how far a failed run came
};
// A part of a span to release: the front, the tail, or both.
struct kv_cut {
    uint32_t slot, group;
    struct kv_span before;
    uint32_t lo, hi; // what remains; equal: nothing
    bool shared;     // some of the rows that go have other holders
    struct vmem_unmap_op *ops;
    uint64_t n_ops, cap_ops;
    vmem_page *pages; // those without another holder
    uint64_t n_pages, cap_pages;
};

// ---- the parts of a cache ---------------------------------------------------------------------------------------------

// Pages.
struct kv_ledger {
    uint64_t budget;          // the most that may exist
    uint64_t held;            // that exist, including pending ones
    uint64_t pinned_pages;    // of these, that no call can take back. Changed by shared.c and span.c alone
    uint64_t pending;         // of `held`, that the worker is mapping or unmapping; they become unused, or can be taken
    uint64_t preallocated;    // that the cache can create without asking the device. Written with report.lock, too
    uint64_t ceiling;         // VMEM_KV_CHECK: the budget, or the pages that existed when it shrank
    uint64_t watermark_pages; // new requests leave max(watermark_pages, watermark_percent of the budget) free
    uint32_t watermark_percent;
    bool disturbed; // VMEM_KV_CHECK: a job of the worker changed pinned_pages
};

// A cache's membership in a pool.
struct kv_membership {
    struct vmem__member *member;                  // NULL: of no pool
    struct vmem__member *left;                    // the same while the cache is destroyed
    uint64_t (*evict)(void *arg, uint64_t pages); // as in struct vmem_kv_pool_share
    void *evict_arg;
    uint64_t offered;      // pages of requests that evict would release
    uint64_t missed;       // bytes of pages that the pool took back and the cache will want again
    bool lowering;         // other members wait for what is beyond lower_to: the budget falls as the pages go
    bool announced;        // the cache has told the pool what requests that wait will need
    uint64_t lower_to;     // pages
    uint64_t portion;      // pages that the worker gives back in one call while others wait for them
    uint64_t pinned_pages; // kv_ledger.pinned_pages after the last call
};

// Kernels that may be in flight. A step's number has a tag of the cache from bit KV_STEP_TAG on, so that no cache takes
// another's step for its own. Below the tag, the count begins behind 0, so that the steps before the first have numbers.
#define KV_STEP_TAG 40u
#define KV_STEP_TAGS ((UINT64_C(1) << (63 - KV_STEP_TAG)) - 1)
#define KV_STEP_NONE (UINT64_C(1) << 20) // the count before the first step
struct kv_fences {
    uint64_t step, retired; // numbers of the last step, and of the last whose kernels have ended
    struct kv_range *past;  // [slot][group][steps_in_flight - 1]: the steps before the last, the newest first
};

// The requests that come next.
struct kv_expect {
    struct kv_expected list[VMEM_KV_EXPECT];
    uint32_t n;
};

// The runs that a request pins, in the order of their rows.
struct kv_pin {
    uint64_t id;
    uint32_t first;
};
struct kv_pins {
    struct kv_pin *list;
    uint64_t n, cap;
};
struct kv_runs {
    struct kv_run *list;
    uint64_t cap;
    uint64_t pages;             // of all runs together, each counted for itself
    uint32_t used, n, reported; // entries that were ever in use, that are, and that are reported
    uint32_t unused;            // the first of the others
    uint64_t tag;               // of the cache, in its runs' numbers
    uint32_t generation;
    struct kv_use {
        uint32_t newest, oldest;
    } order[2];           // of those that can be evicted, and of those to be kept
    struct kv_pins *pins; // [slot]
    uint64_t *gone;       // evicted ones that are reported, the oldest first
    uint64_t n_gone, cap_gone;
    uint32_t *found; // of the look-up that is at work
    uint64_t cap_found;
    uint32_t n_found;
};

// Pages without a run or a slot, which the worker releases.
struct kv_doomed {
    vmem_page *pages;
    uint64_t n, cap;
};

#define KV_SCRATCH 64u // pages
struct kv_copies {
    uint64_t scratch; // a reservation to access pages that no slot has mapped: a page per tensor, or more
};

// Calls and the worker take turns.
struct kv_turn {
    pthread_cond_t work, done;
    bool has_worker, stop, due, working;
    bool stuck;      // some slot is
    bool unmapping;  // the worker is unmapping or releasing pages that others may hold or release
    bool cutting;    // it is giving up pages that one slot alone holds; where mappings are stale, others may have them
    uint32_t pauses; // calls that have paused the worker and not resumed it
};

struct kv_worker {
    pthread_t thread;
    uint32_t idle_ms;
    bool idle_once, released_all; // it saw the cache idle; it returned the pages that an idle cache does not keep
    struct kv_grow grow;
    struct kv_cut cut;
};

struct kv_gate {
    pthread_mutex_t api, state;
    uint64_t calls; // public calls so far
    bool called;    // one is in progress, and may have dropped state to wait
};

// The statistics that others see.
struct kv_report {
    pthread_mutex_t lock;
    struct vmem_kv_stats shown; // under the lock
    uint64_t summarised;        // when that was last updated, in ns
    bool stale;                 // shown is older than the statistics
    _Atomic bool long_call;     // a public call has state and may be calling core; shown is older
};

struct kv_view {
    struct vmem_kv_view *map; // NULL: not published
    char *path;
    int fd;
};

struct kv_life {
    uint64_t closes; // vmem_kv_destroy with a fence: the step
    bool closing;
    bool memory_freed; // its memory is free, and only the handle is left
};

struct vmem_kv {
    // Constant once it has been created, but for flags (a pool's member is LAZY) and owned.
    vmem_context *ctx;
    const unsigned char *owned; // reads 1; reads 0 in a forked child, and once the cache is being closed
    pid_t pid;
    uint32_t flags, n_tensors, n_groups, n_slots, max_tokens, tile_rows;
    uint32_t ahead_tokens, ahead_min, eager_tokens, reclaim_percent, steps_in_flight;
    uint32_t create_flags; // for vMemCreate
    uint64_t page_size;
    uint32_t page_shift, block; // block: pages in KV_BLOCK
    uint32_t whole;             // most pages that are created, mapped and unmapped together; 0: each can go alone
    bool windows;               // some group has one
    uint64_t *addrs;            // tensors, group after group
    uint32_t *order;            // tensor as the caller counts -> index in addrs
    struct kv_group *groups;
    vmem_page *pages; // see kv_table(); address space, used where there are pages
    uint64_t pages_bytes;
    bool *joined; // with `whole`, [group][slot][page]: it goes with the page before it
    uint64_t joined_bytes;

    struct kv_slot *slots;
    struct kv_set lists[KV_LISTS], stale_slots;
    uint64_t *bits;               // of these sets
    uint32_t in_state[KV_STATES]; // cached: slots in each state
    struct kv_idle *idle;         // [slot]
    struct kv_span *spans;        // [slot][group]
    // [slot][group]: mappings of shared pages, before lo, that the slot released when it was freed
    struct kv_range *stale;
    uint64_t clock; // counts the slots that are freed
    struct kv_shared_rows shared;
    uint64_t mark; // the number of the last call that marked what it saw
    struct kv_ledger ledger;
    struct kv_fences fence;
    struct kv_plan plan; // of the public call in progress
    struct kv_gate gate;
    struct kv_membership membership;
    struct kv_view view;
    struct kv_copies copy;
    struct vmem_kv_stats stats; // counters; the rest is filled in by vmem__kv_summarise
    struct kv_report report;
    struct kv_turn turn;

    // Most steps read nothing from here on.
    struct kv_grow grow; // of public calls
    struct kv_cut cut;
    struct kv_runs runs;
    struct kv_doomed doomed;
    struct kv_expect expect;
    vmem_kv *next; // the context's next cache
    struct kv_worker worker;
    struct kv_life life;
};

// ---- the state -------------------------------------------------------------------------------------------------------

static inline struct kv_span *kv_span(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return &kv->spans[(uint64_t)slot * kv->n_groups + group];
}

// A span that begins here, without pages.
static inline struct kv_span kv_span_at(uint32_t page)
{
    const struct kv_range none = {page, page};
    return (struct kv_span){.lo = page, .hi = page, .step = none, .in_flight = none, .pinned = none};
}

static inline struct kv_range *kv_stale(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return &kv->stale[(uint64_t)slot * kv->n_groups + group];
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

// True if a page of a span is joined to the page before it.
static inline bool kv_joined(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    const struct kv_group *g = &kv->groups[group];
    return kv->whole && page < g->slot_pages && kv->joined[g->joined + (uint64_t)slot * g->slot_pages + page];
}

static inline uint64_t kv_ceil_pages(uint64_t bytes, const vmem_kv *kv)
{
    return (bytes >> kv->page_shift) + (bytes & (kv->page_size - 1) ? 1 : 0);
}

// True if kernels may access the slot: it is active or ending.
static inline bool kv_accessed(const vmem_kv *kv, uint32_t slot)
{
    return kv->slots[slot].state != VMEM_KV_FREE && kv->slots[slot].state != VMEM_KV_SWAPPED;
}

// The rows of a request that its next token reads, in each tensor of the group.
static inline uint64_t kv_live_rows(const struct kv_group *g, uint32_t tokens)
{
    const uint32_t rows = MIN(tokens, g->max_tokens);
    return g->window ? MIN(rows, g->window) : rows;
}

// Slots that wait for kernels to end.
static inline uint32_t kv_num_ending(const vmem_kv *kv) { return kv->in_state[KV_ENDING]; }

// Pages that could be added without reclaiming any.
static inline uint64_t kv_unused(const vmem_kv *kv) { return sat_sub(kv->ledger.budget, kv->ledger.held); }

// Pages that the watermark keeps back while requests run.
static inline uint64_t kv_watermark(const vmem_kv *kv)
{
    const struct kv_ledger *l = &kv->ledger;
    return MIN(MAX(l->watermark_pages, (l->budget * l->watermark_percent + 99) / 100), l->budget);
}

// Memory is scarce if fewer pages than this are unused, and plentiful if at least twice as many are.
static inline uint64_t kv_low(const vmem_kv *kv) { return kv->ledger.budget * kv->reclaim_percent / 100; }
// Not while the memory is promised to others, or requests wait for it.
static inline bool kv_plentiful(const vmem_kv *kv)
{
    return !kv->membership.lowering && !kv->membership.announced && kv_unused(kv) >= 2 * kv_low(kv);
}

// ---- turn.c ---------------------------------------------------------------------------------------------------------

// For tests, which delay the worker: called where it has dropped the lock and goes to the library below, before and
// after a call waits for it, and where the worker has looked whether the cache is idle. NULL outside of them.
enum vmem__kv_point { KV_WORKER_UNLOCKED, KV_CALL_WAITS, KV_CALL_WAITED, KV_WORKER_IDLE };
extern void (*_Atomic vmem__kv_hook)(enum vmem__kv_point point);
static inline void kv_at(enum vmem__kv_point point)
{
    void (*const hook)(enum vmem__kv_point) = vmem__kv_hook; // once: a test may take it away meanwhile
    if (hook)
        hook(point);
}
void vmem__kv_worker_wake(vmem_kv *kv);
void vmem__kv_wait_slot(vmem_kv *kv, uint32_t slot);
void vmem__kv_wait_idle(vmem_kv *kv); // until it has nothing left to do
void vmem__kv_wait_job(vmem_kv *kv);  // until it has ended its job; it begins no other until state is dropped
// Until it unmaps and releases nothing that others may hold: a call that maps, unmaps or releases such pages waits here
// first.
void vmem__kv_wait_unmapping(vmem_kv *kv);
void vmem__kv_wait_cutting(vmem_kv *kv); // until it unmaps nothing at all: for a call that unmaps what is stale
// Between these two the worker does nothing. Both with state held; pause may drop it for a moment.
void vmem__kv_worker_pause(vmem_kv *kv);
void vmem__kv_worker_resume(vmem_kv *kv);
// -EPERM in a child of the process that made it; -EINVAL: NULL, or being closed
int vmem__kv_check_usable(const vmem_kv *kv);

static inline struct kv_range *kv_past_of(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return kv->fence.past + ((uint64_t)slot * kv->n_groups + group) * (kv->steps_in_flight - 1);
}
static inline struct kv_range kv_range_union(struct kv_range a, struct kv_range b)
{
    return b.lo == b.hi ? a : (struct kv_range){MIN(a.lo, b.lo), MAX(a.hi, b.hi)};
}
// The pages of a span that kernels in flight access when a step needs `now`.
static inline struct kv_range kv_in_flight(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range now)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    now = kv_range_union(now, s->step);
    for (uint32_t i = 0; i + 1 < kv->steps_in_flight; i++)
        now = kv_range_union(now, kv_past_of(kv, slot, group)[i]);
    return now;
}
// No kernel accesses the slot, so its earlier steps no longer count.
void vmem__kv_clear_history(vmem_kv *kv, uint32_t slot);
// Kernels up to this step have ended.
uint64_t vmem__kv_last_ended_step(const vmem_kv *kv);
int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step); // -EINVAL: neither 0 nor a step that this cache has made
// Steps since the slot took part in one, or was allocated.
static inline uint32_t kv_absent(const vmem_kv *kv, uint32_t slot)
{
    return (uint32_t)kv->fence.step - kv->slots[slot].last_step;
}

// ---- sets.c ---------------------------------------------------------------------------------------------------------

#define KV_NO_SLOT UINT32_MAX
int vmem__kv_make_sets(vmem_kv *kv); // all slots are free, and have no page
void vmem__kv_set_add(struct kv_set *set, uint32_t slot);
void vmem__kv_set_remove(struct kv_set *set, uint32_t slot);
// The first slot of the set from there on; KV_NO_SLOT: there is none.
uint32_t vmem__kv_set_next(const vmem_kv *kv, const struct kv_set *set, uint32_t from);
void vmem__kv_set_list(vmem_kv *kv, uint32_t slot, uint8_t list);
static inline uint8_t kv_list_of(const struct kv_slot *s)
{
    if (s->state == VMEM_KV_FREE)
        return (uint8_t)(s->backed ? 32 - __builtin_clz(s->backed) : 0);
    return s->state == VMEM_KV_ACTIVE ? KV_LIST_ACTIVE : KV_LIST_OTHERS;
}
// After a change of the slot's state, or of what it has backed.
static inline void kv_list(vmem_kv *kv, uint32_t slot)
{
    const uint8_t list = kv_list_of(&kv->slots[slot]);
    if (list != kv->slots[slot].list)
        vmem__kv_set_list(kv, slot, list);
}
static inline uint32_t kv_next_active(const vmem_kv *kv, uint32_t from)
{
    return vmem__kv_set_next(kv, &kv->lists[KV_LIST_ACTIVE], from);
}
static inline uint32_t kv_next_used(const vmem_kv *kv, uint32_t from) // that is not free
{
    const uint32_t active = kv_next_active(kv, from), other = vmem__kv_set_next(kv, &kv->lists[KV_LIST_OTHERS], from);
    return MIN(active, other);
}

// Grows an array so that it has room for n elements of `size` bytes.
int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size);

// ---- layout.c -------------------------------------------------------------------------------------------------------

// The pages that an iteration accesses when it extends a slot from `before` tokens to `tokens`.
uint32_t vmem__kv_need_lo(const vmem_kv *kv, const struct kv_group *g, uint32_t before);
uint32_t vmem__kv_need_hi(const vmem_kv *kv, const struct kv_group *g, uint64_t tokens);
// The rows, in whole tiles, whose pages end before page `hi`; UINT32_MAX: all rows of a slot.
static inline uint32_t kv_rows_before(const vmem_kv *kv, const struct kv_group *g, uint32_t hi)
{
    uint64_t rows = ((uint64_t)hi << kv->page_shift) / g->row_bytes;
    if (kv->tile_rows > 1)
        rows -= rows % kv->tile_rows;
    return rows < g->max_tokens ? (uint32_t)rows : UINT32_MAX;
}
// Divides the tensors into groups, and makes the tables of their pages.
int vmem__kv_make_groups(vmem_kv *kv, const struct vmem_kv_config *c);

// ---- shared.c -------------------------------------------------------------------------------------------------------

struct kv_shared_row *vmem__kv_shared_find(const struct kv_shared_rows *r, vmem_page page);
// The entry of a slot's row; NULL: the row is the slot's own.
struct kv_shared_row *vmem__kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page);
// How many rows of a span others hold as well.
uint32_t vmem__kv_span_shared(const vmem_kv *kv, uint32_t slot, uint32_t group);
// Rows of a slot below this are (partly) in pages that others hold, too. Those at the end that others have left become
// the slot's own.
uint32_t vmem__kv_shared_tokens(const vmem_kv *kv, uint32_t slot);
// How many rows of a span's pinned part are pinned for this slot alone. Slots looked at since vmem_kv.mark was raised
// count as gone.
uint64_t vmem__kv_rows_left(vmem_kv *kv, uint32_t slot, uint32_t group);
// The entry of a slot's row, made if there was none; NULL: out of memory.
struct kv_shared_row *vmem__kv_row_get(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page);
// A new entry, of one slot.
struct kv_shared_row *vmem__kv_shared_new(struct kv_shared_rows *r, vmem_page page, uint32_t n);
int vmem__kv_shared_reserve(struct kv_shared_rows *r, uint64_t more); // the next `more` of these do not fail
// Adds holders, counted as in struct kv_shared_row. The entry goes when no prefix and at most one slot holds the row: it is
// that slot's own then.
struct kv_holders {
    int slots, pinning_slots, runs, evictable_runs;
};
void vmem__kv_change_holders(vmem_kv *kv, struct kv_shared_row *ref, struct kv_holders by);
// A slot loses rows: those in front of the pinned part or behind it, or both its front and as much of the part.
void vmem__kv_rows_leave(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);
// How often the row has been looked at since vmem_kv.mark was raised.
static inline uint32_t kv_row_seen(const vmem_kv *kv, const struct kv_shared_row *ref)
{
    return ref->mark == kv->mark ? ref->seen : 0;
}
static inline uint32_t kv_row_see(const vmem_kv *kv, struct kv_shared_row *ref)
{
    ref->seen = kv_row_seen(kv, ref) + 1;
    ref->mark = kv->mark;
    return ref->seen;
}
// True if some run that may not be evicted holds the row.
static inline bool kv_row_kept(const struct kv_shared_row *ref) { return ref->runs != ref->evictable_runs; }
// True if evicting runs would free the row's pages.
static inline bool kv_row_evictable(const struct kv_shared_row *ref) { return !ref->slots && !kv_row_kept(ref); }
// True if no call can take the row's pages back: a slot pins it, or a run that may not be evicted holds it.
static inline bool kv_row_pinned(const struct kv_shared_row *ref) { return ref->pinning_slots || kv_row_kept(ref); }

// ---- span.c ---------------------------------------------------------------------------------------------------------

// The end of the pages of a span that a step up to page `hi` can use. In a slot without rows, a stretch of pages that go
// together is useless if the step needs only some of them: it gets others.
uint32_t vmem__kv_usable_end(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi);
// The part of a span that no call could take back: what kernels access, and what goes with it. Of a slot that no kernel
// accesses, nothing.
struct kv_range vmem__kv_pinned_part(const vmem_kv *kv, uint32_t slot, uint32_t group);
// Where the pages end that go with those before `hi`. running: while kernels run, a block mapped by a 2 MiB entry goes
// as a whole.
static inline uint32_t kv_end_of(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi, bool running)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    hi = running ? MAX(hi, s->coarse_hi) : hi;
    while (hi < s->hi && kv_joined(kv, slot, group, hi))
        hi++;
    return MIN(hi, s->hi);
}
// The pages of a span that kernels access, and those that go with them; running: while the kernels run.
static inline struct kv_range kv_in_use(const vmem_kv *kv, uint32_t slot, uint32_t group, bool running)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    return (struct kv_range){s->in_flight.lo, kv_end_of(kv, slot, group, s->in_flight.hi, running)};
}
// The first page, at or after `from`, of the part that can be cut off the end of a span.
uint32_t vmem__kv_tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from);
// Makes this the pinned part, and moves the ledger's pinned_pages by the pages that enter or leave it. These are in the
// slot's table, and the rows among them have their entries: before a row loses the slot as a holder, the row leaves.
void vmem__kv_set_pinned(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to);
// By how many pages that would raise the pinned pages. Shared rows that leave count as if they stayed: other slots may leave
// them, too, and only then is it known what goes.
int64_t vmem__kv_pinned_delta(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to);
// vmem__kv_set_pinned for steps: in most, only the end changes, among pages that nobody else has.
static inline bool kv_at_own_end(const struct kv_span *s, struct kv_range to)
{
    return to.lo == s->pinned.lo && MIN(to.hi, s->pinned.hi) >= s->shared_hi;
}
static inline void kv_set_pinned(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (!kv_at_own_end(s, to)) {
        vmem__kv_set_pinned(kv, slot, group, to);
        return;
    }
    kv->ledger.pinned_pages += (uint64_t)(((int64_t)to.hi - s->pinned.hi) * kv->groups[group].n);
    s->pinned.hi = to.hi;
}
// Changes a span, and with it its pinned part and what of the slot is backed.
void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now);
// After a change of what kernels access, or of the slot's state: brings the pinned parts up to date.
void vmem__kv_update_pinned(vmem_kv *kv, uint32_t slot);

// VMEM_KV_CHECK: whether pages [from, to) of a span may be mapped or unmapped now. No mapping changes that kernels may
// use.
int vmem__kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);

// ---- slot.c ---------------------------------------------------------------------------------------------------------

const char *vmem__kv_state_name(uint8_t state);
void vmem__kv_set_state(vmem_kv *kv, uint32_t slot, uint8_t state);
// Checks the number and state (a set of 1 << enum vmem_kv_slot_state) of a slot and waits until it is not busy.
int vmem__kv_use_slot(vmem_kv *kv, uint32_t slot, uint32_t states);
// As vmem__kv_use_slot, without waiting for the worker's work on the slot.
int vmem__kv_check_slot(const vmem_kv *kv, uint32_t slot, uint32_t states);
// The free slot, but for the n taken ones, for a request of that many tokens, of which so many come from a prefix;
// KV_NO_SLOT: none.
uint32_t vmem__kv_choose_slot(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens, const uint32_t *taken,
                              uint32_t n);

// Takes the list of the requests that come next.
int vmem__kv_expect(vmem_kv *kv, const uint32_t *tokens, const uint32_t *prefix_tokens, size_t n);
// The free slot that is to be backed next for an expected request, and in *request that request; KV_NO_SLOT: none. It
// is the slot that the request will get if those expected before it have got theirs.
uint32_t vmem__kv_expected_slot(const vmem_kv *kv, struct kv_expected *request);

// ---- map.c ----------------------------------------------------------------------------------------------------------

// Plans to back pages [from, to) of a span as far as they are not. What the span has must begin at `to` at the latest.
// 2 MiB entries may map the blocks that end up to coarse_hi.
int vmem__kv_grow_to(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                     uint32_t coarse_hi);
// Plans to map a row there that others hold; pages: of the first tensor, and `stride` further on of the next one. The
// caller adds the row to the span.
int vmem__kv_grow_share(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t row,
                        const vmem_page *pages, uint32_t stride);
// Creates and maps, all or nothing; needs no lock. Before it the caller adds l->total to kv->ledger.held.
int vmem__kv_grow_map(vmem_kv *kv, struct kv_grow *l);
// Adds the new pages to the spans.
void vmem__kv_grow_commit(vmem_kv *kv, struct kv_grow *l);
// Releases pages. If the driver refuses to unmap one, as it may where a freed slot still maps it, the context releases it
// once the driver has unmapped something else.
void vmem__kv_release(vmem_kv *kv, const vmem_page *pages, uint64_t n);
// Unmaps and releases what vmem__kv_grow_map created.
void vmem__kv_grow_undo(vmem_kv *kv, struct kv_grow *l);
void vmem__kv_grow_reset(struct kv_grow *l);

// Copies the first `bytes` bytes of one page for each tensor of the group, from or to these pages, which need not be
// mapped anywhere.
int vmem__kv_copy_pages(vmem_kv *kv, const struct kv_group *g, const vmem_page *pages, uint64_t stride, bool to_scratch,
                        uint32_t slot, uint32_t page, uint64_t bytes);

// ---- unmap.c --------------------------------------------------------------------------------------------------------

// Cuts a span down to [lo, hi): begin changes the span, unmap (no lock needed) the mapping, end the rest, or restores the
// span if unmap failed. begin returns -EBUSY if rows would go that others hold, too: no reference changes while the worker
// has dropped the lock.
int vmem__kv_cut_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi);
int vmem__kv_cut_unmap(vmem_kv *kv, struct kv_cut *c);
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
// Unmaps what is stale in a slot: begin collects, vmem__kv_cut_unmap unmaps.
int vmem__kv_stale_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot);
void vmem__kv_stale_end(vmem_kv *kv, uint32_t slot);
int vmem__kv_stale_now(vmem_kv *kv, uint32_t slot);
// Releases the doomed pages. The worker is held, or there is none.
void vmem__kv_release_doomed(vmem_kv *kv);
void vmem__kv_release_soon(vmem_kv *kv); // the worker does, or if there is none, this call

// ---- runs.c ---------------------------------------------------------------------------------------------------------

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
struct kv_split vmem__kv_split(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens);
// The pages that a request of `tokens` tokens needs, in addition to those of prefix_tokens rows that it shares.
uint64_t vmem__kv_pages_beside(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens);

// -EINVAL: one of the runs is of another cache, whether or not it is still there. 0 is no run, and of every cache.
int vmem__kv_check_ids(const struct kv_runs *runs, const uint64_t *ids, uint64_t n);
// The slot's request uses the run until it ends. Fails only without memory for the slot's list.
int vmem__kv_pin(vmem_kv *kv, uint32_t slot, uint32_t run);
void vmem__kv_unpin(vmem_kv *kv, uint32_t slot); // the slot's request has ended, or has given up its pages

int vmem__kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags);
int vmem__kv_order(vmem_kv *kv, const uint64_t *runs, size_t n, uint32_t keep);
int vmem__kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got);
int vmem__kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out);
void vmem__kv_runs_free(vmem_kv *kv); // the lists, which no call uses any more
int vmem__kv_check_runs(const vmem_kv *kv);

int vmem__kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t most_pages, uint32_t flags, uint64_t *freed);
// Evicts runs in their order until that many pages are freed or no more can be: how many were.
uint64_t vmem__kv_evict(vmem_kv *kv, uint64_t pages);
// For the worker: dooms the pages.
void vmem__kv_evict_later(vmem_kv *kv, uint64_t pages);
void vmem__kv_drop_all_runs(vmem_kv *kv); // and releases what is doomed, while there is no worker

// How many tokens a request could begin with, at most `most`, and leaves the runs in runs.found.
int vmem__kv_find_runs(vmem_kv *kv, const uint64_t *runs, uint64_t n, uint32_t most, uint32_t *tokens);
// Runs found whose pages the request begins with stay found and are not evicted. The others may be: windows
// have passed their rows, or a later run has the same ones.
void vmem__kv_protect_found(vmem_kv *kv, uint32_t tokens);
void vmem__kv_unprotect_found(vmem_kv *kv); // these can be evicted again
// Marks the pages of the runs held as seen more often than slots can: they do not become free with the slots that have them.
void vmem__kv_mark_found(vmem_kv *kv);
// Counts and marks the evictable pages of the runs found that a request which begins with them takes. Marked ones do not
// count again. *beside: the others that cannot be evicted until it has begun.
uint64_t vmem__kv_count_taken(vmem_kv *kv, uint32_t tokens, uint64_t *beside);
// That page of the group's first tensor, of a request that begins with so many tokens of the runs found; `stride`
// further on, that of the next tensor.
const vmem_page *vmem__kv_found_page(const vmem_kv *kv, uint32_t group, uint32_t tokens, uint32_t page,
                                     uint32_t *stride);

// ---- check.c --------------------------------------------------------------------------------------------------------

int vmem__kv_check_books(vmem_kv *kv); // VMEM_KV_CHECK: recounts everything

// ---- device.c -------------------------------------------------------------------------------------------------------

// A context's caches are linked. A cache that leaves them gives back what it preallocated.
void vmem__kv_register(vmem_kv *kv);
void vmem__kv_unregister(vmem_kv *kv);
// Takes device memory for that many pages in all; returns to the device what exceeds that many.
int vmem__kv_prealloc(vmem_kv *kv, uint64_t pages);
void vmem__kv_trim_prealloc(vmem_kv *kv, uint64_t pages);
void vmem__kv_set_preallocated(vmem_kv *kv, uint64_t pages); // without doing either
// Returns device memory that no page uses and no cache preallocated; wanted: and that nobody waits for. With no lock held.
void vmem__kv_trim(vmem_kv *kv, bool wanted);
// Pages whose memory the device has given and no page uses. *room, unless NULL: those that the context's budget has
// room for.
uint64_t vmem__kv_spare_memory(const vmem_kv *kv, uint64_t *room);
// Pages that the device could make now. Needs no lock.
uint64_t vmem__kv_device_pages(const vmem_kv *kv);
// True if the driver's last answer on the device's free memory is old. A call that shows statistics then asks before it
// takes a lock.
bool vmem__kv_device_due(const vmem_kv *kv);
// True if an answer may ask the driver: not all memory of the cache is preallocated, and the driver's last answer is old.
bool vmem__kv_asks_device(const vmem_kv *kv);
// The most pages that the cache can have: the budget, and what is free in its pool, as far as the device has memory. An
// answer of at least `want` may be capped there. The driver is asked only where its memory decides: its answer is reused
// for 100 ms, but never to refuse. The call may wait for the worker before an answer of less than `want`.
uint64_t vmem__kv_page_limit(vmem_kv *kv, uint64_t want);
// The same by the driver's answer of the last 100 ms, and by its last one, however old.
uint64_t vmem__kv_page_limit_lately(vmem_kv *kv);
uint64_t vmem__kv_page_limit_known(const vmem_kv *kv);
// True if so many more pages leave the context's other caches what they preallocated: pages come from there, too.
bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages);

// ---- gate.c ---------------------------------------------------------------------------------------------------------

void vmem__kv_summarise(vmem_kv *kv); // stats -> shown, and the published view
// The same of what nobody waits for: whoever asks for the statistics sums them up, if they are not published.
void vmem__kv_defer_summary(vmem_kv *kv);
void vmem__kv_begin_long_call(vmem_kv *kv); // before a public call goes to the library below
// How every public call begins and ends: enter takes api and state, and leave updates the statistics. A step enters by
// vmem__kv_enter_step and calls vmem__kv_begin_long_call if there is something to do.
int vmem__kv_enter(vmem_kv *kv);
int vmem__kv_enter_step(vmem_kv *kv);
int vmem__kv_leave(vmem_kv *kv, int rc);

int vmem__kv_publish(vmem_kv *kv, const char *path, const char *name);
void vmem__kv_unpublish(vmem_kv *kv);
// The budget that another process wrote into the view, until it is answered; 0: none. reason: of an error.
uint64_t vmem__kv_wanted_budget(const vmem_kv *kv);
void vmem__kv_answer_wanted(vmem_kv *kv, uint64_t bytes, int rc, uint32_t reason);

// ---- budget.c -------------------------------------------------------------------------------------------------------

// With api and state held, and without effect on a cache of no pool.
// With the requests that wait, the cache will have `want` pages: claims and asks for them, and lets the pool's thread
// take the device memory. part: if the member may not have so many, as many as it may.
void vmem__kv_announce(vmem_kv *kv, uint64_t want, bool part);
// For the worker: keeps memory plentiful from what is free in the pool.
void vmem__kv_claim_plenty(vmem_kv *kv);
// With no lock held: before a cache is taken apart.
void vmem__kv_pool_leave(vmem_kv *kv);

// Records shortages for vmem_kv_last_shortage.
void vmem__kv_clear_shortage(void);
int vmem__kv_short_of_budget(vmem_kv *kv, uint64_t want); // want: pages there would be
int vmem__kv_short_of_device(vmem_kv *kv, uint64_t pages);
int vmem__kv_short_of_mappings(vmem_kv *kv, uint64_t pages);
// A new request would raise the pinned pages to `want`, and the watermark keeps `back` pages of the limit for others.
int vmem__kv_short_beside(vmem_kv *kv, uint64_t want, uint64_t limit, uint64_t back);
int vmem__kv_short_of_slots(vmem_kv *kv);
void vmem__kv_count_shortage(vmem_kv *kv);                   // in the statistics, of a call that really needed them
const struct vmem_kv_shortage *vmem__kv_last_shortage(void); // of this thread

// Claims budget for `delta` more pinned pages, with so many new pages, from the pool if need be. -ENOMEM: records what is
// missing. A cache over its budget has room for what pins no more pages, even if that needs new pages: it gives up as
// many. But pages that are mapped and not pinned are no room: another call may take them back before the step.
int vmem__kv_claim_budget(vmem_kv *kv, int64_t delta, uint64_t pages);
// The same. -ENOMEM, too, if the device lacks the memory.
int vmem__kv_claim_memory(vmem_kv *kv, int64_t delta, uint64_t pages);

// ---- reclaim.c ------------------------------------------------------------------------------------------------------

// The fewest pages that the cache could have now if nothing is evicted, and nothing unmapped that would be mapped again
// at once.
uint64_t vmem__kv_min_pages(const vmem_kv *kv);
// The pages to take back next, best first: those of the slot that was freed first; then what active slots have ahead of
// need. want: pages asked for. stuck: also where the worker has failed to unmap. False: nothing.
struct kv_victim {
    uint32_t slot, group, lo, hi; // what the span is to be cut down to
};
bool vmem__kv_find_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, bool stuck, struct kv_victim *v);
bool vmem__kv_find_passed(const vmem_kv *kv, bool stuck, struct kv_victim *v); // only what a window has passed
// Takes pages back until `to` are left, if there are so many to take; evict: of runs, too. May wait for the worker.
int vmem__kv_reclaim_to(vmem_kv *kv, uint64_t to, bool evict);
// True if there is room for `pages` more without reclaiming any.
bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages);
// Makes it, after vmem__kv_claim_budget has said that there is memory: what is to go is pinned no more.
int vmem__kv_make_room(vmem_kv *kv, uint64_t pages);
// The device has refused pages: reclaims as many as it lacks, if there are that many.
int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages);
#define KV_TRIES 2
// vmem__kv_grow_map and vmem__kv_grow_commit. tries: 0, or KV_TRIES to take back what vmem__kv_claim_budget has found room for,
// and more where the device has less than the budget says, or no mappings.
int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l, int tries);
// That without vmem__kv_grow_commit. The pages are in kv->ledger.held.
int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l, int tries);

int vmem__kv_set_budget(vmem_kv *kv, uint64_t bytes);
// Gives up what a smaller budget left above itself. Callers that end requests call it, a step only after its plan.
void vmem__kv_shrink_to_budget(vmem_kv *kv);
int vmem__kv_reclaim_bytes(vmem_kv *kv, uint64_t bytes, uint64_t *freed);
// Takes over the budget that another process asked for, if one did.
void vmem__kv_apply_wanted_budget(vmem_kv *kv);

// ---- request.c ------------------------------------------------------------------------------------------------------

int vmem__kv_alloc(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot);
// All or none of the slots, which no kernel accesses, in one call of the core. As vmem__kv_cut_slots, for a lease's
// cache.
int vmem__kv_free_slots(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// The kernels up to this step have ended: requests that end after them end.
int vmem__kv_end_requests(vmem_kv *kv, uint64_t step);
int vmem__kv_retire_to(vmem_kv *kv, uint64_t step);

// ---- worker.c -------------------------------------------------------------------------------------------------------

int vmem__kv_worker_start(vmem_kv *kv);
void vmem__kv_worker_stop(vmem_kv *kv);

// ---- step.c ---------------------------------------------------------------------------------------------------------

// Plans a step in which this slot alone takes part: -EINVAL, if its window has given up rows that it reads. *delta: by how
// many pages the step would raise kv_ledger.pinned_pages, the missing ones included.
int vmem__kv_plan_one(vmem_kv *kv, uint32_t slot, uint32_t tokens, int64_t *delta);

#endif
