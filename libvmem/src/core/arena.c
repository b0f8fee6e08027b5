// Arenas of physical memory, the free extents in them, and the numbering of their frames.
//
// A free extent stores its length in its first and last granule, so that it finds and joins its neighbours in constant
// time. Lists hold extents by the power of two of their length. Allocating and freeing memory therefore take the same
// time at any size. An extent is either completely committed (it holds device memory) or not at all. The two kinds have
// separate lists and never join.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

// Extents of one list that are examined for a fit before a list of longer ones is tried.
#define FIT_TRIES 8

static inline uint64_t round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

static inline unsigned bin_of(uint64_t granules) { return 63 - (unsigned)__builtin_clzll(granules); }

// ---- free extents -------------------------------------------------------------------------------------------

static inline struct vmem__page *extent_at(const vmem_context *ctx, uint64_t frame, struct vmem__arena_rec **a)
{
    *a = vmem__frame_arena(ctx, frame);
    return &(*a)->pages[frame - (*a)->base];
}

static void extent_link(vmem_context *ctx, struct vmem__arena_rec *a, uint32_t first, uint32_t granules, bool committed)
{
    struct vmem__page *head = &a->pages[first], *tail = head + granules - 1;
    struct vmem__freelist *fl = &ctx->free[committed];
    unsigned bin = bin_of(granules);
    uint64_t link = a->base + first + 1;

    head->granules = granules;
    head->committed = committed;
    head->state = GRANULE_FREE;
    tail->granules = granules;
    tail->committed = committed;
    tail->state = GRANULE_FREE;
    head->prev = 0;
    head->next = fl->head[bin];
    if (head->next) {
        struct vmem__arena_rec *other;
        extent_at(ctx, head->next - 1, &other)->prev = link;
    }
    fl->head[bin] = link;
    fl->nonempty |= UINT64_C(1) << bin;
    ctx->arena_free += granules * GRANULE;
    if (committed)
        a->committed += granules;
}

static inline void extent_unlink(vmem_context *ctx, struct vmem__arena_rec *a, uint32_t first)
{
    struct vmem__page *head = &a->pages[first], *tail = head + head->granules - 1;
    struct vmem__freelist *fl = &ctx->free[head->committed];
    unsigned bin = bin_of(head->granules);
    struct vmem__arena_rec *other;

    if (head->next)
        extent_at(ctx, head->next - 1, &other)->prev = head->prev;
    if (head->prev)
        extent_at(ctx, head->prev - 1, &other)->next = head->next;
    else if (!(fl->head[bin] = head->next))
        fl->nonempty &= ~(UINT64_C(1) << bin);
    ctx->arena_free -= head->granules * GRANULE;
    if (head->committed)
        a->committed -= head->granules;
    tail->state = head->state = GRANULE_IDLE;
}

// Joins an extent with its free neighbours of the same kind and links it.
static void extent_insert(vmem_context *ctx, struct vmem__arena_rec *a, uint32_t first, uint32_t granules,
                          bool committed)
{
    if (first > 0) {
        const struct vmem__page *before = &a->pages[first - 1];
        if (before->state == GRANULE_FREE && before->committed == committed) {
            uint32_t n = before->granules;
            first -= n;
            granules += n;
            extent_unlink(ctx, a, first);
        }
    }
    if (first + granules < a->granules) {
        const struct vmem__page *after = &a->pages[first + granules];
        if (after->state == GRANULE_FREE && after->committed == committed) {
            uint32_t n = after->granules;
            extent_unlink(ctx, a, first + granules);
            granules += n;
        }
    }
    extent_link(ctx, a, first, granules, committed);
}

// The number of aligned granules, in multiples of align, in a free extent. *first is where they start.
static inline uint64_t usable(const struct vmem__arena_rec *a, const struct vmem__page *extent, uint32_t align,
                              uint32_t *first)
{
    uint64_t at = (uint64_t)(extent - a->pages), end = at + extent->granules;
    const uint64_t below = ~(uint64_t)(align - 1); // a power of two; a division would take longer than all the rest
    uint64_t start = (at + align - 1) & below;
    *first = (uint32_t)start;
    return start < end ? (end - start) & below : 0;
}

