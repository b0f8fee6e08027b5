// The memory behind a budget: devices that have less, several caches of one context, and processes without mappings.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "core/error.h"
#include "checked.h"
#include "kv.h"
#include "kv/kv.h"

#define SLOTS 4

static vmem_context *ctx;

// 32 rows to a page.
static vmem_kv *make(uint32_t flags, uint32_t n, uint64_t pages)
{
    const struct vmem_kv_tensor tensors[4] = {{.row_bytes = test_page / 32},
                                              {.row_bytes = test_page / 32},
                                              {.row_bytes = test_page / 32},
                                              {.row_bytes = test_page / 32}};
    return k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = tensors, .n_tensors = n, .slots = SLOTS,
                    .max_tokens = 4000, .budget = pages * test_page);
}

static int step(vmem_kv *kv, uint32_t slot, int32_t tokens, uint64_t *missing)
{
    int32_t lengths[SLOTS] = {0};
    uint64_t predicted;
    lengths[slot] = tokens;
    int expect = k_missing(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY), &predicted),
        rc = k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), missing);
    CHECK_EQ(rc, expect);
    CHECK(!missing || *missing == predicted);
    return rc;
}

// A device with memory for 100 pages under a budget of 1000: generosity gives way to need, and the answers know it.
static void test_a_device_with_less_than_the_budget(void)
{
    uint64_t missing;
    uint32_t slot;
    OK(vmem_set_budget(ctx, 100 * test_page));
    vmem_kv *kv = make(VMEM_KV_DEFER | VMEM_KV_GENEROUS | VMEM_KV_LAZY, 4, 1000);
    CHECK_EQ(k_stats(kv).free_pages, 100);
    OK(k_alloc(kv, 32, &slot));
    OK(step(kv, slot, 32, &missing)); // 4 pages; 4 blocks of 2 MiB would be more than there are
    CHECK(k_stats(kv).held_pages <= 100);
    CHECK_EQ(step(kv, slot, 26 * 32, &missing), -ENOMEM);
    CHECK_EQ(missing, 4);
    CHECK_EQ(k_shortage().reason, VMEM_KV_SHORT_OF_DEVICE);
    CHECK_EQ(k_stats(kv).short_device, 1);
    OK(step(kv, slot, 25 * 32, &missing));
    OK(vmem_kv_free(kv, slot, 0));
    // Kept pages give way, too.
    uint32_t other;
    struct vmem_kv_alloc_options o = {.size = sizeof o, .flags = VMEM_KV_ALLOC_SLOT, .slot = slot ^ 1};
    OK(vmem_kv_alloc(kv, &o, &other));
    OK(step(kv, other, 20 * 32, &missing));
    OK(vmem_set_budget(ctx, 0));
    CHECK_EQ(step(kv, other, 4000, &missing), 0);
    vmem_kv_destroy(kv);
}

static void test_every_cache_keeps_what_it_took_ahead(void)
{
    const uint64_t pages = 64 * MIB / test_page;
    vmem_kv *a = make(VMEM_KV_DEFER, 2, pages), *b = make(VMEM_KV_DEFER, 2, pages);
    const uint64_t both = test_stats(ctx).overhead; // with the backend's own
    CHECK(both >= 128 * MIB);
    OK(vmem_kv_reclaim(a, 0, 0, NULL));
    CHECK(test_stats(ctx).overhead >= 64 * MIB);
    CHECK(test_stats(ctx).overhead <= both - 64 * MIB);
    OK(vmem_kv_set_budget(a, 32 * MIB));
    CHECK(test_stats(ctx).overhead >= 96 * MIB);
    vmem_kv_destroy(a);
    CHECK(test_stats(ctx).overhead >= 64 * MIB);
    CHECK(test_stats(ctx).overhead <= both - 64 * MIB);
    uint32_t slot;
    OK(k_alloc(b, 0, &slot));
    OK(step(b, slot, 320, NULL));
    vmem_kv_destroy(b);
    CHECK(test_stats(ctx).overhead <= both - 128 * MIB);
}

