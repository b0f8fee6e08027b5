// Random requests against a shadow that knows every row: growth, sharing, truncation, swapping, windows, budgets, in
// caches of several shapes, with and without each optimisation. The manager checks itself (VMEM_KV_CHECK) throughout.
// The background thread is stopped at random where it has dropped the lock, and goes on some calls later or when a call
// waits for it. Whatever may happen beside it does.
//
// SPDX-License-Identifier: MIT
#include "core/core.h"
#include "trouble.h"

#include "stop_worker.h"

#define SLOTS 6
#define TOKENS 400
#define PREFIXES 4

struct request {
    uint32_t tokens, first; // rows [first, tokens) must be there, window or not
    uint32_t written;       // rows that this request had once
    bool taken, swapped;
    uint64_t rows[TOKENS]; // what the rows were written from
    char *host;
};
struct prefix {
    uint64_t id, rows[TOKENS];
    uint32_t tokens;
};
struct shape {
    const char *name;
    struct vmem_kv_tensor tensors[4];
    uint32_t n, tile_rows, pages;
};
static const struct shape shapes[] = {
    {"two alike", {{.row_bytes = 2048}, {.row_bytes = 2048}}, 2, 1, 40},
    {"tiles", {{.row_bytes = 4096}, {.row_bytes = 4096}}, 2, 24, 80},
    {"window beside full", {{.row_bytes = 8192}, {.row_bytes = 8192, .window = 40}, {.row_bytes = 1024}}, 3, 1, 90},
    {"odd rows", {{.row_bytes = 1152}, {.row_bytes = 656, .kind = 1}}, 2, 1, 20},
    {"wide row", {{.row_bytes = 96 * 1024}}, 1, 1, 200},
    {"window, tiles", {{.row_bytes = 32768, .window = 64}, {.row_bytes = 16384, .max_tokens = 200}}, 2, 16, 120},
};
// Shapes whose pages go together, where the backend has such (VMEM_KV_UNSHARED).
static const struct shape together[] = {
    {"long", {{.row_bytes = 256 * 1024}, {.row_bytes = 256 * 1024}}, 2, 1, 120 * 32},
    {"long, tiles, window", {{.row_bytes = 192 * 1024}, {.row_bytes = 128 * 1024, .window = 60}}, 2, 24, 100 * 32},
};

static vmem_context *ctx;
static vmem_kv *kv;
static const struct shape *shape;
static struct vmem_kv_layout layouts[4];
static struct request requests[SLOTS];
static struct prefix prefixes[PREFIXES];
static uint64_t seed, page_size, budget;
static bool hard;     // the context's budget is the cache's
static bool zero;     // VMEM_KV_ZERO
static bool unshared; // VMEM_KV_UNSHARED

static uint64_t below(uint64_t n) { return rnd(&seed) % n; }

// ---- rows -----------------------------------------------------------------------------------------------------

static uint64_t row_addr(uint32_t t, uint32_t slot, uint32_t row)
{
    return layouts[t].addr + slot * layouts[t].slot_stride + row * layouts[t].row_bytes;
}

static uint32_t rows_of(uint32_t t, uint32_t tokens)
{
    uint32_t max = shape->tensors[t].max_tokens ? shape->tensors[t].max_tokens : TOKENS;
    return tokens < max ? tokens : max;
}

// A row is checked by its first and last word: they find a row that moved, and a page that was changed.
static void write_rows(uint32_t slot, uint32_t from, uint32_t to)
{
    struct vmem_copy_op ops[8];
    for (uint32_t r = from; r < to; r++) {
        requests[slot].rows[r] = rnd(&seed);
        for (uint32_t t = 0; t < shape->n && r < rows_of(t, to); t++) {
            uint64_t word = requests[slot].rows[r] + t, end = layouts[t].row_bytes - 8;
            ops[0] = (struct vmem_copy_op){row_addr(t, slot, r), (uintptr_t)&word, 8};
            ops[1] = (struct vmem_copy_op){row_addr(t, slot, r) + end, (uintptr_t)&word, 8};
            OK(vmem_copy_batch(ctx, ops, 2));
        }
    }
}

// With VMEM_KV_ZERO, rows that are backed and that the request has not written show nothing of earlier ones.
static void verify_zero(uint32_t slot, uint32_t tokens)
{
    for (uint32_t t = 0; t < shape->n && zero; t++) {
        uint32_t n = rows_of(t, tokens);
        for (uint32_t r = requests[slot].written; r < n; r = r < n - 1 && n - r > 4 ? n - 2 : r + 1)
            if (get_word(ctx, row_addr(t, slot, r)))
                FAIL("%s: slot %u tensor %u row %u shows %" PRIx64 " of an earlier request", shape->name, slot, t, r,
                     get_word(ctx, row_addr(t, slot, r)));
    }
}

