// Shortens requests. Rows that are about to be written again are copied first where others share them.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>

#include "kv/request/request.h"

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
    struct kv_ref *row = vmem__kv_row(kv, slot, group, page);
    if (!row) { // making room evicted the other holder
        vmem__kv_release(kv, l->pages, g->n);
        return 0;
    }
    rc = vmem__kv_copy_pages(kv, g, l->pages, 1, true, slot, page, kv->page_size);
    for (uint32_t t = 0; t < g->n; t++)
        l->maps[t] = (struct vmem_map_op){.addr = kv_addr(kv, g, slot, t, page), .page = l->pages[t]};
    if (!rc)
        rc = vMemMapBatch(kv->ctx, l->maps, g->n, VMEM_MAP_REPLACE | VMEM_MAP_FINE, NULL);
    if (rc) {
        vmem__kv_release(kv, l->pages, g->n);
        return rc;
    }
    const struct kv_span *sp = kv_span(kv, slot, group);
    const struct kv_range fixed = sp->fix;
    kv->ledger.held += g->n;
    vmem__kv_fix(kv, slot, group, (struct kv_range){sp->lo, sp->lo});
    vmem__kv_ref_hold(kv, row, (struct kv_holders){.slots = -1});
    for (uint32_t t = 0; t < g->n; t++)
        kv_table(kv, g, slot, t)[page] = l->pages[t];
    vmem__kv_fix(kv, slot, group, fixed);
    return 0;
}

// Whether the group's page that contains row `tokens` is shared and must be copied.
static bool cuts_shared(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_split s)
{
    return s.part && s.full < kv_span(kv, slot, group)->shared_hi && vmem__kv_row(kv, slot, group, s.full);
}

// Pages that are copied before rows from `tokens` on are written again.
static uint64_t pages_to_copy(const vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        pages += cuts_shared(kv, slot, i, kv_split(kv, &kv->groups[i], tokens)) ? kv->groups[i].n : 0;
    return pages;
}

// Before rows from `tokens` on are written again, the slot releases shared pages there, and keeps a copy of the rows
// before them.
static int copy_shared(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    // First do the work that can fail for want of memory. It copies whole pages, so a failure loses no data.
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_split s = kv_split(kv, &kv->groups[i], tokens);
        int rc = cuts_shared(kv, slot, i, s) ? replace(kv, slot, i, s.full) : 0;
        if (rc)
            return rc;
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_split s = kv_split(kv, &kv->groups[i], tokens);
        struct kv_span *sp = kv_span(kv, slot, i);
        if (s.full >= sp->shared_hi)
            continue;
        int rc = vmem__kv_cut_now(kv, slot, i, sp->lo, s.full + (s.part != 0));
        if (rc)
            return rc;
        sp->shared_hi = KV_MIN(sp->shared_hi, s.full);
    }
    return 0;
}

// ---- shorter requests ------------------------------------------------------------------------------------------------

static int check_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    int rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && tokens > kv->slots[slot].tokens)
        rc = vmem__error(-EINVAL, "tokens %u: slot %u has %u", tokens, slot, kv->slots[slot].tokens);
    // Whether the pages in front of keep.lo are still there depends on the background thread. No answer does.
    for (uint32_t i = 0; i < kv->n_groups && !rc; i++)
        if (vmem__kv_need_lo(kv, &kv->groups[i], tokens) < kv_span(kv, slot, i)->keep.lo)
            rc = vmem__error(-ENODATA, "tokens %u: the window has given up rows that the next token reads", tokens);
    return rc;
}

// By how many pages `fixed` grows while the slot is truncated with so many copies, and no kernel accesses it.
static int64_t truncation_delta(const vmem_kv *kv, uint32_t slot, uint64_t copies)
{
    int64_t delta = (int64_t)copies;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        delta += vmem__kv_fix_delta(kv, slot, i, kv_in_use(kv, slot, i, false));
    return delta;
}

static int would_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    const uint64_t copies = pages_to_copy(kv, slot, tokens);
    return vmem__kv_would_fit(kv, truncation_delta(kv, slot, copies), copies);
}

// All groups find room for their copies, or none does.
static int room_for_copies(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    const uint64_t copies = pages_to_copy(kv, slot, tokens);
    int rc = vmem__kv_lacks(kv, truncation_delta(kv, slot, copies), copies);
    if (rc)
        return rc;
    kv->slots[slot].fresh = true; // the caller guarantees that no kernel accesses the slot
    kv->slots[slot].steady = 0;
    vmem__kv_book(kv, slot);
    return vmem__kv_take_room(kv, copies);
}

static int truncate_now(vmem_kv *kv, uint32_t slot, uint32_t tokens)
{
    struct kv_slot *s = &kv->slots[slot];
    vmem__kv_enough();
    vmem__kv_wait_unmapping(kv);
    int rc = room_for_copies(kv, slot, tokens);
    if (!rc)
        rc = copy_shared(kv, slot, tokens);
    if (rc == -ENOMEM)
        vmem__kv_count_shortage(kv);
    if (rc)
        return rc;
    vmem__kv_forget(kv, slot);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        struct kv_span *sp = kv_span(kv, slot, i);
        const uint32_t hi = KV_MIN(vmem__kv_need_hi(kv, &kv->groups[i], tokens), sp->hi);
        sp->need = sp->keep = (struct kv_range){KV_MIN(vmem__kv_need_lo(kv, &kv->groups[i], tokens), hi), hi};
    }
    s->tokens = tokens;
    s->shared_tokens = KV_MIN(s->shared_tokens, tokens);
    vmem__kv_book(kv, slot);
    vmem__kv_pass_windows(kv, slot);
    return 0;
}

static int shorten(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t after, uint32_t flags)
{
    int rc = vmem__check_flags(flags, VMEM_KV_DRY);
    if (!rc)
        rc = check_truncate(kv, slot, tokens);
    if (!rc)
        rc = vmem__kv_check_fence(kv, after);
    if (rc)
        return rc;
    struct kv_slot *s = &kv->slots[slot];
    // Even if the slot is fresh, kernels may still be writing the shared rows attached to it.
    const bool shared = tokens < vmem__kv_shared_tokens(kv, slot);
    if (!after || after <= vmem__kv_ended(kv) || (s->fresh && !shared))
        return flags ? would_truncate(kv, slot, tokens) : truncate_now(kv, slot, tokens);
    if (shared)
        return vmem__error(-EBUSY,
                           "tokens %u: rows from there on are shared, and kernels of step %" PRIu64 " may be in flight",
                           tokens, after);
    if (flags)
        return 0;
    // Changes no mapping that running kernels use: the rows go after later steps no longer ask for them.
    s->tokens = tokens;
    s->steady = 0;
    return 0;
}

int vmem_kv_truncate(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t after, uint32_t flags)
{
    int rc = vmem__kv_enter(kv);
    return rc ? rc : vmem__kv_leave(kv, shorten(kv, slot, tokens, after, flags));
}
