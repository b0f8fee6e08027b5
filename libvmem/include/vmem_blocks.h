// Pages behind numbered blocks, for engines that keep their own block tables.
//
// Such an engine has a pool of blocks of equal size, numbered from 0, at fixed places of large virtual tensors. A block
// needs memory only while a request, or a cache of the engine, uses its number. This object backs the blocks that the
// engine names and gives up those that it names, and knows nothing else of the engine: no request, no token, no table.
// The pages that the parts of several blocks share are counted, so parts need not be multiples of the page size.
//
// Backing ahead. The object's own thread carries out orders (vmem_blocks_order), one after the other. An engine orders
// blocks ahead of need and hands them out once the order is done. Its steps then never wait for a map.
//
// Giving up. Kernels in flight may still read a block that the engine has given up. vmem_blocks_unback therefore takes a
// fence: the thread unmaps the block after the fence has passed. Until then, a call that backs the block again keeps it.
//
// Calls that name the same block take effect in the order in which they were made.
//
// Errors and thread safety are as in vmem.h: 0, or a negative errno and vmem_last_error(), and a call that fails changes
// nothing. Calls wait for system calls of others only if these map or unmap the pages that they need.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_BLOCKS_H
#define VMEM_BLOCKS_H

#include "vmem_kv_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vmem_blocks vmem_blocks;

// ---- creation -----------------------------------------------------------------------------------------------

// Addresses of blocks: layer l of block b is the `bytes` bytes at addr + l * layer_stride + b * block_stride.
struct vmem_block_range {
    uint64_t addr;         // of layer 0 of block 0, in a reservation
    uint64_t layer_stride; // bytes
    uint64_t block_stride; // bytes
    uint64_t bytes;        // of one layer of one block
    uint32_t layers;
    uint32_t reserved; // 0
};

// The board has the answers to the last so many orders.
#define VMEM_BLOCKS_ANSWERS 256

// Words that other processes may read while the object's own process changes them. Sizes are bytes.
struct vmem_blocks_board {
    uint64_t done;    // the last order that was answered; all before it were
    uint64_t refused; // orders refused so far
    uint64_t held, most_held;
    uint64_t backed, leaving; // blocks; those that wait for their fence are among the backed
    uint64_t budget;          // 0: none
    uint64_t shrink_to;       // what others of the pool want `held` to fall to; 0: they want nothing
    uint64_t answers[256];    // VMEM_BLOCKS_ANSWERS: of order s at [s % 256], 2 * s, or 2 * s + 1 if it was refused
};

struct vmem_blocks_config {
    uint32_t size;  // sizeof(struct vmem_blocks_config)
    uint32_t flags; // 0
    const struct vmem_block_range *ranges;
    uint32_t n_ranges;
    uint32_t blocks;    // numbers are 0 to blocks - 1
    uint64_t page_size; // of the pages that back them
    uint64_t budget;    // most bytes of pages; 0: no limit but the context's
    // Memory for the answers to orders, for example shared with the process that makes them. It must outlive the object,
    // which writes to it without system calls and never reads it. NULL: none.
    struct vmem_blocks_board *board;
};

// Backs no block yet. Every block's pages must lie in a reservation of the context, where nobody else maps anything. The
// context and the reservations must outlive the object.
int vmem_blocks_create(vmem_context *ctx, const struct vmem_blocks_config *cfg, vmem_blocks **out);
// Unmaps all blocks, which no kernel in flight may access, and drops orders that have not begun. NULL is allowed. Waits
// for calls in other threads to return; no new call may start. In a forked child, it frees nothing of the parent's.
void vmem_blocks_destroy(vmem_blocks *blocks);

// ---- backing ------------------------------------------------------------------------------------------------

#define VMEM_BLOCKS_OVER 0x1u // the budget does not count, only the memory there is

// Backs the blocks now, in the calling thread, before orders that wait; all or none. A block may be named twice, and
// blocks that are backed stay as they are. If fresh is not NULL, *fresh receives the number of blocks that were not.
// Where possible, pages are consecutive in memory, and each stays separately unmappable while kernels run
// (VMEM_MAP_FINE). New pages are zero. -ENOMEM: the budget or the device has no memory for all of them.
int vmem_blocks_back(vmem_blocks *blocks, const uint32_t *ids, uint32_t n, uint32_t flags, uint32_t *fresh);

