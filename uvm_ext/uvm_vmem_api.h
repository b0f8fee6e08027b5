// The calls, and what a file's state needs of them, each in the file named beside it.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_API_H
#define UVM_VMEM_API_H

#include "uvm_common.h"

#include <linux/fs.h>

// params is the call's structure, not yet checked.
NV_STATUS uvm_vmem_api_query(void *params, struct file *filp);   // uvm_vmem_space.c
NV_STATUS uvm_vmem_api_create(void *params, struct file *filp);  // uvm_vmem_memory.c
NV_STATUS uvm_vmem_api_release(void *params, struct file *filp); // uvm_vmem_release.c
NV_STATUS uvm_vmem_api_map(void *params, struct file *filp);     // uvm_vmem_batch.c
NV_STATUS uvm_vmem_api_unmap(void *params, struct file *filp);   // uvm_vmem_batch.c

// RELEASE's working memory, allocated with the state so that the call itself needs none (uvm_vmem_release.c). NULL if
// there is no memory.
struct uvm_vmem_release_room *uvm_vmem_release_room_alloc(void);
void uvm_vmem_release_room_free(struct uvm_vmem_release_room *room);

// Create the proc file once. It goes with UVM's own proc directory when the module is unloaded (uvm_vmem_proc.c).
void uvm_vmem_proc_init(void);

#endif