// A budget that is exactly full takes nothing ahead, and gives nothing of another cache's back.
static void test_a_full_budget_leaves_the_others_theirs(void)
{
    const uint64_t pages = 64 * MIB / test_page;
    vmem_kv *a = make(VMEM_KV_DEFER, 2, pages), *b = make(VMEM_KV_DEFER, 2, pages);
    uint32_t slot;
    OK(k_alloc(a, 0, &slot));
    OK(step(a, slot, (int32_t)320, NULL));
    const uint64_t held = k_stats(a).held_pages;
    OK(vmem_kv_set_budget(a, held * test_page));
    CHECK_EQ(k_stats(a).budget_pages, k_stats(a).held_pages);
    CHECK(test_stats(ctx).overhead >= 64 * MIB);
    vmem_kv_destroy(a);
    vmem_kv_destroy(b);
}

static void test_the_reasons(void)
{
    uint64_t missing;
    uint32_t slot;
    vmem_kv *kv = make(VMEM_KV_DEFER, 2, 20);
    for (int i = 0; i < SLOTS; i++)
        OK(k_alloc(kv, 0, &slot));
    ERR(k_alloc(kv, 0, &slot), ENOSPC, "all 4 slots");
    CHECK_EQ(k_shortage().reason, VMEM_KV_SHORT_OF_SLOTS);
    OK(step(kv, 0, 10, &missing));
    CHECK_EQ(step(kv, 1, 500, &missing), -ENOMEM);
    CHECK(strstr(vmem_last_error(), "budget"));
    struct vmem_kv_shortage s = {.size = sizeof s};
    OK(vmem_kv_last_shortage(&s));
    CHECK(s.reason == VMEM_KV_SHORT_OF_BUDGET && s.missing_pages == missing && s.requests == 1);
    CHECK_EQ(k_stats(kv).short_budget, 1);
    CHECK_EQ(k_stats(kv).short_slots, 1);
    s.size = 7;
    ERR(vmem_kv_last_shortage(&s), EINVAL, "size");
    vmem_kv_destroy(kv);
}

// ---- vm.max_map_count -----------------------------------------------------------------------------------------

static uint64_t filler;
static size_t n_filler;

// Takes all mappings that the process may have. Single pages at every second address: none can be merged.
static void fill(unsigned limit)
{
    static struct vmem_map_op ops[1000]; // without mappings, the sanitizers' malloc has no memory
    vmem_page page[2];
    if (!filler)
        OK(vMemReserve(ctx, (uint64_t)limit * test_page, 0, &filler));
    OK(vMemCreate(ctx, test_page, 2, 0, page));
    for (size_t batch = COUNT(ops); batch;) {
        for (size_t i = 0; i < batch; i++)
            ops[i] = (struct vmem_map_op){filler + 2 * (n_filler + i) * test_page, page[i % 2]};
        if (vMemMapBatch(ctx, ops, batch, 0, NULL))
            batch /= 2;
        else
            n_filler += batch;
    }
}

