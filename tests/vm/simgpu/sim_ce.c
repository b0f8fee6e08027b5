// The copy engine, classes C5B5 to CAB5: pitch copies, constant fills, semaphores, flushes.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

enum {
    CE_SEM_A = 0x240,
    CE_SEM_B = 0x244,
    CE_SEM_PAYLOAD = 0x248,
    CE_SRC_PHYS_MODE = 0x260,
    CE_DST_PHYS_MODE = 0x264,
    CE_LAUNCH_DMA = 0x300,
    CE_OFFSET_IN_UPPER = 0x400,
    CE_OFFSET_IN_LOWER = 0x404,
    CE_OFFSET_OUT_UPPER = 0x408,
    CE_OFFSET_OUT_LOWER = 0x40c,
    CE_PITCH_IN = 0x410,
    CE_PITCH_OUT = 0x414,
    CE_LINE_LENGTH_IN = 0x418,
    CE_LINE_COUNT = 0x41c,
    CE_REMAP_CONST_A = 0x700,
    CE_REMAP_CONST_B = 0x704,
    CE_REMAP_COMPONENTS = 0x708,
};
#define LAUNCH_TRANSFER 3
#define LAUNCH_FLUSH BIT(2)
#define LAUNCH_PITCH (3 << 7)
#define LAUNCH_MULTI_LINE BIT(9)
#define LAUNCH_REMAP BIT(10)
#define LAUNCH_SRC_PHYS BIT(12)
#define LAUNCH_DST_PHYS BIT(13)
#define LAUNCH_REDUCTION BIT(19)
#define LAUNCH_SCRUB BIT(23)
#define LAUNCH_FLUSH_GL BIT(25)
#define REDUCTION_INC 6

// Largest write that may stay in flight: page-table entries, not data
#define MAX_POST 4096

#define CE(c, r) ((c)->ce[(r) / 4])

// mode: 0 this GPU's memory, 1 and 2 system memory (NULL); 3, a peer's, is not modelled
static struct sim_gpu *phys_target(struct sim_chan *c, u32 mode, bool *ok)
{
    *ok = (mode & 3) != 3;
    return mode & 3 ? NULL : c->vas->gpu;
}

static void *ce_ptr(struct sim_chan *c, bool phys, u32 mode, u64 addr, bool write, u64 *contig)
{
    struct sim_gpu *target;
    bool ok;

    if (!phys)
        return sim_va_ptr(c->vas, SIMGPU_UNIT_HUB, addr, write, contig);
    target = phys_target(c, mode, &ok);
    return ok ? sim_phys_ptr(target, addr, contig) : NULL;
}

// The repeated element of a fill. Returns its size, 0 for what is not modelled.
static u32 fill_element(struct sim_chan *c, u8 *elem)
{
    u32 comp = CE(c, CE_REMAP_COMPONENTS), size = ((comp >> 16) & 3) + 1, n = ((comp >> 24) & 3) + 1, i;

    for (i = 0; i < n; i++) {
        u32 source = (comp >> (4 * i)) & 7, v;

        if (source != 4 && source != 5)
            return 0;
        v = source == 4 ? CE(c, CE_REMAP_CONST_A) : CE(c, CE_REMAP_CONST_B);
        memcpy(elem + i * size, &v, size);
    }
    return size * n;
}

// n bytes of the pattern that has elem at its start, from its byte pos on.
static void fill(u8 *dst, u64 n, u64 pos, const u8 *elem, u32 size)
{
    u64 i, wide;

    if (!memchr_inv(elem, elem[0], size)) {
        memset(dst, elem[0], n);
        return;
    }
    if (8 % size == 0 && IS_ALIGNED((u64)dst | n, 8)) {
        for (i = 0; i < 8; i++)
            ((u8 *)&wide)[i] = elem[(pos + i) % size];
        memset64((u64 *)dst, wide, n / 8);
        return;
    }
    for (i = 0; i < n; i++)
        dst[i] = elem[(pos + i) % size];
}

static void run_fill(struct sim_chan *c, u32 launch, u64 out, u64 len, const u8 *elem, u32 size)
{
    u64 pos = 0;

    while (pos < len) {
        u64 contig, n;
        u8 *d = ce_ptr(c, launch & LAUNCH_DST_PHYS, CE(c, CE_DST_PHYS_MODE), out + pos, true, &contig);

        if (!d) {
            sim_chan_fault(c, "fill", out + pos);
            return;
        }
        n = min(len - pos, contig);
        fill(d, n, pos, elem, size);
        pos += n;
    }
}

static void run_copy(struct sim_chan *c, u32 launch, u64 in, u64 out, u64 len)
{
    while (len) {
        u64 ci, co, n;
        u8 *s = ce_ptr(c, launch & LAUNCH_SRC_PHYS, CE(c, CE_SRC_PHYS_MODE), in, false, &ci);
        u8 *d = ce_ptr(c, launch & LAUNCH_DST_PHYS, CE(c, CE_DST_PHYS_MODE), out, true, &co);

        if (!s || !d) {
            sim_chan_fault(c, s ? "copy, destination" : "copy, source", s ? out : in);
            return;
        }
        n = min3(len, ci, co);
        memmove(d, s, n);
        in += n;
        out += n;
        len -= n;
    }
}

