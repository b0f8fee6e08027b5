// The budget, the device memory behind it, and the reasons for a shortage.
//
// The caches of one context are linked (vmem_context.caches). So a cache that takes memory ahead or gives it back
// leaves the others the memory that they took. A cache's promise is the number of pages that it took ahead: the cache
// can create that many pages without asking the device. If the promise is less than the budget (with VMEM_KV_LAZY, and
// after memory was given back), the device may refuse.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "core/core.h"
#include "core/struct.h"
#include "kv/kv.h"

// ---- shortages ------------------------------------------------------------------------------------------------

static _Thread_local struct vmem_kv_shortage last;

int vmem_kv_last_shortage(struct vmem_kv_shortage *out)
{
    if (!out)
        return vmem__error(-EINVAL, "out must not be NULL");
    const size_t least = offsetof(struct vmem_kv_shortage, watermark_pages); // the size of the struct's first version
    if (out->size < least)
        return vmem__error(-EINVAL, "out->size %u is less than %zu", out->size, least);
    return vmem__struct_give(out, &last, sizeof(last), "out");
}

void vmem__kv_enough(void) { last = (struct vmem_kv_shortage){0}; }

// Pages that become available once the kernels up to a step have ended. Slots that end by then may share rows.
static uint64_t coming(vmem_kv *kv, uint64_t step)
{
    const bool evictable = vmem__kv_evictable(kv) == kv->refs.evictable;
    uint64_t pages = 0;
    kv->mark++;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        if (!kv_waits(kv, s) || kv->idle[s].ends > step)
            continue;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_span *sp = kv_span(kv, s, i);
            const uint64_t shared = vmem__kv_rows_shared(kv, s, i, sp->lo, KV_MIN(sp->hi, sp->shared_hi));
            pages += (sp->hi - sp->lo - shared + vmem__kv_rows_left(kv, s, i, evictable)) * kv->groups[i].n;
        }
        pages -= vmem__kv_reclaimable_in(kv, s);
    }
    return pages;
}

// The next step after `after` whose kernels a slot waits for (ends: to become free); 0: none.
static uint64_t next_end(const vmem_kv *kv, uint64_t after, bool ends)
{
    uint64_t next = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        if (kv_waits(kv, s) && (!ends || kv->slots[s].state == VMEM_KV_ENDING) && kv->idle[s].ends > after &&
            (!next || kv->idle[s].ends < next))
            next = kv->idle[s].ends;
    return next;
}

static void note(vmem_kv *kv, uint32_t reason, uint64_t missing, uint64_t *out)
{
    const bool slots = reason == VMEM_KV_SHORT_OF_SLOTS;
    last = (struct vmem_kv_shortage){.reason = reason,
                                     .missing_pages = missing,
                                     .prefix_pages = kv->refs.only - vmem__kv_evictable(kv)};
    if (kv->n_ending) {
        last.ending_pages = coming(kv, UINT64_MAX);
        if (slots || (reason != VMEM_KV_SHORT_OF_MAPPINGS && last.ending_pages >= missing))
            last.step = next_end(kv, 0, slots);
        while (last.step && !slots && coming(kv, last.step) < missing)
            last.step = next_end(kv, last.step, false);
    }
    for (uint32_t s = 0; s < kv->n_slots; s++)
        last.requests += kv->slots[s].state == VMEM_KV_ACTIVE && kv->slots[s].tokens;
    if (out)
        *out = missing;
}

int vmem__kv_short_of_budget(vmem_kv *kv, uint64_t want, uint64_t *missing)
{
    const uint64_t most = kv->budget_pages + vmem__kv_claimable(kv);
    uint64_t n = want > most ? want - most : 1;
    note(kv, VMEM_KV_SHORT_OF_BUDGET, n, missing);
    last.coming_pages = vmem__kv_ask(kv, n, &last.refusal);
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages are missing: the budget has %" PRIu64 ", of which prefixes alone hold "
                       "%" PRIu64 " and kept pages are counted as free; end or swap out a request, drop prefixes, or "
                       "raise %s",
                       n, kv->budget_pages, last.prefix_pages,
                       kv->member ? "the cache's share of the pool" : "the budget");
}

