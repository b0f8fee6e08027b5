// Random programs of vmem_blocks against a model: which blocks are backed, which pages are mapped for them, and what they
// hold. Blocks share pages, orders run behind the calls, fences move, and calls find no memory.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <sched.h>

#include "blocks/blocks.h"
#include "checked.h"
#include "trouble.h"

#define MOST_BLOCKS 48
#define MOST_RANGES 3
#define SPACE (256 * MIB)

static vmem_context *ctx;
static vmem_blocks *b;
static struct vmem_blocks_board board;
static uint64_t base, P, seed;
static uint32_t n_blocks, n_ranges;
static struct vmem_block_range ranges[MOST_RANGES];
static uint64_t no_fence, last_fence, passed, last_order;
static long refusals, cancels, steps;

// A block's state by the calls made. One that is not wanted any more is gone when fence `hi` has passed, and is still
// there while `lo` has not.
static struct {
    bool wanted, leaving;
    uint64_t lo, hi;
    bool ordered;     // wanted by an order since the last check: it may be cut before it is carried out,
    uint64_t before;  // and does not cancel then what waited for this fence
    uint64_t content; // what its parts hold, while it has certainly stayed backed; 0: not known
} model[MOST_BLOCKS];

// The calls since the last check. The model follows them when it is known how orders have ended.
static struct {
    bool unback;
    bool failed;
    uint64_t seq, fence;
    uint32_t n, ids[8];
} log_[4096];
static uint32_t n_log;

static uint32_t below(uint32_t n) { return (uint32_t)(rnd(&seed) % n); }

static uint64_t part_addr(uint32_t range, uint32_t layer, uint32_t id)
{
    const struct vmem_block_range *r = &ranges[range];
    return r->addr + layer * r->layer_stride + id * r->block_stride;
}

// The first and the last word of every part.
static void access_block(uint32_t id, bool write)
{
    for (uint32_t r = 0; r < n_ranges; r++)
        for (uint32_t l = 0; l < ranges[r].layers; l++) {
            const uint64_t at = part_addr(r, l, id), end = at + ranges[r].bytes - 8;
            const uint64_t word = model[id].content + (r * 64 + l) * UINT64_C(0x100000000);
            if (write) {
                put_word(ctx, at, word);
                put_word(ctx, end, ~word);
            } else if (get_word(ctx, end) != ~word || (at != end && get_word(ctx, at) != word)) {
                FAIL("block %u, range %u, layer %u holds something else", id, r, l);
            }
        }
}

static uint64_t next_addr;
// A place for parts that nothing else overlaps, sometimes right behind the last one, in the middle of a page.
static void make_range(struct vmem_block_range *r)
{
    static const uint32_t per_page[] = {1, 3, 8, 64};
    const uint64_t bytes = 16 * (1 + rnd(&seed) % (P / 16 * 5 / 2 / per_page[below(4)]));
    r->bytes = below(4) ? bytes : P;
    r->layers = 1 + below(3);
    r->reserved = 0;
    const uint64_t gap = below(2) ? 0 : 16 * below(4096);
    if (below(2)) { // the layers of a block side by side
        r->layer_stride = r->bytes + gap;
        r->block_stride = r->layers * r->layer_stride;
    } else {
        r->block_stride = r->bytes + gap;
        r->layer_stride = n_blocks * r->block_stride;
    }
    r->addr = next_addr + (below(2) ? 0 : 16 * below(8192));
    next_addr = r->addr + (r->layers - 1) * r->layer_stride + (n_blocks - 1) * r->block_stride + r->bytes;
}

static uint32_t choose(uint32_t ids[8])
{
    const uint32_t n = below(9), first = below(n_blocks);
    const bool run = below(2);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = run ? (first + i) % n_blocks : below(n_blocks);
    return n;
}

static void note(bool unback, bool failed, uint64_t seq, uint64_t fence, const uint32_t *ids, uint32_t n)
{
    log_[n_log].unback = unback;
    log_[n_log].failed = failed;
    log_[n_log].seq = seq;
    log_[n_log].fence = fence;
    log_[n_log].n = n;
    memcpy(log_[n_log++].ids, ids, n * sizeof(ids[0]));
}

