// The cuda backend: CUDA's own virtual memory management, with 2 MiB pages.
//
// CUDA maps and unmaps a physical handle only as a whole: cuMemMap with an offset or a shorter length returns 801, and
// cuMemUnmap of a part returns 1. An arena is therefore one page.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/gpu.h"
#include "driver/rm.h"

#define PAGE VMEM_PAGE_2M
// The bytes that become readable after a run in a reservation with a backdrop. A kernel's tile does not reach further
// past the last row, and each page of backdrop costs a map of its own.
#define BACKDROP_AHEAD PAGE

struct cuda {
    struct vmem__gpu gpu; // must be first: vmem__gpu_*() relies on it
    bool fresh_is_zero;   // memory from CUDA needs no zeroing
};

struct cuda_reservation {
    struct vmem__cuda_reservation cuda; // must be first: vmem__gpu_*() relies on it
    uint64_t *wanted; // one bit per segment: vmem_backdrop made it readable, so it stays readable after an unmap
};

struct cuda_arena {
    uint64_t handle;
    bool clean; // if false, the next map zeroes the memory: CUDA can fill memory only where it is mapped
};

// Runs at consecutive addresses of one reservation.
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

// Returns the total length of n runs at consecutive addresses.
static uint64_t length_of(const struct vmem__run *runs, size_t n)
{
    return runs[n - 1].addr + runs[n - 1].length - runs[0].addr;
}

// In this backend, a segment of a reservation is one page. A segment is active while a page or the backdrop is mapped
// there; without VMEM_RESERVE_BACKDROP, only a page can be. The reservation's lock is held during CUDA's calls for that
// reservation. CUDA serializes them anyway.
static struct vmem__cuda_reservation *reservation_of(const struct group *g) { return g->reservation->priv; }

static const uint64_t *wanted_of(const struct group *g)
{
    return ((const struct cuda_reservation *)g->reservation->priv)->wanted;
}

static uint64_t segment_of(const struct group *g, uint64_t addr) { return (addr - reservation_of(g)->addr) / PAGE; }

// Returns whether the addresses after a run must be readable.
static bool has_backdrop(const struct group *g) { return g->reservation->flags & VMEM_RESERVE_BACKDROP; }

// ---- address space ------------------------------------------------------------------------------------------

// Makes the backdrop permanently readable over [addr, addr + length). The caller holds the reservation's lock or has
// not published the reservation yet.
static int want(struct vmem__gpu *c, struct cuda_reservation *reservation, uint64_t addr, uint64_t length)
{
    const uint64_t base = reservation->cuda.addr, last = reservation->cuda.length / PAGE;
    const uint64_t end = (addr - base + length + PAGE - 1) / PAGE;
    int rc = vmem__cuda_activate(&c->cuda, &c->backdrop, &reservation->cuda, addr, length);

    for (uint64_t i = (addr - base) / PAGE; !rc && i < end && i < last; i++)
        vmem__bit_set(reservation->wanted, i, true);
    return rc;
}

static void cuda_unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct vmem__gpu *c = b->priv;
    struct cuda_reservation *reservation = r->priv;

    vmem__cuda_unreserve(&c->cuda, &c->backdrop, &reservation->cuda);
    free(reservation->wanted);
    free(reservation);
}

static int cuda_reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct vmem__gpu *c = b->priv;
    struct cuda_reservation *reservation = calloc(1, sizeof(*reservation));
    int rc = reservation ? vmem__cuda_reserve(&c->cuda, &c->backdrop, r->length, 0, &reservation->cuda)
                         : vmem__error(-ENOMEM, "no memory for bookkeeping of a reservation");

    if (rc) {
        free(reservation);
        return rc;
    }
    r->priv = reservation;
    r->addr = reservation->cuda.addr;
    reservation->wanted = calloc((reservation->cuda.length / PAGE + 63) / 64, sizeof(uint64_t));
    if (!reservation->wanted)
        rc = vmem__error(-ENOMEM, "reserve: no memory to keep track of %llu bytes", (unsigned long long)r->length);
    if (!rc && (r->flags & VMEM_RESERVE_BACKDROP)) // CUDA must know the first address
        rc = want(c, reservation, r->addr, PAGE);
    if (rc)
        cuda_unreserve(b, r);
    return rc;
}

