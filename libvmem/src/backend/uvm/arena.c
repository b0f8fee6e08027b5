// Ranges and arenas: addresses that CUDA reserves, memory that the module creates.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/uvm/uvm.h"

int uvm_reservation_new(struct uvm *u, uint64_t length, struct uvm_reservation *reservation)
{
    int err = vmem__cuda_reserve(&u->cuda, &u->backdrop, length, &reservation->cuda);

    if (err)
        return err;
    // CUDA must know the first address; the segment after it is what the first map would ask for.
    err = vmem__cuda_activate(&u->cuda, &u->backdrop, &reservation->cuda, reservation->cuda.addr, 2 * UVM_SEGMENT);
    if (err) {
        vmem__cuda_unreserve(&u->cuda, &u->backdrop, &reservation->cuda);
        return err;
    }
    pthread_mutex_init(&reservation->lock, NULL);
    return 0;
}

void uvm_reservation_free(struct uvm *u, struct uvm_reservation *reservation)
{
    vmem__cuda_unreserve(&u->cuda, &u->backdrop, &reservation->cuda);
    pthread_mutex_destroy(&reservation->lock);
}

int uvm_activate(struct uvm *u, struct uvm_reservation *reservation, uint64_t addr, uint64_t length)
{
    int err;

    pthread_mutex_lock(&reservation->lock);
    err = vmem__cuda_activate(&u->cuda, &u->backdrop, &reservation->cuda, addr, length);
    pthread_mutex_unlock(&reservation->lock);
    return err;
}

// Releases what is left of an arena's pages; false: not all.
static bool release(struct uvm *u, struct uvm_arena *arena)
{
    while (arena->released < arena->pages) {
        uint64_t chunk = arena->released / arena->chunk, in = arena->released % arena->chunk;
        uint64_t left = arena->pages - arena->released, rest = arena->chunk - in;
        uint32_t done;
        int err = vmem__kmod_release(&u->kmod, arena->first[chunk] + in, (uint32_t)(left < rest ? left : rest), &done);

        arena->released += done;
        if (err)
            return false;
    }
    return true;
}

static void end_arena(struct uvm *u, struct uvm_arena *arena)
{
    if (arena->aliased)
        uvm_reservation_free(u, &arena->alias_reservation);
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

// Releases and frees an arena, now or later.
static void give_up(struct uvm *u, struct uvm_arena *arena)
{
    if (release(u, arena)) {
        end_arena(u, arena);
        return;
    }
    atomic_fetch_add(u->overhead, arena->pages * VMEM_PAGE_2M);
    pthread_mutex_lock(&u->lock);
    arena->next = u->unreleased;
    u->unreleased = arena;
    pthread_mutex_unlock(&u->lock);
}

// Tries again to release what the module would not.
static void retry(struct uvm *u)
{
    struct uvm_arena *again, *arena;

    pthread_mutex_lock(&u->lock);
    again = u->unreleased;
    u->unreleased = NULL;
    pthread_mutex_unlock(&u->lock);
    while ((arena = again)) {
        again = arena->next;
        atomic_fetch_sub(u->overhead, arena->pages * VMEM_PAGE_2M);
        give_up(u, arena);
    }
}

int uvm_arena_new(struct uvm *u, struct vmem__arena *a)
{
    uint64_t pages = a->size / VMEM_PAGE_2M, most = u->kmod.max_bytes / VMEM_PAGE_2M;
    uint32_t chunk = most < u->kmod.max_ops ? (uint32_t)most : u->kmod.max_ops;
    struct uvm_arena *arena = calloc(1, sizeof(*arena) + (pages + chunk - 1) / chunk * sizeof(arena->first[0]));

    if (!arena)
        return vmem__error(-ENOMEM, "no memory for an arena's handles");
    retry(u);
    arena->chunk = chunk;
    pthread_mutex_init(&arena->lock, NULL);
    while (arena->pages < pages) {
        uint64_t left = pages - arena->pages;
        uint32_t n = left < chunk ? (uint32_t)left : chunk;
        int err = vmem__kmod_create(&u->kmod, n, &arena->first[arena->pages / chunk]);

        if (!err)
            arena->pages += n;
        if (!err && arena->pages < pages && u->backend)
            err = vmem__interrupted(u->backend);
        if (err) {
            char text[256];

            snprintf(text, sizeof(text), "%s", vmem_last_error());
            give_up(u, arena);
            return vmem__error(err, "%s", text);
        }
    }
    a->priv = arena;
    return 0;
}

void uvm_arena_free(struct uvm *u, struct vmem__arena *a)
{
    retry(u);
    give_up(u, a->priv); // also unmaps the alias
}

void uvm_arenas_end(struct uvm *u)
{
    struct uvm_arena *arena;

    retry(u);
    while ((arena = u->unreleased)) {
        u->unreleased = arena->next;
        end_arena(u, arena);
    }
    pthread_mutex_destroy(&u->lock);
}

// Made at the first need: most arenas are never asked for zeroed pages that were used before.
static int make_alias(struct uvm *u, struct vmem__arena *a)
{
    struct uvm_arena *arena = a->priv;
    struct vmem__run all = {.reservation = &arena->alias, .length = a->size, .arena = a, .page_size = VMEM_PAGE_2M};
    size_t bad;
    int err = 0;

    pthread_mutex_lock(&arena->lock);
    if (!arena->aliased) {
        err = uvm_reservation_new(u, a->size, &arena->alias_reservation);
        if (!err) {
            arena->alias = (struct vmem__reservation){.addr = arena->alias_reservation.cuda.addr,
                                                      .length = a->size,
                                                      .priv = &arena->alias_reservation};
            all.addr = arena->alias.addr;
            err = uvm_map(u, &all, 1, &bad);
            if (err)
                uvm_reservation_free(u, &arena->alias_reservation);
        }
        arena->aliased = !err;
    }
    pthread_mutex_unlock(&arena->lock);
    return err;
}

static uint64_t alias_of(const struct vmem__run *run)
{
    const struct uvm_arena *arena = run->arena->priv;

    return arena->alias.addr + run->offset;
}

int uvm_zero(struct uvm *u, const struct vmem__run *runs, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int err = make_alias(u, runs[i].arena);

        if (err)
            return err;
    }
    return vmem__cuda_zero(&u->cuda, runs, n, alias_of);
}
