// A pool of budget: what its files share. From above: pool.c creates pools and takes members in; balance.c moves budget
// between members; claim.c says what each may have and asks for it; table.c keeps the table in a file where the members
// are in several processes.
//
// Locks, in this order: a member's lock, the pool's lock, the file's lock. A member that is short takes the pool's lock
// while it holds its own, for a few us: it reads and writes the table, and never waits for the file's lock. The pool's
// thread takes the lock of one member at a time, and none of them while it holds the pool's. So no call ever waits for
// another member. Backends are called with neither the pool's nor the file's lock held.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_POOL_H
#define VMEM_POOL_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/core.h"
#include "core/memory.h"
#include "pool/member.h"

struct pool_head {
    uint64_t magic;
    uint32_t size, rows; // sizeof(struct pool_table), VMEM_KV_POOL_MEMBERS
    uint64_t budget;
    uint64_t revision;      // of the last question
    uint8_t device[16];     // uuid; zero on the host
    char backend[16];       // of the host, "host"; else "gpu", as pages of every backend come out of the same memory
    uint64_t refused;       // bytes of the budget that the device has no memory for, until then: vmem__pool_refused
    uint64_t refused_until; // vmem__now()
};

// The file:
//
//     struct pool_head            byte 0 locks the file
//     rows[0 .. 31]               a member each: its share, what it has and needs. Byte 1 + i is locked while it lives
//     struct pool_process[0 .. 31]   whose the members are
//     struct pool_process[32 .. 95]  who has the file open; byte 1 + i is locked meanwhile
//
// A row is written by its own process alone, except that anybody empties the row of a dead one. Size 0: nobody. How
// budget goes from one member to another, by their rows (`needs`, `giving` and `has` of both):
//
//     getter                                 giver
//     needs = n: a question, a revision  ->  could_give >= n: giving = n, and pages go
//                                            trim: their memory is back on the device
//     has += n, needs = 0: granted       <-  has -= n, giving = 0: the budget is free
//     budget += n: answer is applied         or, with nothing to give: reply is refused, and so is the answer
struct pool_table {
    struct pool_head head;
    struct vmem_kv_pool_member rows[VMEM_KV_POOL_MEMBERS];
};

// The process in a place of the file. It lies behind the table, so that it is not read with it.
struct pool_process {
    uint64_t began; // when, as /proc says
    uint64_t space; // of PIDs and of `began`: processes of another one cannot be looked up
    uint32_t pid;   // 0: not known
    uint32_t pad;
};

// A question for budget lapses after this time, unless repeated or waited for: 250 ms. Tests change it, so that they do
// not depend on the machine's speed.
extern _Atomic uint64_t vmem__pool_ask_ns;

#define POLL_MS 100          // longest delay of reading the others' rows without a notice, and of updating ours
#define POOL_WAIT_US 50000   // longest wait for the file's lock: of the thread, and of the end of a cache or pool
#define POOL_CALL_US 1000000 // the same of other calls

// Which unused memory of its context a member's next look returns to the device.
enum trimming { TRIM_NOTHING, TRIM_UNWANTED, TRIM_ALL };

// Five amounts of one member, the first two in bytes and the others in pages:
//
//   row.has   what the member has of the pool's budget, as the others see it; falls once memory is back on the device
//   row.held  its pages, as the others see them
//   s.budget  the most pages that the member itself may have; behind row.has by `granted`, and by what it is giving
//   s.held    its pages; at most s.budget, unless the budget has just shrunk
//   s.used    of these, the pages that it could not use for anything else
struct vmem__member {
    struct vmem__member *next;
    struct vmem_kv_pool *pool;
    const struct vmem__member_ops *ops;
    void *self;
    vmem_context *ctx;
    uint32_t page_shift;
    bool whole;                              // as in struct vmem__member_terms
    uint32_t place;                          // in the table
    struct vmem__remnant remnant;            // of one that has left: its row stays while pages do
    bool busy;                               // the pool's thread is at it, without the pool's lock
    bool leaving;                            // it is being destroyed: the thread leaves it alone
    bool unwritten;                          // it could not be written into the table
    int kept_out;                            // why it could not read the table when it last claimed: a negative errno
    struct vmem_kv_pool_member row, written; // as it is, and as it is in the table
    uint64_t written_at;                     // ns
    uint32_t waiting;                        // calls that wait for an answer
    uint64_t asked_at;                       // ns
    uint64_t told_at;                        // ns, when it was told of the refusal of its last question; 0: it was not
    uint64_t freed;                          // the counter vmem_kv_pool.freed when the round began that refused
    uint64_t granted;                        // bytes in row.has that the member's budget does not have yet
    uint64_t announced_pages;                // the pages there will be with the requests that wait; 0: not known
    uint64_t announced_at;                   // ns
    bool reserving;        // of the announced pages, the budget gets only ready_bytes, and no call takes free budget
    uint64_t ready_bytes;  // that the budget can grow by without asking the device for memory
    uint64_t to_give;      // bytes that the member is to give back
    uint64_t saw_revision; // the last question before the thread looked at the member
    // Members of one context hand device memory over: what one frees stays in the context for those who wait.
    uint64_t wants; // bytes beyond its pages that the member waits for, as the context knows it
    uint64_t
        retained_bytes; // that the member no longer has and the context kept: its row states them until another's does
    enum trimming trim; // ALL: retained memory that no row may state any more. UNWANTED: the member waits no longer
};

