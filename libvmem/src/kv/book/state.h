// The state of a KV cache.
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
#ifndef VMEM_KV_STATE_H
#define VMEM_KV_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

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

// A state beside those of enum vmem_kv_slot_state. For callers, such slots are free: see struct vmem_kv_slot_info, after.
enum { KV_ENDING = VMEM_KV_SWAPPED + 1, KV_STATES };

// Page numbers; equal: none.
struct kv_range {
    uint32_t lo, hi;
};

// Always lo <= keep.lo <= need.lo <= need.hi <= keep.hi <= hi.
struct kv_span {
    uint32_t lo, hi;
    struct kv_range need; // what the slot's last step needed
    struct kv_range keep; // what kernels in flight access, of the last steps and of the next
    struct kv_range fix;  // what no call could take back: the part that kv_ledger.fixed counts
    uint32_t shared_hi;   // pages from here on have no other holder
    uint32_t coarse_hi;   // 2 MiB blocks that end above this are mapped page by page, pages behind it one by one
};

// Every step reads these structures of all slots, usually from memory that is no longer in the CPU's caches. They are
// therefore small, and fields that only concern slots without a running request are in struct kv_idle.
struct kv_slot {
    uint32_t tokens;
    uint32_t shared_tokens;
    uint32_t backed; // tokens up to which a step has nothing to map
    uint32_t steady; // a step to `tokens` or more, up to this, needs the last one's pages; 0: not known, not active
    uint32_t took;   // the last step that it took part in, or before which it was allocated
    uint8_t state;   // written by vmem__kv_set_state alone
    bool fresh;      // no step since it was allocated or swapped in, so no kernel can access it: steady is 0
    bool skip;       // the worker failed here, and does not try again before the next step
    bool stuck;      // it failed to unmap here, and passes the slot over until it has nothing else to do
    bool busy;       // the worker is changing it
    bool dirty;      // kept pages show an earlier request's rows (VMEM_KV_ZERO)
    bool stale;      // some span has stale mappings
    uint8_t list;    // which of vmem_kv.lists has it
};

// A set of slots. Any number of them is put in, taken out and found in their order without a look at the others.
struct kv_set {
    uint64_t *slots; // a bit for each
    uint64_t *words; // a bit for each word of slots that has one
};
// Each slot is in one list: of free slots by the bits of `backed`, of active ones, or of all others.
enum { KV_FREE_LISTS = 32, KV_LIST_ACTIVE = KV_FREE_LISTS, KV_LIST_OTHERS, KV_LISTS };
struct kv_idle {
    uint32_t from;   // of a free slot: no page is in the place of so many rows of the last request
    uint64_t parked; // when it was freed
    uint64_t ends;   // KV_ENDING: after the kernels of this step
};

