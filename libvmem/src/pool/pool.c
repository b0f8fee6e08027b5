// Pools: one budget for several members. This file creates pools, and members join and leave here.
//
// SPDX-License-Identifier: MIT
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "core/memory.h"
#include "pool/pool.h"

#define ARENA (UINT64_C(256) << 20) // small arenas, since device memory goes back a whole arena at a time
#define PAUSE_NS 200000             // between two reads of the table by a call that waits for the members' looks

// ---- pools -------------------------------------------------------------------------------------------------------

// All pools of the process. A forked child closes their files, so that it does not hold the locks that mark members as
// alive. At the fork, threads that the child has not may have held a pool's lock, or waited for news.
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static vmem_kv_pool *pools;

static void before_fork(void) { pthread_mutex_lock(&list_lock); }

static void after_fork(void) { pthread_mutex_unlock(&list_lock); }

static void in_child(void)
{
    for (vmem_kv_pool *p = pools; p; p = p->next) {
        if (p->fd >= 0)
            close(p->fd);
        p->fd = -1;
        pthread_mutex_init(&p->lock, NULL);
        pthread_cond_init(&p->news, NULL);
    }
    vmem__table_forked();
    pthread_mutex_unlock(&list_lock);
}

static void handle_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

// Adds a pool to the list, or removes it and closes its file. A child forked between the two would keep the file open.
static void list_pool(vmem_kv_pool *pool, bool listed)
{
    pthread_once(&once, handle_forks);
    pthread_mutex_lock(&list_lock);
    if (listed) {
        pool->next = pools;
        pools = pool;
    }
    for (vmem_kv_pool **at = &pools; !listed && *at; at = &(*at)->next)
        if (*at == pool) {
            *at = pool->next;
            break;
        }
    if (!listed)
        vmem__table_close(pool);
    pthread_mutex_unlock(&list_lock);
}

static void end_pool(vmem_kv_pool *pool)
{
    const bool ours = pool->pid == getpid();
    if (pool->has_thread && ours) {
        pthread_mutex_lock(&pool->lock);
        pool->stop = true;
        pthread_mutex_unlock(&pool->lock);
        vmem__pool_ring(pool);
        pthread_join(pool->thread, NULL);
    }
    if (pool->budget && ours) {
        pthread_mutex_lock(&pool->lock);
        if (!vmem__table_begin(pool, POOL_WAIT_US)) {
            vmem__table_remove(pool);
            vmem__table_end(pool);
        }
        pthread_mutex_unlock(&pool->lock);
    }
    list_pool(pool, false);
    if (pool->bell >= 0)
        close(pool->bell);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->news);
    free(pool);
}

static void drop_reference(vmem_kv_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    const bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last)
        end_pool(pool);
}

static int start_thread(vmem_kv_pool *pool)
{
    pool->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->bell < 0)
        return vmem__error(-errno, "no eventfd: %s", strerror(errno));
    int rc = vmem__thread_start(&pool->thread, vmem__pool_work, pool);
    pool->has_thread = !rc;
    return rc ? vmem__error(-rc, "no thread for the pool: %s", strerror(rc)) : 0;
}

int vmem_kv_pool_create(const struct vmem_kv_pool_config *cfg, vmem_kv_pool **out)
{
    struct vmem_kv_pool_config c;
    if (!cfg || !out)
        return vmem__error(-EINVAL, "cfg and out must not be NULL");
    int rc = vmem__struct_take(&c, sizeof c, sizeof c, cfg, "cfg");
    if (!rc)
        rc = vmem__check_flags(c.flags, 0);
    if (!rc && !c.budget && !c.path)
        rc = vmem__error(-EINVAL, "budget 0 opens a pool that exists, and needs its path");
    if (!rc && c.budget > MAX_RESERVE)
        rc = vmem__error(-EINVAL, "budget %" PRIu64 " is over 2^46", c.budget);
    if (rc)
        return rc;
    vmem_kv_pool *pool = calloc(1, sizeof(*pool));
    if (!pool)
        return vmem__error(-ENOMEM, "no memory for a pool");
    pool->fd = pool->bell = pool->watch = -1;
    pool->refs = 1;
    pool->pid = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->news, &steady);
    pthread_condattr_destroy(&steady);
    pool->table.head.budget = c.budget;
    list_pool(pool, true);
    if (c.path)
        rc = vmem__table_open(pool, c.path, c.budget);
    if (!rc)
        rc = start_thread(pool);
    if (rc) {
        char why[VMEM__TEXT];
        vmem__keep_error(why);
        drop_reference(pool);
        return vmem__error(rc, "%s", why);
    }
    *out = pool;
    return 0;
}

