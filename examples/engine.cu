// Decode on a GPU by libvmem's C API: a CUDA stream, a kernel that writes and reads rows, and pages behind them.
//
//     nvcc -std=c++17 engine.cu $(pkg-config --cflags --libs vmem) -o engine-cu
//     ./engine-cu stock      # the unmodified driver, pages of 64 KiB; or cuda, pages of 2 MiB; without a name, the best
//
// Each request writes a row for every token and reads all its rows back, as attention would. A step backs the rows
// before the kernel runs. Requests end at different lengths, and the pages of one serve the next.
//
// SPDX-License-Identifier: MIT
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>
#include <vmem.h>
#include <vmem_kv.h>

namespace {

constexpr uint32_t layers = 2, tensors = 2 * layers, slots = 4, max_tokens = 4096, row_bytes = 2048, requests = 12;
constexpr uint32_t row_words = row_bytes / sizeof(uint32_t);

struct Layout { // what a kernel needs to find the rows of a slot
    uint32_t *base[tensors];
    uint64_t slot_words[tensors];
};

struct Work { // of one slot in one step
    uint32_t first, length, seed;
};

__device__ uint32_t value(uint32_t seed, uint32_t tensor, uint32_t token, uint32_t word)
{
    return seed * 2654435761u ^ tensor << 28 ^ token << 10 ^ word;
}

// A block for each slot and tensor: writes the rows [first, length), then compares all of them.
__global__ void decode(Layout at, const Work *work, unsigned long long *wrong)
{
    const Work w = work[blockIdx.x];
    uint32_t *rows = at.base[blockIdx.y] + blockIdx.x * at.slot_words[blockIdx.y];
    for (uint32_t token = w.first; token < w.length; token++)
        for (uint32_t i = threadIdx.x; i < row_words; i += blockDim.x)
            rows[uint64_t(token) * row_words + i] = value(w.seed, blockIdx.y, token, i);
    __syncthreads();
    unsigned long long found = 0;
    for (uint32_t token = 0; token < w.length; token++)
        for (uint32_t i = threadIdx.x; i < row_words; i += blockDim.x)
            found += rows[uint64_t(token) * row_words + i] != value(w.seed, blockIdx.y, token, i);
    if (found)
        atomicAdd(wrong, found);
}

void check(int rc, const char *call)
{
    if (!rc)
        return;
    fprintf(stderr, "engine-cu: %s: %s\n", call, vmem_last_error());
    exit(1);
}

void check(cudaError_t code, const char *call)
{
    if (code == cudaSuccess)
        return;
    fprintf(stderr, "engine-cu: %s: %s\n", call, cudaGetErrorString(code));
    exit(1);
}

struct Request {
    uint32_t prompt, want, done;
    int slot; // -1: waiting, -2: ended
};

} // namespace

