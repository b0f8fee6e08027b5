// The ends of pages, ranges, the GPU's registration and the file. Nobody reads what another left behind.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <signal.h>

static bool all_zero(const struct uvm *u, uint64_t va, uint64_t length)
{
    static uint64_t buf[KB(64) / 8];

    for (uint64_t at = va; at < va + length; at += sizeof(buf)) {
        CHECK_EQ(gpu_access(u, 0, false, at, buf, sizeof(buf)), 0);
        for (unsigned i = 0; i < COUNT(buf); i++)
            if (buf[i])
                return false;
    }
    return true;
}

// Fill a page whole with a secret.
static void fill(const struct uvm *u, uint64_t va, uint64_t length)
{
    static uint64_t buf[KB(64) / 8];

    for (unsigned i = 0; i < COUNT(buf); i++)
        buf[i] = 0x5ec4e75ec4e75ec4ull;
    for (uint64_t at = va; at < va + length; at += sizeof(buf))
        CHECK_EQ(gpu_access(u, 0, true, at, buf, sizeof(buf)), 0);
}

TEST(test_released_page_comes_back_zeroed)
{
    static const uint64_t sizes[] = {KB(64), KB(128), KB(256), MB(2)};
    struct uvm u;
    uint64_t h, keep;

    vm_start(&u, MB(8));
    for (unsigned s = 0; s < COUNT(sizes); s++) {
        // another page of the slab keeps it alive, so that the same memory is handed out again
        CHECK_EQ(vm_create(&u, sizes[s], 1, &keep), NV_OK);
        for (int round = 0; round < 3; round++) {
            CHECK_EQ(vm_create(&u, sizes[s], 1, &h), NV_OK);
            CHECK_EQ(vm_map(&u, BASE, sizes[s], h, 0, 0), NV_OK);
            CHECK_MSG(all_zero(&u, BASE, sizes[s]), "a page of 0x%llx is not zero in round %d",
                      (unsigned long long)sizes[s], round);
            fill(&u, BASE, sizes[s]);
            CHECK_EQ(vm_release_one(&u, h), NV_OK);
        }
        CHECK_EQ(vm_release_one(&u, keep), NV_OK);
    }
    sim_check(0);
}

TEST(test_memory_of_a_dead_process_is_not_readable)
{
    uint64_t slabs = 6;
    pid_t pid = fork();
    struct uvm u;
    uint64_t h;

    if (pid == 0) {
        vm_start(&u, MB(16));
        CHECK_EQ(vm_create(&u, MB(2), slabs, &h), NV_OK);
        for (unsigned i = 0; i < slabs; i++) {
            CHECK_EQ(vm_map(&u, BASE + i * MB(2), MB(2), h + i, 0, 0), NV_OK);
            fill(&u, BASE + i * MB(2), MB(2));
        }
        kill(getpid(), SIGKILL);
    }
    CHECK_EQ(wait_child(pid), 128 + SIGKILL);
    vm_start(&u, MB(16));
    for (unsigned i = 0; i < slabs; i++) {
        unsigned n = i % 2 ? 32 : 1;
        CHECK_EQ(vm_create(&u, n > 1 ? KB(64) : MB(2), n, &h), NV_OK);
        for (unsigned k = 0; k < n; k++)
            CHECK_EQ(vm_map(&u, BASE + i * MB(2) + k * GRANULE, n > 1 ? KB(64) : MB(2), h + k, 0, 0), NV_OK);
        CHECK(all_zero(&u, BASE + i * MB(2), MB(2)));
    }
    sim_check(0);
}

// A write that is still under way must land before the memory is given to another owner.
TEST(test_late_write_lands_before_the_memory_is_free)
{
    struct uvm u;
    uint64_t h, value = 0x77;

    vm_start(&u, MB(4));
    for (int i = 0; i < 20; i++) {
        struct simgpu_access a = {.vas = sim_vas(&u, 0),
                                  .va = BASE,
                                  .len = 8,
                                  .buf = (uintptr_t)&value,
                                  .flags = SIMGPU_ACCESS_WRITE | SIMGPU_ACCESS_POSTED};
        CHECK_EQ(vm_create(&u, KB(64), 1, &h), NV_OK);
        CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
        CHECK(ioctl(sim_fd(), SIMGPU_ACCESS, &a) == 0);
        CHECK_EQ(a.result, 0);
        if (i % 2)
            CHECK_EQ(vm_unmap(&u, BASE, KB(64)), NV_OK);
        CHECK_EQ(vm_release_one(&u, h), NV_OK);
        sim_check(0);
    }
    CHECK_EQ(sim_counters(0, false).bad_late_writes, 0);
}

TEST(test_unregister_vaspace_keeps_pages)
{
    struct uvm u;
    uint64_t h;

    vm_start(&u, MB(8));
    CHECK_EQ(vm_create(&u, KB(64), 2, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
    CHECK_EQ(gpu_mark(&u, BASE, KB(64), 3), 0);
    CHECK_EQ(uvm_unregister_vaspace(&u, 0), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, KB(128));
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_ERR_INVALID_DEVICE);
    CHECK_EQ(uvm_register_vaspace(&u, 0), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE).state, SIMGPU_PTE_INVALID);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
    CHECK(gpu_marked(&u, BASE, KB(64), 3, NULL));
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, KB(64));
    CHECK_EQ(vm_release_one(&u, h), NV_OK);
    sim_check(0);
}

