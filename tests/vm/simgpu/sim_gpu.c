// nvUvmInterface*: registration, sessions, devices, what a GPU can do, fault and access-counter buffers.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"
#include "sim_rm.h"

static int session_cookie;

static struct sim_gpu *dev_gpu(uvmGpuDeviceHandle d) { return (struct sim_gpu *)d; }

NV_STATUS nvUvmInterfaceRegisterGpu(const NvProcessorUuid *uuid, UvmGpuPlatformInfo *info)
{
    struct sim_gpu *g = sim_gpu_by_uuid(uuid->uuid);

    if (!g)
        return NV_ERR_GPU_UUID_NOT_FOUND;
    SIM_CALL_MAY_FAIL(g);
    info->pci_dev = g->pdev;
    info->dma_addressable_start = 0;
    info->dma_addressable_limit = (1ULL << 47) - 1;
    mutex_lock(&sim_lock);
    g->registered++;
    mutex_unlock(&sim_lock);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceRegisterGpu);

void nvUvmInterfaceUnregisterGpu(const NvProcessorUuid *uuid)
{
    struct sim_gpu *g = sim_gpu_by_uuid(uuid->uuid);

    if (WARN_ON(!g || !g->registered))
        return;
    SIM_CALL(g);
    mutex_lock(&sim_lock);
    g->registered--;
    mutex_unlock(&sim_lock);
}
EXPORT_SYMBOL(nvUvmInterfaceUnregisterGpu);

NV_STATUS nvUvmInterfaceSessionCreate(uvmGpuSessionHandle *session, UvmPlatformInfo *info)
{
    SIM_CALL(&sim_gpus[0]);
    *session = (uvmGpuSessionHandle)&session_cookie;
    memset(info, 0, sizeof(*info)); // UVM passes it uninitialised
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceSessionCreate);

NV_STATUS nvUvmInterfaceSessionDestroy(uvmGpuSessionHandle session)
{
    SIM_CALL(&sim_gpus[0]);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceSessionDestroy);

// Nothing ever happens: neither interrupts nor a suspended machine.

#ifdef SIM_HAVE_UVM_EVENTS
NV_STATUS nvUvmInterfaceRegisterUvmEvents(struct UvmEventsLinux *ops) { return NV_OK; }
EXPORT_SYMBOL(nvUvmInterfaceRegisterUvmEvents);

void nvUvmInterfaceDeRegisterUvmEvents(void) {}
EXPORT_SYMBOL(nvUvmInterfaceDeRegisterUvmEvents);
#else
NV_STATUS nvUvmInterfaceRegisterUvmCallbacks(struct UvmOpsUvmEvents *ops) { return NV_OK; }
EXPORT_SYMBOL(nvUvmInterfaceRegisterUvmCallbacks);

void nvUvmInterfaceDeRegisterUvmOps(void) {}
EXPORT_SYMBOL(nvUvmInterfaceDeRegisterUvmOps);
#endif

NV_STATUS nvUvmInterfaceGetGpuInfo(const NvProcessorUuid *uuid, const UvmGpuClientInfo *client, UvmGpuInfo *gi)
{
    struct sim_gpu *g = sim_gpu_by_uuid(uuid->uuid);

    if (!g)
        return NV_ERR_GPU_UUID_NOT_FOUND;
    if (!sim_rmctl_is_open(g->index))
        return NV_ERR_INSUFFICIENT_PERMISSIONS;
    SIM_CALL_MAY_FAIL(g);
    memset(gi, 0, sizeof(*gi));
    snprintf(gi->name, sizeof(gi->name), "Simulated GPU %u", g->index);
    memcpy(gi->uuid.uuid, g->uuid, sizeof(g->uuid));
    gi->gpuArch = g->arch->arch;
    gi->gpuImplementation = g->arch->implementation;
    gi->hostClass = g->arch->host_class;
    gi->ceClass = g->arch->ce_class;
    gi->computeClass = g->arch->compute_class;
#ifdef SIM_HAVE_ACCESS_COUNTER_COUNT
    gi->accessCntrBufferCount = 1;
#endif
    gi->subdeviceCount = 1;
    gi->virtMode = UVM_VIRT_MODE_NONE;
    gi->gpcCount = 1;
    gi->maxGpcCount = 1;
    gi->tpcCount = 4;
    gi->maxTpcPerGpcCount = 4;
    gi->sysmemLink = UVM_LINK_TYPE_PCIE;
    gi->sysmemLinkRateMBps = 15760;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetGpuInfo);

