// The guest's test programs: cases that run each in a process of its own, and the simulated GPU as they see it.
//
// SPDX-License-Identifier: MIT
#ifndef VMTEST_H
#define VMTEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "uvm_linux_ioctl.h"
#include "uvm_ioctl.h"

#include "failmem_uapi.h"
#include "simgpu_uapi.h"

#define KB(n) ((uint64_t)(n) << 10)
#define MB(n) ((uint64_t)(n) << 20)
#define GB(n) ((uint64_t)(n) << 30)
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

// ---- cases ------------------------------------------------------------------------------------------------

struct vmtest {
    const char *name;
    void (*run)(void);
    struct vmtest *next;
};
void vmtest_add(struct vmtest *t);

// A case: passes when it returns. It runs in a child of its own, so descriptors and mappings end with it.
#define TEST(name_)                                                                            \
    static void name_(void);                                                                   \
    static struct vmtest name_##_entry = {.name = #name_, .run = name_};                       \
    __attribute__((constructor)) static void name_##_add(void) { vmtest_add(&name_##_entry); } \
    static void name_(void)

_Noreturn void vmtest_fail(const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void vmtest_skip(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void vmtest_figure(const char *name, double value, const char *unit);

#define FAIL(...) vmtest_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(cond)            \
    do {                       \
        if (!(cond))           \
            FAIL("%s", #cond); \
    } while (0)
#define CHECK_MSG(cond, ...)   \
    do {                       \
        if (!(cond))           \
            FAIL(__VA_ARGS__); \
    } while (0)
#define CHECK_EQ(a, b)                                                                   \
    do {                                                                                 \
        long long a_ = (long long)(a), b_ = (long long)(b);                              \
        if (a_ != b_)                                                                    \
            FAIL("%s is 0x%llx (%lld), not %s = 0x%llx (%lld)", #a, a_, a_, #b, b_, b_); \
    } while (0)

// Integer from the environment: how a tier makes a test longer.
long env_long(const char *name, long def);

uint64_t rng_next(uint64_t *state);
static inline uint64_t rng_below(uint64_t *state, uint64_t n) { return rng_next(state) % n; }
double seconds(void);

// Waits for a child and returns its exit status, or 128 + the signal.
int wait_child(pid_t pid);

// ---- UVM and the GPU --------------------------------------------------------------------------------------

// One VA space of the driver: what a process that uses CUDA has.
struct uvm {
    int fd, mm_fd;
    uint32_t client, vaspace;
    NvProcessorUuid uuid[2]; // of the simulated GPUs
    unsigned gpus;
};

int sim_fd(void);
NV_STATUS uvm_map_sparse(struct uvm *u, unsigned gpu, uint64_t va, uint64_t length); // UVM_MAP_EXTERNAL_SPARSE
void uvm_open(struct uvm *u);                        // UVM_INITIALIZE and UVM_MM_INITIALIZE
NV_STATUS uvm_register(struct uvm *u, unsigned gpu); // open the GPU's device, and UVM_REGISTER_GPU
NV_STATUS uvm_register_vaspace(struct uvm *u, unsigned gpu);
NV_STATUS uvm_unregister_vaspace(struct uvm *u, unsigned gpu);
NV_STATUS uvm_unregister(struct uvm *u, unsigned gpu);
void uvm_start(struct uvm *u); // open, and register GPU 0 with its VA space
void uvm_close(struct uvm *u);
NV_STATUS uvm_free_range(struct uvm *u, uint64_t va, uint64_t length);
NV_STATUS uvm_create_external(struct uvm *u, uint64_t va, uint64_t length);
NV_STATUS uvm_unmap_external(struct uvm *u, unsigned gpu, uint64_t va, uint64_t length);
// Map RM memory (sim_mem) with the driver's own ioctl.
NV_STATUS uvm_map_params(const struct uvm *u, UVM_MAP_EXTERNAL_ALLOCATION_PARAMS *p);
NV_STATUS uvm_map_external(struct uvm *u, unsigned gpu, uint64_t va, uint64_t length, uint64_t offset, uint32_t memory);
// A guard: 2 MiB of ordinary memory at va, in a range of its own, as any library of the process may have it next to a range
// under test. Its content and its entry must last until the case ends, or u or GPU 0's address space does.
void uvm_guard(struct uvm *u, uint64_t va);
void guards_check(void); // called by sim_check() and when a case returns

// ---- the simulator ----------------------------------------------------------------------------------------

struct simgpu_vas_id sim_vas(const struct uvm *u, unsigned gpu);
// An access by an SM: 0 or -errno of the access.
int gpu_access(const struct uvm *u, unsigned gpu, bool write, uint64_t va, void *buf, uint64_t length);
// The same through the copy engine's TLB.
int gpu_access_ce(const struct uvm *u, unsigned gpu, bool write, uint64_t va, void *buf, uint64_t length);
// Writes of whole pages are slow under emulation: the first and the last word of each 64 KiB stand for the rest.
int gpu_mark(const struct uvm *u, uint64_t va, uint64_t length, uint64_t value);
// True if those words hold value; the failing address is in *where.
bool gpu_marked(const struct uvm *u, uint64_t va, uint64_t length, uint64_t value, uint64_t *where);
uint64_t gpu_word(const struct uvm *u, uint64_t va);
void sim_walk(const struct uvm *u, unsigned gpu, uint64_t va, uint64_t stride, struct simgpu_pte *out, uint32_t n);
struct simgpu_pte sim_pte(const struct uvm *u, uint64_t va);
struct simgpu_counters sim_counters(unsigned gpu, bool reset);
struct simgpu_info sim_info(unsigned gpu);
void sim_phys(unsigned gpu, uint64_t phys, void *buf, uint64_t length);
// The guards' content, and the simulator's verdicts: no stale TLB entry at a free, no late write, no use after free, free memory untouched.
void sim_check(unsigned gpu);
void sim_baseline(void); // called before each case
uint64_t sim_mem(const struct uvm *u, unsigned gpu, uint32_t handle, uint32_t page_size, uint64_t size);
void sim_inject(uint32_t sites, uint32_t nth, bool mine, struct simgpu_inject *out);
void sim_mode(unsigned gpu, uint32_t set, uint32_t clear);
bool failmem_there(void); // the module is loaded
// This thread's nth allocation in nvidia-uvm.ko from now on fails; 0: none does. Returns what became of the one before.
struct failmem failmem_arm(uint32_t nth);

#endif
