// After a busy time, pages that a few runs hold lie in many arenas: they are moved together, keep their bytes, and the arenas go
// back. On a host backend whose arenas are memory, as those of GPUs are.
//
// SPDX-License-Identifier: MIT
#include "checked.h"
#include "kv.h"

#define SLOTS 8
#define PLACES 256 // blocks of a slot
#define TOKENS 16

static vmem_context *ctx;
static vmem_kv *kv;
static struct vmem_kv_layout layouts[2];

static uint64_t word_addr(uint32_t t, uint32_t slot, uint32_t place)
{
    return layouts[t].addr + slot * layouts[t].slot_stride + (place * TOKENS + 3) * layouts[t].row_bytes;
}

static uint64_t device_bytes(void) { return test_stats(ctx).created + test_stats(ctx).overhead; }

// The run of each place that stays, and what its rows say.
static uint64_t kept[PLACES], says[PLACES];

// The runs that stay follow each other; each is from another slot than the one before. Every third can be evicted.
static void busy_time(void)
{
    static struct vmem_kv_run runs[SLOTS * PLACES];
    static uint64_t gone[SLOTS * PLACES];
    int32_t lengths[SLOTS];
    uint32_t n = 0, n_gone = 0;
    for (uint32_t s = 0; s < SLOTS; s++) {
        uint32_t slot;
        OK(k_alloc(kv, 0, &slot));
        lengths[s] = PLACES * TOKENS;
    }
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    for (uint32_t s = 0; s < SLOTS; s++)
        for (uint32_t p = 0; p < PLACES; p++, n++) {
            runs[n] = (struct vmem_kv_run){.slot = s, .first = p * TOKENS, .tokens = TOKENS, .keep = p % 3 != 0};
            for (uint32_t t = 0; t < 2; t++)
                put_word(ctx, word_addr(t, s, p), n * 10 + t);
        }
    OK(vmem_kv_share(kv, runs, n, 0));
    for (uint32_t i = 0; i < n; i++)
        if (i / PLACES == i % SLOTS) {
            kept[i % PLACES] = runs[i].id;
            says[i % PLACES] = i * 10;
        } else {
            gone[n_gone++] = runs[i].id;
        }
    for (uint32_t s = 0; s < SLOTS; s++)
        OK(vmem_kv_free(kv, s, 0));
    OK(vmem_kv_drop(kv, gone, n_gone, NULL));
    OK(vmem_kv_wait(kv));
    OK(vmem_kv_reclaim(kv, UINT64_MAX / 2, 0, NULL));
}

static void verify(void)
{
    uint32_t slot, tokens;
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_attach(kv, slot, kept, PLACES, UINT32_MAX, 0, &tokens));
    CHECK_EQ(tokens, PLACES * TOKENS);
    for (uint32_t i = 0; i < PLACES; i++)
        for (uint32_t t = 0; t < 2; t++)
            CHECK_EQ(get_word(ctx, word_addr(t, slot, i)), says[i] + t);
    OK(vmem_kv_free(kv, slot, 0));
    OK(vmem_kv_wait(kv));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (test_page != VMEM_PAGE_64K)
        SKIP("the shapes here are made of pages of 64 KiB");
    OK(checked_context(test_backend, 0, true, &ctx));
    const struct vmem_kv_tensor tensors[] = {{.row_bytes = 8192}, {.row_bytes = 4096}};
    struct vmem_kv_config config = {
        .size = sizeof(config),
        .flags = VMEM_KV_DEFER | VMEM_KV_LAZY | VMEM_KV_CHECK,
        .tensors = tensors,
        .n_tensors = 2,
        .slots = SLOTS,
        .max_tokens = PLACES * TOKENS,
        .page_size = VMEM_PAGE_64K,
        .budget = 2 * GIB,
    };
    struct vmem_kv_stats st = {.size = sizeof st};
    uint64_t freed = 99, own = device_bytes(); // the backend's
    OK(vmem_kv_create(ctx, &config, &kv));
    OK(vmem_kv_reclaim(kv, 0, VMEM_KV_COMPACT, &freed)); // nothing held
    CHECK_EQ(freed, 0);
    for (uint32_t t = 0; t < 2; t++) {
        layouts[t].size = sizeof layouts[t];
        OK(vmem_kv_get_layout(kv, t, &layouts[t]));
    }
    busy_time();
    uint64_t before = device_bytes();
    OK(vmem_kv_get_stats(kv, &st));
    CHECK_EQ(st.held_pages, PLACES * 3);
    CHECK(before > own + 3 * PLACES * 3 * VMEM_PAGE_64K);
    OK(vmem_kv_reclaim(kv, 0, VMEM_KV_COMPACT, &freed));
    CHECK_EQ(freed, before - device_bytes());
    CHECK(device_bytes() <= own + 64 * MIB); // the smallest arena, into which they fit
    verify();
    OK(vmem_kv_reclaim(kv, 0, VMEM_KV_COMPACT, &freed));
    CHECK_EQ(freed, 0);

    // Those that are in use stay where they are; the rest moves.
    uint32_t slot, tokens;
    OK(vmem_kv_drop(kv, kept, PLACES, NULL));
    busy_time();
    before = device_bytes();
    OK(k_alloc(kv, 0, &slot));
    OK(vmem_kv_attach(kv, slot, kept, 2, UINT32_MAX, 0, &tokens));
    OK(vmem_kv_reclaim(kv, 0, VMEM_KV_COMPACT, &freed));
    CHECK(device_bytes() < before);
    CHECK_EQ(get_word(ctx, word_addr(1, slot, 1)), says[1] + 1);
    OK(vmem_kv_free(kv, slot, 0));
    verify();

    // Where the context's budget leaves little beside what there is, they move in small portions.
    OK(vmem_kv_drop(kv, kept, PLACES, NULL));
    busy_time();
    OK(vmem_set_budget(ctx, device_bytes() - own + 4 * MIB));
    OK(vmem_kv_reclaim(kv, 0, VMEM_KV_COMPACT, &freed));
    CHECK(device_bytes() <= own + PLACES * 3 * VMEM_PAGE_64K + 16 * MIB);
    OK(vmem_set_budget(ctx, 0));
    verify();

    // Without memory to move them they stay.
    OK(vmem_kv_drop(kv, kept, PLACES, NULL));
    busy_time();
    before = device_bytes();
    OK(vmem_set_budget(ctx, test_stats(ctx).created));
    OK(vmem_kv_reclaim(kv, 0, VMEM_KV_COMPACT, &freed));
    CHECK_EQ(freed, 0);
    CHECK_EQ(device_bytes(), before);
    verify();
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    return 0;
}
