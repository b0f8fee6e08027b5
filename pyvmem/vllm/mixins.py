"""The classes of vLLM's that vMem extends: whichever worker and scheduler vLLM or the user chose.

``pyvmem.vllm.mixins.Worker__ENGINE__a__b__C`` is a subclass of ``a.b.C``, made when it is first asked for, in every
process. vLLM's configuration carries the name, and with it the engine's, to its other processes.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pyvmem.engine import control
from pyvmem.sleep.checkpoint import weight_bytes
from pyvmem.vllm import beside, common, plugin

logger = logging.getLogger("vllm.vmem")
_DOT = "__"
_NOTHING = 1e-9  # of a device's memory: vLLM wants more than 0


def name_of(kind: str, engine: str, qualname: str) -> str:
    """The name of a subclass, for vLLM's configuration. Raises ValueError if the class's own name does not allow it."""
    if any(_DOT in part or part.strip("_") != part for part in qualname.split(".")):
        raise ValueError(
            f"VMEM_VLLM=1: rename the class {qualname}: it must not contain {_DOT}, nor begin or end with _"
        )
    return f"{__name__}.{kind}{_DOT}{engine}{_DOT}{qualname.replace('.', _DOT)}"


def engine_of(name: str) -> str | None:
    """The engine's name in the name of a subclass; None if it is another class."""
    return name.removeprefix(f"{__name__}.").split(_DOT)[1] if name.startswith(f"{__name__}.") else None


def _bytes_of_weights(vllm_config: Any) -> int:
    """About the bytes of a worker's weights, by the files of the model; 0 if they are not known."""
    model, load, parallel = vllm_config.model_config, vllm_config.load_config, vllm_config.parallel_config
    if load.load_format == "dummy":
        return 0
    workers: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return weight_bytes(model.model, model.revision, load.download_dir) // workers


@contextlib.contextmanager
def _keeping_torchs_cache() -> Iterator[None]:
    """A block in which nobody empties PyTorch's cache, as vLLM does when it wakes.

    The memory for activations that has just been taken (`Sleeper.wake`) would go. And the driver frees memory only when
    the device is idle: after the copies of the weights.
    """
    modules: tuple[Any, ...] = torch.cuda, torch.accelerator
    own = [(module, module.empty_cache) for module in modules]
    for module in modules:
        module.empty_cache = lambda: None
    try:
        yield
    finally:
        for module, empty_cache in own:
            module.empty_cache = empty_cache


