"""SGLang's own processes on vMem: `sgl.Engine`, and the HTTP server under OpenAI's client."""

import collections
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import ends
import pytest
from models import model
from steps import free_port, workload

SECONDS = 600
OPTIONS = dict(device="cpu", dtype="float32", attention_backend="torch_native", disable_cuda_graph=True,
               mem_fraction_static=0.95, max_total_tokens=16384, sampling_backend="pytorch", page_size=64,
               chunked_prefill_size=512, random_seed=1, log_level="warning")  # fmt: skip
JOBS = workload(24)
ENGINE = """
import asyncio, json, os, sys

if __name__ == "__main__":
    import sglang
    from pyvmem.engine import control

    path, options, jobs = json.load(sys.stdin)
    engine = sglang.Engine(model_path=path, skip_tokenizer_init=True, **options)
    loop, pages, seen = asyncio.get_event_loop(), control.engines(), []

    async def one(ids, n):
        asked = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        made = await engine.async_generate(input_ids=ids, sampling_params=asked)
        if pages:
            seen.append(control.engines()[0][0].backed)
            control.change(pages[0][1], limit=(3 << 20, 12 << 20, None)[len(seen) % 3])
        return made["output_ids"]

    async def all():
        return await asyncio.gather(*(one(*job) for job in jobs))

    tokens = loop.run_until_complete(all())
    left = control.engines()
    print("RESULT", json.dumps([tokens, len(pages), max(seen, default=0), [e.pid for e, _ in left],
                                sorted(e.rank for e, _ in left)]))
    engine.shutdown()
"""

# As RL frameworks start a server.
IN_A_PROCESS = """
import multiprocessing, sys

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    multiprocessing.set_start_method("spawn", force=True)
    server = multiprocessing.Process(target=launch_server, args=(prepare_server_args(sys.argv[1:]),))
    server.start()
    server.join()
"""


def environment(**more):
    return dict(os.environ, **more)


def run(tmp_path, options, **more):
    """The answers of an `sgl.Engine` in a process of its own."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    told = ends.run(sys.executable, script, input=json.dumps([model("gqa"), options, JOBS]), timeout=SECONDS,
                    env=environment(**more))  # fmt: skip
    (line,) = [line[7:] for line in told.stdout.splitlines() if line.startswith("RESULT ")] or [""]
    return (json.loads(line) if line else None), told


def test_an_engine_gives_sglangs_tokens_while_limits_move(tmp_path):
    own, _ = run(tmp_path, OPTIONS)
    told, _ = run(tmp_path, OPTIONS, VMEM_SGLANG="1")
    assert own[0] == told[0]
    assert own[1] == 0 and told[1] == 1 and told[2] > 0


def test_schedulers_side_by_side_have_a_page_each(tmp_path):
    """Data parallelism without DP attention: two whole engines behind one door."""
    bind = dict(SGLANG_CPU_OMP_THREADS_BIND="0|0")  # without it, SGLang wants a NUMA node for each
    told, _ = run(tmp_path, dict(OPTIONS, dp_size=2, max_total_tokens=8192), VMEM_SGLANG="1", **bind)
    own, _ = run(tmp_path, OPTIONS)
    assert told[0] == own[0] and told[1] == 2 and told[4] == [0, 1]


def test_what_cannot_work_ends_the_engine_with_one_line(tmp_path):
    answer, told = run(tmp_path, dict(OPTIONS, enable_lmcache=True), VMEM_SGLANG="1")
    assert answer is None and told.returncode
    assert told.stderr.rstrip().splitlines()[-1].startswith("pyvmem: VMEM_SGLANG=1: LMCache copies rows")


def get(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The addresses of SGLang's own server, and of one on vMem with its limits over HTTP, the target of a Process."""
    started, script = [], tmp_path_factory.mktemp("server") / "serve.py"
    script.write_text(IN_A_PROCESS)
    for more, begin in (
        (dict(VMEM_SGLANG="0"), ["-m", "sglang.launch_server"]),
        (dict(VMEM_SGLANG="1", VMEM_SGLANG_HTTP="1"), [script]),
    ):
        port = free_port()
        command = [sys.executable, *begin, "--model-path", model("gqa"), "--port", str(port), "--sleep-on-idle"]
        for name, value in OPTIONS.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        started.append((ends.start(*command, env=environment(**more)),
                        f"http://127.0.0.1:{port}"))  # fmt: skip
    end = time.monotonic() + SECONDS
    try:
        for process, address in started:
            while not answers(f"{address}/health"):
                assert process.poll() is None, f"the server ended with status {process.returncode}"
                assert time.monotonic() < end, "the server did not start in time"
                time.sleep(0.5)  # it loads the model; nothing else tells when it listens
        yield [address for _, address in started]
    finally:
        for process, _ in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def answers(url):
    try:
        get(url)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def test_the_server_gives_sglangs_tokens_to_openais_client(servers):
    from openai import OpenAI

    def ask(address):
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        return [
            client.completions.create(model="tiny", prompt=prompt, max_tokens=n, temperature=0,
                                      extra_body={"ignore_eos": True}).choices[0].text
            for prompt, n in JOBS[:8]
        ]  # fmt: skip

    own, address = ask(servers[0]), servers[1]
    assert ask(address) == own
    (engine,) = json.loads(get(f"{address}/vmem/limit"))["engines"]
    assert engine["steps"] > 0 and engine["backed"] > 0
    (engine,) = json.loads(get(f"{address}/vmem/limit", {"limit": 2 * engine["least"]}))["engines"]
    assert ask(address) == own
    (now,) = json.loads(get(f"{address}/vmem/limit"))["engines"]
    assert now["allowed"] <= 2 * engine["least"]
    assert "sglang:vmem_kv_backed_bytes" in get(f"{address}/vmem/metrics")
    top = subprocess.run([sys.executable, "-m", "pyvmem", "top", "--once"], capture_output=True, text=True, check=True)
    assert engine["name"] in top.stdout
    get(f"{address}/flush_cache", {})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        get(f"{address}/vmem/limit", {"limits": 5})


