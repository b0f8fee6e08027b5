// Video memory and PMA, the allocator that UVM and RM share: a bitmap of granules.
//
// Memory is poisoned while it is free, so that nothing that was never zeroed can look zeroed, and a write to free
// memory stays visible.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/bitmap.h>

#include "sim.h"

static struct sim_gpu *pma_gpu(void *pma) { return pma; }

static void update_stats(struct sim_gpu *g)
{
    u64 i, free_2m = 0;

    for (i = 0; i + 32 <= g->pma_granules; i += 32)
        free_2m += find_next_bit(g->pma_used, i + 32, i) >= i + 32;
    g->pma_stats.numPages2m = g->pma_granules / 32;
    g->pma_stats.numFreePages2m = free_2m;
    g->pma_stats.numFreePages64k = g->pma_granules - bitmap_weight(g->pma_used, g->pma_granules);
}

#define CHUNK (2ULL << 20)

int sim_pma_init(struct sim_gpu *g)
{
    g->fb = kvcalloc(g->fb_size / CHUNK, sizeof(*g->fb), GFP_KERNEL);
    g->pma_granules = g->fb_size >> SIM_PMA_SHIFT;
    g->pma_used = bitmap_zalloc(g->pma_granules, GFP_KERNEL);
    g->pma_pinned = bitmap_zalloc(g->pma_granules, GFP_KERNEL);
    if (!g->fb || !g->pma_used || !g->pma_pinned)
        return -ENOMEM;
    update_stats(g);
    return 0;
}

void sim_pma_exit(struct sim_gpu *g)
{
    u64 i;

    for (i = 0; g->fb && i < g->fb_size / CHUNK; i++)
        vfree(g->fb[i]);
    kvfree(g->fb);
    bitmap_free(g->pma_used);
    bitmap_free(g->pma_pinned);
}

u8 *sim_fb_ptr(struct sim_gpu *g, u64 phys, u64 *contig)
{
    u8 **chunk;

    if (phys >= g->fb_size)
        return NULL;
    chunk = &g->fb[phys / CHUNK];
    if (!*chunk) {
        *chunk = vmalloc(CHUNK);
        if (!*chunk)
            return NULL;
        memset(*chunk, SIMGPU_POISON, CHUNK);
    }
    *contig = CHUNK - phys % CHUNK;
    return *chunk + phys % CHUNK;
}

static void poison(struct sim_gpu *g, u64 phys, u64 len)
{
    u64 contig;
    u8 *p;

    for (; len; phys += contig, len -= contig) {
        p = sim_fb_ptr(g, phys, &contig);
        contig = min(contig, len);
        memset(p, SIMGPU_POISON, contig);
    }
}

bool sim_pma_is_free(struct sim_gpu *g, u64 phys)
{
    return phys < g->fb_size && !test_bit(phys >> SIM_PMA_SHIFT, g->pma_used);
}

static bool take(struct sim_gpu *g, u64 granule, u64 n, bool pinned)
{
    u64 phys, contig;

    for (phys = granule << SIM_PMA_SHIFT; phys < (granule + n) << SIM_PMA_SHIFT; phys += contig) {
        if (!sim_fb_ptr(g, phys, &contig))
            return false;
    }
    bitmap_set(g->pma_used, granule, n);
    if (pinned)
        bitmap_set(g->pma_pinned, granule, n);
    else
        bitmap_clear(g->pma_pinned, granule, n);
    g->c.pma_live += n;
    return true;
}

static void give(struct sim_gpu *g, u64 granule, u64 n)
{
    u64 phys = granule << SIM_PMA_SHIFT, len = n << SIM_PMA_SHIFT;

    if (granule + n > g->pma_granules || find_next_zero_bit(g->pma_used, granule + n, granule) < granule + n) {
        g->c.bad_double_free++;
        WARN(1, "simgpu: free of 0x%llx, which is free\n", phys);
        return;
    }
    sim_tlb_check_free(g, phys, len);
    bitmap_clear(g->pma_used, granule, n);
    bitmap_clear(g->pma_pinned, granule, n);
    g->c.pma_live -= n;
    poison(g, phys, len);
    // After the poison, so that the damage shows
    sim_post_check_free(g, phys, len);
}

// n runs of run granules. Returns how many were found.
static u64 take_runs(struct sim_gpu *g, u64 lo, u64 hi, u64 run, u64 align, u64 n, bool pinned, u64 *pages)
{
    u64 i, granule = lo;

    for (i = 0; i < n; i++) {
        granule = bitmap_find_next_zero_area(g->pma_used, hi, granule, run, align - 1);
        if (granule + run > hi || !take(g, granule, run, pinned))
            break;
        pages[i] = granule << SIM_PMA_SHIFT;
    }
    return i;
}

