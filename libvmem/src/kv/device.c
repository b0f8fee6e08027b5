// The device memory behind the budget.
//
// The caches of one context are linked (vmem_context.caches), so that a cache that takes memory ahead or gives it back
// leaves the others theirs. kv_ledger.preallocated is the number of pages that a cache can create without asking the
// device. Where it is less than the budget (with VMEM_KV_LAZY, and after memory was given back), the device may refuse.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "kv/kv.h"

// For so long, the driver's last answer on its free memory is reused to say that there is enough.
#define DEVICE_NS UINT64_C(100000000)

// The bytes that the context's other caches have preallocated and not used. Needs the context's lock.
static uint64_t preallocated_by_others(const vmem_kv *kv)
{
    uint64_t bytes = 0;
    for (vmem_kv *c = kv->ctx->caches; c; c = c->next) {
        if (c == kv)
            continue;
        pthread_mutex_lock(&c->report.lock);
        uint64_t held = c->report.shown.held_pages;
        bytes += sat_sub(c->ledger.preallocated, held) << c->page_shift;
        pthread_mutex_unlock(&c->report.lock);
    }
    return bytes;
}

static uint64_t lock_preallocated_by_others(const vmem_kv *kv)
{
    vmem__lock(kv->ctx);
    uint64_t bytes = preallocated_by_others(kv);
    vmem__unlock(kv->ctx);
    return bytes;
}

void vmem__kv_set_preallocated(vmem_kv *kv, uint64_t pages)
{
    pthread_mutex_lock(&kv->report.lock);
    kv->ledger.preallocated = pages;
    pthread_mutex_unlock(&kv->report.lock);
}

void vmem__kv_register(vmem_kv *kv)
{
    vmem__lock(kv->ctx);
    kv->next = kv->ctx->caches;
    kv->ctx->caches = kv;
    vmem__unlock(kv->ctx);
}

void vmem__kv_unregister(vmem_kv *kv)
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
        vmem__trim_to(kv->ctx, lock_preallocated_by_others(kv), false, NULL);
}

int vmem__kv_prealloc(vmem_kv *kv, uint64_t pages)
{
    const uint64_t own = sat_sub(pages, kv->ledger.held) << kv->page_shift;
    // Make no call for zero bytes: vmem_prealloc would give up the memory that other caches have taken ahead.
    const uint64_t others = lock_preallocated_by_others(kv);
    int rc = own ? vmem__prealloc(kv->ctx, own + MIN(others, UINT64_MAX - own), kv->whole) : 0;
    if (!rc)
        vmem__kv_set_preallocated(kv, pages);
    return rc;
}

void vmem__kv_trim_prealloc(vmem_kv *kv, uint64_t pages)
{
    vmem__kv_set_preallocated(kv, pages);
    const uint64_t own = sat_sub(pages, kv->ledger.held) << kv->page_shift;
    vmem__trim_to(kv->ctx, own + lock_preallocated_by_others(kv), false, NULL);
}

void vmem__kv_trim(vmem_kv *kv, bool wanted) { vmem__trim_to(kv->ctx, lock_preallocated_by_others(kv), wanted, NULL); }

// Pages whose memory the device has given and no page uses. *room, unless NULL: those that the context's budget has
// room for.
static uint64_t spare_memory(const vmem_kv *kv, uint64_t *room)
{
    vmem_context *ctx = kv->ctx;
    vmem__lock(ctx);
    const uint64_t others = preallocated_by_others(kv), used = ctx->created + others;
    const uint64_t spare = sat_sub(ctx->committed, used);
    const uint64_t most = ctx->budget ? sat_sub(ctx->budget, used) : UINT64_MAX;
    vmem__unlock(ctx);
    if (room)
        *room = most >> kv->page_shift;
    return MIN(spare, most) >> kv->page_shift;
}

