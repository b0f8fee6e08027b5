// SPDX-License-Identifier: MIT
#include "driver/rm.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

// Handles are ours to choose within our own client.
#define DEVICE_HANDLE 0x76000000u
#define MEMORY_HANDLE 0x76000001u
#define MEMORY_HANDLES 0xffffffu

int vmem__rm_error(uint32_t status, const char *what)
{
    static const struct {
        uint32_t status;
        int err;
        const char *text;
    } known[] = {
        {0x03, -EBUSY, "busy"},
        {0x05, -ENODEV, "card not present"},
        {0x0f, -ENODEV, "GPU lost"},
        {0x12, -ENODEV, "GPU UUID not found"},
        {0x16, -EPERM, "action not allowed on this descriptor"},
        {0x17, -EBUSY, "in use"},
        {0x1a, -ENOMEM, "insufficient resources"},
        {0x1b, -EPERM, "insufficient permissions"},
        {0x1e, -EIO, "invalid address"},
        {0x1f, -EIO, "invalid argument"},
        {0x22, -EOPNOTSUPP, "class not valid"},
        {0x26, -ENODEV, "device not valid"},
        {0x2e, -EIO, "limit exceeded"},
        {0x33, -EIO, "invalid handle"},
        {0x37, -EIO, "invalid offset"},
        {0x3a, -EIO, "invalid parameters"},
        {0x3d, -EFAULT, "invalid pointer"},
        {0x51, -ENOMEM, "out of memory"},
        {0x56, -EOPNOTSUPP, "not supported"},
        {0x57, -ENODEV, "object not found"},
        {0x5b, -EIO, "out of range"},
        {0x63, -EBUSY, "state in use"},
        {0x65, -ETIMEDOUT, "timed out"},
        {0x66, -ETIMEDOUT, "timed out, retry"},
        {0x68, -EEXIST, "address in use"},
    };

    if (status == 0)
        return 0;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (known[i].status == status)
            return vmem__error(known[i].err, "%s: driver status 0x%x, %s", what, status, known[i].text);
    return vmem__error(-EIO, "%s: driver status 0x%x", what, status);
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
    if (ioctl(rm->fd, RM_IOCTL(RM_ESC_ALLOC, struct rm_alloc), &alloc))
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
    if (ioctl(rm->fd, RM_IOCTL(RM_ESC_CONTROL, struct rm_control), &control))
        return vmem__error(-errno, "find the GPU by UUID: ioctl on /dev/nvidiactl: %s", strerror(errno));
    *device = info.device;
    return vmem__rm_error(control.status, "find the GPU by UUID");
}

int vmem__rm_open(struct vmem__rm *rm, const struct vmem__abi *abi, const uint8_t uuid[16])
{
    uint32_t handle = DEVICE_HANDLE;
    struct rm_device device = {0};
    int err;

    rm->abi = abi;
    rm->client = 0;
    rm->fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
    if (rm->fd < 0)
        return vmem__error(-errno, "/dev/nvidiactl: %s", strerror(errno));
    err = rm_alloc(rm, 0, &rm->client, RM_CLASS_CLIENT, NULL, 0, "allocate an RM client");
    if (!err)
        err = device_instance(rm, uuid, &device.device);
    if (!err) {
        device.client_share = rm->client;
        err = rm_alloc(rm, rm->client, &handle, RM_CLASS_DEVICE, &device, sizeof(device), "allocate an RM device");
    }
    if (err)
        vmem__rm_close(rm);
    return err;
}

void vmem__rm_close(struct vmem__rm *rm)
{
    if (rm->fd >= 0)
        close(rm->fd);
    rm->fd = -1;
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

void vmem__rm_memory_free(struct vmem__rm *rm, uint32_t handle)
{
    struct rm_free params = {.client = rm->client, .parent = DEVICE_HANDLE, .object = handle};

    (void)ioctl(rm->fd, RM_IOCTL(RM_ESC_FREE, struct rm_free), &params); // nothing to be done about a failure
}
