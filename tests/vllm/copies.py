"""What weights in common, prefixes that outlive, and a server that stands by cost: one line of JSON for each fact.

    python tests/vllm/copies.py                on a GPU, with Llama-3-8B's shape: less than 5 minutes
    python tests/vllm/copies.py --prefixes     a prompt of 50,000 tokens outlives its engine: 4 minutes
    python tests/vllm/copies.py --standby      two servers, of which one is killed: 4 minutes
    python tests/vllm/copies.py --tiny         on a CPU: a trial of this file

The first engine loads weights and offers them, the second one takes them. Both sleep, another member of the pool takes
their memory, and they wake. They are killed, and a third one takes the weights. Then an engine with weights of its own
does the same, for comparison. With `--prefixes`, the next engine serves the long prompt, too: `computed` is its time to
first token without a cache, `cached` with it in the same engine, `restored` in the next one, and `unsaved` that of
another prompt when nothing is saved any more. Tokens must be equal. Logs and the model, which is written once, are in
the folder for temporary files (`--logs`).
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from entry_point import needed, write

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def until(what, seconds):
    """Ask until it is so, but not for longer; returns the last answer."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def prompt_of(tokens, seed=0):
    draw = random.Random(seed).randrange
    return [draw(3, 990) for _ in range(tokens)]


def write_model(folder, tiny):
    """A model with random weights, in four files."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.shapes import write_config

    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, "mini" if tiny else "llama-3-8b", 65536)
    about = json.loads((folder / "config.json").read_text())
    wide, inner, rows = about["hidden_size"], about["intermediate_size"], about["vocab_size"]
    query, kv = (about[key] * about["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens": (rows, wide), "lm_head": (rows, wide), "model.norm": (wide,)}
    for i in range(about["num_hidden_layers"]):
        for name, shape in (("self_attn.q_proj", (query, wide)), ("self_attn.k_proj", (kv, wide)),
                            ("self_attn.v_proj", (kv, wide)), ("self_attn.o_proj", (wide, query)),
                            ("mlp.gate_proj", (inner, wide)), ("mlp.up_proj", (inner, wide)),
                            ("mlp.down_proj", (wide, inner)), ("input_layernorm", (wide,)),
                            ("post_attention_layernorm", (wide,))):  # fmt: skip
            shapes[f"model.layers.{i}.{name}"] = shape
    torch.manual_seed(0)
    names, files, index = list(shapes), 4, {}
    for part in range(files):
        some = {f"{name}.weight": torch.ones(shapes[name], dtype=torch.bfloat16) for name in names[part::files]}
        for tensor in some.values():
            if tensor.dim() > 1:
                on = torch.randn(tensor.shape, device="cpu" if tiny else "cuda", dtype=torch.bfloat16)
                tensor.copy_(on * tensor.shape[-1] ** -0.5)
        file = f"model-{part + 1:05d}-of-{files:05d}.safetensors"
        save_file(some, folder / file)
        index.update(dict.fromkeys(some, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=index)))


# ---- an engine, in a process of its own -----------------------------------------------------------------------------


class Orders:
    """What an engine is told to do; each answers with facts."""

    def __init__(self, args):
        from vllm import LLM, SamplingParams

        self.tiny = args.tiny
        if self.tiny:
            import vllm._custom_ops as ops

            ops._supports_onednn = False
        options = dict(max_model_len=1024 if args.tiny else 4096, max_num_seqs=64, max_num_batched_tokens=4096, seed=0,
                       enable_prefix_caching=True, skip_tokenizer_init=True, enforce_eager=not args.graphs,
                       dtype="float32" if args.tiny else "bfloat16",
                       kv_cache_memory_bytes=(64 << 20) if args.tiny else 8 * GIB)  # fmt: skip
        self.llm = LLM(str(args.model), **dict(options, **json.loads(args.engine)))
        self.params = lambda n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        self.first()

    @property
    def memory(self):
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker._vmem

    def serve(self, prompts, n):
        return self.llm.generate([dict(prompt_token_ids=p) for p in prompts], self.params(n), use_tqdm=False)

    def first(self):
        """One token of a short prompt."""
        self.serve([prompt_of(20)], 1)
        return {}

    def tokens(self):
        answers = self.serve([prompt_of(5 + 16 * i, i) for i in range(12)], 16)
        return dict(tokens=[list(a.outputs[0].token_ids) for a in answers])

    def long(self, seed=0, tokens=0):
        """The first token of a long prompt, and how many of its tokens were in the cache."""
        (answer,) = self.serve([prompt_of(tokens or (800 if self.tiny else 50_000), seed)], 1)
        return dict(token=answer.outputs[0].token_ids[0], cached=answer.num_cached_tokens)

    def warm(self):
        """A shorter prompt, for what compiles at the first one."""
        return self.long(1, 400 if self.tiny else 8192)

    def saved(self):
        """Wait until all is saved that is to be."""
        prefixes = self.memory.prefixes
        until(lambda: not prefixes._pending, 60)
        return dict(blocks=len(prefixes.file.saved()), left=len(prefixes._pending), block_bytes=prefixes.block)

    def unsaved(self):
        """The first token of another long prompt, when nothing is saved any more."""
        self.memory.prefixes.close()
        return self.long(2)

    def sleep(self):
        self.llm.sleep(1)
        return {}

    def wake(self):
        self.llm.wake_up()
        if not self.tiny:
            import torch

            torch.cuda.synchronize()
        return {}

    def copied(self):
        """Wait until the weights have a copy in host memory, or that is pinned."""
        weights = self.memory.weights
        if not getattr(weights, "is_common", False):
            weights.copy_behind()
        if thread := weights._thread:
            thread.join()
        sealed = getattr(weights, "_sealed", None)
        return dict(unpinned=sealed.unpinned, errno=sealed.error) if sealed is not None else {}

    def look(self):
        weights = self.memory.weights
        link = getattr(weights, "_link", None)
        return dict(common=getattr(weights, "is_common", False), owner=link.owner if link else 0, held=weights.held,
                    pool=str(weights.lease.pool.path), alone=weights.lease.stats().bytes,
                    device="" if self.tiny else weights._context.info().device_uuid.hex())  # fmt: skip


def engine(args):
    """Carry out the orders of stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**told):
        print(json.dumps(told), file=out, flush=True)

    orders = Orders(args)
    say(at=time.time(), **orders.look())
    for line in sys.stdin:
        begin = time.time()
        try:
            told = getattr(orders, line.strip())()
            say(ms=round(1e3 * (time.time() - begin), 1), **told)
        except Exception as error:
            say(error=repr(error)[:500])


