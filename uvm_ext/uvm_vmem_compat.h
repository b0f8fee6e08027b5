// Differences between releases of nvidia-uvm, detected by searching the source (features.list), not by version number.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_COMPAT_H
#define UVM_VMEM_COMPAT_H

#include "uvm_common.h"
#include "uvm_conf_computing.h"
#include "uvm_forward_decl.h"
#include "uvm_linux.h"
#include "uvm_global.h"
#include "uvm_gpu.h"
#include "uvm_map_external.h"
#include "uvm_mmu.h"
#include "uvm_va_range.h"
#include "uvm_va_space.h"

#include "uvm_vmem_features.h"

// 32 bits in old releases, 64 in new ones
typedef __typeof__(((uvm_page_table_range_t *)0)->page_size) uvm_vmem_page_size_t;

#if UVM_VMEM_HAS_EXTERNAL_TYPE
typedef uvm_va_range_external_t uvm_vmem_range_t;

static inline uvm_va_range_t *uvm_vmem_va_range(uvm_vmem_range_t *range) { return &range->va_range; }

static inline uvm_processor_mask_t *uvm_vmem_mapped_gpus(uvm_vmem_range_t *range) { return &range->mapped_gpus; }

// The external range that contains addr, or NULL.
static inline uvm_vmem_range_t *uvm_vmem_range_find(uvm_va_space_t *va_space, NvU64 addr)
{
    return uvm_va_range_external_find(va_space, addr);
}
#else
typedef uvm_va_range_t uvm_vmem_range_t;

static inline uvm_va_range_t *uvm_vmem_va_range(uvm_vmem_range_t *range) { return range; }

static inline uvm_processor_mask_t *uvm_vmem_mapped_gpus(uvm_vmem_range_t *range)
{
    return &range->external.mapped_gpus;
}

// The external range that contains addr, or NULL.
static inline uvm_vmem_range_t *uvm_vmem_range_find(uvm_va_space_t *va_space, NvU64 addr)
{
    uvm_va_range_t *range = uvm_va_range_find(va_space, addr);

    return range && range->type == UVM_VA_RANGE_TYPE_EXTERNAL ? range : NULL;
}
#endif

// The addresses, the GPU and the page tables of a mapping. Since 610, they are in a structure of their own.
#if UVM_VMEM_HAS_MAP_BASE
#define UVM_VMEM_BASE(map) (&(map)->base)
#define UVM_VMEM_BASE_NODE base.node
#else
#define UVM_VMEM_BASE(map) (map)
#define UVM_VMEM_BASE_NODE node
#endif

// True if the mapping is of fabric memory, which needs a system membar even if it is this GPU's own.
static inline bool uvm_vmem_map_is_fabric(const uvm_ext_gpu_map_t *map)
{
#if UVM_VMEM_HAS_FABRIC_MEMORY
    return map->is_fabricmem;
#else
    return false;
#endif
}

static inline bool uvm_vmem_gpu_is_sriov_heavy(uvm_gpu_t *gpu)
{
#if UVM_VMEM_HAS_PARENT_SRIOV
    return uvm_parent_gpu_is_virt_mode_sriov_heavy(gpu->parent);
#else
    return uvm_gpu_is_virt_mode_sriov_heavy(gpu);
#endif
}

static inline bool uvm_vmem_gpu_is_confidential(uvm_gpu_t *gpu)
{
#if UVM_VMEM_HAS_GLOBAL_CONF_COMPUTING
    return g_uvm_global.conf_computing_enabled;
#else
    return uvm_conf_computing_mode_enabled(gpu);
#endif
}

// True if the CPU reaches the GPU's memory coherently (GH200, GB200), or GPUs share the CPU's page tables. Membars mean
// something else there, and UVM may write page tables by the CPU, where the extension always pushes.
static inline bool uvm_vmem_gpu_is_coherent(uvm_gpu_t *gpu)
{
#if UVM_VMEM_HAS_PARENT_COHERENT
    return uvm_parent_gpu_is_coherent(gpu->parent) || g_uvm_global.ats.enabled;
#else
    return uvm_gpu_is_coherent(gpu->parent) || g_uvm_global.ats.enabled;
#endif
}

static inline bool uvm_vmem_gpu_has_sparse(uvm_gpu_t *gpu)
{
#if UVM_VMEM_HAS_SPARSE_FLAG
    return gpu->parent->sparse_mappings_supported;
#else
    return true;
#endif
}

// True if 2 MiB entries may map video memory. The segments of a virtual MMU can be smaller.
static inline bool uvm_vmem_gpu_has_huge(uvm_gpu_t *gpu)
{
#if UVM_VMEM_HAS_MAX_VIDMEM_PAGE
    return gpu->mem_info.max_vidmem_page_size >= UVM_PAGE_SIZE_2M;
#else
    return true;
#endif
}

#endif