NV_STATUS nvUvmInterfaceDeviceCreate(uvmGpuSessionHandle session, const UvmGpuInfo *gi, const NvProcessorUuid *uuid,
                                     uvmGpuDeviceHandle *device, NvBool smc)
{
    struct sim_gpu *g = sim_gpu_by_uuid(uuid->uuid);

    if (!g)
        return NV_ERR_GPU_UUID_NOT_FOUND;
    SIM_CALL_MAY_FAIL(g);
    *device = (uvmGpuDeviceHandle)g;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceDeviceCreate);

void nvUvmInterfaceDeviceDestroy(uvmGpuDeviceHandle device) { SIM_CALL(dev_gpu(device)); }
EXPORT_SYMBOL(nvUvmInterfaceDeviceDestroy);

NV_STATUS nvUvmInterfaceQueryCaps(uvmGpuDeviceHandle device, UvmGpuCaps *caps)
{
    SIM_CALL_MAY_FAIL(dev_gpu(device));
    memset(caps, 0, sizeof(*caps));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceQueryCaps);

NV_STATUS nvUvmInterfaceQueryCopyEnginesCaps(uvmGpuDeviceHandle device, UvmGpuCopyEnginesCaps *caps)
{
    UvmGpuCopyEngineCaps *ce = &caps->copyEngineCaps[0];

    SIM_CALL_MAY_FAIL(dev_gpu(device));
    memset(caps, 0, sizeof(*caps));
    ce->supported = 1;
    ce->sysmem = ce->sysmemRead = ce->sysmemWrite = 1;
    ce->p2p = 1;
    ce->cePceMask = 1;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceQueryCopyEnginesCaps);

NV_STATUS nvUvmInterfaceGetFbInfo(uvmGpuDeviceHandle device, UvmGpuFbInfo *fb)
{
    struct sim_gpu *g = dev_gpu(device);

    SIM_CALL_MAY_FAIL(g);
    memset(fb, 0, sizeof(*fb));
    fb->maxAllocatableAddress = g->fb_size - 1;
    fb->heapSize = g->fb_size >> 10;
#ifdef SIM_HAVE_MAX_VIDMEM_PAGE_SIZE
    fb->maxVidmemPageSize = 2 << 20;
#endif
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetFbInfo);

#ifdef SIM_HAVE_NVLINK_INFO
NV_STATUS nvUvmInterfaceGetNvlinkInfo(uvmGpuDeviceHandle device, UvmGpuNvlinkInfo *info)
{
    SIM_CALL_MAY_FAIL(dev_gpu(device));
    memset(info, 0, sizeof(*info));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetNvlinkInfo);
#endif

NV_STATUS nvUvmInterfaceGetEccInfo(uvmGpuDeviceHandle device, UvmGpuEccInfo *ecc)
{
    SIM_CALL_MAY_FAIL(dev_gpu(device));
    memset(ecc, 0, sizeof(*ecc));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetEccInfo);

NV_STATUS nvUvmInterfaceServiceDeviceInterruptsRM(uvmGpuDeviceHandle device)
{
    SIM_CALL(dev_gpu(device));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceServiceDeviceInterruptsRM);

// Fault and access-counter buffers

NV_STATUS nvUvmInterfaceInitFaultInfo(uvmGpuDeviceHandle device, UvmGpuFaultInfo *f)
{
    struct sim_gpu *g = dev_gpu(device);

    SIM_CALL_MAY_FAIL(g);
    memset(f, 0, sizeof(*f));
    g->regs[SIM_REG_FAULT_GET] = g->regs[SIM_REG_FAULT_PUT] = 0;
    f->replayable.pFaultBufferGet = &g->regs[SIM_REG_FAULT_GET];
    f->replayable.pFaultBufferPut = &g->regs[SIM_REG_FAULT_PUT];
    f->replayable.pFaultBufferInfo = &g->regs[SIM_REG_FAULT_INFO];
    f->replayable.pPmcIntr = &g->regs[SIM_REG_INTR];
    f->replayable.pPmcIntrEnSet = &g->regs[SIM_REG_INTR_SET];
    f->replayable.pPmcIntrEnClear = &g->regs[SIM_REG_INTR_CLEAR];
    f->replayable.pPrefetchCtrl = &g->regs[SIM_REG_PREFETCH];
    f->replayable.replayableFaultMask = 1;
    f->replayable.bufferAddress = g->fault_buf;
    f->replayable.bufferSize = SIM_FAULT_ENTRIES * SIM_FAULT_SIZE;
#ifdef SIM_HAVE_UVM_OWNS_FAULT_BUFFER
    f->replayable.bUvmOwnsHwFaultBuffer = NV_TRUE;
#endif
    f->nonReplayable.shadowBufferAddress = g->nr_fault_buf;
    f->nonReplayable.bufferSize = SIM_FAULT_ENTRIES * SIM_FAULT_SIZE;
    f->faultBufferHandle = 0xfa017; // UVM only wants it not to be zero
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceInitFaultInfo);

