// The ledger's answers: whether there is memory for what calls are about to fix. They are arithmetic: what could be
// taken back is not looked at, and what the background thread is about changes none of them.
//
// SPDX-License-Identifier: MIT
#include "kv/memory/memory.h"

uint64_t vmem__kv_watermark(const vmem_kv *kv)
{
    uint64_t part = (kv->ledger.budget * kv->ledger.watermark_percent + 99) / 100;
    return KV_MIN(KV_MAX(kv->ledger.watermark_pages, part), kv->ledger.budget);
}

int vmem__kv_lacks(vmem_kv *kv, int64_t delta, uint64_t pages)
{
    const uint64_t want = kv->ledger.fixed + (uint64_t)delta;
    vmem__kv_claim_for(kv, want, pages);
    return delta > 0 && want > kv->ledger.budget ? vmem__kv_short_of_budget(kv, want) : 0;
}

int vmem__kv_would_fit(vmem_kv *kv, int64_t delta, uint64_t pages)
{
    const uint64_t want = kv->ledger.fixed + (uint64_t)delta;
    vmem__kv_enough();
    int rc = vmem__kv_lacks(kv, delta, pages);
    const uint64_t limit = rc || !pages || delta <= 0 ? want : vmem__kv_limit(kv, want);
    return want > limit ? vmem__kv_short_of_device(kv, want - limit) : rc;
}

bool vmem__kv_keeps_staged(vmem_kv *kv)
{
    const uint64_t want = kv->ledger.fixed + (uint64_t)kv->ledger.reserved;
    vmem__kv_claim_staged(kv, want);
    return want <= vmem__kv_limit(kv, want);
}
