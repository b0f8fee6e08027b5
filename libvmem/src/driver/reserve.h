// Addresses that CUDA knows. A reservation is cut into slots of one size; a slot is either unmapped or active: the
// backdrop, one handle shared by all slots, is mapped there as far as CUDA knows, whatever another driver put over it
// since. CUDA accepts pointers into active slots, and reads there give zero until somebody writes through the
// backdrop.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_CUDA_RESERVE_H
#define VMEM_CUDA_RESERVE_H

#include "driver/libcuda.h"

struct vmem__backdrop {
    uint64_t handle;
    uint64_t slot; // bytes of the handle and of a slot; 0: there is none
};

struct vmem__reservation {
    uint64_t addr, length; // length: a multiple of the slot
    uint64_t *active;      // a bit for each slot
};

// The handle's memory, zeroed.
int vmem__backdrop_new(struct vmem__cuda *cu, struct vmem__backdrop *backdrop, uint64_t slot);
void vmem__backdrop_free(struct vmem__cuda *cu, struct vmem__backdrop *backdrop);

// At least length bytes at a multiple of 2 MiB, no slot active.
int vmem__reserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, uint64_t length,
                  struct vmem__reservation *out);
// Also unmaps all active slots.
void vmem__unreserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__reservation *r);
// Makes every slot active that [addr, addr + length) touches; addresses beyond the reservation are left out. After a
// failure some slots may have become active, which does no harm. The caller serialises the calls for one reservation.
int vmem__activate(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__reservation *r,
                   uint64_t addr, uint64_t length);

static inline bool vmem__bit(const uint64_t *bits, uint64_t i) { return bits[i / 64] >> i % 64 & 1; }
static inline void vmem__bit_set(uint64_t *bits, uint64_t i, bool value)
{
    bits[i / 64] = (bits[i / 64] & ~(UINT64_C(1) << i % 64)) | (uint64_t)value << i % 64;
}

#endif