static void verify_row(uint32_t slot, uint32_t t, uint32_t r)
{
    uint64_t words[2], end = layouts[t].row_bytes - 8, want = requests[slot].rows[r] + t;
    struct vmem_copy_op ops[2] = {{(uintptr_t)&words[0], row_addr(t, slot, r), 8},
                                  {(uintptr_t)&words[1], row_addr(t, slot, r) + end, 8}};
    OK(vmem_copy_batch(ctx, ops, 2));
    if (words[0] != want || words[1] != want)
        FAIL("%s: slot %u tensor %u row %u of %u: %" PRIx64 " %" PRIx64 ", not %" PRIx64, shape->name, slot, t, r,
             requests[slot].tokens, words[0], words[1], want);
}

static uint32_t first_row(uint32_t slot, uint32_t t)
{
    uint32_t window = shape->tensors[t].window, tokens = rows_of(t, requests[slot].tokens);
    return window && tokens > window ? tokens - window : 0;
}

static void verify(bool all)
{
    for (uint32_t s = 0; s < SLOTS; s++)
        for (uint32_t t = 0; t < shape->n && requests[s].taken && !requests[s].swapped; t++) {
            uint32_t first = first_row(s, t), n = rows_of(t, requests[s].tokens);
            if (first >= n)
                continue;
            for (uint32_t r = first; all && r < n; r++)
                verify_row(s, t, r);
            verify_row(s, t, first);
            verify_row(s, t, first + (uint32_t)below(n - first));
            verify_row(s, t, n - 1);
        }
}

// ---- kernels in flight ----------------------------------------------------------------------------------------
//
// Rows that the manager may not touch: those of the last steps, also of requests that have ended since.

struct flight {
    uint64_t step;
    int32_t lengths[SLOTS];
    uint32_t before[SLOTS], valid[SLOTS]; // tokens before the step; rows that nobody has rewritten since
    uint64_t rows[SLOTS][TOKENS];
};
static struct flight flights[5];
static uint32_t n_flights, in_flight; // how many there may be when a step is called
static uint64_t steps, part[SLOTS];   // the last step, and the last that a slot took part in

static void land(uint32_t most)
{
    while (n_flights > most)
        memmove(&flights[0], &flights[1], --n_flights * sizeof flights[0]);
}

static void take_off(const int32_t *lengths, const uint32_t *before)
{
    struct flight *f = &flights[n_flights++];
    f->step = ++steps;
    memcpy(f->lengths, lengths, sizeof f->lengths);
    for (uint32_t s = 0; s < SLOTS; s++) {
        f->before[s] = before[s];
        f->valid[s] = (uint32_t)lengths[s];
        part[s] = lengths[s] ? steps : part[s];
        memcpy(f->rows[s], requests[s].rows, sizeof f->rows[s]);
    }
}

// No kernel touches the slot any more.
static void quiet(uint32_t s)
{
    for (uint32_t i = 0; i < n_flights; i++)
        flights[i].lengths[s] = 0;
}

static void verify_flights(void)
{
    for (uint32_t i = 0; i < n_flights; i++)
        for (uint32_t s = 0; s < SLOTS; s++)
            for (uint32_t t = 0; t < shape->n && flights[i].lengths[s]; t++) {
                const struct flight *f = &flights[i];
                uint32_t window = shape->tensors[t].window, n = rows_of(t, (uint32_t)f->lengths[s]);
                uint32_t before = rows_of(t, f->before[s] < n ? f->before[s] : n);
                uint32_t first = window && before > window ? before - window : 0;
                uint32_t look[3] = {first, n - 1, first + (uint32_t)below(n - first)};
                for (int k = 0; k < 3; k++) {
                    uint64_t addr = row_addr(t, s, look[k]), word, want = f->rows[s][look[k]] + t;
                    if (!page_at(ctx, addr))
                        FAIL("%s: slot %u tensor %u row %u went under kernels of step %" PRIu64 " of %" PRIu64,
                             shape->name, s, t, look[k], f->step, steps);
                    word = get_word(ctx, addr);
                    if (look[k] < f->valid[s] && word != want)
                        FAIL("%s: slot %u tensor %u row %u changed under kernels of step %" PRIu64 " of %" PRIu64,
                             shape->name, s, t, look[k], f->step, steps);
                }
            }
}

