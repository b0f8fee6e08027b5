// vmem_blocks: which pages are backed after each call, in which order orders are answered, and what waits for fences.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

#define FAKEGPU_USER
#include "../fakegpu/fakegpu.h"
#include "checked.h"
#include "kv.h"
#include "vmem_blocks.h"
#include "vmem_torch.h"

static vmem_context *ctx;
static uint64_t base, P;
static struct vmem_blocks_board board, boards[2];

#define RESERVED (1 * GIB)
static uint32_t ids[1024]; // 0, 1, 2, ...

static vmem_blocks *make(const struct vmem_block_range *ranges, uint32_t n, uint32_t blocks, uint64_t budget)
{
    struct vmem_blocks_config cfg = {.size = sizeof cfg,
                                     .ranges = ranges,
                                     .n_ranges = n,
                                     .blocks = blocks,
                                     .page_size = P,
                                     .budget = budget,
                                     .board = &board};
    vmem_blocks *b;
    memset(&board, 0, sizeof board);
    OK(vmem_blocks_create(ctx, &cfg, &b));
    return b;
}

// Two layers of blocks of a page each.
static vmem_blocks *simple(uint32_t blocks, uint64_t budget)
{
    return make(&(struct vmem_block_range){base, blocks * P, P, P, 2, 0}, 1, blocks, budget);
}

// With 2 MiB, a page is a call and memory is scarce: fewer blocks then.
static bool test_small_pages(void) { return P < VMEM_PAGE_2M; }

static struct vmem_blocks_stats stats(vmem_blocks *b)
{
    struct vmem_blocks_stats s = {.size = sizeof s};
    OK(vmem_blocks_get_stats(b, &s));
    return s;
}
static uint64_t mapped(void) { return test_stats(ctx).mapped / P; }
static bool is_backed(vmem_blocks *b, uint32_t id)
{
    uint8_t backed;
    OK(vmem_blocks_query(b, &id, 1, &backed));
    return backed != 0;
}
static uint64_t order(vmem_blocks *b, const uint32_t *ids, uint32_t n)
{
    uint64_t seq;
    OK(vmem_blocks_order(b, ids, n, &seq));
    return seq;
}
static bool is_answered(const struct vmem_blocks_board *at, uint64_t seq)
{
    return __atomic_load_n(&at->done, __ATOMIC_ACQUIRE) >= seq;
}
static bool was_refused(const struct vmem_blocks_board *at, uint64_t seq)
{
    while (!is_answered(at, seq))
        sched_yield();
    const uint64_t answer = at->answers[seq % VMEM_BLOCKS_ANSWERS];
    CHECK_EQ(answer / 2, seq);
    return answer % 2;
}
#define IDS(...) ((const uint32_t[]){__VA_ARGS__})
#define BACK(b, flags, ...) vmem_blocks_back(b, IDS(__VA_ARGS__), COUNT(IDS(__VA_ARGS__)), flags, NULL)
#define UNBACK(b, fence, ...) vmem_blocks_unback(b, IDS(__VA_ARGS__), COUNT(IDS(__VA_ARGS__)), fence)

static void errors(void)
{
    const struct vmem_block_range good = {base, 0, P, P, 1, 0};
    struct vmem_blocks_config cfg = {.size = sizeof cfg, .ranges = &good, .n_ranges = 1, .blocks = 4, .page_size = P};
    vmem_blocks *b;
    uint64_t fence;
    ERR(vmem_blocks_create(NULL, &cfg, &b), EINVAL, "ctx is NULL");
    ERR(vmem_blocks_create(ctx, NULL, &b), EINVAL, "cfg and out");
    ERR(vmem_blocks_create(ctx, &cfg, NULL), EINVAL, "cfg and out");
#define BAD(field, value, text)                             \
    do {                                                    \
        struct vmem_blocks_config c = cfg;                  \
        c.field = value;                                    \
        ERR(vmem_blocks_create(ctx, &c, &b), EINVAL, text); \
    } while (0)
    BAD(size, 8, "cfg->size");
    BAD(flags, 1, "flags 0x1");
    BAD(ranges, NULL, "cfg->ranges");
    BAD(n_ranges, 0, "cfg->ranges");
    BAD(blocks, 0, "cfg->blocks 0");
    BAD(blocks, 1u << 31, "cfg->blocks 2147483648");
    BAD(page_size, 12345, "page_size 12345");
    BAD(blocks, (uint32_t)(RESERVED / P + 1), "cfg->ranges[0]");
#define BAD_RANGE(text, ...)                                         \
    do {                                                             \
        const struct vmem_block_range two[] = {good, {__VA_ARGS__}}; \
        struct vmem_blocks_config c = cfg;                           \
        c.ranges = two;                                              \
        c.n_ranges = 2;                                              \
        ERR(vmem_blocks_create(ctx, &c, &b), EINVAL, text);          \
    } while (0)
    BAD_RANGE("cfg->ranges[1]: bytes 0", base, 0, P, 0, 1, 0);
    BAD_RANGE("layers 0", base, 0, P, P, 0, 0);
    BAD_RANGE("reserved", base, 0, P, P, 1, 7);
    BAD_RANGE("cfg->ranges[1]", base - 1, 0, P, P, 1, 0);
    BAD_RANGE("last address", base, UINT64_MAX / 2, P, P, 4, 0);
    BAD_RANGE("last address", base, 0, UINT64_MAX / 2, P, 1, 0);
    BAD_RANGE("last address", UINT64_MAX - P, 0, P, P, 1, 0);
    BAD_RANGE("cfg->ranges[1]", base + RESERVED - 4 * P, 0, P, P + 1, 1, 0);

    BAD_RANGE("overlap", base, 0, P, P, UINT32_MAX, 0);
    BAD_RANGE("overlap", base, P, P, P, 2, 0);
    BAD_RANGE("overlap", base, 4 * P, P - 1, P, 2, 0);
    BAD_RANGE("cfg->ranges[1]: its block 2 would own bytes of block 3 in cfg->ranges[0]", base + P, 0, P, P, 1, 0);
    BAD_RANGE("would own bytes", base, 0, 2 * P, P, 1, 0);
    BAD(budget, P - 1, "cfg->budget");

    b = simple(4, 0);
    ERR(vmem_blocks_back(NULL, NULL, 0, 0, NULL), EINVAL, "blocks is NULL");
    ERR(vmem_blocks_back(b, NULL, 1, 0, NULL), EINVAL, "ids is NULL");
    ERR(BACK(b, 0, 1, 4), EINVAL, "ids[1]: block 4 is out of range: there are 4 blocks");
    ERR(BACK(b, 0x80, 1), EINVAL, "flags 0x80");
    ERR(UNBACK(b, 0, 9), EINVAL, "block 9");
    ERR(UNBACK(b, 1, 1), EINVAL, "fence 1: these blocks have made none");
    ERR(vmem_blocks_pass(b, 0), EINVAL, "fence 0");
    ERR(vmem_blocks_pass(b, 1), EINVAL, "fence 1");
    ERR(vmem_blocks_fence(b, NULL), EINVAL, "fence is NULL");
    ERR(vmem_blocks_record(b, NULL, NULL), EINVAL, "fence is NULL");
    ERR(vmem_blocks_query(b, IDS(4), 1, (uint8_t[1]){0}), EINVAL, "block 4");
    ERR(vmem_blocks_query(b, IDS(1), 1, NULL), EINVAL, "states is NULL");
    ERR(vmem_blocks_order(b, NULL, 0, NULL), EINVAL, "seq is NULL");
    ERR(vmem_blocks_order(b, IDS(4), 1, &fence), EINVAL, "block 4");
    ERR(vmem_blocks_get_stats(b, NULL), EINVAL, "out must not be NULL");
    OK(vmem_blocks_back(b, NULL, 0, 0, NULL));
    OK(vmem_blocks_unback(b, NULL, 0, 0));
    CHECK_EQ(mapped(), 0);
    vmem_blocks_destroy(b);
    vmem_blocks_destroy(NULL);
}

