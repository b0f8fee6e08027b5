// Pools: one budget for several KV caches; and what other processes see of a cache.
//
// A pool is one budget for several caches: a target and its draft, two models, or a user's processes on one device. The
// budgets of its members never exceed the pool's in total. A member's budget changes automatically between its minimum,
// which is guaranteed, and its maximum. A step that needs more, dry or not, takes what is free in the pool at once. If
// that is too little, it returns -ENOMEM, and the pool asks the other members. They give back unused budget, kept pages
// and pages ahead of need, down to their minimum, but never pages that a request needs. An idle member (idle_ms) keeps
// only its minimum. The pool's thread does all this. No step waits for it, and it unmaps in parts of a few ms. It keeps
// no queue: beside members that ask again and again, only the minimum is sure to come.
//
// With a path, the members may be in several processes. Only this user may access the file at the path. The pool ends
// with its last member. When a process ends, in whatever way, its budget returns to the pool. There is no daemon.
//
// Errors and thread safety are as in vmem_kv.h.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_POOL_H
#define VMEM_KV_POOL_H

#include "vmem_kv.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vmem_kv_pool vmem_kv_pool;

#define VMEM_KV_POOL_MEMBERS 32 // the most caches of a pool

// Grows at its end: a field that the caller does not know is 0.
struct vmem_kv_pool_config {
    uint32_t size;    // sizeof(struct vmem_kv_pool_config)
    uint32_t flags;   // 0
    uint64_t budget;  // bytes of all members together. 0, with a path: as it is there
    const char *path; // of the pool's file, which is made if it is not there; NULL: for this process alone
};
// -EINVAL: the pool at the path has another budget. -EPERM: others than this user may access the file. -EBADMSG: the file
// holds something else. -ENOSPC: 64 others have the file open, or the file system is full.
int vmem_kv_pool_create(const struct vmem_kv_pool_config *cfg, vmem_kv_pool **out);
// In this process, the pool ends when its last member has left. NULL is allowed.
void vmem_kv_pool_destroy(vmem_kv_pool *pool);

// Grows at its end: a field that the caller does not know is 0.
struct vmem_kv_pool_share {
    uint32_t size;     // sizeof(struct vmem_kv_pool_share)
    uint32_t pad;      // 0
    uint64_t min, max; // bytes; max 0: the pool's budget
    const char *name;  // what others see; NULL: "kv"
};
// Makes a cache a member. From then on, the pool sets its budget, and the cache allocates device memory as with
// VMEM_KV_LAZY. Create it with this flag and a budget of one page. vmem_kv_destroy leaves the pool. -ENOMEM: the
// minimums, or the cache's pages, exceed the pool's budget. -ENOSPC: the pool has no place for another member.
// -EINVAL: the cache is already a member, or is on another device than the other members.
int vmem_kv_pool_join(vmem_kv_pool *pool, vmem_kv *kv, const struct vmem_kv_pool_share *share);
// Changes a member's share; max 0 means the pool's budget. The member gives back what exceeds the maximum: before the
// call returns if no request needs it, otherwise when these requests end.
int vmem_kv_pool_set_share(vmem_kv *kv, uint64_t min, uint64_t max);

// The answer to a member's last request for memory, which lapses after 250 ms.
enum vmem_kv_answer {
    VMEM_KV_UNASKED,
    VMEM_KV_APPLIED,  // it is granted completely
    VMEM_KV_DEFERRED, // other members have not yet given back or answered
    VMEM_KV_REFUSED,  // for the reason given; it is repeated while the member tries
};
enum vmem_kv_refusal {
    VMEM_KV_NOT_REFUSED,
    VMEM_KV_AT_MAXIMUM,   // the member would exceed its own maximum
    VMEM_KV_AT_MINIMUM,   // the others have only their minimums
    VMEM_KV_IN_USE,       // requests of the others need the rest
    VMEM_KV_NO_MEMORY,    // the device has too little memory
    VMEM_KV_FILE_DAMAGED, // the pool's file was truncated or overwritten, or cannot be written
    VMEM_KV_NO_ANSWER,    // another process has not answered for two seconds: it is stopped, or hangs
};
// Waits at most `ms` until the member's last request is answered. *answer, or NULL: an enum vmem_kv_answer.
int vmem_kv_pool_wait(vmem_kv *kv, uint32_t ms, uint32_t *answer);

