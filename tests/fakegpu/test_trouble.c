// A driver in trouble, on the GPU's backends over the fake driver: several calls in a row fail, among them those that
// undo what came before. No page that the books call mapped is lost: it is there, or the calls that would use it say that
// it is absent; and it is there again as soon as the driver maps. $SEED and $STEPS vary the random parts.
//
// SPDX-License-Identifier: MIT
#define FAKEGPU_USER
#include "fakegpu.h"

#include <setjmp.h>
#include <signal.h>

#include "../c/kv.h"
#include "core/memory.h"
#include "vmem_blocks.h"
#include "vmem_torch.h"

static const long lengths[] = {1, 2, 3, 5, 8, 40};

static vmem_context *ctx;
static uint64_t seed;
static unsigned steps;

static uint32_t pick(uint32_t n) { return (uint32_t)(rnd(&seed) % n); }

// ---- pages ------------------------------------------------------------------------------------------------------

static sigjmp_buf back;
static void on_fault(int s)
{
    (void)s;
    siglongjmp(back, 1);
}
static bool read_word(uint64_t addr, uint64_t *word)
{
    if (sigsetjmp(back, 1))
        return false;
    *word = *(volatile uint64_t *)addr;
    return true;
}

// One page, by what the books say.
static void check_page(uint64_t addr, vmem_page page, uint64_t word)
{
    uint64_t value = 0;
    vmem_page found;
    int rc = vmem_query(ctx, addr, &found, NULL);

    CHECK_EQ(found, page);
    if (rc) {
        CHECK(strstr(vmem_last_error(), "is absent") && test_stats(ctx).absent);
        rc = page ? vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)&value, addr, 8}, 1) : 0;
        CHECK(rc ? rc == -ENOMEM && strstr(vmem_last_error(), "is absent") : !page || value == word); // it may be over
    } else if (page) {
        CHECK(read_word(addr, &value));
        CHECK_EQ(value, word);
    }
}

#define N 40 // pages: a block of 2 MiB and a quarter; fewer where each is a block
static uint32_t n_pages;
enum kind { UNMAP, RELEASE, MAP, REPLACE, DECOMMIT, COMMIT, KINDS };

// The call of that kind, of pages [from, to) of N at base. `old` are mapped, `more` are not.
static int call(enum kind kind, uint64_t base, uint32_t gap, const vmem_page *old, const vmem_page *more, uint32_t from,
                uint32_t to, uint32_t flags)
{
    struct vmem_range cuts[N];
    struct vmem_map_op maps[N];
    struct vmem_range ranges[N];

    for (uint32_t i = from; i < to; i++) {
        const uint64_t addr = base + (uint64_t)i * gap * test_page;
        cuts[i] = (struct vmem_range){addr, test_page};
        maps[i] = (struct vmem_map_op){addr, more[i]};
        ranges[i] = (struct vmem_range){addr, test_page};
    }
    switch (kind) {
    case UNMAP: return vMemUnmapBatch(ctx, cuts + from, to - from, NULL);
    case RELEASE: return vMemReleaseBatch(ctx, old + from, to - from, NULL);
    case MAP: return vMemMapBatch(ctx, maps + from, to - from, flags, NULL);
    case REPLACE: return vMemMapBatch(ctx, maps + from, to - from, flags | VMEM_MAP_REPLACE, NULL);
    case DECOMMIT: return vmem_decommit(ctx, ranges + from, to - from, NULL);
    default: return vmem_commit(ctx, ranges + from, to - from, test_page, flags, NULL);
    }
}

static bool one_call(enum kind kind, uint32_t gap, bool backdrop, uint32_t flags, uint32_t from, uint32_t to, long at,
                     long k)
{
    const bool fresh = kind == MAP || kind == COMMIT;
    vmem_page old[N], more[N];
    const uint32_t n = n_pages;
    struct vmem_map_op maps[N];
    uint64_t base;

    OK(vMemReserve(ctx, (uint64_t)n * gap * test_page, backdrop ? VMEM_RESERVE_BACKDROP : 0, &base));
    OK(vMemCreate(ctx, test_page, n, 0, old));
    OK(vMemCreate(ctx, test_page, n, 0, more));
    for (uint32_t i = 0; i < n; i++)
        maps[i] = (struct vmem_map_op){base + (uint64_t)i * gap * test_page, old[i]};
    OK(vMemMapBatch(ctx, maps, n, flags, NULL));
    for (uint32_t i = 0; i < n; i++)
        *(uint64_t *)maps[i].addr = 100 + i;
    if (fresh)
        OK(vMemUnmap(ctx, maps[from].addr, maps[to - 1].addr + test_page - maps[from].addr));
    fakegpu_fail_many(at, k);
    const int rc = call(kind, base, gap, old, more, from, to, flags);
    CHECK(!rc || rc == -ENOMEM);
    for (int trouble = 1; trouble >= 0; trouble--) {
        if (!trouble)
            fakegpu_fail(0);
        for (uint32_t i = 0; rc && i < n; i++) {
            const bool there = i < from || i >= to || !fresh;
            check_page(maps[i].addr, there ? old[i] : 0, 100 + i);
        }
    }
    CHECK_EQ(test_stats(ctx).absent, 0);
    for (uint32_t i = from; i < to && backdrop && fresh && rc && test_page < VMEM_PAGE_2M; i++) {
        uint64_t word; // of the backdrop; on cuda it is not everywhere
        CHECK(read_word(maps[i].addr, &word) && !word);
    }
    if (rc) // nothing is left of the failure
        OK(call(kind, base, gap, old, more, from, to, flags));
    OK(vMemUnmap(ctx, base, (uint64_t)n * gap * test_page));
    OK(vmem_drop(ctx, old, n));
    OK(vmem_drop(ctx, more, n));
    OK(vMemFree(ctx, base));
    CHECK_EQ(test_stats(ctx).created, 0);
    return rc;
}

