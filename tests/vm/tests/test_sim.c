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

static uint64_t get(unsigned gpu, uint64_t va)
{
    uint64_t value = 0;

    return gpu_access(&u, gpu, false, va, &value, 8) ? UINT64_MAX : value;
}

static int put(uint64_t va, uint64_t value) { return gpu_access(&u, 0, true, va, &value, 8); }

static uint64_t peek(unsigned gpu, uint64_t at)
{
    uint64_t value = 0;

    sim_phys(gpu, false, at, &value, 8);
    return value;
}

static struct simgpu_tlb tlb(uint64_t va, int unit)
{
    struct simgpu_tlb t = {.vas = sim_vas(&u, 0), .va = va, .unit = unit};

    CHECK(ioctl(sim_fd(), SIMGPU_TLB, &t) == 0);
    return t;
}

static bool bad(unsigned gpu)
{
    struct simgpu_counters c = sim_counters(gpu, false);

    return c.bad_tlb_at_free || c.bad_pde_at_free || c.bad_late_writes || c.bad_use_after_free || c.bad_double_free;
}

static uint64_t dirty(unsigned gpu)
{
    struct simgpu_poison p = {.gpu = gpu};

    CHECK(ioctl(sim_fd(), SIMGPU_POISON_CHK, &p) == 0);
    return p.dirty_granules;
}

TEST(test_sim_map)
{
    struct simgpu_counters c;
    struct simgpu_pte pte;

    start(MB(2), KB(64));
    CHECK(get(0, BASE) == UINT64_MAX);
    CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
    CHECK_EQ(get(0, BASE), POISON);
    pte = sim_pte(&u, BASE);
    CHECK(pte.state == SIMGPU_PTE_VALID && pte.page_size == KB(64) && pte.phys == phys && pte.aperture == 0);
    CHECK_EQ(sim_pte(&u, BASE + KB(64)).state, SIMGPU_PTE_INVALID);
    CHECK(put(BASE, 11) == 0 && peek(0, phys) == 11);
    CHECK(tlb(BASE, SIMGPU_UNIT_GPC).cached && tlb(BASE, SIMGPU_UNIT_GPC).pte.phys == phys);
    CHECK(!tlb(BASE, SIMGPU_UNIT_HUB).cached);
    CHECK_EQ(map(BASE, KB(64), KB(64)), NV_OK); // over the first
    CHECK(get(0, BASE) == POISON && put(BASE, 22) == 0 && get(0, BASE) == 22 && peek(0, phys) == 11);
    CHECK_EQ(unmap(BASE, KB(64)), NV_OK);
    CHECK(get(0, BASE) == UINT64_MAX && put(BASE, 1) == -EFAULT);
    CHECK_EQ(uvm_free_range(&u, BASE, MB(2)), NV_OK);
    free_memory();
    c = sim_counters(0, false);
    CHECK(c.posted == 0 && c.pushes && c.inval_all + c.inval_targeted && c.rm_dup_memory == 2);
    CHECK(!bad(0) && dirty(0) == 0);
}

// One invalidate of a size covers many pages, and no more than these
TEST(test_sim_range)
{
    struct simgpu_counters c;
    uint64_t value;

    start(MB(16), MB(2));
    for (unsigned i = 0; i < 2; i++)
        CHECK_EQ(map(BASE + i * MB(8), MB(8), i * MB(8)), NV_OK);
    for (unsigned i = 0; i < 8; i++)
        CHECK_EQ(gpu_access_ce(&u, 0, false, BASE + i * MB(2), &value, 8), 0);
    sim_counters(0, true);
    CHECK_EQ(unmap(BASE, MB(8)), NV_OK);
    c = sim_counters(0, false);
    CHECK(c.inval_targeted == 1 && c.inval_all <= 1);
    for (unsigned i = 0; i < 8; i++) {
        struct simgpu_tlb t = tlb(BASE + i * MB(2), SIMGPU_UNIT_HUB);

        CHECK((t.cached && t.pte.state == SIMGPU_PTE_VALID) == (i >= 4));
    }
    CHECK_EQ(uvm_free_range(&u, BASE, MB(16)), NV_OK);
    free_memory();
    CHECK(!bad(0));
}

TEST(test_sim_sparse)
{
    start(MB(2), KB(64));
    CHECK_EQ(uvm_map_sparse(&u, 0, BASE, MB(2)), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE).state, SIMGPU_PTE_SPARSE);
    CHECK(get(0, BASE + 8) == 0 && put(BASE + 8, 5) == 0 && get(0, BASE + 8) == 0);
    CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
    CHECK_EQ(get(0, BASE + 8), POISON);
    free_memory();
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
    CHECK_EQ(get(0, BASE), 77); // stale
    free_memory();
    CHECK_EQ(sim_counters(0, false).bad_tlb_at_free, 1);
    CHECK_EQ(get(0, BASE), POISON);
    CHECK_EQ(sim_counters(0, false).bad_use_after_free, 1);
    sim_mode(0, 0, SIMGPU_MODE_BREAK_INVALIDATE); // drops the TLBs too
    CHECK(get(0, BASE) == UINT64_MAX);
    sim_counters(0, true);
}

