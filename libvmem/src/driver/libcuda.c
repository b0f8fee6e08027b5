// SPDX-License-Identifier: MIT
#include "driver/libcuda.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"

int vmem__cuda_error(const struct vmem__libcuda *fn, int result, const char *what)
{
    const char *text = NULL;
    int rc = -EIO;

    if (result == CUDA_SUCCESS)
        return 0;
    switch (result) {
    case CUDA_ERROR_INVALID_VALUE: rc = -EINVAL; break;
    case CUDA_ERROR_OUT_OF_MEMORY: rc = -ENOMEM; break;
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: rc = -ENODEV; break;
    case CUDA_ERROR_ILLEGAL_ADDRESS: rc = -EFAULT; break;
    case CUDA_ERROR_NOT_PERMITTED: rc = -EPERM; break;
    case CUDA_ERROR_NOT_SUPPORTED: rc = -EOPNOTSUPP; break;
    }
    if (fn->error_string(result, &text) != CUDA_SUCCESS || !text)
        text = "unknown error";
    return vmem__error(rc, "%s: CUDA error %d, %s", what, result, text);
}

int vmem__libcuda_load(struct vmem__libcuda *fn)
{
    // NODELETE, because CUDA's threads and exit handlers outlive every vMem context.
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int count = 0, rc;
    void *symbol;

    if (!library)
        return vmem__error(-ENODEV, "no CUDA driver library: %s", dlerror());
#define VMEM__LIBCUDA_LOAD(field, name, parameters)                                                          \
    symbol = dlsym(library, name);                                                                           \
    if (!symbol)                                                                                             \
        return vmem__error(-ENODEV, "libcuda.so.1 does not export %s: the driver is older than R515", name); \
    memcpy(&fn->field, &symbol, sizeof(symbol));
    VMEM__LIBCUDA(VMEM__LIBCUDA_LOAD)
#undef VMEM__LIBCUDA_LOAD
    rc = vmem__cuda_error(fn, fn->init(0), "cuInit");
    if (rc)
        return rc;
    rc = vmem__cuda_error(fn, fn->device_count(&count), "cuDeviceGetCount");
    if (rc)
        return rc;
    return count > 0 ? 0 : vmem__error(-ENODEV, "CUDA sees no device");
}

static int find_device(struct vmem__libcuda *fn, int ordinal, int *device)
{
    int count = 0, vmm = 0, rc = vmem__libcuda_load(fn);

    if (rc)
        return rc;
    fn->device_count(&count);
    if (ordinal < 0 || ordinal >= count)
        return vmem__error(-ENODEV, "device %d: CUDA sees %d device%s", ordinal, count, count == 1 ? "" : "s");
    rc = vmem__cuda_error(fn, fn->device_get(device, ordinal), "cuDeviceGet");
    if (rc)
        return rc;
    fn->device_attribute(&vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, *device);
    return vmm ? 0 : vmem__error(-EOPNOTSUPP, "device %d has no CUDA virtual memory management", ordinal);
}

int vmem__cuda_probe(int ordinal)
{
    struct vmem__libcuda fn;
    int device;

    return find_device(&fn, ordinal, &device);
}

int vmem__cuda_capability(int ordinal, int *capability)
{
    struct vmem__libcuda fn;
    int device, major, minor, rc = find_device(&fn, ordinal, &device);

    if (!rc)
        rc = vmem__cuda_error(&fn, fn.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                              "cuDeviceGetAttribute");
    if (!rc)
        rc = vmem__cuda_error(&fn, fn.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
                              "cuDeviceGetAttribute");
    if (!rc)
        *capability = 10 * major + minor;
    return rc;
}

