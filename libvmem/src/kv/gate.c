// The gate: every public call begins and ends here. Between calls, others see the cache's statistics. Other processes
// read its state in its view. kv.h states the order of the locks.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kv/kv.h"

// ---- the view -------------------------------------------------------------------------------------------------------

static void publish_stats(vmem_kv *kv)
{
    struct vmem_kv_view *v = kv->view.map;
    uint64_t seq = v->sequence;
    __atomic_store_n(&v->sequence, seq + 1, __ATOMIC_RELAXED);
    atomic_thread_fence(memory_order_release);
    v->stats = kv->stats;
    vmem__pool_show(kv->membership.member, &v->pool, v->pool_path);
    __atomic_store_n(&v->sequence, seq + 2, __ATOMIC_RELEASE);
}

// Memory that nobody can truncate: the manager writes to it without system calls, and would die of a shorter file.
static int sealed_memory(size_t size)
{
    int fd = memfd_create("vmem-view", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    // Allocate it now, so that a lack of memory is an error here and not a signal later.
    int rc = -posix_fallocate(fd, 0, (off_t)size);
    if (!rc && (fchmod(fd, 0600) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)))
        rc = -errno;
    if (rc)
        close(fd);
    return rc ? rc : fd;
}

// The path becomes a link to the memory, by way of this process's descriptor.
static int make_view(const char *path, int *fd, struct vmem_kv_view **out)
{
    char target[64];
    *fd = sealed_memory(sizeof(**out));
    if (*fd < 0)
        return vmem__error(*fd, "no memory to publish the cache's statistics: %s", strerror(-*fd));
    struct vmem_kv_view *v = mmap(NULL, sizeof(*v), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    int rc = v == MAP_FAILED ? -errno : 0;
    snprintf(target, sizeof target, "/proc/%d/fd/%d", (int)getpid(), *fd);
    if (!rc && symlink(target, path)) {
        rc = -errno;
        munmap(v, sizeof(*v));
    }
    if (rc) {
        close(*fd);
        return vmem__error(rc, "path %s: %s", path, strerror(-rc));
    }
    *out = v;
    return 0;
}

static int publish(vmem_kv *kv, const char *path, const char *name)
{
    int rc = 0;
    struct vmem_info info = {.size = sizeof info};
    struct vmem_kv_view *v = NULL;
    int fd = -1;
    if (!path || !name)
        rc = vmem__error(-EINVAL, "path and name must not be NULL");
    else if (kv->view.map)
        rc = vmem__error(-EINVAL, "this cache is published already, in %s", kv->view.path);
    if (!rc)
        rc = vmem_context_info(kv->ctx, &info);
    if (!rc)
        rc = make_view(path, &fd, &v);
    if (rc)
        return rc;
    kv->view.path = strdup(path);
    kv->view.fd = fd;
    v->pid = (uint32_t)kv->pid;
    v->size = sizeof(*v);
    v->device = info.device;
    memcpy(v->backend, info.backend, sizeof(v->backend));
    strncpy(v->name, name, sizeof(v->name) - 1);
    kv->view.map = v;
    vmem__kv_tell(kv);
    __atomic_store_n(&v->magic, VMEM_KV_VIEW_MAGIC, __ATOMIC_RELEASE);
    return 0;
}

#define VIEW_NS 5000000 // how old the published view may be

// ---- counters and gauges ---------------------------------------------------------------------------------------------

static uint64_t coarse_now(void) // to a few ms
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t); // needs no system call
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void count_slot(const vmem_kv *kv, uint32_t slot, struct vmem_kv_stats *st)
{
    const struct kv_slot *sl = &kv->slots[slot];
    const bool active = sl->state == VMEM_KV_ACTIVE;
    st->absent_slots += active && kv_absent(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups && kv_accessed(kv, slot); i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *sp = kv_span(kv, slot, i);
        st->live_bytes += active ? kv_live_rows(g, sl->tokens) * g->row_bytes * g->n : 0;
        st->needed_pages += (uint64_t)(sp->step.hi - sp->step.lo) * g->n;
        st->ahead_pages += (uint64_t)(sp->hi - sp->step.hi) * g->n;
        st->kept_pages -= (uint64_t)(sp->hi - sp->lo) * g->n;
    }
}

// Counts the pages and rows of active and ending slots. What is left are those that no request has: a cache may have many
// times as many slots as requests.
static void count_slots(const vmem_kv *kv, struct vmem_kv_stats *st)
{
    st->needed_pages = st->ahead_pages = st->live_bytes = st->absent_slots = 0;
    st->kept_pages = kv->ledger.spanned;
    for (uint32_t list = KV_LIST_ACTIVE; list <= KV_LIST_OTHERS; list++)
        for (uint32_t s = 0; (s = vmem__kv_set_next(kv, kv->lists[list], s)) != KV_NO_SLOT; s++)
            count_slot(kv, s, st);
}

void vmem__kv_count(vmem_kv *kv)
{
    struct vmem_kv_stats *st = &kv->stats;
    count_slots(kv, st);
    st->page_size = kv->page_size;
    st->budget_pages = kv->ledger.budget;
    st->held_pages = kv->ledger.held;
    st->active_slots = kv->in_state[VMEM_KV_ACTIVE];
    st->swapped_slots = kv->in_state[VMEM_KV_SWAPPED];
    st->ending_slots = kv->in_state[KV_ENDING];
    st->free_pages = sat_sub(vmem__kv_page_limit_known(kv), kv->ledger.pinned_pages);
    st->shared_pages = kv->shared.shared;
    st->prefix_pages = kv->shared.runs_only;
    st->slots = kv->n_slots;
    st->prefixes = kv->runs.n - kv->runs.reported;
    st->evictable_pages = kv->shared.evictable;
    st->hashed_blocks = kv->runs.reported;
}

void vmem__kv_tell(vmem_kv *kv)
{
    kv->ledger.ahead.used = kv->ledger.held;
    if (!kv->view.map || (kv->view.may_lag && coarse_now() - kv->view.updated <= VIEW_NS))
        return;
    vmem__kv_count(kv);
    publish_stats(kv);
    kv->view.updated = coarse_now();
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
    kv->gate.called = kv->view.may_lag = true;
    return 0;
}

int vmem__kv_enter(vmem_kv *kv)
{
    int rc = vmem__kv_enter_step(kv);
    if (!rc)
        kv->view.may_lag = false;
    return rc;
}

int vmem__kv_leave(vmem_kv *kv, int rc)
{
    if (kv->flags & VMEM_KV_CHECK && !rc)
        rc = vmem__kv_check_books(kv);
    kv->gate.calls++;
    vmem__kv_tell(kv);
    kv->gate.called = kv->view.may_lag = false;
    if (kv->ledger.pinned_pages < kv->membership.pinned_pages)
        vmem__pool_wake(kv->membership.member);
    kv->membership.pinned_pages = kv->ledger.pinned_pages;
    pthread_mutex_unlock(&kv->gate.state);
    pthread_mutex_unlock(&kv->gate.api);
    return rc;
}

int vmem_kv_publish(vmem_kv *kv, const char *path, const char *name)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, publish(kv, path, name));
}
