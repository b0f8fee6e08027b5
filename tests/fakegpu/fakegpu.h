// Questions that tests may put to the fake driver; see fakegpu.c. Weak: NULL where it is not preloaded.
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
// A driver in trouble: it and the k - 1 calls after it fail, among them those that undo what came before. 0: no more.
FAKEGPU_WEAK void fakegpu_fail_many(long n, long k);
// Such trouble among the next `among` calls or so, of a random length: one call, a few, or a long period.
static inline void fakegpu_trouble(uint64_t random, uint64_t among)
{
    static const uint8_t k[] = {1, 1, 1, 2, 2, 3, 4, 6, 10, 25, 60};

    fakegpu_fail_many(1 + (long)(random / 16 % among % (1 + random / 1024 % among)), k[random % 16 % sizeof k]);
}
// The next n ioctls on RM's descriptor end with EINTR and have done nothing.
FAKEGPU_WEAK void fakegpu_interrupt(long n);
// The next n calls of UVM's, on any descriptor, end with EAGAIN and have done nothing, as while the driver is suspended.
FAKEGPU_WEAK void fakegpu_suspend(long n);
// The next n of RM's memories that are given back are not: the driver says that they are in use.
FAKEGPU_WEAK void fakegpu_keep(long n);
// Driver calls that can fail, so far.
FAKEGPU_WEAK long fakegpu_calls(void);
// Waits for all kernels of the context so far. While a CUDA graph is being captured, they are refused.
FAKEGPU_WEAK long fakegpu_waits(void);
FAKEGPU_WEAK void fakegpu_capture(int on);
// From now on, events that are recorded pass only when it is called with 0.
FAKEGPU_WEAK void fakegpu_hold_events(int on);
// Events that exist.
FAKEGPU_WEAK long fakegpu_events(void);
// Kernels that filled memory so far.
FAKEGPU_WEAK long fakegpu_fills(void);
// While it is on, there is no pinned memory of the host.
FAKEGPU_WEAK void fakegpu_no_pinned(int on);
// Bytes of device memory in use.
FAKEGPU_WEAK uint64_t fakegpu_used(void);

#endif
