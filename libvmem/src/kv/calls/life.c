// Creation and the end of a cache.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core/core.h"
#include "core/struct.h"
#include "kv/calls/calls.h"

static int check_config(vmem_context *ctx, const struct vmem_kv_config *c)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (c->steps_in_flight > 16)
        return vmem__error(-EINVAL, "steps_in_flight %u is over 16", c->steps_in_flight);
    rc = vmem__check_flags(c->flags, VMEM_KV_UNSHARED * 2 - 1);
    if (rc)
        return rc;
    if (!c->n_tensors || !c->tensors || c->n_tensors > 65536)
        return vmem__error(-EINVAL, "tensors: %u is not between 1 and 65536", c->n_tensors);
    if (!c->slots || c->slots > 65536)
        return vmem__error(-EINVAL, "slots %u is not between 1 and 65536", c->slots);
    if (!c->max_tokens || c->max_tokens > INT32_MAX)
        return vmem__error(-EINVAL, "max_tokens %u is not between 1 and %d", c->max_tokens, INT32_MAX);
    if (c->tile_rows > 65536)
        return vmem__error(-EINVAL, "tile_rows %u is over 65536", c->tile_rows);
    rc = vmem__check_page_size(ctx, c->page_size);
    if (rc)
        return rc;
    if (c->budget < c->page_size)
        return vmem__error(-EINVAL, "budget %" PRIu64 " is less than a page, %" PRIu64, c->budget, c->page_size);
    if (c->reclaim_percent > 50)
        return vmem__error(-EINVAL, "reclaim_percent %u is over 50", c->reclaim_percent);
    for (uint32_t i = 0; i < c->n_tensors; i++) {
        const struct vmem_kv_tensor *t = &c->tensors[i];
        if (!t->row_bytes || t->row_bytes > (UINT64_C(1) << 30))
            return vmem__error(-EINVAL, "tensors[%u].row_bytes %" PRIu64 " is not between 1 and 2^30", i, t->row_bytes);
        if (t->max_tokens > c->max_tokens)
            return vmem__error(-EINVAL, "tensors[%u].max_tokens %u is over the cache's, %u", i, t->max_tokens,
                               c->max_tokens);
        if (t->reserved)
            return vmem__error(-EINVAL, "tensors[%u].reserved is not 0", i);
    }
    return 0;
}

static int reserve(vmem_kv *kv)
{
    struct vmem_info info = {.size = sizeof info};
    int rc = vmem_context_info(kv->ctx, &info);
    if (rc)
        return rc;
    // On a GPU, to take the backdrop's place and to put it back costs half of each map and unmap. What maps pages
    // together leaves it out by itself.
    const bool bare = info.caps & VMEM_CAP_GPU && kv->flags & VMEM_KV_UNSHARED && !kv->whole;
    bool backdrop = info.caps & VMEM_CAP_BACKDROP && !bare;
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_group *g = &kv->groups[j];
        for (uint32_t i = g->first; i < g->first + g->n; i++) {
            rc =
                vMemReserve(kv->ctx, g->slot_stride * kv->n_slots, backdrop ? VMEM_RESERVE_BACKDROP : 0, &kv->addrs[i]);
            // Kernels receive the tensor's first address, so CUDA must know that address.
            if (!rc && backdrop)
                rc = vmem_backdrop(kv->ctx, kv->addrs[i], kv->page_size);
            if (rc)
                return rc;
        }
    }
    return vMemReserve(kv->ctx, KV_MAX(kv->n_tensors, KV_SCRATCH) * kv->page_size, backdrop ? VMEM_RESERVE_BACKDROP : 0,
                       &kv->copy.scratch);
}

static _Atomic uint64_t caches; // created so far

static int init(vmem_kv *kv, const struct vmem_kv_config *c)
{
    pthread_mutex_init(&kv->gate.api, NULL);
    pthread_mutex_init(&kv->gate.state, NULL);
    pthread_mutex_init(&kv->report.lock, NULL);
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&kv->turn.work, &steady);
    pthread_condattr_destroy(&steady);
    pthread_cond_init(&kv->turn.done, NULL);
    kv->pid = getpid();
    kv->flags = c->flags;
#ifdef VMEM_DEBUG
    kv->flags |= VMEM_KV_CHECK;