int main(int argc, char **argv)
{
    check(cudaFree(nullptr), "cudaFree"); // the primary context of device 0, which vMem uses, too
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");

    vmem_options options{};
    options.size = sizeof options;
    options.backend = argc > 1 ? argv[1] : nullptr;
    vmem_context *ctx;
    check(vmem_context_create(&options, &ctx), "vmem_context_create");

    vmem_info info{};
    info.size = sizeof info;
    check(vmem_context_info(ctx, &info), "vmem_context_info");

    vmem_kv_tensor shape[tensors]{};
    for (auto &tensor : shape)
        tensor.row_bytes = row_bytes;
    vmem_kv_config config{};
    config.size = sizeof config;
    config.flags = VMEM_KV_DEFAULT;
    config.tensors = shape;
    config.n_tensors = tensors;
    config.slots = slots;
    config.max_tokens = max_tokens;
    config.page_size = info.page_sizes & -info.page_sizes; // the smallest of the backend's
    config.budget = uint64_t(64) << 20;
    vmem_kv *kv;
    check(vmem_kv_create(ctx, &config, &kv), "vmem_kv_create");
    Layout at{};
    for (uint32_t t = 0; t < tensors; t++) {
        vmem_kv_layout layout{};
        layout.size = sizeof layout;
        check(vmem_kv_get_layout(kv, t, &layout), "vmem_kv_get_layout");
        at.base[t] = reinterpret_cast<uint32_t *>(uintptr_t(layout.addr));
        at.slot_words[t] = layout.slot_stride / sizeof(uint32_t);
    }

    Work *work; // in pinned memory of the host, which kernels can read
    unsigned long long *wrong, found = 0;
    check(cudaMallocHost(&work, slots * sizeof *work), "cudaMallocHost");
    check(cudaMalloc(&wrong, sizeof *wrong), "cudaMalloc");
    check(cudaMemset(wrong, 0, sizeof *wrong), "cudaMemset");

    std::vector<Request> all;
    for (uint32_t i = 0; i < requests; i++) {
        const uint32_t prompt = 100 + i * 97 % 400;
        all.push_back({prompt, prompt + 40, 0, -1});
    }

    uint32_t ended = 0, preemptions = 0;
    bool full = false; // a request was preempted: nobody comes in before somebody has ended
    while (ended < requests) {
        for (auto &r : all) {
            uint32_t slot;
            vmem_kv_alloc_options about{};
            about.size = sizeof about;
            about.tokens = r.prompt;
            if (r.slot != -1 || full)
                continue;
            const int rc = vmem_kv_alloc(kv, &about, &slot);
            if (rc)
                break; // no slot is free
            r.slot = int(slot);
            r.done = 0;
        }

        // The coming step: a whole prompt, or one token. Preempt the last request until its rows are backed.
        int32_t lengths[slots];
        for (;;) {
            Request *last = nullptr;
            for (auto &length : lengths)
                length = 0;
            for (auto &r : all)
                if (r.slot >= 0) {
                    lengths[r.slot] = int32_t(r.done < r.prompt ? r.prompt : r.done + 1);
                    last = &r;
                }
            const int rc = vmem_kv_step(kv, lengths, slots, 0);
            if (!rc)
                break;
            if (rc != -12 || !last) // -ENOMEM is an ordinary answer
                check(rc, "vmem_kv_step");
            check(vmem_kv_free(kv, uint32_t(last->slot), 0), "vmem_kv_free");
            last->slot = -1;
            preemptions++;
            full = true;
        }

        for (uint32_t slot = 0; slot < slots; slot++)
            work[slot] = {0, 0, 0};
        for (uint32_t i = 0; i < requests; i++)
            if (all[i].slot >= 0)
                work[all[i].slot] = {all[i].done, uint32_t(lengths[all[i].slot]), i + 1};
        decode<<<dim3(slots, tensors), 128, 0, stream>>>(at, work, wrong);
        check(cudaGetLastError(), "decode");
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); // before the next step, and before a free

        for (auto &r : all) {
            if (r.slot < 0)
                continue;
            r.done = uint32_t(lengths[r.slot]);
            if (r.done >= r.want) {
                check(vmem_kv_free(kv, uint32_t(r.slot), 0), "vmem_kv_free");
                r.slot = -2;
                ended++;
                full = false;
            }
        }
    }

    vmem_kv_stats stats{};
    stats.size = sizeof stats;
    check(vmem_kv_get_stats(kv, &stats), "vmem_kv_get_stats");
    check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    printf("%u requests, %u preemptions, %llu steps, %llu pages of the budget's %llu, %llu wrong words\n", ended,
           preemptions, (unsigned long long)stats.steps, (unsigned long long)stats.held_pages,
           (unsigned long long)stats.budget_pages, found);
    vmem_kv_destroy(kv);
    vmem_context_destroy(ctx);
    cudaFreeHost(work);
    cudaFree(wrong);
    cudaStreamDestroy(stream);
    return found ? 1 : 0;
}
