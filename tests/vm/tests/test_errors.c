// Every error the ABI documents, each provoked alone; nothing may have changed afterwards.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

#include <pthread.h>

static struct uvm u;
static uint64_t pages[4]; // 64, 128, 256 KiB, 2 MiB; the first is mapped at BASE + 64 KiB

static void start(struct vm_state *s)
{
    static const uint64_t sizes[] = {KB(64), KB(128), KB(256), MB(2)};

    vm_start(&u, MB(8));
    for (unsigned i = 0; i < COUNT(sizes); i++)
        CHECK_EQ(vm_create(&u, sizes[i], 1, &pages[i]), NV_OK);
    CHECK_EQ(vm_map(&u, BASE + KB(64), KB(64), pages[0], 0, 0), NV_OK);
    vm_state_take(&u, BASE, MB(8), s);
}

#define UNCHANGED(s) vm_state_same(&u, BASE, s, true)

static struct uvm_vmem_batch batch_of(const struct uvm_vmem_op *ops, uint32_t n)
{
    struct uvm_vmem_batch b = {.ops = (uintptr_t)ops, .count = n, .opSize = sizeof(*ops)};

    memcpy(b.gpu_uuid, &u.uuid[0], 16);
    return b;
}

static NV_STATUS run(unsigned long cmd, struct uvm_vmem_batch *b)
{
    b->size = sizeof(*b);
    b->rmStatus = 0xdead;
    CHECK(ioctl(u.fd, cmd, b) == 0);
    return b->rmStatus;
}

TEST(test_err_wrong_descriptor)
{
    struct uvm_vmem_query q = {.size = sizeof(q)};
    struct uvm_vmem_create c = {.size = sizeof(c), .page_size = KB(64), .count = 1};
    struct uvm_vmem_batch b = {.size = sizeof(b)};
    int fd = open("/dev/nvidia-uvm", O_RDWR);

    uvm_open(&u);
    // never initialised
    CHECK(ioctl(fd, UVM_VMEM_QUERY, &q) == 0);
    CHECK_EQ(q.rmStatus, NV_ERR_ILLEGAL_ACTION);
    CHECK(ioctl(fd, UVM_VMEM_CREATE, &c) == 0);
    CHECK_EQ(c.rmStatus, NV_ERR_ILLEGAL_ACTION);
    CHECK(ioctl(fd, UVM_VMEM_MAP, &b) == 0);
    CHECK_EQ(b.rmStatus, NV_ERR_ILLEGAL_ACTION);
    // the one of UVM_MM_INITIALIZE is no address space either
    CHECK(ioctl(u.mm_fd, UVM_VMEM_QUERY, &q) == 0);
    CHECK_EQ(q.rmStatus, NV_ERR_ILLEGAL_ACTION);
}

TEST(test_err_unknown_call)
{
    struct uvm_vmem_query q = {.size = sizeof(q)};

    uvm_start(&u);
    for (unsigned direction = 0; direction < 4; direction++)
        for (unsigned nr = 0; nr < 256; nr++)
            for (unsigned size = 0; size < 1 << 14; size = size * 2 + 1 + nr % 2) {
                unsigned long cmd = _IOC(direction, UVM_VMEM_IOCTL_TYPE, nr, size);

                if (cmd >= UVM_VMEM_QUERY && cmd <= UVM_VMEM_UNMAP)
                    continue;
                errno = 0;
                CHECK_MSG(ioctl(u.fd, cmd, &q) == -1 && errno == ENOTTY, "call 0x%lx: %s", cmd, strerror(errno));
            }
    // of ABI 2
    errno = 0;
    CHECK(ioctl(u.fd, _IOWR(UVM_VMEM_IOCTL_TYPE, 1, struct uvm_vmem_query), &q) == -1 && errno == ENOTTY);
    errno = 0; // UVM's own answer, on which libvmem relies to know a stock module
    CHECK(ioctl(u.fd, _IO(UVM_VMEM_IOCTL_TYPE + 1, 1), &q) == -1 && errno == EINVAL);
}

