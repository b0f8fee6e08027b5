// The KV-cache manager: request slots in large virtual tensors, backed by pages as requests grow.
//
// A cache is a list of virtual tensors. Each tensor has B slots of L rows; a row holds what one token stores there. A
// request owns one slot, which has the same number in all tensors. Before an iteration, the server passes the length of
// every request (vmem_kv_step); when the call returns, pages back the rows up to that length. The design follows the
// vAttention paper (Prabhu et al., ASPLOS 2025, section 5) and adds prefix sharing, swapping, sliding-window release
// and a budget that can change at any time.
//
// The kernel rule. When a step is called, kernels of the previous `steps_in_flight` iterations (1 by default) may still
// be running; kernels of earlier iterations must have ended. In each slot that took part, running kernels may access
// the rows [first, last). `last` is the length rounded up to whole tiles. `first` is 0; in a tensor with a window it is
// the length before that step minus the window, rounded down to whole tiles. The manager maps and unmaps only outside
// these rows.
//
// A call that takes rows away has an argument `after`, the number of a step (vmem_kv_last_step): kernels of the steps
// up to this one may still access the slot. The call returns at once, and the manager defers whatever these kernels
// could access. 0: no kernel in flight accesses the slot. A step's number belongs to one cache: the calls of another
// return -EINVAL.
//
// A shortage is an ordinary answer. A call that finds too little memory returns -ENOMEM, a call that finds no slot
// -ENOSPC, and vmem_kv_last_shortage says what is missing and what could help.
//
// Backed rows that have not been written hold finite values: zero, or what an earlier request left in a tensor of the
// same kind (always zero with VMEM_KV_ZERO). Without VMEM_KV_ZERO, this requires that nothing else in the context, such
// as a cache with other kinds, creates pages.
//
// Errors and thread safety are as in vmem.h: 0, or a negative errno and vmem_last_error(). A call that fails changes
// nothing that a caller can see, but may have given up pages that were kept for reuse. The manager serialises calls
// from several threads. vmem_kv_get_stats waits for a call in progress, but not for the background thread.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_H
#define VMEM_KV_H

#include "vmem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vmem_kv vmem_kv;

// ---- creation -----------------------------------------------------------------------------------------------

struct vmem_kv_tensor {
    uint64_t row_bytes;  // of one token's row; at most 2^30
    uint32_t max_tokens; // rows of a slot; 0: as the cache. A longer request has no further rows in this tensor
    uint32_t window;     // sliding window: older rows are released; 0: all rows are kept
    uint32_t kind;       // one number per element type: tensors of different kinds never see each other's old bytes,
                         // which could be NaN there
    uint32_t reserved;   // 0
};

#define VMEM_KV_OVERLAP 0x1u   // a background thread maps what the next iterations need
#define VMEM_KV_DEFER 0x2u     // a freed slot keeps its pages for the next request, until they are needed elsewhere
#define VMEM_KV_EAGER 0x4u     // keep the slot that is handed out next backed for eager_tokens (with OVERLAP)
#define VMEM_KV_ZERO 0x8u      // never show a request what an earlier one left: each gets zero pages, and keeps none
#define VMEM_KV_GENEROUS 0x10u // while memory is plentiful, back whole 2 MiB blocks; take the rest back under pressure
#define VMEM_KV_CHECK 0x20u    // verify the kernel rule and the bookkeeping at every operation (slow)
#define VMEM_KV_LAZY 0x40u     // take device memory when pages are needed, not the whole budget at creation
#define VMEM_KV_DEFAULT (VMEM_KV_OVERLAP | VMEM_KV_DEFER | VMEM_KV_EAGER | VMEM_KV_GENEROUS)

