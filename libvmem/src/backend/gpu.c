// SPDX-License-Identifier: MIT
#include "backend/gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

int vmem__gpu_memory(struct vmem__backend *b, uint64_t *total, uint64_t *free)
{
    struct vmem__gpu *gpu = b->priv;

    return vmem__cuda_memory(&gpu->cuda, total, free);
}

int vmem__gpu_copy(struct vmem__backend *b, const struct vmem_copy_op *ops, size_t n)
{
    struct vmem__gpu *gpu = b->priv;

    return vmem__cuda_copy(&gpu->cuda, ops, n);
}

int vmem__gpu_fill(struct vmem__backend *b, uint64_t addr, uint8_t value, uint64_t length)
{
    struct vmem__gpu *gpu = b->priv;

    return vmem__cuda_fill(&gpu->cuda, addr, value, length);
}

int vmem__gpu_reserve(struct vmem__backend *b, struct vmem__reservation *r, uint64_t ahead)
{
    struct vmem__gpu *gpu = b->priv;
    struct vmem__cuda_reservation *cuda = malloc(sizeof(*cuda));
    int rc = cuda ? vmem__cuda_reserve(&gpu->cuda, &gpu->backdrop, r->length, ahead, cuda)
                  : vmem__error(-ENOMEM, "no memory for bookkeeping of a reservation");

    if (rc) {
        free(cuda);
        return rc;
    }
    r->addr = cuda->addr;
    r->priv = cuda;
    return 0;
}

void vmem__gpu_unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct vmem__gpu *gpu = b->priv;

    vmem__cuda_unreserve(&gpu->cuda, &gpu->backdrop, r->priv);
    free(r->priv);
}

int vmem__gpu_backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    struct vmem__gpu *gpu = b->priv;
    struct vmem__cuda_reservation *cuda = r->priv;
    int rc;

    pthread_mutex_lock(&cuda->lock);
    rc = vmem__cuda_activate(&gpu->cuda, &gpu->backdrop, cuda, addr, length);
    pthread_mutex_unlock(&cuda->lock);
    return rc;
}

int vmem__gpu_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n,
                   uint64_t (*alias_of)(const struct vmem__run *run))
{
    struct vmem__gpu *gpu = b->priv;
    const struct vmem__libcuda *fn = &gpu->cuda.fn;
    int result = CUDA_SUCCESS, sync, rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    for (size_t i = 0; i < n && result == CUDA_SUCCESS; i++)
        result = vmem__cuda_zero(&gpu->cuda, alias_of(&runs[i]), runs[i].length);
    sync = fn->stream_sync(gpu->cuda.stream);
    vmem__cuda_leave(&gpu->cuda);
    return vmem__cuda_error(fn, result ? result : sync, "zero");
}

int vmem__gpu_record(struct vmem__backend *b, void *stream, void **event)
{
    struct vmem__gpu *gpu = b->priv;
    const struct vmem__libcuda *fn = &gpu->cuda.fn;
    int result = CUDA_SUCCESS, rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    if (!*event)
        result = fn->event_create(event, CU_EVENT_DISABLE_TIMING);
    rc = result ? vmem__cuda_error(fn, result, "cuEventCreate")
                : vmem__cuda_error(fn, fn->event_record(*event, stream), "cuEventRecord");
    vmem__cuda_leave(&gpu->cuda);
    return rc;
}

int vmem__gpu_passed(struct vmem__backend *b, void *event)
{
    struct vmem__gpu *gpu = b->priv;
    int result, rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    result = gpu->cuda.fn.event_query(event);
    vmem__cuda_leave(&gpu->cuda);
    if (result == CUDA_ERROR_NOT_READY)
        return 0;
    return result ? vmem__cuda_error(&gpu->cuda.fn, result, "cuEventQuery") : 1;
}

void vmem__gpu_event_free(struct vmem__backend *b, void *event)
{
    struct vmem__gpu *gpu = b->priv;

    if (vmem__cuda_enter(&gpu->cuda))
        return;
    gpu->cuda.fn.event_destroy(event);
    vmem__cuda_leave(&gpu->cuda);
}

// ---- common memory ------------------------------------------------------------------------------------------

int vmem__gpu_common_reserve(struct vmem__backend *b, uint64_t length, uint64_t *addr)
{
    struct vmem__gpu *gpu = b->priv;
    int rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    rc = vmem__cuda_error(&gpu->cuda.fn, gpu->cuda.fn.address_reserve(addr, length, VMEM_PAGE_2M, 0, 0),
                          "cuMemAddressReserve");
    vmem__cuda_leave(&gpu->cuda);
    return rc;
}

void vmem__gpu_common_unreserve(struct vmem__backend *b, uint64_t addr, uint64_t length)
{
    struct vmem__gpu *gpu = b->priv;

    if (vmem__cuda_enter(&gpu->cuda))
        return;
    gpu->cuda.fn.address_free(addr, length);
    vmem__cuda_leave(&gpu->cuda);
}

// The descriptor keeps the memory; the handle is only this process's name for it.
int vmem__gpu_common_new(struct vmem__backend *b, uint64_t length, int *fd)
{
    struct vmem__gpu *gpu = b->priv;
    uint64_t handle;
    int rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    rc = vmem__cuda_create_common(&gpu->cuda, length, &handle);
    if (!rc) {
        rc = vmem__cuda_error(&gpu->cuda.fn, gpu->cuda.fn.mem_export(fd, handle, CU_MEM_HANDLE_TYPE_FD, 0),
                              "cuMemExportToShareableHandle");
        vmem__cuda_release(&gpu->cuda, handle);
        if (!rc)
            fcntl(*fd, F_SETFD, FD_CLOEXEC); // a child that outlived this process would keep the memory
    }
    vmem__cuda_leave(&gpu->cuda);
    return rc;
}

int vmem__gpu_common_map(struct vmem__backend *b, uint64_t addr, uint64_t length, int fd, bool writable)
{
    struct vmem__gpu *gpu = b->priv;
    uint64_t handle;
    int rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    rc = vmem__cuda_error(&gpu->cuda.fn,
                          gpu->cuda.fn.mem_import(&handle, (void *)(uintptr_t)(unsigned)fd, CU_MEM_HANDLE_TYPE_FD),
                          "cuMemImportFromShareableHandle");
    if (!rc) {
        rc = vmem__cuda_map(&gpu->cuda, addr, length, handle);
        if (!rc && (rc = vmem__cuda_allow_to(&gpu->cuda, addr, length, writable)))
            vmem__cuda_unmap(&gpu->cuda, addr, length);
        vmem__cuda_release(&gpu->cuda, handle); // what is mapped stays
    }
    vmem__cuda_leave(&gpu->cuda);
    return rc;
}

int vmem__gpu_common_seal(struct vmem__backend *b, uint64_t addr, uint64_t length)
{
    struct vmem__gpu *gpu = b->priv;
    int rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    rc = vmem__cuda_allow_to(&gpu->cuda, addr, length, false);
    vmem__cuda_leave(&gpu->cuda);
    return rc;
}

int vmem__gpu_common_unmap(struct vmem__backend *b, uint64_t addr, uint64_t length)
{
    struct vmem__gpu *gpu = b->priv;
    int rc = vmem__cuda_enter(&gpu->cuda);

    if (rc)
        return rc;
    rc = vmem__cuda_unmap(&gpu->cuda, addr, length);
    vmem__cuda_leave(&gpu->cuda);
    return rc;
}
