"""The scheduler's side: a `VllmBudget` around each of vLLM's steps, and a thread for the time between them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pyvmem.engine import control, pool_policy
from pyvmem.engine.budget import check_sizes, take_settings
from pyvmem.engine.control import State
from pyvmem.vllm import check, demand, layout, plugin
from pyvmem.vllm.budget import VllmBudget
from pyvmem.vllm.demand import Demand
from pyvmem.vllm.orders import StepOrders
from pyvmem.vllm.plan import StepPlan, plan_step
from pyvmem.vllm.prefixes import SchedulerPrefixes
from pyvmem.vllm.transfers import Transfers
from pyvmem.vllm.waiting import Pace, paused, stopped, waiting

logger = logging.getLogger("vllm.vmem")

LOOK = 0.05  # seconds between the thread's looks at the control page while no step runs
ASKED = 0.005  # seconds between its looks at requests of the pool's other engines, while no step runs
BUSY = 0.2  # seconds between its looks while steps run: steps look themselves, and a wake-up would delay them
IDLE = 0.3  # seconds without requests after which spare blocks lose their pages
LENT_STEP = 0.005  # seconds that a step takes while requests wait for memory that is lent
GROWTH = 2  # free blocks of each group that are reserved for a running request before others get any
AWAIT = 0.2  # most seconds that a step waits for blocks that are being backed, rather than evict or preempt
COMING = 1.0  # seconds after a request begins in which others are expected
VLLMS_PORT = 8000  # port of a server whose command line names none
GRACE = 10.0  # seconds in which an engine must end after its server has gone
LAUNCH = 0.004  # seconds from the schedule of a step until the device computes it


def drafts_of(vllm_config: Any) -> int:
    """Tokens that a request may have in a step beyond the one that it decodes."""
    return int(getattr(vllm_config, "num_speculative_tokens", 0) or 0)


def least_of(vllm_config: Any, config: Any) -> int:
    """Blocks that a request of the greatest length may need, by vLLM's own sizes for admission.

    With as many, it can run alone, so none waits for ever.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    need = sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
    smallest = min(spec.block_size for spec in specs)
    return int(need + len(specs) * (1 + -(-drafts_of(vllm_config) // smallest)))


def low_of(vllm_config: Any, config: Any) -> int:
    """Blocks that one step may take: in each group, the tokens of a step, and one more for each request."""
    chosen = vllm_config.scheduler_config
    tokens = chosen.max_num_batched_tokens
    low = sum(-(-tokens // g.kv_cache_spec.block_size) for g in config.kv_cache_groups)
    return int(low + chosen.max_num_seqs * len(config.kv_cache_groups))


def _arrival_us(request: Any) -> int:
    """When a request came, in microseconds."""
    return max(int(1e6 * request.arrival_time), 1)


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
    vllm = any(Path(word).name == "vllm" for word in words)  # Ray has a command `serve`, too
    serves = (vllm and "serve" in words) or any(word.endswith("api_server") for word in words)
    return int(named[1]) if named else VLLMS_PORT * serves


def _is_orphan() -> bool:
    """Return whether this is a vLLM engine core whose server or `LLM` has been killed or has crashed."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("EngineCore"):
        return False
    # Processes that the parent forked may keep the pipe open by which `is_alive` learns of its end.
    forked = multiprocessing.get_start_method() != "forkserver"
    return not parent.is_alive() or (forked and os.getppid() != parent.pid)


def _end() -> None:
    """End this process as vLLM's server would have, since nobody can reach it any more. Its memory is freed."""
    logger.error("vMem: the process that started this engine has ended: the engine ends, too")
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
        self.page = page = control.open_page(engine, parallel.data_parallel_index)
        take_settings(page, chosen)
        control.claim(page, _model_of(vllm_config), _port_of_server())
        if not page.shared:
            logger.warning("vMem: this engine's limits cannot change, and no pool sees it: it found no folder that "
                           "is this user's only; set XDG_RUNTIME_DIR to one of mode 0700")  # fmt: skip
        self._neighbours = pool_policy.PoolPeers(page)
        self._last_begin = -COMING  # when a request last began
        self._short = False  # whether requests wait for memory of other engines, and none runs
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        columns = (page.cells[word : word + ranks].tolist() for word in (control.OWN_BLOCK, control.NULL))
        own, null = map(max, columns)  # the largest worker's; 0 before workers have their memory
        block = own or layout.bytes_of(config) // config.num_blocks
        self.transfers = Transfers(scheduler, ranks)
        self.budget = VllmBudget(scheduler.kv_cache_manager, page, block, least=least_of(vllm_config, config),
                             low=low_of(vllm_config, config), ranks=ranks, transfers=self.transfers)  # fmt: skip
        pool = chosen.pool_size or page[control.POOL_BYTES]  # of an existing pool, the workers know the size
        check_sizes(chosen, self.budget.least * block, null, pool, "--max-model-len")
        sizes, drafts = [g.kv_cache_spec.block_size for g in config.kv_cache_groups], drafts_of(vllm_config)
        specs = [type(g.kv_cache_spec).__name__ for g in config.kv_cache_groups]
        plain = specs in (["FullAttentionSpec"], ["MLAAttentionSpec"]) and not drafts
        plain = plain and parallel.decode_context_parallel_size == 1 and scheduler.connector is None
        self.demand = Demand(scheduler, self.budget, sizes, drafts, plain)
        # A step may compute a part of a prompt, unless Mamba states, which are kept where steps end, must be aligned.
        batch, aligned = vllm_config.scheduler_config, scheduler.need_mamba_block_aligned_split
        self._chunks = batch.enable_chunked_prefill and batch.max_num_batched_tokens > demand.CHUNK and not aligned
        self._chunks = self._chunks and self.transfers.parts
        self.budget.adapts = self._chunks
        # In a pipeline, the first device is free before a step ends.
        self.pace = Pace(demand.CHUNK if parallel.pipeline_parallel_size == 1 else sys.maxsize)
        self._tokens = 0  # vLLM's own limit of a step's tokens, while `_limit` has lowered it; else 0
        self._reserves = False  # whether vLLM begins requests only if all their blocks are free, but for this step
        self._split = False  # whether a part of a request could begin
        self._whole = False  # whether all blocks were backed before this step, in which requests run
        self._busy = time.monotonic()  # when a step was last scheduled
        self._keeps = chosen.sleep == "keep"  # whether the prefix cache stays while the model sleeps
        self._stays_paused: bool | None = None  # whether the user had paused the engine before it went to sleep
        self._resets = 0  # resets of the prefix cache that were put off
        self._kept = 0  # the workers' KEPT when the scheduler last went on
        self._prefixes = SchedulerPrefixes(self.budget) if chosen.prefixes else None
        self._stop, self._wake = False, threading.Event()
        threading.Thread(target=self._run_thread, name="vmem-scheduler", daemon=True).start()
        logger.info(
            "vMem: engine %s has %d blocks of %.1f KiB; at least %d are backed, and %d are kept ready for a step",
            engine, self.budget.total, block / 1024, self.budget.least, self.budget.low,
        )  # fmt: skip

    def before_schedule(self) -> None:
        """Before vLLM schedules a step, find out which blocks it needs, order them, and wait for them if that pays."""
        self._busy, self._tokens = time.monotonic(), 0
        self._apply_lend()
        if self._prefixes is not None:
            self._prefixes.look()
        budget, running = self.budget, self._scheduler.running
        self._whole = budget.is_whole() and bool(running)
        if self._whole:
            budget.begin_step()
            self.transfers.begin()
            self._split = False
            return
        self._read_peers()
        if budget.lent or self._short:
            time.sleep(LENT_STEP)  # vLLM asks again and again while requests wait
        budget.refresh()
        grows = budget.grows()
        if budget.lent:
            self.transfers.give_up()
        elif not running and self.transfers.present and not budget.can_grow():
            self.transfers.unblock(lambda first: self.demand.wants(first).rest > budget.num_free())
        wait = waiting(self._scheduler) if grows or not running else []  # skipped where its result is of no use
        loads = self.transfers.loads_next(wait if not running else [])
        plan = StepPlan()
        if grows and (wait or not self.demand.takes_few()):
            plan = plan_step(self.demand.need(wait, self._chunks and not loads), budget.supply())
            self._await(plan)
        budget.prepare_step(plan.orders, plan.awaits, not running and (plan.takes > budget.spare or not wait))
        self.transfers.begin()
        in_vain = self.transfers.in_vain(plan.parts, self._scheduler.scheduler_reserve_full_isl,
                                         lambda new: self.demand.wants(new).rest > budget.num_free())  # fmt: skip
        self._split = plan.parts and budget.spare >= plan.awaits
        if budget.must_wait(plan.awaits) or in_vain or (budget.is_full and not running):
            # Schedule nothing in this step: of `full`, vLLM ignores the watermark. The step still carries the order.
            self._limit(0)
        elif plan.parts and budget.spare < plan.orders <= budget.spare + budget.ordered:
            if plan.takes > budget.spare:
                self._limit(self.demand.fitting_tokens(wait, max(budget.spare - self.demand.margin, 0)))
            self._reserves = self._scheduler.scheduler_reserve_full_isl
            self._scheduler.scheduler_reserve_full_isl = False

    def _await(self, plan: StepPlan) -> None:
        """Wait for the blocks without which a step does not run, and for the others as long as it delays nothing."""
        budget = self.budget
        if plan.awaits > budget.spare:
            self.page[control.WAITED] += int(1e6 * budget.await_blocks(plan.awaits, AWAIT))
        if plan.parts and plan.takes > budget.spare:  # the device is busy meanwhile
            spare = budget.spare
            waited = budget.await_blocks(plan.takes, min(self.pace.left(time.monotonic()) - LAUNCH, AWAIT))
            if waited * (plan.takes - budget.spare) < LAUNCH * (budget.spare - spare):  # the rest may come in time
                budget.await_blocks(plan.takes, LAUNCH)

    def _limit(self, tokens: int) -> None:
        """Have vLLM schedule at most so many tokens in this step."""
        self._tokens = self._scheduler.max_num_scheduled_tokens
        self._scheduler.max_num_scheduled_tokens = min(tokens, self._tokens)

    def restore_limits(self) -> None:
        """Undo `_limit` once vLLM has scheduled, or has failed to."""
        if self._tokens:
            self._scheduler.max_num_scheduled_tokens = self._tokens
        if self._reserves:
            self._scheduler.scheduler_reserve_full_isl, self._reserves = True, False

    def after_schedule(self, output: Any) -> None:
        """Send the orders with a scheduled step. output: vLLM's SchedulerOutput."""
        budget = self.budget
        self.transfers.scheduled(output)
        gone, ahead, order = budget.take_orders()
        if output.preempted_req_ids:
            budget.page[control.PREEMPTED] += len(output.preempted_req_ids)
        if output.scheduled_new_reqs:
            self._last_begin = time.monotonic()
        requests = len(output.num_scheduled_tokens)
        self.demand.scheduled(requests, output.total_num_scheduled_tokens, bool(self._tokens))
        if self._split and not requests and not self._scheduler.running:
            self.transfers.did_not_begin(waiting(self._scheduler))
        position = self.page.cells[control.POSITION]
        prefixes = self._prefixes.orders() if self._prefixes is not None else None
        output.vmem = StepOrders(budget.step, position, gone, ahead, order=order, prefixes=prefixes)
        if requests:
            self.pace.begin(budget.step, output.total_num_scheduled_tokens, time.monotonic())
        if self._whole:
            budget.publish_free()
        else:
            self.publish()

    def step_ended(self, output: Any, answer: Any) -> None:
        """Take note of a step that has ended. answer: vLLM's ModelRunnerOutput."""
        self.transfers.answered(answer)
        if output.num_scheduled_tokens:
            self.pace.end(output.vmem.step, time.monotonic())
        self.requests_ended()

    def requests_ended(self) -> None:
        """Publish at once if the last request has ended: no step may follow, and the pool's other engines may wait."""
        if not self._scheduler.running and not self._scheduler.has_unfinished_requests():
            self.publish()
            self._wake.set()

    def publish(self) -> None:
        """Write to the control page which blocks requests lack and take next, for the workers and other engines."""
        budget, page, near, running = self.budget, self.page.cells, self._neighbours, self._scheduler.running
        if not page[control.POOL]:
            return budget.publish()
        wanted = ahead = head = soon = grow = 0
        if not budget.lent and not stopped(self._scheduler):
            wait = waiting(self._scheduler)
            runs = self.demand.one_each + self.demand.of_prompts()
            grow = self.demand.lacking(runs, [])
            lacks = grow or self.demand.lacking(runs, wait[:1])  # until one more begins
            if lacks:
                head = _arrival_us(running[-1] if grow else wait[0])
            soon = runs + (GROWTH - 1) * self.demand.one_each  # what requests take in the next steps
            if wait and not (near.is_full or (near.is_behind and lacks)):
                soon += self.demand.of_next(wait)
            expected = time.monotonic() < self._last_begin + COMING
            surplus = near.surplus // budget.block_bytes if expected else 0
            if surplus:
                soon = max(soon, budget.ready())  # who asks finds enough elsewhere
            most = max(budget.allowed() - budget.num_backed, 0)
            wanted = min(self.demand.lacking(runs, wait) if near.alone else lacks, most)
            ahead = max(min(self._num_ahead(surplus), most), 0) if surplus else 0
        page[control.HEAD], page[control.AHEAD] = -head if near.is_passing else head, ahead
        page[control.GROWS] = grow > 0
        page[control.STARVED] = head > 0 and len(running) <= 1
        self._short = not running and (head > 0 or near.is_full)
        budget.publish(wanted, near.is_yielding, soon)

    def _num_ahead(self, surplus: int) -> int:
        """Blocks to ask other engines for before requests need them.

        surplus : blocks that others offer beyond those that they keep ready, which engines do not take from each other.
        """
        budget = self.budget
        ready = budget.ready()
        lacks = ready - budget.num_free() - budget.coming
        return min(lacks, surplus) if 4 * lacks > ready else 0

    def _read_peers(self) -> None:
        """Read what the other engines of the pool have and lack."""
        if self.page.cells[control.POOL]:
            near = self._neighbours
            running = self._scheduler.running
            near.look(_arrival_us(running[-1]) if running else 0)
            self.budget.is_behind, self.budget.is_full, self.budget.offers = near.is_behind, near.is_full, near.offers

    def _apply_lend(self) -> None:
        """Lend everything, or end that, as the owner has ordered by LEND."""
        lend, lent = self.page.cells[control.LEND], self.budget.lent
        if lend and not lent:
            self.lend()
        elif lent and not lend:
            self.budget.lent = False  # the next step orders memory

    def pause_state(self, scheduler: Any, asked: Any) -> Any:
        """The state that vLLM's scheduler gets if `asked` is what vLLM wants.

        vLLM pauses an engine that goes to sleep, and resumes it when it wakes. The user may have paused it before, as
        for new weights, and does not know when a server lets its model sleep: then it wakes paused, unless the user has
        resumed it meanwhile. Nothing runs while it sleeps.
        """
        asleep, state = self.page.asleep, self.page.state
        if asked:
            if state == State.CLOSING and self._stays_paused is None:  # another server may order the same sleep again
                self._stays_paused = paused(scheduler)
            return asked
        stays, self._stays_paused = self._stays_paused and state in (State.CLOSING, State.WAKING), None
        return scheduler.pause_state if asleep or stays else asked

    def defers_reset(self, scheduler: Any) -> bool:
        """Put off a reset of the prefix cache until the scheduler goes on, if nothing runs before. True: it is put off.

        vLLM resets the cache whenever it goes to sleep. Only the workers learn whether that was the reason, and at
        which level; they count the sleeps in which they kept the cache. Running requests keep their rows, too, unless
        some lack memory: then all give up theirs, and compute them again later.
        """
        if not self._keeps or not paused(scheduler) or self.page.asleep or self.transfers.is_loading():
            return False
        if scheduler.running and (self.page[control.STARVED] or not stopped(scheduler)):
            return False
        self._resets += 1
        return True

    def resumes(self, scheduler: Any) -> bool:
        """Return whether the scheduler goes on and a reset that was put off is due, because it belonged to no sleep."""
        if paused(scheduler):
            return False
        kept = min(self.page.cells[control.KEPT : control.KEPT + self.budget.ranks])
        due, self._resets, self._kept = self._resets > kept - self._kept, 0, kept
        return due

    def lend(self) -> None:
        """Give up every block. Running requests wait again, and later recompute their rows.

        Steps may be in flight. A streaming session that waits for input keeps its blocks until it ends, because vLLM
        cannot recompute its rows.
        """
        with self.lock:
            running = list(self._scheduler.running)
            # With a connector, results of steps in flight are dropped: one could end a request, and the connector would
            # store its blocks after they have left. vLLM drops them already if it has reset the request meanwhile.
            kept = [r for r in running if not (r.drop_stale_output and r.num_stale_output_tokens)]
            kept = [] if self.transfers.present else kept
            self.transfers.give_up()
            with contextlib.suppress(RuntimeError):  # vLLM raises it if blocks are still in use
                self._scheduler.reset_prefix_cache(reset_running_requests=bool(running))
            for request in kept:  # blocks leave after the steps in flight, so their results are right
                request.drop_stale_output = False
            self.budget.lent = True
            self.budget.between_steps(True)
            self.publish()

    def _wait(self, steps: bool) -> None:
        """Wait until the thread's next look is due or there is something to do. steps: whether steps run."""
        pause = BUSY if steps else LOOK
        # While no step runs, requests of the pool's other engines may wait for the prefix cache of this one.
        look = ASKED if self.page.cells[control.POOL] and not steps else pause
        control.rest(self._wake, pause, look, self.budget.asked)

    def _run_thread(self) -> None:
        failure, steps = "", False
        while True:
            self._wait(steps)
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
                # A step longer than LOOK may be in flight. Workers unback blocks only after it, so it loses none.
                with self.lock:
                    self._apply_lend()
                    self._read_peers()
                    idle = not self._scheduler.has_unfinished_requests()
                    idle = idle and time.monotonic() - self._busy >= IDLE
                    asleep = self.page.asleep
                    self.budget.between_steps(idle or asleep, 0 if asleep else self.budget.floor)
                    if self._prefixes is not None:
                        self._prefixes.look()
                    self.publish()
            except Exception as error:
                if str(error) != failure:  # nothing is lost: the next step does the rest
                    failure = str(error)
                    logger.exception("vMem: the background thread failed, and continues")

    def close(self) -> None:
        """End the thread and remove the control page."""
        self._stop = True
        self._wake.set()
        self.page.unlink()
