// libvmem: physical memory mapped on demand into large reserved address ranges.
//
// The vMem* calls carry the names of the vAttention paper (Prabhu et al., ASPLOS 2025, Table 2):
// vMemMap also enables access, vMemRelease also unmaps. Everything else is vmem_*.
//
// Conventions
//   - Every function returns 0 or a negative errno; vmem_last_error() then says what was wrong, naming the
//     argument and its limit. -ENOMEM (memory or budget exhausted) is a normal answer.
//   - Sizes are bytes. An address is a device address (a CPU address on the host backend).
//   - A call that fails has changed nothing. Batches are all-or-nothing; *bad, when not NULL, receives the index
//     of the element at fault.
//   - A structure whose first field is `size` grows at its end with later versions. Set size to the sizeof of the
//     structure. A program that was compiled with an older or a newer header goes on working: fields that one side does
//     not know are 0 for the other, and must be 0 in what the caller passes. The other structures never change.
//   - Every function may be called from any thread. Two calls in flight at once on the same page or the same
//     addresses: one of them gets -EBUSY and nothing is lost.
//   - A context belongs to the process that created it. After fork() the child's calls return -EPERM, and
//     destroying the context there leaves the parent's memory alone. What was mapped on the host backend, the child
//     may go on reading: it sees what the parent's pages hold at that time (zero once they were released), until it
//     writes to a page of 4 KiB itself. What it writes stays its own. GPU memory is none of a child's.
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
#define VMEM_VERSION_MINOR 2
#define VMEM_VERSION_PATCH 0
#define VMEM_VERSION (VMEM_VERSION_MAJOR << 16 | VMEM_VERSION_MINOR << 8 | VMEM_VERSION_PATCH)

// VMEM_VERSION of the library that runs. A program that needs what a version brought compares: the library may be
// another than the header it was compiled with. Major versions differ in what exists, minor ones add, patches change
// nothing here.
uint32_t vmem_version(void);

// Page sizes. A backend supports some of them: struct vmem_info.page_sizes.
#define VMEM_PAGE_64K (UINT64_C(64) << 10)
#define VMEM_PAGE_128K (UINT64_C(128) << 10)
#define VMEM_PAGE_256K (UINT64_C(256) << 10)
#define VMEM_PAGE_2M (UINT64_C(2) << 20)

// A physical page. Opaque; 0 is never a page. A released page's handle stays invalid for ever after, and a page of one
// context is no page of another.
typedef uint64_t vmem_page;
typedef struct vmem_context vmem_context;

// ---- contexts ---------------------------------------------------------------------------------------------

// Try a driver release that the stock backend's ABI table does not know.
#define VMEM_OPT_UNKNOWN_DRIVER 0x1u

struct vmem_options {
    uint32_t size;       // sizeof(struct vmem_options)
    uint32_t flags;      // VMEM_OPT_*
    const char *backend; // "uvm", "stock", "cuda", "host"; NULL: $VMEM_BACKEND, else the best that works
    int32_t device;      // CUDA device ordinal, as CUDA_VISIBLE_DEVICES numbers them; the host backend ignores it
    uint32_t reserved;   // 0
    uint64_t budget;     // most bytes of pages that may exist at once; 0: no limit but the device's
};

// opts may be NULL: all defaults. On the GPU backends the device's primary CUDA context is retained.
int vmem_context_create(const struct vmem_options *opts, vmem_context **out);
// Unmaps, releases and frees all that the context still holds. NULL is allowed. Waits for the calls that other threads
// are in; none may start any more.
void vmem_context_destroy(vmem_context *ctx);

// Lets long calls be interrupted: vMemCreate, vmem_commit and vmem_prealloc call interrupted(arg) after every 32 MiB or
// so of their work, in the thread that made the call and with no lock held. If it returns other than 0, the call undoes
// what it has done and returns -EINTR; the memory itself may go back to the system a little later, and counts as
// overhead until then. The function may call libvmem, but must not destroy the context. NULL: none. The calls that give
// something back are never interrupted.
int vmem_set_interrupt(vmem_context *ctx, int (*interrupted)(void *arg), void *arg);

