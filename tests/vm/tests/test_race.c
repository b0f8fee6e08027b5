// Calls at the same time: ours with each other, with UVM's own, of which some fail, and with accesses of the GPU.
//
// SECONDS_EACH sets how long; every answer has to be one that some order of the calls explains.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <pthread.h>
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

#define AT(block) (BASE + (block) * BLOCK)
#define MEMORY 0x77 // RM's handle of 6 MiB

// Maps, replaces, unmaps and releases pages of its own, whatever lies there. The ranges come and go.
static void *mapper(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 77 + 1, h, handles[12];
    struct uvm_vmem_op ops[12];

    while (!stop) {
        uint64_t size = rng_below(&rng, 4) ? KB(64) << rng_below(&rng, 3) : MB(2);
        unsigned count = size == MB(2) ? 2 : 12;
        NV_STATUS s = vm_create(&u, size, count, &h);
        if (s == NV_ERR_NO_MEMORY)
            continue;
        CHECK_EQ(s, NV_OK);
        for (unsigned i = 0; i < count; i++) {
            ops[i] = vm_op(AT(rng_below(&rng, BLOCKS)) + rng_below(&rng, MB(2) / size) * size, size, h + i, 0,
                           UVM_VMEM_MAP_REPLACE | UVM_VMEM_TAKEOVER |
                               (rng_next(&rng) & (UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD)));
            handles[i] = h + i;
        }
        EXPECT(s = vm_map_ops(&u, 0, ops, count, NULL), NV_OK, NV_ERR_INVALID_ADDRESS, NV_ERR_NO_MEMORY);
        calls[0] += s == NV_OK;
        for (unsigned i = 0; i < count; i++)
            ops[i] = vm_op(AT(rng_below(&rng, BLOCKS)), BLOCK, 0, 0, 0);
        EXPECT(vm_unmap_ops(&u, 0, ops, 1 + rng_below(&rng, count), NULL), NV_OK, NV_ERR_INVALID_ADDRESS);
        CHECK_EQ(vm_release(&u, handles, count, NULL), NV_OK);
    }
    return NULL;
}

// Ranges of two blocks
static void *uvm_freer(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 31 + 5;

    while (!stop) {
        uint64_t va = AT(rng_below(&rng, BLOCKS / 2) * 2);
        EXPECT(uvm_free_range(&u, va, 2 * BLOCK), NV_OK);
        EXPECT(uvm_create_external(&u, va, 2 * BLOCK), NV_OK);
        calls[1]++;
        usleep(rng_below(&rng, 2000));
    }
    return NULL;
}

// UVM's own calls, most of them well formed. A part of an overlay is refused, and so is a range that is gone.
static void *stock(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 13 + 9;

    while (!stop) {
        uint64_t part = rng_below(&rng, 4) ? 0 : rng_below(&rng, 32) * KB(64), va = AT(rng_below(&rng, BLOCKS)) + part;
        NV_STATUS s;

        switch (rng_below(&rng, 3)) {
        case 0: s = uvm_unmap_external(&u, 0, va, BLOCK - part); break;
        case 1: s = uvm_map_sparse(&u, 0, va, BLOCK - part); break;
        default: s = uvm_map_external(&u, 0, va, BLOCK - part, MB(2) + part, MEMORY); break;
        }
        EXPECT(s, NV_OK, NV_ERR_INVALID_ADDRESS, NV_ERR_NO_MEMORY);
        calls[2] += s == NV_OK;
        usleep(rng_below(&rng, 1000));
    }
    return NULL;
}

// UVM's own calls that fail: a handle that RM does not know, memory that the kernel does not give
static void *failing(void *arg)
{
    uint64_t rng = (uintptr_t)arg * 31 + 5;

    while (!stop) {
        bool known = failmem_there() && rng_below(&rng, 2);
        NV_STATUS s;

        if (known)
            failmem_arm(1 + rng_below(&rng, 8));
        s = uvm_map_external(&u, 0, AT(rng_below(&rng, BLOCKS)) + rng_below(&rng, 2) * MB(1), MB(1), 0,
                             known ? MEMORY : 0xdead);
        if (known)
            failmem_arm(0);
        EXPECT(s, NV_OK, NV_ERR_INVALID_ADDRESS, NV_ERR_NO_MEMORY, NV_ERR_OBJECT_NOT_FOUND);
        CHECK(known || s != NV_OK);
        calls[3] += s != NV_OK;
        usleep(rng_below(&rng, 1000));
    }
    return NULL;
}

static void *asker(void *arg)
{
    (void)arg;
    while (!stop) {
        struct uvm_vmem_query q = vm_query(&u, 0);
        CHECK(q.out_bytes_held >= q.out_bytes_created);
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
    }
    return NULL;
}

TEST(test_concurrent_calls)
{
    void *(*const who[])(void *) = {mapper, mapper, mapper, uvm_freer, stock, failing, asker, reader};
    pthread_t threads[COUNT(who)];

    uvm_start(&u);
    for (unsigned i = 0; i < BLOCKS; i += 2)
        CHECK_EQ(uvm_create_external(&u, AT(i), 2 * BLOCK), NV_OK);
    sim_mem(&u, 0, MEMORY, MB(2), MB(6));
    for (unsigned i = 0; i < 3; i++) { // RM's memory comes with what was in it
        CHECK_EQ(uvm_map_external(&u, 0, BASE, BLOCK, i * BLOCK, MEMORY), NV_OK);
        CHECK_EQ(gpu_mark(&u, BASE, BLOCK, 1), 0);
    }
    for (unsigned i = 0; i < COUNT(who); i++)
        CHECK(pthread_create(&threads[i], NULL, who[i], (void *)(uintptr_t)(i + 1)) == 0);
    usleep(env_long("SECONDS_EACH", 2) * 1000000);
    while (calls[0] < 100 || calls[1] < 20 || calls[2] < 20 || calls[3] < 100) // CASE_TIMEOUT ends it
        usleep(1000);
    stop = true;
    for (unsigned i = 0; i < COUNT(who); i++)
        pthread_join(threads[i], NULL);
    printf("%lu MAPs, %lu ranges freed, %lu calls of UVM's own, and %lu that failed\n", calls[0], calls[1], calls[2],
           calls[3]);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    uvm_close(&u);
    sim_mem(&u, 0, MEMORY, 0, 0);
    sim_check(0);
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
