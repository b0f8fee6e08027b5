// A server that schedules ahead: kernels of 1 to 3 earlier iterations are still running when a step is called, and run
// until the last moment that the kernel rule allows. Each reads all rows of its requests until then, and checks every
// one. Meanwhile the server makes every call of the manager that does not have to be quiet, those with fences included,
// and quiet ones where no kernel is left. Caches are of several shapes, with and without each optimisation. The manager
// checks itself (VMEM_KV_CHECK). The background thread is stopped at random where it has dropped the lock, and goes on
// some calls later or when a call waits for it.
//
// VMEM_TEST_ITERATIONS: iterations for each number of steps in flight (4000, or where the CPU does not see the pages,
// 10 times VMEM_TEST_OPERATIONS); VMEM_TEST_IN_FLIGHT: only for that number;
// VMEM_TEST_SEED; VMEM_TEST_SECONDS: stop after about so many, and say how far it came. `make fuzz-kv` runs 100,000 of
// each, on the host and over the fake GPU driver; `make fuzz-kv-gpu` with kernels on a GPU.
//
// SPDX-License-Identifier: MIT
#include <time.h>
#include <unistd.h>

#include "core/core.h"
#include "trouble.h"

#include "lagging.h"

// ---- requests -------------------------------------------------------------------------------------------------

static uint32_t state_of(uint32_t s) { return k_state(kv, s); }

static bool alloc(uint32_t *slot, uint32_t prefix_tokens)
{
    const struct vmem_kv_alloc_options o = {.size = sizeof o,
                                            .tokens = (uint32_t)below(K_TOKENS),
                                            .prefix_tokens = prefix_tokens};
    bool full = true;
    for (uint32_t s = 0; s < K_SLOTS; s++) {
        const uint32_t state = state_of(s);
        full &= state != VMEM_KV_FREE;
        CHECK_EQ(requests[s].taken, state == VMEM_KV_ACTIVE || state == VMEM_KV_SWAPPED);
    }
    const int rc = vmem_kv_alloc(kv, &o, slot);
    CHECK_EQ(rc, full ? -ENOSPC : 0);
    if (rc)
        return false;
    CHECK(!requests[*slot].taken);
    requests[*slot] = (struct request){.taken = true};
    return true;
}

static void do_free(uint32_t s)
{
    struct request *r = &requests[s];
    if (quiet(s) && below(2))
        OK(vmem_kv_free(kv, s, 0));
    else
        OK(vmem_kv_free(kv, s, fence_of(s)));
    free(r->host);
    *r = (struct request){0};
}

static void do_swap(uint32_t s)
{
    struct request *r = &requests[s];
    uint64_t missing;
    if (!r->tokens)
        return;
    if (r->swapped) {
        const int rc = k_missing(k_swap_in(ctx, kv, s, &r->host), &missing);
        CHECK(!rc || (rc == -ENOMEM && missing));
        r->swapped = rc;
        return;
    }
    if (!quiet(s)) // its kernels read the rows
        land(r->part);
    OK(k_swap_out(ctx, kv, s, &r->host));
    r->swapped = true;
    n_swapped++;
    if (below(4) == 0)
        below(2) ? do_swap(s) : do_free(s);
}

static void do_truncate(uint32_t s)
{
    struct request *r = &requests[s];
    if (r->swapped || !r->tokens)
        return;
    const uint32_t tokens = r->tokens - (uint32_t)below(r->tokens < 20 ? r->tokens : 20);
    int rc = quiet(s) && below(2) ? -EBUSY : vmem_kv_truncate(kv, s, tokens, fence_of(s));
    if (rc == -EBUSY) {
        land(r->part);
        rc = vmem_kv_truncate(kv, s, tokens, 0);
    }
    if (rc == -ENODATA || rc == -ENOMEM)
        return;
    OK(rc);
    r->tokens = tokens;
}

// ---- sharing --------------------------------------------------------------------------------------------------

