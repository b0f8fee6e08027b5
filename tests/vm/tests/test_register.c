// A GPU's first registration, which fails: UVM sets all of the GPU up, and takes down what it has if it cannot go on. UVM's
// own error paths leak some of it. The tier compares the leak checker's reports of the stock and of the patched module.
//
// SPDX-License-Identifier: MIT
#include "vmtest.h"

#include "failmem_uapi.h"

static struct uvm u;

// Register with the nth call at a fault's site failing. True if there was an nth.
static bool register_with(void (*arm)(uint32_t nth), bool (*disarm)(struct failmem *where), uint32_t nth)
{
    struct failmem where = {0};
    NV_STATUS status;
    bool fired;

    uvm_open(&u);
    arm(nth);
    status = uvm_register(&u, 0);
    fired = disarm(&where);
    CHECK_MSG(status == NV_OK || (fired && status == NV_ERR_NO_MEMORY), "failure %u (%s:%u): 0x%x", nth, where.file,
              where.line, status);
    uvm_close(&u);
    sim_check(0);
    return fired;
}

// Late failures, most of which are of channels, are thinned out.
static void sweep(const char *figure, void (*arm)(uint32_t nth), bool (*disarm)(struct failmem *where))
{
    unsigned failures = 0;

    for (unsigned nth = 1; register_with(arm, disarm, nth); nth += 1 + nth / 16)
        failures++;
    CHECK(failures > 10);
    vmtest_figure(figure, failures, "failures");
    uvm_start(&u);
    uvm_close(&u);
    sim_check(0);
}

static int failmem = -1;

static void arm_allocation(uint32_t nth)
{
    struct failmem f = {.nth = nth};

    CHECK(ioctl(failmem, FAILMEM_ARM, &f) == 0);
}

static bool disarm_allocation(struct failmem *where)
{
    CHECK(ioctl(failmem, FAILMEM_ARM, where) == 0);
    return where->fired;
}

TEST(test_first_registration_without_memory)
{
    failmem = open("/dev/failmem", O_RDWR);
    if (failmem < 0)
        vmtest_skip("/dev/failmem: %s", strerror(errno));
    sweep("registration_allocations_failed", arm_allocation, disarm_allocation);
}

static void arm_rm(uint32_t nth) { sim_inject(SIMGPU_SITE_RM, nth, true, NULL); }

static bool disarm_rm(struct failmem *where)
{
    struct simgpu_inject was = {0};

    (void)where;
    sim_inject(0, 0, true, &was);
    return was.fired;
}

TEST(test_first_registration_refused_by_rm) { sweep("registration_rm_calls_failed", arm_rm, disarm_rm); }
