// Ends requests: at once, or once the kernels of a step have ended.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/request/request.h"

static int end_now(vmem_kv *kv, uint32_t slot)
{
    int rc = 0;
    struct kv_slot *s = &kv->slots[slot];
    const bool fresh = s->fresh;
    vmem__kv_shared_tokens(kv, slot);
    s->fresh = true;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        rc = kv->flags & VMEM_KV_DEFER ? vmem__kv_park(kv, slot, i) : vmem__kv_cut_now(kv, slot, i, 0, 0);
    if (rc) {
        s->fresh = fresh;
        return rc;
    }
    vmem__kv_forget(kv, slot);
    vmem__kv_unpin(kv, slot);
    s->dirty = kv->flags & VMEM_KV_ZERO && vmem__kv_has_pages(kv, slot);
    struct kv_idle *idle = &kv->idle[slot];
    idle->from = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        idle->from = KV_MAX(idle->from, (uint32_t)(((uint64_t)kv_span(kv, slot, i)->lo << kv->page_shift) /
                                                   kv->groups[i].row_bytes));
    vmem__kv_set_state(kv, slot, VMEM_KV_FREE);
    s->tokens = s->shared_tokens = 0;
    s->skip = s->stuck = false;
    idle->parked = ++kv->clock;
    vmem__kv_release_soon(kv); // and has the worker do what the next request needs
    return 0;
}

int vmem__kv_free_slots(vmem_kv *kv, const uint32_t *slots, uint64_t n)
{
    int rc = 0;
    vmem__kv_worker_hold(kv); // while the call waits for one of them, it could begin at another
    for (uint64_t k = 0; k < n && !rc; k++)
        rc = vmem__kv_get(kv, slots[k], 1u << VMEM_KV_ACTIVE);
    rc = rc ? rc : vmem__kv_cut_slots(kv, slots, n);
    for (uint64_t k = 0; k < n && !rc; k++)
        rc = end_now(kv, slots[k]);
    vmem__kv_worker_release(kv);
    vmem__kv_keep_budget(kv);
    return rc;
}

static int end_after(vmem_kv *kv, uint32_t slot, uint64_t step)
{
    if (step <= vmem__kv_ended(kv) || kv->slots[slot].fresh)
        return end_now(kv, slot);
    kv->idle[slot].ends = step;
    vmem__kv_set_state(kv, slot, KV_ENDING);
    return 0;
}

int vmem_kv_free(vmem_kv *kv, uint32_t slot, uint64_t after)
{
    int rc = vmem__kv_enter_step(kv);
    if (rc)
        return rc;
    // Where the slot keeps its pages and the background thread unmaps shared ones, there is nothing to wait for.
    if (!(kv->flags & VMEM_KV_DEFER) || !kv->turn.has_worker || kv->ledger.held > kv->ledger.budget)
        vmem__kv_may_take_long(kv);
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED);
    if (!rc)
        rc = vmem__kv_check_fence(kv, after);
    if (!rc)
        rc = after ? end_after(kv, slot, after) : end_now(kv, slot);
    if (!rc)
        vmem__kv_keep_budget(kv);
    return vmem__kv_leave(kv, rc);
}

int vmem__kv_end_requests(vmem_kv *kv, uint64_t step)
{
    int rc = 0;
    kv->fence.retired = KV_MAX(kv->fence.retired, step);
    for (uint32_t s = 0; s < kv->n_slots && kv_waiting(kv); s++) {
        if (kv->slots[s].state != KV_ENDING || kv->idle[s].ends > kv->fence.retired)
            continue;
        vmem__kv_wait_slot(kv, s);
        const int failed = end_now(kv, s);
        rc = rc ? rc : failed;
    }
    return rc;
}

int vmem__kv_retire_to(vmem_kv *kv, uint64_t step)
{
    int rc = vmem__kv_check_fence(kv, step);
    if (!rc) {
        rc = vmem__kv_end_requests(kv, KV_MAX(vmem__kv_ended(kv), step));
        vmem__kv_keep_budget(kv);
    }
    return rc;
}
