// Makes room: finds pages that are kept for later use and takes them back, in an order. Backs the pages that a call has
// planned, with as much room as they need.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// The end of the pages ahead that the background thread would map again at once if they were taken. A request without
// tokens grows by no step until its first one: it has none.
static uint32_t near_end(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const uint32_t tokens = kv->slots[slot].tokens;
    return tokens ? vmem__kv_need_hi(kv, &kv->groups[group], tokens + 2 * (uint64_t)kv->ahead_min) : 0;
}

uint64_t vmem__kv_min_pages(const vmem_kv *kv)
{
    uint64_t pages = kv->ledger.pinned_pages + kv->shared.evictable;
    for (uint32_t s = 0; (s = kv_next_active(kv, s)) != KV_NO_SLOT; s++)
        for (uint32_t i = 0; i < kv->n_groups; i++)
            pages +=
                (uint64_t)(vmem__kv_tail(kv, s, i, near_end(kv, s, i)) - vmem__kv_tail(kv, s, i, 0)) * kv->groups[i].n;
    return pages;
}

static bool is_skipped(const struct kv_slot *slot, bool stuck) { return slot->busy || (slot->stuck && !stuck); }

bool vmem__kv_find_passed(const vmem_kv *kv, bool stuck, struct kv_victim *v)
{
    for (uint32_t s = 0; kv->windows && (s = kv_next_used(kv, s)) != KV_NO_SLOT; s++) {
        if (!kv_accessed(kv, s) || is_skipped(&kv->slots[s], stuck))
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            if (sp->lo < sp->pinned.lo) {
                *v = (struct kv_victim){s, i, sp->pinned.lo, sp->hi};
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
        if (kv_accessed(kv, s) || is_skipped(slot, stuck) || kv->idle[s].freed_seq >= oldest)
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            if (sp->lo == sp->hi)
                continue;
            uint64_t n = want / kv->groups[i].n + (want % kv->groups[i].n != 0); // want may be UINT64_MAX
            uint32_t hi = n < sp->hi - sp->lo ? (sp->hi - (uint32_t)n) / kv->block_pages * kv->block_pages : sp->lo;
            *v = (struct kv_victim){s, i, sp->lo, MAX(hi, sp->lo)};
            oldest = kv->idle[s].freed_seq;
            break;
        }
    }
    return oldest != UINT64_MAX;
}

// Pages ahead can be taken back from a request that ends as from one that goes on: no kernel accesses them.
static bool ahead_victim(const vmem_kv *kv, bool spare_ahead, bool stuck, struct kv_victim *v)
{
    for (uint32_t s = 0; (s = kv_next_used(kv, s)) != KV_NO_SLOT; s++) {
        const struct kv_slot *slot = &kv->slots[s];
        if (!kv_accessed(kv, s) || is_skipped(slot, stuck))
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            const bool grows = spare_ahead && slot->state == VMEM_KV_ACTIVE;
            const uint32_t from = vmem__kv_tail(kv, s, i, grows ? near_end(kv, s, i) : 0);
            if (from < sp->hi) {
                *v = (struct kv_victim){s, i, sp->lo, from};
                return true;
            }
        }
    }
    return false;
}

bool vmem__kv_find_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, bool stuck, struct kv_victim *v)
{
    return vmem__kv_find_passed(kv, stuck, v) || kept_victim(kv, want, stuck, v) ||
           ahead_victim(kv, spare_ahead, stuck, v);
}

// ---- taking it back --------------------------------------------------------------------------------------------------

int vmem__kv_reclaim_to(vmem_kv *kv, uint64_t to, bool evict)
{
    struct kv_victim v;
    int rc = 0, refused = 0; // refused: no mappings to cut part of a span
    vmem__kv_worker_pause(kv);
    const uint64_t start = kv->ledger.held;
    vmem__kv_release_doomed(kv);
    while (!rc && kv->ledger.held > to) {
        const uint64_t left = kv->ledger.held - to;
        bool some = vmem__kv_find_victim(kv, left, true, !refused, &v);
        if (!some && evict && kv->shared.evictable && vmem__kv_evict(kv, left))
            continue;
        if (!some && !vmem__kv_find_victim(kv, left, false, !refused, &v))
            break;
        rc = vmem__kv_cut_now(kv, v.slot, v.group, v.lo, v.hi);
        // To cut a part of a span may need an additional mapping. To cut the whole span needs none.
        if (rc == -ENOMEM && kv->slots[v.slot].state == VMEM_KV_FREE)
            rc = vmem__kv_cut_now(kv, v.slot, v.group, 0, 0);
        if (rc == -ENOMEM) { // other slots may have pages whose end needs none
            kv->slots[v.slot].stuck = kv->turn.stuck = true;
            refused = rc;
            rc = 0;
        }
    }
    if (!rc && kv->ledger.held > to)
        rc = refused;
    kv->stats.reclaimed_pages += start - kv->ledger.held;
    vmem__kv_worker_resume(kv);
    return rc;
}

bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages)
{
    return !pages || (pages <= kv_unused(kv) && vmem__kv_leaves_others(kv, pages));
}

int vmem__kv_make_room(vmem_kv *kv, uint64_t pages)
{
    int rc = 0;
    if (vmem__kv_has_room(kv, pages))
        return 0;
    vmem__kv_worker_pause(kv);
    const uint64_t most = MAX(kv->ledger.held, kv->ledger.budget);
    if (kv->ledger.held + pages > kv->ledger.budget) {
        rc = vmem__kv_reclaim_to(kv, sat_sub(kv->ledger.budget, pages), true);
        if (!rc && kv->ledger.held + pages > most) // reclaiming got less than counted on
            rc = vmem__kv_short_of_budget(kv, kv->ledger.held + pages);
    }
    if (!rc && !vmem__kv_leaves_others(kv, pages))
        rc = vmem__kv_make_device_room(kv, pages);
    vmem__kv_worker_resume(kv);
    return rc;
}

