// Calls of UVM's own that fail: bad handles, memory that is not there, RM that refuses. UVM then closes mappings that it
// has not finished, past vMem's hooks. On the stock and on the patched module, each failure must be an answer: nothing
// else changes, nothing leaks, and the next call works. Where vMem is, overlays lie beside and below what fails.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <sys/xattr.h>

#include "uvm_test_ioctl.h"

#define MEMORY 0x77 // RM's handle of 6 MiB on GPU 0
#define OTHERS 0x78 // and of 2 MiB on GPU 1

static struct uvm u;
static bool vmem; // the module knows vMem's calls

static bool has_vmem(const struct uvm *at)
{
    struct uvm_vmem_query q = {.size = sizeof(q)};

    return ioctl(at->fd, UVM_VMEM_QUERY, &q) == 0;
}

// Fill the slabs behind the small allocations of a failing call, so that a read past one of them finds no null pointer.
static void spray(void)
{
    static unsigned serial;
    char name[24];

    for (unsigned i = 0; i < 16 && serial < 8000;
         i++) { // 16 bytes with its end: from the same slabs as a memory handle
        snprintf(name, sizeof(name), "trusted.%07u", serial++);
        setxattr("/tmp", name, "", 0, 0);
    }
}

// ---- one space: an external range with memory of RM's, a sparse mapping and overlays --------------------------------

enum { BLOCKS = 8 };
#define AT(block) (BASE + (block) * BLOCK)
static uint64_t page; // 2 MiB, if the module has vMem

static void start(void)
{
    uvm_start(&u);
    vmem = has_vmem(&u);
    CHECK_EQ(uvm_create_external(&u, BASE, BLOCKS * BLOCK), NV_OK);
    sim_mem(&u, 0, MEMORY, MB(2), MB(6));
    if (u.gpus > 1)
        sim_mem(&u, 1, OTHERS, MB(2), MB(2));
    if (vmem)
        CHECK_EQ(vm_create(&u, BLOCK, 1, &page), NV_OK);
}

// Blocks 0 to 2: memory of RM's. 3: sparse. 4 and 5: overlays with a part of a page each. 6: a 2 MiB page. 7: nothing.
static void furnish(void)
{
    CHECK_EQ(uvm_map_external(&u, 0, AT(0), MB(6), 0, MEMORY), NV_OK);
    CHECK_EQ(uvm_map_sparse(&u, 0, AT(3), BLOCK), NV_OK);
    if (!vmem)
        return;
    CHECK_EQ(vm_map(&u, AT(4) + KB(128), KB(64), page, KB(64), UVM_VMEM_MAP_64K), NV_OK);
    CHECK_EQ(vm_map(&u, AT(5) + KB(512), KB(128), page, 0, UVM_VMEM_MAP_64K), NV_OK);
    CHECK_EQ(vm_map(&u, AT(6), BLOCK, page, 0, 0), NV_OK);
}

// All of that goes: UVM closes the overlays, and the page is mapped nowhere.
static void clear(void)
{
    CHECK_EQ(uvm_free_range(&u, BASE, BLOCKS * BLOCK), NV_OK);
    CHECK_EQ(uvm_create_external(&u, BASE, BLOCKS * BLOCK), NV_OK);
    if (vmem)
        CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
}

// Map, write and read a page of vMem's and memory of RM's, which calls that failed must have left alone.
static void works(void)
{
    CHECK_EQ(uvm_map_external(&u, 0, AT(0), MB(2), MB(4), MEMORY), NV_OK);
    CHECK_EQ(gpu_mark(&u, AT(0), MB(2), 11), 0);
    CHECK(gpu_marked(&u, AT(0), MB(2), 11, NULL));
    if (vmem) {
        CHECK_EQ(vm_map(&u, AT(4), MB(2), page, 0, UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_64K), NV_OK);
        CHECK_EQ(gpu_mark(&u, AT(4), MB(2), 22), 0);
        CHECK(gpu_marked(&u, AT(4), MB(2), 22, NULL));
    }
    clear();
    sim_check(0);
}

