// Creation and layout of a KV cache, and the pages that a request's length needs.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core/core.h"
#include "core/struct.h"
#include "kv/kv.h"

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

static uint64_t round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

uint32_t vmem__kv_need_lo(const vmem_kv *kv, const struct kv_group *g, uint32_t before)
{
    uint64_t rows = KV_MIN(before, g->max_tokens);
    if (!g->window || rows <= g->window)
        return 0;
    rows -= g->window;
    return (uint32_t)(((rows - rows % kv->tile_rows) * g->row_bytes) >> kv->page_shift);
}

uint32_t vmem__kv_need_hi(const vmem_kv *kv, const struct kv_group *g, uint64_t tokens)
{
    uint64_t rows = KV_MIN(tokens, g->max_tokens);
    if (kv->tile_rows > 1)
        rows = KV_MIN(round_up(rows, kv->tile_rows), g->slot_rows);
    return (uint32_t)((rows * g->row_bytes + kv->page_size - 1) >> kv->page_shift);
}

uint32_t vmem__kv_steady(const vmem_kv *kv, uint32_t slot)
{
    uint64_t steady = kv->windows ? 0 : kv->max_tokens;
    for (uint32_t i = 0; i < kv->n_groups && steady; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *s = kv_span(kv, slot, i);
        uint64_t rows = ((uint64_t)s->need_hi << kv->page_shift) / g->row_bytes;
        if (s->keep_lo != s->need_lo || s->keep_hi != s->need_hi)
            return 0;
        rows -= rows % kv->tile_rows;
        if (rows < g->max_tokens)
            steady = KV_MIN(steady, rows);
    }
    return (uint32_t)steady;
}

uint32_t vmem__kv_serves(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (!s->fresh || s->tokens || hi >= sp->hi || !kv_joined(kv, slot, group, hi))
        return sp->hi;
    while (kv_joined(kv, slot, group, hi))
        hi--;
    return hi;
}

void vmem__kv_set_backed(vmem_kv *kv, uint32_t slot)
{
    kv->slots[slot].steady = 0;
    uint64_t backed = kv->max_tokens;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *s = kv_span(kv, slot, i);
        uint64_t rows = s->lo < s->hi || !s->hi ? ((uint64_t)s->hi << kv->page_shift) / g->row_bytes : 0;
        rows -= rows % kv->tile_rows;
        if (rows < g->max_tokens)
            backed = KV_MIN(backed, rows);
    }
    kv->slots[slot].backed = (uint32_t)backed;
}

int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size)
{
    if (n <= *cap)
        return 0;
    uint64_t want = KV_MAX(n, *cap * 2);
    void *p = realloc(*(void **)array, want * size);
    if (!p)
        return vmem__error(-ENOMEM, "no memory for a list of %" PRIu64 " elements", want);
    *(void **)array = p;
    *cap = want;
    return 0;
}

static int check_config(vmem_context *ctx, const struct vmem_kv_config *c)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (c->steps_in_flight > 16)
        return vmem__error(-EINVAL, "steps_in_flight %u is over 16", c->steps_in_flight);
    if (c->flags & ~(VMEM_KV_ZERO_ENDS * 2 - 1))
        return vmem__error(-EINVAL, "flags %#x has unknown bits", c->flags);
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
        return vmem__error(-EINVAL, "budget %" PRIu64 " is less than a page", c->budget);
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

// Slots start at multiples of 2 MiB. So 2 MiB entries can map runs of small pages, and no two slots share an entry. The
// exceptions are small slots, and row sizes for which this alignment would multiply the address space.
static int lay_out(const vmem_kv *kv, struct kv_group *g)
{
    uint64_t rows = round_up(g->max_tokens, kv->tile_rows), bytes = rows * g->row_bytes;
    for (uint64_t align = KV_MAX(KV_BLOCK, kv->page_size);; align = kv->page_size) {
        g->slot_rows = round_up(rows, align / gcd(align, g->row_bytes));
        g->slot_stride = g->slot_rows * g->row_bytes;
        bool fits = g->slot_stride / kv->page_size <= UINT32_MAX && g->slot_stride <= (UINT64_C(1) << 46) / kv->n_slots;
        if (fits && (align == kv->page_size || (bytes >= align && g->slot_stride <= 4 * bytes)))
            break;
        if (align == kv->page_size)
            return vmem__error(-EINVAL, "%u slots of %" PRIu64 " bytes need more than 2^46 bytes of addresses",
                               kv->n_slots, g->slot_stride);
    }
    g->slot_pages = (uint32_t)(g->slot_stride >> kv->page_shift);
    return 0;
}

static bool same_group(const struct kv_group *g, const struct vmem_kv_tensor *t, uint32_t max_tokens)
{
    return g->row_bytes == t->row_bytes && g->window == t->window && g->max_tokens == max_tokens;
}

