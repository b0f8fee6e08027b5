// libvmem reserves large virtual ranges and maps physical pages of 64 KiB or more into them on demand.
//
// The vMem* calls have the names that the vAttention paper gives them (Prabhu et al., ASPLOS 2025, Table 2). vMemMap
// also enables access, and vMemRelease also unmaps. All other names begin with vmem_.
//
// Conventions
//   - Every function returns 0 or a negative errno. vmem_last_error() then returns a message that names the argument
//     and its limit. -ENOMEM (memory or budget exhausted) is a normal answer.
//   - Sizes are bytes. An address is a device address (a CPU address on the host backend).
//   - A call that fails changes nothing. A batch succeeds as a whole or not at all. If bad is not NULL, *bad receives
//     the index of the element at fault.
//   - A structure whose first field is `size` grows at its end in later versions. Set `size` to the sizeof of the
//     structure. A program compiled with an older or newer header keeps working. Fields that one side does not know
//     are 0 for the other, and must be 0 in what the caller passes. Other structures never change.
//   - Any thread may call any function. If two calls work on the same page or the same addresses at once, one of them
//     returns -EBUSY, and nothing is lost.
//   - A context belongs to the process that created it. After fork(), the child's calls return -EPERM, and destroying
//     the context in the child leaves the parent's memory alone. On the host backend the child can still read what was
//     mapped. It sees the parent's current data (zero once a page is released) until it writes to that 4 KiB page. Its
//     own writes stay private. A child cannot use GPU memory.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_H
#define VMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The one place that names the version; the build, pkg-config and pyvmem read it here.
#define VMEM_VERSION_MAJOR 0
#define VMEM_VERSION_MINOR 3
#define VMEM_VERSION_PATCH 0
#define VMEM_VERSION (VMEM_VERSION_MAJOR << 16 | VMEM_VERSION_MINOR << 8 | VMEM_VERSION_PATCH)

// The VMEM_VERSION of the loaded library, which may differ from the header that the program was compiled with. Compare
// it before using what a later version added. A patch changes nothing in this header, and a minor version adds calls.
// Calls are removed or changed by a minor version before 1.0, and by a major version from then on. The shared
// library's name (libvmem.so.0.3) and the CMake package tell such versions apart.
uint32_t vmem_version(void);

// Page sizes. A backend supports some of them: struct vmem_info.page_sizes.
#define VMEM_PAGE_64K (UINT64_C(64) << 10)
#define VMEM_PAGE_128K (UINT64_C(128) << 10)
#define VMEM_PAGE_256K (UINT64_C(256) << 10)
#define VMEM_PAGE_2M (UINT64_C(2) << 20)

// An opaque handle of a physical page; 0 is never a page. The handle of a released page stays invalid forever. A handle
// is valid only in the context that created it.
typedef uint64_t vmem_page;
typedef struct vmem_context vmem_context;

// ---- contexts ---------------------------------------------------------------------------------------------

// Try a driver release that the stock backend's ABI table does not know.
#define VMEM_OPT_UNKNOWN_DRIVER 0x1u
// vmem_probe() only: also require what the choice by default requires. For "uvm", this is a self-test that has passed
// here (pyvmem doctor --selftest).
#define VMEM_OPT_BY_DEFAULT 0x2u

struct vmem_options {
    uint32_t size;       // sizeof(struct vmem_options)
    uint32_t flags;      // VMEM_OPT_*
    const char *backend; // "uvm", "stock", "cuda", "host"; NULL: $VMEM_BACKEND, else the best that works
    int32_t device;      // CUDA device ordinal, as CUDA_VISIBLE_DEVICES numbers them; the host backend ignores it
    uint32_t reserved;   // 0
    uint64_t budget;     // most bytes of pages that may exist at once; 0: no limit but the device's
};

// If opts is NULL, all options have their defaults. The GPU backends retain the device's primary CUDA context.
int vmem_context_create(const struct vmem_options *opts, vmem_context **out);
// Unmaps, releases and frees everything that the context still holds. NULL is allowed. Waits for calls in other threads
// to return; no new call may start. It waits for no kernel, nor does any call that unmaps, releases or frees: no kernel in
// flight may access what goes.
void vmem_context_destroy(vmem_context *ctx);

