// /dev/nvidiactl and /dev/nvidiaN: the RM ioctls that a client needs to allocate physical memory on a device.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fdtable.h>
#include <linux/fs.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "sim.h"
#include "sim_rm.h"

#define RM_MAJOR 195
#define RM_MINOR_CTL 255

static u32 do_alloc(struct file *f, struct rm_alloc *a)
{
    struct rm_memory memory = {0};
    u32 instance = 0, status;
    void __user *params = u64_to_user_ptr(a->params);

    if (a->class_id == RM_CLASS_MEMORY && copy_from_user(&memory, params, SIM_RM_MEMORY_COMMON))
        return NV_ERR_INVALID_POINTER;
    // deviceId is the first word
    if (a->class_id == RM_CLASS_DEVICE && params && copy_from_user(&instance, params, sizeof(instance)))
        return NV_ERR_INVALID_POINTER;
    status = sim_rm_alloc(f, a->client, a->parent, &a->object, a->class_id, instance, &memory);
    if (status == NV_OK && a->class_id == RM_CLASS_MEMORY && copy_to_user(params, &memory, SIM_RM_MEMORY_COMMON)) {
        sim_rm_free(f, a->client, a->object);
        status = NV_ERR_INVALID_POINTER;
    }
    return status;
}

static u32 do_control(struct rm_control *ctl)
{
    struct rm_uuid_info info;
    struct sim_gpu *g;

    if (ctl->command != RM_CONTROL_UUID_INFO)
        return NV_ERR_NOT_SUPPORTED;
    if (ctl->params_size != sizeof(info) || copy_from_user(&info, u64_to_user_ptr(ctl->params), sizeof(info)))
        return NV_ERR_INVALID_ARGUMENT;
    g = sim_gpu_by_uuid(info.uuid);
    if (!g)
        return NV_ERR_OBJECT_NOT_FOUND;
    info.gpu_id = 0x100 + g->index;
    info.device = g->index;
    info.subdevice = 0;
    return copy_to_user(u64_to_user_ptr(ctl->params), &info, sizeof(info)) ? NV_ERR_INVALID_POINTER : NV_OK;
}

static long rm_ioctl(struct file *f, unsigned int cmd, unsigned long arg)
{
    void __user *user = (void __user *)arg;
    union {
        struct rm_free free;
        struct rm_control control;
        struct rm_alloc alloc;
        s32 fd;
    } p;

    if (_IOC_TYPE(cmd) != 'F')
        return -ENOTTY;
    if (_IOC_SIZE(cmd) > sizeof(p) || copy_from_user(&p, user, _IOC_SIZE(cmd)))
        return -EFAULT;
    switch (_IOC_NR(cmd)) {
    case RM_ESC_ALLOC:
        if (_IOC_SIZE(cmd) != sizeof(p.alloc))
            return -EINVAL;
        p.alloc.status = do_alloc(f, &p.alloc);
        break;
    case RM_ESC_FREE:
        if (_IOC_SIZE(cmd) != sizeof(p.free))
            return -EINVAL;
        p.free.status = sim_rm_free(f, p.free.client, p.free.object);
        break;
    case RM_ESC_CONTROL:
        if (_IOC_SIZE(cmd) != sizeof(p.control))
            return -EINVAL;
        p.control.status = do_control(&p.control);
        break;
    case RM_ESC_REGISTER_FD: return 0;
    default: return -EINVAL;
    }
    return copy_to_user(user, &p, _IOC_SIZE(cmd)) ? -EFAULT : 0;
}

static int rm_release(struct inode *inode, struct file *f)
{
    sim_rm_release(f);
    return 0;
}

static const struct file_operations rm_fops = {
    .owner = THIS_MODULE,
    .unlocked_ioctl = rm_ioctl,
    .release = rm_release,
};

static int is_device(const void *minor, struct file *f, unsigned int fd)
{
    return f->f_op == &rm_fops && iminor(file_inode(f)) == *(const u32 *)minor;
}

bool sim_rmctl_is_open(u32 gpu) { return current->files && iterate_fd(current->files, 0, is_device, &gpu); }

static struct cdev rm_cdev;
static struct class *rm_class;
static struct proc_dir_entry *proc_dir;

static int version_show(struct seq_file *s, void *unused)
{
    seq_printf(s, "NVRM version: simulated, stands in for the Open Kernel Module  %s  Release Build\n", SIM_RELEASE);
    return 0;
}

int sim_rmctl_start(void)
{
    int ret = register_chrdev_region(MKDEV(RM_MAJOR, 0), 256, "nvidia-frontend");
    u32 i;

    if (ret)
        return ret;
    cdev_init(&rm_cdev, &rm_fops);
    ret = cdev_add(&rm_cdev, MKDEV(RM_MAJOR, 0), 256);
    if (ret) {
        unregister_chrdev_region(MKDEV(RM_MAJOR, 0), 256);
        return ret;
    }
    // Without device nodes a test can still make them
    rm_class = class_create(THIS_MODULE, "nvidia");
    if (!IS_ERR(rm_class)) {
        device_create(rm_class, NULL, MKDEV(RM_MAJOR, RM_MINOR_CTL), NULL, "nvidiactl");
        for (i = 0; i < sim_gpu_count; i++)
            device_create(rm_class, NULL, MKDEV(RM_MAJOR, i), NULL, "nvidia%u", i);
    }
    proc_dir = proc_mkdir("driver/nvidia", NULL);
    if (proc_dir)
        proc_create_single("version", 0444, proc_dir, version_show);
    return 0;
}

void sim_rmctl_stop(void)
{
    u32 i;

    proc_remove(proc_dir);
    if (!IS_ERR(rm_class)) {
        for (i = 0; i < sim_gpu_count; i++)
            device_destroy(rm_class, MKDEV(RM_MAJOR, i));
        device_destroy(rm_class, MKDEV(RM_MAJOR, RM_MINOR_CTL));
        class_destroy(rm_class);
    }
    cdev_del(&rm_cdev);
    unregister_chrdev_region(MKDEV(RM_MAJOR, 0), 256);
}
