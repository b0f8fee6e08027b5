// Frees pages and reservations for callers that cannot handle a failure. If another call works on one, it is doomed: it
// is freed when that call ends. If the kernel or the driver lacks the resources to unmap it, it stays doomed until
// something else has been unmapped.
//
// SPDX-License-Identifier: MIT
#include "core/batch.h"

#define FEW 64

// ---- reservations -------------------------------------------------------------------------------------------

// Finds the next page at or after *addr. NULL at the end.
static struct vmem__page *next_page(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t *addr,
                                    struct vmem__arena_rec **a)
{
    const uint64_t end = s->b.addr + s->b.length;
    for (; *addr < end; *addr += GRANULE) {
        struct vmem__leaf *leaf = vmem__leaf_get(s, *addr);
        if (!leaf) {
            *addr = leaf_end(s, *addr, end) - GRANULE;
            continue;
        }
        const uint64_t frame = vmem__entry_frame(*vmem__entry_in(s, leaf, *addr));
        if (!frame)
            continue;
        *a = vmem__frame_arena(ctx, frame - 1);
        struct vmem__page *p = &(*a)->pages[frame - 1 - (*a)->base];
        if (p->state == GRANULE_PAGE)
            return p;
    }
    return NULL;
}

// Removes a reservation from the table although the kernel or the driver refused to unmap its pages; unreserve()
// removes them. False if another call works on one of its pages. The caller holds the lock, which this drops.
static bool force_free(vmem_context *ctx, struct vmem__reservation_rec *s)
{
    const uint64_t start = s->b.addr;
    struct vmem__arena_rec *a;
    struct vmem__page *p;
    struct batch b;

    for (uint64_t addr = start; (p = next_page(ctx, s, &addr, &a)); addr += GRANULE) {
        if (p->opid)
            return false;
    }
    vmem__batch_init(&b, ctx, 0);
    for (uint64_t addr = start; (p = next_page(ctx, s, &addr, &a)); addr += GRANULE) {
        unlink_page(ctx, addr, p);
        p->opid = b.opid; // until the addresses are freed
    }
    count_mapped(ctx, s, -s->mapped);
    vmem__reservation_remove(ctx, s);
    vmem__unlock(ctx);
    vmem__unreserve(ctx, s);
    vmem__lock(ctx);
    for (uint64_t addr = start; (p = next_page(ctx, s, &addr, &a)); addr += GRANULE) {
        if (p->opid != b.opid)
            continue; // already seen at another address
        if (p->bound && !p->mappings)
            batch_end_page(&b, a, p);
        else
            p->opid = 0;
    }
    vmem__reservation_free(s, true);
    vmem__batch_free_ended(&b);
    return true;
}

// False if it is not possible yet. The caller holds the lock, which this drops.
static bool end_reservation(vmem_context *ctx, struct vmem__reservation_rec *s)
{
    int rc = 0;
    if (s->mapped) {
        s->inflight++;
        vmem__unlock(ctx);
        rc = vMemUnmap(ctx, s->b.addr, s->b.length);
        vmem__lock(ctx);
        s->inflight--;
    }
    if (s->inflight || rc == -EBUSY)
        return false; // the other call tries again when it ends
    if (s->mapped)
        return force_free(ctx, s);
    vmem__reservation_remove(ctx, s);
    vmem__unlock(ctx);
    vmem__reservation_end(ctx, s);
    vmem__lock(ctx);
    return true;
}

static bool sweep_reservations(vmem_context *ctx)
{
    for (size_t i = 0; i < ctx->n_reservations; i++) {
        struct vmem__reservation_rec *s = ctx->reservations[i];
        if (s->doomed && !s->inflight && end_reservation(ctx, s)) {
            ctx->stuck = false;
            return true;
        }
    }
    return false;
}

int vmem_unreserve(vmem_context *ctx, uint64_t addr)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    struct vmem__reservation_rec *s = NULL;
    vmem__begin(ctx);
    rc = vmem__reservation_start(ctx, addr, &s);
    if (!rc) {
        s->doomed = true;
        ctx->n_doomed++;
        ctx->stuck = false;
        // Free it now instead of in the next sweep, because the caller may need the memory or the pages next.
        const bool sweeping = ctx->sweeping;
        char text[VMEM__TEXT];
        vmem__keep_error(text);
        ctx->sweeping = true; // this call frees the rest when it ends
        if (!s->inflight)
            end_reservation(ctx, s);
        ctx->sweeping = ctx->sweeping && sweeping;
        vmem__error(0, "%s", text);
    }
    vmem__end(ctx); // sweeps
    return rc;
}