#endif
    kv->n_tensors = c->n_tensors;
    kv->n_slots = kv->in_state[VMEM_KV_FREE] = c->slots;
    kv->max_tokens = c->max_tokens;
    kv->tile_rows = c->tile_rows ? c->tile_rows : 1;
    kv->ahead_tokens = c->ahead_tokens ? c->ahead_tokens : 128;
    kv->ahead_min = c->ahead_min ? c->ahead_min : 4;
    kv->eager_tokens = KV_MIN(c->eager_tokens ? c->eager_tokens : 512, c->max_tokens);
    kv->reclaim_percent = c->reclaim_percent ? c->reclaim_percent : 10;
    kv->worker.idle_ms = c->idle_ms;
    kv->page_size = c->page_size;
    kv->page_shift = (uint32_t)__builtin_ctzll(c->page_size);
    const uint64_t whole = c->flags & VMEM_KV_UNSHARED ? kv->ctx->b.whole_max >> kv->page_shift : 0;
    kv->whole = whole >= 2 ? (uint32_t)whole : 0;
    kv->block = c->page_size < KV_BLOCK ? (uint32_t)(KV_BLOCK / c->page_size) : 1;
    for (uint32_t i = 0; i < c->n_tensors; i++)
        if (c->flags & VMEM_KV_ZERO || c->tensors[i].kind != c->tensors[0].kind)
            kv->create_flags = VMEM_CREATE_ZERO;
    int rc = vmem__kv_make_groups(kv, c);
    if (rc)
        return rc;
    rc = vmem__kv_make_sets(kv);
    if (rc)
        return rc;
    kv->slots = calloc(kv->n_slots, sizeof(*kv->slots));
    kv->idle = calloc(kv->n_slots, sizeof(*kv->idle));
    kv->spans = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->spans));
    kv->stale = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->stale));
    kv->plan.wants = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->plan.wants));
    kv->plan.changed = calloc(kv->n_slots, sizeof(*kv->plan.changed));
    kv->steps_in_flight = c->steps_in_flight ? c->steps_in_flight : 1;
    kv->fence.past = calloc((size_t)kv->n_slots * kv->n_groups * kv->steps_in_flight, sizeof(*kv->fence.past));
    kv->runs.pins = calloc(kv->n_slots, sizeof(*kv->runs.pins));
    kv->runs.unused = KV_NO_RUN;
    kv->runs.tag = 1 + atomic_fetch_add(&caches, 1) % KV_RUN_TAGS;
    for (uint32_t p = 0; p < 2; p++)
        kv->runs.order[p] = (struct kv_use){KV_NO_RUN, KV_NO_RUN};
    if (!kv->slots || !kv->idle || !kv->spans || !kv->stale || !kv->plan.wants || !kv->plan.changed ||
        !kv->fence.past || !kv->runs.pins)
        return vmem__error(-ENOMEM, "no memory for %u slots", kv->n_slots);
    rc = reserve(kv);
    if (rc)
        return rc;
    vmem__kv_join(kv);
    if (!(c->flags & VMEM_KV_LAZY))
        rc = vmem__kv_take_ahead(kv, c->budget >> kv->page_shift);
    if (rc)
        return vmem__error(rc, "budget %" PRIu64 ": %s", c->budget, vmem_last_error());
    kv->ledger.budget = c->budget >> kv->page_shift;
    vmem__kv_summarise(kv);
    return c->flags & VMEM_KV_OVERLAP ? vmem__kv_worker_start(kv) : 0;
}

// ---- the end ---------------------------------------------------------------------------------------------------------

// The pages that a slot could not be cut off.
static void release_slot(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *s = kv_span(kv, slot, i);
        for (uint32_t t = 0; t < kv->groups[i].n; t++)
            vmem__kv_release(kv, kv_table(kv, &kv->groups[i], slot, t) + s->lo, s->hi - s->lo);
    }
}

static void release(vmem_kv *kv)
{
    const bool begun = kv->spans && kv->copy.scratch;
    bool cut = true;
    for (uint32_t s = 0; s < kv->n_slots && begun; s++) {
        kv->slots[s].fresh = true; // the caller guarantees that no kernel accesses the slot
        cut = !vmem__kv_cut_slot(kv, s) && cut;
    }
    // With the addresses, the last mappings go, those that the driver would not unmap as well.
    for (uint32_t i = 0; kv->addrs && i < kv->n_tensors; i++)
        if (kv->addrs[i])
            vmem_unreserve(kv->ctx, kv->addrs[i]);
    if (kv->copy.scratch)
        vmem_unreserve(kv->ctx, kv->copy.scratch);
    vmem__kv_drop_all_runs(kv);
    for (uint32_t s = 0; s < kv->n_slots && begun && !cut; s++)
        release_slot(kv, s);
    vmem__kv_part(kv);
}

