// Everything at once: KV caches, numbered blocks, a lease and committed ranges in one context, in several processes that
// share a pool which is too small for them. Kernels read late, after the calls behind which they were launched; each
// finds the words that were there. Over the fake driver, the driver is in trouble now and then, and addresses follow
// each other without gaps. Neighbours are killed and begin anew.
//
// VMEM_TEST_STEPS: operations of each process (1500); VMEM_TEST_SECONDS: instead, so many seconds; VMEM_TEST_SEED.
//
// SPDX-License-Identifier: MIT
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include "trouble.h"

#include "kv.h"
#include "vmem_blocks.h"
#include "vmem_torch.h"

#define PROCESSES 3
#define USERS 5
#define POOL_PAGES 100

static vmem_context *ctx;
static vmem_kv_pool *pool;
static uint64_t seed, P, short_of; // short_of: calls that found no memory

static uint32_t below(uint64_t n) { return (uint32_t)(rnd(&seed) % n); }

// ---- kernels --------------------------------------------------------------------------------------------------------
//
// A kernel knows addresses and the words that it is to find there. It runs when somebody waits for it.

#define READS 64
#define KERNELS 256
static struct kernel {
    uint32_t n;
    struct {
        uint64_t addr, want;
    } reads[READS];
} kernels[KERNELS];
static uint64_t launched, landed;

static void check_word(uint64_t addr, uint64_t want, const char *what)
{
    const uint64_t got = *(const volatile uint64_t *)(uintptr_t)addr;
    if (got != want)
        FAIL("%s: 0x%" PRIx64 " has 0x%" PRIx64 ", not 0x%" PRIx64, what, addr, got, want);
}

static void land(uint64_t kernel)
{
    for (; landed < kernel; landed++) {
        const struct kernel *k = &kernels[landed % KERNELS];
        for (uint32_t i = 0; i < k->n; i++)
            check_word(k->reads[i].addr, k->reads[i].want, "a kernel that runs late");
    }
}

static void add_read(uint64_t addr, uint64_t want)
{
    struct kernel *k = &kernels[launched % KERNELS];
    if (k->n == READS)
        return;
    k->reads[k->n].addr = addr;
    k->reads[k->n++].want = want;
}

static uint64_t launch(void)
{
    launched++;
    if (launched - landed == KERNELS)
        land(launched - KERNELS / 2);
    kernels[launched % KERNELS].n = 0;
    return launched;
}

// What is there is written again, by a later kernel: no earlier one tells what it read.
static void write_word(uint64_t addr, uint64_t word)
{
    for (uint64_t i = landed; i < launched; i++)
        for (uint32_t r = 0; r < kernels[i % KERNELS].n;)
            if (kernels[i % KERNELS].reads[r].addr == addr)
                kernels[i % KERNELS].reads[r] = kernels[i % KERNELS].reads[--kernels[i % KERNELS].n];
            else
                r++;
    *(volatile uint64_t *)(uintptr_t)addr = word;
}

// ---- users ----------------------------------------------------------------------------------------------------------

#define SLOTS 6
#define TOKENS 96
#define BLOCKS 48
#define SEGMENTS 10
#define SPAN 64 // pages of a range
enum kind { NOBODY, CACHE, NUMBERED, LEASE, RANGE, KINDS };
struct user {
    enum kind kind;
    bool pooled;
    // CACHE
    vmem_kv *kv;
    struct vmem_kv_layout layouts[2];
    uint32_t tokens[SLOTS], in_flight;
    bool taken[SLOTS], swapped[SLOTS];
    uint64_t rows[SLOTS][TOKENS], part[SLOTS], run_rows[TOKENS], run, run_kernel;
    uint32_t run_tokens;
    char *host[SLOTS];
    uint64_t step, step_kernel[4]; // the last steps, and their kernels
    // NUMBERED
    vmem_blocks *blocks;
    struct vmem_block_range range;
    uint64_t words[BLOCKS], fence, fence_kernel;
    bool used[BLOCKS];
    // LEASE, RANGE
    uint32_t place, pages[SEGMENTS];
    char *segments[SEGMENTS];
    bool parked[SEGMENTS];
    uint64_t addr, page_words[SPAN];
};
static struct user users[USERS];

static bool failed(int rc)
{
    if (rc && rc != -ENOMEM && rc != -ENOSPC)
        FAIL("%d: %s", rc, vmem_last_error());
    short_of += rc == -ENOMEM;
    return rc;
}

