// Swapping, and destroying behind a fence.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 3
#define TOKENS 1000

static vmem_context *ctx;
static vmem_kv *kv;
static uint64_t row_bytes;
static uint32_t slots[SLOTS];
static uint32_t window;
static char *host;

static uint32_t state(uint32_t slot) { return k_state(kv, slot); }

static int step(int32_t a, int32_t b, uint64_t *missing)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slots[0]] = a;
    lengths[slots[1]] = b;
    return k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), missing);
}

static uint64_t last(void)
{
    uint64_t step;
    OK(vmem_kv_last_step(kv, &step));
    return step;
}

// Two requests, of which the first has `tokens` tokens, each row with its number. The second tensor has a window.
static void begin(uint32_t flags, uint32_t tokens, uint64_t budget_rows)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = row_bytes}, {.row_bytes = row_bytes, .window = window}};
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = tensors, .n_tensors = 2, .slots = SLOTS,
                  .max_tokens = TOKENS, .budget = 2 * budget_rows * row_bytes, .steps_in_flight = 2);
    OK(k_alloc(kv, 0, &slots[0]));
    OK(k_alloc(kv, 0, &slots[1]));
    OK(step((int32_t)tokens, 1, NULL));
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t r = 0; r < tokens; r++)
            put_word(ctx, k_row(kv, t, slots[0], r), r + 1);
}

static void end(void)
{
    OK(vmem_kv_retire(kv, last()));
    vmem_kv_destroy(kv);
    free(host);
    host = NULL;
    CHECK_EQ(test_stats(ctx).created, 0);
}

// The rows that a request of so many tokens can read have their numbers.
static void look(uint32_t tokens)
{
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t r = t && window && tokens > window ? tokens - window : 0; r < tokens; r++)
            CHECK_EQ(get_word(ctx, k_row(kv, t, slots[0], r)), r + 1);
}

// Its pages are others' at once, and the rows come back to the same addresses.
static void test_there_and_back(uint32_t flags)
{
    const uint32_t tokens = 800;
    begin(flags, tokens, 1024);
    OK(step(800, 1, NULL));
    OK(k_swap_out(ctx, kv, slots[0], &host));
    CHECK_EQ(state(slots[0]), VMEM_KV_SWAPPED);
    CHECK_EQ(k_stats(kv).swapped_slots, 1);
    CHECK_EQ(page_at(ctx, k_row(kv, 0, slots[0], tokens - 1)), 0);
    OK(step(0, 999, NULL));
    ERR(step(801, 0, NULL), EINVAL, "but the slot is swapped out");
    ERR(vmem_kv_truncate(kv, slots[0], 5, 0), EINVAL, "is swapped out");
    OK(vmem_kv_free(kv, slots[1], 0));
    OK(k_swap_in(ctx, kv, slots[0], &host));
    const struct vmem_kv_slot_info info = k_slot(kv, slots[0]); // pages that windows have passed did not come back
    CHECK(info.needed_pages * test_page < (tokens + (window ? window : tokens)) * row_bytes + 3 * test_page);
    look(tokens);
    OK(vmem_kv_truncate(kv, slots[0], tokens, 0));
    OK(k_alloc(kv, 0, &slots[1]));
    OK(step((int32_t)tokens + 1, 1, NULL));
    end();
}

// Rows that a step has written since the copy began are not lost.
static void test_a_step_beside_the_copy(void)
{
    begin(VMEM_KV_DEFAULT, 100, 256);
    OK(step(0, 2, NULL));
    OK(step(0, 3, NULL)); // others' steps do not matter
    OK(vmem_kv_swap_out(kv, slots[0], 100, k_step(kv, 1)));
    OK(vmem_kv_swap_in(kv, slots[0]));
    OK(step(100, 3, NULL));
    ERR(vmem_kv_swap_out(kv, slots[0], 100, k_step(kv, 3)), EBUSY, "copied too early");
    OK(vmem_kv_truncate(kv, slots[0], 99, 0));
    ERR(vmem_kv_swap_out(kv, slots[0], 100, last()), EBUSY, "copied too early");
    CHECK_EQ(state(slots[0]), VMEM_KV_ACTIVE);
    OK(step(100, 3, NULL));
    end();
}

static void test_without_memory(void)
{
    uint64_t missing;
    begin(VMEM_KV_DEFAULT, 200, 256);
    OK(k_swap_out(ctx, kv, slots[0], &host));
    OK(step(0, 250, NULL));
    CHECK_EQ(k_missing(vmem_kv_swap_in(kv, slots[0]), &missing), -ENOMEM);
    CHECK_EQ(missing, 2 * (200 + 250 - 256));
    CHECK_EQ(k_stats(kv).short_budget, 1);
    CHECK_EQ(state(slots[0]), VMEM_KV_SWAPPED);
    OK(vmem_kv_free(kv, slots[1], 0));
    OK(k_swap_in(ctx, kv, slots[0], &host));
    look(200);
    end();
}

