// Contexts: choice of a backend, life, information, statistics.
//
// SPDX-License-Identifier: MIT
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/core.h"

// ---- options ------------------------------------------------------------------------------------------------

static int check_options(const struct vmem_options *in, struct vmem_options *out, uint32_t flags)
{
    *out = (struct vmem_options){.size = sizeof *out};
    if (!in)
        return 0;
    int rc = vmem__struct_take(out, sizeof *out, offsetof(struct vmem_options, budget), in, "opts");
    if (rc)
        return rc;
    if (out->flags & ~flags)
        return vmem__error(-EINVAL, "opts->flags 0x%x: only VMEM_OPT_UNKNOWN_DRIVER%s known here", out->flags,
                           flags & VMEM_OPT_BY_DEFAULT ? " and VMEM_OPT_BY_DEFAULT are" : " is");
    if (out->reserved)
        return vmem__error(-EINVAL, "opts->reserved %u must be 0", out->reserved);
    if (out->device < 0)
        return vmem__error(-EINVAL, "opts->device %d must not be negative", out->device);
    return 0;
}

static int find_backend(const char *name, const char *whence, const struct vmem__ops **ops)
{
    char names[128] = "";
    for (const struct vmem__ops *const *b = vmem__backends; *b; b++) {
        if (!strcmp((*b)->name, name)) {
            *ops = *b;
            return 0;
        }
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", (*b)->name);
    }
    return vmem__error(-EINVAL, "%s \"%.32s\" is not one of %s", whence, name, names);
}

// 0 if a context that names no backend may use this one, which works.
static int may_be_chosen(const struct vmem__ops *ops, const struct vmem_options *o)
{
    return ops->by_default ? ops->by_default(o) : 0;
}

int vmem_probe(const struct vmem_options *opts)
{
    struct vmem_options o;
    const struct vmem__ops *ops;
    int rc = check_options(opts, &o, VMEM_OPT_UNKNOWN_DRIVER | VMEM_OPT_BY_DEFAULT);
    if (!rc && !o.backend)
        rc = vmem__error(-EINVAL, "opts->backend is NULL: it must name a backend");
    if (!rc)
        rc = find_backend(o.backend, "opts->backend", &ops);
    if (!rc)
        rc = ops->probe(&o);
    return rc || !(o.flags & VMEM_OPT_BY_DEFAULT) ? rc : may_be_chosen(ops, &o);
}

// A different number for every context of the process (splitmix64 is a bijection), with a bit that no frame has.
static uint64_t new_salt(void)
{
    static _Atomic uint64_t contexts;
    uint64_t z = atomic_fetch_add(&contexts, 1) * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (z ^ z >> 31) | FRAME_END;
}

// ---- life ---------------------------------------------------------------------------------------------------

int vmem__context_create_ops(const struct vmem__ops *ops, const struct vmem_options *opts, vmem_context **out)
{
    vmem_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx)
        return vmem__error(-ENOMEM, "no memory for a context");
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *owned = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int rc = 0;
    if (owned == MAP_FAILED)
        rc = vmem__error(-ENOMEM, "no memory for a context: mmap: %s", strerror(errno));
    else if (madvise(owned, page, MADV_WIPEONFORK))
        rc = vmem__error(-errno, "the kernel lacks madvise(MADV_WIPEONFORK), Linux 4.14: %s", strerror(errno));
    if (!rc) {
        *owned = 1;
        ctx->owned = owned;
        ctx->b.ops = ops;
        snprintf(ctx->b.info.backend, sizeof ctx->b.info.backend, "%s", ops->name);
        ctx->salt = new_salt();
        ctx->sweep = vmem__sweep;
        pthread_mutex_init(&ctx->lock, NULL);
        pthread_cond_init(&ctx->idle, NULL);
        pthread_cond_init(&ctx->settled, NULL);
        rc = ops->open(&ctx->b, opts);
        vmem__limit(ctx, opts->budget);
    }
    if (rc) {
        if (owned != MAP_FAILED)
            munmap(owned, page);
        free(ctx);
        return rc;
    }
    *out = ctx;
    return 0;
}

