// Prefixes by hash, by the C interface: what is found, attached, evicted and reported. pyvmem's tests look at more cases.
//
// SPDX-License-Identifier: MIT
#include "kv.h"
#include "kv/calls/calls.h"

#define SLOTS 4
#define BLOCK 16

static vmem_context *ctx;
static vmem_kv *kv;

// 32 rows to a page.
static void make(uint64_t pages, uint32_t hash_flags, uint64_t max_tokens)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .flags = VMEM_KV_CHECK,
                                       .tensors = tensors,
                                       .n_tensors = COUNT(tensors),
                                       .slots = SLOTS,
                                       .max_tokens = 400,
                                       .page_size = test_page,
                                       .budget = pages * test_page};
    const struct vmem_kv_hash_config hashes = {.size = sizeof hashes,
                                               .flags = hash_flags,
                                               .block_tokens = BLOCK,
                                               .max_tokens = max_tokens};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(vmem_kv_hash_init(kv, &hashes));
}

static struct vmem_kv_stats stats(void)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    return st;
}

// Block i of sequence `which`.
static const struct vmem_kv_hash *hashes_of(unsigned which)
{
    static struct vmem_kv_hash hashes[400 / BLOCK];
    for (unsigned i = 0; i < COUNT(hashes); i++)
        snprintf((char *)hashes[i].bytes, sizeof hashes[i].bytes, "%u of %u", i, which);
    return hashes;
}

static uint32_t peek(unsigned which)
{
    uint32_t tokens;
    OK(vmem_kv_hash_peek(kv, hashes_of(which), 400 / BLOCK, &tokens));
    return tokens;
}

static uint32_t start(uint32_t tokens)
{
    uint32_t slot;
    int32_t lengths[SLOTS] = {0};
    OK(k_alloc(kv, tokens, &slot));
    lengths[slot] = (int32_t)tokens;
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    return slot;
}

static void add(uint32_t slot, unsigned which, size_t n)
{
    size_t added = 99;
    OK(vmem_kv_hash_add(kv, slot, 0, hashes_of(which), n, &added));
    CHECK_EQ(added, n);
    OK(vmem_kv_hash_add(kv, slot, 0, hashes_of(which), n, &added));
    CHECK_EQ(added, 0);
}

static void test_life(void)
{
    uint32_t tokens = 99, slot;
    uint64_t missing = 99, freed = 99;
    struct vmem_kv_hash gone[8];
    size_t got = 99;
    make(24, VMEM_KV_HASH_EVENTS, 0);
    CHECK_EQ(peek(1), 0);
    const uint32_t first = start(80); // 2 * 3 pages
    add(first, 1, 5);
    CHECK_EQ(peek(1), 80);
    CHECK_EQ(peek(2), 0);
    OK(vmem_kv_hash_peek(kv, hashes_of(1) + 1, 2, &tokens)); // at another place
    CHECK_EQ(tokens, 0);
    CHECK_EQ(stats().evictable_pages, 0);
    OK(vmem_kv_free(kv, first, 0));
    CHECK_EQ(stats().evictable_pages, 6);
    CHECK_EQ(stats().free_pages, 24);

    OK(k_alloc(kv, 100, &slot));
    OK(k_missing(vmem_kv_hash_attach(kv, slot, hashes_of(1), 3, 0, &tokens),
                 &missing)); // a page shared, half of one copied
    CHECK_EQ(tokens, 48);
    CHECK_EQ(missing, 0);
    CHECK_EQ(stats().copied_pages, 2);
    CHECK_EQ(stats().hit_tokens, 48);
    ERR(k_missing(vmem_kv_hash_attach(kv, slot, hashes_of(1), 3, 0, &tokens), &missing), EINVAL, "not newly allocated");
    CHECK_EQ(tokens, 0);
    OK(vmem_kv_free(kv, slot, 0));
    OK(k_alloc(kv, 100, &slot));
    OK(vmem_kv_hash_attach(kv, slot, hashes_of(2), 3, 0, &tokens)); // nothing is known
    CHECK_EQ(tokens, 0);
    OK(vmem_kv_free(kv, slot, 0));

    const uint32_t second = start(352); // 22 pages: two are left, of the first rows
    CHECK_EQ(peek(1), 32);
    OK(vmem_kv_hash_evicted(kv, gone, 2, &got));
    CHECK_EQ(got, 2);
    CHECK(!memcmp(gone, hashes_of(1) + 4, sizeof *gone)); // from the end of the sequence
    OK(vmem_kv_hash_evicted(kv, gone, COUNT(gone), &got));
    CHECK_EQ(got, 1);
    CHECK(!memcmp(gone, hashes_of(1) + 2, sizeof *gone));
    OK(vmem_kv_hash_evicted(kv, NULL, 0, &got));
    OK(vmem_kv_free(kv, second, 0));
    OK(vmem_kv_hash_drop(kv, NULL, 0, UINT64_MAX, VMEM_KV_NEXT, &freed));
    CHECK_EQ(freed, 2);
    CHECK_EQ(stats().hashed_blocks, 0);
    CHECK_EQ(stats().evicted_blocks, 5);
    vmem_kv_destroy(kv, 0);
    CHECK_EQ(test_stats(ctx).created, 0);
}

