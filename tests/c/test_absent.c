// Addresses that are absent: a call failed there, and the driver refused to undo it. Whoever would use them is told so,
// until the driver maps them again. The wrapped backend (checked.c) loses them.
//
// SPDX-License-Identifier: MIT
#include "blocks/blocks.h"
#include "checked.h"
#include "kv.h"

#define N 8 // as many runs as a batch keeps without an allocation
#define SPAN (128 * test_page)
static vmem_context *ctx;
static uint64_t addr;
static vmem_page pages[N], more[N];
static struct vmem_map_op ops[N];

static void map_all(void)
{
    OK(vMemReserve(ctx, SPAN, 0, &addr));
    OK(vMemCreate(ctx, test_page, N, 0, pages));
    OK(vMemCreate(ctx, test_page, N, 0, more));
    for (uint32_t i = 0; i < N; i++) // no two of them in one run
        ops[i] = (struct vmem_map_op){addr + (80 + 2 * i) * test_page, pages[i]};
    OK(vMemMapBatch(ctx, ops, N, 0, NULL));
    for (uint32_t i = 0; i < N; i++)
        put_word(ctx, ops[i].addr, 100 + i);
}

static void end_all(void)
{
    for (uint32_t i = 0; i < N; i++) {
        CHECK_EQ(page_at(ctx, ops[i].addr), pages[i]);
        CHECK_EQ(get_word(ctx, ops[i].addr), 100 + i);
    }
    CHECK_EQ(test_stats(ctx).absent, 0);
    OK(vMemUnmap(ctx, addr, SPAN));
    OK(vMemReleaseBatch(ctx, pages, N, NULL));
    OK(vMemReleaseBatch(ctx, more, N, NULL));
    OK(vMemFree(ctx, addr));
}

static int unmap_all(void) { return vMemUnmap(ctx, addr, SPAN); }
static int release_all(void) { return vMemReleaseBatch(ctx, pages, N, NULL); }
static int replace_all(void)
{
    struct vmem_map_op in[N];
    for (uint32_t i = 0; i < N; i++)
        in[i] = (struct vmem_map_op){ops[i].addr, more[i]};
    return vMemMapBatch(ctx, in, N, VMEM_MAP_REPLACE, NULL);
}
static int map_between(void) // at addresses with nothing
{
    struct vmem_map_op in[N];
    for (uint32_t i = 0; i < N; i++)
        in[i] = (struct vmem_map_op){ops[i].addr + test_page, more[i]};
    return vMemMapBatch(ctx, in, N, 0, NULL);
}

static void test_calls(void)
{
    static int (*const calls[])(void) = {unmap_all, release_all, replace_all, map_between};
    char name[32];
    vmem_page page = 0;
    uint64_t word;
    for (size_t c = 0; c < COUNT(calls); c++) {
        const uint64_t shift = calls[c] == map_between ? test_page : 0;
        map_all();
        checked_fail_always(true);
        ERR(calls[c](), ENOMEM, "injected");
        CHECK(test_stats(ctx).absent >= 3 * test_page);
        const uint64_t lost = ops[0].addr + shift;               // the first of the runs is
        snprintf(name, sizeof name, "[0x%" PRIx64 ", 0x", lost); // as far as the call asks for it
        ERR(vmem_query(ctx, lost, &page, NULL), ENOMEM, name);
        CHECK(strstr(vmem_last_error(), ") is absent"));
        CHECK_EQ(page, shift ? 0 : pages[0]);
        ERR(vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)&word, lost, 8}, 1), ENOMEM, name);
        ERR(vmem_copy_batch(ctx, &(struct vmem_copy_op){lost + 8, (uintptr_t)&word, 8}, 1), ENOMEM, name);
        ERR(vmem_fill(ctx, lost + 8, 0, 16), ENOMEM, name);
        ERR(vmem_commit(ctx, &(struct vmem_range){lost, test_page}, 1, test_page, 0, NULL), ENOMEM, name);
        OK(vmem_query(ctx, addr + 40 * test_page, &page, NULL)); // elsewhere all is well
        const uint64_t before = test_stats(ctx).absent;
        checked_fail_always(false);
        OK(vmem_query(ctx, addr + 40 * test_page, &page, NULL)); // any such call restores all
        CHECK(before && !test_stats(ctx).absent);
        end_all();
    }
}

