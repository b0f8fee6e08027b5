// Runs: rows of a request whose pages stay after the request has ended, so that others can begin with them.
//
// A run holds the pages that contain its rows, in all tensors of the slot that wrote them. Neighbouring runs share the
// page between them. A caller that attaches a run states that the new request's rows before the run are the same, too.
// So the rows that the run's first page contains before its own are valid, and a request can begin with pages of runs
// that several slots wrote.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv.h"

// ---- the order of eviction ------------------------------------------------------------------------------------------
//
// The list has the runs that no running request pins, in the order in which their last request ended. A request pins the
// runs that it began with or wrote. When it ends, its runs enter the list from the last to the first, so that the end
// of its sequence, which fewer requests can use, is evicted first. Runs with `keep` are in no list, so that none of them
// is evicted.

static int check_owned(const struct kv_runs *runs, uint64_t id, const char *name, size_t i)
{
    if (!id || id >> KV_RUN_TAG == runs->tag)
        return 0;
    return vmem__error(-EINVAL, "runs[%zu]%s %#" PRIx64 " is no run of this cache", i, name, id);
}

int vmem__kv_check_ids(const struct kv_runs *runs, const uint64_t *ids, uint64_t n)
{
    int rc = n && !ids ? vmem__error(-EINVAL, "runs must not be NULL") : 0;
    for (uint64_t i = 0; i < n && !rc; i++)
        rc = check_owned(runs, ids[i], "", i);
    return rc;
}

// The place of the run with this number; KV_NO_RUN: there is none, or none any more.
static uint32_t find_run(const struct kv_runs *runs, uint64_t id)
{
    const uint32_t i = kv_run_place(id);
    return id && i < runs->used && runs->list[i].id == id ? (uint32_t)i : KV_NO_RUN;
}

static void unlink_run(struct kv_runs *runs, uint32_t run)
{
    const struct kv_run *r = &runs->list[run];
    if (r->keep)
        return;
    *(r->newer == KV_NO_RUN ? &runs->newest : &runs->list[r->newer].older) = r->older;
    *(r->older == KV_NO_RUN ? &runs->oldest : &runs->list[r->older].newer) = r->newer;
}

// Lists a run as the newest.
static void link_run(struct kv_runs *runs, uint32_t run)
{
    struct kv_run *r = &runs->list[run];
    if (r->keep)
        return;
    r->newer = KV_NO_RUN;
    r->older = runs->newest;
    *(runs->newest == KV_NO_RUN ? &runs->oldest : &runs->list[runs->newest].newer) = run;
    runs->newest = run;
}

// ---- pins ------------------------------------------------------------------------------------------------------------

static void unpin_run(struct kv_runs *runs, const struct kv_pin *pin)
{
    const uint32_t i = find_run(runs, pin->id);
    if (i != KV_NO_RUN && !--runs->list[i].pins)
        link_run(runs, i);
}

static int room_for_pins(vmem_kv *kv, uint32_t slot, uint64_t n)
{
    struct kv_pins *p = &kv->runs.pins[slot];
    return vmem__kv_room_for(&p->list, &p->cap, p->n + n, sizeof(*p->list));
}

int vmem__kv_pin(vmem_kv *kv, uint32_t slot, uint32_t run)
{
    struct kv_runs *runs = &kv->runs;
    struct kv_run *r = &runs->list[run];
    struct kv_pins *p = &runs->pins[slot];
    int rc = room_for_pins(kv, slot, 1);
    uint64_t at = p->n; // in the order of rows: nearly always the last
    while (!rc && at && p->list[at - 1].first > r->first)
        at--;
    const bool same = at && p->list[at - 1].first == r->first; // another run of these rows, or this one
    if (rc || (same && p->list[at - 1].id == r->id))
        return rc;
    if (!r->pins++)
        unlink_run(runs, run);
    if (same) {
        unpin_run(runs, &p->list[--at]);
    } else {
        memmove(p->list + at + 1, p->list + at, (p->n - at) * sizeof(*p->list));
        p->n++;
    }
    p->list[at] = (struct kv_pin){r->id, r->first};
    return 0;
}

void vmem__kv_unpin(vmem_kv *kv, uint32_t slot)
{
    struct kv_runs *runs = &kv->runs;
    struct kv_pins *p = &runs->pins[slot];
    while (p->n)
        unpin_run(runs, &p->list[--p->n]);
}

// The number of pages of these rows in all groups.
static uint64_t num_pages(const vmem_kv *kv, const struct kv_rows *rows)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        pages += (uint64_t)rows[i].n * kv->groups[i].n;
    return pages;
}