// ---- KV caches --------------------------------------------------------------------------------------------------------

static uint64_t row_at(const struct user *u, uint32_t t, uint32_t slot, uint32_t row)
{
    return u->layouts[t].addr + slot * u->layouts[t].slot_stride + row * u->layouts[t].row_bytes;
}

static void begin_cache(struct user *u)
{
    static const uint32_t flags[] = {VMEM_KV_DEFAULT, VMEM_KV_DEFAULT | VMEM_KV_LAZY, VMEM_KV_DEFER,
                                     VMEM_KV_OVERLAP | VMEM_KV_ZERO | VMEM_KV_LAZY};
    const uint32_t chosen = flags[below(COUNT(flags))];
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = P / (4u << below(3))}, {.row_bytes = P / 4, .kind = 1}};
    const struct vmem_kv_config cfg = {.size = sizeof cfg,
                                       .flags = chosen | VMEM_KV_CHECK,
                                       .tensors = tensors,
                                       .n_tensors = 2,
                                       .slots = SLOTS,
                                       .max_tokens = TOKENS,
                                       .page_size = P,
                                       .budget = (30 + below(60)) * P,
                                       .idle_ms = 1 + below(20),
                                       .eager_tokens = 20,
                                       .steps_in_flight = u->in_flight = 1 + below(2)};
    const struct vmem_kv_pool_share share = {.size = sizeof share, .name = "cache"};
    if (failed(vmem_kv_create(ctx, &cfg, &u->kv)))
        return;
    u->kind = CACHE;
    if (u->pooled && failed(vmem_kv_pool_join(pool, u->kv, &share)))
        u->pooled = false;
    for (uint32_t t = 0; t < 2; t++) {
        u->layouts[t].size = sizeof u->layouts[t];
        OK(vmem_kv_get_layout(u->kv, t, &u->layouts[t]));
    }
    OK(vmem_kv_last_step(u->kv, &u->step));
}

static void verify_rows(const struct user *u, uint32_t slot, bool all)
{
    for (uint32_t t = 0; t < 2 && u->taken[slot] && !u->swapped[slot]; t++)
        for (uint32_t r = all ? 0 : below(8); r < u->tokens[slot]; r += all ? 1 : 8)
            check_word(row_at(u, t, slot, r), u->rows[slot][r] + t, "a row");
}

static void end_request(struct user *u, uint32_t slot)
{
    const bool fenced = u->part[slot] && below(2);
    if (!fenced)
        land(launched);
    OK(vmem_kv_free(u->kv, slot, fenced ? u->part[slot] : 0));
    free(u->host[slot]);
    u->host[slot] = NULL;
    u->taken[slot] = u->swapped[slot] = false;
    u->tokens[slot] = 0;
    u->part[slot] = 0;
}

static void swap(struct user *u, uint32_t slot)
{
    land(launched);
    if (u->swapped[slot])
        u->swapped[slot] = failed(k_swap_in(ctx, u->kv, slot, &u->host[slot]));
    else if (u->tokens[slot]) {
        OK(k_swap_out(ctx, u->kv, slot, &u->host[slot]));
        u->swapped[slot] = true;
    }
}

static void step_cache(struct user *u)
{
    int32_t lengths[SLOTS] = {0};
    land(u->step_kernel[(u->step + 4 - u->in_flight) % 4]);
    for (uint32_t s = 0; s < SLOTS; s++)
        if (u->taken[s] && !u->swapped[s] && below(5))
            lengths[s] = (int32_t)(u->tokens[s] + 1 + below(8) * !below(4));
    for (uint32_t s = 0; s < SLOTS; s++)
        lengths[s] = lengths[s] > TOKENS ? TOKENS : lengths[s];
    if (failed(vmem_kv_step(u->kv, lengths, SLOTS, 0))) {
        const uint32_t s = below(SLOTS);
        uint32_t answer;
        if (u->pooled && below(2)) {
            OK(vmem_kv_pool_wait(u->kv, 1, &answer));
        } else if (u->taken[s] && below(2))
            swap(u, s);
        else if (u->taken[s])
            end_request(u, s);
        return;
    }
    u->step++;
    for (uint32_t s = 0; s < SLOTS; s++) {
        for (uint32_t r = u->tokens[s]; r < (uint32_t)lengths[s]; r++) {
            u->rows[s][r] = rnd(&seed);
            for (uint32_t t = 0; t < 2; t++)
                write_word(row_at(u, t, s, r), u->rows[s][r] + t);
        }
        if (!lengths[s])
            continue;
        u->tokens[s] = (uint32_t)lengths[s];
        u->part[s] = u->step;
        for (uint32_t i = 0; i < 5; i++) {
            const uint32_t r = below(u->tokens[s]), t = below(2);
            add_read(row_at(u, t, s, r), u->rows[s][r] + t);
        }
    }
    u->step_kernel[u->step % 4] = launch();
}

