// A PyTorch allocator over libvmem: the segments of a torch.cuda.MemPool, in the budget of a pool of KV caches.
//
// PyTorch's caching allocator asks an allocator for segments and splits them into blocks itself. It takes functions by
// address and passes them no argument of ours, so there are VMEM_TORCH_PLACES static pairs. A lease occupies one place.
// It is a member of the pool: its pages come out of the pool's budget. The pool takes them from what the KV caches can
// spare, never from their requests.
//
// A segment is a range of addresses that stays with PyTorch until PyTorch frees it. Its pages may go meanwhile.
// vmem_torch_park offers the pool the pages of segments in which no block is in use, and the pool takes them when
// another member asks. vmem_torch_unpark backs all of them again at the same addresses, with undefined contents.
// PyTorch's free lists stay valid across both. In between, no new kernel may access a parked segment, and PyTorch must
// not allocate in the lease.
//
// Errors are as in vmem.h: 0, or a negative errno and vmem_last_error(). Nothing here calls back into Python, waits
// without a limit, or ends the process. Any thread may call any function.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TORCH_H
#define VMEM_TORCH_H

#include "vmem_kv_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

#define VMEM_TORCH_PLACES 16 // the most leases of a process at one time

#define VMEM_TORCH_CHECK 0x1u // verify the bookkeeping at every operation (slow)
// The context allocates at most 32 MiB of the device at a time from now on, or 2 MiB if it has blocks or KV caches of the
// pool, too, and no more than a segment needs. Each allocation goes back when all its pages are free; larger ones, the
// default, are faster. For segments that the pool takes one by one.
#define VMEM_TORCH_SMALL 0x2u

// Grows at its end: a field that the caller does not know is 0. 0 selects the default in parentheses.
struct vmem_torch_config {
    uint32_t size;      // sizeof(struct vmem_torch_config)
    uint32_t flags;     // VMEM_TORCH_*
    uint64_t most;      // bytes of pages (the pool's budget)
    uint64_t page_size; // (2 MiB). Smaller pages also fit where no 2 MiB are consecutive, and take longer to map
    uint32_t wait_ms; // the longest that an allocation waits for what other members give back (10000). If none of them
                      // can give and nothing has come for a second, it ends
    uint32_t pad;     // 0
    const char *name; // of the pool's member ("torch")
    // Optional: called once, when the lease has given everything back and its place is free. It may run in a thread that
    // frees a segment, and must not call this lease.
    void (*ended)(void *arg);
    void *arg;
};

// Makes a lease: a member of the pool with a minimum of 0. *place names it in the calls below, and no other lease of the
// process; *place % VMEM_TORCH_PLACES is the number of its pair of functions. The context must outlive the lease, which
// ends when it is closed and PyTorch has freed its last segment: `ended` says when. Members of one context exchange pages
// without allocating device memory.
// -EMFILE: all places are taken. -ENOMEM and -ENOSPC: as vmem_kv_pool_join.
int vmem_torch_open(vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_torch_config *cfg, uint32_t *place);
// From now on, the lease allocates nothing. Memory of segments that PyTorch still has stays until PyTorch frees them.
int vmem_torch_close(uint32_t place);

// Offers the pages of these segments to the pool: each element is the address that the allocation returned. The caller
// knows that none of them has a block in use. Kernels may still use them. The pool's thread waits until all kernels of
// the device have ended before it takes pages, and takes none while a CUDA graph is being captured. Segments that are
// already parked are skipped. *bytes (NULL is allowed) receives the bytes of the others.
// -EINVAL: no segment begins at one of the addresses; nothing was parked.
int vmem_torch_park(uint32_t place, const uint64_t *idle, size_t n, uint64_t *bytes);
// Backs all parked segments again, or none. Waits at most wait_ms for what other members give back. -ENOMEM: *missing
// (NULL is allowed) receives the bytes that did not become free; vmem_torch_last_shortage says why.
int vmem_torch_unpark(uint32_t place, uint32_t wait_ms, uint64_t *missing);
// The same for these segments alone, whether they are parked or not; others stay parked. lost[i] (NULL is allowed)
// becomes 1 if the contents of segments[i] are undefined, because its pages went while it was parked. Otherwise it
// becomes 0: pages for which nobody asked are as they were. So a caller that parks segments with blocks in use, and
// keeps a copy of them, copies back only what went. -EINVAL: no segment begins at one of the addresses.
//
// Memory for all of them takes time. So the call backs one of those that lack pages, and more up to `most` bytes. The
// lease claims the budget for the others, whose lost[i] becomes VMEM_TORCH_CLAIMED. They are parked still: call again
// for them, while what is there is copied. No member gets what is claimed. The claim ends when a call for segments
// fails, or parks some. UINT64_MAX: all at once.
#define VMEM_TORCH_CLAIMED 2
int vmem_torch_unpark_segments(uint32_t place, const uint64_t *segments, size_t n, uint64_t most, uint32_t wait_ms,
                               uint64_t *missing, uint8_t *lost);
