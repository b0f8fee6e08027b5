// What RELEASE works with, made with a file's state so that the call itself needs no memory.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_RELEASE_H
#define UVM_VMEM_RELEASE_H

struct uvm_vmem_release_room;

// NULL when out of memory.
struct uvm_vmem_release_room *uvm_vmem_release_room_alloc(void);
void uvm_vmem_release_room_free(struct uvm_vmem_release_room *room);

#endif
