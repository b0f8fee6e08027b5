// Declarations shared by the files of libvmem's core. What the floors above may use of it is in core/memory.h.
//
// Locking. One mutex, ctx->lock, guards every field in this file except where noted. It is never held across a backend
// call. A call that needs the backend proceeds as follows: lock, validate, mark what it touches, unlock, call the
// backend, lock, commit or unwind, unlock. (Only restore.c calls it with the lock held.) The marks are:
//   - a page, by vmem__page.opid: some call maps, unmaps or releases it;
//   - a shadow entry (64 KiB of addresses), by ENTRY_PENDING: some call maps or unmaps there;
//   - a reservation, by vmem__reservation_rec.inflight: some backend call uses it, so it cannot be freed;
//   - granules of an arena that are in no free list and in no page: the call that took them commits, discards or zeroes
//     them;
//   - addresses that vmem_copy_batch and vmem_fill access, by a struct vmem__access in ctx->accesses.
// A call that finds another call's mark returns -EBUSY. Only vmem_context_destroy waits: every call is counted in
// ctx->calls between vmem__begin() and vmem__end().
//
// An object that must be freed while another call's mark is on it is doomed (drop.c). It is freed when a call ends.
//
// The room keeps contexts: reservations, pages, what is mapped where, and the account of device memory. It calls
// backend.h alone. Begin with map.c, which has the shape of every batch, then batch.h.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_INTERNAL_H
#define VMEM_INTERNAL_H

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "core/memory.h"

#define VMEM__LIKELY(x) __builtin_expect(!!(x), 1)
#define VMEM__UNLIKELY(x) __builtin_expect(!!(x), 0)

// Everything is counted in granules, the smallest pages.
#define GRANULE_SHIFT 16
#define GRANULE VMEM_PAGE_64K
// Arenas consist of whole 2 MiB blocks, of memory and of frame numbers.
#define BLOCK_SHIFT 5
#define BLOCK_GRANULES (1u << BLOCK_SHIFT)
#define BLOCK VMEM_PAGE_2M
// A page handle is the generation of the page's first frame together with the frame, XORed with the context's salt. A
// handle of another context decodes to a frame that does not exist, or to a wrong generation. The salt has a bit that
// no frame has, so no handle is 0.
#define FRAME_BITS 40
#define FRAME_MASK ((UINT64_C(1) << FRAME_BITS) - 1)
#define FRAME_END (UINT64_C(1) << (FRAME_BITS - 1))
#define GENERATION_MAX ((1u << 24) - 1)
// Memory is committed and zeroed in steps of this many bytes, which take about 10 ms each. A call can be interrupted
// between two steps.
#define VMEM__PORTION (UINT64_C(32) << 20)

// ---- physical memory (arena.c, page.c) ----------------------------------------------------------------------

enum vmem__state {
    GRANULE_IDLE = 0, // inside a free extent, or owned by the call that took it from one
    GRANULE_FREE,     // first or last granule of a free extent
    GRANULE_PAGE,     // first granule of a page
    GRANULE_REST,     // another granule of a page
    GRANULE_RETIRED,  // its generation counter is exhausted; unused until the arena is freed
};

// One per granule of an arena.
struct vmem__page {
    union {
        struct {              // GRANULE_PAGE
            uint64_t mapping; // first address at which it is mapped (others: vmem__link.next); 0: none
            uint32_t mappings;
            uint32_t opid; // operation id of the call that is working on it; 0: none
        };
        struct { // first granule of a free extent: neighbours in the free list, as frame + 1
            uint64_t next, prev;
        };
    };
    uint32_t granules; // GRANULE_PAGE: of the page. GRANULE_REST: back to the page's first. GRANULE_FREE: of the extent
    uint32_t generation : 24, state : 3;
    uint32_t dirty : 1;     // was part of a page since the backend last zeroed it
    uint32_t raw : 1;       // never zeroed since its arena was made; dirty, too
    uint32_t bound : 1;     // GRANULE_PAGE: made by vmem_commit; freed with its last mapping
    uint32_t doomed : 1;    // GRANULE_PAGE: to be released as soon as possible
    uint32_t committed : 1; // first and last granule of a free extent: it holds device memory
};