// A structure of another age: a shorter one is refused, as none is older than today's, and a longer one is accepted if
// the caller asks for nothing in what the module does not know.
TEST(test_err_structure_size)
{
    static const unsigned long cmds[] = {UVM_VMEM_QUERY, UVM_VMEM_CREATE, UVM_VMEM_RELEASE, UVM_VMEM_MAP,
                                         UVM_VMEM_UNMAP};
    static const uint32_t sizes[] = {sizeof(struct uvm_vmem_query), sizeof(struct uvm_vmem_create),
                                     sizeof(struct uvm_vmem_release), sizeof(struct uvm_vmem_batch),
                                     sizeof(struct uvm_vmem_batch)};
    uint32_t *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct vm_state s;

    start(&s);
    for (unsigned i = 0; i < COUNT(cmds); i++) {
        uint32_t bad[] = {0, 4, sizes[i] - 4, sizes[i] - 1};

        for (unsigned k = 0; k < COUNT(bad); k++) {
            memset(page, 0, 4096);
            page[0] = bad[k];
            errno = 0;
            CHECK_MSG(ioctl(u.fd, cmds[i], page) == -1 && errno == EINVAL, "call %u of %u bytes", i + 1, bad[k]);
            CHECK_EQ(page[1], 0);
        }
        for (uint32_t size = sizes[i] + 1; size <= 4096; size += size < 512 ? 7 : 512) {
            memset(page, 0, 4096);
            page[0] = size;
            CHECK_MSG(ioctl(u.fd, cmds[i], page) == 0, "call %u of %u bytes: %s", i + 1, size, strerror(errno));
            ((char *)page)[size - 1] = 1;
            page[1] = 0;
            errno = 0;
            CHECK_MSG(ioctl(u.fd, cmds[i], page) == -1 && errno == E2BIG, "call %u of %u bytes", i + 1, size);
            CHECK_EQ(page[1], 0);
        }
        memset(page, 0, 4096);
        page[0] = 4097;
        errno = 0;
        CHECK(ioctl(u.fd, cmds[i], page) == -1 && errno == E2BIG);
    }
    UNCHANGED(&s);
}

TEST(test_err_structure_unreadable)
{
    static const unsigned long cmds[] = {UVM_VMEM_QUERY, UVM_VMEM_CREATE, UVM_VMEM_RELEASE, UVM_VMEM_MAP,
                                         UVM_VMEM_UNMAP};
    uint64_t handle;
    struct vm_state s;
    struct uvm_vmem_op op;
    struct uvm_vmem_batch b;
    struct uvm_vmem_query q = {.size = sizeof(q)};
    struct uvm_vmem_create c = {.size = sizeof(c), .page_size = KB(64), .count = 1};
    struct uvm_vmem_release r = {.size = sizeof(r), .handles = (uintptr_t)&handle, .count = 1};
    const struct {
        unsigned long cmd;
        const void *structure;
        size_t size;
    } all[] = {
        {UVM_VMEM_QUERY, &q, sizeof(q)},
        {UVM_VMEM_CREATE, &c, sizeof(c)},
        {UVM_VMEM_RELEASE, &r, sizeof(r)},
        {UVM_VMEM_MAP, &b, sizeof(b)},
    };

    start(&s);
    handle = pages[0];
    for (unsigned i = 0; i < COUNT(cmds); i++) {
        errno = 0;
        CHECK(ioctl(u.fd, cmds[i], NULL) == -1 && errno == EFAULT);
        errno = 0;
        CHECK(ioctl(u.fd, cmds[i], (void *)0xffff800000000000ull) == -1 && errno == EFAULT);
    }
    UNCHANGED(&s);
    // the answer cannot be written: the call says so, and has done nothing
    op = vm_op(BASE + MB(4), KB(64), pages[3], 0, 0);
    b = batch_of(&op, 1);
    b.size = sizeof(b);
    memcpy(c.gpu_uuid, &u.uuid[0], 16);
    for (unsigned i = 0; i < COUNT(all); i++) {
        void *ro = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        memcpy(ro, all[i].structure, all[i].size);
        CHECK(mprotect(ro, 4096, PROT_READ) == 0);
        errno = 0;
        CHECK_MSG(ioctl(u.fd, all[i].cmd, ro) == -1 && errno == EFAULT, "call %u", i);
        UNCHANGED(&s);
    }
}

static uint32_t *volatile answer;
static volatile bool stop;