// True if no tensor's last page of so many rows is partial.
static bool whole_pages(uint32_t tokens)
{
    bool whole = true;
    for (uint32_t t = 0; t < shape->n; t++)
        whole &=
            tensors[t].row_bytes * (tokens < tensors[t].max_tokens ? tokens : tensors[t].max_tokens) % page_size == 0;
    return whole;
}

static void attach(const struct prefix *p)
{
    struct vmem_kv_run_info info = {.size = sizeof info};
    uint64_t missing;
    uint32_t slot;
    OK(vmem_kv_get_run(kv, p->id, &info));
    CHECK_EQ(info.tokens, p->tokens);
    uint32_t tokens = info.min_tokens + (uint32_t)below(info.tokens - info.min_tokens + 1);
    tokens = tokens ? tokens : 1;
    while (p->ready > landed && tokens > 1 && tokens > info.min_tokens && !whole_pages(tokens) && below(50))
        tokens--;
    if (!whole_pages(tokens)) // its rows are copied
        land(p->ready);
    if (!alloc(&slot, tokens))
        return;
    const int rc = k_missing(k_attach(kv, p->id, slot, tokens, 0), &missing);
    CHECK(!rc || (rc == -ENOMEM && missing));
    if (rc) {
        do_free(slot);
        return;
    }
    requests[slot].tokens = requests[slot].written = tokens;
    requests[slot].part = p->ready;
    memcpy(requests[slot].origin, p->origin, sizeof p->origin);
}

static void do_prefix(uint32_t s)
{
    struct prefix *p = &prefixes[below(PREFIXES)];
    const struct request *r = &requests[s];
    if (p->id && below(3)) {
        attach(p);
    } else if (p->id) {
        OK(k_drop(kv, p->id));
        p->id = 0;
    } else if (r->taken && !r->swapped && r->tokens) {
        const uint32_t tokens = 1 + (uint32_t)below(r->tokens);
        const int rc = k_save(kv, s, tokens, &p->id);
        if (rc == -ENODATA) {
            p->id = 0;
            return;
        }
        OK(rc);
        p->tokens = tokens;
        p->ready = r->part;
        memcpy(p->origin, r->origin, sizeof p->origin);
    }
}

// Begins a request with blocks that follow each other, whoever wrote them. Some may have been evicted.
static void attach_blocks(void)
{
    const struct prefix *chosen[K_TOKENS];
    uint64_t runs[K_TOKENS], ready = 0;
    uint32_t slot, tokens, n = 0;
    const uint64_t bytes = block_tokens * sizeof(uint64_t);
    for (uint32_t i = 0, from = (uint32_t)below(BLOCKS); i < 3 * BLOCKS && n < K_TOKENS / block_tokens; i++) {
        const struct prefix *b = &blocks[(from + i) % BLOCKS];
        if (!b->id || b->index != n || !below(4))
            continue;
        if (!whole_pages((uint32_t)block_tokens) && n && memcmp(b->origin, chosen[n - 1]->origin, bytes * n))
            continue; // its first page also has rows of the block before it
        chosen[n] = b;
        ready = b->ready > ready ? b->ready : ready;
        runs[n++] = b->id;
    }
    if (!n || !alloc(&slot, n * (uint32_t)block_tokens))
        return;
    if (!whole_pages((uint32_t)block_tokens)) // the rows of a last, partial page are copied
        land(ready);
    const int rc = vmem_kv_attach(kv, slot, runs, n, UINT32_MAX, 0, &tokens);
    if (rc || !tokens) {
        CHECK(!rc || rc == -ENOMEM);
        do_free(slot);
        return;
    }
    CHECK(tokens % block_tokens == 0 && tokens <= n * block_tokens);
    requests[slot].tokens = requests[slot].written = tokens;
    requests[slot].part = ready;
    for (uint32_t i = 0; i < tokens / block_tokens; i++)
        memcpy(&requests[slot].origin[i * block_tokens], &chosen[i]->origin[i * block_tokens], bytes);
}

