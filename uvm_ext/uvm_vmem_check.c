// Checks of user input that need no state.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_check.h"

#define MAP_FLAGS (UVM_VMEM_MAP_REPLACE | UVM_VMEM_MAP_64K | UVM_VMEM_MAP_AHEAD | UVM_VMEM_TAKEOVER)
#define OPEN_FLAGS (UVM_VMEM_MAP_OPEN | UVM_VMEM_TAKEOVER)

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static bool any_set(const __u64 *words, unsigned int count)
{
    while (count--) {
        if (words[count])
            return true;
    }
    return false;
}

static bool misaligned(__u64 value, __u64 to) { return (value & (to - 1)) != 0; }

NV_STATUS uvm_vmem_check_query(const struct uvm_vmem_query *p)
{
    if (p->flags || any_set(p->reserved, COUNT(p->reserved)))
        return NV_ERR_INVALID_ARGUMENT;
    return NV_OK;
}

NV_STATUS uvm_vmem_check_create(const struct uvm_vmem_create *p)
{
    if (p->flags || p->reserved || !p->count || !uvm_vmem_page_granules(p->page_size))
        return NV_ERR_INVALID_ARGUMENT;
    if (p->count > UVM_VMEM_MAX_OPS || p->count * p->page_size > UVM_VMEM_MAX_BYTES)
        return NV_ERR_INVALID_LIMIT;
    return NV_OK;
}

NV_STATUS uvm_vmem_check_release(const struct uvm_vmem_release *p)
{
    if (p->flags || p->reserved || !p->count)
        return NV_ERR_INVALID_ARGUMENT;
    if (p->count > UVM_VMEM_MAX_OPS)
        return NV_ERR_INVALID_LIMIT;
    return NV_OK;
}

NV_STATUS uvm_vmem_check_batch(const struct uvm_vmem_batch *p)
{
    if (p->flags || p->reserved32 || p->reserved || !p->count)
        return NV_ERR_INVALID_ARGUMENT;
    if (p->opSize != sizeof(struct uvm_vmem_op))
        return NV_ERR_INVALID_PARAM_STRUCT;
    if (p->count > UVM_VMEM_MAX_OPS)
        return NV_ERR_INVALID_LIMIT;
    return NV_OK;
}

NV_STATUS uvm_vmem_check_op(const struct uvm_vmem_op *op, bool map, __u64 *total)
{
    bool open = map && (op->flags & UVM_VMEM_MAP_OPEN);
    __u32 flags = open ? OPEN_FLAGS : map ? MAP_FLAGS : 0;

    if (op->reserved || (op->flags & ~flags))
        return NV_ERR_INVALID_ARGUMENT;

    if ((open || !map) && (op->handle || op->offset))
        return NV_ERR_INVALID_ARGUMENT;

    if (!op->va || !op->length || misaligned(op->va, UVM_VMEM_GRANULE) || misaligned(op->length, UVM_VMEM_GRANULE))
        return NV_ERR_INVALID_ADDRESS;
    if (op->va + op->length < op->va)
        return NV_ERR_INVALID_ADDRESS;

    if (map && !open) {
        if (misaligned(op->offset, UVM_VMEM_GRANULE) || op->offset >= UVM_VMEM_BLOCK ||
            op->length > UVM_VMEM_BLOCK - op->offset)
            return NV_ERR_INVALID_OFFSET;
    }

    if (op->length > UVM_VMEM_MAX_BYTES - *total)
        return NV_ERR_INVALID_LIMIT;
    *total += op->length;
    return NV_OK;
}
