// A pool's file: the test plays the other process, which holds the file's lock and writes its own row.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checked.h"
#include "kv.h"
#include "kv/kv.h"
#include "pool/pool.h"

#define PAGES 250 // of a request: 125 in each of two tensors
#define ROWS (125 * 32)
#define OTHER 1 // its place

static vmem_context *ctx;
static char path[] = "/tmp/vmem-test-XXXXXX";
static int file;

static vmem_kv_pool *join(vmem_kv **kv)
{
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    const struct vmem_kv_pool_config pool_cfg = {.size = sizeof pool_cfg, .budget = PAGES * test_page, .path = path};
    const struct vmem_kv_pool_share share = {.size = sizeof share, .name = "a"};
    vmem_kv_pool *pool;
    OK(vmem_kv_pool_create(&pool_cfg, &pool));
    CHECK((file = open(path, O_RDWR | O_CLOEXEC)) >= 0); // the last pool removed its own
    *kv = k_create(ctx, .flags = VMEM_KV_DEFER | VMEM_KV_CHECK | VMEM_KV_LAZY, .tensors = tensors, .n_tensors = 2,
                   .slots = 2, .max_tokens = ROWS, .budget = test_page);
    OK(vmem_kv_pool_join(pool, *kv, &share));
    return pool;
}

static void lock(short type, off_t at)
{
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    CHECK(!fcntl(file, F_OFD_SETLKW, &l));
}

static struct pool_table table(void)
{
    struct pool_table t;
    CHECK(pread(file, &t, sizeof t, 0) == sizeof t);
    return t;
}

// The other process begins to need that many pages. With the file's lock held.
static uint64_t ask(uint64_t pages)
{
    struct pool_table t = table();
    t.head.revision++;
    t.entries[OTHER] = (struct vmem_kv_pool_member){.size = sizeof t.entries[OTHER],
                                                    .max = t.head.budget,
                                                    .needs = pages * test_page,
                                                    .asked = t.head.revision,
                                                    .looked = t.head.revision,
                                                    .answer = VMEM_KV_DEFERRED,
                                                    .name = "b"};
    CHECK(pwrite(file, &t.head, sizeof t.head, 0) == sizeof t.head);
    CHECK(pwrite(file, &t.entries[OTHER], sizeof t.entries[OTHER],
                 (off_t)(offsetof(struct pool_table, entries) + sizeof(t.entries[OTHER]))) == sizeof t.entries[OTHER]);
    return t.head.revision;
}

// What the cache's entry says that it could give, as long as no look at the cache has ended since.
static void set_could_give(vmem_kv *kv, uint64_t bytes)
{
    struct vmem_kv_pool *pool = kv->membership.member->pool;
    pthread_mutex_lock(&pool->lock);
    kv->membership.member->entry.could_give = bytes;
    pthread_mutex_unlock(&pool->lock);
}

static uint64_t could_give(vmem_kv *kv)
{
    struct vmem_kv_pool *pool = kv->membership.member->pool;
    pthread_mutex_lock(&pool->lock);
    const uint64_t bytes = kv->membership.member->entry.could_give;
    pthread_mutex_unlock(&pool->lock);
    return bytes;
}

static atomic_uint_fast64_t question;
static atomic_bool refused; // the thread refused it, or an older one
static const struct vmem__member_ops *real_ops;

// Stands in for the operation with which the thread begins each look at the cache, and so sees every reply.
static void see_reply(void *self)
{
    const struct vmem__member *m = ((vmem_kv *)self)->membership.member;
    pthread_mutex_lock(&m->pool->lock);
    refused |= m->entry.reply == VMEM_KV_REFUSED && m->entry.looked >= question;
    pthread_mutex_unlock(&m->pool->lock);
    real_ops->lock(self);
}

