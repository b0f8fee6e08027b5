// Threads that commit, decommit, map, replace, unmap, release and give up in the same addresses, in ranges up to past
// every internal limit. test_commit_races [BACKEND]; $VMEM_TEST_ITERATIONS rounds of each thread.
//
// While a commit runs, its range is its own: its interrupt function looks at it from the inside, and at what the other
// threads did meanwhile. When all threads have ended, the books must agree with what is mapped.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <stdatomic.h>

#include "checked.h"
#include "harness.h"

enum { THREADS = 6, OWN = 24, LOG = 512, PHASES = 3 };
#define LENGTH (640 * MIB)

static vmem_context *ctx;
static uint64_t addr, spare; // addresses that all share; a reservation that comes and goes
static uint64_t rounds = 30;
static atomic_uint_fast64_t now = 1;

// A thread's successful work: changes of addresses by calls that succeeded.
struct deed {
    uint64_t start, end, addr, length;
};
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static struct deed deeds[LOG];
static uint64_t n_deeds;
static atomic_ulong committed, interrupted, busy, short_of, looked;

static void did(uint64_t start, uint64_t at, uint64_t length)
{
    pthread_mutex_lock(&log_lock);
    deeds[n_deeds++ % LOG] = (struct deed){start, now++, at, length};
    pthread_mutex_unlock(&log_lock);
}

// ---- a commit, seen from the inside ---------------------------------------------------------------------------

static _Thread_local struct {
    struct vmem_range range;
    uint64_t since; // the first look
    unsigned looks, stop_at;
    struct vmem_range hole; // a part of it that was not backed then
    vmem_page backed;       // a page that was, and its address
    uint64_t backed_at;
} mine;

// Whether another thread has dropped a page. It stays mapped until the commit ends, but nobody finds it.
static bool is_dropped(vmem_page page)
{
    struct vmem__arena_rec *a;
    vmem__lock(ctx);
    const struct vmem__page *p = vmem__page_get(ctx, page, &a);
    const bool dropped = p && p->doomed;
    vmem__unlock(ctx);
    return dropped;
}

static int look(void *arg)
{
    const struct vmem_range *r = &mine.range;
    (void)arg;
    if (!r->length)
        return 0; // vMemCreate
    looked++;
    mine.looks++;
    if (!mine.since) {
        mine.since = now++;
        mine.hole.length = mine.backed_at = 0;
        for (uint64_t at = r->addr; at < r->addr + r->length; at += test_page) {
            const vmem_page page = page_at(ctx, at);
            if (page && !mine.backed_at) {
                mine.backed = page;
                mine.backed_at = at;
            } else if (!page) {
                mine.hole = (struct vmem_range){at, test_page};
            }
        }
    }
    if (mine.hole.length) {
        CHECK_EQ(page_at(ctx, mine.hole.addr), 0);
        ERR(vmem_commit(ctx, &mine.hole, 1, test_page, 0, NULL), EBUSY, "another call");
    }
    if (mine.backed_at) {
        const vmem_page page = page_at(ctx, mine.backed_at);
        if (page)
            CHECK_EQ(page, mine.backed);
        else
            CHECK(is_dropped(mine.backed));
        ERR(vMemUnmap(ctx, mine.backed_at, test_page), EBUSY, "another call");
    }
    ERR(vmem_decommit(ctx, r, 1, NULL), EBUSY, "another call");
    pthread_mutex_lock(&log_lock);
    for (uint64_t i = n_deeds > LOG ? n_deeds - LOG : 0; i < n_deeds; i++) {
        const struct deed *d = &deeds[i % LOG];
        if (d->start > mine.since && d->addr < r->addr + r->length && r->addr < d->addr + d->length)
            FAIL("a call changed [0x%" PRIx64 ", +%" PRIu64 ") inside a commit of [0x%" PRIx64 ", +%" PRIu64 ")",
                 d->addr, d->length, r->addr, r->length);
    }
    pthread_mutex_unlock(&log_lock);
    return mine.looks == mine.stop_at;
}

// ---- the threads ----------------------------------------------------------------------------------------------

