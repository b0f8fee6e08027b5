// The contract between libvmem's core and a backend.
//
// The core does all bookkeeping: which pages exist, where they are mapped, what may overlap, and the budget. It checks
// every argument once. A backend knows only reservations of addresses, arenas of physical memory, and runs that map a
// slice of an arena at a slice of a reservation. Its requests are valid and never overlap, and it never sees a page
// handle.
//
// Concurrency: the core calls a backend from several threads at once, without holding a lock. No two calls in flight
// concern the same addresses of a reservation or the same bytes of an arena. Those that make or free an object
// (reserve, unreserve, arena_new, arena_free) never run beside other calls on it. The backend serialises whatever else
// must be.
//
// The room brings pages behind addresses in four ways, a folder each, and none includes another. It calls driver/ alone.
// Begin with struct vmem__ops below, then host/host.c.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_BACKEND_H
#define VMEM_BACKEND_H

#include <stdatomic.h>
#include <stdbool.h>

#include "core/error.h"
#include "vmem.h"

struct vmem__reservation {
    uint64_t addr;   // set by reserve(); 2 MiB aligned
    uint64_t length; // a multiple of 64 KiB
    uint32_t flags;  // VMEM_RESERVE_*
    // What is absent: a bit for each 64 KiB, and how many are set. vmem__absent_set() changes them.
    _Atomic uint64_t *absent;
    _Atomic uint64_t n_absent;
    void *priv; // the backend's, and so are next and link
    struct vmem__reservation *next, **link;
};

struct vmem__arena {
    uint64_t size; // a multiple of 2 MiB
    bool raw;      // set by arena_new(): its memory must go through zero() before it is mapped for the first time
    void *priv;    // the backend's
};

// Consecutive in addresses and in physical memory.
struct vmem__run {
    struct vmem__reservation *reservation;
    uint64_t addr, length;         // multiples of page_size
    struct vmem__arena *arena;     // map(): the memory to map. unmap(): the memory that is mapped
    uint64_t offset;               // in the arena; a multiple of page_size
    struct vmem__arena *old_arena; // map() with VMEM_MAP_REPLACE: the memory that the whole run replaces,
    uint64_t old_offset;           // consecutive too; NULL if nothing is mapped
    uint64_t page_size;            // of the run's pages, or of the parts of a page that replaces several.
                                   // unmap(): of the smallest page
    uint32_t flags;                // map(): VMEM_MAP_*
    size_t op;                     // index of the caller's element that the run starts with, for *bad
};

struct vmem__backend {
    const struct vmem__ops *ops;
    void *priv;
    struct vmem_info info;       // filled by open()
    _Atomic uint64_t syscalls;   // counted by the backend
    _Atomic uint64_t overhead;   // bytes of device memory for backdrop and scratch, kept by the backend
    _Atomic uint64_t n_absent;   // of all its reservations
    uint64_t arena_min;          // smallest arena worth allocating, a multiple of 2 MiB
    uint64_t arena_max;          // largest possible arena; arena_min == arena_max == 2 MiB: one arena per page
    bool arenas_fit;             // an arena has no more than the call needs that makes it
    _Atomic bool beside_kernels; // an engine's kernels run beside: zeroing starts none, however much there is of it
};

struct vmem__ops {
    const char *name;

    // A cheap test whether open() can succeed. On failure, the vmem__error() text is the one fact that prevents it.
    int (*probe)(const struct vmem_options *opts);
    // Optional (NULL: yes). Whether a context that names no backend may use this one; else the text says why not.
    int (*by_default)(const struct vmem_options *opts);
    int (*open)(struct vmem__backend *b, const struct vmem_options *opts);
    // Everything is already freed, unless the process forked. Then this must free nothing that the parent still uses.
    void (*close)(struct vmem__backend *b, bool forked);
    // Total and free bytes of the device.
    int (*memory)(struct vmem__backend *b, uint64_t *total, uint64_t *free);

    int (*reserve)(struct vmem__backend *b, struct vmem__reservation *r);
    // Cannot fail. Also unmaps what is still mapped because unmap() failed.
    void (*unreserve)(struct vmem__backend *b, struct vmem__reservation *r);
    // Optional (NULL: the backdrop always covers the whole reservation).
    int (*backdrop)(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length);

