// Numbered blocks: the state of a vmem_blocks, and what the files offer each other.
//
// One lock guards everything here. No thread holds it across a call of core or of a driver, or for more than
// BLOCKS_LOOK pages at a time. So a call on the engine's path waits for microseconds.
//
// Every page of the blocks has a word (vmem_blocks.pages): the number of blocks that need the page, and two marks.
// PAGE_BUSY: some call is mapping or unmapping the page, without the lock. PAGE_MAPPED: it is mapped. The call that
// raises the count of a page that is neither busy nor mapped maps the page. The call that lowers the count of a mapped
// page to 0 unmaps it, unless it is busy. A call that needs a busy page waits for `change` and looks again. No call
// waits while it keeps a page busy itself, so all waiting ends.
//
// The life of a block:
//
//              back, order                  mapped
//     UNBACKED ------------> BACKING ----------------------> BACKED
//        ^ ^                    | refused: no memory           |  unback: pending_unback = its number, after `fence`
//        | +--------------------+                              v
//        |                                       BACKED, and waits for the fence
//        |  fence passed, no holder                |           |  back, order before that: num_holders + 1
//        +-----------------------------------------+           v
//        |                               the call succeeds: BACKED, the unback is cancelled
//        +------------------------------ it fails, and the fence has passed meanwhile (fence_passed)
//
// The room puts pages behind the blocks of an engine that keeps its own block table. It calls core by memory.h and the
// pool by member.h. Begin with vmem_blocks.h, then vmem_blocks_back and vmem__blocks_back in pages.c.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_BLOCKS_STATE_H
#define VMEM_BLOCKS_STATE_H

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/memory.h"
#include "pool/member.h"
#include "vmem_blocks.h"

#define PAGE_BUSY 0x80000000u
#define PAGE_MAPPED 0x40000000u
#define PAGE_COUNT 0x3fffffffu
#define BLOCKS_LOOK 4096 // pages looked at before the lock is dropped for other calls
#define BLOCKS_PART 4096 // pages mapped or unmapped by one call of the core

_Static_assert(sizeof(((struct vmem_blocks_board *)0)->answers) == VMEM_BLOCKS_ANSWERS * sizeof(uint64_t), "board");

enum block_state {
    BLOCK_UNBACKED, // counts no page
    BLOCK_BACKING,  // some call is backing it
    BLOCK_BACKED,   // all its pages are mapped
};
// Calls that name blocks are numbered from 1. Each takes effect as if it ran alone, in the order of these numbers.
struct block {
    uint64_t last_unback;    // number of the last unback that named the block; 0: none
    uint64_t pending_unback; // number of the unback that will unback the block after `fence`; 0: none
    uint64_t fence;
    uint32_t num_holders; // calls with larger numbers that back the block and have not ended
    bool fence_passed;    // the fence has passed: if the last of these calls fails, it does the unback
    uint8_t state;        // enum block_state
};

// Addresses of blocks, as the engine gave them.
struct range {
    struct vmem_block_range at;
    uint64_t shift; // page number + shift is the index in vmem_blocks.pages
};
// Consecutive pages that belong to blocks.
struct page_span {
    uint64_t first, pages; // page numbers: addresses / page_size
    uint64_t index;        // of the first page, in vmem_blocks.pages
};

// A call that names blocks, while it runs or waits.
#define CALL_HOLDS 0x80000000u // mark in block_call.ids: the call is one of the block's num_holders
struct block_call {
    struct block_call *next;
    uint64_t number;
    uint64_t seq;           // an order's number for the engine; 0: the call is no order
    uint64_t fence;         // an unback's fence
    uint64_t missing_pages; // pages that the budget lacked when an order failed; 0: it did not fail for that
    uint32_t flags, n;      // VMEM_BLOCKS_OVER; the number of ids
    uint32_t ids[];
};

struct fence {
    struct fence *next;
    uint64_t number;
    void *event;  // the backend's; NULL: none
    bool by_hand; // vmem_blocks_pass lets it pass, not an event
    bool passed;
};

// Pages that a call maps or unmaps.
struct page_batch {
    uint64_t *pages; // indices in vmem_blocks.pages
    uint64_t n;
    struct page_batch *next; // in vmem_blocks.stuck
};

struct vmem_blocks {
    vmem_context *ctx;
    const unsigned char *owned;
    const _Atomic uint64_t *absent; // of the context's addresses: a failed call left them without their pages
    uint64_t page_size;
    uint32_t page_shift, n_blocks, n_ranges, n_spans;
    struct range *ranges;
    struct page_span *spans; // by address
    uint64_t n_pages;
    struct vmem_blocks_board *board;

