// The KV-cache manager: the state of a cache, and what its files offer each other. A file calls those above it in this
// header alone; `make lint` follows the calls.
//
// Tensors of equal row size, length and window form a group. Their mapped pages always cover the same part of a slot,
// so all decisions are made once per (slot, group) instead of per tensor. The unit of bookkeeping is the span: the
// mapped part [lo, hi) of a slot in the tensors of a group, in pages.
//
// Locks, in this order: api serialises the public calls; state protects every field below from the background worker.
// The worker drops state while it calls core, and marks the slot busy instead. A call that needs a busy slot waits for
// it (vmem__kv_wait_slot). A public call keeps state while it calls core.
//
// The room puts pages behind requests, each in a slot of contiguous addresses, and shares those of equal prefixes. It
// calls core by vmem.h and memory.h, and the pool by member.h. Begin with vmem_kv.h, then struct kv_span below and
// do_step in step.c.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM__KV_H
#define VMEM__KV_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "core/memory.h"
#include "pool/member.h"
#include "vmem_kv.h"

#define KV_BLOCK VMEM_PAGE_2M // bytes that one large page-table entry maps

// Tensors whose mapped pages always cover the same part of a slot.
struct kv_group {
    uint64_t row_bytes;              // a token's bytes in one tensor
    uint32_t max_tokens, window;     // rows of a slot; the last rows that a token reads, 0: all
    uint32_t n;                      // number of tensors
    uint32_t first;                  // index of the first in vmem_kv.addrs; the others follow it
    uint64_t slot_rows, slot_stride; // a slot's addresses in one tensor: in rows, and in bytes
    uint32_t slot_pages;             // the most pages of a slot in one tensor
    uint64_t table;                  // index in vmem_kv.pages of (slot 0, first tensor, page 0)
};

// A state beside those of enum vmem_kv_slot_state: the request has been freed, and its kernels may be running. Callers
// see such a slot as free (struct vmem_kv_slot_info has the step in `after`).
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
// The pinned part begins at in_flight.lo, and ends at in_flight.hi or behind it, where a 2 MiB entry maps a block.
//
// Functions that give an end of pages:
//   vmem__kv_need_hi     of those that rows up to a length lie in, whether or not they are mapped
//   kv_end_of            of those that cannot go without the page before a given one
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
    // A step to any length in [tokens, same_pages_until] needs the last step's pages; 0: unknown.
    uint32_t same_pages_until;
    uint32_t last_step; // the last step in which the slot took part; a new slot has the step before its allocation
    uint8_t state;      // enum vmem_kv_slot_state or KV_ENDING; written by vmem__kv_set_state alone
    bool fresh;         // no step since it was allocated or swapped in: no kernel accesses it
    // Both until the slot's next step:
    bool skip;    // the worker failed to back pages here, and does not try again
    bool stuck;   // the worker failed to unmap pages here, and tries again only when it is otherwise idle
    bool busy;    // the worker is changing it
    bool stale;   // some span has stale mappings
    uint8_t list; // cached, from state and backed: the list in vmem_kv.lists that has it
};

// Each slot is in one list. A free slot's list is the number of bits of `backed`, so that slots of one list have about
// equally many rows. Active slots have a list, and all other slots have one.
enum { KV_FREE_LISTS = 32, KV_LIST_ACTIVE = KV_FREE_LISTS, KV_LIST_OTHERS, KV_LISTS };
struct kv_idle {
    uint64_t freed_seq; // vmem_kv.clock when the slot was freed; 0: its pages are the first to be taken back
    uint64_t ends;      // of a KV_ENDING slot: the step whose kernels must end
};

