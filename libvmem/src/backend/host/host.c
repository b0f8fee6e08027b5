// The host backend: maps pages of a memfd at CPU addresses.
//
// One memfd holds all arenas, each at an offset never used before, so that a context costs one descriptor, and one more in
// a control group with a limit. Creating a page commits its memory with fallocate(), so that a lack of memory is -ENOMEM then and not SIGBUS later. Releasing
// the page punches a hole, which returns the memory to the system.
//
// Mapping is mmap(MAP_FIXED) over the old mapping. Linux replaces it atomically under the process's mapping lock: a
// thread that touches the address meanwhile waits and then finds the new page. Hence VMEM_CAP_LIVE_REMAP.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "backend/backend.h"
#include "backend/host/host.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x8U
#endif
#define FILE_SIZE (INT64_C(1) << 62)
#define ARENA_MIN (UINT64_C(64) << 20)
#define ARENA_MAX (UINT64_C(1) << 46)
// Ballast: spare mappings to drop when a batch reaches vm.max_map_count, so that the batch can be undone and pages can
// be unmapped. One step briefly takes at most three mappings: the two halves of a split one, and the new one. At the
// limit, the last two spare mappings cannot be recovered, so there are more than three.
#define BALLAST_PAGES 64
#define GRANULE VMEM_PAGE_64K
// Memory is allocated in steps of this many bytes, each without signals, after a signal has interrupted a longer one.
#define QUIET_STEP (UINT64_C(1) << 20)
// How long an answer about the available memory holds.
#define CREDIT_MS 1000
// In a control group it holds for calls of at most so many bytes.
#define CREDIT_MOST (UINT64_C(2) << 20)
// There, no call populates more after one look than so large a part of what stays. So many processes may be stopped, each
// between its look and its pages, and the group still has enough.
#define OTHERS 16
// How long a call waits, in ms, for that of another process of the group that takes more. One that was stopped meanwhile
// must not stop the others: without a turn, a call takes a part of what is left, as all of them may.
#define TURN_MS 200
// One 64th of the memory is left to the process itself, but no more than this.
#define STAYS_MOST (UINT64_C(256) << 20)

// An address range that could not be unmapped yet.
struct lost {
    struct lost *next;
    void *at;
    size_t length;
};

struct host {
    struct host_file file;
    _Atomic uint64_t end;      // end of the part of the file that was given to arenas
    _Atomic uint64_t arenas;   // total size of the existing arenas
    pthread_rwlock_t lock;     // read: changing mappings. write: undoing changes, with the ballast dropped
    char *ballast;             // BALLAST_PAGES mappings of one page each, or fewer if `light`
    bool light;                // the ballast is incomplete
    struct lost *_Atomic lost; // changed only with `lock` held for writing
    bool cgroup;               // a control group allows less than the machine has
    int usage;                 // the file with the bytes that the group uses; -1: none
    _Atomic uint64_t trusted;  // the usage up to which the last answer holds
    _Atomic uint64_t small;    // for calls of at most so many bytes
    uint64_t part;             // bytes that a call may populate after one look at the memory; UINT64_MAX: any
    _Atomic int64_t unasked;   // bytes that may be populated before the system is asked again
    _Atomic uint64_t asked_ms; // when it was asked last, and how much these are
    // Bytes that were to be populated without a check of the available memory, and those that are.
    _Atomic uint64_t begun, ended;
    pthread_mutex_t asking; // held from the check of the available memory until the pages are populated
    bool turn;              // who holds it has the turn among the processes of the control group
};

static inline uint64_t file_offset(const struct vmem__arena *a, uint64_t offset)
{
    return (uint64_t)(uintptr_t)a->priv + offset;
}

// ---- life ---------------------------------------------------------------------------------------------------

