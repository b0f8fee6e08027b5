// The stock backend: 64 KiB pages on an unmodified NVIDIA driver. CUDA reserves the addresses and believes the backdrop
// mapped there; physical memory comes from RM; UVM puts slices of it over the backdrop.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_STOCK_H
#define VMEM_STOCK_STOCK_H

#include "backend/gpu.h"
#include "driver/uvm.h"

// Runs are cut where one cuMemMap() of CUDA's ends, so longer segments mean fewer calls; the backdrop costs one segment
// of memory.
#define STOCK_SEGMENT (UINT64_C(64) << 20)
// What one page-table entry of the larger size covers; entries change size in whole blocks.
#define STOCK_BLOCK VMEM_PAGE_2M
// Zeroed memory of ours for taking whole blocks away by 2 MiB entries, this much in a call. The handle of the
// backdrop is CUDA's and cannot be mapped again.
#define STOCK_SCRATCH (UINT64_C(32) << 20)

struct stock {
    struct vmem__gpu gpu; // first: vmem__gpu_*()
    struct vmem__backend *backend;
    struct vmem__rm rm;
    struct vmem__uvm_space uvm;
    uint32_t scratch; // RM's handle; 0: none yet
};

struct stock_reservation {
    // Its lock is held over the driver calls for a run: a call that changes the entries' size of a block must not meet
    // another call for the same block. Maps of one process wait for each other in the driver anyway.
    struct vmem__cuda_reservation cuda;
    // Whether unbacked addresses of active segments are readable. If not, an active segment is emptied at once: CUDA
    // believes the backdrop mapped there, but accesses fault, and maps and unmaps beside other pages are a quarter
    // cheaper for having nothing to replace.
    bool backdrop;
    // A bit for each block. Set: 64 KiB entries or none, each replaceable alone. Clear: a 2 MiB entry, either of the
    // backdrop or of one block of an arena, replaceable only as a whole.
    uint64_t *fine;
};

struct stock_arena {
    uint32_t memory;                // RM's handle
    struct stock_reservation alias; // all of it mapped once, for zeroing
};

int vmem__stock_reservation_new(struct stock *s, uint64_t length, bool backdrop, struct stock_reservation *reservation);
void vmem__stock_reservation_free(struct stock *s, struct stock_reservation *reservation);

// Makes the segments active that [addr, addr + length) touches; with the reservation's lock held, or before others know
// the reservation.
int vmem__stock_activate(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length);

// What stands behind addresses: a slice of an arena's memory; memory 0: nothing.
struct stock_slice {
    uint32_t memory;
    uint64_t offset;
};

// Puts now behind [addr, addr + length) in place of before, which stands behind all of it. keep_fine: every 64 KiB
// stays replaceable alone. On failure the addresses are as they were, unless the driver refuses even that: then they
// are invalid.
int vmem__stock_put(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice now, struct stock_slice before, bool keep_fine);

// Takes away whatever the driver has behind [addr, addr + length), whole blocks inside one segment.
int vmem__stock_empty(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length);

#endif
