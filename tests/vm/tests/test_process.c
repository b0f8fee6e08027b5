// Processes: killed in the middle, with a descriptor of another's, after another's handles, or in a memory cgroup.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>

static uint64_t live(void) { return sim_counters(0, false).pma_live; }

// A process's state ends with its last descriptor. Unless somebody waits for the process, that may be at any time.
// A minute is for a leak, not a measure of speed.
static void wait_for_live(uint64_t most)
{
    for (int i = 0; i < 3000 && live() > most; i++)
        usleep(20000);
    CHECK(live() <= most);
}

// UVM caches memory of its own between processes, so the second run is the baseline.
static uint64_t baseline(void)
{
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            struct uvm u;
            uint64_t h;
            vm_start(&u, MB(4));
            CHECK_EQ(vm_create(&u, KB(64), 1, &h), NV_OK);
            CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
            _exit(0);
        }
        CHECK_EQ(wait_child(pid), 0);
    }
    return live();
}

// Says so on `ready` when the GPU is registered. A process killed while it registers one leaks UVM's record of the GPU:
// alloc_parent_gpu() of the driver does not free it when its thread cannot be created.
static void busy(uint64_t seed, int ready)
{
    struct uvm u;
    uint64_t h, handles[24];
    struct uvm_vmem_op ops[24];

    vm_start(&u, MB(64));
    CHECK(write(ready, "", 1) == 1);
    for (;;) {
        uint64_t size = KB(64) << rng_below(&seed, 3);
        CHECK_EQ(vm_create(&u, size, 24, &h), NV_OK);
        for (unsigned i = 0; i < 24; i++) {
            ops[i] = vm_op(BASE + i * MB(2) + rng_below(&seed, 8) * KB(256), size, h + i, 0, UVM_VMEM_MAP_REPLACE);
            handles[i] = h + i;
        }
        CHECK_EQ(vm_map_ops(&u, 0, ops, 24, NULL), NV_OK);
        CHECK_EQ(vm_unmap(&u, BASE, MB(32)), NV_OK);
        CHECK_EQ(vm_release(&u, handles, 12, NULL), NV_OK);
        CHECK_EQ(vm_release(&u, handles + 12, 12, NULL), NV_OK);
    }
}

TEST(test_killed_in_mid_batch)
{
    uint64_t before = baseline(), seed = env_long("SEED", 1);
    int rounds = env_long("KILLS", 12), ready[2];
    char byte;

    CHECK(pipe(ready) == 0);
    for (int i = 0; i < rounds; i++) {
        pid_t pid = fork();
        if (pid == 0)
            busy(rng_next(&seed) + i, ready[1]);
        CHECK(read(ready[0], &byte, 1) == 1);
        usleep(rng_below(&seed, 150000));
        CHECK(kill(pid, SIGKILL) == 0);
        CHECK_EQ(wait_child(pid), 128 + SIGKILL);
        sim_check(0);
        CHECK_MSG(live() <= before, "kill %d: %llu granules are still allocated, %llu before", i,
                  (unsigned long long)live(), (unsigned long long)before);
    }
}

// The last descriptor ends it, not the process that opened it.
TEST(test_state_ends_with_the_last_descriptor)
{
    uint64_t before = baseline();
    int ready[2], go[2];
    pid_t pid, holder = 0;
    char c;

    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    pid = fork();
    if (pid == 0) {
        struct uvm u;
        uint64_t h;
        vm_start(&u, MB(8));
        CHECK_EQ(vm_create(&u, MB(2), 3, &h), NV_OK);
        CHECK_EQ(vm_map(&u, BASE, MB(2), h, 0, 0), NV_OK);
        holder = fork();
        if (holder == 0) {
            close(u.mm_fd);
            CHECK(read(go[0], &c, 1) == 1);
            CHECK_EQ(vm_query(&u, 0).out_bytes_created, MB(6));
            CHECK_EQ(vm_release_one(&u, h + 2), NV_OK);
            CHECK_EQ(write(ready[1], "x", 1), 1);
            CHECK(read(go[0], &c, 1) == 1);
            _exit(0);
        }
        _exit(0);
    }
    CHECK_EQ(wait_child(pid), 0);
    CHECK(live() >= before + 3 * 32);
    CHECK_EQ(write(go[1], "x", 1), 1);
    CHECK(read(ready[0], &c, 1) == 1);
    CHECK(live() >= before + 2 * 32);
    CHECK_EQ(write(go[1], "x", 1), 1);
    wait_for_live(before);
    sim_check(0);
}