class WorkerMixin:
    """Methods that vMem adds to a worker class of vLLM's."""

    _vmem_engine: str
    _vmem: Any = None
    _vmem_step: Any = None  # vLLM's SchedulerOutput of a step that has not ended
    _vmem_woke = False  # by `vmem_wake`, and `wake_up` follows
    _vmem_queued = False  # `wake_up` need not wait for the copies of the weights

    def _vmem_memory(self) -> Any:
        if self._vmem is None:
            from pyvmem.vllm.worker import WorkerMemory

            self._vmem = WorkerMemory(*self._vmem_place())
        return self._vmem

    def _vmem_place(self) -> tuple[control.Page, int]:
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        return control.open_page(self._vmem_engine, parallel.data_parallel_index), self.rank  # type: ignore[attr-defined]

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            from pyvmem.vllm.worker import Allocation

            return Allocation(self._vmem_memory())
        if tag == "weights" and plugin.settings().weights:
            loading: AbstractContextManager[Any] = self._vmem_memory().weights.loading()
            return loading
        given: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return given

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if not plugin.settings().weights:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            return
        memory, device = self._vmem_memory(), self.device  # type: ignore[attr-defined]
        weights = memory.sleeper(device).weights
        found = common.find(self, weights) if plugin.settings().common else False
        with memory.claim(device, 0 if found else _bytes_of_weights(self.vllm_config)):  # type: ignore[attr-defined]
            if found and common.take(self, weights, lambda: super(WorkerMixin, self).load_model(*args, **kwargs)):  # type: ignore[misc]
                return
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            if device.type == "cpu" or getattr(weights, "is_common", False):  # torch has no pools there
                weights.adopt(self._vmem_models())

    def _vmem_models(self) -> list[torch.nn.Module]:
        runner = self.model_runner  # type: ignore[attr-defined]
        drafter = getattr(getattr(runner, "drafter", None), "model", None)
        return [m for m in (runner.get_model(), drafter) if isinstance(m, torch.nn.Module)]

    def _vmem_write(self) -> None:
        """The weights are about to change: from now on, they are this engine's alone."""
        if self._vmem is not None and getattr(self._vmem.weights, "is_common", False):
            common.part(self, self._vmem.weights)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._vmem_write()
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def reset_weights(self, *args: Any, **kwargs: Any) -> None:
        self._vmem_write()
        super().reset_weights(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self._vmem_has_weights():
            self._vmem.warmed_up()
            # vLLM collects garbage whenever it goes to sleep, and freezes only the engine core's process.
            gc.collect()
            gc.freeze()
        return done

    def init_device(self) -> None:
        """vLLM refuses to start if its part of the device is not free. In a pool, memory comes when it is used."""
        config = self.cache_config  # type: ignore[attr-defined]
        asked = config.gpu_memory_utilization
        if plugin.settings().pool:
            config.gpu_memory_utilization = _NOTHING
        try:
            super().init_device()  # type: ignore[misc]
        finally:
            config.gpu_memory_utilization = asked

    def determine_available_memory(self) -> Any:
        """In a pool, the KV cache may take all of it, unless the user has set its bytes."""
        config, chosen = self.cache_config, plugin.settings()  # type: ignore[attr-defined]
        asked = config.kv_cache_memory_bytes
        if chosen.pool and not asked:
            pool = self._vmem_memory().pool(self.device)  # type: ignore[attr-defined]
            config.kv_cache_memory_bytes = min(pool.budget, chosen.maximum or pool.budget)
        try:
            return super().determine_available_memory()  # type: ignore[misc]
        finally:
            config.kv_cache_memory_bytes = asked

    def get_supported_kv_cache_layouts(self) -> list[str]:
        from pyvmem.vllm import layout

        names: list[str] = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        return layout.preferred(names, self)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        copied = self.vllm_config.kv_transfer_config is not None  # type: ignore[attr-defined]
        self._vmem_memory().expect(kv_cache_config, copied)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._vmem_memory().start(kv_cache_config)
        if (size := plugin.settings().prefixes) and self._vmem.active:
            from pyvmem.vllm import prefix_worker

            self._vmem.prefixes = prefix_worker.start(self, self._vmem, kv_cache_config, size)

    def execute_model(self, scheduler_output: Any) -> Any:
        memory = self._vmem
        if memory is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        self._vmem_end()  # of a step whose tokens were sampled elsewhere
        result = super().execute_model(memory.begin(scheduler_output))  # type: ignore[misc]
        self._vmem_step = scheduler_output
        if result is not None:
            self._vmem_end()
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The second half of a step, if the first returned None: drafts are made here, and write rows."""
        result = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self._vmem_end()
        return result

    def _vmem_end(self) -> None:
        if self._vmem_step is not None:
            self._vmem.end(self._vmem_step)
            self._vmem_step = None

    def sleep(self, level: int = 1) -> None:
        if self._vmem is not None:
            self._vmem.falls_asleep()
        try:
            with beside.away():  # vLLM empties PyTorch's own caches
                super().sleep(level)  # type: ignore[misc]
        except AssertionError:  # vLLM checks last that the device has more free memory than before
            if self._vmem is None or not plugin.settings().pool:
                raise
            logger.info(
                "vMem: another member of the pool took memory while this engine went to sleep, so vLLM's own "
                "check of the free memory does not count"
            )
        if self._vmem is not None:
            self._vmem.sleep(level)  # last: other engines of the pool take this memory at once

    def discard(self, tags: tuple[str, ...]) -> None:
        super().discard(tags)  # type: ignore[misc]
        if self._vmem is not None and "kv_cache" in tags:
            self._vmem.drop()

    def wake_up(self, tags: list[str] | None = None) -> None:
        with beside.away():  # a trainer in this process gives what it does not use
            if self._vmem is not None:  # first: it wakes all or nothing, so that it can be tried again
                if not self._vmem.wake(tags is None or "weights" in tags, tags is None or "kv_cache" in tags):
                    return
            self._vmem_queued, self._vmem_woke = self._vmem_woke, False
            try:
                with _keeping_torchs_cache() if self._vmem_has_weights() else contextlib.nullcontext():
                    super().wake_up(tags)  # type: ignore[misc]
            finally:
                self._vmem_queued = False

    def _vmem_has_weights(self) -> bool:
        return self._vmem is not None and self._vmem.weights is not None

    def synchronize_device(self) -> None:
        """vLLM waits for the device when it wakes. After `vmem_wake` it need not: the first step runs behind the copies
        of the weights, while its blocks get memory and its prefix comes.
        """
        if not self._vmem_queued:
            super().synchronize_device()  # type: ignore[misc]

    def vmem_wake(self) -> bool:
        """Take back what `wake_up` needs, or nothing; the page has the answer. vLLM would log an error's traceback."""
        self._vmem_woke = self._vmem is not None and self._vmem.try_to_wake() is None
        return self._vmem is None or self._vmem_woke

    def vmem_sleep_again(self) -> None:
        """Give up what `vmem_wake` took, as another engine of the server lacks memory."""
        self._vmem_woke = False
        if self._vmem is not None:
            self._vmem.sleep_again()

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self._vmem is not None:
            self._vmem.close()


class SchedulerMixin:
    """Methods that vMem adds to a scheduler class of vLLM's."""

    _vmem_engine: str
    _vmem: Any = None  # a model without a KV cache has none
    _vmem_lock: AbstractContextManager[Any] = contextlib.nullcontext()
    _vmem_beside = False  # whether a trainer is in this process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from pyvmem.vllm.scheduler import SchedulerMemory

        if self.kv_cache_config.kv_cache_tensors:  # type: ignore[attr-defined]
            self._vmem = SchedulerMemory(self, self._vmem_engine)
            self._vmem_lock = self._vmem.lock
            self._vmem_beside = beside.start(self.vllm_config)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        memory = self._vmem
        if memory is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        with memory.lock:
            memory.before_schedule()
            try:
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            finally:
                memory.restore_limits()
            memory.after_schedule(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        with self._vmem_lock:
            outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            if self._vmem is not None:
                self._vmem.step_ended(scheduler_output, model_runner_output)
        self._vmem_rests()
        return outputs

    def _vmem_rests(self) -> None:
        """Without requests, a trainer in this process goes on. Not under the lock: the engine may have to give."""
        if self._vmem_beside and not self.has_unfinished_requests():  # type: ignore[attr-defined]
            beside.enter()

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        if self._vmem_beside:
            beside.leave()
        with self._vmem_lock:
            return super().add_request(*args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self._vmem_lock:
            ended = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
            if self._vmem is not None:
                self._vmem.requests_ended()
        self._vmem_rests()
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        if self._vmem is not None and self._vmem.defers_reset(self):
            return True
        with self._vmem_lock:
            if self._vmem is not None and (kwargs.get("reset_running_requests") or args[:1] == (True,)):
                self._vmem.transfers.give_up()  # vLLM resets running requests, but none that are loaded
            done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
            if self._vmem is not None:
                self._vmem.budget.publish_free()
        return done

    def has_requests(self) -> bool:
        """vLLM pauses when there are none. Before memory may go, transfers end, too."""
        waits = self._vmem is not None and self.pause_state and self._vmem.transfers.is_loading()  # type: ignore[attr-defined]
        return bool(waits) or super().has_requests()  # type: ignore[misc]

    def set_pause_state(self, pause_state: Any) -> None:
        if self._vmem is not None:
            pause_state = self._vmem.pause_state(self, pause_state)
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if self._vmem is not None and self._vmem.resumes(self):
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self._vmem is not None:
            self._vmem.close()


_MIXINS: dict[str, type] = {"Worker": WorkerMixin, "Scheduler": SchedulerMixin}


def __getattr__(name: str) -> type:
    kind, _, rest = name.partition(_DOT)
    engine, _, path = rest.partition(_DOT)
    if kind not in _MIXINS or not path:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    base = resolve_obj_by_qualname(path.replace(_DOT, "."))
    made = type(name, (_MIXINS[kind], base), {"__module__": __name__, "__qualname__": name, "_vmem_engine": engine})
    globals()[name] = made
    return made
