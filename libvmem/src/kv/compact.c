// Compaction: moves pages that only names hold close together, so that the memory between them can return to the
// system.
//
// The library takes device memory in arenas, and an arena returns to the system as a whole. After a busy time, a few
// named pages are spread over many arenas. Compaction copies them to new pages in an arena of their own. While it
// creates the new pages, placeholders fill the free space of the old arenas.
//
// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "kv/kv.h"

#define CHUNK 32 // pages copied at once

struct move {
    vmem_page *name; // the table entry that contains the handle
    vmem_page from, to;
    uint32_t row; // number of pages in the row that begins here; 0 if the row began earlier
};

static int device_bytes(vmem_kv *kv, uint64_t *all, uint64_t *overhead)
{
    struct vmem_stats st = {.size = sizeof st};
    int rc = vmem_context_stats(kv->ctx, &st);
    *all = st.created + st.overhead;
    *overhead = st.overhead;
    return rc;
}

// Finds the rows of pages that exactly one name holds and nothing else.
static int find(vmem_kv *kv, struct move **moves, uint64_t *n)
{
    uint64_t most = kv->refs.only;
    *n = 0;
    *moves = calloc(most ? most : 1, sizeof(**moves));
    if (!*moves)
        return vmem__error(-ENOMEM, "no memory to list %llu pages", (unsigned long long)most);
    for (uint32_t id = 0; id < kv->n_blocks; id++) {
        vmem_page *row = kv->named + (uint64_t)id * kv->block_pages;
        for (uint32_t i = 0; i < kv->n_groups && row[0]; i++) {
            const struct kv_group *g = &kv->groups[i];
            uint32_t each = kv_block_pages(kv, g);
            for (uint32_t k = 0; k < each; k++) {
                const struct kv_ref *ref = vmem__kv_ref_find(&kv->refs, row[k]);
                for (uint32_t t = 0; t < g->n && !ref->slots && ref->prefixes == 1; t++)
                    (*moves)[(*n)++] =
                        (struct move){.name = &row[t * each + k], .from = row[t * each + k], .row = t ? 0 : g->n};
            }
            row += g->n * each;
        }
    }
    return 0;
}

// Fills the free space of the existing arenas, with at most `most` pages.
static uint64_t fill(vmem_kv *kv, vmem_page *pages, uint64_t most, uint64_t all)
{
    for (uint64_t n = 0; n < most; n++) {
        uint64_t now, overhead;
        if (vMemCreate(kv->ctx, kv->page_size, 1, 0, &pages[n]))
            return n;
        if (device_bytes(kv, &now, &overhead) || now > all) {
            vMemRelease(kv->ctx, pages[n]);
            return n;
        }
    }
    return most;
}

static int copy_chunk(vmem_kv *kv, uint64_t scratch, const struct move *m, uint64_t n)
{
    struct vmem_map_op maps[2 * CHUNK];
    struct vmem_copy_op copies[CHUNK];
    for (uint64_t i = 0; i < n; i++) {
        uint64_t from = scratch + i * kv->page_size, to = from + CHUNK * kv->page_size;
        maps[2 * i] = (struct vmem_map_op){.addr = from, .page = m[i].from};
        maps[2 * i + 1] = (struct vmem_map_op){.addr = to, .page = m[i].to};
        copies[i] = (struct vmem_copy_op){.dst = to, .src = from, .length = kv->page_size};
    }
    int rc = vMemMapBatch(kv->ctx, maps, 2 * n, VMEM_MAP_FINE | VMEM_MAP_REPLACE, NULL);
    if (!rc)
        rc = vmem_copy_batch(kv->ctx, copies, n);
    vMemUnmap(kv->ctx, scratch, 2 * CHUNK * kv->page_size);
    return rc;
}

static int copy(vmem_kv *kv, const struct move *moves, uint64_t n)
{
    struct vmem_info info = {.size = sizeof info};
    uint64_t scratch;
    int rc = vmem_context_info(kv->ctx, &info);
    if (!rc)
        rc = vMemReserve(kv->ctx, 2 * CHUNK * kv->page_size, info.caps & VMEM_CAP_BACKDROP ? VMEM_RESERVE_BACKDROP : 0,
                         &scratch);
    if (rc)
        return rc;
    for (uint64_t i = 0; i < n && !rc; i += CHUNK)
        rc = copy_chunk(kv, scratch, &moves[i], KV_MIN(n - i, CHUNK));
    vmem_unreserve(kv->ctx, scratch); // cannot fail here
    return rc;
}

// Makes the names hold the new pages. Needs no memory, because the table of references keeps its size.
static void commit(vmem_kv *kv, struct move *moves, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        if (moves[i].row) {
            vmem__kv_ref_hold(&kv->refs, vmem__kv_ref_find(&kv->refs, moves[i].from), 0, -1);
            vmem__kv_ref_hold(&kv->refs, vmem__kv_ref_get(&kv->refs, moves[i].to, moves[i].row), -1, 1);
        }
        *moves[i].name = moves[i].to;
        vMemRelease(kv->ctx, moves[i].from);
    }
}

// Compacts once. *gained is the number of bytes of device memory that went back to the system.
static int pass(vmem_kv *kv, uint64_t *gained)
{
    uint64_t all, overhead, after, n = 0, n_fill = 0;
    struct move *moves = NULL;
    vmem_page *made = NULL, *filled = NULL;
    *gained = 0;
    vmem__kv_give_ahead(kv, 0);
    int rc = device_bytes(kv, &all, &overhead);
    // Compact only if it pays: fewer bytes move than return to the system, and there is room to move them.
    if (rc || overhead <= kv->held * kv->page_size / 32 || kv->held + kv->refs.only > kv->budget_pages)
        return rc;
    rc = find(kv, &moves, &n);
    uint64_t most = overhead >> kv->page_shift;
    made = malloc((n ? n : 1) * sizeof(*made));
    filled = malloc((most ? most : 1) * sizeof(*filled));
    if (!rc && (!made || !filled))
        rc = vmem__error(-ENOMEM, "no memory to move %llu pages", (unsigned long long)n);
    bool created = false;
    if (!rc && n) {
        n_fill = fill(kv, filled, most, all);
        rc = vMemCreate(kv->ctx, kv->page_size, n, 0, made);
        created = !rc;
        vmem__kv_release(kv, filled, n_fill);
    }
    for (uint64_t i = 0; created && i < n; i++)
        moves[i].to = made[i];
    if (!rc && n)
        rc = copy(kv, moves, n);
    if (created && rc)
        vmem__kv_release(kv, made, n);
    else if (created)
        commit(kv, moves, n);
    vmem__kv_give_ahead(kv, 0);
    if (!device_bytes(kv, &after, &overhead) && after < all)
        *gained = all - after;
    free(moves);
    free(made);
    free(filled);
    return rc;
}

int vmem_kv_block_compact(vmem_kv *kv, uint64_t *freed)
{
    uint64_t gained = 0, sum = 0;
    int rc = vmem__kv_enter(kv);
    if (rc)
        return rc;
    vmem__kv_worker_hold(kv);
    do { // repeat: while many arenas exist, the new arena is larger than its pages need
        rc = pass(kv, &gained);
        sum += gained;
    } while (!rc && gained);
    vmem__kv_worker_release(kv);
    if (freed)
        *freed = sum;
    return vmem__kv_leave(kv, rc == -ENOMEM ? 0 : rc); // pages stay in place if there is no memory to move them
}