int vmem__kv_short_of_device(vmem_kv *kv, uint64_t pages, uint64_t *missing)
{
    note(kv, VMEM_KV_SHORT_OF_DEVICE, pages, missing);
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages are missing: within the budget of %" PRIu64 ", but the device has no "
                       "memory for them; free some elsewhere, or end a request",
                       pages, kv->budget_pages);
}

int vmem__kv_short_of_mappings(vmem_kv *kv, uint64_t pages, uint64_t *missing)
{
    note(kv, VMEM_KV_SHORT_OF_MAPPINGS, pages, missing);
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages cannot be mapped: the process has all the mappings that it may have; "
                       "raise vm.max_map_count, use larger pages, or end a request",
                       pages);
}

int vmem__kv_short_beside(vmem_kv *kv, uint64_t want, uint64_t limit, uint64_t back, uint64_t *missing)
{
    if (want > limit && want > kv->budget_pages)
        vmem__kv_short_of_budget(kv, want + back, missing);
    else if (want > limit)
        vmem__kv_short_of_device(kv, want + back - limit, missing);
    else
        note(kv, limit < kv->budget_pages ? VMEM_KV_SHORT_OF_DEVICE : VMEM_KV_SHORT_OF_BUDGET, want + back - limit,
             missing);
    last.watermark_pages = KV_MIN(back, last.missing_pages);
    if (want > limit)
        return -ENOMEM; // the error text is set
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages are missing: of the budget of %" PRIu64 ", the watermark keeps %" PRIu64
                       " for requests that run; end a request, drop prefixes, or lower the watermark",
                       last.missing_pages, kv->budget_pages, back);
}

int vmem__kv_short_of_slots(vmem_kv *kv)
{
    note(kv, VMEM_KV_SHORT_OF_SLOTS, 0, NULL);
    return vmem__error(-ENOSPC, "all %u slots are taken; end a request", kv->n_slots);
}

void vmem__kv_count_shortage(vmem_kv *kv)
{
    kv->stats.short_budget += last.reason == VMEM_KV_SHORT_OF_BUDGET;
    kv->stats.short_device += last.reason == VMEM_KV_SHORT_OF_DEVICE;
    kv->stats.short_mappings += last.reason == VMEM_KV_SHORT_OF_MAPPINGS;
}

// How long the driver's last word on its free memory is good enough for a yes.
#define DEVICE_NS UINT64_C(100000000)

// ---- the device -----------------------------------------------------------------------------------------------

// The bytes that the other caches of the context took ahead and have not used. Call it with the context's lock held.
static uint64_t ahead_of_others(const vmem_kv *kv)
{
    uint64_t bytes = 0;
    for (vmem_kv *c = kv->ctx->caches; c; c = c->next) {
        if (c == kv)
            continue;
        pthread_mutex_lock(&c->stats_lock);
        uint64_t held = c->shown.held_pages;
        bytes += (c->promise > held ? c->promise - held : 0) << c->page_shift;
        pthread_mutex_unlock(&c->stats_lock);
    }
    return bytes;
}

static uint64_t locked_ahead_of_others(vmem_kv *kv)
{
    vmem__lock(kv->ctx);
    uint64_t bytes = ahead_of_others(kv);
    vmem__unlock(kv->ctx);
    return bytes;
}

static void promise(vmem_kv *kv, uint64_t pages)
{
    pthread_mutex_lock(&kv->stats_lock);
    kv->promise = pages;
    pthread_mutex_unlock(&kv->stats_lock);
}

void vmem__kv_join(vmem_kv *kv)
{
    vmem__lock(kv->ctx);
    kv->next = kv->ctx->caches;
    kv->ctx->caches = kv;
    vmem__unlock(kv->ctx);
}

void vmem__kv_part(vmem_kv *kv)
{
    vmem__lock(kv->ctx);
    struct vmem_kv **at = &kv->ctx->caches;
    while (*at && *at != kv)
        at = &(*at)->next;
    bool joined = *at;
    if (joined)
        *at = kv->next;
    vmem__unlock(kv->ctx);
    if (joined)
        vmem__trim_to(kv->ctx, locked_ahead_of_others(kv), NULL);
}

