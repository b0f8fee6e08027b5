// Good and bad input to every call: no crash, no leak, and a call that fails has changed nothing. Then the same input,
// which another thread changes while a call reads it: the call must do what it did with an input that a single reading
// could have found; each of these is first tried alone, from the same state.
//
// A quarter of the inputs has words replaced by values from the edges. The other thread flips single bytes, so that a word
// whose bytes are read one by one has no third value. CALLS sets how many calls race, SEED the inputs.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { BLOCKS = 6, GRANULES = BLOCKS * 32, PAGES = 4, ELEMENTS = 3, FLIPS = 3, RACES = 24 };
enum { QUERY, CREATE, RELEASE, MAP, UNMAP };

static struct uvm u;
static uint64_t rng;

// What a call reads
static struct input {
    union {
        uint8_t bytes[256];
        struct uvm_vmem_query query;
        struct uvm_vmem_create create;
        struct uvm_vmem_release release;
        struct uvm_vmem_batch batch;
    };
    union {
        struct uvm_vmem_op ops[ELEMENTS + 1];
        __u64 handles[ELEMENTS + 1];
    };
} in __attribute__((aligned(256)));

static unsigned kind;
static size_t size; // of the structure
static unsigned long command;
static uint64_t counts[UNMAP + 1][2]; // calls that failed, and that did what they were asked

// ---- the state that every call begins with ----------------------------------------------------------------

static const struct {
    uint64_t size, at;
    uint32_t flags;
} layout[PAGES] = {{KB(64), 0, 0}, {KB(256), KB(256), 0}, {MB(2), BLOCK, UVM_VMEM_MAP_64K}, {MB(2), 2 * BLOCK, 0}};

static uint64_t pages[PAGES]; // handles, alike but for their first byte

static void pages_new(void)
{
    uint64_t last = 0;

    for (unsigned i = 0; i < PAGES; i++)
        vm_release_one(&u, pages[i]); // if it is there
    do {
        for (unsigned i = 0; i < PAGES; i++) {
            if (last)
                CHECK_EQ(vm_release_one(&u, pages[i]), NV_OK);
            CHECK_EQ(vm_create(&u, layout[i].size, 1, &pages[i]), NV_OK);
        }
        last = pages[PAGES - 1];
    } while (pages[0] >> 8 != last >> 8);
}

// Blocks 0 to 2 have pages, by a 2 MiB entry in the last of them; 4 has a sparse mapping of UVM's own; 3 and 5 are empty.
static void reset(void)
{
    struct uvm_vmem_op ops[PAGES];

    CHECK_EQ(uvm_free_range(&u, BASE, BLOCKS * BLOCK), NV_OK);
    CHECK_EQ(uvm_create_external(&u, BASE, BLOCKS * BLOCK), NV_OK);
    CHECK_EQ(uvm_map_sparse(&u, 0, BASE + 4 * BLOCK, BLOCK), NV_OK);
    for (unsigned i = 0; i < PAGES; i++)
        ops[i] = vm_op(BASE + layout[i].at, layout[i].size, pages[i], 0, layout[i].flags);
    if (vm_map_ops(&u, 0, ops, PAGES, NULL) == NV_OK)
        return;
    pages_new(); // a call released some
    for (unsigned i = 0; i < PAGES; i++)
        ops[i].handle = pages[i];
    CHECK_EQ(vm_map_ops(&u, 0, ops, PAGES, NULL), NV_OK);
}

// ---- inputs -----------------------------------------------------------------------------------------------

// A byte of the input, and what it may become: values that make another good input, and some that make a bad one
struct byte {
    uint16_t at;
    uint8_t values[4];
};

#define FIELD(type, name, byte, ...)                          \
    {                                                         \
        offsetof(struct type, name) + (byte), { __VA_ARGS__ } \
    }
#define SIZE(type)                                                                                         \
    FIELD(type, size, 0, sizeof(struct type) - 8, sizeof(struct type) + 8, sizeof(struct type) + 64, 255), \
        FIELD(type, size, 1, 16, 17, 32, 255)