static void do_back(void)
{
    uint32_t ids[8], fresh;
    const uint32_t n = choose(ids), flags = below(4) ? 0 : VMEM_BLOCKS_OVER;
    const bool fails = !below(4);
    if (fails && below(2))
        checked_fail(1 + below(6));
    else if (fails) // what undoes it, too
        checked_fail_from(1 + below(6));
    const int rc = vmem_blocks_back(b, ids, n, flags, &fresh);
    checked_fail(0);
    checked_fail_always(false);
    if (rc && rc != -ENOMEM)
        FAIL("back: %s", vmem_last_error());
    CHECK(rc || fresh <= n);
    note(false, rc, 0, 0, ids, n);
    refusals += rc != 0;
}

static void do_order(void)
{
    uint32_t ids[8];
    uint64_t seq;
    const uint32_t n = choose(ids);
    OK(vmem_blocks_order(b, ids, n, &seq));
    CHECK_EQ(seq, ++last_order);
    note(false, false, seq, 0, ids, n);
}

static void do_unback(void)
{
    uint32_t ids[8];
    const uint32_t n = choose(ids);
    const uint64_t back = rnd(&seed) % (last_fence - no_fence + 1); // one that was made, or none
    const uint64_t fence = below(2) || back == last_fence - no_fence ? 0 : last_fence - back;
    OK(vmem_blocks_unback(b, ids, n, fence));
    note(true, false, 0, fence, ids, n);
}

static void follow(void)
{
    for (uint32_t i = 0; i < n_log; i++) {
        if (log_[i].seq) {
            CHECK(board.done >= log_[i].seq);
            log_[i].failed = board.answers[log_[i].seq % VMEM_BLOCKS_ANSWERS] % 2;
            refusals += log_[i].failed;
        }
        const uint64_t fence = log_[i].fence;
        for (uint32_t k = 0; k < log_[i].n && !log_[i].failed; k++) {
            const uint32_t id = log_[i].ids[k];
            if (model[id].leaving && passed >= model[id].lo)
                model[id].content = 0; // it may have gone before
            if (!log_[i].unback) {
                cancels += model[id].leaving;
                if (!log_[i].seq)
                    model[id].before = model[id].ordered = false;
                else if (model[id].leaving)
                    model[id].before = model[id].hi > model[id].before ? model[id].hi : model[id].before;
                model[id].ordered |= log_[i].seq && (!model[id].wanted || model[id].leaving);
                model[id].wanted = true;
                model[id].leaving = false;
            } else if (model[id].leaving) {
                model[id].lo = fence < model[id].lo ? fence : model[id].lo;
                model[id].hi = fence > model[id].hi ? fence : model[id].hi;
            } else if (model[id].wanted) {
                model[id].leaving = true;
                model[id].lo = model[id].ordered ? 0 : fence;
                model[id].hi = fence > model[id].before ? fence : model[id].before;
                if (passed >= model[id].lo)
                    model[id].content = 0;
            }
        }
    }
    n_log = 0;
}

static uint64_t mapped_bytes(void)
{
    struct vmem_reservation_info info = {.size = sizeof info};
    OK(vmem_reservation_query(ctx, base, &info));
    return info.mapped;
}

