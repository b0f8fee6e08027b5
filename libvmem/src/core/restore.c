// Absent addresses. After a failed map or unmap whose undo failed as well, the shadow says what belongs at an address, and
// the backend says that it may not be there. Here it is mapped again: at the end of every batch, and before any call
// that uses the addresses. A call that would use what is absent still is refused.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

static uint64_t entry_at(const struct vmem__reservation_rec *s, uint64_t addr)
{
    struct vmem__leaf *leaf = vmem__leaf_get(s, addr);
    return leaf ? *vmem__entry_in(s, leaf, addr) : 0;
}

// True if a call works on what belongs there. Of a page that is unmapped, only the first entry has a mark.
static bool is_worked_on(vmem_context *ctx, uint64_t entry)
{
    const uint64_t frame = vmem__entry_frame(entry);
    return entry & ENTRY_PENDING || (frame && vmem__frame_page(vmem__frame_arena(ctx, frame - 1), frame - 1)->opid);
}

// The longest run from addr that belongs there: consecutive memory of one arena, or none. False if another call works on
// it, which then knows what belongs there.
static bool run_at(vmem_context *ctx, struct vmem__reservation_rec *s, uint64_t addr, uint64_t end,
                   struct vmem__run *run)
{
    const uint64_t entry = entry_at(s, addr), frame = vmem__entry_frame(entry);
    const bool worked_on = is_worked_on(ctx, entry);
    struct vmem__arena_rec *a = frame ? vmem__frame_arena(ctx, frame - 1) : NULL;
    uint64_t next;
    *run = (struct vmem__run){.reservation = &s->b,
                              .addr = addr,
                              .arena = a ? &a->b : NULL,
                              .offset = a ? (frame - 1 - a->base) * GRANULE : 0,
                              .page_size = GRANULE};
    do {
        run->length += GRANULE;
        addr += GRANULE;
        next = frame ? frame + run->length / GRANULE : 0;
    } while (addr < end && !worked_on && !(a && run->offset + run->length == a->b.size) && entry_at(s, addr) == next &&
             !is_worked_on(ctx, next));
    return !worked_on;
}

// Maps again what is absent in a reservation. The error is that of the first range that the driver refuses.
static int restore_reservation(vmem_context *ctx, struct vmem__reservation_rec *s)
{
    const uint64_t end = s->b.addr + s->b.length;
    struct vmem__run run;
    uint64_t at = s->b.addr, n;
    int rc = 0;
    for (; (at = vmem__absent_next(&s->b, at, end, &n)), n; at += run.length) {
        const int refused = run_at(ctx, s, at, at + n, &run) ? ctx->b.ops->restore(&ctx->b, &run) : 0;
        rc = rc ? rc : refused;
    }
    return rc;
}

// The lock is held during calls of the backend, as nowhere else: so what belongs at the addresses cannot change, nothing
// is marked, and no memory is needed. The driver is in trouble then, and other calls would hardly succeed.
static int restore_all(vmem_context *ctx)
{
    int rc = 0;
    for (size_t i = 0; i < ctx->n_reservations; i++) {
        const int refused = ctx->reservations[i]->b.n_absent ? restore_reservation(ctx, ctx->reservations[i]) : 0;
        rc = rc ? rc : refused;
    }
    return rc;
}

void vmem__restore(vmem_context *ctx)
{
    char text[VMEM__TEXT];
    vmem__keep_error(text); // of the call that ends
    restore_all(ctx);
    vmem__error(0, "%s", text);
}

int vmem__present(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    if (VMEM__LIKELY(!ctx->b.n_absent))
        return 0;
    const int rc = restore_all(ctx);
    const uint64_t last = addr + length;
    for (size_t i = vmem__reservation_after(ctx, addr); rc && i < ctx->n_reservations; i++) {
        const struct vmem__reservation_rec *s = ctx->reservations[i];
        const uint64_t end = MIN(s->b.addr + s->b.length, last);
        uint64_t at = MAX(s->b.addr, addr - addr % GRANULE), n;
        if (at >= last)
            break;
        for (; (at = vmem__absent_next(&s->b, at, end, &n)), n; at += GRANULE)
            if (!is_worked_on(ctx, entry_at(s, at))) {
                char why[VMEM__TEXT];
                vmem__keep_error(why);
                return vmem__error(rc,
                                   "[0x%" PRIx64 ", 0x%" PRIx64 ") is absent: what an earlier call changed there "
                                   "before it failed could not be restored, and still cannot: %.300s",
                                   at, at + n, why);
            }
    }
    return 0;
}

const _Atomic uint64_t *vmem__absent(const vmem_context *ctx) { return &ctx->b.n_absent; }

int vmem__check_present(vmem_context *ctx, uint64_t addr, uint64_t length)
{
    vmem__begin(ctx);
    const int rc = vmem__present(ctx, addr, length);
    vmem__end(ctx);
    return rc;
}
