// SMs that read one address without end. They run in step with the engine: after each method that can change what they
// see, so that a state that lasts between two methods is seen whatever the scheduler does.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

struct sim_loop {
    struct list_head node;
    void *owner;
    struct sim_vas *v; // NULL: gone
    struct simgpu_loop io;
};

static u32 next_id = 1;

static void step(struct sim_loop *l)
{
    struct sim_gpu *target;
    struct sim_vas *v = l->v;
    struct sim_xlat raw, x;
    u64 contig, phys = 0, value = 0;
    void *p;

    l->io.reads++;
    sim_walk(v, l->io.va, &raw);
    if (raw.state == SIMGPU_PTE_INVALID)
        l->io.invalid++;
    sim_translate(v, SIMGPU_UNIT_GPC, l->io.va, &x);
    if (x.state == SIMGPU_PTE_INVALID) {
        l->io.faulted++;
        return;
    }
    if (x.hit && (x.pte != raw.pte || x.shift != raw.shift))
        l->io.lagging++;
    if (x.state == SIMGPU_PTE_VALID) {
        p = sim_xlat_ptr(v, &x, l->io.va, &contig, &target, &phys);
        if (!p || contig < sizeof(value))
            return;
        if (target && sim_pma_is_free(target, phys))
            l->io.freed++;
        value = READ_ONCE(*(u64 *)p);
    }
    if (l->io.reads > 1 && value != l->io.last)
        l->io.changes++;
    l->io.last = value;
    l->io.last_phys = phys;
}

void sim_loops_step(struct sim_gpu *g)
{
    struct sim_loop *l;

    list_for_each_entry(l, &g->loops, node) {
        if (l->v)
            step(l);
    }
}

void sim_loops_vas_gone(struct sim_vas *v)
{
    struct sim_loop *l;

    list_for_each_entry(l, &v->gpu->loops, node) {
        if (l->v == v) {
            l->v = NULL;
            l->io.ended = 1;
        }
    }
}

int sim_loop_start(void *owner, struct simgpu_loop *io)
{
    struct sim_loop *l = kzalloc(sizeof(*l), GFP_KERNEL);
    int ret = 0;

    if (!l)
        return -ENOMEM;
    l->owner = owner;
    l->io.vas = io->vas;
    l->io.va = io->va & ~7ULL;
    mutex_lock(&sim_lock);
    l->v = sim_vas_find(&io->vas);
    if (l->v) {
        l->io.id = next_id++;
        list_add_tail(&l->node, &l->v->gpu->loops);
        step(l);
        *io = l->io;
    } else {
        ret = -ENODEV;
    }
    mutex_unlock(&sim_lock);
    if (ret)
        kfree(l);
    return ret;
}

int sim_loop_read(void *owner, struct simgpu_loop *io, bool stop)
{
    struct sim_loop *l, *next;
    int ret = -ENOENT;
    u32 i;

    mutex_lock(&sim_lock);
    for (i = 0; i < sim_gpu_count; i++) {
        list_for_each_entry_safe(l, next, &sim_gpus[i].loops, node) {
            if (l->owner != owner || l->io.id != io->id)
                continue;
            *io = l->io;
            ret = 0;
            if (stop) {
                list_del(&l->node);
                kfree(l);
            }
            goto out;
        }
    }
out:
    mutex_unlock(&sim_lock);
    return ret;
}

void sim_loops_release(void *owner)
{
    struct sim_loop *l, *next;
    u32 i;

    mutex_lock(&sim_lock);
    for (i = 0; i < sim_gpu_count; i++) {
        list_for_each_entry_safe(l, next, &sim_gpus[i].loops, node) {
            if (l->owner == owner) {
                list_del(&l->node);
                kfree(l);
            }
        }
    }
    mutex_unlock(&sim_lock);
}
