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
    uint64_t segment; // bytes of the handle and of a segment; 0: there is none
};

struct vmem__cuda_reservation {
    uint64_t addr, length; // length: a multiple of the segment
    uint64_t *active;      // a bit for each segment
    pthread_mutex_t lock;  // of what is active; the caller takes it
};

// The handle's memory, zeroed.
int vmem__backdrop_new(struct vmem__cuda *cu, struct vmem__backdrop *backdrop, uint64_t segment);
void vmem__backdrop_free(struct vmem__cuda *cu, struct vmem__backdrop *backdrop);

// At least length bytes at a multiple of 2 MiB; the segments that the first `ahead` bytes touch are active.
int vmem__cuda_reserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, uint64_t length, uint64_t ahead,
                       struct vmem__cuda_reservation *out);
// Also unmaps all active segments.
void vmem__cuda_unreserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop,
                          struct vmem__cuda_reservation *r);
// Makes every segment active that [addr, addr + length) touches; addresses beyond the reservation are left out. After a
// failure some segments may have become active, which does no harm. With the reservation's lock held, or before others
// know it.
int vmem__cuda_activate(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__cuda_reservation *r,
                        uint64_t addr, uint64_t length);

static inline bool vmem__bit(const uint64_t *bits, uint64_t i) { return bits[i / 64] >> i % 64 & 1; }
static inline void vmem__bit_set(uint64_t *bits, uint64_t i, bool value)
{
    bits[i / 64] = (bits[i / 64] & ~(UINT64_C(1) << i % 64)) | (uint64_t)value << i % 64;
}

#endif
