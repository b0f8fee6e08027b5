// RELEASE of pages that are mapped at many addresses, in overlays of which the driver closed some, by 2 MiB entries,
// and of a GPU that goes meanwhile.
//
// SPDX-License-Identifier: MIT
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

#include "calls.h"

// One page at very many addresses: taken away in steps, 4,096 in each, so that nobody waits long for the lock.
TEST(test_release_in_steps)
{
    static struct uvm_vmem_op ops[4096];
    struct uvm_vmem_release r;
    struct uvm u;
    uint64_t h;

    vm_start(&u, GB(1));
    CHECK_EQ(vm_create(&u, KB(64), 2, &h), NV_OK);
    for (unsigned k = 0; k < 3; k++) {
        for (unsigned i = 0; i < COUNT(ops); i++)
            ops[i] = vm_op(BASE + (k * COUNT(ops) + i) * GRANULE, KB(64), h, 0, 0);
        CHECK_EQ(vm_map_ops(&u, 0, ops, COUNT(ops), NULL), NV_OK);
    }
    CHECK_EQ(vm_map(&u, BASE + GB(1) - KB(64), KB(64), h + 1, 0, 0), NV_OK);
    CHECK_EQ(vm_release(&u, (uint64_t[]){h, h + 1}, 2, &r), NV_OK);
    CHECK_EQ(r.out_waits, 4); // the last for the other page alone
    CHECK_EQ(vm_query(&u, 0).out_bytes_held, 0);
    CHECK_EQ(sim_pte(&u, BASE + GB(1) - KB(64)).state, SIMGPU_PTE_SPARSE);
    CHECK_EQ(sim_pte(&u, BASE + COUNT(ops) * GRANULE).state, SIMGPU_PTE_SPARSE);
    sim_check(0);
}

// The driver's own calls have closed every second overlay, and were refused for parts of the others. RELEASE looks at
// each record that is left once.
TEST(test_release_after_uvm_closed_overlays)
{
    static struct uvm_vmem_op ops[4096];
    static struct simgpu_pte ptes[4096];
    unsigned n = env_long("ADDRESSES", 2048), k;
    struct uvm_vmem_release r;
    struct uvm u;
    uint64_t h;

    vm_start(&u, n * GRANULE);
    CHECK_EQ(vm_create(&u, KB(64), 2, &h), NV_OK);
    for (unsigned i = 0; i < n; i += k) {
        for (k = 0; k < COUNT(ops) && i + k < n; k++)
            ops[k] = vm_op(BASE + (i + k) * GRANULE, KB(64), h, 0, 0);
        CHECK_EQ(vm_map_ops(&u, 0, ops, k, NULL), NV_OK);
    }
    CHECK_EQ(gpu_mark(&u, BASE + BLOCK, KB(64), 5), 0);
    sim_mem(&u, 0, 70, KB(64), KB(64));
    for (unsigned i = 0; i < n; i += 64) {
        uint64_t open = BASE + i * GRANULE + BLOCK;

        CHECK_EQ(uvm_unmap_external(&u, 0, open, GRANULE), NV_ERR_INVALID_ADDRESS);
        CHECK_EQ(uvm_unmap_external(&u, 0, open + BLOCK - GRANULE, GRANULE), NV_ERR_INVALID_ADDRESS);
        CHECK_EQ(uvm_map_external(&u, 0, open + GRANULE, KB(64), 0, 70), NV_ERR_INVALID_ADDRESS);
        CHECK_EQ(uvm_unmap_external(&u, 0, BASE + i * GRANULE, BLOCK), NV_OK);
    }
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, n * GRANULE / 2);
    CHECK(gpu_marked(&u, BASE + BLOCK, KB(64), 5, NULL));
    // somebody else's by now
    CHECK_EQ(uvm_map_external(&u, 0, BASE, KB(64), 0, 70), NV_OK);
    CHECK_EQ(vm_release(&u, &h, 1, &r), NV_OK);
    vmtest_figure("release_addresses", n / 2, "addresses");
    vmtest_figure("release_steps", r.out_waits, "waits, the lock dropped between");
    CHECK_EQ(sim_pte(&u, BASE).state, SIMGPU_PTE_VALID);
    for (unsigned i = 1; i < n; i += k) {
        k = n - i < COUNT(ptes) ? n - i : COUNT(ptes);
        sim_walk(&u, 0, BASE + i * GRANULE, GRANULE, ptes, k);
        for (unsigned j = 0; j < k; j++)
            CHECK_EQ(ptes[j].state, (i + j) / 32 % 2 ? SIMGPU_PTE_SPARSE : SIMGPU_PTE_INVALID);
    }
    CHECK_EQ(gpu_word(&u, BASE + BLOCK), 0);
    CHECK_EQ(vm_query(&u, 0).out_bytes_mapped, 0);
    // an overlay that is left can be mapped in again, and a closed one opened
    CHECK_EQ(vm_map(&u, BASE + BLOCK, KB(64), h + 1, 0, 0), NV_OK);
    CHECK_EQ(vm_map(&u, BASE + 2 * BLOCK, KB(64), h + 1, 0, 0), NV_OK);
    CHECK_EQ(gpu_mark(&u, BASE + BLOCK, KB(64), 6), 0);
    CHECK(gpu_marked(&u, BASE + 2 * BLOCK, KB(64), 6, NULL));
    CHECK_EQ(vm_release_one(&u, h + 1), NV_OK);
    sim_check(0);
}

