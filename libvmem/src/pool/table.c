// The table of a pool whose members are in several processes. It is a small file, read as a whole. A lock covers every
// read and update.
//
// The file is not mapped into memory. If somebody truncates or corrupts it, the pool is lost, but no process dies.
//
// The kernel drops a process's locks however it ends. Byte 0 locks the table. The lock belongs to the process
// (F_SETLK), so no child inherits it. But a process loses such a lock when any of its threads closes the file, and the
// lock does not exclude a second pool of the same process. The mutex `at_file` does, and an entry is written only if
// the lock is still there.
//
// A lock on byte 1 + i shows that the holder of place i is alive: a member, or a pool that has the file open. These
// locks belong to the open file (F_OFD_SETLK), because several pools of a process may have them, and children inherit
// them. After fork() the child closes the file. A child of a plain system call does not, and the locks outlive the
// parent. The file therefore names the process of each place, too. A process of another PID namespace cannot be looked
// up: only its lock shows that it is alive.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "pool/pool.h"

#define MAGIC UINT64_C(0x316c6f6f706b6d76) // "vmkpool1"
#define OPENERS 64 // the most processes that have the file open; their places follow the members'
#define PLACES (VMEM_KV_POOL_MEMBERS + OPENERS)

// Held while one of this process's pools has the file's lock, or closes a file.
static pthread_mutex_t at_file = PTHREAD_MUTEX_INITIALIZER;

void vmem__table_forked(void) { pthread_mutex_init(&at_file, NULL); }

static int set_lock(int fd, int whose, short type, off_t at)
{
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    int rc = fcntl(fd, whose, &l) ? -errno : 0;
    return rc == -EACCES ? -EAGAIN : rc;
}

static int lock_place(int fd, short type, uint32_t place) { return set_lock(fd, F_OFD_SETLK, type, 1 + (off_t)place); }

static int try_table(int fd)
{
    pthread_mutex_lock(&at_file);
    const int rc = set_lock(fd, F_SETLK, F_WRLCK, 0);
    if (rc)
        pthread_mutex_unlock(&at_file);
    return rc;
}

static void unlock_table(int fd)
{
    set_lock(fd, F_SETLK, F_UNLCK, 0);
    pthread_mutex_unlock(&at_file);
}

// True if this process still has the lock: somebody may have opened the file and closed it again.
static bool holds_table(int fd)
{
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return !fcntl(fd, F_OFD_GETLK, &l) && l.l_type != F_UNLCK && l.l_pid == getpid();
}

static void close_file(int fd)
{
    pthread_mutex_lock(&at_file);
    close(fd);
    pthread_mutex_unlock(&at_file);
}

uint64_t vmem__pool_free_bytes(const vmem_kv_pool *pool, const struct vmem__member *m)
{
    uint64_t taken = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const struct vmem_kv_pool_member *e = &pool->table.entries[i];
        if (e->size)
            taken = sat_add(taken, m && m->place == i ? m->entry.has : MAX(e->has, e->min));
    }
    const struct pool_head *h = &pool->table.head;
    const bool refused = pool->refused_at && vmem__now() - pool->refused_at < REFUSED_NS;
    return sat_sub(h->budget, sat_add(taken, refused ? h->refused : 0));
}

// Tries to lock the file until the time is over by the clock, as a pause may last longer than it should. Of a pause, at
// most LOCK_PAUSE_NS count: this process itself may have been stopped. Between its tries, other threads can have the mutex
// (NULL: there is none).
#define LOCK_PAUSE_NS UINT64_C(10000000)
static int lock_table(int fd, unsigned most_us, pthread_mutex_t *mutex)
{
    const struct timespec pause = {.tv_nsec = 100000};
    uint64_t left = most_us * UINT64_C(1000);
    int rc = try_table(fd);
    while (rc == -EAGAIN && left) {
        const uint64_t before = vmem__now();
        if (mutex)
            pthread_mutex_unlock(mutex);
        nanosleep(&pause, NULL);
        if (mutex)
            pthread_mutex_lock(mutex);
        rc = try_table(fd);
        left = sat_sub(left, MIN(vmem__now() - before, LOCK_PAUSE_NS));
    }
    return rc;
}

static int lock_error(int rc, const char *path)
{
    return vmem__error(rc, "path %s: %s", path,
                       rc == -EAGAIN ? "another process holds the pool's lock" : strerror(-rc));
}