// The pages that a step needs in the tensors of a group of a slot.
struct kv_want {
    uint32_t slot, group;
    struct kv_range step;    // pages that its kernels access
    struct kv_range touched; // these, and those that kernels in flight access
    bool extends;            // pages may be missing
};
// A planned step: the pages that it needs of each slot that needs other pages than in the last step.
struct kv_plan {
    struct kv_want *wants; // slot by slot, all groups of each
    uint64_t n;            // number of wants
    uint64_t missing;      // pages to be mapped
    uint32_t *changed;     // the slots that have wants
    bool extends;          // some want extends its slot
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
// pins is above 0 while it is pinned. Only runs that can be evicted are listed, the oldest first. A run can be dropped in
// either state: requests that pin it keep their pages. Where listed runs do not suffice, one that is pinned is evicted
// if that frees pages which its requests no longer have. Once it is evicted or dropped, its number names nothing.
struct kv_run {
    uint64_t id; // see kv_run_id(); 0: not in use
    uint32_t first, tokens;
    uint32_t pins;         // running requests that began with the run or wrote it
    uint32_t newer, older; // neighbours in the order of use, while no request pins the run
    uint32_t next;         // the next unused entry, in an unused entry
    bool keep;             // the run is never evicted
    bool report;           // vmem_kv_evicted names the run
    bool is_protected;     // the run is not evicted now, because a request is being attached to it
    struct kv_rows *rows;  // [group]
};

// A shared row: the pages with one page number in the tensors of a group, and who holds them. Exists for rows that a
// run holds or that several slots have mapped.
struct kv_shared_row {
    vmem_page page;          // the page of the group's first tensor; 0: the entry is empty
    uint32_t slots, runs;    // holders: slots that have mapped the row, runs that contain it
    uint32_t n;              // pages: one for each tensor of the group
    uint32_t pinning_slots;  // of the slots, those with the row in the pinned part of their span
    uint32_t evictable_runs; // of the runs, those that can be evicted
    uint32_t seen;           // how often the call with number `mark` has met the row
    uint64_t mark;           // vmem_kv.mark of the last call that met the row
};
struct kv_shared_rows {
    struct kv_shared_row *entries;
    uint64_t size, used; // entries: all, a power of two; not empty
    uint64_t shared;     // cached: pages of rows with several holders
    uint64_t runs_only;  // cached: pages of rows that no slot holds
    uint64_t evictable;  // cached: of runs_only, the pages that evictions can free
};

// Parts of spans to back. vmem__kv_grow_to lists them, vmem__kv_grow_map creates and maps their pages, all or none, and
// vmem__kv_grow_commit enters them in the spans. The pages of a part are created and mapped alike.
struct kv_part {
    uint32_t slot, group, from, to; // pages [from, to) of the slot
    bool joins;                     // page `from - 1` also belongs to the slot
    bool coarse;                    // the part is whole blocks, which 2 MiB entries may map
    const vmem_page *others;        // existing pages of the first tensor; NULL: the pages are to be created
    uint32_t stride;                // the distance in `others` from one tensor's page to the next tensor's
};
struct kv_grow {
    uint64_t total, others;    // pages to be created; existing pages to be mapped
    uint64_t n_parts, n_pages; // entries of `parts`; created pages
    uint64_t n_coarse; // the first entries of `maps`; they have a map call of their own, which may use 2 MiB entries
    uint64_t cap_parts, cap_pages, cap_maps, cap_stretches;
    struct kv_part *parts;
    vmem_page *pages;
    struct vmem_map_op *maps;
    struct vmem__stretch *stretches;
    enum { KV_GROW_LISTS, KV_GROW_CREATE, KV_GROW_MAP } at; // how far a failed attempt came
};
// A part of a span to release: the front, the tail, or both.
struct kv_cut {
    uint32_t slot, group;
    struct kv_span before; // the span before the cut
    uint32_t lo, hi;       // the pages that remain; equal: none
    bool shared;           // some row that is cut off has other holders
    struct vmem_range *ops;
    uint64_t n_ops, cap_ops;
    vmem_page *pages; // pages to release: no other slot or run holds them
    uint64_t n_pages, cap_pages;
};

// ---- the parts of a cache ---------------------------------------------------------------------------------------------

// The cache's numbers of pages.
struct kv_ledger {
    uint64_t budget;          // the most pages that may exist
    uint64_t held;            // existing pages, pending ones included
    uint64_t pinned_pages;    // of `held`, pages that no call can take back. Only shared.c and span.c change it
    uint64_t pending;         // of `held`, pages that the worker is mapping, unmapping or releasing; never pinned
    uint64_t spanned;         // pages in all spans, each as often as it is in one. vmem__kv_span_set counts them
    struct vmem__ahead ahead; // for the context's other caches; `used`: the pages held after the last call or job
    uint64_t ceiling;         // VMEM_KV_CHECK: the budget, or the pages that existed when the budget shrank
    bool disturbed;           // VMEM_KV_CHECK: a job of the worker changed pinned_pages
};

// A cache's membership in a pool.
struct kv_membership {
    struct vmem__member *member; // NULL: the cache is in no pool
    struct vmem__member *left;   // the member after it has left the pool, until the cache is destroyed
    bool lowering;               // other members wait for pages beyond lower_to: each page that goes lowers the budget
    uint64_t lower_to;           // pages: the budget to which the cache shrinks while it is `lowering`
    uint64_t portion;            // pages that the worker gives back in one call while others wait for them
    uint64_t pinned_pages;       // kv_ledger.pinned_pages after the last call
};

// Kernels that may be in flight. A step's number has a tag of the cache from bit KV_STEP_TAG on, so that no cache takes
// another's step for its own. Below the tag is the count of steps. It begins above 0, so that the `steps_in_flight`
// steps before the first have numbers, too.
#define KV_STEP_TAG 40u
#define KV_STEP_TAGS ((UINT64_C(1) << (63 - KV_STEP_TAG)) - 1)
#define KV_STEP_NONE (UINT64_C(1) << 20) // the count before the first step
struct kv_fences {
    uint64_t step, retired; // numbers of the last step, and of the last step whose kernels have ended
    struct kv_range *past;  // [slot][group][steps_in_flight - 1]: the steps before the last, the newest first
};

// The runs that a request pins, in the order of their rows.
struct kv_pin {
    uint64_t id;    // the run's
    uint32_t first; // the run's first row
};
struct kv_pins {
    struct kv_pin *list;
    uint64_t n, cap;
};
struct kv_runs {
    struct kv_run *list;
    uint64_t cap;
    uint64_t pages;          // of all runs; a page of several runs counts once for each
    uint32_t used;           // entries that were ever in use: list[0] to list[used - 1]
    uint32_t n;              // entries in use
    uint32_t reported;       // of these, entries with `report`
    uint32_t unused;         // the first entry that was in use and is not; its `next` leads to the others
    uint64_t tag;            // the cache's part of its runs' numbers
    uint32_t generation;     // the last run's part of its number
    uint32_t newest, oldest; // of the listed runs
    struct kv_pins *pins;    // [slot]
    uint64_t *gone;          // numbers of evicted runs with `report`, the oldest first
    uint64_t n_gone, cap_gone;
    uint32_t *found; // the runs that the current call has looked up
    uint64_t cap_found;
    uint32_t n_found;
};

// Doomed pages: no run and no slot holds them any more, and the worker will release them.
struct kv_doomed {
    vmem_page *pages;
    uint64_t n, cap;
};

#define KV_SCRATCH 64u // pages

// Calls and the worker take turns.
struct kv_turn {
    pthread_cond_t work, done;
    bool has_worker; // false: calls do the worker's part themselves
    bool stop;       // the worker is to end
    bool due;        // there may be work
    bool working;    // the worker does a job now
    bool stuck;      // some slot is `stuck`
    bool unmapping;  // the worker is unmapping or releasing pages that other slots may hold or release
    bool cutting;    // the worker is giving up pages of one slot; a stale mapping of another may still lead to them
    uint32_t pauses; // calls that have paused the worker and not resumed it
};

struct kv_worker {
    pthread_t thread;
    uint32_t idle_ms;
    bool released_all; // the cache is idle, and the worker has released all pages that nobody needs
    struct kv_grow grow;
    struct kv_cut cut;
};

struct kv_gate {
    pthread_mutex_t api, state;
    uint64_t calls; // public calls that have ended
    bool called;    // a public call is in progress; it may have dropped `state` to wait
};

// The statistics that other processes see.
struct kv_view {
    struct vmem_kv_view *map; // NULL: not published
    char *path;
    int fd;
    uint64_t updated; // the time of the last update, in ns
    bool may_lag;     // the public call in progress need not update it
};

struct vmem_kv {
    // Constant once the cache has been created, but for `flags` (joining a pool sets VMEM_KV_LAZY) and `owned`.
    vmem_context *ctx;
    const _Atomic uint64_t *absent; // of the context's addresses: a failed call left them without their pages
    const unsigned char *owned;     // reads 1; reads 0 in a forked child, and once the cache is being closed
    pid_t pid;
    uint32_t flags, n_tensors, n_groups, n_slots, max_tokens, tile_rows;
    uint32_t ahead_tokens, ahead_min, eager_tokens, reclaim_percent, steps_in_flight;
    uint32_t create_flags; // for vMemCreate
    uint64_t page_size;
    uint32_t page_shift;  // log2 of page_size
    uint32_t block_pages; // pages in KV_BLOCK; 1 if a page is as large
    bool windows;         // some group has a window
    uint64_t *addrs;      // tensors, group after group
    uint32_t *order;      // tensor as the caller counts -> index in addrs
    struct kv_group *groups;
    vmem_page *pages; // see kv_table(); address space, used where there are pages
    uint64_t pages_bytes;

