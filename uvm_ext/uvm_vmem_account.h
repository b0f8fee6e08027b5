// What all files of one user hold, and the limits.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_ACCOUNT_H
#define UVM_VMEM_ACCOUNT_H

#include "uvm_common.h"

#include <linux/uidgid.h>

struct uvm_vmem_user;

enum uvm_vmem_what {
    UVM_VMEM_DEVICE_BYTES, // device memory: parameter uvm_vmem_max_mbytes
    UVM_VMEM_KERNEL_BYTES, // kernel memory of overlays: parameter uvm_vmem_max_kernel_mbytes
    UVM_VMEM_WHATS,
};

// The account of a user, shared by all of the user's files. NULL if there is no memory.
struct uvm_vmem_user *uvm_vmem_user_get(kuid_t uid);
void uvm_vmem_user_put(struct uvm_vmem_user *user);

// Add bytes to what the user holds. Returns false, and adds nothing, if that would exceed the limit.
bool uvm_vmem_user_charge(struct uvm_vmem_user *user, enum uvm_vmem_what what, NvU64 bytes);
void uvm_vmem_user_uncharge(struct uvm_vmem_user *user, enum uvm_vmem_what what, NvU64 bytes);

// The most bytes that a user may hold; ~0 without a limit.
NvU64 uvm_vmem_user_limit(enum uvm_vmem_what what);

#endif