int vmem__kv_take_ahead(vmem_kv *kv, uint64_t pages)
{
    uint64_t own = (pages - KV_MIN(kv->held, pages)) << kv->page_shift;
    // Make no call for zero bytes: vmem_prealloc would give up the memory that other caches took ahead.
    const uint64_t others = locked_ahead_of_others(kv);
    int rc = own ? vmem__prealloc(kv->ctx, own + KV_MIN(others, UINT64_MAX - own), kv->whole) : 0;
    if (!rc)
        promise(kv, pages);
    return rc;
}

void vmem__kv_give_ahead(vmem_kv *kv, uint64_t pages)
{
    promise(kv, pages);
    uint64_t own = (pages - KV_MIN(kv->held, pages)) << kv->page_shift;
    vmem__trim_to(kv->ctx, own + locked_ahead_of_others(kv), NULL);
}

void vmem__kv_trim(vmem_kv *kv) { vmem__trim_to(kv->ctx, locked_ahead_of_others(kv), NULL); }

void vmem__kv_give_all_ahead(vmem_kv *kv)
{
    promise(kv, 0);
    pthread_mutex_unlock(&kv->state);
    vmem__kv_trim(kv);
    pthread_mutex_lock(&kv->state);
}

static uint64_t spare_pages(const vmem_kv *kv, uint64_t *room)
{
    vmem_context *ctx = kv->ctx;
    vmem__lock(ctx);
    uint64_t spare = ctx->committed > ctx->created ? ctx->committed - ctx->created : 0, others = ahead_of_others(kv);
    *room = !ctx->budget ? UINT64_MAX : ctx->budget > ctx->created ? ctx->budget - ctx->created : 0;
    vmem__unlock(ctx);
    spare -= KV_MIN(spare, others);
    *room -= KV_MIN(*room, others);
    return KV_MIN(spare, *room) >> kv->page_shift;
}

uint64_t vmem__kv_spare_memory(vmem_kv *kv)
{
    uint64_t room;
    return spare_pages(kv, &room);
}

// The device's free memory in bytes, as the driver says it, or as it said no longer than `age` ago, less what the context
// has taken since. To ask takes a system call, or on the host reading a file: too long for each admission.
static int device_free(const vmem_kv *kv, uint64_t age, uint64_t *bytes)
{
    struct vmem__device_free *last = &kv->ctx->device_free;
    uint64_t total;
    vmem__lock(kv->ctx);
    const uint64_t taken = kv->ctx->committed;
    *bytes = last->bytes + last->committed > taken ? last->bytes + last->committed - taken : 0;
    const bool known = last->at && kv_now() - last->at < age;
    vmem__unlock(kv->ctx);
    if (known)
        return 0;
    int rc = kv->ctx->b.ops->memory(&kv->ctx->b, &total, bytes);
    vmem__lock(kv->ctx);
    if (!rc)
        *last = (struct vmem__device_free){.bytes = *bytes, .committed = taken, .at = kv_now()};
    vmem__unlock(kv->ctx);
    return rc;
}

static uint64_t device_pages(const vmem_kv *kv, uint64_t age)
{
    uint64_t free, room, spare = spare_pages(kv, &room);
    if (device_free(kv, age, &free))
        return UINT64_MAX >> kv->page_shift; // unknown: a later request for pages succeeds or fails
    if (!kv->ctx->b.ops->populate)           // the device's memory comes in arenas of whole blocks
        free -= free % KV_BLOCK;
    return KV_MIN(spare + (free >> kv->page_shift), room >> kv->page_shift);
}

uint64_t vmem__kv_device_pages(const vmem_kv *kv) { return device_pages(kv, 0); }

uint64_t vmem__kv_limit(const vmem_kv *kv, uint64_t pages)
{
    uint64_t room;
    if (kv->promise >= kv->budget_pages || (pages && pages <= spare_pages(kv, &room)))
        return kv->budget_pages;
    uint64_t device = device_pages(kv, DEVICE_NS);
    if (pages > device) // before a no, ask
        device = vmem__kv_device_pages(kv);
    return KV_MIN(kv->budget_pages, kv->held + device);
}

