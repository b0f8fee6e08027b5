// Fences: the kernels that may be in flight, the memory that they access, and the lengths staged for the next step.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/book/book.h"

static struct kv_past *past_of(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return kv->fence.past + ((uint64_t)slot * kv->n_groups + group) * (kv->steps_in_flight - 1);
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

// Kernels of the last step, and of the steps in flight at that time, may still run.
uint64_t vmem__kv_ended(const vmem_kv *kv)
{
    uint64_t running = (uint64_t)kv->steps_in_flight + 1;
    return KV_MAX(kv->fence.retired, kv->fence.step > running ? kv->fence.step - running : 0);
}

void vmem__kv_retired(vmem_kv *kv, uint64_t step)
{
    kv->fence.retired = step;
    for (uint32_t s = 0; s < kv->n_slots && kv_waiting(kv); s++)
        if (kv_swap_due(kv, s)) // now: once the lock is dropped, the background thread may copy it
            vmem__kv_book(kv, s);
}

int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step)
{
    if (step > kv->fence.step)
        return vmem__error(-EINVAL, "step %" PRIu64 " has not been made yet; the last is %" PRIu64, step,
                           kv->fence.step);
    return 0;
}

void vmem__kv_stage(vmem_kv *kv, uint32_t slot, int32_t tokens, int64_t reserve)
{
    kv->staged.n += (tokens != 0) - (kv->staged.lengths[slot] != 0);
    kv->ledger.reserved += reserve - kv->staged.reserve[slot];
    kv->staged.lengths[slot] = tokens;
    kv->staged.reserve[slot] = reserve;
}

int vmem__kv_check_staged(const vmem_kv *kv, uint32_t slot, uint32_t rows)
{
    const int32_t tokens = kv->staged.lengths[slot];
    if (!tokens || (uint32_t)tokens >= rows)
        return 0;
    return vmem__error(-EINVAL,
                       "slot %u: a step to %d tokens is staged, and rows up to %u would be shared; commit or unstage "
                       "it first",
                       slot, tokens, rows);
}

void vmem__kv_unstage(vmem_kv *kv, uint32_t slot)
{
    if (kv->staged.n)
        vmem__kv_stage(kv, slot, 0, 0);
}

void vmem__kv_forget(vmem_kv *kv, uint32_t slot)
{
    vmem__kv_unstage(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k + 1 < kv->steps_in_flight; k++)
            past_of(kv, slot, i)[k] = (struct kv_past){0};
}