// Grows at its end: a field that the caller does not know is 0.
struct vmem_kv_config {
    uint32_t size;  // sizeof(struct vmem_kv_config)
    uint32_t flags; // VMEM_KV_*
    const struct vmem_kv_tensor *tensors;
    uint32_t n_tensors;  // 1 to 65536
    uint32_t slots;      // B; 1 to 65536
    uint32_t max_tokens; // L; 1 to 2^31 - 1
    uint32_t tile_rows;  // rows that kernels load together, past the length too; 1 (or 0) for kernels that mask loads
    uint64_t page_size;
    uint64_t budget; // most bytes of pages, at least one page; taken from the device at creation, unless LAZY
    // 0 selects the default in parentheses.
    uint32_t ahead_tokens;    // plentiful memory: stay backed this far past the length, up to twice as far (128)
    uint32_t ahead_min;       // scarce memory: the same, up to twice as far (4)
    uint32_t eager_tokens;    // (512)
    uint32_t reclaim_percent; // memory is scarce when less than this part of the budget is free (10; at most 50)
    uint32_t steps_in_flight; // iterations whose kernels may be running when a step is called (1; at most 16)
    // With OVERLAP: a cache is idle if it has no request and was asked for nothing for this many milliseconds. It then
    // returns all kept pages and its preallocated memory to the system. From then on it takes memory when it is
    // needed, as with LAZY. 0: never.
    uint32_t idle_ms;
};

// Reserves the address space and takes the budget's memory. The context must outlive the manager.
int vmem_kv_create(vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **out);
// Leaves the pool and ends the background thread. Tensors stay until vmem_kv_destroy, the only call that may follow:
// others return -EINVAL.
int vmem_kv_close(vmem_kv *kv);
// Frees everything that the manager holds, and the handle. NULL is allowed. No kernel in flight may access the cache.
void vmem_kv_destroy(vmem_kv *kv);

// The location of a tensor. Row r of slot s starts at addr + s * slot_stride + r * row_bytes. Since slot_rows *
// row_bytes equals slot_stride, the tensor is also a contiguous one of slots * slot_rows rows. slot_rows may exceed
// max_tokens.
struct vmem_kv_layout {
    uint32_t size;  // sizeof(struct vmem_kv_layout), set by the caller
    uint32_t group; // of tensors with the same row size, max_tokens and window: their pages are mapped together
    uint64_t addr, length;
    uint64_t slot_stride; // bytes
    uint64_t slot_rows;
    uint64_t row_bytes;
};
int vmem_kv_get_layout(vmem_kv *kv, uint32_t tensor, struct vmem_kv_layout *out);

// ---- requests -----------------------------------------------------------------------------------------------

#define VMEM_KV_ALLOC_SLOT 0x1u // take exactly the slot in the options

// Grows at its end: fields that a caller does not know are 0.
struct vmem_kv_alloc_options {
    uint32_t size;          // sizeof(struct vmem_kv_alloc_options)
    uint32_t flags;         // VMEM_KV_ALLOC_*
    uint32_t tokens;        // that the first step will have, about; 0: unknown. At most max_tokens
    uint32_t slot;          // with VMEM_KV_ALLOC_SLOT
    uint32_t prefix_tokens; // rows that a prefix will provide: kept pages in their place are useless
};
// Allocates a slot for a request. Chooses the free slot whose kept pages fit best, and maps nothing. options: NULL for
// the defaults, which are all 0. -ENOSPC: all slots are taken. -EBUSY: the slot in the options is taken.
int vmem_kv_alloc(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot);
// Ends a request. The pages of its slot are kept for the next one (VMEM_KV_DEFER) or released; shared pages are
// dropped. With `after`, nobody can allocate the slot until the kernels up to that step have ended. No call may name
// it, and the pages that these kernels access stay in use. A slot that no step has accessed, or that is swapped out, is
// free at once. If the call fails, the rows are lost anyway; call it again.
int vmem_kv_free(vmem_kv *kv, uint32_t slot, uint64_t after);

// Fences. Successful steps of a cache have consecutive numbers, which no other cache of the process has. *step
// receives the number of the last one. Before the first, that is a number lower by one. An iteration's kernels carry
// the number of its step.
int vmem_kv_last_step(vmem_kv *kv, uint64_t *step);
// Declares that the kernels of all steps up to this one have ended; the caller saw an event or synchronised. Otherwise
// the manager assumes it once `steps_in_flight` later steps have been called. 0 declares nothing. -EINVAL: the cache
// has made no such step.
int vmem_kv_retire(vmem_kv *kv, uint64_t step);