static int file_new(void)
{
    // Linux 6.3 and later expect this flag for a memfd that is not executable, and may be configured to require it.
    int fd = memfd_create("vmem", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create("vmem", MFD_CLOEXEC);
    return fd < 0 ? vmem__error(-errno, "memfd_create: %s", strerror(errno)) : fd;
}

static int probe(const struct vmem_options *opts)
{
    (void)opts;
    int fd = file_new();
    if (fd < 0)
        return fd;
    close(fd);
    struct rlimit fsize;
    if (!getrlimit(RLIMIT_FSIZE, &fsize) && fsize.rlim_cur < (rlim_t)FILE_SIZE)
        return vmem__error(-EFBIG, "the limit on file sizes (ulimit -f) must be \"unlimited\": it covers memfd too");
    return 0;
}

// Makes each page a mapping of its own: the kernel does not merge neighbouring pages with different protection.
static void ballast_take(struct host *h)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *at = mmap(NULL, BALLAST_PAGES * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    h->light = at == MAP_FAILED;
    if (h->light)
        return;
    for (size_t i = 1; i < BALLAST_PAGES && !h->light; i += 2)
        h->light = mprotect(at + i * page, page, PROT_READ) != 0;
    h->ballast = at;
}

static void ballast_drop(struct host *h)
{
    if (h->ballast)
        munmap(h->ballast, BALLAST_PAGES * (size_t)sysconf(_SC_PAGESIZE));
    h->ballast = NULL;
}

static int memory(struct vmem__backend *b, uint64_t *total, uint64_t *available)
{
    struct vmem__host_memory m;
    int rc = vmem__host_memory("", &m);
    (void)b;
    if (rc)
        return rc;
    *total = m.total;
    *available = m.available;
    return 0;
}

static int open_(struct vmem__backend *b, const struct vmem_options *opts)
{
    struct vmem__host_memory m;
    int rc = probe(opts);
    if (!rc)
        rc = vmem__host_memory("", &m);
    if (rc)
        return rc;
    b->info.memory_total = m.total;
    struct host *h = calloc(1, sizeof *h);
    if (!h)
        return vmem__error(-ENOMEM, "no memory for a context");
    rc = h->file.fd = file_new();
    if (rc >= 0 && ftruncate(h->file.fd, FILE_SIZE)) {
        rc = vmem__error(-errno, "ftruncate of a memfd: %s", strerror(errno));
        close(h->file.fd);
    }
    if (rc >= 0 && (rc = vmem__host_file_add(&h->file)))
        close(h->file.fd);
    if (rc < 0) {
        free(h);
        return rc;
    }
    pthread_rwlock_init(&h->lock, NULL);
    pthread_mutex_init(&h->asking, NULL);
    ballast_take(h);
    h->cgroup = m.cgroup;
    h->usage = *m.usage ? open(m.usage, O_RDONLY | O_CLOEXEC) : -1;
    h->part = UINT64_MAX;
    b->priv = h;
    b->arena_min = ARENA_MIN;
    b->arena_max = ARENA_MAX;
    b->info.caps = VMEM_CAP_BACKDROP | VMEM_CAP_FAULT | VMEM_CAP_LIVE_REMAP;
    b->info.page_sizes = VMEM_PAGE_64K | VMEM_PAGE_128K | VMEM_PAGE_256K | VMEM_PAGE_2M;
    b->info.reserve_align = VMEM_PAGE_2M;
    snprintf(b->info.device_name, sizeof b->info.device_name, "host memory");
    return 0;
}

// Tries again to unmap the lost ranges. Unmapping the middle of a mapping that the kernel has merged takes an
// additional mapping, which may fail at vm.max_map_count. The caller holds the lock for writing, or no other thread
// uses h.
static void unmap_lost(struct host *h, bool last_time)
{
    struct lost *l, *next, *still = NULL;
    for (l = h->lost; l; l = next) {
        next = l->next;
        if (!munmap(l->at, l->length) || last_time) {
            free(l);
        } else {
            l->next = still;
            still = l;
        }
    }
    h->lost = still;
}

// Unmaps a range, now or once other mappings are gone. If there is no memory to record the range, it stays reserved.
static void give_up(struct host *h, void *at, size_t length)
{
    const bool gone = !munmap(at, length);
    if (gone && !h->lost)
        return;
    pthread_rwlock_wrlock(&h->lock);
    ballast_drop(h);
    struct lost *l = gone || !munmap(at, length) ? NULL : malloc(sizeof *l);
    if (l) {
        *l = (struct lost){.next = h->lost, .at = at, .length = length};
        h->lost = l;
    }
    unmap_lost(h, false);
    ballast_take(h);
    pthread_rwlock_unlock(&h->lock);
}

// A forked child has copies of the descriptor and the mappings, so closing them does not affect the parent.
static void close_(struct vmem__backend *b, bool forked)
{
    struct host *h = b->priv;
    vmem__host_file_remove(&h->file);
    ballast_drop(h);
    close(h->file.fd);
    if (h->usage >= 0)
        close(h->usage);
    if (!forked) { // in a forked child, a thread that does not exist there may have held the lock
        unmap_lost(h, true);
        pthread_rwlock_destroy(&h->lock);
        pthread_mutex_destroy(&h->asking);
    }
    free(h);
}

// Sets the error of a call that creates or splits mappings.
__attribute__((format(printf, 2, 3))) static int map_error(int rc, const char *fmt, ...)
{
    char what[64];
    int limit = 0;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    FILE *f = rc == -ENOMEM ? fopen("/proc/sys/vm/max_map_count", "re") : NULL;
    if (f) {
        if (fscanf(f, "%d", &limit) != 1)
            limit = 0;
        fclose(f);
    }
    if (!limit)
        return vmem__error(rc, "%s: %s", what, strerror(-rc));
    return vmem__error(rc,
                       "%s: %s: the process may have vm.max_map_count = %d mappings, and takes one for every "
                       "run of pages and for every gap; raise it, or use larger pages",
                       what, strerror(-rc), limit);
}

// Sets the error of a failed reservation. Tries a small mapping: if that fails too, the number of mappings is the
// cause.
static int reserve_error(int err, uint64_t length)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *one = err == -ENOMEM ? mmap(NULL, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (one == MAP_FAILED)
        return map_error(err, "length %" PRIu64 ": mmap", length);
    munmap(one, page);
    return vmem__error(err,
                       "length %" PRIu64 ": the process has no free range of addresses that long, or may not have one "
                       "(ulimit -v)",
                       length);
}

// ---- address space ------------------------------------------------------------------------------------------

static int reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    struct host *h = b->priv;
    b->syscalls++;
    const int prot = r->flags & VMEM_RESERVE_BACKDROP ? PROT_READ : PROT_NONE;
    const uint64_t slack = VMEM_PAGE_2M;
    char *at = mmap(NULL, r->length + slack, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return reserve_error(-errno, r->length);
    char *start = (char *)(((uintptr_t)at + slack - 1) & ~(uintptr_t)(slack - 1)), *end = at + r->length + slack;
    int rc = 0;
    if (end > start + r->length && munmap(start + r->length, (size_t)(end - start) - r->length))
        rc = -errno;
    else
        end = start + r->length;
    if (!rc && start > at && munmap(at, (size_t)(start - at)))
        rc = -errno;
    else if (!rc)
        at = start;
    if (rc) {
        give_up(h, at, (size_t)(end - at));
        return map_error(rc, "length %" PRIu64 ": munmap", r->length);
    }
    r->addr = (uintptr_t)start;
    vmem__host_reservation_add(&h->file, r);
    return 0;
}

static void unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    b->syscalls++;
    vmem__host_reservation_remove(r);
    give_up(b->priv, (void *)(uintptr_t)r->addr, r->length);
}

