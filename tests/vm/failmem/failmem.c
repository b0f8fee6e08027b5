// Fails allocations of nvidia-uvm.ko, one at a time, without a kernel built for fault injection. Probes on UVM's own
// allocators and on the kernel's slab caches make the nth call return NULL, and a probe on the kernel's threads makes
// it return -ENOMEM. Slabs and threads count when the caller is nvidia-uvm's code.
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

static int return_value(struct pt_regs *regs, long value)
{
    regs->ip = (unsigned long)failmem_return;
    regs->ax = value;
    return 1; // ip was changed: do not run the probed instruction
}
NOKPROBE_SYMBOL(return_value);

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
    return return_value(regs, 0);
}

static int on_slab_alloc(struct kprobe *p, struct pt_regs *regs);
static int on_thread_create(struct kprobe *p, struct pt_regs *regs);

#define PROBE(symbol, handler) {.symbol_name = symbol, .pre_handler = handler, .post_handler = on_after}

static struct kprobe probes[] = {
    PROBE("nvidia_uvm:__uvm_kvmalloc", on_uvm_alloc),
    PROBE("nvidia_uvm:__uvm_kvmalloc_zero", on_uvm_alloc),
    PROBE("kthread_create_on_node", on_thread_create),
    // Named by the kernel's version
    PROBE("kmem_cache_alloc", on_slab_alloc),
    PROBE("kmem_cache_alloc_noprof", on_slab_alloc),
    PROBE("kmalloc_trace", on_slab_alloc),
    PROBE("__kmalloc_cache_noprof", on_slab_alloc),
    PROBE("__kmalloc", on_slab_alloc),
    PROBE("__kmalloc_noprof", on_slab_alloc),
    PROBE("kvmalloc_node", on_slab_alloc),
    PROBE("__kvmalloc_node_noprof", on_slab_alloc),
};

// The distance of the caller's code from the first of UVM's allocators
static unsigned long from_uvm(struct pt_regs *regs)
{
    return *(unsigned long *)regs->sp - (unsigned long)probes[0].addr;
}

// UVM's lock and leak checkers allocate, too. Without that memory, its asserts report locks that are held.
static bool for_a_checker(unsigned long caller)
{
    char name[48];

    snprintf(name, sizeof(name), "%ps", (void *)caller);
    return strstarts(name, "thread_context_non_interrupt_init") || strstarts(name, "alloc_tracking_add");
}

static bool fails(struct pt_regs *regs, const char *what)
{
    if (READ_ONCE(armed) != current || from_uvm(regs) + TEXT_SPAN > 2 * TEXT_SPAN)
        return false;
    if (for_a_checker(*(unsigned long *)regs->sp) || !hit())
        return false;
    snprintf(file, sizeof(file), "%s, from %pS", what, (void *)*(unsigned long *)regs->sp);
    line = 0;
    return true;
}

static int on_slab_alloc(struct kprobe *p, struct pt_regs *regs)
{
    // UVM's own allocators were counted when they were called, and call the kernel's in turn
    if (from_uvm(regs) < 0x800)
        return 0;
    return fails(regs, "slab") ? return_value(regs, 0) : 0;
}

static int on_thread_create(struct kprobe *p, struct pt_regs *regs)
{
    return fails(regs, "thread") ? return_value(regs, -ENOMEM) : 0;
}

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

static void probes_remove(int count)
{
    while (count--) {
        if (probes[count].addr)
            unregister_kprobe(&probes[count]);
    }
}

static int __init failmem_init(void)
{
    int rc, i;

    for (i = 0; i < ARRAY_SIZE(probes); i++) {
        rc = register_kprobe(&probes[i]);
        if (rc == -ENOENT && i > 2) { // another version's name
            probes[i].addr = NULL;
            continue;
        }
        if (rc) {
            pr_err("failmem: %s: %d\n", probes[i].symbol_name, rc);
            probes_remove(i);
            return rc;
        }
    }
    rc = misc_register(&device);
    if (rc)
        probes_remove(ARRAY_SIZE(probes));
    return rc;
}

static void __exit failmem_exit(void)
{
    misc_deregister(&device);
    probes_remove(ARRAY_SIZE(probes));
}

module_init(failmem_init);
module_exit(failmem_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Fails allocations of nvidia-uvm.ko for vMem's tests");