// Whether a context of this backend could be created: 0, or the error that stops it, with the one fact in
// vmem_last_error(). opts->backend must name a backend.
int vmem_probe(const struct vmem_options *opts);
// Names of all backends, best first, NULL at the end.
const char *const *vmem_backends(void);

// What the layers above may rely on.
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
    uint8_t device_uuid[16]; // zero on the host
    int32_t device;
    uint32_t reserved;      // 0
    uint64_t page_sizes;    // every supported page size, ORed
    uint64_t reserve_align; // reservations start at a multiple of this; at least 2 MiB
    uint64_t memory_total;  // bytes of the device; on the host of the machine, or what its control group allows
};
// What does not change while the context exists; costs nothing.
int vmem_context_info(vmem_context *ctx, struct vmem_info *out);
// Bytes of the device as of now, and how many of them are free. Asks the driver, or reads /proc and the control group
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
};
int vmem_context_stats(vmem_context *ctx, struct vmem_stats *out);

// A budget under what exists already only stops further creation.
int vmem_set_budget(vmem_context *ctx, uint64_t bytes);
// Takes device memory for at least `bytes` of pages ahead of their creation, and keeps it: later creation needs no
// driver call. Counts as overhead until used. 0 bytes: keeps nothing any more, as vmem_trim.
int vmem_prealloc(vmem_context *ctx, uint64_t bytes);
// Gives unused device memory (preallocated memory too) back to the system; *freed, when not NULL, receives how much.
int vmem_trim(vmem_context *ctx, uint64_t *freed);

// ---- address space ----------------------------------------------------------------------------------------

// Unbacked addresses read as finite data (zero until somebody writes there) instead of faulting. Kernels that load
// whole tiles past the end of the data need it. Writes to unbacked addresses are lost or fault; never make them.
#define VMEM_RESERVE_BACKDROP 0x1u

// length: a multiple of 64 KiB, at most 2^46. The range starts 2 MiB aligned and costs no physical memory to speak of.
int vMemReserve(vmem_context *ctx, uint64_t length, uint32_t flags, uint64_t *addr);
// addr: as returned by vMemReserve. -EBUSY while anything is mapped there.
int vMemFree(vmem_context *ctx, uint64_t addr);
// Gives up a reservation with all that is mapped there: pages of vmem_commit are released, others only unmapped. For
// those who cannot do anything about a failure: it neither lacks memory nor meets a busy reservation. While another
// call works there the reservation stays, and goes when that call ends. -EINVAL: no reservation starts at addr.
int vmem_unreserve(vmem_context *ctx, uint64_t addr);
// Where the backdrop is established lazily (cuda and stock backends), make it readable over [addr, addr+length) now, and
// for good. Mapping a page does this behind it: for the rest of its segment of 64 MiB and the next one on stock, for
// 2 MiB on cuda. Unmapping leaves a backdrop: everywhere on stock, over the first 2 MiB on cuda.
int vmem_backdrop(vmem_context *ctx, uint64_t addr, uint64_t length);

// ---- physical pages ---------------------------------------------------------------------------------------

// Zero-fill pages whose memory was used before by this context. (Memory fresh from the system is always zero.)
#define VMEM_CREATE_ZERO 0x1u

// n pages of one size, physically consecutive where possible; all or none.
int vMemCreate(vmem_context *ctx, uint64_t page_size, size_t n, uint32_t flags, vmem_page *pages);
// Unmaps the page wherever it is mapped, then frees it.
int vMemRelease(vmem_context *ctx, vmem_page page);
int vMemReleaseBatch(vmem_context *ctx, const vmem_page *pages, size_t n, size_t *bad);
// Releases pages for those who cannot do anything about a failure: what is no page (any more) is left out, and a page
// that another call works on, or that cannot be unmapped for lack of memory, is released as soon as it can be.
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
struct vmem_unmap_op {
    uint64_t addr, length; // inside one reservation, cutting no mapped page; unbacked parts are skipped
};

