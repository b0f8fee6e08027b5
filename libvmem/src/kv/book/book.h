// The lowest floor of the KV-cache manager: what is known of slots, spans and shared rows. Nothing here makes a system
// call but for memory of its own. Every floor has such a header, and includes that of the floor below: book, pages,
// run, memory, request, thread, calls.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_BOOK_H
#define VMEM_KV_BOOK_H

#include <errno.h>

#include "core/clock.h"
#include "core/error.h"
#include "kv/book/state.h"

// ---- the state -------------------------------------------------------------------------------------------------------

static inline struct kv_span *kv_span(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return &kv->spans[(uint64_t)slot * kv->n_groups + group];
}

// A span that begins here, without pages.
static inline struct kv_span kv_span_at(uint32_t page)
{
    const struct kv_range none = {page, page};
    return (struct kv_span){.lo = page, .hi = page, .need = none, .keep = none, .fix = none};
}

static inline struct kv_range *kv_stale(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return &kv->stale[(uint64_t)slot * kv->n_groups + group];
}

// The pages of one tensor of the group (index within it) in one slot.
static inline vmem_page *kv_table(const vmem_kv *kv, const struct kv_group *g, uint32_t slot, uint32_t tensor)
{
    return kv->pages + g->table + ((uint64_t)slot * g->n + tensor) * g->slot_pages;
}

static inline uint64_t kv_addr(const vmem_kv *kv, const struct kv_group *g, uint32_t slot, uint32_t tensor,
                               uint64_t page)
{
    return kv->addrs[g->first + tensor] + slot * g->slot_stride + (page << kv->page_shift);
}

// Whether a page of a span is joined to the page before it.
static inline bool kv_joined(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page)
{
    const struct kv_group *g = &kv->groups[group];
    return kv->whole && page < g->slot_pages && kv->joined[g->joined + (uint64_t)slot * g->slot_pages + page];
}

static inline uint64_t kv_less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static inline uint64_t kv_ceil_pages(uint64_t bytes, const vmem_kv *kv)
{
    return (bytes >> kv->page_shift) + (bytes & (kv->page_size - 1) ? 1 : 0);
}

// Whether kernels may access the slot: it is active or ending.
static inline bool kv_accessed(const vmem_kv *kv, uint32_t slot)
{
    return kv->slots[slot].state != VMEM_KV_FREE && kv->slots[slot].state != VMEM_KV_SWAPPED;
}

// Slots that wait for kernels to end.
static inline uint32_t kv_waiting(const vmem_kv *kv) { return kv->in_state[KV_ENDING]; }

// Pages that could be added without reclaiming any.
static inline uint64_t kv_unused(const vmem_kv *kv) { return kv_less(kv->ledger.budget, kv->ledger.held); }

// Pages that the watermark keeps back while requests run.
static inline uint64_t kv_watermark(const vmem_kv *kv)
{
    const struct kv_ledger *l = &kv->ledger;
    return KV_MIN(KV_MAX(l->watermark_pages, (l->budget * l->watermark_percent + 99) / 100), l->budget);
}

// Memory is scarce if fewer pages than this are unused, and plentiful if at least twice as many are.
static inline uint64_t kv_low(const vmem_kv *kv) { return kv->ledger.budget * kv->reclaim_percent / 100; }
// Not while the memory is promised to others, or requests wait for it.
static inline bool kv_plentiful(const vmem_kv *kv)
{
    return !kv->lend.giving && !kv->lend.foresees && kv_unused(kv) >= 2 * kv_low(kv);
}

// ---- set.c

