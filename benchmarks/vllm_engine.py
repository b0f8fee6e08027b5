"""One vLLM engine of the benchmark ``vllm`` in its own process: it reads workloads as JSON lines and writes results.

The parent starts it with ``VMEM_VLLM`` 0 or 1.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import Peaks, device_memory_used, of_parent

# Shapes of models; weights are random (vLLM's load_format "dummy", the same in every engine).
SHAPES: dict[str, dict[str, Any]] = {
    "mini": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, vocab_size=16000, rope_theta=10000.0),
    "tiny": dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
                 num_key_value_heads=4, head_dim=128, vocab_size=32000, rope_theta=10000.0),
    "llama-3-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, head_dim=128, vocab_size=128256, rope_theta=500000.0),
    # Five layers with a window of 1,024 tokens to one with full attention.
    "gemma-3-4b": dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], hidden_size=2560,
                       intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4,
                       head_dim=256, vocab_size=262208, rope_theta=1000000.0, rope_local_base_freq=10000.0,
                       sliding_window=1024, sliding_window_pattern=6, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
                       hidden_activation="gelu_pytorch_tanh"),
    # Latent attention, and experts.
    "deepseek-v2-lite": dict(model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], hidden_size=2048,
                             intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
                             num_attention_heads=16, num_key_value_heads=16, vocab_size=102400, rope_theta=10000,
                             kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
                             v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
                             first_k_dense_replace=1, moe_layer_freq=1, topk_method="greedy", n_group=1,
                             topk_group=1, scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0),
}  # fmt: skip


def known(model: str) -> bool:
    """True for a name of `SHAPES`, perhaps with a number of layers (llama-3-8b:16)."""
    return model.partition(":")[0] in SHAPES


def model_name(text: str) -> str:
    """A type of argument: a name of `SHAPES`, perhaps with a number of layers, or a path."""
    name, colon, layers = text.partition(":")
    if colon and name in SHAPES:
        most = SHAPES[name]["num_hidden_layers"]
        if not (layers.isdecimal() and 1 <= int(layers) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} must have 1 to {most} layers, as in {name}:{most // 2}")
    return text


def write_config(folder: Any, shape: str, max_model_len: int) -> None:
    """config.json of a shape."""
    name, _, layers = shape.partition(":")
    common = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=max_model_len,
        rms_norm_eps=1e-5, torch_dtype="bfloat16", hidden_act="silu", tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**common, **SHAPES[name], **(dict(num_hidden_layers=int(layers)) if layers else {})}, file)


def requests_of(load: Any) -> Any:
    """[(prompt tokens, output tokens)] of a workload, the same in every engine."""
    import numpy as np

    rng = np.random.default_rng(load.get("seed", 0))
    vocabulary = load.get("vocabulary", 30000)

    def tokens(n: int) -> Any:
        return rng.integers(10, vocabulary, int(n)).tolist()

    kind, longest = load["kind"], load.get("longest", 8192)
    if kind == "fixed":
        return [(tokens(load["prompt"]), load["output"]) for _ in range(load["batch"])]
    if kind == "ramp":  # prompts of every length
        return [(tokens(load["prompt"] + load["step"] * i), load["output"]) for i in range(load["batch"])]
    if kind == "hot":  # some prompts share a prefix
        prefixes = [tokens(load["prefix"]) for _ in range(load["prefixes"])]
        made = []
        for _ in range(load["batch"]):
            hot = rng.random() < load["ratio"]
            low, high = load["cold"]
            prompt = prefixes[rng.integers(len(prefixes))] + tokens(load["suffix"]) if hot else \
                tokens(rng.integers(low, high + 1))  # fmt: skip
            made.append((prompt, int(rng.integers(load["output"][0], load["output"][1] + 1))))
        return made
    from pyvmem.bench.traces import read_trace

    trace = read_trace(load["path"]).head(load["batch"])
    most = load.get("most_output", 1000)
    prompts, outputs = (np.clip(n, 1, m).tolist() for n, m in ((trace.prompt, longest - most), (trace.output, most)))
    return [(tokens(prompt), output) for prompt, output in zip(prompts, outputs)]


def own_engine() -> Any:
    """The (`Engine`, `Page`) of this process or of one that it started, on vMem; None on unmodified vLLM."""
    from pyvmem.vllm import http

    own = http.engines()
    return own[0] if own else None


def kv_memory(llm: Any) -> int:
    """Device memory of the KV cache: what vLLM allocated at its start, or what vMem has now."""
    engine = own_engine()
    return int(llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes if engine is None else engine[0].resident)


_told: dict[str, float] = collections.defaultdict(float)


def kv_state() -> Any:
    """The state that the engine publishes; its counts since the last call."""
    engine = own_engine()
    if engine is None:
        return None
    state = dataclasses.asdict(engine[0])
    for count in ("step_maps", "steps", "preempted", "refused", "waited"):
        state[count], _told[count] = state[count] - _told[count], state[count]
    return state


def preemptions(llm: Any) -> int:
    """Count of the requests that vLLM has preempted so far."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


