// SPDX-License-Identifier: MIT
#include "driver/abi.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/error.h"

// Oldest first. Checked against every release tag from 515.43.04 to 595.45.04. The sources of 610 and 615 were not at
// hand. They count as known because another program's table of the same calls (gVisor's nvproxy) changes nothing there.
// Besides, stock_open() maps memory and reads it back before it uses a release.
static const struct vmem__abi table[] = {
    {{515, 0, 0}, 24, 120, 32},
    {{535, 0, 0}, 28, 120, 32},    // params_size enters rm_alloc, before the status
    {{545, 0, 0}, 28, 128, 32},    // numa_node
    {{550, 40, 53}, 28, 128, 256}, // GPU instances are counted as GPUs
};
static const unsigned known_majors[] = {515, 520, 525, 530, 535, 545, 550, 555, 560,
                                        565, 570, 575, 580, 590, 595, 610, 615};

static int compare(const struct vmem__release *a, const struct vmem__release *b)
{
    if (a->major != b->major)
        return a->major < b->major ? -1 : 1;
    if (a->minor != b->minor)
        return a->minor < b->minor ? -1 : 1;
    return a->patch < b->patch ? -1 : a->patch > b->patch;
}

// The first word of a line that looks like a release number, for example in
// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build ...".
static const char *find_release(char *line)
{
    char *state = NULL;

    for (char *word = strtok_r(line, " \t\n", &state); word; word = strtok_r(NULL, " \t\n", &state))
        if (strspn(word, "0123456789.") == strlen(word) && strchr(word, '.'))
            return word;
    return NULL;
}

int vmem__abi_release(char *text, size_t size)
{
    static const char *const files[] = {"/proc/driver/nvidia/version", "/sys/module/nvidia/version"};
    const char *release = NULL;
    char line[256];

    for (size_t i = 0; !release && i < sizeof(files) / sizeof(files[0]); i++) {
        FILE *file = fopen(files[i], "re");

        if (file && fgets(line, sizeof(line), file))
            release = find_release(line);
        if (file)
            fclose(file);
    }
    if (!release)
        return vmem__error(-ENODEV, "no NVIDIA kernel driver is loaded: neither %s nor %s tells a release", files[0],
                           files[1]);
    snprintf(text, size, "%s", release);
    return 0;
}

int vmem__abi_find(const char *release, int unknown, const struct vmem__abi **out)
{
    struct vmem__release r = {0};
    size_t row = sizeof(table) / sizeof(table[0]);
    int known = 0;

    if (sscanf(release, "%u.%u.%u", &r.major, &r.minor, &r.patch) < 2)
        return vmem__error(-EPROTONOSUPPORT, "driver release %s: not a release number", release);
    for (size_t i = 0; i < sizeof(known_majors) / sizeof(known_majors[0]); i++)
        known |= known_majors[i] == r.major;
    while (row > 0 && compare(&r, &table[row - 1].since) < 0)
        row--;
    if (row == 0 || (!known && !unknown))
        return vmem__error(-EPROTONOSUPPORT, "driver release %s: the ABI table holds %u to %u; %s", release,
                           known_majors[0], known_majors[sizeof(known_majors) / sizeof(known_majors[0]) - 1],
                           row == 0 ? "older ones lack the calls" : "VMEM_OPT_UNKNOWN_DRIVER tries it all the same");
    *out = &table[row - 1];
    return 0;
}

struct uvm_map_tail *vmem__abi_map_tail(const struct vmem__abi *abi, struct uvm_map *params)
{
    return (struct uvm_map_tail *)((char *)params + offsetof(struct uvm_map, attributes[abi->max_gpus]));
}

uint32_t vmem__abi_alloc_status(const struct vmem__abi *abi, const struct rm_alloc *params)
{
    uint32_t status;

    memcpy(&status, (const char *)params + abi->alloc_status, sizeof(status));
    return status;
}