// Cuts [first, first + granules) out of the free extent that starts at granule `at`.
static inline void extent_cut(vmem_context *ctx, struct vmem__arena_rec *a, uint32_t at, uint32_t first,
                              uint32_t granules, struct vmem__piece *out)
{
    uint32_t all = a->pages[at].granules;
    bool committed = a->pages[at].committed;
    extent_unlink(ctx, a, at);
    if (first > at)
        extent_link(ctx, a, at, first - at, committed);
    if (first + granules < at + all)
        extent_link(ctx, a, first + granules, at + all - first - granules, committed);
    a->used += granules;
    *out = (struct vmem__piece){.arena = a, .first = first, .granules = granules, .committed = committed};
}

bool vmem__take_piece(vmem_context *ctx, bool committed, uint64_t granules, uint32_t align, struct vmem__piece *out)
{
    const struct vmem__freelist *fl = &ctx->free[committed];
    struct vmem__arena_rec *a;
    uint32_t first;

    // Try to take one piece from the shortest extents that may be long enough.
    const unsigned bin = bin_of(granules);
    for (uint64_t bins = bin < VMEM__BINS ? fl->nonempty >> bin << bin : 0; bins; bins &= bins - 1) {
        int tries = FIT_TRIES;
        for (uint64_t link = fl->head[__builtin_ctzll(bins)]; link && tries--;) {
            const struct vmem__page *head = extent_at(ctx, link - 1, &a);
            if (usable(a, head, align, &first) >= granules) {
                extent_cut(ctx, a, (uint32_t)(head - a->pages), first, (uint32_t)granules, out);
                return true;
            }
            link = head->next;
        }
    }
    // Otherwise take what one of the longest extents has.
    for (uint64_t bins = fl->nonempty >> bin_of(align) << bin_of(align); bins; bins &= ~(UINT64_C(1) << bin_of(bins))) {
        uint64_t best = 0, best_link = 0;
        int tries = FIT_TRIES;
        for (uint64_t link = fl->head[bin_of(bins)]; link && (tries-- > 0 || !best);) {
            const struct vmem__page *head = extent_at(ctx, link - 1, &a);
            const uint64_t n = usable(a, head, align, &first);
            if (n > best)
                best = n, best_link = link;
            link = head->next;
        }
        if (best) {
            const struct vmem__page *head = extent_at(ctx, best_link - 1, &a);
            usable(a, head, align, &first);
            extent_cut(ctx, a, (uint32_t)(head - a->pages), first, (uint32_t)(best < granules ? best : granules), out);
            return true;
        }
    }
    return false;
}

bool vmem__take_piece_at(vmem_context *ctx, struct vmem__arena_rec *a, uint32_t first, uint64_t granules,
                         uint32_t align, struct vmem__piece *out)
{
    uint32_t start;
    if (first >= a->granules || first % align || a->pages[first].state != GRANULE_FREE)
        return false;
    if (!a->pages[first].committed && ctx->free[true].nonempty)
        return false; // memory that there is goes first
    uint64_t n = usable(a, &a->pages[first], align, &start);
    if (!n)
        return false;
    extent_cut(ctx, a, first, first, (uint32_t)(n < granules ? n : granules), out);
    return true;
}

// ---- arenas -------------------------------------------------------------------------------------------------

