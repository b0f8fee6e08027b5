// A lease: segments for PyTorch's allocator, whose pages come and go while their addresses stay.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "checked.h"
#include "kv.h"
#include "pool/pool.h"
#include "torch/lease.h"
#include "vmem_torch.h"
#define FAKEGPU_USER
#include "../fakegpu/fakegpu.h"

typedef void *alloc_function(size_t, int, void *);
typedef void free_function(void *, size_t, int, void *);
#define PAIR(n) {vmem_torch_alloc_##n, vmem_torch_free_##n}
static const struct {
    alloc_function *alloc;
    free_function *free;
} pairs[VMEM_TORCH_PLACES] = {PAIR(0), PAIR(1), PAIR(2),  PAIR(3),  PAIR(4),  PAIR(5),  PAIR(6),  PAIR(7),
                              PAIR(8), PAIR(9), PAIR(10), PAIR(11), PAIR(12), PAIR(13), PAIR(14), PAIR(15)};

static vmem_context *ctx;
static vmem_kv_pool *pool;
static _Thread_local uint32_t place;
static atomic_int ended;

static void on_end(void *arg) { *(atomic_int *)arg += 1; }

static void *get(size_t bytes) { return pairs[place % VMEM_TORCH_PLACES].alloc(bytes, test_info.device, NULL); }
static void put(void *addr) { pairs[place % VMEM_TORCH_PLACES].free(addr, 0, test_info.device, NULL); }
static uint64_t at(const void *addr) { return (uintptr_t)addr; }

static void open_lease_with(uint64_t most, uint32_t wait_ms, uint32_t flags)
{
    struct vmem_torch_config cfg = {.size = sizeof cfg,
                                    .flags = VMEM_TORCH_CHECK | flags,
                                    .most = most * test_page,
                                    .page_size = test_page,
                                    .wait_ms = wait_ms,
                                    .ended = on_end,
                                    .arg = &ended};
    ended = 0;
    OK(vmem_torch_open(ctx, pool, &cfg, &place));
}

static void open_lease(uint64_t most, uint32_t wait_ms) { open_lease_with(most, wait_ms, 0); }

// Calls the thread's functions for the lease there; returns the place before.
static uint32_t use(uint32_t other)
{
    const uint32_t before = place;
    place = other;
    return before;
}

static struct vmem_torch_stats stats(void)
{
    struct vmem_torch_stats st = {.size = sizeof st};
    OK(vmem_torch_get_stats(place, &st));
    return st;
}

static struct vmem_kv_shortage shortage(void)
{
    struct vmem_kv_shortage s = {.size = sizeof s};
    OK(vmem_torch_last_shortage(place, &s));
    return s;
}

static int park(void *addr) { return vmem_torch_park(place, &(uint64_t){at(addr)}, 1, NULL); }
static int trim(void) { return vmem_torch_trim(place); }

// Everything has gone back.
static void close_all(void)
{
    OK(vmem_torch_close(place));
    CHECK_EQ(ended, 1);
    CHECK_EQ(k_pool_info(pool).members, 0);
    vmem_kv_pool_destroy(pool);
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).reserved, 0);
}

// The last word of each page of a segment.
static void mark(void *addr, uint64_t pages, uint64_t word)
{
    for (uint64_t i = 0; i < pages; i++)
        put_word(ctx, at(addr) + (i + 1) * test_page - 8, word + i);
}
static void verify(void *addr, uint64_t pages, uint64_t word)
{
    for (uint64_t i = 0; i < pages; i++)
        CHECK_EQ(get_word(ctx, at(addr) + (i + 1) * test_page - 8), word + i);
}
static bool backed(void *addr, uint64_t pages)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < pages; i++)
        n += page_at(ctx, at(addr) + i * test_page) != 0;
    CHECK(!n || n == pages);
    return n;
}

// ---- a KV cache beside it ---------------------------------------------------------------------------------------

#define SLOTS 6
#define ROWS 160 // of half a page

static vmem_kv *kv;
static uint64_t rows_at, row_bytes, slot_bytes;

static void open_kv(uint64_t min, uint64_t max)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = test_page / 2};
    struct vmem_kv_pool_share share = {.size = sizeof share,
                                       .min = min * test_page,
                                       .max = max * test_page,
                                       .name = "kv"};
    struct vmem_kv_layout layout = {.size = sizeof layout};
    kv = k_create(ctx, .flags = VMEM_KV_DEFER | VMEM_KV_CHECK | VMEM_KV_LAZY, .tensors = &tensor, .n_tensors = 1,
                  .slots = SLOTS, .max_tokens = ROWS, .budget = test_page);
    OK(vmem_kv_pool_join(pool, kv, &share));
    OK(vmem_kv_get_layout(kv, 0, &layout));
    rows_at = layout.addr;
    row_bytes = layout.row_bytes;
    slot_bytes = layout.slot_stride;
}

static int kv_step(uint32_t slot, int32_t rows)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = rows;
    int rc = vmem_kv_step(kv, lengths, SLOTS, 0);
    CHECK(!rc || rc == -ENOMEM);
    return rc;
}

static uint64_t row(uint32_t slot, int32_t r) { return rows_at + slot * slot_bytes + (uint64_t)r * row_bytes; }

static void write_rows(uint32_t slot, int32_t from, int32_t to, uint64_t word)
{
    for (int32_t r = from; r < to; r++)
        put_word(ctx, row(slot, r), word + (uint64_t)r);
}
static void verify_rows(uint32_t slot, int32_t rows, uint64_t word)
{
    for (int32_t r = 0; r < rows; r++)
        CHECK_EQ(get_word(ctx, row(slot, r)), word + (uint64_t)r);
}

// Waits for what the lease has parked, which it gives when it is asked.
static uint32_t kv_request(int32_t rows, uint64_t word)
{
    uint32_t slot;
    OK(k_alloc(kv, (uint32_t)rows, &slot));
    while (kv_step(slot, rows)) {
        const struct vmem_kv_shortage s = k_shortage();
        CHECK(s.coming_pages);
        OK(vmem_kv_pool_wait(kv, 60000, NULL));
    }
    write_rows(slot, 0, rows, word);
    return slot;
}

// ---- tests ------------------------------------------------------------------------------------------------------

