// A pool's members that are no KV caches, by the contract in member.h alone: what such a member gives, another gets.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <unistd.h>

#include "checked.h"
#include "kv.h"
#include "pool/pool.h"

#define BUDGET 100 // pages of the pool

static vmem_context *ctx;

// Its pages are numbers. It needs `min_pages` of them. Others could be freed by its owner, as blocks that nobody reads.
struct holder {
    struct vmem__member *member;
    pthread_mutex_t lock;
    uint64_t budget, held, min_pages, evictable;
    unsigned trims, evictions;
    bool locked;
    vmem_page pages[BUDGET]; // of a holder with `real` functions
    uint64_t created;
    bool gives_in;                // it stops asking once the others have given
    struct vmem__member *patient; // asks until this one has trimmed
};

static void lock(void *self)
{
    struct holder *h = self;
    pthread_mutex_lock(&h->lock);
    CHECK(!h->locked);
    h->locked = true;
}

static void unlock(void *self)
{
    struct holder *h = self;
    CHECK(h->held <= h->budget);
    h->locked = false;
    pthread_mutex_unlock(&h->lock);
}

static void get_state(void *self, struct vmem__member_state *out)
{
    const struct holder *h = self;
    CHECK(h->locked);
    *out = (struct vmem__member_state){.budget = h->budget,
                                       .held = h->held,
                                       .target = h->budget,
                                       .min_pages = h->min_pages,
                                       .evictable = h->evictable};
}

static void raise_budget(void *self, uint64_t pages)
{
    struct holder *h = self;
    CHECK(h->locked);
    h->budget += pages;
}

static void lower_budget(void *self, uint64_t pages)
{
    struct holder *h = self;
    CHECK(h->locked && pages >= h->min_pages && pages <= h->budget);
    h->held = h->held < pages ? h->held : pages;
    h->budget = pages;
}

static void trim(void *self, bool wanted)
{
    struct holder *h = self;
    lock(h);
    h->trims += wanted; // not the one at its end
    unlock(h);
}

static void evict(void *self, uint64_t pages)
{
    struct holder *h = self;
    lock(h);
    CHECK(pages && pages <= h->evictable);
    h->min_pages -= pages;
    h->evictable -= pages;
    h->evictions++;
    unlock(h);
}

static const struct vmem__member_ops all = {.lock = lock,
                                            .unlock = unlock,
                                            .get_state = get_state,
                                            .raise_budget = raise_budget,
                                            .lower_budget = lower_budget,
                                            .trim = trim,
                                            .evict = evict};
static const struct vmem__member_ops least = {.lock = lock,
                                              .unlock = unlock,
                                              .get_state = get_state,
                                              .raise_budget = raise_budget,
                                              .lower_budget = lower_budget,
                                              .trim = trim};

static int join(vmem_kv_pool *pool, struct holder *h, const struct vmem__member_ops *ops, uint64_t min)
{
    const struct vmem__member_terms terms = {.ctx = ctx,
                                             .page_size = test_page,
                                             .held = h->held,
                                             .name = "holder",
                                             .min = min * test_page};
    pthread_mutex_init(&h->lock, NULL);
    lock(h);
    int rc = vmem__pool_join(pool, ops, h, &terms, &h->member, &h->budget);
    if (rc)
        h->budget = h->held;
    unlock(h);
    return rc;
}

static void leave(struct holder *h)
{
    vmem__pool_leave(h->member, h->held);
    h->held = 0;
    vmem__pool_left(h->member);
}

// Takes so many pages more: claims, and asks and waits for what the claim does not find. 0, or the refusal.
static uint32_t take(struct holder *h, uint64_t pages)
{
    uint32_t refusal = 0;
    for (;;) {
        lock(h);
        if (h->held + pages > h->budget)
            h->budget +=
                vmem__pool_claim(h->member, h->budget, h->held + pages - h->budget, h->held + pages - h->budget);
        const uint64_t missing = h->held + pages > h->budget ? h->held + pages - h->budget : 0;
        const uint64_t coming = missing ? vmem__pool_ask(h->member, h->held, missing, &refusal) : 0;
        if (!missing) {
            h->held += pages;
            h->min_pages = h->held;
            vmem__pool_unask(h->member);
        }
        unlock(h);
        if (!missing)
            return 0;
        if (!coming)
            return refusal;
        vmem__pool_wait(h->member, 60000);
    }
}

