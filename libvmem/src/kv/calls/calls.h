// The end of a cache, as the owner of its handle in Python needs it.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_CALLS_H
#define VMEM_KV_CALLS_H

#include "kv/thread/thread.h"

// Ends all calls but vmem_kv_retire and vmem_kv_destroy, and the background thread. *quiet: the kernels up to the step
// have ended.
int vmem__kv_close(vmem_kv *kv, uint64_t step, bool *quiet);
// vmem_kv_retire, but a cache that is being closed is refused, not destroyed.
int vmem__kv_retire(vmem_kv *kv, uint64_t step);

#endif