static void see_replies(struct vmem__member *m)
{
    static struct vmem__member_ops seeing;
    real_ops = m->ops;
    seeing = *real_ops;
    seeing.lock = see_reply;
    while (m->ops == real_ops) {
        pthread_mutex_lock(&m->pool->lock);
        m->ops = m->busy ? real_ops : &seeing;
        pthread_mutex_unlock(&m->pool->lock);
    }
}

// The pool's thread looks at a cache whose request needs everything, and then waits for the file. Meanwhile the request
// ends, and a question comes. What the thread saw is no reason to refuse it.
static void test_an_old_look_refuses_no_question(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    question = UINT64_MAX;
    see_replies(kv->membership.member);
    lock(F_WRLCK, 1 + OTHER); // it lives
    for (int i = 0; i < 20; i++) {
        uint32_t slot;
        int32_t lengths[2] = {0};
        OK(k_alloc(kv, 0, &slot));
        lengths[slot] = ROWS;
        while (vmem_kv_step(kv, lengths, 2, 0)) // the thread may be at the file
            usleep(100);
        while (could_give(kv)) {
            vmem__pool_ring(pool);
            usleep(100);
        }
        lock(F_WRLCK, 0);
        set_could_give(kv, test_page);
        vmem__pool_ring(pool);
        while (could_give(kv)) // until the thread has looked, and is at the file's lock
            usleep(100);
        OK(vmem_kv_free(kv, slot, 0));
        question = ask(PAGES);
        lock(F_UNLCK, 0);
        vmem__pool_ring(pool);
        while (table().entries[0].has) // until all is given
            usleep(100);
        CHECK(!refused);
        question = UINT64_MAX;
        lock(F_WRLCK, 0);
        ask(0);
        lock(F_UNLCK, 0);
    }
    lock(F_UNLCK, 1 + OTHER);
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
    close(file);
}

// The table states some milliseconds later what a cache holds and could give, however often that changes.
static void test_changes_are_published(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    for (int i = 0; i < 10; i++) {
        uint32_t slot;
        int32_t lengths[2] = {0};
        OK(k_alloc(kv, 0, &slot));
        lengths[slot] = ROWS;
        while (vmem_kv_step(kv, lengths, 2, 0))
            usleep(100);
        vmem__pool_ring(pool); // it looks sooner after the last change than it writes the row again
        while (could_give(kv) || table().entries[0].could_give)
            usleep(100);
        OK(vmem_kv_free(kv, slot, 0));
        vmem__pool_ring(pool);
        while (table().entries[0].could_give < PAGES * test_page)
            usleep(100);
    }
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
    close(file);
}

// Budget that the other process waits for is not spare: a step takes of it only what it needs itself.
static void test_budget_to_spare_is_what_nobody_waits_for(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    uint32_t slot;
    OK(k_alloc(kv, 0, &slot));
    for (int others = 1; others >= 0; others--) {
        uint64_t spare = 0;
        lock(F_WRLCK, 1 + OTHER); // it lives
        lock(F_WRLCK, 0);
        ask(others ? PAGES : 0);
        lock(F_UNLCK, 0);
        for (int rows = others ? 32 : 33 * 32; rows <= (others ? 32 * 32 : 48 * 32); rows += 32) {
            int32_t lengths[2] = {0};
            lengths[slot] = rows;
            while (vmem_kv_step(kv, lengths, 2, 0)) // the thread may be at the file
                usleep(100);
            const struct vmem_kv_stats stats = k_stats(kv);
            spare = MAX(spare, stats.budget_pages - stats.held_pages);
        }
        CHECK(others ? spare <= 2 : spare > 10); // what the cache asks for is a little more than it needs
        lock(F_UNLCK, 1 + OTHER);
    }
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
    close(file);
}

// A thread that a forked child has not held the pool's lock.
static void test_a_forked_child_ends_its_pool(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    int status;
    pthread_mutex_lock(&pool->lock);
    const pid_t child = fork();
    if (!child) {
        alarm(120);
        vmem_kv_destroy(kv);
        vmem_kv_pool_destroy(pool);
        _exit(0);
    }
    pthread_mutex_unlock(&pool->lock);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
}