// ---- memory -------------------------------------------------------------------------------------------------

static int arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    struct host *h = b->priv;
    // Until it is populated, an arena costs only the core's bookkeeping. Allow twice the memory, for fragmentation, but
    // not an unlimited number of pages that could never be populated.
    if (atomic_fetch_add(&h->arenas, a->size) + a->size > 2 * b->info.memory_total + ARENA_MIN) {
        h->arenas -= a->size;
        return vmem__error(-ENOMEM, "%" PRIu64 " bytes more of pages: the %s %" PRIu64 " bytes of memory", a->size,
                           h->cgroup ? "process's control group allows" : "machine has", b->info.memory_total);
    }
    uint64_t at = atomic_fetch_add(&h->end, a->size);
    if (at + a->size > (uint64_t)FILE_SIZE) {
        h->arenas -= a->size;
        return vmem__error(-ENOMEM, "all 2^62 bytes of the memfd have been used");
    }
    a->priv = (void *)(uintptr_t)at;
    return 0;
}

static int discard(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    struct host *h = b->priv;
    b->syscalls++;
    if (fallocate(h->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)file_offset(a, offset), (off_t)length))
        return vmem__error(-errno, "fallocate to punch a hole: %s", strerror(errno));
    return 1;
}

static void arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    struct host *h = b->priv;
    discard(b, a, 0, a->size);
    h->arenas -= a->size;
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