// ---- sharing ---------------------------------------------------------------------------------------------------------

// The run's rows, without those before in_flight.lo. The background thread or a step may cut these off at any time, so
// what is shared would depend on the time, and would differ between ranks.
static struct kv_rows rows_of(const vmem_kv *kv, const struct vmem_kv_run *run, uint32_t group)
{
    const struct kv_group *g = &kv->groups[group];
    const uint64_t from = MIN((uint64_t)run->first, g->max_tokens);
    const uint64_t to = MIN((uint64_t)run->first + run->tokens, g->max_tokens);
    const uint32_t lo =
        MAX((uint32_t)(from * g->row_bytes >> kv->page_shift), kv_span(kv, run->slot, group)->in_flight.lo);
    const uint32_t hi = (uint32_t)kv_ceil_pages(to * g->row_bytes, kv);
    return from < to && lo < hi ? (struct kv_rows){.lo = lo, .n = hi - lo} : (struct kv_rows){0};
}

// Lists the run's rows, with room for their pages. NULL: windows have passed all of them.
static int rows_new(const vmem_kv *kv, const struct vmem_kv_run *run, struct kv_rows **out)
{
    uint64_t n_pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        n_pages += (uint64_t)rows_of(kv, run, i).n * kv->groups[i].n;
    *out = NULL;
    if (!n_pages)
        return 0;
    struct kv_rows *rows = malloc(kv->n_groups * sizeof(*rows) + n_pages * sizeof(*rows->pages));
    if (!rows)
        return vmem__error(-ENOMEM, "no memory for a list of %" PRIu64 " pages", n_pages);
    vmem_page *pages = (vmem_page *)(rows + kv->n_groups);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        rows[i] = rows_of(kv, run, i);
        rows[i].pages = pages;
        pages += (uint64_t)rows[i].n * kv->groups[i].n;
    }
    *out = rows;
    return 0;
}

static int check_run(vmem_kv *kv, const struct vmem_kv_run *run, size_t i)
{
    if (!run->tokens || (uint64_t)run->first + run->tokens > kv->slots[run->slot].tokens)
        return vmem__error(-EINVAL, "runs[%zu]: %u rows from row %u on: slot %u has %u tokens", i, run->tokens,
                           run->first, run->slot, kv->slots[run->slot].tokens);
    if (run->keep > 1)
        return vmem__error(-EINVAL, "runs[%zu].keep %u is neither 0 nor 1", i, run->keep);
    const int rc = check_owned(&kv->runs, run->id, ".id", i);
    if (rc)
        return rc;
    const uint32_t at = find_run(&kv->runs, run->id);
    const struct kv_run *old = at == KV_NO_RUN ? NULL : &kv->runs.list[at];
    if (old && (old->first != run->first || old->tokens != run->tokens))
        return vmem__error(-EINVAL, "runs[%zu].id is of %u rows from row %u on", i, old->tokens, old->first);
    return 0;
}

// Allocates all memory that sharing needs.
static int prepare_runs(vmem_kv *kv, const struct vmem_kv_run *runs, size_t n, struct kv_rows **made)
{
    struct kv_runs *all = &kv->runs;
    struct kv_doomed *d = &kv->doomed;
    uint64_t fresh = 0, pages = 0;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = room_for_pins(kv, runs[i].slot, n);
        if (rc || find_run(all, runs[i].id) != KV_NO_RUN)
            continue;
        rc = rows_new(kv, &runs[i], &made[i]);
        if (!made[i])
            continue;
        pages += num_pages(kv, made[i]);
        fresh++;
    }
    if (!rc && fresh + all->used > KV_RUNS_MAX)
        rc = vmem__error(-ENOMEM, "the cache has %u runs, the most that it can have", all->used);
    if (!rc)
        rc = vmem__kv_room_for(&all->list, &all->cap, all->used + fresh, sizeof(*all->list));
    if (!rc) // so that a run that is dropped or evicted needs no memory
        rc = vmem__kv_room_for(&d->pages, &d->cap, d->n + all->pages + pages, sizeof(*d->pages));
    if (!rc)
        rc = vmem__kv_room_for(&all->gone, &all->cap_gone, all->n_gone + all->n + fresh, sizeof(*all->gone));
    return rc ? rc : vmem__kv_shared_reserve(&kv->shared, pages);
}

