// Counters, what other processes see of them, and the checks of VMEM_KV_CHECK.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kv/kv.h"

static void publish(vmem_kv *kv)
{
    struct vmem_kv_view *v = kv->view;
    uint64_t seq = v->sequence;
    __atomic_store_n(&v->sequence, seq + 1, __ATOMIC_RELAXED);
    atomic_thread_fence(memory_order_release);
    v->stats = kv->shown;
    __atomic_store_n(&v->sequence, seq + 2, __ATOMIC_RELEASE);
}

void kv_summarise(vmem_kv *kv)
{
    struct vmem_kv_stats *st = &kv->stats;
    st->page_size = kv->page_size;
    st->budget_pages = kv->budget_pages;
    st->held_pages = kv->held;
    st->needed_pages = st->kept_pages = st->ahead_pages = st->live_bytes = 0;
    st->active_slots = st->swapped_slots = 0;
    st->ending_slots = kv->n_ending;
    uint64_t reclaimable = kv->pending;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        bool active = sl->state == VMEM_KV_ACTIVE;
        st->active_slots += active;
        st->swapped_slots += sl->state == VMEM_KV_SWAPPED;
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_group *g = &kv->groups[i];
            const struct kv_span *sp = kv_span(kv, s, i);
            if (active) {
                uint32_t rows = KV_MIN(sl->tokens, g->max_tokens);
                st->live_bytes += (g->window ? KV_MIN(rows, g->window) : rows) * g->row_bytes * g->n;
                st->needed_pages += (uint64_t)(sp->need_hi - sp->need_lo) * g->n;
                st->ahead_pages += (uint64_t)(sp->hi - sp->need_hi) * g->n;
            } else if (sl->state == VMEM_KV_ENDING) {
                st->needed_pages += (uint64_t)(sp->hi - sp->lo) * g->n;
            } else {
                st->kept_pages += (uint64_t)(sp->hi - sp->lo) * g->n;
            }
        }
        reclaimable += kv_reclaimable_in(kv, s);
    }
    uint64_t fixed = kv->held - KV_MIN(reclaimable, kv->held);
    if (kv->promise >= kv->budget_pages) {
        kv->device_limit = kv->budget_pages;
    } else if (!kv->device_asked || kv_now() - kv->device_asked > KV_DEVICE_NS) {
        kv->device_limit = kv_limit(kv, 0);
        kv->device_asked = kv_now();
    }
    uint64_t limit = KV_MIN(kv->device_limit, kv->budget_pages);
    st->free_pages = limit > fixed ? limit - fixed : 0;
    st->shared_pages = kv->refs.shared;
    st->prefix_pages = kv->refs.only;
    st->zeroed_bytes = kv->zeroed_bytes;
    st->slots = kv->n_slots;
    st->prefixes = kv->n_prefixes;
    pthread_mutex_lock(&kv->stats_lock);
    kv->shown = *st;
    pthread_mutex_unlock(&kv->stats_lock);
    kv->stale = false;
    if (kv->view) {
        kv->summarised = kv_now();
        publish(kv);
    }
}

void kv_may_take_long(vmem_kv *kv)
{
    if (kv->stale)
        kv_summarise(kv);
    kv->long_call = true;
}

uint64_t kv_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t); // reads a variable
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int vmem_kv_get_stats(vmem_kv *kv, struct vmem_kv_stats *out)
{
    if (!kv || !out)
        return vmem__error(-EINVAL, "kv and out must not be NULL");
    // Nobody else holds state for long.
    while (!kv->long_call) {
        if (pthread_mutex_trylock(&kv->state)) {
            sched_yield();
            continue;
        }
        if (kv->stale)
            kv_summarise(kv);
        pthread_mutex_unlock(&kv->state);
        break;
    }
    pthread_mutex_lock(&kv->stats_lock);
    *out = kv->shown;
    pthread_mutex_unlock(&kv->stats_lock);
    return 0;
}

// ---- the view -----------------------------------------------------------------------------------------------