static int cuda_backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    struct cuda_reservation *reservation = r->priv;
    int rc;

    pthread_mutex_lock(&reservation->cuda.lock);
    rc = want(b->priv, reservation, addr, length);
    pthread_mutex_unlock(&reservation->cuda.lock);
    return rc;
}

// ---- physical memory ----------------------------------------------------------------------------------------

static int cuda_arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    struct vmem__gpu *c = b->priv;
    struct cuda_arena *arena = malloc(sizeof(*arena));
    int rc = arena ? vmem__cuda_enter(&c->cuda) : vmem__error(-ENOMEM, "no memory for bookkeeping of an allocation");

    if (!rc) {
        rc = vmem__cuda_create(&c->cuda, a->size, &arena->handle);
        vmem__cuda_leave(&c->cuda);
    }
    if (rc) {
        free(arena);
        return rc;
    }
    arena->clean = ((const struct cuda *)b->priv)->fresh_is_zero;
    a->priv = arena;
    return 0;
}

static void cuda_arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    struct vmem__gpu *c = b->priv;
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

// Unmaps everything in the group's address range.
static int clear(struct vmem__gpu *c, const struct group *g)
{
    uint64_t *active = reservation_of(g)->active, end = segment_of(g, g->addr) + g->length / PAGE, n;
    int rc = 0;

    for (uint64_t i = segment_of(g, g->addr); !rc; i += n) {
        i = vmem__bit_run(active, true, i, end, &n);
        if (!n)
            break;
        rc = vmem__cuda_unmap(&c->cuda, reservation_of(g)->addr + i * PAGE, n * PAGE);
        for (uint64_t k = 0; !rc && k < n; k++)
            vmem__bit_set(active, i + k, false);
    }
    return rc;
}

enum what { NEW, OLD };

static struct vmem__arena *arena_of(const struct vmem__run *run, enum what what)
{
    return what == NEW ? run->arena : run->old_arena;
}

// Maps the new or the old arenas of the group's runs. Nothing may be mapped at their addresses, and a run may have no
// old arena. On failure, *bad is the failing run and earlier runs may be mapped.
static int put(struct vmem__gpu *c, const struct group *g, enum what what, size_t *bad)
{
    uint64_t *active = reservation_of(g)->active;
    int rc = 0;

    for (size_t i = 0; !rc && i < g->n; i++) {
        const struct vmem__run *run = &g->runs[i];
        struct vmem__arena *arena = arena_of(run, what);

        *bad = i;
        if (!arena)
            continue;
        rc = vmem__cuda_map(&c->cuda, run->addr, PAGE, ((struct cuda_arena *)arena->priv)->handle);
        if (!rc)
            vmem__bit_set(active, segment_of(g, run->addr), true);
    }
    // Grant access with one call for each contiguous range of mappings.
    for (size_t i = 0, n; !rc && i < g->n; i += n) {
        bool mapped = arena_of(&g->runs[i], what);

        for (n = 1; i + n < g->n && (bool)arena_of(&g->runs[i + n], what) == mapped; n++)
            ;
        if (mapped) {
            *bad = i;
            rc = vmem__cuda_allow(&c->cuda, g->runs[i].addr, length_of(&g->runs[i], n));
        }
    }
    return rc;
}

// Restores the backdrop after the group's addresses were unmapped. Kernels may read a little past the end of the page
// before the group, and segments that vmem_backdrop made readable stay readable.
static int refill(struct vmem__gpu *c, const struct group *g)
{
    const uint64_t *wanted = wanted_of(g);
    uint64_t end = segment_of(g, g->addr) + g->length / PAGE, n;
    int rc =
        has_backdrop(g) ? vmem__cuda_activate(&c->cuda, &c->backdrop, reservation_of(g), g->addr, BACKDROP_AHEAD) : 0;

    for (uint64_t i = segment_of(g, g->addr); !rc; i += n) {
        i = vmem__bit_run(wanted, true, i, end, &n);
        if (!n)
            break;
        rc = vmem__cuda_activate(&c->cuda, &c->backdrop, reservation_of(g), reservation_of(g)->addr + i * PAGE,
                                 n * PAGE);
    }
    return rc;
}

