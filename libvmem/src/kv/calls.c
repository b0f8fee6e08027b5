// How every public call begins and ends. Only this file takes the locks for calls; state.h states the lock order.
//
// SPDX-License-Identifier: MIT
#include "core/memory.h"
#include "kv/kv.h"

static int __attribute__((cold)) unusable(const vmem_kv *kv)
{
    if (kv->closing)
        return vmem__error(-EINVAL, "the cache is being closed: it accepts only retire");
    return vmem__error(-EPERM, "this KV cache belongs to process %d, which forked", (int)kv->pid);
}

int vmem__kv_check_usable(const vmem_kv *kv)
{
    // A system call for the process ID would take longer than a step with nothing to do.
    return *kv->owned ? 0 : unusable(kv);
}

int vmem__kv_enter_step(vmem_kv *kv)
{
    if (!kv)
        return vmem__error(-EINVAL, "kv is NULL");
    int rc = vmem__kv_check_usable(kv);
    if (rc)
        return rc;
    pthread_mutex_lock(&kv->api);
    pthread_mutex_lock(&kv->state);
    rc = vmem__kv_check_usable(kv); // another thread may have closed the cache while this one waited
    if (rc) {
        pthread_mutex_unlock(&kv->state);
        pthread_mutex_unlock(&kv->api);
        return rc;
    }
    kv->called = true;
    return 0;
}

int vmem__kv_check_sharing(const vmem_kv *kv)
{
    return kv->flags & VMEM_KV_UNSHARED
               ? vmem__error(-EOPNOTSUPP, "the cache was created for requests that share no pages (VMEM_KV_UNSHARED)")
               : 0;
}

int vmem__kv_enter(vmem_kv *kv)
{
    int rc = vmem__kv_enter_step(kv);
    if (!rc)
        vmem__kv_may_take_long(kv);
    return rc;
}

int vmem__kv_leave(vmem_kv *kv, int rc)
{
    if (kv->flags & VMEM_KV_CHECK && !rc)
        rc = vmem__kv_check_books(kv);
    kv->stale = true;
    kv->calls++;
    // Idle steps defer aggregation to the next query; the published view may lag.
    if (kv->long_call || (kv->view && vmem__kv_coarse_now() - kv->summarised > KV_VIEW_NS))
        vmem__kv_summarise(kv);
    kv->long_call = false;
    kv->called = false;
    pthread_mutex_unlock(&kv->state);
    pthread_mutex_unlock(&kv->api);
    return rc;
}

const char *vmem__kv_state_name(uint8_t state)
{
    static const char *const names[] = {"free", "active", "swapped out", "being given up", "being swapped out"};
    return names[state];
}

int vmem__kv_get_beside(const vmem_kv *kv, uint32_t slot, uint32_t states)
{
    if (slot >= kv->n_slots)
        return vmem__error(-EINVAL, "slot %u: there are %u", slot, kv->n_slots);
    if (!(states >> kv->slots[slot].state & 1))
        return vmem__error(-EINVAL, "slot %u is %s", slot, vmem__kv_state_name(kv->slots[slot].state));
    return 0;
}

int vmem__kv_get(vmem_kv *kv, uint32_t slot, uint32_t states)
{
    int rc = vmem__kv_get_beside(kv, slot, states);
    if (!rc)
        vmem__kv_wait_slot(kv, slot);
    return rc;
}

int vmem__kv_get_new(vmem_kv *kv, uint32_t slot)
{
    int rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && (!kv->slots[slot].fresh || kv->slots[slot].tokens))
        rc = vmem__error(-EINVAL, "slot %u is not newly allocated", slot);
    return rc;
}
