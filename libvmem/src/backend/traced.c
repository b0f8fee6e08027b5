// Nothing here runs without VMEM_TRACE.
//
// SPDX-License-Identifier: MIT
#include "backend/traced.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

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

#define RUNS "\"bytes\":%" PRIu64 ",\"runs\":%zu,\"result\":%d"
#define BYTES "\"bytes\":%" PRIu64 ",\"result\":%d"

static int map(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->map(b, runs, n, bad);
    vmem__trace_end("map", start, RUNS, bytes_of(runs, n), n, rc);
    return rc;
}

static int unmap(struct vmem__backend *b, const struct vmem__run *runs, size_t n, size_t *bad)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->unmap(b, runs, n, bad);
    vmem__trace_end("unmap", start, RUNS, bytes_of(runs, n), n, rc);
    return rc;
}

static int zero(struct vmem__backend *b, const struct vmem__run *runs, size_t n)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->zero(b, runs, n);
    vmem__trace_end("zero", start, RUNS, bytes_of(runs, n), n, rc);
    return rc;
}

static int move(struct vmem__backend *b, const struct vmem__run *from, const struct vmem__run *to, size_t n)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->move(b, from, to, n);
    vmem__trace_end("move", start, RUNS, bytes_of(from, n), n, rc);
    return rc;
}

static int reserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->reserve(b, r);
    vmem__trace_end("reserve addresses", start, BYTES, r->length, rc);
    return rc;
}

static void unreserve(struct vmem__backend *b, struct vmem__reservation *r)
{
    const uint64_t start = vmem__trace_start(), length = r->length;
    inner(b)->unreserve(b, r);
    vmem__trace_end("free addresses", start, BYTES, length, 0);
}

static int backdrop(struct vmem__backend *b, struct vmem__reservation *r, uint64_t addr, uint64_t length)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->backdrop(b, r, addr, length);
    vmem__trace_end("backdrop", start, BYTES, length, rc);
    return rc;
}

static int arena_new(struct vmem__backend *b, struct vmem__arena *a)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->arena_new(b, a);
    vmem__trace_end("allocate memory", start, BYTES, a->size, rc);
    return rc;
}

static void arena_free(struct vmem__backend *b, struct vmem__arena *a)
{
    const uint64_t start = vmem__trace_start(), size = a->size;
    inner(b)->arena_free(b, a);
    vmem__trace_end("free memory", start, BYTES, size, 0);
}

static int populate(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->populate(b, a, offset, length);
    vmem__trace_end("allocate memory", start, BYTES, length, rc);
    return rc;
}

static int discard(struct vmem__backend *b, struct vmem__arena *a, uint64_t offset, uint64_t length)
{
    const uint64_t start = vmem__trace_start();
    const int rc = inner(b)->discard(b, a, offset, length);
    vmem__trace_end("free memory", start, BYTES, length, rc < 0 ? rc : 0);
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
