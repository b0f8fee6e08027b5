// SPDX-License-Identifier: MIT
#include "driver/kmod.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../../uvm_ext/uvm_vmem_status.h"
#include "core/error.h"
#include "driver/libcuda.h"
#include "driver/rm.h"
#include "driver/uvm.h"
#include "vmem.h"

#define MAX_DESCRIPTORS 64

// The stock module, and one of an older ABI, answer EINVAL.
#define NOT_OURS "the loaded nvidia-uvm.ko is the stock one, without vMem, or has a vMem older than this library"

// Makes a call and returns its status as an errno; -errno if it did not reach the module.
static int call(struct vmem__kmod *k, unsigned long request, void *params, const char *what)
{
    if (k->syscalls)
        atomic_fetch_add_explicit(k->syscalls, 1, memory_order_relaxed);
    if (vmem__uvm_ioctl(k->fd, request, params))
        return vmem__error(-errno, "%s: ioctl on /dev/nvidia-uvm: %s", what, strerror(errno));
    return 0;
}

int vmem__kmod_probe(void)
{
    struct uvm_vmem_query query = {.size = sizeof(query)};
    int rc = 0, fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);

    if (fd < 0)
        return vmem__error(-errno, "/dev/nvidia-uvm: %s", strerror(errno));
    // The patched module also answers on a descriptor that is not an address space yet.
    if (vmem__uvm_ioctl(fd, UVM_VMEM_QUERY, &query))
        rc = errno == EINVAL ? vmem__error(-EOPNOTSUPP, "%s", NOT_OURS)
                             : vmem__error(-errno, "query: ioctl on /dev/nvidia-uvm: %s", strerror(errno));
    close(fd);
    return rc;
}

// Tests one descriptor. 0: it is the right one. -EOPNOTSUPP: the module is the stock one. -ENODEV: no address space.
// -ENXIO: an address space without the GPU. -EFAULT: an address space of the GPU without the address.
static int try_descriptor(struct vmem__kmod *k, int fd, uint64_t addr)
{
    struct uvm_vmem_op look = {.va = addr, .length = UVM_VMEM_GRANULE};
    struct uvm_vmem_batch batch = {.size = sizeof(batch), .ops = (uintptr_t)&look, .count = 1, .opSize = sizeof(look)};
    struct uvm_vmem_query query = {.size = sizeof(query)};

    memcpy(query.gpu_uuid, k->uuid, sizeof(query.gpu_uuid));
    memcpy(batch.gpu_uuid, k->uuid, sizeof(batch.gpu_uuid));
    if (vmem__uvm_ioctl(fd, UVM_VMEM_QUERY, &query))
        return errno == EINVAL ? -EOPNOTSUPP : -ENODEV;
    if (query.rmStatus == NV_ERR_ILLEGAL_ACTION)
        return -ENODEV;
    if (query.rmStatus == NV_ERR_INVALID_DEVICE)
        return -ENXIO;
    if (query.rmStatus)
        return vmem__rm_error(query.rmStatus, "query");
    // A program can have several address spaces. Unmapping an address without a page of vMem's changes nothing, but it
    // fails in every address space in which CUDA has no range there.
    if (vmem__uvm_ioctl(fd, UVM_VMEM_UNMAP, &batch) || batch.rmStatus == NV_ERR_INVALID_ADDRESS)
        return -EFAULT;
    if (batch.rmStatus)
        return vmem__rm_error(batch.rmStatus, "look for CUDA's addresses");
    k->max_ops = query.out_max_ops;
    k->max_bytes = query.out_max_bytes;
    k->caps = query.out_caps;
    k->page_sizes = query.out_page_sizes;
    return 0;
}

