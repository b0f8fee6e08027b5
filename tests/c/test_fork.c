// After fork() the child's calls fail and the parent's memory is its own; a killed process leaves nothing behind.
//
// SPDX-License-Identifier: MIT
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static uint64_t addr;
static vmem_page page[2];

static void child(vmem_context *ctx)
{
    uint64_t u;
    vmem_page p;
    struct vmem_info info = {.size = sizeof info};
    struct vmem_stats stats = {.size = sizeof stats};
    struct vmem_page_info page_info = {.size = sizeof page_info};
    const char *text = "the process that forked this one";
    ERR(vmem_context_info(ctx, &info), EPERM, text);
    ERR(vmem_context_stats(ctx, &stats), EPERM, text);
    ERR(vmem_set_budget(ctx, 0), EPERM, text);
    ERR(vmem_prealloc(ctx, 0), EPERM, text);
    ERR(vmem_trim(ctx, NULL), EPERM, text);
    ERR(vMemReserve(ctx, MIB, 0, &u), EPERM, text);
    ERR(vMemFree(ctx, addr), EPERM, text);
    ERR(vmem_backdrop(ctx, addr, 0), EPERM, text);
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &p), EPERM, text);
    ERR(vMemRelease(ctx, page[0]), EPERM, text);
    ERR(vMemReleaseBatch(ctx, page, 2, NULL), EPERM, text);
    ERR(vmem_page_query(ctx, page[0], &page_info), EPERM, text);
    ERR(vMemMap(ctx, addr + 4 * MIB, page[0]), EPERM, text);
    ERR(vMemMapBatch(ctx, NULL, 0, 0, NULL), EPERM, text);
    ERR(vMemUnmap(ctx, addr, 2 * MIB), EPERM, text);
    ERR(vMemUnmapBatch(ctx, NULL, 0, NULL), EPERM, text);
    ERR(vmem_query(ctx, addr, &p, NULL), EPERM, text);
    ERR(vmem_copy_batch(ctx, NULL, 0), EPERM, text);
    ERR(vmem_fill(ctx, addr, 9, 8), EPERM, text);
    vmem_context_destroy(ctx);
    if (test_cpu()) { // a context of its own, while the parent's is still there
        ctx = test_context(0);
        OK(vMemReserve(ctx, 8 * MIB, 0, &u));
        OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &p));
        OK(vMemMap(ctx, u, p));
        OK(vmem_fill(ctx, u, 0x99, 2 * MIB));
        vmem_context_destroy(ctx);
    }
    _exit(0);
}

static int run(void (*body)(vmem_context *), vmem_context *ctx)
{
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid)
        body(ctx);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

// Dies holding pages, mapped and not, in the middle of its work.
static void suicide(vmem_context *unused)
{
    (void)unused;
    vmem_context *ctx = test_context(0);
    uint64_t at;
    vmem_page p[32];
    OK(vMemReserve(ctx, 256 * MIB, 0, &at));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 32, 0, p));
    for (uint64_t i = 0; i < 16; i++) {
        OK(vMemMap(ctx, at + 2 * i * VMEM_PAGE_2M, p[i]));
        OK(vmem_fill(ctx, at + 2 * i * VMEM_PAGE_2M, 1, VMEM_PAGE_2M));
    }
    raise(SIGKILL);
}

static uint64_t shared_memory(void)
{
    char line[128];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    CHECK(f);
    while (fgets(line, sizeof line, f) && sscanf(line, "Shmem: %" SCNu64, &kib) != 1)
        ;
    fclose(f);
    return kib * KIB;
}

static void killed(void)
{
    if (!test_cpu())
        return;
    // Every death leaves 64 MiB behind, or nothing. Other processes come and go too: look for a time when they do not.
    for (int i = 0; i < 40; i++) {
        const uint64_t before = shared_memory();
        int status = run(suicide, NULL);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        if (shared_memory() < before + 8 * MIB)
            return;
        usleep(100000);
    }
    FAIL("processes that are killed leave memory behind");
}

// ---- a child's accesses -------------------------------------------------------------------------------------

static int to_child[2], to_parent[2];

static void tell(const int *pipe) { CHECK(write(pipe[1], "x", 1) == 1); }
static void wait_for(const int *pipe)
{
    char c;
    CHECK(read(pipe[0], &c, 1) == 1);
}

static uint64_t load(uint64_t at) { return *(volatile uint64_t *)(uintptr_t)at; }
static void store(uint64_t at, uint64_t value) { *(volatile uint64_t *)(uintptr_t)at = value; }

static void read_all(uint64_t at, uint64_t length)
{
    for (uint64_t i = 0; i < length; i += 4 * KIB)
        load(at + i);
}

// As a worker process of a data loader would: reads what it finds, and writes into what it takes for its own.
static void worker(vmem_context *unused)
{
    const uint64_t P = test_page;
    (void)unused;
    signal(SIGSEGV, SIG_DFL);
    CHECK_EQ(load(addr), 0x1111);
    CHECK_EQ(load(addr + P), 0x1112);
    CHECK_EQ(load(addr + 2 * P), 0x1113);
    CHECK_EQ(load(addr + 3 * P), 0x1113); // the third page once more
    store(addr, 0x2222);
    CHECK_EQ(load(addr), 0x2222);
    store(addr + P, 0x3333);
    tell(to_parent); // which now writes, unmaps, releases and fills anew
    wait_for(to_child);
    read_all(addr, 8 * P);
    CHECK_EQ(load(addr), 0x2222);
    store(addr + 2 * P, 0x4444); // which in the parent is another tensor's by now
    store(addr + P, 0x5555);
    tell(to_parent);
    wait_for(to_child); // the parent's context is gone
    read_all(addr, 8 * P);
    CHECK_EQ(load(addr + 2 * P), 0x4444);
    _exit(0);
}

