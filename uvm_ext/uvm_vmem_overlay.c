// Finds, opens, takes over, cuts and drops overlays.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_overlay.h"

#include "uvm_kvmalloc.h"
#include "uvm_range_tree.h"

// Kernel memory of one overlay, including what UVM allocates for the mapping and its page table
#define OVERLAY_BYTES                                                                             \
    (sizeof(struct uvm_vmem_overlay) + sizeof(struct uvm_vmem_loan) + sizeof(uvm_ext_gpu_map_t) + \
     sizeof(uvm_page_table_range_t) + sizeof(uvm_page_directory_t))

// Overlays examined whenever a new one is made. This bounds dead overlays to a constant fraction of live ones.
#define REAP_PER_OVERLAY 2

// Overlays examined before a new one is refused because there are too many
#define REAP_AT_LIMIT 4096

static void loan_free(nv_kref_t *ref)
{
    uvm_kvfree(container_of(container_of(ref, uvm_ext_gpu_mem_handle, ref_count), struct uvm_vmem_loan, mem));
}

// Drop the reference of a mapping.
static void loan_put(struct uvm_vmem_loan *loan) { nv_kref_put(&loan->mem.ref_count, loan_free); }

void uvm_vmem_entry_clear(struct uvm_vmem_overlay *overlay, NvU32 index)
{
    struct uvm_vmem_entry *entry = &overlay->entries[index];

    list_del(&entry->node);
    entry->handle = NULL;
    overlay->pages &= ~(1U << index);
    atomic64_sub(UVM_VMEM_GRANULE, &overlay->vgpu->bytes_mapped);
}

void uvm_vmem_overlay_drop(struct uvm_vmem_overlay *overlay)
{
    NvU32 i;

    for (i = 0; i < UVM_VMEM_GRANULES; i++) {
        if (overlay->pages & (1U << i))
            uvm_vmem_entry_clear(overlay, i);
    }
    list_del(&overlay->node);
    atomic64_dec(&overlay->vgpu->overlays);
    uvm_vmem_user_uncharge(overlay->vgpu->space->user, UVM_VMEM_KERNEL_BYTES, OVERLAY_BYTES);

    // UVM may still hold the loan on a deferred free list.
    loan_put(overlay->loan);
    kfree(overlay);
}

void uvm_vmem_overlays_forget(struct uvm_vmem_gpu *vgpu)
{
    struct uvm_vmem_overlay *overlay, *next;

    list_for_each_entry_safe(overlay, next, &vgpu->space->overlays, node) {
        if (overlay->vgpu == vgpu)
            uvm_vmem_overlay_drop(overlay);
        cond_resched();
    }
}

void uvm_vmem_overlays_reap(struct uvm_vmem_space *space, NvU32 count)
{
    while (count-- && !list_empty(&space->overlays)) {
        struct uvm_vmem_overlay *overlay = list_first_entry(&space->overlays, struct uvm_vmem_overlay, node);

        if (uvm_vmem_overlay_is_dead(overlay))
            uvm_vmem_overlay_drop(overlay);
        else
            list_move_tail(&overlay->node, &space->overlays);
    }
}

// Create an overlay with only sparse entries and two references to its loan: its own, and that of its mapping.
static NV_STATUS overlay_alloc(struct uvm_vmem_call *call, NvU64 start, NvU64 end,
                               struct uvm_vmem_overlay **out_overlay)
{
    struct uvm_vmem_overlay *overlay;
    NvU32 i;

    BUILD_BUG_ON(offsetof(struct uvm_vmem_loan, mem) != 0);

    uvm_vmem_overlays_reap(call->space, REAP_PER_OVERLAY);

    if (!uvm_vmem_user_charge(call->space->user, UVM_VMEM_KERNEL_BYTES, OVERLAY_BYTES)) {
        uvm_vmem_overlays_reap(call->space, REAP_AT_LIMIT);
        if (!uvm_vmem_user_charge(call->space->user, UVM_VMEM_KERNEL_BYTES, OVERLAY_BYTES))
            return NV_ERR_INSUFFICIENT_RESOURCES;
    }