static void do_retire(void)
{
    if (!n_flights)
        return;
    uint32_t n = (uint32_t)below(n_flights);
    uint64_t step = flights[n].step;
    land(n_flights - n - 1);
    OK(vmem_kv_retire(kv, step));
    CHECK_EQ(vmem_kv_retire(kv, steps + 1), -EINVAL);
}

// ---- calls ----------------------------------------------------------------------------------------------------

static void do_alloc(void)
{
    uint32_t slot;
    bool full = true;
    for (uint32_t s = 0; s < SLOTS; s++) {
        struct vmem_kv_slot_info info = {.size = sizeof info};
        OK(vmem_kv_get_slot(kv, s, &info));
        full &= info.state != VMEM_KV_FREE || info.after;
        if (requests[s].taken != (info.state == VMEM_KV_ACTIVE || info.state == VMEM_KV_SWAPPED))
            FAIL("%s: slot %u is in state %u", shape->name, s, info.state);
    }
    int rc = k_alloc(kv, (uint32_t)below(TOKENS), &slot);
    if (full != (rc == -ENOSPC) || (rc && !full))
        FAIL("%s: alloc %d: %s", shape->name, rc, vmem_last_error());
    if (rc)
        return;
    CHECK(!requests[slot].taken);
    requests[slot].taken = true;
    requests[slot].tokens = 0;
}

static void do_free(uint32_t s)
{
    if (part[s] && below(2)) {
        OK(vmem_kv_free(kv, s, part[s]));
    } else {
        quiet(s);
        OK(vmem_kv_free(kv, s, 0));
    }
    free(requests[s].host);
    requests[s] = (struct request){0};
}

static void do_step(bool grow_much)
{
    int32_t lengths[SLOTS] = {0};
    uint64_t missing, predicted;
    for (uint32_t s = 0; s < SLOTS; s++) {
        const struct request *r = &requests[s];
        if (!r->taken || r->swapped || below(8) == 0 || r->tokens == TOKENS)
            continue;
        uint64_t more = grow_much && below(4) == 0 ? 1 + below(TOKENS / 2) : 1;
        lengths[s] = (int32_t)(r->tokens + more > TOKENS ? TOKENS : r->tokens + more);
    }
    land(in_flight);
    if (n_flights) // what the step finds out itself, so that both answers are of one moment
        OK(vmem_kv_retire(kv, steps - in_flight));
    int expect = k_missing(vmem_kv_step(kv, lengths, SLOTS, VMEM_KV_DRY), &predicted);
    if (below(8) == 0) // what could be taken back is part of no answer
        OK(vmem_kv_reclaim(kv, below(budget), 0, NULL));
    const uint64_t again = trouble_calls;
    int rc = k_missing(vmem_kv_step(kv, lengths, SLOTS, 0), &missing);
    if (rc == -ENOMEM && missing && trouble_took_pages(kv, again))
        return;
    if (rc != expect || missing != predicted || (rc && rc != -ENOMEM) || (rc && !missing))
        FAIL("%s: step %d, check %d, missing %" PRIu64 " and %" PRIu64 ": %s", shape->name, rc, expect, missing,
             predicted, vmem_last_error());
    if (rc)
        return;
    uint32_t before[SLOTS];
    for (uint32_t s = 0; s < SLOTS; s++) {
        before[s] = requests[s].tokens;
        if (!lengths[s])
            continue;
        requests[s].tokens = (uint32_t)lengths[s];
        verify_zero(s, requests[s].tokens);
        if (requests[s].written < requests[s].tokens)
            requests[s].written = requests[s].tokens;
        write_rows(s, before[s], requests[s].tokens);
    }
    take_off(lengths, before);
}

static void do_swap(uint32_t s)
{
    struct request *r = &requests[s];
    uint64_t missing;
    if (!r->taken || !r->tokens)
        return;
    if (r->swapped) {
        int rc = k_missing(k_swap_in(ctx, kv, s, &r->host), &missing);
        CHECK(!rc || (rc == -ENOMEM && missing));
        r->swapped = rc;
    } else {
        quiet(s);
        OK(k_swap_out(ctx, kv, s, &r->host));
        r->swapped = true;
    }
}

static void do_truncate(uint32_t s)
{
    struct request *r = &requests[s];
    if (!r->taken || r->swapped || !r->tokens)
        return;
    uint32_t tokens = r->tokens - (uint32_t)below(r->tokens < 20 ? r->tokens : 20);
    int rc = -EBUSY;
    if (below(2)) {
        rc = vmem_kv_truncate(kv, s, tokens, part[s]);
        for (uint32_t i = 0; i < n_flights && !rc; i++)
            flights[i].valid[s] = flights[i].valid[s] < tokens ? flights[i].valid[s] : tokens;
    }
    if (rc == -EBUSY) {
        quiet(s);
        rc = vmem_kv_truncate(kv, s, tokens, 0);
    }
    if (rc == -ENODATA || rc == -ENOMEM)
        return;
    OK(rc);
    r->tokens = tokens;
}

