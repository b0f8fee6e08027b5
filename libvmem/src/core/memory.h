// Core's interface to the floors above it, besides vmem.h: creating, keeping and moving memory, and threads.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_MEMORY_H
#define VMEM_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "core/error.h"
#include "vmem.h"

// ---- arithmetic; sat_ stays within 64 bits ---------------------------------------------------------------------

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
static inline uint64_t sat_sub(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }
static inline uint64_t sat_add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

#define MAX_RESERVE (UINT64_C(1) << 46) // the most bytes of anything

// ---- times of the monotonic clock, in ns ------------------------------------------------------------------------

static inline uint64_t vmem__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// For pthread_cond_timedwait.
static inline struct timespec vmem__in_ns(uint64_t ns)
{
    const uint64_t then = vmem__now() + ns;
    return (struct timespec){.tv_sec = (time_t)(then / 1000000000u), .tv_nsec = (long)(then % 1000000000u)};
}

// ---- contexts (call.c, page.c) ------------------------------------------------------------------------------

// An error unless the process may use the context. *owned, unless NULL: what reads 0 in a child that it forks.
int vmem__usable(const vmem_context *ctx, const unsigned char **owned);
// -EINVAL, naming page_size, unless the backend supports it.
int vmem__usable_page_size(const vmem_context *ctx, uint64_t page_size);

// ---- events of a stream (call.c) ------------------------------------------------------------------------------

// *event: NULL, or an event of before, which is recorded again. It stays NULL on the host, where no kernel is waited for.
int vmem__event_record(vmem_context *ctx, void *stream, void **event);
bool vmem__event_passed(vmem_context *ctx, void *event);
void vmem__event_free(vmem_context *ctx, void *event);

// ---- reservations (reservation.c) -------------------------------------------------------------------------------

// -EINVAL, naming [addr, addr + length), unless it is inside one reservation.
int vmem__check_reserved(vmem_context *ctx, uint64_t addr, uint64_t length);

// ---- creation (page.c) --------------------------------------------------------------------------------------

#define VMEM__CREATE_BOUND 0x80000000u // among the flags of creation: the pages are bound to their addresses
// Consecutive pages to be created. They continue physically behind the page `near` if that memory is free.
struct vmem__stretch {
    size_t n;       // pages
    vmem_page near; // 0: anywhere
    bool blocks;    // the pages are whole blocks: a new arena, if possible, rather than parts of blocks
    size_t more;    // pages that the next stretches will take from the same new arena
};
// vMemCreate for n pages in stretches.
int vmem__create_stretches(vmem_context *ctx, uint64_t page_size, const struct vmem__stretch *stretches, size_t n,
                           uint32_t flags, vmem_page *out);
static inline int vmem__create_near(vmem_context *ctx, uint64_t page_size, size_t n, vmem_page near, uint32_t flags,
                                    vmem_page *out)
{
    return vmem__create_stretches(ctx, page_size, &(struct vmem__stretch){.n = n, .near = near}, n, flags, out);
}

// ---- preallocated and unused memory (page.c, arena.c) --------------------------------------------------------

// Limits arenas that hold device memory to so many bytes, so that parts of the memory can go back. A new arena takes
// the place of unused ones. fit: none has more than the call needs that makes it, so that what calls share is little.
// Callers run an engine, so from now on no kernel zeroes memory.
void vmem__limit_arenas(vmem_context *ctx, uint64_t bytes, bool fit);
// The context's memory passes between callers that give it up in different sizes. An arena that fits what one of them gives
// up would stay for a page of another's. So arenas that fit have 2 MiB from now on.
void vmem__share_arenas(vmem_context *ctx);
// vmem_trim, but what anybody has taken ahead stays (struct vmem__ahead), and with `wanted` what callers wait for.
void vmem__trim_unused(vmem_context *ctx, bool wanted);

// ---- the account of device memory (account.c) ---------------------------------------------------------------

// What a cache has taken ahead of the device's memory: it can have `pages` without asking the device, and uses so many of
// them. Others of the context leave it the rest. Its owner writes the numbers, at any time.
struct vmem__ahead {
    struct vmem__ahead *next;
    _Atomic uint64_t pages, used;
    uint32_t page_shift;
};
void vmem__ahead_join(vmem_context *ctx, struct vmem__ahead *a);
bool vmem__ahead_leave(vmem_context *ctx, struct vmem__ahead *a); // false: it was not there
// The bytes that all but `own` have taken ahead and do not use.
uint64_t vmem__ahead_of_others(vmem_context *ctx, const struct vmem__ahead *own);

// The bytes that the device has given, that no page uses and that nobody but `own` has taken ahead, as far as the
// context's budget has room. *room, unless NULL: how much room it has.
uint64_t vmem__spare_memory(vmem_context *ctx, const struct vmem__ahead *own, uint64_t *room);
// The bytes that the device has free for more: the driver's answer, which may be `age` ns old, less what the context has
// taken since.
int vmem__device_free(vmem_context *ctx, uint64_t age, uint64_t *bytes);
// The bytes of pages that `own` could create, by both; UINT64_MAX: unknown, and a later request succeeds or fails.
uint64_t vmem__reachable(vmem_context *ctx, const struct vmem__ahead *own, uint64_t age);
// Whether memory is taken from the system, and mapped, page by page; and whether pages are not mapped many in a call,
// because of that or as each is a handle of its own.
bool vmem__by_granules(const vmem_context *ctx);
bool vmem__by_pieces(const vmem_context *ctx);

// Changes how many bytes callers wait for (wanted), and how many others have given up and will want back (missed).
// Memory that is freed meanwhile stays in the context: up to the first number while anybody waits, and up to the second
// until the next trim.
void vmem__expect(vmem_context *ctx, int64_t wanted, int64_t missed);
// The bytes of free memory that may have stayed for them. *device_bytes: what the context holds of the device, with what
// is on its way back.
uint64_t vmem__retained(vmem_context *ctx, uint64_t *device_bytes);
// True if some may have stayed and nobody waits any more.
bool vmem__has_unwanted(vmem_context *ctx);

// ---- pages that cannot be released yet (drop.c) -------------------------------------------------------------

// An object that must outlive pages which a call could not release, because the driver refused to unmap them or another
// call worked on them.
struct vmem__remnant {
    struct vmem__remnant *next;
    void (*end)(struct vmem__remnant *r);
};
// Returns the bytes of such pages of the context. If there are any, core calls r->end once they are released and their
// memory is back on the device, at the latest when the context ends. It holds no lock of its own then.
uint64_t vmem__outlive_doomed(vmem_context *ctx, struct vmem__remnant *r);

// ---- absent addresses (restore.c) -----------------------------------------------------------------------------

// How many addresses failed calls left without what belongs there: nearly always 0. It may be read at any time.
const _Atomic uint64_t *vmem__absent(const vmem_context *ctx);
// Tries to map that again. An error that names what still is absent of [addr, addr + length).
int vmem__check_present(vmem_context *ctx, uint64_t addr, uint64_t length);

// ---- threads (call.c) ---------------------------------------------------------------------------------------

// Starts a thread that gets no signals and, where cores are short, leaves them to the program's own threads. Returns 0
// or an error number, as pthread_create does.
int vmem__thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

#endif
