// Signal handlers that run in the middle of a long call.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>
#include <time.h>

#include "native.h"

// Running handlers takes the interpreter's lock, for which a call may wait behind other threads: not more often than this.
#define INTERVAL_NS 20000000u

static unsigned long main_thread;
static int (*run_handlers)(void);

void pv_watch_signals(unsigned long thread, int (*run)(void))
{
    run_handlers = run;
    main_thread = thread;
}

// Python runs handlers in its main thread only. A thread that knows no Python must not take the interpreter's lock: at
// the interpreter's end it would not come back.
static int interrupted(void *arg)
{
    static uint64_t last;
    struct timespec t;
    (void)arg;
    if ((unsigned long)pthread_self() != main_thread)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const uint64_t now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    if (now - last < INTERVAL_NS)
        return 0;
    last = now;
    return run_handlers();
}

int pv_interruptible(vmem_context *ctx) { return vmem_set_interrupt(ctx, interrupted, NULL); }