// A fence of other blocks is refused: it may have passed, when a kernel still reads the block.
static void fences_of_others(void)
{
    vmem_blocks *mine = simple(4, 0), *theirs = simple(4, 0);
    uint64_t first, last, other;
    OK(BACK(mine, 0, 1));
    for (uint32_t i = 0; i < 3; i++) { // theirs have made as many as mine, fewer and more
        OK(vmem_blocks_fence(theirs, &other));
        ERR(UNBACK(mine, other, 1), EINVAL, "these blocks have made");
        ERR(vmem_blocks_pass(mine, other), EINVAL, "these blocks");
        if (i == 1) {
            OK(vmem_blocks_fence(mine, &first));
            OK(vmem_blocks_fence(mine, &last));
            ERR(UNBACK(mine, other, 1), EINVAL, "these blocks have made");
            ERR(UNBACK(theirs, first, 1), EINVAL, "these blocks have made");
        }
    }
    CHECK_EQ(last, first + 1);
    ERR(UNBACK(mine, first - 1, 1), EINVAL, "these blocks have made");
    ERR(UNBACK(mine, last + 1, 1), EINVAL, "these blocks have made");
    OK(vmem_blocks_flush(mine));
    CHECK_EQ(mapped(), 1 << 1);
    OK(UNBACK(mine, last, 1));
    OK(vmem_blocks_pass(mine, last));
    OK(vmem_blocks_flush(mine));
    CHECK_EQ(mapped(), 0);
    vmem_blocks_destroy(theirs);
    vmem_blocks_destroy(mine);
}

// Calls without ASYNC, and counted pages.
static void direct(void)
{
    vmem_blocks *b = simple(8, 0);
    uint32_t fresh;
    OK(vmem_blocks_back(b, IDS(5, 1, 1, 5), 4, 0, &fresh));
    CHECK_EQ(fresh, 2);
    CHECK_EQ(mapped(), 4);
    for (uint32_t id = 0; id < 8; id++) {
        CHECK_EQ(is_backed(b, id), id == 1 || id == 5);
        for (uint32_t l = 0; l < 2; l++)
            CHECK_EQ(page_at(ctx, base + (l * 8 + id) * P) != 0, id == 1 || id == 5);
    }
    const uint64_t calls = test_stats(ctx).syscalls;
    OK(BACK(b, 0, 1, 5));
    CHECK_EQ(test_stats(ctx).syscalls, calls);
    OK(UNBACK(b, 0, 1, 2));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 2);
    CHECK(!is_backed(b, 1));
    CHECK_EQ(stats(b).held, 2 * P);
    CHECK_EQ(stats(b).most_held, 4 * P);
    CHECK_EQ(board.held, 2 * P);
    CHECK_EQ(board.backed, 1);
    CHECK_EQ(stats(b).unmapped_pages, 2);
    vmem_blocks_destroy(b);
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(board.held, 0);
}

// Blocks of 1.5 pages in one range and of a quarter of a page in another, which begins in the middle of a page.
static void shared(void)
{
    const struct vmem_block_range ranges[] = {{base, 0, P + P / 2, P + P / 2, 1, 0},
                                              {base + 9 * P + P / 2, 4 * P, P / 4, P / 4, 2, 0}};
    vmem_blocks *b = make(ranges, 2, 6, 0);
    OK(BACK(b, 0, 0)); // pages 0, 1; 9; 13
    CHECK_EQ(mapped(), 4);
    OK(BACK(b, 0, 1)); // pages 1, 2; 9; 13
    CHECK_EQ(mapped(), 5);
    OK(BACK(b, 0, 2)); // pages 3, 4; 10; 14
    CHECK_EQ(mapped(), 9);
    put_word(ctx, base + P + P / 2, 77); // block 1's
    put_word(ctx, base + 9 * P + P / 2 + P / 4, 78);
    OK(UNBACK(b, 0, 0));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 8);
    CHECK(!page_at(ctx, base) && page_at(ctx, base + P) && page_at(ctx, base + 9 * P));
    CHECK_EQ(get_word(ctx, base + P + P / 2), 77);
    CHECK_EQ(get_word(ctx, base + 9 * P + P / 2 + P / 4), 78);
    OK(UNBACK(b, 0, 1, 2));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 0);
    vmem_blocks_destroy(b);
}

// A range between the layers of another one, and one that begins where it ends.
static void nested(void)
{
    const struct vmem_block_range ranges[] = {{base, 16 * P, P, P, 2, 0},
                                              {base + 8 * P, 0, P, P, 1, 0},
                                              {base + 20 * P, 0, 2 * P, P, 1, 0}};
    vmem_blocks *b = make(ranges, 3, 4, 0);
    OK(BACK(b, 0, 1, 3));
    for (uint32_t p = 0; p < 28; p++)
        CHECK_EQ(page_at(ctx, base + p * P) != 0,
                 p == 1 || p == 3 || p == 17 || p == 19 || p == 9 || p == 11 || p == 22 || p == 26);
    vmem_blocks_destroy(b);
    CHECK_EQ(mapped(), 0);
}

