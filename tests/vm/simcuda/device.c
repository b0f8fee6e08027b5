// Initialisation, devices, contexts, streams.
//
// SPDX-License-Identifier: MIT
#include "simcuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "simgpu_uapi.h"

struct simcuda simcuda = {.lock = PTHREAD_MUTEX_INITIALIZER, .sim_fd = -1, .uvm_fd = -1, .mm_fd = -1, .ctl_fd = -1};

#define STACK 64
static _Thread_local struct simcuda_device *stack[STACK];
static _Thread_local int depth;

CUresult simcuda_ready(void)
{
    // As libcuda: a forked child cannot use what its parent initialised
    return simcuda.pid == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

struct simcuda_device *simcuda_current(void) { return depth ? stack[depth - 1] : NULL; }

CUresult simcuda_status(uint32_t nv_status)
{
    switch (nv_status) {
    case 0x00: return CUDA_SUCCESS;
    case 0x1a: // insufficient resources
    case 0x51: // no memory
        return CUDA_ERROR_OUT_OF_MEMORY;
    case 0x1e: // invalid address
    case 0x1f: // invalid argument
    case 0x2c: // address in use
        return CUDA_ERROR_INVALID_VALUE;
    case 0x56: return CUDA_ERROR_NOT_SUPPORTED;
    default: return CUDA_ERROR_UNKNOWN;
    }
}

SIMCUDA_API CUresult cuInit(unsigned flags)
{
    CUresult result = CUDA_SUCCESS;

    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&simcuda.lock);
    if (simcuda.pid) {
        result = simcuda_ready();
    } else {
        struct simgpu_info info = {0};
        int fd = open("/dev/simgpu", O_RDWR | O_CLOEXEC);

        if (fd < 0 || ioctl(fd, SIMGPU_INFO, &info) || info.gpus == 0)
            result = CUDA_ERROR_NO_DEVICE;
        for (uint32_t i = 0; !result && i < info.gpus && i < SIMCUDA_MAX_DEVICES; i++) {
            struct simcuda_device *d = &simcuda.devices[i];

            info.gpu = i;
            if (ioctl(fd, SIMGPU_INFO, &info))
                result = CUDA_ERROR_NO_DEVICE;
            d->index = i;
            d->fd = -1;
            d->fb_size = info.fb_size;
            memcpy(d->uuid, info.uuid, sizeof(d->uuid));
            simcuda.count = i + 1;
        }
        if (!result) {
            simcuda.sim_fd = fd;
            simcuda.pid = getpid();
        } else if (fd >= 0) {
            close(fd);
        }
    }
    pthread_mutex_unlock(&simcuda.lock);
    return result;
}