static void test_calls(void)
{
    static const struct {
        uint32_t from, to;
    } parts[] = {{0, N}, {0, 32}, {5, 6}, {31, 33}, {3, 37}}, large[] = {{0, 6}, {2, 3}, {1, 5}};
    unsigned failed = 0;

    ctx = test_context(0);
    const bool small = test_page < VMEM_PAGE_2M;
    n_pages = small ? N : 6;
    for (enum kind kind = 0; kind < KINDS; kind++)
        for (uint32_t variant = 0; variant < 8; variant++)
            for (size_t p = 0; p < (small ? COUNT(parts) : COUNT(large)); p++)
                for (size_t k = 0; k < COUNT(lengths); k++)
                    for (long at = 1; at < 30; at += 1 + at / 3) {
                        const uint32_t from = small ? parts[p].from : large[p].from;
                        const uint32_t to = small ? parts[p].to : large[p].to;
                        if (!one_call(kind, 1 + variant % 2, variant & 2, variant & 4 ? VMEM_MAP_FINE : 0, from, to, at,
                                      lengths[k]))
                            break;
                        failed++;
                    }
    printf("%u calls failed\n", failed);
    CHECK(failed > 500);
    vmem_context_destroy(ctx);
}

// What is absent can be unmapped, replaced and released as if it were there.
static void test_absent(void)
{
    vmem_page p[32], q;
    struct vmem_map_op maps[32];
    uint64_t base;

    ctx = test_context(0);
    for (int what = 0; what < 4; what++) {
        OK(vMemReserve(ctx, 32 * test_page, 0, &base));
        OK(vMemCreate(ctx, test_page, 32, 0, p));
        OK(vMemCreate(ctx, test_page, 1, 0, &q));
        for (uint32_t i = 0; i < 32; i++)
            maps[i] = (struct vmem_map_op){base + i * test_page, p[i]};
        OK(vMemMapBatch(ctx, maps, 32, 0, NULL));
        for (uint32_t i = 0; i < 32; i++)
            *(uint64_t *)maps[i].addr = 100 + i;
        fakegpu_fail_many(1, 1000);
        CHECK_EQ(vMemMapBatch(ctx, &(struct vmem_map_op){base + 4 * test_page, q}, 1, VMEM_MAP_REPLACE, NULL), -ENOMEM);
        if (strcmp(test_backend, "uvm"))
            CHECK(test_stats(ctx).absent >= test_page);
        fakegpu_fail_many(2, 0);
        if (what == 0)
            OK(vMemUnmap(ctx, base + 4 * test_page, test_page));
        else if (what == 1)
            OK(vMemMapBatch(ctx, &(struct vmem_map_op){base + 4 * test_page, q}, 1, VMEM_MAP_REPLACE, NULL));
        else if (what == 2)
            OK(vMemRelease(ctx, p[4]));
        else
            OK(vmem_unreserve(ctx, base));
        CHECK_EQ(test_stats(ctx).absent, 0);
        for (uint32_t i = 0; i < 32 && what < 3; i++)
            if (i != 4)
                check_page(maps[i].addr, p[i], 100 + i);
        OK(vmem_drop(ctx, p, 32));
        OK(vmem_drop(ctx, &q, 1));
        if (what < 3)
            OK(vMemFree(ctx, base));
    }
    vmem_context_destroy(ctx);
}

// ---- what stands on pages -----------------------------------------------------------------------------------------

// In trouble or not, at random; the first half of the steps ends each trouble before it goes on.
static void maybe_trouble(unsigned step)
{
    if (step % 2)
        fakegpu_fail(0);
    if (!pick(3))
        fakegpu_trouble(rnd(&seed), 12);
}

