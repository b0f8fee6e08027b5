// Common memory: the checks before the backend's calls, and what is mapped (vmem_common.h).
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "vmem_common.h"

struct vmem_common {
    vmem_context *ctx;
    uint64_t addr, part_bytes;
    uint32_t parts;
    pthread_mutex_t lock; // calls wait for each other: they are few
    bool mapped[];
};

int vmem_common_create(vmem_context *ctx, uint64_t part_bytes, uint32_t parts, vmem_common **out, uint64_t *addr)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    if (!out || !addr)
        return vmem__error(-EINVAL, "out and addr must not be NULL");
    if (!part_bytes || part_bytes % BLOCK)
        return vmem__error(-EINVAL, "part_bytes %" PRIu64 " must be a multiple of 2 MiB", part_bytes);
    if (!parts || part_bytes > MAX_RESERVE / parts)
        return vmem__error(-EINVAL, "parts %" PRIu32 " of %" PRIu64 " bytes must be 1 to 2^46 bytes", parts,
                           part_bytes);
    vmem_common *c = calloc(1, sizeof *c + parts * sizeof c->mapped[0]);
    if (!c)
        return vmem__error(-ENOMEM, "no memory for bookkeeping of %" PRIu32 " parts", parts);
    rc = ctx->b.ops->common_reserve(&ctx->b, part_bytes * parts, &c->addr);
    if (rc) {
        free(c);
        return rc;
    }
    c->ctx = ctx;
    c->part_bytes = part_bytes;
    c->parts = parts;
    pthread_mutex_init(&c->lock, NULL);
    *addr = c->addr;
    *out = c;
    return 0;
}

// With the lock held.
static int unmap(vmem_common *c, uint32_t first, uint32_t n)
{
    struct vmem__backend *b = &c->ctx->b;
    int rc = 0;
    for (uint32_t i = first, end; i < first + n && !rc; i = end) {
        for (end = i; end < first + n && c->mapped[end] == c->mapped[i];)
            end++;
        if (!c->mapped[i])
            continue;
        rc = b->ops->common_unmap(b, c->addr + i * c->part_bytes, (end - i) * c->part_bytes);
        for (uint32_t k = i; k < end && !rc; k++)
            c->mapped[k] = false;
    }
    return rc;
}

void vmem_common_destroy(vmem_common *c)
{
    if (!c)
        return;
    if (*c->ctx->owned) {
        char text[VMEM__TEXT];
        vmem__keep_error(text);
        if (!unmap(c, 0, c->parts)) // else the addresses stay reserved, and the memory mapped
            c->ctx->b.ops->common_unreserve(&c->ctx->b, c->addr, c->part_bytes * c->parts);
        pthread_mutex_destroy(&c->lock);
        vmem__error(0, "%s", text);
    }
    free(c);
}

static int check(const vmem_common *c)
{
    return c ? vmem__enter(c->ctx) : vmem__error(-EINVAL, "common must not be NULL");
}

static int check_part(const vmem_common *c, uint32_t part)
{
    int rc = check(c);
    if (!rc && part >= c->parts)
        rc = vmem__error(-EINVAL, "part %" PRIu32 " must be below %" PRIu32, part, c->parts);
    return rc;
}

int vmem_common_new(vmem_common *c, int *fd)
{
    int rc = check(c);
    if (rc)
        return rc;
    if (!fd)
        return vmem__error(-EINVAL, "fd must not be NULL");
    return c->ctx->b.ops->common_new(&c->ctx->b, c->part_bytes, fd);
}

int vmem_common_map(vmem_common *c, uint32_t part, int fd, uint32_t flags)
{
    int rc = check_part(c, part);
    if (!rc)
        rc = vmem__check_flags(flags, VMEM_COMMON_WRITABLE);
    if (rc)
        return rc;
    pthread_mutex_lock(&c->lock);
    struct vmem__backend *b = &c->ctx->b;
    rc = c->mapped[part]
             ? vmem__error(-EEXIST, "part %" PRIu32 " is mapped", part)
             : b->ops->common_map(b, c->addr + part * c->part_bytes, c->part_bytes, fd, flags & VMEM_COMMON_WRITABLE);
    c->mapped[part] |= !rc;
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int vmem_common_seal(vmem_common *c, uint32_t part)
{
    int rc = check_part(c, part);
    if (rc)
        return rc;
    pthread_mutex_lock(&c->lock);
    struct vmem__backend *b = &c->ctx->b;
    rc = !c->mapped[part] ? vmem__error(-EINVAL, "part %" PRIu32 " is not mapped", part)
                          : b->ops->common_seal(b, c->addr + part * c->part_bytes, c->part_bytes);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int vmem_common_unmap(vmem_common *c, uint32_t first, uint32_t n)
{
    int rc = check(c);
    if (rc)
        return rc;
    if (first > c->parts || n > c->parts - first)
        return vmem__error(-EINVAL, "first %" PRIu32 ", n %" PRIu32 ": there are %" PRIu32 " parts", first, n,
                           c->parts);
    pthread_mutex_lock(&c->lock);
    rc = unmap(c, first, n);
    pthread_mutex_unlock(&c->lock);
    return rc;
}
