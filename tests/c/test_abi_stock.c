// The stock backend's view of the driver's binary interface: every size and offset that crosses into the kernel, and
// which release gets which layout. tests/abi/compare_releases.py holds the same numbers against the driver's source.
//
// SPDX-License-Identifier: MIT
#include "harness.h"
#include "driver/abi.h"

#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
#define SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type)

SIZE(rm_free, 16);
AT(rm_free, object, 8);
AT(rm_free, status, 12);

SIZE(rm_control, 32);
AT(rm_control, command, 8);
AT(rm_control, params, 16);
AT(rm_control, params_size, 24);
AT(rm_control, status, 28);

SIZE(rm_alloc, 32);
AT(rm_alloc, object, 8);
AT(rm_alloc, class_id, 12);
AT(rm_alloc, params, 16);
AT(rm_alloc, params_size, 24);
AT(rm_alloc, status, 28);

SIZE(rm_device, 56);
AT(rm_device, client_share, 4);
AT(rm_device, flags, 16);
AT(rm_device, va_size, 24);
AT(rm_device, va_mode, 48);

SIZE(rm_uuid_info, 272);
AT(rm_uuid_info, flags, 256);
AT(rm_uuid_info, device, 264);

SIZE(rm_memory, 128);
AT(rm_memory, flags, 8);
AT(rm_memory, attr, 24);
AT(rm_memory, attr2, 28);
AT(rm_memory, range_low, 48);
AT(rm_memory, size, 64);
AT(rm_memory, alignment, 72);
AT(rm_memory, address, 96);
AT(rm_memory, va_space, 108);
AT(rm_memory, tag, 116);
AT(rm_memory, numa_node, 120);

SIZE(uvm_unmap, 40);
AT(uvm_unmap, uuid, 16);
AT(uvm_unmap, status, 32);

SIZE(uvm_attributes, 36);
AT(uvm_attributes, compression, 32);
SIZE(uvm_map_head, 24);
SIZE(uvm_map_tail, 24);
AT(uvm_map_tail, rm_control_fd, 8);
AT(uvm_map_tail, memory, 16);
AT(uvm_map_tail, status, 20);
SIZE(uvm_map, 9264);

static void ioctl_numbers(void)
{
    CHECK_EQ(RM_IOCTL(RM_ESC_FREE, struct rm_free), 0xc0104629);
    CHECK_EQ(RM_IOCTL(RM_ESC_CONTROL, struct rm_control), 0xc020462a);
    CHECK_EQ(RM_IOCTL(RM_ESC_ALLOC, struct rm_alloc), 0xc020462b);
    CHECK_EQ(UVM_MAP_EXTERNAL_ALLOCATION, 33);
    CHECK_EQ(UVM_UNMAP_EXTERNAL, 66);
    CHECK_EQ(UVM_MAP_EXTERNAL_SPARSE, 74);
}

static void layouts_by_release(void)
{
    static const struct {
        const char *release;
        unsigned alloc_status, memory_size, tail, map_size;
    } expected[] = {
        {"515.43.04", 24, 120, 1176, 1200},  {"520.61.07", 24, 120, 1176, 1200},  {"525.147.05", 24, 120, 1176, 1200},
        {"530.41.03", 24, 120, 1176, 1200},  {"535.43.02", 28, 120, 1176, 1200},  {"535.288.01", 28, 120, 1176, 1200},
        {"545.23.06", 28, 128, 1176, 1200},  {"545.29.06", 28, 128, 1176, 1200},  {"550.40.07", 28, 128, 1176, 1200},
        {"550.40.53", 28, 128, 9240, 9264},  {"550.54.14", 28, 128, 9240, 9264},  {"550.100", 28, 128, 9240, 9264},
        {"550.163.01", 28, 128, 9240, 9264}, {"555.42.02", 28, 128, 9240, 9264},  {"560.35.03", 28, 128, 9240, 9264},
        {"565.77", 28, 128, 9240, 9264},     {"570.211.01", 28, 128, 9240, 9264}, {"575.64.05", 28, 128, 9240, 9264},
        {"580.159.04", 28, 128, 9240, 9264}, {"590.48.01", 28, 128, 9240, 9264},  {"595.45.04", 28, 128, 9240, 9264},
        {"610.43.02", 28, 128, 9240, 9264},  {"615.71.09", 28, 128, 9240, 9264},
    };

    for (size_t i = 0; i < COUNT(expected); i++) {
        const struct vmem__abi *abi;
        struct uvm_map map;

        OK(vmem__abi_find(expected[i].release, 0, &abi));
        CHECK_EQ(abi->alloc_status, expected[i].alloc_status);
        CHECK_EQ(abi->memory_size, expected[i].memory_size);
        CHECK_EQ((char *)vmem__abi_map_tail(abi, &map) - (char *)&map, expected[i].tail);
        CHECK_EQ((char *)(vmem__abi_map_tail(abi, &map) + 1) - (char *)&map, expected[i].map_size);
    }
}

static void unknown_releases_are_refused(void)
{
    const struct vmem__abi *abi, *newest;

    OK(vmem__abi_find("595.45.04", 0, &newest));
    ERR(vmem__abi_find("600.10.01", 0, &abi), EPROTONOSUPPORT, "driver release 600.10.01");
    OK(vmem__abi_find("600.10.01", 1, &abi));
    CHECK(abi == newest);
    ERR(vmem__abi_find("585.10", 0, &abi), EPROTONOSUPPORT, "VMEM_OPT_UNKNOWN_DRIVER");
    OK(vmem__abi_find("585.10", 1, &abi));
    CHECK(abi == newest);
    // Older than the calls: no wish makes them appear.
    ERR(vmem__abi_find("510.108.03", 1, &abi), EPROTONOSUPPORT, "510.108.03");
    ERR(vmem__abi_find("", 1, &abi), EPROTONOSUPPORT, "not a release number");
    ERR(vmem__abi_find("r580", 1, &abi), EPROTONOSUPPORT, "not a release number");
}

int main(void)
{
    ioctl_numbers();
    layouts_by_release();
    unknown_releases_are_refused();
    return 0;
}
