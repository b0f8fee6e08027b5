// Sets of slots: a bit for each slot, and a bit for each word of these bits that is not 0. Lists that grow.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>

#include "kv/kv.h"

static uint64_t words_of(uint64_t bits) { return (bits + 63) / 64; }

int vmem__kv_make_sets(vmem_kv *kv)
{
    const uint64_t slots = words_of(kv->n_slots), words = words_of(slots);
    kv->bits = calloc((KV_LISTS + 1) * (slots + words), sizeof(*kv->bits));
    if (!kv->bits)
        return vmem__error(-ENOMEM, "no memory for %u slots", kv->n_slots);
    uint64_t *at = kv->bits;
    for (uint32_t i = 0; i <= KV_LISTS; i++, at += slots + words)
        *(i < KV_LISTS ? &kv->lists[i] : &kv->stale_slots) = (struct kv_set){at, at + slots};
    for (uint32_t s = 0; s < kv->n_slots; s++)
        vmem__kv_set_add(&kv->lists[0], s);
    return 0;
}

void vmem__kv_set_add(struct kv_set *set, uint32_t slot)
{
    const uint32_t word = slot / 64;
    set->slots[word] |= UINT64_C(1) << slot % 64;
    set->words[word / 64] |= UINT64_C(1) << word % 64;
}

void vmem__kv_set_remove(struct kv_set *set, uint32_t slot)
{
    const uint32_t word = slot / 64;
    set->slots[word] &= ~(UINT64_C(1) << slot % 64);
    if (!set->slots[word])
        set->words[word / 64] &= ~(UINT64_C(1) << word % 64);
}

// The first bit that is set, from there on; `size` if there is none among so many.
static uint32_t next_bit(const uint64_t *words, uint32_t from, uint32_t size)
{
    if (from >= size)
        return size;
    uint32_t i = from / 64;
    uint64_t bits = words[i] >> from % 64 << from % 64;
    while (!bits && ++i * 64 < size)
        bits = words[i];
    return bits ? i * 64 + (uint32_t)__builtin_ctzll(bits) : size;
}

uint32_t vmem__kv_set_next(const vmem_kv *kv, const struct kv_set *set, uint32_t from)
{
    if (from >= kv->n_slots)
        return KV_NO_SLOT;
    uint32_t word = from / 64;
    uint64_t bits = set->slots[word] >> from % 64 << from % 64;
    if (!bits) {
        const uint32_t n = (uint32_t)words_of(kv->n_slots);
        word = next_bit(set->words, word + 1, n);
        if (word == n)
            return KV_NO_SLOT;
        bits = set->slots[word];
    }
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

void vmem__kv_set_list(vmem_kv *kv, uint32_t slot, uint8_t list)
{
    vmem__kv_set_remove(&kv->lists[kv->slots[slot].list], slot);
    vmem__kv_set_add(&kv->lists[list], slot);
    kv->slots[slot].list = list;
}

// ---- lists ----------------------------------------------------------------------------------------------------------

int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size)
{
    if (n <= *cap)
        return 0;
    uint64_t want = MAX(n, *cap * 2);
    void *p = realloc(*(void **)array, want * size);
    if (!p)
        return vmem__error(-ENOMEM, "no memory for a list of %" PRIu64 " elements", want);
    *(void **)array = p;
    *cap = want;
    return 0;
}
