// A cache: its creation, its end, and the public calls that ask for its state.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kv/kv.h"

static int check_config(vmem_context *ctx, const struct vmem_kv_config *c)
{
    if (c->steps_in_flight > 16)
        return vmem__error(-EINVAL, "steps_in_flight %u is over 16", c->steps_in_flight);
    int rc = vmem__check_flags(c->flags, VMEM_KV_LAZY * 2 - 1);
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
    rc = vmem__usable_page_size(ctx, c->page_size);
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

static int reserve_tensors(vmem_kv *kv)
{
    struct vmem_info info = {.size = sizeof info};
    int rc = vmem_context_info(kv->ctx, &info);
    if (rc)
        return rc;
    const bool backdrop = info.caps & VMEM_CAP_BACKDROP;
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
    return vMemReserve(kv->ctx, MAX(kv->n_tensors, KV_SCRATCH) * kv->page_size, backdrop ? VMEM_RESERVE_BACKDROP : 0,
                       &kv->scratch);
}

static _Atomic uint64_t caches; // created so far

static void init_locks(vmem_kv *kv)
{
    pthread_mutex_init(&kv->gate.api, NULL);
    pthread_mutex_init(&kv->gate.state, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&kv->turn.work, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&kv->turn.done, NULL);
}

// Sets the constants by the configuration and the defaults.
static void configure(vmem_kv *kv, const struct vmem_kv_config *c)
{
    kv->pid = getpid();
    kv->flags = c->flags;
    if (c->flags & VMEM_KV_ZERO) // pages are zero when they are created, and no slot keeps any for another request
        kv->flags &= ~VMEM_KV_DEFER;
#ifdef VMEM_DEBUG
    kv->flags |= VMEM_KV_CHECK;
#endif
    kv->n_tensors = c->n_tensors;
    kv->n_slots = kv->in_state[VMEM_KV_FREE] = c->slots;
    kv->max_tokens = c->max_tokens;
    kv->tile_rows = c->tile_rows ? c->tile_rows : 1;
    kv->ahead_tokens = c->ahead_tokens ? c->ahead_tokens : 128;
    kv->ahead_min = c->ahead_min ? c->ahead_min : 4;
    kv->eager_tokens = MIN(c->eager_tokens ? c->eager_tokens : 512, c->max_tokens);
    kv->reclaim_percent = c->reclaim_percent ? c->reclaim_percent : 10;
    kv->worker.idle_ms = c->idle_ms;
    kv->page_size = c->page_size;
    kv->page_shift = kv->ledger.ahead.page_shift = (uint32_t)__builtin_ctzll(c->page_size);
    kv->block_pages = c->page_size < KV_BLOCK ? (uint32_t)(KV_BLOCK / c->page_size) : 1;
    for (uint32_t i = 0; i < c->n_tensors; i++)
        if (c->flags & VMEM_KV_ZERO || c->tensors[i].kind != c->tensors[0].kind)
            kv->create_flags = VMEM_CREATE_ZERO;
    kv->steps_in_flight = c->steps_in_flight ? c->steps_in_flight : 1;
    kv->runs.unused = KV_NO_RUN;
    kv->runs.newest = kv->runs.oldest = KV_NO_RUN;
    const uint64_t number = atomic_fetch_add(&caches, 1);
    kv->runs.tag = 1 + number % KV_RUN_TAGS;
    kv->fence.step = kv->fence.retired = (1 + number % KV_STEP_TAGS) << KV_STEP_TAG | KV_STEP_NONE;
}

static int make_tables(vmem_kv *kv, const struct vmem_kv_config *c)
{
    int rc = vmem__kv_make_groups(kv, c);
    if (!rc)
        rc = vmem__kv_make_sets(kv);
    if (rc)
        return rc;
    kv->slots = calloc(kv->n_slots, sizeof(*kv->slots));
    kv->idle = calloc(kv->n_slots, sizeof(*kv->idle));
    kv->spans = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->spans));
    kv->stale = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->stale));
    kv->plan.wants = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->plan.wants));
    kv->plan.changed = calloc(kv->n_slots, sizeof(*kv->plan.changed));
    kv->fence.past = calloc((size_t)kv->n_slots * kv->n_groups * kv->steps_in_flight, sizeof(*kv->fence.past));
    kv->runs.pins = calloc(kv->n_slots, sizeof(*kv->runs.pins));
    if (!kv->slots || !kv->idle || !kv->spans || !kv->stale || !kv->plan.wants || !kv->plan.changed ||
        !kv->fence.past || !kv->runs.pins)
        return vmem__error(-ENOMEM, "no memory for %u slots", kv->n_slots);
    return 0;
}

