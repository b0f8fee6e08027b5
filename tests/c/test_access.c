// Accesses of unbacked addresses, and the checks of vmem_copy_batch and vmem_fill.
//
// SPDX-License-Identifier: MIT
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

// True if the access kills a process with SIGSEGV. What runs in the child is only the access: no call into the library.
static bool faults(uint64_t at, bool write)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        signal(SIGSEGV, SIG_DFL); // not the sanitizer's report
        volatile uint64_t *p = (volatile uint64_t *)(uintptr_t)at;
        if (write)
            *p = 1;
        else
            (void)*p;
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

static void unbacked_faults(vmem_context *ctx)
{
    if (!test_cpu())
        return;
    uint64_t addr;
    vmem_page page;
    OK(vMemReserve(ctx, 8 * MIB, 0, &addr));
    CHECK(faults(addr, false) && faults(addr, true) && faults(addr + 8 * MIB - 8, false));
    OK(vMemCreate(ctx, test_page, 1, 0, &page));
    OK(vMemMap(ctx, addr + test_page, page));
    CHECK(!faults(addr + test_page, false) && !faults(addr + 2 * test_page - 8, true));
    CHECK(faults(addr + test_page - 8, false) && faults(addr + 2 * test_page, false));
    OK(vMemUnmap(ctx, addr + test_page, test_page));
    CHECK(faults(addr + test_page, false));
    OK(vMemMap(ctx, addr, page));
    OK(vMemRelease(ctx, page));
    CHECK(faults(addr, false));
    OK(vMemFree(ctx, addr));
}

static void backdrop_reads_zero(vmem_context *ctx)
{
    if (!(test_info.caps & VMEM_CAP_BACKDROP))
        return;
    uint64_t addr;
    vmem_page page;
    // Also where the backdrop is lazy, far behind what there is.
    OK(vMemReserve(ctx, 1 * GIB, VMEM_RESERVE_BACKDROP, &addr));
    CHECK(all_words(ctx, addr + 700 * MIB, 4 * MIB, 0));
    CHECK_EQ(get_word(ctx, addr + 1 * GIB - 8), 0);
    OK(vMemFree(ctx, addr));
    OK(vMemReserve(ctx, 64 * MIB, VMEM_RESERVE_BACKDROP, &addr));
    OK(vmem_backdrop(ctx, addr, 4 * MIB));
    CHECK(all_words(ctx, addr, 4 * MIB, 0));
    OK(vMemCreate(ctx, test_page, 1, 0, &page));
    OK(vMemMap(ctx, addr + test_page, page));
    OK(vmem_fill(ctx, addr + test_page, 0x5a, test_page));
    CHECK(all_words(ctx, addr, test_page, 0));
    CHECK(all_words(ctx, addr + test_page, test_page, UINT64_C(0x5a5a5a5a5a5a5a5a)));
    CHECK(all_words(ctx, addr + 2 * test_page, test_page, 0));
    OK(vMemUnmap(ctx, addr + test_page, test_page));
    CHECK(all_words(ctx, addr + test_page, test_page, 0)); // not what the page holds
    if (test_cpu())
        CHECK(faults(addr, true) && !faults(addr, false));
    OK(vMemRelease(ctx, page));
    OK(vMemFree(ctx, addr));
}