// A member keeps the pages that it needs, and gives the others when another asks.
static void test_budget_moves(void)
{
    vmem_kv_pool *pool = k_pool(BUDGET);
    struct holder a = {0}, b = {0};
    OK(join(pool, &a, &least, 0));
    OK(join(pool, &b, &least, 20));
    CHECK_EQ(b.budget, 20);    // its minimum, at once
    CHECK_EQ(take(&a, 80), 0); // all that is free
    CHECK_EQ(take(&b, 21), VMEM_KV_IN_USE);
    lock(&a);
    a.min_pages = 50; // 30 of its pages are no longer needed
    vmem__pool_wake(a.member);
    unlock(&a);
    CHECK_EQ(take(&b, 40), 0);
    lock(&a);
    CHECK(a.budget >= 50 && a.budget <= 60 && a.trims);
    unlock(&a);
    CHECK_EQ(take(&b, 40), VMEM_KV_IN_USE);
    CHECK_EQ(k_pool_info(pool).members, 2);
    leave(&a);
    CHECK_EQ(take(&b, 60), 0); // the pool is its own now
    leave(&b);
    CHECK_EQ(k_pool_info(pool).free, BUDGET * test_page);
    vmem_kv_pool_destroy(pool);
}

// Pages that a member itself cannot take back, its owner frees, if asked to.
static void test_the_owner_evicts(void)
{
    vmem_kv_pool *pool = k_pool(BUDGET);
    struct holder a = {0}, b = {0};
    OK(join(pool, &a, &all, 0));
    OK(join(pool, &b, &all, 0));
    CHECK_EQ(take(&a, BUDGET), 0);
    lock(&a);
    a.evictable = 40;
    unlock(&a);
    CHECK_EQ(take(&b, 30), 0);
    lock(&a);
    CHECK(a.evictions && a.evictable <= 10);
    unlock(&a);
    CHECK_EQ(take(&b, 60), VMEM_KV_IN_USE);
    leave(&b);
    leave(&a);
    vmem_kv_pool_destroy(pool);
}

// Pages that a new member already has become its grant, or it does not join.
static void test_members_join_with_pages(void)
{
    vmem_kv_pool *pool = k_pool(BUDGET);
    struct holder a = {.held = 70, .min_pages = 70, .budget = 70}, b = {.held = 31, .min_pages = 31, .budget = 31};
    OK(join(pool, &a, &least, 0));
    CHECK_EQ(a.budget, 70);
    ERR(join(pool, &b, &least, 0), ENOMEM, "holds");
    leave(&a);
    OK(join(pool, &b, &least, 0));
    leave(&b);
    vmem_kv_pool_destroy(pool);
}

// ---- memory that stays in the context ----------------------------------------------------------------------------

static uint64_t unused_memory(void)
{
    vmem__lock(ctx);
    const uint64_t bytes = ctx->committed - ctx->created;
    vmem__unlock(ctx);
    return bytes;
}

static void create_to(struct holder *h, uint64_t pages)
{
    if (pages > h->created)
        OK(vMemCreate(ctx, test_page, pages - h->created, 0, h->pages + h->created));
    else
        OK(vMemReleaseBatch(ctx, h->pages + pages, h->created - pages, NULL));
    h->created = pages;
}

