// The state that all GPU backends share: the device's CUDA context and the backdrop. The operations below need only
// that.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_GPU_H
#define VMEM_GPU_H

#include "backend/backend.h"
#include "driver/reserve.h"

struct vmem__gpu {
    struct vmem__cuda cuda;
    struct vmem__backdrop backdrop;
};

// These operations require that b->priv begins with a struct vmem__gpu and that r->priv is a struct
// vmem__cuda_reservation.
int vmem__gpu_memory(struct vmem__backend *b, uint64_t *total, uint64_t *free);
int vmem__gpu_copy(struct vmem__backend *b, const struct vmem_copy_op *ops, size_t n);
int vmem__gpu_fill(struct vmem__backend *b, uint64_t addr, uint8_t value, uint64_t length);
void vmem__gpu_unreserve(struct vmem__backend *b, struct vmem__reservation *r);
int vmem__gpu_backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length);
int vmem__gpu_record(struct vmem__backend *b, void *stream, void **event);
int vmem__gpu_passed(struct vmem__backend *b, void *event);
void vmem__gpu_event_free(struct vmem__backend *b, void *event);
int vmem__gpu_common_reserve(struct vmem__backend *b, uint64_t length, uint64_t *addr);
void vmem__gpu_common_unreserve(struct vmem__backend *b, uint64_t addr, uint64_t length);
int vmem__gpu_common_new(struct vmem__backend *b, uint64_t length, int *fd);
int vmem__gpu_common_map(struct vmem__backend *b, uint64_t addr, uint64_t length, int fd, bool writable);
int vmem__gpu_common_seal(struct vmem__backend *b, uint64_t addr, uint64_t length);
int vmem__gpu_common_unmap(struct vmem__backend *b, uint64_t addr, uint64_t length);
// Implements reserve(). Activates the segments of the first `ahead` bytes.
int vmem__gpu_reserve(struct vmem__backend *b, struct vmem__reservation *r, uint64_t ahead);
// Implements zero(). alias_of returns an address at which the run's memory is mapped.
int vmem__gpu_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n,
                   uint64_t (*alias_of)(const struct vmem__run *run));

// The entries that are the same in the tables of all of them.
#define VMEM__GPU_OPS                                                                                                 \
    .memory = vmem__gpu_memory, .record = vmem__gpu_record, .passed = vmem__gpu_passed,                               \
    .event_free = vmem__gpu_event_free, .common_reserve = vmem__gpu_common_reserve,                                   \
    .common_unreserve = vmem__gpu_common_unreserve, .common_new = vmem__gpu_common_new,                               \
    .common_map = vmem__gpu_common_map, .common_seal = vmem__gpu_common_seal, .common_unmap = vmem__gpu_common_unmap, \
    .copy = vmem__gpu_copy, .fill = vmem__gpu_fill

#endif
