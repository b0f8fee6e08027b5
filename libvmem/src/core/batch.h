// Shared by mapping, unmapping, release and commit (map.c, unmap.c, commit.c).
//
// Each of these calls first checks all elements, marks what they touch and collects the runs. Then it calls the
// backend. Finally it writes the result into the shadow and the pages' lists, or removes the marks.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_BATCH_H
#define VMEM_BATCH_H

#include "core/core.h"

#define BATCH_FEW 8 // runs kept on the stack

struct batch {
    vmem_context *ctx;
    uint32_t opid;
    uint32_t flags;
    struct vmem__run *runs;
    size_t n, cap;
    struct vmem__run few[BATCH_FEW];
    // Memory of pages that the batch has ended, with consecutive pages as one piece. The list runs through the pieces'
    // first granules (`next`, `granules`), so it takes no memory, and ending pages cannot fail.
    struct vmem__page *ended;
    struct vmem__arena_rec *ended_arena;
    uint64_t ended_frame;
};

void vmem__batch_begin(struct batch *b, vmem_context *ctx, uint32_t flags);
// The caller holds the lock.
void vmem__batch_init(struct batch *b, vmem_context *ctx, uint32_t flags);
void vmem__batch_end(struct batch *b);
int vmem__batch_push(struct batch *b, const struct vmem__run *run);
// Calls the backend without the lock. On failure, *op is the element at fault.
int vmem__batch_run(struct batch *b, int (*call)(struct vmem__backend *, const struct vmem__run *, size_t, size_t *),
                    size_t *op);
// Frees what batch_end_page() collected. Drops the lock for a while, so no part of the batch may be unfinished.
void vmem__batch_free_ended(struct batch *b);
// map.c. Records that the backend has mapped a run, and removes its marks. A page may be in several runs; its first
// granule is in the first of them.
void vmem__commit_run(vmem_context *ctx, const struct vmem__run *run);
// Ends a batch of n elements that failed at element i.
int vmem__batch_fail(int rc, const char *what, size_t n, size_t i, size_t *bad);

// Adds a piece to the batch. A piece that continues the last run extends it; otherwise it becomes a new run. Pieces of
// different page sizes join only if `mixed` allows it.
static inline int batch_add(struct batch *b, struct vmem__reservation_rec *s, uint64_t addr, uint64_t length,
                            struct vmem__arena_rec *a, uint64_t offset, struct vmem__arena_rec *old,
                            uint64_t old_offset, uint64_t page_size, bool mixed, size_t op)
{
    struct vmem__run *r = b->n ? &b->runs[b->n - 1] : NULL;
    if (r && r->addr + r->length == addr && r->reservation == &s->b && r->arena == &a->b &&
        r->offset + r->length == offset &&
        (old ? r->old_arena == &old->b && r->old_offset + r->length == old_offset : !r->old_arena)) {
        if (r->page_size == page_size || mixed) {
            r->length += length;
            r->page_size = r->page_size < page_size ? r->page_size : page_size;
            return 0;
        }
    }
    return vmem__batch_push(b, &(struct vmem__run){
                                   .reservation = &s->b,
                                   .addr = addr,
                                   .length = length,
                                   .arena = &a->b,
                                   .offset = offset,
                                   .old_arena = old ? &old->b : NULL,
                                   .old_offset = old_offset,
                                   .page_size = page_size,
                                   .flags = b->flags | (old ? VMEM_MAP_REPLACE : 0),
                                   .op = op,
                               });
}

static inline bool all_empty(const uint64_t *entry, uint32_t granules)
{
    uint64_t any = entry[0];
    for (uint32_t u = 1; u < granules; u++)
        any |= entry[u];
    return !any;
}

// Marks empty entries, where the batch is going to map.
static inline void mark_empty(struct batch *b, struct vmem__leaf *leaf, uint64_t *entry, uint32_t granules)
{
    leaf->used += granules;
    for (uint32_t u = 0; u < granules; u++)
        entry[u] = ENTRY_PENDING | ENTRY_COMING | b->opid;
}

// The end of the leaf that contains addr, but at most `end`.
static inline uint64_t leaf_end(const struct vmem__reservation_rec *s, uint64_t addr, uint64_t end)
{
    const uint64_t stop = addr + LEAF_ENTRIES * GRANULE - (addr - s->b.addr) % (LEAF_ENTRIES * GRANULE);
    return stop < end ? stop : end;
}

// The page at a mapped entry.
static inline struct vmem__page *entry_page(vmem_context *ctx, const uint64_t *entry, struct vmem__arena_rec **a)
{
    uint64_t frame = vmem__entry_frame(*entry) - 1;
    *a = vmem__frame_arena(ctx, frame);
    return vmem__frame_page(*a, frame);
}

// ---- the pages' lists of addresses --------------------------------------------------------------------------

static inline struct vmem__link *link_at(vmem_context *ctx, uint64_t addr)
{
    struct vmem__reservation_rec *s = vmem__reservation_find(ctx, addr);
    struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
    return &leaf->links[vmem__entry_in(s, leaf, addr) - leaf->entries];
}

// Records that a page is mapped at addr. The caller writes its entries.
static inline void link_page(vmem_context *ctx, uint64_t addr, struct vmem__page *p)
{
    if (VMEM__UNLIKELY(p->mappings)) {
        struct vmem__link *other = link_at(ctx, p->mapping);
        other->prev = addr;
        if (p->mappings == 1)
            other->next = 0;
        *link_at(ctx, addr) = (struct vmem__link){.next = p->mapping};
    }
    p->mapping = addr;
    p->mappings++;
}

static inline void unlink_page(vmem_context *ctx, uint64_t addr, struct vmem__page *p)
{
    if (VMEM__LIKELY(p->mappings == 1)) {
        p->mapping = 0;
    } else {
        const struct vmem__link link = *link_at(ctx, addr);
        if (link.next)
            link_at(ctx, link.next)->prev = link.prev;
        if (link.prev)
            link_at(ctx, link.prev)->next = link.next;
        else
            p->mapping = link.next;
    }
    p->mappings--;
}

// The next address after addr at which the page is mapped, or 0.
static inline uint64_t next_mapping(vmem_context *ctx, uint64_t addr, const struct vmem__page *p)
{
    return p->mappings > 1 ? link_at(ctx, addr)->next : 0;
}

// Ends a page that is mapped nowhere. vmem__batch_free_ended() frees its memory.
static inline void batch_end_page(struct batch *b, struct vmem__arena_rec *a, struct vmem__page *p)
{
    const uint64_t frame = vmem__page_frame(a, p);
    const uint32_t granules = p->granules;
    // Update `generation` first: loading the word after a narrow store beside it stalls store forwarding.
    p->generation++;
    p->state = GRANULE_IDLE;
    for (uint32_t u = 0; u < granules; u++)
        p[u].dirty = 1;
    b->ctx->created -= granules * GRANULE;
    b->ctx->n_doomed -= p->doomed;
    // Frames of different arenas are never consecutive, so comparing frames is enough.
    struct vmem__page *last = b->ended;
    if (last && b->ended_frame + last->granules == frame) {
        last->granules += granules;
        return;
    }
    p->next = last ? b->ended_frame + 1 : 0;
    if (last && frame + granules == b->ended_frame) {
        p->next = last->next;
        p->granules += last->granules;
    }
    b->ended = p;
    b->ended_arena = a;
    b->ended_frame = frame;
}

// Adds to the bytes that are mapped in a reservation. A negated count subtracts.
static inline void count_mapped(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t bytes)
{
    s->mapped += bytes;
    ctx->mapped += bytes;
}

#endif