static void share_run(struct user *u, uint32_t slot)
{
    uint64_t missing;
    if (u->run && below(2)) {
        struct vmem_kv_run_info info = {.size = sizeof info};
        uint32_t fresh;
        OK(vmem_kv_get_run(u->kv, u->run, &info));
        if (failed(k_alloc(u->kv, 0, &fresh)))
            return;
        land(u->run_kernel);
        if (failed(k_missing(k_attach(u->kv, u->run, fresh, u->run_tokens, 0), &missing))) {
            OK(vmem_kv_free(u->kv, fresh, 0));
            return;
        }
        u->taken[fresh] = true;
        u->part[fresh] = u->step;
        u->tokens[fresh] = u->run_tokens;
        memcpy(u->rows[fresh], u->run_rows, sizeof u->run_rows);
        verify_rows(u, fresh, true);
    } else if (u->run) {
        OK(k_drop(u->kv, u->run));
        u->run = 0;
    } else if (u->taken[slot] && !u->swapped[slot] && u->tokens[slot]) {
        u->run_tokens = 1 + below(u->tokens[slot]);
        if (failed(k_save(u->kv, slot, u->run_tokens, &u->run))) {
            u->run = 0;
            return;
        }
        u->run_kernel = launched;
        memcpy(u->run_rows, u->rows[slot], sizeof u->run_rows);
    }
}

static void act_cache(struct user *u)
{
    const uint32_t s = below(SLOTS);
    uint32_t slot, tokens;
    int rc;
    switch (below(16)) {
    case 0 ... 2:
        if (!failed(k_alloc(u->kv, below(TOKENS), &slot))) {
            CHECK(!u->taken[slot]);
            u->taken[slot] = true;
        }
        break;
    case 3:
        if (u->taken[s])
            end_request(u, s);
        break;
    case 4:
        if (u->taken[s])
            swap(u, s);
        break;
    case 5:
        if (!u->taken[s] || u->swapped[s] || !u->tokens[s])
            break;
        tokens = below(u->tokens[s] + 1);
        rc = u->part[s] ? vmem_kv_truncate(u->kv, s, tokens, u->part[s]) : -EBUSY;
        if (rc == -EBUSY) { // rows that it shares
            land(launched);
            rc = vmem_kv_truncate(u->kv, s, tokens, 0);
        }
        if (!failed(rc))
            u->tokens[s] = tokens;
        break;
    case 6: share_run(u, s); break;
    case 7:
        land(launched);
        OK(vmem_kv_retire(u->kv, u->step));
        break;
    case 8: OK(vmem_kv_reclaim(u->kv, below(40) * P, 0, NULL)); break;
    case 9:
        if (!u->pooled)
            failed(vmem_kv_set_budget(u->kv, (10 + below(80)) * P));
        break;
    default: step_cache(u);
    }
    verify_rows(u, s, !below(16));
}

static void end_cache(struct user *u)
{
    land(launched);
    for (uint32_t s = 0; s < SLOTS; s++) {
        verify_rows(u, s, true);
        free(u->host[s]);
    }
    vmem_kv_destroy(u->kv);
}

// ---- numbered blocks ---------------------------------------------------------------------------------------------------

static uint64_t part_at(const struct user *u, uint32_t layer, uint32_t id)
{
    return u->range.addr + layer * u->range.layer_stride + id * u->range.block_stride;
}

