// The background thread. While an iteration runs, it backs the rows that the next iterations need. It gives up rows
// that windows have passed, keeps some memory unused, and backs the slot of the next request.
//
// SPDX-License-Identifier: MIT
#include <string.h>
#include <time.h>

#include "kv/kv.h"

// Between these two calls the worker has dropped the lock. pages: how many pages of kv->ledger.held it maps, unmaps or
// releases meanwhile.
static void drop_lock(vmem_kv *kv, uint64_t pages)
{
    kv->ledger.pending = pages;
    pthread_mutex_unlock(&kv->gate.state);
    kv_at(KV_WORKER_UNLOCKED);
}

static void take_lock(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->gate.state);
    kv->ledger.pending = 0;
}

static void begin_job(vmem_kv *kv, uint32_t slot, uint64_t pages)
{
    kv->slots[slot].busy = true;
    drop_lock(kv, pages);
}

static void end_job(vmem_kv *kv, uint32_t slot, int rc)
{
    take_lock(kv);
    kv->slots[slot].busy = false;
    if (rc) {
        kv->slots[slot].skip = true;
        kv->stats.worker_errors++;
    }
}

// Plans to back a slot up to so many tokens. An active slot's pages go on where they end; a free slot's begin at row 0.
static void plan_backing(vmem_kv *kv, uint32_t slot, uint64_t tokens, bool blocks)
{
    const bool is_free = kv->slots[slot].state == VMEM_KV_FREE;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *sp = kv_span(kv, slot, i);
        uint32_t to = vmem__kv_need_hi(kv, g, tokens);
        if (blocks)
            to = MIN((to + kv->block_pages - 1) / kv->block_pages * kv->block_pages, g->slot_pages);
        const uint32_t from = is_free ? 0 : sp->lo;
        if (sp->lo <= to && vmem__kv_grow_to(kv, &kv->worker.grow, slot, i, from, to, 0))
            kv->slots[slot].skip = true;
    }
}

// Backs the planned pages if that leaves `leave` pages unused, and adds their number to *pages. Returns false if it did
// nothing.
static bool back_planned(vmem_kv *kv, uint32_t slot, uint64_t leave, uint64_t *pages)
{
    struct kv_grow *l = &kv->worker.grow;
    uint64_t total = l->total;
    if (!total || total + leave > kv_unused(kv) || !vmem__kv_leaves_others(kv, total)) {
        vmem__kv_grow_reset(l);
        return false;
    }
    kv->ledger.held += total;
    begin_job(kv, slot, total);
    int rc = vmem__kv_grow_map(kv, l);
    end_job(kv, slot, rc);
    if (rc) {
        kv->ledger.held -= total;
        vmem__kv_grow_reset(l);
    } else {
        vmem__kv_grow_commit(kv, l);
        *pages += total;
    }
    return true;
}

// Cuts a victim's pages off, and adds their number to *gone. kv->ledger.held does not tell it, because calls may change
// that while the lock is dropped.
static void cut_span(vmem_kv *kv, const struct kv_victim *v, uint64_t *gone)
{
    struct kv_cut *c = &kv->worker.cut;
    int rc = vmem__kv_cut_begin(kv, c, v->slot, v->group, v->lo, v->hi);
    if (rc) { // the slot is skipped, and the thread goes on with others
        kv->slots[v->slot].stuck = kv->turn.stuck = true;
        return;
    }
    kv->turn.cutting = true;
    begin_job(kv, v->slot, c->n_pages);
    rc = vmem__kv_cut_unmap(kv, c);
    end_job(kv, v->slot, rc);
    kv->turn.cutting = false;
    kv->slots[v->slot].stuck |= rc != 0;
    kv->turn.stuck |= rc != 0;
    vmem__kv_cut_end(kv, c, rc);
    *gone += rc ? 0 : c->n_pages;
}