// Reserves budget for segments that will be allocated: from now on, the lease's minimum is `bytes`. It gets them as the
// other members give, and keeps them. What has not come stands in lacking_bytes of vmem_torch_get_stats. Until the next
// call with 0, an allocation waits for all of wait_ms although the members refuse: whoever reserves has them give in ways
// that the pool does not know, such as a model that others go to sleep for.
// -EINVAL: `bytes` exceeds the most that the lease may have. -ENOMEM: the minimums of all members would exceed the pool's
// budget; the reservation is as before.
int vmem_torch_reserve(uint32_t place, uint64_t bytes);
// Gives back the pages of all parked segments now, and returns device memory that the lease does not use to the system.
// It otherwise stays for the next block and the next user of the context, until another member of the pool asks for it.
// Waits until all kernels of the device have ended. -EBUSY: a CUDA graph is being captured; nothing was done.
int vmem_torch_trim(uint32_t place);

struct vmem_torch_stats {
    uint32_t size;            // sizeof(struct vmem_torch_stats), set by the caller
    uint32_t segments;        // that PyTorch has
    uint32_t parked_segments; // of these
    uint32_t pad;             // 0
    uint64_t bytes;           // of all segments
    uint64_t parked_bytes;    // of these
    uint64_t held_bytes;      // of pages
    // Since creation:
    uint64_t allocs, frees;  // segments allocated, and freed
    uint64_t refused;        // allocations that returned NULL
    uint64_t waits;          // times that a call waited for another member
    uint64_t parks, unparks; // segments parked, and unparked
    uint64_t strangers;      // addresses to free that were no segment's
    uint64_t short_bytes;    // that the last allocation or unpark that found too little memory was short of
    // Now:
    uint64_t lacking_bytes; // that an allocation or unpark waits for, or the reservation has not got
};
int vmem_torch_get_stats(uint32_t place, struct vmem_torch_stats *out);
// Describes the lease's last allocation or unpark, in any thread, that found too little memory. Its pages are the
// lease's. The reason is 0 if there was none.
int vmem_torch_last_shortage(uint32_t place, struct vmem_kv_shortage *out);

// The pairs, as PyTorch declares them. They may run with PyTorch's lock held. alloc returns NULL when there is too
// little memory, which PyTorch reports as an OutOfMemoryError. It also does for another device, a closed lease and a
// forked child. The lease does not zero memory that this process has used before. free waits until all kernels of the
// device have ended. The stream is not used: it is the current one, not the block's.
void *vmem_torch_alloc_0(size_t size, int device, void *stream);
void *vmem_torch_alloc_1(size_t size, int device, void *stream);
void *vmem_torch_alloc_2(size_t size, int device, void *stream);
void *vmem_torch_alloc_3(size_t size, int device, void *stream);
void *vmem_torch_alloc_4(size_t size, int device, void *stream);
void *vmem_torch_alloc_5(size_t size, int device, void *stream);
void *vmem_torch_alloc_6(size_t size, int device, void *stream);
void *vmem_torch_alloc_7(size_t size, int device, void *stream);
void *vmem_torch_alloc_8(size_t size, int device, void *stream);
void *vmem_torch_alloc_9(size_t size, int device, void *stream);
void *vmem_torch_alloc_10(size_t size, int device, void *stream);
void *vmem_torch_alloc_11(size_t size, int device, void *stream);
void *vmem_torch_alloc_12(size_t size, int device, void *stream);
void *vmem_torch_alloc_13(size_t size, int device, void *stream);
void *vmem_torch_alloc_14(size_t size, int device, void *stream);
void *vmem_torch_alloc_15(size_t size, int device, void *stream);
void vmem_torch_free_0(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_1(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_2(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_3(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_4(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_5(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_6(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_7(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_8(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_9(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_10(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_11(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_12(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_13(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_14(void *addr, size_t size, int device, void *stream);
void vmem_torch_free_15(void *addr, size_t size, int device, void *stream);

#ifdef __cplusplus
}
#endif
#endif