// Asks UVM for pages that it does not need most. The pages stay allocated, now to the caller.
static NV_STATUS evict_from_uvm(struct sim_gpu *g, u64 page_size, u64 count, u64 lo, u64 hi, u64 *pages)
{
    uvmPmaEvictPagesCallback evict;
    NV_STATUS status;
    void *data;

    mutex_lock(&sim_lock);
    evict = g->evict_pages;
    data = g->evict_data;
    mutex_unlock(&sim_lock);
    if (!evict)
        return NV_ERR_NO_MEMORY;
    status = evict(data, page_size, pages, count, lo << SIM_PMA_SHIFT, (hi << SIM_PMA_SHIFT) - 1,
                   UVM_PMA_GPU_MEMORY_TYPE_UNPROTECTED);
    return status;
}

NV_STATUS nvUvmInterfaceGetPmaObject(uvmGpuDeviceHandle device, void **pma, const UvmPmaStatistics **stats)
{
    struct sim_gpu *g = (struct sim_gpu *)device;

    SIM_CALL_MAY_FAIL(g);
    *pma = g;
    *stats = &g->pma_stats;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetPmaObject);

NV_STATUS nvUvmInterfacePmaRegisterEvictionCallbacks(void *pma, uvmPmaEvictPagesCallback evict_pages,
                                                     uvmPmaEvictRangeCallback evict_range, void *data)
{
    struct sim_gpu *g = pma_gpu(pma);

    SIM_CALL_MAY_FAIL(g);
    mutex_lock(&sim_lock);
    g->evict_pages = evict_pages;
    g->evict_range = evict_range;
    g->evict_data = data;
    mutex_unlock(&sim_lock);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfacePmaRegisterEvictionCallbacks);

// evict_mutex makes unregistering wait for a callback that is running.
static DEFINE_MUTEX(evict_mutex);

void nvUvmInterfacePmaUnregisterEvictionCallbacks(void *pma)
{
    struct sim_gpu *g = pma_gpu(pma);

    // RM tolerates NULL, which UVM passes when it undoes a registration
    if (!g)
        return;
    SIM_CALL(g);
    mutex_lock(&evict_mutex);
    mutex_lock(&sim_lock);
    g->evict_pages = NULL;
    g->evict_range = NULL;
    mutex_unlock(&sim_lock);
    mutex_unlock(&evict_mutex);
}
EXPORT_SYMBOL(nvUvmInterfacePmaUnregisterEvictionCallbacks);

NV_STATUS nvUvmInterfacePmaAllocPages(void *pma, NvLength count, NvU64 page_size, UvmPmaAllocationOptions *o,
                                      NvU64 *pages)
{
    struct sim_gpu *g = pma_gpu(pma);
    bool contiguous = o->flags & UVM_PMA_ALLOCATE_CONTIGUOUS, pinned = o->flags & UVM_PMA_ALLOCATE_PINNED;
    u64 granule = page_size >> SIM_PMA_SHIFT, run = contiguous ? granule * count : granule, n = contiguous ? 1 : count;
    u64 lo = 0, hi = g->pma_granules, i;

    SIM_CALL_MAY_FAIL(g);
    if (!granule || !is_power_of_2(granule) || !count)
        return NV_ERR_INVALID_ARGUMENT;
    if (sim_inject(SIMGPU_SITE_PMA))
        return NV_ERR_NO_MEMORY;
    if (o->flags & UVM_PMA_ALLOCATE_SPECIFY_ADDRESS_RANGE) {
        lo = ALIGN(o->physBegin, page_size) >> SIM_PMA_SHIFT;
        if (o->physEnd < g->fb_size)
            hi = (o->physEnd + 1) >> SIM_PMA_SHIFT;
    }
    mutex_lock(&sim_lock);
    i = take_runs(g, lo, hi, run, granule, n, pinned, pages);
    if (i < n && !(o->flags & UVM_PMA_ALLOCATE_ALLOW_PARTIAL)) {
        while (i--)
            give(g, pages[i] >> SIM_PMA_SHIFT, run);
        i = 0;
    }
    update_stats(g);
    mutex_unlock(&sim_lock);
    if (!i)
        return NV_ERR_NO_MEMORY;
    o->numPagesAllocated = contiguous ? count : i;
    o->resultFlags = 0; // not zeroed
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfacePmaAllocPages);

NV_STATUS nvUvmInterfacePmaPinPages(void *pma, NvU64 *pages, NvLength count, NvU64 page_size, NvU32 flags)
{
    struct sim_gpu *g = pma_gpu(pma);
    u64 i, granule = page_size >> SIM_PMA_SHIFT;

    SIM_CALL_MAY_FAIL(g);
    if (sim_inject(SIMGPU_SITE_PMA))
        return NV_ERR_NO_MEMORY;
    mutex_lock(&sim_lock);
    for (i = 0; i < count; i++)
        bitmap_set(g->pma_pinned, pages[i] >> SIM_PMA_SHIFT, granule);
    mutex_unlock(&sim_lock);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfacePmaPinPages);

