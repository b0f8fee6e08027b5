// Runs: what is found, attached, evicted and reported. Engines know blocks by hashes, and so does this test: it has the table
// from hashes to runs that they have. pyvmem's tests look at more cases.
//
// SPDX-License-Identifier: MIT
#include "kv.h"
#include "kv/kv.h"

#define SLOTS 4
#define BLOCK 16

static vmem_context *ctx;
static vmem_kv *kv;

// Block i of sequence `which`.
struct hash {
    char bytes[32];
};
static struct {
    struct hash hash;
    uint64_t run;
} table[200];
static size_t n_table;
static uint32_t share_flags, share_keep;

// The hash's run; 0: there is none. May be written.
static uint64_t *run_of(const struct hash *hash)
{
    size_t i = 0;
    while (i < n_table && memcmp(&table[i].hash, hash, sizeof *hash))
        i++;
    CHECK(i < COUNT(table));
    if (i == n_table) {
        n_table++;
        table[i].hash = *hash;
        table[i].run = 0;
    }
    return &table[i].run;
}

static const uint64_t *runs_of(const struct hash *hashes, size_t n)
{
    static uint64_t runs[400 / BLOCK];
    for (size_t i = 0; i < n; i++)
        runs[i] = *run_of(&hashes[i]);
    return runs;
}

static const struct hash *hashes_of(unsigned which)
{
    static struct hash hashes[400 / BLOCK];
    memset(hashes, 0, sizeof hashes);
    for (unsigned i = 0; i < COUNT(hashes); i++)
        snprintf(hashes[i].bytes, sizeof hashes[i].bytes, "%u of %u", i, which);
    return hashes;
}

// Shares the slot's blocks first, first + 1, ...; *added: how many are new.
static int hold(uint32_t slot, uint32_t first, const struct hash *hashes, size_t n, size_t *added)
{
    struct vmem_kv_run runs[400 / BLOCK];
    *added = 0;
    for (size_t i = 0; i < n; i++)
        runs[i] = (struct vmem_kv_run){slot, (first + (uint32_t)i) * BLOCK, BLOCK, share_keep, *run_of(&hashes[i])};
    int rc = vmem_kv_share(kv, runs, n, share_flags);
    for (size_t i = 0; i < n && !rc; i++) {
        *added += runs[i].id && runs[i].id != *run_of(&hashes[i]);
        *run_of(&hashes[i]) = runs[i].id;
    }
    return rc;
}

// 32 rows to a page.
static void create(uint64_t pages, uint32_t flags, const struct vmem_kv_tensor *tensors, uint32_t n)
{
    kv = k_create(ctx, .flags = VMEM_KV_CHECK | flags, .tensors = tensors, .n_tensors = n, .slots = SLOTS,
                  .max_tokens = 400, .budget = pages * test_page);
    n_table = share_flags = 0;
    share_keep = 0;
}

static void make(uint64_t pages, uint32_t flags)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    create(pages, 0, tensors, COUNT(tensors));
    share_flags = flags;
}

static uint32_t peek(unsigned which)
{
    uint32_t tokens;
    OK(vmem_kv_attach(kv, 0, runs_of(hashes_of(which), 400 / BLOCK), 400 / BLOCK, UINT32_MAX, VMEM_KV_LOOK, &tokens));
    return tokens;
}

static void step_to(uint32_t slot, uint32_t tokens)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = (int32_t)tokens;
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
}

static uint32_t start(uint32_t tokens)
{
    uint32_t slot;
    OK(k_alloc(kv, tokens, &slot));
    step_to(slot, tokens);
    return slot;
}

static void add(uint32_t slot, unsigned which, size_t n)
{
    size_t added = 99;
    OK(hold(slot, 0, hashes_of(which), n, &added));
    CHECK_EQ(added, n);
    OK(hold(slot, 0, hashes_of(which), n, &added));
    CHECK_EQ(added, 0);
}

