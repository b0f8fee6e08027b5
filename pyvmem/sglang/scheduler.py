"""The scheduler's side: a `PageBudget` for each of its allocators, before each of SGLang's steps and between them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from pyvmem.engine import control, pool_policy
from pyvmem.engine.budget import check_sizes, take_settings
from pyvmem.engine.settings import cannot
from pyvmem.sglang import memory, settings
from pyvmem.sglang.budget import News, PageBudget, caches, shares
from pyvmem.sglang.sleep import Sleep
from pyvmem.sleep.sleeper import Sleeper

logger = logging.getLogger("sglang.vmem")

IDLE = 0.3  # seconds without requests after which free pages lose their memory
TEND = 0.005  # seconds between two looks at a pool
COUNT = 0.1  # seconds between two counts of the bytes that are held, without a pool
AWAIT = 10.0  # seconds that the last running request waits for memory of a pool, before SGLang aborts it
NEVER = 1 << 40  # tokens: no request begins


def _came(request: Any) -> int:
    """When a request was first seen here, in microseconds."""
    if not hasattr(request, "_vmem_came"):
        request._vmem_came = int(1e6 * time.time())
    came: int = request._vmem_came
    return came


class Seen(NamedTuple):
    """A message of rank 0 to all ranks, with SGLang's requests, if it tells them something new."""

    drains: bool  # the owner wants everything: requests that run go on to their end, and none begins
    closed: bool  # no request begins
    rests: bool  # none has run for a while
    # The model sleeps, and gives up the rows of its requests: it has slept because it lacked memory for them, or their
    # clients have gone.
    drops: bool
    news: tuple[News, ...]  # for each budget


