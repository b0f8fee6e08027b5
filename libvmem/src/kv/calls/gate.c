// How every public call begins and ends. book/state.h states the order of the locks.
//
// SPDX-License-Identifier: MIT
#include "kv/calls/calls.h"

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
