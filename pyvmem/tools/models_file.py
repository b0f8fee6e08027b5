"""The file of ``pyvmem models``: models, the pools in which they run, and what their servers are started with.

Begin with `read`. docs/models.md describes the file.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyvmem._checks import shown
from pyvmem.core import MIB
from pyvmem.engine.settings import MOST
from pyvmem.sleep.checkpoint import weight_bytes
from pyvmem.tools.argtypes import parse_size

FIRST_PORT = 8001
SMI_SECONDS = 10.0  # after which nvidia-smi is not waited for
GIB = 1 << 30
# Memory of each server that is not in the pool: its CUDA context, libraries and CUDA graphs. vLLM 0.33 held 1,106 to
# 1,204 MiB on an H100 while Llama-3-8B's shape slept (docs/models.md). An awake model has activations, too.
OUTSIDE = 1300 * MIB
COMMON = 600.0  # seconds for which the weights of a model with a standby stay if no server has them
SEVERAL = ("--api-server-count", "-asc", "--data-parallel-size", "-dp", "--uds", "--headless")
GPUS = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--pipeline-parallel-size", "-pp")


@dataclass(frozen=True)
class Model:
    """One model of the file. Sizes are in bytes, times in seconds."""

    name: str
    path: str
    pools: tuple[str, ...] = ()  # in which it has a replica each; (): none was chosen
    port: int = 0  # of its first replica. Each further one has the next; 0: not chosen
    min: int = 0
    max: int = 0
    priority: int = 0
    idle: float = 0.0
    queue: float = 60.0
    outside: int = OUTSIDE
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders, by the names under which requests ask for them
    weights: int = 0  # on each GPU; 0: its files are not on this machine
    rate: float = 0.0  # requests a second, by which a pool is proposed for it
    image: str = ""  # the engine's with vMem in it (docs/models-deploy.md); "": vllm-vmem or sglang-vmem
    engine: str = "vllm"
    common: float = 0.0  # for which its weights stay, in common, when no server has them; 0: each server has its own
    prefixes: int = 0  # bytes of host memory for prefixes that outlive a server
    standby: bool = False  # a second server stands by in each pool (`pyvmem.tools.pair`)

    @property
    def servers(self) -> int:
        """Its servers in each pool."""
        return 2 if self.standby else 1

    @property
    def gpus(self) -> int:
        """GPUs among which its weights are divided."""
        return _gpus_of(self.args)

    @property
    def names(self) -> list[str]:
        """The names by which requests ask for it and its adapters: SGLang's have the model's name before theirs."""
        return [self.name, *(name if self.engine == "vllm" else f"{self.name}:{name}" for name in self.adapters)]

    @property
    def own_key(self) -> str:
        """The key of its server that the file has, or the first of several; "": none."""
        found: dict[str, str] = {}  # both engines also take --api_key and =
        for arg, following in zip(self.args, (*self.args[1:], "--")):
            option, equals, value = arg.partition("=")
            found.setdefault(option.replace("_", "-"), value if equals or following.startswith("--") else following)
        for option in ("--api-key", "--admin-api-key"):  # the second is SGLang's
            if found.get(option):
                return found[option]
        return self.env.get("VLLM_API_KEY", "")

    @property
    def key(self) -> str:
        """The key of its server; "": none."""
        return self.own_key or os.environ.get("VLLM_API_KEY", "")


def _gpus_of(args: tuple[str, ...]) -> int:
    n, parts = 1, [part for arg in args for part in arg.split("=", 1)]
    for key, value in zip(parts, parts[1:]):
        if key in GPUS and value.isdecimal():
            n *= int(value)
    return max(n, 1)


@dataclass(frozen=True)
class Pool:
    """A budget for the weights and KV caches of several models, on each of its GPUs."""

    name: str
    size: int  # bytes of the budget
    gpu: int = 0  # bytes of a GPU's memory; 0: not known
    node: str = ""  # the host name of its machine; "", as all others: this one
    device: tuple[str, ...] = ()  # its GPUs, as CUDA_VISIBLE_DEVICES takes them; (): not chosen

    @property
    def elsewhere(self) -> str:
        """The host name of its machine; "" for this one."""
        return "" if self.node in (socket.gethostname(), socket.gethostname().partition(".")[0]) else self.node


@dataclass(frozen=True)
class Replica:
    """A model in a pool: one server."""

    model: Model
    pool: Pool
    port: int

    @property
    def name(self) -> str:
        """The model's name; with the pool's behind an ``@`` if the model has several."""
        return self.model.name if len(self.model.pools) < 2 else f"{self.model.name}@{self.pool.name}"


@dataclass(frozen=True)
class File:
    """The contents of the file. table: as TOML has it."""

    pools: tuple[Pool, ...]
    models: tuple[Model, ...]
    slice: float
    table: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def replicas(self) -> list[Replica]:
        """Every model in each of its pools."""
        by_name = {pool.name: pool for pool in self.pools}
        made: list[Replica] = []
        for m in self.models:
            first = m.port or FIRST_PORT + len(made)
            made += [Replica(m, by_name[pool], first + i) for i, pool in enumerate(m.pools)]
        return made

    def check_placed(self) -> None:
        """Raise ValueError if a model has no pool."""
        for m in self.models:
            if not m.pools:
                raise ValueError(f"models.{m.name}.pools is missing: `pyvmem models FILE check` proposes pools")

    def of(self, name: str) -> list[Replica]:
        """The replicas of a model, or the one of this name. Raises ValueError if there is none."""
        found = [r for r in self.replicas if name in (r.name, r.model.name)]
        if not found:
            names = ", ".join(m.name for m in self.models)
            names = names if len(names) < 400 else f"{names[:400]}..."
            raise ValueError(f"the file has no model {shown(name)}: it has {names}")
        return found

    def here(self, name: str) -> list[Replica]:
        """Those of them that are on this machine, at least one. Raises ValueError."""
        found = [r for r in self.of(name) if not r.pool.elsewhere]
        if not found:
            raise ValueError(f"{name} is not on this machine, but on {self.of(name)[0].pool.node}")
        return found

    def one(self, name: str) -> Replica:
        """The only one of them. Raises ValueError."""
        found = self.here(name)
        if len(found) > 1:
            raise ValueError(f"{name} has several servers here: {', '.join(r.name for r in found)}")
        return found[0]

    def environment(self, replica: Replica, devices: bool = True) -> dict[str, str]:
        """The variables of a server. devices: choose its GPUs. Raises ValueError if they would be another pool's."""
        model, pool = replica.model, replica.pool
        switch = f"VMEM_{model.engine.upper()}"
        variables = {switch: "1", f"{switch}_POOL": pool.name, f"{switch}_POOL_SIZE": str(pool.size),
                     f"{switch}_WEIGHTS": "1", f"{switch}_SLICE": _seconds_text(self.slice),
                     f"{switch}_QUEUE": _seconds_text(model.queue)}  # fmt: skip
        if model.engine == "vllm":
            variables[f"{switch}_SLEEP"] = "keep"
        for name, value in (("MIN", model.min), ("MAX", model.max), ("PRIORITY", model.priority), ("IDLE", model.idle),
                            ("COMMON", model.common), ("PREFIXES", model.prefixes)):  # fmt: skip
            if value:
                variables[f"{switch}_{name}"] = _seconds_text(value) if isinstance(value, float) else str(value)
        if devices and not pool.device and any(p.elsewhere == pool.elsewhere for p in self.pools if p is not pool):
            raise ValueError(f"pools.{pool.name}.device is missing: its node has several pools")
        if devices and pool.device:  # numbered as nvidia-smi does
            variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(pool.device)}
        return {**variables, **model.env}

    def command(self, replica: Replica, host: str = "127.0.0.1", here: bool = False) -> list[str]:
        """The command of a server, or of two of which one stands by.

        here: on this machine, with the engine of this environment.
        """
        command = self.server(replica, host, here)
        pair = [sys.executable if here else "python3", "-m", "pyvmem.tools.pair", host, str(replica.port)]
        return [*pair, *command] if replica.model.standby else command

    def server(self, replica: Replica, host: str, here: bool = False) -> list[str]:
        """The command of one server. One of two is given its port, instead of one that the system chooses."""
        model = replica.model
        port = 0 if model.standby else replica.port
        about = ["--host", host, "--port", str(port), "--served-model-name", model.name]
        if model.engine == "sglang":
            command = [sys.executable if here else "python3", "-m", "sglang.launch_server", "--model-path", model.path]
            adapters = [f"{name}={path}" for name, path in model.adapters.items()]
            about += ["--enable-lora", "--lora-paths", *adapters] if adapters else []
            return [*command, *about, *([] if "--page-size" in model.args else ["--page-size", "64"]), *model.args]
        command = [_vllm() if here else "vllm", "serve", model.path, *about, "--middleware", "pyvmem.vllm.http.Serve"]
        if model.adapters:
            adapters = [json.dumps(dict(name=n, path=p), ensure_ascii=False) for n, p in model.adapters.items()]
            command += ["--enable-lora", "--lora-modules", *adapters]
        if "--kv-cache-memory-bytes" not in model.args:
            command += ["--kv-cache-memory-bytes", str(model.max or replica.pool.size - model.weights)]
        if "--gpu-memory-utilization" not in model.args:
            command += ["--gpu-memory-utilization", "0.01"]  # vLLM refuses to start if less of the GPU is free
        return [*command, *model.args]


