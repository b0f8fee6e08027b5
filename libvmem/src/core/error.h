// The calling thread's error text, used by all parts of libvmem.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_ERROR_H
#define VMEM_ERROR_H

#include <stdint.h>

// Sets the calling thread's error text and returns rc (a negative errno), for `return vmem__error(-EINVAL, ...)`.
int vmem__error(int rc, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));
// -EINVAL if `flags` has other bits than `known`.
int vmem__check_flags(uint32_t flags, uint32_t known);

// Saves the text, which vmem__error(0, "%s", kept) restores, for the clean-up of a failed call.
#define VMEM__TEXT 512
void vmem__keep_error(char kept[VMEM__TEXT]);

#endif
