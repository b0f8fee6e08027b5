// The life of a request: begins with a slot, is shortened, goes to CPU memory and comes back, ends.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/kv.h"

// ---- begins ---------------------------------------------------------------------------------------------------------

static int begin_request(vmem_kv *kv, uint32_t slot)
{
    if (slot >= kv->n_slots)
        return vmem__error(-EINVAL, "slot %u is out of range: the cache has %u slots", slot, kv->n_slots);
    struct kv_slot *s = &kv->slots[slot];
    if (s->state != VMEM_KV_FREE)
        return vmem__error(-EBUSY, "slot %u is taken", slot);
    vmem__kv_wait_slot(kv, slot);
    s->tokens = s->shared_tokens = 0;
    s->fresh = true;
    vmem__kv_set_state(kv, slot, VMEM_KV_ACTIVE);
    s->skip = s->stuck = false;
    s->last_step = (uint32_t)kv->fence.step;
    kv->stats.allocs++;
    kv->stats.adopted_slots += s->backed > 0;
    vmem__kv_worker_wake(kv); // it prepares the next slot
    return 0;
}

static int alloc_slot(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot)
{
    struct vmem_kv_alloc_options o = {0};
    if (!slot)
        return vmem__error(-EINVAL, "slot must not be NULL");
    int rc = options ? vmem__struct_take(&o, sizeof o, sizeof o, options, "options") : 0;
    if (!rc)
        rc = vmem__check_flags(o.flags, VMEM_KV_ALLOC_SLOT);
    if (rc)
        return rc;
    if (o.tokens > kv->max_tokens || o.prefix_tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "%s %u is over max_tokens, %u",
                           o.tokens > kv->max_tokens ? "tokens" : "prefix_tokens", MAX(o.tokens, o.prefix_tokens),
                           kv->max_tokens);
    if (!(o.flags & VMEM_KV_ALLOC_SLOT)) {
        o.slot = vmem__kv_choose_slot(kv, o.tokens, o.prefix_tokens);
        if (o.slot == KV_NO_SLOT) {
            kv->stats.short_slots++;
            return vmem__kv_short_of_slots(kv);
        }
    }
    rc = begin_request(kv, o.slot);
    if (!rc)
        *slot = o.slot;
    return rc;
}

int vmem_kv_alloc(vmem_kv *kv, const struct vmem_kv_alloc_options *options, uint32_t *slot)
{
    int rc = vmem__kv_enter_step(kv);
    return rc ? rc : vmem__kv_leave(kv, alloc_slot(kv, options, slot));
}

// ---- ends -----------------------------------------------------------------------------------------------------------

static int end_now(vmem_kv *kv, uint32_t slot)
{
    int rc = 0;
    struct kv_slot *s = &kv->slots[slot];
    const bool fresh = s->fresh;
    vmem__kv_shared_tokens(kv, slot);
    s->fresh = true;
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        rc = kv->flags & VMEM_KV_DEFER ? vmem__kv_park(kv, slot, i) : vmem__kv_cut_now(kv, slot, i, 0, 0);
    if (rc) {
        s->fresh = fresh;
        return rc;
    }
    vmem__kv_clear_history(kv, slot);
    if (kv->runs.pins[slot].n)
        vmem__kv_unpin(kv, slot);
    vmem__kv_set_state(kv, slot, VMEM_KV_FREE);
    s->tokens = s->shared_tokens = 0;
    s->skip = s->stuck = false;
    kv->idle[slot].freed_seq = ++kv->clock;
    vmem__kv_release_soon(kv); // this also wakes the worker, which prepares for the next request
    return 0;
}

static int end_after(vmem_kv *kv, uint32_t slot, uint64_t step)
{
    if (step <= vmem__kv_last_ended_step(kv) || kv->slots[slot].fresh)
        return end_now(kv, slot);
    kv->idle[slot].ends = step;
    vmem__kv_set_state(kv, slot, KV_ENDING);
    return 0;
}

int vmem_kv_free(vmem_kv *kv, uint32_t slot, uint64_t after)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_use_slot(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED);
    if (!rc)
        rc = vmem__kv_check_fence(kv, after);
    if (!rc)
        rc = after ? end_after(kv, slot, after) : end_now(kv, slot);
    if (!rc)
        vmem__kv_shrink_to_budget(kv);
    return vmem__kv_leave(kv, rc);
}

int vmem__kv_end_requests(vmem_kv *kv, uint64_t step)
{
    int rc = 0;
    kv->fence.retired = MAX(kv->fence.retired, step);
    for (uint32_t s = 0; s < kv->n_slots && kv->in_state[KV_ENDING]; s++) {
        if (kv->slots[s].state != KV_ENDING || kv->idle[s].ends > kv->fence.retired)
            continue;
        vmem__kv_wait_slot(kv, s);
        const int failed = end_now(kv, s);
        rc = rc ? rc : failed;
    }
    return rc;
}

