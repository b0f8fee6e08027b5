// The ABI of vMem inside nvidia-uvm.ko: the only declaration of it, for the module, libvmem and the tests.
//
// All calls are ioctls on a /dev/nvidia-uvm descriptor that UVM_INITIALIZE was done on. They return 0 and leave an
// NV_STATUS in rmStatus, the last word of each structure; -1 with EFAULT only when the structure itself cannot be read
// or written. A kernel module without vMem answers every one of them with -1, EINVAL; on a descriptor that is not a
// UVM address space rmStatus is NV_ERR_ILLEGAL_ACTION. So QUERY finds the right descriptor of a process that has many.
//
// Physical memory, handles and overlays belong to the open file: they survive fork() and travel with the descriptor,
// and end with its last close or, per GPU, when the GPU is unregistered. A handle is a number in the file's own table:
// never an address, never used twice in the life of the file, and without meaning to another file.
//
// Addresses are those of external ranges of the file's address space, which CUDA makes where it maps memory, or the
// caller by UVM_CREATE_EXTERNAL_RANGE; UVM_FREE gives them back, with the overlays in them.
//
// An *overlay* is what the module keeps for each 2 MiB block of address space (or the part of it that a range covers)
// that it maps something in. Every 64 KiB of an overlay is a page, sparse (reads return zero, writes are dropped), or
// invalid (accesses fault). An overlay opens with all of it sparse. It closes with its range or by UVM's own calls
// (UVM_FREE, UVM_UNMAP_EXTERNAL, UVM_UNREGISTER_GPU_VASPACE): these work on it as on any external mapping.
//
// Growth: a structure never changes once released. New element fields go behind the old ones under a larger opSize (the
// missing ones of an old caller read as zero, and what a new caller adds must be zero to an old module), new meanings
// under flags announced by out_caps, then in reserved words, which must be zero today; then under new call numbers.
//
// Errors common to all calls:
//   NV_ERR_ILLEGAL_ACTION        the descriptor is not an initialised UVM address space
//   NV_ERR_INVALID_ARGUMENT      an unknown flag, a reserved word that is not zero, a zero or misaligned count or size
//   NV_ERR_INVALID_PARAM_STRUCT  opSize smaller than the first version's, larger than UVM_VMEM_MAX_OP_SIZE, no multiple
//                                of 8, or non-zero bytes in the part of an element that this module does not know
//   NV_ERR_INVALID_POINTER       an array of the caller cannot be read
//   NV_ERR_INVALID_LIMIT         more elements or more bytes than QUERY allows in one call
//   NV_ERR_INVALID_DEVICE        the GPU is not registered on this file, or (MAP, UNMAP) has no address space. With MIG
//                                a GPU's UUID is that of the instance, as the driver registered it
//   NV_ERR_NOT_SUPPORTED         the GPU cannot do it: SR-IOV heavy, no sparse entries, confidential computing (unless
//                                the module parameter uvm_vmem_confidential allows it)
//   NV_ERR_NO_MEMORY             out of device or system memory
//   any other                    a fatal error of the GPU or of UVM
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_IOCTL_H
#define UVM_VMEM_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define UVM_VMEM_ABI 1

// UVM itself uses plain small numbers and 0x3000000x, whose type byte is below 0x10.
#define UVM_VMEM_IOCTL_TYPE 0xBA

// Limits of the ABI. A module may announce smaller ones in QUERY, never larger.
#define UVM_VMEM_MAX_OPS 4096           // elements of one call
#define UVM_VMEM_MAX_BYTES (1ULL << 32) // physical bytes or bytes of address space that one call touches
#define UVM_VMEM_MAX_OP_SIZE 128

#define UVM_VMEM_GRANULE (1ULL << 16) // every address, offset and length in MAP and UNMAP is a multiple of it
#define UVM_VMEM_BLOCK (1ULL << 21)

