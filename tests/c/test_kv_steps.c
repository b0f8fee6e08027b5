// A server's life, long: decode steps with requests coming and going, memory for only half of them, preemption by
// freeing and by swapping, the budget changing. Nothing drifts: books, lengths and memory are as at the beginning in
// the end.
// VMEM_TEST_STEPS: how many steps (100000).
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 24
#define TOKENS 600

static vmem_context *ctx;
static vmem_kv *kv;
static struct vmem_kv_layout layout = {.size = sizeof layout};
static int32_t lengths[SLOTS]; // of running requests
static uint32_t goal[SLOTS];
static uint64_t order[SLOTS], stamp[SLOTS], seed = 1, clock_;
static uint32_t marked[SLOTS]; // the newest row that was
static char *host[SLOTS];

static uint64_t row(uint32_t slot, uint32_t r)
{
    return layout.addr + slot * layout.slot_stride + r * layout.row_bytes;
}

// The first row of a request and some later one say whose they are.
static void mark(uint32_t s, uint32_t r)
{
    put_word(ctx, row(s, r), stamp[s] + r);
    marked[s] = r;
}
static void look(uint32_t s)
{
    CHECK_EQ(get_word(ctx, row(s, 0)), stamp[s]);
    CHECK_EQ(get_word(ctx, row(s, marked[s])), stamp[s] + marked[s]);
}

static void end(uint32_t s)
{
    OK(vmem_kv_free(kv, s, 0));
    lengths[s] = 0;
    goal[s] = 0;
    free(host[s]);
    host[s] = NULL;
}

static bool preempt(void) // whoever came last
{
    uint32_t last = SLOTS;
    for (uint32_t s = 0; s < SLOTS; s++)
        if (lengths[s] && (last == SLOTS || order[s] > order[last]))
            last = s;
    if (last == SLOTS)
        return false;
    look(last);
    if (rnd(&seed) % 2) {
        end(last);
        return true;
    }
    OK(k_swap_out(ctx, kv, last, &host[last]));
    goal[last] = (uint32_t)lengths[last] << 16 | goal[last]; // its length is kept here meanwhile
    lengths[last] = 0;
    return true;
}

static void come_back(void)
{
    for (uint32_t s = 0; s < SLOTS; s++)
        if (host[s] && !k_swap_in(ctx, kv, s, &host[s])) {
            lengths[s] = (int32_t)(goal[s] >> 16);
            goal[s] &= 0xffff;
            look(s);
            return;
        }
}

static void admit(void)
{
    uint32_t slot, prompt = 1 + (uint32_t)(rnd(&seed) % (TOKENS / 2));
    int32_t prefill[SLOTS] = {0};
    if (k_alloc(kv, prompt, &slot))
        return;
    prefill[slot] = (int32_t)prompt;
    if (vmem_kv_step(kv, prefill, SLOTS, 0)) {
        OK(vmem_kv_free(kv, slot, 0));
        return;
    }
    lengths[slot] = (int32_t)prompt;
    goal[slot] = prompt + 1 + (uint32_t)(rnd(&seed) % (TOKENS - prompt));
    order[slot] = ++clock_;
    stamp[slot] = clock_ << 32;
    mark(slot, 0);
    mark(slot, prompt - 1);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    const uint64_t row_bytes = test_page / 32; // so that every page size sees the same course
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = row_bytes}, {.row_bytes = row_bytes}};
    const uint64_t budget = SLOTS * TOKENS / 4 * row_bytes * 2 / test_page * test_page;
    struct vmem_kv_config cfg = {.size = sizeof cfg,
                                 .flags = VMEM_KV_DEFAULT,
                                 .tensors = tensors,
                                 .n_tensors = 2,
                                 .slots = SLOTS,
                                 .max_tokens = TOKENS,
                                 .page_size = test_page,
                                 .budget = budget};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(vmem_kv_get_layout(kv, 0, &layout));
    const char *text = getenv("VMEM_TEST_STEPS");
    uint64_t steps = text ? strtoull(text, NULL, 0) : 100000, tenth = steps / 10 ? steps / 10 : 1, failed = 0;
    for (uint64_t i = 0; i < steps; i++) {
        int32_t next[SLOTS];
        for (uint32_t s = 0; s < SLOTS; s++) {
            if (lengths[s] && (uint32_t)lengths[s] >= goal[s]) {
                look(s);
                end(s);
            }
            next[s] = lengths[s] ? lengths[s] + 1 : 0;
        }
        if (i % (2 * tenth) == tenth)
            OK(vmem_kv_set_budget(kv, i % (4 * tenth) == tenth ? budget / 2 : budget));
        if (vmem_kv_step(kv, next, SLOTS, 0)) {
            failed++;
            CHECK(preempt());
            continue;
        }
        memcpy(lengths, next, sizeof next);
        uint32_t s = (uint32_t)(rnd(&seed) % SLOTS); // marking all would be most of the test's time
        if (lengths[s])
            mark(s, (uint32_t)lengths[s] - 1);
        if (i % 8 == 0)
            come_back();
        admit();
        if (i % 64 == 0) // the thread gets time to map ahead, also on a busy machine
            OK(vmem_kv_wait(kv));
    }
    struct vmem_kv_stats st = {.size = sizeof st};
    for (uint32_t s = 0; s < SLOTS; s++)
        if (lengths[s] || host[s])
            end(s);
    OK(vmem_kv_wait(kv));
    OK(vmem_kv_reclaim(kv, UINT64_MAX / 2, 0, NULL));
    OK(vmem_kv_get_stats(kv, &st));
    printf("%" PRIu64 " steps, %" PRIu64 " without memory, %" PRIu64 " requests, %" PRIu64 " pages mapped in steps, "
           "%" PRIu64 " in the background, %" PRIu64 " reclaimed\n",
           steps, failed, st.allocs, st.step_mapped_pages, st.ahead_mapped_pages, st.reclaimed_pages);
    CHECK(failed && st.ahead_mapped_pages);
    CHECK_EQ(st.held_pages, 0);
    CHECK_EQ(st.worker_errors, 0);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_kv_destroy(kv);
    vmem_context_destroy(ctx);
    return 0;
}
