// RM's objects, as /dev/nvidiactl and UVM see them. Numbers and layouts are those of the driver's ioctl interface.
//
// SPDX-License-Identifier: GPL-2.0
#ifndef SIM_RM_H
#define SIM_RM_H

#include "rm_abi.h"

// Bytes of struct rm_memory in which releases do not differ.
#define SIM_RM_MEMORY_COMMON offsetof(struct rm_memory, numa_node)

// owner: the open file that the client belongs to. Statuses are NV_STATUS. instance is for RM_CLASS_DEVICE, memory for
// RM_CLASS_MEMORY.
u32 sim_rm_alloc(void *owner, u32 client, u32 parent, u32 *handle, u32 class_id, u32 instance,
                 struct rm_memory *memory);
u32 sim_rm_free(void *owner, u32 client, u32 handle);
void sim_rm_release(void *owner);

// True if the calling process has the GPU's /dev/nvidiaN open.
bool sim_rmctl_is_open(u32 gpu);
int sim_rmctl_start(void);
void sim_rmctl_stop(void);

#endif
