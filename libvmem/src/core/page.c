// Physical pages: creation, queries, and the memory held ready for them.
//
// SPDX-License-Identifier: MIT
#include <stdio.h>

#include "core/core.h"

// Bytes per part of a create call, for which the lock is held once. If memory is committed page by page, an interrupted
// call frees at most one part.
#define PART(ctx) ((ctx)->b.ops->populate ? UINT64_C(64) << 20 : UINT64_C(1) << 30)

int vmem__usable_page_size(const vmem_context *ctx, uint64_t page_size)
{
    return vmem__check_page_size(ctx, page_size);
}

int vmem__bad_page_size(const vmem_context *ctx, uint64_t page_size)
{
    char sizes[64] = "";
    for (uint64_t size = GRANULE; size <= VMEM_PAGE_2M; size *= 2) {
        const size_t used = strlen(sizes);
        if (size & ctx->b.info.page_sizes)
            snprintf(sizes + used, sizeof sizes - used, "%s%" PRIu64 " KiB", used ? ", " : "", size >> 10);
    }
    return vmem__error(-EINVAL, "page_size %" PRIu64 ": the %s backend has pages of %s", page_size, ctx->b.ops->name,
                       sizes);
}

void vmem__make_pages(const vmem_context *ctx, const struct vmem__piece *piece, uint32_t granules, uint32_t flags,
                      vmem_page *out)
{
    struct vmem__page *p = &piece->arena->pages[piece->first], *const end = p + piece->granules;
    uint64_t frame = piece->arena->base + piece->first;
    for (; p < end; p += granules, frame += granules) {
        // Read `generation` first: loading the word after a narrow store stalls store forwarding.
        *out++ = vmem__handle(ctx, p, frame);
        p->mapping = 0;
        p->mappings = 0;
        p->opid = 0;
        p->granules = granules;
        p->state = GRANULE_PAGE;
        p->bound = (flags & VMEM__CREATE_BOUND) != 0;
        p->doomed = 0;
        for (uint32_t i = 1; i < granules; i++) {
            p[i].state = GRANULE_REST;
            p[i].granules = i;
        }
    }
}

// True if a granule must be zeroed before it becomes part of a page.
static inline bool unclean(const struct vmem__page *granule, uint32_t flags)
{
    return flags & VMEM_CREATE_ZERO ? granule->dirty : granule->raw;
}

// Zeroes the unclean granules of the pieces. Uses few calls, because each may wait for the device.
static int zero_unclean(struct vmem__backend *b, const struct vmem__piece *pieces, size_t n, uint32_t flags)
{
    struct vmem__run runs[64];
    const uint32_t step = (uint32_t)(VMEM__PORTION / GRANULE);
    uint32_t granules = 0;
    size_t n_runs = 0;
    int rc = 0;
    for (size_t i = 0; i < n; i++) {
        const struct vmem__piece *p = &pieces[i];
        const struct vmem__page *granule = &p->arena->pages[p->first];
        const bool some = flags & VMEM_CREATE_ZERO || p->arena->b.raw;
        for (uint32_t u = 0, end; some && u < p->granules && !rc; u = end) {
            for (end = u; end < p->granules && end - u < step && unclean(&granule[end], flags);)
                end++;
            if (end == u) {
                end++;
                continue;
            }
            runs[n_runs++] = (struct vmem__run){.arena = &p->arena->b,
                                                .offset = (p->first + u) * GRANULE,
                                                .length = (end - u) * GRANULE};
            granules += end - u;
            if (n_runs == sizeof runs / sizeof runs[0] || granules >= step) {
                rc = b->ops->zero(b, runs, n_runs);
                n_runs = 0;
            }
            if (!rc && granules >= step) {
                rc = vmem__interrupted(b);
                granules = 0;
            }
        }
    }
    return rc || !n_runs ? rc : b->ops->zero(b, runs, n_runs);
}

// Commits as many bytes of a piece as possible; *done is their number.
static int populate_whole(struct vmem__backend *b, const struct vmem__piece *p, uint64_t *done)
{
    const uint64_t length = p->granules * GRANULE;
    int rc = 0;
    for (*done = 0; !rc && *done < length;) {
        const uint64_t step = length - *done < VMEM__PORTION ? length - *done : VMEM__PORTION;
        rc = b->ops->populate(b, &p->arena->b, p->first * GRANULE + *done, step);
        *done += rc ? 0 : step;
        if (!rc && *done < length)
            rc = vmem__interrupted(b);
    }
    return rc;
}

