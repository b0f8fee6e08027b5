// The architectures: what a GPU says of itself, and where they differ in what this simulator models.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

#define K4 (1ULL << 12)
#define K64 (1ULL << 16)
#define M2 (1ULL << 21)
#define M512 (1ULL << 29)
#define G256 (1ULL << 38)

#define SEM_40_BITS 0xff
#define SEM_57_BITS 0x1ffffff

static const struct sim_arch archs[] = {
    {
        .name = "turing",
        .arch = 0x160,
        .implementation = 2,
        .host_class = 0xC46F,
        .ce_class = 0xC5B5,
        .compute_class = 0xC5C0,
        .mmu = &sim_ver2,
        .page_sizes = M2 | K64 | K4,
        .sem_hi_mask = SEM_40_BITS,
        .rm_va_base = 256 << 20,
    },
    {
        .name = "ampere",
        .arch = 0x170,
        .implementation = 0,
        .host_class = 0xC56F,
        .ce_class = 0xC6B5,
        .compute_class = 0xC6C0,
        .mmu = &sim_ver2,
        .page_sizes = M512 | M2 | K64 | K4,
        .sem_hi_mask = SEM_40_BITS,
        .rm_va_base = 256 << 20,
        .link_tlbs = true,
    },
    {
        .name = "ada",
        .arch = 0x190,
        .implementation = 2,
        .host_class = 0xC56F,
        .ce_class = 0xC7B5,
        .compute_class = 0xC9C0,
        .mmu = &sim_ver2,
        .page_sizes = M512 | M2 | K64 | K4,
        .sem_hi_mask = SEM_40_BITS,
        .rm_va_base = 256 << 20,
        .link_tlbs = true,
    },
    {
        .name = "hopper",
        .arch = 0x180,
        .implementation = 0,
        .host_class = 0xC86F,
        .ce_class = 0xC8B5,
        .compute_class = 0xCBC0,
        .mmu = &sim_ver3,
        .page_sizes = M512 | M2 | K64 | K4,
        .sem_hi_mask = SEM_57_BITS,
        .rm_va_base = 5ULL << 40,
        .link_tlbs = true,
        .push_segments = true,
        .ce_scrub = true,
    },
    {
        .name = "blackwell",
        .arch = 0x1A0,
        .implementation = 0,
        .host_class = 0xC96F,
        .ce_class = 0xC9B5,
        .compute_class = 0xCDC0,
        .mmu = &sim_ver3,
        .page_sizes = G256 | M512 | M2 | K64 | K4,
        .sem_hi_mask = SEM_57_BITS,
        .rm_va_base = 5ULL << 40,
        .link_tlbs = true,
        .push_segments = true,
        .ce_scrub = true,
        .ack_is_membar = true,
    },
    {
        .name = "gb20x",
        .arch = 0x1B0,
        .implementation = 2,
        .host_class = 0xCA6F,
        .ce_class = 0xCAB5,
        .compute_class = 0xCEC0,
        .mmu = &sim_ver3,
        .page_sizes = M512 | M2 | K64 | K4,
        .sem_hi_mask = SEM_57_BITS,
        .rm_va_base = 5ULL << 40,
        .link_tlbs = true,
        .push_segments = true,
        .ce_scrub = true,
        .ack_is_membar = true,
    },
};

const struct sim_arch *sim_arch_find(const char *name)
{
    int i;

    for (i = 0; i < ARRAY_SIZE(archs); i++) {
        if (!strcmp(archs[i].name, name))
            return &archs[i];
    }
    return NULL;
}
