// The patched module's calls on the fake driver; fakegpu.c includes this, nobody else.
//
// As in the kernel, a 2 MiB block that a page was mapped in is an overlay: each 64 KiB of it is a page or sparse,
// whatever CUDA mapped there before. A call changes all that it was asked to or nothing. Few elements and bytes per
// call are allowed, so that batches need several. An entry of 2 MiB that would have to be cut beside a page that stays
// ends the program. The kernel passes through an invalid entry then, and a backend that promises live replacement must
// never ask for it. So does MAP_AHEAD in the last block of a range, behind which somebody else's memory may begin.
//
// SPDX-License-Identifier: MIT
#include "../../uvm_ext/uvm_vmem_ioctl.h"

#define KMOD_CLIENT 0xffffffffu // whose memory a page of the module is, among RM's clients and CUDA
#define KMOD_OPS 48
#define KMOD_BYTES (UINT64_C(96) << 20)
#define KMOD_SIZES (PAGE | PAGE << 1 | PAGE << 2 | BLOCK) // that CREATE accepts

#define ILLEGAL_ACTION 0x16
#define INVALID_DEVICE 0x26
#define INVALID_LIMIT 0x2e
#define INVALID_OFFSET 0x37
#define ADDRESS_IN_USE 0x68

struct kmod_entry {
    struct memory *page; // NULL: sparse
    uint64_t offset;
    bool overlay; // of an overlay; otherwise CUDA's or the stock calls'
    bool huge;
};

static uint64_t kmod_next = 1;

static struct kmod_entry *kmod_entry_at(struct mapping *m, uint64_t va)
{
    if (!m->kmod)
        m->kmod = calloc(m->size / PAGE, sizeof(*m->kmod));
    return &m->kmod[(va - m->addr) / PAGE];
}

static void kmod_set(struct mapping *m, uint64_t va, struct memory *page, uint64_t offset, bool huge)
{
    *kmod_entry_at(m, va) = (struct kmod_entry){page, offset, true, huge};
    if (page)
        place(va, PAGE, PROT_READ | PROT_WRITE, memfd, page->offset + offset);
    else
        place(va, PAGE, PROT_READ | PROT_WRITE, -1, 0);
}

static uint32_t kmod_check(const struct uvm_vmem_op *op, bool map)
{
    const bool open = map && op->flags & UVM_VMEM_MAP_OPEN;
    const uint32_t flags = open  ? UVM_VMEM_MAP_OPEN | UVM_VMEM_TAKEOVER
                           : map ? UVM_VMEM_TAKEOVER | UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD
                                 : 0;
    struct mapping *m = mapping_at(op->va, op->length);
    struct memory *page = memory_find(op->handle, KMOD_CLIENT);

    if (op->reserved || op->flags & ~flags || ((open || !map) && (op->handle || op->offset)))
        return INVALID_ARGUMENT;
    if (!m || op->length == 0 || (op->va | op->length) % PAGE)
        return INVALID_ADDRESS;
    if (op->flags & UVM_VMEM_MAP_AHEAD && (op->va + op->length - 1) / BLOCK == (m->addr + m->size - 1) / BLOCK) {
        fprintf(stderr, "fakekmod: MAP_AHEAD in the last block of a range, at 0x%llx\n", (unsigned long long)op->va);
        abort();
    }
    if (open)
        return 0;
    if (map && !page)
        return INVALID_OBJECT;
    if (map && (op->offset % PAGE || op->offset + op->length > page->size))
        return INVALID_OFFSET;
    for (uint64_t va = op->va; va < op->va + op->length; va += PAGE) {
        const struct kmod_entry *e = kmod_entry_at(m, va);

        if (map && !e->overlay && !(op->flags & UVM_VMEM_TAKEOVER))
            return ADDRESS_IN_USE;
        if (map && e->page && !(op->flags & UVM_VMEM_MAP_REPLACE))
            return ADDRESS_IN_USE;
        if (e->huge && (va / BLOCK * BLOCK < op->va || va / BLOCK * BLOCK + BLOCK > op->va + op->length)) {
            fprintf(stderr, "fakekmod: an entry of 2 MiB at 0x%lx would be cut\n", va / BLOCK * BLOCK);
            abort();
        }
    }
    return 0;
}

// Makes the block around va an overlay, all sparse, unless it is one.
static void kmod_open(struct mapping *m, uint64_t va)
{
    if (kmod_entry_at(m, va)->overlay)
        return;
    for (uint64_t i = 0; i < BLOCK; i += PAGE)
        kmod_set(m, va / BLOCK * BLOCK + i, NULL, 0, false);
}

static void kmod_do(const struct uvm_vmem_op *op, bool map)
{
    struct mapping *m = mapping_at(op->va, op->length);
    struct memory *page = map ? memory_find(op->handle, KMOD_CLIENT) : NULL;
    bool huge = map && !(op->flags & UVM_VMEM_MAP_64K) && op->length == BLOCK && op->va % BLOCK == 0;

    for (uint64_t va = op->va; va < op->va + op->length; va += PAGE) {
        if (map)
            kmod_open(m, va);
        if (kmod_entry_at(m, va)->overlay && !(op->flags & UVM_VMEM_MAP_OPEN))
            kmod_set(m, va, page, op->offset + (va - op->va), huge);
    }
    if (op->flags & UVM_VMEM_MAP_AHEAD)
        kmod_open(m, op->va + op->length - 1 + BLOCK);
}

