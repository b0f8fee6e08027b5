// The calls, each implemented in the file named beside it. params is the call's structure, not yet checked.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_API_H
#define UVM_VMEM_API_H

#include "uvm_common.h"

#include <linux/fs.h>

NV_STATUS uvm_vmem_api_query(void *params, struct file *filp);   // uvm_vmem_space.c
NV_STATUS uvm_vmem_api_create(void *params, struct file *filp);  // uvm_vmem_memory.c
NV_STATUS uvm_vmem_api_release(void *params, struct file *filp); // uvm_vmem_release.c
NV_STATUS uvm_vmem_api_map(void *params, struct file *filp);     // uvm_vmem_batch.c
NV_STATUS uvm_vmem_api_unmap(void *params, struct file *filp);   // uvm_vmem_batch.c

#endif