static void *take_away(void *unused)
{
    while (!stop) {
        mprotect(answer, 4096, PROT_READ);
        mprotect(answer, 4096, PROT_READ | PROT_WRITE);
    }
    return unused;
}

// The same while the call runs: a page of which the caller has not learned the handle could never be freed.
TEST(test_err_answer_taken_away)
{
    unsigned long n = env_long("CALLS", 2000);
    uint64_t created, told = 0;
    struct uvm_vmem_create *c;
    struct vm_state s;
    pthread_t thread;
    unsigned refused = 0;

    start(&s);
    created = vm_query(&u, 0).out_bytes_created;
    c = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    answer = (void *)c;
    CHECK(pthread_create(&thread, NULL, take_away, NULL) == 0);
    for (unsigned long i = 0; i < n || !told || !refused; i++) { // CASE_TIMEOUT ends it
        struct uvm_vmem_create good = {.size = sizeof(good), .page_size = KB(64), .count = 2};
        int pipes[2];

        memcpy(good.gpu_uuid, &u.uuid[0], 16);
        CHECK(pipe(pipes) == 0 && write(pipes[1], &good, sizeof(good)) == sizeof(good));
        while (read(pipes[0], c, sizeof(good)) != sizeof(good)) // the page is not writable now
            ;
        close(pipes[0]);
        close(pipes[1]);
        if (ioctl(u.fd, UVM_VMEM_CREATE, c)) {
            CHECK_EQ(errno, EFAULT);
            refused++;
            continue;
        }
        CHECK_EQ(c->rmStatus, NV_OK);
        told += 2;
        for (unsigned k = 0; k < 2; k++)
            CHECK_EQ(vm_release_one(&u, c->out_handle + k), NV_OK);
    }
    stop = true;
    pthread_join(thread, NULL);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, created);
    UNCHANGED(&s);
}

TEST(test_err_flags_and_reserved)
{
    struct vm_state s;
    struct uvm_vmem_op op;
    struct uvm_vmem_batch b;
    struct uvm_vmem_query q;
    struct uvm_vmem_create c;
    struct uvm_vmem_release l;

    start(&s);
#define BAD_FIELD(type, var, cmd, field, val, ...)                                                                     \
    do {                                                                                                               \
        var = (type){__VA_ARGS__};                                                                                     \
        var.size = sizeof(var);                                                                                        \
        var.field = val;                                                                                               \
        CHECK(ioctl(u.fd, cmd, &var) == 0);                                                                            \
        CHECK_MSG(var.rmStatus == NV_ERR_INVALID_ARGUMENT, "%s with %s = %s: 0x%x", #cmd, #field, #val, var.rmStatus); \
    } while (0)
    BAD_FIELD(struct uvm_vmem_query, q, UVM_VMEM_QUERY, flags, 1, 0);
    BAD_FIELD(struct uvm_vmem_query, q, UVM_VMEM_QUERY, reserved[4], 1, 0);
    BAD_FIELD(struct uvm_vmem_create, c, UVM_VMEM_CREATE, flags, 2, .page_size = KB(64), .count = 1);
    BAD_FIELD(struct uvm_vmem_create, c, UVM_VMEM_CREATE, reserved, 2, .page_size = KB(64), .count = 1);
    BAD_FIELD(struct uvm_vmem_release, l, UVM_VMEM_RELEASE, flags, 1, .handles = (uintptr_t)&pages[1], .count = 1);
    BAD_FIELD(struct uvm_vmem_release, l, UVM_VMEM_RELEASE, reserved, 1, .handles = (uintptr_t)&pages[1], .count = 1);
    BAD_FIELD(struct uvm_vmem_release, l, UVM_VMEM_RELEASE, count, 0, .handles = (uintptr_t)&pages[1]);
    op = vm_op(BASE, KB(128), pages[1], 0, UVM_VMEM_MAP_REPLACE);
    b = batch_of(&op, 1);
    b.flags = 1;
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    b = batch_of(&op, 1);
    b.reserved = 1;
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    b = batch_of(&op, 1);
    b.reserved32 = 1;
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    b = batch_of(&op, 0);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_ARGUMENT);
    // in an element
    op.flags = 0x8000;
    b = batch_of(&op, 1);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    CHECK_EQ(b.out_failed, 0);
    op.flags = 0x10; // of ABI 1
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    op.flags = 0;
    op.reserved = 7;
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_ARGUMENT);
    op = vm_op(BASE + KB(64), KB(64), 0, 0, UVM_VMEM_MAP_REPLACE);
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_ARGUMENT);
    op = vm_op(BASE + KB(64), KB(64), 0, 0, 0x20); // of ABI 1
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_ARGUMENT);
    op = vm_op(BASE + KB(64), KB(64), 0, 0, UVM_VMEM_TAKEOVER); // only together with OPEN
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_ARGUMENT);
    UNCHANGED(&s);
}

