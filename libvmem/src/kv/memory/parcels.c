// What can be taken back of the memory that is kept for later use, and in which order.
//
// SPDX-License-Identifier: MIT
#include "kv/memory/memory.h"

// The end of the pages that the background thread would map again at once.
static uint32_t near_end(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return vmem__kv_need_hi(kv, &kv->groups[group], kv->slots[slot].tokens + 2 * (uint64_t)kv->ahead_min);
}

uint64_t vmem__kv_least(const vmem_kv *kv)
{
    uint64_t pages = kv->ledger.fixed + vmem__kv_evictable(kv) + (uint64_t)KV_MAX(kv->ledger.reserved, 0);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        for (uint32_t i = 0; i < kv->n_groups && kv->slots[s].state == VMEM_KV_ACTIVE && !kv->staged.lengths[s]; i++)
            pages +=
                (uint64_t)(vmem__kv_tail(kv, s, i, near_end(kv, s, i)) - vmem__kv_tail(kv, s, i, 0)) * kv->groups[i].n;
    return pages;
}

// Whether a slot has rows that no cut may take: a request's, unless they are about to be copied.
static bool keeps_rows(const vmem_kv *kv, uint32_t slot) { return kv_accessed(kv, slot) && !kv_swap_due(kv, slot); }

static bool passed_over(const struct kv_slot *slot, bool stuck) { return slot->busy || (slot->stuck && !stuck); }

bool vmem__kv_passed(const vmem_kv *kv, bool stuck, struct kv_victim *v)
{
    for (uint32_t s = 0; kv->windows && s < kv->n_slots; s++) {
        if (!keeps_rows(kv, s) || passed_over(&kv->slots[s], stuck))
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            if (sp->lo < sp->fix_lo) {
                *v = (struct kv_victim){s, i, sp->fix_lo, sp->hi};
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
            uint64_t n = want / kv->groups[i].n + (want % kv->groups[i].n != 0); // want may be UINT64_MAX
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
        if (!keeps_rows(kv, s) || passed_over(slot, stuck))
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
    return vmem__kv_passed(kv, stuck, v) || kept_victim(kv, want, stuck, v) || ahead_victim(kv, spare_ahead, stuck, v);
}