// Makes the run hold the slot's rows. The lists and the table of shared rows have room.
static uint32_t make_run(vmem_kv *kv, const struct vmem_kv_run *run, struct kv_rows *rows, bool report)
{
    struct kv_runs *all = &kv->runs;
    const uint32_t i = all->unused == KV_NO_RUN ? all->used : all->unused;
    struct kv_run *r = &all->list[i];
    if (i == all->used)
        all->used++;
    else
        all->unused = r->next;
    *r = (struct kv_run){.id = kv_run_id(all->tag, ++all->generation, i),
                         .first = run->first,
                         .tokens = run->tokens,
                         .keep = run->keep,
                         .report = report,
                         .rows = rows};
    all->n++;
    all->pages += num_pages(kv, rows);
    all->reported += report;
    link_run(all, i);
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_group *g = &kv->groups[j];
        struct kv_span *sp = kv_span(kv, run->slot, j);
        const struct kv_rows *at = &rows[j];
        for (uint32_t t = 0; t < g->n; t++)
            memcpy(at->pages + (uint64_t)t * at->n, kv_table(kv, g, run->slot, t) + at->lo, at->n * sizeof(*at->pages));
        for (uint32_t k = 0; k < at->n; k++) {
            struct kv_shared_row *ref = vmem__kv_row_get(kv, run->slot, j, at->lo + k);
            vmem__kv_change_holders(kv, ref, (struct kv_holders){.runs = 1, .evictable_runs = !r->keep});
        }
        if (at->n)
            sp->shared_hi = MAX(sp->shared_hi, at->lo + at->n);
    }
    kv->slots[run->slot].shared_tokens = MAX(kv->slots[run->slot].shared_tokens, run->first + run->tokens);
    return i;
}

int vmem__kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags)
{
    int rc = n && !runs ? vmem__error(-EINVAL, "runs must not be NULL") : 0;
    for (size_t i = 0; i < n && !rc; i++)
        rc = vmem__kv_check_slot(kv, runs[i].slot, 1u << VMEM_KV_ACTIVE);
    if (!rc)
        rc = vmem__check_flags(flags, VMEM_KV_RUN_REPORT);
    for (size_t i = 0; i < n && !rc; i++)
        rc = check_run(kv, &runs[i], i);
    if (rc || !n)
        return rc;
    struct kv_rows **made = calloc(n, sizeof(struct kv_rows *));
    rc = made ? prepare_runs(kv, runs, n, made) : vmem__error(-ENOMEM, "no memory for %zu runs", n);
    for (size_t i = 0; i < n && made; i++) {
        if (rc) {
            free(made[i]);
            continue;
        }
        uint32_t at = find_run(&kv->runs, runs[i].id);
        if (made[i])
            at = make_run(kv, &runs[i], made[i], flags & VMEM_KV_RUN_REPORT);
        runs[i].id = at == KV_NO_RUN ? 0 : kv->runs.list[at].id;
        if (at != KV_NO_RUN)
            vmem__kv_pin(kv, runs[i].slot, at); // cannot fail: there is room
    }
    free(made);
    return rc;
}

// ---- questions ----------------------------------------------------------------------------------------------------

int vmem__kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got)
{
    struct kv_runs *all = &kv->runs;
    if (!got || (n && !runs))
        return vmem__error(-EINVAL, "got must not be NULL, nor runs unless n is 0");
    *got = MIN(n, all->n_gone);
    if (*got)
        memcpy(runs, all->gone, *got * sizeof(*runs));
    all->n_gone -= *got;
    if (all->n_gone)
        memmove(all->gone, all->gone + *got, all->n_gone * sizeof(*runs));
    return 0;
}

// The smallest number of tokens for which the run has all rows that the next token reads.
static uint32_t least_tokens(const vmem_kv *kv, const struct kv_run *r)
{
    const uint64_t none = (uint64_t)r->first + r->tokens + 1;
    uint64_t least = r->first;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_rows *has = &r->rows[i];
        const uint64_t bytes = MIN((uint64_t)r->first + r->tokens, g->max_tokens) * g->row_bytes;
        const uint64_t from = has->n ? (uint64_t)has->lo << kv->page_shift : kv_ceil_pages(bytes, kv) << kv->page_shift;
        const uint64_t tiles = (from + g->row_bytes * kv->tile_rows - 1) / (g->row_bytes * kv->tile_rows);
        const uint64_t tokens = from ? tiles * kv->tile_rows + g->window : 0;
        least = MAX(least, from && (!g->window || tokens > g->max_tokens) ? none : tokens);
    }
    return (uint32_t)MIN(least, none);
}

