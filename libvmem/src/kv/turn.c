// Turns: calls, the background thread and the kernels in flight take turns at a slot.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// ---- the worker -----------------------------------------------------------------------------------------------------

void (*_Atomic vmem__kv_hook)(enum vmem__kv_point point);

static void wait_for_worker(vmem_kv *kv)
{
    kv_at(KV_CALL_WAITS);
    pthread_cond_wait(&kv->turn.done, &kv->gate.state);
    kv_at(KV_CALL_WAITED);
}

void vmem__kv_wait_slot(vmem_kv *kv, uint32_t slot)
{
    while (kv->slots[slot].busy)
        wait_for_worker(kv);
}

void vmem__kv_wait_idle(vmem_kv *kv)
{
    while (kv->turn.has_worker && (kv->turn.due || kv->turn.working))
        wait_for_worker(kv);
}

void vmem__kv_worker_pause(vmem_kv *kv)
{
    kv->turn.pauses++;
    while (kv->turn.working)
        wait_for_worker(kv);
}

void vmem__kv_worker_resume(vmem_kv *kv)
{
    if (--kv->turn.pauses == 0 && kv->turn.due)
        pthread_cond_signal(&kv->turn.work);
}

// Slots that were not busy are still not busy.
void vmem__kv_wait_job(vmem_kv *kv)
{
    vmem__kv_worker_pause(kv);
    vmem__kv_worker_resume(kv);
}

void vmem__kv_wait_unmapping(vmem_kv *kv)
{
    if (kv->turn.unmapping)
        vmem__kv_wait_job(kv);
}

void vmem__kv_wait_cutting(vmem_kv *kv)
{
    if (kv->turn.unmapping || kv->turn.cutting)
        vmem__kv_wait_job(kv);
}

void vmem__kv_worker_wake(vmem_kv *kv)
{
    if (!kv->turn.has_worker || kv->turn.due)
        return;
    kv->turn.due = true;
    if (!kv->turn.pauses)
        pthread_cond_signal(&kv->turn.work);
}

static int __attribute__((cold)) unusable(const vmem_kv *kv)
{
    if (!kv)
        return vmem__error(-EINVAL, "kv is NULL");
    if (kv->closed)
        return vmem__error(-EINVAL, "the cache is closed");
    return vmem__error(-EPERM, "this KV cache belongs to process %d, which forked", (int)kv->pid);
}

int vmem__kv_check_usable(const vmem_kv *kv)
{
    // A system call for the process ID would take longer than a step with nothing to do.
    return kv && *kv->owned ? 0 : unusable(kv);
}

// ---- kernels in flight ----------------------------------------------------------------------------------------------

// When the last step was made, up to steps_in_flight steps before it were in flight. Kernels of all of these may still
// run.
uint64_t vmem__kv_last_ended_step(const vmem_kv *kv)
{
    return MAX(kv->fence.retired, sat_sub(kv->fence.step, (uint64_t)kv->steps_in_flight + 1));
}

int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step)
{
    if (step && step >> KV_STEP_TAG != kv->fence.step >> KV_STEP_TAG)
        return vmem__error(-EINVAL, "step %" PRIu64 " is no step of this cache; its last one is %" PRIu64, step,
                           kv->fence.step);
    if (step > kv->fence.step)
        return vmem__error(-EINVAL, "step %" PRIu64 " has not been made yet; the last is %" PRIu64, step,
                           kv->fence.step);
    return 0;
}

void vmem__kv_clear_history(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k + 1 < kv->steps_in_flight; k++)
            kv_past_of(kv, slot, i)[k] = (struct kv_range){0};
}
