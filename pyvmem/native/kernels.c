// Waits for the kernels that use memory which is about to go.
//
// SPDX-License-Identifier: MIT
#include <Python.h>

#include <errno.h>
#include <stdatomic.h>

#include "core/error.h"
#include "driver/kernels.h"
#include "native.h"

static int (*_Atomic capturing)(void);

void pv_watch_captures(int (*function)(void)) { capturing = function; }

int pv_wait_for_kernels(vmem_context *ctx)
{
    struct vmem_info info = {.size = sizeof info};
    const int rc = vmem_context_info(ctx, &info); // refuses a forked child, which is right: its parent has the kernels
    if (rc || !(info.caps & VMEM_CAP_GPU))
        return rc;
    int (*const ask)(void) = capturing;
    // A thread that knows no Python must not take the interpreter's lock: at the interpreter's end it would not come back.
    if (ask && PyGILState_GetThisThreadState() && ask())
        return vmem__error(-EBUSY, "a CUDA graph is being captured: end the capture first");
    return vmem__wait_for_kernels(info.device);
}
