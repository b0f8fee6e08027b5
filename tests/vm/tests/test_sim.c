// Does the simulator see what it is there to see? Runs on the unmodified nvidia-uvm.ko.
//
// Each case shows first that correct work looks correct, then, with a fault of the simulated hardware or of RM switched
// on, that the same work is seen to go wrong.
//
// SPDX-License-Identifier: MIT
#include "vmtest.h"

#define BASE 0x130000000000ul
#define MEMORY 0x77
#define POISON (SIMGPU_POISON * 0x0101010101010101ull)

static struct uvm u;
static uint64_t phys; // of MEMORY

// A range of `length`, and memory of GPU 0 for it, of which nothing is mapped.
static void start(uint64_t length, uint32_t page_size)
{
    uvm_start(&u);
    CHECK_EQ(uvm_create_external(&u, BASE, length), NV_OK);
    phys = sim_mem(&u, 0, MEMORY, page_size, length);
    sim_counters(0, true);
}

static NV_STATUS map(uint64_t va, uint64_t length, uint64_t offset)
{
    return uvm_map_external(&u, 0, va, length, offset, MEMORY);
}

static NV_STATUS unmap(uint64_t va, uint64_t length) { return uvm_unmap_external(&u, 0, va, length); }

static void free_memory(void) { sim_mem(&u, 0, MEMORY, 0, 0); }

static uint64_t get(uint64_t va)
{
    uint64_t value = 0;

    return gpu_access(&u, 0, false, va, &value, 8) ? UINT64_MAX : value;
}

static int put(uint64_t va, uint64_t value) { return gpu_access(&u, 0, true, va, &value, 8); }

static uint64_t peek(uint64_t at)
{
    uint64_t value = 0;

    sim_phys(0, at, &value, 8);
    return value;
}

static bool bad(void)
{
    struct simgpu_counters c = sim_counters(0, false);

    return c.bad_tlb_at_free || c.bad_pde_at_free || c.bad_late_writes || c.bad_use_after_free || c.bad_double_free;
}

static uint64_t dirty(void)
{
    struct simgpu_poison p = {.gpu = 0};

    CHECK(ioctl(sim_fd(), SIMGPU_POISON_CHK, &p) == 0);
    return p.dirty_granules;
}

TEST(test_sim_map)
{
    struct simgpu_counters c;
    struct simgpu_pte pte;

    start(MB(2), KB(64));
    CHECK(get(BASE) == UINT64_MAX);
    CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
    CHECK_EQ(get(BASE), POISON);
    pte = sim_pte(&u, BASE);
    CHECK(pte.state == SIMGPU_PTE_VALID && pte.page_size == KB(64) && pte.phys == phys && pte.aperture == 0);
    CHECK_EQ(sim_pte(&u, BASE + KB(64)).state, SIMGPU_PTE_INVALID);
    CHECK(put(BASE, 11) == 0 && peek(phys) == 11);
    CHECK_EQ(map(BASE, KB(64), KB(64)), NV_OK); // over the first
    CHECK(get(BASE) == POISON && put(BASE, 22) == 0 && get(BASE) == 22 && peek(phys) == 11);
    CHECK_EQ(unmap(BASE, KB(64)), NV_OK);
    CHECK(get(BASE) == UINT64_MAX && put(BASE, 1) == -EFAULT);
    CHECK_EQ(uvm_free_range(&u, BASE, MB(2)), NV_OK);
    free_memory();
    c = sim_counters(0, false);
    CHECK(c.posted == 0 && c.pushes && c.inval_all + c.inval_targeted && c.rm_dup_memory == 2);
    CHECK(!bad() && dirty() == 0);
}

