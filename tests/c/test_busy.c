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
    ERR_AT(vMemUnmapBatch(ctx, (struct vmem_range[]){{other, MIB * 4}, {addr, test_page}}, 2, &bad), bad, 1, EBUSY,
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

static uint64_t word;
static int do_fill(void) { return vmem_fill(ctx, addr, 0x11, 2 * test_page); }
static int do_read(void)
{
    return vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)&word, addr + test_page, 8}, 1);
}
static int do_write(void)
{
    return vmem_copy_batch(ctx, &(struct vmem_copy_op){addr + test_page, (uintptr_t)&word, 8}, 1);
}

// Nothing goes from under a copy or a fill.
static void during_data(const char *name, int (*held)(void))
{
    const struct vmem_range both = {addr, 2 * test_page};
    const uint64_t second = addr + test_page;
    pthread_t t;
    printf("%s\n", name);
    OK(vmem_commit(ctx, &both, 1, test_page, 0, NULL));
    const vmem_page under = page_at(ctx, second);
    OK(vMemMap(ctx, addr + 8 * test_page, under)); // an alias, which nobody touches
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)held));
    checked_held();
    ERR(vmem_decommit(ctx, &both, 1, NULL), EBUSY, "another call copies or fills there");
    ERR(vMemUnmap(ctx, second, test_page), EBUSY, "another call copies or fills there");
    ERR(vMemRelease(ctx, under), EBUSY, "another call copies or fills there");
    ERR(vMemMapBatch(ctx, &(struct vmem_map_op){second, page[3]}, 1, VMEM_MAP_REPLACE, NULL), EBUSY,
        "another call copies or fills there");
    ERR(vMemFree(ctx, addr), EBUSY, "");
    OK(vMemUnmap(ctx, addr + 8 * test_page, test_page));
    CHECK_EQ(page_at(ctx, second), under);
    ERR(vMemRelease(ctx, 0), EINVAL, "page 0x0");
    OK(vmem_drop(ctx, &under, 1)); // later
    CHECK(strstr(vmem_last_error(), "page 0x0"));
    CHECK_EQ(page_at(ctx, second), 0);
    ERR(vmem_commit(ctx, &both, 1, test_page, 0, NULL), EBUSY,
        "commits or releases there"); // as backed it would go too
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    CHECK_EQ(page_at(ctx, second), 0);
    OK(vmem_decommit(ctx, &both, 1, NULL));
}

// Nothing is mapped under a copy that reads the backdrop.
static void commit_during_read(void)
{
    const uint64_t shared = addr;
    const struct vmem_stats before = test_stats(ctx);
    pthread_t t;
    if (!(test_info.caps & VMEM_CAP_BACKDROP))
        return;
    OK(vMemReserve(ctx, 4 * test_page, VMEM_RESERVE_BACKDROP, &addr));
    const struct vmem_range all = {addr, 4 * test_page};
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_read));
    checked_held();
    ERR(vmem_commit(ctx, &all, 1, test_page, 0, NULL), EBUSY, "another call copies or fills there");
    CHECK_EQ(test_stats(ctx).created, before.created);
    CHECK_EQ(test_stats(ctx).mapped, before.mapped);
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    OK(vmem_commit(ctx, &all, 1, test_page, 0, NULL));
    OK(vmem_unreserve(ctx, addr));
    addr = shared;
}

// And neither of them starts where another call maps or unmaps.
static void data_during(int (*held)(void), bool mapped_now)
{
    pthread_t t;
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)held));
    checked_held();
    ERR(vmem_fill(ctx, addr, 1, 8), EBUSY, "another call works on");
    ERR(vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)&word, addr, 8}, 1), EBUSY, "another call works on");
    ERR(vmem_copy_batch(ctx, &(struct vmem_copy_op){addr, (uintptr_t)&word, 8}, 1), EBUSY, "another call works on");
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    CHECK_EQ(page_at(ctx, addr) != 0, mapped_now);
}

// A range that cannot be given up at once goes when the call that works on it ends.
static void gives_up_later(void)
{
    pthread_t t;
    const struct vmem_stats before = test_stats(ctx);
    vmem_page own;
    uint64_t keep = addr;
    OK(vMemReserve(ctx, 16 * MIB, 0, &addr));
    OK(vMemCreate(ctx, test_page, 1, 0, &own));
    const vmem_page page0 = page[0];
    page[0] = own;
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_map));
    checked_held();
    OK(vmem_drop(ctx, &own, 1));
    OK(vmem_unreserve(ctx, addr));
    ERR(vmem_unreserve(ctx, addr), EINVAL, "not the start of a reservation");
    ERR(vMemFree(ctx, addr), EINVAL, "not the start of a reservation");
    CHECK_EQ(test_stats(ctx).reserved, before.reserved + 16 * MIB);
    CHECK_EQ(test_stats(ctx).created, before.created + test_page);
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    CHECK_EQ(test_stats(ctx).reserved, before.reserved);
    CHECK_EQ(test_stats(ctx).created, before.created);
    CHECK_EQ(test_stats(ctx).mapped, before.mapped);
    page[0] = page0;
    addr = keep;
}