// Grows at its end. Processes that share a pool need the same version of it.
struct vmem_kv_pool_member {
    uint32_t size;     // sizeof(struct vmem_kv_pool_member), set by the caller
    uint32_t pid;      // of its process
    uint64_t min, max; // its share
    uint64_t has;      // bytes of the pool's budget: its own budget, and what it has not yet given back of a larger one
    uint64_t held;     // bytes of pages
    uint64_t needs;    // bytes that it asks for
    uint64_t could_give; // bytes that others could get: unused, kept, ahead of need, evictable, or offered
    uint64_t giving;     // bytes that it is giving back
    uint64_t asked;      // revision of its last question for memory; 0: none
    uint64_t looked;     // it has answered the questions of others up to this revision
    uint32_t answer;     // to its own question: enum vmem_kv_answer
    uint32_t reason;     // enum vmem_kv_refusal
    uint32_t reply;      // its answer to the others: applied, deferred (it is giving), refused
    uint32_t why;        // enum vmem_kv_refusal
    char name[64];
    uint32_t gives_first; // 1: the others give only what it cannot, as what it gives is somewhere else, too
    uint32_t holds_back;  // changes while it leaves a question to members of other processes that give first
};
struct vmem_kv_pool_info {
    uint32_t size;     // sizeof(struct vmem_kv_pool_info), set by the caller
    uint32_t members;  // of all processes
    uint64_t budget;   // bytes
    uint64_t free;     // bytes of it that no member has
    uint64_t revision; // of the last question, or look
};
int vmem_kv_pool_query(vmem_kv_pool *pool, struct vmem_kv_pool_info *out);
// Has every member look at itself now, and waits at most `ms` for it. Else what get_members says that one could give may
// be 200 ms old. A member whose process does not answer in time keeps the entry that it wrote last.
int vmem_kv_pool_look(vmem_kv_pool *pool, uint32_t ms);
// Describes all members at one moment. out: VMEM_KV_POOL_MEMBERS structures, of which the first *found are filled.
int vmem_kv_pool_get_members(vmem_kv_pool *pool, struct vmem_kv_pool_member *const *out, uint32_t *found);

// ---- memory of others -----------------------------------------------------------------------------------------
//
// A hold is a member that stands for memory which is not libvmem's: common memory (vmem_common.h) that nobody else in the
// pool counts. It needs no context on the device.

typedef struct vmem_kv_hold vmem_kv_hold;

struct vmem_kv_hold_config {
    uint32_t size;      // sizeof(struct vmem_kv_hold_config)
    uint32_t gpu;       // 1: the memory is a GPU's; 0: the host's
    uint8_t device[16]; // the GPU's UUID, as in struct vmem_info
    const char *name;   // what others see; NULL: "common"
};
// A member that holds nothing yet. ctx: any context of this process, such as one of the host's; it must outlive the hold.
// Errors as of vmem_kv_pool_join.
int vmem_kv_hold_create(vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_kv_hold_config *cfg,
                        vmem_kv_hold **out);
// The bytes become free. NULL is allowed.
void vmem_kv_hold_destroy(vmem_kv_hold *hold);
// Holds `bytes` altogether, a multiple of 2 MiB: what it held before, or more. *missing (NULL is allowed) receives the bytes
// that the pool has not got, 0 if it now holds them; else it holds what it did, and the other members are asked. The
// question lapses after 250 ms unless the call is repeated. Fewer bytes than before: the memory must have gone.
int vmem_kv_hold_set(vmem_kv_hold *hold, uint64_t bytes, uint64_t *missing);
// Says that `bytes` of what is held can be given up. *wanted (NULL is allowed): the bytes of it that other members want.
int vmem_kv_hold_offer(vmem_kv_hold *hold, uint64_t bytes, uint64_t *wanted);

// ---- what other processes see -------------------------------------------------------------------------------

#define VMEM_KV_VIEW_MAGIC UINT64_C(0x31776569766b6d76) // "vmkview1"
struct vmem_kv_view {
    uint64_t magic;
    uint32_t pid;
    uint32_t size;     // sizeof(struct vmem_kv_view)
    uint64_t sequence; // odd while the manager writes
    char name[64];     // as given
    char backend[16];
    int32_t device;
    uint32_t reserved;
    struct vmem_kv_stats stats;
    struct vmem_kv_pool_member pool; // the member's entry; size 0: in no pool
    char pool_path[256];             // where its file is, if it has one; or the end of the path
};

#ifdef __cplusplus
}
#endif
#endif
