// Memory of others next to the addresses of a call: no flag and no call reaches beyond what its elements name, and
// MAP_AHEAD no further than the mapping or the hole that its element ends in.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#define AT(block) (BASE + (block) * BLOCK)
#define MEMORY 0x77
#define WORD 0x1122334455667788ull
#define AHEAD (UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD)

static struct uvm u;
static uint64_t h;

// A range of `blocks` of the caller's, between guards. The handles are of 64 KiB pages.
static void start(unsigned blocks)
{
    vm_start(&u, blocks * BLOCK);
    CHECK_EQ(vm_create(&u, KB(64), 8, &h), NV_OK);
}

static void end(void)
{
    sim_check(0);
    uvm_close(&u);
}

static void foreign(uint64_t va, uint64_t length, uint32_t page_size, uint32_t memory)
{
    sim_mem(&u, 0, memory, page_size, length);
    CHECK_EQ(uvm_map_external(&u, 0, va, length, 0, memory), NV_OK);
    sim_mem(&u, 0, memory, 0, 0);
    CHECK_EQ(gpu_mark(&u, va, length, WORD), 0);
}

// A neighbour that has mapped nothing yet finds its range empty: an overlay there would make its first mapping of a part
// of the block fail.
TEST(test_an_empty_neighbour_stays_empty)
{
    for (unsigned takeover = 0; takeover < 2; takeover++) {
        start(8);
        CHECK_EQ(uvm_create_external(&u, AT(16), BLOCK), NV_OK);
        CHECK_EQ(uvm_create_external(&u, AT(17), 4 * BLOCK), NV_OK);
        CHECK_EQ(vm_map(&u, AT(17) - KB(64), KB(64), h, 0, AHEAD | (takeover ? UVM_VMEM_TAKEOVER : 0)), NV_OK);
        foreign(AT(17), MB(1), KB(64), MEMORY);
        CHECK(gpu_marked(&u, AT(17), MB(1), WORD, NULL));
        end();
    }
}

// A sparse range of a neighbour reads as zero before and after, but it is the neighbour's to map a part of.
TEST(test_a_sparse_neighbour_stays_its_owners)
{
    start(1);
    CHECK_EQ(uvm_create_external(&u, AT(16), BLOCK), NV_OK);
    CHECK_EQ(uvm_create_external(&u, AT(17), 4 * BLOCK), NV_OK);
    CHECK_EQ(uvm_map_sparse(&u, 0, AT(17), 4 * BLOCK), NV_OK);
    CHECK_EQ(vm_map(&u, AT(17) - KB(64), KB(64), h, 0, AHEAD | UVM_VMEM_TAKEOVER), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, KB(64));
    foreign(AT(17), KB(128), KB(64), MEMORY);
    CHECK(gpu_marked(&u, AT(17), KB(128), WORD, NULL));
    end();
}

// Other memory in the same range is not taken, nor is memory that took the place of the mapping that was.
TEST(test_ahead_stays_with_its_memory)
{
    for (unsigned size = 0; size < 2; size++) {
        start(8);
        foreign(BASE, 2 * BLOCK, size ? MB(2) : KB(64), MEMORY);
        foreign(AT(2), 2 * BLOCK, size ? MB(2) : KB(64), MEMORY);
        CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, AHEAD | UVM_VMEM_TAKEOVER), NV_OK);
        CHECK_EQ(sim_pte(&u, AT(1)).state, SIMGPU_PTE_SPARSE);
        CHECK_EQ(vm_map(&u, AT(1), KB(64), h + 1, 0, AHEAD | UVM_VMEM_TAKEOVER), NV_OK);
        CHECK(gpu_marked(&u, AT(2), 2 * BLOCK, WORD, NULL));

        // AT(2) to AT(4) is one mapping: take its first block, and let its owner map other memory in the second
        CHECK_EQ(vm_map(&u, AT(2) + KB(64), KB(64), h + 2, 0, UVM_VMEM_MAP_64K | UVM_VMEM_TAKEOVER), NV_OK);
        CHECK_EQ(vm_unmap(&u, AT(2) + KB(64), KB(64)), NV_OK);
        CHECK_EQ(uvm_unmap_external(&u, 0, AT(3), BLOCK), NV_OK);
        foreign(AT(3), BLOCK, size ? MB(2) : KB(64), MEMORY);
        CHECK_EQ(vm_map(&u, AT(3) - KB(64), KB(64), h + 3, 0, AHEAD | UVM_VMEM_TAKEOVER), NV_OK);
        CHECK(gpu_marked(&u, AT(3), BLOCK, WORD, NULL));
        end();
    }
}
