// The cuda backend: CUDA's own virtual memory management, pages of 2 MiB, an arena for each page.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver/abi.h"
#include "driver/reserve.h"

#define PAGE VMEM_PAGE_2M
// What is made readable at once in a reservation with a backdrop.
#define BACKDROP_AHEAD (UINT64_C(32) << 20)

struct cuda {
    struct vmem__cuda cuda;         // first: vmem__cuda_op_*()
    struct vmem__backdrop backdrop; // one page
};

// A segment of the reservation counts as active when a page or the backdrop is mapped there. Without
// VMEM_RESERVE_BACKDROP it never is the backdrop.
struct cuda_reservation {
    struct vmem__cuda_reservation r;
    pthread_mutex_t lock; // held over CUDA's calls for the reservation, which wait for each other inside CUDA anyway
};

struct cuda_arena {
    uint64_t handle;
    bool clean; // zeroed, or used since. CUDA memory can be filled only where it is mapped, so the next map does it
};

// Runs that follow each other in one reservation's addresses.
struct group {
    const struct vmem__run *runs;
    size_t n;
    struct vmem__reservation *reservation;
    uint64_t addr, length;
};

static struct group next_group(const struct vmem__run *runs, size_t n)
{
    struct group g = {runs, 1, runs->reservation, runs->addr, runs->length};

    while (g.n < n && runs[g.n].reservation == g.reservation && runs[g.n].addr == g.addr + g.length)
        g.length += runs[g.n++].length;
    return g;
}

static struct cuda_reservation *reservation_of(const struct group *g) { return g->reservation->priv; }

static uint64_t segment_of(const struct group *g, uint64_t addr) { return (addr - reservation_of(g)->r.addr) / PAGE; }

static bool has_backdrop(const struct group *g) { return g->reservation->flags & VMEM_RESERVE_BACKDROP; }

// ---- address space ------------------------------------------------------------------------------------------

static int cuda_reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct cuda *c = b->priv;
    struct cuda_reservation *reservation = malloc(sizeof(*reservation));
    int err = reservation ? vmem__cuda_reserve(&c->cuda, &c->backdrop, r->length, &reservation->r)
                          : vmem__error(-ENOMEM, "reserve: no memory");

    if (!err && (r->flags & VMEM_RESERVE_BACKDROP)) { // CUDA must know the first address
        err = vmem__cuda_activate(&c->cuda, &c->backdrop, &reservation->r, reservation->r.addr, BACKDROP_AHEAD);
        if (err)
            vmem__cuda_unreserve(&c->cuda, &c->backdrop, &reservation->r);
    }
    if (err) {
        free(reservation);
        return err;
    }
    pthread_mutex_init(&reservation->lock, NULL);
    r->addr = reservation->r.addr;
    r->priv = reservation;
    return 0;
}

static void cuda_unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct cuda *c = b->priv;
    struct cuda_reservation *reservation = r->priv;

    vmem__cuda_unreserve(&c->cuda, &c->backdrop, &reservation->r);
    pthread_mutex_destroy(&reservation->lock);
    free(reservation);
}

static int cuda_backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    struct cuda *c = b->priv;
    struct cuda_reservation *reservation = r->priv;
    int err;

    pthread_mutex_lock(&reservation->lock);
    err = vmem__cuda_activate(&c->cuda, &c->backdrop, &reservation->r, addr, length);
    pthread_mutex_unlock(&reservation->lock);
    return err;
}

// ---- physical memory ----------------------------------------------------------------------------------------

static int cuda_arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    struct cuda *c = b->priv;
    struct cuda_arena *arena = malloc(sizeof(*arena));
    int err = arena ? vmem__cuda_enter(&c->cuda) : vmem__error(-ENOMEM, "arena: no memory");

    if (!err) {
        err = vmem__cuda_create(&c->cuda, a->size, &arena->handle);
        vmem__cuda_leave(&c->cuda);
    }
    if (err) {
        free(arena);
        return err;
    }
    arena->clean = false;
    a->priv = arena;
    return 0;
}

static void cuda_arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    struct cuda *c = b->priv;
    struct cuda_arena *arena = a->priv;

    if (vmem__cuda_enter(&c->cuda) == 0) {
        vmem__cuda_release(&c->cuda, arena->handle);
        vmem__cuda_leave(&c->cuda);
    }
    free(arena);
}

