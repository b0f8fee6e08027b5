// Attaching: a request begins with pages of runs. It copies the last of them if that is partial, as it will write
// there.
//
// SPDX-License-Identifier: MIT
#include "kv/kv.h"

// What cannot be unmapped now stays stale.
static void unmap_shared(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_split s = vmem__kv_split(kv, &kv->groups[i], tokens);
        if (s.full > s.lo)
            vmem__kv_stale_set(kv, slot, i, s.lo, s.full);
    }
    vmem__kv_stale_now(kv, slot);
}

static void commit_attach(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *sl = &kv->slots[slot];
    vmem__kv_grow_commit(kv, &kv->grow);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct kv_split s = vmem__kv_split(kv, g, tokens);
        if (s.lo == s.hi)
            continue;
        struct kv_span now = kv_span_at(s.lo);
        now.hi = MAX(s.hi, kv_span(kv, slot, i)->hi);
        now.step = now.in_flight = (struct kv_range){s.lo, s.hi};
        now.shared_hi = s.full > s.lo ? s.full : 0;
        now.coarse_hi = kv_span(kv, slot, i)->coarse_hi;
        vmem__kv_span_set(kv, slot, i, &now);
        for (uint32_t p = s.lo; p < s.full; p++)
            vmem__kv_change_holders(kv, vmem__kv_row(kv, slot, i, p), (struct kv_holders){.slots = 1});
        kv->stats.attached_pages += (uint64_t)(s.full - s.lo) * g->n;
        if (s.full > s.lo)
            sl->shared_tokens = tokens;
    }
    sl->tokens = tokens;
    vmem__kv_update_pinned(kv, slot);
}

// Prepares a slot that will begin with the full pages of `tokens` shared rows. Its kept pages behind them stay if they
// are of use, and the others are cut off. Kept pages that will contain shared rows are pinned during the attach.
static int keep_tail(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    // With VMEM_KV_ZERO, no rows of the runs are copied to a kept page: if the attach failed, the request would see
    // them.
    int rc = vmem__kv_stale_now(kv, slot);
    if (!rc && kv->flags & VMEM_KV_ZERO)
        rc = vmem__kv_cut_slot(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_span *sp = kv_span(kv, slot, i);
        struct kv_split s = vmem__kv_split(kv, &kv->groups[i], tokens);
        uint32_t hi = sp->lo > s.hi ? sp->lo : sp->coarse_hi > s.full ? s.hi : sp->hi;
        rc = vmem__kv_cut_now(kv, slot, i, s.full, hi);
        vmem__kv_set_pinned(kv, slot, i, (struct kv_range){sp->lo, MIN(MAX(s.hi, sp->lo), sp->hi)});
    }
    return rc;
}

// Starts a newly allocated slot with `tokens` tokens of runs.found.
static int attach_pages(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_grow *l = &kv->grow;
    uint32_t stride;
    vmem__kv_wait_unmapping(kv);
    vmem__kv_grow_reset(l);
    int rc = keep_tail(kv, slot, tokens);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        struct kv_split s = vmem__kv_split(kv, &kv->groups[i], tokens);
        rc = vmem__kv_grow_to(kv, l, slot, i, s.full, s.hi, 0);
        for (uint32_t k = s.lo; k < s.full && !rc; k++) {
            const vmem_page *pages = vmem__kv_found_page(kv, i, tokens, k, &stride);
            rc = vmem__kv_grow_share(kv, l, slot, i, k, pages, stride);
        }
    }
    if (!rc && l->total) // else it only maps pages that are there
        rc = vmem__kv_claim_budget(kv, (int64_t)(l->total + vmem__kv_count_found(kv)), l->total);
    if (!rc)
        rc = vmem__kv_grow_make(kv, l, KV_TRIES);
    const bool mapped = !rc;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        struct kv_split s = vmem__kv_split(kv, &kv->groups[i], tokens);
        if (!s.part || s.full >= s.hi)
            continue;
        const vmem_page *pages = vmem__kv_found_page(kv, i, tokens, s.full, &stride);
        rc = vmem__kv_copy_pages(kv, &kv->groups[i], pages, stride, false, slot, s.full, s.part);
    }
    if (rc && mapped) {
        unmap_shared(kv, slot, tokens);
        vmem__kv_grow_undo(kv, l);
        kv->ledger.held -= l->total;
    }
    if (rc) {
        vmem__kv_update_pinned(kv, slot);
        vmem__kv_grow_reset(l);
        return rc;
    }
    commit_attach(kv, slot, tokens);
    return 0;
}

// The same, and pins the runs for the slot's request.
static int attach_found(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = 0;
    for (uint32_t k = 0; k < kv->runs.n_found && !rc; k++)
        rc = vmem__kv_pin(kv, slot, kv->runs.found[k]);
    vmem__kv_protect_found(kv, tokens); // so that making room evicts others
    if (!rc)
        rc = attach_pages(kv, slot, tokens);
    vmem__kv_unprotect_found(kv);
    if (rc)
        vmem__kv_unpin(kv, slot);
    return rc;
}

static int begin_with_runs(vmem_kv *kv, uint32_t slot, const uint64_t *runs, size_t n, uint32_t most, uint32_t flags,
                           uint32_t *tokens)
{
    int rc = tokens ? 0 : vmem__error(-EINVAL, "tokens must not be NULL");
    if (!rc)
        rc = vmem__check_flags(flags, VMEM_KV_LOOK);
    if (rc)
        return rc;
    *tokens = 0;
    if (flags)
        return vmem__kv_find_runs(kv, runs, n, most, tokens);
    vmem__kv_clear_shortage();
    rc = vmem__kv_use_slot(kv, slot, 1u << VMEM_KV_ACTIVE); // first: the worker may evict runs meanwhile
    if (!rc && (!kv->slots[slot].fresh || kv->slots[slot].tokens))
        rc = vmem__error(-EINVAL, "slot %u is not newly allocated: attach before its first step", slot);
    if (!rc)
        rc = vmem__kv_find_runs(kv, runs, n, most, tokens);
    if (rc || !*tokens)
        return rc;
    const bool counted = kv->runs.list[kv->runs.found[0]].report; // read now: the run may be evicted meanwhile
    rc = attach_found(kv, slot, *tokens);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    *tokens = rc ? 0 : *tokens;
    kv->stats.hit_tokens += counted ? *tokens : 0;
    return rc;
}

int vmem_kv_attach(vmem_kv *kv, uint32_t slot, const uint64_t *runs, size_t n, uint32_t most, uint32_t flags,
                   uint32_t *tokens)
{
    int rc = flags & VMEM_KV_LOOK ? vmem__kv_enter_step(kv) : vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, begin_with_runs(kv, slot, runs, n, most, flags, tokens));
}
