// Leases: segments for PyTorch, out of a pool of KV caches.
//
// A lease is a KV cache whose slots are pieces of address space and whose tokens are pages. A segment consists
// of consecutive slots, which are consecutive in addresses, too. A slot whose pages are there is a request of the cache:
// the pool therefore takes none of them. To give up a segment's pages is to end its requests; its addresses stay, as
// nobody else asks this cache for slots. A parked segment is first IDLE: its pages are offered to the pool, and go when
// somebody asks for them, in evict_idle(). Only the functions under "the cache" below call the cache.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/memory.h"
#include "kv/member.h"
#include "driver/kernels.h"
#include "vmem_torch.h"

#define SLOT_BYTES (UINT64_C(32) << 20) // the least bytes of a slot. Most segments are of 2 or 20 MiB
#define MOST_SLOTS 2048                 // that the lease's pages may fill; there are four times as many, and
#define EXTRA_SLOTS 1024                // these, so that a large segment finds consecutive slots, too
// The device memory that is allocated at once with VMEM_TORCH_SMALL: a GiB takes 24 ms in pieces of 2 MiB, and 6 ms in
// pieces of 8 MiB (H100). What has left holds at most a piece at each of its ends.
#define SMALL_ARENA (UINT64_C(8) << 20)
#define WAIT_MS 10000
#define ASK_AGAIN_NS 3000000 // a pool repeats its refusal for 2 ms without asking its members
#define PATIENT_NS 20000000  // between the questions of an allocation that waits although it is refused
#define FINAL_NS 1000000000  // a refusal is final if nothing comes for so long

// After a step that was short of memory.
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
    PARKED,  // PyTorch has it. Slots that are active anyway have pages that could not be given back
    FREEING, // a thread waits for kernels before it gives the pages back
    ENDED,   // PyTorch has freed it, but its pages could not be given back: `sweep` tries again
};

struct slot {
    uint8_t state;   // enum state, of the segment that begins here
    bool taken;      // part of a segment
    bool active;     // a request of the cache
    bool wanted;     // an unpark is about this segment
    uint32_t length; // slots of the segment that begins here
    uint64_t bytes;  // of the segment that begins here
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
    uint64_t idle;  // bytes of IDLE segments
    uint32_t users; // calls that use the lease without the lock
    // Bytes of the reservation, and those that a call waits for.
    uint64_t reserved, awaited;
    vmem_context *ctx;
    vmem_kv *kv;
    bool gpu;
    int device;
    uint32_t wait_ms;
    uint64_t base, most, page_size, slot_bytes;
    uint32_t slot_pages, n_slots, n_ended;
    struct slot *slots;
    int32_t *lengths; // of a step; all 0 in between
    uint32_t *list;   // slots that begin or end
    struct vmem_torch_stats stats;
    struct vmem_kv_shortage shortage;
    void (*ended)(void *arg);
    void *arg;
};

static struct lease leases[VMEM_TORCH_PLACES] = {
    [0 ... VMEM_TORCH_PLACES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER}};
static pthread_mutex_t places = PTHREAD_MUTEX_INITIALIZER; // taken before a lease's lock

// ---- the cache: every call of it, with the lease's lock held but where it says otherwise ------------------------------

static uint64_t evict_idle(void *lease, uint64_t pages);

static int cache_new(struct lease *l, vmem_kv_pool *pool, const char *name, uint32_t flags)
{
    const struct vmem_kv_tensor tensor = {.row_bytes = l->page_size};
    const struct vmem_kv_config cfg = {
        .size = sizeof cfg,
        .flags = VMEM_KV_LAZY | VMEM_KV_UNSHARED | (flags & VMEM_TORCH_CHECK ? VMEM_KV_CHECK : 0),
        .tensors = &tensor,
        .n_tensors = 1,
        .slots = l->n_slots,
        .max_tokens = l->slot_pages,
        .page_size = l->page_size,
        .budget = l->page_size,
    };
    const struct vmem_kv_pool_share share = {.size = sizeof share,
                                             .max = l->most,
                                             .name = name,
                                             .evict = evict_idle,
                                             .arg = l};
    struct vmem_kv_layout layout = {.size = sizeof layout};
    int rc = vmem_kv_create(l->ctx, &cfg, &l->kv);
    if (rc)
        return rc;
    rc = vmem_kv_get_layout(l->kv, 0, &layout);
    if (!rc && layout.slot_stride != l->slot_bytes)
        rc = vmem__error(-EOPNOTSUPP, "a slot spans %" PRIu64 " bytes instead of %" PRIu64, layout.slot_stride,
                         l->slot_bytes);
    rc = rc ? rc : vmem_kv_pool_join(pool, l->kv, &share);
    l->base = layout.addr;
    if (rc) {
        char text[VMEM__TEXT];
        vmem__keep_error(text);
        vmem_kv_destroy(l->kv);
        vmem__error(0, "%s", text);
    }
    return rc;
}

