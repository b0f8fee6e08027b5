// Leases: segments for PyTorch, out of a pool.
//
// The room of PyTorch's allocator. Begin at vmem_torch.h, then enum state below. It may call core (memory.h), the pool by
// member.h, and the question to the device whether kernels run; no KV cache, and no numbered blocks.
//
// A segment is a range of addresses in the lease's one reservation. Its pages are committed and decommitted together, and
// nobody else maps there. So neither of the other rooms' mechanisms is needed: no page has two owners, and kernels are
// waited for before pages go, not counted. To the pool, all pages of a lease are needed, but for those of parked
// segments: these are first IDLE, offered to the pool, and go in evict_idle() when somebody asks for them.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core/memory.h"
#include "driver/kernels.h"
#include "pool/member.h"
#include "torch/lease.h"
#include "vmem_torch.h"

#define SLOT_BYTES (UINT64_C(32) << 20) // the least bytes of a slot. Most segments are of 2 or 20 MiB
#define MOST_SLOTS 2048                 // that the lease's pages may fill; there are four times as many, and
#define EXTRA_SLOTS 1024                // these, so that a large segment finds consecutive slots, too
// The device memory that is allocated at once with VMEM_TORCH_SMALL. A GiB takes 24 ms in pieces of 2 MiB, and 6 ms in
// pieces of 8 MiB (H100); beside copies to the device, these take 25 ms, as each driver call does three times as long
// (H200). Segments that came in one call share at most a piece, which stays if only one of them leaves.
#define SMALL_ARENA (UINT64_C(32) << 20)
#define WAIT_MS 10000
#define ASK_AGAIN_NS 3000000 // a pool repeats its refusal for 2 ms without asking its members
#define PATIENT_NS 20000000  // between the questions of an allocation that waits although it is refused
#define FINAL_NS 1000000000  // a refusal is final if nothing comes for so long

_Atomic uint64_t vmem__lease_round_ns = 100000000;

// After a commit that was short of memory.
enum next { GIVE_UP, ASK_AGAIN, WAIT };

// The states of a segment:
//
//     NO_SEGMENT --alloc--> COMING --its pages came--> LIVE --park--> IDLE --evict_idle()--> PARKED
//                                                       ^               |                |
//                                                       +----unpark-----+----------------+
//     LIVE, IDLE --free--> FREEING --its kernels ended--> NO_SEGMENT
//     PARKED --free--> NO_SEGMENT, and COMING --short of memory--> NO_SEGMENT
//     instead of NO_SEGMENT, where its pages cannot be given back: ENDED --sweep--> NO_SEGMENT
enum state {
    NO_SEGMENT,
    COMING,  // its pages are being asked for
    LIVE,    // PyTorch has it, and its pages are there
    IDLE,    // PyTorch has it and uses no block of it. Its pages are there, and offered
    PARKED,  // PyTorch has it, and its pages are not there
    FREEING, // a thread waits for kernels before it gives the pages back
    ENDED,   // PyTorch has freed it, but its pages could not be given back: `sweep` tries again
};

// The addresses that segments consist of. A segment has consecutive slots, and no slot has parts of two.
struct slot {
    uint8_t state;   // enum state, of the segment that begins here
    bool taken;      // part of a segment
    bool wanted;     // an unpark is about this segment
    bool refused;    // of an IDLE one: the driver did not unmap it, so it is not offered until somebody trims
    uint32_t length; // slots of the segment that begins here
    uint64_t bytes;  // of the segment that begins here
};

// The lease as the pool's member. All of this has a lock of its own, which is held for microseconds: a thread that holds
// the lease's lock may wait for the pool's thread.
struct membership {
    pthread_mutex_t lock;
    struct vmem__member *pool_member;
    uint64_t budget, held, offered; // pages
};

struct lease {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    _Atomic pid_t pid;   // of the process that opened it; 0: the pair is free
    uint32_t generation; // counts the leases that this pair had
    bool closing;
    bool giving;    // the pool's thread is in evict_idle()
    bool moving;    // a thread parks or unparks
    uint64_t moves; // how often one began
    uint32_t users; // calls that use the lease without the lock
    // Bytes of the reservation, those that a call waits for, and those that others have and the lease will want again.
    uint64_t reserved, awaited, missed;
    uint64_t claimed; // pages that count as held, for the segments that an unpark has left to the next call
    vmem_context *ctx;
    struct membership member;
    bool gpu, check;
    int device;
    uint32_t wait_ms;
    uint64_t base, most, page_size, slot_bytes;
    uint32_t page_shift, n_slots, n_ended;
    struct slot *slots;
    struct vmem_range *ranges; // of segments that come or go together
    struct vmem_torch_stats stats;
    struct vmem_kv_shortage shortage;
    void (*ended)(void *arg);
    void *arg;
};

static struct lease leases[VMEM_TORCH_PLACES] = {
    [0 ... VMEM_TORCH_PLACES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                     .moved = PTHREAD_COND_INITIALIZER,
                                     .member.lock = PTHREAD_MUTEX_INITIALIZER}};
