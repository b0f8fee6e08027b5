// SPDX-License-Identifier: MIT
#include <stdio.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "backend/host/host.h"
#include "checked.h"

#define BROKEN(...)                                          \
    do {                                                     \
        fprintf(stderr, "backend contract: %s: ", __func__); \
        fprintf(stderr, __VA_ARGS__);                        \
        fputc('\n', stderr);                                 \
        abort();                                             \
    } while (0)
#define MUST(cond)                                   \
    do {                                             \
        if (!(cond))                                 \
            BROKEN("%s (line %d)", #cond, __LINE__); \
    } while (0)

static const struct vmem__ops *inner;
static struct vmem__ops wrapper;
static bool eager; // arenas are populated whole
static bool unmap_failed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- fault points -------------------------------------------------------------------------------------------

static _Thread_local bool armed;
static _Thread_local unsigned long countdown;
static _Thread_local unsigned long in_a_row;
static _Thread_local bool hit;

void checked_fail(unsigned long n) { checked_fail_many(n, 1); }
void checked_fail_many(unsigned long n, unsigned long k)
{
    countdown = n;
    in_a_row = k;
    hit = false;
    armed = n != 0;
}
static _Thread_local bool always, onwards;
void checked_fail_from(unsigned long n)
{
    checked_fail(n);
    onwards = true;
}
void checked_fail_always(bool on)
{
    always = on;
    onwards = hit = false;
}
bool checked_failed(void) { return hit; }

static bool fault(void)
{
    if (always)
        return hit = true;
    if (!armed || !countdown || countdown-- > 1)
        return false;
    countdown = --in_a_row > 0;
    always = onwards;
    return hit = true;
}

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);

static _Atomic bool refuse_unmaps;
void checked_refuse_unmaps(bool on) { refuse_unmaps = on; }
static _Atomic bool refuse_restores;
void checked_refuse_restores(bool on) { refuse_restores = on; }

static _Atomic uint64_t device_memory = UINT64_MAX, device_used;
void checked_device_memory(uint64_t bytes) { device_memory = bytes; }

static _Atomic int munmaps;
void checked_fail_munmap(int n) { munmaps = n; }
int __real_munmap(void *at, size_t length);
int __wrap_munmap(void *at, size_t length);
int __wrap_munmap(void *at, size_t length)
{
    if (munmaps && munmaps--) {
        errno = ENOMEM;
        return -1;
    }
    return __real_munmap(at, length);
}
uint64_t checked_free_memory;
int __real_sysinfo(struct sysinfo *si);
int __wrap_sysinfo(struct sysinfo *si);
int __wrap_sysinfo(struct sysinfo *si)
{
    const int rc = __real_sysinfo(si);
    if (!rc && checked_free_memory)
        si->freeram = checked_free_memory / si->mem_unit;
    return rc;
}
int (*checked_fallocate)(uint64_t length);
int __real_fallocate(int fd, int mode, off_t at, off_t length);
int __wrap_fallocate(int fd, int mode, off_t at, off_t length);
int __wrap_fallocate(int fd, int mode, off_t at, off_t length)
{
    const int error = !mode && checked_fallocate ? checked_fallocate((uint64_t)length) : 0;
    if (!error)
        return __real_fallocate(fd, mode, at, length);
    errno = error;
    return -1;
}
int (*checked_host_memory)(struct vmem__host_memory *out);
int __real_vmem__host_memory(const char *root, struct vmem__host_memory *out);
int __wrap_vmem__host_memory(const char *root, struct vmem__host_memory *out);
int __wrap_vmem__host_memory(const char *root, struct vmem__host_memory *out)
{
    return checked_host_memory && !*root ? checked_host_memory(out) : __real_vmem__host_memory(root, out);
}
void *__wrap_malloc(size_t n) { return fault() ? NULL : __real_malloc(n); }
void *__wrap_calloc(size_t n, size_t size) { return fault() ? NULL : __real_calloc(n, size); }
void *__wrap_realloc(void *p, size_t n) { return fault() ? NULL : __real_realloc(p, n); }

// ---- holding a call -----------------------------------------------------------------------------------------

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum { FREE, ASKED, ASKED_ARENA, HELD } hold;

