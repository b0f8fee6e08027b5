// The kernels of the fence test on a GPU: one block for each slot of each tensor.
//
// SPDX-License-Identifier: MIT
#include "kernels.h"

#include <cstdio>
#include <cstdlib>

#define OK_(call)                                                                             \
    do {                                                                                      \
        cudaError_t rc_ = (call);                                                             \
        if (rc_ != cudaSuccess) {                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(rc_)); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

const int kernels_on_gpu = 1;
struct vmem_context *kernels_copy;

struct tensors {
    struct kernel_tensor t[K_TENSORS];
};
// Pinned memory that both sides see.
struct shared {
    unsigned long long released, late;
    unsigned int faulty;
    struct kernel_fault fault;
};

static struct tensors tensors;
static uint32_t n_tensors;
static struct shared *shared;
static struct kernel *on_host, *on_device; // K_RING
static cudaStream_t stream;
static cudaEvent_t ended[K_RING];
static uint64_t launched, waited;

__device__ static unsigned long long now(void)
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ static uint64_t *word_at(const struct kernel_tensor *t, uint32_t slot, uint32_t row, int last)
{
    return (uint64_t *)(t->addr + slot * t->slot_stride + row * t->row_bytes + (last ? t->row_bytes - 8 : 0));
}

__device__ static void read_all(const struct kernel *k, const struct kernel_tensor *t, uint32_t tensor, uint32_t slot,
                                int wrote, struct shared *shared)
{
    const struct kernel_rows rows = kernel_rows(k, t, slot, wrote);
    for (uint32_t r = rows.first + threadIdx.x; r < rows.end; r += blockDim.x)
        for (int end = 0; end < 2; end++) {
            const uint64_t got = *(volatile uint64_t *)word_at(t, slot, r, end);
            const uint64_t want = kernel_word(k->origin[slot][r], tensor);
            if (r < rows.written && got != want && !atomicExch_system(&shared->faulty, 1)) {
                shared->fault.step = k->step;
                shared->fault.got = got;
                shared->fault.want = want;
                shared->fault.tensor = tensor;
                shared->fault.slot = slot;
                shared->fault.row = r;
                __threadfence_system();
            }
        }
}

__device__ static void write_new(const struct kernel *k, const struct kernel_tensor *t, uint32_t tensor, uint32_t slot)
{
    const struct kernel_rows rows = kernel_rows(k, t, slot, 0);
    for (uint32_t r = rows.written + threadIdx.x; r < rows.end; r += blockDim.x)
        for (int end = 0; end < 2; end++)
            *word_at(t, slot, r, end) = kernel_word(k->origin[slot][r], tensor);
}

__global__ static void iteration(const struct kernel *k, struct tensors all, struct shared *shared)
{
    const uint32_t slot = blockIdx.x, tensor = blockIdx.y;
    const struct kernel_tensor *t = &all.t[tensor];
    const unsigned long long start = now();
    if (!k->late)
        write_new(k, t, tensor, slot);
    __syncthreads();
    __shared__ int go;
    do {
        read_all(k, t, tensor, slot, !k->late, shared);
        if (!threadIdx.x) {
            const bool waits = now() - start > 10000000000ull;
            if (waits)
                shared->late = 1;
            go = waits || *(volatile unsigned long long *)&shared->released >= k->step;
        }
        __syncthreads();
        const int over = go;
        __syncthreads();
        if (over)
            break;
    } while (true);
    if (k->late)
        write_new(k, t, tensor, slot);
    __syncthreads();
    read_all(k, t, tensor, slot, 1, shared);
}

void kernels_start(const struct kernel_tensor *t, uint32_t n)
{
    if (!shared) {
        OK_(cudaHostAlloc(&shared, sizeof *shared, cudaHostAllocMapped));
        OK_(cudaHostAlloc(&on_host, K_RING * sizeof *on_host, cudaHostAllocDefault));
        OK_(cudaMalloc(&on_device, K_RING * sizeof *on_device));
        OK_(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (int i = 0; i < K_RING; i++)
            OK_(cudaEventCreateWithFlags(&ended[i], cudaEventDisableTiming));
    }
    for (uint32_t i = 0; i < n; i++)
        tensors.t[i] = t[i];
    n_tensors = n;
    launched = waited = 0;
    *shared = {};
}

void kernels_stop(void) { OK_(cudaStreamSynchronize(stream)); }

void kernels_launch(const struct kernel *k)
{
    const uint64_t i = launched++ % K_RING;
    if (launched - waited > K_RING)
        abort();
    on_host[i] = *k;
    OK_(cudaMemcpyAsync(&on_device[i], &on_host[i], sizeof *k, cudaMemcpyHostToDevice, stream));
    iteration<<<dim3(K_SLOTS, n_tensors), 128, 0, stream>>>(&on_device[i], tensors, shared);
    OK_(cudaGetLastError());
    OK_(cudaEventRecord(ended[i], stream));
}

int kernels_wait(uint64_t step, struct kernel_fault *fault)
{
    *(volatile unsigned long long *)&shared->released = step;
    while (waited < launched && on_host[waited % K_RING].step <= step)
        OK_(cudaEventSynchronize(ended[waited++ % K_RING]));
    *fault = shared->fault;
    if (shared->late && !shared->faulty)
        *fault = {};
    return shared->faulty || shared->late;
}