// A child that was forked by the system call alone has its parent's locks, and may outlive it. Then nobody has the file open:
// a pool of another size may begin there.
static void test_a_child_of_a_system_call_is_not_its_parent(void)
{
    struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = PAGES * test_page, .path = path};
    vmem_kv_pool *pool;
    pid_t child = 0;
    int ends[2], status;
    CHECK(!pipe(ends));
    const pid_t parent = fork();
    if (!parent) {
        OK(vmem_kv_pool_create(&cfg, &pool));
        child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        alarm(120); // both, should this test fail
        if (child)
            CHECK(write(ends[1], &child, sizeof child) == sizeof child);
        for (;;)
            pause();
    }
    CHECK(read(ends[0], &child, sizeof child) == sizeof child);
    cfg.budget *= 2;
    ERR(vmem_kv_pool_create(&cfg, &pool), EINVAL, "budget");
    kill(parent, SIGKILL);
    CHECK_EQ(waitpid(parent, &status, 0), parent);
    OK(vmem_kv_pool_create(&cfg, &pool));
    vmem_kv_pool_destroy(pool);
    CHECK(access(path, F_OK));
    kill(child, SIGKILL);
    close(ends[0]);
    close(ends[1]);
}

// The parent dies while it has the table's lock, which its child does not inherit.
static void test_a_child_of_a_system_call_does_not_lock_the_table(void)
{
    const struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = PAGES * test_page, .path = path};
    vmem_kv_pool *pool;
    pid_t child = 0;
    int ends[2], status;
    CHECK(!pipe(ends));
    const pid_t parent = fork(); // no pool is open: the thread sanitizer allows no threads after a fork beside others
    if (!parent) {
        OK(vmem_kv_pool_create(&cfg, &pool));
        pthread_mutex_lock(&pool->lock);
        OK(vmem__table_begin(pool, POOL_CALL_US));
        child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        alarm(120); // both, should this test fail
        if (child)
            CHECK(write(ends[1], &child, sizeof child) == sizeof child);
        for (;;)
            pause();
    }
    CHECK(read(ends[0], &child, sizeof child) == sizeof child);
    ERR(vmem_kv_pool_create(&cfg, &pool), EAGAIN, "lock");
    kill(parent, SIGKILL);
    CHECK_EQ(waitpid(parent, &status, 0), parent);
    OK(vmem_kv_pool_create(&cfg, &pool));
    vmem_kv_pool_destroy(pool);
    kill(child, SIGKILL);
    close(ends[0]);
    close(ends[1]);
}

// A process that closes the file anywhere loses the table's lock. What it was about to write may be outdated by then.
static void test_a_lost_lock_is_noticed(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    struct vmem__member *m = kv->membership.member;
    pthread_mutex_lock(&pool->lock);
    OK(vmem__table_begin(pool, POOL_CALL_US));
    const uint64_t has = m->entry.has;
    close(file);
    m->entry.has += test_page;
    vmem__table_end(pool);
    CHECK_EQ(m->entry.has, has);
    CHECK(m->unwritten);
    CHECK((file = open(path, O_RDWR | O_CLOEXEC)) >= 0);
    CHECK_EQ(table().entries[m->place].has, has);
    OK(vmem__table_begin(pool, POOL_CALL_US));
    m->entry.has += test_page;
    vmem__table_end(pool);
    CHECK_EQ(table().entries[m->place].has, has + test_page);
    pthread_mutex_unlock(&pool->lock);
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
    close(file);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    test_an_old_look_refuses_no_question();
    test_changes_are_published();
    test_budget_to_spare_is_what_nobody_waits_for();
    test_a_forked_child_ends_its_pool();
    test_a_child_of_a_system_call_is_not_its_parent();
    test_a_child_of_a_system_call_does_not_lock_the_table();
    test_a_lost_lock_is_noticed();

    unlink(path);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    return 0;
}