static struct vmem_range any_range(uint64_t *seed)
{
    const uint64_t pages = LENGTH / test_page;
    const uint64_t most[] = {4, 64, pages / 4, pages};
    const uint64_t n = 1 + rnd(seed) % most[rnd(seed) % COUNT(most)], first = rnd(seed) % (pages - n + 1);
    return (struct vmem_range){addr + first * test_page, n * test_page};
}

static bool fine(int rc, uint64_t start, const struct vmem_range *r)
{
    if (!rc)
        did(start, r->addr, r->length);
    else if (rc == -EBUSY)
        busy++;
    else
        FAIL("%d: %s", rc, vmem_last_error());
    return !rc;
}

static void do_commit(uint64_t *seed)
{
    struct vmem_range r = any_range(seed);
    uint64_t bytes = 0, start = now++;
    mine.range = r;
    mine.since = mine.looks = 0;
    mine.stop_at = rnd(seed) % 4 ? 0 : 1 + (unsigned)(rnd(seed) % 4);
    const uint32_t flags = (rnd(seed) & 1 ? VMEM_CREATE_ZERO : 0) | (rnd(seed) & 1 ? VMEM_MAP_FINE : 0);
    const int rc = vmem_commit(ctx, &r, 1, test_page, flags, &bytes);
    mine.range.length = 0;
    if (rc == -EINTR && mine.looks == mine.stop_at)
        interrupted++;
    else if (rc == -ENOMEM && strstr(vmem_last_error(), "budget"))
        short_of++;
    else if (fine(rc, start, &r))
        committed += bytes != 0;
}

// Own pages, at addresses of all. Others may replace or release them there.
static void do_map(uint64_t *seed, const vmem_page *own)
{
    struct vmem_map_op ops[OWN];
    const uint64_t first = addr + rnd(seed) % (LENGTH / test_page - 2 * OWN) * test_page, start = now++;
    const uint64_t stride = 1 + rnd(seed) % 2;
    const uint32_t flags = rnd(seed) & 1 ? VMEM_MAP_REPLACE : 0;
    size_t n = 0;
    for (; n < OWN && own[n]; n++)
        ops[n] = (struct vmem_map_op){first + n * stride * test_page, own[n]};
    const int rc = vMemMapBatch(ctx, ops, n, flags, NULL);
    if (!rc)
        for (size_t i = 0; i < n; i++)
            did(start, ops[i].addr, test_page);
    else if (rc == -EBUSY)
        busy++;
    else if (rc != -EINVAL && rc != -EEXIST)
        FAIL("%d: %s", rc, vmem_last_error());
}

static void do_own(uint64_t *seed, vmem_page *own)
{
    struct vmem_page_info info = {.size = sizeof info};
    for (size_t i = 0; i < OWN; i++) { // a decommit may have released it
        if (own[i] && vmem_page_query(ctx, own[i], &info) == -EINVAL)
            own[i] = 0;
        if (own[i] && rnd(seed) % 2) {
            OK(vmem_drop(ctx, &own[i], 1));
            own[i] = 0;
        }
    }
    for (size_t i = 0, n = 0; i < OWN; i++) { // no gap
        const vmem_page page = own[i];
        own[i] = 0;
        if (page)
            own[n++] = page;
    }
    size_t n = 0;
    while (n < OWN && own[n])
        n++;
    if (n < OWN && !vMemCreate(ctx, test_page, 1, 0, &own[n]))
        n++;
}

static void do_spare(uint64_t *seed)
{
    const struct vmem_range r = {spare, 8 * test_page};
    uint64_t at;
    if (rnd(seed) % 2) {
        const int rc = vmem_commit(ctx, &r, 1, test_page, 0, NULL);
        if (rc && rc != -EINVAL && rc != -EBUSY && rc != -ENOMEM)
            FAIL("%d: %s", rc, vmem_last_error());
        return;
    }
    OK(vMemReserve(ctx, 8 * test_page, 0, &at));
    const int rc = vmem_commit(ctx, &(struct vmem_range){at, 4 * test_page}, 1, test_page, 0, NULL);
    CHECK(!rc || rc == -ENOMEM); // nobody else knows it
    OK(vmem_unreserve(ctx, at));
}

