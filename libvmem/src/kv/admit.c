// Admission: decides whether new requests would fit, before they have slots.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// The pages that a new request must leave unused. Zero if no request runs: none could need them, and the new request
// might never begin.
static uint64_t kept_back(const vmem_kv *kv) { return kv->in_state[VMEM_KV_ACTIVE] ? kv_watermark(kv) : 0; }

// True if a request could have `tokens` tokens.
static bool fits(vmem_kv *kv, int32_t slot, uint32_t tokens, uint64_t limit)
{
    int64_t delta;
    if (slot < 0)
        return kv->ledger.pinned_pages + vmem__kv_pages_beside(kv, tokens, 0) <= limit;
    vmem__kv_plan_one(kv, (uint32_t)slot, tokens, &delta);
    return delta <= 0 || kv->ledger.pinned_pages + (uint64_t)delta <= limit;
}

// The most tokens that fit. A longer request never needs fewer pages, so bisection finds them.
static uint32_t most_tokens(vmem_kv *kv, int32_t slot, uint64_t limit)
{
    uint32_t least = slot < 0 ? 0 : kv->slots[slot].tokens, most = kv->max_tokens;
    if (slot < 0)
        limit = sat_sub(limit, kept_back(kv));
    while (least < most) {
        uint32_t middle = least + (most - least + 1) / 2;
        if (fits(kv, slot, middle, limit))
            least = middle;
        else
            most = middle - 1;
    }
    // A request that was truncated may lack pages for the length that it has.
    if (slot >= 0 && least == kv->slots[slot].tokens && !fits(kv, slot, least, limit))
        least = 0;
    return least;
}

static int count_room(vmem_kv *kv, int32_t slot, uint32_t *tokens)
{
    int rc = 0;
    if (!tokens)
        rc = vmem__error(-EINVAL, "tokens must not be NULL");
    else if (slot >= 0)
        rc = vmem__kv_use_slot(kv, (uint32_t)slot, 1u << VMEM_KV_ACTIVE);
    else if (slot != -1)
        rc = vmem__error(-EINVAL, "slot %d is out of range: the cache has %u slots, and -1 asks for a new request",
                         slot, kv->n_slots);
    if (rc)
        return rc;
    *tokens = 0;
    if (slot < 0 && !kv->in_state[VMEM_KV_FREE])
        return 0;
    const uint32_t has = slot < 0 ? 0 : kv->slots[slot].tokens;
    *tokens = most_tokens(kv, slot, vmem__kv_page_limit_lately(kv));
    if (*tokens <= has && has < kv->max_tokens) // before it says that there is none, it asks
        *tokens = most_tokens(kv, slot, vmem__kv_page_limit(kv, kv->ledger.budget));
    return 0;
}

int vmem_kv_room(vmem_kv *kv, int32_t slot, uint32_t *tokens)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, count_room(kv, slot, tokens));
}

// ---- requests --------------------------------------------------------------------------------------------------------

static int check_request(const vmem_kv *kv, const struct vmem_kv_request *r, size_t i)
{
    if (!r->tokens || r->tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "requests[%zu].tokens %u is not between 1 and max_tokens, %u", i, r->tokens,
                           kv->max_tokens);
    if (r->prefix_tokens > r->tokens)
        return vmem__error(-EINVAL, "requests[%zu].prefix_tokens %u is over its tokens, %u", i, r->prefix_tokens,
                           r->tokens);
    if (r->n_runs && r->prefix_tokens)
        return vmem__error(-EINVAL, "requests[%zu]: prefix_tokens and runs exclude each other", i);
    if (vmem__kv_check_ids(&kv->runs, r->runs, r->n_runs))
        return vmem__error(-EINVAL, "requests[%zu].%s", i, vmem_last_error());
    return 0;
}

// The pages that are pinned when some requests have been admitted: once their prefixes are attached, and after the
// step.
struct admitted {
    uint64_t attached, stepped;
    uint64_t peak; // the larger of both, and pages that cannot be evicted before the last request has begun
};

// Adds a request's pages. -EINVAL: its runs are not of this cache.
static int add_request(vmem_kv *kv, const struct vmem_kv_request *r, struct admitted *a)
{
    uint32_t prefix_tokens = r->prefix_tokens;
    uint64_t beside = 0;
    const int rc = r->n_runs ? vmem__kv_find_runs(kv, r->runs, r->n_runs, r->tokens, &prefix_tokens) : 0;
    if (rc)
        return rc;
    if (r->n_runs && prefix_tokens) {
        vmem__kv_protect_found(kv, prefix_tokens);
        const uint64_t taken = vmem__kv_count_taken(kv, prefix_tokens, &beside);
        a->stepped += taken;
        a->attached += taken;
    }
    a->stepped += vmem__kv_pages_beside(kv, r->tokens, prefix_tokens);
    a->attached += prefix_tokens ? vmem__kv_pages_beside(kv, prefix_tokens, prefix_tokens) : 0;
    a->peak = MAX(a->stepped, a->attached + beside);
    return 0;
}

static int admit(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit)
{
    struct admitted a = {.attached = kv->ledger.pinned_pages, .stepped = kv->ledger.pinned_pages};
    uint64_t limit = 0, back = kept_back(kv);
    int rc = 0;
    kv->mark++;
    while (*fit < n && *fit < kv->in_state[VMEM_KV_FREE]) {
        const struct vmem_kv_request *r = &requests[*fit];
        rc = add_request(kv, r, &a);
        if (rc)
            return rc;
        const uint64_t most = a.peak + back;
        if (most > limit)
            limit = vmem__kv_page_limit(kv, most);
        // The pool may have more free budget than this process knows.
        if (most > limit && most > kv->ledger.budget) {
            vmem__kv_claim(kv, most);
            limit = vmem__kv_page_limit(kv, most);
        }
        if (most > limit)
            rc = vmem__kv_short_beside(kv, a.peak, limit, back);
        if (r->n_runs)
            vmem__kv_unprotect_found(kv);
        if (rc)
            return rc;
        ++*fit;
        back = kv_watermark(kv); // a request runs from here on
    }
    return *fit < n ? vmem__kv_short_of_slots(kv) : 0;
}

static int count_fitting(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit)
{
    size_t fits = 0;
    int rc = 0;
    if (n && !requests)
        rc = vmem__error(-EINVAL, "requests must not be NULL");
    for (size_t i = 0; i < n && !rc; i++)
        rc = check_request(kv, &requests[i], i);
    vmem__kv_clear_shortage();
    if (!rc && n)
        rc = admit(kv, requests, n, &fits);
    if (fit)
        *fit = fits;
    return rc;
}

int vmem_kv_fit(vmem_kv *kv, const struct vmem_kv_request *requests, size_t n, size_t *fit)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, count_fitting(kv, requests, n, fit));
}
