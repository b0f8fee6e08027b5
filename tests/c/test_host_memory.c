// The host backend's idea of how much memory there is: the machine's, or what control groups leave of it. The kernel's
// files are made up in a folder of their own.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/host/host.h"
#include "checked.h"
#include "harness.h"

#define UNLIMITED "9223372036854771712\n" // version 1's

static char root[] = "/tmp/vmem-test-XXXXXX";

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

static void clear(void) { nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

// A file below the root, with the folders it lies in.
static void file(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *p = full + strlen(root); (p = strchr(p + 1, '/')); *p = '/') {
        *p = '\0';
        mkdir(full, 0700);
    }
    FILE *f = fopen(full, "w");
    CHECK(f && fputs(text, f) >= 0 && !fclose(f));
}

// A machine of 8 GiB with 6 GiB available, whose process is in these control groups.
static void machine(const char *groups)
{
    clear();
    CHECK(!mkdir(root, 0700));
    file("/proc/meminfo", "MemTotal:        8388608 kB\nMemFree:          131072 kB\nMemAvailable:    6291456 kB\n");
    file("/proc/self/cgroup", groups);
}

static void expect(int line, uint64_t total, uint64_t available, bool cgroup)
{
    struct vmem__host_memory m;
    OK(vmem__host_memory(root, &m));
    if (m.total != total || m.available != available || m.cgroup != cgroup)
        FAIL("line %d: %" PRIu64 " of %" PRIu64 " bytes%s, not %" PRIu64 " of %" PRIu64, line, m.available, m.total,
             m.cgroup ? ", by a group" : "", available, total);
}
#define EXPECT(total, available, cgroup) expect(__LINE__, total, available, cgroup)

static void no_limit(void)
{
    machine("0::/\n"); // the top group has no limit to set
    EXPECT(8 * GIB, 6 * GIB, false);
    machine("0::/user.slice\n");
    file("/sys/fs/cgroup/user.slice/memory.max", "max\n");
    file("/sys/fs/cgroup/user.slice/memory.current", "1073741824\n");
    EXPECT(8 * GIB, 6 * GIB, false);
    machine("4:cpu,memory:/a\n0::/\n");
    file("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", UNLIMITED);
    file("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1073741824\n");
    EXPECT(8 * GIB, 6 * GIB, false);
    machine("no groups at all");
    EXPECT(8 * GIB, 6 * GIB, false);
}

static void version_2(void)
{
    machine("0::/\n"); // as a container sees itself
    file("/sys/fs/cgroup/memory.max", "2147483648\n");
    file("/sys/fs/cgroup/memory.current", "1610612736\n");
    EXPECT(2 * GIB, GIB / 2, true);
    // The page cache is there to be given up; memfd's pages, in shmem and file, are not.
    file("/sys/fs/cgroup/memory.stat", "anon 1\nfile 1073741824\nshmem 536870912\ninactive_anon 536870912\n"
                                       "inactive_file 268435456\nactive_file 268435456\nslab 7\n");
    EXPECT(2 * GIB, GIB, true);
    file("/sys/fs/cgroup/memory.max", "536870912\n"); // was lowered under what is used
    EXPECT(GIB / 2, 0, true);
    file("/sys/fs/cgroup/memory.max", "17179869184\n"); // more than the machine has
    EXPECT(8 * GIB, 6 * GIB, false);
}

// The least of all groups on the way up: the limit of one, what is left of another.
static void groups_above(void)
{
    machine("0::/batch/job:7/step\n");
    file("/sys/fs/cgroup/batch/job:7/step/memory.max", "max\n");
    file("/sys/fs/cgroup/batch/job:7/step/memory.current", "1048576\n");
    file("/sys/fs/cgroup/batch/job:7/memory.max", "2147483648\n");
    file("/sys/fs/cgroup/batch/job:7/memory.current", "1048576\n");
    file("/sys/fs/cgroup/batch/memory.max", "4294967296\n");
    file("/sys/fs/cgroup/batch/memory.current", "3221225472\n");
    EXPECT(2 * GIB, GIB, true);
}

static void version_1(void)
{
    machine("9:name=systemd:/memory\n4:memory:/docker/0123\n3:cpuset:/docker/0123\n0::/docker/0123\n");
    file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"); // the container's own group is the mount's top
    file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1610612736\n");
    EXPECT(2 * GIB, GIB / 2, true);
    file("/sys/fs/cgroup/memory/memory.stat", "cache 1073741824\ninactive_file 1\nactive_file 1\n"
                                              "total_inactive_file 268435456\ntotal_active_file 268435456\n");
    EXPECT(2 * GIB, GIB, true);
    file("/proc/self/cgroup", "4:memory_of_another_kind:/\n");
    EXPECT(8 * GIB, 6 * GIB, false);
}

