"""The classes of vLLM's that vMem extends: whichever worker and scheduler vLLM or the user chose.

``pyvmem.vllm.doors.Worker__ENGINE__a__b__C`` is a subclass of ``a.b.C``, made when it is first asked for, in every
process. vLLM's configuration carries the name, and with it the engine's, to its other processes.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from pyvmem.engine import control

_DOT = "__"


def name_of(kind: str, engine: str, qualname: str) -> str:
    """The name of a subclass, for vLLM's configuration. Raises ValueError if the class's own name does not allow it."""
    if any(_DOT in part or part.strip("_") != part for part in qualname.split(".")):
        raise ValueError(f"VMEM_VLLM=1: the class {qualname} must have a name without {_DOT} and outer underscores")
    return f"{__name__}.{kind}{_DOT}{engine}{_DOT}{qualname.replace('.', _DOT)}"


def engine_of(name: str) -> str | None:
    """The engine's name in the name of a subclass; None if it is another class."""
    return name.removeprefix(f"{__name__}.").split(_DOT)[1] if name.startswith(f"{__name__}.") else None


class WorkerDoor:
    """What vMem adds to a worker of vLLM's."""

    _vmem_engine: str
    _vmem: Any = None
    _vmem_step: Any = None  # vLLM's SchedulerOutput of a step that has not ended

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
        given: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return given

    def get_supported_kv_cache_layouts(self) -> list[str]:
        from pyvmem.vllm import layout

        names: list[str] = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        return layout.preferred(names, self)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        from pyvmem.vllm import slots

        made = slots.choose(kv_cache_config, self, self._vmem_place)
        if made is None:
            self._vmem_memory().expect(kv_cache_config)
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        else:  # to the model runner, slots are a cache with more blocks
            self._vmem, config = made
            super().initialize_from_config(config)  # type: ignore[misc]
            self.model_runner.kv_cache_config.num_blocks = kv_cache_config.num_blocks  # type: ignore[attr-defined]
            self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks  # type: ignore[attr-defined]
        self._vmem_memory().start(kv_cache_config)

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

    def execute_dummy_batch(self) -> None:
        if self._vmem is not None:
            self._vmem.dummy()
        super().execute_dummy_batch()  # type: ignore[misc]

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)  # type: ignore[misc]
        if self._vmem is not None:
            self._vmem.sleep()  # last: vLLM fails if the device has less free memory then, and neighbours take this

    def discard(self, tags: tuple[str, ...]) -> None:
        super().discard(tags)  # type: ignore[misc]
        if self._vmem is not None and "kv_cache" in tags:
            self._vmem.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self._vmem is not None and (tags is None or "kv_cache" in tags):
            self._vmem.wake()  # first: it wakes all or nothing, so that it can be tried again
        super().wake_up(tags)  # type: ignore[misc]

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self._vmem is not None:
            self._vmem.close()


class SchedulerDoor:
    """What vMem adds to a scheduler of vLLM's."""

    _vmem_engine: str
    _vmem: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from pyvmem.vllm.scheduler import SchedulerMemory

        if self.kv_cache_config.kv_cache_tensors:  # type: ignore[attr-defined]
            self._vmem = SchedulerMemory(self, self._vmem_engine)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        memory = self._vmem
        if memory is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        with memory.lock:
            memory.before()
            try:
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            finally:
                memory.scheduled()
            memory.after(output)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        if self._vmem is None:
            return super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        with self._vmem.lock:
            outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
            self._vmem.ended()
        return outputs

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        if self._vmem is None:
            return super().add_request(*args, **kwargs)  # type: ignore[misc]
        with self._vmem.lock:
            return super().add_request(*args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        if self._vmem is None:
            return super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        with self._vmem.lock:
            ended = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
            self._vmem.ended()
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        if self._vmem is None:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        with self._vmem.lock:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self._vmem is not None:
            self._vmem.close()


_DOORS: dict[str, type] = {"Worker": WorkerDoor, "Scheduler": SchedulerDoor}


def __getattr__(name: str) -> type:
    kind, _, rest = name.partition(_DOT)
    engine, _, path = rest.partition(_DOT)
    if kind not in _DOORS or not path:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    base = resolve_obj_by_qualname(path.replace(_DOT, "."))
    made = type(name, (_DOORS[kind], base), {"__module__": __name__, "__qualname__": name, "_vmem_engine": engine})
    globals()[name] = made
    return made
