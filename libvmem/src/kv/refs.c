// Who holds a page: a hash table, open addressing, of the pages that prefixes hold or several slots have mapped.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/kv.h"

static uint64_t home(const struct kv_refs *r, vmem_page page)
{
    return (page * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (r->size - 1);
}

struct kv_ref *kv_ref_find(const struct kv_refs *r, vmem_page page)
{
    if (!r->used)
        return NULL;
    for (uint64_t i = home(r, page); r->entries[i].page; i = (i + 1) & (r->size - 1))
        if (r->entries[i].page == page)
            return &r->entries[i];
    return NULL;
}

int kv_ref_reserve(struct kv_refs *r, uint64_t more)
{
    uint64_t size = r->size ? r->size : 64;
    while ((r->used + more) * 2 > size)
        size *= 2;
    if (size == r->size)
        return 0;
    struct kv_refs bigger = {.entries = calloc(size, sizeof(struct kv_ref)), .size = size, .used = r->used};
    if (!bigger.entries)
        return vmem__error(-ENOMEM, "no memory for references to %llu pages", (unsigned long long)more);
    for (uint64_t i = 0; i < r->size; i++)
        if (r->entries[i].page) {
            uint64_t j = home(&bigger, r->entries[i].page);
            while (bigger.entries[j].page)
                j = (j + 1) & (size - 1);
            bigger.entries[j] = r->entries[i];
        }
    free(r->entries);
    *r = bigger;
    return 0;
}

struct kv_ref *kv_ref_get(struct kv_refs *r, vmem_page page)
{
    struct kv_ref *found = kv_ref_find(r, page);
    if (found)
        return found;
    if (kv_ref_reserve(r, 1))
        return NULL;
    uint64_t i = home(r, page);
    while (r->entries[i].page)
        i = (i + 1) & (r->size - 1);
    r->entries[i] = (struct kv_ref){.page = page, .slots = 1};
    r->used++;
    return &r->entries[i];
}

void kv_ref_remove(struct kv_refs *r, struct kv_ref *ref)
{
    uint64_t mask = r->size - 1, hole = (uint64_t)(ref - r->entries);
    for (uint64_t i = (hole + 1) & mask; r->entries[i].page; i = (i + 1) & mask)
        if (((i - home(r, r->entries[i].page)) & mask) >= ((i - hole) & mask)) {
            r->entries[hole] = r->entries[i];
            hole = i;
        }
    r->entries[hole].page = 0;
    r->used--;
}