// The same by the object's thread, in the order of the calls; returns at once. *seq receives the order's number: 1 for
// the first, and one more for each. The board has its answer: an order that fails is refused, and its blocks are as before the call.
// -ENOMEM: no memory for the order itself.
int vmem_blocks_order(vmem_blocks *blocks, const uint32_t *ids, uint32_t n, uint64_t *seq);

// Gives up the blocks after the fence has passed; 0: as soon as possible. Never waits. Blocks that are not backed are
// skipped, after an order for them that waits was cut. -ENOMEM: no memory for bookkeeping.
int vmem_blocks_unback(vmem_blocks *blocks, const uint32_t *ids, uint32_t n, uint64_t fence);

// ---- fences -------------------------------------------------------------------------------------------------
//
// A fence is a number, of one object: calls of another one refuse it with -EINVAL. Fences pass in the order in which they
// were made.

// Makes a fence that passes when all work given to the CUDA stream before this call has ended. stream: a CUstream of the
// context's device; NULL: the legacy default stream. On the host backend the fence has passed already.
int vmem_blocks_record(vmem_blocks *blocks, void *stream, uint64_t *fence);
// Makes a fence that passes, with all such fences before it, when vmem_blocks_pass is called.
int vmem_blocks_fence(vmem_blocks *blocks, uint64_t *fence);
int vmem_blocks_pass(vmem_blocks *blocks, uint64_t fence);

// ---- what is there ------------------------------------------------------------------------------------------------

// Waits until every order made before is answered and no block waits whose fence has passed.
int vmem_blocks_flush(vmem_blocks *blocks);
// Sets states[i] to the state of block ids[i]: 0 if it is not backed, 1 if it is, 2 if it is and waits to be given up.
int vmem_blocks_query(vmem_blocks *blocks, const uint32_t *ids, uint32_t n, uint8_t *states);

// ---- pools --------------------------------------------------------------------------------------------------
//
// As a member of a pool (vmem_kv_pool.h), the blocks share its budget with KV caches and other blocks on the device,
// in this process and in others. Backing takes what the pool has free, also what a member has not used for 100 ms. An
// order that lacks budget asks the other members and waits for them up to 100 ms before it is refused. An engine that
// knows of a need earlier asks earlier. It gives blocks up when the board says that others ask.

// Joins a pool, which sets the budget from then on: at least `min` bytes are guaranteed, at most `max` (0: all of the
// pool's) possible. vmem_blocks_destroy leaves it. What others see is `name` (NULL: "blocks"). -ENOMEM: the minimums, or
// the pages that are held, exceed the pool's budget. -ENOSPC: the pool has no place for another member. -EINVAL: the
// blocks are in a pool already, or on another device than its members.
int vmem_blocks_join(vmem_blocks *blocks, vmem_kv_pool *pool, const char *name, uint64_t min, uint64_t max);
// Changes min and max. Pages beyond a lower max stay until they are given up.
int vmem_blocks_set_share(vmem_blocks *blocks, uint64_t min, uint64_t max);
// Asks for a budget of `bytes` more than the pages that are held: takes what is free in the pool, and asks other members
// for the rest. Returns at once; backing succeeds once the memory is there. A question lapses after 250 ms unless it is
// repeated. 0 asks for nothing. *missing (if not NULL) receives the bytes that are not there yet. -ENOMEM: no member
// could give them when they were last asked; the next call asks them again.
int vmem_blocks_ask(vmem_blocks *blocks, uint64_t bytes, uint64_t *missing);
// Says that the engine can give up `bytes` of what is held if others ask. The board's shrink_to then says what to shrink
// to, and backing does not take that memory again. It lapses at the next call if nobody has asked for 100 ms, or if
// nothing is offered any more.
int vmem_blocks_offer(vmem_blocks *blocks, uint64_t bytes);

struct vmem_blocks_stats {
    uint32_t size; // sizeof(struct vmem_blocks_stats), set by the caller
    uint32_t pad;  // 0
    uint64_t page_size;
    uint64_t budget;          // bytes; 0: none
    uint64_t held, most_held; // bytes of pages
    uint64_t blocks;          // there are
    uint64_t backed;          // blocks
    uint64_t leaving;         // of these, with a fence that has not passed, or about to be unmapped
    uint64_t waiting;         // orders without an answer
    // Counts so far.
    uint64_t orders, refused;
    uint64_t unmapped_pages;
    uint64_t failed_unmaps;
};
int vmem_blocks_get_stats(vmem_blocks *blocks, struct vmem_blocks_stats *out);

#ifdef __cplusplus
}
#endif
#endif
