// Steps that are staged request by request: each answer is what a step with all of it would say. With the checks of
// VMEM_KV_CHECK and without, where growth within the pages of the last step takes a shorter way.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 3

static vmem_context *ctx;
static vmem_kv *kv;

static struct vmem_kv_stats stats(void)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    return st;
}

static uint32_t tokens_of(uint32_t slot)
{
    struct vmem_kv_slot_info info = {.size = sizeof info};
    OK(vmem_kv_get_slot(kv, slot, &info));
    return info.tokens;
}

// 32 rows to a page, ten pages.
static void make(uint32_t flags)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .flags = flags,
                                       .tensors = &tensor,
                                       .n_tensors = 1,
                                       .slots = SLOTS,
                                       .max_tokens = 400,
                                       .page_size = test_page,
                                       .budget = 10 * test_page};
    OK(vmem_kv_create(ctx, &cfg, &kv));
}

static void test_grow(uint32_t flags)
{
    uint64_t missing, last;
    uint32_t slot;
    make(flags);
    ERR(vmem_kv_commit(kv), EINVAL, "no growth is staged");
    ERR(vmem_kv_grow(kv, 0, 1), EINVAL, "slot 0 is free");
    ERR(vmem_kv_grow(kv, SLOTS, 1), EINVAL, "slot 3 is out of range: the cache has 3 slots");
    for (uint32_t s = 0; s < SLOTS; s++)
        OK(k_alloc(kv, 0, &slot));
    OK(k_missing(vmem_kv_grow(kv, 0, 33), &missing));
    OK(k_missing(vmem_kv_grow(kv, 1, 100), &missing));
    OK(k_missing(vmem_kv_commit(kv), &missing));
    CHECK_EQ(stats().held_pages, 6);
    for (uint32_t n = 34; n <= 64; n++) { // within the second page
        missing = 99;
        OK(k_missing(vmem_kv_grow(kv, 0, n), &missing));
        CHECK_EQ(missing, 0);
        OK(k_missing(vmem_kv_commit(kv), &missing));
        CHECK_EQ(tokens_of(0), n);
        CHECK_EQ(stats().held_pages, 6);
    }
    ERR(vmem_kv_commit(kv), EINVAL, "no growth is staged");
    // Back and forth: the last word counts, and 0 takes it back.
    OK(vmem_kv_grow(kv, 0, 64));
    OK(vmem_kv_grow(kv, 0, 65));
    OK(vmem_kv_grow(kv, 0, 64));
    OK(vmem_kv_grow(kv, 1, 101));
    OK(vmem_kv_grow(kv, 1, 0));
    OK(vmem_kv_commit(kv));
    CHECK_EQ(stats().held_pages, 6);
    CHECK_EQ(tokens_of(1), 100);
    // One after another, until it does not fit with all that is staged.
    OK(vmem_kv_grow(kv, 0, 64));
    OK(vmem_kv_grow(kv, 1, 160));
    CHECK_EQ(k_missing(vmem_kv_grow(kv, 2, 160), &missing), -ENOMEM);
    CHECK_EQ(missing, 2);
    OK(vmem_kv_grow(kv, 2, 96));
    OK(vmem_kv_commit(kv));
    CHECK_EQ(stats().held_pages, 10);
    CHECK_EQ(k_missing(vmem_kv_grow(kv, 0, 65), &missing), -ENOMEM);
    CHECK_EQ(missing, 1);
    // A slot that is given up, swapped out or shortened is not staged any more.
    OK(vmem_kv_grow(kv, 0, 64));
    OK(vmem_kv_last_step(kv, &last));
    OK(vmem_kv_free(kv, 0, last));
    ERR(vmem_kv_grow(kv, 0, 64), EINVAL, "being given up");
    ERR(vmem_kv_commit(kv), EINVAL, "no growth is staged");
    OK(vmem_kv_retire(kv, last));
    OK(vmem_kv_grow(kv, 1, 160));
    OK(vmem_kv_truncate(kv, 1, 10, 0, 0));
    ERR(vmem_kv_commit(kv), EINVAL, "no growth is staged");
    OK(vmem_kv_grow(kv, 1, 11));
    OK(vmem_kv_commit(kv));
    CHECK_EQ(tokens_of(1), 11);
    // Nor is one that has taken part in a step: the commit would set it back.
    OK(vmem_kv_grow(kv, 1, 12));
    OK(vmem_kv_grow(kv, 2, 97));
    OK(vmem_kv_step(kv, (int32_t[SLOTS]){0, 40, 0}, SLOTS, 0));
    OK(vmem_kv_commit(kv));
    CHECK_EQ(tokens_of(1), 40);
    CHECK_EQ(tokens_of(2), 97);
    vmem_kv_destroy(kv, 0);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// What is staged is counted by what the slot has: a prefix that it begins with meanwhile takes no further page.
static void test_attached(void)
{
    const struct vmem_kv_request seven = {.tokens = 7 * 32};
    uint32_t first, slot;
    uint64_t prefix;
    size_t fit;
    make(VMEM_KV_CHECK);
    OK(k_alloc(kv, 0, &first));
    OK(vmem_kv_grow(kv, first, 32));
    OK(vmem_kv_commit(kv));
    OK(k_save(kv, first, 32, &prefix));
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_grow(kv, slot, 96));
    CHECK_EQ(vmem_kv_fit(kv, &seven, 1, &fit), -ENOMEM);
    OK(k_attach(kv, prefix, slot, 32, 0));
    OK(vmem_kv_fit(kv, &seven, 1, &fit));
    CHECK_EQ(fit, 1);
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_grow(kv, slot, 7 * 32));
    OK(vmem_kv_commit(kv));
    CHECK_EQ(stats().held_pages, 10);
    OK(k_drop(kv, prefix));
    vmem_kv_destroy(kv, 0);
}

