// /dev/failmem: fail the nth memory allocation that nvidia-uvm makes on behalf of the calling thread.
//
// SPDX-License-Identifier: GPL-2.0 OR MIT
#ifndef FAILMEM_UAPI_H
#define FAILMEM_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

struct failmem {
    __u32 nth;     // fail the nth allocation from now on, 1 the next; 0: disarm
    __u32 seen;    // OUT: allocations since the last arming (before this call)
    __u32 fired;   // OUT: whether one of these was failed
    __u32 line;    // OUT: where the failed one was made
    char file[64]; // OUT
};

#define FAILMEM_ARM _IOWR('f', 1, struct failmem)

#endif