struct vmem__arena_rec {
    struct vmem__arena b; // the backend's view
    struct vmem__arena_rec *next, *prev;
    uint64_t base; // frame of offset 0
    uint32_t granules;
    uint32_t used;      // granules in pages, or otherwise outside the free lists
    uint32_t retired;   // granules
    uint32_t committed; // granules in free extents, or retired, that hold device memory
    uint64_t leaving;   // bytes of these that go with the arena
    struct vmem__page pages[];
};

// Frames are numbered in blocks. A block's generations outlive the arena, so no handle is ever reused.
struct vmem__block {
    struct vmem__arena_rec *arena; // NULL: free
    uint32_t generation;           // of the next arena here; above GENERATION_MAX: block not usable again
};

#define VMEM__BINS 33
struct vmem__freelist {
    uint64_t head[VMEM__BINS]; // extents of [2^i, 2^(i+1)) granules: frame + 1 of the first
    uint64_t nonempty;         // bit i: head[i] != 0
};

// Consecutive granules of one arena on their way into or out of the free lists.
struct vmem__piece {
    struct vmem__arena_rec *arena;
    uint32_t first, granules;
    bool committed;
    bool zeroed; // by discard()
};

// ---- address space (reservation.c) --------------------------------------------------------------------------------

// The shadow has an entry for each granule of a reservation. An entry is frame + 1 of the granule that is mapped there,
// or 0. While a call works on it, it also has ENTRY_PENDING. If it was empty before, it has both marks and the
// operation id of that call.
#define ENTRY_PENDING (UINT64_C(1) << 63)
#define ENTRY_COMING (UINT64_C(1) << 62)
// The granule mapped there, as frame + 1, or 0.
static inline uint64_t vmem__entry_frame(uint64_t entry) { return entry & ENTRY_COMING ? 0 : entry & ~ENTRY_PENDING; }

// The next and the previous address of a page that is mapped at several addresses, stored at its first entry. Undefined
// for a page with a single address, so that most links are never accessed.
struct vmem__link {
    uint64_t next, prev;
};

#define LEAF_SHIFT 8
#define LEAF_ENTRIES (1u << LEAF_SHIFT) // 16 MiB of addresses; pages are at most 2 MiB and never cross leaves
struct vmem__leaf {
    uint32_t used;            // entries mapped or pending; at 0 the leaf is freed
    struct vmem__leaf *spare; // the next one, in vmem_context.spare
    uint64_t entries[LEAF_ENTRIES];
    struct vmem__link links[LEAF_ENTRIES];
};

struct vmem__reservation_rec {
    struct vmem__reservation b; // the backend's view
    uint64_t mapped;            // bytes
    uint64_t inflight;          // backend calls that use it
    bool doomed;                // to be freed as soon as inflight is 0
    struct vmem__leaf *leaves[];
};

// ---- data (data.c) ------------------------------------------------------------------------------------------

// Addresses that a copy or a fill in flight accesses. On its caller's stack.
struct vmem__access {
    struct vmem__access *next;
    const struct vmem_copy_op *ops;
    size_t n;
    bool fill; // without a source
};

// ---- contexts -----------------------------------------------------------------------------------------------

struct vmem_context {
    const unsigned char *owned; // reads 1, and 0 in a forked child, where the kernel wipes it. Not guarded.
    struct vmem__backend b;     // not guarded
    uint64_t salt;              // of page handles; constant
    pthread_mutex_t lock;
    uint64_t calls;      // in flight
    bool closing;        // vmem_context_destroy waits for idle: calls has become 0
    pthread_cond_t idle; // calls or interrupting has become 0
    int (*interrupted)(void *arg);
    void *interrupt_arg;
    uint64_t interrupting; // threads inside it
    struct vmem__access *accesses;
    uint64_t n_doomed; // pages and reservations, and one if there are remnants
    struct vmem__remnant *remnants;
    bool sweeping; // a call is freeing these
    void (*sweep)(
        vmem_context *ctx); // vmem__sweep, which every call may need at its end, but no file below drop.c knows
    uint64_t undoing;       // interrupted calls that keep what they free, for vmem__shrink_later
    bool shrinking;         // its thread runs
    bool stuck;             // kernel or driver resources were exhausted, and nothing was unmapped since

