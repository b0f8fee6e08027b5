// SPDX-License-Identifier: MIT
#include "vmem.h"

uint32_t vmem_version(void) { return VMEM_VERSION; }
