// SPDX-License-Identifier: MIT
#include "calls.h"

#define CALL(u, cmd, p)                                                          \
    do {                                                                         \
        (p)->size = sizeof(*(p));                                                \
        (p)->rmStatus = 0xdeadu;                                                 \
        CHECK_MSG(ioctl((u)->fd, cmd, p) == 0, "%s: %s", #cmd, strerror(errno)); \
    } while (0)

struct uvm_vmem_query vm_query(const struct uvm *u, unsigned gpu)
{
    struct uvm_vmem_query q = {0};

    memcpy(q.gpu_uuid, &u->uuid[gpu], 16);
    CALL(u, UVM_VMEM_QUERY, &q);
    CHECK_EQ(q.rmStatus, NV_OK);
    return q;
}

NV_STATUS vm_create_on(const struct uvm *u, unsigned gpu, uint64_t page_size, uint32_t count, uint64_t *first)
{
    struct uvm_vmem_create p = {.page_size = page_size, .count = count};

    memcpy(p.gpu_uuid, &u->uuid[gpu], 16);
    CALL(u, UVM_VMEM_CREATE, &p);
    if (first)
        *first = p.out_handle;
    return p.rmStatus;
}

NV_STATUS vm_create(const struct uvm *u, uint64_t page_size, uint32_t count, uint64_t *first)
{
    return vm_create_on(u, 0, page_size, count, first);
}

NV_STATUS vm_release(const struct uvm *u, const uint64_t *handles, uint32_t count, struct uvm_vmem_release *out)
{
    struct uvm_vmem_release p = {.handles = (uintptr_t)handles, .count = count};

    CALL(u, UVM_VMEM_RELEASE, &p);
    if (out)
        *out = p;
    return p.rmStatus;
}

NV_STATUS vm_release_one(const struct uvm *u, uint64_t handle) { return vm_release(u, &handle, 1, NULL); }

static struct uvm_vmem_batch batch(const struct uvm *u, unsigned gpu, const struct uvm_vmem_op *ops, uint32_t n)
{
    struct uvm_vmem_batch b = {.ops = (uintptr_t)ops, .count = n, .opSize = sizeof(*ops)};

    memcpy(b.gpu_uuid, &u->uuid[gpu], 16);
    return b;
}

NV_STATUS vm_map_ops(const struct uvm *u, unsigned gpu, const struct uvm_vmem_op *ops, uint32_t n,
                     struct uvm_vmem_batch *out)
{
    struct uvm_vmem_batch b = batch(u, gpu, ops, n);

    CALL(u, UVM_VMEM_MAP, &b);
    if (out)
        *out = b;
    return b.rmStatus;
}

NV_STATUS vm_unmap_ops(const struct uvm *u, unsigned gpu, const struct uvm_vmem_op *ops, uint32_t n,
                       struct uvm_vmem_batch *out)
{
    struct uvm_vmem_batch b = batch(u, gpu, ops, n);

    CALL(u, UVM_VMEM_UNMAP, &b);
    if (out)
        *out = b;
    return b.rmStatus;
}

NV_STATUS vm_map(const struct uvm *u, uint64_t va, uint64_t length, uint64_t handle, uint64_t offset, uint32_t flags)
{
    struct uvm_vmem_op op = vm_op(va, length, handle, offset, flags);

    return vm_map_ops(u, 0, &op, 1, NULL);
}

NV_STATUS vm_unmap(const struct uvm *u, uint64_t va, uint64_t length)
{
    struct uvm_vmem_op op = vm_op(va, length, 0, 0, 0);

    return vm_unmap_ops(u, 0, &op, 1, NULL);
}

NV_STATUS vm_open(const struct uvm *u, uint64_t va, uint64_t length)
{
    struct uvm_vmem_op *ops = calloc(length / BLOCK + 2, sizeof(*ops));
    uint64_t page, end = va + length;
    uint32_t n = 0;
    NV_STATUS status;

    CHECK_EQ(vm_create(u, BLOCK, 1, &page), NV_OK);
    for (uint64_t at = va, next; at < end; at = next) {
        next = (at / BLOCK + 1) * BLOCK < end ? (at / BLOCK + 1) * BLOCK : end;
        ops[n++] = vm_op(at, next - at, page, 0, UVM_VMEM_MAP_64K);
    }
    status = vm_map_ops(u, 0, ops, n, NULL);
    CHECK_EQ(vm_release_one(u, page), NV_OK);
    free(ops);
    return status;
}

void vm_start(struct uvm *u, uint64_t length)
{
    struct uvm_vmem_query q = {.size = sizeof(q)};

    uvm_start(u);
    if (ioctl(u->fd, UVM_VMEM_QUERY, &q) && errno == EINVAL)
        FAIL("this nvidia-uvm.ko does not know vMem's ioctls");
    CHECK_EQ(uvm_create_external(u, BASE, length), NV_OK);
    uvm_guard(u, BASE - BLOCK);
    uvm_guard(u, BASE + length);
}

void vm_state_take(const struct uvm *u, uint64_t va, uint64_t length, struct vm_state *s)
{
    s->query = vm_query(u, 0);
    s->count = length / GRANULE;
    s->ptes = calloc(s->count, sizeof(*s->ptes));
    sim_walk(u, 0, va, GRANULE, s->ptes, s->count);
}

void vm_state_same(const struct uvm *u, uint64_t va, const struct vm_state *before, bool overlays)
{
    struct vm_state now;

    vm_state_take(u, va, before->count * GRANULE, &now);
    CHECK_EQ(now.query.out_bytes_held, before->query.out_bytes_held);
    CHECK_EQ(now.query.out_bytes_created, before->query.out_bytes_created);
    CHECK_EQ(now.query.out_bytes_mapped, before->query.out_bytes_mapped);
    for (uint32_t i = 0; i < now.count; i++) {
        const struct simgpu_pte *a = &before->ptes[i], *b = &now.ptes[i];
        unsigned long long at = va + i * GRANULE;
        if (overlays && a->state == SIMGPU_PTE_INVALID && b->state == SIMGPU_PTE_SPARSE)
            continue;
        CHECK_MSG(a->state == b->state && a->phys == b->phys && a->page_size == b->page_size,
                  "0x%llx was state %u phys 0x%llx size 0x%x, is state %u phys 0x%llx size 0x%x", at, a->state,
                  (unsigned long long)a->phys, a->page_size, b->state, (unsigned long long)b->phys, b->page_size);
    }
    vm_state_free(&now);
}

void vm_state_free(struct vm_state *s)
{
    free(s->ptes);
    s->ptes = NULL;
}
