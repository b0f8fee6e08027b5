// The ABI is frozen: these numbers, sizes and offsets must never change. They are written down here a second time on
// purpose, as a released program has them.
//
// SPDX-License-Identifier: MIT
#include <stddef.h>
#include <stdio.h>

#include "uvm_vmem_ioctl.h"
#include "uvm_vmem_status.h"

#define NUMBER(call, value) _Static_assert((call) == (value), #call " changed")
#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")
#define SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type " changed its size")

NUMBER(UVM_VMEM_QUERY, 0xC0A8BA01);
NUMBER(UVM_VMEM_CREATE, 0xC038BA02);
NUMBER(UVM_VMEM_RELEASE, 0xC030BA03);
NUMBER(UVM_VMEM_MAP, 0xC048BA04);
NUMBER(UVM_VMEM_UNMAP, 0xC048BA05);

SIZE(uvm_vmem_query, 168);
AT(uvm_vmem_query, flags, 16);
AT(uvm_vmem_query, out_abi, 20);
AT(uvm_vmem_query, out_max_ops, 24);
AT(uvm_vmem_query, out_max_bytes, 32);
AT(uvm_vmem_query, out_caps, 40);
AT(uvm_vmem_query, out_page_sizes, 48);
AT(uvm_vmem_query, out_bytes_held, 56);
AT(uvm_vmem_query, out_bytes_created, 64);
AT(uvm_vmem_query, out_bytes_mapped, 72);
AT(uvm_vmem_query, out_bytes_free, 80);
AT(uvm_vmem_query, out_bytes_total, 88);
AT(uvm_vmem_query, out_pushes, 96);
AT(uvm_vmem_query, out_invalidates, 104);
AT(uvm_vmem_query, out_waits, 112);
AT(uvm_vmem_query, rmStatus, 164);

SIZE(uvm_vmem_create, 56);
AT(uvm_vmem_create, page_size, 16);
AT(uvm_vmem_create, count, 24);
AT(uvm_vmem_create, flags, 28);
AT(uvm_vmem_create, out_handle, 32);
AT(uvm_vmem_create, rmStatus, 52);

SIZE(uvm_vmem_release, 48);
AT(uvm_vmem_release, handles, 0);
AT(uvm_vmem_release, count, 8);
AT(uvm_vmem_release, flags, 12);
AT(uvm_vmem_release, out_failed, 16);
AT(uvm_vmem_release, rmStatus, 44);

SIZE(uvm_vmem_op, 40);
AT(uvm_vmem_op, va, 0);
AT(uvm_vmem_op, length, 8);
AT(uvm_vmem_op, handle, 16);
AT(uvm_vmem_op, offset, 24);
AT(uvm_vmem_op, flags, 32);
AT(uvm_vmem_op, reserved, 36);

SIZE(uvm_vmem_batch, 72);
AT(uvm_vmem_batch, ops, 16);
AT(uvm_vmem_batch, count, 24);
AT(uvm_vmem_batch, opSize, 28);
AT(uvm_vmem_batch, flags, 32);
AT(uvm_vmem_batch, out_failed, 36);
AT(uvm_vmem_batch, rmStatus, 68);

// The values that test_vendor.py compares with NVIDIA's headers.
int main(void)
{
#define CALL(name) printf("call %s 0x%lX\n", #name, (unsigned long)(name))
#define STATUS(name) printf("status %s 0x%X\n", #name, (unsigned int)(name))
    CALL(UVM_VMEM_QUERY);
    CALL(UVM_VMEM_CREATE);
    CALL(UVM_VMEM_RELEASE);
    CALL(UVM_VMEM_MAP);
    CALL(UVM_VMEM_UNMAP);
    STATUS(NV_OK);
    STATUS(NV_ERR_BUSY_RETRY);
    STATUS(NV_ERR_CARD_NOT_PRESENT);
    STATUS(NV_ERR_GPU_IS_LOST);
    STATUS(NV_ERR_GPU_UUID_NOT_FOUND);
    STATUS(NV_ERR_ILLEGAL_ACTION);
    STATUS(NV_ERR_IN_USE);
    STATUS(NV_ERR_INSUFFICIENT_RESOURCES);
    STATUS(NV_ERR_INSUFFICIENT_PERMISSIONS);
    STATUS(NV_ERR_INVALID_ADDRESS);
    STATUS(NV_ERR_INVALID_ARGUMENT);
    STATUS(NV_ERR_INVALID_CLASS);
    STATUS(NV_ERR_INVALID_DEVICE);
    STATUS(NV_ERR_INVALID_LIMIT);
    STATUS(NV_ERR_INVALID_OBJECT_HANDLE);
    STATUS(NV_ERR_INVALID_OFFSET);
    STATUS(NV_ERR_INVALID_PARAM_STRUCT);
    STATUS(NV_ERR_INVALID_POINTER);
    STATUS(NV_ERR_NO_MEMORY);
    STATUS(NV_ERR_NOT_SUPPORTED);
    STATUS(NV_ERR_OBJECT_NOT_FOUND);
    STATUS(NV_ERR_OUT_OF_RANGE);
    STATUS(NV_ERR_STATE_IN_USE);
    STATUS(NV_ERR_TIMEOUT);
    STATUS(NV_ERR_TIMEOUT_RETRY);
    STATUS(NV_ERR_UVM_ADDRESS_IN_USE);
    return 0;
}