class Engine:
    """The other side of `engine`."""

    def __init__(self, run, name, common=True, prefixes="", **options):
        args, self.name, self.log, self.began = run.args, name, run.args.logs / f"copies-{name}.log", time.time()
        environment = dict(
            os.environ, VMEM_VLLM="1", VMEM_VLLM_POOL=run.pool, VMEM_VLLM_POOL_SIZE=str(run.size),
            VMEM_VLLM_WEIGHTS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONPATH=run.path,
            **(dict(VMEM_VLLM_COMMON="600" if prefixes else "60") if common else {}),
            **(dict(VMEM_VLLM_PREFIXES=prefixes) if prefixes else {}))  # fmt: skip
        command = [sys.executable, __file__, "--engine", json.dumps(options), "--model", args.model,
                   *["--tiny"] * args.tiny, *["--graphs"] * args.graphs]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, text=True)  # fmt: skip
        run.engines.append(self)
        self.told = self._answer()
        words = [line[line.index("vMem:") :].strip()[:200] for line in self._logged() if "vMem:" in line]
        run.say("started", name=name, seconds=round(self.told["at"] - self.began, 1), common=self.told["common"],
                alone=self.told["alone"], log=words)  # fmt: skip

    def _logged(self):
        return self.log.read_text(errors="replace").splitlines()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended:\n" + "\n".join(self._logged()[-20:]))
        told = json.loads(line)
        if "error" in told:
            raise SystemExit(f"{self.name}: {told['error']}")
        return told

    def __call__(self, order):
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self):
        self.process.kill()
        self.process.wait()