TEST(test_err_op_size)
{
    struct vm_state s;
    struct uvm_vmem_op ops[4] = {0};
    struct uvm_vmem_batch b;

    start(&s);
    ops[0] = vm_op(BASE + MB(2), KB(64), pages[3], 0, 0);
    b = batch_of(ops, 1);
    for (uint32_t size = 0; size <= sizeof(ops); size += 4) {
        if (size == sizeof(ops[0]))
            continue;
        b.opSize = size;
        CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_PARAM_STRUCT);
        CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_PARAM_STRUCT);
    }
    UNCHANGED(&s);
}

TEST(test_err_array_unreadable)
{
    struct vm_state s;
    struct uvm_vmem_batch b;
    struct uvm_vmem_op *ops = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uvm_vmem_release r = {.size = sizeof(r), .handles = 8, .count = 1};

    start(&s);
    CHECK(munmap((char *)ops + 4096, 4096) == 0);
    // the last element lies half in the hole
    ops = (struct uvm_vmem_op *)((char *)ops + 4096 - sizeof(*ops) - sizeof(*ops) / 2);
    ops[0] = vm_op(BASE + MB(2), KB(64), pages[3], 0, 0);
    b = batch_of(ops, 2);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_POINTER);
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_POINTER);
    b = batch_of((void *)0xffff888000000000ull, 1);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_POINTER);
    CHECK(ioctl(u.fd, UVM_VMEM_RELEASE, &r) == 0);
    CHECK_EQ(r.rmStatus, NV_ERR_INVALID_POINTER);
    r = (struct uvm_vmem_release){.size = sizeof(r), .handles = ~0ull - 7, .count = 3};
    CHECK(ioctl(u.fd, UVM_VMEM_RELEASE, &r) == 0);
    CHECK_EQ(r.rmStatus, NV_ERR_INVALID_POINTER);
    UNCHANGED(&s);
}

TEST(test_err_limits)
{
    struct vm_state s;
    struct uvm_vmem_query q;
    struct uvm_vmem_op *ops;
    struct uvm_vmem_batch b;
    uint64_t *handles;

    start(&s);
    q = vm_query(&u, 0);
    ops = calloc(q.out_max_ops + 1, sizeof(*ops));
    handles = calloc(q.out_max_ops + 1, sizeof(*handles));
    for (uint32_t i = 0; i <= q.out_max_ops; i++)
        ops[i] = vm_op(BASE + MB(2) + i % 32 * GRANULE, KB(64), pages[3], 0, UVM_VMEM_MAP_REPLACE);
    b = batch_of(ops, q.out_max_ops + 1);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_LIMIT);
    b = batch_of(ops, ~0u);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_LIMIT);
    CHECK_EQ(vm_create(&u, KB(64), q.out_max_ops + 1, NULL), NV_ERR_INVALID_LIMIT);
    CHECK_EQ(vm_create(&u, KB(64), ~0u, NULL), NV_ERR_INVALID_LIMIT);
    CHECK_EQ(vm_release(&u, handles, q.out_max_ops + 1, NULL), NV_ERR_INVALID_LIMIT);
    ops[0] = vm_op(BASE + MB(2), q.out_max_bytes + KB(64), 0, 0, 0);
    b = batch_of(ops, 1);
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_LIMIT);
    if (q.out_max_bytes / MB(2) < q.out_max_ops)
        CHECK_EQ(vm_create(&u, MB(2), q.out_max_bytes / MB(2) + 1, NULL), NV_ERR_INVALID_LIMIT);
    UNCHANGED(&s);
}

