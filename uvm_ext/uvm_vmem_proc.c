// /proc/driver/nvidia-uvm/vmem: what each file holds, for a person to read.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_space.h"

#include "nv-procfs.h"

#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define PROC_NAME "driver/nvidia-uvm/vmem"

#ifdef CONFIG_PROC_FS
static void show_space(struct uvm_vmem_space *space, void *arg)
{
    struct seq_file *s = arg;
    struct uvm_vmem_gpu *vgpu;

    mutex_lock(&space->lock);
    seq_printf(s,
               "process %d %s: handles %llu, pushes %llu, invalidates %llu, waits %llu\n",
               space->tgid,
               space->comm,
               space->num_handles,
               (NvU64)atomic64_read(&space->pushes),
               (NvU64)atomic64_read(&space->invalidates),
               (NvU64)atomic64_read(&space->waits));
    list_for_each_entry(vgpu, &space->gpus, node) {
        seq_printf(s,
                   "  gpu %s: held %llu, created %llu, mapped %llu, windows %llu\n",
                   uvm_gpu_name(vgpu->gpu),
                   vgpu->bytes_held,
                   vgpu->bytes_created,
                   (NvU64)atomic64_read(&vgpu->bytes_mapped),
                   (NvU64)atomic64_read(&vgpu->windows));
    }
    mutex_unlock(&space->lock);
}

static int uvm_vmem_proc_show(struct seq_file *s, void *arg)
{
    seq_printf(s, "abi %d\n", UVM_VMEM_ABI);
    uvm_vmem_spaces_for_each(show_space, s);
    return 0;
}

static int uvm_vmem_proc_open(struct inode *inode, struct file *filp)
{
    return single_open(filp, uvm_vmem_proc_show, NULL);
}

static const nv_proc_ops_t proc_ops =
{
    NV_PROC_OPS_SET_OWNER()
    .NV_PROC_OPS_OPEN = uvm_vmem_proc_open,
    .NV_PROC_OPS_READ = seq_read,
    .NV_PROC_OPS_LSEEK = seq_lseek,
    .NV_PROC_OPS_RELEASE = single_release,
};

void uvm_vmem_proc_init(void)
{
    static atomic_t made;

    // Without the file only the statistics are missing.
    if (!atomic_xchg(&made, 1))
        (void)proc_create_data(PROC_NAME, 0444, NULL, &proc_ops, NULL);
}
#else
void uvm_vmem_proc_init(void)
{
}
#endif
