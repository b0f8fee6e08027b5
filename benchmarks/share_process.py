"""One of the two processes of the benchmark ``share``: it decodes a request in a cache of the pool, and takes commands.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import json
import select
import time
from typing import Any

import torch

from benchmarks import of_parent
from pyvmem.kv.cache import KVCache
from pyvmem.kv.pool import KVPool

HEADS, DIM = 8, 128
AHEAD = 8  # tokens that the last page has room for: the background thread need not back more at once
PAUSE = 0.001  # between the steps of the request that decodes, seconds


class Loop:
    """The cache, its decoding request, and the requests that load it."""

    def __init__(self, about: dict[str, Any]) -> None:
        layers = about["layers"]
        self.pool = KVPool(about["budget"], path=about["path"])
        row = 2 * layers * HEADS * DIM * 2
        one = about["layout"] == "block"
        self.requests = about["requests"]
        self.amount = about["amount"]
        self.tokens = self.amount // self.requests // row - AHEAD
        self.cache = KVCache.for_model(
            layers, HEADS, DIM, slots=self.requests + 2, max_tokens=max(self.tokens, 16384),
            budget=about["budget"], dtype=torch.bfloat16, layout="token-major" if one else "separate",
            backend=about["backend"], device=about["device"],
            page_size=about["page_size"], name=about["name"], pool=self.pool, pool_min=about["min"],
        )  # fmt: skip
        self.lengths = [0] * self.cache.slots
        self.small = self._slot(1)
        self.lengths[self.small] = 1
        self.loaded: list[int] = []
        self.steps: collections.deque[tuple[float, float]] = collections.deque(maxlen=5000)
        self.written = 0
        begin = time.perf_counter()
        while not self.written:  # the others may have the budget still
            self.decode()
            if time.perf_counter() - begin > 30:
                raise RuntimeError(f"memory did not come in 30 s: {self.cache.shortage}, {self.pool.members()}")

    def _slot(self, tokens: int) -> int:
        slot = self.cache.alloc(tokens)
        assert slot is not None, "there are more slots than requests"
        return slot

    def timed(self) -> tuple[bool, float]:
        """Make a step. Returns whether it had memory, and the milliseconds that it took."""
        begin = time.perf_counter()
        ready = self.cache.step(self.lengths)
        took = (time.perf_counter() - begin) * 1e3
        self.steps.append((begin, took))
        return ready, took

    def decode(self) -> None:
        """Make a step of the small request, and write numbers to its new row."""
        length = self.lengths[self.small]
        if not self.timed()[0]:
            return  # the memory is on its way
        self.cache.keys[0][self.small, length - 1] = length % 251
        self.cache.values[-1][self.small, length - 1] = (length + 7) % 251
        self.written = length
        if length < 16000:
            self.lengths[self.small] = length + 1
        time.sleep(PAUSE)

    def verify(self) -> None:
        """Raises RuntimeError unless the small request has what was written."""
        numbers = torch.arange(1, self.written + 1)
        for tensor, off in ((self.cache.keys[0], 0), (self.cache.values[-1], 7)):
            rows = tensor[self.small, : self.written].reshape(self.written, -1).float().cpu()
            if not (rows == ((numbers + off) % 251).float()[:, None]).all():
                raise RuntimeError("rows of the request that decodes are not what was written")

    def calls(self) -> int:
        """Calls that the cache's context has made to the driver."""
        return self.cache.context.stats().syscalls

    def load(self) -> dict[str, Any]:
        """Back requests of the whole amount, one after another, and go on stepping while memory arrives.

        Returns the answer to the command. It lists every step as (begin, ms, ready): `ready` is False if memory was
        missing. `calls` counts calls to the driver.
        """
        calls = self.calls()
        need, steps = time.perf_counter(), []
        slots, whole = [self._slot(self.tokens) for _ in range(self.requests)], self.lengths[:]
        for slot in slots:
            whole[slot] = self.tokens
        self.cache.step(whole, dry=True)  # so that the pool hears of the whole need
        for slot in slots:
            self.lengths[slot] = self.tokens
            while True:
                ready, took = self.timed()
                steps.append((self.steps[-1][0], took, ready))
                if ready:
                    break
                if time.perf_counter() - need > 30:
                    raise RuntimeError(f"memory did not come in 30 s: {self.cache.shortage}, {self.pool.members()}")
                self.cache.step(whole, dry=True)
                time.sleep(0.0002)
            self.loaded.append(slot)
            self.lengths[slot] = 0  # backed, and done
        mapped = time.perf_counter()
        return {"need": need, "mapped": mapped, "steps": steps, "calls": self.calls() - calls}

    def free(self) -> None:
        """End the requests; their pages are kept."""
        if self.cache.tensors[0].is_cuda:
            torch.cuda.synchronize()
        for slot in self.loaded:
            self.cache.free(slot)
        self.loaded.clear()


def main() -> None:
    """Decode, and execute orders until there are no more."""
    about, orders, say = of_parent()
    try:
        loop = Loop(about)
        say(ready=True)
        while True:
            if not select.select([orders], [], [], 0)[0]:
                loop.decode()
                continue
            line = orders.readline()
            if not line:
                return
            do = json.loads(line)["do"]
            if do == "load":
                say(**loop.load())
            elif do == "steps":
                say(steps=list(loop.steps), calls=loop.calls())
            else:
                known: dict[str, Any] = {"free": loop.free, "drop": loop.cache.reclaim, "verify": loop.verify}
                known[do]()
                say()
    except Exception as error:  # of any kind: the parent reports it
        say(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
