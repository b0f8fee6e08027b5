// The KV-cache manager: request slots in large virtual tensors, backed by pages as the requests grow.
//
// A cache is a list of virtual tensors. Every tensor has B slots of L rows; a row is what one token keeps there. A
// request owns one slot, with the same number in all tensors. Before an iteration the server says how long each
// request is (vmem_kv_step), and the rows up to that length are backed by pages when the call returns. The design is
// the one of the vAttention paper (Prabhu et al., ASPLOS 2025, section 5), with prefix sharing, swapping,
// sliding-window release and a live budget added.
//
// The rule about kernels. When a step is called, kernels of the `steps_in_flight` iterations before it may be running
// (1 by default); those of earlier iterations must have ended. They may touch, in each slot that took part, the rows
// [first, last): last is the length rounded up to whole tiles; first is 0, or in a tensor with a window, the length
// before that step less the window, rounded down to whole tiles. The manager maps and unmaps only what lies outside
// these rows. Calls that must touch more say "quiet": no kernel in flight may touch that slot when they are made. Those
// with a fence, the number of a step (vmem_kv_last_step), need no quiet: the manager waits with what kernels up to that
// step could touch, and the caller does not.
//
// Backed rows that nobody has written yet hold finite values: zero, or with tensors of one kind, what an earlier
// request left there (VMEM_KV_ZERO: always zero).
//
// Errors and thread safety are as in vmem.h: 0 or a negative errno and vmem_last_error(). A call that returns an error
// has changed nothing that a caller can see, but pages kept for later use may have been given up. Calls from several
// threads are taken one after the other; vmem_kv_get_stats waits for no other call's system calls.
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
    uint64_t row_bytes;  // of one token's row
    uint32_t max_tokens; // rows of a slot; 0: the cache's. A request that is longer has no more rows in this tensor
    uint32_t window;     // sliding window: rows further back than this are given up; 0: all rows are kept
    uint32_t kind;       // what the bytes mean (one number per element type): tensors of different kinds never see
                         // each other's old bytes, which could be NaN there
    uint32_t reserved;   // 0
};

#define VMEM_KV_OVERLAP 0x1u   // a background thread maps what the next iterations need
#define VMEM_KV_DEFER 0x2u     // a freed slot keeps its pages for the next request, until they are needed elsewhere
#define VMEM_KV_EAGER 0x4u     // keep the slot that is handed out next backed for eager_tokens (with OVERLAP)
#define VMEM_KV_ZERO 0x8u      // never show a request what an earlier one left: zero pages on reuse
#define VMEM_KV_GENEROUS 0x10u // while memory is plentiful, back whole 2 MiB blocks; take the rest back under pressure
// Choose slots by what was asked of the cache alone, never by which pages happen to be mapped: managers given the same
// calls hand out the same slots.
#define VMEM_KV_SAME_SLOTS 0x20u
#define VMEM_KV_CHECK 0x40u // verify the rule about kernels and the books at every operation (slow)
#define VMEM_KV_LAZY 0x80u  // take device memory when pages are needed, not the whole budget at creation
#define VMEM_KV_DEFAULT (VMEM_KV_OVERLAP | VMEM_KV_DEFER | VMEM_KV_EAGER | VMEM_KV_GENEROUS)

// Grows at its end: fields that a caller does not know are 0.
struct vmem_kv_config {
    uint32_t size;  // sizeof(struct vmem_kv_config)
    uint32_t flags; // VMEM_KV_*
    const struct vmem_kv_tensor *tensors;
    uint32_t n_tensors;
    uint32_t slots;      // B
    uint32_t max_tokens; // L
    uint32_t tile_rows;  // rows that kernels load together, past the length too; 1 (or 0) for kernels that mask loads
    uint64_t page_size;
    uint64_t budget; // most bytes of pages; taken from the device at creation (vmem_prealloc), unless LAZY
    // 0 in any of these: a default that suits.
    uint32_t ahead_tokens;    // plentiful memory: stay backed this far past the length, up to twice as far (128)
    uint32_t ahead_min;       // scarce memory: the same, up to twice as far (4)
    uint32_t eager_tokens;    // (512)
    uint32_t reclaim_percent; // memory is scarce when less than this part of the budget is free (10)
    uint32_t steps_in_flight; // iterations whose kernels may be running when a step is called (1; at most 16)
    uint32_t reserved;        // 0
};

// Reserves the address space and takes the budget's memory. The context must outlive the manager.
int vmem_kv_create(vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **out);
// Everything the manager holds is freed. Quiet, for all slots. NULL is allowed.
void vmem_kv_destroy(vmem_kv *kv);

