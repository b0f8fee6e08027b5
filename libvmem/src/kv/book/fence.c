// Fences: the kernels that may be in flight, and the memory that they access.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/book/book.h"

// Kernels of the last step, and of the steps in flight at that time, may still run.
uint64_t vmem__kv_ended(const vmem_kv *kv)
{
    return KV_MAX(kv->fence.retired, kv_less(kv->fence.step, (uint64_t)kv->steps_in_flight + 1));
}

int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step)
{
    if (step > kv->fence.step)
        return vmem__error(-EINVAL, "step %" PRIu64 " has not been made yet; the last is %" PRIu64, step,
                           kv->fence.step);
    return 0;
}

void vmem__kv_forget(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k + 1 < kv->steps_in_flight; k++)
            kv_past_of(kv, slot, i)[k] = (struct kv_range){0};
}
