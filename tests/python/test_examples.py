"""Every example runs on host memory, and says what it should.

SPDX-License-Identifier: MIT
"""

import importlib.util
import random
import re
import sys
import unittest.mock
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
# Whoever copies an example gets no name that the newest release is about to drop.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


@pytest.fixture
def said(monkeypatch, capsys):
    """said(name, *arguments): what an example prints as a program. In this process: importing torch takes seconds."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run_main(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        capsys.readouterr()
        example(name).main()
        return capsys.readouterr().out

    yield run_main
    torch.set_num_threads(threads)


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", TOP / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with unittest.mock.patch.object(sys, "path", [str(TOP / "examples"), *sys.path]):  # as for a script
        spec.loader.exec_module(module)
    return module


def test_continuous_batching_gives_the_models_own_tokens(said):
    """Chunks, prefixes and preemptions change no token; each stands for itself in the stream."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module = example("continuous_batching")
    model = module.small_model()
    draw = random.Random(1)
    system = [draw.randrange(2, 512) for _ in range(96)]
    prompts = [system + [draw.randrange(2, 512) for _ in range(draw.randrange(5, 150))] for _ in range(9)]
    want = []
    for prompt in prompts:
        model.set_attn_implementation("sdpa")
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        want.append(out[0, len(prompt) :].tolist())
    engine = module.Engine(model, slots=4, max_tokens=512, budget=2 << 20, chunk=50, check=True)
    for i, prompt in enumerate(prompts):
        engine.submit(module.Request(i, prompt, 12))
    got = {i: [] for i in range(len(prompts))}
    for request, token in engine.run():
        got[request.id].append(token)
    assert list(got.values()) == want
    assert engine.preemptions > 0 and engine.cache.stats().hit_tokens > 0
    assert engine.cache.stats().active_slots == 0
    with pytest.raises(ValueError, match="request 9: 500 [+] 20 tokens; 512 at most"):
        engine.submit(module.Request(9, [2] * 500, 20))
    engine.submit(module.Request(10, [2] * 500, 5))
    with pytest.raises(MemoryError, match="alone needs more than the budget"):
        engine.prefixes.clear()
        engine.cache.set_budget(4 * engine.cache.page_size)
        list(engine.run())
    engine.close()


def test_continuous_batching_streams(said):
    lines = said("continuous_batching", "--requests", "3").splitlines()
    assert len([line for line in lines if line.startswith("request ")]) == 3 * 20
    assert re.fullmatch(r"\d+ preemptions, \d+ tokens from prefixes, \d+ iterations", lines[-1])


@pytest.mark.parametrize("attention", ["vmem", "sdpa"])
def test_generate(attention, said):
    text = said("generate", "--attention", attention, "--new", "5", "two", "prompts")
    lines = [line for line in text.splitlines() if "->" in line]
    assert [line.split(" -> ")[0] for line in lines] == ["two", "prompts"]
    assert all(len(line.split("[")[1].split(",")) == 5 for line in lines)
    assert "KiB of addresses" in text


def test_two_models_share_one_pool(said):
    text = said("two_models")
    assert len(re.findall(r"^(llama|qwen): \d", text, re.M)) == 6
    for line in re.findall(r"^(?:llama|qwen): .*", text, re.M):
        has = {name: float(n) for name, n in re.findall(r"(\w+) has (\S+) MiB", line)}
        assert sum(has.values()) <= 8
        # The last of them need more than half of the pool.
        assert "4 x 400" not in line or has[line.split(":")[0]] > 5
    assert re.search(r"qwen, while llama needs its memory: 4 sequences .* use a pool with a larger budget", text)


def test_rollout_computes_no_token_again(said):
    text = said("rollout", "--rounds", "2", "--new", "3", "--prompt", "40", "--sequences", "2")
    assert "PyTorch has no memory pools" in text  # on a CPU
    rounds = re.findall(r"^round \d: .* (\d+) of (\d+) before them not computed again", text, re.M)
    assert [(int(known), int(before)) for known, before in rounds] == [(42, 43), (45, 46)]
