// Times of the monotonic clock, in ns.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_CLOCK_H
#define VMEM_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t vmem__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// For pthread_cond_timedwait.
static inline struct timespec vmem__in_ns(uint64_t ns)
{
    const uint64_t then = vmem__now() + ns;
    return (struct timespec){.tv_sec = (time_t)(then / 1000000000u), .tv_nsec = (long)(then % 1000000000u)};
}

#endif