static void test_no_mappings(void)
{
    unsigned limit = 0;
#ifdef __SANITIZE_THREAD__ // needs mappings of its own, and ends the process without
    const bool cpu = false;
#else
    const bool cpu = test_cpu();
#endif
    FILE *f = cpu ? fopen("/proc/sys/vm/max_map_count", "r") : NULL;
    if (!f || fscanf(f, "%u", &limit) != 1 || limit > 200000)
        limit = 0;
    if (f)
        fclose(f);
    if (!limit)
        return;
    uint64_t missing;
    uint32_t slot;
    vmem_kv *kv = make(VMEM_KV_DEFER, 2, 400);
    for (int i = 0; i < 2; i++)
        OK(k_alloc(kv, 0, &slot));
    for (int32_t n = 1; n <= 20; n++) { // physically one behind the other, so that every page is a mapping
        OK(step(kv, 0, 32 * n, &missing));
        OK(step(kv, 1, 32 * n, &missing));
    }
    OK(vmem_kv_free(kv, 1, 0));
    fill(limit);
    for (int32_t n = 21; n <= 30; n++) // the kept pages give their mappings
        OK(step(kv, 0, 32 * n, &missing));
    CHECK(k_stats(kv).kept_pages < 2 * 20);
    fill(limit);
    int32_t lengths[SLOTS] = {3200};
    CHECK_EQ(k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), &missing), -ENOMEM);
    CHECK_EQ(k_shortage().reason, VMEM_KV_SHORT_OF_MAPPINGS);
    CHECK(missing && strstr(vmem_last_error(), "vm.max_map_count"));
    CHECK_EQ(k_stats(kv).short_mappings, 1);
    // Ending the request is the way out, and it is one.
    OK(vmem_kv_free(kv, 0, 0));
    OK(k_alloc(kv, 0, &slot));
    OK(step(kv, slot, 64, &missing));
    OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, NULL));
    vmem_kv_destroy(kv);
    OK(vMemUnmap(ctx, filler, (uint64_t)limit * test_page));
    OK(vMemFree(ctx, filler));
}

// To cut the end off a request's mapping may take a mapping. What cannot be cut stays, and is no error: the next step has
// its pages.
static void test_reclaim_frees_what_it_can(void)
{
    uint64_t missing, freed = 1;
    uint32_t slot;
    if (test_page == VMEM_PAGE_2M)
        return; // a block is a page: nothing is mapped ahead
    vmem_kv *kv = make(VMEM_KV_GENEROUS, 2, 400);
    OK(k_alloc(kv, 0, &slot));
    OK(step(kv, slot, 32, &missing));
    const uint64_t ahead = k_stats(kv).ahead_pages;
    CHECK(ahead > 0);
    checked_fail_always(true);
    const int rc = vmem_kv_reclaim(kv, UINT64_MAX, 0, &freed);
    checked_fail_always(false);
    OK(rc);
    CHECK_EQ(freed, 0);
    CHECK_EQ(k_stats(kv).ahead_pages, ahead);
    OK(step(kv, slot, 64, &missing));
    OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, &freed));
    CHECK(freed > 0);
    vmem_kv_destroy(kv);
}

// A request gets whole blocks, which 2 MiB entries can map, although there are parts of blocks, too.
static void test_blocks_are_whole(void)
{
    vmem_page stray, page;
    uint64_t offset;
    uint32_t slot;
    if (strcmp(test_backend, "stock") || test_page != VMEM_PAGE_64K)
        return; // elsewhere memory is taken page by page, or every page is a block
    vmem_kv *kv = make(VMEM_KV_LAZY, 4, 1000);
    OK(vmem_trim(ctx, NULL));
    OK(vMemCreate(ctx, test_page, 1, 0, &stray)); // in the smallest arena, of 8 blocks
    OK(k_alloc(kv, 3072, &slot));
    OK(step(kv, slot, 3072, NULL)); // 3 blocks in each tensor
    for (uint32_t t = 0; t < 4; t++) {
        struct vmem_kv_layout l = {.size = sizeof l};
        OK(vmem_kv_get_layout(kv, t, &l));
        for (uint32_t b = 0; b < 3; b++) {
            struct vmem_page_info info = {.size = sizeof info};
            OK(vmem_query(ctx, l.addr + slot * l.slot_stride + b * VMEM_PAGE_2M, &page, &offset));
            OK(vmem_page_query(ctx, page, &info));
            CHECK_EQ(info.frame % 32, 0);
        }
    }
    OK(vMemRelease(ctx, stray));
    vmem_kv_destroy(kv);
}

