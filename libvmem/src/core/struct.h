// Structures of the public headers that grow at their end. Their first field, `size`, is what the caller's header says:
// the caller may be older than the library, or newer.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STRUCT_H
#define VMEM_STRUCT_H

#include <stddef.h>

// Takes a caller's structure into one of the library's, of `size` bytes: what an older caller lacks is 0, and what a
// newer one has beyond it must be. -EINVAL, naming `name`, unless its size is a possible one, not less than `least`.
int vmem__struct_take(void *to, size_t size, size_t least, const void *from, const char *name);

// Gives the library's structure to a caller: as much as its size holds, and zeroes where it holds more. The caller's
// size stays.
int vmem__struct_give(void *to, const void *from, size_t size, const char *name);

#endif