NV_STATUS nvUvmInterfaceDestroyFaultInfo(uvmGpuDeviceHandle device, UvmGpuFaultInfo *f)
{
    SIM_CALL(dev_gpu(device));
    memset(f, 0, sizeof(*f));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceDestroyFaultInfo);

NV_STATUS nvUvmInterfaceOwnPageFaultIntr(uvmGpuDeviceHandle device, NvBool own)
{
    SIM_CALL(dev_gpu(device));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceOwnPageFaultIntr);

NV_STATUS nvUvmInterfaceHasPendingNonReplayableFaults(UvmGpuFaultInfo *f, NvBool *has)
{
    *has = NV_FALSE;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceHasPendingNonReplayableFaults);

NV_STATUS nvUvmInterfaceGetNonReplayableFaults(UvmGpuFaultInfo *f, void *buffer, NvU32 *n)
{
    *n = 0;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetNonReplayableFaults);

#ifdef SIM_HAVE_FLUSH_BY_FAULT_INFO
NV_STATUS nvUvmInterfaceFlushReplayableFaultBuffer(UvmGpuFaultInfo *f, NvBool copy)
#else
NV_STATUS nvUvmInterfaceFlushReplayableFaultBuffer(uvmGpuDeviceHandle device)
#endif
{
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceFlushReplayableFaultBuffer);

NV_STATUS nvUvmInterfaceInitAccessCntrInfo(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *a, NvU32 index)
{
    struct sim_gpu *g = dev_gpu(device);

    SIM_CALL_MAY_FAIL(g);
    memset(a, 0, sizeof(*a));
    a->pAccessCntrBufferGet = &g->regs[SIM_REG_AC_GET];
    a->pAccessCntrBufferPut = &g->regs[SIM_REG_AC_PUT];
    a->pAccessCntrBufferFull = &g->regs[SIM_REG_AC_FULL];
    a->pHubIntr = &g->regs[SIM_REG_AC_INTR];
    a->pHubIntrEnSet = &g->regs[SIM_REG_AC_INTR_SET];
    a->pHubIntrEnClear = &g->regs[SIM_REG_AC_INTR_CLEAR];
    a->accessCounterMask = 2;
    a->bufferAddress = g->ac_buf;
    a->bufferSize = SIM_FAULT_ENTRIES * SIM_FAULT_SIZE;
    a->accessCntrBufferHandle = 0xacc;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceInitAccessCntrInfo);

NV_STATUS nvUvmInterfaceDestroyAccessCntrInfo(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *a)
{
    SIM_CALL(dev_gpu(device));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceDestroyAccessCntrInfo);

#ifdef SIM_HAVE_CONST_ACCESS_COUNTER_CONFIG
NV_STATUS nvUvmInterfaceEnableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *a,
                                         const UvmGpuAccessCntrConfig *config)
#else
NV_STATUS nvUvmInterfaceEnableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *a,
                                         UvmGpuAccessCntrConfig *config)
#endif
{
    SIM_CALL(dev_gpu(device));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceEnableAccessCntr);

NV_STATUS nvUvmInterfaceDisableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *a)
{
    SIM_CALL(dev_gpu(device));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceDisableAccessCntr);

NV_STATUS nvUvmInterfaceReportNonReplayableFault(uvmGpuDeviceHandle device, const void *packet)
{
    SIM_CALL(dev_gpu(device));
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceReportNonReplayableFault);

// Two GPUs are peers over PCIe that nobody has enabled: UVM looks for NVLink when it registers the second.
NV_STATUS nvUvmInterfaceGetP2PCaps(uvmGpuDeviceHandle a, uvmGpuDeviceHandle b, UvmGpuP2PCapsParams *caps)
{
    SIM_CALL_MAY_FAIL(dev_gpu(a));
    memset(caps, 0, sizeof(*caps));
    caps->p2pLink = UVM_LINK_TYPE_PCIE;
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceGetP2PCaps);