    // Most of an overlay's memory. It is charged to the caller's memory cgroup, which UVM's allocators cannot do.
    overlay = kzalloc(sizeof(*overlay), NV_UVM_GFP_FLAGS_ACCOUNT);
    if (overlay)
        overlay->loan = uvm_kvmalloc_zero(sizeof(*overlay->loan));
    if (!overlay || !overlay->loan) {
        kfree(overlay);
        uvm_vmem_user_uncharge(call->space->user, UVM_VMEM_KERNEL_BYTES, OVERLAY_BYTES);
        return NV_ERR_NO_MEMORY;
    }

    overlay->loan->overlay = overlay;
    overlay->loan->mem.gpu = call->gpu;
    nv_kref_init(&overlay->loan->mem.ref_count);
    nv_kref_get(&overlay->loan->mem.ref_count);
    overlay->vgpu = call->vgpu;
    overlay->start = start;
    overlay->end = end;
    overlay->sparse = uvm_vmem_cover(start, end);
    INIT_LIST_HEAD(&overlay->touched);
    for (i = 0; i < UVM_VMEM_GRANULES; i++)
        overlay->entries[i].index = i;
    list_add_tail(&overlay->node, &call->space->overlays);
    atomic64_inc(&call->vgpu->overlays);
    *out_overlay = overlay;
    return NV_OK;
}

static void touch(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, uvm_vmem_range_t *range,
                  uvm_ext_gpu_map_t *map)
{
    overlay->range = range;
    overlay->map = map;
    overlay->occupied = overlay->pages;
    overlay->had_pages = overlay->pages;
    overlay->changed = 0;
    overlay->fresh = false;
    overlay->taken = false;
    overlay->cut_wanted = false;
    overlay->cut = false;
    overlay->former = NULL;
    list_add_tail(&overlay->touched, &call->touched);
}

// UVM has unmapped a part of the overlay and left this piece: give the piece its own overlay. The rest of the old
// overlay is dropped with UVM's last reference to it.
static NV_STATUS overlay_adopt(struct uvm_vmem_call *call, struct uvm_vmem_overlay *old, uvm_ext_gpu_map_t *map,
                               struct uvm_vmem_overlay **out_overlay)
{
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status = overlay_alloc(call, map->node.start, map->node.end, &overlay);
    NvU32 cover, i;

    if (status != NV_OK)
        return status;

    cover = uvm_vmem_cover(overlay->start, overlay->end);
    overlay->pages = old->pages & cover;
    overlay->sparse = old->sparse & cover;
    old->pages &= ~cover;
    old->sparse &= ~cover;

    for (i = 0; i < UVM_VMEM_GRANULES; i++) {
        if (!(overlay->pages & (1U << i)))
            continue;
        overlay->entries[i].handle = old->entries[i].handle;
        overlay->entries[i].granule = old->entries[i].granule;
        list_replace(&old->entries[i].node, &overlay->entries[i].node);
    }

    map->mem_handle = &overlay->loan->mem;
    loan_put(old->loan);
    *out_overlay = overlay;
    return NV_OK;
}

uvm_ext_gpu_map_t *uvm_vmem_map_at(uvm_vmem_range_t *range, uvm_gpu_t *gpu, NvU64 va)
{
    uvm_range_tree_node_t *node = uvm_range_tree_find(&uvm_ext_gpu_range_tree(range, gpu)->tree, va);

    return node ? container_of(node, uvm_ext_gpu_map_t, node) : NULL;
}

static void map_destroy(uvm_vmem_range_t *range, uvm_ext_gpu_map_t *map)
{
    uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(range, map->gpu);

    uvm_mutex_lock(&tree->lock);
    uvm_ext_gpu_map_destroy(range, map, NULL);
    uvm_mutex_unlock(&tree->lock);
}

