"""``pyvmem models FILE``: models that share a GPU, from one file; see docs/models.md. Nothing here runs for long.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pyvmem._checks import shown
from pyvmem.core import MIB
from pyvmem.engine import control
from pyvmem.engine.pools import number_of
from pyvmem.engine.settings import MOST
from pyvmem.sleep.checkpoint import weight_bytes
from pyvmem.tools.argtypes import parse_size
from pyvmem.tools.top import table, where

FIRST_PORT = 8001
SMI_SECONDS = 10.0  # after which nvidia-smi is not waited for
GIB = 1 << 30
CONCURRENCY = 1024  # requests for a model at a time that llama-swap lets pass; vLLM queues them
# Memory of each server that is not in the pool: its CUDA context, libraries and CUDA graphs. vLLM 0.33 held 1,106 to
# 1,204 MiB on an H100 while Llama-3-8B's shape slept (docs/models.md). An awake model has activations, too.
OUTSIDE = 1300 * MIB
GPUS = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--pipeline-parallel-size", "-pp")


@dataclass(frozen=True)
class Model:
    """One model of the file. Sizes are in bytes, times in seconds."""

    name: str
    path: str
    port: int
    min: int = 0
    max: int = 0
    priority: int = 0
    idle: float = 0.0
    queue: float = 60.0
    outside: int = OUTSIDE
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str = ""  # the engine's with vMem in it (docs/models.md); "": vllm-vmem or sglang-vmem
    engine: str = "vllm"

    @property
    def gpus(self) -> int:
        """GPUs among which its weights are divided."""
        n, parts = 1, [part for arg in self.args for part in arg.split("=", 1)]
        for key, value in zip(parts, parts[1:]):
            if key in GPUS and value.isdecimal():
                n *= int(value)
        return max(n, 1)

    @property
    def key(self) -> str:
        """The key of its server, or the first of several; "": none. Both engines also take ``--api_key`` and ``=``."""
        found: dict[str, str] = {}
        for arg, following in zip(self.args, (*self.args[1:], "--")):
            option, equals, value = arg.partition("=")
            found.setdefault(option.replace("_", "-"), value if equals or following.startswith("--") else following)
        for option in ("--api-key", "--admin-api-key"):  # the second is SGLang's
            if option in found:
                return found[option]
        return self.env.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY", "")

    @property
    def weights(self) -> int:
        """Bytes of the model's files on each GPU; 0 if they are not on this machine."""
        return weight_bytes(self.path) // self.gpus


@dataclass(frozen=True)
class Pool:
    """The contents of the file."""

    pool: str
    size: int
    slice: float
    models: tuple[Model, ...]
    gpu: int = 0  # bytes of the GPU's memory; 0: not known

    def model(self, name: str) -> Model:
        """Raises ValueError if there is none of this name."""
        found = [m for m in self.models if m.name == name]
        if not found:
            raise ValueError(f"the file has no model {shown(name)}: it has {', '.join(m.name for m in self.models)}")
        return found[0]

    def environment(self, model: Model) -> dict[str, str]:
        """The variables of a model's server."""
        switch = f"VMEM_{model.engine.upper()}"
        variables = {switch: "1", f"{switch}_POOL": self.pool, f"{switch}_POOL_SIZE": str(self.size),
                     f"{switch}_WEIGHTS": "1", f"{switch}_SLICE": f"{self.slice:g}",
                     f"{switch}_QUEUE": f"{model.queue:g}"}  # fmt: skip
        if model.engine == "vllm":
            variables[f"{switch}_SLEEP"] = "keep"
        for name, value in (("MIN", model.min), ("MAX", model.max), ("PRIORITY", model.priority), ("IDLE", model.idle)):
            if value:
                variables[f"{switch}_{name}"] = f"{value:g}" if isinstance(value, float) else str(value)
        return {**variables, **model.env}

    def command(self, model: Model, host: str = "127.0.0.1", here: bool = False) -> list[str]:
        """The command of a model's server. here: on this machine, with the engine of this environment."""
        about = ["--host", host, "--port", str(model.port), "--served-model-name", model.name]
        if model.engine == "sglang":
            command = [sys.executable if here else "python3", "-m", "sglang.launch_server", "--model-path", model.path]
            return [*command, *about, *([] if "--page-size" in model.args else ["--page-size", "64"]), *model.args]
        command = [_vllm() if here else "vllm", "serve", model.path, *about, "--middleware", "pyvmem.vllm.http.Serve"]
        if "--kv-cache-memory-bytes" not in model.args:
            command += ["--kv-cache-memory-bytes", str(model.max or self.size - model.weights)]
        if "--gpu-memory-utilization" not in model.args:
            command += ["--gpu-memory-utilization", "0.01"]  # vLLM refuses to start if less of the GPU is free
        return [*command, *model.args]