static bool read_table(vmem_kv_pool *pool)
{
    struct pool_table t;
    if (pread(pool->fd, &t, sizeof t, 0) != (ssize_t)sizeof t || t.head.magic != MAGIC || t.head.size != sizeof t ||
        t.head.entries != VMEM_KV_POOL_MEMBERS || !t.head.budget || (pool->budget && t.head.budget != pool->budget))
        return false;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        t.entries[i].name[sizeof(t.entries[i].name) - 1] = '\0';
    t.head.backend[sizeof(t.head.backend) - 1] = '\0';
    if (t.head.refusals != pool->refusals) // another process was refused
        pool->refused_at = vmem__now();
    pool->refusals = t.head.refusals;
    pool->table = t;
    return true;
}

static bool write_at(int fd, const void *data, size_t size, off_t at)
{
    return pwrite(fd, data, size, at) == (ssize_t)size;
}

static bool write_entry(const vmem_kv_pool *pool, uint32_t place)
{
    const struct vmem_kv_pool_member *entry = &pool->table.entries[place];
    return write_at(pool->fd, entry, sizeof(*entry),
                    (off_t)(offsetof(struct pool_table, entries) + place * sizeof(*entry)));
}

// ---- who is alive ----------------------------------------------------------------------------------------------------

// Reads a process's PID and start from /proc. *ended: it is a zombie, and none of its threads still runs.
static bool read_process(const char *path, struct pool_process *out, bool *ended)
{
    char text[1024], state;
    long threads;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[MAX(n, 0)] = '\0';
    const char *rest = strrchr(text, ')'); // the name before it may contain anything
    if (!rest || sscanf(text, "%" SCNu32, &out->pid) != 1 ||
        sscanf(rest, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %" SCNu64, &state,
               &threads, &out->began) != 3)
        return false;
    *ended = (state == 'Z' || state == 'X') && threads <= 1;
    return true;
}

// This process, as the file names it; a PID of 0: /proc does not tell.
static struct pool_process this_process(void)
{
    struct pool_process p = {0};
    struct stat pids, times;
    bool ended;
    if (stat("/proc/self/ns/pid", &pids) || !read_process("/proc/self/stat", &p, &ended) || p.pid != (uint32_t)getpid())
        return (struct pool_process){0};
    p.space = (uint64_t)pids.st_ino;
    if (!stat("/proc/self/ns/time", &times)) // in which `began` counts
        p.space ^= (uint64_t)times.st_ino << 32;
    return p;
}

static off_t process_at(uint32_t place)
{
    return (off_t)(sizeof(struct pool_table) + place * sizeof(struct pool_process));
}

// True if the process of a place is known to have ended.
static bool has_ended(const vmem_kv_pool *pool, uint32_t place)
{
    struct pool_process named, found;
    char path[32];
    bool ended;
    if (pread(pool->fd, &named, sizeof named, process_at(place)) != (ssize_t)sizeof named || !named.pid ||
        !pool->process.pid || named.space != pool->process.space)
        return false;
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/stat", named.pid);
    if (read_process(path, &found, &ended))
        return ended || found.began != named.began;
    return kill((pid_t)named.pid, 0) && errno == ESRCH; // /proc may hide a process
}

// True if somebody else in one of these places is alive.
static bool any_lives(const vmem_kv_pool *pool, uint32_t first, uint32_t n)
{
    for (off_t at = 1 + (off_t)first, end = at + n; at < end; at++) {
        struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = end - at};
        if (fcntl(pool->fd, F_OFD_GETLK, &l)) // if the kernel cannot tell, assume that they are
            return true;
        if (l.l_type == F_UNLCK)
            return false;
        at = MAX(at, l.l_start);
        if (!has_ended(pool, (uint32_t)(at - 1)))
            return true;
    }
    return false;
}

int vmem__table_take_place(const vmem_kv_pool *pool, uint32_t place)
{
    int rc = pool->fd < 0 ? 0 : lock_place(pool->fd, F_WRLCK, place);
    if (rc || pool->fd < 0 || write_at(pool->fd, &pool->process, sizeof(pool->process), process_at(place)))
        return rc;
    lock_place(pool->fd, F_UNLCK, place);
    return vmem__table_unwritten(pool);
}

// ---- reading and writing ---------------------------------------------------------------------------------------------

int vmem__table_begin(vmem_kv_pool *pool, unsigned most_us)
{
    int rc = pool->fd < 0 ? 0 : lock_table(pool->fd, most_us, &pool->lock);
    if (rc)
        return lock_error(rc, pool->path);
    if (pool->fd >= 0 && !read_table(pool)) {
        unlock_table(pool->fd);
        return vmem__error(-EBADMSG, "path %s: the file no longer holds a pool", pool->path);
    }
    pool->written = pool->table.head;
    for (struct vmem__member *m = pool->members; m; m = m->next) {
        struct vmem_kv_pool_member *entry = &pool->table.entries[m->place];
        m->written = *entry; // what the file has, even if another process wrote it
        *entry = m->entry;   // our own entries in memory are authoritative
    }
    return 0;
}