    struct vmem__reservation_rec **reservations; // by address
    size_t n_reservations, cap_reservations;
    struct vmem__reservation_rec *last_reservation;
    struct vmem__leaf *spare;
    size_t n_spare;

    struct vmem__block *blocks;
    size_t n_blocks, cap_blocks;
    size_t free_block; // no block before it is free
    struct vmem__arena_rec *arenas;
    struct vmem__freelist free[2]; // [1]: extents that hold device memory. Without populate() all do.

    uint32_t opid;          // the last operation id given to a call
    uint64_t budget, limit; // most bytes of pages: 0 without a budget; the budget, or otherwise the device's memory
    uint64_t keep;          // bytes of device memory that release keeps: vmem_prealloc
    uint64_t expected;      // bytes beyond the pages that callers wait for: vmem__expect. Freed memory stays for them,
    uint64_t expected_back; // and for those who gave up so many, until the next trim
    uint64_t retained_peak; // the most bytes of free memory that may have stayed for them
    bool unwanted;          // some may have stayed, and nobody waits any more
    struct vmem__ahead *ahead; // who has taken memory ahead
    struct vmem__device_free {
        uint64_t bytes, committed, at; // the device's free memory, `committed` below at that time, and when (ns)
    } device_free;
    uint64_t arena_bytes, arena_free; // bytes of arenas; of free extents in them
    uint64_t moving, moved;           // arenas that calls make or return with the lock dropped; those that came or went
    pthread_cond_t settled;           // one of `moving` has ended
    uint64_t committed;               // bytes of device memory in arenas
    uint64_t going, gone; // bytes that were to go back to the system so far, with the lock dropped; that have gone
    uint64_t reserved, created, mapped, map_ops, map_runs, unmap_ops, unmap_runs;
};

// drop.c. Frees what is doomed and on which no call works now.
void vmem__sweep(vmem_context *ctx);
// Ends all remnants. The caller holds the lock, which this drops for a while.
void vmem__end_remnants(vmem_context *ctx);

// restore.c. With the lock held.
//
// Tries to map again what failed calls left absent.
void vmem__restore(vmem_context *ctx);
// The same, and an error that names what still is absent of [addr, addr + length).
int vmem__present(vmem_context *ctx, uint64_t addr, uint64_t length);

// call.c
//
// Refuses a call at its entry if the process may not use the context.
int vmem__refuse(const vmem_context *ctx) __attribute__((cold));
static inline int vmem__enter(const vmem_context *ctx)
{
    return VMEM__LIKELY(ctx && *ctx->owned) ? 0 : vmem__refuse(ctx);
}
static inline void vmem__lock(vmem_context *ctx) { pthread_mutex_lock(&ctx->lock); }
static inline void vmem__unlock(vmem_context *ctx) { pthread_mutex_unlock(&ctx->lock); }
// Every call that needs the lock takes it by begin first and drops it by end last. It may drop it in between.
static inline void vmem__begin(vmem_context *ctx)
{
    vmem__lock(ctx);
    ctx->calls++;
}
static inline void vmem__end(vmem_context *ctx)
{
    if (VMEM__UNLIKELY(ctx->n_doomed && !ctx->sweeping && !ctx->stuck))
        ctx->sweep(ctx);
    if (VMEM__UNLIKELY(--ctx->calls == 0 && ctx->closing))
        pthread_cond_broadcast(&ctx->idle);
    vmem__unlock(ctx);
}
// An operation id for a call, with which it marks what it touches.
static inline uint32_t vmem__opid(vmem_context *ctx)
{
    if (++ctx->opid == 0)
        ctx->opid = 1;
    return ctx->opid;
}

// Creates a context with the given operations. vmem_context_create calls it with those that it has chosen.
int vmem__context_create_ops(const struct vmem__ops *ops, const struct vmem_options *opts, vmem_context **out);