static void do_blocks(uint32_t s)
{
    const struct request *r = &requests[s];
    struct prefix *b = &blocks[below(BLOCKS)];
    switch (below(4)) {
    case 0:
        OK(k_drop(kv, b->id));
        b->id = 0;
        return;
    case 1: attach_blocks(); return;
    default:
        if (b->id || !r->taken || r->swapped || r->tokens < block_tokens)
            return;
        b->index = below(r->tokens / block_tokens);
        struct vmem_kv_run run = {.slot = s,
                                  .first = (uint32_t)(b->index * block_tokens),
                                  .tokens = (uint32_t)block_tokens,
                                  .keep = (uint32_t)below(2)};
        OK(vmem_kv_share(kv, &run, 1, 0));
        b->id = run.id; // 0: windows have passed its rows
        b->ready = r->part;
        memcpy(b->origin, r->origin, sizeof b->origin);
    }
}

// ---- memory ---------------------------------------------------------------------------------------------------

// The context refuses what the manager must not ask for.
static void harden(void)
{
    const struct vmem_kv_stats st = k_stats(kv);
    CHECK(st.free_pages <= st.budget_pages);
    if (hard)
        OK(vmem_set_budget(ctx, (st.held_pages > st.budget_pages ? st.held_pages : st.budget_pages) * page_size));
}

static void do_budget(void)
{
    uint64_t freed;
    OK(vmem_set_budget(ctx, 0));
    switch (below(4)) {
    case 0: OK(vmem_kv_set_budget(kv, budget / 2 + below(budget / 2))); break;
    case 1: OK(vmem_kv_reclaim(kv, below(budget), 0, &freed)); break;
    case 2: OK(vmem_kv_reclaim(kv, UINT64_MAX, 0, &freed)); break;
    default: OK(vmem_kv_set_budget(kv, budget));
    }
    harden();
}

static void end_all(void)
{
    for (uint32_t s = 0; s < K_SLOTS; s++)
        if (requests[s].taken)
            do_free(s);
}

// Nobody asks for anything, for as long as it takes until an idle cache gives back what it has, perhaps.
static void do_idle(void)
{
    end_all();
    land(steps);
    OK(vmem_kv_retire(kv, steps));
    stop(false);
    usleep(4000);
    stop(true);
}

// ---- steps ----------------------------------------------------------------------------------------------------

// Memory is short: somebody gives way.
static void preempt(void)
{
    const uint32_t from = (uint32_t)below(K_SLOTS);
    n_failed++;
    for (uint32_t i = 0; i < K_SLOTS; i++) {
        const uint32_t s = (from + i) % K_SLOTS;
        if (!requests[s].taken || requests[s].swapped || !requests[s].tokens)
            continue;
        if (below(2))
            do_swap(s);
        else
            do_free(s);
        return;
    }
    if (prefixes[0].id) {
        OK(k_drop(kv, prefixes[0].id));
        prefixes[0].id = 0;
    }
    do_retire();
}

// With VMEM_KV_ZERO, rows that are backed and that the request has not written show nothing of earlier ones.
static void verify_zero(uint32_t s)
{
    const struct request *r = &requests[s];
    for (uint32_t t = 0; t < shape->n && flags & VMEM_KV_ZERO; t++) {
        const uint32_t n = r->tokens < tensors[t].max_tokens ? r->tokens : tensors[t].max_tokens;
        for (uint32_t row = r->written; row < n; row = row < n - 1 && n - row > 4 ? n - 2 : row + 1)
            CHECK_EQ(get_word(ctx, tensors[t].addr + s * tensors[t].slot_stride + row * tensors[t].row_bytes), 0);
    }
}

