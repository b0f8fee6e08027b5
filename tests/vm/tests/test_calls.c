// The effects of every call that succeeds.
//
// SPDX-License-Identifier: MIT
#include "calls.h"

static const uint64_t sizes[] = {KB(64), KB(128), KB(256), MB(2)};

TEST(test_query_without_gpu)
{
    struct uvm u;
    struct uvm_vmem_query q = {.size = sizeof(q)};

    uvm_open(&u);
    CHECK(ioctl(u.fd, UVM_VMEM_QUERY, &q) == 0);
    CHECK_EQ(q.rmStatus, NV_OK);
    CHECK_EQ(q.out_abi, UVM_VMEM_ABI);
    CHECK(q.out_max_ops >= 1024 && q.out_max_ops <= UVM_VMEM_MAX_OPS);
    CHECK(q.out_max_bytes >= GB(1) && q.out_max_bytes <= UVM_VMEM_MAX_BYTES);
    CHECK_EQ(q.out_bytes_held, 0);
    CHECK_EQ(q.out_bytes_total, 0);
}

TEST(test_query_gpu)
{
    struct uvm u;
    struct uvm_vmem_query q;

    uvm_start(&u);
    q = vm_query(&u, 0);
    CHECK_EQ(q.out_page_sizes, KB(64) | KB(128) | KB(256) | MB(2));
    CHECK(q.out_caps & UVM_VMEM_CAP_LIVE_REPLACE);
    CHECK(q.out_caps & UVM_VMEM_CAP_SPARSE);
    CHECK(q.out_bytes_total > 0 && q.out_bytes_free <= q.out_bytes_total);
    CHECK_EQ(q.out_bytes_held, 0);
}

TEST(test_pages_of_a_create_do_not_overlap)
{
    struct uvm u;
    uint64_t first;
    enum { N = 64 };

    vm_start(&u, MB(64));
    for (unsigned s = 0; s < COUNT(sizes); s++) {
        unsigned n = s == 3 ? 8 : N;
        CHECK_EQ(vm_create(&u, sizes[s], n, &first), NV_OK);
        for (unsigned i = 0; i < n; i++) {
            CHECK_EQ(vm_map(&u, BASE + i * sizes[s], sizes[s], first + i, 0, 0), NV_OK);
            CHECK_EQ(gpu_mark(&u, BASE + i * sizes[s], sizes[s], 0x1000 * s + i + 1), 0);
        }
        for (unsigned i = 0; i < n; i++) {
            uint64_t at;
            CHECK_MSG(gpu_marked(&u, BASE + i * sizes[s], sizes[s], 0x1000 * s + i + 1, &at),
                      "page %u of 0x%llx lost its data at 0x%llx", i, (unsigned long long)sizes[s],
                      (unsigned long long)at);
        }
        for (unsigned i = 0; i < n; i++)
            CHECK_EQ(vm_release_one(&u, first + i), NV_OK);
    }
    sim_check(0);
}

TEST(test_fresh_pages_read_as_zero)
{
    struct uvm u;
    uint64_t first;
    unsigned char *data = malloc(MB(2));

    vm_start(&u, MB(16));
    for (unsigned s = 0; s < COUNT(sizes); s++) {
        CHECK_EQ(vm_create(&u, sizes[s], 2, &first), NV_OK);
        for (unsigned i = 0; i < 2; i++) {
            CHECK_EQ(vm_map(&u, BASE, sizes[s], first + i, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
            memset(data, 0xff, MB(2));
            CHECK_EQ(gpu_access(&u, 0, false, BASE, data, sizes[s]), 0);
            for (uint64_t b = 0; b < sizes[s]; b++)
                CHECK_MSG(data[b] == 0, "byte 0x%llx of a fresh page of 0x%llx is 0x%02x", (unsigned long long)b,
                          (unsigned long long)sizes[s], data[b]);
        }
    }
}

TEST(test_map_overlay_rest_is_sparse)
{
    struct uvm u;
    uint64_t h, value = 0x1122334455667788ull;

    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 1, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE + KB(64) * 5, KB(64), h, 0, 0), NV_OK);
    for (unsigned i = 0; i < 32; i++)
        CHECK_EQ(sim_pte(&u, BASE + i * GRANULE).state, i == 5 ? SIMGPU_PTE_VALID : SIMGPU_PTE_SPARSE);
    CHECK_EQ(sim_pte(&u, BASE + BLOCK).state, SIMGPU_PTE_INVALID);
    CHECK_EQ(sim_pte(&u, BASE + KB(64) * 5).page_size, KB(64));
    CHECK_EQ(sim_pte(&u, BASE + KB(64) * 5).aperture, 0);
    CHECK_EQ(sim_pte(&u, BASE + KB(64) * 5).read_only, 0);
    CHECK_EQ(gpu_access(&u, 0, true, BASE + KB(64) * 5 + 24, &value, 8), 0);
    CHECK_EQ(gpu_word(&u, BASE + KB(64) * 5 + 24), value);
    // sparse: writes are dropped, reads return zero
    CHECK_EQ(gpu_access(&u, 0, true, BASE + KB(64) * 6, &value, 8), 0);
    CHECK_EQ(gpu_word(&u, BASE + KB(64) * 6), 0);
    CHECK(gpu_access(&u, 0, false, BASE + BLOCK, &value, 8) < 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, KB(64));
}

