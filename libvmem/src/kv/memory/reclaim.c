// Makes room: takes back memory that is kept for later use, and backs pages with it.
//
// SPDX-License-Identifier: MIT
#include "kv/memory/memory.h"

int vmem__kv_reclaim(vmem_kv *kv, uint64_t want, bool evict, uint64_t *got)
{
    uint64_t start = kv->ledger.held;
    struct kv_victim v;
    int rc = 0, refused = 0; // refused: no mappings to cut part of a span
    kv->stats.reclaims += want != 0;
    vmem__kv_release_doomed(kv);
    while (!rc && start - kv->ledger.held < want) {
        uint64_t left = want - (start - kv->ledger.held);
        bool some = vmem__kv_victim(kv, left, true, !refused, &v);
        if (!some && evict && vmem__kv_evictable(kv) && vmem__kv_evict(kv, left))
            continue;
        if (!some && !vmem__kv_victim(kv, left, false, !refused, &v)) {
            const uint32_t slot = vmem__kv_swap_next(kv);
            if (slot == UINT32_MAX)
                break;
            rc = vmem__kv_swap_rest(kv, slot);
            continue;
        }
        rc = vmem__kv_cut_now(kv, v.slot, v.group, v.lo, v.hi);
        // To cut a part of a span may need an additional mapping. To cut the whole span needs none.
        if (rc == -ENOMEM && kv->slots[v.slot].state == VMEM_KV_FREE)
            rc = vmem__kv_cut_now(kv, v.slot, v.group, 0, 0);
        if (rc == -ENOMEM) { // other slots may have pages whose end needs none
            kv->slots[v.slot].stuck = true;
            refused = rc;
            rc = 0;
        }
    }
    if (!rc && start - kv->ledger.held < want)
        rc = refused;
    kv->stats.reclaimed_pages += start - kv->ledger.held;
    if (got)
        *got = start - kv->ledger.held;
    return rc;
}

bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages)
{
    return !pages || (pages <= kv_unused(kv) && vmem__kv_leaves_others(kv, pages));
}

int vmem__kv_make_room(vmem_kv *kv, int64_t delta, uint64_t pages)
{
    if (vmem__kv_has_room(kv, pages))
        return 0;
    int rc = vmem__kv_lacks(kv, delta, pages);
    return rc ? rc : vmem__kv_take_room(kv, pages);
}

int vmem__kv_take_room(vmem_kv *kv, uint64_t pages)
{
    int rc = 0;
    vmem__kv_worker_hold(kv);
    const uint64_t most = KV_MAX(kv->ledger.held, kv->ledger.budget);
    if (kv->ledger.held + pages > kv->ledger.budget) {
        rc = vmem__kv_reclaim(kv, kv->ledger.held + pages - kv->ledger.budget, true, NULL);
        if (!rc && kv->ledger.held + pages > most) // reclaiming got less than counted on
            rc = vmem__kv_short_of_budget(kv, kv->ledger.held + pages);
    }
    if (!rc && !vmem__kv_leaves_others(kv, pages))
        rc = vmem__kv_make_device_room(kv, pages);
    vmem__kv_worker_release(kv);
    return rc;
}

int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages)
{
    vmem__kv_worker_hold(kv);
    uint64_t device = vmem__kv_device_pages(kv), kept = kv_less(kv->ledger.held, kv->ledger.fixed);
    int rc;
    if (pages > device && pages - device > kept)
        rc = vmem__kv_short_of_device(kv, pages - device - kept);
    else if (!kept)
        rc = vmem__kv_short_of_device(kv, pages);
    else
        rc = vmem__kv_reclaim(kv, pages > device ? pages - device : pages, true, NULL);
    vmem__kv_worker_release(kv);
    return rc;
}

// Unmaps free slots as a whole, which needs no additional mapping.
int vmem__kv_make_mappings(vmem_kv *kv, uint64_t pages)
{
    uint64_t before = kv->ledger.held;
    vmem__kv_worker_hold(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv->slots[s].state == VMEM_KV_FREE && !vmem__kv_stale_now(kv, s))
            vmem__kv_cut_slot(kv, s);
    vmem__kv_worker_release(kv);
    return kv->ledger.held < before ? 0 : vmem__kv_short_of_mappings(kv, pages);
}

static int run(vmem_kv *kv, struct kv_grow *l)
{
    kv->ledger.held += l->total;
    int rc = vmem__kv_grow_run(kv, l);
    if (rc)
        kv->ledger.held -= l->total;
    return rc;
}

int vmem__kv_grow_try(vmem_kv *kv, struct kv_grow *l)
{
    int rc = run(kv, l);
    if (!rc)
        vmem__kv_grow_commit(kv, l);
    return rc;
}

int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l)
{
    l->at = KV_GROW_LISTS;
    int rc = vmem__kv_has_room(kv, l->total) ? 0 : vmem__kv_take_room(kv, l->total);
    if (!rc)
        rc = run(kv, l);
    for (int tries = 2; rc == -ENOMEM && l->at != KV_GROW_LISTS && tries; tries--) {
        bool create = l->at == KV_GROW_CREATE;
        rc = create ? vmem__kv_make_device_room(kv, l->total) : vmem__kv_make_mappings(kv, l->total + l->others);
        if (rc)
            break;
        rc = run(kv, l);
        if (rc == -ENOMEM && tries == 1)
            rc = create ? vmem__kv_short_of_device(kv, l->total) : vmem__kv_short_of_mappings(kv, l->total + l->others);
    }
    return rc;
}

int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l)
{
    int rc = vmem__kv_grow_make(kv, l);
    if (rc)
        vmem__kv_grow_reset(l);
    else
        vmem__kv_grow_commit(kv, l);
    return rc;
}
