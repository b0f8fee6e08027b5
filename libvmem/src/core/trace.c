// SPDX-License-Identifier: MIT
#include "core/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/memory.h"

#define LINE 512

static int file = -1;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread pid_t named; // the process in which this thread's name was written

static void put(const char *line, int length)
{
    if (length > 0 && length < LINE && write(file, line, (size_t)length) < 0)
        return; // a full disk ends a timeline, not a program
}

static void begin(void)
{
    const char *path = getenv("VMEM_TRACE");
    if (!path || !*path)
        return;
    file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file >= 0 && lseek(file, 0, SEEK_END) == 0)
        put("[\n", 2);
}

bool vmem__tracing(void)
{
    pthread_once(&once, begin);
    return file >= 0;
}

uint64_t vmem__trace_start(void) { return file >= 0 ? vmem__now() : 0; }

static void name_thread(pid_t process, pid_t thread)
{
    char line[LINE], name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    for (char *c = name; *c; c++)
        if (*c < ' ' || *c == '"' || *c == '\\')
            *c = '?';
    put(line, snprintf(line, sizeof line,
                       "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                       (int)process, (int)thread, name));
    named = process;
}

void vmem__trace_end(const char *name, uint64_t start, const char *fmt, ...)
{
    if (!start)
        return;
    const int error = errno;
    const uint64_t took = vmem__now() - start;
    const pid_t process = getpid(), thread = (pid_t)syscall(SYS_gettid);
    char line[LINE];
    va_list args;
    if (named != process)
        name_thread(process, thread);
    int n = snprintf(line, sizeof line,
                     "{\"name\":\"%s\",\"cat\":\"vmem\",\"ph\":\"X\",\"ts\":%llu.%03llu,\"dur\":%llu.%03llu,\"pid\":%d,"
                     "\"tid\":%d,\"args\":{",
                     name, (unsigned long long)start / 1000, (unsigned long long)start % 1000,
                     (unsigned long long)took / 1000, (unsigned long long)took % 1000, (int)process, (int)thread);
    va_start(args, fmt);
    n += vsnprintf(line + n, sizeof line - (size_t)n, fmt, args);
    va_end(args);
    if (n < LINE)
        n += snprintf(line + n, sizeof line - (size_t)n, "}},\n");
    put(line, n);
    errno = error;
}
