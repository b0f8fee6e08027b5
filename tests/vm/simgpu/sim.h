// A stand-in nvidia.ko with no GPU behind it: what its files share.
//
// One mutex, sim_lock, guards all state. It is never held across a call into UVM, a copy to or from user space, or a
// sleep that waits for UVM. The engine thread takes it once per step.
//
// SPDX-License-Identifier: GPL-2.0
#ifndef SIM_H
#define SIM_H

#include <linux/hashtable.h>
#include <linux/kernel.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "nvmisc.h"
#include "nv_uvm_interface.h"

#include "sim_features.h"
#include "simgpu_uapi.h"

#define SIM_MAX_GPUS 2
#define SIM_PMA_SHIFT 16
#define SIM_FAULT_ENTRIES 512
#define SIM_FAULT_SIZE 32

// Registers that UVM reads and writes as plain words.
enum {
    SIM_REG_FAULT_GET,
    SIM_REG_FAULT_PUT,
    SIM_REG_FAULT_INFO,
    SIM_REG_INTR,
    SIM_REG_INTR_SET,
    SIM_REG_INTR_CLEAR,
    SIM_REG_PREFETCH,
    SIM_REG_AC_GET,
    SIM_REG_AC_PUT,
    SIM_REG_AC_FULL,
    SIM_REG_AC_INTR,
    SIM_REG_AC_INTR_SET,
    SIM_REG_AC_INTR_CLEAR,
    SIM_REG_COUNT
};

// A format of page-table entries. These all have: bit 0 says that it is a page, bits 2:1 are the aperture.
struct sim_mmu_format {
    u8 va_bits;
    u8 top;                            // number of the directory that page tables start with
    u64 (*table)(u64 e, bool vid);     // what a directory entry points to; vid: in video memory
    u64 (*big_table)(u64 e, bool vid); // the same of the half of PDE0 that is for 64K pages
    u64 (*page)(u64 e, bool vid);
    bool (*sparse_page)(u64 e);  // of an entry that is not valid
    bool (*sparse_table)(u64 e); // of an entry of a directory that leads nowhere
    bool (*hides_small)(u64 e);  // of an invalid 64K entry: the 4K entries below are ignored
    bool (*read_only)(u64 e);
    u64 (*make_pte)(u64 phys, bool read_only); // of video memory
};
extern const struct sim_mmu_format sim_ver2, sim_ver3;
#define SIM_ENTRY_VALID 1ULL
#define SIM_APERTURE(e) ((e) >> 1 & 3)
#define SIM_PTE_VID 0ULL

struct sim_arch {
    const char *name;
    u32 arch, implementation, host_class, ce_class, compute_class;
    const struct sim_mmu_format *mmu;
    u64 page_sizes;     // one bit each
    u64 rm_va_base;     // where RM's own mappings start: past 40 bits where channels can reach that
    u32 sem_hi_mask;    // of the upper half of a semaphore's address
    bool ce_scrub;      // and fills without remapping
    bool link_tlbs;     // an invalidate can leave out all TLBs but those of links
    bool push_segments; // a GPFIFO entry sets the upper bits of those after it
    bool ack_is_membar; // an invalidate acknowledged globally is a membar for the GPU's own memory
};

struct sim_gpu {
    u32 index;
    const struct sim_arch *arch;
    u8 uuid[16];
    struct pci_dev *pdev;
    u32 registered;

    // Video memory, in chunks that come into being with their first use, and its allocator
    u8 **fb;
    u64 fb_size;
    unsigned long *pma_used, *pma_pinned;
    u64 pma_granules;
    UvmPmaStatistics pma_stats;
    uvmPmaEvictPagesCallback evict_pages;
    uvmPmaEvictRangeCallback evict_range;
    void *evict_data;

    u32 regs[SIM_REG_COUNT];
    void *fault_buf, *nr_fault_buf, *ac_buf;
    struct list_head posted; // struct sim_post, SM writes in flight
    struct list_head loops;  // struct sim_loop

    u32 mode; // SIMGPU_MODE_*
    struct simgpu_counters c;
    atomic64_t rm_calls;
};