// The bytes that all processes of the control group use.
static bool usage(const struct host *h, uint64_t *used)
{
    char text[32] = "";
    return h->usage >= 0 && pread(h->usage, text, sizeof text - 1, 0) > 0 && sscanf(text, "%" SCNu64, used) == 1;
}

// After check_memory(), a quarter of the memory that was left may be populated within a second before the next check: by
// this context, or, if the system says how much they use, by all processes of the group.
static bool credited(struct host *h, uint64_t length)
{
    uint64_t used;
    if (now_ms() - h->asked_ms >= CREDIT_MS)
        return false;
    if (h->usage < 0)
        return atomic_fetch_sub(&h->unasked, (int64_t)length) >= (int64_t)length;
    return length <= h->small && usage(h, &used) && used + length <= h->trusted;
}

// Returns whether memory is plentiful, so that check_memory() is not needed. The check exists because the kernel would
// kill a process rather than refuse promised memory, but it is slow compared with populating a page. sysinfo() is
// quick, but it omits reclaimable page cache and ignores control groups.
static bool plenty(struct host *h, uint64_t length)
{
    struct sysinfo si;
    if (!h->cgroup && (sysinfo(&si) || (uint64_t)si.freeram * si.mem_unit >= length + (UINT64_C(256) << 20)))
        return true;
    return credited(h, length);
}

static int check_memory(struct host *h, uint64_t length)
{
    struct vmem__host_memory m;
    h->unasked = 0; // from here on, no thread begins without a check
    const uint64_t ended = h->ended;
    uint64_t used;
    h->trusted = 0;
    h->part = UINT64_MAX;
    const bool known = h->turn && usage(h, &used); // before the look: what others take meanwhile is not trusted
    if (vmem__host_memory("", &m))
        return 0;
    // The process itself needs some memory, also for page tables. What other threads were populating may be counted
    // twice, but it is at most a quarter.
    const uint64_t own = m.total / 64 < STAYS_MOST ? m.total / 64 : STAYS_MOST;
    const uint64_t stays = own + (h->begun - ended);
    const uint64_t left = (m.available > stays ? m.available - stays : 0) / (h->turn ? 1 : OTHERS);
    h->unasked = left > length ? (int64_t)((left - length) / 4) : 0;
    h->part = h->usage < 0 ? UINT64_MAX : own / OTHERS < GRANULE ? GRANULE : own / OTHERS / GRANULE * GRANULE;
    h->small = own / OTHERS < CREDIT_MOST ? own / OTHERS : CREDIT_MOST;
    if (known && left > length)
        h->trusted = used + length + (left - length) / 4;
    h->asked_ms = now_ms();
    if (left < length)
        return vmem__error(-ENOMEM, "%" PRIu64 " bytes of pages: %s has %" PRIu64 " bytes left", length,
                           m.cgroup ? "the process's control group" : "the machine", left);
    return 0;
}