TEST(test_err_device)
{
    struct vm_state s;
    struct uvm_vmem_op op;
    struct uvm_vmem_batch b;
    struct uvm_vmem_query q = {.size = sizeof(q), .gpu_uuid = {1, 2, 3}};
    struct uvm_vmem_create c = {.size = sizeof(c), .gpu_uuid = {1, 2, 3}, .page_size = KB(64), .count = 1};
    struct uvm bare;
    uint64_t h;

    start(&s);
    CHECK(ioctl(u.fd, UVM_VMEM_QUERY, &q) == 0);
    CHECK_EQ(q.rmStatus, NV_ERR_INVALID_DEVICE);
    CHECK(ioctl(u.fd, UVM_VMEM_CREATE, &c) == 0);
    CHECK_EQ(c.rmStatus, NV_ERR_INVALID_DEVICE);
    op = vm_op(BASE + MB(2), KB(64), pages[3], 0, 0);
    b = batch_of(&op, 1);
    b.gpu_uuid[3] ^= 0xff;
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_INVALID_DEVICE);
    op.handle = 0;
    CHECK_EQ(run(UVM_VMEM_UNMAP, &b), NV_ERR_INVALID_DEVICE);
    UNCHANGED(&s);
    // registered, but without an address space: memory yes, mappings no
    uvm_open(&bare);
    CHECK_EQ(uvm_register(&bare, 0), NV_OK);
    CHECK_EQ(uvm_create_external(&bare, BASE, MB(8)), NV_OK);
    CHECK_EQ(vm_create(&bare, KB(64), 1, &h), NV_OK);
    op.handle = h;
    CHECK_EQ(vm_map_ops(&bare, 0, &op, 1, NULL), NV_ERR_INVALID_DEVICE);
    op.handle = 0;
    CHECK_EQ(vm_unmap_ops(&bare, 0, &op, 1, NULL), NV_ERR_INVALID_DEVICE);
    CHECK_EQ(vm_release_one(&bare, h), NV_OK);
}

TEST(test_err_create)
{
    static const uint64_t bad[] = {0, 1, 4096, KB(32), KB(64) + 1, KB(192), KB(512), MB(1), MB(4), MB(512), ~0ull};
    struct vm_state s;

    start(&s);
    for (unsigned i = 0; i < COUNT(bad); i++)
        CHECK_EQ(vm_create(&u, bad[i], 1, NULL), NV_ERR_INVALID_ARGUMENT);
    CHECK_EQ(vm_create(&u, KB(64), 0, NULL), NV_ERR_INVALID_ARGUMENT);
    UNCHANGED(&s);
}

TEST(test_err_out_of_memory)
{
    struct vm_state s;
    uint64_t h, n = 0, handles[4096];

    start(&s);
    // all that there is, then one more: all or none
    while (n < COUNT(handles) && vm_create(&u, MB(2), 1, &h) == NV_OK)
        handles[n++] = h;
    CHECK(n < COUNT(handles) && n > 90);
    CHECK_EQ(vm_create(&u, MB(2), 1, NULL), NV_ERR_NO_MEMORY);
    CHECK_EQ(vm_release(&u, handles, 70, NULL), NV_OK);
    CHECK_EQ(vm_create(&u, MB(2), 80, NULL), NV_ERR_NO_MEMORY); // fails when it has got most of them
    CHECK_EQ(vm_create(&u, MB(2), 70, &h), NV_OK);              // the failed call kept nothing
    for (uint64_t i = 0; i < n; i++)
        CHECK_EQ(vm_release_one(&u, i < 70 ? h + i : handles[i]), NV_OK);
    UNCHANGED(&s);
    sim_check(0);
}

