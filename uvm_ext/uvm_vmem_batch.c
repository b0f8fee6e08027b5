// MAP and UNMAP. Every element is checked, and every overlay and table allocated, before the first entry changes.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_api.h"
#include "uvm_vmem_check.h"
#include "uvm_vmem_commit.h"
#include "uvm_vmem_file.h"
#include "uvm_vmem_memory.h"

#include "uvm_range_tree.h"

#include <linux/uaccess.h>

// One MAP or UNMAP.
struct batch {
    const NvU8 *uuid;
    const struct uvm_vmem_op *ops;
    NvU32 count;
    NvU32 failed;
    bool map;
};

// One element.
struct element {
    const struct uvm_vmem_op *op;
    struct uvm_vmem_handle *handle; // what is mapped; NULL: nothing
    bool map;                       // of MAP
    bool huge;                      // its block gets a 2 MiB entry
};

// Copy the elements, and make the checks that need no lock.
static NV_STATUS ops_copy(struct uvm_vmem_batch *p, bool map, struct uvm_vmem_op **out_ops)
{
    const void __user *from = u64_to_user_ptr(p->ops);
    struct uvm_vmem_op *ops = uvm_vmem_zalloc(p->count * sizeof(*ops));
    NV_STATUS status = NV_OK;
    NvU64 total = 0;
    NvU32 i;

    if (!ops)
        return NV_ERR_NO_MEMORY;

    if (copy_from_user(ops, from, p->count * sizeof(*ops)))
        status = NV_ERR_INVALID_POINTER;
    for (i = 0; i < p->count && status == NV_OK; i++) {
        status = uvm_vmem_check_op(&ops[i], map, &total);
        if (status != NV_OK)
            p->out_failed = i;
    }

    if (status != NV_OK) {
        uvm_vmem_free(ops);
        return status;
    }
    *out_ops = ops;
    return NV_OK;
}

// The range of an element.
static NV_STATUS range_find(struct uvm_vmem_call *call, const struct uvm_vmem_op *op, uvm_vmem_range_t **range)
{
    *range = uvm_vmem_range_find(call->va_space, op->va);
    if (!*range || op->va + op->length - 1 > uvm_vmem_va_range(*range)->node.end)
        return NV_ERR_INVALID_ADDRESS;
    return uvm_gpu_can_address(call->gpu, op->va, op->length) ? NV_OK : NV_ERR_OUT_OF_RANGE;
}

// The handle of an element of MAP.
static NV_STATUS handle_find(struct uvm_vmem_call *call, const struct uvm_vmem_op *op, struct uvm_vmem_handle **handle)
{
    *handle = op->handle ? uvm_vmem_handle_find(call->space, op->handle) : NULL;
    if (!*handle || (*handle)->slab->owner != call->vgpu)
        return NV_ERR_INVALID_OBJECT_HANDLE;
    if (op->offset + op->length > (*handle)->granules * UVM_VMEM_GRANULE)
        return NV_ERR_INVALID_OFFSET;
    return NV_OK;
}

// Open the block that follows an overlay, if it belongs to the caller's own range: where nothing is mapped, or with take,
// in a sparse mapping or in that of the overlay itself. All else is somebody's memory, and nobody named its addresses.
static NV_STATUS open_ahead(struct uvm_vmem_call *call, uvm_vmem_range_t *range, struct uvm_vmem_overlay *overlay,
                            bool take)
{
    NvU64 va = overlay->end + 1;
    uvm_ext_gpu_map_t *map;
    NV_STATUS status;

    if (va != uvm_vmem_block(va) || va > uvm_vmem_va_range(range)->node.end ||
        !uvm_gpu_can_address(call->gpu, va, UVM_VMEM_BLOCK))
        return NV_OK;
    map = uvm_vmem_map_at(range, call->gpu, va);
    if (map && !uvm_vmem_overlay_of(map) && map->mem_handle && !uvm_vmem_same_origin(map, overlay->map))
        return NV_OK;
    status = uvm_vmem_overlay_prepare(call, range, va, take, false, &overlay);
    return status == NV_ERR_UVM_ADDRESS_IN_USE ? NV_OK : status;
}

// The next address to examine, at most end + 1, if va has no overlay.
static NvU64 unmap_skip(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, NvU64 end)
{
    uvm_range_tree_node_t *node = uvm_range_tree_iter_first(&uvm_ext_gpu_range_tree(range, call->gpu)->tree, va, end);

    if (!node)
        return end + 1;
    if (node->start > va)
        return min(end + 1, UVM_ALIGN_UP(node->start, UVM_VMEM_GRANULE));
    return node->end >= end ? end + 1 : min(end + 1, UVM_ALIGN_UP(node->end + 1, UVM_VMEM_GRANULE));
}

// Add the overlay at va to the call. NULL, only in UNMAP: there is none.
static NV_STATUS overlay_get(struct uvm_vmem_call *call, uvm_vmem_range_t *range, const struct element *element,
                             NvU64 va, struct uvm_vmem_overlay **overlay)
{
    uvm_ext_gpu_map_t *map;

    if (element->map)
        return uvm_vmem_overlay_prepare(call, range, va, element->op->flags & UVM_VMEM_TAKEOVER, element->huge,
                                        overlay);
    map = uvm_vmem_map_at(range, call->gpu, va);
    *overlay = map ? uvm_vmem_overlay_of(map) : NULL;
    if (*overlay)
        uvm_vmem_overlay_touch(call, *overlay);
    return NV_OK;
}

