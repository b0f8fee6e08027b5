"""Two engines in one pool, while somebody does his worst: one line for each attack, exit status 1 if one got through.

    python tests/vllm/attack.py --minutes 5                         on a GPU
    python tests/vllm/attack.py --minutes 1 --kv 128M --requests 12   with a CPU build of vLLM
    python tests/vllm/attack.py --kills 30                            with one, three servers

Limits move ten times a second under load; a neighbour is killed under load; a stranger fills the GPU. Requests must all
be answered, the pool must forget the dead, and what the engines say that they hold must be what the driver counts.

With --kills, three servers share a pool that holds two of their models. Clients ask all of them, and an operator lets
them sleep and wake and sets limits. Meanwhile their processes get SIGKILL, one of a server or all, also while it
starts, and what is left of it must end. Then it is started again. Every answer must be plain vLLM's, a request may fail
only with its server, and at last the whole pool must be free.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from entry_point import needed, write

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.vllm import Engine  # noqa: E402
from pyvmem.tools import argtypes  # noqa: E402
from pyvmem.engine import control  # noqa: E402

CUDA = torch.cuda.is_available()
PIECES = 128 << 20  # device memory goes back in pieces, and an engine keeps some of it for a while
STRANGER = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
print("full", flush=True)
sys.stdin.read()
"""


def say(attack, *words):
    print(f"{attack}:", *words, flush=True)


