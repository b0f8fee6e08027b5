// What pages contain: zeroes them, copies single pages, and copies the rows of a request to CPU memory and back.
//
// A slot that is swapped out behind a fence is due once its kernels have ended. It counts as free memory from then on,
// whether or not it has been copied. So the pages that a step can get do not depend on the thread's progress. A step
// that finds no other memory copies the rest itself.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/pages/pages.h"

int vmem__kv_clear_slot(vmem_kv *kv, uint32_t slot)
{
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *s = kv_span(kv, slot, i);
        for (uint32_t t = 0; t < g->n && s->lo < s->hi; t++) {
            uint64_t length = (uint64_t)(s->hi - s->lo) << kv->page_shift;
            int rc = vmem_fill(kv->ctx, kv_addr(kv, g, slot, t, s->lo), 0, length);
            if (rc)
                return rc;
            kv->copy.zeroed_bytes += length;
        }
    }
    return 0;
}

int vmem__kv_copy_pages(vmem_kv *kv, const struct kv_group *g, const vmem_page *pages, uint64_t stride, bool to_scratch,
                        uint32_t slot, uint32_t page, uint64_t bytes)
{
    struct vmem_map_op *maps = calloc(g->n, sizeof(*maps) + sizeof(struct vmem_copy_op));
    if (!maps)
        return vmem__error(-ENOMEM, "no memory to copy %u pages", g->n);
    struct vmem_copy_op *copies = (struct vmem_copy_op *)(maps + g->n);
    for (uint32_t t = 0; t < g->n; t++) {
        uint64_t window = kv->copy.scratch + t * kv->page_size, addr = kv_addr(kv, g, slot, t, page);
        maps[t] = (struct vmem_map_op){.addr = window, .page = pages[t * stride]};
        copies[t] = (struct vmem_copy_op){.dst = to_scratch ? window : addr,
                                          .src = to_scratch ? addr : window,
                                          .length = bytes};
    }
    // A page may still be mapped here if the last unmap failed. It does no harm: this call replaces it, or its release
    // unmaps it.
    int rc = vMemMapBatch(kv->ctx, maps, g->n, VMEM_MAP_FINE | VMEM_MAP_REPLACE, NULL);
    if (!rc) {
        rc = vmem_copy_batch(kv->ctx, copies, g->n);
        vMemUnmap(kv->ctx, kv->copy.scratch, g->n * kv->page_size);
        kv->stats.copied_pages += rc ? 0 : g->n;
    }
    free(maps);
    return rc;
}

// ---- swapping ---------------------------------------------------------------------------------------------------

// Lists the copies of bytes [from, to) of the rows that the next token can read, tensor after tensor. Returns how many
// bytes there are in all.
static uint64_t list_copies(const vmem_kv *kv, uint32_t slot, uint64_t host, bool out, uint64_t from, uint64_t to,
                            struct vmem_copy_op *ops, uint64_t *n)
{
    uint64_t size = 0;
    *n = 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        uint32_t tokens = kv->slots[slot].tokens, lo = vmem__kv_need_lo(kv, g, tokens);
        uint64_t length = KV_MIN(tokens, g->max_tokens) * g->row_bytes - ((uint64_t)lo << kv->page_shift);
        for (uint32_t t = 0; t < g->n && length; t++, size += length) {
            const uint64_t begin = KV_MAX(from, size), end = KV_MIN(to, size + length);
            if (begin >= end)
                continue;
            uint64_t addr = kv_addr(kv, g, slot, t, lo) + (begin - size);
            ops[(*n)++] = (struct vmem_copy_op){.dst = out ? host + begin : addr,
                                                .src = out ? addr : host + begin,
                                                .length = end - begin};
        }
    }
    return size;
}

int vmem__kv_swap_copy(vmem_kv *kv, uint32_t slot, uint64_t host, bool out, uint64_t from, uint64_t to)
{
    uint64_t n;
    struct vmem_copy_op *ops = calloc(kv->n_tensors, sizeof(*ops));
    if (!ops)
        return vmem__error(-ENOMEM, "no memory to copy %u tensors", kv->n_tensors);
    list_copies(kv, slot, host, out, from, to, ops, &n);
    int rc = vmem_copy_batch(kv->ctx, ops, n);
    free(ops);
    return rc;
}

uint64_t vmem__kv_swap_size(const vmem_kv *kv, uint32_t slot)
{
    uint64_t n;
    return list_copies(kv, slot, 0, true, 0, 0, NULL, &n);
}

int vmem__kv_swap_portion(vmem_kv *kv, uint32_t slot, uint64_t most)
{
    struct kv_idle *idle = &kv->idle[slot];
    const uint64_t to = idle->copied + KV_MIN(most, idle->size - idle->copied);
    int rc = vmem__kv_swap_copy(kv, slot, (uintptr_t)idle->host, true, idle->copied, to);
    if (!rc)
        idle->copied = to;
    return rc;
}

void vmem__kv_swap_portion_end(vmem_kv *kv, uint32_t slot)
{
    struct kv_slot *s = &kv->slots[slot];
    struct kv_idle *idle = &kv->idle[slot];
    if (idle->copied < idle->size)
        return;
    kv->stats.swap_out_bytes += idle->size;
    s->fresh = true; // its kernels have ended
    vmem__kv_set_state(kv, slot, VMEM_KV_SWAPPED);
    s->shared_tokens = 0;
    idle->parked = 0; // its pages are the first to be taken back
    vmem__kv_forget(kv, slot);
}

int vmem__kv_swap_rest(vmem_kv *kv, uint32_t slot)
{
    int rc = vmem__kv_swap_portion(kv, slot, UINT64_MAX);
    if (!rc)
        vmem__kv_swap_portion_end(kv, slot);
    return rc;
}
