// The contract between a pool and its members.
//
// A pool divides one budget among its members. A member is anything that holds pages within a budget: a KV cache, or
// numbered blocks. The pool is below its members: they call its functions, and it knows each of them by a table of
// functions, struct vmem__member_ops.
//
// A member must do this:
// - It keeps its own budget, in pages of its own size, and never has more pages than that, those in the making included.
//   After vmem__pool_join the budget is what the pool granted; 0 is a normal grant. It changes only by raise_budget,
//   lower_budget and continue_lowering, and by what claim and announce return.
// - It has a lock that guards the budget and all that `state` reports. The pool's thread takes it for microseconds, one
//   member at a time, and holds none of the pool's locks meanwhile.
// - Before a call fails for want of budget, it claims. What the claim does not find, it asks for, and reports the shortage.
//   The thread then raises the budget while the other members give, or the question is refused.
// - It wakes the pool when it has given back pages that others wait for.
// - Its destruction first calls leave, without its lock and before pages are released; and left once no page exists any more.
//   Between the two, none of its functions is called; leave itself trims.
//
// Locks, in this order: a member's lock, the pool's lock, the lock of the pool's file.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_POOL_MEMBER_H
#define VMEM_POOL_MEMBER_H

#include <stdbool.h>
#include <stdint.h>

#include "vmem_kv_pool.h"

// A member's entry in a pool. The pool makes it, and frees it in `left`.
struct vmem__member;

// A member's state, which the pool reads before it decides. In pages.
struct vmem__member_state {
    uint64_t budget;    // the most pages that the member may have
    uint64_t held;      // pages that exist or are in the making
    uint64_t pinned;    // of these, that the member could not take back for other uses of its own
    uint64_t target;    // the budget once the member has shrunk as it was told
    uint64_t min_pages; // the smallest size to which the member can shrink now without breaking a promise to a caller
    uint64_t evictable; // of `min_pages`, what evict could free
    uint64_t margin;    // beyond `min_pages`, pages that the member needs to go on without asking at once
};

// The functions of a member that the pool's thread calls. "Locked" means between lock and unlock. NULL is allowed where
// it says so.
struct vmem__member_ops {
    void (*lock)(void *self);
    void (*unlock)(void *self);

    // Locked. Fills in the state.
    void (*get_state)(void *self, struct vmem__member_state *out);
    // Locked. The budget grows by so many pages.
    void (*raise_budget)(void *self, uint64_t pages);
    // Locked. The member shrinks to `pages`, which is at least `min_pages` as get_state has just said it. It may do so at
    // once, or in portions: then `target` is less than the budget, which falls as the pages go, by itself or in
    // continue_lowering.
    void (*lower_budget)(void *self, uint64_t pages);
    // Locked, once in every round of the thread; NULL: lower_budget does everything. `least` is the smallest
    // budget that the pool leaves the member: an idle one may shrink to it. True: there is more to do at once.
    bool (*continue_lowering)(void *self, uint64_t least);
    // Not locked. Returns memory of pages that are gone to the device; wanted: except what members of the context wait for.
    // Only then do other members get the budget.
    void (*trim)(void *self, bool wanted);

    // Not locked; NULL: nothing can be evicted. Frees up to so many of the `evictable` pages. The next round gives them.
    void (*evict)(void *self, uint64_t pages);

    // Locked; NULL: the pool's thread never takes device memory ahead for this member. Pages that exist, and those that the
    // device has already given memory for.
    uint64_t (*ready_pages)(void *self);
    // Locked; NULL with `ready_pages`. The pages that the member announced have come, or nobody waits for them.
    void (*announced_ended)(void *self);

    // NULL: nobody asks from outside. Locked: a maximum in bytes that another process asks for, until it is answered; 0:
    // none.
    uint64_t (*wanted)(void *self);
    // Not locked, NULL with `wanted`. Tells the answer: rc is 0 or a negative errno. why: enum vmem_kv_refusal.
    void (*answered)(void *self, uint64_t bytes, int rc, uint32_t why);
};

// The terms on which a member joins.
struct vmem__member_terms {
    vmem_context *ctx;
    uint64_t page_size;
    uint64_t held; // pages
    bool whole;    // pages go together, in sizes that nobody knows before: no memory is taken ahead
    const char *name;
    uint64_t min, max; // bytes, as in struct vmem_kv_pool_share
};

// ---- what members call, in their pages ---------------------------------------------------------------------------------
//
// With the member's lock held, but for wake, show, leave and left. But for join, claim and announce, m may be NULL: of no
// pool. The call then does nothing and returns 0.

// Makes a member. *budget: what it may have from now on.
int vmem__pool_join(vmem_kv_pool *pool, const struct vmem__member_ops *ops, void *self,
                    const struct vmem__member_terms *terms, struct vmem__member **out, uint64_t *budget);
// Takes free budget of the pool. Returns by how many pages the member's budget grows: `least`, or less if there is not
// enough, up to `most` of what nobody waits for. A member that is shrinking stops.
uint64_t vmem__pool_claim(struct vmem__member *m, uint64_t budget, uint64_t least, uint64_t most);
// The pages that a claim would find.
uint64_t vmem__pool_claimable(const struct vmem__member *m, uint64_t budget);
// The device has no memory for what the budget allows: what nobody holds counts as used for some time, so that `ask` gets
// what others hold. Returns the member's budget from now on.
uint64_t vmem__pool_refused(struct vmem__member *m, uint64_t budget, uint64_t held);
// The budget lacks so many pages even after a claim: asks the other members. How many of them may still come; if none,
// *refusal says why (enum vmem_kv_refusal). `held`: pages that the member has.
uint64_t vmem__pool_ask(struct vmem__member *m, uint64_t held, uint64_t pages, uint32_t *refusal);
// The member found what it asked for.
void vmem__pool_unask(struct vmem__member *m);
// The member will have `want` pages in all, with the requests that wait. Claims and asks for them, and has the thread take
// device memory for them. part: if the member may not have so many, as many as it may. Returns by how many pages the
// budget grows at once. It holds until `announced_ended`, or until the member announces something else.
uint64_t vmem__pool_announce(struct vmem__member *m, uint64_t budget, uint64_t want, bool part);
// The member can give more than before: if somebody asks for it, has the thread look at the members soon.
void vmem__pool_wake(const struct vmem__member *m);
// The member's row, and the path of the pool's file if `path` is empty.
void vmem__pool_show(struct vmem__member *m, struct vmem_kv_pool_member *out, char path[256]);
// The member is being destroyed, and still has so many pages. It asks and gets nothing more.
void vmem__pool_leave(struct vmem__member *m, uint64_t held);
// Its memory is gone, and so is m. Where pages remain that the driver refuses to unmap, the row stays until they are gone.
void vmem__pool_left(struct vmem__member *m);

#endif