// Create a mapping without page tables over the overlay's addresses.
static NV_STATUS map_create(struct uvm_vmem_call *call, uvm_vmem_range_t *range, struct uvm_vmem_overlay *overlay,
                            uvm_ext_gpu_map_t **out_map)
{
    uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(range, call->gpu);
    uvm_ext_gpu_map_t *map = uvm_kvmalloc_zero(sizeof(*map));
    NV_STATUS status;

    if (!map)
        return NV_ERR_NO_MEMORY;

    map->node.start = overlay->start;
    map->node.end = overlay->end;
    RB_CLEAR_NODE(&map->node.rb_node);
    uvm_tracker_init(&map->tracker);
    map->gpu = call->gpu;
    map->owning_gpu = call->gpu;

    uvm_mutex_lock(&tree->lock);
    status = uvm_range_tree_add(&tree->tree, &map->node);
    if (status == NV_OK)
        uvm_processor_mask_set_atomic(uvm_vmem_mapped_gpus(range), call->gpu->id);
    uvm_mutex_unlock(&tree->lock);

    if (status != NV_OK) {
        uvm_kvfree(map);
        return status;
    }
    map->mem_handle = &overlay->loan->mem;
    *out_map = map;
    return NV_OK;
}

// Open an overlay in the hole around va, within the block and the range.
static NV_STATUS overlay_open(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, bool huge,
                              struct uvm_vmem_overlay **out_overlay)
{
    uvm_va_range_t *va_range = uvm_vmem_va_range(range);
    uvm_page_table_range_vec_t *vec;
    struct uvm_vmem_overlay *overlay;
    uvm_ext_gpu_map_t *map;
    NvU64 start = max(uvm_vmem_block(va), va_range->node.start);
    NvU64 end = min(uvm_vmem_block_end(va), va_range->node.end);
    NV_STATUS status;

    status = uvm_range_tree_find_hole_in(&uvm_ext_gpu_range_tree(range, call->gpu)->tree, va, &start, &end);
    if (status != NV_OK)
        return status;

    // A neighbour with 4 KiB entries may end inside the 64 KiB at va.
    if (!uvm_vmem_whole_granules(&start, &end) || va < start || va + UVM_VMEM_GRANULE - 1 > end)
        return NV_ERR_UVM_ADDRESS_IN_USE;

    huge = huge && start == uvm_vmem_block(va) && end == uvm_vmem_block_end(va);

    status = overlay_alloc(call, start, end, &overlay);
    if (status != NV_OK)
        return status;

    status = map_create(call, range, overlay, &map);
    if (status != NV_OK) {
        loan_put(overlay->loan);
        uvm_vmem_overlay_drop(overlay);
        return status;
    }

    vec = &map->pt_range_vec;
    vec->tree = call->tree;
    vec->page_size = huge ? UVM_PAGE_SIZE_2M : UVM_PAGE_SIZE_64K;
    vec->start = start;
    vec->size = end - start + 1;
    vec->range_count = 1;
    vec->ranges = uvm_kvmalloc_zero(sizeof(*vec->ranges));
    status = NV_ERR_NO_MEMORY;
    if (vec->ranges) {
        status = uvm_page_tree_get_ptes_async(call->tree, vec->page_size, vec->start, vec->size,
                                              UVM_PMM_ALLOC_FLAGS_EVICT, &vec->ranges[0]);
    }
    if (status != NV_OK) {
        // Without the array, UVM's destroy function has no PTEs to clear.
        uvm_kvfree(vec->ranges);
        memset(vec, 0, sizeof(*vec));
        map_destroy(range, map);
        uvm_vmem_overlay_drop(overlay);
        return status;
    }

    touch(call, overlay, range, map);
    overlay->fresh = true;
    *out_overlay = overlay;
    return NV_OK;
}

