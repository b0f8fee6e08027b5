"""``python -m benchmarks`` as a user runs it, the records it writes, and the traces it reads.

SPDX-License-Identifier: MIT
"""

import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import benchmarks
import pyvmem
from benchmarks import __main__ as command_line
from benchmarks import records as form
from benchmarks import native, session, summary
from benchmarks.registry import all_benchmarks
from benchmarks.traces import read_trace, synthetic_trace
from pyvmem._ffi import ffi
from pyvmem.tools import cli

KIB, MIB = 1 << 10, 1 << 20


def main(args):
    return cli.main(args, command_line.run, "benchmarks")


def command(*args, check=True, **env):
    """Run the command; returns the finished process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=benchmarks.ROOT,
        timeout=1800,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
        progress = re.compile(rf"({'|'.join(b.name for b in all_benchmarks())}): .+")
        assert not [line for line in done.stderr.splitlines() if not progress.fullmatch(line)]
    return done


def test_what_times_single_calls_must_be_built(monkeypatch, tmp_path, capsys):
    native._library.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libbench.so")
    try:
        assert main(["vmm", "--backend", "host", "--quick", "--page-size", "2M"]) == 1
    finally:
        native._library.cache_clear()
    assert "make venv" in capsys.readouterr().err.splitlines()[-1]


def test_a_failure_of_a_timed_call_is_the_librarys_error():
    with pyvmem.Context("host") as context, context.reserve(2 * MIB) as range_:
        times = ffi.new("uint64_t[8]")
        with pytest.raises(pyvmem.InvalidArgument, match="page_size 3"):  # the process's own libvmem
            native.call("pages", context._use(), 3, range_.addr, 2 * MIB, 1, 0, 1, *[times] * 4)
        if pyvmem.probe("cuda"):
            out = ffi.new("void **")
            with pytest.raises(pyvmem.VmemError, match="cuda|NVIDIA|device"):  # what is linked in beside it
                native.call("cuda_open", 0, 2 * MIB, out)
        native.call("reserve", context._use(), 2 * MIB, 0, 1, times, times)


def check_records(path, benches):
    found = json.loads(path.read_text())
    assert {"date", "pyvmem", "torch", "python", "kernel", "driver"} == set(found["about"])
    rows = found["records"]
    assert rows == [vars(r) for r in form.load(path)]
    assert {r["bench"] for r in rows} == set(benches)
    for r in rows:
        assert list(r) == list(form.FIELDS)
        assert r["p10"] <= r["median"] <= r["p90"] <= r["p99"]
        assert r["n"] >= 1 and r["unit"] and r["metric"] and r["device"]
        assert r["page_size"] is None or r["page_size"] in (64 * KIB, 128 * KIB, 256 * KIB, 2 * MIB)
        assert r["paper"] is None or r["paper"] > 0
    keys = [(r["bench"], r["backend"], r["page_size"], r["metric"]) for r in rows]
    assert len(set(keys)) == len(keys)
    return rows


def test_vmm(backend, tmp_path):
    out = tmp_path / "r.json"
    said = command("vmm", "--quick", "--backend", backend, "--json", out).stdout
    rows = check_records(out, ["vmm"])
    with pyvmem.Context(backend) as context:
        sizes = {context.page_sizes[0], context.page_sizes[-1]}  # what a quick run measures
    for metric in ("reserve 1 GiB", "create", "map", "unmap", "release, unmap included", "free 1 GiB"):
        assert metric in said
        assert {r["page_size"] for r in rows if r["metric"] == metric and r["backend"] == backend} == sizes
    assert {r["paper"] for r in rows if r["metric"] == "map" and r["page_size"] == 2 * MIB} == {40}
    small = {size for size in sizes if size < 2 * MIB} if backend != "host" else set()
    assert {r["page_size"] for r in rows if r["metric"] == "map, first page in its 2M"} == small
    if backend == "host":
        ours, bare = (
            {r["metric"] for r in rows if "batch" in r["metric"] and r["backend"] == who}
            for who in ("host", "host-bare")
        )
        assert ours == bare | {f"{metric}, over the bare calls" for metric in bare}


def test_fragmentation_of_a_trace(backend, tmp_path):
    trace, out = tmp_path / "trace.csv", tmp_path / "r.json"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,374,44\n" * 20)
    command("fragmentation", "--quick", "--trace", trace, "--kv-slots", 4, "--backend", backend, "--json", out)
    rows = check_records(out, ["fragmentation"])
    assert [r for r in rows if r["metric"].startswith("largest batch")]


def test_the_others_run_beside_a_benchmark_that_cannot(tmp_path, capsys):
    def fails(error):
        def measure(session):
            raise error

        return measure

    here = form.Record.of(1, **{**SOME, "backend": "host"})
    benches = [SimpleNamespace(name=name, help="", run=run, alone=False) for name, run in (
        ("extra", fails(ModuleNotFoundError("No module named 'torch'", name="torch"))),
        ("here", lambda session: [here]),
        ("short", fails(pyvmem.OutOfMemory(12, "no memory"))),
    )]  # fmt: skip
    args = SimpleNamespace(bench="all", full=False, plot=None, json=str(tmp_path / "r.json"), quick=True)
    assert command_line.run_bench(args, benches[:2]) == 0
    assert capsys.readouterr().err == "benchmarks: extra: needs torch: pip install torch\n"
    assert command_line.run_bench(args, benches) == 1 and form.load(args.json) == [here]
    assert "benchmarks: short: " in capsys.readouterr().err
    args.bench = "short"
    with pytest.raises(pyvmem.OutOfMemory):
        command_line.run_bench(args, benches[2:])


def test_the_screen_names_bare_calls_and_the_paper_beside_each_row():
    def record(backend, size, metric, median, paper=None, bench="vmm"):
        return form.Record.of(median, bench=bench, backend=backend, device="GPU", page_size=size, metric=metric,
                              unit="us", paper=paper)  # fmt: skip

    found = [record("stock", 64 * KIB, "map", 20, 8), record("stock", 2 * MIB, "map", 21, 40),
             record("cuda-bare", 2 * MIB, "map", 32), record("stock", 64 * KIB, "map, no backdrop", 1)]  # fmt: skip
    assert summary.rows(found) == [("map a page", "20 us", "21 us", "32 us", "8")]
    assert summary.screen([], summary.about()) == []
    batches = [
        form.Record.of(1234, bench="fragmentation", backend="stock", device="GPU", page_size=size, paper=258,
                       metric="largest batch, Llama-3-8B, 1024 MiB", unit="requests")
        for size in (64 * KIB, 2 * MIB)
    ]  # fmt: skip
    assert summary.rows(batches) == [("requests in the same memory", "1234", "1234", "", "258")]
    assert max(map(len, summary.screen(found + batches, summary.about()))) <= 80
    assert max(len(text) for text, *_ in summary.ROWS) <= summary.COLUMNS[0]


BANDWIDTH = ("bandwidth", "--quick", "--backend", "host", "--page-size", "2M", "--tensors", "2")


@pytest.mark.parametrize(
    "args, status, said",
    [
        (("vmm", "--backend", "nonsense"), 2, ("--backend", "nonsense", "host")),
        (("vmm", "--backend", "host", "--page-size", "3K"), 1, ("--page-size", "3K", "64K, 128K, 256K, 2M")),
        (("vmm", "--backend", "host", "--page-size", "0"), 2, ("--page-size", "'0'")),
        (("vmm", "--backend", "host", "--device", "99"), 1, ("--device 99", "host", "0")),
        (("bandwidth", "--size", "1e400K"), 2, ("--size", "1e400K")),
        (("bandwidth", "--tensors", "0"), 2, ("--tensors", "0", "1")),
        (("vmm", "--device=-1"), 2, ("--device", "-1", "0")),
        (("vmm", "--device", "3000000000"), 2, ("--device", "3000000000", "2147483647")),
        (("fragmentation", "--trace", "/does/not/exist"), 2, ("--trace", "/does/not/exist")),
        (("all", "--trace", "/does/not/exist"), 2, ("--trace", "/does/not/exist")),
        ((*BANDWIDTH, "--json", "/does/not/exist/r.json"), 2, ("--json", "/does/not/exist")),
        ((*BANDWIDTH, "--json", "/"), 2, ("--json", "folder")),
        ((*BANDWIDTH, "--plot", "/does/not/exist/p.png"), 2, ("--plot", "/does/not/exist")),
        ((*BANDWIDTH, "--plot", "p.doc"), 1, ("--plot", "p.doc", "png")),
        ((*BANDWIDTH, "--plot", "plot"), 1, ("--plot", "png")),
        (("step", "--kv-slots", "65537"), 2, ("--kv-slots", "65537", "65536")),
        (("step", "--iterations", "0"), 2, ("--iterations", "0", "1")),
        (("step", "--pause-us=-1"), 2, ("--pause-us", "-1", "0")),
        (("fragmentation", "--kv-budget", "0"), 2, ("--kv-budget", "0", "1")),
        (("fragmentation", "--model", "nonsense"), 2, ("--model", "nonsense", "Llama-3-8B")),
        (("nonsense",), 2, ("nonsense",)),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(args, status, said, capsys):
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    try:
        code = main(args)
    except SystemExit as end:  # argparse's
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (status, "")
    line = err.splitlines()[-1]
    assert line.startswith(("benchmarks: ", "python -m benchmarks")) and all(part in line for part in said)
    assert status == 2 or err.count("\n") == 1


def test_too_little_memory_is_said_in_one_line(capsys):
    assert main(["fragmentation", "--quick", "--backend", "host", "--kv-budget", "1"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("benchmarks: the budget of 1048576 bytes is too small")


def test_the_module_runs_without_the_optional_extras(tmp_path):
    for name in ("rich", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    small = ("bandwidth", "--quick", "--backend", "host", "--page-size", "2M", "--tensors", 2, "--size", "2M")
    assert "take back" in command(*small, PYTHONPATH=path).stdout
    done = command(*small, "--plot", tmp_path / "p.png", check=False, PYTHONPATH=path)
    assert done.returncode == 1 and "matplotlib" in done.stderr


# ---- records ------------------------------------------------------------------------------------------------

SOME = dict(bench="b", backend="host", device="d", page_size=None, metric="m", unit="us")


def test_a_record_holds_the_distribution():
    r = form.Record.of(np.arange(101), **SOME)
    assert (r.p10, r.median, r.p90, r.p99, r.n) == (10, 50, 90, 99, 101)
    assert form.Record.of(3, **SOME).p99 == 3


def test_load_refuses_what_is_no_list_of_records(tmp_path):
    for text in ("{}", '[{"bench": "b"}]', "[1]"):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match="records"):
            form.load(tmp_path / "r.json")


def test_a_run_that_is_cut_off_leaves_what_it_kept(tmp_path):
    path, first = tmp_path / "r.json", form.Record.of(1, **SOME)

    class CutOff(Exception):
        pass

    def measure(session):
        session.keep([first])
        session.keep([first, first])
        raise CutOff

    bench = SimpleNamespace(name="b", help="", run=measure)
    args = SimpleNamespace(bench="b", plot=None, json=str(path), quick=True)
    with pytest.raises(CutOff):
        command_line.run_bench(args, [bench])
    assert form.load(path) == [first, first] and os.listdir(tmp_path) == ["r.json"]


def test_records_go_to_a_pipe_too(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE, text=True)
    form.dump([form.Record.of(1, **SOME)], path)
    assert '"bench": "b"' in reader.communicate(timeout=900)[0] and path.is_fifo()


# ---- what is shown ------------------------------------------------------------------------------------------


def test_tables_fit_80_columns():
    names = ["m", "a metric with everything that tells it apart from the others of its benchmark, for 16,384 tokens"]
    backends = ["host", "DynamicCache, sdpa, no cuDNN"]
    found = [form.Record.of([1, 123456.7], **{**SOME, "metric": m, "backend": b, "page_size": 2 << 20, "paper": 12345})
             for m in names for b in backends]  # fmt: skip
    lines = session.table(found)
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("m, us")] and lines[0].split() == list(session.COLUMNS)


def test_small_numbers_of_a_table_stand_apart():
    small = form.Record.of([0.0001234, 0.0002345, 0.00001111], **{**SOME, "unit": "", "page_size": 64 << 10})
    title, row = session.table([small])[1:]
    assert title == small.metric  # without a unit
    assert [float(cell) for cell in row.split()[2:6]] == pytest.approx(
        [small.median, small.p10, small.p90, small.p99], rel=1e-3
    )
    assert row.split()[6] == "3"


@pytest.mark.parametrize("seconds, lines", [(0, 5), (3600, 1)])
def test_progress_without_a_terminal(seconds, lines, monkeypatch):
    monkeypatch.setattr(session, "EVERY_SECONDS", seconds)
    out = io.StringIO()
    args = SimpleNamespace(quick=True)
    assert list(session.Session("b", args, out).track([1, 2, 3, 4], "work")) == [1, 2, 3, 4]
    said = out.getvalue().splitlines()
    assert len(said) == lines and said[0] == "b: work"
    assert not said[1:] or said[2].startswith("b: work: 50 % after ")


def test_plots_have_no_empty_panel():
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = figure(layout="constrained")
    session.plot([form.Record.of(v, **{**SOME, "metric": m}) for m, v in (("one", 1), ("none", 0))], drawn)
    assert [axes.get_title() for axes in drawn.axes] == ["one"]


# ---- traces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, prompt, output",
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\nx,396,109\n", [374, 396], [44, 109]),
        ('{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n\n', [6758], [500]),
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7564.0,192.0,7756.0,39.4\n", [7564], [192]),
        ("num_prefill_tokens,num_decode_tokens\n5,0\n", [5], [1]),
        ("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\nx,1,2\r\n", [1], [2]),
    ],
)
def test_trace_formats(tmp_path, text, prompt, output):
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8", newline="")
    trace = read_trace(path)
    assert trace.prompt.tolist() == prompt and trace.output.tolist() == output
    assert len(trace) == len(prompt)


@pytest.mark.parametrize(
    "text, said",
    [
        ("a,b\n1,2\n", "must have one of these pairs"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\nx,many,2\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ('{"input_length": 1, "output_length": 2}\n{"input_length"\n', "line 2"),
        ("", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,nan,2\n", "line 2: ContextTokens must be a number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,3e9\n", "GeneratedTokens must be a number up to 2147483647"),
        ('{"input_length": 1, "output_length": Infinity}\n', "line 1"),
        ('{"input_length": 1, "output_length": 2}\n[1, 2]\n', "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1\0,2\n", "trace|line 2"),
    ],
)
def test_broken_traces_are_refused(tmp_path, text, said):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_trace(path)


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "trace").write_bytes(b"\x93NUMPY\x01\x00\xff")
    with pytest.raises(ValueError, match="trace is not a trace"):
        read_trace(tmp_path / "trace")


def test_the_synthetic_trace_is_reproducible_and_of_the_means_asked_for():
    one, two = synthetic_trace(20000, seed=3), synthetic_trace(20000, seed=3)
    assert (one.prompt == two.prompt).all() and (one.output == two.output).all()
    assert abs(one.prompt.mean() / 1100 - 1) < 0.1 and abs(one.output.mean() / 210 - 1) < 0.1
    assert one.prompt.min() >= 1 and one.prompt.max() <= 8192
