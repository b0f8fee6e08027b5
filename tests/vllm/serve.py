"""`vllm serve` with and without vMem under the same HTTP clients: one line, exit status 1 if tokens differ.

    python tests/vllm/serve.py llama
    python tests/vllm/serve.py mixtral --data-parallel 2 --expert-parallel

Both servers answer the same requests twice, `--at-once` at a time, the second time from the prefix cache. Then the one
on vMem answers them again while its limit moves ten times a second over HTTP. Batches depend on when requests arrive,
so the line also tells how many of vLLM's own tokens were the same in its two rounds.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import gpu
from entry_point import needed, write

SECONDS = 300  # for a server to start, and for an answer


def ask(url, body=None):
    asked = urllib.request.Request(url, body and json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        return json.loads(answer.read() or b"null")


def free_port():
    """A port that nobody has, below those that the kernel gives to connections until the server listens."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.SystemRandom().randrange(10000, 30000)))
            return free.getsockname()[1]


class Server:
    """`vllm serve` with or without vMem, in a session of its own."""

    def __init__(self, folder, vmem, args, plugin, log):
        port = free_port()
        self.url, self._begin = f"http://127.0.0.1:{port}", time.monotonic()
        environment = dict(gpu.environment_of(vmem, plugin, args.layout), VLLM_SERVER_DEV_MODE="1")
        options = dict(host="127.0.0.1", port=port, served_model_name="model", load_format=gpu.load_format(args.model),
                       max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=2048, seed=0,
                       kv_cache_memory_bytes=args.kv_mib << 20, gpu_memory_utilization=0.1,
                       data_parallel_size=args.data_parallel, tensor_parallel_size=args.tensor_parallel)  # fmt: skip
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--skip-tokenizer-init",
                   "--enable-prefix-caching", *(["--enable-expert-parallel"] if args.expert_parallel else []),
                   *(["--middleware", "pyvmem.vllm.http.Limits"] if vmem else []),
                   *(["--enforce-eager"] if args.eager else [])]  # fmt: skip
        for name, value in options.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self):
        """Until it answers: the seconds since its start."""
        while time.monotonic() < self._begin + SECONDS:
            if self._process.poll() is not None:
                raise RuntimeError(f"a server ended with status {self._process.returncode}; its output is in the log")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                ask(f"{self.url}/health")
                return time.monotonic() - self._begin
            time.sleep(0.5)  # it loads the model; nothing else tells when it listens
        raise RuntimeError("a server did not start in time; its output is in the log")

    def serve(self, prompts, at_once):
        """The tokens of each request, and the seconds."""

        def one(prompt):
            body = dict(model="model", prompt=prompt["prompt_token_ids"], max_tokens=48, temperature=0,
                        ignore_eos=True, return_token_ids=True)  # fmt: skip
            return ask(f"{self.url}/v1/completions", body)["choices"][0]["token_ids"]

        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, prompts)), time.monotonic() - begin

    def engines(self):
        return ask(f"{self.url}/vmem/limit")["engines"]

    def serve_while_limits_move(self, prompts, at_once):
        least, stop = max(e["least"] for e in self.engines()), threading.Event()

        def move():
            draw = random.Random(1)
            while not stop.wait(0.1):
                ask(f"{self.url}/vmem/limit", dict(limit=draw.choice([1, 2, 4, 8, 1000]) * least))

        mover = threading.Thread(target=move)
        mover.start()
        try:
            return self.serve(prompts, at_once)
        finally:
            stop.set()
            mover.join()
            ask(f"{self.url}/vmem/limit", dict(limit=None))

    def close(self):
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def compare(args, folder, plugin, log):
    """One line, and whether all tokens are equal."""
    prompts = gpu.requests_of(args.requests)
    servers = [Server(folder, vmem, args, plugin, log) for vmem in (False, True)]
    try:
        starts = [server.wait() for server in servers]
        found = [[server.serve(prompts, args.at_once) for _ in (0, 1)] for server in servers]
        moved, _ = servers[1].serve_while_limits_move(prompts, args.at_once)
        ask(f"{servers[1].url}/reset_prefix_cache", {})
        time.sleep(1.5)  # the line tells what idle engines still hold then
        engines = servers[1].engines()
    finally:
        for server in servers:
            server.close()
    own, on = ([tokens for round in rounds for tokens in round[0]] for rounds in found)
    same, n = sum(a == b for a, b in zip(own, on)), len(prompts)
    again = sum(a == b for a, b in zip(own, own[n:]))
    seconds = ["/".join(f"{seconds:.1f}" for _, seconds in rounds) for rounds in found]
    counts = {k: sum(e[k] for e in engines) for k in ("steps", "step_maps", "preempted", "refused", "resident")}
    return (f"{args.model}, {len(engines)} engines: {same} of {2 * n} equal ({again} of {n} of vLLM's own are when "
            f"cached, {len(set(map(tuple, own)))} distinct); limit moving: {sum(a == b for a, b in zip(moved, own))} "
            f"of {n}, {counts['preempted']} preempted, {counts['refused']} refused; blocks mapped in steps "
            f"{counts['step_maps']} of {counts['steps']} steps; reset {counts['resident'] >> 20} MiB; seconds "
            f"{seconds[1]} (own {seconds[0]}), start {starts[1]:.1f} ({starts[0]:.1f})"), same == 2 * n  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(gpu.CLASSES))
    parser.add_argument("--data-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--layout", default="auto", choices=("auto", "vllm"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--log", default=os.devnull)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(args.log, "a", encoding="utf-8") as log:
        gpu.write_model(args.model, folder)
        plugin = write(Path(folder, "plugin")) if needed() else None
        line, equal = compare(args, folder, plugin, log)
    print(line, flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
