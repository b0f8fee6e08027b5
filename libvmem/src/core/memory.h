// Core's interface to the floors above it, besides vmem.h: memory in the shape that they need, and threads.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_MEMORY_H
#define VMEM_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/error.h"
#include "vmem.h"

// ---- arithmetic; sat_ stays within 64 bits ---------------------------------------------------------------------

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
static inline uint64_t sat_sub(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }
static inline uint64_t sat_add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

// ---- creation (page.c) --------------------------------------------------------------------------------------

#define VMEM__CREATE_BOUND 0x80000000u // among the flags of creation: the pages are bound to their addresses
// vMemCreate of n pages in stretches. Each continues physically after its page `near` if that memory is free (0:
// anywhere).
struct vmem__stretch {
    size_t n;
    vmem_page near;
    bool whole;  // an arena for it alone, if there can be one: the pages are mapped and unmapped together
    bool blocks; // of whole blocks: a new arena, if there can be one, rather than parts of blocks
    size_t more; // pages that the next stretches will take from the same new arena
};
int vmem__create_stretches(vmem_context *ctx, uint64_t page_size, const struct vmem__stretch *stretches, size_t n,
                           uint32_t flags, vmem_page *out);
static inline int vmem__create_near(vmem_context *ctx, uint64_t page_size, size_t n, vmem_page near, uint32_t flags,
                                    vmem_page *out)
{
    return vmem__create_stretches(ctx, page_size, &(struct vmem__stretch){.n = n, .near = near}, n, flags, out);
}

// ---- memory held ready (page.c, arena.c) --------------------------------------------------------------------

// vmem_prealloc; whole: in arenas that are mapped whole, as far as it goes.
int vmem__prealloc(vmem_context *ctx, uint64_t bytes, bool whole);
// From now on, arenas that hold device memory have so many bytes at most, so that parts of it can go back, and a new one
// takes the place of unused ones. Who asks for this runs an engine: memory is zeroed with no kernel from now on.
void vmem__limit_arenas(vmem_context *ctx, uint64_t bytes);
// vmem_trim, keeping `ahead` bytes besides the pages that exist; wanted: or as much as callers wait for.
int vmem__trim_to(vmem_context *ctx, uint64_t ahead, bool wanted, uint64_t *freed);
// From now on, so many bytes more (or less) are waited for, or were given up by somebody who will want them back. Memory that
// others free meanwhile stays in the context: up to that for the first until nobody waits, for the second until a trim.
void vmem__expect(vmem_context *ctx, int64_t wanted, int64_t missed);

// ---- pages that cannot be released yet (drop.c) -------------------------------------------------------------

// Something that must outlive pages which a call could not release: those that the driver refuses to unmap, or on which
// another call works.
struct vmem__remnant {
    struct vmem__remnant *next;
    void (*end)(struct vmem__remnant *r);
};
// The bytes of such pages of the context. If there are any, r->end is called once there are none and their memory is back
// on the device, or else by the end of the context. The caller of `end` holds no lock of the core.
uint64_t vmem__outlive_doomed(vmem_context *ctx, struct vmem__remnant *r);

// ---- moving what pages contain (move.c) ---------------------------------------------------------------------

// Creates n pages in an arena of their own, which is no larger than they are.
int vmem__create_apart(vmem_context *ctx, uint64_t page_size, size_t n, vmem_page *out);
// Copies pages to others of the same size, without mapping them. All are the caller's. -EOPNOTSUPP where the backend
// cannot: no error text is set then.
int vmem__copy_pages(vmem_context *ctx, const vmem_page *from, const vmem_page *to, size_t n, uint64_t page_size);
// The granules in use of the page's arena; UINT32_MAX if less than a block of it is not.
uint32_t vmem__arena_used(vmem_context *ctx, vmem_page page);

// ---- threads (call.c) ---------------------------------------------------------------------------------------

// Starts a thread that gets no signals and, where cores are short, leaves them to the program's own threads. Returns 0
// or an error number, as pthread_create does.
int vmem__thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

#endif