# ---- the run --------------------------------------------------------------------------------------------------------


class Run:
    """What all parts of a run use."""

    def __init__(self, args):
        self.args, self.engines, self.began = args, [], time.time()
        self.pool, self.size = uuid.uuid4().hex[:12], (256 << 20) if args.tiny else 64 * GIB
        plugin = [str(write(Path(tempfile.mkdtemp())))] if needed() else []
        self.path = os.pathsep.join([str(ROOT), *plugin, os.environ.get("PYTHONPATH", "")])
        if not (args.model / "model.safetensors.index.json").exists():
            write_model(args.model, args.tiny)

    def say(self, what, **told):
        print(json.dumps(dict(what=what, at=round(time.time() - self.began, 1), **told)), flush=True)

    def used(self):
        """MiB of the device."""
        if self.args.tiny:
            return 0
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])

    def late(self):
        return time.time() - self.began > self.args.seconds


class Member:
    """Another member of the pool, which takes memory from models that sleep."""

    def __init__(self, engine, size):
        from pyvmem import Context
        from pyvmem.kv.pool import Hold, KVPool

        self.pool, self._size = KVPool(path=engine.told["pool"]), size
        self._hold = Hold(self.pool, Context("host"), "neighbour", bytes.fromhex(engine.told["device"]) or None)

    def take(self):
        """Returns the bytes that did not come."""
        until(lambda: not self._hold.set(self._size), 10)
        return self._hold.set(self._size)

    def give(self):
        self._hold.set(0)

    def members(self):
        return [[m.name.split()[0], m.has >> 20, m.held >> 20] for m in self.pool.members()]


def naps(run, member, engines, expected):
    """Sleep and wake, without and with another member that takes the memory meanwhile."""
    for taken in (False, True, True):
        awake = run.used()
        sleeps = [each("sleep")["ms"] for each in engines]
        copied = [each("copied") for each in engines]
        missing = member.take() if taken else 0
        asleep = run.used()
        member.give()
        wakes = [each("wake")["ms"] for each in engines]
        first = engines[0]("first")["ms"]
        run.say("nap", engines=[each.name for each in engines], taken=taken, missing=missing, sleep_ms=sleeps,
                wake_ms=wakes, first_ms=first, mib=[awake, asleep, run.used()], copied=copied,
                equal=all(each("tokens")["tokens"] == expected for each in engines))  # fmt: skip