void vmem_kv_pool_destroy(vmem_kv_pool *pool)
{
    if (pool)
        drop_reference(pool);
}

// ---- members -----------------------------------------------------------------------------------------------------

static int check_device(vmem_kv_pool *pool, const struct vmem_info *info)
{
    const char *where = strcmp(info->backend, "host") ? "gpu" : "host";
    struct pool_head *h = &pool->table.head;
    bool alone = true;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
        alone &= !pool->table.entries[i].size;
    if (alone) {
        memcpy(h->device, info->device_uuid, sizeof(h->device));
        memset(h->backend, 0, sizeof(h->backend));
        memcpy(h->backend, where, strlen(where));
        return 0;
    }
    if (strcmp(h->backend, where) || memcmp(h->device, info->device_uuid, sizeof(h->device)))
        return vmem__error(-EINVAL, "the pool's members are on another device (%s) than this one (%s)", h->backend,
                           info->backend);
    return 0;
}

static int find_place(vmem_kv_pool *pool, uint32_t *place)
{
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        const bool used = pool->table.entries[i].size || pool_owns(pool, i);
        const int rc = used ? -EAGAIN : vmem__table_take_place(pool, i);
        if (rc == -EAGAIN)
            continue;
        *place = i;
        return rc;
    }
    return vmem__error(-ENOSPC, "the pool has %u members, the most that it can have", VMEM_KV_POOL_MEMBERS);
}

// Enters the member's entry; the pages that it already has become its grant. Between begin and end, with all locks
// held.
static int enter_table(vmem_kv_pool *pool, struct vmem__member *m, uint64_t held, const struct vmem_info *device)
{
    struct vmem_info info = {.size = sizeof info};
    int rc = device ? 0 : vmem_context_info(m->ctx, &info);
    if (!rc)
        rc = check_device(pool, device ? device : &info);
    if (!rc)
        rc = vmem__pool_check(pool, VMEM_KV_POOL_MEMBERS, m->entry.min, &m->entry.max);
    if (!rc && held > vmem__pool_free_bytes(pool, NULL))
        rc = vmem__error(-ENOMEM, "the new member holds %" PRIu64 " bytes, and the pool has %" PRIu64 " free", held,
                         vmem__pool_free_bytes(pool, NULL));
    if (!rc)
        rc = find_place(pool, &m->place);
    if (rc)
        return rc;
    m->entry.size = sizeof(m->entry);
    m->entry.pid = (uint32_t)pool->pid;
    // Grant as much of the minimum as is free. The rest of the minimum is due later.
    uint64_t has = MAX(MIN(m->entry.min, vmem__pool_free_bytes(pool, NULL)), held);
    has = MAX(floor_pages(has, m) << m->page_shift, held);
    m->entry.has = has;
    m->entry.held = held;
    m->entry.looked = pool->table.head.revision;
    if (has < m->entry.min) {
        m->entry.needs = m->entry.min - has;
        m->entry.answer = VMEM_KV_DEFERRED;
        m->asked_at = vmem__now();
    }
    return 0;
}

// The members answer questions in the order of the list.
static void enter_list(vmem_kv_pool *pool, struct vmem__member *m)
{
    struct vmem__member **end = &pool->members;
    while (*end && !m->entry.gives_first)
        end = &(*end)->next;
    m->next = *end;
    *end = m;
}

static void leave_list(vmem_kv_pool *pool, const struct vmem__member *m)
{
    struct vmem__member **at = &pool->members;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
}

