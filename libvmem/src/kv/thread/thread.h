// The background thread. What calls ask of it is in book/turn.c.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_KV_THREAD_H
#define VMEM_KV_THREAD_H

#include "kv/request/request.h"

int vmem__kv_worker_start(vmem_kv *kv);
void vmem__kv_worker_stop(vmem_kv *kv);

#endif
