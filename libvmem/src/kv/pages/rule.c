// The rule that VMEM_KV_CHECK enables: no mapping changes that kernels may use.
//
// SPDX-License-Identifier: MIT
#include "kv/pages/pages.h"

int vmem__kv_check_rule(const vmem_kv *kv, uint32_t slot, uint32_t group, uint32_t from, uint32_t to)
{
    const struct kv_slot *s = &kv->slots[slot];
    const struct kv_span *sp = kv_span(kv, slot, group);
    if (from >= to || s->state == VMEM_KV_FREE || s->state == VMEM_KV_SWAPPED || s->fresh)
        return 0;
    if (from < sp->fix_hi && to > sp->fix_lo)
        return vmem__error(-EFAULT, "slot %u, pages [%u, %u) change while kernels may touch [%u, %u)", slot, from, to,
                           sp->fix_lo, sp->fix_hi);
    if (from < sp->coarse_hi && from % kv->block)
        return vmem__error(-EFAULT, "slot %u, page %u: a part of a 2 MiB entry changes beside kernels", slot, from);
    return 0;
}
