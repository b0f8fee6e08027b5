// Public calls: what requests to come, runs and the cache's memory are told. Each enters the cache, and calls one
// function of a lower floor.
//
// SPDX-License-Identifier: MIT
#include <time.h>

#include "kv/calls/calls.h"

int vmem_kv_expect(vmem_kv *kv, const uint32_t *tokens, const uint32_t *prefix_tokens, size_t n)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_expect(kv, tokens, prefix_tokens, n));
}

// ---- runs ------------------------------------------------------------------------------------------------------------

int vmem_kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_share(kv, runs, n, flags));
}

int vmem_kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t most_pages, uint32_t flags, uint64_t *freed)
{
    uint64_t got = 0;
    int rc = vmem__kv_enter(kv);
    if (!rc)
        rc = vmem__kv_leave(kv, vmem__kv_drop(kv, runs, n, most_pages, flags, &got));
    if (freed)
        *freed = got;
    return rc;
}

int vmem_kv_order(vmem_kv *kv, const uint64_t *runs, size_t n, uint32_t keep)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_order(kv, runs, n, keep));
}

int vmem_kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_evicted(kv, runs, n, got));
}

int vmem_kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_get_run(kv, run, out));
}

// ---- memory ----------------------------------------------------------------------------------------------------------

int vmem_kv_set_budget(vmem_kv *kv, uint64_t bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (kv->lend.member)
        rc = vmem__error(-EINVAL,
                         "the cache is in a pool, which sets its budget: set the cache's share of the pool instead");
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_set_budget(kv, bytes));
}

int vmem_kv_set_watermark(vmem_kv *kv, uint64_t bytes, uint32_t percent)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (percent > 100)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "percent %u is over 100", percent));
    kv->ledger.watermark_pages = kv_ceil_pages(bytes, kv);
    kv->ledger.watermark_percent = percent;
    return vmem__kv_leave(kv, 0);
}

// Moves pages until they are as close together as they get, or another call arrives.
static int compact(vmem_kv *kv, uint64_t *freed)
{
    uint64_t before = 0, after, overhead, moved = 0, calls = 0;
    int rc;
    do {           // this ends, because pages move into full arenas, and stay there
        if (calls) // a mutex does not give way by itself
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        rc = vmem__kv_enter(kv);
        if (rc)
            return rc;
        if (!calls)
            rc = vmem__kv_device_bytes(kv, &before, &overhead);
        else if (kv->gate.calls != calls) // somebody needs the cache
            return vmem__kv_leave(kv, 0);
        vmem__kv_worker_hold(kv);
        rc = rc ? rc : vmem__kv_compact(kv, &moved);
        vmem__kv_worker_release(kv);
        if (!vmem__kv_device_bytes(kv, &after, &overhead) && after < before)
            *freed = before - after;
        calls = kv->gate.calls + 1;
        rc = vmem__kv_leave(kv, rc == -ENOMEM ? 0 : rc); // pages stay in place if there is no memory to move them
    } while (!rc && moved);
    return rc;
}

int vmem_kv_reclaim(vmem_kv *kv, uint64_t bytes, uint32_t what, uint64_t *freed)
{
    uint64_t got = 0;
    int rc = vmem__kv_enter(kv);
    if (freed)
        *freed = 0;
    if (rc)
        return rc;
    if (!what || what & ~(VMEM_KV_KEPT | VMEM_KV_COMPACT))
        rc = vmem__error(-EINVAL, "what %#x is 0 or has unknown bits", what);
    else if (what & VMEM_KV_KEPT)
        rc = vmem__kv_reclaim_bytes(kv, bytes, &got);
    rc = vmem__kv_leave(kv, rc);
    if (!rc && what & VMEM_KV_COMPACT)
        rc = compact(kv, &got);
    if (freed)
        *freed = got;
    return rc;
}

int vmem_kv_wait(vmem_kv *kv)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_wait_idle(kv);
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_publish(vmem_kv *kv, const char *path, const char *name)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_publish(kv, path, name));
}