// A driver whose invalidates get lost
TEST(test_sim_missing_invalidate)
{
    start(MB(2), KB(64));
    CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
    sim_mode(0, SIMGPU_MODE_BREAK_INVALIDATE, 0);
    CHECK_EQ(put(BASE, 77), 0);
    CHECK_EQ(unmap(BASE, KB(64)), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE).state, SIMGPU_PTE_INVALID);
    CHECK_EQ(get(BASE), 77); // stale
    free_memory();
    CHECK_EQ(sim_counters(0, false).bad_tlb_at_free, 1);
    CHECK_EQ(get(BASE), POISON);
    CHECK_EQ(sim_counters(0, false).bad_use_after_free, 1);
    sim_mode(0, 0, SIMGPU_MODE_BREAK_INVALIDATE); // drops the TLBs too
    CHECK(get(BASE) == UINT64_MAX);
    sim_counters(0, true);
}

// A write in flight while its page is unmapped and freed
TEST(test_sim_membar)
{
    for (unsigned broken = 0; broken < 2; broken++) {
        uint64_t value = 99;
        struct simgpu_access a = {.va = BASE, .len = 8, .buf = (uintptr_t)&value, .flags = SIMGPU_ACCESS_POSTED};

        start(MB(2), KB(64));
        a.vas = sim_vas(&u, 0);
        CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
        CHECK(ioctl(sim_fd(), SIMGPU_ACCESS, &a) == 0 && a.result == 0);
        CHECK(peek(phys) == POISON && sim_counters(0, false).posted == 1);
        if (broken)
            sim_mode(0, SIMGPU_MODE_BREAK_MEMBAR, 0);
        CHECK_EQ(unmap(BASE, KB(64)), NV_OK);
        CHECK_EQ(peek(phys), broken ? POISON : 99);
        free_memory();
        CHECK_EQ(sim_counters(0, false).bad_late_writes, broken);
        CHECK_EQ(dirty(), broken);
        sim_mode(0, 0, SIMGPU_MODE_BREAK_MEMBAR);
        uvm_close(&u);
    }
    // Taking the page and giving it back poisons it again
    start(MB(2), KB(64));
    free_memory();
    CHECK_EQ(dirty(), 0);
}

// The stock driver's map over a mapping passes through an invalid entry; a map of an empty place does not make one
TEST(test_sim_loop)
{
    struct simgpu_loop l = {.va = BASE};

    start(MB(2), KB(64));
    l.vas = sim_vas(&u, 0);
    CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
    CHECK_EQ(put(BASE, 1), 0);
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_START, &l) == 0);
    CHECK_EQ(map(BASE + KB(64), KB(64), KB(64)), NV_OK); // beside it
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_READ, &l) == 0);
    CHECK(l.reads > 1 && l.invalid == 0 && l.faulted == 0 && l.last == 1 && l.last_phys == phys);
    for (unsigned i = 0; i < 50; i++)
        CHECK_EQ(map(BASE, KB(64), (i + 1) % 2 * KB(64)), NV_OK);
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_STOP, &l) == 0);
    CHECK(l.invalid >= 50 && l.faulted > 0 && l.freed == 0);
    free_memory();
}

// Managed memory that RM takes back: the pages move to the host and keep their contents
TEST(test_sim_evict)
{
    struct simgpu_evict e = {.page_size = MB(2), .count = 2};
    UVM_MIGRATE_PARAMS m = {.base = 0x110000000000ul, .length = MB(8), .cpuNumaNode = -1};
    uint64_t live, *p;

    uvm_start(&u);
    p = mmap((void *)0x110000000000ul, MB(8), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, u.fd, 0x110000000000ul);
    CHECK(p != MAP_FAILED);
    for (unsigned i = 0; i < 4; i++)
        p[i * MB(2) / 8] = 1000 + i;
    m.destinationUuid = u.uuid[0];
    CHECK(ioctl(u.fd, UVM_MIGRATE, &m) == 0);
    CHECK_EQ(m.rmStatus, NV_OK);
    live = sim_counters(0, false).pma_live;
    CHECK(ioctl(sim_fd(), SIMGPU_EVICT, &e) == 0 && e.status == 0);
    CHECK_EQ(sim_counters(0, false).pma_live + MB(4) / KB(64), live);
    for (unsigned i = 0; i < 4; i++)
        CHECK_EQ(p[i * MB(2) / 8], 1000 + i);
}
