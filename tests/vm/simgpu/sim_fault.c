// The SMs: accesses through UVM's page tables, with replayable faults.
//
// A fault is put into the fault buffer, the interrupt's top half runs from hard interrupt context, UVM services it and
// pushes a replay, and the engine retries the stalled accesses inside the replay method. UVM relies on a replay not
// completing before each access it restarted has either succeeded or put its fault back.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "sim.h"

#define FAULT_PTE 2
#define FAULT_RO 6
#define REPLAY_CANCEL_TARGETED 3
#define REPLAY_CANCEL_VA_GLOBAL 5

sim_uvm_events *sim_uvm_ops;
static DECLARE_WAIT_QUEUE_HEAD(replay_wq);

struct sim_wait {
    struct list_head node;
    struct sim_vas *v;
    struct simgpu_access *a;
    u64 pos;
    enum { STALLED, READY, CANCELLED, GONE } state;
};

static void irq_fn(struct irq_work *w)
{
    struct sim_gpu *g = container_of(w, struct sim_gpu, irq);
    sim_uvm_events *ops = READ_ONCE(sim_uvm_ops);
    NvProcessorUuid uuid;

    if (!ops)
        return;
    memcpy(uuid.uuid, g->uuid, sizeof(g->uuid));
    g->c.interrupts++;
    ops->isrTopHalf(&uuid);
}

void sim_fault_init(struct sim_gpu *g) { g->irq = IRQ_WORK_INIT_HARD(irq_fn); }

void sim_fault_irq_sync(void)
{
    u32 i;

    for (i = 0; i < sim_gpu_count; i++)
        irq_work_sync(&sim_gpus[i].irq);
}

// The interrupt is level triggered, and masked by the SET and CLEAR registers. These are words of memory, so the order
// of two writes between two polls is lost: set counts as the later one, since a spurious top half is harmless.
void sim_fault_irq_poll(struct sim_gpu *g)
{
    u32 get = READ_ONCE(g->regs[SIM_REG_FAULT_GET]);

    // The register's write-one-to-clear bits never read back
    if (get >> 20)
        cmpxchg(&g->regs[SIM_REG_FAULT_GET], get, get & 0xfffff);
    if (xchg(&g->regs[SIM_REG_INTR_CLEAR], 0))
        g->intr_on = false;
    if (xchg(&g->regs[SIM_REG_INTR_SET], 0))
        g->intr_on = true;
    if (g->intr_on && g->registered && READ_ONCE(sim_uvm_ops) &&
        (get & 0xfffff) != READ_ONCE(g->regs[SIM_REG_FAULT_PUT]))
        irq_work_queue(&g->irq);
}

// The fault packet of class C369, 8 words
static bool push_fault(struct sim_vas *v, u64 va, u32 type, bool write)
{
    struct sim_gpu *g = v->gpu;
    u32 put = g->regs[SIM_REG_FAULT_PUT], next = (put + 1) % SIM_FAULT_ENTRIES;
    u32 *e = g->fault_buf + put * SIM_FAULT_SIZE;
    u64 time = ktime_get_ns();

    if (next == (READ_ONCE(g->regs[SIM_REG_FAULT_GET]) & 0xfffff)) {
        g->c.buffer_full++;
        return false;
    }
    e[0] = (u32)(v->inst & ~0xfffULL); // instance pointer, in video memory
    e[1] = v->inst >> 32;
    e[2] = (u32)(va & ~0xfffULL);
    e[3] = va >> 32;
    e[4] = (u32)time;
    e[5] = time >> 32;
    e[6] = g->arch->graphics_engine;
    smp_wmb();
    // Replayable, access type, replay enabled, valid
    WRITE_ONCE(e[7], type | BIT(7) | (write ? BIT(16) : 0) | BIT(30) | BIT(31));
    smp_wmb();
    WRITE_ONCE(g->regs[SIM_REG_FAULT_PUT], next);
    g->c.faults++;
    return true;
}

// 0 and a translation, or the type of fault + 1.
static u32 try_access(struct sim_vas *v, u64 va, u32 flags, struct sim_xlat *x)
{
    sim_translate(v, flags & SIMGPU_ACCESS_CE ? SIMGPU_UNIT_HUB : SIMGPU_UNIT_GPC, va, x);
    if (x->state == SIMGPU_PTE_INVALID)
        return FAULT_PTE + 1;
    if (!sim_xlat_allows(v->gpu, x, flags & SIMGPU_ACCESS_WRITE))
        return FAULT_RO + 1;
    return 0;
}

