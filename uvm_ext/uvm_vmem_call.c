// The life cycle that MAP, UNMAP and RELEASE share: change under the VA space lock, wait for the GPU, clean up.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_call.h"

void uvm_vmem_call_init(struct uvm_vmem_call *call, struct uvm_vmem_space *space)
{
    memset(call, 0, sizeof(*call));
    call->space = space;
    call->va_space = space->va_space;
    INIT_LIST_HEAD(&call->touched);
    INIT_LIST_HEAD(&call->deferred_free);
    uvm_vmem_push_init(&call->push);
}

static NV_STATUS call_step(struct uvm_vmem_call *call, uvm_vmem_change_t change, uvm_vmem_complete_t complete,
                           void *arg)
{
    NV_STATUS status, wait;
    bool done;

    uvm_va_space_down_write(call->va_space);
    status = call->space->fatal;
    if (status == NV_OK)
        status = change(call, arg);
    uvm_va_space_downgrade_write(call->va_space);

    wait = uvm_vmem_push_wait(&call->push);
    done = status == NV_OK || status == NV_WARN_MORE_PROCESSING_REQUIRED;
    if (done && wait == NV_OK && complete)
        complete(call, arg);
    uvm_va_space_up_read(call->va_space);

    // Frees RM objects, which requires that no VA space lock is held. Each GPU involved was retained for it.
    uvm_deferred_free_object_list(&call->deferred_free);
    INIT_LIST_HEAD(&call->deferred_free);
    return done && wait != NV_OK ? wait : status;
}

NV_STATUS uvm_vmem_call_run(struct uvm_vmem_call *call, uvm_vmem_change_t change, uvm_vmem_complete_t complete,
                            void *arg)
{
    NV_STATUS status;

    do {
        status = call_step(call, change, complete, arg);
        cond_resched();
    } while (status == NV_WARN_MORE_PROCESSING_REQUIRED);

    atomic64_add(call->push.pushes, &call->space->pushes);
    atomic64_add(call->push.invalidates, &call->space->invalidates);
    atomic64_add(call->push.waits, &call->space->waits);
    return status;
}

void uvm_vmem_call_deinit(struct uvm_vmem_call *call)
{
    uvm_vmem_push_deinit(&call->push);
    uvm_vmem_free(call->pieces);
    call->pieces = NULL;
}
