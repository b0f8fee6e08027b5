"""``pyvmem models FILE``: models that share GPUs, from one file; see docs/models.md. Nothing here runs for long.

`models_file` reads the file, `models_render` prints what starts the servers, and `models_place` proposes pools.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from pyvmem.core import MIB
from pyvmem.engine import control
from pyvmem.engine.pools import number_of
from pyvmem.tools import models_place
from pyvmem.tools.models_file import File, Replica, read, size_of
from pyvmem.tools.models_render import RENDERERS
from pyvmem.tools.top import table, where

Engines = list[tuple[control.Engine, control.Page]]


def running(file: File) -> dict[str, Engines]:
    """The engines of each replica of the file that run on this machine, by what their control pages say.

    An engine of another pool is not meant: its model may have the same name.
    """
    found: dict[str, Engines] = {r.name: [] for r in file.replicas}
    by_page = {(r.model.name, number_of(r.pool.name)): r.name for r in file.replicas}
    for engine, page in control.engines():
        if (engine.model, page[control.POOL]) in by_page:
            found[by_page[engine.model, page[control.POOL]]].append((engine, page))
    return found


def _absent(fact: str) -> str:
    """The message that no server was found, and why it may be so."""
    return (f"{fact}: no server of it publishes its state {where()}. Those of containers and of systemd "
            "have another XDG_RUNTIME_DIR: set theirs")  # fmt: skip


def _engines_of(file: File, replica: Replica) -> Engines:
    """Its engines. Raises ValueError if there are none."""
    if engines := running(file)[replica.name]:
        return engines
    raise ValueError(_absent(f"{replica.name} does not run"))


def listing(file: File) -> list[dict[str, Any]]:
    """The models and what they do: one for each engine, or for a server that does not run. Sizes in bytes."""
    found = running(file)
    rows: list[dict[str, Any]] = []
    for r in file.replicas:
        about = dict(model=r.model.name, pool=r.pool.name, node=r.pool.node, device=list(r.pool.device), port=r.port)
        rows += [{**asdict(e), **about, "state": _state(r, e), "port": e.port} for e, _ in found[r.name]]
        if not found[r.name]:
            rows.append({**about, "state": f"on {r.pool.node}" if r.pool.elsewhere else "stopped"})
    return rows


def _state(replica: Replica, engine: control.Engine) -> str:
    stands_by = replica.model.standby and engine.state == "asleep" and not engine.port
    return "stands by" if stands_by else engine.state or "runs"


LOCAL = ("127.0.0.1", "::1", "localhost")
COLUMNS = {key: key for key in ("model", "pool", "state", "port", "running", "queued")} | {
    "weights_held": "weights", "weights": "of", "used": "KV used", "cached": "cached", "lacks": "lacks"}  # fmt: skip
SIZES = ("weights_held", "weights", "used", "cached", "lacks")


def listing_text(file: File) -> str:
    """`listing` as a table. Memory in MiB, of one worker."""
    rows = listing(file)
    keys = [key for key in COLUMNS if key != "pool" or len(file.pools) > 1]
    text = [tuple(f"{row[key] / MIB:.0f}" if key in SIZES and key in row else str(row.get(key) or (0 if key in row
            and key != "port" else "")) for key in keys) for row in rows]  # fmt: skip
    nobody = all(row["state"] == "stopped" for row in rows)
    return table(text, [COLUMNS[key] for key in keys]) + (
        "\n" + _absent("No model of this file runs") if nobody else ""
    )


def check_text(file: File) -> str:
    """What each pool holds and has left, the pools that are proposed for models without one, and what is outdated."""
    proposed = models_place.propose(file)
    rows, lines = [], []
    for pool in file.pools:
        of_pool = [m for m in file.models if pool.name in m.pools or proposed.get(m.name) == pool]
        weights = sum(m.weights for m in of_pool)
        beside = pool.gpu - pool.size - sum(m.outside * m.servers for m in of_pool) if pool.gpu else None
        rows.append((pool.name, pool.node, ",".join(pool.device), f"{pool.size / MIB:.0f}", f"{weights / MIB:.0f}",
                     f"{(pool.size - weights) / MIB:.0f}", "" if beside is None else f"{beside / MIB:.0f}",
                     " ".join(m.name for m in of_pool)))  # fmt: skip
    columns = ("pool", "node", "device", "size", "weights", "left", "of GPU left", "models")
    text = table(rows, columns)
    if proposed:
        lines = ["", "Pools for the models that name none, by their rate and weights:"]
        for name, pool in proposed.items():
            lines += [f"[models.{name if '.' not in name else json.dumps(name)}]", f'pools = ["{pool.name}"]']
    found = running(file)
    for r in file.replicas:
        if keys := sorted({k for e, _ in found[r.name] for k in models_place.differences(file, r, e)}):
            lines.append(f"{r.name} runs with other settings than the file's ({', '.join(keys)}): start it again")
    return "\n".join([text, *lines])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key goes to the server alone."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def order(file: File, replica: Replica, what: str) -> dict[str, Any]:
    """Have a model sleep, wake or drain; returns what its server answers. Raises ValueError and OSError."""
    model, name = replica.model, replica.name
    engines = _engines_of(file, replica)
    # A page may name any port: of several, the file's is meant, and a key goes nowhere else.
    port = replica.port if any(e.port == replica.port for e, _ in engines) else engines[0][0].port
    key = model.key
    if not port:
        switch = "--middleware pyvmem.vllm.http.Serve" if model.engine == "vllm" else "VMEM_SGLANG_WEIGHTS=1"
        raise ValueError(f"{name} runs, but takes no orders yet: its server starts, or was started without {switch}")
    if key and port != replica.port:
        raise ValueError(f"{name}: its control page names port {port}, and the file {replica.port}, to which alone the "
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
        text = ""
        with contextlib.suppress(OSError, http.client.HTTPException):  # it may end before it has read the request
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
    serve.add_argument("name", metavar="NAME", help="the model, or MODEL@POOL")
    serve.add_argument("--host", default="127.0.0.1", help="the address where it listens (127.0.0.1)")
    listed = actions.add_parser("ls", help="list the models: state, requests, memory in MiB")
    listed.add_argument("--json", action="store_true", help="as JSON, with all that is known, in bytes")
    actions.add_parser("check", help="check the file, propose pools, and name the servers that it has changed")
    for what, about in (("sleep", "put a model to sleep, so that others may take its memory"),
                        ("wake", "wake a model, or open one that was drained"),
                        ("drain", "refuse further requests, and return when those that run have ended")):  # fmt: skip
        actions.add_parser(what, help=about, description=about).add_argument(
            "name", metavar="NAME", help="the model, or MODEL@POOL"
        )
    limit = actions.add_parser("limit", help="set or lift the limit of a model's KV cache")
    limit.add_argument("name", metavar="NAME", help="the model, or MODEL@POOL")
    limit.add_argument("size", metavar="SIZE", help="such as 16G; none: no limit")


def models(args: argparse.Namespace, out: TextIO | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        file = read(Path(args.file).read_text(encoding="utf-8-sig"))
        if args.action != "check":
            file.check_placed()
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.file} is not text in UTF-8: byte {error.start} is wrong") from None
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from None
    if args.action == "render":
        print(RENDERERS[args.what](file), end="", file=out)
    elif args.action == "serve":
        replica = file.one(args.name)
        m = replica.model
        if args.host not in LOCAL and not (m.own_key if m.engine == "sglang" else m.key):
            raise ValueError(f"{replica.name}: at {args.host}, others than this machine reach its server, which has no "
                             'key: args = ["--api-key", ...], or VLLM_API_KEY for vLLM')  # fmt: skip
        command = file.command(replica, args.host, here=True)
        os.execvpe(command[0], command, {**os.environ, **file.environment(replica)})
    elif args.action == "check":
        print(check_text(file), file=out)
    elif args.action == "ls":
        print(json.dumps(listing(file)) if args.json else listing_text(file), file=out)
    elif args.action == "limit":
        limit = None if args.size == "none" else size_of("SIZE", args.size)
        pages = [page for r in file.here(args.name) for _, page in _engines_of(file, r)]
        control.change(*pages, limit=limit)
    else:
        replicas = file.here(args.name)
        for r in replicas:
            _engines_of(file, r)  # all run, before one is ordered
        for r in replicas:
            print(json.dumps(order(file, r, args.action)), file=out)
    return 0