// Numbers the arena's frames: consecutive blocks, and another one that stays unused, so that the frames of two arenas
// are never consecutive.
static int blocks_take(vmem_context *ctx, struct vmem__arena_rec *a)
{
    size_t need = a->granules / BLOCK_GRANULES + 1, at, run = 0;

    while (ctx->free_block < ctx->n_blocks &&
           (ctx->blocks[ctx->free_block].arena || ctx->blocks[ctx->free_block].generation > GENERATION_MAX))
        ctx->free_block++;
    for (at = ctx->free_block; at < ctx->n_blocks && run < need; at++)
        run = ctx->blocks[at].arena || ctx->blocks[at].generation > GENERATION_MAX ? 0 : run + 1;
    at -= run; // if the free blocks at the end are too few, the table grows
    if (at + need > ctx->n_blocks) {
        if ((at + need) << BLOCK_SHIFT > FRAME_END)
            return -ENOSPC;
        if (at + need > ctx->cap_blocks) {
            size_t cap = (at + need) * 2;
            struct vmem__block *grown = realloc(ctx->blocks, cap * sizeof *grown);
            if (!grown)
                return -ENOMEM;
            ctx->blocks = grown;
            ctx->cap_blocks = cap;
        }
        for (; ctx->n_blocks < at + need; ctx->n_blocks++)
            ctx->blocks[ctx->n_blocks] = (struct vmem__block){.generation = 1};
    }
    a->base = (uint64_t)at << BLOCK_SHIFT;
    for (size_t i = 0; i < need; i++) {
        ctx->blocks[at + i].arena = a;
        for (uint32_t u = 0; i < need - 1 && u < BLOCK_GRANULES; u++)
            a->pages[i * BLOCK_GRANULES + u].generation = ctx->blocks[at + i].generation;
    }
    return 0;
}

static void blocks_put(vmem_context *ctx, struct vmem__arena_rec *a)
{
    size_t at = a->base >> BLOCK_SHIFT, n = a->granules / BLOCK_GRANULES;
    for (size_t i = 0; i < n; i++) {
        uint32_t generation = 0;
        for (uint32_t u = 0; u < BLOCK_GRANULES; u++) {
            // Releasing a page increments its generation. The highest one here was therefore never handed out, or
            // belongs to a retired granule.
            const struct vmem__page *p = &a->pages[i * BLOCK_GRANULES + u];
            uint32_t next = p->state == GRANULE_RETIRED ? GENERATION_MAX + 1 : p->generation;
            generation = next > generation ? next : generation;
        }
        ctx->blocks[at + i].generation = generation;
        ctx->blocks[at + i].arena = NULL;
    }
    ctx->blocks[at + n].arena = NULL;
    if (at < ctx->free_block)
        ctx->free_block = at;
}

static void arena_unlink(vmem_context *ctx, struct vmem__arena_rec *a)
{
    for (uint32_t u = 0; u < a->granules;) {
        if (a->pages[u].state != GRANULE_FREE) {
            u++; // retired
            continue;
        }
        uint32_t n = a->pages[u].granules;
        extent_unlink(ctx, a, u);
        u += n;
    }
    if (a->next)
        a->next->prev = a->prev;
    if (a->prev)
        a->prev->next = a->next;
    else
        ctx->arenas = a->next;
    ctx->arena_bytes -= a->b.size;
    blocks_put(ctx, a);
}

void vmem__limit_arenas(vmem_context *ctx, uint64_t bytes, bool fit)
{
    struct vmem__backend *b = &ctx->b;
    vmem__lock(ctx);
    b->beside_kernels = true;
    b->arenas_fit = b->arenas_fit || fit;
    if (!b->ops->populate && bytes < b->arena_max) {
        b->arena_max = bytes;
        b->arena_min = bytes < b->arena_min ? bytes : b->arena_min;
    }
    vmem__unlock(ctx);
}

void vmem__share_arenas(vmem_context *ctx)
{
    vmem__lock(ctx);
    const bool fit = ctx->b.arenas_fit;
    vmem__unlock(ctx);
    if (fit)
        vmem__limit_arenas(ctx, BLOCK, true);
}

// Between these two, a call has dropped the lock to make an arena or to return one.
static void begin_move(vmem_context *ctx)
{
    ctx->moving++;
    vmem__unlock(ctx);
}

static void end_move(vmem_context *ctx)
{
    vmem__lock(ctx);
    ctx->moving--;
    pthread_cond_broadcast(&ctx->settled);
}

bool vmem__wait_moved(vmem_context *ctx, uint64_t seen)
{
    const bool again = ctx->moving || ctx->moved != seen;
    while (ctx->moving && ctx->moved == seen)
        pthread_cond_wait(&ctx->settled, &ctx->lock);
    return again;
}