int vmem__kmod_open(struct vmem__kmod *k, const uint8_t uuid[16], uint64_t addr)
{
    int fds[MAX_DESCRIPTORS], n = vmem__cuda_uvm_fds(fds, MAX_DESCRIPTORS), rc = -ENODEV;
    bool gpu_known = false, gpu_unknown = false;

    k->fd = -1;
    memcpy(k->uuid, uuid, sizeof(k->uuid));
    for (int i = 0; i < n; i++) {
        rc = try_descriptor(k, fds[i], addr);
        if (!rc) {
            k->fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
            return k->fd >= 0 ? 0 : vmem__error(-errno, "duplicate a descriptor: %s", strerror(errno));
        }
        if (rc == -EOPNOTSUPP)
            return vmem__error(rc, "%s", NOT_OURS);
        if (rc != -ENODEV && rc != -ENXIO && rc != -EFAULT)
            return rc;
        gpu_known |= rc == -EFAULT;
        gpu_unknown |= rc == -ENXIO;
    }
    if (gpu_unknown && !gpu_known)
        return vmem__error(-EOPNOTSUPP, "nvidia-uvm has this GPU by another UUID than CUDA's: no MIG instances");
    return vmem__error(-ENODEV, "none of this process' %d descriptors of /dev/nvidia-uvm has CUDA's addresses", n);
}

void vmem__kmod_close(struct vmem__kmod *k)
{
    if (k->fd >= 0)
        close(k->fd);
    k->fd = -1;
}

int vmem__kmod_create(struct vmem__kmod *k, uint64_t page_size, uint32_t count, uint64_t *first)
{
    struct uvm_vmem_create create = {.size = sizeof(create), .page_size = page_size, .count = count};
    int rc;

    memcpy(create.gpu_uuid, k->uuid, sizeof(create.gpu_uuid));
    rc = call(k, UVM_VMEM_CREATE, &create, "create pages");
    if (!rc)
        rc = vmem__rm_error(create.rmStatus, "create pages");
    *first = create.out_handle;
    return rc;
}

int vmem__kmod_release(struct vmem__kmod *k, uint64_t first, uint32_t count, uint32_t *done)
{
    uint64_t handles[256];
    uint32_t most = k->max_ops < 256 ? k->max_ops : 256;

    for (*done = 0; *done < count;) {
        struct uvm_vmem_release release = {.size = sizeof(release), .handles = (uintptr_t)handles};
        int rc;

        release.count = count - *done < most ? count - *done : most;
        for (uint32_t i = 0; i < release.count; i++)
            handles[i] = first + *done + i;
        rc = call(k, UVM_VMEM_RELEASE, &release, "release pages");
        if (!rc && release.rmStatus == NV_ERR_INVALID_LIMIT && release.count > 1) {
            most = release.count / 2; // mapped at more addresses than one call accepts
            continue;
        }
        if (!rc)
            rc = vmem__rm_error(release.rmStatus, "release pages");
        if (rc)
            return rc;
        *done += release.count;
    }
    return 0;
}

int vmem__kmod_batch(struct vmem__kmod *k, unsigned long request, const struct uvm_vmem_op *ops, uint32_t count,
                     uint32_t *failed)
{
    struct uvm_vmem_batch batch = {.size = sizeof(batch),
                                   .ops = (uintptr_t)ops,
                                   .count = count,
                                   .opSize = sizeof(*ops)};
    const char *what = request == UVM_VMEM_MAP ? "map" : "unmap";
    char where[64];
    int rc;

    *failed = UVM_VMEM_NO_OP;
    memcpy(batch.gpu_uuid, k->uuid, sizeof(batch.gpu_uuid));
    rc = call(k, request, &batch, what);
    if (rc || !batch.rmStatus)
        return rc;
    *failed = batch.out_failed;
    if (batch.out_failed >= count)
        return vmem__rm_error(batch.rmStatus, what);
    snprintf(where, sizeof(where), "%s at 0x%llx", what, (unsigned long long)ops[batch.out_failed].va);
    return vmem__rm_error(batch.rmStatus, where);
}