// Unmaps the stale mappings of one slot.
static bool unmap_stale_one(vmem_kv *kv)
{
    for (uint32_t s = 0; (s = vmem__kv_set_next(kv, kv->stale_slots, s)) != KV_NO_SLOT; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        if (sl->state != VMEM_KV_FREE || sl->skip)
            continue;
        int rc = vmem__kv_stale_begin(kv, &kv->worker.cut, s);
        kv->turn.unmapping = true;
        begin_job(kv, s, 0);
        if (!rc)
            rc = vmem__kv_cut_unmap(kv, &kv->worker.cut);
        end_job(kv, s, rc);
        kv->turn.unmapping = false;
        if (!rc)
            vmem__kv_stale_end(kv, s);
        return true;
    }
    return false;
}

// Releases a portion of the doomed pages. A call that releases pages, too, waits for one portion at most.
#define DOOMED_PAGES 256
static bool release_doomed(vmem_kv *kv)
{
    vmem_page pages[DOOMED_PAGES]; // calls may move the list meanwhile
    const uint64_t n = MIN(kv->doomed.n, DOOMED_PAGES);
    if (!n)
        return false;
    kv->doomed.n -= n;
    memcpy(pages, kv->doomed.pages + kv->doomed.n, n * sizeof(*pages));
    kv->turn.unmapping = true;
    drop_lock(kv, n);
    vmem_drop(kv->ctx, pages, n);
    take_lock(kv);
    kv->turn.unmapping = false;
    kv->ledger.held -= n;
    return true;
}

static bool extend_slot(vmem_kv *kv, uint32_t slot, uint32_t ahead, bool plenty)
{
    // Map twice as far ahead, so that calls are rarer. Each call interrupts address translation on the GPU, no matter
    // how many pages it maps.
    plan_backing(kv, slot, MIN(kv->slots[slot].tokens + 2 * (uint64_t)ahead, kv->max_tokens), plenty);
    // Leave enough pages unused that the worker need not give these up again.
    const bool did = back_planned(kv, slot, plenty ? kv_low(kv) : 0, &kv->stats.ahead_mapped_pages);
    kv->stats.ahead_jobs += did && !kv->slots[slot].skip;
    return did;
}

// Backs the active slot that has the fewest tokens left until a step would have to wait.
static bool extend_one(vmem_kv *kv)
{
    bool plenty = kv->flags & VMEM_KV_GENEROUS && kv_plentiful(kv);
    uint32_t ahead = plenty ? kv->ahead_tokens : kv->ahead_min, least = UINT32_MAX, slot = 0;
    for (uint32_t s = 0; (s = kv_next_active(kv, s)) != KV_NO_SLOT; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        if (sl->fresh || sl->skip || sl->busy || !sl->tokens || kv_absent(kv, s) > 1)
            continue;
        const uint32_t left = (uint32_t)sat_sub(sl->backed, sl->tokens);
        if (sl->backed < kv->max_tokens && left < ahead && left < least) {
            least = left;
            slot = s;
        }
    }
    if (least == UINT32_MAX)
        return false;
    bool did = (plenty && extend_slot(kv, slot, ahead, true)) ||
               (least < kv->ahead_min && extend_slot(kv, slot, kv->ahead_min, false));
    if (!did)
        kv->slots[slot].skip = true; // no memory: the step will reclaim some or report the shortage
    return true;
}

// Gives back pages that other members of the pool wait for, in portions. A call that needs a slot being unmapped waits
// for one portion.
#define GIVE_NS 4000000
static bool return_some_pages(vmem_kv *kv)
{
    // A call unmaps a tensor's pages, whatever their number: a smaller portion would take as long, and a slot of which
    // parts are left takes more calls to back again. Where each page is unmapped, or is a handle, portions adapt.
    const bool by_call = !vmem__by_pieces(kv->ctx);
    struct kv_victim v;
    if (kv->ledger.held <= kv->membership.lower_to)
        return false;
    const uint64_t want =
        by_call ? kv->membership.portion : MIN(kv->ledger.held - kv->membership.lower_to, kv->membership.portion);
    if (!vmem__kv_find_victim(kv, want, true, false, &v))
        return false;
    const uint64_t start = vmem__now();
    cut_span(kv, &v, &kv->stats.reclaimed_pages);
    const uint64_t ns = vmem__now() - start;
    if (ns > GIVE_NS && !by_call)
        kv->membership.portion = MAX(kv->membership.portion / 2, kv->block_pages);
    else if (ns < GIVE_NS / 3 && !by_call)
        kv->membership.portion = MIN(kv->membership.portion * 2, UINT64_C(1) << 20);
    vmem__pool_wake(kv->membership.member);
    return true;
}

