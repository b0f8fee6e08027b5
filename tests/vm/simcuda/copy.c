// Copies and fills, done by an engine of the simulated GPU.
//
// SPDX-License-Identifier: MIT
#define _GNU_SOURCE
#include "simcuda.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "simgpu_uapi.h"

static struct simgpu_vas_id vas(const struct simcuda_device *d)
{
    return (struct simgpu_vas_id){.gpu = d->index, .h_client = simcuda.h_client, .h_vaspace = d->h_vaspace};
}

// Reserved addresses, CUDA's and anybody's, are no memory of the host's: what the CPU can read is.
static bool is_host(uint64_t addr)
{
    char byte;
    struct iovec to = {&byte, 1}, from = {(void *)(uintptr_t)addr, 1};

    return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1;
}

static CUresult done(int ioctl_result, int result)
{
    if (ioctl_result)
        return CUDA_ERROR_UNKNOWN;
    return result ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

CUresult simcuda_fill(struct simcuda_device *d, uint64_t addr, unsigned char value, size_t length)
{
    struct simgpu_copy c = {.vas = vas(d), .dst = addr, .len = length, .value = value};
    int failed = ioctl(simcuda.sim_fd, SIMGPU_COPY, &c);

    return done(failed, c.result);
}

CUresult simcuda_read(struct simcuda_device *d, uint64_t addr, void *to, size_t length)
{
    struct simgpu_access a = {.vas = vas(d),
                              .va = addr,
                              .len = length,
                              .buf = (uintptr_t)to,
                              .flags = SIMGPU_ACCESS_CE};
    int failed = ioctl(simcuda.sim_fd, SIMGPU_ACCESS, &a);

    return done(failed, a.result);
}

SIMCUDA_API CUresult cuMemHostAlloc(void **buffer, size_t length, unsigned flags)
{
    (void)flags;
    if (!simcuda_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    *buffer = malloc(length);
    return *buffer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIMCUDA_API CUresult cuMemFreeHost(void *buffer)
{
    free(buffer);
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuMemcpyAsync(uint64_t dst, uint64_t src, size_t length, void *stream)
{
    struct simcuda_device *d = simcuda_current();
    bool dst_host, src_host;

    (void)stream;
    if (simcuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!d)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!length)
        return CUDA_SUCCESS;
    dst_host = is_host(dst);
    src_host = is_host(src);
    if (dst_host && src_host) {
        memmove((void *)(uintptr_t)dst, (void *)(uintptr_t)src, length);
        return CUDA_SUCCESS;
    }
    if (!dst_host && !src_host) {
        struct simgpu_copy c = {.vas = vas(d), .dst = dst, .src = src, .len = length};
        int failed = ioctl(simcuda.sim_fd, SIMGPU_COPY, &c);

        return done(failed, c.result);
    }
    struct simgpu_access a = {
        .vas = vas(d),
        .va = dst_host ? src : dst,
        .len = length,
        .buf = dst_host ? dst : src,
        .flags = SIMGPU_ACCESS_CE | (dst_host ? 0 : SIMGPU_ACCESS_WRITE),
    };
    int failed = ioctl(simcuda.sim_fd, SIMGPU_ACCESS, &a);

    return done(failed, a.result);
}

SIMCUDA_API CUresult cuMemsetD8Async(uint64_t addr, unsigned char value, size_t length, void *stream)
{
    struct simcuda_device *d = simcuda_current();

    (void)stream;
    if (simcuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    return d ? simcuda_fill(d, addr, value, length) : CUDA_ERROR_INVALID_CONTEXT;
}

SIMCUDA_API CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    struct simcuda_device *d = simcuda_current();
    struct simgpu_info info = {.gpu = d ? d->index : 0};

    if (simcuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!d)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ioctl(simcuda.sim_fd, SIMGPU_INFO, &info))
        return CUDA_ERROR_UNKNOWN;
    *free = info.fb_free;
    *total = info.fb_size;
    return CUDA_SUCCESS;
}
