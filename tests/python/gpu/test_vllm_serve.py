"""``vllm serve`` on vMem under the real `openai` client (`make test-vllm`: a GPU, vLLM and openai installed).

One server with little KV memory: streams, aborts of every tenth request, prompts that are too long, a burst beyond its
memory, a limit while it serves, and at last a worker that is killed.

SPDX-License-Identifier: MIT
"""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import vllm_cases  # noqa: E402

pytestmark = pytest.mark.skipif(
    not os.environ.get("VMEM_TEST_VLLM") or not all(importlib.util.find_spec(m) for m in ("vllm", "openai")),
    reason="make test-vllm: needs a GPU, vLLM and openai",
)
LONGEST, KV_BYTES = 1024, 16 << 20  # tokens of a request; KV memory, of 8,192 tokens
SETTINGS = [
    "--load-format", "dummy", "--max-model-len", str(LONGEST), "--max-num-seqs", "24", "--enforce-eager",
    "--enable-prefix-caching", "--kv-cache-memory-bytes", str(KV_BYTES), "--gpu-memory-utilization", "0.05",
    "--block-size", "32", "--served-model-name", "model",
]  # fmt: skip


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, seconds, so_long=lambda: True):
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and so_long():
        if what():
            return True
        time.sleep(0.1)
    return bool(what())


def group_lives(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Server:
    """``vllm serve`` with a model of made-up weights in `folder`."""

    def __init__(self, folder, settings=tuple(SETTINGS), cache_tokens=2048, name="serve.log"):
        vllm_cases.write_model(folder)
        self.port = free_port()
        # By default, server and client both close a connection that was idle for 5 s: the server may do so just when
        # the client sends the next request.
        self.environment = dict(os.environ, VMEM_VLLM="1", VMEM_VLLM_CACHE_TOKENS=str(cache_tokens),
                                XDG_RUNTIME_DIR=str(folder), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                                VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_HTTP_TIMEOUT_KEEP_ALIVE="600")  # fmt: skip
        command = os.environ.get(
            "VMEM_TEST_VLLM_SERVER", f"{sys.executable} -m vllm.entrypoints.cli.main serve"
        ).split()
        logs = Path(os.environ.get("VMEM_TEST_VLLM_LOGS") or folder)
        with open(logs / name, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen([*command, str(folder), "--port", str(self.port), *settings], stdout=log,
                                            stderr=log, env=self.environment, start_new_session=True)  # fmt: skip
        self.log = logs / name

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return answer.read().decode()

    def healthy(self):
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def alive(self):
        return self.process.poll() is None

    def top(self, *arguments):
        """What `pyvmem top` says of the KV caches in the server's folder."""
        done = subprocess.run([sys.executable, "-m", "pyvmem", "top", *arguments], capture_output=True, text=True,
                              env=self.environment, timeout=60)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def caches(self):
        return [{**view["stats"], **view} for view in json.loads(self.top("--json"))]

    def stop(self):
        if self.alive():
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)

    def client(self):
        import openai

        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("serve"))
    try:
        started = wait_for(server.healthy, 240, so_long=server.alive)
        assert started, server.log.read_text()[-3000:]
        yield server
    finally:
        server.stop()


def prompt(i, tokens):
    """Token numbers; every fourth prompt begins alike."""
    common = list(range(10, 138)) if i % 4 == 0 else []
    return (common + [10 + (i * 7919 + k * 31) % 4000 for k in range(tokens)])[:tokens]


async def complete(client, i, tokens=100, output=40, abort_after=None):
    """The tokens of one streamed answer; None where it was aborted."""
    found = []
    stream = await client.completions.create(
        model="model", prompt=prompt(i, tokens), max_tokens=output, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    async for chunk in stream:
        found += getattr(chunk.choices[0], "token_ids", None) or []
        if abort_after is not None and len(found) >= abort_after:
            await stream.close()
            return None
    return found


async def many(server, n, **options):
    client = server.client()
    try:
        jobs = [complete(client, i, abort_after=5 if i % 10 == 9 else None, **options) for i in range(n)]
        return await asyncio.gather(*jobs)
    finally:
        await client.close()


def test_a_refusal_is_the_last_line_that_the_server_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    server = Server(tmp_path, name="refused.log")
    try:
        assert wait_for(lambda: not server.alive(), 120)
    finally:
        server.stop()
    assert server.process.returncode
    assert "VMEM_VLLM=1: vLLM's model runner V2 is needed" in server.log.read_text().splitlines()[-1]


def test_streams_and_aborts_of_every_tenth_request(server):
    first = asyncio.run(many(server, 60))
    assert [i for i, tokens in enumerate(first) if tokens is None] == list(range(9, 60, 10))
    assert all(len(tokens) == 40 for tokens in first if tokens is not None)
    again = asyncio.run(many(server, 60))
    # Batches differ, and so do roundings: not all answers need be the same.
    pairs = [(a, b) for a, b in zip(first, again) if a is not None]
    assert sum(a[0] == b[0] for a, b in pairs) >= 0.8 * len(pairs)


def test_a_prompt_that_is_too_long_is_refused_and_others_are_served(server):
    import openai

    async def both():
        client = server.client()
        try:
            return await asyncio.gather(complete(client, 1, tokens=2 * LONGEST), complete(client, 2),
                                        return_exceptions=True)  # fmt: skip
        finally:
            await client.close()

    refused, served = asyncio.run(both())
    assert isinstance(refused, openai.BadRequestError)
    assert len(served) == 40


def test_a_burst_beyond_the_memory_is_served(server):
    answers = asyncio.run(many(server, 50, tokens=600, output=200))  # 24 at a time want 19,200 tokens of 8,192
    assert all(len(tokens) == 200 for tokens in answers if tokens is not None)


def test_metrics_and_top_show_the_cache_and_idle_memory_goes_back(server):
    (cache,) = server.caches()
    assert cache["name"] == "vllm"
    page = cache["page_size"]

    def idle():
        (cache,) = server.caches()
        return cache["active_slots"] == 0 and cache["held_pages"] == cache["prefix_pages"]

    assert wait_for(idle, 10)
    (cache,) = server.caches()
    assert 0 < cache["held_pages"] * page <= KV_BYTES // 4  # 2,048 of 8,192 tokens
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("vllm:vmem_kv_held_pages{")]
    assert [float(line.split()[-1]) for line in lines] == [cache["held_pages"]]


def test_a_smaller_limit_while_it_serves(server):
    (cache,) = server.caches()
    server.top("--once", "--limit", f"{cache['pid']}=8M")
    answers = asyncio.run(many(server, 30, tokens=300, output=60))
    assert all(len(tokens) == 60 for tokens in answers if tokens is not None)
    assert server.caches()[0]["budget_pages"] * cache["page_size"] == 8 << 20
    server.top("--once", "--limit", f"{cache['pid']}={KV_BYTES}")


def test_nothing_is_left_of_a_killed_worker(server):
    (cache,) = server.caches()

    async def killed():
        client = server.client()
        try:
            jobs = [asyncio.ensure_future(complete(client, i, output=900)) for i in range(8)]
            await asyncio.sleep(0)
            os.kill(cache["pid"], signal.SIGKILL)
            return await asyncio.gather(*jobs, return_exceptions=True)
        finally:
            await client.close()

    answers = asyncio.run(killed())
    assert all(isinstance(a, Exception) or len(a) < 900 for a in answers)
    assert wait_for(lambda: not server.alive(), 60), "the server goes on without its engine"
    assert server.caches() == []
    assert wait_for(lambda: not group_lives(server.process.pid), 10)