// out_failed when no single element is at fault
#define UVM_VMEM_NO_OP 0xFFFFFFFFu

// out_caps
#define UVM_VMEM_CAP_LIVE_REPLACE 0x1   // UVM_VMEM_MAP_REPLACE writes entries of the same size in place
#define UVM_VMEM_CAP_SPARSE 0x2         // unbacked parts of an overlay read as zero
#define UVM_VMEM_CAP_TAKEOVER 0x4       // there is UVM_VMEM_TAKEOVER
#define UVM_VMEM_CAP_HUGE 0x8           // aligned 2 MiB pages get one 2 MiB entry
#define UVM_VMEM_CAP_LIVE_TAKEOVER 0x10 // a 2 MiB entry none of whose pages stays becomes a table in one step

// What the module can do, on a GPU when gpu_uuid is given, and what this file holds there.
//
// gpu_uuid            of a GPU registered on this file; all zero: only what does not depend on one (the rest reads 0)
// flags, reserved     zero
// out_abi             UVM_VMEM_ABI of the module
// out_max_ops         elements one call accepts
// out_max_bytes       bytes one call accepts: length summed over the elements; page_size * count for CREATE
// out_caps            UVM_VMEM_CAP_*
// out_page_sizes      sizes that CREATE takes, ORed
// out_bytes_cap       most physical bytes that all files of one user (who opened them) may hold over all GPUs (module
//                     parameter uvm_vmem_max_mbytes); ~0 without a limit
// out_bytes_held      physical bytes that this file holds on the GPU, free parts of 2 MiB slabs included
// out_bytes_created   of these, bytes of handles
// out_bytes_mapped    bytes of address space of this GPU backed by pages now (at most: see UVM's own calls above)
// out_bytes_free      free physical bytes of the GPU, for all its users
// out_bytes_total     physical bytes of the GPU that can be allocated
// out_pushes, out_invalidates, out_waits
//                     over the life of the file: batches of commands sent to the GPU by MAP, UNMAP and RELEASE, TLB
//                     invalidates in them, and times the CPU waited for one. Opening overlays allocates page tables,
//                     for which UVM itself adds its own; these are not counted.
// Errors: the common ones.
struct uvm_vmem_query {
    __u8 gpu_uuid[16];
    __u32 flags;
    __u32 out_abi;
    __u32 out_max_ops;
    __u32 out_pad;
    __u64 out_max_bytes;
    __u64 out_caps;
    __u64 out_page_sizes;
    __u64 out_bytes_cap;
    __u64 out_bytes_held;
    __u64 out_bytes_created;
    __u64 out_bytes_mapped;
    __u64 out_bytes_free;
    __u64 out_bytes_total;
    __u64 out_pushes;
    __u64 out_invalidates;
    __u64 out_waits;
    __u64 reserved[4];
    __u32 pad;
    __u32 rmStatus;
};

// `count` pages of physical memory of the GPU, all or none. They read as zero. Small pages are cut from 2 MiB slabs,
// kept per GPU and page size; a slab goes back to the GPU with its last page.
//
// page_size           one of out_page_sizes: 64, 128, 256 KiB or 2 MiB. A page is physically contiguous and aligned to
//                     its size
// count               1 to out_max_ops
// flags, reserved     zero
// out_handle          the first page's handle; the others follow it: out_handle + 1, ...
// Errors: the common ones; NV_ERR_INSUFFICIENT_RESOURCES the user would pass out_bytes_cap.
struct uvm_vmem_create {
    __u8 gpu_uuid[16];
    __u64 page_size;
    __u32 count;
    __u32 flags;
    __u64 out_handle;
    __u64 reserved;
    __u32 pad;
    __u32 rmStatus;
};

