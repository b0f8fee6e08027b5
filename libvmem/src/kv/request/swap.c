// Swaps requests out and back in. The caller copies the rows: this file gives up their pages, and backs them again.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/request/request.h"

// Bytes of the pages that the next token can read, up to the last row.
static uint64_t bytes_of(const vmem_kv *kv, uint32_t slot)
{
    uint64_t bytes = 0;
    for (const struct kv_group *g = kv->groups; g < kv->groups + kv->n_groups; g++) {
        const uint32_t tokens = kv->slots[slot].tokens;
        const uint64_t passed = (uint64_t)vmem__kv_need_lo(kv, g, tokens) << kv->page_shift;
        bytes += (KV_MIN(tokens, g->max_tokens) * g->row_bytes - passed) * g->n;
    }
    return bytes;
}

static int swap_out(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step)
{
    struct kv_slot *s = &kv->slots[slot];
    int rc = vmem__kv_check_fence(kv, step);
    if (!rc)
        rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (rc)
        return rc;
    if (!s->tokens)
        return vmem__error(-EINVAL, "slot %u has no tokens", slot);
    if (s->tokens != tokens || kv_absent(kv, slot) < kv->fence.step - step)
        return vmem__error(-EBUSY,
                           "slot %u has %u tokens and has made a step since step %" PRIu64
                           ": its %u rows were copied too early",
                           slot, s->tokens, step, tokens);
    kv->stats.swap_out_bytes += bytes_of(kv, slot);
    s->fresh = true; // the caller guarantees that no kernel accesses the slot
    vmem__kv_set_state(kv, slot, VMEM_KV_SWAPPED);
    s->shared_tokens = 0;
    kv->idle[slot].parked = 0; // its pages are the first to be taken back
    vmem__kv_forget(kv, slot);
    vmem__kv_cut_slot(kv, slot); // what could not be unmapped, others take back
    return 0;
}

int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_worker_hold(kv); // a slot that is swapped out is the first that it would take pages from
    rc = swap_out(kv, slot, tokens, step);
    vmem__kv_worker_release(kv);
    return vmem__kv_leave(kv, rc);
}

// Whether there is memory for the slot's rows.
static int would_swap_in(vmem_kv *kv, uint32_t slot)
{
    const uint32_t tokens = kv->slots[slot].tokens;
    uint64_t pages = 0;
    for (const struct kv_group *g = kv->groups; g < kv->groups + kv->n_groups; g++)
        pages += (uint64_t)(vmem__kv_need_hi(kv, g, tokens) - vmem__kv_need_lo(kv, g, tokens)) * g->n;
    return vmem__kv_would_fit(kv, (int64_t)pages, pages);
}

static int swap_in(vmem_kv *kv, uint32_t slot)
{
    struct kv_slot *s = &kv->slots[slot];
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
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->need = sp->keep = (struct kv_range){sp->lo, sp->hi};
    }
    kv->stats.swap_in_bytes += bytes_of(kv, slot);
    s->fresh = true;
    vmem__kv_set_state(kv, slot, VMEM_KV_ACTIVE);
    s->took = (uint32_t)kv->fence.step;
    return 0;
}

int vmem_kv_swap_in(vmem_kv *kv, uint32_t slot, uint32_t flags)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__check_flags(flags, VMEM_KV_DRY);
    vmem__kv_enough();
    vmem__kv_worker_hold(kv);
    if (!rc)
        rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_SWAPPED);
    if (!rc)
        rc = flags ? would_swap_in(kv, slot) : swap_in(kv, slot);
    vmem__kv_worker_release(kv);
    if (rc == -ENOMEM && !flags)
        vmem__kv_count_shortage(kv);
    return vmem__kv_leave(kv, rc);
}
