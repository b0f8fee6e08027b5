// The owner of a KV-cache manager, and the loop of its benchmark.
//
// SPDX-License-Identifier: MIT
#include <dlfcn.h>
#include <errno.h>
#include <time.h>

#include "kv/kv.h"
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

int64_t pv_kv_step(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    uint64_t missing = 0;
    int rc = vmem_kv_step(kv, lengths, n, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_check(vmem_kv *kv, const int32_t *lengths, uint32_t n)
{
    uint64_t missing = 0;
    int rc = vmem_kv_check(kv, lengths, n, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_grow(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    uint64_t missing = 0;
    int rc = vmem_kv_grow(kv, slot, tokens, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_commit(vmem_kv *kv)
{
    uint64_t missing = 0;
    int rc = vmem_kv_commit(kv, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_fit(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit)
{
    uint64_t missing = 0;
    int rc = vmem_kv_fit(kv, requests, n, fit, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_attach(vmem_kv *kv, uint64_t prefix, uint32_t slot, uint32_t tokens)
{
    uint64_t missing = 0;
    int rc = vmem_kv_prefix_attach(kv, prefix, slot, tokens, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_attach_check(vmem_kv *kv, uint64_t prefix, uint32_t tokens)
{
    uint64_t missing = 0;
    int rc = vmem_kv_prefix_check(kv, prefix, tokens, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_hash_attach(vmem_kv *kv, uint32_t slot, const struct vmem_kv_hash *hashes, size_t n, uint32_t *tokens)
{
    uint64_t missing = 0;
    int rc = vmem_kv_hash_attach(kv, slot, hashes, n, tokens, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_hash_check(vmem_kv *kv, const struct vmem_kv_hash *hashes, size_t n, uint32_t *tokens)
{
    uint64_t missing = 0;
    int rc = vmem_kv_hash_check(kv, hashes, n, tokens, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_truncate_check(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    uint64_t missing = 0;
    int rc = vmem_kv_truncate_check(kv, slot, tokens, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_swap_in(vmem_kv *kv, uint32_t slot, const void *host, uint64_t bytes)
{
    uint64_t missing = 0;
    int rc = vmem_kv_swap_in(kv, slot, host, bytes, &missing);
    return answer(rc, missing);
}

int64_t pv_kv_swap_check(vmem_kv *kv, uint32_t slot)
{
    uint64_t missing = 0;
    int rc = vmem_kv_swap_check(kv, slot, &missing);
    return answer(rc, missing);
}

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

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int pv_bench_kv_steps(vmem_kv *kv, int32_t *lengths, uint32_t slots, uint64_t n, uint64_t pause_us, uint64_t *samples)
{
    for (uint64_t i = 0; i < n; i++) {
        for (uint32_t s = 0; s < slots; s++)
            lengths[s] += lengths[s] > 0;
        uint64_t start = now();
        int rc = vmem_kv_step(kv, lengths, slots, NULL);
        uint64_t end = now();
        if (rc)
            return rc;
        samples[i] = end - start;
        while (pause_us) { // sleeping is what a server does that waits for the GPU
            uint64_t gone = (now() - end) / 1000;
            if (gone >= pause_us)
                break;
            uint64_t left = pause_us - gone;
            struct timespec t = {.tv_sec = (time_t)(left / 1000000), .tv_nsec = (long)(left % 1000000 * 1000)};
            nanosleep(&t, NULL);
        }
    }
    return 0;
}
