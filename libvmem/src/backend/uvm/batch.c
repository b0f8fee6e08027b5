// Translates runs into the module's ops, in as few calls as its limits allow: one call for all but the largest batches.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdlib.h>

#include "backend/uvm/uvm.h"

enum action { PUT, PUT_BACK, TAKE }; // PUT_BACK maps the old page that PUT replaced

// A position between two ops of a batch: all runs before `run`, and the first `done` bytes of `run`, are finished.
struct place {
    size_t run;
    uint64_t done;
};

static bool before(const struct place *a, const struct place *b)
{
    return a->run < b->run || (a->run == b->run && a->done < b->done);
}

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

// True if addresses up to `end` end in the last block of their segment, behind which the next segment or somebody else's
// memory begins.
static bool ends_in_last_block(const struct vmem__reservation *reservation, uint64_t end)
{
    const struct vmem__cuda_reservation *cuda = reservation->priv;

    return (end - 1 - cuda->addr) % UVM_SEGMENT >= UVM_SEGMENT - VMEM_PAGE_2M;
}

// Builds the longest op that starts at `at`, and advances `at` past it.
static void next_op(const struct vmem__run *runs, enum action action, const struct place *end, struct place *at,
                    struct uvm_vmem_op *op)
{
    const struct vmem__run *run = &runs[at->run];
    const struct vmem__cuda_reservation *reservation = run->reservation->priv;
    uint64_t whole = at->run == end->run ? end->done : run->length;

    *op = (struct uvm_vmem_op){.va = run->addr + at->done, .length = whole - at->done};
    op->length = min(op->length, UVM_SEGMENT - (op->va - reservation->addr) % UVM_SEGMENT);
    if (action != TAKE) {
        uint64_t offset = (action == PUT ? run->offset : run->old_offset) + at->done, page = offset / VMEM_PAGE_2M;
        const struct uvm_arena *arena = (action == PUT ? run->arena : run->old_arena)->priv;

        op->handle = arena->first[page / arena->chunk] + page % arena->chunk;
        op->offset = offset % VMEM_PAGE_2M;
        op->length = min(op->length, VMEM_PAGE_2M - op->offset);
        // A 2 MiB entry is never split while kernels may access it. An entry that maps a page is replaced as a whole.
        // MAP_AHEAD splits the backdrop's entries one block ahead of kernels that read past the last small page.
        op->flags = UVM_VMEM_TAKEOVER | (run->page_size < VMEM_PAGE_2M ? UVM_VMEM_MAP_64K : 0) |
                    (run->flags & VMEM_MAP_REPLACE ? UVM_VMEM_MAP_REPLACE : 0);
        if (run->page_size < VMEM_PAGE_2M && !ends_in_last_block(run->reservation, op->va + op->length))
            op->flags |= UVM_VMEM_MAP_AHEAD;
    }
    at->done += op->length;
    if (at->done == run->length)
        *at = (struct place){.run = at->run + 1};
}

// Returns an upper bound on the number of ops between two places.
static uint64_t op_bound(const struct vmem__run *runs, const struct place *at, const struct place *end)
{
    uint64_t n = 0;

    for (size_t i = at->run; i < end->run + (end->done > 0); i++)
        n += runs[i].length / VMEM_PAGE_2M + runs[i].length / UVM_SEGMENT + 3;
    return n;
}

// Performs the ops between *at and end. On failure, *at is the end of the completed part and *bad is the failing run.
static int submit(struct uvm *u, enum action action, const struct vmem__run *runs, struct place *at,
                  const struct place *end, size_t *bad)
{
    struct uvm_vmem_op few[64], *ops = few, op;
    uint64_t room = min(op_bound(runs, at, end), u->kmod.max_ops);
    uint32_t failed;
    int rc = 0;

    if (room > sizeof(few) / sizeof(few[0])) {
        ops = malloc(room * sizeof(*ops));
        if (!ops)
            return vmem__error(-ENOMEM, "no memory for a batch of %llu elements", (unsigned long long)room);
    }
    while (!rc && before(at, end)) {
        struct place next = *at;
        uint64_t bytes = 0;
        uint32_t n = 0;

        while (n < room && before(&next, end)) {
            struct place behind = next;

            next_op(runs, action, end, &behind, &ops[n]);
            if (n && ops[n].length > u->kmod.max_bytes - bytes)
                break;
            bytes += ops[n++].length;
            next = behind;
        }
        rc = vmem__kmod_batch(&u->kmod, action == TAKE ? UVM_VMEM_UNMAP : UVM_VMEM_MAP, ops, n, &failed);
        if (!rc) {
            *at = next;
            continue;
        }
        next = *at;
        for (uint32_t i = 0; i < failed && failed < n; i++)
            next_op(runs, action, end, &next, &op);
        *bad = next.run;
    }
    if (ops != few)
        free(ops);
    return rc;
}

