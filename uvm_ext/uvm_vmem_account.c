// Accounts by user. A limit per open file would be useless, because any process can open more files.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_account.h"

#include "uvm_kvmalloc.h"

#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>

static unsigned int uvm_vmem_max_mbytes;
module_param(uvm_vmem_max_mbytes, uint, 0644);
MODULE_PARM_DESC(uvm_vmem_max_mbytes, "vMem: most device memory that one user may hold, in MiB; 0: no limit.");

static unsigned int uvm_vmem_max_kernel_mbytes;
module_param(uvm_vmem_max_kernel_mbytes, uint, 0644);
MODULE_PARM_DESC(uvm_vmem_max_kernel_mbytes,
                 "vMem: most kernel memory for the addresses that one user maps or keeps open, in MiB, about 1400 per "
                 "TiB of addresses; 0: an eighth of the machine's memory.");

struct uvm_vmem_user {
    struct list_head node;
    kuid_t uid;
    NvU32 files;
    spinlock_t lock; // of bytes
    NvU64 bytes[UVM_VMEM_WHATS];
};

static LIST_HEAD(g_users);
static DEFINE_MUTEX(g_users_lock);

struct uvm_vmem_user *uvm_vmem_user_get(kuid_t uid)
{
    struct uvm_vmem_user *user;

    mutex_lock(&g_users_lock);
    list_for_each_entry(user, &g_users, node) {
        if (uid_eq(user->uid, uid))
            goto found;
    }
    user = uvm_kvmalloc_zero(sizeof(*user));
    if (!user)
        goto out;
    user->uid = uid;
    spin_lock_init(&user->lock);
    list_add_tail(&user->node, &g_users);
found:
    user->files++;
out:
    mutex_unlock(&g_users_lock);
    return user;
}

void uvm_vmem_user_put(struct uvm_vmem_user *user)
{
    mutex_lock(&g_users_lock);
    if (!--user->files) {
        UVM_ASSERT(!user->bytes[UVM_VMEM_DEVICE_BYTES]);
        UVM_ASSERT(!user->bytes[UVM_VMEM_KERNEL_BYTES]);
        list_del(&user->node);
        uvm_kvfree(user);
    }
    mutex_unlock(&g_users_lock);
}

NvU64 uvm_vmem_user_limit(enum uvm_vmem_what what)
{
    unsigned int mbytes = READ_ONCE(uvm_vmem_max_mbytes);
    struct sysinfo machine;

    if (what == UVM_VMEM_DEVICE_BYTES)
        return mbytes ? (NvU64)mbytes << 20 : ~0ULL;

    mbytes = READ_ONCE(uvm_vmem_max_kernel_mbytes);
    if (mbytes)
        return (NvU64)mbytes << 20;
    si_meminfo(&machine);
    return (NvU64)machine.totalram * machine.mem_unit / 8;
}

bool uvm_vmem_user_charge(struct uvm_vmem_user *user, enum uvm_vmem_what what, NvU64 bytes)
{
    NvU64 limit = uvm_vmem_user_limit(what);
    bool fits;

    spin_lock(&user->lock);
    fits = user->bytes[what] <= limit && bytes <= limit - user->bytes[what];
    if (fits)
        user->bytes[what] += bytes;
    spin_unlock(&user->lock);
    return fits;
}

void uvm_vmem_user_uncharge(struct uvm_vmem_user *user, enum uvm_vmem_what what, NvU64 bytes)
{
    spin_lock(&user->lock);
    UVM_ASSERT(user->bytes[what] >= bytes);
    user->bytes[what] -= bytes;
    spin_unlock(&user->lock);
}
