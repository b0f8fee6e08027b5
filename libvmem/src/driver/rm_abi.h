// The ioctls of NVIDIA's resource manager (RM, /dev/nvidiactl) that allocate physical memory. They have type 'F' and a
// number that includes the size of the parameters. The declarations restate facts, as in abi.h. libvmem, the simulated
// GPU and their tests include this file, so it includes only what a kernel module can include.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_RM_ABI_H
#define VMEM_RM_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define RM_IOCTL(number, type) _IOC(_IOC_READ | _IOC_WRITE, 'F', number, sizeof(type))
#define RM_ESC_FREE 0x29
#define RM_ESC_CONTROL 0x2a
#define RM_ESC_ALLOC 0x2b
#define RM_ESC_REGISTER_FD 201

struct rm_free {
    __u32 client, parent, object, status;
};

struct rm_control {
    __u32 client, object, command, flags;
    __u64 params;
    __u32 params_size, status;
};

// Allocates an object of a class. Before 535, the status was at the offset of params_size: see struct vmem__abi.
struct rm_alloc {
    __u32 client, parent, object, class_id;
    __u64 params;
    __u32 params_size, status;
};

#define RM_CLASS_CLIENT 0x41
#define RM_CLASS_DEVICE 0x80
#define RM_CLASS_MEMORY 0x40 // local memory of the device
#define RM_CLASS_SUBDEVICE 0x2080
#define RM_CLASS_VASPACE 0x90f1

struct rm_device {
    __u32 device; // the instance that RM_CONTROL_UUID_INFO reports
    __u32 client_share, target_client, target_device, flags, padding;
    __u64 va_size, va_start, va_limit;
    __u32 va_mode, padding2;
};

#define RM_CONTROL_UUID_INFO 0x274 // on the client object
#define RM_UUID_BINARY 2

struct rm_uuid_info {
    __u8 uuid[256];
    __u32 flags;
    __u32 gpu_id, device, subdevice; // out
};

#define RM_CONTROL_FB_CAPS 0x801307 // on the device object
#define RM_FB_CAPS_BYTES 3
// RM clears memory when it is freed (from Turing on), so memory that it allocates is zero.
#define RM_FB_CAPS_CLEARED_BYTE 2
#define RM_FB_CAPS_CLEARED_MASK 0x02

// Parameters of RM_CLASS_MEMORY. Before 545 they end before numa_node.
struct rm_memory {
    __u32 owner, type, flags, width, height;
    __s32 pitch;
    __u32 attr, attr2, format, compr_coverage, zcull_coverage, padding;
    __u64 range_low, range_high, size, alignment, offset, limit, address;
    __u32 ctag_offset, va_space, internal_flags, tag;
    __s32 numa_node;
    __u32 padding2;
};

#define RM_MEMORY_IGNORE_BANK_PLACEMENT 0x1u
#define RM_MEMORY_ALIGNMENT_FORCE 0x100u
#define RM_MEMORY_HANDLE_PROVIDED 0x4000u
#define RM_MEMORY_MAP_NOT_REQUIRED 0x8000u // no mapping by the CPU
#define RM_MEMORY_PERSISTENT 0x10000u
#define RM_ATTR_PAGE_SIZE_HUGE (3u << 23)
#define RM_ATTR_ALLOW_NONCONTIGUOUS (3u << 27)
#define RM_ATTR2_HUGE_2M (1u << 20)

#endif