def _size_text(size: float) -> str:
    """A size in a message."""
    return f"{size / GIB:.1f} GiB" if size >= GIB or not size else f"{size / MIB:.1f} MiB"


def _take(where: str, table: Any, kinds: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{where.rstrip('.')} must be a table, not {shown(table)}")
    for key, value in table.items():
        if key not in kinds:
            # TOML takes [models.llama-3.1] for a table "1" in the table of llama-3.
            dotted = where and isinstance(value, dict)
            hint = f'; a name with a dot needs quotes: [models."{where[7:]}{key}"]' if dotted else ""
            raise ValueError(f"{where}{key} is not a key of the file: the keys are {', '.join(kinds)}{hint}")
    return {key: kinds[key](f"{where}{key}", value) for key, value in table.items()}


def _printable(key: str, text: str) -> str:
    """A text that is one line for every program that reads what is rendered."""
    if not text.isprintable():
        wrong = next(c for c in text if not c.isprintable())
        raise ValueError(f"{key} must have no control characters, line ends or separators: {shown(text)} has "
                         f"U+{ord(wrong):04X}")  # fmt: skip
    return text


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or value.startswith("-"):
        raise ValueError(f"{key} must be a non-empty string, and not begin with '-': {shown(value)}")
    return _printable(key, value)


def _name(key: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,59}", value):
        raise ValueError(f"{key} must be at most 60 letters, digits, _, . and -, and not begin with '.': "
                         f"{shown(value)}")  # fmt: skip
    return value


def _size(key: str, value: Any) -> int:
    try:
        size = parse_size(str(value))
    except ValueError:
        raise ValueError(f'{key} must be a size, such as "16G", not {shown(value)}') from None
    if not 0 <= size <= MOST:
        raise ValueError(f"{key} must be from 0 to {MOST} bytes, not {shown(value)}")
    return size


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def take(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{key} must be a whole number from {least} to {most}, not {shown(value)}")
        return value

    return take


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError(f"{key} must be a number of seconds from 0 to 999999, not {shown(value)}")
    return float(value) + 0.0  # no -0.0


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str | int | float) for v in value):
        raise ValueError(f"{key} must be a list of strings and numbers, not {shown(value)}")
    if any(str(v).partition("=")[0] == "--port" for v in value):
        raise ValueError(f"{key}: --port is what the key 'port' sets")
    return tuple(_printable(key, str(v)) for v in value)