static void test_life(void)
{
    uint32_t tokens = 99, slot;
    uint64_t missing = 99, freed = 99;
    uint64_t gone[8];
    size_t got = 99;
    make(24, VMEM_KV_RUN_REPORT);
    CHECK_EQ(peek(1), 0);
    const uint32_t first = start(80); // 2 * 3 pages
    add(first, 1, 5);
    CHECK_EQ(peek(1), 80);
    CHECK_EQ(peek(2), 0);
    OK(vmem_kv_attach(kv, 0, runs_of(hashes_of(1) + 1, 2), 2, UINT32_MAX, VMEM_KV_LOOK, &tokens)); // at another place
    CHECK_EQ(tokens, 0);
    CHECK_EQ(k_stats(kv).evictable_pages, 0);
    OK(vmem_kv_free(kv, first, 0));
    CHECK_EQ(k_stats(kv).evictable_pages, 6);
    CHECK_EQ(k_stats(kv).free_pages, 24);

    OK(k_alloc(kv, 100, &slot));
    const uint64_t *runs = runs_of(hashes_of(1), 3); // a page shared, half of one copied
    OK(k_missing(vmem_kv_attach(kv, slot, runs, 3, UINT32_MAX, 0, &tokens), &missing));
    CHECK_EQ(tokens, 48);
    CHECK_EQ(missing, 0);
    CHECK_EQ(k_stats(kv).copied_pages, 2);
    CHECK_EQ(k_stats(kv).hit_tokens, 48);
    ERR(k_missing(vmem_kv_attach(kv, slot, runs, 3, UINT32_MAX, 0, &tokens), &missing), EINVAL, "not newly allocated");
    CHECK_EQ(tokens, 0);
    OK(vmem_kv_free(kv, slot, 0));
    OK(k_alloc(kv, 100, &slot));
    OK(vmem_kv_attach(kv, slot, runs_of(hashes_of(2), 3), 3, UINT32_MAX, 0, &tokens)); // nothing is known
    CHECK_EQ(tokens, 0);
    OK(vmem_kv_free(kv, slot, 0));

    const uint32_t second = start(352); // 22 pages: two are left, of the first rows
    CHECK_EQ(peek(1), 32);
    OK(vmem_kv_evicted(kv, gone, 2, &got));
    CHECK_EQ(got, 2);
    CHECK_EQ(gone[0], *run_of(hashes_of(1) + 4)); // from the end of the sequence
    OK(vmem_kv_evicted(kv, gone, COUNT(gone), &got));
    CHECK_EQ(got, 1);
    CHECK_EQ(gone[0], *run_of(hashes_of(1) + 2));
    OK(vmem_kv_evicted(kv, NULL, 0, &got));
    OK(vmem_kv_free(kv, second, 0));
    OK(vmem_kv_evict(kv, UINT64_MAX, &freed));
    CHECK_EQ(freed, 2);
    CHECK_EQ(k_stats(kv).hashed_blocks, 0);
    CHECK_EQ(k_stats(kv).evicted_blocks, 5);
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// The engine decides itself which runs stay.
static void test_engines_order(void)
{
    int32_t lengths[SLOTS] = {0};
    uint64_t missing;
    uint32_t slot, tokens = 0;
    make(12, 0);
    share_keep = 1;
    for (unsigned i = 0; i < 2; i++) {
        slot = start(64);
        add(slot, i, 4);
        OK(vmem_kv_free(kv, slot, 0));
    }
    OK(k_alloc(kv, 128, &slot));
    lengths[slot] = 128; // 8 pages, and 4 are free
    CHECK_EQ(k_stats(kv).free_pages, 4);
    CHECK_EQ(k_missing(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY), &missing), -ENOMEM);
    CHECK_EQ(missing, 4);
    CHECK_EQ(k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), &missing), -ENOMEM);
    CHECK_EQ(missing, 4);
    const uint64_t *runs = runs_of(hashes_of(0), 4);
    OK(vmem_kv_attach(kv, 0, runs, 4, UINT32_MAX, VMEM_KV_LOOK, &tokens));
    CHECK_EQ(tokens, 64);
    OK(vmem_kv_drop(kv, runs_of(hashes_of(1), 6), 6, NULL)); // unknown ones are skipped
    CHECK_EQ(peek(0), 64);
    CHECK_EQ(peek(1), 0);
    OK(k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), &missing));
    vmem_kv_destroy(kv); // with blocks
    CHECK_EQ(test_stats(ctx).created, 0);
}