// Handles mean nothing to another file: not the same number's page, not any page.
TEST(test_handles_of_another_process)
{
    int to[2], from[2];
    uint64_t first, mine;
    struct uvm u;
    pid_t pid;
    char c;

    CHECK(pipe(to) == 0 && pipe(from) == 0);
    pid = fork();
    if (pid == 0) {
        vm_start(&u, MB(4));
        CHECK_EQ(vm_create(&u, KB(64), 40, &first), NV_OK);
        CHECK_EQ(vm_map(&u, BASE, KB(64), first, 0, 0), NV_OK);
        CHECK_EQ(gpu_mark(&u, BASE, KB(64), 0x5ec4e7), 0);
        CHECK_EQ(write(from[1], &first, 8), 8);
        CHECK(read(to[0], &c, 1) == 1);
        // untouched by what the other tried
        CHECK(gpu_marked(&u, BASE, KB(64), 0x5ec4e7, NULL));
        CHECK_EQ(vm_query(&u, 0).out_bytes_created, 40 * KB(64));
        CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, KB(64));
        _exit(0);
    }
    CHECK(read(from[0], &first, 8) == 8);
    vm_start(&u, MB(64));
    for (uint64_t h = first - 4; h < first + 64; h++) {
        CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, UVM_VMEM_MAP_REPLACE), NV_ERR_INVALID_OBJECT_HANDLE);
        CHECK_EQ(vm_release_one(&u, h), NV_ERR_INVALID_OBJECT_HANDLE);
    }
    // pages of its own are other memory, and never hold the other's data
    for (int i = 0; i < 40; i++) {
        CHECK_EQ(vm_create(&u, KB(64), 1, &mine), NV_OK);
        CHECK_EQ(vm_map(&u, BASE + i * GRANULE, KB(64), mine, 0, 0), NV_OK);
        CHECK_EQ(gpu_word(&u, BASE + i * GRANULE), 0);
        CHECK_EQ(gpu_mark(&u, BASE + i * GRANULE, KB(64), 1), 0);
    }
    CHECK_EQ(write(to[1], "x", 1), 1);
    CHECK_EQ(wait_child(pid), 0);
    sim_check(0);
}

// ---- the memory cgroup ------------------------------------------------------------------------------------

#define CGROUP "/tmp/cgroup"
#define MINE CGROUP "/vmem"

static void put(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    CHECK_MSG(f, "%s: %s", path, strerror(errno));
    CHECK(fputs(text, f) >= 0);
    CHECK_MSG(fclose(f) == 0, "%s to %s: %s", text, path, strerror(errno));
}

// Bytes that the memory cgroup is charged with.
static uint64_t charged(void)
{
    FILE *f = fopen(MINE "/memory.current", "r");
    unsigned long long n;

    CHECK(f && fscanf(f, "%llu", &n) == 1);
    fclose(f);
    return n;
}

// Bytes of these for objects of the kernel's, which are charged one by one.
static uint64_t charged_slab(void)
{
    FILE *f = fopen(MINE "/memory.stat", "r");
    unsigned long long n = 0;
    char line[128];

    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "slab %llu", &n) == 1)
            break;
    CHECK(f && n);
    fclose(f);
    return n;
}

// The kernel charges in advance, up to this on each processor.
#define IN_ADVANCE KB(256)

// Runs in a process of the cgroup `MINE`; returns its exit status, or 128 + the signal.
static int in_cgroup(void (*what)(bool limited), bool limited)
{
    pid_t pid;
    int rc;

    CHECK((mkdir(CGROUP, 0755) == 0 || errno == EEXIST) && mount("vmem", CGROUP, "cgroup2", 0, NULL) == 0);
    put(CGROUP "/cgroup.subtree_control", "+memory");
    CHECK(mkdir(MINE, 0755) == 0);
    pid = fork();
    if (pid == 0) {
        put(MINE "/cgroup.procs", "0");
        what(limited);
        _exit(0);
    }
    rc = wait_child(pid);
    CHECK(rmdir(MINE) == 0 && umount(CGROUP) == 0);
    return rc;
}

static void charge_overlays(bool limited)
{
    unsigned overlays = GB(4) / BLOCK;
    uint64_t start, open;
    struct uvm u;
    char limit[32];

    vm_start(&u, GB(4));
    CHECK_EQ(vm_open(&u, BASE, BLOCK), NV_OK);
    start = charged();
    if (limited) {
        snprintf(limit, sizeof(limit), "%llu", (unsigned long long)start + MB(1));
        put(MINE "/memory.max", limit);
    }
    CHECK_EQ(vm_open(&u, BASE, GB(4)), NV_OK);
    open = charged();
    CHECK_MSG(open - start > overlays * KB(1), "%u overlays are charged with %lld bytes", overlays,
              (long long)(open - start));
    uvm_close(&u);
    CHECK_MSG(charged() < start + 2 * IN_ADVANCE, "%lld bytes stay charged", (long long)(charged() - start));
}

// The memory behind overlays is charged to the cgroup of the process that opened them, until the file is closed. A process
// that reaches the cgroup's limit ends alone, with everything given back.
TEST(test_overlays_are_charged_to_the_cgroup)
{
    uint64_t before = baseline();

    CHECK_EQ(in_cgroup(charge_overlays, false), 0);
    CHECK_EQ(in_cgroup(charge_overlays, true), 128 + SIGKILL);
    wait_for_live(before);
    sim_check(0);
}

static void charge_handles(bool limited)
{
    uint32_t count = 2048;
    uint64_t start, first;
    struct uvm u;

    (void)limited;
    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 1, &first), NV_OK);
    start = charged_slab();
    CHECK_EQ(vm_create(&u, KB(64), count, &first), NV_OK);
    CHECK_MSG(charged_slab() - start > count * 40, "%u handles are charged with %lld bytes", count,
              (long long)(charged_slab() - start));
}

// So are handles: a page of 64 KiB costs the caller some bytes of the kernel's memory, too.
TEST(test_handles_are_charged_to_the_cgroup) { CHECK_EQ(in_cgroup(charge_handles, false), 0); }
