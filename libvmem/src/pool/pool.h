// A pool of budget: what its two files share. balance.c moves budget between members; table.c keeps the table in a file
// where the members are in several processes.
//
// Locks, in this order: a cache's api and state, the pool's lock, the file's lock. A step that is short takes the
// pool's lock while it holds its cache's, for a few us: it reads and writes the table, and never waits for the file's
// lock. The pool's thread takes the locks of one cache at a time, and none of them while it holds the pool's. So no
// call ever waits for another cache. Backends are called with neither the pool's nor the file's lock held.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_POOL_H
#define VMEM_KV_POOL_H

#include <unistd.h>

#include "kv/kv.h"

// A member, as others see it. Written by its own process alone, except that anybody empties the row of a dead one.
struct kv_pool_row {
    uint64_t number; // of the join; 0: nobody
    uint64_t min, max, has, held, needs, could_give, giving;
    uint64_t asked, looked;
    uint32_t answer, reason, reply, why;
    uint32_t pid, pad;
    char name[64];
};

struct kv_pool_head {
    uint64_t magic;
    uint32_t size, rows; // sizeof(struct kv_pool_table), VMEM_KV_POOL_MEMBERS
    uint64_t budget;
    uint64_t revision; // of the last question
    uint64_t joins;
    uint8_t device[16]; // uuid; zero on the host
    char backend[16];   // of the host, "host"; else "gpu", as pages of every backend come out of the same memory
};

struct kv_pool_table {
    struct kv_pool_head head;
    struct kv_pool_row rows[VMEM_KV_POOL_MEMBERS];
};

// A question for budget lapses after this time, unless repeated or waited for: 250 ms. Tests change it, so that they do
// not depend on the machine's speed.
extern _Atomic uint64_t vmem__kv_ask_ns;

#define KV_POOL_WAIT_US 50000   // longest wait for the file's lock: of the thread, and of the end of a cache or pool,
#define KV_POOL_CALL_US 1000000 // and of other calls

struct kv_member {
    struct kv_member *next;
    struct vmem_kv_pool *pool;
    vmem_kv *kv;
    uint32_t place;                  // in the table
    bool busy;                       // the pool's thread is at it, without the pool's lock
    bool leaving;                    // it is being destroyed: the thread leaves it alone
    bool changed;                    // the row is to be written
    struct kv_pool_row row, written; // as it is, and as it was last put into the table
    uint64_t written_at;             // ns
    uint32_t waiting;                // calls that wait for an answer
    uint64_t asked_at;               // ns
    uint64_t refused_at;             // ns
    bool taken_ahead;                // the thread took device memory for them
    uint64_t granted;                // bytes in row.has that the cache's budget does not have yet
    bool prepares;    // the budget gets of them only what is ready, and no call takes free budget of the pool
    uint64_t ready;   // bytes that the budget can grow by without asking the device for memory
    uint64_t to_give; // bytes that the cache is to give back
    uint64_t saw;     // the last question before the thread looked at the cache
    uint64_t (*evict)(void *arg, uint64_t pages);
    void *arg;
};

struct vmem_kv_pool {
    struct vmem_kv_pool *next; // of all in this process
    pthread_mutex_t lock;
    pthread_cond_t news; // a member was answered, or is not busy any more
    pthread_t thread;
    bool has_thread, stop;
    uint32_t refs; // its creator, and members
    pid_t pid;
    struct kv_member *members; // of this process
    struct kv_pool_table table;
    // The rows as they were when a member last did what the others expect of it, and when that was (ns).
    struct kv_pool_seen {
        struct kv_pool_row row;
        uint64_t at;
    } seen[VMEM_KV_POOL_MEMBERS];
    _Atomic uint64_t free; // bytes, as the table was last seen
    uint64_t budget;       // that the file began with; 0: no file is open
    char *path;            // NULL: in this process only
    int fd;                // of the file, whose locks say who lives
    int bell, watch;       // eventfd that wakes the thread; inotify's descriptor, -1: none
    uint64_t buried_at;    // ns, when the table was last cleared of dead members
    uint64_t locked_at;    // ns, when the thread last found the file not locked by another process
};

// ---- balance.c. With the pool's lock held; those that name a place or change shares also between begin and end.