// Until asked(), no other thread asks, and no other process of the group, which could count on the same memory. A file of the
// kernel's serves for the lock, because all of these have it.
static int ask(struct host *h, uint64_t length)
{
    pthread_mutex_lock(&h->asking);
    h->turn = h->usage < 0 || !flock(h->usage, LOCK_EX | LOCK_NB);
    for (int ms = 0; !h->turn && ms < TURN_MS; ms++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        h->turn = !flock(h->usage, LOCK_EX | LOCK_NB);
    }
    return credited(h, length) ? 0 : check_memory(h, length); // another thread may have asked meanwhile
}

static void asked(struct host *h)
{
    if (h->turn && h->usage >= 0)
        flock(h->usage, LOCK_UN);
    pthread_mutex_unlock(&h->asking);
}

static int allocate(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    struct host *h = b->priv;
    uint64_t step = length;
    int rc = 0;
    for (uint64_t done = 0; !rc && done < length;) {
        const uint64_t n = length - done < step ? length - done : step;
        const bool quietly = step < length; // it was interrupted
        sigset_t all, old;
        if (quietly) {
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &old);
        }
        b->syscalls++;
        rc = fallocate(h->file.fd, 0, (off_t)file_offset(a, offset + done), (off_t)n) ? -errno : 0;
        if (quietly)
            pthread_sigmask(SIG_SETMASK, &old, NULL);
        done += rc ? 0 : n;
        if (rc != -EINTR)
            continue;
        // Linux until early 2024 gives up all that it has allocated when any signal arrives. A periodic timer would make this
        // call repeat itself for ever.
        rc = step > GRANULE ? 0 : vmem__interrupted(b);
        step = step > QUIET_STEP ? QUIET_STEP : step / 2 / GRANULE * GRANULE;
        step = step < GRANULE ? GRANULE : step;
    }
    if (!rc)
        return 0;
    rc = rc == -ENOSPC ? -ENOMEM : rc;
    discard(b, a, offset, length);
    return rc == -EINTR ? rc : vmem__error(rc, "%" PRIu64 " bytes of pages: fallocate: %s", length, strerror(-rc));
}

// After ask(): populates all, looking at the memory before each part.
static int allocate_in_parts(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    struct host *h = b->priv;
    uint64_t done = 0;
    int rc = 0;
    for (uint64_t n; !rc && done < length; done += rc ? 0 : n) {
        n = h->part < length - done ? h->part : length - done;
        rc = done ? check_memory(h, length - done) : 0;
        if (!rc)
            rc = allocate(b, a, offset + done, n);
    }
    if (rc && done)
        discard(b, a, offset, done);
    return rc;
}

static int populate(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    struct host *h = b->priv;
    int rc;
    b->syscalls++;
    h->begun += length;
    const bool unasked = plenty(h, length);
    rc = unasked ? allocate(b, a, offset, length) : 0;
    h->ended += length;
    if (unasked)
        return rc;
    rc = ask(h, length);
    if (!rc)
        rc = allocate_in_parts(b, a, offset, length);
    asked(h);
    return rc;
}

static int zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    static const char zeros[1 << 16];
    struct host *h = b->priv;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = file_offset(runs[i].arena, runs[i].offset), end = at + runs[i].length;
        while (at < end) {
            size_t part = end - at < sizeof zeros ? end - at : sizeof zeros;
            ssize_t done = pwrite(h->file.fd, zeros, part, (off_t)at);
            b->syscalls++;
            if (done < 0 && errno != EINTR)
                return vmem__error(-errno, "zeroing pages: pwrite: %s", strerror(errno));
            at += done > 0 ? (uint64_t)done : 0;
        }
    }
    return 0;
}

// ---- mapping ------------------------------------------------------------------------------------------------