static uint32_t kmod_batch(struct uvm_vmem_batch *b, bool map)
{
    const struct uvm_vmem_op *ops = (const void *)b->ops;
    uint64_t bytes = 0;

    b->out_failed = UVM_VMEM_NO_OP;
    if (memcmp(b->gpu_uuid, uuid, 16))
        return INVALID_DEVICE;
    if (b->count == 0 || b->opSize != sizeof(*ops) || b->flags || b->reserved || b->reserved32)
        return INVALID_ARGUMENT;
    for (uint32_t i = 0; i < b->count; i++) {
        uint32_t status = kmod_check(&ops[i], map);

        bytes += ops[i].length;
        if (i >= KMOD_OPS || bytes > KMOD_BYTES)
            status = INVALID_LIMIT;
        if (status) {
            b->out_failed = i;
            return status;
        }
    }
    if (fails())
        return NO_MEMORY;
    for (uint32_t i = 0; i < b->count; i++)
        kmod_do(&ops[i], map);
    return 0;
}

// A small page takes a block of the fake memory.
static uint32_t kmod_create(struct uvm_vmem_create *c)
{
    if (memcmp(c->gpu_uuid, uuid, 16))
        return INVALID_DEVICE;
    if (!(c->page_size & KMOD_SIZES) || c->page_size & (c->page_size - 1) || c->count == 0 || c->flags || c->reserved)
        return INVALID_ARGUMENT;
    if (c->count > KMOD_OPS || c->count * c->page_size > KMOD_BYTES)
        return INVALID_LIMIT;
    c->out_handle = kmod_next;
    for (uint32_t i = 0; i < c->count; i++) {
        struct memory *m = fails() ? NULL : memory_new(BLOCK, kmod_next + i, KMOD_CLIENT);

        if (!m) {
            while (i--)
                memory_put(memory_find(kmod_next + i, KMOD_CLIENT));
            return NO_MEMORY;
        }
        fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)m->offset, BLOCK); // zero, as promised
    }
    kmod_next += c->count;
    return 0;
}

static uint32_t kmod_release(struct uvm_vmem_release *r)
{
    const uint64_t *handles = (const void *)r->handles;

    r->out_failed = UVM_VMEM_NO_OP;
    if (r->count == 0 || r->flags || r->reserved)
        return INVALID_ARGUMENT;
    if (r->count > KMOD_OPS)
        return INVALID_LIMIT;
    for (uint32_t i = 0; i < r->count; i++)
        if (!memory_find(handles[i], KMOD_CLIENT))
            return r->out_failed = i, INVALID_OBJECT;
    for (uint32_t i = 0; i < r->count; i++) {
        struct memory *page = memory_find(handles[i], KMOD_CLIENT);

        for (struct mapping *m = mappings; m; m = m->next)
            for (uint64_t va = m->addr; m->kmod && va < m->addr + m->size; va += PAGE)
                if (kmod_entry_at(m, va)->page == page)
                    kmod_set(m, va, NULL, 0, false);
        memory_put(page);
    }
    return 0;
}

static uint32_t kmod_query(struct uvm_vmem_query *q)
{
    if (memcmp(q->gpu_uuid, uuid, 16))
        return INVALID_DEVICE;
    q->out_abi = UVM_VMEM_ABI;
    q->out_max_ops = KMOD_OPS;
    q->out_max_bytes = KMOD_BYTES;
    q->out_caps = UVM_VMEM_CAP_LIVE_REPLACE | UVM_VMEM_CAP_SPARSE | UVM_VMEM_CAP_TAKEOVER | UVM_VMEM_CAP_HUGE;
    q->out_page_sizes = KMOD_SIZES;
    return 0;
}

// address_space: whether the descriptor is CUDA's; one that was only opened is no address space yet.
static int kmod_ioctl(unsigned long request, void *arg, bool address_space)
{
    if (!getenv("FAKEGPU_PATCHED")) {
        errno = EINVAL;
        return -1;
    }
#define KMOD_CALL(number, type, call)                                           \
    case number:                                                                \
        if (((struct type *)arg)->size != sizeof(struct type))                  \
            break;                                                              \
        ((struct type *)arg)->rmStatus = address_space ? call : ILLEGAL_ACTION; \
        return 0
    switch (request) {
        KMOD_CALL(UVM_VMEM_QUERY, uvm_vmem_query, kmod_query(arg));
        KMOD_CALL(UVM_VMEM_CREATE, uvm_vmem_create, kmod_create(arg));
        KMOD_CALL(UVM_VMEM_RELEASE, uvm_vmem_release, kmod_release(arg));
        KMOD_CALL(UVM_VMEM_MAP, uvm_vmem_batch, kmod_batch(arg, true));
        KMOD_CALL(UVM_VMEM_UNMAP, uvm_vmem_batch, kmod_batch(arg, false));
    }
#undef KMOD_CALL
    errno = EINVAL;
    return -1;
}
