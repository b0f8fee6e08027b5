// Addresses and what backs them: translates runs into as few driver calls as the page-table entry sizes allow.
//
// SPDX-License-Identifier: MIT
#include "backend/stock/stock.h"

#include <errno.h>
#include <stdlib.h>

// The middle of an unaligned run gets 2 MiB entries if that saves more than the additional calls cost. Writing the
// 64 KiB entries of a block takes about 7 us; a call takes about 17 us.
#define PROMOTE_MIN (4 * STOCK_BLOCK)

static int counted(struct stock *s, int rc)
{
    atomic_fetch_add_explicit(&s->backend->syscalls, 1, memory_order_relaxed);
    return rc;
}

static uint64_t block_down(uint64_t addr) { return addr & ~(STOCK_BLOCK - 1); }

static uint64_t block_up(uint64_t addr) { return block_down(addr + STOCK_BLOCK - 1); }

static struct stock_slice after(struct stock_slice slice, uint64_t bytes)
{
    slice.offset += bytes;
    return slice;
}

static bool is_fine(const struct stock_reservation *reservation, uint64_t addr)
{
    return vmem__bit(reservation->fine, (addr - reservation->cuda.addr) / STOCK_BLOCK);
}

static void set_fine(struct stock_reservation *reservation, uint64_t addr, uint64_t end, bool fine)
{
    for (addr = block_down(addr); addr < end; addr += STOCK_BLOCK)
        vmem__bit_set(reservation->fine, (addr - reservation->cuda.addr) / STOCK_BLOCK, fine);
}

// Marks addresses as absent, or removes the marks.
static void set_absent(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                       bool absent)
{
    if (reservation->core)
        vmem__absent_set(s->backend, reservation->core, addr, length, absent);
}

// Makes one driver call. If it fails, nothing or the old memory is mapped. The entries are fine unless addr, length and offset are all multiples of a block.
static int put_one(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                   struct stock_slice now)
{
    bool fine = now.memory == 0 || (addr | length | now.offset) % STOCK_BLOCK != 0;
    int rc;

    if (now.memory)
        rc = vmem__uvm_map_external(&s->uvm, &s->rm, addr, length, now.memory, now.offset);
    else if (reservation->backdrop)
        rc = vmem__uvm_map_sparse(&s->uvm, addr, length);
    else
        rc = vmem__uvm_unmap_external(&s->uvm, addr, length);
    rc = counted(s, rc);
    if (!rc)
        set_fine(reservation, addr, addr + length, fine);
    return rc;
}

// Gives fine entries to the block that contains [from, to), because the caller is about to replace that range. `before`
// is mapped at `from`. If a 2 MiB entry of an arena backs the block, `before` backs all of it; the rest of the block is
// then invalid until it is mapped again here. If that fails and the entry cannot be restored, the whole block is absent.
static int refine(struct stock *s, struct stock_reservation *reservation, uint64_t from, uint64_t to,
                  struct stock_slice before)
{
    uint64_t block = block_down(from), end = block + STOCK_BLOCK;
    int rc;

    if (is_fine(reservation, block))
        return 0;
    before.offset -= from - block;
    rc = put_one(s, reservation, block, STOCK_BLOCK, (struct stock_slice){0});
    if (!rc && before.memory && block < from)
        rc = put_one(s, reservation, block, from - block, before);
    if (!rc && before.memory && to < end)
        rc = put_one(s, reservation, to, end - to, after(before, to - block));
    if (rc && put_one(s, reservation, block, STOCK_BLOCK, before))
        set_absent(s, reservation, block, STOCK_BLOCK, true);
    return rc;
}

// Maps with fine entries throughout, in one call if possible.
static int put_fine(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice now, struct stock_slice before)
{
    uint64_t end = addr + length, first = block_up(addr), last = block_down(end);
    bool coarse = now.memory && (addr | length | now.offset) % STOCK_BLOCK == 0;
    int rc = 0;

    if (addr < first) // the run covers only a part of its first block
        rc = refine(s, reservation, addr, end < first ? end : first, before);
    if (!rc && last < end && last >= first)
        rc = refine(s, reservation, last, end, after(before, last - addr));
    if (rc || !coarse)
        return rc ? rc : put_one(s, reservation, addr, length, now);
    // The driver would use 2 MiB entries for an aligned range. Two calls with unaligned lengths prevent that.
    rc = refine(s, reservation, last - STOCK_BLOCK, last, after(before, length - STOCK_BLOCK));
    if (!rc)
        rc = put_one(s, reservation, addr, length - VMEM_PAGE_64K, now);
    return rc ? rc : put_one(s, reservation, end - VMEM_PAGE_64K, VMEM_PAGE_64K, after(now, length - VMEM_PAGE_64K));
}

// Unmaps whole blocks by mapping scratch memory over them, many blocks in a call. With 64 KiB entries, each block would
// take about 12 us.
static int put_scratch(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length)
{
    int rc = 0;

    for (uint64_t n; !rc && length; addr += n, length -= n) {
        n = length < STOCK_SCRATCH ? length : STOCK_SCRATCH;
        rc = put_one(s, reservation, addr, n, (struct stock_slice){s->scratch, 0});
    }
    return rc;
}

static int put(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
               struct stock_slice now, struct stock_slice before, bool keep_fine)
{
    uint64_t end = addr + length, first = block_up(addr), last = block_down(end);
    bool coarse = first < last && !keep_fine;
    int rc = 0;

