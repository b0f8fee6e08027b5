// RESERVE and FREE: ranges of address space of our own.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_window.h"

#include "uvm_kvmalloc.h"

#include <linux/sched/signal.h>

// Windows closed under one hold of the VA space lock
#define CLOSE_AT_ONCE 2048

NV_STATUS uvm_vmem_api_reserve(void *params, struct file *filp)
{
    const struct uvm_vmem_reserve *p = params;
    uvm_va_space_t *va_space = uvm_va_space_get(filp);
    uvm_vmem_range_t *range;
    struct mm_struct *mm;
    uvm_page_tree_t *tree;
    uvm_gpu_t *gpu;
    NV_STATUS status;

    status = uvm_vmem_check_reserve(p);
    if (status != NV_OK)
        return status;

    // As UVM_CREATE_EXTERNAL_RANGE does, with the range marked before anybody can find it.
    mm = uvm_va_space_mm_or_current_retain_lock(va_space);
    uvm_va_space_down_write(va_space);

    status = uvm_vmem_gpu_lookup(va_space, p->gpu_uuid, &gpu, &tree);
    if (status == NV_OK && !uvm_gpu_can_address(gpu, p->base, p->length))
        status = NV_ERR_OUT_OF_RANGE;
    if (status == NV_OK)
        status = uvm_va_range_create_external(va_space, mm, p->base, p->length, &range);
    if (status == NV_OK)
        uvm_vmem_va_range(range)->vmem_reserved = true;

    uvm_va_space_up_write(va_space);
    uvm_va_space_mm_or_current_release_unlock(va_space, mm);
    return status;
}

// Whether a mapping stands in the way of freeing its range.
static bool map_is_used(uvm_ext_gpu_map_t *map)
{
    struct uvm_vmem_window *window = uvm_vmem_window_of(map);

    return !window || (window->pages & uvm_vmem_cover(map->node.start, map->node.end));
}

// Close up to *budget windows of a range that holds no page. The tables go without their entries being cleared one by
// one: each lies in a slot that is all this range's, so its last user takes it out of the page directory.
static void windows_close(uvm_vmem_range_t *range, uvm_gpu_t *gpu, uvm_page_tree_t *tree, NvU32 *budget)
{
    uvm_va_range_t *va_range = uvm_vmem_va_range(range);
    uvm_ext_gpu_map_t *map, *next;
    NvU32 closing = 0;

    uvm_mutex_lock(&uvm_ext_gpu_range_tree(range, gpu)->lock);

    uvm_ext_gpu_map_for_each_in(map, range, gpu, va_range->node.start, va_range->node.end) {
        if (closing == *budget)
            break;
        (void)uvm_tracker_wait(&map->tracker);
        uvm_page_tree_put_ptes_async(tree, &map->pt_range_vec.ranges[0]);
        uvm_kvfree(map->pt_range_vec.ranges);
        memset(&map->pt_range_vec, 0, sizeof(map->pt_range_vec));
        closing++;
    }

    // All invalidated and out of the directory before the books say so.
    (void)uvm_page_tree_wait(tree);

    uvm_ext_gpu_map_for_each_in_safe(map, next, range, gpu, va_range->node.start, va_range->node.end) {
        struct uvm_vmem_window *window;

        if (!closing--)
            break;
        --*budget;
        window = uvm_vmem_window_of(map);
        uvm_ext_gpu_map_destroy(range, map, NULL);

        // A piece of a window that UVM has cut leaves the others their references.
        if (uvm_vmem_window_is_dead(window))
            uvm_vmem_window_drop(window);
    }

    uvm_mutex_unlock(&uvm_ext_gpu_range_tree(range, gpu)->lock);
}

// Free the range, or a part of its windows and say NV_WARN_MORE_PROCESSING_REQUIRED.
//
// LOCKING: the VA space lock in write mode.
static NV_STATUS free_locked(uvm_va_space_t *va_space, const struct uvm_vmem_free *p)
{
    uvm_vmem_range_t *range = uvm_vmem_range_find(va_space, p->base);
    uvm_va_range_t *va_range = range ? uvm_vmem_va_range(range) : NULL;
    NvU32 budget = CLOSE_AT_ONCE;
    uvm_ext_gpu_map_t *map;
    uvm_gpu_t *gpu;

    if (!range || va_range->node.start != p->base || va_range->node.end != p->base + p->length - 1)
        return NV_ERR_INVALID_ADDRESS;
    if (!va_range->vmem_reserved)
        return NV_ERR_INVALID_OWNER;
    if (va_space->vmem && va_space->vmem->dead != NV_OK)
        return va_space->vmem->dead;

    for_each_va_space_gpu_in_mask(gpu, va_space, uvm_vmem_mapped_gpus(range)) {
        NvU32 looked = 0;

        uvm_ext_gpu_map_for_each_in(map, range, gpu, va_range->node.start, va_range->node.end) {
            if (map_is_used(map))
                return NV_ERR_IN_USE;
            if (!(++looked % CLOSE_AT_ONCE))
                cond_resched();
        }
    }

    for_each_va_space_gpu_in_mask(gpu, va_space, uvm_vmem_mapped_gpus(range)) {
        windows_close(range, gpu, &uvm_gpu_va_space_get(va_space, gpu)->page_tables, &budget);
        if (!budget)
            return NV_WARN_MORE_PROCESSING_REQUIRED;
    }

    // Nothing is mapped, so there is nothing to defer.
    uvm_va_range_destroy(va_range, NULL);
    return NV_OK;
}

NV_STATUS uvm_vmem_api_free(void *params, struct file *filp)
{
    const struct uvm_vmem_free *p = params;
    uvm_va_space_t *va_space = uvm_va_space_get(filp);
    NV_STATUS status;

    status = uvm_vmem_check_free(p);
    if (status != NV_OK)
        return status;

    // Others may open windows between; nobody makes a dying process wait for them.
    do {
        uvm_va_space_down_write(va_space);
        status = free_locked(va_space, p);
        uvm_va_space_up_write(va_space);
        cond_resched();
    } while (status == NV_WARN_MORE_PROCESSING_REQUIRED && !fatal_signal_pending(current));

    return status == NV_WARN_MORE_PROCESSING_REQUIRED ? NV_ERR_BUSY_RETRY : status;
}
