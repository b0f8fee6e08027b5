// The addresses of a reservation that a failed call left without what was mapped there, since the driver refused to map
// it again.
//
// SPDX-License-Identifier: MIT
#include "backend/backend.h"

#define GRANULE VMEM_PAGE_64K

void vmem__absent_set(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length, bool absent)
{
    const uint64_t end = addr + length < r->addr + r->length ? addr + length : r->addr + r->length;

    if (!absent && !r->n_absent)
        return;
    for (uint64_t at = addr; at < end; at += GRANULE) {
        const uint64_t i = (at - r->addr) / GRANULE, bit = UINT64_C(1) << i % 64;
        const uint64_t old =
            absent ? atomic_fetch_or(&r->absent[i / 64], bit) : atomic_fetch_and(&r->absent[i / 64], ~bit);

        if (!(old & bit) == absent) {
            r->n_absent += absent ? 1 : UINT64_MAX;
            b->n_absent += absent ? 1 : UINT64_MAX;
        }
    }
}

void vmem__absent_end_runs(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    for (size_t i = 0; i < n; i++)
        vmem__absent_set(b, runs[i].reservation, runs[i].addr, runs[i].length, false);
}

uint64_t vmem__absent_next(const struct vmem__reservation *r, uint64_t addr, uint64_t end, uint64_t *length)
{
    *length = 0;
    while (addr < end) {
        const uint64_t i = (addr - r->addr) / GRANULE, word = r->absent[i / 64] >> i % 64;

        if (word & 1) {
            *length += GRANULE;
        } else if (*length) {
            break;
        } else if (!word) { // a reservation may have 2^30 granules
            addr += (64 - i % 64) * GRANULE;
            continue;
        }
        addr += GRANULE;
    }
    return *length ? addr - *length : end;
}