static void finish(void)
{
    uvm_close(&u);
    sim_mem(&u, 0, MEMORY, 0, 0);
    if (u.gpus > 1)
        sim_mem(&u, 1, OTHERS, 0, 0);
    sim_check(0);
}

// Every entry of the range, in one value
static struct simgpu_pte *entries(void)
{
    struct simgpu_pte *ptes = calloc(BLOCKS * 32, sizeof(*ptes));

    sim_walk(&u, 0, BASE, KB(64), ptes, BLOCKS * 32);
    return ptes;
}

static void entries_same(struct simgpu_pte *before, const char *what)
{
    struct simgpu_pte *now = entries();

    for (unsigned i = 0; i < BLOCKS * 32; i++)
        CHECK_MSG(!memcmp(&before[i], &now[i], sizeof(*now)), "%s: 0x%llx was state %u phys 0x%llx, is state %u 0x%llx",
                  what, BASE + i * KB(64), before[i].state, (unsigned long long)before[i].phys, now[i].state,
                  (unsigned long long)now[i].phys);
    free(before);
    free(now);
}

// ---- bad arguments ------------------------------------------------------------------------------------------------

// UVM_MAP_EXTERNAL_ALLOCATION on GPU 0
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *mapping(uint64_t va, uint64_t length, uint32_t memory)
{
    static _Thread_local UVM_MAP_EXTERNAL_ALLOCATION_PARAMS p;

    memset(&p, 0, sizeof(p));
    p.base = va;
    p.length = length;
    for (unsigned i = 0; i < COUNT(u.uuid); i++) {
        p.perGpuAttributes[i].gpuUuid = u.uuid[i];
        p.perGpuAttributes[i].gpuMappingType = UvmGpuMappingTypeReadWriteAtomic;
    }
    p.gpuAttributesCount = 1;
    p.rmCtrlFd = -1;
    p.hClient = u.client;
    p.hMemory = memory;
    return &p;
}

static NV_STATUS map(UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p) { return uvm_map_params(&u, p); }

static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *unknown_memory(void) { return mapping(AT(7), MB(2), 0xdead); }
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *longer_than_the_memory(void)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = mapping(AT(7), MB(2), MEMORY);

    p->offset = MB(5);
    return p;
}
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *offset_past_the_memory(void)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = mapping(AT(7), MB(2), MEMORY);

    p->offset = 1ull << 62;
    return p;
}
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *crooked_offset(void)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = mapping(AT(7), MB(2), MEMORY);

    p->offset = 0x123;
    return p;
}
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *memory_of_a_gpu_not_registered(void)
{
    return u.gpus > 1 ? mapping(AT(7), MB(2), OTHERS) : NULL;
}
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *second_gpu_unknown(void)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = mapping(AT(7), MB(2), MEMORY);

    p->gpuAttributesCount = 2;
    memset(&p->perGpuAttributes[1].gpuUuid, 0x5a, sizeof(p->perGpuAttributes[1].gpuUuid));
    return p;
}
static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *second_gpu_of_no_type(void)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = mapping(AT(7), MB(2), MEMORY);

    p->gpuAttributesCount = 2;
    p->perGpuAttributes[1] = p->perGpuAttributes[0];
    p->perGpuAttributes[1].gpuMappingType = 99;
    return p;
}

static const struct bad {
    const char *name;
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *(*make)(void);
    NV_STATUS status;
} bad[] = {
    {"unknown memory", unknown_memory, NV_ERR_OBJECT_NOT_FOUND},
    {"longer than the memory", longer_than_the_memory, NV_ERR_INVALID_OFFSET},
    {"offset past the memory", offset_past_the_memory, NV_ERR_INVALID_OFFSET},
    {"crooked offset", crooked_offset, NV_ERR_INVALID_ADDRESS},
    {"memory of a GPU that is not registered", memory_of_a_gpu_not_registered, NV_ERR_INVALID_DEVICE},
    {"second GPU unknown", second_gpu_unknown, NV_ERR_INVALID_DEVICE},
    {"second GPU with a bad type", second_gpu_of_no_type, NV_ERR_INVALID_ARGUMENT},
};