static void do_step(bool back)
{
    int32_t lengths[K_SLOTS] = {0};
    uint32_t before[K_SLOTS];
    uint64_t missing, predicted;
    bool into_shared = false; // a step back below rows that are shared
    for (uint32_t s = 0; s < K_SLOTS; s++) {
        const struct request *r = &requests[s];
        before[s] = r->tokens;
        if (!r->taken || r->swapped || below(8) == 0)
            continue;
        uint64_t more = !r->tokens || below(16) == 0 ? 1 + below(K_TOKENS / 2) : 1 + (below(8) == 0) * below(8);
        lengths[s] = (int32_t)(r->tokens + more > K_TOKENS ? K_TOKENS : r->tokens + more);
        if (back && r->tokens > 20 && below(4) == 0) {
            lengths[s] = (int32_t)(r->tokens - below(20));
            const struct vmem_kv_slot_info info = k_slot(kv, s);
            into_shared |= (uint32_t)lengths[s] < info.shared_tokens;
        }
    }
    land_for_step();
    OK(vmem_kv_retire(kv, steps - in_flight)); // what the step finds out itself, so that both answers are of one moment
    const int expect = k_missing(vmem_kv_step(kv, lengths, K_SLOTS, VMEM_KV_DRY), &predicted);
    if (below(8) == 0) // what could be taken back is part of no answer
        OK(vmem_kv_reclaim(kv, below(budget), 0, NULL));
    const uint64_t before_trouble = trouble_calls;
    int rc = k_missing(vmem_kv_step(kv, lengths, K_SLOTS, 0), &missing);
    if (rc == -ENOMEM && before_trouble != trouble_calls) { // pages that it could not give up go with a trim
        const bool on = trouble_on;
        trouble_end();
        OK(vmem_trim(ctx, NULL));
        rc = k_missing(vmem_kv_step(kv, lengths, K_SLOTS, 0), &missing);
        trouble_on = on;
    }
    CHECK(!into_shared || rc == -EINVAL);
    if (back && (rc == -EINVAL || expect == -EINVAL)) // shared, or given up by a window
        return;
    if (rc == -ENOMEM && missing && trouble_took_pages(kv, before_trouble)) {
        preempt();
        return;
    }
    if (rc != expect || missing != predicted || (rc == -ENOMEM && !missing))
        FAIL("%s: step %d, check %d, missing %" PRIu64 " and %" PRIu64 ": %s", shape->name, rc, expect, missing,
             predicted, vmem_last_error());
    if (rc) {
        preempt();
        return;
    }
    for (uint32_t s = 0; s < K_SLOTS; s++) {
        struct request *r = &requests[s];
        if (!lengths[s])
            continue;
        r->tokens = (uint32_t)lengths[s];
        verify_zero(s);
        r->written = r->written > r->tokens ? r->written : r->tokens;
    }
    take_off(lengths, before);
}

static void do_misuse(uint32_t s)
{
    int32_t none[K_SLOTS] = {0};
    ERR(vmem_kv_retire(kv, steps + 1), EINVAL, "has not been made yet");
    if (requests[s].taken && !requests[s].swapped && requests[s].tokens) {
        ERR(vmem_kv_free(kv, s, steps + 1), EINVAL, "has not been made yet");
        ERR(vmem_kv_truncate(kv, s, requests[s].tokens, steps + 1), EINVAL, "has not been made yet");
        ERR(vmem_kv_swap_out(kv, s, requests[s].tokens, steps + 1), EINVAL, "has not been made yet");
        ERR(vmem_kv_swap_out(kv, s, requests[s].tokens - 1, steps), EBUSY, "copied too early");
    }
    const uint32_t state = state_of(s);
    none[s] = 1;
    if (state == K_ENDING || state == VMEM_KV_FREE) {
        ERR(vmem_kv_free(kv, s, 0), EINVAL, " is ");
        ERR(vmem_kv_free(kv, s, 0), EINVAL, " is ");
        ERR(vmem_kv_swap_out(kv, s, 1, steps), EINVAL, " is ");
        ERR(vmem_kv_swap_in(kv, s), EINVAL, " is ");
    }
    if (state != VMEM_KV_ACTIVE) {
        ERR(vmem_kv_step(kv, none, K_SLOTS, 0), EINVAL, "but the slot is");
        ERR(vmem_kv_truncate(kv, s, 0, 0), EINVAL, " is ");
    }
}

