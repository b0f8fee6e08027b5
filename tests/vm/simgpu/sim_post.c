// Writes in flight: of a copy engine, until a membar of its channel; of an SM, until a membar that covers them.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

int sim_post(struct list_head *list, struct sim_vas *v, struct sim_gpu *target, u64 phys, const void *data, u32 len)
{
    struct sim_post *p = kmalloc(sizeof(*p) + len, GFP_NOWAIT | __GFP_NOWARN);

    if (!p)
        return -ENOMEM;
    p->target = target;
    p->vas = v;
    p->ready = false;
    p->phys = phys;
    p->len = len;
    memcpy(p->data, data, len);
    list_add_tail(&p->node, list);
    v->gpu->c.posted++;
    return 0;
}

static void land(struct sim_gpu *g, struct sim_post *p)
{
    u64 contig, done = 0;

    while (done < p->len) {
        void *dst = sim_phys_ptr(p->target, p->phys + done, &contig);
        u64 n = min_t(u64, p->len - done, dst ? contig : p->len);

        if (dst)
            memcpy(dst, p->data + done, n);
        done += n;
    }
    list_del(&p->node);
    g->c.posted--;
    kfree(p);
}

void sim_post_ack(struct sim_gpu *g, struct sim_vas *v)
{
    struct sim_post *p;

    list_for_each_entry(p, &g->posted, node) {
        if (!v || p->vas == v)
            p->ready = true;
    }
}

// A GPU-wide membar makes writes to the GPU's own memory visible, a system membar all.
void sim_post_membar(struct sim_gpu *g, struct sim_chan *c, bool sys)
{
    struct sim_post *p, *next;

    if (g->mode & SIMGPU_MODE_BREAK_MEMBAR)
        return;
    list_for_each_entry_safe(p, next, &c->posted, node) {
        if (p->ready && (sys || p->target == g)) {
            land(g, p);
            sim_loops_step(g);
        }
    }
    list_for_each_entry_safe(p, next, &g->posted, node) {
        if (p->ready && (sys || p->target == g))
            land(g, p);
    }
}

void sim_post_land_chan(struct sim_chan *c)
{
    struct sim_post *p, *next;

    list_for_each_entry_safe(p, next, &c->posted, node) {
        land(c->vas->gpu, p);
        sim_loops_step(c->vas->gpu);
    }
}

void sim_post_land_vas(struct sim_gpu *g, struct sim_vas *v)
{
    struct sim_post *p, *next;

    list_for_each_entry_safe(p, next, &g->posted, node) {
        if (!v || p->vas == v)
            land(g, p);
    }
}

void sim_post_check_free(struct sim_gpu *target, u64 phys, u64 len)
{
    struct sim_post *p, *next;
    u32 i;

    for (i = 0; i < sim_gpu_count; i++) {
        struct sim_gpu *g = &sim_gpus[i];

        list_for_each_entry_safe(p, next, &g->posted, node) {
            if (p->target != target || p->phys >= phys + len || p->phys + p->len <= phys)
                continue;
            g->c.bad_late_writes++;
            sim_log("a write in flight to 0x%llx lands after the memory was freed\n", p->phys);
            land(g, p);
        }
    }
}
