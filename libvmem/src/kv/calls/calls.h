// How every public call begins and ends: enter takes api and state, and leave updates the statistics. A step enters by
// vmem__kv_enter_step and calls vmem__kv_may_take_long if there is something to do.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_CALLS_H
#define VMEM_KV_CALLS_H

#include "kv/thread/thread.h"

// ---- gate.c

int vmem__kv_enter(vmem_kv *kv);
int vmem__kv_enter_step(vmem_kv *kv);
int vmem__kv_leave(vmem_kv *kv, int rc);

// ---- books.c

int vmem__kv_check_books(vmem_kv *kv); // VMEM_KV_CHECK: recounts everything

// ---- life.c

// Ends all calls but vmem_kv_retire and vmem_kv_destroy, and the background thread. *quiet: the kernels up to the step
// have ended.
int vmem__kv_close(vmem_kv *kv, uint64_t step, bool *quiet);
// vmem_kv_retire, but a cache that is being closed is refused, not destroyed.
int vmem__kv_retire(vmem_kv *kv, uint64_t step);

#endif