// The listed slots become requests without pages. Nothing is asked for before back_segments().
static int cache_begin(struct lease *l, uint32_t n)
{
    int rc = vmem__kv_begin(l->kv, l->list, n);
    for (uint32_t i = 0; i < n && !rc; i++)
        l->slots[l->list[i]].active = true;
    return rc;
}

// Ends the slots' requests, whose pages go: all, or none.
static int cache_end(struct lease *l, const uint32_t *slots, uint32_t n)
{
    int rc = n ? vmem__kv_end(l->kv, slots, n) : 0;
    for (uint32_t i = 0; i < n && !rc; i++)
        l->slots[slots[i]].active = false;
    return rc;
}

// Backs all requests in l->lengths, or none. -ENOMEM: *next says whether waiting for the pool may help.
static int cache_step(struct lease *l, enum next *next)
{
    int rc = vmem_kv_step(l->kv, l->lengths, l->n_slots, 0);
    *next = GIVE_UP;
    if (rc != -ENOMEM)
        return rc;
    l->shortage = (struct vmem_kv_shortage){.size = sizeof l->shortage};
    vmem_kv_last_shortage(&l->shortage);
    l->stats.short_bytes = l->shortage.missing_pages * l->page_size;
    if (l->shortage.coming_pages)
        *next = WAIT;
    else if (l->shortage.refusal == VMEM_KV_IN_USE || l->shortage.refusal == VMEM_KV_AT_MINIMUM)
        *next = ASK_AGAIN;
    else if (l->reserved && l->shortage.reason == VMEM_KV_SHORT_OF_DEVICE)
        *next = ASK_AGAIN; // no member can give, but somebody outside the pool may
    return rc;
}

// Without the lock: until the pool takes the question that it has just refused once more.
static void cache_pause(struct lease *l, long ns)
{
    l->users++;
    pthread_mutex_unlock(&l->lock);
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    pthread_mutex_lock(&l->lock);
    l->users--;
}

// Waits for the pool, without the lock. False: no member will give what is missing.
static bool cache_wait(struct lease *l, uint32_t ms)
{
    uint32_t answer = VMEM_KV_UNASKED;
    l->stats.waits++;
    l->users++;
    pthread_mutex_unlock(&l->lock);
    const int rc = vmem_kv_pool_wait(l->kv, ms, &answer);
    pthread_mutex_lock(&l->lock);
    l->users--;
    return !rc && answer != VMEM_KV_REFUSED && !l->closing;
}

static void cache_offer(struct lease *l) { vmem__kv_offer(l->kv, l->idle, l->stats.parked_bytes - l->idle); }

static int cache_reserve(struct lease *l, uint64_t bytes) { return vmem_kv_pool_set_share(l->kv, bytes, l->most); }

static int cache_trim(struct lease *l) { return vmem_kv_reclaim(l->kv, 0, 0, NULL); }

static void cache_stats(struct lease *l, uint64_t *held, uint64_t *budget)
{
    struct vmem_kv_stats stats = {.size = sizeof stats};
    const int rc = vmem_kv_get_stats(l->kv, &stats);
    *held = rc ? 0 : stats.held_pages * l->page_size;
    *budget = rc ? 0 : stats.budget_pages * l->page_size;
}

// ---- segments, with the lock held --------------------------------------------------------------------------------------

static uint64_t address(const struct lease *l, uint32_t slot) { return l->base + slot * l->slot_bytes; }

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

