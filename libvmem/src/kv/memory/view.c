// The view of a cache: other processes read its state there and write requests to it.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kv/memory/memory.h"

void vmem__kv_publish_stats(vmem_kv *kv)
{
    struct vmem_kv_view *v = kv->view.map;
    uint64_t seq = v->sequence;
    __atomic_store_n(&v->sequence, seq + 1, __ATOMIC_RELAXED);
    atomic_thread_fence(memory_order_release);
    v->stats = kv->report.shown;
    vmem__pool_show(kv->lend.member, &v->pool, v->pool_path);
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
        return vmem__error(*fd, "no memory for a view: %s", strerror(-*fd));
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

int vmem__kv_publish(vmem_kv *kv, const char *path, const char *name)
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
    v->memory_total = info.memory_total;
    memcpy(v->backend, info.backend, sizeof(v->backend));
    strncpy(v->name, name, sizeof(v->name) - 1);
    kv->view.map = v;
    vmem__kv_publish_stats(kv);
    __atomic_store_n(&v->magic, VMEM_KV_VIEW_MAGIC, __ATOMIC_RELEASE);
    return 0;
}

void vmem__kv_unpublish(vmem_kv *kv)
{
    if (kv->view.path)
        unlink(kv->view.path);
}

uint64_t vmem__kv_wanted_budget(const vmem_kv *kv)
{
    return kv->view.map ? __atomic_load_n(&kv->view.map->wanted_budget, __ATOMIC_ACQUIRE) : 0;
}

void vmem__kv_answer_wanted(vmem_kv *kv, uint64_t bytes, int rc, uint32_t reason)
{
    struct vmem_kv_view *v = kv->view.map;
    uint64_t old = bytes; // a newer one stays
    __atomic_compare_exchange_n(&v->wanted_budget, &old, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    v->answered_budget = bytes;
    v->answer = rc ? VMEM_KV_REFUSED : VMEM_KV_APPLIED;
    v->reason = rc ? reason : 0;
    __atomic_store_n(&v->answers, v->answers + 1, __ATOMIC_RELEASE);
}
