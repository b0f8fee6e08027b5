// The life of a file's state.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_FILE_H
#define UVM_VMEM_FILE_H

#include "uvm_vmem_space.h"

#include <linux/fs.h>

// The state of the file, which is made at its first vMem call. NULL if there is no memory.
struct uvm_vmem_space *uvm_vmem_file_space(struct file *filp);

#endif
