// Mapping, unmapping and release.
//
// Every call here: check all elements and mark what they touch, collecting the runs; call the backend; then either
// write the result into the shadow and the pages' lists, or take the marks back.
//
// SPDX-License-Identifier: MIT
#include "vmem_internal.h"

#define FEW 8 // runs kept on the stack

struct batch {
    vmem_context *ctx;
    uint32_t token;
    uint32_t flags;
    struct vmem__run *runs;
    size_t n, cap;
    struct vmem__run few[FEW];
};

static void batch_begin(struct batch *b, vmem_context *ctx, uint32_t flags)
{
    b->ctx = ctx;
    b->flags = flags;
    b->runs = b->few;
    b->n = 0;
    b->cap = FEW;
    vmem__lock(ctx);
    b->token = vmem__token(ctx);
}

static void batch_end(struct batch *b)
{
    for (size_t i = 0; i < b->n; i++)
        ((struct vmem__space *)b->runs[i].range)->inflight--;
    vmem__unlock(b->ctx);
    if (b->runs != b->few)
        free(b->runs);
}

static __attribute__((noinline)) int batch_push(struct batch *b, const struct vmem__run *run)
{
    if (b->n == b->cap) {
        size_t cap = b->cap * 8;
        struct vmem__run *runs = b->runs == b->few ? malloc(cap * sizeof *runs) : realloc(b->runs, cap * sizeof *runs);
        if (!runs)
            return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu runs", cap);
        if (b->runs == b->few)
            memcpy(runs, b->few, sizeof b->few);
        b->runs = runs;
        b->cap = cap;
    }
    b->runs[b->n++] = *run;
    ((struct vmem__space *)run->range)->inflight++;
    return 0;
}

// Adds a piece to the batch: to its last run where it continues that, or else as a run of its own. Pieces of different
// page sizes join only where `mixed` allows it.
static inline int batch_add(struct batch *b, struct vmem__space *s, uint64_t addr, uint64_t length,
                            struct vmem__arena_rec *a, uint64_t offset, struct vmem__arena_rec *old,
                            uint64_t old_offset, uint64_t page_size, bool mixed, size_t op)
{
    struct vmem__run *r = &b->runs[b->n - 1];
    if (b->n && r->addr + r->length == addr && r->range == &s->b && r->arena == &a->b &&
        r->offset + r->length == offset && (old ? r->old_arena == &old->b && r->old_offset + r->length == old_offset
                                                : !r->old_arena)) {
        if (r->page_size == page_size || mixed) {
            r->length += length;
            r->page_size = r->page_size < page_size ? r->page_size : page_size;
            return 0;
        }
    }
    return batch_push(b, &(struct vmem__run){
                             .range = &s->b,
                             .addr = addr,
                             .length = length,
                             .arena = &a->b,
                             .offset = offset,
                             .old_arena = old ? &old->b : NULL,
                             .old_offset = old_offset,
                             .page_size = page_size,
                             .flags = b->flags,
                             .op = op,
                         });
}

// Calls the backend without the lock. *op is then the element at fault.
static int batch_run(struct batch *b, int (*call)(struct vmem__backend *, const struct vmem__run *, size_t, size_t *),
                     size_t *op)
{
    size_t bad = 0;
    if (!b->n)
        return 0;
    vmem__unlock(b->ctx);
    int rc = call(&b->ctx->b, b->runs, b->n, &bad);
    vmem__lock(b->ctx);
    if (rc)
        *op = b->runs[bad < b->n ? bad : 0].op;
    return rc;
}

// The end of a batch of n that failed at element i.
static int fail(int rc, const char *what, size_t n, size_t i, size_t *bad)
{
    if (bad)
        *bad = i;
    return n > 1 ? vmem__error(rc, "%s[%zu]: %s", what, i, vmem_last_error()) : rc;
}

// ---- the pages' lists of addresses --------------------------------------------------------------------------

static struct vmem__slot *slot_at(vmem_context *ctx, uint64_t addr)
{
    struct vmem__space *s = vmem__space_find(ctx, addr);
    return vmem__slot_in(s, vmem__leaf_get(s, addr), addr);
}

