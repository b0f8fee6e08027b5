// SPDX-License-Identifier: MIT
#include "driver/rm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "../../uvm_ext/uvm_vmem_status.h"
#include "core/error.h"
#include "vmem.h"

// A client chooses its own handles.
#define DEVICE_HANDLE 0x76000000u
#define MEMORY_HANDLE 0x76000001u
#define MEMORY_HANDLES 0xffffffu

int vmem__rm_error(uint32_t status, const char *what)
{
    static const struct {
        uint32_t status;
        int rc;
        const char *text;
    } known[] = {
        {NV_ERR_BUSY_RETRY, -EBUSY, "busy"},
        {NV_ERR_CARD_NOT_PRESENT, -ENODEV, "card not present"},
        {NV_ERR_GPU_IS_LOST, -ENODEV, "GPU lost"},
        {NV_ERR_GPU_UUID_NOT_FOUND, -ENODEV, "GPU UUID not found"},
        {NV_ERR_ILLEGAL_ACTION, -EPERM, "action not allowed on this descriptor"},
        {NV_ERR_IN_USE, -EBUSY, "in use"},
        {NV_ERR_INSUFFICIENT_RESOURCES, -ENOMEM, "insufficient resources"},
        {NV_ERR_INSUFFICIENT_PERMISSIONS, -EPERM, "insufficient permissions"},
        {NV_ERR_INVALID_ADDRESS, -EIO, "invalid address"},
        {NV_ERR_INVALID_ARGUMENT, -EIO, "invalid argument"},
        {NV_ERR_INVALID_CLASS, -EOPNOTSUPP, "class not valid"},
        {NV_ERR_INVALID_DEVICE, -ENODEV, "device not valid"},
        {NV_ERR_INVALID_LIMIT, -EIO, "limit exceeded"},
        {NV_ERR_INVALID_OBJECT_HANDLE, -EIO, "invalid handle"},
        {NV_ERR_INVALID_OFFSET, -EIO, "invalid offset"},
        {NV_ERR_INVALID_PARAM_STRUCT, -EIO, "invalid parameters"},
        {NV_ERR_INVALID_POINTER, -EFAULT, "invalid pointer"},
        {NV_ERR_NO_MEMORY, -ENOMEM, "out of memory"},
        {NV_ERR_NOT_SUPPORTED, -EOPNOTSUPP, "not supported"},
        {NV_ERR_OBJECT_NOT_FOUND, -ENODEV, "object not found"},
        {NV_ERR_OUT_OF_RANGE, -EIO, "out of range"},
        {NV_ERR_STATE_IN_USE, -EBUSY, "state in use"},
        {NV_ERR_TIMEOUT, -ETIMEDOUT, "timed out"},
        {NV_ERR_TIMEOUT_RETRY, -ETIMEDOUT, "timed out, retry"},
        {NV_ERR_UVM_ADDRESS_IN_USE, -EEXIST, "address in use"},
    };

    if (status == NV_OK)
        return 0;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (known[i].status == status)
            return vmem__error(known[i].rc, "%s: driver status 0x%x, %s", what, status, known[i].text);
    return vmem__error(-EIO, "%s: driver status 0x%x", what, status);
}

// During system suspend, a signal ends RM's ioctls before they begin. Python's handlers do not restart calls.
static int rm_ioctl(const struct vmem__rm *rm, unsigned long request, void *params)
{
    int rc;

    do
        rc = ioctl(rm->fd, request, params);
    while (rc && errno == EINTR);
    return rc;
}

static int rm_alloc(struct vmem__rm *rm, uint32_t parent, uint32_t *object, uint32_t class_id, void *params,
                    uint32_t params_size, const char *what)
{
    struct rm_alloc alloc = {
        .client = rm->client,
        .parent = parent,
        .object = *object,
        .class_id = class_id,
        .params = (uintptr_t)params,
    };

    if (rm->abi->alloc_status != offsetof(struct rm_alloc, params_size))
        alloc.params_size = params_size;
    if (rm_ioctl(rm, RM_IOCTL(RM_ESC_ALLOC, struct rm_alloc), &alloc))
        return vmem__error(-errno, "%s: ioctl on /dev/nvidiactl: %s", what, strerror(errno));
    *object = alloc.object;
    return vmem__rm_error(vmem__abi_alloc_status(rm->abi, &alloc), what);
}

