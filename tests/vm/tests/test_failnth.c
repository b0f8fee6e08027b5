// Every allocation on the way of every call fails once, and every call into RM and for physical memory. The call says
// so and has changed nothing, then works when tried again.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

enum { OVERLAYS = 4 };
#define FOREIGN (BASE + (OVERLAYS + 1) * BLOCK) // behind the guard
#define WATCHED ((OVERLAYS + 1 + 3) * BLOCK)

static struct uvm u;
static uint64_t small, big; // pages: 64 KiB, 2 MiB
static uint64_t made;       // what the call under test created

struct scenario {
    const char *name;
    void (*prepare)(void); // state before the call
    NV_STATUS (*call)(void);
    void (*undo)(void); // takes a successful call back
    bool never_fails;   // for want of memory
    bool closed;        // after a failure, what the call worked on is closed, and the call is not tried again
};

static void nothing(void) {}

static NV_STATUS create_small(void) { return vm_create(&u, KB(64), 40, &made); }
static void undo_create_small(void)
{
    for (unsigned i = 0; i < 40; i++)
        CHECK_EQ(vm_release_one(&u, made + i), NV_OK);
}
static NV_STATUS create_huge(void) { return vm_create(&u, MB(2), 3, &made); }
static void undo_create_huge(void)
{
    for (unsigned i = 0; i < 3; i++)
        CHECK_EQ(vm_release_one(&u, made + i), NV_OK);
}

static void close_overlays(void)
{
    for (unsigned i = 0; i < OVERLAYS; i++)
        CHECK_EQ(uvm_unmap_external(&u, 0, BASE + i * BLOCK, BLOCK), NV_OK);
}
static void open_overlays(void) { CHECK_EQ(vm_open(&u, BASE, OVERLAYS * BLOCK), NV_OK); }
static NV_STATUS map_some(void)
{
    struct uvm_vmem_op ops[6];

    for (unsigned i = 0; i < 6; i++)
        ops[i] = vm_op(BASE + i % OVERLAYS * BLOCK + i * KB(128), KB(64), small + i, 0, 0);
    return vm_map_ops(&u, 0, ops, 6, NULL);
}
static void undo_map(void) { CHECK_EQ(vm_unmap(&u, BASE, OVERLAYS * BLOCK), NV_OK); }
static NV_STATUS map_huge(void) { return vm_map(&u, BASE, MB(2), big, 0, 0); }
static void undo_map_huge(void) { CHECK_EQ(vm_unmap(&u, BASE, MB(2)), NV_OK); }
static void huge_mapped(void)
{
    close_overlays();
    CHECK_EQ(vm_map(&u, BASE, MB(2), big, 0, 0), NV_OK);
}
static NV_STATUS split(void) { return vm_map(&u, BASE + KB(64), KB(64), small, 0, UVM_VMEM_MAP_REPLACE); }
static void some_mapped(void)
{
    open_overlays();
    CHECK_EQ(map_some(), NV_OK);
}
static NV_STATUS unmap(void) { return vm_unmap(&u, BASE, OVERLAYS * BLOCK); }
static uint64_t victims[6];
static void release_mapped(void)
{
    uint64_t h;

    open_overlays();
    CHECK_EQ(vm_create(&u, KB(64), 6, &h), NV_OK);
    for (unsigned i = 0; i < 6; i++) {
        victims[i] = h + i;
        CHECK_EQ(vm_map(&u, BASE + i * KB(192), KB(64), h + i, 0, 0), NV_OK);
    }
}
static void release_huge(void)
{
    close_overlays();
    for (unsigned i = 0; i < 6; i++) {
        CHECK_EQ(vm_create(&u, MB(2), 1, &victims[i]), NV_OK);
        if (i < 3)
            CHECK_EQ(vm_map(&u, BASE + i * BLOCK, MB(2), victims[i], 0, 0), NV_OK);
    }
}
static NV_STATUS release(void) { return vm_release(&u, victims, 6, NULL); }
static void released(void)
{
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    CHECK_EQ(vm_release_one(&u, victims[0]), NV_ERR_INVALID_OBJECT_HANDLE);
    sim_check(0);
}
static void foreign(void)
{
    CHECK_EQ(uvm_create_external(&u, FOREIGN, MB(6)), NV_OK);
    CHECK_EQ(uvm_map_external(&u, 0, FOREIGN, MB(6), 0, 33), NV_OK);
}
static NV_STATUS takeover(void) { return vm_map(&u, FOREIGN + MB(2), KB(64), small, 0, UVM_VMEM_TAKEOVER); }
static NV_STATUS takeover_all(void)
{
    struct uvm_vmem_op ops[3];

    for (unsigned i = 0; i < 3; i++)
        ops[i] = vm_op(FOREIGN + i * BLOCK, KB(64), small + i, 0, UVM_VMEM_TAKEOVER);
    return vm_map_ops(&u, 0, ops, 3, NULL);
}
// Beside entries of its own that are cut, too
static void huge_and_foreign(void)
{
    huge_mapped();
    foreign();
}
static NV_STATUS split_and_take(void)
{
    struct uvm_vmem_op ops[3] = {vm_op(BASE + KB(64), KB(64), small, 0, UVM_VMEM_MAP_REPLACE),
                                 vm_op(FOREIGN, KB(64), small + 1, 0, UVM_VMEM_TAKEOVER),
                                 vm_op(FOREIGN + MB(2), KB(64), small + 2, 0, UVM_VMEM_TAKEOVER)};

    return vm_map_ops(&u, 0, ops, 3, NULL);
}
static void undo_foreign(void) { CHECK_EQ(uvm_free_range(&u, FOREIGN, MB(6)), NV_OK); }
static void undo_split_and_take(void)
{
    undo_map();
    undo_foreign();
}
static NV_STATUS query(void)
{
    struct uvm_vmem_query q = {.size = sizeof(q)};

    memcpy(q.gpu_uuid, &u.uuid[0], 16);
    CHECK(ioctl(u.fd, UVM_VMEM_QUERY, &q) == 0);
    return q.rmStatus;
}