static const struct byte query_bytes[] = {
    SIZE(uvm_vmem_query),
    FIELD(uvm_vmem_query, gpu_uuid, 5, 0, 1, 2, 255),
    FIELD(uvm_vmem_query, flags, 0, 0, 1, 2, 255),
    FIELD(uvm_vmem_query, reserved, 39, 0, 1, 2, 255),
};
static const struct byte create_bytes[] = {
    SIZE(uvm_vmem_create),
    FIELD(uvm_vmem_create, gpu_uuid, 15, 0, 1, 2, 255),
    FIELD(uvm_vmem_create, page_size, 2, 1, 4, 0x20, 0x21),
    FIELD(uvm_vmem_create, page_size, 0, 0, 1, 8, 255),
    FIELD(uvm_vmem_create, count, 0, 0, 1, 2, 9),
    FIELD(uvm_vmem_create, count, 2, 1, 2, 128, 255),
    FIELD(uvm_vmem_create, flags, 3, 0, 1, 2, 255),
    FIELD(uvm_vmem_create, reserved, 0, 0, 1, 2, 255),
};
static const struct byte release_bytes[] = {
    SIZE(uvm_vmem_release),
    FIELD(uvm_vmem_release, handles, 0, 0, 8, 16, 24),
    FIELD(uvm_vmem_release, handles, 7, 1, 2, 128, 255),
    FIELD(uvm_vmem_release, count, 0, 0, 1, 2, 3),
    FIELD(uvm_vmem_release, count, 1, 16, 17, 32, 255),
    FIELD(uvm_vmem_release, flags, 1, 0, 1, 2, 255),
    FIELD(uvm_vmem_release, reserved, 7, 0, 1, 2, 255),
};
static const struct byte batch_bytes[] = {
    SIZE(uvm_vmem_batch),
    FIELD(uvm_vmem_batch, gpu_uuid, 0, 0, 1, 2, 255),
    FIELD(uvm_vmem_batch, ops, 0, 0, sizeof(struct uvm_vmem_op), 0, sizeof(struct uvm_vmem_op)),
    FIELD(uvm_vmem_batch, ops, 7, 1, 2, 128, 255),
    FIELD(uvm_vmem_batch, count, 0, 0, 1, 2, 3),
    FIELD(uvm_vmem_batch, count, 1, 16, 17, 32, 255),
    FIELD(uvm_vmem_batch, opSize, 0, 0, 8, 48, 80),
    FIELD(uvm_vmem_batch, flags, 0, 0, 1, 2, 255),
    FIELD(uvm_vmem_batch, reserved32, 2, 0, 1, 2, 255),
    FIELD(uvm_vmem_batch, reserved, 4, 0, 1, 2, 255),
};
static const struct byte op_bytes[] = {
    FIELD(uvm_vmem_op, va, 2, 0, 64, 96, 191), // granules
    FIELD(uvm_vmem_op, va, 1, 0, 1, 16, 128),
    FIELD(uvm_vmem_op, va, 7, 0, 1, 128, 255),
    FIELD(uvm_vmem_op, length, 2, 1, 4, 32, 64),
    FIELD(uvm_vmem_op, length, 0, 0, 1, 8, 128),
    FIELD(uvm_vmem_op, length, 7, 0, 1, 128, 255),
    FIELD(uvm_vmem_op, handle, 5, 0, 1, 2, 255),
    FIELD(uvm_vmem_op, offset, 2, 0, 1, 31, 32),
    FIELD(uvm_vmem_op, offset, 6, 0, 1, 2, 255),
    FIELD(uvm_vmem_op, flags, 0, 0, UVM_VMEM_MAP_REPLACE, UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_64K, UVM_VMEM_MAP_OPEN),
    FIELD(uvm_vmem_op, flags, 0, UVM_VMEM_MAP_AHEAD, UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_AHEAD, 16, 255),
    FIELD(uvm_vmem_op, flags, 1, 0, UVM_VMEM_TAKEOVER >> 8, UVM_VMEM_TAKEOVER >> 8, 2),
    FIELD(uvm_vmem_op, reserved, 0, 0, 1, 2, 255),
};