static int make_view(const char *path, struct vmem_kv_view **out)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return vmem__error(-errno, "path %s: %s", path, strerror(errno));
    struct vmem_kv_view *v = MAP_FAILED;
    // With its blocks allocated, so that a full file system is an error here and not a signal later.
    int rc = -posix_fallocate(fd, 0, sizeof(*v));
    if (!rc) {
        v = mmap(NULL, sizeof(*v), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        rc = v == MAP_FAILED ? -errno : 0;
    }
    close(fd);
    if (rc) {
        unlink(path);
        return vmem__error(rc, "path %s: %s", path, strerror(-rc));
    }
    *out = v;
    return 0;
}

int vmem_kv_publish(vmem_kv *kv, const char *path, const char *name)
{
    int rc = kv_enter(kv);
    if (rc)
        return rc;
    struct vmem_info info = {.size = sizeof info};
    struct vmem_kv_view *v = NULL;
    if (!path || !name)
        rc = vmem__error(-EINVAL, "path and name must not be NULL");
    else if (kv->view)
        rc = vmem__error(-EINVAL, "this cache is published already, in %s", kv->view_path);
    if (!rc)
        rc = vmem_context_info(kv->ctx, &info);
    if (!rc)
        rc = make_view(path, &v);
    if (rc)
        return kv_leave(kv, rc);
    kv->view_path = strdup(path);
    v->pid = (uint32_t)kv->pid;
    v->size = sizeof(*v);
    v->device = info.device;
    v->memory_total = info.memory_total;
    memcpy(v->backend, info.backend, sizeof(v->backend));
    strncpy(v->name, name, sizeof(v->name) - 1);
    kv->view = v;
    publish(kv);
    __atomic_store_n(&v->magic, VMEM_KV_VIEW_MAGIC, __ATOMIC_RELEASE);
    return kv_leave(kv, 0);
}

void kv_unpublish(vmem_kv *kv)
{
    if (kv->view_path)
        unlink(kv->view_path);
}

uint64_t kv_wanted_budget(vmem_kv *kv)
{
    if (!kv->view || !__atomic_load_n(&kv->view->wanted_budget, __ATOMIC_RELAXED))
        return 0;
    return __atomic_exchange_n(&kv->view->wanted_budget, 0, __ATOMIC_ACQ_REL);
}

// ---- checks -------------------------------------------------------------------------------------------------

int kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if ((s->state != VMEM_KV_ACTIVE && s->state != VMEM_KV_ENDING) || s->fresh)
        return 0;
    if (from < sp->keep_hi && to > sp->keep_lo)
        return vmem__error(-EFAULT, "slot %u, pages [%u, %u) change while kernels may touch [%u, %u)", slot, from, to,
                           sp->keep_lo, sp->keep_hi);
    if (from < sp->coarse_hi && from % kv->block)
        return vmem__error(-EFAULT, "slot %u, page %u: a part of a 2 MiB entry changes beside kernels", slot, from);
    return 0;
}

static int check_mapped(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_group *g = &kv->groups[group];
    const struct kv_span *sp = kv_span(kv, slot, group);
    for (uint32_t t = 0; t < g->n; t++)
        for (uint32_t p = sp->lo ? sp->lo - 1 : 0; p < KV_MIN(sp->hi + 1, g->slot_pages); p++) {
            vmem_page page, want = p >= sp->lo && p < sp->hi ? kv_table(kv, g, slot, t)[p] : 0;
            if (p >= sp->stale_lo && p < sp->stale_hi)
                continue;
            int rc = vmem_query(kv->ctx, kv_addr(kv, g, slot, t, p), &page, NULL);
            if (rc)
                return rc;
            if (page != want)
                return vmem__error(-EFAULT, "slot %u, tensor %u, page %u: %#" PRIx64 " is mapped, not %#" PRIx64, slot,
                                   g->first + t, p, page, want);
        }
    return 0;
}

// Shared pages that the worker is unmapping now: they are in no span any more, but the slot has not let go of them.
static uint64_t shared_in_cut(const vmem_kv *kv)
{
    const struct kv_cut *c = &kv->worker_cut;
    uint64_t n = 0;
    for (uint32_t p = c->before.lo; kv->cutting && p < KV_MIN(c->before.hi, c->before.shared_hi); p++)
        n += (p < c->lo || p >= c->hi) && kv_row(kv, c->slot, c->group, p);
    return n;
}