// Reserves zeroed address space. A page of it takes memory once it is written.
static void *table_of(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static int make_groups(vmem_kv *kv, const struct vmem_kv_config *c)
{
    kv->order = calloc(c->n_tensors, sizeof(*kv->order));
    kv->addrs = calloc(c->n_tensors, sizeof(*kv->addrs));
    kv->groups = calloc(c->n_tensors, sizeof(*kv->groups));
    if (!kv->order || !kv->addrs || !kv->groups)
        return vmem__error(-ENOMEM, "no memory for %u tensors", c->n_tensors);
    for (uint32_t i = 0; i < c->n_tensors; i++) {
        const struct vmem_kv_tensor *t = &c->tensors[i];
        uint32_t max = t->max_tokens ? t->max_tokens : c->max_tokens, j = 0;
        while (j < kv->n_groups && !same_group(&kv->groups[j], t, max))
            j++;
        struct kv_group *g = &kv->groups[j];
        if (j == kv->n_groups) {
            kv->n_groups++;
            g->row_bytes = t->row_bytes;
            g->window = t->window;
            g->max_tokens = max;
            kv->windows |= t->window != 0;
        }
        kv->order[i] = g->n++; // index within the group; made absolute below
    }
    uint64_t table = 0, joined = 0;
    uint32_t first = 0;
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        struct kv_group *g = &kv->groups[j];
        int rc = lay_out(kv, g);
        if (rc)
            return rc;
        g->first = first;
        g->table = table;
        g->joined = joined;
        first += g->n;
        joined += (uint64_t)kv->n_slots * g->slot_pages;
        table += (uint64_t)g->n * kv->n_slots * g->slot_pages;
    }
    for (uint32_t i = 0; i < c->n_tensors; i++) {
        const struct vmem_kv_tensor *t = &c->tensors[i];
        uint32_t max = t->max_tokens ? t->max_tokens : c->max_tokens, j = 0;
        while (!same_group(&kv->groups[j], t, max))
            j++;
        kv->order[i] += kv->groups[j].first;
    }
    kv->pages_bytes = table * sizeof(vmem_page);
    kv->pages = table_of(kv->pages_bytes);
    kv->joined_bytes = kv->whole ? joined * sizeof(*kv->joined) : 0;
    kv->joined = kv->whole ? table_of(kv->joined_bytes) : NULL;
    if (!kv->pages || (kv->whole && !kv->joined))
        return vmem__error(-ENOMEM, "no address space for a table of %" PRIu64 " pages", table);
    return 0;
}

static int reserve(vmem_kv *kv)
{
    struct vmem_info info = {.size = sizeof info};
    int rc = vmem_context_info(kv->ctx, &info);
    if (rc)
        return rc;
    // On a GPU, to take the backdrop's place and to put it back costs half of each map and unmap. What maps pages together
    // leaves it out by itself.
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
    return vMemReserve(kv->ctx, kv->n_tensors * kv->page_size, backdrop ? VMEM_RESERVE_BACKDROP : 0, &kv->scratch);
}

static void release(vmem_kv *kv)
{
    for (uint32_t s = 0; s < kv->n_slots && kv->spans && kv->scratch; s++) {
        kv->slots[s].fresh = true; // the caller guarantees that no kernel accesses the slot
        vmem__kv_cut_slot(kv, s);
    }
    for (uint32_t i = 0; i < kv->cap_prefixes; i++)
        if (kv->prefixes[i])
            vmem__kv_prefix_drop(kv, kv->prefixes[i]);
    vmem__kv_blocks_destroy(kv);
    vmem__kv_hash_destroy(kv);
    for (uint32_t i = 0; kv->addrs && i < kv->n_tensors; i++)
        if (kv->addrs[i])
            vmem_unreserve(kv->ctx, kv->addrs[i]);
    if (kv->scratch)
        vmem_unreserve(kv->ctx, kv->scratch);
    vmem__kv_part(kv);
}

static void free_grow(struct kv_grow *l)
{
    free(l->parts);
    free(l->pages);
    free(l->fine);
    free(l->stretches);
    free(l->coarse);
}

static void free_cut(struct kv_cut *c)
{
    free(c->ops);
    free(c->pages);
}

void vmem__kv_give_up(vmem_kv *kv)
{
    if (kv->given_up || kv->pid != getpid()) // a forked child has neither the worker nor the pages
        return;
    vmem__kv_pool_leave(kv);
    vmem__kv_worker_stop(kv);
    release(kv);
    vmem__kv_pool_left(kv);
    vmem__kv_unpublish(kv);
    kv->given_up = true;
}