int vmem_kv_retire(vmem_kv *kv, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_check_fence(kv, step);
    if (!rc) {
        rc = vmem__kv_end_requests(kv, MAX(vmem__kv_last_ended_step(kv), step));
        vmem__kv_shrink_to_budget(kv);
    }
    return vmem__kv_leave(kv, rc);
}

// ---- copy before write -----------------------------------------------------------------------------------------------

// Replaces page `page` of every tensor with a copy.
static int replace(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    const struct kv_group *g = &kv->groups[group];
    struct kv_grow *l = &kv->grow;
    int rc = vmem__kv_room_for(&l->pages, &l->cap_pages, g->n, sizeof(*l->pages));
    if (!rc)
        rc = vmem__kv_room_for(&l->maps, &l->cap_maps, g->n, sizeof(*l->maps));
    if (rc)
        return rc;
    rc = vMemCreate(kv->ctx, kv->page_size, g->n, kv->create_flags, l->pages);
    if (rc == -ENOMEM && !vmem__kv_make_device_room(kv, g->n))
        rc = vMemCreate(kv->ctx, kv->page_size, g->n, kv->create_flags, l->pages);
    if (rc)
        return rc;
    struct kv_shared_row *row = vmem__kv_row(kv, slot, group, page);
    if (!row) { // making room evicted the other holder
        vmem_drop(kv->ctx, l->pages, g->n);
        return 0;
    }
    rc = vmem__kv_copy_pages(kv, g, l->pages, 1, true, slot, page, kv->page_size);
    for (uint32_t t = 0; t < g->n; t++)
        l->maps[t] = (struct vmem_map_op){.addr = kv_addr(kv, g, slot, t, page), .page = l->pages[t]};
    if (!rc)
        rc = vMemMapBatch(kv->ctx, l->maps, g->n, VMEM_MAP_REPLACE | VMEM_MAP_FINE, NULL);
    if (rc) {
        vmem_drop(kv->ctx, l->pages, g->n);
        return rc;
    }
    const struct kv_span *sp = kv_span(kv, slot, group);
    const struct kv_range pinned = sp->pinned;
    kv->ledger.held += g->n;
    vmem__kv_set_pinned(kv, slot, group, (struct kv_range){sp->lo, sp->lo});
    vmem__kv_change_holders(kv, row, (struct kv_holders){.slots = -1});
    for (uint32_t t = 0; t < g->n; t++)
        kv_table(kv, g, slot, t)[page] = l->pages[t];
    vmem__kv_set_pinned(kv, slot, group, pinned);
    return 0;
}

// True if the group's page that contains row `tokens` is shared and must be copied.
static bool cuts_shared(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_split s)
{
    return s.part && s.full < kv_span(kv, slot, group)->shared_hi && vmem__kv_row(kv, slot, group, s.full);
}

// Pages that are copied before rows from `tokens` on are written again.
static uint64_t pages_to_copy(const vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        pages += cuts_shared(kv, slot, i, vmem__kv_split(kv, &kv->groups[i], tokens)) ? kv->groups[i].n : 0;
    return pages;
}

// Before rows from `tokens` on are written again, the slot releases shared pages there, and keeps a copy of the rows
// before them.
static int copy_shared(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    // First do the work that can fail for want of memory. It copies whole pages, so a failure loses no data.
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_split s = vmem__kv_split(kv, &kv->groups[i], tokens);
        int rc = cuts_shared(kv, slot, i, s) ? replace(kv, slot, i, s.full) : 0;
        if (rc)
            return rc;
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_split s = vmem__kv_split(kv, &kv->groups[i], tokens);
        struct kv_span *sp = kv_span(kv, slot, i);
        if (s.full >= sp->shared_hi)
            continue;
        int rc = vmem__kv_cut_now(kv, slot, i, sp->lo, s.full + (s.part != 0));
        if (rc)
            return rc;
        sp->shared_hi = MIN(sp->shared_hi, s.full);
    }
    return 0;
}

// ---- shorter requests ------------------------------------------------------------------------------------------------

static int check_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = vmem__kv_use_slot(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && tokens > kv->slots[slot].tokens)
        rc = vmem__error(-EINVAL, "tokens %u is over the %u that slot %u has", tokens, kv->slots[slot].tokens, slot);
    // The background thread may have cut the pages in front of in_flight.lo or not. No answer depends on it.
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        if (vmem__kv_need_lo(kv, &kv->groups[i], tokens) < kv_span(kv, slot, i)->in_flight.lo)
            rc = vmem__error(-ENODATA, "tokens %u: the window has given up rows that the next token reads", tokens);
    return rc;
}

// The number of pages that become pinned while the slot is truncated with so many copies, and no kernel accesses it.
static int64_t truncation_delta(const vmem_kv *kv, uint32_t slot, uint64_t copies)
{
    int64_t delta = (int64_t)copies;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        delta += vmem__kv_pinned_delta(kv, slot, i, kv_in_use(kv, slot, i, false));
    return delta;
}

