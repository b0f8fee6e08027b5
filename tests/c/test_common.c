// Common memory: who maps what another process made, what outlives whom, and that readers cannot write.
//
// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "harness.h"
#include "vmem_common.h"

#define PART (UINT64_C(4) << 20)
#define PARTS 3

static void send_fd(int to, int fd)
{
    char room[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec v = {"x", 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    CHECK(sendmsg(to, &m, 0) == 1);
}

static int receive_fd(int from)
{
    char room[CMSG_SPACE(sizeof(int))], byte;
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int fd;
    CHECK(recvmsg(from, &m, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&m));
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

static bool has(vmem_context *ctx, uint64_t addr, uint8_t value)
{
    static uint8_t got[PART];
    OK(vmem_copy_batch(ctx, &(struct vmem_copy_op){(uintptr_t)got, addr, PART}, 1));
    for (size_t i = 0; i < PART; i++)
        if (got[i] != value)
            return false;
    return true;
}

// Makes the parts in a process of its own, and waits to be killed.
static void maker(int to)
{
    vmem_context *ctx = test_context(0);
    vmem_common *c;
    uint64_t addr;
    OK(vmem_common_create(ctx, PART, PARTS, &c, &addr));
    for (uint32_t i = 0; i < PARTS; i++) {
        int fd;
        OK(vmem_common_new(c, &fd));
        OK(vmem_common_map(c, i, fd, VMEM_COMMON_WRITABLE));
        OK(vmem_fill(ctx, addr + i * PART, (uint8_t)(i + 1), PART));
        OK(vmem_common_seal(c, i));
        CHECK(has(ctx, addr + i * PART, (uint8_t)(i + 1)));
        send_fd(to, fd);
        close(fd);
    }
    pause();
}

static void test_memory_outlives_its_maker(const int *fds)
{
    vmem_context *ctx = test_context(0);
    vmem_common *c, *other;
    uint64_t addr, second;
    OK(vmem_common_create(ctx, PART, PARTS, &c, &addr));
    CHECK(addr % VMEM_PAGE_64K == 0);
    for (uint32_t i = 0; i < PARTS; i++)
        OK(vmem_common_map(c, i, fds[i], 0));
    for (uint32_t i = 0; i < PARTS; i++)
        CHECK(has(ctx, addr + i * PART, (uint8_t)(i + 1)));
    // The same memory twice, and again after it was unmapped.
    OK(vmem_common_create(ctx, PART, PARTS, &other, &second));
    OK(vmem_common_map(other, 2, fds[1], 0));
    CHECK(has(ctx, second + 2 * PART, 2));
    OK(vmem_common_unmap(c, 0, PARTS));
    OK(vmem_common_unmap(c, 0, PARTS)); // nothing is mapped: fine
    CHECK(has(ctx, second + 2 * PART, 2));
    OK(vmem_common_map(c, 1, fds[1], 0));
    CHECK(has(ctx, addr + PART, 2));
    vmem_common_destroy(other);
    CHECK(has(ctx, addr + PART, 2));
    vmem_common_destroy(c);
    vmem_context_destroy(ctx);
}

// A write through a read-only mapping ends the process that makes it.
static void write_there(int fd)
{
    vmem_context *ctx = test_context(0);
    vmem_common *c;
    uint64_t addr;
    OK(vmem_common_create(ctx, PART, 1, &c, &addr));
    OK(vmem_common_map(c, 0, fd, 0));
    signal(SIGSEGV, SIG_DFL);
    exit(vmem_fill(ctx, addr, 0xee, PART) ? 3 : 0); // a GPU's kernel fails
}

static void test_readers_cannot_write(int fd)
{
    int status;
    const pid_t pid = fork();
    if (!pid)
        write_there(fd);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : WEXITSTATUS(status) == 3);
}

static void test_bad_arguments(int fd)
{
    vmem_context *ctx = test_context(0);
    vmem_common *c;
    uint64_t addr;
    int out;
    ERR(vmem_common_create(NULL, PART, 1, &c, &addr), EINVAL, "ctx");
    ERR(vmem_common_create(ctx, PART, 1, NULL, &addr), EINVAL, "out");
    ERR(vmem_common_create(ctx, PART, 0, &c, &addr), EINVAL, "parts");
    ERR(vmem_common_create(ctx, VMEM_PAGE_64K, 1, &c, &addr), EINVAL, "part_bytes");
    ERR(vmem_common_create(ctx, UINT64_C(1) << 45, 3, &c, &addr), EINVAL, "parts");
    OK(vmem_common_create(ctx, PART, 2, &c, &addr));
    ERR(vmem_common_new(c, NULL), EINVAL, "fd");
    ERR(vmem_common_new(NULL, &out), EINVAL, "common");
    ERR(vmem_common_map(c, 2, fd, 0), EINVAL, "part");
    ERR(vmem_common_map(c, 0, fd, 2), EINVAL, "flags");
    ERR(vmem_common_seal(c, 0), EINVAL, "not mapped");
    ERR(vmem_common_unmap(c, 1, 2), EINVAL, "parts");
    CHECK(vmem_common_map(c, 0, -1, 0) < 0);
    OK(vmem_common_map(c, 0, fd, 0));
    ERR(vmem_common_map(c, 0, fd, 0), EEXIST, "part 0");
    CHECK(has(ctx, addr, 1));
    vmem_common_destroy(c);
    vmem_common_destroy(NULL);
    vmem_context_destroy(ctx);
}

// On the host: files that are no memory of a part, and one that somebody could cut short.
static void test_foreign_files(void)
{
    vmem_context *ctx = test_context(0);
    vmem_common *c;
    uint64_t addr;
    const int zero = open("/dev/zero", O_RDWR), open_end = memfd_create("other", 0);
    if (strcmp(test_info.backend, "host"))
        return;
    CHECK(zero >= 0 && open_end >= 0 && !ftruncate(open_end, PART));
    OK(vmem_common_create(ctx, PART, 1, &c, &addr));
    ERR(vmem_common_map(c, 0, zero, 0), EINVAL, "fd");
    ERR(vmem_common_map(c, 0, open_end, 0), EINVAL, "fd");
    vmem_common_destroy(c);
    vmem_context_destroy(ctx);
}

// The simulated GPU's driver shares no memory.
static void start(int argc, char **argv)
{
    vmem_common *c;
    uint64_t addr;
    int fd;
    test_start(argc, argv);
    vmem_context *ctx = test_context(0);
    OK(vmem_common_create(ctx, PART, PARTS, &c, &addr));
    const int rc = vmem_common_new(c, &fd);
    if (rc == -EOPNOTSUPP) {
        puts("skipped: the driver shares no memory by descriptors");
        exit(77);
    }
    OK(rc);
    close(fd);
    vmem_common_destroy(c);
    vmem_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    int pair[2], fds[PARTS], status;
    test_backend = argc > 1 ? argv[1] : NULL;
    if (!test_backend)
        test_backend = getenv("VMEM_BACKEND");
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    const pid_t pid = fork(); // before this process has a context
    if (!pid) {
        start(argc, argv);
        maker(pair[1]);
    }
    close(pair[1]);
    if (recv(pair[0], &(char){0}, 1, MSG_PEEK) != 1)
        start(argc, argv); // says why the maker could not run
    for (uint32_t i = 0; i < PARTS; i++)
        fds[i] = receive_fd(pair[0]);
    CHECK(!kill(pid, SIGKILL) && waitpid(pid, &status, 0) == pid);
    test_readers_cannot_write(fds[0]); // forks, too
    start(argc, argv);
    test_memory_outlives_its_maker(fds);
    test_bad_arguments(fds[0]);
    test_foreign_files();
    return 0;
}