// Enters a page that is mapped at a slot now; the frames of its slots are the caller's to write.
static inline void link_page(vmem_context *ctx, struct vmem__space *s, uint64_t addr, struct vmem__slot *slot,
                             struct vmem__page *p)
{
    slot->prev = 0;
    slot->next = p->mapping;
    if (p->mapping)
        slot_at(ctx, p->mapping)->prev = addr;
    p->mapping = addr;
    p->mappings++;
    s->mapped += p->units * UNIT;
    ctx->mapped += p->units * UNIT;
}

static inline void unlink_page(vmem_context *ctx, struct vmem__space *s, struct vmem__slot *slot, struct vmem__page *p)
{
    if (slot->next)
        slot_at(ctx, slot->next)->prev = slot->prev;
    if (slot->prev)
        slot_at(ctx, slot->prev)->next = slot->next;
    else
        p->mapping = slot->next;
    p->mappings--;
    s->mapped -= p->units * UNIT;
    ctx->mapped -= p->units * UNIT;
}

// ---- map ----------------------------------------------------------------------------------------------------

// Whether the pages mapped under [addr, addr + units) may be replaced: they lie inside it, and no other call has them.
static int check_slots(struct batch *b, const struct vmem__slot *slot, uint32_t units, uint64_t addr)
{
    for (uint32_t u = 0; u < units; u++) {
        const uint64_t at = addr + u * UNIT, frame = slot[u].frame & ~SLOT_PENDING;
        if (!slot[u].frame)
            continue;
        uint32_t owner = (uint32_t)slot[u].next;
        if (frame) {
            struct vmem__arena_rec *a = vmem__frame_arena(b->ctx, frame - 1);
            const struct vmem__page *unit = &a->pages[frame - 1 - a->base], *old = vmem__frame_page(a, frame - 1);
            owner = old->token;
            if (!(slot[u].frame & SLOT_PENDING) && (!owner || owner == b->token)) {
                if (!(b->flags & VMEM_MAP_REPLACE))
                    return vmem__error(-EEXIST, "addr 0x%" PRIx64 ": a page is mapped at 0x%" PRIx64
                                       " already, and VMEM_MAP_REPLACE is not set", addr, at);
                if (unit != old ? u == 0 : u + old->units > units)
                    return vmem__error(-EINVAL, "addr 0x%" PRIx64 ": the page of %" PRIu64
                                       " bytes that is mapped at 0x%" PRIx64 " sticks out of the new one",
                                       addr, old->units * UNIT, at);
                continue;
            }
        }
        if (owner == b->token)
            return vmem__error(-EINVAL, "addr 0x%" PRIx64 " overlaps an earlier element of the batch", addr);
        return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call works on 0x%" PRIx64, addr, at);
    }
    return 0;
}

// The largest page size that divides x.
static uint64_t page_size_of(uint64_t x)
{
    return x % VMEM_PAGE_2M == 0     ? VMEM_PAGE_2M
           : x % VMEM_PAGE_256K == 0 ? VMEM_PAGE_256K
           : x % VMEM_PAGE_128K == 0 ? VMEM_PAGE_128K
                                     : VMEM_PAGE_64K;
}

// Adds the runs of one page that replaces others: one for each stretch of old memory that is itself consecutive.
static int add_replacing(struct batch *b, struct vmem__space *s, uint64_t addr, struct vmem__arena_rec *a,
                         uint64_t offset, const struct vmem__slot *slot, uint32_t units, size_t i)
{
    int rc = 0;
    for (uint32_t u = 0, end; u < units && !rc; u = end) {
        const uint64_t frame = slot[u].frame & ~SLOT_PENDING;
        struct vmem__arena_rec *old = frame ? vmem__frame_arena(b->ctx, frame - 1) : NULL;
        // Frames of different arenas are never consecutive, so the frames alone tell.
        for (end = u + 1; end < units; end++) {
            if ((slot[end].frame & ~SLOT_PENDING) != (frame ? frame + (end - u) : 0))
                break;
        }
        const uint64_t shift = u * UNIT, length = (end - u) * UNIT;
        const uint64_t page_size = page_size_of((units * UNIT) | (addr + shift) | length | (offset + shift));
        rc = batch_add(b, s, addr + shift, length, a, offset + shift, old,
                       old ? (frame - 1 - old->base) * UNIT : 0, page_size, false, i);
    }
    return rc;
}