static void iterate(void)
{
    const uint32_t s = (uint32_t)below(K_SLOTS);
    uint32_t slot;
    if (below(3) == 0)
        go_on();
    switch (below(17)) {
    case 0:
    case 1:
    case 2: alloc(&slot, 0); break;
    case 3:
        if (requests[s].taken)
            do_free(s);
        break;
    case 4:
    case 5: do_swap(s); break;
    case 6: do_truncate(s); break;
    case 7:
    case 8: do_prefix(s); break;
    case 9:
    case 10: do_blocks(s); break;
    case 11:
        if (below(3) == 0)
            do_budget();
        break;
    case 12: do_retire(); break;
    case 13:
        if (below(4) == 0)
            do_misuse(s);
        break;
    case 14:
        if (below(100) == 0)
            do_idle();
        else if (below(4) == 0)
            OK(vmem_kv_wait(kv));
        break;
    }
    do_step(below(16) == 0);
    for (uint32_t k = 0; k < K_SLOTS && below(8) == 0; k++) // speculative decoding: the last tokens are rejected
        if (below(2))
            do_truncate(k);
}

// ---- a run ----------------------------------------------------------------------------------------------------

static void create(void)
{
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .flags = flags | VMEM_KV_CHECK,
                                       .tensors = shape->tensors,
                                       .n_tensors = shape->n,
                                       .slots = K_SLOTS,
                                       .max_tokens = K_TOKENS,
                                       .tile_rows = shape->tile_rows,
                                       .page_size = page_size,
                                       .budget = budget,
                                       .eager_tokens = 40,
                                       .idle_ms = 2,
                                       .steps_in_flight = in_flight};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    for (uint32_t t = 0; t < shape->n; t++) {
        struct vmem_kv_layout l = {.size = sizeof l};
        OK(vmem_kv_get_layout(kv, t, &l));
        const uint32_t max_tokens = shape->tensors[t].max_tokens;
        tensors[t] = (struct kernel_tensor){l.addr, l.slot_stride, l.row_bytes, shape->tensors[t].window,
                                            max_tokens ? max_tokens : K_TOKENS};
    }
    harden();
}

// All ends in order, and nothing is left.
static void end_in_order(void)
{
    end_all();
    land(steps);
    OK(vmem_kv_retire(kv, steps));
    for (uint32_t i = 0; i < PREFIXES; i++)
        OK(k_drop(kv, prefixes[i].id));
    for (uint32_t i = 0; i < BLOCKS; i++)
        OK(k_drop(kv, blocks[i].id));
    OK(vmem_kv_wait(kv)); // or it would back the next slot again
    OK(vmem_kv_reclaim(kv, UINT64_MAX / 2, 0, NULL));
    const struct vmem_kv_stats st = k_stats(kv);
    CHECK_EQ(st.held_pages, 0);
    CHECK_EQ(st.shared_pages, 0);
    CHECK(st.window_pages < UINT32_MAX && st.reclaimed_pages < UINT32_MAX);
}

// The end of a cache whose kernels are running: it accepts no call from then on. When they have ended, nothing is left.
static void destroy(bool troubled)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    CHECK(!st.worker_errors || troubled);
    OK(vmem_kv_close(kv));
    ERR(vmem_kv_get_stats(kv, &st), EINVAL, "is closed");
    ERR(vmem_kv_step(kv, (int32_t[K_SLOTS]){0}, K_SLOTS, 0), EINVAL, "is closed");
    ERR(vmem_kv_retire(kv, steps), EINVAL, "is closed");
    land(steps);
    vmem_kv_destroy(kv);
    OK(vmem_set_budget(ctx, 0));
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).reserved, 0);
}

