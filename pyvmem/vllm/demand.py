"""How many blocks the requests of a vLLM scheduler need: those that run, those that wait, and those of the next step.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pyvmem.engine.prompts import Prompts
from pyvmem.vllm.budget import VllmBudget
from pyvmem.vllm.plan import StepNeed
from pyvmem.vllm.waiting import Lookup, Wants, waiting

Known = tuple[int, int, "Wants | None"]  # of a request: tokens that are computed, tokens to compute, what it wants
CHUNK = 512  # tokens of prompts that are worth a step of their own while memory for more is being backed


class Demand:
    """Counts blocks. A request that waits takes those of its prompt that are not in the prefix cache (`Lookup`).

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
    budget : VllmBudget
    sizes : sequence of int
        Tokens of a block in each group.
    drafts : int
        Tokens that a request may have in a step beyond the one that it decodes.
    plain : bool
        As for `Lookup`.

    Attributes
    ----------
    wants : Lookup
    decodes : bool
        Whether the last step had no prompt.
    """

    def __init__(self, scheduler: Any, budget: VllmBudget, sizes: Sequence[int], drafts: int, plain: bool) -> None:
        self._scheduler, self._budget, self._sizes, self._drafts = scheduler, budget, sizes, drafts
        self.wants = Lookup(scheduler.kv_cache_manager, sizes, plain)
        # A Mamba state is cached where a step ends, and not where prompts differ.
        self._shared = not scheduler.need_mamba_block_aligned_split
        self.decodes = False
        self._beyond = 0  # blocks that vLLM seems to want for the first request beyond those that `_of` counts

    def _in_turn(self, wait: list[Any]) -> Iterator[tuple[Any, Wants]]:
        """Yield what waiting requests want if each begins behind those before it, whose prompts it finds in the cache.

        vLLM caches a block when it schedules a step that computes it.
        """
        prompts = Prompts()
        if wait and self._shared and not self.decodes:
            for request in self._scheduler.running:
                if request.num_tokens - request.num_computed_tokens > 1:
                    self.wants.behind(prompts, request, request.num_computed_tokens)
        for request in wait:
            wants = self.wants(request)
            if self._shared:
                there = self.wants.behind(prompts, request, wants.computed)
                wants = wants if there <= wants.computed else self.wants.with_more(wants, request, there)
            yield request, wants

    def _known(self, wait: list[Any]) -> list[Known]:
        """The tokens to compute that are known, in vLLM's order."""
        known: list[Known] = []
        for request in self._scheduler.running:
            done = request.num_computed_tokens
            known.append((done, max(request.num_tokens - done, 1), None))
        for request, wants in self._in_turn(wait):
            known.append((wants.computed, max(request.num_tokens - wants.computed, 1), wants))
        return known

    def _step(self, wait: list[Any]) -> list[Known]:
        """Those that the next step may compute: no more requests run than vLLM's ``max_num_seqs``."""
        most = self._scheduler.max_num_running_reqs - len(self._scheduler.running)
        return self._known(wait[: max(most, 0)])

    def _blocks(self, done: int, tokens: int, wants: Wants | None) -> int:
        """Blocks for so many tokens of a request behind those that are computed."""
        blocks = 0
        if wants is None:
            for size in self._sizes:
                blocks += -(-(done + tokens) // size) - -(-done // size)
            return blocks
        for size, found in zip(self._sizes, wants.found):
            blocks += max(-(-(done + tokens) // size) - found, 0)
        return min(blocks, wants.rest)

    def _of(self, known: Sequence[Known], left: int) -> tuple[int, int]:
        """Blocks that these take at most in a step of `left` tokens, and those that must be free for all that begin.

        vLLM begins a request only if all its tokens fit, however many of them the step computes.
        """
        need = begins = 0
        for done, tokens, wants in known:
            if wants is not None:
                fits = min(wants.rest + self._beyond, self._budget.least)
                begins = max(begins, need + fits + self._budget.watermark)
                need += self._blocks(done, min(tokens, left), wants)
            elif tokens == 1:  # most of them: it decodes, and seldom begins a block
                for size in self._sizes:
                    need += not done % size
            else:
                need += self._blocks(done, min(tokens, left), None)
            left -= tokens
            if left <= 0:
                break
        return min(need, self._budget.low), begins

    def fitting_tokens(self, wait: list[Any], blocks: int) -> int:
        """The most tokens for which so many blocks are enough, in vLLM's order."""
        fitting = 0
        for done, tokens, wants in self._step(wait):
            taken = self._blocks(done, tokens, wants)
            if taken > blocks:
                less = bisect.bisect_right(range(tokens), blocks, key=lambda n: self._blocks(done, n, wants))
                return fitting + less - 1
            fitting, blocks = fitting + tokens, blocks - taken
        return fitting

    def need(self, wait: list[Any], parts: bool) -> StepNeed:
        """What the next step may use. parts: whether a request may begin with a part of its prompt.

        A step is worth while with the tokens of all decoding requests; if there are none, with CHUNK of a prompt.
        """
        known, most = self._step(wait), self._scheduler.max_num_scheduled_tokens
        running = known[: len(self._scheduler.running)]
        takes, begins = self._of(known, most)
        worthwhile = 0
        if parts:
            decoding = sum(tokens == 1 for _, tokens, _ in running)
            worthwhile = self._of(known, decoding * (1 + self._drafts) or CHUNK)[0] + self.margin

        def missing() -> int:
            lacks = self._of(running, most)[0]
            return lacks if lacks > self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else 0

        return StepNeed(takes, begins, worthwhile, running=bool(running), parts=parts, missing=missing,
                        anyway=lambda evicts, comes: self._take_anyway(wait, evicts, comes))  # fmt: skip

    def _take_anyway(self, wait: list[Any], evicts: int, comes: int) -> bool:
        """Return whether the next cached blocks that vLLM evicts leave even if so many blocks come without contents.

        The known tokens of requests that run or wait take them, and none of these requests finds them.
        """
        known = sum(self._blocks(done, tokens, wants) for done, tokens, wants in self._known(wait))
        return evicts <= known - comes and self.wants.found(wait).isdisjoint(self._budget.evicted_next(evicts))

    def takes_few(self) -> bool:
        """Return whether enough blocks are spare for whatever the running requests do in the next step."""
        return self._budget.spare >= (self.one_each if self.decodes else self._budget.low)

    def lacking(self, need: int, wait: list[Any]) -> int:
        """Blocks that are lacking: running requests need `need`, and waiting ones all blocks of their known tokens."""
        budget = self._budget
        most = budget.most - budget.num_backed
        if most <= 0:  # nobody is looked up where all memory is there
            return 0
        need += self._of_waiting(wait) + (budget.watermark + self._beyond if wait else 0)
        return max(min(need - budget.num_free() - budget.coming, most), 0)

    def _of_waiting(self, wait: list[Any], left: int = sys.maxsize) -> int:
        """Free blocks that waiting requests take when they begin, as far as `left` tokens go.

        They may all share the same cached blocks.
        """
        rest = cached = 0
        for request, wants in self._in_turn(wait):
            rest, cached = rest + wants.rest, max(cached, wants.cached)
            left -= request.num_tokens - wants.computed
            if left <= 0:
                break
        return rest + cached

    def of_next(self, wait: list[Any]) -> int:
        """Blocks for the waiting requests that may begin in the next step."""
        left = self._scheduler.max_num_scheduled_tokens
        return self._budget.watermark + self._beyond + self._of_waiting(wait, left)

    def of_prompts(self) -> int:
        """Blocks for the rest of the running requests' prompts."""
        if self.decodes:
            return 0
        rests = ((r.num_computed_tokens, r.num_tokens - r.num_computed_tokens) for r in self._scheduler.running)
        return sum(self._blocks(done, rest, None) for done, rest in rests if rest > 0)

    @property
    def margin(self) -> int:
        """Additional blocks for drafts, and for tokens that the next request gets when one ends early."""
        return len(self._sizes) + self._drafts * self.one_each

    @property
    def one_each(self) -> int:
        """Blocks that the running requests take if each begins one in each group."""
        return len(self._scheduler.running) * len(self._sizes)

    def scheduled(self, requests: int, tokens: int, limited: bool) -> None:
        """Take note of a scheduled step. limited: its tokens were, so that it may have left prompts out.

        If vLLM has scheduled no request although there seem to be enough blocks for the first one, count more for it.

        vLLM also allocates blocks for later drafts, and for the rows that cross attention reads. Its rules differ
        between releases, but no request needs more than one of the greatest length.
        """
        self.decodes = not limited and tokens <= requests * (1 + self._drafts)
        if requests:
            self._beyond = 0
        elif not (self._scheduler.running or limited or self._budget.is_full):
            wait = waiting(self._scheduler)[:1]
            if wait and self.lacking(0, wait) == 0:
                self._beyond = min(max(2 * self._beyond, 1), self._budget.least)
