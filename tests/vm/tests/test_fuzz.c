// Bad input to every call: no crash, no leak, and a call that fails has changed nothing.
//
// CALLS sets how many. Structures are good ones with some fields replaced by values from the edges, so that most calls
// get past the first check.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

enum { BLOCKS = 6, OPS = 6 };

static struct uvm u;
static uint64_t rng, pages[6], counts[7][2];
static void *unreadable;

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
                                      KB(64) + 1,
                                      KB(128),
                                      KB(256),
                                      MB(1),
                                      MB(2) - 1,
                                      MB(2),
                                      MB(2) + 1,
                                      MB(4),
                                      GB(1),
                                      GB(4),
                                      1ull << 47,
                                      1ull << 49,
                                      1ull << 63,
                                      BASE,
                                      BASE + MB(2),
                                      BASE + BLOCKS * BLOCK,
                                      ~0ull,
                                      ~0ull - 1,
                                      ~0ull << 16,
                                      ~0ull << 21};

    switch (rng_below(&rng, 4)) {
    case 0: return rng_next(&rng);
    case 1: return rng_next(&rng) >> rng_below(&rng, 64);
    case 2: return values[rng_below(&rng, COUNT(values))] + rng_below(&rng, 3) - 1;
    default: return values[rng_below(&rng, COUNT(values))];
    }
}

// Replace words of a structure by edges.
static void spoil(void *p, size_t size, unsigned words)
{
    for (unsigned i = 0; i < words; i++) {
        if (rng_below(&rng, 2)) {
            uint64_t v = edge();
            memcpy((char *)p + rng_below(&rng, size / 8) * 8, &v, 8);
        } else {
            uint32_t v = edge();
            memcpy((char *)p + rng_below(&rng, size / 4) * 4, &v, 4);
        }
    }
}

static void good_op(struct uvm_vmem_op *op)
{
    unsigned p = rng_below(&rng, COUNT(pages));
    uint32_t flags = rng_next(&rng) & (UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD | UVM_VMEM_TAKEOVER);

    *op = vm_op(BASE + rng_below(&rng, BLOCKS * 32) * GRANULE, KB(64), pages[p], 0, UVM_VMEM_MAP_REPLACE | flags);
}

static void *maybe_bad(void *p)
{
    switch (rng_below(&rng, 40)) {
    case 0: return NULL;
    case 1: return unreadable;
    case 2: return (void *)0xffff888000001000ull;
    case 3: return (void *)(~0ull - 16);
    case 4: return (char *)unreadable - 24; // begins readable, ends not
    default: return p;
    }
}

// State of the file that a failed call must not touch; cheap enough for every call. What was found after a call that
// failed is what the next one begins with.
static struct state {
    uint64_t held, created, mapped;
} known;
static bool stale = true; // a call succeeded since

static struct state state(void)
{
    struct uvm_vmem_query q = vm_query(&u, 0);

    return (struct state){q.out_bytes_held, q.out_bytes_created, q.out_bytes_mapped};
}