// Zeroes the memory of a new arena now, or leaves that to the call that makes pages of it.
static int first_zero(struct vmem__backend *b, struct vmem__arena_rec *a, bool now)
{
    const struct vmem__run all = {.arena = &a->b, .length = a->b.size};
    for (uint32_t u = 0; a->b.raw && !now && u < a->granules; u++)
        a->pages[u].raw = a->pages[u].dirty = 1;
    return a->b.raw && now ? b->ops->zero(b, &all, 1) : 0;
}

// Numbers a new arena's frames, and adds it to the context's arenas.
static int add_arena(vmem_context *ctx, struct vmem__arena_rec *a)
{
    int rc = blocks_take(ctx, a);
    if (rc)
        return rc;
    a->next = ctx->arenas;
    if (a->next)
        a->next->prev = a;
    ctx->arenas = a;
    ctx->arena_bytes += a->b.size;
    ctx->moved++;
    extent_link(ctx, a, 0, a->granules, !ctx->b.ops->populate);
    return 0;
}

// A new arena of `size` bytes, or of less, down to `least`, where there is no memory for it.
static int new_arena(vmem_context *ctx, uint64_t size, uint64_t least, bool zeroed)
{
    struct vmem__backend *b = &ctx->b;
    const bool lazy = b->ops->populate != NULL; // an arena costs nothing until it is populated
    int rc;

    for (;;) {
        if (!lazy && ctx->budget) {
            uint64_t cap = round_up(ctx->budget < MAX_RESERVE ? ctx->budget : MAX_RESERVE, BLOCK);
            uint64_t left = cap > ctx->committed ? cap - ctx->committed : 0;
            size = size > left ? left / BLOCK * BLOCK : size;
            if (size < least)
                return vmem__error(-ENOMEM,
                                   "the budget of %" PRIu64 " bytes is all allocated, and its free parts (%" PRIu64
                                   " bytes) are too short for %" PRIu64 " bytes",
                                   ctx->budget, ctx->arena_free, least);
        }
        struct vmem__arena_rec *a = calloc(1, sizeof *a + size / GRANULE * sizeof a->pages[0]);
        if (!a)
            return vmem__error(-ENOMEM, "no memory for bookkeeping of %" PRIu64 " bytes of pages", size);
        a->b.size = size;
        a->granules = (uint32_t)(size / GRANULE);
        ctx->committed += lazy ? 0 : size; // before the lock is dropped: other calls must see it
        begin_move(ctx);
        rc = b->ops->arena_new(b, &a->b);
        if (!rc && (rc = first_zero(b, a, zeroed)))
            b->ops->arena_free(b, &a->b);
        end_move(ctx);
        if (!rc && (rc = add_arena(ctx, a))) {
            begin_move(ctx);
            b->ops->arena_free(b, &a->b);
            end_move(ctx);
            rc = vmem__error(rc, "no memory for bookkeeping of %" PRIu64 " bytes of pages", size);
        }
        if (!rc)
            return 0;
        ctx->committed -= lazy ? 0 : size;
        free(a);
        if (rc != -ENOMEM || size <= least)
            return rc;
        size = round_up(size / 2, BLOCK);
    }
}

int vmem__grow(vmem_context *ctx, uint64_t granules, uint32_t align, bool zeroed)
{
    const struct vmem__backend *b = &ctx->b;
    // Arenas grow with the memory in use, so that there are few, but waste at most an eighth.
    uint64_t size = round_up(granules * GRANULE, BLOCK), eighth = round_up(ctx->arena_bytes / 8, BLOCK);
    const uint64_t most_spare = b->arenas_fit ? 0 : eighth < b->arena_min ? b->arena_min : eighth;
    size = size < most_spare ? most_spare : size;
    // The last arenas are whole ones. So where each block takes whole arenas, none has parts of two blocks, although an
    // earlier arena came out smaller for lack of memory: it would go back only with both.
    if (size > b->arena_max)
        size = b->arenas_fit && size % b->arena_max ? size % b->arena_max : b->arena_max;
    return new_arena(ctx, size, round_up(align * GRANULE, BLOCK), zeroed);
}

