# SPDX-License-Identifier: MIT
"""The mutants of mutants.py: one line each of libvmem made wrong, as somebody might write it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, which file (below libvmem/src) has once, becomes `new`; one of the programs must fail."""

    name: str
    file: str
    old: str
    new: str
    programs: str


_M, _U, _P, _R, _A = "core/map.c", "core/unmap.c", "core/page.c", "core/reservation.c", "core/arena.c"
_C, _D, _X, _B, _T = "core/commit.c", "core/data.c", "core/drop.c", "core/batch.c", "core/context.c"
_H, _F, _G = "backend/host/host.c", "backend/host/fork.c", "backend/host/memory.c"

# fmt: off
MUTANTS = [
    Mutant(*fields)
    for fields in [
        # the ends of reservations, leaves and arenas
        ("map runs past the end", _M, "addr > last ||", "addr == last + size ||", "test_map"),
        ("map runs past the end, in the model", _M, "addr > last ||", "addr == last + size ||", "test_model"),
        ("map runs over the leaf's end", _M, "entry == entries_end ||", "", "test_map"),
        ("map of one page past the end", _M, "if (VMEM__UNLIKELY(!s || size > s->b.addr + s->b.length - addr))",
         "if (VMEM__UNLIKELY(!s))", "test_map"),
        ("unmap past the end", _R, "if (!s || length > s->b.addr + s->b.length - addr)", "if (!s)", "test_unmap"),
        ("unmap takes a page that sticks out", _U, "if (cuts_start || step > end - addr)", "if (cuts_start)",
         "test_unmap test_model"),
        ("unmap takes a page cut at its start", _U, "if (cuts_start || step > end - addr)", "if (step > end - addr)",
         "test_unmap test_model"),
        ("a run of unmapping leaves its range", _U, "if (end - entry < granules || *entry", "if (*entry",
         "test_unmap test_model"),
        ("fill past the end", _D, "if (addr < s->b.addr || end > last)", "if (addr < s->b.addr)", "test_access"),
        ("copy from before a reservation", _D, "if (addr < s->b.addr || end > last)", "if (end > last)",
         "test_access"),
        ("lengths wrap around", _D, "if (length > UINT64_MAX - addr)", "if (0)", "test_access"),
        ("the first granule only is looked at", _D, "for (uint64_t at = addr - addr % GRANULE; at < end;",
         "for (uint64_t at = addr - addr % GRANULE; at <= addr;", "test_access"),
        ("space_find is off by one", _R, "if (s->b.addr + s->b.length <= addr)", "if (s->b.addr + s->b.length < addr)",
         "test_map"),
        ("the largest budget rounds up to none", _A, "ctx->budget < MAX_RESERVE ? ctx->budget : MAX_RESERVE",
         "ctx->budget", "test_budget"),
        # marks
        ("map ignores the page's operation id", _M, "if (VMEM__UNLIKELY(p->opid && p->opid != b->opid))", "if (0)",
         "test_busy"),
        ("map continues over a busy page", _M, "p->granules != granules || p->opid ||",
         "p->granules != granules ||", "test_busy"),
        ("unmap ignores the page's operation id", _U, "if (p->opid && p->opid != b->opid)", "if (0)", "test_busy"),
        ("release continues over a busy page", _U, "|| p->opid ||\n            p->mappings",
         "||\n            p->mappings", "test_busy"),
        ("undo leaves the pages' operation ids", _M, "        if (p->state == GRANULE_PAGE)\n            p->opid = 0;\n"
         "        struct vmem__leaf", "        struct vmem__leaf", "test_map test_failures"),
        ("undo leaves the entries", _M, "        *entry = vmem__entry_frame(*entry);\n", "", "test_map test_failures"),
        ("a failed unmap leaves its marks", _U, "*entry &= ~ENTRY_PENDING;", "", "test_failures"),
        ("nothing looks at copies in flight", _B, "VMEM__UNLIKELY(b->ctx->accesses) ?", "0 ?", "test_busy"),
        ("a read is not marked", _D, "(!a->fill && meets(", "(0 && meets(", "test_busy"),
        ("a copy begins beside an unmap", _D, "if (entry & ENTRY_PENDING)", "if (0)", "test_busy"),
        ("a reservation goes under a call", _R, "if (!rc && s->inflight)", "if (0)", "test_busy"),
        ("destroy does not wait", _T, "while (ctx->calls)", "while (0)", "test_busy"),
        # batches
        ("a mapping page is not linked", _M, "                link_page(ctx, addr, p);\n", "", "test_map"),
        ("an aliased page continues a release", _U, "p->mappings != mappings ||", "",
         "test_release test_model"),
        ("decommit continues over an alias", _U, "|| (single && p->mappings != 1))", ")", "test_ownership"),
        ("decommit forgets other addresses", _U, "whole && !only ? mark_page", "0 ? mark_page", "test_ownership"),
        ("an unmapped page is not released", _U, "        finish_loose(&b, pages, marked, !rc);\n", "        (void)loose;\n", "test_create"),
        ("a page twice in a release", _U, "    if (p->opid == b->opid)\n        return", "    if (0)\n        return",
         "test_release"),
        ("no element is named", _B, "*op = b->runs[bad < b->n ? bad : 0].op;", "*op = 0;", "test_failures"),
        ("a replaced page stays linked", _M, "        unlink_page(ctx, addr, old);\n", "", "test_replace test_model"),
        ("replacing cuts a page", _M, "u + old->granules > granules)", "0)", "test_replace test_model"),
        # pages that go
        ("bound pages stay when unmapped", _U, "VMEM__UNLIKELY(p->bound && !p->mappings)", "0", "test_ownership"),
        ("bound pages go with an alias", _U, "VMEM__UNLIKELY(p->bound && !p->mappings)", "p->bound", "test_ownership"),
        ("bound pages stay when replaced", _M, "if (p->state == GRANULE_PAGE && p->bound && !p->mappings)", "if (0)",
         "test_ownership"),
        ("pages that change places go", _M, "if (p->state == GRANULE_PAGE && p->bound && !p->mappings)",
         "if (p->state == GRANULE_PAGE && p->bound)", "test_ownership"),
        ("created pages are bound", _P, "p->bound = (flags & VMEM__CREATE_BOUND) != 0;", "p->bound = 1;", "test_ownership test_map"),
        ("nothing is swept", _X, "while (ctx->n_doomed && !ctx->stuck &&", "while (0 &&", "test_busy"),
        ("an unreservation is not forced", _X, "        return force(ctx, s);\n", "        return false;\n",
         "test_failures"),
        ("forced: bound pages stay", _X, "        if (p->bound && !p->mappings)\n", "        if (0)\n",
         "test_failures"),
        ("forced: the lists keep the addresses", _X, "        unlink_page(ctx, addr, p);\n", "", "test_failures"),
        ("drop gives up at the first failure", _X, "        if (rc && rc != -EINVAL)\n            doom(",
         "        if (0)\n            doom(", "test_busy test_failures"),
        # handles
        ("handles are not salted", _T, "ctx->salt = new_salt();", "ctx->salt = FRAME_END;", "test_ownership"),
        ("generations end with the arena", _A, "ctx->blocks[at + i].generation = generation;", "", "test_create"),
        # memory and the budget
        ("the budget is off by a page", _P, "    vmem__limit(ctx, bytes);", "    vmem__limit(ctx, bytes), ctx->limit += GRANULE;",
         "test_budget"),
        ("the device's size is no limit", _T, "        vmem__limit(ctx, opts->budget);",
         "        vmem__limit(ctx, opts->budget), ctx->limit = UINT64_MAX;",
         "test_budget test_create"),
        ("what is left of a call goes elsewhere", _P, "        part->near = out[-1];\n", "        part->near = 0;\n",
         "test_create"),
        ("memory is committed beside free memory", _A, "if (!a->pages[first].committed && ctx->free[true].nonempty)",
         "if (0)", "test_create"),
        ("commit does not look first", _C, "        if (!rc && *found)\n            rc = vmem__check_room",
         "        if (0)\n            rc = vmem__check_room", "test_budget"),
        ("a failed create stays in the books", _P, "    ctx->created -= (n - done) * page_size;\n", "",
         "test_failures"),
        ("a failed create keeps its first part", _P, "        vmem_drop(ctx, pages, done);", "        (void)0;",
         "test_create test_interrupt"),
        ("a commit builds on one that may fail", _C, "p->doomed || may_go(ctx, self, addr)", "p->doomed", "test_commit"),
        ("a commit builds on what is to go", _C, "p->doomed || may_go(ctx, self, addr)", "may_go(ctx, self, addr)",
         "test_busy"),
        ("a commit that is over still counts", _C, "    delist(ctx, &self);\n", "    (void)delist;\n", "test_commit"),
        ("prealloc takes all there is", _P, "} else if (bytes > ctx->b.info.memory_total ||", "} else if (0 &&",
         "test_budget"),
        ("drop loses the error before it", _X, "        if (rc && rc != -EINVAL)\n            doom(ctx, pages[i], rc != -EBUSY);\n"
         "    }\n    vmem__error(0, \"%s\", text);", "        if (rc && rc != -EINVAL)\n            doom(ctx, pages[i], rc != -EBUSY);\n"
         "    }", "test_busy"),
        ("all memory there is may be taken", _H, "const uint64_t stays = own + h->populating", "const uint64_t stays = own - own",
         "test_host_memory"),
        ("any lack of addresses is one of mappings", _H, "return reserve_error(-errno, r->length);",
         "return map_error(-errno, \"length: mmap\");", "test_reserve"),
        ("a reservation waits for another one's sweep", _X, "        if (!s->inflight)\n            end_reservation(ctx, s);\n",
         "", "test_busy"),
        ("a failed commit keeps what it made", _C, "        undo(ctx, &pages, rc);\n", "        (void)undo;\n",
         "test_failures test_interrupt"),
        ("an interrupt is not asked for", _P,
         "        if (!rc && *done < length)\n            rc = vmem__interrupted(b);\n", "", "test_interrupt"),
        ("an interrupted call's memory stays", _A, "    vmem__shrink(ctx);\n    ctx->shrinking = false;",
         "    ctx->shrinking = false;", "test_interrupt"),
        ("an interrupted piece keeps its memory", _P, "if (!p->committed && (i < done - 1 || length))",
         "if (!p->committed && i < done - 1)", "test_interrupt"),
        ("dirty granules are not zeroed", _P, "granule[end].dirty;)", "0;)", "test_create test_model"),
        ("extents are not joined", _A, "    extent_link(ctx, a, first, granules, committed);\n}\n\n// How many",
         "    extent_link(ctx, a, first, 1, committed);\n}\n\n// How many", "test_create test_model"),
        ("prealloc(0) keeps", _P, "        return vmem_trim(ctx, NULL);\n", "        return 0;\n", "test_budget"),
        ("trim keeps what prealloc took", _P, "    ctx->keep = ahead ? ctx->created + ahead : 0;\n", "", "test_budget"),
        # the host backend
        ("an undo maps the new page", _H, "unmap ? r->arena : r->old_arena, unmap ? r->offset : r->old_offset);",
         "r->arena, r->offset);", "test_map_limit"),
        ("a batch that fails is not undone", _H, "    while (rc && done--)\n        undo",
         "    while (0)\n        undo", "test_map_limit"),
        ("no ballast", _H, "    ballast_take(h);\n    h->cgroup", "    h->cgroup", "test_map_limit"),
        ("a refused munmap is forgotten", _H, "        h->lost = l;\n", "        free(l);\n", "test_reserve"),
        ("a child's mappings stay shared", _F, "if (files && !see_all())", "if (0)", "test_fork"),
        ("a child without descriptors may write", _F, "        forbid();\n", "        (void)forbid;\n", "test_fork"),
        ("a child keeps its parent's file", _F, "        close(f->fd);\n        f->fd = -1;\n", "        ;\n", "test_fork"),
        ("a child reads at the wrong offset", _F, "fd, (off_t)m->offset)", "fd, 0)", "test_fork"),
        ("no descriptor is no limit", _G, "    return vmem__error(-errno, \"%s: %s\", path, strerror(errno));\n",
         "    return 0;\n", "test_host_memory"),
        ("the page cache counts as used", _G, "used -= cache < used ? cache : used;", "(void)cache;",
         "test_host_memory"),
        # the KV cache
        ("shared pages are released", "kv/refs.c", "    if (found)\n        return found;\n",
         "    if (0)\n        return found;\n",
         "test_kv_sharing test_kv_model"),
        ("a row's entry moves behind its place", "kv/refs.c", "& mask) >= ((i - hole) & mask)) {",
         "& mask) < ((i - hole) & mask)) {", "test_kv_sharing test_kv_model"),
        ("a cut stays in the books", "kv/pages.c", "    kv->held -= c->n_pages;\n", "", "test_kv_steps test_kv_model"),
        ("protected pages may be taken", "kv/reclaim.c", "if (sp->lo < sp->keep_lo) {", "if (sp->lo < sp->hi) {",
         "test_kv_model test_kv_steps"),
        ("a slot is dirty by what it has backed", "kv/slots.c", "VMEM_KV_ZERO && has_pages(kv, slot);",
         "VMEM_KV_ZERO && s->backed;", "test_kv_corners"),
        ("kept pages are not cleared", "kv/slots.c", "kv->flags & VMEM_KV_ZERO && has_pages(kv, slot);", "false;",
         "test_kv_model"),
        ("a failed attach leaves rows", "kv/prefix.c", "dirty |= (kv->flags & VMEM_KV_ZERO) != 0;", "dirty |= false;",
         "test_kv_failures"),
        ("rows that others read are written", "kv/plan.c", "if (vmem__kv_others_read(kv, slot, (uint32_t)tokens))", "if (0)",
         "test_kv_corners"),
        ("a fence writes what others read", "kv/fence.c", " || vmem__kv_others_read(kv, slot, tokens);", ";",
         "test_kv_corners"),
        ("rows are copied under kernels", "kv/swap_after.c", "    idle->ends = step;", "    idle->ends = 0;",
         "test_kv_swap_after"),
        ("a slot that is freed still waits", "kv/slots.c", "    kv->n_ending -= waits;\n", "", "test_kv_swap_after"),
        ("a copy forgets how far it came", "kv/swap_after.c", "        idle->copied = to;\n", "        idle->copied = idle->size;\n",
         "test_kv_swap_after"),
        ("a refused step retires", "kv/step.c", "        if (rc)\n            return rc;\n    }\n    vmem__kv_may",
         "        if (rc)\n            break;\n    }\n    vmem__kv_may", "test_kv_swap_after"),
        ("a fence is a step early", "kv/step.c", "kv->step - kv->steps_in_flight : 0);", "kv->step - kv->steps_in_flight + 1 : 0);",
         "test_kv_swap_after"),
        ("a block is attached twice", "kv/block.c", "if (!rc && first->mark == kv->mark)", "if (0)", "test_kv_corners"),
        ("a copy asks the device once", "kv/prefix.c", "rc == -ENOMEM && !vmem__kv_make_device_room(kv, g->n, NULL)", "0",
         "test_kv_corners"),
        ("a lazy cache takes its neighbour's", "kv/memory.c", "return !some || kv->held + pages <= vmem__kv_limit(kv, pages);",
         "(void)some; return true;", "test_kv_corners"),
        ("an old cut is counted", "kv/pages.c", "    c->before = (struct kv_span){0}; // no span is cut\n", "",
         "test_kv_races"),
    ]
]
# fmt: on