// Cut a mapping in two. Both keep their PTEs and share the memory handle, as after a partial UVM_UNMAP_EXTERNAL.
static NV_STATUS map_split(uvm_vmem_range_t *range, uvm_ext_gpu_map_t *map, NvU64 start, uvm_ext_gpu_map_t **out_upper)
{
    uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(range, map->gpu);
    uvm_ext_gpu_map_t *upper = uvm_kvmalloc(sizeof(*upper));
    NV_STATUS status;

    if (!upper)
        return NV_ERR_NO_MEMORY;

    // Copy all fields, because those about the memory depend on the release. Then reset what each mapping owns.
    *upper = *map;
    memset(&upper->node, 0, sizeof(upper->node));
    memset(&upper->pt_range_vec, 0, sizeof(upper->pt_range_vec));
    memset(&upper->deferred_free, 0, sizeof(upper->deferred_free));
    RB_CLEAR_NODE(&upper->node.rb_node);
    uvm_tracker_init(&upper->tracker);

    status = uvm_page_table_range_vec_split_upper(&map->pt_range_vec, start - 1, &upper->pt_range_vec);
    if (status != NV_OK) {
        uvm_kvfree(upper);
        return status;
    }

    upper->node.start = start;
    if (upper->mem_handle)
        nv_kref_get(&upper->mem_handle->ref_count);

    uvm_mutex_lock(&tree->lock);
    uvm_range_tree_split(&tree->tree, &map->node, &upper->node);
    uvm_mutex_unlock(&tree->lock);

    *out_upper = upper;
    return NV_OK;
}

// Whether a foreign mapping can become an overlay: its entries can be cut at the block's borders, and unmapping it
// needs no more than unmapping local vidmem.
static bool map_can_be_taken(uvm_ext_gpu_map_t *map)
{
    if (map->pt_range_vec.page_size != UVM_PAGE_SIZE_64K && map->pt_range_vec.page_size != UVM_PAGE_SIZE_2M)
        return false;
    return !map->mem_handle || (map->owning_gpu == map->gpu && !map->is_sysmem);
}

// Turn the part of a foreign mapping in va's block into an overlay. Only records change here.
static NV_STATUS overlay_take(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, uvm_ext_gpu_map_t *map,
                              bool huge, struct uvm_vmem_overlay **out_overlay)
{
    NvU64 start = max(uvm_vmem_block(va), map->node.start);
    NvU64 end = min(uvm_vmem_block_end(va), map->node.end);
    uvm_ext_gpu_map_t *former = NULL;
    uvm_ext_gpu_map_t *upper;
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status;

    if (!map_can_be_taken(map))
        return NV_ERR_UVM_ADDRESS_IN_USE;

    // Its PTE writes are complete, or a fatal error ended them.
    status = uvm_tracker_wait(&map->tracker);
    if (status != NV_OK)
        return status;

    if (map->node.start < start) {
        status = map_split(range, map, start, &upper);
        if (status != NV_OK)
            return status;
        map = upper;
    }
    if (map->node.end > end) {
        status = map_split(range, map, end + 1, &upper);
        if (status != NV_OK)
            return status;
    }

    if (map->mem_handle) {
        former = uvm_kvmalloc_zero(sizeof(*former));
        if (!former)
            return NV_ERR_NO_MEMORY;
        uvm_tracker_init(&former->tracker);
    }

    status = overlay_alloc(call, start, end, &overlay);
    if (status != NV_OK) {
        uvm_kvfree(former);
        return status;
    }

    if (former) {
        former->mem_handle = map->mem_handle;
        former->gpu = map->gpu;
        former->owning_gpu = map->owning_gpu;
    }
    map->mem_handle = &overlay->loan->mem;
    map->owning_gpu = call->gpu;

    touch(call, overlay, range, map);
    overlay->taken = true;
    overlay->former = former;
    overlay->cut_wanted = map->pt_range_vec.page_size == UVM_PAGE_SIZE_2M && !huge;
    *out_overlay = overlay;
    return NV_OK;
}

