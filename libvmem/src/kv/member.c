// A cache as a member of a pool: the functions that the pool calls, and the calls that name both.
//
// SPDX-License-Identifier: MIT
#include "kv/kv.h"

// ---- what the pool's thread calls ------------------------------------------------------------------------------------

static void lock(void *self)
{
    vmem_kv *kv = self;
    pthread_mutex_lock(&kv->gate.api);
    pthread_mutex_lock(&kv->gate.state);
}

static void unlock(void *self)
{
    vmem_kv *kv = self;
    vmem__kv_tell(kv);
    pthread_mutex_unlock(&kv->gate.state);
    pthread_mutex_unlock(&kv->gate.api);
}

// Pages that were created under the old budget are not too many for VMEM_KV_CHECK.
static void set_budget(vmem_kv *kv, uint64_t pages)
{
    kv->ledger.ceiling = MAX(kv->ledger.ceiling, kv->ledger.held);
    kv->ledger.budget = pages;
}

static void get_state(void *self, struct vmem__member_state *out)
{
    vmem_kv *kv = self;
    const uint64_t min_pages = vmem__kv_min_pages(kv);
    *out = (struct vmem__member_state){.budget = kv->ledger.budget,
                                       .held = kv->ledger.held,
                                       .target = kv->membership.lowering ? kv->membership.lower_to : kv->ledger.budget,
                                       .min_pages = min_pages,
                                       .evictable = MIN(kv->shared.evictable, min_pages),
                                       .margin = kv->in_state[VMEM_KV_FREE] < kv->n_slots ? min_pages / 32 : 0};
}

static void raise_budget(void *self, uint64_t pages)
{
    vmem_kv *kv = self;
    kv->ledger.budget += pages;
}

// From now on, the background thread gives back what the cache holds beyond `pages`. The budget falls as the pages go,
// so that a step that needs pages meanwhile does not wait for all of them.
static void lower_budget(void *self, uint64_t pages)
{
    vmem_kv *kv = self;
    kv->membership.lower_to = pages;
    kv->membership.lowering = kv->ledger.held > pages;
    if (kv->membership.lowering)
        vmem__kv_worker_wake(kv);
    else
        set_budget(kv, pages);
}

// The pages that a step may need next: requests grow by a page in each tensor at a time.
static uint64_t next_pages(const vmem_kv *kv) { return (uint64_t)kv->in_state[VMEM_KV_ACTIVE] * kv->n_tensors; }

// The budget falls no further: pages that are left above lower_to cannot be given back now.
static void stop_lowering(vmem_kv *kv)
{
    set_budget(kv, MAX(kv->membership.lower_to, kv->ledger.held));
    kv->membership.lowering = false;
}

// Continues to shrink a cache that is idle or was asked to give. One without a background thread gives a portion here.
static bool continue_lowering(void *self, uint64_t least)
{
    vmem_kv *kv = self;
    const bool alone = !kv->turn.has_worker;
    if (kv->worker.released_all &&
        (kv->membership.lowering ? kv->membership.lower_to : kv->ledger.budget) > least) // idle
        lower_budget(kv, least);
    if (!kv->membership.lowering)
        return false;
    if (alone)
        vmem__kv_reclaim_to(kv, MAX(kv->membership.lower_to, sat_sub(kv->ledger.held, kv->membership.portion)), true);
    const bool rests = alone ? kv->ledger.held <= vmem__kv_min_pages(kv) : !kv->turn.due && !kv->turn.working;
    if (kv->ledger.held <= kv->membership.lower_to || rests)
        stop_lowering(kv);
    else
        set_budget(kv, MIN(kv->ledger.budget, MAX(kv->membership.lower_to, kv->ledger.held + next_pages(kv))));
    return kv->membership.lowering && alone;
}

static void trim(void *self, bool keep_retained) { vmem__trim_unused(((vmem_kv *)self)->ctx, keep_retained); }

// Evicts one portion of runs in a round.
static void evict(void *self, uint64_t pages)
{
    vmem_kv *kv = self;
    lock(kv);
    vmem__kv_evict(kv, MIN(pages, MAX(kv->membership.portion, kv->block_pages)));
    unlock(kv);
}

static const struct vmem__member_ops ops = {
    .lock = lock,
    .unlock = unlock,
    .get_state = get_state,
    .raise_budget = raise_budget,
    .lower_budget = lower_budget,
    .continue_lowering = continue_lowering,
    .trim = trim,
    .evict = evict,
};

// ---- what callers ask --------------------------------------------------------------------------------------------------

int vmem_kv_pool_join(vmem_kv_pool *pool, vmem_kv *kv, const struct vmem_kv_pool_share *share)
{
    struct vmem_kv_pool_share s;
    if (!pool || !share)
        return vmem__error(-EINVAL, "pool and share must not be NULL");
    int rc = vmem__struct_take(&s, sizeof s, sizeof s, share, "share");
    if (!rc)
        rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (kv->membership.member)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "the cache is a member of a pool already"));
    vmem__kv_worker_pause(kv);
    const struct vmem__member_terms terms = {
        .ctx = kv->ctx,
        .page_size = kv->page_size,
        .held = kv->ledger.held,
        .name = s.name ? s.name : "kv",
        .min = s.min,
        .max = s.max,
    };
    uint64_t budget;
    rc = vmem__pool_join(pool, &ops, kv, &terms, &kv->membership.member, &budget);
    if (!rc) {
        kv->flags |= VMEM_KV_LAZY;
        // A device unmaps a tensor's pages in one call, whatever their number; the system takes time for each.
        kv->membership.portion = vmem__by_granules(kv->ctx) ? UINT64_C(64) * kv->block_pages
                                                            : UINT64_C(16) * kv->block_pages * kv->n_tensors;
        set_budget(kv, budget);
    }
    vmem__kv_worker_resume(kv);
    if (!rc)
        vmem__kv_trim_prealloc(kv, 0);
    return vmem__kv_leave(kv, rc);
}

// The membership, which lives as long as the cache.
static int find_member(vmem_kv *kv, struct vmem__member **m)
{
    int rc = vmem__kv_check_usable(kv);
    if (rc)
        return rc;
    pthread_mutex_lock(&kv->gate.state);
    *m = kv->membership.member;
    pthread_mutex_unlock(&kv->gate.state);
    return *m ? 0 : vmem__error(-EINVAL, "the cache is in no pool");
}

int vmem_kv_pool_set_share(vmem_kv *kv, uint64_t min, uint64_t max)
{
    struct vmem__member *m;
    int rc = find_member(kv, &m);
    if (!rc)
        rc = vmem__pool_set_share(m, min, max);
    if (rc)
        return rc;
    lock(kv);
    vmem__pool_keep_to_max(m);
    if (kv->membership.lowering) { // now, not in portions
        vmem__kv_reclaim_to(kv, kv->membership.lower_to, false);
        stop_lowering(kv);
    }
    unlock(kv);
    return 0;
}

int vmem_kv_pool_wait(vmem_kv *kv, uint32_t ms, uint32_t *out)
{
    struct vmem__member *m;
    int rc = find_member(kv, &m);
    if (rc)
        return rc;
    const uint32_t answer = vmem__pool_wait(m, ms);
    if (out)
        *out = answer;
    return 0;
}
