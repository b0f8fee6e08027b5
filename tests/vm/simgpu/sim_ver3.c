// Page-table entries of the "VER3" format, since Hopper: 57 bits, PDE4 at the top. What VER2 said with single bits is a
// number here, the permission control flags (PCF): bits 7:3 of a page's entry, 5:3 of a directory's.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

#define PCF(e) ((e) >> 3 & 0x1f)
#define PCF_SPARSE 1 // of an invalid entry
#define PCF_NO_4K 3  // of an invalid 64K entry: the 4K entries below are ignored
#define PCF_RO BIT(2)
#define PCF_NO_ATOMIC BIT(3)
#define GENERIC_KIND (6ULL << 8)

static u64 page(u64 e, bool vid) { return e & GENMASK_ULL(vid ? 39 : 51, 12); }

static u64 table(u64 e, bool vid) { return e & GENMASK_ULL(51, 12); }

static u64 big_table(u64 e, bool vid) { return e & GENMASK_ULL(51, 8); }

static bool sparse_page(u64 e) { return PCF(e) == PCF_SPARSE; }

// Bit 1 of a directory's PCF is about address translation services
static bool sparse_table(u64 e) { return PCF(e) & PCF_SPARSE; }

static bool hides_small(u64 e) { return PCF(e) == PCF_NO_4K; }

static bool read_only(u64 e) { return PCF(e) & PCF_RO; }

static u64 make_pte(u64 phys, bool ro)
{
    return SIM_ENTRY_VALID | phys | GENERIC_KIND | (ro ? (u64)(PCF_RO | PCF_NO_ATOMIC) << 3 : 0);
}

const struct sim_mmu_format sim_ver3 = {
    .va_bits = 57,
    .top = 4,
    .table = table,
    .big_table = big_table,
    .page = page,
    .sparse_page = sparse_page,
    .sparse_table = sparse_table,
    .hides_small = hides_small,
    .read_only = read_only,
    .make_pte = make_pte,
};