static const struct {
    const char *name;
    unsigned long command;
    size_t size;
    const struct byte *bytes;
    unsigned count;
} kinds[] = {
    [QUERY] = {"QUERY", UVM_VMEM_QUERY, sizeof(in.query), query_bytes, COUNT(query_bytes)},
    [CREATE] = {"CREATE", UVM_VMEM_CREATE, sizeof(in.create), create_bytes, COUNT(create_bytes)},
    [RELEASE] = {"RELEASE", UVM_VMEM_RELEASE, sizeof(in.release), release_bytes, COUNT(release_bytes)},
    [MAP] = {"MAP", UVM_VMEM_MAP, sizeof(in.batch), batch_bytes, COUNT(batch_bytes)},
    [UNMAP] = {"UNMAP", UVM_VMEM_UNMAP, sizeof(in.batch), batch_bytes, COUNT(batch_bytes)},
};

// A byte that has one of two values
struct flip {
    _Atomic uint8_t *at;
    uint8_t values[2];
};
static struct flip flips[FLIPS];
static unsigned flip_count;

static void flip_add(void *at, uint8_t other)
{
    for (unsigned i = 0; i < flip_count; i++)
        if (flips[i].at == at)
            return;
    flips[flip_count++] = (struct flip){.at = at, .values = {*(uint8_t *)at, other}};
}

static uint8_t value_of(const struct byte *b) { return b->values[rng_below(&rng, COUNT(b->values))]; }

static void flip_pick(void)
{
    unsigned i = rng_below(&rng, ELEMENTS);
    const struct byte *b;

    if (kind >= RELEASE && rng_below(&rng, 2)) {
        if (kind == RELEASE || rng_below(&rng, 4) == 0) {
            flip_add(kind == RELEASE ? &in.handles[i] : &in.ops[i].handle, pages[rng_below(&rng, PAGES)]);
            return;
        }
        b = &op_bytes[rng_below(&rng, COUNT(op_bytes))];
        flip_add((char *)&in.ops[i] + b->at, value_of(b));
        return;
    }
    b = &kinds[kind].bytes[rng_below(&rng, kinds[kind].count)];
    flip_add(in.bytes + b->at, value_of(b));
}

static void elements(void)
{
    for (unsigned i = 0; i < COUNT(in.ops); i++) {
        unsigned p = rng_below(&rng, PAGES), n = layout[p].size / GRANULE;
        uint64_t at = BASE + rng_below(&rng, GRANULES - n) * GRANULE;
        uint32_t flags = rng_next(&rng) & (UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD);

        if (rng_below(&rng, 2))
            at &= ~(BLOCK - 1);
        in.ops[i] = vm_op(at, layout[p].size, pages[p], 0, flags | UVM_VMEM_MAP_REPLACE | UVM_VMEM_TAKEOVER);
        if (kind == UNMAP)
            in.ops[i].handle = in.ops[i].flags = 0;
    }
}

static uint64_t edge(void)
{
    static const uint64_t values[] = {0,
                                      1,
                                      2,
                                      7,
                                      8,
                                      48,
                                      4095,
                                      4096,
                                      KB(64) - 1,
                                      KB(64),
                                      KB(128),
                                      MB(1),
                                      MB(2),
                                      MB(4),
                                      GB(1),
                                      GB(4),
                                      1ull << 47,
                                      1ull << 49,
                                      1ull << 63,
                                      BASE,
                                      BASE + MB(2),
                                      BASE + BLOCKS * BLOCK,
                                      ~0ull << 16,
                                      ~0ull << 21};

    switch (rng_below(&rng, 4)) {
    case 0: return rng_next(&rng);
    case 1: return rng_next(&rng) >> rng_below(&rng, 64);
    case 2: return values[rng_below(&rng, COUNT(values))] + rng_below(&rng, 3) - 1;
    default: return values[rng_below(&rng, COUNT(values))];
    }
}

// Replaces a word or half of one.
static void spoil(void *p, size_t length)
{
    uint64_t value = edge();
    size_t wide = rng_below(&rng, 2) ? 8 : 4;

    memcpy((char *)p + rng_below(&rng, length / wide) * wide, &value, wide);
}

// A handle of no page must never become one's.
static void wrong_handle(__u64 *handle)
{
    for (unsigned i = 0; i < PAGES; i++)
        if (*handle == pages[i])
            return;
    *handle |= *handle ? 1ull << 63 : 0;
}