    struct kv_slot *slots;
    // Sets of slots: a bit for each slot. `stale_slots` lies behind the lists, in the same memory.
    uint64_t *lists[KV_LISTS], *stale_slots;
    uint32_t in_state[KV_STATES]; // cached: slots in each state
    struct kv_idle *idle;         // [slot]
    struct kv_span *spans;        // [slot][group]
    // [slot][group]: stale mappings. When a slot is freed, it no longer holds its shared pages, which lie before its
    // own. Their mappings stay until the worker or a call unmaps them.
    struct kv_range *stale;
    uint64_t clock; // counts the slots that are freed
    struct kv_shared_rows shared;
    uint64_t mark; // number of the last call that marked shared rows
    struct kv_ledger ledger;
    struct kv_fences fence;
    struct kv_plan plan; // of the public call in progress
    struct kv_gate gate;
    struct kv_membership membership;
    struct kv_view view;
    uint64_t scratch; // reserved addresses, at least a page for each tensor, to access pages that no slot has mapped
    struct vmem_kv_stats stats; // the counters are up to date, and the gauges after vmem__kv_count
    struct kv_turn turn;

    // Most steps read nothing from here on.
    struct kv_grow grow; // of public calls
    struct kv_cut cut;
    struct kv_runs runs;
    struct kv_doomed doomed;
    struct kv_worker worker;
    bool closed; // vmem_kv_close
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

// Pages that could be added without reclaiming any.
static inline uint64_t kv_unused(const vmem_kv *kv) { return sat_sub(kv->ledger.budget, kv->ledger.held); }

// Memory is scarce if fewer pages than this are unused, and plentiful if at least twice as many are.
static inline uint64_t kv_low(const vmem_kv *kv) { return kv->ledger.budget * kv->reclaim_percent / 100; }
// False, too, while other members have a claim to the memory.
static inline bool kv_plentiful(const vmem_kv *kv)
{
    return !kv->membership.lowering && kv_unused(kv) >= 2 * kv_low(kv);
}

// ---- turn.c ---------------------------------------------------------------------------------------------------------

// Points at which tests delay a thread: the worker has asked the device for its free memory; it has dropped the lock and is
// about to call core; a call is about to wait for the worker, or has waited; the worker has checked for idleness. The hook
// is NULL outside of tests.
enum vmem__kv_point { KV_WORKER_ASKED, KV_WORKER_UNLOCKED, KV_CALL_WAITS, KV_CALL_WAITED, KV_WORKER_IDLE };
extern void (*_Atomic vmem__kv_hook)(enum vmem__kv_point point);
static inline void kv_at(enum vmem__kv_point point)
{
    void (*const hook)(enum vmem__kv_point) = vmem__kv_hook; // once: a test may take it away meanwhile
    if (hook)
        hook(point);
}
void vmem__kv_worker_wake(vmem_kv *kv);
void vmem__kv_wait_slot(vmem_kv *kv, uint32_t slot);
// These wait for the worker: until it has nothing left to do, or has ended its job. It begins no other job before the
// caller drops `state`.
void vmem__kv_wait_idle(vmem_kv *kv);
void vmem__kv_wait_job(vmem_kv *kv);
// Waits until the worker unmaps and releases no page that others may hold. Calls that map, unmap or release such pages
// wait here first.
void vmem__kv_wait_unmapping(vmem_kv *kv);
void vmem__kv_wait_cutting(vmem_kv *kv); // waits until the worker unmaps nothing at all; for calls on stale mappings
// Between these two calls the worker does nothing. The caller holds `state`, which pause may drop for a moment.
void vmem__kv_worker_pause(vmem_kv *kv);
void vmem__kv_worker_resume(vmem_kv *kv);
// -EPERM: the caller is a child of the process that created the cache; -EINVAL: kv is NULL or closed.
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
// Forgets the slot's earlier steps. The caller knows that no kernel accesses the slot.
void vmem__kv_clear_history(vmem_kv *kv, uint32_t slot);
// The last step whose kernels, and those of all steps before it, have ended.
uint64_t vmem__kv_last_ended_step(const vmem_kv *kv);
int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step); // -EINVAL: neither 0 nor a step that this cache has made
// Steps since the slot took part in one, or was allocated.
static inline uint32_t kv_absent(const vmem_kv *kv, uint32_t slot)
{
    return (uint32_t)kv->fence.step - kv->slots[slot].last_step;
}

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
// Pages of a slot that shares its first `tokens` rows: it shares pages [lo, full), and [full, hi) are its own. The
// first of its own begins with `part` bytes of shared rows.
struct kv_split {
    uint32_t lo, full, hi;
    uint64_t part;
};
struct kv_split vmem__kv_split(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens);
// Divides the tensors into groups, and makes the tables of their pages.
int vmem__kv_make_groups(vmem_kv *kv, const struct vmem_kv_config *c);

// ---- shared.c -------------------------------------------------------------------------------------------------------

struct kv_shared_row *vmem__kv_shared_find(const struct kv_shared_rows *r, vmem_page page);
// The entry of a slot's row; NULL: the row is the slot's own.
struct kv_shared_row *vmem__kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page);
// How many rows of a span others hold as well.
uint32_t vmem__kv_span_shared(const vmem_kv *kv, uint32_t slot, uint32_t group);
// Rows of a slot below this are, at least partly, in pages that others hold, too. First, rows at the end of that part
// that have no other holder any more become the slot's own.
uint32_t vmem__kv_shared_tokens(const vmem_kv *kv, uint32_t slot);
// Counts the rows of a span's pinned part that only this slot pins. Slots for which the call was made since
// vmem_kv.mark was raised count as gone: so a caller adds up the pages that become free when several slots end.
uint64_t vmem__kv_rows_left(vmem_kv *kv, uint32_t slot, uint32_t group);
// The entry of a slot's row, made if there was none; NULL: out of memory.
struct kv_shared_row *vmem__kv_row_get(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page);
// Makes an entry, with one slot as its holder.
struct kv_shared_row *vmem__kv_shared_new(struct kv_shared_rows *r, vmem_page page, uint32_t n);
int vmem__kv_shared_reserve(struct kv_shared_rows *r, uint64_t more); // makes room for `more` new entries
// Adds holders, counted as in struct kv_shared_row. The entry is removed once no run and at most one slot holds the
// row, which is that slot's own then.
struct kv_holders {
    int slots, pinning_slots, runs, evictable_runs;
};
void vmem__kv_change_holders(vmem_kv *kv, struct kv_shared_row *ref, struct kv_holders by);
// A slot gives up rows [from, to). They lie before or behind the pinned part of its span, or contain its beginning.
void vmem__kv_rows_leave(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);
// How often kv_row_see has met the row since vmem_kv.mark was raised.
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