static void set_hold(int to)
{
    pthread_mutex_lock(&lock);
    hold = to;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
void checked_hold(void) { set_hold(ASKED); }
void checked_hold_arena(void) { set_hold(ASKED_ARENA); }
void checked_resume(void) { set_hold(FREE); }
void checked_held(void)
{
    pthread_mutex_lock(&lock);
    while (hold != HELD)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}
// With the wrapper's lock held, in every call that can be held.
static void hold_if(int asked)
{
    if ((int)hold != asked)
        return;
    hold = HELD;
    pthread_cond_broadcast(&changed);
    while (hold == HELD)
        pthread_cond_wait(&changed, &lock);
}
static void hold_here(void) { hold_if(ASKED); }

static int injected(void) { return vmem__error(-ENOMEM, "injected failure"); }

// ---- what is known: ranges, arenas, and what lies at every 64 KiB ---------------------------------------------

#define MAX_OBJECTS 4096
struct object {
    const void *p;
    uint64_t mapped; // bytes of it that are mapped now
};
static struct object ranges[MAX_OBJECTS], arenas[MAX_OBJECTS];

static struct object *find(struct object *table, const void *p)
{
    for (size_t i = 0; i < MAX_OBJECTS; i++) {
        if (table[i].p == p)
            return &table[i];
    }
    return NULL;
}
static void add(struct object *table, const void *p)
{
    MUST(!find(table, p) && find(table, NULL));
    *find(table, NULL) = (struct object){.p = p};
}
static void drop(struct object *table, const void *p)
{
    struct object *o = find(table, p);
    MUST(o && !o->mapped);
    o->p = NULL;
}

// Granules in use: key is an address in granules, or an arena and an offset (for slices in flight).
struct granule {
    uint64_t key;
    const struct vmem__arena *arena; // what is mapped at the address
    uint64_t offset;
    bool busy;
};
#define GRANULES (1u << 18)
static struct granule granules[GRANULES];
static size_t n_granules;

static struct granule *granule_of(uint64_t key)
{
    uint64_t h = key * UINT64_C(0x9e3779b97f4a7c15) >> 40;
    for (uint64_t i = 0; i < GRANULES; i++) {
        struct granule *u = &granules[(h + i) % GRANULES];
        if (u->key == key)
            return u;
        if (!u->key) {
            u->key = key;
            n_granules++;
            return u;
        }
    }
    BROKEN("table of granules is full");
}
static struct granule *granule_at(uint64_t addr) { return granule_of(addr >> 16); }
// Arena structures are 16-byte aligned heap memory, so their keys do not meet those of addresses.
static struct granule *slice_at(const struct vmem__arena *a, uint64_t offset)
{
    return granule_of(UINT64_C(1) << 63 | (((uint64_t)(uintptr_t)a << 16) + (offset >> 16)));
}

static void slice_busy(const struct vmem__arena *a, uint64_t offset, uint64_t length, bool busy)
{
    MUST(find(arenas, a));
    MUST(offset % GRANULE == 0 && length % GRANULE == 0 && length && offset + length <= a->size);
    for (uint64_t at = offset; at < offset + length; at += GRANULE) {
        struct granule *u = slice_at(a, at);
        MUST(u->busy != busy);
        u->busy = busy;
    }
}

static void check_run(const struct vmem__run *r)
{
    MUST(find(ranges, r->reservation) && find(arenas, r->arena) && (!r->old_arena || find(arenas, r->old_arena)));
    MUST(r->page_size == VMEM_PAGE_64K || r->page_size == VMEM_PAGE_128K || r->page_size == VMEM_PAGE_256K ||
         r->page_size == VMEM_PAGE_2M);
    MUST(r->length && r->length % r->page_size == 0);
    MUST(r->addr % r->page_size == 0 && r->offset % r->page_size == 0);
    MUST(r->addr >= r->reservation->addr && r->addr + r->length <= r->reservation->addr + r->reservation->length);
    MUST(r->offset + r->length <= r->arena->size);
}

static void check_runs(const struct vmem__run *runs, size_t n, bool unmap)
{
    for (size_t i = 0; i < n; i++) {
        check_run(&runs[i]);
        MUST(!i || runs[i].op >= runs[i - 1].op);
        for (uint64_t d = 0; d < runs[i].length; d += GRANULE) {
            struct granule *u = granule_at(runs[i].addr + d);
            MUST(!u->busy);
            u->busy = true;
            if (unmap) {
                MUST(u->arena == runs[i].arena && u->offset == runs[i].offset + d);
            } else {
                MUST(u->arena == runs[i].old_arena);
                MUST(!u->arena || u->offset == runs[i].old_offset + d);
                MUST(!u->arena || runs[i].flags & VMEM_MAP_REPLACE);
            }
        }
    }
}

static void finish_runs(const struct vmem__run *runs, size_t n, bool unmap, bool done)
{
    for (size_t i = 0; i < n; i++) {
        const struct vmem__run *r = &runs[i];
        for (uint64_t d = 0; d < r->length; d += GRANULE) {
            struct granule *u = granule_at(r->addr + d);
            u->busy = false;
            if (done) {
                u->arena = unmap ? NULL : r->arena;
                u->offset = unmap ? 0 : r->offset + d;
            }
        }
        if (!done)
            continue;
        find(arenas, r->arena)->mapped += unmap ? -r->length : r->length;
        if (r->old_arena)
            find(arenas, r->old_arena)->mapped -= r->length;
        else
            find(ranges, r->reservation)->mapped += unmap ? -r->length : r->length;
    }
}

// ---- the wrapped operations ---------------------------------------------------------------------------------

static void locked(bool on) { on ? pthread_mutex_lock(&lock) : pthread_mutex_unlock(&lock); }

static int reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    MUST(r->length && r->length % GRANULE == 0);
    int rc = fault() ? injected() : inner->reserve(b, r);
    if (!rc) {
        MUST(r->addr && r->addr % BLOCK == 0);
        locked(true);
        add(ranges, r);
        locked(false);
    }
    return rc;
}
static void unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    locked(true);
    struct object *o = find(ranges, r);
    MUST(o && (!o->mapped || unmap_failed || hit)); // what would not be unmapped may go with the range
    for (uint64_t at = r->addr; o->mapped && at < r->addr + r->length; at += GRANULE) {
        struct granule *u = granule_at(at);
        MUST(!u->busy);
        if (u->arena) {
            find(arenas, u->arena)->mapped -= GRANULE;
            o->mapped -= GRANULE;
            u->arena = NULL;
        }
    }
    drop(ranges, r);
    locked(false);
    inner->unreserve(b, r);
}
static int backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    MUST(addr >= r->addr && length <= r->addr + r->length - addr && length);
    return fault() ? injected() : inner->backdrop(b, r, addr, length);
}
static int arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    MUST(a->size && a->size % BLOCK == 0 && a->size <= b->arena_max);
    MUST(((uintptr_t)a & 7) == 0);
    const bool full = atomic_fetch_add(&device_used, a->size) + a->size > device_memory;
    int rc = fault() || full ? injected() : inner->arena_new(b, a);
    if (!rc && eager && (rc = inner->populate(b, a, 0, a->size)))
        inner->arena_free(b, a);
    if (eager)
        usleep(50); // a GPU's memory takes time: other calls come meanwhile
    locked(true);
    if (rc)
        device_used -= a->size;
    else
        add(arenas, a);
    hold_if(ASKED_ARENA);
    locked(false);
    return rc;
}
static void arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    locked(true);
    drop(arenas, a);
    locked(false);
    device_used -= a->size;
    inner->arena_free(b, a);
}
static int slice_call(int (*call)(struct vmem__backend *, struct vmem__arena *, uint64_t, uint64_t),
                      struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    locked(true);
    slice_busy(a, offset, length, true);
    hold_here();
    locked(false);
    int rc = fault() ? injected() : call(b, a, offset, length);
    locked(true);
    slice_busy(a, offset, length, false);
    locked(false);
    return rc;
}
static int populate(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    return slice_call(inner->populate, b, a, offset, length);
}
static int discard(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    return slice_call(inner->discard, b, a, offset, length);
}
static int zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    locked(true);
    for (size_t i = 0; i < n; i++)
        slice_busy(runs[i].arena, runs[i].offset, runs[i].length, true);
    hold_here();
    locked(false);
    int rc = fault() ? injected() : inner->zero(b, runs, n);
    locked(true);
    for (size_t i = 0; i < n; i++)
        slice_busy(runs[i].arena, runs[i].offset, runs[i].length, false);
    locked(false);
    return rc;
}
// A driver in trouble has changed some runs and refuses to change them back: what was mapped is gone, or what was to be
// mapped is there.
static void damage(struct vmem__backend *b, const struct vmem__run *runs, size_t n, bool unmap)
{
    for (size_t i = 0; i < n; i += 1 + n / 3) {
        struct vmem__run r = runs[i];
        const bool gone = unmap || r.old_arena;
        size_t bad;
        if (!unmap && r.old_arena) {
            r.arena = r.old_arena;
            r.offset = r.old_offset;
        }
        if (!(gone ? inner->unmap : inner->map)(b, &r, 1, &bad))
            vmem__absent_set(b, r.reservation, r.addr, r.length, true);
    }
}
static int restore(struct vmem__backend *b, const struct vmem__run *run)
{
    uint64_t absent;
    vmem__absent_next(run->reservation, run->addr, run->addr + run->length, &absent);
    MUST(absent && run->page_size == GRANULE);
    locked(true);
    for (uint64_t d = 0; d < run->length; d += GRANULE) {
        const struct granule *u = granule_at(run->addr + d);
        MUST(!u->busy && u->arena == run->arena && (!u->arena || u->offset == run->offset + d));
    }
    locked(false);
    return fault() || refuse_restores ? injected() : inner->restore(b, run);
}
static int change(struct vmem__backend *b, const struct vmem__run *runs, size_t n, bool unmap, size_t *bad)
{
    MUST(n);
    locked(true);
    check_runs(runs, n, unmap);
    hold_here();
    locked(false);
    int rc;
    if (fault() || (unmap && refuse_unmaps)) {
        *bad = n - 1;
        damage(b, runs, n, unmap);
        rc = injected();
    } else {
        rc = (unmap ? inner->unmap : inner->map)(b, runs, n, bad);
    }
    locked(true);
    unmap_failed = unmap_failed || (unmap && rc);
    finish_runs(runs, n, unmap, !rc);
    locked(false);
    return rc;
}
static int map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return change(b, runs, n, false, bad);
}
static int unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return change(b, runs, n, true, bad);
}
static void must_be_present(uint64_t addr, uint64_t length)
{
    for (size_t i = 0; i < MAX_OBJECTS; i++) {
        const struct vmem__reservation *r = ranges[i].p;
        uint64_t absent = 0;
        if (r && r->n_absent && addr >= r->addr && addr < r->addr + r->length)
            vmem__absent_next(r, addr - addr % GRANULE, addr + length, &absent);
        MUST(!absent);
    }
}
static int copy(struct vmem__backend *b, const struct vmem_copy_op *ops, size_t n)
{
    locked(true);
    for (size_t i = 0; i < n; i++) {
        must_be_present(ops[i].dst, ops[i].length);
        must_be_present(ops[i].src, ops[i].length);
    }
    hold_here();
    locked(false);
    return inner->copy(b, ops, n);
}
static int fill(struct vmem__backend *b, uint64_t addr, uint8_t value, uint64_t length)
{
    locked(true);
    must_be_present(addr, length);
    hold_here();
    locked(false);
    return inner->fill(b, addr, value, length);
}
static int open_(struct vmem__backend *b, const struct vmem_options *opts)
{
    int rc = inner->open(b, opts);
    if (!rc && eager)
        b->arena_min = 8 * BLOCK; // arenas are memory now: small ones, so that there are several
    return rc;
}
static void close_(struct vmem__backend *b, bool forked)
{
    for (size_t i = 0; i < MAX_OBJECTS && !forked; i++)
        MUST(!ranges[i].p && !arenas[i].p);
    if (n_granules > GRANULES / 4) { // all unused: forget them
        memset(granules, 0, sizeof granules);
        n_granules = 0;
    }
    inner->close(b, forked);
}

int checked_context(const char *name, uint64_t budget, bool whole_arenas, vmem_context **out)
{
    for (const struct vmem__ops *const *b = vmem__backends; *b; b++) {
        if (!strcmp((*b)->name, name))
            inner = *b;
    }
    eager = whole_arenas && inner->populate;
    wrapper = *inner;
    wrapper.open = open_;
    wrapper.close = close_;
    wrapper.reserve = reserve;
    wrapper.unreserve = unreserve;
    wrapper.backdrop = inner->backdrop ? backdrop : NULL;
    wrapper.arena_new = arena_new;
    wrapper.arena_free = arena_free;
    wrapper.populate = inner->populate && !eager ? populate : NULL;
    wrapper.discard = inner->discard && !eager ? discard : NULL;
    wrapper.zero = zero;
    wrapper.map = map;
    wrapper.unmap = unmap;
    wrapper.restore = restore;
    wrapper.copy = copy;
    wrapper.fill = fill;
    unmap_failed = false;
    struct vmem_options opts = {.size = sizeof opts, .backend = name, .budget = budget};
    return vmem__context_create_ops(&wrapper, &opts, out);
}