static int cuda_zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    (void)b;
    for (size_t i = 0; i < n; i++)
        ((struct cuda_arena *)runs[i].arena->priv)->clean = false;
    return 0;
}

// ---- mapping ------------------------------------------------------------------------------------------------

// Unmaps whatever is mapped in the group's addresses.
static int clear(struct cuda *c, const struct group *g)
{
    uint64_t *active = reservation_of(g)->r.active, end = segment_of(g, g->addr) + g->length / PAGE, n;
    int err = 0;

    for (uint64_t i = segment_of(g, g->addr); !err && i < end; i += n) {
        bool mapped = vmem__bit(active, i);

        for (n = 1; i + n < end && vmem__bit(active, i + n) == mapped; n++)
            ;
        if (!mapped)
            continue;
        err = vmem__cuda_unmap(&c->cuda, reservation_of(g)->r.addr + i * PAGE, n * PAGE);
        for (uint64_t k = 0; !err && k < n; k++)
            vmem__bit_set(active, i + k, false);
    }
    return err;
}

enum what { NEW, OLD };

static struct vmem__arena *arena_of(const struct vmem__run *run, enum what what)
{
    return what == NEW ? run->arena : run->old_arena;
}

// Maps the new or the old arenas of the group's runs over addresses where nothing is mapped; a run may have no old
// arena. On failure *bad is the run, and some are mapped.
static int put(struct cuda *c, const struct group *g, enum what what, size_t *bad)
{
    uint64_t *active = reservation_of(g)->r.active;
    int err = 0;

    for (size_t i = 0; !err && i < g->n; i++) {
        const struct vmem__run *run = &g->runs[i];
        struct vmem__arena *arena = arena_of(run, what);

        *bad = i;
        if (!arena)
            continue;
        err = vmem__cuda_map(&c->cuda, run->addr, run->length, ((struct cuda_arena *)arena->priv)->handle);
        if (!err)
            vmem__bit_set(active, segment_of(g, run->addr), true);
    }
    // Access in one call over what follows each other.
    for (size_t i = 0, n; !err && i < g->n; i += n) {
        bool mapped = arena_of(&g->runs[i], what);

        for (n = 1; i + n < g->n && (bool)arena_of(&g->runs[i + n], what) == mapped; n++)
            ;
        if (mapped) {
            *bad = i;
            err = vmem__cuda_allow(&c->cuda, g->runs[i].addr, n * PAGE);
        }
    }
    return err;
}

static int refill(struct cuda *c, const struct group *g)
{
    return has_backdrop(g) ? vmem__cuda_activate(&c->cuda, &c->backdrop, &reservation_of(g)->r, g->addr, g->length) : 0;
}

// Back to what was there before a map: the old arenas, or the backdrop.
static void restore(struct cuda *c, const struct group *g, enum what what)
{
    size_t bad;

    if (clear(c, g) == 0) {
        put(c, g, what, &bad);
        refill(c, g);
    }
}

// Zeroes what is mapped for the first time since it was created or last asked to be zero.
static int clean(struct cuda *c, const struct group *g)
{
    int result = CUDA_SUCCESS, sync;
    bool any = false;

    for (size_t i = 0, n; result == CUDA_SUCCESS && i < g->n; i += n) {
        bool dirty = !((struct cuda_arena *)g->runs[i].arena->priv)->clean;

        for (n = 1; i + n < g->n && !((struct cuda_arena *)g->runs[i + n].arena->priv)->clean == dirty; n++)
            ;
        if (dirty)
            result = c->cuda.fn.memset_async(g->runs[i].addr, 0, n * PAGE, c->cuda.stream);
        any |= dirty;
    }
    if (!any)
        return 0;
    sync = c->cuda.fn.stream_sync(c->cuda.stream);
    for (size_t i = 0; result == CUDA_SUCCESS && sync == CUDA_SUCCESS && i < g->n; i++)
        ((struct cuda_arena *)g->runs[i].arena->priv)->clean = true;
    return vmem__cuda_error(&c->cuda.fn, result ? result : sync, "zero");
}

