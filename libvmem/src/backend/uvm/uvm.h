// The uvm backend. One ioctl of the patched nvidia-uvm.ko maps a batch of runs and replaces pages without a gap.
// CUDA reserves the addresses, so that it accepts pointers into them. The module maps the pages there.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_UVM_UVM_H
#define VMEM_UVM_UVM_H

#include <pthread.h>

#include "backend/gpu.h"
#include "driver/kmod.h"

// Each cuMemMap() creates one external range in UVM, and an op must lie within one such range. Longer segments
// therefore mean fewer ops. The backdrop costs one segment of memory. Once the module maps a page into a 2 MiB block of
// the backdrop, the rest of that block reads as zero.
#define UVM_SEGMENT (UINT64_C(64) << 20)

struct uvm {
    struct vmem__gpu gpu; // must be first: vmem__gpu_*() relies on it
    struct vmem__kmod kmod;
    // Freed arenas whose pages the module refused to release. Creating or freeing another arena retries the release.
    // Until it succeeds, they count as overhead.
    pthread_mutex_t lock;
    struct uvm_arena *unreleased;
};

// 2 MiB pages that the module creates in chunks. The pages of one chunk have consecutive handles.
struct uvm_arena {
    struct uvm_arena *next; // in uvm.unreleased
    uint64_t pages;
    uint64_t released;    // the first `released` pages have been released
    uint32_t chunk;       // pages per chunk; the last chunk may have fewer
    pthread_mutex_t lock; // guards the creation of the alias
    bool aliased;
    struct vmem__reservation alias; // a second mapping of the whole arena, for zeroing
    struct vmem__cuda_reservation alias_cuda;
    uint64_t first[]; // handle of each chunk's first page
};

// The backend operations of the same names. A segment must be active in CUDA before the module can map into it.
int vmem__uvm_arena_new(struct vmem__backend *b, struct vmem__arena *a);
void vmem__uvm_arena_free(struct vmem__backend *b, struct vmem__arena *a);
int vmem__uvm_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n);
int vmem__uvm_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad);
int vmem__uvm_unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad);
int vmem__uvm_restore(struct vmem__backend *b, const struct vmem__run *run);

// Tries one last time to release all arenas. Closing CUDA's descriptor, at process exit, releases the rest.
void vmem__uvm_arenas_end(struct vmem__backend *b);

#endif
