// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdlib.h>

#include "driver/abi.h"
#include "backend/uvm/uvm.h"

// An arena takes one call however large it is; below this, calls for the next one would come often.
#define ARENA_MIN (UINT64_C(32) << 20)
#define ARENA_MAX (UINT64_C(64) << 30)

static int probe(const struct vmem_options *opts)
{
    int err = vmem__kmod_probe();

    return err ? err : vmem__cuda_probe(opts->device);
}

// The module's descriptor is the one that knows what CUDA maps.
static int open_kmod(struct uvm *u, const uint8_t uuid[16])
{
    struct uvm_reservation reservation;
    int err = uvm_reservation_new(u, UVM_SEGMENT, &reservation);

    if (err)
        return err;
    err = vmem__kmod_open(&u->kmod, uuid, reservation.cuda.addr);
    uvm_reservation_free(u, &reservation);
    return err;
}

static void close_all(struct vmem__backend *b, bool forked)
{
    struct uvm *u = b->priv;

    if (!forked) {
        uvm_arenas_end(u);
        vmem__backdrop_free(&u->cuda, &u->backdrop);
    }
    vmem__kmod_close(&u->kmod);
    vmem__cuda_close(&u->cuda, forked);
    free(u);
    b->priv = NULL;
}

static int open_all(struct vmem__backend *b, const struct vmem_options *opts)
{
    const uint64_t needed = UVM_VMEM_CAP_SPARSE | UVM_VMEM_CAP_TAKEOVER;
    struct uvm *u = calloc(1, sizeof(*u));
    int err;

    if (!u)
        return vmem__error(-ENOMEM, "no memory for the backend");
    b->priv = u;
    u->kmod.fd = -1;
    u->kmod.syscalls = u->cuda.syscalls = &b->syscalls;
    u->backend = b;
    u->overhead = &b->overhead;
    pthread_mutex_init(&u->lock, NULL);
    err = vmem__cuda_open(&u->cuda, opts->device, &b->info);
    if (!err)
        err = vmem__backdrop_new(&u->cuda, &u->backdrop, UVM_SEGMENT);
    if (!err)
        err = open_kmod(u, b->info.device_uuid);
    if (!err && (u->kmod.caps & needed) != needed)
        err = vmem__error(-EOPNOTSUPP, "the module cannot replace CUDA's mappings on this GPU (capabilities 0x%llx)",
                          (unsigned long long)u->kmod.caps);
    if (!err && !(u->kmod.page_sizes & VMEM_PAGE_2M))
        err = vmem__error(-EOPNOTSUPP, "the module has no 2 MiB pages on this GPU");
    if (!err && (u->kmod.max_ops < 1 || u->kmod.max_bytes < UVM_SEGMENT))
        err = vmem__error(-EOPNOTSUPP, "the module takes %u elements and %llu bytes in one call: too few",
                          u->kmod.max_ops, (unsigned long long)u->kmod.max_bytes);
    if (err) {
        close_all(b, false);
        return err;
    }
    if (vmem__abi_release(b->info.driver, sizeof(b->info.driver)))
        b->info.driver[0] = '\0'; // a name for people; nothing depends on it
    b->info.caps = VMEM_CAP_GPU | VMEM_CAP_CUDA_POINTER | VMEM_CAP_BACKDROP;
    if (u->kmod.caps & UVM_VMEM_CAP_LIVE_REPLACE)
        b->info.caps |= VMEM_CAP_LIVE_REMAP;
    b->info.page_sizes = VMEM_PAGE_64K | VMEM_PAGE_128K | VMEM_PAGE_256K | VMEM_PAGE_2M;
    b->info.reserve_align = VMEM_PAGE_2M;
    b->arena_min = ARENA_MIN;
    b->arena_max = ARENA_MAX;
    atomic_store(&b->overhead, UVM_SEGMENT);
    return 0;
}

static int reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct uvm_reservation *reservation = malloc(sizeof(*reservation));
    int err;

    if (!reservation)
        return vmem__error(-ENOMEM, "no memory for a reservation");
    err = uvm_reservation_new(b->priv, r->length, reservation);
    if (err) {
        free(reservation);
        return err;
    }
    r->addr = reservation->cuda.addr;
    r->priv = reservation;
    return 0;
}

static void unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    uvm_reservation_free(b->priv, r->priv);
    free(r->priv);
}

static int backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    return uvm_activate(b->priv, r->priv, addr, length);
}

static int arena_new(struct vmem__backend *b, struct vmem__arena *a) { return uvm_arena_new(b->priv, a); }

static void arena_free(struct vmem__backend *b, struct vmem__arena *a) { uvm_arena_free(b->priv, a); }

static int zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n) { return uvm_zero(b->priv, runs, n); }

static int map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return uvm_map(b->priv, runs, n, bad);
}

static int unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return uvm_unmap(b->priv, runs, n, bad);
}

const struct vmem__ops vmem__uvm_ops = {
    .name = "uvm",
    .probe = probe,
    .open = open_all,
    .close = close_all,
    .memory = vmem__cuda_op_memory,
    .reserve = reserve,
    .unreserve = unreserve,
    .backdrop = backdrop,
    .arena_new = arena_new,
    .arena_free = arena_free,
    .zero = zero,
    .map = map,
    .unmap = unmap,
    .copy = vmem__cuda_op_copy,
    .fill = vmem__cuda_op_fill,
};
