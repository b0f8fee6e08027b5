// Arithmetic of slabs and blocks, which needs neither a kernel nor a GPU. The same source is compiled into the module
// and into a test program.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_PURE_H
#define UVM_VMEM_PURE_H

#include "uvm_vmem_ioctl.h"

#ifndef __KERNEL__
#include <stdbool.h>
#endif

#define UVM_VMEM_PAGE_SIZES ((1ULL << 16) | (1ULL << 17) | (1ULL << 18) | (1ULL << 21))

// Granules in a 2 MiB slab and in a block of addresses: one bit each.
#define UVM_VMEM_GRANULES 32u

// Bits [first, first + count); count is 1 to 32.
static inline __u32 uvm_vmem_mask(unsigned int first, unsigned int count)
{
    return (0xFFFFFFFFu >> (UVM_VMEM_GRANULES - count)) << first;
}

// Remove the lowest run of set bits from *mask. False if there is none.
static inline bool uvm_vmem_next_run(__u32 *mask, unsigned int *first, unsigned int *count)
{
    __u32 rest;

    if (!*mask)
        return false;

    *first = (unsigned int)__builtin_ctz(*mask);
    rest = ~(*mask >> *first);
    *count = rest ? (unsigned int)__builtin_ctz(rest) : UVM_VMEM_GRANULES;
    *mask &= ~uvm_vmem_mask(*first, *count);
    return true;
}

// Granules of a page; 0 for an unsupported size.
static inline unsigned int uvm_vmem_page_granules(__u64 page_size)
{
    if (!page_size || (page_size & (page_size - 1)) || !(page_size & UVM_VMEM_PAGE_SIZES))
        return 0;
    return (unsigned int)(page_size / UVM_VMEM_GRANULE);
}

// The first granule of a free, naturally aligned page of `granules` in a slab whose used granules are `used`; -1 if the
// slab is full.
static inline int uvm_vmem_slab_first_free(__u32 used, unsigned int granules)
{
    unsigned int first;

    for (first = 0; first < UVM_VMEM_GRANULES; first += granules) {
        if (!(used & uvm_vmem_mask(first, granules)))
            return (int)first;
    }
    return -1;
}

// The number of free pages of `granules` in a slab.
static inline unsigned int uvm_vmem_slab_num_free(__u32 used, unsigned int granules)
{
    unsigned int first, n = 0;

    for (first = 0; first < UVM_VMEM_GRANULES; first += granules)
        n += !(used & uvm_vmem_mask(first, granules));
    return n;
}

static inline __u64 uvm_vmem_block(__u64 va) { return va & ~(UVM_VMEM_BLOCK - 1); }

static inline __u64 uvm_vmem_block_end(__u64 va) { return va | (UVM_VMEM_BLOCK - 1); }

static inline unsigned int uvm_vmem_index(__u64 va)
{
    return (unsigned int)((va & (UVM_VMEM_BLOCK - 1)) / UVM_VMEM_GRANULE);
}

// The granules that [start, end] covers in its block. Both are in one block, start is aligned, and end is inclusive.
static inline __u32 uvm_vmem_range_mask(__u64 start, __u64 end)
{
    unsigned int first = uvm_vmem_index(start);

    return uvm_vmem_mask(first, uvm_vmem_index(end) - first + 1);
}

// Shrink [*start, *end], which is inclusive, to whole granules. False if none is left.
static inline bool uvm_vmem_whole_granules(__u64 *start, __u64 *end)
{
    if (*start > ~0ULL - (UVM_VMEM_GRANULE - 1))
        return false;

    *start = (*start + UVM_VMEM_GRANULE - 1) & ~(UVM_VMEM_GRANULE - 1);
    if (*end == ~0ULL)
        return true;
    if (*end + 1 < UVM_VMEM_GRANULE)
        return false;

    *end = ((*end + 1) & ~(UVM_VMEM_GRANULE - 1)) - 1;
    return *start < *end;
}

#endif
