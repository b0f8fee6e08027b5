// UVM's own built-in tests, one case each. The module has to be loaded with uvm_enable_builtin_tests=1. Those of range trees,
// page tables of fake GPUs, kernel threads and physical chunks by the thousand are left out: they take minutes in a checked
// kernel, and meet nothing that vMem adds.
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
NO_GPU(uvm_lock_sanity, LOCK_SANITY, 0)
NO_GPU(uvm_perf_utils_sanity, PERF_UTILS_SANITY, 0)
NO_GPU(uvm_kvmalloc, KVMALLOC, 0)
NO_GPU(uvm_perf_events_sanity, PERF_EVENTS_SANITY, 0)
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
