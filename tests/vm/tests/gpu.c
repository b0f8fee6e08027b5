// The driver and the simulated GPU, as the cases use them.
//
// SPDX-License-Identifier: MIT
#include "vmtest.h"

#include "uvm_free.h"

#define RM_CTRL_FD (-1) // the simulated RM looks at handles alone

int sim_fd(void)
{
    static int fd = -1;
    static pid_t owner;

    if (fd < 0 || owner != getpid()) {
        fd = open("/dev/simgpu", O_RDWR | O_CLOEXEC);
        CHECK_MSG(fd >= 0, "/dev/simgpu: %s", strerror(errno));
        owner = getpid();
    }
    return fd;
}

static void sim_ioctl(unsigned long cmd, void *arg, const char *what)
{
    CHECK_MSG(ioctl(sim_fd(), cmd, arg) == 0, "%s: %s", what, strerror(errno));
}

struct simgpu_info sim_info(unsigned gpu)
{
    struct simgpu_info info = {.gpu = gpu};

    sim_ioctl(SIMGPU_INFO, &info, "SIMGPU_INFO");
    return info;
}

// ---- guards -----------------------------------------------------------------------------------------------

#define GUARD_MEMORY 0x6a6a
#define GUARD_WORD 0x6a6a6a6a6a6a6a6aull

static struct guard {
    struct uvm *uvm; // NULL: free
    struct uvm was;  // a case may close its descriptors, and open others
    pid_t owner;
    uint64_t va;
} guards[16];

static void guard_check(const struct guard *g)
{
    struct simgpu_pte pte;
    struct simgpu_walk w = {.vas = sim_vas(&g->was, 0),
                            .va = g->va,
                            .stride = KB(64),
                            .out = (uintptr_t)&pte,
                            .count = 1};
    uint64_t where = 0;

    if (g->owner != getpid() || ioctl(sim_fd(), SIMGPU_WALK, &w)) // another's, or its address space is gone
        return;
    CHECK_MSG(pte.page_size == MB(2), "the guard at 0x%llx has no entry of 2 MiB any more", (unsigned long long)g->va);
    CHECK_MSG(gpu_marked(&g->was, g->va, MB(2), GUARD_WORD, &where),
              "the guard at 0x%llx has lost its content at 0x%llx", (unsigned long long)g->va,
              (unsigned long long)where);
}

static void guards_end(const struct uvm *u, unsigned gpu)
{
    for (struct guard *g = guards; gpu == 0 && g < guards + COUNT(guards); g++) {
        if (g->uvm != u)
            continue;
        guard_check(g);
        g->uvm = NULL;
    }
}

void guards_check(void)
{
    for (struct guard *g = guards; g < guards + COUNT(guards); g++)
        if (g->uvm)
            guard_check(g);
}

void uvm_guard(struct uvm *u, uint64_t va)
{
    struct guard *g = guards;

    while (g->uvm && g->owner == getpid())
        CHECK(++g < guards + COUNT(guards));
    CHECK_EQ(uvm_create_external(u, va, MB(2)), NV_OK);
    sim_mem(u, 0, GUARD_MEMORY, MB(2), MB(2));
    CHECK_EQ(uvm_map_external(u, 0, va, MB(2), 0, GUARD_MEMORY), NV_OK);
    sim_mem(u, 0, GUARD_MEMORY, 0, 0); // the mapping keeps it
    CHECK_EQ(gpu_mark(u, va, MB(2), GUARD_WORD), 0);
    *g = (struct guard){.uvm = u, .was = *u, .owner = getpid(), .va = va};
}

void uvm_open(struct uvm *u)
{
    static uint32_t serial;
    UVM_INITIALIZE_PARAMS init = {0};
    UVM_MM_INITIALIZE_PARAMS mm = {0};

    memset(u, 0, sizeof(*u));
    u->gpus = sim_info(0).gpus;
    for (unsigned i = 0; i < u->gpus && i < COUNT(u->uuid); i++) {
        struct simgpu_info info = sim_info(i);
        memcpy(&u->uuid[i], info.uuid, sizeof(info.uuid));
    }
    u->fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);
    u->mm_fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);
    CHECK_MSG(u->fd >= 0 && u->mm_fd >= 0, "/dev/nvidia-uvm: %s", strerror(errno));
    CHECK(ioctl(u->fd, UVM_INITIALIZE, &init) == 0);
    CHECK_EQ(init.rmStatus, NV_OK);
    mm.uvmFd = u->fd;
    CHECK(ioctl(u->mm_fd, UVM_MM_INITIALIZE, &mm) == 0);
    CHECK_EQ(mm.rmStatus, NV_OK);
    u->client = (uint32_t)getpid() << 8 | (++serial & 0xff);
    u->vaspace = 0x5000;
}