static void one_call(void)
{
    static const unsigned long cmds[] = {UVM_VMEM_QUERY, UVM_VMEM_CREATE, UVM_VMEM_RELEASE, UVM_VMEM_MAP,
                                         UVM_VMEM_UNMAP};
    enum { QUERY, CREATE, RELEASE, MAP, UNMAP };
    unsigned which = (unsigned[]){QUERY, CREATE, RELEASE, MAP, MAP, MAP, UNMAP, UNMAP}[rng_below(&rng, 8)];
    struct uvm_vmem_op ops[OPS + 4] = {0};
    uint64_t handles[OPS] = {0};
    struct state after;
    union {
        struct uvm_vmem_query query;
        struct uvm_vmem_create create;
        struct uvm_vmem_release release;
        struct uvm_vmem_batch batch;
        uint64_t words[32];
    } p = {0};
    size_t size =
        (size_t[]){sizeof(p.query), sizeof(p.create), sizeof(p.release), sizeof(p.batch), sizeof(p.batch)}[which];
    bool good = rng_below(&rng, 16) == 0; // a few pass, so that there is a state to keep
    int rc;
    NV_STATUS status;

    p.query.size = size; // where every structure has it
    switch (which) {
    case QUERY: memcpy(p.query.gpu_uuid, &u.uuid[0], 16); break;
    case CREATE:
        memcpy(p.create.gpu_uuid, &u.uuid[0], 16);
        p.create.page_size = KB(64) << rng_below(&rng, 3);
        p.create.count = 1 + rng_below(&rng, 3);
        break;
    case RELEASE:
        for (unsigned i = 0; i < OPS; i++)
            handles[i] = rng_below(&rng, 4) ? edge() : pages[rng_below(&rng, COUNT(pages))];
        p.release.handles = (uintptr_t)maybe_bad(handles);
        p.release.count = 1 + rng_below(&rng, OPS);
        break;
    default:
        for (unsigned i = 0; i < OPS; i++) {
            good_op(&ops[i]);
            if (which == UNMAP) {
                ops[i].handle = 0;
                ops[i].flags = 0;
            }
        }
        if (!good && rng_below(&rng, 3))
            spoil(ops, sizeof(ops[0]) * OPS, 1 + rng_below(&rng, 2));
        memcpy(p.batch.gpu_uuid, &u.uuid[0], 16);
        p.batch.ops = (uintptr_t)maybe_bad(ops);
        p.batch.count = 1 + rng_below(&rng, OPS);
        p.batch.opSize = sizeof(ops[0]);
    }
    if (!good && rng_below(&rng, 2))
        spoil(&p, size, 1 + rng_below(&rng, 3));
    if (!good && which >= MAP && rng_below(&rng, 2))
        p.batch.flags = 1u << rng_below(&rng, 32);
    // what the fuzzer must not do by luck: take gigabytes, or point at memory that is not its own to read
    if (which == CREATE && p.create.count > 64)
        p.create.count |= 0x80000000u;

    if (stale)
        known = state();
    stale = false;
    rc = ioctl(u.fd, cmds[which], rng_below(&rng, 200) ? (void *)&p : maybe_bad(&p));
    status = p.query.rmStatus;
    counts[which][rc == 0 && status == NV_OK]++;
    if (rc == 0 && status == NV_OK) {
        stale = true;
        // undo what succeeded, so that the next call starts from the same state
        if (which == CREATE) {
            for (uint64_t i = 0; i < p.create.count; i++)
                CHECK_EQ(vm_release_one(&u, p.create.out_handle + i), NV_OK);
        } else if (which == RELEASE) {
            // pages it released exist no more: replace them
            for (unsigned i = 0; i < p.release.count && i < OPS; i++)
                for (unsigned k = 0; k < COUNT(pages); k++)
                    if (pages[k] == handles[i])
                        CHECK_EQ(vm_create(&u, KB(64), 1, &pages[k]), NV_OK);
        }
        return;
    }
    after = state();
    CHECK_MSG(after.held == known.held && after.created == known.created && after.mapped == known.mapped,
              "call %u failed (%d, 0x%x) and changed held/created/mapped from %lx/%lx/%lx to %lx/%lx/%lx", which, rc,
              status, known.held, known.created, known.mapped, after.held, after.created, after.mapped);
}

TEST(test_fuzz_every_call)
{
    static const char *const names[] = {"QUERY", "CREATE", "RELEASE", "MAP", "UNMAP"};
    uint64_t calls = env_long("CALLS", 20000);
    char *room = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    double t0 = seconds();

    munmap(room + 4096, 8192);
    unreadable = room + 4096;
    rng = env_long("SEED", 1);
    vm_start(&u, BLOCKS * BLOCK);
    for (unsigned i = 0; i < COUNT(pages); i++)
        CHECK_EQ(vm_create(&u, KB(64), 1, &pages[i]), NV_OK);
    for (uint64_t i = 0; i < calls; i++) {
        one_call();
        if (i % 4096 == 4095)
            sim_check(0);
    }
    for (unsigned i = 0; i < COUNT(names); i++) {
        printf("%s: %llu refused, %llu done\n", names[i], (unsigned long long)counts[i][0],
               (unsigned long long)counts[i][1]);
        CHECK(counts[i][0] > 0 && (calls < 5000 || counts[i][1] > 0));
    }
    CHECK_EQ(vm_unmap(&u, BASE, BLOCKS * BLOCK), NV_OK);
    for (unsigned i = 0; i < COUNT(pages); i++)
        CHECK_EQ(vm_release_one(&u, pages[i]), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    sim_check(0);
    vmtest_figure("fuzz_calls", calls, "calls");
    vmtest_figure("fuzz_seconds", seconds() - t0, "s");
}

// Any number of ours with any size, and a page of noise behind it.
TEST(test_fuzz_numbers)
{
    uint64_t noise[512];

    rng = env_long("SEED", 1);
    uvm_start(&u);
    for (unsigned i = 0; i < 2000; i++) {
        unsigned long cmd =
            _IOC(rng_below(&rng, 4), UVM_VMEM_IOCTL_TYPE, rng_below(&rng, 256), rng_below(&rng, 1 << 14));
        for (unsigned k = 0; k < COUNT(noise); k++)
            noise[k] = edge();
        if (ioctl(u.fd, cmd, noise) == 0)
            CHECK(_IOC_NR(cmd) >= 1 && _IOC_NR(cmd) <= 5);
    }
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
}