// A write in flight while its page is unmapped and freed
TEST(test_sim_membar)
{
    for (unsigned broken = 0; broken < 2; broken++) {
        uint64_t value = 99;
        struct simgpu_access a = {.va = BASE,
                                  .len = 8,
                                  .buf = (uintptr_t)&value,
                                  .flags = SIMGPU_ACCESS_NOFAULT | SIMGPU_ACCESS_POSTED};

        start(MB(2), KB(64));
        a.vas = sim_vas(&u, 0);
        CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
        CHECK(ioctl(sim_fd(), SIMGPU_ACCESS, &a) == 0 && a.result == 0);
        CHECK(peek(0, phys) == POISON && sim_counters(0, false).posted == 1);
        if (broken)
            sim_mode(0, SIMGPU_MODE_BREAK_MEMBAR, 0);
        CHECK_EQ(unmap(BASE, KB(64)), NV_OK);
        CHECK_EQ(peek(0, phys), broken ? POISON : 99);
        free_memory();
        CHECK_EQ(sim_counters(0, false).bad_late_writes, broken);
        CHECK_EQ(dirty(0), broken);
        sim_mode(0, 0, SIMGPU_MODE_BREAK_MEMBAR);
        uvm_close(&u);
    }
    // Taking the page and giving it back poisons it again
    start(MB(2), KB(64));
    free_memory();
    CHECK_EQ(dirty(0), 0);
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

TEST(test_sim_inject)
{
    NV_STATUS status = NV_ERR_NO_MEMORY;
    unsigned n;

    start(MB(2), KB(64));
    for (n = 1; status != NV_OK && n < 20; n++) {
        uint64_t objects = sim_counters(0, false).rm_objects;
        struct simgpu_inject was;

        sim_inject(SIMGPU_SITE_RM | SIMGPU_SITE_PMA, n, true, NULL);
        status = map(BASE, KB(64), 0);
        sim_inject(0, 0, true, &was);
        CHECK(status == NV_OK ? was.fired == 0 : was.fired == 1 && status == NV_ERR_NO_MEMORY);
        CHECK(status == NV_OK || sim_counters(0, false).rm_objects == objects);
    }
    CHECK(status == NV_OK && n > 2);
    CHECK_EQ(get(0, BASE), POISON);
    free_memory();
}

// Managed memory that RM takes back: the pages move to the host and keep their contents
TEST(test_sim_evict)
{
    struct simgpu_evict e = {.page_size = MB(2), .count = 2};
    uint64_t live, *p, buf[512];

    uvm_start(&u);
    CHECK_EQ(uvm_register_channel(&u, 0, 3), NV_OK);
    p = mmap((void *)0x110000000000ul, MB(8), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, u.fd, 0x110000000000ul);
    CHECK(p != MAP_FAILED);
    for (unsigned i = 0; i < 4; i++) {
        struct simgpu_access a = {.vas = sim_vas(&u, 0),
                                  .va = (uintptr_t)p + i * MB(2),
                                  .len = sizeof(buf),
                                  .buf = (uintptr_t)buf,
                                  .batch = 8};

        p[i * MB(2) / 8] = 1000 + i;
        CHECK(ioctl(sim_fd(), SIMGPU_ACCESS, &a) == 0 && a.result == 0 && buf[0] == 1000 + i);
        CHECK(a.faults > 0 && a.replays > 0);
    }
    live = sim_counters(0, false).pma_live;
    CHECK(ioctl(sim_fd(), SIMGPU_EVICT, &e) == 0 && e.status == 0);
    CHECK_EQ(sim_counters(0, false).pma_live + MB(4) / KB(64), live);
    for (unsigned i = 0; i < 4; i++)
        CHECK_EQ(p[i * MB(2) / 8], 1000 + i);
}

TEST(test_sim_peers)
{
    UVM_ENABLE_PEER_ACCESS_PARAMS p = {0};
    struct simgpu_pte pte;
    uint64_t at;

    start(MB(2), KB(64));
    if (u.gpus < 2)
        vmtest_skip("the simulator was loaded with one GPU");
    CHECK_EQ(uvm_register(&u, 1), NV_OK);
    CHECK_EQ(uvm_register_vaspace(&u, 1), NV_OK);
    p.gpuUuidA = u.uuid[0];
    p.gpuUuidB = u.uuid[1];
    CHECK(ioctl(u.fd, UVM_ENABLE_PEER_ACCESS, &p) == 0);
    CHECK_EQ(p.rmStatus, NV_OK);
    free_memory();
    at = sim_mem(&u, 1, MEMORY, KB(64), KB(64));
    CHECK_EQ(map(BASE, KB(64), 0), NV_OK);
    pte = sim_pte(&u, BASE);
    CHECK(pte.state == SIMGPU_PTE_VALID && pte.aperture == 1 && pte.peer == 1 && pte.phys == at);
    CHECK(put(BASE, 4242) == 0 && peek(1, at) == 4242);
    CHECK(get(1, BASE) == UINT64_MAX);
    CHECK_EQ(unmap(BASE, KB(64)), NV_OK);
    CHECK(get(0, BASE) == UINT64_MAX);
    sim_mem(&u, 1, MEMORY, 0, 0);
    CHECK_EQ(uvm_free_range(&u, BASE, MB(2)), NV_OK);
    CHECK(!bad(0) && !bad(1) && dirty(1) == 0);
}

TEST(test_sim_unregister)
{
    struct simgpu_loop l = {.va = BASE};
    struct simgpu_counters c;

    start(MB(2), MB(2));
    l.vas = sim_vas(&u, 0);
    CHECK_EQ(map(BASE, MB(2), 0), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE).page_size, MB(2));
    CHECK_EQ(put(BASE, 3), 0);
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_START, &l) == 0);
    free_memory(); // UVM's duplicate keeps the memory
    CHECK_EQ(get(0, BASE), 3);
    CHECK_EQ(uvm_unregister(&u, 0), NV_OK);
    CHECK(ioctl(sim_fd(), SIMGPU_LOOP_STOP, &l) == 0 && l.ended && l.freed == 0);
    c = sim_counters(0, false);
    CHECK(!bad(0) && c.pma_live == 0 && c.vaspaces == 0 && dirty(0) == 0);
}
