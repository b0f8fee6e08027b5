// /dev/simgpu, described in simgpu_uapi.h.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/uaccess.h>

#include "sim.h"
#include "sim_rm.h"

static void do_copy(struct simgpu_copy *io)
{
    io->done = 0;
    io->result = 0;
    while (!io->result && io->done < io->len) {
        u64 cd, cs = PAGE_SIZE, n = 0;
        void *d, *s = NULL;
        struct sim_vas *v;

        mutex_lock(&sim_lock);
        v = sim_vas_find(&io->vas);
        if (!v) {
            io->result = -ENODEV;
        } else {
            sim_post_land_vas(v->gpu, v);
            if (io->src)
                s = sim_va_ptr(v, SIMGPU_UNIT_HUB, io->src + io->done, false, &cs);
            d = sim_va_ptr(v, SIMGPU_UNIT_HUB, io->dst + io->done, true, &cd);
            if (!d || (io->src && !s)) {
                io->result = -EFAULT;
            } else {
                // In pieces, so that other engines get their turn
                n = min_t(u64, min3(cd, cs, io->len - io->done), 64 << 10);
                if (!io->src) {
                    n = min_t(u64, min_t(u64, cd, io->len - io->done), 64 << 10);
                    memset(d, io->value, n);
                } else {
                    memmove(d, s, n);
                }
            }
        }
        mutex_unlock(&sim_lock);
        io->done += n;
        cond_resched();
    }
}

static int do_walk(struct simgpu_walk *io)
{
    struct simgpu_pte *out;
    struct sim_xlat x;
    struct sim_vas *v;
    int ret = 0;
    u32 i;

    if (!io->count || io->count > 65536)
        return -EINVAL;
    out = kvcalloc(io->count, sizeof(*out), GFP_KERNEL);
    if (!out)
        return -ENOMEM;
    mutex_lock(&sim_lock);
    v = sim_vas_find(&io->vas);
    for (i = 0; v && i < io->count; i++) {
        sim_walk(v, io->va + i * io->stride, &x);
        sim_pte_decode(v->gpu, &x, &out[i]);
    }
    mutex_unlock(&sim_lock);
    if (!v)
        ret = -ENODEV;
    else if (copy_to_user(u64_to_user_ptr(io->out), out, io->count * sizeof(*out)))
        ret = -EFAULT;
    kvfree(out);
    return ret;
}

static void do_counters(struct simgpu_counters_io *io)
{
    struct sim_gpu *g = &sim_gpus[io->gpu];
    struct simgpu_counters levels = {0};
    struct sim_vas *v;

    mutex_lock(&sim_lock);
    g->c.rm_calls = atomic64_read(&g->rm_calls);
    g->c.vaspaces = 0;
    list_for_each_entry(v, &sim_vas_list, node)
        g->c.vaspaces += v->gpu == g;
    io->c = g->c;
    if (io->reset) {
        levels.pma_live = g->c.pma_live;
        levels.tlb_entries = g->c.tlb_entries;
        levels.posted = g->c.posted;
        levels.rm_objects = g->c.rm_objects;
        g->c = levels;
        atomic64_set(&g->rm_calls, 0);
    }
    mutex_unlock(&sim_lock);
}

static int do_phys(struct simgpu_phys *io)
{
    struct sim_gpu *g = &sim_gpus[io->gpu];
    u64 done, n, contig;
    void *bounce, *p;
    int ret = 0;

    if (io->phys > g->fb_size || io->len > g->fb_size - io->phys)
        return -EINVAL;
    bounce = (void *)__get_free_page(GFP_KERNEL);
    if (!bounce)
        return -ENOMEM;
    for (done = 0; !ret && done < io->len; done += n) {
        void __user *user = u64_to_user_ptr(io->buf + done);

        n = min_t(u64, io->len - done, PAGE_SIZE - offset_in_page(io->phys + done));
        mutex_lock(&sim_lock);
        p = sim_fb_ptr(g, io->phys + done, &contig);
        if (!p)
            ret = -ENOMEM;
        else
            memcpy(bounce, p, n);
        mutex_unlock(&sim_lock);
        if (!ret && copy_to_user(user, bounce, n))
            ret = -EFAULT;
    }
    free_page((unsigned long)bounce);
    return ret;
}