static void check(void)
{
    uint32_t ids[MOST_BLOCKS];
    uint8_t states[MOST_BLOCKS];
    struct vmem_blocks_stats s = {.size = sizeof s};
    OK(vmem_blocks_flush(b));
    follow();
    for (uint32_t id = 0; id < n_blocks; id++)
        ids[id] = id;
    OK(vmem_blocks_query(b, ids, n_blocks, states));
    for (uint32_t id = 0; id < n_blocks; id++) {
        const bool wanted = model[id].wanted, leaving = model[id].leaving;
        const bool must = wanted && (!leaving || passed < model[id].lo);
        const bool may = must || (wanted && leaving && passed < model[id].hi);
        if ((must && !states[id]) || (!may && states[id]) || (must && !leaving && states[id] == 2))
            FAIL("block %u is %u: wanted %d, leaving %d, fences %lu to %lu of %lu passed", id, states[id], wanted,
                 leaving, (long)model[id].lo, (long)model[id].hi, (long)passed);
        if (model[id].content && must)
            access_block(id, false);
        if (!must || !model[id].content || !below(4)) {
            model[id].content = 0;
            if (must && states[id]) {
                model[id].content = 1 + rnd(&seed) % 0x7fffffff;
                access_block(id, true);
            }
        }
        model[id].before = model[id].ordered = false;
        if (!states[id])
            model[id].wanted = model[id].leaving = false;
    }
    // Exactly the pages of the blocks that are backed are mapped.
    static uint8_t needed[SPACE / VMEM_PAGE_64K];
    memset(needed, 0, sizeof needed);
    uint64_t pages = 0;
    for (uint32_t id = 0; id < n_blocks; id++)
        for (uint32_t r = 0; r < n_ranges && states[id]; r++)
            for (uint32_t l = 0; l < ranges[r].layers; l++) {
                const uint64_t at = part_addr(r, l, id) - base;
                for (uint64_t p = at / P; p <= (at + ranges[r].bytes - 1) / P; p++) {
                    pages += !needed[p];
                    needed[p] = 1;
                }
            }
    while (mapped_bytes() != pages * P) { // the thread tries again to unmap what could not be unmapped
        OK(vmem_blocks_get_stats(b, &s));
        if (!s.failed_unmaps)
            FAIL("%lu bytes are mapped, not %lu pages", (long)mapped_bytes(), (long)pages);
        sched_yield();
    }
    for (uint64_t p = 0; p < SPACE / P; p++)
        if (needed[p] != (page_at(ctx, base + p * P) != 0))
            FAIL("page %lu is needed: %d", (long)p, needed[p]);
    do
        OK(vmem_blocks_get_stats(b, &s));
    while (s.held != pages * P && s.failed_unmaps);
    CHECK_EQ(s.held, pages * P);
    CHECK_EQ(s.orders, last_order);
    CHECK_EQ(s.waiting, 0);
    CHECK_EQ(test_stats(ctx).created, pages * P);
}

