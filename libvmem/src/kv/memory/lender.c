// What the cache asks of the pool that it is a member of.
//
// SPDX-License-Identifier: MIT
#include "core/memory.h"
#include "kv/memory/memory.h"

void vmem__kv_claim(vmem_kv *kv, uint64_t least, uint64_t most)
{
    kv->lend.giving = false; // a cache that is short itself keeps what it has not given back yet
    kv->ledger.budget += vmem__pool_claim(kv->lend.member, kv->ledger.budget, least, most);
}

void vmem__kv_claim_plenty(vmem_kv *kv)
{
    if (!kv->lend.member || kv->lend.giving)
        return;
    const uint64_t want = kv->ledger.held + kv->ledger.held / 2;
    if (want > kv->ledger.budget && kv_unused(kv) < 2 * kv_low(kv) + kv->ledger.held / 8)
        vmem__kv_claim(kv, 0, want - kv->ledger.budget);
}

void vmem__kv_foresee(vmem_kv *kv, uint64_t want, bool part)
{
    if (!kv->lend.member)
        return;
    kv->lend.giving &= want <= kv->ledger.budget;
    kv->ledger.budget += vmem__pool_foresee(kv->lend.member, kv->ledger.budget, want, part);
    kv->lend.foresees = want != 0;
}

void vmem__kv_pool_leave(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->gate.api);
    pthread_mutex_lock(&kv->gate.state);
    struct vmem__member *m = kv->lend.member;
    kv->lend.member = NULL;
    kv->lend.giving = kv->lend.foresees = false;
    vmem__expect(kv->ctx, 0, -(int64_t)kv->lend.missed);
    kv->lend.missed = 0;
    if (m) // what it has not used goes back now
        kv->ledger.budget = KV_MIN(kv->ledger.budget, kv->ledger.held);
    const uint64_t held = kv->ledger.held;
    pthread_mutex_unlock(&kv->gate.state);
    pthread_mutex_unlock(&kv->gate.api);
    if (!m) // of no pool, or closed already
        return;
    vmem__pool_leave(m, held);
    kv->lend.left = m;
}
