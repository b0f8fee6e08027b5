// Calls at the same time: ours with each other, with UVM's own, and with accesses of the GPU.
//
// SECONDS_EACH sets how long; every answer has to be one that some order of the calls explains.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum { BLOCKS = 8 };

static struct uvm u;
static atomic_bool stop;
static atomic_ulong calls[8];

static bool among(NV_STATUS status, const NV_STATUS *ok, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (status == ok[i])
            return true;
    return false;
}
#define EXPECT(call, ...)                                                   \
    do {                                                                    \
        NV_STATUS s_ = (call);                                              \
        static const NV_STATUS among_[] = {__VA_ARGS__};                    \
        CHECK_MSG(among(s_, among_, COUNT(among_)), "%s: 0x%x", #call, s_); \
    } while (0)

// Maps, replaces, unmaps and releases pages of its own.
static void *mapper(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 77 + 1, h, handles[12];
    struct uvm_vmem_op ops[12];

    while (!stop) {
        uint64_t size = KB(64) << rng_below(&rng, 3);
        NV_STATUS s = vm_create(&u, size, 12, &h);
        if (s == NV_ERR_NO_MEMORY)
            continue;
        CHECK_EQ(s, NV_OK);
        for (unsigned i = 0; i < 12; i++) {
            ops[i] = vm_op(BASE + rng_below(&rng, BLOCKS) * BLOCK + rng_below(&rng, 8) * KB(256), size, h + i, 0,
                           UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_AHEAD | UVM_VMEM_TAKEOVER);
            handles[i] = h + i;
        }
        // the ranges come and go
        EXPECT(vm_map_ops(&u, 0, ops, 12, NULL), NV_OK, NV_ERR_INVALID_ADDRESS);
        for (unsigned i = 0; i < 12; i++)
            ops[i] = vm_op(BASE + rng_below(&rng, BLOCKS) * BLOCK, BLOCK, 0, 0, 0);
        EXPECT(vm_unmap_ops(&u, 0, ops, 1 + rng_below(&rng, 12), NULL), NV_OK, NV_ERR_INVALID_ADDRESS);
        CHECK_EQ(vm_release(&u, handles, 12, NULL), NV_OK);
        calls[0] += 4;
    }
    return NULL;
}

static void *uvm_freer(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 31 + 5;

    while (!stop) {
        uint64_t va = BASE + rng_below(&rng, BLOCKS) * BLOCK;
        EXPECT(uvm_free_range(&u, va, BLOCK), NV_OK, NV_ERR_INVALID_ADDRESS);
        EXPECT(uvm_create_external(&u, va, BLOCK), NV_OK, NV_ERR_UVM_ADDRESS_IN_USE);
        calls[1] += 2;
        usleep(rng_below(&rng, 2000));
    }
    return NULL;
}

static void *unmapper(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 13 + 9;

    while (!stop) {
        EXPECT(uvm_unmap_external(&u, 0, BASE + rng_below(&rng, BLOCKS) * BLOCK, BLOCK), NV_OK, NV_ERR_INVALID_ADDRESS);
        calls[2]++;
        usleep(rng_below(&rng, 500));
    }
    return NULL;
}

static void *asker(void *arg)
{
    (void)arg;
    while (!stop) {
        struct uvm_vmem_query q = vm_query(&u, 0);
        CHECK(q.out_bytes_held >= q.out_bytes_created);
        calls[3]++;
        usleep(100);
    }
    return NULL;
}

// The GPU reads all the while; free memory holds poison, which it must never see.
static void *reader(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 3 + 2;

    while (!stop) {
        uint64_t value = 0;
        gpu_access(&u, 0, false, BASE + rng_below(&rng, BLOCKS * 32) * GRANULE, &value, 8);
        CHECK_MSG(value != 0xd5d5d5d5d5d5d5d5ull, "the GPU read memory that is free");
        calls[4]++;
    }
    return NULL;
}

static void run(void *(*const who[])(void *), unsigned n)
{
    pthread_t threads[8];

    uvm_start(&u);
    for (unsigned i = 0; i < BLOCKS; i++)
        EXPECT(uvm_create_external(&u, BASE + i * BLOCK, BLOCK), NV_OK, NV_ERR_UVM_ADDRESS_IN_USE);
    for (unsigned i = 0; i < n; i++)
        CHECK(pthread_create(&threads[i], NULL, who[i], (void *)(uintptr_t)(i + 1)) == 0);
    usleep(env_long("SECONDS_EACH", 2) * 1000000);
    while (!calls[0])
        usleep(1000);
    stop = true;
    for (unsigned i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    sim_check(0);
}

TEST(test_concurrent_maps_and_releases)
{
    void *(*const who[])(void *) = {mapper, mapper, mapper, reader};

    run(who, COUNT(who));
}

TEST(test_concurrent_with_uvm_free_and_unmap_external)
{
    void *(*const who[])(void *) = {mapper, mapper, uvm_freer, unmapper, asker, reader};

    run(who, COUNT(who));
}

// The same handles from two threads: each release happens once.
static atomic_ulong released;
static uint64_t shared_first;

static void *releaser(void *arg)
{
    (void)arg;
    for (unsigned i = 0; i < 64; i++) {
        NV_STATUS s = vm_release_one(&u, shared_first + i);
        CHECK(s == NV_OK || s == NV_ERR_INVALID_OBJECT_HANDLE);
        released += s == NV_OK;
    }
    return NULL;
}

TEST(test_concurrent_release_of_one_handle)
{
    pthread_t t[3];

    vm_start(&u, BLOCK * 4);
    for (int round = 0; round < 5; round++) {
        released = 0;
        CHECK_EQ(vm_create(&u, KB(64), 64, &shared_first), NV_OK);
        for (unsigned i = 0; i < 64; i++)
            CHECK_EQ(vm_map(&u, BASE + i * GRANULE, KB(64), shared_first + i, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
        for (unsigned i = 0; i < COUNT(t); i++)
            pthread_create(&t[i], NULL, releaser, NULL);
        for (unsigned i = 0; i < COUNT(t); i++)
            pthread_join(t[i], NULL);
        CHECK_EQ(released, 64);
        CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    }
    sim_check(0);
}

// GPU registration goes and comes while others call.
static void *registrar(void *arg)
{
    (void)arg;
    while (!stop) {
        EXPECT(uvm_unregister_vaspace(&u, 0), NV_OK, NV_ERR_INVALID_DEVICE);
        EXPECT(uvm_unregister(&u, 0), NV_OK, NV_ERR_INVALID_DEVICE);
        EXPECT(uvm_register(&u, 0), NV_OK);
        EXPECT(uvm_register_vaspace(&u, 0), NV_OK);
        calls[5]++;
        usleep(20000);
    }
    return NULL;
}

static void *tolerant_mapper(void *arg)
{
    uint64_t rng = (uintptr_t)arg, h = 0;

    while (!stop) {
        EXPECT(vm_create(&u, KB(64), 4, &h), NV_OK, NV_ERR_INVALID_DEVICE, NV_ERR_NO_MEMORY);
        for (unsigned i = 0; i < 4; i++)
            EXPECT(vm_map(&u, BASE + rng_below(&rng, BLOCKS * 32) * GRANULE, KB(64), h + i, 0, UVM_VMEM_MAP_REPLACE),
                   NV_OK, NV_ERR_INVALID_DEVICE, NV_ERR_INVALID_OBJECT_HANDLE);
        EXPECT(vm_unmap(&u, BASE, BLOCKS * BLOCK), NV_OK, NV_ERR_INVALID_DEVICE);
        for (unsigned i = 0; i < 4; i++)
            EXPECT(vm_release_one(&u, h + i), NV_OK, NV_ERR_INVALID_OBJECT_HANDLE);
        calls[0]++;
    }
    return NULL;
}

TEST(test_concurrent_with_gpu_unregister)
{
    pthread_t t[3];

    vm_start(&u, BLOCKS * BLOCK);
    pthread_create(&t[0], NULL, registrar, NULL);
    pthread_create(&t[1], NULL, tolerant_mapper, (void *)1);
    pthread_create(&t[2], NULL, tolerant_mapper, (void *)2);
    usleep(env_long("SECONDS_EACH", 2) * 1000000);
    while (calls[5] < 2 || calls[0] < 2) // a slow machine needs longer; CASE_TIMEOUT ends it
        usleep(1000);
    stop = true;
    for (unsigned i = 0; i < COUNT(t); i++)
        pthread_join(t[i], NULL);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, 0);
    sim_check(0);
}

// Several files on one GPU, none sees another's data.
TEST(test_concurrent_processes)
{
    pid_t pids[3];

    for (unsigned p = 0; p < COUNT(pids); p++) {
        pids[p] = fork();
        if (pids[p] == 0) {
            uint64_t rng = p + 1, h, end = seconds() + env_long("SECONDS_EACH", 2);
            vm_start(&u, BLOCK * 4);
            while (seconds() < end) {
                CHECK_EQ(vm_create(&u, KB(64), 8, &h), NV_OK);
                for (unsigned i = 0; i < 8; i++) {
                    uint64_t va = BASE + i * KB(256) + rng_below(&rng, 4) * GRANULE;
                    CHECK_EQ(vm_map(&u, va, KB(64), h + i, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
                    CHECK_EQ(gpu_word(&u, va), 0);
                    CHECK_EQ(gpu_mark(&u, va, KB(64), p * 100 + i + 1), 0);
                    CHECK(gpu_marked(&u, va, KB(64), p * 100 + i + 1, NULL));
                }
                for (unsigned i = 0; i < 8; i++)
                    CHECK_EQ(vm_release_one(&u, h + i), NV_OK);
            }
            _exit(0);
        }
    }
    for (unsigned p = 0; p < COUNT(pids); p++)
        CHECK_EQ(wait_child(pids[p]), 0);
    sim_check(0);
}