// Makes long calls interruptible. vMemCreate, vmem_commit and vmem_prealloc call interrupted(arg) after about every
// 32 MiB that they commit or zero, in the calling thread and with no lock held. If it returns a value other than 0, the call undoes its
// work and returns -EINTR. The memory may return to the system a little later; until then it counts as overhead. The
// function may call libvmem, but must not destroy the context. NULL removes it. When vmem_set_interrupt returns, no
// other thread is inside the old function, unless an interrupt function of the context makes the call. Calls that give
// something back are never interrupted.
int vmem_set_interrupt(vmem_context *ctx, int (*interrupted)(void *arg), void *arg);

// Checks whether a context of this backend can be created: returns 0, or the error that prevents it, with the reason in
// vmem_last_error(). opts->backend must name a backend.
int vmem_probe(const struct vmem_options *opts);
// The names of all backends, best first; NULL ends the list.
const char *const *vmem_backends(void);

// Guarantees to the layers above.
#define VMEM_CAP_GPU 0x1u          // addresses are GPU addresses
#define VMEM_CAP_CUDA_POINTER 0x2u // CUDA accepts the addresses: cuMemcpy, cuPointerGetAttribute, Triton, torch
#define VMEM_CAP_LIVE_REMAP 0x4u   // VMEM_MAP_REPLACE works beside running kernels: see there
#define VMEM_CAP_BACKDROP 0x8u     // VMEM_RESERVE_BACKDROP is supported
#define VMEM_CAP_FAULT 0x10u       // an access to an unbacked address without a backdrop faults (host: SIGSEGV)

struct vmem_info {
    uint32_t size; // sizeof(struct vmem_info), set by the caller
    uint32_t caps; // VMEM_CAP_*
    char backend[16];
    char device_name[96];
    char driver[32];         // driver release, "" on the host
    uint8_t device_uuid[16]; // of a MIG instance, its own; zero on the host
    int32_t device;
    uint32_t reserved;      // 0
    uint64_t page_sizes;    // every supported page size, ORed
    uint64_t reserve_align; // reservations start at a multiple of this; at least 2 MiB
    uint64_t memory_total;  // bytes of the device; on the host of the machine, or what its control group allows
};
// Returns facts that never change while the context exists. Makes no driver call.
int vmem_context_info(vmem_context *ctx, struct vmem_info *out);
// Returns the device's total and free bytes at this moment. Asks the driver, or reads /proc and the control group
// (about 0.2 ms). Either pointer may be NULL.
int vmem_context_memory(vmem_context *ctx, uint64_t *total, uint64_t *free);

struct vmem_stats {
    uint32_t size;     // sizeof(struct vmem_stats), set by the caller
    uint32_t pad;      // 0
    uint64_t reserved; // bytes of address space
    uint64_t created;  // bytes of pages that exist
    uint64_t mapped;   // bytes of address space backed by pages (an aliased page counts once per mapping)
    uint64_t overhead; // bytes of device memory held beside the pages: unused parts of arenas, backdrop, scratch
    uint64_t budget;   // as set; 0: none
    uint64_t syscalls; // calls into the driver or the kernel by map, unmap, create and release so far
    uint64_t map_ops, map_runs; // pages mapped so far, and the consecutive runs they were mapped in
    uint64_t unmap_ops, unmap_runs;
    uint64_t absent; // bytes of address space that failed calls left without what belongs there; see vMemMap
};
int vmem_context_stats(vmem_context *ctx, struct vmem_stats *out);

// Limits the bytes of pages. If more exist already, they stay, and only further creation fails.
int vmem_set_budget(vmem_context *ctx, uint64_t bytes);
// Allocates device memory for at least `bytes` of pages in advance and keeps it, so that creating pages needs no driver
// call. The memory counts as overhead until pages use it. 0 gives all unused memory back, as vmem_trim does.
int vmem_prealloc(vmem_context *ctx, uint64_t bytes);
// Returns unused device memory, including preallocated memory, to the system, and tries again to release what vmem_drop
// or vmem_unreserve could not. If freed is not NULL, *freed receives the bytes returned.
int vmem_trim(vmem_context *ctx, uint64_t *freed);