// ---- slot.c ---------------------------------------------------------------------------------------------------------

#define KV_NO_SLOT UINT32_MAX
int vmem__kv_make_sets(vmem_kv *kv); // all slots are free, and have no page
void vmem__kv_set_add(uint64_t *set, uint32_t slot);
void vmem__kv_set_remove(uint64_t *set, uint32_t slot);
// The first slot of the set that is not below `from`; KV_NO_SLOT: there is none.
uint32_t vmem__kv_set_next(const vmem_kv *kv, const uint64_t *set, uint32_t from);
static inline uint8_t kv_list_of(const struct kv_slot *s)
{
    if (s->state == VMEM_KV_FREE)
        return (uint8_t)(s->backed ? 32 - __builtin_clz(s->backed) : 0);
    return s->state == VMEM_KV_ACTIVE ? KV_LIST_ACTIVE : KV_LIST_OTHERS;
}
static inline uint32_t kv_next_active(const vmem_kv *kv, uint32_t from)
{
    return vmem__kv_set_next(kv, kv->lists[KV_LIST_ACTIVE], from);
}
static inline uint32_t kv_next_used(const vmem_kv *kv, uint32_t from) // the next slot that is not free
{
    const uint32_t active = kv_next_active(kv, from), other = vmem__kv_set_next(kv, kv->lists[KV_LIST_OTHERS], from);
    return MIN(active, other);
}