// Any batch restores what is absent, too, and what is absent can be changed.
static void test_changes(void)
{
    for (int what = 0; what < 4; what++) {
        map_all();
        checked_fail_always(true);
        ERR(unmap_all(), ENOMEM, "injected");
        checked_fail_always(false);
        if (what == 0) {
            OK(vMemMap(ctx, addr + 40 * test_page, more[0]));
        } else if (what == 1) {
            OK(replace_all());
            OK(vMemMapBatch(ctx, ops, N, VMEM_MAP_REPLACE, NULL));
        } else if (what == 2) {
            OK(unmap_all());
            OK(vMemMapBatch(ctx, ops, N, 0, NULL));
        } else {
            OK(vmem_unreserve(ctx, addr)); // its absence ends with it
            CHECK_EQ(test_stats(ctx).absent, 0);
            OK(vMemReleaseBatch(ctx, pages, N, NULL));
            OK(vMemReleaseBatch(ctx, more, N, NULL));
            continue;
        }
        CHECK_EQ(test_stats(ctx).absent, 0);
        end_all();
    }
}

// What belongs at neighbouring addresses may lie apart.
static void test_apart(void)
{
    map_all();
    const uint64_t at = addr + 8 * test_page;
    const struct vmem_map_op apart[] = {{at, more[1]}, {at + test_page, more[0]}};
    OK(vMemMapBatch(ctx, apart, 2, 0, NULL));
    put_word(ctx, at, 1);
    put_word(ctx, at + test_page, 2);
    checked_fail_always(true);
    ERR(vMemUnmap(ctx, at, 2 * test_page), ENOMEM, "injected");
    CHECK_EQ(test_stats(ctx).absent, 2 * test_page);
    checked_fail_always(false);
    CHECK_EQ(get_word(ctx, at), 1);
    CHECK_EQ(get_word(ctx, at + test_page), 2);
    end_all();
}

// A range ends while addresses without pages are absent in it, and nothing can be restored.
static void test_end(void)
{
    map_all();
    checked_fail_always(true);
    ERR(map_between(), ENOMEM, "injected");
    checked_fail_always(false);
    checked_refuse_restores(true);
    OK(unmap_all());
    CHECK(test_stats(ctx).absent);
    OK(vMemFree(ctx, addr));
    CHECK_EQ(test_stats(ctx).absent, 0);
    checked_refuse_restores(false);
    OK(vMemReleaseBatch(ctx, pages, N, NULL));
    OK(vMemReleaseBatch(ctx, more, N, NULL));
}

// While another call works on what is absent, that call decides what belongs there.
static void *unmap_thread(void *arg)
{
    (void)arg;
    OK(unmap_all());
    return NULL;
}
static void test_busy(void)
{
    pthread_t thread;
    map_all();
    checked_fail_always(true);
    ERR(unmap_all(), ENOMEM, "injected");
    checked_fail_always(false);
    checked_hold();
    CHECK_EQ(pthread_create(&thread, NULL, unmap_thread, NULL), 0);
    checked_held();
    vmem_page page;
    OK(vmem_query(ctx, ops[0].addr, &page, NULL));
    CHECK(test_stats(ctx).absent);
    checked_resume();
    pthread_join(thread, NULL);
    CHECK_EQ(test_stats(ctx).absent, 0);
    CHECK_EQ(page_at(ctx, ops[0].addr), 0);
    OK(vMemMapBatch(ctx, ops, N, 0, NULL));
    end_all();
}

// A step whose kernels could read absent rows is refused, and changes nothing.
static void test_steps(void)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 4};
    struct vmem_kv_layout l = {.size = sizeof l};
    vmem_kv *kv;
    uint32_t slot;
    kv = k_create(ctx, .flags = VMEM_KV_LAZY, .tensors = &tensor, .n_tensors = 1, .slots = 2, .max_tokens = 64,
                  .budget = 32 * test_page);
    OK(vmem_kv_get_layout(kv, 0, &l));
    OK(vmem_kv_alloc(kv, NULL, &slot));
    OK(vmem_kv_step(kv, (int32_t[]){10, 0}, 2, 0));
    put_word(ctx, l.addr, 7);
    checked_fail_always(true);
    ERR(vMemUnmap(ctx, l.addr, test_page), ENOMEM, "injected"); // a stranger, but the cache's own fail alike
    ERR(vmem_kv_step(kv, (int32_t[]){10, 0}, 2, 0), ENOMEM, "is absent");
    ERR(vmem_kv_step(kv, (int32_t[]){11, 0}, 2, VMEM_KV_DRY), ENOMEM, "is absent");
    checked_fail_always(false);
    OK(vmem_kv_step(kv, (int32_t[]){10, 0}, 2, 0));
    CHECK_EQ(get_word(ctx, l.addr), 7);
    vmem_kv_destroy(kv);
}