static pthread_mutex_t places = PTHREAD_MUTEX_INITIALIZER; // taken before a lease's lock

// ---- the member: what the pool's thread calls -------------------------------------------------------------------------

static void lock_member(void *lease) { pthread_mutex_lock(&((struct lease *)lease)->member.lock); }
static void unlock_member(void *lease) { pthread_mutex_unlock(&((struct lease *)lease)->member.lock); }

static void get_state(void *lease, struct vmem__member_state *out)
{
    const struct membership *m = &((struct lease *)lease)->member;
    *out = (struct vmem__member_state){.budget = m->budget,
                                       .held = m->held,
                                       .target = m->budget,
                                       .min_pages = m->held,
                                       .evictable = MIN(m->offered, m->held)};
}

static void raise_budget(void *lease, uint64_t pages) { ((struct lease *)lease)->member.budget += pages; }
static void lower_budget(void *lease, uint64_t pages) { ((struct lease *)lease)->member.budget = pages; }

static void trim(void *lease, bool keep_retained) { vmem__trim_unused(((struct lease *)lease)->ctx, keep_retained); }

static void evict_idle(void *lease, uint64_t pages);

static const struct vmem__member_ops ops = {
    .lock = lock_member,
    .unlock = unlock_member,
    .get_state = get_state,
    .raise_budget = raise_budget,
    .lower_budget = lower_budget,
    .trim = trim,
    .evict = evict_idle,
};

static int join(struct lease *l, vmem_kv_pool *pool, const char *name)
{
    // Whoever parks segments has a copy of them, or needs none. Rows that a cache keeps would be computed again.
    const struct vmem__member_terms terms = {.ctx = l->ctx,
                                             .page_size = l->page_size,
                                             .name = name,
                                             .max = l->most,
                                             .gives_first = true};
    struct membership *m = &l->member;
    m->budget = m->held = m->offered = 0;
    int rc = vMemReserve(l->ctx, l->n_slots * l->slot_bytes, 0, &l->base);
    if (rc)
        return rc;
    rc = vmem__pool_join(pool, &ops, l, &terms, &m->pool_member, &m->budget);
    if (rc)
        vmem_unreserve(l->ctx, l->base);
    return rc;
}

static void end_membership(struct lease *l)
{
    char text[VMEM__TEXT];
    vmem__keep_error(text);
    vmem__expect(l->ctx, 0, -(int64_t)l->missed);
    l->missed = 0;
    vmem__pool_leave(l->member.pool_member, l->member.held);
    vmem_unreserve(l->ctx, l->base);
    trim(l, false);
    vmem__pool_left(l->member.pool_member);
    vmem__error(0, "%s", text);
}

// ---- pages, with the lease's lock held ---------------------------------------------------------------------------------

// Records what a call lacks, and asks the pool for it. With the member's lock held, too.
static int short_of(struct lease *l, enum vmem_kv_reason reason, uint64_t pages)
{
    struct vmem_kv_shortage *s = &l->shortage;
    *s = (struct vmem_kv_shortage){.size = sizeof *s, .reason = reason, .missing_pages = pages};
    s->coming_pages = vmem__pool_ask(l->member.pool_member, l->member.held, pages, &s->refusal);
    l->stats.short_bytes = pages << l->page_shift;
    return vmem__error(-ENOMEM,
                       "%" PRIu64 " pages are missing: the lease has %" PRIu64 " of its budget of %" PRIu64 "%s", pages,
                       l->member.held, l->member.budget,
                       reason == VMEM_KV_SHORT_OF_DEVICE ? ", and the device no memory for more" : "");
}

// Takes budget for so many pages more. From then on, `claimed` pages are.
static int take_budget(struct lease *l, uint64_t pages, uint64_t claimed)
{
    struct membership *m = &l->member;
    int rc = 0;
    lock_member(l);
    const uint64_t want = m->held - l->claimed + pages + claimed;
    if (want > m->budget)
        m->budget += vmem__pool_claim(m->pool_member, m->budget, want - m->budget, want - m->budget + m->held / 2);
    if (want > m->budget)
        rc = short_of(l, VMEM_KV_SHORT_OF_BUDGET, want - m->budget);
    if (!rc) {
        m->held = want;
        l->claimed = claimed;
    }
    unlock_member(l);
    return rc;
}

static void drop_claim(struct lease *l)
{
    lock_member(l);
    l->member.held -= l->claimed;
    l->claimed = 0;
    unlock_member(l);
}