// A VA space. What RM mapped itself (below UVM's part) is a list of allocations; the rest is whatever page tables
// SetPageDirectory points at.
struct sim_vas {
    struct list_head node;
    struct sim_gpu *gpu;
    struct list_head allocs; // struct sim_alloc
    u64 next_va;
    bool is_dup;
    u32 h_client, h_vaspace; // of a dup
    bool has_pdb, pdb_vid;
    u64 pdb;
    u32 time0, time1;
    DECLARE_HASHTABLE(tlb, 8); // struct sim_tlbe
    u64 tlb_count;
};

struct sim_alloc {
    struct list_head node;
    u64 va, size;
    void *cpu;
    atomic_t *users; // of cpu: duplicates in other address spaces share it
};

struct sim_tsg {
    struct sim_vas *vas;
};

struct sim_chan {
    struct list_head node;
    struct sim_vas *vas;
    u32 id, entries;
    u64 *gpfifo;
    u32 *gpput, *doorbell; // written by UVM
    u32 gpget;
    u64 push_segment; // upper bits of push buffer addresses
    NvNotification *notifier;
    // The entry that is being executed
    const u32 *words;
    u32 words_left;
    u64 words_va;
    bool in_entry, faulted;
    // Method header state
    u32 m_addr, m_subch, m_left, m_op;
    u32 host[0x100 / 4];
    u32 ce[0x800 / 4];
    struct list_head posted; // struct sim_post, copy engine writes in flight
    unsigned long posted_at;
};

// A write that has left its engine and has not reached memory.
struct sim_post {
    struct list_head node;
    struct sim_gpu *target; // NULL: system memory
    struct sim_vas *vas;    // of an SM write
    bool ready;             // acknowledged (SM) or after a wait for idle (CE): the next membar covers it
    u64 phys;
    u32 len;
    u8 data[];
};

// Result of a translation.
struct sim_xlat {
    u64 pte;
    u32 shift; // log2 of the page size
    u8 state;  // SIMGPU_PTE_*
    bool hit;
};

// sim_arch.c
const struct sim_arch *sim_arch_find(const char *name); // NULL: there is none

// sim_main.c
extern struct mutex sim_lock;
extern struct sim_gpu sim_gpus[SIM_MAX_GPUS];
extern unsigned int sim_gpu_count;
extern struct list_head sim_vas_list;
extern atomic_t sim_n_allocs, sim_n_tsgs, sim_n_chans;
extern uint sim_trace;
struct sim_gpu *sim_gpu_by_uuid(const void *uuid);
// True if this call is the one to fail.
bool sim_inject(u32 site);
int sim_inject_ioctl(struct simgpu_inject *io);

#define sim_log(fmt, ...) pr_info("simgpu: " fmt, ##__VA_ARGS__)

// First statement of every interface function.
#define SIM_CALL(g) atomic64_inc(&(g)->rm_calls)
#define SIM_CALL_MAY_FAIL(g)            \
    do {                                \
        SIM_CALL(g);                    \
        if (sim_inject(SIMGPU_SITE_RM)) \
            return NV_ERR_NO_MEMORY;    \
    } while (0)

// sim_vas.c. With sim_lock held.
struct sim_vas *sim_vas_find(const struct simgpu_vas_id *id);
void *sim_vas_rm_ptr(struct sim_vas *v, u64 va, u64 *contig);

// sim_pma.c
int sim_pma_init(struct sim_gpu *g);
void sim_pma_exit(struct sim_gpu *g);
// With sim_lock held
bool sim_pma_is_free(struct sim_gpu *g, u64 phys);
u8 *sim_fb_ptr(struct sim_gpu *g, u64 phys, u64 *contig); // NULL: no such memory, or none left on the host
void sim_pma_poison_check(struct simgpu_poison *io);
NV_STATUS sim_pma_evict(struct simgpu_evict *io);
// For RM's own allocations: evicts from UVM where it must. count pages of page_size, each aligned to it.
NV_STATUS sim_pma_rm_alloc(struct sim_gpu *g, u64 page_size, u64 count, u64 *pages);
void sim_pma_rm_free(struct sim_gpu *g, u64 page_size, u64 count, u64 *pages);

