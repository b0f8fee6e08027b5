// /proc/driver/nvidia-uvm/vmem: what each file holds, in text form.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_proc.h"
#include "uvm_vmem_space.h"

#include "nv-procfs.h"

#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define PROC_NAME "driver/nvidia-uvm/vmem"

#ifdef CONFIG_PROC_FS
// The process chose its name. Whatever it chose is one word here, without control characters.
static void comm_show(struct seq_file *s, const char *comm)
{
    for (; *comm; comm++) {
        if (*comm > ' ' && *comm < 0x7F && *comm != '\\')
            seq_putc(s, *comm);
        else
            seq_printf(s, "\\%03o", (unsigned char)*comm);
    }
}

// Shows one file at a time, with a reference to it and without the lock of the list. A reader that waits for one file
// therefore delays no process's first or last call.
static void *vmem_seq_start(struct seq_file *s, loff_t *pos)
{
    return *pos ? uvm_vmem_space_nth(*pos - 1) : SEQ_START_TOKEN;
}

static void vmem_seq_stop(struct seq_file *s, void *v)
{
    if (v && v != SEQ_START_TOKEN)
        uvm_vmem_space_put(v);
}

static void *vmem_seq_next(struct seq_file *s, void *v, loff_t *pos)
{
    vmem_seq_stop(s, v);
    ++*pos;
    return uvm_vmem_space_nth(*pos - 1);
}

static int vmem_seq_show(struct seq_file *s, void *v)
{
    struct uvm_vmem_space *space = v;
    struct uvm_vmem_gpu *vgpu;

    if (v == SEQ_START_TOKEN) {
        seq_printf(s, "abi %d\n", UVM_VMEM_ABI);
        return 0;
    }

    mutex_lock(&space->lock);
    seq_printf(s, "process %d ", space->tgid);
    comm_show(s, space->comm);
    seq_printf(s, ": handles %llu, pushes %llu, invalidates %llu, waits %llu, examined %llu\n", space->num_handles,
               (NvU64)atomic64_read(&space->pushes), (NvU64)atomic64_read(&space->invalidates),
               (NvU64)atomic64_read(&space->waits), (NvU64)atomic64_read(&space->entries_examined));
    list_for_each_entry(vgpu, &space->gpus, node) {
        seq_printf(s, "  gpu %s: held %llu, created %llu, mapped %llu, overlays %llu\n", uvm_gpu_name(vgpu->gpu),
                   vgpu->bytes_held, vgpu->bytes_created, (NvU64)atomic64_read(&vgpu->bytes_mapped),
                   (NvU64)atomic64_read(&vgpu->overlays));
    }
    mutex_unlock(&space->lock);
    return 0;
}

static const struct seq_operations vmem_seq_ops = {
    .start = vmem_seq_start,
    .next = vmem_seq_next,
    .stop = vmem_seq_stop,
    .show = vmem_seq_show,
};

static int uvm_vmem_proc_open(struct inode *inode, struct file *filp) { return seq_open(filp, &vmem_seq_ops); }

static const nv_proc_ops_t proc_ops = {
    NV_PROC_OPS_SET_OWNER().NV_PROC_OPS_OPEN = uvm_vmem_proc_open,
    .NV_PROC_OPS_READ = seq_read,
    .NV_PROC_OPS_LSEEK = seq_lseek,
    .NV_PROC_OPS_RELEASE = seq_release,
};

void uvm_vmem_proc_init(void)
{
    static atomic_t made;

    // Readable by root only, because it names processes of all users. Without the file, only the statistics are
    // missing.
    if (!atomic_xchg(&made, 1))
        (void)proc_create_data(PROC_NAME, 0400, NULL, &proc_ops, NULL);
}
#else
void uvm_vmem_proc_init(void) {}
#endif
