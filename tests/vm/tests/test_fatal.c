// A channel of the driver's faults while it works for one of our calls. That is fatal to UVM, as on hardware: the call
// fails, so do the later ones, and everything can still be closed without harm. One case per loading of the module.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

static struct uvm u;
static uint64_t h;

static void start(void)
{
    vm_start(&u, MB(16));
    CHECK_EQ(vm_create(&u, KB(64), 8, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
}

// After the fault: an error, and no answer that pretends to work; closing frees nothing that the GPU may still reach.
static void after(NV_STATUS status)
{
    struct simgpu_inject i;
    uint64_t more;

    sim_inject(0, 0, false, &i);
    CHECK_MSG(i.fired > 0, "no push was made");
    CHECK_MSG(status != NV_OK, "the call succeeded although its push faulted");
    CHECK(vm_map(&u, BASE + MB(4), KB(64), h + 1, 0, 0) != NV_OK);
    CHECK(vm_create(&u, MB(2), 1, &more) != NV_OK || vm_map(&u, BASE + MB(6), MB(2), more, 0, 0) != NV_OK);
    uvm_close(&u);
    CHECK_EQ(sim_counters(0, false).bad_use_after_free, 0);
    CHECK_EQ(sim_counters(0, false).bad_double_free, 0);
}

TEST(in_map_with_overlay_)
{
    start();
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    after(vm_map(&u, BASE + KB(64), KB(64), h + 1, 0, 0));
}

TEST(in_map_no_overlay_)
{
    start();
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    after(vm_map(&u, BASE + MB(2), KB(64), h + 1, 0, 0));
}

TEST(in_unmap_)
{
    start();
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    after(vm_unmap(&u, BASE, KB(64)));
}

TEST(in_release_)
{
    start();
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    after(vm_release_one(&u, h));
}

// UVM's own call ignores that it could not clear the entries. The pages behind them must not be freed.
TEST(in_external_unmap_)
{
    start();
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    (void)uvm_unmap_external(&u, 0, BASE, BLOCK);
    CHECK(vm_release_one(&u, h) != NV_OK);
    after(NV_ERR_GENERIC);
}

TEST(in_create_)
{
    uint64_t live, n;
    NV_STATUS status;

    start();
    live = sim_counters(0, false).pma_live;
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    status = vm_create(&u, MB(2), 4, &n);
    // it may still be zeroed, so it stays until the GPU is unregistered
    CHECK(sim_counters(0, false).pma_live >= live + 4 * BLOCK / GRANULE);
    after(status);
}

TEST(in_huge_split_)
{
    uint64_t big;

    start();
    CHECK_EQ(vm_create(&u, MB(2), 1, &big), NV_OK);
    CHECK_EQ(vm_map(&u, BASE + MB(8), MB(2), big, 0, 0), NV_OK);
    sim_inject(SIMGPU_SITE_CHANNEL, 1, false, NULL);
    after(vm_unmap(&u, BASE + MB(8), KB(64)));
}
