// A cache that nobody uses gives its memory back without a call.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>

#include "kv.h"
#include "kv/kv.h"

#define SLOTS 4

static vmem_context *ctx;
static vmem_kv *kv;

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned long looks;

static void at(enum vmem__kv_point point)
{
    pthread_mutex_lock(&gate);
    looks += point == KV_WORKER_IDLE;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&gate);
}

// Until the thread has looked so many times more whether the cache is idle.
static void wait_for_looks(unsigned long n)
{
    pthread_mutex_lock(&gate);
    for (unsigned long until = looks + n; looks < until;)
        pthread_cond_wait(&changed, &gate);
    pthread_mutex_unlock(&gate);
}

static void make(uint32_t flags, uint64_t budget, uint32_t idle_ms)
{
    const struct vmem_kv_tensor tensors[2] = {{.row_bytes = test_page / 32}, {.row_bytes = test_page / 32}};
    kv = k_create(ctx, .flags = flags | VMEM_KV_OVERLAP | VMEM_KV_DEFER | VMEM_KV_CHECK, .tensors = tensors,
                  .n_tensors = 2, .slots = SLOTS, .max_tokens = 4000, .budget = budget, .idle_ms = idle_ms);
}

// From here on the cache may be idle. Before, a slow machine's would be between two calls.
static void may_be_idle(void)
{
    pthread_mutex_lock(&kv->gate.state);
    kv->worker.idle_ms = 2;
    pthread_cond_signal(&kv->turn.work);
    pthread_mutex_unlock(&kv->gate.state);
}

static void step(uint32_t slot, int32_t tokens)
{
    int32_t lengths[SLOTS] = {0};
    lengths[slot] = tokens;
    OK(vmem_kv_step(kv, lengths, SLOTS, 0));
}

static void test_kept_pages_and_memory_ahead_go(void)
{
    uint32_t slot;
    uint64_t prefix;
    const uint64_t own = test_stats(ctx).overhead;
    make(VMEM_KV_EAGER | VMEM_KV_GENEROUS, 1024 * test_page, 0);
    OK(k_alloc(kv, 320, &slot));
    step(slot, 320);
    may_be_idle();
    // Not beside a request, however long it does nothing.
    wait_for_looks(4);
    CHECK_EQ(k_stats(kv).needed_pages, 20);
    CHECK(test_stats(ctx).created + test_stats(ctx).overhead >= own + 1024 * test_page);
    OK(k_save(kv, slot, 64, &prefix));
    OK(vmem_kv_free(kv, slot, 0));
    wait_for_looks(6);
    CHECK_EQ(k_stats(kv).kept_pages, 0);
    CHECK_EQ(k_stats(kv).held_pages, 4); // what is saved stays
    CHECK(test_stats(ctx).created + test_stats(ctx).overhead < own + 1024 * test_page || test_info.caps & VMEM_CAP_GPU);
    // And it works on.
    OK(k_alloc(kv, 320, &slot));
    OK(k_attach(kv, prefix, slot, 64, 0));
    step(slot, 4000);
    OK(vmem_kv_free(kv, slot, 0));
    OK(k_drop(kv, prefix));
    wait_for_looks(6);
    CHECK_EQ(k_stats(kv).held_pages, 0);
    vmem_kv_destroy(kv);
    CHECK_EQ(test_stats(ctx).created, 0);
}

// The thread's first look comes before any other call. The thread sanitizer sees whether the two share a lock.
static void test_the_first_look(void)
{
    make(0, 16 * test_page, 2);
    wait_for_looks(1);
    vmem_kv_destroy(kv);
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    ctx = test_context(0);
    vmem__kv_hook = at;
    test_kept_pages_and_memory_ahead_go();
    test_the_first_look();
    vmem_context_destroy(ctx);
    return 0;
}