TEST(test_alias_one_page_at_many_addresses)
{
    struct uvm u;
    uint64_t h;

    vm_start(&u, MB(64));
    CHECK_EQ(vm_create(&u, KB(128), 1, &h), NV_OK);
    for (unsigned i = 0; i < 16; i++)
        CHECK_EQ(vm_map(&u, BASE + i * MB(4), KB(128), h, 0, 0), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 16 * KB(128));
    CHECK_EQ(gpu_mark(&u, BASE + 3 * MB(4), KB(128), 77), 0);
    for (unsigned i = 0; i < 16; i++)
        CHECK(gpu_marked(&u, BASE + i * MB(4), KB(128), 77, NULL));
    // release unmaps all of them before the memory is free
    CHECK_EQ(vm_release_one(&u, h), NV_OK);
    for (unsigned i = 0; i < 16; i++) {
        CHECK_EQ(sim_pte(&u, BASE + i * MB(4)).state, SIMGPU_PTE_SPARSE);
        CHECK_EQ(gpu_word(&u, BASE + i * MB(4)), 0);
    }
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    sim_check(0);
}

// A sparse entry that becomes a page is fenced as UVM fences one that goes; an entry that was invalid is not.
TEST(test_sparse_goes_behind_a_membar)
{
    struct simgpu_counters c;
    struct uvm u;
    uint64_t h;

    vm_start(&u, MB(8));
    CHECK_EQ(vm_create(&u, KB(64), 1, &h), NV_OK);
    CHECK_EQ(vm_open(&u, BASE, BLOCK), NV_OK);
    sim_counters(0, true);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
    c = sim_counters(0, true);
    CHECK_EQ(c.inval_ack, 1);
    // the entries of a new overlay were invalid
    sim_counters(0, true);
    CHECK_EQ(vm_map(&u, BASE + BLOCK, KB(64), h, 0, 0), NV_OK);
    c = sim_counters(0, true);
    CHECK_EQ(c.inval_ack, 0);
}

TEST(test_huge_page_gets_one_entry)
{
    struct uvm u;
    uint64_t h[2], at;

    vm_start(&u, MB(8));
    if (!(vm_query(&u, 0).out_caps & UVM_VMEM_CAP_HUGE))
        vmtest_skip("the module announces no UVM_VMEM_CAP_HUGE");
    CHECK_EQ(vm_create(&u, MB(2), 1, &h[0]), NV_OK);
    CHECK_EQ(vm_create(&u, MB(2), 1, &h[1]), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, MB(2), h[0], 0, 0), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE + KB(64)).page_size, MB(2));
    CHECK_EQ(vm_map(&u, BASE + MB(2), MB(2), h[1], 0, UVM_VMEM_MAP_64K), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE + MB(2)).page_size, KB(64));
    CHECK_EQ(gpu_mark(&u, BASE, MB(2), 9), 0);
    // cut in place when a part of it changes: the rest keeps its data
    CHECK_EQ(vm_unmap(&u, BASE + KB(64) * 7, KB(64)), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE).page_size, KB(64));
    CHECK(gpu_marked(&u, BASE, KB(64) * 7, 9, &at));
    CHECK(gpu_marked(&u, BASE + KB(64) * 8, MB(2) - KB(64) * 8, 9, &at));
    CHECK_EQ(gpu_word(&u, BASE + KB(64) * 7), 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, MB(4) - KB(64));
    CHECK_EQ(vm_release(&u, h, 2, NULL), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    sim_check(0);
}

