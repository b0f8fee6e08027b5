"""One KV cache on every rank of a tensor-parallel model: rank 0 decides, and the other ranks repeat its calls.

Rank 0 has the scheduler. It asks its own cache by dry steps, makes its calls through `Ranks`, and sends
them once for each iteration. The other ranks make the same calls in the same slots, as in vLLM and SGLang.
What rank 0 finds possible is possible everywhere, because the caches have the same shape and the smallest budget of any
rank, and hold this memory from the start. Copy the class into an engine, and add the calls that it needs.

    python -m torch.distributed.run --nproc-per-node 2 examples/ranks.py [--device cuda]

SPDX-License-Identifier: MIT
"""

import argparse
import math
import os
from typing import Any

import torch
import torch.distributed as dist

from pyvmem.kv.cache import KVCache
from pyvmem.kv.types import Run


class Ranks:
    """The calls of a `KVCache` that change it, on every rank of a group.

    Parameters
    ----------
    cache : KVCache
        This rank's, of the same shape and options on every rank; made by `init_cache`.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share a model. A gloo group never waits for a GPU.

    Attributes
    ----------
    cache : KVCache
        Rank 0 may ask it everything. Only the calls below may change it.
    leads : bool
        Whether this is rank 0.

    Raises
    ------
    RuntimeError
        The ranks' caches differ, or a rank could not do what rank 0 has done: then its rows are not those of the
        others, and the group must start again.
    """

    def __init__(self, cache: KVCache, group: dist.ProcessGroup | None = None) -> None:
        if cache.options.lazy or cache.options.pool is not None:
            raise ValueError("cache must hold its memory from the start: neither lazy nor in a pool")
        self.cache, self.group = cache, group
        self.leads = dist.get_rank(group) == 0
        self._calls: list[tuple[Any, ...]] = []  # of rank 0, since the last `sync`
        self._runs: dict[int, Run] = {}  # this rank's, by their numbers on rank 0
        tokens = [(spec.row_bytes / cache.page_size, spec.window, spec.max_tokens) for spec in cache.specs]
        shapes = self._gather((cache.slots, cache.max_tokens, cache.tile_rows, cache.options.steps_in_flight, tokens))
        if any(shape != shapes[0] for shape in shapes):
            raise RuntimeError(f"the ranks' caches differ: {shapes}")
        stats = cache.stats()
        cache.set_budget(min(self._gather(stats.budget_pages)) * stats.page_size)

    def _gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def sync(self) -> None:
        """Make rank 0's calls since the last `sync` on the other ranks. Every rank calls it once for each iteration."""
        calls: list[Any] = [self._calls]
        dist.broadcast_object_list(calls, src=dist.get_global_rank(self.group or dist.group.WORLD, 0), group=self.group)
        self._calls = []
        for name, done, *arguments in () if self.leads else calls[0]:
            answer = getattr(self, f"_{name}")(*arguments)
            if answer != done:
                raise RuntimeError(f"{name}{tuple(arguments)} gave {answer} here and {done} on rank 0")

    def _lead(self, name: str, *arguments: Any) -> Any:
        """Make a call on rank 0, and note it for the others. A step that finds no memory may still end requests."""
        if not self.leads:
            raise RuntimeError(f"{name}: rank 0 decides")
        done = getattr(self, f"_{name}")(*arguments)
        self._calls.append((name, done, *arguments))
        return done

    # ---- requests: as in KVCache, on rank 0 -------------------------------------------------------------------

    def alloc(self, tokens: int = 0, *, slot: int | None = None, prefix_tokens: int = 0) -> int | None:
        """As `KVCache.alloc`. Rank 0 chooses the slot."""
        if not self.leads:
            raise RuntimeError("alloc: rank 0 decides")
        chosen = self.cache.alloc(tokens, slot=slot, prefix_tokens=prefix_tokens)
        if chosen is not None:
            self._calls.append(("alloc", chosen, chosen, tokens, prefix_tokens))
        return chosen

    def _alloc(self, slot: int, tokens: int, prefix_tokens: int) -> int | None:
        return self.cache.alloc(tokens, slot=slot, prefix_tokens=prefix_tokens)

    def _ago(self, after: int | None) -> int | None:
        """How many steps rank 0 has made since: each rank's cache has its own numbers of steps."""
        return None if after is None else self.cache.last_step - after

    def _step_of(self, ago: int | None) -> int | None:
        return None if ago is None else self.cache.last_step - ago

    def free(self, slot: int, after: int | None = None) -> None:
        """As `KVCache.free`. `after` is a step's number on rank 0: events end at different times on each rank."""
        self._lead("free", slot, self._ago(after))

    def _free(self, slot: int, ago: int | None) -> bool:
        self.cache.free(slot, self._step_of(ago))
        return True

    def step(self, lengths: list[int]) -> bool:
        """As `KVCache.step`."""
        return bool(self._lead("step", [int(n) for n in lengths]))

    def _step(self, lengths: list[int]) -> bool:
        return self.cache.step(lengths)

    def truncate(self, slot: int, tokens: int, after: int | None = None) -> bool:
        """As `KVCache.truncate`."""
        return bool(self._lead("truncate", slot, tokens, self._ago(after)))

    def _truncate(self, slot: int, tokens: int, ago: int | None) -> bool:
        return self.cache.truncate(slot, tokens, self._step_of(ago))

    def retire(self, step: int) -> None:
        """As `KVCache.retire`: on every rank, the kernels of the steps up to this one have ended."""
        self._lead("retire", self._ago(step))

    def _retire(self, ago: int) -> bool:
        self.cache.retire(self._step_of(ago))
        return True

    # ---- prefixes: runs that are kept until rank 0 drops them -------------------------------------------------

    def share(self, slot: int, tokens: int, first: int = 0) -> Run:
        """As `KVCache.share`. The run is rank 0's; which runs to drop, rank 0 decides, too."""
        if not self.leads:
            raise RuntimeError("share: rank 0 decides")
        run = self.cache.share(slot, tokens, first)
        self._runs[run.id] = run
        self._calls.append(("share", run.tokens, run.id, slot, tokens, first))
        return run

    def _share(self, number: int, slot: int, tokens: int, first: int) -> int:
        self._runs[number] = self.cache.share(slot, tokens, first)
        return self._runs[number].tokens

    def attach(self, slot: int, runs: list[Run], most: int | None = None) -> int | None:
        """As `KVCache.attach`."""
        found: int | None = self._lead("attach", slot, [run.id for run in runs], most)
        return found

    def _attach(self, slot: int, numbers: list[int], most: int | None) -> int | None:
        return self.cache.attach(slot, [self._runs[number] for number in numbers], most)

    def drop(self, runs: list[Run]) -> None:
        """As `KVCache.drop`."""
        self._lead("drop", [run.id for run in runs])

    def _drop(self, numbers: list[int]) -> bool:
        self.cache.drop([self._runs.pop(number) for number in numbers])
        return True

    # ---- memory -----------------------------------------------------------------------------------------------

    def set_budget(self, bytes: int) -> None:
        """As `KVCache.set_budget`, for every rank. To give every rank more, ask first whether all devices have it."""
        self._lead("set_budget", bytes)

    def _set_budget(self, bytes: int) -> bool:
        self.cache.set_budget(bytes)
        return True


