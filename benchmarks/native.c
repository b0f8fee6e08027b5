// Loops around single calls, timed in C: `native.py` loads them. samples are nanoseconds of single calls, n of each.
//
// libvmem's own calls are those of the process's pyvmem, by a table. What talks to CUDA and to the module beside it is
// linked in from libvmem.a.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core/error.h"
#include "driver/kmod.h"
#include "driver/libcuda.h"
#include "vmem_kv.h"

static struct {
    __typeof__(vMemCreate) *create;
    __typeof__(vMemMap) *map;
    __typeof__(vMemUnmap) *unmap;
    __typeof__(vMemRelease) *release;
    __typeof__(vMemReserve) *reserve;
    __typeof__(vMemFree) *free;
    __typeof__(vmem_context_info) *info;
    __typeof__(vmem_kv_step) *step;
} vmem;

// Before all others: the calls above, in this order.
void bench_use(void *const *functions);
// The text of the calling thread's last error in this library, which it forgets; "" if there was none.
const char *bench_error(void);

// Creates, maps, unmaps and releases (mapped) one page at a time over the reserved range [addr, addr + length). Writes
// samples first to first + n - 1 to these places of the arrays. Sample i uses page i * stride, modulo the range: with a
// large odd stride, consecutive samples are far apart.
int bench_pages(vmem_context *ctx, uint64_t page_size, uint64_t addr, uint64_t length, size_t stride, size_t first,
                size_t n, uint64_t *create, uint64_t *map, uint64_t *unmap, uint64_t *release);
int bench_reserve(vmem_context *ctx, uint64_t length, uint32_t flags, size_t n, uint64_t *reserve, uint64_t *free);
// The same with CUDA's own calls at 2 MiB, over `length` bytes. map includes cuMemSetAccess; access is that part.
struct bench_cuda;
int bench_cuda_open(int device, uint64_t length, struct bench_cuda **cuda);
int bench_cuda_close(struct bench_cuda *cuda);
int bench_cuda_reserve(struct bench_cuda *cuda, size_t n, uint64_t *reserve, uint64_t *free);
// As bench_pages().
int bench_cuda_pages(struct bench_cuda *cuda, size_t stride, size_t first, size_t n, uint64_t *create, uint64_t *map,
                     uint64_t *access, uint64_t *unmap, uint64_t *release);
// As bench_pages(), by the ioctls of the patched nvidia-uvm.ko themselves: pages of the module's own sizes, and no
// records of libvmem's. ctx is of the uvm backend, and the addresses are reserved with a backdrop, with nothing mapped.
int bench_ioctls(vmem_context *ctx, uint64_t page_size, uint64_t addr, uint64_t length, size_t stride, size_t first,
                 size_t n, uint64_t *create, uint64_t *map, uint64_t *unmap, uint64_t *release);
// The bare system calls for a batch of pages on the host: maps page i of a memfd at page slots[i] of a range, one call per
// run of neighbours, and unmaps the range. One sample each.
int bench_host(uint64_t page_size, const uint64_t *slots, size_t pages, uint64_t *map, uint64_t *unmap);
// n decode iterations: in each, every length above 0 grows by one, and vmem_kv_step is called. samples: nanoseconds of
// each call. Stops at the first step that fails, and returns its error.
int bench_kv_steps(vmem_kv *kv, int32_t *lengths, uint32_t slots, uint64_t n, uint64_t *samples);

void bench_use(void *const *functions) { memcpy(&vmem, functions, sizeof vmem); }

const char *bench_error(void)
{
    static _Thread_local char text[VMEM__TEXT];
    vmem__keep_error(text);
    vmem__error(0, "%s", "");
    return text;
}

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Runs a call, and keeps how long it took.
#define TIME(sample, call)         \
    ({                             \
        uint64_t start_ = now();   \
        int rc_ = (call);          \
        (sample) = now() - start_; \
        rc_;                       \
    })

