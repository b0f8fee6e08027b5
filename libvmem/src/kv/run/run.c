// Runs: rows of a slot that are held beyond it.
//
// A run holds the pages that contain its rows, in all tensors of the slot that wrote them. Neighbouring runs share the
// page between them. Whoever attaches a run says that the rows before it are the same, too. So the rows that its pages
// contain before its own are valid, and a request can begin with pages of runs that several slots wrote.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/struct.h"
#include "kv/run/run.h"

uint64_t vmem__kv_rows_pages(const vmem_kv *kv, const struct kv_rows *rows)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++)
        pages += (uint64_t)rows[i].n * kv->groups[i].n;
    return pages;
}

// ---- sharing ---------------------------------------------------------------------------------------------------------

// The pages of the rows that the slot is sure to have. Those in front of keep.lo may be cut at any time, by the
// background thread or by a step, so what is shared would depend on the time, and on the rank.
static struct kv_rows rows_of(const vmem_kv *kv, const struct vmem_kv_run *run, uint32_t group)
{
    const struct kv_group *g = &kv->groups[group];
    const uint64_t from = KV_MIN((uint64_t)run->first, g->max_tokens);
    const uint64_t to = KV_MIN((uint64_t)run->first + run->tokens, g->max_tokens);
    const uint32_t lo =
        KV_MAX((uint32_t)(from * g->row_bytes >> kv->page_shift), kv_span(kv, run->slot, group)->keep.lo);
    const uint32_t hi = (uint32_t)((to * g->row_bytes + kv->page_size - 1) >> kv->page_shift);
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
    const int rc = vmem__kv_run_owned(&kv->runs, run->id, ".id", i);
    if (rc)
        return rc;
    const uint32_t at = vmem__kv_run_find(&kv->runs, run->id);
    const struct kv_run *old = at == KV_NO_RUN ? NULL : &kv->runs.list[at];
    if (!old)
        return 0;
    if (old->first != run->first || old->tokens != run->tokens)
        return vmem__error(-EINVAL, "runs[%zu].id is of %u rows from row %u on", i, old->tokens, old->first);
    return 0;
}

// Everything that sharing needs memory for.
static int prepare(vmem_kv *kv, const struct vmem_kv_run *runs, size_t n, struct kv_rows **made)
{
    struct kv_runs *all = &kv->runs;
    struct kv_doomed *d = &kv->doomed;
    uint64_t fresh = 0, pages = 0;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = vmem__kv_pin_room(kv, runs[i].slot, n);
        if (rc || vmem__kv_run_find(all, runs[i].id) != KV_NO_RUN)
            continue;
        rc = rows_new(kv, &runs[i], &made[i]);
        if (!made[i])
            continue;
        pages += vmem__kv_rows_pages(kv, made[i]);
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
    return rc ? rc : vmem__kv_ref_reserve(&kv->refs, pages);
}

// Holds the slot's rows. There is room.
static uint32_t make(vmem_kv *kv, const struct vmem_kv_run *run, struct kv_rows *rows, bool report)
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
    all->pages += vmem__kv_rows_pages(kv, rows);
    all->reported += report;
    vmem__kv_run_link(all, i);
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_group *g = &kv->groups[j];
        struct kv_span *sp = kv_span(kv, run->slot, j);
        const struct kv_rows *at = &rows[j];
        for (uint32_t t = 0; t < g->n; t++)
            memcpy(at->pages + (uint64_t)t * at->n, kv_table(kv, g, run->slot, t) + at->lo, at->n * sizeof(*at->pages));
        for (uint32_t k = 0; k < at->n; k++) {
            struct kv_ref *ref = vmem__kv_row_get(kv, run->slot, j, at->lo + k);
            vmem__kv_ref_hold(kv, ref, (struct kv_holders){.prefixes = 1, .cached = !r->keep});
        }
        if (at->n)
            sp->shared_hi = KV_MAX(sp->shared_hi, at->lo + at->n);
    }
    kv->slots[run->slot].shared_tokens = KV_MAX(kv->slots[run->slot].shared_tokens, run->first + run->tokens);
    return i;
}

int vmem__kv_share(vmem_kv *kv, struct vmem_kv_run *runs, size_t n, uint32_t flags)
{
    int rc = n && !runs ? vmem__error(-EINVAL, "runs must not be NULL") : 0;
    for (size_t i = 0; i < n && !rc; i++)
        rc = vmem__kv_get_beside(kv, runs[i].slot, 1u << VMEM_KV_ACTIVE);
    if (!rc && kv->flags & VMEM_KV_UNSHARED)
        rc = vmem__error(-EOPNOTSUPP, "the cache was created for requests that share no pages (VMEM_KV_UNSHARED)");
    if (!rc)
        rc = vmem__check_flags(flags, VMEM_KV_RUN_REPORT);
    for (size_t i = 0; i < n && !rc; i++)
        rc = check_run(kv, &runs[i], i);
    if (rc || !n)
        return rc;
    struct kv_rows **made = calloc(n, sizeof(struct kv_rows *));
    rc = made ? prepare(kv, runs, n, made) : vmem__error(-ENOMEM, "no memory for %zu runs", n);
    for (size_t i = 0; i < n && made; i++) {
        if (rc) {
            free(made[i]);
            continue;
        }
        uint32_t at = vmem__kv_run_find(&kv->runs, runs[i].id);
        if (made[i])
            at = make(kv, &runs[i], made[i], flags & VMEM_KV_RUN_REPORT);
        runs[i].id = at == KV_NO_RUN ? 0 : kv->runs.list[at].id;
        if (at != KV_NO_RUN)
            vmem__kv_pin(kv, runs[i].slot, at); // cannot fail: there is room
    }
    free(made);
    return rc;
}

