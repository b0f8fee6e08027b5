// How every public call begins and ends, and the statistics that others see meanwhile. book/state.h states the order of
// the locks.
//
// SPDX-License-Identifier: MIT
#include <time.h>

#include "kv/memory/memory.h"

#define VIEW_NS 5000000 // how far the published view may be behind

// ---- counters and gauges ---------------------------------------------------------------------------------------------

static uint64_t coarse_now(void) // to a few ms
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t); // needs no system call
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void vmem__kv_summarise(vmem_kv *kv)
{
    struct vmem_kv_stats *st = &kv->stats;
    st->page_size = kv->page_size;
    st->budget_pages = kv->ledger.budget;
    st->held_pages = kv->ledger.held;
    st->needed_pages = st->kept_pages = st->ahead_pages = st->live_bytes = 0;
    st->active_slots = kv->in_state[VMEM_KV_ACTIVE];
    st->swapped_slots = kv->in_state[VMEM_KV_SWAPPED];
    st->ending_slots = kv->in_state[KV_ENDING];
    st->absent_slots = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        bool active = sl->state == VMEM_KV_ACTIVE;
        st->absent_slots += active && kv_absent(kv, s);
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_group *g = &kv->groups[i];
            const struct kv_span *sp = kv_span(kv, s, i);
            if (active) {
                uint32_t rows = KV_MIN(sl->tokens, g->max_tokens);
                st->live_bytes += (g->window ? KV_MIN(rows, g->window) : rows) * g->row_bytes * g->n;
            }
            if (active || sl->state == KV_ENDING) {
                st->needed_pages += (uint64_t)(sp->need.hi - sp->need.lo) * g->n;
                st->ahead_pages += (uint64_t)(sp->hi - sp->need.hi) * g->n;
            } else {
                st->kept_pages += (uint64_t)(sp->hi - sp->lo) * g->n;
            }
        }
    }
    st->free_pages = kv_less(vmem__kv_reach_known(kv), kv->ledger.fixed);
    st->shared_pages = kv->refs.shared;
    st->prefix_pages = kv->refs.only;
    st->zeroed_bytes = kv->copy.zeroed_bytes;
    st->slots = kv->n_slots;
    st->prefixes = kv->runs.n - kv->runs.reported;
    st->evictable_pages = kv->refs.evictable;
    st->hashed_blocks = kv->runs.reported;
    st->watermark_pages = kv_watermark(kv);
    pthread_mutex_lock(&kv->report.lock);
    kv->report.shown = *st;
    pthread_mutex_unlock(&kv->report.lock);
    kv->report.stale = false;
    if (kv->view.map) {
        kv->report.summarised = coarse_now();
        vmem__kv_publish_stats(kv);
    }
}

void vmem__kv_note(vmem_kv *kv)
{
    if (kv->view.map) {
        vmem__kv_summarise(kv);
        return;
    }
    pthread_mutex_lock(&kv->report.lock);
    kv->report.shown.held_pages = kv->ledger.held; // which the context's other caches count with
    pthread_mutex_unlock(&kv->report.lock);
    kv->report.stale = true;
}

void vmem__kv_may_take_long(vmem_kv *kv)
{
    if (kv->report.stale)
        vmem__kv_summarise(kv);
    kv->report.long_call = true;
}

// ---- calls -----------------------------------------------------------------------------------------------------------

int vmem__kv_enter_step(vmem_kv *kv)
{
    int rc = vmem__kv_check_usable(kv);
    if (rc)
        return rc;
    pthread_mutex_lock(&kv->gate.api);
    pthread_mutex_lock(&kv->gate.state);
    rc = vmem__kv_check_usable(kv); // another thread may have closed the cache while this one waited
    if (rc) {
        pthread_mutex_unlock(&kv->gate.state);
        pthread_mutex_unlock(&kv->gate.api);
        return rc;
    }
    kv->gate.called = true;
    return 0;
}

int vmem__kv_enter(vmem_kv *kv)
{
    int rc = vmem__kv_enter_step(kv);
    if (!rc)
        vmem__kv_may_take_long(kv);
    return rc;
}

int vmem__kv_leave(vmem_kv *kv, int rc)
{
    if (kv->flags & VMEM_KV_CHECK && !rc)
        rc = vmem__kv_check_books(kv);
    kv->report.stale = true;
    kv->gate.calls++;
    // Idle steps defer aggregation to the next query; the published view may lag.
    if (kv->report.long_call || (kv->view.map && coarse_now() - kv->report.summarised > VIEW_NS))
        vmem__kv_summarise(kv);
    kv->report.long_call = false;
    kv->gate.called = false;
    if (kv->ledger.fixed < kv->lend.fixed)
        vmem__pool_wake(kv->lend.member);
    kv->lend.fixed = kv->ledger.fixed;
    pthread_mutex_unlock(&kv->gate.state);
    pthread_mutex_unlock(&kv->gate.api);
    return rc;
}