static void begin_blocks(struct user *u)
{
    const uint64_t bytes = P / (1u << below(3));
    u->range = (struct vmem_block_range){.layer_stride = BLOCKS * bytes,
                                         .block_stride = bytes,
                                         .bytes = bytes,
                                         .layers = 1 + below(2)};
    const struct vmem_blocks_config cfg = {.size = sizeof cfg,
                                           .ranges = &u->range,
                                           .n_ranges = 1,
                                           .blocks = BLOCKS,
                                           .page_size = P,
                                           .budget = u->pooled || below(2) ? 0 : (4 + below(60)) * P};
    if (failed(vMemReserve(ctx, 2 * BLOCKS * P, 0, &u->range.addr)))
        return;
    u->addr = u->range.addr;
    OK(vmem_blocks_create(ctx, &cfg, &u->blocks));
    u->kind = NUMBERED;
    if (u->pooled && failed(vmem_blocks_join(u->blocks, pool, "blocks", 0, 0)))
        u->pooled = false;
}

static void verify_blocks(const struct user *u)
{
    for (uint32_t id = 0; id < BLOCKS; id++)
        for (uint32_t l = 0; l < u->range.layers && u->used[id]; l++)
            check_word(part_at(u, l, id), u->words[id] + l, "a block");
}

static void act_blocks(struct user *u)
{
    uint32_t ids[8], n = 0;
    uint64_t missing;
    const uint32_t first = below(BLOCKS), most = 1 + below(8);
    const bool back = below(2);
    for (uint32_t k = 0; k < most; k++)
        if (u->used[(first + k) % BLOCKS] != back)
            ids[n++] = (first + k) % BLOCKS;
    if (back && !failed(TROUBLE(vmem_blocks_back(u->blocks, ids, n, below(3) ? 0 : VMEM_BLOCKS_OVER, NULL)))) {
        for (uint32_t k = 0; k < n; k++) {
            u->used[ids[k]] = true;
            u->words[ids[k]] = rnd(&seed);
            for (uint32_t l = 0; l < u->range.layers; l++) {
                write_word(part_at(u, l, ids[k]), u->words[ids[k]] + l);
                add_read(part_at(u, l, ids[k]), u->words[ids[k]] + l);
            }
        }
        launch();
    } else if (back && u->pooled) {
        failed(vmem_blocks_ask(u->blocks, (1 + below(20)) * P, &missing));
    } else if (!back) {
        uint64_t fence = 0;
        if (below(2)) {
            OK(vmem_blocks_fence(u->blocks, &fence));
            u->fence = fence;
            u->fence_kernel = launched;
        } else {
            land(launched);
        }
        OK(vmem_blocks_unback(u->blocks, ids, n, fence));
        for (uint32_t k = 0; k < n; k++)
            u->used[ids[k]] = false;
    }
    if (u->fence && !below(3)) {
        land(u->fence_kernel);
        OK(vmem_blocks_pass(u->blocks, u->fence));
        u->fence = 0;
    }
    if (u->pooled && !below(8))
        OK(vmem_blocks_offer(u->blocks, below(30) * P));
    if (!below(8))
        OK(vmem_blocks_flush(u->blocks));
    if (!below(4))
        verify_blocks(u);
}

static void end_blocks(struct user *u)
{
    land(launched);
    verify_blocks(u);
    vmem_blocks_destroy(u->blocks);
    OK(vmem_unreserve(ctx, u->addr));
}

// ---- a lease -----------------------------------------------------------------------------------------------------------

static void begin_lease(struct user *u)
{
    const struct vmem_torch_config cfg = {.size = sizeof cfg, .flags = VMEM_TORCH_CHECK, .page_size = P, .wait_ms = 1};
    for (const struct user *v = users; v < users + USERS; v++)
        if (v->kind == LEASE) // the functions below are those of the first place
            return;
    if (failed(vmem_torch_open(ctx, pool, &cfg, &u->place)))
        return;
    CHECK_EQ(u->place % VMEM_TORCH_PLACES, 0);
    u->kind = LEASE;
}

static void verify_lease(const struct user *u)
{
    for (uint32_t s = 0; s < SEGMENTS; s++)
        for (uint32_t p = 0; p < u->pages[s] && u->segments[s] && !u->parked[s]; p++)
            check_word((uintptr_t)u->segments[s] + p * P, u->page_words[s] + p, "a segment");
}

static void write_segment(struct user *u, uint32_t s)
{
    u->page_words[s] = rnd(&seed);
    for (uint32_t p = 0; p < u->pages[s]; p++) {
        write_word((uintptr_t)u->segments[s] + p * P, u->page_words[s] + p);
        add_read((uintptr_t)u->segments[s] + p * P, u->page_words[s] + p);
    }
    launch();
}