static void test_arguments(void)
{
    struct vmem_torch_config cfg = {.size = sizeof cfg, .page_size = test_page};
    uint32_t other, first[VMEM_TORCH_PLACES];
    pool = k_pool(100);
    ERR(vmem_torch_open(NULL, pool, &cfg, &other), EINVAL, "ctx");
    ERR(vmem_torch_open(ctx, NULL, &cfg, &other), EINVAL, "pool");
    ERR(vmem_torch_open(ctx, pool, NULL, &other), EINVAL, "cfg");
    ERR(vmem_torch_open(ctx, pool, &cfg, NULL), EINVAL, "place");
    cfg.flags = 4;
    ERR(vmem_torch_open(ctx, pool, &cfg, &other), EINVAL, "flags 0x4");
    cfg.flags = 0;
    cfg.size = 4;
    ERR(vmem_torch_open(ctx, pool, &cfg, &other), EINVAL, "cfg->size");
    cfg.size = sizeof cfg;
    cfg.page_size = 3 * test_page;
    ERR(vmem_torch_open(ctx, pool, &cfg, &other), EINVAL, "page_size");
    cfg.page_size = 4096;
    ERR(vmem_torch_open(ctx, pool, &cfg, &other), EINVAL, "page_size 4096");
    cfg.page_size = test_page;
    cfg.most = test_page - 1;
    ERR(vmem_torch_open(ctx, pool, &cfg, &other), EINVAL, "most");
    cfg.most = 0;
    CHECK_EQ(k_pool_info(pool).members, 0);
    ERR(vmem_torch_close(VMEM_TORCH_PLACES), EINVAL, "place 16 has no lease");
    ERR(vmem_torch_close(3), EINVAL, "no lease");
    ERR(vmem_torch_park(3, NULL, 0, NULL), EINVAL, "no lease");
    ERR(vmem_torch_unpark(3, 0, NULL), EINVAL, "no lease");
    ERR(vmem_torch_trim(3), EINVAL, "no lease");
    ERR(vmem_torch_get_stats(3, NULL), EINVAL, "out");
    ERR(vmem_torch_get_stats(3, &(struct vmem_torch_stats){.size = sizeof(struct vmem_torch_stats)}), EINVAL, "lease");
    ERR(vmem_torch_last_shortage(3, NULL), EINVAL, "out");
    CHECK(!pairs[3].alloc(MIB, 0, NULL));
    pairs[3].free(&other, 1, 0, NULL);
    for (uint32_t i = 0; i < VMEM_TORCH_PLACES; i++)
        OK(vmem_torch_open(ctx, pool, &cfg, &first[i]));
    ERR(vmem_torch_open(ctx, pool, &cfg, &other), EMFILE, "all 16 places");
    for (uint32_t i = 0; i < VMEM_TORCH_PLACES; i++) {
        CHECK_EQ(first[i], i);
        OK(vmem_torch_close(i));
    }
    open_lease(50, 1);
    CHECK_EQ(place % VMEM_TORCH_PLACES, 0);
    ERR(vmem_torch_close(first[0]), EINVAL, "no lease"); // not the one that has its functions now
    ERR(vmem_torch_unpark(first[0], 0, NULL), EINVAL, "no lease");
    char *a = get(test_page);
    CHECK(a && !get(0));
    CHECK(test_cpu() || !pairs[place % VMEM_TORCH_PLACES].alloc(test_page, test_info.device + 1, NULL));
    ERR(vmem_torch_park(place, NULL, 1, NULL), EINVAL, "idle");
    ERR(vmem_torch_park(place, (uint64_t[]){at(a), at(a) + 1}, 2, NULL), EINVAL, "idle[1]");
    ERR(vmem_torch_park(place, (uint64_t[]){at(a), 5}, 2, NULL), EINVAL, "idle[1] 0x5");
    CHECK_EQ(stats().parked_segments, 0);
    CHECK(backed(a, 1));
    put(a + 8);
    put(&other);
    put(NULL);
    CHECK_EQ(stats().strangers, 2);
    CHECK_EQ(stats().frees, 0);
    put(a);
    close_all();
}

static void test_addresses_stay(void)
{
    pool = k_pool(100);
    open_lease(0, 1);
    const uint64_t sizes[] = {1, 10, 3};
    char *a[3];
    uint64_t all[3], bytes;
    for (int i = 0; i < 3; i++) {
        CHECK((a[i] = get(sizes[i] * test_page)));
        CHECK_EQ(at(a[i]) % (2 * MIB), 0);
        mark(a[i], sizes[i], 1000 * (uint64_t)i);
        all[i] = at(a[i]);
    }
    CHECK_EQ(stats().segments, 3);
    CHECK_EQ(stats().held_bytes, 14 * test_page);
    OK(vmem_torch_park(place, all + 1, 2, &bytes));
    CHECK_EQ(bytes, 13 * test_page);
    CHECK_EQ(stats().held_bytes, 14 * test_page);
    verify(a[1], 10, 1000); // until somebody asks
    OK(trim());
    CHECK(backed(a[0], 1) && !backed(a[1], 10) && !backed(a[2], 3));
    CHECK_EQ(stats().parked_bytes, 13 * test_page);
    CHECK_EQ(stats().held_bytes, test_page);
    OK(vmem_torch_park(place, all + 1, 2, &bytes)); // again: they are parked
    CHECK_EQ(bytes, 0);
    CHECK_EQ(stats().parks, 2);
    char *b = get(10 * test_page); // never at an address that PyTorch has
    CHECK(b && b != a[1] && b != a[2]);
    verify(a[0], 1, 0);
    OK(vmem_torch_unpark(place, 0, NULL));
    CHECK(backed(a[1], 10) && backed(a[2], 3));
    CHECK_EQ(stats().parked_segments, 0);
    CHECK_EQ(stats().held_bytes, 24 * test_page);
    mark(a[1], 10, 77);
    verify(a[0], 1, 0);
    OK(vmem_torch_park(place, all, 2, NULL));
    put(a[1]); // parked, and freed
    CHECK_EQ(stats().segments, 3);
    CHECK_EQ(stats().parked_bytes, test_page);
    OK(vmem_torch_unpark(place, 0, NULL));
    CHECK(backed(a[0], 1));
    ERR(park(a[1]), EINVAL, "no segment");
    char *odd = get(2 * test_page + 1);
    CHECK(backed(odd, 3));
    put(odd);
    put(a[0]);
    put(a[2]);
    put(b);
    CHECK_EQ(stats().held_bytes, 0);
    CHECK_EQ(stats().bytes, 0);
    close_all();
}

// Segments of more than one slot, until the addresses end: none overlaps another.
static void test_large_segments(void)
{
    pool = k_pool(4000);
    open_lease(0, 1);
    const uint64_t slots = 32 * MIB / test_page;
    char *a = get(slots * test_page), *b = get((slots + 1) * test_page), *c = get(test_page);
    CHECK(a && b && c);
    CHECK(at(b) >= at(a) + 32 * MIB || at(b) + 64 * MIB <= at(a));
    mark(a, slots, 1);
    mark(b, slots + 1, 5000);
    mark(c, 1, 9000);
    verify(a, slots, 1);
    verify(b, slots + 1, 5000);
    verify(c, 1, 9000);
    OK(park(b));
    OK(trim());
    CHECK(!backed(b, slots + 1));
    OK(vmem_torch_unpark(place, 0, NULL));
    CHECK(backed(b, slots + 1));
    verify(a, slots, 1);
    verify(c, 1, 9000);
    CHECK(!get(UINT64_C(1) << 62));
    CHECK(!get(SIZE_MAX));
    CHECK_EQ(stats().refused, 2);
    put(a);
    put(c);
    CHECK((a = get(2 * slots * test_page))); // where the small ones were, or beside
    put(a);
    put(b);
    close_all();
}

