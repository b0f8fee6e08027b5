// Structures of the public headers that grow at their end. Their first field, `size`, is the size in the caller's
// header. The caller may be older or newer than the library.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STRUCT_H
#define VMEM_STRUCT_H

#include <stddef.h>

// Copies a caller's structure into the library's, of `size` bytes. Fields that an older caller lacks become 0, and
// fields that only a newer caller has must be 0. -EINVAL, naming `name`, unless the caller's size is valid and at least
// `least`.
int vmem__struct_take(void *to, size_t size, size_t least, const void *from, const char *name);

// Copies the library's structure to a caller, up to the caller's size, and sets the rest to 0. The caller's `size` does
// not change. -EINVAL, naming `name`, unless that is valid; `to` may be NULL.
int vmem__struct_give(void *to, const void *from, size_t size, const char *name);

#endif