// The part of a span that no call can take back: the pages that kernels access, and those that cannot go without them.
// Empty for a slot that no kernel accesses.
struct kv_range vmem__kv_pinned_part(const vmem_kv *kv, uint32_t slot, uint32_t group);
// The end of the pages that cannot go without page `hi - 1`. With `running`, while kernels may use the slot, these are the
// rest of a block that a 2 MiB entry maps.
static inline uint32_t kv_end_of(const struct kv_span *s, uint32_t hi, bool running)
{
    return MIN(running ? MAX(hi, s->coarse_hi) : hi, s->hi);
}
// The pages of a span that kernels access, and those that cannot go without them; running: as for kv_end_of.
static inline struct kv_range kv_in_use(const vmem_kv *kv, uint32_t slot, uint32_t group, bool running)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    return (struct kv_range){s->in_flight.lo, kv_end_of(s, s->in_flight.hi, running)};
}
// The first page, at or after `from`, of the part that can be cut off the end of a span.
uint32_t vmem__kv_tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from);
// Sets the pinned part, and changes the ledger's pinned_pages by the pages that enter or leave it. They must be in the
// slot's table, and their shared rows must have entries: a row leaves the pinned part before the slot stops holding it.
void vmem__kv_set_pinned(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to);
// By how many pages vmem__kv_set_pinned would raise pinned_pages. Shared rows that leave count as if they stayed,
// because it depends on their other holders whether their pages are still pinned.
int64_t vmem__kv_pinned_delta(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to);
// Replaces a span, and updates pinned_pages and the slot's `backed`.
void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now);
// Updates the pinned parts after a change of the slot's state or of the pages that kernels access.
void vmem__kv_update_pinned(vmem_kv *kv, uint32_t slot);

