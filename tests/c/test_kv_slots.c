// Slots by the C interface: groups of tensors, tiles, and many slots. pyvmem's tests look at many more cases.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 4

static vmem_context *ctx;
static vmem_kv *kv;

static uint32_t start(uint32_t tokens)
{
    uint32_t slot;
    int32_t lengths[SLOTS] = {0};
    OK(k_alloc(kv, tokens, &slot));
    lengths[slot] = (int32_t)tokens;
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    return slot;
}

// A request that gives up shared rows lacks the rest of its tile.
static void test_memory_for_a_tile(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    uint64_t prefix;
    kv = k_create(ctx, .flags = VMEM_KV_CHECK, .tensors = &tensor, .n_tensors = 1, .slots = SLOTS, .max_tokens = 64,
                  .tile_rows = 64, .budget = 3 * test_page);
    const uint32_t slot = start(40);
    OK(k_save(kv, slot, 40, &prefix));
    OK(vmem_kv_truncate(kv, slot, 20, 0)); // one page is copied, the other is the prefix's alone
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = 20;
    CHECK_EQ(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY), -ENOMEM);
    OK(vmem_kv_set_budget(kv, 4 * test_page));
    lengths[slot] = 64;
    OK(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY));
    vmem_kv_destroy(kv);
}

// A caller from before the shortage knew what a pool may still give.
static void test_older_shortage(void)
{
    struct vmem_kv_shortage s = {.size = offsetof(struct vmem_kv_shortage, coming_pages), .coming_pages = 77};
    OK(vmem_kv_last_shortage(&s));
    CHECK_EQ(s.coming_pages, 77);
    s.size = 7;
    ERR(vmem_kv_last_shortage(&s), EINVAL, "out->size");
}

// 32 and 16 rows to a page; the second ends early.
static void test_groups(void)
{
    struct vmem_kv_layout layout = {.size = sizeof layout};
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = test_page / 32},
                                             {.row_bytes = test_page / 16, .max_tokens = 64},
                                             {.row_bytes = test_page / 32}};
    kv = k_create(ctx, .flags = VMEM_KV_CHECK, .tensors = tensors, .n_tensors = COUNT(tensors), .slots = SLOTS,
                  .max_tokens = 400, .budget = 30 * test_page);
    const uint32_t number = start(100);
    for (uint32_t t = 0; t < 3; t++) {
        OK(vmem_kv_get_layout(kv, t, &layout));
        CHECK_EQ(layout.group, t == 1);
    }
    const struct vmem_kv_slot_info slot = k_slot(kv, number);
    CHECK_EQ(slot.needed_pages, 8 + 4);
    OK(vmem_kv_free(kv, number, 0));
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// A request gets the first of the slots without pages, however many there are.
static void test_many_slots(void)
{
    enum { MANY = 5000 };
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page};
    const uint32_t freed[] = {4999, 4096, 64, 63, 0};
    vmem_kv *many;
    uint32_t slot;
    many = k_create(ctx, .tensors = &tensor, .n_tensors = 1, .slots = MANY, .max_tokens = 4, .budget = 8 * test_page);
    for (uint32_t i = 0; i < MANY; i++) {
        OK(vmem_kv_alloc(many, NULL, &slot));
        CHECK_EQ(slot, i);
    }
    CHECK_EQ(vmem_kv_alloc(many, NULL, &slot), -ENOSPC);
    for (size_t i = 0; i < COUNT(freed); i++)
        OK(vmem_kv_free(many, freed[i], 0));
    for (size_t i = COUNT(freed); i--;) {
        OK(vmem_kv_alloc(many, NULL, &slot));
        CHECK_EQ(slot, freed[i]);
    }
    CHECK_EQ(vmem_kv_alloc(many, NULL, &slot), -ENOSPC);
    vmem_kv_destroy(many);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_memory_for_a_tile();
    test_older_shortage();
    test_groups();
    test_many_slots();
    vmem_context_destroy(ctx);
    return 0;
}