uint64_t vmem__kv_reach(const vmem_kv *kv)
{
    const uint64_t most = kv->budget_pages + (kv->member ? vmem__kv_claimable(kv) : 0);
    if (!kv->member && kv->promise >= kv->budget_pages)
        return most;
    uint64_t device = device_pages(kv, DEVICE_NS);
    if (kv->held + device < most) // before a no, ask
        device = vmem__kv_device_pages(kv);
    return KV_MIN(most, kv->held + device);
}

bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages)
{
    if (kv->promise >= kv->budget_pages)
        return true;
    vmem__lock(kv->ctx);
    bool some = ahead_of_others(kv);
    vmem__unlock(kv->ctx);
    return !some || kv->held + pages <= vmem__kv_limit(kv, pages);
}

bool vmem__kv_hold_to_count(vmem_kv *kv)
{
    bool uncertain = kv->promise < kv->budget_pages;
    if (uncertain)
        vmem__kv_worker_hold(kv);
    return uncertain;
}

// ---- the budget -----------------------------------------------------------------------------------------------

int vmem__kv_set_budget(vmem_kv *kv, uint64_t bytes)
{
    uint64_t pages = bytes >> kv->page_shift;
    bool lazy = kv->flags & VMEM_KV_LAZY;
    if (!pages)
        return vmem__error(-EINVAL, "bytes %" PRIu64 " is less than a page", bytes);
    if (pages > kv->budget_pages) {
        int rc = lazy ? 0 : vmem__kv_take_ahead(kv, pages);
        if (!rc)
            kv->budget_pages = pages;
        return rc;
    }
    vmem__kv_worker_hold(kv);
    int rc = kv->held > pages ? vmem__kv_reclaim(kv, kv->held - pages, true, NULL) : 0;
    if (!rc)
        kv->budget_pages = pages;
    vmem__kv_worker_release(kv);
    if (rc)
        return rc;
    vmem__kv_give_ahead(kv, lazy ? 0 : pages);
    // Keep the pages that the budget still allows taken ahead. If another process took the memory first, create pages
    // when they are needed.
    if (!lazy && vmem__kv_take_ahead(kv, pages))
        promise(kv, 0);
    return 0;
}

void vmem__kv_take_wanted(vmem_kv *kv)
{
    uint64_t wanted = kv->member ? 0 : vmem__kv_wanted_budget(kv); // the pool's thread serves members
    if (!wanted)
        return;
    vmem__kv_may_take_long(kv);
    int rc = vmem__kv_set_budget(kv, wanted);
    vmem__kv_answer_wanted(kv, wanted, rc ? VMEM_KV_REFUSED : VMEM_KV_APPLIED, rc ? VMEM_KV_NO_MEMORY : 0);
}

int vmem__kv_would_fit(vmem_kv *kv, uint64_t pages, uint64_t *missing)
{
    bool held = vmem__kv_hold_to_count(kv);
    vmem__kv_claim_for(kv, pages);
    uint64_t limit = vmem__kv_limit(kv, pages), want = kv->held - kv->pending - vmem__kv_reclaimable(kv) + pages;
    int rc = 0;
    vmem__kv_enough();
    if (pages && want > limit)
        rc = want > kv->budget_pages ? vmem__kv_short_of_budget(kv, want, missing)
                                     : vmem__kv_short_of_device(kv, want - limit, missing);
    if (held)
        vmem__kv_worker_release(kv);
    return rc;
}

int vmem_kv_set_budget(vmem_kv *kv, uint64_t bytes)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (kv->member)
        rc = vmem__error(-EINVAL,
                         "the cache is in a pool, which sets its budget: set the cache's share of the pool instead");
    return vmem__kv_leave(kv, rc ? rc : vmem__kv_set_budget(kv, bytes));
}

int vmem_kv_reclaim(vmem_kv *kv, uint64_t bytes, uint64_t *freed)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    uint64_t got = 0;
    vmem__kv_worker_hold(kv);
    rc = vmem__kv_reclaim(kv, kv_ceil_pages(bytes, kv), false, &got);
    vmem__kv_worker_release(kv);
    vmem__kv_give_ahead(kv, 0);
    if (rc == -ENOMEM) // the system has no mappings to cut the rest: less is freed, and nothing is lost
        rc = 0;
    if (freed)
        *freed = got << kv->page_shift;
    return vmem__kv_leave(kv, rc);
}
