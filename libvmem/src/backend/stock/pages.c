// How runs become as few driver calls as the entries' sizes allow.
//
// SPDX-License-Identifier: MIT
#include "backend/stock/stock.h"

// An unaligned run's middle goes to 2 MiB entries when that saves more than the further calls cost: writing the 64
// KiB entries of a block takes about 7 us, a call about 17.
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

// One driver call. The entries come out fine unless addr, length and offset are multiples of a block.
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

// Fine entries for the block that [from, to) lies in and is about to be replaced in. before stands behind from, and
// behind all of the block if that is a 2 MiB entry of an arena: then the rest of the block is invalid for a moment,
// and comes back.
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
    if (rc && before.memory)
        put_one(s, reservation, block, STOCK_BLOCK, before); // the rest must not stay away
    return rc;
}

// Fine entries throughout, in one call if it can be.
static int put_fine(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice now, struct stock_slice before)
{
    uint64_t end = addr + length, first = block_up(addr), last = block_down(end);
    bool coarse = now.memory && (addr | length | now.offset) % STOCK_BLOCK == 0;
    int rc = 0;

    if (addr < first) // a block of which the run takes only a part
        rc = refine(s, reservation, addr, end < first ? end : first, before);
    if (!rc && last < end && last >= first)
        rc = refine(s, reservation, last, end, after(before, last - addr));
    if (rc || !coarse)
        return rc ? rc : put_one(s, reservation, addr, length, now);
    // The driver would take 2 MiB entries for these numbers: two calls of odd lengths.
    rc = refine(s, reservation, last - STOCK_BLOCK, last, after(before, length - STOCK_BLOCK));
    if (!rc)
        rc = put_one(s, reservation, addr, length - VMEM_PAGE_64K, now);
    return rc ? rc : put_one(s, reservation, end - VMEM_PAGE_64K, VMEM_PAGE_64K, after(now, length - VMEM_PAGE_64K));
}

// Takes whole blocks away: a call for many, where 64 KiB entries would take about 12 us for each.
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

int vmem__stock_empty(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length)
{
    return put_one(s, reservation, addr, length, (struct stock_slice){0});
}

static uint64_t piece(const struct stock_reservation *reservation, uint64_t addr, uint64_t end)
{
    uint64_t segment_end = addr + STOCK_SEGMENT - (addr - reservation->cuda.addr) % STOCK_SEGMENT;

    return (end < segment_end ? end : segment_end) - addr;
}

int vmem__stock_put(struct stock *s, struct stock_reservation *reservation, uint64_t addr, uint64_t length,
                    struct stock_slice now, struct stock_slice before, bool keep_fine)
{
    uint64_t end = addr + length, at = addr, n;
    int rc;

    pthread_mutex_lock(&reservation->cuda.lock);
    // With the segment after them, so that a kernel's tile may reach beyond the last page.
    rc = vmem__stock_activate(s, reservation, addr, reservation->backdrop ? length + STOCK_SEGMENT : length);
    if (rc)
        goto unlock;
    for (; !rc && at < end; at += n) {
        n = piece(reservation, at, end);
        rc = put(s, reservation, at, n, after(now, at - addr), after(before, at - addr), keep_fine);
    }
    // As it was, the failed piece too. Where a block is still coarse and taken in part, what stands there is before.
    for (end = at, at = addr; rc && at < end; at += n) {
        n = piece(reservation, at, end);
        put_fine(s, reservation, at, n, after(before, at - addr), after(before, at - addr));
    }
unlock:
    pthread_mutex_unlock(&reservation->cuda.lock);
    return rc;
}
