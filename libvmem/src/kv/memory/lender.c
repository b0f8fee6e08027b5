// What the cache asks of the pool that it is a member of.
//
// SPDX-License-Identifier: MIT
#include "core/memory.h"
#include "kv/memory/memory.h"
#include "pool/lend.h"

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

uint64_t vmem__kv_claimable(const vmem_kv *kv)
{
    return kv->lend.member ? vmem__pool_claimable(kv->lend.member, kv->ledger.budget) : 0;
}

uint64_t vmem__kv_ask(vmem_kv *kv, uint64_t pages, uint32_t *refusal)
{
    return kv->lend.member ? vmem__pool_ask(kv->lend.member, kv->ledger.held, pages, refusal) : 0;
}

void vmem__kv_unask(vmem_kv *kv)
{
    if (kv->lend.member)
        vmem__pool_unask(kv->lend.member);
}

void vmem__kv_foresee(vmem_kv *kv, uint64_t want, bool part)
{
    if (!kv->lend.member)
        return;
    kv->lend.giving &= want <= kv->ledger.budget;
    kv->ledger.budget += vmem__pool_foresee(kv->lend.member, kv->ledger.budget, want, part);
    kv->lend.foresees = want != 0;
}

void vmem__kv_pool_wake(const vmem_kv *kv)
{
    if (kv->lend.member)
        vmem__pool_wake(kv->lend.member);
}

void vmem__kv_show_member(const vmem_kv *kv, struct vmem_kv_pool_member *out, char path[256])
{
    if (kv->lend.member)
        vmem__pool_show(kv->lend.member, out, path);
    else
        out->size = 0;
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
    if (!m)
        return;
    vmem__pool_leave(m, held);
    kv->lend.left = m;
}

void vmem__kv_pool_left(vmem_kv *kv)
{
    if (kv->lend.left)
        vmem__pool_left(kv->lend.left);
}