    if (now.memory)
        coarse =
            coarse && (addr - now.offset) % STOCK_BLOCK == 0 && (last - first == length || last - first >= PROMOTE_MIN);
    else
        coarse = coarse && reservation->backdrop && last - first >= 2 * STOCK_BLOCK;
    if (!coarse)
        return put_fine(s, reservation, addr, length, now, before);
    if (addr < first)
        rc = put_fine(s, reservation, addr, first - addr, now, before);
    if (!rc && !now.memory)
        rc = put_scratch(s, reservation, first, last - first);
    else if (!rc)
        rc = put_one(s, reservation, first, last - first, after(now, first - addr));
    if (!rc && last < end)
        rc = put_fine(s, reservation, last, end - last, after(now, last - addr), after(before, last - addr));
    return rc;
}

static uint64_t piece(const struct stock_reservation *reservation, uint64_t addr, uint64_t end)
{
    uint64_t segment_end = addr + STOCK_SEGMENT - (addr - reservation->cuda.addr) % STOCK_SEGMENT;

    return (end < segment_end ? end : segment_end) - addr;
}

int vmem__stock_activate(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length)
{
    const uint64_t segments = reservation->cuda.length / STOCK_SEGMENT, end = addr - reservation->cuda.addr + length;
    int rc = 0;

    if (reservation->backdrop)
        return vmem__cuda_activate(&s->gpu.cuda, &s->gpu.backdrop, &reservation->cuda, addr, length);
    for (uint64_t i = (addr - reservation->cuda.addr) / STOCK_SEGMENT; !rc && i < segments && i * STOCK_SEGMENT < end;
         i++) {
        const uint64_t at = reservation->cuda.addr + i * STOCK_SEGMENT;

        if (vmem__bit(reservation->cuda.active, i))
            continue;
        rc = vmem__cuda_activate(&s->gpu.cuda, &s->gpu.backdrop, &reservation->cuda, at, STOCK_SEGMENT);
        if (!rc)
            rc = put_one(s, reservation, at, STOCK_SEGMENT, (struct stock_slice){0});
    }
    return rc;
}

// Maps `before` at what is absent in a range. The caller holds the reservation's lock.
static int put_back(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice before)
{
    uint64_t end = addr + length, at = addr, n = length;
    int rc = 0;

    for (;; at += n) {
        int result;

        if (reservation->core)
            at = vmem__absent_next(reservation->core, at, end, &n);
        else
            n = end - at;
        if (!n)
            return rc;
        n = n < piece(reservation, at, end) ? n : piece(reservation, at, end);
        result = put_fine(s, reservation, at, n, after(before, at - addr), after(before, at - addr));
        if (!result)
            set_absent(s, reservation, at, n, false);
        rc = rc ? rc : result;
    }
}

// The undo of a put that failed, or that came before one that did. Keeps the error text.
static void undo(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                 struct stock_slice before)
{
    char text[VMEM__TEXT];

    vmem__keep_error(text);
    set_absent(s, reservation, addr, length, true);
    put_back(s, reservation, addr, length, before);
    vmem__error(0, "%s", text);
}

int vmem__stock_put_back(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                         struct stock_slice before, bool undo_all)
{
    int rc = 0;

    pthread_mutex_lock(&reservation->cuda.lock);
    if (undo_all)
        undo(s, reservation, addr, length, before);
    else
        rc = put_back(s, reservation, addr, length, before);
    pthread_mutex_unlock(&reservation->cuda.lock);
    return rc;
}

int vmem__stock_put(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice now, struct stock_slice before, bool keep_fine)
{
    uint64_t end = addr + length, at = addr, n;
    int rc;

    pthread_mutex_lock(&reservation->cuda.lock);
    // Also activate the next segment, so that a kernel's tile may reach past the last page.
    rc = vmem__stock_activate(s, reservation, addr, reservation->backdrop ? length + STOCK_SEGMENT : length);
    if (rc)
        goto unlock;
    for (; !rc && at < end; at += n) {
        n = piece(reservation, at, end);
        rc = put(s, reservation, at, n, after(now, at - addr), after(before, at - addr), keep_fine);
    }
    // Restore every piece, the failed one too. A partly covered block that is still coarse still maps `before`.
    if (rc)
        undo(s, reservation, addr, at - addr, before);
    else
        set_absent(s, reservation, addr, length, false);
unlock:
    pthread_mutex_unlock(&reservation->cuda.lock);
    return rc;
}

// ---- reservations -------------------------------------------------------------------------------------------

int vmem__stock_reservation_new(struct stock *s, uint64_t length, bool backdrop, struct stock_reservation *reservation)
{
    int rc = vmem__cuda_reserve(&s->gpu.cuda, &s->gpu.backdrop, length, 0, &reservation->cuda);

    if (rc)
        return rc;
    reservation->core = NULL;
    reservation->backdrop = backdrop;
    reservation->fine = calloc((reservation->cuda.length / STOCK_BLOCK + 63) / 64, sizeof(uint64_t));
    if (!reservation->fine)
        rc = vmem__error(-ENOMEM, "reserve: no memory to keep track of %llu bytes", (unsigned long long)length);
    // CUDA must know the first address. With a backdrop, the first map would need the second segment, so it is
    // activated here too.
    if (!rc)
        rc = vmem__stock_activate(s, reservation, reservation->cuda.addr, backdrop ? 2 * STOCK_SEGMENT : STOCK_SEGMENT);
    if (rc) {
        free(reservation->fine);
        vmem__cuda_unreserve(&s->gpu.cuda, &s->gpu.backdrop, &reservation->cuda);
        return rc;
    }
    return 0;
}

void vmem__stock_reservation_free(struct stock *s, struct stock_reservation *reservation)
{
    vmem__cuda_unreserve(&s->gpu.cuda, &s->gpu.backdrop, &reservation->cuda);
    free(reservation->fine);
}
