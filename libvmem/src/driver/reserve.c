// SPDX-License-Identifier: MIT
#include "driver/reserve.h"

#include <errno.h>
#include <stdlib.h>

int vmem__backdrop_new(struct vmem__cuda *cu, struct vmem__backdrop *backdrop, uint64_t slot)
{
    struct vmem__reservation r;
    int err = vmem__cuda_enter(cu);

    if (err)
        return err;
    err = vmem__cuda_create(cu, slot, &backdrop->handle);
    vmem__cuda_leave(cu);
    if (err)
        return err;
    backdrop->slot = slot;
    err = vmem__reserve(cu, backdrop, slot, &r);
    if (!err) {
        err = vmem__activate(cu, backdrop, &r, r.addr, slot);
        if (!err)
            err = vmem__cuda_fill(cu, r.addr, 0, slot);
        vmem__unreserve(cu, backdrop, &r);
    }
    if (err)
        vmem__backdrop_free(cu, backdrop);
    return err;
}

void vmem__backdrop_free(struct vmem__cuda *cu, struct vmem__backdrop *backdrop)
{
    if (backdrop->slot && vmem__cuda_enter(cu) == 0) {
        vmem__cuda_release(cu, backdrop->handle);
        vmem__cuda_leave(cu);
    }
    backdrop->slot = 0;
}

int vmem__reserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, uint64_t length,
                  struct vmem__reservation *out)
{
    uint64_t slots = (length + backdrop->slot - 1) / backdrop->slot;
    int err = vmem__cuda_enter(cu);

    if (err)
        return err;
    out->length = slots * backdrop->slot;
    out->active = calloc((slots + 63) / 64, sizeof(uint64_t));
    if (!out->active)
        err = vmem__error(-ENOMEM, "reserve: no memory to keep track of %llu slots", (unsigned long long)slots);
    if (!err)
        err = vmem__cuda_error(&cu->fn, cu->fn.address_reserve(&out->addr, out->length, VMEM_PAGE_2M, 0, 0),
                               "cuMemAddressReserve");
    vmem__cuda_leave(cu);
    if (err)
        free(out->active);
    return err;
}

// The first run of slots with the given bit in [first, end); returns its first slot, *n its length, 0 if there is none.
static uint64_t next_run(const struct vmem__reservation *r, bool active, uint64_t first, uint64_t end, uint64_t *n)
{
    const uint64_t skip = active ? 0 : UINT64_MAX;

    *n = 0;
    while (first < end && vmem__bit(r->active, first) != active)
        first += first % 64 == 0 && r->active[first / 64] == skip ? 64 : 1; // a reservation has up to 2^25 slots
    while (first + *n < end && vmem__bit(r->active, first + *n) == active)
        ++*n;
    return first;
}

void vmem__unreserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__reservation *r)
{
    uint64_t slot = backdrop->slot, end = r->length / slot, n;

    if (vmem__cuda_enter(cu) == 0) {
        for (uint64_t i = next_run(r, true, 0, end, &n); n; i = next_run(r, true, i + n, end, &n))
            vmem__cuda_unmap(cu, r->addr + i * slot, n * slot);
        cu->fn.address_free(r->addr, r->length);
        vmem__cuda_leave(cu);
    }
    free(r->active);
}

static int activate_run(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__reservation *r,
                        uint64_t first, uint64_t n)
{
    uint64_t slot = backdrop->slot, addr = r->addr + first * slot, done = 0;
    int err = 0;

    while (!err && done < n)
        if ((err = vmem__cuda_map(cu, addr + done * slot, slot, backdrop->handle)) == 0)
            done++;
    if (!err)
        err = vmem__cuda_allow(cu, addr, n * slot);
    if (err && done)
        vmem__cuda_unmap(cu, addr, done * slot);
    for (uint64_t i = first; !err && i < first + n; i++)
        vmem__bit_set(r->active, i, true);
    return err;
}

int vmem__activate(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__reservation *r,
                   uint64_t addr, uint64_t length)
{
    uint64_t slot = backdrop->slot, slots = r->length / slot, n, i;
    uint64_t end = (addr - r->addr + length + slot - 1) / slot;
    int err;

    if (end > slots)
        end = slots;
    i = next_run(r, false, (addr - r->addr) / slot, end, &n);
    if (n == 0)
        return 0;
    err = vmem__cuda_enter(cu);
    if (err)
        return err;
    for (; !err && n; i = next_run(r, false, i + n, end, &n))
        err = activate_run(cu, backdrop, r, i, n);
    vmem__cuda_leave(cu);
    return err;
}