// Takes back what an entry has gained since it was last written: others may take the budget of an entry that they
// cannot read.
static void revert_unwritten(struct vmem__member *m)
{
    const uint64_t more = sat_sub(m->entry.has, m->written.has), granted = MIN(more, m->granted);
    m->entry.has -= more;
    m->granted -= granted;
    m->entry.needs = sat_add(m->entry.needs, granted);
}

// True if the entry must be written now. Changes of `held`, `could_give`, `holds_back` and a falling `giving` may wait
// for POLL_MS.
static bool must_write(const struct vmem__member *m)
{
    const struct vmem_kv_pool_member *w = &m->written;
    struct vmem_kv_pool_member entry = m->entry;
    if (memcmp(w, &entry, sizeof entry) && vmem__now() - m->written_at > POLL_MS * UINT64_C(1000000))
        return true;
    entry.held = w->held;
    entry.could_give = w->could_give;
    entry.holds_back = w->holds_back;
    if (entry.giving && entry.giving < w->giving)
        entry.giving = w->giving;
    return memcmp(w, &entry, sizeof entry);
}

void vmem__table_end(vmem_kv_pool *pool)
{
    // A write may fail, as where the file system is full. The others then see the previous table.
    const bool writable = pool->fd >= 0 && holds_table(pool->fd);
    if (writable && memcmp(&pool->written, &pool->table.head, sizeof(pool->written)))
        (void)!write_at(pool->fd, &pool->table.head, sizeof(pool->table.head), 0);
    for (struct vmem__member *m = pool->members; m; m = m->next) {
        pool->table.entries[m->place] = m->entry;
        const bool writes = must_write(m);
        m->unwritten = writes && pool->fd >= 0 && !(writable && write_entry(pool, m->place));
        if (m->unwritten) {
            revert_unwritten(m);
            pool->table.entries[m->place] = m->entry;
        } else if (writes) {
            m->written = m->entry;
            m->written_at = vmem__now();
        }
    }
    if (pool->fd >= 0)
        unlock_table(pool->fd);
    bool needed = false;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        needed |= pool->table.entries[i].size && pool->table.entries[i].needs;
    pool->needed = needed;
    pool->free = vmem__pool_free_bytes(pool, NULL);
}

int vmem__table_unwritten(const vmem_kv_pool *pool)
{
    return vmem__error(-EBADMSG, "path %s: the table cannot be written", pool->path);
}

static void empty_entry(vmem_kv_pool *pool, uint32_t place)
{
    pool->table.entries[place] = (struct vmem_kv_pool_member){0};
    if (pool->fd >= 0)
        (void)!write_entry(pool, place);
}

void vmem__table_leave_place(vmem_kv_pool *pool, uint32_t place, bool damaged)
{
    if (!damaged) // what is no table, such as an empty file, stays as it is
        empty_entry(pool, place);
    if (pool->fd >= 0)
        lock_place(pool->fd, F_UNLCK, place);
}

void vmem__table_reap(vmem_kv_pool *pool)
{
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS && pool->fd >= 0; i++)
        if (pool->table.entries[i].size && !pool_owns(pool, i) && !any_lives(pool, i, 1))
            empty_entry(pool, i);
}

// True if another process, or another pool of this one, has the file open.
static bool others_have_open(const vmem_kv_pool *pool) { return any_lives(pool, VMEM_KV_POOL_MEMBERS, OPENERS); }

void vmem__table_remove(vmem_kv_pool *pool)
{
    struct stat ours, there;
    if (pool->fd < 0 || others_have_open(pool) || fstat(pool->fd, &ours) || stat(pool->path, &there))
        return;
    if (ours.st_ino == there.st_ino && ours.st_dev == there.st_dev)
        unlink(pool->path);
}