NV_STATUS uvm_vmem_overlay_touch(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, uvm_vmem_open_t open,
                                 bool huge, struct uvm_vmem_overlay **out_overlay)
{
    uvm_ext_gpu_map_t *map = uvm_vmem_map_at(range, call->gpu, va);
    struct uvm_vmem_overlay *overlay;

    uvm_assert_rwsem_locked_write(&call->va_space->lock);

    *out_overlay = NULL;

    if (!map)
        return open == UVM_VMEM_LOOK ? NV_OK : overlay_open(call, range, va, huge, out_overlay);

    overlay = uvm_vmem_overlay_of(map);
    if (!overlay) {
        if (open == UVM_VMEM_LOOK)
            return NV_OK;
        if (open == UVM_VMEM_OPEN)
            return NV_ERR_UVM_ADDRESS_IN_USE;
        return overlay_take(call, range, va, map, huge, out_overlay);
    }

    if (list_empty(&overlay->touched)) {
        if (map->node.start != overlay->start || map->node.end != overlay->end) {
            NV_STATUS status = overlay_adopt(call, overlay, map, &overlay);

            if (status != NV_OK)
                return status;
        }
        touch(call, overlay, range, map);
    }
    *out_overlay = overlay;
    return NV_OK;
}

bool uvm_vmem_overlay_touch_entry(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index)
{
    NvU64 va = uvm_vmem_block(overlay->start) + index * UVM_VMEM_GRANULE;
    uvm_vmem_range_t *range;
    uvm_ext_gpu_map_t *map;

    // A mapping of the whole overlay exists for the whole call.
    if (!list_empty(&overlay->touched) && overlay->map)
        return true;

    range = uvm_vmem_range_find(call->va_space, va);
    map = range ? uvm_vmem_map_at(range, call->gpu, va) : NULL;
    if (!map || uvm_vmem_overlay_of(map) != overlay)
        return false;

    if (list_empty(&overlay->touched)) {
        bool whole = map->node.start == overlay->start && map->node.end == overlay->end;

        touch(call, overlay, range, whole ? map : NULL);
    }
    return true;
}

uvm_ext_gpu_map_t *uvm_vmem_overlay_map(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index)
{
    NvU64 va = uvm_vmem_block(overlay->start) + index * UVM_VMEM_GRANULE;

    return overlay->map ? overlay->map : uvm_vmem_map_at(uvm_vmem_range_find(call->va_space, va), call->gpu, va);
}

NV_STATUS uvm_vmem_overlay_cut(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    NV_STATUS status = uvm_page_tree_alloc_table(call->tree, UVM_PAGE_SIZE_64K, UVM_PMM_ALLOC_FLAGS_EVICT,
                                                 &overlay->map->pt_range_vec.ranges[0], &overlay->table);

    overlay->cut = status == NV_OK;
    return status;
}

NV_STATUS uvm_vmem_overlays_cut(struct uvm_vmem_call *call)
{
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status = NV_OK;

    list_for_each_entry(overlay, &call->touched, touched) {
        if (overlay->cut_wanted && status == NV_OK)
            status = uvm_vmem_overlay_cut(call, overlay);
    }
    return status;
}

void uvm_vmem_overlay_undo(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    uvm_ext_gpu_map_t *map = overlay->map;
    uvm_ext_gpu_map_t *former = overlay->former;

    list_del_init(&overlay->touched);

    if (overlay->fresh) {
        // No PTE was written, so there is none to clear.
        uvm_page_table_range_vec_deinit(&map->pt_range_vec);
        map_destroy(overlay->range, map);
        uvm_vmem_overlay_drop(overlay);
    } else if (overlay->taken) {
        map->mem_handle = former ? former->mem_handle : NULL;
        map->owning_gpu = former ? former->owning_gpu : NULL;
        uvm_kvfree(former);
        loan_put(overlay->loan);
        uvm_vmem_overlay_drop(overlay);
    }
}