// Add the part [va, end] of an element, or as much of it as the overlay covers, to the call.
static NV_STATUS piece_put(struct uvm_vmem_call *call, const struct element *element, struct uvm_vmem_overlay *overlay,
                           NvU64 va, NvU64 end)
{
    const struct uvm_vmem_op *op = element->op;
    struct uvm_vmem_piece piece = {.overlay = overlay, .handle = element->handle, .first = uvm_vmem_index(va)};
    NvU32 mask;

    piece.count = (min(end, overlay->end) - va + 1) / UVM_VMEM_GRANULE;
    if (element->handle)
        piece.granule = (op->offset + (va - op->va)) / UVM_VMEM_GRANULE;
    mask = uvm_vmem_mask(piece.first, piece.count);

    if (element->handle && !(op->flags & UVM_VMEM_MAP_REPLACE) && (overlay->pages_after & mask))
        return NV_ERR_UVM_ADDRESS_IN_USE;
    overlay->pages_after &= ~mask;
    if (element->handle)
        overlay->pages_after |= mask;

    // A 2 MiB entry is a page or invalid. There is no sparse one.
    if (uvm_vmem_overlay_page_size(overlay) == UVM_PAGE_SIZE_2M && !element->huge)
        overlay->needs_cut = true;
    return uvm_vmem_piece_add(call, &piece);
}

static NV_STATUS op_prepare(struct uvm_vmem_call *call, const struct uvm_vmem_op *op, bool map)
{
    struct element element = {.op = op, .map = map};
    bool open = op->flags & UVM_VMEM_MAP_OPEN;
    NvU64 va = op->va;
    NvU64 end = op->va + op->length - 1;
    struct uvm_vmem_overlay *overlay = NULL;
    uvm_vmem_range_t *range;
    NV_STATUS status;

    status = range_find(call, op, &range);
    if (status == NV_OK && map && !open)
        status = handle_find(call, op, &element.handle);
    if (status != NV_OK)
        return status;

    element.huge = element.handle && !(op->flags & UVM_VMEM_MAP_64K) && op->length == UVM_VMEM_BLOCK &&
                   va == uvm_vmem_block(va) && uvm_vmem_gpu_has_huge(call->gpu);

    while (va <= end) {
        status = overlay_get(call, range, &element, va, &overlay);
        if (status == NV_OK && overlay && !open)
            status = piece_put(call, &element, overlay, va, end);
        if (status != NV_OK)
            return status;
        va = overlay ? min(end, overlay->end) + 1 : unmap_skip(call, range, va, end);
        cond_resched();
    }
    if ((op->flags & UVM_VMEM_MAP_AHEAD) && !overlay->pages_before)
        return open_ahead(call, range, overlay, op->flags & UVM_VMEM_TAKEOVER);
    return NV_OK;
}

// LOCKING: the VA space lock in write mode.
static NV_STATUS batch_change(struct uvm_vmem_call *call, void *arg)
{
    struct batch *b = arg;
    NV_STATUS status;
    NvU32 i;

    status = uvm_vmem_gpu_lookup(call->va_space, b->uuid, &call->gpu, &call->tree);
    if (status != NV_OK)
        return status;

    mutex_lock(&call->space->lock);
    call->vgpu = uvm_vmem_gpu_find_or_add(call->space, call->gpu);
    mutex_unlock(&call->space->lock);
    if (!call->vgpu)
        return NV_ERR_NO_MEMORY;

    for (i = 0; i < b->count; i++) {
        status = op_prepare(call, &b->ops[i], b->map);
        if (status != NV_OK) {
            b->failed = i;
            break;
        }
    }

    if (status == NV_OK)
        status = uvm_vmem_overlays_cut(call);
    if (status != NV_OK) {
        uvm_vmem_call_undo(call);
        return status;
    }
    return uvm_vmem_call_commit(call);
}

static NV_STATUS batch_run(struct uvm_vmem_batch *p, struct file *filp, bool map)
{
    struct batch b = {.uuid = p->gpu_uuid, .count = p->count, .failed = UVM_VMEM_NO_OP, .map = map};
    struct uvm_vmem_space *space;
    struct uvm_vmem_call *call;
    struct uvm_vmem_op *ops;
    NV_STATUS status;

    p->out_failed = UVM_VMEM_NO_OP;
    p->out_pushes = 0;
    p->out_invalidates = 0;
    p->out_waits = 0;

    status = uvm_vmem_check_batch(p);
    if (status != NV_OK)
        return status;
    status = ops_copy(p, map, &ops);
    if (status != NV_OK)
        return status;

    space = uvm_vmem_file_space(filp);
    call = space ? uvm_vmem_zalloc(sizeof(*call)) : NULL;
    if (call) {
        b.ops = ops;
        uvm_vmem_call_init(call, space);
        status = uvm_vmem_call_run(call, batch_change, NULL, &b);
        p->out_failed = b.failed;
        p->out_pushes = call->push.pushes;
        p->out_invalidates = call->push.invalidates;
        p->out_waits = call->push.waits;
        uvm_vmem_call_deinit(call);
        uvm_vmem_free(call);
    } else {
        status = NV_ERR_NO_MEMORY;
    }
    uvm_vmem_free(ops);
    return status;
}

NV_STATUS uvm_vmem_api_map(void *params, struct file *filp) { return batch_run(params, filp, true); }

NV_STATUS uvm_vmem_api_unmap(void *params, struct file *filp) { return batch_run(params, filp, false); }
