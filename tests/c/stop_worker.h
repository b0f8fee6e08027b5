// The background thread of a KV cache, stopped at random where it has dropped the lock. It goes on when a call waits for
// it, or by go_on(). `vmem__kv_hook = stop_at_random` switches it on.
//
// SPDX-License-Identifier: MIT
#ifndef STOP_WORKER_H
#define STOP_WORKER_H

#include <pthread.h>

#include "kv.h"
#include "kv/kv.h"

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static bool stopping, stopped, waited_for;
static uint64_t stop_seed;

static void go_on(void)
{
    pthread_mutex_lock(&gate);
    stopped = false;
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&gate);
}

static void stop_at_random(enum vmem__kv_point point)
{
    pthread_mutex_lock(&gate);
    if (point == KV_WORKER_UNLOCKED) {
        stopped = stopping && !waited_for && rnd(&stop_seed) % 2;
        while (stopped)
            pthread_cond_wait(&opened, &gate);
    } else if (point == KV_CALL_WAITS || point == KV_CALL_WAITED) {
        waited_for = point == KV_CALL_WAITS;
        stopped = false;
        pthread_cond_broadcast(&opened);
    }
    pthread_mutex_unlock(&gate);
}

static void stop(bool on)
{
    pthread_mutex_lock(&gate);
    stopping = on;
    pthread_mutex_unlock(&gate);
    go_on();
}

#endif
