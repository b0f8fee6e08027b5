// Corners of the KV cache that random calls found: each was wrong once.
//
// SPDX-License-Identifier: MIT
#include "kv.h"
#include "kv/kv.h"

#define SLOTS 2

static vmem_context *ctx;
static vmem_kv *kv;

static void make(uint32_t flags, const struct vmem_kv_tensor *tensors, uint32_t n, uint64_t pages)
{
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = tensors, .n_tensors = n, .slots = SLOTS,
                  .max_tokens = 1000, .budget = pages * test_page);
}

static void end(void)
{
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

static void step(int32_t a, int32_t b)
{
    int32_t lengths[SLOTS] = {a, b};
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
}

static uint32_t alloc(uint32_t slot)
{
    struct vmem_kv_alloc_options o = {.size = sizeof o, .flags = VMEM_KV_ALLOC_SLOT, .slot = slot};
    uint32_t chosen;
    OK(vmem_kv_alloc(kv, &o, &chosen));
    return chosen;
}

// Shared rows are not written: neither by stepping back nor by a truncation behind a fence.
static void test_shared_rows_are_not_written(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 16};
    int32_t back[SLOTS] = {20, 0};
    uint64_t last, runs[3];
    uint32_t tokens;
    struct vmem_kv_slot_info info = {.size = sizeof info};
    make(0, &tensor, 1, 40);
    alloc(0);
    step(40, 0);
    put_word(ctx, k_row(kv, 0, 0, 30), 30);
    OK(vmem_kv_step(kv, back, SLOTS, 0)); // nobody has asked to share these rows
    step(40, 0);
    for (uint32_t i = 0; i < 3; i++) // the last two are of the same rows
        OK(k_hold(kv, 0, i ? 16 : 0, 16, &runs[i]));
    alloc(1);
    ERR(vmem_kv_step(kv, back, SLOTS, 0), EINVAL, "truncate the slot first");
    OK(vmem_kv_drop(kv, runs + 1, 2, NULL));
    OK(vmem_kv_get_slot(kv, 0, &info));
    CHECK_EQ(info.shared_tokens, 16);
    OK(vmem_kv_step(kv, back, SLOTS, 0)); // only the rows before these are shared now
    step(40, 0);
    OK(k_hold(kv, 0, 16, 16, &runs[1]));
    OK(vmem_kv_attach(kv, 1, runs, 2, UINT32_MAX, 0, &tokens));
    CHECK_EQ(tokens, 32);
    OK(vmem_kv_drop(kv, runs, 2, NULL)); // the other request has them
    ERR(vmem_kv_step(kv, back, SLOTS, 0), EINVAL, "truncate the slot first");
    OK(vmem_kv_last_step(kv, &last));
    ERR(vmem_kv_truncate(kv, 0, 20, last), EBUSY, "are shared");
    OK(vmem_kv_get_slot(kv, 0, &info));
    CHECK_EQ(info.tokens, 40);
    OK(vmem_kv_truncate(kv, 0, 32, last));
    OK(vmem_kv_truncate(kv, 0, 20, 0));
    step(40, 0);
    put_word(ctx, k_row(kv, 0, 0, 30), 31);
    CHECK_EQ(get_word(ctx, k_row(kv, 0, 1, 30)), 30);
    end();
}

// Nor are rows of a partial page that the request has copied, whatever is dropped elsewhere.
static void test_a_copied_row_stays_shared(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 16};
    uint64_t runs[2];
    make(0, &tensor, 1, 40);
    alloc(0);
    alloc(1);
    step(40, 0);
    OK(k_hold(kv, 0, 0, 36, &runs[0]));
    OK(k_attach(kv, runs[0], 1, 36, 0));
    OK(k_hold(kv, 0, 36, 4, &runs[1]));
    OK(vmem_kv_drop(kv, &runs[1], 1, NULL));
    const struct vmem_kv_slot_info info = k_slot(kv, 1);
    CHECK_EQ(info.shared_tokens, 36);
    ERR(vmem_kv_step(kv, (int32_t[SLOTS]){0, 34}, SLOTS, 0), EINVAL, "rows below 36 are shared");
    end();
}