static int prepare_map(struct batch *b, const struct vmem_map_op *op, size_t i)
{
    vmem_context *ctx = b->ctx;
    const uint64_t addr = op->addr;
    struct vmem__arena_rec *a;
    struct vmem__page *p = vmem__page_get(ctx, op->page, &a);
    if (VMEM__UNLIKELY(!p))
        return vmem__error(-EINVAL, "page 0x%" PRIx64 " is not a page of this context (any more)", op->page);
    const uint32_t units = p->units;
    const uint64_t size = units * UNIT, offset = (uint64_t)(p - a->pages) * UNIT;
    struct vmem__space *s = vmem__space_find(ctx, addr);
    if (VMEM__UNLIKELY(!s || size > s->b.addr + s->b.length - addr))
        return vmem__error(-EINVAL, "addr 0x%" PRIx64 ": a page of %" PRIu64 " bytes there is not inside one reservation",
                           addr, size);
    if (VMEM__UNLIKELY(addr & (size - 1)))
        return vmem__error(-EINVAL, "addr 0x%" PRIx64 " is not a multiple of the page's size, %" PRIu64, addr, size);
    if (VMEM__UNLIKELY(p->token && p->token != b->token))
        return vmem__error(-EBUSY, "page 0x%" PRIx64 ": another call works on it", op->page);

    struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
    if (VMEM__UNLIKELY(!leaf) && !(leaf = vmem__leaf_new(ctx, s, addr)))
        return vmem__error(-ENOMEM, "no memory for bookkeeping");
    struct vmem__slot *slot = vmem__slot_in(s, leaf, addr);
    uint64_t any = 0;
    for (uint32_t u = 0; u < units; u++)
        any |= slot[u].frame;
    int rc = any ? check_slots(b, slot, units, addr) : 0;
    if (!rc)
        rc = any ? add_replacing(b, s, addr, a, offset, slot, units, i)
                 : batch_add(b, s, addr, size, a, offset, NULL, 0, size, false, i);
    if (VMEM__UNLIKELY(rc)) {
        vmem__leaf_put(ctx, s, leaf, addr, 0); // it may be new and empty
        return rc;
    }

    p->token = b->token;
    for (uint32_t u = 0; u < units; u++) {
        if (VMEM__UNLIKELY(slot[u].frame)) {
            struct vmem__arena_rec *old = vmem__frame_arena(ctx, slot[u].frame - 1);
            vmem__frame_page(old, slot[u].frame - 1)->token = b->token;
        } else {
            slot[u].next = b->token;
            leaf->used++;
        }
        slot[u].frame |= SLOT_PENDING;
    }
    return 0;
}

// Writes the result of a run: the old pages leave, the new ones enter. A page may lie in several runs, its first unit
// in the first of them.
static void commit_map(vmem_context *ctx, const struct vmem__run *run)
{
    struct vmem__space *s = (struct vmem__space *)run->range;
    struct vmem__arena_rec *a = (struct vmem__arena_rec *)run->arena;
    struct vmem__page *p = &a->pages[run->offset >> UNIT_SHIFT];
    uint64_t frame = vmem__page_frame(a, p), addr = run->addr;

    for (const uint64_t end = addr + run->length; addr < end; addr += UNIT, p++) {
        struct vmem__slot *slot = vmem__slot_in(s, vmem__leaf_get(s, addr), addr);
        if (run->old_arena) {
            struct vmem__arena_rec *old_arena = (struct vmem__arena_rec *)run->old_arena;
            struct vmem__page *old = &old_arena->pages[(run->old_offset + (addr - run->addr)) >> UNIT_SHIFT];
            if (old->state == UNIT_PAGE) {
                old->token = 0;
                unlink_page(ctx, s, slot, old);
            }
        }
        slot->frame = ++frame;
        if (p->state == UNIT_PAGE) {
            p->token = 0;
            link_page(ctx, s, addr, slot, p);
        }
    }
}