int vmem__pool_join(vmem_kv_pool *pool, const struct vmem__member_ops *ops, void *self,
                    const struct vmem__member_terms *terms, struct vmem__member **out, uint64_t *budget)
{
    if (pool->pid != getpid())
        return vmem__error(-EPERM, "this pool belongs to process %d, which forked", (int)pool->pid);
    struct vmem__member *m = calloc(1, sizeof(*m));
    if (!m)
        return vmem__error(-ENOMEM, "no memory for a member");
    m->pool = pool;
    m->ops = ops;
    m->self = self;
    m->ctx = terms->ctx;
    m->page_shift = (uint32_t)__builtin_ctzll(terms->page_size);
    m->entry.min = terms->min;
    m->entry.max = terms->max;
    m->entry.gives_first = terms->gives_first;
    strncpy(m->entry.name, terms->name, sizeof(m->entry.name) - 1);
    pthread_mutex_lock(&pool->lock);
    int rc = vmem__table_begin(pool, POOL_CALL_US);
    if (!rc) {
        vmem__table_reap(pool);
        rc = enter_table(pool, m, terms->held << m->page_shift, terms->device);
        if (!rc)
            enter_list(pool, m);
        vmem__table_end(pool);
        if (!rc && m->unwritten) {
            leave_list(pool, m);
            vmem__table_leave_place(pool, m->place, true);
            rc = vmem__table_unwritten(pool);
        }
    }
    if (!rc) {
        pool->refs++;
        *budget = floor_pages(m->entry.has, m);
        vmem__pool_ring(pool);
    }
    bool shared = false; // a member of another kind has the context, too
    for (const struct vmem__member *o = pool->members; o; o = o->next)
        shared |= o->ctx == m->ctx && o->ops != m->ops;
    pthread_mutex_unlock(&pool->lock);
    if (rc) {
        free(m);
        return rc;
    }
    vmem__limit_arenas(m->ctx, ARENA, false);
    if (shared)
        vmem__share_arenas(m->ctx);
    *out = m;
    return 0;
}

void vmem__pool_leave(struct vmem__member *m, uint64_t held)
{
    if (!m)
        return;
    vmem_kv_pool *pool = m->pool;
    m->ops->trim(m->self, false); // entry.has beyond the pages may account for memory that is still in the context
    pthread_mutex_lock(&pool->lock);
    while (m->busy)
        pthread_cond_wait(&pool->news, &pool->lock);
    // The rest becomes free together with the memory: kernels in flight, or a view of a tensor, may keep it.
    m->leaving = true;
    m->entry.has = MIN(m->entry.has, held << m->page_shift);
    m->entry.min = m->entry.needs = m->entry.giving = m->entry.could_give = m->granted = m->to_give =
        m->retained_bytes = 0;
    vmem__pool_retain(m, 0);
    if (!vmem__table_begin(pool, POOL_WAIT_US))
        vmem__table_end(pool);
    vmem__pool_ring(pool);
    pthread_mutex_unlock(&pool->lock);
}

// With the pool's lock held, which this drops. Frees the member.
static void remove_member(struct vmem__member *m)
{
    vmem_kv_pool *pool = m->pool;
    const int rc = vmem__table_begin(pool, POOL_CALL_US);
    leave_list(pool, m);
    // Even if the table cannot be locked, other members then find nobody alive in this place.
    vmem__table_leave_place(pool, m->place, rc == -EBADMSG);
    if (!rc)
        vmem__table_end(pool);
    pthread_cond_broadcast(&pool->news);
    vmem__pool_ring(pool);
    pthread_mutex_unlock(&pool->lock);
    free(m);
    drop_reference(pool);
}

static void end_remnant(struct vmem__remnant *r)
{
    struct vmem__member *m = (struct vmem__member *)((char *)r - offsetof(struct vmem__member, remnant));
    pthread_mutex_lock(&m->pool->lock);
    remove_member(m);
}

void vmem__pool_left(struct vmem__member *m)
{
    if (!m)
        return;
    vmem_kv_pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    while (m->busy)
        pthread_cond_wait(&pool->news, &pool->lock);
    m->remnant.end = end_remnant;
    const uint64_t remain = vmem__outlive_doomed(m->ctx, &m->remnant);
    if (!remain) {
        remove_member(m);
        return;
    }
    m->entry.has = m->entry.held = MIN(m->entry.has, remain);
    if (!vmem__table_begin(pool, POOL_WAIT_US))
        vmem__table_end(pool);
    pthread_mutex_unlock(&pool->lock);
}

