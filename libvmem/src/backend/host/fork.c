// Makes the pages of a forked child private. Pages are shared mappings of one memfd, so that a page can be mapped at
// several addresses. If a child kept them, its stray write into an old tensor would reach the parent's new one. The
// child's mappings are therefore made private before fork() returns there. The child reads the parent's pages until it
// writes a page, and its writes are its own, as with any other memory.
//
// The child closes the memfd, so that nothing it does takes memory from its parent.
//
// The mappings are read from the child's own /proc/self/maps: another thread's call may have been half done in the
// parent.
//
// SPDX-License-Identifier: MIT
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "backend/host/host.h"

// Guards the list of files and their lists of reservations. It is held while the process forks.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct host_file *files;

// One line of /proc/self/maps. It is parsed without sscanf(): another thread may have held one of its locks at the
// fork.
struct mapping {
    uint64_t start, end, offset, major, minor, inode;
    bool shared;
};

static const char *number(const char *at, unsigned base, uint64_t *value)
{
    for (*value = 0;; at++) {
        const unsigned digit = *at >= '0' && *at <= '9'   ? (unsigned)(*at - '0')
                               : *at >= 'a' && *at <= 'f' ? (unsigned)(*at - 'a') + 10
                                                          : base;
        if (digit >= base)
            return at + (*at != '\0'); // skip the separator
        *value = *value * base + digit;
    }
}

// "7f00-7f80 rw-s 00000000 00:01 1234   /memfd:vmem (deleted)"
static void parse(const char *line, struct mapping *m)
{
    const char *at = number(number(line, 16, &m->start), 16, &m->end);
    for (int i = 0; i < 5 && *at; i++, at++)
        m->shared = i == 3 ? *at == 's' : m->shared;
    number(number(number(number(at, 16, &m->offset), 16, &m->major), 16, &m->minor), 10, &m->inode);
}

static void make_private(const struct mapping *m, int fd)
{
    void *at = (void *)(uintptr_t)m->start;
    const size_t length = m->end - m->start;
    const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    // If memory is too short for that, make the pages read-only. If that fails too, unmap them: accesses then fault.
    if (mmap(at, length, PROT_READ | PROT_WRITE, flags, fd, (off_t)m->offset) == MAP_FAILED &&
        mprotect(at, length, PROT_READ))
        munmap(at, length);
}

static void see(const char *line)
{
    struct mapping m = {0};
    parse(line, &m);
    for (const struct host_file *f = files; f && m.shared; f = f->next) {
        if (f->inode == m.inode && major(f->device) == m.major && minor(f->device) == m.minor)
            make_private(&m, f->fd);
    }
}

// Reads the child's mappings, one line at a time. The name after the inode may be truncated.
static bool see_all(void)
{
    char buf[4096], line[128];
    size_t length = 0;
    ssize_t n;
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    while ((n = read(fd, buf, sizeof buf)) > 0 || (n < 0 && errno == EINTR)) {
        for (ssize_t i = 0; i < n; i++) {
            if (buf[i] != '\n' && length < sizeof line - 1)
                line[length++] = buf[i];
            if (buf[i] != '\n')
                continue;
            line[length] = '\0';
            see(line);
            length = 0;
        }
    }
    close(fd);
    return n == 0;
}

// Makes all reservations read-only. This is the fallback when the mappings cannot be read, because no descriptor is
// left or /proc is not mounted.
static void forbid(void)
{
    for (const struct host_file *f = files; f; f = f->next) {
        for (const struct vmem__reservation *r = f->reservations; r; r = r->next) {
            if (mprotect((void *)(uintptr_t)r->addr, r->length, PROT_READ))
                munmap((void *)(uintptr_t)r->addr, r->length);
        }
    }
}

static void before(void) { pthread_mutex_lock(&lock); }
static void in_parent(void) { pthread_mutex_unlock(&lock); }
static void in_child(void)
{
    const int saved = errno;
    if (files && !see_all())
        forbid();
    // A function that the library called may have forked. The rest of that library call then runs in the child too, and
    // must not reach the parent's memory.
    for (struct host_file *f = files; f; f = f->next) {
        close(f->fd);
        f->fd = -1;
    }
    files = NULL; // these were the parent's; a child of this child has nothing to do
    pthread_mutex_unlock(&lock);
    errno = saved;
}

static int registered;
static void watch(void) { registered = pthread_atfork(before, in_parent, in_child); }

int vmem__host_file_add(struct host_file *f)
{
    struct stat st;
    if (fstat(f->fd, &st))
        return vmem__error(-errno, "fstat of a memfd: %m");
    f->device = st.st_dev;
    f->inode = st.st_ino;
    pthread_once(&once, watch);
    if (registered)
        return vmem__error(-registered, "no memory for a handler of fork()");
    pthread_mutex_lock(&lock);
    f->next = files;
    files = f;
    pthread_mutex_unlock(&lock);
    return 0;
}

void vmem__host_file_remove(struct host_file *f)
{
    pthread_mutex_lock(&lock);
    for (struct host_file **link = &files; *link; link = &(*link)->next) {
        if (*link == f) {
            *link = f->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

void vmem__host_reservation_add(struct host_file *f, struct vmem__reservation *r)
{
    pthread_mutex_lock(&lock);
    r->next = f->reservations;
    r->link = &f->reservations;
    if (r->next)
        r->next->link = &r->next;
    f->reservations = r;
    pthread_mutex_unlock(&lock);
}

void vmem__host_reservation_remove(struct vmem__reservation *r)
{
    pthread_mutex_lock(&lock);
    *r->link = r->next;
    if (r->next)
        r->next->link = r->link;
    pthread_mutex_unlock(&lock);
}
