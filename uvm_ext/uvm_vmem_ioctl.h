// The ABI of vMem inside nvidia-uvm.ko, declared once for the module, libvmem and the tests.
//
// All calls are ioctls on a /dev/nvidia-uvm descriptor that was initialised by UVM_INITIALIZE. The caller sets `size`, the
// first word of each structure, to the structure's size. A call returns 0 and sets rmStatus, the second word, to an
// NV_STATUS. It returns -1 and does nothing with
//   EFAULT   the structure cannot be read and written. (If another thread takes it away while the call runs, the call has
//            been made; CREATE then creates nothing.)
//   EINVAL   size is less than the structure had when it was released
//   E2BIG    size is more than a page, or the structure goes on with words that this module does not know and that are
//            not zero
//   ENOTTY   the module has vMem, but not this call
// A kernel module without vMem answers every call as UVM answers all calls that it does not know, with -1 and EINVAL. On
// a descriptor that is not a UVM address space, rmStatus is NV_ERR_ILLEGAL_ACTION, so QUERY finds the right descriptor
// among many.
//
// Physical memory, handles and overlays belong to the open file. They survive fork(), travel with the descriptor, and
// end with its last close or, per GPU, when the GPU is unregistered. A handle is a number in the file's own table. It
// is never an address, is never reused during the life of the file, and means nothing to another file.
//
// Addresses must lie in external ranges of the file's address space. CUDA creates such a range wherever it maps memory,
// and the caller can create one with UVM_CREATE_EXTERNAL_RANGE. UVM_FREE frees the range and the overlays in it.
//
// An *overlay* records what the module maps in a 2 MiB block of address space, or in the part of the block that a range
// covers. Every 64 KiB of an overlay is a page, sparse (reads return zero, writes are dropped) or invalid (accesses
// fault). A new overlay is all sparse. It closes with its range, or by UVM's own calls (UVM_FREE, UVM_UNMAP_EXTERNAL,
// UVM_UNREGISTER_GPU_VASPACE), but only as a whole: UVM_UNMAP_EXTERNAL and UVM_MAP_EXTERNAL_ALLOCATION over a part of an
// overlay fail with NV_ERR_INVALID_ADDRESS and change nothing there, as they do for a part of a 2 MiB mapping.
//
// Growth: words are added at the end of a structure, and zero in them means what older callers expect. The caller's size
// says which it knows: a module takes the others for zero, and does not answer in them. New features of an element use
// flags announced by out_caps, then reserved words, which must be zero today, then larger elements, told by opSize.
//
// Errors common to all calls:
//   NV_ERR_ILLEGAL_ACTION        the descriptor is not an initialised UVM address space
//   NV_ERR_INVALID_ARGUMENT      an unknown flag, a reserved word that is not zero, a zero or misaligned count or size
//   NV_ERR_INVALID_PARAM_STRUCT  opSize is not the size of this module's elements
//   NV_ERR_INVALID_POINTER       an array of the caller cannot be read
//   NV_ERR_INVALID_LIMIT         more elements or more bytes than QUERY allows in one call
//   NV_ERR_INVALID_DEVICE        the GPU is not registered on this file, or (MAP, UNMAP) has no address space. With
//                                MIG, the UUID is that of the instance, as the driver registered it
//   NV_ERR_NOT_SUPPORTED         the GPU is not supported: SR-IOV heavy, no sparse entries, memory that the CPU
//                                accesses coherently (GH200, GB200), address translation services (ATS), or
//                                confidential computing (unless the module parameter uvm_vmem_confidential allows it)
//   NV_ERR_NO_MEMORY             out of device or system memory
//   any other                    a fatal error of the GPU or of UVM
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_IOCTL_H
#define UVM_VMEM_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define UVM_VMEM_ABI 3

// UVM itself uses small numbers and 0x3000000x, whose type byte is below 0x10.
#define UVM_VMEM_IOCTL_TYPE 0xBA

// Limits of the ABI. A module may announce smaller ones in QUERY, never larger.
#define UVM_VMEM_MAX_OPS 4096           // elements per call
#define UVM_VMEM_MAX_BYTES (1ULL << 32) // bytes of memory or of address space per call

#define UVM_VMEM_GRANULE (1ULL << 16) // every address, offset and length in MAP and UNMAP is a multiple of it
#define UVM_VMEM_BLOCK (1ULL << 21)
#define UVM_VMEM_TAKE_TABLES 1024 // page tables of the largest mapping of which UVM_VMEM_TAKEOVER takes blocks

// out_failed if no single element is at fault
#define UVM_VMEM_NO_OP 0xFFFFFFFFu

// out_caps
#define UVM_VMEM_CAP_LIVE_REPLACE 0x1 // UVM_VMEM_MAP_REPLACE writes entries of the same size in place
#define UVM_VMEM_CAP_SPARSE 0x2       // unbacked parts of an overlay read as zero
#define UVM_VMEM_CAP_TAKEOVER 0x4     // UVM_VMEM_TAKEOVER is available
#define UVM_VMEM_CAP_HUGE 0x8         // aligned 2 MiB pages get one 2 MiB entry
// 0x10 was a capability of ABI 1

