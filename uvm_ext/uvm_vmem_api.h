// The calls, each in the file named beside it.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_API_H
#define UVM_VMEM_API_H

#include "uvm_common.h"

#include <linux/fs.h>

// params is the call's structure, not yet checked.
NV_STATUS uvm_vmem_api_query(void *params, struct file *filp);   // uvm_vmem_query.c
NV_STATUS uvm_vmem_api_create(void *params, struct file *filp);  // uvm_vmem_create.c
NV_STATUS uvm_vmem_api_release(void *params, struct file *filp); // uvm_vmem_release.c
NV_STATUS uvm_vmem_api_map(void *params, struct file *filp);     // uvm_vmem_batch.c
NV_STATUS uvm_vmem_api_unmap(void *params, struct file *filp);   // uvm_vmem_batch.c

// CREATE was answered, or its answer could not be written.
void uvm_vmem_api_create_end(void *params, struct file *filp, bool told);

#endif
