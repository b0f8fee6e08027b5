// Channels: allocation, and the engine thread that plays host (PBDMA): it polls every channel's GP_PUT, fetches the
// push buffer and executes methods of the host classes C46F to CA6F, which differ in little (struct sim_arch). Copy
// engine methods go to sim_ce.c.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/ktime.h>

#include "sim.h"

enum {
    HOST_SEM_ADDR_LO = 0x5c,
    HOST_SEM_ADDR_HI = 0x60,
    HOST_SEM_PAYLOAD_LO = 0x64,
    HOST_SEM_EXECUTE = 0x6c,
    HOST_WFI = 0x78,
    HOST_MEM_OP_A = 0x28,
    HOST_MEM_OP_B = 0x2c,
    HOST_MEM_OP_C = 0x30,
    HOST_MEM_OP_D = 0x34,
};
enum { OP_MEMBAR = 0x5, OP_TLB_INVALIDATE = 0x9, OP_TLB_INVALIDATE_TARGETED = 0xa };
#define INVALIDATE_SYSMEMBAR BIT(11) // of MEM_OP_A
#define INVALIDATE_ACK(op_c) ((op_c) >> 5 & 3)
#define GP_SET_SEGMENT 4 // opcode of a GPFIFO entry without a push buffer
#define SUBCH_CE 4
#define SUBCH_SOFTWARE 5
// UVM_MAX_PUSH_SIZE, which UVM checks nowhere in a release build. A push is one entry of a channel's FIFO.
#define MAX_PUSH (128 << 10)

static LIST_HEAD(chans);
static struct task_struct *engine;
static u32 next_chid = 1;

#define HOST(c, r) ((c)->host[(r) / 4])

NV_STATUS nvUvmInterfaceTsgAllocate(uvmGpuAddressSpaceHandle h, const UvmGpuTsgAllocParams *params,
                                    uvmGpuTsgHandle *tsg)
{
    struct sim_vas *v = (struct sim_vas *)h;
    struct sim_tsg *t;

    SIM_CALL_MAY_FAIL(v->gpu);
    t = kzalloc(sizeof(*t), GFP_KERNEL);
    if (!t)
        return NV_ERR_NO_MEMORY;
    t->vas = v;
    atomic_inc(&sim_n_tsgs);
    *tsg = (uvmGpuTsgHandle)t;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceTsgAllocate);

void nvUvmInterfaceTsgDestroy(uvmGpuTsgHandle tsg)
{
    // RM tolerates NULL, which UVM passes when it undoes a registration
    if (!tsg)
        return;
    SIM_CALL(((struct sim_tsg *)tsg)->vas->gpu);
    atomic_dec(&sim_n_tsgs);
    kfree(tsg);
}
EXPORT_SYMBOL(nvUvmInterfaceTsgDestroy);

static void chan_free(struct sim_chan *c)
{
    vfree(c->gpfifo);
    free_page((unsigned long)c->gpput);
    kfree((void *)c->notifier);
    kfree(c);
}

NV_STATUS nvUvmInterfaceChannelAllocate(const uvmGpuTsgHandle tsg, const UvmGpuChannelAllocParams *params,
                                        uvmGpuChannelHandle *channel, UvmGpuChannelInfo *info)
{
    struct sim_vas *v = ((struct sim_tsg *)tsg)->vas;
    struct sim_chan *c;

    SIM_CALL_MAY_FAIL(v->gpu);
    c = kzalloc(sizeof(*c), GFP_KERNEL);
    if (!c)
        return NV_ERR_NO_MEMORY;
    INIT_LIST_HEAD(&c->posted);
    c->vas = v;
    c->entries = params->numGpFifoEntries;
    c->gpfifo = vzalloc(c->entries * sizeof(u64));
    c->gpput = (u32 *)get_zeroed_page(GFP_KERNEL);
    c->notifier = kcalloc(4, sizeof(NvNotification), GFP_KERNEL);
    if (!c->gpfifo || !c->gpput || !c->notifier) {
        chan_free(c);
        return NV_ERR_NO_MEMORY;
    }
    c->doorbell = c->gpput + 64;
    mutex_lock(&sim_lock);
    c->id = next_chid++;
    list_add_tail(&c->node, &chans);
    mutex_unlock(&sim_lock);
    atomic_inc(&sim_n_chans);
    memset(info, 0, sizeof(*info));
    info->gpGet = &c->gpget;
    info->gpPut = c->gpput;
    info->gpFifoEntries = (UvmGpuPointer *)c->gpfifo;
    info->numGpFifoEntries = c->entries;
    info->channelClassNum = v->gpu->arch->host_class;
    info->errorNotifier = c->notifier;
    info->hwRunlistId = 1;
    info->hwChannelId = c->id;
    info->workSubmissionOffset = c->doorbell;
    info->workSubmissionToken = c->id;
    info->pWorkSubmissionToken = c->doorbell + 1;
    *channel = (uvmGpuChannelHandle)c;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceChannelAllocate);

