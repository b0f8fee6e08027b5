// Page-table entries of the "VER2" format, Pascal to Ada: 49 bits, PDE3 at the top.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

#define VOL BIT_ULL(3)  // of an invalid entry: sparse
#define PRIV BIT_ULL(5) // of an invalid 64K entry: the 4K entries below are ignored
#define RO BIT_ULL(6)
#define NO_ATOMIC BIT_ULL(7)
#define GENERIC_KIND (6ULL << 56)

// Addresses in video memory end before the number of a peer
static u64 page(u64 e, bool vid) { return (e >> 8 & (vid ? 0x1ffffffULL : 0x3fffffffffffULL)) << 12; }

static u64 table(u64 e, bool vid) { return page(e, vid); }

static u64 big_table(u64 e, bool vid) { return (e >> 4 & (vid ? 0x1fffffffULL : 0x3ffffffffffffULL)) << 8; }

static bool sparse(u64 e) { return e & VOL; }

static bool hides_small(u64 e) { return e & PRIV; }

static bool read_only(u64 e) { return e & RO; }

static u64 make_pte(u64 phys, bool ro)
{
    return SIM_ENTRY_VALID | phys >> 12 << 8 | GENERIC_KIND | (ro ? RO | NO_ATOMIC : 0);
}

const struct sim_mmu_format sim_ver2 = {
    .va_bits = 49,
    .top = 3,
    .table = table,
    .big_table = big_table,
    .page = page,
    .sparse_page = sparse,
    .sparse_table = sparse,
    .hides_small = hides_small,
    .read_only = read_only,
    .make_pte = make_pte,
};