// ---- pages --------------------------------------------------------------------------------------------------

static size_t find_doomed(const vmem_context *ctx, vmem_page *pages, size_t most)
{
    size_t n = 0;
    for (const struct vmem__arena_rec *a = ctx->arenas; a; a = a->next) {
        for (uint32_t u = 0; u < a->granules && n < most; u++) {
            const struct vmem__page *p = &a->pages[u];
            if (p->state == GRANULE_PAGE && p->doomed && !p->opid)
                pages[n++] = vmem__handle(ctx, p, a->base + u);
        }
    }
    return n;
}

static bool sweep_pages(vmem_context *ctx)
{
    vmem_page pages[FEW];
    const size_t n = find_doomed(ctx, pages, FEW);
    bool some = false;
    vmem__unlock(ctx);
    if (n)
        some = !vMemReleaseBatch(ctx, pages, n, NULL);
    int rc = 0;
    for (size_t i = 0; i < n && !some && (!rc || rc == -EBUSY); i++)
        rc = vMemRelease(ctx, pages[i]);
    vmem__lock(ctx);
    ctx->stuck = rc && rc != -EBUSY && rc != -EINVAL;
    return some || (n && !rc);
}

void vmem__end_remnants(vmem_context *ctx)
{
    struct vmem__remnant *r = ctx->remnants, *next;
    ctx->n_doomed -= r != NULL;
    ctx->remnants = NULL;
    vmem__unlock(ctx);
    for (; r; r = next) {
        next = r->next;
        r->end(r);
    }
    vmem__lock(ctx);
}

// Ends the remnants if nothing else is doomed.
static bool sweep_remnants(vmem_context *ctx)
{
    if (!ctx->remnants || ctx->n_doomed > 1)
        return false;
    vmem__shrink(ctx, true);
    vmem__wait_gone(ctx);
    vmem__end_remnants(ctx);
    return true;
}

uint64_t vmem__outlive_doomed(vmem_context *ctx, struct vmem__remnant *r)
{
    uint64_t bytes = 0;
    vmem__lock(ctx);
    for (const struct vmem__arena_rec *a = ctx->n_doomed ? ctx->arenas : NULL; a; a = a->next)
        for (const struct vmem__page *p = a->pages; p < a->pages + a->granules; p++)
            bytes += p->state == GRANULE_PAGE && p->doomed ? p->granules * GRANULE : 0;
    if (bytes) {
        ctx->n_doomed += !ctx->remnants;
        r->next = ctx->remnants;
        ctx->remnants = r;
    }
    vmem__unlock(ctx);
    return bytes;
}

void vmem__sweep(vmem_context *ctx)
{
    char text[VMEM__TEXT];
    vmem__keep_error(text); // the caller may be about to return it
    ctx->sweeping = true;
    while (ctx->n_doomed && !ctx->stuck && (sweep_reservations(ctx) || sweep_pages(ctx) || sweep_remnants(ctx)))
        ;
    ctx->sweeping = false;
    vmem__error(0, "%s", text);
}

// Dooms a page, if it still exists.
static void doom(vmem_context *ctx, vmem_page page, bool stuck)
{
    struct vmem__arena_rec *a;
    vmem__begin(ctx);
    struct vmem__page *p = vmem__page_get(ctx, page, &a);
    if (p && !p->doomed) {
        p->doomed = 1;
        ctx->n_doomed++;
        ctx->stuck = ctx->stuck || stuck;
    }
    vmem__end(ctx);
}

int vmem_drop(vmem_context *ctx, const vmem_page *pages, size_t n)
{
    int rc = vmem__enter(ctx);
    if (rc || !n)
        return rc;
    if (!pages)
        return vmem__error(-EINVAL, "pages is NULL");
    char text[VMEM__TEXT];
    vmem__keep_error(text); // callers clean up before they report the failure
    const bool all = !vMemReleaseBatch(ctx, pages, n, NULL);
    for (size_t i = 0; i < n && !all; i++) {
        rc = vMemRelease(ctx, pages[i]);
        if (rc && rc != -EINVAL)
            doom(ctx, pages[i], rc != -EBUSY);
    }
    vmem__error(0, "%s", text);
    return 0;
}
