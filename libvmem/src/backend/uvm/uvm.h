// The uvm backend: a batch of runs is one ioctl of the patched nvidia-uvm.ko, and pages are replaced without a gap.
// CUDA reserves the addresses, so that it knows them; the module puts pages into them.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_UVM_UVM_H
#define VMEM_UVM_UVM_H

#include <pthread.h>

#include "driver/reserve.h"
#include "driver/kmod.h"

// One cuMemMap() of CUDA's is one external range of UVM's, and an op must lie inside one: longer segments mean fewer
// ops. The backdrop costs one segment of memory. Once the module puts a page into 2 MiB of it, the rest of these reads
// as zero.
#define UVM_SEGMENT (UINT64_C(64) << 20)

struct uvm {
    struct vmem__cuda cuda; // first: vmem__cuda_op_*()
    struct vmem__kmod kmod;
    struct vmem__backdrop backdrop;
    struct vmem__backend *backend; // NULL: there is none to ask for an interrupt
    _Atomic uint64_t *overhead;    // of the context; set before the first arena
    // Arenas that were freed, but whose pages the module would not release. They are tried again when another arena is
    // made or freed, and count as overhead until then.
    pthread_mutex_t lock;
    struct uvm_arena *unreleased;
};

struct uvm_reservation {
    struct vmem__cuda_reservation cuda;
    pthread_mutex_t lock; // of the segments' activation
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
    struct uvm_reservation alias_reservation;
    uint64_t first[]; // handle of each chunk's first page
};

int uvm_reservation_new(struct uvm *u, uint64_t length, struct uvm_reservation *reservation);
void uvm_reservation_free(struct uvm *u, struct uvm_reservation *reservation);
// CUDA must know a segment before the module can map in it: activates what [addr, addr + length) touches.
int uvm_activate(struct uvm *u, struct uvm_reservation *reservation, uint64_t addr, uint64_t length);

int uvm_arena_new(struct uvm *u, struct vmem__arena *a);
void uvm_arena_free(struct uvm *u, struct vmem__arena *a);
// The last try: what the module does not release now goes with CUDA's descriptor, when the process ends.
void uvm_arenas_end(struct uvm *u);
int uvm_zero(struct uvm *u, const struct vmem__run *runs, size_t n);

// Backend operations of the same names.
int uvm_map(struct uvm *u, const struct vmem__run *runs, size_t n, size_t *bad);
int uvm_unmap(struct uvm *u, const struct vmem__run *runs, size_t n, size_t *bad);

#endif
