// VMEM_KV_UNSHARED: what a prompt fills is pages that come and go together where the backend has such (cuda); sharing is
// refused everywhere.
//
// SPDX-License-Identifier: MIT
#include "checked.h"
#include "core/core.h"
#include "kv.h"

#define SLOTS 4
#define PAGES 40 // of a slot in one tensor
#define TENSORS 3

static vmem_context *ctx;
static vmem_kv *kv;
static struct vmem_kv_layout layouts[TENSORS];
static int32_t lengths[SLOTS]; // tokens: one to a page

static void make(uint32_t flags, uint64_t budget_pages)
{
    struct vmem_kv_tensor tensors[TENSORS];
    for (uint32_t t = 0; t < TENSORS; t++)
        tensors[t] = (struct vmem_kv_tensor){.row_bytes = test_page};
    kv = k_create(ctx, .flags = flags | VMEM_KV_CHECK, .tensors = tensors, .n_tensors = TENSORS, .slots = SLOTS,
                  .max_tokens = PAGES, .budget = budget_pages * test_page);
    for (uint32_t t = 0; t < TENSORS; t++) {
        layouts[t].size = sizeof layouts[t];
        OK(vmem_kv_get_layout(kv, t, &layouts[t]));
    }
    memset(lengths, 0, sizeof lengths);
}

static uint64_t at(uint32_t t, uint32_t slot, uint32_t page)
{
    return layouts[t].addr + slot * layouts[t].slot_stride + page * test_page;
}

static uint32_t request(uint32_t tokens)
{
    uint32_t slot;
    OK(k_alloc(kv, tokens, &slot));
    lengths[slot] = (int32_t)tokens;
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    return slot;
}

static void done(uint32_t slot)
{
    OK(vmem_kv_free(kv, slot, 0));
    lengths[slot] = 0;
}

static void end(void)
{
    vmem_kv_destroy(kv);
    OK(vmem_trim(ctx, NULL));
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(ctx->arena_bytes, 0);
}

// Driver calls of a request's first step.
static uint64_t calls(uint32_t tokens, uint32_t *slot)
{
    const uint64_t before = test_stats(ctx).syscalls;
    *slot = request(tokens);
    return test_stats(ctx).syscalls - before;
}

static void few_calls(void)
{
    uint32_t first, slot;
    make(VMEM_KV_UNSHARED | VMEM_KV_LAZY, 3 * PAGES * TENSORS);
    first = request(1); // slot 0's first page stands over what made its address known
    // Created, mapped, allowed: 32 pages in two.
    CHECK(calls(32, &slot) <= 2 * 2 * TENSORS + TENSORS);
    for (uint32_t t = 0; t < TENSORS; t++)
        for (uint32_t p = 0; p < 32; p++)
            put_word(ctx, at(t, slot, p), 100 * t + p);
    // Growth of one page is one page, in front of which nothing changes.
    lengths[slot]++;
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    for (uint32_t t = 0; t < TENSORS; t++)
        for (uint32_t p = 0; p < 32; p++)
            CHECK_EQ(get_word(ctx, at(t, slot, p)), 100 * t + p);
    CHECK_EQ(k_stats(kv).held_pages, (1 + 33) * TENSORS);
    done(slot);
    done(first);
    end();
    make(VMEM_KV_LAZY, 3 * PAGES * TENSORS);
    first = request(1);
    CHECK(calls(32, &slot) > 2 * 32 * TENSORS);
    done(slot);
    done(first);
    end();
}

// A free slot's pages are given up as they came, at least as many as are wanted. What is left serves the next request,
// and a request that wants a part of pages that go together gets others.
static void parts(void)
{
    uint64_t freed;
    make(VMEM_KV_UNSHARED | VMEM_KV_DEFER, 2 * PAGES * TENSORS);
    uint32_t slot = request(26); // 16, 8 and 2 pages
    done(slot);
    CHECK_EQ(k_stats(kv).kept_pages, 26 * TENSORS);
    OK(vmem_kv_reclaim(kv, TENSORS * test_page, 0, &freed));
    CHECK_EQ(freed, 2 * TENSORS * test_page);
    OK(vmem_kv_reclaim(kv, TENSORS * test_page, 0, &freed));
    CHECK_EQ(freed, 8 * TENSORS * test_page);
    slot = request(5);
    CHECK_EQ(k_stats(kv).held_pages, 5 * TENSORS);
    lengths[slot] = 30; // chunk by chunk: 16, 8 and 1 more
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    OK(vmem_kv_truncate(kv, slot, 9, 0));
    lengths[slot] = 9;
    // Pages 5 to 20 go together, and stay as long as page 8 does.
    OK(vmem_kv_reclaim(kv, UINT64_MAX / 2, 0, &freed));
    CHECK_EQ(k_stats(kv).held_pages, 21 * TENSORS);
    CHECK_EQ(freed, 9 * TENSORS * test_page);
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    done(slot);
    end();
}