// What a step needs of the tensors of a group in a slot.
struct kv_want {
    uint32_t slot, group;
    struct kv_range need;    // what its kernels access
    struct kv_range touched; // the same, and what kernels of the steps in flight access
    bool extends;            // pages may be missing
};
// What a step needs, for the slots whose needs differ from the last step's.
struct kv_plan {
    struct kv_want *wants; // slot by slot, all groups of each
    uint64_t n, missing;   // missing: pages
    uint32_t *changed;     // slots that it examines
    bool extends;
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
struct kv_run {
    uint64_t id; // see kv_run_id(); 0: not in use
    uint32_t first, tokens;
    uint32_t pins;         // running requests that began with it or wrote it
    uint32_t newer, older; // in the order of use, while nobody pins it
    uint32_t next;         // of those not in use
    bool keep;             // not evicted
    bool report;           // vmem_kv_evicted names it
    bool held;             // it is being attached
    struct kv_rows *rows;  // [group]
};

// The holders of a row of pages (one page number in the tensors of a group). Exists for rows that a prefix holds or
// that several slots have mapped.
struct kv_ref {
    vmem_page page;           // of the group's first tensor; 0: empty
    uint32_t slots, prefixes; // prefixes: runs
    uint32_t n;               // pages
    uint32_t users;           // of the slots, those that need it: it is in the part of their span that is fixed
    uint32_t cached;          // of the prefixes, runs that can be evicted
    uint32_t seen;            // how often the call saw it
    uint64_t mark;            // vmem_kv.mark of the call that saw it
};
struct kv_refs {
    struct kv_ref *entries;
    uint64_t size, used; // size: a power of two
    uint64_t shared;     // pages of rows with several holders
    uint64_t only;       // pages of rows that prefixes alone hold
    uint64_t evictable;  // of these, by runs that can be evicted
};

// Parts of spans to back, and the lists for that. The pages of a part are created and mapped alike.
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
    uint64_t fixed;           // of these, that no call could take back. Moved by book/ alone
    uint64_t pending;         // of `held`, that the worker is mapping or unmapping; they become unused, or can be taken
    uint64_t promise;         // that need no memory from the device. Written with report.lock, too
    uint64_t ceiling;         // VMEM_KV_CHECK: the budget, or the pages that existed when it shrank
    uint64_t watermark_pages; // of the budget, new requests leave so many, or
    uint32_t watermark_percent; // so large a part: the larger of both
    bool disturbed;             // VMEM_KV_CHECK: a job of the worker changed `fixed`
};

// Of a pool's member.
struct kv_lend {
    struct vmem__member *member;                  // NULL: of no pool
    struct vmem__member *left;                    // the same while the cache is destroyed
    uint64_t (*evict)(void *arg, uint64_t pages); // as in struct vmem_kv_pool_share
    void *evict_arg;
    uint64_t offered; // pages of requests that evict would release
    uint64_t missed;  // bytes of pages that were taken and will be wanted again
    bool giving;      // other members wait for what is beyond give_to; the budget falls as it goes
    bool foresees;    // the cache has said what requests that wait will need
    uint64_t give_to; // pages
    uint64_t portion; // pages that the worker gives back in one call while others wait for them
    uint64_t fixed;   // kv_ledger.fixed after the last call
};

// Kernels that may be in flight.
struct kv_fences {
    uint64_t step, retired; // the last step; the last whose kernels have ended
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
    uint64_t scratch;              // a reservation to access pages that no slot has mapped: a page per tensor, or more
    _Atomic uint64_t zeroed_bytes; // the counter that the background thread adds to as well
};

// Calls and the worker take turns.
struct kv_turn {
    pthread_cond_t work, done;
    bool has_worker, stop, due, working;
    bool stuck;     // some slot is
    bool unmapping; // the worker is unmapping or releasing pages that others may hold or release
    bool cutting;   // it is giving up pages that one slot alone holds; where mappings are stale, others may have them
    uint32_t hold;  // calls that want the worker to pause
};

struct kv_worker {
    pthread_t thread;
    uint32_t idle_ms;
    bool idle_once, gave; // it saw the cache idle; it gave back what an idle one gives
    struct kv_grow grow;
    struct kv_cut cut;
};

struct kv_gate {
    pthread_mutex_t api, state;
    uint64_t calls; // public calls so far
    bool called;    // one is in progress, and may have dropped state to wait
};

// What others are told.
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
    bool given_up; // its memory is free, and only the handle is left
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
    uint32_t page_shift, block; // block: pages in 2 MiB
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
    uint32_t in_state[KV_STATES]; // how many slots are in each
    struct kv_idle *idle;         // [slot]
    struct kv_span *spans;        // [slot][group]
    // [slot][group]: mappings of shared pages, before lo, that the slot released when it was freed
    struct kv_range *stale;
    uint64_t clock; // counts the slots that are freed
    struct kv_refs refs;
    uint64_t mark; // the number of the last call that marked what it saw
    struct kv_ledger ledger;
    struct kv_fences fence;
    struct kv_plan plan; // of the public call in progress
    struct kv_gate gate;
    struct kv_lend lend;
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

#endif