// ---- address space ----------------------------------------------------------------------------------------

// Reads of unbacked addresses return finite data (zero until something writes there) instead of faulting. Kernels that
// load whole tiles past the end of the data need this. Never write to unbacked addresses: the write is lost or faults.
#define VMEM_RESERVE_BACKDROP 0x1u

// Reserves `length` bytes of addresses: a multiple of 64 KiB, at most 2^46. The range is aligned to 2 MiB and uses
// almost no physical memory.
int vMemReserve(vmem_context *ctx, uint64_t length, uint32_t flags, uint64_t *addr);
// Frees the range at addr, as returned by vMemReserve. Returns -EBUSY while anything is mapped there.
int vMemFree(vmem_context *ctx, uint64_t addr);
// Frees a reservation and unmaps everything in it; pages that vmem_commit created are released. For callers that cannot
// handle a failure: it needs no memory and never returns -EBUSY. If another call works there, the reservation is freed
// when that call returns. -EINVAL: no reservation starts at addr.
int vmem_unreserve(vmem_context *ctx, uint64_t addr);
// Establishes the backdrop over [addr, addr+length) now, for good. The cuda and stock backends establish it lazily,
// when a page is mapped. On stock, that is for the rest of the page's segment of 64 MiB and the next one; on cuda, for
// 2 MiB. Unmapping leaves a backdrop: everywhere on stock, over the first 2 MiB on cuda.
int vmem_backdrop(vmem_context *ctx, uint64_t addr, uint64_t length);

// ---- physical pages ---------------------------------------------------------------------------------------

// Zero-fills pages whose memory this context used before. (Memory fresh from the system is always zero.)
#define VMEM_CREATE_ZERO 0x1u // differs from every VMEM_MAP_* that vmem_commit takes too

// Creates n pages of one size, physically consecutive where possible; all or none.
int vMemCreate(vmem_context *ctx, uint64_t page_size, size_t n, uint32_t flags, vmem_page *pages);
// Unmaps the page from every address, then frees it.
int vMemRelease(vmem_context *ctx, vmem_page page);
int vMemReleaseBatch(vmem_context *ctx, const vmem_page *pages, size_t n, size_t *bad);
// Releases pages, for callers that cannot handle a failure. Handles that are not valid are skipped. A page that another
// call is using, or that cannot be unmapped for lack of memory, is released as soon as possible. Where it is still
// mapped until then, vmem_query finds no page, and another page may be mapped without VMEM_MAP_REPLACE.
int vmem_drop(vmem_context *ctx, const vmem_page *pages, size_t n);

struct vmem_page_info {
    uint32_t size; // sizeof(struct vmem_page_info), set by the caller
    uint32_t pad;  // 0
    uint64_t page_size;
    uint64_t frame;    // position in the context's physical memory, in granules of 64 KiB: two pages whose frames are
                       // page_size / 64 KiB apart are physically consecutive and map in one run
    uint64_t mappings; // how many addresses it is mapped at
};
int vmem_page_query(vmem_context *ctx, vmem_page page, struct vmem_page_info *out);

// ---- mapping ----------------------------------------------------------------------------------------------

struct vmem_map_op {
    uint64_t addr; // a multiple of the page's size, inside one reservation
    vmem_page page;
};
struct vmem_range {
    uint64_t addr, length; // inside one reservation
};

// Replaces what is mapped there, which must lie within the new page. Without the flag the call returns -EEXIST. On a
// backend without VMEM_CAP_LIVE_REMAP, no kernel may access the addresses during the call. With it, no access faults.
// Kernels launched after the call use only the new page, and so do stores, atomics and L2 loads (volatile, or relaxed
// at gpu scope) of kernels that were running. Weak loads of those kernels may still return what L1 cached from the old
// page. If a running kernel must not notice the change, give both pages the same content first. Mapping a first page
// replaces nothing. On uvm, the first small page in an aligned 2 MiB interrupts reads of the backdrop there for a
// moment, unless the 2 MiB before it hold a small page.
#define VMEM_MAP_REPLACE 0x1u
// Keeps every page separately unmappable while kernels run. Without the flag, a 2 MiB aligned run of small pages may be
// mapped by 2 MiB entries. Unmapping a part of it later interrupts the rest of those 2 MiB for a moment.
#define VMEM_MAP_FINE 0x2u

