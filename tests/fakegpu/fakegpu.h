// What tests ask of the fake driver; see fakegpu.c. Weak: NULL where it is not preloaded.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_FAKEGPU_H
#define VMEM_FAKEGPU_H

#include <stdint.h>

#ifdef FAKEGPU_USER
#define FAKEGPU_WEAK __attribute__((weak))
#else
#define FAKEGPU_WEAK
#endif

// The n-th driver call from now on fails for lack of memory; a UVM call then has already invalidated the addresses.
FAKEGPU_WEAK void fakegpu_fail(long n);
// The next n ioctls on RM's descriptor end with EINTR and have done nothing.
FAKEGPU_WEAK void fakegpu_interrupt(long n);
// The next n of RM's memories that are given back are not: the driver says that they are in use.
FAKEGPU_WEAK void fakegpu_keep(long n);
// Driver calls that can fail, so far.
FAKEGPU_WEAK long fakegpu_calls(void);
// Bytes of device memory in use.
FAKEGPU_WEAK uint64_t fakegpu_used(void);

#endif
