// Shadows the driver's file of this name, so that nv_uvm_interface.h can be included without its configuration tests.
//
// SPDX-License-Identifier: GPL-2.0
#ifndef SIM_UVM_LINUX_H
#define SIM_UVM_LINUX_H
#include <linux/kernel.h>
#include <linux/pci.h>
#include <linux/types.h>
#endif