void nvUvmInterfacePmaFreePages(void *pma, NvU64 *pages, NvLength count, NvU64 page_size, NvU32 flags)
{
    struct sim_gpu *g = pma_gpu(pma);
    u64 i, granule = page_size >> SIM_PMA_SHIFT;

    SIM_CALL(g);
    mutex_lock(&sim_lock);
    for (i = 0; i < count; i++) {
        u64 phys = flags & UVM_PMA_ALLOCATE_CONTIGUOUS ? pages[0] + i * page_size : pages[i];

        give(g, phys >> SIM_PMA_SHIFT, granule);
    }
    update_stats(g);
    mutex_unlock(&sim_lock);
}
EXPORT_SYMBOL(nvUvmInterfacePmaFreePages);

NV_STATUS sim_pma_rm_alloc(struct sim_gpu *g, u64 page_size, u64 count, u64 *pages)
{
    u64 i, granule = page_size >> SIM_PMA_SHIFT;
    NV_STATUS status = NV_OK;

    if (sim_inject(SIMGPU_SITE_PMA))
        return NV_ERR_NO_MEMORY;
    mutex_lock(&sim_lock);
    i = take_runs(g, 0, g->pma_granules, granule, granule, count, true, pages);
    update_stats(g);
    mutex_unlock(&sim_lock);
    while (i < count && status == NV_OK) {
        mutex_lock(&evict_mutex);
        status = evict_from_uvm(g, page_size, 1, 0, g->pma_granules, pages + i);
        mutex_unlock(&evict_mutex);
        if (status == NV_OK)
            i++;
    }
    if (status != NV_OK)
        sim_pma_rm_free(g, page_size, i, pages);
    return status;
}

void sim_pma_rm_free(struct sim_gpu *g, u64 page_size, u64 count, u64 *pages)
{
    u64 i;

    mutex_lock(&sim_lock);
    for (i = 0; i < count; i++)
        give(g, pages[i] >> SIM_PMA_SHIFT, page_size >> SIM_PMA_SHIFT);
    update_stats(g);
    mutex_unlock(&sim_lock);
}

NV_STATUS sim_pma_evict(struct simgpu_evict *io)
{
    struct sim_gpu *g = &sim_gpus[io->gpu];
    NV_STATUS status = NV_ERR_NOT_SUPPORTED;
    u64 *pages;

    if (!io->range) {
        if ((io->page_size != 64 << 10 && io->page_size != 2 << 20) || !io->count || io->count > 4096)
            return NV_ERR_INVALID_ARGUMENT;
        pages = kvcalloc(io->count, sizeof(*pages), GFP_KERNEL);
        if (!pages)
            return NV_ERR_NO_MEMORY;
        mutex_lock(&evict_mutex);
        status = evict_from_uvm(g, io->page_size, io->count, 0, g->pma_granules, pages);
        mutex_unlock(&evict_mutex);
        if (status == NV_OK)
            sim_pma_rm_free(g, io->page_size, io->count, pages);
        kvfree(pages);
        return status;
    }
    if (io->phys >= g->fb_size || !io->len || io->len > g->fb_size - io->phys)
        return NV_ERR_INVALID_ARGUMENT;
    mutex_lock(&evict_mutex);
    if (g->evict_range) {
        // RM asks only for ranges that hold nothing pinned: UVM would wait for those in vain
        u64 first = io->phys >> SIM_PMA_SHIFT, last = (io->phys + io->len - 1) >> SIM_PMA_SHIFT;

        status = NV_ERR_INSUFFICIENT_RESOURCES;
        if (find_next_bit(g->pma_pinned, last + 1, first) > last)
            status =
                g->evict_range(g->evict_data, io->phys, io->phys + io->len - 1, UVM_PMA_GPU_MEMORY_TYPE_UNPROTECTED);
    }
    mutex_unlock(&evict_mutex);
    return status;
}

void sim_pma_poison_check(struct simgpu_poison *io)
{
    struct sim_gpu *g = &sim_gpus[io->gpu];
    u64 granule;

    io->free_granules = io->dirty_granules = io->first_dirty = 0;
    mutex_lock(&sim_lock);
    for_each_clear_bit(granule, g->pma_used, g->pma_granules) {
        u64 phys = granule << SIM_PMA_SHIFT;
        u8 *chunk = g->fb[phys / CHUNK];

        io->free_granules++;
        if (!chunk || !memchr_inv(chunk + phys % CHUNK, SIMGPU_POISON, 1 << SIM_PMA_SHIFT))
            continue;
        if (!io->dirty_granules++)
            io->first_dirty = phys;
    }
    mutex_unlock(&sim_lock);
}