int vmem__cuda_open(struct vmem__cuda *cu, int ordinal, struct vmem_info *info)
{
    uint64_t free;
    int rc = find_device(&cu->fn, ordinal, &cu->device);

    if (rc)
        return rc;
    rc = vmem__cuda_error(&cu->fn, cu->fn.ctx_retain(&cu->context, cu->device), "cuDevicePrimaryCtxRetain");
    if (rc) {
        cu->context = NULL;
        return rc;
    }
    rc = vmem__cuda_enter(cu);
    if (!rc) {
        rc = vmem__cuda_error(&cu->fn, cu->fn.stream_create(&cu->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        if (cu->fn.host_alloc(&cu->zeros, VMEM__ZEROS, 0))
            cu->zeros = NULL;
        else
            memset(cu->zeros, 0, VMEM__ZEROS);
        vmem__cuda_leave(cu);
    }
    if (!rc)
        rc = vmem__cuda_error(&cu->fn, cu->fn.device_uuid(info->device_uuid, cu->device), "cuDeviceGetUuid_v2");
    if (!rc)
        rc = vmem__cuda_error(&cu->fn, cu->fn.device_name(info->device_name, sizeof(info->device_name), cu->device),
                              "cuDeviceGetName");
    if (!rc)
        rc = vmem__cuda_memory(cu, &info->memory_total, &free);
    if (rc) {
        vmem__cuda_close(cu, false);
        return rc;
    }
    info->device = ordinal;
    return 0;
}

void vmem__cuda_close(struct vmem__cuda *cu, bool forked)
{
    if (!cu->context)
        return;
    // At process exit, CUDA may already be gone; then there is nothing left to free.
    if (!forked && cu->fn.ctx_push(cu->context) == CUDA_SUCCESS) {
        if (cu->stream)
            cu->fn.stream_destroy(cu->stream);
        if (cu->zeros)
            cu->fn.host_free(cu->zeros);
        vmem__cuda_leave(cu);
        cu->fn.ctx_release(cu->device);
    }
    cu->stream = NULL;
    cu->zeros = NULL;
    cu->context = NULL;
}

int vmem__cuda_enter(struct vmem__cuda *cu)
{
    return vmem__cuda_error(&cu->fn, cu->fn.ctx_push(cu->context), "cuCtxPushCurrent");
}

void vmem__cuda_leave(struct vmem__cuda *cu)
{
    void *context;

    cu->fn.ctx_pop(&context);
}

// A fill is a kernel, which does two things to the kernels of an engine that runs beside it. It waits until they leave
// room, 0.35 ms each time beside kernels of 50 us. And an H100 (driver 580) that has run kernels of two streams
// alternately, 16 times, begins every kernel 0.2 to 0.5 us later from then on, which is 1.3 % of a decode step. It ends
// when another process uses the GPU. A copy from the host, which a copy engine makes, does neither, but takes longer
// than a fill that need not wait.
#define FILL_FROM (UINT64_C(16) << 20) // bytes for which both take as long beside such kernels

int vmem__cuda_zero(struct vmem__cuda *cu, uint64_t addr, uint64_t length)
{
    if (!cu->zeros || (length >= FILL_FROM && !*cu->beside_kernels))
        return cu->fn.memset_async(addr, 0, length, cu->stream);
    int result = CUDA_SUCCESS;
    for (uint64_t n; length && result == CUDA_SUCCESS; addr += n, length -= n) {
        n = length < VMEM__ZEROS ? length : VMEM__ZEROS;
        result = cu->fn.memcpy_async(addr, (uint64_t)(uintptr_t)cu->zeros, n, cu->stream);
    }
    return result;
}

int vmem__cuda_memory(struct vmem__cuda *cu, uint64_t *total, uint64_t *free)
{
    size_t t = 0, f = 0;
    int rc = vmem__cuda_enter(cu);

    if (rc)
        return rc;
    rc = vmem__cuda_error(&cu->fn, cu->fn.mem_info(&f, &t), "cuMemGetInfo");
    vmem__cuda_leave(cu);
    *total = t;
    *free = f;
    return rc;
}

int vmem__cuda_copy(struct vmem__cuda *cu, const struct vmem_copy_op *ops, size_t n)
{
    int result = CUDA_SUCCESS, sync, rc = vmem__cuda_enter(cu);

    if (rc)
        return rc;
    for (size_t i = 0; i < n && result == CUDA_SUCCESS; i++)
        result = cu->fn.memcpy_async(ops[i].dst, ops[i].src, ops[i].length, cu->stream);
    sync = cu->fn.stream_sync(cu->stream); // after a failure too: no work of this call may still be running
    vmem__cuda_leave(cu);
    return vmem__cuda_error(&cu->fn, result ? result : sync, "copy");
}

int vmem__cuda_fill(struct vmem__cuda *cu, uint64_t addr, uint8_t value, uint64_t length)
{
    int result, sync, rc = vmem__cuda_enter(cu);

    if (rc)
        return rc;
    result = value ? cu->fn.memset_async(addr, value, length, cu->stream) : vmem__cuda_zero(cu, addr, length);
    sync = cu->fn.stream_sync(cu->stream);
    vmem__cuda_leave(cu);
    return vmem__cuda_error(&cu->fn, result ? result : sync, "fill");
}

static int counted(struct vmem__cuda *cu, int result, const char *what)
{
    atomic_fetch_add_explicit(cu->syscalls, 1, memory_order_relaxed);
    return vmem__cuda_error(&cu->fn, result, what);
}

static int create(struct vmem__cuda *cu, uint64_t length, int handle_types, uint64_t *handle)
{
    const struct vmem__cu_prop prop = {.type = 1,
                                       .handle_types = handle_types,
                                       .location = {.type = 1, .id = cu->device}};

    return counted(cu, cu->fn.mem_create(handle, length, &prop, 0), "cuMemCreate");
}

int vmem__cuda_create(struct vmem__cuda *cu, uint64_t length, uint64_t *handle)
{
    return create(cu, length, 0, handle);
}

int vmem__cuda_create_common(struct vmem__cuda *cu, uint64_t length, uint64_t *handle)
{
    return create(cu, length, CU_MEM_HANDLE_TYPE_FD, handle);
}

int vmem__cuda_release(struct vmem__cuda *cu, uint64_t handle)
{
    return counted(cu, cu->fn.mem_release(handle), "cuMemRelease");
}

int vmem__cuda_map(struct vmem__cuda *cu, uint64_t addr, uint64_t length, uint64_t handle)
{
    return counted(cu, cu->fn.mem_map(addr, length, 0, handle, 0), "cuMemMap");
}

int vmem__cuda_unmap(struct vmem__cuda *cu, uint64_t addr, uint64_t length)
{
    return counted(cu, cu->fn.mem_unmap(addr, length), "cuMemUnmap");
}

int vmem__cuda_allow_to(struct vmem__cuda *cu, uint64_t addr, uint64_t length, bool write)
{
    const struct vmem__cu_access access = {.location = {.type = 1, .id = cu->device}, .flags = write ? 3 : 1};

    return counted(cu, cu->fn.mem_set_access(addr, length, &access, 1), "cuMemSetAccess");
}

int vmem__cuda_allow(struct vmem__cuda *cu, uint64_t addr, uint64_t length)
{
    return vmem__cuda_allow_to(cu, addr, length, true);
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

int vmem__cuda_uvm_fds(int *fds, int max)
{
    DIR *dir = opendir("/proc/self/fd");
    char target[64];
    int n = 0;

    if (!dir)
        return 0;
    for (struct dirent *entry; n < max && (entry = readdir(dir));) {
        ssize_t length = readlinkat(dirfd(dir), entry->d_name, target, sizeof(target) - 1);

        if (length <= 0)
            continue;
        target[length] = '\0';
        if (strcmp(target, "/dev/nvidia-uvm") == 0)
            fds[n++] = atoi(entry->d_name);
    }
    closedir(dir);
    qsort(fds, n, sizeof(*fds), ascending);
    return n;
}
