// How the uvm backend turns runs into calls of the module: cut where they must be, as few calls as the module's limits
// allow, and all or nothing across calls. The module here is a table of 64 KiB entries behind ioctl().
//
// SPDX-License-Identifier: MIT
#include <stdarg.h>

#include "harness.h"
#include "backend/uvm/uvm.h"
#include "core/core.h"
#include "../../uvm_ext/uvm_vmem_status.h"

#define BASE (UINT64_C(1) << 40)
#define SEGMENTS 8
#define GRANULES (SEGMENTS * UVM_SEGMENT / UVM_VMEM_GRANULE)
#define MODULE_FD 12345

// ---- the module ---------------------------------------------------------------------------------------------

static struct {
    struct {
        uint64_t handle, offset;
        uint32_t flags;
        bool open;
    } entry[GRANULES];
    uint64_t next_handle;
    bool alive[4096]; // by handle
    unsigned calls, creates, pages;
    uint32_t max_ops;
    uint64_t max_bytes;
    unsigned releases, refuse; // RELEASE refuses from this call on; 0: never
    uint32_t release_most;     // handles, as if each were mapped at many addresses; 0: no limit
    unsigned fail_call;        // the call, counted down, that fails ...
    uint32_t fail_op;          // ... at this element
} module;

static uint32_t check_op(const struct uvm_vmem_op *op, bool map)
{
    uint64_t first = op->va - BASE;

    CHECK(op->va % UVM_VMEM_GRANULE == 0 && op->length && op->length % UVM_VMEM_GRANULE == 0);
    CHECK(op->va >= BASE && op->va + op->length <= BASE + SEGMENTS * UVM_SEGMENT);
    CHECK_EQ(first / UVM_SEGMENT, (first + op->length - 1) / UVM_SEGMENT); // one external range
    CHECK_EQ(op->reserved, 0);
    if (!map) {
        CHECK_EQ(op->handle | op->offset | op->flags, 0);
        return 0;
    }
    if (op->flags & UVM_VMEM_MAP_OPEN) {
        CHECK_EQ(op->handle | op->offset, 0);
        CHECK_EQ(op->flags, UVM_VMEM_MAP_OPEN | UVM_VMEM_TAKEOVER);
        return 0;
    }
    CHECK(op->handle < module.next_handle && module.alive[op->handle]);
    if (op->flags & UVM_VMEM_MAP_AHEAD) // not in the last block of a range
        CHECK((first + op->length - 1) % UVM_SEGMENT < UVM_SEGMENT - UVM_VMEM_BLOCK);
    CHECK(op->offset % UVM_VMEM_GRANULE == 0 && op->offset + op->length <= VMEM_PAGE_2M);
    CHECK(op->flags & UVM_VMEM_TAKEOVER);
    for (uint64_t at = 0; at < op->length; at += UVM_VMEM_GRANULE)
        if (module.entry[(first + at) / UVM_VMEM_GRANULE].handle && !(op->flags & UVM_VMEM_MAP_REPLACE))
            return NV_ERR_UVM_ADDRESS_IN_USE;
    return 0;
}

static void do_op(const struct uvm_vmem_op *op, bool map)
{
    for (uint64_t at = 0; at < op->length; at += UVM_VMEM_GRANULE) {
        uint64_t i = (op->va - BASE + at) / UVM_VMEM_GRANULE;

        module.entry[i].open = op->flags & UVM_VMEM_MAP_OPEN;
        if (module.entry[i].open)
            continue;
        module.entry[i].handle = map ? op->handle : 0;
        module.entry[i].offset = map ? op->offset + at : 0;
        module.entry[i].flags = op->flags;
    }
}

static void do_batch(struct uvm_vmem_batch *b, bool map)
{
    const struct uvm_vmem_op *ops = (const void *)(uintptr_t)b->ops;
    uint64_t bytes = 0;

    module.calls++;
    CHECK(b->count >= 1 && b->count <= module.max_ops);
    CHECK_EQ(b->opSize, sizeof(*ops));
    b->out_failed = UVM_VMEM_NO_OP;
    for (uint32_t i = 0; i < b->count && !b->rmStatus; i++) {
        b->rmStatus = check_op(&ops[i], map);
        if (b->rmStatus)
            b->out_failed = i;
        bytes += ops[i].length;
    }
    CHECK(bytes <= module.max_bytes);
    if (module.fail_call && --module.fail_call == 0) {
        b->rmStatus = NV_ERR_NO_MEMORY;
        b->out_failed = module.fail_op;
    }
    for (uint32_t i = 0; i < b->count && !b->rmStatus; i++)
        do_op(&ops[i], map);
}