// Checks that the open file belongs to this user, and that it is still the file at the path after locking.
static int check_file(vmem_kv_pool *pool, const char *path, bool *again)
{
    struct stat st;
    if (fstat(pool->fd, &st))
        return vmem__error(-errno, "path %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return vmem__error(-EINVAL, "path %s is not a regular file", path);
    if (st.st_uid != geteuid() || st.st_mode & 077)
        return vmem__error(-EPERM, "path %s: the file must be this user's alone, with mode 0600", path);
    int rc = lock_table(pool->fd, POOL_CALL_US, NULL);
    if (rc)
        return lock_error(rc, path);
    *again = fstat(pool->fd, &st) || !st.st_nlink;
    if (*again)
        unlock_table(pool->fd);
    return 0;
}

// True if the file is a pool's of another version of libvmem, whose table has another size.
static bool is_of_another_version(const vmem_kv_pool *pool)
{
    struct pool_head h;
    return pread(pool->fd, &h, sizeof h, 0) == (ssize_t)sizeof h && h.magic == MAGIC &&
           h.entries == VMEM_KV_POOL_MEMBERS && h.size > sizeof h && h.size != sizeof(pool->table);
}

static int check_or_make_table(vmem_kv_pool *pool, const char *path, uint64_t budget)
{
    const bool old = read_table(pool), alone = !others_have_open(pool), foreign = is_of_another_version(pool);
    if (old && !alone) {
        const uint64_t has = pool->table.head.budget;
        return !budget || budget == has ? 0
                                        : vmem__error(-EINVAL,
                                                      "budget %" PRIu64 ": the pool at %s has %" PRIu64
                                                      ", and all that use it give the same",
                                                      budget, path, has);
    }
    if (!alone && foreign)
        return vmem__error(-EBADMSG, "path %s: processes with another version of libvmem use the pool", path);
    if (!alone)
        return vmem__error(-EBADMSG, "path %s: the file does not hold a pool, but other processes use it", path);
    if (!budget)
        return vmem__error(-EINVAL, "budget 0: there is no pool at %s yet", path);
    pool->table = (struct pool_table){
        .head = {.magic = MAGIC, .size = sizeof(pool->table), .entries = VMEM_KV_POOL_MEMBERS, .budget = budget}};
    // Take over only an empty file or the table of a pool that has ended. Any other file belongs to somebody else.
    struct stat st;
    if (!old && !foreign && !fstat(pool->fd, &st) && st.st_size)
        return vmem__error(-EBADMSG, "path %s: the file exists and does not hold a pool", path);
    // An old file keeps its processes: of those that have ended, children may still have the locks.
    const struct pool_process nobody[PLACES] = {0};
    if (!write_at(pool->fd, &pool->table, sizeof(pool->table), 0) ||
        (!old && !write_at(pool->fd, nobody, sizeof nobody, process_at(0)))) {
        unlink(path);
        return vmem__error(-ENOSPC, "path %s: the table cannot be written", path);
    }
    return 0;
}

static int enter_file(const vmem_kv_pool *pool)
{
    int rc = -EAGAIN;
    for (uint32_t i = VMEM_KV_POOL_MEMBERS; i < PLACES && rc == -EAGAIN; i++)
        rc = vmem__table_take_place(pool, i);
    if (rc == -EAGAIN)
        return vmem__error(-ENOSPC, "path %s: %u others have the pool open, the most that can", pool->path, OPENERS);
    return rc;
}

int vmem__table_open(vmem_kv_pool *pool, const char *path, uint64_t budget)
{
    int rc = 0;
    bool again = true;
    pool->path = strdup(path);
    if (!pool->path)
        return vmem__error(-ENOMEM, "no memory for a path");
    for (int tries = 0; again && !rc && tries < 100; tries++) {
        if (pool->fd >= 0)
            close_file(pool->fd);
        pool->fd = open(path, O_RDWR | (budget ? O_CREAT : 0) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (pool->fd < 0 && errno == ENOENT && !budget)
            return vmem__error(-EINVAL, "budget 0: there is no pool at %s yet", path);
        if (pool->fd < 0)
            return vmem__error(-errno, "path %s: %s", path, strerror(errno));
        rc = check_file(pool, path, &again);
    }
    if (rc || again)
        return rc ? rc : vmem__error(-EBUSY, "path %s: other processes keep creating and removing the file", path);
    pool->process = this_process();
    rc = check_or_make_table(pool, path, budget);
    pool->budget = rc ? 0 : pool->table.head.budget;
    pool->refused_at = 0; // how long ago the last refusal was is not known
    if (!rc)
        rc = enter_file(pool);
    unlock_table(pool->fd);
    if (rc)
        return rc;
    pool->watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (pool->watch >= 0 && inotify_add_watch(pool->watch, path, IN_MODIFY) < 0) {
        close(pool->watch);
        pool->watch = -1;
    }
    return 0;
}

void vmem__table_close(vmem_kv_pool *pool)
{
    if (pool->watch >= 0)
        close(pool->watch);
    if (pool->fd >= 0)
        close_file(pool->fd);
    pool->fd = pool->watch = -1;
    free(pool->path);
    pool->path = NULL;
}