// Which runs can be evicted, and in which order.
static void test_kept_and_evictable(void)
{
    uint64_t gone[8];
    uint64_t freed;
    size_t got;
    make(24, VMEM_KV_RUN_REPORT);
    for (unsigned i = 3; i--;) {
        const uint32_t slot = start(64);
        share_keep = !i;
        OK(hold(slot, 0, hashes_of(i), 2, &got)); // its first page
        share_keep = 0;
        OK(hold(slot, 2, hashes_of(i) + 2, 2, &got));
        OK(vmem_kv_free(kv, slot, 0));
    }
    CHECK_EQ(k_stats(kv).evictable_pages, 10);
    OK(vmem_kv_evict(kv, 1, &freed)); // two blocks to a page
    CHECK_EQ(freed, 2);
    OK(vmem_kv_evicted(kv, gone, 8, &got));
    CHECK_EQ(got, 2);
    CHECK_EQ(gone[0], *run_of(&hashes_of(2)[3]));
    OK(vmem_kv_drop(kv, runs_of(hashes_of(0) + 2, 2), 2, &freed));
    CHECK_EQ(freed, 2);
    CHECK_EQ(peek(0), 32);
    OK(vmem_kv_drop(kv, NULL, 0, NULL));
    OK(vmem_kv_evict(kv, UINT64_MAX, &freed));
    CHECK_EQ(freed, 6);
    CHECK_EQ(k_stats(kv).hashed_blocks, 2);
    const uint64_t *kept = runs_of(hashes_of(0), 2);
    ERR(vmem_kv_drop(kv, NULL, 1, NULL), EINVAL, "runs must not be NULL");
    OK(vmem_kv_evict(kv, UINT64_MAX, &freed)); // they are to be kept
    CHECK_EQ(freed, 0);
    OK(vmem_kv_drop(kv, kept, 2, &freed));
    CHECK_EQ(freed, 2);
    vmem_kv_destroy(kv);
}

// Runs that a request pins, but no longer has the rows of, are evicted while no other can be. Those to be kept stay.
static void test_kept_runs_stay_beside_pinned_ones(void)
{
    uint64_t freed;
    make(24, 0);
    share_keep = 1;
    uint32_t slot = start(64);
    add(slot, 0, 4);
    OK(vmem_kv_free(kv, slot, 0));
    share_keep = 0;
    slot = start(64);
    add(slot, 1, 4);
    OK(vmem_kv_truncate(kv, slot, 32, 0));
    CHECK_EQ(k_stats(kv).evictable_pages, 2);
    OK(vmem_kv_evict(kv, UINT64_MAX, &freed));
    CHECK_EQ(freed, 2);
    CHECK_EQ(peek(0), 64);
    CHECK_EQ(peek(1), 32);
    vmem_kv_destroy(kv);
}

// One tensor with a window of two pages, and a background thread.
static void make_windowed(void)
{
    create(40, VMEM_KV_OVERLAP, &(struct vmem_kv_tensor){.row_bytes = test_page / 32, .window = 64}, 1);
}

