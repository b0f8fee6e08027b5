// The calling thread's error text.
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
