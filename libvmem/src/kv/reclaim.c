// Reclaims memory that is kept for later use.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// The first page, at or after `from`, of the part that can be cut off the end of a span. While kernels run, a block
// mapped by a 2 MiB entry is cut as a whole or not at all. Pages that go together are always cut as a whole or not at
// all.
static uint32_t tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    from = KV_MAX(from, kv->slots[slot].fresh ? s->keep_hi : KV_MAX(s->keep_hi, s->coarse_hi));
    while (from < s->hi && kv_joined(kv, slot, group, from))
        from++;
    return KV_MIN(from, s->hi);
}

// The end of the pages that the background thread would map again at once.
static uint32_t near_end(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return vmem__kv_need_hi(kv, &kv->groups[group], kv->slots[slot].tokens + 2 * (uint64_t)kv->ahead_min);
}

uint64_t vmem__kv_reclaimable_in(const vmem_kv *kv, uint32_t slot)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *s = kv_span(kv, slot, i);
        uint64_t n = 0;
        if (!kv_accessed(kv, slot) || kv_swap_due(kv, slot)) {
            // The remaining pages of a swapped slot are about to be unmapped, or their unmap failed.
            n = s->hi - s->lo - vmem__kv_rows_shared(kv, slot, i, s->lo, KV_MIN(s->hi, s->shared_hi));
        } else {
            const uint32_t from = tail(kv, slot, i, 0);
            n = s->hi - from;
            if (from < s->shared_hi) // the request was truncated, and names hold the pages
                n -= vmem__kv_rows_shared(kv, slot, i, from, KV_MIN(s->hi, s->shared_hi));
            if (s->keep_lo > s->lo)
                n += s->keep_lo - s->lo - vmem__kv_rows_shared(kv, slot, i, s->lo, KV_MIN(s->keep_lo, s->shared_hi));
        }
        pages += n * kv->groups[i].n;
    }
    return pages;
}

uint64_t vmem__kv_reclaimable(const vmem_kv *kv)
{
    uint64_t pages = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        pages += vmem__kv_reclaimable_in(kv, s);
    return pages + vmem__kv_evictable(kv) + kv->n_doomed;
}

uint64_t vmem__kv_spare(const vmem_kv *kv)
{
    uint64_t pages = kv->pending + vmem__kv_reclaimable(kv) - vmem__kv_evictable(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        if (kv->slots[s].state != VMEM_KV_ACTIVE)
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const uint32_t spared = tail(kv, s, i, near_end(kv, s, i)) - tail(kv, s, i, 0);
            pages -= (uint64_t)spared * kv->groups[i].n;
        }
    }
    return pages;
}

static bool passed_over(const struct kv_slot *slot, bool stuck) { return slot->busy || (slot->stuck && !stuck); }

static bool front_victim(const vmem_kv *kv, bool stuck, struct kv_victim *v)
{
    for (uint32_t s = 0; kv->windows && s < kv->n_slots; s++) {
        if (!kv_accessed(kv, s) || passed_over(&kv->slots[s], stuck))
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            if (sp->lo < sp->keep_lo) {
                *v = (struct kv_victim){s, i, sp->keep_lo, sp->hi};
                return true;
            }
        }
    }
    return false;
}

static bool kept_victim(const vmem_kv *kv, uint64_t want, bool stuck, struct kv_victim *v)
{
    uint64_t oldest = UINT64_MAX;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *slot = &kv->slots[s];
        if (kv_accessed(kv, s) || passed_over(slot, stuck) || kv->idle[s].parked >= oldest)
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            if (sp->lo == sp->hi)
                continue;
            uint64_t n = (want + kv->groups[i].n - 1) / kv->groups[i].n;
            uint32_t hi = n < sp->hi - sp->lo ? (sp->hi - (uint32_t)n) / kv->block * kv->block : sp->lo;
            while (hi > sp->lo && kv_joined(kv, s, i, hi))
                hi--;
            *v = (struct kv_victim){s, i, sp->lo, KV_MAX(hi, sp->lo)};
            oldest = kv->idle[s].parked;
            break;
        }
    }
    return oldest != UINT64_MAX;
}

// What kernels do not access can be taken back from a request that ends as from one that goes on.
static bool ahead_victim(const vmem_kv *kv, bool spare_ahead, bool stuck, struct kv_victim *v)
{
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *slot = &kv->slots[s];
        if (!kv_accessed(kv, s) || passed_over(slot, stuck))
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            const bool grows = spare_ahead && slot->state == VMEM_KV_ACTIVE;
            const uint32_t from = tail(kv, s, i, grows ? near_end(kv, s, i) : 0);
            if (from < sp->hi) {
                *v = (struct kv_victim){s, i, sp->lo, from};
                return true;
            }
        }
    }
    return false;
}

