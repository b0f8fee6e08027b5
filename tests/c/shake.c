// Preloaded into a test, it delays every thread but the first at random, after it has unlocked a mutex and before it maps
// or unmaps memory. Calls then meet background threads at points where they hardly ever do otherwise. The thread sanitizer
// does not find what goes wrong there, because each access is under its lock. One of $SHAKE such points (8) is delayed.
//
// With $SHAKE_MS, it plays a busy machine: any thread stands still at times, for up to so many ms, most of them for less.
// It does so before it locks a mutex, too, reads a file at a place, or sleeps. A thread draws at first how often it does.
// That costs no time of a core, so that many programs can run at once.
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
#define ALL_NS UINT64_C(20000000000) // of all threads, with $SHAKE_MS

static int (*next_lock)(pthread_mutex_t *);
static int (*next_unlock)(pthread_mutex_t *);
static void *(*next_mmap)(void *, size_t, int, int, int, off_t);
static int (*next_munmap)(void *, size_t);
static int (*next_usleep)(useconds_t);
static ssize_t (*next_pread)(int, void *, size_t, off_t);
static pthread_t first;
static uint64_t one_in = 8, most_ns;
static _Atomic uint64_t threads, spent_ns;
static __thread uint64_t state, often;

__attribute__((constructor)) static void start(void)
{
    first = pthread_self();
    if (getenv("SHAKE"))
        one_in = strtoull(getenv("SHAKE"), NULL, 0);
    next_lock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    next_unlock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    next_mmap = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    next_munmap = (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap");
    next_usleep = (int (*)(useconds_t))dlsym(RTLD_NEXT, "usleep");
    next_pread = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    if (getenv("SHAKE_MS"))
        most_ns = strtoull(getenv("SHAKE_MS"), NULL, 0) * 1000000;
}

static void shake(void)
{
    if (!one_in || (!most_ns && pthread_equal(pthread_self(), first)))
        return;
    if (!state) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        state = (uint64_t)now.tv_nsec * 2654435761u + ++threads;
        often = most_ns ? UINT64_C(20) << (4 * (rnd(&state) % 5)) : one_in;
    }
    if (rnd(&state) % often || spent_ns > ALL_NS)
        return;
    const uint64_t ns = most_ns ? rnd(&state) % most_ns >> rnd(&state) % 16 : rnd(&state) % MOST_NS;
    const struct timespec delay = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    spent_ns += most_ns ? ns : 0;
    nanosleep(&delay, NULL);
}

static void shake_more(void)
{
    if (most_ns)
        shake();
}

int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    if (!next_lock) // a library that begins before this one
        next_lock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    shake_more();
    return next_lock(mutex);
}

int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    if (!next_unlock)
        next_unlock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
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

int usleep(useconds_t us)
{
    shake_more();
    return next_usleep(us);
}

ssize_t pread(int file, void *to, size_t length, off_t at)
{
    const ssize_t n = next_pread(file, to, length, at);
    shake_more();
    return n;
}
