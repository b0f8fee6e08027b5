// Requests that are expected: a free slot is backed for each before it comes.
//
// SPDX-License-Identifier: MIT
#include <string.h>

#include "kv/kv.h"

int vmem_kv_expect(vmem_kv *kv, const uint32_t *tokens, size_t n)
{
    int rc = vmem__kv_enter_step(kv);
    if (rc)
        return rc;
    if (n && !tokens)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "tokens must not be NULL"));
    n = KV_MIN(n, VMEM_KV_EXPECT);
    for (size_t i = 0; i < n; i++)
        if (tokens[i] > kv->max_tokens)
            return vmem__kv_leave(kv, vmem__error(-EINVAL, "tokens %u of request %zu: max_tokens is %u", tokens[i], i,
                                                  kv->max_tokens));
    if (n)
        memcpy(kv->expected, tokens, n * sizeof(*tokens));
    kv->n_expected = (uint32_t)n;
    if (n)
        vmem__kv_worker_wake(kv);
    return vmem__kv_leave(kv, 0);
}

// Tokens that a free slot is backed for, from the first row on.
static uint32_t backed(const vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        if (kv_span(kv, slot, i)->lo)
            return 0;
    return kv->slots[slot].backed;
}

uint32_t vmem__kv_expected_slot(const vmem_kv *kv, uint32_t *tokens)
{
    uint32_t taken[VMEM_KV_EXPECT];
    for (uint32_t i = 0; i < kv->n_expected; i++) {
        uint32_t best = UINT32_MAX, best_fit = 0;
        for (uint32_t s = 0; s < kv->n_slots; s++) {
            const struct kv_slot *sl = &kv->slots[s];
            if (sl->state != VMEM_KV_FREE || sl->busy || sl->stale || sl->skip)
                continue;
            bool other = true;
            for (uint32_t k = 0; k < i && other; k++)
                other = taken[k] != s;
            uint32_t fit = backed(kv, s);
            if (other && (best == UINT32_MAX || vmem__kv_fits_better(fit, best_fit, kv->expected[i]))) {
                best = s;
                best_fit = fit;
            }
        }
        if (best == UINT32_MAX)
            return best;
        if (best_fit < kv->expected[i]) {
            *tokens = kv->expected[i];
            return best;
        }
        taken[i] = best;
    }
    return UINT32_MAX;
}