// Where the tensor is: row r of slot s starts at addr + s * slot_stride + r * row_bytes. slot_rows * row_bytes =
// slot_stride, and slot_rows >= max_tokens, so the tensor is also a contiguous one of slots * slot_rows rows.
struct vmem_kv_layout {
    uint64_t addr, length;
    uint64_t slot_stride; // bytes
    uint64_t slot_rows;
    uint64_t row_bytes;
};
int vmem_kv_get_layout(vmem_kv *kv, uint32_t tensor, struct vmem_kv_layout *out);

// ---- requests -----------------------------------------------------------------------------------------------

// A slot for a request whose first step will have about `tokens` tokens (0: not known): the free slot whose kept pages
// fit best. -ENOSPC when all are taken. Maps nothing.
int vmem_kv_alloc(vmem_kv *kv, uint32_t tokens, uint32_t *slot);

#define VMEM_KV_ALLOC_SLOT 0x1u // the slot of the options, and no other

// Grows at its end: fields that a caller does not know are 0.
struct vmem_kv_alloc_options {
    uint32_t size;          // sizeof(struct vmem_kv_alloc_options)
    uint32_t flags;         // VMEM_KV_ALLOC_*
    uint32_t tokens;        // as in vmem_kv_alloc
    uint32_t slot;          // with VMEM_KV_ALLOC_SLOT
    uint32_t prefix_tokens; // so many rows will be attached from a prefix: kept pages in their place are of no use
};
// vmem_kv_alloc for callers that know more. -EBUSY when the wanted slot is taken.
int vmem_kv_alloc_with(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot);
// Quiet. The slot's pages are kept for the next request (VMEM_KV_DEFER) or released; shared ones are let go. Should it
// fail, the rows are lost all the same; call it again.
int vmem_kv_free(vmem_kv *kv, uint32_t slot);

// Fences. A successful step has a number, from 1 on; *step receives the last one's, 0 before the first. The kernels of
// an iteration carry its step's number.
int vmem_kv_last_step(vmem_kv *kv, uint64_t *step);
// Kernels of the steps up to this one have ended, says the caller, who saw an event or synchronised. Without it they
// have when the steps that the rule allows in flight are called after them. -EINVAL for a step that was not made yet.
int vmem_kv_retire(vmem_kv *kv, uint64_t step);
// Not quiet: vmem_kv_free when the kernels of the steps up to this one have ended. Until then the slot is
// VMEM_KV_ENDING: no call may name it, and its pages are in use.
int vmem_kv_free_after(vmem_kv *kv, uint32_t slot, uint64_t step);
// Not quiet: vmem_kv_truncate while kernels of the steps up to this one may touch the rows. -EBUSY, and nothing
// changed, where shared pages would have to go and these kernels have not ended.
int vmem_kv_truncate_after(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step);

// Before an iteration: lengths[s] is the number of tokens of slot s once the iteration has run, 0 for a slot that takes
// no part in it (what the slot holds stays). n must be the number of slots. On return the rows are backed.
// -ENOMEM: *missing pages (NULL is allowed) more must become free first: free or swap out a request and try again.
int vmem_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint64_t *missing);
// A step built up request by request. grow: slot is to have `tokens` tokens (0: takes no part after all); 0 when the
// step would find memory with all that is staged, else -ENOMEM, and it is as before. commit: vmem_kv_step with what is
// staged, which then is no more; where it fails (memory that was there went to other calls), all stays staged. -EINVAL
// when nothing is. Freeing, swapping out and truncating a slot take its growth back.
int vmem_kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *missing);
int vmem_kv_commit(vmem_kv *kv, uint64_t *missing);

// The answer vmem_kv_step would give now, without doing anything (but taking over a budget that another process wants).
int vmem_kv_check(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint64_t *missing);
// How many tokens the slot could have at most in the next step, if no other slot grew; slot -1: a new request.
int vmem_kv_room(vmem_kv *kv, int32_t slot, uint32_t *tokens);
// Quiet. Forgets the rows from `tokens` on (rejected speculation); a shared page that is to be written again is copied.
// Should it fail, rows from `tokens` on may be lost, but none before; call it again.
int vmem_kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens);
// The answer that would give now, without doing anything.
int vmem_kv_truncate_check(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *missing);
// Returns when the background thread has nothing left to do.
int vmem_kv_wait(vmem_kv *kv);

enum vmem_kv_slot_state { VMEM_KV_FREE, VMEM_KV_ACTIVE, VMEM_KV_SWAPPED, VMEM_KV_ENDING };
struct vmem_kv_slot_info {
    uint32_t state;         // enum vmem_kv_slot_state
    uint32_t tokens;        // length in the last step it took part in
    uint32_t shared_tokens; // rows below this are (partly) in shared pages; 0: none
    uint32_t reserved;
    uint64_t pages;        // mapped, all tensors together
    uint64_t shared_pages; // of these
    uint64_t needed_pages; // of these, what the length asks for; the rest can be taken back at any time
};
int vmem_kv_get_slot(vmem_kv *kv, uint32_t slot, struct vmem_kv_slot_info *out);