// Reports what the module supports and, for the GPU of gpu_uuid, what this file holds there.
//
// gpu_uuid            a GPU registered on this file; all zero: report only what depends on no GPU (the rest is 0)
// flags, reserved     zero
// out_abi             UVM_VMEM_ABI of the module
// out_max_ops         elements that one call accepts
// out_max_bytes       bytes that one call accepts: the sum of the elements' lengths; page_size * count for CREATE
// out_caps            UVM_VMEM_CAP_*
// out_page_sizes      page sizes that CREATE accepts, ORed
// out_bytes_held      physical bytes that this file holds on the GPU, including free parts of 2 MiB slabs
// out_bytes_created   bytes of these that belong to handles
// out_bytes_mapped    bytes of this GPU's address space that pages back now
// out_bytes_free      free physical bytes of the GPU, for all its users
// out_bytes_total     physical bytes of the GPU that can be allocated
// out_pushes, out_invalidates, out_waits
//                     over the life of the file: batches of commands that MAP, UNMAP and RELEASE sent to the GPU, TLB
//                     invalidates in them, and waits of the CPU for them. UVM's own pushes, for the page tables of
//                     new overlays, are not counted.
// Errors: the common ones.
struct uvm_vmem_query {
    __u32 size;
    __u32 rmStatus;
    __u8 gpu_uuid[16];
    __u32 flags;
    __u32 out_abi;
    __u32 out_max_ops;
    __u32 out_pad;
    __u64 out_max_bytes;
    __u64 out_caps;
    __u64 out_page_sizes;
    __u64 out_bytes_held;
    __u64 out_bytes_created;
    __u64 out_bytes_mapped;
    __u64 out_bytes_free;
    __u64 out_bytes_total;
    __u64 out_pushes;
    __u64 out_invalidates;
    __u64 out_waits;
    __u64 reserved[5];
};

// Allocates `count` pages of the GPU's physical memory, all or none. They read as zero. Small pages are cut from 2 MiB
// slabs, which are kept per GPU and page size. A slab is freed with its last page.
//
// page_size           one of out_page_sizes: 64, 128, 256 KiB or 2 MiB. A page is physically contiguous and aligned to
//                     its size
// count               1 to out_max_ops
// flags, reserved     zero
// out_handle          the first page's handle; the others are out_handle + 1, ...
// Errors: the common ones.
struct uvm_vmem_create {
    __u32 size;
    __u32 rmStatus;
    __u8 gpu_uuid[16];
    __u64 page_size;
    __u32 count;
    __u32 flags;
    __u64 out_handle;
    __u64 reserved;
};

// Unmaps pages wherever this file maps them (their addresses become sparse), then frees them, all or none. When it
// returns, no GPU access can reach the memory through vMem's mappings. All pages must belong to one GPU.
//
// The call needs no memory. Once the handles are found, only a fatal error of the GPU or of UVM can make it fail. If
// a page has a 2 MiB entry, sparse entries need a page table; without memory for one, the addresses become invalid
// instead. Pages that are mapped at very many addresses are unmapped in steps. Other calls of the file may run between
// two steps, and do not find the handles.
//
// handles             address of __u64[count], without duplicates
// count               1 to out_max_ops
// flags, reserved     zero
// out_failed          index of the element at fault, or UVM_VMEM_NO_OP
// out_pushes, out_invalidates, out_waits  counts of this call, for all steps together
// Errors: the common ones; NV_ERR_INVALID_OBJECT_HANDLE: no such handle, a duplicate, or a handle of another GPU than
// the first. (NV_ERR_NO_MEMORY only if this is the file's first vMem call.)
struct uvm_vmem_release {
    __u32 size;
    __u32 rmStatus;
    __u64 handles;
    __u32 count;
    __u32 flags;
    __u32 out_failed;
    __u32 out_pushes;
    __u32 out_invalidates;
    __u32 out_waits;
    __u64 reserved;
};

// One element of MAP or UNMAP. It must lie inside one external range.
//
// va, length          multiples of 64 KiB, length not zero
// MAP:
// handle, offset      what to map: bytes [offset, offset + length) of the handle's page; offset is a multiple of
//                     64 KiB. The caller can thus use a large page as its own slab.
// flags               UVM_VMEM_MAP_REPLACE, UVM_VMEM_MAP_64K, UVM_VMEM_MAP_AHEAD, UVM_VMEM_TAKEOVER; or UVM_VMEM_MAP_OPEN
// UNMAP:
// handle, offset, flags  zero
struct uvm_vmem_op {
    __u64 va;
    __u64 length;
    __u64 handle;
    __u64 offset;
    __u32 flags;
    __u32 reserved;
};

