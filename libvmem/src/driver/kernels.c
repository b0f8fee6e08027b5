// SPDX-License-Identifier: MIT
#include "driver/kernels.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "core/error.h"

#define CAPTURE_ERRORS 900 // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and those that follow it
#define CAPTURE_ERRORS_END 910
#define RELAXED 2 // CU_STREAM_CAPTURE_MODE_RELAXED

// The process has loaded libcuda: a context on a GPU did. A stand-in may lack the last two.
static struct {
    int (*device_get)(int *device, int ordinal);
    int (*retain)(void **context, int device);
    int (*release)(int device);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*synchronize)(void);
    int (*exchange_mode)(int *mode);
} cuda;

static void *find(void *library, const char *name) { return library ? dlsym(library, name) : NULL; }

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
#define FIND(field, name)                                 \
    do {                                                  \
        void *symbol = find(library, name);               \
        memcpy(&cuda.field, &symbol, sizeof(cuda.field)); \
    } while (0)
    FIND(device_get, "cuDeviceGet");
    FIND(retain, "cuDevicePrimaryCtxRetain");
    FIND(release, "cuDevicePrimaryCtxRelease_v2");
    FIND(push, "cuCtxPushCurrent_v2");
    FIND(pop, "cuCtxPopCurrent_v2");
    FIND(synchronize, "cuCtxSynchronize");
    FIND(exchange_mode, "cuThreadExchangeStreamCaptureMode");
#undef FIND
}

static void load_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
}

int vmem__beside_captures(void)
{
    int mode = RELAXED;
    load_once();
    return cuda.exchange_mode && !cuda.exchange_mode(&mode) ? mode : RELAXED;
}

void vmem__restore_capture_mode(int mode)
{
    if (cuda.exchange_mode)
        cuda.exchange_mode(&mode);
}

int vmem__wait_for_kernels(int device)
{
    void *context, *popped;
    int handle, result;
    load_once();
    if (!cuda.synchronize || cuda.device_get(&handle, device) || cuda.retain(&context, handle))
        return vmem__error(-ENODEV, "CUDA has ended, or has no device %d", device);
    result = cuda.push(context);
    if (!result) {
        const int mode = vmem__beside_captures();
        result = cuda.synchronize();
        vmem__restore_capture_mode(mode);
        cuda.pop(&popped);
    }
    cuda.release(handle);
    if (result >= CAPTURE_ERRORS && result < CAPTURE_ERRORS_END)
        return vmem__error(-EBUSY, "a CUDA graph is being captured on device %d: end the capture first", device);
    return result ? vmem__error(-EIO, "waiting for device %d: CUDA error %d", device, result) : 0;
}