static bool release_one(vmem_kv *kv)
{
    struct kv_victim v;
    if (vmem__kv_find_passed(kv, false, &v)) {
        cut_span(kv, &v, &kv->stats.window_pages);
        return true;
    }
    if (kv->membership.lowering)
        return return_some_pages(kv);
    uint64_t unused = kv_unused(kv), low = kv_low(kv);
    if (unused >= low || !vmem__kv_find_victim(kv, low - unused, true, false, &v))
        return false;
    cut_span(kv, &v, &kv->stats.reclaimed_pages);
    return true;
}

// Runs of hashed blocks fill the memory over time. The worker evicts the oldest before a step needs their pages.
static bool evict_some(vmem_kv *kv)
{
    const uint64_t unused = kv_unused(kv) + kv->doomed.n, low = kv_low(kv) / 4;
    if (unused >= low || !kv->shared.evictable)
        return false;
    vmem__kv_evict_later(kv, MIN(low - unused, DOOMED_PAGES));
    return release_doomed(kv);
}

static bool back_next_slot(vmem_kv *kv)
{
    if (!(kv->flags & VMEM_KV_EAGER) || !kv_plentiful(kv))
        return false;
    const uint32_t slot = vmem__kv_choose_slot(kv, 0, 0);
    if (slot == KV_NO_SLOT || kv->slots[slot].skip || kv->slots[slot].busy || kv->slots[slot].stale)
        return false;
    plan_backing(kv, slot, kv->eager_tokens, kv->flags & VMEM_KV_GENEROUS);
    return back_planned(kv, slot, kv_low(kv), &kv->stats.eager_pages);
}

// ---- idle caches -----------------------------------------------------------------------------------------------------

static bool has_requests(const vmem_kv *kv)
{
    return kv->in_state[VMEM_KV_FREE] + kv->in_state[VMEM_KV_SWAPPED] < kv->n_slots;
}

// Releases all pages that nobody needs, and then returns their memory to the device. Stops and returns false if a
// public call arrives.
static bool release_everything(vmem_kv *kv)
{
    const uint64_t calls = kv->gate.calls;
    struct kv_victim v;
    kv->turn.working = true;
    while (!kv->turn.stop && !kv->turn.pauses && kv->gate.calls == calls) {
        if (unmap_stale_one(kv) || release_doomed(kv))
            continue;
        if (!vmem__kv_find_victim(kv, kv->ledger.held, false, false, &v))
            break;
        cut_span(kv, &v, &kv->stats.reclaimed_pages);
    }
    const bool all = !kv->turn.stop && !kv->turn.pauses && kv->gate.calls == calls;
    if (all) {
        kv->ledger.ahead.pages = 0;
        pthread_mutex_unlock(&kv->gate.state);
        vmem__trim_unused(kv->ctx, false);
        pthread_mutex_lock(&kv->gate.state);
    }
    kv->turn.working = false;
    vmem__kv_tell(kv);
    pthread_cond_broadcast(&kv->turn.done);
    return all;
}

