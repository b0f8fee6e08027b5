"""Three models in a pool that holds two: `vllm serve` on the CPU, whose servers let them sleep and wake."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path

import ends
import engines
import models
import pytest
from serve import free_port

from pyvmem.engine.metrics import parent_of
from pyvmem.tools import cli
from pyvmem.tools import models as cli_models
from pyvmem.tools import models_file as tool

SECONDS = 400
NAMES = ("a", "b", "c")
KEY = "secret"
POOL = 88 << 20  # each model: 32 MiB of weights, and at least 4 MiB for a request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "wide"
    models.MODELS["wide"] = dict(models.MODELS["llama"], vocab_size=16000, num_hidden_layers=2)
    engines.in_child(lambda: str(models.write("wide", folder)), vmem=False)
    return folder


def call(url, body=None, key=KEY, timeout=SECONDS):
    """Status, headers and JSON of an answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(url, body if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return answer.status, answer.headers, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read() or b"null")


def toml(folder, size, names, *args, **more):
    """A file for `pyvmem models`: models of this folder, with these further arguments; more: keys of each model."""
    given = ["--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--max-num-batched-tokens", "512",
             "--seed", "0", "--dtype", "float32", "--api-key", KEY, "--skip-tokenizer-init", *args]  # fmt: skip
    lines = [f'pool = "{uuid.uuid4().hex[:12]}"', f"size = {size}", "slice = 1"]
    environ = dict(VMEM_VLLM_PAGE_SIZE="64K", VLLM_LOGGING_LEVEL="INFO", VLLM_API_KEY=KEY)
    for name in names:
        about = dict(path=str(folder), port=free_port(), outside="1M", args=given, **more)
        for table, values in ((f"[models.{name}]", about), (f"[models.{name}.env]", environ)):
            lines += [table, *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines)


class Model:
    """A server as `pyvmem models` would have it started."""

    def __init__(self, pool, name):
        model = pool.one(name)
        logs = Path(os.environ.get("VMEM_TEST_LOGS") or tempfile.mkdtemp())
        self.logs = logs
        self.name, self.port, self.url = name, model.port, f"http://127.0.0.1:{model.port}"
        command = pool.command(model)
        at = command.index("vllm")  # behind what keeps a pair of servers
        before = [sys.executable, *command[1:at]] if at else []
        with open(logs / f"{name}.log", "ab") as log:
            self.process = ends.start(
                *before, sys.executable, "-m", "vllm.entrypoints.cli.main", *command[at + 1 :],
                env={**os.environ, **pool.environment(model)}, stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self):
        end = time.monotonic() + SECONDS
        while True:
            assert self.process.poll() is None, f"{self.name} ended with status {self.process.returncode}"
            assert time.monotonic() < end, f"{self.name} did not start in time"
            with contextlib.suppress(OSError):
                if self.state()["state"]:
                    return
            time.sleep(0.2)  # nothing else tells when it listens

    def state(self):
        return call(f"{self.url}/vmem/state")[2]

    def sleeps(self):
        """How many times it has slept with its requests, for a moment each, by its log."""
        return (self.logs / f"{self.name}.log").read_text().count("the model sleeps with its requests")

    def order(self, what):
        return call(f"{self.url}/vmem/{what}", {})

    def ask(self, prompt, tokens=8, **more):
        body = dict(model=self.name, prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True,
                    return_token_ids=True, **more)  # fmt: skip
        return call(f"{self.url}/v1/completions", body)

    def tokens(self, prompt, tokens=8):
        status, _, told = self.ask(prompt, tokens)
        assert status == 200, told
        return told["choices"][0]["token_ids"]

    def until(self, what, seconds=60):
        end = time.monotonic() + seconds
        while not what(told := self.state()):
            assert time.monotonic() < end, told
            time.sleep(0.02)
        return told

    def kill(self, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait()


def started(stack, pool, name):
    """A `Model` that ends with the stack."""
    model = Model(pool, name)
    stack.callback(model.kill)
    return model


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "models.toml"
    path.write_text(toml(folder, POOL, NAMES, "--kv-cache-memory-bytes", str(32 << 20), queue=90))
    return path


@pytest.fixture(scope="module")
def three(file):
    made, pool = {}, tool.read(file.read_text())
    with contextlib.ExitStack() as stack:
        for names in (NAMES[:2], NAMES[2:]):  # the third one finds the pool full: an idle one sleeps for it
            made |= {name: started(stack, pool, name) for name in names}
            for name in names:
                made[name].wait()
        yield made


PROMPT = [(7 * i) % 900 + 3 for i in range(100)]


def test_a_model_wakes_for_a_request_and_another_sleeps_for_it(three):
    first = three["a"].tokens(PROMPT)
    for _ in range(2):
        for name in NAMES:
            assert three[name].tokens(PROMPT) == first  # the same weights in all, also after each sleep
            assert three[name].state()["state"] == "awake"
    states = [m.state() for m in three.values()]
    assert 1 <= [s["state"] for s in states].count("awake") < 3
    assert all(s["model"] == m.name and s["port"] == m.port for s, m in zip(states, three.values()))
    assert sum(s["weights_held"] for s in states) <= POOL


def test_many_at_once_are_all_served(three):
    expected = three["a"].tokens(PROMPT, 32)

    def one(i):
        return three[NAMES[i % 3]].tokens(PROMPT, 32)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert all(t == expected for t in pool.map(one, range(36)))


def test_long_answers_of_two_models_keep_no_third_one_waiting(three):
    """A model that is never idle sleeps with its requests, and they go on as if nothing had been."""
    expected, long = three["a"].tokens(PROMPT), three["a"].tokens(PROMPT, 380)
    busy, done = (three["a"], three["b"]), threading.Event()

    def slept():
        return sum(model.sleeps() for model in busy)

    before = slept()

    def ask(model):
        answers = [model.tokens(PROMPT, 380)]
        while not done.is_set():
            answers.append(model.tokens(PROMPT, 380))
        return answers

    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(ask, model) for model in busy * 3]
        try:
            for model in busy:
                model.until(lambda s: s["running"])
            end = time.monotonic() + SECONDS
            while True:  # the answer may come before that line of the log, or the model slept between two requests
                assert three["c"].tokens(PROMPT) == expected
                if slept() > before:
                    break
                assert time.monotonic() < end, "no busy model slept"
        finally:
            done.set()
        assert all(answer == long for answers in asked for answer in answers.result())