// Backs the rows of the coming iteration. lengths[s] is the number of tokens of slot s after the iteration; 0 means
// that the slot takes no part and keeps what it holds. n must be the number of slots. A length below the slot's
// discards rows, as vmem_kv_truncate does. -EINVAL: some of them are shared, or windows have passed rows that the step
// reads. -ENOMEM: pages are missing; free or swap out a request and try again.
//
// VMEM_KV_DRY: returns what the call would return now. It changes nothing but the budget of a pool's member, which
// claims what is free. Requests that end count as running: after -ENOMEM, the step may still find that they have ended.
// After 0, the step may find that others have taken device memory that the cache has not taken ahead (VMEM_KV_LAZY,
// pools, after vmem_kv_reclaim), or the free budget of a pool.
#define VMEM_KV_DRY 0x1u
int vmem_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint32_t flags);
// Discards rows from `tokens` onward (rejected speculation). A shared page that will be written again is copied. The
// rows that the window of the shorter request has passed go, too. -ENODATA: the next token reads
// rows that a window has passed. Rows that kernels in flight may access are there; older ones count as gone, whether or
// not the background thread has unmapped them. -EBUSY, and nothing has changed: kernels up to `after` may access shared
// pages that would have to be replaced. If the call fails otherwise, rows from `tokens` onward may be lost, but none
// before; call it again.
int vmem_kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t after);
// Waits until the background thread has nothing left to do.
int vmem_kv_wait(vmem_kv *kv);

// ---- slots --------------------------------------------------------------------------------------------------

enum vmem_kv_slot_state { VMEM_KV_FREE, VMEM_KV_ACTIVE, VMEM_KV_SWAPPED };
struct vmem_kv_slot_info {
    uint32_t size;          // sizeof(struct vmem_kv_slot_info), set by the caller
    uint32_t state;         // enum vmem_kv_slot_state
    uint32_t tokens;        // length in the last step it took part in
    uint32_t shared_tokens; // rows below this are (partly) in shared pages; 0: none
    uint64_t pages;         // mapped, all tensors together
    uint64_t shared_pages;  // of these
    uint64_t needed_pages;  // of these, what the length asks for; the rest can be taken back at any time
    uint32_t absent_steps;  // active: steps since it took part in one, was allocated or was swapped in
    uint32_t pad;           // 0
    uint64_t after;         // the step whose kernels must have ended before a free slot can be had; 0: none
};
int vmem_kv_get_slot(vmem_kv *kv, uint32_t slot, struct vmem_kv_slot_info *out);
// Rows [*first, *end) of a slot in a tensor: what a request can read of those that it has. *first is 0 unless a window
// has passed whole pages. The slot is active or swapped out.
int vmem_kv_get_rows(vmem_kv *kv, uint32_t slot, uint32_t tensor, uint32_t *first, uint32_t *end);

// ---- runs ---------------------------------------------------------------------------------------------------
//
// A run is rows [first, first + tokens) of a slot, which are held beyond it. Requests that start with the same tokens
// map the full pages of runs; the last, partial page is copied. A page that two slots have mapped is never written.
//
// A request pins the runs that it wrote or began with. While memory is short, runs that no running request pins are
// evicted, but for those to be kept. The least recently used one goes first, and the end of a sequence before its
// beginning. Their pages therefore count as free (vmem_kv_stats.free_pages, dry steps). The manager
// never calls the engine back to ask what to evict. A prefix that the engine holds itself is a run to be kept.
// An engine with hashes of blocks has a table from hashes to runs, and looks into vmem_kv_evicted. An engine that
// decides itself what to evict (vLLM) has a table from its blocks to runs to be kept, and drops them.