// A call must not hold the VA space lock for longer because somebody's mapping is large. Blocks of a small one cost
// little each; those of a large one are refused at once.
TEST(test_err_takeover_of_a_large_mapping)
{
    struct uvm_vmem_op op;
    struct uvm_vmem_batch b;
    uint64_t page;

    uvm_start(&u);
    CHECK_EQ(uvm_create_external(&u, BASE, GB(32)), NV_OK);
    CHECK_EQ(uvm_map_sparse(&u, 0, BASE, (UVM_VMEM_TAKE_TABLES + 1) * BLOCK), NV_OK);
    CHECK_EQ(uvm_map_sparse(&u, 0, BASE + GB(16), UVM_VMEM_TAKE_TABLES * BLOCK), NV_OK);
    CHECK_EQ(vm_create(&u, KB(64), 1, &page), NV_OK);
    op = vm_op(BASE + MB(64), KB(64), page, 0, UVM_VMEM_TAKEOVER | UVM_VMEM_MAP_64K);
    b = batch_of(&op, 1);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_ERR_UVM_ADDRESS_IN_USE);
    CHECK_EQ(b.out_failed, 0);
    op = vm_op(BASE + GB(16) + MB(64), KB(64), page, 0, UVM_VMEM_TAKEOVER | UVM_VMEM_MAP_64K);
    b = batch_of(&op, 1);
    CHECK_EQ(run(UVM_VMEM_MAP, &b), NV_OK);
    CHECK_EQ(uvm_free_range(&u, BASE, GB(32)), NV_OK);
}

TEST(test_err_release)
{
    struct vm_state s;
    struct uvm_vmem_release r;
    uint64_t h[4];

    start(&s);
    CHECK_EQ(vm_release_one(&u, 0), NV_ERR_INVALID_OBJECT_HANDLE);
    CHECK_EQ(vm_release_one(&u, ~0ull), NV_ERR_INVALID_OBJECT_HANDLE);
    CHECK_EQ(vm_release_one(&u, pages[3] + 1), NV_ERR_INVALID_OBJECT_HANDLE);
    memcpy(h, (uint64_t[]){pages[0], pages[1], pages[1], pages[2]}, sizeof(h));
    CHECK_EQ(vm_release(&u, h, 4, &r), NV_ERR_INVALID_OBJECT_HANDLE);
    CHECK_EQ(r.out_failed, 2);
    h[2] = 12345678;
    CHECK_EQ(vm_release(&u, h, 4, &r), NV_ERR_INVALID_OBJECT_HANDLE);
    CHECK_EQ(r.out_failed, 2);
    UNCHANGED(&s);
    CHECK_EQ(vm_release_one(&u, pages[1]), NV_OK);
    CHECK_EQ(vm_release_one(&u, pages[1]), NV_ERR_INVALID_OBJECT_HANDLE); // stale
    CHECK_EQ(vm_map(&u, BASE + MB(2), KB(128), pages[1], 0, 0), NV_ERR_INVALID_OBJECT_HANDLE);
}

TEST(test_err_map_elements)
{
    struct vm_state s;
    struct uvm_vmem_op ops[3];
    struct uvm_vmem_batch b;
    static const struct {
        uint64_t va, length;
        int page;
        uint64_t offset;
        uint32_t flags;
        NV_STATUS status;
    } bad[] = {
        {BASE + MB(2) + 4096, KB(64), 3, 0, 0, NV_ERR_INVALID_ADDRESS},
        {BASE + MB(2), KB(64) + 4096, 3, 0, 0, NV_ERR_INVALID_ADDRESS},
        {BASE + MB(2), 0, 3, 0, 0, NV_ERR_INVALID_ADDRESS},
        {BASE + MB(10), KB(64), 3, 0, 0, NV_ERR_INVALID_ADDRESS},          // past the range, and its guard
        {BASE + MB(8) - KB(64), KB(128), 3, 0, 0, NV_ERR_INVALID_ADDRESS}, // leaves the range
        {BASE - KB(64), KB(128), 3, 0, 0, NV_ERR_INVALID_ADDRESS},
        {0, KB(64), 3, 0, 0, NV_ERR_INVALID_ADDRESS},
        {~0ull & ~(KB(64) - 1), KB(128), 3, 0, 0, NV_ERR_INVALID_ADDRESS}, // wraps
        {BASE + MB(2), KB(64), -1, 0, 0, NV_ERR_INVALID_OBJECT_HANDLE},
        {BASE + MB(2), KB(64), 3, 4096, 0, NV_ERR_INVALID_OFFSET},
        {BASE + MB(2), KB(128), 0, 0, 0, NV_ERR_INVALID_OFFSET}, // longer than the page
        {BASE + MB(2), KB(128), 1, KB(64), 0, NV_ERR_INVALID_OFFSET},
        {BASE + MB(2), KB(64), 3, MB(2), 0, NV_ERR_INVALID_OFFSET},
        {BASE + MB(2), KB(64), 3, ~0ull & ~(KB(64) - 1), 0, NV_ERR_INVALID_OFFSET}, // offset + length wraps
        {BASE + KB(64), KB(64), 3, 0, 0, NV_ERR_UVM_ADDRESS_IN_USE},
        {BASE, KB(128), 1, 0, 0, NV_ERR_UVM_ADDRESS_IN_USE}, // its second half is taken
    };

    start(&s);
    for (unsigned i = 0; i < COUNT(bad); i++)
        for (unsigned at = 0; at < 3; at++) {
            for (unsigned n = 0; n < 3; n++)
                ops[n] = vm_op(BASE + MB(4) + n * KB(256), KB(64), pages[3], n * KB(64), 0);
            ops[at] = vm_op(bad[i].va, bad[i].length, bad[i].page < 0 ? 999999 : pages[bad[i].page], bad[i].offset,
                            bad[i].flags);
            b = batch_of(ops, 3);
            run(UVM_VMEM_MAP, &b);
            CHECK_MSG(b.rmStatus == bad[i].status && b.out_failed == at,
                      "case %u as element %u: status 0x%x, not 0x%x; out_failed %u", i, at, b.rmStatus, bad[i].status,
                      b.out_failed);
            CHECK_EQ(b.out_pushes, 0);
        }
    UNCHANGED(&s);
}

