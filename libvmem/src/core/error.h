// The calling thread's error text, and the checks of arguments that all parts of libvmem make.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_ERROR_H
#define VMEM_ERROR_H

#include <stddef.h>
#include <stdint.h>

// Sets the calling thread's error text and returns rc (a negative errno), for `return vmem__error(-EINVAL, ...)`.
int vmem__error(int rc, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));
// -EINVAL if `flags` has other bits than `known`.
int vmem__check_flags(uint32_t flags, uint32_t known);

// Saves the text, which vmem__error(0, "%s", kept) restores, for the clean-up of a failed call.
#define VMEM__TEXT 512
void vmem__keep_error(char kept[VMEM__TEXT]);

// Structures of the public headers grow at their end. Their first field, `size`, is the size in the caller's header,
// which may be older or newer than the library.
// Copies a caller's structure into the library's, of `size` bytes. Fields that an older caller lacks become 0, and
// fields that only a newer caller has must be 0. -EINVAL, naming `name`, unless the caller's size is valid and at least
// `least`.
int vmem__struct_take(void *to, size_t size, size_t least, const void *from, const char *name);

// Copies the library's structure to a caller, up to the caller's size, and sets the rest to 0. The caller's `size` does
// not change. -EINVAL, naming `name`, unless that is valid; `to` may be NULL.
int vmem__struct_give(void *to, const void *from, size_t size, const char *name);

#endif
