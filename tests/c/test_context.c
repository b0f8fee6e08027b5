// Contexts: options, the choice of a backend, information, error text.
//
// SPDX-License-Identifier: MIT
#include <pthread.h>

#include "harness.h"

static void options(void)
{
    vmem_context *ctx = NULL;
    const struct vmem_options good = {.size = sizeof good, .backend = test_backend};
    struct vmem_options o;

    o = good, o.size = 8;
    ERR(vmem_context_create(&o, &ctx), EINVAL, "opts->size 8");
    o = good, o.flags = 0x80;
    ERR(vmem_context_create(&o, &ctx), EINVAL, "opts->flags 0x80");
    o = good, o.reserved = 7;
    ERR(vmem_context_create(&o, &ctx), EINVAL, "opts->reserved 7");
    o = good, o.device = -1;
    ERR(vmem_context_create(&o, &ctx), EINVAL, "opts->device -1");
    o = good, o.backend = "abacus";
    ERR(vmem_context_create(&o, &ctx), EINVAL, "\"abacus\" is not one of");
    ERR(vmem_context_create(&good, NULL), EINVAL, "out is NULL");
    ERR(vmem_probe(NULL), EINVAL, "opts->backend is NULL");
    o = good, o.backend = NULL;
    ERR(vmem_probe(&o), EINVAL, "opts->backend is NULL");
    OK(vmem_probe(&good));
    CHECK(!ctx);
    vmem_context_destroy(NULL);
}

static void backend_by_environment(void)
{
    vmem_context *ctx;
    setenv("VMEM_BACKEND", "abacus", 1);
    ERR(vmem_context_create(NULL, &ctx), EINVAL, "$VMEM_BACKEND \"abacus\"");
    // A name in the options goes before it.
    OK(vmem_context_create(&(struct vmem_options){.size = sizeof(struct vmem_options), .backend = test_backend}, &ctx));
    vmem_context_destroy(ctx);
    setenv("VMEM_BACKEND", test_backend, 1);
    OK(vmem_context_create(NULL, &ctx));
    struct vmem_info info = {.size = sizeof info};
    OK(vmem_context_info(ctx, &info));
    CHECK(!strcmp(info.backend, test_backend));
    vmem_context_destroy(ctx);
    // Without either there is one that works, as the host does.
    unsetenv("VMEM_BACKEND");
    OK(vmem_context_create(NULL, &ctx));
    vmem_context_destroy(ctx);
}

static void backends(void)
{
    const char *const *names = vmem_backends();
    bool known = false;
    size_t n = 0;
    for (; names[n]; n++)
        known = known || !strcmp(names[n], test_backend);
    CHECK(known);
    CHECK(!strcmp(names[n - 1], "host"));
}

static void information(void)
{
    vmem_context *ctx = test_context(123 * MIB);
    CHECK(!strcmp(test_info.backend, test_backend));
    CHECK(test_info.device_name[0]);
    CHECK(test_info.page_sizes & VMEM_PAGE_2M);
    CHECK_EQ(test_info.page_sizes & ~(VMEM_PAGE_64K | VMEM_PAGE_128K | VMEM_PAGE_256K | VMEM_PAGE_2M), 0);
    CHECK(test_info.reserve_align >= VMEM_PAGE_2M && test_info.reserve_align % VMEM_PAGE_2M == 0);
    uint64_t total, left;
    OK(vmem_context_memory(ctx, &total, &left));
    OK(vmem_context_memory(ctx, NULL, NULL));
    CHECK(test_info.memory_total > 0 && total > 0 && left <= total);
    struct vmem_stats s = test_stats(ctx);
    CHECK_EQ(s.budget, 123 * MIB);
    CHECK_EQ(s.reserved + s.created + s.mapped + s.map_ops + s.map_runs + s.unmap_ops + s.unmap_runs, 0);
    ERR(vmem_context_info(ctx, NULL), EINVAL, "out must not be NULL");
    ERR(vmem_context_stats(ctx, NULL), EINVAL, "out must not be NULL");
    vmem_context_destroy(ctx);
}

