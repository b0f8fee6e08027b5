// Blocks: names that an engine gives to pages.
//
// A name holds its pages as a prefix does (struct kv_ref counts both). So slots, sharing and bookkeeping need no code
// for names. Blocks are not built on prefixes. A prefix is the beginning of one request, held and released as a whole.
// An engine names each block when a request gets it and drops the name when it reuses the block number. It starts a
// request with blocks that several other requests wrote.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "kv/run/run.h"

vmem_page *vmem__kv_block_named(const vmem_kv *kv, uint32_t id)
{
    return kv->blocks.pages + (uint64_t)id * kv->blocks.each;
}

int vmem__kv_block_check(const vmem_kv *kv, uint32_t id)
{
    if (id >= kv->blocks.n)
        return vmem__error(-EINVAL, "block %u is out of range: the cache has %u blocks", id, kv->blocks.n);
    return 0;
}

int vmem__kv_blocks_init(vmem_kv *kv, uint32_t n_blocks, uint32_t block_tokens)
{
    if (kv->blocks.pages)
        return vmem__error(-EINVAL, "this cache has %u blocks already", kv->blocks.n);
    if (!n_blocks || n_blocks > INT32_MAX)
        return vmem__error(-EINVAL, "n_blocks %u is not between 1 and %d", n_blocks, INT32_MAX);
    if (!block_tokens || block_tokens > kv->max_tokens)
        return vmem__error(-EINVAL, "block_tokens %u is not between 1 and max_tokens, %u", block_tokens,
                           kv->max_tokens);
    int rc = vmem__kv_check_sharing(kv);
    if (rc)
        return rc;
    uint64_t pages = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint64_t bytes = block_tokens * g->row_bytes;
        if (g->window || g->max_tokens != kv->max_tokens)
            return vmem__error(-EOPNOTSUPP, "blocks need tensors of the cache's max_tokens and without windows");
        if (bytes & (kv->page_size - 1))
            return vmem__error(-EINVAL,
                               "block_tokens %u: rows of %" PRIu64 " bytes make blocks of %" PRIu64
                               ", not whole pages of %" PRIu64,
                               block_tokens, g->row_bytes, bytes, kv->page_size);
        pages += (bytes >> kv->page_shift) * g->n;
    }
    if (pages > UINT32_MAX)
        return vmem__error(-EINVAL, "block_tokens %u: a block would have %" PRIu64 " pages", block_tokens, pages);
    // The table is zeroed. The system may refuse it for want of memory, since the full table is used once every name is
    // taken.
    vmem_page *named =
        mmap(NULL, n_blocks * pages * sizeof(*named), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (named == MAP_FAILED)
        return vmem__error(-ENOMEM, "n_blocks %u: no memory for a table of as many, of %" PRIu64 " pages each",
                           n_blocks, pages);
    kv->blocks.pages = named;
    kv->blocks.n = n_blocks;
    kv->blocks.tokens = block_tokens;
    kv->blocks.each = (uint32_t)pages;
    return 0;
}

// ---- dropping --------------------------------------------------------------------------------------------------------

// Drops the name. Appends pages without another holder to the list, which must have room.
static void drop(vmem_kv *kv, uint32_t id, vmem_page *unheld, uint64_t *n)
{
    vmem_page *pages = vmem__kv_block_named(kv, id), *row = pages;
    if (!pages[0]) // no write either: untouched parts of the table take no memory
        return;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        uint32_t each = kv_block_pages(kv, &kv->groups[i]);
        for (uint32_t k = 0; k < each; k++) {
            struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, row[k]);
            for (uint32_t t = 0; t < ref->n && !ref->slots && ref->prefixes == 1; t++)
                unheld[(*n)++] = row[t * each + k];
            vmem__kv_ref_hold(kv, ref, 0, -1);
        }
        row += kv->groups[i].n * each;
    }
    for (uint32_t i = 0; i < kv->blocks.each; i++)
        pages[i] = 0;
    kv->blocks.n_taken--;
}

static int drop_all(vmem_kv *kv, const uint32_t *ids, size_t n)
{
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++)
        rc = vmem__kv_block_check(kv, ids[i]);
    if (!rc)
        rc = vmem__kv_room_for(&kv->doomed.pages, &kv->doomed.cap, kv->doomed.n + n * kv->blocks.each,
                               sizeof(*kv->doomed.pages));
    if (rc)
        return rc;
    // Freed slots still map some of the pages. The worker unmaps each slot at once, and then releases the pages. To
    // release them here would unmap page by page, and the next step would wait for it.
    bool later = kv->turn.has_worker && (kv->turn.unmapping || vmem__kv_any_stale(kv));
    if (!later || !kv->turn.unmapping)
        vmem__kv_wait_cut(kv);
    for (size_t i = 0; i < n; i++)
        drop(kv, ids[i], kv->doomed.pages, &kv->doomed.n);
    for (uint32_t s = 0; s < kv->n_slots; s++)
        vmem__kv_unmark_shared(kv, s);
    if (later)
        vmem__kv_worker_wake(kv);
    else
        vmem__kv_release_doomed(kv);
    return 0;
}

