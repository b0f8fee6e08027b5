// Reservations: their errors, their size, and that they cost nothing.
//
// SPDX-License-Identifier: MIT
#include <unistd.h>

#include "checked.h"
#include "harness.h"

static void errors(vmem_context *ctx)
{
    uint64_t addr = 1, other;
    ERR(vMemReserve(ctx, 0, 0, &addr), EINVAL, "length 0");
    ERR(vMemReserve(ctx, 64 * KIB + 1, 0, &addr), EINVAL, "length 65537");
    ERR(vMemReserve(ctx, (UINT64_C(1) << 46) + 64 * KIB, 0, &addr), EINVAL, "2^46");
    ERR(vMemReserve(ctx, 64 * KIB, 0x40, &addr), EINVAL, "flags 0x40");
    ERR(vMemReserve(ctx, 64 * KIB, 0, NULL), EINVAL, "addr is NULL");
    CHECK_EQ(addr, 1);
    ERR(vMemFree(ctx, 0), EINVAL, "not the start of a reservation");

    OK(vMemReserve(ctx, 4 * MIB, 0, &addr));
    ERR(vMemFree(ctx, addr + 2 * MIB), EINVAL, "not the start of a reservation");
    ERR(vmem_backdrop(ctx, addr, 64 * KIB), EINVAL, "without VMEM_RESERVE_BACKDROP");
    vmem_page page;
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));
    OK(vMemMap(ctx, addr + 2 * MIB, page));
    ERR(vMemFree(ctx, addr), EBUSY, "2097152 bytes are still mapped");
    OK(vMemUnmap(ctx, addr, 4 * MIB));
    OK(vMemFree(ctx, addr));
    ERR(vMemFree(ctx, addr), EINVAL, "not the start of a reservation");
    ERR(vMemMap(ctx, addr, page), EINVAL, "not inside one reservation");
    OK(vMemRelease(ctx, page));

    if (test_info.caps & VMEM_CAP_BACKDROP) {
        OK(vMemReserve(ctx, 4 * MIB, VMEM_RESERVE_BACKDROP, &other));
        OK(vmem_backdrop(ctx, other, 4 * MIB));
        OK(vmem_backdrop(ctx, other + 64 * KIB, 0));
        ERR(vmem_backdrop(ctx, other + 2 * MIB, 2 * MIB + 1), EINVAL, "not inside one reservation");
        OK(vMemFree(ctx, other));
        ERR(vmem_backdrop(ctx, other, 64 * KIB), EINVAL, "not inside one reservation");
    } else {
        ERR(vMemReserve(ctx, 4 * MIB, VMEM_RESERVE_BACKDROP, &other), EOPNOTSUPP, "no backdrop");
    }
}

static void many(vmem_context *ctx)
{
    enum { N = 200 };
    uint64_t addr[N], seed = 1, reserved = 0;
    for (int i = 0; i < N; i++) {
        uint64_t length = (1 + rnd(&seed) % 1000) * 64 * KIB;
        OK(vMemReserve(ctx, length, 0, &addr[i]));
        CHECK_EQ(addr[i] % VMEM_PAGE_2M, 0);
        CHECK_EQ(addr[i] % test_info.reserve_align, 0);
        reserved += length;
        CHECK_EQ(page_at(ctx, addr[i]), 0);
        CHECK_EQ(page_at(ctx, addr[i] + length - 1), 0);
    }
    CHECK_EQ(test_stats(ctx).reserved, reserved);
    for (int i = 0; i < N; i++) { // in another order
        int k = (i * 77) % N;
        OK(vMemFree(ctx, addr[k]));
        vmem_page page;
        ERR(vmem_query(ctx, addr[k], &page, NULL), EINVAL, "no reservation contains addr");
    }
    CHECK_EQ(test_stats(ctx).reserved, 0);
}

