// A pool of budget: what its two files share. pool.c moves budget between members; share.c keeps the table in a file
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

struct kv_member {
    struct kv_member *next;
    struct vmem_kv_pool *pool;
    vmem_kv *kv;
    uint32_t place; // in the table
    bool busy;      // the pool's thread is at it, without the pool's lock
    bool leaving;   // it is being destroyed: the thread leaves it alone
    bool changed;   // the row differs from the table's
    struct kv_pool_row row;
    uint64_t asked_at;   // ns; a question that is not repeated lapses
    uint64_t refused_at; // ns
    uint64_t granted;    // bytes in row.has that the cache's budget does not have yet
    uint64_t to_give;    // bytes that the cache is to give back
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
    _Atomic uint64_t free; // bytes, as the table was last seen
    char *path;            // NULL: in this process only
    int fd;                // of the file, whose locks say who lives
    int bell, watch;       // eventfd that wakes the thread; inotify's descriptor, -1: none
    uint64_t buried_at;    // ns, when the table was last cleared of dead members
    uint64_t written_at;   // ns
};

// ---- share.c. With the pool's lock held, except for open and close.

// Opens the file or makes it. cfg_budget as in struct vmem_kv_pool_config.
int vmem__kv_share_open(vmem_kv_pool *pool, const char *path, uint64_t budget);
void vmem__kv_share_close(vmem_kv_pool *pool);
// Locks the file and reads the table. wait: for some ms at most; else not at all. -EAGAIN: another process is at it;
// -EBADMSG: what is there is no table.
int vmem__kv_share_begin(vmem_kv_pool *pool, bool wait);
// Writes the head, if it changed, and members' rows that changed, and unlocks the file.
void vmem__kv_share_end(vmem_kv_pool *pool, bool head);
// Between the two: takes a place for a member, gives it back, and empties the rows of members whose process has ended.
int vmem__kv_share_take(vmem_kv_pool *pool, uint32_t place);
void vmem__kv_share_give(vmem_kv_pool *pool, uint32_t place);
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

#endif
