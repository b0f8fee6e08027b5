// Live remap: an engine reads a page in a loop while the page is replaced, and never meets an invalid entry. The driver's
// own way unmaps first, and it does (test_sim_loop).
//
// REMAPS sets how often.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

static struct uvm u;

static struct simgpu_loop loop_start(uint64_t va)
{
    struct simgpu_loop l = {.vas = sim_vas(&u, 0), .va = va};

    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_START, &l) == 0);
    return l;
}

static struct simgpu_loop loop_end(struct simgpu_loop l)
{
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_READ, &l) == 0);
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_STOP, &l) == 0);
    return l;
}

static void check_no_gap(struct simgpu_loop l)
{
    CHECK_EQ(l.ended, 0);
    CHECK(l.reads > 0);
    CHECK_EQ(l.invalid, 0);
    CHECK_EQ(l.faulted, 0);
    CHECK_EQ(l.freed, 0);
}

TEST(test_live_replace_never_invalid)
{
    uint64_t n = env_long("REMAPS", 10000), h;
    struct simgpu_loop l;

    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 2, &h), NV_OK);
    for (unsigned i = 0; i < 2; i++) {
        CHECK_EQ(vm_map(&u, BASE, KB(64), h + i, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
        CHECK_EQ(gpu_mark(&u, BASE, KB(64), 100 + i), 0);
    }
    l = loop_start(BASE);
    for (uint64_t i = 0; i < n; i++)
        CHECK_EQ(vm_map(&u, BASE, KB(64), h + i % 2, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
    l = loop_end(l);
    check_no_gap(l);
    CHECK_MSG(l.changes >= n / 2, "the engine saw %llu changes in %llu remaps", (unsigned long long)l.changes,
              (unsigned long long)n);
    vmtest_figure("live_remaps", n, "remaps");
    vmtest_figure("live_reads", l.reads, "reads");
    sim_check(0);
}

// A page and a copy of it in another place: each remap releases the page that lost its place.
TEST(test_live_replace_and_release)
{
    uint64_t n = env_long("REMAPS", 10000) / 10, h, next;
    struct simgpu_loop l;

    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 1, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
    l = loop_start(BASE);
    for (uint64_t i = 0; i < n; i++) {
        CHECK_EQ(vm_create(&u, KB(64), 1, &next), NV_OK);
        CHECK_EQ(vm_map(&u, BASE, KB(64), next, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
        CHECK_EQ(vm_release_one(&u, h), NV_OK);
        h = next;
    }
    check_no_gap(loop_end(l));
    sim_check(0);
}

// Whole 2 MiB pages are replaced without a gap too. (Cutting one is documented to have a gap.)
TEST(test_live_replace_huge_never_invalid)
{
    uint64_t n = env_long("REMAPS", 10000) / 20, h;
    struct simgpu_loop l;

    vm_start(&u, MB(4));
    if (!(vm_query(&u, 0).out_caps & UVM_VMEM_CAP_HUGE))
        vmtest_skip("the module announces no UVM_VMEM_CAP_HUGE");
    CHECK_EQ(vm_create(&u, MB(2), 2, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, MB(2), h, 0, 0), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE).page_size, MB(2));
    l = loop_start(BASE + KB(64) * 9);
    for (uint64_t i = 1; i <= n; i++)
        CHECK_EQ(vm_map(&u, BASE, MB(2), h + i % 2, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
    check_no_gap(loop_end(l));
    CHECK_EQ(sim_pte(&u, BASE).page_size, MB(2));
    sim_check(0);
}

// A backdrop that somebody else mapped becomes ours under a reader, who reads `at` bytes behind its start. The block
// that is taken is the second.
static struct simgpu_loop takeover(uint32_t page_size, uint64_t at)
{
    uint64_t h, base = BASE + GB(4);
    struct simgpu_loop l;
    struct uvm_vmem_op op;

    CHECK_EQ(vm_create(&u, KB(64), 1, &h), NV_OK);
    CHECK_EQ(uvm_create_external(&u, base, MB(8)), NV_OK);
    CHECK_EQ(uvm_map_external(&u, 0, base, MB(8), 0, page_size == MB(2) ? 91 : 92), NV_OK);
    CHECK_EQ(sim_pte(&u, base + MB(2)).page_size, page_size);
    l = loop_start(base + at);
    op = vm_op(base + MB(2), KB(64), h, 0, UVM_VMEM_TAKEOVER);
    CHECK_EQ(vm_map_ops(&u, 0, &op, 1, NULL), NV_OK);
    l = loop_end(l);
    CHECK_EQ(uvm_free_range(&u, base, MB(8)), NV_OK);
    CHECK_EQ(vm_release_one(&u, h), NV_OK);
    return l;
}

static void takeover_start(void)
{
    vm_start(&u, MB(4));
    sim_mem(&u, 0, 91, MB(2), MB(8));
    sim_mem(&u, 0, 92, KB(64), MB(8));
}

// A takeover of 64 KiB entries is a replacement like any other, and the neighbours of a 2 MiB entry are left alone. The
// 2 MiB entry itself goes before the table comes: a reader of that block meets an invalid entry, and no TLB has entries of
// both sizes.
TEST(test_live_takeover)
{
    takeover_start();
    for (unsigned block = 0; block < 4; block++) {
        check_no_gap(takeover(KB(64), block * BLOCK + KB(128)));
        if (block != 1)
            check_no_gap(takeover(MB(2), block * BLOCK + KB(128)));
    }
    CHECK(takeover(MB(2), BLOCK + KB(128)).invalid > 0);
    sim_check(0);
}

// A tensor that grows over a backdrop of 2 MiB entries while a kernel reads whole tiles, past its last page: from one
// block into the next, the reader meets no gap. The first block is entered before it starts.
TEST(test_live_growth_over_a_backdrop)
{
    const uint32_t flags = UVM_VMEM_TAKEOVER | UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD;
    uint64_t h, base = BASE + GB(4);
    struct simgpu_loop l[2];

    takeover_start();
    CHECK_EQ(vm_create(&u, KB(256), 32, &h), NV_OK);
    CHECK_EQ(uvm_create_external(&u, base, MB(8)), NV_OK);
    CHECK_EQ(uvm_map_external(&u, 0, base, MB(8), 0, 91), NV_OK);
    CHECK_EQ(vm_map(&u, base, KB(256), h, 0, flags), NV_OK);
    CHECK_EQ(sim_pte(&u, base + BLOCK).state, SIMGPU_PTE_SPARSE);
    CHECK_EQ(sim_pte(&u, base + 2 * BLOCK).page_size, MB(2));
    for (unsigned i = 1; i < 32; i++) {
        // what is behind the last page, and the last page
        l[0] = loop_start(base + i * KB(256) + KB(64));
        l[1] = loop_start(base + (i - 1) * KB(256));
        CHECK_EQ(vm_map(&u, base + i * KB(256), KB(256), h + i, 0, flags), NV_OK);
        check_no_gap(loop_end(l[0]));
        check_no_gap(loop_end(l[1]));
    }
    CHECK_EQ(uvm_free_range(&u, base, MB(8)), NV_OK);
    sim_check(0);
}