static int init(vmem_kv *kv, const struct vmem_kv_config *c)
{
    init_locks(kv);
    configure(kv, c);
    int rc = make_tables(kv, c);
    if (!rc)
        rc = reserve_tensors(kv);
    if (rc)
        return rc;
    vmem__kv_register(kv);
    if (!(c->flags & VMEM_KV_LAZY))
        rc = vmem__kv_prealloc(kv, c->budget >> kv->page_shift);
    if (rc)
        return vmem__error(rc, "budget %" PRIu64 ": %s", c->budget, vmem_last_error());
    kv->ledger.budget = c->budget >> kv->page_shift;
    return c->flags & VMEM_KV_OVERLAP ? vmem__kv_worker_start(kv) : 0;
}

// ---- the end ---------------------------------------------------------------------------------------------------------

// Releases the pages of a slot that the driver refused to unmap.
static void release_slot(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_span *s = kv_span(kv, slot, i);
        for (uint32_t t = 0; t < kv->groups[i].n; t++)
            vmem_drop(kv->ctx, kv_table(kv, &kv->groups[i], slot, t) + s->lo, s->hi - s->lo);
    }
}

static void release_pages(vmem_kv *kv)
{
    const bool begun = kv->spans && kv->scratch;
    bool cut = true;
    for (uint32_t s = 0; s < kv->n_slots && begun; s++) {
        kv->slots[s].fresh = true; // the caller guarantees that no kernel accesses the slot
        cut = !vmem__kv_cut_slot(kv, s) && cut;
    }
    // Freeing the addresses ends all mappings, also those that the driver has refused to unmap.
    for (uint32_t i = 0; kv->addrs && i < kv->n_tensors; i++)
        if (kv->addrs[i])
            vmem_unreserve(kv->ctx, kv->addrs[i]);
    if (kv->scratch)
        vmem_unreserve(kv->ctx, kv->scratch);
    vmem__kv_drop_all_runs(kv);
    for (uint32_t s = 0; s < kv->n_slots && begun && !cut; s++)
        release_slot(kv, s);
    vmem__kv_unregister(kv);
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

void vmem_kv_destroy(vmem_kv *kv)
{
    if (!kv)
        return;
    if (kv->pid == getpid()) { // a forked child has neither the worker nor the pages
        vmem__kv_pool_leave(kv);
        vmem__kv_worker_stop(kv);
        release_pages(kv);
        vmem__pool_left(kv->membership.left);
        if (kv->view.path)
            unlink(kv->view.path);
    }
    if (kv->pages)
        munmap(kv->pages, kv->pages_bytes);
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
    free(kv->shared.entries);
    free(kv->plan.changed);
    free(kv->lists[0]);
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
    const unsigned char *owned;
    if (!rc)
        rc = vmem__usable(ctx, &owned);
    if (!rc)
        rc = check_config(ctx, &c);
    if (rc)
        return rc;
    vmem_kv *kv = calloc(1, sizeof(*kv));
    if (!kv)
        return vmem__error(-ENOMEM, "no memory for a KV cache");
    kv->ctx = ctx;
    kv->absent = vmem__absent(ctx);
    kv->owned = owned;
    rc = init(kv, &c);
    if (rc) {
        vmem_kv_destroy(kv);
        return rc;
    }
    *out = kv;
    return 0;
}

int vmem_kv_close(vmem_kv *kv)
{
    static const unsigned char none;
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    kv->owned = &none;
    kv->closed = true;
    vmem__kv_leave(kv, 0);
    vmem__kv_pool_leave(kv);
    vmem__kv_worker_stop(kv);
    return 0;
}

// ---- questions ------------------------------------------------------------------------------------------------------

int vmem_kv_get_layout(vmem_kv *kv, uint32_t tensor, struct vmem_kv_layout *out)
{
    if (!kv)
        return vmem__error(-EINVAL, "kv is NULL");
    if (tensor >= kv->n_tensors)
        return vmem__error(-EINVAL, "tensor %u is out of range: the cache has %u tensors", tensor, kv->n_tensors);
    uint32_t i = kv->order[tensor], j = 0;
    while (i >= kv->groups[j].first + kv->groups[j].n)
        j++;
    const struct kv_group *g = &kv->groups[j];
    const struct vmem_kv_layout layout = {
        .addr = kv->addrs[i],
        .length = g->slot_stride * kv->n_slots,
        .group = j,
        .slot_stride = g->slot_stride,
        .slot_rows = g->slot_rows,
        .row_bytes = g->row_bytes,
    };
    return vmem__struct_give(out, &layout, sizeof layout, "out");
}

int vmem_kv_get_slot(vmem_kv *kv, uint32_t slot, struct vmem_kv_slot_info *out)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_use_slot(kv, slot, ~0u);
    if (rc)
        return vmem__kv_leave(kv, rc);
    const struct kv_slot *s = &kv->slots[slot];
    const bool ending = s->state == KV_ENDING;
    struct vmem_kv_slot_info info = {.tokens = s->tokens, .shared_tokens = vmem__kv_shared_tokens(kv, slot)};
    info.state = ending ? VMEM_KV_FREE : s->state;
    info.after = ending ? kv->idle[slot].ends : 0;
    info.absent_steps = s->state == VMEM_KV_ACTIVE ? kv_absent(kv, slot) : 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *sp = kv_span(kv, slot, i);
        info.pages += (uint64_t)(sp->hi - sp->lo) * g->n;
        info.needed_pages += (uint64_t)(sp->step.hi - sp->step.lo) * g->n;
        info.shared_pages += (uint64_t)vmem__kv_span_shared(kv, slot, i) * g->n;
    }
    return vmem__kv_leave(kv, vmem__struct_give(out, &info, sizeof info, "out"));
}

