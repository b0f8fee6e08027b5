// Accesses of the SMs and of copy engines through UVM's page tables, from user space. One without a translation returns at
// once: there are no faults that UVM could service.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/mm.h>
#include <linux/uaccess.h>

#include "sim.h"

// One piece inside a page, between memory and the bounce buffer. sim_lock held.
static int move(struct sim_vas *v, const struct sim_xlat *x, struct simgpu_access *a, u64 va, void *bounce, u64 n)
{
    struct sim_gpu *target;
    u64 contig, phys;
    void *p;

    if (x->state == SIMGPU_PTE_SPARSE) {
        if (!(a->flags & SIMGPU_ACCESS_WRITE))
            memset(bounce, 0, n);
        return 0;
    }
    p = sim_xlat_ptr(v, x, va, &contig, &target, &phys);
    if (!p || contig < n)
        return -EIO;
    if (a->flags & SIMGPU_ACCESS_POSTED)
        return sim_post(&v->gpu->posted, v, target, phys, bounce, n);
    if (a->flags & SIMGPU_ACCESS_WRITE)
        memcpy(p, bounce, n);
    else
        memcpy(bounce, p, n);
    return 0;
}

static int access_page(struct simgpu_access *a, u64 va, void *bounce, u64 n)
{
    struct sim_vas *v;
    struct sim_xlat x;
    int ret;

    mutex_lock(&sim_lock);
    v = sim_vas_find(&a->vas);
    if (!v) {
        mutex_unlock(&sim_lock);
        return -ENODEV;
    }
    if (!(a->flags & SIMGPU_ACCESS_POSTED))
        sim_post_land_vas(v->gpu, v);
    sim_translate(v, a->flags & SIMGPU_ACCESS_CE ? SIMGPU_UNIT_HUB : SIMGPU_UNIT_GPC, va, &x);
    if (x.state == SIMGPU_PTE_INVALID)
        ret = -EFAULT;
    else if (!sim_xlat_allows(v->gpu, &x, a->flags & SIMGPU_ACCESS_WRITE))
        ret = -EACCES;
    else
        ret = move(v, &x, a, va, bounce, n);
    mutex_unlock(&sim_lock);
    return ret;
}

void sim_access(struct simgpu_access *a)
{
    void *bounce = (void *)__get_free_page(GFP_KERNEL);
    u64 n;

    a->done = 0;
    a->result = bounce ? 0 : -ENOMEM;
    if (a->flags & SIMGPU_ACCESS_POSTED)
        a->flags |= SIMGPU_ACCESS_WRITE;
    while (!a->result && a->done < a->len) {
        void __user *user = (void __user *)(a->buf + a->done);

        n = min_t(u64, a->len - a->done, PAGE_SIZE - offset_in_page(a->va + a->done));
        if ((a->flags & SIMGPU_ACCESS_WRITE) && copy_from_user(bounce, user, n)) {
            a->result = -EINVAL;
            break;
        }
        a->result = access_page(a, a->va + a->done, bounce, n);
        if (a->result)
            break;
        if (!(a->flags & SIMGPU_ACCESS_WRITE) && copy_to_user(user, bounce, n)) {
            a->result = -EINVAL;
            break;
        }
        a->done += n;
        cond_resched();
    }
    free_page((unsigned long)bounce);
}