    // Allocates a->size bytes of physical memory, zeroed unless it sets a->raw. -ENOMEM if there is none.
    int (*arena_new)(struct vmem__backend *b, struct vmem__arena *a);
    void (*arena_free)(struct vmem__backend *b, struct vmem__arena *a);
    // Optional. populate() commits the memory of a slice before it is used, and discard() returns it afterwards. If
    // discard() returns 1, the slice reads as zero; if 0, it keeps its contents.
    int (*populate)(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length);
    int (*discard)(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length);
    // Zeroes slices of an arena, and returns when it is done. Only arena, offset and length of the runs are set.
    int (*zero)(struct vmem__backend *b, const struct vmem__run *runs, size_t n);

    // All or nothing: after a failure, what was mapped before is mapped, and *bad is the run at fault. When unmap() has
    // returned, no GPU or CPU access through the addresses reaches the memory.
    //
    // A driver that refuses a call may refuse the calls that undo it, too. All addresses where something else may be
    // mapped then than before are absent: of the runs, and of pages beside them whose entry was to be cut. Nobody may
    // access absent addresses. A later map or unmap of them is valid, is made as if what was mapped before were there,
    // and ends their absence if it succeeds.
    int (*map)(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad);
    int (*unmap)(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad);
    // Maps the run's memory, or nothing if `arena` is NULL, at those of the run's addresses that are absent, and ends
    // their absence. On failure, those that it did not come to stay absent. Changes no other address, except by making
    // it absent. page_size is 64 KiB, whatever the size of the pages.
    int (*restore)(struct vmem__backend *b, const struct vmem__run *run);

    int (*copy)(struct vmem__backend *b, const struct vmem_copy_op *ops, size_t n);
    int (*fill)(struct vmem__backend *b, uint64_t addr, uint8_t value, uint64_t length);

    // Optional, together (NULL: work has ended when the call that gave it to the device returns). record() makes *event,
    // unless there is one that has passed, and lets it pass when all work given to the CUDA stream before has ended.
    // passed() returns 1 if it has, 0 if not, or an error.
    int (*record)(struct vmem__backend *b, void *stream, void **event);
    int (*passed)(struct vmem__backend *b, void *event);
    void (*event_free)(struct vmem__backend *b, void *event);

    // Common memory (vmem_common.h). Lengths are multiples of 2 MiB. reserve() sets *addr; nothing is mapped when
    // unreserve() is called, which cannot fail. new() makes a descriptor that is the memory's only reference. map() and
    // unmap() concern whole parts, of which none or all are mapped. seal() makes a mapped part read-only.
    int (*common_reserve)(struct vmem__backend *b, uint64_t length, uint64_t *addr);
    void (*common_unreserve)(struct vmem__backend *b, uint64_t addr, uint64_t length);
    int (*common_new)(struct vmem__backend *b, uint64_t length, int *fd);
    int (*common_map)(struct vmem__backend *b, uint64_t addr, uint64_t length, int fd, bool writable);
    int (*common_seal)(struct vmem__backend *b, uint64_t addr, uint64_t length);
    int (*common_unmap)(struct vmem__backend *b, uint64_t addr, uint64_t length);
};

// absent.c. All are safe beside each other.
//
// Marks those of the addresses that the reservation has, or removes their marks.
void vmem__absent_set(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length,
                      bool absent);
// Removes the marks of runs that were mapped or unmapped.
void vmem__absent_end_runs(struct vmem__backend *b, const struct vmem__run *runs, size_t n) __attribute__((cold));
static inline void vmem__absent_end(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    if (b->n_absent)
        vmem__absent_end_runs(b, runs, n);
}
// The first absent addresses in [addr, end), which are in the reservation; *length: how many bytes, 0 if there are none.
uint64_t vmem__absent_next(const struct vmem__reservation *r, uint64_t addr, uint64_t end, uint64_t *length);

// Best first; NULL at the end.
extern const struct vmem__ops *const vmem__backends[];
extern const struct vmem__ops vmem__uvm_ops, vmem__stock_ops, vmem__cuda_ops, vmem__host_ops;

// Calls the context's interrupt function: 0, or -EINTR with the text set. For loops in arena_new() that may take more
// than about 50 ms; they must then leave nothing behind. Not for code that undoes something.
int vmem__interrupted(struct vmem__backend *b);

#endif
