// The budget.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/memory/memory.h"

int vmem__kv_set_budget(vmem_kv *kv, uint64_t bytes)
{
    uint64_t pages = bytes >> kv->page_shift;
    bool lazy = kv->flags & VMEM_KV_LAZY;
    if (!pages)
        return vmem__error(-EINVAL, "bytes %" PRIu64 " is less than a page, %" PRIu64, bytes, kv->page_size);
    if (pages > kv->ledger.budget) {
        int rc = lazy ? 0 : vmem__kv_take_ahead(kv, pages);
        if (!rc)
            kv->ledger.budget = pages;
        return rc;
    }
    int rc = vmem__kv_reclaim_to(kv, pages, true);
    if (rc)
        return rc;
    kv->ledger.budget = pages;
    vmem__kv_give_ahead(kv, lazy ? 0 : pages);
    // Keep the pages that the budget still allows taken ahead. If another process took the memory first, create pages
    // when they are needed.
    if (!lazy && vmem__kv_take_ahead(kv, pages))
        vmem__kv_promise(kv, 0);
    return 0;
}

void vmem__kv_take_wanted(vmem_kv *kv)
{
    uint64_t wanted = kv->lend.member ? 0 : vmem__kv_wanted_budget(kv); // the pool's thread serves members
    if (!wanted)
        return;
    vmem__kv_may_take_long(kv);
    vmem__kv_answer_wanted(kv, wanted, vmem__kv_set_budget(kv, wanted), VMEM_KV_NO_MEMORY);
}

void vmem__kv_keep_budget(vmem_kv *kv)
{
    if (kv->ledger.held > kv->ledger.budget && !kv->lend.giving)
        vmem__kv_reclaim_to(kv, kv->ledger.budget, true);
}

int vmem__kv_reclaim_bytes(vmem_kv *kv, uint64_t bytes, uint64_t *freed)
{
    const uint64_t pages = bytes == UINT64_MAX ? bytes : kv_ceil_pages(bytes, kv);
    vmem__kv_worker_hold(kv); // what it makes or gives back is not this call's
    const uint64_t before = kv->ledger.held;
    int rc = vmem__kv_reclaim_to(kv, kv_less(before, pages), false);
    if (rc == -ENOMEM) // the system has no mappings to cut the rest: less is freed, and nothing is lost
        rc = 0;
    *freed = (before - kv->ledger.held) << kv->page_shift;
    vmem__kv_worker_release(kv);
    vmem__kv_give_ahead(kv, 0);
    return rc;
}