// arena.c. All with the lock held; grow and give drop it for a while.
//
// Takes up to `granules` from the free extents, in multiples of `align` granules and aligned to it. False if there are
// none.
bool vmem__take_piece(vmem_context *ctx, bool committed, uint64_t granules, uint32_t align, struct vmem__piece *out);
// The same from the extent that starts at granule `first` of the arena, if there is one.
bool vmem__take_piece_at(vmem_context *ctx, struct vmem__arena_rec *a, uint32_t first, uint64_t granules,
                         uint32_t align, struct vmem__piece *out);
// Puts pieces into the free lists, and returns to the system what exceeds what is kept, expected and the hysteresis.
void vmem__free_pieces(vmem_context *ctx, struct vmem__piece *p, size_t n);
// A new arena, of at least `align` granules and up to `granules` where it can. Unless `zeroed`, the caller zeroes its raw
// granules.
int vmem__grow(vmem_context *ctx, uint64_t granules, uint32_t align, bool zeroed);
// After a call was refused memory: whether arenas came or went since ctx->moved was `seen`, so that it should look again.
// Waits for those on their way, because what another call makes is counted before anybody can take from it.
bool vmem__wait_moved(vmem_context *ctx, uint64_t seen);
// Returns all free memory beyond ctx->keep, or that and ctx->expected, to the system, without hysteresis.
void vmem__shrink(vmem_context *ctx, bool wanted);
// The same in another thread, for an interrupted call that must return at once. It takes 100 ms or more per GiB.
void vmem__shrink_later(vmem_context *ctx);
// Waits until all that other calls were returning to the system has gone, or as much.
void vmem__wait_gone(vmem_context *ctx);
void vmem__arenas_destroy(vmem_context *ctx);

// page.c
//
// -EINVAL, naming page_size, unless the backend supports it.
int vmem__bad_page_size(const vmem_context *ctx, uint64_t page_size) __attribute__((cold));
static inline int vmem__check_page_size(const vmem_context *ctx, uint64_t page_size)
{
    if (VMEM__LIKELY(page_size && !(page_size & (page_size - 1)) && (page_size & ctx->b.info.page_sizes)))
        return 0;
    return vmem__bad_page_size(ctx, page_size);
}
// Sets the budget; 0: none.
static inline void vmem__limit(vmem_context *ctx, uint64_t budget)
{
    const uint64_t total = ctx->b.info.memory_total;
    ctx->budget = budget;
    ctx->limit = budget && budget < total ? budget : total;
}
// -ENOMEM unless the budget and the device allow n more pages, which are at most 2^46 bytes. The caller holds the lock.
int vmem__no_room(const vmem_context *ctx, uint64_t page_size, size_t n) __attribute__((cold));
static inline int vmem__check_room(const vmem_context *ctx, uint64_t page_size, size_t n)
{
    return VMEM__LIKELY(ctx->created + n * page_size <= ctx->limit) ? 0 : vmem__no_room(ctx, page_size, n);
}
// Turns a piece into pages of so many granules, and writes their handles.
void vmem__make_pages(const vmem_context *ctx, const struct vmem__piece *piece, uint32_t granules, uint32_t flags,
                      vmem_page *out);