// Take the place of what is mapped there (which must not stick out of the new page). Without it: -EEXIST.
// On a backend without VMEM_CAP_LIVE_REMAP no kernel may touch the addresses during the call. With it no access faults;
// kernels launched after the call use the new page alone, and so do the stores, atomics and L2 loads (volatile, or
// relaxed at gpu scope) of those that ran already. Their weak loads may still return what an L1 read from the old page:
// give both the same content first, if a running kernel must not notice. A first page is no replacement: on uvm one
// in an aligned 2 MiB whose predecessor holds no small page interrupts reads of the backdrop there for a moment.
#define VMEM_MAP_REPLACE 0x1u
// Keep every page separately unmappable beside running kernels. Without it a 2 MiB aligned run of small pages may be
// mapped by 2 MiB entries, and unmapping a part of it later interrupts the rest of those 2 MiB for a moment.
#define VMEM_MAP_FINE 0x2u

int vMemMap(vmem_context *ctx, uint64_t addr, vmem_page page);
int vMemMapBatch(vmem_context *ctx, const struct vmem_map_op *ops, size_t n, uint32_t flags, size_t *bad);
int vMemUnmap(vmem_context *ctx, uint64_t addr, uint64_t length);
int vMemUnmapBatch(vmem_context *ctx, const struct vmem_unmap_op *ops, size_t n, size_t *bad);

// The page mapped at addr and the offset of addr in it; *page is 0 where nothing is. offset may be NULL.
int vmem_query(vmem_context *ctx, uint64_t addr, vmem_page *page, uint64_t *offset);

// ---- committing -------------------------------------------------------------------------------------------

struct vmem_range {
    uint64_t addr, length;
};

// Backs every unbacked part of the ranges with new pages of one size, consecutive where possible; what is backed stays
// as it is. Ranges are multiples of page_size, each inside one reservation, and do not overlap. All or nothing; -EBUSY
// where another call commits that is not over, or where pages are that are to go (vmem_drop).
// *bytes, when not NULL, receives how much was newly backed. The pages belong to the addresses: one that is mapped
// nowhere any more, because it was unmapped, replaced, or its reservation given up, is released.
int vmem_commit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t page_size, uint32_t create_flags,
                uint64_t *bytes);
// Releases every page mapped in the ranges, wherever else it is mapped. Ranges cut no page; unbacked parts are skipped.
// *bytes, when not NULL, receives how many bytes of the ranges were backed.
int vmem_decommit(vmem_context *ctx, const struct vmem_range *ranges, size_t n, uint64_t *bytes);

// ---- what is where ----------------------------------------------------------------------------------------

struct vmem_reservation_info {
    uint32_t size;         // sizeof(struct vmem_reservation_info), set by the caller
    uint32_t flags;        // VMEM_RESERVE_*
    uint64_t addr, length; // of the reservation
    uint64_t mapped;       // bytes of it that are backed
};
// The reservation that holds addr.
int vmem_reservation_query(vmem_context *ctx, uint64_t addr, struct vmem_reservation_info *out);
// The first backed stretch of [addr, addr+length), which lies in one reservation; length 0 where nothing is backed. A
// stretch of more than 4 GiB comes in parts. Costs time for what is backed, next to none for the rest.
int vmem_next_mapped(vmem_context *ctx, uint64_t addr, uint64_t length, struct vmem_range *out);

// ---- data -------------------------------------------------------------------------------------------------

struct vmem_copy_op {
    uint64_t dst, src, length; // device or CPU addresses, in any combination the device can copy
};
// In order; the data is there when the call returns. Not ordered with work on other CUDA streams.
int vmem_copy_batch(vmem_context *ctx, const struct vmem_copy_op *ops, size_t n);
int vmem_fill(vmem_context *ctx, uint64_t addr, uint8_t value, uint64_t length);

// ---- errors -----------------------------------------------------------------------------------------------

// What the calling thread's last failed call had to say; "" if none failed. Valid until its next failing call.
const char *vmem_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