// Takes the marks of a run back, as far as they were set.
static void undo_map(vmem_context *ctx, const struct vmem__run *run)
{
    struct vmem__space *s = (struct vmem__space *)run->range;
    struct vmem__page *p = &((struct vmem__arena_rec *)run->arena)->pages[run->offset >> UNIT_SHIFT];
    for (uint64_t addr = run->addr; addr < run->addr + run->length; addr += UNIT, p++) {
        if (p->state == UNIT_PAGE)
            p->token = 0;
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        struct vmem__slot *slot = leaf ? vmem__slot_in(s, leaf, addr) : NULL;
        if (!slot || !(slot->frame & SLOT_PENDING))
            continue;
        slot->frame &= ~SLOT_PENDING;
        if (slot->frame) {
            struct vmem__arena_rec *old = vmem__frame_arena(ctx, slot->frame - 1);
            vmem__frame_page(old, slot->frame - 1)->token = 0;
        } else {
            vmem__leaf_put(ctx, s, leaf, addr, 1);
        }
    }
}

int vMemMapBatch(vmem_context *ctx, const struct vmem_map_op *ops, size_t n, uint32_t flags, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (flags & ~(VMEM_MAP_REPLACE | VMEM_MAP_FINE))
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_MAP_REPLACE and VMEM_MAP_FINE are known", flags);
    if (n && !ops)
        return vmem__error(-EINVAL, "ops is NULL");

    struct batch b;
    size_t at = 0;
    batch_begin(&b, ctx, flags);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare_map(&b, &ops[i], i);
        at = i;
    }
    if (!rc)
        rc = batch_run(&b, ctx->b.ops->map, &at);
    for (size_t r = 0; r < b.n; r++)
        rc ? undo_map(ctx, &b.runs[r]) : commit_map(ctx, &b.runs[r]);
    if (!rc) {
        ctx->map_ops += n;
        ctx->map_runs += b.n;
    }
    batch_end(&b);
    return rc ? fail(rc, "ops", n, at, bad) : 0;
}

int vMemMap(vmem_context *ctx, uint64_t addr, vmem_page page)
{
    return vMemMapBatch(ctx, &(struct vmem_map_op){addr, page}, 1, 0, NULL);
}

// ---- unmap --------------------------------------------------------------------------------------------------

// Marks a mapped page's first slot and adds its run.
static inline int mark_unmap(struct batch *b, struct vmem__space *s, uint64_t addr, struct vmem__slot *slot,
                      struct vmem__arena_rec *a, struct vmem__page *p, size_t i)
{
    const uint64_t size = p->units * UNIT;
    int rc = batch_add(b, s, addr, size, a, (uint64_t)(p - a->pages) * UNIT, NULL, 0, size, true, i);
    if (rc)
        return rc;
    slot->frame |= SLOT_PENDING;
    p->token = b->token;
    return 0;
}

// The page at a mapped slot.
static struct vmem__page *slot_page(vmem_context *ctx, const struct vmem__slot *slot, struct vmem__arena_rec **a)
{
    uint64_t frame = (slot->frame & ~SLOT_PENDING) - 1;
    *a = vmem__frame_arena(ctx, frame);
    return vmem__frame_page(*a, frame);
}

// Whether a page begins before addr and goes on after it.
static bool cuts(vmem_context *ctx, const struct vmem__space *s, uint64_t addr)
{
    struct vmem__leaf *leaf = addr < s->b.addr + s->b.length ? vmem__leaf_get(s, addr) : NULL;
    const struct vmem__slot *slot = leaf ? vmem__slot_in(s, leaf, addr) : NULL;
    struct vmem__arena_rec *a;
    if (!slot || !(slot->frame & ~SLOT_PENDING))
        return false;
    const struct vmem__page *p = slot_page(ctx, slot, &a);
    return vmem__page_frame(a, p) != (slot->frame & ~SLOT_PENDING) - 1;
}

