"""One vLLM engine of the benchmark ``vllm`` in its own process: it reads workloads as JSON lines and writes results.

The parent starts it with ``VMEM_VLLM`` 0 or 1.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import of_parent
from benchmarks.shapes import known, write_config
from benchmarks.turns import GIB, Request, requests_of, results


def own_engine() -> Any:
    """The `Engine` of this process or of one that it started, on vMem; None on unmodified vLLM."""
    from pyvmem.vllm import http

    return next((engine for engine, _ in http.engines()), None)


def resident() -> int:
    """Device memory of the KV cache on vMem; 0 on unmodified vLLM, which has what it allocated at its start."""
    engine = own_engine()
    return int(engine.resident) if engine is not None else 0


def preemptions(llm: Any) -> int:
    """Count of the requests that vLLM has preempted so far."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


_runs = itertools.count()


def serve(llm: Any, prompts: list[Any], params: list[Any], concurrency: int | None = None) -> list[Request]:
    """Run requests, in the order of the prompts. `params` must ask for output kind DELTA.

    concurrency: requests at a time; None for all at once.
    """
    engine, run, running = llm.llm_engine, next(_runs), 0
    made = [Request() for _ in prompts]
    waiting = collections.deque(range(len(prompts)))
    while waiting or running:
        while waiting and (not concurrency or running < concurrency):
            i = waiting.popleft()
            made[i].arrived = time.perf_counter()
            engine.add_request(f"{run}-{i}", prompts[i], params[i])
            running += 1
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            request = made[int(output.request_id.split("-")[1])]
            fresh = output.outputs[0].token_ids
            request.tokens += fresh
            request.at += [now] * len(fresh)
            request.cached = output.num_cached_tokens or request.cached
            running -= output.finished
    return made


def pauses(llm: Any, load: Any, prompt: Callable[[int], list[int]], params: Any) -> dict[str, Request]:
    """{what: the request}, one at a time: its prompt in the prefix cache or not, after seconds without a request.

    What is not cached finds a prefix cache that was emptied before the pause, so that its blocks are free memory.
    """
    made: dict[str, Request] = {}

    def first(what: str, tokens: list[int]) -> None:
        (made[what],) = serve(llm, [{"prompt_token_ids": tokens}], [params])

    for n in load["prompts"]:
        llm.reset_prefix_cache()
        time.sleep(1.5)
        same = prompt(n)
        first(f"{n} tokens, from nothing", same)
        first(f"{n} tokens, cached, at once", same)
        for pause in load["pauses"]:
            time.sleep(pause)
            first(f"{n} tokens, cached, after {pause} s", same)
        for pause in (0, *load["pauses"]):
            serve(llm, [{"prompt_token_ids": prompt(n)}], [params])  # so that there is memory of this size
            llm.reset_prefix_cache()
            fresh = prompt(n)
            time.sleep(pause)
            first(f"{n} tokens, not cached, after {pause} s" if pause else f"{n} tokens, not cached, at once", fresh)
    return made


def run(llm: Any, load: Any) -> dict[str, Any]:
    """Run one workload and return its results."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vocabulary = min(30000, llm.llm_engine.vllm_config.model_config.get_vocab_size())
    if load.get("forget"):
        llm.reset_prefix_cache()
        time.sleep(1.0)  # spare memory is given back meanwhile

    def params(n: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False,
                              output_kind=RequestOutputKind.DELTA)  # fmt: skip

    if load["kind"] == "pauses":
        rng = np.random.default_rng(load["seed"])
        firsts = pauses(llm, load, lambda n: rng.integers(10, vocabulary, n).tolist(), params(1))
        figures = {f"{what}: time to first token": ("ms", [round(1e3 * r.first, 3)]) for what, r in firsts.items()}
        return dict(figures=figures, tokens=[r.tokens for r in firsts.values()],
                    cached={what: r.cached for what, r in firsts.items()})  # fmt: skip
    wanted = requests_of({"vocabulary": vocabulary, **load})
    before, preempted = own_engine(), preemptions(llm)
    gc.collect()
    begin = time.perf_counter()
    made = serve(llm, [{"prompt_token_ids": p} for p, _ in wanted], [params(n) for _, n in wanted],
                 load.get("concurrency"))  # fmt: skip
    seconds = time.perf_counter() - begin
    found = results(load, made, seconds)
    found["figures"]["preemptions"] = "", [preemptions(llm) - preempted]
    time.sleep(1.0)
    idle = own_engine()
    sizes = {"1 s idle": resident()}
    if load.get("reset"):
        llm.reset_prefix_cache()
        time.sleep(1.0)
        sizes["1 s after the prefix cache is reset"] = resident()
    if before is not None and idle is not None:
        sizes["1 s idle, of this cached"] = idle.cached
        found["figures"] |= {f"KV memory, {what}": ("GiB", [size / GIB]) for what, size in sizes.items()}
        found["figures"]["blocks that a step mapped itself"] = "", [idle.step_maps - before.step_maps]
    return found


def main() -> None:
    settings, orders, say = of_parent()
    shape = settings.pop("shape")
    from vllm import LLM

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = shape
        if known(shape):
            write_config(folder, shape, settings["max_model_len"])
            model = folder
            settings.update(load_format="dummy", skip_tokenizer_init=True)
        llm = LLM(model=model, disable_log_stats=False, **settings)
        if os.environ.get("VMEM_VLLM") == "1" and own_engine() is None:
            sys.exit("the engine runs without vMem: pyvmem is not installed where vLLM looks for its plugins")
        say(started=time.perf_counter() - begin)
        for line in orders:
            load = json.loads(line)
            try:
                say(**run(llm, load))
            except Exception as error:  # the parent reports it; the engine may still work
                say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
