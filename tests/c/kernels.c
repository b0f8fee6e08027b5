// The kernels of the fence test in a thread, for memory that the CPU can access: the host's, and the fake GPU's. Other
// memory is read and written by copies, when a kernel has to end: the rows must be there until then, too.
//
// SPDX-License-Identifier: MIT
#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "vmem.h"

const int kernels_on_gpu = 0;
struct vmem_context *kernels_copy;
static struct kernel_tensor tensors[K_TENSORS];
static uint32_t n_tensors;
static struct kernel ring[K_RING];
static uint64_t waited; // kernels, as `launched` counts them
static _Atomic uint64_t launched, ended, released;
static _Atomic bool stopping;
static struct kernel_fault found;
static _Atomic bool faulty;
static pthread_t thread;

static uint64_t word_at(const struct kernel_tensor *t, uint32_t slot, uint32_t row, bool last)
{
    return t->addr + slot * t->slot_stride + row * t->row_bytes + (last ? t->row_bytes - 8 : 0);
}

static bool absent; // a copy found no memory: a kernel would have faulted

static uint64_t load(uint64_t addr)
{
    uint64_t word = 0;
    if (!kernels_copy)
        return atomic_load_explicit((_Atomic uint64_t *)addr, memory_order_relaxed);
    absent |= vmem_copy_batch(kernels_copy, &(struct vmem_copy_op){(uintptr_t)&word, addr, 8}, 1) != 0;
    return word;
}

static void store(uint64_t addr, uint64_t word)
{
    if (!kernels_copy)
        atomic_store_explicit((_Atomic uint64_t *)addr, word, memory_order_relaxed);
    else
        absent |= vmem_copy_batch(kernels_copy, &(struct vmem_copy_op){addr, (uintptr_t)&word, 8}, 1) != 0;
}

// Copies are slow: they look at fewer rows, the last ones among them.
static uint32_t next_row(uint32_t row, uint32_t end)
{
    return row + (kernels_copy && end - row > 4 ? (end - row) / 2 : 1);
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
            for (uint32_t r = rows.first; r < rows.end; r = next_row(r, rows.end)) {
                const uint64_t got[] = {load(word_at(&tensors[i], s, r, false)),
                                        load(word_at(&tensors[i], s, r, true))};
                const uint64_t want = kernel_word(k->origin[s][r], i);
                for (int end = 0; end < 2 && (r < rows.written || absent); end++)
                    if (got[end] != want || absent)
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
                    store(word_at(&tensors[i], s, r, end), kernel_word(k->origin[s][r], i));
        }
}

static void run_by_copies(const struct kernel *k)
{
    if (!k->late)
        write_new(k);
    read_all(k, !k->late);
    if (k->late)
        write_new(k); // which later kernels read
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
    if (!kernels_copy && pthread_create(&thread, NULL, work, NULL))
        abort();
}

void kernels_stop(void)
{
    stopping = true;
    if (!kernels_copy)
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
    for (; waited < launched && ring[waited % K_RING].step <= step; waited++) {
        if (kernels_copy)
            run_by_copies(&ring[waited % K_RING]);
        while (!kernels_copy && ended <= waited)
            sched_yield();
    }
    *out = found;
    return faulty;
}
