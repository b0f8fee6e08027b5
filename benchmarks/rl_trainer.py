"""TRL's GRPOTrainer with vLLM in its process, for `benchmarks.rl` and for the tests: one run, as a program.

    python -m benchmarks.rl_trainer MODEL OPTIONS      MODEL: a folder that `write_model` has made

Each step is a line of JSON behind "STEP ", and the end is one behind "RESULT ": the log, the completions, a hash of the
weights, and the most memory that the device had in use. vLLM's CPU build packs the weights of its layers, and then
takes no new ones. Where it compiles, its tokens depend on the batch. Neither is TRL's or vMem's doing, so both are off.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = 512  # that the tokenizer knows; answers may have other tokens


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with made-up weights, and a tokenizer of the words t3, t4 and so on, once."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    about = AutoConfig.for_model(**config)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(about, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    made.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"t{i}": i for i in range(3, WORDS)}}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                            unk_token="<pad>").save_pretrained(folder)  # fmt: skip


def _keep_weights_as_they_are() -> None:
    """Have vLLM's CPU build multiply by the weights that are loaded, which TRL loads anew in each step."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


class Clock:
    """Seconds of the parts of a step, and the most bytes that the device had in use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.most = 0
        if torch.cuda.is_available():
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            free, total = torch.cuda.mem_get_info()
            self.most = max(self.most, total - free)
            time.sleep(0.02)

    def time(self, owner: Any, function: str, part: str) -> None:
        """Count a function's time as that of a part."""
        own: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(own)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            try:
                return own(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - begin

        setattr(owner, function, timed)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """The parts since the last call."""
        seconds, self.seconds = self.seconds, {}
        return {part: round(value, 4) for part, value in seconds.items()}


def _time_switches(clock: Clock, trainer: Any) -> None:
    """Time what moves memory between the engine and the trainer, in either way of doing so."""
    clock.time(trainer, "_generate_and_score_completions", "rollout")
    clock.time(trainer.vllm_generation.llm, "generate", "generate")
    clock.time(trainer.vllm_generation, "sync_weights", "weights")
    for name in ("sleep", "wake_up"):
        clock.time(trainer.vllm_generation.llm, name, "switch")
    here = sys.modules.get("pyvmem.engine.trainer")
    if here is not None and here.here is not None:
        for name in ("enter", "leave"):
            clock.time(here.here, name, "switch")


def _reward(completions: list[str], **more: Any) -> list[float]:
    return [len(set(text.split())) - 0.01 * len(text) for text in completions]


def _adapter(rank: int) -> dict[str, Any]:
    """Arguments of the trainer by which it trains an adapter of this rank; 0: all weights."""
    if not rank:
        return {}
    from peft import LoraConfig

    return dict(peft_config=LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    cuda = torch.cuda.is_available()
    if not cuda:
        _keep_weights_as_they_are()
        own = vllm_generation.LLM
        vllm_generation.LLM = functools.partial(own, enforce_eager=True, dtype="float32", max_num_seqs=16)
    clock, seen = Clock(), []

    class Steps(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.take()
            self.began = clock._now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            line = dict(step=state.global_step, seconds=round(clock._now() - self.began, 4), **clock.take())
            print("STEP " + json.dumps(dict(line, most=clock.most)), flush=True)

    def note(completions: list[str], **more: Any) -> list[float]:
        seen.append(list(completions))
        return _reward(completions)

    words = [" ".join(f"t{3 + (17 * i + 7 * j) % (WORDS - 3)}" for j in range(args.prompt - i % 8)) for i in range(64)]
    sampling = dict(ignore_eos=True) if args.whole else {}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch,
            num_generations=args.group, learning_rate=args.rate, max_completion_length=args.tokens,
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=args.utilization,
            vllm_enable_sleep_mode=args.sleep, vllm_max_model_length=args.prompt + args.tokens, use_cpu=not cuda,
            bf16=cuda, gradient_checkpointing=cuda, generation_kwargs=sampling or None, logging_steps=1, report_to=[],
            save_strategy="no", seed=0, data_seed=0, disable_tqdm=True,
            model_init_kwargs=dict(dtype="bfloat16" if cuda else "float32"),
        )  # fmt: skip
        trainer = GRPOTrainer(model=args.model, reward_funcs=note, args=config, callbacks=[Steps()],
                              train_dataset=Dataset.from_dict({"prompt": words}), **_adapter(args.lora))  # fmt: skip
        _time_switches(clock, trainer)
        trainer.train()
    parts = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        parts.update(name.encode())
        parts.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    timed = ("time", "runtime", "per_second", "profiling")
    log = [{k: v for k, v in line.items() if not any(t in k for t in timed)} for line in trainer.state.log_history]
    core = trainer.vllm_generation.llm.llm_engine.engine_core.engine_core
    return dict(log=log, completions=seen, weights=parts.hexdigest(), vmem=hasattr(core.scheduler, "_vmem"),
                most=clock.most)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="completions of a step")
    parser.add_argument("--group", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a completion")
    parser.add_argument("--whole", action="store_true", help="completions have all their tokens")
    parser.add_argument("--utilization", type=float, default=0.3)
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    parser.add_argument("--sleep", action="store_true", help="vLLM's sleep mode, as TRL has it")
    parser.add_argument("--lora", type=int, default=0, help="train an adapter of this rank, not all weights")
    print("RESULT " + json.dumps(run(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