def common(run):
    """Engines that read one copy, are killed, and outlived."""
    base = run.used()
    one = Engine(run, "one")
    member, expected = Member(one, run.size - run.size // 16), one("tokens")["tokens"]
    before = run.used()
    run.say("one", mib=before - base)
    two = Engine(run, "two", max_num_seqs=32)
    run.say("two", extra_mib=run.used() - before, equal=two("tokens")["tokens"] == expected)
    naps(run, member, [one, two], expected)
    one.kill()
    run.say("one was killed", equal=two("tokens")["tokens"] == expected)
    two.kill()
    run.say("two was killed", mib=run.used() - base, members=member.members())
    three = Engine(run, "three")
    run.say("three", equal=three("tokens")["tokens"] == expected)
    three.kill()
    begin = time.time()
    until(lambda: not any(held for name, _, held in member.members() if name == "common"), 90)
    run.say("all have ended", seconds=round(time.time() - begin, 1), mib=run.used() - base, members=member.members())
    if not run.late():
        alone = Engine(run, "alone", common=False)
        naps(run, member, [alone], expected)


def prefixes(run):
    """An engine computes a long prompt and is killed, and the next one serves it."""
    options = dict(prefixes="64M") if run.args.tiny else dict(prefixes="12G", max_model_len=50_176)
    one = Engine(run, "saves", **options)
    one("warm")
    computed, cached = one("long"), one("long")
    run.say("one", computed=computed, cached=cached, saved=one("saved"))
    one.kill()
    two = Engine(run, "restores", **options)
    restored = two("long")
    run.say("two", restored=restored, equal=restored["token"] == computed["token"] == cached["token"],
            unsaved=two("unsaved"))  # fmt: skip
    two.kill()
    os.kill(two.told["owner"], signal.SIGKILL)


def standby(run):
    """Two servers; the engine or the server of the one that serves is killed in turns."""
    import http.client
    import urllib.request

    from pyvmem.engine.metrics import parent_of
    from pyvmem.tools import models, models_file
    from serve import free_port

    port = free_port()
    options = ["--max-model-len", "2048", "--max-num-seqs", "32", "--max-num-batched-tokens", "2048",
               "--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32" if run.args.tiny else "bfloat16",
               "--kv-cache-memory-bytes", str((32 << 20) if run.args.tiny else 8 * GIB)]  # fmt: skip
    file = models_file.read(
        f'pool = "{run.pool}"\nsize = {run.size}\n[models.s]\npath = "{run.args.model}"\n'
        f'port = {port}\noutside = "1M"\nstandby = true\nargs = {json.dumps(options)}\n'
    )
    replica = file.one("s")
    command = file.command(replica)
    at = command.index("vllm")
    command[at : at + 1] = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    log = run.args.logs / "copies-standby.log"

    def ask(n=1):
        """The tokens of an answer; None if there is none."""
        body = dict(model="s", prompt=list(range(5, 40)), max_tokens=n, temperature=0, ignore_eos=True,
                    return_token_ids=True)  # fmt: skip
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                       {"Content-Type": "application/json"})  # fmt: skip
        with (contextlib.suppress(OSError, http.client.HTTPException),
              urllib.request.urlopen(asked, timeout=60) as answer):  # fmt: skip
            return json.loads(answer.read())["choices"][0]["token_ids"]

    def found():
        """Processes of engines, by what they do: the one that serves may be awake or asleep, and has a port."""
        return {"serves" if row["port"] else row["state"]: row["pid"] for row in models.listing(file) if row.get("pid")}

    def wait(what):
        told = until(lambda: what() or pair.poll() is not None or run.late(), run.args.seconds)
        if pair.poll() is not None or run.late():
            raise SystemExit(f"too late, or ended with {pair.poll()}: {log.read_text(errors='replace')[-2000:]}")
        return told

    with log.open("w") as out:
        pair = subprocess.Popen([sys.executable, *command[1:]], stdout=out, stderr=subprocess.STDOUT,
                                env={**os.environ, **file.environment(replica), "PYTHONPATH": run.path})  # fmt: skip
    try:
        expected = wait(lambda: ask(16))
        run.say("first answer", mib=run.used())
        for kill in range(run.args.kills):
            wait(lambda: {"serves", "stands by"} <= found().keys())
            before, mib, answers = found(), run.used(), []

            def answered(answers=answers):
                answers.append(ask())
                return answers[-1]

            begin = time.time()
            os.kill(parent_of(before["serves"]) if kill % 2 else before["serves"], signal.SIGKILL)
            until(answered, 60)
            run.say("killed", victim="server" if kill % 2 else "engine", seconds=round(time.time() - begin, 3),
                    errors=answers.count(None), mib_with_standby=mib, equal=ask(16) == expected)  # fmt: skip
    finally:
        pair.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            pair.wait(20)
        pair.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", metavar="OPTIONS", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--graphs", action="store_true", help="compile the model, and capture CUDA graphs")
    parser.add_argument("--prefixes", action="store_true", help="prefixes that outlive their engine")
    parser.add_argument("--standby", action="store_true", help="a server that stands by")
    parser.add_argument(
        "--kills", type=int, default=2, help="of servers, in turns the engine's process and the server's"
    )
    parser.add_argument("--seconds", type=float, default=280, help="nothing more begins after so many")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--model", type=Path, help="its folder; one that is not there is written")
    args = parser.parse_args()
    args.model = args.model or args.logs / f"copies-model{'-tiny' * args.tiny}"
    if args.engine:
        return engine(args)
    run = Run(args)
    try:
        (standby if args.standby else prefixes if args.prefixes else common)(run)
    finally:
        for each in run.engines:
            each.kill()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
