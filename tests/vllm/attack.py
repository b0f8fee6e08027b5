"""Two engines in one pool, while somebody does his worst: one line for each attack, exit status 1 if one got through.

    python tests/vllm/attack.py --minutes 5                         on a GPU
    python tests/vllm/attack.py --minutes 1 --kv 128M --requests 12   with a CPU build of vLLM

Limits move ten times a second under load; a neighbour is killed under load; a stranger fills the GPU. Requests must all
be answered, the pool must forget the dead, and what the engines say that they hold must be what the driver counts.
"""

import argparse
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of moving limits (2)")
    parser.add_argument("--kv", type=argtypes.size, default=2 << 30, help="the pool (2G)")
    parser.add_argument("--requests", type=int, default=128, help="of each engine and round (128)")
    parser.add_argument("--log", default=os.devnull)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(args.log, "a", encoding="utf-8") as log:
        root = str(Path(__file__).resolve().parents[2])
        paths = [*([str(write(Path(folder)))] if needed() else []), root, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        attack = Attack(args, log)
        try:
            return 1 if attack.run() else 0
        finally:
            for engine in attack.engines:
                engine.close()


if __name__ == "__main__":
    sys.exit(main())