// Orders are answered in order; one that finds no memory is refused as a whole.
static void orders(void)
{
    vmem_blocks *b = simple(64, 6 * P);
    const uint64_t first = order(b, IDS(0, 1), 2), second = order(b, IDS(2, 3), 2), third = order(b, IDS(3), 1);
    CHECK_EQ(first, 1);
    CHECK_EQ(third, 3);
    CHECK(was_refused(&board, second));
    CHECK(!was_refused(&board, third));
    CHECK(!was_refused(&board, first));
    CHECK_EQ(mapped(), 6);
    CHECK(is_backed(b, 3) && !is_backed(b, 2));
    CHECK_EQ(stats(b).refused, 1);
    CHECK_EQ(stats(b).orders, 3);
    CHECK_EQ(stats(b).waiting, 0);
    CHECK_EQ(board.done, 3);
    CHECK_EQ(board.refused, 1);
    ERR(BACK(b, 0, 2), ENOMEM, "2 pages more exceed the budget of 6: 6 are held");
    OK(BACK(b, VMEM_BLOCKS_OVER, 2));
    CHECK_EQ(mapped(), 8);
    OK(BACK(b, 0, 0, 1, 2, 3));
    ERR(BACK(b, 0, 4), ENOMEM, "budget of 6");
    OK(UNBACK(b, 0, 0, 1));
    OK(BACK(b, 0, 4)); // takes first what is given up
    CHECK_EQ(stats(b).budget, 6 * P);
    OK(vmem_blocks_flush(b));
    for (int i = 0; i < VMEM_BLOCKS_ANSWERS + 8; i++) // new answers take the place of old ones
        order(b, IDS(4), 1);
    OK(vmem_blocks_flush(b));
    CHECK(!was_refused(&board, 3 + VMEM_BLOCKS_ANSWERS));
    vmem_blocks_destroy(b);
}

static void fences(void)
{
    vmem_blocks *b = simple(8, 0);
    uint64_t one, two, three;
    OK(BACK(b, 0, 0, 1, 2, 3));
    OK(vmem_blocks_fence(b, &one));
    OK(vmem_blocks_fence(b, &two));
    OK(UNBACK(b, two, 2));
    OK(UNBACK(b, one, 1));
    OK(UNBACK(b, 0, 0));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 6);
    CHECK_EQ(stats(b).backed, 3);
    CHECK_EQ(stats(b).leaving, 2);
    uint8_t states[4];
    OK(vmem_blocks_query(b, IDS(0, 1, 2, 3), 4, states));
    CHECK(states[0] == 0 && states[1] == 2 && states[2] == 2 && states[3] == 1);
    OK(vmem_blocks_record(b, NULL, &three)); // behind those: it passes after them
    OK(UNBACK(b, three, 3));
    OK(vmem_blocks_pass(b, one));
    OK(vmem_blocks_flush(b));
    CHECK(!is_backed(b, 1) && is_backed(b, 2) && is_backed(b, 3));
    OK(BACK(b, 0, 2)); // stays
    CHECK_EQ(stats(b).leaving, 1);
    OK(vmem_blocks_pass(b, two));
    OK(vmem_blocks_flush(b));
    CHECK(is_backed(b, 2));
    while (is_backed(b, 3)) // a device may need a moment for its event
        OK(vmem_blocks_flush(b));
    OK(UNBACK(b, three, 2)); // a fence that has passed
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 0);
    // The later of two fences counts.
    OK(BACK(b, 0, 4));
    OK(vmem_blocks_fence(b, &one));
    OK(vmem_blocks_fence(b, &two));
    OK(UNBACK(b, one, 4));
    OK(UNBACK(b, two, 4));
    OK(UNBACK(b, 0, 4));
    OK(vmem_blocks_pass(b, one));
    OK(vmem_blocks_flush(b));
    CHECK(is_backed(b, 4));
    OK(vmem_blocks_pass(b, two));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 0);
    // An event alone.
    OK(BACK(b, 0, 7));
    OK(vmem_blocks_record(b, NULL, &three));
    OK(UNBACK(b, three, 7));
    while (is_backed(b, 7))
        sched_yield();
    vmem_blocks_destroy(b);
}

// A refused order leaves everything as it was, what it cancelled too.
static void refused_cancels(void)
{
    vmem_blocks *b = simple(8, 4 * P);
    uint64_t fence;
    for (int async = 0; async < 2; async++) {
        OK(BACK(b, 0, 0, 1));
        OK(vmem_blocks_fence(b, &fence));
        OK(UNBACK(b, fence, 0, 1));
        if (async)
            CHECK(was_refused(&board, order(b, IDS(1, 2), 2)));
        else
            ERR(BACK(b, 0, 1, 2), ENOMEM, "budget");
        CHECK_EQ(stats(b).leaving, 2);
        OK(vmem_blocks_pass(b, fence));
        OK(vmem_blocks_flush(b));
        CHECK_EQ(mapped(), 0);
    }
    vmem_blocks_destroy(b);
}

// Calls that name a block take effect in their order, although the thread is behind them.
static void in_order(void)
{
    enum { MOST = 512 };
    const uint32_t n = test_small_pages() ? MOST : 64;
    vmem_blocks *b = simple(n, 0);
    uint32_t many[MOST];
    for (uint32_t i = 0; i < n; i++)
        many[i] = i;
    for (int round = 0; round < 20; round++) {
        order(b, many + 8, n - 8);
        order(b, IDS(1, 2, 3), 3);
        OK(UNBACK(b, 0, 2, 3, 4));
        const uint64_t last = order(b, IDS(3), 1);
        OK(BACK(b, 0, 4));
        CHECK(!was_refused(&board, last));
        OK(vmem_blocks_flush(b));
        CHECK(is_backed(b, 1) && !is_backed(b, 2) && is_backed(b, 3) && is_backed(b, 4));
        OK(vmem_blocks_unback(b, many, n, 0));
        if (round % 2)
            OK(vmem_blocks_flush(b));
    }
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 0);
    vmem_blocks_destroy(b);
}