TEST(test_huge_page_replaced_by_huge_page)
{
    struct uvm u;
    uint64_t h;

    vm_start(&u, MB(8));
    CHECK_EQ(vm_create(&u, MB(2), 2, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, MB(2), h, 0, 0), NV_OK);
    CHECK_EQ(gpu_mark(&u, BASE, MB(2), 1), 0);
    CHECK_EQ(vm_map(&u, BASE, MB(2), h + 1, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
    CHECK_EQ(gpu_word(&u, BASE), 0);
    CHECK_EQ(gpu_mark(&u, BASE, MB(2), 2), 0);
    CHECK_EQ(vm_release_one(&u, h), NV_OK); // no longer mapped anywhere
    CHECK(gpu_marked(&u, BASE, MB(2), 2, NULL));
    CHECK_EQ(vm_unmap(&u, BASE, MB(2)), NV_OK);
    CHECK_EQ(gpu_word(&u, BASE + KB(64)), 0);
    CHECK_EQ(vm_release_one(&u, h + 1), NV_OK);
    sim_check(0);
}

TEST(test_replace)
{
    struct uvm u;
    uint64_t h;

    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 2, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
    CHECK_EQ(gpu_mark(&u, BASE, KB(64), 1), 0);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h + 1, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
    CHECK_EQ(gpu_word(&u, BASE), 0);
    CHECK_EQ(vm_map(&u, BASE + KB(64), KB(64), h, 0, 0), NV_OK);
    CHECK(gpu_marked(&u, BASE + KB(64), KB(64), 1, NULL));
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, KB(128));
}

// The copy engines' TLB is another one: an invalidate that reaches only the SMs' is seen here.
TEST(test_replace_seen_by_copy_engines)
{
    struct uvm u;
    uint64_t h, value = 1;

    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 2, &h), NV_OK);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h, 0, 0), NV_OK);
    CHECK_EQ(gpu_access_ce(&u, 0, true, BASE, &value, 8), 0);
    CHECK_EQ(vm_map(&u, BASE, KB(64), h + 1, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
    CHECK_EQ(gpu_access_ce(&u, 0, false, BASE, &value, 8), 0);
    CHECK_EQ(value, 0);
    CHECK_EQ(uvm_unmap_external(&u, 0, BASE, BLOCK), NV_OK);
    CHECK(gpu_access_ce(&u, 0, false, BASE, &value, 8) < 0);
}

// A GPU with 49 bits of address gives user space as many as the CPU has. With 57 bits it gives the lower half of them,
// where every level of the tables has other indices than at BASE.
TEST(test_last_addresses)
{
    unsigned bits = sim_info(0).va_bits;
    uint64_t end = 1ull << (bits == 57 ? 56 : 47), base = end - MB(8), first, huge;
    struct uvm u;

    uvm_start(&u);
    CHECK_EQ(uvm_create_external(&u, base, MB(8)), NV_OK);
    CHECK_EQ(uvm_create_external(&u, end, MB(2)), NV_OK);
    CHECK_EQ(vm_create(&u, KB(64), 3, &first), NV_OK);
    CHECK_EQ(vm_map(&u, end, KB(64), first, 0, 0), NV_ERR_OUT_OF_RANGE);
    CHECK_EQ(vm_create(&u, MB(2), 1, &huge), NV_OK);
    CHECK_EQ(vm_map(&u, end - KB(64), KB(64), first, 0, 0), NV_OK);
    CHECK_EQ(vm_map(&u, base, KB(64), first + 1, 0, 0), NV_OK);
    CHECK_EQ(vm_map(&u, base + MB(2), MB(2), huge, 0, 0), NV_OK);
    CHECK_EQ(gpu_mark(&u, end - KB(64), KB(64), 1), 0);
    CHECK_EQ(gpu_mark(&u, base, KB(64), 2), 0);
    CHECK_EQ(gpu_mark(&u, base + MB(2), MB(2), 3), 0);
    CHECK(gpu_marked(&u, end - KB(64), KB(64), 1, NULL));
    CHECK(gpu_marked(&u, base, KB(64), 2, NULL));
    CHECK_EQ(vm_map(&u, end - KB(64), KB(64), first + 2, 0, UVM_VMEM_MAP_REPLACE), NV_OK);
    CHECK_EQ(gpu_word(&u, end - KB(64)), 0);
    CHECK_EQ(vm_map(&u, base + MB(2), KB(64), first, 0, UVM_VMEM_MAP_REPLACE), NV_OK); // cuts the 2 MiB entry
    CHECK(gpu_marked(&u, base + MB(2), KB(64), 1, NULL));
    CHECK(gpu_marked(&u, base + MB(2) + KB(64), MB(2) - KB(64), 3, NULL));
    CHECK_EQ(vm_release_one(&u, huge), NV_OK);
    CHECK_EQ(gpu_word(&u, base + MB(4) - KB(64)), 0);
    CHECK_EQ(vm_unmap(&u, base, MB(8)), NV_OK);
    CHECK_EQ(gpu_word(&u, end - KB(64)), 0);
    CHECK_EQ(uvm_unmap_external(&u, 0, base, MB(8)), NV_OK);
    CHECK(gpu_access(&u, 0, false, end - KB(64), &first, 8) < 0);
    sim_check(0);
}

TEST(test_handles_are_never_used_twice)
{
    struct uvm u;
    uint64_t last = 0, h;

    vm_start(&u, MB(4));
    for (unsigned i = 0; i < 200; i++) {
        CHECK_EQ(vm_create(&u, KB(64), 1 + i % 3, &h), NV_OK);
        CHECK(h > last);
        last = h + i % 3;
        for (unsigned n = 0; n < 1 + i % 3; n++)
            CHECK_EQ(vm_release_one(&u, h + n), NV_OK);
    }
}

TEST(test_slabs_are_shared_and_given_back)
{
    struct uvm u;
    uint64_t h, more;

    vm_start(&u, MB(4));
    CHECK_EQ(vm_create(&u, KB(64), 32, &h), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, MB(2));
    CHECK_EQ(vm_release_one(&u, h + 7), NV_OK);
    CHECK_EQ(vm_create(&u, KB(64), 1, &more), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, MB(2)); // the free 64 KiB were used
    CHECK_EQ(vm_release_one(&u, more), NV_OK);
    for (unsigned i = 0; i < 32; i++)
        if (i != 7)
            CHECK_EQ(vm_release_one(&u, h + i), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
}

TEST(test_two_gpus)
{
    struct uvm u;
    uint64_t h0, h1, value = 5, got = 0;
    struct uvm_vmem_op op;

    vm_start(&u, MB(8));
    if (u.gpus < 2)
        vmtest_skip("the simulator was loaded with one GPU");
    CHECK_EQ(uvm_register(&u, 1), NV_OK);
    CHECK_EQ(uvm_register_vaspace(&u, 1), NV_OK);
    CHECK_EQ(vm_create_on(&u, 0, KB(64), 1, &h0), NV_OK);
    CHECK_EQ(vm_create_on(&u, 1, KB(64), 1, &h1), NV_OK);
    CHECK_EQ(vm_query(&u, 0).out_bytes_created, KB(64));
    CHECK_EQ(vm_query(&u, 1).out_bytes_created, KB(64));
    // one address, one page per GPU
    op = vm_op(BASE, KB(64), h0, 0, 0);
    CHECK_EQ(vm_map_ops(&u, 0, &op, 1, NULL), NV_OK);
    CHECK_EQ(vm_map_ops(&u, 1, &op, 1, NULL), NV_ERR_INVALID_OBJECT_HANDLE);
    op.handle = h1;
    CHECK_EQ(vm_map_ops(&u, 1, &op, 1, NULL), NV_OK);
    CHECK_EQ(gpu_access(&u, 0, true, BASE, &value, 8), 0);
    CHECK_EQ(gpu_access(&u, 1, false, BASE, &got, 8), 0);
    CHECK_EQ(got, 0);
    CHECK_EQ(uvm_unregister_vaspace(&u, 1), NV_OK);
    CHECK_EQ(uvm_unregister(&u, 1), NV_OK);
    CHECK_EQ(gpu_word(&u, BASE), 5); // the other GPU's page stays
    CHECK_EQ(vm_release_one(&u, h1), NV_ERR_INVALID_OBJECT_HANDLE);
    sim_check(0);
    sim_check(1);
}
