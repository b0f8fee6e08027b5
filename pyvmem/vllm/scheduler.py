"""The scheduler's side: a `VllmBudget` around each of vLLM's steps, and a thread for the time between them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyvmem.engine import control, pool_policy
from pyvmem.engine.budget import check_sizes, take_settings
from pyvmem.vllm import check, layout, plugin
from pyvmem.vllm.budget import VllmBudget
from pyvmem.vllm.orders import AHEAD, Copies, StepOrders
from pyvmem.vllm.waiting import Lookup, Pace, Wants, paused, stopped, waiting

logger = logging.getLogger("vllm.vmem")

LOOK = 0.05  # seconds between looks at the control page while no step runs
ASKED = 0.005  # seconds between looks at what other engines of the pool ask for, while no step runs
BUSY = 0.2  # seconds between looks while steps run: steps look themselves, and a wake-up would delay them
IDLE = 0.3  # seconds without requests after which spare blocks lose their pages
LENT_STEP = 0.005  # seconds that a step takes while requests wait for memory that is lent
GROWTH = 2  # blocks of each group that a request which runs may take before others get what is free
AWAIT = 0.2  # seconds that a step waits for blocks that are being backed rather than to evict or preempt
COMING = 1.0  # seconds after a request for which others are expected
VLLMS_PORT = 8000  # of a server, if its command line names none
GRACE = 10.0  # seconds in which an engine ends whose server has gone
CHUNK = 512  # tokens of prompts that are worth a step of their own while memory for others comes
LAUNCH = 0.004  # seconds from the schedule of a step until the device computes it


def _groups_need(vllm_config: Any, config: Any) -> int:
    """Blocks of the greatest request, by vLLM's own admission sizes."""
    need = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        need += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
    return need


def drafts_of(vllm_config: Any) -> int:
    """Tokens that a request may have in a step beyond the one that it decodes."""
    return int(getattr(vllm_config, "num_speculative_tokens", 0) or 0)


