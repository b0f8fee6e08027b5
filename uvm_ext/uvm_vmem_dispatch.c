// The table of calls, and the only place where their structures are copied in and out.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_api.h"
#include "uvm_vmem_compat.h"
#include "uvm_vmem_hooks.h"

#include <linux/nospec.h>
#include <linux/uaccess.h>

// An upper bound of the calls' structures
#define MAX_PARAMS 256

struct call {
    unsigned int cmd;
    NV_STATUS (*fn)(void *params, struct file *filp);
};

#define CALL(name, function) [_IOC_NR(UVM_VMEM_##name)] = {UVM_VMEM_##name, uvm_vmem_api_##function}

static const struct call calls[] = {
    CALL(QUERY, query), CALL(CREATE, create), CALL(RELEASE, release), CALL(MAP, map), CALL(UNMAP, unmap),
};

// Every structure ends with rmStatus.
#define CHECK_PARAMS(type)                                                      \
    BUILD_BUG_ON(sizeof(struct type) > MAX_PARAMS || sizeof(struct type) % 8 || \
                 offsetof(struct type, rmStatus) != sizeof(struct type) - sizeof(__u32))

long uvm_vmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
    NvU64 params[MAX_PARAMS / sizeof(NvU64)];
    unsigned int nr = _IOC_NR(cmd);
    size_t size = _IOC_SIZE(cmd);
    NV_STATUS status;

    CHECK_PARAMS(uvm_vmem_query);
    CHECK_PARAMS(uvm_vmem_create);
    CHECK_PARAMS(uvm_vmem_release);
    CHECK_PARAMS(uvm_vmem_batch);

    if (nr >= ARRAY_SIZE(calls))
        return -EINVAL;
    nr = array_index_nospec(nr, ARRAY_SIZE(calls));
    if (!calls[nr].fn || calls[nr].cmd != cmd)
        return -EINVAL;

    if (copy_from_user(params, (void __user *)arg, size))
        return -EFAULT;

    status = uvm_global_get_status();
    if (status == NV_OK && !uvm_fd_va_space(filp))
        status = NV_ERR_ILLEGAL_ACTION;
    if (status == NV_OK)
        status = calls[nr].fn(params, filp);

    ((__u32 *)params)[size / sizeof(__u32) - 1] = status;
    return copy_to_user((void __user *)arg, params, size) ? -EFAULT : 0;
}