// What the member (NULL: anybody new) may take: what nobody has, less what other members' minimums are still due.
uint64_t vmem__kv_pool_free(const vmem_kv_pool *pool, const struct kv_member *m);
void vmem__kv_pool_note(vmem_kv_pool *pool); // the same, for those who have no lock
void vmem__kv_pool_answer(struct kv_member *m, uint32_t what, uint32_t why);
// Whether the member in that place can have this share; a maximum of 0 or too much becomes the pool's budget.
int vmem__kv_pool_check(const vmem_kv_pool *pool, uint32_t place, uint64_t min, uint64_t *max);
// Begins and ends itself. The cache follows when the thread looks at it.
int vmem__kv_pool_set_share(struct kv_member *m, uint64_t min, uint64_t max, uint32_t *why);
void *vmem__kv_pool_work(void *pool); // the thread
// ask.c: asks the other members. What may still come, in bytes.
uint64_t vmem__kv_pool_ask(struct kv_member *m, uint64_t bytes);
// ask.c, with api and state held: forgets the requests that wait when they have what they need, or nobody has asked
// for them any more for some time.
void vmem__kv_look_ahead(struct kv_member *m);
// ask.c, with no lock held: takes some device memory for requests that wait. True: another round is due at once.
bool vmem__kv_prepare(struct kv_member *m);
// With api and state held, and not the pool's lock: raises the budget by up to `most` pages of what is free. `least` of
// them are worth a look into the table, whatever is known of it. False: another process was at the table.
bool vmem__kv_claim(vmem_kv *kv, uint64_t least, uint64_t most);

// ---- table.c. With the pool's lock held, except for open and close.

// Opens the file or makes it. cfg_budget as in struct vmem_kv_pool_config.
int vmem__kv_share_open(vmem_kv_pool *pool, const char *path, uint64_t budget);
void vmem__kv_share_close(vmem_kv_pool *pool);
// Locks the file and reads the table. Does not wait: -EAGAIN says that another process is at it, and -EBADMSG that what
// is there is no table.
int vmem__kv_share_begin(vmem_kv_pool *pool);
// The same, but tries for so long. Meanwhile, others have the pool's lock.
int vmem__kv_share_wait(vmem_kv_pool *pool, unsigned most_us);
// Writes the head, if it changed, and members' rows that changed, and unlocks the file. A member whose row could not be
// written stays `changed`, and has no more budget than the last row that was.
void vmem__kv_share_end(vmem_kv_pool *pool, bool head);
int vmem__kv_share_unwritten(const vmem_kv_pool *pool); // the error of a call whose row could not be written
// Between the two: takes a place for a member, gives it back, and empties the rows of members whose process has ended.
int vmem__kv_share_take(vmem_kv_pool *pool, uint32_t place);
void vmem__kv_share_give(vmem_kv_pool *pool, uint32_t place, bool damaged);
void vmem__kv_share_bury(vmem_kv_pool *pool);
// Removes the file if nobody is in it.
void vmem__kv_share_remove(vmem_kv_pool *pool);

static inline bool kv_own(const vmem_kv_pool *pool, uint32_t place)
{
    for (const struct kv_member *m = pool->members; m; m = m->next)
        if (m->place == place)
            return true;
    return false;
}

static inline void kv_ring(const vmem_kv_pool *pool)
{
    const uint64_t one = 1;
    (void)!write(pool->bell, &one, sizeof one); // should it be full, the thread has not looked yet
}

static inline uint64_t kv_add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

// What other members wait for, in bytes. Call it between begin and end.
static inline uint64_t kv_needs_of_others(const vmem_kv_pool *pool, const struct kv_member *m)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct kv_pool_row *r = &pool->table.rows[i];
        if (r->number && i != m->place && r->answer == VMEM_KV_DEFERRED)
            bytes = kv_add(bytes, r->needs);
    }
    return bytes;
}

// Lowers the budget. A check of the books must not take pages that were created under the old one for too many.
static inline void kv_shrink_budget(vmem_kv *kv, uint64_t pages)
{
    kv->ceiling = KV_MAX(kv->ceiling, kv->held);
    kv->budget_pages = pages;
}

static inline void kv_lock_cache(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->api);
    pthread_mutex_lock(&kv->state);
}

static inline void kv_unlock_cache(vmem_kv *kv)
{
    vmem__kv_summarise(kv);
    pthread_mutex_unlock(&kv->state);
    pthread_mutex_unlock(&kv->api);
}

#endif
