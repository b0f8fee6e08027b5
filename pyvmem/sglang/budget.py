"""The backed pages of an allocator: those in use, in the radix cache or free. Others have no memory.

SGLang's allocator keeps its free pages as a tensor on the device. The budget concatenates pages that are backed, and
slices pages off the end. Both are in stream order, so no step waits for the device; the numbers of what was sliced off
come with an asynchronous copy. Scheduler and model worker share a process, so nothing has to be told to workers.

With tensor parallelism every rank has a budget, and all must decide alike. What differs between ranks, or changes while
they run, is taken from rank 0 (`View`, `News`), and memory is there when every rank has it. The rest is equal on all:
SGLang's schedulers have the same requests, and so the same free lists.

This module does not import SGLang: the scheduler and the allocator are SGLang's own.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from pyvmem.engine import control, pool_policy
from pyvmem.engine.budget import BlockBudget
from pyvmem.engine.control import Page
from pyvmem.engine.packing import PagePacking
from pyvmem.engine.prompts import Prompts
from pyvmem.errors import OutOfMemory
from pyvmem.sglang.memory import KVMemory
from pyvmem.sglang.ranks import Ranks

PART = 512 << 20  # bytes of blocks in one order: what is backed serves before the rest is
KEEP = 64 << 20  # bytes of free blocks at most that an idle engine keeps for the next request
SOME = 8  # blocks beside those of the running requests that are kept ready
MOST_WAITING = 64  # requests that are looked at
PIECE = 16  # least tokens of a prompt that are compared at once
CLIP = 4096  # output tokens of a request that SGLang reserves at most (CLIP_MAX_NEW_TOKENS)


class View(NamedTuple):
    """The state that the budgets of all ranks assume, as rank 0 sees it. Bytes, but for `keeps`."""

    limit: int = control.NO_LIMIT  # the smaller of limit and maximum
    left: int = control.NO_LIMIT  # that others of the pool leave
    room: int = 0  # that nobody in the pool uses
    keeps: int = 0  # pages that are not offered to others
    overhead: int = 0  # as `PagePacking` has measured it
    correction: int = 0  # the same
    is_behind: bool = False  # another engine of the pool comes first
    waits: bool = False  # memory was refused a moment ago


class News(NamedTuple):
    """Changes that have come to rank 0's budget since it looked last."""

    view: View
    answers: tuple[int, ...]  # to orders, as `KVMemory.answer` has them
    num_left: int  # copies of pages that leave, which have come

    def differs(self, view: View | None) -> bool:
        return bool(self.answers or self.num_left or self.view != view)


def caches(tree: Any) -> bool:
    """Return whether requests find in SGLang's cache what others have computed."""
    if hasattr(tree, "supports_prefix_sharing"):
        return bool(tree.supports_prefix_sharing())
    return not tree.is_chunk_cache()  # until 0.5.21


def compare(requests: Sequence[Any], size: int) -> None:
    """Note how many tokens each of these requests begins with as one before it does, in pieces of `size` tokens.

    That is noted once: the request before it may have begun meanwhile.
    """
    if all(hasattr(request, "_vmem_prompt") for request in requests):
        return
    prompts = Prompts()
    for request in requests:
        if not hasattr(request, "_vmem_prompt"):
            ids, before, pieces = request.origin_input_ids, hash((request.extra_key, request.cache_salt)), []
            for at in range(0, len(ids) - size + 1, size):
                before = hash((before, tuple(ids[at : at + size])))
                pieces.append(before)
            request._vmem_prompt, request._vmem_alike = pieces, prompts.add(pieces) * size
        else:
            prompts.add(request._vmem_prompt)


def leading_answers(answers: Iterable[int]) -> tuple[int, ...]:
    """The answers up to the first that has not come."""
    return tuple(itertools.takewhile(lambda answer: answer < 2, answers))