#define KV_NO_SLOT UINT32_MAX
int vmem__kv_make_sets(vmem_kv *kv); // all slots are free, and have no page
void vmem__kv_put(struct kv_set *set, uint32_t slot);
void vmem__kv_take(struct kv_set *set, uint32_t slot);
// The first slot of the set from there on; KV_NO_SLOT: there is none.
uint32_t vmem__kv_next(const vmem_kv *kv, const struct kv_set *set, uint32_t from);
void vmem__kv_set_list(vmem_kv *kv, uint32_t slot, uint8_t list);
// After a change of the slot's state, or of what it has backed.
static inline void kv_list(vmem_kv *kv, uint32_t slot)
{
    const struct kv_slot *s = &kv->slots[slot];
    uint8_t list = s->state == VMEM_KV_ACTIVE ? KV_LIST_ACTIVE : KV_LIST_OTHERS;
    if (s->state == VMEM_KV_FREE)
        list = (uint8_t)(s->backed ? 32 - __builtin_clz(s->backed) : 0);
    if (list != s->list)
        vmem__kv_set_list(kv, slot, list);
}
static inline uint32_t kv_next_active(const vmem_kv *kv, uint32_t from)
{
    return vmem__kv_next(kv, &kv->lists[KV_LIST_ACTIVE], from);
}
static inline uint32_t kv_next_used(const vmem_kv *kv, uint32_t from) // that is not free
{
    const uint32_t active = kv_next_active(kv, from), other = vmem__kv_next(kv, &kv->lists[KV_LIST_OTHERS], from);
    return KV_MIN(active, other);
}

// ---- list.c

// Grows an array so that it has room for n elements of `size` bytes.
int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size);

// ---- shape.c

// The pages that an iteration accesses when it extends a slot from `before` tokens to `tokens`.
uint32_t vmem__kv_need_lo(const vmem_kv *kv, const struct kv_group *g, uint32_t before);
uint32_t vmem__kv_need_hi(const vmem_kv *kv, const struct kv_group *g, uint64_t tokens);
// The rows, in whole tiles, whose pages end before page `hi`; UINT32_MAX: all rows of a slot.
static inline uint32_t kv_rows_before(const vmem_kv *kv, const struct kv_group *g, uint32_t hi)
{
    uint64_t rows = ((uint64_t)hi << kv->page_shift) / g->row_bytes;
    if (kv->tile_rows > 1)
        rows -= rows % kv->tile_rows;
    return rows < g->max_tokens ? (uint32_t)rows : UINT32_MAX;
}
// Divides the tensors into groups, and makes the tables of their pages.
int vmem__kv_make_groups(vmem_kv *kv, const struct vmem_kv_config *c);

// ---- span.c

// Where the part of a span ends that serves a step up to page `hi`. In a slot without rows, pages that go together go
// if the step asks for some of them only: it gets others.
uint32_t vmem__kv_serves(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi);
// Whether a slot has any page. `backed` cannot tell: a group may have pages while another has none, or less than a row.
bool vmem__kv_has_pages(const vmem_kv *kv, uint32_t slot);
// The part of a span that no call could take back: what kernels access, and what goes with it. Of a slot that no kernel
// accesses, nothing.
struct kv_range vmem__kv_fixed_part(const vmem_kv *kv, uint32_t slot, uint32_t group);
// Where the pages end that go with those before `hi`. running: while kernels run, a block mapped by a 2 MiB entry goes
// as a whole.
static inline uint32_t kv_end_of(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t hi, bool running)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    hi = running ? KV_MAX(hi, s->coarse_hi) : hi;
    while (hi < s->hi && kv_joined(kv, slot, group, hi))
        hi++;
    return KV_MIN(hi, s->hi);
}
// What kernels access of a span, and what goes with it; running: while they run.
static inline struct kv_range kv_in_use(const vmem_kv *kv, uint32_t slot, uint32_t group, bool running)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    return (struct kv_range){s->keep.lo, kv_end_of(kv, slot, group, s->keep.hi, running)};
}
// The first page, at or after `from`, of the part that can be cut off the end of a span.
uint32_t vmem__kv_tail(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from);
// Makes this the fixed part, and moves the ledger's `fixed` by the pages that enter or leave it. These are in the
// slot's table, and the rows among them have their entries: before a row loses the slot as a holder, the row leaves.
void vmem__kv_fix(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to);
// By how many pages that would raise `fixed`. Shared rows that leave count as if they stayed: other slots may leave
// them, too, and only then is it known what goes.
int64_t vmem__kv_fix_delta(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to);
// The same two for steps: in most, only the end changes, among pages that nobody else has.
static inline bool kv_at_own_end(const struct kv_span *s, struct kv_range to)
{
    return to.lo == s->fix.lo && KV_MIN(to.hi, s->fix.hi) >= s->shared_hi;
}
static inline void kv_fix(vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    struct kv_span *s = kv_span(kv, slot, group);
    if (!kv_at_own_end(s, to)) {
        vmem__kv_fix(kv, slot, group, to);
        return;
    }
    kv->ledger.fixed += (uint64_t)(((int64_t)to.hi - s->fix.hi) * kv->groups[group].n);
    s->fix.hi = to.hi;
}
static inline int64_t kv_fix_delta(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range to)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    return kv_at_own_end(s, to) ? ((int64_t)to.hi - s->fix.hi) * kv->groups[group].n
                                : vmem__kv_fix_delta(kv, slot, group, to);
}
// Changes a span, and with it its fixed part and what of the slot is backed.
void vmem__kv_span_set(vmem_kv *kv, uint32_t slot, uint32_t group, const struct kv_span *now);
// After a change of what kernels access, or of the slot's state: brings the fixed parts up to date.
void vmem__kv_book(vmem_kv *kv, uint32_t slot);

