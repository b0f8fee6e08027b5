// Ordinary CUDA memory that begins where a reservation of libvmem's ends, as cuMemAddressReserve of a real driver places
// it: argv[1] is the backend. Whatever libvmem maps in its reservation, the other's bytes stay.
//
// SPDX-License-Identifier: MIT
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vmem.h"

#define MB(n) ((uint64_t)(n) << 20)

struct prop {
    int type, handle_types, location[2];
    void *security;
    unsigned char flags[8];
};
struct access {
    int location[2], flags;
};
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxPushCurrent_v2(void *);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
int cuMemCreate(uint64_t *, size_t, const struct prop *, unsigned long long);
int cuMemMap(uint64_t, size_t, size_t, uint64_t, unsigned long long);
int cuMemSetAccess(uint64_t, size_t, const struct access *, size_t);
int cuMemcpyAsync(uint64_t, uint64_t, size_t, void *);
int cuMemsetD8Async(uint64_t, unsigned char, size_t, void *);
int cuCtxSynchronize(void);

#define OK(call)                                                         \
    do {                                                                 \
        int rc_ = (call);                                                \
        if (rc_) {                                                       \
            printf("not ok %s: %d %s\n", #call, rc_, vmem_last_error()); \
            exit(1);                                                     \
        }                                                                \
    } while (0)

static uint64_t wrong(uint64_t addr, unsigned char *buffer, uint64_t length)
{
    uint64_t n = 0;

    memset(buffer, 0, length);
    OK(cuMemcpyAsync((uintptr_t)buffer, addr, length, NULL));
    OK(cuCtxSynchronize());
    for (uint64_t i = 0; i < length; i++)
        n += buffer[i] != 0xab;
    return n;
}

int main(int argc, char **argv)
{
    struct vmem_options options = {.size = sizeof(options), .backend = argc > 1 ? argv[1] : "uvm"};
    const struct prop prop = {.type = 1, .location = {1, 0}};
    const struct access access = {.location = {1, 0}, .flags = 3};
    unsigned char *buffer = malloc(MB(4));
    uint64_t mine, other, handle, lost = 0;
    vmem_context *context;
    vmem_page page;
    void *cu;

    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&cu, 0));
    OK(cuCtxPushCurrent_v2(cu));
    OK(vmem_context_create(&options, &context));
    OK(vMemReserve(context, MB(128), 0, &mine));
    OK(cuMemAddressReserve(&other, MB(64), 0, 0, 0)); // as an expandable segment of PyTorch's
    if (other != mine + MB(128)) {
        printf("not ok neighbour - the reservations 0x%llx and 0x%llx are not adjacent\n", (unsigned long long)mine,
               (unsigned long long)other);
        return 1;
    }
    OK(cuMemCreate(&handle, MB(4), &prop, 0));
    OK(cuMemMap(other, MB(4), 0, handle, 0));
    OK(cuMemSetAccess(other, MB(4), &access, 1));
    OK(cuMemsetD8Async(other, 0xab, MB(4), NULL));
    for (uint64_t size = 64 << 10; size <= MB(2); size *= 2) {
        if (size == 512 << 10)
            size = MB(2);
        OK(vMemCreate(context, size, 1, 0, &page));
        OK(vMemMap(context, mine + MB(128) - size, page)); // the last of the reservation
        lost += wrong(other, buffer, MB(4));
        OK(vMemUnmap(context, mine + MB(128) - size, size));
        lost += wrong(other, buffer, MB(4));
        OK(vMemMap(context, mine + MB(64) - size, page)); // the last of a segment, inside
        OK(vMemUnmap(context, mine + MB(64) - size, size));
        OK(vMemRelease(context, page));
    }
    OK(vMemFree(context, mine));
    lost += wrong(other, buffer, MB(4));
    printf(lost ? "not ok neighbour - %llu of its bytes are gone\n" : "ok neighbour\n", (unsigned long long)lost);
    return lost != 0;
}