// A step to fewer tokens than before, with no truncation. What is behind them is written anew.
static void do_step_back(uint32_t s)
{
    struct request *r = &requests[s];
    struct vmem_kv_slot_info info = {.size = sizeof info};
    int32_t lengths[SLOTS] = {0};
    uint32_t before[SLOTS] = {0};
    if (!r->taken || r->swapped || r->tokens < 2)
        return;
    lengths[s] = (int32_t)(r->tokens - below(r->tokens < 20 ? r->tokens : 20));
    before[s] = r->tokens;
    land(in_flight);
    OK(vmem_kv_get_slot(kv, s, &info));
    int rc = vmem_kv_step(kv, lengths, SLOTS, 0);
    if ((uint32_t)lengths[s] < info.shared_tokens && rc != -EINVAL)
        FAIL("%s: slot %u went back to %d, %u are shared", shape->name, s, lengths[s], info.shared_tokens);
    if (rc == -EINVAL || rc == -ENOMEM) // for what the window has given up; for what a truncation gave up
        return;
    OK(rc);
    r->tokens = (uint32_t)lengths[s];
    for (uint32_t i = 0; i < n_flights; i++)
        flights[i].valid[s] = flights[i].valid[s] < r->tokens ? flights[i].valid[s] : r->tokens;
    take_off(lengths, before);
}

// Speculative decoding: a step to some more tokens, of which the last are rejected.
static void do_speculate(void)
{
    do_step(false);
    for (uint32_t s = 0; s < SLOTS; s++)
        if (below(2))
            do_truncate(s);
}

static void do_prefix(void)
{
    struct prefix *p = &prefixes[below(PREFIXES)];
    uint32_t s = (uint32_t)below(SLOTS);
    struct request *r = &requests[s];
    if (unshared) {
        CHECK(k_save(kv, s, 1, &p->id) == (r->taken && !r->swapped ? -EOPNOTSUPP : -EINVAL));
        return;
    }
    if (p->id && below(3) == 0) {
        OK(k_drop(kv, p->id));
        p->id = 0;
    } else if (p->id) {
        struct vmem_kv_run_info info = {.size = sizeof info};
        uint64_t missing;
        uint32_t slot;
        OK(vmem_kv_get_run(kv, p->id, &info));
        CHECK_EQ(info.tokens, p->tokens);
        if (k_alloc(kv, 0, &slot))
            return;
        uint32_t tokens = info.min_tokens + (uint32_t)below(info.tokens - info.min_tokens + 1);
        tokens = tokens ? tokens : 1;
        int rc = k_missing(k_attach(kv, p->id, slot, tokens, 0), &missing);
        if (rc) {
            if (rc != -ENOMEM || !missing)
                FAIL("%s: attach %d, missing %" PRIu64 ": %s", shape->name, rc, missing, vmem_last_error());
            OK(vmem_kv_free(kv, slot, 0));
            return;
        }
        requests[slot].taken = true;
        requests[slot].tokens = requests[slot].written = tokens;
        memcpy(requests[slot].rows, p->rows, sizeof p->rows);
    } else if (r->taken && !r->swapped && r->tokens) {
        uint32_t tokens = 1 + (uint32_t)below(r->tokens);
        int rc = k_save(kv, s, tokens, &p->id);
        if (rc) {
            CHECK(rc == -ENODATA);
            p->id = 0;
            return;
        }
        p->tokens = tokens;
        memcpy(p->rows, r->rows, sizeof p->rows);
    }
}

// The context refuses what the manager must not ask for.
static void harden(void)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    uint64_t pages = st.held_pages > st.budget_pages ? st.held_pages : st.budget_pages;
    OK(vmem_set_budget(ctx, pages * page_size));
}

static void do_budget(void)
{
    uint64_t freed;
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_set_budget(ctx, 0));
    switch (below(4)) {
    case 0: OK(vmem_kv_set_budget(kv, budget / 2 + below(budget / 2))); break;
    case 1: OK(vmem_kv_reclaim(kv, below(budget), 0, &freed)); break;
    default: OK(vmem_kv_set_budget(kv, budget));
    }
    if (hard)
        harden();
    OK(vmem_kv_get_stats(kv, &st));
    CHECK(st.free_pages <= st.budget_pages);
}

