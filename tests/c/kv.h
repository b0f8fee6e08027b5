// Helpers of the KV-cache manager's tests, beside its calls.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TEST_KV_H
#define VMEM_TEST_KV_H

#include "harness.h"
#include "vmem_kv_pool.h"

// A cache with pages of the smallest size: k_create(ctx, .tensors = tensors, ...).
#define k_create(ctx, ...)                                                             \
    k_create_with(ctx, &(struct vmem_kv_config){.size = sizeof(struct vmem_kv_config), \
                                                .page_size = test_page,                \
                                                __VA_ARGS__})
__attribute__((unused)) static vmem_kv *k_create_with(vmem_context *ctx, const struct vmem_kv_config *cfg)
{
    vmem_kv *kv;
    OK(vmem_kv_create(ctx, cfg, &kv));
    return kv;
}

__attribute__((unused)) static struct vmem_kv_stats k_stats(vmem_kv *kv)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    OK(vmem_kv_get_stats(kv, &st));
    return st;
}

__attribute__((unused)) static struct vmem_kv_slot_info k_slot(vmem_kv *kv, uint32_t slot)
{
    struct vmem_kv_slot_info info = {.size = sizeof info};
    OK(vmem_kv_get_slot(kv, slot, &info));
    return info;
}

__attribute__((unused)) static struct vmem_kv_shortage k_shortage(void)
{
    struct vmem_kv_shortage s = {.size = sizeof s};
    OK(vmem_kv_last_shortage(&s));
    return s;
}

// The address of a row.
__attribute__((unused)) static uint64_t k_row(vmem_kv *kv, uint32_t tensor, uint32_t slot, uint32_t row)
{
    struct vmem_kv_layout l = {.size = sizeof l};
    OK(vmem_kv_get_layout(kv, tensor, &l));
    return l.addr + slot * l.slot_stride + row * l.row_bytes;
}

// A slot for a request whose first step has about `tokens` tokens.
__attribute__((unused)) static int k_alloc(vmem_kv *kv, uint32_t tokens, uint32_t *slot)
{
    return vmem_kv_alloc(kv,
                         &(struct vmem_kv_alloc_options){.size = sizeof(struct vmem_kv_alloc_options),
                                                         .tokens = tokens},
                         slot);
}

// Passes on what a call returned, and stores how many pages it lacked (NULL: nowhere).
__attribute__((unused)) static int k_missing(int rc, uint64_t *missing)
{
    if (missing)
        *missing = rc == -ENOMEM ? k_shortage().missing_pages : 0;
    return rc;
}

// The number of the cache's n-th step, made or not.
__attribute__((unused)) static uint64_t k_step(vmem_kv *kv, uint64_t n)
{
    uint64_t last;
    OK(vmem_kv_last_step(kv, &last));
    return last - k_stats(kv).steps + n;
}

// Copies the rows that a request in the slot can read out to host, tensor after tensor, or back in (NULL: copies
// nothing). How many bytes they are.
__attribute__((unused)) static uint64_t k_rows(vmem_context *ctx, vmem_kv *kv, uint32_t slot, char *host, bool out)
{
    struct vmem_kv_layout l = {.size = sizeof l};
    uint64_t bytes = 0;
    uint32_t first, end;
    for (uint32_t t = 0; !vmem_kv_get_layout(kv, t, &l); t++) {
        OK(vmem_kv_get_rows(kv, slot, t, &first, &end));
        const uint64_t rows = l.addr + slot * l.slot_stride + first * l.row_bytes, at = (uintptr_t)host + bytes;
        const struct vmem_copy_op op = {.dst = out ? at : rows,
                                        .src = out ? rows : at,
                                        .length = (end - first) * l.row_bytes};
        if (host && op.length)
            OK(vmem_copy_batch(ctx, &op, 1));
        bytes += op.length;
    }
    return bytes;
}

// Swaps a slot out: *host is new memory with its rows.
__attribute__((unused)) static int k_swap_out(vmem_context *ctx, vmem_kv *kv, uint32_t slot, char **host)
{
    uint64_t step;
    OK(vmem_kv_last_step(kv, &step));
    *host = malloc(k_rows(ctx, kv, slot, NULL, true) + 1);
    k_rows(ctx, kv, slot, *host, true);
    return vmem_kv_swap_out(kv, slot, k_slot(kv, slot).tokens, step);
}