def _env(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError(f"{key} must be a table of strings, not {shown(value)}")
    for name in value:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{key}: {shown(name)} must be the name of a variable: letters, digits and _")
        if name in _KEYS:
            raise ValueError(f"{key}: {name} is what the key {_KEYS[name]!r} sets")
    return {name: _printable(f"{key}.{name}", text) for name, text in value.items()}


def _engine(key: str, value: Any) -> str:
    if value not in ("vllm", "sglang"):
        raise ValueError(f'{key} must be "vllm" or "sglang", not {shown(value)}')
    return str(value)


# Variables that a key of the file sets. A second value elsewhere would escape the checks, and `ls` would not find the
# server.
_KEYS = {f"VMEM_{engine}_{key.upper()}": "size" if key == "pool_size" else key for engine in ("VLLM", "SGLANG")
         for key in ("pool", "pool_size", "slice", "min", "max", "priority", "idle", "queue")}  # fmt: skip
_MODEL: dict[str, Callable[[str, Any], Any]] = dict(
    path=_text, port=_whole(1, 65535), min=_size, max=_size, priority=_whole(0, 10**15 - 1), idle=_seconds,
    queue=_seconds, outside=_size, args=_texts, env=_env, image=_text, engine=_engine)  # fmt: skip


def read(text: str) -> Pool:
    """The `Pool` of a file. Raises ValueError naming the key."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        raise ValueError("pyvmem models needs Python 3.11 or newer, which reads TOML") from None
    about = _take(
        "",
        tomllib.loads(text),
        dict(pool=_name, size=_size, gpu=_size, slice=_seconds, models=lambda key, value: value),
    )
    for key in ("pool", "size", "models"):
        if key not in about:
            raise ValueError(f"{key} is missing")
    if not isinstance(about["models"], dict) or not about["models"]:
        raise ValueError("models must have a table for each model, such as [models.chat]")
    made = []
    for i, (name, keys) in enumerate(about["models"].items()):
        given = _take(f"models.{name}.", keys, _MODEL)
        if "path" not in given:
            raise ValueError(f"models.{name}.path is missing")
        made.append(Model(_name(f"models.{name}", name), **{"port": FIRST_PORT + i, **given}))
    pool = Pool(about["pool"], about["size"], about.get("slice", 2.0), tuple(made), about.get("gpu") or _gpu())
    _check(pool)
    return pool


def _gpu() -> int:
    """Bytes of the smallest GPU of this machine; 0 if none can be asked. nvidia-smi hangs if a GPU has failed."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(n) for n in done.stdout.split() if n.isdigit()), default=0) * MIB


def _check(pool: Pool) -> None:
    """Raise ValueError if what the file asks for cannot be."""
    outside = sum(m.outside for m in pool.models)
    if 0 < pool.gpu < pool.size + outside:
        raise ValueError(f"size: {_size_text(pool.size)}, and {_size_text(outside)} outside of it for the servers of "
                         f"{len(pool.models)} models, exceed the GPU's {_size_text(pool.gpu)}; size can be at most "
                         f"{_size_text(max(pool.gpu - outside, 0))}")  # fmt: skip
    ports: dict[int, str] = {}
    minimums = sum(m.min for m in pool.models)
    if minimums > pool.size:
        raise ValueError(f"min: the minimums of all models add up to {_size_text(minimums)}, more than size, "
                         f"{_size_text(pool.size)}")  # fmt: skip
    for m in pool.models:
        if m.port in ports:
            raise ValueError(f"models.{m.name}.port: {m.port} is also the port of {ports[m.port]}")
        ports[m.port] = m.name
        if m.max and m.min > m.max:
            raise ValueError(f"models.{m.name}.min, {m.min} bytes, is over its max, {m.max}")
        # The minimums of the others stay theirs while they are awake, and those that sleep have none.
        if m.weights + max(m.min, 2 * MIB) > pool.size:
            raise ValueError(f"models.{m.name}: its weights of {_size_text(m.weights)} and the minimum of its KV "
                             f"cache exceed size, {_size_text(pool.size)}")  # fmt: skip


# ---- render ----------------------------------------------------------------------------------------------------


def _vllm() -> str:
    """The vllm of this environment or of the path here: what starts it may have another path."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.exists() else shutil.which("vllm") or "vllm"


def _json(value: Any) -> str:
    """Of JSON's texts, only escapes of single code points are YAML's too: `_printable` texts have no others."""
    return json.dumps(value, ensure_ascii=False)


def _yaml(value: Any, depth: int = 0) -> str:
    """YAML of tables, lists and scalars. Every key and text is quoted: on, no, null and 1e3 are other values."""
    pad = "  " * depth
    if isinstance(value, dict):
        return "".join(f"{pad}{_json(key)}:"
                       + (f"\n{_yaml(v, depth + 1)}" if isinstance(v, dict | list) and v else f" {_json(v)}\n")
                       for key, v in value.items())  # fmt: skip
    return "".join(f"{pad}-" + (f"\n{_yaml(v, depth + 1)}" if isinstance(v, dict | list) else f" {_json(v)}\n")
                   for v in value)  # fmt: skip


def llama_swap(pool: Pool) -> str:
    """The configuration of llama-swap: all models run, and none is stopped for another.

    Its own limit of requests at a time, 10 for a model, would answer the eleventh with status 429. Raises ValueError
    for ``${``, with which its macros begin.
    """
    for m in pool.models:
        for text in (*pool.command(m), *pool.environment(m).values()):
            if "${" in text:
                raise ValueError(f"models.{m.name}: llama-swap takes ${{ for a macro of its own: {shown(text)}")
    return _yaml({
        "healthCheckTimeout": 600,
        "logToStdout": "both",  # also what vLLM says
        "models": {m.name: {
            "cmd": shlex.join(pool.command(m, here=True)), "proxy": f"http://127.0.0.1:{m.port}",
            "checkEndpoint": "/health", "ttl": 0, "concurrencyLimit": CONCURRENCY,
            "env": [f"{k}={v}" for k, v in pool.environment(m).items()]}
            for m in pool.models},
        "groups": {"vmem": {"swap": False, "exclusive": False, "members": [m.name for m in pool.models]}},
        "hooks": {"on_startup": {"preload": [m.name for m in pool.models]}},
    })  # fmt: skip


def aibrix(pool: Pool) -> str:
    """A Deployment and a Service for each model, by whose labels AIBrix finds it; all on one node with one GPU.

    Each asks for the GPU, as otherwise the kubelet gives the container none. So that all of them get the same one, the
    node's device plugin must share it (docs/models-deploy.md). For AIBrix, the Service, the label and the model that is
    served have one name. Raises ValueError if Kubernetes does not take a model's name for a Service.
    """
    documents = []

    def plain(text: str) -> str:  # Kubernetes puts a variable's value in place of $(NAME), and $ in place of $$
        return text.replace("$", "$$")

    for m in pool.models:
        if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", m.name):
            raise ValueError(f"models.{m.name}: AIBrix has a Service of this name, and its name must be lower-case "
                             "letters, digits and -, begin with a letter and not end with '-'")  # fmt: skip
        env = [{"name": k, "value": plain(v)} for k, v in pool.environment(m).items()]
        env.append({"name": "XDG_RUNTIME_DIR", "value": "/run/vmem"})
        labels = {"model.aibrix.ai/name": m.name, "model.aibrix.ai/port": str(m.port)}
        about = {"name": m.name, "labels": labels}
        mounts: list[dict[str, Any]] = [{"name": "vmem", "mountPath": "/run/vmem"}]
        volumes: list[dict[str, Any]] = [
            {"name": "vmem", "hostPath": {"path": "/run/vmem", "type": "DirectoryOrCreate"}}
        ]
        if m.path.startswith("/"):
            mounts.append({"name": "model", "mountPath": m.path, "readOnly": True})
            volumes.append({"name": "model", "hostPath": {"path": m.path}})
        documents.append({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": about,
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {
                "metadata": {"labels": labels},
                "spec": {"hostPID": True, "hostIPC": True, "containers": [{
                    "name": m.engine, "image": m.image or f"{m.engine}-vmem",
                    "command": [plain(part) for part in pool.command(m, "0.0.0.0")], "env": env,
                    "ports": [{"containerPort": m.port}],
                    "resources": {"limits": {"nvidia.com/gpu": m.gpus}},
                    "readinessProbe": {"httpGet": {"path": "/health", "port": m.port}},
                    "volumeMounts": mounts}],
                    "volumes": volumes}}},
        })  # fmt: skip
        documents.append({"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": {
            "selector": labels, "ports": [{"name": "serve", "port": m.port, "targetPort": m.port}]}})  # fmt: skip
    return "---\n".join(map(_yaml, documents))


RENDERERS: dict[str, Callable[[Pool], str]] = {"llama-swap": llama_swap, "aibrix": aibrix}


# ---- the models that run ---------------------------------------------------------------------------------------


def running(pool: Pool) -> dict[str, list[tuple[control.Engine, control.Page]]]:
    """The engines of each model of the file that run on this machine, by what their control pages say.

    An engine of another pool is not meant: its model may have the same name.
    """
    found: dict[str, list[tuple[control.Engine, control.Page]]] = {m.name: [] for m in pool.models}
    for engine, page in control.engines():
        if page[control.POOL] == number_of(pool.pool):
            found.get(engine.model, []).append((engine, page))
    return found


def _absent(fact: str) -> str:
    """The message that no server was found, and why it may be so."""
    return (f"{fact}: no server of it publishes its state {where()}. Those of containers and of systemd "
            "have another XDG_RUNTIME_DIR: set theirs")  # fmt: skip


def listing(pool: Pool) -> str:
    """A table of the models and what they do. Memory in MiB, of one worker."""
    rows: list[tuple[str, ...]] = []
    for name, engines in running(pool).items():
        for e, _ in engines:
            sizes = (e.weights_held, e.weights, e.used, e.cached, e.lacks)
            rows.append((name, e.state or "runs", str(e.port or ""), str(e.running), str(e.queued),
                         *(f"{size / MIB:.0f}" for size in sizes)))  # fmt: skip
        if not engines:
            rows.append((name, "stopped", str(pool.model(name).port), *("" for _ in range(7))))
    columns = ("model", "state", "port", "running", "queued", "weights", "of", "KV used", "cached", "lacks")
    hint = "\n" + _absent("No model of this file runs") if all(row[1] == "stopped" for row in rows) else ""
    return table(rows, columns) + hint


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key goes to the server alone."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def order(pool: Pool, name: str, what: str) -> dict[str, Any]:
    """Have a model sleep, wake or drain; returns what its server answers. Raises ValueError and OSError."""
    model = pool.model(name)
    engines = running(pool)[name]
    if not engines:
        raise ValueError(_absent(f"{name} does not run"))
    # A page may name any port: of several, the file's is meant, and a key goes nowhere else.
    port = model.port if any(e.port == model.port for e, _ in engines) else engines[0][0].port
    key = model.key
    if not port:
        switch = "--middleware pyvmem.vllm.http.Serve" if model.engine == "vllm" else "VMEM_SGLANG_WEIGHTS=1"
        raise ValueError(f"{name} runs, but takes no orders yet: its server starts, or was started without {switch}")
    if key and port != model.port:
        raise ValueError(f"{name}: its control page names port {port}, and the file {model.port}, to which alone the "
                         "key may go: set the model's port in the file")  # fmt: skip
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/vmem/{what}", b"{}", headers, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(asked, timeout=model.queue + 30) as answer:
            state: dict[str, Any] = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ValueError(f"{name}: the server asks for its key; set VLLM_API_KEY, or --api-key in args") from None
        text = " ".join(error.read(300).decode(errors="replace").split())
        raise ValueError(f"{name}: the server answers {error.code}: {text}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"{name}: no answer of vMem's at port {port}: {reason}") from None
    return state


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.set_defaults(run=models)
    parser.epilog = (
        "First: pyvmem models models.toml render llama-swap > llama-swap.yaml. docs/models.md describes the file."
    )
    parser.add_argument("file", metavar="FILE", help="the models, in TOML")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    render = actions.add_parser("render", help="print the configuration of the program that starts the servers")
    render.add_argument("what", metavar="PROGRAM", choices=tuple(RENDERERS), help=", ".join(RENDERERS))
    serve = actions.add_parser("serve", help="become a model's server, as its unit of systemd or its container does")
    serve.add_argument("name", metavar="NAME", help="the model")
    serve.add_argument("--host", default="127.0.0.1", help="the address where it listens (127.0.0.1)")
    actions.add_parser("ls", help="list the models: state, requests, memory in MiB")
    for what, about in (("sleep", "put a model to sleep, so that others may take its memory"),
                        ("wake", "wake a model, or open one that was drained"),
                        ("drain", "refuse further requests, and return when those that run have ended")):  # fmt: skip
        actions.add_parser(what, help=about, description=about).add_argument("name", metavar="NAME", help="the model")
    limit = actions.add_parser("limit", help="set or lift the limit of a model's KV cache")
    limit.add_argument("name", metavar="NAME", help="the model")
    limit.add_argument("size", metavar="SIZE", help="such as 16G; none: no limit")


def models(args: argparse.Namespace, out: TextIO | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        pool = read(Path(args.file).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.file} is not text in UTF-8: byte {error.start} is wrong") from None
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from None
    if args.action == "render":
        print(RENDERERS[args.what](pool), end="", file=out)
    elif args.action == "serve":
        model = pool.model(args.name)
        command = pool.command(model, args.host, here=True)
        os.execvpe(command[0], command, {**os.environ, **pool.environment(model)})
    elif args.action == "ls":
        print(listing(pool), file=out)
    elif args.action == "limit":
        pool.model(args.name)
        limit = None if args.size == "none" else _size("SIZE", args.size)
        pages = [page for _, page in running(pool)[args.name]]
        if not pages:
            raise ValueError(_absent(f"{args.name} does not run"))
        control.change(*pages, limit=limit)
    else:
        print(json.dumps(order(pool, args.name, args.action)), file=out)
    return 0