// ---- prefixes -----------------------------------------------------------------------------------------------
//
// A prefix holds pages that a request wrote. Requests that start with the same tokens map the pages of it that are
// full; the last, partial page is copied. A page that two slots have mapped is never written.

// Holds rows [0, tokens) of the slot (in a window tensor, what the window left of them). The rows must be written
// already: no kernel in flight may still be writing them. tokens: at most the slot's length.
int vmem_kv_prefix_save(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *prefix);
// The slot, newly allocated, starts with the prefix's first `tokens` rows; its length becomes `tokens`. Quiet.
// -ENODATA when a window tensor does not have the rows that the next token reads. -ENOMEM as in vmem_kv_step.
int vmem_kv_prefix_attach(vmem_kv *kv, uint64_t prefix, uint32_t slot, uint32_t tokens, uint64_t *missing);
// Whether attaching would find its memory: 0, or -ENOMEM as it. The slot need not be allocated yet.
int vmem_kv_prefix_check(vmem_kv *kv, uint64_t prefix, uint32_t tokens, uint64_t *missing);
// Pages that nobody else holds are released.
int vmem_kv_prefix_drop(vmem_kv *kv, uint64_t prefix);

struct vmem_kv_prefix_info {
    uint32_t tokens, min_tokens; // attachable: min_tokens to tokens (min_tokens is 0 without window tensors)
    uint64_t pages, own_pages;   // held, and of these nobody else's: what dropping it frees
};
int vmem_kv_prefix_query(vmem_kv *kv, uint64_t prefix, struct vmem_kv_prefix_info *out);

// ---- blocks -------------------------------------------------------------------------------------------------
//
// For engines that keep their accounts in blocks (vLLM): a block number is a name for the pages behind `block_tokens`
// rows of a slot, in all tensors. Named pages stay until the name is dropped, whatever becomes of the slot, and a new
// request can start with them at other addresses. So the engine's block table becomes the GPU's page table. Only names
// hold these pages: the engine decides which go first.

// Makes names 0 to n_blocks - 1, once. block_tokens rows must be whole pages in every tensor, and tensors have no
// windows (-EOPNOTSUPP).
int vmem_kv_blocks_init(vmem_kv *kv, uint32_t n_blocks, uint32_t block_tokens);
// ids[i] names the pages at block index[i] of slots[i]: rows from index[i] * block_tokens on, which the slot's last
// step asked for. All or nothing; *bad, when not NULL, receives the element at fault. -EEXIST: the name is taken.
int vmem_kv_block_bind(vmem_kv *kv, const uint32_t *slots, const uint32_t *index, const uint32_t *ids, size_t n,
                       size_t *bad);
// Quiet. The slot, newly allocated, starts with the named pages in this order: they are mapped there a second time, and
// its length becomes n * block_tokens. What the slot has behind them stays. -ENODATA: a name has no pages.
int vmem_kv_block_attach(vmem_kv *kv, uint32_t slot, const uint32_t *ids, size_t n, size_t *bad);
// Takes names away, as far as they are taken. Pages that nobody else holds are released.
int vmem_kv_block_drop(vmem_kv *kv, const uint32_t *ids, size_t n);
// Gives unused device memory back to the system as vmem_kv_reclaim does, and moves pages that only names hold close
// together where that gives more. *freed, when not NULL: bytes of device memory. Takes some ms for each GiB that is
// moved; for idle times.
int vmem_kv_block_compact(vmem_kv *kv, uint64_t *freed);

// ---- swapping -----------------------------------------------------------------------------------------------

// Bytes of CPU memory that vmem_kv_swap_out needs for the slot.
int vmem_kv_swap_size(vmem_kv *kv, uint32_t slot, uint64_t *bytes);
// Quiet. Copies the slot's rows to host (pinned memory makes it fast) and releases its pages. The slot stays taken.
int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes);
// The rows come back, to the addresses they had. -ENOMEM as in vmem_kv_step. Shared pages come back as copies.
int vmem_kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes, uint64_t *missing);
// Whether that would find its memory.
int vmem_kv_swap_check(vmem_kv *kv, uint32_t slot, uint64_t *missing);

// ---- memory -------------------------------------------------------------------------------------------------