static void do_info(struct simgpu_info *io)
{
    struct sim_gpu *g = &sim_gpus[io->gpu];

    mutex_lock(&sim_lock);
    io->registered = g->registered != 0;
    memcpy(io->uuid, g->uuid, sizeof(io->uuid));
    io->fb_size = g->fb_size;
    io->fb_free = (g->pma_granules - g->c.pma_live) << SIM_PMA_SHIFT;
    io->gpus = sim_gpu_count;
    io->va_bits = g->arch->mmu->va_bits;
    mutex_unlock(&sim_lock);
}

static void do_mode(struct simgpu_mode *io)
{
    struct sim_gpu *g = &sim_gpus[io->gpu];
    struct sim_vas *v;

    mutex_lock(&sim_lock);
    g->mode = (g->mode | io->set) & ~io->clear;
    io->now = g->mode;
    list_for_each_entry(v, &sim_vas_list, node) {
        if (v->gpu == g)
            sim_tlb_drop_all(v);
    }
    mutex_unlock(&sim_lock);
}

static int do_drain(u32 gpu)
{
    mutex_lock(&sim_lock);
    sim_post_land_vas(&sim_gpus[gpu], NULL);
    mutex_unlock(&sim_lock);
    return 0;
}

static int dispatch(struct file *f, unsigned int cmd, void *p)
{
    // Every struct but two starts with the index of the GPU
    if (cmd != SIMGPU_INJECT && *(u32 *)p >= sim_gpu_count)
        return -ENXIO;
    switch (cmd) {
    case SIMGPU_ACCESS: sim_access(p); return 0;
    case SIMGPU_COPY: do_copy(p); return 0;
    case SIMGPU_WALK: return do_walk(p);
    case SIMGPU_LOOP_START: return sim_loop_start(f, p);
    case SIMGPU_LOOP_READ: return sim_loop_read(f, p, false);
    case SIMGPU_LOOP_STOP: return sim_loop_read(f, p, true);
    case SIMGPU_COUNTERS: do_counters(p); return 0;
    case SIMGPU_PHYS: return do_phys(p);
    case SIMGPU_POISON_CHK: sim_pma_poison_check(p); return 0;
    case SIMGPU_INJECT: return sim_inject_ioctl(p);
    case SIMGPU_EVICT: ((struct simgpu_evict *)p)->status = sim_pma_evict(p); return 0;
    case SIMGPU_INFO: do_info(p); return 0;
    case SIMGPU_MEM: return sim_mem_ioctl(p);
    case SIMGPU_MODE: do_mode(p); return 0;
    case SIMGPU_DRAIN: return do_drain(*(u32 *)p);
    default: return -ENOTTY;
    }
}

static long dev_ioctl(struct file *f, unsigned int cmd, unsigned long arg)
{
    u32 size = _IOC_SIZE(cmd);
    int ret;
    void *p;

    if (_IOC_TYPE(cmd) != 's' || size < sizeof(u32) || size > 1024)
        return -ENOTTY;
    p = kzalloc(size, GFP_KERNEL);
    if (!p)
        return -ENOMEM;
    ret = copy_from_user(p, (void __user *)arg, size) ? -EFAULT : dispatch(f, cmd, p);
    if (!ret && (_IOC_DIR(cmd) & _IOC_READ) && copy_to_user((void __user *)arg, p, size))
        ret = -EFAULT;
    kfree(p);
    return ret;
}

static int dev_release(struct inode *inode, struct file *f)
{
    sim_loops_release(f);
    return 0;
}

static const struct file_operations dev_fops = {
    .owner = THIS_MODULE,
    .unlocked_ioctl = dev_ioctl,
    .release = dev_release,
};
static struct miscdevice dev = {.minor = MISC_DYNAMIC_MINOR, .name = "simgpu", .fops = &dev_fops, .mode = 0666};

int sim_dev_start(void)
{
    int ret = misc_register(&dev);

    if (ret)
        return ret;
    ret = sim_rmctl_start();
    if (ret)
        misc_deregister(&dev);
    return ret;
}

void sim_dev_stop(void)
{
    sim_rmctl_stop();
    misc_deregister(&dev);
}