static void do_create(struct uvm_vmem_create *c)
{
    module.creates++;
    CHECK_EQ(c->page_size, VMEM_PAGE_2M);
    CHECK(c->count >= 1 && c->count <= module.max_ops && c->count * VMEM_PAGE_2M <= module.max_bytes);
    if (module.fail_call && --module.fail_call == 0) {
        c->rmStatus = NV_ERR_NO_MEMORY;
        return;
    }
    c->out_handle = module.next_handle;
    for (uint32_t i = 0; i < c->count; i++)
        module.alive[module.next_handle++] = true;
    module.pages += c->count;
}

static void do_release(struct uvm_vmem_release *r)
{
    const uint64_t *handles = (const void *)(uintptr_t)r->handles;

    CHECK(r->count >= 1 && r->count <= module.max_ops);
    if (module.release_most && r->count > module.release_most) {
        r->rmStatus = NV_ERR_INVALID_LIMIT;
        return;
    }
    if (++module.releases >= module.refuse && module.refuse) {
        r->rmStatus = NV_ERR_NO_MEMORY;
        return;
    }
    for (uint32_t i = 0; i < r->count; i++) {
        CHECK(module.alive[handles[i]]);
        module.alive[handles[i]] = false;
    }
    module.pages -= r->count;
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list args;
    void *params;

    va_start(args, request);
    params = va_arg(args, void *);
    va_end(args);
    CHECK_EQ(fd, MODULE_FD);
    switch (request) {
    case UVM_VMEM_MAP: do_batch(params, true); break;
    case UVM_VMEM_UNMAP: do_batch(params, false); break;
    case UVM_VMEM_CREATE: do_create(params); break;
    case UVM_VMEM_RELEASE: do_release(params); break;
    default: FAIL("unknown request 0x%lx", request);
    }
    return 0;
}

// ---- a backend with an arena and a reservation --------------------------------------------------------------------

static vmem_context context; // what vmem__interrupted() asks
static struct vmem__backend *const backend = &context.b;
static struct uvm uvm;
static struct vmem__cuda_reservation cuda_reservation;
static struct vmem__reservation reservation;
static struct vmem__arena arena, other;

static void start(uint32_t max_ops, uint64_t max_bytes, uint64_t arena_size)
{
    static uint64_t active = (1u << SEGMENTS) - 1; // nothing is left to activate: no CUDA is needed

    memset(&module, 0, sizeof(module));
    module.next_handle = 1;
    module.max_ops = max_ops;
    module.max_bytes = max_bytes;
    context = (vmem_context){.lock = PTHREAD_MUTEX_INITIALIZER, .b = {.priv = &uvm}};
    uvm = (struct uvm){.gpu = {.backdrop = {.segment = UVM_SEGMENT}},
                       .lock = PTHREAD_MUTEX_INITIALIZER,
                       .kmod = {.fd = MODULE_FD,
                                .max_ops = max_ops,
                                .max_bytes = max_bytes,
                                .syscalls = &backend->syscalls}};
    cuda_reservation = (struct vmem__cuda_reservation){.addr = BASE,
                                                       .length = SEGMENTS * UVM_SEGMENT,
                                                       .active = &active,
                                                       .lock = PTHREAD_MUTEX_INITIALIZER};
    reservation = (struct vmem__reservation){.addr = BASE, .length = SEGMENTS * UVM_SEGMENT, .priv = &cuda_reservation};
    arena = other = (struct vmem__arena){.size = arena_size};
    CHECK_EQ(vmem__uvm_arena_new(backend, &arena), 0);
    CHECK_EQ(vmem__uvm_arena_new(backend, &other), 0);
    module.calls = 0;
}

static void end(void)
{
    vmem__uvm_arena_free(backend, &arena);
    vmem__uvm_arena_free(backend, &other);
    CHECK_EQ(module.pages, 0);
}

static struct vmem__run run(uint64_t at, uint64_t length, struct vmem__arena *a, uint64_t offset, uint32_t flags)
{
    return (struct vmem__run){.reservation = &reservation,
                              .addr = BASE + at,
                              .length = length,
                              .arena = a,
                              .offset = offset,
                              .page_size = VMEM_PAGE_64K,
                              .flags = flags};
}

