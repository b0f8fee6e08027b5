// The order in which runs are evicted, and the requests that keep runs out of it.
//
// A list has the runs that no running request pins, in the order in which they were released or let go. A request pins the runs that it began with or wrote. When it ends, the end of its sequence comes first
// into the list: fewer requests can use it. Runs that are to be kept have a list of their own, which nothing evicts from.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <string.h>

#include "kv/run/run.h"

int vmem__kv_run_owned(const struct kv_runs *runs, uint64_t id, const char *name, size_t i)
{
    if (!id || id >> KV_RUN_TAG == runs->tag)
        return 0;
    return vmem__error(-EINVAL, "runs[%zu]%s %#" PRIx64 " is no run of this cache", i, name, id);
}

uint32_t vmem__kv_run_find(const struct kv_runs *runs, uint64_t id)
{
    const uint32_t i = kv_run_place(id);
    return id && i < runs->used && runs->list[i].id == id ? (uint32_t)i : KV_NO_RUN;
}

void vmem__kv_run_unlink(struct kv_runs *runs, uint32_t run)
{
    const struct kv_run *r = &runs->list[run];
    struct kv_use *use = &runs->order[r->keep];
    *(r->newer == KV_NO_RUN ? &use->newest : &runs->list[r->newer].older) = r->older;
    *(r->older == KV_NO_RUN ? &use->oldest : &runs->list[r->older].newer) = r->newer;
}

void vmem__kv_run_link(struct kv_runs *runs, uint32_t run)
{
    struct kv_run *r = &runs->list[run];
    struct kv_use *use = &runs->order[r->keep];
    r->newer = KV_NO_RUN;
    r->older = use->newest;
    *(use->newest == KV_NO_RUN ? &use->oldest : &runs->list[use->newest].newer) = run;
    use->newest = run;
}

uint32_t vmem__kv_run_victim(const struct kv_runs *runs) { return runs->order[false].oldest; }

// ---- pins ------------------------------------------------------------------------------------------------------------

static void let_go(struct kv_runs *runs, const struct kv_pin *pin)
{
    const uint32_t i = vmem__kv_run_find(runs, pin->id);
    if (i != KV_NO_RUN && !--runs->list[i].pins)
        vmem__kv_run_link(runs, i);
}

int vmem__kv_pin_room(vmem_kv *kv, uint32_t slot, uint64_t n)
{
    struct kv_pins *p = &kv->runs.pins[slot];
    return vmem__kv_room_for(&p->list, &p->cap, p->n + n, sizeof(*p->list));
}

int vmem__kv_pin(vmem_kv *kv, uint32_t slot, uint32_t run)
{
    struct kv_runs *runs = &kv->runs;
    struct kv_run *r = &runs->list[run];
    struct kv_pins *p = &runs->pins[slot];
    int rc = vmem__kv_pin_room(kv, slot, 1);
    uint64_t at = p->n; // in the order of rows: nearly always the last
    while (!rc && at && p->list[at - 1].first > r->first)
        at--;
    const bool same = at && p->list[at - 1].first == r->first; // another run of these rows, or this one
    if (rc || (same && p->list[at - 1].id == r->id))
        return rc;
    if (!r->pins++)
        vmem__kv_run_unlink(runs, run);
    if (same) {
        let_go(runs, &p->list[--at]);
    } else {
        memmove(p->list + at + 1, p->list + at, (p->n - at) * sizeof(*p->list));
        p->n++;
    }
    p->list[at] = (struct kv_pin){r->id, r->first};
    return 0;
}

void vmem__kv_unpin(vmem_kv *kv, uint32_t slot)
{
    struct kv_runs *runs = &kv->runs;
    struct kv_pins *p = &runs->pins[slot];
    const uint32_t ahead = 16; // runs that are on their way into the CPU's cache
    while (p->n) {
        if (--p->n >= ahead)
            __builtin_prefetch(&runs->list[kv_run_place(p->list[p->n - ahead].id)].id);
        let_go(runs, &p->list[p->n]);
    }
}