int bench_pages(vmem_context *ctx, uint64_t page_size, uint64_t addr, uint64_t length, size_t stride, size_t first,
                size_t n, uint64_t *create, uint64_t *map, uint64_t *unmap, uint64_t *release)
{
    int rc = 0;
    for (size_t i = first; i < first + n && !rc; i++) {
        uint64_t at = addr + i * stride % (length / page_size) * page_size;
        vmem_page page = 0;
        rc = TIME(create[i], vmem.create(ctx, page_size, 1, 0, &page));
        if (rc)
            break;
        rc = TIME(map[i], vmem.map(ctx, at, page));
        if (!rc)
            rc = TIME(unmap[i], vmem.unmap(ctx, at, page_size));
        if (!rc)
            rc = vmem.map(ctx, at, page);
        int released = TIME(release[i], vmem.release(ctx, page));
        rc = rc ? rc : released;
    }
    return rc;
}

int bench_reserve(vmem_context *ctx, uint64_t length, uint32_t flags, size_t n, uint64_t *reserve, uint64_t *free)
{
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        uint64_t addr;
        rc = TIME(reserve[i], vmem.reserve(ctx, length, flags, &addr));
        if (!rc)
            rc = TIME(free[i], vmem.free(ctx, addr));
    }
    return rc;
}

struct bench_cuda {
    struct vmem__cuda cu;
    uint64_t addr, length;
};

int bench_cuda_close(struct bench_cuda *cuda)
{
    if (!cuda)
        return 0;
    if (cuda->addr && !vmem__cuda_enter(&cuda->cu)) {
        cuda->cu.fn.address_free(cuda->addr, cuda->length);
        vmem__cuda_leave(&cuda->cu);
    }
    vmem__cuda_close(&cuda->cu, false);
    free(cuda);
    return 0;
}

int bench_cuda_open(int device, uint64_t length, struct bench_cuda **out)
{
    struct vmem_info info = {0};
    struct bench_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return vmem__error(-ENOMEM, "no memory");
    int rc = vmem__cuda_open(&cuda->cu, device, &info);
    if (rc) {
        free(cuda);
        return rc;
    }
    cuda->length = length;
    rc = vmem__cuda_enter(&cuda->cu);
    if (!rc) {
        rc = cuda->cu.fn.address_reserve(&cuda->addr, length, VMEM_PAGE_2M, 0, 0);
        if (rc)
            rc = vmem__cuda_error(&cuda->cu.fn, rc, "cuMemAddressReserve");
        vmem__cuda_leave(&cuda->cu);
    }
    if (rc)
        bench_cuda_close(cuda);
    else
        *out = cuda;
    return rc;
}

int bench_cuda_reserve(struct bench_cuda *cuda, size_t n, uint64_t *reserve, uint64_t *free)
{
    const struct vmem__libcuda *fn = &cuda->cu.fn;
    uint64_t addr;
    int rc = vmem__cuda_enter(&cuda->cu);
    if (rc)
        return rc;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = TIME(reserve[i], fn->address_reserve(&addr, cuda->length, VMEM_PAGE_2M, 0, 0));
        if (!rc)
            rc = TIME(free[i], fn->address_free(addr, cuda->length));
    }
    vmem__cuda_leave(&cuda->cu);
    return rc ? vmem__cuda_error(fn, rc, "cuMemAddressReserve or cuMemAddressFree") : 0;
}

int bench_cuda_pages(struct bench_cuda *cuda, size_t stride, size_t first, size_t n, uint64_t *create, uint64_t *map,
                     uint64_t *access, uint64_t *unmap, uint64_t *release)
{
    const struct vmem__libcuda *fn = &cuda->cu.fn;
    const struct vmem__cu_access allow = {.location = {.type = 1, .id = cuda->cu.device}, .flags = 3};
    const struct vmem__cu_prop prop = {.type = 1, .location = allow.location};
    const uint64_t page = VMEM_PAGE_2M;
    int rc = vmem__cuda_enter(&cuda->cu);
    if (rc)
        return rc;
    for (size_t i = first; i < first + n && !rc; i++) {
        uint64_t at = cuda->addr + i * stride % (cuda->length / page) * page, handle;
        rc = TIME(create[i], fn->mem_create(&handle, page, &prop, 0));
        if (rc)
            break;
        rc = TIME(map[i], fn->mem_map(at, page, 0, handle, 0));
        if (!rc) {
            rc = TIME(access[i], fn->mem_set_access(at, page, &allow, 1));
            map[i] += access[i];
            int unmapped = TIME(unmap[i], fn->mem_unmap(at, page));
            rc = rc ? rc : unmapped;
        }
        int released = TIME(release[i], fn->mem_release(handle));
        rc = rc ? rc : released;
    }
    vmem__cuda_leave(&cuda->cu);
    return rc ? vmem__cuda_error(fn, rc, "cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap or cuMemRelease") : 0;
}

