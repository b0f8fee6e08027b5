// The calling thread's error text, for every floor.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_ERROR_H
#define VMEM_ERROR_H

// Sets the calling thread's error text and returns rc (a negative errno), so that `return vmem__error(-EINVAL, ...)`.
int vmem__error(int rc, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));

// Keeps the text, which vmem__error(0, "%s", kept) puts back: for what a call does on its way out.
#define VMEM__TEXT 512
void vmem__keep_error(char kept[VMEM__TEXT]);

#endif
