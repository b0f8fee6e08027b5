// The budget: decides whether there is memory for the pages that a call is about to pin. A member of a pool claims it
// from the pool. If there is none, a shortage is recorded: how much is missing, and what could help.
//
// The answers are arithmetic on the ledger: every page that is not pinned can be taken back, and no job of the
// background thread changes an answer.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// ---- the device memory behind the budget ------------------------------------------------------------------------------
//
// kv_ledger.ahead tells the context's account how many pages the cache can create without asking the device, so that
// caches that take memory ahead or give it back leave the others theirs. Where it is less than the budget (with
// VMEM_KV_LAZY, and after memory was given back), the device may refuse.

// For so long, the driver's last answer on its free memory is reused to say that there is enough.
#define DEVICE_NS UINT64_C(100000000)

static uint64_t others_ahead(const vmem_kv *kv) { return vmem__ahead_of_others(kv->ctx, &kv->ledger.ahead); }

void vmem__kv_register(vmem_kv *kv) { vmem__ahead_join(kv->ctx, &kv->ledger.ahead); }

void vmem__kv_unregister(vmem_kv *kv)
{
    if (vmem__ahead_leave(kv->ctx, &kv->ledger.ahead))
        vmem__trim_unused(kv->ctx, false);
}

int vmem__kv_prealloc(vmem_kv *kv, uint64_t pages)
{
    const uint64_t own = sat_sub(pages, kv->ledger.held) << kv->page_shift;
    // Make no call for zero bytes: vmem_prealloc would give up the memory that other caches have taken ahead.
    int rc = own ? vmem_prealloc(kv->ctx, sat_add(own, others_ahead(kv))) : 0;
    if (!rc)
        kv->ledger.ahead.pages = pages;
    return rc;
}

void vmem__kv_trim_prealloc(vmem_kv *kv, uint64_t pages)
{
    kv->ledger.ahead.pages = pages;
    kv->ledger.ahead.used = kv->ledger.held;
    vmem__trim_unused(kv->ctx, false);
}

static uint64_t device_pages(const vmem_kv *kv, uint64_t age)
{
    return vmem__reachable(kv->ctx, &kv->ledger.ahead, age) >> kv->page_shift;
}

uint64_t vmem__kv_device_pages(const vmem_kv *kv) { return device_pages(kv, 0); }

void vmem__kv_ask_device(const vmem_kv *kv)
{
    uint64_t bytes;
    vmem__device_free(kv->ctx, DEVICE_NS, &bytes);
}

// How many pages, at most `most`, the cache can have. The device is asked only if fewer than `want` are at hand.
// Pending pages do not count as held, because their memory may already count as memory that no page uses.
static uint64_t count_reachable(const vmem_kv *kv, uint64_t most, uint64_t want, uint64_t age)
{
    if (!kv->membership.member && kv->ledger.ahead.pages >= kv->ledger.budget)
        return most;
    const uint64_t there = kv->ledger.held - kv->ledger.pending,
                   at_hand = there + (vmem__spare_memory(kv->ctx, &kv->ledger.ahead, NULL) >> kv->page_shift);
    const uint64_t reached = at_hand >= want ? at_hand : there + device_pages(kv, age);
    return MIN(most, reached);
}

static uint64_t most_pages(const vmem_kv *kv)
{
    return kv->ledger.budget + vmem__pool_claimable(kv->membership.member, kv->ledger.budget);
}

uint64_t vmem__kv_page_limit(vmem_kv *kv, uint64_t want)
{
    const uint64_t most = most_pages(kv);
    const uint64_t lately = want > most ? most : count_reachable(kv, most, want, DEVICE_NS);
    if (want > most || lately >= want)
        return lately;
    if (kv->ledger.pending)
        vmem__kv_wait_job(kv);
    return count_reachable(kv, most, want, 0);
}

uint64_t vmem__kv_page_limit_known(const vmem_kv *kv)
{
    const uint64_t most = most_pages(kv);
    return count_reachable(kv, most, most, UINT64_MAX);
}

bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages)
{
    const uint64_t want = kv->ledger.held + pages, most = kv->ledger.budget;
    return kv->ledger.ahead.pages >= most || !others_ahead(kv) || want <= count_reachable(kv, most, want, DEVICE_NS) ||
           want <= count_reachable(kv, most, want, 0);
}

// ---- the pool -------------------------------------------------------------------------------------------------------

// Raises the budget by what is free in the pool, by at least `least` pages and up to `most`, or not at all.
static void claim_pages(vmem_kv *kv, uint64_t least, uint64_t most)
{
    kv->membership.lowering = false; // a cache that is short itself keeps what it has not given back yet
    kv->ledger.budget += vmem__pool_claim(kv->membership.member, kv->ledger.budget, least, most);
}

void vmem__kv_claim_plenty(vmem_kv *kv)
{
    if (!kv->membership.member || kv->membership.lowering)
        return;
    const uint64_t want = kv->ledger.held + kv->ledger.held / 2;
    if (want > kv->ledger.budget && kv_unused(kv) < 2 * kv_low(kv) + kv->ledger.held / 8)
        claim_pages(kv, 0, want - kv->ledger.budget);
}

// Asks the pool's other members for what a call lacks. Returns how many pages may come.
static uint64_t ask_for(vmem_kv *kv, uint64_t pages, uint32_t *refusal)
{
    return vmem__pool_ask(kv->membership.member, kv->ledger.held, pages, refusal);
}

void vmem__kv_pool_leave(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->gate.api);
    pthread_mutex_lock(&kv->gate.state);
    struct vmem__member *m = kv->membership.member;
    kv->membership.member = NULL;
    kv->membership.lowering = false;
    if (m) // what it has not used goes back now
        kv->ledger.budget = MIN(kv->ledger.budget, kv->ledger.held);
    const uint64_t held = kv->ledger.held;
    pthread_mutex_unlock(&kv->gate.state);
    pthread_mutex_unlock(&kv->gate.api);
    if (!m) // of no pool, or closed already
        return;
    vmem__pool_leave(m, held);
    kv->membership.left = m;
}

// ---- shortages ------------------------------------------------------------------------------------------------------

static _Thread_local struct vmem_kv_shortage shortage;

int vmem_kv_last_shortage(struct vmem_kv_shortage *out)
{
    return vmem__struct_give(out, &shortage, sizeof shortage, "out");
}

void vmem__kv_clear_shortage(void) { shortage = (struct vmem_kv_shortage){0}; }

// Pages that become available once the kernels up to a step have ended. Slots that end by then may share rows, also
// with the request that lacks the pages.
static uint64_t pages_after(vmem_kv *kv, uint64_t step)
{
    uint64_t pages = 0;
    kv->mark++;
    vmem__kv_mark_found(kv);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        for (uint32_t i = 0; i < kv->n_groups && kv->slots[s].state == KV_ENDING && kv->idle[s].ends <= step; i++)
            pages += vmem__kv_rows_left(kv, s, i) * kv->groups[i].n;
    return pages;
}

// The next step after `after` whose kernels a slot waits for; 0: none.
static uint64_t next_end(const vmem_kv *kv, uint64_t after)
{
    uint64_t next = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv->slots[s].state == KV_ENDING && kv->idle[s].ends > after && (!next || kv->idle[s].ends < next))
            next = kv->idle[s].ends;
    return next;
}

static void record_shortage(vmem_kv *kv, uint32_t reason, uint64_t missing)
{
    const bool slots = reason == VMEM_KV_SHORT_OF_SLOTS;
    shortage = (struct vmem_kv_shortage){.reason = reason,
                                         .missing_pages = missing,
                                         .prefix_pages = kv->shared.runs_only - kv->shared.evictable};
    if (kv->in_state[KV_ENDING]) {
        shortage.ending_pages = pages_after(kv, UINT64_MAX);
        if (slots || (reason != VMEM_KV_SHORT_OF_MAPPINGS && shortage.ending_pages >= missing))
            shortage.step = next_end(kv, 0);
        while (shortage.step && !slots && pages_after(kv, shortage.step) < missing)
            shortage.step = next_end(kv, shortage.step);
    }
    for (uint32_t s = 0; (s = kv_next_active(kv, s)) != KV_NO_SLOT; s++)
        shortage.requests += kv->slots[s].tokens != 0;
}

