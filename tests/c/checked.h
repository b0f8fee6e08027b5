// A wrapper around a real backend that holds the core to the contract in backend.h, and makes calls fail on demand.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TEST_CHECKED_H
#define VMEM_TEST_CHECKED_H

#include "core/core.h"

// A context whose backend is `name`, wrapped; one at a time in a process. With whole_arenas a backend that commits
// granules as they are used (the host) behaves as GPUs do: an arena is memory, all of it.
int checked_context(const char *name, uint64_t budget, bool whole_arenas, vmem_context **out);

// Makes this thread's n-th fault point from now on fail (0: none): a backend call that may fail, or, in a program
// linked with malloc, calloc and realloc wrapped, an allocation by the library. A map or unmap that fails leaves some of
// its addresses absent, as a driver in trouble does.
void checked_fail(unsigned long n);
// The n-th fault point and the k - 1 after it fail.
void checked_fail_many(unsigned long n, unsigned long k);
// The n-th fault point and every one after it fail, until told otherwise.
void checked_fail_from(unsigned long n);
// Every fault point of this thread fails, until told otherwise.
void checked_fail_always(bool on);
// The backend refuses to unmap anything, in whatever thread, until told otherwise.
void checked_refuse_unmaps(bool on);
// It does not map again what is absent, either.
void checked_refuse_restores(bool on);
// The device has so many bytes, of which what is allocated is a part, in whatever thread; UINT64_MAX: no limit. With
// whole_arenas on the host.
void checked_device_memory(uint64_t bytes);
// The next n calls of munmap() by the library fail, as they may at vm.max_map_count.
void checked_fail_munmap(int n);
// The free memory that the host backend is told, instead of the system's figure; NULL: that.
struct vmem__host_memory;
extern int (*checked_host_memory)(struct vmem__host_memory *out);
// The free memory in the answer of sysinfo(); 0: the system's.
extern uint64_t checked_free_memory;
// Stands in for fallocate(), which is to allocate so many bytes: 0 goes on, EINTR and others are its error.
extern int (*checked_fallocate)(uint64_t length);
// True if that fault point was reached.
bool checked_failed(void);

// The next backend call that maps, unmaps, populates, discards, zeroes, copies or fills stops before it does so, in
// whatever thread. To wait until it has, call checked_held(); checked_resume() lets it go on.
void checked_hold(void);
// The same of the next that makes an arena, which stops once it is known whether there is memory for one.
void checked_hold_arena(void);
void checked_held(void);
void checked_resume(void);

#endif