// Commits n of l->ranges, which have so many pages, within the budget.
static int commit_pages(struct lease *l, size_t n, uint64_t pages)
{
    struct membership *m = &l->member;
    uint64_t there = UINT64_MAX;
    int rc = vmem_commit(l->ctx, l->ranges, n, l->page_size, 0, NULL);
    if (rc == -ENOMEM)
        there = vmem__reachable(l->ctx, NULL, 0) >> l->page_shift;
    if (rc == -ENOMEM && there >= pages) // a moment ago, or it is no device memory that lacks
        rc = vmem_commit(l->ctx, l->ranges, n, l->page_size, 0, NULL);
    lock_member(l);
    m->held -= rc ? pages : 0;
    if (!rc) {
        vmem__pool_unask(m->pool_member);
    } else if (there < pages) {
        m->budget = vmem__pool_refused(m->pool_member, m->budget, m->held);
        rc = short_of(l, VMEM_KV_SHORT_OF_DEVICE, pages - there);
    } else if (rc == -ENOMEM) {
        l->shortage = (struct vmem_kv_shortage){.size = sizeof l->shortage,
                                                .reason = VMEM_KV_SHORT_OF_MAPPINGS,
                                                .missing_pages = pages};
        l->stats.short_bytes = pages << l->page_shift;
    }
    unlock_member(l);
    return rc;
}

// Commits n of l->ranges, all or none, and claims pages beside them. -ENOMEM: *next says whether waiting for the pool may
// help.
static int commit(struct lease *l, size_t n, uint64_t claimed, enum next *next)
{
    uint64_t pages = 0;
    *next = GIVE_UP;
    for (size_t i = 0; i < n; i++)
        pages += l->ranges[i].length >> l->page_shift;
    int rc = take_budget(l, pages, claimed);
    rc = rc ? rc : commit_pages(l, n, pages);
    if (rc != -ENOMEM)
        return rc;
    if (l->shortage.coming_pages)
        *next = WAIT;
    else if (l->shortage.refusal == VMEM_KV_IN_USE || l->shortage.refusal == VMEM_KV_AT_MINIMUM)
        *next = ASK_AGAIN;
    else if (l->reserved && l->shortage.reason == VMEM_KV_SHORT_OF_DEVICE)
        *next = ASK_AGAIN; // no member can give, but somebody outside the pool may
    return rc;
}

// Gives n of l->ranges back: all, or none.
static int decommit(struct lease *l, size_t n)
{
    uint64_t bytes = 0;
    int rc = vmem_decommit(l->ctx, l->ranges, n, &bytes);
    if (rc) // a driver that lacked memory may have it again
        rc = vmem_decommit(l->ctx, l->ranges, n, &bytes);
    if (rc)
        return rc;
    lock_member(l);
    l->member.held -= bytes >> l->page_shift;
    unlock_member(l);
    return 0;
}

// Without the lock: until the pool takes the question that it has just refused once more.
static void pause_lease(struct lease *l, long ns)
{
    l->users++;
    pthread_mutex_unlock(&l->lock);
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    pthread_mutex_lock(&l->lock);
    l->users--;
}

// Waits for the pool, without the lock. False: no member will give what is missing.
static bool wait_for_pool(struct lease *l, uint32_t ms)
{
    l->stats.waits++;
    l->users++;
    pthread_mutex_unlock(&l->lock);
    const uint32_t answer = vmem__pool_wait(l->member.pool_member, ms);
    pthread_mutex_lock(&l->lock);
    l->users--;
    return answer != VMEM_KV_REFUSED && !l->closing;
}

// ---- segments, with the lock held --------------------------------------------------------------------------------------

static uint64_t address(const struct lease *l, uint32_t slot) { return l->base + slot * l->slot_bytes; }

static struct vmem_range range_of(const struct lease *l, const struct slot *s)
{
    const uint64_t pages = (s->bytes + l->page_size - 1) >> l->page_shift;
    return (struct vmem_range){address(l, (uint32_t)(s - l->slots)), pages << l->page_shift};
}

// The segment that begins at the address and that PyTorch has; NULL: there is none.
static struct slot *segment_at(const struct lease *l, uint64_t addr)
{
    const uint64_t slot = addr < l->base ? UINT64_MAX : (addr - l->base) / l->slot_bytes;
    if (slot >= l->n_slots || address(l, (uint32_t)slot) != addr)
        return NULL;
    struct slot *s = &l->slots[slot];
    return s->state == LIVE || s->state == IDLE || s->state == PARKED ? s : NULL;
}

static bool is_free(const struct lease *l, uint32_t first, uint32_t length)
{
    for (uint32_t i = 0; i < length; i++)
        if (l->slots[first + i].taken)
            return false;
    return true;
}

// Segments of one slot come from the end and larger ones from the start, so that the small ones leave long runs.
static int find_run(const struct lease *l, uint32_t length, uint32_t *first)
{
    for (uint32_t i = 0; length <= l->n_slots && i <= l->n_slots - length; i++) {
        *first = length == 1 ? l->n_slots - 1 - i : i;
        if (is_free(l, *first, length))
            return 0;
    }
    return vmem__error(-ENOMEM,
                       "the lease has no addresses for a segment of %" PRIu64 " MiB: its segments take %" PRIu64 " MiB",
                       length * l->slot_bytes >> 20, l->stats.bytes >> 20);
}

