// Requests beside prefixes: what is kept of them, what counts as shared, and that a prefix which is gone leaves no
// trace.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 4

static vmem_context *ctx;
static vmem_kv *kv;

// 32 rows to a page; with a window, and a tensor without one beside it.
static void make(uint32_t flags, uint32_t window, uint64_t pages)
{
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 32, .window = window},
                                              {.row_bytes = test_page / 32}};
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = tensors, .n_tensors = window ? 1 : 2, .slots = SLOTS,
                  .max_tokens = 1000, .budget = pages * test_page);
}

static int step(uint32_t slot, int32_t tokens)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = tokens;
    return vmem_kv_step(kv, lengths, SLOTS, 0);
}

static uint32_t start(int32_t tokens)
{
    uint32_t slot;
    OK(k_alloc(kv, (uint32_t)tokens, &slot));
    OK(step(slot, tokens));
    return slot;
}

static uint32_t start_with(uint64_t prefix, uint32_t shared, uint32_t tokens)
{
    struct vmem_kv_alloc_options o = {.size = sizeof o, .tokens = tokens, .prefix_tokens = shared};
    uint32_t slot;
    OK(vmem_kv_alloc(kv, &o, &slot));
    OK(k_attach(kv, prefix, slot, shared, 0));
    OK(step(slot, (int32_t)tokens));
    return slot;
}

static void done(void)
{
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).reserved, 0);
}

// Freeing costs no call of the driver, and the next request with the prefix finds the pages behind it.
static void test_a_request_with_a_prefix_leaves_its_own_pages(void)
{
    uint64_t prefix;
    make(VMEM_KV_DEFER, 0, 200);
    uint32_t first = start(70);
    OK(k_save(kv, first, 64, &prefix));
    uint32_t slot = start_with(prefix, 64, 200);
    CHECK_EQ(k_stats(kv).held_pages, 2 * (3 + 5));
    uint64_t syscalls = test_stats(ctx).syscalls, held = k_stats(kv).held_pages;
    OK(vmem_kv_free(kv, slot, 0));
    CHECK_EQ(test_stats(ctx).syscalls, syscalls);
    CHECK_EQ(k_stats(kv).held_pages, held);
    CHECK_EQ(k_stats(kv).kept_pages, 2 * 5);
    CHECK_EQ(k_stats(kv).shared_pages, 2 * 2);
    uint64_t mapped = k_stats(kv).step_mapped_pages;
    CHECK_EQ(start_with(prefix, 64, 200), slot);
    CHECK_EQ(k_stats(kv).step_mapped_pages, mapped);
    CHECK_EQ(k_stats(kv).held_pages, held);

    // One without a prefix fills the place of what was shared; one too short for what is kept does without it.
    OK(vmem_kv_free(kv, slot, 0));
    OK(vmem_kv_free(kv, first, 0));
    uint32_t others[2] = {start(50), start(50)};
    CHECK_EQ(start(200), slot);
    CHECK_EQ(k_stats(kv).step_mapped_pages, mapped + 2 * (2 * 2) + 2 * 2);
    OK(vmem_kv_free(kv, slot, 0));
    slot = start_with(prefix, 64, 300);
    OK(vmem_kv_free(kv, slot, 0));
    OK(vmem_kv_free(kv, others[0], 0));
    OK(vmem_kv_free(kv, others[1], 0));
    for (int i = 0; i < SLOTS; i++)
        start(20);
    OK(k_drop(kv, prefix));
    done();
}

static void test_the_last_row_can_be_dropped_first(void)
{
    uint64_t prefix;
    make(VMEM_KV_DEFAULT, 0, 200);
    uint32_t first = start(70), slot;
    OK(k_save(kv, first, 64, &prefix));
    slot = start_with(prefix, 64, 64);
    OK(vmem_kv_free(kv, slot, 0));
    OK(vmem_kv_free(kv, first, 0));
    OK(k_drop(kv, prefix));
    OK(vmem_kv_wait(kv));
    CHECK_EQ(k_stats(kv).shared_pages, 0);
    start(400);
    done();
}

static void test_only_pages_of_several_holders_are_shared(void)
{
    uint64_t prefix;
    make(VMEM_KV_DEFER, 0, 200);
    uint32_t slot = start(64);
    OK(k_save(kv, slot, 64, &prefix));
    CHECK_EQ(k_stats(kv).shared_pages, 2 * 2);
    CHECK_EQ(k_stats(kv).prefix_pages, 0);
    OK(vmem_kv_free(kv, slot, 0));
    CHECK_EQ(k_stats(kv).shared_pages, 0);
    CHECK_EQ(k_stats(kv).prefix_pages, 2 * 2);
    OK(k_drop(kv, prefix));
    done();
}

// A prefix that was saved and dropped: the pages that the window has passed are to be had, and rows can be rewritten.
static void test_a_dropped_prefix_leaves_no_trace(void)
{
    uint64_t prefix;
    make(VMEM_KV_DEFER | VMEM_KV_OVERLAP, 64, 12);
    uint32_t slot = start(300);
    OK(k_save(kv, slot, 300, &prefix));
    OK(k_drop(kv, prefix));
    OK(step(slot, 310));
    OK(step(slot, 311));
    uint32_t other;
    OK(k_alloc(kv, 0, &other));
    CHECK_EQ(step(other, 9 * 32 + 1), -ENOMEM); // of 12 pages, the window needs 3
    OK(step(other, 9 * 32));
    OK(vmem_kv_free(kv, other, 0));
    OK(vmem_kv_free(kv, slot, 0));
    slot = start(300);
    OK(k_save(kv, slot, 300, &prefix));
    ERR(step(slot, 299), EINVAL, "shared");
    OK(k_drop(kv, prefix));
    OK(step(slot, 299));
    done();
}

// The last token may be computed once more where the window begins.
static void test_a_step_to_the_same_length(void)
{
    uint64_t prefix;
    char *host;
    make(VMEM_KV_DEFER, 64, 100);
    uint32_t slot = start(223);
    OK(step(slot, 224));
    OK(step(slot, 224 + 1));
    OK(k_save(kv, slot, 224, &prefix));
    uint32_t other = start_with(prefix, 224, 224);
    OK(step(other, 225));
    OK(vmem_kv_truncate(kv, slot, 224, 0));
    OK(k_swap_out(ctx, kv, slot, &host));
    OK(k_swap_in(ctx, kv, slot, &host));
    OK(step(slot, 224));
    done();
}

static void test_everything_can_be_reclaimed(void)
{
    uint64_t freed;
    make(VMEM_KV_DEFER, 0, 100);
    OK(vmem_kv_free(kv, start(320), 0));
    OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, &freed));
    CHECK_EQ(freed, 2 * 10 * test_page);
    done();
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_a_request_with_a_prefix_leaves_its_own_pages();
    test_the_last_row_can_be_dropped_first();
    test_only_pages_of_several_holders_are_shared();
    test_a_dropped_prefix_leaves_no_trace();
    test_a_step_to_the_same_length();
    test_everything_can_be_reclaimed();
    vmem_context_destroy(ctx);
    return 0;
}