// The frame in a handle that is known to be valid.
static inline uint64_t vmem__handle_frame(const vmem_context *ctx, vmem_page page)
{
    return (page ^ ctx->salt) & FRAME_MASK;
}
// The page that a handle names, with its arena; NULL if it does not exist.
static inline struct vmem__page *vmem__page_get(const vmem_context *ctx, vmem_page page, struct vmem__arena_rec **arena)
{
    page ^= ctx->salt;
    uint64_t frame = page & FRAME_MASK, block = frame >> BLOCK_SHIFT;
    if (VMEM__UNLIKELY(block >= ctx->n_blocks))
        return NULL;
    struct vmem__arena_rec *a = ctx->blocks[block].arena;
    if (VMEM__UNLIKELY(!a || frame - a->base >= a->granules))
        return NULL;
    struct vmem__page *p = &a->pages[frame - a->base];
    if (VMEM__UNLIKELY(p->state != GRANULE_PAGE || p->generation != page >> FRAME_BITS))
        return NULL;
    *arena = a;
    return p;
}
static inline vmem_page vmem__handle(const vmem_context *ctx, const struct vmem__page *p, uint64_t frame)
{
    return ((vmem_page)p->generation << FRAME_BITS | frame) ^ ctx->salt;
}
// The arena of a frame that is known to exist.
static inline struct vmem__arena_rec *vmem__frame_arena(const vmem_context *ctx, uint64_t frame)
{
    return ctx->blocks[frame >> BLOCK_SHIFT].arena;
}
// The first granule of the page that a mapped frame belongs to.
static inline struct vmem__page *vmem__frame_page(const struct vmem__arena_rec *a, uint64_t frame)
{
    const struct vmem__page *p = &a->pages[frame - a->base];
    return (struct vmem__page *)(p->state == GRANULE_REST ? p - p->granules : p);
}
static inline uint64_t vmem__page_frame(const struct vmem__arena_rec *a, const struct vmem__page *p)
{
    return a->base + (uint64_t)(p - a->pages);
}

// data.c. -EBUSY, with *bad, if a copy or a fill in flight accesses the addresses of a run. With the lock held.
int vmem__check_accesses(const vmem_context *ctx, const struct vmem__run *runs, size_t n, size_t *bad);

// reservation.c. With the lock held.
//
// The reservation that holds addr, or NULL.
struct vmem__reservation_rec *vmem__reservation_find(vmem_context *ctx, uint64_t addr);
// The index of the first reservation that ends after addr.
size_t vmem__reservation_after(const vmem_context *ctx, uint64_t addr);
// -EINVAL, naming [addr, addr + length), unless it is inside one reservation, which is *out then.
int vmem__reservation_of(vmem_context *ctx, uint64_t addr, uint64_t length, struct vmem__reservation_rec **out);
// The same, and -EINVAL unless address and length are multiples of `granule`, a power of two.
int vmem__check_range(vmem_context *ctx, uint64_t addr, uint64_t length, uint64_t granule,
                      struct vmem__reservation_rec **out);
// -EINVAL unless a reservation, which is then *out, starts at addr and was not given up.
int vmem__reservation_start(vmem_context *ctx, uint64_t addr, struct vmem__reservation_rec **out);
// Removes a reservation on which no call works from the table. The caller then frees it without the lock.
void vmem__reservation_remove(vmem_context *ctx, struct vmem__reservation_rec *s);
void vmem__reservation_end(vmem_context *ctx, struct vmem__reservation_rec *s);
void vmem__reservation_free(struct vmem__reservation_rec *s, bool leaves); // leaves: there are some
// Gives the addresses back. Not with the lock held, or when the context ends.
void vmem__unreserve(vmem_context *ctx, struct vmem__reservation_rec *s);
struct vmem__leaf *vmem__leaf_new(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t addr); // NULL: no memory
void vmem__leaf_drop(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t addr);
static inline struct vmem__leaf *vmem__leaf_get(const struct vmem__reservation_rec *s, uint64_t addr)
{
    return s->leaves[(addr - s->b.addr) >> (GRANULE_SHIFT + LEAF_SHIFT)];
}
static inline uint64_t *vmem__entry_in(const struct vmem__reservation_rec *s, struct vmem__leaf *leaf, uint64_t addr)
{
    return &leaf->entries[((addr - s->b.addr) >> GRANULE_SHIFT) & (LEAF_ENTRIES - 1)];
}
// Counts that many entries of the leaf as unused again.
static inline void vmem__leaf_put(vmem_context *ctx, struct vmem__reservation_rec *s, struct vmem__leaf *leaf,
                                  uint64_t addr, uint32_t granules)
{
    leaf->used -= granules;
    if (VMEM__UNLIKELY(!leaf->used))
        vmem__leaf_drop(ctx, s, addr);
}
void vmem__reservations_destroy(vmem_context *ctx);

#endif