int vmem_context_create(const struct vmem_options *opts, vmem_context **out)
{
    struct vmem_options o;
    int rc = check_options(opts, &o, VMEM_OPT_UNKNOWN_DRIVER);
    if (rc)
        return rc;
    if (!out)
        return vmem__error(-EINVAL, "out is NULL");

    const struct vmem__ops *ops;
    const char *env = getenv("VMEM_BACKEND");
    if (o.backend || (env && *env)) {
        rc = o.backend ? find_backend(o.backend, "opts->backend", &ops) : find_backend(env, "$VMEM_BACKEND", &ops);
        return rc ? rc : vmem__context_create_ops(ops, &o, out);
    }
    char why[400] = "";
    rc = -ENODEV;
    for (const struct vmem__ops *const *b = vmem__backends; *b; b++) {
        rc = (*b)->probe(&o);
        if (!rc)
            rc = may_be_chosen(*b, &o);
        if (!rc)
            rc = vmem__context_create_ops(*b, &o, out);
        if (!rc)
            return 0;
        size_t used = strlen(why);
        snprintf(why + used, sizeof why - used, "; %s: %s", (*b)->name, vmem_last_error());
    }
    return vmem__error(rc, "no backend works here%s", why);
}

void vmem_context_destroy(vmem_context *ctx)
{
    if (!ctx)
        return;
    const bool forked = !*ctx->owned;
    char text[VMEM__TEXT];
    vmem__keep_error(text);
    // In a forked child, the records may be half-written, and a thread that does not exist here may hold the lock. Only
    // the backend's own state is freed; the end of the process frees the rest.
    if (!forked) {
        vmem__lock(ctx);
        ctx->closing = true;
        while (ctx->calls)
            pthread_cond_wait(&ctx->idle, &ctx->lock);
        vmem__unlock(ctx);
        for (size_t i = 0; i < ctx->n_reservations; i++)
            vMemUnmap(ctx, ctx->reservations[i]->b.addr, ctx->reservations[i]->b.length);
        vmem__reservations_destroy(ctx);
        vmem__arenas_destroy(ctx);
        vmem__lock(ctx);
        vmem__end_remnants(ctx);
        vmem__unlock(ctx);
    }
    ctx->b.ops->close(&ctx->b, forked);
    munmap((void *)ctx->owned, (size_t)sysconf(_SC_PAGESIZE));
    if (!forked) { // in a child, the lock may be held, and threads that do not exist may wait
        pthread_cond_destroy(&ctx->idle);
        pthread_cond_destroy(&ctx->settled);
        pthread_mutex_destroy(&ctx->lock);
    }
    free(ctx);
    vmem__error(0, "%s", text);
}

// ---- information --------------------------------------------------------------------------------------------

int vmem_context_info(vmem_context *ctx, struct vmem_info *out)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    return vmem__struct_give(out, &ctx->b.info, sizeof ctx->b.info, "out");
}

int vmem_context_memory(vmem_context *ctx, uint64_t *total, uint64_t *free)
{
    uint64_t all = 0, left = 0;
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    vmem__begin(ctx);
    vmem__unlock(ctx);
    rc = ctx->b.ops->memory(&ctx->b, &all, &left);
    vmem__lock(ctx);
    vmem__end(ctx);
    if (!rc && total)
        *total = all;
    if (!rc && free)
        *free = left;
    return rc;
}

int vmem_context_stats(vmem_context *ctx, struct vmem_stats *out)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    vmem__begin(ctx);
    const struct vmem_stats stats = {
        .reserved = ctx->reserved,
        .created = ctx->created,
        .mapped = ctx->mapped,
        .overhead = (ctx->committed > ctx->created ? ctx->committed - ctx->created : 0) + ctx->b.overhead,
        .budget = ctx->budget,
        .syscalls = ctx->b.syscalls,
        .map_ops = ctx->map_ops,
        .map_runs = ctx->map_runs,
        .unmap_ops = ctx->unmap_ops,
        .unmap_runs = ctx->unmap_runs,
        .absent = ctx->b.n_absent * GRANULE,
    };
    vmem__end(ctx);
    return vmem__struct_give(out, &stats, sizeof stats, "out");
}

uint32_t vmem_version(void) { return VMEM_VERSION; }
