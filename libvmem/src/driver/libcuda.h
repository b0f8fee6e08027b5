// libcuda, opened at run time: the functions of the driver API that the GPU backends (cuda, stock, uvm) use, and their
// device. Building needs no CUDA toolkit, because the few types of the API are declared as integers and pointers.
//
// The room talks to CUDA (this file, kernels), to the stock driver (abi, rm, uvm) and to the patched module (kmod), and
// knows the self-test's stamp. It calls nothing of libvmem but error.h. Begin here.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_CUDA_LIBCUDA_H
#define VMEM_CUDA_LIBCUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vmem.h"

// CUresult
#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_OUT_OF_MEMORY 2
#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_DEINITIALIZED 4
#define CUDA_ERROR_NO_DEVICE 100
#define CUDA_ERROR_INVALID_DEVICE 101
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CUDA_ERROR_NOT_READY 600
#define CUDA_ERROR_ILLEGAL_ADDRESS 700
#define CUDA_ERROR_CONTEXT_IS_DESTROYED 709
#define CUDA_ERROR_NOT_PERMITTED 800
#define CUDA_ERROR_NOT_SUPPORTED 801

#define CU_MEM_HANDLE_TYPE_FD 1
#define CU_STREAM_NON_BLOCKING 1u
#define CU_EVENT_DISABLE_TIMING 2u
#define CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR 75
#define CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR 76
#define CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED 102

