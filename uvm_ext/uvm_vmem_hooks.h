// The functions that the insertions in NVIDIA's files call (kernel-open/hooks.py).
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_HOOKS_H
#define UVM_VMEM_HOOKS_H

#include "uvm_forward_decl.h"
#include "uvm_ext/uvm_vmem_ioctl.h"

#include <linux/fs.h>

struct uvm_vmem_space;

// True if cmd is one of vMem's ioctls. UVM's own have a type byte below 0x10.
static inline bool uvm_vmem_is_ioctl(unsigned int cmd) { return _IOC_TYPE(cmd) == UVM_VMEM_IOCTL_TYPE; }

// Serve a vMem call. Like UVM's own ioctls, it is called with the power management lock held in read mode. It copies
// the parameters in and out itself.
long uvm_vmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg);

// Drop the GPU's overlays and free its pages. UVM has already cleared and invalidated every external mapping on the
// GPU, or its address space was never registered.
//
// LOCKING: the VA space lock must be held in write mode.
void uvm_vmem_unregister_gpu(uvm_va_space_t *va_space, uvm_gpu_t *gpu);

// True if the mapping is an overlay, which UVM's own calls must not split. The uvm_ext_gpu_map_t is a void * here,
// because the structure has no tag by which this header could declare it.
bool uvm_vmem_is_overlay(const void *ext_gpu_map);

// UVM has cleared and invalidated the mapping's entries, and is about to free it: drop the overlay, if it is one.
//
// LOCKING: the VA space lock, perhaps in read mode, and the lock of the external range tree.
void uvm_vmem_closed(void *ext_gpu_map);

// Free the file's state. All GPUs are unregistered, and no other thread can reach the VA space.
void uvm_vmem_destroy(uvm_va_space_t *va_space);

#endif
