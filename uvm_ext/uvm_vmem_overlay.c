// Finds, opens, takes over, cuts and drops overlays.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_overlay.h"
#include "uvm_vmem_hooks.h"

#include "uvm_kvmalloc.h"
#include "uvm_range_tree.h"

void uvm_vmem_entry_clear(struct uvm_vmem_overlay *overlay, NvU32 index)
{
    struct uvm_vmem_entry *entry = &overlay->entries[index];

    list_del(&entry->node);
    entry->handle = NULL;
    overlay->pages &= ~(1U << index);
    atomic64_sub(UVM_VMEM_GRANULE, &overlay->vgpu->bytes_mapped);
}

static void overlay_drop(struct uvm_vmem_overlay *overlay)
{
    NvU32 i;

    for (i = 0; i < UVM_VMEM_GRANULES; i++) {
        if (overlay->pages & (1U << i))
            uvm_vmem_entry_clear(overlay, i);
    }
    atomic64_dec(&overlay->vgpu->overlays);
    uvm_vmem_free(overlay);
}

bool uvm_vmem_is_overlay(const void *ext_gpu_map) { return uvm_vmem_overlay_of(ext_gpu_map) != NULL; }

void uvm_vmem_closed(void *ext_gpu_map)
{
    const uvm_ext_gpu_map_t *map = ext_gpu_map;
    struct uvm_vmem_overlay *overlay = map->vmem;
    struct uvm_vmem_space *space;

    if (!overlay)
        return;

    // The directory entry was cleared with the mapping's entries.
    if (overlay->table.table)
        uvm_page_tree_put_ptes_async(overlay->tree, &overlay->table);

    // Mappings in other ranges may close at the same time. All other changes of records are made with the VA space lock
    // in write mode.
    space = overlay->vgpu->space;
    spin_lock(&space->records);

    // UVM ignores that a fatal error kept it from clearing the entries. The GPU may still reach the pages: they stay
    // until the GPU is unregistered.
    if (uvm_global_get_status() != NV_OK)
        space->fatal = uvm_global_get_status();
    overlay_drop(overlay);
    spin_unlock(&space->records);
}

// The memory handle of an overlay's mapping, which UVM frees with the mapping. NULL if there is no memory.
static uvm_ext_gpu_mem_handle *mem_alloc(struct uvm_vmem_call *call)
{
    uvm_ext_gpu_mem_handle *mem = uvm_kvmalloc_zero(sizeof(*mem));

    if (mem) {
        mem->gpu = call->gpu;
        nv_kref_init(&mem->ref_count);
    }
    return mem;
}

// An overlay with only sparse entries, or NULL if there is no memory.
static struct uvm_vmem_overlay *overlay_alloc(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 start,
                                              NvU64 end)
{
    struct uvm_vmem_overlay *overlay = uvm_vmem_zalloc(sizeof(*overlay));
    NvU32 i;

    if (!overlay)
        return NULL;
    overlay->vgpu = call->vgpu;
    overlay->range = range;
    overlay->start = start;
    overlay->end = end;
    overlay->sparse = uvm_vmem_range_mask(start, end);
    INIT_LIST_HEAD(&overlay->touched);
    for (i = 0; i < UVM_VMEM_GRANULES; i++)
        overlay->entries[i].index = i;
    atomic64_inc(&call->vgpu->overlays);
    return overlay;
}

static void touch(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    overlay->pages_after = overlay->pages;
    overlay->pages_before = overlay->pages;
    overlay->changed_mask = 0;
    overlay->opened = false;
    overlay->taken = false;
    overlay->needs_cut = false;
    overlay->cut = false;
    overlay->former_map = NULL;
    list_add_tail(&overlay->touched, &call->touched);
}

uvm_ext_gpu_map_t *uvm_vmem_map_at(uvm_vmem_range_t *range, uvm_gpu_t *gpu, NvU64 va)
{
    uvm_range_tree_node_t *node = uvm_range_tree_find(&uvm_ext_gpu_range_tree(range, gpu)->tree, va);

    return node ? container_of(node, uvm_ext_gpu_map_t, UVM_VMEM_BASE_NODE) : NULL;
}

static void map_destroy(uvm_vmem_range_t *range, uvm_ext_gpu_map_t *map)
{
    uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(range, UVM_VMEM_BASE(map)->gpu);

    uvm_mutex_lock(&tree->lock);
    uvm_ext_gpu_map_destroy(range, map, NULL);
    uvm_mutex_unlock(&tree->lock);
}