// CUmemLocation and CUmemAllocationProp: pinned memory of one device.
struct vmem__cu_location {
    int type; // 1: device
    int id;
};
struct vmem__cu_prop {
    int type; // 1: pinned
    int handle_types;
    struct vmem__cu_location location;
    void *win32;
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct vmem__cu_access {
    struct vmem__cu_location location;
    int flags; // 1: read; 3: read and write
};

// X(field, exported name, parameters). All return a CUresult. A stand-in libcuda must export all of them.
#define VMEM__LIBCUDA(X)                                                                                             \
    X(init, "cuInit", (unsigned flags))                                                                              \
    X(error_string, "cuGetErrorString", (int result, const char **text))                                             \
    X(device_count, "cuDeviceGetCount", (int *count))                                                                \
    X(device_get, "cuDeviceGet", (int *device, int ordinal))                                                         \
    X(device_name, "cuDeviceGetName", (char *name, int length, int device))                                          \
    X(device_uuid, "cuDeviceGetUuid_v2", (unsigned char uuid[16], int device)) /* of a MIG instance, its own */      \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                             \
    X(ctx_retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                                          \
    X(ctx_release, "cuDevicePrimaryCtxRelease_v2", (int device))                                                     \
    X(ctx_push, "cuCtxPushCurrent_v2", (void *context))                                                              \
    X(ctx_pop, "cuCtxPopCurrent_v2", (void **context))                                                               \
    X(mem_info, "cuMemGetInfo_v2", (size_t *free, size_t *total))                                                    \
    X(address_reserve, "cuMemAddressReserve",                                                                        \
      (uint64_t *addr, size_t length, size_t align, uint64_t hint, unsigned long long flags))                        \
    X(address_free, "cuMemAddressFree", (uint64_t addr, size_t length))                                              \
    X(mem_create, "cuMemCreate",                                                                                     \
      (uint64_t *handle, size_t length, const struct vmem__cu_prop *prop, unsigned long long flags))                 \
    X(mem_release, "cuMemRelease", (uint64_t handle))                                                                \
    X(mem_export, "cuMemExportToShareableHandle", (void *fd, uint64_t handle, int type, unsigned long long flags))   \
    X(mem_import, "cuMemImportFromShareableHandle", (uint64_t *handle, void *fd, int type))                          \
    X(mem_map, "cuMemMap", (uint64_t addr, size_t length, size_t offset, uint64_t handle, unsigned long long flags)) \
    X(mem_unmap, "cuMemUnmap", (uint64_t addr, size_t length))                                                       \
    X(mem_set_access, "cuMemSetAccess",                                                                              \
      (uint64_t addr, size_t length, const struct vmem__cu_access *access, size_t count))                            \
    X(host_alloc, "cuMemHostAlloc", (void **buffer, size_t length, unsigned flags))                                  \
    X(host_free, "cuMemFreeHost", (void *buffer))                                                                    \
    X(memcpy_async, "cuMemcpyAsync", (uint64_t dst, uint64_t src, size_t length, void *stream))                      \
    X(memset_async, "cuMemsetD8Async", (uint64_t addr, unsigned char value, size_t length, void *stream))            \
    X(stream_create, "cuStreamCreate", (void **stream, unsigned flags))                                              \
    X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                                          \
    X(stream_sync, "cuStreamSynchronize", (void *stream))                                                            \
    X(event_create, "cuEventCreate", (void **event, unsigned flags))                                                 \
    X(event_record, "cuEventRecord", (void *event, void *stream))                                                    \
    X(event_query, "cuEventQuery", (void *event))                                                                    \
    X(event_destroy, "cuEventDestroy_v2", (void *event))

struct vmem__libcuda {
#define VMEM__LIBCUDA_FIELD(field, name, parameters) int(*field) parameters;
    VMEM__LIBCUDA(VMEM__LIBCUDA_FIELD)
#undef VMEM__LIBCUDA_FIELD
};

#define VMEM__ZEROS (UINT64_C(2) << 20)

// One device with its primary context. Zero-initialise before open.
struct vmem__cuda {
    struct vmem__libcuda fn;
    int device;
    void *context;
    void *stream;                       // private, not synchronised with the legacy default stream
    void *zeros;                        // pinned memory of the host, VMEM__ZEROS bytes; NULL if there was none
    _Atomic uint64_t *syscalls;         // counts calls that reserve, create, map or unmap; set before open
    const _Atomic bool *beside_kernels; // see struct vmem__backend; set before open
};

// Loads the library and initialises it. Errors: -ENODEV without a library, a driver or a device.
int vmem__libcuda_load(struct vmem__libcuda *fn);
// 0 if vmem__cuda_open() of this ordinal would find its device; creates no context.
int vmem__cuda_probe(int ordinal);
// Its compute capability, ten times the major number and the minor one; creates no context.
int vmem__cuda_capability(int ordinal, int *capability);
// Retains the primary context and fills info's device, device_name, device_uuid and memory_total.
int vmem__cuda_open(struct vmem__cuda *cu, int ordinal, struct vmem_info *info);
// forked: the process is a child in which CUDA cannot be called.
void vmem__cuda_close(struct vmem__cuda *cu, bool forked);

// Every call of a function above that needs a context must be between these two. enter() makes the primary context
// current; leave() restores the previous one.
int vmem__cuda_enter(struct vmem__cuda *cu);
void vmem__cuda_leave(struct vmem__cuda *cu);

// Begins to zero memory on the private stream, between enter and leave. Returns a CUresult.
int vmem__cuda_zero(struct vmem__cuda *cu, uint64_t addr, uint64_t length);

// The errno of a CUresult, negative; sets the error text to "what: CUDA's text". 0 stays 0.
int vmem__cuda_error(const struct vmem__libcuda *fn, int result, const char *what);

// These enter and leave themselves.
int vmem__cuda_memory(struct vmem__cuda *cu, uint64_t *total, uint64_t *free);
int vmem__cuda_copy(struct vmem__cuda *cu, const struct vmem_copy_op *ops, size_t n);
int vmem__cuda_fill(struct vmem__cuda *cu, uint64_t addr, uint8_t value, uint64_t length);

// CUDA's virtual memory management, with counts and errno. Between enter and leave. length: a multiple of 2 MiB.
int vmem__cuda_create(struct vmem__cuda *cu, uint64_t length, uint64_t *handle);
int vmem__cuda_create_common(struct vmem__cuda *cu, uint64_t length, uint64_t *handle); // other processes can import it
int vmem__cuda_release(struct vmem__cuda *cu, uint64_t handle);
int vmem__cuda_map(struct vmem__cuda *cu, uint64_t addr, uint64_t length, uint64_t handle);
int vmem__cuda_unmap(struct vmem__cuda *cu, uint64_t addr, uint64_t length); // of one or more whole mappings
int vmem__cuda_allow(struct vmem__cuda *cu, uint64_t addr, uint64_t length); // read and write, for this device
int vmem__cuda_allow_to(struct vmem__cuda *cu, uint64_t addr, uint64_t length, bool write);

// Finds up to max descriptors of /dev/nvidia-uvm in this process, lowest first, and returns their number. One of them
// is the address space of this process's CUDA contexts. Only an ioctl that needs it can tell which.
int vmem__cuda_uvm_fds(int *fds, int max);

#endif