class Attack:
    """Two engines in processes of their own, which serve batches."""

    def __init__(self, args, log):
        self.args, self.log, self.wrong = args, log, 0
        self.pool = dict(VMEM_VLLM_POOL=f"attack-{os.getpid()}", VMEM_VLLM_POOL_SIZE=str(args.kv))
        settings = argparse.Namespace(
            model="tiny", max_model_len=2048, max_num_seqs=64, eager=True, prefix_caching=True, kv_memory=args.kv,
            tensor_parallel=1, layout="auto")  # fmt: skip
        self.engines = [Engine(settings, True, log, self.pool, share=0.1) for _ in range(2)]
        for engine in self.engines:
            engine.answer()
        self.loads = [dict(kind="hot", batch=args.requests, prefixes=8, prefix=256, suffix=64, ratio=0.5,
                           cold=[64, 1024], output=[16, 64], seed=seed, tokens=True) for seed in (1, 2)]  # fmt: skip
        pages = {e.pid: page for e, page in control.engines()}
        self.pages = [pages[e.process.pid] for e in self.engines]
        self.tokens = [e.ask(load)["tokens"] for e, load in zip(self.engines, self.loads)]

    def check(self, attack, good, *words):
        self.wrong += not good
        say(attack, *words, "" if good else "WRONG")

    def same(self, i, answer):
        return sum(a == b for a, b in zip(answer["tokens"], self.tokens[i]))

    def resident(self, i):
        return control.Engine.of("", 0, self.pages[i]).resident

    def used(self):
        free, total = torch.cuda.mem_get_info() if CUDA else (0, 0)
        return total - free

    def limits_move(self):
        page, stop, moved, rounds = self.pages[0], threading.Event(), 0, 0
        least = control.Engine.of("", 0, page).least
        before = control.Engine.of("", 0, page)

        def move():
            nonlocal moved
            draw = random.Random(1)
            while not stop.wait(0.1):
                page[control.LIMIT] = draw.choice([1, 2, 4, 8, 1000]) * least
                moved += 1

        mover = threading.Thread(target=move)
        mover.start()
        same = 0
        end = time.monotonic() + 60 * self.args.minutes
        while time.monotonic() < end:
            for engine, load in zip(self.engines, self.loads):
                engine.tell(load)
            same += sum(self.same(i, engine.answer()) for i, engine in enumerate(self.engines))
            rounds += 1
        stop.set()
        mover.join()
        page[control.LIMIT] = control.NO_LIMIT
        now = control.Engine.of("", 0, page)
        asked = 2 * rounds * self.args.requests
        self.check("limits", True, f"{moved} limits, {rounds} rounds, {asked} requests answered, {same} with their "
                   f"tokens; {now.preempted - before.preempted} preempted, "
                   f"{now.refused - before.refused} orders refused, "
                   f"{now.step_maps - before.step_maps} blocks mapped by steps")  # fmt: skip

    def accounts(self, when):
        """Compare the bytes that the driver gets back when prefix caches are dropped with the engines' own numbers."""
        time.sleep(1.5)
        alive = [i for i, e in enumerate(self.engines) if e.process.poll() is None]
        before = self.used(), sum(map(self.resident, alive))
        for i in alive:
            self.engines[i].ask(dict(self.loads[i], batch=1, output=[1, 2], reset=True))
        time.sleep(1.5)
        after = self.used(), sum(map(self.resident, alive))
        given, said = before[0] - after[0], before[1] - after[1]
        self.check(f"accounts, {when}", not CUDA or abs(given - said) <= PIECES,
                   f"the driver counts {given >> 20} MiB less, the engines {said >> 20} MiB less")  # fmt: skip

    def neighbour_dies(self):
        survivor, victim = self.engines
        victim.tell(self.loads[1])
        survivor.tell(self.loads[0])
        time.sleep(0.5)
        held = self.resident(1)
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.wait()
        same = self.same(0, survivor.answer())
        same += self.same(0, survivor.ask(self.loads[0]))
        left = [e.pid for e, _ in control.engines() if e.pid == victim.process.pid]
        self.check("kill -9", not left, f"the neighbour held {held >> 20} MiB; {2 * self.args.requests} requests "
                   f"answered since, {same} with their tokens; engines that are still listed: {left}")  # fmt: skip

    def stranger(self):
        survivor, before = self.engines[0], control.Engine.of("", 0, self.pages[0])
        survivor.ask(dict(self.loads[0], batch=1, output=[1, 2], reset=True))
        time.sleep(1.5)  # now it holds next to nothing
        stranger = subprocess.Popen([sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    stderr=self.log, text=True)  # fmt: skip
        full = stranger.stdout.readline().strip() == "full"
        survivor.tell(self.loads[0])
        time.sleep(10)
        now = control.Engine.of("", 0, self.pages[0])
        stranger.stdin.close()
        stranger.wait()
        same = self.same(0, survivor.answer())
        self.check("stranger", full, f"{now.refused - before.refused} orders refused in 10 s; then he left, and "
                   f"{self.args.requests} requests were answered, {same} with their tokens")  # fmt: skip

    def run(self):
        self.accounts("at first")
        self.limits_move()
        self.accounts("after limits moved")
        self.neighbour_dies()
        self.accounts("after the neighbour died")
        if CUDA:
            self.stranger()
            self.accounts("after the stranger left")
        return self.wrong


HANGS = 150  # seconds in which servers answer, or refuse
ENDS = 60  # seconds in which what a killed process leaves alone ends
STARTS = 60  # most seconds after its start when a server is killed early
LONGEST = 200  # tokens of an answer
CLIENTS, KILLERS = 4, 2


def plain(folder, prompts):
    """What vLLM itself answers."""
    import engines
    from vllm import SamplingParams

    llm = engines.make(folder, max_model_len=512, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True, detokenize=False)
    answers = llm.generate([dict(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return [list(a.outputs[0].token_ids) for a in answers]


class Kills:
    """Servers of one pool, their clients and their operator, and those who kill them."""

    def __init__(self, args, folder):
        import conftest  # noqa: F401 (the environment of tests)
        import ends
        import engines
        import models
        import test_models

        from pyvmem.tools import models_file

        self.args, self.ends, self.tests = args, ends, test_models
        draw = random.Random(0).randrange
        self.prompts = [[draw(3, 900) for _ in range(n)] for n in (20, 100, 200, 280)]
        models.MODELS["wide"] = dict(models.MODELS["llama"], vocab_size=16000, num_hidden_layers=2)
        engines.in_child(lambda: str(models.write("wide", folder)), vmem=False)
        self.expected = engines.in_child(plain, folder, self.prompts, vmem=False)
        cache = "--kv-cache-memory-bytes", str(32 << 20)
        told = test_models.toml(folder, test_models.POOL, test_models.NAMES, *cache, queue=90)
        self.pool = models_file.read(told)
        self.lock, self.over, self.left = threading.Lock(), threading.Event(), args.kills
        self.counts, self.wrong, self.models, self.down = collections.Counter(), 0, {}, set()

    def count(self, what, wrong=""):
        with self.lock:
            self.counts[what] += 1
            self.wrong += bool(wrong)
        if wrong:
            say(f"kills, {what}", wrong, "WRONG")

    # ---- clients and the operator

    def call(self, model, path, body):
        """The status and the JSON of an answer, or 0 and the error; and whether the server may fail."""
        began, listens = time.monotonic(), model.listens
        try:
            status, _, told = self.tests.call(f"{model.url}{path}", body, timeout=HANGS)
        except (OSError, ValueError, http.client.HTTPException) as error:
            status, told = 0, repr(error)
        if time.monotonic() - began >= HANGS:
            self.count("hangs", f"{path} of {model.name}: {told}")
        return status, told, model.killed or not listens

    def ask(self, model, i, tokens):
        body = dict(model=model.name, prompt=self.prompts[i], max_tokens=tokens, temperature=0, ignore_eos=True,
                    return_token_ids=True)  # fmt: skip
        status, told, fails = self.call(model, "/v1/completions", body)
        if status == 200:
            given = told["choices"][0]["token_ids"]
            self.count("answers", "" if given == self.expected[i][:tokens] else f"{model.name}, prompt {i}: {given}")
        else:
            self.count("failed with their server" if fails else "failures", "" if fails else f"{model.name}: {told}")

    def client(self, seed):
        draw = random.Random(seed)
        while not self.over.wait(draw.random() / 2):
            model = self.models[draw.choice(self.tests.NAMES)]
            self.ask(model, draw.randrange(len(self.prompts)), draw.choice((1, 8, 32, LONGEST)))

    def operator(self, seed):
        draw = random.Random(seed)
        while not self.over.wait(draw.random()):
            model, what, body = self.models[draw.choice(self.tests.NAMES)], draw.choice(("sleep", "wake", "limit")), {}
            if what == "limit":
                least = [e.least for e, _ in control.engines() if e.model == model.name]
                body = dict(limit=draw.choice((1, 2, 4)) * least[0] if least else None)
            status, told, fails = self.call(model, f"/vmem/{what}", body)
            self.count(f"orders: {what}", "" if status in (200, 503) or fails else f"{model.name}: {status}, {told}")

    # ---- who kills

    def start(self, name):
        model = self.tests.Model(self.pool, name)
        model.listens = model.killed = False
        self.models[name] = model
        return model

    def ready(self, model):
        model.wait()
        model.listens = True

    def state(self, model):
        return next((e.state or "starting" for e, _ in control.engines() if e.model == model.name), "starting")

    def kill(self, model, draw):
        """Kill a server or a process of it, once it is in a state that is drawn, if that comes in time."""
        wanted = draw.choice(("awake", "asleep", "waking", "closing"))
        end = time.monotonic() + (5 if model.listens else STARTS * draw.random())
        while self.state(model) != wanted and time.monotonic() < end:
            time.sleep(0.01)
        engine = [e.pid for e, _ in control.engines() if e.model == model.name]
        server, all_of_it = model.process.pid, self.ends.processes(model.process.pid)
        others = [pid for pid in all_of_it if pid not in (server, *engine)]
        kinds = dict(server=[server], engine=engine, worker=others[-1:], all=all_of_it)
        what, killed = draw.choice([(kind, pids) for kind, pids in kinds.items() if pids])
        model.killed, state = True, self.state(model)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with self.lock:
            self.left -= 1
        self.count(f"killed {state}: {what}")
        say("kill", f"{what} of {model.name}, {state}")
        end = time.monotonic() + ENDS
        while model.process.poll() is None or self.ends.processes(server):
            if time.monotonic() > end:
                left = self.ends.processes(server)
                self.count("outlives", f"{model.name}, {what} killed {state}: {left}")
                model.kill()
                break
            time.sleep(0.05)
        if [e for e, _ in control.engines() if e.pid in all_of_it]:
            self.count("listed", f"{model.name}, whose {what} was killed {state}")

    def killer(self, seed):
        draw = random.Random(seed)
        while not self.over.is_set():
            with self.lock:
                if self.left <= 0:
                    return
                name = draw.choice([name for name in self.tests.NAMES if name not in self.down])
                self.down.add(name)
            self.kill(self.models[name], draw)
            model = self.start(name)
            while draw.random() < 0.5:
                self.kill(model, draw)
                model = self.start(name)
            self.ready(model)
            with self.lock:
                self.down.remove(name)

    def run(self):
        program, environ = Path(__file__).with_name("neighbour.py"), self.pool.environment(self.pool.replicas[0])
        with contextlib.ExitStack() as stack:
            stack.callback(self.tell)
            stack.callback(lambda: [model.kill() for model in self.models.values()])
            for model in [self.start(name) for name in self.tests.NAMES]:
                self.ready(model)
            member = self.ends.start(sys.executable, program, env={**os.environ, **environ}, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)  # fmt: skip
            with concurrent.futures.ThreadPoolExecutor(CLIENTS + 1 + KILLERS) as pool:
                stay = [pool.submit(self.client, seed) for seed in range(CLIENTS)] + [pool.submit(self.operator, 0)]
                kill = [pool.submit(self.killer, seed) for seed in range(KILLERS)]
                try:
                    for one in kill:
                        one.result()
                finally:
                    self.over.set()
                for one in stay:
                    one.result()
            for model in self.models.values():
                self.call(model, "/vmem/limit", dict(limit=None))
                for i in range(len(self.prompts)):
                    self.ask(model, i, LONGEST)
                model.kill()
            told, _ = member.communicate(f"take {self.tests.POOL}\n")
            self.count("pool", "" if told.split() == ["here", "done"] else "is not free although all are dead")
        return self.wrong

    def tell(self):
        say("kills", ", ".join(f"{what} {n}" for what, n in sorted(self.counts.items())))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of moving limits (2)")
    parser.add_argument("--kv", type=argtypes.size, default=2 << 30, help="the pool (2G)")
    parser.add_argument("--requests", type=int, default=128, help="of each engine and round (128)")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill processes of three servers instead")
    parser.add_argument("--log", default=os.devnull)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(args.log, "a", encoding="utf-8") as log:
        root = str(Path(__file__).resolve().parents[2])
        paths = [*([str(write(Path(folder)))] if needed() else []), root, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if args.kills:
            return 1 if Kills(args, Path(folder, "wide")).run() else 0
        attack = Attack(args, log)
        try:
            return 1 if attack.run() else 0
        finally:
            for engine in attack.engines:
                engine.close()


if __name__ == "__main__":
    sys.exit(main())
