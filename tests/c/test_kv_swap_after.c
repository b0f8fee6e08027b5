// Swapping out and destroying behind a fence.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 3
#define TOKENS 1000

static vmem_context *ctx;
static vmem_kv *kv;
static uint64_t row_bytes;
static uint32_t slots[SLOTS];
static char *host;
static uint64_t bytes;

static uint64_t row(uint32_t slot, uint32_t r)
{
    struct vmem_kv_layout l = {.size = sizeof l};
    OK(vmem_kv_get_layout(kv, 0, &l));
    return l.addr + slot * l.slot_stride + r * l.row_bytes;
}

static uint32_t state(uint32_t slot) { return k_state(kv, slot); }

static struct vmem_kv_stats stats(void)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    return st;
}

static int step(int32_t a, int32_t b, uint64_t *missing)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slots[0]] = a;
    lengths[slots[1]] = b;
    return k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), missing);
}

static uint64_t last(void)
{
    uint64_t step;
    OK(vmem_kv_last_step(kv, &step));
    return step;
}

// Two requests, of which the first has `tokens` tokens, each row with its number, and host memory for it.
static void begin(uint32_t flags, uint32_t tokens, uint64_t budget_rows)
{
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = row_bytes}, {.row_bytes = row_bytes}};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .flags = flags | VMEM_KV_CHECK,
                                       .tensors = tensors,
                                       .n_tensors = 2,
                                       .slots = SLOTS,
                                       .max_tokens = TOKENS,
                                       .page_size = test_page,
                                       .budget = 2 * budget_rows * row_bytes,
                                       .steps_in_flight = 2};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(k_alloc(kv, 0, &slots[0]));
    OK(k_alloc(kv, 0, &slots[1]));
    OK(step((int32_t)tokens, 1, NULL));
    for (uint32_t r = 0; r < tokens; r++)
        put_word(ctx, row(slots[0], r), r + 1);
    OK(k_swap_bytes(kv, slots[0], &bytes));
    CHECK_EQ(bytes, 2 * tokens * row_bytes);
    host = calloc(1, bytes);
}

static void end(void)
{
    OK(vmem_kv_retire(kv, last()));
    vmem_kv_destroy(kv, 0);
    free(host);
    CHECK_EQ(test_stats(ctx).created, 0);
}

static void look(uint32_t tokens)
{
    for (uint32_t r = 0; r < tokens; r++)
        CHECK_EQ(get_word(ctx, row(slots[0], r)), r + 1);
}

// Nothing is copied before the kernels have ended; then all of it is, in several portions, and comes back.
static void test_rows_go_after_the_kernels(uint32_t flags)
{
    const uint32_t tokens = 800;
    begin(flags, tokens, 1024);
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, last()));
    OK(vmem_kv_wait(kv));
    CHECK_EQ(state(slots[0]), K_SWAPPING);
    CHECK_EQ(stats().swapped_slots, 1);
    CHECK_EQ(*(uint64_t *)host, 0);
    put_word(ctx, row(slots[0], tokens - 1), 4711); // a kernel does
    OK(vmem_kv_retire(kv, last()));
    OK(vmem_kv_wait(kv));
    CHECK_EQ(state(slots[0]), VMEM_KV_SWAPPED);
    CHECK_EQ(stats().swap_out_bytes, bytes);
    CHECK_EQ(stats().ending_slots, 0);
    for (uint32_t r = 0; r < tokens - 1; r++)
        CHECK_EQ(*(uint64_t *)(host + r * row_bytes), r + 1);
    CHECK_EQ(*(uint64_t *)(host + (tokens - 1) * row_bytes), 4711);
    CHECK_EQ(page_at(ctx, row(slots[0], 0)), 0);
    OK(vmem_kv_swap_in(kv, slots[0], host, bytes, 0));
    look(tokens - 1);
    CHECK_EQ(get_word(ctx, row(slots[0], tokens - 1)), 4711);
    end();
}

// The step that the kernel rule says so for begins it, as vmem_kv_retire does.
static void test_steps_retire(void)
{
    begin(VMEM_KV_DEFAULT, 10, 64);
    OK(step(10, 2, NULL)); // 2
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, 2));
    OK(step(0, 3, NULL)); // 3
    OK(step(0, 4, NULL)); // 4: kernels of 2 and 3 may run
    OK(vmem_kv_wait(kv));
    CHECK_EQ(state(slots[0]), K_SWAPPING);
    OK(step(0, 5, NULL)); // 5: those of 3 and 4
    OK(vmem_kv_wait(kv));
    CHECK_EQ(state(slots[0]), VMEM_KV_SWAPPED);
    end();
}