static void take_slots(struct lease *l, uint32_t first, uint32_t length, uint64_t bytes)
{
    for (uint32_t i = 0; i < length; i++)
        l->slots[first + i].taken = true;
    l->slots[first].state = COMING;
    l->slots[first].length = length;
    l->slots[first].bytes = bytes;
    l->stats.segments++;
    l->stats.bytes += bytes;
}

static void give_slots(struct lease *l, struct slot *s)
{
    l->n_ended -= s->state == ENDED;
    l->stats.segments--;
    l->stats.bytes -= s->bytes;
    for (uint32_t i = 0, length = s->length; i < length; i++)
        s[i] = (struct slot){0};
}

// Gives the segment's pages and addresses back. If that fails, the segment is ENDED.
static void drop_segment(struct lease *l, struct slot *s)
{
    l->ranges[0] = range_of(l, s);
    if (s->state == PARKED || !decommit(l, 1)) {
        give_slots(l, s);
    } else if (s->state != ENDED) {
        l->n_ended++;
        s->state = ENDED;
    }
}

// The kernels that use segments which PyTorch freed may run: while a graph is captured, nobody can tell.
static int wait_for_kernels(const struct lease *l) { return l->gpu ? vmem__wait_for_kernels(l->device) : 0; }

// The same without the lock.
static int unlock_for_kernels(struct lease *l)
{
    l->users++;
    pthread_mutex_unlock(&l->lock);
    const int rc = wait_for_kernels(l);
    pthread_mutex_lock(&l->lock);
    l->users--;
    return rc;
}

// Tells the pool what it can have of IDLE segments, and the context what the lease misses of PARKED ones.
static void offer(struct lease *l)
{
    uint64_t idle = 0, missed = 0;
    for (uint32_t i = 0; i < l->n_slots; i++) {
        const struct slot *s = &l->slots[i];
        idle += s->state == IDLE && !s->refused ? range_of(l, s).length >> l->page_shift : 0;
        missed += s->state == PARKED ? s->bytes : 0;
    }
    lock_member(l);
    const bool more = idle > l->member.offered;
    l->member.offered = idle;
    unlock_member(l);
    if (more)
        vmem__pool_wake(l->member.pool_member);
    vmem__expect(l->ctx, 0, (int64_t)(missed - l->missed));
    l->missed = missed;
}

// The pages of IDLE segments go until so many have; their kernels have ended. They go together or, if that is refused,
// one by one.
static int release_idle(struct lease *l, uint64_t pages)
{
    uint64_t listed = 0;
    size_t n = 0;
    for (uint32_t i = 0; i < l->n_slots && listed < pages; i++) {
        struct slot *s = &l->slots[i];
        s->wanted = s->state == IDLE && (!s->refused || pages == UINT64_MAX);
        if (!s->wanted)
            continue;
        l->ranges[n] = range_of(l, s);
        listed += l->ranges[n++].length >> l->page_shift;
    }
    int rc = n ? decommit(l, n) : 0;
    const bool together = !rc;
    rc = 0;
    for (uint32_t i = 0; n && i < l->n_slots; i++) {
        struct slot *s = &l->slots[i];
        if (!s->wanted || s->state != IDLE)
            continue;
        n--;
        l->ranges[0] = range_of(l, s);
        const int failed = together ? 0 : decommit(l, 1);
        s->state = failed ? IDLE : PARKED;
        s->refused = failed;
        rc = rc ? rc : failed;
    }
    offer(l);
    return rc;
}

// Tries again to give back what could not be given back before.
static void sweep(struct lease *l)
{
    if (!l->n_ended || wait_for_kernels(l) == -EBUSY)
        return;
    for (uint32_t i = 0; i < l->n_slots && l->n_ended; i++)
        if (l->slots[i].state == ENDED)
            drop_segment(l, &l->slots[i]);
}

// True if an unpark has to back this segment.
static bool lacks_pages(const struct slot *s) { return s->wanted && s->state == PARKED; }

// Lists the segments that an unpark has to back: the first, and more up to so many bytes. *later: pages of the others.
static size_t list_lacking(struct lease *l, uint64_t most, uint64_t *later)
{
    uint64_t bytes = 0;
    size_t n = 0;
    *later = 0;
    for (uint32_t i = 0; i < l->n_slots; i++) {
        if (!lacks_pages(&l->slots[i]))
            continue;
        const struct vmem_range r = range_of(l, &l->slots[i]);
        bytes += r.length;
        if (!n || bytes <= most)
            l->ranges[n++] = r;
        else
            *later += r.length >> l->page_shift;
    }
    // On a device that lacks memory for all, they come together or not at all, as budget does.
    if (*later && vmem__reachable(l->ctx, NULL, 0) < bytes)
        return list_lacking(l, UINT64_MAX, later);
    return n;
}

