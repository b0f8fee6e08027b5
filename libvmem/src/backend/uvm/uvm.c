// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdlib.h>

#include "backend/uvm/uvm.h"
#include "driver/abi.h"
#include "driver/stamp.h"

// Creating an arena takes one call whatever its size. Smaller arenas would need that call often.
#define ARENA_MIN (UINT64_C(32) << 20)
#define ARENA_MAX (UINT64_C(64) << 30)

static int probe(const struct vmem_options *opts)
{
    int rc = vmem__kmod_probe();

    return rc ? rc : vmem__cuda_probe(opts->device);
}

static int by_default(const struct vmem_options *opts) { return vmem__stamp_find("uvm", opts->device); }

// The right UVM descriptor is the one in which CUDA's mappings appear. A reserved probe range identifies it.
static int open_kmod(struct uvm *u, const uint8_t uuid[16])
{
    struct vmem__cuda_reservation r;
    int rc = vmem__cuda_reserve(&u->gpu.cuda, &u->gpu.backdrop, UVM_SEGMENT, UVM_SEGMENT, &r);

    if (rc)
        return rc;
    rc = vmem__kmod_open(&u->kmod, uuid, r.addr);
    vmem__cuda_unreserve(&u->gpu.cuda, &u->gpu.backdrop, &r);
    return rc;
}

static void close_all(struct vmem__backend *b, bool forked)
{
    struct uvm *u = b->priv;

    if (!forked) {
        vmem__uvm_arenas_end(b);
        vmem__backdrop_free(&u->gpu.cuda, &u->gpu.backdrop);
    }
    vmem__kmod_close(&u->kmod);
    vmem__cuda_close(&u->gpu.cuda, forked);
    free(u);
    b->priv = NULL;
}

static int open_all(struct vmem__backend *b, const struct vmem_options *opts)
{
    const uint64_t needed = UVM_VMEM_CAP_SPARSE | UVM_VMEM_CAP_TAKEOVER;
    struct uvm *u = calloc(1, sizeof(*u));
    int rc;

    if (!u)
        return vmem__error(-ENOMEM, "no memory for the backend");
    b->priv = u;
    u->kmod.fd = -1;
    u->kmod.syscalls = u->gpu.cuda.syscalls = &b->syscalls;
    u->gpu.cuda.beside_kernels = &b->beside_kernels;
    pthread_mutex_init(&u->lock, NULL);
    rc = vmem__cuda_open(&u->gpu.cuda, opts->device, &b->info);
    if (!rc)
        rc = vmem__backdrop_new(&u->gpu.cuda, &u->gpu.backdrop, UVM_SEGMENT);
    if (!rc)
        rc = open_kmod(u, b->info.device_uuid);
    if (!rc && (u->kmod.caps & needed) != needed)
        rc = vmem__error(-EOPNOTSUPP, "the module cannot replace CUDA's mappings on this GPU (capabilities 0x%llx)",
                         (unsigned long long)u->kmod.caps);
    if (!rc && !(u->kmod.page_sizes & VMEM_PAGE_2M))
        rc = vmem__error(-EOPNOTSUPP, "the module has no 2 MiB pages on this GPU");
    if (!rc && (u->kmod.max_ops < 1 || u->kmod.max_bytes < UVM_SEGMENT))
        rc = vmem__error(-EOPNOTSUPP, "the module takes %u elements and %llu bytes in one call: too few",
                         u->kmod.max_ops, (unsigned long long)u->kmod.max_bytes);
    if (rc) {
        close_all(b, false);
        return rc;
    }
    if (vmem__abi_release(b->info.driver, sizeof(b->info.driver)))
        b->info.driver[0] = '\0'; // informational only
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

// CUDA must know the first address. The first map would need the second segment, so it is activated here too.
static int reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    return vmem__gpu_reserve(b, r, 2 * UVM_SEGMENT);
}

const struct vmem__ops vmem__uvm_ops = {
    .name = "uvm",
    .probe = probe,
    .by_default = by_default,
    .open = open_all,
    .close = close_all,
    .reserve = reserve,
    .unreserve = vmem__gpu_unreserve,
    .backdrop = vmem__gpu_backdrop,
    .arena_new = vmem__uvm_arena_new,
    .arena_free = vmem__uvm_arena_free,
    .zero = vmem__uvm_zero,
    .map = vmem__uvm_map,
    .unmap = vmem__uvm_unmap,
    .restore = vmem__uvm_restore,
    VMEM__GPU_OPS,
};