// Before its kernels have ended, a request that comes back, ends, or is asked for anything else.
static void test_before_the_copy(void)
{
    uint64_t missing;
    begin(VMEM_KV_DEFAULT, 100, 256);
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, last()));
    ERR(step(101, 0, NULL), EINVAL, "but the slot is being swapped out");
    ERR(vmem_kv_truncate(kv, slots[0], 5, 0, 0), EINVAL, "is being swapped out");
    ERR(vmem_kv_swap_out(kv, slots[0], host, bytes, last()), EINVAL, "is being swapped out");
    ERR(vmem_kv_swap_out(kv, slots[0], host, bytes, 0), EINVAL, "is being swapped out");
    OK(k_missing(vmem_kv_swap_in(kv, slots[0], NULL, 0, VMEM_KV_DRY), &missing));
    OK(k_missing(vmem_kv_swap_in(kv, slots[0], host, bytes, 0), &missing));
    CHECK_EQ(state(slots[0]), VMEM_KV_ACTIVE);
    OK(vmem_kv_retire(kv, last()));
    OK(vmem_kv_wait(kv));
    CHECK_EQ(*(uint64_t *)host, 0);
    look(100);
    OK(step(101, 0, NULL));

    OK(vmem_kv_swap_out(kv, slots[0], host, bytes + 2 * row_bytes, last()));
    OK(vmem_kv_free(kv, slots[0], 1)); // the fence of the swap counts, too
    CHECK_EQ(state(slots[0]), K_ENDING);
    OK(vmem_kv_retire(kv, last()));
    CHECK_EQ(state(slots[0]), VMEM_KV_FREE);
    OK(vmem_kv_wait(kv));
    CHECK_EQ(*(uint64_t *)host, 0);
    CHECK_EQ(stats().swap_out_bytes, 0);
    end();
}

// Pages count as needed until the kernels have ended, as free from then on, whoever copies them.
static void test_a_step_gets_the_memory(void)
{
    struct vmem_kv_shortage why = {.size = sizeof why};
    uint64_t missing;
    begin(VMEM_KV_DEFER, 200, 256);
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, last()));
    CHECK_EQ(step(0, 250, &missing), -ENOMEM);
    OK(vmem_kv_last_shortage(&why));
    CHECK_EQ(why.ending_pages, stats().held_pages - 2);
    OK(vmem_kv_retire(kv, last()));
    OK(step(0, 250, &missing));
    end();
    begin(VMEM_KV_DEFAULT, 200, 256);
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, last()));
    OK(vmem_kv_retire(kv, last()));
    OK(step(0, 250, &missing)); // copied by now, or by this call
    CHECK_EQ(state(slots[0]), VMEM_KV_SWAPPED);
    for (uint32_t r = 0; r < 200; r++)
        CHECK_EQ(*(uint64_t *)(host + r * row_bytes), r + 1);
    end();
}

// The pages of a slot that is due count as free. Its end, whatever fence it names, does not take them back from a step
// that counts on them.
static void test_the_end_of_a_due_slot(uint32_t flags)
{
    begin(flags, 200, 256);
    OK(step(0, 2, NULL));
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, 1));
    OK(vmem_kv_retire(kv, 1)); // the copy takes longer than the calls that follow, or is over
    OK(vmem_kv_free(kv, slots[0], 2));
    CHECK_EQ(state(slots[0]), VMEM_KV_FREE);
    OK(step(0, 250, NULL));
    end();

    // Before that, the slot ends with the kernels that the swap waits for.
    begin(flags, 200, 256);
    OK(step(0, 2, NULL));
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes, 1));
    OK(vmem_kv_free(kv, slots[0], 2));
    CHECK_EQ(state(slots[0]), K_ENDING);
    OK(vmem_kv_retire(kv, 1));
    CHECK_EQ(state(slots[0]), VMEM_KV_FREE);
    end();
}

