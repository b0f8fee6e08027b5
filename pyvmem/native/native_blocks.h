// Additions of pyvmem to libvmem's blocks in C: their owner.
//
// SPDX-License-Identifier: MIT
#ifndef PYVMEM_NATIVE_BLOCKS_H
#define PYVMEM_NATIVE_BLOCKS_H

#include "native.h"
#include "vmem_blocks.h"

// Creates the blocks for an owner of nothing, whose parent is the owner of their reservation. On failure it returns a
// negative errno, and the owner owns nothing.
int pv_own_blocks(pv_owner *owner, vmem_context *ctx, const struct vmem_blocks_config *cfg, vmem_blocks **blocks);

#endif
