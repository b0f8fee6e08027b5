// Expected requests: a free slot is backed for each request before it arrives.
//
// SPDX-License-Identifier: MIT
#include "kv/book/book.h"

int vmem__kv_expect(vmem_kv *kv, const uint32_t *tokens, const uint32_t *prefix_tokens, size_t n)
{
    struct kv_expected list[VMEM_KV_EXPECT];
    if (n && !tokens)
        return vmem__error(-EINVAL, "tokens must not be NULL");
    n = KV_MIN(n, VMEM_KV_EXPECT);
    for (size_t i = 0; i < n; i++) {
        list[i] = (struct kv_expected){tokens[i], prefix_tokens ? prefix_tokens[i] : 0};
        if (tokens[i] > kv->max_tokens)
            return vmem__error(-EINVAL, "tokens %u of request %zu: max_tokens is %u", tokens[i], i, kv->max_tokens);
        if (list[i].prefix > tokens[i])
            return vmem__error(-EINVAL, "prefix_tokens %u of request %zu: it has %u tokens", list[i].prefix, i,
                               tokens[i]);
    }
    for (size_t i = 0; i < n; i++)
        kv->expect.list[i] = list[i];
    kv->expect.n = (uint32_t)n;
    if (n)
        vmem__kv_worker_wake(kv);
    return 0;
}

uint32_t vmem__kv_expected_slot(const vmem_kv *kv, struct kv_expected *request)
{
    uint32_t taken[VMEM_KV_EXPECT];
    for (uint32_t i = 0; i < kv->expect.n; i++) {
        *request = kv->expect.list[i];
        taken[i] = vmem__kv_choose(kv, request->tokens, request->prefix, taken, i);
        if (taken[i] == UINT32_MAX || kv->slots[taken[i]].backed < request->tokens)
            return taken[i];
    }
    return UINT32_MAX;
}