// Unmap pages wherever this file maps them (to sparse), then free them, all or none. When it returns, no GPU access can
// reach the memory through vMem's mappings any more. The pages are all of one GPU.
//
// It needs no memory, and cannot fail for want of it: once the handles are known to be good, only a fatal error of the
// GPU or of UVM is left. Where a page has a 2 MiB entry, sparse ones need a page table: without memory for it these
// addresses become invalid instead. Pages mapped at very many addresses are taken away step by step, and other calls of
// the file come in between; none of them finds the handles.
//
// handles             address of __u64[count]; no handle twice
// count               1 to out_max_ops
// flags, reserved     zero
// out_failed          index of the element at fault, or UVM_VMEM_NO_OP
// out_pushes, out_invalidates, out_waits  of this call, all steps together
// Errors: the common ones; NV_ERR_INVALID_OBJECT_HANDLE no such handle, the same one twice, or another GPU's than the
// first. (NV_ERR_NO_MEMORY only as a file's very first vMem call.)
struct uvm_vmem_release {
    __u64 handles;
    __u32 count;
    __u32 flags;
    __u32 out_failed;
    __u32 out_pushes;
    __u32 out_invalidates;
    __u32 out_waits;
    __u64 reserved;
    __u32 pad;
    __u32 rmStatus;
};

// One element of MAP or UNMAP; all of it lies inside one external range.
//
// va, length          multiples of 64 KiB, length not zero
// MAP:
// handle, offset      what to put there: bytes [offset, offset + length) of the handle's page; offset a multiple of
//                     64 KiB. A large handle can so serve as a slab of the caller's own.
// flags               UVM_VMEM_MAP_REPLACE, UVM_VMEM_MAP_64K, UVM_VMEM_MAP_AHEAD, UVM_VMEM_TAKEOVER
// UNMAP:
// handle, offset      0, 0: whatever is there. Else what must be mapped there; anything else is an error
// flags               UVM_VMEM_UNMAP_OPEN (with or without UVM_VMEM_TAKEOVER) or UVM_VMEM_UNMAP_INVALID
struct uvm_vmem_op {
    __u64 va;
    __u64 length;
    __u64 handle;
    __u64 offset;
    __u32 flags;
    __u32 reserved;
};

// Pages may be mapped there already: each entry is overwritten in place by the new one, so that a kernel which accesses
// the page meanwhile meets no fault. What it sees:
//   - a kernel launched after the call returned: the new page alone;
//   - a kernel that runs meanwhile: the old page or the new before the call returns. After that its stores, atomics and
//     loads that are served by the L2 (volatile, relaxed or stronger at gpu scope, ld.cg) use the new page. A weak load
//     (plain ld, ld.ca) may still be served by a line that its SM's L1 read from the old page, until the line is evicted
//     or the kernel ends: no call can invalidate an L1 that is indexed by virtual addresses.
// The content is the caller's to make equal, by a copy that is complete before the call, if no kernel is to notice.
// Without the flag: NV_ERR_UVM_ADDRESS_IN_USE.
#define UVM_VMEM_MAP_REPLACE 0x1
// 64 KiB entries even where a 2 MiB one would do. Without it a 2 MiB entry is used where all of a block that has no
// overlay (or has a 2 MiB entry) is mapped to all of a 2 MiB handle. Cutting a 2 MiB entry later, when a part of it
// changes, makes the block invalid for a moment: the GPU must not hold one address in entries of two sizes. So no
// kernel may access such a block while a part of it is mapped, replaced or unmapped.
#define UVM_VMEM_MAP_64K 0x2
// Where the element ends in a block that held no page, open the block behind it too (with UVM_VMEM_TAKEOVER by taking
// it), if an external range is there and nothing that cannot be taken. Kernels that load whole tiles read past the last
// page: so their block is open with 64 KiB entries by the time that a page comes to it, and no entry they read is ever
// cut.
#define UVM_VMEM_MAP_AHEAD 0x4
// MAP, UNMAP with UVM_VMEM_UNMAP_OPEN: blocks that another mapping on this GPU's own memory (a CUDA backdrop) or a
// sparse mapping covers may be taken: the whole block becomes an overlay and loses that mapping. Where it has 64 KiB
// entries they are replaced in place, as by UVM_VMEM_MAP_REPLACE. A 2 MiB entry is cut: the block is invalid for a
// moment, and no kernel may access it, unless QUERY says UVM_VMEM_CAP_LIVE_TAKEOVER; then an access sees the old memory
// or the new, and writes there have no order. Without it: NV_ERR_UVM_ADDRESS_IN_USE.
#define UVM_VMEM_TAKEOVER 0x100
// Open overlays where there are none: the backdrop, ahead of use. Without it such addresses are skipped.
#define UVM_VMEM_UNMAP_OPEN 0x10
// Leave the addresses invalid instead of sparse. Not together with UVM_VMEM_UNMAP_OPEN.
#define UVM_VMEM_UNMAP_INVALID 0x20

