"""`Serve` where several processes serve a model, and where several workers compute it.

SPDX-License-Identifier: MIT
"""

import concurrent.futures
import os
import sys
import tempfile
import uuid
from pathlib import Path

import ends
import pytest
from serve import free_port
from test_models import KEY, PROMPT, Model, call, folder  # noqa: F401 (a fixture)

SERVERS = {"two API servers": ["--api-server-count", "2"], "two workers": ["--tensor-parallel-size", "2"],
           "two engines": ["--data-parallel-size", "2"]}  # fmt: skip


class Server(Model):
    """A server with options of its own."""

    def __init__(self, name, folder, environ, log, options):  # noqa: F811
        self.name, self.port = name, free_port()
        self.engines = 2 if "--data-parallel-size" in options else 1
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = ends.start(
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1", "--port",
            str(self.port), "--served-model-name", name, "--max-model-len", "512", "--max-num-seqs", "8",
            "--enforce-eager", "--max-num-batched-tokens", "512", "--seed", "0", "--dtype", "float32",
            "--kv-cache-memory-bytes", str(32 << 20), "--api-key", KEY, "--skip-tokenizer-init",
            "--middleware", "pyvmem.vllm.http.Serve", *options,
            env=environ, stdout=log, stderr=log)  # fmt: skip


@pytest.fixture(params=SERVERS)
def model(request, folder):  # noqa: F811
    environ = dict(os.environ, VMEM_VLLM="1", VMEM_VLLM_POOL=uuid.uuid4().hex[:12], VMEM_VLLM_POOL_SIZE=str(160 << 20),
                   VMEM_VLLM_WEIGHTS="1", VMEM_VLLM_SLEEP="keep", VMEM_VLLM_PAGE_SIZE="64K",
                   VLLM_LOGGING_LEVEL="INFO")  # fmt: skip
    logs = Path(os.environ.get("VMEM_TEST_LOGS") or tempfile.mkdtemp())
    with open(logs / f"{request.param.replace(' ', '-')}.log", "ab") as log:
        made = Server("a", folder, environ, log, SERVERS[request.param])
    made.wait()
    yield made
    made.kill()


def test_all_processes_of_a_server_agree_on_its_state(model):
    first = model.tokens(PROMPT)
    for _ in range(3):
        assert model.order("sleep")[2]["state"] == "asleep"
        # New connections reach either process.
        assert {model.state()["state"] for _ in range(12)} == {"asleep"}
        assert {call(f"{model.url}/vmem/state", key="wrong")[0] for _ in range(12)} == {401}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            assert all(t == first for t in pool.map(lambda _: model.tokens(PROMPT), range(24)))
        assert {model.state()["state"] for _ in range(12)} == {"awake"}
    assert model.order("drain")[2]["state"] == "drained"
    assert {model.ask(PROMPT)[0] for _ in range(12)} == {503}
    assert model.order("wake")[2]["state"] == "awake"
    assert model.tokens(PROMPT) == first
    assert len(call(f"{model.url}/vmem/limit")[2]["engines"]) == model.engines
    assert {call(f"{model.url}/vmem/limit", {"limit": 8 << 20})[0] for _ in range(4)} == {200}
    assert model.tokens(PROMPT) == first