// Called between the looks at two members: at every moment, the rows cover the device memory.
static void real_get_state(void *self, struct vmem__member_state *out)
{
    struct holder *h = self;
    uint64_t rows = 0;
    get_state(self, out);
    if (!h->member)
        return;
    pthread_mutex_lock(&h->member->pool->lock);
    for (const struct vmem__member *m = h->member->pool->members; m; m = m->next)
        rows += m->entry.has;
    vmem__lock(ctx);
    CHECK(ctx->committed <= rows);
    vmem__unlock(ctx);
    pthread_mutex_unlock(&h->member->pool->lock);
    if (h->gives_in && unused_memory())
        vmem__pool_unask(h->member);
}

static void real_raise(void *self, uint64_t pages)
{
    CHECK(unused_memory() >= pages * test_page); // it came with the budget
    raise_budget(self, pages);
}

static void real_lower(void *self, uint64_t pages)
{
    struct holder *h = self;
    if (pages < h->created)
        create_to(h, pages);
    lower_budget(h, pages);
}

static void real_trim(void *self, bool wanted)
{
    const struct holder *h = self;
    vmem__trim_unused(ctx, wanted);
    if (h->patient && unused_memory()) // of which the row says nothing yet
        vmem__pool_unask(h->patient);
}

static const struct vmem__member_ops real = {.lock = lock,
                                             .unlock = unlock,
                                             .get_state = real_get_state,
                                             .raise_budget = real_raise,
                                             .lower_budget = real_lower,
                                             .trim = real_trim};

// `a` has 80 pages and needs none of them. The thread looks at it first.
static vmem_kv_pool *make_exchange(struct holder *a, struct holder *b)
{
    vmem_kv_pool *pool = k_pool(BUDGET);
    OK(join(pool, b, &real, 0));
    OK(join(pool, a, &real, 0));
    CHECK_EQ(take(a, 80), 0);
    create_to(a, 80);
    return pool;
}

static void end_exchange(vmem_kv_pool *pool, struct holder *a, struct holder *b)
{
    create_to(a, 0);
    leave(a);
    create_to(b, 0);
    leave(b);
    CHECK_EQ(k_pool_info(pool).free, BUDGET * test_page);
    vmem_kv_pool_destroy(pool);
    CHECK_EQ(unused_memory(), 0);
    CHECK_EQ(ctx->expected, 0);
}

static void need_none(struct holder *h)
{
    lock(h);
    h->min_pages = 0;
    unlock(h);
}

static void test_memory_moves_with_budget(void)
{
    struct holder a = {0}, b = {0};
    vmem_kv_pool *pool = make_exchange(&a, &b);
    need_none(&a);
    CHECK_EQ(take(&b, 50), 0);
    create_to(&b, 50);
    end_exchange(pool, &a, &b);
}

// `b` asks for 30 pages more than are free, and does not take them. What `a` gives becomes free once its memory is gone.
static void give_in_vain(vmem_kv_pool *pool, struct holder *a, struct holder *b)
{
    uint32_t refusal;
    need_none(a); // before the question, which would be refused, and then no memory stays
    lock(b);
    b->budget += vmem__pool_claim(b->member, 0, 20, 20);
    CHECK_EQ(vmem__pool_ask(b->member, 0, 30, &refusal), 30);
    unlock(b);
    while (k_pool_info(pool).free < 30 * test_page)
        usleep(100);
    CHECK_EQ(unused_memory(), 0);
}

// A member of another pool waits, too; nobody of this one takes what a member gives.
static void test_memory_that_nobody_takes_leaves_the_row(void)
{
    struct holder a = {0}, b = {.gives_in = true};
    vmem_kv_pool *pool = make_exchange(&a, &b);
    vmem__expect(ctx, (int64_t)(80 * test_page), 0);
    give_in_vain(pool, &a, &b);
    vmem__expect(ctx, -(int64_t)(80 * test_page), 0);
    end_exchange(pool, &a, &b);
}

// Memory retained for a member that no longer asks stays in a row until it has gone back, too.
static void test_a_question_ends_beside_the_trim(void)
{
    struct holder a = {0}, b = {0};
    vmem_kv_pool *pool = make_exchange(&a, &b);
    lock(&a);
    a.patient = b.member;
    unlock(&a);
    give_in_vain(pool, &a, &b);
    end_exchange(pool, &a, &b);
}

