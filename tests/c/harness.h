// Helpers of every C test. A test is a program of one subject: it exits 0, 1 with the failed check on stderr, or 77 with
// the reason why it cannot run here. Its backend is argv[1], else $VMEM_BACKEND, else host.
//
// Device memory is only touched through vmem_fill and vmem_copy_batch, so that the suite runs on every backend.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TEST_HARNESS_H
#define VMEM_TEST_HARNESS_H

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vmem.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define TIB (UINT64_C(1) << 40)
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

#define FAIL(...)                                       \
    do {                                                \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                   \
        fputc('\n', stderr);                            \
        exit(1);                                        \
    } while (0)
#define CHECK(cond)            \
    do {                       \
        if (!(cond))           \
            FAIL("%s", #cond); \
    } while (0)
#define CHECK_EQ(a, b)                                                                 \
    do {                                                                               \
        unsigned long long a_ = (unsigned long long)(a), b_ = (unsigned long long)(b); \
        if (a_ != b_)                                                                  \
            FAIL("%s is 0x%llx, not %s, 0x%llx", #a, a_, #b, b_);                      \
    } while (0)
#define OK(call)                                                          \
    do {                                                                  \
        int rc_ = (call);                                                 \
        if (rc_)                                                          \
            FAIL("%s: %s: %s", #call, strerror(-rc_), vmem_last_error()); \
    } while (0)
// The call fails with this errno, and the text names what was wrong.
#define ERR(call, err, part)                                                                      \
    do {                                                                                          \
        int rc_ = (call);                                                                         \
        if (rc_ != -(err))                                                                        \
            FAIL("%s: returned %d (%s), not %s", #call, rc_, rc_ ? vmem_last_error() : "", #err); \
        if (!strstr(vmem_last_error(), part))                                                     \
            FAIL("%s: \"%s\" does not say \"%s\"", #call, vmem_last_error(), part);               \
    } while (0)
// The same of a batch, at element i.
#define ERR_AT(call, bad, i, err, part) \
    do {                                \
        (bad) = 12345678;               \
        ERR(call, err, part);           \
        CHECK_EQ(bad, i);               \
    } while (0)

#define SKIP(...)            \
    do {                     \
        printf("skipped: "); \
        printf(__VA_ARGS__); \
        putchar('\n');       \
        exit(77);            \
    } while (0)

static const char *test_backend;
static struct vmem_info test_info = {.size = sizeof test_info};
static uint64_t test_page; // the smallest page size

__attribute__((unused)) static vmem_context *test_context(uint64_t budget)
{
    struct vmem_options opts = {.size = sizeof opts, .backend = test_backend, .budget = budget};
    vmem_context *ctx;
    OK(vmem_context_create(&opts, &ctx));
    OK(vmem_context_info(ctx, &test_info));
    test_page = test_info.page_sizes & -test_info.page_sizes;
    return ctx;
}

// Keeps the CUDA context of this process for the whole program. Without it, each vmem context that is the only one makes
// a CUDA context, which takes a quarter of a second.
static void test_keep_cuda(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NODELETE), *symbol, *context;
    int (*retain)(void **, int);
    if (library && (symbol = dlsym(library, "cuDevicePrimaryCtxRetain"))) {
        memcpy(&retain, &symbol, sizeof retain);
        retain(&context, 0);
    }
}

// First thing in main(). Skips where the backend does not work.
__attribute__((unused)) static void test_start(int argc, char **argv)
{
    const char *env = getenv("VMEM_BACKEND");
    test_backend = argc > 1 ? argv[1] : env && *env ? env : "host";
    struct vmem_options opts = {.size = sizeof opts, .backend = test_backend};
    if (vmem_probe(&opts))
        SKIP("%s: %s", test_backend, vmem_last_error());
    vmem_context *ctx = test_context(0);
    if (test_info.caps & VMEM_CAP_GPU)
        test_keep_cuda();
    vmem_context_destroy(ctx);
}

__attribute__((unused)) static bool test_cpu(void) { return !(test_info.caps & VMEM_CAP_GPU); }

// True if the CPU can access the backend's pages: the host's, and those of the fake GPU driver.
__attribute__((unused)) static bool test_cpu_sees_pages(void)
{
    vmem_context *ctx = test_context(0);
    struct vmem_range page = {0, VMEM_PAGE_2M};
    int fds[2];
    OK(vMemReserve(ctx, page.length, 0, &page.addr));
    OK(vmem_commit(ctx, &page, 1, test_page, 0, NULL));
    CHECK_EQ(pipe(fds), 0);
    const bool sees = write(fds[1], (const void *)(uintptr_t)page.addr, 1) == 1; // otherwise EFAULT
    close(fds[0]);
    close(fds[1]);
    vmem_context_destroy(ctx);
    return sees;
}

__attribute__((unused)) static struct vmem_stats test_stats(vmem_context *ctx)
{
    struct vmem_stats s = {.size = sizeof s};
    OK(vmem_context_stats(ctx, &s));
    return s;
}

// Backend-independent access to memory, a 64-bit word at a time.
__attribute__((unused)) static void put_word(vmem_context *ctx, uint64_t addr, uint64_t word)
{
    OK(vmem_copy_batch(ctx, &(struct vmem_copy_op){addr, (uintptr_t)&word, sizeof word}, 1));
}
__attribute__((unused)) static uint64_t get_word(vmem_context *ctx, uint64_t addr)
{
    uint64_t word;
    OK(vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)&word, addr, sizeof word}, 1));
    return word;
}
// True if all words of [addr, addr + length) are `word`.
__attribute__((unused)) static bool all_words(vmem_context *ctx, uint64_t addr, uint64_t length, uint64_t word)
{
    uint64_t *buf = malloc(length);
    OK(vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)buf, addr, length}, 1));
    bool same = true;
    for (uint64_t i = 0; i < length / 8; i++)
        same = same && buf[i] == word;
    free(buf);
    return same;
}

// The page mapped at addr, 0 for none.
__attribute__((unused)) static vmem_page page_at(vmem_context *ctx, uint64_t addr)
{
    vmem_page page;
    OK(vmem_query(ctx, addr, &page, NULL));
    return page;
}

// A seeded generator of numbers (splitmix64).
__attribute__((unused)) static uint64_t rnd(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

#endif