// VMEM_KV_CHECK: whether pages [from, to) of a span may be mapped or unmapped now. No mapping changes that kernels may
// use.
int vmem__kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);

// ---- row.c

struct kv_ref *vmem__kv_ref_find(const struct kv_refs *r, vmem_page page);
// The entry of a slot's row; NULL: the row is the slot's own.
struct kv_ref *vmem__kv_row(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page);
// How many rows of a span others hold as well.
uint32_t vmem__kv_span_shared(const vmem_kv *kv, uint32_t slot, uint32_t group);
// Rows of a slot below this are (partly) in pages that others hold, too. Those at the end that others have left become
// the slot's own.
uint32_t vmem__kv_shared_tokens(const vmem_kv *kv, uint32_t slot);
// How many rows of a span's fixed part are fixed for this slot alone. Slots looked at since vmem_kv.mark was raised
// count as gone.
uint64_t vmem__kv_rows_left(vmem_kv *kv, uint32_t slot, uint32_t group);
// The entry of a slot's row, made if there was none; NULL: out of memory.
struct kv_ref *vmem__kv_row_get(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t page);
// A new entry, of one slot.
struct kv_ref *vmem__kv_ref_new(struct kv_refs *r, vmem_page page, uint32_t n);
int vmem__kv_ref_reserve(struct kv_refs *r, uint64_t more); // the next `more` of these do not fail
// Adds holders, counted as in struct kv_ref. The entry goes when no prefix and at most one slot holds the row: it is
// that slot's own then.
struct kv_holders {
    int slots, users, prefixes, cached;
};
void vmem__kv_ref_hold(vmem_kv *kv, struct kv_ref *ref, struct kv_holders by);
// A slot loses rows: those in front of the fixed part or behind it, or both its front and as much of the part.
void vmem__kv_rows_leave(vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to);
// How often the row has been looked at since vmem_kv.mark was raised.
static inline uint32_t kv_row_seen(const vmem_kv *kv, const struct kv_ref *ref)
{
    return ref->mark == kv->mark ? ref->seen : 0;
}
static inline uint32_t kv_row_see(const vmem_kv *kv, struct kv_ref *ref)
{
    ref->seen = kv_row_seen(kv, ref) + 1;
    ref->mark = kv->mark;
    return ref->seen;
}
// Whether no call could take the row's pages back: a slot needs it, or something that may not be evicted holds it.
static inline bool kv_row_kept(const struct kv_ref *ref) { return ref->prefixes != ref->cached; }
// Whether evicting runs would free the row's pages.
static inline bool kv_row_evictable(const struct kv_ref *ref) { return !ref->slots && !kv_row_kept(ref); }
static inline bool kv_row_fixed(const struct kv_ref *ref) { return ref->users || kv_row_kept(ref); }

// ---- fence.c

