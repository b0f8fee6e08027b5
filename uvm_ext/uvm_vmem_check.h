// Checks of user input, made before any lock is taken. The same source is compiled into the module and into a test
// program.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_CHECK_H
#define UVM_VMEM_CHECK_H

#include "uvm_vmem_pure.h"
#include "uvm_vmem_status.h"

// Check everything in a call's structure that does not depend on the file's state.
NV_STATUS uvm_vmem_check_query(const struct uvm_vmem_query *p);
NV_STATUS uvm_vmem_check_create(const struct uvm_vmem_create *p);
NV_STATUS uvm_vmem_check_release(const struct uvm_vmem_release *p);
NV_STATUS uvm_vmem_check_batch(const struct uvm_vmem_batch *p);

// Check one element. *total is the sum of the lengths so far, which the function updates.
NV_STATUS uvm_vmem_check_op(const struct uvm_vmem_op *op, bool map, __u64 *total);

#endif
