// Compaction: moves pages that only runs hold close together, so that the memory between them can return to the
// system.
//
// The library takes device memory in arenas, and an arena returns to the system as a whole. After a busy time, a few
// such pages are spread over many arenas. Compaction moves them to arenas that they fill, pages of the emptiest arenas
// first. It moves a portion at a time, so that it needs little additional memory, and lets calls that arrive go first.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>
#include <time.h>

#include "kv/kv.h"

#define CHUNK (KV_SCRATCH / 2)       // pages copied at once
#define PORTION (UINT64_C(64) << 20) // bytes that are moved before a call that has arrived may go on

// A row of pages that exactly one run holds, and nothing else.
struct row {
    vmem_page *held; // the first page in the run's list
    uint32_t stride; // entries from one page to the next
    uint32_t n;      // pages
    uint32_t used;   // of its arena
};

// The bytes of device memory that the context has; *overhead: those of them that no page uses.
static uint64_t device_bytes(vmem_kv *kv, uint64_t *overhead)
{
    struct vmem_stats st = {.size = sizeof st};
    vmem_context_stats(kv->ctx, &st);
    *overhead = st.overhead;
    return st.created + st.overhead;
}

static int by_use(const void *a, const void *b)
{
    const uint32_t x = ((const struct row *)a)->used, y = ((const struct row *)b)->used;
    return x < y ? -1 : x > y;
}

// Lists rows that can be moved, of the emptiest arenas first. Those in full arenas stay, so that none moves twice.
static int find_rows(vmem_kv *kv, struct row **rows, uint64_t *n)
{
    uint64_t most = kv->shared.runs_only;
    *n = 0;
    *rows = calloc(most ? most : 1, sizeof(**rows));
    if (!*rows)
        return vmem__error(-ENOMEM, "no memory to list %llu pages", (unsigned long long)most);
    for (uint32_t r = 0; r < kv->runs.used && *n < most; r++) {
        const struct kv_rows *held = kv->runs.list[r].rows;
        for (uint32_t i = 0; i < kv->n_groups && held; i++, held++) {
            for (uint32_t k = 0; k < held->n; k++) {
                vmem_page *page = &held->pages[k];
                const struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, *page);
                const bool alone = !ref->slots && ref->runs == 1;
                const uint32_t used = alone ? vmem__arena_used(kv->ctx, *page) : UINT32_MAX;
                if (used != UINT32_MAX)
                    (*rows)[(*n)++] = (struct row){.held = page, .stride = held->n, .n = ref->n, .used = used};
            }
        }
    }
    qsort(*rows, *n, sizeof(**rows), by_use);
    return 0;
}

static int map_and_copy(vmem_kv *kv, const vmem_page *from, const vmem_page *to, uint64_t n)
{
    struct vmem_map_op maps[2 * CHUNK];
    struct vmem_copy_op copies[CHUNK];
    const uint64_t scratch = kv->scratch;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at = scratch + i * kv->page_size, into = at + CHUNK * kv->page_size;
        maps[2 * i] = (struct vmem_map_op){.addr = at, .page = from[i]};
        maps[2 * i + 1] = (struct vmem_map_op){.addr = into, .page = to[i]};
        copies[i] = (struct vmem_copy_op){.dst = into, .src = at, .length = kv->page_size};
    }
    int rc = vMemMapBatch(kv->ctx, maps, 2 * n, VMEM_MAP_FINE | VMEM_MAP_REPLACE, NULL);
    if (!rc)
        rc = vmem_copy_batch(kv->ctx, copies, n);
    vMemUnmap(kv->ctx, scratch, 2 * CHUNK * kv->page_size);
    return rc;
}

static int copy_pages(vmem_kv *kv, const vmem_page *from, const vmem_page *to, uint64_t n)
{
    int rc = 0;
    for (uint64_t i = 0; i < n && !rc; i += CHUNK)
        rc = map_and_copy(kv, from + i, to + i, MIN(n - i, CHUNK));
    return rc;
}