int vmem_kv_get_rows(vmem_kv *kv, uint32_t slot, uint32_t tensor, uint32_t *first, uint32_t *end)
{
    struct vmem_kv_layout layout = {.size = sizeof layout};
    int rc = vmem_kv_get_layout(kv, tensor, &layout);
    if (!rc && (!first || !end))
        rc = vmem__error(-EINVAL, "first and end must not be NULL");
    if (!rc)
        rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_use_slot(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED);
    if (!rc) {
        const struct kv_group *g = &kv->groups[layout.group];
        const uint32_t tokens = kv->slots[slot].tokens;
        const uint64_t bytes = (uint64_t)vmem__kv_need_lo(kv, g, tokens) << kv->page_shift;
        *first = (uint32_t)((bytes + g->row_bytes - 1) / g->row_bytes);
        *end = MIN(tokens, g->max_tokens);
    }
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_last_step(vmem_kv *kv, uint64_t *step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (step)
        *step = kv->fence.step;
    return vmem__kv_leave(kv, step ? 0 : vmem__error(-EINVAL, "step must not be NULL"));
}

int vmem_kv_get_stats(vmem_kv *kv, struct vmem_kv_stats *out)
{
    int rc = vmem__kv_check_usable(kv); // in a forked child, a thread that is gone may hold a lock
    if (rc)
        return rc;
    vmem__kv_ask_device(kv); // without a lock, because the driver may take long, and a step would wait
    pthread_mutex_lock(&kv->gate.state);
    vmem__kv_count(kv);
    rc = vmem__struct_give(out, &kv->stats, sizeof kv->stats, "out");
    pthread_mutex_unlock(&kv->gate.state);
    return rc;
}

// ---- runs ------------------------------------------------------------------------------------------------------------

int vmem_kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_share(kv, runs, n, flags));
}

int vmem_kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t *freed)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_drop(kv, runs, n, freed));
}

int vmem_kv_evict(vmem_kv *kv, uint64_t pages, uint64_t *freed)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    const uint64_t got = vmem__kv_evict(kv, pages);
    if (freed)
        *freed = got;
    return vmem__kv_leave(kv, 0);
}

int vmem_kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_evicted(kv, runs, n, got));
}

int vmem_kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, vmem__kv_get_run(kv, run, out));
}

// ---- memory ----------------------------------------------------------------------------------------------------------

int vmem_kv_wait(vmem_kv *kv)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_wait_idle(kv);
    return vmem__kv_leave(kv, 0);
}