// Reverts an action from the start of the batch up to `done`. The overlays exist already, so it seldom fails. What does
// is absent.
static void undo(struct vmem__backend *b, enum action action, const struct vmem__run *runs, const struct place *done)
{
    size_t bad;

    for (size_t i = 0; i <= done->run; i++) {
        struct place at = {.run = i}, end = i < done->run ? (struct place){.run = i + 1} : *done;
        bool replaced = runs[i].flags & VMEM_MAP_REPLACE && runs[i].old_arena;

        if (before(&at, &end) && submit(b->priv,
                                        action == TAKE ? PUT
                                        : replaced     ? PUT_BACK
                                                       : TAKE,
                                        runs, &at, &end, &bad))
            vmem__absent_set(b, runs[i].reservation, runs[i].addr + at.done,
                             (i < done->run ? runs[i].length : done->done) - at.done, true);
    }
}

static int all_or_nothing(struct vmem__backend *b, enum action action, const struct vmem__run *runs, size_t n,
                          size_t *bad)
{
    struct place at = {0};
    int rc = submit(b->priv, action, runs, &at, &(struct place){.run = n}, bad);

    if (rc && (at.run || at.done)) {
        char text[VMEM__TEXT];

        vmem__keep_error(text);
        undo(b, action, runs, &at);
        vmem__error(rc, "%s", text);
    }
    if (!rc)
        vmem__absent_end(b, runs, n);
    return rc;
}

int vmem__uvm_restore(struct vmem__backend *b, const struct vmem__run *run)
{
    struct vmem__cuda_reservation *reservation = run->reservation->priv;
    uint64_t end = run->addr + run->length, at = run->addr, n;
    size_t bad;
    int rc = 0;

    pthread_mutex_lock(&reservation->lock); // what is absent is restored once
    for (; (at = vmem__absent_next(run->reservation, at, end, &n)), n && !rc; at += n) {
        struct vmem__run part = *run;
        struct place first = {0};

        part.addr = at;
        part.length = n;
        part.offset += at - run->addr;
        part.flags = VMEM_MAP_REPLACE;
        rc = submit(b->priv, run->arena ? PUT : TAKE, &part, &first, &(struct place){.run = 1}, &bad);
        if (!rc)
            vmem__absent_set(b, run->reservation, at, n, false);
    }
    pthread_mutex_unlock(&reservation->lock);
    return rc;
}

// MAP_AHEAD stays within the segment. If a run of small pages ends in the last block of one, this opens the first block
// of the reservation's next segment, which is active.
static int open_next_segment(struct uvm *u, const struct vmem__run *run)
{
    const struct vmem__cuda_reservation *reservation = run->reservation->priv;
    uint64_t end = run->addr + run->length;
    struct uvm_vmem_op op = {.length = UVM_VMEM_GRANULE, .flags = UVM_VMEM_MAP_OPEN | UVM_VMEM_TAKEOVER};
    uint32_t failed;

    op.va = reservation->addr + ((end - 1 - reservation->addr) / UVM_SEGMENT + 1) * UVM_SEGMENT;
    if (run->page_size == VMEM_PAGE_2M || !ends_in_last_block(run->reservation, end) ||
        op.va >= reservation->addr + reservation->length)
        return 0;
    return vmem__kmod_batch(&u->kmod, UVM_VMEM_MAP, &op, 1, &failed);
}

int vmem__uvm_map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    // Also activate the segment after the run: kernels read whole tiles, which may reach past the last row.
    for (size_t i = 0; i < n; i++) {
        int rc = vmem__gpu_backdrop(b, runs[i].reservation, runs[i].addr, runs[i].length + UVM_SEGMENT);

        if (!rc)
            rc = open_next_segment(b->priv, &runs[i]);
        if (rc) {
            *bad = i;
            return rc;
        }
    }
    return all_or_nothing(b, PUT, runs, n, bad);
}

int vmem__uvm_unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    return all_or_nothing(b, TAKE, runs, n, bad);
}