// Addresses run out before bookkeeping does.
static void exhausted(void)
{
    vmem_context *ctx = test_context(0);
    uint64_t addr[16], more;
    size_t n = 0;
    int rc = 0;
    while (n < COUNT(addr) && !(rc = vMemReserve(ctx, UINT64_C(1) << 46, 0, &addr[n])))
        n++;
    CHECK_EQ(rc, -ENOMEM);
    CHECK(strstr(vmem_last_error(), "no free range of addresses")); // and not too many mappings
    CHECK_EQ(test_stats(ctx).reserved, n << 46);
    OK(vMemReserve(ctx, GIB, 0, &more)); // smaller ones still fit
    while (n--)
        OK(vMemFree(ctx, addr[n]));
    OK(vMemFree(ctx, more));
    vmem_context_destroy(ctx);
}

static uint64_t resident(void)
{
    unsigned long size, pages;
    FILE *f = fopen("/proc/self/statm", "r");
    CHECK(f && fscanf(f, "%lu %lu", &size, &pages) == 2);
    fclose(f);
    return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

// The paper's own example is 12 TiB.
static void huge(vmem_context *ctx, uint32_t flags)
{
    uint64_t addr, before = resident();
    OK(vMemReserve(ctx, 12 * TIB, flags, &addr));
    CHECK_EQ(test_stats(ctx).reserved, 12 * TIB);
    CHECK(test_stats(ctx).overhead < 128 * MIB);

    // One page at either end and one in the middle; unmapping all of it finds them.
    vmem_page page[3];
    const uint64_t at[3] = {addr, addr + 6 * TIB + 2 * MIB, addr + 12 * TIB - 2 * MIB};
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 3, 0, page));
    for (int i = 0; i < 3; i++) {
        OK(vMemMap(ctx, at[i], page[i]));
        put_word(ctx, at[i] + 8, 1000 + i);
    }
    for (int i = 0; i < 3; i++)
        CHECK_EQ(get_word(ctx, at[i] + 8), 1000 + i);
    CHECK(test_stats(ctx).overhead < 256 * MIB);
    OK(vMemUnmap(ctx, addr, 12 * TIB));
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemReleaseBatch(ctx, page, 3, NULL));
    CHECK(test_info.caps & VMEM_CAP_GPU || resident() < before + 16 * MIB);
    OK(vMemFree(ctx, addr));
}

// True if the process has anything mapped in [at, at + length).
static bool anything(uint64_t at, uint64_t length)
{
    unsigned long lo, hi;
    char line[512];
    bool found = false;
    FILE *f = fopen("/proc/self/maps", "r");
    CHECK(f);
    while (fgets(line, sizeof line, f)) {
        CHECK(sscanf(line, "%lx-%lx", &lo, &hi) == 2);
        found = found || (lo < at + length && hi > at);
    }
    fclose(f);
    return found;
}

// At vm.max_map_count the kernel may refuse even to unmap. The addresses go when it does not any more.
static void refused_munmap(void)
{
    if (!test_cpu())
        return;
    vmem_context *ctx = test_context(0);
    uint64_t one, two, three, four;
    OK(vMemReserve(ctx, 64 * MIB, 0, &one));
    OK(vMemReserve(ctx, 64 * MIB, 0, &two));
    OK(vMemReserve(ctx, 64 * MIB, 0, &three));
    checked_fail_munmap(4); // the call, the ballast, and the call again, twice
    OK(vMemFree(ctx, one));
    CHECK(anything(one, 64 * MIB));
    checked_fail_munmap(1);
    OK(vmem_unreserve(ctx, two)); // the second try does it, for both
    checked_fail_munmap(0);
    CHECK(!anything(one, 64 * MIB) && !anything(two, 64 * MIB));
    checked_fail_munmap(2); // the tail, and what is then given up
    ERR(vMemReserve(ctx, 64 * MIB, 0, &four), ENOMEM, "munmap");
    CHECK_EQ(test_stats(ctx).reserved, 64 * MIB);
    checked_fail_munmap(0);
    OK(vMemFree(ctx, three));
    vmem_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    errors(ctx);
    many(ctx);
    if (test_cpu())
        exhausted();
    huge(ctx, 0);
    if (test_info.caps & VMEM_CAP_BACKDROP)
        huge(ctx, VMEM_RESERVE_BACKDROP);
    vmem_context_destroy(ctx);
    refused_munmap();
    return 0;
}