// All that are parked, or a part of them: the rest is claimed, until another operation ends that.
static void unpark(struct user *u)
{
    uint64_t parked[SEGMENTS];
    uint32_t which[SEGMENTS], n = 0;
    uint8_t lost[SEGMENTS];
    for (uint32_t s = 0; s < SEGMENTS; s++)
        if (u->parked[s]) {
            parked[n] = (uintptr_t)u->segments[s];
            which[n++] = s;
        }
    const int rc =
        vmem_torch_unpark_segments(u->place, parked, n, below(2) ? UINT64_MAX : below(20) * P, 1, NULL, lost);
    if (rc && rc != -ENOMEM)
        FAIL("unpark: %d: %s", rc, vmem_last_error());
    short_of += rc != 0;
    for (uint32_t i = 0; i < n && !rc; i++) {
        u->parked[which[i]] = lost[i] == VMEM_TORCH_CLAIMED;
        if (lost[i] == 1)
            write_segment(u, which[i]);
    }
}

static void act_lease(struct user *u)
{
    const uint32_t s = below(SEGMENTS);
    uint64_t at = (uintptr_t)u->segments[s];
    bool any_parked = false;
    for (uint32_t k = 0; k < SEGMENTS; k++)
        any_parked |= u->parked[k];
    if (!at && !any_parked) {
        u->pages[s] = 1 + below(12);
        u->segments[s] = vmem_torch_alloc_0(u->pages[s] * P, test_info.device, NULL);
        short_of += !u->segments[s];
        if (u->segments[s])
            write_segment(u, s);
    } else if (u->parked[s]) {
        unpark(u);
    } else if (at && below(2)) {
        land(launched);
        vmem_torch_free_0(u->segments[s], 0, test_info.device, NULL);
        u->segments[s] = NULL;
    } else if (at) {
        land(launched);
        OK(vmem_torch_park(u->place, &at, 1, NULL));
        u->parked[s] = true;
        if (below(2))
            vmem_torch_trim(u->place);
    }
    verify_lease(u);
}

static void end_lease(struct user *u)
{
    land(launched);
    verify_lease(u);
    for (uint32_t s = 0; s < SEGMENTS; s++)
        if (u->segments[s])
            vmem_torch_free_0(u->segments[s], 0, test_info.device, NULL);
    OK(vmem_torch_close(u->place));
}

// ---- committed ranges ---------------------------------------------------------------------------------------------------

static void begin_range(struct user *u)
{
    const uint32_t backdrop = test_info.caps & VMEM_CAP_BACKDROP && below(2) ? VMEM_RESERVE_BACKDROP : 0;
    if (!failed(vMemReserve(ctx, SPAN * P, backdrop, &u->addr)))
        u->kind = RANGE;
}

static void act_range(struct user *u)
{
    const uint32_t from = below(SPAN), to = from + 1 + below(SPAN - from);
    const struct vmem_range part = {u->addr + from * P, (to - from) * P};
    if (below(2)) {
        if (failed(TROUBLE(vmem_commit(ctx, &part, 1, P, below(2) ? VMEM_MAP_FINE : 0, NULL))))
            return;
        for (uint32_t p = from; p < to; p++) {
            if (!u->page_words[p])
                write_word(u->addr + p * P, u->page_words[p] = rnd(&seed) | 1);
            add_read(u->addr + p * P, u->page_words[p]);
        }
        launch();
    } else {
        land(launched);
        if (failed(TROUBLE(vmem_decommit(ctx, &part, 1, NULL))))
            return;
        memset(u->page_words + from, 0, (to - from) * sizeof u->page_words[0]);
    }
}

static void verify_range(const struct user *u)
{
    for (uint32_t p = 0; p < SPAN; p++)
        if (u->page_words[p])
            check_word(u->addr + p * P, u->page_words[p], "a page");
}

static void end_range(struct user *u)
{
    land(launched);
    verify_range(u);
    OK(vmem_unreserve(ctx, u->addr));
}

// ---- a process ----------------------------------------------------------------------------------------------------------

static void (*const begins[KINDS])(struct user *) = {NULL, begin_cache, begin_blocks, begin_lease, begin_range};
static void (*const acts[KINDS])(struct user *) = {NULL, act_cache, act_blocks, act_lease, act_range};
static void (*const ends[KINDS])(struct user *) = {NULL, end_cache, end_blocks, end_lease, end_range};

static void open_pool(const char *path)
{
    struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .path = path};
    ctx = test_context(0);
    P = test_page;
    cfg.budget = POOL_PAGES * P;
    OK(vmem_kv_pool_create(&cfg, &pool));
}

