// Second mappings of arenas, through which their memory is zeroed, made when that happens first.
//
// An address that CUDA accepts takes a reservation and segments of the backdrop, which cost more than the arena itself if
// that is one block. Aliases of such arenas are therefore places in reservations that they share.
//
// SPDX-License-Identifier: MIT
#include "backend/stock/stock.h"

#include <errno.h>
#include <stdlib.h>

#define SHARED_BYTES (UINT64_C(1) << 30)
#define PLACES (SHARED_BYTES / STOCK_BLOCK)

struct stock_shared {
    struct stock_reservation reservation;
    uint64_t taken[PLACES / 64]; // one bit per block
    uint32_t n_taken;
    struct stock_shared *next;
};

// Takes a place in a shared reservation, which it makes if all are full. The caller holds the lock.
static int take_place(struct stock *s, struct stock_alias *alias)
{
    struct stock_shared *shared;
    uint64_t place = 0;
    int rc;

    for (shared = s->shared; shared && shared->n_taken == PLACES;)
        shared = shared->next;
    if (!shared) {
        shared = calloc(1, sizeof(*shared));
        rc = shared ? vmem__stock_reservation_new(s, SHARED_BYTES, false, &shared->reservation)
                    : vmem__error(-ENOMEM, "no memory for bookkeeping of an allocation");
        if (rc) {
            free(shared);
            return rc;
        }
        shared->next = s->shared;
        s->shared = shared;
    }
    while (vmem__bit(shared->taken, place))
        place++;
    vmem__bit_set(shared->taken, place, true);
    shared->n_taken++;
    *alias = (struct stock_alias){.addr = shared->reservation.cuda.addr + place * STOCK_BLOCK,
                                  .reservation = &shared->reservation,
                                  .shared = shared};
    return 0;
}

// Gives the place back. A reservation that has only free places goes, if another one has one. The caller holds the lock.
static void give_place(struct stock *s, const struct stock_alias *alias)
{
    struct stock_shared *shared = alias->shared, **at = &s->shared;
    bool room = false;

    vmem__bit_set(shared->taken, (alias->addr - shared->reservation.cuda.addr) / STOCK_BLOCK, false);
    shared->n_taken--;
    for (struct stock_shared *other = s->shared; other; other = other->next)
        room |= other != shared && other->n_taken < PLACES;
    if (shared->n_taken || !room)
        return;
    while (*at != shared)
        at = &(*at)->next;
    *at = shared->next;
    vmem__stock_reservation_free(s, &shared->reservation);
    free(shared);
}

static int map_alias(struct stock *s, uint64_t size, struct stock_arena *arena)
{
    const struct stock_slice nothing = {0}, all = {arena->memory, 0};
    struct stock_alias alias = {0};
    int rc;

    if (size == STOCK_BLOCK) {
        rc = take_place(s, &alias);
    } else {
        rc = vmem__stock_reservation_new(s, size, true, &arena->own);
        alias.reservation = &arena->own;
        alias.addr = arena->own.cuda.addr;
    }
    if (rc)
        return rc;
    rc = vmem__stock_put(s, alias.reservation, alias.addr, size, all, nothing, false);
    if (!rc)
        arena->alias = alias;
    else if (alias.shared)
        give_place(s, &alias);
    else
        vmem__stock_reservation_free(s, &arena->own);
    return rc;
}

int vmem__stock_aliases_map(struct stock *s, const struct vmem__run *runs, size_t n)
{
    int rc = 0;

    pthread_mutex_lock(&s->alias_lock);
    for (size_t i = 0; !rc && i < n; i++) {
        struct stock_arena *arena = runs[i].arena->priv;

        if (!arena->alias.addr)
            rc = map_alias(s, runs[i].arena->size, arena);
    }
    pthread_mutex_unlock(&s->alias_lock);
    return rc;
}

void vmem__stock_alias_free(struct stock *s, uint64_t size, struct stock_arena *arena)
{
    const struct stock_slice nothing = {0}, all = {arena->memory, 0};
    struct stock_alias *alias = &arena->alias;

    if (!alias->addr)
        return;
    if (!alias->shared) {
        vmem__stock_reservation_free(s, &arena->own);
    } else if (!vmem__stock_put(s, alias->reservation, alias->addr, size, nothing, all, false)) {
        pthread_mutex_lock(&s->alias_lock);
        give_place(s, alias);
        pthread_mutex_unlock(&s->alias_lock);
    } // otherwise the place still shows the memory, and nothing else may come there
}

void vmem__stock_aliases_end(struct stock *s, bool forked)
{
    struct stock_shared *shared;

    while ((shared = s->shared)) {
        s->shared = shared->next;
        if (!forked)
            vmem__stock_reservation_free(s, &shared->reservation);
        free(shared);
    }
    pthread_mutex_destroy(&s->alias_lock);
}