// The shared rows of a windowed tensor do not depend on whether rows that its window has passed are already cut. The
// background thread cuts them at any time, and ranks would disagree.
static void test_rows_behind_a_window(bool cut, uint32_t *tokens, size_t *added)
{
    make_windowed();
    pthread_mutex_lock(&kv->gate.state);
    vmem__kv_worker_pause(kv); // for ever: it cuts nothing by itself
    pthread_mutex_unlock(&kv->gate.state);
    const uint32_t slot = start(320);
    for (int32_t n = 321; n < 324; n++) { // the window has passed most of the prompt
        int32_t lengths[SLOTS] = {0};
        lengths[slot] = n;
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    }
    if (cut)
        OK(vmem_kv_reclaim(kv, 40 * test_page, 0, NULL));
    uint64_t prefix;
    CHECK_EQ(k_save(kv, slot, 96, &prefix), -ENODATA);
    OK(hold(slot, 0, hashes_of(0), 320 / BLOCK, added));
    *tokens = peek(0);
    pthread_mutex_lock(&kv->gate.state);
    vmem__kv_worker_resume(kv);
    pthread_mutex_unlock(&kv->gate.state);
    vmem_kv_destroy(kv);
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
        size_t added;
        OK(hold(slot, 0, hashes_of(3), (size_t)n / BLOCK, &added));
        OK(vmem_kv_truncate(kv, slot, (uint32_t)n, 0));
        pthread_mutex_lock(&kv->gate.state);
        const uint64_t used = kv->ledger.pinned_pages;
        vmem__kv_worker_wake(kv);
        vmem__kv_wait_idle(kv);
        CHECK_EQ(kv->ledger.pinned_pages, used);
        pthread_mutex_unlock(&kv->gate.state);
    }
    vmem_kv_destroy(kv);
}

// A request begins with `most` tokens of runs which fill the cache, each of 16 rows but the last, of 8.
static int begin_in_a_full_cache(uint32_t window, uint32_t rows_per_run, uint32_t most)
{
    uint64_t runs[3];
    uint32_t n = 0, slot, tokens;
    create(3, 0, &(struct vmem_kv_tensor){.row_bytes = test_page / 16, .window = window}, 1);
    OK(k_alloc(kv, 0, &slot));
    for (uint32_t end = rows_per_run; end < 40 + rows_per_run; end += rows_per_run, n++) {
        step_to(slot, end < 40 ? end : 40);
        struct vmem_kv_run r = {.slot = slot, .first = n * rows_per_run};
        r.tokens = (end < 40 ? end : 40) - r.first;
        OK(vmem_kv_share(kv, &r, 1, 0));
        runs[n] = r.id;
    }
    OK(vmem_kv_free(kv, slot, 0));
    CHECK_EQ(k_stats(kv).evictable_pages, 3);
    OK(k_alloc(kv, 0, &slot));
    const int rc = vmem_kv_attach(kv, slot, runs, n, most, 0, &tokens);
    CHECK_EQ(tokens, rc ? 0 : most);
    OK(vmem_kv_free(kv, slot, 0));
    OK(vmem_kv_evict(kv, UINT64_MAX, NULL));
    CHECK_EQ(k_stats(kv).held_pages, 0);
    vmem_kv_destroy(kv);
    return rc;
}

// Memory for the copy of a partial page comes from runs that the request does not read, even if it begins behind them. The
// others stay until it has begun, whole.
static void test_runs_make_room_for_their_own_request(void)
{
    CHECK_EQ(begin_in_a_full_cache(16, 16, 40), 0);
    CHECK_EQ(begin_in_a_full_cache(16, 16, 33), 0);
    CHECK_EQ(begin_in_a_full_cache(0, 16, 40), -ENOMEM); // it reads all
    CHECK_EQ(begin_in_a_full_cache(0, 40, 8), -ENOMEM);  // they are one run
    CHECK_EQ(begin_in_a_full_cache(0, 16, 16), 0);       // nothing is copied
}

// Two runs have the second of three pages. The copy of the last one fits beside them.
static void test_a_page_of_two_runs_counts_once(void)
{
    uint64_t runs[2];
    uint32_t slot, tokens;
    create(4, 0, &(struct vmem_kv_tensor){.row_bytes = test_page / 16}, 1);
    OK(k_alloc(kv, 0, &slot));
    step_to(slot, 40);
    for (uint32_t i = 0; i < 2; i++) {
        struct vmem_kv_run run = {.slot = slot, .first = 24 * i, .tokens = i ? 16 : 24};
        OK(vmem_kv_share(kv, &run, 1, 0));
        runs[i] = run.id;
    }
    OK(vmem_kv_free(kv, slot, 0));
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_attach(kv, slot, runs, 2, 36, 0, &tokens));
    CHECK_EQ(tokens, 36);
    vmem_kv_destroy(kv);
}