// Between the halves that a GPU can address, whether with 49 bits or with 57.
TEST(test_err_out_of_reach)
{
    struct vm_state s;

    start(&s);
    CHECK_EQ(uvm_create_external(&u, 1ull << 60, MB(2)), NV_OK);
    CHECK_EQ(vm_map(&u, 1ull << 60, KB(64), pages[0], 0, 0), NV_ERR_OUT_OF_RANGE);
    CHECK_EQ(vm_unmap(&u, 1ull << 60, KB(64)), NV_ERR_OUT_OF_RANGE);
    UNCHANGED(&s);
}

TEST(test_err_unmap_elements)
{
    struct vm_state s;
    struct uvm_vmem_op ops[2];
    struct uvm_vmem_batch b;
    static const struct {
        uint64_t va, length;
        int page;
        uint64_t offset;
        NV_STATUS status;
    } bad[] = {
        {BASE + 4096, KB(64), -1, 0, NV_ERR_INVALID_ADDRESS},
        {BASE, 0, -1, 0, NV_ERR_INVALID_ADDRESS},
        {BASE, KB(64) - 1, -1, 0, NV_ERR_INVALID_ADDRESS},
        {BASE + MB(6), MB(4), -1, 0, NV_ERR_INVALID_ADDRESS},
        {BASE + KB(64), KB(64), 0, 0, NV_ERR_INVALID_ARGUMENT},
        {BASE + KB(64), KB(64), -1, KB(64), NV_ERR_INVALID_ARGUMENT},
        {BASE + KB(64), KB(64), 99, 0, NV_ERR_INVALID_ARGUMENT},
    };

    start(&s);
    for (unsigned i = 0; i < COUNT(bad); i++) {
        ops[0] = vm_op(BASE + KB(64), KB(64), 0, 0, 0);
        ops[1] = vm_op(bad[i].va, bad[i].length,
                       bad[i].page < 0     ? 0
                       : bad[i].page == 99 ? 777777
                                           : pages[bad[i].page],
                       bad[i].offset, 0);
        // the good element first would already have taken the page away for the case that names it
        b = batch_of(ops + 1, 1);
        run(UVM_VMEM_UNMAP, &b);
        CHECK_MSG(b.rmStatus == bad[i].status && b.out_failed == 0, "case %u: status 0x%x, not 0x%x; out_failed %u", i,
                  b.rmStatus, bad[i].status, b.out_failed);
        b = batch_of(ops, 2);
        CHECK(run(UVM_VMEM_UNMAP, &b) != NV_OK);
        CHECK_EQ(b.out_failed, 1);
    }
    UNCHANGED(&s);
}