// Restores the mappings after a failed change: the given arenas, and the backdrop elsewhere. If CUDA refuses that, all
// of the group is absent: some of it may be mapped, and some of that without access.
static int restore(struct vmem__backend *b, const struct group *g, enum what what)
{
    size_t bad;
    int rc = clear(b->priv, g);

    if (!rc)
        rc = put(b->priv, g, what, &bad);
    if (!rc)
        rc = refill(b->priv, g);
    vmem__absent_set(b, g->reservation, g->addr, g->length, rc != 0);
    return rc;
}

// The undo of a failed change. Keeps the error text.
static void undo(struct vmem__backend *b, const struct group *g, enum what what)
{
    char text[VMEM__TEXT];

    vmem__keep_error(text);
    (void)restore(b, g, what);
    vmem__error(0, "%s", text);
}

static bool is_clean(const struct vmem__run *run) { return ((const struct cuda_arena *)run->arena->priv)->clean; }

// Zeroes the arenas that are mapped for the first time since they were created or since cuda_zero() was called on them.
// All are filled before the one wait: a wait takes longer than a fill, above all beside another process.
static int clean(struct vmem__gpu *c, const struct vmem__run *runs, size_t n)
{
    int result = CUDA_SUCCESS, sync;
    bool any = false;

    for (size_t i = 0, end; result == CUDA_SUCCESS && i < n; i = end) {
        const bool dirty = !is_clean(&runs[i]);

        for (end = i + 1;
             end < n && !is_clean(&runs[end]) == dirty && runs[end].addr == runs[end - 1].addr + runs[end - 1].length;
             end++)
            ;
        if (dirty)
            result = vmem__cuda_zero(&c->cuda, runs[i].addr, length_of(&runs[i], end - i));
        any |= dirty;
    }
    if (!any)
        return 0;
    sync = c->cuda.fn.stream_sync(c->cuda.stream);
    for (size_t i = 0; result == CUDA_SUCCESS && sync == CUDA_SUCCESS && i < n; i++)
        ((struct cuda_arena *)runs[i].arena->priv)->clean = true;
    return vmem__cuda_error(&c->cuda.fn, result ? result : sync, "zero");
}

static int map_group(struct vmem__backend *b, const struct group *g, size_t *bad)
{
    struct vmem__gpu *c = b->priv;
    struct vmem__cuda_reservation *reservation = reservation_of(g);
    int rc = 0;

    *bad = 0;
    pthread_mutex_lock(&reservation->lock);
    if (has_backdrop(g))
        rc = vmem__cuda_activate(&c->cuda, &c->backdrop, reservation, g->addr + g->length, BACKDROP_AHEAD);
    if (!rc)
        rc = clear(c, g);
    if (!rc)
        rc = put(c, g, NEW, bad);
    if (rc)
        undo(b, g, OLD);
    else
        vmem__absent_set(b, g->reservation, g->addr, g->length, false);
    pthread_mutex_unlock(&reservation->lock);
    return rc;
}

static int unmap_group(struct vmem__backend *b, const struct group *g, size_t *bad)
{
    struct vmem__gpu *c = b->priv;
    int rc;

    *bad = 0;
    pthread_mutex_lock(&reservation_of(g)->lock);
    rc = clear(c, g);
    if (!rc)
        rc = refill(c, g);
    if (rc)
        undo(b, g, NEW);
    else
        vmem__absent_set(b, g->reservation, g->addr, g->length, false);
    pthread_mutex_unlock(&reservation_of(g)->lock);
    return rc;
}

