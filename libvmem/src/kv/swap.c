// Swaps requests out to CPU memory and back in.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>

#include "kv/kv.h"

// Lists the copies of the rows that the next token can read. Returns their total size in bytes.
uint64_t vmem__kv_swap_ops(const vmem_kv *kv, uint32_t slot, uint64_t host, bool out, uint64_t from, uint64_t to,
                           struct vmem_copy_op *ops, uint64_t *n)
{
    uint64_t size = 0;
    *n = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint32_t tokens = kv->slots[slot].tokens, lo = vmem__kv_need_lo(kv, g, tokens);
        uint64_t length = KV_MIN(tokens, g->max_tokens) * g->row_bytes - ((uint64_t)lo << kv->page_shift);
        for (uint32_t t = 0; t < g->n && length; t++, size += length) {
            const uint64_t begin = KV_MAX(from, size), end = KV_MIN(to, size + length);
            if (begin >= end)
                continue;
            uint64_t addr = kv_addr(kv, g, slot, t, lo) + (begin - size);
            ops[(*n)++] = (struct vmem_copy_op){.dst = out ? host + begin : addr,
                                                .src = out ? addr : host + begin,
                                                .length = end - begin};
        }
    }
    return size;
}

static int copy(vmem_kv *kv, uint32_t slot, uint64_t host, bool out)
{
    uint64_t n;
    struct vmem_copy_op *ops = calloc(kv->n_tensors, sizeof(*ops));
    if (!ops)
        return vmem__error(-ENOMEM, "no memory to copy %u tensors", kv->n_tensors);
    uint64_t size = vmem__kv_swap_ops(kv, slot, host, out, 0, UINT64_MAX, ops, &n);
    int rc = vmem_copy_batch(kv->ctx, ops, n);
    if (!rc)
        *(out ? &kv->stats.swap_out_bytes : &kv->stats.swap_in_bytes) += size;
    free(ops);
    return rc;
}

static uint64_t size_of(const vmem_kv *kv, uint32_t slot)
{
    uint64_t n;
    return vmem__kv_swap_ops(kv, slot, 0, true, 0, 0, NULL, &n);
}

static int check_host(const vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    const uint64_t size = size_of(kv, slot);
    if (!host)
        return vmem__error(-EINVAL, "host must not be NULL");
    if (bytes < size)
        return vmem__error(-EINVAL, "bytes %" PRIu64 ": slot %u needs %" PRIu64, bytes, slot, size);
    return 0;
}

int vmem__kv_swap_check(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    int rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && !kv->slots[slot].tokens)
        rc = vmem__error(-EINVAL, "slot %u has no tokens", slot);
    if (!rc)
        rc = check_host(kv, slot, host, bytes);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) // after a truncation, the next token may read rows that are gone
        if (vmem__kv_need_lo(kv, &kv->groups[i], kv->slots[slot].tokens) < vmem__kv_has_from(kv, slot, i))
            rc = vmem__error(-ENODATA, "slot %u: the window has given up rows that the next token reads", slot);
    return rc;
}

int vmem_kv_swap_size(vmem_kv *kv, uint32_t slot, uint64_t *bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    const uint32_t states = 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED | 1u << VMEM_KV_SWAPPING;
    rc = bytes ? vmem__kv_get(kv, slot, states) : vmem__error(-EINVAL, "bytes must not be NULL");
    if (!rc)
        *bytes = size_of(kv, slot);
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_swap_check(kv, slot, host, bytes);
    if (!rc)
        rc = copy(kv, slot, (uintptr_t)host, true);
    if (rc)
        return vmem__kv_leave(kv, rc);
    struct kv_slot *s = &kv->slots[slot];
    s->fresh = true; // the caller guarantees that no kernel accesses the slot
    vmem__kv_forget(kv, slot);
    bool gone = false;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        bool some = kv_span(kv, slot, i)->hi;
        rc = vmem__kv_cut_now(kv, slot, i, 0, 0);
        gone |= some && !rc;
    }
    if (rc && !gone)
        return vmem__kv_leave(kv, rc);
    // Once the first page is gone, only the copy is valid. Pages whose unmap failed are unmapped when the request is
    // swapped in.
    s->state = VMEM_KV_SWAPPED;
    s->shared_tokens = kv->idle[slot].named = 0;
    vmem__kv_worker_wake(kv);
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes, uint64_t *missing)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    vmem__kv_enough();
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_SWAPPED | 1u << VMEM_KV_SWAPPING);
    if (!rc)
        rc = check_host(kv, slot, host, bytes);
    // With SAME_SLOTS, the pages that the slot shares afterwards must not depend on the background thread's progress.
    if (!rc && kv->flags & VMEM_KV_SAME_SLOTS && kv_swap_due(kv, slot)) {
        vmem__kv_worker_hold(kv);
        rc = vmem__kv_swap_rest(kv, slot);
        vmem__kv_worker_release(kv);
    }
    struct kv_slot *s = &kv->slots[rc ? 0 : slot];
    if (!rc && s->state == VMEM_KV_SWAPPING) { // no row has been given up yet
        s->state = VMEM_KV_ACTIVE;
        s->took = (uint32_t)kv->step; // as if the rows had come back
        kv->n_ending--;
        return vmem__kv_leave(kv, 0);
    }
    if (!rc)
        rc = vmem__kv_cut_slot(kv, slot); // unmap the pages that swap_out may have left
    vmem__kv_grow_reset(&kv->grow);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_group *g = &kv->groups[i];
        rc = vmem__kv_grow_add(kv, &kv->grow, slot, i, vmem__kv_need_lo(kv, g, s->tokens),
                               vmem__kv_need_hi(kv, g, s->tokens), vmem__kv_need_hi(kv, g, s->tokens));
    }
    if (!rc)
        rc = vmem__kv_grow_all(kv, &kv->grow, missing);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    if (rc)
        return vmem__kv_leave(kv, rc);
    rc = copy(kv, slot, (uintptr_t)host, false);
    if (rc) {
        vmem__kv_cut_slot(kv, slot);
        return vmem__kv_leave(kv, rc);
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->need_lo = sp->keep_lo = sp->lo;
        sp->need_hi = sp->keep_hi = sp->hi;
    }
    s->state = VMEM_KV_ACTIVE;
    s->fresh = true;
    s->took = (uint32_t)kv->step;
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_swap_check(vmem_kv *kv, uint32_t slot, uint64_t *missing)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (missing)
        *missing = 0;
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_SWAPPED | 1u << VMEM_KV_SWAPPING);
    uint64_t pages = 0;
    bool there = !rc && kv->slots[slot].state == VMEM_KV_SWAPPING;
    if (there && kv->flags & VMEM_KV_SAME_SLOTS)
        there = !kv_swap_due(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups && !rc && !there; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint32_t tokens = kv->slots[slot].tokens;
        pages += (uint64_t)(vmem__kv_need_hi(kv, g, tokens) - vmem__kv_need_lo(kv, g, tokens)) * g->n;
    }
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_would_fit(kv, pages, missing));
}
