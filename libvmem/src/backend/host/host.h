// What the files of the host backend share.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_HOST_HOST_H
#define VMEM_HOST_HOST_H

#include <sys/types.h>

#include "backend/backend.h"

// The memfd behind a context's pages, and the reservations that they may be mapped in: what a forked child must not
// write to.
struct host_file {
    struct host_file *next;
    int fd;
    dev_t device;
    ino_t inode;
    struct vmem__reservation *reservations;
};

// From here on forks take care of the file. A negative errno with the text set.
int vmem__host_file_add(struct host_file *f);
void vmem__host_file_remove(struct host_file *f);
void vmem__host_reservation_add(struct host_file *f, struct vmem__reservation *r);
void vmem__host_reservation_remove(struct vmem__reservation *r);

#endif
