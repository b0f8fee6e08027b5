// Additions of pyvmem to libvmem's leases in C: their owner.
//
// SPDX-License-Identifier: MIT
#ifndef PYVMEM_NATIVE_TORCH_H
#define PYVMEM_NATIVE_TORCH_H

#include "native.h"
#include "vmem_torch.h"

// Opens a lease in the context for an owner of nothing. The lease itself keeps the context's owner until it has ended,
// which may be after its own owner is gone. On failure, returns a negative errno, and the owner owns nothing.
int pv_own_torch(pv_owner *owner, pv_owner *context, vmem_context *ctx, vmem_kv_pool *pool,
                 const struct vmem_torch_config *cfg, uint32_t *place);

#endif
