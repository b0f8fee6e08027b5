// SPDX-License-Identifier: MIT
#ifndef VMEM_HOST_MEMORY_H
#define VMEM_HOST_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

struct vmem__host_memory {
    uint64_t total, available; // bytes
    bool cgroup;               // a control group allows less than the machine has
};

// Reads the memory that this process may use from /proc and /sys below `root`, which is "" except in tests.
int vmem__host_memory(const char *root, struct vmem__host_memory *out);

#endif