// sim_walk.c. With sim_lock held.
void *sim_phys_ptr(struct sim_gpu *g, u64 phys, u64 *contig); // g NULL: system memory
void sim_walk(struct sim_vas *v, u64 va, struct sim_xlat *x);
void sim_translate(struct sim_vas *v, u32 unit, u64 va, struct sim_xlat *x);
// CPU pointer to what an entry maps at va, and how far it goes; NULL for a bad physical address. target: whose memory.
void *sim_xlat_ptr(struct sim_vas *v, const struct sim_xlat *x, u64 va, u64 *contig, struct sim_gpu **target,
                   u64 *phys);
void sim_pte_decode(struct sim_gpu *g, const struct sim_xlat *x, struct simgpu_pte *out);
// Sparse addresses allow both.
bool sim_xlat_allows(struct sim_gpu *g, const struct sim_xlat *x, bool write);
// The table that a directory entry of g points to, if that is in video memory. big: the half of PDE0 for 64K pages.
bool sim_pde_in_vidmem(struct sim_gpu *g, u64 e, bool big, u64 *table);
// The translation for an engine other than the SM. NULL: there is none. Sparse addresses give the zero page or the sink.
void *sim_va_ptr(struct sim_vas *v, u32 unit, u64 va, bool write, u64 *contig);

// sim_tlb.c. With sim_lock held.
struct sim_tlbe {
    struct hlist_node node;
    u64 va; // aligned to shift
    u64 e0, e1;
    u8 shift, unit, state;
    s8 level; // 0..4: an entry of that directory (PDE0..PDE4); SIM_LEVEL_PTE: a translation
};
#define SIM_LEVEL_PTE -1
struct sim_tlbe *sim_tlb_find(struct sim_vas *v, u32 unit, int level, u32 shift, u64 va);
bool sim_tlb_find_pte(struct sim_vas *v, u32 unit, u64 va, struct sim_xlat *x);
void sim_tlb_add(struct sim_vas *v, u32 unit, int level, u32 shift, u64 va, u64 e0, u64 e1, u8 state);
void sim_tlb_drop_all(struct sim_vas *v);
void sim_tlb_invalidate(struct sim_gpu *g, u32 a, u32 b, u32 c, u32 d);
// Memory [phys, phys + len) of g is about to be freed.
void sim_tlb_check_free(struct sim_gpu *g, u64 phys, u64 len);

// sim_post.c. With sim_lock held.
int sim_post(struct list_head *list, struct sim_vas *v, struct sim_gpu *target, u64 phys, const void *data, u32 len);
void sim_post_ack(struct sim_gpu *g, struct sim_vas *v); // v NULL: all
void sim_post_membar(struct sim_gpu *g, struct sim_chan *c, bool sys);
void sim_post_land_chan(struct sim_chan *c);
void sim_post_land_vas(struct sim_gpu *g, struct sim_vas *v); // v NULL: all
void sim_post_check_free(struct sim_gpu *g, u64 phys, u64 len);

// sim_chan.c
int sim_engine_start(void);
void sim_engine_stop(void);
void sim_chan_fault(struct sim_chan *c, const char *what, u64 va);
bool sim_chan_sem_write(struct sim_chan *c, u64 va, u32 payload, bool four_words);

// sim_ce.c
bool sim_ce_method(struct sim_chan *c, u32 addr, u32 value);

// sim_access.c
void sim_access(struct simgpu_access *a);

// sim_loop.c
struct sim_loop;
void sim_loops_step(struct sim_gpu *g); // sim_lock held
void sim_loops_vas_gone(struct sim_vas *v);
int sim_loop_start(void *owner, struct simgpu_loop *io);
int sim_loop_read(void *owner, struct simgpu_loop *io, bool stop);
void sim_loops_release(void *owner);

// sim_mem.c
int sim_mem_ioctl(struct simgpu_mem *io);
u32 sim_mem_exit(void); // how many duplicates UVM left

// sim_dev.c
int sim_dev_start(void);
void sim_dev_stop(void);

#endif
