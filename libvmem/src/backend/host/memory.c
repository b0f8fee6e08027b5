// Measures the memory that this process may use: the machine's, or less where control groups (containers,
// systemd units, batch jobs) limit it.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/host/host.h"

// The memory controller's files, for cgroup versions 1 and 2. Every distribution and container runtime mounts them
// here.
struct version {
    const char *mount, *limit, *used, *cache[2];
};
static const struct version v1 = {
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    {"total_inactive_file ", "total_active_file "},
};
static const struct version v2 = {
    "/sys/fs/cgroup",
    "memory.max",
    "memory.current",
    {"inactive_file ", "active_file "},
};

// Opens a file for reading. *out is NULL if the file is absent or not accessible to this process. Only failures that
// are not about the file itself are errors, such as a lack of descriptors.
static int open_file(const char *path, FILE **out)
{
    *out = fopen(path, "re");
    if (*out || errno == ENOENT || errno == ENOTDIR || errno == EACCES || errno == EPERM)
        return 0;
    return vmem__error(-errno, "%s: %s", path, strerror(errno));
}

// Reads the number after `key` at the start of a line. *found is false if the file is absent or has no number ("max").
static int number(const char *folder, const char *file, const char *key, uint64_t *value, bool *found)
{
    char path[2 * PATH_MAX], line[128];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    int rc = open_file(path, &f);
    *found = false;
    while (f && !*found && fgets(line, sizeof line, f))
        *found = !strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), "%" SCNu64, value) == 1;
    if (f)
        fclose(f);
    return rc;
}

// Lowers *m to the limits of one group. The group counts file pages as used, but the kernel reclaims them first, so
// they count as available here, as in MemAvailable. The pages of a memfd are not file pages in this sense.
static int restrict_to(const char *group, const struct version *v, struct vmem__host_memory *m)
{
    uint64_t limit, used, cache;
    bool found;
    int rc = number(group, v->limit, "", &limit, &found);
    if (!rc && found)
        rc = number(group, v->used, "", &used, &found);
    if (rc || !found)
        return rc;
    for (int i = 0; i < 2 && !rc; i++) {
        rc = number(group, "memory.stat", v->cache[i], &cache, &found);
        if (found)
            used -= cache < used ? cache : used;
    }
    const uint64_t left = limit > used ? limit - used : 0;
    if (left < m->available)
        snprintf(m->usage, sizeof m->usage, "%.*s/%s", PATH_MAX, group, v->used);
    m->cgroup = m->cgroup || limit < m->total;
    m->total = limit < m->total ? limit : m->total;
    m->available = left < m->available ? left : m->available;
    return rc;
}

// Applies the limits of a group and of all its ancestors, which bind it too. In a container, the path may be the one
// seen outside, which does not exist here; the top of the mount is then the container's own group. The walk ends there.
static int restrict_to_all(const char *root, const struct version *v, const char *path, struct vmem__host_memory *m)
{
    char group[2 * PATH_MAX];
    const int top = snprintf(group, sizeof group, "%s%s", root, v->mount);
    snprintf(group + top, sizeof group - (size_t)top, "%s", path);
    int rc = 0;
    for (char *end; !rc && (end = strrchr(group + top, '/')); *end = '\0')
        rc = restrict_to(group, v, m);
    return rc ? rc : restrict_to(group, v, m);
}

// Returns whether a comma-separated list of controllers contains "memory".
static bool has_memory(const char *list)
{
    for (const size_t n = strlen("memory"); list; list = strchr(list, ',')) {
        list += *list == ',';
        if (!strncmp(list, "memory", n) && (list[n] == ',' || !list[n]))
            return true;
    }
    return false;
}

int vmem__host_memory(const char *root, struct vmem__host_memory *out)
{
    char path[2 * PATH_MAX], line[PATH_MAX + 128];
    bool total, available = false;
    FILE *f;
    snprintf(path, sizeof path, "%s/proc", root);
    *out = (struct vmem__host_memory){0};
    int rc = number(path, "meminfo", "MemTotal:", &out->total, &total);
    if (!rc)
        rc = number(path, "meminfo", "MemAvailable:", &out->available, &available);
    if (!rc && !(total && available))
        rc = vmem__error(-ENODATA, "%s/meminfo does not say how much memory there is", path);
    if (rc)
        return rc;
    out->total <<= 10;
    out->available <<= 10;

    // Each line is "number:controllers:path". The line of version 2 lists no controllers.
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    rc = open_file(path, &f);
    while (f && !rc && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (!controllers[1])
            rc = restrict_to_all(root, &v2, group, out);
        else if (has_memory(controllers + 1))
            rc = restrict_to_all(root, &v1, group, out);
    }
    if (f)
        fclose(f);
    return rc;
}