// Maps a slice of an arena at addresses of a reservation. If the arena is NULL, makes the addresses unbacked.
static int put(struct vmem__backend *b, const struct vmem__reservation *reservation, uint64_t addr, uint64_t length,
               const struct vmem__arena *a, uint64_t offset)
{
    const struct host *h = b->priv;
    const int unbacked = reservation->flags & VMEM_RESERVE_BACKDROP ? PROT_READ : PROT_NONE;
    void *at = (void *)(uintptr_t)addr;
    b->syscalls++;
    void *got = a ? mmap(at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, h->file.fd,
                         (off_t)file_offset(a, offset))
                  : mmap(at, length, unbacked, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return got == MAP_FAILED ? -errno : 0;
}

// Performs run *done and advances *done. When unmapping, it also performs the runs that follow at consecutive
// addresses: one call unmaps them all, wherever their memory is.
static int step(struct vmem__backend *b, const struct vmem__run *runs, size_t n, bool unmap, size_t *done)
{
    const struct vmem__run *r = &runs[*done];
    uint64_t length = r->length;
    size_t end = *done + 1;
    for (; unmap && end < n && runs[end].reservation == r->reservation && runs[end].addr == r->addr + length; end++)
        length += runs[end].length;
    int rc = unmap ? put(b, r->reservation, r->addr, length, NULL, 0)
                   : put(b, r->reservation, r->addr, length, r->arena, r->offset);
    if (!rc)
        *done = end;
    return rc;
}

static void undo(struct vmem__backend *b, const struct vmem__run *r, bool unmap)
{
    const int rc =
        put(b, r->reservation, r->addr, r->length, unmap ? r->arena : r->old_arena, unmap ? r->offset : r->old_offset);
    vmem__absent_set(b, r->reservation, r->addr, r->length, rc != 0);
}

// Takes the lock for writing and drops the ballast, or the reverse.
static void without_ballast(struct host *h, bool begin)
{
    if (begin) {
        pthread_rwlock_wrlock(&h->lock);
        ballast_drop(h);
    } else {
        ballast_take(h);
        pthread_rwlock_unlock(&h->lock);
    }
}

static int change(struct vmem__backend *b, const struct vmem__run *runs, size_t n, bool unmap, size_t *bad)
{
    struct host *h = b->priv;
    size_t done = 0;
    int rc = 0;
    pthread_rwlock_rdlock(&h->lock);
    while (done < n && !rc)
        rc = step(b, runs, n, unmap, &done);
    const bool light = unmap && h->light;
    pthread_rwlock_unlock(&h->lock);
    if (!rc && !light && !b->n_absent)
        return 0;
    *bad = done;
    // Once there are too many mappings, mmap() refuses even calls that would reduce their number, so drop the ballast.
    // An unmap then continues, because it reduces the number. A map is undone in reverse order, so that the number of
    // mappings never exceeds what it was before.
    without_ballast(h, true);
    if (unmap && rc)
        for (rc = 0; done < n && !rc;)
            rc = step(b, runs, n, unmap, &done);
    while (rc && done--)
        undo(b, &runs[done], unmap);
    if (!rc)
        vmem__absent_end(b, runs, n);
    without_ballast(h, false);
    return rc ? map_error(rc, "mmap") : 0;
}

static int map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return change(b, runs, n, false, bad);
}

static int unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return change(b, runs, n, true, bad);
}

static int restore(struct vmem__backend *b, const struct vmem__run *run)
{
    const uint64_t end = run->addr + run->length;
    uint64_t at = run->addr, n;
    int rc = 0;
    without_ballast(b->priv, true);
    for (; (at = vmem__absent_next(run->reservation, at, end, &n)), n && !rc; at += n) {
        rc = put(b, run->reservation, at, n, run->arena, run->offset + (at - run->addr));
        if (!rc)
            vmem__absent_set(b, run->reservation, at, n, false);
    }
    without_ballast(b->priv, false);
    return rc ? map_error(rc, "mmap") : 0;
}

// ---- common memory ------------------------------------------------------------------------------------------