static inline struct kv_range *kv_past_of(const vmem_kv *kv, uint32_t slot, uint32_t group)
{
    return kv->fence.past + ((uint64_t)slot * kv->n_groups + group) * (kv->steps_in_flight - 1);
}
static inline struct kv_range kv_both(struct kv_range a, struct kv_range b)
{
    return b.lo == b.hi ? a : (struct kv_range){KV_MIN(a.lo, b.lo), KV_MAX(a.hi, b.hi)};
}
// What kernels in flight access of a span when a step needs `now`.
static inline struct kv_range kv_in_flight(const vmem_kv *kv, uint32_t slot, uint32_t group, struct kv_range now)
{
    const struct kv_span *s = kv_span(kv, slot, group);
    now = kv_both(now, s->need);
    for (uint32_t i = 0; i + 1 < kv->steps_in_flight; i++)
        now = kv_both(now, kv_past_of(kv, slot, group)[i]);
    return now;
}
// No kernel accesses the slot, so its earlier steps no longer count.
void vmem__kv_forget(vmem_kv *kv, uint32_t slot);
// Kernels up to this step have ended.
uint64_t vmem__kv_ended(const vmem_kv *kv);
int vmem__kv_check_fence(const vmem_kv *kv, uint64_t step);
// Steps since the slot took part in one, or was allocated.
static inline uint32_t kv_absent(const vmem_kv *kv, uint32_t slot)
{
    return (uint32_t)kv->fence.step - kv->slots[slot].took;
}

// ---- slot.c

const char *vmem__kv_state_name(uint8_t state);
void vmem__kv_set_state(vmem_kv *kv, uint32_t slot, uint8_t state);
// Checks the number and state (a set of 1 << enum vmem_kv_slot_state) of a slot and waits until it is not busy.
int vmem__kv_get(vmem_kv *kv, uint32_t slot, uint32_t states);
// As vmem__kv_get, without waiting for the worker's work on the slot.
int vmem__kv_get_beside(const vmem_kv *kv, uint32_t slot, uint32_t states);
// The free slot, but for the n taken ones, for a request of that many tokens, of which so many come from a prefix;
// UINT32_MAX: none.
uint32_t vmem__kv_choose(const vmem_kv *kv, uint32_t tokens, uint32_t prefix_tokens, const uint32_t *taken, uint32_t n);

// Takes the list of the requests that come next.
int vmem__kv_expect(vmem_kv *kv, const uint32_t *tokens, const uint32_t *prefix_tokens, size_t n);
// The free slot that is to be backed next for a request that is expected, and which that is; UINT32_MAX: none. It is
// the slot that the request will get if those expected before it have got theirs.
uint32_t vmem__kv_expected_slot(const vmem_kv *kv, struct kv_expected *request);

// ---- turn.c

// For tests, which delay the worker: called where it has dropped the lock and goes to the library below, before and
// after a call waits for it, and where the worker has looked whether the cache is idle. NULL outside of them.
enum vmem__kv_point { KV_WORKER_UNLOCKED, KV_CALL_WAITS, KV_CALL_WAITED, KV_WORKER_IDLE };
extern void (*_Atomic vmem__kv_hook)(enum vmem__kv_point point);
static inline void kv_at(enum vmem__kv_point point)
{
    void (*const hook)(enum vmem__kv_point) = vmem__kv_hook; // once: a test may take it away meanwhile
    if (hook)
        hook(point);
}
void vmem__kv_worker_wake(vmem_kv *kv);
void vmem__kv_wait_slot(vmem_kv *kv, uint32_t slot);
void vmem__kv_wait_idle(vmem_kv *kv); // until it has nothing left to do
void vmem__kv_wait_job(vmem_kv *kv);  // until it has ended its job; it begins no other until state is dropped
// Until it unmaps and releases nothing that others may hold: a call that maps, unmaps or releases such pages waits here
// first.
void vmem__kv_wait_unmapping(vmem_kv *kv);
void vmem__kv_wait_cutting(vmem_kv *kv); // until it unmaps nothing at all: for a call that unmaps what is stale
// Between these two the worker does nothing. Both with state held; hold may drop it for a moment.
void vmem__kv_worker_hold(vmem_kv *kv);
void vmem__kv_worker_release(vmem_kv *kv);
// -EPERM in a child of the process that made it; -EINVAL: NULL, or being closed
int vmem__kv_check_usable(const vmem_kv *kv);

#endif
