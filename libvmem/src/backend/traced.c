// A backend whose calls are events of a timeline (core/trace.h). Nothing here runs without VMEM_TRACE.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "core/trace.h"

struct traced {
    struct vmem__ops ops; // must be first: b->ops points to it
    const struct vmem__ops *inner;
};

static const struct vmem__ops *inner(const struct vmem__backend *b) { return ((const struct traced *)b->ops)->inner; }

static uint64_t bytes_of(const struct vmem__run *runs, size_t n)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += runs[i].length;
    return bytes;
}

#define RUNS "\"bytes\":%" PRIu64 ",\"runs\":%zu"
#define BYTES "\"bytes\":%" PRIu64
#define END(event, bytes, rc) vmem__trace_end(event, start, BYTES ",\"result\":%d", bytes, rc)

// The operation `op`, and its event, whose members are fmt and the values after it.
#define TRACED(op, params, args, event, fmt, ...)                             \
    static int op params                                                      \
    {                                                                         \
        const uint64_t start = vmem__trace_start();                           \
        const int rc = inner(b)->op args;                                     \
        vmem__trace_end(event, start, fmt ",\"result\":%d", __VA_ARGS__, rc); \
        return rc;                                                            \
    }
TRACED(map, (struct vmem__backend * b, const struct vmem__run *runs, size_t n, size_t *bad), (b, runs, n, bad), "map",
       RUNS, bytes_of(runs, n), n)
TRACED(unmap, (struct vmem__backend * b, const struct vmem__run *runs, size_t n, size_t *bad), (b, runs, n, bad),
       "unmap", RUNS, bytes_of(runs, n), n)
TRACED(zero, (struct vmem__backend * b, const struct vmem__run *runs, size_t n), (b, runs, n), "zero", RUNS,
       bytes_of(runs, n), n)
TRACED(move, (struct vmem__backend * b, const struct vmem__run *from, const struct vmem__run *to, size_t n),
       (b, from, to, n), "move", RUNS, bytes_of(from, n), n)
TRACED(reserve, (struct vmem__backend * b, struct vmem__reservation *r), (b, r), "reserve addresses", BYTES, r->length)
TRACED(backdrop, (struct vmem__backend * b, struct vmem__reservation *r, uint64_t addr, uint64_t length),
       (b, r, addr, length), "backdrop", BYTES, length)
TRACED(arena_new, (struct vmem__backend * b, struct vmem__arena *a), (b, a), "allocate memory", BYTES, a->size)
TRACED(populate, (struct vmem__backend * b, struct vmem__arena *a, uint64_t offset, uint64_t length),
       (b, a, offset, length), "allocate memory", BYTES, length)

static void unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    const uint64_t start = vmem__trace_start(), length = r->length;
    inner(b)->unreserve(b, r);
    END("free addresses", length, 0);
}

static void arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    const uint64_t start = vmem__trace_start(), size = a->size;
    inner(b)->arena_free(b, a);
    END("free memory", size, 0);
}

static int discard(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->discard(b, a, offset, length);
    END("free memory", length, rc < 0 ? rc : 0);
    return rc;
}

static void close(struct vmem__backend *b, bool forked)
{
    struct traced *t = (struct traced *)b->ops;
    b->ops = t->inner;
    free(t);
    b->ops->close(b, forked);
}

int vmem__trace_backend(struct vmem__backend *b)
{
    if (!vmem__tracing())
        return 0;
    struct traced *t = malloc(sizeof *t);
    if (!t)
        return vmem__error(-ENOMEM, "no memory for a timeline");
    *t = (struct traced){.ops = *b->ops, .inner = b->ops};
    t->ops.map = map;
    t->ops.unmap = unmap;
    t->ops.zero = zero;
    t->ops.reserve = reserve;
    t->ops.unreserve = unreserve;
    t->ops.arena_new = arena_new;
    t->ops.arena_free = arena_free;
    t->ops.close = close;
    t->ops.move = t->ops.move ? move : NULL;
    t->ops.backdrop = t->ops.backdrop ? backdrop : NULL;
    t->ops.populate = t->ops.populate ? populate : NULL;
    t->ops.discard = t->ops.discard ? discard : NULL;
    b->ops = &t->ops;
    return 0;
}