int kv_check_books(vmem_kv *kv)
{
    uint64_t pages = kv->refs.pages, slots = shared_in_cut(kv), refs = 0, only = 0, shared = 0;
    kv->ceiling = KV_MAX(kv->ceiling, kv->budget_pages); // which may have grown
    if (kv->held > kv->ceiling)
        return vmem__error(-EFAULT, "%" PRIu64 " pages of a budget of %" PRIu64, kv->held, kv->budget_pages);
    kv->ceiling = KV_MAX(kv->held, kv->budget_pages);
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_group *g = &kv->groups[i];
            const struct kv_span *sp = kv_span(kv, s, i);
            bool ordered = sp->lo <= sp->keep_lo && sp->keep_lo <= sp->need_lo && sp->need_lo <= sp->need_hi &&
                           sp->need_hi <= sp->keep_hi && sp->keep_hi <= sp->hi && sp->hi <= g->slot_pages &&
                           sp->shared_hi <= sp->hi && sp->coarse_hi <= sp->hi;
            if (!ordered)
                return vmem__error(-EFAULT,
                                   "slot %u, group %u: lo %u keep_lo %u need_lo %u need_hi %u keep_hi %u hi "
                                   "%u shared %u coarse %u",
                                   s, i, sp->lo, sp->keep_lo, sp->need_lo, sp->need_hi, sp->keep_hi, sp->hi,
                                   sp->shared_hi, sp->coarse_hi);
            if (sl->steady && sl->state == VMEM_KV_ACTIVE &&
                (sp->keep_lo != sp->need_lo || sp->keep_hi != sp->need_hi ||
                 sp->need_hi != kv_need_hi(kv, g, sl->tokens) || sp->need_hi != kv_need_hi(kv, g, sl->steady)))
                return vmem__error(-EFAULT, "slot %u, group %u: from %u to %u tokens it does not need the same pages",
                                   s, i, sl->tokens, sl->steady);
            if (sl->state == VMEM_KV_FREE && (sp->shared_hi || sp->need_hi != sp->lo))
                return vmem__error(-EFAULT, "slot %u is free but not clean", s);
            for (uint32_t p = sp->lo; p < sp->hi; p++) {
                const struct kv_ref *ref = kv_row(kv, s, i, p);
                if (ref && p >= sp->shared_hi)
                    return vmem__error(-EFAULT, "slot %u, page %u is shared", s, p);
                pages += ref ? 0 : g->n;
                slots += ref != NULL;
            }
            if (sp->stale_lo < sp->stale_hi && (!sl->stale || (sp->lo < sp->hi && sp->stale_hi > sp->lo)))
                return vmem__error(-EFAULT, "slot %u, group %u: stale [%u, %u) beside lo %u", s, i, sp->stale_lo,
                                   sp->stale_hi, sp->lo);
            int rc = sl->busy ? 0 : check_mapped(kv, s, i);
            if (rc)
                return rc;
        }
    }
    for (uint64_t i = 0; i < kv->refs.size; i++) {
        const struct kv_ref *ref = &kv->refs.entries[i];
        refs += ref->page ? ref->slots : 0;
        only += ref->page && !ref->slots ? ref->n : 0;
        shared += ref->page && ref->slots + ref->prefixes > 1 ? ref->n : 0;
        if (ref->page && ref->slots + ref->prefixes < 2 && !ref->prefixes)
            return vmem__error(-EFAULT, "page %#" PRIx64 " is counted as shared", ref->page);
    }
    if (pages + kv->pending != kv->held || slots != refs || only != kv->refs.only || shared != kv->refs.shared)
        return vmem__error(-EFAULT,
                           "counted %" PRIu64 " pages, %" PRIu64 ", %" PRIu64 " and %" PRIu64 " shared, not %" PRIu64
                           ", %" PRIu64 ", %" PRIu64 " and %" PRIu64,
                           pages + kv->pending, slots, only, shared, kv->held, refs, kv->refs.only, kv->refs.shared);
    return kv_check_blocks(kv);
}
