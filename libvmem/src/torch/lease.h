// What tests change of leases.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_LEASE_H
#define VMEM_LEASE_H

#include <stdint.h>

// Of the time between two questions of an allocation that waits, at most so much (100 ms) counts towards the second after
// which a refusal is final: the process itself may have been stopped. Tests change it, so that they do not depend on the
// machine's speed.
extern _Atomic uint64_t vmem__lease_round_ns;

#endif