static int map_group(struct cuda *c, const struct group *g, size_t *bad)
{
    struct cuda_reservation *reservation = reservation_of(g);
    int err = 0;

    *bad = 0;
    pthread_mutex_lock(&reservation->lock);
    // The rest of the block and the next one become readable with the page.
    if (has_backdrop(g)) {
        uint64_t first = (g->addr - reservation->r.addr) / BACKDROP_AHEAD * BACKDROP_AHEAD;

        err = vmem__cuda_activate(&c->cuda, &c->backdrop, &reservation->r, reservation->r.addr + first,
                                  g->addr - reservation->r.addr - first + g->length + BACKDROP_AHEAD);
    }
    if (!err)
        err = clear(c, g);
    if (!err)
        err = put(c, g, NEW, bad);
    if (!err)
        err = clean(c, g);
    if (err)
        restore(c, g, OLD);
    pthread_mutex_unlock(&reservation->lock);
    return err;
}

static int unmap_group(struct cuda *c, const struct group *g, size_t *bad)
{
    int err;

    *bad = 0;
    pthread_mutex_lock(&reservation_of(g)->lock);
    err = clear(c, g);
    if (!err)
        err = refill(c, g);
    if (err)
        restore(c, g, NEW);
    pthread_mutex_unlock(&reservation_of(g)->lock);
    return err;
}

// All groups or none; what: what is there again after a failure.
static int for_groups(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad, enum what before,
                      int (*change)(struct cuda *, const struct group *, size_t *bad))
{
    struct cuda *c = b->priv;
    struct group g;
    size_t done, at;
    int err = vmem__cuda_enter(&c->cuda);

    *bad = 0;
    if (err)
        return err;
    for (done = 0; !err && done < n; done += g.n) {
        g = next_group(runs + done, n - done);
        err = change(c, &g, &at);
        if (err) {
            *bad = done + at;
            break;
        }
    }
    for (size_t i = 0; err && i < done; i += g.n) {
        g = next_group(runs + i, done - i);
        pthread_mutex_lock(&reservation_of(&g)->lock);
        restore(c, &g, before);
        pthread_mutex_unlock(&reservation_of(&g)->lock);
    }
    vmem__cuda_leave(&c->cuda);
    return err;
}

static int cuda_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return for_groups(b, runs, n, bad, OLD, map_group);
}

static int cuda_unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return for_groups(b, runs, n, bad, NEW, unmap_group);
}

// ---- opening ------------------------------------------------------------------------------------------------

static int cuda_probe(const struct vmem_options *opts) { return vmem__cuda_probe(opts->device); }

static void cuda_close(struct vmem__backend *b, bool forked)
{
    struct cuda *c = b->priv;

    if (!forked)
        vmem__backdrop_free(&c->cuda, &c->backdrop);
    vmem__cuda_close(&c->cuda, forked);
    free(c);
}

static int cuda_open(struct vmem__backend *b, const struct vmem_options *opts)
{
    struct cuda *c = calloc(1, sizeof(*c));
    int err;

    if (!c)
        return vmem__error(-ENOMEM, "no memory for the cuda backend");
    b->priv = c;
    c->cuda.syscalls = &b->syscalls;
    err = vmem__cuda_open(&c->cuda, opts->device, &b->info);
    if (!err)
        err = vmem__backdrop_new(&c->cuda, &c->backdrop, PAGE);
    if (err) {
        cuda_close(b, false);
        return err;
    }
    if (vmem__abi_release(b->info.driver, sizeof(b->info.driver)))
        b->info.driver[0] = '\0'; // a container may hide it; nothing here depends on it
    strcpy(b->info.backend, "cuda");
    b->info.caps = VMEM_CAP_GPU | VMEM_CAP_CUDA_POINTER | VMEM_CAP_BACKDROP | VMEM_CAP_FAULT;
    b->info.page_sizes = VMEM_PAGE_2M;
    b->info.reserve_align = PAGE;
    b->overhead = c->backdrop.segment;
    b->arena_min = b->arena_max = PAGE;
    return 0;
}

const struct vmem__ops vmem__cuda_ops = {
    .name = "cuda",
    .probe = cuda_probe,
    .open = cuda_open,
    .close = cuda_close,
    .memory = vmem__cuda_op_memory,
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .backdrop = cuda_backdrop,
    .arena_new = cuda_arena_new,
    .arena_free = cuda_arena_free,
    .zero = cuda_zero,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .copy = vmem__cuda_op_copy,
    .fill = vmem__cuda_op_fill,
};