// Commits the memory of pieces without any, and zeroes it if requested or never done. Needs no lock, because this call owns the
// granules.
static int pages_ready(vmem_context *ctx, const struct vmem__piece *pieces, size_t n, uint32_t flags)
{
    struct vmem__backend *b = &ctx->b;
    uint64_t length = 0;
    size_t done = 0;
    int rc = 0;
    for (; done < n && !rc; done++) {
        if (!pieces[done].committed)
            rc = populate_whole(b, &pieces[done], &length);
    }
    if (!rc)
        rc = zero_unclean(b, pieces, n, flags);
    // On failure, discard what was committed here, which may be only a part of the last piece. The caller puts the
    // granules back.
    for (size_t i = 0; rc && i < done; i++) {
        const struct vmem__piece *p = &pieces[i];
        const uint64_t bytes = i == done - 1 && length ? length : p->granules * GRANULE;
        if (!p->committed && (i < done - 1 || length))
            b->ops->discard(b, &p->arena->b, p->first * GRANULE, bytes);
    }
    return rc;
}

static int check_create(vmem_context *ctx, uint64_t page_size, size_t n, uint32_t flags, const vmem_page *out)
{
    int rc = vmem__check_page_size(ctx, page_size);
    if (rc)
        return rc;
    if (flags & ~(VMEM_CREATE_ZERO | VMEM__CREATE_BOUND))
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_CREATE_ZERO is known", flags);
    if (n && !out)
        return vmem__error(-EINVAL, "pages is NULL");
    if (n > MAX_RESERVE >> __builtin_ctzll(page_size))
        return vmem__error(-ENOMEM, "n: %zu pages of %" PRIu64 " bytes are more than 2^46 bytes", n, page_size);
    return 0;
}

static const char *whose_memory(const vmem_context *ctx)
{
    return ctx->b.info.caps & VMEM_CAP_GPU ? "device has" : "machine has, or allows this process,";
}

int vmem__no_room(const vmem_context *ctx, uint64_t page_size, size_t n)
{
    const uint64_t total = ctx->b.info.memory_total, created = ctx->created, bytes = n * page_size;
    if (ctx->budget && (created >= ctx->budget || bytes > ctx->budget - created))
        return vmem__error(-ENOMEM,
                           "%zu pages of %" PRIu64 " bytes exceed the budget of %" PRIu64 ": %" PRIu64 " bytes exist",
                           n, page_size, ctx->budget, ctx->created);
    return vmem__error(-ENOMEM,
                       "%zu pages of %" PRIu64 " bytes besides %" PRIu64 " bytes: the %s %" PRIu64 " bytes of memory",
                       n, page_size, ctx->created, whose_memory(ctx), total);
}

// Takes up to `left` granules for pages of `granules` each: after page `near`, or otherwise from committed memory, or
// otherwise from uncommitted memory.
static inline bool take_for_pages(vmem_context *ctx, uint32_t granules, uint64_t left, vmem_page near, bool scraps,
                                  struct vmem__piece *p)
{
    struct vmem__arena_rec *a;
    const struct vmem__page *q = near ? vmem__page_get(ctx, near, &a) : NULL;
    if (q && vmem__take_piece_at(ctx, a, (uint32_t)(q - a->pages) + q->granules, left, granules, p))
        return true;
    // Long stretches start at whole blocks, so that 2 MiB page-table entries can map them.
    const bool blocks = left >= BLOCK_GRANULES && granules < BLOCK_GRANULES;
    if (blocks && vmem__take_piece(ctx, true, left, BLOCK_GRANULES, p))
        return true;
    // A new arena rather than parts of blocks: to map these takes a call for each, and others for the entries around.
    if (blocks && !scraps && !ctx->b.ops->populate && ctx->arena_free <= ctx->arena_bytes / 8)
        return false;
    return vmem__take_piece(ctx, true, left, granules, p) ||
           (blocks && vmem__take_piece(ctx, false, left, BLOCK_GRANULES, p)) ||
           vmem__take_piece(ctx, false, left, granules, p);
}