struct vmem_kv_pool {
    struct pool_process process; // this one
    struct vmem_kv_pool *next;   // of all in this process
    pthread_mutex_t lock;
    pthread_cond_t news; // a member was answered, or is not busy any more
    pthread_t thread;
    bool has_thread, stop;
    uint32_t refs; // its creator, and members
    pid_t pid;
    struct vmem__member *members; // of this process
    struct pool_table table;
    struct pool_head written; // its head, as it is in the file
    // The rows as they were when a member last did what the others expect of it, and when that was (ns).
    struct pool_seen {
        struct vmem_kv_pool_member row;
        uint64_t at;
    } seen[VMEM_KV_POOL_MEMBERS];
    _Atomic uint64_t free;  // bytes, as the table was last seen
    _Atomic bool needed;    // some member asked for more when the table was last seen
    _Atomic uint64_t freed; // counts what may have become free: vmem__pool_wake
    uint64_t freed_before;  // the same when the present round began
    uint64_t budget;        // that the file began with; 0: no file is open
    char *path;             // NULL: in this process only
    int fd;                 // of the file, whose locks say who lives
    int bell, watch;        // eventfd that wakes the thread; inotify's descriptor, -1: none
    uint64_t reaped_at;     // ns, when the table was last cleared of dead members
    uint64_t locked_at;     // ns, when the thread last found the file not locked by another process
};

// ---- pool.c

// With the pool's lock held: waits at most `ms` for the answer to the member's last request.
uint32_t vmem__pool_wait(struct vmem__member *m, uint32_t ms);

// ---- claim.c. With the pool's lock held; those that name a place or change shares also between begin and end.

// From now on, the context retains up to `bytes` of the memory that others free, for this member.
void vmem__pool_retain(struct vmem__member *m, uint64_t bytes);
void vmem__pool_answer(struct vmem__member *m, uint32_t what, uint32_t why);
// -EINVAL or -ENOMEM unless the member in that place can have this share. A maximum of 0 or too much becomes the pool's
// budget.
int vmem__pool_check(const vmem_kv_pool *pool, uint32_t place, uint64_t min, uint64_t *max);
// Begins and ends itself. The member follows when the thread looks at it, or with vmem__pool_keep_to_max.
int vmem__pool_set_share(struct vmem__member *m, uint64_t min, uint64_t max, uint32_t *why);
// The bytes of the pool's grants that the budget may have now; and a call that lets it grow by them, and returns the pages.
// The pool's thread calls it, or a call that is short, whichever comes first.
uint64_t vmem__pool_acceptable_bytes(const struct vmem__member *m);
uint64_t vmem__pool_accept(struct vmem__member *m);

// With the member's lock held, and not the pool's: forgets the requests that wait when the member uses the pages for
// them, or nobody has asked for them for some time.
void vmem__pool_expire_announced(struct vmem__member *m, uint64_t used);
// With no lock held: takes some device memory for requests that wait. True: another round is due at once.
bool vmem__pool_prealloc(struct vmem__member *m);

// ---- balance.c

void *vmem__pool_work(void *pool); // the thread
// With the member's lock held, and not the pool's: after a change of its share, and not only when the thread looks.
void vmem__pool_keep_to_max(struct vmem__member *m);

// ---- table.c. With the pool's lock held, except for open and close.

// In a forked child, whose parent's other threads may have been at a file.
void vmem__table_forked(void);
// Opens the file or makes it. cfg_budget as in struct vmem_kv_pool_config.
int vmem__table_open(vmem_kv_pool *pool, const char *path, uint64_t budget);
void vmem__table_close(vmem_kv_pool *pool);
// Locks the file and reads the table. Does not wait: -EAGAIN says that another process is at it, and -EBADMSG that what
// is there is no table.
int vmem__table_begin(vmem_kv_pool *pool);
// The same, but tries for so long. Meanwhile, others have the pool's lock.
int vmem__table_wait(vmem_kv_pool *pool, unsigned most_us);
// Writes the head, if it changed, and members' rows that changed, and unlocks the file. A member whose row could not be
// written has no more budget than the last row that was.
void vmem__table_end(vmem_kv_pool *pool);
// The bytes that the member (NULL: a new one) may take: those that no member has, less what is due to other members'
// minimums.
uint64_t vmem__pool_free_bytes(const vmem_kv_pool *pool, const struct vmem__member *m);
int vmem__table_unwritten(const vmem_kv_pool *pool); // the error of a call whose row could not be written
// Between the two: takes a place for a member, gives it back, and empties the rows of members whose process has ended.
// -EAGAIN: somebody else is in that place.
int vmem__table_take_place(const vmem_kv_pool *pool, uint32_t place);
void vmem__table_leave_place(vmem_kv_pool *pool, uint32_t place, bool damaged);
void vmem__table_reap(vmem_kv_pool *pool);
// Removes the file if nobody is in it.
void vmem__table_remove(vmem_kv_pool *pool);

static inline bool pool_owns(const vmem_kv_pool *pool, uint32_t place)
{
    for (const struct vmem__member *m = pool->members; m; m = m->next)
        if (m->place == place)
            return true;
    return false;
}

static inline void pool_ring(const vmem_kv_pool *pool)
{
    const uint64_t one = 1;
    (void)!write(pool->bell, &one, sizeof one); // should it be full, the thread has not looked yet
}

// In the member's pages.
static inline uint64_t floor_pages(uint64_t bytes, const struct vmem__member *m) { return bytes >> m->page_shift; }
static inline uint64_t ceil_pages(uint64_t bytes, const struct vmem__member *m)
{
    return (bytes >> m->page_shift) + (bytes & ((UINT64_C(1) << m->page_shift) - 1) ? 1 : 0);
}

#endif
