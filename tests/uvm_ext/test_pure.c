// The arithmetic of slabs and blocks, and the checks of what user space passes: the module's own source, in a program.
//
// SPDX-License-Identifier: MIT
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "uvm_vmem_check.h"

#define CHECK(cond)                                                    \
    do {                                                               \
        if (!(cond)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
            exit(1);                                                   \
        }                                                              \
    } while (0)
#define STATUS(call, want)                                                                          \
    do {                                                                                            \
        unsigned int got_ = (call);                                                                 \
        if (got_ != (want)) {                                                                       \
            fprintf(stderr, "%s:%d: %s is 0x%x, not %s\n", __FILE__, __LINE__, #call, got_, #want); \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

static uint32_t seed = 1;

static uint32_t rnd(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed ^ (seed >> 16);
}

static void test_masks(void)
{
    CHECK(uvm_vmem_mask(0, 32) == 0xFFFFFFFFu);
    CHECK(uvm_vmem_mask(31, 1) == 0x80000000u);
    CHECK(uvm_vmem_mask(4, 4) == 0xF0u);

    // The runs of a mask are the mask: disjoint, in order, with a gap between.
    for (int i = 0; i < 100000; i++) {
        __u32 mask = i == 0 ? 0 : i == 1 ? ~0u : rnd() & (i % 2 ? rnd() : ~0u), rest = mask, sum = 0;
        unsigned int first, count, end = 0;
        for (bool any = false; uvm_vmem_next_run(&rest, &first, &count); any = true) {
            CHECK(count >= 1 && first + count <= 32);
            CHECK(!any || first > end);
            CHECK((sum & uvm_vmem_mask(first, count)) == 0);
            sum |= uvm_vmem_mask(first, count);
            end = first + count;
        }
        CHECK(sum == mask && rest == 0);
    }
}

static void test_page_sizes(void)
{
    CHECK(uvm_vmem_page_granules(1u << 16) == 1);
    CHECK(uvm_vmem_page_granules(1u << 17) == 2);
    CHECK(uvm_vmem_page_granules(1u << 18) == 4);
    CHECK(uvm_vmem_page_granules(1u << 21) == 32);
    for (unsigned int bit = 0; bit < 64; bit++) {
        if (bit != 16 && bit != 17 && bit != 18 && bit != 21)
            CHECK(uvm_vmem_page_granules(1ull << bit) == 0);
    }
    CHECK(uvm_vmem_page_granules(0) == 0);
    CHECK(uvm_vmem_page_granules((1u << 16) | (1u << 17)) == 0);
}

// A slab against a model that knows every granule.
static void test_slab(void)
{
    static const unsigned int sizes[] = {1, 2, 4, 32};

    for (unsigned int s = 0; s < 4; s++) {
        unsigned int granules = sizes[s];
        __u32 used = 0;
        bool taken[32] = {false};

        for (int i = 0; i < 20000; i++) {
            unsigned int n_free = 0;
            for (unsigned int u = 0; u < 32; u += granules)
                n_free += !taken[u];
            CHECK(uvm_vmem_slab_num_free(used, granules) == n_free);

            if (rnd() % 2) {
                int first = uvm_vmem_slab_first_free(used, granules);
                CHECK((first < 0) == (n_free == 0));
                if (first < 0)
                    continue;
                CHECK((unsigned int)first % granules == 0 && !taken[first]);
                for (unsigned int u = 0; u < (unsigned int)first; u += granules)
                    CHECK(taken[u]); // the lowest
                used |= uvm_vmem_mask((unsigned int)first, granules);
                memset(&taken[first], 1, granules);
            } else {
                unsigned int first = rnd() % 32 / granules * granules;
                if (!taken[first])
                    continue;
                used &= ~uvm_vmem_mask(first, granules);
                memset(&taken[first], 0, granules);
            }
        }
    }
}

static void test_blocks(void)
{
    const __u64 block = UVM_VMEM_BLOCK, granule = UVM_VMEM_GRANULE;

    CHECK(uvm_vmem_block(5 * block + 1) == 5 * block);
    CHECK(uvm_vmem_block_end(5 * block) == 6 * block - 1);
    CHECK(uvm_vmem_block_end(~0ull) == ~0ull);
    CHECK(uvm_vmem_index(7 * block) == 0 && uvm_vmem_index(8 * block - 1) == 31);
    CHECK(uvm_vmem_range_mask(block, 2 * block - 1) == ~0u);
    CHECK(uvm_vmem_range_mask(block + 31 * granule, 2 * block - 1) == 0x80000000u);
    CHECK(uvm_vmem_range_mask(block, block + granule - 1) == 1);

    for (unsigned int first = 0; first < 32; first++) {
        for (unsigned int last = first; last < 32; last++) {
            __u32 want = 0;
            for (unsigned int i = first; i <= last; i++)
                want |= 1u << i;
            CHECK(uvm_vmem_range_mask(9 * block + first * granule, 9 * block + (last + 1) * granule - 1) == want);
        }
    }
}

static void test_whole_granules(void)
{
    // Against counting: the first and last whole granule inside, at every offset of 4 KiB around three granules.
    for (__u64 start = 0; start <= 4 * UVM_VMEM_GRANULE; start += 4096) {
        for (__u64 end = start; end <= 5 * UVM_VMEM_GRANULE; end += 4096) {
            __u64 s = start, e = end, first = ~0ull, last = 0;
            for (__u64 u = 0; u < 8; u++) {
                if (u * UVM_VMEM_GRANULE >= start && (u + 1) * UVM_VMEM_GRANULE - 1 <= end) {
                    first = first == ~0ull ? u : first;
                    last = u;
                }
            }
            bool any = uvm_vmem_whole_granules(&s, &e);
            CHECK(any == (first != ~0ull));
            if (any)
                CHECK(s == first * UVM_VMEM_GRANULE && e == (last + 1) * UVM_VMEM_GRANULE - 1);
        }
    }

    __u64 s = ~0ull - 10, e = ~0ull;
    CHECK(!uvm_vmem_whole_granules(&s, &e));
    s = ~0ull - UVM_VMEM_GRANULE + 1, e = ~0ull;
    CHECK(uvm_vmem_whole_granules(&s, &e) && e == ~0ull);
}

static void test_check_query(void)
{
    struct uvm_vmem_query good = {.flags = 0}, p;

    STATUS(uvm_vmem_check_query(&good), NV_OK);
    p = good, p.flags = 1;
    STATUS(uvm_vmem_check_query(&p), NV_ERR_INVALID_ARGUMENT);
    for (unsigned int i = 0; i < sizeof(p.reserved) / sizeof(p.reserved[0]); i++) {
        p = good, p.reserved[i] = 1;
        STATUS(uvm_vmem_check_query(&p), NV_ERR_INVALID_ARGUMENT);
    }
    p = good, p.out_caps = ~0ull; // what comes out is not looked at
    STATUS(uvm_vmem_check_query(&p), NV_OK);
}

static void test_check_create(void)
{
    struct uvm_vmem_create good = {.page_size = 1u << 16, .count = 1}, p;

    STATUS(uvm_vmem_check_create(&good), NV_OK);
    p = good, p.count = 0;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.page_size = 4096;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.flags = 0x80000000u;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.reserved = 1;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.count = UVM_VMEM_MAX_OPS;
    STATUS(uvm_vmem_check_create(&p), NV_OK);
    p = good, p.count = UVM_VMEM_MAX_OPS + 1;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_LIMIT);
    p = good, p.count = ~0u;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_LIMIT);
    p = good, p.page_size = UVM_VMEM_BLOCK, p.count = UVM_VMEM_MAX_BYTES / UVM_VMEM_BLOCK;
    STATUS(uvm_vmem_check_create(&p), NV_OK);
    p.count++;
    STATUS(uvm_vmem_check_create(&p), NV_ERR_INVALID_LIMIT);
}

static void test_check_release(void)
{
    struct uvm_vmem_release good = {.count = 1}, p;

    STATUS(uvm_vmem_check_release(&good), NV_OK);
    p = good, p.count = 0;
    STATUS(uvm_vmem_check_release(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.flags = 1;
    STATUS(uvm_vmem_check_release(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.reserved = 1;
    STATUS(uvm_vmem_check_release(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.count = UVM_VMEM_MAX_OPS + 1;
    STATUS(uvm_vmem_check_release(&p), NV_ERR_INVALID_LIMIT);
}

static void test_check_batch(void)
{
    struct uvm_vmem_batch good = {.count = 1, .opSize = sizeof(struct uvm_vmem_op)}, p;

    STATUS(uvm_vmem_check_batch(&good), NV_OK);
    p = good, p.count = 0;
    STATUS(uvm_vmem_check_batch(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.flags = 1;
    STATUS(uvm_vmem_check_batch(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.reserved32 = 1;
    STATUS(uvm_vmem_check_batch(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.reserved = 1;
    STATUS(uvm_vmem_check_batch(&p), NV_ERR_INVALID_ARGUMENT);
    p = good, p.count = UVM_VMEM_MAX_OPS + 1;
    STATUS(uvm_vmem_check_batch(&p), NV_ERR_INVALID_LIMIT);

    static const __u32 wrong[] = {0, 8, 39, 41, 48, 128, ~0u, ~7u};
    for (unsigned int i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        p = good, p.opSize = wrong[i];
        STATUS(uvm_vmem_check_batch(&p), NV_ERR_INVALID_PARAM_STRUCT);
    }
}

static unsigned int op_status(struct uvm_vmem_op op, bool map)
{
    __u64 total = 0;
    NV_STATUS status = uvm_vmem_check_op(&op, map, &total);

    CHECK(total == (status == NV_OK ? op.length : 0)); // a refused element counts nothing
    return status;
}

static void test_check_op(void)
{
    struct uvm_vmem_op good = {.va = 1ull << 40, .length = 3 * UVM_VMEM_GRANULE}, op;

    for (int map = 0; map < 2; map++) {
        good.handle = map ? 7 : 0;
        STATUS(op_status(good, map), NV_OK);
        op = good, op.reserved = 1;
        STATUS(op_status(op, map), NV_ERR_INVALID_ARGUMENT);
        op = good, op.flags = 0x80000000u;
        STATUS(op_status(op, map), NV_ERR_INVALID_ARGUMENT);
        op = good, op.va = 0;
        STATUS(op_status(op, map), NV_ERR_INVALID_ADDRESS);
        op = good, op.va += 4096;
        STATUS(op_status(op, map), NV_ERR_INVALID_ADDRESS);
        op = good, op.length = 0;
        STATUS(op_status(op, map), NV_ERR_INVALID_ADDRESS);
        op = good, op.length += 1;
        STATUS(op_status(op, map), NV_ERR_INVALID_ADDRESS);
        op = good, op.va = ~0ull - UVM_VMEM_GRANULE + 1;
        STATUS(op_status(op, map), NV_ERR_INVALID_ADDRESS);
    }
    op = good, op.offset = 1;
    STATUS(op_status(op, true), NV_ERR_INVALID_OFFSET);
    op = good, op.offset = UVM_VMEM_BLOCK;
    STATUS(op_status(op, true), NV_ERR_INVALID_OFFSET);
    op = good, op.offset = ~0ull - UVM_VMEM_GRANULE + 1;
    STATUS(op_status(op, true), NV_ERR_INVALID_OFFSET);
    op = good, op.offset = UVM_VMEM_BLOCK - op.length; // the last bytes of a 2 MiB page
    STATUS(op_status(op, true), NV_OK);
    op.offset += UVM_VMEM_GRANULE;
    STATUS(op_status(op, true), NV_ERR_INVALID_OFFSET);
    op = good, op.length = UVM_VMEM_BLOCK + UVM_VMEM_GRANULE; // no page is as long
    STATUS(op_status(op, true), NV_ERR_INVALID_OFFSET);

    // To open a block, an element names its addresses alone.
    op = good, op.handle = 0, op.flags = UVM_VMEM_MAP_OPEN | UVM_VMEM_TAKEOVER, op.length = 1ull << 30;
    STATUS(op_status(op, true), NV_OK);
    STATUS(op_status(op, false), NV_ERR_INVALID_ARGUMENT);
    op.handle = 7;
    STATUS(op_status(op, true), NV_ERR_INVALID_ARGUMENT);
    op.handle = 0, op.offset = UVM_VMEM_GRANULE;
    STATUS(op_status(op, true), NV_ERR_INVALID_ARGUMENT);
    for (__u32 flag = UVM_VMEM_MAP_REPLACE; flag < UVM_VMEM_TAKEOVER; flag <<= 1) {
        op.offset = 0, op.flags = UVM_VMEM_MAP_OPEN | flag;
        STATUS(op_status(op, true), flag == UVM_VMEM_MAP_OPEN ? NV_OK : NV_ERR_INVALID_ARGUMENT);
    }

    // Flags belong to one of the two.
    op = good, op.flags = UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD | UVM_VMEM_TAKEOVER;
    STATUS(op_status(op, true), NV_OK);
    op.handle = 0, op.flags = UVM_VMEM_MAP_REPLACE;
    STATUS(op_status(op, false), NV_ERR_INVALID_ARGUMENT);
    op.flags = UVM_VMEM_TAKEOVER;
    STATUS(op_status(op, false), NV_ERR_INVALID_ARGUMENT);
    for (op.flags = 0x10; op.flags <= 0x20; op.flags <<= 1) { // of ABI 1
        STATUS(op_status(op, true), NV_ERR_INVALID_ARGUMENT);
        STATUS(op_status(op, false), NV_ERR_INVALID_ARGUMENT);
    }

    // Taking away goes over any length, whatever is mapped there.
    op = good, op.handle = 0, op.length = 1ull << 30;
    STATUS(op_status(op, false), NV_OK);
    op.offset = UVM_VMEM_GRANULE;
    STATUS(op_status(op, false), NV_ERR_INVALID_ARGUMENT);
    op.offset = 0, op.handle = 7;
    STATUS(op_status(op, false), NV_ERR_INVALID_ARGUMENT);
}

// The sum of a call, up to the last byte.
static void test_check_total(void)
{
    struct uvm_vmem_op op = {.va = 1ull << 40, .length = UVM_VMEM_MAX_BYTES};
    __u64 total = 0;

    STATUS(uvm_vmem_check_op(&op, false, &total), NV_OK);
    op.length = UVM_VMEM_GRANULE;
    STATUS(uvm_vmem_check_op(&op, false, &total), NV_ERR_INVALID_LIMIT);
    CHECK(total == UVM_VMEM_MAX_BYTES);

    total = UVM_VMEM_MAX_BYTES - UVM_VMEM_GRANULE;
    STATUS(uvm_vmem_check_op(&op, false, &total), NV_OK);
    total = 0, op.length = 1ull << 46;
    STATUS(uvm_vmem_check_op(&op, false, &total), NV_ERR_INVALID_LIMIT);
}

int main(void)
{
    test_masks();
    test_page_sizes();
    test_slab();
    test_blocks();
    test_whole_granules();
    test_check_query();
    test_check_create();
    test_check_release();
    test_check_batch();
    test_check_op();
    test_check_total();
    puts("test_pure: passed");
    return 0;
}