// Where there is no room for many pages in one, pages are had one by one. Memory taken ahead gives way to the other kind.
static void small_memory(void)
{
    make(VMEM_KV_UNSHARED, 20 * TENSORS);
    uint64_t kept = ctx->committed;
    CHECK(kept >= 20 * TENSORS * test_page);
    uint32_t a = request(1), b = request(19);
    CHECK_EQ(k_stats(kv).held_pages, 20 * TENSORS);
    CHECK(ctx->committed < kept + 2 * ctx->b.whole_max);
    done(a);
    done(b);
    for (uint32_t i = 1; i < 20; i++) { // one page after another
        a = i == 1 ? request(1) : a;
        lengths[a] = (int32_t)i;
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
    }
    CHECK(ctx->committed < kept + 2 * ctx->b.whole_max);
    done(a);
    end();
    make(VMEM_KV_UNSHARED, 64 * TENSORS); // taken ahead as 16 pages in one
    kept = ctx->committed;
    a = request(24);
    b = request(5);
    CHECK(ctx->committed <= kept + 16 * test_page);
    done(a);
    done(b);
    end();
    make(VMEM_KV_UNSHARED | VMEM_KV_LAZY, 20 * TENSORS);
    OK(vmem_set_budget(ctx, 20 * TENSORS * test_page)); // of all memory, unused parts included
    a = request(3);
    b = request(17);
    done(a);
    a = request(3);
    CHECK_EQ(k_stats(kv).held_pages, 20 * TENSORS);
    done(a);
    done(b);
    OK(vmem_set_budget(ctx, 0));
    end();
}

// Every call of the backend fails in turn: a step that fails has changed nothing.
static void failures(void)
{
    for (unsigned long n = 1;; n++) {
        make(VMEM_KV_UNSHARED | VMEM_KV_LAZY, 2 * PAGES * TENSORS);
        uint32_t slot = request(3), other;
        for (uint32_t t = 0; t < TENSORS; t++)
            put_word(ctx, at(t, slot, 2), 7 + t);
        OK(k_alloc(kv, 0, &other));
        lengths[other] = 25;
        lengths[slot] = 20;
        checked_fail(n);
        int rc = vmem_kv_step(kv, lengths, SLOTS, 0);
        checked_fail(0);
        CHECK(!rc || rc == -ENOMEM);
        const bool hit = checked_failed();
        for (uint32_t t = 0; t < TENSORS; t++)
            CHECK_EQ(get_word(ctx, at(t, slot, 2)), 7 + t);
        if (rc)
            CHECK_EQ(k_stats(kv).held_pages, 3 * TENSORS);
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
        CHECK_EQ(k_stats(kv).held_pages, 45 * TENSORS);
        done(slot);
        done(other);
        end();
        if (!hit)
            return;
    }
}

// Kernels that read past whole tiles find out: on a GPU, rows without a page are no memory, before a request and after.
static void no_backdrop(uint32_t slot)
{
    uint64_t word;
    const struct vmem_copy_op beyond = {.dst = (uintptr_t)&word, .src = at(0, slot, PAGES - 1), .length = sizeof word};
    const bool bare = test_info.caps & VMEM_CAP_GPU && !ctx->b.whole_max;
    for (int i = 0; i < 2; i++) {
        if (bare)
            ERR(vmem_copy_batch(ctx, &beyond, 1), EFAULT, "");
        else if (!ctx->b.whole_max) // there, memory around a page may be readable
            OK(vmem_copy_batch(ctx, &beyond, 1));
        lengths[slot] = PAGES;
        OK(vmem_kv_step(kv, lengths, SLOTS, 0));
        OK(vmem_copy_batch(ctx, &beyond, 1));
        OK(vmem_kv_truncate(kv, slot, 4, 0));
        OK(vmem_kv_reclaim(kv, PAGES * TENSORS * test_page, 0, NULL));
    }
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vmem_context_info(ctx, &test_info));
    test_page = test_info.page_sizes & -test_info.page_sizes;
    make(VMEM_KV_UNSHARED | VMEM_KV_LAZY, PAGES * TENSORS);
    uint32_t slot = request(4);
    uint64_t prefix;
    ERR(k_save(kv, slot, 4, &prefix), EOPNOTSUPP, "VMEM_KV_UNSHARED");
    ERR(k_hold(kv, slot, 1, 1, &prefix), EOPNOTSUPP, "VMEM_KV_UNSHARED");
    no_backdrop(slot);
    done(slot);
    vmem_kv_destroy(kv);
    OK(vmem_trim(ctx, NULL));
    if (ctx->b.whole_max) {
        few_calls();
        parts();
        small_memory();
        failures();
    }
    vmem_context_destroy(ctx);
    return 0;
}
