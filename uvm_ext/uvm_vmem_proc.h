// The proc file.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_PROC_H
#define UVM_VMEM_PROC_H

// Create the proc file once. It goes with UVM's own proc directory when the module is unloaded.
void uvm_vmem_proc_init(void);

#endif
