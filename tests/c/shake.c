// Preloaded into a test, it delays every thread but the first at random, after it has unlocked a mutex and before it maps
// or unmaps memory. Calls then meet background threads at points where they hardly ever do otherwise. The thread sanitizer
// does not find what goes wrong there, because each access is under its lock. One of $SHAKE such points (8) is delayed.
//
// SPDX-License-Identifier: MIT
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "harness.h"

#define MOST_NS 200000

static int (*next_unlock)(pthread_mutex_t *);
static void *(*next_mmap)(void *, size_t, int, int, int, off_t);
static int (*next_munmap)(void *, size_t);
static pthread_t first;
static uint64_t one_in = 8;
static _Atomic uint64_t threads;
static __thread uint64_t state;

__attribute__((constructor)) static void start(void)
{
    first = pthread_self();
    if (getenv("SHAKE"))
        one_in = strtoull(getenv("SHAKE"), NULL, 0);
    next_mmap = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    next_munmap = (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap");
    next_unlock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
}

static void shake(void)
{
    if (!one_in || pthread_equal(pthread_self(), first))
        return;
    if (!state) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        state = (uint64_t)now.tv_nsec * 2654435761u + ++threads;
    }
    if (rnd(&state) % one_in)
        return;
    const struct timespec delay = {.tv_nsec = (long)(rnd(&state) % MOST_NS)};
    nanosleep(&delay, NULL);
}

int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    const int rc = next_unlock(mutex);
    shake();
    return rc;
}

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    shake();
    return next_mmap(addr, length, prot, flags, fd, offset);
}

int munmap(void *addr, size_t length)
{
    shake();
    return next_munmap(addr, length);
}