int vmem__kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out)
{
    const uint32_t i = find_run(&kv->runs, run);
    if (i == KV_NO_RUN)
        return vmem__error(-EINVAL, "this cache has no run %#" PRIx64 ": it was dropped or evicted, or is another's",
                           run);
    const struct kv_run *r = &kv->runs.list[i];
    struct vmem_kv_run_info info = {.first = r->first,
                                    .tokens = r->tokens,
                                    .min_tokens = least_tokens(kv, r),
                                    .keep = r->keep,
                                    .requests = r->pins,
                                    .pages = num_pages(kv, r->rows)};
    for (uint32_t j = 0; j < kv->n_groups; j++)
        for (uint32_t k = 0; k < r->rows[j].n; k++) {
            const struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, r->rows[j].pages[k]);
            info.own_pages += !ref->slots && ref->runs == 1 ? ref->n : 0;
        }
    return vmem__struct_give(out, &info, sizeof info, "out");
}

void vmem__kv_runs_free(vmem_kv *kv)
{
    for (uint32_t s = 0; s < kv->n_slots && kv->runs.pins; s++)
        free(kv->runs.pins[s].list);
    free(kv->runs.pins);
    free(kv->runs.list);
    free(kv->runs.gone);
    free(kv->runs.found);
}

// ---- runs that a request begins with --------------------------------------------------------------------------------

// The pages of a group that contain the rows that the next token of a request of `tokens` tokens reads.
static struct kv_range rows_read(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens)
{
    const uint64_t bytes = MIN(tokens, g->max_tokens) * g->row_bytes;
    const uint32_t lo = vmem__kv_need_lo(kv, g, tokens), hi = (uint32_t)kv_ceil_pages(bytes, kv);
    return (struct kv_range){lo, MAX(lo, hi)};
}

// The place, in the list, of that run of runs.found which has this row.
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

// The found run from which a request of `tokens` tokens takes page `page`: the last run with the page, whose copy of it
// has all rows that begin in the page.
static uint32_t run_of(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens, uint32_t page)
{
    const uint64_t behind = (((uint64_t)page + 1) << kv->page_shift) + g->row_bytes - 1;
    return run_with(kv, (uint32_t)MIN(behind / g->row_bytes, MIN(tokens, g->max_tokens)) - 1);
}

// True if a request that begins with `tokens` tokens of the runs found has all rows that its next token reads. Windows
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

int vmem__kv_find_runs(vmem_kv *kv, const uint64_t *runs, uint64_t n, uint32_t most, uint32_t *tokens)
{
    struct kv_runs *all = &kv->runs;
    *tokens = all->n_found = 0;
    int rc = vmem__kv_check_ids(all, runs, n);
    n = MIN(n, kv->max_tokens); // a run has at least one token
    if (!rc)
        rc = vmem__kv_room_for(&all->found, &all->cap_found, n, sizeof(*all->found));
    for (uint64_t k = 0; k < n && !rc && *tokens < most; k++) {
        const uint32_t i = find_run(all, runs[k]);
        if (i == KV_NO_RUN || all->list[i].first != *tokens)
            break;
        all->found[all->n_found++] = i;
        *tokens += all->list[i].tokens;
    }
    *tokens = MIN(*tokens, most);
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

void vmem__kv_protect_found(vmem_kv *kv, uint32_t tokens)
{
    struct kv_runs *all = &kv->runs;
    uint32_t n = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_range rows = rows_read(kv, &kv->groups[i], tokens);
        for (uint32_t p = rows.lo; p < rows.hi; p++)
            all->list[run_of(kv, &kv->groups[i], tokens, p)].is_protected = true;
    }
    for (uint32_t k = 0; k < all->n_found; k++)
        if (all->list[all->found[k]].is_protected)
            all->found[n++] = all->found[k];
    all->n_found = n;
}

void vmem__kv_unprotect_found(vmem_kv *kv)
{
    for (uint32_t k = 0; k < kv->runs.n_found; k++)
        kv->runs.list[kv->runs.found[k]].is_protected = false;
}

void vmem__kv_mark_found(vmem_kv *kv)
{
    const struct kv_runs *all = &kv->runs;
    for (uint32_t k = 0; k < all->n_found; k++) {
        const struct kv_run *r = &all->list[all->found[k]];
        for (uint32_t i = 0; i < kv->n_groups && r->is_protected; i++)
            for (uint32_t p = 0; p < r->rows[i].n; p++) {
                struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, r->rows[i].pages[p]);
                ref->mark = kv->mark;
                ref->seen = kv->n_slots;
            }
    }
}