static void zeroed(void)
{
    const struct vmem_block_range range = {base, 0, P, P, 1, 0};
    struct vmem_blocks_config cfg = {.size = sizeof cfg, .ranges = &range, .n_ranges = 1};
    vmem_blocks *b;
    cfg.blocks = 16;
    cfg.page_size = P;
    OK(vmem_prealloc(ctx, MIB)); // so that memory is used again
    OK(vmem_blocks_create(ctx, &cfg, &b));
    for (int i = 0; i < 3; i++) {
        OK(BACK(b, 0, 3, 4));
        CHECK(all_words(ctx, base + 3 * P, 2 * P, 0));
        OK(vmem_fill(ctx, base + 3 * P, 0xff, 2 * P));
        OK(UNBACK(b, 0, 3, 4));
        OK(vmem_blocks_flush(b));
    }
    vmem_blocks_destroy(b);
    OK(vmem_trim(ctx, NULL));
}

// More than the internal limits: pages of one call, pages looked at under one lock.
static void large(void)
{
    uint64_t addr;
    const uint32_t n = test_small_pages() ? 12000 : 64, layers = 3; // 1.1 GiB, which the simulated GPU has
    const uint64_t bytes = P / 2;
    uint32_t *ids = malloc(n * sizeof(*ids));
    OK(vMemReserve(ctx, GIB * 2, 0, &addr));
    const struct vmem_block_range range = {addr, n * bytes, bytes, bytes, layers, 0};
    vmem_blocks *b = make(&range, 1, n, 0);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = n - 1 - i;
    const struct vmem_stats before = test_stats(ctx);
    CHECK(!was_refused(&board, order(b, ids, n)));
    CHECK_EQ(mapped(), n * layers / 2);
    if (test_small_pages())
        CHECK(test_stats(ctx).map_runs - before.map_runs <= n * layers / 2 / 16);
    uint32_t half = 0;
    for (uint32_t i = 0; i < n; i += 2) // one of the two blocks of every page
        ids[half++] = i;
    OK(vmem_blocks_unback(b, ids, half, 0));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), n * layers / 2);
    for (uint32_t i = 0; i < half; i++)
        ids[i]++;
    OK(vmem_blocks_unback(b, ids, half, 0));
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 0);
    vmem_blocks_destroy(b);
    OK(vMemFree(ctx, addr));
    free(ids);
}

// An event that has not passed keeps its blocks, and calls do not wait for it.
static void events(void)
{
    uint64_t fence;
    const long before = fakegpu_events();
    vmem_blocks *b = simple(8, 0);
    fakegpu_hold_events(1);
    for (uint32_t id = 0; id < 4; id++) {
        OK(BACK(b, 0, id));
        OK(vmem_blocks_record(b, NULL, &fence));
        OK(UNBACK(b, fence, id));
    }
    OK(BACK(b, 0, 1)); // kept
    OK(vmem_blocks_flush(b));
    CHECK_EQ(mapped(), 8);
    CHECK_EQ(stats(b).leaving, 3);
    fakegpu_hold_events(0);
    while (mapped() > 2)
        sched_yield();
    CHECK(is_backed(b, 1));
    OK(vmem_blocks_record(b, NULL, &fence));
    CHECK_EQ(fakegpu_events(), before + 4); // they are used again
    fakegpu_fail(1);
    ERR(vmem_blocks_record(b, NULL, &fence), ENOMEM, "cuEventRecord");
    OK(vmem_blocks_record(b, NULL, &fence));
    vmem_blocks_destroy(b);
    CHECK_EQ(fakegpu_events(), before);
}

// A fence behind one that is due already is asked about, too.
static void flush_sees_every_fence(void)
{
    vmem_blocks *b = simple(2, 0);
    for (int i = 0; i < 2000; i++) {
        uint64_t fence;
        OK(BACK(b, 0, 0, 1));
        OK(vmem_blocks_record(b, NULL, &fence));
        OK(UNBACK(b, fence, 0));
        OK(UNBACK(b, 0, 1));
        OK(vmem_blocks_flush(b));
        CHECK(!is_backed(b, 0));
    }
    vmem_blocks_destroy(b);
}

// Blocks that stay alone keep no more device memory than their own, once nothing has been asked for a while.
static void memory_returns(void)
{
    enum { BLOCKS = 96 };
    const uint64_t bytes = VMEM_PAGE_2M;
    const struct vmem_block_range range = {base, 0, bytes, bytes, 1, 0};
    vmem_blocks *b = make(&range, 1, BLOCKS, 0);
    uint32_t ids[BLOCKS], n = 0;
    for (uint32_t i = 0; i < BLOCKS; i++)
        ids[i] = i;
    CHECK(!was_refused(&board, order(b, ids, BLOCKS)));
    const uint64_t before = test_stats(ctx).overhead;
    for (uint32_t i = 0; i < BLOCKS; i++)
        if (i % 8)
            ids[n++] = i;
    OK(vmem_blocks_unback(b, ids, n, 0));
    OK(vmem_blocks_flush(b));
    while (test_stats(ctx).overhead > before)
        sched_yield();
    CHECK_EQ(test_stats(ctx).created, BLOCKS / 8 * bytes);
    vmem_blocks_destroy(b);
}

// What blocks hold: a new one zeros, and one that has stayed the words that this has put there. They are `bytes` apart.
static void check_contents(vmem_blocks *b, uint64_t bytes, uint32_t n, bool *stayed)
{
    for (uint32_t i = 0; i < n; i++) {
        const bool there = is_backed(b, i);
        for (uint64_t at = base + i * bytes; there && at < base + (i + 1) * bytes; at += VMEM_PAGE_2M) {
            CHECK_EQ(get_word(ctx, at), stayed[i] ? at : 0);
            put_word(ctx, at, at);
        }
        stayed[i] = there;
    }
}

