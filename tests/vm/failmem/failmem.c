// Fails allocations of nvidia-uvm.ko, one at a time, without a kernel built for fault injection: probes on UVM's own
// allocators and on the kernel's slab caches make the nth call return NULL. Slab allocations count when the caller is
// nvidia-uvm's code.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/kprobes.h>
#include <linux/linkage.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include <asm/ibt.h>

#include "failmem_uapi.h"

// Further apart than this no two functions of one module are.
#define TEXT_SPAN (4UL << 20)

static struct task_struct *armed;
static u32 nth, seen, fired, line;
static char file[64];

// Where a probed call continues when it is to fail: at a bare return, as if it were the function. The stack is left
// alone, since a probe that rides on ftrace cannot move it.
void failmem_return(void);
asm(".pushsection .text\n"
    ".type failmem_return, @function\n"
    "failmem_return:\n" ASM_ENDBR ASM_RET ".size failmem_return, .-failmem_return\n"
    ".popsection\n");

static int return_null(struct pt_regs *regs)
{
    regs->ip = (unsigned long)failmem_return;
    regs->ax = 0;
    return 1; // ip was changed: do not run the probed instruction
}
NOKPROBE_SYMBOL(return_null);

static bool hit(void)
{
    seen++;
    if (seen != nth)
        return false;
    fired = 1;
    return true;
}

// Its presence keeps the probes from being optimised: only then may a handler change where the call continues.
static void on_after(struct kprobe *p, struct pt_regs *regs, unsigned long flags) {}

// __uvm_kvmalloc(size, file, line, function) and its sisters
static int on_uvm_alloc(struct kprobe *p, struct pt_regs *regs)
{
    if (READ_ONCE(armed) != current || !hit())
        return 0;
    strscpy(file, (const char *)regs->si, sizeof(file));
    line = regs->dx;
    return return_null(regs);
}

static struct kprobe probes[] = {
    {.symbol_name = "nvidia_uvm:__uvm_kvmalloc", .pre_handler = on_uvm_alloc, .post_handler = on_after},
    {.symbol_name = "nvidia_uvm:__uvm_kvmalloc_zero", .pre_handler = on_uvm_alloc, .post_handler = on_after},
};

static int on_slab_alloc(struct kprobe *p, struct pt_regs *regs)
{
    unsigned long caller = *(unsigned long *)regs->sp, uvm = (unsigned long)probes[0].addr;

    if (READ_ONCE(armed) != current || caller - uvm + TEXT_SPAN > 2 * TEXT_SPAN)
        return 0;
    // UVM's own allocators were counted when they were called, and call the kernel's in turn
    if (caller - uvm < 0x800)
        return 0;
    if (!hit())
        return 0;
    snprintf(file, sizeof(file), "slab, from %pS", (void *)caller);
    line = 0;
    return return_null(regs);
}

static struct kprobe slab_probe = {
    .symbol_name = "kmem_cache_alloc",
    .pre_handler = on_slab_alloc,
    .post_handler = on_after,
};

static long failmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
    struct failmem f;

    if (cmd != FAILMEM_ARM)
        return -ENOTTY;
    if (copy_from_user(&f, (void __user *)arg, sizeof(f)))
        return -EFAULT;
    WRITE_ONCE(armed, NULL);
    f.seen = seen;
    f.fired = fired;
    f.line = line;
    memcpy(f.file, file, sizeof(file));
    nth = f.nth;
    seen = fired = line = 0;
    memset(file, 0, sizeof(file));
    if (copy_to_user((void __user *)arg, &f, sizeof(f)))
        return -EFAULT;
    if (nth)
        WRITE_ONCE(armed, current);
    return 0;
}

static int failmem_release(struct inode *inode, struct file *filp)
{
    WRITE_ONCE(armed, NULL);
    return 0;
}

static const struct file_operations fops = {
    .owner = THIS_MODULE,
    .unlocked_ioctl = failmem_ioctl,
    .release = failmem_release,
};

static struct miscdevice device = {.minor = MISC_DYNAMIC_MINOR, .name = "failmem", .fops = &fops, .mode = 0600};

static int __init failmem_init(void)
{
    int rc, i;

    for (i = 0; i < ARRAY_SIZE(probes); i++) {
        rc = register_kprobe(&probes[i]);
        if (rc) {
            pr_err("failmem: %s: %d\n", probes[i].symbol_name, rc);
            goto out;
        }
    }
    rc = register_kprobe(&slab_probe);
    if (rc)
        goto out;
    rc = misc_register(&device);
    if (rc)
        unregister_kprobe(&slab_probe);
out:
    if (rc)
        while (i--)
            unregister_kprobe(&probes[i]);
    return rc;
}

static void __exit failmem_exit(void)
{
    int i;

    misc_deregister(&device);
    unregister_kprobe(&slab_probe);
    for (i = 0; i < ARRAY_SIZE(probes); i++)
        unregister_kprobe(&probes[i]);
}

module_init(failmem_init);
module_exit(failmem_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Fails allocations of nvidia-uvm.ko for vMem's tests");
