// What callers may ask of a cache: its layout, groups and slots, its statistics, and why the last call was short.
//
// SPDX-License-Identifier: MIT
#include <sched.h>

#include "core/struct.h"
#include "kv/calls/calls.h"

int vmem_kv_get_layout(vmem_kv *kv, uint32_t tensor, struct vmem_kv_layout *out)
{
    if (!kv)
        return vmem__error(-EINVAL, "kv is NULL");
    if (tensor >= kv->n_tensors)
        return vmem__error(-EINVAL, "tensor %u is out of range: the cache has %u tensors", tensor, kv->n_tensors);
    uint32_t i = kv->order[tensor], j = 0;
    while (i >= kv->groups[j].first + kv->groups[j].n)
        j++;
    const struct kv_group *g = &kv->groups[j];
    const struct vmem_kv_layout layout = {
        .addr = kv->addrs[i],
        .length = g->slot_stride * kv->n_slots,
        .group = j,
        .slot_stride = g->slot_stride,
        .slot_rows = g->slot_rows,
        .row_bytes = g->row_bytes,
    };
    return vmem__struct_give(out, &layout, sizeof layout, "out");
}

int vmem_kv_get_group(vmem_kv *kv, uint32_t group, struct vmem_kv_group_info *out)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (group >= kv->n_groups)
        return vmem__kv_leave(kv, vmem__error(-EINVAL, "group %u is out of range: the cache has %u groups", group,
                                              kv->n_groups));
    const struct kv_group *g = &kv->groups[group];
    struct vmem_kv_group_info info = {.groups = kv->n_groups,
                                      .tensors = g->n,
                                      .max_tokens = g->max_tokens,
                                      .window = g->window,
                                      .page_tokens = (uint32_t)(kv->page_size / g->row_bytes),
                                      .row_bytes = g->row_bytes};
    info.free_pages = kv_less(vmem__kv_reach_lately(kv), kv->ledger.fixed);
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        const struct kv_slot *sl = &kv->slots[s];
        const struct kv_span *sp = kv_span(kv, s, group);
        info.held_pages += (uint64_t)(sp->hi - sp->lo) * g->n;
        if (sl->state != VMEM_KV_ACTIVE)
            continue;
        uint32_t rows = KV_MIN(sl->tokens, g->max_tokens);
        info.needed_pages += (uint64_t)(sp->need.hi - sp->need.lo) * g->n;
        info.tokens += g->window ? KV_MIN(rows, g->window) : rows;
    }
    info.free_tokens = ((info.free_pages / g->n) << kv->page_shift) / g->row_bytes;
    info.free_tokens -= info.free_tokens % kv->tile_rows;
    return vmem__kv_leave(kv, vmem__struct_give(out, &info, sizeof info, "out"));
}

int vmem_kv_get_slot(vmem_kv *kv, uint32_t slot, struct vmem_kv_slot_info *out)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_get(kv, slot, ~0u);
    if (rc)
        return vmem__kv_leave(kv, rc);
    const struct kv_slot *s = &kv->slots[slot];
    const bool ending = s->state == KV_ENDING;
    struct vmem_kv_slot_info info = {.tokens = s->tokens, .shared_tokens = vmem__kv_shared_tokens(kv, slot)};
    info.state = ending ? VMEM_KV_FREE : s->state;
    info.after = ending ? kv->idle[slot].ends : 0;
    info.absent_steps = s->state == VMEM_KV_ACTIVE ? kv_absent(kv, slot) : 0;
    for (uint32_t i = 0; i < kv->n_groups; i++) {
        const struct kv_group *g = &kv->groups[i];
        const struct kv_span *sp = kv_span(kv, slot, i);
        info.pages += (uint64_t)(sp->hi - sp->lo) * g->n;
        info.needed_pages += (uint64_t)(sp->need.hi - sp->need.lo) * g->n;
        info.shared_pages += (uint64_t)vmem__kv_span_shared(kv, slot, i) * g->n;
    }
    return vmem__kv_leave(kv, vmem__struct_give(out, &info, sizeof info, "out"));
}

int vmem_kv_get_rows(vmem_kv *kv, uint32_t slot, uint32_t tensor, uint32_t *first, uint32_t *end)
{
    struct vmem_kv_layout layout = {.size = sizeof layout};
    int rc = vmem_kv_get_layout(kv, tensor, &layout);
    if (!rc && (!first || !end))
        rc = vmem__error(-EINVAL, "first and end must not be NULL");
    if (!rc)
        rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    rc = vmem__kv_get(kv, slot, 1u << VMEM_KV_ACTIVE | 1u << VMEM_KV_SWAPPED);
    if (!rc) {
        const struct kv_group *g = &kv->groups[layout.group];
        const uint32_t tokens = kv->slots[slot].tokens;
        const uint64_t bytes = (uint64_t)vmem__kv_need_lo(kv, g, tokens) << kv->page_shift;
        *first = (uint32_t)((bytes + g->row_bytes - 1) / g->row_bytes);
        *end = KV_MIN(tokens, g->max_tokens);
    }
    return vmem__kv_leave(kv, rc);
}

int vmem_kv_last_step(vmem_kv *kv, uint64_t *step)
{
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    if (step)
        *step = kv->fence.step;
    return vmem__kv_leave(kv, step ? 0 : vmem__error(-EINVAL, "step must not be NULL"));
}

int vmem_kv_get_stats(vmem_kv *kv, struct vmem_kv_stats *out)
{
    int rc = vmem__kv_check_usable(kv); // in a forked child, a thread that is gone may hold a lock
    if (rc)
        return rc;
    // The driver is asked without a lock, because it may take long to answer, and a step would wait.
    const bool due = vmem__kv_device_due(kv);
    if (due)
        vmem__kv_device_pages(kv);
    // Unless long_call is set, every holder releases this lock soon.
    while (!kv->report.long_call) {
        if (pthread_mutex_trylock(&kv->gate.state)) {
            sched_yield();
            continue;
        }
        if (kv->report.stale || due)
            vmem__kv_summarise(kv);
        pthread_mutex_unlock(&kv->gate.state);
        break;
    }
    pthread_mutex_lock(&kv->report.lock);
    rc = vmem__struct_give(out, &kv->report.shown, sizeof kv->report.shown, "out");
    pthread_mutex_unlock(&kv->report.lock);
    return rc;
}

int vmem_kv_last_shortage(struct vmem_kv_shortage *out)
{
    return vmem__struct_give(out, vmem__kv_last_shortage(), sizeof(struct vmem_kv_shortage), "out");
}