// A small physical write without a flush: page-table entries. It stays in flight until a membar.
static bool try_post(struct sim_chan *c, u32 launch, u64 in, u64 out, u64 len, const u8 *elem, u32 size)
{
    u64 contig;
    u8 *buf, *s = NULL;
    bool ok;
    struct sim_gpu *target = phys_target(c, CE(c, CE_DST_PHYS_MODE), &ok);

    if (!ok || (launch & LAUNCH_FLUSH) || !(launch & LAUNCH_DST_PHYS) || len > MAX_POST ||
        !sim_phys_ptr(target, out, &contig) || contig < len)
        return false;
    if (!size) {
        s = ce_ptr(c, launch & LAUNCH_SRC_PHYS, CE(c, CE_SRC_PHYS_MODE), in, false, &contig);
        // Reading its own writes is more than this models
        if (!s || contig < len || (launch & LAUNCH_SRC_PHYS))
            return false;
    }
    buf = kmalloc(MAX_POST, GFP_NOWAIT | __GFP_NOWARN);
    if (!buf)
        return false;
    if (size)
        fill(buf, len, 0, elem, size);
    else
        memcpy(buf, s, len);
    ok = !sim_post(&c->posted, c->vas, target, out, buf, len);
    kfree(buf);
    c->posted_at = jiffies;
    return ok;
}

static void transfer(struct sim_chan *c, u32 launch)
{
    u64 in = (u64)CE(c, CE_OFFSET_IN_UPPER) << 32 | CE(c, CE_OFFSET_IN_LOWER);
    u64 out = (u64)CE(c, CE_OFFSET_OUT_UPPER) << 32 | CE(c, CE_OFFSET_OUT_LOWER);
    u32 lines = launch & LAUNCH_MULTI_LINE ? CE(c, CE_LINE_COUNT) : 1, size = 0, i;
    u64 len = CE(c, CE_LINE_LENGTH_IN);
    u8 elem[16];

    if ((launch & LAUNCH_PITCH) != LAUNCH_PITCH) {
        sim_chan_fault(c, "only pitch layouts are modelled", launch);
        return;
    }
    if ((launch & LAUNCH_SCRUB) && c->vas->gpu->arch->ce_scrub) {
        // A fill whose length is in bytes
        size = 8;
        memcpy(elem, &CE(c, CE_REMAP_CONST_A), 4);
        memcpy(elem + 4, &CE(c, CE_REMAP_CONST_B), 4);
    } else if (launch & LAUNCH_REMAP) {
        size = fill_element(c, elem);
        if (!size) {
            sim_chan_fault(c, "only fills with constants are modelled", launch);
            return;
        }
        len *= size;
    }
    if ((launch & LAUNCH_DST_PHYS) && len <= MAX_POST && (CE(c, CE_DST_PHYS_MODE) & 3) == 0)
        c->vas->gpu->c.pte_writes += len / 8;
    if (lines == 1 && try_post(c, launch, in, out, len, elem, size))
        return;
    sim_post_land_chan(c);
    for (i = 0; i < lines && !c->faulted; i++) {
        if (size)
            run_fill(c, launch, out, len, elem, size);
        else
            run_copy(c, launch, in, out, len);
        in += CE(c, CE_PITCH_IN);
        out += CE(c, CE_PITCH_OUT);
    }
}

static void semaphore(struct sim_chan *c, u32 launch)
{
    u64 va = (u64)CE(c, CE_SEM_A) << 32 | CE(c, CE_SEM_B), contig;
    u32 payload = CE(c, CE_SEM_PAYLOAD), *p;

    switch ((launch >> 3) & 3) {
    case 1:
        if (!(launch & LAUNCH_REDUCTION)) {
            sim_chan_sem_write(c, va, payload, false);
            break;
        }
        p = sim_va_ptr(c->vas, SIMGPU_UNIT_HUB, va, true, &contig);
        if (!p || ((launch >> 14) & 15) != REDUCTION_INC) {
            sim_chan_fault(c, "semaphore reduction", va);
            break;
        }
        smp_mb();
        WRITE_ONCE(*p, *p >= payload ? 0 : *p + 1);
        break;
    case 2: sim_chan_sem_write(c, va, payload, true); break;
    }
}

static void launch_dma(struct sim_chan *c, u32 launch)
{
    struct sim_gpu *g = c->vas->gpu;

    if (launch & LAUNCH_TRANSFER)
        transfer(c, launch);
    if (c->faulted)
        return;
    if (launch & LAUNCH_FLUSH) {
        struct sim_post *p;

        // The flush of an engine waits for what the engine did before
        list_for_each_entry(p, &c->posted, node)
            p->ready = true;
        sim_post_membar(g, c, !(launch & LAUNCH_FLUSH_GL));
    }
    sim_loops_step(g);
    semaphore(c, launch);
}

bool sim_ce_method(struct sim_chan *c, u32 addr, u32 value)
{
    if (addr >= sizeof(c->ce))
        return false;
    CE(c, addr) = value;
    if (addr == CE_LAUNCH_DMA)
        launch_dma(c, value);
    return true;
}
