// SPDX-License-Identifier: MIT
#include "backend/stock/stock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// One arena stays after all pages are gone. With the backdrop and the scratch memory, that is less than 128 MiB.
#define ARENA_MIN (UINT64_C(16) << 20)
#define ARENA_MAX (UINT64_C(4) << 30)
#define UVM_FDS 64

// ---- address space ------------------------------------------------------------------------------------------

static int stock_reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct stock_reservation *reservation = malloc(sizeof(*reservation));
    int rc = reservation
                 ? vmem__stock_reservation_new(b->priv, r->length, r->flags & VMEM_RESERVE_BACKDROP, reservation)
                 : vmem__error(-ENOMEM, "no memory for bookkeeping of a reservation");

    if (rc) {
        free(reservation);
        return rc;
    }
    reservation->core = r;
    r->addr = reservation->cuda.addr;
    r->priv = reservation;
    return 0;
}

static void stock_unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    vmem__stock_reservation_free(b->priv, r->priv);
    free(r->priv);
}

static int stock_backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    struct stock *s = b->priv;
    struct stock_reservation *reservation = r->priv;
    int rc;

    pthread_mutex_lock(&reservation->cuda.lock);
    rc = vmem__stock_activate(s, reservation, addr, length);
    pthread_mutex_unlock(&reservation->cuda.lock);
    return rc;
}

// ---- physical memory ----------------------------------------------------------------------------------------

static int stock_arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    struct stock *s = b->priv;
    struct stock_arena *arena = calloc(1, sizeof(*arena));
    int rc;

    if (!arena)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of an allocation");
    atomic_fetch_add(&b->syscalls, 1);
    rc = vmem__rm_memory_new(&s->rm, a->size, &arena->memory);
    if (rc) {
        free(arena);
        return rc;
    }
    a->raw = !s->fresh_is_zero; // what makes pages zeroes many arenas at once: each time, it waits for kernels that run
    a->priv = arena;
    return 0;
}

static void stock_arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    struct stock *s = b->priv;
    struct stock_arena *arena = a->priv;

    vmem__stock_alias_free(s, a->size, arena);
    atomic_fetch_add(&b->syscalls, 1);
    if (!vmem__rm_memory_free(&s->rm, arena->memory))
        atomic_fetch_add(&b->overhead, a->size); // RM keeps the memory until the context ends; account for it
    free(arena);
}

static uint64_t alias_of(const struct vmem__run *run)
{
    const struct stock_arena *arena = run->arena->priv;

    return arena->alias.addr + run->offset;
}

static int stock_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    int rc = vmem__stock_aliases_map(b->priv, runs, n);

    return rc ? rc : vmem__gpu_zero(b, runs, n, alias_of);
}

// ---- mapping ------------------------------------------------------------------------------------------------

static struct stock_slice slice(const struct vmem__arena *arena, uint64_t offset)
{
    return arena ? (struct stock_slice){((const struct stock_arena *)arena->priv)->memory, offset}
                 : (struct stock_slice){0};
}

static int put_back(struct stock *s, const struct vmem__run *run, struct stock_slice before, bool undo_all)
{
    return vmem__stock_put_back(s, run->reservation->priv, run->addr, run->length, before, undo_all);
}

// Maps all runs or none.
static int stock_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    for (size_t i = 0; i < n; i++) {
        const struct vmem__run *run = &runs[i];
        bool keep_fine = (run->flags & VMEM_MAP_FINE) && run->page_size < STOCK_BLOCK;
        int rc = vmem__stock_put(b->priv, run->reservation->priv, run->addr, run->length,
                                 slice(run->arena, run->offset), slice(run->old_arena, run->old_offset), keep_fine);

        if (rc) {
            *bad = i;
            while (i-- > 0)
                put_back(b->priv, &runs[i], slice(runs[i].old_arena, runs[i].old_offset), true);
            return rc;
        }
    }
    return 0;
}

// The number of runs, from the first on, that are whole blocks and follow each other. *length: their bytes.
static size_t whole_blocks(const struct vmem__run *runs, size_t n, uint64_t *length)
{
    size_t i = 0;

    *length = 0;
    while (i < n && (runs[i].addr | runs[i].length) % STOCK_BLOCK == 0 && runs[i].reservation == runs->reservation &&
           runs[i].addr == runs->addr + *length)
        *length += runs[i++].length;
    return i;
}