    pthread_mutex_t lock;
    pthread_cond_t work;   // the thread may have something to do
    pthread_cond_t change; // a page is no longer busy, a block no longer BACKING, or a call has ended
    pthread_t thread;
    bool stop;
    uint32_t calls; // public calls in progress
    struct block *blocks;
    uint32_t *pages; // a word for each page: see above
    uint64_t budget; // pages; UINT64_MAX: none
    uint64_t held;   // pages that are mapped or busy
    uint64_t number; // of the last call that named blocks
    uint64_t seq;    // of the last order
    uint64_t done;   // seq of the last order that was carried out
    struct block_call *orders, **orders_end;
    struct block_call *unbacks; // unbacks that wait, by their fences
    uint32_t unbacking;         // calls that are unbacking blocks whose fence has passed
    bool asking;                // a call is asking the driver whether events have passed
    struct fence *fences, **fences_end, *spare;
    uint64_t fence, passed;   // numbers of the last fence made, and of the last that passed
    uint64_t no_fence;        // the number before the first fence
    bool idle;                // no call has named blocks for a while
    struct page_batch *stuck; // pages that could not be unmapped

    struct vmem__member *member; // NULL: the blocks are in no pool
    uint64_t offer;              // pages that the engine would give up if asked
    uint64_t keeps;              // `held` without them, at the time of the offer
    uint64_t reported;           // `held` as the pool has seen it last
    uint64_t shrink_to;          // pages to which the pool has asked the engine to shrink; UINT64_MAX: it has not
    uint64_t shrink_until;       // ns: the time at which that lapses

    struct vmem_blocks_stats stats;
};

// From below: each file calls only those before it.

// ---- state.c

// Makes blocks without a thread. out: NULL is refused.
int vmem__blocks_new(vmem_context *ctx, const struct vmem_blocks_config *config, vmem_blocks **out);
void vmem__blocks_free(vmem_blocks *b);
// Begin and end a public call. enter takes the lock, or returns a negative errno if the blocks cannot be used.
int vmem__blocks_enter(vmem_blocks *b);
int vmem__blocks_leave(vmem_blocks *b, int rc);
// With the lock held: writes the state to the board, for other processes.
void vmem__blocks_publish(vmem_blocks *b);

// ---- queue.c. With the lock held.

// Sorts a call's ids, and removes duplicates.
void vmem__blocks_sort(struct block_call *c);
// Queues an unback until its fence passes.
void vmem__blocks_queue_unback(vmem_blocks *b, struct block_call *c);
// Ends a call that backs blocks, and frees it. Success cancels unbacks that wait for these blocks. After a failure,
// those whose fence has passed meanwhile take place.
void vmem__blocks_end_call(vmem_blocks *b, struct block_call *c, int rc);
// Removes passed fences from the front of the queue.
void vmem__blocks_advance_fences(vmem_blocks *b);
// True if an unback waits for a fence that only the driver knows.
bool vmem__blocks_needs_driver(const vmem_blocks *b);
// Asks the driver about fences that unbacks wait for.
void vmem__blocks_poll_events(vmem_blocks *b);
// True if pages are about to go: a fence that an unback waits for has passed.
static inline bool blocks_go(const vmem_blocks *b)
{
    return b->unbacking || (b->unbacks && b->unbacks->fence <= b->passed);
}
// Waits for b->work or b->change, for at most so long.
void vmem__blocks_wait(vmem_blocks *b, pthread_cond_t *on, uint64_t ns);

// ---- member.c. With the lock held.

// Ends the pool's request to shrink if it has lapsed. Whoever would be refused by it looks first: an engine may never offer
// again.
void vmem__blocks_lapse(vmem_blocks *b);
// Raises the budget by what is free in the pool, as vmem__pool_claim does.
void vmem__blocks_claim(vmem_blocks *b, uint64_t least, uint64_t most);
// Asks the pool's other members for pages that an order lacks, and waits for them a moment. True: look again. False:
// they give none, or *until has passed, a time that the first call sets.
bool vmem__blocks_await_budget(vmem_blocks *b, uint64_t pages, uint64_t *until);

// ---- pages.c. With the lock held, which they drop for a while.

// Backs the call's blocks, all or none. The ids are sorted, without duplicates.
int vmem__blocks_back(vmem_blocks *b, struct block_call *c);
// Unbacks the blocks of the first unback whose fence has passed. False: there is none, or no memory to do it.
bool vmem__blocks_unback_due(vmem_blocks *b);
// Tries once more to unmap the pages that could not be unmapped.
void vmem__blocks_retry_unmaps(vmem_blocks *b);
// Unmaps everything.
void vmem__blocks_unmap_all(vmem_blocks *b);

// ---- worker.c

void *vmem__blocks_work(void *blocks); // the thread

#endif