// As much as a call accepts, out of the largest mappings that are taken over. In a checked kernel that takes minutes, so
// there TAKEOVER_MB is less.
TEST(test_largest_takeover)
{
    static struct uvm_vmem_op ops[GB(4) / BLOCK];
    unsigned n = MB(env_long("TAKEOVER_MB", 4096)) / BLOCK;
    struct uvm u;
    uint64_t page;

    uvm_start(&u);
    CHECK_EQ(vm_create(&u, KB(64), 1, &page), NV_OK);
    for (unsigned i = 0; i < n; i++)
        ops[i] = vm_op(BASE + i * BLOCK, KB(64), page, 0, UVM_VMEM_TAKEOVER | UVM_VMEM_MAP_64K);
    CHECK_EQ(uvm_create_external(&u, BASE, n * BLOCK), NV_OK);
    for (unsigned i = 0; i < n; i += n / 2)
        CHECK_EQ(uvm_map_sparse(&u, 0, BASE + i * BLOCK, n / 2 * BLOCK), NV_OK);
    CHECK_EQ(vm_map_ops(&u, 0, ops, n, NULL), NV_OK);
    CHECK_EQ(sim_pte(&u, BASE + n * BLOCK - GRANULE).state, SIMGPU_PTE_SPARSE);
    CHECK_EQ(uvm_free_range(&u, BASE, n * BLOCK), NV_OK);
    sim_check(0);
}

// A GPU that is unregistered while a RELEASE of its pages is at work takes the rest of them along. Whichever comes
// first, every page is freed once and the file can go on.
static struct uvm shared;
static uint64_t leaving;

static void *releaser(void *status)
{
    *(NV_STATUS *)status = vm_release_one(&shared, leaving);
    return NULL;
}

TEST(test_release_beside_gpu_unregister)
{
    static struct uvm_vmem_op ops[4096];

    vm_start(&shared, MB(512));
    for (unsigned round = 0; round < 4; round++) {
        NV_STATUS status = 0xdead;
        pthread_t thread;

        CHECK_EQ(vm_create(&shared, KB(64), 1, &leaving), NV_OK);
        for (unsigned k = 0; k < 2; k++) {
            for (unsigned i = 0; i < COUNT(ops); i++)
                ops[i] = vm_op(BASE + (k * COUNT(ops) + i) * GRANULE, KB(64), leaving, 0, 0);
            CHECK_EQ(vm_map_ops(&shared, 0, ops, COUNT(ops), NULL), NV_OK);
        }
        CHECK_EQ(pthread_create(&thread, NULL, releaser, &status), 0);
        usleep(round * 1000);
        CHECK_EQ(uvm_unregister(&shared, 0), NV_OK);
        pthread_join(thread, NULL);
        CHECK(status == NV_OK || status == NV_ERR_INVALID_OBJECT_HANDLE);
        CHECK_EQ(uvm_register(&shared, 0), NV_OK);
        CHECK_EQ(uvm_register_vaspace(&shared, 0), NV_OK);
        CHECK_EQ(vm_query(&shared, 0).out_bytes_held, 0);
        sim_check(0);
    }
}

