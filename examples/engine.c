// A serving engine by libvmem's C API alone: admission, chunked prefill, decode, preemption, and a shared prefix.
//
// The engine's "kernels" are plain C: they write a number into every row and read all rows of a slot back, as attention
// would. That needs memory which the CPU can address, so the host backend is asked for; an engine with GPU kernels asks
// for NULL, the best that works. Nothing else changes.
//
//     cc engine.c $(pkg-config --cflags --libs vmem) -o engine && ./engine
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmem.h>
#include <vmem_kv.h>

enum { LAYERS = 2, TENSORS = 2 * LAYERS, SLOTS = 4, MAX_TOKENS = 4096, ROW = 1024, CHUNK = 256, REQUESTS = 12 };
enum { SYSTEM = 192 }; // tokens that every prompt begins with

struct request {
    uint32_t prompt, want; // tokens of the prompt; tokens with those that are generated
    uint32_t done;         // rows written
    int slot;              // -1: waiting
    int ended;
};

static void check(int rc, const char *call)
{
    if (!rc)
        return;
    fprintf(stderr, "engine: %s: %s\n", call, vmem_last_error());
    exit(1);
}

static struct vmem_kv_layout layout[TENSORS];

static uint32_t *row(int tensor, int slot, uint32_t token)
{
    const struct vmem_kv_layout *l = &layout[tensor];
    return (uint32_t *)(uintptr_t)(l->addr + (uint64_t)slot * l->slot_stride + token * l->row_bytes);
}

// The row that a layer would write for a token: rows of the shared beginning are alike for all requests.
static uint32_t value(int request, uint32_t token) { return token < SYSTEM ? token : (uint32_t)request << 16 | token; }

// One iteration's forward pass for a request: writes rows [done, length), then reads all of them.
static void forward(int id, const struct request *r, uint32_t length)
{
    for (int t = 0; t < TENSORS; t++) {
        for (uint32_t i = r->done; i < length; i++)
            *row(t, r->slot, i) = value(id, i);
        for (uint32_t i = 0; i < length; i++)
            if (*row(t, r->slot, i) != value(id, i)) {
                fprintf(stderr, "engine: request %d reads a wrong row %u\n", id, i);
                exit(1);
            }
    }
}

int main(void)
{
    vmem_context *ctx;
    struct vmem_options options = {.size = sizeof(options), .backend = "host"};
    check(vmem_context_create(&options, &ctx), "vmem_context_create");

    struct vmem_kv_tensor tensors[TENSORS];
    for (int t = 0; t < TENSORS; t++)
        tensors[t] = (struct vmem_kv_tensor){.row_bytes = ROW};
    struct vmem_kv_config config = {
        .size = sizeof(config),
        .flags = VMEM_KV_DEFAULT,
        .tensors = tensors,
        .n_tensors = TENSORS,
        .slots = SLOTS,
        .max_tokens = MAX_TOKENS,
        .page_size = VMEM_PAGE_64K,
        .budget = UINT64_C(4) << 20,
    };
    vmem_kv *kv;
    check(vmem_kv_create(ctx, &config, &kv), "vmem_kv_create");
    for (uint32_t t = 0; t < TENSORS; t++) {
        layout[t].size = sizeof layout[t];
        check(vmem_kv_get_layout(kv, t, &layout[t]), "vmem_kv_get_layout");
    }

    struct request requests[REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        uint32_t prompt = SYSTEM + 20 + (uint32_t)i * 37 % 150;
        requests[i] = (struct request){.prompt = prompt, .want = prompt + 40, .slot = -1};
    }

    uint64_t prefix = 0;
    int ended = 0, preemptions = 0, attached = 0;
    int full = 0; // a request was preempted: nobody comes in before somebody has ended
    while (ended < REQUESTS) {
        // Admission: a slot for each request that waits, beginning with the rows that others have written already.
        for (int i = 0; i < REQUESTS && !full; i++) {
            struct request *r = &requests[i];
            if (r->ended || r->slot >= 0)
                continue;
            uint32_t slot;
            const struct vmem_kv_alloc_options about = {.size = sizeof(about), .tokens = r->prompt};
            int rc = vmem_kv_alloc(kv, &about, &slot);
            if (rc == -ENOSPC)
                break;
            check(rc, "vmem_kv_alloc");
            r->slot = (int)slot;
            r->done = 0;
            rc = vmem_kv_attach(kv, slot, &prefix, prefix != 0, SYSTEM, 0, &r->done);
            if (rc != -ENOMEM) // else it computes these rows itself
                check(rc, "vmem_kv_attach");
            attached += r->done != 0;
        }

        // The coming iteration: a chunk of each prompt, one token of each other. Preempt until its rows are backed.
        int32_t lengths[SLOTS];
        for (;;) {
            int last = -1;
            memset(lengths, 0, sizeof(lengths));
            for (int i = 0; i < REQUESTS; i++) {
                const struct request *r = &requests[i];
                if (r->slot < 0)
                    continue;
                uint32_t left = r->done < r->prompt ? r->prompt - r->done : 1;
                lengths[r->slot] = (int32_t)(r->done + (left < CHUNK ? left : CHUNK));
                last = i;
            }
            int rc = vmem_kv_step(kv, lengths, SLOTS, 0);
            if (!rc)
                break;
            if (rc != -ENOMEM || last < 0)
                check(rc, "vmem_kv_step");
            check(vmem_kv_free(kv, (uint32_t)requests[last].slot, 0), "vmem_kv_free");
            requests[last].slot = -1; // it is computed anew later
            preemptions++;
            full = 1;
        }

        for (int i = 0; i < REQUESTS; i++) {
            struct request *r = &requests[i];
            if (r->slot < 0)
                continue;
            forward(i, r, (uint32_t)lengths[r->slot]);
            r->done = (uint32_t)lengths[r->slot];
            if (!prefix && r->done >= SYSTEM) {
                struct vmem_kv_run run = {.slot = (uint32_t)r->slot, .tokens = SYSTEM, .keep = 1};
                check(vmem_kv_share(kv, &run, 1, 0), "vmem_kv_share");
                prefix = run.id;
            }
            if (r->done >= r->want) {
                check(vmem_kv_free(kv, (uint32_t)r->slot, 0), "vmem_kv_free");
                r->slot = -1;
                r->ended = 1;
                full = 0;
                ended++;
            }
        }
    }

    struct vmem_kv_stats stats = {.size = sizeof stats};
    check(vmem_kv_get_stats(kv, &stats), "vmem_kv_get_stats");
    printf("%d requests, %d preemptions, %d began with the prefix, %llu iterations, %llu pages of the budget's %llu\n",
           ended, preemptions, attached, (unsigned long long)stats.steps, (unsigned long long)stats.held_pages,
           (unsigned long long)stats.budget_pages);
    vmem_kv_destroy(kv);
    vmem_context_destroy(ctx);
    return 0;
}
