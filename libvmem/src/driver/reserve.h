// Addresses that CUDA knows. A reservation is cut into segments of one size. A segment is unmapped or active. In an
// active segment CUDA considers the backdrop mapped, even after UVM overlays it; all segments share one handle for it.
// CUDA accepts pointers into active segments. Reads there return zero until something writes through the backdrop.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_CUDA_RESERVE_H
#define VMEM_CUDA_RESERVE_H

#include <pthread.h>

#include "driver/libcuda.h"

struct vmem__backdrop {
    uint64_t handle;
    uint64_t segment; // bytes of the handle and of a segment; 0: no backdrop
};

struct vmem__cuda_reservation {
    uint64_t addr, length; // length: a multiple of the segment
    uint64_t *active;      // a bit for each segment
    pthread_mutex_t lock;  // protects `active`; the caller takes it
};

// Creates the handle, with zeroed memory.
int vmem__backdrop_new(struct vmem__cuda *cu, struct vmem__backdrop *backdrop, uint64_t segment);
void vmem__backdrop_free(struct vmem__cuda *cu, struct vmem__backdrop *backdrop);

// Reserves at least length bytes at a multiple of 2 MiB. The segments of the first `ahead` bytes become active.
int vmem__cuda_reserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, uint64_t length, uint64_t ahead,
                       struct vmem__cuda_reservation *out);
// Unmaps all active segments, too.
void vmem__cuda_unreserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop,
                          struct vmem__cuda_reservation *r);
// Activates every segment that overlaps [addr, addr + length), which may extend beyond the reservation. After a
// failure, some segments may be active, which is harmless. The caller holds the reservation's lock, or is the only one
// that knows the reservation.
int vmem__cuda_activate(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__cuda_reservation *r,
                        uint64_t addr, uint64_t length);

static inline bool vmem__bit(const uint64_t *bits, uint64_t i) { return bits[i / 64] >> i % 64 & 1; }
static inline void vmem__bit_set(uint64_t *bits, uint64_t i, bool value)
{
    bits[i / 64] = (bits[i / 64] & ~(UINT64_C(1) << i % 64)) | (uint64_t)value << i % 64;
}
// Finds the first run of bits with that value in [first, end). Returns its first bit; *n is its length, 0 if there is
// none.
uint64_t vmem__bit_run(const uint64_t *bits, bool value, uint64_t first, uint64_t end, uint64_t *n);

#endif