// Makes a new arena, after a check for an interrupt if the last ones took long. *fresh: bytes made since that check.
static int __attribute__((cold)) make_arena(vmem_context *ctx, uint64_t wanted, uint32_t granules, uint64_t *fresh)
{
    const uint64_t before = ctx->arena_bytes, seen = ctx->moved;
    int rc = 0;
    if (*fresh >= VMEM__PORTION) {
        vmem__unlock(ctx);
        rc = vmem__interrupted(&ctx->b);
        vmem__lock(ctx);
        *fresh = 0;
    }
    if (!rc)
        rc = vmem__grow(ctx, wanted, granules, false);
    if (rc == -ENOMEM && vmem__wait_moved(ctx, seen))
        return 0;
    if (!rc)
        *fresh += ctx->b.ops->populate ? 0 : ctx->arena_bytes - before;
    return rc;
}

// A part of a call that creates pages.
struct part {
    uint32_t granules; // of a page
    uint32_t flags;
    size_t n;
    uint64_t more;  // granules that will follow
    vmem_page near; // continues physically behind this page, which is the last one made then; 0: anywhere
    bool grown;     // new arenas were made for it
    bool scraps;    // parts of blocks, rather than a new arena
};

// The memory that a part's pages are made of.
struct pieces {
    struct vmem__piece few[16], *all;
    size_t n;
    bool ready; // all is committed and as clean as requested
};

static inline void note_piece(vmem_context *ctx, const struct part *part, struct pieces *pieces)
{
    const struct vmem__piece *p = &pieces->all[pieces->n++];
    if (!p->committed) {
        ctx->committed += p->granules * GRANULE;
        pieces->ready = false;
    }
    const bool look = part->flags & VMEM_CREATE_ZERO || p->arena->b.raw;
    for (uint32_t u = 0; look && pieces->ready && u < p->granules; u++)
        pieces->ready = !unclean(&p->arena->pages[p->first + u], part->flags);
}

// Takes memory, and makes the pages.
static inline int make_part(vmem_context *ctx, struct part *part, struct pieces *pieces, vmem_page *out)
{
    uint64_t left = (uint64_t)part->n * part->granules, fresh = 0;
    int rc = 0;
    while (left && !rc) {
        struct vmem__piece *p = &pieces->all[pieces->n];
        if (!take_for_pages(ctx, part->granules, left, part->near, part->scraps, p)) {
            rc = make_arena(ctx, left + part->more, part->granules, &fresh);
            part->grown |= !rc;
            if (rc == -ENOMEM && !part->scraps) {
                part->scraps = true;
                rc = 0;
            }
            continue;
        }
        note_piece(ctx, part, pieces);
        vmem__make_pages(ctx, p, part->granules, part->flags, out);
        out += p->granules >> __builtin_ctz(part->granules);
        part->near = out[-1];
        left -= p->granules;
    }
    return rc;
}

// Commits and clears the memory. The caller holds the lock, which this drops.
static int make_ready(vmem_context *ctx, const struct part *part, const struct pieces *pieces)
{
    vmem__unlock(ctx);
    const int rc = pages_ready(ctx, pieces->all, pieces->n, part->flags);
    vmem__lock(ctx);
    for (size_t i = 0; i < pieces->n && !rc; i++)
        for (uint32_t u = 0; pieces->all[i].arena->b.raw && u < pieces->all[i].granules; u++)
            pieces->all[i].arena->pages[pieces->all[i].first + u].raw = 0;
    return rc;
}

static void __attribute__((cold)) undo_part(vmem_context *ctx, const struct pieces *pieces)
{
    for (size_t i = 0; i < pieces->n; i++)
        if (!pieces->all[i].committed)
            ctx->committed -= pieces->all[i].granules * GRANULE;
    vmem__free_pieces(ctx, pieces->all, pieces->n);
}

// Creates the part's pages. The caller holds the lock, which this drops for a while.
static inline int create_part(vmem_context *ctx, struct part *part, vmem_page *out)
{
    struct pieces pieces;
    const bool many = part->n > sizeof pieces.few / sizeof pieces.few[0];
    pieces.n = 0;
    pieces.ready = true;
    pieces.all = many ? malloc(part->n * sizeof *pieces.all) : pieces.few;
    if (!pieces.all)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %zu pages", part->n);
    int rc = make_part(ctx, part, &pieces, out);
    if (!rc && !pieces.ready)
        rc = make_ready(ctx, part, &pieces);
    if (rc)
        undo_part(ctx, &pieces);
    if (many)
        free(pieces.all);
    return rc;
}

