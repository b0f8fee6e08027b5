// The contract between a pool and its members.
//
// A pool divides one budget among its members. A member is anything that holds pages within a budget: a KV cache, or
// numbered blocks. The pool is below its members: they call its functions, and it knows each of them by a table of
// functions, struct vmem__member_ops.
//
// A member must do this:
// - It keeps its own budget, in pages of its own size, and never has more pages than that, those in the making included.
//   After vmem__pool_join the budget is what the pool granted; 0 is a normal grant. It changes only by raise_budget,
//   lower_budget and continue_lowering, and by what claim returns.
// - It has a lock that guards the budget and all that `state` reports. The pool's thread takes it for microseconds, one
//   member at a time, and holds none of the pool's locks meanwhile.
// - Before a call fails for want of budget, it claims. What the claim does not find, it asks for, and reports the shortage.
//   The thread then raises the budget while the other members give, or the question is refused.
// - It wakes the pool when it has given back pages that others wait for.
// - When it is destroyed, it calls leave, without its lock and before it releases pages. Once no page exists any more, it
//   calls left. leave calls its trim, and no function of the member is called after that.
//
// Locks, in this order: a member's lock, the pool's lock, the lock of the pool's file.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_POOL_MEMBER_H
#define VMEM_POOL_MEMBER_H

#include <stdbool.h>
#include <stdint.h>

#include "vmem_kv_pool.h"

// A member, as its pool knows it. The pool makes it, and frees it in `left`.
struct vmem__member;

// A member's state, which the pool reads before it decides. In pages.
struct vmem__member_state {
    uint64_t budget;    // the most pages that the member may have
    uint64_t held;      // pages that exist or are in the making
    uint64_t target;    // the budget to which the member is shrinking; equal to `budget`: it is not
    uint64_t min_pages; // the smallest size to which the member can shrink now without breaking a promise to a caller
    uint64_t evictable; // of `min_pages`, pages that evict could free
    uint64_t margin;    // pages beyond `min_pages` that the member needs so as not to ask again at once
    bool releasing;     // pages of `min_pages` are about to go: the member answers no question until they have gone
};

// The functions of a member, which the pool's thread calls. "Locked" means between lock and unlock. A function may be
// NULL only where its comment says so.
struct vmem__member_ops {
    void (*lock)(void *self);
    void (*unlock)(void *self);

    // Locked. Fills in the state.
    void (*get_state)(void *self, struct vmem__member_state *out);
    // Locked. Raises the budget by so many pages.
    void (*raise_budget)(void *self, uint64_t pages);
    // Locked. Shrinks the member to `pages`, at least the `min_pages` that get_state has just reported. It may do so at
    // once or in portions. In portions, `target` is less than the budget, which falls as pages go: in
    // continue_lowering, or whenever the member releases some.
    void (*lower_budget)(void *self, uint64_t pages);
    // Locked, once in every round of the thread; NULL: lower_budget does everything. `least` is the smallest
    // budget that the pool leaves the member: an idle one may shrink to it. True: there is more to do at once.
    bool (*continue_lowering)(void *self, uint64_t least);
    // Not locked. Returns the memory of released pages to the device, but for what members of the context wait for if
    // keep_retained is set. Other members get the budget only after that.
    void (*trim)(void *self, bool keep_retained);

    // Not locked; NULL: nothing can be evicted. Frees up to so many of the `evictable` pages. Their budget goes to
    // others in the next round.
    void (*evict)(void *self, uint64_t pages);
};

// The terms on which a member joins.
struct vmem__member_terms {
    vmem_context *ctx;
    uint64_t page_size;
    uint64_t held; // pages
    const char *name;
    uint64_t min, max;              // bytes, as in struct vmem_kv_pool_share
    const struct vmem_info *device; // whose memory it holds; NULL: that of ctx
    // The other members give only what it cannot: what it gives, its owner has somewhere else.
    bool gives_first;
};

// A question for budget lapses after this time (250 ms) unless the member repeats it or waits.
extern _Atomic uint64_t vmem__pool_ask_ns;
// Nobody waits any longer than this (2 s) for a member that does not answer. Tests change both times, so that they do not
// depend on the machine's speed.
extern _Atomic uint64_t vmem__pool_silent_ns;

// ---- what members call -------------------------------------------------------------------------------------------------
//
// Pages are of the member's size. The member's lock is held, except in wait, wake, show, leave and left. m may be NULL, for a
// member of no pool, except in join, claim, wait and set_share: the call then does nothing and returns 0.

// Makes a member. *budget: the pages that it may have from now on.
int vmem__pool_join(vmem_kv_pool *pool, const struct vmem__member_ops *ops, void *self,
                    const struct vmem__member_terms *terms, struct vmem__member **out, uint64_t *budget);
// Takes free budget of the pool, and returns by how many pages the member's budget grows. These are `least`, or fewer
// if there are not so many, and up to `most` if no member waits for the rest. A member that is shrinking stops.
uint64_t vmem__pool_claim(struct vmem__member *m, uint64_t budget, uint64_t least, uint64_t most);
// How many pages a claim would find.
uint64_t vmem__pool_claimable(const struct vmem__member *m, uint64_t budget);
// The device has refused memory that the budget allows. For some time, budget without pages counts as used, so that
// `ask` gets what others hold. Returns the member's budget from now on.
uint64_t vmem__pool_refused(struct vmem__member *m, uint64_t budget, uint64_t held);
// Asks the other members for the pages that the budget lacks after a claim. Returns how many of them may still come; if
// none, *refusal says why (enum vmem_kv_refusal). `held`: pages that the member has.
uint64_t vmem__pool_ask(struct vmem__member *m, uint64_t held, uint64_t pages, uint32_t *refusal);
// Withdraws the question: the member has found the pages.
void vmem__pool_unask(struct vmem__member *m);
// Waits at most `ms` for the answer to the last question (enum vmem_kv_answer). Without the member's lock.
uint32_t vmem__pool_wait(struct vmem__member *m, uint32_t ms);
// Changes the member's share: -EINVAL, -ENOMEM. A member over its new maximum shrinks when the thread looks at it, or, with
// the member's lock held, in keep_to_max.
int vmem__pool_set_share(struct vmem__member *m, uint64_t min, uint64_t max);
void vmem__pool_keep_to_max(struct vmem__member *m);
// The member can give more than before: if somebody asks for it, has the thread look at the members soon.
void vmem__pool_wake(const struct vmem__member *m);
// Copies the member's entry, and if `path` is empty the path of the pool's file.
void vmem__pool_show(struct vmem__member *m, struct vmem_kv_pool_member *out, char path[256]);
// Begins a member's end. It still has `held` pages, and gets no more.
void vmem__pool_leave(struct vmem__member *m, uint64_t held);
// Ends the member, and frees m. If the driver refuses to unmap pages, their budget stays taken until they are unmapped.
void vmem__pool_left(struct vmem__member *m);

#endif
