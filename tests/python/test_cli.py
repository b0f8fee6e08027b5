"""The command line as a user runs it.

SPDX-License-Identifier: MIT
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyvmem
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
        assert done.stderr == ""
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
    ({}, {"VLLM_PLUGINS": "lora, other"}, [], "VLLM_PLUGINS=lora, other"),
    ({}, {"VLLM_PLUGINS": "lora, vmem"}, [], "VLLM_PLUGINS=lora, vmem"),
    ({}, {"VLLM_PLUGINS": ""}, [], "VLLM_PLUGINS="),
    ({}, {"VLLM_PLUGINS": "lora,vmem"}, [], None),
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


@pytest.mark.parametrize("args, unbuffered", [("doctor --json", ""), ("top --once", ""), ("--version", "1")])
def test_output_that_cannot_be_written_is_an_error_of_one_line(args, unbuffered):
    for to in (">/dev/full", ">&-"):
        line = f"exec {sys.executable} -m pyvmem {args} {to}"
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env, timeout=900)
        said = done.stderr.splitlines()
        assert done.returncode == 1 and len(said) == 1 and said[0].startswith("pyvmem: "), done.stderr


def test_errors_have_nowhere_to_go():
    line = f"exec {sys.executable} -m pyvmem doctor 2>&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "host " in done.stdout


@pytest.mark.parametrize("args, said", [(["nonsense"], "nonsense"), ([], "usage")])
def test_mistakes_are_named(args, said):
    done = command(*args, check=False)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("args, said", [
    (("doctor", "--device", "first"), ("--device", "first")),
    (("top", "--interval", "nan"), ("--interval", "nan")),
])  # fmt: skip
def test_a_mistake_is_one_line_before_anything_runs(args, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith("pyvmem") and all(part in line for part in said)


@pytest.mark.parametrize("unbuffered", ("", "1"))  # whether the output goes at once or at the end
def test_a_reader_that_leaves_early(unbuffered):
    done = subprocess.run(
        [f"{sys.executable} -m pyvmem doctor | true; echo ${{PIPESTATUS[0]}}"],
        executable="/bin/bash", shell=True, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert done.stdout.strip() in ("0", "1") and done.stderr == ""


SIZES = [("64K", 65536), ("2M", 2 << 20), ("12TiB", 12 << 40), ("1.5g", 3 << 29), ("7", 7)]


@pytest.mark.parametrize("text, bytes", SIZES)
def test_sizes(text, bytes):
    assert parse_size(text) == bytes
    assert parse_size(size_text(bytes)) == bytes


def test_the_version_is_the_librarys():
    header = (Path(__file__).resolve().parents[2] / "libvmem/include/vmem.h").read_text()
    parts = [re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    assert pyvmem.__version__ == ".".join(parts)
    assert command("--version").stdout.split() == ["pyvmem", pyvmem.__version__]
