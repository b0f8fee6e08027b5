// The backends, best first.
//
// SPDX-License-Identifier: MIT
#include "backend/backend.h"

const struct vmem__ops *const vmem__backends[] = {
    &vmem__uvm_ops, &vmem__stock_ops, &vmem__cuda_ops, &vmem__host_ops, NULL,
};

// Same order as the table above.
static const char *const names[] = {
    "uvm", "stock", "cuda", "host", NULL,
};

_Static_assert(sizeof names / sizeof names[0] == sizeof vmem__backends / sizeof vmem__backends[0], "a name for each");

const char *const *vmem_backends(void) { return names; }