// Swaps it in, and frees host then.
__attribute__((unused)) static int k_swap_in(vmem_context *ctx, vmem_kv *kv, uint32_t slot, char **host)
{
    int rc = vmem_kv_swap_in(kv, slot);
    if (rc)
        return rc;
    k_rows(ctx, kv, slot, *host, false);
    free(*host);
    *host = NULL;
    return 0;
}

__attribute__((unused)) static vmem_kv_pool *k_pool(uint64_t pages)
{
    const struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = pages * test_page};
    vmem_kv_pool *pool;
    OK(vmem_kv_pool_create(&cfg, &pool));
    return pool;
}

__attribute__((unused)) static struct vmem_kv_pool_info k_pool_info(vmem_kv_pool *pool)
{
    struct vmem_kv_pool_info info = {.size = sizeof info};
    OK(vmem_kv_pool_query(pool, &info));
    return info;
}

// The i-th member of a pool. -ENOENT: it has not so many.
__attribute__((unused)) static int k_member(vmem_kv_pool *pool, uint32_t i, struct vmem_kv_pool_member *out)
{
    struct vmem_kv_pool_member rows[VMEM_KV_POOL_MEMBERS], *at[VMEM_KV_POOL_MEMBERS];
    uint32_t n;
    for (uint32_t k = 0; k < VMEM_KV_POOL_MEMBERS; k++) {
        rows[k].size = sizeof(rows[k]);
        at[k] = &rows[k];
    }
    int rc = vmem_kv_pool_get_members(pool, at, &n);
    if (!rc && i >= n)
        return -ENOENT;
    *out = rows[i];
    return rc;
}

__attribute__((unused)) static struct vmem_kv_pool_member k_pool_row(vmem_kv_pool *pool, const char *name)
{
    struct vmem_kv_pool_member row = {.size = sizeof row};
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        if (!k_member(pool, i, &row) && !strcmp(row.name, name))
            return row;
    FAIL("no member %s", name);
}

// A slot's state, told apart by what it waits for.
enum { K_ENDING = VMEM_KV_SWAPPED + 1 };
__attribute__((unused)) static uint32_t k_state(vmem_kv *kv, uint32_t slot)
{
    const struct vmem_kv_slot_info info = k_slot(kv, slot);
    CHECK(info.state <= VMEM_KV_SWAPPED);
    CHECK(!info.after || info.state == VMEM_KV_FREE);
    return info.after ? K_ENDING : info.state;
}

// Rows of a slot as a run to be kept.
__attribute__((unused)) static int k_hold(vmem_kv *kv, uint32_t slot, uint32_t first, uint32_t tokens, uint64_t *run)
{
    struct vmem_kv_run r = {.slot = slot, .first = first, .tokens = tokens, .keep = 1};
    int rc = vmem_kv_share(kv, &r, 1, 0);
    *run = r.id;
    return rc;
}

// A prefix: the first rows of a slot, as a run to be kept. -ENODATA: its windows have passed what the next token reads.
__attribute__((unused)) static int k_save(vmem_kv *kv, uint32_t slot, uint32_t tokens, uint64_t *prefix)
{
    struct vmem_kv_run run = {.slot = slot, .tokens = tokens, .keep = 1};
    struct vmem_kv_run_info info = {.size = sizeof info};
    int rc = vmem_kv_share(kv, &run, 1, 0);
    if (!rc && !run.id)
        return -ENODATA;
    if (!rc)
        OK(vmem_kv_get_run(kv, run.id, &info));
    if (!rc && info.min_tokens > tokens) {
        OK(vmem_kv_drop(kv, &run.id, 1, NULL));
        return -ENODATA;
    }
    *prefix = run.id;
    return rc;
}

// Begins with exactly so many rows of a prefix.
__attribute__((unused)) static int k_attach(vmem_kv *kv, uint64_t prefix, uint32_t slot, uint32_t tokens,
                                            uint32_t flags)
{
    struct vmem_kv_run_info info = {.size = sizeof info};
    uint32_t got;
    int rc = vmem_kv_get_run(kv, prefix, &info);
    if (!rc && tokens < info.min_tokens)
        rc = -ENODATA;
    if (!rc)
        rc = vmem_kv_attach(kv, slot, &prefix, 1, tokens, flags, &got);
    if (!rc)
        CHECK_EQ(got, tokens);
    return rc;
}

__attribute__((unused)) static int k_drop(vmem_kv *kv, uint64_t prefix) { return vmem_kv_drop(kv, &prefix, 1, NULL); }

#endif