struct vmem_kv_run {
    uint32_t slot;
    uint32_t first, tokens; // rows [first, first + tokens), which the slot has
    uint32_t keep;          // 1: not evicted, so that its pages do not count as free; 0: evicted while memory is short
    // 0, or the number of a run of these rows: if that is still there, the request pins it, and no new one is made.
    // Receives the run's number; 0: windows have passed all of its rows.
    uint64_t id;
};
// A call that is given a run of another cache returns -EINVAL, and changes nothing.
#define VMEM_KV_RUN_REPORT 0x1u // name the runs in vmem_kv_evicted when they are evicted
// Shares rows: all runs or none. The rows need not be written yet: kernels that read them elsewhere must run after
// those that write them, and after that they are not written again. In a tensor with a window, a run holds what kernels
// in flight and the next token read. -ENOMEM: the system has no memory for the lists; no page is needed.
int vmem_kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags);
#define VMEM_KV_LOOK 0x1u // only find the runs: the slot need not be allocated yet, and is ignored
// Starts a newly allocated slot, which no kernel accesses, with runs that follow each other from row 0, whichever
// slots wrote them. It gets as many as are still there, at most `most` tokens. *tokens receives the slot's length, 0
// if no run is there, or if windows have passed rows that the next token reads. That token must be computed, so leave
// a row of the prompt out. A run's first page may also have rows before the run: these must be what its writer has
// there. Rows in a last, partial page are copied by this call and must have been written. -ENOMEM: there is no memory
// for the copy. flags: VMEM_KV_LOOK.
int vmem_kv_attach(vmem_kv *kv, uint32_t slot, const uint64_t *runs, size_t n, uint32_t most, uint32_t flags,
                   uint32_t *tokens);
// Drops runs. Those that are gone already are skipped. Requests that use them keep their pages. *freed (NULL is allowed)
// receives the number of freed pages. They count as free at once; the background thread releases them (vmem_kv_wait).
int vmem_kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t *freed);
// Evicts runs in their order until that many pages are freed, or no eviction frees any more. *freed (NULL is allowed)
// receives their number.
int vmem_kv_evict(vmem_kv *kv, uint64_t pages, uint64_t *freed);
// Returns up to n evicted runs, the oldest first, each once, and their number in *got: of those with
// VMEM_KV_RUN_REPORT, and not those that vmem_kv_drop named. Call it from time to time, from any thread: they are noted
// until then.
int vmem_kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got);

struct vmem_kv_run_info {
    uint32_t size; // sizeof(struct vmem_kv_run_info), set by the caller
    uint32_t first, tokens;
    uint32_t min_tokens; // of a run from row 0, the fewest that can be attached; over `tokens`: none
    uint32_t keep;
    uint32_t requests;         // that pin it
    uint64_t pages, own_pages; // held; of these, without another holder: what dropping the run frees
};
// -EINVAL: the run is gone.
int vmem_kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out);

// ---- swapping -----------------------------------------------------------------------------------------------
//
// The caller copies the rows, of each tensor those of vmem_kv_get_rows. Shared rows come back as copies.

// Releases the pages of a slot whose rows have been copied: its `tokens` rows, after `step`, the last step before the
// copy (vmem_kv_last_step). No kernel in flight accesses the slot. It stays taken, as VMEM_KV_SWAPPED. -EBUSY, and
// nothing has changed: the slot has other rows by now, so the copy may be incomplete.
int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step);
// Backs the rows of such a slot at the addresses that they had. The caller copies them back before a kernel reads them.
int vmem_kv_swap_in(vmem_kv *kv, uint32_t slot);

// ---- memory -------------------------------------------------------------------------------------------------

// Grows or shrinks the budget, to at least a page. Shrinking releases kept pages and returns device memory to the
// system; kernels in flight access none of these. What active requests hold beyond the new budget stays until they end.
// Until then, a step finds memory only if it needs no more pages in all than before, even where pages are left of rows
// that were truncated. Growing takes memory and may return -ENOMEM.
int vmem_kv_set_budget(vmem_kv *kv, uint64_t bytes);
// Releases pages of free slots and pages backed ahead of need, at least `bytes` if there are so many, and returns unused
// device memory to the system. Fewer are released where the system has no mappings left to cut pages off (host:
// vm.max_map_count). flags: 0. If freed is not NULL, *freed receives the bytes of pages released.
int vmem_kv_reclaim(vmem_kv *kv, uint64_t bytes, uint32_t flags, uint64_t *freed);

