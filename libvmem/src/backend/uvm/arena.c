// Arenas: the module creates their pages. Each arena may have a second mapping, its alias, which serves zeroing.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdlib.h>

#include "backend/uvm/uvm.h"

// Releases the arena's remaining pages. Returns false if some could not be released.
static bool release(struct uvm *u, struct uvm_arena *arena)
{
    while (arena->released < arena->pages) {
        uint64_t chunk = arena->released / arena->chunk, in = arena->released % arena->chunk;
        uint64_t left = arena->pages - arena->released, rest = arena->chunk - in;
        uint32_t done;
        int rc = vmem__kmod_release(&u->kmod, arena->first[chunk] + in, (uint32_t)(left < rest ? left : rest), &done);

        arena->released += done;
        if (rc)
            return false;
    }
    return true;
}

static void end_arena(struct uvm *u, struct uvm_arena *arena)
{
    if (arena->aliased)
        vmem__cuda_unreserve(&u->gpu.cuda, &u->gpu.backdrop, &arena->alias_cuda);
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

// Releases the arena's pages and frees it. If the module refuses, the arena waits on u->unreleased for retry().
static void give_up(struct vmem__backend *b, struct uvm_arena *arena)
{
    struct uvm *u = b->priv;

    if (release(u, arena)) {
        end_arena(u, arena);
        return;
    }
    atomic_fetch_add(&b->overhead, arena->pages * VMEM_PAGE_2M);
    pthread_mutex_lock(&u->lock);
    arena->next = u->unreleased;
    u->unreleased = arena;
    pthread_mutex_unlock(&u->lock);
}

// Tries again to release the arenas that the module refused to release before.
static void retry(struct vmem__backend *b)
{
    struct uvm *u = b->priv;
    struct uvm_arena *again, *arena;

    pthread_mutex_lock(&u->lock);
    again = u->unreleased;
    u->unreleased = NULL;
    pthread_mutex_unlock(&u->lock);
    while ((arena = again)) {
        again = arena->next;
        atomic_fetch_sub(&b->overhead, arena->pages * VMEM_PAGE_2M);
        give_up(b, arena);
    }
}

int vmem__uvm_arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    struct uvm *u = b->priv;
    uint64_t pages = a->size / VMEM_PAGE_2M, most = u->kmod.max_bytes / VMEM_PAGE_2M;
    uint32_t chunk = most < u->kmod.max_ops ? (uint32_t)most : u->kmod.max_ops;
    struct uvm_arena *arena = calloc(1, sizeof(*arena) + (pages + chunk - 1) / chunk * sizeof(arena->first[0]));

    if (!arena)
        return vmem__error(-ENOMEM, "no memory for an arena's handles");
    retry(b);
    arena->chunk = chunk;
    pthread_mutex_init(&arena->lock, NULL);
    while (arena->pages < pages) {
        uint64_t left = pages - arena->pages;
        uint32_t n = left < chunk ? (uint32_t)left : chunk;
        int rc = vmem__kmod_create(&u->kmod, VMEM_PAGE_2M, n, &arena->first[arena->pages / chunk]);

        if (!rc)
            arena->pages += n;
        if (!rc && arena->pages < pages)
            rc = vmem__interrupted(b);
        if (rc) {
            char text[VMEM__TEXT];

            vmem__keep_error(text);
            give_up(b, arena);
            return vmem__error(rc, "%s", text);
        }
    }
    a->priv = arena;
    return 0;
}

void vmem__uvm_arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    retry(b);
    give_up(b, a->priv); // also unmaps the alias
}

void vmem__uvm_arenas_end(struct vmem__backend *b)
{
    struct uvm *u = b->priv;
    struct uvm_arena *arena;

    retry(b);
    while ((arena = u->unreleased)) {
        u->unreleased = arena->next;
        end_arena(u, arena);
    }
    pthread_mutex_destroy(&u->lock);
}

// Creates the alias at first use: most arenas never have to zero a used page.
static int make_alias(struct vmem__backend *b, struct vmem__arena *a)
{
    struct uvm *u = b->priv;
    struct uvm_arena *arena = a->priv;
    struct vmem__run all = {.reservation = &arena->alias, .length = a->size, .arena = a, .page_size = VMEM_PAGE_2M};
    size_t bad;
    int rc = 0;

    pthread_mutex_lock(&arena->lock);
    if (!arena->aliased) {
        rc = vmem__cuda_reserve(&u->gpu.cuda, &u->gpu.backdrop, a->size, 2 * UVM_SEGMENT, &arena->alias_cuda);
        if (!rc) {
            arena->alias = (struct vmem__reservation){.addr = arena->alias_cuda.addr,
                                                      .length = a->size,
                                                      .priv = &arena->alias_cuda};
            all.addr = arena->alias.addr;
            rc = vmem__uvm_map(b, &all, 1, &bad);
            if (rc)
                vmem__cuda_unreserve(&u->gpu.cuda, &u->gpu.backdrop, &arena->alias_cuda);
        }
        arena->aliased = !rc;
    }
    pthread_mutex_unlock(&arena->lock);
    return rc;
}

static uint64_t alias_of(const struct vmem__run *run)
{
    const struct uvm_arena *arena = run->arena->priv;

    return arena->alias.addr + run->offset;
}

int vmem__uvm_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int rc = make_alias(b, runs[i].arena);

        if (rc)
            return rc;
    }
    return vmem__gpu_zero(b, runs, n, alias_of);
}