// Create a mapping without page tables over the overlay's addresses.
static NV_STATUS map_create(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, uvm_ext_gpu_mem_handle *mem)
{
    uvm_vmem_range_t *range = overlay->range;
    uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(range, call->gpu);
    uvm_ext_gpu_map_t *map = uvm_kvmalloc_zero(sizeof(*map));
    NV_STATUS status;

    if (!map)
        return NV_ERR_NO_MEMORY;

    UVM_VMEM_BASE(map)->node.start = overlay->start;
    UVM_VMEM_BASE(map)->node.end = overlay->end;
    RB_CLEAR_NODE(&UVM_VMEM_BASE(map)->node.rb_node);
    uvm_tracker_init(&map->tracker);
    UVM_VMEM_BASE(map)->gpu = call->gpu;
    map->owning_gpu = call->gpu;

    uvm_mutex_lock(&tree->lock);
    status = uvm_range_tree_add(&tree->tree, &UVM_VMEM_BASE(map)->node);
    if (status == NV_OK)
        uvm_processor_mask_set_atomic(uvm_vmem_mapped_gpus(range), call->gpu->id);
    uvm_mutex_unlock(&tree->lock);

    if (status != NV_OK) {
        uvm_kvfree(map);
        return status;
    }
    map->mem_handle = mem;
    map->vmem = overlay;
    overlay->map = map;
    return NV_OK;
}

// Find the hole around va, in whole granules, within the block and the range.
static NV_STATUS hole_find(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, NvU64 *start, NvU64 *end)
{
    uvm_va_range_t *va_range = uvm_vmem_va_range(range);
    NV_STATUS status;

    *start = max(uvm_vmem_block(va), va_range->node.start);
    *end = min(uvm_vmem_block_end(va), va_range->node.end);
    status = uvm_range_tree_find_hole_in(&uvm_ext_gpu_range_tree(range, call->gpu)->tree, va, start, end);
    if (status != NV_OK)
        return status;

    // A neighbour with 4 KiB entries may end inside the 64 KiB at va.
    if (!uvm_vmem_whole_granules(start, end) || va < *start || va + UVM_VMEM_GRANULE - 1 > *end)
        return NV_ERR_UVM_ADDRESS_IN_USE;
    return NV_OK;
}

// Get page tables, whose entries are invalid, for an overlay's new mapping.
static NV_STATUS map_get_tables(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay,
                                uvm_vmem_page_size_t page_size)
{
    uvm_page_table_range_vec_t *vec = &UVM_VMEM_BASE(overlay->map)->pt_range_vec;
    NV_STATUS status = NV_ERR_NO_MEMORY;

    vec->tree = call->tree;
    vec->page_size = page_size;
    vec->start = overlay->start;
    vec->size = overlay->end - overlay->start + 1;
    vec->range_count = 1;
    vec->ranges = uvm_kvmalloc_zero(sizeof(*vec->ranges));
    if (vec->ranges)
        status = uvm_page_tree_get_ptes_async(call->tree, page_size, vec->start, vec->size, UVM_PMM_ALLOC_FLAGS_EVICT,
                                              &vec->ranges[0]);
    if (status != NV_OK) {
        // Without the array, UVM's destroy function has no PTEs to clear.
        uvm_kvfree(vec->ranges);
        memset(vec, 0, sizeof(*vec));
    }
    return status;
}

// Open an overlay in the hole around va.
static NV_STATUS overlay_open(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, bool huge,
                              struct uvm_vmem_overlay **out_overlay)
{
    uvm_ext_gpu_mem_handle *mem;
    struct uvm_vmem_overlay *overlay;
    NvU64 start, end;
    NV_STATUS status;

    status = hole_find(call, range, va, &start, &end);
    if (status != NV_OK)
        return status;

    overlay = overlay_alloc(call, range, start, end);
    if (!overlay)
        return NV_ERR_NO_MEMORY;

    mem = mem_alloc(call);
    status = mem ? map_create(call, overlay, mem) : NV_ERR_NO_MEMORY;
    if (status != NV_OK) {
        uvm_kvfree(mem);
        overlay_drop(overlay);
        return status;
    }

    huge = huge && start == uvm_vmem_block(va) && end == uvm_vmem_block_end(va);
    status = map_get_tables(call, overlay, huge ? UVM_PAGE_SIZE_2M : UVM_PAGE_SIZE_64K);
    if (status != NV_OK) {
        map_destroy(range, overlay->map);
        return status;
    }

    touch(call, overlay);
    overlay->opened = true;
    *out_overlay = overlay;
    return NV_OK;
}

