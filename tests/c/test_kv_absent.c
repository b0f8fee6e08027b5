// Requests that take no part in steps, by the C interface.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 3

static vmem_context *ctx;
static vmem_kv *kv;

static void make(uint32_t flags)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = &tensor, .n_tensors = 1, .slots = SLOTS,
                  .max_tokens = 400, .budget = 10 * test_page);
}

static void step(int32_t a, int32_t b, int32_t c)
{
    const int32_t lengths[SLOTS] = {a, b, c};
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
}

static void test_swapped_in(void)
{
    uint32_t slot;
    char *rows;
    make(0);
    OK(k_alloc(kv, 0, &slot));
    step(10, 0, 0);
    OK(k_swap_out(ctx, kv, slot, &rows));
    step(0, 0, 0);
    CHECK_EQ(k_state(kv, slot), VMEM_KV_SWAPPED);
    OK(k_swap_in(ctx, kv, slot, &rows));
    CHECK_EQ(k_slot(kv, slot).absent_steps, 0);
    vmem_kv_destroy(kv);
}

// Of many slots, one at a time takes part, whichever it is: it has its rows, the others are absent, and what belongs to
// no request is counted although no request is looked for there.
static void test_one_of_many(void)
{
    enum { MANY = 83 };
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 4};
    struct vmem_kv_stats st = {.size = sizeof st};
    int32_t lengths[MANY] = {0};
    uint32_t slot;
    kv = k_create(ctx, .flags = VMEM_KV_CHECK | VMEM_KV_LAZY | VMEM_KV_DEFER, .tensors = &tensor, .n_tensors = 1,
                  .slots = MANY, .max_tokens = 400, .budget = 4 * MANY * test_page);
    for (uint32_t s = 0; s < MANY; s++) {
        lengths[s] = 1;
        ERR(vmem_kv_step(kv, lengths, MANY, 0), EINVAL, "the slot is free");
        lengths[s] = 0;
    }
    for (uint32_t s = 0; s < MANY; s++)
        OK(vmem_kv_alloc(kv, NULL, &slot));
    for (uint32_t s = 0; s < MANY; s++) {
        lengths[s] = 5; // two pages
        OK(vmem_kv_step(kv, lengths, MANY, 0));
        lengths[s] = 0;
        CHECK_EQ(k_slot(kv, s).tokens, 5);
        CHECK_EQ(k_slot(kv, s).absent_steps, 0);
        OK(vmem_kv_get_stats(kv, &st));
        CHECK_EQ(st.absent_slots, MANY - 1);
        CHECK_EQ(st.needed_pages, 2 * (s + 1));
        CHECK_EQ(st.live_bytes, 5 * (s + 1) * tensor.row_bytes);
    }
    // While a slot's kernels have to end, a length that is wrong is found before anything ends.
    OK(vmem_kv_free(kv, 0, k_step(kv, MANY)));
    lengths[80] = 401;
    ERR(vmem_kv_step(kv, lengths, MANY, 0), EINVAL, "lengths[80] 401");
    lengths[80] = 0;
    for (uint32_t s = 1; s < MANY; s++)
        OK(vmem_kv_free(kv, s, 0));
    OK(vmem_kv_get_stats(kv, &st));
    CHECK_EQ(st.kept_pages + st.needed_pages, 2 * MANY);
    CHECK_EQ(st.active_slots, 0);
    vmem_kv_destroy(kv);
}

int main(int argc, char **argv)
{
    uint32_t slot;
    test_start(argc, argv);
    ctx = test_context(0);
    make(0);
    for (uint32_t i = 0; i < SLOTS; i++)
        OK(k_alloc(kv, 0, &slot));
    step(10, 10, 10);
    step(11, 10, 0);
    step(12, 11, 0);
    step(13, 11, 0);
    CHECK_EQ(k_slot(kv, 2).state, VMEM_KV_ACTIVE);
    CHECK_EQ(k_slot(kv, 0).absent_steps, 0);
    CHECK_EQ(k_slot(kv, 2).absent_steps, 3);
    OK(vmem_kv_free(kv, 2, k_step(kv, 1)));
    CHECK_EQ(k_slot(kv, 2).absent_steps, 0);
    OK(k_alloc(kv, 0, &slot)); // it had no step yet
    CHECK_EQ(k_slot(kv, slot).absent_steps, 0);
    vmem_kv_destroy(kv);
    test_swapped_in();
    CHECK_EQ(test_stats(ctx).created, 0);
    test_one_of_many();
    vmem_context_destroy(ctx);
    return 0;
}
