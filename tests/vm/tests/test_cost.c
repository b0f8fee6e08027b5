// The cost of a page in software, beside the driver's own call in the same guest. Simulated: no figure here is a GPU's,
// and RM's part, which the simulator answers at once, is nearly free; the ratio is the stock path's best case.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

enum { N = 120, ROUNDS = 15 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *v, unsigned n)
{
    qsort(v, n, sizeof(*v), by_value);
    return v[n / 2];
}

static uint64_t va_of(unsigned i) { return BASE + i * MB(2) + i % 32 * GRANULE; }

// Overlays exist, as they do for all but the first page of each 2 MiB.
TEST(cost_of_120_pages)
{
    struct uvm u;
    struct uvm_vmem_op ops[N];
    struct simgpu_counters c, s;
    double map[ROUNDS], unmap[ROUNDS], stock_map[ROUNDS], stock_unmap[ROUNDS], ours, theirs;
    uint64_t h;

    vm_start(&u, MB(2) * N);
    CHECK_EQ(vm_create(&u, KB(64), N, &h), NV_OK);
    CHECK_EQ(vm_open(&u, BASE, MB(2) * N), NV_OK);
    for (unsigned r = 0; r < ROUNDS; r++) {
        double t0;
        for (unsigned i = 0; i < N; i++)
            ops[i] = vm_op(va_of(i), KB(64), h + i, 0, 0);
        sim_counters(0, true);
        t0 = seconds();
        CHECK_EQ(vm_map_ops(&u, 0, ops, N, NULL), NV_OK);
        map[r] = seconds() - t0;
        c = sim_counters(0, true);
        for (unsigned i = 0; i < N; i++)
            ops[i] = vm_op(va_of(i), KB(64), 0, 0, 0);
        t0 = seconds();
        CHECK_EQ(vm_unmap_ops(&u, 0, ops, N, NULL), NV_OK);
        unmap[r] = seconds() - t0;
    }
    CHECK_EQ(uvm_free_range(&u, BASE, MB(2) * N), NV_OK);

    CHECK_EQ(uvm_create_external(&u, BASE, MB(2) * N), NV_OK);
    sim_mem(&u, 0, 60, KB(64), N * KB(64));
    for (unsigned r = 0; r < ROUNDS; r++) {
        double t0;
        sim_counters(0, true);
        t0 = seconds();
        for (unsigned i = 0; i < N; i++)
            CHECK_EQ(uvm_map_external(&u, 0, va_of(i), KB(64), i * KB(64), 60), NV_OK);
        stock_map[r] = seconds() - t0;
        s = sim_counters(0, true);
        t0 = seconds();
        for (unsigned i = 0; i < N; i++)
            CHECK_EQ(uvm_unmap_external(&u, 0, va_of(i), KB(64)), NV_OK);
        stock_unmap[r] = seconds() - t0;
    }
    ours = median(map, ROUNDS) / N * 1e6;
    theirs = median(stock_map, ROUNDS) / N * 1e6;
    vmtest_figure("map_per_page", ours, "us (simulated GPU)");
    vmtest_figure("stock_map_per_page", theirs, "us (simulated GPU)");
    vmtest_figure("map_ratio", ours / theirs, "of stock (simulated GPU)");
    vmtest_figure("map_pushes", c.pushes, "per 120 pages");
    vmtest_figure("map_invalidates", c.inval_all + c.inval_targeted, "per 120 pages");
    vmtest_figure("map_rm_calls", c.rm_calls, "per 120 pages");
    vmtest_figure("stock_map_pushes", s.pushes, "per 120 pages");
    vmtest_figure("stock_map_invalidates", s.inval_all + s.inval_targeted, "per 120 pages");
    vmtest_figure("stock_map_rm_calls", s.rm_calls, "per 120 pages");
    ours = median(unmap, ROUNDS) / N * 1e6;
    theirs = median(stock_unmap, ROUNDS) / N * 1e6;
    vmtest_figure("unmap_per_page", ours, "us (simulated GPU)");
    vmtest_figure("stock_unmap_per_page", theirs, "us (simulated GPU)");
    vmtest_figure("unmap_ratio", ours / theirs, "of stock (simulated GPU)");
    CHECK_EQ(c.pushes, 1);
    CHECK_EQ(c.rm_calls, 0);
}