void vmem_kv_destroy(vmem_kv *kv)
{
    if (!kv)
        return;
    vmem__kv_give_up(kv);
    if (kv->pages)
        munmap(kv->pages, kv->pages_bytes);
    if (kv->joined)
        munmap(kv->joined, kv->joined_bytes);
    if (kv->view) {
        munmap(kv->view, sizeof(*kv->view));
        close(kv->view_fd);
    }
    free(kv->view_path);
    free_grow(&kv->grow);
    free_grow(&kv->worker_grow);
    free_cut(&kv->cut);
    free_cut(&kv->worker_cut);
    free(kv->prefixes);
    free(kv->refs.entries);
    free(kv->changed);
    free(kv->slots);
    free(kv->idle);
    free(kv->spans);
    free(kv->plan.wants);
    free(kv->past);
    free(kv->staged);
    free(kv->swap_ops);
    free(kv->staged_pages);
    free(kv->groups);
    free(kv->order);
    free(kv->addrs);
    free(kv);
}

static int init(vmem_kv *kv, const struct vmem_kv_config *c)
{
    pthread_mutex_init(&kv->api, NULL);
    pthread_mutex_init(&kv->state, NULL);
    pthread_mutex_init(&kv->stats_lock, NULL);
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&kv->work, &steady);
    pthread_condattr_destroy(&steady);
    pthread_cond_init(&kv->done, NULL);
    kv->pid = getpid();
    kv->flags = c->flags;
#ifdef VMEM_DEBUG
    kv->flags |= VMEM_KV_CHECK;
#endif
    kv->n_tensors = c->n_tensors;
    kv->n_slots = c->slots;
    kv->max_tokens = c->max_tokens;
    kv->tile_rows = c->tile_rows ? c->tile_rows : 1;
    kv->ahead_tokens = c->ahead_tokens ? c->ahead_tokens : 128;
    kv->ahead_min = c->ahead_min ? c->ahead_min : 4;
    kv->eager_tokens = KV_MIN(c->eager_tokens ? c->eager_tokens : 512, c->max_tokens);
    kv->reclaim_percent = c->reclaim_percent ? c->reclaim_percent : 10;
    kv->idle_ms = c->idle_ms;
    kv->page_size = c->page_size;
    kv->page_shift = (uint32_t)__builtin_ctzll(c->page_size);
    const uint64_t whole = c->flags & VMEM_KV_UNSHARED ? kv->ctx->b.whole_max >> kv->page_shift : 0;
    kv->whole = whole >= 2 ? (uint32_t)whole : 0;
    kv->block = c->page_size < KV_BLOCK ? (uint32_t)(KV_BLOCK / c->page_size) : 1;
    for (uint32_t i = 0; i < c->n_tensors; i++)
        if (c->flags & VMEM_KV_ZERO || c->tensors[i].kind != c->tensors[0].kind)
            kv->create_flags = VMEM_CREATE_ZERO;
    int rc = make_groups(kv, c);
    if (rc)
        return rc;
    kv->slots = calloc(kv->n_slots, sizeof(*kv->slots));
    kv->idle = calloc(kv->n_slots, sizeof(*kv->idle));
    kv->spans = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->spans));
    kv->plan.wants = calloc((size_t)kv->n_slots * kv->n_groups, sizeof(*kv->plan.wants));
    kv->changed = calloc(kv->n_slots, sizeof(*kv->changed));
    kv->steps_in_flight = c->steps_in_flight ? c->steps_in_flight : 1;
    kv->past = calloc((size_t)kv->n_slots * kv->n_groups * kv->steps_in_flight, sizeof(*kv->past));
    kv->staged = calloc(kv->n_slots, sizeof(*kv->staged));
    kv->staged_pages = calloc(kv->n_slots, sizeof(*kv->staged_pages));
    if (!kv->slots || !kv->idle || !kv->spans || !kv->plan.wants || !kv->changed || !kv->past || !kv->staged ||
        !kv->staged_pages)
        return vmem__error(-ENOMEM, "no memory for %u slots", kv->n_slots);
    rc = reserve(kv);
    if (rc)
        return rc;
    vmem__kv_join(kv);
    if (!(c->flags & VMEM_KV_LAZY))
        rc = vmem__kv_take_ahead(kv, c->budget >> kv->page_shift);
    if (rc)
        return rc;
    kv->budget_pages = c->budget >> kv->page_shift;
    vmem__kv_summarise(kv);
    return c->flags & VMEM_KV_OVERLAP ? vmem__kv_worker_start(kv) : 0;
}

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
        vmem_kv_destroy(kv);
        return rc;
    }
    *out = kv;
    return 0;
}

int vmem_kv_get_layout(vmem_kv *kv, uint32_t tensor, struct vmem_kv_layout *out)
{
    if (!kv || !out)
        return vmem__error(-EINVAL, "kv and out must not be NULL");
    if (tensor >= kv->n_tensors)
        return vmem__error(-EINVAL, "tensor %u: there are %u", tensor, kv->n_tensors);
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