#define SLOTS 6
static void test_kv(uint32_t flags)
{
    const uint32_t most = 40;
    struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 4}, {.row_bytes = test_page / 4}};
    struct vmem_kv_config cfg = {.size = sizeof cfg,
                                 .flags = flags,
                                 .tensors = tensors,
                                 .n_tensors = 2,
                                 .slots = SLOTS,
                                 .max_tokens = most,
                                 .page_size = test_page,
                                 .budget = 60 * test_page};
    struct vmem_kv_layout l[2] = {{.size = sizeof l[0]}, {.size = sizeof l[0]}};
    int32_t now[SLOTS] = {0}, next[SLOTS];
    uint64_t words[SLOTS] = {0};
    unsigned failed = 0;
    vmem_kv *kv;

    ctx = test_context(0);
    OK(vmem_kv_create(ctx, &cfg, &kv));
    for (uint32_t t = 0; t < 2; t++)
        OK(vmem_kv_get_layout(kv, t, &l[t]));
    for (unsigned i = 0; i < steps; i++) {
        maybe_trouble(i);
        for (uint32_t s = 0; s < SLOTS; s++)
            next[s] = now[s];
        const uint32_t s = pick(SLOTS);
        uint32_t slot;
        if (!now[s] && !vmem_kv_alloc(kv, NULL, &slot)) {
            next[slot] = 1 + (int32_t)pick(most);
            words[slot] = 0;
        } else if (now[s] && pick(3)) {
            const int32_t more = 1 + (int32_t)pick(12);
            next[s] = MIN((int32_t)most, now[s] + more);
        } else if (now[s]) {
            uint64_t step;
            OK(vmem_kv_last_step(kv, &step));
            if (!vmem_kv_free(kv, s, pick(2) ? step : 0))
                now[s] = next[s] = 0;
        }
        int rc = vmem_kv_step(kv, next, SLOTS, 0);
        if (rc && rc != -ENOMEM)
            FAIL("step %u: %d: %s", i, rc, vmem_last_error());
        failed += rc != 0;
        if (rc) // what was given a slot in vain goes
            for (uint32_t k = 0; k < SLOTS; k++)
                if (!now[k] && next[k])
                    vmem_kv_free(kv, k, 0);
        for (uint32_t k = 0; k < SLOTS && !rc; k++) {
            for (uint32_t r = 0; r < (uint32_t)next[k] * 2; r++) {
                uint64_t *row = (void *)(l[r % 2].addr + k * l[r % 2].slot_stride + r / 2 * l[r % 2].row_bytes);
                if (r < (uint32_t)now[k] * 2)
                    CHECK_EQ(*row, words[k] + r);
            }
            words[k] = rnd(&seed);
            for (uint32_t r = 0; r < (uint32_t)next[k] * 2; r++)
                *(uint64_t *)(l[r % 2].addr + k * l[r % 2].slot_stride + r / 2 * l[r % 2].row_bytes) = words[k] + r;
            now[k] = next[k];
        }
    }
    fakegpu_fail(0);
    OK(vmem_kv_step(kv, now, SLOTS, 0));
    CHECK_EQ(test_stats(ctx).absent, 0);
    printf("%u of %u steps failed\n", failed, steps);
    CHECK(failed > steps / 60);
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
}

#define BLOCKS 48
static void test_blocks(void)
{
    const uint64_t half = test_page / 2;
    struct vmem_block_range range = {.layer_stride = BLOCKS * half, .block_stride = half, .bytes = half, .layers = 2};
    struct vmem_blocks_config cfg = {.size = sizeof cfg,
                                     .ranges = &range,
                                     .n_ranges = 1,
                                     .blocks = BLOCKS,
                                     .page_size = test_page};
    uint64_t words[BLOCKS] = {0};
    bool used[BLOCKS] = {0};
    unsigned failed = 0;
    vmem_blocks *b;

    ctx = test_context(0);
    OK(vMemReserve(ctx, BLOCKS * test_page, 0, &range.addr));
    OK(vmem_blocks_create(ctx, &cfg, &b));
    for (unsigned i = 0; i < steps; i++) {
        uint32_t ids[8], n = 1 + pick(8), first = pick(BLOCKS), mine = 0;
        const bool give = pick(2);

        maybe_trouble(i);
        for (uint32_t k = 0; k < n; k++)
            if (used[(first + k) % BLOCKS] == give)
                ids[mine++] = (first + k) % BLOCKS;
        if (give) {
            OK(vmem_blocks_unback(b, ids, mine, 0));
            for (uint32_t k = 0; k < mine; k++)
                used[ids[k]] = false;
            if (pick(2))
                OK(vmem_blocks_flush(b));
            mine = 0;
        }
        int rc = vmem_blocks_back(b, ids, mine, 0, NULL);
        CHECK(!rc || rc == -ENOMEM);
        failed += rc != 0;
        for (uint32_t id = 0; !rc && id < BLOCKS; id++) {
            volatile uint64_t *at[2] = {(void *)(range.addr + id * half), (void *)(range.addr + (BLOCKS + id) * half)};
            for (uint32_t k = 0; k < mine; k++)
                if (ids[k] == id) {
                    used[id] = true;
                    *at[0] = *at[1] = words[id] = rnd(&seed);
                }
            if (used[id])
                CHECK(*at[0] == words[id] && *at[1] == words[id]);
        }
    }
    fakegpu_fail(0);
    OK(vmem_blocks_back(b, NULL, 0, 0, NULL));
    CHECK_EQ(test_stats(ctx).absent, 0);
    printf("%u of %u calls failed\n", failed, steps);
    CHECK(failed > steps / 60);
    vmem_blocks_destroy(b);
    OK(vMemFree(ctx, range.addr));
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
}

