// The binary interface of the stock NVIDIA driver that the stock backend relies on. It has ioctls of the resource
// manager (rm_abi.h) and of UVM (/dev/nvidia-uvm), with their changes between releases 515 and 615. The declarations
// restate facts from the open kernel modules. tests/c/test_abi_stock.c pins every size and offset, and
// tests/abi/compare_releases.py compares them with a checkout of the driver's source, up to 595.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_ABI_H
#define VMEM_STOCK_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#include "driver/rm_abi.h"

// ---- UVM: ioctls with plain numbers; the parameters end in a status -----------------------------------------

#define UVM_MAP_EXTERNAL_ALLOCATION 33
#define UVM_UNMAP_EXTERNAL 66
#define UVM_MAP_EXTERNAL_SPARSE 74

// Parameters of UVM_UNMAP_EXTERNAL and UVM_MAP_EXTERNAL_SPARSE.
struct uvm_unmap {
    uint64_t base, length;
    uint8_t uuid[16];
    uint32_t status, padding;
};

// All zero except the GPU, which selects the driver's defaults: readable and writable by that GPU.
struct uvm_attributes {
    uint8_t uuid[16];
    uint32_t mapping, caching, format, element_bits, compression;
};

// UVM_MAP_EXTERNAL_ALLOCATION takes a head, attributes for as many GPUs as the release can have, and a tail.
struct uvm_map_head {
    uint64_t base, length, offset;
};
struct uvm_map_tail {
    uint64_t attributes_count;
    int32_t rm_control_fd;
    uint32_t client, memory, status;
};
#define UVM_MAX_GPUS 256 // of any release
struct uvm_map {
    struct uvm_map_head head;
    struct uvm_attributes attributes[UVM_MAX_GPUS];
    struct uvm_map_tail tail; // only here if the release's max_gpus is UVM_MAX_GPUS; see vmem__abi_map_tail()
};

// ---- releases -----------------------------------------------------------------------------------------------

struct vmem__release {
    unsigned major, minor, patch;
};

struct vmem__abi {
    struct vmem__release since;
    uint32_t alloc_status; // offset of the status in struct rm_alloc
    uint32_t memory_size;  // bytes of struct rm_memory
    uint32_t max_gpus;     // in UVM_MAP_EXTERNAL_ALLOCATION
};

// The driver's release as text, for example "580.159.04". -ENODEV if no driver is loaded.
int vmem__abi_release(char *text, size_t size);
// The row of a release. For a major release that was never checked: -EPROTONOSUPPORT or, if unknown is set, the row of
// the nearest release below it.
int vmem__abi_find(const char *release, int unknown, const struct vmem__abi **out);

// The parts of the parameters whose offset depends on the release.
struct uvm_map_tail *vmem__abi_map_tail(const struct vmem__abi *abi, struct uvm_map *params);
uint32_t vmem__abi_alloc_status(const struct vmem__abi *abi, const struct rm_alloc *params);

#endif