// Waits for work, and after idle_ms without any looks whether the cache is idle.
static void wait_for_work(vmem_kv *kv)
{
    if (!kv->worker.idle_ms) {
        pthread_cond_wait(&kv->turn.work, &kv->gate.state);
        return;
    }
    const uint64_t calls = kv->gate.calls;
    const struct timespec until = vmem__in_ns(kv->worker.idle_ms * UINT64_C(1000000));
    if (pthread_cond_timedwait(&kv->turn.work, &kv->gate.state, &until) != ETIMEDOUT || kv->turn.stop ||
        kv->turn.pauses || kv->turn.due)
        return;
    if (kv->gate.calls != calls || has_requests(kv))
        kv->worker.released_all = false;
    else if (!kv->worker.released_all && !kv->turn.stop && !kv->turn.pauses) {
        kv->worker.released_all = release_everything(kv);
        if (kv->worker.released_all)
            vmem__pool_wake(kv->membership.member);
    }
    kv_at(KV_WORKER_IDLE);
}

// So that a step finds the driver's word on the device's memory.
static void ask_device(vmem_kv *kv)
{
    if (!kv->membership.member && kv->ledger.ahead.pages >= kv->ledger.budget)
        return;
    pthread_mutex_unlock(&kv->gate.state);
    kv_at(KV_WORKER_ASKED);
    vmem__kv_ask_device(kv);
    pthread_mutex_lock(&kv->gate.state);
}

// Nothing is left to do. Slots that could not be unmapped are tried again when there is work.
static void clear_due(vmem_kv *kv)
{
    kv->turn.due = false;
    for (uint32_t s = 0; kv->turn.stuck && s < kv->n_slots; s++)
        kv->slots[s].stuck = false;
    kv->turn.stuck = false;
}

static bool do_job(vmem_kv *kv)
{
    ask_device(kv);
    if (kv->turn.pauses) // a call has come meanwhile, and may have planned already
        return true;
    vmem__kv_claim_plenty(kv);
    // Jobs for the next steps come first.
    return evict_some(kv) || extend_one(kv) || (kv_unused(kv) < kv_low(kv) && release_doomed(kv)) || release_one(kv) ||
           back_next_slot(kv) || unmap_stale_one(kv) || release_doomed(kv);
}

// VMEM_KV_CHECK: the answers to calls must not depend on the jobs that were done. Calls may come while a job runs, and
// the job is not checked then.
static bool do_checked_job(vmem_kv *kv)
{
    const uint64_t pinned = kv->ledger.pinned_pages, calls = kv->gate.calls;
    const bool did = do_job(kv);
    kv->ledger.disturbed |= kv->gate.calls == calls && !kv->gate.called && kv->ledger.pinned_pages != pinned;
    return did;
}

static void *work(void *arg)
{
    vmem_kv *kv = arg;
    pthread_mutex_lock(&kv->gate.state);
    while (!kv->turn.stop) {
        if (!kv->turn.due || kv->turn.pauses) {
            wait_for_work(kv);
            continue;
        }
        kv->worker.released_all = false;
        kv->turn.working = true;
        const bool did = kv->flags & VMEM_KV_CHECK ? do_checked_job(kv) : do_job(kv);
        kv->turn.working = false;
        if (!did)
            clear_due(kv);
        vmem__kv_tell(kv);
        pthread_cond_broadcast(&kv->turn.done);
    }
    pthread_mutex_unlock(&kv->gate.state);
    return NULL;
}

int vmem__kv_worker_start(vmem_kv *kv)
{
    pthread_mutex_lock(&kv->gate.state); // the thread may look at the cache before this function has returned
    const int rc = vmem__thread_start(&kv->worker.thread, work, kv);
    kv->turn.has_worker = !rc;
    pthread_mutex_unlock(&kv->gate.state);
    return rc ? vmem__error(-rc, "no background thread: %s", strerror(rc)) : 0;
}

void vmem__kv_worker_stop(vmem_kv *kv)
{
    if (!kv->turn.has_worker)
        return;
    pthread_mutex_lock(&kv->gate.state);
    kv->turn.stop = true;
    pthread_cond_signal(&kv->turn.work);
    pthread_mutex_unlock(&kv->gate.state);
    pthread_join(kv->worker.thread, NULL);
    kv->turn.has_worker = false;
}