static void test_engines_order(void)
{
    int32_t lengths[SLOTS] = {0};
    uint64_t missing;
    uint32_t slot, tokens = 0;
    make(12, VMEM_KV_HASH_MANUAL, 0);
    for (unsigned i = 0; i < 2; i++) {
        slot = start(64);
        add(slot, i, 4);
        OK(vmem_kv_free(kv, slot, 0));
    }
    OK(k_alloc(kv, 128, &slot));
    lengths[slot] = 128; // 8 pages, and 4 are free
    CHECK_EQ(stats().free_pages, 4);
    CHECK_EQ(k_missing(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY), &missing), -ENOMEM);
    CHECK_EQ(missing, 4);
    CHECK_EQ(k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), &missing), -ENOMEM);
    CHECK_EQ(missing, 4);
    OK(k_missing(vmem_kv_hash_attach(kv, 0, hashes_of(0), 4, VMEM_KV_DRY, &tokens), &missing)); // only maps pages
    CHECK_EQ(tokens, 64);
    CHECK_EQ(missing, 0);
    OK(vmem_kv_hash_drop(kv, hashes_of(1), 6, UINT64_MAX, 0, NULL)); // unknown ones are skipped
    CHECK_EQ(peek(0), 64);
    CHECK_EQ(peek(1), 0);
    OK(k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), &missing));
    vmem_kv_destroy(kv, 0); // with blocks
    CHECK_EQ(test_stats(ctx).created, 0);
}

static void test_priorities(void)
{
    struct vmem_kv_hash gone[8];
    uint64_t freed;
    size_t got;
    make(24, VMEM_KV_HASH_EVENTS, 0);
    for (unsigned i = 0; i < 3; i++) {
        const uint32_t slot = start(64);
        add(slot, i, 4);
        OK(vmem_kv_free(kv, slot, 0));
    }
    OK(vmem_kv_hash_prioritize(kv, hashes_of(0), 2, VMEM_KV_HASH_KEEP)); // its first page
    OK(vmem_kv_hash_prioritize(kv, hashes_of(2), 6, 0));                 // unknown ones are skipped
    CHECK_EQ(stats().evictable_pages, 10);
    OK(vmem_kv_hash_drop(kv, NULL, 0, 1, VMEM_KV_NEXT, &freed)); // two blocks to a page
    CHECK_EQ(freed, 2);
    OK(vmem_kv_hash_evicted(kv, gone, 8, &got));
    CHECK_EQ(got, 2);
    CHECK(!memcmp(&gone[0], &hashes_of(2)[3], sizeof *gone));
    OK(vmem_kv_hash_drop(kv, hashes_of(0), 4, UINT64_MAX, VMEM_KV_UNUSED, &freed));
    CHECK_EQ(freed, 2);
    CHECK_EQ(peek(0), 32);
    OK(vmem_kv_hash_drop(kv, NULL, 0, 1, VMEM_KV_UNUSED, NULL));
    OK(vmem_kv_hash_drop(kv, NULL, 0, UINT64_MAX - 1, VMEM_KV_NEXT, &freed));
    CHECK_EQ(freed, 6);
    CHECK_EQ(stats().hashed_blocks, 2);
    ERR(vmem_kv_hash_prioritize(kv, hashes_of(0), 1, VMEM_KV_HASH_KEEP + 1), EINVAL, "priority 102 is over 101");
    ERR(vmem_kv_hash_prioritize(kv, NULL, 1, 0), EINVAL, "hashes must not be NULL");
    ERR(vmem_kv_hash_drop(kv, NULL, 1, 0, VMEM_KV_UNUSED, NULL), EINVAL, "hashes must not be NULL");
    OK(vmem_kv_hash_drop(kv, NULL, 0, UINT64_MAX, VMEM_KV_NEXT, &freed));
    CHECK_EQ(freed, 2);
    vmem_kv_destroy(kv, 0);
}

