// What the files of the host backend share.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_HOST_HOST_H
#define VMEM_HOST_HOST_H

#include <stdint.h>
#include <sys/types.h>

// Reserved addresses.
struct host_reservation {
    struct host_reservation *next, **link;
    uint64_t addr, length;
};

// The memfd behind a context's pages, and the reservations that they may be mapped in: what a forked child must not
// write to.
struct host_file {
    struct host_file *next;
    int fd;
    dev_t device;
    ino_t inode;
    struct host_reservation *reservations;
};

// From here on forks take care of the file. A negative errno with the text set.
int vmem__host_file_add(struct host_file *f);
void vmem__host_file_remove(struct host_file *f);
void vmem__host_reservation_add(struct host_file *f, struct host_reservation *r);
void vmem__host_reservation_remove(struct host_reservation *r);

#endif