// Blocks of several pages of 2 MiB come by few calls of the driver, and a block's memory goes back with it, in whatever
// order blocks come and go, and whichever calls fail. calls: for each block. lease: a lease of the context, too, takes pages
// of what blocks have given up.
static void large_blocks_return(uint64_t page, uint64_t bytes, uint32_t layers, uint64_t calls, bool lease)
{
    enum { BLOCKS = 40, SEGMENTS = 8 };
    const struct vmem_torch_config cfg = {.size = sizeof cfg};
    void *segments[SEGMENTS] = {0};
    bool stayed[BLOCKS] = {0};
    vmem_kv_pool *pool = k_pool(GIB / test_page);
    uint32_t place;
    vmem_context *mine = ctx;
    const uint64_t mine_base = base, mine_page = P;
    ctx = test_context(0);
    P = page;
    OK(vMemReserve(ctx, RESERVED, 0, &base));
    const struct vmem_block_range range = {base, bytes / layers, bytes, bytes / layers, layers, 0};
    vmem_blocks *b = make(&range, 1, BLOCKS, 0);
    CHECK(!was_refused(&board, order(b, ids, 1)));
    uint64_t seed = bytes + layers, taken = 0;
    const uint64_t before = test_stats(ctx).syscalls, beside = test_stats(ctx).overhead;
    CHECK(!was_refused(&board, order(b, ids, BLOCKS / 2)));
    if (page == VMEM_PAGE_2M && !strcmp(test_info.backend, "stock")) // CUDA maps each page by itself
        CHECK(test_stats(ctx).syscalls - before <= calls * BLOCKS / 2);
    if (lease) {
        OK(vmem_blocks_join(b, pool, "blocks", 0, 0));
        OK(vmem_torch_open(ctx, pool, &cfg, &place));
        CHECK_EQ(place % VMEM_TORCH_PLACES, 0);
    }
    for (uint32_t turn = 0; turn < 30; turn++) {
        uint32_t some[BLOCKS], n = 0;
        for (uint32_t i = 1; i < BLOCKS; i++)
            if (rnd(&seed) % 3 == 0)
                some[n++] = i;
        if (turn == 1 && !lease) // no memory in one piece: it comes in smaller ones, where a page is not a piece anyway
            fakegpu_fail(1);
        else if (turn > 15 && !lease) // after a refusal, a pool's members get nothing for a while
            fakegpu_trouble(rnd(&seed), 24);
        if (turn % 2) {
            const bool refused = was_refused(&board, order(b, some, n));
            CHECK(!refused || turn > 15 || !strcmp(test_info.backend, "cuda"));
        } else {
            OK(vmem_blocks_unback(b, some, n, 0));
        }
        OK(vmem_blocks_flush(b));
        fakegpu_fail(0);
        void **segment = &segments[turn % SEGMENTS];
        if (*segment)
            vmem_torch_free_0(*segment, 0, 0, NULL);
        else
            taken += lease ? VMEM_PAGE_2M : 0;
        *segment = lease ? vmem_torch_alloc_0(VMEM_PAGE_2M, 0, NULL) : NULL;
        CHECK(!lease || *segment);
        while (test_stats(ctx).overhead > beside || test_stats(ctx).created != stats(b).backed * bytes + taken) {
            if (turn > 15)
                OK(vmem_trim(ctx, NULL)); // unmaps what the driver has refused to unmap
            sched_yield();
        }
        check_contents(b, bytes, BLOCKS, stayed);
    }
    vmem_blocks_destroy(b);
    for (uint32_t i = 0; i < SEGMENTS && lease; i++)
        vmem_torch_free_0(segments[i], 0, 0, NULL);
    if (lease)
        OK(vmem_torch_close(place));
    vmem_kv_pool_destroy(pool);
    CHECK_EQ(test_stats(ctx).created, 0);
    OK(vMemFree(ctx, base));
    vmem_context_destroy(ctx);
    ctx = mine;
    base = mine_base;
    P = mine_page;
}

// Every call of the driver fails once: an order is carried out or refused as a whole, and what could not be unmapped is
// unmapped later.
static void driver_fails(void)
{
    const struct vmem_block_range ranges[] = {{base, 0, P + P / 2, P + P / 2, 1, 0},
                                              {base + 96 * P, 0, P / 4, P / 4, 1, 0}};
    for (long n = 1, reached = true; reached; n++) {
        vmem_blocks *b = make(ranges, 2, 32, 0);
        OK(BACK(b, 0, 0, 7));
        fakegpu_fail(n);
        const long calls = fakegpu_calls();
        const bool rc = was_refused(&board, order(b, IDS(1, 2, 3, 8, 20), 5));
        for (uint32_t i = 0; i < 5; i++)
            CHECK_EQ(is_backed(b, IDS(1, 2, 3, 8, 20)[i]), !rc);
        CHECK(is_backed(b, 0) && is_backed(b, 7));
        OK(UNBACK(b, 0, 0, 2, 8));
        OK(vmem_blocks_flush(b));
        reached = fakegpu_calls() - calls >= n;
        fakegpu_fail(0);
        // 1 and 2 (of block 1), 4 and 5 (3), 10 and 11 (7), 30 and 31 (20), and of the other range 96, 97 and 101.
        // Pages that the thread has unmapped are counted a moment later.
        while (mapped() != (rc ? 3 : 11) || stats(b).held != mapped() * P)
            sched_yield();
        OK(vmem_blocks_flush(b));
        CHECK_EQ(stats(b).held, mapped() * P);
        OK(BACK(b, 0, 0, 1, 2, 3));
        vmem_blocks_destroy(b);
        CHECK_EQ(test_stats(ctx).created, 0);
    }
}

// Threads with blocks of their own, which share every page with those of the others.
enum { THREADS = 4, EACH = 8, ROUNDS = 150 };
static void *use(void *arg)
{
    vmem_blocks *b = ((void **)arg)[0];
    const uint32_t first = (uint32_t)(uintptr_t)((void **)arg)[1];
    uint64_t state = first, fence;
    uint32_t ids[EACH];
    bool in[EACH] = {0};
    for (uint32_t i = 0; i < EACH; i++)
        ids[i] = first + THREADS * i;
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t i = (uint32_t)(rnd(&state) % EACH), n = 1 + (uint32_t)(rnd(&state) % (EACH - i));
        if (rnd(&state) % 2)
            OK(vmem_blocks_back(b, ids + i, n, 0, NULL));
        else
            CHECK(!was_refused(&board, order(b, ids + i, n)));
        for (uint32_t k = i; k < i + n; k++)
            if (!in[k]) {
                put_word(ctx, base + ids[k] * (P / 2), ids[k] + 1);
                in[k] = true;
            }
        for (uint32_t k = 0; k < EACH; k++)
            if (in[k])
                CHECK_EQ(get_word(ctx, base + ids[k] * (P / 2)), ids[k] + 1);
        const uint32_t gone = (uint32_t)(rnd(&state) % EACH);
        OK(vmem_blocks_record(b, NULL, &fence));
        OK(vmem_blocks_unback(b, ids + gone, 1, fence));
        in[gone] = false;
    }
    OK(vmem_blocks_unback(b, ids, EACH, 0));
    return NULL;
}
static void threads(void)
{
    const struct vmem_block_range range = {base, 0, P / 2, P / 2, 1, 0};
    vmem_blocks *b = make(&range, 1, THREADS * EACH, 0);
    pthread_t thread[THREADS];
    void *args[THREADS][2];
    for (uintptr_t t = 0; t < THREADS; t++) {
        args[t][0] = b;
        args[t][1] = (void *)t;
        CHECK_EQ(pthread_create(&thread[t], NULL, use, args[t]), 0);
    }
    for (uint32_t t = 0; t < THREADS; t++)
        pthread_join(thread[t], NULL);
    while (mapped()) // on a device, until its events have passed
        OK(vmem_blocks_flush(b));
    OK(vmem_blocks_flush(b)); // the thread has unmapped them, but may not have counted that yet
    CHECK_EQ(stats(b).backed, 0);
    CHECK_EQ(stats(b).leaving, 0);
    CHECK_EQ(stats(b).held, 0);
    vmem_blocks_destroy(b);
}

