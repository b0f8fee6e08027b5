// The refusal at the entry of every call, the interrupt function, and the library's own threads, which work behind the
// program's.
//
// SPDX-License-Identifier: MIT
#include <sched.h>
#include <signal.h>

#include "core/core.h"

int vmem__refuse(const vmem_context *ctx)
{
    return ctx ? vmem__error(-EPERM, "the context belongs to the process that forked this one")
               : vmem__error(-EINVAL, "ctx is NULL");
}

int vmem__usable(const vmem_context *ctx, const unsigned char **owned)
{
    int rc = vmem__enter(ctx);
    if (!rc && owned)
        *owned = ctx->owned;
    return rc;
}

// The interrupt functions that this thread is inside.
struct inside {
    const vmem_context *ctx;
    const struct inside *outer;
};
static _Thread_local const struct inside *inside;

static bool is_inside(const vmem_context *ctx)
{
    const struct inside *i = inside;
    while (i && i->ctx != ctx)
        i = i->outer;
    return i;
}

int vmem_set_interrupt(vmem_context *ctx, int (*interrupted)(void *arg), void *arg)
{
    int rc = vmem__enter(ctx);
    if (rc)
        return rc;
    vmem__begin(ctx);
    ctx->interrupted = interrupted;
    ctx->interrupt_arg = arg;
    while (ctx->interrupting && !is_inside(ctx))
        pthread_cond_wait(&ctx->idle, &ctx->lock);
    vmem__end(ctx);
    return 0;
}

int vmem__interrupted(struct vmem__backend *b)
{
    vmem_context *ctx = (vmem_context *)((char *)b - offsetof(vmem_context, b));
    vmem__lock(ctx);
    int (*interrupted)(void *) = ctx->interrupted;
    void *arg = ctx->interrupt_arg;
    ctx->interrupting += interrupted != NULL;
    vmem__unlock(ctx);
    if (!interrupted)
        return 0;
    const struct inside here = {ctx, inside};
    inside = &here;
    const int stop = interrupted(arg);
    inside = here.outer;
    vmem__lock(ctx);
    if (--ctx->interrupting == 0)
        pthread_cond_broadcast(&ctx->idle);
    vmem__unlock(ctx);
    return stop ? vmem__error(-EINTR, "interrupted") : 0;
}

// ---- events -------------------------------------------------------------------------------------------------

int vmem__event_record(vmem_context *ctx, void *stream, void **event)
{
    return ctx->b.ops->record ? ctx->b.ops->record(&ctx->b, stream, event) : 0;
}

bool vmem__event_passed(vmem_context *ctx, void *event) { return ctx->b.ops->passed(&ctx->b, event) > 0; }

void vmem__event_free(vmem_context *ctx, void *event) { ctx->b.ops->event_free(&ctx->b, event); }

// ---- threads ------------------------------------------------------------------------------------------------

int vmem__thread_start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    struct sched_param param;
    sigset_t all, old;
    int policy;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); // leave signals to the program's own threads
    const int rc = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    // A call that wakes the thread must not lose its core to it: where no other core is free, a batch thread waits for
    // the end of the caller's time slice.
    if (!rc && !pthread_getschedparam(*thread, &policy, &param) && policy == SCHED_OTHER)
        pthread_setschedparam(*thread, SCHED_BATCH, &param);
    return rc;
}
