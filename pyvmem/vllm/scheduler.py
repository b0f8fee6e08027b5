"""The scheduler's side: a `Keeper` around each of vLLM's steps, and a thread for the time between them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from pyvmem.vllm import check, control, geometry, settings
from pyvmem.vllm.keeper import Keeper
from pyvmem.vllm.orders import StepOrders

logger = logging.getLogger("vllm.vmem")

LOOK = 0.05  # seconds between looks at the control page while no step runs
IDLE = 0.3  # seconds without requests after which spare blocks lose their pages
LENT_STEP = 0.005  # seconds that a step takes while everything is lent
KEEP = 64 << 20  # bytes of spare blocks that an idle engine keeps for the next request


def _groups_need(vllm_config: Any, config: Any) -> int:
    """Blocks of the greatest request, by vLLM's own admission sizes."""
    need = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        need += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
    return need


def least_of(vllm_config: Any, config: Any) -> int:
    """Blocks that the greatest request may need at one time: then it can run alone, and nothing waits for ever."""
    groups = len(config.kv_cache_groups)
    drafts = int(getattr(vllm_config, "num_speculative_tokens", 0) or 0)
    smallest = min(g.kv_cache_spec.block_size for g in config.kv_cache_groups)
    return int(_groups_need(vllm_config, config) + groups * (1 + -(-drafts // smallest)))


def low_of(vllm_config: Any, config: Any) -> int:
    """Blocks that one step may take: the tokens of a step in each group, and one more for each request."""
    chosen = vllm_config.scheduler_config
    tokens = chosen.max_num_batched_tokens
    low = sum(-(-tokens // g.kv_cache_spec.block_size) for g in config.kv_cache_groups)
    return int(low + chosen.max_num_seqs)


class SchedulerMemory:
    """The keeper of one scheduler's blocks, its control page and its thread.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
    engine : str
        The engine's name.
    """

    def __init__(self, scheduler: Any, engine: str) -> None:
        vllm_config, config = scheduler.vllm_config, scheduler.kv_cache_config
        parallel, chosen = vllm_config.parallel_config, settings.read()
        check.behaviour()
        self.lock = threading.RLock()
        self._scheduler = scheduler
        control.sweep()
        self.page = page = control.open_page(engine, parallel.data_parallel_index)
        if chosen.limit is not None:
            page[control.LIMIT] = chosen.limit
        page[control.MIN], page[control.MAX] = chosen.minimum, chosen.maximum
        page[control.PRIORITY] = chosen.priority
        control.claim(page)
        block = geometry.bytes_of(config) // config.num_blocks
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self.keeper = Keeper(scheduler.kv_cache_manager, page, block, least_of(vllm_config, config),
                             low_of(vllm_config, config), ranks)  # fmt: skip
        self._busy = time.monotonic()
        self._stop = threading.Event()
        threading.Thread(target=self._tend, name="vmem-keeper", daemon=True).start()
        logger.info(
            "vMem: engine %s, %d blocks of %.1f KiB, %d of them always, %d ready for a step", engine,
            self.keeper.total, block / 1024, self.keeper.least, self.keeper.low,
        )  # fmt: skip

    def before(self) -> None:
        """A step is about to be scheduled."""
        self._busy = time.monotonic()
        if self.keeper.lent:
            time.sleep(LENT_STEP)  # vLLM asks again and again while requests wait
        if not self._scheduler.running and self._scheduler.has_unfinished_requests() and not self.keeper.circulating:
            self.keeper.wait(0.01)  # nothing can run before memory has come
        self.keeper.before()

    def after(self, output: Any) -> None:
        """A step was scheduled: send the orders with it."""
        keeper = self.keeper
        gone, ahead, order = keeper.take()
        keeper.page[control.PREEMPTED] += len(output.preempted_req_ids or ())
        output.vmem = StepOrders(keeper.step, self.page[control.POSITION], gone, ahead, order)
        keeper.publish()

    def lend(self) -> bool:
        """Give up every block; running requests go back to the waiting ones, and later compute their rows again.

        vLLM must be paused (mode ``keep``), or at least run no step. Returns False if blocks are still in use.
        """
        with self.lock:
            if not self._scheduler.reset_prefix_cache(reset_running_requests=bool(self._scheduler.running)):
                return False
            self.keeper.lent = True
            self.keeper.between(True)
            self.keeper.publish()
        return True

    def _tend(self) -> None:
        failure = ""
        while not self._stop.wait(LOOK):
            try:
                if not self.page[control.LEND] and self.keeper.lent:
                    self.keeper.lent = False  # the next step orders memory
                if time.monotonic() - self._busy < LOOK:
                    continue
                with self.lock:
                    if self.page[control.LEND] and not self.keeper.lent:
                        self.lend()
                    idle = not self._scheduler.has_unfinished_requests()
                    idle = idle and time.monotonic() - self._busy >= IDLE
                    self.keeper.between(idle, KEEP // self.keeper.block_bytes)
                    self.keeper.publish()
            except Exception as error:
                if str(error) != failure:  # the next step does what was not done
                    failure = str(error)
                    logger.exception("vMem: the keeper's thread failed and goes on")

    def close(self) -> None:
        """The engine ends."""
        self._stop.set()
        self.page.unlink()
