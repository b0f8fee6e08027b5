// /dev/simgpu: how a test acts as code that runs on the simulated GPU, looks at what the GPU sees, and injects faults.
//
// A GPU is named by its index (0, 1). A GPU virtual address space is named by the two RM handles that were given to
// UVM_REGISTER_GPU_VASPACE; h_client 0 matches any client. Structs have no implicit padding.
//
// SPDX-License-Identifier: GPL-2.0 OR MIT
#ifndef SIMGPU_UAPI_H
#define SIMGPU_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

struct simgpu_vas_id {
    __u32 gpu;
    __u32 h_client;
    __u32 h_vaspace;
    __u32 pad;
};

#define SIMGPU_ACCESS_WRITE (1 << 0) // else read
#define SIMGPU_ACCESS_CE (1 << 1)    // as a copy engine: through the HUB's TLB. Else as an SM
// The data of a write is in flight when the call returns. It lands with the next access of this address space, with
// SIMGPU_DRAIN, or with the first membar that covers it: one that follows a TLB invalidate acknowledged globally, and
// is a system membar if the target is not this GPU's memory.
#define SIMGPU_ACCESS_POSTED (1 << 2)

// Read or write [va, va + len) through the TLB and the page tables, page by page.
struct simgpu_access {
    struct simgpu_vas_id vas;
    __u64 va, len;
    __u64 buf;    // user pointer
    __u32 flags;  // SIMGPU_ACCESS_*
    __s32 result; // OUT: 0, -EFAULT (no translation), -EACCES, -ENODEV
    __u64 done;   // OUT: bytes before the access that failed
};

// Copy (src != 0) or fill, as the copy engine of the GPU would.
struct simgpu_copy {
    struct simgpu_vas_id vas;
    __u64 dst, src, len;
    __u32 value;  // byte to fill with
    __s32 result; // OUT
    __u64 done;   // OUT
};

#define SIMGPU_PTE_INVALID 0
#define SIMGPU_PTE_VALID 1
#define SIMGPU_PTE_SPARSE 2

struct simgpu_pte {
    __u64 phys;      // of the page, in its aperture
    __u64 bits;      // the raw entry
    __u32 page_size; // of the level where the walk ended
    __u8 state;      // SIMGPU_PTE_*
    __u8 aperture;   // 0 this GPU's memory, 2 or 3 system memory
    __u8 read_only;
    __u8 pad;
};

// The truth: walk the tables in memory for va, va + stride, ... No TLB is read or filled.
struct simgpu_walk {
    struct simgpu_vas_id vas;
    __u64 va, stride;
    __u64 out; // user pointer to struct simgpu_pte[count]
    __u32 count;
    __u32 pad;
};

#define SIMGPU_UNIT_GPC 0 // the SMs' TLB
#define SIMGPU_UNIT_HUB 1 // the copy engines' and the host's

// An SM that reads 8 bytes at va without end: once after every method that writes memory, invalidates or is a membar,
// and whenever the engine is idle. Belongs to the descriptor and ends with it.
struct simgpu_loop {
    struct simgpu_vas_id vas;
    __u64 va;
    __u32 id;        // OUT of START; IN of READ and STOP
    __u32 ended;     // OUT: the address space is gone
    __u64 reads;     // OUT
    __u64 invalid;   // OUT: the tables held no valid entry: a TLB miss at that moment would have faulted
    __u64 faulted;   // OUT: the access itself found none, cached or not
    __u64 lagging;   // OUT: the TLB's entry was used though the tables already said something else
    __u64 freed;     // OUT: the data came from memory that is free
    __u64 changes;   // OUT: times the value differed from the one before
    __u64 last;      // OUT: the value
    __u64 last_phys; // OUT: and where it came from
};

struct simgpu_counters {
    __u64 pushes;
    __u64 inval_all, inval_targeted, inval_ack;
    __u64 pte_writes; // 8-byte words written by small physical copies and memsets of a copy engine
    __u64 rm_calls;   // nvUvmInterface* calls
    __u64 rm_dup_memory;
    // Must stay zero on a correct driver
    __u64 bad_tlb_at_free;    // memory was freed while a TLB could still translate to it
    __u64 bad_pde_at_free;    // the same of a page-table page and a page-directory cache
    __u64 bad_late_writes;    // a write in flight landed in memory that had been freed
    __u64 bad_use_after_free; // an access was translated to free memory
    __u64 bad_double_free;
    __u64 bad_push_size;   // a push was longer than UVM gives one room for: it wrote into others'
    __u64 bad_mixed_sizes; // a TLB held an address while the tables mapped it by an entry of another size
    // Levels, not reset
    __u64 pma_live;    // granules allocated
    __u64 tlb_entries; // translations held, both units
    __u64 posted;      // writes in flight
    __u64 vaspaces, rm_objects;
};

