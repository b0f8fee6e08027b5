// Two calls in flight at once, one held inside the backend: what the other may do, and what is -EBUSY.
//
// SPDX-License-Identifier: MIT
#include "checked.h"
#include "harness.h"

static vmem_context *ctx;
static uint64_t addr, other;
static vmem_page before, page[4]; // physically in this order, where a backend can
static int result;

static int do_map(void) { return vMemMap(ctx, addr, page[0]); }
static int do_replace(void)
{
    return vMemMapBatch(ctx, &(struct vmem_map_op){addr, page[0]}, 1, VMEM_MAP_REPLACE, NULL);
}
static int do_unmap(void) { return vMemUnmap(ctx, addr, 4 * MIB); }
static int do_release(void) { return vMemRelease(ctx, page[0]); }

static void *call(void *arg)
{
    result = ((int (*)(void))arg)();
    return NULL;
}

// Unrelated pages and addresses, in the same reservation: nothing waits and nothing fails.
static void unrelated(void)
{
    vmem_page own;
    uint64_t range;
    OK(vMemCreate(ctx, test_page, 1, 0, &own));
    OK(vMemMap(ctx, addr + 8 * MIB, own));
    OK(vmem_fill(ctx, addr + 8 * MIB, 1, test_page));
    OK(vMemMap(ctx, addr + 10 * MIB, page[3]));
    OK(vMemUnmap(ctx, addr + 4 * MIB, 60 * MIB));
    OK(vMemRelease(ctx, own));
    OK(vMemReserve(ctx, MIB, 0, &range));
    OK(vMemFree(ctx, range));
    OK(vmem_trim(ctx, NULL));
    test_stats(ctx);
}

static void during(const char *name, int (*held)(void), vmem_page mapped_before, bool page0_was_mapped)
{
    pthread_t t;
    size_t bad;
    printf("%s\n", name);
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)held));
    checked_held();

    unrelated();
    // The page, and the addresses, are taken.
    ERR(vMemMap(ctx, other, page[0]), EBUSY, "another call works on it");
    ERR(vMemRelease(ctx, page[0]), EBUSY, "another call works on it");
    ERR(vMemMap(ctx, addr, page[1]), EBUSY, "another call works on");
    const struct vmem_map_op op = {addr, page[1]};
    ERR(vMemMapBatch(ctx, &op, 1, VMEM_MAP_REPLACE, NULL), EBUSY, "another call works");
    ERR(vMemUnmap(ctx, addr, test_page), EBUSY, "another call");
    // In a batch it is the element's index, and the rest is not done.
    struct vmem_map_op ops[] = {{other, page[1]}, {other + 2 * MIB, page[3]}, {addr, page[3]}};
    ERR_AT(vMemMapBatch(ctx, ops, 3, 0, &bad), bad, 2, EBUSY, "ops[2]");
    ERR_AT(vMemReleaseBatch(ctx, (vmem_page[]){page[1], page[0]}, 2, &bad), bad, 1, EBUSY, "pages[1]");
    ERR_AT(vMemUnmapBatch(ctx, (struct vmem_unmap_op[]){{other, MIB * 4}, {addr, test_page}}, 2, &bad), bad, 1, EBUSY,
           "ops[1]");
    ops[0] = (struct vmem_map_op){other, before}; // where elements continue a run, too
    ops[1] = (struct vmem_map_op){other + test_page, page[0]};
    ERR_AT(vMemMapBatch(ctx, ops, 2, 0, &bad), bad, 1, EBUSY, "ops[1]");
    ERR_AT(vMemReleaseBatch(ctx, (vmem_page[]){before, page[0]}, 2, &bad), bad, 1, EBUSY, "pages[1]");
    CHECK_EQ(page_at(ctx, other), 0);
    ERR(vMemFree(ctx, addr), EBUSY, page0_was_mapped || mapped_before ? "still mapped" : "another call works on this");
    CHECK_EQ(page_at(ctx, addr), mapped_before); // until it is done
    if (page0_was_mapped)
        ERR(vMemUnmap(ctx, addr + 2 * MIB, test_page), EBUSY, "another call"); // its other address

    checked_resume();
    CHECK(!pthread_join(t, NULL));
    if (result)
        FAIL("%s: %d", name, result);
    OK(vMemMap(ctx, other, page[1]));
    OK(vMemUnmap(ctx, other, 4 * MIB));
}

static int do_prealloc(void) { return vmem_prealloc(ctx, 8 * test_page); }

// A call that makes memory ready ends, whatever is created or trimmed before it has.
static void during_prealloc(bool trim)
{
    pthread_t t;
    vmem_page own[4];
    if (!ctx->b.ops->populate)
        return; // whole arenas: nothing of it can be held
    OK(vmem_trim(ctx, NULL));
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_prealloc));
    checked_held();
    OK(vMemCreate(ctx, test_page, 4, 0, own));
    if (trim)
        OK(vmem_trim(ctx, NULL));
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    OK(vMemReleaseBatch(ctx, own, 4, NULL));
    OK(vmem_trim(ctx, NULL));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    OK(vMemReserve(ctx, 64 * MIB, 0, &other));
    vmem_page five[5];
    OK(vMemCreate(ctx, test_page, 5, 0, five));
    before = five[0];
    memcpy(page, five + 1, sizeof page);

    during("map", do_map, 0, false);
    CHECK_EQ(page_at(ctx, addr), page[0]);
    OK(vMemMap(ctx, addr + 2 * MIB, page[0]));
    during("unmap", do_unmap, page[0], true);
    CHECK_EQ(page_at(ctx, addr), 0);
    OK(vMemMap(ctx, addr, page[2]));
    during("replace", do_replace, page[2], false);
    CHECK_EQ(page_at(ctx, addr), page[0]);
    OK(vMemMap(ctx, addr + 2 * MIB, page[0]));
    during("release", do_release, page[0], true);
    CHECK_EQ(page_at(ctx, addr) + page_at(ctx, addr + 2 * MIB), 0);
    CHECK_EQ(test_stats(ctx).created, 4 * test_page);
    CHECK_EQ(test_stats(ctx).mapped, 0);
    during_prealloc(false);
    during_prealloc(true);
    vmem_context_destroy(ctx);
    return 0;
}