// Of ranges at random, those are refused of which two blocks would own the same bytes.
static void ranges_meet(void)
{
    const uint64_t unit = P / 4;
    uint64_t seed = 1, refused = 0, made = 0;
    for (uint32_t i = 0; i < 3000; i++) {
        const uint32_t blocks = 1 + rnd(&seed) % 4;
        struct vmem_block_range r[2];
        uint8_t owner[256] = {0};
        bool clash[2] = {0};
        for (uint32_t k = 0; k < 2; k++) {
            r[k] = (struct vmem_block_range){.addr = base + rnd(&seed) % 8 * unit,
                                             .layer_stride = rnd(&seed) % 12 * unit,
                                             .block_stride = rnd(&seed) % 8 * unit,
                                             .bytes = (1 + rnd(&seed) % 2) * unit,
                                             .layers = 1 + (uint32_t)(rnd(&seed) % 3)};
            for (uint32_t b = 0; b < blocks; b++)
                for (uint32_t l = 0; l < r[k].layers; l++)
                    for (uint64_t at = 0; at < r[k].bytes; at += unit) {
                        uint8_t *u =
                            &owner[(r[k].addr + l * r[k].layer_stride + b * r[k].block_stride + at - base) / unit];
                        clash[k] |= *u && *u != b + 1;
                        *u = (uint8_t)(b + 1);
                    }
        }
        const struct vmem_blocks_config c = {.size = sizeof c,
                                             .ranges = r,
                                             .n_ranges = 2,
                                             .blocks = blocks,
                                             .page_size = P};
        vmem_blocks *b;
        const int rc = vmem_blocks_create(ctx, &c, &b);
        if (rc && !strstr(vmem_last_error(), "would own bytes")) // a range of its own is refused for less
            continue;
        CHECK_EQ(rc ? 1 : 0, clash[0] || clash[1]);
        refused += rc != 0;
        made += rc == 0;
        if (!rc)
            vmem_blocks_destroy(b);
    }
    CHECK(refused > 100 && made > 100);
}

// Objects end while orders and unbacks wait.
static void ends_in_use(void)
{
    uint64_t fence;
    for (uint32_t i = 0; i < 20; i++) {
        vmem_blocks *b = simple(32, 0);
        OK(BACK(b, 0, 1, 2));
        OK(vmem_blocks_fence(b, &fence));
        OK(UNBACK(b, fence, 1));
        for (uint32_t id = 3; id < 3 + i; id++)
            order(b, &id, 1);
        OK(UNBACK(b, 0, 2, 5, 7));
        vmem_blocks_destroy(b);
        CHECK_EQ(test_stats(ctx).created, 0);
    }
}

// Two engines of n blocks each, of these contexts, in a pool of so many pages, of which the first has `min` at least. Their
// boards are empty.
static vmem_kv_pool *make_two(vmem_blocks *b[2], vmem_context *const of[2], uint32_t n, uint64_t pages, uint64_t min)
{
    vmem_kv_pool *pool = k_pool(pages);
    memset(boards, 0, sizeof boards);
    for (uint32_t i = 0; i < 2; i++) {
        struct vmem_block_range range = {.bytes = P, .block_stride = P, .layers = 1};
        const struct vmem_blocks_config c =
            {.size = sizeof c, .ranges = &range, .n_ranges = 1, .blocks = n, .page_size = P, .board = &boards[i]};
        OK(vMemReserve(of[i], n * P, 0, &range.addr));
        OK(vmem_blocks_create(of[i], &c, &b[i]));
        OK(vmem_blocks_join(b[i], pool, i ? "other" : "giver", i ? 0 : min * P, 0));
    }
    return pool;
}

// What the pool asks an engine to shrink to, in pages.
static uint64_t shrink_to(uint32_t i) { return __atomic_load_n(&boards[i].shrink_to, __ATOMIC_RELAXED) / P; }

// The engine `to` gets n blocks, which the other one has offered and gives up when its board says so. A machine that is busy
// may take too long once.
static void back_while_the_other_gives(vmem_blocks *b[2], uint32_t to, uint32_t n)
{
    uint64_t seq;
    do {
        seq = order(b[to], ids, n);
        while (!is_answered(&boards[to], seq)) {
            const uint64_t wanted = shrink_to(!to);
            if (wanted && wanted < stats(b[!to]).held / P) {
                OK(vmem_blocks_unback(b[!to], ids, (uint32_t)(n - wanted), 0));
                OK(vmem_blocks_flush(b[!to]));
            }
            sched_yield();
        }
    } while (was_refused(&boards[to], seq));
    CHECK_EQ(stats(b[to]).backed, n);
}

// Two engines in a pool of 36 pages. What an idle one has of it and does not use is free for the other, and an order
// that lacks budget asks for it. No order waits for an engine to ask.
static void in_a_pool(void)
{
    enum { N = 32 };
    vmem_blocks *b[2];
    uint64_t fence;
    vmem_kv_pool *pool = make_two(b, (vmem_context *[]){ctx, ctx}, N, N + 4, 0);
    OK(vmem_blocks_back(b[0], ids, N, 0, NULL));
    OK(vmem_blocks_fence(b[0], &fence));
    OK(vmem_blocks_pass(b[0], fence));
    OK(vmem_blocks_unback(b[0], ids, N - 1, fence));
    while (k_pool_info(pool).free < (N + 3) * P) // the first keeps what it holds, a page
        sched_yield();
    CHECK(!was_refused(&boards[1], order(b[1], ids, N)));
    // Now the first one lacks 28 pages. The second one's engine gives up blocks when its board says so.
    OK(vmem_blocks_offer(b[1], N * P));
    back_while_the_other_gives(b, 0, N);
    CHECK(stats(b[1]).backed <= 4);
    // It gives what it offers, once, although the other one asks for more.
    OK(vmem_blocks_offer(b[0], 8 * P));
    while (!shrink_to(0))
        (void)vmem_blocks_ask(b[1], 20 * P, NULL);
    OK(vmem_blocks_unback(b[0], ids + N - 8, 8, 0));
    OK(vmem_blocks_flush(b[0]));
    CHECK(was_refused(&boards[1], order(b[1], ids, N)));
    const uint64_t left = shrink_to(0);
    CHECK(!left || left == N - 8);
    // The pool no longer wants blocks that are no longer offered. Its thread may be about to ask for the earlier offer.
    uint32_t tries = 0;
    do {
        OK(vmem_blocks_offer(b[0], 8 * P));
        while (!shrink_to(0))
            (void)vmem_blocks_ask(b[1], 20 * P, NULL);
        OK(vmem_blocks_ask(b[1], 0, NULL));
        OK(vmem_blocks_offer(b[0], 0));
    } while (shrink_to(0) && ++tries < 100);
    CHECK(tries < 100);
    vmem_blocks_destroy(b[1]);
    vmem_blocks_destroy(b[0]);
    vmem_kv_pool_destroy(pool);
}