struct simgpu_counters_io {
    __u32 gpu;
    __u32 reset; // after reading
    struct simgpu_counters c;
};

// Physical memory of a GPU, past TLBs and tables. Free memory holds SIMGPU_POISON bytes.
#define SIMGPU_POISON 0xd5
struct simgpu_phys {
    __u32 gpu;
    __u32 pad;
    __u64 phys, len;
    __u64 buf; // user pointer to write to
};

// Is all free memory still untouched?
struct simgpu_poison {
    __u32 gpu;
    __u32 pad;
    __u64 free_granules;  // OUT: granules that are free
    __u64 dirty_granules; // OUT: of these, written to since they were freed
    __u64 first_dirty;    // OUT: physical address
};

#define SIMGPU_SITE_RM (1 << 0)      // any nvUvmInterface* call that returns a status: NV_ERR_NO_MEMORY
#define SIMGPU_SITE_PMA (1 << 1)     // physical memory: NV_ERR_NO_MEMORY
#define SIMGPU_SITE_CHANNEL (1 << 2) // a push: its channel faults (fatal to UVM, as on hardware)
struct simgpu_inject {
    __u32 sites; // SIMGPU_SITE_*; 0: disarm
    __u32 nth;   // fail the nth call from now on, 1 the next; 0: only count
    __u32 mine;  // count only calls made by the calling process
    __u32 pad;
    __u64 seen;  // OUT: calls counted since the last arming (before this call)
    __u64 fired; // OUT: of these, failed
};

// RM's request for memory that UVM holds.
struct simgpu_evict {
    __u32 gpu;
    __u32 range; // 1: evict [phys, phys + len). 0: ask UVM for count pages of page_size, and free them
    __u64 phys, len;
    __u64 page_size;
    __u32 count;
    __u32 status; // OUT: NV_STATUS of UVM's callback
};

struct simgpu_info {
    __u32 gpu;
    __u32 registered; // OUT: by UVM
    __u8 uuid[16];    // OUT
    __u64 fb_size;    // OUT
    __u64 fb_free;    // OUT
    __u32 gpus;       // OUT: how many there are
    __u32 va_bits;    // OUT: of addresses in its page tables: 49 or 57
};

// Memory that RM allocated for a client, without going through /dev/nvidiactl. size 0 frees.
struct simgpu_mem {
    __u32 gpu;
    __u32 h_client;
    __u32 h_memory;
    __u32 page_size; // 64K or 2M
    __u64 size;
    __u64 phys; // OUT: of the first page
};

// Faults of the hardware, off when loaded: with these on a correct driver looks broken, which shows that tests notice.
#define SIMGPU_MODE_BREAK_INVALIDATE (1 << 0) // TLB invalidates do nothing
#define SIMGPU_MODE_BREAK_MEMBAR (1 << 1)     // neither do membars
struct simgpu_mode {
    __u32 gpu;
    __u32 set, clear;
    __u32 now; // OUT
};

#define SIMGPU_ACCESS _IOWR('s', 1, struct simgpu_access)
#define SIMGPU_COPY _IOWR('s', 2, struct simgpu_copy)
#define SIMGPU_WALK _IOWR('s', 3, struct simgpu_walk)
#define SIMGPU_LOOP_START _IOWR('s', 5, struct simgpu_loop)
#define SIMGPU_LOOP_READ _IOWR('s', 6, struct simgpu_loop)
#define SIMGPU_LOOP_STOP _IOWR('s', 7, struct simgpu_loop)
#define SIMGPU_COUNTERS _IOWR('s', 8, struct simgpu_counters_io)
#define SIMGPU_PHYS _IOWR('s', 9, struct simgpu_phys)
#define SIMGPU_POISON_CHK _IOWR('s', 10, struct simgpu_poison)
#define SIMGPU_INJECT _IOWR('s', 11, struct simgpu_inject)
#define SIMGPU_EVICT _IOWR('s', 12, struct simgpu_evict)
#define SIMGPU_INFO _IOWR('s', 13, struct simgpu_info)
#define SIMGPU_MEM _IOWR('s', 14, struct simgpu_mem)
#define SIMGPU_MODE _IOWR('s', 15, struct simgpu_mode)
#define SIMGPU_DRAIN _IOW('s', 16, __u32) // gpu: let every write in flight land

#endif