// One tensor with a window of two pages, and a background thread.
static void make_windowed(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32, .window = 64};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .flags = VMEM_KV_CHECK | VMEM_KV_OVERLAP,
                                       .tensors = &tensor,
                                       .n_tensors = 1,
                                       .slots = SLOTS,
                                       .max_tokens = 400,
                                       .page_size = test_page,
                                       .budget = 40 * test_page};
    const struct vmem_kv_hash_config hashes = {.size = sizeof hashes, .block_tokens = BLOCK};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(vmem_kv_hash_init(kv, &hashes));
}

// What is shared of a windowed tensor does not depend on whether somebody has already cut the rows that its window has
// passed: the background thread does so when it comes to it, and ranks would disagree.
static void test_rows_behind_a_window(bool cut, uint32_t *tokens, size_t *added)
{
    make_windowed();
    pthread_mutex_lock(&kv->gate.state);
    vmem__kv_worker_hold(kv); // for ever: it cuts nothing by itself
    pthread_mutex_unlock(&kv->gate.state);
    const uint32_t slot = start(320);
    for (int32_t n = 321; n < 324; n++) { // the window has passed most of the prompt
        int32_t lengths[SLOTS] = {0};
        lengths[slot] = n;
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    }
    if (cut)
        OK(vmem_kv_reclaim(kv, 40 * test_page, VMEM_KV_KEPT, NULL));
    uint64_t prefix;
    CHECK_EQ(vmem_kv_prefix_save(kv, slot, 96, &prefix), -ENODATA);
    OK(vmem_kv_hash_add(kv, slot, 0, hashes_of(0), 320 / BLOCK, added));
    *tokens = peek(0);
    pthread_mutex_lock(&kv->gate.state);
    vmem__kv_worker_release(kv);
    pthread_mutex_unlock(&kv->gate.state);
    vmem_kv_destroy(kv, 0);
}

static void test_sharing_does_not_depend_on_what_is_cut(void)
{
    uint32_t tokens[2];
    size_t added[2];
    for (int cut = 0; cut < 2; cut++)
        test_rows_behind_a_window(cut, &tokens[cut], &added[cut]);
    CHECK_EQ(tokens[0], tokens[1]);
    CHECK_EQ(added[0], added[1]);
    CHECK(added[0] < 320 / BLOCK);
}

// A truncation after which no kernel reads what the last step kept for the one before lets go of shared rows. Were they
// left to the background thread, the next call would find its work on the used pages (VMEM_KV_CHECK).
static void test_truncation_passes_windows(void)
{
    make_windowed();
    const uint32_t slot = start(80);
    for (int32_t n = 81; n < 200; n++) {
        int32_t lengths[SLOTS] = {0};
        lengths[slot] = n;
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
        OK(vmem_kv_hash_add(kv, slot, 0, hashes_of(3), (size_t)n / BLOCK, NULL));
        OK(vmem_kv_truncate(kv, slot, (uint32_t)n, 0, 0));
        pthread_mutex_lock(&kv->gate.state);
        const uint64_t used = kv->ledger.fixed;
        vmem__kv_worker_wake(kv);
        vmem__kv_wait_idle(kv);
        CHECK_EQ(kv->ledger.fixed, used);
        pthread_mutex_unlock(&kv->gate.state);
    }
    vmem_kv_destroy(kv, 0);
}