// Applies `change` to all groups or to none, and then `finish` (NULL: nothing) to all runs. After a failure, the `before`
// arenas are mapped again.
static int for_groups(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad, enum what before,
                      int (*change)(struct vmem__backend *, const struct group *, size_t *bad),
                      int (*finish)(struct vmem__gpu *, const struct vmem__run *, size_t n))
{
    struct vmem__gpu *c = b->priv;
    struct group g;
    size_t done, at;
    int rc = vmem__cuda_enter(&c->cuda);

    *bad = 0;
    if (rc)
        return rc;
    for (done = 0; !rc && done < n; done += g.n) {
        g = next_group(runs + done, n - done);
        rc = change(b, &g, &at);
        if (rc) {
            *bad = done + at;
            break;
        }
    }
    if (!rc && finish)
        rc = finish(c, runs, n);
    for (size_t i = 0; rc && i < done; i += g.n) {
        g = next_group(runs + i, done - i);
        pthread_mutex_lock(&reservation_of(&g)->lock);
        undo(b, &g, before);
        pthread_mutex_unlock(&reservation_of(&g)->lock);
    }
    vmem__cuda_leave(&c->cuda);
    return rc;
}

static int cuda_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return for_groups(b, runs, n, bad, OLD, map_group, clean);
}

static int cuda_unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return for_groups(b, runs, n, bad, NEW, unmap_group, NULL);
}

static int cuda_restore(struct vmem__backend *b, const struct vmem__run *run)
{
    struct vmem__cuda_reservation *reservation = run->reservation->priv;
    uint64_t end = run->addr + run->length, at = run->addr, n;
    struct vmem__gpu *c = b->priv;
    int rc = vmem__cuda_enter(&c->cuda);

    if (rc)
        return rc;
    pthread_mutex_lock(&reservation->lock);
    for (; (at = vmem__absent_next(run->reservation, at, end, &n)), n && !rc; at += n) {
        struct vmem__run part = *run;
        struct group g = {.runs = &part, .n = 1, .reservation = run->reservation, .addr = at, .length = n};

        part.addr = at;
        part.length = n;
        part.offset += at - run->addr;
        rc = restore(b, &g, NEW);
    }
    pthread_mutex_unlock(&reservation->lock);
    vmem__cuda_leave(&c->cuda);
    return rc;
}

// ---- opening ------------------------------------------------------------------------------------------------

static int cuda_probe(const struct vmem_options *opts) { return vmem__cuda_probe(opts->device); }

static void cuda_close(struct vmem__backend *b, bool forked)
{
    struct vmem__gpu *c = b->priv;

    if (!forked)
        vmem__backdrop_free(&c->cuda, &c->backdrop);
    vmem__cuda_close(&c->cuda, forked);
    free(c);
}

static int cuda_open(struct vmem__backend *b, const struct vmem_options *opts)
{
    struct cuda *cuda = calloc(1, sizeof(*cuda));
    struct vmem__gpu *c;
    int rc;

    if (!cuda)
        return vmem__error(-ENOMEM, "no memory for the cuda backend");
    c = &cuda->gpu;
    b->priv = cuda;
    c->cuda.syscalls = &b->syscalls;
    c->cuda.beside_kernels = &b->beside_kernels;
    rc = vmem__cuda_open(&c->cuda, opts->device, &b->info);
    if (!rc)
        rc = vmem__backdrop_new(&c->cuda, &c->backdrop, PAGE);
    if (rc) {
        cuda_close(b, false);
        return rc;
    }
    if (vmem__abi_release(b->info.driver, sizeof(b->info.driver)))
        b->info.driver[0] = '\0'; // a container may hide the release; it is informational only
    cuda->fresh_is_zero = vmem__rm_gpu_memory_is_zero(b->info.device_uuid);
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
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .backdrop = cuda_backdrop,
    .arena_new = cuda_arena_new,
    .arena_free = cuda_arena_free,
    .zero = cuda_zero,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .restore = cuda_restore,
    VMEM__GPU_OPS,
};