// MAP: put pages behind addresses. UNMAP: take them away. The elements take effect in order, as one: they are checked
// first, a failure changes no page (overlays opened for it may stay), and one TLB invalidate makes them visible. When
// the call returns, the GPU translates by the new entries: UVM_VMEM_MAP_REPLACE says what a running kernel sees.
//
// gpu_uuid            of the GPU whose address space changes; a page can be mapped on its own GPU only
// ops                 address of the first element
// count               1 to out_max_ops
// opSize              distance of the elements in bytes, at least sizeof(struct uvm_vmem_op), a multiple of 8
// flags, reserved     zero
// out_failed          index of the element at fault, or UVM_VMEM_NO_OP
// out_pushes, out_invalidates, out_waits
//                     of this call. One push and one wait, whatever the batch; more pushes, chained, only when one has
//                     no room. One invalidate for up to four runs of addresses each, for everything at once beyond
//                     that; one set more when a 2 MiB entry is cut that keeps a page. No change: none of them
// Errors: the common ones; NV_ERR_INVALID_ADDRESS va, length misaligned, overflowing, or not inside one external range;
// NV_ERR_OUT_OF_RANGE the GPU cannot address it; NV_ERR_INVALID_OBJECT_HANDLE no such handle, or another GPU's;
// NV_ERR_INVALID_OFFSET offset misaligned or offset + length past the page's end; NV_ERR_UVM_ADDRESS_IN_USE see above,
// or a foreign mapping that cannot be taken (system memory, another GPU's, 4 KiB or 512 MiB entries);
// NV_ERR_OBJECT_NOT_FOUND (UNMAP with a handle) something else is mapped there; NV_ERR_INSUFFICIENT_RESOURCES the
// kernel memory behind all overlays of the user would pass the module parameter uvm_vmem_max_kernel_mbytes.
struct uvm_vmem_batch {
    __u8 gpu_uuid[16];
    __u64 ops;
    __u32 count;
    __u32 opSize;
    __u32 flags;
    __u32 out_failed;
    __u32 out_pushes;
    __u32 out_invalidates;
    __u32 out_waits;
    __u32 reserved32;
    __u64 reserved;
    __u32 pad;
    __u32 rmStatus;
};

#define UVM_VMEM_QUERY _IOWR(UVM_VMEM_IOCTL_TYPE, 1, struct uvm_vmem_query)
#define UVM_VMEM_CREATE _IOWR(UVM_VMEM_IOCTL_TYPE, 2, struct uvm_vmem_create)
#define UVM_VMEM_RELEASE _IOWR(UVM_VMEM_IOCTL_TYPE, 3, struct uvm_vmem_release)
#define UVM_VMEM_MAP _IOWR(UVM_VMEM_IOCTL_TYPE, 4, struct uvm_vmem_batch)
#define UVM_VMEM_UNMAP _IOWR(UVM_VMEM_IOCTL_TYPE, 5, struct uvm_vmem_batch)

#endif