// Pages that runs hold of a truncated request do not count as free: check and step agree.
static void test_runs_behind_a_request_are_not_free(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 16};
    uint64_t missing, runs[5];
    make(0, &tensor, 1, 12);
    alloc(0);
    alloc(1);
    step(160, 1);
    for (uint32_t i = 0; i < 5; i++)
        OK(k_hold(kv, 0, (5 + i) * 16, 16, &runs[i]));
    OK(vmem_kv_truncate(kv, 0, 80, 0));
    step(80, 1);
    step(80, 1);
    CHECK_EQ(k_missing(vmem_kv_step(kv, (int32_t[SLOTS]){80, 64}, SLOTS, VMEM_KV_DRY), &missing), -ENOMEM);
    CHECK_EQ(missing, 2);
    CHECK_EQ(k_missing(vmem_kv_step(kv, (int32_t[SLOTS]){80, 64}, SLOTS, 0), &missing), -ENOMEM);
    CHECK_EQ(missing, 2);
    OK(vmem_kv_drop(kv, runs, 2, NULL));
    OK(k_missing(vmem_kv_step(kv, (int32_t[SLOTS]){80, 64}, SLOTS, 0), &missing));
    end();
}

// A slot of 3 pages, of which a prefix holds all, beside 9 pages that another request left: all that the device has.
static uint64_t full_device(vmem_context **device)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    uint64_t prefix;
    *device = ctx;
    ctx = test_context(12 * test_page);
    make(VMEM_KV_DEFER | VMEM_KV_LAZY, &tensor, 1, 40);
    alloc(0);
    alloc(1);
    step(80, 0);
    put_word(ctx, k_row(kv, 0, 0, 69), 69);
    OK(k_save(kv, 0, 72, &prefix));
    step(0, 288);
    CHECK_EQ(test_stats(ctx).created, 12 * test_page);
    OK(vmem_kv_free(kv, 1, 0));
    return prefix;
}
static void end_full_device(vmem_context *device)
{
    vmem_kv_destroy(kv);
    vmem_context_destroy(ctx);
    ctx = device;
}

// Kept pages are taken back for a copy, too, where the device has no others.
static void test_attach_on_a_full_device(void)
{
    vmem_context *device;
    uint64_t prefix = full_device(&device), missing;
    OK(vmem_kv_free(kv, 0, 0));
    alloc(0);
    OK(k_missing(k_attach(kv, prefix, 0, 72, 0), &missing));
    CHECK_EQ(get_word(ctx, k_row(kv, 0, 0, 69)), 69);
    end_full_device(device);
}
static void test_truncate_on_a_full_device(void)
{
    vmem_context *device;
    full_device(&device);
    OK(vmem_kv_truncate(kv, 0, 70, 0));
    CHECK_EQ(get_word(ctx, k_row(kv, 0, 0, 69)), 69);
    end_full_device(device);
}

// A copy that the budget has no room for is not made, though the device has, and some page could be taken back.
static void test_truncate_on_a_full_budget(void)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = test_page / 32},
                                             {.row_bytes = test_page / 32},
                                             {.row_bytes = test_page / 16}};
    uint64_t prefix, missing;
    make(0, tensors, 3, 15);
    alloc(0);
    alloc(1);
    step(80, 20);
    OK(k_save(kv, 0, 72, &prefix));
    OK(vmem_kv_truncate(kv, 1, 10, 0)); // the third tensor's second page is ahead of need
    CHECK_EQ(k_missing(vmem_kv_truncate(kv, 0, 70, 0), &missing), -ENOMEM);
    CHECK_EQ(missing, 2);
    CHECK_EQ(test_stats(ctx).created, 15 * test_page);
    end();
}

// The first blocks of a request are also held by runs, which can be evicted once no request has them.
static void hold_by_runs(uint32_t slot, uint32_t blocks)
{
    struct vmem_kv_run runs[12];
    for (uint32_t i = 0; i < blocks; i++)
        runs[i] = (struct vmem_kv_run){slot, 16 * i, 16, 0, 0};
    OK(vmem_kv_share(kv, runs, blocks, 0));
    for (uint32_t i = 0; i < blocks; i++)
        CHECK(runs[i].id);
}