// Makes room for the copies of all groups, or fails.
static int room_for_copies(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    const uint64_t copies = pages_to_copy(kv, slot, tokens);
    int rc = vmem__kv_claim_budget(kv, truncation_delta(kv, slot, copies), copies);
    if (rc)
        return rc;
    kv->slots[slot].fresh = true; // the caller guarantees that no kernel accesses the slot
    kv->slots[slot].same_pages_until = 0;
    vmem__kv_update_pinned(kv, slot);
    return vmem__kv_make_room(kv, copies);
}

static int truncate_now(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *s = &kv->slots[slot];
    vmem__kv_clear_shortage();
    vmem__kv_wait_unmapping(kv);
    int rc = room_for_copies(kv, slot, tokens);
    if (!rc)
        rc = copy_shared(kv, slot, tokens);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    if (rc)
        return rc;
    vmem__kv_clear_history(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        const uint32_t hi = MIN(vmem__kv_need_hi(kv, &kv->groups[i], tokens), sp->hi);
        sp->step = sp->in_flight = (struct kv_range){MIN(vmem__kv_need_lo(kv, &kv->groups[i], tokens), hi), hi};
    }
    s->tokens = tokens;
    s->shared_tokens = MIN(s->shared_tokens, tokens);
    vmem__kv_update_pinned(kv, slot);
    vmem__kv_pass_windows(kv, slot);
    return 0;
}

static int shorten(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t after)
{
    int rc = check_truncate(kv, slot, tokens);
    if (!rc)
        rc = vmem__kv_check_fence(kv, after);
    if (rc)
        return rc;
    struct kv_slot *s = &kv->slots[slot];
    // Even if the slot is fresh, kernels may still be writing the shared rows attached to it.
    const bool shared = tokens < vmem__kv_shared_tokens(kv, slot);
    if (!after || after <= vmem__kv_last_ended_step(kv) || (s->fresh && !shared))
        return truncate_now(kv, slot, tokens);
    if (shared)
        return vmem__error(-EBUSY,
                           "tokens %u: rows from there on are shared, and kernels of step %" PRIu64 " may be in flight",
                           tokens, after);
    // Changes no mapping that running kernels use: the rows go after later steps no longer ask for them.
    s->tokens = tokens;
    s->same_pages_until = 0;
    return 0;
}

int vmem_kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t after)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, shorten(kv, slot, tokens, after));
}

// ---- swapping -------------------------------------------------------------------------------------------------------

static int swap_out(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step)
{
    struct kv_slot *s = &kv->slots[slot];
    int rc = vmem__kv_check_fence(kv, step);
    if (!rc)
        rc = vmem__kv_use_slot(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (rc)
        return rc;
    if (!s->tokens)
        return vmem__error(-EINVAL, "slot %u has no tokens", slot);
    if (s->tokens != tokens || kv_absent(kv, slot) < kv->fence.step - step)
        return vmem__error(
            -EBUSY, "slot %u: its %u rows were copied too early: it has %u tokens, and steps since step %" PRIu64, slot,
            tokens, s->tokens, step);
    s->fresh = true; // the caller guarantees that no kernel accesses the slot
    vmem__kv_set_state(kv, slot, VMEM_KV_SWAPPED);
    s->shared_tokens = 0;
    kv->idle[slot].freed_seq = 0; // its pages are the first to be taken back
    vmem__kv_clear_history(kv, slot);
    vmem__kv_cut_slot(kv, slot); // if this fails, the pages are taken back when they are needed
    return 0;
}

int vmem_kv_swap_out(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_worker_pause(kv); // it takes pages from swapped-out slots first
    rc = swap_out(kv, slot, tokens, step);
    vmem__kv_worker_resume(kv);
    return vmem__kv_leave(kv, rc);
}

static int swap_in(vmem_kv *kv, uint32_t slot)
{
    struct kv_slot *s = &kv->slots[slot];
    int rc = vmem__kv_cut_slot(kv, slot); // unmap the pages that swap_out may have left
    vmem__kv_grow_reset(&kv->grow);
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++) {
        const struct kv_group *g = &kv->groups[i];
        const uint32_t hi = vmem__kv_need_hi(kv, g, s->tokens);
        rc = vmem__kv_grow_to(kv, &kv->grow, slot, i, vmem__kv_need_lo(kv, g, s->tokens), hi, hi);
    }
    if (!rc)
        rc = vmem__kv_claim_budget(kv, (int64_t)kv->grow.total, kv->grow.total);
    if (!rc)
        rc = vmem__kv_grow_all(kv, &kv->grow, KV_TRIES);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        sp->step = sp->in_flight = (struct kv_range){sp->lo, sp->hi};
    }
    s->fresh = true;
    vmem__kv_set_state(kv, slot, VMEM_KV_ACTIVE);
    s->last_step = (uint32_t)kv->fence.step;
    return 0;
}

int vmem_kv_swap_in(vmem_kv *kv, uint32_t slot)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_clear_shortage();
    vmem__kv_worker_pause(kv);
    rc = vmem__kv_use_slot(kv, slot, 1u << VMEM_KV_SWAPPED);
    if (!rc)
        rc = swap_in(kv, slot);
    vmem__kv_worker_resume(kv);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    return vmem__kv_leave(kv, rc);
}