static void null_context(void)
{
    uint64_t u;
    vmem_page p;
    struct vmem_info info = {.size = sizeof info};
    struct vmem_stats stats = {.size = sizeof stats};
    struct vmem_page_info page_info = {.size = sizeof page_info};
    ERR(vmem_context_info(NULL, &info), EINVAL, "ctx is NULL");
    ERR(vmem_context_stats(NULL, &stats), EINVAL, "ctx is NULL");
    ERR(vmem_set_budget(NULL, 0), EINVAL, "ctx is NULL");
    ERR(vmem_prealloc(NULL, 0), EINVAL, "ctx is NULL");
    ERR(vmem_trim(NULL, NULL), EINVAL, "ctx is NULL");
    ERR(vMemReserve(NULL, MIB, 0, &u), EINVAL, "ctx is NULL");
    ERR(vMemFree(NULL, 0), EINVAL, "ctx is NULL");
    ERR(vmem_backdrop(NULL, 0, 0), EINVAL, "ctx is NULL");
    ERR(vMemCreate(NULL, VMEM_PAGE_2M, 1, 0, &p), EINVAL, "ctx is NULL");
    ERR(vMemRelease(NULL, 0), EINVAL, "ctx is NULL");
    ERR(vMemReleaseBatch(NULL, NULL, 0, NULL), EINVAL, "ctx is NULL");
    ERR(vmem_page_query(NULL, 0, &page_info), EINVAL, "ctx is NULL");
    ERR(vMemMap(NULL, 0, 0), EINVAL, "ctx is NULL");
    ERR(vMemMapBatch(NULL, NULL, 0, 0, NULL), EINVAL, "ctx is NULL");
    ERR(vMemUnmap(NULL, 0, 0), EINVAL, "ctx is NULL");
    ERR(vMemUnmapBatch(NULL, NULL, 0, NULL), EINVAL, "ctx is NULL");
    ERR(vmem_query(NULL, 0, &p, NULL), EINVAL, "ctx is NULL");
    ERR(vmem_copy_batch(NULL, NULL, 0), EINVAL, "ctx is NULL");
    ERR(vmem_fill(NULL, 0, 0, 0), EINVAL, "ctx is NULL");
}

static void *text_elsewhere(void *arg)
{
    (void)arg;
    CHECK(!vmem_last_error()[0]);
    ERR(vMemFree(NULL, 0), EINVAL, "ctx is NULL");
    return NULL;
}

static void error_text_is_per_thread(void)
{
    ERR(vmem_probe(NULL), EINVAL, "opts->backend is NULL");
    pthread_t t;
    CHECK(!pthread_create(&t, NULL, text_elsewhere, NULL));
    CHECK(!pthread_join(t, NULL));
    CHECK(strstr(vmem_last_error(), "opts->backend is NULL"));
}

static void destroy_takes_everything(void)
{
    for (int i = 0; i < 3; i++) {
        vmem_context *ctx = test_context(0);
        uint64_t addr[2];
        vmem_page page[4];
        for (int r = 0; r < 2; r++)
            OK(vMemReserve(ctx, 64 * MIB, 0, &addr[r]));
        OK(vMemCreate(ctx, VMEM_PAGE_2M, 4, 0, page));
        for (int p = 0; p < 3; p++) {
            OK(vMemMap(ctx, addr[0] + p * VMEM_PAGE_2M, page[p]));
            OK(vMemMap(ctx, addr[1] + (17 + p) * VMEM_PAGE_2M, page[p]));
        }
        vmem_context_destroy(ctx);
    }
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    options();
    backend_by_environment();
    backends();
    information();
    null_context();
    error_text_is_per_thread();
    destroy_takes_everything();
    return 0;
}
