// SPDX-License-Identifier: MIT
#include "driver/stamp.h"

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"
#include "driver/abi.h"
#include "driver/libcuda.h"

#define MODULE "/sys/module/nvidia_uvm"
#define BUILD_ID_MAX 32

// The build ID in an ELF note: name size, descriptor size, type, name, descriptor; each part fills words.
static int build_id(char *text, size_t size)
{
    FILE *file = fopen(MODULE "/notes/.note.gnu.build-id", "re");
    unsigned char note[64 + BUILD_ID_MAX];
    uint32_t name, length;
    size_t n;

    if (!file)
        return -ENOENT;
    n = fread(note, 1, sizeof(note), file);
    fclose(file);
    if (n < 12)
        return -ENOENT;
    memcpy(&name, note, sizeof(name));
    memcpy(&length, note + 4, sizeof(length));
    if (name > 32 || length == 0 || length > BUILD_ID_MAX || 12 + ((name + 3) & ~3u) + length > n ||
        2 * length + 1 > size)
        return -ENOENT;
    for (uint32_t i = 0; i < length; i++)
        snprintf(text + 2 * i, 3, "%02x", note[12 + ((name + 3) & ~3u) + i]);
    return 0;
}

int vmem__stamp_name(const char *backend, int ordinal, char *name, size_t size)
{
    char release[64], id[128];
    int sm, rc = vmem__abi_release(release, sizeof(release));

    if (!rc)
        rc = vmem__cuda_capability(ordinal, &sm);
    if (rc)
        return rc;
    if (build_id(id, sizeof(id)))
        return vmem__error(-ENODEV, MODULE " has no build ID: which module is loaded?");
    snprintf(name, size, "%s-%.31s-sm%d-%s", backend, release, sm, id);
    return 0;
}

int vmem__stamp_folder(unsigned n, char *path, size_t size)
{
    const char *state = secure_getenv("XDG_STATE_HOME"), *home = secure_getenv("HOME");
    int length = -1;

    if (n == 0)
        length = snprintf(path, size, "/var/lib/vmem/selftest");
    else if (n == 1 && state && *state == '/')
        length = snprintf(path, size, "%s/vmem/selftest", state);
    else if (n == 1 && home && *home == '/')
        length = snprintf(path, size, "%s/.local/state/vmem/selftest", home);
    return length > 0 && (size_t)length < size ? 0 : -ENOENT;
}

int vmem__stamp_find(const char *backend, int ordinal)
{
    char name[VMEM__STAMP_NAME], folder[PATH_MAX - VMEM__STAMP_NAME - 1], path[PATH_MAX];
    int rc = vmem__stamp_name(backend, ordinal, name, sizeof(name));

    if (rc)
        return rc;
    for (unsigned n = 0; !vmem__stamp_folder(n, folder, sizeof(folder)); n++) {
        snprintf(path, sizeof(path), "%s/%s", folder, name);
        if (!access(path, R_OK))
            return 0;
    }
    return vmem__error(-EPERM, "not chosen by default: its self-test has not passed here (pyvmem doctor --selftest)");
}