// Backs this segment, or the parked ones that are wanted (NULL), or none. Of these, `most` bytes: the others are claimed,
// and not wanted any more. Waits at most `ms` for the pool. A refusal is not final: a member gives in portions, and finds
// more to give when its own users have freed something. It is when nothing more has come for a second, but for an
// allocation beside a reservation.
static int back_segments(struct lease *l, const struct slot *only, uint64_t most, uint32_t ms)
{
    const uint64_t until = vmem__now() + ms * UINT64_C(1000000);
    uint64_t least = UINT64_MAX, before = vmem__now(), quiet = 0;
    int rc;
    for (;;) {
        enum next next;
        uint64_t claimed = l->claimed;
        size_t n = 1;
        if (only)
            l->ranges[0] = range_of(l, only);
        else
            n = list_lacking(l, most, &claimed);
        rc = commit(l, n, claimed, &next);
        for (uint32_t i = 0; !rc && !only && i < l->n_slots; i++)
            if (lacks_pages(&l->slots[i]) && (l->slots[i].wanted = n > 0))
                n--;
        const uint64_t t = vmem__now();
        if (rc != -ENOMEM || next == GIVE_UP || t >= until)
            break;
        quiet += MIN(t - before, vmem__lease_round_ns);
        before = t;
        l->awaited = l->stats.short_bytes;
        if (next == WAIT && wait_for_pool(l, (uint32_t)((until - t) / 1000000 + 1)))
            continue;
        if (l->stats.short_bytes < least) {
            least = l->stats.short_bytes;
            quiet = 0;
        }
        if ((quiet > FINAL_NS && !(only && l->reserved)) || l->closing)
            break;
        pause_lease(l, quiet > FINAL_NS / 20 ? PATIENT_NS : ASK_AGAIN_NS);
    }
    l->awaited = 0;
    return rc;
}

// VMEM_TORCH_CHECK: -EFAULT unless exactly the segments that have pages have all of them.
static int check_books(struct lease *l)
{
    uint64_t held = 0;
    for (uint32_t i = 0; i < l->n_slots; i++) {
        const struct slot *s = &l->slots[i];
        const bool has = s->state != NO_SEGMENT && s->state != COMING && s->state != PARKED;
        const struct vmem_range r = s->state ? range_of(l, s) : (struct vmem_range){0};
        held += has ? r.length >> l->page_shift : 0;
        for (uint64_t at = 0; at < r.length; at += l->page_size) {
            vmem_page page = 0;
            vmem_query(l->ctx, r.addr + at, &page, NULL);
            if (has != (page != 0))
                return vmem__error(-EFAULT, "segment %#" PRIx64 ", state %u: page %" PRIu64 " is %s", r.addr, s->state,
                                   at >> l->page_shift, page ? "there" : "missing");
        }
    }
    return held == l->member.held - l->claimed
               ? 0
               : vmem__error(-EFAULT, "%" PRIu64 " pages are held, and %" PRIu64 " counted", held, l->member.held);
}

// ---- entering and leaving ----------------------------------------------------------------------------------------------

// Locks the lease that has this pair of functions. Not in a child: the thread that held the lock may not exist there.
static int enter_pair(uint32_t pair, struct lease **out)
{
    struct lease *l = *out = &leases[pair];
    const pid_t pid = l->pid;
    if (pid && pid != getpid())
        return vmem__error(-EPERM, "this lease belongs to process %d, which forked", (int)pid);
    pthread_mutex_lock(&l->lock);
    if (l->pid)
        return 0;
    pthread_mutex_unlock(&l->lock);
    return -EINVAL;
}

// Locks the lease of this place, and no later one of its pair.
static int enter(uint32_t place, struct lease **out)
{
    int rc = enter_pair(place % VMEM_TORCH_PLACES, out);
    if (rc == -EPERM || (!rc && (*out)->generation == place / VMEM_TORCH_PLACES))
        return rc;
    if (!rc)
        pthread_mutex_unlock(&(*out)->lock);
    return vmem__error(-EINVAL, "place %u has no lease", place);
}

static void free_lists(struct lease *l)
{
    free(l->slots);
    free(l->ranges);
    l->slots = NULL;
    l->ranges = NULL;
}

// Ends a call that took the lock, and the lease if that was all. Returns rc.
static int leave(struct lease *l, int rc)
{
    void (*ended)(void *) = NULL;
    void *arg = l->arg;
    if (l->check && !rc)
        rc = check_books(l);
    while (l->giving && l->closing && !l->stats.segments) // in evict_idle(), the member cannot leave
        pthread_cond_wait(&l->moved, &l->lock);
    if (l->closing && !l->users && !l->stats.segments) {
        ended = l->ended;
        end_membership(l);
        free_lists(l);
        l->closing = false;
        l->generation = (l->generation + 1) % (UINT32_MAX / VMEM_TORCH_PLACES);
        l->pid = 0;
    }
    pthread_mutex_unlock(&l->lock);
    if (ended)
        ended(arg);
    return rc;
}

static int check_open(const struct lease *l)
{
    return l->closing ? vmem__error(-EINVAL, "the lease is closed, but PyTorch still has segments of it") : 0;
}

