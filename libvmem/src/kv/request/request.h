// What happens to requests: they are admitted, begin, make steps, shrink, leave and come back. Called with api and
// state held.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_REQUEST_H
#define VMEM_KV_REQUEST_H

#include "kv/memory/memory.h"

// ---- plan.c

void vmem__kv_plan_reset(struct kv_plan *plan);
// Adds what a step to `tokens` needs of a slot. -EINVAL: its window has given up rows that it reads.
int vmem__kv_plan_slot(vmem_kv *kv, struct kv_plan *plan, uint32_t slot, uint32_t tokens);
// By how many pages the step will raise kv_ledger.fixed, the missing ones included.
int64_t vmem__kv_plan_delta(const vmem_kv *kv, const struct kv_plan *plan);
// Plans a step to these lengths, or returns -EINVAL. If waited is not NULL, the call waits until the worker changes
// none of the slots that will be extended, and *waited receives whether it had to.
int vmem__kv_plan(vmem_kv *kv, struct kv_plan *plan, const int32_t *lengths, bool *waited);
// Whether the step would find its memory.
int vmem__kv_plan_check(vmem_kv *kv, const int32_t *lengths);
// Between these two calls, nothing takes back what the step needs or what kernels in flight access. What kernels of the
// step do not access any more can be taken.
void vmem__kv_plan_enter(vmem_kv *kv, const struct kv_plan *plan);
void vmem__kv_plan_leave(vmem_kv *kv, const struct kv_plan *plan);
// Counts again what the slot's staged growth needs.
void vmem__kv_restage(vmem_kv *kv, uint32_t slot);
// Of a length that goes back, or is wrong.
int __attribute__((cold)) vmem__kv_look_at_length(const vmem_kv *kv, uint32_t slot, int32_t tokens);
static inline int kv_check_length(const vmem_kv *kv, uint32_t slot, int32_t length)
{
    const struct kv_slot *s = &kv->slots[slot];
    const uint32_t tokens = (uint32_t)length; // negative: more than any
    if (tokens && (tokens > kv->max_tokens || s->state != VMEM_KV_ACTIVE || tokens < s->tokens))
        return vmem__kv_look_at_length(kv, slot, length);
    return 0;
}
int vmem__kv_check_lengths(vmem_kv *kv, const int32_t *lengths, uint32_t n);
int vmem__kv_check_dry(uint32_t flags); // of a call that knows only VMEM_KV_DRY
// A step with flags: what it would return.
int vmem__kv_would_step(vmem_kv *kv, const int32_t *lengths, uint32_t n, uint32_t flags);

// ---- step.c

int vmem__kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n);
int vmem__kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens);
int vmem__kv_commit(vmem_kv *kv);

// ---- release.c

int vmem__kv_free_slot(vmem_kv *kv, uint32_t slot, uint64_t after);
// All or none of the slots, which no kernel accesses, in one call of the core. As vmem__kv_cut_slots, for a lease's
// cache.
int vmem__kv_free_slots(vmem_kv *kv, const uint32_t *slots, uint64_t n);
// Ends the requests whose kernels have ended, up to kv->fence.retired, and has those copied that are to be swapped out.
int vmem__kv_end_requests(vmem_kv *kv);
// Copies what a slot that is due still has, and gives up its pages.
int vmem__kv_swap_now(vmem_kv *kv, uint32_t slot);
int vmem__kv_retire_to(vmem_kv *kv, uint64_t step);
int vmem__kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t after, uint32_t flags);

// ---- swap.c

int vmem__kv_swap_out(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes, uint64_t after);
int vmem__kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes, uint32_t flags);

// ---- admit.c

int vmem__kv_room(vmem_kv *kv, int32_t slot, uint32_t *tokens);
int vmem__kv_fit(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit);
int vmem__kv_alloc(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot);

// ---- attach.c

int vmem__kv_attach(vmem_kv *kv, uint32_t slot, const uint64_t *runs, size_t n, uint32_t most, uint32_t flags,
                    uint32_t *tokens);
// Called before rows from `tokens` on are written again: the slot releases shared pages there, and keeps a copy of the
// rows before them.
int vmem__kv_unshare(vmem_kv *kv, uint32_t slot, uint32_t tokens);
uint64_t vmem__kv_unshare_pages(const vmem_kv *kv, uint32_t slot, uint32_t tokens); // that it has to make

// ---- compact.c

// Compacts a portion. *moved is how many pages.
int vmem__kv_compact(vmem_kv *kv, uint64_t *moved);
// Bytes of device memory that the context has, and how many of these no page uses.
int vmem__kv_device_bytes(vmem_kv *kv, uint64_t *all, uint64_t *overhead);

#endif