// To wait for the kernels of a request that ends helps nobody who begins with its rows: their pages stay.
static void test_a_shortage_waits_for_other_pages(void)
{
    struct vmem_kv_shortage shortage = {.size = sizeof shortage};
    uint32_t writer, other, slot, tokens;
    create(4, 0, &(struct vmem_kv_tensor){.row_bytes = test_page / 16}, 1);
    OK(k_alloc(kv, 0, &writer));
    step_to(writer, 40);
    struct vmem_kv_run run = {.slot = writer, .tokens = 40};
    OK(vmem_kv_share(kv, &run, 1, 0));
    OK(vmem_kv_free(kv, writer, k_step(kv, 1)));
    OK(k_alloc(kv, 0, &other));
    step_to(other, 16);
    OK(k_alloc(kv, 0, &slot));
    CHECK_EQ(vmem_kv_attach(kv, slot, &run.id, 1, UINT32_MAX, 0, &tokens), -ENOMEM); // a page is copied
    OK(vmem_kv_last_shortage(&shortage));
    CHECK_EQ(shortage.step, 0);
    OK(vmem_kv_free(kv, other, k_step(kv, 2)));
    CHECK_EQ(vmem_kv_attach(kv, slot, &run.id, 1, UINT32_MAX, 0, &tokens), -ENOMEM);
    OK(vmem_kv_last_shortage(&shortage));
    CHECK_EQ(shortage.step, k_step(kv, 2));
    CHECK_EQ(shortage.ending_pages, 1);
    OK(vmem_kv_retire(kv, shortage.step));
    OK(vmem_kv_attach(kv, slot, &run.id, 1, UINT32_MAX, 0, &tokens));
    CHECK_EQ(tokens, 40);
    vmem_kv_destroy(kv);
}

static void test_misuse(void)
{
    struct vmem_kv_run run = {.tokens = BLOCK}, *r = &run;
    struct vmem_kv_run_info info = {.size = sizeof info};
    uint32_t tokens = 99;
    make(24, 0);
    const uint32_t slot = start(100);
    ERR(vmem_kv_share(kv, &(struct vmem_kv_run){.slot = slot, .first = 90, .tokens = 11}, 1, 0), EINVAL,
        "runs[0]: 11 rows from row 90 on: slot 0 has 100");
    ERR(vmem_kv_share(kv, &(struct vmem_kv_run){.first = UINT32_MAX, .tokens = 1}, 1, 0), EINVAL,
        "from row 4294967295");
    ERR(vmem_kv_share(kv, &(struct vmem_kv_run){.first = 3}, 1, 0), EINVAL, "0 rows");
    ERR(vmem_kv_share(kv, &(struct vmem_kv_run){.slot = SLOTS, .tokens = 1}, 1, 0), EINVAL,
        "slot 4 is out of range: the cache has 4 slots");
    ERR(vmem_kv_share(kv, &(struct vmem_kv_run){.tokens = 1, .keep = 2}, 1, 0), EINVAL,
        "runs[0].keep 2 is neither 0 nor 1");
    ERR(vmem_kv_share(kv, r, 1, 2), EINVAL, "flags 0x2 has unknown bits");
    ERR(vmem_kv_share(kv, NULL, 1, 0), EINVAL, "runs must not be NULL");
    struct vmem_kv_run two[2] = {run, {.tokens = 101}}; // all or none
    ERR(vmem_kv_share(kv, two, 2, 0), EINVAL, "runs[1]: 101 rows");
    CHECK_EQ(k_stats(kv).prefixes, 0);
    OK(vmem_kv_share(kv, r, 1, 0));
    CHECK(run.id);
    CHECK_EQ(k_stats(kv).prefixes, 1);
    ERR(vmem_kv_share(kv, &(struct vmem_kv_run){.first = 1, .tokens = BLOCK, .id = run.id}, 1, 0), EINVAL,
        "runs[0].id is of 16 rows from row 0 on");
    ERR(vmem_kv_attach(kv, slot, &run.id, 1, UINT32_MAX, VMEM_KV_LOOK, NULL), EINVAL, "tokens must not be NULL");
    ERR(vmem_kv_attach(kv, slot, NULL, 1, UINT32_MAX, VMEM_KV_LOOK, &tokens), EINVAL, "runs must not be NULL");
    ERR(vmem_kv_attach(kv, slot, &run.id, 1, UINT32_MAX, VMEM_KV_LOOK * 2, &tokens), EINVAL, "unknown bits");
    OK(vmem_kv_attach(kv, slot, &run.id, 1, 5, VMEM_KV_LOOK, &tokens)); // a part of it
    CHECK_EQ(tokens, 5);
    ERR(vmem_kv_evicted(kv, NULL, 0, NULL), EINVAL, "got must not be NULL");
    OK(vmem_kv_get_run(kv, run.id, &info));
    CHECK(info.tokens == BLOCK && info.requests == 1 && info.pages == 2 && !info.own_pages);
    ERR(vmem_kv_get_run(kv, run.id, NULL), EINVAL, "out must not be NULL");
    OK(k_drop(kv, run.id));
    OK(k_drop(kv, run.id)); // skipped
    ERR(vmem_kv_get_run(kv, run.id, &info), EINVAL, "has no run");
    OK(vmem_kv_attach(kv, slot, &run.id, 1, UINT32_MAX, VMEM_KV_LOOK, &tokens));
    CHECK_EQ(tokens, 0);
    vmem_kv_destroy(kv);
}

