// The table of calls, and the only place where their structures are copied in and out.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_api.h"
#include "uvm_vmem_compat.h"
#include "uvm_vmem_hooks.h"

#include <linux/mm.h>
#include <linux/nospec.h>
#include <linux/string.h>
#include <linux/uaccess.h>

// An upper bound of the calls' structures
#define MAX_PARAMS 256

// Every structure begins so.
struct head {
    __u32 size;
    __u32 rmStatus;
};

struct call {
    __u32 size;     // of the structure
    __u32 min_size; // when it was released
    NV_STATUS (*fn)(void *params, struct file *filp);
    void (*end)(void *params, struct file *filp, bool told); // of a call that succeeded; may be NULL
};

#define CALL(name, type, released, ...) [_IOC_NR(UVM_VMEM_##name)] = {sizeof(struct type), released, __VA_ARGS__}

static const struct call calls[] = {
    CALL(QUERY, uvm_vmem_query, 168, uvm_vmem_api_query),
    CALL(CREATE, uvm_vmem_create, 56, uvm_vmem_api_create, uvm_vmem_api_create_end),
    CALL(RELEASE, uvm_vmem_release, 48, uvm_vmem_api_release),
    CALL(MAP, uvm_vmem_batch, 72, uvm_vmem_api_map),
    CALL(UNMAP, uvm_vmem_batch, 72, uvm_vmem_api_unmap),
};

#define CHECK_PARAMS(type)                                                                                     \
    BUILD_BUG_ON(sizeof(struct type) > MAX_PARAMS || sizeof(struct type) % 8 || offsetof(struct type, size) || \
                 offsetof(struct type, rmStatus) != offsetof(struct head, rmStatus))

// True if the caller's structure has only zeros from `at` to `size`.
static bool zeros_follow(const char __user *arg, size_t at, size_t size, int *error)
{
    char some[64];
    size_t n;

    for (; at < size; at += n) {
        n = min(size - at, sizeof(some));
        *error = -EFAULT;
        if (copy_from_user(some, arg + at, n))
            return false;
        *error = -E2BIG;
        if (memchr_inv(some, 0, n))
            return false;
    }
    return true;
}

// Copy a structure of any age. What the caller does not know is zero. (The kernel's copy_struct_from_user() is younger
// than the oldest kernels that UVM builds for.) Returns how much of it the caller knows, or -errno.
static int params_copy(void *params, const struct call *call, char __user *arg)
{
    __u32 size, known;
    int error;

    if (get_user(size, (__u32 __user *)arg))
        return -EFAULT;
    if (size < call->min_size)
        return -EINVAL;
    if (size > PAGE_SIZE)
        return -E2BIG;
    known = min(size, call->size);
    memset(params, 0, MAX_PARAMS);
    if (copy_from_user(params, arg, known))
        return -EFAULT;
    return zeros_follow(arg, known, size, &error) ? known : error;
}

long uvm_vmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
    NvU64 params[MAX_PARAMS / sizeof(NvU64)];
    struct head *head = (struct head *)params;
    unsigned int nr = _IOC_NR(cmd);
    NV_STATUS status;
    bool told;
    int known;

    CHECK_PARAMS(uvm_vmem_query);
    CHECK_PARAMS(uvm_vmem_create);
    CHECK_PARAMS(uvm_vmem_release);
    CHECK_PARAMS(uvm_vmem_batch);

    if (nr >= ARRAY_SIZE(calls))
        return -ENOTTY;
    nr = array_index_nospec(nr, ARRAY_SIZE(calls));
    if (!calls[nr].fn || cmd != _IO(UVM_VMEM_IOCTL_TYPE, nr))
        return -ENOTTY;

    // An answer that cannot be written is refused before the call, not after it.
    known = params_copy(params, &calls[nr], (char __user *)arg);
    if (known < 0)
        return known;
    if (copy_to_user((void __user *)arg, params, known))
        return -EFAULT;

    status = uvm_global_get_status();
    if (status == NV_OK && !uvm_fd_va_space(filp))
        status = NV_ERR_ILLEGAL_ACTION;
    if (status == NV_OK)
        status = calls[nr].fn(params, filp);

    head->rmStatus = status;
    told = !copy_to_user((void __user *)arg, params, known);
    if (status == NV_OK && calls[nr].end)
        calls[nr].end(params, filp, told);
    return told ? 0 : -EFAULT;
}