// ---- the interface -----------------------------------------------------------------------------------------------------

// Takes the configuration over, as far as the context and the pool allow it.
static int configure(struct lease *l, vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_torch_config *c)
{
    struct vmem_info info = {.size = sizeof info};
    struct vmem_kv_pool_info budget = {.size = sizeof budget};
    int rc = vmem_context_info(ctx, &info);
    rc = rc ? rc : vmem_kv_pool_query(pool, &budget);
    if (rc)
        return rc;
    l->ctx = ctx;
    l->gpu = info.caps & VMEM_CAP_GPU;
    l->check = c->flags & VMEM_TORCH_CHECK;
    l->device = info.device;
    l->wait_ms = c->wait_ms ? c->wait_ms : WAIT_MS;
    l->page_size = c->page_size ? c->page_size : VMEM_PAGE_2M;
    l->most = c->most && c->most < budget.budget ? c->most : budget.budget;
    if (l->page_size & (l->page_size - 1) || !(info.page_sizes & l->page_size))
        return vmem__error(-EINVAL, "page_size %" PRIu64 ": the backend has no such pages", l->page_size);
    if (l->most < l->page_size)
        return vmem__error(-EINVAL, "most %" PRIu64 " is less than a page, %" PRIu64, l->most, l->page_size);
    for (l->slot_bytes = SLOT_BYTES; l->most / l->slot_bytes > MOST_SLOTS;)
        l->slot_bytes *= 2;
    l->page_shift = (uint32_t)__builtin_ctzll(l->page_size);
    l->n_slots = (uint32_t)(l->most / l->slot_bytes + 1) * 4 + EXTRA_SLOTS;
    l->ended = c->ended;
    l->arg = c->arg;
    return 0;
}

static int set_up(struct lease *l, vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_torch_config *c)
{
    int rc = configure(l, ctx, pool, c);
    if (rc)
        return rc;
    l->users = l->n_ended = 0;
    l->moving = l->giving = l->closing = false;
    l->moves = l->reserved = l->awaited = l->missed = l->claimed = 0;
    l->stats = (struct vmem_torch_stats){0};
    l->shortage = (struct vmem_kv_shortage){0};
    l->slots = calloc(l->n_slots, sizeof(*l->slots));
    l->ranges = calloc(l->n_slots, sizeof(*l->ranges));
    rc = l->slots && l->ranges ? 0 : vmem__error(-ENOMEM, "no memory for bookkeeping");
    if (!rc && c->flags & VMEM_TORCH_SMALL)
        vmem__limit_arenas(ctx, SMALL_ARENA, true);
    rc = rc ? rc : join(l, pool, c->name ? c->name : "torch");
    if (rc)
        free_lists(l);
    return rc;
}

// Ends leases that could not end when they were closed, as a graph was being captured.
static void end_closed(void)
{
    struct lease *l;
    for (uint32_t i = 0; i < VMEM_TORCH_PLACES; i++) {
        if (enter_pair(i, &l))
            continue;
        if (l->closing)
            sweep(l);
        leave(l, 0);
    }
}

int vmem_torch_open(vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_torch_config *cfg, uint32_t *place)
{
    if (!ctx || !pool || !cfg || !place)
        return vmem__error(-EINVAL, "ctx, pool, cfg and place must not be NULL");
    struct vmem_torch_config c;
    int rc = vmem__struct_take(&c, sizeof c, sizeof c, cfg, "cfg");
    if (!rc)
        rc = vmem__check_flags(c.flags, VMEM_TORCH_CHECK | VMEM_TORCH_SMALL);
    if (rc)
        return rc;
    end_closed();
    rc = vmem__error(-EMFILE, "all %u places have a lease: close one", VMEM_TORCH_PLACES);
    pthread_mutex_lock(&places);
    for (uint32_t i = 0; i < VMEM_TORCH_PLACES; i++) {
        struct lease *l = &leases[i];
        if (l->pid)
            continue;
        pthread_mutex_lock(&l->lock);
        rc = set_up(l, ctx, pool, &c);
        if (!rc) {
            l->pid = getpid();
            *place = l->generation * VMEM_TORCH_PLACES + i;
        }
        pthread_mutex_unlock(&l->lock);
        break;
    }
    pthread_mutex_unlock(&places);
    return rc;
}

int vmem_torch_close(uint32_t place)
{
    struct lease *l;
    int rc = enter(place, &l);
    if (rc)
        return rc;
    sweep(l);
    rc = check_open(l);
    drop_claim(l);
    l->closing = true;
    return leave(l, rc);
}

static int alloc_segment(struct lease *l, uint64_t bytes, struct slot **out)
{
    const uint64_t slots = bytes / l->slot_bytes + (bytes % l->slot_bytes != 0);
    uint32_t first = 0;
    sweep(l);
    int rc = check_open(l);
    rc = rc ? rc : find_run(l, slots < UINT32_MAX ? (uint32_t)slots : UINT32_MAX, &first);
    if (rc)
        return rc;
    take_slots(l, first, (uint32_t)slots, bytes);
    struct slot *s = *out = &l->slots[first];
    rc = back_segments(l, s, 0, l->wait_ms);
    if (rc) {
        give_slots(l, s);
        return rc;
    }
    s->state = LIVE;
    l->stats.allocs++;
    return 0;
}