static void run(const struct shape *sh, uint32_t with, uint32_t steps_in_flight, uint64_t page, uint64_t start,
                uint64_t iterations)
{
    const uint64_t scale = page / (64 * KIB);
    shape = sh;
    flags = with;
    seed = start;
    hard = below(2);
    in_flight = steps_in_flight;
    page_size = page;
    block_tokens = sh->block_tokens * scale <= K_TOKENS ? sh->block_tokens * scale : sh->block_tokens;
    budget = (sh->pages / scale > 24 ? sh->pages / scale : 24) * page;
    memset(requests, 0, sizeof requests);
    memset(prefixes, 0, sizeof prefixes);
    memset(blocks, 0, sizeof blocks);
    trouble_start(start);
    create();
    OK(vmem_kv_last_step(kv, &steps));
    landed = steps;
    kernels_start(tensors, sh->n);
    stop(true);
    for (uint64_t i = 0; i < iterations; i++)
        iterate();
    stop(false);
    const bool troubled = trouble_on, in_order = below(2);
    if (in_order) {
        trouble_end();
        end_in_order();
    }
    destroy(troubled);
    trouble_end();
    land(steps);
    kernels_stop();
    for (uint32_t s = 0; s < K_SLOTS; s++)
        free(requests[s].host);
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

// Caches of all kinds, one after another, until there were so many iterations in all, or no time is left.
static void run_all(uint32_t steps_in_flight, uint64_t start, uint64_t iterations)
{
    static const uint32_t with[] = {VMEM_KV_DEFAULT,
                                    VMEM_KV_DEFER,
                                    VMEM_KV_DEFAULT | VMEM_KV_ZERO | VMEM_KV_LAZY,
                                    VMEM_KV_OVERLAP,
                                    0,
                                    VMEM_KV_DEFER | VMEM_KV_GENEROUS,
                                    VMEM_KV_OVERLAP | VMEM_KV_DEFER};
    const uint64_t kinds = COUNT(shapes) * COUNT(with), most = 5000; // iterations of all kinds in turn
    const uint64_t seconds = number("VMEM_TEST_SECONDS", 0);
    const time_t begin = time(NULL);
    uint64_t done = 0;
    n_kernels = n_failed = n_swapped = 0;
    for (uint64_t round = 0; done < iterations; round++) {
        const uint64_t left = iterations - done, each = (left < most ? left : most) / kinds + 1;
        for (uint64_t n = 0; n < kinds && (!seconds || (uint64_t)(time(NULL) - begin) < seconds); n++) {
            const uint64_t i = n / COUNT(with), j = n % COUNT(with), seed_of = start + i * 10 + j + round * 1000000;
            const uint64_t page = test_page << ((i + j) % 3 == 2 && test_page < 2 * MIB);
            run(&shapes[i], with[j], steps_in_flight, page, seed_of, each);
            done += each;
        }
        printf("%u steps in flight: %" PRIu64 " of %" PRIu64 " iterations in %" PRIu64 " s: %" PRIu64
               " kernels, %" PRIu64 " steps without memory, %" PRIu64 " requests swapped out\n",
               steps_in_flight, done, iterations, (uint64_t)(time(NULL) - begin), n_kernels, n_failed, n_swapped);
        fflush(stdout);
        if (seconds && (uint64_t)(time(NULL) - begin) >= seconds)
            return;
    }
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    kernels_copy = kernels_on_gpu || test_cpu_sees_pages() ? NULL : ctx;
    vmem__kv_hook = stop_at_random;
    static const uint32_t many[] = {2, 1, 3};
    const uint64_t only = number("VMEM_TEST_IN_FLIGHT", 0);
    const uint64_t otherwise = kernels_copy ? 10 * number("VMEM_TEST_OPERATIONS", 100) : 4000;
    for (size_t k = 0; k < COUNT(many); k++)
        if (!only || only == many[k])
            run_all(many[k], number("VMEM_TEST_SEED", 1) * 1000 + k * 100, number("VMEM_TEST_ITERATIONS", otherwise));
    printf("%" PRIu64 " calls were made again\n", trouble_calls);
    vmem_context_destroy(ctx);
    return 0;
}
