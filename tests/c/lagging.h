// The model of test_kv_fences: requests with what their rows must say, and the kernels in flight that read them.
//
// SPDX-License-Identifier: MIT
#include "kernels.h"
#include "stop_worker.h"

#define PREFIXES 4
#define BLOCKS 24

struct request {
    uint32_t tokens, written; // rows that it had once
    bool taken, swapped;
    uint64_t part; // the last step that it took part in, or whose kernels write the rows that it was attached
    uint64_t origin[K_TOKENS];
    char *host;
};
struct prefix { // or a block
    uint64_t id, origin[K_TOKENS];
    uint32_t tokens;
    uint64_t ready; // when kernels up to this step have ended, all rows are written
    uint64_t index; // of a block: its place
};
struct shape {
    const char *name;
    struct vmem_kv_tensor tensors[K_TENSORS];
    uint32_t n, tile_rows, pages, block_tokens; // block_tokens: for pages of 64 KiB
};
static const struct shape shapes[] = {
    {"two alike", {{.row_bytes = 2048}, {.row_bytes = 2048}}, 2, 1, 40, 32},
    {"window beside full",
     {{.row_bytes = 8192}, {.row_bytes = 8192, .window = 40}, {.row_bytes = 1024}},
     3,
     1,
     120,
     24},
    {"tiles, odd rows", {{.row_bytes = 1152}, {.row_bytes = 656, .kind = 1}}, 2, 16, 24, 20},
    {"wide rows", {{.row_bytes = 32768}, {.row_bytes = 16384}}, 2, 1, 260, 4},
    {"tiles", {{.row_bytes = 4096}, {.row_bytes = 4096}}, 2, 24, 80, 24},
    {"a page and a half", {{.row_bytes = 96 * 1024}}, 1, 1, 200, 2},
    {"window, tiles", {{.row_bytes = 32768, .window = 64}, {.row_bytes = 16384, .max_tokens = 100}}, 2, 16, 120, 8},
};

static vmem_context *ctx;
static vmem_kv *kv;
static const struct shape *shape;
static struct kernel_tensor tensors[K_TENSORS];
static struct request requests[K_SLOTS];
static struct prefix prefixes[PREFIXES], blocks[BLOCKS];
static uint64_t seed, page_size, budget, steps, landed, block_tokens, n_failed, n_kernels, n_swapped;
static uint32_t in_flight, flags;
static bool hard; // the context's budget is the cache's

static uint64_t below(uint64_t n) { return rnd(&seed) % n; }

// ---- kernels --------------------------------------------------------------------------------------------------

static void land(uint64_t step)
{
    struct kernel_fault f;
    if (step <= landed)
        return;
    if (kernels_wait(step, &f) && f.step)
        FAIL("%s: kernel of step %" PRIu64 " of %" PRIu64 ": slot %u tensor %u row %u says %" PRIx64 ", not %" PRIx64,
             shape->name, f.step, steps, f.slot, f.tensor, f.row, f.got, f.want);
    else if (kernels_wait(step, &f))
        FAIL("%s: a call waited for kernels up to step %" PRIu64, shape->name, steps);
    landed = step;
}

// Kernels of so many steps may run when a step is called.
static void land_for_step(void) { land(steps - in_flight); }

static void take_off(const int32_t *lengths, const uint32_t *before)
{
    struct kernel k = {.step = ++steps, .late = (uint32_t)below(2)};
    for (uint32_t s = 0; s < K_SLOTS; s++) {
        struct request *r = &requests[s];
        k.before[s] = before[s];
        k.tokens[s] = (uint32_t)lengths[s];
        if (!lengths[s])
            continue;
        for (uint32_t i = before[s]; i < r->tokens; i++)
            r->origin[i] = rnd(&seed);
        memcpy(k.origin[s], r->origin, sizeof r->origin);
        r->part = steps;
    }
    kernels_launch(&k);
    n_kernels++;
}

static uint64_t fence_of(uint32_t s) { return below(2) ? requests[s].part : steps; }
static bool quiet(uint32_t s) { return requests[s].part <= landed; }

static void do_retire(void)
{
    const uint64_t step = landed + below(steps - landed + 1);
    land(step);
    OK(vmem_kv_retire(kv, step));
}