def _vllm() -> str:
    """The vllm of this environment or of the path here: what starts it may have another path."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.exists() else shutil.which("vllm") or "vllm"


# ---- values --------------------------------------------------------------------------------------------------------


def size_text(size: float) -> str:
    """A size in a message."""
    return f"{size / GIB:.1f} GiB" if size >= GIB or not size else f"{size / MIB:.1f} MiB"


def _seconds_text(seconds: float) -> str:
    """As the servers take it: without an exponent."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _shown_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", key) else shown(key)


def _take(where: str, table: Any, kinds: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{where.rstrip('.')} must be a table, not {shown(table)}")
    for key, value in table.items():
        if key not in kinds:
            key = _shown_key(key)
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


def size_of(key: str, value: Any) -> int:
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= round(value, 6) <= 999999:
        raise ValueError(f"{key} must be a number of seconds from 0 to 999999, not {shown(value)}")
    return round(float(value), 6) + 0.0  # no -0.0


def _rate(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError(f"{key} must be a number of requests a second from 0 to 999999, not {shown(value)}")
    return float(value)


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
        if name in KEYS:
            raise ValueError(f"{key}: {name} is what the key {KEYS[name]!r} sets")
    return {name: _printable(f"{key}.{name}", text) for name, text in value.items()}


def _adapters(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a table of names and paths, not {shown(value)}")
    return {_name(key, name): _text(f"{key}.{name}", path) for name, path in value.items()}


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{key} must be a list of names, not {shown(value)}")
    if len(set(value)) < len(value):
        raise ValueError(f"{key} has a name twice: {shown(value)}")
    return tuple(_name(key, v) for v in value)


def _devices(key: str, value: Any) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    found = [str(v) for v in given if isinstance(v, int | str) and not isinstance(v, bool)]
    if not given or len(set(found)) < len(given) or not all(re.fullmatch(DEVICE, v) for v in found):
        raise ValueError(f"{key} must be the number of a GPU, GPU-UUID or MIG-UUID, or a list of these, each once: "
                         f"{shown(value)}")  # fmt: skip
    return tuple(found)


def _engine(key: str, value: Any) -> str:
    if value not in ("vllm", "sglang"):
        raise ValueError(f'{key} must be "vllm" or "sglang", not {shown(value)}')
    return str(value)


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {shown(value)}")
    return value


def _table(key: str, value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{key} must have a table for each {key[:-1]}, such as [{key}.{EXAMPLES[key]}]")
    return value


EXAMPLES = dict(models="chat", pools="gpu0")
DEVICE = r"[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}"


# Variables that a key of the file sets. A second value elsewhere would escape the checks, and `ls` would not find the
# server.
KEYS = {f"VMEM_{engine}_{key.upper()}": "size" if key == "pool_size" else key for engine in ("VLLM", "SGLANG")
         for key in ("pool", "pool_size", "slice", "min", "max", "priority", "idle", "queue",
                     "common", "prefixes", "standby")}  # fmt: skip
_POOL: dict[str, Callable[[str, Any], Any]] = dict(size=size_of, gpu=size_of, node=_name, device=_devices)
_MODEL: dict[str, Callable[[str, Any], Any]] = dict(
    path=_text, pools=_names, port=_whole(1, 65535), min=size_of, max=size_of, priority=_whole(0, 10**15 - 1),
    idle=_seconds, queue=_seconds, outside=size_of, args=_texts, env=_env, adapters=_adapters,
    weights=size_of, rate=_rate, image=_text, engine=_engine, common=_seconds, prefixes=size_of,
    standby=_switch)  # fmt: skip


def read(text: str) -> File:
    """The `File` of a text. Raises ValueError naming the key."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        raise ValueError("pyvmem models needs Python 3.11 or newer, which reads TOML") from None
    try:
        return made(tomllib.loads(text))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def made(table: Mapping[str, Any]) -> File:
    """The `File` of what TOML has. Raises ValueError naming the key."""
    about = _take("", table, dict(pool=_name, size=size_of, gpu=size_of, slice=_seconds, pools=_table, models=_table))
    short = [key for key in ("pool", "size") if key in about]
    if "pools" in about and short:
        raise ValueError(f"{short[0]} is a key of a file with one pool; with [pools.NAME], each has its own size")
    for key in ("models",) if "pools" in about else ("pool", "size", "models"):
        if key not in about:
            raise ValueError(f"{key} is missing")
    tables = about.get("pools") or {about["pool"]: dict(size=about["size"])}
    pools = tuple(_pool(name, keys, about.get("gpu", 0)) for name, keys in tables.items())
    here = [pool.name for pool in pools if not pool.node]
    if 0 < len(here) < len(pools):  # what has none would be on every machine that reads the file
        raise ValueError(f"pools.{here[0]}.node is missing: other pools name theirs")
    models = tuple(_model(name, keys, pools) for name, keys in about["models"].items())
    file = File(pools, models, about.get("slice", 2.0), table)
    _check(file, "pools.{}." if "pools" in about else "")
    return file


def _pool(name: str, keys: Any, gpu: int) -> Pool:
    name = _name(f"pools.{_shown_key(name)}", name)
    given = _take(f"pools.{name}.", keys, _POOL)
    if "size" not in given:
        raise ValueError(f"pools.{name}.size is missing")
    pool = Pool(name, **{"gpu": gpu, **given})
    return replace(pool, gpu=pool.gpu or (0 if pool.elsewhere else _gpu(pool.device)))


def _model(name: str, keys: Any, pools: tuple[Pool, ...]) -> Model:
    name = _name(f"models.{_shown_key(name)}", name)
    given = _take(f"models.{name}.", keys, _MODEL)
    if "path" not in given:
        raise ValueError(f"models.{name}.path is missing")
    if len(pools) == 1:
        given.setdefault("pools", (pools[0].name,))
    if "weights" not in given:
        given["weights"] = weight_bytes(given["path"]) // _gpus_of(given.get("args", ()))
    if given.get("standby") or given.get("prefixes"):
        given.setdefault("common", COMMON)
    model = Model(name, **given)
    _check_standby(model)
    by_name = {pool.name: pool for pool in pools}
    for pool in model.pools:
        if pool not in by_name:
            raise ValueError(f"models.{name}.pools: the file has no [pools.{pool}]")
        if by_name[pool].device and "CUDA_VISIBLE_DEVICES" in model.env:
            raise ValueError(f"models.{name}.env: CUDA_VISIBLE_DEVICES is what the key 'device' of pools.{pool} sets")
        if 0 < len(by_name[pool].device) < model.gpus:
            raise ValueError(f"models.{name}.args: it is divided among {model.gpus} GPUs, and pools.{pool}.device "
                             f"names {len(by_name[pool].device)}")  # fmt: skip
    return model


def _check_standby(model: Model) -> None:
    where = f"models.{model.name}."
    for key in ("standby", "prefixes", "common") if model.engine == "sglang" else ():
        if getattr(model, key):
            raise ValueError(f"{where}{key}: SGLang's servers have weights of their own; only those of vLLM can have "
                             "them in common")  # fmt: skip
    if model.prefixes and not model.common:
        raise ValueError(f"{where}prefixes: only those of servers with weights in common outlive them; set common")
    for arg in model.args if model.standby else ():
        if arg.partition("=")[0] in SEVERAL:
            raise ValueError(f"{where}standby: {shown(arg)} in args makes several processes listen, or none; a server "
                             "that can stand by has one")  # fmt: skip


@functools.lru_cache(1)
def _gpus() -> dict[str, int]:
    """Bytes of each GPU of this machine, by number and by UUID; {} if none can be asked.

    nvidia-smi hangs if a GPU has failed.
    """
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=SMI_SECONDS)
        rows = [line.split(", ") for line in done.stdout.decode("ascii").splitlines()]
        return {name: int(row[2]) * MIB for row in rows for name in row[:2]}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def _gpu(device: tuple[str, ...] = ()) -> int:
    """Bytes of the smallest of these GPUs of this machine, or of all; 0 if it is not known, as of parts by MIG."""
    gpus = _gpus()
    return min((gpus.get(name, 0) for name in device or gpus), default=0)


def _check(file: File, where: str) -> None:
    """Raise ValueError if what the file asks for cannot be. where: how the names of a pool's keys begin."""
    names: dict[str, str] = {}
    for m in file.models:
        for name in m.names:
            if name in names:
                raise ValueError(f"models.{m.name}: {name} is also a name of {names[name]}")
            names[name] = m.name
        if m.max and m.min > m.max:
            raise ValueError(f"models.{m.name}.min, {m.min} bytes, is over its max, {m.max}")
    at: dict[tuple[str, int], str] = {}
    in_pool: dict[str, list[Model]] = {pool.name: [] for pool in file.pools}
    for r in file.replicas:
        key = r.pool.elsewhere, r.port
        if key in at:
            raise ValueError(f"models.{r.model.name}.port: {r.port} is also the port of {at[key]}")
        if r.port > 65535:
            raise ValueError(f"models.{r.model.name}.port: {r.name} would have port {r.port}, over 65535")
        at[key] = r.name
        in_pool[r.pool.name].append(r.model)
    devices: dict[tuple[str, str], str] = {}
    for pool in file.pools:
        key_of = where.format(pool.name)
        for device in pool.device:
            other = devices.setdefault((pool.elsewhere, device), pool.name)
            if other != pool.name:
                raise ValueError(f"{key_of}device: {device} is also the device of pools.{other}")
        _check_pool(pool, in_pool[pool.name], key_of)


def _check_pool(pool: Pool, models: list[Model], where: str) -> None:
    outside, minimums = sum(m.outside * m.servers for m in models), sum(m.min for m in models)
    if 0 < pool.gpu < pool.size + outside:
        raise ValueError(f"{where}size: {size_text(pool.size)}, and {size_text(outside)} outside of it for the "
                         f"servers of {len(models)} models, exceed the GPU's {size_text(pool.gpu)}; size can be at "
                         f"most {size_text(max(pool.gpu - outside, 0))}")  # fmt: skip
    if minimums > pool.size:
        raise ValueError(f"min: the minimums of all models add up to {size_text(minimums)}, more than {where}size, "
                         f"{size_text(pool.size)}")  # fmt: skip
    for m in models:
        # The minimums of the others stay theirs while they are awake, and those that sleep have none.
        if m.weights + max(m.min, 2 * MIB) > pool.size:
            raise ValueError(f"models.{m.name}: its weights of {size_text(m.weights)} and the minimum of its KV "
                             f"cache exceed {where}size, {size_text(pool.size)}")  # fmt: skip
