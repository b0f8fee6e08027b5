// The account of the context's device memory, for the floors above: what is taken ahead and for whom, what the driver
// says is free, and what stays for those who wait.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"

// ---- memory taken ahead ---------------------------------------------------------------------------------------------

void vmem__ahead_join(vmem_context *ctx, struct vmem__ahead *a)
{
    vmem__lock(ctx);
    a->next = ctx->ahead;
    ctx->ahead = a;
    vmem__unlock(ctx);
}

bool vmem__ahead_leave(vmem_context *ctx, struct vmem__ahead *a)
{
    vmem__lock(ctx);
    struct vmem__ahead **at = &ctx->ahead;
    while (*at && *at != a)
        at = &(*at)->next;
    const bool joined = *at;
    if (joined)
        *at = a->next;
    vmem__unlock(ctx);
    return joined;
}

static uint64_t ahead_of_others(const vmem_context *ctx, const struct vmem__ahead *own)
{
    uint64_t bytes = 0;
    for (const struct vmem__ahead *a = ctx->ahead; a; a = a->next)
        if (a != own)
            bytes += sat_sub(a->pages, a->used) << a->page_shift;
    return bytes;
}

uint64_t vmem__ahead_of_others(vmem_context *ctx, const struct vmem__ahead *own)
{
    vmem__lock(ctx);
    const uint64_t bytes = ahead_of_others(ctx, own);
    vmem__unlock(ctx);
    return bytes;
}

// ---- memory that is there -------------------------------------------------------------------------------------------

uint64_t vmem__spare_memory(vmem_context *ctx, const struct vmem__ahead *own, uint64_t *room)
{
    vmem__lock(ctx);
    const uint64_t used = ctx->created + ahead_of_others(ctx, own);
    const uint64_t spare = sat_sub(ctx->committed, used);
    const uint64_t most = ctx->budget ? sat_sub(ctx->budget, used) : UINT64_MAX;
    vmem__unlock(ctx);
    if (room)
        *room = most;
    return MIN(spare, most);
}

// Asking takes a system call, or on the host reading a file: too long for each admission.
int vmem__device_free(vmem_context *ctx, uint64_t age, uint64_t *bytes)
{
    uint64_t total;
    int rc = 0;
    vmem__lock(ctx);
    const uint64_t taken = ctx->committed;
    *bytes = sat_sub(ctx->device_free.bytes + ctx->device_free.committed, taken);
    const bool known = ctx->device_free.at && vmem__now() - ctx->device_free.at < age;
    vmem__unlock(ctx);
    if (!known) {
        rc = ctx->b.ops->memory(&ctx->b, &total, bytes);
        vmem__lock(ctx);
        if (!rc)
            ctx->device_free = (struct vmem__device_free){.bytes = *bytes, .committed = taken, .at = vmem__now()};
        vmem__unlock(ctx);
    }
    if (!vmem__by_granules(ctx)) // the device's memory comes in arenas of whole blocks
        *bytes -= *bytes % BLOCK;
    return rc;
}

uint64_t vmem__reachable(vmem_context *ctx, const struct vmem__ahead *own, uint64_t age)
{
    uint64_t free, room;
    const uint64_t spare = vmem__spare_memory(ctx, own, &room);
    return vmem__device_free(ctx, age, &free) ? UINT64_MAX : MIN(sat_add(spare, free), room);
}

bool vmem__by_granules(const vmem_context *ctx) { return ctx->b.ops->populate; }

bool vmem__by_pieces(const vmem_context *ctx) { return ctx->b.ops->populate || ctx->b.arena_max <= BLOCK; }

// ---- memory that stays for somebody ---------------------------------------------------------------------------------
//
// The hand-over. One member of a pool, A, gives what another, B, waits for. If both have this context, the memory itself
// need not go to the device and come back. Only then is there more to do than in balance.c:
//
//     1. B asks the pool, which says so here: expected = B's bytes (vmem__pool_retain).
//     2. A's pages go. While the context has less than what its pages and the expected bytes take, their memory stays
//        (is_retained in arena.c), and retained_peak is not 0.
//     3. A's entry in the pool's table falls, but for what has stayed: others must not see that as free (write_entry).
//     4. Under the lock of the table, the entry of B grows by what A's falls (grant_within_context).
//     5. B creates pages. Its memory is here already: no call to the driver. It withdraws its question: expected = 0.
//     6. If B has gone, nobody takes it in 4. The next look at A returns it to the device, and only then its entry falls
//        (must_trim). If no entry says so, `unwanted` does.
//
// expected_back is the same without a question: a lease says what others took of its parked segments, so that memory
// that another lease frees meanwhile waits for it, within that one's own budget, until the next trim.

void vmem__expect(vmem_context *ctx, int64_t wanted, int64_t missed)
{
    vmem__lock(ctx);
    ctx->expected += (uint64_t)wanted;
    ctx->expected_back += (uint64_t)missed;
    ctx->unwanted |= wanted < 0 && !ctx->expected && ctx->retained_peak;
    vmem__unlock(ctx);
}

uint64_t vmem__retained(vmem_context *ctx, uint64_t *device_bytes)
{
    vmem__lock(ctx);
    const uint64_t retained = MIN(ctx->retained_peak, sat_sub(ctx->committed, ctx->created));
    *device_bytes = ctx->committed + ctx->going - ctx->gone;
    vmem__unlock(ctx);
    return retained;
}

bool vmem__has_unwanted(vmem_context *ctx)
{
    vmem__lock(ctx);
    const bool unwanted = ctx->unwanted;
    vmem__unlock(ctx);
    return unwanted;
}