static void free_grow(struct kv_grow *l)
{
    free(l->parts);
    free(l->pages);
    free(l->maps);
    free(l->stretches);
}

static void free_cut(struct kv_cut *c)
{
    free(c->ops);
    free(c->pages);
}

// Frees all memory of a cache that no call uses any more, but for the handle itself.
static void give_up(vmem_kv *kv)
{
    if (kv->life.given_up || kv->pid != getpid()) // a forked child has neither the worker nor the pages
        return;
    vmem__kv_pool_leave(kv);
    vmem__kv_worker_stop(kv);
    release(kv);
    vmem__pool_left(kv->lend.left);
    vmem__kv_unpublish(kv);
    kv->life.given_up = true;
}

static void destroy(vmem_kv *kv)
{
    give_up(kv);
    if (kv->pages)
        munmap(kv->pages, kv->pages_bytes);
    if (kv->joined)
        munmap(kv->joined, kv->joined_bytes);
    if (kv->view.map) {
        munmap(kv->view.map, sizeof(*kv->view.map));
        close(kv->view.fd);
    }
    free(kv->view.path);
    free_grow(&kv->grow);
    free_grow(&kv->worker.grow);
    free_cut(&kv->cut);
    free_cut(&kv->worker.cut);
    vmem__kv_runs_free(kv);
    free(kv->doomed.pages);
    free(kv->refs.entries);
    free(kv->plan.changed);
    free(kv->bits);
    free(kv->slots);
    free(kv->idle);
    free(kv->spans);
    free(kv->stale);
    free(kv->plan.wants);
    free(kv->fence.past);
    free(kv->groups);
    free(kv->order);
    free(kv->addrs);
    free(kv);
}

// ---- the public calls --------------------------------------------------------------------------------------------------

int vmem_kv_create(vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **out)
{
    if (!ctx || !cfg || !out)
        return vmem__error(-EINVAL, "ctx, cfg and out must not be NULL");
    struct vmem_kv_config c;
    int rc = vmem__struct_take(&c, sizeof c, offsetof(struct vmem_kv_config, steps_in_flight), cfg, "cfg");
    if (!rc)
        rc = check_config(ctx, &c);
    if (rc)
        return rc;
    vmem_kv *kv = calloc(1, sizeof(*kv));
    if (!kv)
        return vmem__error(-ENOMEM, "no memory for a KV cache");
    kv->ctx = ctx;
    kv->owned = ctx->owned;
    rc = init(kv, &c);
    if (rc) {
        destroy(kv);
        return rc;
    }
    *out = kv;
    return 0;
}

int vmem__kv_close(vmem_kv *kv, uint64_t step, bool *quiet)
{
    static const unsigned char none;
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_check_fence(kv, step);
    *quiet = step <= vmem__kv_ended(kv);
    if (!rc) {
        kv->life.closing = true;
        kv->life.closes = step;
        kv->owned = &none;
    }
    vmem__kv_leave(kv, rc);
    if (!rc) {
        vmem__kv_pool_leave(kv);
        vmem__kv_worker_stop(kv); // the worker copies no row after this
    }
    return rc;
}

int vmem_kv_destroy(vmem_kv *kv, uint64_t after)
{
    bool quiet = false;
    if (!after) {
        if (kv)
            destroy(kv);
        return 0;
    }
    int rc = vmem__kv_close(kv, after, &quiet);
    if (quiet && !rc)
        give_up(kv); // not the handle: callers need not know which steps are known to have ended
    return rc;
}

int vmem__kv_retire(vmem_kv *kv, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_retire_to(kv, step));
}

int vmem_kv_retire(vmem_kv *kv, uint64_t step)
{
    if (!kv || !kv->life.closing)
        return vmem__kv_retire(kv, step);
    int rc = vmem__kv_check_fence(kv, step);
    if (!rc && step >= kv->life.closes)
        destroy(kv);
    return rc;
}