static int do_unreserve(void) { return vmem_unreserve(ctx, addr); }

// A reservation is gone when its call returns, whatever else another thread gives up at that time.
static void two_unreserve(void)
{
    const struct vmem_stats before = test_stats(ctx);
    pthread_t t;
    uint64_t second;
    OK(vMemReserve(ctx, 2 * MIB, 0, &addr));
    OK(vMemReserve(ctx, 2 * MIB, 0, &second));
    OK(vmem_commit(ctx, &(struct vmem_range){addr, test_page}, 1, test_page, 0, NULL));
    OK(vmem_commit(ctx, &(struct vmem_range){second, test_page}, 1, test_page, 0, NULL));
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_unreserve));
    checked_held();
    OK(vmem_unreserve(ctx, second));
    CHECK_EQ(test_stats(ctx).reserved, before.reserved + 2 * MIB);
    CHECK_EQ(test_stats(ctx).mapped, before.mapped + test_page);
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    CHECK_EQ(test_stats(ctx).reserved, before.reserved);
    CHECK_EQ(test_stats(ctx).created, before.created);
}

static vmem_page first, second;
static int result_of_second;
static _Atomic bool second_ended;
static int do_create(void) { return vMemCreate(ctx, test_page, 1, 0, &first); }
static void *create_second(void *unused)
{
    result_of_second = vMemCreate(ctx, test_page, 1, 0, &second);
    second_ended = true;
    return unused;
}
static int do_prealloc_block(void) { return vmem_prealloc(ctx, BLOCK); }

// A call that finds no memory is not refused what another call makes, or has returned meanwhile.
static void arenas_on_their_way(void)
{
    pthread_t t, u;
    OK(checked_context(test_backend, 0, true, &ctx));
    ctx->b.arena_min = BLOCK;
    checked_device_memory(BLOCK); // one arena
    OK(vMemCreate(ctx, test_page, 1, 0, &first));
    checked_hold_arena();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_prealloc_block));
    checked_held(); // refused
    OK(vMemRelease(ctx, first));
    OK(vmem_trim(ctx, NULL));
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK_EQ(result, 0);
    OK(vmem_trim(ctx, NULL));
    CHECK(!ctx->arenas);

    ctx->b.arena_min = 2 * BLOCK;
    checked_device_memory(UINT64_MAX);
    OK(vmem_set_budget(ctx, 2 * BLOCK));
    checked_hold_arena();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_create));
    checked_held(); // its arena is all the budget
    CHECK(!pthread_create(&u, NULL, create_second, NULL));
    for (bool waits = false; !waits && !second_ended; sched_yield()) {
        vmem__lock(ctx);
        waits = ctx->calls == 2; // and drops the lock
        vmem__unlock(ctx);
    }
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK(!pthread_join(u, NULL));
    CHECK_EQ(result, 0);
    CHECK_EQ(result_of_second, 0);
    vmem_context_destroy(ctx);
}

static _Atomic bool gone;
static void *destroy(void *unused)
{
    vmem_context_destroy(ctx);
    gone = true;
    return unused;
}

// The context goes after the calls that are in flight.
static void destroy_waits(void)
{
    pthread_t t, u;
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vMemReserve(ctx, 64 * MIB, 0, &addr));
    OK(vMemCreate(ctx, test_page, 4, 0, page));
    checked_hold();
    CHECK(!pthread_create(&t, NULL, call, (void *)do_map));
    checked_held();
    CHECK(!pthread_create(&u, NULL, destroy, NULL));
    for (bool closing = false; !closing; sched_yield()) {
        vmem__lock(ctx);
        closing = ctx->closing;
        vmem__unlock(ctx);
    }
    CHECK(!gone);
    checked_resume();
    CHECK(!pthread_join(t, NULL));
    CHECK(!pthread_join(u, NULL));
    CHECK_EQ(result, 0);
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
    during_data("fill", do_fill);
    during_data("read", do_read);
    during_data("write", do_write);
    commit_during_read();
    OK(vMemCreate(ctx, test_page, 1, 0, &page[0]));
    data_during(do_map, true);
    data_during(do_unmap, false);
    gives_up_later();
    two_unreserve();
    vmem_context_destroy(ctx);
    arenas_on_their_way();
    destroy_waits();
    return 0;
}