TEST(test_unregister_gpu_ends_its_handles)
{
    struct uvm u;
    uint64_t h, before;

    vm_start(&u, MB(16));
    for (int round = 0; round < 3; round++) {
        CHECK_EQ(vm_create(&u, KB(64), 40, &h), NV_OK);
        for (unsigned i = 0; i < 40; i++)
            CHECK_EQ(vm_map(&u, BASE + i * KB(192), KB(64), h + i, 0, 0), NV_OK);
        CHECK_EQ(gpu_mark(&u, BASE, KB(64), 1), 0);
        before = sim_counters(0, false).pma_live;
        CHECK_EQ(uvm_unregister_vaspace(&u, 0), NV_OK);
        CHECK_EQ(uvm_unregister(&u, 0), NV_OK);
        CHECK(sim_counters(0, false).pma_live + 2 * 32 <= before);
        CHECK_EQ(vm_release_one(&u, h), NV_ERR_INVALID_OBJECT_HANDLE);
        CHECK_EQ(uvm_register(&u, 0), NV_OK);
        CHECK_EQ(uvm_register_vaspace(&u, 0), NV_OK);
        CHECK_EQ(vm_query(&u, 0).out_bytes_created, 0);
        CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
        CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    }
    sim_check(0);
}

TEST(test_uvm_free_takes_overlays_not_pages)
{
    struct uvm u;
    uint64_t h;

    vm_start(&u, MB(8));
    CHECK_EQ(vm_create(&u, KB(256), 2, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, KB(256), h, 0, 0), NV_OK);
    CHECK_EQ(vm_map(&u, BASE + MB(4), KB(256), h, 0, 0), NV_OK);
    CHECK_EQ(gpu_mark(&u, BASE, KB(256), 4), 0);
    CHECK_EQ(uvm_free_range(&u, BASE, MB(8)), NV_OK);
    CHECK(gpu_access(&u, 0, false, BASE, &(uint64_t){0}, 8) < 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, 2 * KB(256));
    CHECK_EQ(vm_map(&u, BASE, KB(256), h, 0, 0), NV_ERR_INVALID_ADDRESS);
    CHECK_EQ(uvm_create_external(&u, BASE, MB(8)), NV_OK);
    CHECK_EQ(vm_map(&u, BASE + MB(2), KB(256), h, 0, 0), NV_OK);
    CHECK(gpu_marked(&u, BASE + MB(2), KB(256), 4, NULL));
    CHECK_EQ(vm_release_one(&u, h), NV_OK);
    CHECK_EQ(vm_release_one(&u, h + 1), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    sim_check(0);
}

// RM wants memory back: pages of ours are pinned, and stay.
TEST(test_pma_eviction_leaves_pages_alone)
{
    struct uvm u;
    uint64_t h, phys;

    vm_start(&u, MB(16));
    CHECK_EQ(vm_create(&u, MB(2), 4, &h), NV_OK);
    for (unsigned i = 0; i < 4; i++) {
        CHECK_EQ(vm_map(&u, BASE + i * MB(2), MB(2), h + i, 0, 0), NV_OK);
        CHECK_EQ(gpu_mark(&u, BASE + i * MB(2), MB(2), i + 1), 0);
    }
    phys = sim_pte(&u, BASE).phys & ~(MB(2) - 1);
    for (int range = 0; range < 2; range++) {
        struct simgpu_evict e = {.range = range, .phys = phys, .len = MB(2), .page_size = MB(2), .count = 1};
        CHECK(ioctl(sim_fd(), SIMGPU_EVICT, &e) == 0); // may be refused, must not take ours
        for (unsigned i = 0; i < 4; i++)
            CHECK(gpu_marked(&u, BASE + i * MB(2), MB(2), i + 1, NULL));
    }
    sim_check(0);
}

// Managed memory is evicted to make room for pages, and comes back with its data. MANAGED_KB: of it, or half of the GPU's.
TEST(test_pages_push_managed_memory_out)
{
    struct uvm u;
    uint64_t fb = sim_info(0).fb_size, room = KB(env_long("MANAGED_KB", fb / KB(2))), rest = (fb - room) / MB(2);
    uint64_t h, *p, n, bad = 0;
    UVM_MIGRATE_PARAMS m = {.length = room, .cpuNumaNode = -1};

    vm_start(&u, MB(4));
    p = mmap((void *)0x110000000000ul, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, u.fd, 0x110000000000ul);
    CHECK(p != MAP_FAILED);
    for (uint64_t i = 0; i < room / 8; i += 64)
        p[i] = i * 7 + 1;
    m.base = (uintptr_t)p;
    m.destinationUuid = u.uuid[0];
    CHECK(ioctl(u.fd, UVM_MIGRATE, &m) == 0);
    CHECK_EQ(m.rmStatus, NV_OK);
    // more than what is free now
    for (n = 0; n < rest + 4; n++)
        if (vm_create(&u, MB(2), 1, &h) != NV_OK)
            break;
    CHECK_MSG(n >= rest, "only %llu slabs of %llu", (unsigned long long)n, (unsigned long long)rest);
    for (uint64_t i = 0; i < room / 8; i += 64)
        bad += p[i] != i * 7 + 1;
    CHECK_EQ(bad, 0);
    sim_check(0);
}

// For the module-unload step: holds pages and mappings until it is killed.
TEST(hold_everything)
{
    struct uvm u;
    uint64_t h;

    if (!env_long("HOLD", 0))
        vmtest_skip("only run by the unload step");
    vm_start(&u, MB(8));
    CHECK_EQ(vm_create(&u, KB(64), 50, &h), NV_OK);
    for (unsigned i = 0; i < 50; i++)
        CHECK_EQ(vm_map(&u, BASE + i * GRANULE, KB(64), h + i, 0, 0), NV_OK);
    printf("holding\n");
    fflush(stdout);
    for (;;)
        pause();
}
