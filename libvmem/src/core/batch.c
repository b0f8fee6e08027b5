// The common steps of every batch: its operation id, its runs, and the call of the backend.
//
// SPDX-License-Identifier: MIT
#include "core/batch.h"

void vmem__batch_init(struct batch *b, vmem_context *ctx, uint32_t flags)
{
    b->ctx = ctx;
    b->flags = flags;
    b->runs = b->few;
    b->n = 0;
    b->cap = BATCH_FEW;
    b->ended = NULL;
    b->opid = vmem__opid(ctx);
}

void vmem__batch_begin(struct batch *b, vmem_context *ctx, uint32_t flags)
{
    vmem__begin(ctx);
    vmem__batch_init(b, ctx, flags);
}

void vmem__batch_end(struct batch *b)
{
    for (size_t i = 0; i < b->n; i++)
        ((struct vmem__reservation_rec *)b->runs[i].reservation)->inflight--;
    if (VMEM__UNLIKELY(b->ctx->b.n_absent))
        vmem__restore(b->ctx);
    vmem__end(b->ctx);
    if (b->runs != b->few)
        free(b->runs);
}

int vmem__batch_push(struct batch *b, const struct vmem__run *run)
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
    ((struct vmem__reservation_rec *)run->reservation)->inflight++;
    return 0;
}

int vmem__batch_run(struct batch *b, int (*call)(struct vmem__backend *, const struct vmem__run *, size_t, size_t *),
                    size_t *op)
{
    size_t bad = 0;
    if (!b->n)
        return 0;
    int rc = VMEM__UNLIKELY(b->ctx->accesses) ? vmem__check_accesses(b->ctx, b->runs, b->n, &bad) : 0;
    if (!rc) {
        vmem__unlock(b->ctx);
        rc = call(&b->ctx->b, b->runs, b->n, &bad);
        vmem__lock(b->ctx);
    }
    if (rc)
        *op = b->runs[bad < b->n ? bad : 0].op;
    return rc;
}

void vmem__batch_free_ended(struct batch *b)
{
    struct vmem__piece pieces[16];
    while (b->ended) {
        size_t n = 0;
        do {
            struct vmem__page *head = b->ended;
            struct vmem__arena_rec *a = b->ended_arena;
            pieces[n++] = (struct vmem__piece){.arena = a,
                                               .first = (uint32_t)(head - a->pages),
                                               .granules = head->granules,
                                               .committed = true};
            b->ended = NULL;
            if (head->next) {
                b->ended_frame = head->next - 1;
                b->ended_arena = vmem__frame_arena(b->ctx, b->ended_frame);
                b->ended = &b->ended_arena->pages[b->ended_frame - b->ended_arena->base];
            }
        } while (b->ended && n < sizeof pieces / sizeof pieces[0]);
        vmem__free_pieces(b->ctx, pieces, n);
    }
}

int vmem__batch_fail(int rc, const char *what, size_t n, size_t i, size_t *bad)
{
    if (bad)
        *bad = i;
    return n > 1 ? vmem__error(rc, "%s[%zu]: %s", what, i, vmem_last_error()) : rc;
}
