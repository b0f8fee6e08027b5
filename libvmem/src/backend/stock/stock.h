// The stock backend: 64 KiB pages on an unmodified NVIDIA driver. CUDA reserves the addresses and considers the
// backdrop mapped there. RM allocates the physical memory. UVM maps slices of that memory over the backdrop.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_STOCK_H
#define VMEM_STOCK_STOCK_H

#include "backend/gpu.h"
#include "driver/uvm.h"

// A run is split wherever one cuMemMap() ends, so longer segments mean fewer calls. The backdrop costs one segment of
// memory.
#define STOCK_SEGMENT (UINT64_C(64) << 20)
// A block is the range that one large (2 MiB) page-table entry covers. Entries change size in whole blocks.
#define STOCK_BLOCK VMEM_PAGE_2M
// Size of the scratch memory: zeroed memory that is mapped with 2 MiB entries to unmap whole blocks, up to this much in
// a call. The backdrop cannot serve here: CUDA owns its handle, which cannot be mapped again.
#define STOCK_SCRATCH (UINT64_C(32) << 20)

struct stock {
    struct vmem__gpu gpu; // must be first: vmem__gpu_*() relies on it
    struct vmem__backend *backend;
    struct vmem__rm rm;
    struct vmem__uvm_space uvm;
    uint32_t scratch;            // RM handle, or 0 if not allocated yet
    bool fresh_is_zero;          // memory from RM needs no zeroing
    pthread_mutex_t alias_lock;  // taken before the lock of a reservation
    struct stock_shared *shared; // reservations for aliases of small arenas (alias.c)
};

struct stock_reservation {
    // Its lock is held during the driver calls for a run: while one call changes the entry size of a block, no other
    // call may touch that block. The driver serializes the maps of one process anyway.
    struct vmem__cuda_reservation cuda;
    struct vmem__reservation *core; // the core's view; NULL for an alias's
    // True if unbacked addresses of active segments are readable. If not, a segment is emptied as soon as it is
    // activated. CUDA then considers the backdrop mapped there, but accesses fault. Maps and unmaps next to other pages
    // are a quarter cheaper, because there is no backdrop to replace.
    bool backdrop;
    // One bit per block. Set: the block has 64 KiB entries or none, and each can be replaced alone. Clear: the block
    // has one 2 MiB entry, of the backdrop or of an arena, which can be replaced only as a whole.
    uint64_t *fine;
};

// A second mapping of a whole arena, for zeroing and moving.
struct stock_alias {
    uint64_t addr; // 0: not mapped yet
    struct stock_reservation *reservation;
    struct stock_shared *shared; // where it is a place in a shared reservation
};

struct stock_arena {
    uint32_t memory; // RM handle
    struct stock_alias alias;
    struct stock_reservation own; // of the alias, where it has one
};

// ---- pages.c

int vmem__stock_reservation_new(struct stock *s, uint64_t length, bool backdrop, struct stock_reservation *reservation);
void vmem__stock_reservation_free(struct stock *s, struct stock_reservation *reservation);

// Activates the segments that [addr, addr + length) touches. The caller holds the reservation's lock or has not
// published the reservation yet.
int vmem__stock_activate(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length);

// The memory that backs a range of addresses: a slice of an arena's memory, or nothing if `memory` is 0.
struct stock_slice {
    uint32_t memory;
    uint64_t offset;
};

// Replaces `before`, which backs all of [addr, addr + length), by `now`. With keep_fine, every 64 KiB can still be
// replaced alone. On failure, the old mapping is restored; what the driver refuses is absent.
int vmem__stock_put(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice now, struct stock_slice before, bool keep_fine);
// Maps what backed the range before, at what is absent there. undo_all: all of it is, because it was changed.
int vmem__stock_put_back(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                         struct stock_slice before, bool undo_all);

// ---- alias.c

// Maps the aliases of the arenas of n runs that have none yet. A map takes as long as the allocation of the
// memory and the map at its own place together, and most memory is never zeroed or moved.
int vmem__stock_aliases_map(struct stock *s, const struct vmem__run *runs, size_t n);
void vmem__stock_alias_free(struct stock *s, uint64_t size, struct stock_arena *arena);
// Every arena is gone, or this is a fork's child, which leaves the reservations to its parent.
void vmem__stock_aliases_end(struct stock *s, bool forked);

#endif
