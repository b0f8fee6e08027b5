"""``python -m benchmarks``: the workloads of ``vllm``, whose engines need a GPU and vLLM, and ``attention``."""

import argparse
import collections
import json
import subprocess
import sys
import types

import pytest

import benchmarks
from benchmarks import __main__ as command
from benchmarks import sglang, shapes, turns, vllm, vllm_engine
from benchmarks.records import load as load_records
from benchmarks.registry import Benchmark, all_benchmarks
from pyvmem.tools import cli


def arguments(**changes):
    return types.SimpleNamespace(**{**dict(
        bench="vllm", model="tiny", kv_memory=1 << 30, max_model_len=2048, max_num_seqs=16, turns=1,
        prefix_caching=False, eager=True, tensor_parallel=1, load=None, trace=None, requests=None, raw=None,
        warm_up=1, beside=[],
    ), **changes})  # fmt: skip


def main(args):
    return cli.main(args, command.run, "benchmarks")


def test_an_engine_beside_has_a_name_and_variables():
    assert vllm.beside("other:A=1,B=x=y") == ("other", dict(A="1", B="x=y"))
    for wrong in ("other", "other:", ":A=1", "other:A", "vLLM:A=1", "other:A=1,"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a new name and variables"):
            vllm.beside(wrong)


def test_workloads_fit_the_engine_and_repeat():
    names = ["equal", "hot", "idle", "decode"]
    for name, load in vllm.loads(arguments(requests=20, load=names)).items():
        made = turns.requests_of(load)
        assert made == turns.requests_of(load), name
        assert all(len(prompt) + output <= 2048 for prompt, output in made), name
        assert turns.requests_of(dict(load, seed=99)) != made, name


def test_hot_prompts_begin_alike():
    load = vllm.loads(arguments(requests=60, load=["hot"]))["hot"]
    starts = [tuple(prompt[:128]) for prompt, _ in turns.requests_of(load)]
    assert len(set(starts)) < len(starts)


def test_kvcacheds_workload_has_its_parameters():
    load = vllm.loads(arguments(load=["idle"], max_model_len=8192))["idle"]
    made = turns.requests_of(load)
    assert (len(made), load["concurrency"]) == (2500, 96)
    starts = collections.Counter(tuple(prompt[:128]) for prompt, _ in made if len(prompt) == 192)
    assert len([n for n in starts.values() if n > 1]) == 16
    assert sum(n for n in starts.values() if n > 1) == pytest.approx(0.3 * 2500, rel=0.1)
    assert {192 <= len(prompt) <= 1024 and 16 <= output <= 256 for prompt, output in made} == {True}


def test_a_traces_lengths_fit_the_engine(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n900,7\n70000,9\n")
    made = vllm.loads(arguments(trace=str(path)))["azure"]
    assert [len(p) for p, _ in turns.requests_of(made)] == [900, 2048 - 256]


class Llm:
    """An engine that gives every request a token a step: its prompt, as often as its parameter says."""

    def __init__(self):
        self.llm_engine = self
        self.left, self.most = {}, 0

    def add_request(self, name, prompt, params):
        self.left[name] = [params, prompt]
        self.most = max(self.most, len(self.left))

    def step(self):
        outputs = []
        for name, entry in list(self.left.items()):
            entry[0] -= 1
            if not entry[0]:
                del self.left[name]
            tokens = [types.SimpleNamespace(token_ids=[entry[1]])]
            outputs.append(types.SimpleNamespace(request_id=name, finished=not entry[0], outputs=tokens,
                                                 num_cached_tokens=None))  # fmt: skip
        return outputs


@pytest.mark.parametrize("concurrency", [6, None])
def test_so_many_requests_at_a_time_and_each_gap(concurrency):
    llm, many = Llm(), [1 + i * 7 % 5 for i in range(50)]
    requests = vllm_engine.serve(llm, list(range(50)), many, concurrency=concurrency)
    assert [r.tokens for r in requests] == [[i] * n for i, n in enumerate(many)]
    assert llm.most == (concurrency or 50)
    assert [len(r.gaps) for r in requests] == [n - 1 for n in many]
    assert all(r.first > 0 and min(r.gaps, default=0) >= 0 for r in requests)


class FakeEngine:
    """Answers as an engine's process does. last: the last token of its second request; by default, it counts turns."""

    def __init__(self, last=None):
        self.asked, self.last, self.steps = [], last, []

    def ask(self, load):
        self.asked.append(load)
        steps = self.steps.pop(0) if self.steps else []
        return dict(figures={"output": ("tokens/s", [100]), "time to first token": ("ms", [500.0, 700.0])},
                    tokens=[[1, 2], [3, self.last or len(self.asked)]], steps=steps)  # fmt: skip


def in_turns(last=None, keep=lambda _: None, **changes):
    """Turns of vLLM and of vLLM on vMem, whose engines answer at once."""
    engines = {vllm.OWN: FakeEngine(), vllm.ON_VMEM: FakeEngine(last)}
    return turns.Turns("vllm", engines, arguments(**changes), "gpu", keep)


@pytest.mark.parametrize("model", ["llama-3-8b:x", "llama-3-8b:0", "llama-3-8b:33", "tiny:"])
def test_a_wrong_number_of_layers_is_an_error_at_once(model, capsys):
    with pytest.raises(SystemExit):
        main(["vllm", "--model", model])
    assert f"argument --model: '{model}' must have 1 to " in capsys.readouterr().err


DECODE = {"decode": dict(kind="fixed", batch=8)}


def test_every_second_turn_asks_the_engines_in_reverse():
    asked, engines = [], in_turns(turns=3)
    for name, engine in engines.engines.items():
        engine.ask = lambda load, ask=engine.ask, name=name: asked.append(name) or ask(load)
    engines.measure(dict(hot=dict(DECODE["decode"], forget=True)))
    first, second = vllm.OWN, vllm.ON_VMEM
    assert asked == [first, second, second, first, first, second, second, first]


@pytest.mark.parametrize("forget", [True, False])
@pytest.mark.parametrize("steps", [[[9, 9], [4, 1, 2], [2, 5, 3]], [[9], [4, 1, 2], [2, 5]]])
def test_a_load_from_nothing_is_the_same_in_each_turn_and_its_steps_fastest_times_count(forget, steps):
    engines = in_turns(turns=2)
    own = engines.engines[vllm.OWN]
    own.steps = list(steps)
    engines.measure(dict(hot=dict(DECODE["decode"], forget=forget, seed=5)))
    assert ({load["seed"] for load in own.asked} == {5}) == forget
    found = [r.median for r in engines.records if r.metric == "hot: time of 3 steps, each its fastest"]
    assert found == ([0.005] if forget and len(steps[2]) == 3 else [])


@pytest.mark.parametrize("last, same, alike", [(None, 2, 4), (9, 1, 3)])
def test_each_engine_on_vmem_is_compared_with_vllm(last, same, alike):
    engines = in_turns(last)
    engines.measure(DECODE)
    found = {r.metric: r.median for r in engines.records if r.backend == vllm.ON_VMEM}
    assert found["decode: requests with the tokens of vLLM, of 2"] == same
    assert found["decode: tokens, of 4"] == alike


def test_vllms_own_agreement_stands_beside_tokens_that_differ():
    engines = in_turns(last=9)
    engines.measure(DECODE)
    found = {r.backend: r.median for r in engines.records if r.metric == "decode: tokens, of 4"}
    assert found == {vllm.ON_VMEM: 3, vllm.OWN: 3}
    assert [load.get("forget") for load in engines.engines[vllm.OWN].asked] == [None, True, None]


def test_each_turn_leaves_its_records_and_its_answers(tmp_path, capsys):
    kept, raw = [], tmp_path / "raw.json"
    engines = in_turns(None, kept.append, turns=3, raw=str(raw))
    engines.measure(DECODE)
    counts = [[r.n for r in records if r.metric == "decode: output"] for records in kept]
    assert counts == [[], [1, 1], [2, 2], [3, 3]] and len(json.loads(raw.read_text())) == 4 * 2
    assert [r.median for r in engines.records if r.metric == "decode: time to first token"] == [600, 600]
    one = "output 100 tokens/s, time to first token 600 ms"
    assert capsys.readouterr().err.splitlines()[-1] == f"decode, turn 3 of 3: vLLM {one}; vLLM on vMem {one}"


def request(arrived, *at):
    return turns.Request(arrived, list(at), [7] * len(at), cached=2)


def test_an_answer_has_each_first_token_and_each_gap():
    found = turns.results(dict(tokens=True), [request(1, 2, 4), request(2, 2.5)], 2)
    assert found["tokens"] == [[7, 7], [7]] and found["figures"] == {
        "output": ("tokens/s", [1.5]), "time to first token": ("ms", [1000, 500]),
        "time between tokens": ("ms", [2000]), "prompt tokens from the prefix cache": ("", [4])}  # fmt: skip


def test_a_step_ends_when_its_tokens_come():
    assert turns.step_times([request(1, 2, 4), request(2, 2, 4.5)]) == [1000, 2000, 500]


def test_a_decode_step_is_one_in_which_every_request_decodes():
    made = [request(0, 1, 5, 6, 8, 11), request(0, 5, 6, 8, 90)]  # from 5 to 11: 5, 6, 8 and 11
    assert turns.decode_step(made) == [2000]
    assert turns.results(dict(decode=True), made, 1)["figures"]["decode step"] == ("ms", [2000])
    assert turns.decode_step([request(0, 1, 2), request(0, 3, 4)]) == []


def test_pauses_are_before_requests_that_are_cached_and_not(monkeypatch):
    happened, llm = [], Llm()
    llm.reset_prefix_cache = lambda: happened.append("reset")
    monkeypatch.setattr(vllm_engine.time, "sleep", lambda s: happened.append(s))
    add, numbers = llm.add_request, iter(range(1, 100))
    monkeypatch.setattr(llm, "add_request", lambda name, p, params: (
        happened.append(p["prompt_token_ids"]), add(name, p, params)))  # fmt: skip
    made = vllm_engine.pauses(llm, dict(prompts=[8000], pauses=[0.1, 5]), lambda n: next(numbers), 1)
    assert list(made) == [f"8000 tokens, {what}" for what in (
        "from nothing", "cached, at once", "cached, after 0.1 s", "cached, after 5 s", "not cached, at once",
        "not cached, after 0.1 s", "not cached, after 5 s")]  # fmt: skip
    assert happened == ["reset", 1.5, 1, 1, 0.1, 1, 5, 1, 2, "reset", 0, 3, 4, "reset", 0.1, 5, 6, "reset", 5, 7]


def test_pauses_need_a_prefix_cache():
    chosen = dict(load=["pauses"], max_model_len=65536)
    load = vllm.loads(arguments(prefix_caching=True, **chosen))["pauses"]
    assert (load["prompts"], load["pauses"]) == ([8000, 50000], (0.1, 0.5, 1, 5))
    with pytest.raises(ValueError, match="--load pauses needs --prefix-caching"):
        vllm.loads(arguments(**chosen))
    assert "pauses" not in vllm.loads(arguments(prefix_caching=True))


def test_all_workloads_run_in_each_turn():
    engines = in_turns(turns=2, warm_up=4)
    engines.measure({**DECODE, "hot": dict(kind="hot", batch=30)})
    asked = engines.engines[vllm.OWN].asked
    assert [(load["kind"], load["batch"], load["tokens"]) for load in asked] == [
        ("fixed", 2, True), ("hot", 8, True), ("fixed", 8, False), ("hot", 30, False), ("fixed", 8, False),
        ("hot", 30, False)]  # fmt: skip


@pytest.mark.parametrize("kv_tokens", [204800, 16384])
def test_sglangs_workloads_fit_its_memory(kv_tokens):
    args = argparse.Namespace(trace=None, load=None, requests=64, kv_tokens=kv_tokens, model="mini")
    made = {name: turns.requests_of(load) for name, load in sglang.loads(args).items()}
    assert list(made) == ["decode", "rate"]
    assert sum(len(prompt) + n for prompt, n in made["decode"]) <= kv_tokens
    assert all(64 <= len(prompt) < 1024 and 16 <= n < 256 for prompt, n in made["rate"])
    assert max(max(prompt) for prompt, _ in made["rate"]) < 16000, "the vocabulary of the shape"


def test_sglangs_workloads_that_cannot_be_are_named():
    args = argparse.Namespace(trace=None, load=["azure"], requests=64, kv_tokens=1000, model="mini")
    with pytest.raises(ValueError, match="--load azure needs --trace"):
        sglang.loads(args)
    args.load = ["decode"]
    with pytest.raises(ValueError, match="--kv-tokens 1000 is too small for the workload decode"):
        sglang.loads(args)


def test_a_workload_may_have_a_number_of_requests():
    assert vllm.loads(arguments(load=["hot:7"], requests=20))["hot"]["batch"] == 7
    assert vllm.loads(arguments(load=["decode:3"]))["decode"] == dict(
        kind="fixed", batch=3, prompt=1748, output=200, decode=True)  # fmt: skip


def test_an_unknown_workload_is_named():
    with pytest.raises(ValueError, match="--load azure must be one of"):
        vllm.loads(arguments(load=["azure"]))


def test_all_leaves_vllm_and_its_arguments_out(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(command, "run_bench", lambda args, benchmarks: asked.append(args) or 0)
    assert main(["vllm", "--model", "tiny"]) == 0
    assert main(["all", "--model", "Yi-6B"]) == 0  # the shape of the KV cache's benchmarks
    assert [args.model for args in asked] == ["tiny", "Yi-6B"]
    with pytest.raises(SystemExit):
        main(["all", "--max-num-seqs", "8"])
    monkeypatch.undo()
    ran = []
    benches = [Benchmark(name, "", lambda s: ran.append(s.name) or [], alone=name == "b") for name in "ab"]
    args = types.SimpleNamespace(bench="all", full=False, plot=None, json=None, quick=True)
    assert command.run_bench(args, benches) == 0 and ran == ["a"]
    capsys.readouterr()


def test_all_runs_every_benchmark(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "r.json"
    small = "--page-size 2M --tensors 2 --size 2M --requests 20 --amount 64M --exchanges 1".split()
    small += "--repeats 1 --prompt 16 --new 3 --stop-after 5 --iterations 100".split()
    options = ["--backend", "host", "--json", str(out), "--plot", str(tmp_path / "p.png"), *small]
    done = subprocess.run([sys.executable, "-m", "benchmarks", "all", "--quick", *options],
                          capture_output=True, text=True, timeout=1800, cwd=benchmarks.ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 10 < len(lines) < 30 and max(map(len, lines)) <= 80, "one screen"
    assert "host memory" in lines[0] and any(line.startswith("map a page ") for line in lines)
    ran = {r.bench for r in load_records(out)}
    assert ran <= {b.name for b in all_benchmarks() if not b.alone} and ran >= {"vmm", "share", "lease"}
    assert {p.name for p in tmp_path.glob("*.png")} == {f"p-{name}.png" for name in ran}


def test_without_vllm_its_benchmark_fails(monkeypatch, capsys):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    assert main(["vllm"]) == 1
    assert capsys.readouterr().err == "benchmarks: vllm needs vLLM: pip install vllm\n"


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_shapes_are_configurations(tmp_path, shape):
    shapes.write_config(tmp_path, shape, 4096)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert config["hidden_size"] and config["architectures"]


def test_a_shape_may_have_fewer_layers(tmp_path):
    shapes.write_config(tmp_path, "llama-3-8b:16", 4096)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 16
    assert shapes.known("llama-3-8b:16") and not shapes.known("models/llama-3-8b")


# ---- attention -----------------------------------------------------------------------------------------------------


def bench(*args):
    done = subprocess.run([sys.executable, "-m", "benchmarks", "attention", "--quick", "--backend", "host", *args],
                          capture_output=True, text=True, timeout=900, cwd=benchmarks.ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_bench_attention_times_virtual_beside_plain_memory(tmp_path):
    pytest.importorskip("matplotlib")
    bench("--figure", "7", "--stop-after", "100", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png"))
    records = load_records(tmp_path / "r.json")
    times = {(r.backend, r.page_size) for r in records if r.metric == "decode B=1 L=1024 heads 32/8, sdpa contiguous"}
    assert times == {("host", 64 << 10), ("host", 2 << 20), ("malloc", None)}
    assert {r.unit for r in records if r.metric.endswith("of the same on plain memory")} == {"ratio"}
    assert {r.metric.split(", ")[1] for r in records if r.metric.startswith("prepare")} >= {"slots and lengths"}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_bench_attention_lets_each_run_be_first_behind_a_busy_gpu(monkeypatch):
    from benchmarks import attention_runs

    started = []

    class Timer:
        seconds = 0.0

        def __init__(self, run):
            self.name = run.name

        def start(self):
            started.append(self.name)
            return len(started)

        def result(self, number):
            return float(number)

    monkeypatch.setattr(attention_runs, "Timer", Timer)
    runs = {name: types.SimpleNamespace(name=name, splits=(0,), split=0) for name in "abc"}
    found = attention_runs.measure(runs, turns=3)
    turns = [started[i : i + 4] for i in range(0, 12, 4)]
    assert [sorted(turn[1:]) for turn in turns] == [["a", "b", "c"]] * 3
    assert {turn[1] for turn in turns} == set("abc")
    timed = sorted(n for samples, _ in found.values() for n in samples)
    assert timed == [2, 3, 4, 6, 7, 8, 10, 11, 12]  # not the first of a turn


@pytest.mark.parametrize("args, text", [
    (["attention", "--figure", "5"], "'5' must be some of 2, 3, 4, 6, 7, 11"),
    (["attention", "--table", "5,x"], "'5,x' must be some of 5, 6, 9"),
    (["attention", "--fa3", "vllm"], "--fa3 vllm: No module named 'vllm'"),
    (["growth", "--copies", "none", "gpu"], "'gpu': must be none, engine, kernel, or kernel:N of N programs"),
    (["growth", "--copies", "engine:4"], "'engine:4': must be none, engine"),
    (["growth", "--copies", "kernel:0"], "'kernel:0': from 1 to 1024 programs"),
    (["growth", "--grow", "2M", "--copies", "kernel:4"], "torch does not reach the device of the host backend"),
])  # fmt: skip
def test_err_bench(args, text, capsys):
    try:
        assert main([*args, "--quick", "--backend", "host"]) == 1
    except SystemExit as end:  # argparse's
        assert end.code == 2
    assert text in capsys.readouterr().err