static uint32_t pages_in(const struct lease *l, const struct slot *s, uint32_t i)
{
    const uint64_t left = (s->bytes - i * l->slot_bytes + l->page_size - 1) / l->page_size;
    return left < l->slot_pages ? (uint32_t)left : l->slot_pages;
}

// Adds the segment's slots that are active, or are not, to the list.
static uint32_t list_slots(struct lease *l, const struct slot *s, bool active, uint32_t n)
{
    for (uint32_t i = 0; i < s->length; i++)
        if (s[i].active == active)
            l->list[n++] = (uint32_t)(s - l->slots) + i;
    return n;
}

static int begin_slots(struct lease *l, const struct slot *s)
{
    const uint32_t n = list_slots(l, s, false, 0);
    return n ? cache_begin(l, n) : 0;
}

// The listed slots end, together or, if that is refused, one by one.
static int end_listed(struct lease *l, uint32_t n)
{
    int rc = cache_end(l, l->list, n);
    if (!rc)
        return 0;
    rc = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int failed = cache_end(l, &l->list[i], 1);
        rc = rc ? rc : failed;
    }
    return rc;
}

static int end_slots(struct lease *l, const struct slot *s) { return end_listed(l, list_slots(l, s, true, 0)); }

// Gives the segment's pages and addresses back. If that fails, the segment is ENDED.
static void drop_segment(struct lease *l, struct slot *s)
{
    const bool counted = s->state == ENDED;
    if (end_slots(l, s)) {
        l->n_ended += !counted;
        s->state = ENDED;
        return;
    }
    l->n_ended -= counted;
    l->stats.segments--;
    l->stats.bytes -= s->bytes;
    for (uint32_t i = 0; i < s->length; i++)
        s[i].taken = false;
    *s = (struct slot){0};
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

// The pages of IDLE segments go until so many bytes have; their kernels have ended. What cannot be unmapped stays with the
// cache. *gone: bytes of the segments.
static int release_idle(struct lease *l, uint64_t bytes, uint64_t *gone)
{
    uint32_t n = 0;
    *gone = 0;
    for (uint32_t i = 0; i < l->n_slots && *gone < bytes; i++) {
        struct slot *s = &l->slots[i];
        if (s->state != IDLE)
            continue;
        s->state = PARKED;
        l->idle -= s->bytes;
        *gone += s->bytes;
        n = list_slots(l, s, true, n);
    }
    const int rc = end_listed(l, n);
    cache_offer(l);
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

// Backs this segment, or all parked ones that are wanted (NULL), or none. Waits at most `ms` for the pool. A refusal is
// not final: a member gives in portions, and finds more to give when its own users have freed something. It is when
// nothing more has come for a second, but for an allocation beside a reservation.
static int back_segments(struct lease *l, const struct slot *only, uint32_t ms)
{
    const uint64_t until = vmem__now() + ms * UINT64_C(1000000);
    uint64_t least = UINT64_MAX, came = 0;
    int rc;
    for (;;) {
        for (uint32_t i = 0; i < l->n_slots; i++) {
            const struct slot *s = &l->slots[i];
            if (only ? s != only : !lacks_pages(s))
                continue;
            for (uint32_t k = 0; k < s->length; k++)
                l->lengths[i + k] = (int32_t)pages_in(l, s, k);
        }
        enum next next;
        rc = cache_step(l, &next);
        memset(l->lengths, 0, l->n_slots * sizeof(*l->lengths));
        const uint64_t t = vmem__now();
        if (rc != -ENOMEM || next == GIVE_UP || t >= until)
            break;
        l->awaited = l->stats.short_bytes;
        if (next == WAIT && cache_wait(l, (uint32_t)((until - t) / 1000000 + 1)))
            continue;
        if (l->stats.short_bytes < least) {
            least = l->stats.short_bytes;
            came = t;
        }
        if ((t - came > FINAL_NS && !(only && l->reserved)) || l->closing)
            break;
        cache_pause(l, t - came > FINAL_NS / 20 ? PATIENT_NS : ASK_AGAIN_NS);
    }
    l->awaited = 0;
    return rc;
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
    free(l->lengths);
    free(l->list);
    l->slots = NULL;
    l->lengths = NULL;
    l->list = NULL;
}

// Unlocks it, and ends it if that was all.
static void leave(struct lease *l)
{
    void (*ended)(void *) = NULL;
    void *arg = l->arg;
    while (l->giving && l->closing && !l->stats.segments) // in evict_idle(), the cache cannot end
        pthread_cond_wait(&l->moved, &l->lock);
    if (l->closing && !l->users && !l->stats.segments) {
        ended = l->ended;
        vmem_kv_destroy(l->kv);
        free_lists(l);
        l->kv = NULL;
        l->closing = false;
        l->generation = (l->generation + 1) % (UINT32_MAX / VMEM_TORCH_PLACES);
        l->pid = 0;
    }
    pthread_mutex_unlock(&l->lock);
    if (ended)
        ended(arg);
}

static int check_open(const struct lease *l)
{
    return l->closing ? vmem__error(-EINVAL, "the lease is closed, but PyTorch still has segments of it") : 0;
}

// ---- the interface -----------------------------------------------------------------------------------------------------

static int set_up(struct lease *l, vmem_context *ctx, vmem_kv_pool *pool, const struct vmem_torch_config *c)
{
    struct vmem_info info = {.size = sizeof info};
    struct vmem_kv_pool_info budget = {.size = sizeof budget};
    int rc = vmem_context_info(ctx, &info);
    rc = rc ? rc : vmem_kv_pool_query(pool, &budget);
    if (rc)
        return rc;
    l->ctx = ctx;
    l->gpu = info.caps & VMEM_CAP_GPU;
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
    l->slot_pages = (uint32_t)(l->slot_bytes / l->page_size);
    l->n_slots = (uint32_t)(l->most / l->slot_bytes + 1) * 4 + EXTRA_SLOTS;
    l->users = l->n_ended = 0;
    l->moving = l->giving = l->closing = false;
    l->moves = l->idle = l->reserved = l->awaited = 0;
    l->stats = (struct vmem_torch_stats){0};
    l->shortage = (struct vmem_kv_shortage){0};
    l->ended = c->ended;
    l->arg = c->arg;
    l->slots = calloc(l->n_slots, sizeof(*l->slots));
    l->lengths = calloc(l->n_slots, sizeof(*l->lengths));
    l->list = calloc(l->n_slots, sizeof(*l->list));
    rc = l->slots && l->lengths && l->list ? 0 : vmem__error(-ENOMEM, "no memory for bookkeeping");
    if (!rc && c->flags & VMEM_TORCH_SMALL)
        vmem__limit_arenas(ctx, SMALL_ARENA);
    rc = rc ? rc : cache_new(l, pool, c->name ? c->name : "torch", c->flags);
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
        leave(l);
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
    l->closing = true;
    leave(l);
    return rc;
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
    rc = begin_slots(l, s);
    rc = rc ? rc : back_segments(l, s, l->wait_ms);
    if (rc) {
        drop_segment(l, s);
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
    leave(l);
    return addr;
}

static void free_in(uint32_t pair, void *addr)
{
    struct lease *l;
    if (!addr || enter_pair(pair, &l))
        return;
    struct slot *s = segment_at(l, (uintptr_t)addr);
    if (!s) {
        l->stats.strangers++;
        leave(l);
        return;
    }
    int rc = 0;
    l->stats.frees++;
    const enum state was = s->state;
    if (was != LIVE) {
        l->stats.parked_segments--;
        l->stats.parked_bytes -= s->bytes;
    }
    if (was != PARKED) {
        s->state = FREEING;
        if (was == IDLE)
            l->idle -= s->bytes;
    }
    if (was != LIVE)
        cache_offer(l);
    if (was != PARKED)
        rc = unlock_for_kernels(l);
    if (rc == -EBUSY) {
        s->state = ENDED;
        l->n_ended++;
    } else {
        drop_segment(l, s);
    }
    leave(l);
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
    if (rc)
        leave(l);
    return rc;
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
    for (size_t i = 0; i < n && !rc; i++) {
        struct slot *s = segment_at(l, idle[i]);
        if (s->state != LIVE)
            continue;
        s->state = IDLE;
        l->idle += s->bytes;
        l->stats.parks++;
        l->stats.parked_segments++;
        l->stats.parked_bytes += s->bytes;
        gone += s->bytes;
    }
    cache_offer(l);
    end_move(l);
    leave(l);
    if (bytes)
        *bytes = gone;
    return rc;
}

// For the pool's thread: other members ask for pages. It must not wait for the lock, because a thread that holds the lock
// may wait for the pool's. The pool asks again.
static uint64_t evict_idle(void *lease, uint64_t pages)
{
    struct lease *l = lease;
    uint64_t gone = 0;
    if (pthread_mutex_trylock(&l->lock))
        return 0;
    l->giving = true;
    const uint64_t moves = l->moves;
    if (!l->moving && l->idle && unlock_for_kernels(l) != -EBUSY && !l->moving && l->moves == moves)
        release_idle(l, pages * l->page_size, &gone);
    l->giving = false;
    pthread_cond_broadcast(&l->moved);
    pthread_mutex_unlock(&l->lock);
    return gone / l->page_size;
}

// Backs the wanted segments, or none.
static int unpark(struct lease *l, uint32_t wait_ms)
{
    uint32_t n = 0;
    bool any = false;
    for (uint32_t i = 0; i < l->n_slots; i++)
        if (lacks_pages(&l->slots[i])) {
            any = true;
            n = list_slots(l, &l->slots[i], false, n);
        }
    int rc = n ? cache_begin(l, n) : 0;
    if (!rc && any)
        rc = back_segments(l, NULL, wait_ms);
    n = 0;
    for (uint32_t i = 0; i < l->n_slots && rc; i++)
        if (lacks_pages(&l->slots[i]))
            n = list_slots(l, &l->slots[i], true, n);
    end_listed(l, n); // what cannot be given back now is given back by the next call
    return rc;
}

// Gives the wanted segments to PyTorch again.
static void revive(struct lease *l)
{
    for (uint32_t i = 0; i < l->n_slots; i++) {
        struct slot *s = &l->slots[i];
        if (!s->wanted || (s->state != PARKED && s->state != IDLE))
            continue;
        if (s->state == IDLE)
            l->idle -= s->bytes;
        s->state = LIVE;
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
static int unpark_some(uint32_t place, const uint64_t *segments, size_t n, uint32_t wait_ms, uint64_t *missing,
                       uint8_t *lost)
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
        rc = l->stats.parked_segments ? unpark(l, wait_ms) : 0;
        if (missing && rc == -ENOMEM)
            *missing = l->stats.short_bytes;
    }
    for (size_t i = 0; i < n && !rc && lost; i++) {
        const struct slot *s = segment_at(l, segments[i]); // PyTorch may have freed it meanwhile
        lost[i] = s && s->state == PARKED;
    }
    if (!rc)
        revive(l);
    cache_offer(l);
    end_move(l);
    leave(l);
    return rc;
}

int vmem_torch_unpark(uint32_t place, uint32_t wait_ms, uint64_t *missing)
{
    return unpark_some(place, NULL, 0, wait_ms, missing, NULL);
}

int vmem_torch_unpark_segments(uint32_t place, const uint64_t *segments, size_t n, uint32_t wait_ms, uint64_t *missing,
                               uint8_t *lost)
{
    static const uint64_t none[1];
    if (n && !segments)
        return vmem__error(-EINVAL, "segments must not be NULL");
    return unpark_some(place, segments ? segments : none, n, wait_ms, missing, lost);
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
    rc = rc ? rc : cache_reserve(l, bytes);
    l->reserved = rc ? l->reserved : bytes;
    leave(l);
    return rc;
}

int vmem_torch_trim(uint32_t place)
{
    struct lease *l;
    uint64_t gone;
    int rc = enter_and_move(place, &l);
    if (rc)
        return rc;
    rc = unlock_for_kernels(l);
    end_move(l);
    if (rc != -EBUSY) {
        const int failed = release_idle(l, UINT64_MAX, &gone);
        sweep(l);
        rc = cache_trim(l);
        rc = rc ? rc : failed;
    }
    leave(l);
    return rc;
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
    uint64_t budget;
    cache_stats(l, &stats.held_bytes, &budget);
    stats.lacking_bytes = MAX(l->awaited, l->reserved > budget ? l->reserved - budget : 0);
    leave(l);
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
    leave(l);
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
