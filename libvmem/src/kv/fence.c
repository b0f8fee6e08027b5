// Fences: track the kernels that may be in flight, the memory they touch, and the work that waits for them.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

static struct kv_past *past_of(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return kv->past + ((uint64_t)slot * kv->n_groups + group) * (kv->steps_in_flight - 1);
}

struct kv_past vmem__kv_in_flight(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t lo, uint32_t hi)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    const struct kv_past *past = past_of(kv, slot, group);
    struct kv_past all = {lo, hi};
    if (s->need_lo != s->need_hi)
        all = (struct kv_past){KV_MIN(lo, s->need_lo), KV_MAX(hi, s->need_hi)};
    for (uint32_t i = 0; i + 1 < kv->steps_in_flight; i++)
        if (past[i].lo != past[i].hi)
            all = (struct kv_past){KV_MIN(all.lo, past[i].lo), KV_MAX(all.hi, past[i].hi)};
    return all;
}

void vmem__kv_remember(vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    struct kv_past *past = past_of(kv, slot, group);
    for (uint32_t i = kv->steps_in_flight - 1; i-- > 1;)
        past[i] = past[i - 1];
    if (kv->steps_in_flight > 1)
        past[0] = (struct kv_past){s->need_lo, s->need_hi};
}

void vmem__kv_forget(vmem_kv *kv, uint32_t slot)
{
    vmem__kv_unstage(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k + 1 < kv->steps_in_flight; k++)
            past_of(kv, slot, i)[k] = (struct kv_past){0};
}

// Kernels of the last step, and of the steps in flight at that time, may still run.
uint64_t vmem__kv_ended(const vmem_kv *kv)
{
    uint64_t running = (uint64_t)kv->steps_in_flight + 1;
    return KV_MAX(kv->retired, kv->step > running ? kv->step - running : 0);
}

int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step)
{
    if (step > kv->step)
        return vmem__error(-EINVAL, "step %" PRIu64 " was not made yet; the last is %" PRIu64, step, kv->step);
    return 0;
}

int vmem__kv_end_requests(vmem_kv *kv)
{
    int rc = 0;
    for (uint32_t s = 0; s < kv->n_slots && kv->n_ending; s++) {
        int failed = 0;
        if (kv->slots[s].state == VMEM_KV_ENDING && kv->idle[s].ends <= kv->retired) {
            vmem__kv_wait_slot(kv, s);
            failed = vmem__kv_free(kv, s);
        } else if (kv_swap_due(kv, s) && kv->has_worker) {
            kv->slots[s].skip = kv->slots[s].stuck = false;
            vmem__kv_worker_wake(kv);
        } else if (kv_swap_due(kv, s)) {
            failed = vmem__kv_swap_rest(kv, s);
            if (!failed)
                failed = vmem__kv_cut_slot(kv, s);
        }
        rc = rc ? rc : failed;
    }
    return rc;
}

int vmem_kv_last_step(vmem_kv *kv, uint64_t *step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (step)
        *step = kv->step;
    return vmem__kv_leave(kv, step ? 0 : vmem__error(-EINVAL, "step must not be NULL"));
}

int vmem__kv_retire(vmem_kv *kv, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_check_fence(kv, step);
    if (!rc) {
        kv->retired = KV_MAX(vmem__kv_ended(kv), step);
        rc = vmem__kv_end_requests(kv);
        vmem__kv_keep_budget(kv);
    }
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_retire(vmem_kv *kv, uint64_t step)
{
    if (!kv || !kv->closing)
        return vmem__kv_retire(kv, step);
    int rc = vmem__kv_check_fence(kv, step);
    if (!rc && step >= kv->closes)
        vmem_kv_destroy(kv);
    return rc;
}

int vmem__kv_free_after(vmem_kv *kv, uint32_t slot, uint64_t step)
{
    const bool swapping = kv->slots[slot].state == VMEM_KV_SWAPPING;
    if (swapping) // kernels up to the swap's step may also run
        step = KV_MAX(step, kv->idle[slot].ends);
    if (step <= vmem__kv_ended(kv) || kv->slots[slot].fresh)
        return vmem__kv_free(kv, slot);
    vmem__kv_unstage(kv, slot);
    kv->slots[slot].state = VMEM_KV_ENDING;
    kv->idle[slot].ends = step;
    kv->n_ending += !swapping;
    return 0;
}

int vmem_kv_free_after(vmem_kv *kv, uint32_t slot, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED | 1u << VMEM_KV_SWAPPING);
    if (!rc)
        rc = vmem__kv_check_fence(kv, step);
    rc = rc ? rc : vmem__kv_free_after(kv, slot, step);
    if (!rc)
        vmem__kv_keep_budget(kv);
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_truncate_after(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_check_truncate(kv, slot, tokens);
    if (!rc)
        rc = vmem__kv_check_fence(kv, step);
    if (rc)
        return vmem__kv_leave(kv, rc);
    struct kv_slot *s = &kv->slots[slot];
    // Even if the slot is fresh, kernels may still be writing the shared rows attached to it.
    const bool shared = tokens < s->shared_tokens || vmem__kv_others_read(kv, slot, tokens);
    if (step <= vmem__kv_ended(kv) || (s->fresh && !shared))
        return vmem__kv_leave(kv, vmem__kv_truncate(kv, slot, tokens));
    if (shared)
        return vmem__kv_leave(kv, vmem__error(-EBUSY,
                                              "tokens %u: rows from there on are shared, and kernels of step %" PRIu64
                                              " may be in flight",
                                              tokens, step));
    // Change no mapping that running kernels use. The rows go after later steps no longer ask for them. Rows in the
    // window of the shorter request stay, too.
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->need_lo = KV_MIN(sp->need_lo, vmem__kv_need_lo(kv, &kv->groups[i], tokens));
        sp->keep_lo = KV_MIN(sp->keep_lo, sp->need_lo);
    }
    vmem__kv_unstage(kv, slot);
    s->tokens = tokens;
    s->steady = 0;
    return vmem__kv_leave(kv, 0);
}

int vmem__kv_close(vmem_kv *kv, uint64_t step, bool *quiet)
{
    static const unsigned char none;
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_check_fence(kv, step);
    *quiet = step <= vmem__kv_ended(kv);
    if (!rc) {
        kv->closing = true;
        kv->closes = step;
        kv->owned = &none;
    }
    vmem__kv_leave(kv, rc);
    if (!rc) {
        vmem__kv_pool_leave(kv);
        vmem__kv_worker_stop(kv); // the worker copies no row after this
    }
    return rc;
}

int vmem_kv_destroy_after(vmem_kv *kv, uint64_t step)
{
    bool quiet = false;
    int rc = vmem__kv_close(kv, step, &quiet);
    if (quiet && !rc)
        vmem__kv_give_up(kv); // not the handle: callers need not know which steps are known to have ended
    return rc;
}
