// Swapping requests out to CPU memory and back.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>

#include "kv/kv.h"

// The rows of a slot that the next token can read, tensor after tensor; host NULL: only their size.
static uint64_t copies(const vmem_kv *kv, uint32_t slot, uint64_t host, bool out, struct vmem_copy_op *ops, uint64_t *n)
{
    uint64_t size = 0;
    *n = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint32_t tokens = kv->slots[slot].tokens, lo = vmem__kv_need_lo(kv, g, tokens);
        uint64_t length = KV_MIN(tokens, g->max_tokens) * g->row_bytes - ((uint64_t)lo << kv->page_shift);
        for (uint32_t t = 0; t < g->n && length; t++) {
            uint64_t addr = kv_addr(kv, g, slot, t, lo);
            if (ops)
                ops[*n] = (struct vmem_copy_op){.dst = out ? host + size : addr,
                                                .src = out ? addr : host + size,
                                                .length = length};
            ++*n;
            size += length;
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
    uint64_t size = copies(kv, slot, host, out, ops, &n);
    int rc = vmem_copy_batch(kv->ctx, ops, n);
    if (!rc)
        *(out ? &kv->stats.swap_out_bytes : &kv->stats.swap_in_bytes) += size;
    free(ops);
    return rc;
}

static int check(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    uint64_t n, size = copies(kv, slot, 0, true, NULL, &n);
    if (!host)
        return vmem__error(-EINVAL, "host must not be NULL");
    if (bytes < size)
        return vmem__error(-EINVAL, "bytes %" PRIu64 ": slot %u needs %" PRIu64, bytes, slot, size);
    return 0;
}

int vmem_kv_swap_size(vmem_kv *kv, uint32_t slot, uint64_t *bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    uint64_t n;
    rc = bytes ? vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED)
               : vmem__error(-EINVAL, "bytes is NULL");
    if (!rc)
        *bytes = copies(kv, slot, 0, true, NULL, &n);
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, void *host, uint64_t bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && !kv->slots[slot].tokens)
        rc = vmem__error(-EINVAL, "slot %u has no tokens", slot);
    if (!rc)
        rc = check(kv, slot, host, bytes);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) // after a truncation, rows may be asked for again that are gone
        if (vmem__kv_need_lo(kv, &kv->groups[i], kv->slots[slot].tokens) < kv_span(kv, slot, i)->lo)
            rc = vmem__error(-ENODATA, "slot %u: the window has given up rows that the next token reads", slot);
    if (!rc)
        rc = copy(kv, slot, (uintptr_t)host, true);
    if (rc)
        return vmem__kv_leave(kv, rc);
    struct kv_slot *s = &kv->slots[slot];
    s->fresh = true; // no kernel is touching it, says the caller
    vmem__kv_forget(kv, slot);
    bool gone = false;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        bool some = kv_span(kv, slot, i)->hi;
        rc = vmem__kv_cut_now(kv, slot, i, 0, 0);
        gone |= some && !rc;
    }
    if (rc && !gone)
        return vmem__kv_leave(kv, rc);
    // From the first page on that is gone, the copy is what counts. Pages that would not go do so when it comes back.
    s->state = VMEM_KV_SWAPPED;
    s->shared_tokens = 0;
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
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_SWAPPED);
    if (!rc)
        rc = check(kv, slot, host, bytes);
    if (!rc)
        rc = vmem__kv_cut_slot(kv, slot); // what swap_out may have left
    struct kv_slot *s = &kv->slots[rc ? 0 : slot];
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
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_SWAPPED);
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint32_t tokens = kv->slots[slot].tokens;
        pages += (uint64_t)(vmem__kv_need_hi(kv, g, tokens) - vmem__kv_need_lo(kv, g, tokens)) * g->n;
    }
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_would_fit(kv, pages, missing));
}