static void *body(void *arg)
{
    uint64_t seed = (uintptr_t)arg * 77 + rounds + test_page;
    vmem_page own[OWN] = {0};
    for (uint64_t i = 0; i < rounds; i++) {
        const struct vmem_range r = any_range(&seed);
        const uint64_t start = now++;
        switch (rnd(&seed) % 10) {
        case 0:
        case 1:
        case 2: do_commit(&seed); break;
        case 3:
        case 4: fine(vmem_decommit(ctx, &r, 1, NULL), start, &r); break;
        case 5: fine(vMemUnmap(ctx, r.addr, r.length), start, &r); break;
        case 6: do_own(&seed, own); break;
        case 7: do_map(&seed, own); break;
        case 8: do_spare(&seed); break;
        default: { // whatever is there goes, if nobody works on it
            const uint64_t first = r.addr;
            const vmem_page page = page_at(ctx, first);
            const int rc = page ? vMemRelease(ctx, page) : 0;
            if (page && !rc)
                did(start, first, 0); // it may have moved since
            else if (rc && rc != -EBUSY && rc != -EINVAL)
                FAIL("%d: %s", rc, vmem_last_error());
        }
        }
    }
    OK(vmem_drop(ctx, own, OWN));
    return NULL;
}

// ---- when all have ended --------------------------------------------------------------------------------------

static void settle(void)
{
    for (bool on = true; on; sched_yield()) {
        vmem__lock(ctx);
        on = ctx->shrinking;
        vmem__unlock(ctx);
    }
}

static void check(void)
{
    static vmem_page pages[LENGTH / (64 * KIB)];
    uint64_t mapped = 0, created = 0;
    settle();
    for (uint64_t i = 0; i < LENGTH / test_page; i++) {
        struct vmem_page_info info = {.size = sizeof info};
        pages[i] = page_at(ctx, addr + i * test_page);
        if (!pages[i])
            continue;
        OK(vmem_page_query(ctx, pages[i], &info));
        mapped += test_page;
        created += test_page; // own pages are gone, the others have one address each
        CHECK_EQ(info.mappings, 1);
        put_word(ctx, addr + i * test_page, i);
    }
    for (uint64_t i = 0; i < LENGTH / test_page; i++) // each is a page of its own
        CHECK(!pages[i] || get_word(ctx, addr + i * test_page) == i);
    const struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.mapped, mapped);
    CHECK_EQ(s.created, created);
    CHECK_EQ(s.reserved, LENGTH);
    // No mark is left anywhere.
    OK(vmem_commit(ctx, &(struct vmem_range){addr, LENGTH / 2}, 1, test_page, 0, NULL));
    OK(vmem_decommit(ctx, &(struct vmem_range){addr, LENGTH}, 1, NULL));
    CHECK_EQ(test_stats(ctx).created, 0);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    const char *env = getenv("VMEM_TEST_ITERATIONS");
    rounds = env ? strtoull(env, NULL, 10) : rounds;
    OK(checked_context(test_backend, 0, false, &ctx));
    OK(vMemReserve(ctx, LENGTH, 0, &addr));
    OK(vmem_set_interrupt(ctx, look, NULL));
    for (int phase = 0; phase < PHASES; phase++) {
        pthread_t t[THREADS];
        // With a budget, large commits fail after they have marked and, beside others, after they have created.
        OK(vmem_set_budget(ctx, phase == 1 ? LENGTH / 2 : 0));
        OK(vMemReserve(ctx, 8 * test_page, 0, &spare));
        for (uintptr_t i = 0; i < THREADS; i++)
            CHECK(!pthread_create(&t[i], NULL, body, (void *)(i + (uintptr_t)phase * THREADS)));
        for (int i = 0; i < THREADS; i++)
            CHECK(!pthread_join(t[i], NULL));
        OK(vmem_unreserve(ctx, spare));
        OK(vmem_set_budget(ctx, 0));
        check();
    }
    printf("%lu committed, %lu interrupted, %lu busy, %lu short, %lu looks\n", committed, interrupted, busy, short_of,
           looked);
    vmem_context_destroy(ctx);
    return 0;
}