// The device's free memory in bytes: the driver's answer, which may be `age` ns old, less what the context has taken
// since. Asking takes a system call, or on the host reading a file: too long for each admission.
static int device_free(const vmem_kv *kv, uint64_t age, uint64_t *bytes)
{
    struct vmem__device_free *last = &kv->ctx->device_free;
    uint64_t total;
    vmem__lock(kv->ctx);
    const uint64_t taken = kv->ctx->committed;
    *bytes = sat_sub(last->bytes + last->committed, taken);
    const bool known = last->at && vmem__now() - last->at < age;
    vmem__unlock(kv->ctx);
    if (known)
        return 0;
    int rc = kv->ctx->b.ops->memory(&kv->ctx->b, &total, bytes);
    vmem__lock(kv->ctx);
    if (!rc)
        *last = (struct vmem__device_free){.bytes = *bytes, .committed = taken, .at = vmem__now()};
    vmem__unlock(kv->ctx);
    return rc;
}

static uint64_t device_pages(const vmem_kv *kv, uint64_t age)
{
    uint64_t free, room, spare = spare_memory(kv, &room);
    if (device_free(kv, age, &free))
        return UINT64_MAX >> kv->page_shift; // unknown: a later request for pages succeeds or fails
    if (!kv->ctx->b.ops->populate)           // the device's memory comes in arenas of whole blocks
        free -= free % KV_BLOCK;
    return MIN(spare + (free >> kv->page_shift), room);
}

uint64_t vmem__kv_device_pages(const vmem_kv *kv) { return device_pages(kv, 0); }

bool vmem__kv_device_due(const vmem_kv *kv)
{
    vmem__lock(kv->ctx);
    const uint64_t at = kv->ctx->device_free.at;
    vmem__unlock(kv->ctx);
    return !at || vmem__now() - at >= DEVICE_NS;
}

bool vmem__kv_asks_device(const vmem_kv *kv)
{
    return (kv->membership.member || kv->ledger.preallocated < kv->ledger.budget) && vmem__kv_device_due(kv);
}

// How many pages, at most `most`, the cache can have. The device is asked only if fewer than `want` are at hand.
// Pending pages do not count as held, because their memory may already count as memory that no page uses.
static uint64_t count_reachable(const vmem_kv *kv, uint64_t most, uint64_t want, uint64_t age)
{
    if (!kv->membership.member && kv->ledger.preallocated >= kv->ledger.budget)
        return most;
    const uint64_t there = kv->ledger.held - kv->ledger.pending, at_hand = there + spare_memory(kv, NULL);
    const uint64_t reached = at_hand >= want ? at_hand : there + device_pages(kv, age);
    return MIN(most, reached);
}

static uint64_t most_pages(const vmem_kv *kv)
{
    return kv->ledger.budget + vmem__pool_claimable(kv->membership.member, kv->ledger.budget);
}

// As count_reachable. An answer of less than `want` rests on a word of the driver that is at most `age` ns old, and is
// given while no page is pending.
static uint64_t count_lately(vmem_kv *kv, uint64_t most, uint64_t want, uint64_t age)
{
    const uint64_t lately = count_reachable(kv, most, want, DEVICE_NS);
    if (lately >= want)
        return lately;
    if (kv->ledger.pending)
        vmem__kv_wait_job(kv);
    return count_reachable(kv, most, want, age);
}

uint64_t vmem__kv_page_limit(vmem_kv *kv, uint64_t want)
{
    const uint64_t most = most_pages(kv);
    return want > most ? most : count_lately(kv, most, want, 0);
}

uint64_t vmem__kv_page_limit_lately(vmem_kv *kv)
{
    const uint64_t most = most_pages(kv);
    return count_lately(kv, most, most, DEVICE_NS);
}

uint64_t vmem__kv_page_limit_known(const vmem_kv *kv)
{
    const uint64_t most = most_pages(kv);
    return count_reachable(kv, most, most, UINT64_MAX);
}

bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages)
{
    const uint64_t want = kv->ledger.held + pages, most = kv->ledger.budget;
    return kv->ledger.preallocated >= most || !lock_preallocated_by_others(kv) ||
           want <= count_reachable(kv, most, want, DEVICE_NS) || want <= count_reachable(kv, most, want, 0);
}
