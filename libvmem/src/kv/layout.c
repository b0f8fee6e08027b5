// The shape of a cache: groups of tensors, their addresses, and the pages that a request's length needs. Constant once
// the cache has been created.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "kv/kv.h"

static uint64_t round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

uint32_t vmem__kv_need_lo(const vmem_kv *kv, const struct kv_group *g, uint32_t before)
{
    uint64_t rows = MIN(before, g->max_tokens);
    if (!g->window || rows <= g->window)
        return 0;
    rows -= g->window;
    return (uint32_t)(((rows - rows % kv->tile_rows) * g->row_bytes) >> kv->page_shift);
}

uint32_t vmem__kv_need_hi(const vmem_kv *kv, const struct kv_group *g, uint64_t tokens)
{
    uint64_t rows = MIN(tokens, g->max_tokens);
    if (kv->tile_rows > 1)
        rows = MIN(round_up(rows, kv->tile_rows), g->slot_rows);
    return (uint32_t)((rows * g->row_bytes + kv->page_size - 1) >> kv->page_shift);
}

struct kv_split vmem__kv_split(const vmem_kv *kv, const struct kv_group *g, uint32_t tokens)
{
    uint64_t bytes = MIN(tokens, g->max_tokens) * g->row_bytes;
    struct kv_split s = {.lo = vmem__kv_need_lo(kv, g, tokens),
                         .full = (uint32_t)(bytes >> kv->page_shift),
                         .hi = vmem__kv_need_hi(kv, g, tokens),
                         .part = bytes & (kv->page_size - 1)};
    s.full = MAX(s.full, s.lo);
    return s;
}

// Slots start at multiples of 2 MiB. So 2 MiB entries can map runs of small pages, and no two slots share an entry. The
// exceptions are small slots, and row sizes for which this alignment would multiply the address space.
static int lay_out(const vmem_kv *kv, struct kv_group *g)
{
    uint64_t rows = round_up(g->max_tokens, kv->tile_rows), bytes = rows * g->row_bytes;
    for (uint64_t align = MAX(KV_BLOCK, kv->page_size);; align = kv->page_size) {
        // `align` is a power of two, so its greatest common divisor with row_bytes is one, too.
        g->slot_rows = round_up(rows, align / MIN(align, g->row_bytes & -g->row_bytes));
        g->slot_stride = g->slot_rows * g->row_bytes;
        bool fits = g->slot_stride / kv->page_size <= UINT32_MAX && g->slot_stride <= (UINT64_C(1) << 46) / kv->n_slots;
        if (fits && (align == kv->page_size || (bytes >= align && g->slot_stride <= 4 * bytes)))
            break;
        if (align == kv->page_size)
            return vmem__error(-EINVAL, "%u slots of %" PRIu64 " bytes need more than 2^46 bytes of addresses",
                               kv->n_slots, g->slot_stride);
    }
    g->slot_pages = (uint32_t)(g->slot_stride >> kv->page_shift);
    return 0;
}

// The tensor's group, or the number of groups.
static uint32_t group_of(const vmem_kv *kv, const struct vmem_kv_tensor *t, uint32_t max_tokens)
{
    uint32_t j = 0;
    for (const struct kv_group *g = kv->groups; j < kv->n_groups; j++, g++)
        if (g->row_bytes == t->row_bytes && g->window == t->window && g->max_tokens == max_tokens)
            break;
    return j;
}

// Reserves zeroed address space. A page of it takes memory once it is written.
static void *table_of(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

int vmem__kv_make_groups(vmem_kv *kv, const struct vmem_kv_config *c)
{
    kv->order = calloc(c->n_tensors, sizeof(*kv->order));
    kv->addrs = calloc(c->n_tensors, sizeof(*kv->addrs));
    kv->groups = calloc(c->n_tensors, sizeof(*kv->groups));
    if (!kv->order || !kv->addrs || !kv->groups)
        return vmem__error(-ENOMEM, "no memory for %u tensors", c->n_tensors);
    for (uint32_t i = 0; i < c->n_tensors; i++) {
        const struct vmem_kv_tensor *t = &c->tensors[i];
        const uint32_t max = t->max_tokens ? t->max_tokens : c->max_tokens, j = group_of(kv, t, max);
        struct kv_group *g = &kv->groups[j];
        if (j == kv->n_groups) {
            kv->n_groups++;
            g->row_bytes = t->row_bytes;
            g->window = t->window;
            g->max_tokens = max;
            kv->windows |= t->window != 0;
        }
        kv->order[i] = g->n++; // index within the group; made absolute below
    }
    uint64_t table = 0;
    uint32_t first = 0;
    for (uint32_t j = 0; j < kv->n_groups; j++) {
        struct kv_group *g = &kv->groups[j];
        int rc = lay_out(kv, g);
        if (rc)
            return rc;
        g->first = first;
        g->table = table;
        first += g->n;
        table += (uint64_t)g->n * kv->n_slots * g->slot_pages;
    }
    for (uint32_t i = 0; i < c->n_tensors; i++) {
        const struct vmem_kv_tensor *t = &c->tensors[i];
        kv->order[i] += kv->groups[group_of(kv, t, t->max_tokens ? t->max_tokens : c->max_tokens)].first;
    }
    kv->pages_bytes = table * sizeof(vmem_page);
    kv->pages = table_of(kv->pages_bytes);
    if (!kv->pages)
        return vmem__error(-ENOMEM, "no address space for a table of %" PRIu64 " pages", table);
    return 0;
}