static const struct scenario scenarios[] = {
    {"query", nothing, query, nothing, false, false},
    {"create_small", nothing, create_small, undo_create_small, false, false},
    {"create_huge", nothing, create_huge, undo_create_huge, false, false},
    {"map_no_overlay", close_overlays, map_some, undo_map, false, false},
    {"map", open_overlays, map_some, undo_map, false, false},
    {"map_huge", close_overlays, map_huge, undo_map_huge, false, false},
    {"split_huge", huge_mapped, split, undo_map, false, false},
    {"unmap", some_mapped, unmap, nothing, false, false},
    {"release", release_mapped, release, released, true, false},
    {"release_huge", release_huge, release, released, true, false},
    {"takeover", foreign, takeover, undo_foreign, false, false},
    {"takeover_all", foreign, takeover_all, undo_foreign, false, false},
    {"split_and_take", huge_and_foreign, split_and_take, undo_split_and_take, false, false},
    {"split_and_take, closed", huge_and_foreign, split_and_take, undo_split_and_take, false, true},
};

// Fails the nth of a kind until there is no nth; returns how many there were.
static unsigned sweep(const struct scenario *s, bool memory, uint32_t sites)
{
    unsigned nth, refused = 0;

    for (nth = 1; nth < 2000; nth++) {
        struct failmem f = {0};
        struct simgpu_inject inject = {0};
        struct vm_state before;
        bool fired;
        NV_STATUS status;

        s->prepare();
        vm_state_take(&u, BASE, WATCHED, &before);
        if (memory)
            failmem_arm(nth);
        else
            sim_inject(sites, nth, true, NULL);
        status = s->call();
        if (memory) {
            f = failmem_arm(0);
            fired = f.fired;
        } else {
            sim_inject(0, 0, true, &inject);
            fired = inject.fired;
        }
        if (!fired) {
            CHECK_EQ(status, NV_OK);
            s->undo();
            vm_state_free(&before);
            return nth - 1;
        }
        if (status == NV_OK) { // it could do without
            s->undo();
            vm_state_free(&before);
            continue;
        }
        refused++;
        CHECK_MSG(!s->never_fails, "%s: failure %u (%s:%u) is answered with 0x%x", s->name, nth, f.file, f.line,
                  status);
        CHECK_MSG(status == NV_ERR_NO_MEMORY, "%s: failure %u (%s:%u) is answered with 0x%x", s->name, nth, f.file,
                  f.line, status);
        vm_state_same(&u, BASE, &before, true);
        vm_state_free(&before);
        sim_check(0);
        if (s->closed) { // with the page tables that the failed call left
            close_overlays();
            undo_foreign();
            continue;
        }
        status = s->call();
        CHECK_MSG(status == NV_OK, "%s: after failure %u (%s:%u) the same call answers 0x%x", s->name, nth, f.file,
                  f.line, status);
        s->undo();
    }
    FAIL("%s: no end of failures", s->name);
}

static void start(void)
{
    vm_start(&u, OVERLAYS * BLOCK);
    CHECK_EQ(vm_create(&u, KB(64), 6, &small), NV_OK);
    CHECK_EQ(vm_create(&u, MB(2), 1, &big), NV_OK);
    sim_mem(&u, 0, 33, MB(2), MB(6));
}

static void finish(void)
{
    uvm_close(&u);
    sim_check(0);
}

TEST(test_every_allocation_fails_once)
{
    unsigned total = 0;

    failmem_arm(0); // or skips the case
    start();
    for (unsigned i = 0; i < COUNT(scenarios); i++) {
        unsigned n = sweep(&scenarios[i], true, 0);
        printf("%s: %u allocations\n", scenarios[i].name, n);
        total += n;
    }
    CHECK(total > 10);
    vmtest_figure("allocations_failed", total, "allocations");
    finish();
}

TEST(test_every_physical_allocation_fails_once)
{
    unsigned total = 0;

    start();
    for (unsigned i = 0; i < COUNT(scenarios); i++) {
        unsigned n = sweep(&scenarios[i], false, SIMGPU_SITE_PMA);
        printf("%s: %u physical allocations\n", scenarios[i].name, n);
        total += n;
    }
    CHECK(total > 0);
    vmtest_figure("physical_allocations_failed", total, "allocations");
    finish();
}
