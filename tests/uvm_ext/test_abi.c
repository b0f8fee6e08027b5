// The ABI is frozen: these numbers and offsets must never change, and a size may only grow. They are written down here a
// second time on purpose, as a released program has them.
//
// SPDX-License-Identifier: MIT
#include <stddef.h>
#include <stdio.h>

#include "uvm_vmem_ioctl.h"
#include "uvm_vmem_status.h"

#define NUMBER(call, value) _Static_assert((call) == (value), #call " changed")
#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")
#define SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type " changed its size")

NUMBER(UVM_VMEM_QUERY, 0xBA01);
NUMBER(UVM_VMEM_CREATE, 0xBA02);
NUMBER(UVM_VMEM_RELEASE, 0xBA03);
NUMBER(UVM_VMEM_MAP, 0xBA04);
NUMBER(UVM_VMEM_UNMAP, 0xBA05);

SIZE(uvm_vmem_query, 168);
AT(uvm_vmem_query, size, 0);
AT(uvm_vmem_query, rmStatus, 4);
AT(uvm_vmem_query, flags, 24);
AT(uvm_vmem_query, out_abi, 28);
AT(uvm_vmem_query, out_max_ops, 32);
AT(uvm_vmem_query, out_max_bytes, 40);
AT(uvm_vmem_query, out_caps, 48);
AT(uvm_vmem_query, out_page_sizes, 56);
AT(uvm_vmem_query, out_bytes_held, 64);
AT(uvm_vmem_query, out_bytes_created, 72);
AT(uvm_vmem_query, out_bytes_mapped, 80);
AT(uvm_vmem_query, out_bytes_free, 88);
AT(uvm_vmem_query, out_bytes_total, 96);
AT(uvm_vmem_query, out_pushes, 104);
AT(uvm_vmem_query, out_invalidates, 112);
AT(uvm_vmem_query, out_waits, 120);

SIZE(uvm_vmem_create, 56);
AT(uvm_vmem_create, size, 0);
AT(uvm_vmem_create, rmStatus, 4);
AT(uvm_vmem_create, page_size, 24);
AT(uvm_vmem_create, count, 32);
AT(uvm_vmem_create, flags, 36);
AT(uvm_vmem_create, out_handle, 40);

SIZE(uvm_vmem_release, 48);
AT(uvm_vmem_release, size, 0);
AT(uvm_vmem_release, rmStatus, 4);
AT(uvm_vmem_release, handles, 8);
AT(uvm_vmem_release, count, 16);
AT(uvm_vmem_release, flags, 20);
AT(uvm_vmem_release, out_failed, 24);

SIZE(uvm_vmem_op, 40);
AT(uvm_vmem_op, va, 0);
AT(uvm_vmem_op, length, 8);
AT(uvm_vmem_op, handle, 16);
AT(uvm_vmem_op, offset, 24);
AT(uvm_vmem_op, flags, 32);
AT(uvm_vmem_op, reserved, 36);

SIZE(uvm_vmem_batch, 72);
AT(uvm_vmem_batch, size, 0);
AT(uvm_vmem_batch, rmStatus, 4);
AT(uvm_vmem_batch, ops, 24);
AT(uvm_vmem_batch, count, 32);
AT(uvm_vmem_batch, opSize, 36);
AT(uvm_vmem_batch, flags, 40);
AT(uvm_vmem_batch, out_failed, 44);

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
