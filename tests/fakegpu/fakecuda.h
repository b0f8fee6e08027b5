// libcuda's calls on the fake device; fakegpu.c includes this, nobody else.
//
// SPDX-License-Identifier: MIT
#define CUDA(name, ...) EXPORT int name(__VA_ARGS__)

CUDA(cuInit, unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    if (memfd < 0) {
        struct stat st;

        memfd = memfd_create("fake-device-memory", MFD_CLOEXEC);
        uvm_fd = memfd_create("fake-nvidia-uvm", MFD_CLOEXEC);
        if (memfd < 0 || uvm_fd < 0 || ftruncate(memfd, MEMORY) || fstat(uvm_fd, &st))
            abort();
        bytes = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd, 0);
        if (bytes == MAP_FAILED)
            abort();
        uvm_inode = st.st_ino;
        owner = getpid();
    }
    pthread_mutex_unlock(&lock);
    return 0;
}
CUDA(cuGetErrorString, int result, const char **text)
{
    *text = result == 2 ? "out of memory (fake)" : result == 1 ? "invalid argument (fake)" : "error (fake)";
    return 0;
}
CUDA(cuDeviceGetCount, int *count)
{
    *count = 1;
    return 0;
}
CUDA(cuDeviceGet, int *device, int ordinal)
{
    *device = ordinal;
    return 0;
}
CUDA(cuDeviceGetName, char *name, int length, int device)
{
    (void)device;
    snprintf(name, (size_t)length, "Fake GPU in CPU memory");
    return 0;
}
// Of a MIG instance this is the UUID of the GPU that it is a part of, which all of the GPU's instances share.
CUDA(cuDeviceGetUuid, unsigned char *out, int device)
{
    (void)device;
    memcpy(out, "the-parent's-own", sizeof(uuid));
    return 0;
}
CUDA(cuDeviceGetUuid_v2, unsigned char *out, int device)
{
    (void)device;
    memcpy(out, uuid, sizeof(uuid));
    return 0;
}
CUDA(cuDeviceGetAttribute, int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1; // compute capability 9.0
    return 0;
}
CUDA(cuDevicePrimaryCtxRetain, void **context, int device)
{
    (void)device;
    *context = &memfd;
    return 0;
}
CUDA(cuDevicePrimaryCtxRelease_v2, int device)
{
    (void)device;
    return 0;
}
CUDA(cuCtxPushCurrent_v2, void *context)
{
    (void)context;
    return 0;
}
CUDA(cuCtxPopCurrent_v2, void **context)
{
    *context = &memfd;
    return 0;
}
CUDA(cuCtxSynchronize, void)
{
    void (*run)(void) = kernels;
    waits++;
    broken += capturing;
    if (run && !capturing)
        run();
    return capturing ? 900 : 0;
}
CUDA(cuThreadExchangeStreamCaptureMode, int *mode)
{
    static _Thread_local int now; // global, as a thread begins

    const int before = now;
    now = *mode;
    *mode = before;
    return 0;
}
CUDA(cuMemGetInfo_v2, size_t *free, size_t *total)
{
    pthread_mutex_lock(&lock);
    *total = MEMORY;
    *free = MEMORY - fakegpu_used();
    pthread_mutex_unlock(&lock);
    return 0;
}
CUDA(cuStreamCreate, void **stream, unsigned flags)
{
    (void)flags;
    *stream = &lock;
    return 0;
}
CUDA(cuStreamDestroy_v2, void *stream)
{
    (void)stream;
    return 0;
}
CUDA(cuStreamSynchronize, void *stream)
{
    (void)stream;
    return 0;
}
// An event holds the number of the work before it. All work is done but what fakegpu_hold_events() keeps back.
static long events, held_work, work;
EXPORT void fakegpu_hold_events(int on)
{
    pthread_mutex_lock(&lock);
    held_work = on ? work + 1 : 0;
    pthread_mutex_unlock(&lock);
}
EXPORT long fakegpu_events(void) { return events; }
CUDA(cuEventCreate, long **event, unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    *event = fails() ? NULL : calloc(1, sizeof(**event));
    events += *event != NULL;
    pthread_mutex_unlock(&lock);
    return *event ? 0 : 2;
}
CUDA(cuEventRecord, long *event, void *stream)
{
    (void)stream;
    pthread_mutex_lock(&lock);
    const bool ok = !fails();
    if (ok)
        *event = ++work;
    pthread_mutex_unlock(&lock);
    return ok ? 0 : 2;
}
CUDA(cuEventQuery, const long *event)
{
    pthread_mutex_lock(&lock);
    const int result = held_work && *event >= held_work ? 600 : 0;
    pthread_mutex_unlock(&lock);
    return result;
}
CUDA(cuEventDestroy_v2, long *event)
{
    pthread_mutex_lock(&lock);
    events--;
    pthread_mutex_unlock(&lock);
    free(event);
    return 0;
}
CUDA(cuMemAddressReserve, uint64_t *addr, size_t length, size_t align, uint64_t hint, unsigned long long flags)
{
    static unsigned n;
    struct reservation *r = calloc(1, sizeof(*r));
    bool ok;

    (void)hint, (void)flags;
    pthread_mutex_lock(&lock);
    ok = !fails() && r && length % BLOCK == 0 && align == BLOCK && (r->addr = space_take(length + GUARD));
    if (ok) {
        *addr = r->addr;
        r->size = length;
        if (n++ % 2)
            guard_new(r);
        r->next = reservations;
        reservations = r;
    }
    pthread_mutex_unlock(&lock);
    if (!ok)
        free(r);
    return ok ? 0 : 2;
}
CUDA(cuMemAddressFree, uint64_t addr, size_t length)
{
    struct reservation **at = &reservations, *r;
    int result = 1;

    pthread_mutex_lock(&lock);
    while ((r = *at) && r->addr != addr)
        at = &r->next;
    for (const struct mapping *m = mappings; r && m; m = m->next)
        if (m->addr >= addr && m->addr < addr + length)
            r = NULL; // still mapped
    if (r && r->size == length) {
        *at = r->next;
        space_give(r);
        free(r);
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
CUDA(cuMemCreate, uint64_t *handle, size_t length, const void *prop, unsigned long long flags)
{
    struct memory *m;

    (void)flags;
    pthread_mutex_lock(&lock);
    m = fails() ? NULL : memory_new(length, 0, 0);
    if (m && ((const struct vmem__cu_prop *)prop)->handle_types && !memory_share(m, memfd_create("fake-common", 0)))
        abort();
    if (m)
        *handle = m->id;
    pthread_mutex_unlock(&lock);
    return m ? 0 : 2;
}
// Memory that can be exported is a file of its own, which other processes map, too. It counts where it is imported.
CUDA(cuMemExportToShareableHandle, void *fd, uint64_t handle, int type, unsigned long long flags)
{
    struct memory *m;

    (void)flags;
    pthread_mutex_lock(&lock);
    m = fails() || type != 1 ? NULL : memory_find(handle, 0);
    if (m && m->file)
        *(int *)fd = fcntl(m->file, F_DUPFD_CLOEXEC, 3);
    pthread_mutex_unlock(&lock);
    return m && m->file ? 0 : 1;
}
CUDA(cuMemImportFromShareableHandle, uint64_t *handle, void *fd, int type)
{
    struct memory *m = NULL;
    struct stat st;

    pthread_mutex_lock(&lock);
    if (type == 1 && !fstat((int)(uintptr_t)fd, &st) && st.st_size && st.st_size % BLOCK == 0 && !fails() &&
        (m = memory_new((uint64_t)st.st_size, 0, 0)) && !memory_share(m, fcntl((int)(uintptr_t)fd, F_DUPFD_CLOEXEC, 3)))
        abort();
    if (m)
        *handle = m->id;
    pthread_mutex_unlock(&lock);
    return m ? 0 : 1;
}
CUDA(cuMemRelease, uint64_t handle)
{
    struct memory *m;

    pthread_mutex_lock(&lock);
    m = memory_find(handle, 0);
    if (m)
        memory_put(m);
    pthread_mutex_unlock(&lock);
    return m ? 0 : 1;
}
CUDA(cuMemMap, uint64_t addr, size_t length, size_t offset, uint64_t handle, unsigned long long flags)
{
    struct memory *memory;
    int result = 1;

    (void)flags;
    pthread_mutex_lock(&lock);
    memory = memory_find(handle, 0);
    for (const struct mapping *m = mappings; memory && m; m = m->next)
        if (addr < m->addr + m->size && m->addr < addr + length)
            memory = NULL;
    if (fails()) {
        result = 2;
    } else if (memory && (offset || length != memory->size)) {
        result = 801; // a handle is mapped as a whole
    } else if (memory && addr % BLOCK == 0) {
        struct mapping *m = calloc(1, sizeof(*m));

        *m = (struct mapping){.next = mappings,
                              .addr = addr,
                              .size = length,
                              .memory = memory,
                              .entry = calloc(length / PAGE, sizeof(uint32_t))};
        for (uint64_t i = 0; i < length / PAGE; i++)
            m->entry[i] = next_entry | 1;
        next_entry += 2;
        memory->refs++;
        mappings = m;
        place(addr, length, PROT_NONE, memory->file ? memory->file : memfd, memory->file ? 0 : memory->offset);
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
CUDA(cuMemSetAccess, uint64_t addr, size_t length, const void *access, size_t count)
{
    int result = 0;

    const int prot = ((const struct vmem__cu_access *)access)->flags == 1 ? PROT_READ : PROT_READ | PROT_WRITE;

    (void)count;
    pthread_mutex_lock(&lock);
    if (fails())
        result = 2;
    for (uint64_t at = addr; !result && at < addr + length;) {
        struct mapping *m = mapping_at(at, 1);

        if (!m || m->addr != at || m->addr + m->size > addr + length) {
            result = 1;
            break;
        }
        if ((!m->access || m->memory->file) && mprotect((void *)m->addr, m->size, prot))
            abort();
        m->access = true;
        at += m->size;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
CUDA(cuMemUnmap, uint64_t addr, size_t length)
{
    struct mapping *m;
    int result = 0;

    pthread_mutex_lock(&lock); // needs no memory, so it never fails for lack of it
    for (uint64_t at = addr; !result && at < addr + length; at = m->addr + m->size)
        if (!(m = mapping_at(at, 1)) || m->addr != at || m->addr + m->size > addr + length) {
            result = 1;
            break;
        }
    for (struct mapping **at = &mappings; !result && (m = *at);) {
        if (m->addr < addr || m->addr >= addr + length) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        nothing_at(m->addr, m->size);
        memory_put(m->memory);
        free(m->entry);
        free(m->kmod);
        free(m);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
// Pinned memory of the host.
static struct pinned {
    struct pinned *next;
    uint64_t length;
    char memory[];
} *pinned;
static int no_pinned;
EXPORT void fakegpu_no_pinned(int on) { no_pinned = on; }
CUDA(cuMemHostAlloc, void **buffer, size_t length, unsigned flags)
{
    struct pinned *p = no_pinned ? NULL : malloc(sizeof(*p) + length);

    (void)flags;
    if (!p)
        return 2;
    pthread_mutex_lock(&lock);
    *p = (struct pinned){.next = pinned, .length = length};
    pinned = p;
    pthread_mutex_unlock(&lock);
    *buffer = p->memory;
    return 0;
}
CUDA(cuMemFreeHost, void *buffer)
{
    struct pinned **at, *p;

    pthread_mutex_lock(&lock);
    for (at = &pinned; (p = *at) && p->memory != buffer; at = &p->next)
        ;
    if (p)
        *at = p->next;
    pthread_mutex_unlock(&lock);
    free(p);
    return p ? 0 : 1;
}
static bool in_pinned(uint64_t addr, uint64_t length)
{
    const struct pinned *p = pinned;

    while (p && (addr < (uint64_t)p->memory || addr + length > (uint64_t)p->memory + p->length))
        p = p->next;
    return p;
}

// Zeroes are holes of the memfd, where they can be: most memory is zeroed once and never read.
static void zero(uint64_t addr, uint64_t length)
{
    if ((addr | length) % 4096 || madvise((void *)addr, length, MADV_REMOVE))
        memset((void *)addr, 0, length);
}
static bool all_zero(const char *bytes, uint64_t length)
{
    return !length || (!bytes[0] && !memcmp(bytes, bytes + 1, length - 1));
}
CUDA(cuMemcpyAsync, uint64_t dst, uint64_t src, size_t length, void *stream)
{
    bool ok, host;

    (void)stream;
    pthread_mutex_lock(&lock);
    host = in_pinned(src, length);
    ok = known(dst, length) && (host || known(src, length));
    pthread_mutex_unlock(&lock);
    if (ok && host && all_zero((char *)src, length))
        zero(dst, length);
    else if (ok)
        memmove((void *)dst, (void *)src, length);
    return ok ? 0 : 1;
}
static _Atomic long fills;
EXPORT long fakegpu_fills(void) { return fills; }
CUDA(cuMemsetD8Async, uint64_t addr, unsigned char value, size_t length, void *stream)
{
    bool ok;

    (void)stream;
    pthread_mutex_lock(&lock);
    ok = known(addr, length);
    pthread_mutex_unlock(&lock);
    fills++;
    if (ok && value)
        memset((void *)addr, value, length);
    else if (ok)
        zero(addr, length);
    return ok ? 0 : 1;
}
