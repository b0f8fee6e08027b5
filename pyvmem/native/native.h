// What pyvmem adds to libvmem in C: owners that can be dropped from any thread with no interpreter around, DLPack, and
// the loops of the benchmarks.
//
// SPDX-License-Identifier: MIT
#ifndef PYVMEM_NATIVE_H
#define PYVMEM_NATIVE_H

#include "vmem.h"

// What pyvmem puts into *bad before a call: "no element".
#define PV_NO_INDEX SIZE_MAX

// A counted owner of something native. It keeps its parent; when the last count goes, the thing is destroyed and the
// parent's count goes down. Python objects hold one count each, tensors hold one for their memory, and so does every call
// that is under way: so a tensor may outlive every Python object, be freed by a thread that knows no Python, and nothing
// ends under a call of another thread.
typedef struct pv_owner pv_owner;

// Owns nothing yet, with one count and no parent. NULL when there is no memory. It exists before what it is to own and
// to keep, so that an exception in the caller at any moment leaves nothing behind but these few bytes.
pv_owner *pv_owner_new(void);
void pv_owner_set_parent(pv_owner *owner, pv_owner *parent);
// From now on it owns `thing`: destroy(thing) ends it.
void pv_owner_set(pv_owner *owner, void (*destroy)(void *), void *thing);
void pv_owner_keep(pv_owner *owner);
void pv_owner_drop(pv_owner *owner);

// The three things of libvmem, for an owner that owns nothing yet. The parent of ranges and pages is their context's
// owner. On failure: a negative errno, and nothing is owned.
int pv_own_context(pv_owner *owner, const struct vmem_options *opts, vmem_context **ctx);
// device: where kernels of tensors over the range may still be queued in the end; -1: there are none.
int pv_own_range(pv_owner *owner, uint64_t length, uint32_t flags, int device, uint64_t *addr);
// Pages released meanwhile are skipped in the end.
int pv_own_pages(pv_owner *owner, uint64_t page_size, size_t n, uint32_t flags, vmem_page *pages);
// The pages are the caller's.
void pv_disown_pages(pv_owner *owner);

// Calls on an owned range. Offsets are from its first byte, and the caller has checked that they lie in the range.
//
// Maps pages[i] at offset + i * page_size.
int pv_range_map(pv_owner *owner, uint64_t offset, uint64_t page_size, const vmem_page *pages, size_t n, uint32_t flags,
                 size_t *bad);
int pv_range_map_batch(pv_owner *owner, const struct vmem_map_op *ops, size_t n, uint32_t flags, size_t *bad);
int pv_range_unmap(pv_owner *owner, uint64_t offset, uint64_t length);
int pv_range_unmap_batch(pv_owner *owner, const struct vmem_unmap_op *ops, size_t n, size_t *bad);
int pv_range_commit(pv_owner *owner, uint64_t offset, uint64_t length, uint64_t page_size, uint32_t flags,
                    uint64_t *bytes);
int pv_range_backdrop(pv_owner *owner, uint64_t offset, uint64_t length);
// Bytes backed now.
int pv_range_mapped(pv_owner *owner, uint64_t *bytes);
// The first run of backed addresses in [offset, offset + length); *found is 0 where there is none.
int pv_range_next_mapped(pv_owner *owner, uint64_t offset, uint64_t length, uint64_t *first, uint64_t *found);

// The interpreter's main thread, and what runs the handlers of signals that are pending, which returns other than 0 if one
// of them raised.
void pv_watch_signals(unsigned long thread, int (*run)(void));
// Long calls of the context run handlers, and end with -EINTR if one raises.
int pv_interruptible(vmem_context *ctx);

// A DLPack tensor of `length` bytes at addr, on device (type, id): a DLManagedTensor to be wrapped in a capsule named
// "dltensor" with pv_dlpack_capsule_free as its destructor. NULL when there is no memory. Once the capsule exists it is
// made to keep the memory's owner, and so leaves nothing behind if it does not come to that.
void *pv_dlpack_bytes(uint64_t addr, uint64_t length, int32_t device_type, int32_t device_id);
void pv_dlpack_keep(void *managed, pv_owner *owner);
void pv_dlpack_capsule_free(void *capsule);

// ---- benchmark loops: samples are nanoseconds of single calls, n of each ------------------------------------

// One page at a time over [addr, addr+length), which is reserved: create, map, unmap, and release of a mapped page.
// Samples `first` to first + n - 1 of a longer row, into the arrays' places of these numbers. Sample i is the page
// i * stride of the range, round and round: a large odd stride leaves no two samples in a row near each other.
int pv_bench_pages(vmem_context *ctx, uint64_t page_size, uint64_t addr, uint64_t length, size_t stride, size_t first,
                   size_t n, uint64_t *create, uint64_t *map, uint64_t *unmap, uint64_t *release);
int pv_bench_batch(vmem_context *ctx, const struct vmem_map_op *ops, size_t n_ops, uint64_t addr, uint64_t length,
                   size_t n, uint64_t *map, uint64_t *unmap);
int pv_bench_reserve(vmem_context *ctx, uint64_t length, uint32_t flags, size_t n, uint64_t *reserve, uint64_t *free);
// CUDA's own calls at 2 MiB, without libvmem, over `length` bytes. map includes cuMemSetAccess; access is that part.
typedef struct pv_cuda pv_cuda;
int pv_bench_cuda_open(int device, uint64_t length, pv_cuda **cuda);
void pv_bench_cuda_close(pv_cuda *cuda);
int pv_bench_cuda_reserve(pv_cuda *cuda, size_t n, uint64_t *reserve, uint64_t *free);
// As pv_bench_pages().
int pv_bench_cuda_pages(pv_cuda *cuda, size_t stride, size_t first, size_t n, uint64_t *create, uint64_t *map,
                        uint64_t *access, uint64_t *unmap, uint64_t *release);
// The bare system calls behind a batch of pages on the host, n times: at each addrs[i], slot i of a memfd is mapped
// (neighbours in both in one call), and unmapped again.
int pv_bench_host(uint64_t page_size, const uint64_t *slots, size_t pages, size_t n, uint64_t *map, uint64_t *unmap);

#endif
