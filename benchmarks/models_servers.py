"""The servers of the benchmark ``models``: vLLM's or SGLang's for each model, in one of several ways to share a GPU.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, write_config

START, TIMEOUT = 300, 60  # seconds in which a server, and a request, must be answered
SGLANG_PAGE = 64  # tokens
REFERENCE = [10 + 7 * i % 900 for i in range(256)]  # the prompt that must have the same answer at all times


def ends_with_parent() -> None:
    """Have this process get SIGTERM when its parent has ended, however that was."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Failed(Exception):
    """A server has ended or does not answer."""


def bytes_of(shape: str, item: int) -> tuple[int, int]:
    """Bytes of the weights of a Llama's shape, and of its KV cache per token. item: bytes of a number."""
    name, _, layers = shape.partition(":")
    about = SHAPES[name]
    hidden, n = about["hidden_size"], int(layers or about["num_hidden_layers"])
    head = about.get("head_dim", hidden // about["num_attention_heads"])
    q, kv = about["num_attention_heads"] * head, about["num_key_value_heads"] * head
    layer = 2 * hidden * (q + kv) + 3 * hidden * about["intermediate_size"]
    return item * (2 * about["vocab_size"] * hidden + n * layer), item * 2 * n * kv


@dataclass
class Answer:
    """The outcome of a request. Times are in seconds since it was sent."""

    first: float | None = None
    end: float | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    error: str = ""


class Server:
    """The server of one model, in a session of its own: `vllm serve`."""

    engine, path = "vllm", "/v1/completions"

    def __init__(self, name: str, folder: Path, way: Way) -> None:
        args = way.args
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name, self.url, self.begin = name, f"http://127.0.0.1:{self.port}", time.monotonic()
        self.log = Path(args.logs, f"{args.way}-{name}.log")
        self.reference: list[int] = []  # the tokens that it made before it slept
        program, options, flags, variables = self.how(way)
        options |= dict(host="127.0.0.1", port=self.port, served_model_name=name, load_format="dummy")
        given = [text for key, value in options.items() for text in ("--" + key.replace("_", "-"), str(value))]
        command = [*program, str(folder), *given, *flags]
        variables = dict(HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", **variables, **way.variables)
        if args.device == "cpu":
            variables["OMP_NUM_THREADS"] = "1"
        else:
            variables["CUDA_VISIBLE_DEVICES"] = str(args.gpu)
        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=file, stderr=file,
                                            start_new_session=True, preexec_fn=ends_with_parent)  # fmt: skip

    def how(self, way: Way) -> tuple[list[str], dict[str, Any], list[str], dict[str, str]]:
        """The program, options with values, further arguments, and variables."""
        args, longest = way.args, way.args.max_model_len
        options = dict(max_model_len=longest, max_num_batched_tokens=min(8192, longest), max_num_seqs=64, seed=0,
                       kv_cache_memory_bytes=way.kv_memory, gpu_memory_utilization=0.02)  # fmt: skip
        flags = ["--skip-tokenizer-init", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
                 *(["--enforce-eager"] if args.eager else []), *way.command(), *args.option]  # fmt: skip
        variables = dict(VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
        if args.device == "cpu":
            options["dtype"] = "float32"
            variables |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind", VMEM_VLLM_PAGE_SIZE="64K")
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"], options, flags, variables

    def body(self, prompt: list[int], n: int) -> dict[str, Any]:
        """The request for n tokens, streamed."""
        return dict(model=self.name, prompt=prompt, max_tokens=n, temperature=0, ignore_eos=True, stream=True,
                    return_token_ids=True, stream_options=dict(include_usage=True))  # fmt: skip

    def read(self, told: dict[str, Any], made: Answer) -> None:
        """Take what a part of the stream tells."""
        for choice in told.get("choices", ()):
            made.tokens += choice.get("token_ids") or []
        if told.get("usage"):
            made.cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def wait(self, session: Any) -> float:
        """Until it answers: the seconds since its start. Raises `Failed`."""
        while time.monotonic() < self.begin + START:
            if self.process.poll() is not None:
                lines = [line[:300] for line in self.log.read_text(errors="replace").splitlines() if "Error: " in line]
                raise Failed("\n".join([f"{self.name} ended with status {self.process.returncode}", *lines[:3]]))
            with contextlib.suppress(Exception):
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return time.monotonic() - self.begin
            await asyncio.sleep(0.2)  # nothing else tells when it listens
        raise Failed(f"{self.name} did not answer within {START} s: {self.log}")

    async def post(self, session: Any, path: str) -> float:
        """The seconds of an order. Raises `Failed`."""
        begin = time.monotonic()
        async with session.post(f"{self.url}{path}", json={}) as answer:
            if answer.status != 200:
                raise Failed(f"{self.name} answers {path} with {answer.status}: {(await answer.text())[:300]}")
        return time.monotonic() - begin

    async def ask(self, session: Any, prompt: list[int], n: int) -> Answer:
        """Stream a completion of n tokens."""
        begin, made = time.monotonic(), Answer()
        try:
            async with session.post(f"{self.url}{self.path}", json=self.body(prompt, n)) as answer:
                if answer.status != 200:
                    made.error = f"status {answer.status}: {(await answer.text())[:200]}"
                    return made
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        told, now = json.loads(line[6:]), time.monotonic() - begin
                        made.error = made.error or str(told.get("error", ""))[:200]
                        self.read(told, made)
                        made.first = made.first or (now if made.tokens else None)
                    elif line.startswith(b"data: [DONE]"):
                        made.end = time.monotonic() - begin
        except Exception as error:
            made.error = f"{type(error).__name__}: {error}"
        if not made.error and (made.end is None or len(made.tokens) != n):
            made.error = f"the stream ended after {len(made.tokens)} of {n} tokens"
        return made

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class SGLangServer(Server):
    """`sglang.launch_server` of one model, in the environment that --sglang-env makes."""

    engine, path = "sglang", "/generate"

    def how(self, way: Way) -> tuple[list[str], dict[str, Any], list[str], dict[str, str]]:
        args, longest = way.args, way.args.max_model_len
        tokens = way.kv_memory // way.token_bytes // SGLANG_PAGE * SGLANG_PAGE
        options = dict(context_length=longest, chunked_prefill_size=min(8192, longest), max_running_requests=64,
                       max_total_tokens=tokens, mem_fraction_static=0.9, page_size=SGLANG_PAGE,
                       random_seed=0)  # fmt: skip
        if args.device == "cpu":
            options |= dict(device="cpu", dtype="float32", attention_backend="torch_native",
                            sampling_backend="pytorch")  # fmt: skip
        graphs = ["--disable-cuda-graph"] if args.eager or args.device == "cpu" else []
        program = [sys.executable, "-m", "sglang.launch_server", "--model-path"]
        if args.sglang_env:
            program = ["bash", "-c", '. "$0" && exec python3 "$@"', args.sglang_env, *program[1:]]
        variables = dict(SGLANG_USE_CPU_ENGINE="1") if args.device == "cpu" else {}
        return program, options, ["--skip-tokenizer-init", *graphs], variables

    def body(self, prompt: list[int], n: int) -> dict[str, Any]:
        return dict(input_ids=prompt, stream=True,
                    sampling_params=dict(max_new_tokens=n, temperature=0, ignore_eos=True))  # fmt: skip

    def read(self, told: dict[str, Any], made: Answer) -> None:
        made.tokens = told.get("output_ids") or made.tokens  # all so far
        made.cached = (told.get("meta_info") or {}).get("cached_tokens") or 0


ENGINES: dict[str, type[Server]] = {server.engine: server for server in (Server, SGLangServer)}


class Way:
    """A way in which models share the GPU. In this one all of them are there, and none sleeps."""

    about = "all stay awake"
    variables: dict[str, str] = {}
    sleeps = False

    def __init__(self, args: Any, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.weights, self.token_bytes = bytes_of(args.model, 4 if args.device == "cpu" else 2)
        self.servers: list[Server] = []
        self.fit = args.models
        self.awake: Server | None = None  # the only one, where there is one at most

    @property
    def kv_memory(self) -> int:
        """Bytes of the KV cache of each engine."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """The arguments that this way adds to the command of each server."""
        return []

    def check(self) -> str:
        """Why this way cannot run here; empty if it can."""
        least = self.args.max_model_len * self.token_bytes
        return "" if self.kv_memory >= least else \
            f"the KV cache of each engine has {self.kv_memory} bytes, and one request needs {least}"  # fmt: skip

    def _start(self, index: int) -> Server:
        folder = self.folder / f"model{index}"
        folder.mkdir(exist_ok=True)
        write_config(folder, self.args.model, self.args.max_model_len)
        config = json.loads((folder / "config.json").read_text())
        config["rope_theta"] = float(config.get("rope_theta", 10000.0)) + 1000 * index  # so that their tokens differ
        (folder / "config.json").write_text(json.dumps(config))
        return ENGINES[self.args.engines[index % len(self.args.engines)]](f"m{index}", folder, self)

    async def start(self, session: Any, note: Callable[..., None]) -> None:
        """Start all servers, `at_once` at a time, and note what is seen of each. Raises `Failed`."""
        for first in range(0, self.fit, self.args.at_once):
            some = [self._start(i) for i in range(first, min(first + self.args.at_once, self.fit))]
            self.servers += some
            for server, seconds in zip(some, await asyncio.gather(*(s.wait(session) for s in some))):
                note("start", model=server.name, what="start", seconds=seconds)
            for server in some:  # it warms up, and tells what it says awake
                server.reference = await self.tokens(session, server)
                note("start", model=server.name, what="reference", tokens=server.reference)
            if self.sleeps:
                for server, seconds in zip(some, await asyncio.gather(*(self.sleep(session, s) for s in some))):
                    note("start", model=server.name, what="first sleep", seconds=seconds)

    async def tokens(self, session: Any, server: Server) -> list[int]:
        """Its greedy answer to the same prompt. Raises `Failed`."""
        answer = await server.ask(session, REFERENCE, 16)
        if answer.error:
            raise Failed(f"{server.name}: {answer.error}")
        return answer.tokens

    def pooled(self) -> list[tuple[str, int, int]]:
        """The members of the pool: name, bytes of pages, and bytes of the pool's budget."""
        return []

    async def sleep(self, session: Any, server: Server) -> float:
        """Have a model sleep: the seconds from the decision until it does."""
        raise NotImplementedError

    async def enter(self, server: Server) -> None:
        """Wait until a request for this model may be sent."""

    def leave(self) -> None:
        """A request has ended."""

    def state(self, server: Server) -> dict[str, Any]:
        """(awake or not, bytes of its weights and KV cache on the device)."""
        return dict(awake=True)

    def end(self) -> None:
        for server in self.servers:
            server.end()


class Static(Way):
    """As many as fit, each with a part of the memory."""

    about = "as many as fit stay awake, each with its own part of the memory; requests for the others fail"

    def __init__(self, args: Any, folder: Path) -> None:
        super().__init__(args, folder)
        self.fit = args.fit or min(args.models, args.size // (self.weights + args.max_model_len * self.token_bytes))

    @property
    def kv_memory(self) -> int:
        return int(self.args.size // max(self.fit, 1) - self.weights)


class Kvcached(Static):
    """The same with kvcached, whose KV caches share what the weights leave."""

    about = "as many as fit stay awake, and kvcached lets their KV caches share memory; requests for the others fail"
    variables = dict(ENABLE_KVCACHED="true", KVCACHED_AUTOPATCH="1")

    def __init__(self, args: Any, folder: Path) -> None:
        super().__init__(args, folder)
        # The weights stay, and one request must fit beside them.
        most = (args.size - args.max_model_len * self.token_bytes) // self.weights
        self.fit = args.fit or max(min(args.models, most), 0)

    @property
    def kv_memory(self) -> int:
        return int(self.args.size - self.fit * self.weights)

    def check(self) -> str:
        return super().check() if importlib.util.find_spec("kvcached") else "the package kvcached is not installed here"


class Swap(Way):
    """One model is awake: vLLM's own sleep of level 1, by a driver that holds requests, as a router would."""

    about = "one is awake; vLLM's sleep (level 1) and wake_up, by a driver that holds requests"
    variables = dict(VLLM_SERVER_DEV_MODE="1", VMEM_VLLM="0")
    sleeps = True

    def __init__(self, args: Any, folder: Path) -> None:
        super().__init__(args, folder)
        self._session: Any = None
        self._waiting: list[tuple[Server, asyncio.Future[None]]] = []  # the oldest first
        self._running, self._since, self._task = 0, 0.0, None  # type: int, float, asyncio.Task[None] | None

    @property
    def kv_memory(self) -> int:
        return int(self.args.size // min(self.args.at_once, self.fit) - self.weights)  # so many are awake at the start

    def command(self) -> list[str]:
        return [] if self.args.device == "cpu" else ["--enable-sleep-mode"]

    async def start(self, session: Any, note: Callable[..., None]) -> None:
        self._session = session
        await super().start(session, note)
        self._task = asyncio.create_task(self._run())

    async def sleep(self, session: Any, server: Server) -> float:
        if self._task is not None and server is not self.awake:
            return 0.0
        seconds = await server.post(session, "/sleep?level=1")
        self.awake = None
        return seconds

    async def enter(self, server: Server) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((server, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting = [w for w in self._waiting if w[1] is not turn]
            self._running -= turn.done() and not turn.cancelled()
            raise

    def leave(self) -> None:
        self._running -= 1

    async def _run(self) -> None:
        """Let in those for the awake model, for a slice if others wait, and then wake the one that waits longest."""
        while True:
            await asyncio.sleep(0.002)
            others = [server for server, _ in self._waiting if server is not self.awake]
            over = bool(others) and time.monotonic() - self._since >= self.args.slice
            mine = [turn for server, turn in self._waiting if server is self.awake and not over]
            self._waiting = [w for w in self._waiting if w[1] not in mine]
            for turn in mine:
                if not turn.done():
                    self._running += 1
                    turn.set_result(None)
            if others and not self._running:
                try:
                    if self.awake is not None:
                        await self.awake.post(self._session, "/sleep?level=1")
                    await others[0].post(self._session, "/wake_up")
                    self.awake, self._since = others[0], time.monotonic()
                except Exception as error:  # they wait in vain, and fail
                    print(f"swap: {error}", file=sys.stderr, flush=True)
                    self.awake = None

    def state(self, server: Server) -> dict[str, Any]:
        return dict(awake=server is self.awake)


class VMem(Way):
    """One pool for weights and KV caches; each server lets its model sleep and wake."""

    about = "one pool for weights and KV caches; a model sleeps when another one needs its memory"

    def __init__(self, args: Any, folder: Path) -> None:
        super().__init__(args, folder)
        self.sleeps = not args.awake
        self._pool = args.size if self.sleeps else args.size - args.models * self.weights
        settings = {"": "1", "_POOL": f"models{os.getpid()}", "_POOL_SIZE": str(self._pool)}
        if self.sleeps:
            settings |= dict(_WEIGHTS="1", _SLICE=str(args.slice), _IDLE=str(args.idle), _QUEUE=str(TIMEOUT))
            self.variables = dict(VMEM_VLLM_SLEEP="keep")
        else:
            self.about = "one pool for KV caches; the weights are outside, and no model sleeps"
        for switch in ("VMEM_VLLM", "VMEM_SGLANG"):
            self.variables = {**self.variables, **{switch + name: value for name, value in settings.items()}}
        self._pages: dict[str, Any] = {}

    @property
    def kv_memory(self) -> int:
        return int(self._pool - (self.weights if self.sleeps else 0))

    def command(self) -> list[str]:
        return ["--middleware", "pyvmem.vllm.http.Serve"] if self.sleeps else []

    async def sleep(self, session: Any, server: Server) -> float:
        return await server.post(session, "/vmem/sleep")

    def pooled(self) -> list[tuple[str, int, int]]:
        from pyvmem.kv.pool import KVPool
        from pyvmem.kv.view import view_folder

        with contextlib.ExitStack() as pools:
            opened = [pools.enter_context(KVPool(path=path)) for path in (view_folder() or Path()).glob("*.pool")]
            return [(member.name, member.held, member.has) for pool in opened for member in pool.members()]

    def state(self, server: Server) -> dict[str, Any]:
        from pyvmem.engine import control

        if not self.sleeps:
            return super().state(server)
        if server.name not in self._pages:
            self._pages.update((engine.model, page) for engine, page in control.engines())
        page = self._pages[server.name]
        told = control.Engine.of("", 0, page)
        return dict(awake=told.state == "awake", weights=told.weights, weights_held=told.weights_held,
                    backed=told.backed, cached=told.cached)  # fmt: skip


WAYS: dict[str, type[Way]] = dict(vmem=VMem, swap=Swap, static=Static, kvcached=Kvcached)
