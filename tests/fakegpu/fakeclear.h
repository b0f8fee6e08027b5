// Memory that is cleared after it was freed, in order, while other work goes on; fakegpu.c includes this, nobody else.
//
// As in RM: an allocation takes memory that is clear, and waits only where there is too little of it. $FAKEGPU_CLEAR is
// "PATH MIB US": the memory of all processes with this file is MIB in size, and a MiB takes US microseconds. What a
// killed process had stays taken.
//
// SPDX-License-Identifier: MIT
#include <sys/file.h>
#include <time.h>

struct clear {
    uint64_t taken, until; // bytes; ns, when all that was freed will be clear
};

static double clear_ns; // for a byte
static uint64_t clear_size;

static uint64_t clear_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Locks and reads the file; -1: there is none.
static int clear_begin(struct clear *c)
{
    static int fd = -2;
    char path[256];
    unsigned long mib;
    double us;

    if (fd == -2) {
        const char *told = getenv("FAKEGPU_CLEAR");

        fd = -1;
        if (told && sscanf(told, "%255s %lu %lf", path, &mib, &us) == 3) {
            fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            clear_size = (uint64_t)mib << 20;
            clear_ns = us * 1000 / (1 << 20);
        }
    }
    *c = (struct clear){0};
    if (fd >= 0 && (flock(fd, LOCK_EX) || pread(fd, c, sizeof(*c), 0) < 0))
        abort();
    return fd;
}

static void clear_end(int fd, const struct clear *c)
{
    if (pwrite(fd, c, sizeof(*c), 0) != sizeof(*c) || flock(fd, LOCK_UN))
        abort();
}

static void clear_give(uint64_t size, bool dirty)
{
    struct clear c;
    int fd = clear_begin(&c);
    uint64_t now = clear_now();

    if (fd < 0)
        return;
    c.taken -= size;
    if (dirty)
        c.until = (c.until > now ? c.until : now) + (uint64_t)((double)size * clear_ns);
    clear_end(fd, &c);
}

// Takes clear memory and waits for it where necessary, without the driver's lock. false: there is not as much.
static bool clear_take(uint64_t size)
{
    for (;;) {
        struct clear c;
        int fd = clear_begin(&c);
        uint64_t now = clear_now(), dirty;
        bool enough;

        if (fd < 0)
            return true;
        dirty = c.until > now ? (uint64_t)((double)(c.until - now) / clear_ns) : 0;
        enough = c.taken + size + dirty <= clear_size;
        c.taken += enough ? size : 0;
        clear_end(fd, &c);
        if (enough || !dirty)
            return enough;
        pthread_mutex_unlock(&lock);
        usleep(100);
        pthread_mutex_lock(&lock);
    }
}
