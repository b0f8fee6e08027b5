// References: records who holds a row of pages. The hash table uses open addressing. It contains the rows that prefixes
// hold or that several slots have mapped. A row consists of the pages that the tensors of a group have at one page
// number. They are shared together, so the first tensor's page identifies the row.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/kv.h"

static uint64_t home(const struct kv_refs *r, vmem_page page)
{
    return (page * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (r->size - 1);
}

// Loads what finding the page will read, and does not wait for it: a large table is in no cache of the CPU.
static void expect(const struct kv_refs *r, vmem_page page)
{
    if (!r->used)
        return;
    const struct kv_ref *ref = &r->entries[home(r, page)];
    __builtin_prefetch(ref);
    __builtin_prefetch(&ref->mark); // many entries lie across two cache lines
}

struct kv_ref *vmem__kv_ref_find(const struct kv_refs *r, vmem_page page)
{
    if (!r->used)
        return NULL;
    for (uint64_t i = home(r, page); r->entries[i].page; i = (i + 1) & (r->size - 1))
        if (r->entries[i].page == page)
            return &r->entries[i];
    return NULL;
}

struct kv_ref *vmem__kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    return vmem__kv_ref_find(&kv->refs, kv_table(kv, &kv->groups[group], slot, 0)[page]);
}

int vmem__kv_ref_reserve(struct kv_refs *r, uint64_t more)
{
    uint64_t size = r->size ? r->size : 64;
    while ((r->used + more) * 2 > size)
        size *= 2;
    if (size == r->size)
        return 0;
    struct kv_refs bigger = *r;
    bigger.entries = calloc(size, sizeof(struct kv_ref));
    bigger.size = size;
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

struct kv_ref *vmem__kv_ref_new(struct kv_refs *r, vmem_page page, uint32_t n)
{
    if (vmem__kv_ref_reserve(r, 1))
        return NULL;
    uint64_t i = home(r, page);
    while (r->entries[i].page)
        i = (i + 1) & (r->size - 1);
    r->entries[i] = (struct kv_ref){.page = page, .slots = 1, .n = n};
    r->used++;
    return &r->entries[i];
}

static void remove_entry(struct kv_refs *r, struct kv_ref *ref)
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

static void count(struct kv_refs *r, const struct kv_ref *ref, bool on)
{
    uint64_t shared = ref->slots + ref->prefixes > 1 ? ref->n : 0, only = ref->slots ? 0 : ref->n;
    uint64_t evictable = ref->cached && ref->cached == ref->prefixes ? only : 0;
    r->shared += on ? shared : -shared;
    r->only += on ? only : -only;
    r->evictable += on ? evictable : -evictable;
}

static bool in_fixed_part(const struct kv_span *s, uint32_t page) { return page >= s->fix.lo && page < s->fix.hi; }

struct kv_ref *vmem__kv_row_get(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    struct kv_ref *ref = vmem__kv_row(kv, slot, group, page);
    if (ref)
        return ref;
    ref = vmem__kv_ref_new(&kv->refs, kv_table(kv, &kv->groups[group], slot, 0)[page], kv->groups[group].n);
    if (ref) // the ledger has counted the page already
        ref->users = in_fixed_part(kv_span(kv, slot, group), page);
    return ref;
}

void vmem__kv_ref_hold(vmem_kv *kv, struct kv_ref *ref, struct kv_holders by)
{
    struct kv_refs *r = &kv->refs;
    const bool fixed = kv_row_fixed(ref);
    count(r, ref, false);
    ref->slots += (uint32_t)by.slots;
    ref->users += (uint32_t)by.users;
    ref->prefixes += (uint32_t)by.prefixes;
    ref->cached += (uint32_t)by.cached;
    kv->ledger.fixed += (uint64_t)((kv_row_fixed(ref) - fixed) * (int64_t)ref->n);
    if (ref->prefixes || ref->slots > 1) {
        count(r, ref, true);
        return;
    }
    remove_entry(r, ref);
}

void vmem__kv_rows_leave(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    struct kv_span *s = kv_span(kv, slot, group);
    for (uint32_t p = from; p < to; p++) {
        const bool needed = in_fixed_part(s, p);
        struct kv_ref *ref = vmem__kv_row(kv, slot, group, p);
        if (ref)
            vmem__kv_ref_hold(kv, ref, (struct kv_holders){.slots = -1, .users = -(int)needed});
        else
            kv->ledger.fixed -= needed ? kv->groups[group].n : 0;
    }
    if (from <= s->fix.lo && to > s->fix.lo)
        s->fix.lo = KV_MIN(to, s->fix.hi);
}

uint64_t vmem__kv_rows_left(vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    uint64_t n = s->fix.hi - s->fix.lo;
    for (uint32_t p = s->fix.lo; p < KV_MIN(s->fix.hi, s->shared_hi); p++) {
        struct kv_ref *ref = vmem__kv_row(kv, slot, group, p);
        n -= ref && (kv_row_see(kv, ref) != ref->users || kv_row_kept(ref));
    }
    return n;
}

uint32_t vmem__kv_span_shared(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    const struct kv_span *sp = kv_span(kv, slot, group);
    const vmem_page *pages = kv_table(kv, &kv->groups[group], slot, 0);
    const uint32_t end = KV_MIN(sp->hi, sp->shared_hi), ahead = 16;
    uint32_t n = 0;
    for (uint32_t p = sp->lo; p < end; p++) {
        if (end - p > ahead)
            expect(&kv->refs, pages[p + ahead]);
        n += vmem__kv_ref_find(&kv->refs, pages[p]) != NULL;
    }
    return n;
}

uint32_t vmem__kv_shared_tokens(const vmem_kv *kv, uint32_t slot)
{
    uint32_t *tokens = &kv->slots[slot].shared_tokens;
    uint64_t shared = 0;
    bool fell = false; // else a copy of a last, partial page stays counted, whatever is dropped elsewhere
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
        shared = KV_MAX(shared, (((uint64_t)sp->shared_hi << kv->page_shift) + row_bytes - 1) / row_bytes);
    }
    *tokens = fell ? (uint32_t)KV_MIN(*tokens, shared) : *tokens;
    return *tokens;
}
