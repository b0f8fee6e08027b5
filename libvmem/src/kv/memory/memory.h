// The budget and the device: what can be taken back, what is missing, and what others are told of it.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_MEMORY_H
#define VMEM_KV_MEMORY_H

#include "kv/run/run.h"
#include "pool/lend.h"

// ---- device.c

// A context's caches, linked. Parting gives back what the cache took ahead.
void vmem__kv_join(vmem_kv *kv);
void vmem__kv_part(vmem_kv *kv);
// Takes device memory for that many pages in all, or gives back what is more.
int vmem__kv_take_ahead(vmem_kv *kv, uint64_t pages);
void vmem__kv_give_ahead(vmem_kv *kv, uint64_t pages);
void vmem__kv_promise(vmem_kv *kv, uint64_t pages); // without doing either
// Returns device memory that nobody uses or took ahead; wanted: nor waits for. With no lock held.
void vmem__kv_trim(vmem_kv *kv, bool wanted);
// Pages whose memory the device has given and no page uses. *room, unless NULL: those that the context's budget has
// room for.
uint64_t vmem__kv_spare_memory(const vmem_kv *kv, uint64_t *room);
// Pages that the device could make now. Needs no lock.
uint64_t vmem__kv_device_pages(const vmem_kv *kv);
// Whether the driver's last word on the device's free memory is old. Before statistics are shown, who holds no lock
// asks.
bool vmem__kv_device_due(const vmem_kv *kv);
// Whether an answer may ask the driver: the cache has not taken its memory ahead, and the driver's last word is old.
bool vmem__kv_asks_device(const vmem_kv *kv);
// Whether there can be `want` pages without memory that the device has not given yet.
bool vmem__kv_at_hand(const vmem_kv *kv, uint64_t want);
// At least `want` if there can be so many pages within the budget, of a pool's member with what is free in the pool; else
// how many there can be. The device is asked only where its memory decides: its last word is believed for 100 ms where
// it says yes, never where it says no. The worker may be waited for before a no.
uint64_t vmem__kv_reach(vmem_kv *kv, uint64_t want);
// How many there can be so, by what the device said within 100 ms; or by what it last said.
uint64_t vmem__kv_reach_lately(vmem_kv *kv);
uint64_t vmem__kv_reach_known(const vmem_kv *kv);
// Whether so many pages more leave the context's other caches what they took ahead: pages come from there, too.
bool vmem__kv_leaves_others(const vmem_kv *kv, uint64_t pages);

// ---- lender.c. With api and state held, and without effect on a cache of no pool, but for the first.

// A member's budget grows by what is free in the pool: by `least` pages if there are so many, and up to `most`.
void vmem__kv_claim(vmem_kv *kv, uint64_t least, uint64_t most);
// With the requests that wait, the cache will have `want` pages: claims and asks for them, and lets the pool's thread
// take the device memory. part: if the member may not have so many, as many as it may.
void vmem__kv_foresee(vmem_kv *kv, uint64_t want, bool part);
// For the worker: keeps memory plentiful from what is free in the pool.
void vmem__kv_claim_plenty(vmem_kv *kv);
// With no lock held: before a cache is taken apart.
void vmem__kv_pool_leave(vmem_kv *kv);

// ---- short.c

// Records shortages for vmem_kv_last_shortage.
void vmem__kv_enough(void);
int vmem__kv_short_of_budget(vmem_kv *kv, uint64_t want); // want: pages there would be
int vmem__kv_short_of_device(vmem_kv *kv, uint64_t pages);
int vmem__kv_short_of_mappings(vmem_kv *kv, uint64_t pages);
// A new request would make it `want` pages, and must leave `back` of the limit.
int vmem__kv_short_beside(vmem_kv *kv, uint64_t want, uint64_t limit, uint64_t back);
int vmem__kv_short_of_slots(vmem_kv *kv);
void vmem__kv_count_shortage(vmem_kv *kv);                   // in the statistics, of a call that really needed them
const struct vmem_kv_shortage *vmem__kv_last_shortage(void); // of this thread