static void no_meminfo(void)
{
    struct vmem__host_memory m;
    machine("0::/\n");
    file("/proc/meminfo", "MemTotal:        8388608 kB\n");
    ERR(vmem__host_memory(root, &m), ENODATA, "/proc/meminfo");
}

// That no descriptor is left says nothing about the machine, nor about the group's limit.
static void no_descriptor(void)
{
    struct vmem__host_memory m;
    struct rlimit limit, none;
    machine("0::/\n");
    file("/sys/fs/cgroup/memory.max", "2147483648\n");
    file("/sys/fs/cgroup/memory.current", "0\n");
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
    none = limit;
    const int next = dup(0); // the number that the next descriptor would have
    close(next);
    none.rlim_cur = (rlim_t)next;
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    ERR(vmem__host_memory(root, &m), EMFILE, "/proc/meminfo: Too many open files");
    none.rlim_cur++; // /proc/self/cgroup is open when the group's files are looked for
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    ERR(vmem__host_memory(root, &m), EMFILE, "memory.max: Too many open files");
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
    EXPECT(2 * GIB, 2 * GIB, true);
}

#define GROUP (64 * MIB)

// A control group that the context's memfd alone uses memory of.
static int group_memory(struct vmem__host_memory *out)
{
    char path[64], target[64];
    struct stat st;
    *out = (struct vmem__host_memory){.total = GROUP, .available = GROUP, .cgroup = true};
    for (int fd = 0; fd < 64; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const ssize_t n = readlink(path, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        if (strstr(target, "memfd:vmem") && !fstat(fd, &st))
            out->available -= (uint64_t)st.st_blocks * 512;
    }
    CHECK(out->available <= GROUP); // nobody has taken more than there is
    return 0;
}

static void *commit_all_there_is(void *arg)
{
    vmem_context *ctx = arg;
    uint64_t addr;
    int rc = 0;
    OK(vMemReserve(ctx, GIB, 0, &addr));
    for (uint64_t at = 0; !rc; at += 2 * MIB)
        rc = vmem_commit(ctx, &(struct vmem_range){addr + at, 2 * MIB}, 1, VMEM_PAGE_2M, 0, NULL);
    CHECK_EQ(rc, -ENOMEM);
    return NULL;
}

// Where memory runs out the kernel kills somebody: the last of it is not taken, whoever asks at the same time.
static void the_last_of_it(void)
{
    const struct vmem_options opts = {.size = sizeof opts, .backend = "host"};
    vmem_context *ctx;
    pthread_t threads[4];
    checked_host_memory = group_memory;
    OK(vmem_context_create(&opts, &ctx));
    for (size_t i = 0; i < COUNT(threads); i++)
        CHECK(!pthread_create(&threads[i], NULL, commit_all_there_is, ctx));
    for (size_t i = 0; i < COUNT(threads); i++)
        CHECK(!pthread_join(threads[i], NULL));
    const uint64_t created = test_stats(ctx).created;
    CHECK(created <= GROUP - GROUP / 64);
    CHECK(created >= GROUP / 2); // and not much less either
    vmem_context_destroy(ctx);
    checked_host_memory = NULL;
}

// ---- several processes in a group -------------------------------------------------------------------------------

// A control group as the kernel keeps it: who takes more than there is would be killed. Shared by forked processes.
#define PROCESSES 8
static struct group {
    atomic_flag busy;
    _Atomic uint64_t used;
    atomic_bool killed;
    atomic_uint calls;
} *group;
static char usage_path[64];
static int usage_fd;

static void publish_usage(void)
{
    char text[32];
    snprintf(text, sizeof text, "%-20" PRIu64 "\n", group->used);
    CHECK(pwrite(usage_fd, text, strlen(text), 0) > 0);
}

static atomic_uint looks;

static int shared_memory(struct vmem__host_memory *out)
{
    looks++;
    const uint64_t used = group->used;
    *out = (struct vmem__host_memory){.total = GROUP, .available = GROUP > used ? GROUP - used : 0, .cgroup = true};
    strcpy(out->usage, usage_path);
    return 0;
}

// On a busy machine a process stands still anywhere, also in its turn and for longer than the others wait for it.
static int shared_fallocate(uint64_t length)
{
    const bool last = group->used >= GROUP - GROUP / 8;
    const unsigned calls = last ? ++group->calls : 0;
    usleep(calls && calls % 3 == 0 && calls <= 12 ? 300000 : 300); // time in which others look at what there is
    while (atomic_flag_test_and_set(&group->busy))
        sched_yield();
    group->used += length;
    if (group->used > GROUP)
        group->killed = true;
    publish_usage();
    atomic_flag_clear(&group->busy);
    return 0;
}

static void take_all(uint64_t size, size_t n)
{
    const struct vmem_options opts = {.size = sizeof opts, .backend = "host"};
    vmem_context *ctx;
    vmem_page pages[2];
    OK(vmem_context_create(&opts, &ctx));
    int rc = 0;
    while (!rc)
        rc = vMemCreate(ctx, size, n, 0, pages);
    CHECK_EQ(rc, -ENOMEM);
    vmem_context_destroy(ctx);
    _exit(0); // the folder is the parent's to clear
}

// Another process stands still in its turn. The others do not wait for its end, and leave what it may have counted on. An
// answer holds until the others have used a part of what was left.
static void one_stands_still_in_its_turn(void)
{
    const struct vmem_options opts = {.size = sizeof opts, .backend = "host"};
    vmem_context *ctx;
    vmem_page page;
    group->used = GROUP / 2;
    publish_usage();
    const int other = open(usage_path, O_RDONLY | O_CLOEXEC);
    OK(vmem_context_create(&opts, &ctx));
    CHECK(other >= 0 && !flock(other, LOCK_EX));
    CHECK_EQ(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page), -ENOMEM);
    OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &page));
    CHECK(!flock(other, LOCK_UN));
    OK(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page));

    OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &page));
    looks = 0;
    OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &page));
    CHECK(looks <= 1); // 0, but for an answer that has become a second old
    looks = 0;
    group->used = GROUP - GROUP / 8;
    publish_usage();
    OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &page));
    CHECK_EQ(looks, 1);
    vmem_context_destroy(ctx);
    close(other);
}

