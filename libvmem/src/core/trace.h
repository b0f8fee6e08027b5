// A timeline of what takes time, for Perfetto (https://ui.perfetto.dev) and Chrome's about:tracing: VMEM_TRACE=FILE.
//
// Each event is one line, written by one call that appends, so that processes and threads share a file and a process
// that is killed leaves whole lines. The array has no end, which the format allows (Trace Event Format, JSON array).
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TRACE_H
#define VMEM_TRACE_H

#include <stdbool.h>
#include <stdint.h>

// True if events are written. Opens the file at the first call in a process. Cheap afterwards.
bool vmem__tracing(void);

// Now, in nanoseconds, as the start of an event; 0 if none is written.
uint64_t vmem__trace_start(void);

// Writes the event `name` from `start` until now. fmt: the members of its "args" as JSON. Nothing if start is 0. Keeps
// errno.
void vmem__trace_end(const char *name, uint64_t start, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