// ---- what others ask for ---------------------------------------------------------------------------------------------

static void set_keep(vmem_kv *kv, uint32_t i, bool keep)
{
    struct kv_run *r = &kv->runs.list[i];
    const int kept = keep - r->keep;
    for (uint32_t j = 0; j < kv->n_groups && kept; j++)
        for (uint32_t k = 0; k < r->rows[j].n; k++)
            vmem__kv_ref_hold(kv, vmem__kv_ref_find(&kv->refs, r->rows[j].pages[k]),
                              (struct kv_holders){.cached = -kept});
    if (!r->pins)
        vmem__kv_run_unlink(&kv->runs, i);
    r->keep = keep;
    if (!r->pins)
        vmem__kv_run_link(&kv->runs, i);
}

int vmem__kv_order(vmem_kv *kv, const uint64_t *runs, size_t n, uint32_t keep)
{
    if (n && !runs)
        return vmem__error(-EINVAL, "runs must not be NULL");
    if (keep > 1)
        return vmem__error(-EINVAL, "keep %u is neither 0 nor 1", keep);
    int rc = 0;
    for (size_t k = 0; k < n && !rc; k++)
        rc = vmem__kv_run_owned(&kv->runs, runs[k], "", k);
    for (size_t k = n; k-- && !rc;) { // from the last: the end of a sequence becomes the oldest
        const uint32_t i = vmem__kv_run_find(&kv->runs, runs[k]);
        if (i != KV_NO_RUN)
            set_keep(kv, i, keep);
    }
    return rc;
}

int vmem__kv_evicted(vmem_kv *kv, uint64_t *runs, size_t n, size_t *got)
{
    struct kv_runs *all = &kv->runs;
    if (!got || (n && !runs))
        return vmem__error(-EINVAL, "got must not be NULL, nor runs unless n is 0");
    *got = KV_MIN(n, all->n_gone);
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
        const uint64_t bytes = KV_MIN((uint64_t)r->first + r->tokens, g->max_tokens) * g->row_bytes;
        const uint64_t from = has->n ? (uint64_t)has->lo << kv->page_shift : kv_ceil_pages(bytes, kv) << kv->page_shift;
        const uint64_t tiles = (from + g->row_bytes * kv->tile_rows - 1) / (g->row_bytes * kv->tile_rows);
        const uint64_t tokens = from ? tiles * kv->tile_rows + g->window : 0;
        least = KV_MAX(least, from && (!g->window || tokens > g->max_tokens) ? none : tokens);
    }
    return (uint32_t)KV_MIN(least, none);
}

int vmem__kv_get_run(vmem_kv *kv, uint64_t run, struct vmem_kv_run_info *out)
{
    const uint32_t i = vmem__kv_run_find(&kv->runs, run);
    if (i == KV_NO_RUN)
        return vmem__error(-EINVAL, "this cache has no run %#" PRIx64 ": it was dropped or evicted, or is another's",
                           run);
    const struct kv_run *r = &kv->runs.list[i];
    struct vmem_kv_run_info info = {.first = r->first,
                                    .tokens = r->tokens,
                                    .min_tokens = least_tokens(kv, r),
                                    .keep = r->keep,
                                    .requests = r->pins,
                                    .pages = vmem__kv_rows_pages(kv, r->rows)};
    for (uint32_t j = 0; j < kv->n_groups; j++)
        for (uint32_t k = 0; k < r->rows[j].n; k++) {
            const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, r->rows[j].pages[k]);
            info.own_pages += !ref->slots && ref->prefixes == 1 ? ref->n : 0;
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

int vmem__kv_check_runs(const vmem_kv *kv)
{
    const struct kv_runs *all = &kv->runs;
    uint64_t n = 0, listed = 0, pinned = 0, evictable = 0;
    for (uint32_t i = 0; i < all->used; i++) {
        const struct kv_run *r = &all->list[i];
        n += r->id != 0;
        pinned += r->id && r->pins;
        for (uint32_t j = 0; j < kv->n_groups && r->id; j++)
            for (uint32_t k = 0; k < r->rows[j].n; k++) {
                const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, r->rows[j].pages[k]);
                if (!ref || ref->prefixes < ref->cached + r->keep || !(ref->cached || r->keep))
                    return vmem__error(-EFAULT, "run %u, page %#" PRIx64 " is not held", i, r->rows[j].pages[k]);
            }
    }
    for (uint32_t p = 0; p < 2; p++)
        for (uint32_t i = all->order[p].oldest; i != KV_NO_RUN; i = all->list[i].newer, listed++)
            if (all->list[i].keep != p)
                return vmem__error(-EFAULT, "run %u, keep %d, is listed with %u", i, all->list[i].keep, p);
    for (uint64_t i = 0; i < kv->refs.size; i++) {
        const struct kv_ref *ref = &kv->refs.entries[i];
        evictable += ref->page && !ref->slots && ref->cached && ref->cached == ref->prefixes ? ref->n : 0;
    }
    if (n != all->n || listed + pinned != n)
        return vmem__error(-EFAULT, "%" PRIu64 " runs, %" PRIu64 " listed, %" PRIu64 " pinned, not %u", n, listed,
                           pinned, all->n);
    if (evictable != kv->refs.evictable)
        return vmem__error(-EFAULT, "%" PRIu64 " pages can be evicted, not %" PRIu64, evictable, kv->refs.evictable);
    return 0;
}
