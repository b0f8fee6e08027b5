// Random requests of an engine that accounts in blocks and decides itself which ones stay (as vLLM does), against a
// shadow that knows what every block's rows hold. Each block is a run to be kept. Runs are made and dropped, requests
// start with blocks that several others wrote, and end in any order. The manager checks itself (VMEM_KV_CHECK)
// throughout.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define SLOTS 6
#define PLACES 8 // blocks of a slot
#define BLOCKS 30
#define TOKENS 16 // of a block

struct shape {
    const char *name;
    struct vmem_kv_tensor tensors[3];
    uint32_t n, pages; // pages: of a block, in all tensors
};
static const struct shape shapes[] = {
    {"a page", {{.row_bytes = 4096}}, 1, 1},
    {"wide rows", {{.row_bytes = 16384}}, 1, 4},
    {"unlike tensors", {{.row_bytes = 4096}, {.row_bytes = 8192}, {.row_bytes = 4096}}, 3, 4},
};
static const uint32_t flag_sets[] = {0, VMEM_KV_DEFER, VMEM_KV_DEFAULT & ~VMEM_KV_OVERLAP, VMEM_KV_DEFAULT,
                                     VMEM_KV_DEFER | VMEM_KV_ZERO};

static vmem_context *ctx;
static vmem_kv *kv;
static const struct shape *shape;
static struct vmem_kv_layout layouts[3];
static uint64_t seed;
static int32_t lengths[SLOTS];
static struct {
    bool taken;
    uint32_t n;             // blocks
    uint64_t value[PLACES]; // what their rows hold
    bool written[PLACES];   // by this slot: nobody shares it
} slots[SLOTS];
static struct {
    uint64_t run; // 0: none
    uint32_t place;
    uint64_t value;
} blocks[BLOCKS];

static uint32_t below(uint32_t n) { return (uint32_t)(rnd(&seed) % n); }

static uint64_t addr_of(uint32_t t, uint32_t slot, uint32_t place, uint32_t row)
{
    return layouts[t].addr + slot * layouts[t].slot_stride + (place * TOKENS + row) * layouts[t].row_bytes;
}

// The first and the last row of a block, in every tensor.
static void move_block(uint32_t slot, uint32_t place, uint64_t *value, bool to_memory)
{
    for (uint32_t t = 0; t < shape->n; t++)
        for (uint32_t row = 0; row < TOKENS; row += TOKENS - 1) {
            uint64_t addr = addr_of(t, slot, place, row), word = *value + t * 1000 + row;
            struct vmem_copy_op op = {to_memory ? addr : (uintptr_t)&word, to_memory ? (uintptr_t)&word : addr, 8};
            OK(vmem_copy_batch(ctx, &op, 1));
            if (!to_memory && word != *value + t * 1000 + row)
                FAIL("%s: slot %u, block %u, tensor %u, row %u: %" PRIx64 ", not of %" PRIx64, shape->name, slot, place,
                     t, row, word, *value);
        }
}

static void verify(void)
{
    uint64_t shadow = 0, pages = 0;
    struct vmem_kv_stats st = {.size = sizeof st};
    for (uint32_t s = 0; s < SLOTS; s++)
        for (uint32_t p = 0; slots[s].taken && p < slots[s].n; p++)
            move_block(s, p, &slots[s].value[p], false);
    // Pages that only runs hold: of blocks that stand in no slot.
    for (uint32_t b = 0; b < BLOCKS; b++) {
        bool stands = false;
        for (uint32_t s = 0; s < SLOTS; s++)
            for (uint32_t p = 0; slots[s].taken && p < slots[s].n; p++)
                stands |= slots[s].value[p] == blocks[b].value;
        shadow += blocks[b].run && !stands;
    }
    OK(vmem_kv_get_stats(kv, &st));
    pages = st.prefix_pages;
    CHECK_EQ(pages, shadow * shape->pages);
    CHECK(st.held_pages <= st.budget_pages);
}

static void do_start(void)
{
    uint64_t runs[PLACES + 1];
    uint32_t slot, got, hits = below(PLACES - 1), n = 0;
    const uint32_t from = below(BLOCKS);
    if (k_alloc(kv, 0, &slot))
        return;
    slots[slot].taken = true;
    slots[slot].n = 0;
    lengths[slot] = 0;
    for (uint32_t i = 0; i < 2 * BLOCKS && n < hits; i++) {
        const uint32_t b = (from + i) % BLOCKS;
        if (!blocks[b].run || blocks[b].place != n)
            continue;
        slots[slot].value[n] = blocks[b].value;
        slots[slot].written[n] = false;
        runs[n++] = blocks[b].run;
    }
    // Behind them, one that does not follow, or that is gone.
    const uint32_t other = below(BLOCKS);
    runs[n] = blocks[other].place == n ? 0 : blocks[other].run;
    OK(vmem_kv_attach(kv, slot, runs, n + 1, UINT32_MAX, VMEM_KV_LOOK, &got));
    CHECK_EQ(got, n * TOKENS);
    OK(vmem_kv_attach(kv, slot, runs, n + 1, UINT32_MAX, 0, &got));
    CHECK_EQ(got, n * TOKENS);
    if (n)
        ERR(vmem_kv_attach(kv, slot, runs, n, UINT32_MAX, 0, &got), EINVAL, "not newly allocated");
    slots[slot].n = n;
    lengths[slot] = (int32_t)(n * TOKENS);
}