// True if memory that has just been freed stays: for vmem_prealloc, or for those who expect some.
static bool is_retained(vmem_context *ctx, uint64_t bytes)
{
    const uint64_t expected = ctx->expected + ctx->expected_back;
    if (ctx->committed - bytes < ctx->keep)
        return true;
    if (VMEM__LIKELY(!expected) || ctx->committed - bytes >= ctx->created + expected)
        return false;
    ctx->retained_peak = expected > ctx->retained_peak ? expected : ctx->retained_peak;
    return true;
}

// True if an arena that has just become empty should go back to the system.
static bool arena_surplus(vmem_context *ctx, const struct vmem__arena_rec *a)
{
    const bool lazy = ctx->b.ops->populate != NULL;
    if (a->retired)
        return true;
    if (lazy ? a->committed != 0 : is_retained(ctx, a->b.size))
        return false;
    if (a->b.size > ctx->b.arena_max) // the limit has fallen since
        return true;
    // Hysteresis: free memory stays while it is small compared with the rest.
    uint64_t stay = (ctx->arena_bytes - a->b.size) / 8;
    stay = stay < ctx->b.arena_min ? ctx->b.arena_min : stay;
    return a->b.size > stay || ctx->arena_free - a->b.size >= stay;
}

// The arena's memory no longer counts. What is unlinked is released soon.
static void uncommit(vmem_context *ctx, struct vmem__arena_rec *a, uint64_t bytes)
{
    ctx->committed -= bytes;
    ctx->going += bytes;
    a->leaving = bytes;
}

static void arena_release(vmem_context *ctx, struct vmem__arena_rec *a)
{
    const uint64_t bytes = a->leaving;
    begin_move(ctx);
    ctx->b.ops->arena_free(&ctx->b, &a->b);
    free(a);
    end_move(ctx);
    ctx->gone += bytes;
    ctx->moved++;
}

void vmem__wait_gone(vmem_context *ctx)
{
    const uint64_t until = ctx->going;
    while (ctx->gone < until)
        pthread_cond_wait(&ctx->settled, &ctx->lock);
}

// Puts a piece into the free lists. Returns the arena, unlinked, if it is now empty and should be freed.
static struct vmem__arena_rec *put_piece(vmem_context *ctx, const struct vmem__piece *p)
{
    struct vmem__arena_rec *a = p->arena;
    uint32_t start = p->first, end = p->first + p->granules;

    a->used -= p->granules;
    for (uint32_t u = start; u < end; u++) {
        if (VMEM__LIKELY(a->pages[u].generation <= GENERATION_MAX - 1)) {
            a->pages[u].state = GRANULE_IDLE;
            continue;
        }
        a->pages[u].state = GRANULE_RETIRED;
        a->retired++;
        a->committed += p->committed;
        if (u > start)
            extent_insert(ctx, a, start, u - start, p->committed);
        start = u + 1;
    }
    if (end > start)
        extent_insert(ctx, a, start, end - start, p->committed);
    if (a->used || !arena_surplus(ctx, a))
        return NULL;
    uncommit(ctx, a, ctx->b.ops->populate ? a->committed * GRANULE : a->b.size);
    arena_unlink(ctx, a);
    return a;
}

// Puts a piece back, and adds its arena to the list if that should be freed.
static void put_and_list(vmem_context *ctx, const struct vmem__piece *p, struct vmem__arena_rec **gone)
{
    struct vmem__arena_rec *a = put_piece(ctx, p);
    if (!a)
        return;
    a->next = *gone;
    *gone = a;
}

static void release_arenas(vmem_context *ctx, struct vmem__arena_rec *gone)
{
    for (struct vmem__arena_rec *a; (a = gone);) {
        gone = a->next;
        arena_release(ctx, a);
    }
}