// Cut a mapping in two. Both keep their PTEs and share the memory handle, as after a partial UVM_UNMAP_EXTERNAL.
static NV_STATUS map_split(uvm_vmem_range_t *range, uvm_ext_gpu_map_t *map, NvU64 start, uvm_ext_gpu_map_t **out_upper)
{
    uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(range, UVM_VMEM_BASE(map)->gpu);
    uvm_ext_gpu_map_t *upper = uvm_kvmalloc(sizeof(*upper));
    NV_STATUS status;

    if (!upper)
        return NV_ERR_NO_MEMORY;

    // Copy all fields, because those about the memory depend on the release. Then reset what each mapping owns.
    *upper = *map;
    memset(&UVM_VMEM_BASE(upper)->node, 0, sizeof(UVM_VMEM_BASE(upper)->node));
    memset(&UVM_VMEM_BASE(upper)->pt_range_vec, 0, sizeof(UVM_VMEM_BASE(upper)->pt_range_vec));
    memset(&upper->deferred_free, 0, sizeof(upper->deferred_free));
    RB_CLEAR_NODE(&UVM_VMEM_BASE(upper)->node.rb_node);
    uvm_tracker_init(&upper->tracker);

    status = uvm_page_table_range_vec_split_upper(&UVM_VMEM_BASE(map)->pt_range_vec, start - 1,
                                                  &UVM_VMEM_BASE(upper)->pt_range_vec);
    if (status != NV_OK) {
        uvm_kvfree(upper);
        return status;
    }

    UVM_VMEM_BASE(upper)->node.start = start;
    if (upper->mem_handle)
        nv_kref_get(&upper->mem_handle->ref_count);

    uvm_mutex_lock(&tree->lock);
    uvm_range_tree_split(&tree->tree, &UVM_VMEM_BASE(map)->node, &UVM_VMEM_BASE(upper)->node);
    uvm_mutex_unlock(&tree->lock);

    *out_upper = upper;
    return NV_OK;
}

// True if a foreign mapping can become an overlay: its entries end at the block's borders, unmapping it needs no more
// than unmapping local vidmem, and splitting it is quick. Each split copies the records of the page tables behind it
// under the VA space lock, for which all other calls of the process and all GPU faults wait.
static bool map_can_be_taken(uvm_ext_gpu_map_t *map)
{
    // First, because fabric memory of a peer may have no memory handle, as a sparse mapping
    if (uvm_vmem_map_is_fabric(map))
        return false;
    if (UVM_VMEM_BASE(map)->pt_range_vec.range_count > UVM_VMEM_TAKE_TABLES)
        return false;
    if (UVM_VMEM_BASE(map)->pt_range_vec.page_size != UVM_PAGE_SIZE_64K &&
        UVM_VMEM_BASE(map)->pt_range_vec.page_size != UVM_PAGE_SIZE_2M)
        return false;
    return !map->mem_handle || (map->owning_gpu == UVM_VMEM_BASE(map)->gpu && !map->is_sysmem);
}

// Split a foreign mapping so that *map covers exactly [start, end]. Its parts before and after stay mapped as they are.
static NV_STATUS map_isolate(uvm_vmem_range_t *range, NvU64 start, NvU64 end, uvm_ext_gpu_map_t **map)
{
    uvm_ext_gpu_map_t *upper;
    NV_STATUS status;

    if (UVM_VMEM_BASE(*map)->node.start < start) {
        status = map_split(range, *map, start, &upper);
        if (status != NV_OK)
            return status;
        *map = upper;
    }
    if (UVM_VMEM_BASE(*map)->node.end > end)
        return map_split(range, *map, end + 1, &upper);
    return NV_OK;
}

// A mapping without addresses, which holds the memory handle of a mapping that is taken over until the handle can be
// freed. *former_map is NULL for a sparse mapping, which has no handle.
static NV_STATUS former_alloc(const uvm_ext_gpu_map_t *map, uvm_ext_gpu_map_t **former_map)
{
    *former_map = NULL;
    if (!map->mem_handle)
        return NV_OK;

    *former_map = uvm_kvmalloc_zero(sizeof(**former_map));
    if (!*former_map)
        return NV_ERR_NO_MEMORY;
    uvm_tracker_init(&(*former_map)->tracker);
    (*former_map)->mem_handle = map->mem_handle;
    UVM_VMEM_BASE(*former_map)->gpu = UVM_VMEM_BASE(map)->gpu;
    (*former_map)->owning_gpu = map->owning_gpu;
    return NV_OK;
}