// A run of another cache is refused by every call, and this cache's run of the same place stays what it is. A target and
// its draft are two such caches.
static void test_runs_of_another_cache(void)
{
    struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    vmem_kv *caches[2];
    uint64_t runs[2], freed = 7;
    uint32_t slot, tokens = 9;
    for (int i = 0; i < 2; i++) {
        create(40, VMEM_KV_DEFER, &tensor, 1);
        caches[i] = kv;
        OK(k_alloc(kv, 64, &slot));
        step_to(slot, 64);
        struct vmem_kv_run run = {.slot = slot, .tokens = 64};
        OK(vmem_kv_share(kv, &run, 1, 0));
        runs[i] = run.id;
    }
    CHECK(runs[0] != runs[1] && runs[0] >> 63 == 0);
    const uint64_t mixed[] = {runs[1], runs[0]};
    struct vmem_kv_run again = {.slot = slot, .tokens = 64, .id = runs[0]};
    struct vmem_kv_run_info info = {.size = sizeof info};
    ERR(vmem_kv_share(kv, &again, 1, 0), EINVAL, "runs[0].id");
    ERR(vmem_kv_drop(kv, mixed, 2, &freed), EINVAL, "runs[1]");
    CHECK_EQ(freed, 0);
    ERR(vmem_kv_get_run(kv, runs[0], &info), EINVAL, "another");
    OK(k_alloc(kv, 64, &slot));
    ERR(vmem_kv_attach(kv, slot, &runs[0], 1, 64, 0, &tokens), EINVAL, "runs[0]");
    ERR(vmem_kv_attach(kv, 0, &runs[0], 1, 64, VMEM_KV_LOOK, &tokens), EINVAL, "runs[0]");
    OK(vmem_kv_get_run(kv, runs[1], &info));
    CHECK(info.tokens == 64 && !info.keep);
    vmem_kv_destroy(caches[0]);
    ERR(vmem_kv_drop(kv, &runs[0], 1, NULL), EINVAL, "runs[0]"); // which has gone
    vmem_kv_destroy(caches[1]);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    test_life();
    test_engines_order();
    test_kept_and_evictable();
    test_kept_runs_stay_beside_pinned_ones();
    test_sharing_does_not_depend_on_what_is_cut();
    test_truncation_passes_windows();
    test_runs_make_room_for_their_own_request();
    test_a_page_of_two_runs_counts_once();
    test_a_shortage_waits_for_other_pages();
    test_misuse();
    test_runs_of_another_cache();
    vmem_context_destroy(ctx);
    return 0;
}
