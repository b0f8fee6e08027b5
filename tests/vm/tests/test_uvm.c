// UVM's own built-in tests, one case each, and managed memory driven from outside: the same set must pass on the stock
// and on the patched module. The module has to be loaded with uvm_enable_builtin_tests=1.
//
// SPDX-License-Identifier: MIT
#include "vmtest.h"

#include "uvm_test_ioctl.h"

static struct uvm u;

// Test calls that the driver says this GPU has nothing for are skipped by that answer's name.
static void verdict(const char *what, int rc, NV_STATUS status)
{
    CHECK_MSG(rc == 0, "%s: %s", what, strerror(errno));
    if (status == NV_ERR_NOT_SUPPORTED)
        vmtest_skip("%s answers NV_ERR_NOT_SUPPORTED", what);
    CHECK_MSG(status == NV_OK, "%s: status 0x%x", what, status);
}

#define CALL(test, ...)                               \
    do {                                              \
        UVM_TEST_##test##_PARAMS p_ = {__VA_ARGS__};  \
        int rc_;                                      \
        p_.rmStatus = 0xdead;                         \
        rc_ = ioctl(u.fd, UVM_TEST_##test, &p_);      \
        verdict("UVM_TEST_" #test, rc_, p_.rmStatus); \
    } while (0)

#define NO_GPU(name, test, ...)  \
    TEST(name)                   \
    {                            \
        uvm_open(&u);            \
        CALL(test, __VA_ARGS__); \
    }
#define WITH_GPU(name, test, ...)             \
    TEST(name)                                \
    {                                         \
        uvm_open(&u);                         \
        CHECK_EQ(uvm_register(&u, 0), NV_OK); \
        CALL(test, __VA_ARGS__);              \
    }
#define WITH_VASPACE(name, test, ...) \
    TEST(name)                        \
    {                                 \
        uvm_start(&u);                \
        CALL(test, __VA_ARGS__);      \
    }

NO_GPU(uvm_rng_sanity, RNG_SANITY, 0)
NO_GPU(uvm_range_tree_directed, RANGE_TREE_DIRECTED, 0)
NO_GPU(uvm_range_tree_random, RANGE_TREE_RANDOM, .seed = 1, .main_iterations = 400, .high_probability = 60,
       .add_remove_shrink_group_probability = 50, .shrink_probability = 25, .collision_checks = 10,
       .iterator_checks = 10, .max_end = ~0ull, .max_ranges = 1000, .max_batch_count = 100, .max_attempts = 100)
NO_GPU(uvm_page_tree, PAGE_TREE, 0)
NO_GPU(uvm_lock_sanity, LOCK_SANITY, 0)
NO_GPU(uvm_perf_utils_sanity, PERF_UTILS_SANITY, 0)
NO_GPU(uvm_kvmalloc, KVMALLOC, 0)
NO_GPU(uvm_perf_events_sanity, PERF_EVENTS_SANITY, 0)
NO_GPU(uvm_range_allocator_sanity, RANGE_ALLOCATOR_SANITY, .seed = 1, .iters = 1000)
NO_GPU(uvm_nv_kthread_q, NV_KTHREAD_Q, 0)
NO_GPU(uvm_thread_context_sanity, THREAD_CONTEXT_SANITY, .iterations = 30)
NO_GPU(uvm_thread_context_perf, THREAD_CONTEXT_PERF, .iterations = 10)
NO_GPU(uvm_rb_tree_directed, RB_TREE_DIRECTED, 0)
NO_GPU(uvm_rb_tree_random, RB_TREE_RANDOM, .iterations = 2000, .range_max = 1 << 20, .node_limit = 1000, .seed = 1)
NO_GPU(uvm_cpu_chunk_api, CPU_CHUNK_API, 0)
NO_GPU(uvm_va_space_mm_or_current_retain, VA_SPACE_MM_OR_CURRENT_RETAIN, .sleep_us = 100)
NO_GPU(uvm_get_user_space_end_address, GET_USER_SPACE_END_ADDRESS, 0)
NO_GPU(uvm_cpu_chunk_alloc_sizes, GET_CPU_CHUNK_ALLOC_SIZES, 0)
NO_GPU(uvm_pageable_mem_access_type, GET_PAGEABLE_MEM_ACCESS_TYPE, 0)

TEST(uvm_range_group_tree)
{
    UVM_TEST_RANGE_GROUP_TREE_PARAMS p = {.rmStatus = 0xdead};
    int rc;

    uvm_open(&u);
    for (int i = 0; i < 4; i++) {
        UVM_CREATE_RANGE_GROUP_PARAMS c = {0};
        CHECK(ioctl(u.fd, UVM_CREATE_RANGE_GROUP, &c) == 0);
        p.rangeGroupIds[i] = c.rangeGroupId;
    }
    rc = ioctl(u.fd, UVM_TEST_RANGE_GROUP_TREE, &p);
    verdict("UVM_TEST_RANGE_GROUP_TREE", rc, p.rmStatus);
}

WITH_GPU(uvm_rm_mem_sanity, RM_MEM_SANITY, 0)
WITH_GPU(uvm_gpu_semaphore_sanity, GPU_SEMAPHORE_SANITY, 0)
WITH_GPU(uvm_tracker_sanity, TRACKER_SANITY, 0)
WITH_GPU(uvm_push_sanity, PUSH_SANITY, 0)
WITH_GPU(uvm_channel_sanity, CHANNEL_SANITY, 0)
WITH_GPU(uvm_host_sanity, HOST_SANITY, 0)
WITH_GPU(uvm_ce_sanity, CE_SANITY, 0)
WITH_GPU(uvm_mem_sanity, MEM_SANITY, 0)
WITH_GPU(uvm_get_gpu_time, GET_GPU_TIME, .gpu_uuid = u.uuid[0])
WITH_GPU(uvm_channel_stress_noop, CHANNEL_STRESS, .mode = UVM_TEST_CHANNEL_STRESS_MODE_NOOP_PUSH, .iterations = 1000,
         .num_streams = 4, .seed = 1)
WITH_GPU(uvm_channel_stress_update, CHANNEL_STRESS, .mode = UVM_TEST_CHANNEL_STRESS_MODE_UPDATE_CHANNELS,
         .iterations = 200, .num_streams = 4, .seed = 1)
WITH_GPU(uvm_channel_stress_stream, CHANNEL_STRESS, .mode = UVM_TEST_CHANNEL_STRESS_MODE_STREAM, .iterations = 30,
         .num_streams = 4, .seed = 1)
WITH_GPU(uvm_fault_buffer_flush, FAULT_BUFFER_FLUSH, .iterations = 10)
WITH_GPU(uvm_pma_alloc_free, PMA_ALLOC_FREE, .gpu_uuid = u.uuid[0], .page_size = 0x200000, .contiguous = 0,
         .num_pages = 4, .phys_end = ~0ull)
WITH_GPU(uvm_pmm_alloc_free_root, PMM_ALLOC_FREE_ROOT, .gpu_uuid = u.uuid[0])
WITH_GPU(uvm_pmm_release_free_root_chunks, PMM_RELEASE_FREE_ROOT_CHUNKS, .gpu_uuid = u.uuid[0])
WITH_GPU(uvm_pmm_query_pma_stats, PMM_QUERY_PMA_STATS, .gpu_uuid = u.uuid[0])
WITH_GPU(uvm_pma_get_batch_size, PMA_GET_BATCH_SIZE, .gpu_uuid = u.uuid[0])
WITH_GPU(uvm_numa_check_affinity, NUMA_CHECK_AFFINITY, .gpu_uuid = u.uuid[0])
WITH_GPU(uvm_drain_replayable_faults, DRAIN_REPLAYABLE_FAULTS, .gpu_uuid = u.uuid[0], .timeout_ns = 1000000000)
WITH_GPU(uvm_flush_replay_events, TOOLS_FLUSH_REPLAY_EVENTS, .gpuUuid = u.uuid[0])
WITH_GPU(uvm_access_counters_default, ACCESS_COUNTERS_ENABLED_BY_DEFAULT, .gpu_uuid = u.uuid[0])

WITH_VASPACE(uvm_pmm_check_leak, PMM_CHECK_LEAK, .gpu_uuid = u.uuid[0], .chunk_size = 0x200000, .alloc_limit = 8)
WITH_VASPACE(uvm_pmm_check_leak_64k, PMM_CHECK_LEAK, .gpu_uuid = u.uuid[0], .chunk_size = 0x10000, .alloc_limit = 40)
WITH_VASPACE(uvm_pmm_sanity_basic, PMM_SANITY, .mode = UvmTestPmmSanityModeBasic)
WITH_VASPACE(uvm_pmm_sanity_full, PMM_SANITY, .mode = UvmTestPmmSanityModeFull)
WITH_VASPACE(uvm_pmm_async_alloc, PMM_ASYNC_ALLOC, .gpu_uuid = u.uuid[0], .num_chunks = 16, .num_work_iterations = 2)
WITH_VASPACE(uvm_va_block, VA_BLOCK, 0)
WITH_VASPACE(uvm_invalidate_tlb_all, INVALIDATE_TLB, .gpu_uuid = u.uuid[0], .va = 0x100000000000ull,
             .target_va_mode = UvmTargetVaModeAll, .page_table_level = UvmInvalidatePageTableLevelAll,
             .membar = UvmInvalidateTlbMemBarSys)
WITH_VASPACE(uvm_invalidate_tlb_targeted, INVALIDATE_TLB, .gpu_uuid = u.uuid[0], .va = 0x100000000000ull,
             .target_va_mode = UvmTargetVaModeTargeted, .page_table_level = UvmInvalidatePageTableLevelPte,
             .membar = UvmInvalidateTlbMemBarLocal)

TEST(uvm_get_gpu_ref_count)
{
    UVM_TEST_GET_GPU_REF_COUNT_PARAMS p = {0};
    int rc;

    uvm_open(&u);
    CHECK_EQ(uvm_register(&u, 0), NV_OK);
    p.gpu_uuid = u.uuid[0];
    rc = ioctl(u.fd, UVM_TEST_GET_GPU_REF_COUNT, &p);
    verdict("UVM_TEST_GET_GPU_REF_COUNT", rc, p.rmStatus);
    CHECK_EQ(p.ref_count, 1);
}

// ---- managed memory ---------------------------------------------------------------------------------------

#define MANAGED 0x110000000000ul
#define PAT(i, k) (((i) + (k)) * 0x9e3779b97f4a7c15ul)

static uint64_t *managed(uint64_t va, uint64_t length)
{
    void *p = mmap((void *)va, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, u.fd, va);

    CHECK_MSG(p == (void *)va, "mmap of managed memory: %s", strerror(errno));
    return p;
}

static bool resident_on_gpu(void *p)
{
    UVM_TEST_VA_RESIDENCY_INFO_PARAMS *r = calloc(1, sizeof(*r));
    bool gpu = false;

    r->lookup_address = (uintptr_t)p;
    CHECK(ioctl(u.fd, UVM_TEST_VA_RESIDENCY_INFO, r) == 0);
    CHECK_EQ(r->rmStatus, NV_OK);
    for (unsigned i = 0; i < r->resident_on_count; i++)
        gpu |= !memcmp(&r->resident_on[i], &u.uuid[0], 16);
    free(r);
    return gpu;
}

static int faulting_access(bool write, void *va, uint64_t length, void *buf)
{
    struct simgpu_access a = {.vas = sim_vas(&u, 0),
                              .va = (uintptr_t)va,
                              .len = length,
                              .buf = (uintptr_t)buf,
                              .batch = 32,
                              .flags = write ? SIMGPU_ACCESS_WRITE : 0};

    CHECK(ioctl(sim_fd(), SIMGPU_ACCESS, &a) == 0);
    return a.result;
}

TEST(managed_migrate_and_back)
{
    uint64_t length = managed_size(MB(4)), bad = 0, *p;
    UVM_MIGRATE_PARAMS m = {.length = length, .cpuNumaNode = -1};

    uvm_start(&u);
    p = managed(MANAGED, length);
    for (uint64_t i = 0; i < length / 8; i++)
        p[i] = PAT(i, 0);
    CHECK(!resident_on_gpu(p));
    m.base = (uintptr_t)p;
    m.destinationUuid = u.uuid[0];
    CHECK(ioctl(u.fd, UVM_MIGRATE, &m) == 0);
    CHECK_EQ(m.rmStatus, NV_OK);
    CHECK(resident_on_gpu(p));
    for (uint64_t i = 0; i < length / 8; i++)
        bad += p[i] != PAT(i, 0);
    CHECK_EQ(bad, 0);
    CHECK(!resident_on_gpu(p));
}

TEST(managed_gpu_faults)
{
    uint64_t length = managed_size(MB(2)), bad = 0, *p, *buf = malloc(length);

    uvm_start(&u);
    CHECK_EQ(uvm_register_channel(&u, 0, 3), NV_OK);
    p = managed(MANAGED, length);
    for (uint64_t i = 0; i < length / 8; i++)
        p[i] = PAT(i, 0);
    CHECK_EQ(faulting_access(false, p, length, buf), 0);
    for (uint64_t i = 0; i < length / 8; i++)
        bad += buf[i] != PAT(i, 0);
    CHECK_EQ(bad, 0);
    CHECK(resident_on_gpu((char *)p + length - 4096));
    for (uint64_t i = 0; i < length / 8; i++)
        buf[i] = PAT(i, 7);
    CHECK_EQ(faulting_access(true, p, length, buf), 0);
    for (uint64_t i = 0; i < length / 8; i++)
        bad += p[i] != PAT(i, 7);
    CHECK_EQ(bad, 0);
    CHECK(faulting_access(false, (void *)0x120000000000ul, 4096, buf) != 0); // nothing there: cancelled
}

static void external_aliases(uint32_t page_size)
{
    uint64_t length = MB(4), base = 0x130000000000ull, value = 0x1234, got = 0;

    uvm_start(&u);
    sim_mem(&u, 0, 77, page_size, length);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(uvm_create_external(&u, base + i * MB(64), length), NV_OK);
        CHECK_EQ(uvm_map_external(&u, 0, base + i * MB(64), length, 0, 77), NV_OK);
    }
    for (uint64_t off = 0; off < length; off += KB(64)) {
        value = PAT(off, page_size);
        CHECK_EQ(gpu_access(&u, 0, true, base + off, &value, 8), 0);
        CHECK_EQ(gpu_access(&u, 0, false, base + MB(64) + off, &got, 8), 0);
        CHECK_EQ(got, value);
    }
    CHECK_EQ(uvm_free_range(&u, base, length), NV_OK);
    CHECK(gpu_access(&u, 0, false, base, &got, 8) < 0);
    CHECK_EQ(uvm_free_range(&u, base + MB(64), length), NV_OK);
    sim_check(0);
}

TEST(external_aliases_2m) { external_aliases(MB(2)); }
TEST(external_aliases_64k) { external_aliases(KB(64)); }

// Random accesses by CPU and GPU to managed memory against a shadow.
static void stress(uint64_t seed, uint64_t length, int iterations)
{
    uint8_t *p, *shadow = calloc(1, length), *buf = malloc(KB(64));
    uint64_t pages = length / 4096;

    uvm_start(&u);
    CHECK_EQ(uvm_register_channel(&u, 0, 100), NV_OK);
    p = (uint8_t *)managed(MANAGED + (seed << 36), length);
    for (int it = 0; it < iterations; it++) {
        uint64_t n = 1 + rng_below(&seed, 16), off = rng_below(&seed, pages - n) * 4096, size = n * 4096;

        switch (rng_below(&seed, 4)) {
        case 0:
            memset(p + off, it, size);
            memset(shadow + off, it, size);
            break;
        case 1: CHECK(!memcmp(p + off, shadow + off, size)); break;
        case 2:
            memset(buf, it ^ 0x5a, size);
            memset(shadow + off, it ^ 0x5a, size);
            CHECK_EQ(faulting_access(true, p + off, size, buf), 0);
            break;
        case 3:
            CHECK_EQ(faulting_access(false, p + off, size, buf), 0);
            CHECK(!memcmp(buf, shadow + off, size));
            break;
        }
    }
    CHECK(!memcmp(p, shadow, length));
}

// Each takes half of the GPU's by itself, 32 MiB at most: on a small GPU all of them need more than it has.
TEST(managed_stress_by_three_processes)
{
    uint64_t half = sim_info(0).fb_size / 2, each = managed_size(half < MB(32) ? half : MB(32));
    pid_t pids[3];

    for (unsigned i = 0; i < COUNT(pids); i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            stress(i + 1, each, env_long("STRESS", 200));
            _exit(0);
        }
    }
    for (unsigned i = 0; i < COUNT(pids); i++)
        CHECK_EQ(wait_child(pids[i]), 0);
    sim_check(0);
}
