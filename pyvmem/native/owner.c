// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "driver/stamp.h"
#include "native.h"

struct pv_owner {
    atomic_size_t count;
    pv_owner *parent;
    void (*destroy)(void *); // NULL: it owns nothing (yet)
    void *thing;
    atomic_size_t ended; // tensors
    vmem_context *ctx;   // kernels may access the memory of thing as long as they run on its device; NULL: none can
    pv_owner *next;      // in the list of those whose end is put off
};

pv_owner *pv_owner_new(void)
{
    pv_end_put_off();
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

void pv_owner_end_tensor(pv_owner *owner)
{
    if (!owner) // an exception came before the tensor had one
        return;
    atomic_fetch_add_explicit(&owner->ended, 1, memory_order_relaxed);
    pv_owner_drop(owner);
}

size_t pv_owner_ended_tensors(const pv_owner *owner)
{
    return atomic_load_explicit(&owner->ended, memory_order_relaxed);
}

// ---- the end --------------------------------------------------------------------------------------------------

// A list without a lock: a thread that holds one may not exist after a fork.
static _Atomic(pv_owner *) put_off;

// Ends what an owner without references owns, once no kernel runs: those that use it may be queued, on streams that nobody
// here knows. While a graph is captured, nobody can wait for them, and the end is put off. Otherwise returns the parent.
static pv_owner *end(pv_owner *owner)
{
    pv_owner *parent = owner->parent;
    if (owner->ctx) {
        char text[VMEM__TEXT]; // of a failed call that somebody is about to read
        vmem__keep_error(text);
        const int rc = pv_wait_for_kernels(owner->ctx);
        vmem__error(0, "%s", text);
        if (rc == -EBUSY) {
            owner->next = put_off;
            while (!atomic_compare_exchange_weak(&put_off, &owner->next, owner))
                ;
            return NULL;
        }
    }
    if (owner->destroy)
        owner->destroy(owner->thing);
    free(owner);
    return parent;
}

static bool drop_one(pv_owner *owner)
{
    return owner && atomic_fetch_sub_explicit(&owner->count, 1, memory_order_acq_rel) == 1;
}

void pv_owner_drop(pv_owner *owner)
{
    if (!drop_one(owner))
        return;
    pv_end_put_off();
    do
        owner = end(owner);
    while (drop_one(owner));
}

void pv_end_put_off(void)
{
    if (!put_off)
        return;
    for (pv_owner *owner = atomic_exchange(&put_off, NULL), *next; owner; owner = next) {
        next = owner->next;
        do
            owner = end(owner);
        while (drop_one(owner));
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

// Gives an owner what a call has made, if it has. ctx: as in struct pv_owner.
static int own(pv_owner *owner, int rc, void (*destroy)(void *), void *thing, vmem_context *ctx)
{
    if (!rc) {
        pv_owner_set(owner, destroy, thing);
        owner->ctx = ctx;
    }
    return rc;
}

static vmem_context *context_of(const pv_owner *child) { return child->parent->thing; }

// ---- ranges -------------------------------------------------------------------------------------------------

struct range {
    vmem_context *ctx;
    uint64_t addr;
};

static void destroy_range(void *thing)
{
    struct range *r = thing;
    vmem_unreserve(r->ctx, r->addr);
    free(r);
}

int pv_own_range(pv_owner *owner, uint64_t length, uint32_t flags, uint64_t *addr)
{
    struct range *r = malloc(sizeof(*r));
    if (!r)
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    r->ctx = context_of(owner);
    int rc = vMemReserve(r->ctx, length, flags, &r->addr);
    if (rc) {
        free(r);
        return rc;
    }
    *addr = r->addr;
    return own(owner, 0, destroy_range, r, r->ctx);
}

#define FEW 64 // elements of a batch that are built on the stack

int pv_map(vmem_context *ctx, uint64_t addr, uint64_t page_size, const vmem_page *pages, size_t n, uint32_t flags,
           size_t *bad)
{
    struct vmem_map_op few[FEW], *ops = few;
    if (n > FEW && !(ops = malloc(n * sizeof(*ops))))
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", n);
    for (size_t i = 0; i < n; i++)
        ops[i] = (struct vmem_map_op){addr + i * page_size, pages[i]};
    int rc = vMemMapBatch(ctx, ops, n, flags, bad);
    if (ops != few)
        free(ops);
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
    return own(owner, 0, destroy_pages, pages, pages->ctx);
}

void pv_disown_pages(pv_owner *owner)
{
    struct pages *pages = owner->thing;
    pages->n = 0;
    owner->ctx = NULL;
}

// ---- caches, pools, blocks, leases --------------------------------------------------------------------------

static void destroy_kv(void *kv) { vmem_kv_destroy(kv); }
static void destroy_pool(void *pool) { vmem_kv_pool_destroy(pool); }
static void destroy_blocks(void *blocks) { vmem_blocks_destroy(blocks); }
static void close_lease(void *place) { vmem_torch_close((uint32_t)(uintptr_t)place); }
static void drop_context(void *context) { pv_owner_drop(context); }

int pv_own_kv(pv_owner *owner, vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **kv)
{
    int rc = vmem_kv_create(ctx, cfg, kv);
    return own(owner, rc, destroy_kv, *kv, ctx);
}

int pv_own_pool(pv_owner *owner, const struct vmem_kv_pool_config *cfg, vmem_kv_pool **pool)
{
    int rc = vmem_kv_pool_create(cfg, pool);
    return own(owner, rc, destroy_pool, *pool, NULL);
}

int pv_own_blocks(pv_owner *owner, vmem_context *ctx, const struct vmem_blocks_config *cfg, vmem_blocks **blocks)
{
    int rc = vmem_blocks_create(ctx, cfg, blocks);
    return own(owner, rc, destroy_blocks, *blocks, ctx);
}

static void destroy_common(void *common) { vmem_common_destroy(common); }
static void destroy_hold(void *hold) { vmem_kv_hold_destroy(hold); }

int pv_own_common(pv_owner *owner, vmem_context *ctx, uint64_t part_bytes, uint32_t parts, vmem_common **common,
                  uint64_t *addr)
{
    int rc = vmem_common_create(ctx, part_bytes, parts, common, addr);
    return own(owner, rc, destroy_common, *common, ctx);
}

int pv_own_hold(pv_owner *owner, vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_kv_hold_config *cfg,
                vmem_kv_hold **hold)
{
    int rc = vmem_kv_hold_create(ctx, pool, cfg, hold);
    return own(owner, rc, destroy_hold, *hold, NULL);
}

int pv_own_torch(pv_owner *owner, pv_owner *context, vmem_context *ctx, vmem_kv_pool *pool,
                 const struct vmem_torch_config *cfg, uint32_t *place)
{
    struct vmem_torch_config c = *cfg;
    c.ended = drop_context;
    c.arg = context;
    pv_owner_keep(context); // for the lease, which may outlive its owner: until PyTorch has freed its last segment
    int rc = vmem_torch_open(ctx, pool, &c, place);
    if (rc)
        pv_owner_drop(context);
    return own(owner, rc, close_lease, (void *)(uintptr_t)*place, NULL); // leases wait for kernels themselves
}

// ---- self-test ----------------------------------------------------------------------------------------------

int pv_stamp_name(const char *backend, int device, char *name, size_t size)
{
    return vmem__stamp_name(backend, device, name, size);
}

int pv_stamp_folder(unsigned n, char *path, size_t size) { return vmem__stamp_folder(n, path, size); }

void pv_fence(void) { atomic_thread_fence(memory_order_seq_cst); }
