// A batch is all or nothing, whatever stops it; and what it costs is what it says.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

enum { N = 120 };

// As many elements as a call takes: more than one push holds, still one answer.
TEST(test_largest_batch)
{
    struct uvm u;
    struct uvm_vmem_query q;
    struct uvm_vmem_op *ops;
    struct uvm_vmem_batch b;
    struct vm_state s;
    uint64_t h, at;

    vm_start(&u, MB(2) * 128);
    q = vm_query(&u, 0);
    ops = calloc(q.out_max_ops, sizeof(*ops));
    CHECK_EQ(vm_create(&u, KB(64), 64, &h), NV_OK);
    CHECK_EQ(vm_open(&u, BASE, MB(2) * 128), NV_OK);
    vm_state_take(&u, BASE, MB(2) * 128, &s);
    for (uint32_t i = 0; i < q.out_max_ops; i++) // a stride that leaves no two neighbours
        ops[i] = vm_op(BASE + (uint64_t)(i * 37 % 4096) * GRANULE, KB(64), h + i % 64, 0, 0);
    ops[q.out_max_ops - 1].handle = 1ull << 50;
    CHECK_EQ(vm_map_ops(&u, 0, ops, q.out_max_ops, &b), NV_ERR_INVALID_OBJECT_HANDLE);
    CHECK_EQ(b.out_failed, q.out_max_ops - 1);
    vm_state_same(&u, BASE, &s, false);
    ops[q.out_max_ops - 1].handle = h;
    CHECK_EQ(vm_map_ops(&u, 0, ops, q.out_max_ops, &b), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, (uint64_t)q.out_max_ops * KB(64));
    CHECK(b.out_pushes <= 3);
    CHECK_EQ(b.out_waits, 1);
    for (unsigned i = 0; i < 64; i++) // each page through its first address, seen through its second
        CHECK_EQ(gpu_mark(&u, ops[i].va, KB(64), i + 1), 0);
    for (unsigned i = 64; i < 128; i++)
        CHECK(gpu_marked(&u, ops[i].va, KB(64), i - 63, &at));
    for (uint32_t i = 0; i < q.out_max_ops; i++)
        ops[i] = vm_op(ops[i].va, KB(64), 0, 0, 0);
    CHECK_EQ(vm_unmap_ops(&u, 0, ops, q.out_max_ops, &b), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    vm_state_same(&u, BASE, &s, false);
    sim_check(0);
}

// The most that one call may touch. Overlays opened one after the other have tables that lie side by side in memory, and
// UVM's PTE batch gathers entries of such tables inside the push without counting them.
static void check_states(const struct uvm *u, uint8_t state, uint32_t page_size)
{
    static struct simgpu_pte ptes[GB(4) / BLOCK];

    sim_walk(u, 0, BASE + KB(1088), BLOCK, ptes, COUNT(ptes));
    for (unsigned i = 0; i < COUNT(ptes); i++)
        CHECK_MSG(ptes[i].state == state && (!page_size || ptes[i].page_size == page_size),
                  "block %u is in state %u, size 0x%x", i, ptes[i].state, ptes[i].page_size);
    sim_check(0);
}

TEST(test_largest_range)
{
    struct uvm u;
    static struct uvm_vmem_op ops[UVM_VMEM_MAX_OPS];
    struct uvm_vmem_batch b;
    struct uvm_vmem_release r;
    uint64_t h;

    vm_start(&u, GB(4));
    CHECK_EQ(vm_create(&u, MB(2), 1, &h), NV_OK);
    CHECK_EQ(vm_open(&u, BASE, GB(4)), NV_OK);
    check_states(&u, SIMGPU_PTE_SPARSE, KB(64));

    for (unsigned i = 0; i < COUNT(ops); i++)
        ops[i] = vm_op(BASE + i * MB(1), MB(1), h, 0, 0);
    CHECK_EQ(vm_map_ops(&u, 0, ops, COUNT(ops), &b), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, GB(4));
    check_states(&u, SIMGPU_PTE_VALID, KB(64));
    CHECK_EQ(gpu_mark(&u, BASE, KB(64), 7), 0);
    CHECK(gpu_marked(&u, BASE + GB(4) - MB(1), KB(64), 7, &(uint64_t){0}));

    CHECK_EQ(vm_release(&u, &h, 1, &r), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    check_states(&u, SIMGPU_PTE_SPARSE, KB(64));
}

// As many 2 MiB entries, and all of them cut in one call.
TEST(test_largest_range_of_huge_entries)
{
    struct uvm u;
    static struct uvm_vmem_op ops[GB(4) / BLOCK];
    struct uvm_vmem_batch b;
    uint64_t h;

    vm_start(&u, GB(4));
    CHECK_EQ(vm_create(&u, MB(2), 1, &h), NV_OK);
    for (unsigned i = 0; i < COUNT(ops); i++)
        ops[i] = vm_op(BASE + i * BLOCK, BLOCK, h, 0, 0);
    CHECK_EQ(vm_map_ops(&u, 0, ops, COUNT(ops), &b), NV_OK);
    check_states(&u, SIMGPU_PTE_VALID, MB(2));

    for (unsigned i = 0; i < COUNT(ops); i++)
        ops[i] = vm_op(BASE + i * BLOCK, KB(64), 0, 0, 0);
    CHECK_EQ(vm_unmap_ops(&u, 0, ops, COUNT(ops), &b), NV_OK);
    CHECK_EQ(b.out_waits, 1);
    check_states(&u, SIMGPU_PTE_VALID, KB(64));
    CHECK_EQ(vm_unmap(&u, BASE, GB(4)), NV_OK);
    check_states(&u, SIMGPU_PTE_SPARSE, KB(64));
}

// 120 pages at 120 distant addresses, overlays there: one push, one invalidate, one wait, no call into RM. UVM's own calls,
// one for each, push an entry and a table each and ask RM for the handle and the entry.
static struct simgpu_counters maps_of_uvm(struct uvm *u)
{
    uvm_start(u);
    CHECK_EQ(uvm_create_external(u, BASE, MB(2) * N), NV_OK);
    sim_mem(u, 0, 0x77, KB(64), KB(64) * N);
    sim_counters(0, true);
    for (unsigned i = 0; i < N; i++)
        CHECK_EQ(uvm_map_external(u, 0, BASE + i * MB(2), KB(64), i * KB(64), 0x77), NV_OK);
    struct simgpu_counters c = sim_counters(0, false);
    uvm_close(u);
    sim_mem(u, 0, 0x77, 0, 0);
    return c;
}

TEST(test_batch_of_120_pages_costs_one_push)
{
    struct uvm u;
    struct uvm_vmem_op ops[N];
    struct uvm_vmem_batch b;
    struct uvm_vmem_release r;
    struct simgpu_counters c;
    uint64_t h, handles[N];

    c = maps_of_uvm(&u);
    CHECK_EQ(c.pushes, 2 * N);
    CHECK_EQ(c.inval_all + c.inval_targeted, 2 * N);
    CHECK_EQ(c.rm_calls, 2 * N);
    vm_start(&u, MB(2) * N);
    CHECK_EQ(vm_create(&u, KB(64), N, &h), NV_OK);
    CHECK_EQ(vm_open(&u, BASE, MB(2) * N), NV_OK);
    for (unsigned i = 0; i < N; i++) {
        ops[i] = vm_op(BASE + i * MB(2) + i % 32 * GRANULE, KB(64), h + i, 0, 0);
        handles[i] = h + i;
    }

    sim_counters(0, true);
    CHECK_EQ(vm_map_ops(&u, 0, ops, N, &b), NV_OK);
    c = sim_counters(0, false);
    CHECK_EQ(b.out_pushes, 1);
    CHECK_EQ(b.out_invalidates, 1);
    CHECK_EQ(b.out_waits, 1);
    CHECK_EQ(c.pushes, 1);
    CHECK_EQ(c.inval_all + c.inval_targeted, 1);
    CHECK_EQ(c.rm_calls, 0);

    for (unsigned i = 0; i < N; i++)
        ops[i] = vm_op(ops[i].va, KB(64), 0, 0, 0);
    sim_counters(0, true);
    CHECK_EQ(vm_unmap_ops(&u, 0, ops, N, &b), NV_OK);
    c = sim_counters(0, false);
    CHECK_EQ(b.out_pushes, 1);
    CHECK_EQ(b.out_waits, 1);
    CHECK_EQ(c.pushes, 1);
    CHECK_EQ(c.inval_all + c.inval_targeted, 1);
    CHECK_EQ(c.rm_calls, 0);

    for (unsigned i = 0; i < N; i++)
        ops[i] = vm_op(ops[i].va, KB(64), h + i, 0, 0);
    CHECK_EQ(vm_map_ops(&u, 0, ops, N, &b), NV_OK);
    sim_counters(0, true);
    CHECK_EQ(vm_release(&u, handles, N, &r), NV_OK);
    c = sim_counters(0, false);
    CHECK_EQ(r.out_pushes, 1);
    CHECK_EQ(r.out_waits, 1);
    CHECK_EQ(r.out_invalidates, 1);
    sim_check(0);
}