// large: blocks of 8 MiB, whose memory comes and goes with them.
static void program(uint32_t operations, bool large)
{
    const uint64_t bytes = 8 * MIB, unit = large ? VMEM_PAGE_2M : P; // of budgets
    memset(model, 0, sizeof model);
    last_order = 0;
    n_blocks = 1 + below(large ? 12 : MOST_BLOCKS);
    n_ranges = large ? 1 : 1 + below(MOST_RANGES);
    next_addr = base;
    for (uint32_t r = 0; r < n_ranges; r++)
        make_range(&ranges[r]);
    if (large)
        ranges[0] = (struct vmem_block_range){base, bytes / 4, bytes, bytes / 4, 4, 0};
    CHECK(next_addr <= base + SPACE);
    struct vmem_blocks_config cfg = {.size = sizeof cfg,
                                     .ranges = ranges,
                                     .n_ranges = n_ranges,
                                     .blocks = n_blocks,
                                     .page_size = P,
                                     .budget = below(2) ? 0 : unit * (1 + below(60)),
                                     .board = &board};
    OK(vmem_blocks_create(ctx, &cfg, &b));
    OK(vmem_blocks_fence(b, &last_fence));
    OK(vmem_blocks_pass(b, last_fence));
    passed = last_fence;
    no_fence = last_fence - 1;
    trouble_start(steps + 1);
    for (uint32_t i = 0; i < operations; i++, steps++) {
        trouble_begin_call(); // the thread's calls fail, too
        switch (below(16)) {
        case 0 ... 3: do_back(); break;
        case 4 ... 7: do_order(); break;
        case 8 ... 11: do_unback(); break;
        case 12: OK(vmem_blocks_fence(b, &last_fence)); break;
        case 13:
            if (last_fence > passed) {
                passed += 1 + rnd(&seed) % (last_fence - passed);
                OK(vmem_blocks_pass(b, passed));
            }
            break;
        case 14:
            OK(vmem_set_budget(ctx, below(2) ? 0 : unit * (1 + below(60)))); // the device is full
            break;
        case 15: trouble_pause(); check();
        }
    }
    trouble_end();
    check();
    OK(vmem_set_budget(ctx, 0));
    vmem_blocks_destroy(b);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// An order that fails gives up nothing that a later one keeps.
static void kept_by_the_next(void)
{
    const struct vmem_block_range range = {base, 0, P, P, 1, 0};
    struct vmem_blocks_config cfg = {.size = sizeof cfg, .ranges = &range, .n_ranges = 1, .blocks = 8, .page_size = P};
    uint64_t fence, seq;
    cfg.budget = 3 * P;
    cfg.board = &board;
    OK(vmem_blocks_create(ctx, &cfg, &b));
    OK(vmem_blocks_back(b, (uint32_t[]){0, 1}, 2, 0, NULL));
    put_word(ctx, base, 77);
    OK(vmem_blocks_fence(b, &fence));
    OK(vmem_blocks_unback(b, (uint32_t[]){0}, 1, fence));
    checked_hold();
    OK(vmem_blocks_order(b, (uint32_t[]){2}, 1, &seq));
    checked_held();
    OK(vmem_blocks_order(b, (uint32_t[]){0, 3}, 2, &seq));
    OK(vmem_blocks_order(b, (uint32_t[]){0}, 1, &seq));
    OK(vmem_blocks_pass(b, fence));
    checked_resume();
    OK(vmem_blocks_flush(b));
    CHECK_EQ(board.answers[2], 5); // refused
    CHECK_EQ(board.answers[3], 6);
    CHECK_EQ(get_word(ctx, base), 77);
    vmem_blocks_destroy(b);
}

// A call waits for another call's map of a page that both need, and for no other.
static _Atomic int returned;
static void *back_one(void *id)
{
    OK(vmem_blocks_back(b, id, 1, 0, NULL));
    put_word(ctx, base + *(uint32_t *)id * (P / 2), 78);
    returned++;
    return NULL;
}
static void page_of_another_call(void)
{
    const struct vmem_block_range range = {base, 0, P / 2, P / 2, 1, 0};
    struct vmem_blocks_config cfg = {.size = sizeof cfg, .ranges = &range, .n_ranges = 1, .blocks = 8, .page_size = P};
    uint32_t ids[] = {0, 1};
    pthread_t threads[2];
    OK(vmem_blocks_create(ctx, &cfg, &b));
    checked_hold();
    CHECK_EQ(pthread_create(&threads[0], NULL, back_one, &ids[0]), 0);
    checked_held();
    CHECK_EQ(pthread_create(&threads[1], NULL, back_one, &ids[1]), 0);
    OK(vmem_blocks_back(b, (uint32_t[]){2, 7}, 2, 0, NULL)); // no page in common
    for (uint32_t count = 0; count < 2; sched_yield()) {
        pthread_mutex_lock(&b->lock);
        count = b->pages[0] & PAGE_COUNT;
        pthread_mutex_unlock(&b->lock);
    }
    for (int i = 0; i < 1000; i++) {
        sched_yield();
        CHECK_EQ(returned, 0);
    }
    checked_resume();
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(get_word(ctx, base + P / 2), 78);
    vmem_blocks_destroy(b);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    const char *env = getenv("VMEM_TEST_OPERATIONS"), *first = getenv("VMEM_TEST_SEED");
    const long most = env ? atol(env) : 20000;
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vmem_context_info(ctx, &test_info));
    P = test_info.page_sizes & -test_info.page_sizes;
    if (P > VMEM_PAGE_64K)
        SKIP("the model's blocks are made for pages of 64 KiB");
    OK(vMemReserve(ctx, SPACE, 0, &base));
    kept_by_the_next();
    page_of_another_call();
    uint32_t large = test_cpu() ? 0 : 8; // programs, before others limit the context's arenas
    for (uint64_t n = first ? strtoull(first, NULL, 0) : 1; steps < most; n++) {
        seed = n;
        const uint32_t operations = 20 + below(200);
        printf("%sprogram %lu", n % 20 ? " " : "\n", (unsigned long)n); // the last one is in the log of a failure
        fflush(stdout);
        program(operations, large && large--);
    }
    printf("\n%ld operations, %ld refused, %ld cancelled\n", steps, refusals, cancels);
    CHECK((refusals && cancels) || most < 1000); // few operations may miss one of them
    vmem_context_destroy(ctx);
    return 0;
}