class SchedulerMemory:
    """The budgets of one of SGLang's schedulers, and its part in a pool.

    Rank 0 reads the control page and the pool, and publishes. The page of every other rank is its own.
    """

    def __init__(self, scheduler: Any) -> None:
        settings.check_scheduler(scheduler)
        chosen, here = settings.read(), memory.here()
        self._scheduler, self.ranks = scheduler, here.ranks
        self.page = page = here.page if here.ranks.leads else control.private_page()
        take_settings(page, chosen)
        self._seen = Seen(False, False, False, False, ())
        self._had: list[int] = []  # pages that were backed in the last step
        self._peers = pool_policy.PoolPeers(page)
        self._tended = self._still = 0.0
        self._starved = False  # whether requests lack memory, or did when the model fell asleep
        self.sleep: Sleep | None = None  # with weights in the pool
        self._sleeper: Sleeper | None = None
        self.budgets = self._make_budgets(scheduler, here)
        scheduler.token_to_kv_pool_allocator._vmem = self
        page[control.RANKS_USED], page[control.PARTS] = len(here.all) * self.ranks.size, len(here.all)
        idle: Any = getattr(scheduler, "idle_sleeper", None)
        if chosen.pool and hasattr(idle, "poller"):  # of --sleep-on-idle: a pool would wait a second for an answer
            poll = idle.poller.poll
            idle.poller.poll = lambda milliseconds: poll(min(milliseconds, int(1000 * TEND)))
        self._agree()
        for budget in self.budgets:
            budget.start()
        here.scheduler, self._sleeper = self, here.sleeper
        self.sleep = Sleep(self, scheduler, here.sleeper, here.page, here.ranks) if here.sleeper is not None else None
        least = sum(k.least * k.block_bytes for k in self.budgets)
        alone = sum(page[control.NULL + i] for i in range(len(self.budgets)))
        check_sizes(chosen, least, alone, page[control.POOL_BYTES], "--context-length")
        args = scheduler.server_args
        control.claim(page, args.served_model_name or args.model_path)
        self.publish()

    def _make_budgets(self, scheduler: Any, here: memory.Memories) -> list[PageBudget]:
        allocator = scheduler.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        kinds = [(allocator, pool)]
        if hasattr(pool, "swa_kv_pool"):
            kinds = [
                (allocator.full_attn_allocator, pool.full_kv_pool),
                (allocator.swa_attn_allocator, pool.swa_kv_pool),
            ]
        if len(kinds) != len(here.all) or not all(hasattr(pool, "_vmem") for _, pool in kinds):
            raise cannot(settings.SWITCH, f"vMem does not know KV pools of kind {type(pool).__name__}")
        if len(kinds) == 1:
            return [PageBudget(scheduler, allocator, pool._vmem, self.page, self.ranks)]
        made = [PageBudget(scheduler, part, own._vmem, control.private_page(), self.ranks, window=i > 0, alone=False)
                for i, (part, own) in enumerate(kinds)]  # fmt: skip
        shares(made, self.page)
        return made

    # ---- SGLang's steps --------------------------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        """Requests run or wait."""
        return bool(self._scheduler.waiting_queue) or self._runs

    @property
    def _runs(self) -> bool:
        """Requests run. With DP attention, steps run without any while other ranks have some."""
        s = self._scheduler
        ran = s.last_batch is not None and not s.last_batch.forward_mode.is_idle()
        return bool(s.running_batch.reqs) or ran or getattr(s, "chunked_req", None) is not None

    def news(self) -> Seen | None:
        """The message that all ranks must have before the next step; None: they know it."""
        now = time.monotonic()
        if self._active:
            self._still = 0.0
        if not self.asleep:
            self._starved = self.page[control.STARVED] > 0
        self._still = self._still or now
        self._look_around()
        drains = bool(self.page.cells[control.LEND])
        closed, rests = drains or self._peers.is_full, now - self._still >= IDLE
        drops = self.asleep and (self._starved or not self.page[control.RUNNING])
        message = Seen(drains, closed, rests, drops, tuple(budget.news() for budget in self.budgets))
        known = all(not n.differs(k.view) for k, n in zip(self.budgets, message.news)) and message[:4] == self._seen[:4]
        return None if known else message

    def see(self, message: Seen | None) -> None:
        """Take for given what rank 0 says."""
        if message is None:
            return
        for budget, news in zip(self.budgets, message.news):
            budget.see(news)
        self._seen = message

    def _agree(self) -> None:
        """See now what rank 0 sees now. Every rank calls this at the same point."""
        self.see(self.ranks.tell(self.news() if self.ranks.leads else None))

    def before(self) -> None:
        """SGLang is about to choose what runs in the next step, if anything does."""
        scheduler, active, idle = self._scheduler, self._active, not self._runs
        if self.ranks.size == 1:  # else it came with the requests
            self.see(self.news())
        for budget in self.budgets:
            budget.lent = self._seen.drains and idle
            if active:
                budget.before()
            else:
                budget.idle(self._seen.rests)
        had, self._had = self._had, [k.num_backed for k in self.budgets]
        if any(now > before for now, before in zip(self._had, had)):
            scheduler.running_batch.batch_is_full = False  # SGLang looks again whether a request fits
        self.page.cells[control.STEP] += active
        self.publish()

    @property
    def asleep(self) -> bool:
        return self.sleep is not None and self.sleep.asleep

    @property
    def rests(self) -> bool:
        """SGLang runs no step until an order comes: the model sleeps, or the engine is paused."""
        return bool(self._scheduler._engine_paused)

    @property
    def drops(self) -> bool:
        """The model sleeps, and is to give up the rows of its requests."""
        return self._seen.drops and self._runs

    def rest(self) -> None:
        """No step runs: give what others ask for. Requests that have begun keep their rows."""
        if self.ranks.size == 1:  # else it came with the requests
            self.see(self.news())
        if self._scheduler.enable_hierarchical_cache:
            self._scheduler.tree_cache.check_hicache_events()  # rows whose copies have ended are free to leave
        for budget in self.budgets:
            budget.lent = self._seen.drains
            budget.idle(True)
        self.publish()

    def flushed(self) -> None:
        """SGLang has flushed its cache."""
        for budget in self.budgets:
            budget.flushed()
        self.publish()

    def ensure(self, tokens: int) -> bool:
        """The allocator needs so many free tokens: back pages rather than to evict what is cached."""
        there = all([budget.ensure(tokens) for budget in self.budgets])
        self._sums()
        return there

    def evicts(self, tokens: int) -> bool:
        """Return whether waiting requests will take so much of the cache anyway that SGLang may evict it now."""
        return all([budget.evicts(tokens) for budget in self.budgets])

    def force(self, tokens: int) -> bool:
        """As `ensure`, above the limit if need be."""
        there = all([budget.force(tokens) for budget in self.budgets])
        self._sums()
        return there

    def await_memory(self, tokens: int) -> None:
        """The last running request lacks tokens, and SGLang would abort it: wait for other members of the pool."""
        end = time.monotonic() + AWAIT
        while (
            not self.ensure(tokens) and self.page[control.POOL] and len(self._scheduler.running_batch.reqs) == 1
            and not self.ranks.tell(time.monotonic() >= end)
        ):  # fmt: skip
            time.sleep(TEND)
            self._agree()
            self.publish()

    def keep_beams(self, tokens: int) -> None:
        """Only groups of beams are left to take these tokens, if so few: they go on above a limit, as chunks do."""
        if self.budgets[0].of_beams() >= tokens:
            self.force(tokens)

    def extend_prefill_budget(self, budget: Any, tree_cache: Any) -> None:
        """SGLang begins a prefill pass: count memory that can still be backed for tokens to come.

        SGLang begins a request only if all its tokens fit, those of its answer included. These may be backed when they
        are there. The tokens of its prompt must be backed before.
        """
        more = min(k.growable() * k.tokens for k in self.budgets)
        budget.total_offset -= more
        promised = max(k.promised for k in self.budgets) * self.budgets[0].tokens
        chunk = self._scheduler.chunked_prefill_size or 0
        budget.current_offset += max(promised - chunk, 0)
        if not caches(tree_cache):
            budget.current_offset -= more  # SGLang reserves answers here, too
        if self._seen.closed:
            budget.total_offset += NEVER
            return
        check, page = budget.check_prefill, self.budgets[0].tokens

        def checked(**asked: Any) -> Any:
            if -(-asked["extend_input_len"] // page) * page + page > budget.remaining_current:
                return False, None
            return check(**asked)

        budget.check_prefill = checked

    # ---- the pool --------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """See what the owner and the other engines of the pool want, and answer."""
        page, running = self.page, self._scheduler.running_batch.reqs
        page[control.BEAT] += 1
        shares(self.budgets, page)
        if page[control.POOL]:
            near, (budget,) = self._peers, self.budgets
            near.look(_came(running[-1]) if running else 0)
            budget.is_behind, budget.offers = near.is_behind, near.offers

    def _tend(self) -> None:
        """Each rank's memory has its own part in the pool of its device."""
        now = time.monotonic()
        if now >= self._tended + (TEND if self.page[control.POOL] or self._sleeper is not None else COUNT):
            self._tended = now
            for budget in self.budgets:
                budget.memory.tend()
            if self._sleeper is not None:
                self._sleeper.publish()

    def _sums(self) -> None:
        """SGLang's own sums, which its leak check compares, are those of the pages that are backed."""
        one = len(self.budgets) == 1
        for budget in self.budgets:
            name = "swa_tokens_per_layer" if budget.window else "full_tokens_per_layer"
            tokens = budget.num_backed * budget.tokens
            # One part is frozen. It divides by the sum of one pool; of two pools, the leak check takes its sums.
            for part, least in ("invariant_checker", 0), ("pool_stats_observer", int(one)):
                object.__setattr__(getattr(self._scheduler, part), "max_total_num_tokens" if one else name,
                                   max(tokens, least))  # fmt: skip

    def publish(self) -> None:
        """Write the numbers of the control page."""
        self._sums()
        if self.ranks.leads:
            self._publish_needs()
        self._tend()

    def _publish_needs(self) -> None:
        page, near, scheduler = self.page, self._peers, self._scheduler
        if len(self.budgets) > 1:
            for budget in self.budgets:
                budget.publish()
            shares(self.budgets, page)
            return
        (budget,) = self.budgets
        running, wanted, head, grow, soon = scheduler.running_batch.reqs, 0, 0, 0, 0
        if page[control.POOL] and not self._seen.drains and not self.rests:
            wait = list(scheduler.waiting_queue[:1])
            grow = budget.lacking([])
            lacks = grow or budget.lacking(wait)
            if lacks:
                head = _came(running[-1] if grow and running else wait[0]) if running or wait else 0
            soon = budget._decodes() + budget.promised
            if wait and not (near.is_full or (near.is_behind and lacks)):
                soon += budget._rest_of(wait[0])
            wanted = min(budget.lacking(budget.waiting) if near.alone else lacks,
                         max(budget.allowed() - budget.num_backed, 0))  # fmt: skip
        page[control.HEAD] = -head if near.is_passing else head
        page[control.GROWS], page[control.STARVED] = grow > 0, head > 0 and len(running) <= 1
        budget.publish(wanted, near.is_yielding and not self.rests, soon)