// An input and its flips, the same for a seed but for the pages' handles
static void build(uint64_t seed)
{
    rng = seed * 0x9e3779b97f4a7c15ull;
    kind = (unsigned[]){QUERY, CREATE, RELEASE, RELEASE, UNMAP, MAP, MAP, MAP}[rng_below(&rng, 8)];
    memset(&in, 0, sizeof(in));
    in.query.size = size = kinds[kind].size;
    command = kinds[kind].command;
    switch (kind) {
    case QUERY: memcpy(in.query.gpu_uuid, &u.uuid[0], 16); break;
    case CREATE:
        memcpy(in.create.gpu_uuid, &u.uuid[0], 16);
        in.create.page_size = KB(64) << rng_below(&rng, 3);
        in.create.count = 1 + rng_below(&rng, 3);
        break;
    case RELEASE:
        for (unsigned i = 0; i < COUNT(in.handles); i++)
            in.handles[i] = pages[(seed + i) % PAGES];
        in.release.handles = (uintptr_t)in.handles;
        in.release.count = 1 + rng_below(&rng, ELEMENTS);
        break;
    default:
        elements();
        memcpy(in.batch.gpu_uuid, &u.uuid[0], 16);
        in.batch.ops = (uintptr_t)in.ops;
        in.batch.count = 1 + rng_below(&rng, ELEMENTS);
        in.batch.opSize = sizeof(in.ops[0]);
    }
    for (unsigned n = rng_below(&rng, 4) ? 0 : 1 + rng_below(&rng, 3); n; n--) {
        if (kind >= RELEASE && rng_below(&rng, 2))
            spoil(in.ops, kind == RELEASE ? sizeof(in.handles) : sizeof(in.ops));
        else
            spoil(in.bytes, size);
    }
    if (kind == CREATE && in.create.count > 16) // or it takes long
        in.create.count |= 0x80000000u;
    for (unsigned i = 0; kind >= RELEASE && i < COUNT(in.ops); i++)
        wrong_handle(kind == RELEASE ? &in.handles[i] : &in.ops[i].handle);
    if (rng_below(&rng, 2)) // what is behind the structure is not the call's
        memset(in.bytes + size, 0xb1, sizeof(in.bytes) - size);
    flip_count = 0;
    for (unsigned n = 1 + rng_below(&rng, FLIPS); n; n--)
        flip_pick();
}

// ---- a call, and what came of it --------------------------------------------------------------------------

static atomic_bool wanted, flipping;

static void *flipper(void *arg)
{
    uint64_t r = 1;

    (void)arg;
    for (;;) {
        bool on = wanted;

        flipping = on;
        if (!on) {
            sched_yield();
            continue;
        }
        r = r * 6364136223846793005ull + 1442695040888963407ull;
        struct flip *f = &flips[(r >> 40) % flip_count];
        atomic_store_explicit(f->at, f->values[r >> 63], memory_order_relaxed);
    }
    return NULL;
}

static void flipper_set(bool on)
{
    wanted = on;
    while (flipping != on)
        sched_yield();
}

struct outcome {
    uint64_t error, status, failed; // what it answers
    uint64_t made, created, mapped; // pages that CREATE made, and what QUERY says afterwards
    uint64_t entries, behind;       // hashes of the address space, and of what is behind the structure
};

static uint64_t hash(uint64_t h, uint64_t value) { return (h ^ value) * 0x100000001b3ull + (h >> 29); }

static uint64_t entries(const struct simgpu_pte *ptes, const struct simgpu_pte *before)
{
    uint64_t h = 1;

    for (unsigned g = 0; g < GRANULES; g++) {
        h = hash(hash(h, ptes[g].state), ptes[g].page_size);
        for (unsigned p = 0; ptes[g].state == SIMGPU_PTE_VALID && p < PAGES; p++) {
            uint64_t part = ptes[g].phys - before[layout[p].at / GRANULE].phys;

            if (part < layout[p].size)
                h = hash(hash(h, p), part);
        }
    }
    return h;
}

static struct outcome call(uint64_t seed, bool race)
{
    static struct simgpu_pte before[GRANULES], after[GRANULES];
    struct uvm_vmem_query was = vm_query(&u, 0), q;
    struct outcome o = {0};