void nvUvmInterfaceChannelDestroy(uvmGpuChannelHandle channel)
{
    struct sim_chan *c = (struct sim_chan *)channel;

    if (!c) // as for a TSG
        return;
    SIM_CALL(c->vas->gpu);
    mutex_lock(&sim_lock);
    sim_post_land_chan(c);
    list_del(&c->node);
    mutex_unlock(&sim_lock);
    chan_free(c);
    atomic_dec(&sim_n_chans);
}
EXPORT_SYMBOL(nvUvmInterfaceChannelDestroy);

// The channel stops for good, and UVM reads an RC error in its notifier.
void sim_chan_fault(struct sim_chan *c, const char *what, u64 va)
{
    if (!c->faulted)
        pr_err("simgpu: channel %u fault: %s at 0x%llx (push buffer 0x%llx)\n", c->id, what, va, c->words_va);
    c->faulted = true;
    WRITE_ONCE(c->notifier->status, 0xffff);
}

static bool sem_store(struct sim_chan *c, u64 va, const void *src, u32 n)
{
    u64 contig;
    void *p = sim_va_ptr(c->vas, SIMGPU_UNIT_HUB, va, true, &contig);

    if (!p || contig < n) {
        sim_chan_fault(c, "semaphore release", va);
        return false;
    }
    if (n == 4)
        WRITE_ONCE(*(u32 *)p, *(const u32 *)src);
    else
        memcpy(p, src, n);
    return true;
}

bool sim_chan_sem_write(struct sim_chan *c, u64 va, u32 payload, bool four_words)
{
    smp_mb();
    if (four_words) {
        u64 time = ktime_get_ns();
        u32 zero = 0;

        if (!sem_store(c, va + 8, &time, 8) || !sem_store(c, va + 4, &zero, 4))
            return false;
        smp_wmb();
    }
    return sem_store(c, va, &payload, 4);
}

static void mem_op(struct sim_chan *c, u32 d)
{
    struct sim_gpu *g = c->vas->gpu;
    u32 a = HOST(c, HOST_MEM_OP_A), b = HOST(c, HOST_MEM_OP_B), op_c = HOST(c, HOST_MEM_OP_C);

    switch (d >> 27) {
    case OP_MEMBAR: sim_post_membar(g, c, (op_c & 7) == 0); break;
    case OP_TLB_INVALIDATE:
    case OP_TLB_INVALIDATE_TARGETED:
        sim_tlb_invalidate(g, a, b, op_c, d);
        if (a & INVALIDATE_SYSMEMBAR)
            sim_post_membar(g, c, true);
        else if (g->arch->ack_is_membar && INVALIDATE_ACK(op_c))
            sim_post_membar(g, c, false);
        break;
    }
    sim_loops_step(g);
}

// False: the channel waits for a semaphore, try the method again later.
static bool sem_execute(struct sim_chan *c, u32 v)
{
    u64 hi = HOST(c, HOST_SEM_ADDR_HI) & c->vas->gpu->arch->sem_hi_mask, contig;
    u64 va = hi << 32 | (HOST(c, HOST_SEM_ADDR_LO) & ~3u);
    u32 want = HOST(c, HOST_SEM_PAYLOAD_LO), have, *p;
    bool done;

    switch (v & 7) {
    case 1: sim_chan_sem_write(c, va, want, v & BIT(25)); return true;
    case 0: // acquire
    case 2: // acquire greater or equal
    case 3: // the same, circular
        p = sim_va_ptr(c->vas, SIMGPU_UNIT_HUB, va, false, &contig);
        if (!p) {
            sim_chan_fault(c, "semaphore acquire", va);
            return true;
        }
        have = READ_ONCE(*p);
        done = (v & 7) == 0 ? have == want : (v & 7) == 2 ? have >= want : (s32)(have - want) >= 0;
        if (done)
            smp_mb();
        return done;
    default: sim_chan_fault(c, "unsupported semaphore operation", v); return true;
    }
}

static bool host_method(struct sim_chan *c, u32 addr, u32 v)
{
    struct sim_post *p;

    HOST(c, addr) = v;
    switch (addr) {
    case HOST_SEM_EXECUTE: return sem_execute(c, v);
    case HOST_MEM_OP_D: mem_op(c, v); break;
    case HOST_WFI:
        list_for_each_entry(p, &c->posted, node)
            p->ready = true;
        break;
    }
    return true;
}

static bool method(struct sim_chan *c, u32 subch, u32 addr, u32 v)
{
    if (sim_trace & 1)
        sim_log("channel %u subch %u method 0x%04x = 0x%08x\n", c->id, subch, addr, v);
    if (addr < 0x100)
        return host_method(c, addr, v);
    if (subch == SUBCH_CE) {
        if (!sim_ce_method(c, addr, v))
            sim_chan_fault(c, "copy engine method", addr);
        return true;
    }
    // The software class of fault cancellation needs no work here
    if (subch != SUBCH_SOFTWARE)
        sim_chan_fault(c, "method on an unknown subchannel", (u64)subch << 32 | addr);
    return true;
}

