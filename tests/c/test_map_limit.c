// vm.max_map_count on the host: running into it is -ENOMEM, explained, and the batch is undone to the last page.
//
// SPDX-License-Identifier: MIT
#include "harness.h"

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (!test_cpu())
        SKIP("the limit is the host's");
    unsigned limit = 0;
    FILE *f = fopen("/proc/sys/vm/max_map_count", "r");
    CHECK(f && fscanf(f, "%u", &limit) == 1);
    fclose(f);
    if (limit > 200000)
        SKIP("vm.max_map_count is %u: too many mappings to make in a test", limit);

    // One page at every second address: no two mappings can be merged.
    vmem_context *ctx = test_context(0);
    const uint64_t P = VMEM_PAGE_64K;
    const size_t n = limit / 2 + 200, step = 1000;
    uint64_t addr;
    vmem_page page[4];
    struct vmem_map_op *ops = malloc(n * sizeof *ops);
    OK(vMemReserve(ctx, (2 * n + 2) * P, 0, &addr));
    OK(vMemCreate(ctx, P, 4, 0, page));
    for (size_t i = 0; i < n; i++)
        ops[i] = (struct vmem_map_op){addr + 2 * i * P, page[i % 2]};
    size_t done = 0, bad = 0;
    int rc = 0;
    while (done < n && !(rc = vMemMapBatch(ctx, ops + done, n - done < step ? n - done : step, 0, &bad)))
        done += step;
    CHECK_EQ(rc, -ENOMEM);
    CHECK(strstr(vmem_last_error(), "vm.max_map_count"));
    CHECK(bad > 0 && bad < step);
    CHECK_EQ(test_stats(ctx).mapped, done * P);
    for (size_t i = 0; i < n; i++)
        CHECK_EQ(page_at(ctx, ops[i].addr), i < done ? ops[i].page : 0);
    // Pages that the batch mapped before it failed are unmapped again. Reading them would fault, so look at the mappings.
    unsigned long lo, hi;
    char line[512], prot[8];
    bool seen = false;
    f = fopen("/proc/self/maps", "r");
    CHECK(f);
    while (fgets(line, sizeof line, f)) {
        CHECK(sscanf(line, "%lx-%lx %7s", &lo, &hi, prot) == 3);
        if (lo < addr + 2 * n * P && hi > ops[done].addr) {
            CHECK(!strncmp(prot, "---", 3));
            seen = true;
        }
    }
    fclose(f);
    CHECK(seen);

    // At the limit, what needs no further mapping goes on: replacing, and unmapping whole mappings.
    OK(vMemMapBatch(ctx, ops, bad, 0, NULL) == -EEXIST ? 0 : -1);
    OK(vMemMapBatch(ctx, &(struct vmem_map_op){ops[7].addr, page[2]}, 1, VMEM_MAP_REPLACE, NULL));
    put_word(ctx, ops[7].addr, 5);
    OK(vMemUnmap(ctx, addr, (2 * n + 2) * P));
    CHECK_EQ(test_stats(ctx).mapped, 0);
    OK(vMemMapBatch(ctx, ops, step, 0, NULL));
    OK(vMemReleaseBatch(ctx, page, 4, NULL));
    vmem_context_destroy(ctx);
    free(ops);
    return 0;
}
