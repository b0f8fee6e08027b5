// Which of a process' descriptors the uvm backend takes: the one where the module knows both the GPU and CUDA's
// addresses. Three descriptors stand for /dev/nvidia-uvm, and each gives the module's answers that a case says.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <stdarg.h>

#include "harness.h"
#include "../../uvm_ext/uvm_vmem_status.h"
#include "driver/kmod.h"

#define FDS 3

static int fds[FDS];
static uint32_t query_status[FDS], unmap_status[FDS];
static struct vmem__kmod kmod;

ssize_t readlinkat(int dir, const char *restrict path, char *restrict to, size_t size)
{
    static const char name[] = "/dev/nvidia-uvm";

    (void)dir;
    for (int i = 0; i < FDS; i++)
        if (atoi(path) == fds[i]) {
            CHECK(size >= sizeof(name));
            memcpy(to, name, sizeof(name) - 1);
            return sizeof(name) - 1;
        }
    errno = EINVAL;
    return -1;
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list args;
    void *params;
    int i = 0;

    va_start(args, request);
    params = va_arg(args, void *);
    va_end(args);
    while (fds[i] != fd)
        i++;
    if (request == UVM_VMEM_QUERY)
        *(struct uvm_vmem_query *)params = (struct uvm_vmem_query){.size = sizeof(struct uvm_vmem_query),
                                                                   .out_max_ops = 7,
                                                                   .rmStatus = query_status[i]};
    else if (request == UVM_VMEM_UNMAP)
        ((struct uvm_vmem_batch *)params)->rmStatus = unmap_status[i];
    else
        FAIL("unknown request 0x%lx", request);
    return 0;
}

static int open_with(const uint32_t query[FDS], const uint32_t unmap[FDS])
{
    memcpy(query_status, query, sizeof(query_status));
    memcpy(unmap_status, unmap, sizeof(unmap_status));
    return vmem__kmod_open(&kmod, (const uint8_t *)"sixteen-bytes---", UINT64_C(1) << 40);
}

static const uint32_t none[FDS];

static void the_one_with_gpu_and_addresses(void)
{
    static const uint32_t query[] = {NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_DEVICE, 0};

    CHECK_EQ(open_with(query, none), 0);
    CHECK_EQ(kmod.max_ops, 7);
    vmem__kmod_close(&kmod);
    CHECK_EQ(open_with(none, (const uint32_t[]){NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_ADDRESS, 0}), 0);
    vmem__kmod_close(&kmod);
    CHECK_EQ(open_with(none,
                       (const uint32_t[]){NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_ADDRESS}),
             -ENODEV);
    CHECK(strstr(vmem_last_error(), "none of this process' 3 descriptors"));
}

// A status that says neither yes nor no is no yes.
static void no_other_answer_is_taken(void)
{
    CHECK_EQ(open_with(none, (const uint32_t[]){NV_ERR_NO_MEMORY, 0, 0}), -ENOMEM);
    CHECK(strstr(vmem_last_error(), "look for CUDA's addresses"));
    CHECK_EQ(kmod.fd, -1);
    CHECK_EQ(open_with((const uint32_t[]){NV_ERR_ILLEGAL_ACTION, NV_ERR_NO_MEMORY, 0}, none), -ENOMEM);
    CHECK_EQ(kmod.fd, -1);
}

// The driver knows an instance by a UUID that CUDA does not tell.
static void mig_is_refused_by_name(void)
{
    static const uint32_t query[] = {NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_DEVICE, NV_ERR_INVALID_DEVICE};

    CHECK_EQ(open_with(query, none), -EOPNOTSUPP);
    CHECK(strstr(vmem_last_error(), "MIG"));
    CHECK_EQ(kmod.fd, -1);
}

int main(void)
{
    for (int i = 0; i < FDS; i++)
        fds[i] = open("/dev/null", O_RDWR);
    the_one_with_gpu_and_addresses();
    no_other_answer_is_taken();
    mig_is_refused_by_name();
    return 0;
}