static void run(const struct shape *sh, uint32_t flags, uint64_t page, uint64_t start, int operations)
{
    shape = sh;
    seed = start;
    hard = start % 2;
    zero = flags & VMEM_KV_ZERO;
    unshared = flags & VMEM_KV_UNSHARED;
    in_flight = 1 + (uint32_t)(start / 2 % 3);
    n_flights = 0;
    memset(part, 0, sizeof part);
    page_size = page;
    uint64_t scale = page / (64 * KIB);
    budget = (sh->pages / scale > 24 ? sh->pages / scale : 24) * page;
    trouble_start(start);
    struct vmem_kv_config cfg = {.size = sizeof cfg,
                                 .flags = flags | VMEM_KV_CHECK,
                                 .tensors = sh->tensors,
                                 .n_tensors = sh->n,
                                 .slots = SLOTS,
                                 .max_tokens = TOKENS,
                                 .tile_rows = sh->tile_rows,
                                 .page_size = page,
                                 .budget = budget,
                                 .eager_tokens = 50,
                                 .steps_in_flight = in_flight};
    OK(vmem_kv_create(ctx, &cfg, &kv));
    OK(vmem_kv_last_step(kv, &steps));
    for (uint32_t t = 0; t < sh->n; t++) {
        layouts[t].size = sizeof layouts[t];
        OK(vmem_kv_get_layout(kv, t, &layouts[t]));
    }
    if (hard)
        harden();
    stop(true);
    for (int i = 0; i < operations; i++) {
        uint32_t s = (uint32_t)below(SLOTS);
        if (below(3) == 0)
            go_on();
        switch (below(19)) {
        case 0:
        case 1: do_alloc(); break;
        case 2:
            if (requests[s].taken)
                do_free(s);
            break;
        case 3: do_swap(s); break;
        case 4: do_truncate(s); break;
        case 5:
        case 6: do_prefix(); break;
        case 7:
            if (below(4) == 0)
                do_budget();
            break;
        case 8:
            if (below(4) == 0)
                OK(vmem_kv_wait(kv));
            break;
        case 9:
        case 10: do_speculate(); break;
        case 11: do_retire(); break;
        case 12: do_step_back(s); break;
        default: do_step(below(2)); break;
        }
        verify(i % 256 == 0);
        verify_flights();
    }
    const bool troubled = trouble_on;
    trouble_end();
    verify(true);
    stop(false);
    for (uint32_t s = 0; s < SLOTS; s++)
        if (requests[s].taken)
            do_free(s);
    OK(vmem_kv_retire(kv, steps));
    for (int i = 0; i < PREFIXES; i++)
        if (prefixes[i].id)
            OK(k_drop(kv, prefixes[i].id));
    memset(prefixes, 0, sizeof prefixes);
    OK(vmem_kv_wait(kv)); // or it would back the next slot again
    OK(vmem_kv_reclaim(kv, UINT64_MAX / 2, 0, NULL));
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    CHECK_EQ(st.held_pages, 0);
    CHECK_EQ(st.shared_pages, 0);
    CHECK(!st.worker_errors || troubled);
    CHECK(st.window_pages < UINT32_MAX && st.reclaimed_pages < UINT32_MAX);
    vmem_kv_destroy(kv);
    OK(vmem_set_budget(ctx, 0));
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).reserved, 0);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    vmem__kv_hook = stop_at_random;
    static const uint32_t flags[] = {0,
                                     VMEM_KV_DEFER,
                                     VMEM_KV_DEFAULT,
                                     VMEM_KV_DEFAULT | VMEM_KV_ZERO,
                                     VMEM_KV_OVERLAP | VMEM_KV_DEFER,
                                     VMEM_KV_DEFAULT | VMEM_KV_LAZY,
                                     VMEM_KV_DEFER | VMEM_KV_GENEROUS};
    int operations = getenv("VMEM_TEST_OPERATIONS") ? atoi(getenv("VMEM_TEST_OPERATIONS")) : 250;
    uint64_t start = getenv("VMEM_TEST_SEED") ? strtoull(getenv("VMEM_TEST_SEED"), NULL, 0) : 1;
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (size_t j = 0; j < COUNT(flags); j++)
            run(&shapes[i], flags[j], test_page << ((i + j) % 3 == 2 && test_page < 2 * MIB), start + i * 100 + j,
                operations);
    for (size_t i = 0; i < COUNT(together) && ctx->b.whole_max; i++)
        for (size_t j = 0; j < COUNT(flags); j++)
            run(&together[i], flags[j] | VMEM_KV_UNSHARED, test_page, start + i * 100 + j, operations);
    printf("%" PRIu64 " calls were made again\n", trouble_calls);
    vmem_context_destroy(ctx);
    return 0;
}