// Where nothing is mapped, a refused mapping changes nothing, however often.
TEST(test_refused_mappings)
{
    start();
    furnish();
    for (unsigned i = 0; i < COUNT(bad); i++) {
        struct simgpu_pte *before = entries();

        for (unsigned n = 0; n < 100; n++) {
            UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = bad[i].make();
            NV_STATUS status;

            if (!p)
                break;
            spray();
            status = map(p);
            CHECK_MSG(status == bad[i].status, "%s: 0x%x, not 0x%x", bad[i].name, status, bad[i].status);
        }
        entries_same(before, bad[i].name);
    }
    clear();
    works();
    finish();
}

// Before vMem's first call in a file, too: its state is not there yet.
TEST(test_refused_mappings_of_a_file_without_vmem)
{
    uvm_start(&u);
    CHECK_EQ(uvm_create_external(&u, BASE, BLOCKS * BLOCK), NV_OK);
    for (unsigned n = 0; n < 2000; n++) {
        spray();
        CHECK_EQ(uvm_map_external(&u, 0, AT(7), MB(2), 0, 0xdead), NV_ERR_OBJECT_NOT_FOUND);
    }
    uvm_close(&u);
    sim_check(0);
}

// Over mappings: UVM unmaps what lies there first. An overlay goes with its page's addresses; a part of one does not, and
// then the call changes nothing.
TEST(test_refused_mapping_over_mappings)
{
    struct simgpu_pte *before;

    start();
    furnish();
    CHECK_EQ(map(mapping(AT(1), BLOCK, 0xdead)), NV_ERR_OBJECT_NOT_FOUND); // the middle of a mapping of UVM's
    CHECK_EQ(sim_pte(&u, AT(0)).state, SIMGPU_PTE_VALID);
    CHECK_EQ(sim_pte(&u, AT(1)).state, SIMGPU_PTE_INVALID);
    CHECK_EQ(sim_pte(&u, AT(2)).state, SIMGPU_PTE_VALID);
    CHECK_EQ(map(mapping(AT(3) + KB(64), KB(64), 0xdead)), NV_ERR_OBJECT_NOT_FOUND);
    CHECK_EQ(sim_pte(&u, AT(3)).state, SIMGPU_PTE_SPARSE);
    CHECK_EQ(sim_pte(&u, AT(3) + KB(64)).state, SIMGPU_PTE_INVALID);
    if (!vmem) {
        clear();
        works();
        return finish();
    }

    before = entries();
    CHECK_EQ(map(mapping(AT(4), KB(64), 0xdead)), NV_ERR_INVALID_ADDRESS);
    CHECK_EQ(map(mapping(AT(6) + KB(64), MB(2) - KB(64), 0xdead)), NV_ERR_INVALID_ADDRESS);
    CHECK_EQ(uvm_map_sparse(&u, 0, AT(5), MB(1)), NV_ERR_INVALID_ADDRESS);
    CHECK_EQ(uvm_unmap_external(&u, 0, AT(5) + KB(64), MB(3)), NV_ERR_INVALID_ADDRESS);
    entries_same(before, "a part of an overlay");
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, KB(64) + KB(128) + MB(2));

    CHECK_EQ(map(mapping(AT(4), 3 * BLOCK, 0xdead)), NV_ERR_OBJECT_NOT_FOUND);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    for (unsigned i = 4; i < 7; i++)
        CHECK_EQ(sim_pte(&u, AT(i)).state, SIMGPU_PTE_INVALID);
    clear();
    works();
    finish();
}

// ---- what is needed is not there ----------------------------------------------------------------------------------