int vmem__kv_short_of_budget(vmem_kv *kv, uint64_t want)
{
    const uint64_t most = most_pages(kv);
    uint64_t n = want > most ? want - most : 1;
    record_shortage(kv, VMEM_KV_SHORT_OF_BUDGET, n);
    shortage.coming_pages = ask_for(kv, n, &shortage.refusal);
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages are missing: the budget has %" PRIu64 ", of which prefixes alone hold "
                       "%" PRIu64 " and kept pages are counted as free; end or swap out a request, drop prefixes, or "
                       "raise %s",
                       n, kv->ledger.budget, shortage.prefix_pages,
                       kv->membership.member ? "the cache's share of the pool" : "the budget");
}

static int short_of_device(vmem_kv *kv, uint64_t pages)
{
    record_shortage(kv, VMEM_KV_SHORT_OF_DEVICE, pages);
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages are missing: within the budget of %" PRIu64 ", but the device has no "
                       "memory for them; free some elsewhere, or end a request",
                       pages, kv->ledger.budget);
}

int vmem__kv_short_of_device(vmem_kv *kv, uint64_t pages)
{
    int rc = short_of_device(kv, pages);
    if (kv->membership.member) {
        kv->ledger.budget = vmem__pool_refused(kv->membership.member, kv->ledger.budget, kv->ledger.held);
        shortage.coming_pages = ask_for(kv, pages, &shortage.refusal);
    }
    return rc;
}

int vmem__kv_short_of_mappings(vmem_kv *kv, uint64_t pages)
{
    record_shortage(kv, VMEM_KV_SHORT_OF_MAPPINGS, pages);
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages cannot be mapped: the process has all the mappings that it may have; "
                       "raise vm.max_map_count, use larger pages, or end a request",
                       pages);
}

int vmem__kv_short_of_slots(vmem_kv *kv)
{
    record_shortage(kv, VMEM_KV_SHORT_OF_SLOTS, 0);
    return vmem__error(-ENOSPC, "all %u slots are taken; end a request", kv->n_slots);
}

void vmem__kv_count_shortage(vmem_kv *kv)
{
    kv->stats.short_budget += shortage.reason == VMEM_KV_SHORT_OF_BUDGET;
    kv->stats.short_device += shortage.reason == VMEM_KV_SHORT_OF_DEVICE;
    kv->stats.short_mappings += shortage.reason == VMEM_KV_SHORT_OF_MAPPINGS;
}

// ---- the answers -----------------------------------------------------------------------------------------------------

int vmem__kv_claim_budget(vmem_kv *kv, int64_t delta, uint64_t pages)
{
    const uint64_t pinned = kv->ledger.pinned_pages + (uint64_t)delta; // after the call
    const uint64_t held = kv->ledger.held + pages;                     // if nothing is taken back
    // Claim from the pool before reporting a shortage. While the member is shrinking, claim only what it needs beyond
    // its budget.
    if (kv->membership.member && held > kv->ledger.budget && (!kv->membership.lowering || pinned > kv->ledger.budget))
        claim_pages(kv, held - kv->ledger.budget, held + kv->ledger.held / 2 - kv->ledger.budget);
    return delta > 0 && pinned > kv->ledger.budget ? vmem__kv_short_of_budget(kv, pinned) : 0;
}

int vmem__kv_claim_memory(vmem_kv *kv, int64_t delta, uint64_t pages)
{
    const uint64_t want = kv->ledger.pinned_pages + (uint64_t)delta;
    vmem__kv_clear_shortage();
    int rc = vmem__kv_claim_budget(kv, delta, pages);
    const uint64_t limit = rc || !pages || delta <= 0 ? want : vmem__kv_page_limit(kv, want);
    return want > limit ? short_of_device(kv, want - limit) : rc;
}
