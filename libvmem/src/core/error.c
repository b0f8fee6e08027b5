// The calling thread's error text, and checks of arguments.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/error.h"
#include "vmem.h"

static _Thread_local char text[VMEM__TEXT];

int vmem__error(int rc, const char *fmt, ...)
{
    // Uses a second buffer, because an argument may be the previous text.
    char fresh[sizeof text];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fresh, sizeof fresh, fmt, ap);
    va_end(ap);
    memcpy(text, fresh, sizeof text);
    return rc;
}

int vmem__check_flags(uint32_t flags, uint32_t known)
{
    return flags & ~known ? vmem__error(-EINVAL, "flags %#x has unknown bits", flags) : 0;
}

void vmem__keep_error(char kept[VMEM__TEXT]) { memcpy(kept, text, sizeof text); }

const char *vmem_last_error(void) { return text; }

// ---- structures that grow ---------------------------------------------------------------------------------------

#define SIZE_LEAST 8    // `size` and one more word, as in the first version of every structure
#define SIZE_MOST 4096u // more than any structure will ever have; larger values are garbage

// The size in a caller's structure; 0 if it is invalid, with the error text set.
static size_t their_size(const void *theirs, size_t least, const char *name)
{
    uint32_t size;
    memcpy(&size, theirs, sizeof size);
    if (size >= least && size <= SIZE_MOST)
        return size;
    vmem__error(-EINVAL, "%s->size %u must be the structure's size, %zu to %u", name, size, least, SIZE_MOST);
    return 0;
}

int vmem__struct_take(void *to, size_t size, size_t least, const void *from, const char *name)
{
    const size_t theirs = their_size(from, least, name);
    if (!theirs)
        return -EINVAL;
    for (size_t i = size; i < theirs; i++)
        if (((const char *)from)[i])
            return vmem__error(-EINVAL, "%s->size is %zu: this library knows %zu bytes, and what follows them is not 0",
                               name, theirs, size);
    memset(to, 0, size);
    memcpy(to, from, theirs < size ? theirs : size);
    return 0;
}

int vmem__struct_give(void *to, const void *from, size_t size, const char *name)
{
    if (!to)
        return vmem__error(-EINVAL, "%s must not be NULL", name);
    const size_t theirs = their_size(to, SIZE_LEAST, name), both = theirs < size ? theirs : size;
    if (!theirs)
        return -EINVAL;
    memcpy((char *)to + sizeof(uint32_t), (const char *)from + sizeof(uint32_t), both - sizeof(uint32_t));
    memset((char *)to + both, 0, theirs - both);
    return 0;
}
