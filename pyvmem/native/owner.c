// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>

#include "core/error.h"
#include "driver/libcuda.h"
#include "native.h"

struct pv_owner {
    atomic_size_t count;
    pv_owner *parent;
    void (*destroy)(void *); // NULL: it owns nothing (yet)
    void *thing;
};

pv_owner *pv_owner_new(void)
{
    pv_owner *owner = calloc(1, sizeof(*owner));
    if (!owner)
        return NULL;
    atomic_init(&owner->count, 1);
    return owner;
}

void pv_owner_set_parent(pv_owner *owner, pv_owner *parent)
{
    pv_owner_keep(parent);
    owner->parent = parent;
}

void pv_owner_set(pv_owner *owner, void (*destroy)(void *), void *thing)
{
    owner->thing = thing;
    owner->destroy = destroy;
}

void pv_owner_keep(pv_owner *owner) { atomic_fetch_add_explicit(&owner->count, 1, memory_order_relaxed); }

void pv_owner_drop(pv_owner *owner)
{
    while (owner && atomic_fetch_sub_explicit(&owner->count, 1, memory_order_acq_rel) == 1) {
        pv_owner *parent = owner->parent;
        if (owner->destroy)
            owner->destroy(owner->thing);
        free(owner);
        owner = parent;
    }
}

// ---- contexts -----------------------------------------------------------------------------------------------

static void destroy_context(void *thing) { vmem_context_destroy(thing); }

int pv_own_context(pv_owner *owner, const struct vmem_options *opts, vmem_context **ctx)
{
    int rc = vmem_context_create(opts, ctx);
    if (rc)
        return rc;
    pv_owner_set(owner, destroy_context, *ctx);
    return pv_interruptible(*ctx);
}

static vmem_context *context_of(const pv_owner *child) { return child->parent->thing; }

// ---- ranges -------------------------------------------------------------------------------------------------

struct range {
    vmem_context *ctx;
    uint64_t addr;
    int device; // of the tensors that stand over it, whose kernels may still be queued; -1: none
};

// A tensor may be dropped while kernels that use it are still queued, on streams that nobody here knows.
static void wait_for_kernels(int device)
{
    struct vmem_info info = {.size = sizeof info};
    struct vmem__cuda cu = {0};
    if (vmem__cuda_open(&cu, device, &info))
        return;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*synchronize)(void) = library ? (int (*)(void))dlsym(library, "cuCtxSynchronize") : NULL;
    if (synchronize && !vmem__cuda_enter(&cu)) {
        synchronize();
        vmem__cuda_leave(&cu);
    }
    vmem__cuda_close(&cu, false);
}

static void destroy_range(void *thing)
{
    struct range *r = thing;
    struct vmem_reservation_info info = {.size = sizeof info};
    // In a forked child every call refuses, which is right: the parent still uses it all.
    if (r->device >= 0 && !vmem_reservation_query(r->ctx, r->addr, &info))
        wait_for_kernels(r->device);
    vmem_unreserve(r->ctx, r->addr);
    free(r);
}

int pv_own_range(pv_owner *owner, uint64_t length, uint32_t flags, int device, uint64_t *addr)
{
    struct range *r = malloc(sizeof(*r));
    if (!r)
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    *r = (struct range){.ctx = context_of(owner), .device = device};
    int rc = vMemReserve(r->ctx, length, flags, &r->addr);
    if (rc) {
        free(r);
        return rc;
    }
    *addr = r->addr;
    pv_owner_set(owner, destroy_range, r);
    return 0;
}

#define FEW 64 // elements of a batch that are built on the stack

int pv_range_map(pv_owner *owner, uint64_t offset, uint64_t page_size, const vmem_page *pages, size_t n, uint32_t flags,
                 size_t *bad)
{
    const struct range *r = owner->thing;
    struct vmem_map_op few[FEW], *ops = few;
    if (n > FEW && !(ops = malloc(n * sizeof(*ops))))
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", n);
    for (size_t i = 0; i < n; i++)
        ops[i] = (struct vmem_map_op){r->addr + offset + i * page_size, pages[i]};
    int rc = vMemMapBatch(r->ctx, ops, n, flags, bad);
    if (ops != few)
        free(ops);
    return rc;
}

int pv_range_map_batch(pv_owner *owner, const struct vmem_map_op *ops, size_t n, uint32_t flags, size_t *bad)
{
    const struct range *r = owner->thing;
    return vMemMapBatch(r->ctx, ops, n, flags, bad);
}

int pv_range_unmap(pv_owner *owner, uint64_t offset, uint64_t length)
{
    const struct range *r = owner->thing;
    return vMemUnmap(r->ctx, r->addr + offset, length);
}

int pv_range_unmap_batch(pv_owner *owner, const struct vmem_unmap_op *ops, size_t n, size_t *bad)
{
    const struct range *r = owner->thing;
    return vMemUnmapBatch(r->ctx, ops, n, bad);
}

int pv_range_commit(pv_owner *owner, uint64_t offset, uint64_t length, uint64_t page_size, uint32_t flags,
                    uint64_t *bytes)
{
    const struct range *r = owner->thing;
    const struct vmem_range range = {r->addr + offset, length};
    return vmem_commit(r->ctx, &range, 1, page_size, flags, bytes);
}

int pv_range_backdrop(pv_owner *owner, uint64_t offset, uint64_t length)
{
    const struct range *r = owner->thing;
    return vmem_backdrop(r->ctx, r->addr + offset, length);
}

int pv_range_mapped(pv_owner *owner, uint64_t *bytes)
{
    const struct range *r = owner->thing;
    struct vmem_reservation_info info = {.size = sizeof info};
    int rc = vmem_reservation_query(r->ctx, r->addr, &info);
    if (!rc)
        *bytes = info.mapped;
    return rc;
}

int pv_range_next_mapped(pv_owner *owner, uint64_t offset, uint64_t length, uint64_t *first, uint64_t *found)
{
    const struct range *r = owner->thing;
    struct vmem_range run;
    int rc = vmem_next_mapped(r->ctx, r->addr + offset, length, &run);
    if (!rc) {
        *first = run.addr - r->addr;
        *found = run.length;
    }
    return rc;
}

// ---- pages --------------------------------------------------------------------------------------------------

struct pages {
    vmem_context *ctx;
    size_t n;
    vmem_page page[];
};

static void destroy_pages(void *thing)
{
    struct pages *pages = thing;
    vmem_drop(pages->ctx, pages->page, pages->n);
    free(pages);
}

int pv_own_pages(pv_owner *owner, uint64_t page_size, size_t n, uint32_t flags, vmem_page *out)
{
    struct pages *pages =
        n > (SIZE_MAX - sizeof(*pages)) / sizeof(*out) ? NULL : malloc(sizeof(*pages) + n * sizeof(*out));
    if (!pages)
        return vmem__error(-ENOMEM, "n %zu: no memory for so many handles", n);
    pages->ctx = context_of(owner);
    pages->n = n;
    int rc = vMemCreate(pages->ctx, page_size, n, flags, pages->page);
    if (rc) {
        free(pages);
        return rc;
    }
    memcpy(out, pages->page, n * sizeof(*out));
    pv_owner_set(owner, destroy_pages, pages);
    return 0;
}

void pv_disown_pages(pv_owner *owner)
{
    struct pages *pages = owner->thing;
    pages->n = 0;
}
