// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>

#include "driver/libcuda.h"
#include "native.h"

struct pv_owner {
    atomic_size_t count;
    pv_owner *parent;
    void (*destroy)(void *);
    void *thing;
};

pv_owner *pv_owner_new(pv_owner *parent, void (*destroy)(void *), void *thing)
{
    pv_owner *owner = malloc(sizeof(*owner));
    if (!owner)
        return NULL;
    atomic_init(&owner->count, 1);
    owner->parent = parent;
    owner->destroy = destroy;
    owner->thing = thing;
    if (parent)
        pv_owner_keep(parent);
    return owner;
}

void pv_owner_keep(pv_owner *owner)
{
    atomic_fetch_add_explicit(&owner->count, 1, memory_order_relaxed);
}

void pv_owner_drop(pv_owner *owner)
{
    while (owner && atomic_fetch_sub_explicit(&owner->count, 1, memory_order_acq_rel) == 1) {
        pv_owner *parent = owner->parent;
        owner->destroy(owner->thing);
        free(owner);
        owner = parent;
    }
}

static void destroy_context(void *thing)
{
    vmem_context_destroy(thing);
}

int pv_own_context(const struct vmem_options *opts, pv_owner **owner, vmem_context **ctx)
{
    int rc = vmem_context_create(opts, ctx);
    if (rc)
        return rc;
    *owner = pv_owner_new(NULL, destroy_context, *ctx);
    if (!*owner) {
        vmem_context_destroy(*ctx);
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    }
    return 0;
}

struct range {
    vmem_context *ctx;
    struct vmem_range range;
    int with_pages;
};

// A tensor may be dropped while kernels that use it are still queued, on streams that nobody here knows.
static void wait_for_kernels(vmem_context *ctx)
{
    struct vmem_info info;
    struct vmem__cuda cu = {0};
    if (vmem_context_info(ctx, &info) || !(info.caps & VMEM_CAP_GPU) || vmem__cuda_open(&cu, info.device, &info))
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
    // In a forked child every call refuses, which is right: the parent still uses it all.
    if (r->with_pages) {
        wait_for_kernels(r->ctx);
        vmem_decommit(r->ctx, &r->range, 1, NULL);
    }
    vMemUnmap(r->ctx, r->range.addr, r->range.length);
    vMemFree(r->ctx, r->range.addr);
    free(r);
}

int pv_own_range(pv_owner *context, vmem_context *ctx, uint64_t length, uint32_t flags, int with_pages,
                 pv_owner **owner, uint64_t *addr)
{
    struct range *r = malloc(sizeof(*r));
    if (!r)
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    *r = (struct range){.ctx = ctx, .range = {.length = length}, .with_pages = with_pages};
    int rc = vMemReserve(ctx, length, flags, &r->range.addr);
    if (!rc) {
        *addr = r->range.addr;
        *owner = pv_owner_new(context, destroy_range, r);
        if (*owner)
            return 0;
        vMemFree(ctx, *addr);
        rc = vmem__error(-ENOMEM, "no memory for bookkeeping");
    }
    free(r);
    return rc;
}

struct pages {
    vmem_context *ctx;
    size_t n;
    vmem_page page[];
};

static void destroy_pages(void *thing)
{
    struct pages *pages = thing;
    if (vMemReleaseBatch(pages->ctx, pages->page, pages->n, NULL))
        for (size_t i = 0; i < pages->n; i++)
            vMemRelease(pages->ctx, pages->page[i]);
    free(pages);
}

int pv_own_pages(pv_owner *context, vmem_context *ctx, const vmem_page *page, size_t n, pv_owner **owner)
{
    struct pages *pages = malloc(sizeof(*pages) + n * sizeof(*page));
    if (!pages)
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    pages->ctx = ctx;
    pages->n = n;
    memcpy(pages->page, page, n * sizeof(*page));
    *owner = pv_owner_new(context, destroy_pages, pages);
    if (!*owner) {
        free(pages);
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    }
    return 0;
}