int vmem__kv_block_drop(vmem_kv *kv, const uint32_t *ids, size_t n)
{
    int rc = ids || !n ? drop_all(kv, ids, n) : vmem__error(-EINVAL, "ids must not be NULL");
    return rc;
}

void vmem__kv_blocks_destroy(vmem_kv *kv)
{
    for (uint32_t i = 0; i < kv->blocks.n && kv->blocks.n_taken; i++)
        drop_all(kv, &i, 1);
    vmem__kv_release_doomed(kv); // the worker has ended
    free(kv->doomed.pages);
    kv->doomed.pages = NULL;
    kv->doomed.cap = 0;
    if (kv->blocks.pages)
        munmap(kv->blocks.pages, (uint64_t)kv->blocks.n * kv->blocks.each * sizeof(*kv->blocks.pages));
    kv->blocks.pages = NULL;
    kv->blocks.n = 0;
}

// ---- binding ---------------------------------------------------------------------------------------------------------

static int bind(vmem_kv *kv, uint32_t slot, uint32_t index, uint32_t id)
{
    int rc = vmem__kv_block_check(kv, id);
    if (!rc && slot < kv->n_slots && kv->turn.cutting)
        vmem__kv_wait_slot(kv, slot); // the end of the cut restores the span if it failed
    if (!rc)
        rc = vmem__kv_get_beside(kv, slot, 1u << VMEM_KV_ACTIVE);
    if (rc)
        return rc;
    vmem_page *to = vmem__kv_block_named(kv, id);
    if (*to)
        return vmem__error(-EEXIST, "block %u has pages already; drop it first", id);
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *sp = kv_span(kv, slot, i);
        if (((uint64_t)index + 1) * kv_block_pages(kv, g) > sp->need_hi)
            return vmem__error(-EINVAL, "index %u: slot %u has not been stepped to the end of that block", index, slot);
    }
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t n = kv_block_pages(kv, g);
        for (uint32_t t = 0; t < g->n; t++) {
            const vmem_page *from = kv_table(kv, g, slot, t) + (uint64_t)index * n;
            for (uint32_t k = 0; k < n; k++, to++) {
                *to = from[k];
                if (!t)
                    vmem__kv_ref_hold(kv, vmem__kv_row_get(kv, slot, i, index * n + k), 0, 1);
            }
        }
        sp->shared_hi = KV_MAX(sp->shared_hi, (index + 1) * n);
    }
    kv->blocks.n_taken++;
    return 0;
}

int vmem__kv_block_bind(vmem_kv *kv, const uint32_t *slots, const uint32_t *index, const uint32_t *ids, size_t n,
                        size_t *bad)
{
    int rc = 0;
    if (n && (!slots || !index || !ids))
        rc = vmem__error(-EINVAL, "slots, index and ids must not be NULL");
    if (!rc)
        rc = vmem__kv_ref_reserve(&kv->refs, n * kv->blocks.each);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = bind(kv, slots[i], index[i], ids[i]);
        if (rc && bad)
            *bad = i;
        // The slots hold the pages, too, so dropping the names releases no page.
        for (uint64_t none = 0; rc && i; i--)
            drop(kv, ids[i - 1], NULL, &none);
    }
    return rc;
}

int vmem__kv_check_blocks(const vmem_kv *kv)
{
    uint32_t left = kv->blocks.n_taken;
    for (uint32_t id = 0; id < kv->blocks.n && left; id++) {
        const vmem_page *row = vmem__kv_block_named(kv, id);
        left -= row[0] != 0;
        for (uint32_t i = 0; i < kv->n_groups && vmem__kv_block_named(kv, id)[0]; i++) {
            uint32_t each = kv_block_pages(kv, &kv->groups[i]);
            for (uint32_t k = 0; k < each; k++) {
                const struct kv_ref *ref = row[k] ? vmem__kv_ref_find(&kv->refs, row[k]) : NULL;
                if (!ref || !ref->prefixes)
                    return vmem__error(-EFAULT, "block %u, group %u: page %u, %#" PRIx64 ", is not held", id, i, k,
                                       row[k]);
            }
            row += kv->groups[i].n * each;
        }
    }
    if (left)
        return vmem__error(-EFAULT, "%u block names are counted as taken and are not", left);
    return 0;
}
