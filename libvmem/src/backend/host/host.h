// What the files of the host backend share.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_HOST_HOST_H
#define VMEM_HOST_HOST_H

#include <stdint.h>
#include <sys/types.h>

// Reserved addresses.
struct host_range {
    struct host_range *next, **link;
    uint64_t addr, length;
};

// The memfd behind a context's pages, and the ranges that they may be mapped in: what a forked child must not write to.
struct host_file {
    struct host_file *next;
    int fd;
    dev_t device;
    ino_t inode;
    struct host_range *ranges;
};

// From here on forks take care of the file. A negative errno with the text set.
int host_file_add(struct host_file *f);
void host_file_remove(struct host_file *f);
void host_range_add(struct host_file *f, struct host_range *r);
void host_range_remove(struct host_range *r);

#endif