// Unmaps all runs or none. Whole blocks that follow each other go together, whichever arenas their pages are of.
static int stock_unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    const struct stock_slice nothing = {0};
    uint64_t length;

    for (size_t i = 0, together; i < n; i += together) {
        const struct vmem__run *run = &runs[i];
        struct stock_slice before = slice(run->arena, run->offset);
        int rc;

        together = whole_blocks(runs + i, n - i, &length);
        if (together > 1) {
            before = nothing; // not of all of them
        } else {
            together = 1;
            length = run->length;
        }
        rc = vmem__stock_put(b->priv, run->reservation->priv, run->addr, length, nothing, before, false);
        if (rc) {
            *bad = i;
            i += together > 1 ? together : 0; // of these, any may be unmapped
            while (i-- > 0)
                put_back(b->priv, &runs[i], slice(runs[i].arena, runs[i].offset), true);
            return rc;
        }
    }
    return 0;
}

static int stock_restore(struct vmem__backend *b, const struct vmem__run *run)
{
    return put_back(b->priv, run, slice(run->arena, run->offset), false);
}

// ---- opening ------------------------------------------------------------------------------------------------

static int release_abi(const struct vmem_options *opts, char *release, size_t size, const struct vmem__abi **abi)
{
    int rc = vmem__abi_release(release, size);

    return rc ? rc : vmem__abi_find(release, (opts->flags & VMEM_OPT_UNKNOWN_DRIVER) != 0, abi);
}

static int stock_probe(const struct vmem_options *opts)
{
    const struct vmem__abi *abi;
    char release[32];
    int rc = release_abi(opts, release, sizeof(release), &abi);

    if (rc)
        return rc;
    if (access("/dev/nvidiactl", R_OK | W_OK))
        return vmem__error(-errno, "/dev/nvidiactl: %s", strerror(errno));
    if (access("/dev/nvidia-uvm", R_OK | W_OK))
        return vmem__error(-errno, "/dev/nvidia-uvm: %s", strerror(errno));
    return vmem__cuda_probe(opts->device);
}

static int word(struct stock *s, uint64_t addr, uint32_t *value)
{
    const struct vmem_copy_op op = {.dst = (uintptr_t)value, .src = addr, .length = sizeof(*value)};

    return vmem__cuda_copy(&s->gpu.cuda, &op, 1);
}

// Checks that maps through s->uvm change what CUDA reads at addr, the start of an active segment. Tests a 2 MiB map,
// its removal, and a 64 KiB map at the same place. `memory` is an RM handle of 2 MiB.
static int check_space(struct stock *s, uint64_t addr, uint32_t memory)
{
    uint32_t mapped = 1, removed = 1, mapped_fine = 1;
    uint64_t page = addr + 3 * VMEM_PAGE_64K;
    int rc = vmem__uvm_map_external(&s->uvm, &s->rm, addr, STOCK_BLOCK, memory, 0);

    if (rc)
        return rc;
    rc = vmem__cuda_fill(&s->gpu.cuda, addr, 0x5a, STOCK_BLOCK);
    if (!rc)
        rc = word(s, addr, &mapped);
    if (!rc)
        rc = vmem__uvm_map_sparse(&s->uvm, addr, STOCK_BLOCK);
    if (!rc)
        rc = word(s, page, &removed);
    if (!rc)
        rc = vmem__uvm_map_external(&s->uvm, &s->rm, page, VMEM_PAGE_64K, memory, VMEM_PAGE_64K);
    if (!rc)
        rc = word(s, page, &mapped_fine);
    if (!rc && (mapped != 0x5a5a5a5a || removed != 0 || mapped_fine != 0x5a5a5a5a)) {
        vmem__cuda_fill(&s->gpu.cuda, addr, 0, STOCK_BLOCK); // the fill may have written to the backdrop
        rc = vmem__error(-EIO,
                         "a map that UVM accepted did not reach the GPU, so stock cannot be used with this driver: "
                         "read 0x%x, 0x%x after removal, 0x%x in a 64 KiB page",
                         mapped, removed, mapped_fine);
    }
    return rc;
}