static void child_keeps_reading(vmem_context *ctx)
{
    const uint64_t P = test_page;
    vmem_page own;
    int status;
    CHECK(!pipe(to_child) && !pipe(to_parent));
    OK(vMemReserve(ctx, 8 * P, VMEM_RESERVE_BACKDROP, &addr));
    OK(vMemCreate(ctx, P, 1, 0, &own));
    OK(vMemMap(ctx, addr, own));
    OK(vmem_commit(ctx, &(struct vmem_range){addr + P, 2 * P}, 1, P, 0, NULL));
    OK(vMemMap(ctx, addr + 3 * P, page_at(ctx, addr + 2 * P)));
    for (int i = 0; i < 3; i++)
        put_word(ctx, addr + i * P, 0x1111 + i);
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid)
        worker(ctx);
    close(to_parent[1]); // so that it shows when the child ends too soon
    wait_for(to_parent);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(get_word(ctx, addr + i * P), i == 3 ? 0x1113 : 0x1111 + i);
    OK(vmem_decommit(ctx, &(struct vmem_range){addr + P, 2 * P}, 1, NULL));
    OK(vmem_commit(ctx, &(struct vmem_range){addr + 4 * P, 4 * P}, 1, P, VMEM_CREATE_ZERO, NULL));
    OK(vmem_commit(ctx, &(struct vmem_range){addr + P, 2 * P}, 1, P, VMEM_CREATE_ZERO, NULL));
    CHECK(all_words(ctx, addr + P, 2 * P, 0));
    tell(to_child);
    wait_for(to_parent);
    CHECK(all_words(ctx, addr + P, 2 * P, 0));
    CHECK(all_words(ctx, addr + 4 * P, 4 * P, 0));
    vmem_context_destroy(ctx);
    tell(to_child);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(to_child[0]);
    close(to_child[1]);
    close(to_parent[0]);
}

static void reads(vmem_context *unused)
{
    (void)unused;
    read_all(addr, 4 * MIB);
    CHECK_EQ(load(addr), 0x1111);
    _exit(0);
}
static void writes(vmem_context *unused)
{
    (void)unused;
    signal(SIGSEGV, SIG_DFL);
    store(addr, 0x2222);
    _exit(0);
}

// Where a child cannot find out what it has: it may read, and a write kills it.
static void no_descriptor_left(void)
{
    vmem_context *ctx = test_context(0);
    struct rlimit limit, none;
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
    none = limit;
    OK(vMemReserve(ctx, 4 * MIB, VMEM_RESERVE_BACKDROP, &addr));
    OK(vmem_commit(ctx, &(struct vmem_range){addr, 2 * MIB}, 1, test_page, 0, NULL));
    put_word(ctx, addr, 0x1111);
    none.rlim_cur = 0;
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    int status = run(reads, ctx);
    const int after_write = run(writes, ctx);
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(WIFSIGNALED(after_write) && WTERMSIG(after_write) == SIGSEGV);
    CHECK_EQ(get_word(ctx, addr), 0x1111);
    vmem_context_destroy(ctx);
}

static pid_t inside;

// An interrupt function that forks. The child ends the call, which gives back what it has: of its own memory only.
static int fork_once(void *unused)
{
    (void)unused;
    if (inside)
        return 0;
    fflush(NULL);
    inside = fork();
    CHECK(inside >= 0);
    if (inside)
        return 0;
    inside = -1;
    wait_for(to_child); // until the parent has used the memory
    return 1;
}

static void fork_in_a_call(void)
{
    vmem_context *ctx = test_context(0);
    struct vmem_range range = {0, 48 * MIB};
    int status;
    CHECK(!pipe(to_child));
    OK(vMemReserve(ctx, range.length, 0, &range.addr));
    OK(vmem_set_interrupt(ctx, fork_once, NULL));
    const int rc = vmem_commit(ctx, &range, 1, test_page, 0, NULL);
    if (inside < 0)
        _exit(rc != -EINTR);
    OK(rc);
    CHECK(inside);
    OK(vmem_fill(ctx, range.addr, 0x5a, range.length));
    tell(to_child);
    CHECK(waitpid(inside, &status, 0) == inside);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(all_words(ctx, range.addr, range.length, UINT64_C(0x5a5a5a5a5a5a5a5a)));
    vmem_context_destroy(ctx);
    close(to_child[0]);
    close(to_child[1]);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    killed(); // first: where there is a CUDA context, its process cannot be forked usefully
    vmem_context *ctx = test_context(0);
    OK(vMemReserve(ctx, 8 * MIB, 0, &addr));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 2, 0, page));
    OK(vMemMap(ctx, addr, page[0]));
    OK(vmem_fill(ctx, addr, 0x41, 2 * MIB));
    int status = run(child, ctx);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);

    // The parent noticed nothing.
    CHECK(all_words(ctx, addr, 2 * MIB, UINT64_C(0x4141414141414141)));
    CHECK_EQ(page_at(ctx, addr), page[0]);
    OK(vMemMap(ctx, addr + 2 * MIB, page[1]));
    OK(vmem_fill(ctx, addr + 2 * MIB, 0x42, 2 * MIB));
    OK(vMemReleaseBatch(ctx, page, 2, NULL));
    OK(vMemFree(ctx, addr));
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.created + s.mapped + s.reserved, 0);
    vmem_context_destroy(ctx);
    if (test_cpu()) {
        vmem_context *second = test_context(0); // its file is another one
        child_keeps_reading(test_context(0));
        vmem_context_destroy(second);
        no_descriptor_left();
        fork_in_a_call();
    }
    return 0;
}