static int common_reserve(struct vmem__backend *b, uint64_t length, uint64_t *addr)
{
    b->syscalls++;
    void *at = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *addr = (uintptr_t)at;
    return at == MAP_FAILED ? reserve_error(-errno, length) : 0;
}

static void common_unmap_all(struct vmem__backend *b, uint64_t addr, uint64_t length)
{
    b->syscalls++;
    give_up(b->priv, (void *)(uintptr_t)addr, length);
}

// A memfd of its own for each part, which cannot be cut short below those who map it.
static int common_new(struct vmem__backend *b, uint64_t length, int *fd)
{
    struct host *h = b->priv;
    b->syscalls++;
    int rc = 0, file = memfd_create("vmem-common", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (file < 0 && errno == EINVAL)
        file = memfd_create("vmem-common", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0)
        return vmem__error(-errno, "memfd_create: %s", strerror(errno));
    const bool unasked = plenty(h, length);
    if (!unasked)
        rc = ask(h, length);
    while (!rc && fallocate(file, 0, 0, (off_t)length) && (rc = -errno) == -EINTR)
        rc = 0;
    if (!unasked)
        asked(h);
    if (rc == -ENOSPC || (rc < 0 && rc != -ENOMEM))
        rc = vmem__error(rc == -ENOSPC ? -ENOMEM : rc, "fallocate of %" PRIu64 " bytes: %s", length, strerror(-rc));
    if (!rc && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
        rc = vmem__error(-errno, "sealing a memfd: %s", strerror(errno));
    if (rc)
        close(file);
    else
        *fd = file;
    return rc;
}

static int common_map(struct vmem__backend *b, uint64_t addr, uint64_t length, int fd, bool writable)
{
    const int seals = fcntl(fd, F_GET_SEALS);
    struct stat st;
    b->syscalls++;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) || (uint64_t)st.st_size != length)
        return vmem__error(-EINVAL, "fd %d is not the memory of a part of %" PRIu64 " bytes", fd, length);
    if (mmap((void *)(uintptr_t)addr, length, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, fd,
             0) == MAP_FAILED)
        return map_error(-errno, "mmap of a part");
    return 0;
}

static int common_seal(struct vmem__backend *b, uint64_t addr, uint64_t length)
{
    b->syscalls++;
    return mprotect((void *)(uintptr_t)addr, length, PROT_READ) ? map_error(-errno, "mprotect of a part") : 0;
}

static int common_unmap(struct vmem__backend *b, uint64_t addr, uint64_t length)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    b->syscalls++;
    return mmap((void *)(uintptr_t)addr, length, PROT_NONE, flags, -1, 0) == MAP_FAILED
               ? map_error(-errno, "munmap of a part")
               : 0;
}

// ---- data ---------------------------------------------------------------------------------------------------

static int copy(struct vmem__backend *b, const struct vmem_copy_op *ops, size_t n)
{
    (void)b;
    for (size_t i = 0; i < n; i++)
        memmove((void *)(uintptr_t)ops[i].dst, (const void *)(uintptr_t)ops[i].src, ops[i].length);
    return 0;
}

static int fill(struct vmem__backend *b, uint64_t addr, uint8_t value, uint64_t length)
{
    (void)b;
    memset((void *)(uintptr_t)addr, value, length);
    return 0;
}

const struct vmem__ops vmem__host_ops = {
    .name = "host",
    .probe = probe,
    .open = open_,
    .close = close_,
    .memory = memory,
    .reserve = reserve,
    .unreserve = unreserve,
    .arena_new = arena_new,
    .arena_free = arena_free,
    .populate = populate,
    .discard = discard,
    .zero = zero,
    .map = map,
    .unmap = unmap,
    .restore = restore,
    .copy = copy,
    .fill = fill,
    .common_reserve = common_reserve,
    .common_unreserve = common_unmap_all,
    .common_new = common_new,
    .common_map = common_map,
    .common_seal = common_seal,
    .common_unmap = common_unmap,
};