def least_of(vllm_config: Any, config: Any) -> int:
    """Blocks that the greatest request may need at one time: then it can run alone, and nothing waits for ever."""
    groups = len(config.kv_cache_groups)
    smallest = min(g.kv_cache_spec.block_size for g in config.kv_cache_groups)
    return int(_groups_need(vllm_config, config) + groups * (1 + -(-drafts_of(vllm_config) // smallest)))


def low_of(vllm_config: Any, config: Any) -> int:
    """Blocks that one step may take: in each group, the tokens of a step, and one more for each request."""
    chosen = vllm_config.scheduler_config
    tokens = chosen.max_num_batched_tokens
    low = sum(-(-tokens // g.kv_cache_spec.block_size) for g in config.kv_cache_groups)
    return int(low + chosen.max_num_seqs * len(config.kv_cache_groups))


def _came(request: Any) -> int:
    """When a request came, in microseconds."""
    return max(int(1e6 * request.arrival_time), 1)


def _drops(request: Any) -> bool:
    """Return whether vLLM drops what the steps in flight give a request, because it was reset within them."""
    return bool(getattr(request, "drop_stale_output", False) and request.num_stale_output_tokens)


def _model_of(vllm_config: Any) -> str:
    """The name under which a model is served."""
    served = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    return str(served if isinstance(served, str) else served[0])


def _port_of_server() -> int:
    """The port in the command line of the server that started this engine core; 0 if it has none there."""
    parent = multiprocessing.parent_process()
    try:
        words = Path(f"/proc/{parent.pid if parent else 0}/cmdline").read_text(encoding="utf-8").split("\0")
    except (OSError, ValueError):
        return 0
    named = re.search(r"\0--port[=\0]([0-9]{1,5})\0", "\0".join(["", *words, ""]))
    serves = "serve" in words or any(word.endswith("api_server") for word in words)
    return int(named[1]) if named else VLLMS_PORT * serves


def _is_orphan() -> bool:
    """Return whether the server or `LLM` of this engine core has gone without a word, by SIGKILL or a crash."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("EngineCore"):
        return False
    # Processes that the parent forked may keep the pipe open by which `is_alive` learns of its end.
    forked = multiprocessing.get_start_method() != "forkserver"
    return not parent.is_alive() or (forked and os.getppid() != parent.pid)


def _end() -> None:
    """End this process, which nobody can reach any more, as vLLM's own server would. It gives its memory back."""
    logger.error("vMem: the process that started this engine core has gone: it ends")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)  # it waits for a device, or for its workers


class SchedulerMemory:
    """The budget of one scheduler's blocks, its control page and its thread.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
    engine : str
        The engine's name.
    """

    def __init__(self, scheduler: Any, engine: str) -> None:
        vllm_config, config = scheduler.vllm_config, scheduler.kv_cache_config
        parallel, chosen = vllm_config.parallel_config, plugin.settings()
        check.behaviour()
        self.lock = threading.RLock()
        self._scheduler = scheduler
        control.sweep()
        self.page = page = control.open_page(engine, parallel.data_parallel_index)
        take_settings(page, chosen)
        control.claim(page, _model_of(vllm_config), _port_of_server())
        if not page.shared:
            logger.warning("vMem: no folder for control pages is private to this user (XDG_RUNTIME_DIR, or the folder "
                           "for temporary files): this engine's limits cannot change, and no pool sees it")  # fmt: skip
        self._neighbours = pool_policy.PoolPeers(page)
        self._came = -COMING  # when a request last began
        self._short = False  # whether requests wait for other engines, and none runs
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        columns = (page.cells[word : word + ranks].tolist() for word in (control.OWN_BLOCK, control.NULL))
        own, null = map(max, columns)  # of the worker that has the largest blocks, if they are there
        block = own or layout.bytes_of(config) // config.num_blocks
        self._copies = Copies(scheduler, ranks) if scheduler.connector is not None else None
        self.budget = VllmBudget(scheduler.kv_cache_manager, page, block, least_of(vllm_config, config),
                             low_of(vllm_config, config), ranks, self._copies)  # fmt: skip
        pool = chosen.pool_size or page[control.POOL_BYTES]  # that of the pool which the workers have found
        check_sizes(chosen, self.budget.least * block, null, pool, "--max-model-len")
        self._sizes = [g.kv_cache_spec.block_size for g in config.kv_cache_groups]
        self._drafts = drafts_of(vllm_config)
        specs = [type(g.kv_cache_spec).__name__ for g in config.kv_cache_groups]
        plain = specs in (["FullAttentionSpec"], ["MLAAttentionSpec"]) and not self._drafts
        plain = plain and parallel.decode_context_parallel_size == 1
        self._wants = Lookup(scheduler.kv_cache_manager, self._sizes, plain)
        # A step may be part of a prompt, but a state of Mamba is kept where a step ends.
        batch, aligned = vllm_config.scheduler_config, scheduler.need_mamba_block_aligned_split
        self._chunks = batch.enable_chunked_prefill and batch.max_num_batched_tokens > CHUNK and not aligned
        self.budget.adapts = self._chunks
        # In a pipeline, the device that comes first is free before a step ends.
        self.pace = Pace(CHUNK if parallel.pipeline_parallel_size == 1 else sys.maxsize)
        self._tokens = 0  # of a step, if the scheduler was told to schedule less in the last one
        self._whole = False  # whether vLLM was told to begin requests whose blocks are on their way
        self._beyond = 0  # blocks that vLLM seems to want for the first request beyond those that `_need` counts
        self._decodes = False  # whether the last step had no prompt
        self._busy = time.monotonic()
        self._keeps = chosen.sleep == "keep"  # what is cached stays while the model sleeps
        self._resets = 0  # that were put off
        self._kept = 0  # sleeps of the workers' when the scheduler last went on
        self._stop, self._wake = False, threading.Event()
        threading.Thread(target=self._tend, name="vmem-scheduler", daemon=True).start()
        logger.info(
            "vMem: engine %s, %d blocks of %.1f KiB, %d of them always, %d ready for a step", engine,
            self.budget.total, block / 1024, self.budget.least, self.budget.low,
        )  # fmt: skip

    def before(self) -> None:
        """A step is about to be scheduled."""
        self._busy, self._tokens = time.monotonic(), 0
        self._obey()
        self._look_around()
        budget = self.budget
        if budget.lent or self._short:
            time.sleep(LENT_STEP)  # vLLM asks again and again while requests wait
        running, grows = self._scheduler.running, budget.grows()
        wait = waiting(self._scheduler) if grows or not running else []  # a long look, of no use otherwise
        need = whole = must = 0
        early = False
        if grows and (wait or budget.spare < (self._one_each if self._decodes else budget.low)):
            must, whole = self._need(wait, self._scheduler.max_num_scheduled_tokens)
            need = must
            early = self._chunks and budget.can_grow(max(need, whole))
            if early:  # the step waits for blocks that are worth one, and the others come while it runs
                must = min(self._need(wait, self._worthwhile())[0] + self._margin, need)
            elif not running or whole <= budget.low:
                need = must = max(need, whole)  # else the running ones go on meanwhile
        if must > budget.spare and not budget.soon_there(must):
            # Others have to give blocks up first: what is cached here serves meanwhile.
            must, early = self._for_running(), False
        if must > budget.spare:
            self.page[control.WAITED] += int(1e6 * budget.await_blocks(must, AWAIT))
        if early and need > budget.spare:  # as long as no step would begin earlier
            spare = budget.spare
            waited = budget.await_blocks(need, min(self.pace.left(time.monotonic()) - LAUNCH, AWAIT))
            if waited * (need - budget.spare) < LAUNCH * (budget.spare - spare):  # so soon that one part less pays
                budget.await_blocks(need, LAUNCH)
        ahead = self._mapped_ahead() if self._in_slots else 0
        budget.before(max(need, whole, ahead), must, not running and (need > budget.spare or not wait))
        if self._copies is not None:
            self._copies.begin()
        if self._in_slots:
            budget.evict_ahead(min(2 * budget.low, max(budget.ready(), ahead)))
        if budget.must_wait(must) or (budget.full and not running):  # where none runs, vLLM ignores the watermark
            # The order goes out with a step that schedules nothing, as vLLM's own do while it is paused.
            self._limit(0)
        elif early and budget.spare < max(need, whole) <= budget.spare + budget.ordered:
            if need > budget.spare:
                self._limit(self._fitting(wait, max(budget.spare - self._margin, 0)))
            self._whole = self._scheduler.scheduler_reserve_full_isl
            self._scheduler.scheduler_reserve_full_isl = False

    def _limit(self, tokens: int) -> None:
        """Have vLLM schedule so many tokens at most, this time."""
        self._tokens = self._scheduler.max_num_scheduled_tokens
        self._scheduler.max_num_scheduled_tokens = min(tokens, self._tokens)

    def _next(self, wait: list[Any]) -> Iterator[tuple[Any, int, int, Wants | None]]:
        """Yield the work of the next step, in vLLM's order: (request, tokens before, tokens, wants)."""
        for request in self._scheduler.running:
            done = request.num_computed_tokens
            yield request, done, max(request.num_tokens - done, 1), None
        for request in wait:
            wants = self._wants(request)
            yield request, wants.computed, max(request.num_tokens - wants.computed, 1), wants

    def _blocks(self, done: int, tokens: int, wants: Wants | None) -> int:
        """Blocks for so many tokens of a request behind those that are done."""
        blocks = 0
        if wants is None:
            for size in self._sizes:
                blocks += -(-(done + tokens) // size) - -(-done // size)
            return blocks
        for size, found in zip(self._sizes, wants.found):
            blocks += max(-(-(done + tokens) // size) - found, 0)
        return min(blocks, wants.rest)

    def _need(self, wait: list[Any], left: int) -> tuple[int, int]:
        """Blocks that the next step, of `left` tokens, takes at most, and those that must be free for all that begin.

        vLLM begins a request only if all its tokens fit, however many of them the step computes.
        """
        need = whole = 0
        for _, done, tokens, wants in self._next(wait):
            if wants is not None:
                fits = min(wants.rest + self._beyond, self.budget.least)
                whole = max(whole, need + fits + self.budget.watermark)
            need += self._blocks(done, min(tokens, left), wants)
            left -= tokens
            if left <= 0:
                break
        return min(need, self.budget.low), whole

    def _worthwhile(self) -> int:
        """Tokens that are worth a step: of each request that decodes; if none does, so many of prompts."""
        decoding = sum(r.num_tokens - r.num_computed_tokens <= 1 for r in self._scheduler.running)
        return decoding * (1 + self._drafts) or CHUNK

    def _fitting(self, wait: list[Any], blocks: int) -> int:
        """The most tokens for which so many blocks are enough, in vLLM's order."""
        fitting = 0
        for _, done, tokens, wants in self._next(wait):
            taken = self._blocks(done, tokens, wants)
            if taken > blocks:
                less = bisect.bisect_right(range(tokens), blocks, key=lambda n: self._blocks(done, n, wants))
                return fitting + less - 1
            fitting, blocks = fitting + tokens, blocks - taken
        return fitting

    @property
    def _margin(self) -> int:
        """Blocks for drafts, and for tokens that a request leaves to the next one, because it ends."""
        return len(self._sizes) + self._drafts * self._one_each

    def _for_running(self) -> int:
        """Blocks for which the running requests must wait: 0 if there are enough for them, cached ones included."""
        need = self._need([], self._scheduler.max_num_scheduled_tokens)[0]
        return need if need > self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else 0

    @property
    def _one_each(self) -> int:
        """Blocks that the running requests take if each begins one in each group."""
        return len(self._scheduler.running) * len(self._sizes)

    def scheduled(self) -> None:
        """vLLM has scheduled, or failed to."""
        if self._tokens:
            self._scheduler.max_num_scheduled_tokens = self._tokens
        if self._whole:
            self._scheduler.scheduler_reserve_full_isl, self._whole = True, False

    def after(self, output: Any) -> None:
        """A step was scheduled: send the orders with it."""
        budget = self.budget
        if self._copies is not None:
            self._copies.scheduled(output)
        gone, ahead, order = budget.take_orders()
        if output.preempted_req_ids:
            budget.page[control.PREEMPTED] += len(output.preempted_req_ids)
        if output.scheduled_new_reqs:
            self._came = time.monotonic()
        steps = len(output.num_scheduled_tokens)
        # A step that was told to schedule less may have left prompts out.
        self._decodes = not self._tokens and output.total_num_scheduled_tokens <= steps * (1 + self._drafts)
        self._count_beyond(steps)
        position = self.page.cells[control.POSITION]
        coming = [(request.request_id, request.num_tokens, wants.computed) for request, wants in self._coming()]
        output.vmem = StepOrders(budget.step, position, gone, ahead, order, budget.take_evicted(), coming)
        if steps:
            self.pace.begin(budget.step, output.total_num_scheduled_tokens, time.monotonic())
        self.publish()

    def _mapped_ahead(self) -> int:
        """Blocks whose pages slots map ahead: for the next tokens of running requests, and for those that come."""
        each = 1 + -(-2 * AHEAD // self._sizes[0])
        return int(len(self._scheduler.running) * each + sum(wants.rest for _, wants in self._coming()))

    def _coming(self) -> list[tuple[Any, Wants]]:
        """In slots, the requests that the next two steps may begin: their pages are mapped ahead."""
        coming: list[tuple[Any, Wants]] = []
        left = 2 * self._scheduler.max_num_scheduled_tokens
        for request in waiting(self._scheduler) if self._in_slots else ():
            coming.append((request, self._wants(request)))
            left -= request.num_tokens - coming[-1][1].computed
            if left <= 0:
                break
        return coming

    def _count_beyond(self, requests: int) -> None:
        """So many requests were scheduled. If none begins for which there are enough blocks, vLLM wants more for it.

        It also allocates for drafts to come, and for what a cross attention reads. Its rules differ from release to
        release, and none needs more than the greatest request.
        """
        if requests:
            self._beyond = 0
        elif not (self._scheduler.running or self._tokens or self.budget.full):
            wait = waiting(self._scheduler)[:1]
            if wait and self._lacking(0, wait) == 0:
                self._beyond = min(max(2 * self._beyond, 1), self.budget.least)

    def answered(self, output: Any, answer: Any) -> None:
        """A step has ended. answer: vLLM's ModelRunnerOutput."""
        if self._copies is not None:
            self._copies.answered(answer)
        if output.num_scheduled_tokens:
            self.pace.end(output.vmem.step, time.monotonic())
        self.ended()

    def ended(self) -> None:
        """Requests may have ended. If none is there, no step may follow, and neighbours must not wait to learn it."""
        if not self._scheduler.running and not self._scheduler.has_unfinished_requests():
            self.publish()
            self._wake.set()

    @property
    def _in_slots(self) -> bool:
        return bool(self.page.cells[control.ATTACHED] == control.IN_SLOTS)

    def publish(self) -> None:
        budget, page, near, running = self.budget, self.page.cells, self._neighbours, self._scheduler.running
        wanted = ahead = head = soon = grow = 0
        if page[control.POOL] and not budget.lent and not stopped(self._scheduler):
            wait = waiting(self._scheduler)
            runs = self._one_each + self._prompts()
            grow = self._lacking(runs, [])
            lacks = grow or self._lacking(runs, wait[:1])  # until one more begins
            if lacks:
                head = _came(running[-1] if grow else wait[0])
            soon = runs + (GROWTH - 1) * self._one_each  # what requests take in the next steps
            if wait and not (near.full or (near.behind and lacks)):
                soon += self._begin(wait)
            expected = time.monotonic() < self._came + COMING
            surplus = near.surplus // budget.block_bytes if expected else 0
            if surplus:
                soon = max(soon, budget.ready())  # who asks finds enough elsewhere
            most = max(budget.allowed() - budget.num_backed, 0)
            wanted = min(self._lacking(runs, wait) if near.alone else lacks, most)
            ahead = max(min(self._ahead(surplus), most), 0) if surplus else 0
        page[control.HEAD], page[control.AHEAD] = -head if near.passes else head, ahead
        page[control.GROWS] = grow > 0
        page[control.STARVED] = head > 0 and len(running) <= 1
        self._short = not running and (head > 0 or near.full)
        budget.publish(wanted, near.yields, soon)

    def _lacking(self, need: int, wait: list[Any]) -> int:
        """Blocks that are lacking for running requests, which want so many, and for the known rows of these."""
        budget = self.budget
        need += self._begun(wait) + (budget.watermark + self._beyond if wait else 0)
        need -= budget.num_free() + budget.coming
        return max(min(need, budget.most - budget.num_backed), 0)

    def _begun(self, wait: list[Any]) -> int:
        """Free blocks that requests take if they begin. What is cached may be the same for all."""
        wants = list(map(self._wants, wait))
        return sum(w.rest for w in wants) + max((w.cached for w in wants), default=0)

    def _begin(self, wait: list[Any]) -> int:
        """Blocks for those that may begin in the next step."""
        left = self._scheduler.max_num_scheduled_tokens
        for n, request in enumerate(wait, 1):
            left -= request.num_tokens - self._wants(request).computed
            if left <= 0:
                break
        return self.budget.watermark + self._beyond + self._begun(wait[:n])

    def _prompts(self) -> int:
        """Blocks for the rest of the running requests' prompts."""
        if self._decodes:
            return 0
        rests = ((r.num_computed_tokens, r.num_tokens - r.num_computed_tokens) for r in self._scheduler.running)
        return sum(self._blocks(done, rest, None) for done, rest in rests if rest > 0)

    def _ahead(self, surplus: int) -> int:
        """Blocks to ask for before requests need them, while requests come.

        surplus : what others have beyond what they keep ready. So engines do not take that from each other.
        """
        budget = self.budget
        ready = budget.ready()
        lacks = ready - budget.num_free() - budget.coming
        return min(lacks, surplus) if 4 * lacks > ready else 0

    def _look_around(self) -> None:
        """See what the other engines of the pool have and lack."""
        if self.page.cells[control.POOL]:
            near = self._neighbours
            running = self._scheduler.running
            near.look(_came(running[-1]) if running else 0)
            self.budget.behind, self.budget.full, self.budget.offers = near.behind, near.full, near.offers

    def _obey(self) -> None:
        """Lend everything, or stop to, as the owner says."""
        lend, lent = self.page.cells[control.LEND], self.budget.lent
        if lend and not lent:
            self.lend()
        elif lent and not lend:
            self.budget.lent = False  # the next step orders memory

    def defers_reset(self, scheduler: Any) -> bool:
        """Return whether to put off a reset of the prefix cache until the scheduler goes on: no request runs before.

        vLLM resets the cache whenever it goes to sleep. Only the workers learn next whether that was the reason, and at
        which level, and count the sleeps in which they kept what is cached.
        """
        if not self._keeps or not paused(scheduler) or scheduler.running or self.page.asleep:
            return False
        self._resets += 1
        return True

    def resumes(self, scheduler: Any) -> bool:
        """Return whether the scheduler goes on and a reset that was put off is due: all are but those of sleeps."""
        if paused(scheduler):
            return False
        kept = min(self.page.cells[control.KEPT : control.KEPT + self.budget.ranks])
        due, self._resets, self._kept = self._resets > kept - self._kept, 0, kept
        return due

    def lend(self) -> None:
        """Give up every block; running requests go back to the waiting ones, and later compute their rows again.

        It may come while steps are in flight. What a streaming session holds that waits for input leaves when the
        session ends, because vLLM cannot compute its rows again.
        """
        with self.lock:
            running = list(self._scheduler.running)
            # Their tokens may end a request, whose blocks a connector would store when they have gone.
            kept = [r for r in running if not _drops(r)] if self._copies is None else []
            with contextlib.suppress(RuntimeError):  # vLLM's word for blocks that are still in use
                self._scheduler.reset_prefix_cache(reset_running_requests=bool(running))
            for request in kept:  # blocks leave after the steps in flight, so what these give is right
                request.drop_stale_output = False
            self.budget.lent = True
            self.budget.between(True)
            self.publish()

    def _rest(self, steps: bool) -> None:
        """Wait until it is time to look, or until there is something to do. steps: whether steps run."""
        pause = BUSY if steps else LOOK
        # While no step runs, requests of other engines of the pool may wait for what is cached here.
        look = ASKED if self.page.cells[control.POOL] and not steps else pause
        control.rest(self._wake, pause, look, self.budget.asked)

    def _tend(self) -> None:
        failure, steps = "", False
        while True:
            self._rest(steps)
            self._wake.clear()
            if self._stop:
                return
            self.page[control.BEAT] += 1
            if _is_orphan():
                _end()
            try:
                steps = time.monotonic() - self._busy < LOOK and self._scheduler.has_unfinished_requests()
                if steps:
                    continue
                # A step longer than LOOK may be in flight. It loses nothing: workers give up blocks after it.
                with self.lock:
                    self._obey()
                    self._look_around()
                    idle = not self._scheduler.has_unfinished_requests()
                    idle = idle and time.monotonic() - self._busy >= IDLE
                    asleep = self.page.asleep
                    self.budget.between(idle or asleep, 0 if asleep else self.budget.floor)
                    self.publish()
            except Exception as error:
                if str(error) != failure:  # the next step does what was not done
                    failure = str(error)
                    logger.exception("vMem: the background thread failed and goes on")

    def close(self) -> None:
        """The engine ends."""
        self._stop = True
        self._wake.set()
        self.page.unlink()
