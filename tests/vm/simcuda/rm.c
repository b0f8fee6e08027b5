// The ioctls: RM for devices and physical memory, UVM for the address space. UVM's structs come from the headers of the
// driver release that the guest runs.
//
// SPDX-License-Identifier: MIT
#include "simcuda.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "rm_abi.h"
#include "uvm_free.h"

static CUresult alloc(uint32_t parent, uint32_t *handle, uint32_t class_id, void *params, uint32_t size)
{
    struct rm_alloc a = {.client = simcuda.h_client,
                         .parent = parent,
                         .object = *handle,
                         .class_id = class_id,
                         .params = (uintptr_t)params,
                         .params_size = size};

    if (ioctl(simcuda.ctl_fd, RM_IOCTL(RM_ESC_ALLOC, struct rm_alloc), &a))
        return CUDA_ERROR_UNKNOWN;
    *handle = a.object;
    return simcuda_status(a.status);
}

CUresult simcuda_rm_open(void)
{
    CUresult result = CUDA_ERROR_NO_DEVICE;

    simcuda.h_client = 0;
    simcuda.next_handle = 0x5c000001;
    simcuda.ctl_fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
    if (simcuda.ctl_fd >= 0)
        result = alloc(0, &simcuda.h_client, RM_CLASS_CLIENT, NULL, 0);
    if (result)
        simcuda_rm_close();
    return result;
}

CUresult simcuda_rm_device(struct simcuda_device *d)
{
    uint32_t params[14] = {d->index, simcuda.h_client}; // the first words of the class's parameters
    uint32_t none[12] = {0};
    char path[32];
    CUresult result;

    snprintf(path, sizeof(path), "/dev/nvidia%d", d->index);
    d->fd = open(path, O_RDWR | O_CLOEXEC);
    if (d->fd < 0 || ioctl(d->fd, RM_IOCTL(RM_ESC_REGISTER_FD, int), &simcuda.ctl_fd))
        return CUDA_ERROR_NO_DEVICE;
    d->h_device = simcuda.next_handle++;
    d->h_vaspace = simcuda.next_handle++;
    result = alloc(simcuda.h_client, &d->h_device, RM_CLASS_DEVICE, params, sizeof(params));
    if (!result)
        result = alloc(d->h_device, &d->h_vaspace, RM_CLASS_VASPACE, none, sizeof(none));
    return result;
}

CUresult simcuda_rm_memory(struct simcuda_device *d, uint64_t size, uint32_t *handle)
{
    struct rm_memory m = {
        .owner = simcuda.h_client,
        .attr = RM_ATTR_PAGE_SIZE_HUGE | RM_ATTR_ALLOW_NONCONTIGUOUS,
        .attr2 = RM_ATTR2_HUGE_2M,
        .size = size,
        .alignment = SIMCUDA_GRANULARITY,
    };

    *handle = simcuda.next_handle++;
    return alloc(d->h_device, handle, RM_CLASS_MEMORY, &m, sizeof(m));
}

void simcuda_rm_free(uint32_t handle)
{
    struct rm_free f = {.client = simcuda.h_client, .parent = simcuda.h_client, .object = handle};

    (void)ioctl(simcuda.ctl_fd, RM_IOCTL(RM_ESC_FREE, struct rm_free), &f);
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void simcuda_rm_close(void)
{
    close_fd(&simcuda.mm_fd);
    close_fd(&simcuda.uvm_fd);
    for (int i = 0; i < simcuda.count; i++)
        close_fd(&simcuda.devices[i].fd);
    close_fd(&simcuda.ctl_fd);
}

CUresult simcuda_uvm_open(void)
{
    UVM_INITIALIZE_PARAMS init = {0};
    UVM_MM_INITIALIZE_PARAMS mm = {0};

    simcuda.uvm_fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);
    simcuda.mm_fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);
    mm.uvmFd = simcuda.uvm_fd;
    if (simcuda.uvm_fd < 0 || simcuda.mm_fd < 0 || ioctl(simcuda.uvm_fd, UVM_INITIALIZE, &init) || init.rmStatus)
        return CUDA_ERROR_NO_DEVICE;
    // Without it UVM refuses GPU address spaces
    if (ioctl(simcuda.mm_fd, UVM_MM_INITIALIZE, &mm) || mm.rmStatus)
        return CUDA_ERROR_NO_DEVICE;
    return CUDA_SUCCESS;
}

#define UUID(member, d) memcpy(&(member), (d)->uuid, sizeof((d)->uuid))

CUresult simcuda_uvm_device(struct simcuda_device *d)
{
    UVM_REGISTER_GPU_PARAMS gpu = {.rmCtrlFd = simcuda.ctl_fd, .hClient = simcuda.h_client};
    UVM_REGISTER_GPU_VASPACE_PARAMS vas = {.rmCtrlFd = simcuda.ctl_fd,
                                           .hClient = simcuda.h_client,
                                           .hVaSpace = d->h_vaspace};

    UUID(gpu.gpu_uuid, d);
    UUID(vas.gpuUuid, d);
    if (ioctl(simcuda.uvm_fd, UVM_REGISTER_GPU, &gpu))
        return CUDA_ERROR_UNKNOWN;
    if (gpu.rmStatus)
        return simcuda_status(gpu.rmStatus);
    if (ioctl(simcuda.uvm_fd, UVM_REGISTER_GPU_VASPACE, &vas))
        return CUDA_ERROR_UNKNOWN;
    return simcuda_status(vas.rmStatus);
}

void simcuda_uvm_forget(struct simcuda_device *d)
{
    UVM_UNREGISTER_GPU_VASPACE_PARAMS vas = {0};
    UVM_UNREGISTER_GPU_PARAMS gpu = {0};

    UUID(vas.gpuUuid, d);
    UUID(gpu.gpu_uuid, d);
    (void)ioctl(simcuda.uvm_fd, UVM_UNREGISTER_GPU_VASPACE, &vas);
    (void)ioctl(simcuda.uvm_fd, UVM_UNREGISTER_GPU, &gpu);
    simcuda_rm_free(d->h_device);
    close_fd(&d->fd);
}

CUresult simcuda_uvm_range(uint64_t addr, uint64_t length)
{
    UVM_CREATE_EXTERNAL_RANGE_PARAMS p = {.base = addr, .length = length};

    return ioctl(simcuda.uvm_fd, UVM_CREATE_EXTERNAL_RANGE, &p) ? CUDA_ERROR_UNKNOWN : simcuda_status(p.rmStatus);
}

CUresult simcuda_uvm_free(uint64_t addr, uint64_t length)
{
    UVM_FREE_PARAMS p = uvm_free_params(addr, length);

    return ioctl(simcuda.uvm_fd, UVM_FREE, &p) ? CUDA_ERROR_UNKNOWN : simcuda_status(p.rmStatus);
}

CUresult simcuda_uvm_map(struct simcuda_device *d, uint64_t addr, uint64_t length, uint64_t offset, uint32_t memory)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = calloc(1, sizeof(*p));
    CUresult result;

    if (!p)
        return CUDA_ERROR_OUT_OF_MEMORY;
    p->base = addr;
    p->length = length;
    p->offset = offset;
    UUID(p->perGpuAttributes[0].gpuUuid, d);
    p->gpuAttributesCount = 1;
    p->rmCtrlFd = simcuda.ctl_fd;
    p->hClient = simcuda.h_client;
    p->hMemory = memory;
    result = ioctl(simcuda.uvm_fd, UVM_MAP_EXTERNAL_ALLOCATION, p) ? CUDA_ERROR_UNKNOWN : simcuda_status(p->rmStatus);
    free(p);
    return result;
}