static int taken_meanwhile(uint64_t length)
{
    if (group->used < GROUP - GROUP / 64)
        group->used = GROUP - GROUP / 64;
    group->used += length;
    group->killed = group->killed || group->used > GROUP;
    publish_usage();
    return 0;
}

// A call stands still between its look and its pages, in its turn or without one. The others take all but what stays. What
// the call goes on to take is a part of that.
static void one_stands_still_after_its_look(void)
{
    const struct vmem_options opts = {.size = sizeof opts, .backend = "host"};
    vmem_context *ctx;
    vmem_page page;
    const int other = open(usage_path, O_RDONLY | O_CLOEXEC);
    CHECK(other >= 0);
    checked_fallocate = taken_meanwhile;
    for (int turn = 0; turn < 2; turn++) {
        group->used = GROUP / 4;
        publish_usage();
        CHECK(!flock(other, turn ? LOCK_UN : LOCK_EX));
        OK(vmem_context_create(&opts, &ctx));
        CHECK_EQ(vMemCreate(ctx, VMEM_PAGE_2M, 1, 0, &page), -ENOMEM);
        CHECK(!group->killed);
        vmem_context_destroy(ctx);
    }
    close(other);
    checked_fallocate = shared_fallocate;
}

// None of them trusts an answer that the others have made untrue.
static void the_last_of_it_in_processes(void)
{
    static const struct {
        uint64_t size;
        size_t n;
    } calls[] = {{VMEM_PAGE_64K, 1}, {VMEM_PAGE_2M, 1}, {VMEM_PAGE_2M, 2}};
    snprintf(usage_path, sizeof usage_path, "%s/usage", root);
    CHECK((usage_fd = open(usage_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600)) >= 0);
    group = mmap(NULL, sizeof *group, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(group != MAP_FAILED);
    publish_usage();
    checked_host_memory = shared_memory;
    checked_fallocate = shared_fallocate;
    one_stands_still_in_its_turn();
    one_stands_still_after_its_look();
    for (size_t i = 0; i < COUNT(calls); i++) {
        group->used = 0;
        group->calls = 0;
        publish_usage();
        for (int p = 0; p < PROCESSES; p++) {
            const pid_t pid = fork();
            CHECK(pid >= 0);
            if (!pid)
                take_all(calls[i].size, calls[i].n);
        }
        int status;
        for (int p = 0; p < PROCESSES; p++)
            CHECK(wait(&status) > 0 && !status);
        CHECK(!group->killed);
        CHECK(group->used >= GROUP / 2); // and not much less either
    }
    checked_host_memory = NULL;
    checked_fallocate = NULL;
    close(usage_fd);
    unlink(usage_path);
}

// ---- a warm page cache ----------------------------------------------------------------------------------------

static atomic_uint asks;
static uint64_t cached = 8 * GIB; // what is available though not free
static int mostly_cache(struct vmem__host_memory *out)
{
    asks++;
    *out = (struct vmem__host_memory){.total = 16 * GIB, .available = cached};
    return 0;
}

static void *create_one_by_one(void *arg)
{
    vmem_context *ctx = arg;
    vmem_page page[256];
    for (size_t i = 0; i < COUNT(page); i++)
        OK(vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &page[i]));
    OK(vMemReleaseBatch(ctx, page, COUNT(page), NULL));
    return NULL;
}

