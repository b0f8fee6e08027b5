"""One SGLang engine of `benchmarks.sglang` in its own process: it gets workloads and answers with results.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from typing import Any

from benchmarks import of_parent
from benchmarks.sglang import Job


class Client:
    """One engine of SGLang's in this process."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(model_path=path, skip_tokenizer_init=True, **options)
        self._loop = self.engine.loop

    async def _one(self, job: Job, begin: float) -> tuple[list[int], list[float]]:
        after, prompt, n = job
        await asyncio.sleep(max(begin + after - time.monotonic(), 0))
        asked = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        made: list[int] = []
        times = [time.monotonic()]
        async for part in await self.engine.async_generate(input_ids=prompt, sampling_params=asked, stream=True):
            made = part["output_ids"]  # all so far
            times.append(time.monotonic())
        return made, times

    async def _all(self, jobs: list[Job]) -> list[tuple[list[int], list[float]]]:
        begin = time.monotonic()
        return await asyncio.gather(*(self._one(job, begin) for job in jobs))

    def run(self, jobs: list[Job]) -> dict[str, Any]:
        """Seconds, tokens a second, times to the first token, milliseconds of a decode step, and the tokens."""
        begin = time.monotonic()
        ended = self._loop.run_until_complete(self._all(jobs))
        seconds = time.monotonic() - begin
        first = sorted(times[1] - times[0] for _, times in ended)
        last_first, end = max(times[1] for _, times in ended), min(times[-1] for _, times in ended)
        steps = min(sum(t > last_first for t in times) for _, times in ended)
        return dict(
            seconds=seconds, tokens_per_second=sum(n for _, _, n in jobs) / seconds,
            ttft_p50=statistics.median(first), ttft_p99=first[int(0.99 * (len(first) - 1))],
            step_ms=1e3 * (end - last_first) / steps if steps > 1 else None, tokens=[made for made, _ in ended],
        )  # fmt: skip

    def idle(self) -> dict[str, Any]:
        """Bytes that the engine holds and caches after 1.5 s without requests; nothing without vMem. Then flush it."""
        from pyvmem.engine import control
        from pyvmem.engine.metrics import started_by

        time.sleep(1.5)
        mine = [e for e, _ in control.engines() if started_by(e.pid, os.getpid())]
        flushed = self.engine.flush_cache()
        if not flushed.success:
            raise RuntimeError(f"SGLang did not flush its cache: {flushed}")
        return dict(backed=mine[0].backed, cached=mine[0].cached) if mine else {}


def main() -> None:
    """Carry out the parent's orders."""
    (path, options), orders, say = of_parent()
    client = Client(path, options)
    say(kv_tokens=client.engine.get_server_info()["max_total_num_tokens"])
    for line in orders:
        jobs = json.loads(line)
        say(**(client.run(jobs) if jobs else client.idle()))
    client.engine.shutdown()


if __name__ == "__main__":
    main()
