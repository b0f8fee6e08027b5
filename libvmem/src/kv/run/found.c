// Runs that follow each other, for a request that begins with them.
//
// SPDX-License-Identifier: MIT
#include "kv/run/run.h"

// The pages of a group that contain the rows that the next token of a request of `tokens` tokens reads.
static struct kv_range rows_read(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens)
{
    const uint64_t bytes = KV_MIN(tokens, g->max_tokens) * g->row_bytes;
    const uint32_t lo = vmem__kv_need_lo(kv, g, tokens), hi = (uint32_t)((bytes + kv->page_size - 1) >> kv->page_shift);
    return (struct kv_range){lo, KV_MAX(lo, hi)};
}

// Of the runs found, the one with this row: its place in the list.
static uint32_t run_with(const vmem_kv *kv, uint32_t row)
{
    const struct kv_runs *all = &kv->runs;
    uint32_t lo = 0, hi = all->n_found;
    while (lo + 1 < hi) {
        const uint32_t middle = lo + (hi - lo) / 2;
        if (all->list[all->found[middle]].first <= row)
            lo = middle;
        else
            hi = middle;
    }
    return all->found[lo];
}

// Of a sequence of `tokens` tokens, the run that has the page with all rows that begin in it: the last one that has the
// page.
static uint32_t run_of(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens, uint32_t page)
{
    const uint64_t behind = (((uint64_t)page + 1) << kv->page_shift) + g->row_bytes - 1;
    return run_with(kv, (uint32_t)KV_MIN(behind / g->row_bytes, KV_MIN(tokens, g->max_tokens)) - 1);
}

// Whether a request that begins with `tokens` tokens of the runs found has all rows that its next token reads. Windows
// may have passed some of them.
static bool windows_allow(const vmem_kv *kv, uint32_t tokens)
{
    for (uint32_t i = 0; i < kv->n_groups && kv->windows; i++) {
        const struct kv_range rows = rows_read(kv, &kv->groups[i], tokens);
        for (uint32_t p = rows.lo; p < rows.hi; p++) {
            const struct kv_rows *has = &kv->runs.list[run_of(kv, &kv->groups[i], tokens, p)].rows[i];
            if (p < has->lo || p >= has->lo + has->n)
                return false;
        }
    }
    return true;
}

int vmem__kv_known(vmem_kv *kv, const uint64_t *runs, uint64_t n, uint32_t most, uint32_t *tokens)
{
    struct kv_runs *all = &kv->runs;
    *tokens = all->n_found = 0;
    int rc = n && !runs ? vmem__error(-EINVAL, "runs must not be NULL") : 0;
    for (uint64_t k = 0; k < n && !rc; k++)
        rc = vmem__kv_run_owned(all, runs[k], "", k);
    n = KV_MIN(n, kv->max_tokens); // a run has at least one token
    if (!rc)
        rc = vmem__kv_room_for(&all->found, &all->cap_found, n, sizeof(*all->found));
    for (uint64_t k = 0; k < n && !rc && *tokens < most; k++) {
        const uint32_t i = vmem__kv_run_find(all, runs[k]);
        if (i == KV_NO_RUN || all->list[i].first != *tokens)
            break;
        all->found[all->n_found++] = i;
        *tokens += all->list[i].tokens;
    }
    *tokens = KV_MIN(*tokens, most);
    while (*tokens && !windows_allow(kv, *tokens)) {
        *tokens = all->list[all->found[all->n_found - 1]].first;
        all->n_found--;
    }
    return rc;
}

const vmem_page *vmem__kv_found_page(const vmem_kv *kv, uint32_t group, uint32_t tokens, uint32_t page,
                                     uint32_t *stride)
{
    const struct kv_rows *r = &kv->runs.list[run_of(kv, &kv->groups[group], tokens, page)].rows[group];
    *stride = r->n;
    return r->pages + (page - r->lo);
}

void vmem__kv_hold_found(vmem_kv *kv, uint32_t tokens)
{
    struct kv_runs *all = &kv->runs;
    uint32_t n = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_range rows = rows_read(kv, &kv->groups[i], tokens);
        for (uint32_t p = rows.lo; p < rows.hi; p++)
            all->list[run_of(kv, &kv->groups[i], tokens, p)].held = true;
    }
    for (uint32_t k = 0; k < all->n_found; k++)
        if (all->list[all->found[k]].held)
            all->found[n++] = all->found[k];
    all->n_found = n;
}

void vmem__kv_let_found(vmem_kv *kv)
{
    for (uint32_t k = 0; k < kv->runs.n_found; k++)
        kv->runs.list[kv->runs.found[k]].held = false;
}

void vmem__kv_see_found(vmem_kv *kv)
{
    const struct kv_runs *all = &kv->runs;
    for (uint32_t k = 0; k < all->n_found; k++) {
        const struct kv_run *r = &all->list[all->found[k]];
        for (uint32_t i = 0; i < kv->n_groups && r->held; i++)
            for (uint32_t p = 0; p < r->rows[i].n; p++) {
                struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, r->rows[i].pages[p]);
                ref->mark = kv->mark;
                ref->seen = kv->n_slots;
            }
    }
}

// Pages of a group that could be evicted if the runs found were not held, and that the request does not map.
static uint64_t only_held(const vmem_kv *kv, uint32_t group, uint32_t tokens)
{
    const struct kv_runs *all = &kv->runs;
    const struct kv_group *g = &kv->groups[group];
    const struct kv_split s = kv_split(kv, g, tokens);
    struct kv_rows next = {0};
    uint64_t pages = 0;
    for (uint32_t k = all->n_found; k--;) {
        const struct kv_rows r = all->list[all->found[k]].rows[group];
        for (uint32_t p = r.lo; p < r.lo + r.n; p++) {
            const vmem_page page = r.pages[p - r.lo];
            if (p >= next.lo && p < next.lo + next.n) {
                if (next.pages[p - next.lo] == page) // counted with the next run
                    continue;
            } else if (p >= s.lo && p < s.full) { // the request maps it
                continue;
            }
            const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, page);
            pages += kv_row_evictable(ref) && ref->mark != kv->mark ? g->n : 0;
        }
        next = r;
    }
    return pages;
}

uint64_t vmem__kv_taken(vmem_kv *kv, uint32_t tokens, uint64_t *beside)
{
    uint64_t pages = 0;
    *beside = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_split s = kv_split(kv, g, tokens);
        uint32_t stride;
        for (uint32_t p = s.lo; p < s.full; p++) {
            struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, *vmem__kv_found_page(kv, i, tokens, p, &stride));
            if (!kv_row_evictable(ref) || ref->mark == kv->mark)
                continue;
            pages += g->n;
            ref->mark = kv->mark;
        }
        *beside += only_held(kv, i, tokens);
    }
    return pages;
}
