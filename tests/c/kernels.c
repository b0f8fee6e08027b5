// The kernels of the fence test in a thread, for memory that the CPU can access: the host's, and the fake GPU's.
//
// SPDX-License-Identifier: MIT
#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

const int kernels_on_gpu = 0;
static struct kernel_tensor tensors[K_TENSORS];
static uint32_t n_tensors;
static struct kernel ring[K_RING];
static uint64_t waited; // kernels, as `launched` counts them
static _Atomic uint64_t launched, ended, released;
static _Atomic bool stopping;
static struct kernel_fault found;
static _Atomic bool faulty;
static pthread_t thread;

static _Atomic uint64_t *word_at(const struct kernel_tensor *t, uint32_t slot, uint32_t row, bool last)
{
    return (_Atomic uint64_t *)(t->addr + slot * t->slot_stride + row * t->row_bytes + (last ? t->row_bytes - 8 : 0));
}

static uint64_t load(const struct kernel_tensor *t, uint32_t slot, uint32_t row, bool last)
{
    return atomic_load_explicit(word_at(t, slot, row, last), memory_order_relaxed);
}

static void fault(const struct kernel *k, uint32_t tensor, uint32_t slot, uint32_t row, uint64_t got, uint64_t want)
{
    if (faulty)
        return;
    found = (struct kernel_fault){k->step, got, want, tensor, slot, row};
    faulty = true;
}

static void read_all(const struct kernel *k, bool wrote)
{
    for (uint32_t i = 0; i < n_tensors; i++)
        for (uint32_t s = 0; s < K_SLOTS; s++) {
            const struct kernel_rows rows = kernel_rows(k, &tensors[i], s, wrote);
            for (uint32_t r = rows.first; r < rows.end; r++) {
                const uint64_t got[] = {load(&tensors[i], s, r, false), load(&tensors[i], s, r, true)};
                const uint64_t want = kernel_word(k->origin[s][r], i);
                for (int end = 0; end < 2 && r < rows.written; end++)
                    if (got[end] != want)
                        fault(k, i, s, r, got[end], want);
            }
        }
}

static void write_new(const struct kernel *k)
{
    for (uint32_t i = 0; i < n_tensors; i++)
        for (uint32_t s = 0; s < K_SLOTS; s++) {
            const struct kernel_rows rows = kernel_rows(k, &tensors[i], s, 0);
            for (uint32_t r = rows.written; r < rows.end; r++)
                for (int end = 0; end < 2; end++)
                    atomic_store_explicit(word_at(&tensors[i], s, r, end), kernel_word(k->origin[s][r], i),
                                          memory_order_relaxed);
        }
}

static void *work(void *none)
{
    (void)none;
    for (uint64_t n = 0; !stopping; n++) {
        while (launched == n && !stopping)
            sched_yield();
        if (stopping)
            break;
        const struct kernel *k = &ring[n % K_RING];
        if (!k->late)
            write_new(k);
        while (released < k->step && !stopping) {
            read_all(k, !k->late);
            sched_yield();
        }
        if (k->late)
            write_new(k);
        read_all(k, true);
        ended = n + 1;
    }
    return NULL;
}

void kernels_start(const struct kernel_tensor *t, uint32_t n)
{
    memcpy(tensors, t, n * sizeof *t);
    n_tensors = n;
    launched = ended = released = 0;
    waited = 0;
    stopping = faulty = false;
    if (pthread_create(&thread, NULL, work, NULL))
        abort();
}

void kernels_stop(void)
{
    stopping = true;
    pthread_join(thread, NULL);
}

void kernels_launch(const struct kernel *k)
{
    if (launched - waited >= K_RING)
        abort();
    ring[launched % K_RING] = *k;
    launched++;
}

int kernels_wait(uint64_t step, struct kernel_fault *out)
{
    released = step;
    while (waited < launched && ring[waited % K_RING].step <= step) {
        while (ended <= waited)
            sched_yield();
        waited++;
    }
    *out = found;
    return faulty;
}
