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

// Whether the slot's pages begin after its first row.
static bool begins_later(const vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        if (kv_span(kv, slot, i)->lo)
            return true;
    return false;
}

// The number of tokens that a free slot is backed for, counted from the first row.
static uint32_t backed(const vmem_kv *kv, uint32_t slot) { return begins_later(kv, slot) ? 0 : kv->slots[slot].backed; }

// The number of tokens behind the request's prefix that the slot is backed for, or -1 if the request must not use the
// slot.
static int64_t backed_behind(const vmem_kv *kv, uint32_t slot, const struct kv_expected *e)
{
    if (!vmem__kv_has_pages(kv, slot))
        return 0;
    // Exclude pages in the place of the prefix: they would be unmapped when the request arrives.
    if (kv->idle[slot].from != e->prefix || kv->slots[slot].backed <= e->prefix)
        return -1;
    return KV_MIN(kv->slots[slot].backed, e->tokens) - e->prefix;
}

uint32_t vmem__kv_expected_slot(const vmem_kv *kv, struct kv_expected *request)
{
    uint32_t taken[VMEM_KV_EXPECT], n_taken = 0;
    for (uint32_t i = 0; i < kv->expect.n; i++) {
        const struct kv_expected *e = &kv->expect.list[i];
        uint32_t best = UINT32_MAX, best_fit = 0;
        for (uint32_t s = 0; s < kv->n_slots; s++) {
            const struct kv_slot *sl = &kv->slots[s];
            if (sl->state != VMEM_KV_FREE || sl->busy || sl->stale || sl->skip)
                continue;
            bool other = true;
            for (uint32_t k = 0; k < n_taken && other; k++)
                other = taken[k] != s;
            const int64_t fit = e->prefix ? backed_behind(kv, s, e) : backed(kv, s);
            if (!other || fit < 0)
                continue;
            if (best == UINT32_MAX || vmem__kv_fits_better((uint32_t)fit, best_fit, e->tokens - e->prefix) ||
                (fit == best_fit && begins_later(kv, best) && !begins_later(kv, s))) {
                best = s;
                best_fit = (uint32_t)fit;
            }
        }
        if (best == UINT32_MAX && !e->prefix)
            return best;
        if (best == UINT32_MAX)
            continue;
        if (best_fit < e->tokens - e->prefix) {
            *request = *e;
            return best;
        }
        taken[n_taken++] = best;
    }
    return UINT32_MAX;
}
