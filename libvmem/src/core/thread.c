// The library's own threads, which work behind the program's.
//
// SPDX-License-Identifier: MIT
#include <sched.h>
#include <signal.h>

#include "core/core.h"

int vmem__thread_start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    struct sched_param param;
    sigset_t all, old;
    int policy;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); // leave signals to the program's own threads
    const int rc = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    // A call that wakes the thread must not lose its core to it: where no other core is free, a batch thread waits for
    // the end of the caller's time slice.
    if (!rc && !pthread_getschedparam(*thread, &policy, &param) && policy == SCHED_OTHER)
        pthread_setschedparam(*thread, SCHED_BATCH, &param);
    return rc;
}