class Steps:
    """Times at which the tokens of each step were known, in an engine of one process."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self._at: list[float] = []
        update = Scheduler.update_from_output

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._at.append(time.perf_counter())
            return update(*args, **kwargs)

        Scheduler.update_from_output = timed

    def between(self, first: float, last: float) -> dict[str, Any] | None:
        """Steps between two times of `time.perf_counter`: how many, and ms from one to the next."""
        import numpy as np

        at = np.asarray([t for t in self._at if first <= t <= last])
        self._at.clear()
        if len(at) < 3:
            return None
        ms = 1e3 * np.diff(at)
        return dict(steps=len(ms), mean=float(ms.mean()), median=float(np.median(ms)))


_runs = itertools.count()


class Request:
    """The tokens of a request, and when they came (`time.perf_counter`)."""

    def __init__(self) -> None:
        self.arrived = math.nan
        self.at: list[float] = []  # when each of its tokens came
        self.tokens: list[int] = []
        self.cached = 0  # prompt tokens from the prefix cache

    @property
    def first(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.at[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next, each by itself: a mean would hide stalls."""
        return [b - a for a, b in itertools.pairwise(self.at)]


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


def run(llm: Any, load: Any, ended: Steps | None = None) -> Any:
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

    kv_state()
    if load["kind"] == "pauses":
        rng, begin = np.random.default_rng(load["seed"]), time.perf_counter()
        firsts = pauses(llm, load, lambda n: rng.integers(10, vocabulary, n).tolist(), params(1))
        return dict(
            firsts={what: round(r.first, 6) for what, r in firsts.items()}, tokens=[r.tokens for r in firsts.values()],
            ttft=[round(r.first, 6) for r in firsts.values()], cached={what: r.cached for what, r in firsts.items()},
            output=len(firsts), seconds=time.perf_counter() - begin, kv=kv_state(),
        )  # fmt: skip
    wanted = requests_of({"vocabulary": vocabulary, **load})
    preempted = preemptions(llm)
    gc.collect()
    with Peaks(0.05, device_memory_used, lambda: kv_memory(llm)) as memory:
        begin = time.perf_counter()
        made = serve(llm, [{"prompt_token_ids": p} for p, _ in wanted], [params(n) for _, n in wanted],
                     load.get("concurrency"))  # fmt: skip
        seconds = time.perf_counter() - begin
        time.sleep(1.0)
        idle, kv_idle, state = device_memory_used(), kv_memory(llm), kv_state()
    full = None  # the steps in which every request decodes
    if ended and load.get("decode") and made:
        full = ended.between(max(r.at[0] for r in made), min(r.at[-1] for r in made))
    result = dict(
        seconds=seconds,
        prompt=sum(len(p) for p, _ in wanted),
        output=sum(len(r.tokens) for r in made),
        cached=sum(r.cached for r in made),
        ttft=[round(r.first, 6) for r in made],
        gaps=[[round(gap, 6) for gap in r.gaps] for r in made],
        preemptions=preemptions(llm) - preempted,
        peak=memory.most[0], idle=idle, kv_peak=memory.most[1], kv_idle=kv_idle, kv=state, full=full,
    )  # fmt: skip
    if load.get("tokens"):
        result["tokens"] = [r.tokens for r in made]
    if load.get("reset"):
        llm.reset_prefix_cache()
        time.sleep(1.0)
        result["kv_reset"] = kv_memory(llm)
    return result


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
        blocks = llm.llm_engine.vllm_config.cache_config
        # With several processes, the steps run in another one.
        steps = Steps() if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else None
        say(ready=True, started=time.perf_counter() - begin, kv=kv_state(),
            blocks=blocks.num_gpu_blocks, block_size=blocks.block_size)  # fmt: skip
        for line in orders:
            load = json.loads(line)
            try:
                say(**run(llm, load, steps))
            except Exception as error:  # the parent reports it; the engine may still work
                say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