// A truncation that copies pages of several groups finds memory for all of them or copies none: not
// the first, after which the block that held the old page could be evicted for the second.
static void test_truncate_copies_all_groups_or_none(void)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 16}};
    uint64_t missing;
    make(0, tensors, 2, 20);
    alloc(0);
    step(80, 0);
    hold_by_runs(0, 5);
    const uint64_t held = k_stats(kv).held_pages;
    OK(vmem_kv_set_budget(kv, (held + 1) * test_page));
    CHECK_EQ(k_missing(vmem_kv_truncate(kv, 0, 40, 0), &missing), -ENOMEM);
    CHECK_EQ(missing, 1);
    CHECK_EQ(k_stats(kv).held_pages, held);
    OK(vmem_kv_set_budget(kv, (held + 2) * test_page));
    OK(vmem_kv_truncate(kv, 0, 40, 0));
    end();
}

// Over a budget that has shrunk, a request grows only within it, also into pages that are still mapped. Whoever has
// heard that there is memory finds it, whatever he gives back before the step.
static void test_over_the_budget_mapped_pages_are_no_promise(uint32_t flags, bool in_flight)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const int32_t more[SLOTS] = {193, 0}, most[SLOTS] = {192, 320}, all[SLOTS] = {320, 320};
    uint64_t missing, last;
    make(VMEM_KV_DEFER | flags, &tensor, 1, 40);
    alloc(0);
    alloc(1);
    step(320, 320);
    OK(vmem_kv_set_budget(kv, 16 * test_page));
    OK(vmem_kv_step(kv, all, SLOTS, VMEM_KV_DRY));
    step(320, 320);
    OK(vmem_kv_last_step(kv, &last));
    OK(vmem_kv_truncate(kv, 0, 158, in_flight ? last : 0));
    for (int32_t n = 159; n < 162 && in_flight; n++)
        step(MIN(n, 160), 320);
    // The 15 pages that are left are pinned. What is behind them is mapped.
    for (int gone = 0; gone < 2; gone++) {
        CHECK_EQ(k_missing(vmem_kv_step(kv, more, SLOTS, VMEM_KV_DRY), &missing), -ENOMEM);
        CHECK_EQ(missing, 1);
        CHECK_EQ(k_missing(vmem_kv_step(kv, more, SLOTS, 0), &missing), -ENOMEM);
        CHECK_EQ(missing, 1);
        OK(vmem_kv_step(kv, most, SLOTS, VMEM_KV_DRY));
        OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, NULL));
    }
    OK(vmem_kv_step(kv, most, SLOTS, 0));
    end();
}

// Over its budget, a step may have new pages for those that windows give up in it.
static void test_over_the_budget_windows_move_on(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32, .window = 64};
    const int32_t next[SLOTS] = {193, 194};
    make(0, &tensor, 1, 40);
    alloc(0);
    alloc(1);
    step(190, 191);
    step(191, 192);
    step(192, 193);
    OK(vmem_kv_set_budget(kv, 2 * test_page));
    const uint64_t held = k_stats(kv).held_pages;
    CHECK_EQ(held, 7);
    OK(vmem_kv_step(kv, next, SLOTS, VMEM_KV_DRY)); // a page more for slot 0, one less for slot 1
    OK(vmem_kv_step(kv, next, SLOTS, 0));
    CHECK_EQ(k_stats(kv).held_pages, held);
    CHECK_EQ(vmem_kv_step(kv, (int32_t[SLOTS]){0, 225}, SLOTS, 0), -ENOMEM);
    end();
}