// Where the pages of a request lie, on the host: what goes on in a block goes on behind its pages, and blocks are mapped
// as a whole.
static void test_pages_lie_together(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const int32_t block = (int32_t)(VMEM_PAGE_2M / test_page) * 32; // tokens
    uint32_t slots[3];
    vmem_kv *kv;
    if (!test_cpu())
        return;
    kv = k_create(ctx, .flags = VMEM_KV_CHECK, .tensors = &tensor, .n_tensors = 1, .slots = SLOTS,
                  .max_tokens = (uint32_t)block * 5, .budget = 200 * test_page);
    for (int i = 0; i < 3; i++) {
        OK(k_alloc(kv, 0, &slots[i]));
        OK(step(kv, slots[i], 32, NULL));
    }
    OK(vmem_kv_free(kv, slots[1], 0)); // leaves a hole of a page between those of the others
    OK(step(kv, slots[2], 64, NULL));
    const uint64_t unmapped = test_stats(ctx).unmap_runs;
    OK(vmem_kv_free(kv, slots[2], 0));
    CHECK_EQ(test_stats(ctx).unmap_runs - unmapped, 1);
    // The rest of the first block, three blocks, and what is behind them.
    OK(step(kv, slots[0], block - 32, NULL));
    const uint64_t mapped = test_stats(ctx).map_runs;
    OK(step(kv, slots[0], 4 * block + 96, NULL));
    CHECK_EQ(test_stats(ctx).map_runs - mapped, 3);
    vmem_kv_destroy(kv);
}

// ---- a device that is almost full --------------------------------------------------------------------------------

static const struct vmem__ops *inner;
static uint64_t left; // bytes of the device

static int little_memory(struct vmem__backend *b, uint64_t *total, uint64_t *free)
{
    const int rc = inner->memory(b, total, free);
    *free = left;
    return rc;
}

static int little_arena(struct vmem__backend *b, struct vmem__arena *a)
{
    if (a->size > left)
        return vmem__error(-ENOMEM, "no memory for an arena");
    left -= a->size;
    return inner->arena_new(b, a);
}

static void little_arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    left += a->size;
    inner->arena_free(b, a);
}

// A cache counts on a device's last bytes only as far as they make a block: an arena has no less.
static void test_a_device_with_part_of_a_block_left(void)
{
    struct vmem__ops ops = *ctx->b.ops;
    uint32_t slot;
    uint64_t missing;
    if (ops.populate || test_page == VMEM_PAGE_2M)
        return;
    inner = ctx->b.ops;
    ops.memory = little_memory;
    ops.arena_new = little_arena;
    ops.arena_free = little_arena_free;
    OK(vmem_trim(ctx, NULL));
    ctx->b.ops = &ops;
    left = 3 * MIB;
    ctx->device_free.at = 0; // what the other device said last does not count
    vmem_kv *kv = make(VMEM_KV_LAZY, 1, 1000);
    OK(k_alloc(kv, 0, &slot));
    CHECK_EQ(step(kv, slot, 33 * 32, &missing), -ENOMEM);
    CHECK_EQ(k_shortage().reason, VMEM_KV_SHORT_OF_DEVICE);
    CHECK_EQ(missing, 1);
    OK(step(kv, slot, 32 * 32, &missing));
    vmem_kv_destroy(kv);
    ctx->b.ops = inner;
}

static uint64_t asked;
static int (*ask_device)(struct vmem__backend *, uint64_t *, uint64_t *);

static int counted(struct vmem__backend *b, uint64_t *total, uint64_t *free)
{
    asked++;
    return ask_device(b, total, free);
}

