// What pages contain: zeroes a slot's pages, and copies single pages.
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
