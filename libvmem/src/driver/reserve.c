// SPDX-License-Identifier: MIT
#include "driver/reserve.h"

#include <errno.h>
#include <stdlib.h>

int vmem__backdrop_new(struct vmem__cuda *cu, struct vmem__backdrop *backdrop, uint64_t segment)
{
    struct vmem__cuda_reservation r;
    int err = vmem__cuda_enter(cu);

    if (err)
        return err;
    err = vmem__cuda_create(cu, segment, &backdrop->handle);
    vmem__cuda_leave(cu);
    if (err)
        return err;
    backdrop->segment = segment;
    err = vmem__cuda_reserve(cu, backdrop, segment, &r);
    if (!err) {
        err = vmem__cuda_activate(cu, backdrop, &r, r.addr, segment);
        if (!err)
            err = vmem__cuda_fill(cu, r.addr, 0, segment);
        vmem__cuda_unreserve(cu, backdrop, &r);
    }
    if (err)
        vmem__backdrop_free(cu, backdrop);
    return err;
}

void vmem__backdrop_free(struct vmem__cuda *cu, struct vmem__backdrop *backdrop)
{
    if (backdrop->segment && vmem__cuda_enter(cu) == 0) {
        vmem__cuda_release(cu, backdrop->handle);
        vmem__cuda_leave(cu);
    }
    backdrop->segment = 0;
}

int vmem__cuda_reserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, uint64_t length,
                       struct vmem__cuda_reservation *out)
{
    uint64_t segments = (length + backdrop->segment - 1) / backdrop->segment;
    int err = vmem__cuda_enter(cu);

    if (err)
        return err;
    out->length = segments * backdrop->segment;
    out->active = calloc((segments + 63) / 64, sizeof(uint64_t));
    if (!out->active)
        err = vmem__error(-ENOMEM, "reserve: no memory to keep track of %llu segments", (unsigned long long)segments);
    if (!err)
        err = vmem__cuda_error(&cu->fn, cu->fn.address_reserve(&out->addr, out->length, VMEM_PAGE_2M, 0, 0),
                               "cuMemAddressReserve");
    vmem__cuda_leave(cu);
    if (err)
        free(out->active);
    return err;
}

// The first run of segments with the given bit in [first, end); returns its first segment, *n its length, 0 if there is
// none.
static uint64_t next_run(const struct vmem__cuda_reservation *r, bool active, uint64_t first, uint64_t end, uint64_t *n)
{
    const uint64_t skip = active ? 0 : UINT64_MAX;

    *n = 0;
    while (first < end && vmem__bit(r->active, first) != active)
        first += first % 64 == 0 && r->active[first / 64] == skip ? 64 : 1; // a reservation has up to 2^25 segments
    while (first + *n < end && vmem__bit(r->active, first + *n) == active)
        ++*n;
    return first;
}

void vmem__cuda_unreserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop,
                          struct vmem__cuda_reservation *r)
{
    uint64_t segment = backdrop->segment, end = r->length / segment, n;

    if (vmem__cuda_enter(cu) == 0) {
        for (uint64_t i = next_run(r, true, 0, end, &n); n; i = next_run(r, true, i + n, end, &n))
            vmem__cuda_unmap(cu, r->addr + i * segment, n * segment);
        cu->fn.address_free(r->addr, r->length);
        vmem__cuda_leave(cu);
    }
    free(r->active);
}

static int activate_run(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__cuda_reservation *r,
                        uint64_t first, uint64_t n)
{
    uint64_t segment = backdrop->segment, addr = r->addr + first * segment, done = 0;
    int err = 0;

    while (!err && done < n)
        if ((err = vmem__cuda_map(cu, addr + done * segment, segment, backdrop->handle)) == 0)
            done++;
    if (!err)
        err = vmem__cuda_allow(cu, addr, n * segment);
    if (err && done)
        vmem__cuda_unmap(cu, addr, done * segment);
    for (uint64_t i = first; !err && i < first + n; i++)
        vmem__bit_set(r->active, i, true);
    return err;
}

int vmem__cuda_activate(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__cuda_reservation *r,
                        uint64_t addr, uint64_t length)
{
    uint64_t segment = backdrop->segment, segments = r->length / segment, n, i;
    uint64_t end = (addr - r->addr + length + segment - 1) / segment;
    int err;

    if (end > segments)
        end = segments;
    i = next_run(r, false, (addr - r->addr) / segment, end, &n);
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