def init_cache(
    layers: int, kv_heads: int, head_dim: int, slots: int, max_tokens: int, budget: int,
    group: dist.ProcessGroup | None = None, **options: Any,
) -> Ranks:  # fmt: skip
    """The ranks' caches of a model whose `kv_heads` are split evenly. Arguments as of `KVCache.for_model`."""
    world = dist.get_world_size(group)
    if kv_heads % world:
        raise ValueError(f"kv_heads {kv_heads} must be a multiple of the {world} ranks")
    options = {"idle_seconds": math.inf, "name": None} | options  # keeps its memory while idle; no limit from outside
    cache = KVCache.for_model(layers, kv_heads // world, head_dim, slots, max_tokens, budget, **options)
    return Ranks(cache, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    gpu = parser.parse_args().device == "cuda"
    if "RANK" not in os.environ:
        parser.error("start it with python -m torch.distributed.run --nproc-per-node 2 examples/ranks.py")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where = {"device": rank} if gpu else {"backend": "host"}
    # The last rank has less memory than the others, which then use no more than it has.
    ranks = init_cache(2, 2 * world, 64, 8, 512, (16 << 20) >> (rank == world - 1), **where)
    running: dict[int, int] = {}
    ended = iterations = 0
    while ended < 20:
        if ranks.leads:  # the scheduler
            while (slot := ranks.alloc(100)) is not None:
                if not ranks.step([100 if s == slot else 0 for s in range(8)]):
                    ranks.free(slot)
                    break
                running[slot] = 100
            lengths = [running.get(s, 0) for s in range(8)]
            while not ranks.step(lengths):  # preempt the longest
                slot = max(running, key=running.__getitem__)
                ranks.free(slot)
                del running[slot]
                lengths[slot] = 0
        ranks.sync()
        iterations += 1
        # Here each rank runs the model on its own heads, over ranks.cache.keys and values; the model's all-reduce:
        tokens = torch.tensor(ranks.cache.tokens(range(8)))
        most = tokens.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert torch.equal(tokens, most), "the ranks differ"
        if ranks.leads:
            for slot in [s for s, n in running.items() if n > 150]:
                ranks.free(slot)
                del running[slot]
                ended += 1
            running = {s: n + 1 for s, n in running.items()}
        ended = max(ranks._gather(ended))
    if ranks.leads:
        print(f"{world} ranks: {ended} requests ended after {iterations} iterations")
    ranks.cache.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
