"""``vllm serve`` on vMem under minutes of mixed load (`make test-vllm`: a GPU, vLLM and openai installed).

``vllm bench serve`` and the `openai` client load one server together: streams, aborts of every tenth request, prompts
that are too long, bursts beyond the memory, and a smaller limit for one round. After each round the server becomes
idle, and what it holds is compared with the first round and with the driver. VMEM_TEST_VLLM_MINUTES says how long
(0.5), VMEM_TEST_VLLM_LOGS where load.json and the logs go.

SPDX-License-Identifier: MIT
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_vllm_serve as serve  # noqa: E402

pytestmark = serve.pytestmark
MINUTES = float(os.environ.get("VMEM_TEST_VLLM_MINUTES") or 0.5)
KV_BYTES, CACHED = 64 << 20, 4096  # KV memory, of 32,768 tokens; tokens of the prefix cache at most
SETTINGS = [
    "--load-format", "dummy", "--max-model-len", "1024", "--max-num-seqs", "64", "--enforce-eager",
    "--enable-prefix-caching", "--kv-cache-memory-bytes", str(KV_BYTES), "--gpu-memory-utilization", "0.05",
    "--block-size", "32", "--served-model-name", "model",
]  # fmt: skip
SMALL = 24 << 20  # the limit for one round
STEADY, BURST = 16, 80  # requests at a time
RATE = 10  # requests per second of vllm bench serve
STARTS = 25  # seconds that it takes to start, about


def bench(server, folder, seconds, seed):
    """Start vLLM's own load generator. Returns the process and the file of its results."""
    out = folder / f"bench{seed}.json"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url",
        f"http://127.0.0.1:{server.port}", "--model", str(folder), "--served-model-name", "model", "--dataset-name",
        "random", "--random-input-len", "300", "--random-output-len", "100", "--random-range-ratio", "0.5",
        "--num-prompts", str(max(10, int(seconds * RATE))), "--request-rate", str(RATE), "--ignore-eos", "--seed",
        str(seed), "--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", out.name,
    ]  # fmt: skip
    with open(server.log.parent / f"bench{seed}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=dict(server.environment, VMEM_VLLM="0")), out


class Load:
    """What the openai client asks for, and what became of it."""

    def __init__(self, server):
        self.server = server
        self.number = 0
        self.found = dict(served=0, aborted=0, refused=0, tokens=0)
        self.errors = []

    async def one(self, client, tokens, output):
        import openai

        i, self.number = self.number, self.number + 1
        too_long, aborted = i % 50 == 25, i % 10 == 9
        try:
            got = await serve.complete(client, i, tokens=2048 if too_long else tokens, output=output,
                                       abort_after=5 if aborted else None)  # fmt: skip
        except openai.BadRequestError:
            self.found["refused"] += 1
            if not too_long:
                self.errors.append(f"request {i} was refused")
        except Exception as error:
            self.errors.append(f"request {i}: {type(error).__name__}: {error} ({error.__cause__!r})")
        else:
            self.found["aborted" if aborted else "served"] += 1
            self.found["tokens"] += len(got or ())
            if too_long or (not aborted and len(got) != output):
                self.errors.append(f"request {i} got {len(got or ())} tokens of {output}")

    async def steady(self, client, going_on):
        while going_on():
            await self.one(client, 30 + 53 * self.number % 600, 20 + 37 * self.number % 150)

    async def round(self, seconds, other=None):
        """Load the server for so long, and until the other load generator has ended."""
        client = self.server.client()
        until = time.monotonic() + seconds

        def going_on():
            return time.monotonic() < until or (other is not None and other.poll() is None)

        try:
            jobs = [asyncio.ensure_future(self.steady(client, going_on)) for _ in range(STEADY)]
            while going_on():  # 64 of them at a time would want 51,200 tokens
                await asyncio.gather(*(self.one(client, 600, 200) for _ in range(BURST)))
                await asyncio.sleep(min(5, max(until - time.monotonic(), 1)))
            await asyncio.gather(*jobs)
        finally:
            await client.close()


def resident(pid):
    """Host memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def driver_bytes(pid):
    """Device memory of a process as the driver reports it; None where it reports none by process."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        processes = [p for h in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]
    except Exception:  # no NVML, or no right to ask it
        return None
    used = [p.usedGpuMemory for p in processes if p.pid == pid]
    return sum(used) if used and None not in used else None


def metric(text, name):
    """The value of a metric without regard to labels."""
    return float(re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE).group(1))