    sim_walk(&u, 0, BASE, GRANULE, before, GRANULES);
    if (race)
        flipper_set(true);
    o.error = ioctl(u.fd, command, &in) ? errno : 0;
    if (race)
        flipper_set(false);
    q = vm_query(&u, 0);
    o.created = q.out_bytes_created;
    o.mapped = q.out_bytes_mapped;
    if (!o.error) {
        o.status = in.query.rmStatus;
        o.failed = kind == RELEASE ? in.release.out_failed : kind >= MAP ? in.batch.out_failed : 0;
    }
    while (kind == CREATE && !o.error && !o.status && !vm_release_one(&u, in.create.out_handle + o.made))
        o.made++;
    sim_walk(&u, 0, BASE, GRANULE, after, GRANULES);
    o.entries = entries(after, before);
    counts[kind][!o.error && !o.status]++;
    if (o.error || o.status)
        CHECK_MSG(o.entries == entries(before, before) && o.created == was.out_bytes_created &&
                      o.mapped == was.out_bytes_mapped && q.out_bytes_held == was.out_bytes_held,
                  "SEED %llu: %s fails (%llu, 0x%llx) and has changed something", (unsigned long long)seed,
                  kinds[kind].name, (unsigned long long)o.error, (unsigned long long)o.status);
    for (size_t i = size; i < sizeof(in.bytes); i++)
        o.behind = hash(o.behind, in.bytes[i]);
    return o;
}

static unsigned alone(uint64_t seed, struct outcome *outcomes)
{
    unsigned n = 0;

    do {
        reset();
        build(seed);
        for (unsigned i = 0; i < flip_count; i++)
            *flips[i].at = flips[i].values[n >> i & 1];
        outcomes[n] = call(seed, false);
    } while (++n < 1u << flip_count);
    return n;
}

TEST(test_input_that_changes)
{
    uint64_t total = env_long("CALLS", 2000), seed = env_long("SEED", 1), calls = 0, mixed = 0;
    struct outcome expected[1 << FLIPS], o;
    pthread_t thread;

    uvm_start(&u);
    CHECK_EQ(uvm_create_external(&u, BASE, BLOCKS * BLOCK), NV_OK);
    pages_new();
    CHECK(pthread_create(&thread, NULL, flipper, NULL) == 0);
    for (; calls < total; seed++) {
        unsigned n = alone(seed, expected), i;

        for (unsigned k = 0; k < RACES; k++, calls++) {
            reset();
            build(seed);
            o = call(seed, true);
            for (i = 0; i < n && memcmp(&o, &expected[i], sizeof(o)); i++)
                ;
            CHECK_MSG(i < n,
                      "SEED %llu: %s answers %llu, 0x%llx at %llu, made %llu, and has %llx created, %llx mapped, "
                      "entries %llx, behind it %llx: none of %u inputs alone does",
                      (unsigned long long)seed, kinds[kind].name, (unsigned long long)o.error,
                      (unsigned long long)o.status, (unsigned long long)o.failed, (unsigned long long)o.made,
                      (unsigned long long)o.created, (unsigned long long)o.mapped, (unsigned long long)o.entries,
                      (unsigned long long)o.behind, n);
            mixed += memcmp(&o, &expected[0], sizeof(o)) != 0;
        }
    }
    for (unsigned i = 0; i < PAGES; i++)
        vm_release_one(&u, pages[i]);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    sim_check(0);
    CHECK(mixed);
    printf("%llu calls in a race, %llu of which found their input changed\n", (unsigned long long)calls,
           (unsigned long long)mixed);
    for (unsigned i = 0; i < COUNT(counts); i++) {
        printf("%s: %llu refused, %llu done\n", kinds[i].name, (unsigned long long)counts[i][0],
               (unsigned long long)counts[i][1]);
        CHECK(total < 2000 || (counts[i][0] && counts[i][1]));
    }
}

// ---- elements that change once they have been read ----------------------------------------------------------

enum { SMALL_PAGE = 4096 };