// Makes the runs hold the new pages. Needs no memory, because the table of references keeps its size.
static void commit_moves(vmem_kv *kv, const struct row *rows, uint64_t n, const vmem_page *to)
{
    for (uint64_t i = 0; i < n; i++) {
        struct kv_shared_row *ref = vmem__kv_shared_find(&kv->shared, *rows[i].held);
        const int evictable = (int)ref->evictable_runs;
        vmem__kv_change_holders(kv, ref, (struct kv_holders){.runs = -1, .evictable_runs = -evictable});
        ref = vmem__kv_shared_new(&kv->shared, *to, rows[i].n);
        vmem__kv_change_holders(kv, ref, (struct kv_holders){.slots = -1, .runs = 1, .evictable_runs = evictable});
        for (uint32_t t = 0; t < rows[i].n; t++)
            rows[i].held[(uint64_t)t * rows[i].stride] = *to++;
    }
}

// Moves as many of the rows as fit into a portion; *moved is how many pages. Halves the portion where there is too
// little memory for it.
static int move_rows(vmem_kv *kv, const struct row *rows, uint64_t n, uint64_t *moved)
{
    uint64_t most = MAX(PORTION >> kv->page_shift, 1), used = 0;
    const uint64_t room = kv_unused(kv);
    vmem_page *from = malloc(2 * most * sizeof(*from)), *to = from + most;
    int rc = from ? -ENOMEM : vmem__error(-ENOMEM, "no memory to list %llu pages", (unsigned long long)most);
    *moved = 0;
    most = MIN(most, room);
    for (; from && rc == -ENOMEM && most; most /= 2) {
        uint64_t pages = 0;
        for (used = 0; used < n && pages + rows[used].n <= most; used++)
            for (uint32_t t = 0; t < rows[used].n; t++)
                from[pages++] = rows[used].held[(uint64_t)t * rows[used].stride];
        if (!pages)
            break;
        rc = vmem__create_apart(kv->ctx, kv->page_size, pages, to);
        if (rc)
            continue;
        rc = copy_pages(kv, from, to, pages);
        if (!rc)
            commit_moves(kv, rows, used, to);
        vmem_drop(kv->ctx, rc ? to : from, pages);
        *moved = rc ? 0 : pages;
        break;
    }
    free(from);
    return rc;
}

// Compacts a portion. *moved is how many pages; adds to *freed how many bytes went back to the device.
static int compact_portion(vmem_kv *kv, uint64_t *moved, uint64_t *freed)
{
    uint64_t overhead, n = 0;
    const uint64_t before = device_bytes(kv, &overhead);
    struct row *rows = NULL;
    int rc = 0;
    *moved = 0;
    vmem__kv_release_doomed(kv);
    vmem__kv_trim_prealloc(kv, 0);
    uint64_t after = device_bytes(kv, &overhead);
    if (overhead > kv->ledger.held * kv->page_size / 32) // else it does not pay
        rc = find_rows(kv, &rows, &n);
    if (rows && n)
        rc = move_rows(kv, rows, n, moved);
    free(rows);
    if (*moved) {
        vmem__kv_trim_prealloc(kv, 0);
        after = device_bytes(kv, &overhead);
    }
    *freed += sat_sub(before, after);
    return rc;
}

// Moves pages until they are as close together as they get, or another call arrives.
static int compact(vmem_kv *kv, uint64_t *freed)
{
    uint64_t moved = 0, calls = 0;
    int rc;
    *freed = 0;
    do {           // this ends, because pages move into full arenas, and stay there
        if (calls) // a mutex does not give way by itself
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        rc = vmem__kv_enter(kv);
        if (rc)
            return rc;
        if (calls && kv->gate.calls != calls) // somebody needs the cache
            return vmem__kv_leave(kv, 0);
        vmem__kv_worker_pause(kv);
        rc = compact_portion(kv, &moved, freed);
        vmem__kv_worker_resume(kv);
        calls = kv->gate.calls + 1;
        rc = vmem__kv_leave(kv, rc == -ENOMEM ? 0 : rc); // pages stay in place if there is no memory to move them
    } while (!rc && moved);
    return rc;
}

int vmem_kv_reclaim(vmem_kv *kv, uint64_t bytes, uint32_t flags, uint64_t *freed)
{
    uint64_t got = 0;
    int rc = vmem__kv_enter(kv);
    if (!rc) {
        rc = vmem__check_flags(flags, VMEM_KV_COMPACT);
        rc = vmem__kv_leave(kv, rc ? rc : vmem__kv_reclaim_bytes(kv, bytes, &got));
    }
    if (!rc && flags)
        rc = compact(kv, &got);
    if (freed)
        *freed = got;
    return rc;
}