// Rows that a staged step would write again are not shared: the commit would be refused, and the growth of every other
// request while memory is short.
static void test_staged_rows_are_not_shared(void)
{
    struct vmem_kv_run runs[] = {{.slot = 0, .tokens = 80, .priority = VMEM_KV_RUN_KEEP},
                                 {.slot = 0, .first = 80, .tokens = 1, .priority = VMEM_KV_RUN_KEEP}};
    struct vmem_kv_run_info info = {.size = sizeof info};
    uint32_t slot, tokens;
    make(VMEM_KV_CHECK);
    OK(k_alloc(kv, 0, &slot));
    CHECK_EQ(slot, 0);
    OK(vmem_kv_step(kv, (int32_t[SLOTS]){100, 0, 0}, SLOTS, 0));
    OK(vmem_kv_grow(kv, 0, 80));
    ERR(vmem_kv_share(kv, runs, 2, 0), EINVAL,
        "slot 0: a step to 80 tokens is staged, and rows up to 81 would be shared");
    OK(vmem_kv_share(kv, runs, 1, 0));
    OK(vmem_kv_get_run(kv, runs[0].id, &info));
    CHECK_EQ(info.requests, 1);
    OK(vmem_kv_commit(kv));
    CHECK_EQ(tokens_of(0), 80);
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_grow(kv, slot, 79));
    ERR(vmem_kv_attach(kv, slot, &runs[0].id, 1, UINT32_MAX, 0, &tokens), EINVAL, "a step to 79 tokens is staged");
    CHECK_EQ(tokens, 0);
    OK(vmem_kv_get_run(kv, runs[0].id, &info));
    CHECK_EQ(info.requests, 1);
    OK(vmem_kv_attach(kv, slot, &runs[0].id, 1, 79, 0, &tokens));
    CHECK_EQ(tokens, 79);
    OK(vmem_kv_commit(kv));
    CHECK_EQ(tokens_of(slot), 79);
    vmem_kv_destroy(kv, 0);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// A swapped request takes no page that staged growth was promised: it would be copied in, and out again.
static void test_swap_in_leaves_what_is_staged(uint32_t flags, bool fence)
{
    uint64_t bytes, missing, last;
    uint32_t slot;
    make(flags);
    OK(k_alloc(kv, 0, &slot));
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_step(kv, (int32_t[SLOTS]){160, 96, 0}, SLOTS, 0)); // 5 pages, and 3
    OK(k_swap_bytes(kv, slot, &bytes));
    char *host = malloc(bytes);
    OK(vmem_kv_last_step(kv, &last));
    OK(vmem_kv_swap_out(kv, slot, host, bytes, fence ? last : 0));
    if (fence)
        OK(vmem_kv_retire(kv, last)); // its pages count as free from here on, copied or not
    OK(vmem_kv_grow(kv, 0, 256));     // 8 pages
    CHECK_EQ(k_missing(vmem_kv_swap_in(kv, slot, NULL, 0, VMEM_KV_DRY), &missing), -ENOMEM);
    CHECK_EQ(missing, 1);
    CHECK_EQ(k_missing(vmem_kv_swap_in(kv, slot, host, bytes, 0), &missing), -ENOMEM);
    CHECK_EQ(missing, 1);
    CHECK_EQ(stats().short_budget, 1);
    CHECK_EQ(stats().swap_in_bytes, 0);
    OK(vmem_kv_grow(kv, 0, 224)); // 7 pages, and 3 are left
    OK(vmem_kv_swap_in(kv, slot, NULL, 0, VMEM_KV_DRY));
    OK(vmem_kv_swap_in(kv, slot, host, bytes, 0));
    OK(vmem_kv_commit(kv));
    CHECK_EQ(tokens_of(0), 224);
    OK(vmem_kv_step(kv, (int32_t[SLOTS]){224, 96, 0}, SLOTS, 0));
    vmem_kv_destroy(kv, 0);
    CHECK_EQ(test_stats(ctx).created, 0);
    free(host);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_grow(VMEM_KV_CHECK);
    test_grow(0);
    test_grow(VMEM_KV_LAZY);
    test_grow(VMEM_KV_DEFER | VMEM_KV_SAME_SLOTS);
    test_attached();
    test_staged_rows_are_not_shared();
    test_swap_in_leaves_what_is_staged(VMEM_KV_CHECK, false);
    test_swap_in_leaves_what_is_staged(VMEM_KV_CHECK | VMEM_KV_LAZY, false);
    for (int i = 0; i < 20; i++) { // the background thread copies sooner or later
        test_swap_in_leaves_what_is_staged(VMEM_KV_CHECK | VMEM_KV_OVERLAP, true);
        test_swap_in_leaves_what_is_staged(VMEM_KV_CHECK | VMEM_KV_OVERLAP | VMEM_KV_SAME_SLOTS, true);
    }
    vmem_context_destroy(ctx);
    return 0;
}