// Turn the part of a foreign mapping in va's block into an overlay. Only records change here.
static NV_STATUS overlay_take(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, uvm_ext_gpu_map_t *map,
                              bool huge, struct uvm_vmem_overlay **out_overlay)
{
    NvU64 start = max(uvm_vmem_block(va), UVM_VMEM_BASE(map)->node.start);
    NvU64 end = min(uvm_vmem_block_end(va), UVM_VMEM_BASE(map)->node.end);
    uvm_ext_gpu_map_t *former_map;
    uvm_ext_gpu_mem_handle *mem;
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status;

    if (!map_can_be_taken(map))
        return NV_ERR_UVM_ADDRESS_IN_USE;

    // All parts of the mapping carry its number, so that MAP_AHEAD stays with it.
    if (!map->vmem_origin)
        map->vmem_origin = ++call->space->last_origin;

    // Its PTE writes are complete, or a fatal error ended them.
    status = uvm_tracker_wait(&map->tracker);
    if (status == NV_OK)
        status = map_isolate(range, start, end, &map);
    if (status == NV_OK)
        status = former_alloc(map, &former_map);
    if (status != NV_OK)
        return status;

    mem = mem_alloc(call);
    overlay = NULL;
    if (mem)
        overlay = map->vmem ? map->vmem : overlay_alloc(call, range, start, end);
    if (!overlay) {
        uvm_kvfree(mem);
        uvm_kvfree(former_map);
        return NV_ERR_NO_MEMORY;
    }

    overlay->given_back = false;
    map->mem_handle = mem;
    map->owning_gpu = call->gpu;
    map->vmem = overlay;
    overlay->map = map;

    touch(call, overlay);
    overlay->taken = true;
    overlay->former_map = former_map;
    overlay->needs_cut = UVM_VMEM_BASE(map)->pt_range_vec.page_size == UVM_PAGE_SIZE_2M && !huge;
    *out_overlay = overlay;
    return NV_OK;
}

void uvm_vmem_overlay_touch(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    if (list_empty(&overlay->touched))
        touch(call, overlay);
}

NV_STATUS uvm_vmem_overlay_prepare(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, bool take, bool huge,
                                   struct uvm_vmem_overlay **out_overlay)
{
    uvm_ext_gpu_map_t *map = uvm_vmem_map_at(range, call->gpu, va);
    struct uvm_vmem_overlay *overlay;

    uvm_assert_rwsem_locked_write(&call->va_space->lock);

    if (!map)
        return overlay_open(call, range, va, huge, out_overlay);

    overlay = uvm_vmem_overlay_of(map);
    if (!overlay)
        return take ? overlay_take(call, range, va, map, huge, out_overlay) : NV_ERR_UVM_ADDRESS_IN_USE;

    uvm_vmem_overlay_touch(call, overlay);
    *out_overlay = overlay;
    return NV_OK;
}

NV_STATUS uvm_vmem_overlay_cut(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    NV_STATUS status = NV_OK;

    if (!overlay->table.table) {
        overlay->tree = call->tree;
        status = uvm_page_tree_alloc_table(call->tree, UVM_PAGE_SIZE_64K, UVM_PMM_ALLOC_FLAGS_EVICT,
                                           &UVM_VMEM_BASE(overlay->map)->pt_range_vec.ranges[0], &overlay->table);
        if (status != NV_OK)
            memset(&overlay->table, 0, sizeof(overlay->table));
    }
    overlay->cut = status == NV_OK;
    return status;
}

NV_STATUS uvm_vmem_overlays_cut(struct uvm_vmem_call *call)
{
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status = NV_OK;

    list_for_each_entry(overlay, &call->touched, touched) {
        if (overlay->needs_cut && status == NV_OK)
            status = uvm_vmem_overlay_cut(call, overlay);
    }
    return status;
}

void uvm_vmem_overlay_undo(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    uvm_ext_gpu_map_t *map = overlay->map;
    uvm_ext_gpu_map_t *former_map = overlay->former_map;

    list_del_init(&overlay->touched);

    if (overlay->opened) {
        // No PTE was written, so there is none to clear. This also drops the overlay.
        uvm_page_table_range_vec_deinit(&UVM_VMEM_BASE(map)->pt_range_vec);
        map_destroy(overlay->range, map);
    } else if (overlay->taken) {
        uvm_kvfree(map->mem_handle);
        map->mem_handle = former_map ? former_map->mem_handle : NULL;
        map->owning_gpu = former_map ? former_map->owning_gpu : NULL;
        uvm_kvfree(former_map);
        if (overlay->table.table) {
            overlay->given_back = true;
        } else {
            map->vmem = NULL;
            overlay_drop(overlay);
        }
    }
}
