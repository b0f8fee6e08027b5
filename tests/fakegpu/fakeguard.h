// Where reservations lie, and the memory of others behind them; fakegpu.c includes this, nobody else. On a GPU, the
// ranges that cuMemAddressReserve returns follow each other exactly, and what follows may be anybody's.
//
// SPDX-License-Identifier: MIT

#define SPACE (UINT64_C(1) << 45)
#define GUARD BLOCK
#define GUARD_WORD UINT64_C(0x6775617264696e67)

static uint64_t space;

static uint64_t end_of(const struct reservation *r) { return r->addr + r->size + (r->guard ? GUARD : 0); }

// The lowest free addresses of the space; 0: it has not so many. The caller holds the lock.
static uint64_t space_take(uint64_t bytes)
{
    uint64_t at;
    bool moved;

    if (!space) {
        char *base = mmap(NULL, SPACE + BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (base == MAP_FAILED)
            return 0;
        space = ((uint64_t)base + BLOCK - 1) / BLOCK * BLOCK;
    }
    at = space;
    do {
        moved = false;
        for (const struct reservation *r = reservations; r; r = r->next)
            if (at < end_of(r) && r->addr < at + bytes) {
                at = end_of(r);
                moved = true;
            }
    } while (moved);
    return bytes <= SPACE && at + bytes <= space + SPACE ? at : 0;
}

// Its first and last page have contents.
static uint64_t *guard_word(const struct mapping *m, uint64_t i)
{
    return (uint64_t *)(m->addr + (i < PAGE / 512 ? i * 512 : m->size - PAGE + (i - PAGE / 512) * 512));
}

static void guard_new(struct reservation *r)
{
    struct mapping *m = calloc(1, sizeof(*m));

    *m = (struct mapping){.next = mappings,
                          .addr = r->addr + r->size,
                          .size = GUARD,
                          .access = true,
                          .entry = calloc(GUARD / PAGE, sizeof(uint32_t))};
    for (uint64_t i = 0; i < GUARD / PAGE; i++)
        m->entry[i] = next_entry | 1;
    next_entry += 2;
    place(m->addr, GUARD, PROT_READ | PROT_WRITE, -1, 0);
    for (uint64_t i = 0; i < 2 * PAGE / 512; i++)
        *guard_word(m, i) = GUARD_WORD + i;
    mappings = r->guard = m;
}

static void guard_check(const struct reservation *r)
{
    for (uint64_t i = 0; r->guard && i < 2 * PAGE / 512; i++)
        if (*guard_word(r->guard, i) != GUARD_WORD + i) {
            fprintf(stderr, "fakegpu: the memory of others behind [0x%lx, 0x%lx) has changed at 0x%lx\n", r->addr,
                    r->addr + r->size, (uint64_t)guard_word(r->guard, i));
            abort();
        }
}

// The reservation ends, and all that it had goes back to the space.
static void space_give(struct reservation *r)
{
    struct mapping **at = &mappings;

    guard_check(r);
    nothing_at(r->addr, end_of(r) - r->addr);
    if (r->guard) {
        while (*at != r->guard)
            at = &(*at)->next;
        *at = r->guard->next;
        free(r->guard->entry);
        free(r->guard->kmod);
        free(r->guard);
    }
}

// A test ends.
__attribute__((destructor)) static void guards_check(void)
{
    for (const struct reservation *r = owner == getpid() ? reservations : NULL; r; r = r->next)
        guard_check(r);
}
