// Kernels for the fence test. Each belongs to a step, reads every row of its requests again and again until it is
// released, checks what the rows say, and writes the new ones. They run one after another, as on a stream.
//
// kernels.c runs them in a thread, or by copies when they have to end; kernels.cu on a GPU.
//
// SPDX-License-Identifier: MIT
#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define K_SLOTS 8
#define K_TOKENS 192
#define K_TENSORS 4
#define K_RING 8 // kernels that can be queued

struct kernel_tensor {
    uint64_t addr, slot_stride, row_bytes;
    uint32_t window, max_tokens;
};
struct kernel {
    uint64_t step;
    uint32_t late;                      // writes once it is released, not at once
    uint32_t before[K_SLOTS];           // rows that earlier kernels wrote
    uint32_t tokens[K_SLOTS];           // rows from `before` on are this kernel's to write; 0: takes no part
    uint64_t origin[K_SLOTS][K_TOKENS]; // what each row says, the new ones too
};
// The first wrong row that a kernel read.
struct kernel_fault {
    uint64_t step, got, want;
    uint32_t tensor, slot, row;
};

extern const int kernels_on_gpu;
struct vmem_context;
extern struct vmem_context *kernels_copy; // kernels.c: the CPU does not see the pages, and this context copies words
void kernels_start(const struct kernel_tensor *tensors, uint32_t n);
void kernels_stop(void);
// Copies *k. At most K_RING kernels may not have been waited for.
void kernels_launch(const struct kernel *k);
// Lets the kernels up to this step end, and waits for them. Returns 0, or 1 with the fault; a fault of step 0 is of a
// kernel that was not released in 10 s: somebody waited for it.
int kernels_wait(uint64_t step, struct kernel_fault *fault);

#ifdef __CUDACC__
#define KERNEL_FN __host__ __device__
#else
#define KERNEL_FN
#endif

static inline KERNEL_FN uint64_t kernel_word(uint64_t origin, uint32_t tensor)
{
    return (origin + tensor) * 0x9e3779b97f4a7c15u | 1;
}

// The rows of a tensor that a kernel reads in a slot: [first, written) must say what they should; [written, end) must be
// there.
struct kernel_rows {
    uint32_t first, written, end;
};
static inline KERNEL_FN struct kernel_rows kernel_rows(const struct kernel *k, const struct kernel_tensor *t,
                                                       uint32_t slot, int wrote)
{
    struct kernel_rows rows;
    rows.end = k->tokens[slot] < t->max_tokens ? k->tokens[slot] : t->max_tokens;
    rows.written = k->before[slot] < rows.end ? k->before[slot] : rows.end;
    rows.first = t->window && rows.written > t->window ? rows.written - t->window : 0;
    rows.written = wrote ? rows.end : rows.written;
    return rows;
}

#ifdef __cplusplus
}
#endif
#endif