bool vmem__kv_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, bool stuck, struct kv_victim *v)
{
    return front_victim(kv, stuck, v) || kept_victim(kv, want, stuck, v) || ahead_victim(kv, spare_ahead, stuck, v);
}

int vmem__kv_reclaim(vmem_kv *kv, uint64_t want, bool evict, uint64_t *got)
{
    uint64_t start = kv->held;
    struct kv_victim v;
    int rc = 0, refused = 0; // refused: no mappings to cut part of a span
    kv->stats.reclaims += want != 0;
    vmem__kv_release_doomed(kv);
    while (!rc && start - kv->held < want) {
        uint64_t left = want - (start - kv->held);
        bool some = vmem__kv_victim(kv, left, true, !refused, &v);
        if (!some && evict && vmem__kv_evictable(kv) && vmem__kv_hash_evict(kv, left))
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
    if (!rc && start - kv->held < want)
        rc = refused;
    kv->stats.reclaimed_pages += start - kv->held;
    if (got)
        *got = start - kv->held;
    return rc;
}

bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages)
{
    return !pages || (pages <= kv_unused(kv) && vmem__kv_leaves_others(kv, pages));
}

int vmem__kv_make_room(vmem_kv *kv, uint64_t pages, uint64_t *missing)
{
    if (missing)
        *missing = 0;
    kv->grow.at = KV_GROW_LISTS;
    if (vmem__kv_has_room(kv, pages))
        return 0;
    vmem__kv_claim_for(kv, pages);
    vmem__kv_worker_hold(kv);
    uint64_t want = kv->held - vmem__kv_reclaimable(kv) + pages;
    int rc = 0;
    if (want > kv->budget_pages) {
        rc = vmem__kv_short_of_budget(kv, want, missing);
    } else if (kv->held + pages > kv->budget_pages) {
        rc = vmem__kv_reclaim(kv, kv->held + pages - kv->budget_pages, true, NULL);
        if (!rc && kv->held + pages > kv->budget_pages) // reclaiming got less than counted on
            rc = vmem__kv_short_of_budget(kv, kv->held + pages, missing);
    }
    if (!rc && !vmem__kv_leaves_others(kv, pages))
        rc = vmem__kv_make_device_room(kv, pages, missing);
    vmem__kv_worker_release(kv);
    return rc;
}

int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages, uint64_t *missing)
{
    vmem__kv_worker_hold(kv);
    uint64_t device = vmem__kv_device_pages(kv), kept = vmem__kv_reclaimable(kv);
    int rc;
    if (pages > device && pages - device > kept)
        rc = vmem__kv_short_of_device(kv, pages - device - kept, missing);
    else if (!kept)
        rc = vmem__kv_short_of_device(kv, pages, missing);
    else
        rc = vmem__kv_reclaim(kv, pages > device ? pages - device : pages, true, NULL);
    vmem__kv_worker_release(kv);
    return rc;
}

// Unmaps free slots as a whole, which needs no additional mapping.
int vmem__kv_make_mappings(vmem_kv *kv, uint64_t pages, uint64_t *missing)
{
    uint64_t before = kv->held;
    vmem__kv_worker_hold(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv->slots[s].state == VMEM_KV_FREE && !vmem__kv_stale_now(kv, s))
            vmem__kv_cut_slot(kv, s);
    vmem__kv_worker_release(kv);
    return kv->held < before ? 0 : vmem__kv_short_of_mappings(kv, pages, missing);
}

static int run(vmem_kv *kv, struct kv_grow *l)
{
    kv->held += l->total;
    int rc = vmem__kv_grow_run(kv, l);
    if (rc)
        kv->held -= l->total;
    return rc;
}

int vmem__kv_grow_try(vmem_kv *kv, struct kv_grow *l)
{
    int rc = run(kv, l);
    if (!rc)
        vmem__kv_grow_commit(kv, l);
    return rc;
}

int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l, uint64_t *missing)
{
    int rc = vmem__kv_make_room(kv, l->total, missing);
    if (!rc)
        rc = run(kv, l);
    for (int tries = 2; rc == -ENOMEM && l->at != KV_GROW_LISTS && tries; tries--) {
        bool create = l->at == KV_GROW_CREATE;
        rc = create ? vmem__kv_make_device_room(kv, l->total, missing) : vmem__kv_make_mappings(kv, l->total, missing);
        if (rc)
            break;
        rc = run(kv, l);
        if (rc == -ENOMEM && tries == 1)
            rc = create ? vmem__kv_short_of_device(kv, l->total, missing)
                        : vmem__kv_short_of_mappings(kv, l->total, missing);
    }
    return rc;
}

int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l, uint64_t *missing)
{
    int rc = vmem__kv_grow_make(kv, l, missing);
    if (rc)
        vmem__kv_grow_reset(l);
    else
        vmem__kv_grow_commit(kv, l);
    return rc;
}