static void test_misuse(void)
{
    struct vmem_kv_hash_config c = {.size = sizeof c, .block_tokens = BLOCK};
    uint32_t tokens;
    make(24, 0, 64);
    ERR(vmem_kv_hash_init(kv, &c), EINVAL, "hashes already, of 16 tokens each");
    const uint32_t slot = start(100);
    size_t added;
    OK(vmem_kv_hash_add(kv, slot, 0, hashes_of(0), 6, &added));
    CHECK_EQ(added, 4); // the cap
    ERR(vmem_kv_hash_add(kv, slot, 0, hashes_of(0), 7, &added), EINVAL, "first 0, n 7: slot");
    CHECK_EQ(added, 0);
    ERR(vmem_kv_hash_add(kv, slot, UINT32_MAX, hashes_of(0), 1, NULL), EINVAL, "first 4294967295");
    ERR(vmem_kv_hash_add(kv, slot, 1, hashes_of(0), 1, NULL), EINVAL, "hashes[0] is that of block 0");
    ERR(vmem_kv_hash_add(kv, SLOTS, 0, hashes_of(0), 1, NULL), EINVAL, "slot 4 is out of range: the cache has 4 slots");
    ERR(vmem_kv_hash_add(kv, slot, 0, NULL, 1, NULL), EINVAL, "hashes must not be NULL");
    ERR(vmem_kv_hash_peek(kv, hashes_of(0), 1, NULL), EINVAL, "tokens must not be NULL");
    ERR(vmem_kv_hash_evicted(kv, NULL, 0, NULL), EINVAL, "got must not be NULL");
    ERR(vmem_kv_hash_limit(kv, 15), EINVAL, "max_tokens 15 is less than a block, 16");
    OK(vmem_kv_hash_limit(kv, 0));
    vmem_kv_destroy(kv, 0);

    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .tensors = &tensor,
                                       .n_tensors = 1,
                                       .slots = SLOTS,
                                       .max_tokens = 400,
                                       .page_size = test_page,
                                       .budget = 4 * test_page};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    ERR(vmem_kv_hash_peek(kv, hashes_of(0), 1, &tokens), EINVAL, "has no hashes yet");
    ERR(vmem_kv_hash_init(kv, NULL), EINVAL, "config must not be NULL");
    c.flags = 4;
    ERR(vmem_kv_hash_init(kv, &c), EINVAL, "flags 0x4 has unknown bits");
    c.flags = 0;
    c.block_tokens = 401;
    ERR(vmem_kv_hash_init(kv, &c), EINVAL, "block_tokens 401 is not between 1 and max_tokens, 400");
    c.block_tokens = 16;
    c.max_tokens = 1;
    ERR(vmem_kv_hash_init(kv, &c), EINVAL, "max_tokens 1 is less than a block");
    c.max_tokens = 0;
    c.size = 4;
    ERR(vmem_kv_hash_init(kv, &c), EINVAL, "size");
    vmem_kv_destroy(kv, 0);

    struct vmem_kv_config unshared = cfg;
    unshared.flags = VMEM_KV_UNSHARED;
    c.size = sizeof c;
    OK(vmem_kv_create(ctx, &unshared, &kv));
    ERR(vmem_kv_hash_init(kv, &c), EOPNOTSUPP, "VMEM_KV_UNSHARED");
    vmem_kv_destroy(kv, 0);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_life();
    test_engines_order();
    test_priorities();
    test_sharing_does_not_depend_on_what_is_cut();
    test_truncation_passes_windows();
    test_misuse();
    vmem_context_destroy(ctx);
    return 0;
}