static NV_STATUS map_hole(void) { return uvm_map_external(&u, 0, AT(7), MB(2), 0, MEMORY); }
static NV_STATUS map_hole_by_64k(void) { return uvm_map_external(&u, 0, AT(7) + KB(64), KB(192), KB(64), MEMORY); }
static NV_STATUS map_over_all(void) { return uvm_map_external(&u, 0, AT(1), MB(6), 0, MEMORY); }
static NV_STATUS map_over_overlays(void) { return uvm_map_external(&u, 0, AT(4), MB(6), 0, MEMORY); }
static NV_STATUS map_on_two(void)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = mapping(AT(7), MB(2), MEMORY);

    p->gpuAttributesCount = 2;
    p->perGpuAttributes[1] = p->perGpuAttributes[0]; // the second mapping replaces the first
    return map(p);
}
static NV_STATUS sparse_hole(void) { return uvm_map_sparse(&u, 0, AT(7), BLOCK); }
static NV_STATUS sparse_middle(void) { return uvm_map_sparse(&u, 0, AT(3) + KB(64), KB(128)); }
static NV_STATUS sparse_over_overlays(void) { return uvm_map_sparse(&u, 0, AT(4), 3 * BLOCK); }
static NV_STATUS unmap_middle(void) { return uvm_unmap_external(&u, 0, AT(1), BLOCK); }
static NV_STATUS unmap_all(void) { return uvm_unmap_external(&u, 0, BASE, BLOCKS * BLOCK); }
static NV_STATUS free_all(void) { return uvm_free_range(&u, BASE, BLOCKS * BLOCK); }
static NV_STATUS create_range(void) { return uvm_create_external(&u, AT(BLOCKS), BLOCK); }
static NV_STATUS unregister_vaspace(void) { return uvm_unregister_vaspace(&u, 0); }
static NV_STATUS register_vaspace(void) { return uvm_register_vaspace(&u, 0); }
static NV_STATUS unregister(void) { return uvm_unregister(&u, 0); }
static NV_STATUS register_gpu(void) { return uvm_register(&u, 0); }

static void nothing(void) {}
static void no_vaspace(void) { CHECK_EQ(uvm_unregister_vaspace(&u, 0), NV_OK); }
static void no_gpu_registered(void)
{
    CHECK_EQ(uvm_unregister(&u, 0), NV_OK); // and every page of vMem's there
    page = 0;
}

static const struct scenario {
    const char *name;
    void (*prepare)(void); // after furnish()
    NV_STATUS (*call)(void);
} scenarios[] = {
    {"map", nothing, map_hole},
    {"map by 64 KiB", nothing, map_hole_by_64k},
    {"map over mappings", nothing, map_over_all},
    {"map over overlays", nothing, map_over_overlays},
    {"map twice", nothing, map_on_two},
    {"map sparse", nothing, sparse_hole},
    {"map sparse in the middle", nothing, sparse_middle},
    {"map sparse over overlays", nothing, sparse_over_overlays},
    {"unmap the middle", nothing, unmap_middle},
    {"unmap", nothing, unmap_all},
    {"free", nothing, free_all},
    {"create range", nothing, create_range},
    {"unregister address space", nothing, unregister_vaspace},
    {"register address space", no_vaspace, register_vaspace},
    {"unregister GPU", nothing, unregister},
    {"register GPU", no_gpu_registered, register_gpu},
};

// A fault is armed for the next calls: an allocation in the kernel, or a call into RM, which gives physical memory, too.
enum fault { KERNEL_MEMORY, RM_CALL };
static const char *const fault_names[] = {"allocations", "RM calls"};

static void arm(enum fault fault, uint32_t nth)
{
    if (fault == KERNEL_MEMORY)
        failmem_arm(nth);
    else
        sim_inject(SIMGPU_SITE_RM, nth, true, NULL);
}

// True if the fault struck, and the place where it did
static bool struck(enum fault fault, struct failmem *where)
{
    struct simgpu_inject was = {0};

    *where = (struct failmem){0};
    if (fault == KERNEL_MEMORY) {
        *where = failmem_arm(0);
        return where->fired;
    }
    sim_inject(0, 0, true, &was);
    return was.fired;
}

