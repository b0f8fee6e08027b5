// The state of a vmem_blocks.
//
// One lock guards everything here. It is never held across a call of the core or of a driver, and for no more than
// BLOCKS_LOOK pages at a time: a call on the engine's path waits for microseconds.
//
// Every page of the blocks has a word: a count of the blocks that need it, and two marks. PAGE_BUSY: some call maps or
// unmaps it, without the lock. PAGE_MAPPED: it is mapped. The call that raises the count of a page that is neither busy
// nor mapped maps the page. The call that takes the last count of a mapped page that is not busy unmaps it. A call that
// needs a busy page waits for `change` and looks again; no call that waits keeps a page busy, so all waiting ends.
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
// SPDX-License-Identifier: MIT
#ifndef VMEM_BLOCKS_STATE_H
#define VMEM_BLOCKS_STATE_H

#include "core/clock.h"
#include "core/core.h"
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
// The numbers are of calls, which are counted from 1.
struct block {
    uint64_t last_unback;    // the last unback that named it: it takes effect after calls with smaller numbers
    uint64_t pending_unback; // the unback that waits to take it, after `fence`; 0: none
    uint64_t fence;
    uint32_t num_holders; // calls after that unback that name it and have not ended
    bool fence_passed;    // the fence of the unback has passed: the last of these calls sees to it
    uint8_t state;
};

struct range {
    struct vmem_block_range at;
    uint64_t shift; // page number + shift is the index in vmem_blocks.pages
};
// Consecutive pages of blocks.
struct page_span {
    uint64_t first, pages; // page numbers: addresses / page_size
    uint64_t index;        // of the first, in vmem_blocks.pages
};

// A call that names blocks, while it runs or waits.
#define CALL_HOLDS 0x80000000u // mark in block_call.ids: the call holds the block, for which an unback waits
struct block_call {
    struct block_call *next;
    uint64_t number;
    uint64_t seq;           // of an order
    uint64_t fence;         // of an unback
    uint64_t missing_pages; // of an order that has just failed: pages of the budget; 0: it did not fail for that
    uint32_t flags, n;
    uint32_t ids[];
};

struct fence {
    struct fence *next;
    uint64_t number;
    void *event; // of the backend; NULL: none
    bool by_hand, passed;
};

// Indices of the pages that a call maps or unmaps.
struct page_batch {
    uint64_t *pages;
    uint64_t n, room;
    struct page_batch *next; // of pages that could not be unmapped
};

struct vmem_blocks {
    vmem_context *ctx;
    const unsigned char *owned;
    uint64_t page_size;
    uint32_t create_flags, page_shift, n_blocks, n_ranges, n_spans;
    struct range *ranges;
    struct page_span *spans; // by address
    uint64_t n_pages;
    struct vmem_blocks_board *board;

    pthread_mutex_t lock;
    pthread_cond_t work;   // for the thread
    pthread_cond_t change; // a page is no longer busy, a block no longer coming, a call has ended
    pthread_t thread;
    bool stop;
    uint32_t calls; // in progress
    struct block *blocks;
    uint32_t *pages;
    uint64_t budget; // in pages; UINT64_MAX: none
    uint64_t held;   // pages that are mapped or busy
    uint64_t number, seq, done;
    struct block_call *orders, **orders_end;
    struct block_call *unbacks; // by fence
    uint32_t unbacking;         // calls that take blocks whose fence has passed
    bool asking;                // a call asks the driver whether events have passed
    struct fence *fences, **fences_end, *spare;
    uint64_t fence, passed; // the last made; the last that passed
    uint64_t no_fence;      // the number before the first
    bool idle;              // nothing was asked of it for a while
    struct page_batch *stuck;
    struct vmem__member *member;      // of a pool; else NULL
    uint64_t offer, keeps;            // pages that the engine would give up if asked; `held` without them, at that call
    uint64_t reported;                // `held` as the pool has seen it last
    uint64_t shrink_to;               // pages that others of the pool have left it; UINT64_MAX: they want nothing
    uint64_t shrink_until;            // ns: then it lapses
    int answers[VMEM_BLOCKS_ANSWERS]; // of order s at [s % VMEM_BLOCKS_ANSWERS]
    struct vmem_blocks_stats stats;   // counts
};

// From below: each file calls only those before it.

// ---- state.c

// Makes blocks without a thread. out: NULL is refused.
int vmem__blocks_new(vmem_context *ctx, const struct vmem_blocks_config *config, vmem_blocks **out);
void vmem__blocks_free(vmem_blocks *b);
// Between calls: locks the blocks. A negative errno if they cannot be used.
int vmem__blocks_enter(vmem_blocks *b);
int vmem__blocks_leave(vmem_blocks *b, int rc);
// With the lock held: tells other processes.
void vmem__blocks_publish(vmem_blocks *b);

// ---- queue.c. With the lock held.

// Sorts the ids, and leaves one of each.
void vmem__blocks_sort(struct block_call *c);
// Puts an unback among those that wait.
void vmem__blocks_queue_unback(vmem_blocks *b, struct block_call *c);
// Ends a call that backs blocks. If it failed, blocks that were to leave when it came do so. Frees the call.
void vmem__blocks_end_call(vmem_blocks *b, struct block_call *c, int rc);
// Lets the first fences pass that have.
void vmem__blocks_advance_fences(vmem_blocks *b);
// True if an unback waits for a fence that only the driver knows.
bool vmem__blocks_needs_driver(const vmem_blocks *b);
// Asks the driver whether fences have passed that unbacks wait for.
void vmem__blocks_poll_events(vmem_blocks *b);
// Waits for b->work or b->change, but no longer than so.
void vmem__blocks_wait(vmem_blocks *b, pthread_cond_t *on, uint64_t ns);

// ---- member.c. With the lock held.

// Takes up to so many pages of what the pool has free.
void vmem__blocks_claim(vmem_blocks *b, uint64_t least, uint64_t most);
// An order lacks so many pages of the budget: asks the pool's other members, and waits for them a moment. False: they give
// none, or not before *until, which the first call sets.
bool vmem__blocks_borrow(vmem_blocks *b, uint64_t pages, uint64_t *until);

// ---- pages.c. With the lock held, which they drop for a while.

// Backs the call's blocks, or none of them. ids are sorted and single.
int vmem__blocks_back(vmem_blocks *b, struct block_call *c);
// Takes the blocks of the first unback whose fence has passed. False if there is none, or no memory for the work.
bool vmem__blocks_unback_due(vmem_blocks *b);
// Tries once more to unmap the pages that could not be unmapped.
void vmem__blocks_retry_unmaps(vmem_blocks *b);
// Unmaps everything.
void vmem__blocks_unmap_all(vmem_blocks *b);

// ---- worker.c

void *vmem__blocks_work(void *blocks); // the thread

#endif
