// What can be taken back of the memory that is kept for later use, and in which order.
//
// SPDX-License-Identifier: MIT
#include "kv/memory/memory.h"

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
            n = s->hi - s->lo - vmem__kv_span_shared(kv, slot, i);
        } else {
            const uint32_t from = vmem__kv_tail(kv, slot, i, 0);
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
    return pages + vmem__kv_evictable(kv) + kv->doomed.n;
}

uint64_t vmem__kv_used(const vmem_kv *kv) { return kv->ledger.held - kv->ledger.pending - vmem__kv_reclaimable(kv); }

uint64_t vmem__kv_spare(const vmem_kv *kv)
{
    uint64_t pages = kv->ledger.pending + vmem__kv_reclaimable(kv) - vmem__kv_evictable(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        if (kv->slots[s].state != VMEM_KV_ACTIVE)
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const uint32_t spared = vmem__kv_tail(kv, s, i, near_end(kv, s, i)) - vmem__kv_tail(kv, s, i, 0);
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
            const uint32_t from = vmem__kv_tail(kv, s, i, grows ? near_end(kv, s, i) : 0);
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
