// Common memory: one copy of what several processes read, such as the weights of a model that two engines serve.
//
// A process reserves addresses for common memory in parts of equal size. The memory of a part is a file descriptor: any
// process of the user that has it can map the part, and the memory lives as long as somebody maps it or has the
// descriptor, whichever process made it and however that ended. A process that only keeps descriptors needs no context,
// and no device memory of its own.
//
// A part is mapped read-only, so that a stray write ends its own process and reaches no other: a kernel's write fails,
// the CPU's faults. Who makes a part maps it writable until it is filled.
//
// Pools do not know this memory: whoever keeps the descriptors counts it once (vmem_kv_hold).
//
// On the GPU's backends, memory is CUDA's (cuMemCreate), whatever the backend's own pages are.
//
// Errors and thread safety are as in vmem.h: 0, or a negative errno and vmem_last_error(), and a call that fails changes
// nothing.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_COMMON_H
#define VMEM_COMMON_H

#include "vmem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vmem_common vmem_common;

// Reserves addresses for `parts` parts of part_bytes, a multiple of 2 MiB, at *addr. Nothing is mapped. The context must
// outlive the object.
int vmem_common_create(vmem_context *ctx, uint64_t part_bytes, uint32_t parts, vmem_common **out, uint64_t *addr);
// Unmaps everything, which no kernel in flight may access, and frees the addresses. NULL is allowed. In a forked child, it
// frees nothing of the parent's.
void vmem_common_destroy(vmem_common *common);

// Allocates the memory of one part, whose contents are undefined. *fd is its only reference. -ENOMEM: there is none.
int vmem_common_new(vmem_common *common, int *fd);

#define VMEM_COMMON_WRITABLE 0x1u

// Maps the memory of fd as this part. fd stays the caller's, and may be closed. flags: VMEM_COMMON_WRITABLE. -EINVAL: fd is
// no memory of one part. -EEXIST: the part is mapped.
int vmem_common_map(vmem_common *common, uint32_t part, int fd, uint32_t flags);
// Makes a mapped part read-only.
int vmem_common_seal(vmem_common *common, uint32_t part);
// Unmaps n parts, which no kernel in flight may access; those that are not mapped are skipped.
int vmem_common_unmap(vmem_common *common, uint32_t first, uint32_t n);

#ifdef __cplusplus
}
#endif
#endif