// Fault on this page and on those after it, as many warps would.
static void fault_window(struct sim_wait *w)
{
    struct simgpu_access *a = w->a;
    struct sim_xlat x;
    u32 n, type;
    u64 pos;

    for (n = 0, pos = w->pos; n < max(a->batch, 1u) && pos < a->len; pos += PAGE_SIZE) {
        type = try_access(w->v, a->va + pos, a->flags, &x);
        if (!type)
            continue;
        if (!push_fault(w->v, a->va + pos, type - 1, a->flags & SIMGPU_ACCESS_WRITE))
            break; // full: dropped, and back with a later replay
        n++;
    }
    a->faults += n;
}

void sim_fault_replay(struct sim_gpu *g, u32 type, u64 va, u64 pdb)
{
    struct sim_xlat x;
    struct sim_wait *w;

    if (type >= REPLAY_CANCEL_TARGETED)
        g->c.cancels++;
    else
        g->c.replays++;
    sim_tlb_replay(g);
    list_for_each_entry(w, &g->waiters, node) {
        if (w->state != STALLED)
            continue;
        if (type >= REPLAY_CANCEL_TARGETED) {
            u64 end = min_t(u64, w->a->len, w->pos + (u64)max(w->a->batch, 1u) * PAGE_SIZE);

            if (type == REPLAY_CANCEL_VA_GLOBAL &&
                (w->v->pdb != pdb || va < ((w->a->va + w->pos) & PAGE_MASK) || va >= w->a->va + end))
                continue;
            w->state = CANCELLED;
            continue;
        }
        w->a->replays++;
        if (try_access(w->v, w->a->va + w->pos, w->a->flags, &x))
            fault_window(w);
        else
            w->state = READY;
    }
    wake_up_all(&replay_wq);
}

void sim_fault_vas_gone(struct sim_vas *v)
{
    struct sim_wait *w;

    list_for_each_entry(w, &v->gpu->waiters, node) {
        if (w->v == v)
            w->state = GONE;
    }
    wake_up_all(&replay_wq);
}

// Stalls until UVM has serviced the fault; the limit is an end for a hang. sim_lock is held on entry and on return.
static int stall(struct sim_vas *v, struct simgpu_access *a, u64 pos)
{
    struct sim_wait w = {.v = v, .a = a, .pos = pos, .state = STALLED};
    struct sim_gpu *g = v->gpu;

    list_add_tail(&w.node, &g->waiters);
    fault_window(&w);
    sim_fault_irq_poll(g);
    mutex_unlock(&sim_lock);
    wait_event_killable_timeout(replay_wq, READ_ONCE(w.state) != STALLED, 300 * HZ);
    mutex_lock(&sim_lock);
    list_del(&w.node);
    switch (w.state) {
    case READY: return 0;
    case CANCELLED: return -EFAULT;
    case GONE: return -ENODEV;
    default: return -ETIMEDOUT;
    }
}

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

static int access_page(struct simgpu_access *a, u64 pos, void *bounce, u64 n)
{
    bool replayable = !(a->flags & (SIMGPU_ACCESS_CE | SIMGPU_ACCESS_NOFAULT));
    struct sim_vas *v;
    struct sim_xlat x;
    u32 fault, tries;
    int ret = -ELOOP;

    mutex_lock(&sim_lock);
    for (tries = 0; tries < 100; tries++) {
        v = sim_vas_find(&a->vas);
        if (!v) {
            ret = -ENODEV;
            break;
        }
        if (!(a->flags & SIMGPU_ACCESS_POSTED))
            sim_post_land_vas(v->gpu, v);
        fault = try_access(v, a->va + pos, a->flags, &x);
        if (!fault) {
            ret = move(v, &x, a, a->va + pos, bounce, n);
            break;
        }
        if (!replayable || !v->inst) {
            ret = fault == FAULT_RO + 1 ? -EACCES : -EFAULT;
            break;
        }
        ret = stall(v, a, pos);
        if (ret)
            break;
        ret = -ELOOP;
    }
    mutex_unlock(&sim_lock);
    return ret;
}

void sim_fault_access(struct simgpu_access *a)
{
    void *bounce = (void *)__get_free_page(GFP_KERNEL);
    u64 n;

    a->faults = a->replays = 0;
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
        a->result = access_page(a, a->done, bounce, n);
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