// Grows or shrinks the budget. Shrinking gives up kept pages and gives device memory back to the system; what active
// requests hold beyond it stays until they end, and no step gets more pages before. Growing takes memory: -ENOMEM.
int vmem_kv_set_budget(vmem_kv *kv, uint64_t bytes);
// Gives up kept pages (of free slots, and backed ahead of need), at least `bytes` of them where there are so many,
// and gives unused device memory back to the system. *freed, when not NULL: bytes of pages given up.
int vmem_kv_reclaim(vmem_kv *kv, uint64_t bytes, uint64_t *freed);

struct vmem_kv_stats {
    uint64_t page_size;
    uint64_t budget_pages;
    uint64_t held_pages;   // exist
    uint64_t needed_pages; // held for the lengths of active requests (a shared page counts once per slot)
    uint64_t kept_pages;   // of free slots, for reuse
    uint64_t ahead_pages;  // of active slots, mapped ahead of need
    uint64_t shared_pages; // mapped or held more than once
    uint64_t prefix_pages; // held by prefixes and by no slot
    uint64_t free_pages;   // what a step could get: the budget less what cannot be taken back
    uint64_t live_bytes;   // of the rows that active requests have
    uint64_t active_slots, swapped_slots, slots, prefixes;
    uint64_t ending_slots; // whose kernels may be in flight
    // Since creation:
    uint64_t steps, step_failures;
    uint64_t step_mapped_pages;            // pages that a step had to map itself
    uint64_t step_maps;                    // steps that mapped something themselves
    uint64_t step_waits;                   // steps that waited for the background thread
    uint64_t ahead_mapped_pages;           // pages that the background thread mapped
    uint64_t ahead_jobs;                   // slots it extended
    uint64_t eager_pages;                  // pages it mapped for the next request
    uint64_t allocs, adopted_slots;        // requests, and of these, with pages of an earlier one
    uint64_t adopted_pages;                // pages of an earlier request that the first step found in place
    uint64_t reclaims, reclaimed_pages;    // kept pages given up
    uint64_t window_pages;                 // given up by sliding windows
    uint64_t zeroed_bytes;                 // of kept pages, before reuse
    uint64_t attached_pages, copied_pages; // by prefix_attach; copied by it and by truncate
    uint64_t swap_out_bytes, swap_in_bytes;
    uint64_t worker_errors; // background operations that failed (the step does them again)
    uint64_t short_budget, short_device, short_mappings, short_slots; // calls that failed, by enum vmem_kv_reason
};
int vmem_kv_get_stats(vmem_kv *kv, struct vmem_kv_stats *out);

// What a call was short of that returned -ENOMEM, or -ENOSPC, and what could help.
enum vmem_kv_reason {
    VMEM_KV_SHORT_OF_NOTHING,
    VMEM_KV_SHORT_OF_BUDGET,   // end or swap out a request, drop prefixes, raise the budget
    VMEM_KV_SHORT_OF_DEVICE,   // the budget allows more than the device has: free memory elsewhere, or end a request
    VMEM_KV_SHORT_OF_MAPPINGS, // host: vm.max_map_count. Raise it, use larger pages, or end a request
    VMEM_KV_SHORT_OF_SLOTS,    // end a request
};
struct vmem_kv_shortage {
    uint32_t size;          // sizeof(struct vmem_kv_shortage), set by the caller
    uint32_t reason;        // enum vmem_kv_reason
    uint64_t missing_pages; // as in *missing
    uint64_t prefix_pages;  // what dropping all prefixes would free
    uint64_t requests;      // that hold pages
    uint64_t ending_pages;  // of requests that end when the kernels in flight have: retire steps, or make them
};
// Of the calling thread's last call of this kind; reason 0 when it was not short of anything.
int vmem_kv_last_shortage(struct vmem_kv_shortage *out);

// ---- what other processes see -------------------------------------------------------------------------------

#define VMEM_KV_VIEW_MAGIC UINT64_C(0x31776569766b6d76) // "vmkview1"
struct vmem_kv_view {
    uint64_t magic;
    uint32_t pid;
    uint32_t size;     // sizeof(struct vmem_kv_view)
    uint64_t sequence; // odd while the manager writes
    char name[64];     // as given
    char backend[16];
    int32_t device;
    uint32_t reserved;
    uint64_t wanted_budget; // written by others: bytes; taken over by the next check, or after the next step. 0: none
    uint64_t memory_total;  // bytes of the device, the most that a budget can be
    struct vmem_kv_stats stats;
};
// Keeps a struct vmem_kv_view up to date in the file at path (created, mode 0600; removed by vmem_kv_destroy), at every
// step and change, without system calls.
int vmem_kv_publish(vmem_kv *kv, const char *path, const char *name);

#ifdef __cplusplus
}
#endif
#endif
