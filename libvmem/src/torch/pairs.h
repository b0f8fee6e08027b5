// The work of the sixteen pairs of functions.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TORCH_PAIRS_H
#define VMEM_TORCH_PAIRS_H

#include <stddef.h>
#include <stdint.h>

void *vmem__torch_alloc(uint32_t pair, size_t size, int device);
void vmem__torch_free(uint32_t pair, void *addr);

#endif
