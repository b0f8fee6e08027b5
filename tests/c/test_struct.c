// Structures that grow: a caller whose structure is shorter or longer than the library's gets what it has room for, zeroes
// behind what the library knows, and nothing written elsewhere.
//
// SPDX-License-Identifier: MIT
#include "kv.h"

#define MARK 0xa5
#define ROOM 1024

static vmem_context *ctx;
static vmem_page page;
static uint64_t addr, prefix;
static vmem_kv *kv;

static int get_info(void *out) { return vmem_context_info(ctx, out); }
static int get_stats(void *out) { return vmem_context_stats(ctx, out); }
static int get_page(void *out) { return vmem_page_query(ctx, page, out); }
static int get_reservation(void *out) { return vmem_reservation_query(ctx, addr, out); }

static int get_layout(void *out) { return vmem_kv_get_layout(kv, 0, out); }
static int get_slot(void *out) { return vmem_kv_get_slot(kv, 0, out); }
static int get_kv_stats(void *out) { return vmem_kv_get_stats(kv, out); }
static int get_prefix(void *out) { return vmem_kv_get_run(kv, prefix, out); }

static const struct {
    size_t size;
    int (*get)(void *out);
} all[] = {
    {sizeof(struct vmem_info), get_info},         {sizeof(struct vmem_stats), get_stats},
    {sizeof(struct vmem_page_info), get_page},    {sizeof(struct vmem_reservation_info), get_reservation},
    {sizeof(struct vmem_kv_layout), get_layout},  {sizeof(struct vmem_kv_slot_info), get_slot},
    {sizeof(struct vmem_kv_stats), get_kv_stats}, {sizeof(struct vmem_kv_run_info), get_prefix},
};

static void set_size(unsigned char *out, uint32_t size) { memcpy(out, &size, sizeof size); }

static void test_every_size(size_t size, int (*get)(void *out))
{
    unsigned char whole[ROOM], out[ROOM];

    memset(whole, 0, sizeof whole);
    set_size(whole, (uint32_t)size);
    OK(get(whole));
    for (uint32_t theirs = 8; theirs <= size + 64; theirs++) {
        memset(out, MARK, sizeof out);
        set_size(out, theirs);
        OK(get(out));
        set_size(whole, theirs); // the caller's own stays
        for (size_t i = 0; i < sizeof out; i++)
            CHECK_EQ(out[i], i >= theirs ? MARK : i < size ? whole[i] : 0);
    }
}

static void test_no_size(int (*get)(void *out))
{
    static const uint32_t sizes[] = {0, 4, 7, 4097, 0xdeadbeef};
    unsigned char out[ROOM];

    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        memset(out, MARK, sizeof out);
        set_size(out, sizes[k]);
        ERR(get(out), EINVAL, "out->size ");
        for (size_t i = sizeof(uint32_t); i < sizeof out; i++)
            CHECK_EQ(out[i], MARK);
    }
}

static uint64_t budget_with(const struct vmem_options *o)
{
    vmem_context *made;

    OK(vmem_context_create(o, &made));
    uint64_t budget = test_stats(made).budget;
    vmem_context_destroy(made);
    return budget;
}

static void test_options(void)
{
    union {
        struct vmem_options known;
        unsigned char bytes[ROOM];
    } o = {.known = {.size = sizeof o.known, .backend = test_backend, .budget = 42 * MIB}};
    vmem_context *made;

    CHECK_EQ(budget_with(&o.known), 42 * MIB);
    // An older caller: what its structure lacks is 0, whatever stands there.
    o.known.size = offsetof(struct vmem_options, budget);
    CHECK_EQ(budget_with(&o.known), 0);
    // A newer one: what the library lacks must be 0.
    o.known.size = sizeof o.known + 24;
    CHECK_EQ(budget_with(&o.known), 42 * MIB);
    o.bytes[sizeof o.known + 23] = 1;
    ERR(vmem_context_create(&o.known, &made), EINVAL, "what follows them is not 0");
    o.known.size--;
    CHECK_EQ(budget_with(&o.known), 42 * MIB);
    o.known.size = 4097;
    ERR(vmem_context_create(&o.known, &made), EINVAL, "opts->size 4097");
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    OK(vMemReserve(ctx, VMEM_PAGE_2M, 0, &addr));
    OK(vMemCreate(ctx, test_page, 1, 0, &page));
    OK(vMemMap(ctx, addr, page));
    const struct vmem_kv_tensor tensor = {.row_bytes = 1024, .max_tokens = 1024};
    uint32_t slot;
    uint64_t missing;
    kv = k_create(ctx, .tensors = &tensor, .n_tensors = 1, .slots = 2, .max_tokens = 1024, .budget = 8 * MIB);
    OK(k_alloc(kv, 100, &slot));
    CHECK_EQ(slot, 0);
    OK(k_missing(vmem_kv_step(kv, (const int32_t[]){100, 0}, 2, 0), &missing));
    OK(k_save(kv, slot, 100, &prefix));
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        test_every_size(all[i].size, all[i].get);
        test_no_size(all[i].get);
    }
    test_options();
    vmem_kv_destroy(kv);
    vmem_context_destroy(ctx);
    return 0;
}