// The arena's and the offset's memory, or nothing, stands behind all of [at, at + length).
static void expect(uint64_t at, uint64_t length, struct vmem__arena *a, uint64_t offset)
{
    for (uint64_t done = 0; done < length; done += UVM_VMEM_GRANULE) {
        uint64_t i = (at + done) / UVM_VMEM_GRANULE, from = offset + done;
        const struct uvm_arena *pages = a ? a->priv : NULL;

        if (!a) {
            CHECK_EQ(module.entry[i].handle, 0);
            continue;
        }
        CHECK_EQ(module.entry[i].handle,
                 pages->first[from / VMEM_PAGE_2M / pages->chunk] + from / VMEM_PAGE_2M % pages->chunk);
        CHECK_EQ(module.entry[i].offset, from % VMEM_PAGE_2M);
    }
}

// ---- tests --------------------------------------------------------------------------------------------------

static void test_one_call_for_120_scattered_pages(void)
{
    struct vmem__run runs[120];
    size_t bad;

    start(4096, UVM_VMEM_MAX_BYTES, 32 * MIB);
    for (unsigned i = 0; i < 120; i++)
        runs[i] = run(i * 4 * MIB, 64 * KIB, &arena, (119 - i) * 64 * KIB, 0);
    backend->syscalls = 0;
    CHECK_EQ(vmem__uvm_map(backend, runs, 120, &bad), 0);
    CHECK_EQ(module.calls, 1);
    CHECK_EQ(backend->syscalls, 1);
    for (unsigned i = 0; i < 120; i++)
        expect(i * 4 * MIB, 64 * KIB, &arena, (119 - i) * 64 * KIB);
    CHECK_EQ(vmem__uvm_unmap(backend, runs, 120, &bad), 0);
    CHECK_EQ(module.calls, 2);
    expect(0, SEGMENTS * UVM_SEGMENT, NULL, 0);
    end();
}

static void test_a_run_across_segments_and_handles_is_one_call(void)
{
    // Neither its addresses nor its offsets are multiples of 2 MiB.
    struct vmem__run r;
    size_t bad;

    start(4096, UVM_VMEM_MAX_BYTES, 256 * MIB);
    r = run(60 * MIB + 64 * KIB, 200 * MIB, &arena, 3 * MIB + 192 * KIB, 0);
    CHECK_EQ(vmem__uvm_map(backend, &r, 1, &bad), 0);
    CHECK_EQ(module.calls, 1);
    expect(0, 60 * MIB + 64 * KIB, NULL, 0);
    expect(r.addr - BASE, r.length, &arena, r.offset);
    expect(r.addr - BASE + r.length, 64 * KIB, NULL, 0);
    CHECK_EQ(vmem__uvm_unmap(backend, &r, 1, &bad), 0);
    CHECK_EQ(module.calls, 2);
    expect(0, SEGMENTS * UVM_SEGMENT, NULL, 0);
    end();
}

static void test_limits_of_one_call_are_kept_with_as_few_calls_as_possible(void)
{
    struct vmem__run runs[100];
    size_t bad;

    start(10, UVM_VMEM_MAX_BYTES, 8 * MIB);
    for (unsigned i = 0; i < 100; i++)
        runs[i] = run(i * 128 * KIB, 64 * KIB, &arena, i * 64 * KIB, 0);
    CHECK_EQ(vmem__uvm_map(backend, runs, 100, &bad), 0);
    CHECK_EQ(module.calls, 10);
    for (unsigned i = 0; i < 100; i++)
        expect(i * 128 * KIB, 64 * KIB, &arena, i * 64 * KIB);
    end();

    start(4096, UVM_SEGMENT, 256 * MIB);
    runs[0] = run(0, 256 * MIB, &arena, 0, 0);
    CHECK_EQ(vmem__uvm_map(backend, runs, 1, &bad), 0);
    CHECK_EQ(module.calls, 4 + 1); // one opens the block behind it
    expect(0, 256 * MIB, &arena, 0);
    end();
}

static void test_a_failed_map_leaves_nothing_mapped_and_names_the_run(void)
{
    struct vmem__run runs[20];
    size_t bad;

    start(4, UVM_VMEM_MAX_BYTES, 32 * MIB);
    for (unsigned call = 1; call <= 5; call++) {
        for (unsigned i = 0; i < 20; i++)
            runs[i] = run(i * MIB, 128 * KIB, &arena, i * 128 * KIB, 0);
        module.fail_call = call;
        module.fail_op = 2;
        CHECK_EQ(vmem__uvm_map(backend, runs, 20, &bad), -ENOMEM);
        CHECK_EQ(bad, 4 * (call - 1) + 2);
        CHECK(strstr(vmem_last_error(), "map at 0x"));
        expect(0, SEGMENTS * UVM_SEGMENT, NULL, 0);
    }
    end();
}

