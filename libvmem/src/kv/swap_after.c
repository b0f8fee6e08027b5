// Swapping out behind a fence. The rows are copied once the kernels that write them have ended. The background thread
// copies them, if there is one.
//
// A slot that is due counts as free memory, whether or not it has been copied. So the pages that a step can get do not
// depend on the thread's progress. A step that finds no other memory copies the rest itself.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/kv.h"

#define PORTION (UINT64_C(32) << 20) // bytes copied before the thread takes the lock again: about 1 ms over PCIe

uint32_t vmem__kv_swap_next(const vmem_kv *kv)
{
    for (uint32_t s = 0; s < kv->n_slots && kv->n_ending; s++)
        if (kv_swap_due(kv, s))
            return s;
    return UINT32_MAX;
}

int vmem__kv_swap_portion(vmem_kv *kv, uint32_t slot)
{
    struct kv_idle *idle = &kv->idle[slot];
    const uint64_t to = KV_MIN(idle->copied + PORTION, idle->size);
    uint64_t n;
    vmem__kv_swap_ops(kv, slot, (uintptr_t)idle->host, true, idle->copied, to, kv->swap_ops, &n);
    int rc = vmem_copy_batch(kv->ctx, kv->swap_ops, n);
    if (!rc)
        idle->copied = to;
    return rc;
}

void vmem__kv_swap_portion_end(vmem_kv *kv, uint32_t slot)
{
    struct kv_slot *s = &kv->slots[slot];
    struct kv_idle *idle = &kv->idle[slot];
    if (idle->copied < idle->size)
        return;
    kv->stats.swap_out_bytes += idle->size;
    kv->n_ending--;
    s->state = VMEM_KV_SWAPPED;
    s->fresh = true; // its kernels have ended
    s->shared_tokens = idle->named = 0;
    idle->parked = 0; // its pages are the first to be taken back
    vmem__kv_forget(kv, slot);
}

int vmem__kv_swap_rest(vmem_kv *kv, uint32_t slot)
{
    int rc = 0;
    while (!rc && kv->slots[slot].state == VMEM_KV_SWAPPING) {
        rc = vmem__kv_swap_portion(kv, slot);
        if (!rc)
            vmem__kv_swap_portion_end(kv, slot);
    }
    return rc;
}

int vmem_kv_swap_out_after(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_swap_check(kv, slot, host, bytes);
    if (!rc)
        rc = vmem__kv_check_fence(kv, step);
    if (!rc && !kv->swap_ops && !(kv->swap_ops = calloc(kv->n_tensors, sizeof(*kv->swap_ops))))
        rc = vmem__error(-ENOMEM, "no memory to copy %u tensors", kv->n_tensors);
    if (rc)
        return vmem__kv_leave(kv, rc);
    struct kv_slot *s = &kv->slots[slot];
    struct kv_idle *idle = &kv->idle[slot];
    uint64_t n;
    vmem__kv_unstage(kv, slot);
    s->state = VMEM_KV_SWAPPING;
    idle->host = host;
    idle->copied = 0;
    idle->size = vmem__kv_swap_ops(kv, slot, 0, true, 0, 0, NULL, &n);
    idle->ends = step; // fresh slots, too: kernels may still write the attached rows
    kv->n_ending++;
    kv->retired = vmem__kv_ended(kv);
    vmem__kv_end_requests(kv); // the slot may be due already; on failure, the next step tries again
    vmem__kv_keep_budget(kv);
    return vmem__kv_leave(kv, 0);
}