// To ask the driver takes a hundred times as long as an answer. So its last word is good for a while, for a yes.
static void test_admission_seldom_asks_the_device(void)
{
    const struct vmem__ops *before = ctx->b.ops;
    struct vmem__ops ops = *before;
    ask_device = ops.memory;
    ops.memory = counted;
    ctx->b.ops = &ops;
    vmem_kv *kv = make(VMEM_KV_LAZY, 2, 400);
    uint32_t slots[SLOTS];
    for (uint32_t i = 0; i < SLOTS - 1; i++)
        OK(k_alloc(kv, 0, &slots[i]));
    const uint64_t begin = vmem__now(), asked_before = asked;
    for (uint32_t n = 32; n <= 32 * 60; n += 32) {
        int32_t lengths[SLOTS] = {0};
        for (uint32_t i = 0; i < SLOTS - 1; i++)
            lengths[slots[i]] = (int32_t)n;
        OK(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY));
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    }
    CHECK(asked - asked_before <= 2 + 2 * (vmem__now() - begin) / 100000000);
    // Nobody is refused by an old figure.
    CHECK_EQ(step(kv, slots[0], 3999, NULL), -ENOMEM); // of the budget
    vmem_kv_destroy(kv);
    ctx->b.ops = before;
}

// Where the memory is at hand, as pages that are kept, nothing is asked, however old the driver's last word is.
static void test_memory_at_hand_asks_nobody(void)
{
    const struct vmem__ops *before = ctx->b.ops;
    struct vmem__ops ops = *before;
    ask_device = ops.memory;
    ops.memory = counted;
    ctx->b.ops = &ops;
    vmem_kv *kv = make(VMEM_KV_LAZY | VMEM_KV_DEFER, 2, 2000);
    int32_t lengths[SLOTS] = {0};
    uint32_t slot, other;
    OK(k_alloc(kv, 0, &slot));
    OK(step(kv, slot, 32 * 60, NULL));
    OK(vmem_kv_free(kv, slot, 0));
    OK(k_alloc(kv, 32 * 60, &slot));
    OK(k_alloc(kv, 0, &other));
    ctx->device_free.at = 1; // long ago
    const uint64_t asked_before = asked;
    lengths[slot] = 32 * 40;
    lengths[other] = 32 * 10; // pages that are kept for the other slot can be had
    OK(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY));
    CHECK_EQ(asked, asked_before);
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    while (!k_alloc(kv, 0, &other)) // more than any backend takes at once
        lengths[other] = 32 * 124;
    OK(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY));
    CHECK(asked > asked_before);
    vmem_kv_destroy(kv);
    ctx->b.ops = before;
}

// "As much as there is" takes the kept pages of every tensor, and ends.
static void reclaim_all(void)
{
    vmem_context *own = test_context(0);
    const struct vmem_kv_tensor t[2] = {{.row_bytes = test_page}, {.row_bytes = test_page}};
    const int32_t lengths[1] = {32};
    vmem_kv *kv;
    uint32_t slot;
    uint64_t freed;
    kv = k_create(own, .flags = VMEM_KV_DEFER, .tensors = t, .n_tensors = 2, .slots = 1, .max_tokens = 64,
                  .budget = 128 * test_page);
    OK(vmem_kv_alloc(kv, NULL, &slot));
    OK(vmem_kv_step(kv, lengths, 1, 0));
    OK(vmem_kv_free(kv, slot, k_step(kv, 1)));
    OK(vmem_kv_retire(kv, k_step(kv, 1)));
    OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, &freed));
    CHECK_EQ(freed, 64 * test_page);
    vmem_kv_destroy(kv);
    vmem_context_destroy(own);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_a_device_with_less_than_the_budget();
    test_the_reasons();
    test_every_cache_keeps_what_it_took_ahead();
    test_a_full_budget_leaves_the_others_theirs();
    test_admission_seldom_asks_the_device();
    test_memory_at_hand_asks_nobody();
    test_no_mappings();
    test_reclaim_frees_what_it_can();
    test_blocks_are_whole();
    test_pages_lie_together();
    test_a_device_with_part_of_a_block_left();
    vmem_context_destroy(ctx);
    reclaim_all();
    return 0;
}