static void copy_and_fill(vmem_context *ctx)
{
    const uint64_t P = test_page;
    static uint64_t words[512], back[512];
    uint64_t addr, full, back_addr = 0;
    vmem_page page[2];
    OK(vMemReserve(ctx, 8 * P, 0, &addr));
    OK(vMemCreate(ctx, P, 2, 0, page));
    OK(vMemMap(ctx, addr + P, page[0]));
    OK(vMemMap(ctx, addr + 2 * P, page[1]));
    for (int i = 0; i < 512; i++)
        words[i] = (uint64_t)i * 3 + 1;
    OK(vMemReserve(ctx, 2 * P, 0, &full));
    OK(vmem_commit(ctx, &(struct vmem_range){full, 2 * P}, 1, P, 0, NULL));
    // In order: each element reads what the one before wrote. Across the border of two pages, and unaligned.
    const uint64_t mid = addr + 2 * P - 1000;
    const struct vmem_copy_op ops[] = {
        {mid, (uintptr_t)words, sizeof words},
        {addr + P + 3, mid, sizeof words},
        {(uintptr_t)back, addr + P + 3, sizeof back},
        {mid, mid, 0},
    };
    OK(vmem_copy_batch(ctx, ops, COUNT(ops)));
    CHECK(!memcmp(words, back, sizeof words));
    OK(vmem_copy_batch(ctx, NULL, 0));
    ERR(vmem_copy_batch(ctx, NULL, 1), EINVAL, "ops is NULL");

    const struct vmem_copy_op wrong[] = {
        {addr + P - 8, (uintptr_t)words, 16},     // begins before the page
        {addr + 3 * P - 8, (uintptr_t)words, 16}, // ends after it
        {(uintptr_t)back, addr + 3 * P, 8},       // source not mapped
        {(uintptr_t)back, addr, 4 * P},           {addr + 7 * P, addr + P, 8},
        {addr - 8, (uintptr_t)words, 16},         // begins outside the reservation
        {full + 2 * P - 8, (uintptr_t)words, 16}, // ends outside, and all inside is backed
        {(uintptr_t)back, full + 2 * P - 8, 16},  {(uintptr_t)back, full - 8, 16},
    };
    for (size_t i = 0; i < COUNT(wrong); i++) {
        const struct vmem_copy_op pair[] = {ops[0], wrong[i]};
        ERR(vmem_copy_batch(ctx, pair, 2), EFAULT, "ops[1]:");
    }
    ERR(vmem_copy_batch(ctx, &(struct vmem_copy_op){addr + P, UINT64_MAX - 4, 8}, 1), EINVAL, "beyond the end");
    ERR(vmem_fill(ctx, addr, 1, 8), EFAULT, "nothing is mapped at");
    ERR(vmem_fill(ctx, addr + P, 1, 2 * P + 1), EFAULT, "nothing is mapped at");
    ERR(vmem_fill(ctx, addr + P, 1, UINT64_MAX), EINVAL, "beyond the end");
    ERR(vmem_fill(ctx, full, 1, 2 * P + 1), EFAULT, "past the end of the reservation");
    ERR(vmem_fill(ctx, full - 1, 1, 8), EFAULT, "the reservation"); // or past the end of the one before
    ERR(vmem_fill(ctx, full + P, 1, 4 * GIB), EFAULT, "past the end of the reservation");
    OK(vmem_fill(ctx, full, 1, 2 * P));
    OK(vmem_unreserve(ctx, full));
    OK(vmem_fill(ctx, addr, 1, 0));
    OK(vmem_fill(ctx, addr + P, 0x77, 2 * P));
    CHECK(all_words(ctx, addr + P, 2 * P, UINT64_C(0x7777777777777777)));
    OK(vmem_fill(ctx, addr + 2 * P - 1, 0, 2)); // across the border
    CHECK_EQ(get_word(ctx, addr + 2 * P - 8), UINT64_C(0x0077777777777777));
    CHECK_EQ(get_word(ctx, addr + 2 * P), UINT64_C(0x7777777777777700));
    if (test_info.caps & VMEM_CAP_BACKDROP) {
        // A backdrop may be read and not written.
        OK(vMemReserve(ctx, 8 * P, VMEM_RESERVE_BACKDROP, &back_addr));
        CHECK_EQ(get_word(ctx, back_addr + P), 0);
        ERR(vmem_fill(ctx, back_addr, 1, 8), EFAULT, "nothing is mapped at");
        ERR(vmem_copy_batch(ctx, &(struct vmem_copy_op){back_addr, addr + P, 8}, 1), EFAULT, "dst");
        OK(vMemFree(ctx, back_addr));
    }
    OK(vMemReleaseBatch(ctx, page, 2, NULL));
    OK(vMemFree(ctx, addr));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    unbacked_faults(ctx);
    backdrop_reads_zero(ctx);
    copy_and_fill(ctx);
    vmem_context_destroy(ctx);
    return 0;
}
