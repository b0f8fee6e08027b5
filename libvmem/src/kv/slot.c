// Slots: their states, and the choice of a free one for a request that begins or is announced.
//
// SPDX-License-Identifier: MIT
#include "kv/kv.h"

// How many of the slot's kept rows a request could reuse, minus those that its prefix, perhaps of no tokens, would
// replace.
static int64_t gain_of(const struct kv_idle *s, uint32_t fit, uint32_t tokens, uint32_t prefix_tokens)
{
    int64_t used = (int64_t)MIN(tokens, fit) - MAX(prefix_tokens, s->first_private_row);
    int64_t lost = (int64_t)MIN(prefix_tokens, fit) - s->first_private_row;
    return MAX(used, 0) - MAX(lost, 0);
}

// True if a request must wait for the slot or for an unmap. This depends on the worker's progress.
static bool delays(const vmem_kv *kv, uint32_t slot) { return kv->slots[slot].busy || kv->slots[slot].stale; }

static bool among(const uint32_t *slots, uint32_t n, uint32_t slot)
{
    while (n && slots[n - 1] != slot)
        n--;
    return n;
}

// How well a free slot fits a request.
struct fitness {
    int64_t gain;   // see gain_of
    uint32_t pages; // rows that the slot has kept; 0 if the request begins with a prefix, which replaces them
    bool delays;    // see delays
    uint32_t from;  // kv_idle.first_private_row
};

static struct fitness fitness_of(const vmem_kv *kv, uint32_t slot, uint32_t tokens, uint32_t prefix_tokens)
{
    const uint32_t has = kv->slots[slot].backed;
    return (struct fitness){.gain = gain_of(&kv->idle[slot], has, tokens, prefix_tokens),
                            .pages = prefix_tokens ? 0 : has,
                            .delays = delays(kv, slot),
                            .from = kv->idle[slot].first_private_row};
}

// Slots are compared by the largest gain, then the fewest pages, then no delay, then the smallest first_private_row,
// and last by their number.
static bool is_better(const struct fitness *a, uint32_t slot, const struct fitness *b, uint32_t best)
{
    if (a->gain != b->gain)
        return a->gain > b->gain;
    if (a->pages != b->pages)
        return a->pages < b->pages;
    if (a->delays != b->delays)
        return b->delays;
    return a->from != b->from ? a->from < b->from : slot < best;
}

#define LOOKS 16 // slots examined in each list: those of one list have about equally many pages
uint32_t vmem__kv_choose_slot(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens, const uint32_t *taken,
                              uint32_t n)
{
    uint32_t best = KV_NO_SLOT;
    struct fitness most = {0};
    if (!tokens)
        tokens = kv->eager_tokens;
    for (const struct kv_set *set = kv->lists; set < kv->lists + KV_FREE_LISTS; set++) {
        uint32_t looks = 0;
        for (uint32_t s = 0; (s = vmem__kv_set_next(kv, set, s)) != KV_NO_SLOT && looks < LOOKS; s++) {
            if (among(taken, n, s))
                continue;
            const struct fitness one = fitness_of(kv, s, tokens, prefix_tokens);
            if (best == KV_NO_SLOT || is_better(&one, s, &most, best)) {
                best = s;
                most = one;
            }
            looks++;
        }
    }
    return best;
}

const char *vmem__kv_state_name(uint8_t state)
{
    static const char *const names[] = {"free", "active", "swapped out", "being given up"};
    return names[state];
}

void vmem__kv_set_state(vmem_kv *kv, uint32_t slot, uint8_t state)
{
    struct kv_slot *s = &kv->slots[slot];
    kv->in_state[s->state]--;
    kv->in_state[state]++;
    s->state = state;
    s->same_pages_until = 0;
    kv_list(kv, slot);
    vmem__kv_update_pinned(kv, slot);
}

int vmem__kv_check_slot(const vmem_kv *kv, uint32_t slot, uint32_t states)
{
    if (slot >= kv->n_slots)
        return vmem__error(-EINVAL, "slot %u is out of range: the cache has %u slots", slot, kv->n_slots);
    if (!(states >> kv->slots[slot].state & 1))
        return vmem__error(-EINVAL, "slot %u is %s", slot, vmem__kv_state_name(kv->slots[slot].state));
    return 0;
}

int vmem__kv_use_slot(vmem_kv *kv, uint32_t slot, uint32_t states)
{
    int rc = vmem__kv_check_slot(kv, slot, states);
    if (!rc)
        vmem__kv_wait_slot(kv, slot);
    return rc;
}

// ---- requests that come next ------------------------------------------------------------------------------------------

int vmem__kv_expect(vmem_kv *kv, const uint32_t *tokens, const uint32_t *prefix_tokens, size_t n)
{
    struct kv_expected list[VMEM_KV_EXPECT];
    if (n && !tokens)
        return vmem__error(-EINVAL, "tokens must not be NULL");
    n = MIN(n, VMEM_KV_EXPECT);
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
        taken[i] = vmem__kv_choose_slot(kv, request->tokens, request->prefix, taken, i);
        if (taken[i] == KV_NO_SLOT || kv->slots[taken[i]].backed < request->tokens)
            return taken[i];
    }
    return KV_NO_SLOT;
}