int bench_ioctls(vmem_context *ctx, uint64_t page_size, uint64_t addr, uint64_t length, size_t stride, size_t first,
                 size_t n, uint64_t *create, uint64_t *map, uint64_t *unmap, uint64_t *release)
{
    struct vmem_info info = {.size = sizeof(info)};
    struct vmem__kmod k = {0};
    uint32_t failed, done;
    int rc = vmem.info(ctx, &info);
    if (!rc)
        rc = vmem__kmod_open(&k, info.device_uuid, addr);
    if (rc)
        return rc;
    for (size_t i = first; i < first + n && !rc; i++) {
        struct uvm_vmem_op put = {.va = addr + i * stride % (length / page_size) * page_size,
                                  .length = page_size,
                                  .flags = UVM_VMEM_TAKEOVER | (page_size < VMEM_PAGE_2M ? UVM_VMEM_MAP_64K : 0)};
        struct uvm_vmem_op take = {.va = put.va, .length = page_size};
        uint64_t handle;
        rc = TIME(create[i], vmem__kmod_create(&k, page_size, 1, &handle));
        if (rc)
            break;
        put.handle = handle;
        rc = TIME(map[i], vmem__kmod_batch(&k, UVM_VMEM_MAP, &put, 1, &failed));
        if (!rc)
            rc = TIME(unmap[i], vmem__kmod_batch(&k, UVM_VMEM_UNMAP, &take, 1, &failed));
        if (!rc)
            rc = vmem__kmod_batch(&k, UVM_VMEM_MAP, &put, 1, &failed);
        int released = TIME(release[i], vmem__kmod_release(&k, handle, 1, &done));
        rc = rc ? rc : released;
    }
    vmem__kmod_close(&k);
    return rc;
}

// The fewest calls that map the pages: one for every run of neighbours.
static int host_map(int fd, char *base, uint64_t page_size, const uint64_t *slots, size_t pages)
{
    for (size_t i = 0, run; i < pages; i += run) {
        for (run = 1; i + run < pages && slots[i + run] == slots[i] + run;)
            run++;
        if (mmap(base + slots[i] * page_size, run * page_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                 (off_t)(i * page_size)) == MAP_FAILED)
            return vmem__error(-errno, "mmap failed");
    }
    return 0;
}

static int host_unmap(char *base, size_t length)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(base, length, PROT_NONE, flags, -1, 0) == MAP_FAILED ? vmem__error(-errno, "mmap failed") : 0;
}

int bench_host(uint64_t page_size, const uint64_t *slots, size_t pages, uint64_t *map, uint64_t *unmap)
{
    uint64_t last = 0;
    for (size_t i = 0; i < pages; i++)
        last = slots[i] > last ? slots[i] : last;
    size_t length = (last + 1) * page_size;
    int fd = memfd_create("bare", MFD_CLOEXEC);
    if (fd < 0)
        return vmem__error(-errno, "memfd_create failed");
    char *base = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int rc = 0;
    if (base == MAP_FAILED || ftruncate(fd, (off_t)(pages * page_size)))
        rc = vmem__error(-errno, "mmap or ftruncate failed");
    if (!rc)
        rc = TIME(*map, host_map(fd, base, page_size, slots, pages));
    if (!rc)
        rc = TIME(*unmap, host_unmap(base, length));
    if (base != MAP_FAILED)
        munmap(base, length);
    close(fd);
    return rc;
}

int bench_kv_steps(vmem_kv *kv, int32_t *lengths, uint32_t slots, uint64_t n, uint64_t *samples)
{
    int rc = 0;
    for (uint64_t i = 0; i < n && !rc; i++) {
        for (uint32_t s = 0; s < slots; s++)
            lengths[s] += lengths[s] > 0;
        rc = TIME(samples[i], vmem.step(kv, lengths, slots, 0));
    }
    return rc;
}