// ---- RELEASE whose caller keeps it waiting for the handles ---------------------------------------------------------

static struct uvm slow;
static uint64_t *handles_to_come; // a page that nobody has written yet

static int missing_page(void)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register r = {.mode = UFFDIO_REGISTER_MODE_MISSING};
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC);

    if (fd < 0)
        vmtest_skip("userfaultfd: %s", strerror(errno));
    CHECK(ioctl(fd, UFFDIO_API, &api) == 0);
    handles_to_come = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(handles_to_come != MAP_FAILED);
    r.range.start = (uintptr_t)handles_to_come;
    r.range.len = 4096;
    CHECK(ioctl(fd, UFFDIO_REGISTER, &r) == 0);
    return fd;
}

// Waits until somebody has touched the page
static void touched(int fd)
{
    struct uffd_msg msg;

    CHECK(read(fd, &msg, sizeof(msg)) == sizeof(msg));
    CHECK_EQ(msg.event, UFFD_EVENT_PAGEFAULT);
}

static void write_page(int fd, uint64_t handle)
{
    static uint64_t page[512];
    struct uffdio_copy copy = {.dst = (uintptr_t)handles_to_come, .src = (uintptr_t)page, .len = sizeof(page)};

    page[0] = handle;
    CHECK(ioctl(fd, UFFDIO_COPY, &copy) == 0);
}

static void *slow_releaser(void *without_memory)
{
    static NV_STATUS status;

    if (without_memory) // for a copy of the handles
        failmem_arm(1);
    status = vm_release(&slow, handles_to_come, 1, NULL);
    return &status;
}

TEST(test_release_that_waits_for_its_handles_holds_nobody_up)
{
    NV_STATUS *status;
    pthread_t thread;
    uint64_t h;
    int fd;

    vm_start(&slow, MB(8));
    CHECK_EQ(vm_create(&slow, KB(64), 2, &h), NV_OK);
    fd = missing_page();
    CHECK(pthread_create(&thread, NULL, slow_releaser, NULL) == 0);
    touched(fd);
    CHECK_EQ(vm_release_one(&slow, h), NV_OK); // or hangs
    write_page(fd, h + 1);
    pthread_join(thread, (void **)&status);
    CHECK_EQ(*status, NV_OK);
    CHECK_EQ(vm_query(&slow, 0).out_bytes_created, 0);
}

// Without memory, other calls of RELEASE do wait. A process that does can be killed.
TEST(test_release_that_waits_without_memory_can_be_killed)
{
    NV_STATUS *status;
    pthread_t thread;
    uint64_t h;
    pid_t pid;
    int fd;

    failmem_arm(0); // or skips the case
    vm_start(&slow, MB(8));
    CHECK_EQ(vm_create(&slow, KB(64), 2, &h), NV_OK);
    fd = missing_page();
    CHECK(pthread_create(&thread, NULL, slow_releaser, &fd) == 0);
    touched(fd);
    CHECK_EQ(vm_query(&slow, 0).out_bytes_created, KB(128)); // no other call waits
    pid = fork();
    if (pid == 0) {
        (void)vm_release_one(&slow, h);
        _exit(0);
    }
    for (;;) { // until it waits in the module
        char path[64], name[128] = "";
        FILE *f;

        CHECK_EQ(waitpid(pid, NULL, WNOHANG), 0);
        snprintf(path, sizeof(path), "/proc/%d/wchan", pid);
        f = fopen(path, "r");
        CHECK(f && (fgets(name, sizeof(name), f) || !ferror(f)));
        fclose(f);
        if (strstr(name, "uvm_vmem"))
            break;
        usleep(1000);
    }
    kill(pid, SIGKILL);
    CHECK_EQ(wait_child(pid), 128 + SIGKILL); // or hangs
    write_page(fd, h + 1);
    pthread_join(thread, (void **)&status);
    CHECK_EQ(*status, NV_OK);
    CHECK_EQ(vm_release_one(&slow, h), NV_OK);
}
