// Dropping runs, by name or in their order. Their pages are doomed: no run or slot has them, and the call or the
// background thread releases them.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>
#include <string.h>

#include "kv/run/run.h"

// Whether dropping the run, and the runs that share a page with it, frees a page.
static bool frees(const vmem_kv *kv, const struct kv_run *r)
{
    for (uint32_t i = 0; i < kv->n_groups; i++)
        for (uint32_t k = 0; k < r->rows[i].n; k++)
            if (kv_row_evictable(vmem__kv_ref_find(&kv->refs, r->rows[i].pages[k])))
                return true;
    return false;
}

// Removes the run, and dooms pages without another holder: vmem__kv_share made room for them.
static void drop(vmem_kv *kv, uint32_t i)
{
    struct kv_runs *all = &kv->runs;
    struct kv_doomed *d = &kv->doomed;
    struct kv_run *run = &all->list[i];
    all->pages -= vmem__kv_rows_pages(kv, run->rows);
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        const struct kv_rows *r = &run->rows[j];
        for (uint32_t k = 0; k < r->n; k++) {
            struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, r->pages[k]);
            for (uint32_t t = 0; t < kv->groups[j].n && !ref->slots && ref->prefixes == 1; t++)
                d->pages[d->n++] = r->pages[(uint64_t)t * r->n + k];
            vmem__kv_ref_hold(kv, ref, (struct kv_holders){.prefixes = -1, .cached = -!run->keep});
        }
    }
    if (!run->pins)
        vmem__kv_run_unlink(all, i);
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
    drop(kv, i);
    kv->stats.evicted_blocks++;
    if (report)
        all->gone[all->n_gone++] = id; // vmem__kv_share made room for it, too
}

// The next n runs, until that many pages are doomed. counted: runs go whether or not that frees a page.
static void evict_next(vmem_kv *kv, size_t n, uint64_t doomed, bool counted)
{
    for (; n && kv->doomed.n < doomed && (counted || kv->refs.evictable); n--) {
        const uint32_t victim = vmem__kv_run_victim(&kv->runs);
        if (victim == KV_NO_RUN)
            break;
        evict_one(kv, victim);
    }
}

static uint64_t evict(vmem_kv *kv, size_t n, uint64_t pages)
{
    const struct kv_runs *all = &kv->runs;
    const bool counted = pages == UINT64_MAX;
    vmem__kv_wait_unmapping(kv);
    const uint64_t before = kv->doomed.n, most = before + KV_MIN(pages, UINT64_MAX - before);
    evict_next(kv, n, most, counted);
    // A run that a running request pins can hold pages that the request no longer has or never had.
    for (uint32_t i = 0; i < all->used && !counted && kv->doomed.n < most && kv->refs.evictable; i++)
        if (all->list[i].id && !all->list[i].keep && !all->list[i].held && frees(kv, &all->list[i]))
            evict_one(kv, i);
    const uint64_t freed = kv->doomed.n - before;
    vmem__kv_release(kv, kv->doomed.pages + before, freed);
    kv->doomed.n = before;
    kv->ledger.held -= freed;
    return freed;
}

uint64_t vmem__kv_evict(vmem_kv *kv, uint64_t pages) { return evict(kv, SIZE_MAX, KV_MIN(pages, UINT64_MAX - 1)); }

void vmem__kv_evict_later(vmem_kv *kv, uint64_t pages) { evict_next(kv, SIZE_MAX, kv->doomed.n + pages, false); }

int vmem__kv_drop(vmem_kv *kv, const uint64_t *runs, size_t n, uint64_t most_pages, uint32_t flags, uint64_t *freed)
{
    int rc = vmem__check_flags(flags, VMEM_KV_UNUSED | VMEM_KV_NEXT);
    if (rc)
        return rc;
    if (flags & VMEM_KV_NEXT) {
        if (runs)
            return vmem__error(-EINVAL, "runs must be NULL with VMEM_KV_NEXT");
        *freed = evict(kv, n, most_pages);
        return 0;
    }
    if (n && !runs)
        return vmem__error(-EINVAL, "runs must not be NULL");
    for (size_t k = 0; k < n && !rc; k++)
        rc = vmem__kv_run_owned(&kv->runs, runs[k], "", k);
    if (rc)
        return rc;
    const uint64_t before = kv->doomed.n;
    for (size_t k = 0; k < n && kv->doomed.n - before < most_pages; k++) {
        const uint32_t i = vmem__kv_run_find(&kv->runs, runs[k]);
        if (i == KV_NO_RUN)
            continue;
        const struct kv_run *r = &kv->runs.list[i];
        if (!(flags & VMEM_KV_UNUSED))
            drop(kv, i);
        else if (!r->pins && !r->keep)
            evict_one(kv, i);
    }
    *freed = kv->doomed.n - before;
    // Slots that were freed may still map the pages. The worker unmaps each slot at once, and then releases the pages.
    // To release them here would unmap page by page, and the next step would wait for it.
    vmem__kv_release_soon(kv);
    return 0;
}

void vmem__kv_drop_all_runs(vmem_kv *kv)
{
    for (uint32_t i = 0; i < kv->runs.used; i++)
        if (kv->runs.list[i].id)
            drop(kv, i);
    vmem__kv_release_doomed(kv);
}
