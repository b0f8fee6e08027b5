"""Several models on one GPU, each behind a port of its own: which requests are answered in time, and how models wake.

    python -m benchmarks.models --way vmem --trace azure_llm_2023_conv.csv --out vmem.jsonl

It needs vLLM's environment with pyvmem in it. The models have one shape and random weights, and are made in place.
Each observation is a line of the file at once, so that a run that is cut off keeps what it has. Runs with another
``--gpu`` may go on at the same time.

Ways: ``vmem``, one pool for weights and KV caches; ``swap``, one model awake, by vLLM's sleep of level 1, and a driver
that holds requests; ``static``, as many as fit, while requests for the others fail; ``kvcached``, the same with its KV
caches, if that package is installed.

Parts: ``wake``, each model sleeps and gets a request, first while nobody wants its memory, then one after the other so
that it has gone; ``alternate``, two models with a long prefix take turns, then all; ``zipf``, requests arrive at a rate
for models whose popularity falls by Zipf's law, with the lengths of a trace; ``bursts``, only by name, each model in
turn gets many requests at once: compare ``--way vmem`` in a pool for one burst with ``--way static`` and room for all.

``--engines vllm,sglang`` has models of vLLM and of SGLang in turn, in the ways ``static`` and ``vmem``. With
``--awake``, none of them sleeps, and ``vmem`` is one pool for their KV caches. ``--size`` is weights and KV caches, as
always.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import some_of
from benchmarks.argfiles import input_file, output_file
from benchmarks.models_servers import ENGINES, REFERENCE, TIMEOUT, WAYS, Answer, Failed, Server, Way, bytes_of
from benchmarks.shapes import model_name
from benchmarks.traces import read_trace, synthetic_trace
from pyvmem.tools import argtypes

PARTS = ("wake", "alternate", "zipf")
IN_TIME = 2.0  # seconds to the first token
MOST_OUTPUT = 1000  # tokens of a request
OUTSIDE, BESIDE = 3 << 29, 2 << 30  # bytes of a process outside the pool, and what nobody counts, for the default size
GIB = 1 << 30


def device_memory(gpu: int, what: str) -> int:
    """Bytes that nvidia-smi tells of a GPU's memory; 0 if it cannot be asked. what: total or used."""
    ask = shutil.which("nvidia-smi")
    told = subprocess.run([ask, f"--id={gpu}", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, check=False).stdout if ask else ""  # fmt: skip
    return sum(int(mib) << 20 for mib in told.split() if mib.isdecimal())


def percentiles(name: str, seconds: list[float], scale: float = 1.0) -> dict[str, float]:
    """Median and 99th percentile, with how many there are."""
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, (50, 99))
    return {f"{name} p50": round(p50 * scale, 4), f"{name} p99": round(p99 * scale, 4), f"{name} n": len(seconds)}


