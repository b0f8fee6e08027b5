// Long calls that are interrupted: they end soon, with -EINTR, and have changed nothing.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/core.h"
#include "harness.h"

static vmem_context *ctx;
static uint64_t addr;
static unsigned asked, refuse_at; // refuse_at: the ask that is answered by "stop"; 0: none
static pthread_t caller;

static int interrupted(void *arg)
{
    CHECK(arg == &asked);
    CHECK(pthread_equal(pthread_self(), caller));
    // It may call the library: no lock is held.
    uint64_t at;
    OK(vMemReserve(ctx, MIB, 0, &at));
    OK(vMemFree(ctx, at));
    test_stats(ctx);
    return ++asked == refuse_at;
}

// Bytes that the context's memfd holds; on a GPU 0.
static uint64_t held(void)
{
    char path[64], target[64];
    struct stat st;
    uint64_t bytes = 0;
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const ssize_t n = readlink(path, target, sizeof target - 1);
        if (n <= 0)
            continue;
        target[n] = '\0';
        if (strstr(target, "memfd:vmem") && !fstat(fd, &st))
            bytes += (uint64_t)st.st_blocks * 512;
    }
    return bytes;
}

enum { SIZE = 200 };
static vmem_page pages[SIZE * 16];

static int do_create(void) { return vMemCreate(ctx, test_page, SIZE * MIB / test_page, 0, pages); }
static int do_create_2m(void) { return vMemCreate(ctx, VMEM_PAGE_2M, SIZE * MIB / VMEM_PAGE_2M, 0, pages); }
static int do_create_zero(void) { return vMemCreate(ctx, test_page, SIZE * MIB / test_page, VMEM_CREATE_ZERO, pages); }
static int do_prealloc(void) { return vmem_prealloc(ctx, SIZE * MIB); }
static int do_commit(void)
{
    // Every second page, but for a long part: much to be mapped, and in several parts.
    static struct vmem_range ranges[65];
    for (uint64_t i = 0; i < 64; i++)
        ranges[i] = (struct vmem_range){addr + 2 * i * test_page, test_page};
    const uint64_t behind = 128 * test_page;
    ranges[64] = (struct vmem_range){addr + behind, SIZE * MIB};
    return vmem_commit(ctx, ranges, 65, test_page, 0, NULL);
}

static void nothing(void) {}
static void dirty_memory(void) // committed, and written before
{
    OK(vmem_prealloc(ctx, SIZE * MIB));
    OK(vMemCreate(ctx, test_page, SIZE * MIB / test_page, 0, pages));
    OK(vMemReleaseBatch(ctx, pages, SIZE * MIB / test_page, NULL));
}

// True while memory is on its way back.
static bool shrinking(void)
{
    vmem__lock(ctx);
    const bool on = ctx->shrinking;
    vmem__unlock(ctx);
    return on;
}

static vmem_page resident; // so that the arena stays

static void release_all(uint64_t size)
{
    const uint64_t created = test_stats(ctx).created - test_page;
    if (created)
        OK(vMemReleaseBatch(ctx, pages, created / size, NULL));
}

static void interrupt(const char *name, void (*before)(void), int (*call)(void))
{
    printf("%s\n", name);
    asked = refuse_at = 0;
    before();
    const struct vmem_stats clean = test_stats(ctx);
    asked = 0;
    OK(call());
    const unsigned asks = asked;
    if (test_cpu() && asks < SIZE / 32 - 2) // where arenas are memory, a large one is one step
        FAIL("%s asked %u times in %u MiB", name, asks, SIZE);
    OK(vmem_trim(ctx, NULL));
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 1 * GIB}, 1, NULL));
    release_all(call == do_create_2m ? VMEM_PAGE_2M : test_page);
    OK(vmem_trim(ctx, NULL));
    for (unsigned at = 1; at <= asks; at += asks > 3 ? asks / 3 : 1) {
        refuse_at = 0;
        before();
        const uint64_t memory = held();
        asked = 0;
        refuse_at = at;
        ERR(call(), EINTR, "interrupted");
        CHECK_EQ(asked, at); // and nothing more of it is done
        while (shrinking())
            sched_yield();
        struct vmem_stats s = test_stats(ctx);
        CHECK_EQ(s.created, clean.created);
        CHECK_EQ(s.mapped, clean.mapped);
        CHECK(s.overhead <= clean.overhead);
        CHECK(held() <= memory);
        OK(vmem_trim(ctx, NULL));
    }
    // And without the function, all goes through.
    OK(vmem_set_interrupt(ctx, NULL, NULL));
    refuse_at = 1;
    OK(call());
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 1 * GIB}, 1, NULL));
    release_all(call == do_create_2m ? VMEM_PAGE_2M : test_page);
    OK(vmem_trim(ctx, NULL));
    OK(vmem_set_interrupt(ctx, interrupted, &asked));
}

// A short call does not ask: it would cost more than the call.
static void short_calls(void)
{
    asked = 0;
    refuse_at = 1;
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 4, 0, pages));
    OK(vMemReleaseBatch(ctx, pages, 4, NULL));
    OK(vmem_commit(ctx, &(struct vmem_range){addr, 8 * MIB}, 1, test_page, 0, NULL));
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, 8 * MIB}, 1, NULL));
    CHECK_EQ(asked, 0);
}

// Once the function is removed, no other thread is inside it.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum { OUT, IN, LEAVING } where;
static bool removed;

static int slow(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    where = IN;
    pthread_cond_broadcast(&changed);
    while (where == IN)
        pthread_cond_wait(&changed, &lock);
    const bool late = removed;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < 1000; i++) // time for the remover to return too early
        sched_yield();
    CHECK(!late && !__atomic_load_n(&removed, __ATOMIC_ACQUIRE));
    OK(vmem_set_interrupt(ctx, NULL, NULL)); // from the inside it does not wait for itself
    return 0;
}

static void *remover(void *arg)
{
    pthread_mutex_lock(&lock);
    while (where != IN)
        pthread_cond_wait(&changed, &lock);
    where = LEAVING;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    OK(vmem_set_interrupt(ctx, NULL, NULL));
    __atomic_store_n(&removed, true, __ATOMIC_RELEASE);
    return arg;
}

static void removal(void)
{
    pthread_t t;
    OK(vmem_set_interrupt(ctx, slow, NULL));
    CHECK(!pthread_create(&t, NULL, remover, NULL));
    OK(do_prealloc());
    const bool was_asked = where == LEAVING;
    if (!was_asked) { // one large arena is one step
        pthread_mutex_lock(&lock);
        where = IN;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    CHECK(!pthread_join(t, NULL));
    CHECK(was_asked || !test_cpu());
    OK(vmem_trim(ctx, NULL));
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    caller = pthread_self();
    OK(vMemReserve(ctx, 1 * GIB, 0, &addr));
    OK(vmem_set_interrupt(ctx, interrupted, &asked));
    OK(vMemCreate(ctx, test_page, 1, 0, &resident));
    interrupt("create", nothing, do_create);
    interrupt("create 2M", nothing, do_create_2m);
    if (test_cpu()) // the cuda backend zeroes at the next map
        interrupt("zero", dirty_memory, do_create_zero);
    interrupt("prealloc", nothing, do_prealloc);
    interrupt("commit", nothing, do_commit);
    short_calls();
    removal();
    vmem_context_destroy(ctx);
    return 0;
}
