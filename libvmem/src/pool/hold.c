// A hold: a member of a pool that stands for memory which is not libvmem's. Its pages are numbers.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "pool/pool.h"

#define PAGE VMEM_PAGE_2M
#define LAPSE_NS UINT64_C(100000000) // time after which a wish of the pool lapses, and unused budget goes back

struct vmem_kv_hold {
    vmem_context *ctx;
    struct vmem__member *member;
    pthread_mutex_t lock;
    uint64_t budget, held, offered; // pages
    uint64_t wanted, wanted_until;  // pages that others want, and ns until when
    uint64_t asked_at;              // ns, when a call last asked for more; 0: what it has suffices
};

static void lock(void *hold) { pthread_mutex_lock(&((vmem_kv_hold *)hold)->lock); }
static void unlock(void *hold) { pthread_mutex_unlock(&((vmem_kv_hold *)hold)->lock); }

// What has come of an answer stays until the rest has, or the question lapses.
static bool is_asking(const vmem_kv_hold *h) { return h->asked_at && vmem__now() - h->asked_at < 3 * LAPSE_NS; }

static void get_state(void *hold, struct vmem__member_state *out)
{
    const vmem_kv_hold *h = hold;
    *out = (struct vmem__member_state){
        .budget = h->budget,
        .held = h->held,
        .target = h->budget,
        .min_pages = is_asking(h) ? h->budget : h->held,
        .evictable = is_asking(h) ? 0 : MIN(h->offered, h->held),
    };
}

static void raise_budget(void *hold, uint64_t pages) { ((vmem_kv_hold *)hold)->budget += pages; }
static void lower_budget(void *hold, uint64_t pages) { ((vmem_kv_hold *)hold)->budget = pages; }

static bool continue_lowering(void *hold, uint64_t least)
{
    vmem_kv_hold *h = hold;
    if (!is_asking(h) && h->budget > least)
        h->budget = least;
    return false;
}

static void trim(void *hold, bool keep_retained) { (void)hold, (void)keep_retained; }

static void evict(void *hold, uint64_t pages)
{
    vmem_kv_hold *h = hold;
    lock(h);
    h->wanted = pages;
    h->wanted_until = vmem__now() + LAPSE_NS;
    unlock(h);
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

int vmem_kv_hold_create(vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_kv_hold_config *cfg,
                        vmem_kv_hold **out)
{
    struct vmem_kv_hold_config c;
    int rc = vmem__usable(ctx, NULL);
    if (!rc && (!pool || !cfg || !out))
        rc = vmem__error(-EINVAL, "pool, cfg and out must not be NULL");
    if (!rc)
        rc = vmem__struct_take(&c, sizeof c, sizeof c, cfg, "cfg");
    if (!rc && c.gpu > 1)
        rc = vmem__error(-EINVAL, "gpu %" PRIu32 " must be 0 or 1", c.gpu);
    if (rc)
        return rc;
    vmem_kv_hold *h = calloc(1, sizeof *h);
    if (!h)
        return vmem__error(-ENOMEM, "no memory for a hold");
    struct vmem_info device = {.size = sizeof device};
    strcpy(device.backend, c.gpu ? "gpu" : "host");
    if (c.gpu)
        memcpy(device.device_uuid, c.device, sizeof device.device_uuid);
    const struct vmem__member_terms terms = {.ctx = ctx,
                                             .page_size = PAGE,
                                             .name = c.name ? c.name : "common",
                                             .device = &device};
    h->ctx = ctx;
    pthread_mutex_init(&h->lock, NULL);
    rc = vmem__pool_join(pool, &ops, h, &terms, &h->member, &h->budget);
    if (rc) {
        pthread_mutex_destroy(&h->lock);
        free(h);
        return rc;
    }
    *out = h;
    return 0;
}

void vmem_kv_hold_destroy(vmem_kv_hold *h)
{
    if (!h)
        return;
    if (!vmem__usable(h->ctx, NULL)) { // not in a forked child
        vmem__pool_leave(h->member, 0);
        vmem__pool_left(h->member);
        pthread_mutex_destroy(&h->lock);
    }
    free(h);
}

static int check(const vmem_kv_hold *h)
{
    return h ? vmem__usable(h->ctx, NULL) : vmem__error(-EINVAL, "hold must not be NULL");
}

int vmem_kv_hold_set(vmem_kv_hold *h, uint64_t bytes, uint64_t *missing)
{
    int rc = check(h);
    if (rc)
        return rc;
    if (bytes % PAGE)
        return vmem__error(-EINVAL, "bytes %" PRIu64 " must be a multiple of 2 MiB", bytes);
    const uint64_t want = bytes / PAGE;
    uint32_t why;
    lock(h);
    if (want > h->budget)
        h->budget += vmem__pool_claim(h->member, h->budget, want - h->budget, want - h->budget);
    const uint64_t lacks = sat_sub(want, h->budget);
    if (!lacks) {
        const bool less = want < h->held;
        h->held = want;
        h->asked_at = 0;
        h->wanted = less ? 0 : h->wanted;
        vmem__pool_unask(h->member);
        vmem__pool_wake(h->member);
    } else {
        h->asked_at = vmem__now();
        (void)vmem__pool_ask(h->member, h->held, lacks, &why); // a refusal is not final: the caller asks again
    }
    unlock(h);
    if (missing)
        *missing = lacks * PAGE;
    return 0;
}

int vmem_kv_hold_offer(vmem_kv_hold *h, uint64_t bytes, uint64_t *wanted)
{
    int rc = check(h);
    if (rc)
        return rc;
    lock(h);
    const bool more = bytes / PAGE > h->offered;
    h->offered = bytes / PAGE;
    if (h->wanted && vmem__now() > h->wanted_until)
        h->wanted = 0;
    const uint64_t pages = MIN(h->wanted, h->offered);
    if (more)
        vmem__pool_wake(h->member);
    unlock(h);
    if (wanted)
        *wanted = pages * PAGE;
    return 0;
}