static void *alloc_in(uint32_t pair, size_t size, int device)
{
    struct lease *l;
    struct slot *s;
    void *addr = NULL;
    if (!size || enter_pair(pair, &l))
        return NULL;
    const int mode = l->gpu ? vmem__beside_captures() : 0;
    if ((!l->gpu || device == l->device) && !alloc_segment(l, size, &s))
        addr = (void *)(uintptr_t)address(l, (uint32_t)(s - l->slots));
    else
        l->stats.refused++;
    if (l->gpu)
        vmem__restore_capture_mode(mode);
    return leave(l, 0) ? NULL : addr;
}

static void free_in(uint32_t pair, void *addr)
{
    struct lease *l;
    if (!addr || enter_pair(pair, &l))
        return;
    struct slot *s = segment_at(l, (uintptr_t)addr);
    if (!s) {
        l->stats.strangers++;
        leave(l, 0);
        return;
    }
    int rc = 0;
    l->stats.frees++;
    const enum state was = s->state;
    if (was != LIVE) {
        l->stats.parked_segments--;
        l->stats.parked_bytes -= s->bytes;
    }
    if (was != PARKED)
        s->state = FREEING;
    if (was == IDLE)
        offer(l);
    if (was != PARKED)
        rc = unlock_for_kernels(l);
    if (rc == -EBUSY) {
        s->state = ENDED;
        l->n_ended++;
    } else {
        drop_segment(l, s);
    }
    if (was == PARKED)
        offer(l);
    leave(l, 0);
}

// Locks the lease of this place, and begins a park or an unpark, after that of another thread.
static int enter_and_move(uint32_t place, struct lease **out)
{
    int rc = enter(place, out);
    if (rc)
        return rc;
    struct lease *l = *out;
    l->users++;
    while (l->moving)
        pthread_cond_wait(&l->moved, &l->lock);
    l->users--;
    rc = check_open(l);
    l->moving = !rc;
    l->moves += !rc;
    return rc ? leave(l, rc) : 0;
}

static void end_move(struct lease *l)
{
    l->moving = false;
    pthread_cond_broadcast(&l->moved);
}

static int check_segments(const struct lease *l, const char *name, const uint64_t *addrs, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!segment_at(l, addrs[i]))
            return vmem__error(-EINVAL, "%s[%zu] %#" PRIx64 ": no segment of the lease begins there", name, i,
                               addrs[i]);
    return 0;
}

int vmem_torch_park(uint32_t place, const uint64_t *idle, size_t n, uint64_t *bytes)
{
    struct lease *l;
    uint64_t gone = 0;
    if (bytes)
        *bytes = 0;
    if (n && !idle)
        return vmem__error(-EINVAL, "idle must not be NULL");
    int rc = enter_and_move(place, &l);
    if (rc)
        return rc;
    rc = check_segments(l, "idle", idle, n);
    if (!rc)
        drop_claim(l);
    for (size_t i = 0; i < n && !rc; i++) {
        struct slot *s = segment_at(l, idle[i]);
        if (s->state != LIVE)
            continue;
        s->state = IDLE;
        l->stats.parks++;
        l->stats.parked_segments++;
        l->stats.parked_bytes += s->bytes;
        gone += s->bytes;
    }
    offer(l);
    end_move(l);
    if (bytes)
        *bytes = gone;
    return leave(l, rc);
}

// For the pool's thread: other members ask for pages. It must not wait for the lock, because a thread that holds the lock
// may wait for that thread. The pool asks again.
static void evict_idle(void *lease, uint64_t pages)
{
    struct lease *l = lease;
    if (pthread_mutex_trylock(&l->lock))
        return;
    l->giving = true;
    const uint64_t moves = l->moves;
    if (!l->moving && l->member.offered && unlock_for_kernels(l) != -EBUSY && !l->moving && l->moves == moves)
        release_idle(l, pages);
    l->giving = false;
    pthread_cond_broadcast(&l->moved);
    pthread_mutex_unlock(&l->lock);
}

// Gives the wanted segments to PyTorch again.
static void revive(struct lease *l)
{
    for (uint32_t i = 0; i < l->n_slots; i++) {
        struct slot *s = &l->slots[i];
        if (!s->wanted || (s->state != PARKED && s->state != IDLE))
            continue;
        s->state = LIVE;
        s->refused = false;
        l->stats.unparks++;
        l->stats.parked_segments--;
        l->stats.parked_bytes -= s->bytes;
    }
}

static void mark_wanted(struct lease *l, const uint64_t *segments, size_t n)
{
    for (uint32_t i = 0; i < l->n_slots; i++)
        l->slots[i].wanted = !segments;
    for (size_t i = 0; segments && i < n; i++)
        segment_at(l, segments[i])->wanted = true;
}