// A copy that fails loses nothing. It is tried again.
static void test_a_copy_that_fails(uint32_t flags)
{
    const uint64_t length = VMEM_PAGE_2M * 16;
    uint64_t addr, missing;
    begin(flags, 200, 256);
    OK(vMemReserve(ctx, length, 0, &addr)); // in which nothing is mapped
    OK(vmem_kv_swap_out(kv, slots[0], (void *)(uintptr_t)addr, bytes, last()));
    if (flags & VMEM_KV_OVERLAP)
        OK(vmem_kv_retire(kv, last()));
    else
        ERR(vmem_kv_retire(kv, last()), EFAULT, "nothing is mapped");
    OK(vmem_kv_wait(kv));
    CHECK_EQ(state(slots[0]), K_SWAPPING);
    ERR(step(0, 250, &missing), EFAULT, "nothing is mapped");
    if (flags & VMEM_KV_OVERLAP)
        CHECK(stats().worker_errors > 0);
    OK(vmem_kv_wait(kv)); // else the thread's last try may fail after the next step has asked for one
    const struct vmem_range all = {addr, length};
    OK(vmem_commit(ctx, &all, 1, test_page, 0, NULL));
    OK(step(0, 2, NULL));
    OK(vmem_kv_wait(kv));
    CHECK_EQ(state(slots[0]), VMEM_KV_SWAPPED);
    OK(vmem_kv_swap_in(kv, slots[0], (void *)(uintptr_t)addr, bytes, 0));
    look(200);
    OK(vmem_unreserve(ctx, addr));
    end();
}

static void test_misuse(void)
{
    begin(VMEM_KV_DEFAULT, 10, 64);
    ERR(vmem_kv_swap_out(kv, slots[0], host, bytes, last() + 1), EINVAL, "step 2 has not been made yet; the last is 1");
    ERR(vmem_kv_swap_out(kv, slots[0], host, bytes - 1, 1), EINVAL, "needs");
    ERR(vmem_kv_swap_out(kv, slots[0], NULL, bytes, 1), EINVAL, "host must not be NULL");
    ERR(vmem_kv_swap_out(kv, SLOTS, host, bytes, 1), EINVAL, "slot 3");
    CHECK_EQ(state(slots[0]), VMEM_KV_ACTIVE);
    OK(step(0, 2, NULL));
    OK(step(0, 3, NULL));
    OK(vmem_kv_free(kv, slots[0], 1)); // the next step ends it
    ERR(vmem_kv_swap_out(kv, slots[0], host, bytes, 1), EINVAL, "is being given up");
    ERR(step(11, 0, NULL), EINVAL, "is being given up");
    ERR(step(0, -1, NULL), EINVAL, "lengths");
    CHECK_EQ(state(slots[0]), K_ENDING); // what is no step ends nothing
    end();
}

static void test_destroy_after(void)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    begin(VMEM_KV_DEFAULT, 200, 256);
    ERR(vmem_kv_destroy(kv, last() + 1), EINVAL, "has not been made yet");
    OK(step(201, 0, NULL));
    OK(vmem_kv_swap_out(kv, slots[0], host, bytes + 2 * row_bytes, 1));
    OK(vmem_kv_destroy(kv, 2));
    ERR(step(0, 2, NULL), EINVAL, "is being closed");
    ERR(vmem_kv_get_stats(kv, &st), EINVAL, "is being closed");
    ERR(vmem_kv_destroy(kv, 2), EINVAL, "is being closed");
    ERR(vmem_kv_retire(kv, 3), EINVAL, "has not been made yet");
    OK(vmem_kv_retire(kv, 1));
    CHECK(test_stats(ctx).created > 0);
    CHECK_EQ(*(uint64_t *)host, 0);
    free(host);
    OK(vmem_kv_retire(kv, 2));
    CHECK_EQ(test_stats(ctx).created, 0);

    begin(VMEM_KV_DEFAULT, 200, 256);
    OK(vmem_kv_retire(kv, 1));
    OK(vmem_kv_destroy(kv, 1)); // nobody is running: now
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).reserved, 0);
    ERR(step(0, 2, NULL), EINVAL, "is being closed"); // the handle is there until vmem_kv_retire
    OK(vmem_kv_retire(kv, 1));
    free(host);

    begin(VMEM_KV_DEFAULT, 200, 256);
    OK(vmem_kv_destroy(kv, 1));
    vmem_kv_destroy(kv, 0); // all is quiet
    CHECK_EQ(test_stats(ctx).created, 0);
    free(host);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    row_bytes = test_page;
    test_rows_go_after_the_kernels(VMEM_KV_DEFAULT);
    test_rows_go_after_the_kernels(VMEM_KV_DEFER);
    test_steps_retire();
    test_before_the_copy();
    test_a_step_gets_the_memory();
    test_the_end_of_a_due_slot(0);
    test_the_end_of_a_due_slot(VMEM_KV_DEFAULT);
    if (test_cpu_sees_pages()) { // they stand in for memory of the CPU that cannot be written
        test_a_copy_that_fails(VMEM_KV_DEFAULT);
        test_a_copy_that_fails(VMEM_KV_DEFER);
    }
    test_misuse();
    test_destroy_after();
    vmem_context_destroy(ctx);
    return 0;
}