// No entry falls, and nobody waits any more. Another has given memory up and will want it back.
static void test_memory_goes_back_when_nobody_waits(void)
{
    struct holder a = {0}, b = {0};
    vmem_kv_pool *pool = make_exchange(&a, &b);
    vmem__expect(ctx, 0, (int64_t)(80 * test_page));
    for (int wants = 50; wants >= 0; wants -= 50) {
        pthread_mutex_lock(&pool->lock);
        vmem__pool_retain(b.member, (uint64_t)wants * test_page);
        pthread_mutex_unlock(&pool->lock);
        lock(&a);
        create_to(&a, 50);
        unlock(&a);
        if (wants)
            vmem__trim_unused(ctx, true); // returns nothing: somebody waits
        CHECK(!wants || unused_memory() == 30 * test_page);
    }
    while (unused_memory())
        usleep(100);
    vmem__expect(ctx, 0, -(int64_t)(80 * test_page));
    end_exchange(pool, &a, &b);
}

// ---- memory on its way to the system -----------------------------------------------------------------------------

static struct vmem__ops held_up;
static _Atomic bool got; // the other member has its budget
static int (*discard)(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length);

// Lasts until the pool's thread waits for it. That drops the context's lock within a trim only if something is on its way.
static int discard_slowly(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    for (uint64_t calls = 0; calls < 2 && !got;) {
        usleep(100);
        vmem__lock(ctx);
        calls = ctx->calls;
        vmem__unlock(ctx);
    }
    CHECK(!got);
    return discard(b, a, offset, length);
}

static void *trim_all(void *arg)
{
    OK(vmem_trim(arg, NULL));
    return NULL;
}

static void raise_and_note(void *self, uint64_t pages)
{
    got = got || pages;
    raise_budget(self, pages);
}

// Another call returns memory to the system, and its pages are gone already. Others get the budget once the memory is.
static void test_memory_on_its_way_is_covered(void)
{
    struct holder a = {0}, b = {0};
    struct vmem__member_ops noting = least;
    pthread_t thread;
    noting.raise_budget = raise_and_note;
    vmem_kv_pool *pool = k_pool(BUDGET);
    OK(join(pool, &a, &real, 0));
    OK(join(pool, &b, &noting, 0));
    CHECK_EQ(take(&a, 80), 0);
    create_to(&a, 80);
    vmem__expect(ctx, (int64_t)(50 * test_page), 0);
    lock(&a);
    create_to(&a, 30);
    a.held = a.min_pages = 30;
    unlock(&a);
    vmem__lock(ctx);
    ctx->expected = 0; // not by vmem__expect: no look is to return the memory
    vmem__unlock(ctx);
    CHECK_EQ(unused_memory(), 50 * test_page);
    const struct vmem__ops *before = ctx->b.ops;
    held_up = *before;
    discard = held_up.discard;
    held_up.discard = discard_slowly;
    ctx->b.ops = &held_up;
    CHECK(!pthread_create(&thread, NULL, trim_all, ctx));
    CHECK_EQ(take(&b, 40), 0);
    pthread_join(thread, NULL);
    ctx->b.ops = before;
    leave(&b);
    create_to(&a, 0);
    leave(&a);
    vmem_kv_pool_destroy(pool);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    vmem__pool_ask_ns = UINT64_MAX; // no question lapses, however slow the machine is
    ctx = test_context(0);
    test_budget_moves();
    test_the_owner_evicts();
    test_members_join_with_pages();
    if (test_cpu()) { // elsewhere, memory goes and comes an arena at a time
        test_memory_moves_with_budget();
        test_memory_that_nobody_takes_leaves_the_row();
        test_a_question_ends_beside_the_trim();
        test_memory_goes_back_when_nobody_waits();
        test_memory_on_its_way_is_covered();
    }
    vmem_context_destroy(ctx);
    return 0;
}