static int prepare_unmap(struct batch *b, const struct vmem_unmap_op *op, size_t i)
{
    vmem_context *ctx = b->ctx;
    struct vmem__space *s = vmem__space_find(ctx, op->addr);
    if (!s || op->length > s->b.addr + s->b.length - op->addr)
        return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 ") is not inside one reservation", op->addr, op->length);
    if (op->addr % UNIT || op->length % UNIT || !op->length)
        return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 "): address and length must be multiples of 64 KiB, the "
                           "length not 0", op->addr, op->length);
    const uint64_t end = op->addr + op->length;
    if (cuts(ctx, s, op->addr) || cuts(ctx, s, end))
        return vmem__error(-EINVAL, "[0x%" PRIx64 ", +%" PRIu64 ") cuts the page mapped at its %s", op->addr, op->length,
                           cuts(ctx, s, op->addr) ? "start" : "end");

    for (uint64_t addr = op->addr, step; addr < end; addr += step) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        step = UNIT;
        if (!leaf) {
            step = LEAF_SLOTS * UNIT - (addr - s->b.addr) % (LEAF_SLOTS * UNIT);
            continue;
        }
        struct vmem__slot *slot = vmem__slot_in(s, leaf, addr);
        if (!slot->frame)
            continue;
        if (slot->frame == SLOT_PENDING)
            return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call maps there", addr);
        struct vmem__arena_rec *a;
        struct vmem__page *p = slot_page(ctx, slot, &a);
        step = p->units * UNIT;
        if (p->token && p->token != b->token)
            return vmem__error(-EBUSY, "addr 0x%" PRIx64 ": another call works on the page mapped there", addr);
        if (slot->frame & SLOT_PENDING)
            continue; // an earlier element unmaps it
        int rc = mark_unmap(b, s, addr, slot, a, p, i);
        if (rc)
            return rc;
    }
    return 0;
}

// Takes back the marks of an unmapping batch, or empties its slots. The runs name every page in it.
static void finish_unmap(struct batch *b, bool commit)
{
    vmem_context *ctx = b->ctx;
    for (size_t r = 0; r < b->n; r++) {
        const struct vmem__run *run = &b->runs[r];
        struct vmem__space *s = (struct vmem__space *)run->range;
        struct vmem__page *p = &((struct vmem__arena_rec *)run->arena)->pages[run->offset >> UNIT_SHIFT];
        for (uint64_t addr = run->addr, end = addr + run->length; addr < end; addr += p->units * UNIT, p += p->units) {
            struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
            struct vmem__slot *slot = vmem__slot_in(s, leaf, addr);
            p->token = 0;
            slot->frame &= ~SLOT_PENDING;
            if (!commit)
                continue;
            unlink_page(ctx, s, slot, p);
            for (uint32_t u = 0; u < p->units; u++)
                slot[u].frame = 0;
            vmem__leaf_put(ctx, s, leaf, addr, p->units);
            ctx->unmap_ops++;
        }
    }
    if (commit)
        ctx->unmap_runs += b->n;
}

int vMemUnmapBatch(vmem_context *ctx, const struct vmem_unmap_op *ops, size_t n, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !ops)
        return vmem__error(-EINVAL, "ops is NULL");

    struct batch b;
    size_t at = 0;
    batch_begin(&b, ctx, 0);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = prepare_unmap(&b, &ops[i], i);
        at = i;
    }
    if (!rc)
        rc = batch_run(&b, ctx->b.ops->unmap, &at);
    finish_unmap(&b, !rc);
    batch_end(&b);
    return rc ? fail(rc, "ops", n, at, bad) : 0;
}

int vMemUnmap(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    return vMemUnmapBatch(ctx, &(struct vmem_unmap_op){addr, length}, 1, NULL);
}

// ---- release ------------------------------------------------------------------------------------------------