// An engine that offered once and never does again is asked to shrink, by one that then leaves. It is not refused for ever.
static void an_engine_that_offers_once(void)
{
    enum { N = 32 };
    vmem_blocks *b[2];
    vmem_kv_pool *pool = make_two(b, (vmem_context *[]){ctx, ctx}, N, N + 4, 0);
    OK(vmem_blocks_back(b[0], ids, 20, 0, NULL));
    OK(vmem_blocks_offer(b[0], 10 * P));
    while (!shrink_to(0))
        (void)vmem_blocks_ask(b[1], 30 * P, NULL);
    vmem_blocks_destroy(b[1]);
    while (vmem_blocks_back(b[0], ids, N, 0, NULL))
        sched_yield();
    CHECK_EQ(boards[0].shrink_to, 0);
    vmem_blocks_destroy(b[0]);
    vmem_kv_pool_destroy(pool);
}

// A member that was idle asks for more than is free. What it claims of that does not go back before the others have given
// the rest: it would be the answer to its own question.
static void an_idle_members_question(void)
{
    enum { N = 32, FREE = 16 };
    vmem_blocks *b[2];
    vmem_kv_pool *pool = make_two(b, (vmem_context *[]){ctx, ctx}, N, N + FREE, 0);
    uint64_t missing, to = 0;
    OK(vmem_blocks_back(b[1], ids, FREE, 0, NULL));
    OK(vmem_blocks_unback(b[1], ids, FREE, 0));
    OK(vmem_blocks_flush(b[1]));
    while (k_pool_info(pool).free < (N + FREE) * P) // until it is idle
        sched_yield();
    OK(vmem_blocks_back(b[0], ids, N, 0, NULL));
    OK(vmem_blocks_offer(b[0], N * P));
    for (int tries = 0; !to && tries < 4; tries++) { // a machine that is busy may take too long once
        OK(vmem_blocks_ask(b[1], (FREE + 4) * P, &missing));
        CHECK_EQ(missing, 4 * P);
        for (int ms = 0; !(to = shrink_to(0)) && ms < 1000; ms++)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK_EQ(to, N - 4);
    OK(vmem_blocks_unback(b[0], ids, 4, 0));
    OK(vmem_blocks_flush(b[0]));
    do
        OK(vmem_blocks_ask(b[1], (FREE + 4) * P, &missing));
    while (missing);
    OK(vmem_blocks_back(b[1], ids, FREE + 4, 0, NULL));
    vmem_blocks_destroy(b[1]);
    vmem_blocks_destroy(b[0]);
    vmem_kv_pool_destroy(pool);
}

// The driver keeps refusing to unmap what an engine gives up. The row says so as long as the memory is there, and nobody
// else gets it; once the driver unmaps again, it moves.
static void a_driver_that_unmaps_nothing(void)
{
    enum { N = 32, REST = 4 };
    vmem_context *device;
    vmem_blocks *b[2];
    OK(checked_context(test_backend, 0, false, &device));
    vmem_kv_pool *pool = make_two(b, (vmem_context *[]){device, device}, N, N + REST, 0);
    OK(vmem_blocks_back(b[0], ids, N, 0, NULL));
    checked_refuse_unmaps(true);
    OK(vmem_blocks_unback(b[0], ids, N - 2, 0));
    while (!stats(b[0]).failed_unmaps || k_pool_row(pool, "giver").held != N * P) // both threads have seen it
        sched_yield();
    for (uint32_t i = 0; i < 20; i++) {
        CHECK(was_refused(&boards[1], order(b[1], ids, REST + 1)));
        const struct vmem_kv_pool_member row = k_pool_row(pool, "giver");
        CHECK_EQ(row.held, N * P);
        CHECK(row.has >= N * P && k_pool_info(pool).free <= REST * P);
        CHECK(test_stats(device).created <= (N + REST) * P);
    }
    OK(BACK(b[0], 0, 0)); // what is still mapped can be used again
    CHECK_EQ(k_pool_row(pool, "giver").held, N * P);
    checked_refuse_unmaps(false);
    while (was_refused(&boards[1], order(b[1], ids, N)))
        ;
    CHECK_EQ(k_pool_row(pool, "giver").held, 3 * P);
    vmem_blocks_destroy(b[0]);
    vmem_blocks_destroy(b[1]);
    CHECK_EQ(test_stats(device).created, 0);
    CHECK_EQ(k_pool_info(pool).free, (N + REST) * P);
    vmem_kv_pool_destroy(pool);
    vmem_context_destroy(device);
}

// Blocks may be destroyed while the driver refuses to unmap their pages. As long as these exist, their row counts them.
static void a_row_stays_while_pages_do(bool context_ends)
{
    enum { N = 32, REST = 4 };
    vmem_context *device, *another;
    vmem_blocks *b[2];
    OK(checked_context(test_backend, 0, false, &device));
    another = test_context(0);
    vmem_kv_pool *pool = make_two(b, (vmem_context *[]){device, context_ends ? another : device}, N, N + REST, 1);
    OK(vmem_blocks_back(b[0], ids, N, 0, NULL));
    OK(vmem_blocks_back(b[1], ids, 1, 0, NULL));
    checked_refuse_unmaps(true);
    vmem_blocks_destroy(b[0]);
    CHECK_EQ(test_stats(device).created, (N + !context_ends) * P);
    for (uint32_t i = 0; i < 20; i++) {
        const struct vmem_kv_pool_member row = k_pool_row(pool, "giver");
        CHECK(row.has == N * P && row.held == N * P);
        CHECK(!row.min && !row.needs && !row.could_give);
        CHECK(was_refused(&boards[1], order(b[1], ids, REST + 1)));
    }
    checked_refuse_unmaps(false);
    if (context_ends) {
        vmem_context_destroy(device);
    } else { // what the driver refused is tried again once it has unmapped something
        OK(vmem_blocks_unback(b[1], ids, 1, 0));
        OK(vmem_blocks_flush(b[1]));
        CHECK_EQ(test_stats(device).created, 0);
    }
    CHECK_EQ(k_pool_info(pool).members, 1);
    while (was_refused(&boards[1], order(b[1], ids, N)))
        ;
    vmem_blocks_destroy(b[1]);
    CHECK_EQ(k_pool_info(pool).free, (N + REST) * P);
    vmem_kv_pool_destroy(pool);
    vmem_context_destroy(another);
    if (!context_ends)
        vmem_context_destroy(device);
}

// The device has less than the pool's budget, so an engine gets its blocks only when the other one gives some up, as its
// board says.
static void a_device_with_less_than_the_budget(void)
{
    const uint32_t n = (uint32_t)(64 * MIB / P);
    vmem_context *device;
    vmem_blocks *b[2];
    OK(checked_context(test_backend, 0, true, &device));
    checked_device_memory(3 * n * P / 2);
    vmem_kv_pool *pool = make_two(b, (vmem_context *[]){device, device}, n, 4 * n, 0);
    OK(vmem_blocks_back(b[0], ids, n, 0, NULL));
    OK(vmem_blocks_offer(b[0], n * P));
    back_while_the_other_gives(b, 1, n);
    CHECK(stats(b[0]).backed <= n / 2);
    vmem_blocks_destroy(b[0]);
    vmem_blocks_destroy(b[1]);
    vmem_kv_pool_destroy(pool);
    checked_device_memory(UINT64_MAX);
    vmem_context_destroy(device);
}

static void forked(void)
{
    vmem_blocks *b = simple(8, 0);
    OK(BACK(b, 0, 1));
    const pid_t pid = fork();
    if (!pid) {
        ERR(BACK(b, 0, 2), EPERM, "forked");
        ERR(UNBACK(b, 0, 1), EPERM, "forked");
        ERR(vmem_blocks_flush(b), EPERM, "forked");
        vmem_blocks_destroy(b);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    CHECK(is_backed(b, 1) && page_at(ctx, base + P));
    OK(BACK(b, 0, 2));
    vmem_blocks_destroy(b);
}

// Nor is a page lost when the driver refuses what a destruction asks of it.
static void driver_fails_at_the_end(void)
{
    const struct vmem_block_range ranges[] = {{base, 0, P + P / 2, P + P / 2, 1, 0},
                                              {base + 96 * P, 0, P / 4, P / 4, 1, 0}};
    for (long n = 1, reached = true; reached; n++) {
        vmem_blocks *b = make(ranges, 2, 32, 0);
        OK(BACK(b, 0, 0, 7, 8, 20));
        const long calls = fakegpu_calls();
        fakegpu_fail(n);
        vmem_blocks_destroy(b);
        reached = fakegpu_calls() - calls >= n;
        fakegpu_fail(0);
        CHECK_EQ(mapped(), 0);
        CHECK_EQ(test_stats(ctx).created, 0);
    }
}

// What a KV cache of the same context has taken ahead stays when blocks are idle, or end.
static void leaves_a_cache_its_memory(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = P};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .tensors = &tensor,
                                       .n_tensors = 1,
                                       .slots = 1,
                                       .max_tokens = 64,
                                       .page_size = P,
                                       .budget = 40 * P};
    struct vmem_kv_pool_config pc = {.size = sizeof pc, .budget = 100 * P};
    vmem_context *mine = ctx;
    uint64_t mine_base = base;
    vmem_kv_pool *pool;
    vmem_kv *kv;
    ctx = test_context(0);
    OK(vMemReserve(ctx, 64 * P, 0, &base));
    OK(vmem_kv_create(ctx, &cfg, &kv));
    CHECK(test_stats(ctx).overhead >= 40 * P);
    OK(vmem_kv_pool_create(&pc, &pool));
    vmem_blocks *b = simple(8, 0);
    OK(vmem_blocks_join(b, pool, "blocks", 0, 0));
    OK(vmem_blocks_back(b, (uint32_t[]){0, 1}, 2, 0, NULL));
    OK(vmem_blocks_unback(b, (uint32_t[]){0, 1}, 2, 0));
    usleep(250000); // it has become idle
    CHECK(test_stats(ctx).overhead >= 40 * P);
    vmem_blocks_destroy(b);
    CHECK(test_stats(ctx).overhead >= 40 * P);
    vmem_kv_pool_destroy(pool);
    vmem_kv_destroy(kv);
    vmem_context_destroy(ctx);
    ctx = mine;
    base = mine_base;
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    P = test_page;
    for (uint32_t i = 0; i < COUNT(ids); i++)
        ids[i] = i;
    OK(vMemReserve(ctx, RESERVED, 0, &base));
    errors();
    ranges_meet();
    fences_of_others();
    direct();
    shared();
    nested();
    orders();
    fences();
    refused_cancels();
    in_order();
    zeroed();
    large();
    threads();
    ends_in_use();
    in_a_pool();
    an_engine_that_offers_once();
    an_idle_members_question();
    a_driver_that_unmaps_nothing();
    a_row_stays_while_pages_do(false);
    a_row_stays_while_pages_do(true);
    a_device_with_less_than_the_budget();
    leaves_a_cache_its_memory();
    if (fakegpu_fail) {
        events();
        flush_sees_every_fence();
        memory_returns();
        large_blocks_return(VMEM_PAGE_2M, 4 * VMEM_PAGE_2M, 1, 6, false);
        large_blocks_return(VMEM_PAGE_2M, 4 * VMEM_PAGE_2M, 32, 6, false);
        large_blocks_return(P, 4 * VMEM_PAGE_2M, 1, 0, false);
        large_blocks_return(VMEM_PAGE_2M, 12 * VMEM_PAGE_2M, 4, 18, false);
        large_blocks_return(VMEM_PAGE_2M, 4 * VMEM_PAGE_2M, 1, 6, true);
        driver_fails();
        driver_fails_at_the_end();
    }
    if (test_cpu())
        forked();
    CHECK_EQ(test_stats(ctx).mapped, 0);
    vmem_context_destroy(ctx);
    return 0;
}
