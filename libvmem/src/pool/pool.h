// Pools: what the files share. From above: pool.c creates pools, and members join and leave there. balance.c moves
// budget between members. claim.c claims free budget for one member, and asks the others. table.c keeps the table of
// members, in a file if they are in several processes.
//
// Locks, in this order: a member's lock, the pool's lock, the file's lock. A member that is short takes the pool's lock
// for a few us while it holds its own. It reads and writes the table, and never waits for the file's lock. The pool's
// thread takes the lock of one member at a time, and none of them while it holds the pool's. So no call ever waits for
// another member. Backends are called with neither the pool's nor the file's lock held.
//
// The room divides one budget among members, of one process or of several. It calls core by memory.h, and a member by
// the table of functions in member.h, whatever the member is. Begin with member.h, then the file's table below and
// vmem__pool_work in balance.c.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_POOL_H
#define VMEM_POOL_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <unistd.h>

#include "core/memory.h"
#include "pool/member.h"

struct pool_head {
    uint64_t magic;
    uint32_t size, entries; // sizeof(struct pool_table), VMEM_KV_POOL_MEMBERS
    uint64_t budget;
    uint64_t revision;  // of the last question
    uint8_t device[16]; // uuid; zero on the host
    char backend[16];   // of the host, "host"; else "gpu", as pages of every backend come out of the same memory
    uint64_t refused;   // for a while, bytes of the budget without device memory: see vmem__pool_refused
    uint64_t refusals;  // a number that changes with each refusal: clocks of other processes may differ from ours
};

// The file:
//
//     struct pool_head            byte 0 locks the file
//     entries[0 .. 31]            one member each: its share, budget and needs. Byte 1 + i is locked while it lives
//     struct pool_process[0 .. 31]   the processes of the members
//     struct pool_process[32 .. 95]  the processes that have the file open; byte 1 + i is locked meanwhile
//
// An entry is written by its own process alone, except that anybody empties the entry of a dead one. Size 0: nobody.
// How budget goes from one member to another, by their entries (`needs`, `giving` and `has` of both):
//
//     the member that asks                       a member that gives
//     needs = n: a question, with a revision ->  could_give >= n: giving = n, and it releases pages
//                                                trim: their memory is back on the device
//     has += n, needs = 0: granted           <-  has -= n, giving = 0: the budget is free
//     the budget grows by n: answer APPLIED      nothing to give: reply REFUSED. If all reply so, answer REFUSED
struct pool_table {
    struct pool_head head;
    struct vmem_kv_pool_member entries[VMEM_KV_POOL_MEMBERS];
};

// The process in a place of the file. It lies behind the table, so that it is not read with it.
struct pool_process {
    uint64_t began; // the process's start, in /proc's ticks
    uint64_t space; // the namespaces that pid and `began` belong to; processes of others cannot be looked up
    uint32_t pid;   // 0: unknown
    uint32_t pad;
};

#define POLL_MS 100 // longest time between two rounds of the thread, and before an entry's changes are written
#define REFUSED_NS UINT64_C(2000000000) // budget that the device has refused memory for is tried again after this time
#define POOL_WAIT_US 50000   // longest wait for the file's lock: of the thread, and of the end of a cache or pool
#define POOL_CALL_US 1000000 // the same of other calls

// Four amounts of one member, the first two in bytes and the others in pages:
//
//   entry.has   the member's part of the pool's budget, as others see it; falls only when memory is back on the device
//   entry.held  the member's pages, as others see them
//   s.budget  the most pages that the member may have now; less than entry.has by `granted` and by what it is giving
//   s.held    the member's pages; at most s.budget, unless the budget has just shrunk
struct vmem__member {
    struct vmem__member *next;
    struct vmem_kv_pool *pool;
    const struct vmem__member_ops *ops;
    void *self;
    vmem_context *ctx;
    uint32_t page_shift;
    uint32_t place;               // the index of the member's entry in the table
    struct vmem__remnant remnant; // pages that stay after the member has left, and its entry with them
    bool busy;                    // the pool's thread serves the member now, without the pool's lock
    bool releasing;               // at the last look, pages were about to go: see struct vmem__member_state
    bool leaving;                 // the member is being destroyed: the thread leaves it alone
    bool unwritten;               // the entry could not be written into the table
    int table_error;              // of the last claim that could not read the table: a negative errno; 0: none
    struct vmem_kv_pool_member entry, written; // the entry as it is now, and as the table has it
    uint64_t written_at;                       // ns
    uint32_t waiting;                          // calls that wait for an answer
    uint64_t asked_at;                         // ns
    uint64_t told_at;          // ns, when a call learned that the last question was refused; 0: none has
    uint64_t freed_at_refusal; // vmem_kv_pool.freed when the round began that refused the last question
    uint64_t granted;          // bytes in entry.has that the member's budget does not have yet
    uint64_t to_give;          // bytes that the member is to give back
    uint64_t saw_revision;     // number of the last question that had been asked when the thread looked at the member
    // Members of one context hand device memory over: memory that one frees stays in the context for those that wait.
    uint64_t waits_for; // bytes beyond its pages that the member waits for, as it has told the context
    // Bytes that the member no longer has and that the context keeps. They stay in entry.has until another entry has
    // them. If none takes them, the next look at the member returns them to the device.
    uint64_t retained_bytes;
};

