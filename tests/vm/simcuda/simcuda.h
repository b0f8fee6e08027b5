// A stand-in libcuda.so.1 for the guest with simulated GPUs: the few driver-API functions that libvmem opens, on top of
// the real UVM ioctls, the RM ioctls and /dev/simgpu. Inside: what its files share.
//
// It behaves as libcuda does where libvmem can tell: one UVM address space per process, external ranges for
// cuMemMap, allocations that live until they are released and unmapped, no use in a forked child.
//
// It is an unkind neighbour: reservations are handed out without gaps, and right behind each begins a guard, 2 MiB of
// ordinary memory. Its content is checked when the reservation or the context goes and at the end of the process, which
// aborts if any is lost.
//
// SPDX-License-Identifier: MIT
#ifndef SIMCUDA_H
#define SIMCUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

#define SIMCUDA_API __attribute__((visibility("default")))
#define SIMCUDA_MAX_DEVICES 2
#define SIMCUDA_GRANULARITY (2ull << 20)

struct simcuda_device {
    int index;
    unsigned char uuid[16];
    uint64_t fb_size;
    int refs; // of the primary context
    int fd;   // /dev/nvidiaN
    uint32_t h_device, h_vaspace;
    uint32_t guard; // RM's memory behind the guards; 0: none yet
};

struct simcuda {
    pthread_mutex_t lock;
    pid_t pid; // that initialised; 0: nobody yet
    int sim_fd;
    int count, contexts;
    int uvm_fd, mm_fd, ctl_fd;
    uint32_t h_client, next_handle;
    struct simcuda_device devices[SIMCUDA_MAX_DEVICES];
    void *reservations, *mappings; // trees of tsearch()
};
extern struct simcuda simcuda;

// 0, or why nothing can be called here.
CUresult simcuda_ready(void);
// The device whose primary context is current in this thread; NULL: none.
struct simcuda_device *simcuda_current(void);
CUresult simcuda_status(uint32_t nv_status);

// rm.c. With the lock held.
CUresult simcuda_rm_open(void);
CUresult simcuda_rm_device(struct simcuda_device *d);
void simcuda_rm_close(void);
CUresult simcuda_rm_memory(struct simcuda_device *d, uint64_t size, uint32_t *handle);
void simcuda_rm_free(uint32_t handle);
// UVM's descriptors, and a GPU and its address space registered with it.
CUresult simcuda_uvm_open(void);
CUresult simcuda_uvm_device(struct simcuda_device *d);
void simcuda_uvm_forget(struct simcuda_device *d);
CUresult simcuda_uvm_range(uint64_t addr, uint64_t length);
CUresult simcuda_uvm_free(uint64_t addr, uint64_t length);
// Fills or reads memory that the GPU maps there. (copy.c)
CUresult simcuda_fill(struct simcuda_device *d, uint64_t addr, unsigned char value, size_t length);
CUresult simcuda_read(struct simcuda_device *d, uint64_t addr, void *to, size_t length);
CUresult simcuda_uvm_map(struct simcuda_device *d, uint64_t addr, uint64_t length, uint64_t offset, uint32_t memory);

// vmm.c. Checks the guards on a device, which are none from then on. With the lock held.
void simcuda_guards_end(struct simcuda_device *d);
// Forgets all reservations and mappings: their address space is gone.
void simcuda_vmm_reset(void);

#endif
