// RM's objects, as /dev/nvidiactl and UVM see them. Numbers and layouts are those of the driver's ioctl interface.
//
// SPDX-License-Identifier: GPL-2.0
#ifndef SIM_RM_H
#define SIM_RM_H

#include <linux/types.h>

#define RM_CLASS_MEMORY 0x40
#define RM_CLASS_CLIENT 0x41
#define RM_CLASS_DEVICE 0x80
#define RM_CLASS_SUBDEVICE 0x2080
#define RM_CLASS_VASPACE 0x90f1

// Parameters of RM_CLASS_MEMORY, up to where releases differ.
struct sim_rm_memory {
    u32 owner, type, flags, width, height;
    s32 pitch;
    u32 attr, attr2, format, compr_coverage, zcull_coverage, pad;
    u64 range_low, range_high, size, alignment, offset, limit, address;
    u32 ctag_offset, va_space, internal_flags, tag;
};

// owner: the open file that the client belongs to. Statuses are NV_STATUS. instance is for RM_CLASS_DEVICE, memory for
// RM_CLASS_MEMORY.
u32 sim_rm_alloc(void *owner, u32 client, u32 parent, u32 *handle, u32 class_id, u32 instance,
                 struct sim_rm_memory *memory);
u32 sim_rm_free(void *owner, u32 client, u32 handle);
void sim_rm_release(void *owner);

int sim_rmctl_start(void);
void sim_rmctl_stop(void);

#endif
