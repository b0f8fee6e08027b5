// The uvm backend: a batch of runs is one ioctl of the patched nvidia-uvm.ko, and pages are replaced without a gap.
// CUDA reserves the addresses, so that it knows them; the module puts pages into them.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_UVM_UVM_H
#define VMEM_UVM_UVM_H

#include <pthread.h>

#include "backend/gpu.h"
#include "driver/kmod.h"

// One cuMemMap() of CUDA's is one external range of UVM's, and an op must lie inside one: longer segments mean fewer
// ops. The backdrop costs one segment of memory. Once the module puts a page into 2 MiB of it, the rest of these reads
// as zero.
#define UVM_SEGMENT (UINT64_C(64) << 20)

struct uvm {
    struct vmem__gpu gpu; // first: vmem__gpu_*()
    struct vmem__kmod kmod;
    // Arenas that were freed, but whose pages the module would not release. They are tried again when another arena is
    // made or freed, and count as overhead until then.
    pthread_mutex_t lock;
    struct uvm_arena *unreleased;
};

// 2 MiB pages of the module, created many at a time; those of one chunk have consecutive handles.
struct uvm_arena {
    struct uvm_arena *next; // in uvm.unreleased
    uint64_t pages;
    uint64_t released;    // of these, the first ones
    uint32_t chunk;       // pages of a chunk, but for the last
    pthread_mutex_t lock; // of the alias' making
    bool aliased;
    struct vmem__reservation alias; // all of the arena mapped once, for zeroing
    struct vmem__cuda_reservation alias_cuda;
    uint64_t first[]; // handle of each chunk's first page
};

// Backend operations of the same names. CUDA must know a segment before the module can map in it.
int vmem__uvm_arena_new(struct vmem__backend *b, struct vmem__arena *a);
void vmem__uvm_arena_free(struct vmem__backend *b, struct vmem__arena *a);
int vmem__uvm_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n);
int vmem__uvm_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad);
int vmem__uvm_unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad);

// The last try: what the module does not release now goes with CUDA's descriptor, when the process ends.
void vmem__uvm_arenas_end(struct vmem__backend *b);

#endif