// The work of both calls below. segments: NULL for all.
static int unpark_some(uint32_t place, const uint64_t *segments, size_t n, uint64_t most, uint32_t wait_ms,
                       uint64_t *missing, uint8_t *lost)
{
    struct lease *l;
    if (missing)
        *missing = 0;
    int rc = enter_and_move(place, &l);
    if (rc)
        return rc;
    rc = check_segments(l, "segments", segments, n);
    if (!rc) {
        sweep(l);
        mark_wanted(l, segments, n);
        rc = l->stats.parked_segments ? back_segments(l, NULL, most, wait_ms) : 0;
        if (missing && rc == -ENOMEM)
            *missing = l->stats.short_bytes;
        if (rc)
            drop_claim(l);
    }
    for (size_t i = 0; i < n && !rc && lost; i++) {
        const struct slot *s = segment_at(l, segments[i]); // PyTorch may have freed it meanwhile
        lost[i] = !s || s->state != PARKED ? 0 : s->wanted ? 1 : VMEM_TORCH_CLAIMED;
    }
    if (!rc)
        revive(l);
    offer(l);
    end_move(l);
    return leave(l, rc);
}

int vmem_torch_unpark(uint32_t place, uint32_t wait_ms, uint64_t *missing)
{
    return unpark_some(place, NULL, 0, UINT64_MAX, wait_ms, missing, NULL);
}

int vmem_torch_unpark_segments(uint32_t place, const uint64_t *segments, size_t n, uint64_t most, uint32_t wait_ms,
                               uint64_t *missing, uint8_t *lost)
{
    static const uint64_t none[1];
    if (n && !segments)
        return vmem__error(-EINVAL, "segments must not be NULL");
    return unpark_some(place, segments ? segments : none, n, most, wait_ms, missing, lost);
}

int vmem_torch_reserve(uint32_t place, uint64_t bytes)
{
    struct lease *l;
    int rc = enter(place, &l);
    if (rc)
        return rc;
    rc = check_open(l);
    if (!rc && bytes > l->most)
        rc = vmem__error(-EINVAL, "bytes %" PRIu64 " is more than the lease may have, %" PRIu64, bytes, l->most);
    if (!rc)
        rc = vmem__pool_set_share(l->member.pool_member, bytes, l->most);
    l->reserved = rc ? l->reserved : bytes;
    return leave(l, rc);
}

int vmem_torch_trim(uint32_t place)
{
    struct lease *l;
    int rc = enter_and_move(place, &l);
    if (rc)
        return rc;
    rc = unlock_for_kernels(l);
    end_move(l);
    if (rc != -EBUSY) {
        rc = release_idle(l, UINT64_MAX);
        sweep(l);
        trim(l, false);
    }
    return leave(l, rc);
}

int vmem_torch_get_stats(uint32_t place, struct vmem_torch_stats *out)
{
    struct lease *l;
    if (!out)
        return vmem__error(-EINVAL, "out must not be NULL");
    int rc = enter(place, &l);
    if (rc)
        return rc;
    struct vmem_torch_stats stats = l->stats;
    lock_member(l);
    stats.held_bytes = (l->member.held - l->claimed) << l->page_shift;
    stats.lacking_bytes = MAX(l->awaited, sat_sub(l->reserved, l->member.budget << l->page_shift));
    unlock_member(l);
    leave(l, 0);
    return vmem__struct_give(out, &stats, sizeof stats, "out");
}

int vmem_torch_last_shortage(uint32_t place, struct vmem_kv_shortage *out)
{
    struct lease *l;
    if (!out)
        return vmem__error(-EINVAL, "out must not be NULL");
    int rc = enter(place, &l);
    if (rc)
        return rc;
    const struct vmem_kv_shortage shortage = l->shortage;
    leave(l, 0);
    return vmem__struct_give(out, &shortage, sizeof shortage, "out");
}

// ---- the functions that PyTorch calls by their addresses: a pair for each place --------------------------------------
//
// PyTorch looks them up by name in whatever library they are compiled into, which may hide all other names.

#define PAIR(n)                                                                                                        \
    __attribute__((visibility("default"))) void *vmem_torch_alloc_##n(size_t size, int device, void *stream)           \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return alloc_in(n, size, device);                                                                              \
    }                                                                                                                  \
    __attribute__((visibility("default"))) void vmem_torch_free_##n(void *addr, size_t size, int device, void *stream) \
    {                                                                                                                  \
        (void)size, (void)device, (void)stream;                                                                        \
        free_in(n, addr);                                                                                              \
    }

PAIR(0)
PAIR(1)
PAIR(2)
PAIR(3)
PAIR(4)
PAIR(5)
PAIR(6)
PAIR(7)
PAIR(8)
PAIR(9)
PAIR(10)
PAIR(11)
PAIR(12)
PAIR(13)
PAIR(14)
PAIR(15)