SIMCUDA_API CUresult cuGetErrorString(CUresult error, const char **text)
{
    switch (error) {
    case CUDA_SUCCESS: *text = "no error"; break;
    case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *text = "out of memory"; break;
    case CUDA_ERROR_NOT_INITIALIZED: *text = "initialization error"; break;
    case CUDA_ERROR_NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
    case CUDA_ERROR_INVALID_DEVICE: *text = "invalid device ordinal"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *text = "invalid device context"; break;
    case CUDA_ERROR_ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
    case CUDA_ERROR_NOT_SUPPORTED: *text = "operation not supported"; break;
    case CUDA_ERROR_UNKNOWN: *text = "unknown error"; break;
    default: *text = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDriverGetVersion(int *version)
{
    *version = 12040;
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDeviceGetCount(int *count)
{
    *count = simcuda.count;
    return simcuda_ready();
}

SIMCUDA_API CUresult cuDeviceGet(int *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= simcuda.count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return simcuda_ready();
}

static struct simcuda_device *get(int device)
{
    return device >= 0 && device < simcuda.count ? &simcuda.devices[device] : NULL;
}

SIMCUDA_API CUresult cuDeviceGetName(char *name, int length, int device)
{
    if (!get(device) || length <= 0)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, length, "Simulated GPU %d", device);
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDeviceGetUuid(unsigned char uuid[16], int device)
{
    if (!get(device))
        return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid, get(device)->uuid, 16);
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], int device) { return cuDeviceGetUuid(uuid, device); }

// For a program that acts as code on the GPU: struct simgpu_vas_id of this process on a device whose context exists.
SIMCUDA_API int simcuda_address_space(int device, uint32_t vas[4])
{
    struct simcuda_device *d = get(device);

    if (!d || !d->refs)
        return CUDA_ERROR_INVALID_CONTEXT;
    vas[0] = (uint32_t)d->index;
    vas[1] = simcuda.h_client;
    vas[2] = d->h_vaspace;
    vas[3] = 0;
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    if (!get(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = get(device)->fb_size;
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (!get(device))
        return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case 75: // compute capability, major: Turing
        *value = 7;
        break;
    case 76: *value = 5; break;
    case 41:  // unified addressing
    case 102: // virtual memory management
        *value = 1;
        break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuDevicePrimaryCtxRetain(void **context, int device)
{
    struct simcuda_device *d = get(device);
    CUresult result = simcuda_ready();

    if (result)
        return result;
    if (!d)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&simcuda.lock);
    if (d->refs == 0) {
        if (simcuda.contexts == 0) {
            result = simcuda_rm_open();
            if (!result)
                result = simcuda_uvm_open();
        }
        if (!result)
            result = simcuda_rm_device(d);
        if (!result)
            result = simcuda_uvm_device(d);
        if (!result)
            simcuda.contexts++;
        else if (simcuda.contexts == 0)
            simcuda_rm_close();
    }
    if (!result) {
        d->refs++;
        *context = d;
    }
    pthread_mutex_unlock(&simcuda.lock);
    return result;
}

SIMCUDA_API CUresult cuDevicePrimaryCtxRelease_v2(int device)
{
    struct simcuda_device *d = get(device);
    CUresult result = simcuda_ready();

    if (result)
        return result;
    if (!d || d->refs == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&simcuda.lock);
    if (--d->refs == 0) {
        simcuda_guards_end(d);
        simcuda_uvm_forget(d);
        if (--simcuda.contexts == 0) {
            simcuda_vmm_reset();
            simcuda_rm_close();
        }
    }
    pthread_mutex_unlock(&simcuda.lock);
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuCtxPushCurrent_v2(void *context)
{
    CUresult result = simcuda_ready();

    if (result)
        return result;
    if (!context || depth == STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuCtxPopCurrent_v2(void **context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuCtxGetCurrent(void **context)
{
    *context = simcuda_current();
    return simcuda_ready();
}

SIMCUDA_API CUresult cuCtxSynchronize(void) { return simcuda_current() ? simcuda_ready() : CUDA_ERROR_INVALID_CONTEXT; }

// All work is done when its call returns, so a stream is but a name.
static char streams[1];

SIMCUDA_API CUresult cuStreamCreate(void **stream, unsigned flags)
{
    (void)flags;
    if (!simcuda_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    *stream = streams;
    return simcuda_ready();
}

SIMCUDA_API CUresult cuStreamDestroy_v2(void *stream)
{
    return stream == streams ? simcuda_ready() : CUDA_ERROR_INVALID_VALUE;
}

// So an event has passed as soon as it is recorded.
static char events[1];

SIMCUDA_API CUresult cuEventCreate(void **event, unsigned flags)
{
    (void)flags;
    *event = events;
    return simcuda_current() ? simcuda_ready() : CUDA_ERROR_INVALID_CONTEXT;
}

SIMCUDA_API CUresult cuEventRecord(void *event, void *stream)
{
    (void)stream;
    return event == events ? simcuda_ready() : CUDA_ERROR_INVALID_VALUE;
}

SIMCUDA_API CUresult cuEventQuery(void *event) { return event == events ? simcuda_ready() : CUDA_ERROR_INVALID_VALUE; }

SIMCUDA_API CUresult cuEventDestroy_v2(void *event) { return cuEventQuery(event); }

SIMCUDA_API CUresult cuStreamSynchronize(void *stream)
{
    (void)stream;
    return simcuda_current() ? simcuda_ready() : CUDA_ERROR_INVALID_CONTEXT;
}
