// The stamp of a self-test (pyvmem doctor --selftest): a file that says that the loaded nvidia-uvm.ko has passed it on a
// GPU of this architecture. The backend that the module provides is chosen by default only with one.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_DRIVER_STAMP_H
#define VMEM_DRIVER_STAMP_H

#include <stddef.h>

#define VMEM__STAMP_NAME 160

// The file's name, BACKEND-RELEASE-smNN-BUILDID: the driver's release, the GPU's compute capability, and the build ID of
// the loaded nvidia-uvm.ko.
int vmem__stamp_name(const char *backend, int ordinal, char *name, size_t size);
// The nth folder that may hold it, of the system's and the user's own: 0, or -ENOENT if there are no more. For any other
// n than 0, the user's, which $XDG_STATE_HOME or $HOME names.
int vmem__stamp_folder(unsigned n, char *path, size_t size);
// 0 if some folder holds the file; -EPERM, with a text, if none does.
int vmem__stamp_find(const char *backend, int ordinal);

#endif
