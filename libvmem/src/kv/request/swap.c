// Swaps requests out to CPU memory and back in.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/request/request.h"

static int check_host(const vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    const uint64_t size = vmem__kv_swap_size(kv, slot);
    if (!host)
        return vmem__error(-EINVAL, "host must not be NULL");
    if (bytes < size)
        return vmem__error(-EINVAL, "bytes %" PRIu64 ": slot %u needs %" PRIu64, bytes, slot, size);
    return 0;
}

static int check_out(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    int rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && !kv->slots[slot].tokens)
        rc = vmem__error(-EINVAL, "slot %u has no tokens", slot);
    if (!rc)
        rc = check_host(kv, slot, host, bytes);
    return rc;
}

static int swap_out(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes, uint64_t after)
{
    int rc = check_out(kv, slot, host, bytes);
    if (!rc)
        rc = vmem__kv_check_fence(kv, after);
    if (rc)
        return rc;
    struct kv_idle *idle = &kv->idle[slot];
    idle->host = host;
    idle->copied = 0;
    idle->size = vmem__kv_swap_size(kv, slot);
    idle->ends = after; // fresh slots, too: kernels may still write the attached rows
    vmem__kv_set_state(kv, slot, KV_SWAPPING);
    if (!after) {
        rc = vmem__kv_swap_now(kv, slot);
        if (kv->slots[slot].state == VMEM_KV_SWAPPED) // only the copy is valid: what was not unmapped, others take back
            return 0;
        vmem__kv_set_state(kv, slot, VMEM_KV_ACTIVE);
        return rc;
    }
    vmem__kv_end_requests(kv, vmem__kv_ended(kv)); // the slot may be due already; on failure, the next step tries again
    vmem__kv_keep_budget(kv);
    return 0;
}

int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes, uint64_t after)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, swap_out(kv, slot, host, bytes, after));
}

// Whether there is memory for the slot's rows.
static int would_swap_in(vmem_kv *kv, uint32_t slot)
{
    const uint32_t tokens = kv->slots[slot].tokens;
    uint64_t pages = 0;
    if (kv->slots[slot].state == KV_SWAPPING) // its rows need no copy, and its pages are there
        return 0;
    for (const struct kv_group *g = kv->groups; g < kv->groups + kv->n_groups; g++)
        pages += (uint64_t)(vmem__kv_need_hi(kv, g, tokens) - vmem__kv_need_lo(kv, g, tokens)) * g->n;
    return vmem__kv_would_fit(kv, (int64_t)pages, pages);
}

static int swap_in(vmem_kv *kv, uint32_t slot, const void *host)
{
    struct kv_slot *s = &kv->slots[slot];
    if (s->state == KV_SWAPPING) { // no row has been given up yet
        vmem__kv_set_state(kv, slot, VMEM_KV_ACTIVE);
        s->took = (uint32_t)kv->fence.step; // as if the rows had come back
        return 0;
    }
    int rc = vmem__kv_cut_slot(kv, slot); // unmap the pages that swap_out may have left
    vmem__kv_grow_reset(&kv->grow);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_group *g = &kv->groups[i];
        const uint32_t hi = vmem__kv_need_hi(kv, g, s->tokens);
        rc = vmem__kv_grow_to(kv, &kv->grow, slot, i, vmem__kv_need_lo(kv, g, s->tokens), hi, hi);
    }
    if (!rc)
        rc = vmem__kv_lacks(kv, (int64_t)kv->grow.total, kv->grow.total);
    if (!rc)
        rc = vmem__kv_grow_all(kv, &kv->grow, KV_TRIES);
    if (rc)
        return rc;
    rc = vmem__kv_swap_copy(kv, slot, (uintptr_t)host, false, 0, UINT64_MAX);
    if (rc) {
        vmem__kv_cut_slot(kv, slot);
        return rc;
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->need = sp->keep = (struct kv_range){sp->lo, sp->hi};
    }
    kv->stats.swap_in_bytes += vmem__kv_swap_size(kv, slot);
    s->fresh = true;
    vmem__kv_set_state(kv, slot, VMEM_KV_ACTIVE);
    s->took = (uint32_t)kv->fence.step;
    return 0;
}

int vmem_kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes, uint32_t flags)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__check_flags(flags, VMEM_KV_DRY);
    vmem__kv_enough();
    if (!rc)
        rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_SWAPPED | 1u << KV_SWAPPING);
    if (!rc && flags)
        return vmem__kv_leave(kv, would_swap_in(kv, slot));
    if (!rc)
        rc = check_host(kv, slot, host, bytes);
    if (!rc)
        rc = swap_in(kv, slot, host);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    return vmem__kv_leave(kv, rc);
}