// Two elements, on either side of a page's end. The second page is not there, so who reads it waits for a thread. That
// changes the first element, which has been read by then, and only then gives the second one.
static struct {
    int file;
    uint8_t *pages, *first;
    uint8_t later[sizeof(struct uvm_vmem_op)], second[SMALL_PAGE];
    size_t bytes;
    pthread_t thread;
} trap;

static void *spring(void *arg)
{
    struct uffdio_copy copy = {.dst = (uintptr_t)trap.pages + SMALL_PAGE,
                               .src = (uintptr_t)trap.second,
                               .len = SMALL_PAGE};
    struct uffd_msg msg;

    (void)arg;
    CHECK_EQ(read(trap.file, &msg, sizeof(msg)), sizeof(msg));
    memcpy(trap.first, trap.later, trap.bytes);
    CHECK(ioctl(trap.file, UFFDIO_COPY, &copy) == 0);
    return NULL;
}

static void *trap_set(const void *first, const void *later, const void *second, size_t bytes)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register all = {.range.len = SMALL_PAGE, .mode = UFFDIO_REGISTER_MODE_MISSING};

    trap.pages = mmap(NULL, 2 * SMALL_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(trap.pages != MAP_FAILED);
    trap.first = trap.pages + SMALL_PAGE - bytes;
    trap.bytes = bytes;
    memcpy(trap.first, first, bytes);
    memcpy(trap.later, later, bytes);
    memcpy(trap.second, second, bytes);
    trap.file = syscall(SYS_userfaultfd, O_CLOEXEC);
    CHECK(trap.file >= 0 && ioctl(trap.file, UFFDIO_API, &api) == 0);
    all.range.start = (uintptr_t)trap.pages + SMALL_PAGE;
    CHECK(ioctl(trap.file, UFFDIO_REGISTER, &all) == 0);
    CHECK(pthread_create(&trap.thread, NULL, spring, NULL) == 0);
    return trap.first;
}

static void trap_end(void)
{
    pthread_join(trap.thread, NULL);
    CHECK(memcmp(trap.first, trap.later, trap.bytes) == 0); // it was changed
    close(trap.file);
    munmap(trap.pages, 2 * SMALL_PAGE);
}

static bool is_mapped(uint64_t va)
{
    struct simgpu_pte pte;

    sim_walk(&u, 0, va, GRANULE, &pte, 1);
    return pte.state == SIMGPU_PTE_VALID;
}

TEST(test_elements_are_read_once)
{
    const uint64_t empty = BASE + 3 * BLOCK, other = BASE + 5 * BLOCK;
    struct uvm_vmem_op first, later, second;

    uvm_start(&u);
    CHECK_EQ(uvm_create_external(&u, BASE, BLOCKS * BLOCK), NV_OK);
    pages_new();
    reset();

    first = vm_op(empty, KB(64), pages[0], 0, 0);
    later = vm_op(other, KB(64), pages[0], 0, 0);
    second = vm_op(empty + MB(1), KB(256), pages[1], 0, 0);
    CHECK_EQ(vm_map_ops(&u, 0, trap_set(&first, &later, &second, sizeof(first)), 2, NULL), NV_OK);
    trap_end();
    CHECK(is_mapped(empty) && is_mapped(empty + MB(1)) && !is_mapped(other));

    first = vm_op(empty, KB(64), 0, 0, 0);
    later = vm_op(BASE, KB(64), 0, 0, 0);
    second = vm_op(empty + MB(1), KB(256), 0, 0, 0);
    CHECK_EQ(vm_unmap_ops(&u, 0, trap_set(&first, &later, &second, sizeof(first)), 2, NULL), NV_OK);
    trap_end();
    CHECK(!is_mapped(empty) && !is_mapped(empty + MB(1)) && is_mapped(BASE));

    CHECK_EQ(vm_release(&u, trap_set(&pages[0], &pages[1], &pages[2], sizeof(pages[0])), 2, NULL), NV_OK);
    trap_end();
    CHECK(vm_release_one(&u, pages[0]) != NV_OK && vm_release_one(&u, pages[2]) != NV_OK);
    CHECK_EQ(vm_release_one(&u, pages[1]), NV_OK);
    CHECK_EQ(vm_release_one(&u, pages[3]), NV_OK);
    sim_check(0);
}
