// How every public call begins and ends. book/state.h states the order of the locks.
//
// SPDX-License-Identifier: MIT
#include "kv/memory/memory.h"

int vmem__kv_enter_step(vmem_kv *kv)
{
    if (!kv)
        return vmem__error(-EINVAL, "kv is NULL");
    int rc = vmem__kv_check_usable(kv);
    if (rc)
        return rc;
    pthread_mutex_lock(&kv->gate.api);
    pthread_mutex_lock(&kv->gate.state);
    rc = vmem__kv_check_usable(kv); // another thread may have closed the cache while this one waited
    if (rc) {
        pthread_mutex_unlock(&kv->gate.state);
        pthread_mutex_unlock(&kv->gate.api);
        return rc;
    }
    kv->gate.called = true;
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
    kv->report.stale = true;
    kv->gate.calls++;
    // Idle steps defer aggregation to the next query; the published view may lag.
    if (kv->report.long_call || (kv->view.map && vmem__kv_coarse_now() - kv->report.summarised > KV_VIEW_NS))
        vmem__kv_summarise(kv);
    kv->report.long_call = false;
    kv->gate.called = false;
    pthread_mutex_unlock(&kv->gate.state);
    pthread_mutex_unlock(&kv->gate.api);
    return rc;
}