static void test_a_run_that_fails_in_its_middle_is_taken_back(void)
{
    struct vmem__run r;
    size_t bad;

    start(4, UVM_VMEM_MAX_BYTES, 64 * MIB);
    r = run(MIB, 40 * MIB, &arena, 64 * KIB, 0);
    module.fail_call = 3;
    module.fail_op = UVM_VMEM_NO_OP;
    CHECK_EQ(vmem__uvm_map(backend, &r, 1, &bad), -ENOMEM);
    CHECK_EQ(bad, 0);
    expect(0, SEGMENTS * UVM_SEGMENT, NULL, 0);
    end();
}

static void test_a_failed_replacement_brings_the_old_pages_back(void)
{
    struct vmem__run before[12], after[12];
    size_t bad;

    start(4, UVM_VMEM_MAX_BYTES, 32 * MIB);
    for (unsigned i = 0; i < 12; i++) {
        before[i] = run(i * 4 * MIB, 3 * MIB, &arena, i * 2 * MIB + 64 * KIB, 0);
        after[i] = run(i * 4 * MIB, 3 * MIB, &other, i * 2 * MIB + MIB, VMEM_MAP_REPLACE);
        if (i % 2) { // every other one takes the place of something
            after[i].old_arena = &arena;
            after[i].old_offset = before[i].offset;
            CHECK_EQ(vmem__uvm_map(backend, &before[i], 1, &bad), 0);
        }
    }
    module.fail_call = 4;
    module.fail_op = 0;
    CHECK_EQ(vmem__uvm_map(backend, after, 12, &bad), -ENOMEM);
    for (unsigned i = 0; i < 12; i++)
        expect(i * 4 * MIB, 3 * MIB, i % 2 ? &arena : NULL, i * 2 * MIB + 64 * KIB);
    CHECK_EQ(vmem__uvm_map(backend, after, 12, &bad), 0);
    for (unsigned i = 0; i < 12; i++)
        expect(i * 4 * MIB, 3 * MIB, &other, i * 2 * MIB + MIB);
    end();
}

static void test_a_failed_unmap_leaves_everything_mapped(void)
{
    struct vmem__run runs[10];
    size_t bad;

    start(4, UVM_VMEM_MAX_BYTES, 32 * MIB);
    for (unsigned i = 0; i < 10; i++)
        runs[i] = run(i * 4 * MIB, MIB, &arena, i * MIB, 0);
    CHECK_EQ(vmem__uvm_map(backend, runs, 10, &bad), 0);
    module.fail_call = 3;
    module.fail_op = 1;
    CHECK_EQ(vmem__uvm_unmap(backend, runs, 10, &bad), -ENOMEM);
    CHECK_EQ(bad, 9);
    for (unsigned i = 0; i < 10; i++)
        expect(i * 4 * MIB, MIB, &arena, i * MIB);
    end();
}

static void test_what_is_mapped_is_not_mapped_over_unasked(void)
{
    struct vmem__run r;
    size_t bad;

    start(64, UVM_VMEM_MAX_BYTES, 32 * MIB);
    r = run(0, MIB, &arena, 0, 0);
    CHECK_EQ(vmem__uvm_map(backend, &r, 1, &bad), 0);
    r = run(0, MIB, &other, 0, 0);
    CHECK_EQ(vmem__uvm_map(backend, &r, 1, &bad), -EEXIST);
    expect(0, MIB, &arena, 0);
    end();
}

// A page that may be replaced alone beside running kernels must not share an entry with others.
static void test_only_2m_pages_may_get_2m_entries(void)
{
    struct vmem__run runs[2];
    size_t bad;

    start(64, UVM_VMEM_MAX_BYTES, 32 * MIB);
    runs[0] = run(0, 2 * MIB, &arena, 0, 0);
    runs[1] = run(2 * MIB, 2 * MIB, &arena, 2 * MIB, 0);
    runs[1].page_size = VMEM_PAGE_2M;
    CHECK_EQ(vmem__uvm_map(backend, runs, 2, &bad), 0);
    CHECK(module.entry[0].flags & UVM_VMEM_MAP_64K && module.entry[0].flags & UVM_VMEM_MAP_AHEAD);
    CHECK(!(module.entry[32].flags & (UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD)));
    end();
}

