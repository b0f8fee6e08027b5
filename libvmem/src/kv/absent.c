// Requests that take no part in a step: they wait, or they ended without a call that said so.
//
// SPDX-License-Identifier: MIT
#include "kv/kv.h"

int vmem__kv_end_absent(vmem_kv *kv, const int32_t *lengths)
{
    bool some = false;
    int rc = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++)
        some |= !lengths[s] && kv->slots[s].state == VMEM_KV_ACTIVE;
    if (!some)
        return 0;
    for (uint32_t s = 0; s < kv->n_slots && !rc; s++) // a refused step ends no request
        rc = lengths[s] ? vmem__kv_check_length(kv, s, lengths[s]) : 0;
    for (uint32_t s = 0; s < kv->n_slots && !rc; s++) {
        if (lengths[s] || kv->slots[s].state != VMEM_KV_ACTIVE)
            continue;
        vmem__kv_wait_slot(kv, s);
        rc = vmem__kv_free_after(kv, s, kv->step - kv_absent(kv, s));
    }
    return rc;
}

int vmem_kv_absent_slots(vmem_kv *kv, uint32_t steps, uint32_t *slots, uint32_t n, uint32_t *count)
{
    int rc = vmem__kv_enter_step(kv);
    if (rc)
        return rc;
    if (!count || (n && !slots))
        rc = vmem__error(-EINVAL, "count must not be NULL, nor slots unless n is 0");
    else if (!steps)
        rc = vmem__error(-EINVAL, "steps 0 must be at least 1");
    if (rc)
        return vmem__kv_leave(kv, rc);
    *count = 0;
    for (uint32_t s = 0; s < kv->n_slots; s++) {
        if (kv->slots[s].state != VMEM_KV_ACTIVE || kv_absent(kv, s) < steps)
            continue;
        if (*count < n)
            slots[*count] = s;
        ++*count;
    }
    return vmem__kv_leave(kv, 0);
}