// Where little is free but much is available, the system is asked once for many pages, by one of several threads.
static void warm_cache(void)
{
    const struct vmem_options opts = {.size = sizeof opts, .backend = "host"};
    vmem_context *ctx;
    pthread_t threads[4];
    vmem_page pages[64];
    checked_host_memory = mostly_cache;
    checked_free_memory = 128 * MIB;
    OK(vmem_context_create(&opts, &ctx));
    asks = 0;
    for (size_t i = 0; i < COUNT(threads); i++)
        CHECK(!pthread_create(&threads[i], NULL, create_one_by_one, ctx));
    for (size_t i = 0; i < COUNT(threads); i++)
        CHECK(!pthread_join(threads[i], NULL));
    if (asks < 1 || asks > COUNT(threads) * 64) // 1 on most machines; an answer lasts for a second
        FAIL("asked %u times for %zu pages", asks, COUNT(threads) * 256);
    // A quarter of what was left may go unasked, and no more: what is not there is not taken.
    cached = 512 * MIB;
    for (unsigned before = asks; asks == before;) {
        OK(vMemCreate(ctx, VMEM_PAGE_2M, COUNT(pages), 0, pages));
        OK(vMemReleaseBatch(ctx, pages, COUNT(pages), NULL));
    }
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, 512, 0, NULL), EINVAL, "pages is NULL");
    static vmem_page many[512];
    cached = 260 * MIB;
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, COUNT(many), 0, many), ENOMEM, "the machine has");
    CHECK_EQ(test_stats(ctx).created, 0);
    vmem_context_destroy(ctx);
    checked_host_memory = NULL;
    checked_free_memory = 0;
}

// ---- kernels whose fallocate() any signal interrupts ----------------------------------------------------------

static unsigned interrupts;
static uint64_t longest; // without an interrupt
static bool masked_helps;
static int old_kernel(uint64_t length)
{
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    if (length <= longest || (masked_helps && sigismember(&mask, SIGALRM)))
        return 0;
    interrupts++;
    return EINTR;
}

static unsigned until; // this many more interrupts
static int stop(void *arg)
{
    (void)arg;
    return until && !--until;
}

// A timer that always comes too early delays a call and does not stop it. Signals are not blocked when it returns.
static void timers(void)
{
    const struct vmem_options opts = {.size = sizeof opts, .backend = "host"};
    vmem_context *ctx;
    vmem_page pages[40];
    sigset_t mask;
    OK(vmem_context_create(&opts, &ctx));
    OK(vmem_set_interrupt(ctx, stop, NULL));
    checked_fallocate = old_kernel;
    for (int i = 0; i < 4; i++) {
        longest = i == 0 ? 256 * KIB : i == 1 ? 64 * KIB : i == 2 ? 0 : 32 * MIB;
        masked_helps = i == 2; // not if the kernel's own work for the thread interrupts it
        interrupts = 0;
        OK(vMemCreate(ctx, VMEM_PAGE_2M, COUNT(pages), 0, pages));
        CHECK((interrupts > 0) == (i != 3));
        CHECK(interrupts <= 8 * 3); // a few for each of the three steps of a long call
        pthread_sigmask(SIG_SETMASK, NULL, &mask);
        CHECK(!sigismember(&mask, SIGALRM) && !sigismember(&mask, SIGINT));
        OK(vMemReleaseBatch(ctx, pages, COUNT(pages), NULL));
        OK(vmem_trim(ctx, NULL));
    }
    // Even where nothing helps, Ctrl-C ends the call.
    masked_helps = false;
    longest = 0;
    until = 3;
    ERR(vMemCreate(ctx, VMEM_PAGE_2M, COUNT(pages), 0, pages), EINTR, "interrupted");
    CHECK_EQ(test_stats(ctx).created, 0);
    checked_fallocate = NULL;
    OK(vMemCreate(ctx, VMEM_PAGE_2M, COUNT(pages), 0, pages));
    vmem_context_destroy(ctx);
}

int main(void)
{
    CHECK(mkdtemp(root));
    atexit(clear);
    no_limit();
    version_2();
    groups_above();
    version_1();
    no_meminfo();
    no_descriptor();
    the_last_of_it();
    the_last_of_it_in_processes();
    warm_cache();
    timers();
    return 0;
}