// Whether the budget has room if `fixed` grows by delta, with so many new pages: -ENOMEM, with what is missing. A cache
// over its budget has room for what raises `fixed` by nothing, even if that needs new pages: it gives up as many. But
// pages that are mapped and not fixed are no room: another call may take them back before the step.
int vmem__kv_lacks(vmem_kv *kv, int64_t delta, uint64_t pages);
// The same, and whether the device has the memory.
int vmem__kv_would_fit(vmem_kv *kv, int64_t delta, uint64_t pages);

// ---- reclaim.c

// The fewest pages that the cache could have now if nothing is evicted, and nothing unmapped that would be mapped again
// at once.
uint64_t vmem__kv_least(const vmem_kv *kv);
// What can be taken back next, best first: of free slots, the one freed first; then what active slots have ahead of
// need. want: pages asked for. stuck: also where the worker has failed to unmap. False: nothing.
struct kv_victim {
    uint32_t slot, group, lo, hi; // what the span is to be cut down to
};
bool vmem__kv_victim(const vmem_kv *kv, uint64_t want, bool spare_ahead, bool stuck, struct kv_victim *v);
bool vmem__kv_passed(const vmem_kv *kv, bool stuck, struct kv_victim *v); // only what a window has passed
// Takes pages back until `to` are left, if there are so many to take; evict: of runs, too. May wait for the worker.
int vmem__kv_reclaim_to(vmem_kv *kv, uint64_t to, bool evict);
// Whether there is room for `pages` more without reclaiming any.
bool vmem__kv_has_room(const vmem_kv *kv, uint64_t pages);
// Makes it, after vmem__kv_lacks has said that there is memory: what is to go is fixed no more.
int vmem__kv_take_room(vmem_kv *kv, uint64_t pages);
// The device has refused pages: reclaims as many as it lacks, if there are that many.
int vmem__kv_make_device_room(vmem_kv *kv, uint64_t pages);
#define KV_TRIES 2
// vmem__kv_grow_run and vmem__kv_grow_commit. tries: 0, or KV_TRIES to take back what vmem__kv_lacks has found room for,
// and more where the device has less than the budget says, or no mappings.
int vmem__kv_grow_all(vmem_kv *kv, struct kv_grow *l, int tries);
// That without vmem__kv_grow_commit. The pages are in kv->ledger.held.
int vmem__kv_grow_make(vmem_kv *kv, struct kv_grow *l, int tries);

// ---- view.c

int vmem__kv_publish(vmem_kv *kv, const char *path, const char *name);
void vmem__kv_publish_stats(vmem_kv *kv); // what is shown, as it is now
void vmem__kv_unpublish(vmem_kv *kv);
// The budget that another process wrote into the view, until it is answered; 0: none. reason: of an error.
uint64_t vmem__kv_wanted_budget(const vmem_kv *kv);
void vmem__kv_answer_wanted(vmem_kv *kv, uint64_t bytes, int rc, uint32_t reason);

// ---- budget.c

int vmem__kv_set_budget(vmem_kv *kv, uint64_t bytes);
// Gives up what a smaller budget left above itself. Callers that end requests call it, a step only after its plan.
void vmem__kv_keep_budget(vmem_kv *kv);
int vmem__kv_reclaim_bytes(vmem_kv *kv, uint64_t bytes, uint64_t *freed);
// Takes over the budget that another process asked for, if one did.
void vmem__kv_take_wanted(vmem_kv *kv);

// ---- gate.c

void vmem__kv_summarise(vmem_kv *kv); // stats -> shown, and the published view
// The same of what nobody waits for: whoever asks for the statistics sums them up, if they are not published.
void vmem__kv_note(vmem_kv *kv);
void vmem__kv_may_take_long(vmem_kv *kv); // before a public call goes to the library below
// How every public call begins and ends: enter takes api and state, and leave updates the statistics. A step enters by
// vmem__kv_enter_step and calls vmem__kv_may_take_long if there is something to do.
int vmem__kv_enter(vmem_kv *kv);
int vmem__kv_enter_step(vmem_kv *kv);
int vmem__kv_leave(vmem_kv *kv, int rc);

// ---- books.c

int vmem__kv_check_books(vmem_kv *kv); // VMEM_KV_CHECK: recounts everything

#endif