#define SEGMENTS 12
static void test_lease(void)
{
    struct vmem_kv_pool_config pool_cfg = {.size = sizeof pool_cfg, .budget = 64 * test_page};
    struct vmem_torch_config cfg = {.size = sizeof cfg,
                                    .flags = VMEM_TORCH_CHECK,
                                    .page_size = test_page,
                                    .wait_ms = 1};
    uint64_t words[SEGMENTS] = {0};
    uint32_t pages[SEGMENTS], place;
    char *segments[SEGMENTS] = {0};
    bool parked[SEGMENTS] = {0};
    unsigned failed = 0;
    vmem_kv_pool *pool;

    ctx = test_context(0);
    OK(vmem_kv_pool_create(&pool_cfg, &pool));
    OK(vmem_torch_open(ctx, pool, &cfg, &place));
    CHECK_EQ(place % VMEM_TORCH_PLACES, 0);
    for (unsigned i = 0; i < steps; i++) {
        const uint32_t s = pick(SEGMENTS), what = pick(4);
        uint64_t at = (uintptr_t)segments[s];
        bool fresh = false;

        maybe_trouble(i);
        if (!segments[s]) {
            bool any_parked = false;
            for (uint32_t k = 0; k < SEGMENTS; k++)
                any_parked |= parked[k];
            pages[s] = 1 + pick(8);
            segments[s] = any_parked ? NULL : vmem_torch_alloc_0(pages[s] * test_page, test_info.device, NULL);
            failed += !any_parked && !segments[s];
            fresh = segments[s];
        } else if (parked[s]) {
            uint8_t lost = 0;
            int rc = vmem_torch_unpark_segments(place, &at, 1, 1, NULL, &lost);
            failed += rc != 0;
            parked[s] = rc;
            fresh = !rc && lost;
            if (!rc && !lost)
                CHECK_EQ(*(uint64_t *)at, words[s]);
        } else if (what == 0) {
            vmem_torch_free_0(segments[s], 0, test_info.device, NULL);
            segments[s] = NULL;
        } else if (what == 1) {
            OK(vmem_torch_park(place, &at, 1, NULL));
            parked[s] = true;
            if (pick(2))
                vmem_torch_trim(place);
        }
        if (fresh) {
            words[s] = rnd(&seed);
            for (uint32_t p = 0; p < pages[s]; p++)
                *(uint64_t *)(segments[s] + p * test_page) = words[s] + p;
        }
        for (uint32_t k = 0; k < SEGMENTS; k++)
            for (uint32_t p = 0; segments[k] && !parked[k] && p < pages[k]; p++)
                CHECK_EQ(*(volatile uint64_t *)(segments[k] + p * test_page), words[k] + p);
    }
    fakegpu_fail(0);
    for (uint32_t s = 0; s < SEGMENTS; s++)
        if (segments[s])
            vmem_torch_free_0(segments[s], 0, test_info.device, NULL);
    OK(vmem_torch_close(place));
    vmem_kv_pool_destroy(pool);
    printf("%u calls of %u steps failed\n", failed, steps);
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).absent, 0);
    vmem_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (!fakegpu_fail_many)
        SKIP("the fake driver is not preloaded");
    seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 0) : 1;
    steps = getenv("STEPS") ? (unsigned)atoi(getenv("STEPS")) : test_page < VMEM_PAGE_2M ? 1000 : 300;
    signal(SIGSEGV, on_fault);
    signal(SIGBUS, on_fault);
    test_calls();
    test_absent();
    signal(SIGSEGV, SIG_DFL);
    signal(SIGBUS, SIG_DFL);
    test_kv(0);
    test_kv(VMEM_KV_UNSHARED);
    test_blocks();
    test_lease();
    return 0;
}