// Pages that the cache keeps go to the lease, and pages that a request needs do not.
static void test_kept_pages_come_and_a_request_keeps_its_own(void)
{
    pool = k_pool(200);
    open_kv(0, 0);
    open_lease(0, 60000);
    const uint32_t kept = kv_request(ROWS, 1), mine = kv_request(ROWS, 5000); // 80 pages each
    OK(vmem_kv_free(kv, kept, 0));
    CHECK_EQ(k_stats(kv).kept_pages, 80);
    char *a = get(90 * test_page); // 40 are free: 50 of the kept ones must come
    CHECK(a);
    mark(a, 90, 1);
    CHECK(k_stats(kv).held_pages <= 110 && k_stats(kv).held_pages >= 80);
    verify_rows(mine, ROWS, 5000);
    const uint64_t waited = stats().waits;
    CHECK(waited);
    // 110 of 200 are left. The request needs 80, and keeps 2 for its next steps: refused, without the whole wait.
    CHECK(!get(29 * test_page));
    CHECK_EQ(shortage().reason, VMEM_KV_SHORT_OF_BUDGET);
    CHECK_EQ(shortage().missing_pages, 1);
    CHECK_EQ(stats().short_bytes, test_page);
    CHECK_EQ(stats().refused, 1);
    verify_rows(mine, ROWS, 5000);
    verify(a, 90, 1);
    // Parked pages are the cache's to take, and come back when it has none to spare but keeps some.
    OK(park(a));
    const uint32_t next = kv_request(40, 1);      // 20 pages
    const uint32_t more = kv_request(ROWS, 9000); // 80 more
    uint64_t missing;
    ERR(vmem_torch_unpark(place, 60000, &missing), ENOMEM, "missing");
    CHECK(missing >= 70 * test_page && missing <= 76 * test_page); // the cache keeps some for its next steps
    CHECK_EQ(stats().parked_segments, 1);
    CHECK(!backed(a, 90));
    OK(vmem_kv_free(kv, more, 0));
    OK(vmem_torch_unpark(place, 60000, &missing));
    CHECK(backed(a, 90));
    verify_rows(mine, ROWS, 5000);
    verify_rows(next, 40, 1);
    put(a);
    vmem_kv_destroy(kv);
    close_all();
}

static _Atomic bool got;

// Until the lease has asked so many times more, or has an answer.
static void await_questions(uint64_t times)
{
    for (const uint64_t before = stats().waits; stats().waits < before + times && !got;)
        usleep(100);
}

static void *end_slowly(void *place_and_slots)
{
    const uint32_t *const given = place_and_slots;
    use(given[0]);
    for (uint32_t i = 1; i <= 4; i++) {
        await_questions(5);
        OK(vmem_kv_free(kv, given[i], 0));
        OK(vmem_kv_reclaim(kv, 0, 0, NULL));
    }
    return NULL;
}

// The whole process stands still meanwhile, longer than a refusal takes to become final.
static void *stop_and_end(void *place_and_slots)
{
    const pid_t process = getpid();
    use(*(const uint32_t *)place_and_slots);
    await_questions(2);
    const pid_t child = fork();
    if (!child) {
        kill(process, SIGSTOP);
        usleep(1500000);
        kill(process, SIGCONT);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, NULL, 0), child);
    return end_slowly(place_and_slots);
}

// A cache gives only as its own requests end, one now and then. A lease that waits does not take its refusals for final.
static void test_a_cache_that_gives_slowly(void *(*end)(void *))
{
    const uint64_t round_ns = vmem__lease_round_ns;
    uint32_t given[5];
    pthread_t thread;
    vmem__lease_round_ns = 1000; // however slow the thread that gives is, a pause counts as next to nothing
    pool = k_pool(100);
    open_kv(0, 0);
    open_lease(0, 60000);
    given[0] = place;
    for (uint32_t i = 1; i <= 4; i++)
        given[i] = kv_request(40, 1); // 20 pages each
    got = false;
    CHECK_EQ(pthread_create(&thread, NULL, end, given), 0);
    char *a = get(90 * test_page);
    got = true;
    CHECK(a);
    pthread_join(thread, NULL);
    vmem__lease_round_ns = round_ns;
    put(a);
    vmem_kv_destroy(kv);
    close_all();
}

static void await_lacking(uint64_t pages)
{
    while (stats().lacking_bytes > pages * test_page)
        usleep(100);
}

// What is reserved stays with the lease before it is allocated, and comes as the others give.
static void test_a_reservation_comes_and_stays(void)
{
    pool = k_pool(200);
    open_kv(0, 0);
    open_lease(0, 60000);
    ERR(vmem_torch_reserve(place, 201 * test_page), EINVAL, "bytes");
    CHECK_EQ(stats().lacking_bytes, 0);
    const uint32_t kept = kv_request(ROWS, 1), mine = kv_request(ROWS, 5000); // 80 pages each
    OK(vmem_kv_free(kv, kept, 0));
    OK(vmem_torch_reserve(place, 100 * test_page));
    await_lacking(0); // 40 were free, and 60 of the kept ones came
    CHECK_EQ(stats().held_bytes, 0);
    uint32_t slot;
    OK(k_alloc(kv, ROWS, &slot));
    for (int i = 0; i < 3; i++) { // the cache asks, and the pool has nothing for it
        CHECK(kv_step(slot, ROWS));
        OK(vmem_kv_pool_wait(kv, 60000, NULL));
    }
    OK(vmem_kv_free(kv, slot, 0));
    char *a = get(60 * test_page), *b = get(40 * test_page);
    CHECK(a && b && !stats().waits);
    mark(a, 60, 1);
    OK(vmem_torch_reserve(place, 180 * test_page)); // with what it has
    await_lacking(64);                              // the cache keeps some pages for its next steps
    CHECK(stats().lacking_bytes >= 60 * test_page);
    OK(vmem_kv_free(kv, mine, 0));
    await_lacking(0);
    uint32_t other;
    struct vmem_torch_config cfg = {.size = sizeof cfg, .page_size = test_page};
    OK(vmem_torch_open(ctx, pool, &cfg, &other));
    ERR(vmem_torch_reserve(other, 21 * test_page), ENOMEM, "minimums");
    OK(vmem_torch_reserve(place, 0));
    OK(vmem_torch_reserve(other, 21 * test_page));
    OK(vmem_torch_close(other));
    CHECK_EQ(stats().lacking_bytes, 0);
    verify(a, 60, 1);
    kv_request(ROWS, 1); // what was not used is there for others
    put(a);
    put(b);
    vmem_kv_destroy(kv);
    close_all();
}

static void *end_a_request(void *place_and_slot)
{
    const uint32_t *const given = place_and_slot;
    use(given[0]);
    while (stats().waits < 5) // it goes on asking
        usleep(100);
    CHECK(stats().lacking_bytes >= 28 * test_page);
    OK(vmem_kv_free(kv, given[1], 0));
    return NULL;
}

// Another member gives nothing by itself, and does once its owner has seen what the lease lacks.
static void test_beside_a_reservation_an_allocation_waits_although_it_is_refused(void)
{
    pthread_t thread;
    pool = k_pool(100);
    open_kv(0, 0);
    open_lease(0, 60000);
    OK(vmem_torch_reserve(place, test_page));
    uint32_t given[] = {place, kv_request(ROWS, 1)}; // 80 pages, and 2 for the next steps
    CHECK(!pthread_create(&thread, NULL, end_a_request, given));
    void *a = get(48 * test_page);
    CHECK(a);
    CHECK(!pthread_join(thread, NULL));
    CHECK_EQ(stats().lacking_bytes, 0);
    CHECK(!get(101 * test_page)); // at once: nobody could give them
    put(a);
    vmem_kv_destroy(kv);
    close_all();
}