static bool fetch_entry(struct sim_chan *c)
{
    u64 e, contig = 0, bytes;

    if (c->gpget == READ_ONCE(*c->gpput))
        return false;
    smp_rmb();
    e = READ_ONCE(c->gpfifo[c->gpget]);
    c->words_left = (e >> 42) & 0x1fffff;
    if (!c->words_left && c->vas->gpu->arch->push_segments && ((e >> 32) & 0xff) == GP_SET_SEGMENT)
        c->push_segment = ((e >> 8) & 0x1ffff) << 40;
    c->words_va = c->push_segment | (e & 0xfffffffcULL) | ((e >> 32) & 0xff) << 32;
    bytes = c->words_left * 4ULL;
    c->m_left = 0;
    c->in_entry = true;
    c->words = bytes ? sim_vas_rm_ptr(c->vas, c->words_va, &contig) : NULL;
    if (bytes && (!c->words || contig < bytes))
        sim_chan_fault(c, "push buffer fetch", c->words_va);
    if (bytes > MAX_PUSH) {
        c->vas->gpu->c.bad_push_size++;
        sim_log("channel %u: a push of %llu bytes\n", c->id, bytes);
    }
    if (bytes) {
        c->vas->gpu->c.pushes++;
        if (sim_inject(SIMGPU_SITE_CHANNEL))
            sim_chan_fault(c, "injected", 0);
    }
    return true;
}

// One word of the push buffer. False: stalled.
static bool word(struct sim_chan *c)
{
    u32 v = READ_ONCE(*c->words);

    if (c->m_left) {
        if (!method(c, c->m_subch, c->m_addr, v))
            return false;
        c->m_left--;
        if (c->m_op == 1)
            c->m_addr += 4;
        else if (c->m_op == 5) { // increment once
            c->m_addr += 4;
            c->m_op = 3;
        }
    } else if (v) {
        c->m_op = v >> 29;
        c->m_left = (v >> 16) & 0x1fff;
        c->m_subch = (v >> 13) & 7;
        c->m_addr = (v & 0xfff) << 2;
        if (c->m_op == 4) { // the count is the data
            u32 data = c->m_left;

            c->m_left = 0;
            method(c, c->m_subch, c->m_addr, data);
        } else if (c->m_op != 1 && c->m_op != 3 && c->m_op != 5) {
            sim_chan_fault(c, "method header", v);
        }
    }
    c->words++;
    c->words_va += 4;
    c->words_left--;
    return true;
}

// True if anything was done.
static bool chan_run(struct sim_chan *c)
{
    bool progress = false;

    while (!c->faulted) {
        if (!c->in_entry && !fetch_entry(c)) {
            // In the end every write arrives
            if (!list_empty(&c->posted) && time_after(jiffies, c->posted_at + 2))
                sim_post_land_chan(c);
            return progress;
        }
        while (c->words_left && !c->faulted) {
            if (!word(c))
                return progress;
            progress = true;
        }
        if (c->faulted)
            return true;
        c->in_entry = false;
        c->gpget = (c->gpget + 1) % c->entries;
        progress = true;
    }
    return progress;
}

// The register's write-one-to-clear bits never read back.
static void fault_get_poll(struct sim_gpu *g)
{
    u32 get = READ_ONCE(g->regs[SIM_REG_FAULT_GET]);

    if (get >> 20)
        cmpxchg(&g->regs[SIM_REG_FAULT_GET], get, get & 0xfffff);
}

static int engine_fn(void *arg)
{
    u64 busy_until = 0, idle_since = 0;
    u32 i;

    while (!kthread_should_stop()) {
        struct sim_chan *c;
        bool progress = false;
        u64 now;

        mutex_lock(&sim_lock);
        list_for_each_entry(c, &chans, node)
            progress |= chan_run(c);
        for (i = 0; i < sim_gpu_count; i++) {
            fault_get_poll(&sim_gpus[i]);
            sim_loops_step(&sim_gpus[i]);
        }
        mutex_unlock(&sim_lock);
        // There is no doorbell to wait for: poll hard while there is work, then less and less
        now = ktime_get_ns();
        if (progress) {
            idle_since = now;
            busy_until = now + 200 * NSEC_PER_USEC;
        }
        if (now < busy_until)
            cond_resched();
        else if (now < idle_since + 5 * NSEC_PER_MSEC)
            usleep_range(20, 60);
        else if (now < idle_since + 100 * NSEC_PER_MSEC)
            usleep_range(100, 200);
        else
            usleep_range(500, 1000);
    }
    return 0;
}

int sim_engine_start(void)
{
    engine = kthread_run(engine_fn, NULL, "simgpu");
    return PTR_ERR_OR_ZERO(engine);
}

void sim_engine_stop(void) { kthread_stop(engine); }