// Finds, among the process's UVM descriptors, the one whose VA space its CUDA contexts use.
static int find_space(struct stock *s)
{
    struct vmem__cuda_reservation r;
    int fds[UVM_FDS], n = vmem__cuda_uvm_fds(fds, UVM_FDS), rc;
    uint32_t memory;

    rc = vmem__rm_memory_new(&s->rm, STOCK_BLOCK, &memory);
    if (rc)
        return rc;
    rc = vmem__cuda_reserve(&s->gpu.cuda, &s->gpu.backdrop, STOCK_SEGMENT, STOCK_SEGMENT, &r);
    if (rc)
        goto no_range;
    rc = vmem__error(-ENODEV, "CUDA opened no descriptor of /dev/nvidia-uvm in this process");
    for (int i = 0; rc && rc != -ENOMEM && i < n; i++) {
        // Duplicate above RM's descriptor. An exiting process closes descriptors in ascending order, and UVM, which
        // keeps the GPU up, must close after RM's client.
        s->uvm.fd = fcntl(fds[i], F_DUPFD_CLOEXEC, s->rm.fd + 1);
        if (s->uvm.fd < 0)
            continue; // another thread closed it
        rc = check_space(s, r.addr, memory);
        if (rc) {
            close(s->uvm.fd);
            s->uvm.fd = -1;
        }
    }
    vmem__cuda_unreserve(&s->gpu.cuda, &s->gpu.backdrop, &r);
no_range:
    vmem__rm_memory_free(&s->rm, memory);
    return rc;
}

static int scratch_new(struct stock *s)
{
    struct stock_reservation alias;
    int rc = vmem__rm_memory_new(&s->rm, STOCK_SCRATCH, &s->scratch);

    if (!rc)
        rc = vmem__stock_reservation_new(s, STOCK_SCRATCH, true, &alias);
    if (rc)
        return rc;
    rc = vmem__uvm_map_external(&s->uvm, &s->rm, alias.cuda.addr, STOCK_SCRATCH, s->scratch, 0);
    if (!rc)
        rc = vmem__cuda_fill(&s->gpu.cuda, alias.cuda.addr, 0, STOCK_SCRATCH);
    vmem__stock_reservation_free(s, &alias);
    return rc;
}

static void stock_close(struct vmem__backend *b, bool forked)
{
    struct stock *s = b->priv;

    vmem__stock_aliases_end(s, forked);
    if (!forked)
        vmem__backdrop_free(&s->gpu.cuda, &s->gpu.backdrop);
    vmem__rm_close(&s->rm); // also frees the scratch memory
    if (s->uvm.fd >= 0)
        close(s->uvm.fd);
    vmem__cuda_close(&s->gpu.cuda, forked);
    free(s);
}

static int stock_open(struct vmem__backend *b, const struct vmem_options *opts)
{
    struct stock *s = calloc(1, sizeof(*s));
    const struct vmem__abi *abi;
    int rc;

    if (!s)
        return vmem__error(-ENOMEM, "no memory for the stock backend");
    b->priv = s;
    s->backend = b;
    pthread_mutex_init(&s->alias_lock, NULL);
    s->gpu.cuda.syscalls = &b->syscalls;
    s->gpu.cuda.beside_kernels = &b->beside_kernels;
    s->rm.fd = s->uvm.fd = -1;
    rc = release_abi(opts, b->info.driver, sizeof(b->info.driver), &abi);
    if (!rc)
        rc = vmem__cuda_open(&s->gpu.cuda, opts->device, &b->info);
    if (!rc) {
        memcpy(s->uvm.uuid, b->info.device_uuid, sizeof(s->uvm.uuid));
        rc = vmem__rm_open(&s->rm, abi, b->info.device_uuid);
    }
    if (!rc) {
        s->fresh_is_zero = vmem__rm_memory_is_zero(&s->rm);
        rc = vmem__backdrop_new(&s->gpu.cuda, &s->gpu.backdrop, STOCK_SEGMENT);
    }
    if (!rc)
        rc = find_space(s);
    if (!rc)
        rc = scratch_new(s);
    if (rc) {
        stock_close(b, false);
        return rc;
    }
    strcpy(b->info.backend, "stock");
    b->info.caps = VMEM_CAP_GPU | VMEM_CAP_CUDA_POINTER | VMEM_CAP_BACKDROP | VMEM_CAP_FAULT;
    b->info.page_sizes = VMEM_PAGE_64K | VMEM_PAGE_128K | VMEM_PAGE_256K | VMEM_PAGE_2M;
    b->info.reserve_align = STOCK_BLOCK;
    b->overhead = s->gpu.backdrop.segment + STOCK_SCRATCH;
    b->arena_min = ARENA_MIN;
    b->arena_max = ARENA_MAX;
    return 0;
}

const struct vmem__ops vmem__stock_ops = {
    .name = "stock",
    .probe = stock_probe,
    .open = stock_open,
    .close = stock_close,
    .reserve = stock_reserve,
    .unreserve = stock_unreserve,
    .backdrop = stock_backdrop,
    .arena_new = stock_arena_new,
    .arena_free = stock_arena_free,
    .zero = stock_zero,
    .map = stock_map,
    .unmap = stock_unmap,
    .restore = stock_restore,
    VMEM__GPU_OPS,
};
