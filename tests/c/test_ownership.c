// Whose a page is: of one context, of the addresses that vmem_commit backed, of a reservation that is given up.
//
// SPDX-License-Identifier: MIT
#include "harness.h"

static vmem_context *ctx;

static uint64_t created(void) { return test_stats(ctx).created; }
static uint64_t mapped(void) { return test_stats(ctx).mapped; }

static uint64_t reserve(uint64_t length)
{
    uint64_t addr;
    OK(vMemReserve(ctx, length, 0, &addr));
    return addr;
}
static void commit(uint64_t addr, uint64_t length)
{
    OK(vmem_commit(ctx, &(struct vmem_range){addr, length}, 1, test_page, 0, NULL));
}

// The same calls in the same order make the same frames in two contexts, and different handles.
static void foreign_pages(void)
{
    vmem_context *two = test_context(0);
    vmem_page ours[4], theirs[4];
    struct vmem_page_info a = {.size = sizeof a}, b = {.size = sizeof b};
    const uint64_t addr = reserve(16 * MIB);
    size_t bad;
    OK(vMemCreate(ctx, test_page, 4, 0, ours));
    OK(vMemCreate(two, test_page, 4, 0, theirs));
    for (int i = 0; i < 4; i++) {
        OK(vmem_page_query(ctx, ours[i], &a));
        OK(vmem_page_query(two, theirs[i], &b));
        CHECK_EQ(a.frame, b.frame);
        ERR(vmem_page_query(ctx, theirs[i], &a), EINVAL, "is not a page of this context");
        ERR(vMemMap(ctx, addr, theirs[i]), EINVAL, "is not a page of this context");
        ERR(vMemRelease(ctx, theirs[i]), EINVAL, "is not a page of this context");
    }
    // Where they follow a page of this context, too.
    ERR_AT(vMemMapBatch(ctx, (struct vmem_map_op[]){{addr, ours[0]}, {addr + test_page, theirs[1]}}, 2, 0, &bad), bad,
           1, EINVAL, "is not a page");
    ERR_AT(vMemReleaseBatch(ctx, (vmem_page[]){ours[0], theirs[1]}, 2, &bad), bad, 1, EINVAL, "is not a page");
    OK(vmem_drop(ctx, theirs, 4)); // none of these
    CHECK_EQ(test_stats(two).created, 4 * test_page);
    OK(vMemReleaseBatch(ctx, ours, 4, NULL));
    OK(vMemFree(ctx, addr));
    vmem_context_destroy(two);
}

static void go_with_their_last_address(void)
{
    const uint64_t P = test_page, one = reserve(8 * P), two = reserve(8 * P);
    vmem_page first, second, own;
    commit(one, 4 * P);
    OK(vMemUnmap(ctx, one + P, 2 * P));
    CHECK_EQ(created(), 2 * P);
    first = page_at(ctx, one);
    OK(vMemMap(ctx, two, first));
    OK(vMemUnmap(ctx, one, P));
    CHECK_EQ(created(), 2 * P); // mapped at `two` yet
    CHECK_EQ(page_at(ctx, two), first);
    OK(vMemUnmap(ctx, two, 8 * P));
    CHECK_EQ(created(), P);
    ERR(vMemMap(ctx, two, first), EINVAL, "is not a page");

    // Both addresses of one page in a batch.
    second = page_at(ctx, one + 3 * P);
    OK(vMemMap(ctx, one + 5 * P, second));
    OK(vMemUnmap(ctx, one, 8 * P));
    CHECK_EQ(created(), 0);

    // Replaced; and pages that change places are not.
    OK(vMemCreate(ctx, P, 1, 0, &own));
    commit(one, 3 * P);
    first = page_at(ctx, one + P);
    second = page_at(ctx, one + 2 * P);
    put_word(ctx, one + P, 1);
    put_word(ctx, one + 2 * P, 2);
    OK(vMemMapBatch(ctx, (struct vmem_map_op[]){{one, own}, {one + P, second}, {one + 2 * P, first}}, 3,
                    VMEM_MAP_REPLACE, NULL));
    CHECK_EQ(created(), 3 * P);
    CHECK_EQ(get_word(ctx, one + P), 2);
    CHECK_EQ(get_word(ctx, one + 2 * P), 1);
    OK(vMemMapBatch(ctx, &(struct vmem_map_op){one + P, second}, 1, VMEM_MAP_REPLACE, NULL)); // by itself
    CHECK_EQ(get_word(ctx, one + P), 2);
    OK(vMemMap(ctx, one + 4 * P, second));
    OK(vMemMapBatch(ctx, (struct vmem_map_op[]){{one + P, own}, {one + 4 * P, own}}, 2, VMEM_MAP_REPLACE, NULL));
    CHECK_EQ(created(), 2 * P);

    OK(vMemUnmap(ctx, one, 8 * P));
    CHECK_EQ(created(), P); // what vMemCreate made stays
    OK(vMemRelease(ctx, own));
    OK(vMemFree(ctx, one));
    OK(vMemFree(ctx, two));
}

