// The binary interface of the stock NVIDIA driver that the stock backend relies on: ioctls of the resource manager
// (RM, /dev/nvidiactl) and of UVM (/dev/nvidia-uvm), and what changed in them between releases 515 and 595. Facts
// read from the open kernel modules, restated; tests/c/test_abi_stock.c pins every size and offset,
// tests/abi/compare_releases.py compares them with a checkout of the driver's source.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_ABI_H
#define VMEM_STOCK_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

// ---- RM: ioctls of type 'F' whose number carries the size of the parameters ---------------------------------

#define RM_IOCTL(number, type) _IOC(_IOC_READ | _IOC_WRITE, 'F', number, sizeof(type))
#define RM_ESC_FREE 0x29
#define RM_ESC_CONTROL 0x2a
#define RM_ESC_ALLOC 0x2b

struct rm_free {
    uint32_t client, parent, object, status;
};

struct rm_control {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t params_size, status;
};

// Allocates an object of a class. Before 535 the status stood where params_size stands now: struct vmem__abi.
struct rm_alloc {
    uint32_t client, parent, object, class_id;
    uint64_t params;
    uint32_t params_size, status;
};

#define RM_CLASS_CLIENT 0x41
#define RM_CLASS_DEVICE 0x80
#define RM_CLASS_MEMORY 0x40 // local memory of the device

struct rm_device {
    uint32_t device; // the instance that RM_CONTROL_UUID_INFO tells
    uint32_t client_share, target_client, target_device, flags, padding;
    uint64_t va_size, va_start, va_limit;
    uint32_t va_mode, padding2;
};

#define RM_CONTROL_UUID_INFO 0x274 // on the client object
#define RM_UUID_BINARY 2

struct rm_uuid_info {
    uint8_t uuid[256];
    uint32_t flags;
    uint32_t gpu_id, device, subdevice; // out
};

// Parameters of RM_CLASS_MEMORY. Before 545 they end before numa_node.
struct rm_memory {
    uint32_t owner, type, flags, width, height;
    int32_t pitch;
    uint32_t attr, attr2, format, compr_coverage, zcull_coverage, padding;
    uint64_t range_low, range_high, size, alignment, offset, limit, address;
    uint32_t ctag_offset, va_space, internal_flags, tag;
    int32_t numa_node;
    uint32_t padding2;
};

#define RM_MEMORY_IGNORE_BANK_PLACEMENT 0x1u
#define RM_MEMORY_ALIGNMENT_FORCE 0x100u
#define RM_MEMORY_HANDLE_PROVIDED 0x4000u
#define RM_MEMORY_MAP_NOT_REQUIRED 0x8000u // by the CPU
#define RM_MEMORY_PERSISTENT 0x10000u
#define RM_ATTR_PAGE_SIZE_HUGE (3u << 23)
#define RM_ATTR_ALLOW_NONCONTIGUOUS (3u << 27)
#define RM_ATTR2_HUGE_2M (1u << 20)

// ---- UVM: ioctls with plain numbers; the parameters end in a status -----------------------------------------

#define UVM_MAP_EXTERNAL_ALLOCATION 33
#define UVM_UNMAP_EXTERNAL 66
#define UVM_MAP_EXTERNAL_SPARSE 74

// Of UVM_UNMAP_EXTERNAL and UVM_MAP_EXTERNAL_SPARSE.
struct uvm_unmap {
    uint64_t base, length;
    uint8_t uuid[16];
    uint32_t status, padding;
};

// All zero but for the GPU: the driver's defaults, readable and writable by that GPU.
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
    struct uvm_map_tail tail; // where the release's max_gpus is UVM_MAX_GPUS; see vmem__abi_map_tail()
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

// The driver's release as text, as in "580.159.04". -ENODEV when no driver is loaded.
int vmem__abi_release(char *text, size_t size);
// The row for a release. -EPROTONOSUPPORT for a major release that was never compared, unless unknown is set: then the
// row of the releases nearest below it.
int vmem__abi_find(const char *release, int unknown, const struct vmem__abi **out);

// The parts of the parameters whose place depends on the release.
struct uvm_map_tail *vmem__abi_map_tail(const struct vmem__abi *abi, struct uvm_map *params);
uint32_t vmem__abi_alloc_status(const struct vmem__abi *abi, const struct rm_alloc *params);

#endif