// Parked segments keep their pages until a neighbour asks, and no more segments go than it needs.
static void test_parked_pages_go_when_somebody_asks(void)
{
    pool = k_pool(120);
    open_kv(0, 0);
    open_lease(0, 60000);
    char *a = get(50 * test_page), *b = get(50 * test_page);
    mark(a, 50, 1);
    mark(b, 50, 1000);
    OK(vmem_torch_park(place, (uint64_t[]){at(a), at(b)}, 2, NULL));
    const long before = fakegpu_waits ? fakegpu_waits() : 0;
    const uint32_t first = kv_request(20, 1); // 10 pages of the 20 that nobody has
    OK(vmem_torch_unpark(place, 0, NULL));
    verify(a, 50, 1);
    verify(b, 50, 1000);
    CHECK_EQ(stats().waits, 0);
    CHECK(!fakegpu_waits || fakegpu_waits() == before); // nobody waited for a kernel
    OK(vmem_torch_park(place, (uint64_t[]){at(a), at(b)}, 2, NULL));
    const uint32_t second = kv_request(60, 500); // 30 more
    CHECK(backed(a, 50) != backed(b, 50));
    CHECK(!fakegpu_waits || fakegpu_waits() == before + 1);
    CHECK_EQ(stats().parked_segments, 2);
    ERR(vmem_torch_unpark(place, 0, NULL), ENOMEM, "missing");
    verify_rows(first, 20, 1);
    verify_rows(second, 60, 500);
    OK(vmem_kv_free(kv, second, 0));
    OK(vmem_torch_unpark(place, 60000, NULL));
    CHECK(backed(a, 50) && backed(b, 50));
    verify_rows(first, 20, 1);
    put(a);
    put(b);
    vmem_kv_destroy(kv);
    close_all();
}

// A second lease takes 30 pages more than the pool has free: those of the first one that are parked go, and the 40 that
// the cache keeps of an ended request stay. Ends both, and the cache.
static void take_what_is_parked(void *parked, uint32_t first)
{
    CHECK_EQ(k_stats(kv).held_pages, 40);
    while (k_pool_row(pool, "torch").could_give < 40 * test_page) // until a thread has looked, as the table says
        usleep(100);
    open_lease(0, 60000);
    void *taken = get(70 * test_page);
    CHECK(taken);
    CHECK_EQ(k_stats(kv).held_pages, 40);
    put(taken);
    OK(vmem_torch_close(place));
    use(first);
    ended = 0;
    CHECK(!backed(parked, 40));
    put(parked);
    vmem_kv_destroy(kv);
}

// Whichever of the two joined first.
static void test_parked_pages_go_before_what_a_cache_keeps(void)
{
    for (int cache_first = 0; cache_first < 2; cache_first++) {
        pool = k_pool(120);
        if (cache_first)
            open_kv(0, 0);
        open_lease(0, 60000);
        if (!cache_first)
            open_kv(0, 0);
        void *parked = get(40 * test_page);
        OK(vmem_kv_free(kv, kv_request(80, 1), 0));
        OK(park(parked));
        take_what_is_parked(parked, place);
        close_all();
    }
}

// So do those of a lease of another process, here of another pool with the same file.
static void test_parked_pages_of_others_go_first(void)
{
    char path[] = "/tmp/vmem-test-XXXXXX";
    const struct vmem_kv_pool_config cfg = {.size = sizeof cfg, .budget = 120 * test_page, .path = path};
    CHECK(close(mkstemp(path)) == 0);
    for (int i = 0; i < 5; i++) {
        vmem_kv_pool *pools[2];
        for (int n = 0; n < 2; n++)
            OK(vmem_kv_pool_create(&cfg, &pools[n]));
        pool = pools[1];
        open_lease(0, 60000);
        void *parked = get(40 * test_page);
        pool = pools[0];
        open_kv(0, 0);
        OK(vmem_kv_free(kv, kv_request(80, 1), 0));
        OK(park(parked));
        take_what_is_parked(parked, place);
        vmem_kv_pool_destroy(pools[1]);
        close_all();
    }
    CHECK(access(path, F_OK));
}

// Segments whose contents matter: the caller learns which of them went, and the others are as they were.
static void test_only_what_went_is_lost(void)
{
    uint8_t lost[3] = {7, 7, 7};
    uint64_t missing = 7;
    pool = k_pool(120);
    open_kv(0, 0);
    open_lease(0, 60000);
    char *a = get(50 * test_page), *b = get(50 * test_page);
    char *idle = get(5 * test_page);
    const uint64_t both[] = {at(a), at(b), at(a) + test_page};
    mark(a, 50, 1);
    mark(b, 50, 1000);
    OK(vmem_torch_unpark_segments(place, both, 2, UINT64_MAX, 0, &missing, lost)); // none is parked
    CHECK(!lost[0] && !lost[1] && lost[2] == 7 && !missing);
    ERR(vmem_torch_unpark_segments(place, both, 3, UINT64_MAX, 0, NULL, lost), EINVAL, "segments[2]");
    ERR(vmem_torch_unpark_segments(place, NULL, 1, UINT64_MAX, 0, NULL, lost), EINVAL, "segments");
    OK(vmem_torch_unpark_segments(place, NULL, 0, UINT64_MAX, 0, NULL, NULL));
    OK(vmem_torch_park(place, both, 2, NULL));
    OK(park(idle));
    OK(vmem_torch_unpark_segments(place, both, 2, UINT64_MAX, 0, NULL, lost)); // nobody asked
    CHECK(!lost[0] && !lost[1]);
    CHECK_EQ(stats().parked_segments, 1);
    verify(a, 50, 1);
    verify(b, 50, 1000);
    OK(vmem_torch_park(place, both, 2, NULL));
    const uint32_t request = kv_request(60, 500); // 30 pages of which 15 are free: one of the segments goes
    CHECK(backed(a, 50) != backed(b, 50));
    const bool went = backed(a, 50); // whether it is b
    ERR(vmem_torch_unpark_segments(place, both, 2, UINT64_MAX, 0, &missing, lost), ENOMEM, "missing");
    CHECK(missing);
    CHECK_EQ(stats().parked_segments, 3); // as before
    lost[0] = lost[1] = 7;
    OK(vmem_torch_unpark_segments(place, &both[!went], 1, UINT64_MAX, 0, NULL, &lost[!went])); // the one that stayed
    CHECK(!lost[!went] && lost[went] == 7);
    verify(went ? a : b, 50, went ? 1 : 1000);
    OK(vmem_kv_free(kv, request, 0));
    OK(vmem_torch_unpark_segments(place, both, 2, UINT64_MAX, 60000, &missing, lost));
    CHECK(lost[went] == 1 && lost[!went] == 0);
    verify(went ? a : b, 50, went ? 1 : 1000);
    mark(went ? b : a, 50, 3000);
    OK(vmem_torch_unpark_segments(place, both, 2, UINT64_MAX, 0, NULL, lost)); // told once
    CHECK(!lost[0] && !lost[1]);
    verify(went ? b : a, 50, 3000);
    put(a);
    put(b);
    put(idle);
    vmem_kv_destroy(kv);
    close_all();
}

// Backs up to three segments, `most` bytes at a time.
static int unpark_in_portions(const uint64_t *segments, size_t n, uint64_t most)
{
    uint64_t left[3];
    uint8_t lost[3];
    memcpy(left, segments, n * sizeof *left);
    for (int rc; n;) {
        if ((rc = vmem_torch_unpark_segments(place, left, n, most, 0, NULL, lost)))
            return rc;
        const size_t before = n;
        n = 0;
        for (size_t i = 0; i < before; i++)
            if (lost[i] == VMEM_TORCH_CLAIMED)
                left[n++] = left[i];
        CHECK(n < before);
    }
    return 0;
}

// Backs the first of them, and claims the others. What others give comes after a while, and the pool remembers a refusal
// for a while.
static void begin_unpark(const uint64_t *segments, size_t n, uint8_t *lost)
{
    for (int tries = 0; vmem_torch_unpark_segments(place, segments, n, 1, 60000, NULL, lost); tries++)
        CHECK(tries < 1000);
}

