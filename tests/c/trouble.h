// A driver in trouble beside every call of a model. Where the fake driver is preloaded and `trouble_on` is set, its calls
// fail at random: one, a few in a row, or a long period, among them those that undo what came before. A call of libvmem
// that fails for that is made again when the trouble is over, and the model takes that answer: so the failed call has
// changed nothing that can be seen. Include it before kv.h.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TEST_TROUBLE_H
#define VMEM_TEST_TROUBLE_H

#include "harness.h"
#include "vmem_kv.h"
#define FAKEGPU_USER
#include "../fakegpu/fakegpu.h"

static bool trouble_on;
static uint64_t trouble_seed, trouble_calls; // the calls that were made again

// $VMEM_TEST_TROUBLE: 0, never; otherwise in every other run of a model, where there is a fake driver.
__attribute__((unused)) static void trouble_start(uint64_t seed)
{
    const char *text = getenv("VMEM_TEST_TROUBLE");
    const bool always = text && *text != '0';
    trouble_seed = seed;
    trouble_on = fakegpu_fail_many && (text ? always : rnd(&trouble_seed) % 2);
}

// Ends the trouble that there is; more may come.
__attribute__((unused)) static void trouble_pause(void)
{
    if (trouble_on)
        fakegpu_fail(0);
}

__attribute__((unused)) static void trouble_end(void)
{
    trouble_pause();
    trouble_on = false;
}

__attribute__((unused)) static void trouble_begin_call(void)
{
    if (trouble_on && rnd(&trouble_seed) % 8 == 0)
        fakegpu_trouble(rnd(&trouble_seed), 12);
}

// True if a call that has failed so is to be made again.
__attribute__((unused)) static bool trouble_again(int rc)
{
    if (!trouble_on || rc != -ENOMEM)
        return false;
    fakegpu_fail(0);
    trouble_calls++;
    return true;
}

// A step that pins no more pages than before works over a reduced budget, too. If it failed, it may have given up some
// of those pages, and finds too few when it is made again. before: trouble_calls before it.
__attribute__((unused)) static bool trouble_took_pages(vmem_kv *kv, uint64_t before)
{
    struct vmem_kv_stats st = {.size = sizeof st};
    if (trouble_calls == before || vmem_kv_get_stats(kv, &st))
        return false;
    return st.held_pages >= st.budget_pages;
}

#define TROUBLE(call)              \
    __extension__({                \
        int again_;                \
        trouble_begin_call();      \
        again_ = (call);           \
        if (trouble_again(again_)) \
            again_ = (call);       \
        again_;                    \
    })

#define vMemReserve(...) TROUBLE(vMemReserve(__VA_ARGS__))
#define vMemFree(...) TROUBLE(vMemFree(__VA_ARGS__))
#define vMemCreate(...) TROUBLE(vMemCreate(__VA_ARGS__))
#define vMemRelease(...) TROUBLE(vMemRelease(__VA_ARGS__))
#define vMemReleaseBatch(...) TROUBLE(vMemReleaseBatch(__VA_ARGS__))
#define vMemMap(...) TROUBLE(vMemMap(__VA_ARGS__))
#define vMemMapBatch(...) TROUBLE(vMemMapBatch(__VA_ARGS__))
#define vMemUnmap(...) TROUBLE(vMemUnmap(__VA_ARGS__))
#define vmem_backdrop(...) TROUBLE(vmem_backdrop(__VA_ARGS__))
#define vmem_copy_batch(...) TROUBLE(vmem_copy_batch(__VA_ARGS__))
#define vmem_fill(...) TROUBLE(vmem_fill(__VA_ARGS__))
#define vmem_prealloc(...) TROUBLE(vmem_prealloc(__VA_ARGS__))
#define vmem_query(...) TROUBLE(vmem_query(__VA_ARGS__))
#define vmem_kv_alloc(...) TROUBLE(vmem_kv_alloc(__VA_ARGS__))
#define vmem_kv_attach(...) TROUBLE(vmem_kv_attach(__VA_ARGS__))
#define vmem_kv_create(...) TROUBLE(vmem_kv_create(__VA_ARGS__))
#define vmem_kv_drop(...) TROUBLE(vmem_kv_drop(__VA_ARGS__))
#define vmem_kv_free(...) TROUBLE(vmem_kv_free(__VA_ARGS__))
#define vmem_kv_reclaim(...) TROUBLE(vmem_kv_reclaim(__VA_ARGS__))
#define vmem_kv_retire(...) TROUBLE(vmem_kv_retire(__VA_ARGS__))
#define vmem_kv_set_budget(...) TROUBLE(vmem_kv_set_budget(__VA_ARGS__))
#define vmem_kv_share(...) TROUBLE(vmem_kv_share(__VA_ARGS__))
#define vmem_kv_step(...) TROUBLE(vmem_kv_step(__VA_ARGS__))
#define vmem_kv_swap_in(...) TROUBLE(vmem_kv_swap_in(__VA_ARGS__))
#define vmem_kv_swap_out(...) TROUBLE(vmem_kv_swap_out(__VA_ARGS__))
#define vmem_kv_truncate(...) TROUBLE(vmem_kv_truncate(__VA_ARGS__))

#endif