const char *vmem__kv_state_name(uint8_t state);
void vmem__kv_set_state(vmem_kv *kv, uint32_t slot, uint8_t state);
// Checks the number and state (a set of 1 << enum vmem_kv_slot_state) of a slot and waits until it is not busy.
int vmem__kv_use_slot(vmem_kv *kv, uint32_t slot, uint32_t states);
// As vmem__kv_use_slot, without waiting for the worker's work on the slot.
int vmem__kv_check_slot(const vmem_kv *kv, uint32_t slot, uint32_t states);
// The best free slot for a request of so many tokens, the first prefix_tokens of which a prefix provides. KV_NO_SLOT:
// none is free.
uint32_t vmem__kv_choose_slot(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens);

// ---- pages.c --------------------------------------------------------------------------------------------------------

// Grows an array so that it has room for n elements of `size` bytes.
int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size);

// Plans to back those of pages [from, to) that the span does not have. The span is empty, or begins at `to` or before.
// 2 MiB entries may map blocks that end at coarse_hi or before.
int vmem__kv_grow_to(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t from, uint32_t to,
                     uint32_t coarse_hi);
// Plans to map a row that others hold. pages: the first tensor's page; the next tensor's is `stride` further on. The
// caller adds the row to the span.
int vmem__kv_grow_share(vmem_kv *kv, struct kv_grow *l, uint32_t slot, uint32_t group, uint32_t row,
                        const vmem_page *pages, uint32_t stride);
// Creates and maps the planned pages, all or none; needs no lock. The caller has added l->total to kv->ledger.held.
int vmem__kv_grow_map(vmem_kv *kv, struct kv_grow *l);
// Adds the new pages to the spans.
void vmem__kv_grow_commit(vmem_kv *kv, struct kv_grow *l);
// Unmaps and releases what vmem__kv_grow_map created.
void vmem__kv_grow_undo(vmem_kv *kv, struct kv_grow *l);
void vmem__kv_grow_reset(struct kv_grow *l);

// Copies the first `bytes` bytes of a slot's page in each tensor of the group to `pages` (to_scratch), or from them.
// They need not be mapped anywhere.
int vmem__kv_copy_pages(vmem_kv *kv, const struct kv_group *g, const vmem_page *pages, uint64_t stride, bool to_scratch,
                        uint32_t slot, uint32_t page, uint64_t bytes);

// Cuts a span down to [lo, hi) in three calls. begin changes the span. unmap, which needs no lock, unmaps and releases
// the pages. end updates the ledger, or restores the span if unmap has failed. begin returns -EBUSY if a row that is
// cut off has other holders. The worker drops the lock between the calls, so it must not change holders.
int vmem__kv_cut_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi);
int vmem__kv_cut_unmap(vmem_kv *kv, struct kv_cut *c);
void vmem__kv_cut_end(vmem_kv *kv, struct kv_cut *c, int rc);
int vmem__kv_cut_now(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi); // all at once, any rows
// Cuts off all pages of a slot, which no kernel accesses, by one call of core: all or none.
int vmem__kv_cut_slot(vmem_kv *kv, uint32_t slot);
// Releases shared pages that a window has passed, so that the number of available pages never depends on the worker.
// True if passed pages remain, for the worker or the next step.
bool vmem__kv_pass_windows(vmem_kv *kv, uint32_t slot);
// Ends a request: its own pages stay in the span, shared ones are released, and their mappings become stale. After
// vmem__kv_shared_tokens, so that the last row below shared_hi is shared.
int vmem__kv_park(vmem_kv *kv, uint32_t slot, uint32_t group);
// The span no longer holds pages [lo, hi), but they stay mapped there.
void vmem__kv_stale_set(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi);
// Unmap a slot's stale mappings. begin lists them, vmem__kv_cut_unmap unmaps them, end clears the marks; now does all.
int vmem__kv_stale_begin(vmem_kv *kv, struct kv_cut *c, uint32_t slot);
void vmem__kv_stale_end(vmem_kv *kv, uint32_t slot);
int vmem__kv_stale_now(vmem_kv *kv, uint32_t slot);
// Releases the doomed pages. The worker is held, or there is none.
void vmem__kv_release_doomed(vmem_kv *kv);
void vmem__kv_release_soon(vmem_kv *kv); // the worker releases them, or this call if there is none