static int prepare_release(struct batch *b, vmem_page page, size_t i)
{
    vmem_context *ctx = b->ctx;
    struct vmem__arena_rec *a;
    struct vmem__page *p = vmem__page_get(ctx, page, &a);
    if (!p)
        return vmem__error(-EINVAL, "page 0x%" PRIx64 " is not a page of this context (any more)", page);
    if (p->token == b->token)
        return vmem__error(-EINVAL, "page 0x%" PRIx64 " is in the batch twice", page);
    if (p->token)
        return vmem__error(-EBUSY, "page 0x%" PRIx64 ": another call works on it", page);
    int rc = 0;
    for (uint64_t addr = p->mapping; addr && !rc;) {
        struct vmem__space *s = vmem__space_find(ctx, addr);
        struct vmem__slot *slot = vmem__slot_in(s, vmem__leaf_get(s, addr), addr);
        rc = mark_unmap(b, s, addr, slot, a, p, i);
        addr = slot->next;
    }
    if (!rc)
        p->token = b->token;
    return rc;
}

// Ends the pages and collects their memory in pieces. Returns how many.
static size_t end_pages(vmem_context *ctx, const vmem_page *pages, size_t n, struct vmem__piece *pieces)
{
    size_t n_pieces = 0;
    for (size_t i = 0; i < n; i++) {
        struct vmem__arena_rec *a = NULL;
        struct vmem__page *p = vmem__page_get(ctx, pages[i], &a);
        uint32_t first = (uint32_t)(p - a->pages);
        for (uint32_t u = 0; u < p->units; u++)
            p[u].dirty = 1;
        p->state = UNIT_IDLE;
        p->generation++;
        ctx->created -= p->units * UNIT;
        struct vmem__piece *last = n_pieces ? &pieces[n_pieces - 1] : NULL;
        if (last && last->arena == a && last->first + last->units == first) {
            last->units += p->units;
        } else if (last && last->arena == a && first + p->units == last->first) {
            last->first = first;
            last->units += p->units;
        } else {
            pieces[n_pieces++] = (struct vmem__piece){.arena = a, .first = first, .units = p->units, .committed = true};
        }
    }
    return n_pieces;
}

int vMemReleaseBatch(vmem_context *ctx, const vmem_page *pages, size_t n, size_t *bad)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (n && !pages)
        return vmem__error(-EINVAL, "pages is NULL");

    struct vmem__piece few[FEW], *pieces = few;
    if (n > FEW && !(pieces = malloc(n * sizeof *pieces)))
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", n);
    struct batch b;
    size_t marked = 0, at = 0;
    batch_begin(&b, ctx, 0);
    for (; marked < n && !rc; marked += !rc) {
        rc = prepare_release(&b, pages[marked], marked);
        at = marked;
    }
    if (!rc)
        rc = batch_run(&b, ctx->b.ops->unmap, &at);
    finish_unmap(&b, !rc);
    if (!rc) {
        vmem__give(ctx, pieces, end_pages(ctx, pages, n, pieces));
    } else {
        for (size_t i = 0; i < marked; i++) {
            struct vmem__arena_rec *a;
            vmem__page_get(ctx, pages[i], &a)->token = 0;
        }
    }
    batch_end(&b);
    if (pieces != few)
        free(pieces);
    return rc ? fail(rc, "pages", n, at, bad) : 0;
}

int vMemRelease(vmem_context *ctx, vmem_page page)
{
    return vMemReleaseBatch(ctx, &page, 1, NULL);
}

// ---- query --------------------------------------------------------------------------------------------------

int vmem_query(vmem_context *ctx, uint64_t addr, vmem_page *page, uint64_t *offset)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (!page)
        return vmem__error(-EINVAL, "page is NULL");
    vmem__lock(ctx);
    struct vmem__space *s = vmem__space_find(ctx, addr);
    if (s) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
        const struct vmem__slot *slot = leaf ? vmem__slot_in(s, leaf, addr) : NULL;
        *page = 0;
        if (offset)
            *offset = 0;
        if (slot && (slot->frame & ~SLOT_PENDING)) {
            struct vmem__arena_rec *a;
            const struct vmem__page *p = slot_page(ctx, slot, &a);
            uint64_t frame = vmem__page_frame(a, p);
            *page = (vmem_page)p->generation << FRAME_BITS | frame;
            if (offset)
                *offset = ((slot->frame & ~SLOT_PENDING) - 1 - frame) * UNIT + addr % UNIT;
        }
    }
    vmem__unlock(ctx);
    return s ? 0 : vmem__error(-EINVAL, "addr 0x%" PRIx64 " is in no reservation", addr);
}