uint32_t vmem__pool_wait(struct vmem__member *m, uint32_t ms)
{
    const struct timespec until = vmem__in_ns(ms * UINT64_C(1000000));
    pthread_mutex_lock(&m->pool->lock);
    m->waiting++;
    while (m->entry.answer == VMEM_KV_DEFERRED)
        if (pthread_cond_timedwait(&m->pool->news, &m->pool->lock, &until) == ETIMEDOUT)
            break;
    m->waiting--;
    m->asked_at = vmem__now();
    if (m->entry.answer == VMEM_KV_REFUSED && !m->told_at)
        m->told_at = m->asked_at;
    const uint32_t answer = m->entry.answer;
    pthread_mutex_unlock(&m->pool->lock);
    return answer;
}

// ---- the pool as others see it -----------------------------------------------------------------------------------

// revision, if it is not NULL: of a question for nothing, which this call asks if it is 0. All members look at themselves
// before they answer it, and their answers take their whole entries along.
static int lock_and_refresh(vmem_kv_pool *pool, uint64_t *revision)
{
    if (!pool)
        return vmem__error(-EINVAL, "pool is NULL");
    if (pool->pid != getpid())
        return vmem__error(-EPERM, "this pool belongs to process %d, which forked", (int)pool->pid);
    pthread_mutex_lock(&pool->lock);
    int rc = vmem__table_begin(pool, POOL_CALL_US);
    if (rc) {
        pthread_mutex_unlock(&pool->lock);
        return rc;
    }
    vmem__table_reap(pool);
    if (revision && !*revision) {
        *revision = ++pool->table.head.revision;
        vmem__pool_ring(pool);
    }
    vmem__table_end(pool);
    return 0;
}

int vmem_kv_pool_query(vmem_kv_pool *pool, struct vmem_kv_pool_info *out)
{
    struct vmem_kv_pool_info info = {0};
    int rc = lock_and_refresh(pool, NULL);
    if (rc)
        return rc;
    uint64_t taken = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++) {
        info.members += pool->table.entries[i].size != 0;
        taken = sat_add(taken, pool->table.entries[i].size ? pool->table.entries[i].has : 0);
    }
    info.budget = pool->table.head.budget;
    info.free = sat_sub(info.budget, taken);
    info.revision = pool->table.head.revision;
    pthread_mutex_unlock(&pool->lock);
    return vmem__struct_give(out, &info, sizeof info, "out");
}

int vmem_kv_pool_look(vmem_kv_pool *pool, uint32_t ms)
{
    const uint64_t until = vmem__now() + ms * UINT64_C(1000000);
    uint64_t revision = 0;
    for (;;) {
        const int rc = lock_and_refresh(pool, &revision);
        if (rc)
            return rc;
        bool looked = true;
        for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS; i++)
            looked &= !pool->table.entries[i].size || pool->table.entries[i].looked >= revision;
        pthread_mutex_unlock(&pool->lock);
        if (looked || vmem__now() >= until)
            return 0;
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
}

int vmem_kv_pool_get_members(vmem_kv_pool *pool, struct vmem_kv_pool_member *const *out, uint32_t *found)
{
    struct vmem_kv_pool_member entries[VMEM_KV_POOL_MEMBERS];
    if (!out || !found)
        return vmem__error(-EINVAL, "out and found must not be NULL");
    int rc = lock_and_refresh(pool, NULL);
    if (rc)
        return rc;
    memcpy(entries, pool->table.entries, sizeof entries);
    pthread_mutex_unlock(&pool->lock);
    uint32_t n = 0;
    for (uint32_t i = 0; i < VMEM_KV_POOL_MEMBERS && !rc; i++)
        if (entries[i].size)
            rc = vmem__struct_give(out[n++], &entries[i], sizeof entries[i], "out");
    *found = rc ? 0 : n;
    return rc;
}