static void do_grow(void)
{
    uint32_t s = below(SLOTS);
    if (!slots[s].taken || slots[s].n == PLACES)
        return;
    uint32_t more = 1 + below(PLACES - slots[s].n), ids[PLACES], n = 0;
    struct vmem_kv_run runs[PLACES + 1];
    lengths[s] += (int32_t)(more * TOKENS);
    int rc = vmem_kv_step(kv, lengths, SLOTS, 0);
    if (rc) {
        CHECK(rc == -ENOMEM);
        lengths[s] -= (int32_t)(more * TOKENS);
        return;
    }
    const bool early = below(2); // the rows are written when they are shared already
    for (uint32_t i = 0; i < more; i++) {
        uint32_t place = slots[s].n++;
        slots[s].value[place] = rnd(&seed) << 16;
        slots[s].written[place] = true;
        if (!early)
            move_block(s, place, &slots[s].value[place], true);
        uint32_t b = below(BLOCKS);
        bool fresh = !blocks[b].run;
        for (uint32_t k = 0; k < n; k++)
            fresh &= ids[k] != b;
        if (!fresh)
            continue;
        ids[n] = b;
        runs[n++] = (struct vmem_kv_run){.slot = s, .first = place * TOKENS, .tokens = TOKENS, .keep = 1};
    }
    // With rows that the slot does not have at the end, nothing is shared.
    runs[n] = (struct vmem_kv_run){.slot = s, .first = slots[s].n * TOKENS, .tokens = 1, .keep = 1};
    ERR(vmem_kv_share(kv, runs, n + 1, 0), EINVAL, "tokens");
    OK(vmem_kv_share(kv, runs, n, 0));
    for (uint32_t i = 0; i < n; i++) {
        blocks[ids[i]].run = runs[i].id;
        blocks[ids[i]].place = runs[i].first / TOKENS;
        blocks[ids[i]].value = slots[s].value[runs[i].first / TOKENS];
    }
    for (uint32_t place = slots[s].n - more; early && place < slots[s].n; place++)
        move_block(s, place, &slots[s].value[place], true);
}

static void do_drop(void)
{
    uint64_t runs[4];
    for (uint32_t i = 0; i < 4; i++) { // those that are gone are fine
        const uint32_t b = below(BLOCKS);
        runs[i] = blocks[b].run;
        blocks[b].run = 0;
    }
    OK(vmem_kv_drop(kv, runs, 4, NULL));
}

static void do_free(void)
{
    uint32_t s = below(SLOTS);
    if (!slots[s].taken)
        return;
    OK(vmem_kv_free(kv, s, 0));
    slots[s].taken = false;
    lengths[s] = 0;
}

static void run(uint32_t flags)
{
    struct vmem_kv_config config = {
        .size = sizeof(config),
        .flags = flags | VMEM_KV_CHECK,
        .tensors = shape->tensors,
        .n_tensors = shape->n,
        .slots = SLOTS,
        .max_tokens = PLACES * TOKENS,
        .page_size = VMEM_PAGE_64K,
        .budget = 40 * shape->pages * VMEM_PAGE_64K,
        .ahead_tokens = TOKENS,
        .eager_tokens = TOKENS,
    };
    OK(vmem_kv_create(ctx, &config, &kv));
    for (uint32_t t = 0; t < shape->n; t++) {
        layouts[t].size = sizeof layouts[t];
        OK(vmem_kv_get_layout(kv, t, &layouts[t]));
    }
    memset(slots, 0, sizeof slots);
    memset(blocks, 0, sizeof blocks);
    memset(lengths, 0, sizeof lengths);
    for (uint32_t i = 0; i < 1500; i++) {
        switch (below(8)) {
        case 0:
        case 1: do_start(); break;
        case 2:
        case 3:
        case 4: do_grow(); break;
        case 5: do_drop(); break;
        case 6: do_free(); break;
        default: OK(vmem_kv_reclaim(kv, VMEM_PAGE_64K * below(8), 0, NULL)); break;
        }
        if (i % 8 == 0)
            verify();
    }
    verify();
    vmem_kv_destroy(kv); // with runs and slots taken
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).mapped, 0);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (test_page != VMEM_PAGE_64K)
        SKIP("the shapes here are made of pages of 64 KiB");
    ctx = test_context(0);
    for (uint32_t i = 0; i < COUNT(shapes); i++)
        for (uint32_t f = 0; f < COUNT(flag_sets); f++) {
            shape = &shapes[i];
            seed = 77 + i * 10 + f;
            run(flag_sets[f]);
        }
    vmem_context_destroy(ctx);
    return 0;
}
