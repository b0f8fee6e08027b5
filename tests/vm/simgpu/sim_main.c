// Module life, the GPUs, and fault injection.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/dma-mapping.h>
#include <linux/sched.h>

#include "sim.h"

static unsigned int fb_mb = 256;
module_param(fb_mb, uint, 0444);
MODULE_PARM_DESC(fb_mb, "video memory of each simulated GPU, MiB");
static unsigned int gpus = 1;
module_param(gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "simulated GPUs, 1 or 2; each takes the identity of one QEMU edu device");
static char *arch = "turing";
module_param(arch, charp, 0444);
MODULE_PARM_DESC(arch, "turing, ampere, ada, hopper, blackwell or gb20x");
uint sim_trace;
module_param_named(trace, sim_trace, uint, 0644);
MODULE_PARM_DESC(trace, "1: log every method; 2: log what enters and leaves the TLBs");

DEFINE_MUTEX(sim_lock);
struct sim_gpu sim_gpus[SIM_MAX_GPUS];
unsigned int sim_gpu_count;
LIST_HEAD(sim_vas_list);
atomic_t sim_n_allocs, sim_n_tsgs, sim_n_chans;

struct sim_gpu *sim_gpu_by_uuid(const void *uuid)
{
    unsigned int i;

    for (i = 0; i < sim_gpu_count; i++) {
        if (!memcmp(sim_gpus[i].uuid, uuid, sizeof(sim_gpus[i].uuid)))
            return &sim_gpus[i];
    }
    return NULL;
}

static DEFINE_SPINLOCK(inject_lock);
static struct {
    u32 sites, nth;
    pid_t tgid; // 0: any
    u64 seen, fired;
} inject;

bool sim_inject(u32 site)
{
    bool fire = false;
    unsigned long flags;

    if (!(READ_ONCE(inject.sites) & site))
        return false;
    spin_lock_irqsave(&inject_lock, flags);
    // A push is executed by the engine thread, on behalf of nobody
    if ((inject.sites & site) && (!inject.tgid || site == SIMGPU_SITE_CHANNEL || inject.tgid == current->tgid)) {
        inject.seen++;
        fire = inject.nth && inject.seen == inject.nth;
        inject.fired += fire;
    }
    spin_unlock_irqrestore(&inject_lock, flags);
    return fire;
}

int sim_inject_ioctl(struct simgpu_inject *io)
{
    unsigned long flags;

    spin_lock_irqsave(&inject_lock, flags);
    swap(io->seen, inject.seen);
    swap(io->fired, inject.fired);
    inject.seen = inject.fired = 0;
    inject.sites = io->sites;
    inject.nth = io->nth;
    inject.tgid = io->mine ? current->tgid : 0;
    spin_unlock_irqrestore(&inject_lock, flags);
    return 0;
}

static int gpu_init(struct sim_gpu *g, u32 index, struct pci_dev *pdev, const struct sim_arch *what)
{
    // The last byte tells the GPUs apart
    static const u8 uuid[16] = {0x51, 0x4d, 0x47, 0x50, 0x55, 0, 0, 1, 0x80, 0, 0, 0, 0, 0, 0, 1};

    g->index = index;
    g->arch = what;
    memcpy(g->uuid, uuid, sizeof(uuid));
    g->uuid[15] += index;
    g->pdev = pdev;
    g->fb_size = ALIGN((u64)fb_mb << 20, 2 << 20);
    INIT_LIST_HEAD(&g->posted);
    INIT_LIST_HEAD(&g->loops);
    g->fault_buf = vzalloc(SIM_FAULT_ENTRIES * SIM_FAULT_SIZE);
    g->nr_fault_buf = vzalloc(SIM_FAULT_ENTRIES * SIM_FAULT_SIZE);
    g->ac_buf = vzalloc(SIM_FAULT_ENTRIES * SIM_FAULT_SIZE);
    if (!g->fault_buf || !g->nr_fault_buf || !g->ac_buf)
        return -ENOMEM;
    return sim_pma_init(g);
}

static void gpu_exit(struct sim_gpu *g)
{
    sim_pma_exit(g);
    vfree(g->fault_buf);
    vfree(g->nr_fault_buf);
    vfree(g->ac_buf);
    pci_dev_put(g->pdev);
}

static void exit_all(void)
{
    while (sim_gpu_count)
        gpu_exit(&sim_gpus[--sim_gpu_count]);
}

static int __init sim_init(void)
{
    const struct sim_arch *what = sim_arch_find(arch);
    struct pci_dev *pdev = NULL;
    int ret = 0;

    if (!what) {
        sim_log("arch=%s: there is turing, ampere, ada, hopper, blackwell and gb20x\n", arch);
        return -EINVAL;
    }
    while (!ret && sim_gpu_count < min_t(unsigned int, gpus, SIM_MAX_GPUS)) {
        pdev = pci_get_device(0x1234, 0x11e8, pdev);
        if (!pdev)
            break;
        // The next look-up drops the reference of this one
        pci_dev_get(pdev);
        ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
        if (!ret)
            ret = gpu_init(&sim_gpus[sim_gpu_count], sim_gpu_count, pdev, what);
        sim_gpu_count++;
    }
    pci_dev_put(pdev);
    if (!sim_gpu_count) {
        sim_log("no edu device (1234:11e8) to lend its identity\n");
        return -ENODEV;
    }
    if (!ret)
        ret = sim_engine_start();
    if (!ret) {
        ret = sim_dev_start();
        if (ret)
            sim_engine_stop();
    }
    if (ret) {
        exit_all();
        return ret;
    }
    sim_log("%u simulated GPU(s), %s, %u MiB each\n", sim_gpu_count, arch, fb_mb);
    return 0;
}

static void __exit sim_exit(void)
{
    u64 pma = 0;
    u32 i, vas = 0, dups;
    int allocs = atomic_read(&sim_n_allocs), tsgs = atomic_read(&sim_n_tsgs), chans = atomic_read(&sim_n_chans);
    struct sim_vas *v;

    sim_dev_stop();
    sim_engine_stop();
    dups = sim_mem_exit();
    list_for_each_entry(v, &sim_vas_list, node)
        vas++;
    for (i = 0; i < sim_gpu_count; i++)
        pma += sim_gpus[i].c.pma_live;
    // Objects that are left were never given back by the module that used the interface. The tests take "leak" for a failure
    if (vas || allocs || tsgs || chans || dups || pma)
        sim_log("leak: vaspaces %u allocs %d tsgs %d channels %d dups %u pma-units %llu\n", vas, allocs, tsgs, chans,
                dups, pma);
    exit_all();
}

module_init(sim_init);
module_exit(sim_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(SIM_RELEASE);
MODULE_DESCRIPTION("Stand-in for nvidia.ko that simulates GPUs for nvidia-uvm.ko");