static int device_instance(struct vmem__rm *rm, const uint8_t uuid[16], uint32_t *device)
{
    struct rm_uuid_info info = {.flags = RM_UUID_BINARY};
    struct rm_control control = {
        .client = rm->client,
        .object = rm->client,
        .command = RM_CONTROL_UUID_INFO,
        .params = (uintptr_t)&info,
        .params_size = sizeof(info),
    };

    memcpy(info.uuid, uuid, 16);
    if (rm_ioctl(rm, RM_IOCTL(RM_ESC_CONTROL, struct rm_control), &control))
        return vmem__error(-errno, "find the GPU by UUID: ioctl on /dev/nvidiactl: %s", strerror(errno));
    *device = info.device;
    return vmem__rm_error(control.status, "find the GPU by UUID");
}

int vmem__rm_open(struct vmem__rm *rm, const struct vmem__abi *abi, const uint8_t uuid[16])
{
    uint32_t handle = DEVICE_HANDLE;
    struct rm_device device = {0};
    int rc;

    rm->abi = abi;
    rm->client = 0;
    rm->fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
    if (rm->fd < 0)
        return vmem__error(-errno, "/dev/nvidiactl: %s", strerror(errno));
    rc = rm_alloc(rm, 0, &rm->client, RM_CLASS_CLIENT, NULL, 0, "allocate an RM client");
    if (!rc)
        rc = device_instance(rm, uuid, &device.device);
    if (!rc) {
        device.client_share = rm->client;
        rc = rm_alloc(rm, rm->client, &handle, RM_CLASS_DEVICE, &device, sizeof(device), "allocate an RM device");
    }
    if (rc)
        vmem__rm_close(rm);
    return rc;
}

void vmem__rm_close(struct vmem__rm *rm)
{
    if (rm->fd >= 0)
        close(rm->fd);
    rm->fd = -1;
}

bool vmem__rm_memory_is_zero(struct vmem__rm *rm)
{
    uint8_t caps[RM_FB_CAPS_BYTES] = {0};
    struct rm_control control = {
        .client = rm->client,
        .object = DEVICE_HANDLE,
        .command = RM_CONTROL_FB_CAPS,
        .params = (uintptr_t)caps,
        .params_size = sizeof(caps),
    };

    return !rm_ioctl(rm, RM_IOCTL(RM_ESC_CONTROL, struct rm_control), &control) && !control.status &&
           (caps[RM_FB_CAPS_CLEARED_BYTE] & RM_FB_CAPS_CLEARED_MASK);
}

bool vmem__rm_gpu_memory_is_zero(const uint8_t uuid[16])
{
    const struct vmem__abi *abi;
    struct vmem__rm rm;
    char release[32];
    bool zero;

    if (vmem__abi_release(release, sizeof(release)) || vmem__abi_find(release, false, &abi) ||
        vmem__rm_open(&rm, abi, uuid))
        return false;
    zero = vmem__rm_memory_is_zero(&rm);
    vmem__rm_close(&rm);
    return zero;
}

int vmem__rm_memory_new(struct vmem__rm *rm, uint64_t size, uint32_t *handle)
{
    struct rm_memory memory = {
        .owner = rm->client,
        .flags = RM_MEMORY_IGNORE_BANK_PLACEMENT | RM_MEMORY_ALIGNMENT_FORCE | RM_MEMORY_HANDLE_PROVIDED |
                 RM_MEMORY_MAP_NOT_REQUIRED | RM_MEMORY_PERSISTENT,
        .attr = RM_ATTR_PAGE_SIZE_HUGE | RM_ATTR_ALLOW_NONCONTIGUOUS,
        .attr2 = RM_ATTR2_HUGE_2M,
        .size = size,
        .alignment = VMEM_PAGE_2M,
    };

    *handle = MEMORY_HANDLE + atomic_fetch_add(&rm->handles, 1) % MEMORY_HANDLES;
    return rm_alloc(rm, DEVICE_HANDLE, handle, RM_CLASS_MEMORY, &memory, rm->abi->memory_size,
                    "allocate device memory");
}

bool vmem__rm_memory_free(struct vmem__rm *rm, uint32_t handle)
{
    struct rm_free params = {.client = rm->client, .parent = DEVICE_HANDLE, .object = handle};

    return !rm_ioctl(rm, RM_IOCTL(RM_ESC_FREE, struct rm_free), &params) && !params.status;
}