static void test_misuse(void)
{
    uint32_t first, to;
    begin(VMEM_KV_DEFAULT, 10, 64);
    ERR(vmem_kv_swap_out(kv, slots[0], 10, last() + 1), EINVAL, "has not been made yet; the last is ");
    ERR(vmem_kv_swap_out(kv, SLOTS, 10, last()), EINVAL, "slot 3 is out of range");
    ERR(vmem_kv_swap_in(kv, slots[0]), EINVAL, "is active");
    ERR(vmem_kv_get_rows(kv, slots[0], 2, &first, &to), EINVAL, "tensor 2 is out of range");
    ERR(vmem_kv_get_rows(kv, SLOTS, 0, &first, &to), EINVAL, "slot 3 is out of range");
    ERR(vmem_kv_get_rows(kv, slots[0], 0, NULL, &to), EINVAL, "must not be NULL");
    CHECK_EQ(state(slots[0]), VMEM_KV_ACTIVE);
    OK(step(0, 2, NULL));
    OK(step(0, 3, NULL));
    OK(vmem_kv_free(kv, slots[0], k_step(kv, 1))); // the next step ends it
    ERR(vmem_kv_swap_out(kv, slots[0], 10, last()), EINVAL, "is being given up");
    ERR(vmem_kv_get_rows(kv, slots[0], 0, &first, &to), EINVAL, "is being given up");
    ERR(step(11, 0, NULL), EINVAL, "is being given up");
    ERR(step(0, -1, NULL), EINVAL, "lengths");
    CHECK_EQ(state(slots[0]), K_ENDING); // what is no step ends nothing
    OK(step(0, 4, NULL));
    CHECK_EQ(state(slots[0]), VMEM_KV_FREE);
    OK(k_alloc(kv, 0, &slots[0]));
    ERR(vmem_kv_swap_out(kv, slots[0], 0, last()), EINVAL, "has no tokens");
    end();
}

// A request ends with the step that the kernel rule says so for, as with vmem_kv_retire.
static void test_steps_retire(void)
{
    begin(VMEM_KV_DEFAULT, 10, 64);
    OK(step(10, 2, NULL)); // 2
    OK(vmem_kv_free(kv, slots[0], last()));
    OK(step(0, 3, NULL)); // 3
    OK(step(0, 4, NULL)); // 4: kernels of 2 and 3 may run
    CHECK_EQ(state(slots[0]), K_ENDING);
    OK(step(0, 5, NULL)); // 5: those of 3 and 4
    CHECK_EQ(state(slots[0]), VMEM_KV_FREE);
    end();
}

// A step of another cache is refused by every call, and nothing has changed. A target and its draft are two such caches,
// whose kernels end at different times.
static void test_steps_of_another_cache(void)
{
    begin(VMEM_KV_DEFAULT, 100, 256);
    vmem_kv *const other = kv;
    const uint64_t others[] = {last(), last() - 1, k_step(kv, 0), 1, UINT64_MAX};
    begin(VMEM_KV_DEFAULT, 100, 256);
    const uint64_t before = k_step(kv, 0);
    CHECK(last() == before + 1 && last() >> 63 == 0);
    for (uint32_t i = 0; i < sizeof others / sizeof *others; i++) {
        ERR(vmem_kv_free(kv, slots[0], others[i]), EINVAL, "is no step of this cache; its last one is ");
        ERR(vmem_kv_truncate(kv, slots[0], 50, others[i]), EINVAL, "is no step of this cache");
        ERR(vmem_kv_swap_out(kv, slots[0], 100, others[i]), EINVAL, "is no step of this cache");
        ERR(vmem_kv_retire(kv, others[i]), EINVAL, "is no step of this cache");
    }
    look(100);
    OK(vmem_kv_free(kv, slots[1], last()));
    CHECK_EQ(state(slots[1]), K_ENDING); // nobody has retired it
    OK(vmem_kv_retire(kv, before - 1));  // a step before the first: a loop that is that far behind may say so
    CHECK_EQ(state(slots[1]), K_ENDING);
    vmem_kv_destroy(kv);
    kv = other;
    end();
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    row_bytes = test_page;
    test_there_and_back(VMEM_KV_DEFAULT);
    test_there_and_back(VMEM_KV_DEFER);
    test_a_step_beside_the_copy();
    test_without_memory();
    test_steps_retire();
    test_misuse();
    test_steps_of_another_cache();
    window = 100;
    test_there_and_back(VMEM_KV_DEFAULT);
    row_bytes = test_page / 8 + 16; // rows that lie across two pages
    test_there_and_back(0);
    vmem_context_destroy(ctx);
    return 0;
}