def account(server):
    """What an idle server holds, in the words of everybody who counts. Waits until it is idle."""

    def idle():
        (cache,) = server.caches()
        return cache["active_slots"] == 0 and cache["held_pages"] == cache["prefix_pages"]

    waited = serve.wait_for(idle, 20)
    (cache,) = server.caches()
    text = server.get("/metrics")
    return dict(
        idle=waited, held=cache["held_pages"] * cache["page_size"], prefix_pages=cache["prefix_pages"],
        metric=metric(text, "vllm:vmem_kv_held_pages") * cache["page_size"], driver=driver_bytes(cache["pid"]),
        running=metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting"),
        engine_rss=resident(cache["pid"]), server_rss=resident(server.process.pid), pid=cache["pid"],
        steps=cache["steps"],
    )  # fmt: skip


def sample(server, rows, over):
    """Every five seconds: what vMem holds, and what the driver counts for its process."""
    while not over.wait(5):
        try:
            (cache,) = server.caches()
        except (AssertionError, ValueError, OSError):  # the server is ending
            return
        rows.append((cache["held_pages"] * cache["page_size"], cache["active_slots"], driver_bytes(cache["pid"])))


def test_minutes_of_mixed_load(tmp_path):
    server = serve.Server(tmp_path, SETTINGS, CACHED, "load.log")
    rounds = max(2, round(MINUTES))
    report = dict(minutes=MINUTES, rounds=[], accounts=[], samples=[])
    over = threading.Event()

    def write():
        (server.log.parent / "load.json").write_text(json.dumps(report, indent=1))

    try:
        assert serve.wait_for(server.healthy, 240, so_long=server.alive), server.log.read_text()[-3000:]
        load = Load(server)
        asyncio.run(load.round(1))  # warms up
        report["accounts"].append(account(server))
        began = time.monotonic()
        watch = threading.Thread(target=sample, args=(server, report["samples"], over), daemon=True)
        watch.start()
        for i in range(rounds):
            seconds = MINUTES * 60 * (i + 1) / rounds - (
                time.monotonic() - began
            )  # the rounds before may have been longer
            small = i == rounds // 2
            if small:
                server.top("--once", "--limit", f"{report['accounts'][0]['pid']}={SMALL}")
            process, results = bench(server, tmp_path, max(5.0, seconds - STARTS), i)
            asyncio.run(load.round(seconds, process))
            status = process.wait()
            made = json.loads(results.read_text()) if results.exists() else {}
            if small:
                server.top("--once", "--limit", f"{report['accounts'][0]['pid']}={KV_BYTES}")
            report["rounds"].append(dict(
                small=small, bench_status=status, seconds=time.monotonic() - began, client=dict(load.found),
                preemptions=metric(server.get("/metrics"), "vllm:num_preemptions_total"),
                **{k: made.get(k) for k in ("completed", "failed", "output_throughput", "p99_ttft_ms")},
            ))  # fmt: skip
            report["accounts"].append(account(server))
            write()
        log = server.log.read_text()
        report["log"] = sorted({line[:300] for line in log.splitlines() if re.search("ERROR|CRITICAL|Traceback", line)})
        report["errors"] = load.errors
        write()
    finally:
        over.set()
        server.stop()
    assert load.errors == []
    for each in report["rounds"]:
        assert (each["bench_status"], each["failed"]) == (0, 0), each
        assert each["completed"]
    assert min(load.found.values()) > 0
    assert "Traceback" not in log
    first, *others = report["accounts"][1:]
    for each in (first, *others):
        assert each["idle"]
        assert each["running"] == 0
        assert each["held"] == each["metric"] <= CACHED * KV_BYTES // 32768
        if each["driver"] and first["driver"]:  # what the driver counts moves with what vMem counts
            assert abs((each["driver"] - first["driver"]) - (each["held"] - first["held"])) <= 64 << 20
    assert others[-1]["engine_rss"] - first["engine_rss"] <= 256 << 20
    assert others[-1]["server_rss"] - first["server_rss"] <= 256 << 20


@pytest.mark.parametrize("text", ['vllm:a{x="1"} 2.0\nvllm:ab 3', "vllm:a 2.0"])
def test_a_metric_is_found_by_its_whole_name(text):
    assert metric(text, "vllm:a") == 2