// ---- runs.c ---------------------------------------------------------------------------------------------------------

#define KV_NO_RUN UINT32_MAX

// A run's number: 7 bits for the cache, so that a run of another one is told from one that has gone; a generation of
// 32; and its place in the list + 1. It is a positive int64_t, too.
#define KV_RUN_TAGS 127u
#define KV_RUN_GENERATION 24u // the first bit
#define KV_RUN_TAG 56u
#define KV_RUNS_MAX ((1u << KV_RUN_GENERATION) - 2)
static inline uint64_t kv_run_id(uint64_t tag, uint32_t generation, uint32_t run)
{
    return tag << KV_RUN_TAG | (uint64_t)generation << KV_RUN_GENERATION | (run + 1);
}
static inline uint32_t kv_run_place(uint64_t id) { return (uint32_t)(id & ((1u << KV_RUN_GENERATION) - 1)) - 1; }

// -EINVAL: some number names a run of another cache, which may be gone. 0 names no run and is accepted.
int vmem__kv_check_ids(const struct kv_runs *runs, const uint64_t *ids, uint64_t n);
// Pins the run until the slot's request ends. Fails only without memory for the slot's list.
int vmem__kv_pin(vmem_kv *kv, uint32_t slot, uint32_t run);
void vmem__kv_unpin(vmem_kv *kv, uint32_t slot); // the slot's request has ended, or has given up its pages

int vmem__kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags);
int vmem__kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got);
int vmem__kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out);
void vmem__kv_runs_free(vmem_kv *kv); // frees the lists, which no call uses any more

int vmem__kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t *freed);
// Evicts runs in their order until `pages` pages are freed or no more can be, and returns the number freed.
uint64_t vmem__kv_evict(vmem_kv *kv, uint64_t pages);
// The same for the worker: the pages are doomed, not released.
void vmem__kv_evict_later(vmem_kv *kv, uint64_t pages);
void vmem__kv_drop_all_runs(vmem_kv *kv); // and releases what is doomed, while there is no worker

// *tokens: with how many tokens of these runs, at most `most`, a request can begin. The runs stay in runs.found.
int vmem__kv_find_runs(vmem_kv *kv, const uint64_t *runs, uint64_t n, uint32_t most, uint32_t *tokens);
// Protects those runs in runs.found whose pages the request will begin with. Removes the others from the list: windows
// have passed their rows, or a later run has the same ones.
void vmem__kv_protect_found(vmem_kv *kv, uint32_t tokens);
void vmem__kv_unprotect_found(vmem_kv *kv);
// Marks the rows of runs.found, so that vmem__kv_rows_left does not count them: the runs keep them when slots end.
void vmem__kv_mark_found(vmem_kv *kv);
// Counts the evictable pages of runs.found: none of them can be evicted before the request has begun.
uint64_t vmem__kv_count_found(vmem_kv *kv);
// The page number `page` of a request that begins with `tokens` tokens of runs.found, in the group's first tensor. The
// next tensor's is `stride` further on.
const vmem_page *vmem__kv_found_page(const vmem_kv *kv, uint32_t group, uint32_t tokens, uint32_t page,
                                     uint32_t *stride);

// ---- check.c --------------------------------------------------------------------------------------------------------

int vmem__kv_check_books(vmem_kv *kv); // VMEM_KV_CHECK: recounts everything

// ---- budget.c -------------------------------------------------------------------------------------------------------

// Add a cache to its context's list, or remove it. A cache that is removed gives back the memory that it preallocated.
void vmem__kv_register(vmem_kv *kv);
void vmem__kv_unregister(vmem_kv *kv);
// Takes device memory for that many pages in all, held ones included; returns the memory beyond that many.
int vmem__kv_prealloc(vmem_kv *kv, uint64_t pages);
void vmem__kv_trim_prealloc(vmem_kv *kv, uint64_t pages);
// How many pages could be created now, by the driver's word on its free memory. Needs no lock.
uint64_t vmem__kv_device_pages(const vmem_kv *kv);
// Asks for it if the driver's last answer is old, so that a call with a lock need not. Needs no lock.
void vmem__kv_ask_device(const vmem_kv *kv);
// The most pages that the cache can have: the budget, and what is free in its pool, as far as the device has memory. An
// answer of at least `want` may be capped there. The driver is asked only where its memory decides: its answer is
// reused for 100 ms, but never to refuse. The call may wait for the worker before an answer of less than `want`.
uint64_t vmem__kv_page_limit(vmem_kv *kv, uint64_t want);
// The same limit by its last answer.
uint64_t vmem__kv_page_limit_known(const vmem_kv *kv);
// True if so many more pages can be created without memory that the context's other caches have preallocated.
bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages);

