// A backend whose calls are events of a timeline (core/trace.h).
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TRACED_H
#define VMEM_TRACED_H

#include "backend/backend.h"

// Puts the events in front of the operations of an open backend, if there is a timeline. -ENOMEM: nothing has changed.
int vmem__trace_backend(struct vmem__backend *b);

#endif
