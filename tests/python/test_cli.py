"""The command line as a user runs it, the records it writes, and the traces it reads.

SPDX-License-Identifier: MIT
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pyvmem
from pyvmem.bench import all_benchmarks, records as form, session, summary
from pyvmem.bench.traces import read_trace, synthetic_trace
from pyvmem.tools import cli, doctor
from pyvmem.tools.argtypes import parse_size, size_text

KIB, MIB = 1 << 10, 1 << 20


def command(*args, check=True, **env):
    """Run pyvmem; returns the finished process."""
    done = subprocess.run(
        [sys.executable, "-m", "pyvmem", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=1800,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
        progress = re.compile(rf"({'|'.join(b.name for b in all_benchmarks())}): .+")
        assert not [line for line in done.stderr.splitlines() if not progress.fullmatch(line)]
    return done


# ---- doctor -------------------------------------------------------------------------------------------------


def test_doctor_says_what_works_and_what_stops_the_rest():
    said = command("doctor").stdout
    for name in pyvmem.backends():
        error = pyvmem.probe(name)
        line = next(line for line in said.splitlines() if line.startswith(name))
        if error is None:
            assert line.split()[1] in ("works", "best", "chosen")
        else:
            assert str(error) in line


@pytest.mark.parametrize("chosen, status, said", [
    ("host", 0, "VMEM_BACKEND=host\n"),
    ("uvm", 1, "VMEM_BACKEND=uvm, which does not work here\n"),
    ("nonsense", 1, "VMEM_BACKEND=nonsense, which must be one of uvm, stock, cuda, host\n"),
    ("", 0, "VMEM_BACKEND=\n"),
])  # fmt: skip
def test_doctor_says_whether_the_chosen_backend_works(chosen, status, said, monkeypatch):
    monkeypatch.setenv("VMEM_BACKEND", chosen)
    monkeypatch.setattr(
        doctor, "probe", lambda name, device, **options: None if name == "host" else pyvmem.VmemError(19, "no")
    )
    out = io.StringIO()
    assert doctor.doctor(out=out) == status
    assert said in out.getvalue()
    assert f"\nhost   {'chosen' if chosen == 'host' else 'works' if chosen else 'best'} " in out.getvalue()


@pytest.mark.parametrize("files, variables, devices, said", [
    ({"proc/version": "Linux version 6.6.87-microsoft-standard-WSL2"}, {}, [], "WSL2"),
    ({"proc/version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"}, {}, [], "gVisor"),
    ({"etc/nv_tegra_release": "# R36"}, {}, [], "Jetson"),
    ({".dockerenv": "", "proc/driver/nvidia/version": "580.65.06"}, {}, [], "a container"),
    ({"run/.containerenv": "", "proc/driver/nvidia/version": "580.65.06"}, {}, [], "a container"),
    ({"proc/driver/nvidia/version": "580.65.06"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [], "a container"),
    ({"proc/driver/nvidia/capabilities/gpu0/mig/gi7/access": ""}, {}, [], "MIG"),
    ({}, {"CUDA_VISIBLE_DEVICES": "MIG-1b2c"}, [], "MIG"),
    ({}, {}, ["", "NVIDIA A16-4Q"], "vGPU"),
    ({"mps/control": ""}, {"CUDA_MPS_PIPE_DIRECTORY": "mps"}, [], "CUDA MPS"),
    ({"proc/version": "Linux version 6.1.0", ".dockerenv": ""}, {}, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], None),
])  # fmt: skip
def test_doctor_recognises_where_it_is(files, variables, devices, said, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("CUDA_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "nothing")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    found = doctor.environment(devices, str(tmp_path))
    assert [line.split(":")[0] for line in found] == ([said] if said else [])


def test_an_unknown_driver_is_tried_where_it_is_asked_for(monkeypatch, capsys):
    asked = []
    error = pyvmem.VmemError(93, "driver release 999.1: the ABI table ends; unknown_driver=True tries it all the same")
    monkeypatch.setattr(doctor, "probe", lambda *_, unknown_driver=False, **__: asked.append(unknown_driver) or error)
    assert cli.main(["doctor", "--unknown-driver"]) == 1 and asked and all(asked)
    assert "--unknown-driver tries it all the same" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "run_selftest", lambda *_, **options: asked.append(options) or {"passed": True})
    assert cli.main(["doctor", "--selftest", "--backend", "stock", "--unknown-driver"]) == 0
    assert asked[-1]["unknown_driver"] is True


def test_doctor_as_json():
    found = json.loads(command("doctor", "--json").stdout)
    assert [b["name"] for b in found["backends"]] == pyvmem.backends()
    host = found["backends"][-1]
    assert host["works"] and host["page_sizes"] == [64 * KIB, 128 * KIB, 256 * KIB, 2 * MIB]
    assert host["memory_total"] > 0 and "backdrop" in host["capabilities"]
    for b in found["backends"]:
        assert b["works"] == (b["reason"] is None)


@pytest.mark.parametrize("args, unbuffered", [("doctor --json", ""), ("top --once", ""), ("--version", "1"),
                                              ("bench vmm --quick --backend host --page-size 2M", "")])  # fmt: skip
def test_output_that_cannot_be_written_is_an_error_of_one_line(args, unbuffered):
    for to in (">/dev/full", ">&-"):
        line = f"exec {sys.executable} -m pyvmem {args} {to}"
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env, timeout=900)
        said = [text for text in done.stderr.splitlines() if not text.startswith("vmm: ")]
        assert done.returncode == 1 and len(said) == 1 and said[0].startswith("pyvmem: "), done.stderr


def test_errors_have_nowhere_to_go():
    line = f"exec {sys.executable} -m pyvmem bench vmm --quick --backend host --page-size 2M 2>&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "map" in done.stdout


# ---- benchmarks ---------------------------------------------------------------------------------------------


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
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "r.json", tmp_path / "p.png"
    said = command("bench", "vmm", "--quick", "--backend", backend, "--json", out, "--plot", plot).stdout
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
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bandwidth(backend, tmp_path):
    out = tmp_path / "r.json"
    command(
        *("bench", "bandwidth", "--quick", "--backend", backend, "--json", out),
        *("--page-size", "2M", "--tensors", 4, "--size", "3M"),
    )
    rows = check_records(out, ["bandwidth"])
    assert any(r["metric"] == "back 4 tensors of 3M" and r["unit"] == "GB/s" for r in rows)


def test_fragmentation_of_a_trace(backend, tmp_path):
    trace, out = tmp_path / "trace.csv", tmp_path / "r.json"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,374,44\n" * 20)
    command("bench", "fragmentation", "--quick", "--trace", trace, "--kv-slots", 4, "--backend", backend, "--json", out)
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
    assert cli.run_bench(args, benches[:2]) == 0
    assert capsys.readouterr().err == "pyvmem: extra: needs torch: pip install torch\n"
    assert cli.run_bench(args, benches) == 1 and form.load(args.json) == [here]
    assert "pyvmem: short: " in capsys.readouterr().err
    args.bench = "short"
    with pytest.raises(pyvmem.OutOfMemory):
        cli.run_bench(args, benches[2:])


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


@pytest.mark.parametrize(
    "args, said",
    [
        (["bench", "vmm", "--backend", "nonsense"], "nonsense"),
        (["bench", "vmm", "--page-size", "many"], "many"),
        (["bench", "fragmentation", "--trace", "/does/not/exist"], "/does/not/exist"),
        (["bench", "nonsense"], "nonsense"),
        (["bench"], "usage"),
        ([], "usage"),
    ],
)
def test_mistakes_are_named(args, said):
    done = command(*args, check=False)
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr


BANDWIDTH = ("bench", "bandwidth", "--quick", "--backend", "host", "--page-size", "2M", "--tensors", "2")


@pytest.mark.parametrize(
    "args, status, said",
    [
        (("bench", "vmm", "--backend", "nonsense"), 2, ("--backend", "nonsense", "host")),
        (("bench", "vmm", "--backend", "host", "--page-size", "3K"), 1, ("--page-size", "3K", "64K, 128K, 256K, 2M")),
        (("bench", "vmm", "--backend", "host", "--page-size", "0"), 2, ("--page-size", "'0'")),
        (("bench", "vmm", "--backend", "host", "--device", "99"), 1, ("--device 99", "host", "0")),
        (("bench", "bandwidth", "--size", "1e400K"), 2, ("--size", "1e400K")),
        (("bench", "bandwidth", "--tensors", "0"), 2, ("--tensors", "0", "1")),
        (("bench", "vmm", "--device=-1"), 2, ("--device", "-1", "0")),
        (("bench", "vmm", "--device", "3000000000"), 2, ("--device", "3000000000", "2147483647")),
        (("doctor", "--device", "first"), 2, ("--device", "first")),
        (("top", "--interval", "nan"), 2, ("--interval", "nan")),
        (("bench", "fragmentation", "--trace", "/does/not/exist"), 2, ("--trace", "/does/not/exist")),
        (("bench", "all", "--trace", "/does/not/exist"), 2, ("--trace", "/does/not/exist")),
        ((*BANDWIDTH, "--json", "/does/not/exist/r.json"), 2, ("--json", "/does/not/exist")),
        ((*BANDWIDTH, "--json", "/"), 2, ("--json", "folder")),
        ((*BANDWIDTH, "--plot", "/does/not/exist/p.png"), 2, ("--plot", "/does/not/exist")),
        ((*BANDWIDTH, "--plot", "p.doc"), 1, ("--plot", "p.doc", "png")),
        ((*BANDWIDTH, "--plot", "plot"), 1, ("--plot", "png")),
        (("bench", "vllm"), 2, ("vllm", "step")),
        (("bench", "step", "--kv-slots", "65537"), 2, ("--kv-slots", "65537", "65536")),
        (("bench", "step", "--iterations", "0"), 2, ("--iterations", "0", "1")),
        (("bench", "step", "--pause-us=-1"), 2, ("--pause-us", "-1", "0")),
        (("bench", "fragmentation", "--kv-budget", "0"), 2, ("--kv-budget", "0", "1")),
        (("bench", "fragmentation", "--model", "nonsense"), 2, ("--model", "nonsense", "Llama-3-8B")),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(args, status, said, capsys):
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    try:
        code = cli.main(args)
    except SystemExit as end:  # argparse's
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (status, "")
    line = err.splitlines()[-1]
    assert line.startswith("pyvmem") and all(part in line for part in said)
    assert status == 2 or err.count("\n") == 1


def test_too_little_memory_is_said_in_one_line(capsys):
    assert cli.main(["bench", "fragmentation", "--quick", "--backend", "host", "--kv-budget", "1"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("pyvmem: the budget of 1048576 bytes is too small")


@pytest.mark.parametrize("unbuffered", ("", "1"))  # whether the output goes at once or at the end
def test_a_reader_that_leaves_early(unbuffered):
    done = subprocess.run(
        [f"{sys.executable} -m pyvmem doctor | true; echo ${{PIPESTATUS[0]}}"],
        executable="/bin/bash", shell=True, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert done.stdout.strip() in ("0", "1") and done.stderr == ""


def test_the_module_runs_without_the_optional_extras(tmp_path):
    for name in ("rich", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    small = ("bench", "bandwidth", "--quick", "--backend", "host", "--page-size", "2M", "--tensors", 2, "--size", "2M")
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
        cli.run_bench(args, [bench])
    assert form.load(path) == [first, first] and os.listdir(tmp_path) == ["r.json"]


def test_records_go_to_a_pipe_too(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE, text=True)
    form.dump([form.Record.of(1, **SOME)], path)
    assert '"bench": "b"' in reader.communicate(timeout=900)[0] and path.is_fifo()


SIZES = [("64K", 65536), ("2M", 2 << 20), ("12TiB", 12 << 40), ("1.5g", 3 << 29), ("7", 7)]


@pytest.mark.parametrize("text, bytes", SIZES)
def test_sizes(text, bytes):
    assert parse_size(text) == bytes
    assert parse_size(size_text(bytes)) == bytes


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


def test_the_version_is_the_librarys():
    header = (Path(__file__).resolve().parents[2] / "libvmem/include/vmem.h").read_text()
    parts = [re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    assert pyvmem.__version__ == ".".join(parts)
    assert command("--version").stdout.split() == ["pyvmem", pyvmem.__version__]