// Rows that a window has passed are gone for truncations and steps, whether or not the thread has unmapped them. Rows
// that kernels in flight access are there.
static void test_no_answer_depends_on_the_thread(bool behind)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = test_page / 32},
                                             {.row_bytes = test_page / 32, .window = 70}};
    uint64_t last;
    make(VMEM_KV_DEFER | VMEM_KV_OVERLAP, tensors, 2, 40);
    if (behind) { // it unmaps nothing
        pthread_mutex_lock(&kv->gate.state);
        vmem__kv_worker_pause(kv);
        pthread_mutex_unlock(&kv->gate.state);
    }
    alloc(0);
    for (int32_t n = 192; n < 201; n += 2)
        step(n, 0); // kernels may access rows from 198 - 2 - 70 on, which are in the fourth page
    put_word(ctx, k_row(kv, 1, 0, 196), 196);
    if (!behind)
        OK(vmem_kv_wait(kv));
    OK(vmem_kv_last_step(kv, &last));
    for (uint64_t after = 0; after <= last; after += last)
        ERR(vmem_kv_truncate(kv, 0, 165, after), ENODATA, "tokens 165: the window has given up rows");
    const int32_t back[SLOTS] = {165, 0};
    ERR(vmem_kv_step(kv, back, SLOTS, VMEM_KV_DRY), EINVAL, "slot 0, 165 tokens: the window has given up rows");
    ERR(vmem_kv_step(kv, back, SLOTS, 0), EINVAL, "slot 0, 165 tokens: the window has given up rows");
    OK(vmem_kv_truncate(kv, 0, 198, last));
    OK(vmem_kv_truncate(kv, 0, 197, 0));
    step(198, 0);
    CHECK_EQ(get_word(ctx, k_row(kv, 1, 0, 196)), 196);
    if (behind) {
        pthread_mutex_lock(&kv->gate.state);
        vmem__kv_worker_resume(kv);
        pthread_mutex_unlock(&kv->gate.state);
    }
    end();
}

// A cache that takes device memory when it needs it leaves its neighbour in the context what that took ahead.
static void test_a_promise_holds_beside_a_lazy_cache(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 8};
    vmem_context *device = ctx;
    uint64_t missing, predicted;
    ctx = test_context(100 * test_page);
    make(0, &tensor, 1, 64);
    vmem_kv *strict = kv;
    make(VMEM_KV_LAZY | VMEM_KV_GENEROUS, &tensor, 1, 100);
    vmem_kv *lazy = kv;
    alloc(0);
    const int32_t much[SLOTS] = {8 * 40, 0}, fits[SLOTS] = {8 * 36, 0}, all[SLOTS] = {8 * 64, 0};
    CHECK_EQ(k_missing(vmem_kv_step(lazy, much, SLOTS, VMEM_KV_DRY), &predicted), -ENOMEM);
    CHECK_EQ(k_missing(vmem_kv_step(lazy, much, SLOTS, 0), &missing), -ENOMEM);
    CHECK_EQ(predicted, 4);
    CHECK_EQ(missing, 4);
    OK(vmem_kv_step(lazy, fits, SLOTS, 0));
    kv = strict;
    alloc(0);
    OK(vmem_kv_step(strict, all, SLOTS, VMEM_KV_DRY));
    OK(vmem_kv_step(strict, all, SLOTS, 0));
    vmem_kv_destroy(strict);
    vmem_kv_destroy(lazy);
    vmem_context_destroy(ctx);
    ctx = device;
}

// A request that ends behind a fence keeps what its kernels access. What it has ahead of that can be taken back as
// before, so that a check in advance was right.
static void test_what_ends_has_nothing_ahead(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const int32_t fits[SLOTS] = {0, 960}, longer[SLOTS] = {0, 1000};
    const uint64_t block = 2 * MIB / test_page;
    if (block != 32)
        return; // the lengths are for pages of 64 KiB
    make(VMEM_KV_GENEROUS, &tensor, 1, 40);
    alloc(0);
    alloc(1);
    step(10, 0);
    CHECK_EQ(k_stats(kv).held_pages, block);
    OK(vmem_kv_step(kv, fits, SLOTS, VMEM_KV_DRY));
    OK(vmem_kv_free(kv, 0, k_step(kv, 1)));
    CHECK_EQ(k_stats(kv).needed_pages, 1);
    CHECK_EQ(k_stats(kv).ahead_pages, block - 1);
    CHECK_EQ(k_stats(kv).free_pages, 39);
    OK(vmem_kv_set_budget(kv, 32 * test_page));
    CHECK_EQ(vmem_kv_step(kv, longer, SLOTS, VMEM_KV_DRY), -ENOMEM);
    const struct vmem_kv_shortage why = k_shortage();
    CHECK_EQ(why.missing_pages, 1);
    CHECK_EQ(why.ending_pages, 1);
    step(0, 960);
    end();
}