uint64_t vmem__kv_count_found(vmem_kv *kv)
{
    const struct kv_runs *all = &kv->runs;
    uint64_t pages = 0;
    kv->mark++;
    for (uint32_t k = 0; k < all->n_found; k++)
        for (uint32_t i = 0; i < kv->n_groups; i++) {
            const struct kv_rows *r = &all->list[all->found[k]].rows[i];
            for (uint32_t p = 0; p < r->n; p++) {
                struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, r->pages[p]);
                pages += kv_row_evictable(ref) && kv_row_see(kv, ref) == 1 ? kv->groups[i].n : 0;
            }
        }
    return pages;
}

// ---- dropping -------------------------------------------------------------------------------------------------------

// Runs are dropped by name or in their order. Pages that no run or slot has any more are doomed: the call or the
// background thread releases them.

// True if dropping the run, and the runs that share a page with it, frees a page.
static bool frees_pages(const vmem_kv *kv, const struct kv_run *r)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < r->rows[i].n; k++)
            if (kv_row_evictable(vmem__kv_shared_find(&kv->shared, r->rows[i].pages[k])))
                return true;
    return false;
}

// Removes the run, and dooms its pages without another holder. vmem__kv_share made room for them in the list.
static void drop_run(vmem_kv *kv, uint32_t i)
{
    struct kv_runs *all = &kv->runs;
    struct kv_doomed *d = &kv->doomed;
    struct kv_run *run = &all->list[i];
    all->pages -= num_pages(kv, run->rows);
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_rows *r = &run->rows[j];
        for (uint32_t k = 0; k < r->n; k++) {
            struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, r->pages[k]);
            for (uint32_t t = 0; t < kv->groups[j].n && !ref->slots && ref->runs == 1; t++)
                d->pages[d->n++] = r->pages[(uint64_t)t * r->n + k];
            vmem__kv_change_holders(kv, ref, (struct kv_holders){.runs = -1, .evictable_runs = -!run->keep});
        }
    }
    if (!run->pins)
        unlink_run(all, i);
    all->n--;
    all->reported -= run->report;
    free(run->rows);
    *run = (struct kv_run){.next = all->unused};
    all->unused = i;
}

static void evict_one(vmem_kv *kv, uint32_t i)
{
    struct kv_runs *all = &kv->runs;
    const bool report = all->list[i].report;
    const uint64_t id = all->list[i].id;
    drop_run(kv, i);
    kv->stats.evicted_blocks++;
    if (report)
        all->gone[all->n_gone++] = id; // vmem__kv_share made room for it, too
}

// Evicts runs in their order until so many pages are doomed, or no eviction frees any more.
static void evict_next(vmem_kv *kv, uint64_t doomed)
{
    const uint32_t *oldest = &kv->runs.oldest;
    while (*oldest != KV_NO_RUN && kv->doomed.n < doomed && kv->shared.evictable)
        evict_one(kv, *oldest);
}

void vmem__kv_evict_later(vmem_kv *kv, uint64_t pages) { evict_next(kv, kv->doomed.n + pages); }

uint64_t vmem__kv_evict(vmem_kv *kv, uint64_t pages)
{
    const struct kv_runs *all = &kv->runs;
    vmem__kv_wait_unmapping(kv);
    const uint64_t before = kv->doomed.n, most = sat_add(before, pages);
    evict_next(kv, most);
    // A run that a running request pins can hold pages that the request no longer has or never had.
    for (uint32_t i = 0; i < all->used && kv->doomed.n < most && kv->shared.evictable; i++)
        if (all->list[i].id && !all->list[i].keep && !all->list[i].is_protected && frees_pages(kv, &all->list[i]))
            evict_one(kv, i);
    const uint64_t freed = kv->doomed.n - before;
    vmem_drop(kv->ctx, kv->doomed.pages + before, freed);
    kv->doomed.n = before;
    kv->ledger.held -= freed;
    return freed;
}

int vmem__kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t *freed)
{
    int rc = vmem__kv_check_ids(&kv->runs, runs, n);
    const uint64_t before = kv->doomed.n;
    for (size_t k = 0; k < n && !rc; k++) {
        const uint32_t i = find_run(&kv->runs, runs[k]);
        if (i != KV_NO_RUN)
            drop_run(kv, i);
    }
    if (freed)
        *freed = kv->doomed.n - before;
    // Slots that were freed may still map the pages. The worker unmaps each slot at once, and then releases the pages.
    // To release them here would unmap page by page, and the next step would wait for it.
    vmem__kv_release_soon(kv);
    return rc;
}

void vmem__kv_drop_all_runs(vmem_kv *kv)
{
    for (uint32_t i = 0; i < kv->runs.used; i++)
        if (kv->runs.list[i].id)
            drop_run(kv, i);
    vmem__kv_release_doomed(kv);
}