static void refuse(bool on)
{
    checked_refuse_unmaps(on);
    checked_refuse_restores(on);
}

static vmem_blocks *blocks;
static void *back_three(void *rc)
{
    *(int *)rc = vmem_blocks_back(blocks, (uint32_t[]){3}, 1, 0, NULL);
    return NULL;
}

// A call that backs a block waits for its page, which is being unmapped: that fails, and leaves the page absent. The call
// has looked for absent pages before.
static void back_while_an_unmap_fails(uint64_t page)
{
    pthread_t t;
    int rc = -1;
    bool waits = false;
    OK(vmem_blocks_back(blocks, (uint32_t[]){3}, 1, 0, NULL));
    put_word(ctx, page, 9);
    checked_hold();
    OK(vmem_blocks_unback(blocks, (uint32_t[]){3}, 1, 0));
    checked_held();
    CHECK(!pthread_create(&t, NULL, back_three, &rc));
    while (!waits) {
        pthread_mutex_lock(&blocks->lock);
        waits = blocks->blocks[3].state == BLOCK_BACKING;
        pthread_mutex_unlock(&blocks->lock);
    }
    refuse(true);
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(rc, -ENOMEM);
    refuse(false); // from here on, the thread may unmap the page that nobody got, before the next call takes it
    OK(vmem_blocks_back(blocks, (uint32_t[]){3}, 1, 0, NULL));
    const uint64_t word = get_word(ctx, page);
    CHECK(word == 9 || word == 0);
}

static void test_blocks(void)
{
    struct vmem_block_range range = {.block_stride = test_page, .bytes = test_page, .layers = 1};
    struct vmem_blocks_config cfg = {.size = sizeof cfg,
                                     .ranges = &range,
                                     .n_ranges = 1,
                                     .blocks = 8,
                                     .page_size = test_page};
    vmem_blocks *b;
    OK(vMemReserve(ctx, 8 * test_page, 0, &range.addr));
    OK(vmem_blocks_create(ctx, &cfg, &b));
    OK(vmem_blocks_back(b, (uint32_t[]){0, 1}, 2, 0, NULL));
    put_word(ctx, range.addr, 7);
    refuse(true);
    ERR(vMemUnmap(ctx, range.addr, test_page), ENOMEM, "injected");
    ERR(vmem_blocks_back(b, (uint32_t[]){0, 1}, 2, 0, NULL), ENOMEM, "is absent"); // both are backed
    ERR(vmem_blocks_back(b, (uint32_t[]){2}, 1, 0, NULL), ENOMEM, "is absent");
    refuse(false);
    OK(vmem_blocks_back(b, (uint32_t[]){0, 1}, 2, 0, NULL));
    CHECK_EQ(get_word(ctx, range.addr), 7);
    blocks = b;
    back_while_an_unmap_fails(range.addr + 3 * test_page);
    // The end of blocks whose pages cannot be unmapped, and are absent, loses no page.
    refuse(true);
    ERR(vMemUnmap(ctx, range.addr, test_page), ENOMEM, "injected");
    vmem_blocks_destroy(b);
    refuse(false);
    OK(vmem_trim(ctx, NULL));
    CHECK_EQ(test_stats(ctx).created, 0);
    OK(vMemFree(ctx, range.addr));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    for (int whole = 0; whole < 2; whole++) {
        OK(checked_context(test_backend, 0, whole, &ctx));
        test_calls();
        test_changes();
        test_apart();
        test_end();
        test_busy();
        test_steps();
        test_blocks();
        vmem_context_destroy(ctx);
    }
    return 0;
}
