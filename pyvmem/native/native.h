// Additions of pyvmem to libvmem in C: owners that any thread can drop without an interpreter, DLPack, signal handlers.
//
// SPDX-License-Identifier: MIT
#ifndef PYVMEM_NATIVE_H
#define PYVMEM_NATIVE_H

#include "vmem_blocks.h"
#include "vmem_common.h"
#include "vmem_kv_pool.h"
#include "vmem_torch.h"

// The value of *bad before a call: no element is at fault.
#define PV_NO_INDEX SIZE_MAX

// A reference-counted owner of a native object. It holds a reference to its parent. The last reference waits for the
// kernels of the object's device, destroys the object and drops the parent's. Each Python object, each tensor and each call in progress holds a reference. A tensor
// may outlive all Python objects, a thread without an interpreter may free it, and no call of another thread can end an
// object that a call still uses.
typedef struct pv_owner pv_owner;

// An owner of nothing, with one reference and no parent; NULL if there is no memory. Create it before the object that it
// will own: an exception in the caller then leaks at most these few bytes.
pv_owner *pv_owner_new(void);
void pv_owner_set_parent(pv_owner *owner, pv_owner *parent);
// Makes it own `thing`, which destroy(thing) ends.
void pv_owner_set(pv_owner *owner, void (*destroy)(void *), void *thing);
void pv_owner_keep(pv_owner *owner);
void pv_owner_drop(pv_owner *owner);
// The same for a tensor that ends, and how many have: also one that torch moves to other memory.
void pv_owner_end_tensor(pv_owner *owner);
size_t pv_owner_ended_tensors(const pv_owner *owner);
// Tries again to end the objects whose end was put off because a CUDA graph was being captured. Making an owner and
// dropping one's last reference do so, too.
void pv_end_put_off(void);

// Returns when no kernel of this process runs on the context's device; without a GPU, at once. -EBUSY: a CUDA graph is
// being captured.
int pv_wait_for_kernels(vmem_context *ctx);
// Sets the function that says whether the calling thread captures a graph, in threads that Python knows: to wait for
// kernels would end the capture. NULL: none.
void pv_watch_captures(int (*capturing)(void));

// Create an object of libvmem for an owner of nothing. The parent of ranges and pages is the owner of their context. On
// failure they return a negative errno, and the owner owns nothing.
int pv_own_context(pv_owner *owner, const struct vmem_options *opts, vmem_context **ctx);
int pv_own_range(pv_owner *owner, uint64_t length, uint32_t flags, uint64_t *addr);
// Destroying the owner skips pages that were released individually.
int pv_own_pages(pv_owner *owner, uint64_t page_size, size_t n, uint32_t flags, vmem_page *pages);
// Leaves the pages to the caller.
void pv_disown_pages(pv_owner *owner);

// The parent of these owners is that of the context, of the blocks' reservation, or none.
int pv_own_kv(pv_owner *owner, vmem_context *ctx, const struct vmem_kv_config *cfg, vmem_kv **kv);
int pv_own_pool(pv_owner *owner, const struct vmem_kv_pool_config *cfg, vmem_kv_pool **pool);
int pv_own_blocks(pv_owner *owner, vmem_context *ctx, const struct vmem_blocks_config *cfg, vmem_blocks **blocks);
int pv_own_common(pv_owner *owner, vmem_context *ctx, uint64_t part_bytes, uint32_t parts, vmem_common **common,
                  uint64_t *addr);
int pv_own_hold(pv_owner *owner, vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_kv_hold_config *cfg,
                vmem_kv_hold **hold);
// The lease keeps the context's owner until it has ended, which may be after its own owner is gone.
int pv_own_torch(pv_owner *owner, pv_owner *context, vmem_context *ctx, vmem_kv_pool *pool,
                 const struct vmem_torch_config *cfg, uint32_t *place);

// Maps pages[i] at addr + i * page_size: vMemMapBatch() for pages that follow each other.
int pv_map(vmem_context *ctx, uint64_t addr, uint64_t page_size, const vmem_page *pages, size_t n, uint32_t flags,
           size_t *bad);

// Sets the interpreter's main thread, and the function that runs the handlers of pending signals. run() returns nonzero
// if a handler raised.
void pv_watch_signals(unsigned long thread, int (*run)(void));
// Lets long calls of the context run signal handlers; they end with -EINTR if a handler raises.
int pv_interruptible(vmem_context *ctx);

// A DLManagedTensor of `length` bytes at addr, on device (type, id); NULL if there is no memory. Wrap it in a capsule
// named "dltensor" with pv_dlpack_capsule_free as its destructor.
void *pv_dlpack_bytes(uint64_t addr, uint64_t length, int32_t device_type, int32_t device_id);
// Makes the tensor keep the memory's owner. Call it once the capsule exists, which then drops the owner.
void pv_dlpack_keep(void *managed, pv_owner *owner);
void pv_dlpack_capsule_free(void *capsule);

// ---- self-test (libvmem/src/driver/stamp.h) -----------------------------------------------------------------------

// The file name of the stamp of a backend's self-test on a device, and the nth folder that may hold it.
int pv_stamp_name(const char *backend, int device, char *name, size_t size);
int pv_stamp_folder(unsigned n, char *path, size_t size);

// No access to shared memory before this call is seen after one behind it, on processors that reorder them (aarch64).
void pv_fence(void);

#endif