static unsigned sweep(const struct scenario *s, enum fault fault)
{
    for (unsigned nth = 1; nth < 2000; nth++) {
        struct failmem where;
        NV_STATUS status;
        bool fired;

        start();
        furnish();
        s->prepare();
        spray();
        arm(fault, nth);
        status = s->call();
        fired = struck(fault, &where);
        CHECK_MSG(status == NV_OK || (fired && status == NV_ERR_NO_MEMORY), "%s: failure %u of %s (%s:%u): 0x%x",
                  s->name, nth, fault_names[fault], where.file, where.line, status);
        if (status != NV_OK)
            CHECK_MSG(s->call() == NV_OK, "%s: after failure %u of %s (%s:%u) the same call fails, too", s->name, nth,
                      fault_names[fault], where.file, where.line);
        finish();
        start(); // another file finds everything as it should be
        works();
        finish();
        if (!fired)
            return nth - 1;
    }
    FAIL("%s: no end of failures", s->name);
}

static void sweep_all(enum fault fault)
{
    struct uvm keeper; // so that the GPU itself is not set up and taken down for each file
    unsigned total = 0;

    uvm_start(&keeper);
    for (unsigned i = 0; i < COUNT(scenarios); i++) {
        unsigned n = sweep(&scenarios[i], fault);

        printf("%s: %u %s\n", scenarios[i].name, n, fault_names[fault]);
        total += n;
    }
    CHECK(total > 10);
    uvm_close(&keeper);
    vmtest_figure(fault == KERNEL_MEMORY ? "stock_allocations_failed" : "stock_rm_calls_failed", total, "failures");
}

TEST(test_every_allocation_fails_once)
{
    failmem_arm(0); // or skips the case
    sweep_all(KERNEL_MEMORY);
}

TEST(test_every_rm_call_fails_once) { sweep_all(RM_CALL); }

// UVM's own injection: adding the GPU's address space fails at one of the ranges, after those before it were added.
TEST(test_address_space_that_fails_at_a_range)
{
    UVM_TEST_VA_RANGE_INJECT_ADD_GPU_VA_SPACE_ERROR_PARAMS inject = {.lookup_address = BASE};

    start();
    furnish();
    CHECK_EQ(uvm_unregister_vaspace(&u, 0), NV_OK);
    if (ioctl(u.fd, UVM_TEST_VA_RANGE_INJECT_ADD_GPU_VA_SPACE_ERROR, &inject))
        vmtest_skip("the module was loaded without uvm_enable_builtin_tests=1");
    CHECK_EQ(inject.rmStatus, NV_OK);
    CHECK_EQ(uvm_register_vaspace(&u, 0), NV_ERR_NO_MEMORY);
    CHECK_EQ(uvm_register_vaspace(&u, 0), NV_OK);
    clear();
    works();
    finish();
}

// A batch that has taken UVM's mapping over, and then fails, gives it back: UVM closes it as its own.
TEST(test_takeover_that_is_undone)
{
    struct uvm_vmem_op ops[2];

    start();
    if (!vmem)
        vmtest_skip("the module has no vMem");
    furnish();
    ops[0] = vm_op(AT(1) + KB(64), KB(64), page, 0, UVM_VMEM_TAKEOVER);
    ops[1] = vm_op(AT(7), KB(64), page + 1, 0, 0); // no such page
    CHECK_EQ(vm_map_ops(&u, 0, ops, COUNT(ops), NULL), NV_ERR_INVALID_OBJECT_HANDLE);
    for (unsigned i = 0; i < 3; i++)
        CHECK_EQ(sim_pte(&u, AT(i)).state, SIMGPU_PTE_VALID);
    spray();
    CHECK_EQ(uvm_unmap_external(&u, 0, AT(1), KB(128)), NV_ERR_INVALID_ADDRESS); // a part of a 2 MiB entry
    CHECK_EQ(uvm_unmap_external(&u, 0, AT(1), BLOCK), NV_OK);
    clear();
    works();
    finish();
}
