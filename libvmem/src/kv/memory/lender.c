// What the cache asks of the pool that it is a member of.
//
// SPDX-License-Identifier: MIT
#include "kv/memory/memory.h"
#include "lend.h"

static void claim(vmem_kv *kv, uint64_t least, uint64_t most)
{
    kv->giving = false; // a cache that is short itself keeps what it has not given back yet
    kv->budget_pages += kv->lender->claim(kv->member, kv->budget_pages, least, most);
}

void vmem__kv_claim_for(vmem_kv *kv, uint64_t pages)
{
    if (!kv->member || !pages || kv->held + pages <= kv->budget_pages)
        return;
    if (!kv->giving || kv->held - vmem__kv_reclaimable(kv) + pages > kv->budget_pages)
        claim(kv, kv->held + pages - kv->budget_pages, kv->held + pages + kv->held / 2 - kv->budget_pages);
}

void vmem__kv_claim_plenty(vmem_kv *kv)
{
    if (!kv->member || kv->giving)
        return;
    const uint64_t want = kv->held + kv->held / 2;
    if (want > kv->budget_pages && kv_unused(kv) < 2 * kv_low(kv) + kv->held / 8)
        claim(kv, 0, want - kv->budget_pages);
}

uint64_t vmem__kv_claimable(const vmem_kv *kv)
{
    return kv->member ? kv->lender->claimable(kv->member, kv->budget_pages) : 0;
}

uint64_t vmem__kv_ask(vmem_kv *kv, uint64_t pages, uint32_t *refusal)
{
    return kv->member ? kv->lender->ask(kv->member, kv->held, pages, refusal) : 0;
}

void vmem__kv_unask(vmem_kv *kv)
{
    if (kv->member)
        kv->lender->unask(kv->member);
}

void vmem__kv_foresee(vmem_kv *kv, uint64_t want, bool part)
{
    if (!kv->member)
        return;
    kv->giving &= want <= kv->budget_pages;
    kv->budget_pages += kv->lender->foresee(kv->member, kv->budget_pages, want, part);
    kv->foresees = want != 0;
}

void vmem__kv_pool_wake(const vmem_kv *kv)
{
    if (kv->member)
        kv->lender->wake(kv->member);
}

void vmem__kv_show_member(const vmem_kv *kv, struct vmem_kv_pool_member *out, char path[256])
{
    if (kv->member)
        kv->lender->show(kv->member, out, path);
    else
        out->size = 0;
}

void vmem__kv_pool_leave(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->api);
    pthread_mutex_lock(&kv->state);
    struct vmem__member *m = kv->member;
    kv->member = NULL;
    kv->giving = kv->foresees = false;
    if (m) // what it has not used goes back now
        kv->budget_pages = KV_MIN(kv->budget_pages, kv->held);
    const uint64_t held = kv->held;
    pthread_mutex_unlock(&kv->state);
    pthread_mutex_unlock(&kv->api);
    if (!m)
        return;
    kv->lender->leave(m, held);
    kv->left = m;
}

void vmem__kv_pool_left(vmem_kv *kv)
{
    if (kv->left)
        kv->lender->left(kv->left);
}