def test_the_servers_tokens_stay_while_everything_happens_at_once(servers):
    """Limits, flushes and aborts beside requests of eight clients; then the memory is released, and resumed."""
    own, address = servers[:2]
    least = json.loads(get(f"{address}/vmem/limit"))["engines"][0]["least"]
    stop, happened = threading.Event(), collections.Counter()

    def ask(address, job):
        prompt, n = job
        asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}}
        return json.loads(get(f"{address}/generate", asked))["output_ids"]

    def disturb():
        draw = random.Random(2)
        while not stop.wait(0.05):
            limit = draw.choice((1, least, 2 * least, 4 * least, None))
            get(f"{address}/vmem/limit", {"limit": limit})
            try:
                get(f"{address}/flush_cache", {})
                happened["flushed"] += 1
            except urllib.error.HTTPError:  # requests run
                happened["not flushed"] += 1
            get(f"{address}/abort_request", {"rid": f"gone {happened['gone']}"})

    def begin_and_abort():
        while not stop.is_set():
            asked = {"input_ids": JOBS[0][0], "rid": f"gone {happened['gone']}",
                     "sampling_params": {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}}  # fmt: skip
            try:
                get(f"{address}/generate", asked)
            except urllib.error.HTTPError:
                pass
            happened["gone"] += 1

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        wanted = list(pool.map(lambda job: ask(own, job), JOBS))
        others = [threading.Thread(target=disturb), threading.Thread(target=begin_and_abort)]
        for thread in others:
            thread.start()
        try:
            got = [list(pool.map(lambda job: ask(address, job), JOBS)) for _ in range(2)]
        finally:
            stop.set()
            for thread in others:
                thread.join()
        get(f"{address}/vmem/limit", {"limit": None})
        assert got == [wanted, wanted] and happened["not flushed"] and happened["gone"]
        get(f"{address}/release_memory_occupation", {"tags": ["kv_cache"]})
        (engine,) = json.loads(get(f"{address}/vmem/limit"))["engines"]
        assert engine["cached"] == engine["used"] == 0 and engine["backed"] <= engine["block_bytes"]
        get(f"{address}/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert list(pool.map(lambda job: ask(address, job), JOBS)) == wanted


@pytest.mark.parametrize("more, kind", [(dict(), ""), (dict(VMEM_SGLANG_HTTP="1"), "Limits")])
def test_the_server_has_no_limits_over_http_unless_asked_for(more, kind):
    """It takes what answers for vMem from its plugins, before it is a server."""
    program = """
from sglang.srt.plugins import load_plugins
from sglang.srt.entrypoints.http_server import app

load_plugins()
print("RESULT", *(one.cls.__name__ for one in app.user_middleware if one.cls.__module__.startswith("pyvmem")))
"""
    told = ends.run(sys.executable, "-c", program, timeout=SECONDS, env=environment(VMEM_SGLANG="1", **more))
    assert told.stdout.split("RESULT")[-1].split() == kind.split(), told.stderr