struct vmem_kv_pool {
    struct pool_process process; // this process
    struct vmem_kv_pool *next;   // the next pool of this process
    pthread_mutex_t lock;
    pthread_cond_t news; // a member was answered, or is not busy any more
    pthread_t thread;
    bool has_thread, stop;
    uint32_t refs; // references: one of the creator, and one of each member
    pid_t pid;
    struct vmem__member *members; // of this process
    struct pool_table table;
    struct pool_head written; // the table's head as the file has it
    // Each entry as it was when its member last owed nothing or answered, and that time by `ran`: see note_replies.
    struct pool_seen {
        struct vmem_kv_pool_member entry;
        uint64_t at;
    } seen[VMEM_KV_POOL_MEMBERS];
    _Atomic uint64_t free;  // free bytes when the table was last read
    _Atomic bool needed;    // some member asked for more when the table was last read
    _Atomic uint64_t freed; // how often a member has said that it can give more: vmem__pool_wake
    uint64_t freed_before;  // `freed` when the current round began
    uint64_t budget;        // the budget that the file began with; 0: no file is open
    char *path;             // NULL: the pool is of this process alone
    int fd;                 // of the file, whose locks show which members live
    int bell, watch;        // eventfd that wakes the thread; inotify's descriptor, -1: none
    uint64_t refusals;      // the head's number that this process has seen last, and when; 0 ns: its time is over
    uint64_t refused_at;
    uint64_t reaped_at; // ns, when the table was last cleared of dead members
    // ns that the thread has run: of the time between two of its rounds, at most ROUND_NS count. Others are waited for by
    // this clock, so that time in which this process itself was stopped is nobody's silence.
    uint64_t ran, round_at;
    uint64_t locked_at; // of `ran`, when the thread last found the file not locked by another process
};

// ---- claim.c. With the pool's lock held; those that name a place also between begin and end.

// Has the thread look at the members now. No lock is needed.
void vmem__pool_ring(const vmem_kv_pool *pool);
// From now on, the context retains up to `bytes` of the memory that others free, for this member.
void vmem__pool_retain(struct vmem__member *m, uint64_t bytes);
void vmem__pool_answer(struct vmem__member *m, uint32_t what, uint32_t why);
// Checks that the member in that place can have this share: -EINVAL or -ENOMEM. A maximum of 0, or beyond the pool's
// budget, becomes the budget.
int vmem__pool_check(const vmem_kv_pool *pool, uint32_t place, uint64_t min, uint64_t *max);
// Takes what the member has been granted out of `granted`, and returns it in pages, by which its budget grows. The pool's
// thread calls it, or a call that is short, whichever comes first.
uint64_t vmem__pool_accept(struct vmem__member *m);

// ---- balance.c

void *vmem__pool_work(void *pool); // the thread

// ---- table.c. With the pool's lock held, except for open and close.

// Resets this file's locks in a forked child: at the fork, another thread of the parent may have had them.
void vmem__table_forked(void);
// Opens the file or makes it. cfg_budget as in struct vmem_kv_pool_config.
int vmem__table_open(vmem_kv_pool *pool, const char *path, uint64_t budget);
void vmem__table_close(vmem_kv_pool *pool);
// Locks the file and reads the table. Waits up to most_us for the lock; between its tries, other threads can have the
// pool's lock. -EAGAIN: another process has the file's; -EBADMSG: the file's contents are no table.
int vmem__table_begin(vmem_kv_pool *pool, unsigned most_us);
// Writes the head, if it changed, and members' entries that changed, and unlocks the file. A member whose entry could
// not be written has no more budget than the last entry that was.
void vmem__table_end(vmem_kv_pool *pool);
// The bytes that the member (NULL: a new one) may take: those that no member has, less what is due to other members'
// minimums.
uint64_t vmem__pool_free_bytes(const vmem_kv_pool *pool, const struct vmem__member *m);
int vmem__table_unwritten(const vmem_kv_pool *pool); // the error of a call whose entry could not be written
// Between begin and end: these take a place for a member (-EAGAIN: it is taken), give it back, and empty the entries of
// members whose process has ended.
int vmem__table_take_place(const vmem_kv_pool *pool, uint32_t place);
void vmem__table_leave_place(vmem_kv_pool *pool, uint32_t place, bool damaged);
void vmem__table_reap(vmem_kv_pool *pool);
// Removes the file if no process has it open.
void vmem__table_remove(vmem_kv_pool *pool);

static inline bool pool_owns(const vmem_kv_pool *pool, uint32_t place)
{
    for (const struct vmem__member *m = pool->members; m; m = m->next)
        if (m->place == place)
            return true;
    return false;
}

// In the member's pages.
static inline uint64_t floor_pages(uint64_t bytes, const struct vmem__member *m) { return bytes >> m->page_shift; }
static inline uint64_t ceil_pages(uint64_t bytes, const struct vmem__member *m)
{
    return (bytes >> m->page_shift) + (bytes & ((UINT64_C(1) << m->page_shift) - 1) ? 1 : 0);
}

#endif
