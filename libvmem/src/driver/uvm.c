// SPDX-License-Identifier: MIT
#include "driver/uvm.h"

#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#include "core/error.h"

#define SUSPENDED_NS 1000000 // between two attempts

int vmem__uvm_ioctl(int fd, unsigned long request, void *params)
{
    const struct timespec pause = {.tv_nsec = SUSPENDED_NS};
    int rc;

    // A pause that a signal ends is short; the next attempt is early, which does no harm.
    while ((rc = ioctl(fd, request, params)) && errno == EAGAIN)
        nanosleep(&pause, NULL);
    return rc;
}

int vmem__uvm_map_external(const struct vmem__uvm_space *space, struct vmem__rm *rm, uint64_t addr, uint64_t length,
                           uint32_t memory, uint64_t offset)
{
    struct uvm_map params;
    struct uvm_map_tail *tail = vmem__abi_map_tail(rm->abi, &params);

    // The count excludes the attributes of further GPUs, which may have any value.
    params.head = (struct uvm_map_head){.base = addr, .length = length, .offset = offset};
    params.attributes[0] = (struct uvm_attributes){0};
    memcpy(params.attributes[0].uuid, space->uuid, sizeof(space->uuid));
    *tail =
        (struct uvm_map_tail){.attributes_count = 1, .rm_control_fd = rm->fd, .client = rm->client, .memory = memory};
    if (vmem__uvm_ioctl(space->fd, UVM_MAP_EXTERNAL_ALLOCATION, &params))
        return vmem__error(-errno, "map: ioctl on /dev/nvidia-uvm: %s", strerror(errno));
    return vmem__rm_error(tail->status, "map");
}

static int take_away(const struct vmem__uvm_space *space, unsigned long call, uint64_t addr, uint64_t length)
{
    struct uvm_unmap params = {.base = addr, .length = length};

    memcpy(params.uuid, space->uuid, sizeof(space->uuid));
    if (vmem__uvm_ioctl(space->fd, call, &params))
        return vmem__error(-errno, "unmap: ioctl on /dev/nvidia-uvm: %s", strerror(errno));
    return vmem__rm_error(params.status, "unmap");
}

int vmem__uvm_map_sparse(const struct vmem__uvm_space *space, uint64_t addr, uint64_t length)
{
    return take_away(space, UVM_MAP_EXTERNAL_SPARSE, addr, length);
}

int vmem__uvm_unmap_external(const struct vmem__uvm_space *space, uint64_t addr, uint64_t length)
{
    return take_away(space, UVM_UNMAP_EXTERNAL, addr, length);
}