// RM lets a process register only a GPU whose device it has open. CUDA opens it, too.
static void device_open(unsigned gpu)
{
    static int fds[2] = {-1, -1};
    char path[32];

    snprintf(path, sizeof(path), "/dev/nvidia%u", gpu);
    if (fds[gpu] < 0)
        fds[gpu] = open(path, O_RDWR | O_CLOEXEC);
    CHECK_MSG(fds[gpu] >= 0, "%s: %s", path, strerror(errno));
}

NV_STATUS uvm_register(struct uvm *u, unsigned gpu)
{
    UVM_REGISTER_GPU_PARAMS p = {.gpu_uuid = u->uuid[gpu], .rmCtrlFd = RM_CTRL_FD, .hClient = u->client};

    device_open(gpu);
    CHECK(ioctl(u->fd, UVM_REGISTER_GPU, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_register_vaspace(struct uvm *u, unsigned gpu)
{
    UVM_REGISTER_GPU_VASPACE_PARAMS p = {.gpuUuid = u->uuid[gpu],
                                         .rmCtrlFd = RM_CTRL_FD,
                                         .hClient = u->client,
                                         .hVaSpace = u->vaspace + gpu};

    CHECK(ioctl(u->fd, UVM_REGISTER_GPU_VASPACE, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_unregister_vaspace(struct uvm *u, unsigned gpu)
{
    guards_end(u, gpu);
    UVM_UNREGISTER_GPU_VASPACE_PARAMS p = {.gpuUuid = u->uuid[gpu]};

    CHECK(ioctl(u->fd, UVM_UNREGISTER_GPU_VASPACE, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_unregister(struct uvm *u, unsigned gpu)
{
    guards_end(u, gpu);
    UVM_UNREGISTER_GPU_PARAMS p = {.gpu_uuid = u->uuid[gpu]};

    CHECK(ioctl(u->fd, UVM_UNREGISTER_GPU, &p) == 0);
    return p.rmStatus;
}

void uvm_start(struct uvm *u)
{
    uvm_open(u);
    CHECK_EQ(uvm_register(u, 0), NV_OK);
    CHECK_EQ(uvm_register_vaspace(u, 0), NV_OK);
}

void uvm_close(struct uvm *u)
{
    guards_end(u, 0);
    close(u->fd);
    close(u->mm_fd);
    u->fd = u->mm_fd = -1;
}

NV_STATUS uvm_free_range(struct uvm *u, uint64_t va, uint64_t length)
{
    UVM_FREE_PARAMS p = uvm_free_params(va, length);

    CHECK(ioctl(u->fd, UVM_FREE, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_create_external(struct uvm *u, uint64_t va, uint64_t length)
{
    UVM_CREATE_EXTERNAL_RANGE_PARAMS p = {.base = va, .length = length};

    CHECK(ioctl(u->fd, UVM_CREATE_EXTERNAL_RANGE, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_unmap_external(struct uvm *u, unsigned gpu, uint64_t va, uint64_t length)
{
    UVM_UNMAP_EXTERNAL_PARAMS p = {.base = va, .length = length, .gpuUuid = u->uuid[gpu]};

    CHECK(ioctl(u->fd, UVM_UNMAP_EXTERNAL, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_map_sparse(struct uvm *u, unsigned gpu, uint64_t va, uint64_t length)
{
    UVM_MAP_EXTERNAL_SPARSE_PARAMS p = {.base = va, .length = length, .gpuUuid = u->uuid[gpu]};

    CHECK(ioctl(u->fd, UVM_MAP_EXTERNAL_SPARSE, &p) == 0);
    return p.rmStatus;
}

NV_STATUS uvm_map_params(const struct uvm *u, UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p)
{
    p->rmStatus = 0xdead;
    if (ioctl(u->fd, UVM_MAP_EXTERNAL_ALLOCATION, p)) { // for want of room for the parameters
        CHECK_EQ(errno, ENOMEM);
        return NV_ERR_NO_MEMORY;
    }
    return p->rmStatus;
}

NV_STATUS uvm_map_external(struct uvm *u, unsigned gpu, uint64_t va, uint64_t length, uint64_t offset, uint32_t memory)
{
    UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p = calloc(1, sizeof(*p));
    NV_STATUS status;

    p->base = va;
    p->length = length;
    p->offset = offset;
    p->perGpuAttributes[0].gpuUuid = u->uuid[gpu];
    p->perGpuAttributes[0].gpuMappingType = UvmGpuMappingTypeReadWriteAtomic;
    p->gpuAttributesCount = 1;
    p->rmCtrlFd = RM_CTRL_FD;
    p->hClient = u->client;
    p->hMemory = memory;
    status = uvm_map_params(u, p);
    free(p);
    return status;
}

struct simgpu_vas_id sim_vas(const struct uvm *u, unsigned gpu)
{
    return (struct simgpu_vas_id){.gpu = gpu, .h_client = u->client, .h_vaspace = u->vaspace + gpu};
}

static int access_flags(const struct uvm *u, unsigned gpu, uint32_t flags, uint64_t va, void *buf, uint64_t length)
{
    struct simgpu_access a = {.vas = sim_vas(u, gpu), .va = va, .len = length, .buf = (uintptr_t)buf, .flags = flags};

    sim_ioctl(SIMGPU_ACCESS, &a, "SIMGPU_ACCESS");
    return a.result;
}

int gpu_access(const struct uvm *u, unsigned gpu, bool write, uint64_t va, void *buf, uint64_t length)
{
    return access_flags(u, gpu, write ? SIMGPU_ACCESS_WRITE : 0, va, buf, length);
}

int gpu_access_ce(const struct uvm *u, unsigned gpu, bool write, uint64_t va, void *buf, uint64_t length)
{
    return access_flags(u, gpu, SIMGPU_ACCESS_CE | (write ? SIMGPU_ACCESS_WRITE : 0), va, buf, length);
}

int gpu_mark(const struct uvm *u, uint64_t va, uint64_t length, uint64_t value)
{
    for (uint64_t at = va; at < va + length; at += KB(64)) {
        int rc = gpu_access(u, 0, true, at, &value, 8);
        if (!rc)
            rc = gpu_access(u, 0, true, at + KB(64) - 8, &value, 8);
        if (rc)
            return rc;
    }
    return 0;
}

bool gpu_marked(const struct uvm *u, uint64_t va, uint64_t length, uint64_t value, uint64_t *where)
{
    for (uint64_t at = va; at < va + length; at += KB(64)) {
        uint64_t spots[2] = {at, at + KB(64) - 8};
        for (int i = 0; i < 2; i++) {
            uint64_t got = 0;
            if (where)
                *where = spots[i];
            if (gpu_access(u, 0, false, spots[i], &got, 8) || got != value)
                return false;
        }
    }
    return true;
}

uint64_t gpu_word(const struct uvm *u, uint64_t va)
{
    uint64_t value = 0;
    int rc = gpu_access(u, 0, false, va, &value, 8);

    CHECK_MSG(rc == 0, "GPU read of 0x%llx: %s", (unsigned long long)va, strerror(-rc));
    return value;
}

void sim_walk(const struct uvm *u, unsigned gpu, uint64_t va, uint64_t stride, struct simgpu_pte *out, uint32_t n)
{
    struct simgpu_walk w = {.vas = sim_vas(u, gpu), .va = va, .stride = stride, .out = (uintptr_t)out, .count = n};

    sim_ioctl(SIMGPU_WALK, &w, "SIMGPU_WALK");
}

struct simgpu_pte sim_pte(const struct uvm *u, uint64_t va)
{
    struct simgpu_pte pte;

    sim_walk(u, 0, va, KB(64), &pte, 1);
    return pte;
}

// Faults before this case began are another's.
static struct simgpu_counters before[2];

struct simgpu_counters sim_counters(unsigned gpu, bool reset)
{
    struct simgpu_counters_io io = {.gpu = gpu, .reset = reset};

    sim_ioctl(SIMGPU_COUNTERS, &io, "SIMGPU_COUNTERS");
    if (reset) { // keep what sim_check() looks at
        struct simgpu_counters *b = &before[gpu];
        b->bad_tlb_at_free -= io.c.bad_tlb_at_free;
        b->bad_pde_at_free -= io.c.bad_pde_at_free;
        b->bad_late_writes -= io.c.bad_late_writes;
        b->bad_use_after_free -= io.c.bad_use_after_free;
        b->bad_double_free -= io.c.bad_double_free;
        b->bad_push_size -= io.c.bad_push_size;
        b->bad_mixed_sizes -= io.c.bad_mixed_sizes;
    }
    return io.c;
}

void sim_phys(unsigned gpu, uint64_t phys, void *buf, uint64_t length)
{
    struct simgpu_phys p = {.gpu = gpu, .phys = phys, .len = length, .buf = (uintptr_t)buf};

    sim_ioctl(SIMGPU_PHYS, &p, "SIMGPU_PHYS");
}

void sim_baseline(void)
{
    if (access("/dev/simgpu", R_OK | W_OK))
        return;
    for (unsigned i = 0; i < sim_info(0).gpus && i < COUNT(before); i++)
        before[i] = sim_counters(i, false);
}

void sim_check(unsigned gpu)
{
    struct simgpu_counters c = sim_counters(gpu, false), *b = &before[gpu];
    struct simgpu_poison p = {.gpu = gpu};

    guards_check();
    CHECK_EQ(c.bad_tlb_at_free - b->bad_tlb_at_free, 0);
    CHECK_EQ(c.bad_pde_at_free - b->bad_pde_at_free, 0);
    CHECK_EQ(c.bad_late_writes - b->bad_late_writes, 0);
    CHECK_EQ(c.bad_use_after_free - b->bad_use_after_free, 0);
    CHECK_EQ(c.bad_double_free - b->bad_double_free, 0);
    CHECK_EQ(c.bad_push_size - b->bad_push_size, 0);
    CHECK_EQ(c.bad_mixed_sizes - b->bad_mixed_sizes, 0);
    sim_ioctl(SIMGPU_POISON_CHK, &p, "SIMGPU_POISON_CHK");
    CHECK_MSG(p.dirty_granules == 0, "%llu granules of free memory were written to, the first at 0x%llx",
              (unsigned long long)p.dirty_granules, (unsigned long long)p.first_dirty);
}

uint64_t sim_mem(const struct uvm *u, unsigned gpu, uint32_t handle, uint32_t page_size, uint64_t size)
{
    struct simgpu_mem m = {.gpu = gpu, .h_client = u->client, .h_memory = handle, .page_size = page_size, .size = size};

    sim_ioctl(SIMGPU_MEM, &m, "SIMGPU_MEM");
    return m.phys;
}

void sim_inject(uint32_t sites, uint32_t nth, bool mine, struct simgpu_inject *out)
{
    struct simgpu_inject i = {.sites = sites, .nth = nth, .mine = mine};

    sim_ioctl(SIMGPU_INJECT, &i, "SIMGPU_INJECT");
    if (out)
        *out = i;
}

static int failmem_fd(void)
{
    static int fd = -1;

    if (fd < 0)
        fd = open("/dev/failmem", O_RDWR | O_CLOEXEC);
    return fd;
}

bool failmem_there(void) { return failmem_fd() >= 0; }

struct failmem failmem_arm(uint32_t nth)
{
    struct failmem f = {.nth = nth};

    if (!failmem_there())
        vmtest_skip("/dev/failmem: %s", strerror(errno));
    CHECK(ioctl(failmem_fd(), FAILMEM_ARM, &f) == 0);
    return f;
}

void sim_mode(unsigned gpu, uint32_t set, uint32_t clear)
{
    struct simgpu_mode m = {.gpu = gpu, .set = set, .clear = clear};

    sim_ioctl(SIMGPU_MODE, &m, "SIMGPU_MODE");
}