class Run:
    """One way's run over the chosen parts."""

    def __init__(self, args: argparse.Namespace, way: Way) -> None:
        self.args, self.way = args, way
        self.session: Any = None
        self._out = open(args.out, "a", encoding="utf-8") if args.out else None
        self.end = 0.0
        self._asleep: list[float] = []
        self._equal: list[bool] = []

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.end

    def note(self, part: str, **told: Any) -> None:
        """Write a line."""
        line = json.dumps(dict(way=self.args.way, part=part, at=round(time.time(), 3), **told))
        if self._out:
            print(line, file=self._out, flush=True)

    def sum_up(self, part: str, **told: Any) -> None:
        """Write what a part found, and show it."""
        self.note(part, summary=told)
        print(f"{self.args.way}, {part}: {', '.join(f'{name} {value}' for name, value in told.items())}", flush=True)

    # ---- requests --------------------------------------------------------------------------------------------

    async def request(self, part: str, server: Server, prompt: list[int], n: int, **told: Any) -> Answer:
        """One request, from its arrival on, as the way lets it in."""
        before, begin = self.way.state(server), time.monotonic()
        try:
            await asyncio.wait_for(self.way.enter(server), TIMEOUT)
        except TimeoutError:
            made = Answer(error="it did not begin in time")
        else:
            waited = time.monotonic() - begin
            try:
                made = await server.ask(self.session, prompt, n)
            finally:
                self.way.leave()
            made.first, made.end = (t and t + waited for t in (made.first, made.end))
        self.note(part, model=server.name, engine=server.engine, prompt=len(prompt), output=n, first=made.first,
                  end=made.end, cached=made.cached, error=made.error, before=before, **told)  # fmt: skip
        return made

    def taken(self, server: Server) -> int:
        """Bytes of a model's weights that are not on the device."""
        state = self.way.state(server)
        return int(state.get("weights", 0) - state.get("weights_held", 0))

    async def sleep(self, part: str, server: Server) -> None:
        if self.way.sleeps and (seconds := await self.way.sleep(self.session, server)):
            self._asleep.append(seconds)
            self.note(part, model=server.name, what="sleep", seconds=seconds)

    async def check(self, part: str, server: Server) -> Answer:
        """The reference prompt again: its tokens must be those of before."""
        answer = await self.request(part, server, REFERENCE, 16, what="reference")
        self._equal.append(answer.tokens == server.reference)
        return answer

    # ---- parts -----------------------------------------------------------------------------------------------

    async def wake(self) -> None:
        """Each model sleeps and wakes while nobody wants its memory, then after the others have taken it."""
        found: dict[str, list[float]] = dict(kept=[], taken=[])
        self._asleep, self._equal, copied = [], [], []
        for turn in range(self.args.turns):
            for server in self.way.servers:
                if self.late or not self.way.sleeps:
                    break
                await self.sleep("wake", self.way.awake or server)
                took = self.taken(server)
                answer = await self.check("wake", server)
                if answer.first and not took:
                    found["kept"].append(answer.first)
        for turn in range(1 + self.args.turns):
            for server in self.way.servers:
                if self.late:
                    break
                slept, took = not self.way.state(server)["awake"], self.taken(server)
                answer = await self.check("wake", server)
                if turn and answer.first and slept:
                    found["taken"].append(answer.first)
                    copied.append(took)
        self.sum_up("wake", **percentiles("wake to first token, kept, ms", found["kept"], 1e3),
                    **percentiles("wake to first token, memory was taken, ms", found["taken"], 1e3),
                    **({"GiB copied, mean": round(sum(copied) / len(copied) / GIB, 2)} if any(copied) else {}),
                    **percentiles("decision to asleep, ms", self._asleep, 1e3), **self.equal(),
                    **await self.held())  # fmt: skip

    async def held(self) -> dict[str, int]:
        """Memory of the device that a sleeping model holds and nobody can have, in MiB."""
        if self.args.device == "cpu" or not self.way.sleeps:
            return {}
        for server in self.way.servers:
            await self.sleep("held", server)
        for _ in range(50):  # an engine still gives up what is spare
            pool, used = self.way.pooled(), device_memory(self.args.gpu, "used")
            if pool == self.way.pooled():
                break
            await asyncio.sleep(0.1)
        self.note("held", used=used, pool=pool, states=[self.way.state(server) for server in self.way.servers])
        each = (used - sum(pages for _, pages, _ in pool)) // len(self.way.servers)
        return {"held by a sleeping model when others ask, MiB": each >> 20} if used else {}

    def equal(self) -> dict[str, str]:
        return {"answers with the tokens of before": f"{sum(self._equal)} of {len(self._equal)}"}

    async def alternate(self) -> None:
        """Two models with a long prefix each take turns, which both fit, and then all of them, which do not."""
        rng = np.random.default_rng(3)
        servers = self.way.servers
        prefixes = [rng.integers(10, 900, self.args.prefix).tolist() for _ in servers]
        found: dict[str, list[float]] = dict(cold=[], kept=[], taken=[])
        cached: dict[str, list[int]] = dict(cold=[], kept=[], taken=[])
        self._asleep, self._equal = [], []

        async def one(i: int, what: str) -> None:
            prompt = prefixes[i] + rng.integers(10, 900, 16).tolist()
            answer = await self.request("alternate", servers[i], prompt, 16, what=what, taken=self.taken(servers[i]))
            if answer.first:
                found[what].append(answer.first)
                cached[what].append(answer.cached)

        pair = min(2, len(servers))
        for i in range(pair):
            await one(i, "cold")
        for turn in range(2 * self.args.turns):
            for i in range(pair):
                if not self.late:
                    await self.sleep("alternate", servers[i])
                    await one(i, "kept")
        for turn in range(1 + self.args.turns):
            for i in range(len(servers)):
                if not self.late:
                    await one(i, "taken" if turn else "cold")
        for server in servers:
            if not self.late:
                await self.check("alternate", server)
        told: dict[str, Any] = {}
        for what, title in (("cold", "not cached"), ("kept", "two in turns"), ("taken", "all in turns")):
            told |= percentiles(f"first token, prefix of {self.args.prefix}, {title}, ms", found[what], 1e3)
            if cached[what]:
                told[f"tokens cached, {title}, mean"] = round(sum(cached[what]) / len(cached[what]))
        self.sum_up("alternate", **told, **percentiles("decision to asleep, ms", self._asleep, 1e3), **self.equal())

    async def zipf(self) -> None:
        """Requests of a trace's lengths, at one rate after the other, for models by Zipf's law."""
        for rate in self.args.rate:
            await self.zipf_at(rate)

    async def zipf_at(self, rate: float) -> None:
        args, rng, part = self.args, np.random.default_rng(0), f"zipf, {rate:g} requests/s"
        seconds = min(args.duration, max(self.end - time.monotonic(), 1))
        n = int(2 * rate * args.duration) + 16
        when = np.cumsum(rng.exponential(1 / rate, n))
        shares = 1 / np.arange(1, args.models + 1)
        models = rng.choice(args.models, n, p=shares / shares.sum())
        trace = read_trace(args.trace) if args.trace else synthetic_trace(n)
        most = min(MOST_OUTPUT, args.max_model_len // 4)
        first = rng.integers(0, max(len(trace) - n, 1))
        lengths = zip(trace.prompt[first:], trace.output[first:])
        jobs = [(float(t), int(m), int(np.clip(p, 1, args.max_model_len - most - 8)), int(np.clip(o, 1, most)))
                for t, m, (p, o) in zip(when, models, lengths) if t < seconds]  # fmt: skip
        answers: list[tuple[Answer, bool]] = []
        begin = time.monotonic()

        async def one(after: float, model: int, length: int, output: int, seed: int) -> None:
            prompt = np.random.default_rng(seed).integers(10, 900, length).tolist()
            await asyncio.sleep(max(begin + after - time.monotonic(), 0))
            if model >= len(self.way.servers):  # it does not fit
                answers.append((Answer(error="no such model"), False))
                self.note(part, model=f"m{model}", error="no such model")
                return
            server = self.way.servers[model]
            awake = bool(self.way.state(server)["awake"])
            answers.append((await self.request(part, server, prompt, output, after=after), awake))

        await asyncio.gather(*(one(*job, seed=int(1e6 * rate) + i) for i, job in enumerate(jobs)))
        took = time.monotonic() - begin
        self._equal = []
        for server in self.way.servers:
            await self.check(part, server)
        good = [a for a, _ in answers if not a.error]
        times = [a.first for a in good if a.first is not None]
        here = [a.first for a, awake in answers if awake and not a.error and a.first is not None]
        errors = sorted({a.error for a, _ in answers if a.error})
        self.sum_up(part, requests=len(answers), failed=len(answers) - len(good), seconds=round(took, 1),
                    **{f"within {IN_TIME:g} s": sum(t <= IN_TIME for t in times)},
                    **percentiles("first token, s", times), **percentiles("first token, awake models, s", here),
                    **{"output, tokens/s": round(sum(len(a.tokens) for a in good) / took)}, **self.equal(),
                    **(dict(errors=errors[:3]) if errors else {}))  # fmt: skip

    async def bursts(self) -> None:
        """Each model in turn gets many new prompts at once, so that the memory of a burst moves to the next model."""
        args, rng = self.args, np.random.default_rng(0)
        answers: list[tuple[str, Answer]] = []
        for turn in range(1 + args.turns):  # the first one warms up
            for server in self.way.servers:
                if not self.late:
                    prompts = rng.integers(10, 900, (args.burst, args.burst_prompt)).tolist()
                    made = await asyncio.gather(*(self.request("bursts", server, p, 32, turn=turn) for p in prompts))
                    answers += [(server.engine, answer) for answer in made if turn]
        good = [(engine, a) for engine, a in answers if not a.error]
        told: dict[str, float] = {}
        for engine in dict.fromkeys(args.engines):
            of = f"{engine}, " if len(set(args.engines)) > 1 else ""
            told |= percentiles(f"{of}first token, s", [a.first for e, a in good if e == engine and a.first])
            told |= percentiles(f"{of}whole request, s", [a.end for e, a in good if e == engine and a.end])
        self.sum_up("bursts", requests=len(answers), failed=len(answers) - len(good), **told)

    # ---- all of it -------------------------------------------------------------------------------------------

    async def run(self) -> int:
        import aiohttp

        begin, args = time.monotonic(), self.args
        why = self.way.check()
        self.note("start", about=self.way.about, settings={k: str(v) for k, v in vars(args).items()},
                  fit=self.way.fit, kv_memory=self.way.kv_memory if self.way.fit else 0, refused=why)  # fmt: skip
        if why or not self.way.fit:
            print(f"{args.way}: skipped: {why or 'no model fits'}", flush=True)
            return 0
        limits = aiohttp.ClientTimeout(total=TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limits, connector=connector, read_bufsize=1 << 20) as session:
            self.session = session
            await self.way.start(session, self.note)
            print(f"{args.way}: {self.way.fit} of {args.models} models started in {time.monotonic() - begin:.0f} s",
                  flush=True)  # fmt: skip
            self.end = time.monotonic() + args.seconds
            for part in args.part or PARTS:
                if self.late:
                    print(f"{args.way}, {part}: left out, as {args.seconds:g} s are over", flush=True)
                    continue
                try:
                    await getattr(self, part)()
                except Failed as error:
                    self.note(part, error=str(error))
                    print(f"{args.way}, {part}: {error}", file=sys.stderr, flush=True)
            for server in self.way.servers:
                if server.process.poll() is not None:
                    print(f"{args.way}: {server.name} has ended; its output is in {server.log}", file=sys.stderr)
                    return 1
        return 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, whole = parser.add_argument, argtypes.whole(1)
    add("--way", choices=WAYS, required=True)
    add("--out", type=output_file, metavar="FILE", help="append observations, JSON lines")
    add("--part", action="append", choices=(*PARTS, "bursts"), help=f"repeat for more ({', '.join(PARTS)})")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: tiny models, to try it")
    add("--gpu", type=argtypes.whole(0), default=0, metavar="INDEX")
    add("--models", type=whole, metavar="N", help="(5, or one for each of --engines)")
    add("--engines", type=some_of(ENGINES), default=["vllm"], metavar="NAME,..", help="of each model, in turn (vllm)")
    add("--sglang-env", type=input_file, metavar="FILE", help="sourced by bash: its python3 has SGLang (ours)")
    add("--awake", action="store_true", help="no model sleeps; vmem: the pool is for KV caches alone")
    add("--model", type=model_name, metavar="SHAPE[:LAYERS]", help="a Llama's (llama-3-8b; cpu: mini)")
    add("--size", type=argtypes.size, help="of weights and KV caches (the GPU, less 1.5 GiB a model and 2 GiB)")
    add("--fit", type=whole, metavar="N", help="models of static and kvcached (as many as fit)")
    add("--max-model-len", type=whole, metavar="L", help="(65536; cpu: 4096)")
    add("--eager", action="store_true", help="no CUDA graphs and no compilation, for a faster start")
    add("--at-once", type=whole, default=2, metavar="N", help="servers that start at a time (2)")
    add("--option", action="append", default=[], metavar="TEXT", help="further argument of vllm serve")
    add("--seconds", type=argtypes.positive, default=240, metavar="N", help="for all parts (240)")
    add("--turns", type=whole, default=2, metavar="N", help="of wake, alternate and bursts (2)")
    add("--prefix", type=whole, metavar="N", help="tokens of alternate's prefixes (50000; cpu: 2000)")
    add("--burst", type=whole, default=16, metavar="N", help="requests of a burst (16)")
    add("--burst-prompt", type=whole, metavar="N", help="tokens of each (2000; cpu: 500)")
    add("--duration", type=argtypes.positive, default=90, metavar="SECONDS", help="of zipf (90)")
    add("--rate", type=argtypes.positive, action="append", metavar="N", help="requests a second; repeat for more (2)")
    add("--slice", type=argtypes.positive, default=2, metavar="SECONDS", help="of a busy model if others wait (2)")
    text = "until a model sleeps; 0: only for others (1)"
    add("--idle", type=argtypes.seconds, default=1, metavar="SECONDS", help=text)
    add("--logs", metavar="FOLDER", help="of the servers' output (a temporary one)")
    add("--trace", type=input_file, metavar="FILE", help="of request lengths, such as Azure's")
    args = parser.parse_args(argv)
    if "sglang" in args.engines and args.way not in ("vmem", "static"):
        parser.error(f"--engines sglang needs --way vmem or static, not {args.way}")
    if args.awake and args.way == "swap":
        parser.error("--way swap is a way to sleep: --awake has no part in it")
    cpu = args.device == "cpu"
    args.models = args.models or (5 if len(args.engines) == 1 else len(args.engines))
    args.model = args.model or ("mini" if cpu else "llama-3-8b")
    args.max_model_len = args.max_model_len or (4096 if cpu else 65536)
    args.rate = args.rate or [2.0]
    args.prefix = args.prefix or (2000 if cpu else 50000)
    args.burst_prompt = args.burst_prompt or (500 if cpu else 2000)
    used = {"alternate": "prefix", "bursts": "burst_prompt"}
    for name in (used[part] for part in args.part or PARTS if part in used):
        if getattr(args, name) + 64 > args.max_model_len:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 64 below --max-model-len "
                         f"{args.max_model_len}")  # fmt: skip
    args.logs = args.logs or tempfile.mkdtemp(prefix="models-")
    Path(args.logs).mkdir(parents=True, exist_ok=True)
    return args


def main(args: argparse.Namespace) -> int:
    if not args.size:
        if args.device == "cpu":
            args.size = int((args.models - 0.5) * bytes_of(args.model, 4)[0])
        else:
            args.size = device_memory(args.gpu, "total") - args.models * OUTSIDE - BESIDE
            if args.size <= 0:
                print(f"nvidia-smi does not tell the memory of GPU {args.gpu}: give --size", file=sys.stderr)
                return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with it
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # control pages: no other run's models are in sight
        way = WAYS[args.way](args, Path(folder))
        try:
            return asyncio.run(Run(args, way).run())
        except Failed as error:
            print(f"{args.way}: {error}", file=sys.stderr)
            return 1
        finally:
            way.end()


if __name__ == "__main__":
    sys.exit(main(parse()))
