// Descriptors, memory and address space are back to where they were once pages, reservations and contexts are gone.
//
// SPDX-License-Identifier: MIT
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "harness.h"

static int descriptors(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    CHECK(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

// Bytes of memory behind the process's memfds.
static uint64_t memfd_bytes(void)
{
    uint64_t bytes = 0;
    char path[300], link[256];
    DIR *d = opendir("/proc/self/fd");
    CHECK(d);
    for (struct dirent *e; (e = readdir(d));) {
        struct stat st;
        snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
        ssize_t n = readlink(path, link, sizeof link - 1);
        link[n > 0 ? n : 0] = 0;
        if (strstr(link, "memfd:vmem") && !stat(path, &st))
            bytes += (uint64_t)st.st_blocks * 512;
    }
    closedir(d);
    return bytes;
}

static void address_space(unsigned long *size_kib, unsigned long *mappings)
{
    char line[512];
    *size_kib = *mappings = 0;
    FILE *f = fopen("/proc/self/status", "r");
    CHECK(f);
    while (fgets(line, sizeof line, f))
        sscanf(line, "VmSize: %lu", size_kib);
    fclose(f);
    f = fopen("/proc/self/maps", "r");
    CHECK(f);
    while (fgets(line, sizeof line, f))
        ++*mappings;
    fclose(f);
}

// Pages come and go within one context.
static void within_a_context(void)
{
    enum { N = 64 };
    vmem_context *ctx = test_context(0);
    const struct vmem_stats before = test_stats(ctx);
    const int fds = descriptors();
    vmem_page page[N];
    struct vmem_map_op ops[N];
    for (int round = 0; round < 20; round++) {
        uint64_t addr;
        OK(vMemReserve(ctx, GIB, 0, &addr));
        OK(vMemCreate(ctx, VMEM_PAGE_2M, N, 0, page));
        if (test_cpu())
            CHECK_EQ(memfd_bytes(), N * VMEM_PAGE_2M); // committed when created, not when touched
        for (int i = 0; i < N; i++)
            ops[i] = (struct vmem_map_op){addr + (uint64_t)(i * 3) * VMEM_PAGE_2M, page[i]};
        OK(vMemMapBatch(ctx, ops, N, 0, NULL));
        OK(vmem_fill(ctx, ops[5].addr, 1, VMEM_PAGE_2M));
        OK(vMemReleaseBatch(ctx, page, N / 2, NULL));
        if (test_cpu())
            CHECK_EQ(memfd_bytes(), N / 2 * VMEM_PAGE_2M); // a released page is the system's at once
        OK(vMemReleaseBatch(ctx, page + N / 2, N / 2, NULL));
        OK(vMemFree(ctx, addr));
    }
    if (test_cpu())
        CHECK_EQ(memfd_bytes(), 0);
    OK(vmem_trim(ctx, NULL));
    const struct vmem_stats after = test_stats(ctx);
    CHECK_EQ(after.reserved + after.created + after.mapped, 0);
    CHECK_EQ(after.overhead, before.overhead);
    CHECK(descriptors() <= fds + 2);
    vmem_context_destroy(ctx);
}

// Whole contexts, destroyed with everything still in them.
static void whole_contexts(void)
{
    unsigned long size[2], mappings[2];
    int fds = 0;
    for (int round = 0; round < 12; round++) {
        if (round == 2) { // what is allocated once is there now
            fds = descriptors();
            address_space(&size[0], &mappings[0]);
        }
        vmem_context *ctx = test_context(0);
        uint64_t addr;
        vmem_page page[8];
        OK(vMemReserve(ctx, 4 * GIB, test_info.caps & VMEM_CAP_BACKDROP ? VMEM_RESERVE_BACKDROP : 0, &addr));
        OK(vMemCreate(ctx, VMEM_PAGE_2M, 8, 0, page));
        for (uint64_t i = 0; i < 8; i++)
            OK(vMemMap(ctx, addr + i * 100 * MIB, page[i]));
        OK(vmem_prealloc(ctx, 10 * MIB));
        vmem_context_destroy(ctx);
    }
    CHECK_EQ(descriptors(), fds);
    if (!test_cpu())
        return; // the driver keeps address space of its own
    CHECK_EQ(memfd_bytes(), 0);
    address_space(&size[1], &mappings[1]);
    CHECK(mappings[1] <= mappings[0] + 4);
    CHECK(size[1] <= size[0] + 1024 || getenv("ASAN_OPTIONS") || size[1] > (1ul << 33)); // a sanitizer's heap grows
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    within_a_context();
    whole_contexts();
    return 0;
}