class PageBudget(BlockBudget):
    """Decides which pages of one allocator are backed.

    Parameters
    ----------
    scheduler : sglang.srt.managers.scheduler.Scheduler
    allocator : sglang.srt.mem_cache.allocator.BaseTokenToKVPoolAllocator
    memory : KVMemory
        The pool whose rows the allocator's pages number.
    page : Page
    ranks : Ranks
    window : bool
        The allocator is that of the layers with windows, beside another one.
    alone : bool
        The engine has no other budget.
    """

    def __init__(self, scheduler: Any, allocator: Any, memory: KVMemory, page: Page, ranks: Ranks, *,
                 window: bool = False, alone: bool = True) -> None:  # fmt: skip
        self._scheduler, self._allocator, self.memory = scheduler, allocator, memory
        self.tokens: int = allocator.page_size  # of a page
        self.window, self._alone, self._ranks = window, alone, ranks
        self.view: View | None = None  # a rank that is alone looks whenever it decides
        self._leaving: collections.deque[tuple[Any, Any, int]] = collections.deque()  # copy, event, fence
        self._num_leaving = 0
        self._coming: collections.deque[tuple[int, list[int]]] = collections.deque()  # order, ids
        step = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        least = self._pages(scheduler.max_req_len) + 2
        low = self._pages(step) + SOME
        super().__init__(page, memory.number - 1, memory.block_bytes, least=least, low=low, ranks=ranks.size)
        self.packing = PagePacking(self.total, self.block_bytes, memory.page_bytes)
        self._take_all()

    def start(self) -> None:
        """Have the first pages backed."""
        self._grow(self.ready(), wait=True)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.tokens)

    # ---- SGLang's free list ----------------------------------------------------------------------------------

    @property
    def spare(self) -> int:
        """Pages in the allocator's free list."""
        return int(self._allocator.available_size()) // self.tokens

    @property
    def cached(self) -> int:
        """Pages of the radix cache that no request uses."""
        tree = self._scheduler.tree_cache
        if self._alone:
            return int(tree.evictable_size()) // self.tokens
        return int(tree.swa_evictable_size() if self.window else tree.full_evictable_size()) // self.tokens

    def num_free(self) -> int:
        return self.spare + self.cached

    def free_ids(self) -> Iterable[int]:
        found: list[int] = self._allocator.get_all_free_pages().tolist()
        return found

    @property
    def coming(self) -> int:
        """Pages that are being backed."""
        return sum(len(ids) for _, ids in self._coming)

    @property
    def num_withheld(self) -> int:
        """Pages that SGLang cannot hand out."""
        return super().num_withheld + self._num_leaving

    def moving(self) -> bool:
        return bool(self._coming or self._leaving)

    def ready(self, need: int = 0) -> int:
        """Pages that are kept ready: free ones for the next steps."""
        running = len(self._running)
        return max(min(SOME + 2 * running, self.allowed() // pool_policy.SPARE), need, 1)

    @property
    def _running(self) -> list[Any]:
        batch = getattr(self._scheduler, "running_batch", None)
        return batch.reqs if batch is not None else []

    # ---- rank 0's view, which all ranks adopt ----------------------------------------------------------------

    def news(self) -> News:
        """The changes, on rank 0."""
        answers = (self.memory.answer(order) for order, _ in self._coming)
        there = itertools.takewhile(lambda leaving: leaving[1].query(), self._leaving)
        view, self.view = self.view, None
        self.fit()
        pool, out = self.page.cells[control.POOL], self.packing
        left, room, keeps = (self._left_bytes(), self._room_bytes(), self._keeps) if pool else View()[1:4]
        seen = View(self._limit(), left, room, keeps, overhead=out.page_overhead, correction=out.limit_correction,
                    is_behind=self.is_behind, waits=self.waits())  # fmt: skip
        self.view = view
        return News(seen, leading_answers(answers), sum(1 for _ in there))

    def see(self, news: News) -> None:
        """Take for given what rank 0 has seen."""
        if self._ranks.size > 1:
            self.view = view = news.view
            self.packing.page_overhead, self.packing.limit_correction = view.overhead, view.correction
            self._keeps, self.is_behind = view.keeps, view.is_behind
        for answer in news.answers:
            _, ids = self._coming.popleft()
            if answer:
                self.memory.blocks.unback(ids)
                self.refused(ids)
            else:
                self._give(ids)
        for _ in range(news.num_left):
            copy, event, fence = self._leaving.popleft()
            event.synchronize()  # it may come later here than on rank 0
            self._num_leaving -= len(copy)
            self._left(copy.tolist(), fence)

    def _limit(self) -> int:
        return super()._limit() if self.view is None else self.view.limit

    def _left_bytes(self) -> int:
        return super()._left_bytes() if self.view is None else self.view.left

    def _room_bytes(self) -> int:
        return super()._room_bytes() if self.view is None else self.view.room

    def waits(self) -> bool:
        return super().waits() if self.view is None else self.view.waits

    # ---- what the next step takes ----------------------------------------------------------------------------

    @staticmethod
    def _known(request: Any) -> int:
        """Tokens of a request that are known."""
        return len(request.origin_input_ids) + len(request.output_ids)

    @property
    def promised(self) -> int:
        """Pages that a prompt in chunks still takes. SGLang began it when there was room, and does not look again."""
        request = getattr(self._scheduler, "chunked_req", None)
        if request is None:
            return 0
        done = request.prefix_len if hasattr(request, "prefix_len") else len(request.prefix_indices)  # until 0.5.21
        return self._pages(max(self._known(request) - done, 0)) + 1

    def _decodes(self) -> int:
        """Pages that the running requests may take in the next step."""
        return len(self._running) + self.of_beams(True)

    def of_beams(self, members: bool = False) -> int:
        """Pages that groups of beams take in the next step; members: those beyond the one of each request.

        SGLang ends a group that lacks memory, as it cannot be retracted. It has pages of one token for them.
        """
        groups = [r.beam_group for r in self._running if r.beam_group is not None]
        return sum(group.num_member_rows + (not members) for group in groups)

    def _rest_of(self, request: Any) -> int:
        """Pages that must be free before SGLang begins a request, however much of it the radix cache has."""
        rest = self._known(request)
        if self.window:  # SGLang reserves what the window lets it decode, too
            more = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0)
            rest += min(rest + more, self._scheduler.sliding_window_size or CLIP) + self.tokens
        return self._pages(rest) + 1

    def _reserved_for(self, request: Any) -> int:
        """Pages that SGLang reserves for a request before it begins, for its answer as far as it counts that."""
        answer = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0)
        return self._rest_of(request) + self._pages(min(answer, CLIP)) + 1

    def need(self, steps: int = 1) -> int:
        """Pages that the next steps take: those of running requests, and those of prompts that they may begin."""
        scheduler = self._scheduler
        need = self._decodes() + self.promised
        left = steps * (scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)
        if need and getattr(scheduler, "chunked_req", None) is not None:
            left -= self.promised * self.tokens
        for request in scheduler.waiting_queue[:MOST_WAITING]:
            if left <= 0:
                break
            need += self._rest_of(request)
            left -= self._known(request)
        return need + 2

    def growable(self) -> int:
        return 0 if self.waits() else max(super().growable(), 0)

    # ---- pages in and out ------------------------------------------------------------------------------------

    def _fence(self) -> int:
        """A fence behind every kernel that was given to the device so far."""
        stream = getattr(self._scheduler, "forward_stream", None)
        return self.memory.blocks.record(getattr(stream, "cuda_stream", None))

    def _take_all(self) -> None:
        """No page is backed: the allocator has just put all into its free list."""
        free = self._allocator
        free.merge_and_sort_free()
        self._coming.clear()
        self._leaving.clear()
        self._num_leaving = 0
        self.memory.blocks.unback(range(1, self.total + 1), after=self._fence())
        free.free_pages = free.free_pages[:0]
        self.packing.put(set(range(1, self.total + 1)).difference(self.packing))

    def _give(self, ids: list[int]) -> None:
        free = self._allocator
        more = torch.tensor(ids, dtype=free.free_pages.dtype)
        if free.free_pages.is_cuda:
            more = more.pin_memory().to(free.free_pages.device, non_blocking=True)
        free.free_pages = torch.cat((free.free_pages, more))

    def _back(self, ids: list[int], over: bool) -> bool:
        """Back pages now, all or none, on all ranks. Returns whether there was memory for them."""
        refused = 0
        try:
            self.memory.back(ids, over)
        except OutOfMemory:
            refused = 1
        if self._ranks.most([refused])[0]:
            if not refused:
                self.memory.blocks.unback(ids)
            self.refused(ids)
            return False
        self._give(ids)
        return True

    def refused(self, ids: Iterable[int]) -> None:
        super().refused(ids)
        self.view = self.view and self.view._replace(waits=True)

    def _grow(self, n: int, wait: bool = False, over: bool = False) -> bool:
        """Have up to `n` pages backed. over: whatever the limit is. Returns whether all are there, or on their way."""
        ids = self.packing.take(n, self.total) if over else self._take_unbacked(min(n, self.growable()))
        if not ids:
            return n <= 0
        if wait:
            if not self._back(ids, over):
                return False
            self.page.words[control.STEP_MAPS] += len(ids)
        else:
            part = max(PART // self.block_bytes, 1)
            for at in range(0, len(ids), part):
                some = ids[at : at + part]
                self._coming.append((self.memory.blocks.order(some), some))
        return len(ids) >= n

    def _await_orders(self) -> None:
        """Wait for the pages that are being backed."""
        begin = time.monotonic()
        self.memory.blocks.flush()
        answers = self._ranks.most([self.memory.answer(order) for order, _ in self._coming])
        self.page[control.WAITED] += int(1e6 * (time.monotonic() - begin))
        self.see(News(self.view or View(), leading_answers(answers), 0))

    def _shrink(self, n: int, evict: bool = True) -> None:
        """Take the memory of up to `n` pages: free ones, then the least recently used of the radix cache."""
        if evict and n > self.spare and self.cached:
            self._evict((n - self.spare) * self.tokens)
        free = self._allocator
        free.merge_and_sort_free()
        n = min(n, len(free.free_pages))
        if n <= 0:
            return
        if self.packing.shared:  # the highest numbers leave, so that what stays shares few pages
            free.free_pages = torch.sort(free.free_pages)[0]
        taken, free.free_pages = free.free_pages[-n:], free.free_pages[:-n]
        fence = self._fence()
        if not taken.is_cuda:
            self._left(taken.tolist(), fence)
            return
        copy, event = taken.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record()
        self._leaving.append((copy, event, fence))
        self._num_leaving += n

    def _evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._scheduler.tree_cache.evict(
            EvictParams(num_tokens=0, swa_num_tokens=tokens) if self.window else EvictParams(num_tokens=tokens)
        )

    def _left(self, ids: list[int], fence: int) -> None:
        self.memory.blocks.unback(ids, after=fence)
        self.packing.put(ids)

    # ---- SGLang's steps --------------------------------------------------------------------------------------

    def before(self) -> None:
        """A step is about to be scheduled."""
        if self.is_whole():
            return
        # Pages that running requests and prompts in chunks need next stay, until they have used them.
        if self._obey(self.promised + self._decodes()):
            return
        need = self.need()
        if need > self.num_free() and self._coming:
            self._await_orders()
        if need > self.num_free():
            self._grow(need - self.num_free(), wait=True)
        after = self.need(2) - self.num_free() - self.coming
        if after > 0:  # for the step after this one, while it runs
            self._grow(after)
        elif not self._coming and (lacks := self.lacking(self.waiting)) > SOME:  # cached pages serve until it comes
            self._grow(min(lacks, max(PART // self.block_bytes, 1)))
        ready = self.ready() - self.spare - self.coming
        if 4 * ready > self.ready():  # not a few in each step: a driver's calls disturb the device
            self._grow(ready)

    def _obey(self, kept: int = 0) -> bool:
        """Take out what is above the limit, but for `kept` free pages. Returns whether something is."""
        self._allowed = self.allowed()
        beyond = self.num_backed + self.coming - self._allowed
        if not self._leaving:
            beyond = max(beyond, self._pages_beyond())
        if beyond > 0:
            self._shrink(min(beyond, max(self.num_free() - kept, 0)))
        return beyond > 0

    @property
    def waiting(self) -> Sequence[Any]:
        """The requests that wait, the first ones."""
        found: Sequence[Any] = self._scheduler.waiting_queue[:MOST_WAITING]
        if not self.window and caches(self._scheduler.tree_cache):
            compare(found, max(PIECE, self.tokens))
        return found

    def evicts(self, tokens: int) -> bool:
        """Return whether SGLang may evict for so many tokens: requests will take these pages even if memory comes.

        What a request that waits finds in the radix cache it does not take. SGLang evicts it last, as it is looked up.
        """
        need, comes = self._pages(tokens) - self.spare, self.coming + self.growable()
        if not (0 < need <= self.cached and comes > 0):
            return False
        wait = self.waiting
        lost = self._decodes() + self.promised + sum(map(self._own_of, wait)) - self.spare - comes
        for request in reversed(wait):
            if need > lost:
                return False
            lost -= max(self._found(request) - self._alike(request), 0) // self.tokens
        return need <= lost

    def _found(self, request: Any) -> int:
        """Tokens of a request that the radix cache has."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = request.origin_input_ids + request.output_ids
        key = RadixKey(tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)
        found = self._scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))
        if hasattr(found, "device_prefix_len"):
            return int(found.device_prefix_len)
        return len(found.device_indices)  # until 0.5.21

    def ensure(self, tokens: int) -> bool:
        """The allocator must have so many tokens, or SGLang evicts or retracts. Returns whether it has."""
        need = self._pages(tokens)
        if need > self.spare and self._coming:
            self._await_orders()
        return need <= self.spare or self._grow(need - self.spare, wait=True)

    def force(self, tokens: int) -> bool:
        """As `ensure`, above the limit if need be: SGLang would end if it did not get them."""
        return self.ensure(tokens) or self._grow(self._pages(tokens) - self.spare, wait=True, over=True)

    def idle(self, rest: bool) -> None:
        """No step runs. rest: whether none has run for a while; then free pages leave but for a few."""
        keep = 0 if self.lent else min(KEEP // self.block_bytes, self.ready())
        if self._obey():
            return
        if rest and self.spare > keep:
            self._shrink(self.spare - keep, evict=False)

    def flushed(self) -> None:
        """SGLang has forgotten everything, and put every page into its free list. The memory has gone on return."""
        self._take_all()
        self.memory.empty()

    # ---- what others see -------------------------------------------------------------------------------------

    def _of(self, requests: Sequence[Any]) -> int:
        """Pages that running requests may take in the next step, and the known tokens of these.

        Requests that begin together compute what they begin with alike. Those behind them find it in the radix cache.
        """
        scheduler = self._scheduler
        need, left = self._decodes() + self.promised, scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        for request in requests:
            need += self._rest_of(request) if left > 0 else self._own_of(request)
            left -= self._known(request)
        return need

    def _own_of(self, request: Any) -> int:
        """Pages of a request beside those that it begins with as one before it does."""
        return self._rest_of(request) - self._alike(request) // self.tokens

    def _alike(self, request: Any) -> int:
        return 0 if self.window else int(getattr(request, "_vmem_alike", 0))

    def lacking(self, requests: Sequence[Any]) -> int:
        """Pages that running requests lack, and the known tokens of these.

        SGLang begins the first one only if its answer fits, too. While none runs, nothing else would make room for it.
        """
        most = self.most - self.num_backed
        if most <= 0:  # nobody is looked at where all memory is there
            return 0
        there = self.num_free() + self.coming
        short = self._of(requests) - there
        if requests and not self._running:
            short = max(short, self._reserved_for(requests[0]) - there - self.growable())
        return max(min(short, most), 0)


def shares(budgets: Sequence[PageBudget], page: Page) -> None:
    """Give each budget its part of the engine's limit, and add up what they have. One alone has the page itself."""
    if len(budgets) < 2:
        return
    cells, total = page.cells, sum(k.total * k.block_bytes for k in budgets)
    limit = min(cells[control.LIMIT], cells[control.MAX] or control.NO_LIMIT)
    unit = math.gcd(*(k.block_bytes for k in budgets))
    for budget in budgets:
        part = budget.total * budget.block_bytes / total
        budget.page[control.LIMIT] = limit if limit >= total else int(limit * part)
    cells[control.BLOCK_BYTES] = unit
    for word in (control.BLOCKS, control.LEAST, control.LOW, control.ALLOWED, control.USED, control.CACHED,
                 control.SPARE, control.COMING, control.STEP_MAPS):  # fmt: skip
        cells[word] = sum(k.page[word] * (k.block_bytes // unit) for k in budgets)
    for word in (control.REFUSED, control.WAITED):
        cells[word] = sum(k.page[word] for k in budgets)
    cells[control.LENT] = all(k.page[control.LENT] for k in budgets)
