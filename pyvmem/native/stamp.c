// SPDX-License-Identifier: MIT
#include "driver/stamp.h"

#include "native.h"

int pv_stamp_name(const char *backend, int device, char *name, size_t size)
{
    return vmem__stamp_name(backend, device, name, size);
}

int pv_stamp_folder(unsigned n, char *path, size_t size) { return vmem__stamp_folder(n, path, size); }
