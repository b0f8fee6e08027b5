// Does the simulator see what it is there to see? Runs on the unmodified nvidia-uvm.ko; exits 0 if every check passed.
//
// Each part shows first that correct work looks correct, then, with a fault of the simulated hardware or of RM switched
// on, that the same work is seen to go wrong.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "uvm_linux_ioctl.h"

#include "rm_abi.h"
#include "simgpu_uapi.h"
#include "uvm_free.h"

#define PAGE (64ul << 10)
#define BIG (2ul << 20)
#define BASE 0x130000000000ul

static int sim, ctl, uvm, mm, checks, failures;
static unsigned gpus;
static uint32_t client, device[2], vaspace[2], next_handle = 0x1000;
static NvProcessorUuid uuid[2];

#define CHECK(cond)                                                \
    do {                                                           \
        checks++;                                                  \
        if (!(cond)) {                                             \
            failures++;                                            \
            printf("FAIL %s:%d: %s\n", __func__, __LINE__, #cond); \
        }                                                          \
    } while (0)

static void need(int ok, const char *what)
{
    if (!ok) {
        printf("FAIL cannot go on: %s (errno %d)\n", what, errno);
        exit(1);
    }
}

// RM, by its ioctls

static uint32_t rm_alloc(uint32_t parent, uint32_t *handle, uint32_t class_id, void *params, uint32_t size)
{
    struct rm_alloc a = {client, parent, *handle, class_id, (uintptr_t)params, size, 0xdead};

    need(ioctl(ctl, RM_IOCTL(RM_ESC_ALLOC, struct rm_alloc), &a) == 0, "RM alloc");
    *handle = a.object;
    return a.status;
}

static void rm_free(uint32_t handle)
{
    struct rm_free f = {client, client, handle, 0xdead};

    need(ioctl(ctl, RM_IOCTL(RM_ESC_FREE, struct rm_free), &f) == 0 && f.status == 0, "RM free");
}

// Memory of a GPU in pieces of 64 KiB or 2 MiB. Returns the RM status; *phys is the first piece.
static uint32_t rm_memory(int gpu, uint64_t size, int big, uint32_t *handle, uint64_t *phys)
{
    struct rm_memory m = {.attr = (big ? 3u : 2u) << 23 | 3u << 27, .size = size};
    uint32_t status;

    *handle = next_handle++;
    status = rm_alloc(device[gpu], handle, RM_CLASS_MEMORY, &m, sizeof(m));
    *phys = m.offset;
    return status;
}

// UVM

#define UVM(cmd, p) (ioctl(uvm, cmd, p) ? 0xffffffffu : (p)->rmStatus)

static uint32_t range_new(uint64_t base, uint64_t length)
{
    UVM_CREATE_EXTERNAL_RANGE_PARAMS p = {.base = base, .length = length};

    return UVM(UVM_CREATE_EXTERNAL_RANGE, &p);
}

static uint32_t range_free(uint64_t base, uint64_t length)
{
    UVM_FREE_PARAMS p = uvm_free_params(base, length);

    return UVM(UVM_FREE, &p);
}

static uint32_t map(int gpu, uint64_t base, uint64_t length, uint64_t offset, uint32_t memory)
{
    static UVM_MAP_EXTERNAL_ALLOCATION_PARAMS p;

    memset(&p, 0, sizeof(p));
    p.base = base;
    p.length = length;
    p.offset = offset;
    p.perGpuAttributes[0].gpuUuid = uuid[gpu];
    p.gpuAttributesCount = 1;
    p.rmCtrlFd = ctl;
    p.hClient = client;
    p.hMemory = memory;
    return UVM(UVM_MAP_EXTERNAL_ALLOCATION, &p);
}

static uint32_t unmap(int gpu, uint64_t base, uint64_t length)
{
    UVM_UNMAP_EXTERNAL_PARAMS p = {.base = base, .length = length, .gpuUuid = uuid[gpu]};

    return UVM(UVM_UNMAP_EXTERNAL, &p);
}

// The simulator

static struct simgpu_vas_id vas(int gpu)
{
    return (struct simgpu_vas_id){.gpu = gpu, .h_client = client, .h_vaspace = vaspace[gpu]};
}

static int touch(int gpu, uint64_t va, uint64_t *value, unsigned flags)
{
    struct simgpu_access a = {.vas = vas(gpu), .va = va, .len = 8, .buf = (uintptr_t)value, .flags = flags};

    need(ioctl(sim, SIMGPU_ACCESS, &a) == 0, "SIMGPU_ACCESS");
    return a.result;
}

static uint64_t get(int gpu, uint64_t va)
{
    uint64_t value = 0;

    return touch(gpu, va, &value, SIMGPU_ACCESS_NOFAULT) ? UINT64_MAX : value;
}

static int put(int gpu, uint64_t va, uint64_t value)
{
    return touch(gpu, va, &value, SIMGPU_ACCESS_NOFAULT | SIMGPU_ACCESS_WRITE);
}

static uint64_t peek(int gpu, uint64_t phys)
{
    uint64_t value = 0;
    struct simgpu_phys p = {.gpu = gpu, .phys = phys, .len = 8, .buf = (uintptr_t)&value};

    need(ioctl(sim, SIMGPU_PHYS, &p) == 0, "SIMGPU_PHYS");
    return value;
}

static struct simgpu_pte walk(int gpu, uint64_t va)
{
    struct simgpu_pte pte;
    struct simgpu_walk w = {.vas = vas(gpu), .va = va, .stride = PAGE, .count = 1, .out = (uintptr_t)&pte};

    need(ioctl(sim, SIMGPU_WALK, &w) == 0, "SIMGPU_WALK");
    return pte;
}

static struct simgpu_tlb tlb(int gpu, uint64_t va, int unit)
{
    struct simgpu_tlb t = {.vas = vas(gpu), .va = va, .unit = unit};

    need(ioctl(sim, SIMGPU_TLB, &t) == 0, "SIMGPU_TLB");
    return t;
}

static struct simgpu_counters counters(int gpu, int reset)
{
    struct simgpu_counters_io c = {.gpu = gpu, .reset = reset};

    need(ioctl(sim, SIMGPU_COUNTERS, &c) == 0, "SIMGPU_COUNTERS");
    return c.c;
}

static int bad(const struct simgpu_counters *c)
{
    return c->bad_tlb_at_free || c->bad_pde_at_free || c->bad_late_writes || c->bad_use_after_free ||
           c->bad_double_free;
}

static void mode(unsigned set, unsigned clear)
{
    struct simgpu_mode m = {.set = set, .clear = clear};

    need(ioctl(sim, SIMGPU_MODE, &m) == 0, "SIMGPU_MODE");
}

static uint64_t dirty(int gpu)
{
    struct simgpu_poison p = {.gpu = gpu};

    need(ioctl(sim, SIMGPU_POISON_CHK, &p) == 0, "SIMGPU_POISON_CHK");
    return p.dirty_granules;
}

#define POISON (SIMGPU_POISON * 0x0101010101010101ull)

static void test_map(void)
{
    uint64_t phys;
    uint32_t mem;
    struct simgpu_pte pte;
    struct simgpu_counters c;

    counters(0, 1);
    CHECK(range_new(BASE, BIG) == 0);
    CHECK(rm_memory(0, 4 * PAGE, 0, &mem, &phys) == 0);
    CHECK(get(0, BASE) == UINT64_MAX);
    CHECK(map(0, BASE, PAGE, 0, mem) == 0);
    CHECK(get(0, BASE) == POISON);
    pte = walk(0, BASE);
    CHECK(pte.state == SIMGPU_PTE_VALID && pte.page_size == PAGE && pte.phys == phys && pte.aperture == 0);
    CHECK(walk(0, BASE + PAGE).state == SIMGPU_PTE_INVALID);
    CHECK(put(0, BASE, 11) == 0 && peek(0, phys) == 11);
    CHECK(tlb(0, BASE, SIMGPU_UNIT_GPC).cached && tlb(0, BASE, SIMGPU_UNIT_GPC).pte.phys == phys);
    CHECK(!tlb(0, BASE, SIMGPU_UNIT_HUB).cached);
    CHECK(map(0, BASE, PAGE, PAGE, mem) == 0); // over the first
    CHECK(get(0, BASE) == POISON && put(0, BASE, 22) == 0 && peek(0, phys + PAGE) == 22 && peek(0, phys) == 11);
    CHECK(unmap(0, BASE, PAGE) == 0);
    CHECK(get(0, BASE) == UINT64_MAX);
    CHECK(put(0, BASE, 1) == -EFAULT);
    CHECK(range_free(BASE, BIG) == 0);
    rm_free(mem);
    c = counters(0, 0);
    CHECK(!bad(&c) && c.posted == 0 && c.pushes && c.inval_all + c.inval_targeted && c.rm_dup_memory == 2);
    CHECK(dirty(0) == 0);
}

// One invalidate of a size covers many pages, and no more than these
static void test_range(void)
{
    struct simgpu_counters c;
    uint64_t phys;
    uint32_t mem;

    CHECK(range_new(BASE, 8 * BIG) == 0);
    CHECK(rm_memory(0, 8 * BIG, 1, &mem, &phys) == 0);
    for (unsigned i = 0; i < 2; i++)
        CHECK(map(0, BASE + i * 4 * BIG, 4 * BIG, i * 4 * BIG, mem) == 0);
    for (unsigned i = 0; i < 8; i++)
        CHECK(touch(0, BASE + i * BIG, &phys, SIMGPU_ACCESS_CE) == 0);
    counters(0, 1);
    CHECK(unmap(0, BASE, 4 * BIG) == 0);
    c = counters(0, 0);
    CHECK(c.inval_targeted == 1 && c.inval_all <= 1);
    for (unsigned i = 0; i < 8; i++) {
        struct simgpu_tlb t = tlb(0, BASE + i * BIG, SIMGPU_UNIT_HUB);

        CHECK((t.cached && t.pte.state == SIMGPU_PTE_VALID) == (i >= 4));
    }
    CHECK(range_free(BASE, 8 * BIG) == 0);
    rm_free(mem);
    c = counters(0, 0);
    CHECK(!bad(&c));
}

static void test_sparse(void)
{
    UVM_MAP_EXTERNAL_SPARSE_PARAMS p = {.base = BASE, .length = BIG, .gpuUuid = uuid[0]};
    uint64_t phys;
    uint32_t mem;

    CHECK(range_new(BASE, BIG) == 0);
    CHECK(UVM(UVM_MAP_EXTERNAL_SPARSE, &p) == 0);
    CHECK(walk(0, BASE).state == SIMGPU_PTE_SPARSE);
    CHECK(get(0, BASE + 8) == 0 && put(0, BASE + 8, 5) == 0 && get(0, BASE + 8) == 0);
    CHECK(rm_memory(0, PAGE, 0, &mem, &phys) == 0);
    CHECK(map(0, BASE, PAGE, 0, mem) == 0);
    CHECK(get(0, BASE + 8) == POISON);
    CHECK(range_free(BASE, BIG) == 0);
    rm_free(mem);
}

// A driver whose invalidates get lost
static void test_missing_invalidate(void)
{
    struct simgpu_counters c;
    uint64_t phys;
    uint32_t mem;

    CHECK(range_new(BASE, BIG) == 0);
    CHECK(rm_memory(0, PAGE, 0, &mem, &phys) == 0);
    CHECK(map(0, BASE, PAGE, 0, mem) == 0);
    counters(0, 1);
    mode(SIMGPU_MODE_BREAK_INVALIDATE, 0);
    CHECK(put(0, BASE, 77) == 0);
    CHECK(unmap(0, BASE, PAGE) == 0);
    CHECK(walk(0, BASE).state == SIMGPU_PTE_INVALID);
    CHECK(get(0, BASE) == 77); // stale
    rm_free(mem);
    c = counters(0, 0);
    CHECK(c.bad_tlb_at_free == 1);
    CHECK(get(0, BASE) == POISON);
    CHECK(counters(0, 0).bad_use_after_free == 1);
    mode(0, SIMGPU_MODE_BREAK_INVALIDATE); // drops the TLBs too
    CHECK(get(0, BASE) == UINT64_MAX);
    CHECK(range_free(BASE, BIG) == 0);
    counters(0, 1);
}

// A write in flight while its page is unmapped and freed
static void test_membar(void)
{
    struct simgpu_counters c;
    uint64_t phys, value = 99;
    uint32_t mem;

    for (int broken = 0; broken < 2; broken++) {
        counters(0, 1);
        CHECK(range_new(BASE, BIG) == 0);
        CHECK(rm_memory(0, PAGE, 0, &mem, &phys) == 0);
        CHECK(map(0, BASE, PAGE, 0, mem) == 0);
        CHECK(touch(0, BASE, &value, SIMGPU_ACCESS_NOFAULT | SIMGPU_ACCESS_POSTED) == 0);
        CHECK(peek(0, phys) == POISON && counters(0, 0).posted == 1);
        if (broken)
            mode(SIMGPU_MODE_BREAK_MEMBAR, 0);
        CHECK(unmap(0, BASE, PAGE) == 0);
        CHECK(peek(0, phys) == (broken ? POISON : 99));
        rm_free(mem);
        c = counters(0, 0);
        CHECK(c.bad_late_writes == (unsigned)broken);
        CHECK(dirty(0) == (unsigned)broken);
        mode(0, SIMGPU_MODE_BREAK_MEMBAR);
        CHECK(range_free(BASE, BIG) == 0);
    }
    // Taking the page and giving it back poisons it again
    CHECK(rm_memory(0, PAGE, 0, &mem, &phys) == 0);
    rm_free(mem);
    CHECK(dirty(0) == 0);
    counters(0, 1);
}

// The stock driver's map over a mapping passes through an invalid entry; a map of an empty place does not make one
static void test_loop(void)
{
    struct simgpu_loop l = {.vas = vas(0), .va = BASE};
    uint64_t phys;
    uint32_t mem;

    CHECK(range_new(BASE, BIG) == 0);
    CHECK(rm_memory(0, 2 * PAGE, 0, &mem, &phys) == 0);
    CHECK(map(0, BASE, PAGE, 0, mem) == 0);
    CHECK(put(0, BASE, 1) == 0);
    CHECK(ioctl(sim, SIMGPU_LOOP_START, &l) == 0);
    CHECK(map(0, BASE + PAGE, PAGE, PAGE, mem) == 0); // beside it
    CHECK(ioctl(sim, SIMGPU_LOOP_READ, &l) == 0);
    CHECK(l.reads > 1 && l.invalid == 0 && l.faulted == 0 && l.last == 1 && l.last_phys == phys);
    for (int i = 0; i < 50; i++)
        CHECK(map(0, BASE, PAGE, (i + 1) % 2 * PAGE, mem) == 0);
    CHECK(ioctl(sim, SIMGPU_LOOP_STOP, &l) == 0);
    printf("  50 remaps by the stock driver: %llu reads, %llu found no valid entry, %llu faulted\n",
           (unsigned long long)l.reads, (unsigned long long)l.invalid, (unsigned long long)l.faulted);
    CHECK(l.invalid >= 50 && l.faulted > 0 && l.freed == 0);
    CHECK(range_free(BASE, BIG) == 0);
    rm_free(mem);
}

static void test_inject(void)
{
    struct simgpu_inject in = {.sites = SIMGPU_SITE_RM | SIMGPU_SITE_PMA, .mine = 1}, off = {0};
    uint64_t phys, live;
    uint32_t mem, status = 1;
    int n;

    CHECK(range_new(BASE, BIG) == 0);
    CHECK(rm_memory(0, PAGE, 0, &mem, &phys) == 0);
    live = counters(0, 0).rm_objects;
    for (n = 1; status && n < 20; n++) {
        in.nth = n;
        need(ioctl(sim, SIMGPU_INJECT, &in) == 0, "SIMGPU_INJECT");
        status = map(0, BASE, PAGE, 0, mem);
        off = (struct simgpu_inject){0};
        need(ioctl(sim, SIMGPU_INJECT, &off) == 0, "SIMGPU_INJECT");
        CHECK(status == 0 ? off.fired == 0 : off.fired == 1 && status == 0x51);
        CHECK(status == 0 || counters(0, 0).rm_objects == live);
    }
    CHECK(status == 0 && n > 2);
    CHECK(get(0, BASE) == POISON);
    CHECK(range_free(BASE, BIG) == 0);
    rm_free(mem);
}

// Managed memory that RM takes back: the pages move to the host and keep their contents
static void test_evict(void)
{
    UVM_REGISTER_CHANNEL_PARAMS rc = {.gpuUuid = uuid[0], .rmCtrlFd = ctl, .hClient = client, .hChannel = 3};
    uint64_t *p = mmap((void *)0x110000000000ul, 4 * BIG, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, uvm,
                       0x110000000000ul),
             buf[512];
    struct simgpu_access a = {.vas = vas(0), .len = sizeof(buf), .buf = (uintptr_t)buf, .batch = 8};
    struct simgpu_evict e = {.page_size = BIG, .count = 2};
    uint64_t live;

    CHECK(UVM(UVM_REGISTER_CHANNEL, &rc) == 0);
    need(p != MAP_FAILED, "mmap managed memory");
    for (unsigned i = 0; i < 4; i++) {
        p[i * BIG / 8] = 1000 + i;
        a.va = (uintptr_t)p + i * BIG;
        CHECK(ioctl(sim, SIMGPU_ACCESS, &a) == 0 && a.result == 0 && buf[0] == 1000 + i);
    }
    CHECK(a.faults > 0 && a.replays > 0);
    live = counters(0, 0).pma_live;
    CHECK(ioctl(sim, SIMGPU_EVICT, &e) == 0 && e.status == 0);
    CHECK(counters(0, 0).pma_live + 2 * BIG / PAGE == live);
    for (unsigned i = 0; i < 4; i++)
        CHECK(p[i * BIG / 8] == 1000 + i);
    munmap(p, 4 * BIG);
}

static void test_peers(void)
{
    UVM_ENABLE_PEER_ACCESS_PARAMS p = {.gpuUuidA = uuid[0], .gpuUuidB = uuid[1]};
    struct simgpu_pte pte;
    struct simgpu_counters c;
    uint64_t phys;
    uint32_t mem;

    CHECK(UVM(UVM_ENABLE_PEER_ACCESS, &p) == 0);
    counters(0, 1);
    counters(1, 1);
    CHECK(range_new(BASE, BIG) == 0);
    CHECK(rm_memory(1, PAGE, 0, &mem, &phys) == 0);
    CHECK(map(0, BASE, PAGE, 0, mem) == 0);
    pte = walk(0, BASE);
    CHECK(pte.state == SIMGPU_PTE_VALID && pte.aperture == 1 && pte.peer == 1 && pte.phys == phys);
    CHECK(put(0, BASE, 4242) == 0 && peek(1, phys) == 4242);
    CHECK(get(1, BASE) == UINT64_MAX);
    CHECK(unmap(0, BASE, PAGE) == 0);
    CHECK(get(0, BASE) == UINT64_MAX);
    rm_free(mem);
    CHECK(range_free(BASE, BIG) == 0);
    c = counters(0, 0);
    CHECK(!bad(&c));
    c = counters(1, 0);
    CHECK(!bad(&c) && dirty(1) == 0);
}

static void setup(void)
{
    UVM_INITIALIZE_PARAMS init = {0};
    UVM_MM_INITIALIZE_PARAMS mi = {0};
    struct simgpu_info info = {0};

    setvbuf(stdout, NULL, _IOLBF, 0);
    sim = open("/dev/simgpu", O_RDWR);
    ctl = open("/dev/nvidiactl", O_RDWR);
    uvm = open("/dev/nvidia-uvm", O_RDWR);
    mm = open("/dev/nvidia-uvm", O_RDWR);
    need(sim >= 0 && ctl >= 0 && uvm >= 0 && mm >= 0, "open the devices");
    need(UVM(UVM_INITIALIZE, &init) == 0, "UVM_INITIALIZE");
    mi.uvmFd = uvm;
    need(ioctl(mm, UVM_MM_INITIALIZE, &mi) == 0 && mi.rmStatus == 0, "UVM_MM_INITIALIZE");
    need(rm_alloc(0, &client, RM_CLASS_CLIENT, NULL, 0) == 0, "RM client");
    need(ioctl(sim, SIMGPU_INFO, &info) == 0, "SIMGPU_INFO");
    gpus = info.gpus;
    for (unsigned i = 0; i < gpus; i++) {
        UVM_REGISTER_GPU_PARAMS rg = {.rmCtrlFd = ctl, .hClient = client};
        UVM_REGISTER_GPU_VASPACE_PARAMS rv = {.rmCtrlFd = ctl, .hClient = client};
        uint32_t params[14] = {i, client}, none[12] = {0};
        char path[32];

        info.gpu = i;
        need(ioctl(sim, SIMGPU_INFO, &info) == 0, "SIMGPU_INFO");
        memcpy(uuid[i].uuid, info.uuid, 16);
        device[i] = next_handle++;
        vaspace[i] = next_handle++;
        need(rm_alloc(client, &device[i], RM_CLASS_DEVICE, params, sizeof(params)) == 0, "RM device");
        need(rm_alloc(device[i], &vaspace[i], RM_CLASS_VASPACE, none, sizeof(none)) == 0, "RM address space");
        rg.gpu_uuid = rv.gpuUuid = uuid[i];
        rv.hVaSpace = vaspace[i];
        snprintf(path, sizeof(path), "/dev/nvidia%d", i);
        need(open(path, O_RDWR) >= 0, path);
        need(UVM(UVM_REGISTER_GPU, &rg) == 0, "UVM_REGISTER_GPU");
        need(UVM(UVM_REGISTER_GPU_VASPACE, &rv) == 0, "UVM_REGISTER_GPU_VASPACE");
    }
}

static void test_unregister(void)
{
    UVM_UNREGISTER_GPU_PARAMS p = {.gpu_uuid = uuid[0]};
    struct simgpu_loop l = {.vas = vas(0), .va = BASE};
    struct simgpu_counters c;
    uint64_t phys;
    uint32_t mem;

    counters(0, 1);
    CHECK(range_new(BASE, BIG) == 0);
    CHECK(rm_memory(0, BIG, 1, &mem, &phys) == 0);
    CHECK(map(0, BASE, BIG, 0, mem) == 0);
    CHECK(walk(0, BASE).page_size == BIG);
    CHECK(put(0, BASE, 3) == 0);
    CHECK(ioctl(sim, SIMGPU_LOOP_START, &l) == 0);
    rm_free(mem); // UVM's duplicate keeps the memory
    CHECK(get(0, BASE) == 3);
    CHECK(UVM(UVM_UNREGISTER_GPU, &p) == 0);
    CHECK(ioctl(sim, SIMGPU_LOOP_STOP, &l) == 0 && l.ended && l.freed == 0);
    c = counters(0, 0);
    CHECK(!bad(&c) && c.pma_live == 0 && c.vaspaces == 0 && dirty(0) == 0);
}

int main(void)
{
    static const struct {
        const char *name;
        void (*run)(void);
        unsigned gpus;
    } tests[] = {
        {"map", test_map, 1},       {"range", test_range, 1},
        {"sparse", test_sparse, 1}, {"missing invalidate", test_missing_invalidate, 1},
        {"membar", test_membar, 1}, {"loop", test_loop, 1},
        {"inject", test_inject, 1}, {"evict", test_evict, 1},
        {"peers", test_peers, 2},   {"unregister", test_unregister, 1},
    };

    setup();
    for (unsigned i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        int before = failures;

        if (gpus < tests[i].gpus) {
            printf("SKIP %s: needs %u GPUs\n", tests[i].name, tests[i].gpus);
            continue;
        }
        tests[i].run();
        printf("%s %s\n", failures == before ? "ok" : "not ok", tests[i].name);
    }
    close(uvm);
    close(mm);
    close(ctl);
    printf("SELFTEST checks %d failures %d\n", checks, failures);
    return failures != 0;
}