// A shortage names the first step after whose end there is enough: the memory of two requests that share their rows
// comes with the later of them.
static void test_a_shortage_names_the_step_to_wait_for(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const int32_t first[3] = {32 * 4}, both[3] = {32 * 4, 32 * 5}, second[3] = {0, 32 * 6}, third[3] = {0, 0, 32 * 9};
    struct vmem_kv_shortage why = {.size = sizeof why};
    uint64_t prefix;
    kv = k_create(ctx, .flags = VMEM_KV_CHECK, .tensors = &tensor, .n_tensors = 1, .slots = 3, .max_tokens = 1000,
                  .budget = 12 * test_page);
    alloc(0);
    OK(vmem_kv_step(kv, first, 3, 0));
    OK(k_save(kv, 0, 32 * 4, &prefix));
    alloc(1);
    OK(k_attach(kv, prefix, 1, 32 * 4, 0));
    OK(k_drop(kv, prefix));
    OK(vmem_kv_step(kv, both, 3, 0));
    OK(vmem_kv_step(kv, second, 3, 0));
    alloc(2);
    CHECK_EQ(vmem_kv_step(kv, third, 3, VMEM_KV_DRY), -ENOMEM);
    OK(vmem_kv_last_shortage(&why));
    CHECK_EQ(why.missing_pages, 3);
    CHECK_EQ(why.step, 0); // nobody ends
    OK(vmem_kv_free(kv, 1, k_step(kv, 3)));
    OK(vmem_kv_free(kv, 0, k_step(kv, 2)));
    CHECK_EQ(vmem_kv_step(kv, third, 3, VMEM_KV_DRY), -ENOMEM);
    OK(vmem_kv_last_shortage(&why));
    CHECK_EQ(why.missing_pages, 3);
    CHECK_EQ(why.ending_pages, 6); // the four shared rows once
    CHECK_EQ(why.step, k_step(kv, 3));
    OK(vmem_kv_retire(kv, k_step(kv, 2)));
    CHECK_EQ(vmem_kv_step(kv, third, 3, VMEM_KV_DRY), -ENOMEM);
    OK(vmem_kv_retire(kv, k_step(kv, 3)));
    OK(vmem_kv_step(kv, third, 3, VMEM_KV_DRY));
    end();
}

static void test_an_alloc_is_no_longer_than_a_slot(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    struct vmem_kv_alloc_options o = {.size = sizeof o, .prefix_tokens = 1001};
    uint32_t slot;
    make(0, &tensor, 1, 12);
    ERR(k_alloc(kv, 1001, &slot), EINVAL, "tokens 1001 is over max_tokens, 1000");
    ERR(vmem_kv_alloc(kv, &o, &slot), EINVAL, "prefix_tokens 1001 is over max_tokens, 1000");
    OK(k_alloc(kv, 1000, &slot));
    end();
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_a_shortage_names_the_step_to_wait_for();
    test_an_alloc_is_no_longer_than_a_slot();
    test_shared_rows_are_not_written();
    test_a_copied_row_stays_shared();
    test_runs_behind_a_request_are_not_free();
    test_attach_on_a_full_device();
    test_truncate_on_a_full_device();
    test_truncate_on_a_full_budget();
    test_truncate_copies_all_groups_or_none();
    for (int in_flight = 0; in_flight < 2; in_flight++) {
        test_over_the_budget_mapped_pages_are_no_promise(0, in_flight);
        test_over_the_budget_mapped_pages_are_no_promise(VMEM_KV_OVERLAP, in_flight);
    }
    test_over_the_budget_windows_move_on();
    test_no_answer_depends_on_the_thread(false);
    test_no_answer_depends_on_the_thread(true);
    test_a_promise_holds_beside_a_lazy_cache();
    test_what_ends_has_nothing_ahead();
    vmem_context_destroy(ctx);
    return 0;
}
