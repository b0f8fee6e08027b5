// Declarations shared by the files of the host backend.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_HOST_HOST_H
#define VMEM_HOST_HOST_H

#include <limits.h>
#include <sys/types.h>

#include "backend/backend.h"

// The memfd behind a context's pages, and the reservations into which they may be mapped. A forked child must not write
// to them.
struct host_file {
    struct host_file *next;
    int fd;
    dev_t device;
    ino_t inode;
    struct vmem__reservation *reservations;
};

// Registers the file with the fork handlers. Returns 0 or a negative errno with the error text set.
int vmem__host_file_add(struct host_file *f);
void vmem__host_file_remove(struct host_file *f);
void vmem__host_reservation_add(struct host_file *f, struct vmem__reservation *r);
void vmem__host_reservation_remove(struct vmem__reservation *r);

struct vmem__host_memory {
    uint64_t total, available; // bytes
    bool cgroup;               // a control group allows less than the machine has
    char usage[2 * PATH_MAX];  // the file with the bytes used in the group that has the least left; "" without a limit
};

// Reads the memory that this process may use from /proc and /sys below `root`, which is "" except in tests.
int vmem__host_memory(const char *root, struct vmem__host_memory *out);

#endif
