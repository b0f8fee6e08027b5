// Shared rows: a hash table, with open addressing, of the rows that runs hold or that several slots have mapped. A row
// consists of the pages that the tensors of a group have at one page number. They are shared together, so the first
// tensor's page identifies the row.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/kv.h"

static uint64_t home(const struct kv_shared_rows *r, vmem_page page)
{
    return (page * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (r->size - 1);
}

// The row's entry, or the empty one in which it belongs.
static struct kv_shared_row *entry_for(const struct kv_shared_rows *r, vmem_page page)
{
    uint64_t i = home(r, page);
    while (r->entries[i].page && r->entries[i].page != page)
        i = (i + 1) & (r->size - 1);
    return &r->entries[i];
}

struct kv_shared_row *vmem__kv_shared_find(const struct kv_shared_rows *r, vmem_page page)
{
    struct kv_shared_row *ref = r->used ? entry_for(r, page) : NULL;
    return ref && ref->page ? ref : NULL;
}

struct kv_shared_row *vmem__kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    return vmem__kv_shared_find(&kv->shared, kv_table(kv, &kv->groups[group], slot, 0)[page]);
}

int vmem__kv_shared_reserve(struct kv_shared_rows *r, uint64_t more)
{
    uint64_t size = r->size ? r->size : 64;
    while ((r->used + more) * 2 > size)
        size *= 2;
    if (size == r->size)
        return 0;
    struct kv_shared_rows bigger = *r;
    bigger.entries = calloc(size, sizeof(struct kv_shared_row));
    bigger.size = size;
    if (!bigger.entries)
        return vmem__error(-ENOMEM, "no memory for references to %llu pages", (unsigned long long)more);
    for (uint64_t i = 0; i < r->size; i++)
        if (r->entries[i].page)
            *entry_for(&bigger, r->entries[i].page) = r->entries[i];
    free(r->entries);
    *r = bigger;
    return 0;
}

struct kv_shared_row *vmem__kv_shared_new(struct kv_shared_rows *r, vmem_page page, uint32_t n)
{
    if (vmem__kv_shared_reserve(r, 1))
        return NULL;
    struct kv_shared_row *ref = entry_for(r, page);
    *ref = (struct kv_shared_row){.page = page, .slots = 1, .n = n};
    r->used++;
    return ref;
}

static void remove_entry(struct kv_shared_rows *r, struct kv_shared_row *ref)
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

static void count_row(struct kv_shared_rows *r, const struct kv_shared_row *ref, bool on)
{
    uint64_t shared = ref->slots + ref->runs > 1 ? ref->n : 0, only = ref->slots ? 0 : ref->n;
    uint64_t evictable = ref->evictable_runs && ref->evictable_runs == ref->runs ? only : 0;
    r->shared += on ? shared : -shared;
    r->runs_only += on ? only : -only;
    r->evictable += on ? evictable : -evictable;
}

static bool in_pinned_part(const struct kv_span *s, uint32_t page)
{
    return page >= s->pinned.lo && page < s->pinned.hi;
}

struct kv_shared_row *vmem__kv_row_get(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    struct kv_shared_row *ref = vmem__kv_row(kv, slot, group, page);
    if (ref)
        return ref;
    ref = vmem__kv_shared_new(&kv->shared, kv_table(kv, &kv->groups[group], slot, 0)[page], kv->groups[group].n);
    if (ref) // the ledger has counted the page already
        ref->pinning_slots = in_pinned_part(kv_span(kv, slot, group), page);
    return ref;
}

void vmem__kv_change_holders(vmem_kv *kv, struct kv_shared_row *ref, struct kv_holders by)
{
    struct kv_shared_rows *r = &kv->shared;
    const bool pinned = kv_row_pinned(ref);
    count_row(r, ref, false);
    ref->slots += (uint32_t)by.slots;
    ref->pinning_slots += (uint32_t)by.pinning_slots;
    ref->runs += (uint32_t)by.runs;
    ref->evictable_runs += (uint32_t)by.evictable_runs;
    kv->ledger.pinned_pages += (uint64_t)((kv_row_pinned(ref) - pinned) * (int64_t)ref->n);
    if (ref->runs || ref->slots > 1) {
        count_row(r, ref, true);
        return;
    }
    remove_entry(r, ref);
}

void vmem__kv_rows_leave(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    struct kv_span *s = kv_span(kv, slot, group);
    for (uint32_t p = from; p < to; p++) {
        const bool needed = in_pinned_part(s, p);
        struct kv_shared_row *ref = vmem__kv_row(kv, slot, group, p);
        if (ref)
            vmem__kv_change_holders(kv, ref, (struct kv_holders){.slots = -1, .pinning_slots = -(int)needed});
        else
            kv->ledger.pinned_pages -= needed ? kv->groups[group].n : 0;
    }
    if (from <= s->pinned.lo && to > s->pinned.lo)
        s->pinned.lo = MIN(to, s->pinned.hi);
}

uint64_t vmem__kv_rows_left(vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    uint64_t n = s->pinned.hi - s->pinned.lo;
    for (uint32_t p = s->pinned.lo; p < MIN(s->pinned.hi, s->shared_hi); p++) {
        struct kv_shared_row *ref = vmem__kv_row(kv, slot, group, p);
        n -= ref && (kv_row_see(kv, ref) != ref->pinning_slots || kv_row_kept(ref));
    }
    return n;
}

uint32_t vmem__kv_span_shared(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *sp = kv_span(kv, slot, group);
    uint32_t n = 0;
    for (uint32_t p = sp->lo; p < MIN(sp->hi, sp->shared_hi); p++)
        n += vmem__kv_row(kv, slot, group, p) != NULL;
    return n;
}

uint32_t vmem__kv_shared_tokens(const vmem_kv *kv, uint32_t slot)
{
    uint32_t *tokens = &kv->slots[slot].shared_tokens;
    uint64_t shared = 0;
    bool fell = false; // if not, the rows in the slot's copy of a prefix's last, partial page stay counted as shared
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const uint64_t row_bytes = kv->groups[i].row_bytes;
        struct kv_span *sp = kv_span(kv, slot, i);
        const uint32_t before = sp->shared_hi;
        if (!before)
            continue;
        while (sp->shared_hi > sp->lo && !vmem__kv_row(kv, slot, i, sp->shared_hi - 1))
            sp->shared_hi--;
        sp->shared_hi = sp->shared_hi > sp->lo ? sp->shared_hi : 0;
        fell |= sp->shared_hi < before;
        shared = MAX(shared, (((uint64_t)sp->shared_hi << kv->page_shift) + row_bytes - 1) / row_bytes);
    }
    *tokens = fell ? (uint32_t)MIN(*tokens, shared) : *tokens;
    return *tokens;
}
