"""vLLM in the processes that it starts by itself: spawned engine cores under ``LLM(...)`` and ``vllm serve``."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import ends
import engines
import models
import pytest
from serve import ask, free_port

SECONDS = 400  # for an engine to start and to answer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    engines.in_child(lambda: str(models.write("llama", folder)), vmem=False)
    return folder


@pytest.fixture(scope="module")
def own(model):
    """The tokens of vLLM itself, in one process."""
    return engines.in_child(engines.serve, model, vmem=False, turns=1, seconds=SECONDS)["tokens"]


def on_vmem():
    return dict(os.environ, VMEM_VLLM="1", VLLM_ENABLE_V1_MULTIPROCESSING="1")


@pytest.fixture
def start():
    """Starts a Python program in a session of its own. What is left of it ends with the test, whatever it started."""
    made = []

    def start(*command, **options):
        made.append(ends.start(sys.executable, *command, **options))
        return made[-1]

    yield start
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def printed(start):
    """Runs a Python program, which must end well and in time: the lines that it prints."""

    def run(*command, env=None):
        process = start(*command, env=env, text=True, stdout=subprocess.PIPE)
        text, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0 and text, text[-2000:]
        return text.splitlines()

    return run


def left(pid):
    """The control page of the scheduler in process `pid`, while it runs."""
    from pyvmem.engine import control

    return [e for e, _ in control.engines() if e.pid == pid]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_spawned_engine_core_gives_vllms_tokens_while_limits_move(printed, model, own, ranks):
    options = json.dumps(dict(tensor_parallel_size=ranks))
    lines = printed(engines.__file__, str(model), options, env=on_vmem())
    (result,) = [line[7:] for line in lines if line.startswith("RESULT ")]
    told = json.loads(result)
    assert told["core"] != told["here"]
    assert told["tokens"] == own + own
    assert told["idle"]["used"] == 0 and told["idle"]["workers"] == ranks
    assert told["idle"]["step_maps"] == 0
    assert told["reset_done"] and told["reset"]["cached"] == 0
    assert not left(told["core"])


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


@pytest.fixture
def serving(start, model):
    """`vllm serve` on vMem: its process and its address."""
    port = free_port()
    process = start(
        "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "tiny", "--max-model-len", str(engines.MOST), "--max-num-seqs", "8", "--enforce-eager",
        "--enable-prefix-caching", "--max-num-batched-tokens", "512", "--seed", "0", "--dtype", "float32",
        "--kv-cache-memory-bytes", str(256 << 20), "--middleware", "pyvmem.vllm.http.Limits", env=on_vmem(),
    )  # fmt: skip
    end = time.monotonic() + SECONDS
    while True:
        assert process.poll() is None, f"vllm serve ended with status {process.returncode}"
        assert time.monotonic() < end, "vllm serve did not start in time"
        try:
            get(f"http://127.0.0.1:{port}/health")
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)  # it loads the model; nothing else tells when it listens
    yield process, f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    process.wait(120)


@pytest.fixture
def server(serving):
    return serving[1]


def test_beside_another_platform_vllm_does_not_start(start, tmp_path):
    about = tmp_path / "other-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other:platform\n")
    (tmp_path / "other.py").write_text("def platform():\n    return 'other.Platform'\n")
    env = on_vmem()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    process = start("-c", "import vllm.platforms\nvllm.platforms.current_platform", env=env, text=True,
                    stderr=subprocess.PIPE)  # fmt: skip
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode and "Only one platform plugin can be activated" in said and "'vmem'" in said


@pytest.mark.parametrize("late, environ", [(False, dict(VLLM_TARGET_DEVICE="cpu")), (True, dict(VMEM_VLLM="0"))])
def test_vllm_does_not_start_with_its_own_cache_where_it_asked_no_plugin_in_time(start, late, environ):
    """Releases that ask plugins although a device is named take vMem's platform."""
    program = f"""
import os
from vllm.platforms import current_platform
chosen = type(current_platform)
if {late}:
    os.environ["VMEM_VLLM"] = "1"
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model="model")
print(chosen)
"""
    process = start("-c", program, env=on_vmem() | environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told, said = process.communicate(timeout=SECONDS)
    refused = process.returncode and "VMEM_VLLM=1: vLLM has chosen its platform without vMem" in said
    assert refused or "pyvmem.vllm.platform" in told


def test_an_engine_core_ends_whose_server_was_killed(serving):
    from pyvmem.engine import control

    found, _ = max(control.engines(), key=lambda e: e[1][control.STARTED])
    assert found.pid != serving[0].pid
    serving[0].kill()
    end = time.monotonic() + SECONDS
    while left(found.pid):
        assert time.monotonic() < end, "the engine core stays"
        time.sleep(0.1)  # no process that is left can tell


def test_vllm_serve_gives_vllms_tokens_over_http(server, own):
    from pyvmem.engine import control

    prompts = [p["prompt_token_ids"] for p in engines.prompts_of()]
    asked = dict(model="tiny", prompt=prompts, max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)

    def serve():
        answers = ask(f"{server}/v1/completions", asked)["choices"]
        return [a["token_ids"] for a in sorted(answers, key=lambda a: a["index"])]

    assert serve() == own
    found, page = max(control.engines(), key=lambda e: e[1][control.STARTED])
    assert found.steps > 0 and found.resident > 0
    assert (found.model, str(found.port)) == ("tiny", server.rpartition(":")[2])
    told = ask(f"{server}/vmem/limit", dict(limit=2 * found.least))["engines"]
    assert [(e["name"], e["limit"]) for e in told] == [(found.name, 2 * found.least)]
    assert serve() == own
    now = control.Engine.of("", 0, page)
    assert now.allowed == 2 * found.least
    assert [e["steps"] for e in json.loads(get(f"{server}/vmem/limit"))["engines"]] == [now.steps]
    for path in ("/metrics", "/vmem/metrics"):
        assert "vllm:vmem_kv_" in get(server + path)