int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages)
{
    vmem__kv_worker_pause(kv);
    uint64_t device = vmem__kv_device_pages(kv), kept = sat_sub(kv->ledger.held, kv->ledger.pinned_pages);
    int rc;
    if (pages > device && pages - device > kept)
        rc = vmem__kv_short_of_device(kv, pages - device - kept);
    else if (!kept)
        rc = vmem__kv_short_of_device(kv, pages);
    else
        rc = vmem__kv_reclaim_to(kv, sat_sub(kv->ledger.held, pages > device ? pages - device : pages), true);
    vmem__kv_worker_resume(kv);
    return rc;
}

// Unmaps free slots as a whole, so that the process has mappings again. To unmap a whole slot needs none.
static int free_mappings(vmem_kv *kv, uint64_t pages)
{
    uint64_t before = kv->ledger.held;
    vmem__kv_worker_pause(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv->slots[s].state == VMEM_KV_FREE && !vmem__kv_stale_now(kv, s))
            vmem__kv_cut_slot(kv, s);
    vmem__kv_worker_resume(kv);
    return kv->ledger.held < before ? 0 : vmem__kv_short_of_mappings(kv, pages);
}

static int map_planned(vmem_kv *kv, struct kv_grow *l)
{
    kv->ledger.held += l->total;
    int rc = vmem__kv_grow_map(kv, l);
    if (rc)
        kv->ledger.held -= l->total;
    return rc;
}

int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l, int tries)
{
    l->at = KV_GROW_LISTS;
    int rc = tries ? vmem__kv_make_room(kv, l->total) : 0;
    if (!rc)
        rc = map_planned(kv, l);
    for (; rc == -ENOMEM && l->at != KV_GROW_LISTS && tries; tries--) {
        bool create = l->at == KV_GROW_CREATE;
        rc = create ? vmem__kv_make_device_room(kv, l->total) : free_mappings(kv, l->total + l->others);
        if (rc)
            break;
        rc = map_planned(kv, l);
        if (rc == -ENOMEM && tries == 1)
            rc = create ? vmem__kv_short_of_device(kv, l->total) : vmem__kv_short_of_mappings(kv, l->total + l->others);
    }
    return rc;
}

int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l, int tries)
{
    int rc = vmem__kv_grow_make(kv, l, tries);
    if (rc)
        vmem__kv_grow_reset(l);
    else
        vmem__kv_grow_commit(kv, l);
    return rc;
}

// ---- the budget -----------------------------------------------------------------------------------------------------

static int set_budget(vmem_kv *kv, uint64_t bytes)
{
    uint64_t pages = bytes >> kv->page_shift;
    bool lazy = kv->flags & VMEM_KV_LAZY;
    if (!pages)
        return vmem__error(-EINVAL, "bytes %" PRIu64 " is less than a page, %" PRIu64, bytes, kv->page_size);
    if (pages > kv->ledger.budget) {
        int rc = lazy ? 0 : vmem__kv_prealloc(kv, pages);
        if (!rc)
            kv->ledger.budget = pages;
        return rc;
    }
    int rc = vmem__kv_reclaim_to(kv, pages, true);
    if (rc)
        return rc;
    kv->ledger.budget = pages;
    vmem__kv_trim_prealloc(kv, lazy ? 0 : pages);
    // Keep the device memory of the remaining budget preallocated. If another process has taken it first, pages are
    // created when they are needed.
    if (!lazy && vmem__kv_prealloc(kv, pages))
        kv->ledger.ahead.pages = 0;
    return 0;
}

int vmem_kv_set_budget(vmem_kv *kv, uint64_t bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (kv->membership.member)
        rc = vmem__error(-EINVAL,
                         "the cache is in a pool, which sets its budget: set the cache's share of the pool instead");
    return vmem__kv_leave(kv, rc ? rc : set_budget(kv, bytes));
}

void vmem__kv_shrink_to_budget(vmem_kv *kv)
{
    if (kv->ledger.held > kv->ledger.budget && !kv->membership.lowering)
        vmem__kv_reclaim_to(kv, kv->ledger.budget, true);
}

static int reclaim_bytes(vmem_kv *kv, uint64_t bytes, uint64_t *freed)
{
    const uint64_t pages = bytes == UINT64_MAX ? bytes : kv_ceil_pages(bytes, kv);
    vmem__kv_worker_pause(kv); // pages that it creates or releases must not count as this call's
    const uint64_t before = kv->ledger.held;
    int rc = vmem__kv_reclaim_to(kv, sat_sub(before, pages), false);
    if (rc == -ENOMEM) // the system has no mappings to cut the rest: less is freed, and nothing is lost
        rc = 0;
    *freed = (before - kv->ledger.held) << kv->page_shift;
    vmem__kv_worker_resume(kv);
    vmem__kv_trim_prealloc(kv, 0);
    return rc;
}

int vmem_kv_reclaim(vmem_kv *kv, uint64_t bytes, uint32_t flags, uint64_t *freed)
{
    uint64_t got = 0;
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__check_flags(flags, 0);
    rc = vmem__kv_leave(kv, rc ? rc : reclaim_bytes(kv, bytes, &got));
    if (freed)
        *freed = got;
    return rc;
}