// all: also what is expected goes back.
static void free_pieces(vmem_context *ctx, struct vmem__piece *p, size_t n, bool all)
{
    struct vmem__backend *b = &ctx->b;
    struct vmem__arena_rec *gone = NULL;
    uint64_t discard = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = p[i].granules * GRANULE;
        if (b->ops->discard && p[i].committed && !ctx->undoing && (all || !is_retained(ctx, bytes))) {
            ctx->committed -= bytes;
            ctx->going += bytes;
            p[i].committed = false;
            discard += bytes;
            continue;
        }
        put_and_list(ctx, &p[i], &gone);
        p[i].granules = 0; // done
    }
    if (discard) {
        vmem__unlock(ctx);
        for (size_t i = 0; i < n; i++) {
            if (!p[i].granules)
                continue;
            int rc = b->ops->discard(b, &p[i].arena->b, p[i].first * GRANULE, p[i].granules * GRANULE);
            p[i].committed = rc < 0; // the memory then stays committed
            p[i].zeroed = rc == 1;
        }
        vmem__lock(ctx);
        ctx->gone += discard;
        pthread_cond_broadcast(&ctx->settled);
        for (size_t i = 0; i < n; i++) {
            if (!p[i].granules)
                continue;
            for (uint32_t u = 0; p[i].zeroed && u < p[i].granules; u++)
                p[i].arena->pages[p[i].first + u].dirty = 0;
            if (p[i].committed)
                ctx->committed += p[i].granules * GRANULE;
            put_and_list(ctx, &p[i], &gone);
        }
    }
    release_arenas(ctx, gone);
}

void vmem__free_pieces(vmem_context *ctx, struct vmem__piece *p, size_t n) { free_pieces(ctx, p, n, false); }

void vmem__shrink(vmem_context *ctx, bool wanted)
{
    const bool lazy = ctx->b.ops->populate != NULL;
    const uint64_t waited = wanted && ctx->expected ? ctx->created + ctx->expected : 0;
    const uint64_t keep = ctx->keep > waited ? ctx->keep : waited;
    struct vmem__piece p;
    ctx->retained_peak = wanted ? ctx->expected : 0;
    ctx->unwanted = false;
    // Discards committed extents of a lazy backend and moves them to the other list. It does so in steps, because other
    // threads wait in the kernel meanwhile. An extent that cannot be discarded returns to its list and ends the loop.
    while (lazy && ctx->committed >= keep + GRANULE) {
        const uint64_t granules = (ctx->committed - keep) / GRANULE, step = VMEM__PORTION / GRANULE;
        if (!vmem__take_piece(ctx, true, granules < step ? granules : step, 1, &p))
            break;
        free_pieces(ctx, &p, 1, true);
        if (p.committed)
            break;
    }
    struct vmem__arena_rec *a = ctx->arenas, *next, *gone = NULL;
    for (; a; a = next) {
        next = a->next;
        if (a->used || (lazy ? a->committed != 0 : ctx->committed - a->b.size < keep))
            continue;
        uncommit(ctx, a, lazy ? 0 : a->b.size);
        arena_unlink(ctx, a);
        a->next = gone;
        gone = a;
    }
    release_arenas(ctx, gone);
}

static void *shrink(void *arg)
{
    vmem_context *ctx = arg;
    vmem__lock(ctx);
    vmem__shrink(ctx, true);
    ctx->shrinking = false;
    vmem__end(ctx);
    return NULL;
}

void vmem__shrink_later(vmem_context *ctx)
{
    pthread_t thread;
    if (ctx->shrinking)
        return; // the running thread sees the new state
    ctx->shrinking = !vmem__thread_start(&thread, shrink, ctx);
    if (!ctx->shrinking) {
        vmem__shrink(ctx, true);
        return;
    }
    ctx->calls++; // the context stays until it has ended
    pthread_detach(thread);
}

void vmem__arenas_destroy(vmem_context *ctx)
{
    struct vmem__arena_rec *a;
    while ((a = ctx->arenas)) {
        ctx->arenas = a->next;
        ctx->b.ops->arena_free(&ctx->b, &a->b);
        free(a);
    }
    free(ctx->blocks);
}
