// The owner of a KV-cache manager, and its calls as Python makes them.
//
// SPDX-License-Identifier: MIT
#include <dlfcn.h>
#include <errno.h>

#include "kv/calls/calls.h"
#include "native_kv.h"

static void destroy(void *kv) { vmem_kv_destroy(kv); }

int pv_own_kv(pv_owner *owner, vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **kv)
{
    int rc = vmem_kv_create(ctx, cfg, kv);
    if (!rc)
        pv_owner_set(owner, destroy, *kv);
    return rc;
}

static void destroy_pool(void *pool) { vmem_kv_pool_destroy(pool); }

int pv_own_pool(pv_owner *owner, const struct vmem_kv_pool_config *cfg, vmem_kv_pool **pool)
{
    int rc = vmem_kv_pool_create(cfg, pool);
    if (!rc)
        pv_owner_set(owner, destroy_pool, *pool);
    return rc;
}

static int64_t answer(int rc, uint64_t missing) { return rc == -ENOMEM && missing ? (int64_t)missing : rc; }

// The answer of a call whose last argument receives the pages that are missing.
#define ANSWER(call, ...)                       \
    ({                                          \
        uint64_t missing_ = 0;                  \
        int rc_ = call(__VA_ARGS__, &missing_); \
        answer(rc_, missing_);                  \
    })

int64_t pv_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n) { return ANSWER(vmem_kv_step, kv, lengths, n); }

int64_t pv_kv_check(vmem_kv *kv, const int32_t *lengths, uint32_t n) { return ANSWER(vmem_kv_check, kv, lengths, n); }

int64_t pv_kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens) { return ANSWER(vmem_kv_grow, kv, slot, tokens); }

int64_t pv_kv_commit(vmem_kv *kv) { return ANSWER(vmem_kv_commit, kv); }

int64_t pv_kv_fit(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit)
{
    return ANSWER(vmem_kv_fit, kv, requests, n, fit);
}

int64_t pv_kv_attach(vmem_kv *kv, uint64_t prefix, uint32_t slot, uint32_t tokens)
{
    return ANSWER(vmem_kv_prefix_attach, kv, prefix, slot, tokens);
}

int64_t pv_kv_attach_check(vmem_kv *kv, uint64_t prefix, uint32_t tokens)
{
    return ANSWER(vmem_kv_prefix_check, kv, prefix, tokens);
}

int64_t pv_kv_hash_attach(vmem_kv *kv, uint32_t slot, const struct vmem_kv_hash *hashes, size_t n, uint32_t *tokens)
{
    return ANSWER(vmem_kv_hash_attach, kv, slot, hashes, n, tokens);
}

int64_t pv_kv_hash_check(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint32_t *tokens)
{
    return ANSWER(vmem_kv_hash_check, kv, hashes, n, tokens);
}

int64_t pv_kv_truncate_check(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    return ANSWER(vmem_kv_truncate_check, kv, slot, tokens);
}

int64_t pv_kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    return ANSWER(vmem_kv_swap_in, kv, slot, host, bytes);
}

int64_t pv_kv_swap_check(vmem_kv *kv, uint32_t slot) { return ANSWER(vmem_kv_swap_check, kv, slot); }

int pv_kv_close(vmem_kv *kv, uint64_t step)
{
    bool quiet = false;
    int rc = vmem__kv_close(kv, step, &quiet);
    return rc ? rc : quiet;
}

int pv_kv_retire(vmem_kv *kv, uint64_t step) { return vmem__kv_retire(kv, step); }

// In CUDA's default mode, a query by any thread breaks the capture.
void pv_beside_captures(void)
{
    int relaxed = 2;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*exchange)(int *) = library ? (int (*)(int *))dlsym(library, "cuThreadExchangeStreamCaptureMode") : NULL;
    if (exchange)
        exchange(&relaxed);
}