static void decommit_of_a_page_twice(void)
{
    const uint64_t P = test_page, addr = reserve(16 * P), other = reserve(4 * P);
    uint64_t bytes;
    vmem_page own;
    commit(addr, 4 * P);
    OK(vMemMap(ctx, addr + 6 * P, page_at(ctx, addr + P)));
    OK(vMemMap(ctx, other, page_at(ctx, addr + 2 * P)));
    OK(vMemCreate(ctx, P, 1, 0, &own));
    OK(vMemMap(ctx, addr + 8 * P, own));
    OK(vMemMap(ctx, addr + 9 * P, own));
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 16 * P}, 1, &bytes));
    CHECK_EQ(bytes, 7 * P);
    CHECK_EQ(created() + mapped(), 0);
    // The same in two ranges, and the whole of it twice.
    commit(addr, 4 * P);
    OK(vMemMap(ctx, addr + 6 * P, page_at(ctx, addr)));
    OK(vmem_decommit(ctx, (struct vmem_range[]){{addr, P}, {addr + 6 * P, P}, {addr + P, 3 * P}, {addr, 4 * P}}, 4,
                     NULL));
    CHECK_EQ(created() + mapped(), 0);
    // A range that cuts a page changes nothing, wherever the others are mapped.
    if (test_page < VMEM_PAGE_2M) {
        commit(addr, 2 * P);
        OK(vMemMap(ctx, other, page_at(ctx, addr)));
        OK(vMemCreate(ctx, 2 * P, 1, 0, &own));
        OK(vMemMap(ctx, addr + 4 * P, own));
        ERR(vmem_decommit(ctx, &(struct vmem_range){addr, 5 * P}, 1, NULL), EINVAL, "cuts the page");
        CHECK_EQ(mapped(), 5 * P);
        OK(vmem_decommit(ctx, &(struct vmem_range){addr, 6 * P}, 1, NULL));
    }
    CHECK_EQ(created() + mapped(), 0);
    OK(vMemFree(ctx, addr));
    OK(vMemFree(ctx, other));
}

static void giving_up_a_reservation(void)
{
    const uint64_t P = test_page, addr = reserve(64 * MIB), other = reserve(4 * P);
    struct vmem_reservation_info info = {.size = sizeof info};
    vmem_page own;
    commit(addr + 8 * P, 4 * P);
    OK(vMemCreate(ctx, P, 1, 0, &own));
    OK(vMemMap(ctx, addr, own));
    OK(vMemMap(ctx, other, page_at(ctx, addr + 9 * P)));
    put_word(ctx, other, 7);

    OK(vmem_reservation_query(ctx, addr + 63 * MIB, &info));
    CHECK_EQ(info.addr, addr);
    CHECK_EQ(info.length, 64 * MIB);
    CHECK_EQ(info.mapped, 5 * P);
    CHECK_EQ(info.flags, 0);
    ERR(vmem_reservation_query(ctx, 0, &info), EINVAL, "no reservation contains addr");
    ERR(vmem_reservation_query(ctx, addr, NULL), EINVAL, "out must not be NULL");

    ERR(vmem_unreserve(ctx, addr + P), EINVAL, "not the start of a reservation");
    OK(vmem_unreserve(ctx, addr));
    ERR(vmem_unreserve(ctx, addr), EINVAL, "not the start of a reservation");
    CHECK_EQ(test_stats(ctx).reserved, 4 * P);
    CHECK_EQ(created(), 2 * P); // own, and the one mapped at `other` too
    CHECK_EQ(get_word(ctx, other), 7);
    OK(vmem_unreserve(ctx, other));
    CHECK_EQ(created(), P);
    OK(vMemRelease(ctx, own));
    CHECK_EQ(mapped(), 0);
}

static void dropping(void)
{
    const uint64_t addr = reserve(16 * MIB);
    vmem_page page[3];
    OK(vMemCreate(ctx, test_page, 3, 0, page));
    OK(vMemMap(ctx, addr, page[1]));
    ERR(vmem_drop(ctx, NULL, 1), EINVAL, "pages is NULL");
    OK(vmem_drop(ctx, NULL, 0));
    OK(vMemRelease(ctx, page[0]));
    OK(vmem_drop(ctx, (vmem_page[]){page[1], page[0], page[1], 0, page[2]}, 5));
    CHECK_EQ(created() + mapped(), 0);
    OK(vMemFree(ctx, addr));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    foreign_pages();
    go_with_their_last_address();
    decommit_of_a_page_twice();
    giving_up_a_reservation();
    dropping();
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.created + s.mapped + s.reserved, 0);
    vmem_context_destroy(ctx);
    return 0;
}