// These need api and state, and do nothing for a cache that is in no pool.
// For the worker: claims free budget of the pool, so that memory stays plentiful.
void vmem__kv_claim_plenty(vmem_kv *kv);
// Leaves the pool, before the cache is destroyed. No lock is held.
void vmem__kv_pool_leave(vmem_kv *kv);

// Records shortages for vmem_kv_last_shortage.
void vmem__kv_clear_shortage(void);
int vmem__kv_short_of_budget(vmem_kv *kv, uint64_t want); // want: pages that would be pinned, or would exist
int vmem__kv_short_of_device(vmem_kv *kv, uint64_t pages);
int vmem__kv_short_of_mappings(vmem_kv *kv, uint64_t pages);
int vmem__kv_short_of_slots(vmem_kv *kv);
void vmem__kv_count_shortage(vmem_kv *kv); // counts it in the statistics; dry calls do not

// Checks that the budget covers `delta` more pinned pages, `pages` of which are new. If it does not, claims from the
// pool. -ENOMEM: a shortage is recorded. A call that pins no additional pages succeeds even over a reduced budget:
// other pages go for its new ones. A page that is mapped but not pinned still counts as one to be found, because
// another call may take it back before the step.
int vmem__kv_claim_budget(vmem_kv *kv, int64_t delta, uint64_t pages);
// The same, and checks that the device has the memory.
int vmem__kv_claim_memory(vmem_kv *kv, int64_t delta, uint64_t pages);

// ---- gate.c ---------------------------------------------------------------------------------------------------------

void vmem__kv_count(vmem_kv *kv); // brings the gauges in kv->stats up to date
// Says what the cache holds: to the context's other caches, and in the published view if there is one.
void vmem__kv_tell(vmem_kv *kv);
// How every public call begins and ends: enter takes api and state, and leave tells what has changed. After
// vmem__kv_enter_step, for calls that come often and change little, the published view may lag by VIEW_NS.
int vmem__kv_enter(vmem_kv *kv);
int vmem__kv_enter_step(vmem_kv *kv);
int vmem__kv_leave(vmem_kv *kv, int rc);

// ---- reclaim.c ------------------------------------------------------------------------------------------------------

// The fewest pages to which the cache can shrink now without an eviction, and without pages that the worker would map
// again at once.
uint64_t vmem__kv_min_pages(const vmem_kv *kv);
// Finds pages to take back, in this order: pages that windows have passed; pages of the slot that was freed first;
// pages that active slots have ahead. want: how many are asked for. spare_ahead: leaves pages that the worker would map
// again at once. stuck: also considers slots where the worker has failed to unmap. False: there are none.
struct kv_victim {
    uint32_t slot, group, lo, hi; // the span is to be cut down to [lo, hi)
};
bool vmem__kv_find_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, bool stuck, struct kv_victim *v);
bool vmem__kv_find_passed(const vmem_kv *kv, bool stuck, struct kv_victim *v); // only what a window has passed
// Takes pages back until only `to` exist or no more can be taken. evict: evicts runs, too. May wait for the worker.
int vmem__kv_reclaim_to(vmem_kv *kv, uint64_t to, bool evict);
// True if there is room for `pages` more without reclaiming any.
bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages);
// Makes that room. vmem__kv_claim_budget has found that there is memory, and the caller has unpinned what may go.
int vmem__kv_make_room(vmem_kv *kv, uint64_t pages);
// The device has refused pages: reclaims as many as it lacks, if there are that many.
int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages);
#define KV_TRIES 2
// Calls vmem__kv_grow_map and vmem__kv_grow_commit. tries: 0 takes nothing back. With KV_TRIES, the call makes room
// first, and takes back more if the device has less memory than the budget says, or the system no mappings.
int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l, int tries);
// The same without vmem__kv_grow_commit. The pages count in kv->ledger.held.
int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l, int tries);

// Takes pages back that exceed the budget. Calls that end requests call it; a step does so only after its plan.
void vmem__kv_shrink_to_budget(vmem_kv *kv);

// ---- request.c ------------------------------------------------------------------------------------------------------

// Frees the slots that wait for kernels of this step or earlier ones, which have ended.
int vmem__kv_end_requests(vmem_kv *kv, uint64_t step);

// ---- worker.c -------------------------------------------------------------------------------------------------------

int vmem__kv_worker_start(vmem_kv *kv);
void vmem__kv_worker_stop(vmem_kv *kv);

#endif
