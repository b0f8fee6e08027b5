// The working memory of RELEASE, allocated with a file's state so that the call itself needs none.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_RELEASE_H
#define UVM_VMEM_RELEASE_H

struct uvm_vmem_release_room;

// NULL if there is no memory.
struct uvm_vmem_release_room *uvm_vmem_release_room_alloc(void);
void uvm_vmem_release_room_free(struct uvm_vmem_release_room *room);

#endif
