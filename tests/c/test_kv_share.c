// A pool's file: the test plays the other process, which holds the file's lock and writes its own row.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <poll.h>
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
#define LEASE 2 // the place of another one, which gives first

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

// With the file's lock held.
static void write_row(uint32_t place, const struct vmem_kv_pool_member *row)
{
    const off_t at = (off_t)(offsetof(struct pool_table, entries) + place * sizeof *row);
    CHECK(pwrite(file, row, sizeof *row, at) == sizeof *row);
}

// The other process begins to need that many pages. With the file's lock held.
static uint64_t ask(uint64_t pages)
{
    struct pool_table t = table();
    t.head.revision++;
    CHECK(pwrite(file, &t.head, sizeof t.head, 0) == sizeof t.head);
    write_row(OTHER, &(struct vmem_kv_pool_member){.size = sizeof t.entries[OTHER],
                                                   .max = t.head.budget,
                                                   .needs = pages * test_page,
                                                   .asked = t.head.revision,
                                                   .looked = t.head.revision,
                                                   .answer = VMEM_KV_DEFERRED,
                                                   .name = "b"});
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
static atomic_bool refused;       // the thread refused it, or an older one
static struct vmem__member *seen; // the cache's, which forgets it before the thread's last look has ended
static const struct vmem__member_ops *real_ops;

// Stands in for the operation with which the thread begins each look at the cache, and so sees every reply.
static void see_reply(void *self)
{
    pthread_mutex_lock(&seen->pool->lock);
    refused |= seen->entry.reply == VMEM_KV_REFUSED && seen->entry.looked >= question;
    pthread_mutex_unlock(&seen->pool->lock);
    real_ops->lock(self);
}

static void see_replies(struct vmem__member *m)
{
    static struct vmem__member_ops seeing;
    seen = m;
    real_ops = m->ops;
    seeing = *real_ops;
    seeing.lock = see_reply;
    while (m->ops == real_ops) {
        pthread_mutex_lock(&m->pool->lock);
        m->ops = m->busy ? real_ops : &seeing;
        pthread_mutex_unlock(&m->pool->lock);
    }
}

// A request that needs everything: its slot.
static uint32_t fill(vmem_kv *kv)
{
    uint32_t slot;
    int32_t lengths[2] = {0};
    OK(k_alloc(kv, 0, &slot));
    lengths[slot] = ROWS;
    while (vmem_kv_step(kv, lengths, 2, 0)) // the thread may be at the file
        usleep(100);
    return slot;
}

// The pool's thread looks at a cache whose request needs everything, and then waits for the file, which this call has
// locked. Meanwhile the request ends.
static void fill_until_the_thread_is_at_the_file(vmem_kv *kv)
{
    const vmem_kv_pool *pool = kv->membership.member->pool;
    const uint32_t slot = fill(kv);
    while (could_give(kv)) {
        vmem__pool_ring(pool);
        usleep(100);
    }
    lock(F_WRLCK, 0);
    set_could_give(kv, test_page);
    vmem__pool_ring(pool);
    while (could_give(kv))
        usleep(100);
    OK(vmem_kv_free(kv, slot, 0));
}

// What the thread has seen before a question comes is no reason to refuse it.
static void test_an_old_look_refuses_no_question(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    question = UINT64_MAX;
    see_replies(kv->membership.member);
    lock(F_WRLCK, 1 + OTHER); // it lives
    for (int i = 0; i < 20; i++) {
        fill_until_the_thread_is_at_the_file(kv);
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

// The same, but nobody needs anything. The answer says what the cache could give when it was asked, not before.
static void test_an_old_look_is_no_answer(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = join(&kv);
    for (int i = 0; i < 20; i++) {
        fill_until_the_thread_is_at_the_file(kv);
        struct pool_table t = table();
        t.head.revision++;
        CHECK(pwrite(file, &t.head, sizeof t.head, 0) == sizeof t.head);
        lock(F_UNLCK, 0);
        do {
            usleep(100);
            lock(F_WRLCK, 0);
            t.entries[0] = table().entries[0];
            lock(F_UNLCK, 0);
        } while (t.entries[0].looked < t.head.revision);
        CHECK_EQ(t.entries[0].could_give, PAGES * test_page);
    }
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
    close(file);
}

// A call has the caches of all processes say at once what they could give. It waits for no process for ever.
static void test_members_look_at_themselves_for_a_call(void)
{
    vmem_kv *kv;
    const struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .path = path};
    vmem_kv_pool *pool = join(&kv), *other;
    OK(vmem_kv_pool_create(&cfg, &other));
    for (int i = 0; i < 20; i++) {
        const uint32_t slot = fill(kv);
        OK(vmem_kv_pool_look(other, 600000));
        CHECK_EQ(k_pool_row(other, "a").could_give, 0);
        OK(vmem_kv_free(kv, slot, 0));
        OK(vmem_kv_pool_look(i % 2 ? pool : other, 600000));
        CHECK_EQ(k_pool_row(i % 2 ? pool : other, "a").could_give, PAGES * test_page);
    }
    lock(F_WRLCK, 1 + OTHER); // a process that does not answer
    lock(F_WRLCK, 0);
    ask(0);
    lock(F_UNLCK, 0);
    OK(vmem_kv_pool_look(other, 20));
    lock(F_UNLCK, 1 + OTHER);
    vmem_kv_pool_destroy(other);
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

// ---- members that give first ----------------------------------------------------------------------------------------

#define KEPT 100   // pages of an ended request
#define PARKED 100 // pages that the lease of another process could give
#define ASKED 120  // pages, of which the pool has at most 50 free

// A cache that keeps pages, a lease, and somebody who asks.
static vmem_kv_pool *ask_beside_a_lease(vmem_kv **kv)
{
    vmem_kv_pool *pool = join(kv);
    const int32_t lengths[2] = {KEPT / 2 * 32};
    uint32_t slot;
    lock(F_WRLCK, 1 + OTHER);
    lock(F_WRLCK, 1 + LEASE);
    OK(k_alloc(*kv, 0, &slot));
    while (vmem_kv_step(*kv, lengths, 2, 0)) // the thread may be at the file
        usleep(100);
    OK(vmem_kv_free(*kv, slot, 0));
    lock(F_WRLCK, 0);
    struct vmem_kv_pool_member lease = {.size = sizeof lease,
                                        .max = PAGES * test_page,
                                        .has = PARKED * test_page,
                                        .could_give = PARKED * test_page,
                                        .looked = table().head.revision,
                                        .gives_first = 1,
                                        .name = "lease"};
    write_row(LEASE, &lease);
    question = ask(ASKED);
    lock(F_UNLCK, 0);
    return pool;
}

static void end_beside_a_lease(vmem_kv_pool *pool, vmem_kv *kv)
{
    vmem_kv_destroy(kv);
    vmem_kv_pool_destroy(pool);
    lock(F_UNLCK, 1 + OTHER);
    lock(F_UNLCK, 1 + LEASE);
    close(file);
}

static uint32_t decisions_to_hold_back(const struct vmem__member *m)
{
    pthread_mutex_lock(&m->pool->lock);
    const uint32_t n = m->entry.holds_back;
    pthread_mutex_unlock(&m->pool->lock);
    return n;
}

// Until the thread has decided so often that the cache holds back. The question has no answer meanwhile.
static void see_it_hold_back(vmem_kv *kv, uint32_t times)
{
    struct vmem__member *m = kv->membership.member;
    for (uint32_t before = 0, seen = 0; seen < times; usleep(100)) {
        vmem__pool_ring(m->pool);
        pthread_mutex_lock(&m->pool->lock);
        seen += seen ? m->entry.holds_back - before : m->entry.holds_back != before;
        before = m->entry.holds_back;
        CHECK(m->entry.looked < question);
        CHECK(!m->to_give && !m->entry.giving);
        pthread_mutex_unlock(&m->pool->lock);
    }
    CHECK_EQ(k_stats(kv).held_pages, KEPT);
}

// The thread sleeps between its rounds. One that sleeps comes to the bell after the round that it is in; one that goes from
// round to round leaves the bell ringing, and decides again and again.
static void see_it_sleep(vmem_kv *kv)
{
    const struct vmem__member *m = kv->membership.member;
    struct pollfd bell = {.fd = m->pool->bell, .events = POLLIN};
    vmem__pool_ring(m->pool);
    const uint32_t before = decisions_to_hold_back(m);
    for (;; usleep(100)) {
        const uint32_t decided = decisions_to_hold_back(m) - before;
        if (!poll(&bell, 1, 0))
            break;
        CHECK(decided <= 1);
    }
}

// Changes the lease's entry, as a process does that runs.
static struct pool_table let_the_lease_run(void)
{
    lock(F_WRLCK, 0);
    struct pool_table t = table();
    t.entries[LEASE].held ^= test_page;
    if (t.entries[LEASE].size)
        write_row(LEASE, &t.entries[LEASE]);
    lock(F_UNLCK, 0);
    return t;
}

// Until what was asked is free. Nobody may refuse the question before, whenever he reads the table.
static void see_the_rest_come(uint64_t lease_has, bool lease_runs)
{
    for (;; usleep(1000)) {
        const struct pool_table t = lease_runs ? let_the_lease_run() : table();
        if ((PAGES - lease_has - ASKED) * test_page >= t.entries[0].has)
            return;
        CHECK(t.entries[0].looked < question || t.entries[0].giving);
    }
}

static void change_lease(uint64_t has, uint64_t giving, uint64_t could_give)
{
    lock(F_WRLCK, 0);
    struct vmem_kv_pool_member row = table().entries[LEASE];
    row.has = has * test_page;
    row.giving = giving * test_page;
    row.could_give = could_give * test_page;
    row.looked = question;
    write_row(LEASE, &row);
    lock(F_UNLCK, 0);
}

// What a lease of another process has parked goes first, and while it comes, the cache waits for it.
static void test_a_cache_leaves_a_question_to_a_lease(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = ask_beside_a_lease(&kv);
    see_it_hold_back(kv, 5);
    change_lease(PARKED, 80, PARKED);
    see_it_hold_back(kv, 5);
    see_it_sleep(kv);
    change_lease(PARKED - 80, 0, PARKED - 80);
    while (table().entries[0].looked < question)
        usleep(100);
    CHECK_EQ(k_stats(kv).held_pages, KEPT);
    end_beside_a_lease(pool, kv);
}

// It gives the part that the lease cannot, and at once, whether or not the lease gives something already.
static void test_a_cache_gives_what_a_lease_cannot(void)
{
    for (uint64_t giving = 0; giving <= 80; giving += 80) {
        vmem_kv *kv;
        vmem_kv_pool *pool = ask_beside_a_lease(&kv);
        see_it_hold_back(kv, 1);
        lock(F_WRLCK, 0);
        struct vmem_kv_pool_member lease = table().entries[LEASE];
        lease.giving = giving * test_page;
        write_row(LEASE, &lease);
        question = ask(ASKED + 80);
        lock(F_UNLCK, 0);
        while (table().entries[0].giving || table().entries[0].has > (PAGES - ASKED - 80) * test_page) {
            let_the_lease_run();
            usleep(1000);
        }
        CHECK(table().entries[0].looked < question);
        CHECK_EQ(table().entries[0].has, (PAGES - ASKED - 80) * test_page); // the lease's part of the rest is still due
        end_beside_a_lease(pool, kv);
    }
}

// The cache of this process gives ASKED pages more.
static void end_when_all_is_given(vmem_kv_pool *pool, vmem_kv *kv)
{
    while (table().entries[0].has > (PAGES - PARKED - ASKED) * test_page) {
        let_the_lease_run();
        usleep(1000);
    }
    end_beside_a_lease(pool, kv);
}

// What it has answered already, such as when free budget was enough, it leaves to nobody: he who asks could be refused.
static void test_a_cache_that_has_answered_gives(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = ask_beside_a_lease(&kv);
    see_it_hold_back(kv, 1);
    lock(F_WRLCK, 0);
    question = ask(1);
    lock(F_UNLCK, 0);
    while (table().entries[0].looked < question)
        usleep(100);
    lock(F_WRLCK, 0);
    struct vmem_kv_pool_member asks = table().entries[OTHER];
    asks.needs = ASKED * test_page;
    write_row(OTHER, &asks);
    lock(F_UNLCK, 0);
    end_when_all_is_given(pool, kv);
}

// What a cache is giving may take it long. A lease that has parked more meanwhile gives as if the cache gave nothing.
static void test_a_lease_does_not_wait_for_what_a_cache_gives(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = ask_beside_a_lease(&kv);
    struct vmem__member *m = kv->membership.member;
    see_it_hold_back(kv, 1);
    pthread_mutex_lock(&pool->lock);
    m->entry.gives_first = 1; // now the cache of this process stands for the lease,
    pthread_mutex_unlock(&pool->lock);
    lock(F_WRLCK, 0);
    struct vmem_kv_pool_member cache = table().entries[LEASE]; // and the other member for the cache
    cache.gives_first = 0;
    cache.giving = PARKED * test_page;
    write_row(LEASE, &cache);
    lock(F_UNLCK, 0);
    end_when_all_is_given(pool, kv);
}

enum { REFUSES, REFUSES_AFTERWARDS, GIVES_LESS, HAS_ANSWERED, ASKS, IS_SILENT, STOPS, DIES, LEASE_ENDS };

// Whatever becomes of the lease, the cache gives the rest.
static void test_a_cache_gives_if_a_lease_does_not(void)
{
    for (int end = 0; end < LEASE_ENDS; end++) {
        uint64_t has = PARKED;
        vmem_kv *kv;
        vmem_kv_pool *pool = ask_beside_a_lease(&kv);
        see_it_hold_back(kv, 2);
        if (end == REFUSES_AFTERWARDS || end == GIVES_LESS || end == STOPS) {
            change_lease(PARKED, 80, PARKED);
            see_it_hold_back(kv, 2);
        }
        if (end == REFUSES || end == REFUSES_AFTERWARDS)
            change_lease(PARKED, 0, 0);
        if (end == GIVES_LESS)
            change_lease(has = PARKED - 30, 0, 0);
        if (end == HAS_ANSWERED)
            change_lease(PARKED, 0, PARKED);
        if (end == ASKS) {
            lock(F_WRLCK, 0);
            struct vmem_kv_pool_member row = table().entries[LEASE];
            row.needs = test_page;
            write_row(LEASE, &row);
            lock(F_UNLCK, 0);
        }
        if (end == IS_SILENT || end == STOPS) {
            pthread_mutex_lock(&pool->lock);
            pool->ran += vmem__pool_silent_ns + 1;
            pthread_mutex_unlock(&pool->lock);
        }
        if (end == DIES) {
            lock(F_UNLCK, 1 + LEASE);
            has = 0;
        }
        see_the_rest_come(has, end < IS_SILENT);
        end_beside_a_lease(pool, kv);
    }
}

// However long a lease takes, a cache that holds back is not taken for one that is stopped.
static void test_who_holds_back_is_not_silent(void)
{
    vmem_kv *kv;
    vmem_kv_pool *pool = ask_beside_a_lease(&kv), *asks;
    vmem_kv *asker = NULL;
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 32};
    const struct vmem_kv_pool_config pool_cfg = {.size = sizeof pool_cfg, .path = path};
    const struct vmem_kv_pool_share share = {.size = sizeof share, .name = "asker"};
    const uint64_t lapse = vmem__pool_ask_ns;
    uint32_t slot, answer;
    int32_t lengths[1] = {ASKED * 32};
    vmem__pool_ask_ns = UINT64_C(600000000000);
    lock(F_UNLCK, 1 + OTHER); // it is this pool's instead
    OK(vmem_kv_pool_create(&pool_cfg, &asks));
    asker = k_create(ctx, .flags = VMEM_KV_DEFER | VMEM_KV_CHECK | VMEM_KV_LAZY, .tensors = &tensor, .n_tensors = 1,
                     .slots = 1, .max_tokens = ASKED * 32, .budget = test_page);
    OK(vmem_kv_pool_join(asks, asker, &share));
    OK(k_alloc(asker, 0, &slot));
    CHECK_EQ(vmem_kv_step(asker, lengths, 1, 0), -ENOMEM);
    for (uint32_t i = 0, before = 0; i < 4; usleep(1000)) {
        pthread_mutex_lock(&asks->lock);
        if (asks->seen[0].entry.holds_back != before) {
            before = asks->seen[0].entry.holds_back;
            asks->ran += vmem__pool_silent_ns / 4 * 3;
            i++;
        }
        pthread_mutex_unlock(&asks->lock);
        vmem__pool_ring(asks);
        OK(vmem_kv_pool_wait(asker, 0, &answer));
        CHECK_EQ(answer, VMEM_KV_DEFERRED);
    }
    CHECK_EQ(k_stats(kv).held_pages, KEPT);
    lock(F_UNLCK, 1 + LEASE);
    while (vmem_kv_step(asker, lengths, 1, 0)) {
        OK(vmem_kv_pool_wait(asker, 0, &answer));
        CHECK(answer != VMEM_KV_REFUSED);
        usleep(100);
    }
    vmem__pool_ask_ns = lapse;
    vmem_kv_destroy(asker);
    vmem_kv_pool_destroy(asks);
    end_beside_a_lease(pool, kv);
}

// ---- the file ---------------------------------------------------------------------------------------------------------

// The table of another version has rows of another size. Nobody can share its pool; once it has ended, a new one begins.
static void test_a_file_of_another_version(void)
{
    const struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = PAGES * test_page, .path = path};
    struct pool_table old = {.head = {.magic = 0x316c6f6f706b6d76, // "vmkpool1"
                                      .size = sizeof old - VMEM_KV_POOL_MEMBERS * 8,
                                      .entries = VMEM_KV_POOL_MEMBERS,
                                      .budget = 2 * PAGES * test_page}};
    vmem_kv_pool *pool;
    memset(old.entries, 255, sizeof old.entries);
    CHECK((file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)) >= 0);
    CHECK(pwrite(file, &old, old.head.size, 0) == old.head.size);
    lock(F_WRLCK, 1 + VMEM_KV_POOL_MEMBERS); // somebody has it open
    ERR(vmem_kv_pool_create(&cfg, &pool), EBADMSG, "another version");
    lock(F_UNLCK, 1 + VMEM_KV_POOL_MEMBERS);
    ERR(vmem_kv_pool_create(&(struct vmem_kv_pool_config){.size = sizeof cfg, .path = path}, &pool), EINVAL, "budget");
    OK(vmem_kv_pool_create(&cfg, &pool));
    CHECK_EQ(k_pool_info(pool).members, 0);
    CHECK_EQ(k_pool_info(pool).budget, PAGES * test_page);
    vmem_kv_pool_destroy(pool);
    CHECK(access(path, F_OK));
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
    vmem__pool_silent_ns = UINT64_C(600000000000); // the lease, whose row the test writes, may be slow
    ctx = test_context(0);
    file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    test_an_old_look_refuses_no_question();
    test_an_old_look_is_no_answer();
    test_members_look_at_themselves_for_a_call();
    test_changes_are_published();
    test_budget_to_spare_is_what_nobody_waits_for();
    test_a_cache_leaves_a_question_to_a_lease();
    test_a_cache_gives_what_a_lease_cannot();
    test_a_cache_that_has_answered_gives();
    test_a_lease_does_not_wait_for_what_a_cache_gives();
    test_a_cache_gives_if_a_lease_does_not();
    test_who_holds_back_is_not_silent();
    test_a_file_of_another_version();
    test_a_forked_child_ends_its_pool();
    test_a_child_of_a_system_call_is_not_its_parent();
    test_a_child_of_a_system_call_does_not_lock_the_table();
    test_a_lost_lock_is_noticed();

    unlink(path);
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    return 0;
}