// Replace pages that are already mapped. Each entry is overwritten in place, so a kernel that accesses the page at the
// same time does not fault. It sees the following:
//   - A kernel launched after the call has returned sees only the new page.
//   - A kernel that is already running sees the old page or the new one until the call returns. After that, its stores,
//     atomics and loads that the L2 serves (volatile, relaxed or stronger at gpu scope, ld.cg) use the new page. A weak
//     load (plain ld, ld.ca) may still be served by a line that its SM's L1 read from the old page, until the line is
//     evicted or the kernel ends: no call can invalidate an L1 that is indexed by virtual addresses.
// If no kernel may notice the replacement, the caller must copy the content before the call. Without the flag, a mapped
// page is NV_ERR_UVM_ADDRESS_IN_USE.
#define UVM_VMEM_MAP_REPLACE 0x1
// Use 64 KiB entries even where a 2 MiB one is possible. Without the flag, a 2 MiB entry is used if a whole block that
// has no overlay (or a 2 MiB entry) is mapped to a whole 2 MiB page. When a part of the block changes later, the entry
// is cut, and the block is invalid for a moment, because the GPU must not hold one address in entries of two sizes. No
// kernel may therefore access such a block while a part of it is mapped, replaced or unmapped.
#define UVM_VMEM_MAP_64K 0x2
// If the element ends in a block without pages, also open the next block, if it belongs to the same external range and
// nothing is mapped there. With UVM_VMEM_TAKEOVER, also take it over if it is sparse, or a part of the mapping that the
// element's last block is or was a part of. Other memory is left alone without an error. Kernels that load whole tiles
// read past the last page. With the flag, the block that they read has 64 KiB entries before a page is mapped in it, so
// none of its entries is ever cut.
#define UVM_VMEM_MAP_AHEAD 0x4
// Open the blocks of the element, and map nothing. handle and offset are zero, and UVM_VMEM_TAKEOVER is the only other
// flag. This is MAP_AHEAD for addresses that the caller names, such as those of its own next range.
#define UVM_VMEM_MAP_OPEN 0x8
// Take over blocks that are covered by a sparse mapping or by a mapping of this GPU's own memory (a CUDA backdrop). The
// whole block becomes an overlay and loses that mapping. 64 KiB entries are replaced in place, as with
// UVM_VMEM_MAP_REPLACE. A 2 MiB entry is cut: the block is invalid for a moment, and no kernel may access it. Without
// the flag, such a block is NV_ERR_UVM_ADDRESS_IN_USE, and with it a block of a mapping that has more than
// UVM_VMEM_TAKE_TABLES page tables: each block costs time in proportion to those of the rest of its mapping. A table
// holds 2 MiB of 64 KiB entries, or 512 MiB of 2 MiB entries, so such a mapping is larger than 2 GiB or 512 GiB.
#define UVM_VMEM_TAKEOVER 0x100
// The flags 0x10 and 0x20 belonged to ABI 1.

// MAP maps pages at addresses, and UNMAP unmaps them. UNMAP skips addresses without an overlay. The elements take effect
// in order and as a whole: all are checked first, a failure changes no entry (a foreign mapping may have been split), and
// one TLB invalidate makes them visible. When the call has returned, the GPU translates by the new entries.
// UVM_VMEM_MAP_REPLACE says what a running kernel sees.
//
// gpu_uuid            the GPU whose address space changes; a page can be mapped only on its own GPU
// ops                 address of the first element
// count               1 to out_max_ops
// opSize              sizeof(struct uvm_vmem_op)
// flags, reserved     zero
// out_failed          index of the element at fault, or UVM_VMEM_NO_OP
// out_pushes, out_invalidates, out_waits
//                     counts of this call: one push and one wait for any batch, and further chained pushes only when
//                     one is full. One invalidate for each of up to four runs of addresses, or a single one for the
//                     whole address space; another set when 2 MiB entries are cut. All are 0 if nothing changes.
// Errors: the common ones, and
//   NV_ERR_INVALID_ADDRESS         va or length is misaligned, overflows, or is not inside one external range
//   NV_ERR_OUT_OF_RANGE            the GPU cannot address it
//   NV_ERR_INVALID_OBJECT_HANDLE   no such handle, or a handle of another GPU
//   NV_ERR_INVALID_OFFSET          offset is misaligned, or offset + length is past the page's end
//   NV_ERR_UVM_ADDRESS_IN_USE      see the flags above, or a foreign mapping cannot be taken over (system memory,
//                                  another GPU's memory, 4 KiB or 512 MiB entries)
struct uvm_vmem_batch {
    __u32 size;
    __u32 rmStatus;
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
};

#define UVM_VMEM_QUERY _IO(UVM_VMEM_IOCTL_TYPE, 1)   // struct uvm_vmem_query
#define UVM_VMEM_CREATE _IO(UVM_VMEM_IOCTL_TYPE, 2)  // struct uvm_vmem_create
#define UVM_VMEM_RELEASE _IO(UVM_VMEM_IOCTL_TYPE, 3) // struct uvm_vmem_release
#define UVM_VMEM_MAP _IO(UVM_VMEM_IOCTL_TYPE, 4)     // struct uvm_vmem_batch
#define UVM_VMEM_UNMAP _IO(UVM_VMEM_IOCTL_TYPE, 5)   // struct uvm_vmem_batch

#endif
