"""TRL's own trainer with vLLM in its process: three steps, plain and on vMem, to the same log, texts and weights."""

import json
import os
import sys
import uuid

import ends
import models
import pytest

from benchmarks import rl_trainer

SECONDS = 900
STEPS = 3
MODEL = models.MODELS["llama"]


def train(folder, lora, **environ):
    rl_trainer.write_model(folder / "model", MODEL)
    told = ends.run(
        sys.executable, "-m", "benchmarks.rl_trainer", str(folder / "model"), "--steps", str(STEPS),
        "--lora", str(lora), timeout=SECONDS,
        env=dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", **environ),
    )  # fmt: skip
    lines = [line[7:] for line in told.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, told.stdout[-2000:] + told.stderr[-6000:]
    return json.loads(lines[0])


@pytest.fixture(scope="module", params=[0, 8], ids=["all weights", "an adapter"])
def plain(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return folder, request.param, train(folder, request.param, VMEM_VLLM="0")


@pytest.mark.parametrize("name", ["alone", "in a pool", "in a pool with its weights"])
def test_grpo_is_the_same_on_vmem(plain, name):
    folder, lora, own = plain
    environ = dict(VMEM_VLLM="1")
    if name != "alone":
        environ.update(VMEM_VLLM_POOL=uuid.uuid4().hex[:12], VMEM_VLLM_POOL_SIZE="1G")
    if "weights" in name:
        environ.update(VMEM_VLLM_WEIGHTS="1")
    told = train(folder, lora, **environ)
    assert told.pop("vmem") and not own.get("vmem")
    assert len(told["completions"]) == STEPS and len({t for batch in told["completions"] for t in batch}) > STEPS
    for what in ("completions", "log", "weights"):
        assert told[what] == own[what], what