// Opens a lease with three segments of 30 pages, which are parked and have given their memory.
static void park_three(char **s, uint64_t *all)
{
    open_lease(0, 1);
    for (int i = 0; i < 3; i++) {
        s[i] = get(30 * test_page);
        all[i] = at(s[i]);
    }
    OK(vmem_torch_park(place, all, 3, NULL));
    OK(trim());
}

// A part comes at once, and nobody gets the memory of the others before their turn.
static void test_an_unpark_in_portions_has_claimed_the_rest(void)
{
    uint8_t lost[3];
    pool = k_pool(100);
    open_kv(0, 0);
    char *s[3];
    uint64_t all[3];
    park_three(s, all);
    OK(vmem_torch_unpark_segments(place, all, 3, 40 * test_page, 0, NULL, lost));
    const int first = lost[0] == 1 ? 0 : 2, last = 2 - first; // by their addresses
    CHECK(lost[first] == 1 && lost[1] == VMEM_TORCH_CLAIMED && lost[last] == VMEM_TORCH_CLAIMED);
    CHECK_EQ(stats().parked_segments, 2);
    CHECK_EQ(stats().held_bytes, 30 * test_page);
    mark(s[first], 30, 1);
    char *other = get(4 * test_page);
    CHECK(other && !get(20 * test_page)); // nor does this lease get it for another segment
    uint32_t slot;
    OK(k_alloc(kv, ROWS, &slot));
    CHECK_EQ(kv_step(slot, 60), -ENOMEM); // 30 pages, and 6 are free
    OK(vmem_kv_pool_wait(kv, 60000, NULL));
    CHECK_EQ(kv_step(slot, 60), -ENOMEM);
    OK(vmem_torch_unpark_segments(place, all, 3, 1, 0, NULL, lost));
    CHECK(lost[first] == 0 && lost[1] == 1 && lost[last] == VMEM_TORCH_CLAIMED);
    OK(vmem_torch_unpark_segments(place, &all[last], 1, 1, 0, NULL, lost));
    CHECK(lost[0] == 1 && stats().parked_segments == 0);
    CHECK(backed(s[1], 30) && backed(s[last], 30));
    verify(s[first], 30, 1);
    put(other);
    // Whoever has failed to use what came parks it, and the claim is over.
    OK(vmem_kv_free(kv, slot, 0)); // what it waits for could come now
    OK(k_alloc(kv, ROWS, &slot));
    OK(vmem_torch_park(place, all, 3, NULL));
    OK(trim());
    begin_unpark(all, 3, lost);
    OK(vmem_torch_park(place, &all[first], 1, NULL));
    CHECK_EQ(stats().parked_segments, 3);
    uint32_t answer = 0;
    while (kv_step(slot, 140) && answer != VMEM_KV_REFUSED) // 70 pages
        OK(vmem_kv_pool_wait(kv, 60000, &answer));
    CHECK(answer != VMEM_KV_REFUSED);
    ERR(vmem_torch_unpark_segments(place, all, 3, 1, 0, NULL, lost), ENOMEM, "missing"); // one would fit
    CHECK_EQ(stats().held_bytes, backed(s[first], 30) ? 30 * test_page : 0);
    OK(vmem_kv_free(kv, slot, 0));
    // A segment that PyTorch frees meanwhile was claimed in vain.
    OK(trim());
    begin_unpark(all, 3, lost);
    put(s[last]);
    const uint64_t left[] = {all[1], all[first]};
    OK(vmem_torch_unpark_segments(place, left, 1, 1, 0, NULL, lost));
    CHECK_EQ(stats().held_bytes, 60 * test_page);
    OK(vmem_torch_park(place, left, 2, NULL));
    OK(trim());
    OK(vmem_torch_unpark_segments(place, left, 2, 1, 0, NULL, lost));
    OK(vmem_torch_close(place)); // nor does a lease that ends keep it
    kv_request(130, 1);          // 65 pages
    vmem_kv_destroy(kv);
    put(s[1]);
    put(s[first]);
    CHECK_EQ(ended, 1);
    CHECK_EQ(k_pool_info(pool).members, 0);
    vmem_kv_pool_destroy(pool);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// What was claimed for a call to come is there for others once a call has failed.
static void test_an_unpark_that_fails_claims_nothing(void)
{
    uint8_t lost[3];
    pool = k_pool(100);
    open_kv(0, 0);
    char *s[3];
    uint64_t all[3];
    park_three(s, all);
    const uint32_t slot = kv_request(60, 1); // 30 pages
    begin_unpark(all, 2, lost);
    ERR(vmem_torch_unpark_segments(place, all, 3, 1, 0, NULL, lost), ENOMEM, "missing");
    CHECK_EQ(stats().parked_segments, 2);
    for (int tries = 0; kv_step(slot, 120); tries++) { // the pool keeps it for a while for who lacked some
        CHECK(tries < 5000);
        usleep(1000);
    }
    for (int i = 0; i < 3; i++)
        put(s[i]);
    vmem_kv_destroy(kv);
    close_all();
}

// On a device that has too little for all of it, no part comes: of two that wake, each could hold half.
static void test_no_portion_comes_from_a_device_without_memory_for_all(void)
{
    uint8_t lost[3];
    pool = k_pool(100);
    char *s[3];
    uint64_t all[3];
    park_three(s, all);
    OK(vmem_set_budget(ctx, 80 * test_page));
    ERR(vmem_torch_unpark_segments(place, all, 3, 1, 0, NULL, lost), ENOMEM, "memory");
    CHECK_EQ(stats().parked_segments, 3);
    CHECK_EQ(stats().held_bytes, 0);
    OK(vmem_set_budget(ctx, 0));
    // Nor does a part that could come before keep what it had claimed.
    begin_unpark(all, 3, lost);
    OK(vmem_set_budget(ctx, 35 * test_page));
    ERR(vmem_torch_unpark_segments(place, all, 3, 1, 0, NULL, lost), ENOMEM, "memory");
    OK(vmem_set_budget(ctx, 0));
    CHECK_EQ(stats().parked_segments, 2);
    char *other;
    while (!(other = get(60 * test_page)))
        CHECK(stats().refused < 5000);
    put(other);
    OK(unpark_in_portions(all, 3, 1));
    CHECK(backed(s[0], 30) && backed(s[1], 30) && backed(s[2], 30));
    for (int i = 0; i < 3; i++)
        put(s[i]);
    close_all();
}

// Device memory that no page uses: of arenas, or populated.
static uint64_t unused_memory(void)
{
    vmem__lock(ctx);
    const uint64_t bytes = ctx->committed - ctx->created;
    vmem__unlock(ctx);
    return bytes;
}

// True if the pages hold what mark(..., value) wrote to other addresses, each once.
static bool shows(const char *p, uint64_t pages, uint64_t value)
{
    bool seen[96] = {0}, all = true;
    for (uint64_t i = 0; i < pages && all; i++) {
        const uint64_t word = get_word(ctx, at(p) + (i + 1) * test_page - 8);
        all = word >= value && word < value + pages && !seen[word - value];
        seen[all ? word - value : 0] = true;
    }
    return all;
}

// One lease gives another of its context the same device memory, contents included: none goes back to the device.
static void test_leases_hand_their_memory_over(void)
{
    const uint64_t pages = 96;
    pool = k_pool(pages + 4);
    open_lease(0, 60000);
    const uint32_t first = place;
    open_lease(0, 60000);
    const uint32_t second = use(first);
    char *a = get(pages * test_page), *b = NULL;
    // On a busy machine, a question may lapse, and its memory go back, before the answer has come.
    int there = 0, back = 0;
    for (int turn = 0; turn < 30 && (there < 3 || back < 3); turn++) {
        mark(a, pages, 1000);
        OK(park(a));
        use(second);
        b = get(pages * test_page);
        CHECK(b);
        there += shows(b, pages, 1000);
        mark(b, pages, 5000);
        put(b);
        use(first);
        OK(vmem_torch_unpark(place, 60000, NULL));
        back += shows(a, pages, 5000);
    }
    CHECK(there >= 3 && back >= 3);
    // With nobody who misses any, what is freed goes back to the device.
    put(a);
    OK(trim());
    CHECK(unused_memory() < 32 * MIB);
    OK(vmem_torch_close(first));
    use(second);
    ended = 0;
    close_all();
}

// Memory that the pool takes from a lease with small allocations is the device's, although its neighbours stay.
static void test_segments_between_others_go_back(void)
{
    const uint64_t bytes = UINT64_C(6) << 20, pages = bytes / test_page; // of a segment
    char *segments[16];
    pool = k_pool(17 * pages);
    open_lease_with(0, 1, VMEM_TORCH_SMALL);
    for (int i = 0; i < 16; i++)
        CHECK((segments[i] = get(bytes)));
    for (int i = 0; i < 16; i += 2)
        put(segments[i]);
    OK(trim());
    while (stats().held_bytes > 8 * bytes)
        usleep(1000);
    OK(trim());
    CHECK_EQ(unused_memory(), 0);
    for (int i = 1; i < 16; i += 2)
        put(segments[i]);
    close_all();
}

// Nobody comes for the memory that another one has freed for it: it goes back to the device.
static void test_memory_that_nobody_takes_goes_back(void)
{
    const uint64_t before = vmem__pool_ask_ns;
    vmem__pool_ask_ns = 20000000;
    pool = k_pool(100);
    open_kv(0, 0);
    open_lease(0, 1);
    char *a = get(90 * test_page);
    CHECK(a);
    OK(park(a));
    uint32_t slot;
    OK(k_alloc(kv, ROWS, &slot));
    CHECK_EQ(kv_step(slot, ROWS), -ENOMEM); // asks for 80 pages, and never looks again
    for (int ms = 0; stats().held_bytes || unused_memory() >= 32 * MIB; ms++) {
        if (ms % 1000 ==
            999) { // on a busy machine, the question lapsed before the lease gave: the lease has the memory
            OK(vmem_torch_unpark(place, 60000, NULL));
            OK(park(a));
            CHECK_EQ(kv_step(slot, ROWS), -ENOMEM);
        }
        usleep(1000);
    }
    CHECK_EQ(k_stats(kv).held_pages, 0);
    vmem__pool_ask_ns = before;
    put(a);
    vmem_kv_destroy(kv);
    close_all();
}

// The pool's budget exceeds what the context can create: nothing of an allocation that is refused stays.
static void test_a_device_with_less_than_the_budget(void)
{
    pool = k_pool(100);
    open_lease(0, 1);
    char *a = get(15 * test_page);
    OK(vmem_set_budget(ctx, 20 * test_page));
    CHECK(a && !get(12 * test_page));
    CHECK(shortage().missing_pages && stats().short_bytes == shortage().missing_pages * test_page);
    CHECK_EQ(stats().held_bytes, 15 * test_page);
    OK(vmem_set_budget(ctx, 0));
    put(a);
    close_all();
}

// A closed lease lives until PyTorch has given all back, and gives nothing more.
static void test_close_with_segments(void)
{
    pool = k_pool(100);
    open_lease(0, 1);
    char *a = get(3 * test_page), *b = get(40 * test_page);
    mark(a, 3, 7);
    OK(park(b));
    OK(vmem_torch_close(place));
    CHECK_EQ(ended, 0);
    CHECK(!get(test_page));
    ERR(vmem_torch_unpark(place, 0, NULL), EINVAL, "closed");
    ERR(park(a), EINVAL, "closed");
    ERR(vmem_torch_close(place), EINVAL, "closed");
    verify(a, 3, 7);
    vmem_kv_pool_destroy(pool); // it stays while it has a member
    put(b);
    verify(a, 3, 7);
    CHECK_EQ(ended, 0);
    put(a);
    CHECK_EQ(ended, 1);
    ERR(vmem_torch_close(place), EINVAL, "no lease");
    CHECK_EQ(test_stats(ctx).created, 0);
    CHECK_EQ(test_stats(ctx).reserved, 0);
}

static void test_a_child_gets_nothing(void)
{
    pool = k_pool(100);
    open_lease(0, 1);
    char *a = get(3 * test_page);
    mark(a, 3, 7);
    const pid_t child = fork();
    if (!child) {
        char *b = get(test_page);
        put(a);
        const int rc = vmem_torch_close(place) == -EPERM && vmem_torch_unpark(place, 0, NULL) == -EPERM;
        _exit(!b && rc ? 0 : 1);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    verify(a, 3, 7);
    put(a);
    close_all();
}

// Kernels may use what PyTorch frees or the caller parks: it waits for them, and while a graph is captured it cannot.
static void test_kernels_are_waited_for(void)
{
    if (!fakegpu_waits)
        return;
    pool = k_pool(100);
    open_lease(0, 1);
    char *a = get(3 * test_page), *b = get(2 * test_page);
    const long before = fakegpu_waits();
    OK(park(a));
    CHECK_EQ(fakegpu_waits(), before);
    OK(trim());
    CHECK_EQ(fakegpu_waits(), before + 1);
    put(b);
    CHECK_EQ(fakegpu_waits(), before + 2);
    put(a); // its pages have gone: nothing is there that a kernel could use
    CHECK_EQ(fakegpu_waits(), before + 2);
    a = get(3 * test_page);
    b = get(2 * test_page);
    mark(a, 3, 7);
    mark(b, 2, 7);
    fakegpu_capture(1);
    OK(park(a));
    ERR(trim(), EBUSY, "graph");
    CHECK(backed(a, 3));
    OK(vmem_torch_unpark(place, 0, NULL));
    put(b);
    verify(a, 3, 7);
    CHECK(backed(b, 2)); // a kernel may still use it
    char *c = get(test_page);
    CHECK(c && c != b);
    fakegpu_capture(0);
    put(c); // its place comes back with the next call that looks
    OK(trim());
    CHECK(!backed(b, 2));
    CHECK_EQ(stats().bytes, 3 * test_page);
    put(a);
    b = get(2 * test_page);
    fakegpu_capture(1);
    put(b);
    OK(vmem_torch_close(place));
    CHECK_EQ(ended, 0); // its last segment waits for the capture's end, and nobody calls any more
    ERR(vmem_torch_close(place), EINVAL, "closed");
    fakegpu_capture(0);
    vmem_kv_pool_destroy(pool);
    pool = k_pool(100);
    struct vmem_torch_config cfg = {.size = sizeof cfg, .page_size = test_page};
    uint32_t other;
    OK(vmem_torch_open(ctx, pool, &cfg, &other));
    CHECK_EQ(ended, 1);
    OK(vmem_torch_close(other));
    vmem_kv_pool_destroy(pool);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// ---- every fault point --------------------------------------------------------------------------------------------

static char *held[3];

static int do_alloc(void)
{
    char *a = get(5 * test_page);
    if (!a)
        return -ENOMEM;
    mark(a, 5, 40);
    put(a);
    return 0;
}
static int do_large_alloc(void)
{
    char *a = get(40 * MIB);
    if (!a)
        return -ENOMEM;
    put(a);
    return 0;
}
static int do_park(void) { return vmem_torch_park(place, (uint64_t[]){at(held[1]), at(held[2])}, 2, NULL); }
static int do_unpark(void) { return vmem_torch_unpark(place, 0, NULL); }
// What came before the one that failed is parked again, as whoever copies into it does.
static int do_unpark_in_portions(void)
{
    const uint64_t both[] = {at(held[1]), at(held[2])};
    const int rc = unpark_in_portions(both, 2, 1);
    if (rc) {
        char text[VMEM__TEXT];
        vmem__keep_error(text);
        do_park();
        vmem__error(0, "%s", text);
    }
    return rc;
}
static int do_free(void)
{
    char *a = get(4 * test_page);
    checked_fail(0);
    if (a)
        put(a);
    return a ? 0 : -ENOMEM;
}
// Another lease takes what this one has parked.
static uint64_t pool_pages;
static uint32_t taker;
static int do_take(void)
{
    const uint32_t mine = use(taker);
    char *a = get((pool_pages - 5) * test_page);
    if (a) {
        CHECK(backed(a, pool_pages - 5));
        checked_fail(0);
        put(a);
    }
    use(mine);
    return a ? 0 : -ENOMEM;
}
static int do_open(void)
{
    struct vmem_torch_config cfg = {.size = sizeof cfg, .page_size = test_page};
    uint32_t other;
    int rc = vmem_torch_open(ctx, pool, &cfg, &other);
    if (rc)
        return rc;
    checked_fail(0);
    return vmem_torch_close(other);
}

static const struct {
    const char *name;
    int (*call)(void);
    bool parked; // at its start
} calls[] = {{"alloc", do_alloc, 0}, {"a segment of two slots", do_large_alloc, 0},
             {"park", do_park, 0},   {"unpark", do_unpark, 1},
             {"free", do_free, 0},   {"trim", trim, 0},
             {"trim", trim, 1},      {"open", do_open, 0},
             {"take", do_take, 1},   {"unpark in portions", do_unpark_in_portions, 1}};

// The n-th fault point of the call fails. Nothing else changes, and the call works when it is repeated.
static bool with_fault(size_t i, unsigned long n, void (*fail)(unsigned long), bool (*failed)(void))
{
    const bool takes = calls[i].call == do_take;
    pool_pages = 100 + (takes ? 0 : 80 * MIB / test_page);
    pool = k_pool(pool_pages);
    open_lease(0, takes ? 60000 : 1);
    if (takes) {
        taker = place;
        open_lease(0, 60000);
    }
    for (int k = 0; k < 3; k++) {
        held[k] = get((size_t)(2 + k) * test_page);
        mark(held[k], 2 + (uint64_t)k, 100 * (uint64_t)k);
    }
    if (calls[i].parked)
        OK(do_park());
    const bool unparks = calls[i].call == do_unpark || calls[i].call == do_unpark_in_portions;
    if (unparks)
        OK(trim());
    fail(n);
    int rc = calls[i].call();
    const bool hit = failed();
    fail(0);
    if (rc && !hit)
        FAIL("%s: %s", calls[i].name, vmem_last_error());
    verify(held[0], 2, 0);
    if (!calls[i].parked) {
        verify(held[1], 3, 100);
        verify(held[2], 4, 200);
    } else if (unparks && rc) {
        CHECK_EQ(stats().parked_segments, 2); // all or nothing
    }
    if (rc && takes)
        OK(trim()); // pages whose unmapping has failed stay until then
    if (rc)
        OK(calls[i].call());
    OK(do_park());
    OK(vmem_torch_unpark(place, takes ? 60000 : 0, NULL));
    CHECK(backed(held[1], 3) && backed(held[2], 4));
    CHECK_EQ(stats().held_bytes, 9 * test_page);
    mark(held[2], 4, 1);
    verify(held[0], 2, 0);
    CHECK_EQ(stats().segments, 3);
    for (int k = 0; k < 3; k++)
        put(held[k]);
    if (takes) {
        OK(vmem_torch_close(taker));
        ended = 0;
    }
    close_all();
    return hit;
}

static void each_fault(void (*fail)(unsigned long), bool (*failed)(void))
{
    for (size_t i = 0; i < COUNT(calls); i++)
        for (unsigned long n = 1; with_fault(i, n, fail, failed); n++)
            CHECK(n < 500);
}

// Closing and freeing with every fault point failing: what could not be given back goes with the lease.
static void test_the_end_cannot_fail(void)
{
    for (unsigned long n = 1; n < 30; n++) {
        pool = k_pool(100);
        open_lease(0, 1);
        char *a = get(5 * test_page), *b = get(3 * test_page);
        checked_fail(n);
        put(a);
        checked_fail(0);
        CHECK_EQ(stats().segments, 1); // it tries twice
        verify(b, 0, 0);
        OK(park(b));
        put(b);
        close_all();
    }
}

static long fake_before;
static void fail_driver(unsigned long n)
{
    fakegpu_fail((long)n);
    if (n)
        fake_before = fakegpu_calls() + (long)n;
}
static void fail_driver_twice(unsigned long n)
{
    fail_driver(n);
    if (n)
        fakegpu_fail_many((long)n, 2);
}
static bool driver_failed(void) { return fakegpu_calls() >= fake_before; }

// ---- from threads -------------------------------------------------------------------------------------------------

#define THREADS 4
#define MINE 12
static atomic_bool stop;
static unsigned operations = 10000;

static uint32_t lease_of[THREADS];

// Each thread has segments of its own, and knows what is in them.
static void *lease_thread(void *arg)
{
    uint64_t seed = 77 + (uintptr_t)arg;
    place = lease_of[(uintptr_t)arg];
    struct {
        char *addr;
        uint64_t pages, word;
        bool live; // not parked by this thread since it was last unparked
    } s[MINE] = {0};
    uint64_t done[4] = {0};
    for (unsigned n = 0; n < operations / THREADS; n++) {
        const uint64_t k = rnd(&seed) % MINE, what = rnd(&seed) % 8;
        if (what < 3 && !s[k].addr) {
            s[k].pages = 1 + rnd(&seed) % 12;
            s[k].addr = get(s[k].pages * test_page);
            s[k].live = true;
            s[k].word = rnd(&seed);
            if (s[k].addr)
                mark(s[k].addr, s[k].pages, s[k].word);
            done[0] += s[k].addr != NULL;
        } else if (what == 3 && s[k].addr) {
            if (s[k].live)
                verify(s[k].addr, s[k].pages, s[k].word);
            put(s[k].addr);
            s[k].addr = NULL;
            done[1]++;
        } else if (what < 6) {
            uint64_t idle[MINE];
            size_t m = 0;
            for (uint64_t i = k; i < MINE; i += 3) {
                if (!s[i].addr)
                    continue;
                if (s[i].live)
                    verify(s[i].addr, s[i].pages, s[i].word);
                idle[m++] = at(s[i].addr);
            }
            const int rc = vmem_torch_park(place, idle, m, NULL);
            CHECK_EQ(rc, 0);
            for (uint64_t i = k; i < MINE && !rc; i += 3)
                s[i].live = false;
            done[2] += !rc;
        } else {
            const int rc = vmem_torch_unpark(place, 1, NULL);
            CHECK(!rc || rc == -ENOMEM);
            for (uint64_t i = 0; i < MINE && !rc; i++) {
                if (!s[i].addr || s[i].live)
                    continue;
                s[i].live = true;
                s[i].word = rnd(&seed);
                mark(s[i].addr, s[i].pages, s[i].word);
            }
            done[3] += !rc;
        }
        for (uint64_t i = 0; i < MINE; i++)
            if (s[i].addr && s[i].live && i % 4 == n % 4)
                verify(s[i].addr, s[i].pages, s[i].word);
    }
    for (uint64_t i = 0; i < MINE; i++) {
        if (!s[i].addr)
            continue;
        if (s[i].live)
            verify(s[i].addr, s[i].pages, s[i].word);
        put(s[i].addr);
    }
    for (int i = 0; i < 4; i++)
        if (done[i] < operations / 500)
            FAIL("of operation %d, only %" PRIu64 " of %u succeeded", i, done[i], operations / THREADS);
    return NULL;
}

static void *kv_thread(void *arg)
{
    uint64_t seed = 5, word[SLOTS] = {0};
    int32_t rows[SLOTS] = {0};
    bool taken[SLOTS] = {0};
    (void)arg;
    while (!stop) {
        uint32_t k = (uint32_t)(rnd(&seed) % SLOTS);
        if (taken[k] && rnd(&seed) % 6 == 0) {
            verify_rows(k, rows[k], word[k]);
            OK(vmem_kv_free(kv, k, 0));
            taken[k] = false;
        } else if (!taken[k] && rnd(&seed) % 2) {
            OK(k_alloc(kv, 0, &k));
            taken[k] = true;
            rows[k] = 0;
            word[k] = rnd(&seed);
        } else if (taken[k] && rows[k] < ROWS) {
            int32_t to = rows[k] + 1 + (int32_t)(rnd(&seed) % 40);
            to = to < ROWS ? to : ROWS;
            if (!kv_step(k, to)) {
                write_rows(k, rows[k], to, word[k]);
                rows[k] = to;
            }
        }
        for (uint32_t s = 0; s < SLOTS; s++)
            if (taken[s])
                verify_rows(s, rows[s], word[s]);
    }
    for (uint32_t s = 0; s < SLOTS; s++)
        if (taken[s])
            OK(vmem_kv_free(kv, s, 0));
    return NULL;
}

// Never more device memory than the members' rows say. Rows change under the pool's lock, and memory comes after budget.
static void *watch_thread(void *arg)
{
    uint64_t seed = 3, most = 0;
    // Arenas that are neither pages nor populated page by page have unused parts.
    const uint64_t slack = test_cpu() ? 0 : !strcmp(test_backend, "cuda") ? 64 * MIB : 256 * MIB;
    while (!stop) {
        uint64_t rows = 0;
        pthread_mutex_lock(&pool->lock);
        for (const struct vmem__member *m = pool->members; m; m = m->next)
            rows += m->entry.has;
        vmem__lock(ctx);
        const uint64_t committed = ctx->committed;
        vmem__unlock(ctx);
        pthread_mutex_unlock(&pool->lock);
        if (committed > rows + slack)
            FAIL("%" PRIu64 " bytes of device memory, and rows of %" PRIu64, committed, rows);
        CHECK(rows <= 300 * test_page);
        most = committed > most ? committed : most;
        vmem__pool_ask_ns = rnd(&seed) % 4 ? 250000000 : 0; // some questions lapse at once
        usleep(50);
    }
    CHECK(most > 100 * test_page);
    return arg;
}

// Two leases and a cache exchange memory.
static void test_threads(void)
{
    pthread_t threads[THREADS], server, watch;
    const uint64_t ask_ns = vmem__pool_ask_ns;
    pool = k_pool(300);
    open_kv(40, 200);
    open_lease(0, 1);
    const uint32_t first = place;
    open_lease(0, 1);
    for (uint32_t i = 0; i < THREADS; i++)
        lease_of[i] = i % 2 ? place : first;
    stop = false;
    CHECK_EQ(pthread_create(&server, NULL, kv_thread, NULL), 0);
    CHECK_EQ(pthread_create(&watch, NULL, watch_thread, NULL), 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, lease_thread, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    stop = true;
    CHECK_EQ(pthread_join(server, NULL), 0);
    CHECK_EQ(pthread_join(watch, NULL), 0);
    vmem__pool_ask_ns = ask_ns;
    for (uint32_t i = 0; i < 2; i++) {
        use(lease_of[i]);
        const struct vmem_torch_stats st = stats();
        CHECK_EQ(st.segments, 0);
        CHECK_EQ(st.parked_segments, 0);
        CHECK_EQ(st.bytes + st.parked_bytes + st.held_bytes, 0);
        CHECK_EQ(st.allocs, st.frees);
        CHECK_EQ(st.strangers, 0);
        CHECK(st.parks && st.unparks);
    }
    vmem_kv_destroy(kv);
    OK(vmem_torch_close(lease_of[0]));
    ended = 0;
    close_all();
    CHECK_EQ(ctx->expected, 0);
    CHECK_EQ(ctx->expected_back, 0);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (getenv("VMEM_TEST_OPERATIONS"))
        operations = 100 * (unsigned)atoi(getenv("VMEM_TEST_OPERATIONS"));
    else if (!test_cpu()) // each takes a call to the driver
        operations = 2000;
#ifdef __SANITIZE_THREAD__
    operations = 1500;
#endif
    vmem__pool_silent_ns = UINT64_MAX; // a lease gives first, however slow the machine is
    ctx = test_context(0);
    test_arguments();
    test_addresses_stay();
    test_large_segments();
    test_kept_pages_come_and_a_request_keeps_its_own();
    test_a_cache_that_gives_slowly(end_slowly);
    if (test_cpu()) // and so that its process stands still for a while
        test_a_cache_that_gives_slowly(stop_and_end);
    test_a_reservation_comes_and_stays();
    test_beside_a_reservation_an_allocation_waits_although_it_is_refused();
    test_parked_pages_go_when_somebody_asks();
    test_parked_pages_go_before_what_a_cache_keeps();
    test_parked_pages_of_others_go_first();
    test_only_what_went_is_lost();
    test_an_unpark_in_portions_has_claimed_the_rest();
    test_an_unpark_that_fails_claims_nothing();
    test_no_portion_comes_from_a_device_without_memory_for_all();
    test_leases_hand_their_memory_over();
    test_memory_that_nobody_takes_goes_back();
    test_a_device_with_less_than_the_budget();
    test_close_with_segments();
    test_a_child_gets_nothing();
    test_kernels_are_waited_for();
    test_threads();
    if (fakegpu_fail) {
        each_fault(fail_driver, driver_failed);
        for (unsigned long n = 1; with_fault(COUNT(calls) - 1, n, fail_driver_twice, driver_failed); n++)
            CHECK(n < 500);
    }
    vmem_context_destroy(ctx);
    ctx = test_context(0); // its allocations are small from then on
    test_segments_between_others_go_back();
    vmem_context_destroy(ctx);
    OK(checked_context(test_backend, 0, false, &ctx));
    each_fault(checked_fail, checked_failed);
    test_the_end_cannot_fail();
    vmem_context_destroy(ctx);
    return 0;
}