struct vmem_kv_stats {
    uint32_t size; // sizeof(struct vmem_kv_stats), set by the caller
    uint32_t pad;  // 0
    uint64_t page_size;
    uint64_t budget_pages;
    uint64_t held_pages;   // exist
    uint64_t needed_pages; // held for the lengths of active and ending requests (a shared page counts once per slot)
    uint64_t kept_pages;   // of free slots, for reuse
    uint64_t ahead_pages;  // of active and ending requests, mapped ahead of need
    uint64_t shared_pages; // mapped or held more than once
    uint64_t prefix_pages; // held by runs and by no slot
    uint64_t free_pages;   // what a step could get: the budget less what cannot be taken back
    uint64_t live_bytes;   // of the rows that active requests have
    uint64_t active_slots, swapped_slots, slots, prefixes;
    uint64_t ending_slots; // whose kernels may be in flight
    // Since creation:
    uint64_t steps, step_failures;         // those made; those that found too little memory
    uint64_t step_mapped_pages;            // pages that a step had to map itself
    uint64_t step_maps;                    // steps that mapped something themselves
    uint64_t step_waits;                   // steps that waited for the background thread
    uint64_t ahead_mapped_pages;           // pages that the background thread mapped
    uint64_t ahead_jobs;                   // slots it extended
    uint64_t eager_pages;                  // pages it mapped for the next request
    uint64_t allocs, adopted_slots;        // requests, and of these, with pages of an earlier one
    uint64_t reclaimed_pages;              // kept pages given up
    uint64_t window_pages;                 // given up by sliding windows
    uint64_t attached_pages, copied_pages; // by attach; copied by it and by truncate
    uint64_t worker_errors;                // background operations that failed (the step does them again)
    uint64_t short_budget, short_device, short_mappings, short_slots; // calls that failed, by enum vmem_kv_reason
    // Gauges: runs with VMEM_KV_RUN_REPORT (prefixes: the others); pages that only runs which can be evicted hold, and
    // which count as free.
    uint64_t hashed_blocks, evictable_pages;
    uint64_t hit_tokens, evicted_blocks; // since creation: tokens that such runs provided; runs evicted
    uint64_t absent_slots;               // a gauge: active, and without part in the last step
};
int vmem_kv_get_stats(vmem_kv *kv, struct vmem_kv_stats *out);

// The shortage behind a call's -ENOMEM or -ENOSPC, and what could help.
enum vmem_kv_reason {
    VMEM_KV_SHORT_OF_NOTHING,
    VMEM_KV_SHORT_OF_BUDGET,   // end or swap out a request, drop runs, raise the budget
    VMEM_KV_SHORT_OF_DEVICE,   // the budget allows more than the device has: free memory elsewhere, or end a request
    VMEM_KV_SHORT_OF_MAPPINGS, // host: vm.max_map_count. Raise it, use larger pages, or end a request
    VMEM_KV_SHORT_OF_SLOTS,    // end a request
};
struct vmem_kv_shortage {
    uint32_t size;          // sizeof(struct vmem_kv_shortage), set by the caller
    uint32_t reason;        // enum vmem_kv_reason
    uint64_t missing_pages; // must become free before the call can succeed
    uint64_t prefix_pages;  // what dropping all runs that are to be kept would free
    uint64_t requests;      // that hold pages
    uint64_t ending_pages;  // of requests that end when kernels have: retire steps, or make them
    uint64_t coming_pages;  // that the pool has been asked for and may still give: vmem_kv_pool_wait
    uint32_t refusal;       // enum vmem_kv_refusal: why the pool gives no more; 0: it may, or the cache is in none
    uint32_t pad;           // 0
    // The first step that makes good what is missing: vmem_kv_retire it once its kernels have ended, and call again.
    // 0: no kernels in flight hold that much, and to wait for them does not help.
    uint64_t step;
};
// Describes the calling thread's last such call; the reason is 0 if it was short of nothing.
int vmem_kv_last_shortage(struct vmem_kv_shortage *out);

// Makes path a link to memory of this process (mode 0600) that holds a struct vmem_kv_view (vmem_kv_pool.h), and
// updates it at every step and change without system calls. Others open the path and read. vmem_kv_destroy removes the
// link.
int vmem_kv_publish(vmem_kv *kv, const char *path, const char *name);

#ifdef __cplusplus
}
#endif
#endif