def test_a_stream_counts_until_its_last_byte(three):
    three["a"].tokens(PROMPT)
    body = dict(model="a", prompt=PROMPT, max_tokens=300, temperature=0, ignore_eos=True, stream=True)
    asked = urllib.request.Request(f"{three['a'].url}/v1/completions", json.dumps(body).encode(),
                                   {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"})  # fmt: skip
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        answer.readline()
        assert three["a"].state()["running"] == 1
        sleeps = threading.Thread(target=three["a"].order, args=("sleep",))
        sleeps.start()
        three["a"].until(lambda s: s["state"] == "closing")
        assert b"[DONE]" in answer.read()  # no byte of it is lost
    sleeps.join()
    assert three["a"].state()["state"] == "asleep"


def run(capsys, *args):
    """Exit status and output of ``pyvmem ARGS``."""
    status = cli.main([str(a) for a in args])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_an_operator_orders_models_by_their_file(three, file, capsys):
    three["a"].tokens(PROMPT)
    status, told = run(capsys, "models", file, "ls")
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines()}
    assert status == 0 and rows["a"][:2] == ["awake", str(three["a"].port)] and set(rows) == {"model", *NAMES}
    assert run(capsys, "models", file, "sleep", "a")[0] == 0 and three["a"].state()["state"] == "asleep"
    assert run(capsys, "models", file, "wake", "a")[0] == 0 and three["a"].state()["state"] == "awake"
    assert run(capsys, "models", file, "limit", "a", "8M")[0] == 0
    assert call(f"{three['a'].url}/vmem/limit")[2]["engines"][0]["limit"] == 8 << 20
    assert run(capsys, "models", file, "limit", "a", "none")[0] == 0
    assert run(capsys, "models", file, "drain", "a")[0] == 0
    assert "drained" in run(capsys, "models", file, "ls")[1] and three["a"].ask(PROMPT)[0] == 503
    assert run(capsys, "models", file, "wake", "a")[0] == 0
    assert "drained" not in run(capsys, "top", "--once")[1]
    metrics = urllib.request.Request(f"{three['a'].url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(metrics, timeout=60) as answer:
        pool = tool.read(file.read_text()).pools[0].name
        told = f'vllm:vmem_model_state{{engine="0",model_name="a",pool="{pool}",state="awake"}} 1.0'
        assert told.encode() in answer.read()


def test_orders_ask_for_the_key_and_a_drained_model_refuses(three):
    model = three["b"]
    assert call(f"{model.url}/vmem/state", key="wrong")[0] == 401
    assert call(f"{model.url}/vmem/nothing")[0] == 404 and call(f"{model.url}/vmem/sleep")[0] == 405
    assert model.order("sleep")[2]["state"] == "asleep"
    assert call(f"{model.url}/v1/completions", dict(model="b"), key="wrong")[0] == 401
    assert model.state()["state"] == "asleep"  # strangers wake nobody
    assert model.order("drain")[2]["state"] == "drained"
    status, headers, told = model.ask(PROMPT)
    assert status == 503 and int(headers["Retry-After"]) > 0 and "drained" in told["error"]["message"]
    status, _, told = model.order("wake")
    assert status == 200 and told["state"] == "awake"
    assert len(model.tokens(PROMPT)) == 8


class Router:
    """vLLM's own router before the models, as docs/models-deploy.md starts it."""

    def __init__(self, pool):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        manual = (Path(__file__).parents[2] / "docs/models-deploy.md").read_text()
        start = f"{sys.executable} -m vllm_router.launch_router --prometheus-port {free_port()} --log-level warning "
        script = re.search(r"```sh\n(vllm-router .*?)```", manual, re.S)[1].replace("vllm-router ", start)
        models = " ".join(f"{r.name}={r.port}" for r in pool.replicas)
        for old, new in (("8080", str(self.port)), ("chat=8001 code=8002", models)):
            assert old in script
            script = script.replace(old, new)
        self._process = ends.start("sh", "-c", f"{script}\nwait", stdout=subprocess.DEVNULL)
        end = time.monotonic() + SECONDS
        while not self._knows(pool.replicas):
            assert self._process.poll() is None and time.monotonic() < end
            time.sleep(0.1)  # nothing else tells when it has all

    def _knows(self, models):
        with contextlib.suppress(OSError, ValueError):
            told = json.dumps(call(f"{self.url}/workers")[2])
            return all(f"127.0.0.1:{m.port}" in told for m in models)
        return False

    def ask(self, name, prompt, tokens):
        body = dict(model=name, prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, return_token_ids=True)
        return call(f"{self.url}/v1/completions", body)

    def remove(self, url):
        asked = urllib.request.Request(f"{self.url}/workers/{urllib.parse.quote(url, safe='')}", method="DELETE")
        urllib.request.urlopen(asked, timeout=60).close()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def router(three, file):
    if not importlib.util.find_spec("vllm_router"):
        pytest.skip("vllm-router is not installed")
    made = Router(tool.read(file.read_text()))
    yield made
    made.kill()


class Asked(threading.Thread):
    """Long requests, one after the other, by the router, until one fails; when this is made, one runs.

    `status`: of the one that failed, 0 if it got no answer. One request alone might end before it is seen to run.
    """

    def __init__(self, router, model):
        super().__init__()
        self._router, self._model, self.status = router, model, 0
        self.start()
        model.until(lambda s: s["running"])

    def run(self):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while (status := self._router.ask(self._model.name, PROMPT, 380)[0]) == 200:
                pass
            self.status = status

    def ended(self):
        self.join(60)
        assert not self.is_alive(), "the request hangs"
        return self.status


def test_behind_vllms_router_models_sleep_and_wake(three, router):
    expected = three["a"].tokens(PROMPT, 32)

    def one(i):
        status, _, told = router.ask(NAMES[i % 3], PROMPT, 32)
        return status, told["choices"][0]["token_ids"] if status == 200 else told

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert all(answer == (200, expected) for answer in pool.map(one, range(24)))
    assert "asleep" in [m.state()["state"] for m in three.values()]  # so that they took turns
    three["b"].order("drain")
    for _ in range(3):
        status, headers, _ = router.ask("b", PROMPT, 8)
        assert status == 503 and int(headers["Retry-After"]) > 0
    assert three["b"].order("wake")[2]["state"] == "awake"
    assert router.ask("b", PROMPT, 8)[0] == 200


def test_behind_the_router_of_the_examples_models_sleep_and_wake(three, file):
    port, program = free_port(), str(Path(__file__).parents[2] / "examples" / "router.py")
    servers = [f"{model.name}={model.url}" for model in three.values()]
    environ = {**os.environ, "PORT": str(port), "VLLM_API_KEY": KEY}
    router, expected = subprocess.Popen([sys.executable, program, *servers], env=environ), three["a"].tokens(PROMPT)
    try:
        for name in NAMES * 2:
            body = dict(model=name, prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
            end = time.monotonic() + SECONDS
            while True:
                with contextlib.suppress(urllib.error.URLError):  # nothing else tells when it listens
                    status, _, told = call(f"http://127.0.0.1:{port}/v1/completions", body)
                    break
                assert router.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            assert status == 200 and told["choices"][0]["token_ids"] == expected
            state = three[name].state()
            assert state["wait"] == 0 and state["room"] >= 0
        three["a"].order("drain")
        three["a"].until(lambda s: s["wait"] == 1e6)  # asleep, it had some wait before
        three["a"].order("wake")
        three["a"].until(lambda s: not s["wait"])
    finally:
        router.kill()
        router.wait()


def test_the_death_of_the_router_harms_no_model(three, file, router):
    lost = Asked(router, three["a"])
    router.kill()
    assert lost.ended() == 0
    three["a"].until(lambda s: not s["running"] and not s["queued"])  # its client is gone
    again = Router(tool.read(file.read_text()))
    try:
        assert again.ask("c", PROMPT, 8)[0] == 200
    finally:
        again.kill()


def engine_of(model):
    """The process of a model's engine, or None."""
    from pyvmem.engine import control

    return next((e.pid for e, _ in control.engines() if e.model == model.name), None)


@pytest.mark.parametrize("what", ["engine", "server"])
def test_a_stopped_process_holds_up_nobody(three, router, what):
    for name in ("a", "b"):
        three[name].tokens(PROMPT)
    pid = engine_of(three["a"]) if what == "engine" else three["a"].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert router.ask("c", PROMPT, 8)[0] == 200  # b gives instead
        assert router.ask("b", PROMPT, 8)[0] == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(three["a"].tokens(PROMPT)) == 8


def test_killed_processes_leave_their_memory_at_once(three, router):
    """A process that dies takes its own requests with it, and no others."""
    engine = Asked(router, three["b"])
    os.kill(engine_of(three["b"]), signal.SIGKILL)
    assert engine.ended() != 200
    for name in ("a", "c"):
        assert router.ask(name, PROMPT, 8)[0] == 200
    three["b"].process.wait(60)  # vLLM's server ends with its engine
    server = Asked(router, three["c"])
    os.kill(three["c"].process.pid, signal.SIGKILL)  # the server alone: its engine ends by itself
    assert server.ended() != 200
    assert router.ask("a", PROMPT, 8)[0] == 200
    end = time.monotonic() + 60
    while engine_of(three["c"]):
        assert time.monotonic() < end, "the engine outlives its server"
        time.sleep(0.05)
    three["c"].process.wait()
    assert router.ask("a", PROMPT, 8)[0] == 200


@pytest.fixture
def versions(folder):
    """Two servers of one model, and a router before the first."""
    if not importlib.util.find_spec("vllm_router"):
        pytest.skip("vllm-router is not installed")
    args = ["--kv-cache-memory-bytes", str(32 << 20), "--served-model-name", "chat"]
    pool = tool.read(toml(folder, 2 * POOL, ("old", "new"), *args, queue=90))
    with contextlib.ExitStack() as stack:
        made = [started(stack, pool, name) for name in ("old", "new")]
        for model in made:
            model.wait()
        router = Router(dataclasses.replace(pool, models=(dataclasses.replace(pool.models[0], name="chat"),)))
        stack.callback(router.kill)
        yield *made, router


def test_an_upgrade_behind_the_router_loses_no_request(versions):
    """As docs/models.md says, while four clients ask all the time."""
    old, new, router = versions
    seen, over, told = threading.Semaphore(0), threading.Event(), []

    def ask():
        while not over.is_set():
            told.append(router.ask("chat", PROMPT, 8)[0])
            seen.release()

    def some():
        for _ in range(12):
            assert seen.acquire(timeout=60)

    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask) for _ in range(4)]
        try:
            some()
            assert call(f"{router.url}/workers", dict(url=new.url, model_id="chat"))[0] == 200
            router.remove(old.url)
            some()
            assert old.order("drain")[2]["state"] == "drained"
            old.kill(signal.SIGTERM)
            some()
        finally:
            over.set()
        for one in asked:
            one.result()
    assert set(told) == {200}


WEIGHTS = 34 << 20  # bytes of a model's that are in the pool


@pytest.fixture
def pair(folder):
    """Two models in a pool that has room for the weights of both, and beside them for less than one long request."""
    block = 128 * 2048  # bytes of a block on a CPU: 128 tokens
    size = 2 * WEIGHTS + 4 * block  # each has its null block
    pool = tool.read(toml(folder, size, ("left", "right"), "--kv-cache-memory-bytes", str(8 << 20), queue=90))
    with contextlib.ExitStack() as stack:
        made = [started(stack, pool, name) for name in ("left", "right")]
        for model in made:
            model.wait()
        yield made


def test_two_models_whose_requests_lack_memory_take_turns(pair):
    long = [(7 * i) % 900 + 3 for i in range(480)]
    assert pair[0].state()["weights"] == WEIGHTS
    expected = pair[0].tokens(long, 16)  # the other one is idle, and sleeps for it
    for model in pair:
        model.tokens(PROMPT)
    assert [m.state()["state"] for m in pair] == ["awake", "awake"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(t == expected for t in pool.map(lambda i: pair[i % 2].tokens(long, 16), range(8)))


@pytest.fixture(scope="module")
def lone(folder):
    """One model of two workers, and a program in its pool that takes its memory."""
    pool = tool.read(toml(folder, 48 << 20, ("lone",), "--kv-cache-memory-bytes", str(12 << 20),
                          "--tensor-parallel-size", "2", queue=2))  # fmt: skip
    model = Model(pool, "lone")
    environ = {**os.environ, **pool.environment(pool.replicas[0])}
    model.wait()
    program = str(Path(__file__).with_name("neighbour.py"))
    neighbour = ends.start(sys.executable, program, env=environ, text=True, stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE)  # fmt: skip

    def order(line):
        print(line, file=neighbour.stdin, flush=True)
        return neighbour.stdout.readline()

    assert neighbour.stdout.readline()
    yield model, order
    neighbour.kill()
    neighbour.wait()
    model.kill()


def test_a_pool_that_is_too_small_hangs_no_request(lone):
    model, order = lone
    expected = model.tokens(PROMPT)
    assert model.order("sleep")[2]["state"] == "asleep"
    assert order(f"take {40 << 20}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for status, headers, told in pool.map(lambda _: model.ask(PROMPT), range(8)):
            assert status == 503 and int(headers["Retry-After"]) > 0 and "lacks" in told["error"]["message"]
    status, _, told = model.order("wake")
    assert status == 503 and told["state"] in ("asleep", "waking")
    assert order("give")
    assert model.tokens(PROMPT) == expected
    assert model.order("sleep")[2]["weights_held"] > 0
    assert order(f"take {47 << 20}") and model.state()["weights_held"] < 2 << 20  # nothing is left of the largest part
    assert order("give") and model.tokens(PROMPT) == expected


def test_a_killed_server_leaves_the_memory_of_its_engine(lone):
    model, order = lone
    model.tokens(PROMPT)
    os.kill(model.process.pid, signal.SIGKILL)  # the server alone: its engine's processes end by themselves
    model.process.wait()
    assert order(f"take {47 << 20}") == "done\n"


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_a_server_that_stands_by_takes_over_from_one_that_dies(folder, victim):
    file = tool.read(toml(folder, 160 << 20, "s", "--kv-cache-memory-bytes", str(16 << 20), standby=True, common=5))
    prompt = [5, 6, 7, 8]

    def engines_by_state():
        return {row["state"]: row["pid"] for row in cli_models.listing(file) if row.get("pid")}

    with contextlib.ExitStack() as stack:
        pair = started(stack, file, "s")
        pair.wait()
        expected = pair.tokens(prompt)
        end = time.monotonic() + SECONDS
        while "stands by" not in (found := engines_by_state()):
            assert time.monotonic() < end and pair.process.poll() is None, found
            time.sleep(0.2)
        assert pair.tokens(prompt) == expected and pair.state()["state"] == "awake"
        begin = time.monotonic()
        os.kill(parent_of(found["awake"]) if victim == "server" else found["awake"], signal.SIGKILL)
        while True:
            try:
                if (told := pair.ask(prompt))[0] == 200:
                    break
            except OSError as error:  # the connection was of the one that died
                assert not isinstance(getattr(error, "reason", error), ConnectionRefusedError)
            assert time.monotonic() < end
        print(f"answered again after {time.monotonic() - begin:.3f} s")
        assert told[2]["choices"][0]["token_ids"] == expected
        while engines_by_state()["awake"] != found["stands by"]:  # the engine of a server that died ends soon after it
            assert time.monotonic() < end
            time.sleep(0.2)
        logged = (pair.logs / "s.log").read_text(errors="replace")
    assert logged.count("weights are in common from now on") == 1
    assert logged.count("weights in common were taken") == 1