// Ends a call that failed with rc after it had created `done` of n pages.
static void __attribute__((cold)) undo_create(vmem_context *ctx, int rc, uint64_t page_size, size_t n,
                                              const vmem_page *pages, size_t done, bool grown)
{
    ctx->created -= (n - done) * page_size;
    ctx->undoing += rc == -EINTR;
    vmem__unlock(ctx);
    if (done)
        vmem_drop(ctx, pages, done); // no other call has their handles
    vmem__lock(ctx);
    ctx->undoing -= rc == -EINTR;
    if (rc == -EINTR)
        vmem__shrink_later(ctx);
    else if (grown)
        vmem__shrink(ctx, true);
}

int vmem__create_stretches(vmem_context *ctx, uint64_t page_size, const struct vmem__stretch *stretches, size_t n,
                           uint32_t flags, vmem_page *out)
{
    int rc = vmem__enter(ctx);
    if (!rc)
        rc = check_create(ctx, page_size, n, flags, out);
    if (rc || !n)
        return rc;

    struct part part = {.granules = (uint32_t)(page_size >> GRANULE_SHIFT), .flags = flags};
    vmem__begin(ctx);
    rc = vmem__check_room(ctx, page_size, n);
    if (rc) {
        vmem__end(ctx);
        return rc;
    }
    ctx->created += n * page_size;
    const size_t most = PART(ctx) >> __builtin_ctzll(page_size);
    size_t since = 0; // pages since the last check for an interrupt
    size_t done = 0, left = 0, more = 0;
    while (done < n && !rc) {
        if (!left) {
            part.near = stretches->near;
            part.scraps = !stretches->blocks;
            more = stretches->more;
            left = stretches++->n;
        }
        part.n = left < most ? left : most;
        part.more = (left - part.n + more) * part.granules;
        rc = create_part(ctx, &part, out + done);
        if (rc)
            break;
        done += part.n;
        left -= part.n;
        since += part.n;
        if (done < n && since >= most) {
            since = 0;
            vmem__unlock(ctx);
            rc = vmem__interrupted(&ctx->b);
            vmem__lock(ctx);
        }
    }
    if (rc)
        undo_create(ctx, rc, page_size, n, out, done, part.grown);
    vmem__end(ctx);
    return rc;
}

int vMemCreate(vmem_context *ctx, uint64_t page_size, size_t n, uint32_t flags, vmem_page *pages)
{
    if (flags & VMEM__CREATE_BOUND) // not for callers
        return vmem__error(-EINVAL, "flags 0x%x: only VMEM_CREATE_ZERO is known", flags);
    return vmem__create_near(ctx, page_size, n, 0, flags, pages);
}

int vmem_page_query(vmem_context *ctx, vmem_page page, struct vmem_page_info *out)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    struct vmem_page_info info;
    vmem__begin(ctx);
    struct vmem__arena_rec *a;
    const struct vmem__page *p = vmem__page_get(ctx, page, &a);
    if (p)
        info = (struct vmem_page_info){.page_size = p->granules * GRANULE,
                                       .frame = vmem__page_frame(a, p),
                                       .mappings = p->mappings};
    vmem__end(ctx);
    return p ? vmem__struct_give(out, &info, sizeof info, "out")
             : vmem__error(-EINVAL,
                           "page 0x%" PRIx64 " is not a page of this context: it was released, or is another's", page);
}

int vmem_set_budget(vmem_context *ctx, uint64_t bytes)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    vmem__begin(ctx);
    vmem__limit(ctx, bytes);
    vmem__end(ctx);
    return 0;
}

// -ENOMEM if so many bytes could never be there beside the pages that exist. Without this check, the call would first
// allocate all memory of the machine.
static int check_ahead(const vmem_context *ctx, uint64_t bytes)
{
    if (ctx->budget && (ctx->created > ctx->budget || bytes > ctx->budget - ctx->created))
        return vmem__error(-ENOMEM,
                           "bytes: %" PRIu64 " besides %" PRIu64 " bytes of pages exceed the budget of %" PRIu64, bytes,
                           ctx->created, ctx->budget);
    if (bytes > ctx->b.info.memory_total || ctx->created > ctx->b.info.memory_total - bytes)
        return vmem__error(-ENOMEM,
                           "bytes: %" PRIu64 " besides %" PRIu64 " bytes of pages: the %s %" PRIu64 " bytes of memory",
                           bytes, ctx->created, whose_memory(ctx), ctx->b.info.memory_total);
    return 0;
}