// What is absent in trouble comes back at the next call that succeeds; nobody may look before.
static void calm(void)
{
    vmem_page page;
    trouble_pause();
    for (const struct user *u = users; u < users + USERS && test_stats(ctx).absent; u++)
        if (u->kind == RANGE || u->kind == NUMBERED)
            OK(vmem_query(ctx, u->addr, &page, NULL));
}

static void act(void)
{
    struct user *u = &users[below(USERS)];
    if (u->kind == NOBODY) {
        *u = (struct user){.pooled = below(3)};
        begins[1 + below(KINDS - 1)](u);
    } else if (!below(60)) {
        calm();
        ends[u->kind](u);
        *u = (struct user){0};
    } else {
        if (below(2))
            calm();
        acts[u->kind](u);
    }
}

static void play(const char *path, uint64_t steps, uint64_t seconds)
{
    const uint64_t first = seed;
    const time_t end = time(NULL) + (time_t)seconds;
    open_pool(path);
    trouble_start(first);
    for (uint64_t i = 0; seconds ? time(NULL) < end : i < steps; i++)
        act();
    trouble_end();
    calm();
    for (struct user *u = users; u < users + USERS; u++)
        if (u->kind)
            ends[u->kind](u);
    vmem_kv_pool_destroy(pool);
    const struct vmem_stats left = test_stats(ctx);
    CHECK_EQ(left.absent, 0);
    CHECK_EQ(left.created, 0);
    CHECK_EQ(left.reserved, 0);
    vmem_context_destroy(ctx);
    printf("seed %" PRIu64 ": %" PRIu64 " kernels, %" PRIu64 " calls without memory, %" PRIu64 " made again\n", first,
           launched, short_of, trouble_calls);
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

// A process of its own, with a driver of its own: it runs this program again.
static pid_t begin_process(const char *self, const char *path, uint64_t number_of)
{
    char text[32];
    const pid_t pid = fork();
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(text, sizeof text, "%" PRIu64, number_of);
    execl(self, self, test_backend, path, text, (char *)NULL);
    _exit(127);
}

int main(int argc, char **argv)
{
    const uint64_t seconds = number("VMEM_TEST_SECONDS", 0), steps = number("VMEM_TEST_STEPS", 1500);
    char path[] = "/tmp/vmem-adversary-XXXXXX";
    pid_t children[PROCESSES];
    test_start(argc, argv);
    if (!test_cpu_sees_pages())
        SKIP("its kernels run on the CPU");
    if (argc > 3) {
        seed = strtoull(argv[3], NULL, 0);
        play(argv[2], steps, seconds);
        return 0;
    }
    const uint64_t first = seed = number("VMEM_TEST_SEED", 1);
    const time_t end = time(NULL) + (time_t)seconds;
    CHECK(mkdtemp(path));
    char file[64];
    snprintf(file, sizeof file, "%s/pool", path);
    for (uint64_t i = 0; i < PROCESSES; i++)
        children[i] = begin_process("/proc/self/exe", file, first * 1000 + i);
    const uint32_t victim = seconds || steps >= 1000 ? 0 : PROCESSES; // is killed in the midst
    for (uint64_t i = PROCESSES, left = PROCESSES; left;) {
        int status;
        if (victim < PROCESSES && children[victim] && i < PROCESSES + (seconds ? seconds : 2)) {
            usleep(50000 + below(200000));
            kill(children[victim], SIGKILL);
            CHECK_EQ(waitpid(children[victim], &status, 0), children[victim]);
            if (!WIFSIGNALED(status) && (!WIFEXITED(status) || WEXITSTATUS(status)))
                FAIL("seed %" PRIu64 ": status 0x%x", first, (unsigned)status);
            const bool again = !seconds || time(NULL) < end;
            children[victim] = again ? begin_process("/proc/self/exe", file, first * 1000 + i) : 0;
            left -= !again;
            i++;
            continue;
        }
        const pid_t pid = wait(&status);
        CHECK(pid > 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status))
            FAIL("seed %" PRIu64 ": a process ended with status 0x%x", first, (unsigned)status);
        for (uint32_t k = 0; k < PROCESSES; k++)
            children[k] = children[k] == pid ? 0 : children[k];
        left--;
    }
    unlink(file);
    rmdir(path);
    return 0;
}
