// The parameters of UVM_FREE in every release: until 580 a length stood between the base and the status.
//
// SPDX-License-Identifier: GPL-2.0 OR MIT
#ifndef UVM_FREE_H
#define UVM_FREE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "uvm_linux_ioctl.h"

static inline UVM_FREE_PARAMS uvm_free_params(uint64_t base, uint64_t length)
{
    UVM_FREE_PARAMS p = {.base = base};

    if (offsetof(UVM_FREE_PARAMS, rmStatus) > sizeof(p.base))
        memcpy((char *)&p + sizeof(p.base), &length, sizeof(length));
    return p;
}

#endif