// Commits memory that is there. The caller holds the lock, which this drops.
static int populate_piece(vmem_context *ctx, struct vmem__piece *p)
{
    ctx->committed += p->granules * GRANULE;
    vmem__unlock(ctx);
    const int rc = ctx->b.ops->populate(&ctx->b, &p->arena->b, p->first * GRANULE, p->granules * GRANULE);
    vmem__lock(ctx);
    p->committed = !rc;
    ctx->committed -= rc ? p->granules * GRANULE : 0;
    vmem__free_pieces(ctx, p, 1);
    return rc;
}

// Allocates an arena for so many granules.
static int grow_ahead(vmem_context *ctx, uint64_t granules)
{
    const uint64_t seen = ctx->moved;
    const int rc = vmem__grow(ctx, granules, BLOCK_GRANULES, true);
    return rc == -ENOMEM && vmem__wait_moved(ctx, seen) ? 0 : rc;
}

// Commits memory until there are `goal` bytes, or a concurrent trim ends that. Pages created meanwhile do not change the
// goal: otherwise memory committed here would be freed at once, again and again.
static int fill_to(vmem_context *ctx, uint64_t goal)
{
    uint64_t since = 0; // bytes since the last check for an interrupt
    int rc = 0;
    while (!rc && ctx->committed < goal && ctx->keep >= goal) {
        const uint64_t granules = (goal - ctx->committed) >> GRANULE_SHIFT, space = ctx->arena_bytes;
        const uint64_t portion = VMEM__PORTION / GRANULE;
        struct vmem__piece p;
        if (since >= VMEM__PORTION) {
            since = 0;
            vmem__unlock(ctx);
            rc = vmem__interrupted(&ctx->b);
            vmem__lock(ctx);
        } else if (ctx->b.ops->populate &&
                   vmem__take_piece(ctx, false, granules < portion ? granules : portion, 1, &p)) {
            since += p.granules * GRANULE;
            rc = populate_piece(ctx, &p);
        } else {
            rc = grow_ahead(ctx, granules);
            since += ctx->b.ops->populate ? 0 : ctx->arena_bytes - space;
        }
    }
    return rc;
}

int vmem_prealloc(vmem_context *ctx, uint64_t bytes)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (bytes > MAX_RESERVE)
        return vmem__error(-ENOMEM, "bytes: %" PRIu64 " is more than 2^46", bytes);
    if (!bytes)
        return vmem_trim(ctx, NULL);
    bytes = (bytes + GRANULE - 1) / GRANULE * GRANULE;

    vmem__begin(ctx);
    const uint64_t kept = ctx->keep, goal = ctx->created + bytes;
    rc = check_ahead(ctx, bytes);
    if (!rc) {
        ctx->keep = kept < goal ? goal : kept; // first, so that a concurrent release does not undo the work
        rc = fill_to(ctx, goal);
        if (rc)
            ctx->keep = kept;
    }
    if (rc)
        rc == -EINTR ? vmem__shrink_later(ctx) : vmem__shrink(ctx, true);
    vmem__end(ctx);
    return rc;
}

// Returns the memory that no page uses, but for `ahead` bytes and, with `wanted`, what callers wait for if that is more.
static int trim(vmem_context *ctx, uint64_t ahead, bool wanted, uint64_t *freed)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    vmem__begin(ctx);
    uint64_t before = ctx->committed;
    if (ctx->stuck) { // try again what could not be given up
        ctx->stuck = false;
        vmem__end(ctx);
        vmem__begin(ctx);
    }
    ctx->keep = ahead ? ctx->created + ahead : 0;
    vmem__shrink(ctx, wanted);
    vmem__wait_gone(ctx); // whoever trims offers the memory to others
    if (freed)
        *freed = before > ctx->committed ? before - ctx->committed : 0;
    vmem__end(ctx);
    return 0;
}

int vmem_trim(vmem_context *ctx, uint64_t *freed) { return trim(ctx, 0, false, freed); }

void vmem__trim_unused(vmem_context *ctx, bool wanted) { trim(ctx, vmem__ahead_of_others(ctx, NULL), wanted, NULL); }
