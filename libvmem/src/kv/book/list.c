// Lists that grow.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>

#include "kv/book/book.h"

int vmem__kv_room_for(void *array, uint64_t *cap, uint64_t n, size_t size)
{
    if (n <= *cap)
        return 0;
    uint64_t want = KV_MAX(n, *cap * 2);
    void *p = realloc(*(void **)array, want * size);
    if (!p)
        return vmem__error(-ENOMEM, "no memory for a list of %" PRIu64 " elements", want);
    *(void **)array = p;
    *cap = want;
    return 0;
}