// A call that fails changes nothing. If the driver refuses even the calls that undo it, what they could not restore is
// absent: nothing is mapped at these addresses, or something else, so no kernel may access them. Pages beside those of the
// call may be among them. Every later call that maps or unmaps anything tries to restore them. So do calls that use the
// addresses: vmem_query, vmem_copy_batch, vmem_fill, vmem_commit, vmem_kv_step, vmem_blocks_back. While that fails, they
// return the driver's error and name the range. To map and unmap what is absent works as if it were there.
int vMemMap(vmem_context *ctx, uint64_t addr, vmem_page page);
int vMemMapBatch(vmem_context *ctx, const struct vmem_map_op *ops, size_t n, uint32_t flags, size_t *bad);
// A range to be unmapped cuts no mapped page; unbacked parts are skipped.
int vMemUnmap(vmem_context *ctx, uint64_t addr, uint64_t length);
int vMemUnmapBatch(vmem_context *ctx, const struct vmem_range *ops, size_t n, size_t *bad);

// Returns the page mapped at addr and the offset of addr in it; *page is 0 if nothing is mapped. offset may be NULL. Both
// are set, too, if addr is absent.
int vmem_query(vmem_context *ctx, uint64_t addr, vmem_page *page, uint64_t *offset);

// ---- committing -------------------------------------------------------------------------------------------

// Backs every unbacked part of the ranges with new pages of one size, consecutive where possible. Backed parts stay as
// they are. Each range is a multiple of page_size and lies in one reservation; unbacked parts of two ranges do not
// overlap. All or nothing. The ranges belong to the call until it returns: another call that changes a part of them
// returns -EBUSY. So does this one, if another call works there or pages there are about to be released (vmem_drop).
// -EEXIST: a page there is smaller than page_size. flags: VMEM_CREATE_ZERO and VMEM_MAP_FINE, for the new pages. If
// bytes is not NULL, *bytes receives the bytes newly backed. The pages belong to the addresses: a page is released
// when it is no longer mapped anywhere, because it was unmapped or replaced or its reservation was freed.
int vmem_commit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t page_size, uint32_t flags,
                uint64_t *bytes);
// Releases every page mapped in the ranges, even if it is also mapped elsewhere. A range must not cut a page; unbacked
// parts are skipped. If bytes is not NULL, *bytes receives the bytes of the ranges that were backed.
int vmem_decommit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t *bytes);

// ---- what is where ----------------------------------------------------------------------------------------

struct vmem_reservation_info {
    uint32_t size;         // sizeof(struct vmem_reservation_info), set by the caller
    uint32_t flags;        // VMEM_RESERVE_*
    uint64_t addr, length; // of the reservation
    uint64_t mapped;       // bytes of it that are backed
};
// Returns the reservation that contains addr.
int vmem_reservation_query(vmem_context *ctx, uint64_t addr, struct vmem_reservation_info *out);
// Returns the first backed part of [addr, addr+length), which lies in one reservation; its length is 0 if nothing is
// backed. Parts over 4 GiB are returned piecewise. The time depends on what is backed, hardly on the length.
int vmem_next_mapped(vmem_context *ctx, uint64_t addr, uint64_t length, struct vmem_range *out);

// ---- data -------------------------------------------------------------------------------------------------

struct vmem_copy_op {
    uint64_t dst, src, length; // device or CPU addresses, in any combination the device can copy
};
// Copies in order; the data has arrived when the call returns. Not ordered with work on other CUDA streams.
int vmem_copy_batch(vmem_context *ctx, const struct vmem_copy_op *ops, size_t n);
int vmem_fill(vmem_context *ctx, uint64_t addr, uint8_t value, uint64_t length);

// ---- errors -----------------------------------------------------------------------------------------------

// Returns the message of the calling thread's last failed call, or "" if none failed. Valid until the next failure in
// that thread.
const char *vmem_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