// Behind the last page of a segment, the next one of the same reservation is opened, and never what is behind the
// reservation.
static void test_nothing_is_taken_behind_the_reservation(void)
{
    struct vmem__run r;
    size_t bad;

    start(64, UVM_VMEM_MAX_BYTES, 128 * MIB);
    for (uint64_t at = 61 * MIB; at < SEGMENTS * UVM_SEGMENT; at += at % UVM_SEGMENT == 61 * MIB ? 2 * MIB : 62 * MIB) {
        uint64_t next = (at / UVM_SEGMENT + 1) * (UVM_SEGMENT / UVM_VMEM_GRANULE);
        bool last = at % UVM_SEGMENT == 63 * MIB;

        r = run(at, 64 * KIB, &arena, 0, 0);
        CHECK_EQ(vmem__uvm_map(backend, &r, 1, &bad), 0);
        CHECK(last || module.entry[at / UVM_VMEM_GRANULE].flags & UVM_VMEM_MAP_AHEAD);
        CHECK(next == GRANULES || module.entry[next].open == last);
    }
    CHECK_EQ(module.calls, 3 * SEGMENTS - 1);
    r = run(60 * MIB, 4 * MIB, &arena, 0, VMEM_MAP_REPLACE); // a 2 MiB page is read by no tile past its end
    r.page_size = VMEM_PAGE_2M;
    module.calls = 0;
    CHECK_EQ(vmem__uvm_map(backend, &r, 1, &bad), 0);
    CHECK_EQ(module.calls, 1);
    end();
}

static void test_arenas_are_created_whole_or_not_at_all(void)
{
    struct vmem__arena a = {.size = 50 * MIB};
    unsigned creates, pages;

    start(8, UVM_VMEM_MAX_BYTES, 32 * MIB);
    creates = module.creates;
    pages = module.pages;
    CHECK_EQ(vmem__uvm_arena_new(backend, &a), 0);
    CHECK_EQ(module.creates - creates, 4); // 25 pages, 8 in a call
    CHECK_EQ(module.pages - pages, 25);
    vmem__uvm_arena_free(backend, &a);
    CHECK_EQ(module.pages, pages);
    module.fail_call = 3;
    CHECK_EQ(vmem__uvm_arena_new(backend, &a), -ENOMEM);
    CHECK_EQ(module.pages, pages);
    end();
}

// Granules that RELEASE refuses are neither lost nor released twice: they go with the next arena.
static void test_a_refused_release_is_tried_again(void)
{
    struct vmem__arena a = {.size = 50 * MIB}, b = {.size = 20 * MIB};
    unsigned pages;

    start(4, UVM_VMEM_MAX_BYTES, 32 * MIB);
    pages = module.pages;
    CHECK_EQ(vmem__uvm_arena_new(backend, &a), 0);
    CHECK_EQ(vmem__uvm_arena_new(backend, &b), 0);
    module.releases = 0;
    module.refuse = 3; // after 8 pages
    vmem__uvm_arena_free(backend, &a);
    CHECK_EQ(module.pages, pages + 25 - 8 + 10);
    CHECK_EQ(backend->overhead, 50 * MIB);
    vmem__uvm_arena_free(backend, &b);
    CHECK_EQ(module.pages, pages + 25 - 8 + 10);
    CHECK_EQ(backend->overhead, 70 * MIB);
    module.fail_call = 2; // of an arena that is not made, the first pages cannot be given back either
    CHECK_EQ(vmem__uvm_arena_new(backend, &a), -ENOMEM);
    CHECK_EQ(module.pages, pages + 25 - 8 + 10 + 4);
    module.refuse = 0;
    CHECK_EQ(vmem__uvm_arena_new(backend, &a), 0);
    CHECK_EQ(module.pages, pages + 25);
    CHECK_EQ(backend->overhead, 0);
    vmem__uvm_arena_free(backend, &a);
    end();
}

static void test_handles_mapped_at_many_addresses_are_released_fewer_at_a_time(void)
{
    start(64, UVM_VMEM_MAX_BYTES, 200 * MIB);
    module.release_most = 3;
    end(); // which counts
}

int main(void)
{
    test_one_call_for_120_scattered_pages();
    test_a_run_across_segments_and_handles_is_one_call();
    test_limits_of_one_call_are_kept_with_as_few_calls_as_possible();
    test_a_failed_map_leaves_nothing_mapped_and_names_the_run();
    test_a_run_that_fails_in_its_middle_is_taken_back();
    test_a_failed_replacement_brings_the_old_pages_back();
    test_a_failed_unmap_leaves_everything_mapped();
    test_what_is_mapped_is_not_mapped_over_unasked();
    test_only_2m_pages_may_get_2m_entries();
    test_nothing_is_taken_behind_the_reservation();
    test_arenas_are_created_whole_or_not_at_all();
    test_a_refused_release_is_tried_again();
    test_handles_mapped_at_many_addresses_are_released_fewer_at_a_time();
    return 0;
}
