// SPDX-License-Identifier: MIT
#include "driver/reserve.h"

#include <errno.h>
#include <stdlib.h>

#include "core/error.h"

int vmem__backdrop_new(struct vmem__cuda *cu, struct vmem__backdrop *backdrop, uint64_t segment)
{
    struct vmem__cuda_reservation r;
    int rc = vmem__cuda_enter(cu);

    if (rc)
        return rc;
    rc = vmem__cuda_create(cu, segment, &backdrop->handle);
    vmem__cuda_leave(cu);
    if (rc)
        return rc;
    backdrop->segment = segment;
    rc = vmem__cuda_reserve(cu, backdrop, segment, segment, &r);
    if (!rc) {
        rc = vmem__cuda_fill(cu, r.addr, 0, segment);
        vmem__cuda_unreserve(cu, backdrop, &r);
    }
    if (rc)
        vmem__backdrop_free(cu, backdrop);
    return rc;
}

void vmem__backdrop_free(struct vmem__cuda *cu, struct vmem__backdrop *backdrop)
{
    if (backdrop->segment && vmem__cuda_enter(cu) == 0) {
        vmem__cuda_release(cu, backdrop->handle);
        vmem__cuda_leave(cu);
    }
    backdrop->segment = 0;
}

int vmem__cuda_reserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, uint64_t length, uint64_t ahead,
                       struct vmem__cuda_reservation *out)
{
    uint64_t segments = (length + backdrop->segment - 1) / backdrop->segment;
    int rc = vmem__cuda_enter(cu);

    if (rc)
        return rc;
    out->length = segments * backdrop->segment;
    out->active = calloc((segments + 63) / 64, sizeof(uint64_t));
    if (!out->active)
        rc = vmem__error(-ENOMEM, "reserve: no memory to keep track of %llu segments", (unsigned long long)segments);
    if (!rc)
        rc = vmem__cuda_error(&cu->fn, cu->fn.address_reserve(&out->addr, out->length, VMEM_PAGE_2M, 0, 0),
                              "cuMemAddressReserve");
    vmem__cuda_leave(cu);
    if (rc) {
        free(out->active);
        return rc;
    }
    pthread_mutex_init(&out->lock, NULL);
    rc = vmem__cuda_activate(cu, backdrop, out, out->addr, ahead);
    if (rc)
        vmem__cuda_unreserve(cu, backdrop, out);
    return rc;
}

uint64_t vmem__bit_run(const uint64_t *bits, bool value, uint64_t first, uint64_t end, uint64_t *n)
{
    const uint64_t skip = value ? 0 : UINT64_MAX;

    *n = 0;
    while (first < end && vmem__bit(bits, first) != value)
        first += first % 64 == 0 && bits[first / 64] == skip ? 64 : 1; // a reservation has up to 2^25 segments
    while (first + *n < end && vmem__bit(bits, first + *n) == value)
        ++*n;
    return first;
}

void vmem__cuda_unreserve(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop,
                          struct vmem__cuda_reservation *r)
{
    uint64_t segment = backdrop->segment, end = r->length / segment, n;

    if (vmem__cuda_enter(cu) == 0) {
        for (uint64_t i = vmem__bit_run(r->active, true, 0, end, &n); n;
             i = vmem__bit_run(r->active, true, i + n, end, &n))
            vmem__cuda_unmap(cu, r->addr + i * segment, n * segment);
        cu->fn.address_free(r->addr, r->length); // fails if the context is lost; only addresses stay taken then
        vmem__cuda_leave(cu);
    }
    pthread_mutex_destroy(&r->lock);
    free(r->active);
}

static int activate_run(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__cuda_reservation *r,
                        uint64_t first, uint64_t n)
{
    uint64_t segment = backdrop->segment, addr = r->addr + first * segment, done = 0;
    int rc = 0;

    while (!rc && done < n)
        if ((rc = vmem__cuda_map(cu, addr + done * segment, segment, backdrop->handle)) == 0)
            done++;
    if (!rc)
        rc = vmem__cuda_allow(cu, addr, n * segment);
    if (rc && done)
        vmem__cuda_unmap(cu, addr, done * segment);
    for (uint64_t i = first; !rc && i < first + n; i++)
        vmem__bit_set(r->active, i, true);
    return rc;
}

int vmem__cuda_activate(struct vmem__cuda *cu, const struct vmem__backdrop *backdrop, struct vmem__cuda_reservation *r,
                        uint64_t addr, uint64_t length)
{
    uint64_t segment = backdrop->segment, segments = r->length / segment, n, i;
    uint64_t end = (addr - r->addr + length + segment - 1) / segment;
    int rc;

    if (end > segments)
        end = segments;
    i = vmem__bit_run(r->active, false, (addr - r->addr) / segment, end, &n);
    if (n == 0)
        return 0;
    rc = vmem__cuda_enter(cu);
    if (rc)
        return rc;
    for (; !rc && n; i = vmem__bit_run(r->active, false, i + n, end, &n))
        rc = activate_run(cu, backdrop, r, i, n);
    vmem__cuda_leave(cu);
    return rc;
}
