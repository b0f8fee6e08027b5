"""One SGLang engine of the benchmark ``sglang`` in its own process: it gets workloads and answers with results.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import of_parent
from benchmarks.turns import GIB, Request, requests_of, results


class Client:
    """One engine of SGLang's in this process."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(model_path=path, skip_tokenizer_init=True, **options)

    async def _one(self, begin: float, prompt: list[int], n: int) -> Request:
        await asyncio.sleep(max(begin - time.monotonic(), 0))
        asked = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        made = Request(time.monotonic())
        async for part in await self.engine.async_generate(input_ids=prompt, sampling_params=asked, stream=True):
            made.tokens = part["output_ids"]  # all so far
            made.at += [time.monotonic()] * (len(made.tokens) - len(made.at))
            made.cached = part["meta_info"].get("cached_tokens") or 0
        return made

    async def _all(self, load: Mapping[str, Any]) -> list[Request]:
        jobs, begin = requests_of(load), time.monotonic()
        gaps = np.random.default_rng(0).exponential(1 / load["rate"], len(jobs)) if "rate" in load else [0] * len(jobs)
        return await asyncio.gather(*(self._one(begin + t, *job) for t, job in zip(np.cumsum(gaps), jobs)))

    def run(self, load: Mapping[str, Any]) -> dict[str, Any]:
        """The results of a workload, and what the engine holds and caches 1.5 s later. Then the cache is flushed."""
        from pyvmem.engine import control
        from pyvmem.engine.metrics import started_by

        begin = time.monotonic()
        made = self.engine.loop.run_until_complete(self._all(load))
        found = results(load, made, time.monotonic() - begin)
        time.sleep(1.5)
        for mine in (e for e, _ in control.engines() if started_by(e.pid, os.getpid())):
            found["figures"]["KV memory, 1.5 s idle"] = "GiB", [mine.backed / GIB]
            found["figures"]["KV memory, 1.5 s idle, of this cached"] = "GiB", [mine.cached / GIB]
        flushed = self.engine.flush_cache()
        if not flushed.success:
            raise RuntimeError(f"SGLang did not flush its cache: {flushed}")
        return found


def main() -> None:
    """Carry out the parent's orders."""
    (path, options), orders, say = of_parent()
    client = Client(path, options)
    say(kv_tokens=client.engine.get_server_info()["max_total_num_tokens"])
    for line in orders:
        say(**client.run(json.loads(line)))
    client.engine.shutdown()


if __name__ == "__main__":
    main()
